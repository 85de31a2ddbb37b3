//! Hyperparameters: GGUF metadata turned into checked numbers.
//!
//! Keys are those that llama.cpp's converter writes for the architectures `qwen35` and `qwen35moe`. Every number
//! is checked before anything is allocated from it, and a message names the file and the key.

use anyhow::{Context as _, Result, bail, ensure};
use ggml_metal::{Gguf, Rope, TensorInfo, Value, one_line};

/// No released model comes near these; a file beyond them is damaged or hostile.
const MAX_LAYERS: i128 = 4096;
const MAX_WIDTH: i128 = 1 << 20;
const MAX_CONTEXT: i128 = 1 << 30;
/// Each expert of a token is three nodes of every layer's graph.
const MAX_EXPERTS_USED: i128 = 256;

/// The model's numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `qwen35` or `qwen35moe`.
    pub arch: String,
    /// `general.name`, or empty.
    pub name: String,
    /// Tokens in the vocabulary, from the embedding's shape.
    pub n_vocab: i64,
    /// Context length of the training.
    pub n_ctx_train: usize,
    /// Width of the residual stream.
    pub n_embd: i64,
    /// Dimensions of an attention head.
    pub head_dim: i64,
    /// `eps` of every RMS norm.
    pub rms_eps: f32,
    /// Rotary embedding of the full-attention layers.
    pub rope: Rope,
    /// The linear-attention layers' numbers.
    pub ssm: Ssm,
    /// Expert numbers; none in dense models.
    pub moe: Option<Moe>,
    /// One entry a trunk layer.
    pub layers: Vec<LayerConfig>,
    /// The MTP layer, where the file announces one or holds its tensors.
    pub mtp: Option<LayerConfig>,
}

/// Numbers of one decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Gated delta net (true) or full attention (false).
    pub recurrent: bool,
    /// Query heads of full attention.
    pub n_head: i64,
    /// Key and value heads of full attention.
    pub n_head_kv: i64,
    /// Width of the dense feed-forward, or, in MoE models, of one expert.
    pub n_ff: i64,
}

/// Numbers of the gated delta net.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ssm {
    /// Inputs that the causal convolution sees, the current one included.
    pub conv_kernel: i64,
    /// Dimensions of a key and of a value head (`ssm.state_size`).
    pub head_dim: i64,
    /// Key heads (`ssm.group_count`).
    pub n_k_heads: i64,
    /// Value heads (`ssm.time_step_rank`).
    pub n_v_heads: i64,
}

impl Ssm {
    /// Width of all key heads together.
    pub fn key_dim(&self) -> i64 {
        self.head_dim * self.n_k_heads
    }

    /// Width of all value heads together.
    pub fn value_dim(&self) -> i64 {
        self.head_dim * self.n_v_heads
    }

    /// Channels of the convolution: queries, keys and values.
    pub fn conv_dim(&self) -> i64 {
        2 * self.key_dim() + self.value_dim()
    }
}

/// Numbers of the mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moe {
    /// Experts in all.
    pub n_expert: i64,
    /// Experts that each token visits.
    pub n_expert_used: i64,
    /// Width of the expert that every token visits.
    pub n_ff_shared: i64,
}

