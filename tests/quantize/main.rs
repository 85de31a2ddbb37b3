//! Quantizing: the types that llama.cpp chooses, the bytes that it writes, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod imatrix;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use convert::imatrix::{Entry, Imatrix};
use convert::output::Interrupted;
use convert::parts;
use convert::quantize::{Options, Plan};
use convert::recipe::{self, FileType, Overrides, Shape, Subject};
use ggml_metal::peer::PeerQuantize;
use ggml_metal::{DType, Gguf, GgufWriter, Value};
use sha2::{Digest as _, Sha256};
use support::synth::{self, Random};
use support::{demo, json, shared};

fn options(file_type: FileType) -> Options {
    Options {
        file_type,
        overrides: Overrides::default(),
        imatrix: None,
        allow_requantize: false,
        n_threads: 2,
    }
}

fn quantize(input: &Path, output: &Path, options: &Options) -> anyhow::Result<()> {
    let files = parts::open(input)?;
    Plan::new(&files, options)?.write(output, &mut |_, _| true)
}

/// True for mixtures that qrun and llama.cpp make only with an importance matrix. `Q2_K_S` and those of three bits
/// depend on the tensors.
fn needs_imatrix(file_type: FileType) -> bool {
    use FileType as F;
    matches!(
        file_type,
        F::IQ1_S
            | F::IQ1_M
            | F::IQ2_XXS
            | F::IQ2_XS
            | F::IQ2_S
            | F::IQ2_M
            | F::IQ3_XXS
            | F::IQ3_XS
            | F::Q2_K_S
    )
}

/// Importance of every matrix, made up; the first experts saw nothing.
fn made_up_imatrix(path: &Path) -> Imatrix {
    let mut random = Random(7);
    let file = Gguf::open(path).unwrap();
    let mut entries = BTreeMap::new();
    for tensor in file.tensors() {
        if tensor.dims().len() < 2 || !tensor.name.starts_with("blk.") {
            continue;
        }
        let n_matrices = tensor.shape[2] as usize;
        let n = tensor.shape[0] as usize * n_matrices;
        let mut counts = vec![300.0; n_matrices];
        if n_matrices > 1 {
            counts[0] = 0.0;
        }
        let sums = (0..n).map(|_| 300.0 * (random.normal().abs() + 0.01));
        let sums = sums.collect();
        entries.insert(tensor.name.clone(), Entry { sums, counts });
    }
    Imatrix {
        entries,
        datasets: vec!["made up.txt".to_owned()],
        n_chunks: 12,
        chunk_size: 512,
    }
}

/// Quantizes with both and compares whole files.
fn compare(input: &Path, ours: &Options, theirs: &PeerQuantize) {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.gguf"), folder.path().join("b.gguf"));
    quantize(input, &a, ours).unwrap();
    theirs.run(input, &b).unwrap();
    let what = format!("{} as {:?}", input.display(), ours.file_type);
    let (file_a, file_b) = (Gguf::open(&a).unwrap(), Gguf::open(&b).unwrap());
    for tensor in file_b.tensors() {
        let own = file_a.tensor(&tensor.name).unwrap();
        assert_eq!(own.dtype, tensor.dtype, "{what}: {}", tensor.name);
    }
    assert!(
        std::fs::read(&a).unwrap() == std::fs::read(&b).unwrap(),
        "{what}: the files differ"
    );
}

/// Mixtures of a model, with and without an importance matrix.
fn compare_all(input: &Path, file_types: &[FileType], allow_requantize: bool) {
    let imatrix = made_up_imatrix(input);
    let means: Vec<_> = imatrix
        .entries
        .iter()
        .map(|(name, entry)| (name.clone(), entry.means()))
        .collect();
    let numbers = [
        ("quantize.imatrix.entries_count", means.len() as u32),
        ("quantize.imatrix.chunks_count", 12),
    ];
    for &file_type in file_types {
        let mut ours = options(file_type);
        ours.allow_requantize = allow_requantize;
        let mut theirs = PeerQuantize::new(file_type.number(), 2);
        theirs.allow_requantize = allow_requantize;
        if !needs_imatrix(file_type) {
            compare(input, &ours, &theirs);
        }
        ours.imatrix = Some(("folder/some imatrix.gguf".to_owned(), imatrix.clone()));
        theirs.imatrix = &means;
        theirs.texts = &[
            ("quantize.imatrix.file", "folder/some imatrix.gguf"),
            ("quantize.imatrix.dataset", "made up.txt"),
        ];
        theirs.numbers = &numbers;
        compare(input, &ours, &theirs);
    }
}

