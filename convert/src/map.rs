//! Which tensors of a checkpoint make up which tensors of the GGUF file, and what happens to their values.
//!
//! The settings say what a model must have, so the map is made from them first; then the checkpoint's tensors
//! are looked up in it. Whatever is missing, left over or of another shape is an error before anything is
//! written.
//!
//! The rules, as llama.cpp's readers expect them: norm weights hold the whole factor (checkpoints store it minus
//! one); `ssm_a` is `-exp(A_log)`; the convolution has no middle dimension; value heads come in tiled order, so
//! that value head `h` uses key head `h mod n_k_heads` (checkpoints group them by key head); experts are stacked;
//! the MTP layer follows the trunk's last.

use std::collections::HashMap;

use anyhow::{Result, bail, ensure};
use ggml_metal::one_line;

use crate::checkpoint::{Checkpoint, Dtype, StTensor};
use crate::hf_config::{HfConfig, Linear, Quantization};
use crate::rows::{Encoding, Source, floats, fp8_codes};

/// What happens to a tensor's values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// Nothing.
    Copy,
    /// One is added.
    AddOne,
    /// The negative exponential.
    NegExp,
}

/// Rows of an input, in the order of the output.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Which of the output's inputs.
    pub input: usize,
    /// Its first row.
    pub first: usize,
    /// How many.
    pub n: usize,
}

/// A tensor of the checkpoint with what its values need to be read.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// Index into the checkpoint's tensors.
    pub tensor: usize,
    scales: Option<usize>,
    biases: Option<usize>,
    /// Rows and columns.
    n_rows: usize,
    n_cols: usize,
    /// Rows of one of its stacked matrices.
    stacked_rows: usize,
    /// Rows and columns that share a factor, in eight-bit floats.
    block: [usize; 2],
}

/// A tensor of the GGUF file.
#[derive(Clone, Debug)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Elements per dimension in ggml's order, the fastest first.
    pub dims: Vec<usize>,
    /// What happens to the values.
    pub rule: Rule,
    /// Where they come from.
    pub inputs: Vec<Input>,
    /// Their rows, in order.
    pub segments: Vec<Segment>,
    /// Head width and new order of the heads within a row, where columns move.
    pub columns: Option<(usize, Vec<usize>)>,
    /// Of the MTP block.
    pub mtp: bool,
    /// A norm that may be stored around zero.
    norm: bool,
    /// The expert that each segment is, where every expert is a tensor of the checkpoint.
    experts: Vec<usize>,
    /// The checkpoint's name for it, for messages; empty where it may be missing.
    label: String,
}

impl Output {
    /// Values in a row of the inputs; a vector of heads is a column there.
    pub fn n_cols(&self) -> usize {
        let own = self.dims.first().copied().unwrap_or(1);
        self.inputs.first().map_or(own, |input| input.n_cols)
    }

    /// Rows of that length.
    pub fn n_rows(&self) -> usize {
        self.n_elements() / self.n_cols().max(1)
    }

    /// Values in all.
    pub fn n_elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Puts the segments into the order of the experts: the checkpoint has them in that of their names, 0, 1, 10.
    fn sort_experts(&mut self) {
        let mut pairs: Vec<(usize, Segment)> = self
            .experts
            .drain(..)
            .zip(self.segments.iter().copied())
            .collect();
        if !pairs.is_empty() {
            pairs.sort_by_key(|(expert, _)| *expert);
            self.segments = pairs.into_iter().map(|(_, segment)| segment).collect();
        }
    }
}

/// What to do with the draft head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mtp {
    /// Keep it.
    Keep,
    /// Leave it out.
    Drop,
    /// Write only it, with the embedding, the last norm and the output matrix.
    Only,
}

/// The map from a checkpoint to a GGUF file.
pub struct TensorMap {
    /// The tensors, in the order in which the checkpoint has them.
    pub outputs: Vec<Output>,
    /// MTP layers among them.
    pub n_mtp: usize,
    /// What was decided and found, for a person to read.
    pub notes: Vec<String>,
}

