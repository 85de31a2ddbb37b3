//! ggml made safe: the only crate of qrun with `unsafe` code.
//!
//! Devices (Metal first), buffers over mapped files without a copy, graphs whose shapes are checked in Rust
//! before C would abort, schedulers, quantization, and GGUF files. Nothing here knows the model.
//!
//! A first graph:
//!
//! ```
//! use ggml_metal::{Backend, Context, DType, Graph, find_device};
//!
//! let backend = Backend::new(find_device(Some("CPU"))?, None)?;
//! let context = Context::new(8)?;
//! let w = context.input("w", DType::F32, &[2, 3]); // [n_in, n_out]
//! let x = context.input("x", DType::F32, &[2, 1]); // [n_in, n_tokens]
//! let y = context.mul_mat(&w, &x); // [n_out, n_tokens]
//! context.output(&y);
//! let mut graph = Graph::new(context, &[backend])?;
//! w.write(&[1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0])?;
//! x.write(&[2.0f32, 5.0])?;
//! graph.compute()?;
//! let mut out = [0f32; 3];
//! y.read(0, &mut out)?;
//! assert_eq!(out, [2.0, 5.0, 7.0]);
//! # Ok::<(), ggml_metal::Error>(())
//! ```

mod device;
mod dtype;
mod error;
#[cfg(unix)]
mod fault;
mod gguf;
mod graph;
mod log;
mod machine;
mod mapped;
#[cfg(feature = "peer")]
pub mod peer;
mod tensor;
mod weights;

pub use device::{Backend, Device, DeviceKind, devices, find_device};
pub use dtype::DType;
pub use error::{Error, one_line};
pub use gguf::{Gguf, GgufWriter, Kind, TensorInfo, Value};
pub use graph::{Context, Graph, Rope};
pub use log::{Level, set_log_sink};
pub use machine::{memory_footprint, memory_level, peak_memory, performance_cores, thermal_level};
pub use mapped::FileMap;
pub use tensor::{Element, Tensor};
pub use weights::{Repack, Role, Wanted, WeightBytes, Weights};

/// True where the compiler was told to use all of this CPU, and so ggml's build was too. Without it ggml is built
/// for a baseline CPU and is several times slower.
pub const BUILT_NATIVE: bool = cfg!(any(not(target_arch = "x86_64"), target_feature = "avx2"));

/// ggml's version and commit, as built.
pub fn ggml_version() -> String {
    // SAFETY: both functions return static strings.
    unsafe {
        let version = std::ffi::CStr::from_ptr(ggml::ggml_version());
        let commit = std::ffi::CStr::from_ptr(ggml::ggml_commit());
        format!(
            "{} ({})",
            version.to_string_lossy(),
            commit.to_string_lossy()
        )
    }
}

/// Held while a device computes and while tensor data is copied in or out.
///
/// ggml's backends are not safe to compute with from two threads, and a copy must not overlap a computation on
/// the same data. One lock for the process makes both impossible; a device has one compute owner anyway.
fn exclusive() -> std::sync::MutexGuard<'static, ()> {
    static COMPUTE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    COMPUTE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
