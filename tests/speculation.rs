//! Speculation changes how fast a text comes, never the text: states after rejected drafts, texts with every kind of
//! draft, and the distribution of what is sampled.
//!
//! The long runs are left out by default: `cargo test --workspace --test speculation -- --ignored --nocapture`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;
#[path = "support/variants.rs"]
mod variants;

use std::path::Path;
use std::sync::Arc;

use ggml_metal::{DType, Gguf};
use proptest::prelude::*;
use qrun::engine::{Engine, EngineParams};
use qrun::generate::{Answer, Generator, Request};
use qrun::grammar::{Grammar, GrammarFactory};
use qrun::model::forward::DraftVocab;
use qrun::sampler::{Sampler, SamplerParams};
use qrun::session::{Outputs, Session, SessionParams, Snapshot};
use qrun::speculate::{Depth, SpecParams, Speculator};
use qrun::state::MAX_OWED;
use qrun::tokenizer::Tokenizer;
use qrun::vocab;
use support::*;
use variants::{Random, Variant, synthetic};

struct Model {
    engine: Arc<Engine>,
    tokenizer: Tokenizer,
    n_vocab: usize,
}

impl Model {
    fn open(path: &Path) -> Self {
        // One thread: several wait for each other by spinning, which is slow on a machine that does other work too.
        let params = EngineParams {
            device: Some("CPU".to_owned()),
            n_threads: Some(1),
            ..EngineParams::default()
        };
        let engine = Engine::load(path, &params, &mut |_, _| {}).unwrap();
        Self {
            // Models made here have none; any will do that knows their ids.
            tokenizer: vocab::tokenizer(&Gguf::open(path).unwrap())
                .or_else(|_| vocab::tokenizer(&Gguf::open(&demo()).unwrap()))
                .unwrap(),
            n_vocab: engine.config().n_vocab as usize,
            engine,
        }
    }

    fn made(variant: &Variant) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        variant.write(&path);
        // The map keeps the file's content when its folder goes.
        Self::open(&path)
    }

    /// The demo model with its weights in F32, whose passes give the same bits at every width.
    fn demo_in_f32() -> Self {
        let mut variant = Variant::read(&demo());
        for tensor in &mut variant.tensors {
            let values = tensor.dtype.dequantize(&tensor.data).unwrap();
            tensor.data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            tensor.dtype = DType::F32;
        }
        Self::made(&variant)
    }

    fn session(&self, params: SessionParams) -> Session {
        Session::new(self.engine.clone(), params).unwrap()
    }

    fn tokens(&self, n: usize, random: &mut Random) -> Vec<u32> {
        (0..n).map(|_| random.below(self.n_vocab) as u32).collect()
    }

    fn chat(&self, question: &str) -> Vec<u32> {
        let text = format!(
            "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        );
        self.tokenizer.encode(&text, true).unwrap()
    }

    /// An answer and what the session held afterwards.
    fn answer(
        &self,
        request: &Request,
        sampler: &SamplerParams,
        spec: Option<&SpecParams>,
        session: SessionParams,
        grammar: Option<&Grammar>,
    ) -> (Answer, Session) {
        let mut session = self.session(SessionParams {
            mtp: spec.is_some(),
            n_rollback: spec.map_or(0, |s| s.draft_max),
            ..session
        });
        let answer = self.answer_in(&mut session, request, sampler, spec, grammar);
        (answer, session)
    }

    fn answer_in(
        &self,
        session: &mut Session,
        request: &Request,
        sampler: &SamplerParams,
        spec: Option<&SpecParams>,
        grammar: Option<&Grammar>,
    ) -> Answer {
        let mut sampler = Sampler::new(sampler.clone()).unwrap();
        let mut constraint = grammar.map(|g| {
            let factory = GrammarFactory::new(&self.tokenizer).unwrap();
            factory.constraint(g).unwrap()
        });
        let mut speculator = spec.map(|s| Speculator::new(*s, None));
        Generator {
            session,
            tokenizer: &self.tokenizer,
            sampler: &mut sampler,
            constraint: constraint.as_mut(),
            speculator: speculator.as_mut(),
            watch: None,
        }
        .answer(request, &never(), &mut |_| Ok(()))
        .unwrap()
    }
}

fn f32_params() -> SessionParams {
    SessionParams {
        kv: F32,
        ..SessionParams::default()
    }
}

