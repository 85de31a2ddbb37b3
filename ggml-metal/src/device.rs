//! Devices that ggml can compute on, and backends: a device made ready to compute.

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::sync::{Arc, Once};

use crate::{Error, log, machine};

/// `GGML_MAX_N_THREADS` of ggml.h, a macro that the bindings leave out.
const MAX_THREADS: usize = 512;

/// What a device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceKind {
    /// A graphics processor, Metal included.
    Gpu,
    /// A library that speeds up some operations on the CPU, such as BLAS.
    Accelerator,
    /// The processor itself.
    Cpu,
}

/// A device known to ggml.
#[derive(Clone, Copy)]
pub struct Device(pub(crate) ggml::ggml_backend_dev_t);

// SAFETY: devices are static objects of ggml's registry; the functions used on them only read.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// All devices, in the order in which qrun prefers them: Metal, other GPUs, accelerators, the CPU.
pub fn devices() -> Vec<Device> {
    initialise();
    // SAFETY: indices run below the count.
    let mut all: Vec<Device> = unsafe {
        (0..ggml::ggml_backend_dev_count())
            .map(|i| Device(ggml::ggml_backend_dev_get(i)))
            .collect()
    };
    all.sort_by_key(|d| match d.kind() {
        DeviceKind::Gpu if d.is_metal() => 0,
        DeviceKind::Gpu => 1,
        DeviceKind::Accelerator => 2,
        DeviceKind::Cpu => 3,
    });
    all
}

/// The device with that name in any case (`CPU`, `Metal`, `CUDA0`), or the preferred one without a name.
///
/// # Errors
/// When there is none; the message lists those there are.
pub fn find_device(name: Option<&str>) -> Result<Device, Error> {
    let all = devices();
    let found = match name {
        None => all.iter().find(|d| d.kind() != DeviceKind::Accelerator),
        Some(name) => all.iter().find(|d| d.name().eq_ignore_ascii_case(name)),
    };
    found.copied().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|d| d.name()).collect();
        Error::Device(match name {
            Some(name) => format!("no device `{name}`; there are: {}", names.join(", ")),
            None => {
                "ggml has no device; the libggml-cpu files must lie beside the program".to_owned()
            }
        })
    })
}

/// Loads the backends once. With `dynamic-backends` they are shared libraries beside the program, or where
/// the build put them.
fn initialise() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::install();
        // SAFETY: no arguments; sets up ggml's clock.
        unsafe { ggml::ggml_time_init() };
        if cfg!(feature = "dynamic-backends") {
            let beside = std::env::current_exe()
                .ok()
                .and_then(|exe| exe.parent().map(Path::to_owned));
            let built = ggml::BACKENDS_DIR.map(Path::new).map(Path::to_owned);
            for dir in [beside, built].into_iter().flatten() {
                // SAFETY: no arguments.
                if unsafe { ggml::ggml_backend_dev_count() } > 0 {
                    break;
                }
                if let Ok(dir) = CString::new(dir.to_string_lossy().as_bytes()) {
                    // SAFETY: a null-terminated path that lives through the call.
                    unsafe { ggml::ggml_backend_load_all_from_path(dir.as_ptr()) };
                }
            }
        }
    });
}

