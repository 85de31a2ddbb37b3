//! From one row of logits to a token: the sampler chain, and the random numbers it draws with.
//!
//! Stages, their defaults and their order follow llama.cpp's definitions; arithmetic is `f32` in the same
//! order of summation, so the same candidates survive a cut. Nothing here knows of models, text or time.
//! The one invariant: a token is a function of (logits, parameters, history, seed, absolute position).
//! Random numbers are counted, not streamed, so neither the depth of speculation nor a rejected draft
//! moves them. Equal logits rank by the lower id, everywhere.

mod row;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use anyhow::{bail, ensure};

use row::{Row, is_logit};

/// What the user asked for. [`Default`] turns every stage off; [`SamplerParams::llama_cpp`] has the values
/// that llama.cpp uses when no flag is given.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct SamplerParams {
    /// `--temp`: logits are divided by it; 0 or less keeps the best token only; 1 is off.
    pub temp: f32,
    /// `--top-k`: how many of the best tokens stay; 0 or less is off.
    pub top_k: i32,
    /// `--top-p`, 0 to 1: the best tokens up to and including the one that brings their probability to
    /// this; 1 is off.
    pub top_p: f32,
    /// `--min-p`, 0 to 1: tokens at least this fraction as probable as the best one; 0 is off.
    pub min_p: f32,
    /// `--typical-p`, 0 to 1: the tokens whose surprise is nearest to the entropy, until their probability
    /// passes this; 1 is off.
    pub typical_p: f32,
    /// `--repeat-penalty`, above 0: positive logits of recent tokens are divided by it, the others
    /// multiplied; 1 is off.
    pub repeat_penalty: f32,
    /// `--repeat-last-n`: how many of the newest tokens count as recent; 0 turns all penalties off.
    /// The default is llama.cpp's 64: the penalties have off values of their own.
    pub repeat_last_n: i32,
    /// `--presence-penalty`: taken once from the logit of every recent token; 0 is off.
    pub presence_penalty: f32,
    /// `--frequency-penalty`: taken from the logit for each occurrence among the recent tokens; 0 is off.
    pub frequency_penalty: f32,
    /// `--logit-bias`: (id, amount) pairs, added before the chain; `-inf` forbids, repeated ids add up.
    pub logit_bias: Vec<(u32, f32)>,
    /// `--seed`: with the position, all that a random number depends on.
    pub seed: u64,
    /// `--samplers`: the chain, in order. A stage that is missing does nothing, even if its value is set:
    /// without [`Stage::Temperature`], `temp` 0 is not greedy (as in llama.cpp).
    pub samplers: Vec<Stage>,
}

impl Default for SamplerParams {
    fn default() -> Self {
        Self {
            temp: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            samplers: Stage::DEFAULT_ORDER.to_vec(),
        }
    }
}

impl SamplerParams {
    /// Always the most probable token: temperature 0, nothing else on.
    pub fn greedy() -> Self {
        Self {
            temp: 0.0,
            ..Self::default()
        }
    }

    /// What llama.cpp samples with when no flag is given (`common_params_sampling`), except its seed, which
    /// is random there.
    pub fn llama_cpp() -> Self {
        Self {
            temp: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            ..Self::default()
        }
    }

    /// Refuses values without a meaning; the message names the flag, the value and what is accepted.
    pub fn validate(&self) -> anyhow::Result<()> {
        let fractions = [
            ("--top-p", self.top_p),
            ("--min-p", self.min_p),
            ("--typical-p", self.typical_p),
        ];
        for (flag, value) in fractions {
            let accepted = (0.0..=1.0).contains(&value);
            ensure!(
                accepted,
                "`{flag}` is {value}, expected a number from 0 to 1"
            );
        }
        let amounts = [
            ("--temp", self.temp),
            ("--presence-penalty", self.presence_penalty),
            ("--frequency-penalty", self.frequency_penalty),
        ];
        for (flag, value) in amounts {
            let accepted = value.is_finite();
            ensure!(accepted, "`{flag}` is {value}, expected a finite number");
        }
        // Its reciprocal must be finite too: positive logits are divided by it.
        let repeat = self.repeat_penalty;
        ensure!(
            repeat > 0.0 && repeat.is_finite() && repeat.recip().is_finite(),
            "`--repeat-penalty` is {repeat}, expected a finite number above 0"
        );
        let last_n = self.repeat_last_n;
        ensure!(
            last_n >= 0,
            "`--repeat-last-n` is {last_n}, expected 0 or more tokens"
        );
        for &(id, bias) in &self.logit_bias {
            ensure!(
                is_logit(bias),
                "`--logit-bias` of token {id} is {bias}, expected a finite number or -inf"
            );
        }
        Ok(())
    }

