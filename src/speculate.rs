//! Speculation: which tokens to guess, how many, and what came of it. The guesses are checked by the model itself in
//! one pass (see [`crate::generate`]), so they decide how fast a text comes and never which text.
//!
//! Guesses come from the model's own MTP head, or from the text where it repeats itself. How many are worth their
//! time follows from what was measured here: what a pass of each width takes, what a draft takes, and how often
//! the guess at each place was right.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::sampler::{Candidate, Purpose, SamplerParams, keyed_uniform, keyed_uniforms};
use crate::session::{EvalError, Session};

/// The deepest draft.
pub const MAX_DEPTH: usize = 16;
/// Tokens that a sampled draft chooses among.
const SAMPLED_BEST: usize = 20;

/// How many tokens to guess before each pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Depth {
    /// As many as pay on this machine, none where that is fastest.
    Auto,
    /// Always this many.
    Fixed(usize),
}

/// How to speculate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SpecParams {
    /// How many tokens to guess.
    pub depth: Depth,
    /// At most this many, also from the text.
    pub draft_max: usize,
    /// Drafts shorter than this are not used.
    pub draft_min: usize,
    /// A draft ends before the first token that the head takes to be less probable than this; 0 is off.
    pub p_min: f32,
    /// Guess with the model's MTP head.
    pub mtp: bool,
    /// Guess what followed the last time that this many tokens stood in the text; 0 is off.
    pub ngram: usize,
    /// The head draws its guesses at random, by its own probabilities, where the sampler has a temperature.
    pub sampled: bool,
}

impl Default for SpecParams {
    fn default() -> Self {
        Self {
            depth: Depth::Auto,
            draft_max: 4,
            draft_min: 0,
            p_min: 0.0,
            mtp: true,
            ngram: 0,
            sampled: false,
        }
    }
}

/// Guesses for the next tokens.
#[derive(Debug, Default)]
pub struct Draft {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// For tokens that were drawn at random: what each was drawn from.
    pub drawn_from: Vec<Vec<Candidate>>,
    source: Source,
    /// While the head is put to the test: its logits for the first place, over the tokens that it chooses from.
    first_row: Vec<f32>,
}

/// Where a draft came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Source {
    #[default]
    Head,
    Text,
}

/// What speculation did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SpecStats {
    /// Passes over the trunk while decoding, with and without a draft.
    pub passes: u64,
    /// Of these, the passes that checked a draft.
    pub rounds: u64,
    /// Tokens that came out of all passes.
    pub tokens: u64,
    /// Tokens that were guessed.
    pub drafted: u64,
    /// Of these, those that the model chose too.
    pub accepted: u64,
    /// Of the accepted, those guessed from the text.
    pub accepted_from_text: u64,
    /// How often a guess stood at each place of a draft.
    pub drafted_at: Vec<u64>,
    /// How often it was right there, and all before it.
    pub accepted_at: Vec<u64>,
    /// Seconds that guessing took.
    pub draft_s: f64,
    /// Seconds that the passes took.
    pub verify_s: f64,
    /// Seconds that taking back rejected tokens took. The states of all tokens are kept, so nothing is copied.
    pub rollback_s: f64,
    /// Seconds that choosing tokens took.
    pub sampling_s: f64,
    /// Seconds that everything else took: text, output, bookkeeping.
    pub other_s: f64,
    /// Tokens a second that passes of one token would have made, from those that were measured; 0 if none was.
    pub plain_tps: f64,
    /// Why as many tokens were guessed as were, for people.
    #[serde(skip)]
    pub reason: &'static str,
}

impl SpecStats {
    /// Share of the guesses that were right.
    pub fn acceptance(&self) -> f64 {
        ratio(self.accepted, self.drafted)
    }

    /// For each place of a draft the share of guesses that were right there, with all before them.
    pub fn acceptance_at(&self) -> Vec<f64> {
        let pairs = self.accepted_at.iter().zip(&self.drafted_at);
        pairs.map(|(&a, &n)| ratio(a, n)).collect()
    }

