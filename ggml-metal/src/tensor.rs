//! Tensors and what keeps them alive: contexts hold the descriptions, buffers hold the data.

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Backend, DType, Error, FileMap, exclusive, log};

/// Plain numbers that can be copied into and out of tensors.
pub trait Element: Copy + private::Sealed {
    /// The tensor type that stores it.
    const DTYPE: DType;
    /// Zero.
    const ZERO: Self;
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
    impl Sealed for i64 {}
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    const ZERO: Self = 0.0;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
    const ZERO: Self = 0;
}
impl Element for i64 {
    const DTYPE: DType = DType::I64;
    const ZERO: Self = 0;
}

/// Memory of a device, or a map of a file that a device reads directly.
pub(crate) struct Buffer {
    pub(crate) raw: ggml::ggml_backend_buffer_t,
    /// Of a planned buffer: the bytes that it would have.
    planned: usize,
    /// Dropped after the buffer that reads it.
    _map: Option<Arc<FileMap>>,
}

/// Where planned memory begins: addresses are compared and aligned, and nothing is ever read or written there.
const PLANNED_START: usize = 1 << 40;

// SAFETY: the buffer's data is only touched under the compute lock; the handle itself is only freed once.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn new(raw: ggml::ggml_backend_buffer_t, map: Option<Arc<FileMap>>) -> Self {
        Self {
            raw,
            planned: 0,
            _map: map,
        }
    }

    /// A buffer of that type without memory, for plans. ggml gives empty buffers none.
    ///
    /// # Safety
    /// The buffer type must be one of ggml's.
    pub(crate) unsafe fn planned(
        buffer_type: ggml::ggml_backend_buffer_type_t,
        bytes: usize,
    ) -> Self {
        Self {
            // SAFETY: the caller's promise.
            raw: unsafe { ggml::ggml_backend_buft_alloc_buffer(buffer_type, 0) },
            planned: bytes,
            _map: None,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        // SAFETY: the buffer is alive.
        self.planned + unsafe { ggml::ggml_backend_buffer_get_size(self.raw) }
    }
}

/// True for a buffer without memory: it is only planned.
///
/// # Safety
/// The buffer must be alive.
pub(crate) unsafe fn is_planned(buffer: ggml::ggml_backend_buffer_t) -> bool {
    // SAFETY: the caller's promise.
    unsafe { ggml::ggml_backend_buffer_get_size(buffer) == 0 }
}

/// Gives a tensor the memory at `address` of `buffer`; false where the device refuses.
///
/// # Safety
/// All must be alive, and the tensor's bytes must lie inside the buffer, unless that is only planned.
pub(crate) unsafe fn lay(
    buffer: ggml::ggml_backend_buffer_t,
    tensor: *mut ggml::ggml_tensor,
    address: *mut std::ffi::c_void,
) -> bool {
    // SAFETY: the caller's promise; of a planned tensor the address is never used.
    unsafe {
        if is_planned(buffer) {
            (*tensor).buffer = buffer;
            (*tensor).data = address;
            return true;
        }
        ggml::ggml_backend_tensor_alloc(buffer, tensor, address) == ggml::GGML_STATUS_SUCCESS
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: freed once; the map, if any, is still alive.
        unsafe { ggml::ggml_backend_buffer_free(self.raw) }
    }
}

/// The C context that holds tensor descriptions, with everything their data and sources need.
pub(crate) struct ContextInner {
    pub(crate) raw: *mut ggml::ggml_context,
    keeps: Mutex<Keeps>,
}

#[derive(Default)]
struct Keeps {
    buffers: Vec<Arc<Buffer>>,
    contexts: Vec<Arc<ContextInner>>,
}

// SAFETY: descriptions are only added through `Context`, which is not shared between threads; reading them
// (shapes, types, names) from several threads is fine.
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

impl ContextInner {
    pub(crate) fn new(raw: *mut ggml::ggml_context) -> Self {
        Self {
            raw,
            keeps: Mutex::default(),
        }
    }

    pub(crate) fn keep_buffer(&self, buffer: Arc<Buffer>) {
        self.lock().buffers.push(buffer);
    }

    /// Keeps `other` alive as long as this context, whose tensors read the other's.
    pub(crate) fn keep_context(self: &Arc<Self>, other: &Arc<Self>) {
        if Arc::ptr_eq(self, other) {
            return;
        }
        let mut keeps = self.lock();
        if !keeps.contexts.iter().any(|kept| Arc::ptr_eq(kept, other)) {
            keeps.contexts.push(other.clone());
        }
    }

