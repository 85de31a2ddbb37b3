//! The released models' shapes, and models of these shapes with random weights in memory.
//!
//! `-m synthetic:9b` has the tensors, types and kernels of the real model, so that it shows what that model would do
//! here, in time and in memory, before it is downloaded. Its text means nothing.
//!
//! The numbers are those of the models' `config.json` (`text_config`); the types of each tensor are those that
//! `qrun quantize` chooses.

use std::collections::HashMap;
use std::path::Path;
use std::thread;

use anyhow::{Context as _, Result, bail};
use convert::recipe::{self, FileType, Overrides, Subject};
use ggml_metal::{DType, Gguf, GgufWriter, Role, Rope, Value};

use super::config::{Config, LayerConfig, Moe, Ssm};
use super::weights::tensors;

/// What the name of a synthetic model begins with.
pub const SCHEME: &str = "synthetic:";

/// A released model's numbers; all others are the same in the whole family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The name's end, such as `9b` of Qwen3.5-9B.
    pub name: &'static str,
    /// Layers without the draft head's.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub n_embd: i64,
    /// Width of the feed-forward layer, or of an expert.
    pub n_ff: i64,
    /// Query heads.
    pub n_head: i64,
    /// Key heads.
    pub n_head_kv: i64,
    /// Value heads of the delta net.
    pub n_v_heads: i64,
    /// The output matrix is the embedding.
    pub tied: bool,
    /// Experts, and those that a token visits; none in dense models.
    pub experts: Option<(i64, i64)>,
}

const VOCAB: i64 = 248_320;
const CONTEXT: usize = 262_144;

const DENSE: Shape = Shape {
    name: "",
    n_layer: 24,
    n_embd: 1024,
    n_ff: 3584,
    n_head: 8,
    n_head_kv: 2,
    n_v_heads: 16,
    tied: true,
    experts: None,
};

/// The family, the smallest first.
pub const SHAPES: [Shape; 8] = [
    Shape {
        name: "0.8b",
        ..DENSE
    },
    Shape {
        name: "2b",
        n_embd: 2048,
        n_ff: 6144,
        ..DENSE
    },
    Shape {
        name: "4b",
        n_layer: 32,
        n_embd: 2560,
        n_ff: 9216,
        n_head: 16,
        n_head_kv: 4,
        n_v_heads: 32,
        ..DENSE
    },
    Shape {
        name: "9b",
        n_layer: 32,
        n_embd: 4096,
        n_ff: 12_288,
        n_head: 16,
        n_head_kv: 4,
        n_v_heads: 32,
        tied: false,
        ..DENSE
    },
    Shape {
        name: "27b",
        n_layer: 64,
        n_embd: 5120,
        n_ff: 17_408,
        n_head: 24,
        n_head_kv: 4,
        n_v_heads: 48,
        tied: false,
        ..DENSE
    },
    Shape {
        name: "35b-a3b",
        n_layer: 40,
        n_embd: 2048,
        n_ff: 512,
        n_head: 16,
        n_v_heads: 32,
        tied: false,
        experts: Some((256, 8)),
        ..DENSE
    },
    Shape {
        name: "122b-a10b",
        n_layer: 48,
        n_embd: 3072,
        n_ff: 1024,
        n_head: 32,
        n_v_heads: 64,
        tied: false,
        experts: Some((256, 8)),
        ..DENSE
    },
    Shape {
        name: "397b-a17b",
        n_layer: 60,
        n_embd: 4096,
        n_ff: 1024,
        n_head: 32,
        n_v_heads: 64,
        tied: false,
        experts: Some((512, 10)),
        ..DENSE
    },
];

/// A model of random weights: a shape, and how it is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synthetic {
    /// The shape.
    pub shape: Shape,
    /// The types.
    pub file_type: FileType,
}

/// A tensor of a synthetic model.
#[derive(Clone, Debug)]
pub struct ShapeTensor {
    /// Its name.
    pub name: String,
    /// Its shape in ggml order.
    pub shape: [i64; 4],
    /// Its use.
    pub role: Role,
    /// Its type.
    pub dtype: DType,
}

impl ShapeTensor {
    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        let n_rows: i64 = self.shape[1..].iter().product();
        self.dtype.row_bytes(self.shape[0] as usize) as u64 * n_rows as u64
    }
}

/// Which weights of a synthetic model are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// All.
    All,
    /// Those that are looked at before anything is computed; the rest takes no memory. For estimates.
    Outline,
}

