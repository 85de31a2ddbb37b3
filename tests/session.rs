//! What a session promises: how a prompt is cut, saved, put back or interrupted does not change what comes out.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;
#[path = "support/variants.rs"]
mod variants;

use std::path::PathBuf;
use std::sync::Arc;

use ggml_metal::DType;
use qrun::engine::{Engine, EngineParams};
use qrun::session::{EvalError, Outputs, Session, SessionParams};
use qrun::state::{KV_TYPES, KvTypes};
use support::*;
use variants::{Random, Variant, synthetic};

/// Bound of the project for logits with F32 keys and values.
const BOUND: f32 = 1e-3;

/// A model file, and a folder for it when it was made here.
struct Model {
    engine: Arc<Engine>,
    n_vocab: usize,
    _folder: tempfile::TempDir,
}

fn made(variant: &Variant) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    variant.write(&path);
    opened(path, folder)
}

fn opened(path: PathBuf, folder: tempfile::TempDir) -> Model {
    // One thread: several wait for each other by spinning, which is slow on a machine that does other work too.
    let params = EngineParams {
        device: Some("CPU".to_owned()),
        n_threads: Some(1),
        ..EngineParams::default()
    };
    let engine = Engine::load(&path, &params, &mut |_, _| {}).unwrap();
    Model {
        n_vocab: engine.config().n_vocab as usize,
        engine,
        _folder: folder,
    }
}

/// The demo model with its weights in F32. Products with quantized weights round the activations too, and a
/// difference in the last bit of one becomes a visible one where it crosses a rounding border.
fn demo_in_f32() -> Variant {
    let mut variant = Variant::read(&demo());
    for tensor in &mut variant.tensors {
        let values = tensor.dtype.dequantize(&tensor.data).unwrap();
        tensor.data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensor.dtype = DType::F32;
    }
    variant
}

fn demo_model() -> Model {
    made(&demo_in_f32())
}

fn models() -> Vec<Model> {
    vec![
        demo_model(),
        made(&synthetic(false)),
        made(&synthetic(true)),
    ]
}

impl Model {
    fn tokens(&self, n: usize, seed: u64) -> Vec<u32> {
        let mut random = Random(seed);
        (0..n).map(|_| random.below(self.n_vocab) as u32).collect()
    }

    fn with(&self, params: SessionParams) -> Session {
        Session::new(self.engine.clone(), params).unwrap()
    }

    fn session(&self) -> Session {
        self.batched(512)
    }

    fn batched(&self, n_batch: usize) -> Session {
        self.with(SessionParams {
            n_batch,
            ..params()
        })
    }
}

/// Keys and values in F32, the draft head kept up.
fn params() -> SessionParams {
    SessionParams {
        kv: F32,
        mtp: true,
        ..SessionParams::default()
    }
}

fn all(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    session
        .eval(tokens, Outputs::All, &never())
        .unwrap()
        .to_vec()
}

fn assert_close(a: &[f32], b: &[f32]) {
    assert!(!a.is_empty());
    let diff = max_diff(a, b);
    assert!(diff < BOUND, "{diff}");
}

/// Row 0 of an empty session's head means nothing.
fn assert_heads_close(a: &[f32], b: &[f32], n_vocab: usize) {
    assert_close(&a[n_vocab..], &b[n_vocab..]);
}