#[test]
fn all_mixtures_are_llama_cpps_to_the_byte() {
    if let Some(path) = shared("gguf/tiny-dense-f32.gguf") {
        compare_all(&path, &FileType::ALL, false);
    }
}

#[test]
fn untied_heads_and_eight_experts_too() {
    use FileType as F;
    let mixtures = [
        F::F16,
        F::Q5_K_M,
        F::Q4_K_S,
        F::Q4_0,
        F::IQ4_XS,
        F::Q3_K_M,
        F::Q2_K,
    ];
    for name in ["tiny-dense-untied", "tiny-moe"] {
        if let Some(path) = shared(&format!("gguf/{name}-f32.gguf")) {
            compare_all(&path, &mixtures, false);
        }
    }
}

#[test]
fn experts_of_whole_blocks_too_and_from_quantized_files() {
    use FileType as F;
    // 16 experts, rows of 256: every block fits, and there is no draft head.
    let folder = tempfile::tempdir().unwrap();
    let mixtures = [F::F32, F::Q8_0, F::Q4_K_M, F::Q3_K_L];
    compare_all(&synth::moe(folder.path()), &mixtures, true);
}

#[test]
fn the_demo_model_too() {
    let Some(path) = shared("gguf/demo-f16.gguf") else {
        return;
    };
    for file_type in [
        FileType::F32,
        FileType::BF16,
        FileType::Q8_0,
        FileType::Q4_K_M,
        FileType::Q3_K_M,
        FileType::IQ4_XS,
    ] {
        compare(
            &path,
            &options(file_type),
            &PeerQuantize::new(file_type.number(), 2),
        );
    }
    let imatrix = made_up_imatrix(&path);
    let means: Vec<_> = imatrix
        .entries
        .iter()
        .map(|(name, entry)| (name.clone(), entry.means()))
        .collect();
    let mut ours = options(FileType::Q4_K_M);
    ours.imatrix = Some(("i".to_owned(), imatrix));
    let mut theirs = PeerQuantize::new(FileType::Q4_K_M.number(), 2);
    theirs.imatrix = &means;
    let numbers = [
        ("quantize.imatrix.entries_count", means.len() as u32),
        ("quantize.imatrix.chunks_count", 12),
    ];
    theirs.texts = &[
        ("quantize.imatrix.file", "i"),
        ("quantize.imatrix.dataset", "made up.txt"),
    ];
    theirs.numbers = &numbers;
    compare(&path, &ours, &theirs);
}

#[test]
fn what_is_asked_for_by_name_is_llama_cpps_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = synth::moe(folder.path());
    let mut ours = options(FileType::Q4_K_M);
    ours.allow_requantize = true;
    ours.overrides = Overrides {
        tensors: vec![
            (recipe::pattern("attn_(k|v)").unwrap(), DType::Q8_0),
            (
                recipe::pattern(r"blk\.[01]\.ffn_.*exps").unwrap(),
                DType::Q5_1,
            ),
        ],
        output: Some(DType::F16),
        token_embedding: Some(DType::Q8_0),
        mtp: None,
    };
    let mut theirs = PeerQuantize::new(FileType::Q4_K_M.number(), 2);
    theirs.allow_requantize = true;
    theirs.tensors = &[
        ("attn_(k|v)", DType::Q8_0),
        (r"blk\.[01]\.ffn_.*exps", DType::Q5_1),
    ];
    theirs.output = Some(DType::F16);
    theirs.token_embedding = Some(DType::Q8_0);
    compare(&path, &ours, &theirs);

    // The draft head's own type: layer 4 of the tiny models.
    let Some(path) = shared("gguf/tiny-dense-f32.gguf") else {
        return;
    };
    let mut ours = options(FileType::Q4_K_M);
    ours.overrides.mtp = Some(DType::BF16);
    let mut theirs = PeerQuantize::new(FileType::Q4_K_M.number(), 2);
    theirs.tensors = &[(r"^blk\.4\.", DType::BF16)];
    compare(&path, &ours, &theirs);
    let out = folder.path().join("mtp.gguf");
    quantize(&path, &out, &ours).unwrap();
    let file = Gguf::open(&out).unwrap();
    let dtype = |name: &str| file.tensor(name).unwrap().dtype;
    assert_eq!(dtype("blk.4.nextn.eh_proj.weight"), DType::BF16);
    assert_eq!(dtype("blk.4.attn_norm.weight"), DType::F32);
    assert_ne!(dtype("blk.3.attn_q.weight"), DType::BF16);
}

