//! GGUF files: reading with every guard that ggml's own reader leaves to its caller, and writing.
//!
//! Reading goes through ggml's `gguf_*` functions over the mapped bytes, so a file is accepted exactly where
//! llama.cpp accepts it. Added here: tensor ranges are checked against the file's length, types before every
//! typed getter (they abort otherwise), and messages name the file.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{DType, Error, FileMap, log};

/// ggml's reader believes this key, its writer does not: a file with it would not be laid out as it says.
const ALIGNMENT_KEY: &str = "general.alignment";

/// Where a tensor lies in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, such as `blk.0.attn_norm.weight`.
    pub name: String,
    /// Elements per dimension in ggml order (fastest first), 1 beyond the last.
    pub shape: [i64; 4],
    /// Element type.
    pub dtype: DType,
    /// Bytes from the start of the file.
    pub offset: usize,
    /// Bytes of its data.
    pub bytes: usize,
}

impl TensorInfo {
    /// The shape without trailing ones.
    pub fn dims(&self) -> &[i64] {
        let n = self
            .shape
            .iter()
            .rposition(|&n| n != 1)
            .map_or(1, |i| i + 1);
        &self.shape[..n]
    }

    /// Elements in all.
    pub fn n_elements(&self) -> u64 {
        self.shape.iter().product::<i64>() as u64
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any signed or unsigned integer.
    Int(i128),
    /// `f32` or `f64`.
    Float(f64),
    /// A flag.
    Bool(bool),
    /// Text; bytes that are not UTF-8 are replaced.
    Str(String),
    /// Integers of any width.
    Ints(Vec<i64>),
    /// Floats of any width.
    Floats(Vec<f64>),
    /// Flags.
    Bools(Vec<bool>),
    /// Texts.
    Strs(Vec<String>),
}

/// How a metadata value is stored; of an array, how its elements are.
#[allow(missing_docs)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
    F64,
    Bool,
    Str,
}

impl Kind {
    const ALL: [(Self, ggml::gguf_type, &str); 12] = [
        (Self::U8, ggml::GGUF_TYPE_UINT8, "u8"),
        (Self::I8, ggml::GGUF_TYPE_INT8, "i8"),
        (Self::U16, ggml::GGUF_TYPE_UINT16, "u16"),
        (Self::I16, ggml::GGUF_TYPE_INT16, "i16"),
        (Self::U32, ggml::GGUF_TYPE_UINT32, "u32"),
        (Self::I32, ggml::GGUF_TYPE_INT32, "i32"),
        (Self::U64, ggml::GGUF_TYPE_UINT64, "u64"),
        (Self::I64, ggml::GGUF_TYPE_INT64, "i64"),
        (Self::F32, ggml::GGUF_TYPE_FLOAT32, "f32"),
        (Self::F64, ggml::GGUF_TYPE_FLOAT64, "f64"),
        (Self::Bool, ggml::GGUF_TYPE_BOOL, "bool"),
        (Self::Str, ggml::GGUF_TYPE_STRING, "str"),
    ];

