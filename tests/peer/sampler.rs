//! Every sampler stage, and whole chains, against llama.cpp's samplers on random rows of logits.
//!
//! Rows hold no logit twice: llama.cpp leaves the order of equal ones to its sort, here the lower id comes first.
//! Tokens at -inf stay in llama.cpp's lists with a probability of 0, so only what is above 0 is compared. Its
//! typical sampling computes 0 * log(0) for tokens whose probability is 0; it is given no such row.

use std::collections::HashSet;

use ggml_metal::peer::{PeerSampler, apply_samplers};
use qrun::sampler::{Sampler, SamplerParams};

use super::support::synth::Random;

const N_ROWS: usize = 1000;
const N_VOCAB: usize = 2000;
/// The vocabulary of the released models.
const LARGE_VOCAB: usize = 248_320;

/// A row like a model's: some flat, some steep, some with a few tokens that stand out, some half masked.
fn row(random: &mut Random, n_vocab: usize, masked: bool) -> Vec<f32> {
    let deviation = [0.3, 2.0, 5.0, 9.0][random.bits() as usize % 4];
    let offset = [0.0, 12.0, -30.0][random.bits() as usize % 3];
    let mut seen = HashSet::new();
    let mut row: Vec<f32> = (0..n_vocab)
        .map(|_| {
            loop {
                let logit = offset + deviation * random.normal();
                if seen.insert(logit.to_bits()) {
                    return logit;
                }
            }
        })
        .collect();
    for _ in 0..random.bits() % 6 {
        let at = random.bits() as usize % n_vocab;
        let logit = row[at] + 10.0 * random.unit();
        if seen.insert(logit.to_bits()) {
            row[at] = logit;
        }
    }
    if masked {
        for _ in 0..n_vocab / 2 {
            row[random.bits() as usize % n_vocab] = f32::NEG_INFINITY;
        }
        row[random.bits() as usize % n_vocab] = offset;
    }
    row
}

fn history(random: &mut Random, n_vocab: usize) -> Vec<u32> {
    let span = 1 + random.bits() as usize % (n_vocab / 4);
    let length = random.bits() % 150;
    (0..length)
        .map(|_| (random.bits() as usize % span) as u32)
        .collect()
}

/// llama.cpp's chain in its default order, without the stages that it skips at these values.
fn peer_chain<'a>(params: &'a SamplerParams, history: &'a [u32]) -> Vec<PeerSampler<'a>> {
    vec![
        PeerSampler::LogitBias(&params.logit_bias),
        PeerSampler::Penalties {
            last_n: params.repeat_last_n,
            repeat: params.repeat_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
            history,
        },
        PeerSampler::TopK(params.top_k),
        PeerSampler::Typical(params.typical_p),
        PeerSampler::TopP(params.top_p),
        PeerSampler::MinP(params.min_p),
        PeerSampler::Temperature(params.temp),
        PeerSampler::Distribution,
    ]
}

fn compare(logits: &[f32], params: &SamplerParams, history: &[u32]) {
    let (left, _) = apply_samplers(&peer_chain(params, history), logits);
    let mut theirs: Vec<(u32, f32)> = left
        .iter()
        .map(|c| (c.id, c.p))
        .filter(|c| c.1 > 0.0)
        .collect();
    let mut sampler = Sampler::new(params.clone()).unwrap();
    history.iter().for_each(|&token| sampler.accept(token));
    let left = sampler.distribution(logits).unwrap();
    let mut ours: Vec<(u32, f32)> = left
        .iter()
        .map(|c| (c.id, c.p))
        .filter(|c| c.1 > 0.0)
        .collect();
    ours.sort_by_key(|c| c.0);
    theirs.sort_by_key(|c| c.0);
    assert_eq!(ours.len(), theirs.len(), "{params:?}");
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert_eq!(ours.0, theirs.0, "{params:?}");
        // Below the second term a probability has not 24 bits left.
        let bound = 1e-6 * theirs.1 + 1e-37;
        assert!(
            (ours.1 - theirs.1).abs() <= bound,
            "{ours:?}, {theirs:?}: {params:?}"
        );
    }
}

