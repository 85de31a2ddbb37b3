//! safetensors to GGUF, quantization and editing of GGUF files.

#![forbid(unsafe_code)]

pub mod edit;
pub mod imatrix;
pub mod output;
pub mod parts;
pub mod quantize;
pub mod recipe;
pub mod split;
