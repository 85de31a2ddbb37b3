//! Hugging Face checkpoints: the safetensors files of a folder, mapped, and every header checked before use.
//!
//! A safetensors file is eight bytes with the header's length, a JSON object `name -> {dtype, shape,
//! data_offsets}`, and the data. Nothing of it is believed: lengths, offsets and shapes are compared with each
//! other and with the file before anything is read.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use ggml_metal::{FileMap, one_line};
use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, Visitor};

/// The format's own limit, which keeps a hostile length from being allocated.
const MAX_HEADER: u64 = 100_000_000;

const INDEX: &str = "model.safetensors.index.json";

/// Element types that safetensors files name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of a single.
    Bf16,
    /// Eight bits, four of them exponent; no infinities.
    F8E4M3,
    /// Eight bits, five of them exponent.
    F8E5M2,
    /// Unsigned, 32 bits: MLX packs quantized values into these.
    U32,
    /// Something that no weight of this family is stored as; its bits.
    Other(&'static str, usize),
}

/// Names and bits of [`Dtype::Other`].
const OTHERS: [(&str, usize); 16] = [
    ("BOOL", 8),
    ("U8", 8),
    ("I8", 8),
    ("I16", 16),
    ("U16", 16),
    ("I32", 32),
    ("I64", 64),
    ("U64", 64),
    ("F64", 64),
    ("C64", 64),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
];

impl Dtype {
    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "F8_E4M3" => Self::F8E4M3,
            "F8_E5M2" => Self::F8E5M2,
            "U32" => Self::U32,
            _ => {
                let (name, bits) = OTHERS.iter().find(|(other, _)| *other == name)?;
                Self::Other(name, *bits)
            }
        })
    }

    fn bits(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::F8E4M3 | Self::F8E5M2 => 8,
            Self::Other(_, bits) => bits,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::U32 => "U32",
            Self::Other(name, _) => name,
        })
    }
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct StTensor {
    /// Its name, as in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Elements per dimension, the slowest first.
    pub shape: Vec<usize>,
    /// Which of the checkpoint's files.
    pub file: usize,
    /// Where in the file.
    pub range: Range<usize>,
}

impl StTensor {
    /// Elements in all.
    pub fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The files of a checkpoint.
pub struct Checkpoint {
    /// The folder: `config.json` and the tokenizer are read from here.
    pub dir: PathBuf,
    /// The mapped safetensors files, in order of their names.
    pub files: Vec<FileMap>,
    /// All tensors, by file and then by name.
    pub tensors: Vec<StTensor>,
    /// True where a header says that MLX wrote it.
    pub format_mlx: bool,
    /// What a person should know about how the files were chosen.
    pub notes: Vec<String>,
}

impl Checkpoint {
    /// Opens a folder (with or without an index), or one safetensors file with its folder's settings.
    ///
    /// # Errors
    /// When there is no checkpoint, a shard is missing or cut short, or a header contradicts itself or its file.
    pub fn open(path: &Path) -> Result<Self> {
        let metadata =
            std::fs::metadata(path).with_context(|| format!("opening {}", path.display()))?;
        let mut notes = Vec::new();
        let (dir, names) = if metadata.is_dir() {
            (path.to_owned(), shard_names(path, &mut notes)?)
        } else {
            let dir = match path.parent() {
                Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
                _ => PathBuf::from("."),
            };
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name == INDEX || name == "config.json" || shard_of(&name).is_some() {
                let names = shard_names(&dir, &mut notes)?;
                (dir, names)
            } else {
                ensure!(
                    name.ends_with(".safetensors"),
                    "{}: is neither a folder nor a safetensors file; name the checkpoint's folder",
                    path.display()
                );
                (dir, vec![name.into_owned()])
            }
        };

        let mut checkpoint = Self {
            dir,
            files: Vec::new(),
            tensors: Vec::new(),
            format_mlx: false,
            notes,
        };
        for name in &names {
            checkpoint.add_file(name)?;
        }
        checkpoint.check_names()?;
        checkpoint.check_index()?;
        Ok(checkpoint)
    }

    /// A tensor's bytes.
    pub fn data(&self, tensor: &StTensor) -> &[u8] {
        self.files
            .get(tensor.file)
            .and_then(|f| f.bytes().get(tensor.range.clone()))
            .unwrap_or_default()
    }

    /// The file that holds a tensor, for messages.
    pub fn path_of(&self, tensor: &StTensor) -> &Path {
        self.files
            .get(tensor.file)
            .map_or(self.dir.as_path(), |f| f.path())
    }