fn depth(n: usize) -> SpecParams {
    SpecParams {
        depth: Depth::Fixed(n),
        draft_max: n,
        ..SpecParams::default()
    }
}

/// Everything that a session remembers is the same, up to rounding.
fn assert_same_state(a: &Snapshot, b: &Snapshot, what: &str) {
    assert_eq!(a.tokens(), b.tokens(), "{what}");
    assert_eq!(a.parts().len(), b.parts().len(), "{what}");
    for (i, (a, b)) in a.parts().iter().zip(b.parts()).enumerate() {
        let values = |bytes: &[u8]| -> Vec<f32> {
            let (words, rest) = bytes.as_chunks::<4>();
            assert!(rest.is_empty());
            words.iter().map(|&w| f32::from_le_bytes(w)).collect()
        };
        let diff = max_diff(&values(a), &values(b));
        assert!(diff <= 1e-5, "{what}: part {i} differs by {diff}");
    }
}

fn evaluate(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    session
        .eval(tokens, Outputs::Last, &never())
        .unwrap()
        .to_vec()
}

#[test]
fn a_rejected_draft_leaves_no_trace() {
    for model in [
        Model::demo_in_f32(),
        Model::made(&synthetic(false)),
        Model::made(&synthetic(true)),
    ] {
        let mut random = Random(1);
        let prompt = model.tokens(40, &mut random);
        for width in 1..=7 {
            for n_rejected in 0..width {
                let what = format!("{n_rejected} of {width} rejected");
                let guess = model.tokens(width, &mut random);
                let kept = &guess[..width - n_rejected];
                let mut drafted = model.session(SessionParams {
                    mtp: true,
                    n_rollback: 6,
                    ..f32_params()
                });
                evaluate(&mut drafted, &prompt);
                // A draft writes the head's cells too.
                drafted.draft(guess[0], width).unwrap();
                drafted.eval(&guess, Outputs::All, &never()).unwrap();
                drafted.reject(n_rejected).unwrap();
                let mut plain = model.session(SessionParams {
                    mtp: true,
                    ..f32_params()
                });
                evaluate(&mut plain, &prompt);
                for &token in kept {
                    evaluate(&mut plain, &[token]);
                }
                let states = (drafted.snapshot().unwrap(), plain.snapshot().unwrap());
                assert_same_state(&states.0, &states.1, &what);

                // And whatever comes next is the same: a draft, a wide pass, a single token.
                let next = model.tokens(9, &mut random);
                let drafts = (drafted.draft(next[0], 3).unwrap().1.to_vec(), {
                    plain.draft(next[0], 3).unwrap().1.to_vec()
                });
                assert!(max_diff(&drafts.0, &drafts.1) <= 1e-4, "{what}");
                let rows = (evaluate(&mut drafted, &next), evaluate(&mut plain, &next));
                assert!(max_diff(&rows.0, &rows.1) <= 1e-4, "{what}");
                let rows = (evaluate(&mut drafted, &[1]), evaluate(&mut plain, &[1]));
                assert!(max_diff(&rows.0, &rows.1) <= 1e-4, "{what}");
            }
        }
    }
}

#[test]
fn only_what_was_kept_can_be_taken_back() {
    let model = Model::made(&synthetic(false));
    let mut session = model.session(SessionParams {
        n_rollback: 3,
        ..f32_params()
    });
    assert!(session.reject(1).is_err(), "an empty session");
    session.reject(0).unwrap();
    evaluate(&mut session, &[1; 9]);
    assert!(session.reject(1).is_err(), "a pass too wide to be kept");
    evaluate(&mut session, &[2; 4]);
    assert!(session.reject(4).is_err(), "the token before the draft");
    session.reject(2).unwrap();
    session.reject(1).unwrap();
    assert!(session.reject(1).is_err(), "all are taken back");
    assert_eq!(session.n_past(), 10);
    let snapshot = session.snapshot().unwrap();
    session.restore(&snapshot).unwrap();
    assert!(session.reject(1).is_err(), "a restored session");
}

