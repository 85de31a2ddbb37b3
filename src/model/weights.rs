//! Weights bound to named fields: the one place where tensor names are known.
//!
//! [`Model::bind`] walks the architecture once and asks for each tensor by name, shape and role. It is walked
//! twice: first over the file's directory, so that every shape and type is checked before anything is loaded,
//! then over the loaded weights. Where weights are copied, they lie in the order of that walk: matrices that are
//! multiplied with the same vectors come one after the other, so that they can be multiplied as one.

use std::collections::HashSet;

use anyhow::{Context as _, Result, bail, ensure};
use ggml_metal::{
    Backend, Repack, Role, Tensor, TensorInfo, Wanted, WeightBytes, Weights, one_line,
};

use super::config::{Config, LayerConfig};
use super::files::ModelFiles;
use super::health::{HeadHealth, head_health, is_head_norm};

/// All weights of a model.
pub struct Model<T> {
    /// `[n_embd, n_vocab]`
    pub token_embd: T,
    /// `[n_embd]`
    pub output_norm: T,
    /// `[n_embd, n_vocab]`; the embedding itself in tied models.
    pub output: T,
    /// The trunk's layers.
    pub layers: Vec<Layer<T>>,
    /// The draft head.
    pub mtp: Option<Mtp<T>>,
}

/// One decoder layer.
pub struct Layer<T> {
    /// `[n_embd]`
    pub attn_norm: T,
    /// What mixes positions.
    pub mixer: Mixer<T>,
    /// `[n_embd]`
    pub post_attention_norm: T,
    /// What mixes channels.
    pub ffn: Ffn<T>,
}

/// What mixes positions in a layer.
pub enum Mixer<T> {
    /// Gated full attention.
    Attention(Attention<T>),
    /// Gated delta net.
    DeltaNet(DeltaNet<T>),
}

/// Weights of gated full attention.
pub struct Attention<T> {
    /// Queries with their gates, keys, values.
    pub qkv: Qkv<T>,
    /// `[head_dim]`
    pub q_norm: T,
    /// `[head_dim]`
    pub k_norm: T,
    /// `[head_dim * n_head, n_embd]`
    pub output: T,
}

/// Query, key and value projections, as the file stores them.
pub enum Qkv<T> {
    /// Three matrices.
    Separate {
        /// `[n_embd, 2 * head_dim * n_head]`, per head the query's rows and then the gate's.
        q: T,
        /// `[n_embd, head_dim * n_head_kv]`
        k: T,
        /// `[n_embd, head_dim * n_head_kv]`
        v: T,
    },
    /// One matrix: the rows of q, then of k, then of v.
    Fused(T),
}

/// Weights of the gated delta net.
pub struct DeltaNet<T> {
    /// `[n_embd, conv_dim]`: queries, keys, values.
    pub qkv: T,
    /// `[n_embd, value_dim]`: the output gate z.
    pub gate: T,
    /// `[n_embd, n_v_heads]`
    pub alpha: T,
    /// `[n_embd, n_v_heads]`
    pub beta: T,
    /// `[conv_kernel, conv_dim]`
    pub conv1d: T,
    /// `[n_v_heads]`
    pub dt_bias: T,
    /// `[n_v_heads]`, already `-exp(A_log)`.
    pub a: T,
    /// `[head_dim]`
    pub norm: T,
    /// `[value_dim, n_embd]`
    pub output: T,
}

/// What mixes channels in a layer.
pub enum Ffn<T> {
    /// SwiGLU.
    Dense {
        /// `[n_embd, n_ff]`
        gate: T,
        /// `[n_embd, n_ff]`
        up: T,
        /// `[n_ff, n_embd]`
        down: T,
    },
    /// A choice of experts, and one for every token.
    Moe(Moe<T>),
}

