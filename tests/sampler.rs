//! The sampler against plain reference implementations, properties, statistics and edge cases.

#![allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use proptest::prelude::*;
use qrun::sampler::{
    Candidate, Purpose, SampleError, Sampler, SamplerParams, Stage, draw, keyed_uniform,
};

/// Random numbers for the tests, unrelated to the sampler's (SplitMix64).
struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }

    fn between(&mut self, low: f64, high: f64) -> f32 {
        (low + self.unit() * (high - low)) as f32
    }

    fn gaussian(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// A row like a model's: flat or peaked, sometimes with ties, sometimes masked.
    fn row(&mut self, n: usize) -> Vec<f32> {
        let scale = self.unit() * 6.0;
        let (peaks, ties, masks) = (self.below(2), self.below(4), self.below(4));
        let mut row: Vec<f32> = (0..n).map(|_| (self.gaussian() * scale) as f32).collect();
        for _ in 0..peaks * 5 {
            row[self.below(n)] += 12.0;
        }
        if ties == 0 {
            for logit in &mut row {
                *logit = (*logit * 2.0).round() / 2.0;
            }
        }
        if masks == 0 {
            for _ in 0..n / 2 {
                row[self.below(n)] = f32::NEG_INFINITY;
            }
        }
        row[self.below(n)] = 1.25;
        row
    }

    fn sized_row(&mut self) -> Vec<f32> {
        let longest = [3, 70, 1500][self.below(3)];
        let n = 1 + self.below(longest);
        self.row(n)
    }

    fn history(&mut self, n_vocab: usize) -> Vec<u32> {
        // Few distinct ids, so that they repeat, and some that the row does not have.
        let span = 1 + self.below(n_vocab + 2);
        (0..self.below(100))
            .map(|_| self.below(span) as u32)
            .collect()
    }
}

/// The chain from the definitions: a plain list, a full sort wherever an order is needed.
fn reference(logits: &[f32], params: &SamplerParams, history: &[u32]) -> Vec<(u32, f32)> {
    let mut list: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    for &(id, bias) in &params.logit_bias {
        list[id as usize].1 += bias;
    }
    list.retain(|&(_, logit)| logit > f32::NEG_INFINITY);
    for stage in &params.samplers {
        match stage {
            Stage::Penalties => penalties(&mut list, params, history),
            Stage::TopK => {
                if params.top_k > 0 {
                    sort(&mut list);
                    list.truncate(params.top_k as usize);
                }
            }
            Stage::TypicalP => {
                if params.typical_p < 1.0 {
                    list = typical(&list, params.typical_p);
                }
            }
            Stage::TopP => {
                if params.top_p < 1.0 {
                    let sum = exp_sum(&list);
                    let max = largest(&list);
                    sort(&mut list);
                    let mut total = 0.0;
                    let cut = list.iter().position(|&(_, logit)| {
                        total += (logit - max).exp() / sum;
                        total >= params.top_p
                    });
                    list.truncate(cut.map_or(list.len(), |last| last + 1));
                }
            }
            Stage::MinP => {
                if params.min_p > 0.0 {
                    let floor = largest(&list) + params.min_p.ln();
                    list.retain(|&(_, logit)| logit >= floor);
                }
            }
            Stage::Temperature if params.temp <= 0.0 => {
                sort(&mut list);
                list.truncate(1);
            }
            Stage::Temperature => list.iter_mut().for_each(|entry| entry.1 /= params.temp),
        }
    }
    list
}

fn sort(list: &mut [(u32, f32)]) {
    list.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
}

fn largest(list: &[(u32, f32)]) -> f32 {
    list.iter().map(|entry| entry.1).fold(f32::MIN, f32::max)
}

fn exp_sum(list: &[(u32, f32)]) -> f32 {
    let max = largest(list);
    list.iter()
        .fold(0.0, |sum, entry| sum + (entry.1 - max).exp())
}

fn penalties(list: &mut [(u32, f32)], params: &SamplerParams, history: &[u32]) {
    let last_n = (params.repeat_last_n as usize).min(history.len());
    let window = &history[history.len() - last_n..];
    for (id, logit) in list {
        let count = window.iter().filter(|&seen| seen == id).count();
        if count > 0 {
            *logit = if *logit > 0.0 {
                *logit / params.repeat_penalty
            } else {
                *logit * params.repeat_penalty
            };
            *logit -= count as f32 * params.frequency_penalty + params.presence_penalty;
        }
    }
}

