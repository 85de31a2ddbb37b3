//! The lines of a watched run: one JSON object each, told apart by `type`.
//!
//! The schema is described in `docs/WATCH.md`. Fields and types may be added to it; what is there keeps its meaning as
//! long as [`SCHEMA`] stays the same. Times are seconds, sizes bytes, and `t` counts from the start of the run.

use qrun::speculate::SpecStats;
use serde::{Deserialize, Serialize};

/// Version of the schema.
pub const SCHEMA: u32 = 1;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Line {
    /// Who it is: the first line, and again when a model is loaded.
    Hello(Hello),
    /// A prompt is being processed.
    Prompt(Prompt),
    /// Tokens are being written.
    Pass(Pass),
    /// The machine's memory.
    Memory(Memory),
    /// An answer ended.
    Answer(Answer),
    /// The run ended: the last line.
    End(End),
}

/// Who it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of qrun.
    pub version: String,
    /// The process.
    pub pid: u32,
    /// Its command line, cut short.
    pub command: String,
    /// When it began: seconds since 1970.
    pub started: f64,
    /// The model's file name without its ending.
    pub model: String,
    /// False while it is being loaded; what follows is then not known yet.
    pub loaded: bool,
    /// The device.
    pub device: String,
    /// Context limit in tokens.
    pub context: u64,
    /// Why the draft head is on or off.
    pub draft_head: String,
}

/// A prompt that is being processed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// When.
    pub t: f64,
    /// Tokens processed.
    pub done: u64,
    /// Tokens to process.
    pub total: u64,
    /// Tokens before them that did not have to be processed again.
    pub reused: u64,
    /// Tokens a second so far.
    pub tps: f64,
}

/// Where the writing of an answer is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    /// When.
    pub t: f64,
    /// Tokens of this answer, thinking included.
    pub tokens: u64,
    /// Tokens of all answers.
    pub total_tokens: u64,
    /// Tokens a second since the line before; none in the first line of an answer, and where none came since.
    pub tps: Option<f64>,
    /// What speculation did in this answer; none where there is none.
    pub speculation: Option<Speculation>,
    /// The context.
    pub context: Context,
}

/// What speculation did so far in an answer: counts only grow until the next answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Speculation {
    /// Tokens guessed before the last pass.
    pub depth: u32,
    /// Why so many.
    #[serde(default)]
    pub reason: String,
    /// Passes over the model, with and without guesses.
    pub passes: u64,
    /// Passes that checked guesses.
    pub rounds: u64,
    /// Tokens that all passes gave.
    pub tokens: u64,
    /// Guesses.
    pub drafted: u64,
    /// Guesses that were right.
    pub accepted: u64,
    /// Guesses at the first, second, ... place.
    pub drafted_at: Vec<u64>,
    /// Those that were right, with all before them.
    pub accepted_at: Vec<u64>,
    /// Where the time of the passes went.
    pub seconds: Seconds,
}

/// Where the time went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seconds {
    /// Guessing.
    pub draft: f64,
    /// Passes over the model.
    pub verify: f64,
    /// Taking back what was wrong.
    pub rollback: f64,
    /// Choosing tokens.
    pub sampling: f64,
    /// The rest: text, output, bookkeeping.
    pub other: f64,
}

/// How full the context is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Context {
    /// Tokens in it.
    pub used: u64,
    /// Tokens possible.
    pub limit: u64,
    /// Keys and values of the tokens in it.
    pub kv_bytes: u64,
}

/// How near the machine is to swapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Zone {
    /// Under 70 % in use.
    #[default]
    Green,
    /// 70 to 85 %, or signs of pressure.
    Yellow,
    /// 85 % and more, or it swaps already.
    Red,
}

/// What this run holds in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Parts {
    /// Weights mapped from the file.
    pub weights_mapped: u64,
    /// Weights in copies of their own.
    pub weights_copied: u64,
    /// Keys and values, as allocated.
    pub kv: u64,
    /// Recurrent state, older states and intermediate results.
    pub state: u64,
    /// Saved states.
    pub snapshots: u64,
}

