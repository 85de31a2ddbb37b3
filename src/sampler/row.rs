//! One row of logits on its way through the chain: the arithmetic of each stage.
//!
//! Most of a row is never looked at closely. While it is dense it is scanned in vector-sized blocks; the
//! first cut turns it into a short list, and ranking works on integers that carry logit and id. It knows
//! neither the order of the stages nor the history. The invariant: same row, same stages, same bits.

use super::{Candidate, SampleError, SamplerParams};

/// One row on its way through the chain. It starts dense (`logits`, id = index), which is quick to scan, and
/// becomes a list at the first cut. Logits of -inf never enter the list.
#[derive(Clone, Debug, Default)]
pub(super) struct Row {
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
    dense: bool,
    /// The list is in rank order: falling logits, equal ones by rising id.
    ranked: bool,
    keys: Vec<u64>,
    window: Vec<u32>,
    spare: Vec<Candidate>,
}

impl Row {
    /// Takes a row over, with the bias added, and checks it.
    pub(super) fn load(&mut self, logits: &[f32], bias: &[(u32, f32)]) -> Result<(), SampleError> {
        self.candidates.clear();
        self.dense = true;
        self.ranked = false;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        for &(id, amount) in bias {
            let Some(logit) = self.logits.get_mut(id as usize) else {
                let n_vocab = logits.len();
                return Err(SampleError::BiasOutOfRange { id, n_vocab });
            };
            *logit += amount;
        }
        checked_max(&self.logits).map(|_| ())
    }

    /// Takes only the best token of a row over, after the same check: greedy decoding copies nothing.
    pub(super) fn load_best(&mut self, logits: &[f32]) -> Result<(), SampleError> {
        let max = checked_max(logits)?;
        self.keep_only(index_of(logits, max), max);
        Ok(())
    }

    /// Takes some tokens of a row over, after the same check.
    pub(super) fn load_best_of(&mut self, best: &[(u32, f32)]) -> Result<(), SampleError> {
        self.dense = false;
        self.ranked = false;
        self.candidates.clear();
        for &(id, logit) in best {
            check(id, logit)?;
            if logit > f32::NEG_INFINITY {
                self.candidates.push(Candidate { id, logit, p: 0.0 });
            }
        }
        if self.candidates.is_empty() {
            return Err(SampleError::NoCandidate);
        }
        Ok(())
    }

    /// The lowest logit of the `n` that were kept; none where fewer were there to be kept.
    pub(super) fn worst_of(&self, n: usize) -> Option<f32> {
        let worst = self
            .candidates
            .last()
            .filter(|_| self.candidates.len() >= n);
        worst.map(|c| c.logit)
    }

    /// Changes the logits of `recent` tokens, each once, by how often it occurs there.
    pub(super) fn penalise(
        &mut self,
        recent: &[u32],
        params: &SamplerParams,
    ) -> Result<(), SampleError> {
        self.window.clear();
        self.window.extend_from_slice(recent);
        self.window.sort_unstable();
        for same in self.window.chunk_by(|a, b| a == b) {
            let (id, count) = (same[0], same.len() as f32);
            let logit = if self.dense {
                self.logits.get_mut(id as usize)
            } else {
                let mut left = self.candidates.iter_mut();
                left.find(|c| c.id == id).map(|c| &mut c.logit)
            };
            let Some(logit) = logit else { continue };
            // Dividing a negative logit would reward it.
            if *logit <= 0.0 {
                *logit *= params.repeat_penalty;
            } else {
                *logit /= params.repeat_penalty;
            }
            *logit -= count * params.frequency_penalty + params.presence_penalty;
            check(id, *logit)?;
        }
        self.ranked = false;
        Ok(())
    }

    /// Also the way to a ranked list: with `k` at its largest, everything is ranked.
    pub(super) fn top_k(&mut self, k: usize) {
        if !self.ranked {
            self.select(k);
            self.take_keys(k);
        }
        self.candidates.truncate(k);
    }

