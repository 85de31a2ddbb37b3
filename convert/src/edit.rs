//! Changing metadata of a GGUF file.
//!
//! Tensors' places count from the end of the padded header, so new metadata can take the place of the old where the
//! padded header keeps its length: then only the bytes that differ are written, and a file of any size takes a moment.
//! All other keys stay where they are, byte for byte. Otherwise the file is written anew beside the old one, tensors copied as they are, and takes its name when
//! complete.

use std::fs::OpenOptions;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use ggml_metal::{Gguf, GgufWriter, Kind, Value, one_line};
use serde_json::Value as Json;

use crate::output::{OutputFile, check_apart};
use crate::split::copy_range;

/// How tensors' places are padded; a change would need another layout.
const ALIGNMENT_KEY: &str = "general.alignment";

/// A change of one key.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Gives the key a value.
    Set(String, Kind, Value),
    /// Takes the key out.
    Remove(String),
}

/// Reads `KEY=VALUE` or `KEY=TYPE:VALUE`. Without a type the value keeps the type that the key has in `file`; that of
/// a new key is told from the value.
///
/// # Errors
/// When there is no key, or the value is not of its type.
pub fn parse(text: &str, file: &Gguf) -> Result<Change> {
    let Some((key, given)) = text.split_once('=').filter(|(key, _)| !key.is_empty()) else {
        bail!("`{text}`: expected KEY=VALUE or KEY=TYPE:VALUE");
    };
    let typed = given
        .split_once(':')
        .and_then(|(name, value)| Some((Kind::from_name(name)?, value)));
    let old = file.value(key);
    let is_list = match (&old, typed) {
        (_, Some((_, value))) => value.trim_start().starts_with('['),
        (Some(old), None) => matches!(
            old,
            Value::Ints(_) | Value::Floats(_) | Value::Bools(_) | Value::Strs(_)
        ),
        (None, None) => given.trim_start().starts_with('['),
    };
    let (kind, given) = match (typed, file.kind(key)) {
        (Some((kind, value)), _) => (Some(kind), value),
        (None, kind) => (kind, given),
    };
    let read = if is_list {
        read_list(kind, given)
    } else {
        read_one(kind, given)
    };
    match read {
        Some((kind, value)) => Ok(Change::Set(key.to_owned(), kind, value)),
        None => bail!(
            "`{text}`: expected {}{}; `{key}=TYPE:VALUE` chooses another type",
            if is_list { "a JSON list of " } else { "" },
            kind.map_or("values of one kind", Kind::name)
        ),
    }
}

fn read_one(kind: Option<Kind>, text: &str) -> Option<(Kind, Value)> {
    let Some(kind) = kind else {
        // Text unless it reads as something else.
        return match text {
            "true" | "false" => read_one(Some(Kind::Bool), text),
            _ => [Kind::U32, Kind::I64, Kind::F32, Kind::Str]
                .into_iter()
                .find_map(|kind| read_one(Some(kind), text)),
        };
    };
    let value = match kind {
        Kind::Str => Value::Str(text.to_owned()),
        Kind::Bool => Value::Bool(text.parse().ok()?),
        Kind::F32 | Kind::F64 => {
            let number: f64 = text.parse().ok()?;
            // Words such as `nan` are text.
            Value::Float(Some(number).filter(|n| n.is_finite())?)
        }
        _ => Value::Int(Some(text.parse().ok()?).filter(|&n| in_range(kind, n))?),
    };
    Some((kind, value))
}

fn read_list(kind: Option<Kind>, text: &str) -> Option<(Kind, Value)> {
    let list: Vec<Json> = serde_json::from_str(text).ok()?;
    let Some(kind) = kind else {
        return [Kind::Bool, Kind::I32, Kind::I64, Kind::F32, Kind::Str]
            .into_iter()
            .find_map(|kind| read_list(Some(kind), text));
    };
    let list = list.iter();
    let value = match kind {
        Kind::Str => {
            let texts = list.map(|v| Some(v.as_str()?.to_owned()));
            Value::Strs(texts.collect::<Option<_>>()?)
        }
        Kind::Bool => Value::Bools(list.map(Json::as_bool).collect::<Option<_>>()?),
        Kind::F32 | Kind::F64 => Value::Floats(list.map(Json::as_f64).collect::<Option<_>>()?),
        _ => {
            let numbers = list.map(|v| v.as_i64().filter(|&n| in_range(kind, n.into())));
            Value::Ints(numbers.collect::<Option<_>>()?)
        }
    };
    Some((kind, value))
}