/// Tensors of other llama.cpp versions: those of files that an older one made.
#[test]
fn the_bytes_of_published_hashes() {
    let (Some(path), Some(hashes)) = (shared("gguf/demo-f16.gguf"), shared("gguf/hashes.json"))
    else {
        return;
    };
    let hashes = json(&hashes);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf");
    let mut n_files = 0;
    for (name, expected) in hashes.as_object().unwrap() {
        let kind = name.trim_end_matches(".gguf");
        let kind = kind.strip_prefix("demo-quant-").or_else(|| {
            kind.strip_prefix("demo-")
                .filter(|k| k.ends_with('K') || k.ends_with('M'))
        });
        let Some(file_type) = kind.and_then(FileType::from_name) else {
            continue;
        };
        quantize(&path, &out, &options(file_type)).unwrap();
        let file = Gguf::open(&out).unwrap();
        let tensors = expected["tensors"].as_object().unwrap();
        assert_eq!(tensors.len(), file.tensors().len());
        for (tensor, expected) in tensors {
            let own = file.tensor(tensor).unwrap();
            let hash: String = Sha256::digest(file.data(own))
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            assert_eq!(expected["sha256"], hash, "{name}: {tensor}");
        }
        n_files += 1;
    }
    assert_eq!(n_files, 8);
}

/// Names and shapes of the matrices of a published model.
fn matrices(
    shape: &Shape,
    n_embd: i64,
    n_head: i64,
    n_head_kv: i64,
    n_ff: i64,
) -> Vec<(String, [i64; 4])> {
    let two = |a: i64, b: i64| [a, b, 1, 1];
    let mut all = vec![
        ("output.weight".to_owned(), two(n_embd, 248_320)),
        ("token_embd.weight".to_owned(), two(n_embd, 248_320)),
    ];
    for il in 0..shape.n_layer {
        let mut add =
            |name: &str, shape: [i64; 4]| all.push((format!("blk.{il}.{name}.weight"), shape));
        if (il + 1) % 4 == 0 {
            add("attn_q", two(n_embd, 512 * n_head));
            add("attn_k", two(n_embd, 256 * n_head_kv));
            add("attn_v", two(n_embd, 256 * n_head_kv));
            add("attn_output", two(256 * n_head, n_embd));
        } else {
            add("attn_qkv", two(n_embd, 10_240));
            add("attn_gate", two(n_embd, 6144));
            add("ssm_alpha", two(n_embd, 48));
            add("ssm_beta", two(n_embd, 48));
            add("ssm_out", two(6144, n_embd));
        }
        if shape.n_expert > 0 {
            let experts = shape.n_expert as i64;
            add("ffn_gate_exps", [n_embd, 1024, experts, 1]);
            add("ffn_up_exps", [n_embd, 1024, experts, 1]);
            add("ffn_down_exps", [1024, n_embd, experts, 1]);
            add("ffn_gate_shexp", two(n_embd, 1024));
            add("ffn_up_shexp", two(n_embd, 1024));
            add("ffn_down_shexp", two(1024, n_embd));
        } else {
            add("ffn_gate", two(n_embd, n_ff));
            add("ffn_up", two(n_embd, n_ff));
            add("ffn_down", two(n_ff, n_embd));
        }
    }
    all.sort_by(|a, b| recipe::order(&a.0, &b.0));
    all
}

