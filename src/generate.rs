//! The main loop: prompt in, tokens out, text taken apart as it comes.
//!
//! Each pass over the model takes the newest token and, after it, guesses of what follows. Every guess is compared
//! with the token that the model chooses at its place, from the same logits, with the same random number as
//! without guesses; from the first wrong one on they are taken back. So the text does not depend on the guesses.

use std::time::{Duration, Instant};

use crate::chat::StopFilter;
use crate::grammar::Constraint;
use crate::sampler::{Candidate, SampleError, Sampler};
use crate::session::{CancelToken, EvalError, Outputs, Session};
use crate::speculate::{Draft, RoundTimes, SpecStats, Speculator};
use crate::tokenizer::{DecodeStream, Tokenizer};

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Token ids of the prompt, which go on from what the session holds.
    pub prompt: Vec<u32>,
    /// At most this many tokens; without it, to the end of the context.
    pub n_predict: Option<usize>,
    /// Texts that end the answer, which then ends before them.
    pub stop: Vec<String>,
    /// Go on past the token that ends an answer.
    pub ignore_eos: bool,
    /// Take thinking apart: the answer begins inside a thinking block (true), or outside of one (false). Without
    /// it, thinking tags are text like any other.
    pub thinking: Option<bool>,
    /// Close the thinking block after this many tokens.
    pub reasoning_budget: Option<usize>,
    /// Set while the answer is made, it closes the thinking block at the next token.
    pub end_thinking: CancelToken,
}

/// Why an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it, or a stop string did.
    Stop,
    /// The token limit or the context's end.
    Length,
    /// The user.
    Cancelled,
}

/// A piece of the answer as it comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Piece<'a> {
    /// Thinking.
    Reasoning(&'a str),
    /// The answer itself.
    Text(&'a str),
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The answer itself.
    pub text: String,
    /// The thinking before it.
    pub reasoning: String,
    /// Token ids, thinking and the ending token included.
    pub tokens: Vec<u32>,
    /// How many of them were thinking.
    pub n_reasoning: usize,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// What processing the prompt took.
    pub prompt_time: Duration,
    /// What the tokens after the first took.
    pub decode_time: Duration,
    /// What speculation did; none where there was none.
    pub speculation: Option<SpecStats>,
}

impl Answer {
    /// Prompt tokens per second.
    pub fn prompt_tps(&self) -> f64 {
        rate(self.n_prompt, self.prompt_time)
    }

    /// Tokens per second after the first.
    pub fn decode_tps(&self) -> f64 {
        rate(self.tokens.len().saturating_sub(1), self.decode_time)
    }
}

fn rate(n: usize, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 {
        n as f64 / seconds
    } else {
        0.0
    }
}

/// Why an answer could not be generated.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The model could not be computed.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// No token could be chosen.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The constraint on the answer cannot be kept.
    #[error("keeping the answer to its grammar")]
    Constraint(#[source] anyhow::Error),
    /// There is nothing to go on from.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The session could not be brought back to before a rejected draft.
    #[error(transparent)]
    Session(#[from] anyhow::Error),
    /// The receiver of the text failed.
    #[error("writing the answer")]
    Sink(#[source] std::io::Error),
}

/// Everything that an answer is made with.
pub struct Generator<'a> {
    /// The sequence that it goes on from.
    pub session: &'a mut Session,
    /// The vocabulary.
    pub tokenizer: &'a Tokenizer,
    /// How tokens are chosen.
    pub sampler: &'a mut Sampler,
    /// Restricts the answer, not the thinking before it.
    pub constraint: Option<&'a mut Constraint>,
    /// Guesses tokens, so that several can be processed at once.
    pub speculator: Option<&'a mut Speculator>,
    /// Told of every pass, for live figures.
    pub watch: Option<&'a mut Watch<'a>>,
}

/// What who watches is told.
pub enum Seen<'a> {
    /// A chunk of the prompt was processed, or all of it.
    Prompt {
        /// Tokens processed.
        done: usize,
        /// Tokens of the request's prompt.
        total: usize,
        /// What that took.
        time: Duration,
    },
    /// A pass gave tokens.
    Pass {
        /// What guessed, if anything did.
        speculator: Option<&'a Speculator>,
        /// The sequence.
        session: &'a Session,
        /// Tokens of the answer so far.
        n_tokens: usize,
    },
}

/// Who watches.
pub type Watch<'a> = dyn FnMut(Seen<'_>) + 'a;