/// Weights of a mixture of experts.
pub struct Moe<T> {
    /// `[n_embd, n_expert]`: the router.
    pub gate_inp: T,
    /// `[n_embd]`: how much of the shared expert is taken.
    pub gate_inp_shexp: T,
    /// Gate and up projections of the experts.
    pub gate_up: GateUp<T>,
    /// `[n_ff, n_embd, n_expert]`
    pub down_exps: T,
    /// `[n_embd, n_ff_shared]`
    pub gate_shexp: T,
    /// `[n_embd, n_ff_shared]`
    pub up_shexp: T,
    /// `[n_ff_shared, n_embd]`
    pub down_shexp: T,
}

/// Gate and up projections of the experts, as the file stores them.
pub enum GateUp<T> {
    /// Two tensors of `[n_embd, n_ff, n_expert]`.
    Separate {
        /// The gate.
        gate: T,
        /// The up projection.
        up: T,
    },
    /// `[n_embd, 2 * n_ff, n_expert]`, the gate's rows first.
    Fused(T),
}

/// The draft head: guesses the token after next from the trunk's hidden state and the next token.
pub struct Mtp<T> {
    /// `[2 * n_embd, n_embd]`: takes the normed embedding, then the normed hidden state.
    pub eh_proj: T,
    /// `[n_embd]`
    pub enorm: T,
    /// `[n_embd]`
    pub hnorm: T,
    /// A full-attention layer.
    pub layer: Layer<T>,
    /// `[n_embd]`; the trunk's output norm where the file has none.
    pub shared_head_norm: T,
    /// `[n_embd, n_vocab]`; the trunk's where the file has none.
    pub embed_tokens: T,
    /// `[n_embd, n_vocab]`; the trunk's where the file has none.
    pub head: T,
}

/// Weights on a device, ready to compute with.
pub struct ModelWeights {
    /// The tensors.
    model: Model<Tensor>,
    /// The same with matrices in the layout that is faster for narrow passes, where there is one.
    narrow: Option<Model<Tensor>>,
    /// Where they lie.
    pub bytes: WeightBytes,
    /// Why the draft head can or cannot be used.
    pub mtp_status: MtpStatus,
    /// Bytes of the draft head's own tensors.
    pub mtp_bytes: usize,
}

/// Whether the draft head can be used, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MtpStatus {
    /// It can.
    pub on: bool,
    /// In words that follow "because".
    pub reason: String,
}

impl MtpStatus {
    /// Looks at the files' directory only.
    pub fn of(files: &ModelFiles) -> Self {
        let block = files.config.n_layer();
        let tensors = || {
            files
                .all()
                .flat_map(|f| f.tensors())
                .filter(|t| t.name.starts_with(&format!("blk.{block}.")))
                .count()
        };
        let (on, reason) = match (&files.config.mtp, files.mtp_tensor("nextn.eh_proj.weight")) {
            (Some(_), Some((file, _))) if std::ptr::eq(file, files.main()) => (
                true,
                format!("the file has an MTP block of {} tensors", tensors()),
            ),
            (Some(_), Some((file, _))) => (
                true,
                format!("the MTP block is in {}", file.path().display()),
            ),
            (Some(_), None) => (
                false,
                format!(
                    "the MTP block is announced, but `blk.{block}.nextn.eh_proj.weight` is missing"
                ),
            ),
            (None, _) => (false, "the file has no MTP block".to_owned()),
        };
        Self { on, reason }
    }
}

/// Passes up to this width use the layout made for this CPU: up to here its kernels give the same bits at every
/// width.
const NARROW: usize = 3;

impl ModelWeights {
    /// The tensors that are best for a pass of this width.
    pub fn for_width(&self, n_tokens: usize) -> &Model<Tensor> {
        self.narrow
            .as_ref()
            .filter(|_| n_tokens <= NARROW)
            .unwrap_or(&self.model)
    }

