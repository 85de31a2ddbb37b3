//! What a sequence leaves behind: keys and values, convolution windows, delta-net states, the draft head's own.
//!
//! Tensors carry `n_seqs` (1 now) so that parallel sequences need no new graph. Keys and values grow with the
//! context, one layer at a time; everything else has a constant size.

use anyhow::{Context as _, Result, ensure};
use ggml_metal::{Backend, Context, DType, Tensor};

use crate::model::Config;
use crate::model::config::LayerConfig;

/// Sequences in one state.
pub const N_SEQS: i64 = 1;
/// Attention looks at a multiple of this many cells, so that a graph serves as many tokens.
pub const KV_PAD: usize = 256;

/// Types that keys and values can have: those that rows can be written to and attention can read.
pub const KV_TYPES: [DType; 9] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q5_1,
    DType::Q5_0,
    DType::Q4_1,
    DType::Q4_0,
    DType::IQ4_NL,
];

/// The state of one sequence.
pub struct State {
    /// One entry a trunk layer.
    pub layers: Vec<LayerState>,
    /// The draft head's, where it is kept up.
    pub head: Option<HeadState>,
    n_cells: usize,
    n_slots: usize,
}

/// The state of one layer.
pub enum LayerState {
    /// Keys and values of full attention.
    Attention(KvCache),
    /// Window and state of the gated delta net.
    DeltaNet(DeltaNetState),
}

/// Keys and values of one layer, a row for each cell.
pub struct KvCache {
    /// `[head_dim * n_head_kv, n_cells]`
    pub k: Tensor,
    /// `[head_dim * n_head_kv, n_cells]`
    pub v: Tensor,
    /// What is stored is turned by these.
    pub rotations: Rotations,
}

/// Orthonormal matrices that turn keys and values before they are quantized, so that the outliers of single
/// dimensions spread over many; queries are turned alike, and attention's output back. None where the type is not
/// quantized, or a head is no multiple of 64.
///
/// Each is a Walsh-Hadamard matrix, which is its own inverse, of the sizes that llama.cpp uses.
#[derive(Clone)]
pub struct Rotations {
    /// For keys and queries: the largest power of two that divides a head, `[n, n]`.
    pub k: Option<Tensor>,
    /// For values and attention's output: the smallest, `[n, n]`.
    pub v: Option<Tensor>,
}

/// Size of the smallest rotation.
const MIN_ROTATION: i64 = 64;

/// The recurrent state of one layer, in F32, after each of the last `n_slots` tokens: a rejected draft is undone by
/// going on from an older slot. Slot 0 is the newest.
pub struct DeltaNetState {
    /// The last inputs of the convolution, `[conv_kernel - 1 + n_slots - 1, conv_dim, n_seqs]`, the newest at the
    /// end; the window of slot `b` ends `b` inputs before it.
    pub conv: Tensor,
    /// Room for the result of a gated delta rule over up to `n_slots` tokens: their outputs, then the states
    /// `[head_dim, head_dim, n_v_heads, n_seqs]` of all slots. The operation works in this memory, so that no state
    /// is ever copied. Fewer tokens' outputs lie at the end of their part.
    pub memory: Tensor,
    /// Elements of one token's outputs.
    n_out: usize,
    /// Elements of one state.
    n_state: usize,
    /// Inputs in a convolution's window.
    n_window: usize,
    n_slots: usize,
}

/// The draft head's state.
pub struct HeadState {
    /// Cell `t` holds the entry made from the token at `t` and the hidden state at `t - 1`; cell 0 is unused.
    pub kv: KvCache,
    /// The trunk's normed hidden states at the last tokens, `[n_embd, n_slots, n_seqs]`, F32, the newest at the end.
    pub hidden: Tensor,
    /// The same at the newest tokens, oldest first, whose entries are still missing, `[n_embd, MAX_OWED]`, F32.
    pub owed: Tensor,
}

/// Tokens that the draft head may lag behind.
pub const MAX_OWED: usize = 256;