#[test]
fn the_logits_do_not_depend_on_the_chunks() {
    for (model, n) in models().into_iter().zip([150, 290, 160]) {
        let tokens = model.tokens(n, 1);
        let mut whole = model.session();
        let (trunk, head) = whole.eval_with_head(&tokens, &never()).unwrap();
        let (trunk, head) = (trunk.to_vec(), head.to_vec());
        let drafted = whole.draft(tokens[0], 3).unwrap().1.to_vec();
        for n_batch in [1, 7, 64] {
            let mut chunked = model.batched(n_batch);
            let (t, h) = chunked.eval_with_head(&tokens, &never()).unwrap();
            assert_close(&trunk, t);
            assert_heads_close(&head, h, model.n_vocab);
            assert_close(&drafted, chunked.draft(tokens[0], 3).unwrap().1);

            // Passes that only fill the head's cache leave the same behind.
            let mut filled = model.batched(n_batch);
            assert_close(&trunk, &all(&mut filled, &tokens));
            assert_close(&drafted, filled.draft(tokens[0], 3).unwrap().1);
        }
        let mut single = model.session();
        let one_by_one: Vec<f32> = tokens
            .iter()
            .flat_map(|&t| all(&mut single, &[t]))
            .collect();
        assert_close(&trunk, &one_by_one);
        assert_close(&drafted, single.draft(tokens[0], 3).unwrap().1);

        // Only the last row, as generation asks for it, and without a draft head.
        let last = &trunk[(n - 1) * model.n_vocab..];
        for (n_batch, mtp) in [(512, false), (512, true), (64, false), (7, true)] {
            let mut session = model.with(SessionParams {
                n_batch,
                mtp,
                ..params()
            });
            let got = session.eval(&tokens, Outputs::Last, &never()).unwrap();
            assert_close(last, got);
            assert!(
                session
                    .eval(&[], Outputs::All, &never())
                    .unwrap()
                    .is_empty()
            );
            assert_eq!(session.tokens(), tokens);
        }
    }
}

#[test]
fn quantized_weights_give_the_same_bits_up_to_width_seven() {
    let model = opened(demo(), tempfile::tempdir().unwrap());
    let tokens = model.tokens(150, 16);
    let mut single = model.batched(1);
    let (trunk, head) = single.eval_with_head(&tokens, &never()).unwrap();
    for n_batch in [2, 3, 7] {
        let mut chunked = model.batched(n_batch);
        let (t, h) = chunked.eval_with_head(&tokens, &never()).unwrap();
        assert_eq!(max_diff(trunk, t), 0.0, "{n_batch}");
        assert_eq!(
            max_diff(&head[model.n_vocab..], &h[model.n_vocab..]),
            0.0,
            "{n_batch}"
        );
    }
    // Wider passes round elsewhere: the distributions stay close, single logits need not.
    let mut wide = model.session();
    let (t, _) = wide.eval_with_head(&tokens, &never()).unwrap();
    let rows = trunk.chunks(model.n_vocab).zip(t.chunks(model.n_vocab));
    let kl = rows.map(|(p, q)| divergence(p, q)).sum::<f64>() / tokens.len() as f64;
    println!("mean KL of one chunk against single tokens: {kl:.2e}");
    // Measured 1.6e-3, on tokens that mean nothing.
    assert!(kl < 5e-3, "{kl}");
}

/// Kullback-Leibler divergence of the distributions that two rows of logits give.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| {
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let sum = row.iter().map(|&v| f64::from(v - max).exp()).sum::<f64>();
        f64::from(max) + sum.ln()
    };
    let (all_p, all_q) = (log_sum(p), log_sum(q));
    let pairs = p.iter().zip(q);
    pairs
        .map(|(&p, &q)| {
            let (p, q) = (f64::from(p) - all_p, f64::from(q) - all_q);
            p.exp() * (p - q)
        })
        .sum()
}

#[test]
fn the_head_in_two_parts_equals_one_part() {
    for model in models() {
        let tokens = model.tokens(100, 2);
        let mut whole = model.session();
        let (trunk, head) = whole.eval_with_head(&tokens, &never()).unwrap();
        let (trunk, head) = (trunk.to_vec(), head.to_vec());
        for cut in [1, 33, 99] {
            let mut parts = model.session();
            let (mut t, mut h) = (Vec::new(), Vec::new());
            for part in [&tokens[..cut], &tokens[cut..]] {
                let (trunk, head) = parts.eval_with_head(part, &never()).unwrap();
                t.extend_from_slice(trunk);
                h.extend_from_slice(head);
            }
            assert_close(&trunk, &t);
            assert_heads_close(&head, &h, model.n_vocab);
        }
    }
}

