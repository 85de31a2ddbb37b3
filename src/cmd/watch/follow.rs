//! The lines of a run, gathered into what the screen shows: figures now, and their histories.

use tui::watch::{History, Summary, WatchRun};

use crate::live::line::{Hello, Line, Memory, Speculation, Zone};

/// Seconds that a slot of the histories stands for.
pub const SLOT: f64 = 1.0;
/// Slots that are kept.
const MAX_SLOTS: usize = 900;

/// A run that is followed.
pub struct Followed {
    /// What the screen shows of it.
    pub run: WatchRun,
    started: f64,
    /// Speculation as counted at the last line, and at the start of the present slot.
    speculation: Speculation,
    slot: Speculation,
    /// Speeds told in the present slot.
    speeds: Vec<f32>,
    memory: Option<Memory>,
    peak: u64,
    worst: Zone,
    prompt_tokens: u64,
}

impl Followed {
    /// A run that has said nothing yet.
    pub fn new(pid: u32) -> Self {
        Self {
            run: WatchRun {
                pid,
                history: History {
                    slot_s: SLOT as f32,
                    ..History::default()
                },
                ..WatchRun::default()
            },
            started: 0.0,
            speculation: Speculation::default(),
            slot: Speculation::default(),
            speeds: Vec::new(),
            memory: None,
            peak: 0,
            worst: Zone::Green,
            prompt_tokens: 0,
        }
    }

    /// Takes in a line.
    pub fn take(&mut self, line: Line) {
        let live = &mut self.run.live;
        match line {
            Line::Hello(hello) => self.greet(hello),
            Line::Prompt(prompt) => {
                live.prompt = Some(tui::Prompt {
                    done: prompt.done,
                    total: prompt.total,
                    tps: prompt.tps as f32,
                });
                live.reuse = (prompt.reused > 0).then_some(tui::Reuse::Reused {
                    reused: prompt.reused,
                    total: prompt.reused + prompt.total,
                });
            }
            Line::Pass(pass) => {
                self.run.tokens = pass.total_tokens;
                if let Some(tps) = pass.tps {
                    live.decode_tps = Some(tps as f32);
                    self.speeds.push(tps as f32);
                }
                live.context = Some(pass.context.into());
                match pass.speculation {
                    Some(speculation) => {
                        // Another answer counts from nothing.
                        if speculation.passes < self.speculation.passes {
                            self.slot = Speculation::default();
                        }
                        speculation.show(live);
                        self.speculation = speculation;
                    }
                    None => live.speculation.depth = None,
                }
            }
            Line::Memory(memory) => {
                self.peak = self.peak.max(memory.used);
                self.worst = self.worst.max(memory.zone);
                memory.show(live);
                self.memory = Some(memory);
            }
            Line::Answer(answer) => {
                self.prompt_tokens += answer.prompt_tokens;
                if answer.decode_s > 0.0 && answer.tokens > 1 {
                    let tps = ((answer.tokens - 1) as f64 / answer.decode_s) as f32;
                    // A short answer has no other speed.
                    if self.speeds.is_empty() {
                        self.speeds.push(tps);
                    }
                    live.decode_tps = Some(tps);
                }
            }
            Line::End(end) => {
                let speed = |n: u64, s: f64| (n > 0 && s > 0.0).then(|| (n as f64 / s) as f32);
                let ratio = |a: u64, b: u64| (b > 0).then(|| a as f32 / b as f32);
                self.run.tokens = end.tokens;
                self.run.elapsed_s = end.t as u64;
                self.run.summary = Some(Summary {
                    ended: end.ended,
                    elapsed_s: end.t as u64,
                    prompt_tokens: end.prompt_tokens,
                    prompt_tps: speed(end.prompt_tokens, end.prompt_s),
                    tokens: end.tokens,
                    mean_tps: speed(end.tokens.saturating_sub(end.answers), end.decode_s),
                    best_tps: self.best(),
                    acceptance: ratio(end.accepted, end.drafted),
                    tokens_per_pass: ratio(end.pass_tokens, end.passes),
                    peak_memory: end.peak_memory.unwrap_or(0).max(self.peak),
                    zone: end.zone.max(self.worst).into(),
                });
            }
        }
    }

    fn greet(&mut self, hello: Hello) {
        self.started = hello.started;
        self.run.model = match hello.loaded {
            true => format!("{} {}", hello.model, hello.device),
            false => format!("{} (loading)", hello.model),
        };
        self.run.command = hello.command;
        let live = &mut self.run.live;
        if live.speculation.depth.is_none() {
            live.speculation.reason = hello.draft_head;
        }
        if hello.loaded {
            let before = live.context.unwrap_or_default();
            live.context = Some(tui::Context {
                limit: hello.context,
                ..before
            });
        }
    }

    /// The connection ended.
    pub fn lost(&mut self) {
        if self.run.summary.is_some() {
            return;
        }
        let spec = &self.speculation;
        let known = spec.drafted > 0;
        self.run.summary = Some(Summary {
            ended: "gone without a word; it may have been killed".to_owned(),
            elapsed_s: self.run.elapsed_s,
            prompt_tokens: self.prompt_tokens,
            tokens: self.run.tokens,
            best_tps: self.best(),
            acceptance: known.then(|| spec.accepted as f32 / spec.drafted as f32),
            peak_memory: self.peak,
            zone: self.worst.into(),
            ..Summary::default()
        });
    }

    fn best(&self) -> Option<f32> {
        let known = self.run.history.tps.iter().chain(&self.speeds);
        known
            .copied()
            .filter(|tps| tps.is_finite())
            .reduce(f32::max)
    }

