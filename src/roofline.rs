//! What speed to expect: bytes that a token reads, over the rate at which a device gets through them.
//!
//! Decoding reads every active weight once for each pass. How fast a device does that is measured with its own
//! kernels, for each type and for passes of several tokens; what a layer takes besides is a constant, found from the
//! rows of docs/PERFORMANCE.md, which are all met within 15 %.

use std::time::Instant;

use anyhow::Result;
use ggml_metal::{Backend, Context, DType, DeviceKind, Graph};

use crate::model::shapes::Synthetic;
use crate::model::{Config, ModelFiles};

/// Passes that are measured: of one token up to this many.
pub const WIDTHS: usize = 5;
/// Types that are measured. Others count as the one with the nearest number of bits.
const TYPES: [DType; 4] = [DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::BF16];
/// Share of a device's copy bandwidth that products with one vector reach (H200).
const SHARE_OF_COPIES: f64 = 0.48;
/// How much longer products with several vectors take there.
const WIDER: [f64; WIDTHS] = [1.0, 1.23, 1.73, 2.22, 2.71];
/// What a layer takes besides its weights, in seconds: some thirty small kernels on a GPU (H200), the
/// threads' meetings on a CPU (two cores).
const LAYER_ON_GPU: f64 = 55e-6;
const LAYER_ON_CPU: f64 = 20e-6;
/// Share of guesses that are right, at each place.
const ACCEPTANCE: f64 = 0.75;

/// How fast a device gets through memory and weights.
#[derive(Clone, Debug)]
pub struct Rates {
    /// Bytes read and written by a copy, a second.
    pub copy: f64,
    /// Bytes of weights a second in products with one vector, with two, ...
    pub weights: Vec<(DType, [f64; WIDTHS])>,
    /// What a layer takes besides, in seconds.
    pub layer: f64,
}

impl Rates {
    /// Measures a device, in about two seconds.
    ///
    /// # Errors
    /// When it has not some hundred MiB of memory, or fails.
    pub fn measure(backend: &Backend) -> Result<Self> {
        let is_gpu = backend.device().kind() == DeviceKind::Gpu;
        let bytes = sample_bytes(backend);
        let copy = copy_bandwidth(backend)?;
        let mut weights = Vec::with_capacity(TYPES.len());
        for dtype in TYPES {
            let n_rows = bytes / dtype.row_bytes(N_IN);
            let shape = [N_IN as i64, n_rows as i64];
            let mut rates = [0.0; WIDTHS];
            for (i, rate) in rates.iter_mut().enumerate() {
                let seconds = fastest(backend, dtype, shape, Some(i as i64 + 1))?;
                *rate = (n_rows * dtype.row_bytes(N_IN)) as f64 / seconds;
            }
            weights.push((dtype, rates));
        }
        Ok(Self {
            copy,
            weights,
            layer: if is_gpu { LAYER_ON_GPU } else { LAYER_ON_CPU },
        })
    }

    /// Those of a device that is not here, from its bandwidth in bytes a second and what was measured on a GPU.
    pub fn of_bandwidth(bandwidth: f64) -> Self {
        let rates = WIDER.map(|longer| bandwidth * SHARE_OF_COPIES / longer);
        Self {
            copy: bandwidth,
            weights: TYPES.map(|dtype| (dtype, rates)).to_vec(),
            layer: LAYER_ON_GPU,
        }
    }

    /// The same, slower or faster by a factor in all.
    pub fn scaled(mut self, factor: f64) -> Self {
        for (_, rates) in &mut self.weights {
            *rates = rates.map(|rate| rate * factor);
        }
        self.layer /= factor;
        self
    }

    /// Bytes of weights of a type that a pass of `width` tokens gets through in a second.
    fn of(&self, dtype: DType, width: usize) -> f64 {
        let bits = |t: DType| t.block_bytes() as f64 / t.block_size() as f64;
        let nearest = self.weights.iter().min_by(|a, b| {
            let far = |t: DType| (bits(t) - bits(dtype)).abs();
            far(a.0).total_cmp(&far(b.0))
        });
        nearest.map_or(self.copy, |(_, rates)| rates[width.clamp(1, WIDTHS) - 1])
    }
}

/// Columns of the matrices that are measured.
const N_IN: usize = 4096;

/// Bytes well beyond the caches.
fn sample_bytes(backend: &Backend) -> usize {
    match backend.device().kind() {
        DeviceKind::Gpu => 512 << 20,
        _ => 256 << 20,
    }
}

/// Bytes that a copy on the device reads and writes in a second.
///
/// # Errors
/// When it has not some hundred MiB of memory, or fails.
pub fn copy_bandwidth(backend: &Backend) -> Result<f64> {
    let bytes = sample_bytes(backend);
    let n_rows = bytes / DType::F32.row_bytes(N_IN);
    let seconds = fastest(backend, DType::F32, [N_IN as i64, n_rows as i64], None)?;
    Ok(2.0 * bytes as f64 / seconds)
}