fn typical(list: &[(u32, f32)], p: f32) -> Vec<(u32, f32)> {
    let mut list = list.to_vec();
    sort(&mut list);
    let (max, sum) = (largest(&list), exp_sum(&list));
    let share = |logit: f32| (logit - max).exp() / sum;
    let terms = list.iter().map(|entry| share(entry.1)).filter(|&p| p > 0.0);
    let entropy = terms.fold(0.0, |entropy, p| entropy - p * p.ln());
    let distance = |logit: f32| (-share(logit).ln() - entropy).abs();
    // A stable sort: equal distances stay in rank order.
    list.sort_by(|a, b| distance(a.1).partial_cmp(&distance(b.1)).unwrap());
    let mut total = 0.0;
    let cut = list.iter().position(|entry| {
        total += share(entry.1);
        total > p
    });
    list.truncate(cut.map_or(list.len(), |last| last + 1));
    list
}

/// The sampler agrees with the reference: same ids in the same order, same logits, and the probabilities of
/// an `f64` softmax over them.
fn compare(logits: &[f32], params: &SamplerParams, history: &[u32]) -> Vec<Candidate> {
    let mut sampler = sampler(params.clone(), history);
    let found = sampler.distribution(logits).unwrap().to_vec();
    let expected = reference(logits, params, history);
    let pairs: Vec<(u32, f32)> = found.iter().map(|c| (c.id, c.logit)).collect();
    assert_eq!(pairs, expected, "{params:?}");
    let max = f64::from(largest(&expected));
    let weights = found.iter().map(|c| (f64::from(c.logit) - max).exp());
    let sum: f64 = weights.clone().sum();
    for (c, weight) in found.iter().zip(weights) {
        // The distance to the best logit is rounded to `f32`, so the error grows with it. Measured: at most
        // 0.7 of this; below the smallest normal number precision ends.
        let tolerance = f64::from(f32::EPSILON) * (1.0 + max - f64::from(c.logit));
        let error = (f64::from(c.p) / (weight / sum) - 1.0).abs();
        assert!(
            error <= tolerance || c.p < f32::MIN_POSITIVE,
            "{error} at {c:?}"
        );
    }
    found
}

fn sampler(params: SamplerParams, history: &[u32]) -> Sampler {
    let mut sampler = Sampler::new(params).unwrap();
    history.iter().for_each(|&id| sampler.accept(id));
    sampler
}

/// Everything off, then changed.
fn with(change: impl FnOnce(&mut SamplerParams)) -> SamplerParams {
    changed(SamplerParams::default(), change)
}

fn changed(mut params: SamplerParams, change: impl FnOnce(&mut SamplerParams)) -> SamplerParams {
    change(&mut params);
    params
}

fn only(stage: Stage) -> SamplerParams {
    SamplerParams {
        samplers: vec![stage],
        ..SamplerParams::default()
    }
}

const ROWS: u64 = 1000;

#[test]
fn top_k_equals_a_full_sort() {
    for seed in 0..ROWS {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let top_k = 1 + rng.below(300) as i32;
        let params = changed(only(Stage::TopK), |p| p.top_k = top_k);
        compare(&logits, &params, &[]);
    }
}

#[test]
fn top_p_equals_a_full_sort_and_keeps_the_crossing_token() {
    for seed in 0..ROWS {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let top_p = rng.between(0.0, 1.0);
        let params = changed(only(Stage::TopP), |p| p.top_p = top_p);
        let found = compare(&logits, &params, &[]);
        // The definition again, in f64 over the whole row, apart from rounding at the crossing.
        let all = distribution_f64(&logits);
        let kept: f64 = found.iter().map(|c| all[c.id as usize]).sum();
        let last = found.last().map_or(0.0, |c| all[c.id as usize]);
        let target = f64::from(top_p);
        assert!(kept >= target - 1e-5 && kept - last < target + 1e-5);
    }
}

#[test]
fn min_p_equals_its_definition() {
    for seed in 0..ROWS {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let min_p = rng.between(0.0, 1.0).powi(3);
        let params = changed(only(Stage::MinP), |p| p.min_p = min_p);
        let found = compare(&logits, &params, &[]);
        let all = distribution_f64(&logits);
        let best = all.iter().copied().fold(0.0, f64::max);
        for (id, p) in all.iter().enumerate() {
            let ratio = p / best / f64::from(min_p);
            let kept = found.iter().any(|c| c.id as usize == id);
            assert!(kept == (ratio >= 1.0) || (ratio - 1.0).abs() < 1e-5);
        }
    }
}