/// A part of a tensor that is state: the elements of a range, in pieces of `n` every `stride` where those differ.
struct Part<'a> {
    tensor: &'a Tensor,
    first: usize,
    n: usize,
    stride: usize,
    n_pieces: usize,
}

/// The largest alignment that a device asks of an operation's result (CUDA's).
const MAX_ALIGNMENT: usize = 128;
/// Bytes of an element of everything that is not keys and values.
const F32_BYTES: usize = size_of::<f32>();

/// Types of the keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvTypes {
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
}

impl State {
    /// A zeroed state with room for `n_cells` tokens, of which the newest `n_slots - 1` can be taken back.
    ///
    /// # Errors
    /// When memory runs out, a head does not fill whole blocks of the key or value type, or delta-net heads have an
    /// odd size that leaves no room for slots.
    pub fn new(
        config: &Config,
        backend: &Backend,
        types: KvTypes,
        n_cells: usize,
        n_slots: usize,
        head: bool,
    ) -> Result<Self> {
        for dtype in [types.k, types.v] {
            ensure!(
                KV_TYPES.contains(&dtype),
                "keys and values cannot be {dtype}; choose one of {}",
                KV_TYPES.map(DType::name).join(", ")
            );
            ensure!(
                config.head_dim % dtype.block_size() as i64 == 0,
                "heads of {} values do not fill whole blocks of {dtype} ({}); choose another key and value type",
                config.head_dim,
                dtype.block_size()
            );
        }
        let n_cells = n_cells.next_multiple_of(KV_PAD);
        let rotations = Rotations::new(config.head_dim, backend, types)?;
        let kv_cache = |layer: &LayerConfig, il| {
            let width = config.head_dim * layer.n_head_kv;
            KvCache::new(backend, types, rotations.clone(), width, n_cells, il)
        };
        let mut layers = Vec::with_capacity(config.n_layer());
        for (il, layer) in config.layers.iter().enumerate() {
            layers.push(if layer.recurrent {
                LayerState::DeltaNet(DeltaNetState::new(config, backend, n_slots, il)?)
            } else {
                LayerState::Attention(kv_cache(layer, il)?)
            });
        }
        let head = match &config.mtp {
            Some(layer) if head => {
                let context = Context::new(2)?;
                let shape = [config.n_embd, n_slots as i64, N_SEQS];
                let hidden = context.new_tensor("head_hidden", DType::F32, &shape);
                let shape = [config.n_embd, MAX_OWED as i64];
                let owed = context.new_tensor("head_owed", DType::F32, &shape);
                context.allocate(backend, "the draft head's hidden state")?;
                Some(HeadState {
                    kv: kv_cache(layer, config.n_layer())?,
                    hidden,
                    owed,
                })
            }
            _ => None,
        };
        Ok(Self {
            layers,
            head,
            n_cells,
            n_slots,
        })
    }

    /// States of the newest tokens that are kept: as many tokens less one can be taken back.
    pub fn n_slots(&self) -> usize {
        self.n_slots
    }

    /// Tokens that there is room for.
    pub fn n_cells(&self) -> usize {
        self.n_cells
    }

    /// Makes room for `n_cells` tokens, keeping the first `n_past`. One layer at a time is copied, so that at
    /// most one layer's keys and values exist twice.
    ///
    /// # Errors
    /// When memory runs out; the state is then still whole, with the room that it had.
    pub fn grow(&mut self, backend: &Backend, n_cells: usize, n_past: usize) -> Result<()> {
        let n_cells = n_cells.next_multiple_of(KV_PAD);
        for cache in self.caches_mut() {
            cache.grow(backend, n_cells, n_past)?;
        }
        self.n_cells = n_cells;
        Ok(())
    }

    fn caches_mut(&mut self) -> impl Iterator<Item = &mut KvCache> {
        let layers = self.layers.iter_mut().filter_map(|layer| match layer {
            LayerState::Attention(kv) => Some(kv),
            LayerState::DeltaNet(_) => None,
        });
        layers.chain(self.head.iter_mut().map(|head| &mut head.kv))
    }

