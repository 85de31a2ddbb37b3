//! Importance matrices: what is summed, against sums made by hand, and what quantizers make of it.

use std::path::Path;
use std::process::{Command, Stdio};

use convert::imatrix::{Entry, Imatrix};
use convert::parts;
use convert::quantize::{Options, Plan};
use convert::recipe::{FileType, Overrides, is_quantized};
use ggml_metal::Gguf;
use ggml_metal::peer::PeerQuantize;
use qrun::imatrix::collect;

use crate::support::{demo, engine, synth};

const CHUNK: usize = 48;
const N_CHUNKS: usize = 3;

fn tokens(n_vocab: u64) -> Vec<u32> {
    let n = (CHUNK * N_CHUNKS + 5) as u64;
    (0..n).map(|i| (i * 7919 % n_vocab) as u32).collect()
}

fn observe(path: &Path, n_vocab: u64) -> Imatrix {
    let mut chunks = Vec::new();
    let imatrix = collect(&engine(path), &tokens(n_vocab), CHUNK, None, &mut |done| {
        chunks.push(done);
        true
    })
    .unwrap();
    assert_eq!(chunks, [1, 2, 3]);
    assert_eq!(imatrix.n_chunks as usize, N_CHUNKS);
    assert_eq!(imatrix.chunk_size as usize, CHUNK);
    imatrix
}

fn floats(file: &Gguf, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    tensor.dtype.dequantize(file.data(tensor)).unwrap()
}

/// `row / sqrt(mean(row^2) + eps) * weight`, squared.
fn squared_norm<'a>(row: &'a [f32], weight: &'a [f32]) -> impl Iterator<Item = f64> + 'a {
    let mean: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / row.len() as f64;
    let factor = 1.0 / (mean + 1e-6).sqrt();
    row.iter()
        .zip(weight)
        .map(move |(&v, &w)| (f64::from(v) * factor * f64::from(w)).powi(2))
}

fn assert_close(seen: &[f32], expected: &[f64]) {
    assert_eq!(seen.len(), expected.len());
    for (i, (a, b)) in seen.iter().zip(expected).enumerate() {
        assert!((f64::from(*a) - b).abs() <= 1e-4 * b + 1e-7, "{i}: {a} {b}");
    }
}

#[test]
fn sums_are_those_of_the_inputs() {
    let path = demo();
    let imatrix = observe(&path, 8000);
    let file = Gguf::open(&path).unwrap();
    let entry = |name: &str| &imatrix.entries[name];

    // What a layer's projections see first is the normed embedding; the draft head sees it too, from the second
    // token on.
    let embd = floats(&file, "token_embd.weight");
    let n_embd = 512;
    let attn_norm = floats(&file, "blk.0.attn_norm.weight");
    let enorm = floats(&file, "blk.8.nextn.enorm.weight");
    let (mut first, mut head) = (vec![0.0; n_embd], vec![0.0; n_embd]);
    for (i, &token) in tokens(8000)[..CHUNK * N_CHUNKS].iter().enumerate() {
        let row = &embd[token as usize * n_embd..][..n_embd];
        for (sum, value) in first.iter_mut().zip(squared_norm(row, &attn_norm)) {
            *sum += value;
        }
        if i % CHUNK > 0 {
            for (sum, value) in head.iter_mut().zip(squared_norm(row, &enorm)) {
                *sum += value;
            }
        }
    }
    for name in ["attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"] {
        let entry = entry(&format!("blk.0.{name}.weight"));
        assert_close(&entry.sums, &first);
        assert_eq!(entry.counts, [(CHUNK * N_CHUNKS) as f32]);
    }
    let eh_proj = entry("blk.8.nextn.eh_proj.weight");
    assert_close(&eh_proj.sums[..n_embd], &head);
    assert_eq!(eh_proj.counts, [((CHUNK - 1) * N_CHUNKS) as f32]);

    // Every matrix of every layer is there, and nothing else.
    for tensor in file.tensors() {
        if is_quantized(&tensor.name, &tensor.shape) && tensor.name.starts_with("blk.") {
            let entry = entry(&tensor.name);
            assert_eq!(
                entry.sums.len(),
                tensor.shape[0] as usize,
                "{}",
                tensor.name
            );
            assert!(entry.sums.iter().all(|v| v.is_finite() && *v >= 0.0));
            assert!(entry.sums.iter().any(|v| *v > 0.0), "{}", tensor.name);
        }
    }
    for name in imatrix.entries.keys() {
        assert!(file.tensor(name).is_some(), "{name}");
    }
}