    /// Its name, such as `u32` or `str`.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|k| k.0 == self).map_or("?", |k| k.2)
    }

    /// The kind with that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|k| k.2 == name).map(|k| k.0)
    }

    fn from_raw(raw: ggml::gguf_type) -> Option<Self> {
        Self::ALL.iter().find(|k| k.1 == raw).map(|k| k.0)
    }

    /// Its number in files.
    pub fn number(self) -> u32 {
        Self::ALL
            .iter()
            .find(|k| k.0 == self)
            .map_or(ggml::GGUF_TYPE_COUNT, |k| k.1)
    }

    /// A value, or the elements of a list, as files hold it; none where the value is not of this kind or out of its
    /// range.
    pub fn encode(self, value: &Value) -> Option<Vec<u8>> {
        let text = |text: &String| {
            let mut bytes = (text.len() as u64).to_ne_bytes().to_vec();
            bytes.extend_from_slice(text.as_bytes());
            bytes
        };
        let ints = |list: &[i64]| list.iter().map(|&v| self.int_bytes(v.into())).collect();
        let floats = |list: &[f64]| list.iter().map(|&v| self.float_bytes(v)).collect();
        let parts: Option<Vec<Vec<u8>>> = match value {
            Value::Int(v) => self.int_bytes(*v).map(|b| vec![b]),
            Value::Ints(v) => ints(v),
            Value::Float(v) => self.float_bytes(*v).map(|b| vec![b]),
            Value::Floats(v) => floats(v),
            Value::Bool(v) if self == Self::Bool => Some(vec![vec![u8::from(*v)]]),
            Value::Bools(v) if self == Self::Bool => {
                Some(vec![v.iter().map(|&v| u8::from(v)).collect()])
            }
            Value::Str(v) if self == Self::Str => Some(vec![text(v)]),
            Value::Strs(v) if self == Self::Str => Some(v.iter().map(text).collect()),
            _ => None,
        };
        parts.map(|p| p.concat())
    }

    /// The bytes that ggml keeps of an integer, if it is in the kind's range.
    fn int_bytes(self, value: i128) -> Option<Vec<u8>> {
        macro_rules! bytes {
            ($t:ty) => {
                <$t>::try_from(value).ok().map(|v| v.to_ne_bytes().to_vec())
            };
        }
        match self {
            Self::U8 => bytes!(u8),
            Self::I8 => bytes!(i8),
            Self::U16 => bytes!(u16),
            Self::I16 => bytes!(i16),
            Self::U32 => bytes!(u32),
            Self::I32 => bytes!(i32),
            Self::U64 => bytes!(u64),
            Self::I64 => bytes!(i64),
            Self::F32 => Some((value as f32).to_ne_bytes().to_vec()),
            Self::F64 => Some((value as f64).to_ne_bytes().to_vec()),
            Self::Bool | Self::Str => None,
        }
    }

    /// The same of a float; only the float kinds take one.
    fn float_bytes(self, value: f64) -> Option<Vec<u8>> {
        match self {
            Self::F32 => Some((value as f32).to_ne_bytes().to_vec()),
            Self::F64 => Some(value.to_ne_bytes().to_vec()),
            _ => None,
        }
    }
}

/// An open GGUF file: its metadata, and its tensors' places in the map.
pub struct Gguf {
    context: GgufContext,
    map: Arc<FileMap>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    data_offset: usize,
}

/// Owns the C reader's state.
struct GgufContext(*mut ggml::gguf_context);

// SAFETY: the context is plain data that only this value points to; reading it from several threads is fine,
// and nothing changes it after it was made (the writer keeps its own to itself behind `&mut`).
unsafe impl Send for GgufContext {}
// SAFETY: as above.
unsafe impl Sync for GgufContext {}

impl Drop for GgufContext {
    fn drop(&mut self) {
        // SAFETY: the pointer came from gguf_init_* and is freed once.
        unsafe { ggml::gguf_free(self.0) }
    }
}