#[test]
fn typical_equals_a_full_sort() {
    for seed in 0..ROWS {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let typical_p = rng.between(0.0, 1.0);
        let params = changed(only(Stage::TypicalP), |p| p.typical_p = typical_p);
        let found = compare(&logits, &params, &[]);
        let all = distribution_f64(&logits);
        let kept: f64 = found.iter().map(|c| all[c.id as usize]).sum();
        assert!(kept >= f64::from(typical_p) - 1e-5);
    }
}

#[test]
fn temperature_divides_or_keeps_the_best() {
    for seed in 0..ROWS {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let temp = [rng.between(0.05, 3.0), 0.0, -1.0][rng.below(3)];
        let params = changed(only(Stage::Temperature), |p| p.temp = temp);
        compare(&logits, &params, &[]);
    }
}

#[test]
fn penalties_equal_their_definition() {
    for seed in 0..ROWS {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let history = rng.history(logits.len());
        let mut params = only(Stage::Penalties);
        randomise_penalties(&mut params, &mut rng);
        compare(&logits, &params, &history);
    }
}

#[test]
fn bias_is_added_before_the_chain() {
    for seed in 0..ROWS {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let logit_bias = random_bias(&logits, &mut rng);
        let params = changed(only(Stage::TopK), |p| {
            p.logit_bias = logit_bias;
            p.top_k = 5;
        });
        if reference(&logits, &params, &[]).is_empty() {
            let error = sampler(params, &[]).distribution(&logits).map(<[_]>::len);
            assert_eq!(error, Err(SampleError::NoCandidate));
        } else {
            compare(&logits, &params, &[]);
        }
    }
}

#[test]
fn whole_chains_in_any_order_equal_the_reference() {
    let mut lengths = Vec::new();
    for seed in 0..3 * ROWS {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let history = rng.history(logits.len());
        let params = random_params(&mut rng);
        lengths.push(compare(&logits, &params, &history).len());
    }
    // Enough of the chains must have left something to compare.
    let long = lengths.iter().filter(|&&length| length > 3).count();
    assert!(long > 900, "{long}");
}

#[test]
fn chains_equal_the_reference_at_the_real_vocabulary_size() {
    for (seed, params) in [
        SamplerParams::greedy(),
        SamplerParams::llama_cpp(),
        with(|p| {
            p.temp = 0.7;
            p.top_k = 20;
            p.top_p = 0.8;
            p.presence_penalty = 1.5;
        }),
        with(|p| p.top_p = 0.99),
        with(|p| {
            p.min_p = 0.01;
            p.temp = 1.5;
        }),
        with(|p| p.typical_p = 0.95),
        with(|p| p.temp = 0.7),
    ]
    .into_iter()
    .enumerate()
    {
        let mut rng = Rng(seed as u64);
        let logits = rng.row(248_320);
        let history: Vec<u32> = (0..200).map(|_| rng.below(logits.len()) as u32).collect();
        compare(&logits, &params, &history);
    }
}

#[test]
fn a_rising_row_is_selected_from_correctly() {
    // Every logit beats the ones before it: the list of the best is cut back again and again.
    let logits: Vec<f32> = (0..10_000).map(|i| i as f32 * 1e-3).collect();
    for top_k in [1, 20, 127, 128, 129, 5000, 9999, 10_000, 10_001] {
        let params = changed(only(Stage::TopK), |p| p.top_k = top_k);
        compare(&logits, &params, &[]);
    }
}

fn distribution_f64(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let weights = logits.iter().map(|&logit| f64::from(logit - max).exp());
    let sum: f64 = weights.clone().sum();
    weights.map(|weight| weight / sum).collect()
}

fn randomise_penalties(params: &mut SamplerParams, rng: &mut Rng) {
    params.repeat_last_n = rng.below(90) as i32;
    params.repeat_penalty = rng.between(0.5, 2.0);
    params.presence_penalty = rng.between(-1.0, 2.0);
    params.frequency_penalty = rng.between(-0.5, 1.0);
}

fn random_bias(logits: &[f32], rng: &mut Rng) -> Vec<(u32, f32)> {
    let bias = |rng: &mut Rng| [rng.between(-9.0, 9.0), f32::NEG_INFINITY][rng.below(2)];
    (0..rng.below(4))
        .map(|_| (rng.below(logits.len()) as u32, bias(rng)))
        .collect()
}