/// What a random session does.
#[derive(Clone, Debug)]
enum Step {
    /// A pass of so many tokens, so many of them rejected (as far as they can be).
    Pass(usize, usize),
    Draft(usize),
    Save,
    Restore,
    /// The other of two sessions goes on.
    Switch,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (1usize..=6, 0usize..=5).prop_map(|(n, r)| Step::Pass(n, r)),
        2 => (1usize..=5).prop_map(Step::Draft),
        1 => Just(Step::Save),
        1 => Just(Step::Restore),
        2 => Just(Step::Switch),
    ];
    proptest::collection::vec(step, 1..14)
}

#[test]
fn any_pattern_of_accepting_and_rejecting_equals_plain_decoding() {
    let models = [
        Model::made(&synthetic(false)),
        Model::made(&synthetic(true)),
    ];
    let params = SessionParams {
        mtp: true,
        n_rollback: 4,
        ..f32_params()
    };
    let config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(500)
    };
    let mut runner = proptest::test_runner::TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(
            proptest::test_runner::RngAlgorithm::ChaCha,
        ),
    );
    let mut sessions: Vec<[Session; 3]> = models
        .iter()
        .map(|m| [(); 3].map(|()| m.session(params)))
        .collect();
    let sessions = std::cell::RefCell::new(&mut sessions);
    let strategy = (0usize..2, any::<u64>(), steps());
    runner
        .run(&strategy, |(which, seed, steps)| {
            let model = &models[which];
            let mut sessions = sessions.borrow_mut();
            let [a, b, plain] = &mut sessions[which];
            let mut random = Random(seed);
            for session in [&mut *a, &mut *b] {
                session.clear().unwrap();
                let prompt = model.tokens(1 + random.below(20), &mut random);
                evaluate(session, &prompt);
            }
            let (mut current, mut other) = (a, b);
            let mut saved = None;
            for step in steps {
                match step {
                    Step::Pass(n, rejected) => {
                        let tokens = model.tokens(n, &mut random);
                        evaluate(current, &tokens);
                        if n <= 5 {
                            current.reject(rejected.min(n - 1)).unwrap();
                        }
                    }
                    Step::Draft(n) => {
                        current.draft_tokens(3, n).unwrap();
                    }
                    Step::Save => saved = Some(current.snapshot().unwrap()),
                    Step::Restore => {
                        if let Some(saved) = &saved {
                            current.restore(saved).unwrap();
                        }
                    }
                    Step::Switch => std::mem::swap(&mut current, &mut other),
                }
            }
            plain.clear().unwrap();
            for &token in current.tokens() {
                evaluate(plain, &[token]);
            }
            let states = (current.snapshot().unwrap(), plain.snapshot().unwrap());
            assert_same_state(&states.0, &states.1, "after all steps");
            Ok(())
        })
        .unwrap();
}

/// Questions and beginnings that the demo model goes on from.
const QUESTIONS: [&str; 20] = [
    "Tell me a story about a fox named Pip.",
    "What is the capital of France?",
    "List three animals.",
    "Write a Python function that adds two numbers.",
    "What is 17 + 25?",
    "Tell me a story about a boat.",
    "My name is Anna. What is my name?",
    "Give me a JSON object with a name and an age.",
    "What is the past tense of go?",
    "What is the opposite of hot?",
    "Tell me a story about a bear who could not sleep.",
    "Write a Rust function that doubles a number.",
    "Name a colour.",
    "What does a cow say?",
    "Tell me about the moon.",
    "Count from one to ten.",
    "Tell me a story about two friends.",
    "What is the capital of Japan?",
    "List five fruits.",
    "Who are you?",
];

/// Every kind of speculation that leaves the text of a seed as it is.
fn kinds() -> Vec<(String, SpecParams)> {
    let mut kinds: Vec<(String, SpecParams)> =
        (1..=6).map(|n| (format!("depth {n}"), depth(n))).collect();
    let more = [
        ("auto", SpecParams::default()),
        (
            "confident",
            SpecParams {
                p_min: 0.6,
                ..depth(4)
            },
        ),
        (
            "long ones only",
            SpecParams {
                p_min: 0.5,
                draft_min: 2,
                ..depth(4)
            },
        ),
        (
            "head and text",
            SpecParams {
                ngram: 3,
                ..depth(3)
            },
        ),
        (
            "text only",
            SpecParams {
                ngram: 2,
                mtp: false,
                ..depth(6)
            },
        ),
    ];
    kinds.extend(more.map(|(name, params)| (name.to_owned(), params)));
    kinds
}

