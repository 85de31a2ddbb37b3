//! The Qwen 3.5 model: its numbers, its weights, and its forward pass.
//!
//! `config` reads the numbers from GGUF metadata, `weights` binds tensors to named fields once and checks their
//! shapes, `forward` is the architecture read top to bottom. Nothing outside this folder knows a tensor's name.

pub mod config;
pub mod files;
pub mod forward;
pub mod health;
pub mod shapes;
pub mod weights;

pub use config::Config;
pub use files::ModelFiles;
pub use weights::ModelWeights;
