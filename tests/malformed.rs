//! Damaged and hostile files: each gives one line that names the file, never a panic, an abort or a large
//! allocation. What still opens is loaded and run, so that no number gets past the checks to abort in C.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;
#[path = "support/variants.rs"]
mod variants;

use std::path::{Path, PathBuf};

use ggml_metal::{DType, Gguf, Value};
use qrun::engine::{Engine, EngineParams};
use qrun::model::ModelFiles;
use qrun::model::weights::Plan;
use qrun::session::{Outputs, Session, SessionParams};
use qrun::template::ChatTemplate;
use qrun::vocab;
use support::never;
use variants::{Part, Random, Variant, synthetic, text};

/// Peak memory that these tests may take: the files have less than 1 MiB.
const MAX_RSS_KIB: u64 = 1 << 20;

/// Checks the form of a refusal and returns it.
fn one_line_that_names(file: &str, error: &anyhow::Error) -> String {
    let message = format!("{error:#}");
    assert!(message.contains(file), "not named: {message:?}");
    let controls = message.chars().any(char::is_control);
    assert!(!controls, "not one line: {message:?}");
    assert!(message.len() < 2000, "{} bytes: {message}", message.len());
    message
}

/// What is read of a file besides the model: each may be unusable, and says so in one line.
fn what_else_is_read(file: &Gguf) {
    let name = file.path().file_name().unwrap().to_string_lossy();
    if let Err(error) = vocab::tokenizer(file) {
        one_line_that_names(&name, &error);
    }
    if let Some(template) = vocab::chat_template(file) {
        let _ = ChatTemplate::new(&template);
    }
    vocab::recommended_sampling(file);
}

/// Opens, checks, loads and runs a file. Refusals before running must be one line that names the file.
fn attempt(path: &Path) -> Result<(), String> {
    let name = path.file_name().unwrap().to_string_lossy();
    let loaded = (|| {
        let files = ModelFiles::open(path, None)?;
        Plan::make(&files)?;
        what_else_is_read(files.main());
        let params = EngineParams {
            device: Some("CPU".to_owned()),
            n_threads: Some(1),
            ..EngineParams::default()
        };
        Engine::load(path, &params, &mut |_, _| {})
    })();
    let engine = match loaded {
        Ok(engine) => engine,
        Err(error) => {
            return Err(one_line_that_names(&name, &error));
        }
    };
    let params = SessionParams {
        n_ctx: engine.config().n_ctx_train.min(64),
        mtp: engine.mtp_status().on,
        ..SessionParams::default()
    };
    let run = Session::new(engine, params).and_then(|mut session| {
        session.eval(&[0, 0], Outputs::Last, &never())?;
        if session.params().mtp {
            session.draft(0, 2)?;
        }
        Ok(())
    });
    // Numbers that make no sense may compute nonsense, or want more memory than there is.
    if let Err(error) = run {
        assert!(!format!("{error:#}").contains('\n'), "{error:#}");
    }
    Ok(())
}

struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("hostile.gguf")
    }

    /// Some file systems wait for the disk when a file is overwritten, none when it is new.
    fn write(&self, bytes: &[u8]) {
        let _ = std::fs::remove_file(self.path());
        std::fs::write(self.path(), bytes).unwrap();
    }

    fn bytes(&self, bytes: &[u8]) -> Result<(), String> {
        self.write(bytes);
        attempt(&self.path())
    }

    fn variant(&self, variant: &Variant) -> Result<(), String> {
        self.bytes(&variant.to_bytes(32).0)
    }

    fn refused(&self, bytes: &[u8], why: &str) {
        match self.bytes(bytes) {
            Ok(()) => panic!("accepted, although {why}"),
            Err(message) => assert!(message.contains(why), "{message}, expected {why}"),
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let Ok(status) = std::fs::read_to_string("/proc/self/status") else {
            return;
        };
        let peak = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .unwrap();
        let kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        println!("peak memory {} MiB", kib / 1024);
        if !std::thread::panicking() {
            assert!(kib < MAX_RSS_KIB, "{kib} KiB");
        }
    }
}

fn whole() -> Vec<u8> {
    synthetic(false).to_bytes(32).0
}

fn patched(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut file = whole();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    file
}

fn find(file: &[u8], what: &[u8]) -> usize {
    file.windows(what.len()).position(|w| w == what).unwrap()
}

/// Where the description of a tensor goes on after its name: dimensions, shape, type, offset.
fn after_name(file: &[u8], name: &str) -> usize {
    let mut wanted = Vec::new();
    text(&mut wanted, name);
    find(file, &wanted) + wanted.len()
}

