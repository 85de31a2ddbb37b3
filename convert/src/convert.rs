//! Conversion: a Hugging Face checkpoint in, a GGUF file out, a slab of rows at a time.
//!
//! Everything is planned and checked from the headers first. Then tensor after tensor is read from the map, a
//! slab's rows spread over the threads, and the slab before written meanwhile; a tensor's pages are let go of when
//! it is done. Memory stays at a few slabs and one tensor, whatever the checkpoint's size.

use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use anyhow::{Context as _, Result, ensure};
use ggml_metal::{DType, GgufWriter, one_line};
use rayon::prelude::*;

use crate::checkpoint::{Checkpoint, Dtype};
use crate::hf_config::{HfConfig, Quantization};
use crate::k_quants::quantize_into;
use crate::map::{Mtp, Output, Rule, TensorMap};
use crate::metadata::{self, Meta, Metadata};
use crate::output::{ClosedFile, Interrupted, OutputFile, check_apart};
use crate::parts;
use crate::recipe::{self, FileType, Overrides, Shape, Subject};
use crate::rows::{Encoding, Source};
use crate::split::{self, Limit};
use crate::vocab;

/// Values that one thread converts at a time: their floats stay in its cache.
const CHUNK: usize = 1 << 14;
/// Values converted between two writes.
const SLAB: usize = 1 << 23;

/// How to convert.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Types of the tensors; none: the checkpoint's own.
    pub file_type: Option<FileType>,
    /// What to do with the draft head.
    pub mtp: Mtp,
    /// Tensor bytes of one file; none: one file.
    pub split_max_size: Option<u64>,
}

/// What a conversion will do, checked.
pub struct Plan {
    checkpoint: Checkpoint,
    file_type: FileType,
    outputs: Vec<Output>,
    types: Vec<DType>,
    metadata: Metadata,
    notes: Vec<String>,
    split_max_size: Option<u64>,
}

impl Plan {
    /// Plans the conversion of a folder or a safetensors file.
    ///
    /// # Errors
    /// When it is not a checkpoint of the family, is incomplete, contradicts itself, or cannot be given that type.
    pub fn new(input: &Path, options: Options) -> Result<Self> {
        let mut checkpoint = Checkpoint::open(input)?;
        let config = HfConfig::read(&checkpoint.dir)?;
        let mut map = TensorMap::make(&config, &checkpoint, options.mtp)?;
        let mut notes = std::mem::take(&mut checkpoint.notes);
        if let Some(note) = storage_note(&config, &checkpoint) {
            notes.push(note);
        }
        notes.append(&mut map.notes);

        let file_type = options
            .file_type
            .unwrap_or_else(|| own_type(&checkpoint, &map.outputs));
        let shape = Shape {
            n_layer: config.n_layer + map.n_mtp,
            n_mtp: map.n_mtp,
            n_expert: config.moe.map_or(0, |m| m.n_expert),
            n_gqa: config.n_head / config.n_head_kv,
        };
        let mut outputs = map.outputs;
        let types = choose_types(file_type, &shape, &mut outputs)
            .with_context(|| input.display().to_string())?;
        let mut metadata = metadata::general(&checkpoint.dir, &config, &outputs)?;
        metadata.extend(metadata::hyperparameters(
            &config,
            map.n_mtp,
            file_type.number(),
        ));
        metadata.extend(vocab::metadata(&checkpoint.dir, &config, &mut notes)?);
        if file_type.base().is_quantized() && file_type != FileType::Q8_0 {
            // The quantizer sets these two last, so the file is the one that it would make.
            for key in ["general.quantization_version", "general.file_type"] {
                let at = metadata.iter().position(|(k, _)| k == key);
                let moved = at.map(|at| metadata.remove(at));
                metadata.extend(moved);
            }
        }
        Ok(Self {
            checkpoint,
            file_type,
            outputs,
            types,
            metadata,
            notes,
            split_max_size: options.split_max_size,
        })
    }

