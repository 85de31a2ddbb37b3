//! Two ways to undo a rejected draft in the gated delta nets, on layers of real shape.
//!
//! `cargo bench --bench rollback -- [--device NAME] [-t N] [-r N]`
//!
//! *Snapshots*: the operation leaves the state after every token in the cache, and the next pass begins from the one
//! that counts. *Late commit*: the cache holds the state before the pass and the tokens' keys, values, decays and
//! strengths; the next pass first replays those that count, keeps that state, and then goes on from it with a second
//! operation. The table has the time for all delta-net layers of a pass, the smallest of the repetitions, taken in
//! turn; a plain pass of the same width, which keeps one state, is the cost that neither can avoid.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::Instant;

use clap::Parser;
use ggml_metal::{Backend, Context, DType, Graph, Tensor, find_device};

#[derive(Parser)]
struct Args {
    /// Device [default: the CPU]
    #[arg(long, default_value = "CPU")]
    device: String,
    /// CPU threads [default: performance cores]
    #[arg(short, long)]
    threads: Option<usize>,
    /// Repetitions
    #[arg(short, long, default_value_t = 15)]
    repetitions: usize,
    /// What `cargo bench` passes
    #[arg(long, hide = true)]
    bench: bool,
}

/// Key heads, value heads and delta-net layers; heads are of 128 values.
const SHAPES: [(&str, i64, i64, usize); 3] = [
    ("0.8B", 16, 16, 18),
    ("9B", 16, 32, 24),
    ("27B", 16, 48, 48),
];
const SIZE: i64 = 128;

/// Inputs of one layer's operation for `n` tokens.
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
}

fn main() {
    let args = Args::parse();
    let device = find_device(Some(&args.device)).unwrap();
    let backend = Backend::new(device, args.threads).unwrap();
    println!(
        "{} {} | {} repetitions | milliseconds for all delta-net layers",
        device.name(),
        device.description(),
        args.repetitions
    );
    println!(
        "| shape | width | plain | snapshots | late commit, all accepted | late commit, one accepted |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, n_k, n_v, n_layers) in SHAPES {
        for width in [2, 4, 6] {
            let mut ways = [
                one_operation(&backend, n_k, n_v, n_layers, width, 1),
                one_operation(&backend, n_k, n_v, n_layers, width, width),
                late_commit(&backend, n_k, n_v, n_layers, width, width),
                late_commit(&backend, n_k, n_v, n_layers, width, 1),
            ];
            let mut best = [f64::INFINITY; 4];
            for _ in 0..args.repetitions {
                for (graph, best) in ways.iter_mut().zip(&mut best) {
                    let start = Instant::now();
                    graph.compute().unwrap();
                    *best = best.min(1e3 * start.elapsed().as_secs_f64());
                }
            }
            let [plain, snapshots, all, one] = best;
            println!("| {name} | {width} | {plain:.3} | {snapshots:.3} | {all:.3} | {one:.3} |");
        }
    }
}

fn inputs(ctx: &Context, il: usize, n_k: i64, n_v: i64, n: i64) -> Inputs {
    let new =
        |what: &str, shape: &[i64]| ctx.new_tensor(&format!("{what}-{il}"), DType::F32, shape);
    Inputs {
        q: new("q", &[SIZE, n_k, n, 1]),
        k: new("k", &[SIZE, n_k, n, 1]),
        v: new("v", &[SIZE, n_v, n, 1]),
        g: new("g", &[1, n_v, n, 1]),
        beta: new("beta", &[1, n_v, n, 1]),
    }
}

fn layers<T>(n: usize, mut make: impl FnMut(usize) -> T) -> Vec<T> {
    (0..n).map(&mut make).collect()
}

/// One operation a layer, which leaves `n_states` states in the cache.
fn one_operation(
    backend: &Backend,
    n_k: i64,
    n_v: i64,
    n_layers: usize,
    width: i64,
    n_states: i64,
) -> Graph {
    let memory = Context::new(6 * n_layers).unwrap();
    let (n_out, n_state) = (SIZE * n_v * width, SIZE * SIZE * n_v);
    let all = layers(n_layers, |il| {
        let room = n_out + width * n_state;
        let cache = memory.new_tensor(&format!("cache-{il}"), DType::F32, &[room]);
        (inputs(&memory, il, n_k, n_v, width), cache)
    });
    memory.allocate(backend, "a measurement").unwrap();
    let ctx = Context::new(8 * n_layers).unwrap();
    for (x, cache) in &all {
        let state = state_view(&ctx, cache, n_out, n_v);
        let out = ctx.gated_delta_net(&x.q, &x.k, &x.v, &x.g, &x.beta, &state, n_states);
        ctx.place(&out, cache, 0);
        ctx.expand(&out);
    }
    Graph::new(ctx, std::slice::from_ref(backend)).unwrap()
}

/// Replays `accepted` tokens of the pass before, keeps their state, and goes on from it with `width` new ones, whose
/// inputs are kept for the next replay.
fn late_commit(
    backend: &Backend,
    n_k: i64,
    n_v: i64,
    n_layers: usize,
    width: i64,
    accepted: i64,
) -> Graph {
    let memory = Context::new(12 * n_layers).unwrap();
    let (n_out, n_state) = (SIZE * n_v * accepted, SIZE * SIZE * n_v);
    let all = layers(n_layers, |il| {
        let cache = memory.new_tensor(&format!("cache-{il}"), DType::F32, &[n_out + n_state]);
        let kept = inputs(&memory, il + n_layers, n_k, n_v, width);
        (inputs(&memory, il, n_k, n_v, width), kept, cache)
    });
    memory.allocate(backend, "a measurement").unwrap();
    let ctx = Context::new(40 * n_layers).unwrap();
    for (x, kept, cache) in &all {
        let first = |t: &Tensor| {
            let shape = [t.ne(0), t.ne(1), accepted, 1];
            ctx.view(t, &shape, &[t.nb(1), t.nb(2), t.nb(3)], 0)
        };
        let state = state_view(&ctx, cache, n_out, n_v);
        let (k, v) = (first(&kept.k), first(&kept.v));
        let (g, beta) = (first(&kept.g), first(&kept.beta));
        // Nobody reads the replayed outputs, so any queries will do.
        let replayed = ctx.gated_delta_net(&k, &k, &v, &g, &beta, &state, 1);
        ctx.place(&replayed, cache, 0);
        ctx.expand(&replayed);
        let committed = state_view(&ctx, &replayed, n_out, n_v);
        let out = ctx.gated_delta_net(&x.q, &x.k, &x.v, &x.g, &x.beta, &committed, 1);
        ctx.expand(&out);
        for (from, to) in [
            (&x.k, &kept.k),
            (&x.v, &kept.v),
            (&x.g, &kept.g),
            (&x.beta, &kept.beta),
        ] {
            ctx.expand(&ctx.cpy(from, to));
        }
    }
    Graph::new(ctx, std::slice::from_ref(backend)).unwrap()
}

/// The state that begins after `n_out` outputs.
fn state_view(ctx: &Context, cache: &Tensor, n_out: i64, n_v: i64) -> Tensor {
    let (element, column) = (cache.nb(0), SIZE as usize * cache.nb(0));
    let square = column * SIZE as usize;
    let flat = ctx.reshape(cache, &[cache.n_elements() as i64]);
    ctx.view(
        &flat,
        &[SIZE, SIZE, n_v, 1],
        &[column, square, square * n_v as usize],
        n_out as usize * element,
    )
}
