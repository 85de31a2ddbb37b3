//! The files that make up a model: one, the parts of a split one, and an MTP file apart.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use ggml_metal::{Gguf, TensorInfo, Value};

use super::Config;

/// Parts beyond this are a damaged key, not a model.
const MAX_PARTS: i128 = 1000;

/// Open files of one model, with their checked numbers.
pub struct ModelFiles {
    /// The file with the metadata, then the further parts.
    parts: Vec<Gguf>,
    /// A file that holds only the MTP block.
    mtp: Option<Gguf>,
    /// The model's numbers.
    pub config: Config,
}

impl ModelFiles {
    /// Opens a model. `path` may be any part of a split model; `mtp` a file that holds only its MTP block.
    ///
    /// # Errors
    /// When a file is missing, damaged, or does not belong to the others.
    pub fn open(path: &Path, mtp: Option<&Path>) -> Result<Self> {
        let named = Gguf::open(path)?;
        let mut parts = Vec::new();
        let n_parts = int(&named, "split.count").unwrap_or(1);
        if n_parts > 1 {
            ensure!(
                n_parts <= MAX_PARTS,
                "{}: key `split.count` is {n_parts}, expected at most {MAX_PARTS}",
                path.display()
            );
            let mut named = Some((int(&named, "split.no").unwrap_or(0), named));
            for part in 0..n_parts {
                let file = match named.take_if(|(no, _)| *no == part) {
                    Some((_, file)) => file,
                    None => Gguf::open(&part_name(path, part, n_parts)?)?,
                };
                ensure!(
                    int(&file, "split.no").unwrap_or(0) == part
                        && int(&file, "split.count") == Some(n_parts),
                    "{}: is not part {} of {n_parts} of this model; fetch all parts again",
                    file.path().display(),
                    part + 1
                );
                parts.push(file);
            }
            let held = parts.iter().map(|p| p.tensors().len()).sum::<usize>();
            if let Some(expected) = int(&parts[0], "split.tensors.count") {
                ensure!(
                    expected == held as i128,
                    "{}: its {n_parts} parts hold {held} tensors, expected {expected}; fetch all parts again",
                    path.display()
                );
            }
        } else {
            parts.push(named);
        }
        let mtp = mtp.map(Gguf::open).transpose()?;
        let config = Config::read(&parts, mtp.as_ref())?;
        Ok(Self { parts, mtp, config })
    }

    /// The file with the metadata.
    pub fn main(&self) -> &Gguf {
        &self.parts[0]
    }

    /// All files, the MTP file last.
    pub fn all(&self) -> impl Iterator<Item = &Gguf> {
        self.parts.iter().chain(&self.mtp)
    }

    /// The trunk's tensor with that name.
    pub fn tensor(&self, name: &str) -> Option<(&Gguf, &TensorInfo)> {
        self.parts
            .iter()
            .find_map(|file| file.tensor(name).map(|info| (file, info)))
    }

    /// A tensor of the MTP block by its name after `blk.N.`: from the file apart, where N may be any number,
    /// else from the model's own files, where N counts on after the trunk's layers.
    pub fn mtp_tensor(&self, suffix: &str) -> Option<(&Gguf, &TensorInfo)> {
        let Some(file) = &self.mtp else {
            return self.tensor(&format!("blk.{}.{suffix}", self.config.n_layer()));
        };
        file.tensors()
            .iter()
            .find(|info| {
                let block = info
                    .name
                    .strip_prefix("blk.")
                    .and_then(|n| n.split_once('.'));
                block.is_some_and(|(number, rest)| {
                    rest == suffix && number.bytes().all(|b| b.is_ascii_digit())
                })
            })
            .map(|info| (file, info))
    }

    /// Bytes of tensor data in all files.
    pub fn tensor_bytes(&self) -> usize {
        self.all().flat_map(|f| f.tensors()).map(|t| t.bytes).sum()
    }
}

fn int(file: &Gguf, key: &str) -> Option<i128> {
    match file.value(key) {
        Some(Value::Int(v)) => Some(v),
        _ => None,
    }
}

/// The name of another part: `NAME-00001-of-00003.gguf` counts from 1, the key `split.no` from 0.
fn part_name(path: &Path, part: i128, n_parts: i128) -> Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let tail = format!("-of-{n_parts:05}.gguf");
    let base = name
        .strip_suffix(&tail)
        .and_then(|head| {
            head.len()
                .checked_sub(6)
                .and_then(|cut| head.split_at_checked(cut))
        })
        .filter(|(_, no)| no.starts_with('-') && no[1..].bytes().all(|b| b.is_ascii_digit()));
    let Some((base, _)) = base else {
        anyhow::bail!(
            "{}: is one of {n_parts} parts, but its name does not end in `-00001{tail}`, so the others \
             cannot be found; give the parts their names back",
            path.display()
        );
    };
    Ok(path.with_file_name(format!("{base}-{:05}{tail}", part + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_found_by_name() {
        let name = |path: &str, part| part_name(Path::new(path), part, 3);
        assert_eq!(
            name("d/m-00002-of-00003.gguf", 0).unwrap(),
            Path::new("d/m-00001-of-00003.gguf")
        );
        assert!(name("d/m.gguf", 0).is_err());
        assert!(name("d/-of-00003.gguf", 0).is_err());
        assert!(name("d/müü-of-00003.gguf", 0).is_err());
    }
}