    /// Tokens that a pass gave.
    pub fn tokens_per_pass(&self) -> f64 {
        ratio(self.tokens, self.passes)
    }

    /// Seconds of decoding in all.
    pub fn seconds(&self) -> f64 {
        self.draft_s + self.verify_s + self.rollback_s + self.sampling_s + self.other_s
    }

    /// Tokens a second against those of plain decoding; none where no plain pass was measured.
    pub fn speedup(&self) -> Option<f64> {
        let tps = self.tokens as f64 / self.seconds();
        (self.plain_tps > 0.0 && tps.is_finite()).then(|| tps / self.plain_tps)
    }
}

fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

/// What passes and drafts take on one device with one model, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// A pass over the trunk of this many tokens; 0 where it was not measured. Entry 0 is unused.
    pub pass: Vec<f64>,
    /// A draft of this many tokens; 0 where it was not measured. Entry 0 is unused.
    pub draft: Vec<f64>,
}

/// The newest measurements of one thing, of which the smallest counts: what disturbs a measurement only adds to it.
#[derive(Clone, Debug, Default)]
struct Newest {
    seconds: [f64; 8],
    n: usize,
}

impl Newest {
    fn add(&mut self, seconds: f64) {
        self.seconds[self.n % 8] = seconds;
        self.n += 1;
    }

    fn known(&self) -> &[f64] {
        match self.n {
            // The first one warms up caches and kernels.
            0 | 1 => &[],
            n if n <= 8 => &self.seconds[1..n],
            _ => &self.seconds,
        }
    }

    fn min(&self) -> Option<f64> {
        self.known().iter().copied().reduce(f64::min)
    }

    /// The one in the middle: what is told to people, whom the smallest would show a speed that is never kept up.
    fn median(&self) -> Option<f64> {
        let mut sorted = self.known().to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }
}

/// How often guesses were right lately: a mean that forgets, begun from a belief.
#[derive(Clone, Copy, Debug)]
struct Rate {
    right: f64,
    all: f64,
}

impl Rate {
    /// As a few guesses, so that the first real ones count.
    const BELIEF: Self = Self {
        right: 3.0,
        all: 4.0,
    };
    const KEPT: f64 = 0.97;

    fn add(&mut self, right: bool) {
        self.right = self.right * Self::KEPT + f64::from(u8::from(right));
        self.all = self.all * Self::KEPT + 1.0;
    }

    fn value(self) -> f64 {
        self.right / self.all
    }
}

/// Whether the head knows anything: where the tokens that the model chose stood among all that the head could have
/// guessed, in its first drafts. A damaged head ranks them at random.
#[derive(Clone, Copy, Debug, Default)]
struct HeadTest {
    /// Ranks that were looked at.
    n: usize,
    /// Ranks among the first of the list.
    n_near: usize,
}

impl HeadTest {
    /// Ranks that decide.
    const ENOUGH: usize = 8;
    /// A head at random reaches this many in 0.3 % of all tests; one that has seven of ten tokens among the first
    /// misses it in 0.1 %.
    const NEEDED: usize = 2;
    /// What counts as near: one of so many of the list.
    const NEAR: usize = 100;

    fn is_open(self) -> bool {
        self.n < Self::ENOUGH
    }

    fn failed(self) -> bool {
        !self.is_open() && self.n_near < Self::NEEDED
    }

    /// `at` is the place of the model's token in the head's `logits`.
    fn add(&mut self, logits: &[f32], at: usize) {
        let Some(&own) = logits.get(at) else {
            return;
        };
        // Of tokens that are as likely this one counts as the last: a head may say nothing at all.
        let before = logits.iter().filter(|&&l| l >= own).count();
        self.n += 1;
        self.n_near += usize::from(own.is_finite() && before * Self::NEAR <= logits.len());
    }
}