#[test]
fn the_whole_file_is_accepted() {
    let bench = Bench::new();
    bench.variant(&synthetic(false)).unwrap();
    bench.variant(&synthetic(true)).unwrap();
}

#[test]
fn bad_headers_are_refused() {
    let bench = Bench::new();
    bench.refused(b"", "is empty");
    bench.refused(b"GGU", "is not a GGUF file");
    bench.refused(b"GGUF", "is cut short");
    bench.refused(&whole()[..23], "is cut short");
    bench.refused(
        b"PK\x03\x04 and more than twenty-four bytes",
        "is not a GGUF file",
    );
    bench.refused(&patched(0, b"FUGG"), "is not a GGUF file");
    for version in [0u32, 1, 4, 1000, 3u32.swap_bytes(), u32::MAX] {
        bench.refused(&patched(4, &version.to_le_bytes()), "version");
    }
    for at in [8, 16] {
        for n in [u64::MAX, 1 << 63, 1 << 62, 1 << 40, 1 << 32, 10_000] {
            bench.refused(&patched(at, &n.to_le_bytes()), "header cannot be read");
        }
    }
    // The first key's length.
    for n in [u64::MAX, 1 << 63, 1 << 62, 1 << 40, 1 << 31, 0] {
        bench.refused(&patched(24, &n.to_le_bytes()), "header cannot be read");
    }
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let bench = Bench::new();
    let (file, header) = synthetic(false).to_bytes(32);
    let mut cuts: Vec<usize> = (0..header).step_by(41).collect();
    cuts.extend((0..40).map(|i| header + i * (file.len() - header) / 40));
    cuts.extend([1, 2, 3].map(|n| file.len() - n));
    for cut in cuts {
        assert!(
            bench.bytes(&file[..cut]).is_err(),
            "cut at {cut} of {}",
            file.len()
        );
    }
    bench.refused(&file[..file.len() - 1], "cut short");
}

#[test]
fn bad_values_are_refused() {
    let bench = Bench::new();
    let changed = |key: &str, value: Value, why: &str| {
        let mut variant = synthetic(true);
        variant.set_arch(key, value);
        bench.refused(&variant.to_bytes(32).0, why);
    };
    for (key, value) in [
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 3),
        ("attention.head_count", 0),
        ("attention.head_count", 1 << 40),
        ("attention.key_length", 1 << 30),
        ("attention.value_length", 16),
        ("block_count", 0),
        ("block_count", 1_000_000_000),
        ("block_count", -1),
        ("nextn_predict_layers", 5),
        ("nextn_predict_layers", -1),
        ("context_length", 0),
        ("context_length", 1 << 40),
        ("embedding_length", 1 << 40),
        ("expert_count", 0),
        ("expert_used_count", 7),
        ("expert_used_count", 0),
        ("expert_feed_forward_length", 1 << 31),
        ("rope.dimension_count", 0),
        ("rope.dimension_count", 15),
        ("rope.dimension_count", 34),
        ("ssm.conv_kernel", 0),
        ("ssm.conv_kernel", 1 << 31),
        ("ssm.state_size", 0),
        ("ssm.state_size", 1 << 20),
        ("ssm.group_count", 3),
        ("ssm.time_step_rank", 1 << 32),
        ("ssm.inner_size", 127),
        ("full_attention_interval", 0),
    ] {
        let name = key.split('.').next_back().unwrap();
        let related = match name {
            // Named by the number that it does not fit.
            "head_count_kv" if value == 3 => "head_count",
            "group_count" => "time_step_rank",
            "state_size" if value > 0 => "state_size",
            _ => name,
        };
        changed(key, Value::Int(value), related);
    }
    for sections in [
        vec![],
        vec![0, 0, 0, 0],
        vec![3, 3],
        vec![-1, 4, 4, 0],
        vec![16, 16, 16, 0],
    ] {
        changed(
            "rope.dimension_sections",
            Value::Ints(sections),
            "dimension_sections",
        );
    }
    changed(
        "attention.head_count",
        Value::Ints(vec![4, 4]),
        "head_count",
    );
    changed(
        "attention.head_count",
        Value::Ints(vec![4, 4, 4, 0, 4]),
        "head_count",
    );
    changed(
        "attention.recurrent_layers",
        Value::Bools(vec![true]),
        "recurrent_layers",
    );
    for value in [f64::NAN, f64::INFINITY, -1.0] {
        changed(
            "attention.layer_norm_rms_epsilon",
            Value::Float(value),
            "rms_epsilon",
        );
        changed("rope.freq_base", Value::Float(value), "freq_base");
    }
}

