//! llama.cpp in the same process: the peer that tests and benches compare with. Not part of the product.
//!
//! Models, contexts and samplers of llama.cpp behind the little that a comparison needs. A context computes with the
//! threads of a [`Backend`] given to it, so that both sides run on one thread pool, and holds the compute lock meanwhile. Its log goes where ggml's goes, which is nowhere by default.

use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;

use crate::{Backend, DType, Device, DeviceKind, Error, exclusive, log};

/// How the peer loads a model.
#[derive(Clone, Copy)]
pub struct PeerOptions {
    /// Copy matrices to a layout made for this CPU, llama.cpp's default.
    pub repack: bool,
    /// Map the file; what is not repacked is then used in place.
    pub mmap: bool,
    /// Load the draft head, too.
    pub mtp: bool,
    /// Where everything is computed; the CPU where there is none.
    pub device: Option<Device>,
}

impl Default for PeerOptions {
    /// All weights used in place on the CPU, without the draft head.
    fn default() -> Self {
        Self {
            repack: false,
            mmap: true,
            mtp: false,
            device: None,
        }
    }
}

/// A model that llama.cpp loaded.
#[derive(Clone)]
pub struct PeerModel(Arc<ModelInner>);

struct ModelInner {
    raw: *mut ggml::llama_model,
    n_vocab: usize,
    /// A device with memory of its own holds all of it.
    offloaded: bool,
}

// SAFETY: a loaded model is only read, by contexts that compute under the compute lock; it is freed once.
unsafe impl Send for ModelInner {}
// SAFETY: as above.
unsafe impl Sync for ModelInner {}

impl Drop for ModelInner {
    fn drop(&mut self) {
        // SAFETY: freed once, after the last context, which holds this.
        unsafe { ggml::llama_model_free(self.raw) }
    }
}

impl PeerModel {
    /// Loads the model at `path`.
    ///
    /// # Errors
    /// When llama.cpp refuses the file; the message has what it logged.
    pub fn load(path: &Path, options: &PeerOptions) -> Result<Self, Error> {
        let name = c_path(path)?;
        initialise();
        log::clear();
        // An empty list of devices leaves the CPU.
        let gpu = options.device.filter(|d| d.kind() != DeviceKind::Cpu);
        let first = gpu.map_or(std::ptr::null_mut(), |d| d.0);
        let mut devices: [ggml::ggml_backend_dev_t; 2] = [first, std::ptr::null_mut()];
        // SAFETY: path and device list live through the call; the other parameters are llama.cpp's own.
        let raw = unsafe {
            let mut params = ggml::llama_model_default_params();
            params.devices = devices.as_mut_ptr();
            // More than any model has.
            params.n_gpu_layers = if gpu.is_some() { 999 } else { 0 };
            params.use_extra_bufts = options.repack;
            params.load_mode = if options.mmap {
                ggml::LLAMA_LOAD_MODE_MMAP
            } else {
                ggml::LLAMA_LOAD_MODE_NONE
            };
            params.load_mtp = options.mtp;
            ggml::llama_model_load_from_file(name.as_ptr(), params)
        };
        if raw.is_null() {
            return Err(Error::Format {
                path: path.to_owned(),
                reason: format!("llama.cpp cannot load it{}", log::take()),
            });
        }
        // SAFETY: the model was just loaded, and its vocabulary lives as long.
        let n_vocab = unsafe { ggml::llama_vocab_n_tokens(ggml::llama_model_get_vocab(raw)) };
        Ok(Self(Arc::new(ModelInner {
            raw,
            n_vocab: n_vocab as usize,
            offloaded: gpu.is_some(),
        })))
    }

    /// Tokens in the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.0.n_vocab
    }
}

/// How a peer context computes.
#[derive(Clone, Copy, Debug)]
pub struct PeerParams {
    /// Tokens that it can hold.
    pub n_ctx: usize,
    /// Tokens in one pass.
    pub n_batch: usize,
    /// Flash attention.
    pub flash_attn: bool,
    /// Type of the keys.
    pub type_k: DType,
    /// Type of the values.
    pub type_v: DType,
}

