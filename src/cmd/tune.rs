//! `qrun tune`: which depth of speculation pays for this model on this machine.
//!
//! Texts are generated with every depth and draft vocabulary in turn, so that what disturbs the machine disturbs all
//! of them alike. What was measured is kept, and used by later runs.

use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget};
use qrun::engine::Engine;
use qrun::generate::{FinishReason, Generator, Request};
use qrun::sampler::{Sampler, SamplerParams};
use qrun::session::{CancelToken, Session, SessionParams};
use qrun::speculate::{Costs, Depth, SpecParams, Speculator};
use qrun::tokenizer::Tokenizer;
use qrun::tune::{Tried, TuneKey, TuneRecord};
use serde_json::json;

use super::{Outcome, UsageError, model};
use crate::cli::TuneArgs;
use crate::live::line::Reading;
use crate::live::publish;
use crate::report;

/// Texts of different kinds to go on from: what is easy to guess differs between them.
pub const PROMPTS: [&str; 6] = [
    "Tell me a story about a fox named Pip.",
    "Write a Python function that returns the largest of three numbers, and explain it.",
    "Explain in a few paragraphs how a bicycle stays upright.",
    "Give me a JSON object that describes a library with four books.",
    "List ten animals with one sentence about each.",
    "Write a letter to a friend about a journey by train through the mountains.",
];

/// Vocabularies larger than this are tried with a smaller one for drafts.
const LARGE_VOCAB: usize = 65_536;
const SMALL_DRAFT_VOCAB: usize = 32_768;

/// One combination of depth and draft vocabulary, with what it did so far.
struct Trial {
    depth: usize,
    draft_vocab: Option<usize>,
    session: usize,
    speculator: Option<Speculator>,
    tps: Vec<f64>,
    drafted: u64,
    accepted: u64,
    tokens: u64,
    passes: u64,
}