    /// What was found and decided, a line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The types that tensors get.
    pub fn file_type(&self) -> FileType {
        self.file_type
    }

    /// The tensors with the types that they get, in the order in which they are written.
    pub fn tensors(&self) -> impl Iterator<Item = (&Output, DType)> {
        self.outputs.iter().zip(self.types.iter().copied())
    }

    /// Bytes of tensor data.
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|(o, t)| bytes(o, t) as u64).sum()
    }

    /// The files that writing to `path` makes, with the tensors of each.
    pub fn files(&self, path: &Path) -> Vec<(PathBuf, Range<usize>)> {
        let sizes = self.tensors().map(|(output, dtype)| bytes(output, dtype));
        let limit = Limit::Bytes(self.split_max_size.unwrap_or(u64::MAX));
        let ranges = split::ranges(sizes, limit);
        let n = ranges.len();
        let name = |i| match self.split_max_size {
            Some(_) => parts::name(path, i, n),
            None => path.to_owned(),
        };
        ranges
            .into_iter()
            .enumerate()
            .map(|(i, r)| (name(i), r))
            .collect()
    }

    /// Converts to `path`, or to the parts that [`Plan::files`] names. `progress` is told bytes written and in all,
    /// and stops the work by returning false.
    ///
    /// # Errors
    /// When a tensor holds values that are not numbers or do not fit the type, a file cannot be written, or
    /// `progress` stopped it (then the error is [`Interrupted`]). Nothing is left behind; the input is only read.
    pub fn write(&self, path: &Path, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<()> {
        let files = self.files(path);
        let inputs = self.checkpoint.files.iter().map(|f| f.path());
        let inputs: Vec<&Path> = inputs.collect();
        for (path, _) in &files {
            check_apart(path, inputs.iter().copied())?;
        }
        let headers = files
            .iter()
            .enumerate()
            .map(|(i, (_, range))| Ok(self.header(i, files.len(), range.clone())?.header()))
            .collect::<Result<Vec<_>>>()?;
        let sizes: Vec<u64> = files
            .iter()
            .zip(&headers)
            .map(|((_, range), header)| {
                let tensors = self.tensors().skip(range.start).take(range.len());
                let data: usize = tensors.map(|(o, t)| padded(bytes(o, t))).sum();
                (header.len() + data) as u64
            })
            .collect();
        let mut work = Work {
            plan: self,
            total: self.bytes(),
            done: 0,
            progress,
        };
        let mut finished = Vec::new();
        for (i, ((path, range), header)) in files.into_iter().zip(headers).enumerate() {
            // The first file asks for the room that all of them need.
            let needed = if i == 0 { sizes.iter().sum() } else { sizes[i] };
            let mut file = OutputFile::create(&path, needed)?;
            work.file(&mut file, &path, &header, range)?;
            finished.push(file.close());
        }
        for file in &self.checkpoint.files {
            file.check_length()?;
        }
        finished.into_iter().try_for_each(ClosedFile::finish)
    }

    /// The header of one of `n` files.
    fn header(&self, part: usize, n: usize, range: Range<usize>) -> Result<GgufWriter> {
        let mut writer = GgufWriter::new(range.len())?;
        if part == 0 {
            for (key, value) in &self.metadata {
                value.write(key, &mut writer)?;
            }
        }
        if self.split_max_size.is_some() {
            let small = |n: usize| {
                u16::try_from(n)
                    .with_context(|| format!("{n} files are too many; raise --split-max-size"))
            };
            Meta::U16(small(part)?).write("split.no", &mut writer)?;
            Meta::U16(small(n)?).write("split.count", &mut writer)?;
            let count = i32::try_from(self.outputs.len()).context("too many tensors")?;
            Meta::I32(count).write("split.tensors.count", &mut writer)?;
        }
        for (output, dtype) in self.tensors().skip(range.start).take(range.len()) {
            let dims: Vec<i64> = output.dims.iter().map(|&n| n as i64).collect();
            writer.add_tensor(&output.name, &dims, dtype)?;
        }
        Ok(writer)
    }
}