    /// Loads the model's weights onto `backend`; `cpu` takes what that device cannot use.
    ///
    /// # Errors
    /// When a tensor is missing, has another shape than the numbers say, or a type that cannot be computed with;
    /// when memory runs out.
    pub fn load(
        files: &ModelFiles,
        backend: &Backend,
        cpu: &Backend,
        repack: Repack,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let plan = Plan::make(files)?;
        let weights = Weights::load(&plan.wanted, backend, cpu, repack, progress)?;
        let mtp_bytes = plan.mtp_bytes();
        let bind = |repacked: bool| {
            let mut loaded = |ask: &Ask<'_>| {
                let found = ask.find(files).and_then(|(file, info)| match ask.role {
                    Role::Matrix | Role::Experts if repacked => weights.get_repacked(file, info),
                    _ => weights.get(file, info),
                });
                Ok(found.cloned())
            };
            Model::bind(&files.config, plan.status.on, &mut loaded)
        };
        let model = bind(repack == Repack::Instead)?;
        let narrow = (repack == Repack::Beside && weights.bytes().repacked > 0)
            .then(|| bind(true))
            .transpose()?;
        Ok(Self {
            model,
            narrow,
            bytes: weights.bytes(),
            mtp_status: plan.status,
            mtp_bytes,
        })
    }
}

/// What will be loaded: every tensor that the model uses, checked against its numbers.
pub struct Plan<'a> {
    /// The tensors.
    pub wanted: Vec<Wanted<'a>>,
    /// Whether the draft head is among them, and why.
    pub status: MtpStatus,
    n_trunk: usize,
}

impl<'a> Plan<'a> {
    /// Checks the files' directory.
    ///
    /// # Errors
    /// As [`ModelWeights::load`], without memory.
    pub fn make(files: &'a ModelFiles) -> Result<Self> {
        let mut status = MtpStatus::of(files);
        let health = if status.on {
            head_health(files)
        } else {
            HeadHealth::Sound
        };
        let damage = match health {
            HeadHealth::Zero => Some("the MTP block holds nothing but zeros"),
            HeadHealth::NotFinite => Some("the MTP block's norms hold values that are not numbers"),
            HeadHealth::Sound | HeadHealth::ZeroCentred => None,
        };
        if let Some(reason) = damage {
            status = MtpStatus {
                on: false,
                reason: reason.to_owned(),
            };
        }
        let mut wanted: Vec<Wanted<'a>> = Vec::new();
        let mut seen: HashSet<*const TensorInfo> = HashSet::new();
        let mut n_trunk = 0;
        let mut check = |ask: &Ask<'_>| -> Result<Option<()>> {
            let Some((file, info)) = ask.find(files) else {
                ensure!(
                    !ask.required,
                    "{}: tensor `{}` of shape {:?} is missing; the file is incomplete or of another kind",
                    files.main().path().display(),
                    ask.name,
                    ask.shape
                );
                return Ok(None);
            };
            ask.check(file, info)?;
            if seen.insert(info) {
                wanted.push(Wanted {
                    file,
                    info,
                    role: ask.role,
                    tied: false,
                    plus_one: false,
                });
                n_trunk += usize::from(!ask.mtp);
            } else if ask.role == Role::Matrix {
                for want in wanted.iter_mut().filter(|w| std::ptr::eq(w.info, info)) {
                    want.tied = want.role == Role::Embedding;
                }
            }
            Ok(Some(()))
        };
        Model::bind(&files.config, status.on, &mut check)?;
        if health == HeadHealth::ZeroCentred {
            for want in &mut wanted {
                want.plus_one = is_head_norm(files, want.file, want.info);
            }
            status.reason += ", whose norms were stored without their 1 and are mended here";
        }
        Ok(Self {
            wanted,
            status,
            n_trunk,
        })
    }

    /// Bytes of the draft head's own tensors.
    pub fn mtp_bytes(&self) -> usize {
        self.wanted[self.n_trunk..]
            .iter()
            .map(|w| w.info.bytes)
            .sum()
    }
}

/// A tensor that the architecture asks for.
pub struct Ask<'a> {
    name: &'a str,
    /// Of the MTP block: `name` is without `blk.N.`.
    mtp: bool,
    shape: &'a [i64],
    role: Role,
    required: bool,
}

