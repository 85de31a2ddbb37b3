//! `qrun convert`: equal to llama.cpp's own converter, whatever form the checkpoint has, and clear where it cannot be.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use convert::convert::{Options, Plan};
use convert::map::Mtp;
use convert::output::Interrupted;
use convert::recipe::FileType;
use ggml_metal::{Gguf, Value};
use serde_json::{Value as Json, json};
use support::checkpoint::{Model, St, file_bytes, raw_file};
use support::*;

fn options(file_type: Option<FileType>) -> Options {
    Options {
        file_type,
        mtp: Mtp::Keep,
        split_max_size: None,
    }
}

/// Converts and gives what was noted.
fn convert_with(input: &Path, output: &Path, options: Options) -> anyhow::Result<Vec<String>> {
    let plan = Plan::new(input, options)?;
    plan.write(output, &mut |_, _| true)?;
    Ok(plan.notes().to_vec())
}

fn convert_to(input: &Path, output: &Path, file_type: FileType) -> Vec<String> {
    convert_with(input, output, options(Some(file_type))).unwrap()
}

/// SHA-256 in hexadecimal (FIPS 180-4).
fn sha256(data: &[u8]) -> String {
    const PRIMES: [u32; 64] = [
        2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89,
        97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181,
        191, 193, 197, 199, 211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281,
        283, 293, 307, 311,
    ];
    // The constants are the first 32 bits of the fractions of the primes' roots, found in whole numbers.
    let fraction = |p: u32, degree: u32| {
        let n = u128::from(p) << (32 * degree);
        let (mut low, mut high) = (0u128, 1u128 << 40);
        while high - low > 1 {
            let middle = (low + high) / 2;
            if middle.pow(degree) <= n {
                low = middle;
            } else {
                high = middle;
            }
        }
        low as u32
    };
    let k = PRIMES.map(|p| fraction(p, 3));
    let mut h: Vec<u32> = PRIMES[..8].iter().map(|&p| fraction(p, 2)).collect();
    let mut message = data.to_vec();
    message.push(0x80);
    message.resize((message.len() + 8).next_multiple_of(64), 0);
    let at = message.len() - 8;
    message[at..].copy_from_slice(&(data.len() as u64 * 8).to_be_bytes());
    for block in message.chunks_exact(64) {
        let mut w = [0u32; 64];
        for (w, b) in w.iter_mut().zip(block.chunks_exact(4)) {
            *w = u32::from_be_bytes(b.try_into().unwrap());
        }
        for i in 16..64 {
            let s0 = w[i - 15].rotate_right(7) ^ w[i - 15].rotate_right(18) ^ (w[i - 15] >> 3);
            let s1 = w[i - 2].rotate_right(17) ^ w[i - 2].rotate_right(19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16]
                .wrapping_add(s0)
                .wrapping_add(w[i - 7])
                .wrapping_add(s1);
        }
        let mut v: [u32; 8] = h.as_slice().try_into().unwrap();
        for i in 0..64 {
            let s1 = v[4].rotate_right(6) ^ v[4].rotate_right(11) ^ v[4].rotate_right(25);
            let choice = (v[4] & v[5]) ^ (!v[4] & v[6]);
            let t1 = v[7]
                .wrapping_add(s1)
                .wrapping_add(choice)
                .wrapping_add(k[i])
                .wrapping_add(w[i]);
            let s0 = v[0].rotate_right(2) ^ v[0].rotate_right(13) ^ v[0].rotate_right(22);
            let majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
            let t2 = s0.wrapping_add(majority);
            v = [
                t1.wrapping_add(t2),
                v[0],
                v[1],
                v[2],
                v[3].wrapping_add(t1),
                v[4],
                v[5],
                v[6],
            ];
        }
        h.iter_mut()
            .zip(v)
            .for_each(|(h, v)| *h = h.wrapping_add(v));
    }
    h.iter().map(|h| format!("{h:08x}")).collect()
}

#[test]
fn the_hash_is_sha_256() {
    assert_eq!(
        sha256(b"abc"),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );
}

/// A list as Python's `json.dumps` writes it: ASCII, and a space after each comma.
fn python_json(value: &Value) -> String {
    let text = |s: &String| {
        let mut out = String::new();
        for c in Json::from(s.as_str()).to_string().chars() {
            let mut units = [0; 2];
            match c {
                '\x20'..='\x7e' => out.push(c),
                c => c
                    .encode_utf16(&mut units)
                    .iter()
                    .for_each(|u| out.push_str(&format!("\\u{u:04x}"))),
            }
        }
        out
    };
    let items: Vec<String> = match value {
        Value::Strs(list) => list.iter().map(text).collect(),
        Value::Ints(list) => list.iter().map(ToString::to_string).collect(),
        other => panic!("{other:?} is no long list"),
    };
    format!("[{}]", items.join(", "))
}