    fn add_file(&mut self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        let map = FileMap::open(&path)?;
        let bytes = map.bytes();
        let refuse = |reason: String| anyhow::anyhow!("{}: {reason}", path.display());
        let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| {
            refuse(
                "is cut short: a safetensors file begins with 8 bytes of length; fetch it again"
                    .to_owned(),
            )
        })?;
        let length = u64::from_le_bytes(*length);
        ensure!(
            length <= MAX_HEADER,
            refuse(format!(
                "says that its header has {length} bytes, the format allows {MAX_HEADER}; it is damaged or no safetensors file"
            ))
        );
        let header = rest.get(..length as usize).ok_or_else(|| {
            refuse(format!(
                "is cut short: its header has {length} bytes, the file {}; fetch it again",
                bytes.len()
            ))
        })?;
        let data = 8 + length as usize;
        let header: Header = serde_json::from_slice(header).map_err(|e| {
            refuse(format!(
                "its header cannot be read: {}",
                one_line(&e.to_string())
            ))
        })?;
        self.format_mlx |= header.format.as_deref() == Some("mlx");

        let file = self.files.len();
        let mut tensors = Vec::with_capacity(header.tensors.len());
        for (name, entry) in header.tensors {
            let shown = one_line(&name);
            let dtype = Dtype::from_name(&entry.dtype).ok_or_else(|| {
                refuse(format!(
                    "tensor `{shown}` has the unknown type `{}`",
                    one_line(&entry.dtype)
                ))
            })?;
            let mut bits = Some(dtype.bits() as u64);
            for &n in &entry.shape {
                bits = bits.and_then(|b| b.checked_mul(n));
            }
            let [begin, end] = entry.data_offsets;
            ensure!(
                begin <= end,
                refuse(format!(
                    "tensor `{shown}` ends at {end}, before it begins at {begin}"
                ))
            );
            ensure!(
                bits.is_some_and(|b| b % 8 == 0 && b / 8 == end - begin),
                refuse(format!(
                    "tensor `{shown}` of {dtype} and shape {:?} does not take the {} bytes it is given",
                    entry.shape,
                    end - begin
                ))
            );
            let place = (begin as usize)
                .checked_add(data)
                .zip((end as usize).checked_add(data));
            let Some((begin, end)) = place.filter(|(_, end)| *end <= bytes.len()) else {
                bail!(refuse(format!(
                    "tensor `{shown}` ends {end} bytes into the data, the file has {}; it is cut short, fetch it again",
                    bytes.len() - data
                )));
            };
            tensors.push(StTensor {
                name,
                dtype,
                shape: entry.shape.iter().map(|&n| n as usize).collect(),
                file,
                range: begin..end,
            });
        }
        tensors.sort_by_key(|t| (t.range.start, t.range.end));
        for pair in tensors.windows(2) {
            ensure!(
                pair[1].range.start >= pair[0].range.end,
                refuse(format!(
                    "tensors `{}` and `{}` overlap",
                    one_line(&pair[0].name),
                    one_line(&pair[1].name)
                ))
            );
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        self.tensors.append(&mut tensors);
        self.files.push(map);
        Ok(())
    }

    fn check_names(&self) -> Result<()> {
        let mut seen: HashMap<&str, &StTensor> = HashMap::new();
        for tensor in &self.tensors {
            if let Some(first) = seen.insert(&tensor.name, tensor) {
                bail!(
                    "{}: tensor `{}` is in {} too; keep one of the two",
                    self.path_of(tensor).display(),
                    one_line(&tensor.name),
                    self.path_of(first).display()
                );
            }
        }
        Ok(())
    }

    fn check_index(&self) -> Result<()> {
        let Some(index) = Index::read(&self.dir)? else {
            return Ok(());
        };
        if self.files.len() == 1 && !index.files().contains(&self.files[0].path().to_owned()) {
            // A file that was named by itself need not be the one that the folder's index is about.
            return Ok(());
        }
        let has: std::collections::HashSet<&str> =
            self.tensors.iter().map(|t| t.name.as_str()).collect();
        let missing: Vec<&String> = index
            .weight_map
            .keys()
            .filter(|name| !has.contains(name.as_str()))
            .collect();
        if let Some(first) = missing.iter().min() {
            bail!(
                "{}: {} tensors are in no shard, the first is `{}`; fetch the checkpoint again",
                index.path.display(),
                missing.len(),
                one_line(first)
            );
        }
        Ok(())
    }
}

/// The index of a sharded checkpoint.
struct Index {
    path: PathBuf,
    weight_map: HashMap<String, String>,
}

impl Index {
    fn read(dir: &Path) -> Result<Option<Self>> {
        #[derive(Deserialize)]
        struct Raw {
            weight_map: HashMap<String, String>,
        }
        let path = dir.join(INDEX);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
        };
        let raw: Raw = serde_json::from_slice(&text)
            .with_context(|| format!("{}: cannot be read", path.display()))?;
        for name in raw.weight_map.values() {
            ensure!(
                Path::new(name).components().count() == 1
                    && !name.contains(['/', '\\'])
                    && name != "..",
                "{}: names the shard `{}`, which is not a plain file name",
                path.display(),
                one_line(name)
            );
        }
        Ok(Some(Self {
            path,
            weight_map: raw.weight_map,
        }))
    }

