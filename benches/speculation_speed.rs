//! Speculation against plain decoding and against llama.cpp's plain decoding, by kind of text.
//!
//! `cargo bench --bench speculation_speed -- [-n N] [-r N] [-t N] [--temp T] [--way NAME].. [--json OUT] [FILE]`
//!
//! For each kind of text every way of decoding generates the same prompts in turn, so that what disturbs the machine
//! disturbs all of them alike; every other repetition goes through them backwards. The table has medians over all
//! texts of a kind.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use ggml_metal::peer::{PeerContext, PeerModel, PeerOptions, PeerParams};
use ggml_metal::{DType, Gguf, performance_cores};
use qrun::engine::{Engine, EngineParams};
use qrun::generate::{Generator, Request};
use qrun::sampler::{Sampler, SamplerParams};
use qrun::session::{CancelToken, Session, SessionParams};
use qrun::speculate::{Depth, SpecParams, Speculator};
use qrun::vocab;
use serde_json::json;

#[derive(Parser)]
struct Args {
    /// GGUF file [default: the demo model]
    file: Option<PathBuf>,
    /// Tokens of each text
    #[arg(short, long, default_value_t = 256)]
    n_decode: usize,
    /// Repetitions
    #[arg(short, long, default_value_t = 3)]
    repetitions: usize,
    /// Threads [default: performance cores]
    #[arg(short, long)]
    threads: Option<usize>,
    /// Temperature
    #[arg(long, default_value_t = 0.0)]
    temp: f32,
    /// Only these ways besides plain decoding, such as `auto` or `depth 3`
    #[arg(long = "way", value_name = "NAME")]
    ways: Vec<String>,
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// What `cargo bench` passes
    #[arg(long, hide = true)]
    bench: bool,
}

/// Kinds of text with prompts that lead to them; prose goes on from the text itself.
const KINDS: [(&str, bool, [&str; 3]); 5] = [
    (
        "stories",
        true,
        [
            "Tell me a story about a fox named Pip.",
            "Tell me a story about a boat.",
            "Tell me a story about two friends.",
        ],
    ),
    (
        "chats",
        true,
        [
            "What is the capital of France?",
            "List three animals.",
            "My name is Anna. What is my name?",
        ],
    ),
    (
        "prose",
        false,
        [
            "It was a dark evening in the month of November, and the old gentleman",
            "There was once a time when the ships came up the river every morning,",
            "The house stood upon a hill, and from its windows one could see",
        ],
    ),
    (
        "code",
        true,
        [
            "Write a Python function that adds two numbers.",
            "Write a Rust function that doubles a number.",
            "Write a Python function that reverses a list.",
        ],
    ),
    (
        "JSON",
        true,
        [
            "Give me a JSON object with a name and an age.",
            "Give me a JSON list of three colours.",
            "Give me a JSON object for a book.",
        ],
    ),
];

/// A way of decoding, and what it reached: tokens a second of each text.
struct Way {
    name: String,
    spec: Option<SpecParams>,
    speculator: Option<Speculator>,
    tps: Vec<f64>,
    drafted: u64,
    accepted: u64,
}

