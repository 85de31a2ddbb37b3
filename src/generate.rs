//! The main loop: prompt in, tokens out, text taken apart as it comes.

use std::time::{Duration, Instant};

use crate::chat::StopFilter;
use crate::grammar::Constraint;
use crate::sampler::{SampleError, Sampler};
use crate::session::{CancelToken, EvalError, Outputs, Session};
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
    /// The receiver of the text failed.
    #[error("writing the answer")]
    Sink(#[source] std::io::Error),
}

/// Generates an answer, handing each piece of text to `sink` as it comes.
///
/// A cancelled token ends the answer with what there is; it is an error only while the prompt is processed.
/// `constraint` restricts the answer, not the thinking before it.
///
/// # Errors
/// See [`GenerateError`].
pub fn generate(
    session: &mut Session,
    tokenizer: &Tokenizer,
    sampler: &mut Sampler,
    mut constraint: Option<&mut Constraint>,
    request: &Request,
    cancel: &CancelToken,
    sink: &mut Sink<'_>,
) -> Result<Answer, GenerateError> {
    if request.prompt.is_empty() {
        return Err(GenerateError::EmptyPrompt);
    }
    let mut text = TextSplitter::new(tokenizer, request);
    let n_max = request.n_predict.unwrap_or(usize::MAX);
    let mut tokens: Vec<u32> = Vec::new();
    let mut masked: Vec<f32> = Vec::new();
    // Tokens to process next: the prompt, then the one sampled, or those that close the thinking block.
    let mut pending = request.prompt.clone();
    let mut prompt_time = None;
    let mut start = Instant::now();
    let finish_reason = loop {
        let position = session.n_past() + pending.len();
        let outputs = if tokens.len() < n_max {
            Outputs::Last
        } else {
            Outputs::None
        };
        let logits = match session.eval(&pending, outputs, cancel) {
            Ok(logits) => logits,
            Err(EvalError::ContextFull { .. }) if !tokens.is_empty() => break FinishReason::Length,
            Err(EvalError::Cancelled) if !tokens.is_empty() => break FinishReason::Cancelled,
            Err(error) => return Err(error.into()),
        };
        pending.iter().for_each(|&token| sampler.accept(token));
        if prompt_time.is_none() {
            prompt_time = Some(start.elapsed());
            start = Instant::now();
        }
        if tokens.len() >= n_max {
            break FinishReason::Length;
        }
        if cancel.is_cancelled() {
            break FinishReason::Cancelled;
        }

        let active = constraint.as_deref_mut().filter(|_| !text.is_thinking());
        let token = match active {
            None => sampler.sample(logits, position as u64)?,
            Some(constraint) => {
                masked.clear();
                masked.extend_from_slice(logits);
                constraint
                    .mask(&mut masked)
                    .map_err(GenerateError::Constraint)?;
                let token = sampler.sample(&masked, position as u64)?;
                constraint
                    .accept(token)
                    .map_err(GenerateError::Constraint)?;
                token
            }
        };
        tokens.push(token);
        if tokenizer.is_eog(token) && !request.ignore_eos {
            break FinishReason::Stop;
        }
        if text.push(token, sink)? {
            break FinishReason::Stop;
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
            break FinishReason::Length;
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
    })
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
        self.is_thinking() && budget.is_some_and(|budget| self.n_reasoning >= budget)
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