#[test]
fn drafting_leaves_no_trace() {
    for model in models() {
        let tokens = model.tokens(80, 3);
        let (first, rest) = tokens.split_at(50);
        let mut plain = model.session();
        let (trunk, head) = plain.eval_with_head(&tokens, &never()).unwrap();
        let (trunk, head) = (trunk.to_vec(), head.to_vec());
        let mut drafting = model.session();
        all(&mut drafting, first);
        let (drafted, rows) = drafting.draft(rest[0], 5).unwrap();
        assert_eq!(rows.len(), 5 * model.n_vocab);
        // Each drafted token is the best of its row, and the first row is what the head says alongside.
        for (row, token) in rows.chunks(model.n_vocab).zip(&drafted) {
            assert_eq!(argmax(row), *token);
        }
        assert_close(
            &rows[..model.n_vocab],
            &head[50 * model.n_vocab..51 * model.n_vocab],
        );
        let again = drafting.draft(rest[0], 5).unwrap().0;
        assert_eq!(again, drafted, "drafting twice drafts the same");
        assert_eq!(drafting.tokens(), first);
        let (t, h) = drafting.eval_with_head(rest, &never()).unwrap();
        assert_close(&trunk[50 * model.n_vocab..], t);
        assert_close(&head[50 * model.n_vocab..], h);
        let (none, rows) = drafting.draft(0, 0).unwrap();
        assert!(none.is_empty() && rows.is_empty());
    }
}

#[test]
fn the_best_token_is_that_of_the_logits() {
    for model in models() {
        let tokens = model.tokens(30, 12);
        let logits = all(&mut model.session(), &tokens);
        let rows: Vec<&[f32]> = logits.chunks(model.n_vocab).collect();
        let mut session = model.batched(7);
        for (part, from) in [(0..20, 0), (20..21, 0), (21..30, 5)] {
            let best = session
                .eval_best(&tokens[part.clone()], from, 1, &never())
                .unwrap()
                .to_vec();
            assert_eq!(best.len(), part.len() - from);
            for ((id, logit), row) in best.into_iter().zip(&rows[part.start + from..]) {
                assert_eq!(id, argmax(row));
                assert!((logit - row[id as usize]).abs() < BOUND);
            }
            assert!(session.logits().is_empty());
        }

        // Several of each row, and after them whole rows.
        let mut session = model.batched(7);
        let n_best = 6;
        let mut best = session
            .eval_best(&tokens[..5], 2, n_best, &never())
            .unwrap()
            .to_vec();
        let whole = session.read_rows().unwrap();
        for (i, row) in whole.chunks(model.n_vocab).enumerate() {
            assert_close(row, rows[2 + i]);
            let best = &mut best[i * n_best..(i + 1) * n_best];
            best.sort_by(|a, b| b.1.total_cmp(&a.1));
            let mut ranked: Vec<usize> = (0..row.len()).collect();
            ranked.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            for (&(id, logit), &place) in best.iter().zip(&ranked) {
                assert_eq!((logit, row[id as usize]), (row[place], logit));
            }
        }
        assert_eq!(whole.len(), 3 * model.n_vocab);
    }
}