impl Generator<'_> {
    /// Generates an answer, handing each piece of text to `sink` as it comes.
    ///
    /// A cancelled token ends the answer with what there is; it is an error only while the prompt is processed. The
    /// session then holds the prompt and the answer, without its last token.
    ///
    /// # Errors
    /// See [`GenerateError`].
    pub fn answer(
        &mut self,
        request: &Request,
        cancel: &CancelToken,
        sink: &mut Sink<'_>,
    ) -> Result<Answer, GenerateError> {
        if request.prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let mut text = TextSplitter::new(self.tokenizer, request);
        let n_max = request.n_predict.unwrap_or(usize::MAX);
        let mut tokens: Vec<u32> = Vec::new();
        // Tokens to process next: the prompt, then the one chosen, or those that close the thinking block.
        let mut pending = request.prompt.clone();
        let mut prompt_time = None;
        let mut start = Instant::now();
        self.read_prompt(&mut pending, cancel)?;
        let finish_reason = loop {
            let round_start = Instant::now();
            let draft = match (&pending[..], prompt_time) {
                (&[token], Some(_)) => self.draft(token, n_max - tokens.len())?,
                _ => Draft::default(),
            };
            let first_row = pending.len() - 1;
            let outputs = if tokens.len() < n_max {
                Outputs::From(first_row)
            } else {
                Outputs::None
            };
            let n_known = pending.len();
            pending.extend_from_slice(&draft.tokens);
            let pass_start = Instant::now();
            let n_best = match outputs {
                Outputs::None => None,
                _ => self.n_best(pending.len(), draft.tokens.len() + 1),
            };
            let evaluated = match n_best {
                Some(n) => {
                    let evaluated = self.session.eval_best(&pending, first_row, n, cancel);
                    evaluated.map(|_| ())
                }
                None => self.session.eval(&pending, outputs, cancel).map(|_| ()),
            };
            let verify = pass_start.elapsed();
            match evaluated {
                Ok(()) => {}
                Err(EvalError::ContextFull { .. }) if !tokens.is_empty() => {
                    break FinishReason::Length;
                }
                Err(EvalError::Cancelled) if !tokens.is_empty() => break FinishReason::Cancelled,
                Err(error) => return Err(error.into()),
            }
            pending.truncate(n_known);
            pending.iter().for_each(|&token| self.sampler.accept(token));
            let decoding = prompt_time.is_some();
            if !decoding {
                let time = start.elapsed();
                prompt_time = Some(time);
                start = Instant::now();
                self.see_prompt(request.prompt.len(), request.prompt.len(), time);
            }
            if tokens.len() >= n_max {
                break FinishReason::Length;
            }
            if cancel.is_cancelled() {
                self.session.reject(draft.tokens.len())?;
                break FinishReason::Cancelled;
            }

            let n_before = tokens.len();
            let mut round = Round {
                draft: &draft,
                kept: 0,
                right: 0,
                checked: 0,
                sampling: Duration::ZERO,
            };
            let ended = self.choose(
                request,
                &mut round,
                n_max,
                &mut tokens,
                &mut pending,
                &mut text,
                sink,
            )?;
            let reject_start = Instant::now();
            self.session.reject(draft.tokens.len() - round.kept)?;
            // Passes over more than one known token say nothing about decoding.
            let counts = decoding && n_known == 1;
            if let Some(speculator) = self.speculator.as_deref_mut().filter(|_| counts) {
                let rollback = reject_start.elapsed();
                let spent = verify + rollback + round.sampling;
                let drafting = pass_start - round_start;
                speculator.learn(
                    self.session,
                    &draft,
                    tokens.get(n_before).copied(),
                    (round.checked, round.right),
                    &RoundTimes {
                        verify,
                        rollback,
                        sampling: round.sampling,
                        other: round_start.elapsed().saturating_sub(spent + drafting),
                        n_tokens: tokens.len() - n_before,
                    },
                );
            }
            if let Some(watch) = self.watch.as_deref_mut() {
                watch(Seen::Pass {
                    speculator: self.speculator.as_deref(),
                    session: self.session,
                    n_tokens: tokens.len(),
                });
            }
            if let Some(reason) = ended {
                break reason;
            }
        };
        let decode_time = start.elapsed();
        let n_reasoning = text.n_reasoning;
        let (text, reasoning) = text.finish(sink)?;
        Ok(Answer {
            text,
            reasoning,
            tokens,
            n_reasoning,
            finish_reason,
            n_prompt: request.prompt.len(),
            prompt_time: prompt_time.unwrap_or_default(),
            decode_time,
            speculation: self.speculator.as_deref_mut().map(Speculator::take_stats),
        })
    }

    /// Where somebody watches, processes a long prompt up to its last chunk, in the chunks that the session would
    /// make, and tells how far it is. What is left stays pending.
    fn read_prompt(
        &mut self,
        pending: &mut Vec<u32>,
        cancel: &CancelToken,
    ) -> Result<(), EvalError> {
        let (total, chunk) = (pending.len(), self.session.params().n_batch);
        if self.watch.is_none() || total <= chunk {
            return Ok(());
        }
        let start = Instant::now();
        // All or nothing, as in one call.
        self.session.make_room(total)?;
        while pending.len() > chunk {
            let rest = pending.split_off(chunk);
            self.session.eval(pending, Outputs::None, cancel)?;
            pending.iter().for_each(|&token| self.sampler.accept(token));
            *pending = rest;
            self.see_prompt(total - pending.len(), total, start.elapsed());
        }
        Ok(())
    }

    /// How many of the best tokens of each row are enough, where the device finds them faster: of a pass over so many
    /// tokens with so many rows.
    fn n_best(&self, n_tokens: usize, n_rows: usize) -> Option<usize> {
        let n = match self.sampler.is_greedy() {
            true => 1,
            false => self.sampler.n_deciding()?,
        };
        // Whole rows, if they are needed after all, are those of the last chunk.
        let in_one = n_rows == 1 || n_tokens <= self.session.params().n_batch;
        (self.constraint.is_none() && in_one && self.session.finds_best(n)).then_some(n)
    }

    fn see_prompt(&mut self, done: usize, total: usize, time: Duration) {
        if let Some(watch) = self.watch.as_deref_mut() {
            watch(Seen::Prompt { done, total, time });
        }
    }

    /// Guesses what follows `token`, when at most `n_left` tokens may still come after it.
    fn draft(&mut self, token: u32, n_left: usize) -> Result<Draft, GenerateError> {
        let Some(speculator) = self.speculator.as_deref_mut() else {
            return Ok(Draft::default());
        };
        // The model's own choice after the last guess is a token, too.
        let in_context = self.session.params().n_ctx - self.session.n_past();
        let room = in_context.min(n_left).saturating_sub(1);
        Ok(speculator.draft(self.session, self.sampler.params(), token, room)?)
    }

    /// Chooses tokens from the rows of the last pass, as long as the guesses are right. The last one, with what has
    /// to follow it, is pending then. Returns why the answer ended, if it did.
    #[expect(clippy::too_many_arguments, reason = "the state of one answer")]
    fn choose(
        &mut self,
        request: &Request,
        round: &mut Round<'_>,
        n_max: usize,
        tokens: &mut Vec<u32>,
        pending: &mut Vec<u32>,
        text: &mut TextSplitter<'_>,
        sink: &mut Sink<'_>,
    ) -> Result<Option<FinishReason>, GenerateError> {
        let n_vocab = self.session.engine().config().n_vocab as usize;
        let first = self.session.n_past() - round.draft.tokens.len();
        let mut masked: Vec<f32> = Vec::new();
        let n_rows = round.draft.tokens.len() + 1;
        for row in 0..n_rows {
            let start = Instant::now();
            let position = (first + row) as u64;
            let constraint = self.constraint.as_deref_mut();
            let best = self.session.best();
            let best = &best[row * best.len() / n_rows..(row + 1) * best.len() / n_rows];
            let token = match constraint.filter(|_| !text.is_thinking()) {
                None if best.len() == 1 => best[0].0,
                None => {
                    let guess = Drafted::at(round.draft, row);
                    match choose_from_best(self.sampler, best, n_vocab, position, guess)? {
                        Some(token) => token,
                        None => {
                            if !best.is_empty() {
                                self.session.read_rows()?;
                            }
                            let logits = row_of(self.session.logits(), row, n_vocab);
                            choose_token(self.sampler, logits, position, guess)?
                        }
                    }
                }
                Some(constraint) => {
                    masked.clear();
                    masked.extend_from_slice(row_of(self.session.logits(), row, n_vocab));
                    constraint
                        .mask(&mut masked)
                        .map_err(GenerateError::Constraint)?;
                    let guess = Drafted::at(round.draft, row);
                    let token = choose_token(self.sampler, &masked, position, guess)?;
                    constraint
                        .accept(token)
                        .map_err(GenerateError::Constraint)?;
                    token
                }
            };
            let guess = round.draft.tokens.get(row).copied();
            let speculator = self.speculator.as_deref();
            let imposed = speculator.and_then(|s| s.imposed(row, position));
            let token = match (imposed, guess) {
                (Some(true), Some(guess)) => guess,
                (Some(false), Some(guess)) if guess == token => (guess + 1) % n_vocab as u32,
                _ => token,
            };
            round.sampling += start.elapsed();
            round.checked += usize::from(guess.is_some());
            let right = guess == Some(token);
            round.right += usize::from(right);
            tokens.push(token);
            if self.tokenizer.is_eog(token) && !request.ignore_eos {
                return Ok(Some(FinishReason::Stop));
            }
            if text.push(token, sink)? {
                return Ok(Some(FinishReason::Stop));
            }
            pending.clear();
            pending.push(token);
            if text.is_over_budget(request) {
                for &token in &text.close_thinking {
                    tokens.push(token);
                    pending.push(token);
                }
                for &token in &pending[1..] {
                    text.push(token, sink)?;
                }
            }
            // The last token stays unprocessed: nobody asks what comes after it.
            if tokens.len() >= n_max {
                return Ok(Some(FinishReason::Length));
            }
            if !right || pending.len() > 1 {
                break;
            }
            // It is processed already, so the next row is the one after it.
            round.kept += 1;
            self.sampler.accept(token);
        }
        Ok(None)
    }
}

