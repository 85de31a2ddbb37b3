//! Logits, draft chains and greedy text against Transformers' float32 results.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::Path;

use qrun::session::Outputs;
use qrun::state::KvTypes;
use serde_json::Value;
use support::*;

/// How far one model's logits are from the goldens.
#[derive(Default, Debug)]
struct Distance {
    trunk: f32,
    head: f32,
    draft: f32,
    /// Positions where another token is best although the golden margin exceeds the bound.
    flips: usize,
    positions: usize,
}

/// `top` entries are `[ids, logits]`, largest first.
fn compare(entry: &Value, row: &[f32], worst: &mut f32, min_margin: f32) -> bool {
    let (ids, logits) = (ids(&entry[0]), floats(&entry[1]));
    for (&id, &golden) in ids.iter().zip(&logits) {
        *worst = worst.max((row[id as usize] - golden).abs());
    }
    logits[0] - logits[1] > min_margin && argmax(row) != ids[0]
}

fn distance(model: &Path, goldens: &Path, kv: KvTypes) -> Distance {
    let engine = engine(model);
    let n_vocab = engine.config().n_vocab as usize;
    let mut worst = Distance::default();
    let goldens = json(goldens);
    for prompt in goldens["prompts"].as_array().unwrap() {
        let tokens = ids(&prompt["ids"]);
        let mut session = session(&engine, kv, true);
        let (logits, head) = session.eval_with_head(&tokens, &never()).unwrap();
        for (position, entry) in prompt["top"].as_object().unwrap() {
            let row = position.parse::<usize>().unwrap() * n_vocab;
            worst.positions += 1;
            let flip = compare(entry, &logits[row..row + n_vocab], &mut worst.trunk, 0.05);
            worst.flips += usize::from(flip);
        }
        // Entry i of the goldens takes token i + 1, so it is row i + 1 here.
        for (entry_no, entry) in prompt["mtp"].as_object().unwrap() {
            let row = (entry_no.parse::<usize>().unwrap() + 1) * n_vocab;
            worst.positions += 1;
            let flip = compare(entry, &head[row..row + n_vocab], &mut worst.head, 0.05);
            worst.flips += usize::from(flip);
        }
        // The chain follows the golden drafts only as long as its own best tokens are the same.
        let greedy = ids(&prompt["greedy"]);
        let chain = prompt["draft"].as_array().unwrap();
        let (drafted, logits) = session.draft(greedy[0], chain.len()).unwrap();
        for (step, entry) in chain.iter().enumerate() {
            let row = &logits[step * n_vocab..(step + 1) * n_vocab];
            worst.positions += 1;
            let flip = compare(entry, row, &mut worst.draft, 0.05);
            worst.flips += usize::from(flip);
            if drafted[step] != ids(&entry[0])[0] {
                break;
            }
        }
    }
    println!(
        "{}: {worst:?}",
        model.file_name().unwrap().to_string_lossy()
    );
    assert!(worst.positions > 300, "the goldens hold more than that");
    worst
}

fn tiny(name: &str) {
    let (Some(model), Some(goldens)) = (
        shared(&format!("gguf/{name}-f32.gguf")),
        shared(&format!("models/{name}/goldens.json")),
    ) else {
        return;
    };
    let exact = distance(&model, &goldens, F32);
    assert!(
        exact.trunk < 1e-3 && exact.head < 1e-3 && exact.draft < 1e-3,
        "{exact:?}"
    );
    assert_eq!(exact.flips, 0);
    let default = distance(&model, &goldens, qrun::session::SessionParams::default().kv);
    assert!(
        default.trunk < 2e-2 && default.head < 2e-2 && default.draft < 2e-2,
        "{default:?}"
    );
    assert_eq!(default.flips, 0);
}

#[test]
fn tiny_dense_equals_transformers() {
    tiny("tiny-dense");
}

#[test]
fn tiny_dense_untied_equals_transformers() {
    tiny("tiny-dense-untied");
}

#[test]
fn tiny_moe_equals_transformers() {
    tiny("tiny-moe");
}

/// Greedy tokens of a file until the golden margin is too small to compare; returns how many were compared.
fn greedy_equals(model: &Path, goldens: &Path, min_margin: f32) -> usize {
    let engine = engine(model);
    let mut compared = 0;
    for prompt in json(goldens)["prompts"].as_array().unwrap() {
        let mut session = session(&engine, F32, false);
        let mut logits = session
            .eval(&ids(&prompt["ids"]), Outputs::Last, &never())
            .unwrap();
        let (greedy, margins) = (ids(&prompt["greedy"]), floats(&prompt["margin"]));
        for (step, (&golden, &margin)) in greedy.iter().zip(&margins).enumerate() {
            if margin < min_margin {
                break;
            }
            let token = argmax(logits);
            assert_eq!(token, golden, "prompt {}, step {step}", prompt["name"]);
            compared += 1;
            logits = session.eval(&[token], Outputs::Last, &never()).unwrap();
        }
    }
    println!(
        "{}: {compared} greedy tokens equal",
        model.file_name().unwrap().to_string_lossy()
    );
    compared
}

#[test]
fn demo_f16_greedy_text_equals_transformers() {
    let (Some(model), Some(goldens)) = (
        shared("gguf/demo-f16.gguf"),
        shared("models/demo/goldens.json"),
    ) else {
        return;
    };
    assert!(greedy_equals(&model, &goldens, 0.05) > 100);
}

#[test]
fn tiny_models_greedy_text_equals_transformers() {
    for name in ["tiny-dense", "tiny-dense-untied", "tiny-moe"] {
        let (Some(model), Some(goldens)) = (
            shared(&format!("gguf/{name}-f32.gguf")),
            shared(&format!("models/{name}/goldens.json")),
        ) else {
            return;
        };
        assert!(greedy_equals(&model, &goldens, 2e-3) > 100);
    }
}

/// The demo model as qrun's own converter writes it in F32.
#[test]
fn the_converted_demo_equals_transformers() {
    let (Some(checkpoint), Some(goldens)) =
        (shared("models/demo"), shared("models/demo/goldens.json"))
    else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("demo-f32.gguf");
    let options = convert::convert::Options {
        file_type: Some(convert::recipe::FileType::F32),
        mtp: convert::map::Mtp::Keep,
        split_max_size: None,
    };
    let plan = convert::convert::Plan::new(&checkpoint, options).unwrap();
    plan.write(&model, &mut |_, _| true).unwrap();
    let exact = distance(&model, &goldens, F32);
    assert!(
        exact.trunk < 1e-3 && exact.head < 1e-3 && exact.draft < 1e-3,
        "{exact:?}"
    );
    assert_eq!(exact.flips, 0);
    // Every token of every prompt, however close the runner-up.
    assert_eq!(greedy_equals(&model, &goldens, 0.0), 12 * 64);
}