    pub(crate) fn buffer_bytes(&self) -> usize {
        self.lock().buffers.iter().map(|b| b.bytes()).sum()
    }

    /// Marks all buffers as weights: schedulers keep such data in place, and nothing writes it any more.
    pub(crate) fn mark_as_weights(&self) {
        for buffer in &self.lock().buffers {
            // SAFETY: the buffer is alive.
            unsafe {
                ggml::ggml_backend_buffer_set_usage(
                    buffer.raw,
                    ggml::GGML_BACKEND_BUFFER_USAGE_WEIGHTS,
                );
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Keeps> {
        self.keeps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates every tensor of this context in one new buffer of the backend's own kind, zeroed.
    pub(crate) fn allocate(
        &self,
        backend: &Backend,
        buffer_type: ggml::ggml_backend_buffer_type_t,
        what: &str,
    ) -> Result<(), Error> {
        log::clear();
        // SAFETY: context and buffer type are alive; the new buffer is kept with the context.
        unsafe {
            let bytes = ggml::ggml_backend_alloc_ctx_tensors_from_buft_size(self.raw, buffer_type);
            if backend.plans() {
                self.plan(buffer_type, bytes);
                return Ok(());
            }
            let raw = ggml::ggml_backend_alloc_ctx_tensors_from_buft(self.raw, buffer_type);
            if raw.is_null() {
                return Err(Error::Alloc {
                    device: backend.device().name().to_owned(),
                    what: what.to_owned(),
                    bytes,
                    log: log::take(),
                });
            }
            ggml::ggml_backend_buffer_clear(raw, 0);
            self.keep_buffer(Arc::new(Buffer::new(raw, None)));
        }
        Ok(())
    }
}

impl ContextInner {
    /// Gives every tensor a place in a buffer that has no memory.
    ///
    /// # Safety
    /// The buffer type must be one of ggml's.
    unsafe fn plan(&self, buffer_type: ggml::ggml_backend_buffer_type_t, bytes: usize) {
        // SAFETY: the caller's promise; the context owns the tensors that are walked, and keeps the buffer.
        unsafe {
            let buffer = Buffer::planned(buffer_type, bytes);
            let alignment = ggml::ggml_backend_buft_get_alignment(buffer_type);
            let mut at = PLANNED_START;
            let mut tensor = ggml::ggml_get_first_tensor(self.raw);
            while !tensor.is_null() {
                if (*tensor).data.is_null() && (*tensor).view_src.is_null() {
                    lay(buffer.raw, tensor, std::ptr::without_provenance_mut(at));
                    let size = ggml::ggml_backend_buft_get_alloc_size(buffer_type, tensor);
                    at += size.next_multiple_of(alignment);
                }
                tensor = ggml::ggml_get_next_tensor(self.raw, tensor);
            }
            self.keep_buffer(Arc::new(buffer));
        }
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: freed once, when no tensor handle is left.
        unsafe { ggml::ggml_free(self.raw) }
    }
}

/// A tensor: a handle to its description, which keeps description and data alive.
#[derive(Clone)]
pub struct Tensor {
    raw: NonNull<ggml::ggml_tensor>,
    pub(crate) context: Arc<ContextInner>,
}

// SAFETY: see ContextInner: descriptions are read-only once made, data is touched under the compute lock.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// # Safety
    /// `raw` must be a tensor of `context`.
    pub(crate) unsafe fn new(raw: NonNull<ggml::ggml_tensor>, context: &Arc<ContextInner>) -> Self {
        Self {
            raw,
            context: context.clone(),
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut ggml::ggml_tensor {
        self.raw.as_ptr()
    }

    fn get(&self) -> &ggml::ggml_tensor {
        // SAFETY: the context, kept by this handle, owns the description.
        unsafe { self.raw.as_ref() }
    }

    /// Elements per dimension in ggml order (fastest first).
    pub fn shape(&self) -> [i64; 4] {
        self.get().ne
    }

    /// Elements in dimension `i` (0 to 3).
    pub fn ne(&self, i: usize) -> i64 {
        self.get().ne[i]
    }

    /// Bytes from one element to the next in dimension `i` (0 to 3).
    pub fn nb(&self, i: usize) -> usize {
        self.get().nb[i]
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        DType(self.get().type_)
    }

    /// Elements in all.
    pub fn n_elements(&self) -> usize {
        self.shape().iter().product::<i64>() as usize
    }

    /// Bytes from the first element to the end of the last.
    pub fn bytes(&self) -> usize {
        // SAFETY: the description is alive.
        unsafe { ggml::ggml_nbytes(self.as_ptr()) }
    }

    /// Its name.
    pub fn name(&self) -> String {
        // SAFETY: ggml keeps the name null-terminated inside the description.
        unsafe { CStr::from_ptr(ggml::ggml_get_name(self.as_ptr())) }
            .to_string_lossy()
            .into_owned()
    }

    /// Names it, so that it can be found in dumps and messages.
    pub fn named(self, name: impl AsRef<str>) -> Self {
        let name = name.as_ref().replace('\0', "?");
        if let Ok(name) = std::ffi::CString::new(name) {
            // SAFETY: the description is alive; ggml copies and cuts the name.
            unsafe { ggml::ggml_set_name(self.as_ptr(), name.as_ptr()) };
        }
        self
    }

    /// The operation that makes it, such as `MUL_MAT`, or `NONE` for weights and inputs; for unary and gated
    /// operations the function's name.
    pub fn op(&self) -> String {
        // SAFETY: the description is alive; ggml returns a static string.
        unsafe { CStr::from_ptr(ggml::ggml_op_desc(self.as_ptr())) }
            .to_string_lossy()
            .into_owned()
    }

    /// The tensors it is made from, with the place of each among the operation's sources.
    pub fn sources(&self) -> Vec<(usize, Tensor)> {
        let sources = self.get().src.iter().enumerate();
        sources
            .filter_map(|(i, &src)| NonNull::new(src).map(|src| (i, src)))
            .map(|(i, src)| {
                // SAFETY: sources belong to this tensor's context or to one that it keeps alive, so keeping
                // this context is enough.
                (i, unsafe { Tensor::new(src, &self.context) })
            })
            .collect()
    }

    /// True where elements of each row lie side by side, whatever lies between the rows.
    pub fn rows_are_contiguous(&self) -> bool {
        // SAFETY: the description is alive.
        unsafe { ggml::ggml_is_contiguous_rows(self.as_ptr()) }
    }

    /// True where elements of each row lie side by side and all rows are the same distance apart.
    pub fn rows_are_evenly_spaced(&self) -> bool {
        let (ne, nb) = (self.get().ne, self.get().nb);
        let slice = nb[1].checked_mul(ne[1] as usize);
        self.rows_are_contiguous()
            && (ne[2] == 1 || Some(nb[2]) == slice)
            && (ne[3] == 1 || Some(nb[3]) == slice.and_then(|s| s.checked_mul(ne[2] as usize)))
    }

    /// True where the whole tensor lies without gaps.
    pub fn is_contiguous(&self) -> bool {
        // SAFETY: the description is alive.
        unsafe { ggml::ggml_is_contiguous(self.as_ptr()) }
    }

    /// True for two handles of one tensor.
    pub fn is_same(&self, other: &Tensor) -> bool {
        self.raw == other.raw
    }

    /// True once the tensor has data. An input that a graph does not use gets none.
    pub fn is_allocated(&self) -> bool {
        !self.buffer().is_null()
    }

    /// The buffer that its data lie in, or its view's source's; null where it has none.
    fn buffer(&self) -> ggml::ggml_backend_buffer_t {
        let tensor = self.get();
        if tensor.buffer.is_null() && !tensor.view_src.is_null() {
            // SAFETY: a view's source is kept alive by the same context.
            return unsafe { (*tensor.view_src).buffer };
        }
        tensor.buffer
    }

    /// True where its memory is only planned.
    pub fn is_planned(&self) -> bool {
        let buffer = self.buffer();
        // SAFETY: a tensor's buffer is kept alive by its context.
        !buffer.is_null() && unsafe { is_planned(buffer) }
    }

    /// True where `device` can compute this node.
    pub fn is_supported_by(&self, device: &crate::Device) -> bool {
        // SAFETY: description and device are alive.
        unsafe { ggml::ggml_backend_dev_supports_op(device.0, self.as_ptr()) }
    }

    fn check_range(&self, what: &str, offset: usize, bytes: usize) -> Result<(), Error> {
        let has_data = self.is_allocated() && !self.is_planned();
        let end = offset.checked_add(bytes);
        if has_data && end.is_some_and(|end| end <= self.bytes()) {
            return Ok(());
        }
        Err(Error::Graph {
            node: self.name(),
            reason: format!(
                "cannot {what} {bytes} bytes at {offset} of {} bytes{}",
                self.bytes(),
                if has_data {
                    ""
                } else if self.is_planned() {
                    " that are only planned"
                } else {
                    " that are not allocated"
                }
            ),
        })
    }

    /// Copies bytes out of the tensor's data.
    ///
    /// # Errors
    /// When the range is not inside it, or it has no data.
    pub fn read_bytes(&self, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        self.check_range("read", offset, out.len())?;
        let _lock = exclusive();
        // SAFETY: the range was checked; the lock keeps computations away.
        unsafe {
            ggml::ggml_backend_tensor_get(
                self.as_ptr(),
                out.as_mut_ptr().cast(),
                offset,
                out.len(),
            );
        }
        Ok(())
    }

    /// Copies bytes into the tensor's data.
    ///
    /// # Errors
    /// When the range is not inside it, or it has no data.
    pub fn write_bytes(&self, offset: usize, data: &[u8]) -> Result<(), Error> {
        self.check_range("write", offset, data.len())?;
        if self.is_weight() {
            return Err(Error::Graph {
                node: self.name(),
                reason: "is a weight; weights may lie in a read-only map of their file".to_owned(),
            });
        }
        // SAFETY: the range was checked and the data is this process's own memory.
        unsafe { self.write_unchecked(offset, data) };
        Ok(())
    }

    /// Copies bytes into the tensor's data.
    ///
    /// # Safety
    /// The range must lie inside the tensor, whose data must be writable.
    pub(crate) unsafe fn write_unchecked(&self, offset: usize, data: &[u8]) {
        let _lock = exclusive();
        // SAFETY: the caller's promise; the lock keeps computations away.
        unsafe {
            ggml::ggml_backend_tensor_set(self.as_ptr(), data.as_ptr().cast(), offset, data.len());
        }
    }

    /// Copies elements out, starting at element `first`; the tensor must be contiguous and of that type.
    ///
    /// # Errors
    /// When type or range do not fit.
    pub fn read<T: Element>(&self, first: usize, out: &mut [T]) -> Result<(), Error> {
        self.check_type::<T>()?;
        let n = size_of_val(out);
        // SAFETY: any bytes make a valid number of these types; the length is exact.
        let bytes = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), n) };
        self.read_bytes(first * size_of::<T>(), bytes)
    }

    /// Copies elements in, starting at the first; the tensor must be contiguous and of that type.
    ///
    /// # Errors
    /// When type or range do not fit.
    pub fn write<T: Element>(&self, data: &[T]) -> Result<(), Error> {
        self.check_type::<T>()?;
        // SAFETY: numbers of these types have no padding; the length is exact.
        let bytes = unsafe {
            std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), std::mem::size_of_val(data))
        };
        self.write_bytes(0, bytes)
    }

