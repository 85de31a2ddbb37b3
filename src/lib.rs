//! qrun: the Qwen 3.5 model family from GGUF files, exactly and fast.
//!
//! How one token is made:
//!
//! 1. [`model::ModelFiles`] opens the GGUF files and [`model::Config`] turns their metadata into checked numbers.
//! 2. [`engine::Engine`] puts the weights on a device, in place where it can: immutable, shared.
//! 3. [`session::Session`] holds one sequence; [`session::Session::eval`] runs [`model::forward`] over new tokens.
//!
//! ```no_run
//! use std::path::Path;
//! use qrun::engine::{Engine, EngineParams};
//! use qrun::session::{CancelToken, Outputs, Session, SessionParams};
//!
//! let engine = Engine::load(Path::new("model.gguf"), &EngineParams::default(), &mut |_, _| {})?;
//! let mut session = Session::new(engine, SessionParams::default())?;
//! let logits = session.eval(&[1, 2, 3], Outputs::Last, &CancelToken::default())?;
//! assert!(!logits.is_empty());
//! # Ok::<(), anyhow::Error>(())
//! ```

#![forbid(unsafe_code)]

pub mod chat;
pub mod conversation;
pub mod engine;
pub mod fit;
pub mod generate;
pub mod grammar;
pub mod imatrix;
pub mod memory;
pub mod model;
pub mod reuse;
pub mod roofline;
pub mod sampler;
pub mod session;
pub mod speculate;
pub mod state;
pub mod stored;
pub mod template;
pub mod tokenizer;
pub mod tune;
pub mod vocab;

/// Version of qrun, and of the ggml that it was built with.
pub static VERSION: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
    let build = if cfg!(feature = "dynamic-backends") {
        "backends loaded at run time"
    } else if ggml_metal::BUILT_NATIVE {
        "built for this CPU"
    } else {
        "built for a baseline CPU: slow, build from the repository instead"
    };
    format!(
        "{} (ggml {}; {build})",
        env!("CARGO_PKG_VERSION"),
        ggml_metal::ggml_version()
    )
});