/// Each stage on or off, in any order, some twice.
fn random_params(rng: &mut Rng) -> SamplerParams {
    let mut samplers = Stage::DEFAULT_ORDER.to_vec();
    for last in (1..samplers.len()).rev() {
        samplers.swap(last, rng.below(last + 1));
    }
    samplers.truncate(1 + rng.below(6));
    samplers.push(samplers[0]);
    let mut params = SamplerParams {
        temp: [rng.between(0.1, 2.0), 0.7, 1.0, 0.0][rng.below(4)],
        top_k: [0, 1 + rng.below(400) as i32][rng.below(2)],
        top_p: [1.0, rng.between(0.5, 1.0)][rng.below(2)],
        min_p: [0.0, rng.between(0.0, 0.1)][rng.below(2)],
        typical_p: [1.0, rng.between(0.5, 1.0)][rng.below(2)],
        samplers,
        ..SamplerParams::default()
    };
    if rng.below(2) == 0 {
        randomise_penalties(&mut params, rng);
    }
    params
}

proptest! {
    #[test]
    fn every_distribution_sums_to_one(seed: u64) {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let history = rng.history(logits.len());
        let mut sampler = sampler(random_params(&mut rng), &history);
        let found = sampler.distribution(&logits).unwrap();
        let sum: f64 = found.iter().map(|c| f64::from(c.p)).sum();
        prop_assert!((sum - 1.0).abs() < 1e-6, "{}", sum);
        let mut ids: Vec<u32> = found.iter().map(|c| c.id).collect();
        ids.sort_unstable();
        ids.dedup();
        prop_assert_eq!(ids.len(), found.len());
        prop_assert!(found.iter().all(|c| c.p >= 0.0 && (c.id as usize) < logits.len()));
    }

    #[test]
    fn renaming_the_tokens_renames_the_distribution(
        seed: u64,
        (order, renamed) in (1usize..400).prop_flat_map(|n| {
            let ids = || Just((0..n as u32).collect::<Vec<_>>());
            (ids().prop_shuffle(), ids().prop_shuffle())
        }),
    ) {
        let mut rng = Rng(seed);
        // Distinct logits: ties are settled by the id, which the renaming changes.
        let logits: Vec<f32> = order.iter().map(|&rank| rank as f32 * 0.05).collect();
        let mut moved = logits.clone();
        for (id, &new) in renamed.iter().enumerate() {
            moved[new as usize] = logits[id];
        }
        // Ranked first, so that sums run in the same order.
        let mut params = random_params(&mut rng);
        params.top_k = 1 + rng.below(400) as i32;
        params.samplers.insert(0, Stage::TopK);
        let history = rng.history(logits.len());
        let moved_history: Vec<u32> = history
            .iter()
            .map(|&id| renamed.get(id as usize).copied().unwrap_or(u32::MAX))
            .collect();
        // The logits are multiples of one step, so a factor of 0.5 or 2 would tie some.
        params.repeat_penalty = 1.0;
        let before = sampler(params.clone(), &history).distribution(&logits).unwrap().to_vec();
        let after = sampler(params, &moved_history).distribution(&moved).unwrap().to_vec();
        let expected: Vec<Candidate> = before
            .into_iter()
            .map(|c| Candidate { id: renamed[c.id as usize], ..c })
            .collect();
        prop_assert_eq!(after, expected);
    }

    #[test]
    fn the_best_tokens_decide_as_the_whole_row_does(seed: u64) {
        let mut rng = Rng(seed);
        let logits = rng.sized_row();
        let history = rng.history(logits.len());
        let mut params = random_params(&mut rng);
        params.top_k = 1 + rng.below(100) as i32;
        params.samplers.insert(0, Stage::TopK);
        if rng.below(2) == 0 {
            randomise_penalties(&mut params, &mut rng);
            params.repeat_penalty = params.repeat_penalty.max(1.0);
            params.presence_penalty = params.presence_penalty.abs();
            params.frequency_penalty = params.frequency_penalty.abs();
            params.samplers.insert(0, Stage::Penalties);
        }
        let mut sampler = sampler(params, &history);
        let Some(n) = sampler.n_deciding() else {
            return Ok(());
        };
        // As a device gives them: any of equal ones, in any order.
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let mut shuffle = |ids: &mut [u32]| {
            for last in (1..ids.len()).rev() {
                ids.swap(last, rng.below(last + 1));
            }
        };
        let logit = |id: u32| logits[id as usize];
        shuffle(&mut ids);
        ids.sort_by(|&a, &b| logit(b).partial_cmp(&logit(a)).unwrap());
        ids.truncate(n);
        shuffle(&mut ids);
        let best: Vec<(u32, f32)> = ids.iter().map(|&id| (id, logit(id))).collect();
        let whole = sampler.distribution(&logits).unwrap().to_vec();
        match sampler.distribution_of_best(&best, logits.len()).unwrap() {
            Some(found) => prop_assert_eq!(found, whole),
            None => {
                let floor = best.iter().map(|b| b.1).fold(f32::INFINITY, f32::min);
                prop_assert!(logits.iter().filter(|&&l| l == floor).count() > 1);
            }
        }
    }

    #[test]
    fn rewinding_restores_the_state_exactly(seed: u64, drafts in prop::collection::vec(0u32..50, 0..120)) {
        let mut rng = Rng(seed);
        let logits = rng.row(50);
        let history = rng.history(50);
        let mut params = random_params(&mut rng);
        randomise_penalties(&mut params, &mut rng);
        let mut sampler = sampler(params, &history);
        let before = sampler.distribution(&logits).unwrap().to_vec();
        for &draft in &drafts {
            sampler.accept(draft);
            sampler.distribution(&logits).unwrap();
        }
        sampler.rewind(drafts.len());
        prop_assert_eq!(sampler.history(), history);
        prop_assert_eq!(sampler.distribution(&logits).unwrap(), before);
    }

    #[test]
    fn a_token_does_not_depend_on_earlier_calls(seed: u64, position: u64) {
        let mut rng = Rng(seed);
        let logits = rng.row(300);
        let params = changed(random_params(&mut rng), |p| p.seed = seed);
        let fresh = sampler(params.clone(), &[]).sample(&logits, position).unwrap();
        let mut used = sampler(params, &[]);
        for _ in 0..rng.below(5) {
            let other = rng.sized_row();
            used.sample(&other, rng.bits()).unwrap();
            used.accept(rng.below(300) as u32);
        }
        used.reset();
        prop_assert_eq!(used.sample(&logits, position).unwrap(), fresh);
    }
}

