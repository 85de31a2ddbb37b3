//! A small mixture-of-experts model with random weights: four key heads and eight value heads, as the released
//! models have more value heads than key heads. Made in a second, so nothing has to be stored.

use std::path::{Path, PathBuf};

use ggml_metal::{DType, GgufWriter, Value};

/// Tokens: the 256 bytes, filler, and two specials.
pub const N_VOCAB: usize = 1024;
const N_LAYER: usize = 4;
const N_EMBD: i64 = 256;
const HEAD_DIM: i64 = 128;
const N_HEAD: i64 = 4;
const N_HEAD_KV: i64 = 2;
const STATE: i64 = 128;
const N_K_HEADS: i64 = 4;
const N_V_HEADS: i64 = 8;
const N_EXPERT: i64 = 16;
const N_FF: i64 = 256;

/// What a tensor's random values are like.
#[derive(Clone, Copy)]
enum Kind {
    /// A matrix of that type, its values scaled by the row length.
    Matrix(DType),
    /// F32 values around a centre, with that deviation.
    Vector(f32, f32),
    /// `-exp(uniform)`: decays of the delta net.
    Decay,
}

/// Writes the model into `folder`.
pub fn moe(folder: &Path) -> PathBuf {
    let path = folder.join("synthetic-moe.gguf");
    let tensors = tensors();
    let mut writer = GgufWriter::new(tensors.len()).unwrap();
    for (key, value) in metadata() {
        writer.set(&key, &value).unwrap();
    }
    for (name, shape, kind) in &tensors {
        let dtype = match kind {
            Kind::Matrix(dtype) => *dtype,
            Kind::Vector(..) | Kind::Decay => DType::F32,
        };
        writer.add_tensor(name, shape, dtype).unwrap();
    }
    let mut random = Random(1);
    writer
        .write(&path, |i| {
            Ok(random.values(&tensors[i].1, tensors[i].2).into())
        })
        .unwrap();
    path
}

fn tensors() -> Vec<(String, Vec<i64>, Kind)> {
    let (q4, q6) = (Kind::Matrix(DType::Q4_K), Kind::Matrix(DType::Q6_K));
    let norm = Kind::Vector(1.0, 0.02);
    let vocab = N_VOCAB as i64;
    let mut all = vec![
        ("token_embd.weight".to_owned(), vec![N_EMBD, vocab], q4),
        ("output_norm.weight".to_owned(), vec![N_EMBD], norm),
        ("output.weight".to_owned(), vec![N_EMBD, vocab], q6),
    ];
    for il in 0..N_LAYER {
        let mut add = |name: &str, shape: &[i64], kind: Kind| {
            all.push((format!("blk.{il}.{name}"), shape.to_vec(), kind));
        };
        add("attn_norm.weight", &[N_EMBD], norm);
        add("post_attention_norm.weight", &[N_EMBD], norm);
        if (il + 1) % 4 == 0 {
            add("attn_q.weight", &[N_EMBD, 2 * HEAD_DIM * N_HEAD], q4);
            add("attn_k.weight", &[N_EMBD, HEAD_DIM * N_HEAD_KV], q4);
            add("attn_v.weight", &[N_EMBD, HEAD_DIM * N_HEAD_KV], q6);
            add("attn_output.weight", &[HEAD_DIM * N_HEAD, N_EMBD], q4);
            add("attn_q_norm.weight", &[HEAD_DIM], norm);
            add("attn_k_norm.weight", &[HEAD_DIM], norm);
        } else {
            let (n_conv, n_value) = (STATE * (2 * N_K_HEADS + N_V_HEADS), STATE * N_V_HEADS);
            add("attn_qkv.weight", &[N_EMBD, n_conv], q6);
            add("attn_gate.weight", &[N_EMBD, n_value], q4);
            add("ssm_conv1d.weight", &[4, n_conv], Kind::Vector(0.0, 0.3));
            add("ssm_dt.bias", &[N_V_HEADS], Kind::Vector(0.0, 0.5));
            add("ssm_a", &[N_V_HEADS], Kind::Decay);
            add("ssm_beta.weight", &[N_EMBD, N_V_HEADS], q4);
            add("ssm_alpha.weight", &[N_EMBD, N_V_HEADS], q4);
            add("ssm_norm.weight", &[STATE], norm);
            add("ssm_out.weight", &[n_value, N_EMBD], q4);
        }
        add(
            "ffn_gate_inp.weight",
            &[N_EMBD, N_EXPERT],
            Kind::Matrix(DType::F32),
        );
        add("ffn_gate_exps.weight", &[N_EMBD, N_FF, N_EXPERT], q4);
        add("ffn_up_exps.weight", &[N_EMBD, N_FF, N_EXPERT], q4);
        add("ffn_down_exps.weight", &[N_FF, N_EMBD, N_EXPERT], q6);
        add(
            "ffn_gate_inp_shexp.weight",
            &[N_EMBD],
            Kind::Vector(0.0, 0.02),
        );
        add("ffn_gate_shexp.weight", &[N_EMBD, N_FF], q4);
        add("ffn_up_shexp.weight", &[N_EMBD, N_FF], q4);
        add("ffn_down_shexp.weight", &[N_FF, N_EMBD], q6);
    }
    all
}