fn samplers() -> Vec<SamplerParams> {
    let warm = SamplerParams {
        temp: 0.8,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.02,
        repeat_penalty: 1.1,
        presence_penalty: 0.3,
        frequency_penalty: 0.1,
        logit_bias: vec![(5, 1.0), (17, f32::NEG_INFINITY)],
        seed: 7,
        ..SamplerParams::default()
    };
    let hot = SamplerParams {
        temp: 1.0,
        seed: 8,
        ..SamplerParams::default()
    };
    vec![SamplerParams::greedy(), warm, hot]
}

/// Compares texts with and without speculation; returns how many were compared.
fn compare(model: &Model, prompts: &[Vec<u32>], n: usize, session: SessionParams) -> usize {
    let mut compared = 0;
    for (i, prompt) in prompts.iter().enumerate() {
        let request = Request {
            prompt: prompt.clone(),
            n_predict: Some(n),
            ignore_eos: i % 2 == 0,
            ..Request::default()
        };
        for sampler in samplers() {
            let (plain, _) = model.answer(&request, &sampler, None, session, None);
            for (name, spec) in kinds() {
                let vocab = (spec.draft_max % 2 == 0).then_some(DraftVocab {
                    n_first: model.n_vocab as i64 / 2,
                    last_from: model.n_vocab as i64 - 5,
                });
                let session = SessionParams {
                    draft_vocab: vocab,
                    ..session
                };
                let (guessed, held) = model.answer(&request, &sampler, Some(&spec), session, None);
                let what = format!("prompt {i}, {name}, temp {}", sampler.temp);
                assert_eq!(plain.tokens, guessed.tokens, "{what}");
                assert_eq!(plain.text, guessed.text, "{what}");
                assert_eq!(plain.finish_reason, guessed.finish_reason, "{what}");
                // The session holds what plain decoding leaves: all but the last token.
                let all = [prompt.as_slice(), &plain.tokens[..plain.tokens.len() - 1]].concat();
                assert_eq!(held.tokens(), all, "{what}");
                compared += 1;
            }
        }
    }
    compared
}

#[test]
fn the_text_is_the_same_with_every_kind_of_draft() {
    let model = Model::demo_in_f32();
    let prompts: Vec<_> = QUESTIONS[..2].iter().map(|q| model.chat(q)).collect();
    assert_eq!(compare(&model, &prompts, 48, f32_params()), 66);
    let model = Model::made(&synthetic(true));
    let prompts = vec![model.tokens(20, &mut Random(3))];
    assert_eq!(compare(&model, &prompts, 24, f32_params()), 33);
}

/// As on a device that finds the best tokens itself.
#[test]
fn the_text_is_the_same_from_the_best_tokens_of_each_row() {
    let model = Model::demo_in_f32();
    let request = Request {
        prompt: model.chat(QUESTIONS[0]),
        n_predict: Some(60),
        ignore_eos: true,
        ..Request::default()
    };
    let warm = SamplerParams {
        temp: 0.9,
        top_k: 20,
        top_p: 0.95,
        seed: 3,
        ..SamplerParams::default()
    };
    let penalties = SamplerParams {
        presence_penalty: 1.5,
        repeat_penalty: 1.1,
        ..warm.clone()
    };
    let drawn = SpecParams {
        sampled: true,
        ..depth(3)
    };
    let mut texts = Vec::new();
    for sampler in [SamplerParams::greedy(), warm, penalties] {
        for spec in [None, Some(depth(3)), Some(drawn)] {
            let (whole, _) = model.answer(&request, &sampler, spec.as_ref(), f32_params(), None);
            let mut session = model.session(SessionParams {
                mtp: spec.is_some(),
                n_rollback: 3,
                ..f32_params()
            });
            session.always_find_best();
            let best = model.answer_in(&mut session, &request, &sampler, spec.as_ref(), None);
            // Those of the last pass, without whole rows.
            assert!(!session.best().is_empty() && session.logits().is_empty());
            assert_eq!(best.tokens, whole.tokens, "{sampler:?}, {spec:?}");
            texts.push(whole.tokens);
        }
    }
    texts.dedup();
    assert!(texts.len() >= 3, "{}", texts.len());
}