#[test]
fn recipes_of_the_27b_and_the_397b() {
    let dense = Shape {
        n_layer: 64,
        n_mtp: 0,
        n_expert: 0,
        n_gqa: 6,
    };
    let moe = Shape {
        n_layer: 60,
        n_mtp: 0,
        n_expert: 512,
        n_gqa: 16,
    };
    for (name, shape, tensors) in [
        (
            "quant/qwen3.6-27b.schema",
            dense,
            matrices(&dense, 5120, 24, 4, 17_408),
        ),
        (
            "quant/qwen3.5-397b-a17b.schema",
            moe,
            matrices(&moe, 4096, 32, 2, 0),
        ),
    ] {
        let Some(path) = shared(name) else {
            return;
        };
        let text = std::fs::read_to_string(path).unwrap();
        let subjects: Vec<Subject> = tensors
            .iter()
            .map(|(name, shape)| Subject {
                name,
                shape: *shape,
                dtype: DType::F32,
            })
            .collect();
        let mut n_sections = 0;
        for section in text.split("\n[").skip(1) {
            let (head, lines) = section.split_once('\n').unwrap();
            let (file_type, default) = head.split_once("] ").unwrap();
            let Some(file_type) = FileType::from_name(file_type) else {
                // Ternary and MXFP4 files are none of qrun's mixtures.
                assert!(["TQ1_0", "TQ2_0", "MXFP4_MOE"].contains(&file_type));
                continue;
            };
            let default = DType::from_name(default).unwrap();
            let mut expected: BTreeMap<&str, DType> = BTreeMap::new();
            for line in lines.lines().filter(|l| !l.is_empty()) {
                let (name, dtype) = line.split_once(' ').unwrap();
                expected.insert(name, DType::from_name(dtype).unwrap());
            }
            let types =
                recipe::types(file_type, &shape, &subjects, &Overrides::default(), false).unwrap();
            for (subject, dtype) in subjects.iter().zip(types) {
                let wanted = expected.remove(subject.name).unwrap_or(default);
                assert_eq!(dtype, wanted, "{name}, {file_type:?}: {}", subject.name);
            }
            assert!(expected.is_empty(), "{name}: {expected:?} is not looked at");
            n_sections += 1;
        }
        assert_eq!(n_sections, FileType::ALL.len());
    }
}

fn refused(input: &Path, options: &Options) -> String {
    let folder = tempfile::tempdir().unwrap();
    let error = quantize(input, &folder.path().join("out.gguf"), options).unwrap_err();
    assert_eq!(names(folder.path()), Vec::<String>::new());
    let line = format!("{error:#}");
    assert_eq!(line.lines().count(), 1, "{line}");
    line
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    names.collect()
}

#[test]
fn what_cannot_be_quantized_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let moe = synth::moe(folder.path());
    assert!(refused(&moe, &options(FileType::Q8_0)).contains("give --allow-requantize"));

    let mut low = options(FileType::IQ2_XXS);
    low.allow_requantize = true;
    let line = refused(&moe, &low);
    assert!(line.contains("needs an importance matrix"), "{line}");
    // Importance of another model, and of too few of the tensors.
    let mut imatrix = made_up_imatrix(&moe);
    let entry = imatrix.entries.get_mut("blk.0.attn_gate.weight").unwrap();
    entry.sums.truncate(100);
    low.imatrix = Some(("other.gguf".to_owned(), imatrix.clone()));
    assert!(refused(&moe, &low).contains("made for another model"));
    imatrix.entries.remove("blk.0.attn_gate.weight");
    low.imatrix = Some(("short.gguf".to_owned(), imatrix));
    let line = refused(&moe, &low);
    assert!(
        line.contains("`blk.0.attn_gate.weight`") && line.contains("short.gguf"),
        "{line}"
    );

    // Values that are not numbers, and values that F16 does not hold.
    for (value, words) in [(f32::NAN, "not finite"), (1e6, "too large for f16")] {
        let path = one_matrix(folder.path(), value);
        let line = refused(&path, &options(FileType::F16));
        assert!(
            line.contains("`blk.0.attn_q.weight`") && line.contains(words),
            "{line}"
        );
    }
    let path = one_matrix(folder.path(), f32::INFINITY);
    assert!(refused(&path, &options(FileType::Q4_0)).contains("not finite"));
    assert!(refused(&path, &options(FileType::F32)).contains("not finite"));

    // Not a model.
    let imatrix = folder.path().join("imatrix.gguf");
    made_up_imatrix(&moe).write(&imatrix).unwrap();
    assert!(refused(&imatrix, &options(FileType::Q4_0)).contains("is not a model"));
}

/// A file with one matrix, one value of which is given.
fn one_matrix(folder: &Path, value: f32) -> PathBuf {
    let path = folder.join("one.gguf");
    let mut writer = GgufWriter::new(1).unwrap();
    let arch = Value::Str("qwen35".to_owned());
    writer.set("general.architecture", &arch).unwrap();
    writer.set("qwen35.block_count", &Value::Int(1)).unwrap();
    writer
        .add_tensor("blk.0.attn_q.weight", &[64, 40], DType::F32)
        .unwrap();
    let mut values = vec![0.5f32; 64 * 40];
    values[2000] = value;
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    writer
        .write(&path, |_| Ok(bytes.as_slice().into()))
        .unwrap();
    path
}