impl Config {
    /// Reads the numbers from the metadata of the first of a model's `parts`. `mtp` is a file that holds only the
    /// MTP layer, if it is apart.
    ///
    /// # Errors
    /// When the architecture is another one, or a key is missing, of the wrong type or out of range.
    pub fn read(parts: &[Gguf], mtp: Option<&Gguf>) -> Result<Self> {
        let trunk = parts.first().context("a model has at least one file")?;
        let tensor =
            |name: &str| -> Option<&TensorInfo> { parts.iter().find_map(|p| p.tensor(name)) };
        let arch = architecture(trunk)?;
        let keys = Keys {
            file: trunk,
            arch: &arch,
        };

        let n_block = keys.int("block_count", 1, MAX_LAYERS)? as usize;
        let n_embd = keys.int("embedding_length", 1, MAX_WIDTH)? as i64;
        let announced = keys
            .optional_int("nextn_predict_layers", 0, MAX_LAYERS)?
            .map(|n| n as usize);
        // Some converters dropped the key but kept the tensors, so the tensors decide where it is absent.
        let is_mtp = |il: usize| tensor(&format!("blk.{il}.nextn.eh_proj.weight")).is_some();
        let n_mtp = announced.unwrap_or_else(|| (0..n_block).filter(|&il| is_mtp(il)).count());
        ensure!(
            n_mtp < n_block,
            keys.refuse(
                "nextn_predict_layers",
                format!("is {n_mtp} of {n_block} layers")
            )
        );
        let n_layer = n_block - n_mtp;

        let head_dim = keys.int("attention.key_length", 1, 4096)? as i64;
        let value_length = keys.int("attention.value_length", 1, 4096)? as i64;
        ensure!(
            head_dim == value_length,
            keys.refuse(
                "attention.value_length",
                format!("is {value_length}, the key length is {head_dim}; both must be the same"),
            )
        );

        let moe = (arch == "qwen35moe").then(|| keys.moe()).transpose()?;
        let heads = keys.per_layer("attention.head_count", n_block, 1, 1 << 16)?;
        let heads_kv = keys.per_layer("attention.head_count_kv", n_block, 1, 1 << 16)?;
        let widths = keys.widths(n_block, moe.as_ref())?;
        let recurrent = keys.recurrent_layers(n_block, n_layer)?;
        let mut layers = Vec::with_capacity(n_block);
        for il in 0..n_block {
            ensure!(
                heads[il] % heads_kv[il] == 0,
                keys.refuse(
                    "attention.head_count",
                    format!(
                        "is {} in layer {il}, not a multiple of {} key heads",
                        heads[il], heads_kv[il]
                    ),
                )
            );
            layers.push(LayerConfig {
                recurrent: recurrent[il],
                n_head: heads[il],
                n_head_kv: heads_kv[il],
                n_ff: widths[il],
            });
        }
        let mut mtp_layer = layers.drain(n_layer..).next();
        if let Some(mtp) = mtp {
            let apart = Keys {
                file: mtp,
                arch: &arch,
            };
            ensure!(
                architecture(mtp)? == arch,
                "{}: is not for this model: its architecture is not `{arch}`",
                mtp.path().display()
            );
            let width = apart.int("embedding_length", 1, MAX_WIDTH)? as i64;
            ensure!(
                width == n_embd,
                apart.refuse(
                    "embedding_length",
                    format!("is {width}, the model's is {n_embd}")
                )
            );
            // The head is a full-attention layer with the numbers of the trunk's last one.
            mtp_layer = layers.last().cloned();
        }
        if let Some(layer) = &mut mtp_layer {
            layer.recurrent = false;
        }

        let n_rot = keys.int("rope.dimension_count", 2, head_dim.into())? as i32;
        ensure!(
            n_rot % 2 == 0,
            keys.refuse("rope.dimension_count", format!("is {n_rot}, an odd number"))
        );
        let n_ctx_train = keys.int("context_length", 1, MAX_CONTEXT)? as usize;

        let embedding = tensor("token_embd.weight").with_context(|| {
            format!(
                "{}: no tensor `token_embd.weight`; it holds no model",
                trunk.path().display()
            )
        })?;
        let n_vocab = embedding.shape[1];
        ensure!(
            (1..=i64::from(i32::MAX)).contains(&n_vocab),
            "{}: tensor `token_embd.weight` has {n_vocab} rows",
            trunk.path().display()
        );

        Ok(Self {
            name: match trunk.value("general.name") {
                Some(Value::Str(name)) => one_line(&name),
                _ => String::new(),
            },
            n_vocab,
            n_ctx_train,
            n_embd,
            head_dim,
            rms_eps: keys.float("attention.layer_norm_rms_epsilon", 0.0, 1.0)? as f32,
            rope: Rope {
                n_dims: n_rot,
                sections: keys.rope_sections(head_dim)?,
                freq_base: keys.float("rope.freq_base", 1.0, 1e12)? as f32,
                n_ctx_orig: n_ctx_train as i32,
            },
            ssm: keys.ssm()?,
            moe,
            layers,
            mtp: mtp_layer,
            arch,
        })
    }