/// What became of one draft.
struct Round<'a> {
    draft: &'a Draft,
    /// Guesses that stay processed, because the answer goes on behind them.
    kept: usize,
    /// Guesses that were right: these, and perhaps the one that ended the answer.
    right: usize,
    checked: usize,
    sampling: Duration,
}

/// A guess that was drawn at random.
#[derive(Clone, Copy)]
struct Drafted<'a> {
    token: u32,
    /// What it was drawn from.
    q: &'a [Candidate],
}

impl<'a> Drafted<'a> {
    fn at(draft: &'a Draft, row: usize) -> Option<Self> {
        let (token, q) = (*draft.tokens.get(row)?, draft.drawn_from.get(row)?);
        Some(Self { token, q })
    }
}

/// The token at `position`: chosen from the logits as without a draft, or where the draft was drawn at random, by
/// the rule that keeps the distribution.
fn choose_token(
    sampler: &mut Sampler,
    logits: &[f32],
    position: u64,
    drafted: Option<Drafted<'_>>,
) -> Result<u32, SampleError> {
    match drafted {
        Some(Drafted { token, q }) => sampler.check_drawn(logits, position, token, q),
        None => sampler.sample(logits, position),
    }
}

/// As [`choose_token`], from the best tokens of the row; none where these do not decide, or there are none.
fn choose_from_best(
    sampler: &mut Sampler,
    best: &[(u32, f32)],
    n_vocab: usize,
    position: u64,
    drafted: Option<Drafted<'_>>,
) -> Result<Option<u32>, SampleError> {
    if best.is_empty() {
        return Ok(None);
    }
    match drafted {
        Some(Drafted { token, q }) => sampler.check_drawn_best(best, n_vocab, position, token, q),
        None => sampler.sample_best(best, n_vocab, position),
    }
}

