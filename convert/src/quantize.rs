//! Quantization: a model in, the same model with other tensor types out, a slab of rows at a time.
//!
//! Tensors are read from the map and converted in slabs; the rows of a slab are spread over the threads, and the slab
//! before is written meanwhile. Memory stays at a few slabs whatever the model's size.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::mpsc;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use ggml_metal::{DType, Gguf, GgufWriter, TensorInfo, Value, one_line};
use rayon::prelude::*;

use crate::imatrix::Imatrix;
use crate::k_quants;
use crate::output::{Interrupted, OutputFile, check_apart};
use crate::parts;
use crate::recipe::{self, FileType, Overrides, Shape, Subject};

/// Version of ggml's quantized formats, `general.quantization_version`.
const FORMAT_VERSION: i128 = 2;
/// Values that one thread converts at a time: their floats stay in its cache.
const CHUNK: usize = 1 << 14;
/// Padding between tensors.
static ZEROS: [u8; GgufWriter::ALIGNMENT] = [0; GgufWriter::ALIGNMENT];
/// Values converted between two writes.
const SLAB: usize = 1 << 23;

/// How to quantize.
#[derive(Clone, Debug)]
pub struct Options {
    /// The mixture.
    pub file_type: FileType,
    /// What else was asked for.
    pub overrides: Overrides,
    /// Importance of columns, with the name of its file.
    pub imatrix: Option<(String, Imatrix)>,
    /// Convert tensors that are quantized already, which loses twice.
    pub allow_requantize: bool,
    /// Threads.
    pub n_threads: usize,
}

/// What happens to one tensor.
pub struct Step<'a> {
    /// The file that holds it.
    pub file: &'a Gguf,
    /// The tensor as it is.
    pub tensor: &'a TensorInfo,
    /// The type that it gets.
    pub to: DType,
    importance: Option<Vec<f32>>,
}

impl Step<'_> {
    /// Bytes that it will take.
    pub fn bytes(&self) -> usize {
        let shape = &self.tensor.shape;
        let n_rows = shape[1..].iter().product::<i64>() as usize;
        n_rows * self.to.row_bytes(shape[0] as usize)
    }

    fn rows(&self) -> Rows<'_> {
        Rows {
            dtype: self.tensor.dtype,
            data: self.file.data(self.tensor),
            n_per_row: self.tensor.shape[0] as usize,
            per_matrix: self.tensor.shape[1] as usize,
        }
    }
}

/// What will be done to a model, checked.
pub struct Plan<'a> {
    options: &'a Options,
    parts: &'a [Gguf],
    steps: Vec<Step<'a>>,
}

impl<'a> Plan<'a> {
    /// Plans the quantization of a model, given as all its parts.
    ///
    /// # Errors
    /// When it is no model of the family, a tensor is quantized already or would need an importance matrix, or the
    /// importance matrix belongs to another model.
    pub fn new(parts: &'a [Gguf], options: &'a Options) -> Result<Self> {
        let Some(main) = parts.first() else {
            bail!("a model has at least one file");
        };
        let shape = Shape::read(main)?;
        let mut tensors: Vec<(&Gguf, &TensorInfo)> = parts
            .iter()
            .flat_map(|file| file.tensors().iter().map(move |t| (file, t)))
            .collect();
        tensors.sort_by(|a, b| recipe::order(&a.1.name, &b.1.name));
        if let Some(pair) = tensors.windows(2).find(|w| w[0].1.name == w[1].1.name) {
            bail!(
                "{}: tensor `{}` is there twice",
                pair[1].0.path().display(),
                one_line(&pair[1].1.name)
            );
        }
        let subjects: Vec<Subject> = tensors
            .iter()
            .map(|(_, t)| Subject {
                name: &t.name,
                shape: t.shape,
                dtype: t.dtype,
            })
            .collect();
        let types = recipe::types(
            options.file_type,
            &shape,
            &subjects,
            &options.overrides,
            options.imatrix.is_some(),
        )
        .with_context(|| main.path().display().to_string())?;
        let steps = tensors.into_iter().zip(types).map(|((file, tensor), to)| {
            let importance = options.importance(file, tensor, to)?;
            Ok(Step {
                file,
                tensor,
                to,
                importance,
            })
        });
        Ok(Self {
            options,
            parts,
            steps: steps.collect::<Result<_>>()?,
        })
    }

