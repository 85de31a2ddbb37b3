//! Weights: tensors of GGUF files made usable on a device, without a copy where the device can.

use std::collections::HashMap;
use std::sync::Arc;

use crate::graph::Context;
use crate::tensor::{Buffer, lay};
use crate::{Backend, DType, Device, Error, FileMap, Gguf, Tensor, TensorInfo, log};

/// What a weight is used for; decides which layouts and devices can hold it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Rows are looked up by token.
    Embedding,
    /// Multiplied with activations.
    Matrix,
    /// As [`Role::Matrix`], one matrix an expert.
    Experts,
    /// Added to, or multiplied element by element: small.
    Vector,
}

/// Where weights ended up, in bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct WeightBytes {
    /// Read in place from the mapped files.
    pub mapped: usize,
    /// Copied to the device's own memory.
    pub copied: usize,
    /// Copied to a layout made for this CPU.
    pub repacked: usize,
    /// Of those mapped and copied: the CPU's, because the device cannot use them.
    pub host_mapped: usize,
    /// See `host_mapped`.
    pub host_copied: usize,
}

impl WeightBytes {
    /// Where most of them lie, in a word: `mapped`, `copied`, or `repacked` where there are repacked ones.
    pub fn layout(&self) -> &'static str {
        match (self.repacked, self.copied > self.mapped) {
            (0, false) => "mapped",
            (0, true) => "copied",
            _ => "repacked",
        }
    }
}

/// Which matrices are copied to a layout made for this CPU, where it has one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Repack {
    /// None: all weights stay in the file's map.
    #[default]
    Never,
    /// All, beside the map: each pass can use the layout that is faster for its width.
    Beside,
    /// All, in place of the map.
    Instead,
}

/// Weights on a device.
pub struct Weights {
    /// Names are unique within one file only, so the map's address stands for the file.
    tensors: HashMap<(usize, String), Tensor>,
    repacked: HashMap<(usize, String), Tensor>,
    bytes: WeightBytes,
}

/// A tensor to load: its place in a file, and its use.
pub struct Wanted<'a> {
    /// The file.
    pub file: &'a Gguf,
    /// The tensor.
    pub info: &'a TensorInfo,
    /// Its use.
    pub role: Role,
    /// It is an embedding that is multiplied with activations too: a tied head.
    pub tied: bool,
    /// It is a vector of F32 that is copied with 1 added to every value.
    pub plus_one: bool,
}

/// ggml wants tensor data at multiples of this; files with a smaller alignment are copied.
const ALIGNMENT: usize = 32;
/// Size of one piece of a streamed upload.
const UPLOAD_BYTES: usize = 16 << 20;

