//! Rows of a checkpoint's matrices as floats, however they are stored.

use anyhow::{Result, ensure};
use half::{bf16, f16};

use crate::checkpoint::Dtype;

/// A tensor of the checkpoint as rows of equal length.
pub struct Source<'a> {
    /// Values in a row.
    pub n_cols: usize,
    /// The stored values.
    pub data: &'a [u8],
    /// How they are stored.
    pub encoding: Encoding,
}

/// How a matrix's values are stored.
pub enum Encoding {
    /// As floats of that type.
    Plain(Dtype),
    /// As eight-bit floats, each block with a factor.
    Fp8 {
        /// What each of the 256 codes stands for.
        codes: Box<[f32; 256]>,
        /// Factors, block by block, row after row of blocks.
        scales: Vec<f32>,
        /// Rows and columns of a block.
        block: [usize; 2],
        /// Blocks across.
        n_across: usize,
        /// Rows of one of the stacked matrices (an expert), and its rows of blocks.
        stacked: [usize; 2],
    },
    /// As packed integers, each group of a row with a factor and an offset: `q * scale + bias`.
    Groups {
        /// Bits of an integer; they follow one another from the lowest bit on.
        bits: usize,
        /// Values in a group.
        group: usize,
        /// Factors, row after row.
        scales: Vec<f32>,
        /// Offsets, likewise.
        biases: Vec<f32>,
    },
}

impl Source<'_> {
    /// Bytes of a stored row.
    pub fn row_bytes(&self) -> usize {
        match &self.encoding {
            Encoding::Plain(Dtype::F32) => 4 * self.n_cols,
            Encoding::Plain(_) => 2 * self.n_cols,
            Encoding::Fp8 { .. } => self.n_cols,
            Encoding::Groups { bits, .. } => self.n_cols * bits / 8,
        }
    }

    /// The stored bytes of a row.
    pub fn row(&self, row: usize) -> &[u8] {
        let bytes = self.row_bytes();
        self.data
            .get(row * bytes..(row + 1) * bytes)
            .unwrap_or_default()
    }

    /// A row's values.
    pub fn decode(&self, row: usize, out: &mut [f32]) {
        let stored = self.row(row);
        match &self.encoding {
            Encoding::Plain(dtype) => decode_plain(*dtype, stored, out),
            Encoding::Fp8 {
                codes,
                scales,
                block,
                n_across,
                stacked,
            } => {
                let (matrix, row) = (row / stacked[0], row % stacked[0]);
                let first = (matrix * stacked[1] + row / block[0]) * n_across;
                let blocks = out.chunks_mut(block[1]).zip(stored.chunks(block[1]));
                for (i, (out, stored)) in blocks.enumerate() {
                    let scale = scales.get(first + i).copied().unwrap_or(f32::NAN);
                    for (value, &code) in out.iter_mut().zip(stored) {
                        *value = codes[usize::from(code)] * scale;
                    }
                }
            }
            Encoding::Groups {
                bits,
                group,
                scales,
                biases,
            } => {
                let n_groups = self.n_cols / group;
                let factors = scales[row * n_groups..]
                    .iter()
                    .zip(&biases[row * n_groups..]);
                for (i, (out, (scale, bias))) in out.chunks_mut(*group).zip(factors).enumerate() {
                    for (j, value) in out.iter_mut().enumerate() {
                        let q = integer(stored, (i * group + j) * bits, *bits);
                        *value = q as f32 * scale + bias;
                    }
                }
            }
        }
    }
}

/// The integer of `bits` bits that begins at a bit; at most eight bits, so that it touches two bytes.
fn integer(bytes: &[u8], at: usize, bits: usize) -> u16 {
    let byte = |i: usize| u16::from(bytes.get(i).copied().unwrap_or(0));
    let two = byte(at / 8) | byte(at / 8 + 1) << 8;
    (two >> (at % 8)) & ((1 << bits) - 1)
}

fn decode_plain(dtype: Dtype, stored: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (value, raw) in out.iter_mut().zip(stored.chunks_exact(4)) {
                *value = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
            }
        }
        Dtype::F16 => {
            for (value, raw) in out.iter_mut().zip(stored.chunks_exact(2)) {
                *value = f16::from_le_bytes([raw[0], raw[1]]).to_f32();
            }
        }
        _ => {
            for (value, raw) in out.iter_mut().zip(stored.chunks_exact(2)) {
                *value = bf16::from_le_bytes([raw[0], raw[1]]).to_f32();
            }
        }
    }
}