#[test]
fn a_snapshot_brings_the_session_back() {
    for model in models() {
        let tokens = model.tokens(120, 4);
        let (first, rest) = tokens.split_at(70);
        let mut session = model.session();
        all(&mut session, first);
        let snapshot = session.snapshot().unwrap();
        assert_eq!(snapshot.tokens(), first);
        assert!(snapshot.bytes() > 0);
        let (trunk, head) = session.eval_with_head(rest, &never()).unwrap();
        let (trunk, head) = (trunk.to_vec(), head.to_vec());
        // Back to an earlier point after going on, another way, and several times.
        for other in [5, 6] {
            all(&mut session, &model.tokens(other as usize * 11, other));
            session.restore(&snapshot).unwrap();
            assert_eq!(session.tokens(), first);
            let (t, h) = session.eval_with_head(rest, &never()).unwrap();
            assert_eq!(
                (trunk.as_slice(), head.as_slice()),
                (t, h),
                "bit by bit: the same graphs"
            );
        }
        // Into a session that is new, and into one that holds something else.
        let mut fresh = model.session();
        fresh.restore(&snapshot).unwrap();
        let (t, h) = fresh.eval_with_head(rest, &never()).unwrap();
        assert_close(&trunk, t);
        assert_close(&head, h);
        let mut used = model.session();
        all(&mut used, &model.tokens(200, 7));
        used.restore(&snapshot).unwrap();
        let (t, h) = used.eval_with_head(rest, &never()).unwrap();
        assert_close(&trunk, t);
        assert_close(&head, h);
        // An empty session's snapshot forgets everything, as `clear` does.
        let whole = all(&mut model.session(), &tokens);
        used.restore(&model.session().snapshot().unwrap()).unwrap();
        assert_close(&whole, &all(&mut used, &tokens));
        used.clear().unwrap();
        assert_close(&whole, &all(&mut used, &tokens));
    }
}

#[test]
fn a_snapshot_of_another_shape_leaves_the_session_as_it_was() {
    let (model, other) = (made(&synthetic(false)), demo_model());
    let tokens = model.tokens(60, 8);
    let (first, rest) = tokens.split_at(40);
    let expected = all(&mut model.session(), &tokens);
    let kv = |dtype| KvTypes { k: dtype, v: dtype };
    let foreign: Vec<Session> = vec![
        other.session(),
        model.with(SessionParams {
            mtp: false,
            ..params()
        }),
        model.with(SessionParams {
            kv: kv(DType::F16),
            ..params()
        }),
        model.with(SessionParams {
            kv: kv(DType::BF16),
            ..params()
        }),
    ];
    let mut session = model.session();
    all(&mut session, first);
    for mut other in foreign {
        other.eval(&first[..30], Outputs::None, &never()).unwrap();
        let snapshot = other.snapshot().unwrap();
        assert!(session.restore(&snapshot).is_err());
    }
    // Nor one that does not fit.
    let mut small = model.with(SessionParams {
        n_ctx: 20,
        ..params()
    });
    all(&mut small, &first[..10]);
    let long = session.snapshot().unwrap();
    assert!(matches!(
        small.restore(&long),
        Err(EvalError::ContextFull { .. })
    ));
    let rows = 10 * model.n_vocab..20 * model.n_vocab;
    assert_close(&expected[rows], &all(&mut small, &first[10..20]));
    assert_close(&expected[40 * model.n_vocab..], &all(&mut session, rest));
}

#[test]
fn sessions_of_one_engine_do_not_disturb_each_other() {
    for model in models() {
        let texts = [model.tokens(90, 9), model.tokens(90, 10)];
        let alone = texts.each_ref().map(|text| all(&mut model.session(), text));
        let mut sessions = [model.session(), model.session()];
        let mut got = [Vec::new(), Vec::new()];
        for start in (0..90).step_by(15) {
            for ((session, text), got) in sessions.iter_mut().zip(&texts).zip(&mut got) {
                got.extend(all(session, &text[start..start + 15]));
                session.draft(text[0], 2).unwrap();
            }
        }
        assert_close(&alone[0], &got[0]);
        assert_close(&alone[1], &got[1]);

        // From two threads at once.
        let threads = texts.clone().map(|text| {
            let mut session = model.session();
            std::thread::spawn(move || {
                text.iter()
                    .flat_map(|&t| all(&mut session, &[t]))
                    .collect::<Vec<f32>>()
            })
        });
        for (thread, alone) in threads.into_iter().zip(&alone) {
            assert_close(alone, &thread.join().unwrap());
        }
    }
}