#[test]
fn every_key_is_needed_or_has_a_default_and_its_type_is_checked() {
    let bench = Bench::new();
    for moe in [false, true] {
        let base = synthetic(moe);
        let optional = [
            "nextn_predict_layers",
            "full_attention_interval",
            "expert_feed_forward_length",
            "expert_shared_feed_forward_length",
            "feed_forward_length",
        ];
        for (key, value) in base.metadata.clone() {
            if key.starts_with("tokenizer.") || key == "general.name" {
                continue;
            }
            let mut without = base.clone();
            without.remove(&key);
            let short = key.split_once('.').unwrap().1;
            match bench.variant(&without) {
                Ok(()) => assert!(optional.contains(&short), "{key}"),
                // The default of an expert's width is a share of the dense one, which tensors here do not have.
                Err(message) if moe && optional.contains(&short) => {
                    assert!(message.contains("expected"), "{message}");
                }
                Err(message) => assert!(message.contains(short), "{message}"),
            }
            let mut wrong = base.clone();
            let other = match value {
                Value::Str(_) => Value::Int(7),
                _ => Value::Str("seven\nlines".to_owned()),
            };
            // The dense width is not read where experts have their own.
            if moe && short == "feed_forward_length" {
                continue;
            }
            wrong.set(&key, other);
            bench.refused(&wrong.to_bytes(32).0, short);
        }
    }
}

#[test]
fn extreme_numbers_neither_panic_nor_abort() {
    let bench = Bench::new();
    for moe in [false, true] {
        let base = synthetic(moe);
        for (key, value) in base.metadata.clone() {
            let changed = |value: Value| {
                let mut variant = base.clone();
                variant.set(&key, value);
                let _ = bench.variant(&variant);
            };
            match value {
                Value::Int(old) => {
                    let near = [old - 1, old + 1, old * 2, old / 2].map(i128::from);
                    let far = [
                        0,
                        1,
                        -1,
                        2,
                        3,
                        31,
                        33,
                        1 << 10,
                        1 << 16,
                        1 << 20,
                        (1 << 31) - 1,
                    ];
                    let out = [1 << 31, 1 << 32, 1 << 62, -(1 << 62)];
                    for v in near.into_iter().chain(far).chain(out) {
                        changed(Value::Int(v));
                        changed(Value::Ints(vec![v as i64; 5]));
                    }
                    changed(Value::Ints(vec![]));
                    changed(Value::Bools(vec![true; 5]));
                }
                Value::Float(_) => {
                    for v in [0.0, 1.0, 1e-45, 1e30, -0.0, f64::NAN, f64::INFINITY, 0.5] {
                        changed(Value::Float(v));
                    }
                }
                Value::Ints(old) => {
                    for v in [0, 1, -1, 11, 8, 1 << 20, i64::MAX, i64::MIN] {
                        changed(Value::Ints(vec![v; old.len()]));
                        changed(Value::Ints(vec![v, 0, 0, 0]));
                    }
                }
                _ => {}
            }
        }
    }
}

#[test]
fn every_tensor_is_needed_and_its_shape_and_type_are_checked() {
    let bench = Bench::new();
    for moe in [false, true] {
        let base = synthetic(moe);
        for at in 0..base.tensors.len() {
            let name = base.tensors[at].name.clone();
            let mut without = base.clone();
            without.tensors.remove(at);
            match bench.variant(&without) {
                Ok(()) => assert!(
                    name.contains("eh_proj") || name.contains("shared_head"),
                    "{name}"
                ),
                Err(message) => {
                    let part = name.rsplit("blk.4.").next().unwrap();
                    assert!(message.contains(part), "{message}, expected {part}");
                }
            }
            // Wider (but for the embedding, whose rows say how many tokens there are), with an extra dimension,
            // and with dimensions exchanged.
            let shape = base.tensors[at].shape.clone();
            let mut wider = shape.clone();
            *wider.last_mut().unwrap() *= 2;
            let mut deeper = shape.clone();
            deeper.push(2);
            for shape in [wider, deeper] {
                let mut other = base.clone();
                let tensor = &mut other.tensors[at];
                let n = shape.iter().product::<i64>() as usize;
                tensor.data.resize(4 * n, 0);
                tensor.shape = shape;
                let file = other.to_bytes(32).0;
                if name == "token_embd.weight" && other.tensors[at].shape.len() == 2 {
                    bench.bytes(&file).unwrap();
                } else {
                    bench.refused(&file, &name);
                }
            }
            if shape.len() > 1 && shape[0] != shape[1] {
                let mut turned = base.clone();
                turned.tensors[at].shape.swap(0, 1);
                let _ = bench.variant(&turned);
            }
            // Integers are no weights, and small tensors are only taken as F32.
            let mut integers = base.clone();
            integers.tensors[at].dtype = DType::I32;
            bench.refused(&integers.to_bytes(32).0, &name);
            if shape.len() == 1 && !name.contains("shexp") {
                let mut halves = base.clone();
                let tensor = &mut halves.tensors[at];
                tensor.dtype = DType::F16;
                tensor.data.truncate(tensor.data.len() / 2);
                bench.refused(&halves.to_bytes(32).0, &name);
            }
        }
    }
    let mut scaled = synthetic(false);
    scaled.tensors.push(Part {
        name: "blk.0.ffn_up.scale".to_owned(),
        shape: vec![1],
        dtype: DType::F32,
        data: vec![0; 4],
    });
    bench.refused(&scaled.to_bytes(32).0, "blk.0.ffn_up.scale");
}