    /// Whether a stage does anything with these values.
    fn is_active(&self, stage: Stage) -> bool {
        match stage {
            Stage::Penalties => {
                self.repeat_last_n > 0
                    && (self.repeat_penalty != 1.0
                        || self.presence_penalty != 0.0
                        || self.frequency_penalty != 0.0)
            }
            Stage::TopK => self.top_k > 0,
            Stage::TypicalP => self.typical_p < 1.0,
            Stage::TopP => self.top_p < 1.0,
            Stage::MinP => self.min_p > 0.0,
            Stage::Temperature => self.temp != 1.0,
        }
    }

    /// The chain without what changes nothing: inactive stages, and the cuts just before a greedy temperature
    /// (each of them keeps the best token, and looking for it alone is faster).
    fn effective_chain(&self) -> Vec<Stage> {
        let mut chain = Vec::new();
        for &stage in self.samplers.iter().filter(|&&stage| self.is_active(stage)) {
            if stage == Stage::Temperature && self.temp <= 0.0 {
                while let Some(Stage::TopK | Stage::TopP | Stage::MinP) = chain.last() {
                    chain.pop();
                }
            }
            chain.push(stage);
        }
        chain
    }
}

/// One step of the chain. Text form: llama.cpp's names, as in `--samplers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Repeat, presence and frequency penalties over the newest tokens of the history.
    Penalties,
    /// The k best tokens.
    TopK,
    /// Locally typical sampling (Meister et al. 2022).
    #[serde(rename = "typ_p")]
    TypicalP,
    /// Nucleus sampling (Holtzman et al. 2020).
    TopP,
    /// A floor relative to the best token.
    MinP,
    /// Division of the logits.
    Temperature,
}

impl Stage {
    /// llama.cpp's order, without the stages that are not offered here.
    pub const DEFAULT_ORDER: [Self; 6] = [
        Self::Penalties,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Temperature,
    ];

    /// llama.cpp's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Penalties => "penalties",
            Self::TopK => "top_k",
            Self::TypicalP => "typ_p",
            Self::TopP => "top_p",
            Self::MinP => "min_p",
            Self::Temperature => "temperature",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Stage {
    type Err = anyhow::Error;

    /// Takes what llama.cpp takes: any case, `top-k` and `topk` for `top_k`, and three short names.
    fn from_str(text: &str) -> anyhow::Result<Self> {
        let name = text.to_ascii_lowercase().replace(['_', '-'], "");
        Ok(match name.as_str() {
            "penalties" => Self::Penalties,
            "topk" => Self::TopK,
            "typp" | "typ" => Self::TypicalP,
            "topp" | "nucleus" => Self::TopP,
            "minp" => Self::MinP,
            "temperature" | "temp" => Self::Temperature,
            _ => {
                let names = Self::DEFAULT_ORDER.map(Self::name).join(", ");
                bail!("sampler `{text}` is unknown, expected one of {names}")
            }
        })
    }
}

/// Where more tokens than this decide, the whole row is looked at.
const MOST_DECIDING: usize = 256;

/// A token that the chain left in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Token id.
    pub id: u32,
    /// The logit after bias, penalties and temperature.
    pub logit: f32,
    /// Its share of the distribution; 0 only where it is too small for an `f32`.
    pub p: f32,
}