/// Sum of (observed - expected)^2 / expected.
fn chi_square(observed: &[usize], expected: &[f64]) -> f64 {
    let terms = observed.iter().zip(expected);
    terms.map(|(&o, &e)| (o as f64 - e).powi(2) / e).sum()
}

#[test]
fn draws_follow_the_distribution() {
    const DRAWS: usize = 100_000;
    let mut rng = Rng(1);
    let logits: Vec<f32> = (0..200).map(|_| (rng.gaussian() * 1.5) as f32).collect();
    let params = with(|p| {
        p.temp = 0.9;
        p.top_k = 40;
        p.seed = 20_260_101;
    });
    let mut sampler = sampler(params, &[]);
    let found = sampler.distribution(&logits).unwrap().to_vec();
    assert_eq!(found.len(), 40);
    let mut observed = vec![0; found.len()];
    for position in 0..DRAWS as u64 {
        let id = sampler.sample(&logits, position).unwrap();
        observed[found.iter().position(|c| c.id == id).unwrap()] += 1;
    }
    let expected: Vec<f64> = found
        .iter()
        .map(|c| f64::from(c.p) * DRAWS as f64)
        .collect();
    let statistic = chi_square(&observed, &expected);
    // 39 degrees of freedom: above 72.1 once in a thousand, below 15.9 as well.
    assert!((15.9..72.1).contains(&statistic), "{statistic}");
}

#[test]
fn keyed_numbers_are_uniform_and_independent() {
    const BINS: usize = 16;
    const DRAWS: u64 = 100_000;
    let purposes = [
        Purpose::Target,
        Purpose::Draft,
        Purpose::Accept,
        Purpose::Residual,
    ];
    let mut pairs = Vec::new();
    for (index, &a) in purposes.iter().enumerate() {
        // The same purpose at the next position, the next seed, and every other purpose at this position.
        pairs.push(((a, 0, 0), (a, 1, 0)));
        pairs.push(((a, 0, 0), (a, 0, 1)));
        pairs.extend(
            purposes[index + 1..]
                .iter()
                .map(|&b| ((a, 0, 0), (b, 0, 0))),
        );
    }
    for (first, second) in pairs {
        let bin = |(purpose, step, seed): (Purpose, u64, u64), position: u64| {
            let uniform = keyed_uniform(7 + seed, position + step, purpose);
            assert!((0.0..1.0).contains(&uniform));
            (uniform * BINS as f64) as usize
        };
        let mut observed = vec![0; BINS * BINS];
        for position in 0..DRAWS {
            observed[bin(first, position) * BINS + bin(second, position)] += 1;
        }
        let expected = vec![DRAWS as f64 / (BINS * BINS) as f64; BINS * BINS];
        let statistic = chi_square(&observed, &expected);
        // 255 degrees of freedom: outside of this less than once in ten thousand.
        assert!(
            (176.0..347.0).contains(&statistic),
            "{first:?} {second:?}: {statistic}"
        );
    }
}