fn row_of(logits: &[f32], row: usize, n_vocab: usize) -> &[f32] {
    let row = logits.get(row * n_vocab..(row + 1) * n_vocab);
    row.unwrap_or_default()
}

/// Receives the text as it comes.
pub type Sink<'a> = dyn FnMut(Piece<'_>) -> std::io::Result<()> + 'a;

/// Where in the answer the text is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Nothing is taken apart.
    Plain,
    Thinking,
    Answer,
}

/// Turns tokens into text, thinking apart from the answer.
struct TextSplitter<'a> {
    tokenizer: &'a Tokenizer,
    part: Part,
    open: Option<u32>,
    close: Option<u32>,
    /// What ends a thinking block that has gone on for too long.
    close_thinking: Vec<u32>,
    stream: DecodeStream,
    stop: StopFilter,
    /// White space after the thinking block is not part of the answer.
    trim: bool,
    text: String,
    reasoning: String,
    n_reasoning: usize,
}

impl<'a> TextSplitter<'a> {
    fn new(tokenizer: &'a Tokenizer, request: &Request) -> Self {
        let close_thinking = tokenizer.encode("\n</think>\n\n", true).unwrap_or_default();
        Self {
            tokenizer,
            part: match request.thinking {
                None => Part::Plain,
                Some(true) => Part::Thinking,
                Some(false) => Part::Answer,
            },
            open: tokenizer.token_id("<think>"),
            close: tokenizer.token_id("</think>"),
            close_thinking,
            stream: DecodeStream::new(),
            stop: StopFilter::new(&request.stop),
            trim: request.thinking.is_some(),
            text: String::new(),
            reasoning: String::new(),
            n_reasoning: 0,
        }
    }