impl TensorMap {
    /// Makes the map.
    ///
    /// # Errors
    /// When a tensor is missing, unknown, of another shape than the settings say, or of a type that is no weight;
    /// when the draft head is empty.
    pub fn make(config: &HfConfig, checkpoint: &Checkpoint, mtp: Mtp) -> Result<Self> {
        let found = Found::new(checkpoint);
        let mut notes = Vec::new();
        let n_mtp = found.n_mtp();
        let spec = Spec::new(config, if mtp == Mtp::Drop { 0 } else { n_mtp });
        let mut outputs = spec.outputs;
        let mut order: Vec<Option<usize>> = vec![None; outputs.len()];
        let mut mlx_conv = false;
        let (mut n_vision, mut vision_bytes, mut n_dropped) = (0, 0, 0);
        let lm_head = found.lm_head(config)?;
        if let LmHead::Redundant = lm_head {
            notes.push(
                "output matrix: equal to the embedding, which the settings say it is; left out"
                    .to_owned(),
            );
        }
        for (at, (name, parts)) in found.tensors.iter().enumerate() {
            let tensor = &checkpoint.tensors[parts.tensor];
            if name == "lm_head.weight" && matches!(lm_head, LmHead::Redundant) {
                continue;
            }
            if is_vision(name) {
                n_vision += 1;
                vision_bytes += tensor.range.len();
                continue;
            }
            if name.starts_with("mtp.") && mtp == Mtp::Drop {
                n_dropped += 1;
                continue;
            }
            if is_derived(name) {
                continue;
            }
            let Some(uses) = spec.names.get(name.as_str()) else {
                bail!(
                    "{}: tensor `{}` has no place in a model with these settings",
                    checkpoint.path_of(tensor).display(),
                    one_line(&tensor.name)
                );
            };
            for u in uses {
                let input = u.input(config, checkpoint, *parts)?;
                mlx_conv |= u.pick == Pick::Convolution && tensor.shape.last() == Some(&1);
                let output = &mut outputs[u.output];
                u.add(config, input, output)?;
                order[u.output].get_or_insert(at);
            }
        }
        // A tied head comes from the embedding, so `output.weight` may be missing.
        for (output, at) in outputs.iter().zip(&order) {
            let optional = output.name == "output.weight"
                || output.label.is_empty()
                || (mtp == Mtp::Only && !output.mtp);
            ensure!(
                at.is_some() || optional,
                "{}: tensor `{}` is missing{}",
                checkpoint.dir.display(),
                output.label,
                if output.mtp {
                    "; the draft head is incomplete: convert with --no-mtp, or fetch the checkpoint again"
                } else {
                    "; the checkpoint is incomplete, or config.json belongs to another one"
                }
            );
        }
        for (output, at) in outputs.iter().zip(&order) {
            let rows: usize = output.segments.iter().map(|s| s.n).sum();
            ensure!(
                at.is_none() || rows == output.n_rows(),
                "{}: `{}` of the checkpoint is incomplete: {rows} rows of {}",
                checkpoint.dir.display(),
                output.label,
                output.n_rows()
            );
        }
        let mut numbered: Vec<(usize, Output)> = order
            .iter()
            .zip(outputs)
            .filter_map(|(at, output)| Some(((*at)?, output)))
            .collect();
        for (_, output) in &mut numbered {
            output.sort_experts();
        }
        numbered.sort_by_key(|(at, _)| *at);
        let mut outputs: Vec<Output> = numbered.into_iter().map(|(_, o)| o).collect();

        decide_norms(checkpoint, &mut outputs, mlx_conv, &mut notes)?;
        notes.push(heads_note(&config.linear));
        if mtp == Mtp::Only {
            ensure!(
                n_mtp > 0,
                "{}: has no draft head (no `mtp.*` tensors), so there is nothing to write with --mtp-only",
                checkpoint.dir.display()
            );
            outputs.retain(|o| {
                o.mtp
                    || matches!(
                        o.name.as_str(),
                        "token_embd.weight" | "output_norm.weight" | "output.weight"
                    )
            });
        }
        let n_kept = outputs.iter().filter(|o| o.mtp).count();
        if n_kept > 0 {
            refuse_empty_head(checkpoint, &outputs)?;
        }
        notes.push(mtp_note(config, n_kept, n_dropped, mlx_conv));
        if n_vision > 0 {
            notes.push(format!(
                "vision: skipped {n_vision} tensors ({:.1} MiB); the text model does not need them",
                vision_bytes as f64 / 1048576.0
            ));
        }
        Ok(Self {
            outputs,
            n_mtp: if mtp == Mtp::Drop { 0 } else { n_mtp },
            notes,
        })
    }

    /// An input with its factors read, ready to be decoded.
    ///
    /// # Errors
    /// When a factor is not a finite number.
    pub fn source<'a>(input: &Input, checkpoint: &'a Checkpoint) -> Result<Source<'a>> {
        let tensor = &checkpoint.tensors[input.tensor];
        let read = |at: usize| -> Result<Vec<f32>> {
            let tensor = &checkpoint.tensors[at];
            floats(tensor.dtype, checkpoint.data(tensor)).map_err(|e| {
                anyhow::anyhow!(
                    "{}: tensor `{}` {e}",
                    checkpoint.path_of(tensor).display(),
                    one_line(&tensor.name)
                )
            })
        };
        let encoding = match (tensor.dtype, input.scales, input.biases) {
            (Dtype::U32, Some(scales), Some(biases)) => {
                let per_row = checkpoint.tensors[scales].n_elements() / input.n_rows;
                Encoding::Groups {
                    bits: tensor.range.len() * 8 / (input.n_rows * input.n_cols),
                    group: input.n_cols / per_row,
                    scales: read(scales)?,
                    biases: read(biases)?,
                }
            }
            (Dtype::F8E4M3 | Dtype::F8E5M2, Some(scales), _) => {
                let blocks = Blocks::of(&checkpoint.tensors[scales], input)?;
                Encoding::Fp8 {
                    codes: fp8_codes(tensor.dtype),
                    scales: read(scales)?,
                    block: blocks.size,
                    n_across: blocks.n_across,
                    stacked: [input.stacked_rows, blocks.n_down],
                }
            }
            (dtype, ..) => Encoding::Plain(dtype),
        };
        Ok(Source {
            n_cols: input.n_cols,
            data: checkpoint.data(tensor),
            encoding,
        })
    }
}