impl Default for PeerParams {
    fn default() -> Self {
        Self {
            n_ctx: 4096,
            n_batch: 512,
            flash_attn: true,
            type_k: DType::F16,
            type_v: DType::F16,
        }
    }
}

/// One sequence in llama.cpp.
pub struct PeerContext {
    raw: *mut ggml::llama_context,
    n_past: usize,
    n_batch: usize,
    n_ctx: usize,
    /// Both outlive the context, which is freed in `drop`, before any field.
    model: PeerModel,
    _cpu: Backend,
}

// SAFETY: the context is owned, and computes under the compute lock.
unsafe impl Send for PeerContext {}

impl Drop for PeerContext {
    fn drop(&mut self) {
        // SAFETY: freed once, while model and thread pool are alive.
        unsafe { ggml::llama_free(self.raw) }
    }
}

impl PeerContext {
    /// An empty sequence that computes with the threads of `cpu`, a backend of the CPU.
    ///
    /// # Errors
    /// When llama.cpp refuses the parameters, or memory runs out.
    pub fn new(model: &PeerModel, cpu: &Backend, params: &PeerParams) -> Result<Self, Error> {
        let Some(pool) = cpu.thread_pool() else {
            return Err(Error::Device(format!(
                "{} has no thread pool",
                cpu.device().name()
            )));
        };
        let n_threads = cpu.n_threads() as i32;
        log::clear();
        // SAFETY: the model is alive and kept; all other pointers of the parameters stay null.
        let raw = unsafe {
            let mut p = ggml::llama_context_default_params();
            p.n_ctx = params.n_ctx as u32;
            p.n_batch = params.n_batch as u32;
            p.n_ubatch = params.n_batch as u32;
            p.n_seq_max = 1;
            p.n_threads = n_threads;
            p.n_threads_batch = n_threads;
            p.flash_attn_type = if params.flash_attn {
                ggml::LLAMA_FLASH_ATTN_TYPE_ENABLED
            } else {
                ggml::LLAMA_FLASH_ATTN_TYPE_DISABLED
            };
            p.type_k = params.type_k.0;
            p.type_v = params.type_v.0;
            p.offload_kqv = model.0.offloaded;
            p.op_offload = model.0.offloaded;
            p.no_perf = true;
            ggml::llama_init_from_model(model.0.raw, p)
        };
        if raw.is_null() {
            return Err(Error::Device(format!(
                "llama.cpp makes no context{}",
                log::take()
            )));
        }
        // SAFETY: the context is alive; the pool is kept by `_cpu` until the context is freed.
        unsafe { ggml::llama_attach_threadpool(raw, pool, pool) };
        Ok(Self {
            raw,
            n_past: 0,
            n_batch: params.n_batch,
            n_ctx: params.n_ctx,
            model: model.clone(),
            _cpu: cpu.clone(),
        })
    }

    /// Tokens processed so far.
    pub fn n_past(&self) -> usize {
        self.n_past
    }

    /// Processes `tokens` in passes of at most `n_batch` and returns the logits of all, or of the last, as rows
    /// of `n_vocab`.
    ///
    /// # Errors
    /// When the tokens do not fit or are unknown, or llama.cpp fails.
    pub fn decode(&mut self, tokens: &[u32], want_all_logits: bool) -> Result<Vec<f32>, Error> {
        self.check(tokens)?;
        let mut logits = Vec::new();
        let n_passes = tokens.len().div_ceil(self.n_batch);
        for (i, pass) in tokens.chunks(self.n_batch).enumerate() {
            let wanted = self.pass(pass, want_all_logits, i + 1 == n_passes)?;
            for row in wanted {
                logits.extend_from_slice(self.logits_of(row));
            }
        }
        Ok(logits)
    }

    /// Processes one token and returns its logits where llama.cpp holds them, so that nothing is timed but its own work.
    ///
    /// # Errors
    /// See [`PeerContext::decode`].
    pub fn next(&mut self, token: u32) -> Result<&[f32], Error> {
        self.check(&[token])?;
        self.pass(&[token], false, true)?;
        Ok(self.logits_of(0))
    }