#[test]
fn the_cache_grows_without_a_trace() {
    // More cells than are allocated at first, twice over; the chunks cross each growth.
    let model = demo_model();
    let tokens = model.tokens(2200, 11);
    let mut session = model.session();
    let first = session
        .eval(&tokens[..1000], Outputs::Last, &never())
        .unwrap()
        .to_vec();
    let snapshot = session.snapshot().unwrap();
    let small = session.bytes().kv;
    session
        .eval(&tokens[1000..2150], Outputs::None, &never())
        .unwrap();
    assert!(session.bytes().kv > 2 * small);
    let drafted = session.draft(tokens[2150], 3).unwrap().0;
    let (trunk, head) = session.eval_with_head(&tokens[2150..], &never()).unwrap();
    let (trunk, head) = (trunk.to_vec(), head.to_vec());

    // Allocated at once: the first pass makes room for all.
    let mut at_once = model.batched(4096);
    at_once
        .eval(&tokens[..2150], Outputs::None, &never())
        .unwrap();
    assert_eq!(at_once.draft(tokens[2150], 3).unwrap().0, drafted);
    let (t, h) = at_once.eval_with_head(&tokens[2150..], &never()).unwrap();
    assert_close(&trunk, t);
    assert_close(&head, h);

    // Back over a growth, and a long snapshot into a session that has never grown.
    let long = session.snapshot().unwrap();
    session.restore(&snapshot).unwrap();
    session.clear().unwrap();
    let again = session
        .eval(&tokens[..1000], Outputs::Last, &never())
        .unwrap();
    assert_close(&first, again);
    let mut fresh = model.session();
    fresh.restore(&long).unwrap();
    assert_eq!(fresh.n_past(), 2200);
    let next = fresh.eval(&tokens[..1], Outputs::Last, &never()).unwrap();
    assert_close(
        next,
        at_once.eval(&tokens[..1], Outputs::Last, &never()).unwrap(),
    );
}

#[test]
fn cancelling_leaves_a_session_that_goes_on() {
    let model = demo_model();
    let tokens = model.tokens(1500, 12);
    let cancel = never();
    cancel.cancel();
    let mut session = model.batched(16);
    let stopped = session.eval(&tokens, Outputs::Last, &cancel);
    assert!(matches!(stopped, Err(EvalError::Cancelled)));
    assert_eq!(session.n_past(), 0);

    // From another thread, between two chunks of a long prompt.
    let cancel = never();
    let canceller = cancel.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(30));
        canceller.cancel();
    });
    let stopped = session.eval(&tokens, Outputs::Last, &cancel).map(|_| ());
    thread.join().unwrap();
    let n_past = session.n_past();
    match stopped {
        Err(EvalError::Cancelled) => assert!(n_past < tokens.len() && n_past.is_multiple_of(16)),
        // A machine that needs less for the whole prompt.
        Ok(_) => assert_eq!(n_past, tokens.len()),
        Err(other) => panic!("{other}"),
    }
    assert_eq!(session.tokens(), &tokens[..n_past]);
    let rest = session
        .eval(&tokens[n_past..], Outputs::Last, &never())
        .unwrap()
        .to_vec();
    if n_past < tokens.len() {
        let expected = model
            .session()
            .eval(&tokens, Outputs::Last, &never())
            .unwrap()
            .to_vec();
        assert_close(&expected, &rest);
    }
}