    pub(super) fn top_p(&mut self, p: f32) {
        let max = self.max();
        let sum = self.exp_sum(max);
        if self.ranked {
            let kept = nucleus(self.candidates.iter().map(|c| c.logit), max, sum, p);
            self.candidates.truncate(kept.unwrap_or(usize::MAX));
            return;
        }
        // Most nuclei are small: rank a few, and more only if they do not suffice.
        let mut n_ranked = 256;
        loop {
            self.select(n_ranked);
            let kept = nucleus(self.keys.iter().map(|&key| logit_of(key)), max, sum, p);
            if kept.is_some() || self.keys.len() < n_ranked {
                return self.take_keys(kept.unwrap_or(usize::MAX));
            }
            n_ranked = n_ranked.saturating_mul(16);
        }
    }

    pub(super) fn min_p(&mut self, p: f32) {
        let floor = self.max() + p.ln();
        if self.dense {
            let candidates = &mut self.candidates;
            for_each_block(&self.logits, |first, block| {
                if any(block, |logit| logit >= floor) {
                    candidates.extend(candidates_of(first, block).filter(|c| c.logit >= floor));
                }
            });
            self.dense = false;
        } else {
            self.candidates.retain(|c| c.logit >= floor);
        }
    }

    pub(super) fn typical(&mut self, p: f32) {
        self.top_k(usize::MAX);
        let max = self.max();
        let sum = self.exp_sum(max);
        let mut entropy = 0.0;
        for c in &mut self.candidates {
            c.p = (c.logit - max).exp() / sum;
            // What underflowed to 0 adds nothing, where the plain formula would say NaN.
            if c.p > 0.0 {
                entropy -= c.p * c.p.ln();
            }
        }
        // Distances are not negative, so their bits sort as they do; equal ones stay in rank order.
        let distance = |c: &Candidate| (-c.p.ln() - entropy).abs();
        let by_rank = (0u64..).zip(&self.candidates);
        self.keys.clear();
        self.keys
            .extend(by_rank.map(|(rank, c)| u64::from(distance(c).to_bits()) << 32 | rank));
        self.keys.sort_unstable();
        self.spare.clear();
        let mut cumulative = 0.0;
        for &key in &self.keys {
            let candidate = self.candidates[key as u32 as usize];
            self.spare.push(candidate);
            cumulative += candidate.p;
            if cumulative > p {
                break;
            }
        }
        std::mem::swap(&mut self.candidates, &mut self.spare);
        self.ranked = false;
    }

    pub(super) fn temperature(&mut self, temp: f32) {
        let max = self.max();
        if temp <= 0.0 {
            let best = if self.dense {
                Some(index_of(&self.logits, max))
            } else {
                let best = self.candidates.iter().filter(|c| c.logit == max);
                best.map(|c| c.id).min()
            };
            return self.keep_only(best.unwrap_or(0), max);
        }
        // Too small a temperature would leave the `f32` range: distances to the best logit do not.
        let offset = if (max / temp).is_finite() { 0.0 } else { max };
        if self.dense {
            for logit in &mut self.logits {
                *logit = (*logit - offset) / temp;
            }
        } else {
            for c in &mut self.candidates {
                c.logit = (c.logit - offset) / temp;
            }
        }
        // Rounding can make two logits equal, and their ids may be the wrong way round.
        self.ranked = false;
    }

    /// The end of the chain: the list of whatever is left, with its probabilities.
    pub(super) fn softmax(&mut self) -> Result<&[Candidate], SampleError> {
        if self.dense {
            let all = candidates_of(0, &self.logits);
            self.candidates
                .extend(all.filter(|c| c.logit > f32::NEG_INFINITY));
        }
        let max = self.max();
        if max == f32::NEG_INFINITY {
            // Penalties can overflow, too.
            return Err(SampleError::NoCandidate);
        }
        let mut sum = 0.0f64;
        for c in &mut self.candidates {
            c.p = (c.logit - max).exp();
            sum += f64::from(c.p);
        }
        for c in &mut self.candidates {
            c.p = (f64::from(c.p) / sum) as f32;
        }
        Ok(&self.candidates)
    }