    fn check(&self, tokens: &[u32]) -> Result<(), Error> {
        let n_vocab = self.model.n_vocab();
        if self.n_past + tokens.len() > self.n_ctx || tokens.iter().any(|&t| t as usize >= n_vocab)
        {
            return Err(Error::Device(format!(
                "{} + {} tokens of a vocabulary of {n_vocab} do not fit into a context of {}",
                self.n_past,
                tokens.len(),
                self.n_ctx
            )));
        }
        Ok(())
    }

    /// The logits of a token of the last pass that was marked as an output.
    fn logits_of(&self, i: usize) -> &[f32] {
        // SAFETY: for outputs llama.cpp holds a row of n_vocab logits until the next pass, which needs `self` as mutable;
        // for others it returns null.
        unsafe {
            let row = ggml::llama_get_logits_ith(self.raw, i as i32);
            assert!(
                !row.is_null(),
                "llama.cpp has no logits for an output it was asked for"
            );
            std::slice::from_raw_parts(row, self.model.n_vocab())
        }
    }

    /// One pass; returns which of its tokens are outputs.
    fn pass(
        &mut self,
        tokens: &[u32],
        all: bool,
        last: bool,
    ) -> Result<std::ops::Range<usize>, Error> {
        let n = tokens.len();
        let mut ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let mut positions: Vec<i32> = (0..n).map(|i| (self.n_past + i) as i32).collect();
        let mut n_seq = vec![1i32; n];
        let mut sequence = [0i32];
        let mut sequences = vec![sequence.as_mut_ptr(); n];
        let mut wanted: Vec<i8> = (0..n)
            .map(|i| i8::from(all || (last && i + 1 == n)))
            .collect();
        let batch = ggml::llama_batch {
            n_tokens: n as i32,
            token: ids.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: positions.as_mut_ptr(),
            n_seq_id: n_seq.as_mut_ptr(),
            seq_id: sequences.as_mut_ptr(),
            logits: wanted.as_mut_ptr(),
        };
        let _lock = exclusive();
        log::clear();
        // SAFETY: every array of the batch has n entries and lives through the call; the lock keeps other
        // computations away.
        let status = unsafe { ggml::llama_decode(self.raw, batch) };
        if status != 0 {
            return Err(Error::Compute {
                device: "llama.cpp".to_owned(),
                status: format!("status {status}"),
                log: log::take(),
            });
        }
        self.n_past += n;
        Ok(match (all, last) {
            (true, _) => 0..n,
            (false, true) => n - 1..n,
            (false, false) => 0..0,
        })
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        let _lock = exclusive();
        // SAFETY: the context is alive, and so is its memory.
        unsafe { ggml::llama_memory_clear(ggml::llama_get_memory(self.raw), true) };
        self.n_past = 0;
    }
}

/// How `llama_model_quantize` quantizes.
#[derive(Clone, Copy, Debug)]
pub struct PeerQuantize<'a> {
    /// The mixture, as numbered in `general.file_type`.
    pub file_type: u32,
    /// Threads.
    pub n_threads: usize,
    /// Convert tensors that are quantized already.
    pub allow_requantize: bool,
    /// Type of the output matrix.
    pub output: Option<DType>,
    /// Type of the token embedding.
    pub token_embedding: Option<DType>,
    /// Types of the tensors that match a pattern.
    pub tensors: &'a [(&'a str, DType)],
    /// Importance of the columns of tensors by name; none means without an importance matrix.
    pub imatrix: &'a [(String, Vec<f32>)],
    /// Metadata to set: texts of up to 127 bytes.
    pub texts: &'a [(&'a str, &'a str)],
    /// Metadata to set: numbers, stored as `u32`.
    pub numbers: &'a [(&'a str, u32)],
}