/// A tensor of the checkpoint, and its factors and offsets where it is quantized.
#[derive(Clone, Copy)]
struct Parts {
    tensor: usize,
    scales: Option<usize>,
    biases: Option<usize>,
}

/// The checkpoint's tensors under names without the prefixes that differ between tools.
struct Found<'a> {
    checkpoint: &'a Checkpoint,
    /// In the checkpoint's order.
    tensors: Vec<(String, Parts)>,
}

impl<'a> Found<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        let names: Vec<String> = checkpoint
            .tensors
            .iter()
            .map(|t| plain_name(&t.name))
            .collect();
        let mut factors: HashMap<String, (Option<usize>, Option<usize>)> = HashMap::new();
        let mut tensors = Vec::new();
        for (i, name) in names.into_iter().enumerate() {
            if let Some(base) = scale_of(&name) {
                factors.entry(base).or_default().0 = Some(i);
            } else if let Some(base) = name.strip_suffix(".biases") {
                factors.entry(format!("{base}.weight")).or_default().1 = Some(i);
            } else {
                tensors.push((
                    name,
                    Parts {
                        tensor: i,
                        scales: None,
                        biases: None,
                    },
                ));
            }
        }
        for (name, parts) in &mut tensors {
            if let Some((scales, biases)) = factors.get(name) {
                (parts.scales, parts.biases) = (*scales, *biases);
            }
        }
        Self {
            checkpoint,
            tensors,
        }
    }

    /// MTP layers that the tensors themselves show.
    fn n_mtp(&self) -> usize {
        let layers = self.tensors.iter().filter_map(|(name, _)| {
            let rest = name.strip_prefix("mtp.")?;
            let layer = rest
                .strip_prefix("layers.")
                .and_then(|r| r.split('.').next());
            Some(layer.and_then(|l| l.parse().ok()).unwrap_or(0).min(15) + 1)
        });
        layers.max().unwrap_or(0)
    }

    fn get(&self, name: &str) -> Option<&StTensor> {
        let (_, parts) = self.tensors.iter().find(|(n, _)| n == name)?;
        self.checkpoint.tensors.get(parts.tensor)
    }

    /// What becomes of the output matrix.
    fn lm_head(&self, config: &HfConfig) -> Result<LmHead> {
        let data = |name: &str| self.get(name).map(|t| self.checkpoint.data(t));
        let Some(head) = data("lm_head.weight") else {
            ensure!(
                config.tied != Some(false),
                "{}: tensor `lm_head.weight` is missing, and config.json says that the embedding does not serve \
                 as the output matrix (tie_word_embeddings)",
                self.checkpoint.dir.display()
            );
            return Ok(LmHead::None);
        };
        if config.tied == Some(true) && data("embed_tokens.weight") == Some(head) {
            return Ok(LmHead::Redundant);
        }
        Ok(LmHead::Own)
    }
}

enum LmHead {
    None,
    Own,
    /// Said to be tied, and the same as the embedding.
    Redundant,
}

/// Without `model.`, `language_model.`, and both in either order.
fn plain_name(name: &str) -> String {
    let name = name.replace("language_model.", "");
    let mut rest = name.as_str();
    while let Some(shorter) = rest.strip_prefix("model.") {
        rest = shorter;
    }
    rest.to_owned()
}

/// The tensor whose factors this is.
fn scale_of(name: &str) -> Option<String> {
    if let Some(base) = name.strip_suffix(".scales") {
        return Some(format!("{base}.weight"));
    }
    ["_scale_inv", "weight_scale"].iter().find_map(|suffix| {
        let base = name.strip_suffix(suffix)?;
        Some(match *suffix {
            "weight_scale" => format!("{base}weight"),
            _ => base.to_owned(),
        })
    })
}

fn is_vision(name: &str) -> bool {
    [
        "visual.",
        "vision_",
        "vision.",
        "multi_modal_projector.",
        "patch_embed",
        "merger.",
    ]
    .iter()
    .any(|p| name.starts_with(p))
}

/// Tensors that say nothing that the settings do not: positions, and factors of activations.
fn is_derived(name: &str) -> bool {
    [
        ".inv_freq",
        ".input_scale",
        ".activation_scale",
        ".k_scale",
        ".v_scale",
    ]
    .iter()
    .any(|s| name.ends_with(s))
}