/// Compares a file with what llama.cpp's converter made: every key in order, with its kind and value, and every
/// tensor in order, with its type, shape and bytes.
fn equals_reference(path: &Path, reference: &Json) {
    let file = Gguf::open(path).unwrap();
    let metadata = reference["metadata"].as_object().unwrap();
    assert_eq!(file.keys(), metadata.keys().cloned().collect::<Vec<_>>());
    for (key, expected) in metadata {
        let value = file.value(key).unwrap();
        let kind = expected["type"]
            .as_array()
            .unwrap()
            .last()
            .unwrap()
            .as_str()
            .unwrap();
        let known = [
            ("STRING", "str"),
            ("UINT32", "u32"),
            ("INT32", "i32"),
            ("FLOAT32", "f32"),
            ("BOOL", "bool"),
        ];
        let known = known.iter().find(|(theirs, _)| *theirs == kind).unwrap();
        assert_eq!(file.kind(key).unwrap().name(), known.1, "{key}");
        let expected = &expected["value"];
        match &value {
            Value::Int(v) => assert_eq!(*v, i128::from(expected.as_i64().unwrap()), "{key}"),
            Value::Float(v) => assert_eq!(*v, expected.as_f64().unwrap(), "{key}"),
            Value::Bool(v) => assert_eq!(*v, expected.as_bool().unwrap(), "{key}"),
            Value::Str(v) => assert_eq!(v, expected.as_str().unwrap(), "{key}"),
            Value::Bools(v) => assert_eq!(json!(v), *expected, "{key}"),
            list if expected.is_object() => {
                assert_eq!(
                    sha256(python_json(list).as_bytes()),
                    expected["sha256"],
                    "{key}"
                );
            }
            Value::Ints(v) => assert_eq!(json!(v), *expected, "{key}"),
            other => panic!("{key}: {other:?}"),
        }
    }
    let tensors = reference["tensors"].as_object().unwrap();
    let names: Vec<&str> = file.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(
        names,
        tensors.keys().map(String::as_str).collect::<Vec<_>>()
    );
    for (tensor, expected) in file.tensors().iter().zip(tensors.values()) {
        let name = &tensor.name;
        assert!(
            tensor
                .dtype
                .name()
                .eq_ignore_ascii_case(expected["type"].as_str().unwrap()),
            "{name}"
        );
        let shape: Vec<i64> = serde_json::from_value(expected["shape"].clone()).unwrap();
        // ggml's writer leaves trailing ones out of the header, llama.cpp's converter does not.
        let shape = &shape[..shape.iter().rposition(|&n| n != 1).map_or(1, |i| i + 1)];
        assert_eq!(tensor.dims(), shape, "{name}");
        assert_eq!(
            sha256(file.data(tensor)),
            expected["sha256"].as_str().unwrap(),
            "{name}"
        );
    }
}

#[test]
fn files_equal_those_of_llama_cpp() {
    let Some(hashes) = shared("gguf/hashes.json") else {
        return;
    };
    let hashes = json(&hashes);
    let folder = tempfile::tempdir().unwrap();
    let all = [FileType::F32, FileType::F16, FileType::BF16, FileType::Q8_0];
    let mut compared = 0;
    for model in ["demo", "tiny-dense", "tiny-dense-untied", "tiny-moe"] {
        let input = shared(&format!("models/{model}")).unwrap();
        for file_type in all {
            let name = format!("{model}-{}.gguf", file_type.name().to_lowercase());
            let Some(reference) = hashes.get(&name) else {
                continue;
            };
            let output = folder.path().join(&name);
            convert_to(&input, &output, file_type);
            equals_reference(&output, reference);
            compared += 1;
            // Where their file is at hand and its header has no trailing ones, the whole file is the same.
            let theirs = shared(&format!("gguf/{name}"));
            if let Some(theirs) = theirs.filter(|_| model != "tiny-moe") {
                assert!(
                    std::fs::read(&output).unwrap() == std::fs::read(theirs).unwrap(),
                    "{name}"
                );
            }
        }
    }
    assert_eq!(compared, 10);
}

/// Name, shape, type and bytes of every tensor.
fn contents(path: &Path) -> BTreeMap<String, (Vec<i64>, String, Vec<u8>)> {
    let file = Gguf::open(path).unwrap();
    let tensors = file.tensors().iter().map(|t| {
        let data = file.data(t).to_vec();
        (
            t.name.clone(),
            (t.dims().to_vec(), t.dtype.name().to_owned(), data),
        )
    });
    tensors.collect()
}

fn metadata(path: &Path) -> Vec<(String, Value)> {
    let file = Gguf::open(path).unwrap();
    let keys = file.keys().into_iter();
    keys.map(|key| (key.clone(), file.value(&key).unwrap()))
        .collect()
}

/// A checkpoint of the shared folder, and what it converts to.
struct Case {
    folder: tempfile::TempDir,
    model: Model,
    plain: PathBuf,
}

impl Case {
    fn new(name: &str, file_type: FileType) -> Option<Self> {
        let dir = shared(&format!("models/{name}"))?;
        let folder = tempfile::tempdir().unwrap();
        let plain = folder.path().join("plain.gguf");
        convert_to(&dir, &plain, file_type);
        Some(Self {
            folder,
            model: Model::read(&dir),
            plain,
        })
    }

    fn converted(&self, input: &Path, file_type: FileType) -> (PathBuf, Vec<String>) {
        let output = self.folder.path().join("other.gguf");
        let notes = convert_to(input, &output, file_type);
        (output, notes)
    }

    /// The other form of the checkpoint gives the same tensors.
    fn same(&self, input: &Path, file_type: FileType) -> Vec<String> {
        let (output, notes) = self.converted(input, file_type);
        assert!(contents(&output) == contents(&self.plain));
        notes
    }

    fn refused(&self, input: &Path) -> String {
        let output = self.folder.path().join("refused.gguf");
        let error = convert_with(input, &output, options(Some(FileType::BF16))).unwrap_err();
        assert!(!output.exists());
        format!("{error:#}")
    }
}

fn has(notes: &[String], text: &str) -> bool {
    notes.iter().any(|n| n.contains(text))
}

#[test]
fn shards_may_come_without_an_index_and_a_file_alone() {
    let Some(case) = Case::new("tiny-dense", FileType::BF16) else {
        return;
    };
    let temp = case.folder.path();
    for index in [true, false] {
        let dir = case.model.write_shards(temp, 3, index);
        case.same(&dir, FileType::BF16);
        case.same(
            &dir.join("model-00002-of-00003.safetensors"),
            FileType::BF16,
        );
    }
    let dir = case.model.write(temp);
    std::fs::rename(
        dir.join("model.safetensors"),
        dir.join("weights.safetensors"),
    )
    .unwrap();
    case.same(&dir.join("weights.safetensors"), FileType::BF16);
    assert_eq!(
        metadata(&case.folder.path().join("other.gguf")),
        metadata(&case.plain)
    );
}

#[test]
fn text_only_checkpoints_have_flat_settings_and_shorter_names() {
    for name in ["tiny-dense-untied", "tiny-moe"] {
        let Some(case) = Case::new(name, FileType::BF16) else {
            return;
        };
        let mut model = case.model.clone();
        let moe = if name == "tiny-moe" { "Moe" } else { "" };
        model.config = model.config["text_config"].clone();
        model.config["architectures"] = json!([format!("Qwen3_5{moe}ForCausalLM")]);
        for t in &mut model.tensors {
            t.name = t.name.replace("model.language_model.", "model.");
        }
        let dir = model.write(case.folder.path());
        case.same(&dir, FileType::BF16);
        assert_eq!(
            metadata(&case.folder.path().join("other.gguf")),
            metadata(&case.plain)
        );
    }
}

