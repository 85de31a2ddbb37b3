//! Model files that no converter writes: taken apart, changed and written again, or made up from a seed.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::borrow::Cow;
use std::path::Path;

use ggml_metal::{DType, Gguf, GgufWriter, Value};

/// A tensor with its data.
#[derive(Clone)]
pub struct Part {
    pub name: String,
    pub shape: Vec<i64>,
    pub dtype: DType,
    pub data: Vec<u8>,
}

/// A model file taken apart.
#[derive(Clone)]
pub struct Variant {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<Part>,
}

impl Variant {
    pub fn read(path: &Path) -> Self {
        let file = Gguf::open(path).unwrap();
        let metadata = file.keys().into_iter();
        let tensors = file.tensors().iter();
        Self {
            metadata: metadata
                .map(|k| (k.clone(), file.value(&k).unwrap()))
                .collect(),
            tensors: tensors
                .map(|t| Part {
                    name: t.name.clone(),
                    shape: t.dims().to_vec(),
                    dtype: t.dtype,
                    data: file.data(t).to_vec(),
                })
                .collect(),
        }
    }

    pub fn arch(&self) -> String {
        match self.value("general.architecture") {
            Some(Value::Str(arch)) => arch.clone(),
            other => panic!("no architecture: {other:?}"),
        }
    }