    /// Closes a slot of the histories; `now` is in seconds since 1970.
    pub fn close_slot(&mut self, now: f64) {
        if self.run.summary.is_some() {
            return;
        }
        if self.started > 0.0 {
            self.run.elapsed_s = (now - self.started).max(0.0) as u64;
        }
        let between = self.speculation.since(&self.slot);
        self.slot = self.speculation.clone();
        let history = &mut self.run.history;
        let n = history.tps.len();
        let mean = self.speeds.iter().sum::<f32>() / self.speeds.len() as f32;
        self.speeds.clear();
        push(&mut history.tps, mean);
        let shares = between.by_position();
        for place in 0..shares.len().max(history.acceptance.len()) {
            if place == history.acceptance.len() {
                // This place was not guessed before.
                history.acceptance.push(vec![f32::NAN; n]);
            }
            let share = shares.get(place).copied().unwrap_or(f32::NAN);
            push(&mut history.acceptance[place], share);
        }
        let unknown = tui::Round {
            draft_ms: f32::NAN,
            verify_ms: f32::NAN,
            rollback_ms: f32::NAN,
            sampling_ms: f32::NAN,
            other_ms: f32::NAN,
        };
        if self.run.live.round.is_some() {
            if history.rounds.is_empty() {
                history.rounds.resize(n, unknown);
            }
            push(&mut history.rounds, between.round().unwrap_or(unknown));
        }
        if let Some(memory) = &self.memory {
            let share = memory.used as f32 / memory.total.max(1) as f32;
            push(&mut history.memory, (share, memory.zone.into()));
        }
        if let Some(context) = &self.run.live.context {
            push(&mut history.context, context.used as f32);
        }
    }
}

fn push<T>(history: &mut Vec<T>, value: T) {
    if history.len() == MAX_SLOTS {
        history.remove(0);
    }
    history.push(value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::line::{Answer, Context, End, Pass, Seconds};

    fn pass(passes: u64, drafted: &[u64], accepted: &[u64], tps: Option<f64>) -> Line {
        Line::Pass(Pass {
            tokens: 2 * passes,
            total_tokens: 2 * passes,
            tps,
            speculation: Some(Speculation {
                depth: 2,
                reason: "as set".to_owned(),
                passes,
                rounds: passes,
                tokens: 2 * passes,
                drafted: drafted.iter().sum(),
                accepted: accepted.iter().sum(),
                drafted_at: drafted.to_vec(),
                accepted_at: accepted.to_vec(),
                seconds: Seconds {
                    verify: 0.01 * passes as f64,
                    ..Seconds::default()
                },
            }),
            context: Context {
                used: 2 * passes,
                limit: 100,
                kv_bytes: 0,
            },
            ..Pass::default()
        })
    }

    #[test]
    fn histories_hold_what_happened_in_each_slot() {
        let mut followed = Followed::new(7);
        followed.take(Line::Hello(Hello {
            model: "demo".into(),
            device: "CPU".into(),
            loaded: true,
            context: 100,
            started: 100.0,
            ..Hello::default()
        }));
        followed.close_slot(101.0);
        followed.take(pass(4, &[4], &[4], None));
        followed.take(pass(8, &[8], &[6], Some(40.0)));
        followed.take(pass(9, &[9], &[6], Some(20.0)));
        followed.close_slot(102.2);
        followed.take(pass(11, &[11, 2], &[7, 1], Some(10.0)));
        followed.close_slot(103.4);
        // The next answer counts from nothing.
        followed.take(pass(2, &[2], &[0], Some(10.0)));
        followed.close_slot(104.0);
        let history = &followed.run.history;
        assert!(history.tps[0].is_nan());
        assert_eq!(history.tps[1..], [30.0, 10.0, 10.0]);
        assert!(history.acceptance[0][0].is_nan());
        assert_eq!(history.acceptance[0][1..], [6.0 / 9.0, 0.5, 0.0]);
        assert!(history.acceptance[1][..2].iter().all(|v| v.is_nan()));
        assert_eq!(history.acceptance[1][2], 0.5);
        assert!((history.rounds[3].verify_ms - 10.0).abs() < 1e-3);
        assert_eq!(history.context, [0.0, 18.0, 22.0, 4.0]);
        assert_eq!(followed.run.elapsed_s, 4);
        assert_eq!(followed.run.model, "demo CPU");
    }

    #[test]
    fn an_end_is_summed_up_and_so_is_a_loss() {
        let mut followed = Followed::new(7);
        followed.take(pass(4, &[4], &[3], Some(55.0)));
        followed.take(Line::Answer(Answer {
            prompt_tokens: 10,
            ..Answer::default()
        }));
        let end = End {
            t: 12.5,
            ended: "finished".into(),
            answers: 1,
            tokens: 11,
            decode_s: 0.5,
            drafted: 4,
            accepted: 3,
            ..End::default()
        };
        let mut ended = Followed::new(7);
        ended.take(pass(4, &[4], &[3], Some(55.0)));
        ended.take(Line::End(end));
        ended.lost();
        let summary = ended.run.summary.clone().unwrap();
        assert_eq!(summary.ended, "finished");
        assert_eq!(
            (summary.mean_tps, summary.best_tps),
            (Some(20.0), Some(55.0))
        );
        assert_eq!((summary.acceptance, summary.prompt_tps), (Some(0.75), None));
        followed.lost();
        let summary = followed.run.summary.clone().unwrap();
        assert!(summary.ended.contains("killed"));
        assert_eq!((summary.tokens, summary.prompt_tokens), (8, 10));
        // What is over does not change any more.
        followed.close_slot(1.0);
        assert!(followed.run.history.tps.is_empty());
    }
}