#[test]
fn bad_tensor_descriptions_are_refused() {
    let bench = Bench::new();
    let name = "blk.4.nextn.eh_proj.weight";
    let file = whole();
    let at = after_name(&file, name);
    // After the name: the number of dimensions, two of them, type, offset.
    let (shape, dtype, offset) = (at + 4, at + 20, at + 24);
    for n in [0u32, 1, 3, 5, 1 << 31] {
        assert!(bench.bytes(&patched(at, &n.to_le_bytes())).is_err());
    }
    for n in [0i64, -1, i64::MIN, i64::MAX, 1 << 62, 1 << 40] {
        assert!(bench.bytes(&patched(shape, &n.to_le_bytes())).is_err());
        assert!(
            bench
                .bytes(&patched(
                    shape,
                    &[n.to_le_bytes(), n.to_le_bytes()].concat()
                ))
                .is_err()
        );
    }
    for number in [4u32, 5, 31, 99, 9999, u32::MAX] {
        bench.refused(&patched(dtype, &number.to_le_bytes()), "type");
    }
    for n in [1u64, 32, 1 << 40, 1 << 63, u64::MAX, u64::MAX - 31] {
        bench.refused(&patched(offset, &n.to_le_bytes()), "offset");
    }

    let mut twice = synthetic(false);
    twice.tensors.push(twice.tensors[0].clone());
    bench.refused(&twice.to_bytes(32).0, "duplicate tensor");
    let mut twice = synthetic(false);
    twice.metadata.push(twice.metadata[0].clone());
    bench.refused(&twice.to_bytes(32).0, "duplicate key");
    // Names with control characters stay on one line, and long ones are cut.
    for name in ["two\nlines\x1b[2J", &"long".repeat(100_000)] {
        let mut named = synthetic(false);
        named
            .metadata
            .extend(vec![(name.to_owned(), Value::Int(1)); 2]);
        assert!(bench.variant(&named).is_err());
        let mut named = synthetic(false);
        named.tensors[0].name = name.to_owned();
        assert!(bench.variant(&named).is_err());
        let mut named = synthetic(false);
        named.set("general.architecture", Value::Str(name.to_owned()));
        assert!(bench.variant(&named).is_err());
        let mut named = synthetic(false);
        named.set("general.name", Value::Str(name.to_owned()));
        bench.variant(&named).unwrap();
    }
    for alignment in [0, 3, 1 << 31] {
        let mut aligned = synthetic(false);
        aligned.set("general.alignment", Value::Int(alignment));
        assert!(bench.variant(&aligned).is_err());
    }
    let mut aligned = synthetic(false);
    aligned.set("general.alignment", Value::Str("32".to_owned()));
    bench.refused(&aligned.to_bytes(32).0, "general.alignment");
}

#[test]
fn foreign_files_and_parts_are_refused() {
    let bench = Bench::new();
    let changed = |key: &str, value: Value, why: &str| {
        let mut variant = synthetic(false);
        variant.set(key, value);
        bench.refused(&variant.to_bytes(32).0, why);
    };
    changed(
        "general.architecture",
        Value::Str("llama".to_owned()),
        "`llama`",
    );
    changed(
        "general.architecture",
        Value::Str(String::new()),
        "architecture",
    );
    changed("split.count", Value::Int(1_000_000), "split.count");
    changed("split.count", Value::Int(i64::MAX.into()), "split.count");
    changed("split.count", Value::Int(3), "parts");
    let mut empty = synthetic(false);
    empty.tensors.clear();
    bench.refused(&empty.to_bytes(32).0, "token_embd.weight");
    empty.metadata.clear();
    bench.refused(&empty.to_bytes(32).0, "general.architecture");

    // A part that says of itself that it is another, under a name that has the others.
    let folder = bench.folder.path();
    for (no, count) in [(7, 3), (-1, 3), (1, 3), (0, 2)] {
        let mut part = synthetic(false);
        part.set("split.count", Value::Int(count));
        part.set("split.no", Value::Int(no));
        let path = folder.join("m-00001-of-00003.gguf");
        std::fs::write(&path, part.to_bytes(32).0).unwrap();
        let error = ModelFiles::open(&path, None).err().unwrap();
        assert!(error.to_string().contains("m-0000"), "{error}");
    }
}

