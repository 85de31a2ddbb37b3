//! The engine on another device than the CPU: `QRUN_TEST_DEVICE=CUDA0 cargo test --test device` (a name of
//! `qrun --list-devices`). Without the variable the tests say so and pass.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qrun::engine::{Engine, EngineParams};
use qrun::sampler::{Sampler, SamplerParams};
use qrun::session::{Outputs, Session, SessionParams};
use serde_json::Value;
use support::*;

/// A model on the device that is to be tested.
fn on_device(path: &Path) -> Option<Arc<Engine>> {
    let Ok(device) = std::env::var("QRUN_TEST_DEVICE") else {
        println!("SKIPPED: QRUN_TEST_DEVICE names no device");
        return None;
    };
    let params = EngineParams {
        device: Some(device),
        ..EngineParams::default()
    };
    Some(Engine::load(path, &params, &mut |_, _| {}).unwrap())
}

fn tiny(name: &str) -> Option<(PathBuf, Value)> {
    Some((
        shared(&format!("gguf/{name}-f32.gguf"))?,
        json(&shared(&format!("models/{name}/goldens.json"))?),
    ))
}

fn keeping(n_rollback: usize) -> SessionParams {
    SessionParams {
        mtp: true,
        n_rollback,
        ..SessionParams::default()
    }
}

const TEXT: [u32; 24] = [
    40, 200, 17, 405, 3, 77, 410, 112, 9, 33, 250, 61, 300, 18, 44, 5, 90, 310, 2, 240, 71, 12, 8,
    99,
];

/// How far results of wide passes may be from exact ones: CUDA multiplies F32 matrices in TF32 there, which has 11
/// bits.
fn bound(exact: f32) -> f32 {
    let device = std::env::var("QRUN_TEST_DEVICE").unwrap_or_default();
    if device.starts_with("CUDA") {
        100.0 * exact
    } else {
        exact
    }
}

/// A prompt, narrow passes and a draft; returns the splits of the graph that has most.
fn splits(engine: &Arc<Engine>) -> usize {
    let mut session = Session::new(engine.clone(), keeping(3)).unwrap();
    session.eval(&TEXT, Outputs::Last, &never()).unwrap();
    for width in [1, 2, 4] {
        session
            .eval(&TEXT[..width], Outputs::All, &never())
            .unwrap();
    }
    session.draft_tokens(TEXT[0], 3).unwrap();
    session.n_splits()
}

#[test]
fn the_device_computes_whole_graphs() {
    let Some(engine) = on_device(&demo()) else {
        return;
    };
    assert_eq!(splits(&engine), 1, "demo");
    for name in ["tiny-dense", "tiny-moe"] {
        if let Some((path, _)) = tiny(name) {
            assert_eq!(splits(&on_device(&path).unwrap()), 1, "{name}");
        }
    }
}

/// Narrow passes of which only the state is wanted, as at the end of a prompt that is saved: their graphs end in the
/// last layer.
#[test]
fn passes_without_outputs_leave_the_same_state() {
    let others = ["tiny-dense", "tiny-moe", "tiny-dense-untied"];
    let others = others.iter().filter_map(|name| Some(tiny(name)?.0));
    for path in std::iter::once(demo()).chain(others) {
        let Some(engine) = on_device(&path) else {
            return;
        };
        for width in [1, 4, 16] {
            let logits = |outputs: Outputs| {
                let mut session = Session::new(engine.clone(), SessionParams::default()).unwrap();
                for chunk in TEXT[..16].chunks(width) {
                    session.eval(chunk, outputs, &never()).unwrap();
                }
                session
                    .eval(&TEXT[16..17], Outputs::Last, &never())
                    .unwrap()
                    .to_vec()
            };
            let difference = max_diff(&logits(Outputs::None), &logits(Outputs::All));
            assert!(difference < bound(1e-3), "{}: {difference}", path.display());
        }
    }
}

/// Its attention heads of 32 have no kernel on some devices; the CPU takes that part.
#[test]
fn what_the_device_lacks_is_computed_elsewhere() {
    let Some((path, _)) = tiny("tiny-dense-untied") else {
        return;
    };
    if let Some(engine) = on_device(&path) {
        println!("tiny-dense-untied: {} splits", splits(&engine));
    }
}

