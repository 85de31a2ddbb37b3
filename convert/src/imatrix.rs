//! Importance matrices: for each weight matrix, how large the values are that its columns are multiplied with.
//!
//! llama.cpp's GGUF format: tensors `NAME.in_sum2` (sums of squared inputs, `[n_in, n_matrices]` F32) and
//! `NAME.counts` (`[1, n_matrices]` F32, inputs summed), keys `general.type` = `imatrix`, `imatrix.datasets`,
//! `imatrix.chunk_count` and `imatrix.chunk_size`. The older binary format is read too.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use ggml_metal::{DType, FileMap, Gguf, GgufWriter, Value, one_line};

use crate::output::OutputFile;

/// What was summed for one weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Entry {
    /// Sums of squared inputs, a row of `n_in` for each matrix (expert).
    pub sums: Vec<f32>,
    /// Inputs summed for each matrix.
    pub counts: Vec<f32>,
}

impl Entry {
    /// Mean squares: the importance of each column. Those of a matrix that saw no input are 1.
    pub fn means(&self) -> Vec<f32> {
        let n_in = self.sums.len() / self.counts.len().max(1);
        let rows = self.sums.chunks_exact(n_in.max(1)).zip(&self.counts);
        rows.flat_map(|(row, &count)| {
            row.iter()
                .map(move |&sum| if count > 0.0 { sum / count } else { 1.0 })
        })
        .collect()
    }
}

/// An importance matrix as stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imatrix {
    /// What was summed, by the name of the weight.
    pub entries: BTreeMap<String, Entry>,
    /// Names of the texts.
    pub datasets: Vec<String>,
    /// Chunks of text.
    pub n_chunks: u32,
    /// Tokens in a chunk; 0 where the file does not say.
    pub chunk_size: u32,
}

impl Imatrix {
    /// Reads a file of either format.
    ///
    /// # Errors
    /// When it is neither, or is damaged.
    pub fn read(path: &Path) -> Result<Self> {
        let map = FileMap::open(path)?;
        let read = if map.bytes().starts_with(b"GGUF") {
            Self::read_gguf(&Gguf::open(path)?)
        } else {
            Self::read_legacy(map.bytes())
        };
        let imatrix = read.with_context(|| format!("{}", path.display()))?;
        for (name, entry) in &imatrix.entries {
            ensure!(
                !entry.counts.is_empty()
                    && !entry.sums.is_empty()
                    && entry.sums.len() % entry.counts.len() == 0,
                "{}: importance of `{}`: {} sums do not fit {} counts",
                path.display(),
                one_line(name),
                entry.sums.len(),
                entry.counts.len()
            );
            ensure!(
                entry
                    .sums
                    .iter()
                    .chain(&entry.counts)
                    .all(|v| v.is_finite()),
                "{}: importance of `{}` holds values that are not finite; make the file again",
                path.display(),
                one_line(name)
            );
        }
        ensure!(
            !imatrix.entries.is_empty(),
            "{}: holds no importance matrix",
            path.display()
        );
        Ok(imatrix)
    }

    fn read_gguf(file: &Gguf) -> Result<Self> {
        let int = |key: &str| match file.value(key) {
            Some(Value::Int(n)) => u32::try_from(n).ok(),
            _ => None,
        };
        let (Some(n_chunks), Some(chunk_size)) =
            (int("imatrix.chunk_count"), int("imatrix.chunk_size"))
        else {
            bail!(
                "is not an importance matrix: it has no `imatrix.chunk_count` and `imatrix.chunk_size`"
            );
        };
        let mut imatrix = Self {
            n_chunks,
            chunk_size,
            ..Self::default()
        };
        if let Some(Value::Strs(datasets)) = file.value("imatrix.datasets") {
            imatrix.datasets = datasets;
        }
        for tensor in file.tensors() {
            let Some((name, is_sums)) = part_of(&tensor.name) else {
                continue;
            };
            ensure!(
                tensor.dtype == DType::F32,
                "tensor `{}` is {}, expected f32",
                one_line(&tensor.name),
                tensor.dtype
            );
            let values = tensor.dtype.dequantize(file.data(tensor))?;
            let entry = imatrix.entries.entry(name.to_owned()).or_default();
            if is_sums {
                entry.sums = values;
            } else {
                entry.counts = values.iter().map(|v| v.round()).collect();
            }
        }
        Ok(imatrix)
    }

    /// The older format: a number of entries, each with the length of its name, the name, a number of calls, a
    /// number of values and the values (mean squares times calls); then the number of chunks, and the length and
    /// the name of the text. All numbers are little-endian and 32 bits wide.
    fn read_legacy(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        let mut imatrix = Self::default();
        let n_entries = length(&mut rest).filter(|&n| n > 0 && n < 1 << 20);
        let Some(n_entries) = n_entries else {
            bail!("is not an importance matrix, neither in GGUF nor in the older format");
        };
        for i in 0..n_entries {
            let entry = legacy_entry(&mut rest);
            let Some((name, entry)) = entry else {
                bail!(
                    "entry {} of {n_entries} cannot be read; the file is cut short or no importance matrix",
                    i + 1
                );
            };
            imatrix.entries.insert(name, entry);
        }
        // Oldest files end here.
        imatrix.n_chunks = length(&mut rest).unwrap_or(0) as u32;
        let dataset = length(&mut rest).and_then(|n| rest.get(..n));
        if let Some(name) = dataset.filter(|n| !n.is_empty()) {
            imatrix
                .datasets
                .push(String::from_utf8_lossy(name).into_owned());
        }
        Ok(imatrix)
    }