/// Which rows of a tensor go where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pick {
    /// All, in order.
    All,
    /// The rows before `from` in order, then those of the value heads, tiled.
    ValueHeads { from: usize, rows_per_head: usize },
    /// As before, of the convolution, whose kernel is the last dimension or the one before it.
    Convolution,
    /// All rows; their columns are value heads.
    ValueColumns,
    /// Of each of the stacked matrices, `n` rows from `first`.
    Stacked { of: usize, first: usize, n: usize },
    /// All: one expert of a stack.
    Expert(usize),
}

/// A use of a checkpoint's tensor.
struct Use {
    output: usize,
    pick: Pick,
    /// The shape that it must have.
    shape: Vec<usize>,
}

/// What a model with these settings is made of.
struct Spec {
    outputs: Vec<Output>,
    names: HashMap<String, Vec<Use>>,
}

impl Spec {
    fn new(config: &HfConfig, n_mtp: usize) -> Self {
        let mut spec = Self {
            outputs: Vec::new(),
            names: HashMap::new(),
        };
        let (n_embd, n_vocab) = (config.n_embd, config.n_vocab);
        let mut root = Block {
            spec: &mut spec,
            from: String::new(),
            to: String::new(),
            mtp: false,
        };
        root.matrix("embed_tokens.weight", "token_embd.weight", n_vocab, n_embd);
        root.norm("norm.weight", "output_norm.weight", n_embd);
        root.matrix("lm_head.weight", "output.weight", n_vocab, n_embd);
        for il in 0..config.n_layer {
            let mut block = Block {
                spec: &mut spec,
                from: format!("layers.{il}."),
                to: format!("blk.{il}."),
                mtp: false,
            };
            block.layer(config, config.recurrent.get(il).copied().unwrap_or(false));
        }
        for i in 0..n_mtp {
            let mut block = Block {
                spec: &mut spec,
                from: format!("mtp.layers.{i}."),
                to: format!("blk.{}.", config.n_layer + i),
                mtp: true,
            };
            block.layer(config, false);
        }
        if n_mtp > 0 {
            let mut block = Block {
                spec: &mut spec,
                from: "mtp.".to_owned(),
                to: format!("blk.{}.nextn.", config.n_layer),
                mtp: true,
            };
            block.matrix("fc.weight", "eh_proj.weight", n_embd, 2 * n_embd);
            block.norm("pre_fc_norm_embedding.weight", "enorm.weight", n_embd);
            block.norm("pre_fc_norm_hidden.weight", "hnorm.weight", n_embd);
            block.norm("norm.weight", "shared_head_norm.weight", n_embd);
            for (from, to) in [
                ("embed_tokens.weight", "embed_tokens.weight"),
                ("lm_head.weight", "shared_head_head.weight"),
                ("shared_head.head.weight", "shared_head_head.weight"),
            ] {
                block.matrix(from, to, n_vocab, n_embd);
                block.optional();
            }
        }
        spec
    }
}

/// Adds the tensors of one block under names that begin alike.
struct Block<'a> {
    spec: &'a mut Spec,
    from: String,
    to: String,
    mtp: bool,
}

