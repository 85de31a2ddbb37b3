//! The tests: what is timed, and in which state.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use qrun::generate::{FinishReason, Generator, Request};
use qrun::sampler::{Sampler, SamplerParams};
use qrun::session::{CancelToken, EvalError, Outputs, Session, Snapshot};
use qrun::speculate::{SpecStats, Speculator};
use qrun::tokenizer::Tokenizer;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A prompt of so many tokens, up to the last one's logits.
    Prompt(usize),
    /// The same with the draft head's keys and values written, too.
    PromptWithHead(usize),
    /// So many tokens, one pass each, chosen by nobody: llama-bench's test.
    Decode(usize),
    /// A prompt, then tokens.
    Both(usize, usize),
    /// From the prompt's tokens to the first token of an answer.
    FirstToken(usize),
    /// So many tokens of greedy text with so many guesses before each pass, or as many as pay.
    Generate(usize, Guesses),
}

/// The value of `--spec` of one test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guesses {
    /// As many as pay.
    Auto,
    /// Always so many.
    Fixed(usize),
}

impl std::fmt::Display for Guesses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Fixed(n) => write!(f, "{n}"),
        }
    }
}

impl Work {
    /// The test's name; llama-bench's where it has such a test.
    pub fn name(&self) -> String {
        match self {
            Self::Prompt(n) => format!("pp{n}"),
            Self::PromptWithHead(n) => format!("pp{n} head"),
            Self::Decode(n) => format!("tg{n}"),
            Self::Both(p, n) => format!("pp{p}+tg{n}"),
            Self::FirstToken(n) => format!("ttft{n}"),
            Self::Generate(n, guesses) => format!("tg{n} spec {guesses}"),
        }
    }

    /// Prompt tokens and generated tokens that are timed.
    pub fn counts(&self) -> (usize, usize) {
        match *self {
            Self::Prompt(n) | Self::PromptWithHead(n) | Self::FirstToken(n) => (n, 0),
            Self::Decode(n) | Self::Generate(n, _) => (0, n),
            Self::Both(p, n) => (p, n),
        }
    }

    /// Tokens that it adds to the context at most, the text before a [`Work::Generate`] and its drafts included.
    pub fn reach(&self) -> usize {
        let (p, n) = self.counts();
        match self {
            Self::Generate(..) => p + n + TEXT_ROOM,
            _ => p + n + 1,
        }
    }
}

/// Room for the text that generated tokens go on from, and for drafts.
const TEXT_ROOM: usize = 128;

/// A session to measure in, with the tokens before each test.
pub struct Place {
    session: Session,
    filled: Option<Snapshot>,
    random: u64,
}

/// What one repetition took, and what speculation did in it.
pub struct Sample {
    /// Seconds.
    pub seconds: f64,
    /// Of a [`Work::Generate`].
    pub stats: Option<SpecStats>,
}

impl Place {
    /// A place in `session`, with nothing before the tests yet.
    pub fn new(session: Session) -> Self {
        Self {
            session,
            filled: None,
            random: 1,
        }
    }