impl Ask<'_> {
    fn find<'f>(
        &self,
        files: &'f ModelFiles,
    ) -> Option<(&'f ggml_metal::Gguf, &'f ggml_metal::TensorInfo)> {
        if self.mtp {
            files.mtp_tensor(self.name)
        } else {
            files.tensor(self.name)
        }
    }

    fn check(&self, file: &ggml_metal::Gguf, info: &ggml_metal::TensorInfo) -> Result<()> {
        let place = || {
            format!(
                "{}: tensor `{}`",
                file.path().display(),
                one_line(&info.name)
            )
        };
        let mut expected = [1; 4];
        expected[..self.shape.len()].copy_from_slice(self.shape);
        ensure!(
            info.shape == expected,
            "{} is {:?}, expected {:?} from the file's own numbers",
            place(),
            info.dims(),
            self.shape
        );
        let usable = match self.role {
            Role::Vector => info.dtype == ggml_metal::DType::F32,
            _ => info.dtype.is_weight() && info.dtype != ggml_metal::DType::NVFP4,
        };
        ensure!(
            usable,
            "{} has the type {}, which cannot be computed with here; use another quantization",
            place(),
            info.dtype
        );
        let scale = info.name.replace(".weight", ".scale");
        ensure!(
            scale == info.name || file.tensor(&scale).is_none(),
            "{} has a separate scale (`{scale}`), which is not supported; use another quantization",
            place()
        );
        Ok(())
    }
}

type Get<'g, T> = dyn FnMut(&Ask<'_>) -> Result<Option<T>> + 'g;

/// Asks for the tensors of one block, or of the model, by name after `prefix`.
struct Binder<'b, 'g, T> {
    get: &'b mut Get<'g, T>,
    prefix: String,
    mtp: bool,
}

impl<T> Binder<'_, '_, T> {
    fn ask(&mut self, name: &str, shape: &[i64], role: Role, required: bool) -> Result<Option<T>> {
        (self.get)(&Ask {
            name: &format!("{}{name}", self.prefix),
            mtp: self.mtp,
            shape,
            role,
            required,
        })
    }

    fn optional(&mut self, name: &str, shape: &[i64], role: Role) -> Result<Option<T>> {
        self.ask(name, shape, role, false)
    }

    fn required(&mut self, name: &str, shape: &[i64], role: Role) -> Result<T> {
        self.ask(name, shape, role, true)?
            .with_context(|| format!("tensor `{}{name}` is missing", self.prefix))
    }

    fn matrix(&mut self, name: &str, n_in: i64, n_out: i64) -> Result<T> {
        self.required(name, &[n_in, n_out], Role::Matrix)
    }

    fn vector(&mut self, name: &str, n: i64) -> Result<T> {
        self.required(name, &[n], Role::Vector)
    }

    fn layer(&mut self, config: &Config, layer: &LayerConfig) -> Result<Layer<T>> {
        Ok(Layer {
            attn_norm: self.vector("attn_norm.weight", config.n_embd)?,
            mixer: if layer.recurrent {
                Mixer::DeltaNet(self.delta_net(config)?)
            } else {
                Mixer::Attention(self.attention(config, layer)?)
            },
            post_attention_norm: self.vector("post_attention_norm.weight", config.n_embd)?,
            ffn: self.ffn(config, layer)?,
        })
    }

    fn attention(&mut self, config: &Config, layer: &LayerConfig) -> Result<Attention<T>> {
        let (n_embd, head_dim) = (config.n_embd, config.head_dim);
        let n_q = 2 * head_dim * layer.n_head;
        let n_kv = head_dim * layer.n_head_kv;
        let fused = self.optional("attn_qkv.weight", &[n_embd, n_q + 2 * n_kv], Role::Matrix)?;
        Ok(Attention {
            qkv: match fused {
                Some(qkv) => Qkv::Fused(qkv),
                None => Qkv::Separate {
                    q: self.matrix("attn_q.weight", n_embd, n_q)?,
                    k: self.matrix("attn_k.weight", n_embd, n_kv)?,
                    v: self.matrix("attn_v.weight", n_embd, n_kv)?,
                },
            },
            q_norm: self.vector("attn_q_norm.weight", head_dim)?,
            k_norm: self.vector("attn_k_norm.weight", head_dim)?,
            output: self.matrix("attn_output.weight", head_dim * layer.n_head, n_embd)?,
        })
    }

