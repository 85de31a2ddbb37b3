//! What can be wrong with a file's draft head, seen without computing.
//!
//! Published files were found whose MTP norms were stored zero-centred, as the checkpoints have them, and not as
//! GGUF wants them (`1 + w`): such a head proposes garbage. Others hold nothing but zeros.

use ggml_metal::{Gguf, TensorInfo};

use super::files::ModelFiles;

/// The MTP block's norms, by name after `blk.N.`.
const NORMS: [&str; 7] = [
    "attn_norm.weight",
    "post_attention_norm.weight",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
    "nextn.enorm.weight",
    "nextn.hnorm.weight",
    "nextn.shared_head_norm.weight",
];

/// Whether a draft head can be used as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadHealth {
    /// It can.
    Sound,
    /// Its norms lack the 1 that GGUF adds to them.
    ZeroCentred,
    /// Its first matrix holds nothing but zeros.
    Zero,
    /// A norm holds something that is not a number.
    NotFinite,
}

/// Looks at the draft head of `files`, which has one.
pub fn head_health(files: &ModelFiles) -> HeadHealth {
    if let Some((file, info)) = files.mtp_tensor("nextn.eh_proj.weight")
        && file.data(info).iter().all(|&byte| byte == 0)
    {
        return HeadHealth::Zero;
    }
    let (mut sum, mut below, mut n) = (0.0, 0usize, 0usize);
    for name in NORMS {
        let Some((file, info)) = files.mtp_tensor(name) else {
            continue;
        };
        for value in file.data(info).as_chunks::<4>().0 {
            let value = f32::from_le_bytes(*value);
            if !value.is_finite() {
                return HeadHealth::NotFinite;
            }
            sum += f64::from(value);
            below += usize::from(value < 0.0);
            n += 1;
        }
    }
    // Norms of trained models lie around 1 and are hardly ever negative; without the 1 they lie around 0 on both
    // sides of it.
    let zero_centred = n > 0 && sum / (n as f64) < 0.5 && below * 10 > n;
    if zero_centred {
        HeadHealth::ZeroCentred
    } else {
        HeadHealth::Sound
    }
}

/// True for a norm of the MTP block.
pub fn is_head_norm(files: &ModelFiles, file: &Gguf, info: &TensorInfo) -> bool {
    NORMS.iter().any(|name| {
        let found = files.mtp_tensor(name);
        found.is_some_and(|(f, i)| std::ptr::eq(f, file) && std::ptr::eq(i, info))
    })
}