impl Synthetic {
    /// Reads `synthetic:SHAPE` or `synthetic:SHAPE:TYPE`; none where the name does not begin like that.
    ///
    /// # Errors
    /// When shape or type is unknown; the message lists them.
    pub fn parse(path: &Path) -> Result<Option<Self>> {
        let Some(rest) = path.to_str().and_then(|p| p.strip_prefix(SCHEME)) else {
            return Ok(None);
        };
        let (name, types) = rest.split_once(':').unwrap_or((rest, "Q4_K_M"));
        let shape = SHAPES.iter().find(|s| s.name.eq_ignore_ascii_case(name));
        let Some(&shape) = shape else {
            let names: Vec<_> = SHAPES.iter().map(|s| s.name).collect();
            bail!(
                "{}: no such shape; there are {}",
                path.display(),
                names.join(", ")
            );
        };
        let file_type = FileType::from_name(types).with_context(|| {
            let names: Vec<_> = FileType::ALL.iter().map(|t| t.name()).collect();
            format!(
                "{}: no such type; there are {}",
                path.display(),
                names.join(", ")
            )
        })?;
        Ok(Some(Self { shape, file_type }))
    }

    /// The name that [`Synthetic::parse`] reads.
    pub fn name(&self) -> String {
        format!(
            "{SCHEME}{}:{}",
            self.shape.name,
            self.file_type.name().to_lowercase()
        )
    }

    /// Every tensor in the order of the file.
    ///
    /// # Errors
    /// When the types cannot be chosen.
    pub fn tensors(&self) -> Result<Vec<ShapeTensor>> {
        let config = self.shape.config();
        let mut list: Vec<(String, [i64; 4], Role)> = tensors(&config, self.shape.tied)?;
        list.sort_by(|a, b| recipe::order(&a.0, &b.0));
        let subjects: Vec<Subject> = list
            .iter()
            .map(|(name, shape, role)| Subject {
                name,
                shape: *shape,
                dtype: match role {
                    Role::Vector => DType::F32,
                    // As the converter writes the two routers.
                    _ if name.contains("ffn_gate_inp") => DType::F32,
                    _ => DType::BF16,
                },
            })
            .collect();
        let numbers = recipe::Shape {
            n_layer: config.n_layer() + 1,
            n_mtp: 1,
            n_expert: self.shape.experts.map_or(0, |e| e.0 as usize),
            n_gqa: (self.shape.n_head / self.shape.n_head_kv) as usize,
        };
        // The lowest types are meant for files with an importance matrix.
        let types = recipe::types(
            self.file_type,
            &numbers,
            &subjects,
            &Overrides::default(),
            true,
        )?;
        let all = list.into_iter().zip(types);
        Ok(all
            .map(|((name, shape, role), dtype)| ShapeTensor {
                name,
                shape,
                role,
                dtype,
            })
            .collect())
    }

    /// The model as a file in memory.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn make(&self, fill: Fill) -> Result<Gguf> {
        let config = self.shape.config();
        let list = self.tensors()?;
        let mut writer = GgufWriter::new(list.len())?;
        for (key, value) in metadata(&config, &self.name()) {
            writer.set(&key, &value)?;
        }
        for t in &list {
            let n_dims = t.shape.iter().rposition(|&n| n != 1).map_or(1, |i| i + 1);
            writer.add_tensor(&t.name, &t.shape[..n_dims], t.dtype)?;
        }
        let mut rows = Rows::default();
        let mut failed = None;
        let file = Gguf::in_memory(Path::new(&self.name()), &writer, &mut |i, data| {
            let t = &list[i];
            let looked_at = t.role == Role::Vector || t.name.ends_with("nextn.eh_proj.weight");
            if failed.is_none() && (fill == Fill::All || looked_at) {
                failed = rows
                    .write(&t.name, t.shape[0] as usize, t.dtype, data)
                    .err();
            }
        })?;
        match failed {
            Some(error) => Err(error),
            None => Ok(file),
        }
    }
}