fn main() {
    let args = Args::parse();
    let file = args.file.clone().unwrap_or_else(|| {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/demo-Q4_K_M.gguf")
    });
    let n_threads = args.threads.unwrap_or_else(performance_cores);
    let params = EngineParams {
        device: Some("CPU".to_owned()),
        n_threads: Some(n_threads),
        ..EngineParams::default()
    };
    let engine = Engine::load(&file, &params, &mut |_, _| {}).unwrap();
    let tokenizer = vocab::tokenizer(&Gguf::open(&file).unwrap()).unwrap();
    let n_ctx = args.n_decode + 256;
    let mut plain = Session::new(
        engine.clone(),
        SessionParams {
            n_ctx,
            ..SessionParams::default()
        },
    )
    .unwrap();
    let mut guessing = Session::new(
        engine.clone(),
        SessionParams {
            n_ctx,
            mtp: true,
            n_rollback: 4,
            ..SessionParams::default()
        },
    )
    .unwrap();
    let options = PeerOptions {
        repack: true,
        ..PeerOptions::default()
    };
    let model = PeerModel::load(&file, &options).unwrap();
    let peer_params = PeerParams {
        n_ctx,
        n_batch: 512,
        flash_attn: true,
        type_k: DType::F16,
        type_v: DType::F16,
    };
    let mut peer = PeerContext::new(&model, &engine.backends()[0], &peer_params).unwrap();
    println!(
        "qrun {} | {} | {n_threads} threads | {} tokens a text, {} repetitions, temperature {}",
        *qrun::VERSION,
        file.file_name().unwrap().to_string_lossy(),
        args.n_decode,
        args.repetitions,
        args.temp
    );
    println!("| text | way | tok/s | against plain (smallest to largest) | acceptance |");
    println!("| --- | --- | --- | --- | --- |");
    let mut results = Vec::new();
    for (kind, chat, prompts) in KINDS {
        let mut ways = ways();
        ways.retain(|w| w.spec.is_none() || args.ways.is_empty() || args.ways.contains(&w.name));
        let mut theirs = Vec::new();
        for repetition in 0..args.repetitions {
            for text in prompts {
                let text = if chat {
                    format!(
                        "<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
                    )
                } else {
                    text.to_owned()
                };
                let prompt = tokenizer.encode(&text, true).unwrap();
                let mut texts = Vec::new();
                let mut order: Vec<&mut Way> = ways.iter_mut().collect();
                if repetition % 2 == 1 {
                    order.reverse();
                }
                for way in order {
                    let session = if way.spec.is_some() {
                        &mut guessing
                    } else {
                        &mut plain
                    };
                    session.clear().unwrap();
                    let mut sampler = Sampler::new(SamplerParams {
                        temp: args.temp,
                        seed: repetition as u64,
                        ..SamplerParams::default()
                    })
                    .unwrap();
                    let request = Request {
                        prompt: prompt.clone(),
                        n_predict: Some(args.n_decode),
                        ignore_eos: !chat,
                        ..Request::default()
                    };
                    let answer = Generator {
                        session,
                        tokenizer: &tokenizer,
                        sampler: &mut sampler,
                        constraint: None,
                        speculator: way.speculator.as_mut(),
                        watch: None,
                    }
                    .answer(&request, &CancelToken::default(), &mut |_| Ok(()))
                    .unwrap();
                    way.tps.push(answer.decode_tps());
                    if let Some(stats) = &answer.speculation {
                        way.drafted += stats.drafted;
                        way.accepted += stats.accepted;
                    }
                    let drawn = way.spec.is_some_and(|s| s.sampled);
                    if !drawn {
                        texts.push(answer.tokens);
                    }
                }
                if texts.iter().any(|t| t != &texts[0]) {
                    println!(
                        "note: {kind}: the texts of a prompt differ (quantized weights, no --spec-exact)"
                    );
                }
                theirs.push(peer_tps(&mut peer, &prompt, texts[0].len()));
            }
        }
        let base = ways[0].tps.clone();
        let mut row = |name: &str, tps: &[f64], acceptance: Option<f64>| {
            let ratios: Vec<f64> = tps.iter().zip(&base).map(|(a, b)| a / b).collect();
            let (low, high) = spread(&ratios);
            println!(
                "| {kind} | {name} | {:.1} | {:.3} ({low:.3} to {high:.3}) | {} |",
                median(tps),
                median(&ratios),
                acceptance.map_or(String::new(), |a| format!("{:.0} %", 100.0 * a))
            );
            results.push(json!({
                "kind": kind, "way": name, "tps": tps, "ratio": median(&ratios), "smallest": low, "largest": high,
                "acceptance": acceptance,
            }));
        };
        for way in &ways {
            let acceptance = (way.drafted > 0).then(|| way.accepted as f64 / way.drafted as f64);
            row(&way.name, &way.tps, acceptance);
        }
        row("llama.cpp, plain", &theirs, None);
    }
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&results).unwrap()).unwrap();
    }
}

fn ways() -> Vec<Way> {
    let fixed = |n| SpecParams {
        depth: Depth::Fixed(n),
        draft_max: n,
        ..SpecParams::default()
    };
    let mut list = vec![
        ("plain".to_owned(), None),
        ("auto".to_owned(), Some(SpecParams::default())),
    ];
    list.extend((1..=4).map(|n| (format!("depth {n}"), Some(fixed(n)))));
    list.push((
        "depth 3, drawn".to_owned(),
        Some(SpecParams {
            sampled: true,
            ..fixed(3)
        }),
    ));
    list.into_iter()
        .map(|(name, spec)| Way {
            name,
            spec,
            speculator: spec.map(|s| Speculator::new(s, None)),
            tps: Vec::new(),
            drafted: 0,
            accepted: 0,
        })
        .collect()
}

/// llama.cpp's tokens a second over as many tokens, greedy.
fn peer_tps(peer: &mut PeerContext, prompt: &[u32], n: usize) -> f64 {
    peer.clear();
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    let mut best = |logits: &[f32]| sampler.sample(logits, 0).unwrap();
    let mut token = best(&peer.decode(prompt, false).unwrap());
    let start = Instant::now();
    for _ in 1..n {
        token = best(peer.next(token).unwrap());
    }
    (n.max(2) - 1) as f64 / start.elapsed().as_secs_f64()
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