#[test]
fn experts_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = synth::moe(folder.path());
    let imatrix = observe(&path, synth::N_VOCAB as u64);
    let (n_embd, n_expert, n_used) = (256, 16, 4);
    for il in 0..4 {
        let entry = |name: &str| &imatrix.entries[&format!("blk.{il}.{name}.weight")];
        let (gate, down) = (entry("ffn_gate_exps"), entry("ffn_down_exps"));
        assert_eq!(gate.counts.len(), n_expert);
        assert_eq!(gate.counts, down.counts);
        assert_eq!(gate, entry("ffn_up_exps"));
        let n: f32 = gate.counts.iter().sum();
        assert_eq!(n as usize, n_used * CHUNK * N_CHUNKS);
        // Some experts are liked better than others.
        assert!(gate.counts.iter().any(|&c| c != gate.counts[0]));
        // Each token goes to four experts, and to the shared one once.
        let shared: Vec<f64> = entry("ffn_gate_shexp")
            .sums
            .iter()
            .map(|&v| 4.0 * f64::from(v))
            .collect();
        let routed: Vec<f32> = (0..n_embd)
            .map(|i| gate.sums.chunks_exact(n_embd).map(|row| row[i]).sum())
            .collect();
        assert_close(&routed, &shared);
        for (expert, row) in down.sums.chunks_exact(256).enumerate() {
            assert_eq!(row.iter().any(|v| *v > 0.0), down.counts[expert] > 0.0);
        }
    }
    // llama.cpp's quantizer makes the same of it.
    same_file(&path, &imatrix, FileType::Q4_K_M);
}

/// Writes and reads the matrix, and quantizes with it here and there.
fn same_file(path: &Path, imatrix: &Imatrix, file_type: FileType) {
    let folder = tempfile::tempdir().unwrap();
    let stored = folder.path().join("imatrix.gguf");
    imatrix.write(&stored).unwrap();
    let read = Imatrix::read(&stored).unwrap();
    assert_eq!(&read, imatrix);
    let means = |(name, entry): (&String, &Entry)| (name.clone(), entry.means());
    let means: Vec<_> = read.entries.iter().map(means).collect();
    let numbers = [
        ("quantize.imatrix.entries_count", means.len() as u32),
        ("quantize.imatrix.chunks_count", read.n_chunks),
    ];
    let (a, b) = (folder.path().join("a.gguf"), folder.path().join("b.gguf"));
    let options = Options {
        file_type,
        overrides: Overrides::default(),
        imatrix: Some(("imatrix.gguf".to_owned(), read)),
        allow_requantize: true,
        n_threads: 2,
    };
    let files = parts::open(path).unwrap();
    let plan = Plan::new(&files, &options).unwrap();
    plan.write(&a, &mut |_, _| true).unwrap();
    let theirs = PeerQuantize {
        allow_requantize: true,
        imatrix: &means,
        texts: &[("quantize.imatrix.file", "imatrix.gguf")],
        numbers: &numbers,
        ..PeerQuantize::new(file_type.number(), 2)
    };
    theirs.run(path, &b).unwrap();
    assert!(std::fs::read(&a).unwrap() == std::fs::read(&b).unwrap());
}

#[test]
fn the_command() {
    let folder = tempfile::tempdir().unwrap();
    let name = |file: &str| folder.path().join(file).display().to_string();
    let (text, imatrix, small) = (name("t.txt"), name("i.gguf"), name("s.gguf"));
    let story = "Once upon a time there was a fox named Pip who lived in a forest. ";
    std::fs::write(&text, story.repeat(20)).unwrap();
    let demo = demo().display().to_string();
    let run = |args: &[&str], code: i32, words: &str| {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
        command.args(args).stdin(Stdio::null());
        command.env("QRUN_CONFIG", "").env("QRUN_THREADS", "2");
        let output = command.output().unwrap();
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {line}");
        assert!(line.contains(words), "{args:?}: {line}");
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(output.stdout.is_empty());
    };
    let observe = [
        "imatrix", "-m", &demo, "-f", &text, "-o", &imatrix, "-c", "64",
    ];
    run(
        &[&observe[..], &["--chunks", "2"]].concat(),
        0,
        "over 2 chunks of 64 tokens",
    );
    let read = Imatrix::read(Path::new(&imatrix)).unwrap();
    assert_eq!((read.n_chunks, read.datasets), (2, vec![text.clone()]));
    run(
        &["imatrix", "-m", &demo, "-f", &text, "-o", &imatrix],
        1,
        "too few for chunks of 512",
    );
    run(
        &["imatrix", "-m", &demo, "-f", &text, "-o", &demo, "-c", "64"],
        1,
        "is the file that is read",
    );
    run(
        &["imatrix", "-m", &demo, "-f", &text, "-c", "1"],
        2,
        "chunks have 2 to",
    );
    run(
        &[
            "quantize",
            &demo,
            &small,
            "IQ4_XS",
            "--allow-requantize",
            "--imatrix",
            &imatrix,
        ],
        0,
        "bits per weight",
    );
    let file = Gguf::open(Path::new(&small)).unwrap();
    assert!(file.value("quantize.imatrix.entries_count").is_some());
}
