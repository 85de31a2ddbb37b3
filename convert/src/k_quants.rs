//! Q4_K, Q5_K and Q6_K, several blocks at a time.
//!
//! The searches for scales are ggml's (`make_qkx2_quants`, with importance `make_qkx3_quants`, and `make_qx_quants` in
//! `ggml-quants.c`), operation by operation, so that the bytes are the same. ggml walks through one block of 16 or 32
//! values after the other, each addition waiting for the one before; here [`LANES`] blocks are searched side by side,
//! one in each lane of a vector.

use std::array::from_fn;

use anyhow::Result;
use ggml_metal::DType;
use half::f16;
use pulp::Arch;

/// Blocks searched at a time.
const LANES: usize = 16;
/// Values that share one record of a file.
const RECORD: usize = 256;
/// Where the operations are known to be those of ggml's build: on x86-64 it multiplies and adds in two steps, clang's
/// code for Apple's processors fuses them by a fixed rule (see [`mul_add`]); elsewhere compilers choose freely.
const SAME_OPERATIONS: bool = cfg!(any(target_arch = "x86_64", target_vendor = "apple"));

/// One value for each lane.
type Lane = [f32; LANES];

/// Quantizes whole rows of `n_per_row` values: [`DType::quantize_into`], faster where there is a way.
///
/// # Errors
/// As [`DType::quantize_into`].
pub fn quantize_into(
    to: DType,
    src: &[f32],
    n_per_row: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<()> {
    let make: fn(&[f32], Option<&[f32]>, &mut [u8]) = match to {
        DType::Q4_K => q4_k,
        DType::Q5_K => q5_k,
        DType::Q6_K => q6_k,
        _ => return Ok(to.quantize_into(src, n_per_row, importance, out)?),
    };
    let fits = n_per_row > 0
        && n_per_row.is_multiple_of(RECORD)
        && importance.is_none_or(|row| row.len() == n_per_row)
        && out.len() * RECORD == src.len() * to.row_bytes(RECORD);
    if !SAME_OPERATIONS || !fits {
        return Ok(to.quantize_into(src, n_per_row, importance, out)?);
    }
    Arch::new().dispatch(|| make(src, importance, out));
    Ok(())
}

/// `a * b + c`, rounded once where clang's default for ARM fuses the two: within one expression, the left product first.
#[inline(always)]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(target_arch = "aarch64") {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

/// The nearest integer, as ggml finds it: from the lowest bits of a sum. Far off (beyond 2^22) it wraps around.
#[inline(always)]
fn nearest(value: f32) -> i32 {
    const UNITS_AT_THE_END: f32 = 12_582_912.0;
    ((value + UNITS_AT_THE_END).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

/// The nearest level of a block that has levels from `low` to `high`.
#[inline(always)]
fn level(value: f32, low: i32, high: i32) -> f32 {
    nearest(value).max(low).min(high) as f32
}

/// The values of `LANES` blocks of `N` values, block `i` in lane `i`.
#[inline(always)]
fn lanes<const N: usize>(src: &[f32]) -> [Lane; N] {
    let mut x = [[0.0; LANES]; N];
    for (lane, block) in src.chunks_exact(N).take(LANES).enumerate() {
        for (x, &value) in x.iter_mut().zip(block) {
            x[lane] = value;
        }
    }
    x
}

/// Blocks of 32 levels from 0 to `high` with a factor and a minimum.
#[derive(Clone, Copy)]
struct Affine<'a> {
    high: i32,
    /// The search's first step, in levels beyond the highest, and from one step to the next.
    first: f32,
    step: f32,
    n_steps: i32,
    /// What each value of a row matters, where that is known.
    importance: Option<&'a [f32]>,
}

/// What the search found.
struct AffineFit {
    scale: Lane,
    /// What is subtracted, not negative.
    min: Lane,
    /// What the values weigh together.
    weight: Lane,
    /// The levels are the nearest to `(x - origin) * inverse`.
    origin: Lane,
    inverse: Lane,
}

impl<'a> Affine<'a> {
    /// The search of Q4_K and Q5_K: finer where importance is known.
    fn new(high: i32, (first, n_steps): (f32, i32), importance: Option<&'a [f32]>) -> Self {
        let (first, step, n_steps) = match importance {
            None => (first, 0.1, n_steps),
            Some(_) => (-0.9, 0.05, 36),
        };
        Self {
            high,
            first,
            step,
            n_steps,
            importance,
        }
    }

    /// The level of a scaled value in the search: with importance, ggml cuts it off before it is rounded.
    #[inline(always)]
    fn level(self, value: f32) -> f32 {
        if self.importance.is_none() {
            return level(value, 0, self.high);
        }
        let high = self.high as f32;
        let cut = if value < high { value } else { high };
        nearest(if value > 0.0 { cut } else { 0.0 }) as f32
    }

    /// What values weigh: their magnitude above the root mean square of their block.
    #[inline(always)]
    fn weights(x: &[Lane; 32]) -> [Lane; 32] {
        let mut squares = [0.0; LANES];
        for x in x {
            for l in 0..LANES {
                squares[l] = mul_add(x[l], x[l], squares[l]);
            }
        }
        let mean: Lane = from_fn(|l| (squares[l] / 32.0).sqrt());
        from_fn(|i| from_fn(|l| mean[l] + x[i][l].abs()))
    }

    /// What values of two records weigh where their importance is known: more, the larger they are.
    #[inline(always)]
    fn importance_weights(
        values: &[f32; 2 * RECORD],
        importance: &[f32; 2 * RECORD],
    ) -> [Lane; 32] {
        let x: [Lane; 32] = lanes(values);
        let important: [Lane; 32] = lanes(importance);
        let square: [f32; 2] = from_fn(|record| {
            let values = &values[record * RECORD..(record + 1) * RECORD];
            let sum = values.iter().fold(0.0, |sum, &x| mul_add(x, x, sum));
            2.0 * sum / RECORD as f32
        });
        from_fn(|i| {
            from_fn(|l| {
                let size = mul_add(x[i][l], x[i][l], square[l * 2 / LANES]).sqrt();
                important[i][l] * size
            })
        })
    }

    /// The factor and minimum of each of `LANES` blocks with the smallest weighted error.
    #[inline(always)]
    fn fit(self, x: &[Lane; 32], weights: &[Lane; 32]) -> AffineFit {
        let high = self.high as f32;
        let (mut min, mut max) = (x[0], x[0]);
        let mut sum_w = weights[0];
        let mut sum_x: Lane = from_fn(|l| sum_w[l] * x[0][l]);
        for (x, w) in x.iter().zip(weights).skip(1) {
            for l in 0..LANES {
                min[l] = if x[l] < min[l] { x[l] } else { min[l] };
                max[l] = if x[l] > max[l] { x[l] } else { max[l] };
                sum_w[l] += w[l];
                sum_x[l] = mul_add(w[l], x[l], sum_x[l]);
            }
        }
        for min in &mut min {
            *min = if *min > 0.0 { 0.0 } else { *min };
        }
        let flat: [bool; LANES] = from_fn(|l| max[l] == min[l]);
        let start = min;

        let mut inverse: Lane = from_fn(|l| high / (max[l] - min[l]));
        let mut origin = min;
        let mut scale: Lane = from_fn(|l| 1.0 / inverse[l]);
        let mut best = error(x, weights, (&scale, &min), |l, x| {
            level(inverse[l] * (x - origin[l]), 0, self.high)
        });
        for inverse in &mut inverse {
            // Those levels are zero.
            *inverse = if inverse.is_finite() { *inverse } else { 0.0 };
        }
        for step in 0..=self.n_steps {
            let beyond = mul_add(self.step, step as f32, self.first) + high;
            let inv: Lane = from_fn(|l| beyond / (max[l] - min[l]));
            let (mut sum_l, mut sum_l2, mut sum_xl) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
            for (x, w) in x.iter().zip(weights) {
                for l in 0..LANES {
                    let q = self.level(inv[l] * (x[l] - min[l]));
                    let wq = w[l] * q;
                    sum_l[l] = mul_add(w[l], q, sum_l[l]);
                    sum_l2[l] = mul_add(wq, q, sum_l2[l]);
                    sum_xl[l] = mul_add(wq, x[l], sum_xl[l]);
                }
            }
            // Least squares for factor and minimum, given the levels; the minimum is not above zero.
            let det: Lane = from_fn(|l| mul_add(sum_w[l], sum_l2[l], -(sum_l[l] * sum_l[l])));
            let mut new_scale: Lane =
                from_fn(|l| mul_add(sum_w[l], sum_xl[l], -(sum_x[l] * sum_l[l])) / det[l]);
            let mut new_min: Lane =
                from_fn(|l| mul_add(sum_l2[l], sum_x[l], -(sum_l[l] * sum_xl[l])) / det[l]);
            for l in 0..LANES {
                let above = new_min[l] > 0.0;
                let through_zero = sum_xl[l] / sum_l2[l];
                new_scale[l] = if above { through_zero } else { new_scale[l] };
                new_min[l] = if above { 0.0 } else { new_min[l] };
            }
            let error = error(x, weights, (&new_scale, &new_min), |l, x| {
                self.level(inv[l] * (x - min[l]))
            });
            for l in 0..LANES {
                let better = (det[l] > 0.0) & (error[l] < best[l]);
                inverse[l] = if better { inv[l] } else { inverse[l] };
                origin[l] = if better { min[l] } else { origin[l] };
                best[l] = if better { error[l] } else { best[l] };
                scale[l] = if better { new_scale[l] } else { scale[l] };
                min[l] = if better { new_min[l] } else { min[l] };
            }
        }
        for l in 0..LANES {
            // All values are the same: they are the minimum, and every level is 0.
            if flat[l] {
                (scale[l], min[l]) = (0.0, start[l]);
                (inverse[l], origin[l]) = (0.0, 0.0);
            }
        }
        AffineFit {
            scale,
            min: min.map(|v| -v),
            weight: sum_w,
            origin,
            inverse,
        }
    }

    /// The first 16 bytes (two halves, eight factors and minima of six bits) and the levels of the records in `src`,
    /// two at a time, each handed to `put` with its number.
    #[inline(always)]
    fn records(self, src: &[f32], mut put: impl FnMut(usize, &[u8; 16], &[u8; RECORD])) {
        for (pair, values) in src.chunks(2 * RECORD).enumerate() {
            let mut both = [0.0; 2 * RECORD];
            both[..values.len()].copy_from_slice(values);
            let x = lanes(&both);
            let weights = match self.importance {
                None => Self::weights(&x),
                Some(importance) => {
                    let row = importance.chunks_exact(RECORD).cycle();
                    let first = 2 * pair % (importance.len() / RECORD);
                    let mut of_both = [0.0; 2 * RECORD];
                    for (out, record) in of_both.chunks_exact_mut(RECORD).zip(row.skip(first)) {
                        out.copy_from_slice(record);
                    }
                    Self::importance_weights(&both, &of_both)
                }
            };
            let fit = self.fit(&x, &weights);
            for (i, x) in values.chunks_exact(RECORD).enumerate() {
                let (head, levels) = self.record(x, &fit, 8 * i);
                put(2 * pair + i, &head, &levels);
            }
        }
    }

    /// One record, whose blocks begin at lane `first`.
    #[inline(always)]
    fn record(self, x: &[f32], fit: &AffineFit, first: usize) -> ([u8; 16], [u8; RECORD]) {
        let of = |lane: &Lane| -> [f32; 8] { from_fn(|j| lane[first + j]) };
        let (scales, mins) = (of(&fit.scale), of(&fit.min));
        let ((d, s), (d_min, m)) = if self.importance.is_some() {
            let weights = of(&fit.weight);
            (
                six_bits_searched(&scales, &weights),
                six_bits_searched(&mins, &weights),
            )
        } else {
            (six_bits(&scales), six_bits(&mins))
        };
        // Only a factor below zero is larger, which Q4_K with importance packs as it is.
        let cut = self.importance.is_none() || self.high > 15;
        let [s, m] = [s, m].map(|v| v.map(|v| if cut { v.min(63) } else { v }));
        let (d, d_min) = (f16::from_f32(d), f16::from_f32(d_min));

        let mut head = [0; 16];
        head[..2].copy_from_slice(&d.to_le_bytes());
        head[2..4].copy_from_slice(&d_min.to_le_bytes());
        // The first four factors and minima take a byte each, whose upper two bits belong to the last four.
        for j in 0..4 {
            head[4 + j] = s[j] | (s[j + 4] >> 4) << 6;
            head[8 + j] = m[j] | (m[j + 4] >> 4) << 6;
            head[12 + j] = s[j + 4] & 15 | (m[j + 4] & 15) << 4;
        }
        let packed = |j: usize| match j {
            0..4 => (head[4 + j] & 63, head[8 + j] & 63),
            _ => (
                head[8 + j] & 15 | head[j] >> 6 << 4,
                head[8 + j] >> 4 | head[4 + j] >> 6 << 4,
            ),
        };

        let mut levels = [0; RECORD];
        for (j, levels) in levels.chunks_exact_mut(32).enumerate() {
            let (s, m) = packed(j);
            let d = d.to_f32() * f32::from(s);
            let d_min = d_min.to_f32() * f32::from(m);
            let (origin, inverse) = (fit.origin[first + j], fit.inverse[first + j]);
            for (q, x) in levels.iter_mut().zip(&x[32 * j..]) {
                // A block whose factor becomes zero keeps the search's levels.
                *q = if d == 0.0 {
                    self.level(inverse * (x - origin)) as u8
                } else {
                    level((x + d_min) / d, 0, self.high) as u8
                };
            }
        }
        (head, levels)
    }
}

/// The weighted squared error of blocks under their factors and minima; `level` is told lane and value.
#[inline(always)]
fn error(
    x: &[Lane; 32],
    weights: &[Lane; 32],
    (scale, min): (&Lane, &Lane),
    level: impl Fn(usize, f32) -> f32,
) -> Lane {
    let mut error = [0.0; LANES];
    for (x, w) in x.iter().zip(weights) {
        for l in 0..LANES {
            let off = mul_add(scale[l], level(l, x[l]), min[l]) - x[l];
            error[l] = mul_add(w[l], off * off, error[l]);
        }
    }
    error
}

/// Eight values as a factor and integers up to 63: the largest is 63.
fn six_bits(values: &[f32; 8]) -> (f32, [u8; 8]) {
    let largest = largest(values);
    let inverse = if largest > 0.0 { 63.0 / largest } else { 0.0 };
    let integers = values.map(|v| nearest(inverse * v) as u8);
    (largest / 63.0, integers)
}

/// Eight values as a factor and integers up to 63 with a small weighted error: eight factors are tried, then single
/// integers changed while that helps (`make_qp_quants`).
fn six_bits_searched(values: &[f32; 8], weights: &[f32; 8]) -> (f32, [u8; 8]) {
    let largest = largest(values);
    if largest < SMALLEST {
        return (0.0, [0; 8]);
    }
    let error = |scale: f32, integer: &dyn Fn(f32) -> f32| {
        let pairs = values.iter().zip(weights);
        pairs.fold(0.0, |error, (&x, &w)| {
            let off = mul_add(-scale, integer(x), x);
            mul_add(w * off, off, error)
        })
    };
    let rounded = |inverse: f32, x: f32| nearest(inverse * x).min(63);
    let mut inverse = 63.0 / largest;
    let mut best = error(1.0 / inverse, &|x| f32::from(nearest(inverse * x) as u8));
    for step in (-4..=4).filter(|&step| step != 0) {
        let tried = mul_add(0.1, step as f32, 63.0) / largest;
        let error = error(1.0 / tried, &|x| rounded(tried, x) as f32);
        if error < best {
            (best, inverse) = (error, tried);
        }
    }
    let (mut sum_xl, mut sum_l2) = (0.0f32, 0.0f32);
    let mut integers = [0u8; 8];
    for ((l, &x), &w) in integers.iter_mut().zip(values).zip(weights) {
        let integer = rounded(inverse, x);
        *l = integer as u8;
        sum_xl = mul_add(w * x, integer as f32, sum_xl);
        sum_l2 = mul_add(w * integer as f32, integer as f32, sum_l2);
    }
    for _ in 0..5 {
        let mut changed = false;
        for ((l, &x), &w) in integers.iter_mut().zip(values).zip(weights) {
            let old = f32::from(*l);
            let mut xl = mul_add(-(w * x), old, sum_xl);
            let mut l2 = mul_add(-(w * old), old, sum_l2);
            if !(xl > 0.0 && l2 > 0.0) {
                continue;
            }
            let new = rounded(1.0, x * l2 / xl);
            if new == i32::from(*l) {
                continue;
            }
            xl = mul_add(w * x, new as f32, xl);
            l2 = mul_add(w * new as f32, new as f32, l2);
            if xl * xl * sum_l2 > sum_xl * sum_xl * l2 {
                (*l, sum_xl, sum_l2, changed) = (new as u8, xl, l2, true);
            }
        }
        if !changed {
            break;
        }
    }
    let scale = if sum_l2 > 0.0 { sum_xl / sum_l2 } else { 0.0 };
    (scale, integers)
}

/// The largest value, if above zero.
fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |a, &b| if b > a { b } else { a })
}