/// Measures, prints the table, keeps the record.
///
/// # Errors
/// When the model has no draft head, or cannot be loaded or computed.
pub fn run(args: &TuneArgs) -> Result<Outcome> {
    let cancel = CancelToken::default();
    super::run::install_interrupt(&cancel)?;
    let params = model::session_params(&args.model)?;
    publish::start(args.model.model.as_deref(), args.model.verbose);
    let needs = model::Needs {
        n_guesses: usize::from(args.draft_max),
        n_sessions: 2,
        ..model::Needs::default()
    };
    let (engine, tokenizer) = model::load(&args.model, &needs)?;
    if !engine.mtp_status().on {
        return Err(UsageError(format!("nothing to tune: {}", engine.mtp_status().reason)).into());
    }
    let depths = usize::from(args.draft_max);
    let n_vocab = tokenizer.n_vocab();
    let mut vocabs = vec![None];
    if n_vocab > LARGE_VOCAB && args.spec_draft_vocab.is_empty() {
        vocabs.push(Some(SMALL_DRAFT_VOCAB));
    }
    let given = args.spec_draft_vocab.iter().map(|&n| n as usize);
    // One as large as the whole is the whole.
    vocabs.extend(given.filter(|&n| n < n_vocab).map(Some));
    let (mut sessions, mut trials) = plan(&engine, &tokenizer, params, depths, &vocabs)?;
    publish::loaded(&engine, &sessions[0], &engine.mtp_status().reason);
    let prompts: Vec<Vec<u32>> = PROMPTS
        .iter()
        .map(|text| tokenizer.encode(&chat(text), true))
        .collect::<Result<_>>()?;
    let bar = ProgressBar::with_draw_target(
        Some((trials.len() * prompts.len() * args.repetitions) as u64),
        ProgressDrawTarget::stderr(),
    );
    for _ in 0..args.repetitions {
        for prompt in &prompts {
            for trial in &mut trials {
                let session = &mut sessions[trial.session];
                if !measure(session, &tokenizer, trial, prompt, args.n_predict, &cancel)? {
                    return Ok(Outcome::Interrupted);
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();

    let tried: Vec<Tried> = trials.iter().map(Trial::result).collect();
    let plain = tried.first().map_or(0.0, |t| t.tps);
    let best = tried.iter().max_by(|a, b| a.tps.total_cmp(&b.tps));
    // Also where plain decoding is fastest: later texts may be easier to guess.
    let best_vocab = tried
        .iter()
        .filter(|t| t.depth > 0)
        .max_by(|a, b| a.tps.total_cmp(&b.tps))
        .and_then(|t| t.draft_vocab);
    let record = TuneRecord::new(
        TuneKey::of(&engine),
        all_costs(&trials, best_vocab),
        best_vocab,
        tried.clone(),
    );
    report::note(&table(&record, plain));
    let verdict = match best {
        Some(best) if best.depth > 0 => {
            let among = best
                .draft_vocab
                .map_or(String::new(), |n| format!(" among {n} tokens"));
            format!(
                "{} guesses{among} are fastest: {:.2} times plain decoding",
                best.depth,
                best.tps / plain
            )
        }
        _ => "plain decoding wins on this machine".to_owned(),
    };
    report::note(&verdict);
    let path = record.save()?;
    report::note(&format!("kept in {}", path.display()));
    if args.json {
        let object = json!({"verdict": verdict, "record": record, "file": path});
        report::out(&format!("{}\n", serde_json::to_string_pretty(&object)?))?;
    }
    Ok(Outcome::Done)
}

/// A user's message in the form that the family is trained on.
pub fn chat(text: &str) -> String {
    format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
}

/// The combinations, and the sessions that they run in: plain decoding has one without a draft head's state.
fn plan(
    engine: &std::sync::Arc<Engine>,
    tokenizer: &Tokenizer,
    params: SessionParams,
    depths: usize,
    vocabs: &[Option<usize>],
) -> Result<(Vec<Session>, Vec<Trial>)> {
    let mut sessions = vec![Session::new(engine.clone(), params)?];
    let mut trials = vec![Trial::new(0, None, 0)];
    for &vocab in vocabs {
        sessions.push(Session::new(
            engine.clone(),
            SessionParams {
                mtp: true,
                n_rollback: depths,
                draft_vocab: vocab.and_then(|n| model::draft_vocab(n, tokenizer)),
                ..params
            },
        )?);
        let session = sessions.len() - 1;
        trials.extend((1..=depths).map(|depth| Trial::new(depth, vocab, session)));
    }
    Ok((sessions, trials))
}

/// Generates one text; false when the user interrupted it.
fn measure(
    session: &mut Session,
    tokenizer: &Tokenizer,
    trial: &mut Trial,
    prompt: &[u32],
    n_predict: usize,
    cancel: &CancelToken,
) -> Result<bool> {
    session.clear()?;
    let request = Request {
        prompt: prompt.to_vec(),
        n_predict: Some(n_predict),
        ignore_eos: true,
        ..Request::default()
    };
    let mut sampler = Sampler::new(SamplerParams::greedy())?;
    let answer = Generator {
        session,
        tokenizer,
        sampler: &mut sampler,
        constraint: None,
        speculator: trial.speculator.as_mut(),
        watch: Some(&mut |seen| publish::seen(&seen, 0)),
    }
    .answer(&request, cancel, &mut |_| Ok(()))?;
    publish::answered(&answer, Reading::of(&answer), session);
    if answer.finish_reason == FinishReason::Cancelled {
        return Ok(false);
    }
    trial.tps.push(answer.decode_tps());
    if let Some(stats) = answer.speculation {
        trial.drafted += stats.drafted;
        trial.accepted += stats.accepted;
        trial.tokens += stats.tokens;
        trial.passes += stats.passes;
    }
    Ok(true)
}

impl Trial {
    fn new(depth: usize, draft_vocab: Option<usize>, session: usize) -> Self {
        let params = SpecParams {
            depth: Depth::Fixed(depth),
            draft_max: depth,
            ..SpecParams::default()
        };
        Self {
            depth,
            draft_vocab,
            session,
            // Also for plain decoding, whose passes are the costs of width 1.
            speculator: Some(Speculator::new(params, None)),
            tps: Vec::new(),
            drafted: 0,
            accepted: 0,
            tokens: 0,
            passes: 0,
        }
    }

    fn result(&self) -> Tried {
        let share = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
        Tried {
            depth: self.depth,
            draft_vocab: self.draft_vocab,
            tps: median(&self.tps),
            acceptance: share(self.accepted, self.drafted),
            tokens_per_pass: share(self.tokens, self.passes),
        }
    }
}

/// The smallest cost of each width over all trials, and of each draft from the vocabulary that later runs use.
fn all_costs(trials: &[Trial], draft_vocab: Option<usize>) -> Costs {
    let mut all = Costs::default();
    let smallest = |to: &mut Vec<f64>, from: &[f64]| {
        to.resize(to.len().max(from.len()), 0.0);
        for (to, &from) in to.iter_mut().zip(from) {
            if from > 0.0 && (*to == 0.0 || from < *to) {
                *to = from;
            }
        }
    };
    for trial in trials {
        let Some(costs) = trial.speculator.as_ref().map(Speculator::costs) else {
            continue;
        };
        smallest(&mut all.pass, &costs.pass);
        if trial.draft_vocab == draft_vocab {
            smallest(&mut all.draft, &costs.draft);
        }
    }
    all
}

fn table(record: &TuneRecord, plain: f64) -> String {
    let mut lines = vec![format!(
        "{:>5} {:>11} {:>9} {:>7} {:>10} {:>11} {:>9} {:>9}",
        "depth",
        "draft vocab",
        "tok/s",
        "plain",
        "acceptance",
        "tokens/pass",
        "pass ms",
        "draft ms"
    )];
    let cost = |list: &[f64], i: usize| match list.get(i) {
        Some(&s) if s > 0.0 => format!("{:.2}", 1e3 * s),
        _ => "-".to_owned(),
    };
    for tried in &record.tried {
        lines.push(format!(
            "{:>5} {:>11} {:>9.1} {:>6.2}x {:>9.0}% {:>11.2} {:>9} {:>9}",
            tried.depth,
            tried
                .draft_vocab
                .map_or("all".to_owned(), |n| n.to_string()),
            tried.tps,
            tried.tps / plain,
            100.0 * tried.acceptance,
            tried.tokens_per_pass,
            cost(&record.costs.pass, tried.depth + 1),
            cost(&record.costs.draft, tried.depth),
        ));
    }
    lines.join("\n")
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n => (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0,
    }
}