    /// Everything of constant size: the parts that are the state when the newest `back` tokens do not count.
    fn parts(&self, back: usize) -> Vec<Part<'_>> {
        let mut parts = Vec::new();
        for layer in &self.layers {
            if let LayerState::DeltaNet(net) = layer {
                parts.extend([net.window(back), net.state(back)]);
            }
        }
        if let Some(head) = &self.head {
            let n = head.hidden.ne(0) as usize;
            parts.push(Part {
                tensor: &head.hidden,
                first: n * (self.n_slots - 1 - back),
                n,
                stride: n,
                n_pieces: 1,
            });
        }
        parts
    }

    /// Tensors with a row for each token.
    fn rows(&self) -> Vec<&Tensor> {
        let layers = self.layers.iter().filter_map(|layer| match layer {
            LayerState::Attention(kv) => Some(kv),
            LayerState::DeltaNet(_) => None,
        });
        let caches = layers.chain(self.head.iter().map(|head| &head.kv));
        caches.flat_map(|kv| [&kv.k, &kv.v]).collect()
    }

    /// Bytes of keys and values, of the rest, and how many of the rest only serve to take tokens back.
    pub fn bytes(&self) -> (usize, usize, usize) {
        let rows = self.rows().iter().map(|t| t.bytes()).sum();
        let (mut all, mut needed) = (0, 0);
        for part in self.parts(0) {
            all += part.tensor.bytes();
            needed += part.bytes();
        }
        if let Some(head) = &self.head {
            all += head.owed.bytes();
            needed += head.owed.bytes();
        }
        (rows, all, all - needed)
    }

    /// Bytes of the largest tensor that has a row for each token.
    pub fn largest_rows(&self) -> usize {
        let sizes = self.rows().into_iter().map(Tensor::bytes);
        sizes.max().unwrap_or(0)
    }

    /// Copies what the first `n_past` tokens left behind, `back` tokens before the newest.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn save(&self, n_past: usize, back: usize) -> Result<SavedState> {
        let mut parts = Vec::new();
        for part in self.parts(back) {
            parts.push(part.read()?);
        }
        for tensor in self.rows() {
            parts.push(read(tensor, n_past * tensor.nb(1))?);
        }
        Ok(SavedState {
            n_past,
            form: self.form(),
            parts,
        })
    }

    /// A saved state of this shape, from its parts.
    ///
    /// # Errors
    /// When these are not the parts that `n_past` tokens leave behind here.
    pub fn saved(&self, n_past: usize, parts: Vec<Vec<u8>>) -> Result<SavedState> {
        let (n_whole, form) = (self.parts(0).len(), self.form());
        let fits = |(i, (part, (_, bytes))): (usize, (&Vec<u8>, &(DType, usize)))| {
            let rows = if i < n_whole { 1 } else { n_past };
            part.len() == bytes * rows
        };
        ensure!(
            parts.len() == form.len() && parts.iter().zip(&form).enumerate().all(fits),
            "the saved state has another shape than this session's"
        );
        Ok(SavedState {
            n_past,
            form,
            parts,
        })
    }

    /// Bytes that [`State::save`] would copy.
    pub fn saved_bytes(&self, n_past: usize) -> usize {
        let parts: usize = self.parts(0).iter().map(Part::bytes).sum();
        let row: usize = self.rows().iter().map(|t| t.nb(1)).sum();
        parts + n_past * row
    }

    /// Type and bytes of every part, of one row where the number of rows grows.
    fn form(&self) -> Vec<(DType, usize)> {
        let whole = self.parts(0);
        let whole = whole.iter().map(|p| (p.tensor.dtype(), p.bytes()));
        let rows = self.rows();
        let rows = rows.iter().map(|t| (t.dtype(), t.nb(1)));
        whole.chain(rows).collect()
    }

    /// Checks that a saved state can be put back here, given enough room.
    ///
    /// # Errors
    /// When it was saved from a state of another shape or with other types.
    pub fn check_shape(&self, saved: &SavedState) -> Result<()> {
        ensure!(
            saved.form == self.form(),
            "the saved state has another shape or other key and value types than this session's"
        );
        Ok(())
    }

    /// Puts a saved state back, as that of the newest token; there must be room for its tokens.
    ///
    /// # Errors
    /// When it was saved from a state of another shape, or the device cannot be written.
    pub fn load(&mut self, saved: &SavedState) -> Result<()> {
        self.check_shape(saved)?;
        ensure!(
            saved.n_past <= self.n_cells,
            "the saved state has {} tokens, this session room for {}",
            saved.n_past,
            self.n_cells
        );
        let parts = self.parts(0);
        let (whole, rows) = saved.parts.split_at(parts.len());
        for (part, bytes) in parts.iter().zip(whole) {
            part.write(bytes)?;
        }
        for (tensor, bytes) in self.rows().into_iter().zip(rows) {
            tensor.write_bytes(0, bytes)?;
        }
        Ok(())
    }

    /// Forgets everything.
    ///
    /// # Errors
    /// When the device cannot be written.
    pub fn clear(&mut self) -> Result<()> {
        // Keys and values beyond `n_past` are never looked at, so only the rest needs zeros.
        for part in self.parts(0) {
            part.write(&vec![0; part.bytes()])?;
        }
        Ok(())
    }
}