    /// The session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    fn tokens(&mut self, n: usize) -> Vec<u32> {
        let n_vocab = self.session.engine().config().n_vocab as u64;
        (0..n)
            .map(|_| {
                // A linear congruential generator: any tokens do, the same in every run.
                self.random = self
                    .random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                ((self.random >> 33) % n_vocab) as u32
            })
            .collect()
    }

    fn process(&mut self, tokens: &[u32], cancel: &CancelToken) -> Result<(), EvalError> {
        let n_batch = self.session.params().n_batch;
        let n_chunks = tokens.len().div_ceil(n_batch);
        for (i, chunk) in tokens.chunks(n_batch).enumerate() {
            let outputs = if i + 1 == n_chunks {
                Outputs::Last
            } else {
                Outputs::None
            };
            self.session.eval(chunk, outputs, cancel)?;
        }
        Ok(())
    }

    /// Puts `depth` tokens into the context before all tests that follow.
    ///
    /// # Errors
    /// When they cannot be computed.
    pub fn fill(&mut self, depth: usize, cancel: &CancelToken) -> Result<()> {
        self.session.clear()?;
        self.filled = None;
        if depth > 0 {
            let tokens = self.tokens(depth);
            self.process(&tokens, cancel)?;
            self.filled = Some(self.session.snapshot()?);
        }
        Ok(())
    }

    fn rewind(&mut self) -> Result<()> {
        match &self.filled {
            Some(snapshot) => Ok(self.session.restore(snapshot)?),
            None => self.session.clear(),
        }
    }

    /// Goes on by `n` tokens, one pass each, from the beginning again where the context is full.
    ///
    /// # Errors
    /// When the model cannot be computed, or the user cancels.
    pub fn decode_on(&mut self, n: usize, cancel: &CancelToken) -> Result<()> {
        if self.session.n_past() + n > self.session.params().n_ctx {
            self.session.clear()?;
        }
        for token in self.tokens(n) {
            self.session.eval(&[token], Outputs::Last, cancel)?;
        }
        Ok(())
    }

    /// Does the work once, from the same state each time. `text` are the tokens that generated text goes on from.
    ///
    /// # Errors
    /// When the model cannot be computed, or the user cancels.
    pub fn run(
        &mut self,
        work: Work,
        text: &[u32],
        tokenizer: &Tokenizer,
        speculator: Option<&mut Speculator>,
        cancel: &CancelToken,
    ) -> Result<Sample> {
        self.rewind()?;
        let sample = |time: Duration, stats| Sample {
            seconds: time.as_secs_f64(),
            stats,
        };
        Ok(match work {
            Work::Prompt(n) | Work::PromptWithHead(n) => {
                let tokens = self.tokens(n);
                let start = Instant::now();
                self.process(&tokens, cancel)?;
                sample(start.elapsed(), None)
            }
            Work::Decode(n) => {
                let tokens = self.tokens(n);
                let start = Instant::now();
                for &token in &tokens {
                    self.session.eval(&[token], Outputs::Last, cancel)?;
                }
                sample(start.elapsed(), None)
            }
            Work::Both(p, n) => {
                let (prompt, tokens) = (self.tokens(p), self.tokens(n));
                let start = Instant::now();
                self.process(&prompt, cancel)?;
                for &token in &tokens {
                    self.session.eval(&[token], Outputs::Last, cancel)?;
                }
                sample(start.elapsed(), None)
            }
            Work::FirstToken(n) => {
                let prompt = self.tokens(n);
                let start = Instant::now();
                self.generate(prompt, 1, tokenizer, speculator, cancel)?;
                sample(start.elapsed(), None)
            }
            Work::Generate(n, _) => {
                // The first token belongs to the prompt.
                let (time, stats) =
                    self.generate(text.to_vec(), n + 1, tokenizer, speculator, cancel)?;
                sample(time, stats)
            }
        })
    }

    fn generate(
        &mut self,
        prompt: Vec<u32>,
        n: usize,
        tokenizer: &Tokenizer,
        speculator: Option<&mut Speculator>,
        cancel: &CancelToken,
    ) -> Result<(Duration, Option<SpecStats>)> {
        let request = Request {
            prompt,
            n_predict: Some(n),
            ignore_eos: true,
            ..Request::default()
        };
        let mut sampler = Sampler::new(SamplerParams::greedy())?;
        let answer = Generator {
            session: &mut self.session,
            tokenizer,
            sampler: &mut sampler,
            constraint: None,
            speculator,
            watch: None,
        }
        .answer(&request, cancel, &mut |_| Ok(()))?;
        if answer.finish_reason == FinishReason::Cancelled {
            return Err(EvalError::Cancelled.into());
        }
        ensure!(
            answer.tokens.len() == n,
            "the context is too small for this test; give a larger -c"
        );
        Ok((answer.decode_time, answer.speculation))
    }
}

/// What the processor's own counters say it used, where the system lets them be read.
pub struct Energy {
    counters: Vec<(std::path::PathBuf, u64)>,
}

impl Energy {
    /// The counters as they are now; none on systems without them, or that keep them from users.
    pub fn start() -> Option<Self> {
        // Linux' powercap interface: one counter in microjoules for each processor package.
        let entries = std::fs::read_dir("/sys/class/powercap").ok()?;
        let counters: Vec<_> = entries
            .flatten()
            .filter(|entry| {
                let name = entry.file_name();
                let name = name.to_string_lossy();
                name.starts_with("intel-rapl:") && name.matches(':').count() == 1
            })
            .filter_map(|entry| {
                let path = entry.path();
                let now = read_number(&path.join("energy_uj"))?;
                Some((path, now))
            })
            .collect();
        (!counters.is_empty()).then_some(Self { counters })
    }

    /// Joules since the start.
    pub fn joules(&self) -> Option<f64> {
        let mut all = 0;
        for (path, before) in &self.counters {
            let now = read_number(&path.join("energy_uj"))?;
            all += match now.checked_sub(*before) {
                Some(used) => used,
                // It began again from zero.
                None => now + read_number(&path.join("max_energy_range_uj"))? - before,
            };
        }
        Some(all as f64 / 1e6)
    }
}

fn read_number(path: &std::path::Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