impl Weights {
    /// Makes the wanted tensors usable on `backend`.
    ///
    /// `cpu` holds what the backend's device cannot use (it may be the same backend). `progress` is told bytes done
    /// and in all while copying.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn load(
        wanted: &[Wanted<'_>],
        backend: &Backend,
        cpu: &Backend,
        repack: Repack,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, Error> {
        let mut weights = Self {
            tensors: HashMap::new(),
            repacked: HashMap::new(),
            bytes: WeightBytes::default(),
        };
        let mut in_place: Vec<&Wanted<'_>> = Vec::new();
        let mut host_only: Vec<&Wanted<'_>> = Vec::new();
        let mut copies: HashMap<usize, Vec<&Wanted<'_>>> = HashMap::new();
        let extra = match repack {
            Repack::Never => Vec::new(),
            Repack::Beside | Repack::Instead => backend.device().extra_buffer_types(),
        };
        for want in wanted {
            let aligned = want.info.offset % ALIGNMENT == 0;
            let device = backend.device();
            if let Some(own_layout) = extra.iter().find(|&&t| layout_takes(device, t, want)) {
                copies.entry(*own_layout as usize).or_default().push(want);
                if repack == Repack::Instead && want.role != Role::Embedding {
                    continue;
                }
            }
            if want.plus_one {
                let own = backend.buffer_type() as usize;
                copies.entry(own).or_default().push(want);
            } else if !device_takes(device, want) {
                host_only.push(want);
            } else if device.maps_host_memory() && aligned {
                in_place.push(want);
            } else {
                copies
                    .entry(backend.buffer_type() as usize)
                    .or_default()
                    .push(want);
            }
        }

        weights.map(&in_place, backend)?;
        let (aligned, unaligned): (Vec<_>, Vec<_>) = host_only
            .into_iter()
            .partition(|w| w.info.offset % ALIGNMENT == 0);
        weights.map(&aligned, cpu)?;
        let bytes = |list: &[&Wanted<'_>]| list.iter().map(|w| w.info.bytes).sum();
        weights.bytes.host_mapped = bytes(&aligned);
        weights.bytes.host_copied = bytes(&unaligned);
        if !unaligned.is_empty() {
            copies
                .entry(cpu.buffer_type() as usize)
                .or_default()
                .extend(unaligned);
        }

        let total = copies.values().flatten().map(|w| w.info.bytes).sum();
        let mut done = 0;
        for (buffer_type, group) in copies {
            let buffer_type = buffer_type as ggml::ggml_backend_buffer_type_t;
            let own_layout = extra.contains(&buffer_type);
            let bytes: usize = group.iter().map(|w| w.info.bytes).sum();
            weights.copy(&group, backend, buffer_type, own_layout, &mut |n| {
                done += n;
                progress(done, total);
            })?;
            if own_layout {
                weights.bytes.repacked += bytes;
            } else {
                weights.bytes.copied += bytes;
            }
        }
        Ok(weights)
    }

    /// The weight that was made from this tensor of `file`, in the file's own layout where both are there.
    pub fn get(&self, file: &Gguf, info: &TensorInfo) -> Option<&Tensor> {
        let key = key(file, info);
        self.tensors.get(&key).or_else(|| self.repacked.get(&key))
    }

    /// As [`Weights::get`], in the layout made for this CPU where both are there.
    pub fn get_repacked(&self, file: &Gguf, info: &TensorInfo) -> Option<&Tensor> {
        let key = key(file, info);
        self.repacked.get(&key).or_else(|| self.tensors.get(&key))
    }

    /// Where the weights ended up.
    pub fn bytes(&self) -> WeightBytes {
        self.bytes
    }

    /// Wraps whole file maps as device buffers and points tensors into them.
    fn map(&mut self, wanted: &[&Wanted<'_>], backend: &Backend) -> Result<(), Error> {
        let mut files: Vec<(&Arc<FileMap>, Vec<&Wanted<'_>>)> = Vec::new();
        for want in wanted {
            match files
                .iter_mut()
                .find(|(map, _)| Arc::ptr_eq(map, want.file.map()))
            {
                Some((_, group)) => group.push(want),
                None => files.push((want.file.map(), vec![want])),
            }
        }
        for (map, group) in files {
            let largest = group.iter().map(|w| w.info.bytes).max().unwrap_or(0);
            let base = map.bytes().as_ptr();
            log::clear();
            let buffer = if backend.plans() {
                // SAFETY: the backend's buffer type is ggml's.
                unsafe { Buffer::planned(backend.buffer_type(), map.bytes().len()) }
            } else {
                // SAFETY: the map outlives the buffer, which holds it. ggml wants a mutable pointer, but buffers
                // marked as weights are only read (`Tensor::write` refuses them).
                let raw = unsafe {
                    ggml::ggml_backend_dev_buffer_from_host_ptr(
                        backend.device().0,
                        base.cast_mut().cast(),
                        map.bytes().len(),
                        largest,
                    )
                };
                if raw.is_null() {
                    return Err(Error::Alloc {
                        device: backend.device().name().to_owned(),
                        what: format!("the map of {}", map.path().display()),
                        bytes: map.bytes().len(),
                        log: log::take(),
                    });
                }
                Buffer::new(raw, Some(map.clone()))
            };
            let (raw, buffer) = (buffer.raw, Arc::new(buffer));
            // SAFETY: the buffer is alive.
            unsafe {
                ggml::ggml_backend_buffer_set_usage(raw, ggml::GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            }
            let context = Context::new(group.len())?;
            context.inner.keep_buffer(buffer);
            for want in group {
                let tensor = describe(&context, want)?;
                // SAFETY: the range was checked against the map when the file was opened; the buffer covers
                // the whole map and is kept by the tensor's context.
                let laid = unsafe {
                    let address = base.add(want.info.offset).cast_mut().cast();
                    lay(raw, tensor.as_ptr(), address)
                };
                if !laid {
                    return Err(Error::Device(format!(
                        "tensor `{}` cannot be used in place on {}",
                        want.info.name,
                        backend.device().name()
                    )));
                }
                self.bytes.mapped += want.info.bytes;
                self.tensors.insert(key(want.file, want.info), tensor);
            }
        }
        Ok(())
    }

    /// Copies tensors to new memory, in pieces where the layout stays the same.
    fn copy(
        &mut self,
        wanted: &[&Wanted<'_>],
        backend: &Backend,
        buffer_type: ggml::ggml_backend_buffer_type_t,
        own_layout: bool,
        copied: &mut dyn FnMut(usize),
    ) -> Result<(), Error> {
        let context = Context::new(wanted.len())?;
        let mut tensors = Vec::with_capacity(wanted.len());
        for want in wanted {
            tensors.push(describe(&context, want)?);
        }
        context.inner.allocate(backend, buffer_type, "weights")?;
        for (want, tensor) in wanted.iter().zip(tensors) {
            let plus_one = want.plus_one.then(|| plus_one(want)).transpose()?;
            let data = match &plus_one {
                _ if backend.plans() => &[],
                Some(data) => data.as_slice(),
                None => want.file.data(want.info),
            };
            // Repacking needs the whole tensor in one call.
            let piece = if own_layout { data.len() } else { UPLOAD_BYTES };
            for (i, chunk) in data.chunks(piece.max(1)).enumerate() {
                // SAFETY: chunks cover the data, whose size is the tensor's; the memory is new.
                unsafe { tensor.write_unchecked(i * piece, chunk) };
                copied(chunk.len());
            }
            let place = if own_layout {
                &mut self.repacked
            } else {
                &mut self.tensors
            };
            place.insert(key(want.file, want.info), tensor);
        }
        context.inner.mark_as_weights();
        Ok(())
    }
}

/// The bytes of a vector of F32 with 1 added to every value.
fn plus_one(want: &Wanted<'_>) -> Result<Vec<u8>, Error> {
    if want.info.dtype != DType::F32 {
        return Err(Error::Device(format!(
            "tensor `{}` is {}, and 1 can be added to F32 only",
            want.info.name, want.info.dtype
        )));
    }
    let (values, _) = want.file.data(want.info).as_chunks::<4>();
    let shifted = values.iter().map(|&v| f32::from_le_bytes(v) + 1.0);
    Ok(shifted.flat_map(f32::to_le_bytes).collect())
}

fn key(file: &Gguf, info: &TensorInfo) -> (usize, String) {
    (Arc::as_ptr(file.map()) as usize, info.name.clone())
}

fn describe(context: &Context, want: &Wanted<'_>) -> Result<Tensor, Error> {
    let tensor = context.new_tensor(&want.info.name, want.info.dtype, want.info.dims());
    context.check()?;
    Ok(tensor)
}

/// True where the device can do with this weight what its role asks for.
fn device_takes(device: Device, want: &Wanted<'_>) -> bool {
    let takes =
        |role| use_of(want, role).is_some_and(|(_context, node)| node.is_supported_by(&device));
    takes(want.role) && (!want.tied || takes(Role::Matrix))
}

/// True where this buffer type has a layout for the weight.
fn layout_takes(
    device: Device,
    buffer_type: ggml::ggml_backend_buffer_type_t,
    want: &Wanted<'_>,
) -> bool {
    let role = match want.role {
        Role::Matrix | Role::Experts => want.role,
        Role::Embedding if want.tied => Role::Matrix,
        Role::Embedding | Role::Vector => return false,
    };
    let Some((_context, node)) = use_of(want, role) else {
        return false;
    };
    // SAFETY: an empty buffer of that type tells the device which layout the weight would have; the
    // description forgets it before the buffer is freed.
    unsafe {
        let empty = ggml::ggml_backend_buft_alloc_buffer(buffer_type, 0);
        if empty.is_null() {
            return false;
        }
        let weight = (*node.as_ptr()).src[0];
        (*weight).buffer = empty;
        let takes = node.is_supported_by(&device);
        (*weight).buffer = std::ptr::null_mut();
        ggml::ggml_backend_buffer_free(empty);
        takes
    }
}

/// The operation that will read the weight, described on inputs of the usual shape.
fn use_of(want: &Wanted<'_>, role: Role) -> Option<(Context, Tensor)> {
    let context = Context::new(8).ok()?;
    let weight = describe(&context, want).ok()?;
    let n = weight.ne(0);
    let node = match role {
        Role::Embedding => {
            context.get_rows(&weight, &context.new_tensor("ids", DType::I32, &[512]))
        }
        Role::Matrix => context.mul_mat(&weight, &context.new_tensor("x", DType::F32, &[n, 512])),
        Role::Experts => context.mul_mat_id(
            &weight,
            &context.new_tensor("x", DType::F32, &[n, 1, 512]),
            &context.new_tensor("ids", DType::I32, &[1, 512]),
        ),
        Role::Vector => return Some((context, weight)),
    };
    context.check().ok()?;
    Some((context, node))
}
