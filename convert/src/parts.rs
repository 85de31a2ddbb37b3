//! Split models: several GGUF files, `NAME-00001-of-00003.gguf` and on, of which the first has the metadata.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use ggml_metal::{Gguf, Value};

/// Parts beyond this are a damaged key, not a model.
pub const MAX_PARTS: usize = 1000;

/// The keys that make a file one of several.
pub const KEYS: [&str; 3] = ["split.no", "split.count", "split.tensors.count"];

/// Opens a model: one file, or all parts of a split one, of which `path` may name any.
///
/// # Errors
/// When a file is missing, damaged, or does not belong to the others.
pub fn open(path: &Path) -> Result<Vec<Gguf>> {
    let named = Gguf::open(path)?;
    let n_parts = int(&named, "split.count").unwrap_or(1);
    if n_parts <= 1 {
        return Ok(vec![named]);
    }
    ensure!(
        n_parts <= MAX_PARTS as i128,
        "{}: key `split.count` is {n_parts}, expected at most {MAX_PARTS}",
        path.display()
    );
    let mut parts = Vec::new();
    let mut named = Some((int(&named, "split.no").unwrap_or(0), named));
    for part in 0..n_parts {
        let file = match named.take_if(|(no, _)| *no == part) {
            Some((_, file)) => file,
            None => Gguf::open(&sibling(path, part as usize, n_parts as usize)?)?,
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
    Ok(parts)
}

fn int(file: &Gguf, key: &str) -> Option<i128> {
    match file.value(key) {
        Some(Value::Int(v)) => Some(v),
        _ => None,
    }
}

/// The name of a part: names count from 1, `part` and the key `split.no` from 0. A suffix `.gguf` of `base` is left
/// out.
pub fn name(base: &Path, part: usize, n_parts: usize) -> PathBuf {
    let name = base.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(".gguf").unwrap_or(&name);
    base.with_file_name(format!("{stem}-{:05}-of-{n_parts:05}.gguf", part + 1))
}

/// The name of another part of the model that `path` is one part of.
fn sibling(path: &Path, part: usize, n_parts: usize) -> Result<PathBuf> {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let tail = format!("-of-{n_parts:05}.gguf");
    let base = file
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
    // The base may itself end in `.gguf`, which is part of the name here.
    Ok(path.with_file_name(format!("{base}-{:05}{tail}", part + 1)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn parts_are_found_by_name() {
        let other = |path: &str, part| sibling(Path::new(path), part, 3);
        assert_eq!(
            other("d/m-00002-of-00003.gguf", 0).unwrap(),
            Path::new("d/m-00001-of-00003.gguf")
        );
        assert!(other("d/m.gguf", 0).is_err());
        assert!(other("d/-of-00003.gguf", 0).is_err());
        assert!(other("d/müü-of-00003.gguf", 0).is_err());
        assert_eq!(
            name(Path::new("d/m.gguf"), 1, 3),
            Path::new("d/m-00002-of-00003.gguf")
        );
    }
}