/// The machine's memory, and its heat.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// When.
    pub t: f64,
    /// How near to swapping.
    pub zone: Zone,
    /// All there is.
    pub total: u64,
    /// In use, mapped weights included.
    pub used: u64,
    /// What of it is this run's.
    #[serde(flatten)]
    pub parts: Parts,
    /// The rest of what is in use.
    pub other: u64,
    /// Tokens that still fit before the red zone, or into the context.
    pub room_tokens: Option<u64>,
    /// How hot it is, in the system's word: `nominal`, `fair`, `serious` or `critical`; none where it has none.
    #[serde(default)]
    pub thermal: Option<String>,
}

/// What reading a prompt took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Tokens processed.
    pub tokens: u64,
    /// Tokens before them that did not have to be processed again.
    pub reused: u64,
    /// Seconds.
    pub seconds: f64,
}

impl Reading {
    /// Of a prompt of which so many tokens were processed, and so many were there.
    pub fn new(tokens: usize, reused: usize, time: std::time::Duration) -> Self {
        Self {
            tokens: tokens as u64,
            reused: reused as u64,
            seconds: time.as_secs_f64(),
        }
    }

    /// Of a prompt that was processed with its answer.
    pub fn of(answer: &qrun::generate::Answer) -> Self {
        Self::new(answer.n_prompt, 0, answer.prompt_time)
    }
}

/// An answer that ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// When.
    pub t: f64,
    /// How many there were, with this one.
    pub answers: u64,
    /// Tokens of its prompt that were processed.
    pub prompt_tokens: u64,
    /// Tokens of its prompt that were there already.
    pub reused: u64,
    /// What processing them took.
    pub prompt_s: f64,
    /// Its tokens.
    pub tokens: u64,
    /// What they took after the first.
    pub decode_s: f64,
    /// `stop`, `length` or `cancelled`.
    pub finish_reason: String,
}

/// The whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// When.
    pub t: f64,
    /// `finished`, `interrupted` or `failed`.
    pub ended: String,
    /// Answers.
    pub answers: u64,
    /// Tokens of prompts that were processed.
    pub prompt_tokens: u64,
    /// What that took.
    pub prompt_s: f64,
    /// Tokens of all answers.
    pub tokens: u64,
    /// What they took, after the first of each.
    pub decode_s: f64,
    /// Guesses.
    pub drafted: u64,
    /// Guesses that were right.
    pub accepted: u64,
    /// Passes over the model.
    pub passes: u64,
    /// Tokens that these gave.
    pub pass_tokens: u64,
    /// Most memory in use while somebody watched.
    pub peak_memory: Option<u64>,
    /// The worst zone while somebody watched.
    pub zone: Zone,
}

impl Speculation {
    /// From what the speculator counted.
    pub fn new(stats: &SpecStats, depth: usize) -> Self {
        Self {
            depth: depth as u32,
            reason: stats.reason.to_owned(),
            passes: stats.passes,
            rounds: stats.rounds,
            tokens: stats.tokens,
            drafted: stats.drafted,
            accepted: stats.accepted,
            drafted_at: stats.drafted_at.clone(),
            accepted_at: stats.accepted_at.clone(),
            seconds: Seconds {
                draft: stats.draft_s,
                verify: stats.verify_s,
                rollback: stats.rollback_s,
                sampling: stats.sampling_s,
                other: stats.other_s,
            },
        }
    }

    /// What was counted since `before`; all of it where that belongs to another answer.
    pub fn since(&self, before: &Self) -> Self {
        if self.passes < before.passes {
            return self.clone();
        }
        let less = |a: &[u64], b: &[u64]| {
            let b = b.iter().chain(std::iter::repeat(&0));
            a.iter().zip(b).map(|(a, b)| a.saturating_sub(*b)).collect()
        };
        let (a, b) = (&self.seconds, &before.seconds);
        Self {
            depth: self.depth,
            reason: self.reason.clone(),
            passes: self.passes - before.passes,
            rounds: self.rounds.saturating_sub(before.rounds),
            tokens: self.tokens.saturating_sub(before.tokens),
            drafted: self.drafted.saturating_sub(before.drafted),
            accepted: self.accepted.saturating_sub(before.accepted),
            drafted_at: less(&self.drafted_at, &before.drafted_at),
            accepted_at: less(&self.accepted_at, &before.accepted_at),
            seconds: Seconds {
                draft: a.draft - b.draft,
                verify: a.verify - b.verify,
                rollback: a.rollback - b.rollback,
                sampling: a.sampling - b.sampling,
                other: a.other - b.other,
            },
        }
    }

