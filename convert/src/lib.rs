//! safetensors to GGUF, quantization and editing of GGUF files.

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod convert;
pub mod edit;
pub mod hf_config;
pub mod imatrix;
mod k_quants;
pub mod map;
pub mod metadata;
pub mod output;
pub mod parts;
pub mod quantize;
pub mod recipe;
mod rows;
pub mod split;
mod vocab;
