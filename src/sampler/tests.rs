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

/// A row with probabilities in 64ths, so that every product of a few is exact.
fn row_of(parts: &[u32]) -> Vec<Candidate> {
    assert_eq!(parts.iter().sum::<u32>(), 64);
    (0u32..)
        .zip(parts)
        .filter(|&(_, &n)| n > 0)
        .map(|(id, &n)| Candidate {
            id,
            logit: (n as f32).ln(),
            p: n as f32 / 64.0,
        })
        .collect()
}

/// A model over three tokens whose distribution depends on what came before.
type Rows = fn(&[u32]) -> Vec<Candidate>;

/// Targets: plain, with tokens cut off (as by top-k or top-p), and with a penalty on the newest tokens.
const TARGETS: [Rows; 3] = [
    |before| match before.last() {
        None => row_of(&[20, 30, 14]),
        Some(0) => row_of(&[40, 8, 16]),
        Some(1) => row_of(&[1, 32, 31]),
        _ => row_of(&[22, 21, 21]),
    },
    |before| match before.last() {
        None | Some(2) => row_of(&[64, 0, 0]),
        Some(0) => row_of(&[0, 24, 40]),
        _ => row_of(&[32, 32, 0]),
    },
    |before| match (before.len() % 2, before.contains(&1), before.contains(&2)) {
        (0, false, _) => row_of(&[8, 48, 8]),
        (0, true, false) => row_of(&[30, 10, 24]),
        (1, _, true) => row_of(&[40, 20, 4]),
        _ => row_of(&[16, 16, 32]),
    },
];

/// Drafts: a good one, one that misses tokens, a certain one, and one that proposes what the target forbids.
const DRAFTS: [Rows; 4] = [
    |before| match before.last() {
        Some(0) => row_of(&[32, 16, 16]),
        _ => row_of(&[16, 32, 16]),
    },
    |before| match before.len() % 2 {
        0 => row_of(&[0, 60, 4]),
        _ => row_of(&[34, 0, 30]),
    },
    |_| row_of(&[0, 0, 64]),
    |_| row_of(&[2, 1, 61]),
];

/// When a draft ends before its depth, as a function of what it may look at: the distribution, not the token drawn.
const STOPS: [fn(&[Candidate], usize) -> bool; 3] = [
    |_, _| false,
    |q, _| q.iter().all(|c| c.p < 0.5),
    |q, place| place >= 1 && q.iter().any(|c| c.p > 0.9),
];

/// Adds up with what probability each text of `n` tokens comes out, when drafts of `depth` are checked by the rule.
#[expect(
    clippy::too_many_arguments,
    reason = "a recursion over everything that varies"
)]
fn outcomes(
    target: Rows,
    draft: Rows,
    stop: fn(&[Candidate], usize) -> bool,
    depth: usize,
    n: usize,
    probability: f64,
    text: &[u32],
    out: &mut std::collections::BTreeMap<Vec<u32>, f64>,
) {
    if text.len() >= n {
        *out.entry(text[..n].to_vec()).or_default() += probability;
        return;
    }
    // All drafts, each with its probability.
    let mut drafts: Vec<(f64, Vec<u32>, Vec<Vec<Candidate>>)> = vec![(1.0, vec![], vec![])];
    for place in 0..depth {
        drafts = drafts
            .into_iter()
            .flat_map(|(p, tokens, rows)| {
                if tokens.len() < place {
                    return vec![(p, tokens, rows)];
                }
                let q = draft(&[text, &tokens[..]].concat());
                if stop(&q, place) {
                    return vec![(p, tokens, rows)];
                }
                q.iter()
                    .map(|c| {
                        let tokens = [&tokens[..], &[c.id]].concat();
                        let rows = [&rows[..], std::slice::from_ref(&q)].concat();
                        (p * f64::from(c.p), tokens, rows)
                    })
                    .collect()
            })
            .collect();
    }
    for (p_draft, tokens, rows) in drafts {
        let mut left = probability * p_draft;
        let mut text = text.to_vec();
        for (&token, q) in tokens.iter().zip(&rows) {
            let p = target(&text);
            let stays = acceptance(&p, q, token);
            let total: f64 = p.iter().map(|c| surplus(c, q)).sum();
            if stays < 1.0 {
                for c in &p {
                    let share = surplus(c, q) / total;
                    if share > 0.0 {
                        let text = [&text[..], &[c.id]].concat();
                        let replaced = left * (1.0 - stays) * share;
                        outcomes(target, draft, stop, depth, n, replaced, &text, out);
                    }
                }
            }
            left *= stays;
            text.push(token);
            if left == 0.0 {
                break;
            }
        }
        if left > 0.0 {
            for c in target(&text) {
                let text = [&text[..], &[c.id]].concat();
                let p = left * f64::from(c.p);
                outcomes(target, draft, stop, depth, n, p, &text, out);
            }
        }
    }
}

#[test]
fn drawn_drafts_keep_the_distribution_of_whole_texts() {
    let mut compared = 0;
    for target in TARGETS {
        for draft in DRAFTS {
            for stop in STOPS {
                for depth in 1..=4 {
                    let n = if depth < 3 { 4 } else { 3 };
                    let mut out = std::collections::BTreeMap::new();
                    outcomes(target, draft, stop, depth, n, 1.0, &[], &mut out);
                    assert!((out.values().sum::<f64>() - 1.0).abs() < 1e-12);
                    for (text, &p) in &out {
                        let plain: f64 = (0..n)
                            .map(|i| probability(&target(&text[..i]), text[i]))
                            .product();
                        assert!((p - plain).abs() < 1e-12, "{text:?}: {p} and {plain}");
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 3000, "{compared}");
}

#[test]
fn the_two_numbers_decide_as_the_rule_says() {
    let (p, q) = (row_of(&[16, 32, 16]), row_of(&[48, 8, 8]));
    // Token 0 stays with probability 1/3; else the surplus of 1 (24) and 2 (8) decides.
    assert_eq!(check_drawn(&p, &q, 0, 0.333, 0.0), Some(0));
    assert_eq!(check_drawn(&p, &q, 0, 0.334, 0.0), Some(1));
    assert_eq!(check_drawn(&p, &q, 0, 0.334, 0.74), Some(1));
    assert_eq!(check_drawn(&p, &q, 0, 0.334, 0.76), Some(2));
    assert_eq!(check_drawn(&p, &q, 1, 0.999, 0.0), Some(1));
    // What the target forbids never stays, and never comes.
    let cut = row_of(&[0, 64, 0]);
    for residual in [0.0, 0.5, 0.999_999] {
        assert_eq!(check_drawn(&cut, &q, 0, 0.0, residual), Some(1));
    }
    // Equal distributions leave no surplus; the draft then always stays.
    assert_eq!(check_drawn(&p, &p, 2, 0.999_999, 0.5), Some(2));
}