#[test]
fn drawing_covers_the_line_and_skips_zeros() {
    let share = |id, p| Candidate { id, logit: 0.0, p };
    let list = [
        share(4, 0.0),
        share(9, 0.25),
        share(2, 0.0),
        share(7, 0.75),
        share(1, 0.0),
    ];
    let below_one = 1.0 - f64::EPSILON / 2.0;
    for (uniform, id) in [(0.0, 9), (0.249, 9), (0.25, 7), (0.999, 7), (below_one, 7)] {
        assert_eq!(draw(&list, uniform), Some(id));
    }
    // Not normalised: the part of p - q above zero, in speculation.
    assert_eq!(draw(&[share(3, 0.01), share(5, 0.03)], 0.3), Some(5));
    assert_eq!(draw(&[share(3, 0.0)], 0.5), None);
    assert_eq!(draw(&[], 0.5), None);
}

fn ids(params: SamplerParams, logits: &[f32]) -> Vec<u32> {
    let mut sampler = sampler(params, &[]);
    sampler
        .distribution(logits)
        .unwrap()
        .iter()
        .map(|c| c.id)
        .collect()
}

#[test]
fn extreme_parameters_keep_what_they_should() {
    let logits = [1.0, 3.0, 2.0, 3.0, f32::NEG_INFINITY];
    assert_eq!(ids(SamplerParams::default(), &logits), [0, 1, 2, 3]);
    assert_eq!(ids(with(|p| p.top_k = 99), &logits), [1, 3, 2, 0]);
    assert_eq!(ids(with(|p| p.top_k = i32::MAX), &logits), [1, 3, 2, 0]);
    assert_eq!(ids(with(|p| p.top_k = -1), &logits), [0, 1, 2, 3]);
    assert_eq!(ids(with(|p| p.top_k = 1), &logits), [1]);
    assert_eq!(ids(with(|p| p.top_p = 0.0), &logits), [1]);
    assert_eq!(ids(with(|p| p.min_p = 1.0), &logits), [1, 3]);
    assert_eq!(ids(with(|p| p.typical_p = 0.0), &logits).len(), 1);
    assert_eq!(ids(SamplerParams::greedy(), &logits), [1]);
    assert_eq!(
        ids(
            changed(SamplerParams::greedy(), |p| p.samplers = vec![]),
            &logits
        )
        .len(),
        4
    );
}

#[test]
fn top_p_stops_at_the_sum_and_typical_past_it() {
    // Four shares of exactly a quarter: llama.cpp compares with `>=` in one and with `>` in the other.
    assert_eq!(ids(with(|p| p.top_p = 0.5), &[1.0; 4]), [0, 1]);
    assert_eq!(ids(with(|p| p.typical_p = 0.5), &[1.0; 4]), [0, 1, 2]);
}

#[test]
fn equal_logits_rank_by_the_lower_id() {
    let logits = [0.5; 300];
    assert_eq!(ids(with(|p| p.top_k = 3), &logits), [0, 1, 2]);
    assert_eq!(ids(with(|p| p.top_p = 0.0099), &logits), [0, 1, 2]);
    assert_eq!(ids(SamplerParams::greedy(), &logits), [0]);
    let found = sampler(SamplerParams::default(), &[])
        .distribution(&logits)
        .unwrap()
        .to_vec();
    assert!(found.iter().all(|c| c.p == 1.0 / 300.0));
    // Both zeros are one value, so the id decides.
    assert_eq!(ids(with(|p| p.top_k = 2), &[-0.0, 0.0, -0.0]), [0, 1]);
    // Two logits that become equal when they are divided.
    let apart = (1..99u32).map(|i| (i as f32 * 0.1, (i as f32 * 0.1).next_up()));
    let pair = apart
        .into_iter()
        .find(|(low, high)| low / 3.0 == high / 3.0);
    let (low, high) = pair.unwrap();
    let params = with(|p| {
        p.temp = 3.0;
        p.top_k = 2;
        p.samplers = vec![Stage::TopK, Stage::Temperature, Stage::TopK];
    });
    assert_eq!(ids(params, &[low, high, 0.0]), [0, 1]);
    // A best token that typical has moved away from the front.
    let samplers = vec![Stage::TypicalP, Stage::Temperature];
    let params = with(|p| {
        p.typical_p = 0.999;
        p.temp = 0.0;
        p.samplers = samplers;
    });
    assert_eq!(ids(params, &[1.0, 0.1, 1.0, 0.2, 0.3]), [0]);
}

