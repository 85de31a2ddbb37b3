//! `config.json` of a Hugging Face checkpoint, as checked numbers.
//!
//! The released models nest the text settings in `text_config`; text-only fine-tunes have them flat. A nested key
//! wins over the same key outside.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use ggml_metal::one_line;
use serde_json::Value;

/// No released model comes near these; a file beyond them is damaged or hostile.
const MAX_LAYERS: u64 = 4096;
const MAX_WIDTH: u64 = 1 << 20;
const MAX_VOCAB: u64 = 1 << 24;
const MAX_HEADS: u64 = 1 << 16;

/// The sections that Qwen 3.5 models use where their settings name none.
const DEFAULT_SECTIONS: [i64; 4] = [11, 11, 10, 0];

/// The model's numbers.
#[derive(Clone, Debug)]
pub struct HfConfig {
    path: PathBuf,
    /// The whole of `config.json`.
    pub root: Value,
    /// Layers of the trunk.
    pub n_layer: usize,
    /// Whether a trunk layer is a gated delta net (true) or full attention.
    pub recurrent: Vec<bool>,
    /// Every how many layers one is full attention.
    pub full_attention_interval: u64,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Width of the dense feed-forward; MoE models may have none.
    pub n_ff: Option<usize>,
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads.
    pub n_head_kv: usize,
    /// Dimensions of an attention head.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Context length of the training.
    pub n_ctx: u64,
    /// `eps` of the RMS norms.
    pub rms_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Dimensions that turn.
    pub n_rot: u64,
    /// Pairs of dimensions for time, height, width, and none.
    pub rope_sections: [i64; 4],
    /// Numbers of the delta nets.
    pub linear: Linear,
    /// Numbers of the experts; none in dense models.
    pub moe: Option<Moe>,
    /// Whether the head is said to be the embedding.
    pub tied: Option<bool>,
    /// MTP layers as announced; many checkpoints announce none and have one, or the other way round.
    pub n_mtp: Option<usize>,
    /// How matrices are quantized.
    pub quantization: Quantization,
}

/// Numbers of the gated delta nets.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// Inputs that the convolution sees.
    pub conv_kernel: usize,
    /// Dimensions of a key head, and of a value head.
    pub head_dim: usize,
    /// Key heads.
    pub n_k_heads: usize,
    /// Value heads.
    pub n_v_heads: usize,
}

impl Linear {
    /// Width of the queries and keys together.
    pub fn qk_dim(&self) -> usize {
        2 * self.head_dim * self.n_k_heads
    }

    /// Width of the values.
    pub fn v_dim(&self) -> usize {
        self.head_dim * self.n_v_heads
    }
}

/// Numbers of the experts.
#[derive(Clone, Copy, Debug)]
pub struct Moe {
    /// Experts in all.
    pub n_expert: usize,
    /// Experts that a token visits.
    pub n_used: usize,
    /// Width of one.
    pub n_ff: usize,
    /// Width of the shared one.
    pub n_ff_shared: usize,
}

/// How a checkpoint's matrices are quantized.
#[derive(Clone, Debug, PartialEq)]
pub enum Quantization {
    /// Not at all.
    None,
    /// Eight-bit floats with scales.
    Fp8 {
        /// Rows and columns that share one.
        block: [usize; 2],
    },
    /// MLX's packed groups, with scales and biases.
    Mlx,
}