#[test]
fn every_float_type_gives_the_same_values() {
    let Some(case) = Case::new("tiny-dense", FileType::F32) else {
        return;
    };
    let mut model = case.model.clone();
    for t in &mut model.tensors {
        *t = t.with_floats(&t.floats());
    }
    let dir = model.write(case.folder.path());
    case.same(&dir, FileType::F32);
    // The checkpoint's own type where none is asked for.
    let output = case.folder.path().join("own.gguf");
    convert_with(&dir, &output, options(None)).unwrap();
    assert!(contents(&output) == contents(&case.plain));

    // Halves hold these values where they are halves already.
    let (f16, _) = case.converted(&dir, FileType::F16);
    let halves = contents(&f16);
    for t in &mut model.tensors {
        if t.shape.len() == 2 {
            let data = t
                .floats()
                .iter()
                .flat_map(|&v| half(v).to_le_bytes())
                .collect();
            *t = St::new(&t.name, "F16", &t.shape, data);
        }
    }
    let dir = model.write(case.folder.path());
    let output = case.folder.path().join("halves.gguf");
    convert_with(&dir, &output, options(None)).unwrap();
    assert!(contents(&output) == halves);
}

/// A float as a half, rounded to even.
fn half(value: f32) -> u16 {
    let data = ggml_metal::DType::F16.quantize(&[value], 1, None).unwrap();
    u16::from_le_bytes([data[0], data[1]])
}

#[test]
fn experts_may_be_one_tensor_each() {
    let Some(case) = Case::new("tiny-moe", FileType::BF16) else {
        return;
    };
    let mut model = case.model.clone();
    let mut tensors = Vec::new();
    for t in model.tensors.drain(..) {
        let Some(base) = t
            .name
            .strip_suffix("_proj")
            .filter(|n| n.contains("experts"))
        else {
            tensors.push(t);
            continue;
        };
        let (n, rows) = (t.shape[0], t.shape[1]);
        for (i, expert) in t.data.chunks_exact(t.data.len() / n).enumerate() {
            let mut add = |kind: &str, rows: usize, data: &[u8]| {
                let prefix = base.rsplit_once('.').unwrap().0;
                let name = format!("{prefix}.{i}.{kind}_proj.weight");
                tensors.push(St::new(&name, &t.dtype, &[rows, t.shape[2]], data.to_vec()));
            };
            if base.ends_with("gate_up") {
                let (gate, up) = expert.split_at(expert.len() / 2);
                add("gate", rows / 2, gate);
                add("up", rows / 2, up);
            } else {
                add("down", rows, expert);
            }
        }
    }
    // Those of the draft head as well.
    assert!(
        tensors
            .iter()
            .any(|t| t.name == "mtp.layers.0.mlp.experts.7.up_proj.weight")
    );
    model.tensors = tensors;
    let dir = model.write(case.folder.path());
    case.same(&dir, FileType::BF16);

    model
        .tensors
        .retain(|t| !t.name.ends_with("layers.1.mlp.experts.3.up_proj.weight"));
    let error = case.refused(&model.write(case.folder.path()));
    assert!(
        error.contains("incomplete") && !error.contains('\n'),
        "{error}"
    );
}

/// The value of an eight-bit float with so many bits of exponent.
fn eight_bits(code: u8, e_bits: u32) -> f32 {
    let m_bits = 7 - e_bits;
    let bias = (1 << (e_bits - 1)) - 1;
    let e = i32::from(code >> m_bits) & ((1 << e_bits) - 1);
    let m = f32::from(code & ((1 << m_bits) - 1)) / f32::from(1u8 << m_bits);
    let size = if e == 0 {
        m * 2f32.powi(1 - bias)
    } else {
        (1.0 + m) * 2f32.powi(e - bias)
    };
    if code & 0x80 == 0 { size } else { -size }
}