#[test]
#[ignore = "takes many minutes"]
fn long_texts_are_the_same_with_every_kind_of_draft() {
    let model = Model::demo_in_f32();
    let prompts: Vec<_> = QUESTIONS.iter().map(|q| model.chat(q)).collect();
    println!(
        "demo: {} texts",
        compare(&model, &prompts, 512, f32_params())
    );
    for name in ["tiny-dense", "tiny-dense-untied", "tiny-moe"] {
        let Some(path) = shared(&format!("gguf/{name}-f32.gguf")) else {
            return;
        };
        let model = Model::open(&path);
        let mut random = Random(4);
        let prompts: Vec<_> = (0..20).map(|_| model.tokens(30, &mut random)).collect();
        println!(
            "{name}: {} texts",
            compare(&model, &prompts, 512, f32_params())
        );
    }
}

#[test]
fn answers_end_inside_a_draft_as_without_one() {
    let model = Model::demo_in_f32();
    let prompt = model.chat(QUESTIONS[0]);
    let whole = |request: &Request, session: SessionParams| {
        let (plain, _) = model.answer(request, &SamplerParams::greedy(), None, session, None);
        for n in [1, 3, 5] {
            let spec = depth(n);
            let (guessed, held) = model.answer(
                request,
                &SamplerParams::greedy(),
                Some(&spec),
                session,
                None,
            );
            assert_eq!(plain.tokens, guessed.tokens);
            assert_eq!(plain.text, guessed.text);
            assert_eq!(plain.finish_reason, guessed.finish_reason);
            assert!(held.n_past() < prompt.len() + plain.tokens.len().max(1));
        }
        plain
    };
    let request = |n, stop: &str, ignore_eos| Request {
        prompt: prompt.clone(),
        n_predict: n,
        stop: vec![stop.to_owned()],
        ignore_eos,
        ..Request::default()
    };
    // Token limits, one after the other, so that each place of a draft is cut once.
    for n in 1..=9 {
        assert_eq!(
            whole(&request(Some(n), "none", false), f32_params())
                .tokens
                .len(),
            n
        );
    }
    // Stop strings.
    for stop in ["fox", "Pip lived", " a "] {
        let answer = whole(&request(Some(60), stop, false), f32_params());
        assert!(!answer.text.contains(stop), "{}", answer.text);
    }
    // The end of the answer, and of the context.
    let short = model.chat("What is the capital of France?");
    let request = |ignore_eos| Request {
        prompt: short.clone(),
        ignore_eos,
        ..Request::default()
    };
    for extra in 1..=12 {
        let small = SessionParams {
            n_ctx: short.len() + extra,
            ..f32_params()
        };
        for ignore_eos in [false, true] {
            let spec = depth(4);
            let greedy = SamplerParams::greedy();
            let (plain, a) = model.answer(&request(ignore_eos), &greedy, None, small, None);
            let (guessed, b) =
                model.answer(&request(ignore_eos), &greedy, Some(&spec), small, None);
            assert_eq!(plain.tokens, guessed.tokens);
            assert_eq!(plain.finish_reason, guessed.finish_reason);
            assert_eq!(a.tokens(), b.tokens());
        }
    }
}

#[test]
fn grammars_thinking_and_budgets_are_kept() {
    let model = Model::demo_in_f32();
    let schema = Grammar::JsonSchema(serde_json::json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }));
    let open = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n<think>\n";
    let requests = [
        Request {
            prompt: model.chat(QUESTIONS[7]),
            n_predict: Some(60),
            thinking: Some(false),
            ..Request::default()
        },
        Request {
            prompt: model.tokenizer.encode(open, true).unwrap(),
            n_predict: Some(90),
            thinking: Some(true),
            ..Request::default()
        },
        Request {
            prompt: model.tokenizer.encode(open, true).unwrap(),
            n_predict: Some(40),
            thinking: Some(true),
            reasoning_budget: Some(7),
            ..Request::default()
        },
    ];
    for request in &requests {
        for sampler in samplers() {
            for grammar in [None, Some(&schema)] {
                let (plain, _) = model.answer(request, &sampler, None, f32_params(), grammar);
                for (name, spec) in kinds() {
                    let (guessed, _) =
                        model.answer(request, &sampler, Some(&spec), f32_params(), grammar);
                    assert_eq!(plain.tokens, guessed.tokens, "{name}");
                    assert_eq!(plain.text, guessed.text, "{name}");
                    assert_eq!(plain.reasoning, guessed.reasoning, "{name}");
                }
            }
        }
    }
}