/// Drafts, and learns from what became of the drafts.
pub struct Speculator {
    params: SpecParams,
    stats: SpecStats,
    passes: [Newest; MAX_DEPTH + 2],
    drafts: [Newest; MAX_DEPTH + 1],
    /// What `qrun tune` measured, until this run has measured it too.
    tuned: Option<Costs>,
    /// For each place of the head's drafts: how often the guess is right when all before it were.
    right: [Rate; MAX_DEPTH],
    right_from_text: Rate,
    /// Passes since the last draft, and how many to let go by before the next trial.
    idle: u64,
    patience: u64,
    /// Passes that guessed since the last plain one, and how many there may be.
    busy: u64,
    plain_after: u64,
    text: TextIndex,
    depth_now: usize,
    reason: &'static str,
    test: HeadTest,
    /// For each place how often a guess is taken to be right, with all before it, whatever the model says.
    imposed: Vec<f64>,
}

/// Plain passes before guessing is tried again where it did not pay: few at first, then more and more.
const FIRST_PATIENCE: u64 = 64;
const LAST_PATIENCE: u64 = 1024;
/// Plain passes before guessing is tried at all, and the depth of the first trial.
const FIRST_PLAIN: usize = 16;
const FIRST_TRIAL: usize = 2;
/// A cost that was not measured is taken to be this share of what others let expect.
const HOPE: f64 = 0.9;
/// A pass without a draft now and then keeps the plain cost up to date: the first soon after guessing began, since it may
/// have begun because of a cost from a slower time, then fewer and fewer.
const FIRST_PLAIN_AFTER: u64 = 8;
const LAST_PLAIN_AFTER: u64 = 256;
/// Where guessing promises so much after the first of them, the others can wait.
const SURE: f64 = 1.5;
const TRIAL: &str = "trying whether guesses pay";
/// Guessing has to promise this much to be preferred.
const MARGIN: f64 = 1.02;

impl Speculator {
    /// One that has seen nothing. `tuned` are costs measured earlier on this device.
    pub fn new(params: SpecParams, tuned: Option<Costs>) -> Self {
        Self {
            params: SpecParams {
                draft_max: params.draft_max.min(MAX_DEPTH),
                ..params
            },
            stats: SpecStats::default(),
            passes: Default::default(),
            drafts: Default::default(),
            tuned,
            right: [Rate::BELIEF; MAX_DEPTH],
            right_from_text: Rate::BELIEF,
            idle: 0,
            patience: FIRST_PATIENCE,
            busy: 0,
            plain_after: FIRST_PLAIN_AFTER,
            text: TextIndex::default(),
            depth_now: 0,
            reason: "",
            test: HeadTest::default(),
            imposed: Vec::new(),
        }
    }

    /// Takes guesses to be right at these rates, whatever the model says: the speed of a model whose weights are
    /// random can be measured so. All the work is done, and the text means nothing. `rates` are those of being right
    /// at each place with all before it.
    pub fn impose(&mut self, rates: &[f64]) {
        self.imposed = rates.to_vec();
    }

    /// Whether the guess at a place of the draft is taken to be right; none where the model decides.
    pub fn imposed(&self, place: usize, position: u64) -> Option<bool> {
        let &rate = self.imposed.get(place)?;
        let before = place.checked_sub(1).map_or(1.0, |p| self.imposed[p]);
        let number = keyed_uniform(0, position, Purpose::Accept);
        Some(number * before < rate)
    }

    /// True when the head ranked the model's tokens at random in its first drafts, so that it must be damaged: it is
    /// not asked any more.
    pub fn head_is_damaged(&self) -> bool {
        self.test.failed()
    }

    /// What it did since the last [`Speculator::take_stats`].
    pub fn stats(&self) -> SpecStats {
        SpecStats {
            plain_tps: self.plain_tps(),
            reason: self.reason,
            ..self.stats.clone()
        }
    }

