//! What can go wrong below the engine, in words that name the file, the field and the remedy.

use std::path::PathBuf;

/// Text from a file, fit for a message of one line: control characters escaped, cut where it is long.
pub fn one_line(text: &str) -> String {
    const MAX_CHARS: usize = 300;
    let mut out = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == MAX_CHARS {
            out.push('…');
            break;
        }
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be opened, read or mapped.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not a GGUF file that can be used.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, where, and what to do.
        reason: String,
    },
    /// A graph was put together wrongly: shapes or types that the operation does not take.
    #[error("graph node `{node}`: {reason}")]
    Graph {
        /// The operation and its name.
        node: String,
        /// What did not fit.
        reason: String,
    },
    /// A device has no memory left for a buffer.
    #[error("{device}: no memory for {what} ({bytes} bytes){log}")]
    Alloc {
        /// The device.
        device: String,
        /// What the memory was for.
        what: String,
        /// Its size.
        bytes: usize,
        /// What ggml logged about it, with a leading separator, or nothing.
        log: String,
    },
    /// A device was not found or could not be started.
    #[error("{0}")]
    Device(String),
    /// A computation failed on the device.
    #[error("computing on {device} failed: {status}{log}")]
    Compute {
        /// The device.
        device: String,
        /// ggml's status.
        status: String,
        /// What ggml logged about it, with a leading separator, or nothing.
        log: String,
    },
    /// Data that cannot be quantized or dequantized as asked.
    #[error("{0}")]
    Quantize(String),
}