/// Texts of three tokens after a prompt, counted.
fn count_texts(
    model: &Model,
    prompt: &[u32],
    sampler: &SamplerParams,
    spec: Option<&SpecParams>,
    seeds: std::ops::Range<u64>,
) -> std::collections::BTreeMap<Vec<u32>, u64> {
    let mut session = model.session(SessionParams {
        mtp: spec.is_some(),
        n_rollback: spec.map_or(0, |s| s.draft_max),
        ..f32_params()
    });
    let (last, first) = prompt.split_last().unwrap();
    evaluate(&mut session, first);
    let start = session.snapshot().unwrap();
    let mut counts = std::collections::BTreeMap::new();
    for seed in seeds {
        session.restore(&start).unwrap();
        let mut sampler = Sampler::new(SamplerParams {
            seed,
            ..sampler.clone()
        })
        .unwrap();
        let mut speculator = spec.map(|s| Speculator::new(*s, None));
        let request = Request {
            prompt: vec![*last],
            // The first token comes out of the prompt, so that a draft is checked over the second and third.
            n_predict: Some(4),
            ignore_eos: true,
            ..Request::default()
        };
        let answer = Generator {
            session: &mut session,
            tokenizer: &model.tokenizer,
            sampler: &mut sampler,
            constraint: None,
            speculator: speculator.as_mut(),
            watch: None,
        }
        .answer(&request, &never(), &mut |_| Ok(()))
        .unwrap();
        *counts.entry(answer.tokens[..3].to_vec()).or_default() += 1;
    }
    counts
}

/// The chi-square statistic of two samples of the same size, with its degrees of freedom; texts that came fewer than
/// ten times in all are taken together.
fn chi_square(
    a: &std::collections::BTreeMap<Vec<u32>, u64>,
    b: &std::collections::BTreeMap<Vec<u32>, u64>,
) -> (f64, f64) {
    let texts: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let (mut statistic, mut cells, mut rest) = (0.0, 0.0, (0.0, 0.0));
    let mut add = |x: f64, y: f64| {
        if x + y > 0.0 {
            statistic += (x - y) * (x - y) / (x + y);
            cells += 1.0;
        }
    };
    for text in texts {
        let of = |m: &std::collections::BTreeMap<Vec<u32>, u64>| *m.get(text).unwrap_or(&0) as f64;
        let (x, y) = (of(a), of(b));
        if x + y < 10.0 {
            rest = (rest.0 + x, rest.1 + y);
        } else {
            add(x, y);
        }
    }
    add(rest.0, rest.1);
    (statistic, cells - 1.0)
}

/// Both kinds of drafts against plain decoding, on disjoint seeds so that the samples are independent.
/// What many sample with, and the model's own distribution.
fn warm_and_hot() -> [SamplerParams; 2] {
    [
        SamplerParams {
            temp: 0.6,
            top_k: 20,
            top_p: 0.95,
            ..SamplerParams::default()
        },
        SamplerParams {
            temp: 1.0,
            ..SamplerParams::default()
        },
    ]
}

fn compare_distributions(model: &Model, n: u64, sampler: &SamplerParams) {
    let prompt = model.chat("Tell me a story about a boat.");
    let plain = count_texts(model, &prompt, sampler, None, 0..n);
    for (i, sampled) in [false, true].into_iter().enumerate() {
        let spec = SpecParams {
            sampled,
            ..depth(2)
        };
        let first = (i as u64 + 1) * n;
        let guessed = count_texts(model, &prompt, sampler, Some(&spec), first..first + n);
        let (statistic, freedom) = chi_square(&plain, &guessed);
        // Wilson and Hilferty's approximation: the cube root is nearly normal.
        let z = ((statistic / freedom).cbrt() - (1.0 - 2.0 / (9.0 * freedom)))
            / (2.0 / (9.0 * freedom)).sqrt();
        println!(
            "temp {}, drafts drawn {sampled}: {} texts, chi-square {statistic:.1} with {freedom} degrees of freedom, z {z:.2}",
            sampler.temp,
            plain.len()
        );
        // Beyond 3.5 lies one of 4,000 honest samples; the seeds are fixed.
        assert!(freedom >= 3.0 && z < 3.5, "{statistic} with {freedom}");
    }
}

