//! qrun against llama.cpp in one process: the same file, the same ggml, the same threads, turn and turn about.
//!
//! `cargo bench --bench side_by_side -- [--device D] [--repack] [--text] [-p N] [-n N] [-r N] [-t N] [--json OUT] FILE...`
//!
//! A file may be `synthetic:SHAPE[:TYPE]`, which is written to the folder for temporary files first.
//!
//! Each repetition clears both, reads a prompt and decodes greedily; qrun and llama.cpp take turns at going first.
//! llama.cpp loads as it does by default (mapped, then repacked for this CPU); `--repack` makes qrun repack too.
//! The table has medians over the repetitions, and the smallest and largest ratio of a pair.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser;
use ggml_metal::peer::{PeerContext, PeerModel, PeerOptions, PeerParams};
use ggml_metal::{Backend, DType, Device, Repack, find_device, performance_cores};
use qrun::engine::{Engine, EngineParams};
use qrun::model::shapes::{Fill, Synthetic};
use qrun::session::{CancelToken, Outputs, Session, SessionParams};
use serde_json::json;

#[derive(Parser)]
struct Args {
    /// GGUF files [default: the demo model]
    files: Vec<PathBuf>,
    /// Prompt tokens
    #[arg(short, long, default_value_t = 512)]
    prompt: usize,
    /// Tokens to decode
    #[arg(short, long, default_value_t = 128)]
    n_decode: usize,
    /// Repetitions
    #[arg(short, long, default_value_t = 7)]
    repetitions: usize,
    /// Threads [default: performance cores]
    #[arg(short, long)]
    threads: Option<usize>,
    /// The device that both compute on
    #[arg(long, default_value = "CPU")]
    device: String,
    /// Let qrun repack weights too
    #[arg(long)]
    repack: bool,
    /// Decode text as qrun does: the device finds the best token, where it is faster at that. Without, both copy the logits of
    /// every token and look through them
    #[arg(long)]
    text: bool,
    /// Starts of both, timed to the first token
    #[arg(long, default_value_t = 5)]
    starts: usize,
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// What `cargo bench` passes
    #[arg(long, hide = true)]
    bench: bool,
}

/// Tokens that both decode before anything is timed.
const WARM_UP: usize = 8;

/// What one side did in one repetition.
struct Run {
    prompt: Duration,
    decode: Duration,
    /// Time inside the device's computations while decoding; unknown for llama.cpp.
    compute: Duration,
    tokens: Vec<u32>,
}

fn main() {
    let mut args = Args::parse();
    if args.files.is_empty() {
        args.files
            .push(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/demo-Q4_K_M.gguf"));
    }
    let n_threads = args.threads.unwrap_or_else(performance_cores);
    println!(
        "qrun {} | {} | {n_threads} threads | prompt {}, decode {}, {} repetitions | qrun {}, llama.cpp repacked",
        *qrun::VERSION,
        args.device,
        args.prompt,
        args.n_decode,
        args.repetitions,
        if args.repack {
            "mapped and repacked"
        } else {
            "mapped"
        },
    );
    println!(
        "| file | | qrun | llama.cpp | ratio (smallest to largest) |\n| --- | --- | --- | --- | --- |"
    );
    let results: Vec<_> = args
        .files
        .iter()
        .map(|file| compare(file, &args, n_threads))
        .collect();
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&results).unwrap()).unwrap();
    }
}