#[test]
fn scaled_fp8_is_multiplied_out() {
    // Bits of exponent, and whether a factor belongs to a row or to a block of 128 by 128.
    for (name, e_bits, by_row) in [
        ("tiny-dense-untied", 4, false),
        ("tiny-moe", 4, false),
        ("tiny-dense-untied", 5, false),
        ("tiny-dense-untied", 4, true),
        ("tiny-moe", 5, true),
    ] {
        let Some(mut case) = Case::new(name, FileType::F32) else {
            return;
        };
        let (mut eight, mut plain) = (case.model.clone(), case.model.clone());
        eight.tensors.clear();
        plain.tensors.clear();
        let dtype = if e_bits == 4 { "F8_E4M3" } else { "F8_E5M2" };
        // The two names that tools give to factors; those of stacked experts have one.
        let suffix = |name: &str| match by_row && name.ends_with(".weight") {
            true => "_scale",
            false => "_scale_inv",
        };
        let mut n_scaled = 0;
        for t in &case.model.tensors {
            let matrix =
                t.shape.len() > 1 && (t.name.contains("_proj") || t.name == "mtp.fc.weight");
            if !matrix || t.name.contains("in_proj_a") || t.name.contains("in_proj_b") {
                eight.tensors.push(t.clone());
                plain.tensors.push(t.clone());
                continue;
            }
            let (rows, cols) = (t.shape[t.shape.len() - 2], t.shape[t.shape.len() - 1]);
            let n = t.shape[..t.shape.len() - 2].iter().product::<usize>();
            let block = if by_row { [1, cols] } else { [128, 128] };
            let (down, across) = (rows.div_ceil(block[0]), cols.div_ceil(block[1]));
            // Any codes will do but those that are no numbers.
            let codes: Vec<u8> = (0..n * rows * cols)
                .map(|i| (i * 37 + i / 251) as u8)
                .map(|c| match (e_bits, c & 0x7f) {
                    (4, 0x7f) | (5, 0x7c..) => 0x10,
                    _ => c,
                })
                .collect();
            let scales: Vec<f32> = (0..n * down * across)
                .map(|i| 1e-4 * (i + 1) as f32)
                .collect();
            let value = |i: usize| {
                let (matrix, row, col) = (i / (rows * cols), i / cols % rows, i % cols);
                let scale = (matrix * down + row / block[0]) * across + col / block[1];
                eight_bits(codes[i], e_bits) * scales[scale]
            };
            let values: Vec<f32> = (0..codes.len()).map(value).collect();
            plain.tensors.push(t.with_floats(&values));
            let mut shape = t.shape[..t.shape.len() - 2].to_vec();
            shape.extend([down, across]);
            let scale = format!("{}{}", t.name, suffix(&t.name));
            eight
                .tensors
                .push(St::new(&scale, "F32", &shape, vec![]).with_floats(&scales));
            eight
                .tensors
                .push(St::new(&t.name, dtype, &t.shape, codes.clone()));
            n_scaled += 1;
        }
        assert!(n_scaled > 30);
        eight.config["quantization_config"] = if by_row {
            json!({"quant_method": "fp8", "fmt": dtype})
        } else {
            json!({"quant_method": "fp8", "fmt": dtype, "weight_block_size": [128, 128]})
        };
        let reference = plain.write(case.folder.path());
        convert_to(&reference, &case.plain, FileType::F32);
        let dir = eight.write(case.folder.path());
        let notes = case.same(&dir, FileType::F32);
        assert!(
            has(&notes, &format!("fp8 checkpoint: {n_scaled} tensors")),
            "{notes:?}"
        );

        // A factor that is no number.
        let scale = eight
            .tensors
            .iter_mut()
            .find(|t| t.name.ends_with("_scale") || t.name.ends_with("_scale_inv"))
            .unwrap();
        scale.data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        let name = scale.name.clone();
        let error = case.refused(&eight.write(case.folder.path()));
        assert!(
            error.contains(&name) && error.contains("not numbers"),
            "{error}"
        );
        // A factor that is not there.
        eight.tensors.retain(|t| t.name != name);
        let error = case.refused(&eight.write(case.folder.path()));
        assert!(error.contains("weight_scale_inv is missing"), "{error}");
        case.model.tensors.clear();
    }
}

#[test]
fn mlx_checkpoints_are_recognised_and_unpacked() {
    let (Some(mlx), Some(demo)) = (shared("models/demo-mlx-4bit"), shared("models/demo")) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mlx.gguf");
    let notes = convert_to(&mlx, &path, FileType::F32);
    assert!(has(&notes, "MLX checkpoint"), "{notes:?}");
    assert!(
        has(&notes, "nothing is added") && has(&notes, "the layout is MLX's"),
        "{notes:?}"
    );
    assert!(
        has(&notes, "MLX's converter drops its tensors"),
        "{notes:?}"
    );
    let reference = folder.path().join("demo.gguf");
    convert_to(&demo, &reference, FileType::F32);

    // Values lost precision but are where they belong: vectors are equal to the bit, matrices nearly.
    let (mlx, demo) = (contents(&path), contents(&reference));
    assert_eq!(mlx.len() + 15, demo.len());
    let floats = |data: &[u8]| -> Vec<f32> {
        let values = data
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        values.collect()
    };
    for (name, (shape, _, data)) in &mlx {
        let (expected_shape, _, expected) = &demo[name];
        assert_eq!(shape, expected_shape, "{name}");
        let (values, expected) = (floats(data), floats(expected));
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
        let cosine =
            dot(&values, &expected) / (dot(&values, &values) * dot(&expected, &expected)).sqrt();
        let bound = if shape.len() > 1 { 0.98 } else { 0.9999 };
        assert!(cosine > bound, "{name}: {cosine}");
    }
    // And it predicts text about as well.
    let text = "Once upon a time there was a fox named Pip. Pip lived in a house at the end of a long lane.";
    let perplexity = |path: &Path| {
        let engine = engine(path);
        let tokens = qrun::vocab::tokenizer(&Gguf::open(path).unwrap())
            .unwrap()
            .encode(text, false)
            .unwrap();
        let mut session = session(&engine, F32, false);
        let logits = session
            .eval(&tokens, qrun::session::Outputs::All, &never())
            .unwrap();
        let n_vocab = engine.config().n_vocab as usize;
        let rows = logits.chunks_exact(n_vocab).zip(&tokens[1..]);
        let losses = rows.map(|(row, &next)| {
            let max = row.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = row.iter().map(|v| (v - max).exp()).sum();
            f64::from(sum.ln() + max - row[next as usize])
        });
        (losses.sum::<f64>() / (tokens.len() - 1) as f64).exp()
    };
    let (mlx, demo) = (perplexity(&path), perplexity(&reference));
    println!("perplexity: {mlx:.3} from MLX, {demo:.3} from the original");
    assert!(mlx < 1.3 * demo, "{mlx} against {demo}");
}

#[test]
fn the_tokenizer_may_be_in_its_older_files() {
    let Some(case) = Case::new("demo", FileType::BF16) else {
        return;
    };
    let mut model = case.model.clone();
    model.files.retain(|(name, _)| name != "tokenizer.json");
    let (output, _) = case.converted(&model.write(case.folder.path()), FileType::BF16);
    assert_eq!(metadata(&output), metadata(&case.plain));
    // The template may be in the settings only, or in its own file only.
    for other in ["chat_template.jinja", "tokenizer_config.json"] {
        let mut model = case.model.clone();
        if other == "tokenizer_config.json" {
            let file = model
                .files
                .iter_mut()
                .find(|(name, _)| name == other)
                .unwrap();
            let mut settings: Json = serde_json::from_slice(&file.1).unwrap();
            settings.as_object_mut().unwrap().remove("chat_template");
            file.1 = settings.to_string().into_bytes();
        } else {
            model.files.retain(|(name, _)| name != other);
        }
        let (output, _) = case.converted(&model.write(case.folder.path()), FileType::BF16);
        assert_eq!(metadata(&output), metadata(&case.plain));
    }
    model.files.retain(|(name, _)| name != "vocab.json");
    assert!(
        case.refused(&model.write(case.folder.path()))
            .contains("neither tokenizer.json nor vocab.json")
    );
}

