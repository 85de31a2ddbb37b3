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

pub mod engine;
pub mod model;
pub mod sampler;
pub mod session;
pub mod state;
pub mod template;
pub mod tokenizer;