fn metadata() -> Vec<(String, Value)> {
    let own = |key: &str, value: Value| (format!("qwen35moe.{key}"), value);
    let int = |key: &str, value: i64| own(key, Value::Int(value.into()));
    // Byte-level tokens under the printable names that GPT-2's tokenizer gave to bytes.
    let mut shifted = 0;
    let mut tokens: Vec<String> = (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
            _ => {
                shifted += 1;
                char::from_u32(255 + shifted).unwrap().to_string()
            }
        })
        .collect();
    tokens.extend((256..N_VOCAB - 2).map(|i| format!("<filler{i}>")));
    tokens.extend(["<|endoftext|>".to_owned(), "<|im_end|>".to_owned()]);
    // 1 is a normal token, 3 a control token, 5 an unused one.
    let types = (0..N_VOCAB).map(|i| {
        if i < 256 {
            1
        } else if i < N_VOCAB - 2 {
            5
        } else {
            3
        }
    });
    vec![
        (
            "general.architecture".to_owned(),
            Value::Str("qwen35moe".to_owned()),
        ),
        int("block_count", N_LAYER as i64),
        int("context_length", 4096),
        int("embedding_length", N_EMBD),
        int("feed_forward_length", N_FF * 4),
        int("attention.head_count", N_HEAD),
        int("attention.head_count_kv", N_HEAD_KV),
        int("attention.key_length", HEAD_DIM),
        int("attention.value_length", HEAD_DIM),
        own("attention.layer_norm_rms_epsilon", Value::Float(1e-6)),
        own("rope.freq_base", Value::Float(1e7)),
        int("rope.dimension_count", 32),
        own("rope.dimension_sections", Value::Ints(vec![6, 5, 5, 0])),
        int("ssm.conv_kernel", 4),
        int("ssm.state_size", STATE),
        int("ssm.group_count", N_K_HEADS),
        int("ssm.time_step_rank", N_V_HEADS),
        int("ssm.inner_size", STATE * N_V_HEADS),
        int("full_attention_interval", 4),
        int("expert_count", N_EXPERT),
        int("expert_used_count", 4),
        int("expert_feed_forward_length", N_FF),
        int("expert_shared_feed_forward_length", N_FF),
        (
            "tokenizer.ggml.model".to_owned(),
            Value::Str("gpt2".to_owned()),
        ),
        (
            "tokenizer.ggml.pre".to_owned(),
            Value::Str("qwen35".to_owned()),
        ),
        ("tokenizer.ggml.tokens".to_owned(), Value::Strs(tokens)),
        (
            "tokenizer.ggml.token_type".to_owned(),
            Value::Ints(types.collect()),
        ),
        (
            "tokenizer.ggml.merges".to_owned(),
            Value::Strs(vec!["t h".to_owned()]),
        ),
        (
            "tokenizer.ggml.eos_token_id".to_owned(),
            Value::Int(N_VOCAB as i128 - 1),
        ),
        (
            "tokenizer.ggml.add_bos_token".to_owned(),
            Value::Bool(false),
        ),
    ]
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About a standard normal: the sum of four uniforms.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.unit()).sum();
        (sum - 2.0) * 3f32.sqrt()
    }

    fn values(&mut self, shape: &[i64], kind: Kind) -> Vec<u8> {
        let n = shape.iter().product::<i64>() as usize;
        let (centre, deviation, dtype) = match kind {
            Kind::Matrix(dtype) => (0.0, 0.5 / (shape[0] as f32).sqrt(), dtype),
            Kind::Vector(centre, deviation) => (centre, deviation, DType::F32),
            Kind::Decay => (0.0, 0.0, DType::F32),
        };
        let floats: Vec<f32> = match kind {
            Kind::Decay => (0..n).map(|_| -(4.0 * self.unit() - 3.0).exp()).collect(),
            _ => (0..n).map(|_| centre + deviation * self.normal()).collect(),
        };
        dtype.quantize(&floats, shape[0] as usize, None).unwrap()
    }
}