    fn keep_only(&mut self, id: u32, logit: f32) {
        self.candidates.clear();
        self.candidates.push(Candidate { id, logit, p: 1.0 });
        self.dense = false;
        self.ranked = true;
    }

    fn max(&self) -> f32 {
        if self.dense {
            scan(&self.logits).0
        } else {
            let logits = self.candidates.iter().map(|c| c.logit);
            logits.fold(f32::NEG_INFINITY, f32::max)
        }
    }

    /// Sum of exponentials in the present order, in `f32`: another order or precision would move the cuts
    /// away from llama.cpp's.
    fn exp_sum(&self, max: f32) -> f32 {
        let add = |sum: f32, logit: f32| sum + (logit - max).exp();
        if self.dense {
            self.logits.iter().fold(0.0, |sum, &logit| add(sum, logit))
        } else {
            self.candidates.iter().fold(0.0, |sum, c| add(sum, c.logit))
        }
    }

    /// Fills `keys` with the best `k` (or all, if there are fewer), ranked.
    fn select(&mut self, k: usize) {
        if self.dense {
            best_of_row(&self.logits, k, &mut self.keys);
        } else {
            self.keys.clear();
            self.keys
                .extend(self.candidates.iter().map(|c| key_of(c.logit, c.id)));
            cut(&mut self.keys, k);
        }
        self.keys.sort_unstable();
    }

    /// Makes the first `n` keys the list.
    fn take_keys(&mut self, n: usize) {
        self.candidates.clear();
        let kept = self.keys.iter().take(n);
        self.candidates.extend(kept.map(|&key| Candidate {
            id: key as u32,
            logit: logit_of(key),
            p: 0.0,
        }));
        self.dense = false;
        self.ranked = true;
    }
}

/// How many ranked logits it takes to bring their probability to `p`; none if they do not.
fn nucleus(logits: impl Iterator<Item = f32>, max: f32, sum: f32, p: f32) -> Option<usize> {
    let mut cumulative = 0.0;
    let mut shares = logits.map(|logit| (logit - max).exp() / sum);
    let last = shares.position(|share| {
        cumulative += share;
        cumulative >= p
    });
    last.map(|last| last + 1)
}

/// A rank as an integer: ascending keys are falling logits, equal logits by rising id. Integers sort fast,
/// and need no comparator that could contradict itself.
fn key_of(logit: f32, id: u32) -> u64 {
    // Adding 0 makes -0 and 0 one value. Bits of positive floats sort as unsigned integers do, those of
    // negative ones in reverse and below: set the sign of the first, flip all bits of the second.
    let bits = (logit + 0.0).to_bits();
    let ascending = bits ^ ((bits as i32 >> 31) as u32 | 1 << 31);
    u64::from(!ascending) << 32 | u64::from(id)
}

fn logit_of(key: u64) -> f32 {
    let descending = (key >> 32) as u32;
    f32::from_bits(!descending ^ ((descending as i32 >> 31) as u32 | 1 << 31))
}

/// Keeps the `k` smallest keys, in any order but with the largest of them last.
fn cut(keys: &mut Vec<u64>, k: usize) {
    if k > 0 && k < keys.len() {
        keys.select_nth_unstable(k - 1);
        keys.truncate(k);
    }
}

/// The keys of the `k` best logits above -inf, unordered, in one pass.
///
/// Once k are found, only larger logits matter (an equal one has a higher id), and most blocks are passed
/// over with a few vector comparisons. The list is cut back whenever it has doubled, so the work stays
/// linear even on a rising row.
fn best_of_row(row: &[f32], k: usize, keys: &mut Vec<u64>) {
    let full = k.saturating_mul(2).max(256);
    let mut floor = f32::NEG_INFINITY;
    keys.clear();
    for_each_block(row, |first, block| {
        if !any(block, |logit| logit > floor) {
            return;
        }
        for c in candidates_of(first, block) {
            if c.logit > floor {
                keys.push(key_of(c.logit, c.id));
                if keys.len() == full {
                    cut(keys, k);
                    floor = keys.last().map_or(floor, |&key| logit_of(key));
                }
            }
        }
    });
    cut(keys, k);
}