/// Compares on 1,000 rows, and on a few as long as the released models'. `change` sets what differs from "off".
fn stage(seed: u64, masked: bool, change: impl Fn(&mut Random, &mut SamplerParams)) {
    let mut random = Random(seed);
    for i in 0..N_ROWS + 4 {
        let n_vocab = if i < N_ROWS { N_VOCAB } else { LARGE_VOCAB };
        let logits = row(&mut random, n_vocab, masked && i % 4 == 0);
        let mut params = SamplerParams::default();
        change(&mut random, &mut params);
        let history = history(&mut random, n_vocab);
        compare(&logits, &params, &history);
    }
}

fn one_of<T: Copy>(random: &mut Random, list: &[T]) -> T {
    list[random.bits() as usize % list.len()]
}

#[test]
fn top_k_equals_the_peers() {
    stage(1, true, |random, params| {
        params.top_k = one_of(random, &[0, 1, 2, 20, 40, 129, 700, 9999])
    });
}

#[test]
fn top_p_equals_the_peers() {
    stage(2, true, |random, params| {
        params.top_p = one_of(random, &[0.0, 0.1, 0.5, 0.8, 0.95, 0.999])
    });
}

#[test]
fn min_p_equals_the_peers() {
    stage(3, true, |random, params| {
        params.min_p = one_of(random, &[1e-6, 0.01, 0.05, 0.3, 1.0])
    });
}

#[test]
fn typical_p_equals_the_peers() {
    stage(4, false, |random, params| {
        params.typical_p = one_of(random, &[0.0, 0.2, 0.5, 0.9, 0.99])
    });
}

#[test]
fn temperature_equals_the_peers() {
    stage(5, true, |random, params| {
        params.temp = one_of(random, &[-1.0, 0.0, 0.05, 0.6, 0.8, 1.7, 20.0])
    });
}

#[test]
fn penalties_equal_the_peers() {
    stage(6, true, |random, params| {
        params.repeat_last_n = one_of(random, &[0, 1, 64, 1000]);
        params.repeat_penalty = one_of(random, &[1.0, 1.1, 1.5, 0.8]);
        params.presence_penalty = one_of(random, &[0.0, 1.5, -0.5]);
        params.frequency_penalty = one_of(random, &[0.0, 0.3]);
    });
}

fn bias(random: &mut Random) -> Vec<(u32, f32)> {
    let some = |random: &mut Random| {
        let amount = one_of(random, &[f32::NEG_INFINITY, -5.0, 0.5, 8.0]);
        ((random.bits() % N_VOCAB as u64) as u32, amount)
    };
    (0..random.bits() % 20).map(|_| some(random)).collect()
}

#[test]
fn logit_bias_equals_the_peers() {
    stage(7, true, |random, params| params.logit_bias = bias(random));
}

#[test]
fn default_chains_equal_the_peers() {
    let llama_cpp = SamplerParams::llama_cpp();
    stage(8, true, |_, params| *params = llama_cpp.clone());
    // What Qwen recommends with thinking and without.
    stage(9, true, |random, params| {
        (params.temp, params.top_p) = one_of(random, &[(0.6, 0.95), (0.7, 0.8), (1.0, 0.95)]);
        params.top_k = 20;
        params.presence_penalty = one_of(random, &[0.0, 1.5]);
    });
}

#[test]
fn chains_of_every_stage_equal_the_peers() {
    stage(10, false, |random, params| {
        params.logit_bias = bias(random)
            .into_iter()
            .filter(|b| b.1.is_finite())
            .collect();
        params.repeat_penalty = one_of(random, &[1.0, 1.1]);
        params.presence_penalty = one_of(random, &[0.0, 1.0]);
        params.top_k = one_of(random, &[0, 40, 300]);
        params.typical_p = one_of(random, &[1.0, 0.95, 0.5]);
        params.top_p = one_of(random, &[1.0, 0.9, 0.5]);
        params.min_p = one_of(random, &[0.0, 0.02, 0.1]);
        params.temp = one_of(random, &[0.0, 0.7, 1.0, 1.4]);
    });
}

#[test]
fn greedy_selects_what_the_peer_selects() {
    let mut random = Random(11);
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    for i in 0..N_ROWS {
        let logits = row(&mut random, N_VOCAB, i % 4 == 0);
        let (_, selected) = apply_samplers(&[PeerSampler::Greedy], &logits);
        assert_eq!(Some(sampler.sample(&logits, i as u64).unwrap()), selected);
    }
}
