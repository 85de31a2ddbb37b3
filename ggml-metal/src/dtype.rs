//! Element types of ggml tensors: names, block sizes, and quantization between them and `f32`.

use std::ffi::CStr;
use std::fmt;

use crate::Error;

/// The type of a tensor's elements, numbered as in ggml and in GGUF files.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DType(pub(crate) ggml::ggml_type);

/// The types that the engine names; the others are reached by number or name.
#[allow(missing_docs)]
impl DType {
    pub const F32: Self = Self(ggml::GGML_TYPE_F32);
    pub const F16: Self = Self(ggml::GGML_TYPE_F16);
    pub const BF16: Self = Self(ggml::GGML_TYPE_BF16);
    pub const I32: Self = Self(ggml::GGML_TYPE_I32);
    pub const I64: Self = Self(ggml::GGML_TYPE_I64);
    pub const Q4_0: Self = Self(ggml::GGML_TYPE_Q4_0);
    pub const Q4_1: Self = Self(ggml::GGML_TYPE_Q4_1);
    pub const Q5_0: Self = Self(ggml::GGML_TYPE_Q5_0);
    pub const Q5_1: Self = Self(ggml::GGML_TYPE_Q5_1);
    pub const Q8_0: Self = Self(ggml::GGML_TYPE_Q8_0);
    pub const Q2_K: Self = Self(ggml::GGML_TYPE_Q2_K);
    pub const Q3_K: Self = Self(ggml::GGML_TYPE_Q3_K);
    pub const Q4_K: Self = Self(ggml::GGML_TYPE_Q4_K);
    pub const Q5_K: Self = Self(ggml::GGML_TYPE_Q5_K);
    pub const Q6_K: Self = Self(ggml::GGML_TYPE_Q6_K);
    pub const IQ1_S: Self = Self(ggml::GGML_TYPE_IQ1_S);
    pub const IQ1_M: Self = Self(ggml::GGML_TYPE_IQ1_M);
    pub const IQ2_XXS: Self = Self(ggml::GGML_TYPE_IQ2_XXS);
    pub const IQ2_XS: Self = Self(ggml::GGML_TYPE_IQ2_XS);
    pub const IQ2_S: Self = Self(ggml::GGML_TYPE_IQ2_S);
    pub const IQ3_XXS: Self = Self(ggml::GGML_TYPE_IQ3_XXS);
    pub const IQ3_S: Self = Self(ggml::GGML_TYPE_IQ3_S);
    pub const IQ4_NL: Self = Self(ggml::GGML_TYPE_IQ4_NL);
    pub const IQ4_XS: Self = Self(ggml::GGML_TYPE_IQ4_XS);
    pub const TQ1_0: Self = Self(ggml::GGML_TYPE_TQ1_0);
    pub const TQ2_0: Self = Self(ggml::GGML_TYPE_TQ2_0);
    pub const NVFP4: Self = Self(ggml::GGML_TYPE_NVFP4);
}