impl Gguf {
    /// Opens and checks `path`. Tensor data stays in the map and is not read.
    ///
    /// # Errors
    /// When the file cannot be mapped, is not GGUF version 2 or 3, is inconsistent, or ends before its
    /// tensors do.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::read(FileMap::open(path)?)
    }

    /// A file that exists in memory only, called `path` in messages. `fill(i, data)` writes the data of the `i`-th
    /// tensor of `writer`, which is zero before.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn in_memory(
        path: &Path,
        writer: &GgufWriter,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result<Self, Error> {
        let header = writer.header();
        let padded = |&bytes: &usize| bytes.next_multiple_of(GgufWriter::ALIGNMENT);
        let bytes = header.len() + writer.sizes().iter().map(padded).sum::<usize>();
        Self::read(FileMap::in_memory(path, bytes, |map| {
            let (head, mut rest) = map.split_at_mut(header.len());
            head.copy_from_slice(&header);
            for (i, bytes) in writer.sizes().iter().enumerate() {
                let (data, others) = rest.split_at_mut(padded(bytes));
                fill(i, &mut data[..*bytes]);
                rest = others;
            }
        })?)
    }

    fn read(map: FileMap) -> Result<Self, Error> {
        let map = Arc::new(map);
        let path = map.path();
        let refuse = |reason: String| Error::Format {
            path: path.to_owned(),
            reason,
        };
        let bytes = map.bytes();
        if !bytes.starts_with(b"GGUF") {
            return Err(refuse(
                "is not a GGUF file: it does not begin with `GGUF`; convert checkpoints with `qrun convert`"
                    .to_owned(),
            ));
        }
        if bytes.len() < 24 {
            return Err(refuse(format!(
                "is cut short: {} bytes, a GGUF header has 24",
                bytes.len()
            )));
        }
        log::install();
        log::clear();
        let params = ggml::gguf_init_params {
            no_alloc: true,
            ctx: std::ptr::null_mut(),
        };
        // SAFETY: the pointer and length describe the map, which outlives the call; nothing of it is kept.
        let raw =
            unsafe { ggml::gguf_init_from_buffer(bytes.as_ptr().cast(), bytes.len(), params) };
        if raw.is_null() {
            return Err(refuse(format!(
                "its header cannot be read{}; the file is damaged or cut short, fetch it again",
                log::take()
            )));
        }
        let context = GgufContext(raw);

        // SAFETY: the context is alive.
        let (n_tensors, data_offset) = unsafe {
            (
                ggml::gguf_get_n_tensors(raw),
                ggml::gguf_get_data_offset(raw),
            )
        };
        let mut tensors = Vec::new();
        let mut by_name = HashMap::new();
        for id in 0..n_tensors {
            // SAFETY: id is below the number of tensors; ne points to four dimensions.
            let (name, shape, dtype, bytes_in_tensor, relative) = unsafe {
                (
                    lossy(ggml::gguf_get_tensor_name(raw, id)),
                    *ggml::gguf_get_tensor_ne(raw, id).cast::<[i64; 4]>(),
                    DType(ggml::gguf_get_tensor_type(raw, id)),
                    ggml::gguf_get_tensor_size(raw, id),
                    ggml::gguf_get_tensor_offset(raw, id),
                )
            };
            let shown = crate::error::one_line(&name);
            let offset = data_offset.checked_add(relative);
            let end = offset.and_then(|o| o.checked_add(bytes_in_tensor));
            let (Some(offset), Some(end)) = (offset, end) else {
                return Err(refuse(format!(
                    "tensor `{shown}`: its offset is out of range"
                )));
            };
            if end > bytes.len() {
                return Err(refuse(format!(
                    "tensor `{shown}` ends at byte {end}, the file has {}; it is cut short, fetch it again",
                    bytes.len()
                )));
            }
            by_name.insert(name.clone(), tensors.len());
            tensors.push(TensorInfo {
                name,
                shape,
                dtype,
                offset,
                bytes: bytes_in_tensor,
            });
        }
        Ok(Self {
            context,
            map: map.clone(),
            tensors,
            by_name,
            data_offset,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// The map that holds the tensors' data.
    pub fn map(&self) -> &Arc<FileMap> {
        &self.map
    }

    /// The format's version, 2 or 3.
    pub fn version(&self) -> u32 {
        // SAFETY: the context is alive.
        unsafe { ggml::gguf_get_version(self.context.0) }
    }

    /// Bytes before the first tensor's data.
    pub fn data_offset(&self) -> usize {
        self.data_offset
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// A tensor's bytes in the map.
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        self.map
            .bytes()
            .get(tensor.offset..tensor.offset + tensor.bytes)
            .unwrap_or_default()
    }

    /// The metadata keys in file order.
    pub fn keys(&self) -> Vec<String> {
        // SAFETY: the context is alive and ids run below the number of pairs.
        unsafe {
            (0..ggml::gguf_get_n_kv(self.context.0))
                .map(|id| lossy(ggml::gguf_get_key(self.context.0, id)))
                .collect()
        }
    }

    /// The value of a key; arrays are copied, so ask once.
    pub fn value(&self, key: &str) -> Option<Value> {
        let raw = self.context.0;
        let key = CString::new(key).ok()?;
        // SAFETY: the context is alive; the id was just found; every getter is called for the type that the
        // reader reports; arrays are read over exactly the length that it reports.
        unsafe {
            let id = ggml::gguf_find_key(raw, key.as_ptr());
            if id < 0 {
                return None;
            }
            let int = |v: i128| Some(Value::Int(v));
            match ggml::gguf_get_kv_type(raw, id) {
                ggml::GGUF_TYPE_UINT8 => int(ggml::gguf_get_val_u8(raw, id).into()),
                ggml::GGUF_TYPE_INT8 => int(ggml::gguf_get_val_i8(raw, id).into()),
                ggml::GGUF_TYPE_UINT16 => int(ggml::gguf_get_val_u16(raw, id).into()),
                ggml::GGUF_TYPE_INT16 => int(ggml::gguf_get_val_i16(raw, id).into()),
                ggml::GGUF_TYPE_UINT32 => int(ggml::gguf_get_val_u32(raw, id).into()),
                ggml::GGUF_TYPE_INT32 => int(ggml::gguf_get_val_i32(raw, id).into()),
                ggml::GGUF_TYPE_UINT64 => int(ggml::gguf_get_val_u64(raw, id).into()),
                ggml::GGUF_TYPE_INT64 => int(ggml::gguf_get_val_i64(raw, id).into()),
                ggml::GGUF_TYPE_FLOAT32 => {
                    Some(Value::Float(ggml::gguf_get_val_f32(raw, id).into()))
                }
                ggml::GGUF_TYPE_FLOAT64 => Some(Value::Float(ggml::gguf_get_val_f64(raw, id))),
                ggml::GGUF_TYPE_BOOL => Some(Value::Bool(ggml::gguf_get_val_bool(raw, id))),
                ggml::GGUF_TYPE_STRING => Some(Value::Str(lossy(ggml::gguf_get_val_str(raw, id)))),
                ggml::GGUF_TYPE_ARRAY => self.array(id),
                _ => None,
            }
        }
    }

    /// How the value of a key is stored.
    pub fn kind(&self, key: &str) -> Option<Kind> {
        let raw = self.context.0;
        let key = CString::new(key).ok()?;
        // SAFETY: the context is alive; the id was just found, and the element type is asked of arrays only.
        unsafe {
            let id = ggml::gguf_find_key(raw, key.as_ptr());
            if id < 0 {
                return None;
            }
            let kind = match ggml::gguf_get_kv_type(raw, id) {
                ggml::GGUF_TYPE_ARRAY => ggml::gguf_get_arr_type(raw, id),
                kind => kind,
            };
            Kind::from_raw(kind)
        }
    }

    fn array(&self, id: i64) -> Option<Value> {
        let raw = self.context.0;
        // SAFETY: `value` checked that id is an array; its data is read as the element type that the reader
        // reports, over the length that it reports (ggml keeps bools as one byte each).
        unsafe {
            let n = ggml::gguf_get_arr_n(raw, id);
            let kind = ggml::gguf_get_arr_type(raw, id);
            if kind == ggml::GGUF_TYPE_STRING {
                let texts = (0..n).map(|i| lossy(ggml::gguf_get_arr_str(raw, id, i)));
                return Some(Value::Strs(texts.collect()));
            }
            if n == 0 {
                return Some(Value::Ints(Vec::new()));
            }
            let data = ggml::gguf_get_arr_data(raw, id);
            macro_rules! read {
                ($t:ty) => {
                    std::slice::from_raw_parts(data.cast::<$t>(), n)
                        .iter()
                        .copied()
                };
            }
            Some(match kind {
                ggml::GGUF_TYPE_UINT8 => Value::Ints(read!(u8).map(i64::from).collect()),
                ggml::GGUF_TYPE_INT8 => Value::Ints(read!(i8).map(i64::from).collect()),
                ggml::GGUF_TYPE_UINT16 => Value::Ints(read!(u16).map(i64::from).collect()),
                ggml::GGUF_TYPE_INT16 => Value::Ints(read!(i16).map(i64::from).collect()),
                ggml::GGUF_TYPE_UINT32 => Value::Ints(read!(u32).map(i64::from).collect()),
                ggml::GGUF_TYPE_INT32 => Value::Ints(read!(i32).map(i64::from).collect()),
                ggml::GGUF_TYPE_UINT64 => Value::Ints(read!(u64).map(|v| v as i64).collect()),
                ggml::GGUF_TYPE_INT64 => Value::Ints(read!(i64).collect()),
                ggml::GGUF_TYPE_FLOAT32 => Value::Floats(read!(f32).map(f64::from).collect()),
                ggml::GGUF_TYPE_FLOAT64 => Value::Floats(read!(f64).collect()),
                ggml::GGUF_TYPE_BOOL => Value::Bools(read!(u8).map(|v| v != 0).collect()),
                _ => return None,
            })
        }
    }
}

/// Collects metadata and tensors for a new GGUF file (version 3) and writes it.
pub struct GgufWriter {
    context: GgufContext,
    tensors: crate::graph::Context,
    sizes: Vec<usize>,
}

impl GgufWriter {
    /// Each tensor's data starts at a multiple of this many bytes.
    pub const ALIGNMENT: usize = 32;

    /// A writer with room for `max_tensors`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(max_tensors: usize) -> Result<Self, Error> {
        let tensors = crate::graph::Context::new(max_tensors)?;
        // SAFETY: no arguments; ggml returns an owned context.
        let raw = unsafe { ggml::gguf_init_empty() };
        if raw.is_null() {
            return Err(Error::Device("no memory for a GGUF header".to_owned()));
        }
        Ok(Self {
            context: GgufContext(raw),
            tensors,
            sizes: Vec::new(),
        })
    }

    /// Takes over all metadata of an open file but its alignment, which is this writer's own.
    pub fn copy_metadata(&mut self, from: &Gguf) {
        // SAFETY: both contexts are alive.
        unsafe { ggml::gguf_set_kv(self.context.0, from.context.0) }
        self.remove(ALIGNMENT_KEY);
    }

    /// Sets a key to a value: integers become `u32` where they fit, else `i64`; floats `f32`; lists of integers
    /// `i32`.
    ///
    /// # Errors
    /// See [`GgufWriter::set_as`].
    pub fn set(&mut self, key: &str, value: &Value) -> Result<(), Error> {
        let kind = match value {
            Value::Int(v) if u32::try_from(*v).is_ok() => Kind::U32,
            Value::Int(_) => Kind::I64,
            Value::Ints(_) => Kind::I32,
            Value::Float(_) | Value::Floats(_) => Kind::F32,
            Value::Bool(_) | Value::Bools(_) => Kind::Bool,
            Value::Str(_) | Value::Strs(_) => Kind::Str,
        };
        self.set_as(key, kind, value)
    }

    /// Sets a key to a value, or to an array of values, of a kind. A key that was there moves to the end.
    ///
    /// # Errors
    /// When the value is not of that kind or out of its range; when a key is empty or a text holds a zero byte,
    /// which the format's C readers cannot represent; when the key is `general.alignment`, because tensors are
    /// laid out at the default one.
    pub fn set_as(&mut self, key: &str, kind: Kind, value: &Value) -> Result<(), Error> {
        let raw = self.context.0;
        if key.is_empty() || key == ALIGNMENT_KEY {
            return Err(Error::Quantize(format!("the key `{key}` cannot be set")));
        }
        let c_key = c_string(key)?;
        let unfit = || {
            Error::Quantize(format!(
                "the key `{key}` cannot hold this value as {}",
                kind.name()
            ))
        };
        let bytes = kind.encode(value).ok_or_else(unfit)?;
        let n = match value {
            Value::Str(v) => {
                let text = c_string(v)?;
                // SAFETY: the context is alive; both strings live through the call, which copies them.
                unsafe { ggml::gguf_set_val_str(raw, c_key.as_ptr(), text.as_ptr()) };
                return Ok(());
            }
            Value::Strs(v) => {
                let texts: Vec<CString> =
                    v.iter().map(|v| c_string(v)).collect::<Result<_, _>>()?;
                let mut pointers: Vec<_> = texts.iter().map(|t| t.as_ptr()).collect();
                // SAFETY: the context is alive; the strings live through the call, which copies them.
                unsafe {
                    ggml::gguf_set_arr_str(
                        raw,
                        c_key.as_ptr(),
                        pointers.as_mut_ptr(),
                        pointers.len(),
                    );
                }
                return Ok(());
            }
            Value::Ints(v) => Some(v.len()),
            Value::Floats(v) => Some(v.len()),
            Value::Bools(v) => Some(v.len()),
            Value::Int(_) | Value::Float(_) | Value::Bool(_) => None,
        };
        let key = c_key.as_ptr();
        // SAFETY: the context is alive; key and bytes live through each call, which copies them; the bytes hold n
        // values of the kind, or one, copied out unaligned.
        unsafe {
            macro_rules! one {
                ($set:ident, $t:ty) => {
                    ggml::$set(raw, key, bytes.as_ptr().cast::<$t>().read_unaligned())
                };
            }
            match (n, kind) {
                (Some(n), _) => {
                    ggml::gguf_set_arr_data(raw, key, kind.number(), bytes.as_ptr().cast(), n);
                }
                (None, Kind::U8) => one!(gguf_set_val_u8, u8),
                (None, Kind::I8) => one!(gguf_set_val_i8, i8),
                (None, Kind::U16) => one!(gguf_set_val_u16, u16),
                (None, Kind::I16) => one!(gguf_set_val_i16, i16),
                (None, Kind::U32) => one!(gguf_set_val_u32, u32),
                (None, Kind::I32) => one!(gguf_set_val_i32, i32),
                (None, Kind::U64) => one!(gguf_set_val_u64, u64),
                (None, Kind::I64) => one!(gguf_set_val_i64, i64),
                (None, Kind::F32) => one!(gguf_set_val_f32, f32),
                (None, Kind::F64) => one!(gguf_set_val_f64, f64),
                (None, Kind::Bool) => ggml::gguf_set_val_bool(raw, key, bytes[0] != 0),
                (None, Kind::Str) => return Err(unfit()),
            }
        }
        Ok(())
    }

    /// Removes a key if it is there.
    pub fn remove(&mut self, key: &str) {
        if let Ok(key) = CString::new(key) {
            // SAFETY: the context is alive.
            unsafe {
                ggml::gguf_remove_key(self.context.0, key.as_ptr());
            }
        }
    }

    /// Announces a tensor; its data is asked for in the same order when the file is written.
    ///
    /// # Errors
    /// When the shape does not fit the type's blocks, or more tensors come than there is room for.
    pub fn add_tensor(&mut self, name: &str, shape: &[i64], dtype: DType) -> Result<(), Error> {
        let tensor = self.tensors.new_tensor(name, dtype, shape);
        self.tensors.check()?;
        self.sizes.push(tensor.bytes());
        // SAFETY: the context is alive and copies what it needs of the tensor, which lives in `self.tensors`.
        unsafe { ggml::gguf_add_tensor(self.context.0, tensor.as_ptr()) }
        Ok(())
    }

    /// The file up to the first tensor's data, padded. The data of each tensor follows in the order in which they
    /// were added, each padded to [`GgufWriter::ALIGNMENT`].
    pub fn header(&self) -> Vec<u8> {
        // SAFETY: the context is alive; the buffer has the size that it asks for.
        unsafe {
            let mut header = vec![0u8; ggml::gguf_get_meta_size(self.context.0)];
            ggml::gguf_get_meta_data(self.context.0, header.as_mut_ptr().cast());
            header
        }
    }

    /// Bytes that each tensor's data takes, in order, without padding.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Writes the file: a temporary name in the same folder first, renamed when complete.
    ///
    /// `data(i)` gives the bytes of the `i`-th tensor added.
    ///
    /// # Errors
    /// When a tensor's bytes have another length than announced, or writing fails; nothing is left behind.
    pub fn write<'a>(
        &self,
        path: &Path,
        mut data: impl FnMut(usize) -> Result<std::borrow::Cow<'a, [u8]>, Error>,
    ) -> Result<(), Error> {
        let header = self.header();
        let temporary = temporary_name(path);
        let io = |source| Error::Io {
            path: path.to_owned(),
            source,
        };
        let result = (|| {
            let file = std::fs::File::create(&temporary).map_err(io)?;
            let mut file = std::io::BufWriter::with_capacity(1 << 20, file);
            file.write_all(&header).map_err(io)?;
            for (i, &bytes) in self.sizes.iter().enumerate() {
                let data = data(i)?;
                if data.len() != bytes {
                    return Err(Error::Format {
                        path: path.to_owned(),
                        reason: format!("tensor {i} has {} bytes, announced {bytes}", data.len()),
                    });
                }
                file.write_all(&data).map_err(io)?;
                let padding = bytes.next_multiple_of(Self::ALIGNMENT) - bytes;
                file.write_all(&vec![0; padding]).map_err(io)?;
            }
            file.flush().map_err(io)?;
            std::fs::rename(&temporary, path).map_err(io)
        })();
        if result.is_err() {
            // The first error is the one to report; the file may not have been made at all.
            let _ = std::fs::remove_file(&temporary);
        }
        result
    }
}

fn temporary_name(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    path.with_file_name(name)
}

fn c_string(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| {
        Error::Quantize(format!(
            "`{}` holds a zero byte, which GGUF readers cannot represent",
            text.escape_default()
        ))
    })
}

/// Copies a C string that ggml owns.
///
/// # Safety
/// `text` must point to a null-terminated string.
unsafe fn lossy(text: *const std::ffi::c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}