    fn delta_net(&mut self, config: &Config) -> Result<DeltaNet<T>> {
        let (n_embd, ssm) = (config.n_embd, &config.ssm);
        Ok(DeltaNet {
            qkv: self.matrix("attn_qkv.weight", n_embd, ssm.conv_dim())?,
            gate: self.matrix("attn_gate.weight", n_embd, ssm.value_dim())?,
            alpha: self.matrix("ssm_alpha.weight", n_embd, ssm.n_v_heads)?,
            beta: self.matrix("ssm_beta.weight", n_embd, ssm.n_v_heads)?,
            conv1d: self.required(
                "ssm_conv1d.weight",
                &[ssm.conv_kernel, ssm.conv_dim()],
                Role::Vector,
            )?,
            dt_bias: self.vector("ssm_dt.bias", ssm.n_v_heads)?,
            a: self.vector("ssm_a", ssm.n_v_heads)?,
            norm: self.vector("ssm_norm.weight", ssm.head_dim)?,
            output: self.matrix("ssm_out.weight", ssm.value_dim(), n_embd)?,
        })
    }

    fn ffn(&mut self, config: &Config, layer: &LayerConfig) -> Result<Ffn<T>> {
        let (n_embd, n_ff) = (config.n_embd, layer.n_ff);
        let Some(moe) = &config.moe else {
            return Ok(Ffn::Dense {
                gate: self.matrix("ffn_gate.weight", n_embd, n_ff)?,
                up: self.matrix("ffn_up.weight", n_embd, n_ff)?,
                down: self.matrix("ffn_down.weight", n_ff, n_embd)?,
            });
        };
        let (n_expert, n_shared) = (moe.n_expert, moe.n_ff_shared);
        let experts = [n_embd, n_ff, n_expert];
        let fused = self.optional(
            "ffn_gate_up_exps.weight",
            &[n_embd, 2 * n_ff, n_expert],
            Role::Experts,
        )?;
        Ok(Ffn::Moe(Moe {
            gate_inp: self.matrix("ffn_gate_inp.weight", n_embd, n_expert)?,
            gate_inp_shexp: self.required("ffn_gate_inp_shexp.weight", &[n_embd], Role::Matrix)?,
            gate_up: match fused {
                Some(gate_up) => GateUp::Fused(gate_up),
                None => GateUp::Separate {
                    gate: self.required("ffn_gate_exps.weight", &experts, Role::Experts)?,
                    up: self.required("ffn_up_exps.weight", &experts, Role::Experts)?,
                },
            },
            down_exps: self.required(
                "ffn_down_exps.weight",
                &[n_ff, n_embd, n_expert],
                Role::Experts,
            )?,
            gate_shexp: self.matrix("ffn_gate_shexp.weight", n_embd, n_shared)?,
            up_shexp: self.matrix("ffn_up_shexp.weight", n_embd, n_shared)?,
            down_shexp: self.matrix("ffn_down_shexp.weight", n_shared, n_embd)?,
        }))
    }
}