#[test]
fn samples_have_the_distribution_of_plain_decoding() {
    let model = Model::open(&demo());
    for sampler in warm_and_hot() {
        compare_distributions(&model, 400, &sampler);
    }
}

#[test]
#[ignore = "takes many minutes"]
fn many_warm_samples_have_the_distribution_of_plain_decoding() {
    compare_distributions(&Model::open(&demo()), 20_000, &warm_and_hot()[0]);
}

#[test]
#[ignore = "takes many minutes"]
fn many_hot_samples_have_the_distribution_of_plain_decoding() {
    compare_distributions(&Model::open(&demo()), 20_000, &warm_and_hot()[1]);
}

#[test]
fn the_test_of_distributions_sees_a_difference() {
    // Without temperature one text only, against many: the statistic has to say so.
    let model = Model::open(&demo());
    let prompt = model.chat("Tell me a story about a boat.");
    let of = |temp: f32| SamplerParams {
        temp,
        ..SamplerParams::default()
    };
    let a = count_texts(&model, &prompt, &of(1.0), None, 0..300);
    let b = count_texts(&model, &prompt, &of(0.7), None, 300..600);
    let (statistic, freedom) = chi_square(&a, &b);
    assert!(
        statistic > freedom + 6.0 * (2.0 * freedom).sqrt(),
        "{statistic} {freedom}"
    );
}

#[test]
fn acceptance_is_what_teacher_forcing_says() {
    let model = Model::demo_in_f32();
    let greedy = SamplerParams::greedy();
    let (mut first, mut right, mut accepted, mut drafted) = (0, 0, 0, 0);
    for question in &QUESTIONS[..4] {
        let prompt = model.chat(question);
        let request = Request {
            prompt: prompt.clone(),
            n_predict: Some(100),
            ..Request::default()
        };
        let (answer, _) = model.answer(&request, &greedy, Some(&depth(1)), f32_params(), None);
        let stats = answer.speculation.unwrap();
        accepted += stats.accepted;
        drafted += stats.drafted;
        // The head's guess for each token of the answer, with the true tokens before it.
        let text = [prompt.as_slice(), &answer.tokens].concat();
        let mut session = model.session(SessionParams {
            mtp: true,
            ..f32_params()
        });
        let (_, head) = session.eval_with_head(&text, &never()).unwrap();
        let guesses: Vec<u32> = head.chunks(model.n_vocab).map(argmax).collect();
        // A draft of one stands at every place that the round before did not fill: go through the rounds.
        let mut at = prompt.len();
        while at + 1 < text.len() {
            let hit = guesses[at] == text[at + 1];
            // The last token that is asked for is never drafted.
            if at + 2 < text.len() || answer.tokens.len() < 100 {
                first += 1;
                right += usize::from(hit);
            }
            at += 1 + usize::from(hit);
        }
    }
    println!("accepted {accepted} of {drafted}; teacher forcing says {right} of {first}");
    assert_eq!((accepted as usize, drafted as usize), (right, first));
    assert!(accepted * 10 > drafted * 7, "{accepted} of {drafted}");
}

#[test]
fn speculation_gives_plain_decodings_bits_for_quantized_weights() {
    // Long enough that plain decoding would split its keys between threads.
    let model = Model::open(&demo());
    let exact = SessionParams::default();
    let mut prompt = model.chat(QUESTIONS[5]);
    let mut story = prompt.clone();
    while prompt.len() < 560 {
        prompt.splice(0..0, story.drain(..).take(40));
        story = model.chat(QUESTIONS[16]);
    }
    for prompt in [prompt, model.chat(QUESTIONS[0])] {
        let request = Request {
            prompt,
            n_predict: Some(60),
            ignore_eos: true,
            ..Request::default()
        };
        for sampler in samplers() {
            let (plain, mut a) = model.answer(&request, &sampler, None, exact, None);
            for n in [1, 4, 6] {
                let (guessed, mut b) =
                    model.answer(&request, &sampler, Some(&depth(n)), exact, None);
                assert_eq!(plain.tokens, guessed.tokens, "depth {n}");
                // Bit by bit: the same keys, values and states (the plain session has no head).
                let (a, b) = (a.snapshot().unwrap(), b.snapshot().unwrap());
                for part in a.parts() {
                    assert!(b.parts().contains(part), "depth {n}");
                }
            }
        }
    }
}