/// Why a row of logits has no distribution.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A logit is NaN or +inf, as computed or after bias and penalties: the first such token.
    #[error("logit of token {id} is {logit}, expected a number or -inf")]
    NonFinite {
        /// Token id.
        id: u32,
        /// The logit.
        logit: f32,
    },
    /// The row is empty, or every logit is -inf.
    #[error("every logit is -inf, expected a token to sample")]
    NoCandidate,
    /// A bias names a token that the model does not have.
    #[error("`--logit-bias` names token {id}, expected an id below {n_vocab}")]
    BiasOutOfRange {
        /// The id in `logit_bias`.
        id: u32,
        /// Logits in the row.
        n_vocab: usize,
    },
}

/// The chain with its history and its scratch memory (allocated by the first row, then reused).
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplerParams,
    chain: Vec<Stage>,
    history: Vec<u32>,
    row: Row,
}

impl Sampler {
    /// Checks the parameters; the history is empty.
    pub fn new(params: SamplerParams) -> anyhow::Result<Self> {
        params.validate()?;
        Ok(Self {
            chain: params.effective_chain(),
            params,
            history: Vec::new(),
            row: Row::default(),
        })
    }

    /// The parameters it was made from.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// All accepted ids, oldest first.
    pub fn history(&self) -> &[u32] {
        &self.history
    }

    /// Appends a committed token (prompt or output) to the history that the penalties look at.
    pub fn accept(&mut self, token: u32) {
        self.history.push(token);
    }

    /// Forgets the `n` newest tokens (all, if there are fewer): rejected drafts.
    pub fn rewind(&mut self, n: usize) {
        // The history is the whole state, so forgetting is exact: older tokens re-enter the window.
        self.history.truncate(self.history.len().saturating_sub(n));
    }

    /// Forgets the whole history.
    pub fn reset(&mut self) {
        self.history.clear();
    }

    /// True where the token is always the best one of the row as it is.
    pub fn is_greedy(&self) -> bool {
        self.chain == [Stage::Temperature]
            && self.params.temp <= 0.0
            && self.params.logit_bias.is_empty()
    }

    /// The target distribution after the whole chain, in the order that the chain left: by id if nothing
    /// was ranked, best first after top-k and top-p, most typical first after typical.
    ///
    /// Softmax as in llama.cpp's last step: `f32` exponentials of the distance to the largest logit, their
    /// sum in `f64`, quotients rounded to `f32`.
    pub fn distribution(&mut self, logits: &[f32]) -> Result<&[Candidate], SampleError> {
        if self.is_greedy() {
            self.row.load_best(logits)?;
        } else {
            self.row.load(logits, &self.params.logit_bias)?;
        }
        for at in 0..self.chain.len() {
            self.run_stage(at)?;
        }
        self.row.softmax()
    }

    /// How many of a row's best tokens decide about [`Self::distribution`], where not all tokens do: the chain begins by
    /// keeping the best, perhaps after penalties that only lower logits, and there is no bias. One more than are
    /// kept, so that it is seen where a tie decides.
    pub fn n_deciding(&self) -> Option<usize> {
        let params = &self.params;
        let lowered = match self.chain[..] {
            [Stage::TopK, ..] => 0,
            [Stage::Penalties, Stage::TopK, ..] => {
                let lower = params.repeat_penalty >= 1.0
                    && params.presence_penalty >= 0.0
                    && params.frequency_penalty >= 0.0;
                usize::try_from(params.repeat_last_n)
                    .ok()
                    .filter(|_| lower)?
            }
            _ => return None,
        };
        let kept = usize::try_from(params.top_k).ok()?;
        let n = kept.checked_add(lowered)?.checked_add(1)?;
        (params.logit_bias.is_empty() && n <= MOST_DECIDING).then_some(n)
    }