/// The shortest time of one operation on a matrix of `shape`, in seconds: its product with so many vectors, or a copy.
fn fastest(
    backend: &Backend,
    dtype: DType,
    shape: [i64; 2],
    n_vectors: Option<i64>,
) -> Result<f64> {
    // Several in one graph, so that its start hardly counts.
    const AT_ONCE: usize = 4;
    const TIMES: usize = 4;
    let filled = |name: &str| -> Result<ggml_metal::Tensor> {
        let memory = Context::new(1)?;
        let matrix = memory.new_tensor(name, dtype, &shape);
        memory.allocate(backend, "a matrix to measure with")?;
        // Memory that was never written to is one page of zeros in the cache.
        let row: Vec<f32> = (0..shape[0]).map(|i| (i as f32).sin()).collect();
        let row = dtype.quantize(&row, shape[0] as usize, None)?;
        let rows = row.repeat((shape[1] as usize).min(1024));
        for (start, n) in (0..matrix.bytes())
            .step_by(rows.len())
            .map(|start| (start, rows.len().min(matrix.bytes() - start)))
        {
            matrix.write_bytes(start, &rows[..n])?;
        }
        Ok(matrix)
    };
    let matrix = filled("matrix")?;
    let context = Context::new(8 * AT_ONCE)?;
    match n_vectors {
        Some(n) => {
            let vectors = context.input("vectors", DType::F32, &[shape[0], n]);
            for _ in 0..AT_ONCE {
                context.expand(&context.mul_mat(&matrix, &vectors));
            }
        }
        None => {
            let other = filled("other")?;
            for _ in 0..AT_ONCE / 2 {
                context.expand(&context.cpy(&matrix, &other));
                context.expand(&context.cpy(&other, &matrix));
            }
        }
    }
    let mut graph = Graph::new(context, std::slice::from_ref(backend))?;
    let mut best = f64::INFINITY;
    for _ in 0..TIMES {
        let start = Instant::now();
        graph.compute()?;
        best = best.min(start.elapsed().as_secs_f64() / AT_ONCE as f64);
    }
    Ok(best)
}

/// What passes of a model read.
#[derive(Clone, Debug, Default)]
pub struct Reads {
    bytes: u64,
    /// Bytes by type that every pass reads.
    always: Vec<(DType, u64)>,
    /// Bytes by type of all experts.
    experts: Vec<(DType, u64)>,
    /// Experts, and those that a token visits.
    n_experts: (f64, f64),
    /// What a draft step reads: the head's block and the output matrix.
    draft: Vec<(DType, u64)>,
    draft_experts: Vec<(DType, u64)>,
    n_layer: usize,
}

impl Reads {
    /// Of a model of these shapes.
    ///
    /// # Errors
    /// When the types of its tensors cannot be chosen.
    pub fn of_shape(model: &Synthetic) -> Result<Self> {
        let list = model.tensors()?;
        let tensors = list.iter().map(|t| (t.name.as_str(), t.dtype, t.bytes()));
        Ok(Self::of(&model.shape.config(), tensors))
    }

    /// Of a model's files.
    pub fn of_files(files: &ModelFiles) -> Self {
        let list = files.all().flat_map(|file| file.tensors());
        let tensors = list.map(|t| (t.name.as_str(), t.dtype, t.bytes as u64));
        Self::of(&files.config, tensors)
    }