    /// What it did, beginning anew; what it learned stays.
    pub fn take_stats(&mut self) -> SpecStats {
        let stats = self.stats();
        self.stats = SpecStats::default();
        stats
    }

    /// How many tokens it guesses now.
    pub fn depth(&self) -> usize {
        self.depth_now
    }

    /// What passes and drafts take, as measured in this run or, where it has not, earlier.
    pub fn costs(&self) -> Costs {
        Costs {
            pass: (0..=MAX_DEPTH + 1)
                .map(|n| self.pass_cost(n).unwrap_or(0.0))
                .collect(),
            draft: (0..=MAX_DEPTH)
                .map(|n| self.draft_cost(n).unwrap_or(0.0))
                .collect(),
        }
    }

    fn plain_tps(&self) -> f64 {
        let Some(pass) = self.passes[1].median().or_else(|| self.pass_cost(1)) else {
            return 0.0;
        };
        // What choosing a token and showing it takes is the same with and without drafts.
        let other = self.stats.sampling_s + self.stats.other_s;
        1.0 / (pass + other / (self.stats.tokens.max(1) as f64))
    }

    /// Guesses what follows `token`, which is the next to be processed: at most `room` tokens.
    ///
    /// # Errors
    /// When the head cannot be computed.
    pub fn draft(
        &mut self,
        session: &mut Session,
        sampler: &SamplerParams,
        token: u32,
        room: usize,
    ) -> Result<Draft, EvalError> {
        let start = Instant::now();
        let most = room
            .min(self.params.draft_max)
            .min(session.params().n_rollback);
        let from_text = self.guess_from_text(session.tokens(), token, most);
        let use_text = !from_text.is_empty() && self.pays_from_text(from_text.len());
        let mut draft = if use_text {
            self.reason = "from the text";
            Draft {
                tokens: from_text,
                source: Source::Text,
                ..Draft::default()
            }
        } else if self.params.mtp && session.params().mtp && !self.head_is_damaged() {
            let depth = self.choose_depth().min(most);
            self.guess_with_head(session, sampler, token, depth)?
        } else {
            if self.head_is_damaged() {
                self.reason = "the MTP head is damaged";
            }
            Draft::default()
        };
        if draft.tokens.len() < self.params.draft_min {
            draft.tokens.clear();
            draft.drawn_from.clear();
        }
        self.depth_now = draft.tokens.len();
        self.stats.draft_s += start.elapsed().as_secs_f64();
        Ok(draft)
    }

    fn guess_with_head(
        &mut self,
        session: &mut Session,
        sampler: &SamplerParams,
        token: u32,
        depth: usize,
    ) -> Result<Draft, EvalError> {
        let start = Instant::now();
        let mut draft = Draft::default();
        if depth == 0 {
            return Ok(draft);
        }
        let p_min = self.params.p_min;
        if self.params.sampled && sampler.temp > 0.0 {
            let first = session.n_past() as u64 + 1;
            let noise = gumbel_noise(sampler, first, depth);
            let drawn = session.draft_with_noise(token, SAMPLED_BEST, &noise)?;
            draft.tokens = drawn.tokens;
            draft.drawn_from = drawn
                .best
                .chunks(SAMPLED_BEST)
                .map(|row| softmax(row, sampler.temp))
                .collect();
            // Looking at the drawn token's own probability would favour some tokens over others.
            let unsure = |row: &Vec<Candidate>| row.iter().all(|c| c.p < p_min);
            if let Some(end) = draft.drawn_from.iter().position(unsure) {
                draft.tokens.truncate(end);
                draft.drawn_from.truncate(end);
            }
        } else if p_min > 0.0 {
            let (tokens, confidence) = session.draft_with_confidence(token, depth)?;
            let end = confidence.iter().position(|&p| p < p_min);
            draft.tokens = tokens;
            draft.tokens.truncate(end.unwrap_or(depth));
        } else if self.test.is_open() && self.imposed.is_empty() {
            // The other ways look at the head's certainty themselves: one that knows nothing ends its drafts, or shows
            // in what is accepted.
            let (tokens, logits) = session.draft(token, depth)?;
            draft.tokens = tokens;
            draft.first_row = logits[..logits.len() / depth].to_vec();
        } else {
            draft.tokens = session.draft_tokens(token, depth)?;
        }
        self.drafts[depth].add(start.elapsed().as_secs_f64());
        Ok(draft)
    }