/// A conversion under way.
struct Work<'a> {
    plan: &'a Plan,
    total: u64,
    done: u64,
    progress: &'a mut dyn FnMut(u64, u64) -> bool,
}

impl Work<'_> {
    /// Writes one file's header and tensors.
    fn file(
        &mut self,
        file: &mut OutputFile,
        path: &Path,
        header: &[u8],
        range: Range<usize>,
    ) -> Result<()> {
        let (full, to_write) = mpsc::sync_channel::<Vec<u8>>(1);
        let (written, spare) = mpsc::channel::<Vec<u8>>();
        std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                file.write_all(header)?;
                for buffer in to_write {
                    file.write_all(&buffer)?;
                    // The other side may have ended.
                    let _ = written.send(buffer);
                }
                std::io::Result::Ok(())
            });
            // A send fails where the writer failed, which is the error to report.
            let put = |buffer| full.send(buffer).is_ok();
            let made = range
                .into_iter()
                .try_fold(true, |going, i| Ok(going && self.tensor(i, &spare, &put)?));
            drop(full);
            match writer.join() {
                Ok(result) => result.with_context(|| format!("writing {}", path.display()))?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
            made.map(|_: bool| ())
        })
    }

    /// Makes the data of one tensor and hands it to `put`, which returns false once it takes no more; so does this.
    fn tensor(
        &mut self,
        i: usize,
        spare: &mpsc::Receiver<Vec<u8>>,
        put: &dyn Fn(Vec<u8>) -> bool,
    ) -> Result<bool> {
        let (output, dtype) = (&self.plan.outputs[i], self.plan.types[i]);
        let checkpoint = &self.plan.checkpoint;
        let rows = Rows::new(output, dtype, checkpoint)?;
        let n_rows = output.n_rows();
        let slab = (SLAB / rows.n_cols).max(1);
        for first in (0..n_rows).step_by(slab) {
            let mut buffer = spare.try_recv().unwrap_or_default();
            let n = slab.min(n_rows - first);
            buffer.resize(n * rows.row_bytes, 0);
            rows.convert(first, &mut buffer)
                .with_context(|| rows.place(checkpoint))?;
            self.done += buffer.len() as u64;
            if !put(buffer) {
                return Ok(false);
            }
            if !(self.progress)(self.done, self.total) {
                return Err(Interrupted.into());
            }
        }
        let size = bytes(output, dtype);
        let going = put(vec![0; padded(size) - size]);
        for input in &output.inputs {
            let tensor = &checkpoint.tensors[input.tensor];
            checkpoint.files[tensor.file].release(tensor.range.clone());
        }
        Ok(going)
    }
}

/// The rows of one tensor under way.
struct Rows<'a> {
    output: &'a Output,
    dtype: DType,
    sources: Vec<Source<'a>>,
    /// The row that each of the output's segments begins at.
    starts: Vec<usize>,
    n_cols: usize,
    row_bytes: usize,
    /// The stored bytes are those of the result.
    verbatim: bool,
}

impl<'a> Rows<'a> {
    fn new(output: &'a Output, dtype: DType, checkpoint: &'a Checkpoint) -> Result<Self> {
        let sources = output
            .inputs
            .iter()
            .map(|input| TensorMap::source(input, checkpoint))
            .collect::<Result<Vec<_>>>()?;
        let mut starts = Vec::with_capacity(output.segments.len());
        let mut row = 0;
        for segment in &output.segments {
            starts.push(row);
            row += segment.n;
        }
        let n_cols = output.n_cols();
        let same = |source: &Source| {
            let Encoding::Plain(stored) = source.encoding else {
                return false;
            };
            matches!(
                (stored, dtype),
                (Dtype::F16, DType::F16) | (Dtype::Bf16, DType::BF16)
            )
        };
        Ok(Self {
            verbatim: output.rule == Rule::Copy
                && output.columns.is_none()
                && sources.iter().all(same),
            output,
            dtype,
            sources,
            starts,
            n_cols,
            row_bytes: dtype.row_bytes(n_cols),
        })
    }