/// Logits looked at together: enough for the loops over them to become straight vector code.
const BLOCK: usize = 64;
/// Logits compared at once where a maximum is looked for.
const LANES: usize = 32;

/// Calls `visit` with every block of the row and the index of its first element; the last may be shorter.
fn for_each_block(row: &[f32], mut visit: impl FnMut(usize, &[f32])) {
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    for (index, block) in blocks.iter().enumerate() {
        visit(index * BLOCK, block);
    }
    visit(blocks.len() * BLOCK, rest);
}

/// Like `Iterator::any`, but looks at all of a block, which vectorises.
fn any(block: &[f32], test: impl Fn(f32) -> bool) -> bool {
    block
        .iter()
        .fold(false, |found, &logit| found | test(logit))
}

fn candidates_of(first: usize, block: &[f32]) -> impl Iterator<Item = Candidate> {
    let with_id = (first as u32..).zip(block);
    with_id.map(|(id, &logit)| Candidate { id, logit, p: 0.0 })
}

/// The largest logit, and whether all of them are usable.
fn scan(row: &[f32]) -> (f32, bool) {
    // One maximum per lane, since a single running one would be a chain of dependent steps, and one answer per block:
    // compilers turn this form into vector code.
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    let mut unusable = any(rest, |logit| !is_logit(logit));
    for block in blocks {
        let mut bad = false;
        for (lane, &logit) in lanes.iter_mut().zip(block) {
            *lane = if logit > *lane { logit } else { *lane };
            bad |= !is_logit(logit);
        }
        unusable |= bad;
    }
    let max = lanes.into_iter().chain(rest.iter().copied());
    (max.fold(f32::NEG_INFINITY, f32::max), !unusable)
}

/// The largest logit of a row that has a distribution.
fn checked_max(row: &[f32]) -> Result<f32, SampleError> {
    let (max, usable) = scan(row);
    if !usable {
        candidates_of(0, row).try_for_each(|c| check(c.id, c.logit))?;
    }
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NoCandidate);
    }
    Ok(max)
}

/// False for NaN and +inf.
pub(super) fn is_logit(value: f32) -> bool {
    value < f32::INFINITY
}

fn check(id: u32, logit: f32) -> Result<(), SampleError> {
    if is_logit(logit) {
        return Ok(());
    }
    Err(SampleError::NonFinite { id, logit })
}

/// The lowest index of `value` (0 if it is not there).
fn index_of(row: &[f32], value: f32) -> u32 {
    let mut blocks = row.chunks(BLOCK);
    let start = blocks.position(|block| any(block, |logit| logit == value));
    let start = start.unwrap_or(0) * BLOCK;
    let within = row[start..].iter().position(|&logit| logit == value);
    (start + within.unwrap_or(0)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Row {
        /// For the test that nothing is allocated per token.
        pub(in crate::sampler) fn capacities(&self) -> [usize; 4] {
            let lists = self.candidates.capacity() + self.spare.capacity();
            let (logits, keys) = (self.logits.capacity(), self.keys.capacity());
            [logits, keys, lists, self.window.capacity()]
        }
    }

    #[test]
    fn keys_rank_as_logits_and_give_them_back() {
        let falling = [
            f32::MAX,
            2.5,
            1.0,
            f32::MIN_POSITIVE,
            1e-45,
            0.0,
            -1e-45,
            -1.0,
            f32::MIN,
            f32::NEG_INFINITY,
        ];
        for (&above, &below) in falling.iter().zip(&falling[1..]) {
            assert!(key_of(above, 9) < key_of(below, 3), "{above} above {below}");
        }
        for logit in falling {
            assert_eq!(logit_of(key_of(logit, 7)), logit);
            assert!(key_of(logit, 3) < key_of(logit, 9));
        }
        assert_eq!(key_of(-0.0, 5), key_of(0.0, 5));
    }
}