    /// The bytes of `data`, which must fill the tensor.
    pub(crate) fn staged_bytes<'d, T: Element>(&self, data: &'d [T]) -> Result<&'d [u8], Error> {
        self.check_type::<T>()?;
        self.check_whole(size_of_val(data))?;
        // SAFETY: numbers of these types have no padding; the length is exact.
        Ok(unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) })
    }

    /// Checks that `bytes` fill the tensor, which has writable memory.
    pub(crate) fn check_whole(&self, bytes: usize) -> Result<(), Error> {
        self.check_range("write", 0, bytes)?;
        if bytes == self.bytes() && !self.is_weight() {
            return Ok(());
        }
        Err(Error::Graph {
            node: self.name(),
            reason: format!(
                "cannot be set to {bytes} bytes, it is a weight or has {}",
                self.bytes()
            ),
        })
    }

    /// Checks that the tensor can be read as numbers of that type.
    pub(crate) fn check_readable<T: Element>(&self) -> Result<(), Error> {
        self.check_type::<T>()?;
        self.check_range("read", 0, self.bytes())
    }

    /// True where the data is marked as a weight. The tensor must have data.
    fn is_weight(&self) -> bool {
        // SAFETY: a tensor with data has a buffer of its own or on the source of its view.
        unsafe {
            ggml::ggml_backend_buffer_get_usage(self.buffer())
                == ggml::GGML_BACKEND_BUFFER_USAGE_WEIGHTS
        }
    }

    fn check_type<T: Element>(&self) -> Result<(), Error> {
        if self.dtype() == T::DTYPE && self.is_contiguous() {
            return Ok(());
        }
        Err(Error::Graph {
            node: self.name(),
            reason: format!(
                "is {}{}, expected contiguous {}",
                self.dtype(),
                if self.is_contiguous() {
                    ""
                } else {
                    " with gaps"
                },
                T::DTYPE
            ),
        })
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} {:?} {} = {}",
            self.name(),
            self.shape(),
            self.dtype(),
            self.op()
        )
    }
}