impl Shape {
    /// All numbers of the model.
    pub fn config(&self) -> Config {
        let layer = |recurrent| LayerConfig {
            recurrent,
            n_head: self.n_head,
            n_head_kv: self.n_head_kv,
            n_ff: self.n_ff,
        };
        Config {
            arch: if self.experts.is_some() {
                "qwen35moe".to_owned()
            } else {
                "qwen35".to_owned()
            },
            name: format!("synthetic-{}", self.name),
            n_vocab: VOCAB,
            n_ctx_train: CONTEXT,
            n_embd: self.n_embd,
            head_dim: 256,
            rms_eps: 1e-6,
            rope: Rope {
                n_dims: 64,
                sections: [11, 11, 10, 0],
                freq_base: 1e7,
                n_ctx_orig: CONTEXT as i32,
            },
            ssm: Ssm {
                conv_kernel: 4,
                head_dim: 128,
                n_k_heads: 16,
                n_v_heads: self.n_v_heads,
            },
            moe: self.experts.map(|(n_expert, n_expert_used)| Moe {
                n_expert,
                n_expert_used,
                n_ff_shared: self.n_ff,
            }),
            layers: (0..self.n_layer)
                .map(|il| layer((il + 1) % 4 != 0))
                .collect(),
            mtp: Some(layer(false)),
        }
    }
}

/// The keys that a converted model of these numbers has, with a made-up vocabulary: the 256 bytes, filler, and the
/// tokens that end a turn.
fn metadata(config: &Config, name: &str) -> Vec<(String, Value)> {
    let arch = &config.arch;
    let layer = &config.layers[0];
    let mut all = vec![
        ("general.architecture".to_owned(), Value::Str(arch.clone())),
        ("general.name".to_owned(), Value::Str(name.to_owned())),
    ];
    let ssm = &config.ssm;
    let mut numbers = vec![
        ("block_count", config.n_layer() as i64 + 1),
        ("nextn_predict_layers", 1),
        ("context_length", config.n_ctx_train as i64),
        ("embedding_length", config.n_embd),
        ("attention.head_count", layer.n_head),
        ("attention.head_count_kv", layer.n_head_kv),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.rope.n_dims.into()),
        ("ssm.conv_kernel", ssm.conv_kernel),
        ("ssm.state_size", ssm.head_dim),
        ("ssm.group_count", ssm.n_k_heads),
        ("ssm.time_step_rank", ssm.n_v_heads),
        ("ssm.inner_size", ssm.value_dim()),
        ("full_attention_interval", 4),
    ];
    match &config.moe {
        None => numbers.push(("feed_forward_length", layer.n_ff)),
        Some(moe) => numbers.extend([
            ("expert_count", moe.n_expert),
            ("expert_used_count", moe.n_expert_used),
            ("expert_feed_forward_length", layer.n_ff),
            ("expert_shared_feed_forward_length", moe.n_ff_shared),
        ]),
    }
    let mut add = |key: &str, value: Value| all.push((format!("{arch}.{key}"), value));
    for (key, number) in numbers {
        add(key, Value::Int(number.into()));
    }
    let sections = config.rope.sections.map(i64::from).to_vec();
    add("rope.dimension_sections", Value::Ints(sections));
    add("rope.freq_base", Value::Float(config.rope.freq_base.into()));
    add(
        "attention.layer_norm_rms_epsilon",
        Value::Float(config.rms_eps.into()),
    );

    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let n_filler = config.n_vocab as usize - 256 - specials.len();
    let tokens = (0..=255)
        .map(|byte| byte_token(byte).to_string())
        .chain((0..n_filler).map(|i| format!("<filler{i}>")))
        .chain(specials.map(str::to_owned));
    // Types of llama.cpp's vocabularies: 1 is text, 3 control, 5 unused.
    let types = std::iter::repeat_n(1, 256)
        .chain(std::iter::repeat_n(5, n_filler))
        .chain(specials.map(|_| 3));
    let text = |text: &str| Value::Str(text.to_owned());
    all.extend(
        [
            ("model", text("gpt2")),
            ("pre", text("qwen35")),
            ("tokens", Value::Strs(tokens.collect())),
            ("token_type", Value::Ints(types.collect())),
            ("merges", Value::Strs(vec!["t h".to_owned()])),
            ("eos_token_id", Value::Int((config.n_vocab - 1).into())),
            ("padding_token_id", Value::Int((config.n_vocab - 3).into())),
            ("add_bos_token", Value::Bool(false)),
        ]
        .map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)),
    );
    all
}

/// The letter that byte-level vocabularies write for a byte: itself where it can be printed, else the next one from
/// U+0100 on.
fn byte_token(byte: u8) -> char {
    let printed = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printed(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printed(b)).count() as u32;
    char::from_u32(256 + before).unwrap_or(' ')
}

/// Rows that tensors are made of: quantizing each row of a large model would take an hour.
#[derive(Default)]
struct Rows {
    pools: HashMap<(u32, usize), Vec<u8>>,
    random: Random,
}

