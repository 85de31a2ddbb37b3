//! qrun against llama.cpp in the same process: same files, same ggml, same threads.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod kv;
mod sampler;
#[path = "../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use convert::recipe::FileType;
use ggml_metal::peer::{PeerContext, PeerModel, PeerOptions, PeerParams, PeerQuantize};
use ggml_metal::{DType, Repack};
use qrun::engine::{Engine, EngineParams};
use qrun::session::{Outputs, SessionParams};
use qrun::state::KvTypes;
use support::*;

/// The bound of every comparison with the same layout, types, widths and threads.
const SAME: f32 = 1e-3;
const N_DECODE: usize = 16;

/// Prompt and continuation, token ids of the demo model.
struct Text {
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

/// The golden prompts, or, where they are not at hand, runs of ids that every vocabulary has.
fn texts() -> Vec<Text> {
    let Some(goldens) = shared("models/demo/goldens.json") else {
        return made_up_texts(4000);
    };
    let goldens = json(&goldens);
    let prompts = goldens["prompts"].as_array().unwrap().iter();
    let text = |p: &serde_json::Value| Text {
        prompt: ids(&p["ids"]),
        answer: ids(&p["greedy"]),
    };
    prompts.map(text).collect()
}

fn made_up_texts(n_vocab: u64) -> Vec<Text> {
    let mut random = synth::Random(7);
    let mut some = |n: usize| (0..n).map(|_| (random.bits() % n_vocab) as u32).collect();
    [3, 20, 150]
        .map(|n| Text {
            prompt: some(n),
            answer: some(64),
        })
        .into()
}

/// One thread: two that wait for each other by spinning take many times longer where other programs want the cores.
fn load(path: &Path, repack: bool) -> (Arc<Engine>, PeerModel) {
    load_with(path, repack, 1)
}

fn load_with(path: &Path, repack: bool, n_threads: usize) -> (Arc<Engine>, PeerModel) {
    let params = EngineParams {
        device: Some("CPU".to_owned()),
        n_threads: Some(n_threads),
        repack: if repack {
            Repack::Instead
        } else {
            Repack::Never
        },
        ..EngineParams::default()
    };
    let engine = Engine::load(path, &params, &mut |_, _| {}).unwrap();
    let options = PeerOptions {
        repack,
        ..PeerOptions::default()
    };
    (engine, PeerModel::load(path, &options).unwrap())
}

/// Logits of every token of a text: the prompt in one pass, then token by token.
fn ours(engine: &Arc<Engine>, kv: KvTypes, text: &Text) -> Vec<f32> {
    let mut session = session(engine, kv, false);
    let mut logits = session
        .eval(&text.prompt, Outputs::All, &never())
        .unwrap()
        .to_vec();
    for &token in text.answer.iter().take(N_DECODE) {
        logits.extend(session.eval(&[token], Outputs::Last, &never()).unwrap());
    }
    logits
}

/// As [`ours`], by llama.cpp, on the engine's threads.
fn theirs(engine: &Engine, model: &PeerModel, kv: KvTypes, text: &Text) -> Vec<f32> {
    let mut context = peer(engine, model, kv);
    let mut logits = context.decode(&text.prompt, true).unwrap();
    for &token in text.answer.iter().take(N_DECODE) {
        logits.extend(context.decode(&[token], true).unwrap());
    }
    logits
}

fn peer(engine: &Engine, model: &PeerModel, kv: KvTypes) -> PeerContext {
    let params = PeerParams {
        type_k: kv.k,
        type_v: kv.v,
        ..PeerParams::default()
    };
    PeerContext::new(model, engine.backends().last().unwrap(), &params).unwrap()
}

fn default_kv() -> KvTypes {
    SessionParams::default().kv
}

/// The largest difference over some texts.
///
/// Measured on x86 with AVX-512: 0 for every file, layout and type here, since both sides issue the same operations.
fn difference(path: &Path, repack: bool, kv: KvTypes, texts: &[Text]) -> f32 {
    let (engine, model) = load(path, repack);
    assert_eq!(model.n_vocab() as i64, engine.config().n_vocab);
    let worst = texts
        .iter()
        .map(|text| max_diff(&ours(&engine, kv, text), &theirs(&engine, &model, kv, text)))
        .fold(0.0, f32::max);
    let rows = texts
        .iter()
        .map(|t| t.prompt.len() + t.answer.len().min(N_DECODE))
        .sum::<usize>();
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    let layout = if repack { "repacked" } else { "mapped" };
    println!(
        "{name}, {layout}, K/V {}/{}: largest difference {worst:.2e} in {rows} rows",
        kv.k, kv.v
    );
    worst
}

fn demo_files() -> Vec<PathBuf> {
    let others = ["gguf/demo-f16.gguf", "gguf/demo-Q6_K.gguf"];
    std::iter::once(demo())
        .chain(others.iter().filter_map(|name| shared(name)))
        .collect()
}

/// For models that cannot be kept here: QRUN_TEST_MODEL names a file.
#[test]
fn a_model_named_by_the_environment_gives_the_same_logits() {
    let Some(path) = std::env::var_os("QRUN_TEST_MODEL") else {
        println!("SKIPPED: QRUN_TEST_MODEL names no model");
        return;
    };
    for repack in [false, true] {
        let worst = difference(Path::new(&path), repack, default_kv(), &made_up_texts(4000));
        assert!(worst < SAME, "repack {repack}: {worst}");
    }
}

#[test]
fn demo_logits_equal_the_peers() {
    let texts = texts();
    for path in demo_files() {
        for repack in [false, true] {
            let worst = difference(&path, repack, default_kv(), &texts);
            assert!(worst < SAME, "{}, repack {repack}: {worst}", path.display());
        }
    }
}

#[test]
fn two_threads_give_the_peers_logits() {
    let (engine, model) = load_with(&demo(), false, 2);
    let (kv, text) = (default_kv(), &texts()[1]);
    let worst = max_diff(&ours(&engine, kv, text), &theirs(&engine, &model, kv, text));
    assert!(worst < SAME, "{worst}");
}

/// What finds no difference must be able to find one.
#[test]
fn another_type_of_values_is_seen_as_a_difference() {
    let (engine, model) = load(&demo(), false);
    let coarse = KvTypes {
        v: DType::Q4_0,
        ..default_kv()
    };
    let text = &made_up_texts(4000)[1];
    let found = max_diff(
        &ours(&engine, coarse, text),
        &theirs(&engine, &model, default_kv(), text),
    );
    assert!(found > SAME, "{found}");
}

#[test]
fn q8_0_logits_equal_the_peers() {
    let Some(f16) = shared("gguf/demo-f16.gguf") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo-Q8_0.gguf");
    PeerQuantize::new(FileType::Q8_0.number(), 2)
        .run(&f16, &path)
        .unwrap();
    for repack in [false, true] {
        let worst = difference(
            &path,
            repack,
            default_kv(),
            &texts()[..6.min(texts().len())],
        );
        assert!(worst < SAME, "repack {repack}: {worst}");
    }
}

#[test]
fn moe_logits_equal_the_peers() {
    let folder = tempfile::tempdir().unwrap();
    let path = synth::moe(folder.path());
    for repack in [false, true] {
        let worst = difference(
            &path,
            repack,
            default_kv(),
            &made_up_texts(synth::N_VOCAB as u64),
        );
        assert!(worst < SAME, "repack {repack}: {worst}");
    }
}

/// Mean Kullback-Leibler divergence in nats of the rows of `q` from those of `p`.
fn mean_kl(p: &[f32], q: &[f32], n_vocab: usize) -> f64 {
    assert_eq!(p.len(), q.len());
    let rows = p.chunks_exact(n_vocab).zip(q.chunks_exact(n_vocab));
    let n_rows = p.len() / n_vocab;
    let row_kl = |(p, q): (&[f32], &[f32])| -> f64 {
        let (log_sum_p, log_sum_q) = (log_sum_exp(p), log_sum_exp(q));
        p.iter()
            .zip(q)
            .map(|(&p, &q)| {
                let (log_p, log_q) = (f64::from(p) - log_sum_p, f64::from(q) - log_sum_q);
                log_p.exp() * (log_p - log_q)
            })
            .sum()
    };
    rows.map(row_kl).sum::<f64>() / n_rows as f64
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + row
        .iter()
        .map(|&v| (f64::from(v) - max).exp())
        .sum::<f64>()
        .ln()
}

#[test]
fn another_weight_layout_costs_no_more_than_it_costs_the_peer() {
    let path = demo();
    let (mapped, peer_mapped) = load(&path, false);
    let (repacked, peer_repacked) = load(&path, true);
    let n_vocab = peer_mapped.n_vocab();
    let kv = default_kv();
    let mut sums = [0.0; 3];
    let texts = texts();
    for text in &texts {
        let base = theirs(&mapped, &peer_repacked, kv, text);
        let others = [
            theirs(&mapped, &peer_mapped, kv, text),
            ours(&mapped, kv, text),
            ours(&repacked, kv, text),
        ];
        for (sum, other) in sums.iter_mut().zip(&others) {
            *sum += mean_kl(&base, other, n_vocab) / texts.len() as f64;
        }
    }
    let [peer_layouts, our_mapped, our_repacked] = sums;
    println!(
        "mean KL from llama.cpp repacked: llama.cpp mapped {peer_layouts:.2e}, qrun mapped {our_mapped:.2e}, \
         qrun repacked {our_repacked:.2e}"
    );
    assert!(our_mapped <= 2.0 * peer_layouts);
    assert!(our_repacked <= 2.0 * peer_layouts);
}