impl HfConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// When it is missing or not JSON, the architecture or the quantization is another one, or a number is
    /// missing or out of range.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read(&path).with_context(|| {
            format!("reading {}; a checkpoint's folder has one", path.display())
        })?;
        let root: Value = serde_json::from_slice(&text)
            .with_context(|| format!("{}: is not valid JSON", path.display()))?;
        let moe = is_moe(&path, &root)?;
        let keys = Keys {
            path: &path,
            root: &root,
        };

        let n_layer = keys.int("num_hidden_layers", 1, MAX_LAYERS)?;
        let n_embd = keys.int("hidden_size", 1, MAX_WIDTH)?;
        let n_head = keys.int("num_attention_heads", 1, MAX_HEADS)?;
        let n_head_kv = keys.int("num_key_value_heads", 1, MAX_HEADS)?;
        let head_dim = match keys.get("head_dim") {
            Some(_) => keys.int("head_dim", 1, 4096)?,
            None => n_embd / n_head,
        };
        ensure!(
            n_head % n_head_kv == 0 && head_dim > 0,
            keys.refuse(
                "num_attention_heads",
                format!("is {n_head}, not a multiple of {n_head_kv} key heads")
            )
        );
        let interval = match keys.get("full_attention_interval") {
            Some(_) => keys.int("full_attention_interval", 1, MAX_LAYERS)?,
            None => 4,
        };
        let rope = keys.rope()?;
        let k_dim = keys.int("linear_key_head_dim", 1, 4096)?;
        let v_dim = keys.int("linear_value_head_dim", 1, 4096)?;
        let n_k_heads = keys.int("linear_num_key_heads", 1, MAX_HEADS)?;
        let n_v_heads = keys.int("linear_num_value_heads", 1, MAX_HEADS)?;
        ensure!(
            k_dim == v_dim,
            keys.refuse(
                "linear_value_head_dim",
                format!(
                    "is {v_dim}, the key heads have {k_dim}; GGUF files hold one number for both"
                )
            )
        );
        ensure!(
            n_v_heads % n_k_heads == 0,
            keys.refuse(
                "linear_num_value_heads",
                format!("is {n_v_heads}, not a multiple of {n_k_heads} key heads")
            )
        );
        let moe = moe.then(|| keys.moe()).transpose()?;
        let n_ff = match keys.get("intermediate_size") {
            Some(_) => Some(keys.int("intermediate_size", 1, MAX_WIDTH)? as usize),
            None => None,
        };
        ensure!(
            moe.is_some() || n_ff.is_some(),
            keys.missing("intermediate_size")
        );
        Ok(Self {
            recurrent: keys.layer_types(n_layer, interval)?,
            n_layer: n_layer as usize,
            full_attention_interval: interval,
            n_embd: n_embd as usize,
            n_ff,
            n_head: n_head as usize,
            n_head_kv: n_head_kv as usize,
            head_dim: head_dim as usize,
            n_vocab: keys.int("vocab_size", 1, MAX_VOCAB)? as usize,
            n_ctx: keys.int("max_position_embeddings", 1, 1 << 30)?,
            rms_eps: keys.float("rms_norm_eps", 0.0, 1.0)?,
            rope_theta: rope.theta,
            n_rot: (head_dim as f64 * rope.fraction) as u64,
            rope_sections: rope.sections,
            linear: Linear {
                conv_kernel: keys.int("linear_conv_kernel_dim", 2, 64)? as usize,
                head_dim: k_dim as usize,
                n_k_heads: n_k_heads as usize,
                n_v_heads: n_v_heads as usize,
            },
            moe,
            tied: keys.get("tie_word_embeddings").and_then(Value::as_bool),
            n_mtp: match keys.get("mtp_num_hidden_layers") {
                Some(_) => Some(keys.int("mtp_num_hidden_layers", 0, 16)? as usize),
                None => None,
            },
            quantization: keys.quantization()?,
            path,
            root,
        })
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A key of the text settings, or of the whole.
    pub fn get(&self, key: &str) -> Option<&Value> {
        get(&self.root, key)
    }

    /// `qwen35` or `qwen35moe`.
    pub fn arch(&self) -> &'static str {
        match self.moe {
            Some(_) => "qwen35moe",
            None => "qwen35",
        }
    }
}

/// Decides between the dense and the MoE form.
fn is_moe(path: &Path, root: &Value) -> Result<bool> {
    let named = root["architectures"][0].as_str();
    let kind = get(root, "model_type").and_then(Value::as_str);
    let known = match named {
        Some("Qwen3_5ForConditionalGeneration" | "Qwen3_5ForCausalLM") => Some(false),
        Some("Qwen3_5MoeForConditionalGeneration" | "Qwen3_5MoeForCausalLM") => Some(true),
        Some(_) => None,
        // Some tools save no architecture.
        None => match kind {
            Some("qwen3_5" | "qwen3_5_text") => Some(false),
            Some("qwen3_5_moe" | "qwen3_5_moe_text") => Some(true),
            _ => None,
        },
    };
    known.with_context(|| {
        format!(
            "{}: its architecture is `{}`; qrun converts Qwen3_5 and Qwen3_5Moe, ForConditionalGeneration or ForCausalLM",
            path.display(),
            one_line(named.or(kind).unwrap_or("not named"))
        )
    })
}

fn get<'a>(root: &'a Value, key: &str) -> Option<&'a Value> {
    let nested = root.get("text_config").and_then(|t| t.get(key));
    nested
        .filter(|v| !v.is_null())
        .or_else(|| root.get(key))
        .filter(|v| !v.is_null())
}

struct Keys<'a> {
    path: &'a Path,
    root: &'a Value,
}