    /// Trunk layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of recurrent state per sequence: convolution windows and delta-net states, in F32.
    pub fn state_bytes(&self) -> usize {
        let ssm = &self.ssm;
        let values = (ssm.conv_kernel - 1) * ssm.conv_dim() + ssm.head_dim * ssm.value_dim();
        let n_recurrent = self.layers.iter().filter(|l| l.recurrent).count();
        n_recurrent * values as usize * 4
    }
}

fn architecture(file: &Gguf) -> Result<String> {
    match file.value("general.architecture") {
        Some(Value::Str(arch)) if arch == "qwen35" || arch == "qwen35moe" => Ok(arch),
        Some(Value::Str(arch)) => bail!(
            "{}: its architecture is `{}`; qrun runs `qwen35` and `qwen35moe` (Qwen 3.5, 3.6 and 3.8)",
            file.path().display(),
            one_line(&arch)
        ),
        _ => bail!(
            "{}: no key `general.architecture`; it holds no model",
            file.path().display()
        ),
    }
}

/// Reads keys of one file, with messages that name it.
struct Keys<'a> {
    file: &'a Gguf,
    arch: &'a str,
}

impl Keys<'_> {
    fn value(&self, key: &str) -> Option<Value> {
        self.file.value(&format!("{}.{key}", self.arch))
    }

    fn refuse(&self, key: &str, reason: String) -> anyhow::Error {
        let path = self.file.path().display();
        anyhow::anyhow!("{path}: key `{}.{key}` {reason}", self.arch)
    }

    fn missing(&self, key: &str) -> anyhow::Error {
        self.refuse(key, "is missing; convert the model again".to_owned())
    }

    fn checked_int(&self, key: &str, value: i128, min: i128, max: i128) -> Result<i128> {
        ensure!(
            (min..=max).contains(&value),
            self.refuse(key, format!("is {value}, expected {min} to {max}"))
        );
        Ok(value)
    }

    fn optional_int(&self, key: &str, min: i128, max: i128) -> Result<Option<i128>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Int(v)) => self.checked_int(key, v, min, max).map(Some),
            Some(_) => Err(self.refuse(key, "is not an integer".to_owned())),
        }
    }

    fn int(&self, key: &str, min: i128, max: i128) -> Result<i128> {
        self.optional_int(key, min, max)?
            .ok_or_else(|| self.missing(key))
    }

    fn float(&self, key: &str, min: f64, max: f64) -> Result<f64> {
        match self.value(key) {
            None => Err(self.missing(key)),
            Some(Value::Float(v)) if v >= min && v <= max => Ok(v),
            Some(Value::Float(v)) => {
                Err(self.refuse(key, format!("is {v}, expected {min} to {max}")))
            }
            Some(_) => Err(self.refuse(key, "is not a float".to_owned())),
        }
    }

    /// A number for all layers, or one for each.
    fn optional_per_layer(
        &self,
        key: &str,
        n_block: usize,
        min: i128,
        max: i128,
    ) -> Result<Option<Vec<i64>>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Int(v)) => {
                let v = self.checked_int(key, v, min, max)? as i64;
                Ok(Some(vec![v; n_block]))
            }
            Some(Value::Ints(values)) => {
                ensure!(
                    values.len() >= n_block,
                    self.refuse(
                        key,
                        format!("has {} values for {n_block} layers", values.len())
                    )
                );
                let checked = values[..n_block].iter();
                checked
                    .map(|&v| Ok(self.checked_int(key, v.into(), min, max)? as i64))
                    .collect::<Result<_>>()
                    .map(Some)
            }
            Some(_) => Err(self.refuse(key, "is not an integer".to_owned())),
        }
    }

    fn per_layer(&self, key: &str, n_block: usize, min: i128, max: i128) -> Result<Vec<i64>> {
        self.optional_per_layer(key, n_block, min, max)?
            .ok_or_else(|| self.missing(key))
    }

    /// Feed-forward widths: the dense one, or an expert's, which defaults to the dense one's share.
    fn widths(&self, n_block: usize, moe: Option<&Moe>) -> Result<Vec<i64>> {
        let Some(moe) = moe else {
            return self.per_layer("feed_forward_length", n_block, 1, MAX_WIDTH);
        };
        if let Some(v) =
            self.optional_per_layer("expert_feed_forward_length", n_block, 1, MAX_WIDTH)?
        {
            return Ok(v);
        }
        let all = self.per_layer("feed_forward_length", n_block, 1, MAX_WIDTH)?;
        Ok(all
            .into_iter()
            .map(|n| (n / moe.n_expert_used).max(1))
            .collect())
    }

    fn recurrent_layers(&self, n_block: usize, n_layer: usize) -> Result<Vec<bool>> {
        let key = "attention.recurrent_layers";
        let listed = match self.value(key) {
            Some(Value::Bools(list)) => Some(list),
            Some(Value::Ints(list)) => Some(list.into_iter().map(|v| v != 0).collect()),
            Some(_) => return Err(self.refuse(key, "is not a list".to_owned())),
            None => None,
        };
        if let Some(list) = listed {
            ensure!(
                list.len() >= n_layer,
                self.refuse(
                    key,
                    format!("has {} values for {n_layer} layers", list.len())
                )
            );
            return Ok((0..n_block)
                .map(|il| il < n_layer && list.get(il).copied().unwrap_or(false))
                .collect());
        }
        let interval = self
            .optional_int("full_attention_interval", 1, MAX_LAYERS)?
            .unwrap_or(4) as usize;
        Ok((0..n_block)
            .map(|il| il < n_layer && (il + 1) % interval != 0)
            .collect())
    }

    fn rope_sections(&self, head_dim: i64) -> Result<[i32; 4]> {
        let key = "rope.dimension_sections";
        match self.value(key) {
            Some(Value::Ints(list)) if (3..=4).contains(&list.len()) => {
                let mut sections = [0; 4];
                for (section, value) in sections.iter_mut().zip(list) {
                    *section = self.checked_int(key, value.into(), 0, 4096)? as i32;
                }
                let all = i64::from(sections.iter().sum::<i32>());
                ensure!(
                    (1..=head_dim).contains(&all),
                    self.refuse(key, format!("adds up to {all}, expected 1 to {head_dim}"))
                );
                Ok(sections)
            }
            Some(_) => Err(self.refuse(key, "is not a list of four integers".to_owned())),
            None => Err(self.missing(key)),
        }
    }

    fn ssm(&self) -> Result<Ssm> {
        let ssm = Ssm {
            conv_kernel: self.int("ssm.conv_kernel", 2, 64)? as i64,
            head_dim: self.int("ssm.state_size", 1, 1024)? as i64,
            n_k_heads: self.int("ssm.group_count", 1, 1 << 12)? as i64,
            n_v_heads: self.int("ssm.time_step_rank", 1, 1 << 12)? as i64,
        };
        let inner = self.int("ssm.inner_size", 1, MAX_WIDTH)? as i64;
        ensure!(
            inner == ssm.value_dim(),
            self.refuse(
                "ssm.inner_size",
                format!(
                    "is {inner}, expected {} heads of {}",
                    ssm.n_v_heads, ssm.head_dim
                )
            )
        );
        ensure!(
            ssm.n_v_heads % ssm.n_k_heads == 0,
            self.refuse(
                "ssm.time_step_rank",
                format!(
                    "is {}, not a multiple of {} key heads",
                    ssm.n_v_heads, ssm.n_k_heads
                )
            )
        );
        Ok(ssm)
    }

    fn moe(&self) -> Result<Moe> {
        let n_expert = self.int("expert_count", 1, 1 << 16)?;
        let n_expert_used = self.int("expert_used_count", 1, n_expert.min(MAX_EXPERTS_USED))?;
        let n_ff_shared =
            match self.optional_int("expert_shared_feed_forward_length", 1, MAX_WIDTH)? {
                Some(n) => n,
                None => self.int("feed_forward_length", 1, MAX_WIDTH)?,
            };
        Ok(Moe {
            n_expert: n_expert as i64,
            n_expert_used: n_expert_used as i64,
            n_ff_shared: n_ff_shared as i64,
        })
    }
}