    fn is_thinking(&self) -> bool {
        self.part == Part::Thinking
    }

    fn is_over_budget(&self, request: &Request) -> bool {
        let budget = request.reasoning_budget;
        let over = budget.is_some_and(|budget| self.n_reasoning >= budget);
        self.is_thinking() && (over || request.end_thinking.is_cancelled())
    }

    /// Takes the next token; true when a stop string ends the answer.
    fn push(&mut self, token: u32, sink: &mut Sink<'_>) -> Result<bool, GenerateError> {
        match self.part {
            Part::Thinking if Some(token) == self.close => {
                self.part = Part::Answer;
                self.trim = true;
                return Ok(false);
            }
            Part::Answer if Some(token) == self.open && self.text.is_empty() => {
                self.part = Part::Thinking;
                return Ok(false);
            }
            Part::Thinking => self.n_reasoning += 1,
            Part::Plain | Part::Answer => {}
        }
        if self.tokenizer.is_special(token) {
            return Ok(false);
        }
        let piece = self.stream.push(self.tokenizer.token_bytes(token));
        self.show(&piece, sink)
    }

    fn show(&mut self, piece: &str, sink: &mut Sink<'_>) -> Result<bool, GenerateError> {
        let piece = if self.trim { piece.trim_start() } else { piece };
        if piece.is_empty() {
            return Ok(false);
        }
        self.trim = false;
        if self.is_thinking() {
            self.reasoning.push_str(piece);
            sink(Piece::Reasoning(piece)).map_err(GenerateError::Sink)?;
            return Ok(false);
        }
        let (shown, stopped) = self.stop.push(piece);
        self.emit(&shown, sink)?;
        Ok(stopped)
    }

    fn emit(&mut self, text: &str, sink: &mut Sink<'_>) -> Result<(), GenerateError> {
        self.text.push_str(text);
        if text.is_empty() {
            return Ok(());
        }
        sink(Piece::Text(text)).map_err(GenerateError::Sink)
    }

    /// The answer and the thinking, when no more tokens come.
    fn finish(mut self, sink: &mut Sink<'_>) -> Result<(String, String), GenerateError> {
        let rest = self.stream.finish();
        let stopped = self.show(&rest, sink)?;
        if !stopped {
            let held = self.stop.finish();
            self.emit(&held, sink)?;
        }
        self.reasoning.truncate(self.reasoning.trim_end().len());
        Ok((self.text, self.reasoning))
    }
}