fn compare(file: &Path, args: &Args, n_threads: usize) -> serde_json::Value {
    let synthetic = Synthetic::parse(file).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let written = folder.path().join("model.gguf");
    let (file, name) = match synthetic {
        Some(model) => {
            let gguf = model.make(Fill::All).unwrap();
            std::fs::write(&written, gguf.map().bytes()).unwrap();
            (&*written, model.name())
        }
        None => (
            file,
            file.file_name().unwrap().to_string_lossy().into_owned(),
        ),
    };
    let device = find_device(Some(&args.device)).unwrap();
    let n_ctx = args.prompt + args.n_decode.max(WARM_UP) + 1;
    let params = EngineParams {
        device: Some(args.device.clone()),
        n_threads: Some(n_threads),
        repack: if args.repack {
            Repack::Beside
        } else {
            Repack::Never
        },
        mtp: None,
    };
    let before = anonymous_kib();
    let start = Instant::now();
    let engine = Engine::load(file, &params, &mut |_, _| {}).unwrap();
    let our_load = start.elapsed();
    let session_params = SessionParams {
        n_ctx,
        ..SessionParams::default()
    };
    let mut session = Session::new(engine.clone(), session_params).unwrap();
    let prompt = prompt(args.prompt, &engine);
    ours(&mut session, &prompt, WARM_UP, args.text);
    let our_memory = anonymous_kib() - before;

    let before = anonymous_kib();
    let start = Instant::now();
    let model = peer_model(file, device);
    let their_load = start.elapsed();
    let cpu = engine.backends().last().unwrap();
    let mut peer = PeerContext::new(&model, cpu, &peer_params(n_ctx)).unwrap();
    theirs(&mut peer, &prompt, WARM_UP);
    let their_memory = anonymous_kib() - before;

    let (mut a, mut b) = (Vec::new(), Vec::new());
    for i in 0..args.repetitions {
        if i % 2 == 0 {
            a.push(ours(&mut session, &prompt, args.n_decode, args.text));
            b.push(theirs(&mut peer, &prompt, args.n_decode));
        } else {
            b.push(theirs(&mut peer, &prompt, args.n_decode));
            a.push(ours(&mut session, &prompt, args.n_decode, args.text));
        }
    }

    let row = |what: &str, n: usize, of: &dyn Fn(&Run) -> Duration| {
        let rate = |r: &Run| n as f64 / of(r).as_secs_f64();
        let (ours, theirs): (Vec<f64>, Vec<f64>) =
            (a.iter().map(rate).collect(), b.iter().map(rate).collect());
        let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(a, b)| a / b).collect();
        let (low, high) = spread(&ratios);
        println!(
            "| {name} | {what} tok/s | {:.1} | {:.1} | {:.3} ({low:.3} to {high:.3}) |",
            median(&ours),
            median(&theirs),
            median(&ratios)
        );
        json!({"qrun": ours, "llama.cpp": theirs, "ratio": median(&ratios), "smallest": low, "largest": high})
    };
    let prompt_row = row("prompt", args.prompt, &|r| r.prompt);
    let decode_row = row("decode", args.n_decode, &|r| r.decode);
    let outside: Vec<f64> = a
        .iter()
        .map(|r| 1.0 - r.compute.as_secs_f64() / r.decode.as_secs_f64())
        .collect();
    println!(
        "| {name} | decode time outside the graph | {:.2} % | | |",
        100.0 * median(&outside)
    );
    // Last, and alone: what was loaded before would change memory and caches.
    drop((session, engine, peer, model));
    let (first_ours, first_theirs) = &match args.starts {
        0 => (Vec::new(), Vec::new()),
        _ => first_tokens(file, args, &params, n_ctx),
    };
    if args.starts > 0 {
        let pairs = first_ours.iter().zip(first_theirs);
        let ratios: Vec<f64> = pairs.map(|(a, b)| a / b).collect();
        let (low, high) = spread(&ratios);
        println!(
            "| {name} | start to first token ms | {:.0} | {:.0} | {:.3} ({low:.3} to {high:.3}) |",
            1e3 * median(first_ours),
            1e3 * median(first_theirs),
            median(&ratios)
        );
    }
    println!(
        "| {name} | load ms | {:.0} | {:.0} | |",
        our_load.as_secs_f64() * 1e3,
        their_load.as_secs_f64() * 1e3
    );
    println!(
        "| {name} | anonymous memory MiB | {} | {} | |",
        our_memory / 1024,
        their_memory / 1024
    );
    let equal = a[0]
        .tokens
        .iter()
        .zip(&b[0].tokens)
        .take_while(|(a, b)| a == b)
        .count();
    let stable = a.iter().all(|r| r.tokens == a[0].tokens);
    println!(
        "| {name} | tokens | {equal} of {} equal{} | | |",
        args.n_decode,
        if stable {
            ""
        } else {
            ", and qrun's differ between repetitions"
        }
    );
    json!({
        "file": name, "threads": n_threads, "prompt": prompt_row, "decode": decode_row,
        "outside_the_graph": median(&outside),
        "first_token_s": {"qrun": first_ours, "llama.cpp": first_theirs},
        "load_ms": [our_load.as_millis() as u64, their_load.as_millis() as u64],
        "anonymous_kib": [our_memory, their_memory],
        "equal_tokens": equal, "decoded": args.n_decode,
    })
}