#[test]
fn logits_and_drafts_equal_the_goldens() {
    for name in ["tiny-dense", "tiny-dense-untied", "tiny-moe"] {
        let Some((path, goldens)) = tiny(name) else {
            return;
        };
        let Some(engine) = on_device(&path) else {
            return;
        };
        let n_vocab = engine.config().n_vocab as usize;
        let (mut worst, mut flips, mut n) = (0f32, 0, 0);
        for prompt in goldens["prompts"].as_array().unwrap() {
            // One token a pass: wider ones may be multiplied with fewer bits.
            let params = SessionParams {
                n_batch: 1,
                ..keeping(0)
            };
            let mut session = Session::new(engine.clone(), params).unwrap();
            let (logits, head) = session
                .eval_with_head(&ids(&prompt["ids"]), &never())
                .unwrap();
            let rows = [("top", logits, 0), ("mtp", head, 1)];
            for (key, logits, shift) in rows {
                for (position, entry) in prompt[key].as_object().unwrap() {
                    let at = (position.parse::<usize>().unwrap() + shift) * n_vocab;
                    let row = &logits[at..at + n_vocab];
                    let (ids, golden) = (ids(&entry[0]), floats(&entry[1]));
                    for (&id, &golden) in ids.iter().zip(&golden) {
                        worst = worst.max((row[id as usize] - golden).abs());
                    }
                    let sure = golden[0] - golden[1] > 0.05;
                    flips += usize::from(sure && argmax(row) != ids[0]);
                    n += 1;
                }
            }
        }
        println!("{name}: {n} rows, largest difference {worst:.2e}, {flips} other best tokens");
        assert!(n > 200 && worst < 3e-2, "{name}: {worst}");
        assert_eq!(flips, 0, "{name}");
    }
}

#[test]
fn greedy_text_equals_the_goldens() {
    for name in ["tiny-dense", "tiny-moe"] {
        let Some((path, goldens)) = tiny(name) else {
            return;
        };
        let Some(engine) = on_device(&path) else {
            return;
        };
        let mut compared = 0;
        for prompt in goldens["prompts"].as_array().unwrap() {
            let params = SessionParams {
                n_batch: 1,
                ..SessionParams::default()
            };
            let mut session = Session::new(engine.clone(), params).unwrap();
            let mut tokens = ids(&prompt["ids"]);
            let (greedy, margins) = (ids(&prompt["greedy"]), floats(&prompt["margin"]));
            for (&golden, &sure) in greedy.iter().zip(&margins) {
                if sure < 0.02 {
                    break;
                }
                // The device finds the best token itself, where it can.
                let best = if session.finds_best(1) {
                    session
                        .eval_best(&tokens, tokens.len() - 1, 1, &never())
                        .unwrap()[0]
                        .0
                } else {
                    argmax(session.eval(&tokens, Outputs::Last, &never()).unwrap())
                };
                assert_eq!(best, golden, "{name}, {}", prompt["name"]);
                tokens = vec![best];
                compared += 1;
            }
        }
        println!("{name}: {compared} greedy tokens equal");
        assert!(compared > 100, "{name}: {compared}");
    }
}

#[test]
fn a_rejected_draft_leaves_no_trace() {
    let Some(engine) = on_device(&demo()) else {
        return;
    };
    for rejected in 1..=4 {
        let mut session = Session::new(engine.clone(), keeping(4)).unwrap();
        session.eval(&TEXT[..8], Outputs::None, &never()).unwrap();
        session.eval(&TEXT[8..13], Outputs::All, &never()).unwrap();
        session.reject(rejected).unwrap();
        let kept = 13 - rejected;
        let after = session
            .eval(&TEXT[16..20], Outputs::All, &never())
            .unwrap()
            .to_vec();

        let mut plain = Session::new(engine.clone(), keeping(4)).unwrap();
        plain.eval(&TEXT[..8], Outputs::None, &never()).unwrap();
        plain.eval(&TEXT[8..kept], Outputs::All, &never()).unwrap();
        let expected = plain.eval(&TEXT[16..20], Outputs::All, &never()).unwrap();
        let difference = max_diff(&after, expected);

        let mut wrong = Session::new(engine.clone(), keeping(4)).unwrap();
        wrong.eval(&TEXT[..8], Outputs::None, &never()).unwrap();
        wrong
            .eval(&TEXT[8..kept - 1], Outputs::All, &never())
            .unwrap();
        let wrong = wrong.eval(&TEXT[16..20], Outputs::All, &never()).unwrap();
        let one_off = max_diff(&after, wrong);
        println!(
            "{rejected} rejected: difference {difference:.2e}, of a state one off {one_off:.2e}"
        );
        // Passes of other widths run other kernels, which round in another way.
        assert!(
            difference < one_off / 8.0,
            "{rejected} rejected: {difference}"
        );
    }
}

