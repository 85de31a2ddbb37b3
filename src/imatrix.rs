//! Importance matrices: how large the inputs of each weight are on a text, summed chunk by chunk.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use convert::imatrix::{Entry, Imatrix};
use ggml_metal::DType;

use crate::engine::Engine;
use crate::model::forward::{HeadPass, Observed, ObservedInputs, TrunkGraph, TrunkShape};
use crate::session::{PlannedBytes, SessionBytes};
use crate::state::{KV_PAD, KvTypes, State};

/// Sums under way, in double precision: thousands of chunks add up.
#[derive(Default)]
struct Sums {
    squares: Vec<f64>,
    counts: Vec<f64>,
}

/// Observes the weights on `tokens`, cut into chunks of `chunk_size`; what is left at the end is dropped. Each chunk
/// starts afresh, with `bos` in place of its first token where there is one. The draft head is observed too where
/// the model has a usable one. `progress` is told chunks done, and stops the work by returning false: what there is
/// until then comes out.
///
/// # Errors
/// When the text is shorter than a chunk, memory runs out, the device fails, or a weight sees a value that is not a
/// number.
pub fn collect(
    engine: &Arc<Engine>,
    tokens: &[u32],
    chunk_size: usize,
    bos: Option<u32>,
    progress: &mut dyn FnMut(usize) -> bool,
) -> Result<Imatrix> {
    ensure!(
        chunk_size >= 2 && tokens.len() >= chunk_size,
        "{} tokens are too few for chunks of {chunk_size}; give a longer text, or a smaller -c",
        tokens.len()
    );
    let (mut state, mut graph) = observing(engine, chunk_size)?;
    let mut sums = BTreeMap::new();
    let mut n_chunks = 0;
    for chunk in tokens.chunks_exact(chunk_size) {
        let mut chunk = chunk.to_vec();
        if let Some(bos) = bos {
            chunk[0] = bos;
        }
        state.clear()?;
        graph.compute(&chunk, 0, 0)?;
        for observed in graph.observed() {
            add(observed, sums.entry(observed.weight.clone()).or_default())
                .with_context(|| format!("observing the inputs of `{}`", observed.weight))?;
        }
        n_chunks += 1;
        if !progress(n_chunks) {
            break;
        }
    }
    let narrow = |values: &[f64]| values.iter().map(|&v| v as f32).collect();
    let entry = |sums: &Sums| Entry {
        sums: narrow(&sums.squares),
        counts: narrow(&sums.counts),
    };
    Ok(Imatrix {
        entries: sums.iter().map(|(n, s)| (n.clone(), entry(s))).collect(),
        datasets: Vec::new(),
        n_chunks: n_chunks as u32,
        chunk_size: chunk_size as u32,
    })
}

/// An empty state and a pass over it that observes the inputs of all weights.
fn observing(engine: &Engine, chunk_size: usize) -> Result<(State, TrunkGraph)> {
    let (config, backends) = (engine.config(), engine.backends());
    let types = KvTypes {
        k: DType::F16,
        v: DType::F16,
    };
    let mtp = engine.mtp_status().on;
    let state = State::new(config, &backends[0], types, chunk_size, 1, mtp)?;
    let shape = TrunkShape {
        n_tokens: chunk_size,
        n_kv: chunk_size.next_multiple_of(KV_PAD),
        n_outputs: 0,
        head: if mtp { HeadPass::Logits } else { HeadPass::Off },
        best: 0,
        back: 0,
        unsplit: false,
    };
    let model = engine.weights().for_width(chunk_size);
    let graph = TrunkGraph::observing(config, model, &state, backends, shape)?;
    Ok((state, graph))
}

/// What [`collect`] takes besides the weights, from an engine that may be a planned one.
///
/// # Errors
/// When the pass cannot be described.
pub fn planned_bytes(engine: &Engine, chunk_size: usize) -> Result<PlannedBytes> {
    let (state, graph) = observing(engine, chunk_size)?;
    let (kv, recurrent, rollback) = state.bytes();
    let n_sums: usize = graph
        .observed()
        .iter()
        .map(|observed| match &observed.inputs {
            ObservedInputs::Sum { squares, .. } => squares.n_elements(),
            ObservedInputs::Experts { x, n_expert, .. } => x.ne(0) as usize * n_expert,
        })
        .sum();
    // Added up as f64, kept as f32 in the end.
    let sums = n_sums * (size_of::<f64>() + size_of::<f32>());
    let each = graph.graph().compute_bytes_each();
    Ok(PlannedBytes {
        session: SessionBytes {
            kv,
            state: recurrent - rollback,
            rollback,
            compute: each.first().copied().unwrap_or(0),
        },
        host_compute: each.iter().skip(1).sum::<usize>() + sums,
        growth: 0,
    })
}

/// Adds what one pass saw.
fn add(observed: &Observed, sums: &mut Sums) -> Result<()> {
    match &observed.inputs {
        ObservedInputs::Sum { squares, count } => {
            let mut seen = vec![0f32; squares.n_elements()];
            squares.read(0, &mut seen)?;
            sums.squares.resize(seen.len(), 0.0);
            sums.counts.resize(1, 0.0);
            for (sum, seen) in sums.squares.iter_mut().zip(seen) {
                *sum += f64::from(seen);
            }
            sums.counts[0] += *count as f64;
        }
        ObservedInputs::Experts {
            x,
            chosen,
            n_expert,
        } => {
            let mut values = vec![0f32; x.n_elements()];
            x.read(0, &mut values)?;
            let mut ids = vec![0i32; chosen.n_elements()];
            chosen.read(0, &mut ids)?;
            let (n_in, n_slots) = (x.ne(0) as usize, x.ne(1) as usize);
            let n_used = chosen.ne(0) as usize;
            sums.squares.resize(n_in * n_expert, 0.0);
            sums.counts.resize(*n_expert, 0.0);
            for (i, &id) in ids.iter().enumerate() {
                let (token, slot) = (i / n_used, i % n_used % n_slots);
                let row = &values[(token * n_slots + slot) * n_in..][..n_in];
                let expert = usize::try_from(id).ok().filter(|e| e < n_expert);
                let expert = expert.context("the router chose an expert that is not there")?;
                sums.counts[expert] += 1.0;
                let sums = &mut sums.squares[expert * n_in..][..n_in];
                for (sum, &value) in sums.iter_mut().zip(row) {
                    *sum += f64::from(value) * f64::from(value);
                }
            }
        }
    }
    ensure!(
        sums.squares.iter().all(|v| v.is_finite()),
        "they are not finite; the model file may be damaged"
    );
    Ok(())
}