    /// The tensor for messages: by its first input's name.
    fn place(&self, checkpoint: &Checkpoint) -> String {
        let first = self.output.inputs.first();
        match first.map(|input| &checkpoint.tensors[input.tensor]) {
            Some(tensor) => format!(
                "{}: tensor `{}`",
                checkpoint.path_of(tensor).display(),
                one_line(&tensor.name)
            ),
            None => format!("tensor `{}`", self.output.name),
        }
    }

    /// Where a row of the result comes from.
    fn origin(&self, row: usize) -> (&Source<'a>, usize) {
        let at = self.starts.partition_point(|&start| start <= row) - 1;
        let segment = &self.output.segments[at];
        (
            &self.sources[segment.input],
            segment.first + row - self.starts[at],
        )
    }

    /// Makes the rows from `first` on that `out` has room for.
    fn convert(&self, first: usize, out: &mut [u8]) -> Result<()> {
        let per_chunk = (CHUNK / self.n_cols).max(1);
        out.par_chunks_mut(per_chunk * self.row_bytes)
            .enumerate()
            .try_for_each_init(
                || (Vec::new(), Vec::new()),
                |(floats, moved), (i, out)| {
                    let first = first + i * per_chunk;
                    if self.verbatim {
                        self.copy(first, out)
                    } else {
                        self.compute(first, out, floats, moved)
                    }
                },
            )
    }

    fn copy(&self, first: usize, out: &mut [u8]) -> Result<()> {
        // The exponent of infinities and of what is no number.
        let top = if self.dtype == DType::F16 {
            0x7c00
        } else {
            0x7f80
        };
        for (row, out) in (first..).zip(out.chunks_exact_mut(self.row_bytes)) {
            let (source, row) = self.origin(row);
            let stored = source.row(row);
            let bad = stored.chunks_exact(2).fold(false, |bad, v| {
                bad | (u16::from_le_bytes([v[0], v[1]]) & top == top)
            });
            ensure!(!bad, NOT_FINITE);
            out.copy_from_slice(stored);
        }
        Ok(())
    }

    fn compute(
        &self,
        first: usize,
        out: &mut [u8],
        floats: &mut Vec<f32>,
        moved: &mut Vec<f32>,
    ) -> Result<()> {
        let n_rows = out.len() / self.row_bytes;
        floats.resize(n_rows * self.n_cols, 0.0);
        for (row, values) in (first..).zip(floats.chunks_exact_mut(self.n_cols)) {
            let (source, row) = self.origin(row);
            source.decode(row, values);
            if let Some((width, order)) = &self.output.columns {
                moved.clear();
                for &head in order {
                    moved.extend_from_slice(&values[head * width..(head + 1) * width]);
                }
                values.copy_from_slice(moved);
            }
            match self.output.rule {
                Rule::Copy => {}
                Rule::AddOne => values.iter_mut().for_each(|v| *v += 1.0),
                Rule::NegExp => values.iter_mut().for_each(|v| *v = -v.exp()),
            }
        }
        // Without an early exit the compiler checks many values at once.
        let bad = floats.iter().fold(false, |bad, v| bad | !v.is_finite());
        ensure!(!bad, NOT_FINITE);
        if self.dtype == DType::F32 {
            for (out, value) in out.chunks_exact_mut(4).zip(floats.iter()) {
                out.copy_from_slice(&value.to_le_bytes());
            }
            return Ok(());
        }
        // What rounds to infinity.
        const BEYOND_F16: f32 = 65520.0;
        if self.dtype == DType::F16 {
            let beyond = floats
                .iter()
                .fold(false, |bad, v| bad | (v.abs() >= BEYOND_F16));
            ensure!(!beyond, "holds values too large for f16; take bf16 or f32");
        }
        quantize_into(self.dtype, floats, self.n_cols, None, out)?;
        Ok(())
    }
}