    /// What happens to each tensor, in the order in which they are written.
    pub fn steps(&self) -> &[Step<'a>] {
        &self.steps
    }

    /// Bytes of tensor data before and after.
    pub fn bytes(&self) -> (usize, usize) {
        let before = self.steps.iter().map(|s| s.tensor.bytes).sum();
        (before, self.steps.iter().map(Step::bytes).sum())
    }

    /// Matrices whose rows the mixture's main type does not divide.
    pub fn n_misfits(&self) -> usize {
        let block = self.options.file_type.base().block_size().max(1) as i64;
        let misfits = self.steps.iter().filter(|s| {
            recipe::is_quantized(&s.tensor.name, &s.tensor.shape) && s.tensor.shape[0] % block != 0
        });
        misfits.count()
    }

    /// Quantizes to `path`. `progress` is told bytes read and in all, and stops the work by returning false.
    ///
    /// # Errors
    /// When a tensor holds values that are not finite, the file cannot be written, or `progress` stopped it (then
    /// the error is [`Interrupted`]). Nothing is left behind, and the input stays as it is.
    pub fn write(&self, path: &Path, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        check_apart(path, self.parts.iter().map(Gguf::path))?;
        let header = self.writer()?.header();
        let data: usize = self.steps.iter().map(|s| padded(s.bytes())).sum();
        let mut file = OutputFile::create(path, (header.len() + data) as u64)?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.options.n_threads)
            .build()
            .context("starting threads")?;

        let (full, to_write) = mpsc::sync_channel::<Cow<[u8]>>(1);
        let (written, spare) = mpsc::channel::<Vec<u8>>();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                file.write_all(&header)?;
                for data in to_write {
                    file.write_all(&data)?;
                    if let Cow::Owned(buffer) = data {
                        // The other side may have ended.
                        let _ = written.send(buffer);
                    }
                }
                std::io::Result::Ok(())
            });
            // A send fails where the writer failed, which is the error to report.
            let made = self.make(&pool, progress, &spare, &mut |data| full.send(data).is_ok());
            drop(full);
            match writer.join() {
                Ok(result) => result.with_context(|| format!("writing {}", path.display()))?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
            made
        })?;
        for part in self.parts {
            part.map().check_length()?;
        }
        file.finish()
    }

    /// The new file's header.
    fn writer(&self) -> Result<GgufWriter> {
        let mut writer = GgufWriter::new(self.steps.len())?;
        writer.copy_metadata(&self.parts[0]);
        writer.set("general.quantization_version", &Value::Int(FORMAT_VERSION))?;
        let number = self.options.file_type.number();
        writer.set("general.file_type", &Value::Int(number.into()))?;
        for key in parts::KEYS {
            writer.remove(key);
        }
        if let Some((name, imatrix)) = &self.options.imatrix {
            writer.set("quantize.imatrix.file", &Value::Str(cut(name)))?;
            if let Some(dataset) = imatrix.datasets.first() {
                writer.set("quantize.imatrix.dataset", &Value::Str(cut(dataset)))?;
            }
            let n_entries = imatrix.entries.len() as i128;
            writer.set("quantize.imatrix.entries_count", &Value::Int(n_entries))?;
            if imatrix.n_chunks > 0 {
                let n_chunks = Value::Int(imatrix.n_chunks.into());
                writer.set("quantize.imatrix.chunks_count", &n_chunks)?;
            }
        }
        for step in &self.steps {
            writer.add_tensor(&step.tensor.name, step.tensor.dims(), step.to)?;
        }
        Ok(writer)
    }

    /// Makes the data of all tensors and hands it to `put`, which returns false once it takes no more.
    fn make<'b>(
        &'b self,
        pool: &rayon::ThreadPool,
        progress: &mut dyn FnMut(u64, u64) -> bool,
        spare: &mpsc::Receiver<Vec<u8>>,
        put: &mut dyn FnMut(Cow<'b, [u8]>) -> bool,
    ) -> Result<()> {
        let total = self.bytes().0 as u64;
        let mut done = 0;
        for step in &self.steps {
            let rows = step.rows();
            let name = || {
                let path = step.file.path().display();
                format!("{path}: tensor `{}`", one_line(&step.tensor.name))
            };
            let n_rows = rows.n_rows();
            let slab = (SLAB / rows.n_per_row).max(1);
            for first in (0..n_rows).step_by(slab) {
                let range = first..(first + slab).min(n_rows);
                let (source, place) = rows.range(step, range.clone());
                let data = if step.to == step.tensor.dtype {
                    if !step.to.is_quantized() {
                        pool.install(|| rows.check(range)).with_context(name)?;
                    }
                    Cow::Borrowed(source)
                } else {
                    let mut buffer = spare.try_recv().unwrap_or_default();
                    buffer.resize(range.len() * step.to.row_bytes(rows.n_per_row), 0);
                    let importance = step.importance.as_deref();
                    pool.install(|| rows.convert(range.start, step.to, importance, &mut buffer))
                        .with_context(name)?;
                    Cow::Owned(buffer)
                };
                let copied = matches!(data, Cow::Borrowed(_));
                if !put(data) {
                    return Ok(());
                }
                if !copied {
                    step.file.map().release(place);
                }
                done += source.len() as u64;
                if !progress(done, total) {
                    return Err(Interrupted.into());
                }
            }
            // Not a buffer of its own: those written come back to be filled again.
            let padding = padded(step.bytes()) - step.bytes();
            if !put(Cow::Borrowed(&ZEROS[..padding])) {
                return Ok(());
            }
        }
        Ok(())
    }
}