impl Part<'_> {
    fn bytes(&self) -> usize {
        self.n * self.n_pieces * F32_BYTES
    }

    /// Bytes from the first element of the part to the end of its last.
    fn span(&self) -> usize {
        ((self.n_pieces - 1) * self.stride + self.n) * F32_BYTES
    }

    fn read(&self) -> Result<Vec<u8>> {
        let mut span = vec![0; self.span()];
        self.tensor
            .read_bytes(self.first * F32_BYTES, &mut span)
            .context("reading the state")?;
        if self.n_pieces == 1 {
            return Ok(span);
        }
        let pieces = span.chunks(self.stride * F32_BYTES);
        Ok(pieces
            .flat_map(|piece| &piece[..self.n * F32_BYTES])
            .copied()
            .collect())
    }

    fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut span;
        let bytes = if self.n_pieces == 1 {
            bytes
        } else {
            span = vec![0; self.span()];
            let pieces = span.chunks_mut(self.stride * F32_BYTES);
            for (to, from) in pieces.zip(bytes.chunks(self.n * F32_BYTES)) {
                to[..from.len()].copy_from_slice(from);
            }
            &span
        };
        self.tensor
            .write_bytes(self.first * F32_BYTES, bytes)
            .context("writing the state")
    }
}

fn read(tensor: &Tensor, bytes: usize) -> Result<Vec<u8>> {
    let mut data = vec![0; bytes];
    tensor
        .read_bytes(0, &mut data)
        .context("reading the state")?;
    Ok(data)
}

/// A copy of a state in host memory.
#[derive(Clone)]
pub struct SavedState {
    n_past: usize,
    form: Vec<(DType, usize)>,
    parts: Vec<Vec<u8>>,
}

impl SavedState {
    /// Tokens that it covers.
    pub fn n_past(&self) -> usize {
        self.n_past
    }

    /// What it consists of, in the order of the layers: states first, then keys and values.
    pub fn parts(&self) -> &[Vec<u8>] {
        &self.parts
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }
}

impl KvCache {
    fn new(
        backend: &Backend,
        types: KvTypes,
        rotations: Rotations,
        width: i64,
        n_cells: usize,
        il: usize,
    ) -> Result<Self> {
        let shape = [width, n_cells as i64 * N_SEQS];
        Ok(Self {
            rotations,
            k: allocate(backend, &format!("cache_k-{il}"), types.k, &shape)?,
            v: allocate(backend, &format!("cache_v-{il}"), types.v, &shape)?,
        })
    }

    fn grow(&mut self, backend: &Backend, n_cells: usize, n_past: usize) -> Result<()> {
        for tensor in [&mut self.k, &mut self.v] {
            if tensor.ne(1) as usize >= n_cells {
                continue;
            }
            let shape = [tensor.ne(0), n_cells as i64 * N_SEQS];
            let larger = allocate(backend, &tensor.name(), tensor.dtype(), &shape)?;
            if !backend.plans() {
                larger.write_bytes(0, &read(tensor, n_past * tensor.nb(1))?)?;
            }
            *tensor = larger;
        }
        Ok(())
    }
}