const NOT_FINITE: &str =
    "holds values that are not numbers; the checkpoint is damaged, fetch it again";

fn bytes(output: &Output, dtype: DType) -> usize {
    output.n_rows() * dtype.row_bytes(output.n_cols())
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(GgufWriter::ALIGNMENT)
}

/// The type nearest to what the matrices are stored as.
fn own_type(checkpoint: &Checkpoint, outputs: &[Output]) -> FileType {
    let matrix = outputs
        .iter()
        .filter(|o| o.dims.len() > 1)
        .find_map(|o| o.inputs.first());
    match matrix.map(|input| checkpoint.tensors[input.tensor].dtype) {
        Some(Dtype::F32) => FileType::F32,
        Some(Dtype::F16) => FileType::F16,
        _ => FileType::BF16,
    }
}

/// The type of each tensor. A mixture goes through the tensors in the quantizer's order, so they are put into it.
fn choose_types(file_type: FileType, shape: &Shape, outputs: &mut [Output]) -> Result<Vec<DType>> {
    let base = file_type.base();
    if [FileType::F32, FileType::F16, FileType::BF16, FileType::Q8_0].contains(&file_type) {
        let types = outputs.iter().map(|o| {
            let fits = o.n_cols() % base.block_size().max(1) == 0;
            match (stays_f32(o), fits) {
                (true, _) => DType::F32,
                (false, true) => base,
                (false, false) => DType::F16,
            }
        });
        return Ok(types.collect());
    }
    outputs.sort_by(|a, b| recipe::order(&a.name, &b.name));
    let subjects: Vec<Subject> = outputs
        .iter()
        .map(|o| {
            let mut shape = [1; 4];
            for (to, &n) in shape.iter_mut().zip(&o.dims) {
                *to = n as i64;
            }
            Subject {
                name: &o.name,
                shape,
                dtype: if stays_f32(o) {
                    DType::F32
                } else {
                    DType::BF16
                },
            }
        })
        .collect();
    let types = recipe::types(file_type, shape, &subjects, &Overrides::default(), false)?;
    for (output, &dtype) in outputs.iter().zip(&types) {
        ensure!(
            !dtype.needs_imatrix() && !recipe::wants_imatrix(&output.name, dtype, file_type),
            "{} needs an importance matrix: convert to bf16 first, then use `qrun quantize --imatrix`",
            file_type.name()
        );
    }
    Ok(types)
}

/// What llama.cpp keeps in F32: vectors, norms, routers, the convolution, and what is no weight.
fn stays_f32(output: &Output) -> bool {
    let kept = [
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ffn_gate_inp_shexp.weight",
        "ssm_conv1d.weight",
    ];
    output.dims.len() <= 1
        || !output.name.ends_with(".weight")
        || kept.iter().any(|name| output.name.ends_with(name))
}

fn storage_note(config: &HfConfig, checkpoint: &Checkpoint) -> Option<String> {
    let n = |dtype| {
        checkpoint
            .tensors
            .iter()
            .filter(|t| t.dtype == dtype)
            .count()
    };
    let note = match config.quantization {
        Quantization::Mlx => format!(
            "MLX checkpoint: {} tensors are packed groups, which lost precision when they were made; they are unpacked",
            n(Dtype::U32)
        ),
        Quantization::Fp8 { .. } => format!(
            "fp8 checkpoint: {} tensors are eight-bit floats with scales; they are multiplied out",
            n(Dtype::F8E4M3) + n(Dtype::F8E5M2)
        ),
        Quantization::None if checkpoint.format_mlx => "MLX checkpoint".to_owned(),
        Quantization::None => return None,
    };
    Some(note)
}