    /// The key with the architecture's prefix.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch())
    }

    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    pub fn int(&self, key: &str) -> i128 {
        match self.value(&self.key(key)) {
            Some(Value::Int(v)) => *v,
            other => panic!("{key}: {other:?}"),
        }
    }

    pub fn set(&mut self, key: &str, value: Value) {
        match self.metadata.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
    }

    /// Sets a key of the architecture.
    pub fn set_arch(&mut self, key: &str, value: Value) {
        let key = self.key(key);
        self.set(&key, value);
    }

    pub fn remove(&mut self, key: &str) {
        self.metadata.retain(|(k, _)| k != key);
    }

    pub fn tensor(&self, name: &str) -> &Part {
        self.tensors
            .iter()
            .find(|t| t.name == name)
            .unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn tensor_mut(&mut self, name: &str) -> &mut Part {
        self.tensors
            .iter_mut()
            .find(|t| t.name == name)
            .unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn take(&mut self, name: &str) -> Part {
        let at = self.tensors.iter().position(|t| t.name == name);
        self.tensors
            .remove(at.unwrap_or_else(|| panic!("no {name}")))
    }

    /// The number of the MTP block, which is that of the trunk's layers.
    pub fn mtp_block(&self) -> i128 {
        self.int("block_count") - self.int("nextn_predict_layers")
    }

    /// Takes the tensors of one block out.
    pub fn take_block(&mut self, block: i128) -> Vec<Part> {
        let prefix = format!("blk.{block}.");
        let (taken, kept) = std::mem::take(&mut self.tensors)
            .into_iter()
            .partition(|t| t.name.starts_with(&prefix));
        self.tensors = kept;
        taken
    }

    /// Writes the file with the product's own writer.
    pub fn write(&self, path: &Path) {
        let mut writer = GgufWriter::new(self.tensors.len()).unwrap();
        for (key, value) in &self.metadata {
            writer.set(key, value).unwrap();
        }
        for tensor in &self.tensors {
            writer
                .add_tensor(&tensor.name, &tensor.shape, tensor.dtype)
                .unwrap();
        }
        writer
            .write(path, |i| Ok(Cow::Borrowed(&self.tensors[i].data)))
            .unwrap();
    }

    /// The file's bytes, written here from the format's description, so that anything can be wrong with them.
    /// Also returns the length of the part before the tensors' data.
    pub fn to_bytes(&self, alignment: usize) -> (Vec<u8>, usize) {
        let mut out = Vec::new();
        out.extend_from_slice(b"GGUF");
        out.extend_from_slice(&3u32.to_le_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        out.extend_from_slice(&(self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            put(&mut out, value);
        }
        let mut offset = 0usize;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend_from_slice(&(tensor.shape.len() as u32).to_le_bytes());
            for n in &tensor.shape {
                out.extend_from_slice(&n.to_le_bytes());
            }
            out.extend_from_slice(&tensor.dtype.number().to_le_bytes());
            out.extend_from_slice(&(offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(alignment);
        }
        let header = out.len();
        out.resize(header.next_multiple_of(alignment), 0);
        for tensor in &self.tensors {
            out.extend_from_slice(&tensor.data);
            out.resize(out.len().next_multiple_of(alignment), 0);
        }
        (out, header)
    }
}

/// A length and the bytes.
pub fn text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// A value with its type's number before it.
fn put(out: &mut Vec<u8>, value: &Value) {
    fn kind(out: &mut Vec<u8>, kind: u32) {
        out.extend_from_slice(&kind.to_le_bytes());
    }
    fn array(out: &mut Vec<u8>, element: u32, n: usize) {
        kind(out, 9);
        kind(out, element);
        out.extend_from_slice(&(n as u64).to_le_bytes());
    }
    match value {
        Value::Int(v) => match u32::try_from(*v) {
            Ok(v) => {
                kind(out, 4);
                out.extend_from_slice(&v.to_le_bytes());
            }
            Err(_) => {
                kind(out, 11);
                out.extend_from_slice(&(*v as i64).to_le_bytes());
            }
        },
        Value::Float(v) => {
            kind(out, 6);
            out.extend_from_slice(&(*v as f32).to_le_bytes());
        }
        Value::Bool(v) => {
            kind(out, 7);
            out.push((*v).into());
        }
        Value::Str(v) => {
            kind(out, 8);
            text(out, v);
        }
        Value::Ints(list) => {
            array(out, 11, list.len());
            list.iter()
                .for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
        }
        Value::Floats(list) => {
            array(out, 6, list.len());
            list.iter()
                .for_each(|v| out.extend_from_slice(&(*v as f32).to_le_bytes()));
        }
        Value::Bools(list) => {
            array(out, 7, list.len());
            list.iter().for_each(|v| out.push((*v).into()));
        }
        Value::Strs(list) => {
            array(out, 8, list.len());
            list.iter().for_each(|v| text(out, v));
        }
    }
}

/// A generator of numbers that are the same on every run and machine (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Between -1 and 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// A model of random weights: three gated delta nets, one full attention, an MTP block, 24 tokens.
pub fn synthetic(moe: bool) -> Variant {
    let arch = if moe { "qwen35moe" } else { "qwen35" };
    let (n_embd, n_ff, n_vocab, head_dim, n_expert) = (64i64, 64i64, 24i64, 32i64, 6i64);
    let int = |v: i64| Value::Int(v.into());
    let mut keys = vec![
        ("block_count", int(5)),
        ("nextn_predict_layers", int(1)),
        ("context_length", int(512)),
        ("embedding_length", int(n_embd)),
        ("feed_forward_length", int(n_ff)),
        ("attention.head_count", int(4)),
        ("attention.head_count_kv", int(2)),
        ("attention.key_length", int(head_dim)),
        ("attention.value_length", int(head_dim)),
        ("attention.layer_norm_rms_epsilon", Value::Float(1e-6)),
        ("rope.freq_base", Value::Float(1e4)),
        ("rope.dimension_count", int(16)),
        ("rope.dimension_sections", Value::Ints(vec![3, 3, 2, 0])),
        ("ssm.conv_kernel", int(4)),
        ("ssm.state_size", int(32)),
        ("ssm.group_count", int(2)),
        ("ssm.time_step_rank", int(4)),
        ("ssm.inner_size", int(128)),
        ("full_attention_interval", int(4)),
    ];
    if moe {
        keys.extend([
            ("expert_count", int(n_expert)),
            ("expert_used_count", int(2)),
            ("expert_feed_forward_length", int(n_ff)),
            ("expert_shared_feed_forward_length", int(n_ff)),
        ]);
    }
    let texts = |n: i64| Value::Strs((0..n).map(|i| format!("t{i}")).collect());
    let mut metadata = vec![
        (
            "general.architecture".to_owned(),
            Value::Str(arch.to_owned()),
        ),
        (
            "general.name".to_owned(),
            Value::Str("synthetic".to_owned()),
        ),
    ];
    metadata.extend(keys.into_iter().map(|(k, v)| (format!("{arch}.{k}"), v)));
    metadata.extend([
        (
            "tokenizer.ggml.model".to_owned(),
            Value::Str("gpt2".to_owned()),
        ),
        (
            "tokenizer.ggml.pre".to_owned(),
            Value::Str("qwen35".to_owned()),
        ),
        ("tokenizer.ggml.tokens".to_owned(), texts(n_vocab)),
        (
            "tokenizer.ggml.token_type".to_owned(),
            Value::Ints(vec![1; n_vocab as usize]),
        ),
        (
            "tokenizer.ggml.merges".to_owned(),
            Value::Strs(vec!["t 1".to_owned()]),
        ),
        ("tokenizer.ggml.eos_token_id".to_owned(), int(1)),
    ]);

    let mut random = Random(if moe { 7 } else { 3 });
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[i64], middle: f32, spread: f32| {
        let n = shape.iter().product::<i64>();
        let values = (0..n).flat_map(|_| (middle + spread * random.unit()).to_le_bytes());
        tensors.push(Part {
            name,
            shape: shape.to_vec(),
            dtype: DType::F32,
            data: values.collect(),
        });
    };
    add("token_embd.weight".to_owned(), &[n_embd, n_vocab], 0.0, 1.0);
    add("output_norm.weight".to_owned(), &[n_embd], 1.0, 0.2);
    for il in 0..5 {
        let mut block = |name: &str, shape: &[i64], middle: f32, spread: f32| {
            add(format!("blk.{il}.{name}"), shape, middle, spread);
        };
        block("attn_norm.weight", &[n_embd], 1.0, 0.2);
        if il < 3 {
            block("attn_qkv.weight", &[n_embd, 256], 0.0, 0.2);
            block("attn_gate.weight", &[n_embd, 128], 0.0, 0.2);
            block("ssm_conv1d.weight", &[4, 256], 0.0, 0.5);
            block("ssm_dt.bias", &[4], 0.0, 0.5);
            block("ssm_a", &[4], -0.5, 0.4);
            block("ssm_beta.weight", &[n_embd, 4], 0.0, 0.2);
            block("ssm_alpha.weight", &[n_embd, 4], 0.0, 0.2);
            block("ssm_norm.weight", &[32], 1.0, 0.2);
            block("ssm_out.weight", &[128, n_embd], 0.0, 0.2);
        } else {
            block("attn_q.weight", &[n_embd, 256], 0.0, 0.2);
            block("attn_k.weight", &[n_embd, 64], 0.0, 0.2);
            block("attn_v.weight", &[n_embd, 64], 0.0, 0.2);
            block("attn_q_norm.weight", &[head_dim], 1.0, 0.2);
            block("attn_k_norm.weight", &[head_dim], 1.0, 0.2);
            block("attn_output.weight", &[128, n_embd], 0.0, 0.2);
        }
        block("post_attention_norm.weight", &[n_embd], 1.0, 0.2);
        if moe {
            block("ffn_gate_inp.weight", &[n_embd, n_expert], 0.0, 0.3);
            block("ffn_gate_exps.weight", &[n_embd, n_ff, n_expert], 0.0, 0.2);
            block("ffn_up_exps.weight", &[n_embd, n_ff, n_expert], 0.0, 0.2);
            block("ffn_down_exps.weight", &[n_ff, n_embd, n_expert], 0.0, 0.2);
            block("ffn_gate_inp_shexp.weight", &[n_embd], 0.0, 0.2);
            block("ffn_gate_shexp.weight", &[n_embd, n_ff], 0.0, 0.2);
            block("ffn_up_shexp.weight", &[n_embd, n_ff], 0.0, 0.2);
            block("ffn_down_shexp.weight", &[n_ff, n_embd], 0.0, 0.2);
        } else {
            block("ffn_gate.weight", &[n_embd, n_ff], 0.0, 0.2);
            block("ffn_up.weight", &[n_embd, n_ff], 0.0, 0.2);
            block("ffn_down.weight", &[n_ff, n_embd], 0.0, 0.2);
        }
        if il == 4 {
            block("nextn.eh_proj.weight", &[2 * n_embd, n_embd], 0.0, 0.2);
            block("nextn.enorm.weight", &[n_embd], 1.0, 0.2);
            block("nextn.hnorm.weight", &[n_embd], 1.0, 0.2);
            block("nextn.shared_head_norm.weight", &[n_embd], 1.0, 0.2);
        }
    }
    Variant { metadata, tensors }
}

/// Joins `attn_q`, `attn_k` and `attn_v` of every layer that has them to one `attn_qkv`: rows q, then k, then v.
pub fn fuse_qkv(variant: &mut Variant) {
    for block in 0..variant.int("block_count") {
        let name = |part: &str| format!("blk.{block}.attn_{part}.weight");
        if variant.tensors.iter().any(|t| t.name == name("q")) {
            let parts = ["q", "k", "v"].map(|part| variant.take(&name(part)));
            let dtype = parts[0].dtype;
            let data = parts.iter().flat_map(|p| {
                // One matrix has one type: rows of another are converted.
                if p.dtype == dtype {
                    p.data.clone()
                } else {
                    let values = p.dtype.dequantize(&p.data).unwrap();
                    dtype.quantize(&values, p.shape[0] as usize, None).unwrap()
                }
            });
            variant.tensors.push(Part {
                name: name("qkv"),
                shape: vec![parts[0].shape[0], parts.iter().map(|p| p.shape[1]).sum()],
                dtype,
                data: data.collect(),
            });
        }
    }
}

/// Joins `ffn_gate_exps` and `ffn_up_exps` of every layer: per expert the rows of the gate, then of up.
pub fn fuse_gate_up(variant: &mut Variant) {
    for block in 0..variant.int("block_count") {
        let name = |part: &str| format!("blk.{block}.ffn_{part}_exps.weight");
        let (gate, up) = (variant.take(&name("gate")), variant.take(&name("up")));
        assert_eq!(gate.dtype, up.dtype);
        let n_expert = gate.shape[2] as usize;
        let bytes = gate.data.len() / n_expert;
        let mut data = Vec::with_capacity(2 * gate.data.len());
        for (gate, up) in gate.data.chunks(bytes).zip(up.data.chunks(bytes)) {
            data.extend_from_slice(gate);
            data.extend_from_slice(up);
        }
        variant.tensors.push(Part {
            name: name("gate_up"),
            shape: vec![gate.shape[0], 2 * gate.shape[1], gate.shape[2]],
            dtype: gate.dtype,
            data,
        });
    }
}