impl Options {
    /// The importance of a tensor's columns, if there is one; checks that the tensor may be converted.
    fn importance(&self, file: &Gguf, tensor: &TensorInfo, to: DType) -> Result<Option<Vec<f32>>> {
        if to == tensor.dtype {
            return Ok(None);
        }
        let shown = || {
            let path = file.path().display();
            format!("{path}: tensor `{}`", one_line(&tensor.name))
        };
        let floats = [DType::F32, DType::F16, DType::BF16];
        ensure!(
            floats.contains(&tensor.dtype) || tensor.dtype.is_weight(),
            "{} is {}, which cannot be converted",
            shown(),
            tensor.dtype
        );
        ensure!(
            floats.contains(&tensor.dtype) || self.allow_requantize,
            "{} is {} already; start from an F16, BF16 or F32 file, or give --allow-requantize",
            shown(),
            tensor.dtype
        );
        let wanted = recipe::wants_imatrix(&tensor.name, to, self.file_type) || to.needs_imatrix();
        let Some((path, imatrix)) = &self.imatrix else {
            ensure!(
                !wanted,
                "{} would become {to}, which needs an importance matrix: give one with --imatrix",
                shown()
            );
            return Ok(None);
        };
        let Some(entry) = imatrix.entries.get(&tensor.name) else {
            ensure!(
                !wanted,
                "{} would become {to}, and {path} holds no importance of it: make one that does (`qrun imatrix`)",
                shown()
            );
            return Ok(None);
        };
        let means = entry.means();
        let expected = (tensor.shape[0] * tensor.shape[2]) as usize;
        if means.len() != expected {
            // The rows of an embedding are looked up, not multiplied.
            ensure!(
                tensor.name == "token_embd.weight",
                "{path}: importance of `{}` has {} values, expected {expected}; it was made for another model",
                one_line(&tensor.name),
                means.len()
            );
            return Ok(None);
        }
        Ok(Some(means))
    }
}

/// llama.cpp keeps 127 bytes of such a text.
fn cut(text: &str) -> String {
    let mut end = text.len().min(127);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(GgufWriter::ALIGNMENT)
}

/// Rows of a tensor in memory.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Their type.
    pub dtype: DType,
    /// Their bytes, without gaps.
    pub data: &'a [u8],
    /// Values in a row.
    pub n_per_row: usize,
    /// Rows that share a row of importance: those of one expert.
    pub per_matrix: usize,
}

impl<'a> Rows<'a> {
    /// Rows in all.
    pub fn n_rows(&self) -> usize {
        self.data.len() / self.dtype.row_bytes(self.n_per_row).max(1)
    }

