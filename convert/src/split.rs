//! Splitting a GGUF file into parts that llama.cpp reads as one model, and putting them together again.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use ggml_metal::{Gguf, GgufWriter, Kind, TensorInfo, Value};

use crate::output::{ClosedFile, Interrupted, OutputFile, check_apart, check_room};
use crate::parts;

/// Bytes copied at a time.
const PIECE: u64 = 64 << 20;

/// How much goes into one part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// At most so many bytes of tensors; a larger tensor has a part of its own.
    Bytes(u64),
    /// At most so many tensors.
    Tensors(usize),
}

/// Reads a limit of bytes: a number, with K, M or G after it for thousands, millions or billions.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.to_ascii_uppercase();
    let (number, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(number) if text.ends_with('K') => (number, 1_000),
        Some(number) if text.ends_with('M') => (number, 1_000_000),
        Some(number) => (number, 1_000_000_000),
        None => (text.as_str(), 1),
    };
    let n = number.parse::<u64>().ok()?.checked_mul(unit)?;
    (n > 0).then_some(n)
}

/// Which tensors go into which part, for tensors of these sizes in file order.
pub fn ranges(sizes: impl IntoIterator<Item = usize>, limit: Limit) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let (mut start, mut held, mut end) = (0, 0u64, 0);
    for (i, size) in sizes.into_iter().enumerate() {
        let size = size.next_multiple_of(GgufWriter::ALIGNMENT) as u64;
        let full = match limit {
            Limit::Bytes(most) => held + size > most,
            Limit::Tensors(most) => i - start >= most,
        };
        if full && i > start {
            ranges.push(start..i);
            (start, held) = (i, 0);
        }
        held += size;
        end = i + 1;
    }
    ranges.push(start..end);
    ranges
}