impl Device {
    /// ggml's short name, such as `CPU`, `Metal` or `CUDA0`.
    pub fn name(&self) -> &'static str {
        // SAFETY: devices are static, and so are their names.
        unsafe { CStr::from_ptr(ggml::ggml_backend_dev_name(self.0)) }
            .to_str()
            .unwrap_or("?")
    }

    /// The hardware's name.
    pub fn description(&self) -> String {
        // SAFETY: devices are static; the string is copied.
        unsafe { CStr::from_ptr(ggml::ggml_backend_dev_description(self.0)) }
            .to_string_lossy()
            .trim()
            .to_owned()
    }

    /// What it is.
    pub fn kind(&self) -> DeviceKind {
        // SAFETY: the device is static.
        match unsafe { ggml::ggml_backend_dev_type(self.0) } {
            ggml::GGML_BACKEND_DEVICE_TYPE_CPU => DeviceKind::Cpu,
            ggml::GGML_BACKEND_DEVICE_TYPE_ACCEL => DeviceKind::Accelerator,
            _ => DeviceKind::Gpu,
        }
    }

    /// True for Apple's GPU.
    pub fn is_metal(&self) -> bool {
        self.name().starts_with("Metal") || self.name().starts_with("MTL")
    }

    /// Free and total bytes of memory as the driver reports them. ggml's CPU device reports free = total.
    pub fn memory(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live integers.
        unsafe { ggml::ggml_backend_dev_memory(self.0, &mut free, &mut total) };
        (free, total)
    }

    /// True where host memory, and so a mapped file, can serve as a device buffer without a copy.
    pub fn maps_host_memory(&self) -> bool {
        // SAFETY: an all-zero properties struct is a valid value (numbers, flags and null pointers), and ggml
        // fills it in.
        unsafe {
            let mut props: ggml::ggml_backend_dev_props = std::mem::zeroed();
            ggml::ggml_backend_dev_get_props(self.0, &mut props);
            props.caps.buffer_from_host_ptr
        }
    }

    /// What its kernels were built to use, such as `AVX2` or `NEON`, by ggml's names.
    pub fn features(&self) -> Vec<String> {
        type GetFeatures =
            unsafe extern "C" fn(ggml::ggml_backend_reg_t) -> *mut ggml::ggml_backend_feature;
        // SAFETY: the type is ggml_backend_get_features_t; the list that it returns is static and ends with a null
        // name, and a value of "0" means that the feature is off.
        unsafe {
            let Some(get) = self.function::<GetFeatures>(c"ggml_backend_get_features") else {
                return Vec::new();
            };
            let mut feature = get(ggml::ggml_backend_dev_backend_reg(self.0));
            let mut names = Vec::new();
            while !feature.is_null() && !(*feature).name.is_null() {
                let text = |raw| CStr::from_ptr(raw).to_string_lossy().into_owned();
                let value = (*feature).value;
                if !value.is_null() && text(value) != "0" {
                    names.push(text((*feature).name));
                }
                feature = feature.add(1);
            }
            names
        }
    }

    /// A function of this device's backend by name: the only way to the CPU's own functions when backends
    /// are loaded at run time.
    ///
    /// # Safety
    /// `F` must be the function pointer type that ggml documents for `name`.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the device is static; the name is null-terminated; the caller vouches for the type.
        unsafe {
            let reg = ggml::ggml_backend_dev_backend_reg(self.0);
            let f = ggml::ggml_backend_reg_get_proc_address(reg, name.as_ptr());
            (!f.is_null()).then(|| std::mem::transmute_copy::<*mut c_void, F>(&f))
        }
    }

    /// The buffer types that keep weights in a layout of their own (repacked for this CPU), best first.
    ///
    /// Intel's AMX layout is left out: GCC 12 and older build its kernels wrongly (they read only the first 8 bytes
    /// of the tile configuration) and the program dies in them.
    pub(crate) fn extra_buffer_types(&self) -> Vec<ggml::ggml_backend_buffer_type_t> {
        type GetExtra =
            unsafe extern "C" fn(ggml::ggml_backend_dev_t) -> *mut ggml::ggml_backend_buffer_type_t;
        // SAFETY: the type is ggml_backend_dev_get_extra_bufts_t; the list it returns ends with a null.
        unsafe {
            let Some(get) = self.function::<GetExtra>(c"ggml_backend_dev_get_extra_bufts") else {
                return Vec::new();
            };
            let list = get(self.0);
            let mut types = Vec::new();
            while !list.is_null() && !(*list.add(types.len())).is_null() {
                types.push(*list.add(types.len()));
            }
            types.retain(|&t| CStr::from_ptr(ggml::ggml_backend_buft_name(t)) != c"AMX");
            types
        }
    }
}

/// A device made ready to compute: its queue, or its threads.
///
/// Cheap to clone; the threads of a CPU backend stay attached and warm until the last clone is dropped.
#[derive(Clone)]
pub struct Backend {
    inner: Arc<BackendInner>,
    plans: bool,
}

struct BackendInner {
    raw: ggml::ggml_backend_t,
    device: Device,
    n_threads: usize,
    pool: Option<ThreadPool>,
}

struct ThreadPool {
    raw: *mut ggml::ggml_threadpool,
    free: unsafe extern "C" fn(*mut ggml::ggml_threadpool),
}

// SAFETY: the raw backend and pool are only computed with under the process-wide compute lock (see
// `crate::exclusive`), and only freed when the last owner is gone.
unsafe impl Send for BackendInner {}
// SAFETY: as above.
unsafe impl Sync for BackendInner {}

impl Drop for BackendInner {
    fn drop(&mut self) {
        // SAFETY: freed once; the backend goes before the pool whose threads it uses.
        unsafe {
            ggml::ggml_backend_free(self.raw);
            if let Some(pool) = &self.pool {
                (pool.free)(pool.raw);
            }
        }
    }
}