fn in_range(kind: Kind, n: i128) -> bool {
    let (low, high) = match kind {
        Kind::U8 => (0, u8::MAX.into()),
        Kind::I8 => (i8::MIN.into(), i8::MAX.into()),
        Kind::U16 => (0, u16::MAX.into()),
        Kind::I16 => (i16::MIN.into(), i16::MAX.into()),
        Kind::U32 => (0, u32::MAX.into()),
        Kind::I32 => (i32::MIN.into(), i32::MAX.into()),
        Kind::U64 => (0, u64::MAX.into()),
        Kind::I64 => (i64::MIN.into(), i64::MAX.into()),
        Kind::F32 | Kind::F64 | Kind::Bool | Kind::Str => return false,
    };
    (low..=high).contains(&n)
}

/// What became of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Edited {
    /// The metadata was changed where it lies.
    InPlace,
    /// A new file was written.
    Anew,
}

/// Carries changes out, on `file` itself or into `output`. `progress` is told bytes copied and in all, and stops the
/// work by returning false.
///
/// # Errors
/// When a key to be removed is not there, a key cannot be changed, or the file cannot be written. The old file is
/// then as it was.
pub fn edit(
    file: &Gguf,
    changes: &[Change],
    output: Option<&Path>,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Edited> {
    let path = file.path();
    let mut header = Header::read(file)?;
    for change in changes {
        header
            .apply(change)
            .with_context(|| path.display().to_string())?;
    }
    let header = header.bytes(alignment(file));
    if let Some(output) = output {
        check_apart(output, [path])?;
    } else if header.len() == file.data_offset() {
        patch(file, &header)?;
        return Ok(Edited::InPlace);
    }
    let data = file.data_offset()..file.map().bytes().len();
    let mut out = OutputFile::create(output.unwrap_or(path), (header.len() + data.len()) as u64)?;
    let write = || format!("writing {}", output.unwrap_or(path).display());
    out.write_all(&header).with_context(write)?;
    let total = data.len() as u64;
    let mut done = 0;
    copy_range(&out, path, data.start as u64, total, &mut |n| {
        done += n;
        progress(done, total)
    })?;
    if output.is_none() {
        // The new file takes the old one's place, rights included.
        let rights = std::fs::metadata(path).map(|m| m.permissions());
        rights
            .and_then(|rights| out.file().set_permissions(rights))
            .with_context(write)?;
    }
    out.finish()?;
    Ok(Edited::Anew)
}

/// What tensors' places are padded to.
fn alignment(file: &Gguf) -> usize {
    match file.value(ALIGNMENT_KEY) {
        Some(Value::Int(n)) => usize::try_from(n).unwrap_or(GgufWriter::ALIGNMENT),
        _ => GgufWriter::ALIGNMENT,
    }
}

/// A file's header taken apart: magic, version and number of tensors; then pairs of key and value; then the
/// descriptions of tensors, whose places do not depend on what stands before them.
struct Header {
    /// Magic, version (`u32`) and number of tensors (`u64`).
    start: Vec<u8>,
    /// Each pair with its bytes: length of the key (`u64`), key, kind (`u32`), value.
    pairs: Vec<(String, Vec<u8>)>,
    tensors: Vec<u8>,
}

impl Header {
    /// Takes the header of a file apart that has been found to be well formed.
    fn read(file: &Gguf) -> Result<Self> {
        let all = file.map().bytes();
        Self::take(all, file.tensors().len()).with_context(|| {
            format!(
                "{}: its header cannot be taken apart",
                file.path().display()
            )
        })
    }

    fn take(all: &[u8], n_tensors: usize) -> Option<Self> {
        let (start, mut rest) = all.split_at_checked(16)?;
        let n_pairs = number(&mut rest)?;
        let mut pairs = Vec::new();
        for _ in 0..n_pairs {
            let before = rest;
            let key = bytes(&mut rest)?;
            let key = String::from_utf8_lossy(key).into_owned();
            skip_value(&mut rest)?;
            pairs.push((key, before[..before.len() - rest.len()].to_vec()));
        }
        let before = rest;
        for _ in 0..n_tensors {
            bytes(&mut rest)?;
            let n_dims = kind(&mut rest)? as usize;
            // Dimensions, type and place.
            skip(&mut rest, n_dims.checked_mul(8)?.checked_add(4 + 8)?)?;
        }
        Some(Self {
            start: start.to_vec(),
            pairs,
            tensors: before[..before.len() - rest.len()].to_vec(),
        })
    }

    fn apply(&mut self, change: &Change) -> Result<()> {
        let key = match change {
            Change::Set(key, ..) | Change::Remove(key) => key,
        };
        ensure!(
            key != ALIGNMENT_KEY,
            "the key `{key}` says how tensors lie and cannot be changed"
        );
        let at = self.pairs.iter().position(|(k, _)| k == key);
        match change {
            Change::Set(key, kind, value) => {
                let pair = (key.clone(), encode(key, *kind, value)?);
                match at {
                    Some(at) => self.pairs[at] = pair,
                    None => self.pairs.push(pair),
                }
            }
            Change::Remove(key) => {
                let Some(at) = at else {
                    bail!("has no key `{}`", one_line(key));
                };
                self.pairs.remove(at);
            }
        }
        Ok(())
    }

    /// The header, padded.
    fn bytes(&self, alignment: usize) -> Vec<u8> {
        let mut out = self.start.clone();
        out.extend((self.pairs.len() as u64).to_ne_bytes());
        for (_, bytes) in &self.pairs {
            out.extend(bytes);
        }
        out.extend(&self.tensors);
        out.resize(out.len().next_multiple_of(alignment), 0);
        out
    }
}

/// A pair as files hold it.
fn encode(key: &str, kind: Kind, value: &Value) -> Result<Vec<u8>> {
    /// The number of the kind `array`.
    const ARRAY: u32 = 9;
    let Some(encoded) = kind.encode(value) else {
        bail!("the key `{key}` cannot hold this value as {}", kind.name());
    };
    let n = match value {
        Value::Ints(v) => Some(v.len()),
        Value::Floats(v) => Some(v.len()),
        Value::Bools(v) => Some(v.len()),
        Value::Strs(v) => Some(v.len()),
        _ => None,
    };
    let mut out = (key.len() as u64).to_ne_bytes().to_vec();
    out.extend(key.bytes());
    if let Some(n) = n {
        out.extend(ARRAY.to_ne_bytes());
        out.extend(kind.number().to_ne_bytes());
        out.extend((n as u64).to_ne_bytes());
    } else {
        out.extend(kind.number().to_ne_bytes());
    }
    out.extend(encoded);
    Ok(out)
}

fn skip(rest: &mut &[u8], n: usize) -> Option<()> {
    *rest = rest.get(n..)?;
    Some(())
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    let (head, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(u64::from_ne_bytes(*head))
}

fn kind(rest: &mut &[u8]) -> Option<u32> {
    let (head, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(u32::from_ne_bytes(*head))
}

/// A length and as many bytes.
fn bytes<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let n = usize::try_from(number(rest)?).ok()?;
    let (head, tail) = rest.split_at_checked(n)?;
    *rest = tail;
    Some(head)
}

/// Passes over a kind and a value of it.
fn skip_value(rest: &mut &[u8]) -> Option<()> {
    let (of, n) = match kind(rest)? {
        9 => (kind(rest)?, number(rest)?),
        of => (of, 1),
    };
    let width = match of {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        8 => {
            for _ in 0..n {
                bytes(rest)?;
            }
            return Some(());
        }
        _ => return None,
    };
    skip(rest, usize::try_from(n).ok()?.checked_mul(width)?)
}

/// Writes the bytes of the header that differ, in one piece.
fn patch(file: &Gguf, header: &[u8]) -> Result<()> {
    let old = &file.map().bytes()[..header.len()];
    let differs = |(a, b): (&u8, &u8)| a != b;
    let Some(first) = old.iter().zip(header).position(differs) else {
        return Ok(());
    };
    let last = old.iter().zip(header).rposition(differs).unwrap_or(first);
    let write = || -> std::io::Result<()> {
        let mut out = OpenOptions::new().write(true).open(file.path())?;
        out.seek(SeekFrom::Start(first as u64))?;
        out.write_all(&header[first..=last])?;
        out.sync_data()
    };
    write().with_context(|| format!("writing {}", file.path().display()))
}