impl Block<'_> {
    fn add(&mut self, from: &str, to: &str, shape: &[usize], dims: &[usize], pick: Pick) {
        let name = format!("{}{to}", self.to);
        let known = self.spec.outputs.iter().rposition(|o| o.name == name);
        let output = known.unwrap_or_else(|| {
            self.spec.outputs.push(Output {
                name,
                dims: dims.to_vec(),
                rule: Rule::Copy,
                inputs: Vec::new(),
                segments: Vec::new(),
                columns: None,
                mtp: self.mtp,
                norm: false,
                experts: Vec::new(),
                label: format!("{}{from}", self.from),
            });
            self.spec.outputs.len() - 1
        });
        let from = format!("{}{from}", self.from);
        self.spec.names.entry(from).or_default().push(Use {
            output,
            pick,
            shape: shape.to_vec(),
        });
    }

    /// The output added last need not be there.
    fn optional(&mut self) {
        if let Some(output) = self.spec.outputs.last_mut() {
            output.label.clear();
        }
    }

    fn matrix(&mut self, from: &str, to: &str, n_out: usize, n_in: usize) {
        self.add(from, to, &[n_out, n_in], &[n_in, n_out], Pick::All);
    }

    fn vector(&mut self, from: &str, to: &str, n: usize, rule: Rule, pick: Pick) {
        self.add(from, to, &[n], &[n], pick);
        if let Some(output) = self.spec.outputs.last_mut() {
            output.rule = rule;
        }
    }

    fn norm(&mut self, from: &str, to: &str, n: usize) {
        self.vector(from, to, n, Rule::Copy, Pick::All);
        if let Some(output) = self.spec.outputs.last_mut() {
            output.norm = true;
        }
    }

    fn layer(&mut self, config: &HfConfig, recurrent: bool) {
        let n_embd = config.n_embd;
        self.norm("input_layernorm.weight", "attn_norm.weight", n_embd);
        if recurrent {
            self.delta_net(&config.linear, n_embd);
        } else {
            let (d, n_q, n_kv) = (config.head_dim, config.n_head, config.n_head_kv);
            self.matrix(
                "self_attn.q_proj.weight",
                "attn_q.weight",
                2 * d * n_q,
                n_embd,
            );
            self.matrix("self_attn.k_proj.weight", "attn_k.weight", d * n_kv, n_embd);
            self.matrix("self_attn.v_proj.weight", "attn_v.weight", d * n_kv, n_embd);
            self.matrix(
                "self_attn.o_proj.weight",
                "attn_output.weight",
                n_embd,
                d * n_q,
            );
            self.norm("self_attn.q_norm.weight", "attn_q_norm.weight", d);
            self.norm("self_attn.k_norm.weight", "attn_k_norm.weight", d);
        }
        self.norm(
            "post_attention_layernorm.weight",
            "post_attention_norm.weight",
            n_embd,
        );
        self.feed_forward(config);
    }

    fn delta_net(&mut self, linear: &Linear, n_embd: usize) {
        let (d, n_v) = (linear.head_dim, linear.n_v_heads);
        let (qk_dim, v_dim) = (linear.qk_dim(), linear.v_dim());
        let heads = |from, rows_per_head| Pick::ValueHeads {
            from,
            rows_per_head,
        };
        let mut rows = |from: &str, to: &str, n_out: usize, pick| {
            self.add(
                &format!("linear_attn.{from}"),
                to,
                &[n_out, n_embd],
                &[n_embd, n_out],
                pick,
            );
        };
        rows(
            "in_proj_qkv.weight",
            "attn_qkv.weight",
            qk_dim + v_dim,
            heads(qk_dim, d),
        );
        rows("in_proj_z.weight", "attn_gate.weight", v_dim, heads(0, d));
        rows("in_proj_a.weight", "ssm_alpha.weight", n_v, heads(0, 1));
        rows("in_proj_b.weight", "ssm_beta.weight", n_v, heads(0, 1));
        let (n_conv, kernel) = (qk_dim + v_dim, linear.conv_kernel);
        self.add(
            "linear_attn.conv1d.weight",
            "ssm_conv1d.weight",
            &[n_conv, 1, kernel],
            &[kernel, n_conv],
            Pick::Convolution,
        );
        self.vector("linear_attn.A_log", "ssm_a", n_v, Rule::NegExp, heads(0, 1));
        self.vector(
            "linear_attn.dt_bias",
            "ssm_dt.bias",
            n_v,
            Rule::Copy,
            heads(0, 1),
        );
        self.vector(
            "linear_attn.norm.weight",
            "ssm_norm.weight",
            d,
            Rule::Copy,
            Pick::All,
        );
        self.add(
            "linear_attn.out_proj.weight",
            "ssm_out.weight",
            &[n_embd, v_dim],
            &[v_dim, n_embd],
            Pick::ValueColumns,
        );
    }

    fn feed_forward(&mut self, config: &HfConfig) {
        let n_embd = config.n_embd;
        let Some(moe) = &config.moe else {
            let n_ff = config.n_ff.unwrap_or(0);
            self.matrix("mlp.gate_proj.weight", "ffn_gate.weight", n_ff, n_embd);
            self.matrix("mlp.up_proj.weight", "ffn_up.weight", n_ff, n_embd);
            self.matrix("mlp.down_proj.weight", "ffn_down.weight", n_embd, n_ff);
            return;
        };
        let (n_expert, n_ff, n_shared) = (moe.n_expert, moe.n_ff, moe.n_ff_shared);
        self.matrix("mlp.gate.weight", "ffn_gate_inp.weight", n_expert, n_embd);
        for (kind, n_out, n_in) in [
            ("gate", n_ff, n_embd),
            ("up", n_ff, n_embd),
            ("down", n_embd, n_ff),
        ] {
            let to = format!("ffn_{kind}_exps.weight");
            let dims = [n_in, n_out, n_expert];
            // The first of these names is the one that a message about a missing tensor gives.
            let (from, of, first) = match kind {
                "gate" => ("mlp.experts.gate_up_proj", 2 * n_ff, 0),
                "up" => ("mlp.experts.gate_up_proj", 2 * n_ff, n_ff),
                _ => ("mlp.experts.down_proj", n_embd, 0),
            };
            let stacked = Pick::Stacked {
                of,
                first,
                n: n_out,
            };
            for from in [from.to_owned(), format!("{from}.weight")] {
                self.add(&from, &to, &[n_expert, of, n_in], &dims, stacked);
            }
            self.add(
                &format!("mlp.switch_mlp.{kind}_proj.weight"),
                &to,
                &[n_expert, n_out, n_in],
                &dims,
                Pick::All,
            );
            for i in 0..n_expert {
                let from = format!("mlp.experts.{i}.{kind}_proj.weight");
                self.add(&from, &to, &[n_out, n_in], &dims, Pick::Expert(i));
            }
            self.matrix(
                &format!("mlp.shared_expert.{kind}_proj.weight"),
                &format!("ffn_{kind}_shexp.weight"),
                if kind == "down" { n_embd } else { n_shared },
                if kind == "down" { n_shared } else { n_embd },
            );
        }
        self.matrix(
            "mlp.shared_expert_gate.weight",
            "ffn_gate_inp_shexp.weight",
            1,
            n_embd,
        );
    }
}