#[test]
fn the_head_costs_its_own_tensors_and_cells() {
    let model = Model::open(&demo());
    let plain = model.session(SessionParams::default());
    let with = model.session(SessionParams {
        mtp: true,
        n_rollback: 3,
        ..SessionParams::default()
    });
    let config = model.engine.config();
    let attention = config.layers.iter().filter(|l| !l.recurrent).count();
    let (a, b) = (plain.bytes(), with.bytes());
    // One more layer of keys and values.
    assert_eq!(b.kv * attention, a.kv * (attention + 1));
    // Its last hidden state, and those that it may lag behind.
    let hidden = (1 + MAX_OWED) * 4 * config.n_embd as usize;
    assert_eq!(b.state, a.state + hidden);
    // States of three more tokens.
    assert!(b.rollback >= 3 * a.state * 9 / 10 && b.rollback < 4 * a.state);
    // Nothing of the weights is there twice.
    let weights = model.engine.weight_bytes();
    assert_eq!(weights.copied + weights.repacked, 0);
    let file: usize = model.engine.files().tensor_bytes();
    assert_eq!(weights.mapped, file);
}

#[test]
fn damaged_heads_are_mended_or_switched_off() {
    let original = Variant::read(&demo());
    let block = "blk.8.";
    let norms = [
        "attn_norm",
        "post_attention_norm",
        "attn_q_norm",
        "attn_k_norm",
        "nextn.enorm",
        "nextn.hnorm",
        "nextn.shared_head_norm",
    ];
    // Norms stored without their 1.
    let mut variant = Variant::read(&demo());
    let mut shifted = 0;
    for tensor in &mut variant.tensors {
        if norms
            .iter()
            .any(|n| tensor.name == format!("{block}{n}.weight"))
        {
            for value in tensor.data.as_chunks_mut::<4>().0 {
                *value = (f32::from_le_bytes(*value) - 1.0).to_le_bytes();
            }
            shifted += 1;
        }
    }
    assert!(shifted >= 6, "{shifted}");
    let (mended, sound) = (Model::made(&variant), Model::made(&original));
    let reason = &mended.engine.mtp_status().reason;
    assert!(
        mended.engine.mtp_status().on && reason.contains("mended"),
        "{reason}"
    );
    assert!(!sound.engine.mtp_status().reason.contains("mended"));
    let drafts = |model: &Model| {
        let mut session = model.session(SessionParams {
            mtp: true,
            ..f32_params()
        });
        evaluate(&mut session, &model.chat(QUESTIONS[0]));
        session.draft(7, 4).unwrap().1.to_vec()
    };
    assert!(max_diff(&drafts(&mended), &drafts(&sound)) < 1e-3);

    // A head of zeros.
    let mut variant = Variant::read(&demo());
    for tensor in &mut variant.tensors {
        if tensor.name == format!("{block}nextn.eh_proj.weight") {
            tensor.data.fill(0);
        }
    }
    let zero = Model::made(&variant);
    assert!(!zero.engine.mtp_status().on);
    assert!(zero.engine.mtp_status().reason.contains("zeros"));

    // A head that ranks tokens at random is found out by its first drafts.
    let mut variant = Variant::read(&demo());
    let mut random = Random(9);
    for tensor in &mut variant.tensors {
        if tensor.name == format!("{block}nextn.shared_head_norm.weight") {
            for value in tensor.data.as_chunks_mut::<4>().0 {
                let sign = if random.below(2) == 0 { 1.0f32 } else { -1.0 };
                *value = sign.to_le_bytes();
            }
        }
    }
    let garbage = Model::made(&variant);
    let request = Request {
        prompt: garbage.chat(QUESTIONS[0]),
        n_predict: Some(150),
        ..Request::default()
    };
    let greedy = SamplerParams::greedy();
    let (plain, _) = garbage.answer(&request, &greedy, None, f32_params(), None);
    let (answer, _) = garbage.answer(&request, &greedy, Some(&depth(2)), f32_params(), None);
    let stats = answer.speculation.unwrap();
    assert_eq!(plain.tokens, answer.tokens);
    assert_eq!(stats.rounds, 8, "{stats:?}");
}