impl DType {
    /// ggml's name in lower case, such as `f16` or `q4_K`.
    pub fn name(self) -> &'static str {
        // SAFETY: a DType is only made from numbers below GGML_TYPE_COUNT; ggml returns a static string.
        unsafe { CStr::from_ptr(ggml::ggml_type_name(self.0)) }
            .to_str()
            .unwrap_or("?")
    }

    /// The type with that name, in any case: `q8_0`, `Q4_K`, `bf16`.
    pub fn from_name(name: &str) -> Option<Self> {
        (0..ggml::GGML_TYPE_COUNT)
            .map(DType)
            .find(|t| t.block_size() > 0 && t.name().eq_ignore_ascii_case(name))
    }

    /// Its number in GGUF files.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Elements in one block; 1 for plain types, 0 for numbers that ggml retired.
    pub fn block_size(self) -> usize {
        // SAFETY: the number is below GGML_TYPE_COUNT.
        unsafe { ggml::ggml_blck_size(self.0) as usize }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        // SAFETY: the number is below GGML_TYPE_COUNT.
        unsafe { ggml::ggml_type_size(self.0) }
    }

    /// Bytes of a row of `n` elements; `n` must be a multiple of the block size.
    pub fn row_bytes(self, n: usize) -> usize {
        n / self.block_size().max(1) * self.block_bytes()
    }

    /// True for block-quantized types.
    pub fn is_quantized(self) -> bool {
        // SAFETY: the number is below GGML_TYPE_COUNT.
        unsafe { ggml::ggml_is_quantized(self.0) }
    }

    /// True for types that can hold a weight matrix: floats up to 32 bits and the quantized types, without those
    /// that ggml only makes of activations and cannot multiply with.
    pub fn is_weight(self) -> bool {
        let activations = matches!(self.0, ggml::GGML_TYPE_Q8_1 | ggml::GGML_TYPE_Q8_K);
        (self.is_quantized() && !activations) || matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// True where [`DType::quantize`] needs an importance matrix to give usable results.
    pub fn needs_imatrix(self) -> bool {
        // SAFETY: the number is below GGML_TYPE_COUNT.
        unsafe { ggml::ggml_quantize_requires_imatrix(self.0) }
    }

    /// Converts rows of `n_per_row` floats to this type.
    ///
    /// `imatrix`, if given, holds one importance weight per column.
    ///
    /// # Errors
    /// When the lengths do not fit together, or the type cannot be quantized to.
    pub fn quantize(
        self,
        src: &[f32],
        n_per_row: usize,
        imatrix: Option<&[f32]>,
    ) -> Result<Vec<u8>, Error> {
        let n_rows = src.len() / n_per_row.max(1);
        let mut out = vec![0u8; n_rows * self.row_bytes(n_per_row)];
        self.quantize_into(src, n_per_row, imatrix, &mut out)?;
        Ok(out)
    }

    /// As [`DType::quantize`], into `out`, which must have the length of the rows. May run on several threads.
    ///
    /// # Errors
    /// As [`DType::quantize`]; also when `out` has another length or starts at an odd address.
    pub fn quantize_into(
        self,
        src: &[f32],
        n_per_row: usize,
        imatrix: Option<&[f32]>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let block = self.block_size();
        if !self.is_weight() || n_per_row == 0 || block == 0 || !n_per_row.is_multiple_of(block) {
            return Err(Error::Quantize(format!(
                "rows of {n_per_row} values cannot become {self}, whose blocks hold {block}"
            )));
        }
        if !src.len().is_multiple_of(n_per_row) || imatrix.is_some_and(|m| m.len() != n_per_row) {
            return Err(Error::Quantize(format!(
                "{} values and an importance row of {:?} do not make rows of {n_per_row}",
                src.len(),
                imatrix.map(<[f32]>::len)
            )));
        }
        if self.needs_imatrix() && imatrix.is_none() {
            return Err(Error::Quantize(format!(
                "{self} needs an importance matrix"
            )));
        }
        let n_rows = src.len() / n_per_row;
        // Blocks hold nothing wider than 16 bits, but F32 is written as floats.
        let align = if self == Self::F32 { 4 } else { 2 };
        if out.len() != n_rows * self.row_bytes(n_per_row)
            || !(out.as_ptr() as usize).is_multiple_of(align)
        {
            return Err(Error::Quantize(format!(
                "{} bytes at {:p} do not hold {n_rows} rows of {n_per_row} {self}",
                out.len(),
                out.as_ptr()
            )));
        }
        if n_rows > 0 {
            // SAFETY: src holds n_rows * n_per_row floats, out the bytes that many rows of this type take,
            // aligned for its blocks, and the importance row, when not null, n_per_row floats.
            let written = unsafe {
                ggml::ggml_quantize_chunk(
                    self.0,
                    src.as_ptr(),
                    out.as_mut_ptr().cast(),
                    0,
                    n_rows as i64,
                    n_per_row as i64,
                    imatrix.map_or(std::ptr::null(), <[f32]>::as_ptr),
                )
            };
            debug_assert_eq!(written, out.len());
        }
        Ok(())
    }

    /// True where whole blocks of this type hold no scale (or, in floats, value) that is infinite or not a number.
    /// ggml says on stderr what it found.
    pub fn is_valid(self, data: &[u8]) -> bool {
        // SAFETY: the number is below GGML_TYPE_COUNT, data has the length given, and ggml checks that these are
        // whole blocks.
        unsafe { ggml::ggml_validate_row_data(self.0, data.as_ptr().cast(), data.len()) }
    }

    /// Converts whole blocks of this type to floats.
    ///
    /// # Errors
    /// When `src` is not a whole number of blocks, or the type has no conversion.
    pub fn dequantize(self, src: &[u8]) -> Result<Vec<f32>, Error> {
        let mut out = vec![0f32; src.len() / self.block_bytes().max(1) * self.block_size()];
        self.dequantize_into(src, &mut out)?;
        Ok(out)
    }

    /// As [`DType::dequantize`], into `out`, which must have the length of the values.
    ///
    /// # Errors
    /// As [`DType::dequantize`]; also when `out` has another length.
    pub fn dequantize_into(self, src: &[u8], out: &mut [f32]) -> Result<(), Error> {
        let (block, bytes) = (self.block_size(), self.block_bytes());
        if bytes == 0 || !src.len().is_multiple_of(bytes) || out.len() != src.len() / bytes * block
        {
            return Err(Error::Quantize(format!(
                "{} bytes are not whole blocks of {self} ({bytes} bytes each) for {} values",
                src.len(),
                out.len()
            )));
        }
        if self == Self::F32 {
            for (value, raw) in out.iter_mut().zip(src.chunks_exact(4)) {
                *value = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
            }
            return Ok(());
        }
        // SAFETY: the number is below GGML_TYPE_COUNT, and ggml returns a static table entry.
        let to_float = unsafe { (*ggml::ggml_get_type_traits(self.0)).to_float };
        let Some(to_float) = to_float else {
            return Err(Error::Quantize(format!(
                "ggml cannot convert {self} to f32"
            )));
        };
        let n = out.len() as i64;
        // SAFETY: src holds n / block whole blocks and out n floats; an unaligned src is copied first,
        // because ggml reads blocks through typed pointers.
        unsafe {
            if (src.as_ptr() as usize).is_multiple_of(8) {
                to_float(src.as_ptr().cast(), out.as_mut_ptr(), n);
            } else {
                let mut aligned = vec![0u64; src.len().div_ceil(8)];
                std::ptr::copy_nonoverlapping(src.as_ptr(), aligned.as_mut_ptr().cast(), src.len());
                to_float(aligned.as_ptr().cast(), out.as_mut_ptr(), n);
            }
        }
        Ok(())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case() {
        assert_eq!(DType::from_name("Q4_k"), Some(DType::Q4_K));
        assert_eq!(DType::from_name("bf16"), Some(DType::BF16));
        assert_eq!(DType::from_name("q9"), None);
    }

    #[test]
    fn quantizing_and_back_stays_close() {
        let src: Vec<f32> = (0..512)
            .map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0)
            .collect();
        for (dtype, bound) in [
            (DType::Q8_0, 0.01),
            (DType::Q4_K, 0.12),
            (DType::F16, 0.001),
        ] {
            let bytes = dtype.quantize(&src, 256, None).unwrap();
            assert_eq!(bytes.len(), 2 * dtype.row_bytes(256));
            // An odd address exercises the path that aligns first.
            let mut shifted = vec![0u8];
            shifted.extend_from_slice(&bytes);
            for back in [dtype.dequantize(&bytes), dtype.dequantize(&shifted[1..])] {
                for (a, b) in src.iter().zip(back.unwrap()) {
                    assert!((a - b).abs() < bound, "{dtype}: {a} became {b}");
                }
            }
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_errors() {
        assert!(DType::Q4_K.quantize(&[0.0; 100], 100, None).is_err());
        assert!(DType::Q8_0.quantize(&[0.0; 40], 32, None).is_err());
        assert!(DType::Q4_K.dequantize(&[0; 100]).is_err());
    }
}