impl Use {
    /// Checks a tensor against what it is used for.
    fn input(&self, config: &HfConfig, checkpoint: &Checkpoint, parts: Parts) -> Result<Input> {
        let tensor = &checkpoint.tensors[parts.tensor];
        let refuse = |reason: String| {
            anyhow::anyhow!(
                "{}: tensor `{}` {reason}",
                checkpoint.path_of(tensor).display(),
                one_line(&tensor.name)
            )
        };
        let mut shape = tensor.shape.clone();
        if self.pick == Pick::Convolution && shape.len() == 3 && shape[2] == 1 {
            shape.swap(1, 2);
        }
        let n_cols = match self.pick {
            // A vector whose values are heads is a column.
            Pick::ValueHeads { .. } if self.shape.len() == 1 => 1,
            _ => self.shape.last().copied().unwrap_or(1),
        };
        let n_elements: usize = self.shape.iter().product();
        let n_rows = n_elements / n_cols;
        if tensor.dtype == Dtype::U32 {
            // The last dimension is packed: how densely, the row's length says.
            if let (Some(packed), Some(&n)) = (shape.last_mut(), self.shape.last()) {
                let bits = *packed * 32 / n;
                ensure!(
                    (2..=8).contains(&bits) && *packed * 32 == n * bits,
                    refuse(format!(
                        "has rows of {packed} words, which are not {n} values of 2 to 8 bits (config.json)"
                    ))
                );
                *packed = n;
            }
        }
        ensure!(
            shape == self.shape,
            refuse(format!(
                "has the shape {:?}, {} says {:?}",
                tensor.shape,
                config.path().display(),
                self.shape
            ))
        );
        let input = Input {
            tensor: parts.tensor,
            scales: parts.scales,
            biases: parts.biases,
            n_rows,
            n_cols,
            stacked_rows: match self.shape.as_slice() {
                [_, rows, _] if self.pick != Pick::Convolution => *rows,
                _ => n_rows,
            },
            block: match config.quantization {
                Quantization::Fp8 { block } => block,
                _ => [128; 2],
            },
        };
        let scales = parts.scales.map(|i| &checkpoint.tensors[i]);
        match tensor.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {}
            Dtype::U32 => {
                let biases = parts.biases.map(|i| &checkpoint.tensors[i]);
                let (Some(scales), Some(biases)) = (scales, biases) else {
                    bail!(refuse(
                        "is packed, but its scales or biases are missing".to_owned()
                    ));
                };
                let per_row = scales.n_elements() / n_rows;
                ensure!(
                    per_row > 0
                        && n_cols % per_row == 0
                        && scales.n_elements() == n_rows * per_row
                        && biases.n_elements() == scales.n_elements(),
                    refuse(format!(
                        "of {n_rows} rows of {n_cols} has scales of {:?} and biases of {:?}",
                        scales.shape, biases.shape
                    ))
                );
            }
            Dtype::F8E4M3 | Dtype::F8E5M2 => {
                let Some(scales) = scales else {
                    bail!(refuse(format!(
                        "is {}, but its weight_scale_inv is missing",
                        tensor.dtype
                    )));
                };
                Blocks::of(scales, &input).map_err(|e| refuse(e.to_string()))?;
            }
            other => bail!(refuse(format!(
                "has the type {other}, which no weight of this model is stored as"
            ))),
        }
        Ok(input)
    }

    /// Gives the output this input's rows.
    fn add(&self, config: &HfConfig, input: Input, output: &mut Output) -> Result<()> {
        let at = output.inputs.len();
        ensure!(
            at == 0 || matches!(self.pick, Pick::Expert(_)),
            "tensor `{}` comes in two forms; keep one of them",
            output.label
        );
        output.inputs.push(input);
        let mut push = |first: usize, n: usize| {
            output.segments.push(Segment {
                input: at,
                first,
                n,
            });
        };
        let linear = &config.linear;
        match self.pick {
            Pick::All => push(0, input.n_rows),
            Pick::ValueHeads {
                from,
                rows_per_head,
            } => {
                value_rows(linear, from, rows_per_head, &mut push);
            }
            Pick::Convolution => value_rows(linear, linear.qk_dim(), linear.head_dim, &mut push),
            Pick::ValueColumns => {
                push(0, input.n_rows);
                let order = tiled(linear);
                if order.windows(2).any(|w| w[1] != w[0] + 1) {
                    output.columns = Some((linear.head_dim, order));
                }
            }
            Pick::Stacked { of, first, n } => {
                for matrix in 0..input.n_rows / of {
                    push(matrix * of + first, n);
                }
            }
            Pick::Expert(i) => {
                push(0, input.n_rows);
                output.experts.push(i);
            }
        }
        Ok(())
    }
}