/// All values of a small tensor of plain floats.
///
/// # Errors
/// When its type is not a float of 16 or 32 bits, or a value is not finite.
pub fn floats(dtype: Dtype, data: &[u8]) -> Result<Vec<f32>> {
    let bytes = match dtype {
        Dtype::F32 => 4,
        Dtype::F16 | Dtype::Bf16 => 2,
        other => anyhow::bail!("has the type {other}, expected F32, F16 or BF16"),
    };
    let mut values = vec![0.0; data.len() / bytes];
    decode_plain(dtype, data, &mut values);
    ensure!(
        values.iter().all(|v| v.is_finite()),
        "holds values that are not numbers; the checkpoint is damaged"
    );
    Ok(values)
}

/// What the 256 codes of an eight-bit float stand for: a sign, an exponent, and the rest.
pub fn fp8_codes(dtype: Dtype) -> Box<[f32; 256]> {
    let (exponent_bits, e4m3) = match dtype {
        Dtype::F8E5M2 => (5, false),
        _ => (4, true),
    };
    let mantissa_bits = 7 - exponent_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let mut codes = Box::new([0.0; 256]);
    for (code, value) in (0u32..).zip(codes.iter_mut()) {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = ((code & 0x7f) >> mantissa_bits) as i32;
        let mantissa = (code & ((1 << mantissa_bits) - 1)) as f32;
        let ones = (1 << exponent_bits) - 1;
        let unit = 2f32.powi(-mantissa_bits);
        // E4M3 has one NaN for each sign and no infinity; E5M2 is as IEEE has it.
        *value = if e4m3 && code & 0x7f == 0x7f {
            f32::NAN
        } else if !e4m3 && exponent == ones {
            if mantissa == 0.0 {
                sign * f32::INFINITY
            } else {
                f32::NAN
            }
        } else if exponent == 0 {
            sign * mantissa * unit * 2f32.powi(1 - bias)
        } else {
            sign * (1.0 + mantissa * unit) * 2f32.powi(exponent - bias)
        };
    }
    codes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_codes_are_those_of_the_formats() {
        let e4m3 = fp8_codes(Dtype::F8E4M3);
        assert_eq!((e4m3[0x38], e4m3[0xb8]), (1.0, -1.0));
        assert_eq!((e4m3[0x7e], e4m3[0x01]), (448.0, 2f32.powi(-9)));
        assert!(e4m3[0x7f].is_nan() && e4m3[0xff].is_nan());
        let e5m2 = fp8_codes(Dtype::F8E5M2);
        assert_eq!((e5m2[0x3c], e5m2[0x7b]), (1.0, 57344.0));
        assert_eq!((e5m2[0x01], e5m2[0x7c]), (2f32.powi(-16), f32::INFINITY));
    }

    #[test]
    fn integers_of_any_width_are_read_from_the_lowest_bit() {
        // 3-bit values 1 2 3 4 5 6 7 0 in three bytes.
        let packed: u32 = (0..8).map(|i: u32| ((i + 1) % 8) << (3 * i)).sum();
        let bytes = packed.to_le_bytes();
        let values: Vec<u16> = (0..8).map(|i| integer(&bytes, 3 * i, 3)).collect();
        assert_eq!(values, [1, 2, 3, 4, 5, 6, 7, 0]);
        assert_eq!(integer(&[0xab, 0xcd], 4, 4), 0xa);
        assert_eq!(integer(&[0xab, 0xcd], 8, 8), 0xcd);
    }

    #[test]
    fn blocks_take_their_own_scale() {
        // Two stacked matrices of 3 x 3, blocks of 2 x 2: scales are 2 x 2 for each.
        let source = Source {
            n_cols: 3,
            data: &[0x38; 18],
            encoding: Encoding::Fp8 {
                codes: fp8_codes(Dtype::F8E4M3),
                scales: (0..8).map(|i| i as f32).collect(),
                block: [2, 2],
                n_across: 2,
                stacked: [3, 2],
            },
        };
        let mut row = [0.0; 3];
        for (i, expected) in [[0., 0., 1.], [0., 0., 1.], [2., 2., 3.], [4., 4., 5.]]
            .iter()
            .enumerate()
        {
            source.decode(i, &mut row);
            assert_eq!(&row, expected);
        }
        source.decode(5, &mut row);
        assert_eq!(row, [6., 6., 7.]);
    }
}