impl Rotations {
    fn new(head_dim: i64, backend: &Backend, types: KvTypes) -> Result<Self> {
        let for_type = |dtype: DType, n: i64| {
            let turns = dtype.is_quantized() && head_dim % MIN_ROTATION == 0;
            turns.then(|| hadamard(backend, n)).transpose()
        };
        let largest = 1 << head_dim.trailing_zeros();
        Ok(Self {
            k: for_type(types.k, largest)?,
            v: for_type(types.v, MIN_ROTATION)?,
        })
    }
}

/// The Walsh-Hadamard matrix of `n` rows, a power of two: the sign of an entry is the parity of the bits that its
/// row and its column share.
fn hadamard(backend: &Backend, n: i64) -> Result<Tensor> {
    let tensor = allocate(backend, &format!("hadamard_{n}"), DType::F32, &[n, n])?;
    if backend.plans() {
        return Ok(tensor);
    }
    let size = 1.0 / (n as f32).sqrt();
    let entry = |i: i64| {
        if ((i / n) & (i % n)).count_ones().is_multiple_of(2) {
            size
        } else {
            -size
        }
    };
    tensor.write(&(0..n * n).map(entry).collect::<Vec<f32>>())?;
    Ok(tensor)
}

impl DeltaNetState {
    fn new(config: &Config, backend: &Backend, n_slots: usize, il: usize) -> Result<Self> {
        let ssm = &config.ssm;
        let n_out = ssm.head_dim * ssm.n_v_heads * N_SEQS;
        let n_state = ssm.head_dim * n_out;
        let n_window = ssm.conv_kernel - 1;
        let slots = n_slots as i64;
        ensure!(
            n_slots == 1 || (n_out as usize * F32_BYTES).is_multiple_of(MAX_ALIGNMENT),
            "delta-net heads of {} values leave no place for several states",
            ssm.head_dim
        );
        let context = Context::new(2)?;
        let conv = context.new_tensor(
            &format!("cache_conv-{il}"),
            DType::F32,
            &[n_window + slots - 1, ssm.conv_dim(), N_SEQS],
        );
        let memory = context.new_tensor(
            &format!("delta_net_memory-{il}"),
            DType::F32,
            &[slots * (n_out + n_state)],
        );
        context.allocate(backend, "recurrent state")?;
        Ok(Self {
            conv,
            memory,
            n_out: n_out as usize,
            n_state: n_state as usize,
            n_window: n_window as usize,
            n_slots,
        })
    }

    /// Inputs that the convolution's window of slot `back` begins after.
    pub fn window_start(&self, back: usize) -> usize {
        self.n_slots - 1 - back
    }

    /// Element of [`DeltaNetState::memory`] at which slot `back` begins.
    pub fn state_start(&self, back: usize) -> usize {
        self.n_slots * self.n_out + back * self.n_state
    }

    /// Element of [`DeltaNetState::memory`] at which the outputs of `n_tokens` tokens begin, so that their states
    /// fall on the slots.
    pub fn outputs_start(&self, n_tokens: usize) -> usize {
        (self.n_slots - n_tokens) * self.n_out
    }

    fn window(&self, back: usize) -> Part<'_> {
        Part {
            tensor: &self.conv,
            first: self.window_start(back),
            n: self.n_window,
            stride: self.conv.ne(0) as usize,
            n_pieces: (self.conv.ne(1) * N_SEQS) as usize,
        }
    }

    fn state(&self, back: usize) -> Part<'_> {
        Part {
            tensor: &self.memory,
            first: self.state_start(back),
            n: self.n_state,
            stride: self.n_state,
            n_pieces: 1,
        }
    }
}

fn allocate(backend: &Backend, name: &str, dtype: DType, shape: &[i64]) -> Result<Tensor> {
    let context = Context::new(1)?;
    let tensor = context.new_tensor(name, dtype, shape);
    context.allocate(backend, "keys and values")?;
    Ok(tensor)
}