fn value_rows(
    linear: &Linear,
    from: usize,
    rows_per_head: usize,
    push: &mut impl FnMut(usize, usize),
) {
    if from > 0 {
        push(0, from);
    }
    for head in tiled(linear) {
        push(from + head * rows_per_head, rows_per_head);
    }
}

/// Which of the checkpoint's value heads comes first, second, and so on. There they are grouped by key head; in
/// the file the first of each group comes first, then the second of each.
fn tiled(linear: &Linear) -> Vec<usize> {
    let per_group = linear.n_v_heads / linear.n_k_heads;
    (0..per_group)
        .flat_map(|i| (0..linear.n_k_heads).map(move |group| group * per_group + i))
        .collect()
}

fn heads_note(linear: &Linear) -> String {
    let (n_k, n_v) = (linear.n_k_heads, linear.n_v_heads);
    if n_k == n_v || n_k == 1 {
        format!("value heads: {n_v} over {n_k} key heads; their order stays")
    } else {
        format!("value heads: {n_v} over {n_k} key heads; reordered from grouped to tiled")
    }
}

/// Blocks of factors of an eight-bit matrix.
struct Blocks {
    size: [usize; 2],
    n_across: usize,
    n_down: usize,
}

impl Blocks {
    /// From the shapes: one factor for each block, for each row, or for all.
    fn of(scales: &StTensor, input: &Input) -> Result<Self> {
        let n_matrices = input.n_rows / input.stacked_rows;
        let (rows, cols) = (input.stacked_rows, input.n_cols);
        let [.., down, across] = scales.shape.as_slice() else {
            // A list: one a row, or one for all.
            let n = scales.n_elements();
            let size = match n {
                1 => [input.n_rows, cols],
                _ => [1, cols],
            };
            ensure!(n == 1 || n == input.n_rows, Self::unfit(scales, input));
            return Ok(Self {
                size,
                n_across: 1,
                // With none below one another, all of the stack use the first.
                n_down: if n == 1 { 0 } else { rows },
            });
        };
        let fits = |block: [usize; 2]| {
            let (n_down, n_across) = (rows.div_ceil(block[0]), cols.div_ceil(block[1]));
            let all = n_matrices * n_down * n_across;
            ((*down, *across) == (n_down, n_across) && scales.n_elements() == all).then_some(Self {
                size: block,
                n_across,
                n_down,
            })
        };
        [input.block, [rows, cols], [1, cols]]
            .into_iter()
            .find_map(fits)
            .ok_or_else(|| Self::unfit(scales, input))
    }

    fn unfit(scales: &StTensor, input: &Input) -> anyhow::Error {
        anyhow::anyhow!(
            "of {} rows of {} has factors of shape {:?}; expected one for each block of {} by {}",
            input.n_rows,
            input.n_cols,
            scales.shape,
            input.block[0],
            input.block[1]
        )
    }
}

/// Medians below the first are those of norms around zero, above the second those of whole factors.
const LOW: f32 = 0.35;
const HIGH: f32 = 0.75;

/// What the norms of a group of layers look like.
struct NormStatistics {
    n: usize,
    /// The middle one of the norms' means.
    median: f32,
}

impl NormStatistics {
    fn of<'a>(checkpoint: &Checkpoint, norms: impl Iterator<Item = &'a Output>) -> Result<Self> {
        let mut means = Vec::new();
        for norm in norms {
            for input in &norm.inputs {
                let tensor = &checkpoint.tensors[input.tensor];
                let values = floats(tensor.dtype, checkpoint.data(tensor)).map_err(|e| {
                    anyhow::anyhow!(
                        "{}: tensor `{}` {e}",
                        checkpoint.path_of(tensor).display(),
                        one_line(&tensor.name)
                    )
                })?;
                means.push(values.iter().sum::<f32>() / values.len().max(1) as f32);
            }
        }
        means.sort_by(f32::total_cmp);
        Ok(Self {
            n: means.len(),
            median: means.get(means.len() / 2).copied().unwrap_or(0.0),
        })
    }

    /// True where the stored weight is the factor minus one. Single norms of trained models lie anywhere between
    /// 0 and 1 in both conventions, so the middle of many is looked at; and because MLX transposes the convolution
    /// and adds the one in the same step, it takes a clear value to believe the opposite of what the layout says.
    fn zero_centred(&self, mlx: bool) -> bool {
        self.median < if mlx { LOW } else { HIGH }
    }

    /// True where the values alone do not tell.
    fn unclear(&self) -> bool {
        (LOW..HIGH).contains(&self.median)
    }
}