    /// Writes the GGUF format.
    ///
    /// # Errors
    /// When the file cannot be written; nothing is left behind.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut writer = GgufWriter::new(2 * self.entries.len())?;
        writer.set("general.type", &Value::Str("imatrix".to_owned()))?;
        writer.set("imatrix.datasets", &Value::Strs(self.datasets.clone()))?;
        writer.set("imatrix.chunk_count", &Value::Int(self.n_chunks.into()))?;
        writer.set("imatrix.chunk_size", &Value::Int(self.chunk_size.into()))?;
        let mut data = Vec::new();
        for (name, entry) in &self.entries {
            let n = entry.counts.len().max(1);
            let sums = [(entry.sums.len() / n) as i64, n as i64];
            writer.add_tensor(&format!("{name}.in_sum2"), &sums, DType::F32)?;
            writer.add_tensor(&format!("{name}.counts"), &[1, n as i64], DType::F32)?;
            data.push(&entry.sums);
            data.push(&entry.counts);
        }
        let header = writer.header();
        let padded = |n: usize| n.next_multiple_of(GgufWriter::ALIGNMENT);
        let bytes = header.len() + writer.sizes().iter().map(|&n| padded(n)).sum::<usize>();
        let mut file = OutputFile::create(path, bytes as u64)?;
        let write = || {
            file.write_all(&header)?;
            for values in data {
                let mut bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                bytes.resize(padded(bytes.len()), 0);
                file.write_all(&bytes)?;
            }
            std::io::Result::Ok(())
        };
        write().with_context(|| format!("writing {}", path.display()))?;
        file.finish()
    }
}

/// The weight's name, and whether the tensor holds its sums or its counts.
fn part_of(tensor: &str) -> Option<(&str, bool)> {
    let sums = tensor.strip_suffix(".in_sum2").map(|name| (name, true));
    sums.or_else(|| tensor.strip_suffix(".counts").map(|name| (name, false)))
}

/// Takes a number that is not negative.
fn length(rest: &mut &[u8]) -> Option<usize> {
    let (number, tail) = rest.split_first_chunk::<4>()?;
    *rest = tail;
    usize::try_from(i32::from_le_bytes(*number)).ok()
}

fn legacy_entry(rest: &mut &[u8]) -> Option<(String, Entry)> {
    let n_name = length(rest)?;
    let (name, tail) = rest.split_at_checked(n_name)?;
    *rest = tail;
    let n_calls = length(rest)?;
    let n_values = length(rest)?;
    let (values, tail) = rest.split_at_checked(n_values.checked_mul(4)?)?;
    *rest = tail;
    let entry = Entry {
        sums: values
            .chunks_exact(4)
            .map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]]))
            .collect(),
        // Without calls the values are means already.
        counts: vec![n_calls.max(1) as f32],
    };
    Some((String::from_utf8_lossy(name).into_owned(), entry))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn example() -> Imatrix {
        let entry = |sums: &[f32], counts: &[f32]| Entry {
            sums: sums.to_vec(),
            counts: counts.to_vec(),
        };
        let entries = [
            ("blk.0.attn_q.weight", entry(&[2.0, 4.0, 8.0], &[4.0])),
            (
                "blk.0.ffn_up_exps.weight",
                entry(&[3.0, 6.0, 0.0, 0.0], &[3.0, 0.0]),
            ),
        ];
        Imatrix {
            entries: entries.map(|(n, e)| (n.to_owned(), e)).into(),
            datasets: vec!["text.txt".to_owned()],
            n_chunks: 3,
            chunk_size: 512,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("imatrix.gguf");
        example().write(&path).unwrap();
        let read = Imatrix::read(&path).unwrap();
        assert_eq!(read, example());
        let means = |name: &str| read.entries[name].means();
        assert_eq!(means("blk.0.attn_q.weight"), [0.5, 1.0, 2.0]);
        // An expert that saw nothing counts every column alike.
        assert_eq!(means("blk.0.ffn_up_exps.weight"), [1.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn the_older_format_is_read_and_its_damage_refused() {
        let mut bytes = Vec::new();
        let int = |bytes: &mut Vec<u8>, n: i32| bytes.extend(n.to_le_bytes());
        int(&mut bytes, 1);
        int(&mut bytes, 19);
        bytes.extend(b"blk.0.attn_q.weight");
        int(&mut bytes, 4);
        int(&mut bytes, 2);
        bytes.extend([2f32, 6.0].iter().flat_map(|v| v.to_le_bytes()));
        let short = bytes.clone();
        int(&mut bytes, 7);
        int(&mut bytes, 5);
        bytes.extend(b"a.txt");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("imatrix.dat");
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Imatrix::read(&path)
        };
        let whole = read(&bytes).unwrap();
        assert_eq!(whole.entries["blk.0.attn_q.weight"].means(), [0.5, 1.5]);
        assert_eq!((whole.n_chunks, whole.datasets.len()), (7, 1));
        assert_eq!(read(&short).unwrap().n_chunks, 0);
        let error = |bytes: &[u8]| format!("{:#}", read(bytes).unwrap_err());
        assert!(error(&short[..short.len() - 1]).contains("entry 1 of 1 cannot be read"));
        assert!(error(b"hello, this is some text").contains("is not an importance matrix"));
        let mut broken = short.clone();
        let at = broken.len() - 4;
        broken[at..].copy_from_slice(&f32::NAN.to_le_bytes());
        assert!(error(&broken).contains("not finite"));
        // A length that would ask for more memory than there is.
        broken[31..35].copy_from_slice(&i32::MAX.to_le_bytes());
        assert!(error(&broken).contains("cannot be read"));
    }
}