#[test]
fn a_vocabulary_of_one_is_certain() {
    for params in [
        SamplerParams::default(),
        SamplerParams::llama_cpp(),
        SamplerParams::greedy(),
    ] {
        let mut sampler = sampler(params, &[0, 0]);
        let found = sampler.distribution(&[-3.0]).unwrap();
        assert_eq!((found.len(), found[0].id, found[0].p), (1, 0, 1.0));
        assert_eq!(sampler.sample(&[-3.0], 12), Ok(0));
    }
}

#[test]
fn a_tiny_temperature_is_greedy_and_finite() {
    for temp in [f32::MIN_POSITIVE, 1e-45, 1e-20] {
        for logits in [[8.0, 30.0, 29.0], [-30.0, -8.0, -9.0], [-1.0, 0.0, -2.0]] {
            for top_k in [0, 2] {
                let params = with(|p| {
                    p.temp = temp;
                    p.top_k = top_k;
                });
                let mut sampler = sampler(params, &[]);
                let found = sampler.distribution(&logits).unwrap();
                assert!(
                    found.iter().all(|c| c.p == f32::from(u8::from(c.id == 1))),
                    "{found:?}"
                );
            }
        }
    }
}

#[test]
fn probabilities_that_underflow_do_not_poison_typical() {
    // Shares 0.4 and six times 0.1: the small ones are nearer to the entropy, 1.75. exp(-200) is 0 in f32,
    // and 0 * ln(0) must not turn the entropy into NaN.
    let mut logits = [0.0; 8];
    logits[0] = 4.0f32.ln();
    logits[7] = -200.0;
    let params = with(|p| p.typical_p = 0.45);
    assert_eq!(ids(params, &logits), [1, 2, 3, 4, 5]);
}

#[test]
fn rows_without_a_distribution_give_typed_errors() {
    let nan = f32::NAN;
    let masked = f32::NEG_INFINITY;
    let qwen = with(|p| {
        p.temp = 0.7;
        p.top_k = 20;
        p.top_p = 0.8;
    });
    for params in [
        qwen.clone(),
        SamplerParams::default(),
        SamplerParams::greedy(),
    ] {
        let mut sampler = sampler(params, &[]);
        let mut error = |logits: &[f32]| sampler.sample(logits, 0).unwrap_err();
        assert_eq!(error(&[]), SampleError::NoCandidate);
        assert_eq!(error(&[masked; 70]), SampleError::NoCandidate);
        let mut row = vec![masked; 200];
        row[150] = f32::INFINITY;
        let logit = f32::INFINITY;
        assert_eq!(error(&row), SampleError::NonFinite { id: 150, logit });
        row[130] = nan;
        assert!(matches!(error(&row), SampleError::NonFinite { id: 130, logit } if logit.is_nan()));
        assert!(matches!(
            error(&[nan; 3]),
            SampleError::NonFinite { id: 0, .. }
        ));
        // The next row is not affected.
        assert_eq!(sampler.sample(&[masked, 1.0, masked], 0), Ok(1));
    }
    let biased = |logit_bias| sampler(changed(qwen.clone(), |p| p.logit_bias = logit_bias), &[]);
    let error = biased(vec![(9, 1.0)]).sample(&[1.0, 2.0], 0).unwrap_err();
    assert_eq!(error, SampleError::BiasOutOfRange { id: 9, n_vocab: 2 });
    let error = biased(vec![(0, f32::MAX)])
        .sample(&[f32::MAX, 2.0], 0)
        .unwrap_err();
    assert!(matches!(error, SampleError::NonFinite { id: 0, .. }));
    let error = biased(vec![(0, masked), (1, masked)])
        .sample(&[1.0, 2.0], 0)
        .unwrap_err();
    assert_eq!(error, SampleError::NoCandidate);
}