/// Levels of 64 values, the lower four bits of two in a byte.
#[inline(always)]
fn put_nibbles(levels: &[u8; RECORD], out: &mut [u8]) {
    for (out, levels) in out.chunks_exact_mut(32).zip(levels.chunks_exact(64)) {
        let (low, high) = levels.split_at(32);
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            *out = low & 15 | high << 4;
        }
    }
}

#[inline(always)]
fn q4_k(src: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    const BYTES: usize = 144;
    Affine::new(15, (-1.0, 20), importance).records(src, |i, head, levels| {
        let out = &mut out[i * BYTES..(i + 1) * BYTES];
        out[..16].copy_from_slice(head);
        put_nibbles(levels, &mut out[16..]);
    });
}

#[inline(always)]
fn q5_k(src: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    const BYTES: usize = 176;
    Affine::new(31, (-0.5, 15), importance).records(src, |i, head, levels| {
        let out = &mut out[i * BYTES..(i + 1) * BYTES];
        out[..16].copy_from_slice(head);
        // The fifth bits: bit `j` of byte `i` belongs to value `32 * j + i`.
        for (i, byte) in out[16..48].iter_mut().enumerate() {
            *byte = (0..8).fold(0, |bits, j| bits | levels[32 * j + i] >> 4 << j);
        }
        put_nibbles(levels, &mut out[48..]);
    });
}