    /// [`Self::distribution`] from the best tokens of a row, in any order, with their logits: those that
    /// [`Self::n_deciding`] asks for, or the whole vocabulary of `n_vocab` where it has fewer. None where a tie leaves
    /// open which tokens are kept, so that the whole row has to be looked at.
    pub fn distribution_of_best(
        &mut self,
        best: &[(u32, f32)],
        n_vocab: usize,
    ) -> Result<Option<&[Candidate]>, SampleError> {
        self.row.load_best_of(best)?;
        let floor = best.iter().map(|b| b.1).fold(f32::INFINITY, f32::min);
        let n_kept = usize::try_from(self.params.top_k).unwrap_or(usize::MAX);
        // The tokens that are not here have the lowest logit of those that are, at most.
        let decided = |worst: f32| worst > floor || best.len() >= n_vocab;
        let cut = self.chain.iter().position(|&stage| stage == Stage::TopK);
        for at in 0..self.chain.len() {
            self.run_stage(at)?;
            if cut == Some(at) && !self.row.worst_of(n_kept).is_none_or(decided) {
                return Ok(None);
            }
        }
        self.row.softmax().map(Some)
    }

    /// Draws the token of absolute position `position` (prompt included) from [`Self::distribution`], with
    /// the number of (seed, position, [`Purpose::Target`]).
    pub fn sample(&mut self, logits: &[f32], position: u64) -> Result<u32, SampleError> {
        let seed = self.params.seed;
        draw_target(self.distribution(logits)?, seed, position)
    }

    /// As [`Self::sample`] from what [`Self::distribution_of_best`] takes; none where that gives none.
    pub fn sample_best(
        &mut self,
        best: &[(u32, f32)],
        n_vocab: usize,
        position: u64,
    ) -> Result<Option<u32>, SampleError> {
        let seed = self.params.seed;
        let p = self.distribution_of_best(best, n_vocab)?;
        p.map(|p| draw_target(p, seed, position)).transpose()
    }

    /// Checks a draft token that was drawn from the distribution `q` (Leviathan et al., "Fast inference from
    /// transformers via speculative decoding", 2023): it stays with probability `min(1, p / q)`, else a token drawn
    /// from what `p` has more than `q` takes its place. The result is distributed as [`Self::distribution`].
    pub fn check_drawn(
        &mut self,
        logits: &[f32],
        position: u64,
        drafted: u32,
        q: &[Candidate],
    ) -> Result<u32, SampleError> {
        let seed = self.params.seed;
        check_target(self.distribution(logits)?, seed, position, drafted, q)
    }

    /// As [`Self::check_drawn`] from what [`Self::distribution_of_best`] takes; none where that gives none.
    pub fn check_drawn_best(
        &mut self,
        best: &[(u32, f32)],
        n_vocab: usize,
        position: u64,
        drafted: u32,
        q: &[Candidate],
    ) -> Result<Option<u32>, SampleError> {
        let seed = self.params.seed;
        let p = self.distribution_of_best(best, n_vocab)?;
        p.map(|p| check_target(p, seed, position, drafted, q))
            .transpose()
    }

    /// The stage at this place of the chain.
    fn run_stage(&mut self, at: usize) -> Result<(), SampleError> {
        let Self {
            params,
            chain,
            history,
            row,
        } = self;
        match chain[at] {
            Stage::Penalties => row.penalise(recent(history, params.repeat_last_n), params)?,
            Stage::TopK => row.top_k(usize::try_from(params.top_k).unwrap_or(usize::MAX)),
            Stage::TypicalP => row.typical(params.typical_p),
            Stage::TopP => row.top_p(params.top_p),
            Stage::MinP => row.min_p(params.min_p),
            Stage::Temperature => row.temperature(params.temp),
        }
        Ok(())
    }
}

/// The token at `position` of a distribution.
fn draw_target(p: &[Candidate], seed: u64, position: u64) -> Result<u32, SampleError> {
    let uniform = keyed_uniform(seed, position, Purpose::Target);
    draw(p, uniform).ok_or(SampleError::NoCandidate)
}

/// [`check_drawn`] with the random numbers of a position.
fn check_target(
    p: &[Candidate],
    seed: u64,
    position: u64,
    drafted: u32,
    q: &[Candidate],
) -> Result<u32, SampleError> {
    let accept = keyed_uniform(seed, position, Purpose::Accept);
    let residual = keyed_uniform(seed, position, Purpose::Residual);
    check_drawn(p, q, drafted, accept, residual).ok_or(SampleError::NoCandidate)
}