#[test]
fn a_snapshot_brings_the_session_back() {
    let Some(engine) = on_device(&demo()) else {
        return;
    };
    let mut session = Session::new(engine.clone(), keeping(2)).unwrap();
    session.eval(&TEXT, Outputs::None, &never()).unwrap();
    let snapshot = session.snapshot().unwrap();
    let next = |session: &mut Session| {
        session
            .eval(&TEXT[..1], Outputs::Last, &never())
            .unwrap()
            .to_vec()
    };
    let expected = next(&mut session);
    session.eval(&TEXT[5..9], Outputs::None, &never()).unwrap();
    session.restore(&snapshot).unwrap();
    assert_eq!(next(&mut session), expected);
    let mut other = Session::new(engine, keeping(2)).unwrap();
    other.restore(&snapshot).unwrap();
    assert_eq!(next(&mut other), expected);
}

/// Quantized weights go through other kernels than the CPU's; the distributions are nearly the same.
#[test]
fn quantized_weights_agree_with_the_cpu() {
    let Some(device) = on_device(&demo()) else {
        return;
    };
    let n_vocab = device.config().n_vocab as usize;
    let logits = |engine: &Arc<Engine>| {
        let mut session = Session::new(engine.clone(), SessionParams::default()).unwrap();
        session
            .eval(&TEXT, Outputs::All, &never())
            .unwrap()
            .to_vec()
    };
    let (here, there) = (logits(&engine(&demo())), logits(&device));
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|&v| f64::from(v - max).exp()).sum();
        row.iter().map(|&v| f64::from(v - max) - sum.ln()).collect()
    };
    let mut divergence = 0.0;
    for (p, q) in here.chunks(n_vocab).zip(there.chunks(n_vocab)) {
        let (p, q) = (log_softmax(p), log_softmax(q));
        let terms = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q));
        divergence += terms.sum::<f64>() / TEXT.len() as f64;
    }
    println!("mean divergence of the demo's distributions: {divergence:.2e}");
    assert!(divergence < 2e-2, "{divergence}");
}

/// The best tokens that the device picks out of each row decide as the whole row does.
#[test]
fn sampled_tokens_are_those_of_whole_rows() {
    let Some(engine) = on_device(&demo()) else {
        return;
    };
    let n_vocab = engine.config().n_vocab as usize;
    let params = SamplerParams {
        temp: 1.5,
        top_k: 40,
        seed: 5,
        ..SamplerParams::default()
    };
    let mut sampler = Sampler::new(params).unwrap();
    let n_best = sampler.n_deciding().unwrap();
    let mut rows = Session::new(engine.clone(), keeping(3)).unwrap();
    let mut best = Session::new(engine, keeping(3)).unwrap();
    let mut tokens = TEXT.to_vec();
    let (mut sampled, mut position) = (Vec::new(), 0);
    while sampled.len() < 120 {
        let from = tokens.len() - tokens.len().min(3);
        rows.eval(&tokens, Outputs::From(from), &never()).unwrap();
        best.eval_best(&tokens, from, n_best, &never()).unwrap();
        tokens.clear();
        let rows = rows.logits().chunks(n_vocab);
        for (row, best) in rows.zip(best.best().chunks(n_best)) {
            let expected = sampler.sample(row, position).unwrap();
            let found = sampler.sample_best(best, n_vocab, position).unwrap();
            assert!(found.is_none_or(|token| token == expected), "{position}");
            sampled.push(found);
            tokens.push(expected);
            position += 1;
        }
        // Widths 1 to 3 take turns.
        tokens.truncate(1 + sampled.len() % 3);
    }
    let decided = sampled.iter().flatten().count();
    println!("{decided} of {} tokens decided by the best", sampled.len());
    assert!(decided * 10 > sampled.len() * 9, "{decided}");
}