    /// What followed the last time that the newest tokens stood in the text.
    fn guess_from_text(&mut self, tokens: &[u32], token: u32, most: usize) -> Vec<u32> {
        if self.params.ngram == 0 || most == 0 {
            return Vec::new();
        }
        self.text.update(tokens, self.params.ngram);
        self.text.follow(tokens, token, self.params.ngram, most)
    }

    fn pays_from_text(&self, n: usize) -> bool {
        if self.params.depth != Depth::Auto {
            return true;
        }
        let right = self.right_from_text.value();
        let expected = expected_tokens(std::iter::repeat_n(right, n));
        match (self.pass_or_guess(n + 1), self.pass_cost(1)) {
            (Some(wide), Some(plain)) => expected * plain > wide * MARGIN,
            _ => true,
        }
    }

    /// The depth that promises most tokens a second.
    fn choose_depth(&mut self) -> usize {
        let most = self.params.draft_max;
        self.reason = match self.stats.rounds {
            0 => "plain decoding is faster so far",
            _ => "plain decoding is faster now",
        };
        match self.params.depth {
            Depth::Fixed(depth) => {
                self.reason = "as set";
                return depth.min(most);
            }
            Depth::Auto if most == 0 => return 0,
            Depth::Auto => {}
        }
        let Some(plain) = self.pass_cost(1) else {
            return 0;
        };
        if self.busy >= self.plain_after {
            self.reason = "measuring a plain pass";
            self.plain_after = (2 * self.plain_after).min(LAST_PLAIN_AFTER);
            return 0;
        }
        if self.pass_or_guess(2).is_none() || self.draft_or_guess(1).is_none() {
            // Nothing is known of wider passes: one depth says enough about the others. Its first round only warms
            // up, so two are made, when the text is long enough to be worth it.
            if self.passes[1].n < FIRST_PLAIN {
                return 0;
            }
            self.reason = TRIAL;
            return FIRST_TRIAL.min(most);
        }
        let (mut best, mut best_rate, mut best_trial) = (0, MARGIN / plain, (1, 0.0));
        let mut can_pay = false;
        for depth in 1..=most {
            let (Some(pass), Some(draft)) =
                (self.pass_or_guess(depth + 1), self.draft_or_guess(depth))
            else {
                continue;
            };
            let right = self.right[..depth].iter().map(|r| r.value());
            let rate = expected_tokens(right) / (pass + draft);
            can_pay |= (depth + 1) as f64 * plain > pass + draft;
            if rate > best_rate {
                (best, best_rate) = (depth, rate);
            }
            if rate > best_trial.1 {
                best_trial = (depth, rate);
            }
        }
        if best == 0 {
            self.plain_after = FIRST_PLAIN_AFTER;
        } else if self.plain_after > FIRST_PLAIN_AFTER && best_rate * plain > SURE {
            self.plain_after = LAST_PLAIN_AFTER;
        }
        if best > 0 {
            self.patience = FIRST_PATIENCE;
            self.reason = "fastest by what was measured";
        } else if !can_pay && self.patience < LAST_PATIENCE {
            // Not even if every guess were right: no text will change that, only other measurements.
            self.patience = LAST_PATIENCE;
        } else if self.idle >= self.patience {
            // The text may have become easier to guess: see whether it did.
            self.patience = (2 * self.patience).min(LAST_PATIENCE);
            self.reason = TRIAL;
            return best_trial.0;
        }
        best
    }