fn peer_model(file: &Path, device: Device) -> PeerModel {
    let options = PeerOptions {
        repack: true,
        device: Some(device),
        ..PeerOptions::default()
    };
    PeerModel::load(file, &options).unwrap()
}

fn peer_params(n_ctx: usize) -> PeerParams {
    PeerParams {
        n_ctx,
        n_batch: 512,
        flash_attn: true,
        type_k: DType::F16,
        type_v: DType::F16,
    }
}

fn prompt(n: usize, engine: &Engine) -> Vec<u32> {
    (0..n as u64)
        .map(|i| (i * 2_654_435_761 % engine.config().n_vocab as u64) as u32)
        .collect()
}

/// Seconds from nothing but a file in the system's cache to the first token after the prompt, of both in turns.
fn first_tokens(
    file: &Path,
    args: &Args,
    params: &EngineParams,
    n_ctx: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    // The first round reads the file and is not counted.
    for round in 0..=args.starts {
        let start = Instant::now();
        let engine = Engine::load(file, params, &mut |_, _| {}).unwrap();
        let session_params = SessionParams {
            n_ctx,
            ..SessionParams::default()
        };
        let mut session = Session::new(engine.clone(), session_params).unwrap();
        let prompt = prompt(args.prompt, &engine);
        ours(&mut session, &prompt, 0, false);
        let ours = start.elapsed().as_secs_f64();
        drop((session, engine));

        let start = Instant::now();
        // Each side starts its own threads.
        let device = find_device(Some(&args.device)).unwrap();
        let cpu = find_device(Some("CPU")).unwrap();
        let threads = Backend::new(cpu, params.n_threads).unwrap();
        let model = peer_model(file, device);
        let mut peer = PeerContext::new(&model, &threads, &peer_params(n_ctx)).unwrap();
        theirs(&mut peer, &prompt, 0);
        if round > 0 {
            a.push(ours);
            b.push(start.elapsed().as_secs_f64());
        }
    }
    (a, b)
}

fn ours(session: &mut Session, prompt: &[u32], n: usize, text: bool) -> Run {
    session.clear().unwrap();
    let never = CancelToken::default();
    let start = Instant::now();
    let mut token = best(session.eval(prompt, Outputs::Last, &never).unwrap());
    let prompt = start.elapsed();
    let compute = session.compute_time();
    let start = Instant::now();
    let mut tokens = Vec::with_capacity(n);
    for _ in 0..n {
        tokens.push(token);
        token = if text && session.finds_best(1) {
            session.eval_best(&[token], 0, 1, &never).unwrap()[0].0
        } else {
            best(session.eval(&[token], Outputs::Last, &never).unwrap())
        };
    }
    Run {
        prompt,
        decode: start.elapsed(),
        compute: session.compute_time() - compute,
        tokens,
    }
}

fn theirs(peer: &mut PeerContext, prompt: &[u32], n: usize) -> Run {
    peer.clear();
    let start = Instant::now();
    let mut token = best(&peer.decode(prompt, false).unwrap());
    let prompt = start.elapsed();
    let start = Instant::now();
    let mut tokens = Vec::with_capacity(n);
    for _ in 0..n {
        tokens.push(token);
        token = best(peer.next(token).unwrap());
    }
    Run {
        prompt,
        decode: start.elapsed(),
        compute: Duration::ZERO,
        tokens,
    }
}

/// The best token of the last row.
fn best(logits: &[f32]) -> u32 {
    let mut sampler = qrun::sampler::Sampler::new(qrun::sampler::SamplerParams::greedy()).unwrap();
    sampler.sample(logits, 0).unwrap()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0
}

fn spread(values: &[f64]) -> (f64, f64) {
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    (min, values.iter().copied().fold(0.0, f64::max))
}

/// Memory that the system cannot take back by dropping file pages; 0 where it does not tell.
fn anonymous_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}
