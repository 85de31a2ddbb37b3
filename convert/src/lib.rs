//! safetensors to GGUF, quantization and editing of GGUF files.

#![forbid(unsafe_code)]