    fn pass_cost(&self, width: usize) -> Option<f64> {
        let tuned = || self.tuned.as_ref()?.pass.get(width).copied();
        let measured = self.passes.get(width).and_then(Newest::min);
        measured.or_else(|| tuned().filter(|&s| s > 0.0))
    }

    fn draft_cost(&self, depth: usize) -> Option<f64> {
        let tuned = || self.tuned.as_ref()?.draft.get(depth).copied();
        let measured = self.drafts.get(depth).and_then(Newest::min);
        measured.or_else(|| tuned().filter(|&s| s > 0.0))
    }

    /// What a pass takes; between and beyond the widths that were measured, along the line through the plain one and
    /// the widest. A little less than the line says: only what is tried gets measured.
    fn pass_or_guess(&self, width: usize) -> Option<f64> {
        self.pass_cost(width).or_else(|| {
            let plain = self.pass_cost(1)?;
            let (widest, cost) = (2..=MAX_DEPTH + 1)
                .rev()
                .find_map(|n| Some((n, self.pass_cost(n)?)))?;
            let slope = (cost - plain) / (widest - 1) as f64;
            Some(plain + HOPE * slope * (width - 1) as f64)
        })
    }

    fn draft_or_guess(&self, depth: usize) -> Option<f64> {
        self.draft_cost(depth).or_else(|| {
            let step = (1..=MAX_DEPTH)
                .rev()
                .find_map(|n| Some(self.draft_cost(n)? / n as f64))?;
            Some(HOPE * step * depth as f64)
        })
    }

    /// Learns what a pass over one token and its draft took, and how much of the draft was right: `checked` of its
    /// tokens were looked at, and `chosen` is what the model chose at the first place.
    pub fn learn(
        &mut self,
        session: &Session,
        draft: &Draft,
        chosen: Option<u32>,
        (checked, accepted): (usize, usize),
        times: &RoundTimes,
    ) {
        if let Some(chosen) = chosen {
            let place = match session.params().draft_vocab {
                Some(vocab) => vocab.place(chosen),
                None => Some(chosen as usize),
            };
            if let Some(place) = place {
                self.test.add(&draft.first_row, place);
            }
        }
        self.learn_from(draft, (checked, accepted), times);
    }

    fn learn_from(
        &mut self,
        draft: &Draft,
        (checked, accepted): (usize, usize),
        times: &RoundTimes,
    ) {
        let drafted = draft.tokens.len();
        let seconds = times.verify.as_secs_f64();
        if let Some(pass) = self.passes.get_mut(drafted + 1) {
            pass.add(seconds);
        }
        let stats = &mut self.stats;
        stats.passes += 1;
        stats.tokens += times.n_tokens as u64;
        stats.verify_s += seconds;
        stats.rollback_s += times.rollback.as_secs_f64();
        stats.sampling_s += times.sampling.as_secs_f64();
        stats.other_s += times.other.as_secs_f64();
        if drafted == 0 {
            self.idle += 1;
            self.busy = 0;
            return;
        }
        self.idle = 0;
        self.busy += 1;
        stats.rounds += 1;
        stats.drafted += drafted as u64;
        stats.accepted += accepted as u64;
        if stats.drafted_at.len() < drafted {
            stats.drafted_at.resize(drafted, 0);
            stats.accepted_at.resize(drafted, 0);
        }
        for place in 0..drafted {
            stats.drafted_at[place] += 1;
            stats.accepted_at[place] += u64::from(place < accepted);
        }
        // A guess after a wrong one was not put to the test.
        for place in 0..checked {
            let right = place < accepted;
            match draft.source {
                Source::Head => self.right[place].add(right),
                Source::Text => self.right_from_text.add(right),
            }
        }
        if draft.source == Source::Text {
            stats.accepted_from_text += accepted as u64;
        }
    }
}