struct RopeKeys {
    theta: f64,
    fraction: f64,
    sections: [i64; 4],
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        get(self.root, key)
    }

    fn refuse(&self, key: &str, reason: String) -> anyhow::Error {
        anyhow::anyhow!("{}: key `{key}` {reason}", self.path.display())
    }

    fn missing(&self, key: &str) -> anyhow::Error {
        self.refuse(key, "is missing".to_owned())
    }

    fn int(&self, key: &str, min: u64, max: u64) -> Result<u64> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        value
            .as_u64()
            .filter(|v| (min..=max).contains(v))
            .ok_or_else(|| {
                let shown = one_line(&value.to_string());
                self.refuse(key, format!("is {shown}, expected {min} to {max}"))
            })
    }

    fn float(&self, key: &str, min: f64, max: f64) -> Result<f64> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        self.checked_float(key, value, min, max)
    }

    fn checked_float(&self, key: &str, value: &Value, min: f64, max: f64) -> Result<f64> {
        value
            .as_f64()
            .filter(|v| *v >= min && *v <= max)
            .ok_or_else(|| {
                let shown = one_line(&value.to_string());
                self.refuse(key, format!("is {shown}, expected {min} to {max}"))
            })
    }

    fn moe(&self) -> Result<Moe> {
        let n_expert = self.int("num_experts", 1, 1 << 14)?;
        Ok(Moe {
            n_expert: n_expert as usize,
            n_used: self.int("num_experts_per_tok", 1, n_expert)? as usize,
            n_ff: self.int("moe_intermediate_size", 1, MAX_WIDTH)? as usize,
            n_ff_shared: self.int("shared_expert_intermediate_size", 1, MAX_WIDTH)? as usize,
        })
    }

    fn layer_types(&self, n_layer: u64, interval: u64) -> Result<Vec<bool>> {
        let key = "layer_types";
        let Some(list) = self.get(key) else {
            return Ok((1..=n_layer).map(|i| i % interval != 0).collect());
        };
        let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
        ensure!(
            list.len() as u64 == n_layer,
            self.refuse(
                key,
                format!("has {} entries for {n_layer} layers", list.len())
            )
        );
        list.iter()
            .map(|kind| match kind.as_str() {
                Some("linear_attention") => Ok(true),
                Some("full_attention") => Ok(false),
                _ => Err(self.refuse(
                    key,
                    format!(
                        "has {}, expected linear_attention or full_attention",
                        one_line(&kind.to_string())
                    ),
                )),
            })
            .collect()
    }

    /// Rotary settings: their own object in newer files, keys of the text settings in older ones.
    fn rope(&self) -> Result<RopeKeys> {
        let object = self
            .get("rope_parameters")
            .or_else(|| self.get("rope_scaling"));
        let find = |key: &str| {
            object
                .and_then(|o| o.get(key))
                .filter(|v| !v.is_null())
                .or_else(|| self.get(key))
        };
        let kind = object
            .and_then(|o| o.get("rope_type").or_else(|| o.get("type")))
            .and_then(Value::as_str)
            .unwrap_or("default");
        ensure!(
            matches!(kind, "default" | "mrope"),
            self.refuse(
                "rope_parameters",
                format!(
                    "has the type `{}`; only `default` is computed here: remove the scaling from the settings",
                    one_line(kind)
                )
            )
        );
        let theta = find("rope_theta").ok_or_else(|| self.missing("rope_theta"))?;
        let fraction = match find("partial_rotary_factor") {
            Some(value) => self.checked_float("partial_rotary_factor", value, 0.0, 1.0)?,
            None => 0.25,
        };
        let mut sections = DEFAULT_SECTIONS;
        if let Some(value) = find("mrope_section") {
            let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
            ensure!(
                (3..=4).contains(&list.len()),
                self.refuse("mrope_section", "is not a list of 3 numbers".to_owned())
            );
            sections = [0; 4];
            for (section, value) in sections.iter_mut().zip(list) {
                *section = value
                    .as_i64()
                    .filter(|v| (0..=4096).contains(v))
                    .ok_or_else(|| {
                        self.refuse("mrope_section", "is not a list of small numbers".to_owned())
                    })?;
            }
        }
        Ok(RopeKeys {
            theta: self.checked_float("rope_theta", theta, 1.0, 1e12)?,
            fraction,
            sections,
        })
    }

    fn quantization(&self) -> Result<Quantization> {
        // MLX writes `quantization` and the same again as `quantization_config`.
        if let Some(mlx) = self.get("quantization") {
            let mode = mlx["mode"].as_str().unwrap_or("affine");
            ensure!(
                mode == "affine",
                self.refuse(
                    "quantization",
                    format!(
                        "has the mode `{}`; of MLX's, only `affine` can be converted: use the original checkpoint",
                        one_line(mode)
                    )
                )
            );
            return Ok(Quantization::Mlx);
        }
        let Some(config) = self.get("quantization_config") else {
            return Ok(Quantization::None);
        };
        let method = config["quant_method"].as_str().unwrap_or("unknown");
        let format = config["format"].as_str().unwrap_or("");
        if method == "fp8" || (method == "compressed-tensors" && format == "float-quantized") {
            let mut block = [128; 2];
            for (size, value) in block
                .iter_mut()
                .zip(config["weight_block_size"].as_array().into_iter().flatten())
            {
                *size = value
                    .as_u64()
                    .filter(|n| (1..=MAX_WIDTH).contains(n))
                    .ok_or_else(|| {
                        self.refuse("weight_block_size", "is not a list of sizes".to_owned())
                    })? as usize;
            }
            return Ok(Quantization::Fp8 { block });
        }
        bail!(self.refuse(
            "quantization_config",
            format!(
                "says that the weights are quantized with `{}`; only block-scaled fp8 and MLX's affine groups can \
                 be converted: use the original checkpoint",
                one_line(method)
            )
        ))
    }
}