/// Blocks of 16 levels from -32 to 31 with a factor.
#[inline(always)]
fn q6_k(src: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    const BYTES: usize = 210;
    for (i, (x, out)) in src
        .chunks_exact(RECORD)
        .zip(out.chunks_exact_mut(BYTES))
        .enumerate()
    {
        out.fill(0);
        let blocks = lanes(x);
        let weights = match importance {
            None => blocks.map(|x| x.map(|v| v * v)),
            Some(row) => lanes(&row[i * RECORD % row.len()..]),
        };
        let (scales, inverses) = fit_symmetric(&blocks, &weights);
        let (mut highest, mut scale) = (0.0, 0.0);
        for value in scales {
            if value.abs() > highest {
                (highest, scale) = (value.abs(), value);
            }
        }
        if highest < SMALLEST {
            continue;
        }
        let inverse = -128.0 / scale;
        let d = f16::from_f32(1.0 / inverse);
        let factors: [i8; 16] = from_fn(|j| nearest(inverse * scales[j]).min(127) as i8);

        let mut levels = [0u8; RECORD];
        for (j, (levels, x)) in levels
            .chunks_exact_mut(16)
            .zip(x.chunks_exact(16))
            .enumerate()
        {
            let d = d.to_f32() * f32::from(factors[j]);
            if d == 0.0 && inverses[j] == 0.0 {
                // ggml's levels of zeros stay at the lowest, which its factor makes zero all the same.
                continue;
            }
            for (q, x) in levels.iter_mut().zip(x) {
                let value = if d == 0.0 { inverses[j] * x } else { x / d };
                *q = (level(value, -32, 31) + 32.0) as u8;
            }
        }
        // Each half: 128 lower four bits in 64 bytes, then 128 upper two bits in 32.
        for (half, levels) in levels.chunks_exact(128).enumerate() {
            for l in 0..32 {
                let q = [0, 32, 64, 96].map(|i| levels[i + l]);
                out[64 * half + l] = q[0] & 15 | q[2] << 4;
                out[64 * half + l + 32] = q[1] & 15 | q[3] << 4;
                out[128 + 32 * half + l] =
                    q[0] >> 4 | q[1] >> 4 << 2 | q[2] >> 4 << 4 | q[3] >> 4 << 6;
            }
        }
        for (out, factor) in out[192..208].iter_mut().zip(factors) {
            *out = factor as u8;
        }
        out[208..].copy_from_slice(&d.to_le_bytes());
    }
}