    fn of<'a>(config: &Config, tensors: impl Iterator<Item = (&'a str, DType, u64)>) -> Self {
        let block = format!("blk.{}.", config.n_layer());
        let mut reads = Self {
            n_experts: config
                .moe
                .map_or((1.0, 1.0), |m| (m.n_expert as f64, m.n_expert_used as f64)),
            n_layer: config.n_layer(),
            ..Self::default()
        };
        // Of an embedding a pass reads a few rows, unless it is the output matrix too.
        let (mut embedding, mut output) = (None, None);
        for (name, dtype, bytes) in tensors {
            let entry = (dtype, bytes);
            reads.bytes += bytes;
            match name {
                "token_embd.weight" => embedding = Some(entry),
                "output.weight" => output = Some(entry),
                _ => {
                    let of_head = name.starts_with(&block);
                    let list = match (of_head, name.ends_with("_exps.weight")) {
                        (false, false) => &mut reads.always,
                        (false, true) => &mut reads.experts,
                        (true, false) => &mut reads.draft,
                        (true, true) => &mut reads.draft_experts,
                    };
                    list.push(entry);
                }
            }
        }
        let output = output.or(embedding);
        reads.always.extend(output);
        reads.draft.extend(output);
        reads
    }

    /// Bytes of all weights.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that a token reads.
    pub fn active_bytes(&self) -> u64 {
        let sum = |list: &[(DType, u64)]| list.iter().map(|(_, bytes)| bytes).sum::<u64>();
        sum(&self.always) + (sum(&self.experts) as f64 * self.visited(1)) as u64
    }

    /// Share of the experts that some of `width` tokens visit, if they choose independently.
    fn visited(&self, width: usize) -> f64 {
        let (all, used) = self.n_experts;
        1.0 - (1.0 - used / all).powi(width as i32)
    }

    /// Seconds of a pass of `width` tokens.
    pub fn pass(&self, rates: &Rates, width: usize) -> f64 {
        let always = seconds(&self.always, rates, width);
        // Different tokens hardly share experts, so each is a product with one vector.
        let experts = seconds(&self.experts, rates, 1) * self.visited(width);
        always + experts + self.n_layer as f64 * rates.layer
    }

    /// Seconds of a draft step.
    pub fn draft(&self, rates: &Rates) -> f64 {
        seconds(&self.draft, rates, 1)
            + seconds(&self.draft_experts, rates, 1) * self.visited(1)
            + rates.layer
    }

    /// Tokens a second without speculation.
    pub fn plain(&self, rates: &Rates) -> f64 {
        1.0 / self.pass(rates, 1)
    }

    /// Tokens a second with the number of guesses that is best, and that number, where three of four guesses are
    /// right at each place.
    pub fn guessing(&self, rates: &Rates) -> (f64, usize) {
        let speed = |depth: usize| {
            let tokens: f64 = (0..=depth).map(|i| ACCEPTANCE.powi(i as i32)).sum();
            tokens / (self.pass(rates, depth + 1) + depth as f64 * self.draft(rates))
        };
        let depths = (0..WIDTHS).map(|depth| (speed(depth), depth));
        let best = depths.max_by(|a, b| a.0.total_cmp(&b.0));
        best.unwrap_or((self.plain(rates), 0))
    }
}

fn seconds(list: &[(DType, u64)], rates: &Rates, width: usize) -> f64 {
    let parts = list
        .iter()
        .map(|&(dtype, bytes)| bytes as f64 / rates.of(dtype, width));
    parts.sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::Path;

    use super::*;

    fn reads(name: &str) -> Reads {
        Reads::of_shape(&Synthetic::parse(Path::new(name)).unwrap().unwrap()).unwrap()
    }

    /// Rows of docs/PERFORMANCE.md: an H200, whose copies reach 4.3 TB/s.
    #[test]
    fn measured_speeds_are_met() {
        let rates = Rates::of_bandwidth(4.3e12);
        for (name, measured) in [
            ("synthetic:0.8b:q4_k_m", 701.2),
            ("synthetic:2b:q4_k_m", 542.6),
            ("synthetic:4b:q4_k_m", 301.0),
            ("synthetic:9b:q4_k_m", 234.4),
            ("synthetic:27b:q4_k_m", 82.1),
            ("synthetic:35b-a3b:q4_k_m", 285.7),
        ] {
            let expected = reads(name).plain(&rates);
            let ratio = expected / measured;
            println!("{name}: expected {expected:.1}, measured {measured}: {ratio:.2}");
            assert!((0.85..1.15).contains(&ratio), "{name}: {expected}");
        }
    }

    #[test]
    fn bytes_are_those_of_the_file() {
        for name in ["synthetic:0.8b:q4_k_m", "synthetic:35b-a3b:q6_k"] {
            let files = crate::model::ModelFiles::outline(Path::new(name), None).unwrap();
            let reads = reads(name);
            assert_eq!(reads.bytes(), files.tensor_bytes() as u64, "{name}");
            assert_eq!(reads.active_bytes(), Reads::of_files(&files).active_bytes());
            assert!(reads.active_bytes() < reads.bytes());
        }
    }

    #[test]
    fn an_expert_is_read_once_for_the_tokens_that_visit_it() {
        let moe = reads("synthetic:35b-a3b:q4_k_m");
        assert!((moe.visited(1) - 8.0 / 256.0).abs() < 1e-9);
        assert!(moe.visited(4) < 4.0 * 8.0 / 256.0);
        assert!(moe.visited(4) > 3.5 * 8.0 / 256.0);
        // "A3B": some three billion parameters of 35 are active.
        let dense = reads("synthetic:27b:q4_k_m");
        assert!(moe.active_bytes() * 6 < dense.active_bytes());
    }

    #[test]
    fn guessing_never_expects_less_than_plain_decoding() {
        let model = reads("synthetic:9b:q4_k_m");
        let rates = Rates::of_bandwidth(400e9);
        let (speed, depth) = model.guessing(&rates);
        assert!(depth > 0 && speed > model.plain(&rates));
        // Where wider passes cost as much as single ones for each token, nothing is gained.
        let mut narrow = rates;
        for (_, rates) in &mut narrow.weights {
            for (i, rate) in rates.iter_mut().enumerate() {
                *rate = 1e10 / (i + 1) as f64;
            }
        }
        assert_eq!(model.guessing(&narrow).1, 0);
    }
}