/// What one pass took, and gave.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundTimes {
    /// The pass itself.
    pub verify: Duration,
    /// Taking back what was rejected.
    pub rollback: Duration,
    /// Choosing tokens.
    pub sampling: Duration,
    /// Everything else.
    pub other: Duration,
    /// Tokens that came out.
    pub n_tokens: usize,
}

/// One token from the model, and those guesses that are right with all before them.
fn expected_tokens(right: impl Iterator<Item = f64>) -> f64 {
    let mut all_before = 1.0;
    1.0 + right
        .map(|r| {
            all_before *= r;
            all_before
        })
        .sum::<f64>()
}

/// Noise that, added to logits, makes the largest sum fall on each token with the probability that the logits at the
/// sampler's temperature give it (Gumbel 1954): `temp * -ln(-ln(u))`. A row for each position from `first` on.
fn gumbel_noise(sampler: &SamplerParams, first: u64, n_rows: usize) -> Vec<f32> {
    let mut noise = Vec::with_capacity(n_rows * SAMPLED_BEST);
    for position in first..first + n_rows as u64 {
        for i in 0..SAMPLED_BEST as u32 {
            let u = keyed_uniforms(sampler.seed, position, Purpose::Draft, i);
            // Neither 0 nor 1 has a finite place.
            let u = u.clamp(f64::MIN_POSITIVE, 1.0 - f64::EPSILON);
            noise.push((-(-u.ln()).ln() * f64::from(sampler.temp)) as f32);
        }
    }
    noise
}

/// Softmax of logits at a temperature, in `f32` as the draft was drawn.
fn softmax(row: &[(u32, f32)], temp: f32) -> Vec<Candidate> {
    let max = row.iter().map(|r| r.1).fold(f32::NEG_INFINITY, f32::max);
    let mut candidates: Vec<Candidate> = row
        .iter()
        .map(|&(id, logit)| Candidate {
            id,
            logit,
            p: ((logit - max) / temp).exp(),
        })
        .collect();
    let sum: f32 = candidates.iter().map(|c| c.p).sum();
    candidates.iter_mut().for_each(|c| c.p /= sum);
    candidates
}

/// Where each run of tokens ended last in the text.
#[derive(Default)]
struct TextIndex {
    ends: HashMap<Vec<u32>, usize>,
    /// Tokens of the text that were looked at, to notice when another text takes its place.
    seen: Vec<u32>,
}

impl TextIndex {
    fn update(&mut self, tokens: &[u32], n: usize) {
        let same = self.seen.iter().zip(tokens).take_while(|(a, b)| a == b);
        if same.count() < self.seen.len() {
            self.ends.clear();
            self.seen.clear();
        }
        // The newest run is left out: it is the one that is looked for.
        for end in (self.seen.len() + 1).max(n)..=tokens.len() {
            self.ends.insert(tokens[end - n..end].to_vec(), end);
        }
        self.seen.extend_from_slice(&tokens[self.seen.len()..]);
    }