/// Name, shape and role of every tensor of a model with these numbers, whose output matrix may be the embedding.
///
/// # Errors
/// Never for numbers that make sense.
pub fn tensors(config: &Config, tied: bool) -> Result<Vec<(String, [i64; 4], Role)>> {
    let mut list: Vec<(String, [i64; 4], Role)> = Vec::new();
    let block = config.n_layer();
    let mut get = |ask: &Ask<'_>| {
        let fused = ["attn_qkv.weight", "ffn_gate_up_exps.weight"];
        let left_out = match ask.name {
            "output.weight" => tied,
            "nextn.embed_tokens.weight" | "nextn.shared_head_head.weight" => true,
            name => !ask.required && fused.iter().any(|f| name.ends_with(f)),
        };
        if left_out {
            return Ok(None);
        }
        let name = if ask.mtp {
            format!("blk.{block}.{}", ask.name)
        } else {
            ask.name.to_owned()
        };
        let mut shape = [1; 4];
        shape[..ask.shape.len()].copy_from_slice(ask.shape);
        if list.iter().all(|t| t.0 != name) {
            list.push((name, shape, ask.role));
        }
        Ok(Some(()))
    };
    Model::bind(config, config.mtp.is_some(), &mut get)?;
    Ok(list)
}

impl<T> Model<T> {
    /// Walks the architecture and asks `get` for each tensor; `mtp` says whether the draft head is wanted.
    ///
    /// # Errors
    /// When a tensor is missing, or `get` refuses one.
    pub fn bind(config: &Config, mtp: bool, get: &mut Get<'_, T>) -> Result<Self> {
        let mut root = Binder {
            get,
            prefix: String::new(),
            mtp: false,
        };
        let vocab = [config.n_embd, config.n_vocab];
        let token_embd = root.required("token_embd.weight", &vocab, Role::Embedding)?;
        let output_norm = root.vector("output_norm.weight", config.n_embd)?;
        let output = match root.optional("output.weight", &vocab, Role::Matrix)? {
            Some(output) => output,
            None => root.required("token_embd.weight", &vocab, Role::Matrix)?,
        };
        let mut layers = Vec::with_capacity(config.n_layer());
        for (il, layer) in config.layers.iter().enumerate() {
            root.prefix = format!("blk.{il}.");
            layers.push(root.layer(config, layer)?);
        }
        let mtp = match &config.mtp {
            Some(layer) if mtp => Some(Self::bind_mtp(config, layer, root.get)?),
            _ => None,
        };
        Ok(Self {
            token_embd,
            output_norm,
            output,
            layers,
            mtp,
        })
    }

    fn bind_mtp(config: &Config, layer: &LayerConfig, get: &mut Get<'_, T>) -> Result<Mtp<T>> {
        let (n_embd, vocab) = (config.n_embd, [config.n_embd, config.n_vocab]);
        // Matrices that the file of the head may leave to the trunk.
        let mut shared = |own: &str, trunk: &[&str], shape: &[i64], role| -> Result<T> {
            let asks = std::iter::once((own, true)).chain(trunk.iter().map(|&name| (name, false)));
            for (name, mtp) in asks {
                let ask = Ask {
                    name,
                    mtp,
                    shape,
                    role,
                    required: false,
                };
                if let Some(tensor) = get(&ask)? {
                    return Ok(tensor);
                }
            }
            bail!("neither the MTP block nor the trunk has a tensor for `{own}`");
        };
        let shared_head_norm = shared(
            "nextn.shared_head_norm.weight",
            &["output_norm.weight"],
            &[n_embd],
            Role::Vector,
        )?;
        let embed_tokens = shared(
            "nextn.embed_tokens.weight",
            &["token_embd.weight"],
            &vocab,
            Role::Embedding,
        )?;
        let head = shared(
            "nextn.shared_head_head.weight",
            &["output.weight", "token_embd.weight"],
            &vocab,
            Role::Matrix,
        )?;
        let mut block = Binder {
            get,
            prefix: String::new(),
            mtp: true,
        };
        Ok(Mtp {
            eh_proj: block.matrix("nextn.eh_proj.weight", 2 * n_embd, n_embd)?,
            enorm: block.vector("nextn.enorm.weight", n_embd)?,
            hnorm: block.vector("nextn.hnorm.weight", n_embd)?,
            layer: block.layer(config, layer)?,
            shared_head_norm,
            embed_tokens,
            head,
        })
    }
}