    fn files(&self) -> Vec<PathBuf> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        let mut files: Vec<PathBuf> = self.weight_map.values().map(|n| dir.join(n)).collect();
        files.sort();
        files.dedup();
        files
    }
}

/// The safetensors files of a folder: those that the index names, and a draft head beside them; without an index
/// all.
fn shard_names(dir: &Path, notes: &mut Vec<String>) -> Result<Vec<String>> {
    let mut present: Vec<String> = std::fs::read_dir(dir)
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .with_context(|| format!("reading {}", dir.display()))?
        .iter()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".safetensors") && !name.starts_with('.'))
        .collect();
    present.sort();
    let mut names = match Index::read(dir)? {
        Some(index) => {
            let mut names: Vec<String> = index.weight_map.into_values().collect();
            names.sort();
            names.dedup();
            if let Some(name) = names.iter().find(|n| !present.contains(n)) {
                bail!(
                    "{}: shard `{name}`, which the index names, is missing; fetch it",
                    dir.display()
                );
            }
            for name in present.iter().filter(|n| !names.contains(n)) {
                if name.contains("mtp") {
                    notes.push(format!(
                        "{name} is not in the index; taken for the draft head"
                    ));
                } else {
                    notes.push(format!("{name} is not in the index and was left out"));
                }
            }
            present.retain(|n| n.contains("mtp") && !names.contains(n));
            names.append(&mut present);
            names
        }
        None => present,
    };
    ensure!(
        !names.is_empty(),
        "{}: no safetensors files here; name the checkpoint's folder",
        dir.display()
    );
    names.sort();
    for name in &names {
        let Some((base, _, n)) = shard_of(name) else {
            continue;
        };
        for no in 1..=n {
            let other = format!("{base}-{no:05}-of-{n:05}.safetensors");
            ensure!(
                names.contains(&other),
                "{}: shard `{other}` is missing; fetch it",
                dir.display()
            );
        }
    }
    Ok(names)
}

/// `model-00002-of-00004.safetensors` is part 2 of 4 of `model`.
fn shard_of(name: &str) -> Option<(&str, u32, u32)> {
    let stem = name.strip_suffix(".safetensors")?;
    let (head, n) = stem.rsplit_once("-of-")?;
    let (base, no) = head.rsplit_once('-')?;
    let number = |text: &str| {
        (text.len() == 5)
            .then(|| text.parse().ok())
            .flatten()
            .filter(|&n: &u32| n > 0)
    };
    Some((base, number(no)?, number(n)?))
}

/// A header with its tensors in file order; serde's own maps would let a second tensor of a name replace the
/// first in silence.
struct Header {
    format: Option<String>,
    tensors: Vec<(String, Entry)>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header {
                    format: None,
                    tensors: Vec::new(),
                };
                let mut names = std::collections::HashSet::new();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        let metadata: Option<HashMap<String, String>> = map.next_value()?;
                        header.format = metadata.and_then(|mut m| m.remove("format"));
                        continue;
                    }
                    if !names.insert(key.clone()) {
                        map.next_value::<IgnoredAny>()?;
                        return Err(serde::de::Error::custom(format!(
                            "tensor `{key}` comes twice"
                        )));
                    }
                    let entry = map.next_value()?;
                    header.tensors.push((key, entry));
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_known_by_their_names() {
        assert_eq!(
            shard_of("model-00002-of-00004.safetensors"),
            Some(("model", 2, 4))
        );
        assert_eq!(shard_of("model.safetensors"), None);
        assert_eq!(shard_of("model-2-of-4.safetensors"), None);
        assert_eq!(shard_of("model-00000-of-00000.safetensors"), None);
    }
}
