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

/// The recurrent state of one layer, in F32.
pub struct DeltaNetState {
    /// The last inputs of the convolution, `[conv_kernel - 1, conv_dim, n_seqs]`.
    pub conv: Tensor,
    /// `[head_dim, head_dim, n_v_heads, n_seqs]`
    pub s: Tensor,
}

/// The draft head's state.
pub struct HeadState {
    /// Cell `t` holds the entry made from the token at `t` and the hidden state at `t - 1`; cell 0 is unused.
    pub kv: KvCache,
    /// The trunk's normed hidden state at the last token, `[n_embd, n_seqs]`, F32.
    pub hidden: Tensor,
}

/// Types of the keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvTypes {
    /// Type of the keys.
    pub k: DType,
    /// Type of the values.
    pub v: DType,
}

impl State {
    /// A zeroed state with room for `n_cells` tokens.
    ///
    /// # Errors
    /// When memory runs out, or a head does not fill whole blocks of the key or value type.
    pub fn new(
        config: &Config,
        backend: &Backend,
        types: KvTypes,
        n_cells: usize,
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
                LayerState::DeltaNet(DeltaNetState::new(config, backend, il)?)
            } else {
                LayerState::Attention(kv_cache(layer, il)?)
            });
        }
        let head = match &config.mtp {
            Some(layer) if head => {
                let context = Context::new(1)?;
                let hidden =
                    context.new_tensor("head_hidden", DType::F32, &[config.n_embd, N_SEQS]);
                context.allocate(backend, "the draft head's hidden state")?;
                Some(HeadState {
                    kv: kv_cache(layer, config.n_layer())?,
                    hidden,
                })
            }
            _ => None,
        };
        Ok(Self {
            layers,
            head,
            n_cells,
        })
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

    /// Tensors whose whole content is state, and tensors of which the first `n_past` rows are.
    fn tensors(&self) -> (Vec<&Tensor>, Vec<&Tensor>) {
        let (mut whole, mut rows) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            match layer {
                LayerState::Attention(kv) => rows.extend([&kv.k, &kv.v]),
                LayerState::DeltaNet(net) => whole.extend([&net.conv, &net.s]),
            }
        }
        if let Some(head) = &self.head {
            whole.push(&head.hidden);
            rows.extend([&head.kv.k, &head.kv.v]);
        }
        (whole, rows)
    }

    /// Bytes of keys and values, and of the rest.
    pub fn bytes(&self) -> (usize, usize) {
        let (whole, rows) = self.tensors();
        let sum = |tensors: Vec<&Tensor>| tensors.iter().map(|t| t.bytes()).sum();
        (sum(rows), sum(whole))
    }

    /// Copies what the first `n_past` tokens left behind.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn save(&self, n_past: usize) -> Result<SavedState> {
        let (whole, rows) = self.tensors();
        let mut parts = Vec::with_capacity(whole.len() + rows.len());
        for tensor in whole {
            parts.push(read(tensor, tensor.bytes())?);
        }
        for tensor in rows {
            parts.push(read(tensor, n_past * tensor.nb(1))?);
        }
        Ok(SavedState {
            n_past,
            form: self.form(),
            parts,
        })
    }

    /// Type and bytes of every tensor, of one row where the number of rows grows.
    fn form(&self) -> Vec<(DType, usize)> {
        let (whole, rows) = self.tensors();
        let whole = whole.into_iter().map(|t| (t.dtype(), t.bytes()));
        whole
            .chain(rows.into_iter().map(|t| (t.dtype(), t.nb(1))))
            .collect()
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

    /// Puts a saved state back; there must be room for its tokens.
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
        let (whole, rows) = self.tensors();
        for (tensor, part) in whole.into_iter().chain(rows).zip(&saved.parts) {
            tensor.write_bytes(0, part)?;
        }
        Ok(())
    }

    /// Forgets everything.
    ///
    /// # Errors
    /// When the device cannot be written.
    pub fn clear(&mut self) -> Result<()> {
        // Keys and values beyond `n_past` are never looked at, so only the rest needs zeros.
        for tensor in self.tensors().0 {
            tensor.write_bytes(0, &vec![0; tensor.bytes()])?;
        }
        Ok(())
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
            larger.write_bytes(0, &read(tensor, n_past * tensor.nb(1))?)?;
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
    fn new(config: &Config, backend: &Backend, il: usize) -> Result<Self> {
        let ssm = &config.ssm;
        let context = Context::new(2)?;
        let conv = context.new_tensor(
            &format!("cache_conv-{il}"),
            DType::F32,
            &[ssm.conv_kernel - 1, ssm.conv_dim(), N_SEQS],
        );
        let s = context.new_tensor(
            &format!("cache_s-{il}"),
            DType::F32,
            &[ssm.head_dim, ssm.head_dim, ssm.n_v_heads, N_SEQS],
        );
        context.allocate(backend, "recurrent state")?;
        Ok(Self { conv, s })
    }
}

fn allocate(backend: &Backend, name: &str, dtype: DType, shape: &[i64]) -> Result<Tensor> {
    let context = Context::new(1)?;
    let tensor = context.new_tensor(name, dtype, shape);
    context.allocate(backend, "keys and values")?;
    Ok(tensor)
}