impl Backend {
    /// Starts `device`. `n_threads` counts CPU threads; other devices ignore it. Without it, the machine's
    /// performance cores are used.
    ///
    /// # Errors
    /// When the device cannot be started.
    pub fn new(device: Device, n_threads: Option<usize>) -> Result<Self, Error> {
        log::clear();
        let n_threads = n_threads
            .unwrap_or_else(machine::performance_cores)
            .clamp(1, MAX_THREADS);
        // SAFETY: the device is static; null means default parameters.
        let raw = unsafe { ggml::ggml_backend_dev_init(device.0, std::ptr::null()) };
        if raw.is_null() {
            return Err(Error::Device(format!(
                "device {} could not be started{}",
                device.name(),
                log::take()
            )));
        }
        let mut inner = BackendInner {
            raw,
            device,
            n_threads,
            pool: None,
        };
        if device.kind() == DeviceKind::Cpu {
            inner.attach_threads();
        }
        Ok(Self {
            inner: Arc::new(inner),
            plans: false,
        })
    }

    /// The same backend for plans: what is allocated on it gets no memory, but has the size that it would have.
    /// Weights, states and graphs can be made on it and asked for their bytes; computing, reading and writing fail.
    pub fn for_plans(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            plans: true,
        }
    }

    /// The backend that a plan was made for, or this one.
    pub fn for_work(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            plans: false,
        }
    }

    /// True for a backend made by [`Backend::for_plans`].
    pub fn plans(&self) -> bool {
        self.plans
    }

    /// The device this computes on.
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// CPU threads in use; meaningless for other devices.
    pub fn n_threads(&self) -> usize {
        self.inner.n_threads
    }

    /// Whether it has a kernel for the gated delta rule with heads of this size. Where it has none, nothing else can
    /// step in: the states that the kernel works on lie in this device's memory.
    ///
    /// # Errors
    /// When there is no memory for a description of the operation.
    pub fn has_delta_net(&self, head_size: i64) -> Result<bool, Error> {
        let context = crate::Context::new(8)?;
        let tensor = |shape: &[i64]| context.new_tensor("", crate::DType::F32, shape);
        let heads = tensor(&[head_size, 1, 1, 1]);
        let gate = tensor(&[1, 1, 1, 1]);
        let state = tensor(&[head_size, head_size, 1, 1]);
        let op = context.gated_delta_net(&heads, &heads, &heads, &gate, &gate, &state, 1);
        context.check()?;
        // CUDA's backend says yes to every size, and ends the process where it has no kernel (gated_delta_net.cu).
        let name = self.device().name();
        let any = !["CUDA", "ROCm", "MUSA"].iter().any(|n| name.starts_with(n));
        // SAFETY: device and operation are alive.
        let says = unsafe { ggml::ggml_backend_dev_supports_op(self.device().0, op.as_ptr()) };
        Ok(says && (any || [16, 32, 64, 128].contains(&head_size)))
    }

    pub(crate) fn raw(&self) -> ggml::ggml_backend_t {
        self.inner.raw
    }

    /// The threads that a CPU backend computes with.
    #[cfg(feature = "peer")]
    pub(crate) fn thread_pool(&self) -> Option<*mut ggml::ggml_threadpool> {
        self.inner.pool.as_ref().map(|pool| pool.raw)
    }

    pub(crate) fn buffer_type(&self) -> ggml::ggml_backend_buffer_type_t {
        // SAFETY: the backend is alive.
        unsafe { ggml::ggml_backend_get_default_buffer_type(self.inner.raw) }
    }
}

impl BackendInner {
    /// Without a pool of its own every compute call of the CPU backend would start and join threads.
    fn attach_threads(&mut self) {
        type SetThreads = unsafe extern "C" fn(ggml::ggml_backend_t, i32);
        type NewPool =
            unsafe extern "C" fn(*mut ggml::ggml_threadpool_params) -> *mut ggml::ggml_threadpool;
        type FreePool = unsafe extern "C" fn(*mut ggml::ggml_threadpool);
        type SetPool = unsafe extern "C" fn(ggml::ggml_backend_t, *mut ggml::ggml_threadpool);
        // SAFETY: the function types are those of ggml-backend.h and ggml-cpu.h for these names; the pool is
        // attached to a live backend, and freed after it.
        unsafe {
            if let Some(set) = self
                .device
                .function::<SetThreads>(c"ggml_backend_set_n_threads")
            {
                set(self.raw, self.n_threads as i32);
            }
            let functions = (
                self.device.function::<NewPool>(c"ggml_threadpool_new"),
                self.device.function::<FreePool>(c"ggml_threadpool_free"),
                self.device
                    .function::<SetPool>(c"ggml_backend_cpu_set_threadpool"),
            );
            if let (Some(new), Some(free), Some(set)) = functions {
                let mut params = ggml::ggml_threadpool_params_default(self.n_threads as i32);
                let raw = new(&mut params);
                if !raw.is_null() {
                    set(self.raw, raw);
                    self.pool = Some(ThreadPool { raw, free });
                }
            }
        }
    }
}