    /// Mean time of a pass, for the screen; none before the first.
    pub fn round(&self) -> Option<tui::Round> {
        let ms = |seconds: f64| (1e3 * seconds / self.passes as f64) as f32;
        (self.passes > 0).then(|| tui::Round {
            draft_ms: ms(self.seconds.draft),
            verify_ms: ms(self.seconds.verify),
            rollback_ms: ms(self.seconds.rollback),
            sampling_ms: ms(self.seconds.sampling),
            other_ms: ms(self.seconds.other),
        })
    }

    /// Share of the guesses at each place that were right; NaN where there was none.
    pub fn by_position(&self) -> Vec<f32> {
        let pairs = self.accepted_at.iter().zip(&self.drafted_at);
        pairs.map(|(&a, &n)| a as f32 / n as f32).collect()
    }

    /// Fills what the screens show of it.
    pub fn show(&self, live: &mut tui::Live) {
        live.round = self.round().or(live.round);
        live.speculation = tui::Speculation {
            depth: Some(self.depth),
            reason: self.reason.clone(),
            acceptance: (self.drafted > 0).then(|| self.accepted as f32 / self.drafted as f32),
            by_position: self.by_position(),
            tokens_per_pass: (self.passes > 0).then(|| self.tokens as f32 / self.passes as f32),
        };
    }
}

impl From<Context> for tui::Context {
    fn from(context: Context) -> Self {
        Self {
            used: context.used,
            limit: context.limit,
            kv_bytes: context.kv_bytes,
        }
    }
}

impl From<qrun::memory::Zone> for Zone {
    fn from(zone: qrun::memory::Zone) -> Self {
        match zone {
            qrun::memory::Zone::Green => Self::Green,
            qrun::memory::Zone::Yellow => Self::Yellow,
            qrun::memory::Zone::Red => Self::Red,
        }
    }
}

impl From<Zone> for tui::Zone {
    fn from(zone: Zone) -> Self {
        match zone {
            Zone::Green => Self::Green,
            Zone::Yellow => Self::Yellow,
            Zone::Red => Self::Red,
        }
    }
}

impl Memory {
    /// Fills what the screens show of it.
    pub fn show(&self, live: &mut tui::Live) {
        live.memory = Some(self.into());
        if let Some(thermal) = &self.thermal {
            live.thermal
                .get_or_insert_default()
                .state
                .clone_from(thermal);
        }
    }
}

impl From<&Memory> for tui::Memory {
    fn from(memory: &Memory) -> Self {
        Self {
            zone: memory.zone.into(),
            total: memory.total,
            weights_mapped: memory.parts.weights_mapped,
            weights_copied: memory.parts.weights_copied,
            kv: memory.parts.kv,
            state: memory.parts.state,
            snapshots: memory.parts.snapshots,
            other: memory.other,
            room_tokens: memory.room_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_told_from_one_line_to_the_next() {
        let at = |passes, drafted_at: &[u64], accepted_at: &[u64], verify| Speculation {
            passes,
            drafted_at: drafted_at.to_vec(),
            accepted_at: accepted_at.to_vec(),
            seconds: Seconds {
                verify,
                ..Seconds::default()
            },
            ..Speculation::default()
        };
        let (first, second) = (at(4, &[3], &[2], 0.4), at(6, &[5, 2], &[3, 1], 1.0));
        let between = second.since(&first);
        assert_eq!(between.passes, 2);
        assert_eq!(between.by_position(), [0.5, 0.5]);
        assert_eq!(between.round().map(|r| r.verify_ms), Some(300.0));
        // Another answer counts from nothing.
        assert_eq!(first.since(&second), first);
    }

    #[test]
    fn newer_lines_can_be_read() {
        let line = r#"{"type":"memory","t":1.5,"zone":"yellow","total":8,"used":6,"weights_mapped":1,
            "weights_copied":0,"kv":1,"state":1,"snapshots":0,"other":3,"room_tokens":null,"new":"field"}"#;
        let Ok(Line::Memory(memory)) = serde_json::from_str(line) else {
            panic!("not understood");
        };
        assert_eq!((memory.zone, memory.parts.kv), (Zone::Yellow, 1));
    }
}