    /// What followed the last `n` tokens of `tokens` and `token`, the last time they stood there.
    fn follow(&self, tokens: &[u32], token: u32, n: usize, most: usize) -> Vec<u32> {
        let Some(start) = (tokens.len() + 1).checked_sub(n) else {
            return Vec::new();
        };
        let mut run = tokens[start..].to_vec();
        run.push(token);
        match self.ends.get(&run) {
            Some(&end) => tokens[end..].iter().take(most).copied().collect(),
            None => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which passes and drafts take so long, at a speed that may change with time, and guesses are right
    /// so often.
    struct Machine {
        speculator: Speculator,
        pass: [f64; 6],
        draft: f64,
        right: f64,
        passes: u64,
        rounds: u64,
        time: f64,
        tokens: f64,
    }

    impl Machine {
        fn new(pass: [f64; 6], draft: f64, right: f64) -> Self {
            Self {
                speculator: Speculator::new(SpecParams::default(), None),
                pass,
                draft,
                right,
                passes: 0,
                rounds: 0,
                time: 0.0,
                tokens: 0.0,
            }
        }

        /// One pass where everything takes `slow` times as long.
        fn step(&mut self, slow: f64) {
            let depth = self.speculator.choose_depth();
            let draft_s = slow * self.draft * depth as f64;
            let pass_s = slow * self.pass[depth + 1];
            if depth > 0 {
                self.speculator.drafts[depth].add(draft_s);
                self.rounds += 1;
            }
            let draft = Draft {
                tokens: vec![0; depth],
                ..Draft::default()
            };
            let chance = |at: usize| keyed_uniform(1, self.passes * 8 + at as u64, Purpose::Accept);
            let accepted = (0..depth).take_while(|&at| chance(at) < self.right).count();
            let times = RoundTimes {
                verify: Duration::from_secs_f64(pass_s),
                n_tokens: accepted + 1,
                ..RoundTimes::default()
            };
            let checked = depth.min(accepted + 1);
            self.speculator
                .learn_from(&draft, (checked, accepted), &times);
            self.passes += 1;
            self.time += draft_s + pass_s;
            self.tokens += (accepted + 1) as f64;
        }
    }

    /// Two cores: a pass of two tokens takes more than twice as long as one of one.
    const NO_GAIN: [f64; 6] = [0.0, 1.0, 2.3, 3.2, 4.1, 5.0];
    /// A GPU: wider passes take little longer.
    const GAIN: [f64; 6] = [0.0, 1.0, 1.1, 1.25, 1.5, 1.7];

    #[test]
    fn where_guessing_cannot_pay_it_costs_next_to_nothing() {
        let mut machine = Machine::new(NO_GAIN, 0.2, 0.95);
        for _ in 0..400 {
            machine.step(1.0);
        }
        let plain = machine.tokens * NO_GAIN[1];
        assert!(plain / machine.time > 0.98, "{}", plain / machine.time);
    }

    #[test]
    fn where_guessing_pays_nearly_all_passes_guess() {
        let mut machine = Machine::new(GAIN, 0.1, 0.8);
        for _ in 0..400 {
            machine.step(1.0);
        }
        assert!(machine.rounds > 370, "{}", machine.rounds);
        let plain = machine.tokens * GAIN[1];
        assert!(plain / machine.time > 1.5, "{}", plain / machine.time);
    }

    /// Plain passes were measured in a slow time, and guessing began in a fast one: only plain passes of the fast time
    /// can show that it does not pay.
    #[test]
    fn a_slow_time_at_the_start_misleads_for_a_few_passes_only() {
        let mut machine = Machine::new(NO_GAIN, 0.2, 0.95);
        while machine.speculator.stats.rounds == 0 {
            machine.step(3.0);
        }
        machine.rounds = 0;
        (machine.time, machine.tokens) = (0.0, 0.0);
        for _ in 0..240 {
            machine.step(1.0);
        }
        assert!((1..=24).contains(&machine.rounds), "{}", machine.rounds);
    }

    /// Where nothing is guessed the speed is that of plain decoding, on a machine that is disturbed, too.
    #[test]
    fn plain_passes_are_as_fast_as_plain_decoding() {
        let mut machine = Machine::new(NO_GAIN, 0.2, 0.95);
        for pass in 0..400u64 {
            machine.step(1.0 + keyed_uniform(2, pass, Purpose::Draft));
        }
        let stats = machine.speculator.stats();
        let speedup = machine.tokens / machine.time / stats.plain_tps;
        assert!((0.85..1.15).contains(&speedup), "{speedup}");
    }

    /// The same the other way round: what pays is not given up for long.
    #[test]
    fn a_slow_time_does_not_end_what_pays() {
        let mut machine = Machine::new(GAIN, 0.1, 0.8);
        for pass in 0..600 {
            machine.step(if (200..300).contains(&pass) { 2.0 } else { 1.0 });
        }
        assert!(machine.rounds > 500, "{}", machine.rounds);
    }
}