/// Decides, for the trunk and for the head, whether norms need their one.
fn decide_norms(
    checkpoint: &Checkpoint,
    outputs: &mut [Output],
    mlx_conv: bool,
    notes: &mut Vec<String>,
) -> Result<()> {
    let mlx = mlx_conv || checkpoint.format_mlx;
    let layout = if mlx { "MLX" } else { "Hugging Face" };
    for mtp in [false, true] {
        let of = |o: &&Output| o.norm && o.mtp == mtp;
        let statistics = NormStatistics::of(checkpoint, outputs.iter().filter(of))?;
        if statistics.n == 0 {
            continue;
        }
        let add = statistics.zero_centred(mlx);
        for output in outputs.iter_mut().filter(|o| o.norm && o.mtp == mtp) {
            output.rule = if add { Rule::AddOne } else { Rule::Copy };
        }
        notes.push(format!(
            "norms{}: {}: the median of {} means is {:.3}, the layout is {layout}'s",
            if mtp { " of the draft head" } else { "" },
            if add {
                "stored around 0, 1 is added"
            } else {
                "stored as whole factors, nothing is added"
            },
            statistics.n,
            statistics.median
        ));
        if statistics.unclear() {
            notes.push("norms: their values alone would not tell, the layout decided; --verify shows whether it was right".to_owned());
        } else if add == mlx {
            notes.push(format!(
                "norms: that is unusual in {layout}'s layout; --verify shows whether it is right"
            ));
        }
    }
    Ok(())
}

/// A head of zeros drafts nothing, and nobody would notice before wondering at the speed.
fn refuse_empty_head(checkpoint: &Checkpoint, outputs: &[Output]) -> Result<()> {
    let holds_something = |output: &Output| {
        output.inputs.iter().any(|input| {
            let data = checkpoint.data(&checkpoint.tensors[input.tensor]);
            data.iter().any(|&byte| byte & 0x7f != 0)
        })
    };
    let matrices = || outputs.iter().filter(|o| o.mtp && o.dims.len() > 1);
    let joins = matrices().find(|o| o.name.ends_with("nextn.eh_proj.weight"));
    ensure!(
        matrices().any(holds_something) && joins.is_none_or(holds_something),
        "{}: the draft head (`mtp.*`) holds only zeros, so it cannot draft; convert with --no-mtp, or fetch the \
         original checkpoint",
        checkpoint.dir.display()
    );
    Ok(())
}

fn mtp_note(config: &HfConfig, n_kept: usize, n_dropped: usize, mlx: bool) -> String {
    let announced = config.n_mtp.unwrap_or(0) > 0;
    match (n_kept, n_dropped) {
        (0, 0) if announced && mlx => {
            "MTP: none kept: config.json announces a draft head, but MLX's converter drops its tensors".to_owned()
        }
        (0, 0) if announced => {
            "MTP: none kept: config.json announces a draft head, but the checkpoint has no `mtp.*` tensors".to_owned()
        }
        (0, 0) => "MTP: none kept: the checkpoint has no `mtp.*` tensors".to_owned(),
        (0, n) => format!("MTP: left out {n} tensors (--no-mtp)"),
        (n, _) if announced => format!("MTP: kept {n} tensors"),
        (n, _) => format!("MTP: kept {n} tensors, which config.json does not announce"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_the_prefixes_of_their_tools() {
        for name in [
            "model.language_model.layers.0.mlp.gate.weight",
            "language_model.model.layers.0.mlp.gate.weight",
            "model.layers.0.mlp.gate.weight",
            "layers.0.mlp.gate.weight",
        ] {
            assert_eq!(plain_name(name), "layers.0.mlp.gate.weight");
        }
        assert_eq!(plain_name("model.mtp.fc.weight"), "mtp.fc.weight");
        assert_eq!(
            plain_name("language_model.lm_head.weight"),
            "lm_head.weight"
        );
        assert_eq!(
            plain_name("model.visual.blocks.0.norm1.bias"),
            "visual.blocks.0.norm1.bias"
        );
    }

    #[test]
    fn factors_belong_to_their_matrix() {
        let of = |name| scale_of(name).unwrap_or_default();
        assert_eq!(of("a.weight_scale_inv"), "a.weight");
        assert_eq!(of("a.weight_scale"), "a.weight");
        assert_eq!(of("a.scales"), "a.weight");
        assert_eq!(
            of("mlp.experts.down_proj_scale_inv"),
            "mlp.experts.down_proj"
        );
        assert_eq!(scale_of("a.weight"), None);
    }

    #[test]
    fn value_heads_go_from_grouped_to_tiled() {
        let linear = Linear {
            conv_kernel: 4,
            head_dim: 8,
            n_k_heads: 2,
            n_v_heads: 6,
        };
        assert_eq!(tiled(&linear), [0, 3, 1, 4, 2, 5]);
    }
}