#[test]
fn the_draft_head_is_kept_whatever_the_settings_say() {
    let Some(case) = Case::new("tiny-dense", FileType::BF16) else {
        return;
    };
    let temp = case.folder.path();
    let notes = case.same(&case.model.write(temp), FileType::BF16);
    assert!(has(&notes, "MTP: kept 15 tensors"), "{notes:?}");
    let mut model = case.model.clone();
    model.config["text_config"]
        .as_object_mut()
        .unwrap()
        .remove("mtp_num_hidden_layers");
    let notes = case.same(&model.write(temp), FileType::BF16);
    assert!(
        has(
            &notes,
            "MTP: kept 15 tensors, which config.json does not announce"
        ),
        "{notes:?}"
    );
    assert_eq!(metadata(&temp.join("other.gguf")), metadata(&case.plain));

    // Without its tensors there is none, and it says so.
    let mut model = case.model.clone();
    model.tensors.retain(|t| !t.name.starts_with("mtp."));
    let (output, notes) = case.converted(&model.write(temp), FileType::BF16);
    assert!(
        has(
            &notes,
            "announces a draft head, but the checkpoint has no `mtp.*`"
        ),
        "{notes:?}"
    );
    assert!(!engine(&output).mtp_status().on);
    let keys = Gguf::open(&output).unwrap().keys();
    assert!(!keys.contains(&"qwen35.nextn_predict_layers".to_owned()));

    // In a file of its own that the index does not know.
    let dir = case.model.write_without_tensors(temp);
    let (head, trunk): (Vec<St>, Vec<St>) = case
        .model
        .tensors
        .iter()
        .cloned()
        .partition(|t| t.name.starts_with("mtp."));
    std::fs::write(dir.join("model.safetensors"), file_bytes(&trunk)).unwrap();
    std::fs::write(dir.join("mtp.safetensors"), file_bytes(&head)).unwrap();
    let map: serde_json::Map<String, Json> = trunk
        .iter()
        .map(|t| (t.name.clone(), json!("model.safetensors")))
        .collect();
    let index = json!({"weight_map": map}).to_string();
    std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    let notes = case.same(&dir, FileType::BF16);
    assert!(
        has(&notes, "mtp.safetensors is not in the index"),
        "{notes:?}"
    );
}

#[test]
fn a_head_of_zeros_or_with_holes_is_refused() {
    let Some(case) = Case::new("tiny-dense", FileType::BF16) else {
        return;
    };
    let mut model = case.model.clone();
    model.get_mut("mtp.fc.weight").data.fill(0);
    let error = case.refused(&model.write(case.folder.path()));
    assert!(
        error.contains("only zeros") && error.contains("--no-mtp"),
        "{error}"
    );
    for t in model
        .tensors
        .iter_mut()
        .filter(|t| t.name.starts_with("mtp."))
    {
        t.data.fill(0);
    }
    let dir = model.write(case.folder.path());
    assert!(case.refused(&dir).contains("only zeros"));
    let without = Options {
        mtp: Mtp::Drop,
        ..options(Some(FileType::BF16))
    };
    let notes = convert_with(&dir, &case.folder.path().join("trunk.gguf"), without).unwrap();
    assert!(
        has(&notes, "MTP: left out 15 tensors (--no-mtp)"),
        "{notes:?}"
    );

    let mut model = case.model.clone();
    model
        .tensors
        .retain(|t| t.name != "mtp.layers.0.self_attn.q_proj.weight");
    let error = case.refused(&model.write(case.folder.path()));
    assert!(
        error.contains("mtp.layers.0.self_attn.q_proj.weight") && error.contains("--no-mtp"),
        "{error}"
    );
}

#[test]
fn trunk_and_head_make_the_whole_again() {
    let Some(case) = Case::new("tiny-moe", FileType::F32) else {
        return;
    };
    let dir = shared("models/tiny-moe").unwrap();
    let write = |name: &str, mtp| {
        let path = case.folder.path().join(name);
        let options = Options {
            mtp,
            ..options(Some(FileType::F32))
        };
        convert_with(&dir, &path, options).unwrap();
        path
    };
    let (trunk, head) = (
        write("trunk.gguf", Mtp::Drop),
        write("head.gguf", Mtp::Only),
    );
    let names = |path: &Path| contents(path).into_keys().collect::<Vec<_>>();
    assert_eq!(names(&head).len(), 20 + 3);
    assert_eq!(names(&trunk).len() + 20, names(&case.plain).len());

    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 500).collect();
    let logits = |path: &Path, mtp: Option<&Path>| {
        let params = qrun::engine::EngineParams {
            device: Some("CPU".to_owned()),
            n_threads: Some(2),
            mtp: mtp.map(Path::to_owned),
            ..Default::default()
        };
        let engine = qrun::engine::Engine::load(path, &params, &mut |_, _| {}).unwrap();
        let mut session = session(&engine, F32, true);
        let (trunk, head) = session.eval_with_head(&tokens, &never()).unwrap();
        (
            trunk.to_vec(),
            head[engine.config().n_vocab as usize..].to_vec(),
        )
    };
    assert!(logits(&trunk, Some(&head)) == logits(&case.plain, None));
}

#[test]
fn split_files_hold_the_same_and_load() {
    let Some(case) = Case::new("tiny-dense-untied", FileType::F32) else {
        return;
    };
    let dir = shared("models/tiny-dense-untied").unwrap();
    let split = Options {
        split_max_size: Some(1_000_000),
        ..options(Some(FileType::F32))
    };
    let plan = Plan::new(&dir, split).unwrap();
    let base = case.folder.path().join("split.gguf");
    plan.write(&base, &mut |_, _| true).unwrap();
    let files = plan.files(&base);
    assert!(files.len() > 4, "{files:?}");
    let mut all = BTreeMap::new();
    for (path, range) in &files {
        let part = contents(path);
        assert_eq!(part.len(), range.len());
        let size: usize = part.values().map(|(_, _, data)| data.len()).sum();
        assert!(size <= 1_000_000 || part.len() == 1);
        all.extend(part);
    }
    assert!(all == contents(&case.plain));
    let whole = engine(&case.plain);
    let parts = engine(&files[1].0);
    assert_eq!(whole.config(), parts.config());
    assert_eq!(parts.mtp_status().on, whole.mtp_status().on);
}

