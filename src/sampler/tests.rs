//! What the public interface does not show: the generator, the shortened chain, the scratch memory.

use super::*;

#[test]
fn philox_matches_the_published_vectors() {
    // Random123's kat_vectors, philox 4x32, 10 rounds.
    let ones = u32::MAX;
    for (counter, key, expected) in [
        (
            [0; 4],
            [0; 2],
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
        ),
        (
            [ones; 4],
            [ones; 2],
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
        ),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ] {
        assert_eq!(philox4x32_10(counter, key), expected);
    }
}

#[test]
fn keyed_numbers_never_change() {
    // The first two words of the first published vector, as 53 bits.
    let expected = (0x6627_e8d5_e169_c58du64 >> 11) as f64 / (1u64 << 53) as f64;
    assert_eq!(keyed_uniform(0, 0, Purpose::Target), expected);
    let all_bits = keyed_uniform(u64::MAX, u64::MAX, Purpose::Residual);
    assert!((0.0..1.0).contains(&all_bits));
}

#[test]
fn a_chain_keeps_only_the_stages_that_matter() {
    let chain = |params: SamplerParams| params.effective_chain();
    let on = SamplerParams {
        typical_p: 0.9,
        presence_penalty: 1.0,
        ..SamplerParams::llama_cpp()
    };
    assert_eq!(chain(SamplerParams::default()), []);
    assert_eq!(chain(SamplerParams::greedy()), [Stage::Temperature]);
    assert_eq!(chain(on.clone()), Stage::DEFAULT_ORDER);

    let greedy = SamplerParams { temp: 0.0, ..on };
    // Typical can drop the best token, so it and what comes before it stay; the two cuts after it go.
    let expected = [
        Stage::Penalties,
        Stage::TopK,
        Stage::TypicalP,
        Stage::Temperature,
    ];
    assert_eq!(chain(greedy), expected);
}

#[test]
fn scratch_memory_is_allocated_once() {
    let params = SamplerParams {
        typical_p: 0.9,
        presence_penalty: 0.5,
        logit_bias: vec![(3, 1.0)],
        ..SamplerParams::llama_cpp()
    };
    let mut sampler = Sampler::new(params).unwrap();
    let logits: Vec<f32> = (0..5000)
        .map(|i| ((i * 7919) % 5000) as f32 * 1e-3)
        .collect();
    sampler.accept(17);
    sampler.sample(&logits, 0).unwrap();
    let before = sampler.row.capacities();
    for position in 1..50 {
        sampler.sample(&logits, position).unwrap();
    }
    assert_eq!(sampler.row.capacities(), before);
}