/// Writes the parts of `file` under the names that [`parts::name`] makes of `base`, and returns the names. The
/// metadata goes into the first. `progress` is told bytes done and in all, and stops the work by returning false.
///
/// # Errors
/// When the file is itself a part, would make one part or too many, or a part cannot be written: no part is left
/// behind then.
pub fn split(
    file: &Gguf,
    base: &Path,
    limit: Limit,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Vec<PathBuf>> {
    let plan = plan(file, base, limit)?;
    let n_parts = plan.len();
    let count = Value::Int(n_parts as i128);
    let n_tensors = Value::Int(file.tensors().len() as i128);
    let total = data_bytes(file.tensors());
    let folder = base.parent().filter(|f| !f.as_os_str().is_empty());
    check_room(folder.unwrap_or(Path::new(".")), total)?;
    let mut done = 0;
    let mut finished = Vec::new();
    for (i, (name, range)) in plan.iter().enumerate() {
        check_apart(name, [file.path()])?;
        let mut writer = GgufWriter::new(range.len())?;
        if i == 0 {
            writer.copy_metadata(file);
        }
        writer.set_as("split.no", Kind::U16, &Value::Int(i as i128))?;
        writer.set_as("split.tensors.count", Kind::I32, &n_tensors)?;
        writer.set_as("split.count", Kind::U16, &count)?;
        let tensors = &file.tensors()[range.clone()];
        add(&mut writer, tensors)?;
        let header = writer.header();
        let bytes = header.len() as u64 + data_bytes(tensors);
        let mut out = OutputFile::create(name, bytes)?;
        copy(&mut out, &header, file, tensors, &mut |n| {
            done += n;
            progress(done, total)
        })?;
        finished.push(out.close());
    }
    // Names come last, so that an interruption leaves no part behind.
    finished.into_iter().try_for_each(ClosedFile::finish)?;
    Ok(plan.into_iter().map(|(name, _)| name).collect())
}

/// The names of the parts, and which tensors each gets.
///
/// # Errors
/// As [`split`], as far as it is known before anything is written.
pub fn plan(file: &Gguf, base: &Path, limit: Limit) -> Result<Vec<(PathBuf, Range<usize>)>> {
    let path = file.path().display();
    let split = matches!(file.value("split.count"), Some(Value::Int(n)) if n > 1);
    ensure!(
        !split,
        "{path}: is one part of a split model; put it together first (`qrun gguf merge`)"
    );
    let ranges = ranges(file.tensors().iter().map(|t| t.bytes), limit);
    let n_parts = ranges.len();
    ensure!(
        n_parts > 1,
        "{path}: fits into one part; choose a smaller limit"
    );
    ensure!(
        n_parts <= parts::MAX_PARTS,
        "{path}: {n_parts} parts are more than {}; choose a larger limit",
        parts::MAX_PARTS
    );
    let named = ranges.into_iter().enumerate();
    Ok(named
        .map(|(i, range)| (parts::name(base, i, n_parts), range))
        .collect())
}

/// Writes the parts of a model as one file, the same as the one that was split.
///
/// # Errors
/// When there is one part only, or the file cannot be written; nothing is left behind.
pub fn merge(
    files: &[Gguf],
    path: &Path,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<()> {
    check_apart(path, files.iter().map(Gguf::path))?;
    ensure!(
        files.len() > 1,
        "{}: is not a part of a split model",
        files.first().map_or(path, |f| f.path()).display()
    );
    let mut writer = GgufWriter::new(files.iter().map(|f| f.tensors().len()).sum())?;
    writer.copy_metadata(&files[0]);
    for key in parts::KEYS {
        writer.remove(key);
    }
    for file in files {
        add(&mut writer, file.tensors())?;
    }
    let header = writer.header();
    let total = files.iter().map(|f| data_bytes(f.tensors())).sum();
    let mut out = OutputFile::create(path, header.len() as u64 + total)?;
    let mut done = 0;
    for (i, file) in files.iter().enumerate() {
        let header = if i == 0 { header.as_slice() } else { &[] };
        copy(&mut out, header, file, file.tensors(), &mut |n| {
            done += n;
            progress(done, total)
        })?;
    }
    out.finish()
}

/// Announces tensors as they are.
fn add(writer: &mut GgufWriter, tensors: &[TensorInfo]) -> Result<()> {
    tensors
        .iter()
        .try_for_each(|t| writer.add_tensor(&t.name, t.dims(), t.dtype))?;
    Ok(())
}

/// Bytes that tensors take in a file, padding included.
fn data_bytes(tensors: &[TensorInfo]) -> u64 {
    let padded = tensors
        .iter()
        .map(|t| t.bytes.next_multiple_of(GgufWriter::ALIGNMENT) as u64);
    padded.sum()
}

/// Writes a header and tensors of a file. `progress` is told the bytes of each piece.
fn copy(
    out: &mut OutputFile,
    header: &[u8],
    file: &Gguf,
    tensors: &[TensorInfo],
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<()> {
    let shown = out.path().display().to_string();
    let write = || format!("writing {shown}");
    out.write_all(header).with_context(write)?;
    for tensor in tensors {
        let (offset, bytes) = (tensor.offset as u64, tensor.bytes as u64);
        copy_range(out, file.path(), offset, bytes, progress)?;
        let padding = tensor.bytes.next_multiple_of(GgufWriter::ALIGNMENT) - tensor.bytes;
        out.write_all(&vec![0; padding]).with_context(write)?;
    }
    Ok(())
}

/// Copies bytes of a file to the end of another: the system does it without this process looking at the data, where
/// it can.
pub(crate) fn copy_range(
    out: &OutputFile,
    path: &Path,
    offset: u64,
    bytes: u64,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<()> {
    let read = || format!("reading {}", path.display());
    let mut source = File::open(path).with_context(read)?;
    source.seek(SeekFrom::Start(offset)).with_context(read)?;
    let mut left = bytes;
    while left > 0 {
        let piece = left.min(PIECE);
        let mut from = (&source).take(piece);
        let copied = std::io::copy(&mut from, &mut out.file())
            .with_context(|| format!("writing {}", out.path().display()))?;
        ensure!(
            copied == piece,
            "{}: became shorter while it was read",
            path.display()
        );
        left -= piece;
        if !progress(piece) {
            return Err(Interrupted.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_in_thousands() {
        assert_eq!(parse_size("300M"), Some(300_000_000));
        assert_eq!(parse_size("2g"), Some(2_000_000_000));
        assert_eq!(parse_size("4096"), Some(4096));
        for wrong in [
            "",
            "0",
            "M",
            "-1G",
            "1.5G",
            "99999999999999999999",
            "18446744073709551615K",
        ] {
            assert_eq!(parse_size(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn no_part_is_empty() {
        let sizes = [64, 64, 1000, 64, 64];
        assert_eq!(ranges(sizes, Limit::Bytes(128)), [0..2, 2..3, 3..5]);
        assert_eq!(
            ranges(sizes, Limit::Bytes(1)),
            [0..1, 1..2, 2..3, 3..4, 4..5]
        );
        assert_eq!(ranges(sizes, Limit::Tensors(2)), [0..2, 2..4, 4..5]);
        assert_eq!(ranges(sizes, Limit::Tensors(9)).first(), Some(&(0..5)));
        // Padding counts: 33 bytes take 64.
        assert_eq!(ranges([33, 33], Limit::Bytes(100)), [0..1, 1..2]);
    }
}