#[test]
fn penalties_that_overflow_give_typed_errors() {
    let params = with(|p| p.repeat_penalty = 1e-30);
    let mut sampler = sampler(params.clone(), &[1]);
    let error = sampler.sample(&[0.0, 1e20], 0).unwrap_err();
    assert!(matches!(error, SampleError::NonFinite { id: 1, .. }));
    let mut sampler = self::sampler(changed(params, |p| p.repeat_penalty = 1e30), &[0]);
    let nothing = sampler.distribution(&[-1e20]).map(<[_]>::len);
    assert_eq!(nothing, Err(SampleError::NoCandidate));
    assert_eq!(sampler.sample(&[-1e20, 1.0], 0), Ok(1));
}

#[test]
fn the_window_slides_and_comes_back() {
    let params = with(|p| {
        p.presence_penalty = 4.0;
        p.repeat_last_n = 2;
    });
    let mut sampler = sampler(params, &[0, 1]);
    let logits = |sampler: &mut Sampler| {
        let found = sampler.distribution(&[1.0; 3]).unwrap();
        found.iter().map(|c| c.logit).collect::<Vec<_>>()
    };
    assert_eq!(logits(&mut sampler), [-3.0, -3.0, 1.0]);
    sampler.accept(2);
    assert_eq!(logits(&mut sampler), [1.0, -3.0, -3.0]);
    sampler.rewind(1);
    assert_eq!(logits(&mut sampler), [-3.0, -3.0, 1.0]);
    sampler.rewind(99);
    assert_eq!(logits(&mut sampler), [1.0; 3]);
}

#[test]
fn meaningless_parameters_are_refused_by_flag() {
    let nan = f32::NAN;
    for (params, flag) in [
        (with(|p| p.temp = nan), "`--temp`"),
        (with(|p| p.temp = f32::INFINITY), "`--temp`"),
        (with(|p| p.top_p = 1.5), "`--top-p`"),
        (with(|p| p.top_p = nan), "`--top-p`"),
        (with(|p| p.min_p = -0.1), "`--min-p`"),
        (with(|p| p.typical_p = nan), "`--typical-p`"),
        (with(|p| p.repeat_penalty = 0.0), "`--repeat-penalty`"),
        (with(|p| p.repeat_penalty = -1.0), "`--repeat-penalty`"),
        (with(|p| p.repeat_penalty = 1e-45), "`--repeat-penalty`"),
        (with(|p| p.repeat_last_n = -1), "`--repeat-last-n`"),
        (with(|p| p.presence_penalty = nan), "`--presence-penalty`"),
        (
            with(|p| p.frequency_penalty = f32::INFINITY),
            "`--frequency-penalty`",
        ),
        (
            with(|p| p.logit_bias = vec![(3, nan)]),
            "`--logit-bias` of token 3",
        ),
        (
            with(|p| p.logit_bias = vec![(4, f32::INFINITY)]),
            "`--logit-bias` of token 4",
        ),
    ] {
        let message = Sampler::new(params).unwrap_err().to_string();
        assert!(
            message.starts_with(flag) && message.contains("expected"),
            "{message}"
        );
    }
    let message = with(|p| p.top_p = 1.5).validate().unwrap_err().to_string();
    assert_eq!(message, "`--top-p` is 1.5, expected a number from 0 to 1");
    for params in [
        with(|p| {
            p.temp = -1.0;
            p.top_k = -5;
        }),
        changed(SamplerParams::llama_cpp(), |p| {
            p.logit_bias = vec![(1, f32::NEG_INFINITY)]
        }),
    ] {
        params.validate().unwrap();
    }
}

#[test]
fn stages_have_the_names_of_llama_cpp() {
    let names = [
        "penalties",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "temperature",
    ];
    for (stage, name) in Stage::DEFAULT_ORDER.into_iter().zip(names) {
        assert_eq!(stage.to_string(), name);
        assert_eq!(name.parse::<Stage>().unwrap(), stage);
        assert_eq!(serde_json::to_value(stage).unwrap(), name);
    }
    for (alias, stage) in [
        ("TOP-K", Stage::TopK),
        ("topk", Stage::TopK),
        ("nucleus", Stage::TopP),
        ("typ", Stage::TypicalP),
        ("min-p", Stage::MinP),
        ("temp", Stage::Temperature),
    ] {
        assert_eq!(alias.parse::<Stage>().unwrap(), stage);
    }
    let message = "mirostat".parse::<Stage>().unwrap_err().to_string();
    assert!(
        message.contains("`mirostat`") && message.contains("top_k"),
        "{message}"
    );
}