#[test]
fn a_full_context_is_an_error_that_changes_nothing() {
    for model in models() {
        let tokens = model.tokens(40, 13);
        let expected = all(&mut model.session(), &tokens);
        let mut session = model.with(SessionParams {
            n_ctx: 40,
            n_batch: 8,
            ..params()
        });
        all(&mut session, &tokens[..30]);
        let full = session
            .eval(&tokens[..11], Outputs::Last, &never())
            .err()
            .unwrap();
        assert!(
            matches!(
                full,
                EvalError::ContextFull {
                    n_past: 30,
                    n_new: 11,
                    n_ctx: 40
                }
            ),
            "{full}"
        );
        assert!(matches!(
            session.draft(0, 11),
            Err(EvalError::ContextFull { .. })
        ));
        assert_eq!(session.n_past(), 30);
        assert_close(
            &expected[30 * model.n_vocab..],
            &all(&mut session, &tokens[30..]),
        );
        assert!(session.eval(&[0], Outputs::Last, &never()).is_err());
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_an_error() {
    let model = made(&synthetic(false));
    let tokens = model.tokens(20, 14);
    let expected = all(&mut model.session(), &tokens);
    let mut session = model.session();
    all(&mut session, &tokens[..10]);
    for bad in [24, 1 << 31, u32::MAX] {
        let error = session
            .eval(&[0, bad], Outputs::Last, &never())
            .err()
            .unwrap();
        assert!(
            matches!(error, EvalError::UnknownToken { token, .. } if token == bad),
            "{error}"
        );
        assert!(matches!(
            session.draft(bad, 2),
            Err(EvalError::UnknownToken { .. })
        ));
    }
    assert_close(
        &expected[10 * model.n_vocab..],
        &all(&mut session, &tokens[10..]),
    );
}

#[test]
fn values_that_are_not_numbers_end_the_turn_with_a_name() {
    for (bits, norm) in [
        (f32::NAN, "blk.0.attn_norm.weight"),
        (f32::INFINITY, "output_norm.weight"),
        (f32::NAN, "blk.3.post_attention_norm.weight"),
    ] {
        let mut damaged = demo_in_f32();
        let tensor = damaged.tensor_mut(norm);
        tensor.data[..4].copy_from_slice(&bits.to_le_bytes());
        let model = made(&damaged);
        let mut session = model.session();
        let error = session
            .eval(&[1, 2, 3], Outputs::Last, &never())
            .err()
            .unwrap();
        assert!(
            matches!(error, EvalError::NonFinite { position: 2 }),
            "{norm}: {error}"
        );
        session.clear().unwrap();
        let error = session
            .eval(&[1, 2, 3], Outputs::All, &never())
            .err()
            .unwrap();
        assert!(
            matches!(error, EvalError::NonFinite { position: 0 }),
            "{norm}: {error}"
        );
    }
}

#[test]
fn key_and_value_types_are_close_to_f32_or_refused() {
    let model = demo_model();
    let tokens = model.tokens(150, 15);
    let exact = all(&mut model.session(), &tokens);
    let spread = exact.iter().fold(0f32, |m, v| m.max(v.abs()));
    for name in [
        "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "mixed",
    ] {
        let kv = match DType::from_name(name) {
            Some(dtype) => KvTypes { k: dtype, v: dtype },
            None => KvTypes {
                k: DType::Q8_0,
                v: DType::F16,
            },
        };
        let mut session = model.with(SessionParams { kv, ..params() });
        let (got, _) = session.eval_with_head(&tokens, &never()).unwrap();
        let diff = max_diff(&exact, got);
        println!("{name}: {diff} of {spread}");
        assert!(
            diff < if kv == F32 { BOUND } else { 0.25 * spread },
            "{name}: {diff}"
        );
        // Saved and put back, whatever the type.
        let snapshot = session.snapshot().unwrap();
        let next = all(&mut session, &tokens[..2]);
        session.restore(&snapshot).unwrap();
        assert_eq!(next, all(&mut session, &tokens[..2]));
    }
    for name in [
        "i32", "i64", "f64", "q8_k", "q8_1", "q4_k", "iq2_xxs", "tq1_0",
    ] {
        let dtype = DType::from_name(name).unwrap();
        assert!(!KV_TYPES.contains(&dtype));
        let params = SessionParams {
            kv: KvTypes {
                k: DType::F16,
                v: dtype,
            },
            ..params()
        };
        let error = Session::new(model.engine.clone(), params)
            .err()
            .unwrap()
            .to_string();
        assert!(error.to_lowercase().contains(name), "{error}");
    }
}

#[test]
fn limits_beyond_counting_are_refused() {
    let model = made(&synthetic(false));
    for n_ctx in [usize::MAX, 1 << 40] {
        let params = SessionParams { n_ctx, ..params() };
        assert!(Session::new(model.engine.clone(), params).is_err());
    }
    let mut session = model.with(SessionParams {
        n_ctx: 1 << 30,
        n_batch: usize::MAX,
        ..params()
    });
    all(&mut session, &[1, 2, 3]);
}