    fn bytes(&self, rows: std::ops::Range<usize>) -> &'a [u8] {
        let row = self.dtype.row_bytes(self.n_per_row);
        &self.data[rows.start * row..rows.end * row]
    }

    /// The bytes of rows of a step's tensor, and where they lie in its file.
    fn range(
        &self,
        step: &Step,
        rows: std::ops::Range<usize>,
    ) -> (&'a [u8], std::ops::Range<usize>) {
        let start = step.tensor.offset + rows.start * self.dtype.row_bytes(self.n_per_row);
        let bytes = self.bytes(rows);
        (bytes, start..start + bytes.len())
    }

    /// Converts the rows from `first` on that `out` has room for to type `to`, on the threads of the current pool.
    /// `importance` has a row of `n_per_row` for each matrix.
    ///
    /// # Errors
    /// When lengths or types do not fit, a value is not finite, or the values are too large for the type.
    pub fn convert(
        &self,
        first: usize,
        to: DType,
        importance: Option<&[f32]>,
        out: &mut [u8],
    ) -> Result<()> {
        let n = self.n_per_row;
        let row_bytes = to.row_bytes(n).max(1);
        ensure!(
            out.len().is_multiple_of(row_bytes)
                && first + out.len() / row_bytes <= self.n_rows()
                && importance.is_none_or(|m| m.len() * self.per_matrix == n * self.n_rows()),
            "the lengths do not fit together"
        );
        let per_chunk = (CHUNK / n).max(1);
        out.par_chunks_mut(per_chunk * row_bytes)
            .enumerate()
            .try_for_each_init(Vec::new, |floats, (i, out)| {
                let mut row = first + i * per_chunk;
                let end = row + out.len() / row_bytes;
                self.floats(row..end, floats)?;
                let (mut floats, mut out) = (floats.as_slice(), out);
                while row < end {
                    let matrix = row / self.per_matrix;
                    // Experts have importance of their own.
                    let here = (end - row).min((matrix + 1) * self.per_matrix - row);
                    let (src, later_src) = floats.split_at(here * n);
                    let (dst, later_dst) = out.split_at_mut(here * row_bytes);
                    let importance = importance.map(|m| &m[matrix * n..(matrix + 1) * n]);
                    k_quants::quantize_into(to, src, n, importance, dst)?;
                    check_result(to, src, dst)?;
                    (floats, out, row) = (later_src, later_dst, row + here);
                }
                Ok(())
            })
    }

    /// Checks that all values are finite.
    fn check(&self, rows: std::ops::Range<usize>) -> Result<()> {
        let per_chunk = (CHUNK / self.n_per_row).max(1);
        (rows.start..rows.end)
            .into_par_iter()
            .step_by(per_chunk)
            .try_for_each_init(Vec::new, |floats, row| {
                self.floats(row..(row + per_chunk).min(rows.end), floats)
            })
    }

    /// The values of rows as floats.
    fn floats(&self, rows: std::ops::Range<usize>, out: &mut Vec<f32>) -> Result<()> {
        out.resize(rows.len() * self.n_per_row, 0.0);
        self.dtype.dequantize_into(self.bytes(rows), out)?;
        // Without an early exit the compiler checks many values at once.
        let broken = out.iter().fold(false, |bad, v| bad | !v.is_finite());
        ensure!(
            !broken,
            "holds values that are not finite; the file is damaged, fetch or make it again"
        );
        Ok(())
    }
}

/// Checks that nothing overflowed on the way to `to`.
fn check_result(to: DType, src: &[f32], dst: &[u8]) -> Result<()> {
    // What rounds to infinity.
    const BEYOND_F16: f32 = 65520.0;
    if to == DType::F16 && src.iter().any(|v| v.abs() >= BEYOND_F16) {
        return Err(anyhow!(
            "holds values too large for f16; take bf16 or a quantized type"
        ));
    }
    if to.is_quantized() && !to.is_valid(dst) {
        return Err(anyhow!("its values cannot be held by {to}"));
    }
    Ok(())
}

/// Tensors and bytes of each type among the results, for a summary.
pub fn by_type(steps: &[Step]) -> BTreeMap<&'static str, (usize, usize)> {
    let mut types = BTreeMap::new();
    for step in steps {
        let (n, bytes) = types.entry(step.to.name()).or_insert((0, 0));
        *n += 1;
        *bytes += step.bytes();
    }
    types
}