#[test]
fn what_is_not_a_regular_file_is_refused() {
    let bench = Bench::new();
    let error = attempt(bench.folder.path()).unwrap_err();
    assert!(error.contains("is a directory"), "{error}");
    let error = attempt(&bench.folder.path().join("absent.gguf")).unwrap_err();
    assert!(
        error.contains("No such file") || error.contains("cannot find"),
        "{error}"
    );
    #[cfg(unix)]
    {
        let pipe = bench.folder.path().join("pipe.gguf");
        let made = std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap();
        assert!(made.success());
        let error = attempt(&pipe).unwrap_err();
        assert!(error.contains("is not a regular file"), "{error}");
    }
}

/// Values at the edges of what the format's numbers can say.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    3,
    0x7f,
    0xff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    0xffff_ffff_ffff_ffe0,
    0xffff_ffff_ffff_ffff,
];

/// Changes the file somewhere before the tensors' data.
fn mutate(file: &mut Vec<u8>, header: usize, fields: &[usize], random: &mut Random) {
    let at = random.below(header);
    match random.below(12) {
        0 => file[at] ^= 1 << random.below(8),
        1 => file[at] = random.next() as u8,
        2 => {
            let n = 1 + random.below(12);
            let bytes: Vec<u8> = (0..n).map(|_| random.next() as u8).collect();
            file.splice(at..at, bytes);
        }
        3 => {
            let end = (at + 1 + random.below(24)).min(file.len());
            file.drain(at..end);
        }
        4 => {
            let from = random.below(header);
            let n = (1 + random.below(64)).min(file.len() - at.max(from));
            file.copy_within(from..from + n, at);
        }
        // What comes after a name decides most: types, counts, values, shapes, offsets.
        _ => {
            let at = fields[random.below(fields.len())] + 4 * random.below(6);
            let width = if random.below(2) == 0 { 4 } else { 8 };
            let value = match random.below(3) {
                0 => EDGES[random.below(EDGES.len())],
                1 => random.next() >> random.below(64),
                _ => random.below(300) as u64,
            };
            if at + width <= file.len() {
                file[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            }
        }
    }
}

/// Half of them of a dense model, half of a mixture of experts.
const N_MUTATIONS: u64 = 10_000;

#[test]
fn ten_thousand_mutations_neither_panic_nor_abort() {
    let bench = Bench::new();
    let (mut refused, mut accepted) = (0, 0);
    for moe in [false, true] {
        let variant = synthetic(moe);
        let (whole, header) = variant.to_bytes(32);
        let keys = variant.metadata.iter().map(|(key, _)| key);
        let names = keys.chain(variant.tensors.iter().map(|t| &t.name));
        let fields: Vec<usize> = names.map(|name| after_name(&whole, name)).collect();
        for seed in 0..N_MUTATIONS / 2 {
            let mut random = Random(seed);
            let mut file = whole.clone();
            for _ in 0..1 + random.below(2) {
                mutate(&mut file, header, &fields, &mut random);
            }
            bench.write(&file);
            let outcome = std::panic::catch_unwind(|| attempt(&bench.path()));
            match outcome {
                Ok(Ok(())) => accepted += 1,
                Ok(Err(_)) => refused += 1,
                Err(_) => panic!("seed {seed}, moe {moe}"),
            }
        }
    }
    println!("{refused} refused, {accepted} accepted");
    assert!(
        refused > N_MUTATIONS / 4 && accepted > N_MUTATIONS / 50,
        "{refused} refused, {accepted} accepted"
    );
}

#[test]
fn weights_that_are_no_numbers_neither_panic_nor_abort() {
    let bench = Bench::new();
    for moe in [false, true] {
        let base = synthetic(moe);
        for at in 0..base.tensors.len() {
            for value in [f32::NAN, f32::INFINITY] {
                // All of it, or every third number.
                for step in [1, 3] {
                    let mut variant = base.clone();
                    let numbers = variant.tensors[at].data.chunks_exact_mut(4).step_by(step);
                    numbers.for_each(|number| number.copy_from_slice(&value.to_le_bytes()));
                    bench.variant(&variant).unwrap();
                }
            }
        }
    }
}