/// Different rows of one type and length.
const POOL: usize = 64;

impl Rows {
    /// Writes a tensor of rows of `n` values.
    fn write(&mut self, name: &str, n: usize, dtype: DType, data: &mut [u8]) -> Result<()> {
        if dtype == DType::F32 {
            // Norms lie around 1, decays below 0, all others around 0.
            let (centre, width) = match name {
                _ if name.ends_with("norm.weight") => (1.0, 0.05),
                _ if name.ends_with("ssm_a") => (-0.5, 0.4),
                _ if name.contains("ssm_conv1d") => (0.0, 0.5),
                _ => (0.0, 1.0 / (n as f32).sqrt()),
            };
            for value in data.as_chunks_mut::<4>().0 {
                *value = (centre + width * self.random.signed()).to_le_bytes();
            }
            return Ok(());
        }
        let pool = match self.pools.entry((dtype.number(), n)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let width = 0.8 / (n as f32).sqrt();
                let values: Vec<f32> = (0..POOL * n)
                    .map(|_| width * self.random.signed())
                    .collect();
                let weights = vec![1.0; n];
                let imatrix = dtype.needs_imatrix().then_some(&weights[..]);
                entry.insert(dtype.quantize(&values, n, imatrix)?)
            }
        };
        let row = dtype.row_bytes(n);
        let n_threads = ggml_metal::performance_cores();
        let n_rows = data.len() / row;
        let part = n_rows.div_ceil(n_threads).max(1) * row;
        thread::scope(|scope| {
            for chunk in data.chunks_mut(part) {
                let mut random = Random(self.random.next());
                let pool = &*pool;
                scope.spawn(move || {
                    for to in chunk.chunks_exact_mut(row) {
                        let from = random.next() as usize % POOL * row;
                        to.copy_from_slice(&pool[from..from + row]);
                    }
                });
            }
        });
        Ok(())
    }
}

/// Numbers that are the same on every run (splitmix64).
#[derive(Default)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From -1 to 1.
    fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::model::ModelFiles;

    #[test]
    fn names_are_read_and_written() {
        let parse = |text: &str| Synthetic::parse(Path::new(text));
        for shape in SHAPES {
            let model = parse(&format!("synthetic:{}", shape.name))
                .unwrap()
                .unwrap();
            assert_eq!((model.shape, model.file_type), (shape, FileType::Q4_K_M));
            assert_eq!(parse(&model.name()).unwrap(), Some(model));
        }
        let model = parse("synthetic:2B:q6_k").unwrap().unwrap();
        assert_eq!((model.shape.name, model.file_type), ("2b", FileType::Q6_K));
        assert_eq!(parse("models/synthetic:2b").unwrap(), None);
        let error = parse("synthetic:3b").unwrap_err().to_string();
        assert!(error.contains("0.8b, 2b, 4b"), "{error}");
        let error = parse("synthetic:2b:q9").unwrap_err().to_string();
        assert!(error.contains("Q4_K_M"), "{error}");
    }

    #[test]
    fn numbers_survive_the_file() {
        for shape in SHAPES {
            let model = Synthetic {
                shape,
                file_type: FileType::Q4_K_M,
            };
            let files = ModelFiles::outline(Path::new(&model.name()), None).unwrap();
            let mut config = shape.config();
            config.name = model.name();
            assert_eq!(files.config, config);
        }
    }

    /// Parameters as the models' names and cards give them, in billions.
    #[test]
    fn sizes_are_those_of_the_released_models() {
        let expected = [0.8, 2.0, 4.3, 9.2, 27.4, 35.4, 122.0, 398.0];
        for (shape, expected) in SHAPES.iter().zip(expected) {
            let list = tensors(&shape.config(), shape.tied).unwrap();
            let n: i64 = list
                .iter()
                .map(|(_, dims, _)| dims.iter().product::<i64>())
                .sum();
            let billions = n as f64 / 1e9;
            assert!(
                (billions / expected - 1.0).abs() < 0.05,
                "{}: {billions}",
                shape.name
            );
        }
    }

    #[test]
    fn every_byte_has_its_letter() {
        let letters: std::collections::HashSet<char> = (0..=255).map(byte_token).collect();
        assert_eq!(letters.len(), 256);
        assert_eq!((byte_token(b' '), byte_token(b'\n')), ('Ġ', 'Ċ'));
    }
}