impl PeerQuantize<'_> {
    /// The mixture with nothing else asked for.
    pub fn new(file_type: u32, n_threads: usize) -> Self {
        Self {
            file_type,
            n_threads,
            allow_requantize: false,
            output: None,
            token_embedding: None,
            tensors: &[],
            imatrix: &[],
            texts: &[],
            numbers: &[],
        }
    }

    /// Quantizes a file as `llama-quantize` does.
    ///
    /// # Errors
    /// When llama.cpp fails; the message has what it logged.
    pub fn run(&self, input: &Path, output: &Path) -> Result<(), Error> {
        let (from, to) = (c_path(input)?, c_path(output)?);
        let name = |text: &str| CString::new(text).map_err(|e| Error::Quantize(e.to_string()));
        let names: Vec<CString> = self
            .imatrix
            .iter()
            .map(|(n, _)| name(n))
            .collect::<Result<_, _>>()?;
        let mut imatrix: Vec<_> = names
            .iter()
            .zip(self.imatrix)
            .map(|(name, (_, values))| ggml::llama_model_imatrix_data {
                name: name.as_ptr(),
                data: values.as_ptr(),
                size: values.len(),
            })
            .collect();
        imatrix.push(ggml::llama_model_imatrix_data {
            name: std::ptr::null(),
            data: std::ptr::null(),
            size: 0,
        });
        let patterns: Vec<CString> = self
            .tensors
            .iter()
            .map(|(p, _)| name(p))
            .collect::<Result<_, _>>()?;
        let mut tensors: Vec<_> = patterns
            .iter()
            .zip(self.tensors)
            .map(|(pattern, (_, dtype))| ggml::llama_model_tensor_override {
                pattern: pattern.as_ptr(),
                type_: dtype.0,
            })
            .collect();
        tensors.push(ggml::llama_model_tensor_override {
            pattern: std::ptr::null(),
            type_: ggml::GGML_TYPE_COUNT,
        });
        let entry = |tag, key: &str| {
            let mut entry = ggml::llama_model_kv_override {
                tag,
                key: [0; 128],
                __bindgen_anon_1: ggml::llama_model_kv_override__bindgen_ty_1 { val_str: [0; 128] },
            };
            for (to, from) in entry.key[..127].iter_mut().zip(key.bytes()) {
                *to = from as std::ffi::c_char;
            }
            entry
        };
        let mut metadata = Vec::new();
        for (key, value) in self.texts {
            let mut text = [0; 128];
            for (to, from) in text[..127].iter_mut().zip(value.bytes()) {
                *to = from as std::ffi::c_char;
            }
            let mut entry = entry(ggml::LLAMA_KV_OVERRIDE_TYPE_STR, key);
            entry.__bindgen_anon_1.val_str = text;
            metadata.push(entry);
        }
        for (key, value) in self.numbers {
            let mut entry = entry(ggml::LLAMA_KV_OVERRIDE_TYPE_INT, key);
            entry.__bindgen_anon_1.val_i64 = (*value).into();
            metadata.push(entry);
        }
        metadata.push(entry(ggml::LLAMA_KV_OVERRIDE_TYPE_INT, ""));

        initialise();
        log::clear();
        // SAFETY: paths and lists live through the call; each list ends as llama.cpp expects it to.
        let status = unsafe {
            let mut params = ggml::llama_model_quantize_default_params();
            params.nthread = self.n_threads as i32;
            params.ftype = self.file_type;
            params.allow_requantize = self.allow_requantize;
            params.output_tensor_type = self.output.map_or(ggml::GGML_TYPE_COUNT, |t| t.0);
            params.token_embedding_type =
                self.token_embedding.map_or(ggml::GGML_TYPE_COUNT, |t| t.0);
            if !self.imatrix.is_empty() {
                params.imatrix = imatrix.as_ptr();
            }
            if !self.tensors.is_empty() {
                params.tt_overrides = tensors.as_ptr();
            }
            if metadata.len() > 1 {
                params.kv_overrides = metadata.as_ptr();
            }
            ggml::llama_model_quantize(from.as_ptr(), to.as_ptr(), &params)
        };
        if status == 0 {
            return Ok(());
        }
        Err(Error::Format {
            path: input.to_owned(),
            reason: format!("llama.cpp cannot quantize it{}", log::take()),
        })
    }
}

/// A sampler of llama.cpp, with its numbers.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum PeerSampler<'a> {
    TopK(i32),
    TopP(f32),
    MinP(f32),
    Typical(f32),
    Temperature(f32),
    Penalties {
        last_n: i32,
        repeat: f32,
        frequency: f32,
        presence: f32,
        /// Oldest first.
        history: &'a [u32],
    },
    LogitBias(&'a [(u32, f32)]),
    /// Selects; changes no candidate.
    Greedy,
    /// The last of a chain: computes the probabilities, and selects.
    Distribution,
}