#[test]
fn vision_tensors_are_counted_and_left_out() {
    let Some(case) = Case::new("tiny-dense", FileType::BF16) else {
        return;
    };
    let mut model = case.model.clone();
    for i in 0..3 {
        let name = format!("model.visual.blocks.{i}.attn.qkv.weight");
        model
            .tensors
            .push(St::new(&name, "BF16", &[4, 8], vec![1; 64]));
    }
    let notes = case.same(&model.write(case.folder.path()), FileType::BF16);
    assert!(has(&notes, "vision: skipped 3 tensors"), "{notes:?}");
}

#[test]
fn norms_are_decided_by_what_they_hold() {
    let Some(case) = Case::new("tiny-dense", FileType::F32) else {
        return;
    };
    let temp = case.folder.path();
    let is_norm = |t: &St| t.name.contains("norm") && !t.name.contains("linear_attn");
    let notes = case.same(&case.model.write(temp), FileType::F32);
    assert!(
        has(&notes, "norms: stored around 0, 1 is added"),
        "{notes:?}"
    );
    // All norms whole, with the convolution as MLX has it.
    let mut whole = case.model.clone();
    for t in whole.tensors.iter_mut() {
        if is_norm(t) {
            let values: Vec<f32> = t.floats().iter().map(|v| v + 1.0).collect();
            *t = t.with_floats(&values);
        } else if t.name.ends_with("conv1d.weight") {
            t.shape.swap(1, 2);
        }
    }
    let notes = case.same(&whole.write(temp), FileType::F32);
    assert!(
        has(&notes, "norms: stored as whole factors, nothing is added"),
        "{notes:?}"
    );
    // A head that was forgotten when the trunk got its one.
    for t in whole
        .tensors
        .iter_mut()
        .filter(|t| t.name.starts_with("mtp."))
    {
        if is_norm(t) {
            let values: Vec<f32> = t.floats().iter().map(|v| v - 1.0).collect();
            *t = t.with_floats(&values);
        }
    }
    let (output, notes) = case.converted(&whole.write(temp), FileType::F32);
    assert!(
        has(
            &notes,
            "norms of the draft head: stored around 0, 1 is added"
        ),
        "{notes:?}"
    );
    for (name, (_, _, data)) in contents(&output) {
        let plain = &contents(&case.plain)[&name].2;
        let worst = data
            .chunks_exact(4)
            .zip(plain.chunks_exact(4))
            .map(|(a, b)| {
                let float = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
                (float(a) - float(b)).abs()
            });
        assert!(worst.fold(0.0, f32::max) < 1e-6, "{name}");
    }
}

#[test]
fn mixtures_are_those_of_the_quantizer() {
    let Some(case) = Case::new("demo", FileType::BF16) else {
        return;
    };
    let dir = shared("models/demo").unwrap();
    for file_type in [FileType::Q4_K_M, FileType::Q6_K, FileType::Q4_0] {
        let (output, _) = case.converted(&dir, file_type);
        let options = convert::quantize::Options {
            file_type,
            overrides: Default::default(),
            imatrix: None,
            allow_requantize: false,
            n_threads: 2,
        };
        let parts = [Gguf::open(&case.plain).unwrap()];
        let plan = convert::quantize::Plan::new(&parts, &options).unwrap();
        let twice = case.folder.path().join("twice.gguf");
        plan.write(&twice, &mut |_, _| true).unwrap();
        assert!(contents(&output) == contents(&twice), "{file_type:?}");
    }
}

#[test]
fn the_embedded_demo_is_rebuilt_from_its_checkpoint() {
    let Some(case) = Case::new("demo", FileType::F16) else {
        return;
    };
    let options = convert::quantize::Options {
        file_type: FileType::Q4_K_M,
        overrides: Default::default(),
        imatrix: None,
        allow_requantize: false,
        n_threads: 2,
    };
    let parts = [Gguf::open(&case.plain).unwrap()];
    let plan = convert::quantize::Plan::new(&parts, &options).unwrap();
    let rebuilt = case.folder.path().join("rebuilt.gguf");
    plan.write(&rebuilt, &mut |_, _| true).unwrap();
    let embedded = std::fs::read(demo()).unwrap();
    assert!(std::fs::read(&rebuilt).unwrap() == embedded);
    // In one step, which goes by BF16: no value of this model is too small for a half.
    let dir = shared("models/demo").unwrap();
    let (direct, _) = case.converted(&dir, FileType::Q4_K_M);
    assert!(std::fs::read(direct).unwrap() == embedded);
}