/// Blocks whose largest magnitude is smaller are zero.
const SMALLEST: f32 = 1e-15;

/// The factor of each of `LANES` blocks of 16 values with the smallest weighted error, and
/// the factor's inverse under which the search chose the levels; both are zero for zeros.
#[inline(always)]
fn fit_symmetric(x: &[Lane; 16], weights: &[Lane; 16]) -> (Lane, Lane) {
    let (mut largest, mut extreme) = ([0.0; LANES], [0.0; LANES]);
    for x in x {
        for l in 0..LANES {
            let larger = x[l].abs() > largest[l];
            largest[l] = if larger { x[l].abs() } else { largest[l] };
            extreme[l] = if larger { x[l] } else { extreme[l] };
        }
    }
    let sums = |inverse: &Lane| {
        let (mut sum_xl, mut sum_l2) = ([0.0; LANES], [0.0; LANES]);
        for (x, w) in x.iter().zip(weights) {
            for l in 0..LANES {
                let q = level(inverse[l] * x[l], -32, 31);
                sum_xl[l] = mul_add(w[l] * x[l], q, sum_xl[l]);
                sum_l2[l] = mul_add(w[l] * q, q, sum_l2[l]);
            }
        }
        (sum_xl, sum_l2)
    };
    let mut inverse: Lane = from_fn(|l| -32.0 / extreme[l]);
    let (sum_xl, sum_l2) = sums(&inverse);
    let mut scale: Lane = from_fn(|l| {
        if sum_l2[l] != 0.0 {
            sum_xl[l] / sum_l2[l]
        } else {
            0.0
        }
    });
    let mut best: Lane = from_fn(|l| scale[l] * sum_xl[l]);
    for step in (-9..=9).filter(|&step| step != 0) {
        let beyond = -mul_add(0.1, step as f32, 32.0);
        let inv: Lane = from_fn(|l| beyond / extreme[l]);
        let (sum_xl, sum_l2) = sums(&inv);
        for l in 0..LANES {
            let better = (sum_l2[l] > 0.0) & (sum_xl[l] * sum_xl[l] > best[l] * sum_l2[l]);
            let new_scale = sum_xl[l] / sum_l2[l];
            inverse[l] = if better { inv[l] } else { inverse[l] };
            scale[l] = if better { new_scale } else { scale[l] };
            best[l] = if better {
                new_scale * sum_xl[l]
            } else {
                best[l]
            };
        }
    }
    for l in 0..LANES {
        if largest[l] < SMALLEST {
            (scale[l], inverse[l]) = (0.0, 0.0);
        }
    }
    (scale, inverse)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const TYPES: [DType; 3] = [DType::Q4_K, DType::Q5_K, DType::Q6_K];

    fn check(values: &[f32], n_per_row: usize, row: Option<&[f32]>) -> Result<(), TestCaseError> {
        for to in TYPES {
            let bytes = to.row_bytes(values.len());
            let (mut ours, mut theirs) = (vec![1; bytes], vec![2; bytes]);
            quantize_into(to, values, n_per_row, row, &mut ours).unwrap();
            to.quantize_into(values, n_per_row, row, &mut theirs)
                .unwrap();
            if let Some(at) = (0..bytes).find(|&i| ours[i] != theirs[i]) {
                let record = at / to.row_bytes(RECORD);
                let values = &values[RECORD * record..RECORD * (record + 1)];
                let what = format!("{to}: byte {at} differs, record {record}: {values:?}");
                return Err(TestCaseError::fail(what));
            }
        }
        Ok(())
    }

    /// Numbers between 0 and 1.
    fn random(seed: u64) -> impl FnMut() -> f32 {
        let mut state = seed;
        move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        }
    }

    /// A record of one of the kinds that weights come in, and some that they should not.
    fn record(kind: u8, next: &mut impl FnMut() -> f32) -> Vec<f32> {
        let normal = |next: &mut dyn FnMut() -> f32| (0..12).map(|_| next()).sum::<f32>() - 6.0;
        let size = 10f32.powf(20.0 * next() - 12.0);
        (0..RECORD)
            .map(|i| match kind {
                0 => normal(next) * 0.02,
                1 => normal(next) * size,
                // Blocks of one value each, and of zeros.
                2 => (i / 16 % 5) as f32 * size,
                3 => 0.0,
                // One outlier.
                4 if i == 100 => -1.0,
                4 => normal(next) * 1e-3,
                5 => next() * size,
                6 => -next() * size,
                7 => (next() * 9.0).floor() - 4.0,
                // Blocks of very different size.
                8 => normal(next) * 10f32.powi(i as i32 / 16 - 12),
                9 if next() < 0.97 => 0.0,
                // The smallest and the largest numbers.
                10 => normal(next) * 1e-44,
                11 => normal(next) * 1e37,
                _ => normal(next),
            })
            .collect()
    }

    /// Importance of a row: all the same, spread over orders of magnitude, or zero in places.
    fn importance(n: usize, kind: u8, next: &mut impl FnMut() -> f32) -> Vec<f32> {
        (0..n)
            .map(|_| match kind {
                0 => 1.0,
                1 => 10f32.powf(8.0 * next() - 6.0),
                _ if next() < 0.3 => 0.0,
                _ => next(),
            })
            .collect()
    }

    #[test]
    fn bytes_are_those_of_ggml() {
        let mut next = random(1);
        for kind in 0..=12 {
            let values: Vec<f32> = (0..45).flat_map(|_| record(kind, &mut next)).collect();
            check(&values, 3 * RECORD, None).unwrap();
            for kind in 0..3 {
                let row = importance(3 * RECORD, kind, &mut next);
                check(&values, 3 * RECORD, Some(&row)).unwrap();
            }
        }
    }

    proptest! {
        #[test]
        fn bytes_of_any_mixture_are_those_of_ggml(
            seed: u64,
            kinds in prop::collection::vec(0u8..13, 1..6),
            row in 0u8..4,
            n_rows in 1usize..4,
        ) {
            let mut next = random(seed);
            let n_per_row = kinds.len() * RECORD;
            let mut rows = Vec::new();
            for kind in kinds.repeat(n_rows) {
                rows.extend(record(kind, &mut next));
            }
            let row = (row < 3).then(|| importance(n_per_row, row, &mut next));
            check(&rows, n_per_row, row.as_deref())?;
        }
    }
}