#[test]
fn an_interrupted_run_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let moe = synth::moe(folder.path());
    let mut how = options(FileType::Q8_0);
    how.allow_requantize = true;
    let files = parts::open(&moe).unwrap();
    let plan = Plan::new(&files, &how).unwrap();
    let out = folder.path().join("out.gguf");
    let before = std::fs::read(&moe).unwrap();
    let mut calls = 0;
    let stopped = plan.write(&out, &mut |done, total| {
        assert!(done <= total);
        calls += 1;
        calls < 5
    });
    assert!(stopped.unwrap_err().downcast_ref::<Interrupted>().is_some());
    assert_eq!(names(folder.path()), ["synthetic-moe.gguf"]);
    // The input itself is not a place to write to.
    let error = plan.write(&moe, &mut |_, _| true).unwrap_err().to_string();
    assert!(error.contains("is the file that is read"), "{error}");
    assert!(std::fs::read(&moe).unwrap() == before);
    plan.write(&out, &mut |_, _| true).unwrap();
    assert_eq!(plan.bytes().1, {
        let file = Gguf::open(&out).unwrap();
        file.tensors().iter().map(|t| t.bytes).sum::<usize>()
    });
}

fn qrun(args: &[&str]) -> Output {
    Command::new(assert_cmd::cargo::cargo_bin!("qrun"))
        .args(args)
        .env("QRUN_CONFIG", "")
        .env("QRUN_THREADS", "2")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn the_command() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf");
    let (input, output) = (demo(), out.display().to_string());
    let input = input.to_str().unwrap();
    let quantize = |more: &[&str]| {
        let mut args = vec!["quantize", input, &output];
        args.extend(more);
        qrun(&args)
    };

    let planned = quantize(&["Q4_0", "--allow-requantize", "--dry-run"]);
    assert_eq!(planned.status.code(), Some(0), "{}", text(&planned.stderr));
    let table = text(&planned.stdout);
    assert!(
        table
            .lines()
            .any(|l| l.starts_with("token_embd.weight") && l.contains("q6_K -> q6_K"))
    );
    assert!(
        table
            .lines()
            .any(|l| l.starts_with("blk.0.attn_gate.weight") && l.contains("q4_K -> q4_0"))
    );
    assert!(table.lines().last().unwrap().ends_with("bits per weight"));
    assert!(!out.exists());

    let done = quantize(&[
        "q5_k",
        "--allow-requantize",
        "--mtp-type",
        "q8_0",
        "--tensor-type",
        "attn_gate=f16",
    ]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert_eq!(text(&done.stdout), "");
    assert!(text(&done.stderr).contains("bits per weight"));
    let file = Gguf::open(&out).unwrap();
    let dtype = |name: &str| file.tensor(name).unwrap().dtype;
    assert_eq!(dtype("blk.0.attn_gate.weight"), DType::F16);
    assert_eq!(dtype("blk.8.attn_q.weight"), DType::Q8_0);
    assert_eq!(file.value("general.file_type"), Some(Value::Int(17)));
    drop(file);
    // It is a model that answers.
    let answer = qrun(&[
        "-m",
        &output,
        "-p",
        "What is the capital of France?",
        "--greedy",
    ]);
    assert_eq!(text(&answer.stdout), "The capital of France is Paris.\n");

    for (more, code, words) in [
        (&["Q9_K"][..], 2, "expected one of F32"),
        (&["Q4_0", "--mtp-type", "q9"], 2, "--mtp-type q9"),
        (&["Q4_0", "--tensor-type", "attn_q"], 2, "REGEX=TYPE"),
        (&["Q4_0", "--tensor-type", "(=q8_0"], 2, "unclosed group"),
        (&["Q4_0"], 1, "--allow-requantize"),
        (&["IQ1_S", "--allow-requantize"], 1, "--imatrix"),
        (&["Q4_0", "--imatrix", "/nonexistent"], 1, "/nonexistent"),
        (&["Q4_0", "--imatrix", input], 1, "not an importance matrix"),
    ] {
        let output = quantize(more);
        let line = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{more:?}: {line}");
        assert!(line.contains(words), "{more:?}: {line}");
        assert_eq!(line.lines().count(), 1, "{line}");
    }
    let same = qrun(&["quantize", input, input, "Q4_0", "--allow-requantize"]);
    assert!(text(&same.stderr).contains("is the file that is read"));
    let nowhere = qrun(&[
        "quantize",
        input,
        "/nonexistent/a.gguf",
        "Q4_0",
        "--allow-requantize",
    ]);
    assert!(text(&nowhere.stderr).contains("does not exist"));
}