/// A token that a sampler left in.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PeerCandidate {
    /// Token id.
    pub id: u32,
    /// Its logit, as the samplers left it.
    pub logit: f32,
    /// Its probability; meaningful only after a sampler that computes it.
    pub p: f32,
}

/// Applies samplers one after the other to a row of logits. Returns what is left, and the token that was selected,
/// if one of them selects.
pub fn apply_samplers(
    samplers: &[PeerSampler<'_>],
    logits: &[f32],
) -> (Vec<PeerCandidate>, Option<u32>) {
    let mut data: Vec<ggml::llama_token_data> = (0..)
        .zip(logits)
        .map(|(id, &logit)| ggml::llama_token_data { id, logit, p: 0.0 })
        .collect();
    let mut array = ggml::llama_token_data_array {
        data: data.as_mut_ptr(),
        size: data.len(),
        selected: -1,
        sorted: false,
    };
    for sampler in samplers {
        let n_vocab = logits.len() as i32;
        // SAFETY: the array describes live candidates, and samplers only reorder, change and shorten them; each
        // sampler is freed after its use, and copies what it is given.
        unsafe {
            let raw = make_sampler(sampler, n_vocab);
            assert!(!raw.is_null(), "llama.cpp makes no sampler for {sampler:?}");
            if let PeerSampler::Penalties { history, .. } = sampler {
                for &token in *history {
                    ggml::llama_sampler_accept(raw, token as i32);
                }
            }
            ggml::llama_sampler_apply(raw, &mut array);
            ggml::llama_sampler_free(raw);
        }
    }
    // SAFETY: samplers may move the pointer, but it stays a list of `size` candidates.
    let left = unsafe { std::slice::from_raw_parts(array.data, array.size) };
    let candidate = |c: &ggml::llama_token_data| PeerCandidate {
        id: c.id as u32,
        logit: c.logit,
        p: c.p,
    };
    let selected = usize::try_from(array.selected)
        .ok()
        .and_then(|i| left.get(i));
    (
        left.iter().map(candidate).collect(),
        selected.map(|c| c.id as u32),
    )
}

/// # Safety
/// The caller frees the sampler, or adds it to something that does.
unsafe fn make_sampler(sampler: &PeerSampler<'_>, n_vocab: i32) -> *mut ggml::llama_sampler {
    const MIN_KEEP: usize = 0;
    // SAFETY: plain numbers, but for the bias, whose list lives through the call and is copied.
    unsafe {
        match *sampler {
            PeerSampler::TopK(k) => ggml::llama_sampler_init_top_k(k),
            PeerSampler::TopP(p) => ggml::llama_sampler_init_top_p(p, MIN_KEEP),
            PeerSampler::MinP(p) => ggml::llama_sampler_init_min_p(p, MIN_KEEP),
            PeerSampler::Typical(p) => ggml::llama_sampler_init_typical(p, MIN_KEEP),
            PeerSampler::Temperature(t) => ggml::llama_sampler_init_temp(t),
            PeerSampler::Penalties {
                last_n,
                repeat,
                frequency,
                presence,
                ..
            } => ggml::llama_sampler_init_penalties(n_vocab, last_n, repeat, frequency, presence),
            PeerSampler::LogitBias(bias) => {
                let list: Vec<_> = bias
                    .iter()
                    .map(|&(token, bias)| ggml::llama_logit_bias {
                        token: token as i32,
                        bias,
                    })
                    .collect();
                ggml::llama_sampler_init_logit_bias(n_vocab, list.len() as i32, list.as_ptr())
            }
            PeerSampler::Greedy => ggml::llama_sampler_init_greedy(),
            PeerSampler::Distribution => ggml::llama_sampler_init_dist(0),
        }
    }
}

fn initialise() {
    // Loads the backends, once.
    crate::devices();
    log::install_for_peer();
}

fn c_path(path: &Path) -> Result<CString, Error> {
    let bytes: &[u8] = path.as_os_str().as_encoded_bytes();
    CString::new(bytes).map_err(|_| Error::Format {
        path: path.to_owned(),
        reason: "has a zero byte in its name".to_owned(),
    })
}