#[test]
fn an_interrupted_conversion_leaves_nothing() {
    let Some(dir) = shared("models/demo") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out.gguf");
    let plan = Plan::new(&dir, options(Some(FileType::F32))).unwrap();
    let mut calls = 0;
    let error = plan
        .write(&output, &mut |_, _| {
            calls += 1;
            calls < 20
        })
        .unwrap_err();
    assert!(error.is::<Interrupted>(), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

fn qrun(args: &[&std::ffi::OsStr]) -> Output {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
    command
        .env("QRUN_CONFIG", "")
        .env("QRUN_THREADS", "2")
        .stdin(Stdio::null())
        .arg("convert")
        .args(args);
    command.output().unwrap()
}

/// What a bad checkpoint gets: exit code 1, one line, an empty folder, an untouched input.
fn bad(input: &Path, expected: &[&str]) {
    let before = snapshot(input);
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out.gguf");
    let args = [
        input.as_os_str(),
        "-o".as_ref(),
        output.as_os_str(),
        "--type".as_ref(),
        "f16".as_ref(),
    ];
    let result = qrun(&args);
    let stderr = String::from_utf8(result.stderr).unwrap();
    assert_eq!(result.status.code(), Some(1), "{stderr}");
    assert!(result.stdout.is_empty());
    let errors: Vec<&str> = stderr
        .lines()
        .filter(|l| l.starts_with("error: "))
        .collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    assert_eq!(stderr.lines().last(), Some(errors[0]), "{stderr}");
    for text in expected {
        assert!(errors[0].contains(text), "{text} is not in: {}", errors[0]);
    }
    println!("{}", errors[0]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    assert!(snapshot(input) == before, "the input was touched");
}

fn snapshot(input: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = std::fs::read_dir(input).unwrap().map(|e| e.unwrap().path());
    files
        .map(|p| (p.clone(), std::fs::read(p).unwrap()))
        .collect()
}

#[test]
fn bad_files_get_one_clear_line() {
    let Some(case) = Case::new("tiny-dense", FileType::BF16) else {
        return;
    };
    let (temp, model) = (case.folder.path(), &case.model);
    for index in [true, false] {
        let dir = model.write_shards(temp, 3, index);
        std::fs::remove_file(dir.join("model-00002-of-00003.safetensors")).unwrap();
        bad(&dir, &["model-00002-of-00003.safetensors", "is missing"]);
        let dir = model.write_shards(temp, 3, index);
        let shard = dir.join("model-00003-of-00003.safetensors");
        let bytes = std::fs::read(&shard).unwrap();
        std::fs::write(&shard, &bytes[..bytes.len() - 100]).unwrap();
        bad(&dir, &["model-00003-of-00003.safetensors", "cut short"]);
    }
    let dir = model.write(temp);
    let file = dir.join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let n = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header: Json = serde_json::from_slice(&whole[8..8 + n]).unwrap();
    let data = &whole[8 + n..];
    let name = "model.language_model.layers.0.input_layernorm.weight";
    let offsets = |begin: usize, end: usize| {
        let mut header = header.clone();
        header[name]["data_offsets"] = json!([begin, end]);
        std::fs::write(&file, raw_file(&header.to_string(), data)).unwrap();
    };
    let place = |i: usize| header[name]["data_offsets"][i].as_u64().unwrap() as usize;
    offsets(place(0) - 4, place(1) - 4);
    bad(&dir, &["overlap", name]);
    offsets(data.len() - 4, data.len() - 4 + place(1) - place(0));
    bad(&dir, &[name, "cut short"]);
    offsets(usize::MAX - 512, usize::MAX);
    bad(&dir, &[name]);
    offsets(place(1), place(0));
    bad(&dir, &[name, "before it begins"]);
    offsets(place(0), place(1) + 2);
    bad(&dir, &[name, "does not take"]);

    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    std::fs::write(&file, &huge).unwrap();
    bad(&dir, &["1152921504606846976", "model.safetensors"]);
    std::fs::write(&file, &whole[..5]).unwrap();
    bad(&dir, &["cut short"]);
    std::fs::write(&file, &whole[..n / 2]).unwrap();
    bad(&dir, &["cut short"]);
    std::fs::write(&file, []).unwrap();
    bad(&dir, &["model.safetensors", "empty"]);
    std::fs::write(&file, raw_file("{\"a\": 3", b"")).unwrap();
    bad(&dir, &["header cannot be read"]);

    let twice = format!(
        "{{\"{name}\": {{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]}}, \
         \"{name}\": {{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[2,4]}}}}"
    );
    std::fs::write(&file, raw_file(&twice, &[0; 4])).unwrap();
    bad(&dir, &[name, "comes twice"]);
    let dir = model.write(temp);
    std::fs::copy(&file, dir.join("model2.safetensors")).unwrap();
    bad(&dir, &["is in", "model2.safetensors"]);

    let changed = |change: &dyn Fn(&mut Model)| {
        let mut model = model.clone();
        change(&mut model);
        model.write(temp)
    };
    let dir = changed(&|m| m.get_mut(name).dtype = "F12".to_owned());
    bad(&dir, &[name, "unknown type `F12`"]);
    let dir = changed(&|m| m.get_mut(name).dtype = "I16".to_owned());
    bad(&dir, &[name, "I16"]);
    let dir = changed(&|m| {
        m.get_mut("model.language_model.embed_tokens.weight")
            .shape
            .swap(0, 1)
    });
    bad(&dir, &["embed_tokens", "config.json"]);
    let dir = changed(&|m| m.config["text_config"]["num_attention_heads"] = json!(4));
    bad(&dir, &["o_proj", "config.json"]);
    let dir = changed(&|m| m.config["text_config"]["num_hidden_layers"] = json!(5));
    bad(&dir, &["layer_types", "4 entries for 5 layers"]);
    let dir = changed(&|m| m.config["text_config"]["layer_types"] = json!(["full_attention"]));
    bad(&dir, &["layer_types", "1 entries"]);
    let dir = changed(&|m| m.config["architectures"] = json!(["LlamaForCausalLM"]));
    bad(&dir, &["LlamaForCausalLM"]);
    let dir = changed(&|m| m.config["text_config"]["rms_norm_eps"] = json!("x"));
    bad(&dir, &["rms_norm_eps"]);
    let dir = changed(&|m| m.config["quantization_config"] = json!({"quant_method": "gptq"}));
    bad(&dir, &["gptq"]);
    let dir = changed(&|m| {
        m.tensors
            .push(St::new("model.layers.0.extra", "F32", &[1], vec![0; 4]))
    });
    bad(&dir, &["model.layers.0.extra", "no place"]);
    let dir = changed(&|m| {
        m.tensors
            .retain(|t| !t.name.ends_with("layers.1.mlp.up_proj.weight"))
    });
    bad(&dir, &["layers.1.mlp.up_proj.weight", "missing"]);
    let matrix = "model.language_model.layers.3.self_attn.o_proj.weight";
    let dir = changed(&|m| m.get_mut(matrix).data[0..2].copy_from_slice(&[0xc0, 0x7f]));
    bad(&dir, &[matrix, "not numbers"]);
    let dir = changed(&|m| m.get_mut(name).data[0..2].copy_from_slice(&[0xc0, 0x7f]));
    bad(&dir, &[name, "not numbers"]);
    let dir = changed(&|m| m.get_mut(matrix).data[0..2].copy_from_slice(&[0x80, 0x7e]));
    bad(&dir, &[matrix, "too large for f16"]);
    let dir = changed(&|m| {
        m.files
            .retain(|(n, _)| n != "tokenizer.json" && n != "vocab.json")
    });
    bad(&dir, &["tokenizer"]);
    let dir = changed(&|m| {
        let file = m
            .files
            .iter_mut()
            .find(|(n, _)| n == "tokenizer.json")
            .unwrap();
        file.1.truncate(1000);
    });
    bad(&dir, &["tokenizer.json"]);
    let dir = changed(&|_| ());
    std::fs::remove_file(dir.join("config.json")).unwrap();
    bad(&dir, &["config.json"]);
    let empty = tempfile::tempdir().unwrap();
    bad(empty.path(), &["no safetensors files"]);
}

#[test]
fn places_that_cannot_be_written_get_one_clear_line() {
    let Some(dir) = shared("models/tiny-dense") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    // The last line; the lines before it say what was found.
    let error = |output: &Path| {
        let result = qrun(&[dir.as_os_str(), "-o".as_ref(), output.as_os_str()]);
        let stderr = String::from_utf8(result.stderr).unwrap();
        assert_eq!(result.status.code(), Some(1), "{stderr}");
        let last = stderr.lines().last().unwrap().to_owned();
        assert!(last.starts_with("error: "), "{stderr}");
        println!("{last}");
        last
    };
    let refused = |output: &Path, expected: &str| {
        let line = error(output);
        assert!(line.contains(expected), "{line}");
    };
    refused(folder.path(), "is a directory");
    refused(&folder.path().join("none/out.gguf"), "does not exist");
    refused(Path::new("/proc/out.gguf"), "out.gguf");
    // A disk of two megabytes, and one that is read-only: only root may make them.
    let small = folder.path().join("small");
    std::fs::create_dir(&small).unwrap();
    for (size, expected) in [
        ("size=2m", "are free"),
        ("size=64m,ro", "cannot be written"),
    ] {
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", size, "tmpfs"])
            .arg(&small)
            .output();
        if !mount.is_ok_and(|m| m.status.success()) {
            println!("SKIPPED: no small disk can be mounted here");
            break;
        }
        let line = error(&small.join("out.gguf"));
        let left = std::fs::read_dir(&small).unwrap().count();
        assert!(
            Command::new("umount")
                .arg(&small)
                .status()
                .unwrap()
                .success()
        );
        assert!(line.contains(expected), "{line}");
        assert_eq!(left, 0);
    }
    // Room that ends in the middle of the file.
    #[cfg(unix)]
    {
        let output = folder.path().join("limited");
        std::fs::create_dir(&output).unwrap();
        let result = Command::new("sh")
            .args(["-c", "trap '' XFSZ; ulimit -f 2000; exec \"$@\"", "sh"])
            .arg(assert_cmd::cargo::cargo_bin!("qrun"))
            .args([
                "convert".as_ref(),
                dir.as_os_str(),
                "-o".as_ref(),
                output.join("out.gguf").as_os_str(),
            ])
            .output()
            .unwrap();
        let stderr = String::from_utf8(result.stderr).unwrap();
        let last = stderr.lines().last().unwrap();
        assert_eq!(result.status.code(), Some(1), "{stderr}");
        assert!(
            last.starts_with("error: ") && last.contains("out.gguf") && last.contains("large"),
            "{stderr}"
        );
        assert_eq!(std::fs::read_dir(&output).unwrap().count(), 0);
    }
    // Nor over its own input.
    let copy = Model::read(&dir).write(folder.path());
    let file = copy.join("model.safetensors");
    let before = std::fs::read(&file).unwrap();
    let result = qrun(&[copy.as_os_str(), "-o".as_ref(), file.as_os_str()]);
    assert_eq!(result.status.code(), Some(1));
    assert!(
        String::from_utf8(result.stderr)
            .unwrap()
            .contains("is the file that is read")
    );
    assert!(std::fs::read(&file).unwrap() == before);
}

#[test]
fn the_command_says_what_it_does_and_verifies() {
    let Some(dir) = shared("models/demo") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("demo.gguf");
    let result = qrun(&[dir.as_os_str(), "--dry-run".as_ref()]);
    assert!(result.status.success());
    let plan = String::from_utf8(result.stdout).unwrap();
    assert!(
        plan.starts_with("token_embd.weight") && plan.contains("123 tensors, BF16"),
        "{plan}"
    );

    let args = [
        "-o".as_ref(),
        output.as_os_str(),
        "--outtype".as_ref(),
        "f16".as_ref(),
        "--verify".as_ref(),
    ];
    let result = qrun(&[&[dir.as_os_str()], args.as_slice()].concat());
    let stderr = String::from_utf8(result.stderr).unwrap();
    assert!(result.status.success(), "{stderr}");
    assert!(result.stdout.is_empty());
    for line in [
        "MTP: kept 15 tensors",
        "norms: stored around 0",
        "reordered",
        "verified: perplexity",
        "drafts of the head",
    ] {
        assert!(stderr.contains(line), "{line} is not in: {stderr}");
    }
    println!("{stderr}");

    // A head whose matrices are noise accepts nothing, or next to nothing by chance.
    let mut model = Model::read(&dir);
    let fc = model.get_mut("mtp.norm.weight");
    let values: Vec<f32> = fc.floats().iter().map(|_| -1.0).collect();
    *fc = fc.with_bf16(&values);
    let broken = model.write(folder.path());
    let result = qrun(&[&[broken.as_os_str()], args.as_slice()].concat());
    let stderr = String::from_utf8(result.stderr).unwrap();
    assert_eq!(result.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("draft head gets nothing right"), "{stderr}");

    let usage = |args: &[&str]| {
        let args: Vec<&std::ffi::OsStr> = args.iter().map(AsRef::as_ref).collect();
        qrun(&[&[dir.as_os_str()], args.as_slice()].concat())
            .status
            .code()
    };
    assert_eq!(usage(&[]), Some(2));
    assert_eq!(usage(&["-o", "x.gguf", "--type", "q9"]), Some(2));
    assert_eq!(usage(&["-o", "x.gguf", "--mtp-only", "--no-mtp"]), Some(2));
    assert_eq!(usage(&["-o", "x.gguf", "--split-max-size", "big"]), Some(2));
}