/// The rule of [`Sampler::check_drawn`], with its two random numbers in [0, 1).
fn check_drawn(
    p: &[Candidate],
    q: &[Candidate],
    drafted: u32,
    accept: f64,
    residual: f64,
) -> Option<u32> {
    if accept < acceptance(p, q, drafted) {
        return Some(drafted);
    }
    let weights = || p.iter().map(|c| (c.id, surplus(c, q)));
    if weights().all(|(_, weight)| weight <= 0.0) {
        return draw(p, residual);
    }
    draw_weighted(weights, residual)
}

/// With what probability a token drawn from `q` stays: `min(1, p / q)`.
fn acceptance(p: &[Candidate], q: &[Candidate], drafted: u32) -> f64 {
    let (p, q) = (probability(p, drafted), probability(q, drafted));
    if q > 0.0 { (p / q).min(1.0) } else { 0.0 }
}

/// What the target gives a token more than the draft does.
fn surplus(target: &Candidate, q: &[Candidate]) -> f64 {
    (f64::from(target.p) - probability(q, target.id)).max(0.0)
}

fn probability(row: &[Candidate], id: u32) -> f64 {
    let found = row.iter().find(|c| c.id == id);
    found.map_or(0.0, |c| f64::from(c.p))
}

/// The id at `uniform` (in [0, 1)) of the cumulative distribution, in the order given and in `f64`; `p` need
/// not be normalised. Never an id with `p` 0; none if all are.
pub fn draw(candidates: &[Candidate], uniform: f64) -> Option<u32> {
    draw_weighted(
        || candidates.iter().map(|c| (c.id, f64::from(c.p))),
        uniform,
    )
}

fn draw_weighted<I: Iterator<Item = (u32, f64)>>(
    weights: impl Fn() -> I,
    uniform: f64,
) -> Option<u32> {
    let total: f64 = weights().map(|(_, weight)| weight).sum();
    let mut cumulative = 0.0;
    weights()
        .find(|(_, weight)| {
            cumulative += weight;
            cumulative > uniform * total
        })
        .map(|(id, _)| id)
}

/// What a random number decides; each purpose has a sequence of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Purpose {
    /// The token of the target distribution.
    Target = 0,
    /// The draft token proposed for the position.
    Draft = 1,
    /// Whether the draft token is accepted.
    Accept = 2,
    /// The token that replaces a rejected draft.
    Residual = 3,
}

/// Uniform in [0, 1) with 53 random bits, a pure function of its arguments.
///
/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), which passes
/// TestU01's BigCrush: the seed is the key, (position, purpose, index) the counter. The mapping is part of what
/// "same seed, same text" means: do not change it.
pub fn keyed_uniform(seed: u64, position: u64, purpose: Purpose) -> f64 {
    keyed_uniforms(seed, position, purpose, 0)
}

/// As [`keyed_uniform`], for decisions that need several numbers: the one at `index`.
pub fn keyed_uniforms(seed: u64, position: u64, purpose: Purpose, index: u32) -> f64 {
    let counter = [
        position as u32,
        (position >> 32) as u32,
        purpose as u32,
        index,
    ];
    let [high, low, ..] = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    // Multipliers and key increments of the paper; the increments are the golden ratio and sqrt(3) - 1.
    const MULTIPLIER: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const INCREMENT: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    for _ in 0..10 {
        let even = MULTIPLIER[0] * u64::from(counter[0]);
        let odd = MULTIPLIER[1] * u64::from(counter[2]);
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
        key = [
            key[0].wrapping_add(INCREMENT[0]),
            key[1].wrapping_add(INCREMENT[1]),
        ];
    }
    counter
}

/// The newest `n` ids.
fn recent(history: &[u32], n: i32) -> &[u32] {
    let n = usize::try_from(n).unwrap_or(0);
    &history[history.len().saturating_sub(n)..]
}
