//! `qrun bench`: how fast a model is here; llama-bench's tests, and those that it lacks.
//!
//! Repetitions of all tests of one depth are interleaved, so that what disturbs the machine disturbs all of them
//! alike.

mod measure;
mod peer;
mod row;
mod sustained;

use std::sync::Arc;

use anyhow::{Result, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use qrun::engine::Engine;
use qrun::model::forward::DraftVocab;
use qrun::model::shapes::Synthetic;
use qrun::roofline::{Reads, copy_bandwidth};
use qrun::session::{CancelToken, EvalError, Session, SessionParams};
use qrun::speculate::{Depth, SpecParams, Speculator};
use qrun::tokenizer::Tokenizer;

pub use self::measure::Guesses;
use self::measure::{Energy, Place, Work};
use self::row::Row;
use super::{Outcome, UsageError, model, tune};
use crate::cli::{BenchArgs, ModelArgs};
use crate::report;

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A table in Markdown.
    Md,
    /// One JSON list.
    Json,
    /// A JSON object a line.
    Jsonl,
    /// Comma-separated values with a line of titles.
    Csv,
}

/// How often guesses are taken to be right in a model of random weights, at each place with all before it: what is
/// common in text.
const COMMON_RATES: [f64; 6] = [0.85, 0.70, 0.56, 0.45, 0.36, 0.28];

/// Runs all tests and prints the results.
///
/// # Errors
/// When the arguments contradict each other, or the model cannot be loaded or computed.
pub fn run(args: &BenchArgs) -> Result<Outcome> {
    let before = args.against.as_deref().map(row::read).transpose()?;
    let cancel = CancelToken::default();
    super::run::install_interrupt(&cancel)?;
    let mut args = args.clone();
    args.model = Some(model::path(args.model.as_deref())?);
    let peer = args
        .compare
        .as_deref()
        .map(|program| peer::Peer::find(program, &args))
        .transpose()?;

    let mut rows = Vec::new();
    for &threads in &or_default(&args.threads) {
        let widest = args.batch_size.iter().max().copied().unwrap_or(0);
        let (engine, tokenizer) = model::load(
            &model_args(&args, threads, widest, "f16", "f16"),
            &needs(&args),
        )?;
        let bench = Bench {
            args: &args,
            engine,
            tokenizer,
            cancel: &cancel,
        };
        if let Some(minutes) = args.sustained {
            return bench.sustained(minutes);
        }
        // The bound of every decoding test. A device that cannot be measured has none.
        let bandwidth = match args.n_gen.iter().any(|&n| n > 0) {
            true => copy_bandwidth(&bench.engine.backends()[0]).ok(),
            false => None,
        };
        let peer_before = peer.as_ref().map(|p| p.run(&cancel)).transpose()?;
        for &n_batch in &args.batch_size {
            for k in &args.cache_type_k {
                for v in &args.cache_type_v {
                    let params = model::session_params(&model_args(&args, threads, n_batch, k, v))?;
                    match bench.tests(params, bandwidth, &mut rows) {
                        Ok(()) => {}
                        Err(error) if is_cancelled(&error) => return Ok(Outcome::Interrupted),
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        if let (Some(peer), Some(before)) = (&peer, peer_before) {
            // Before and after, so that a machine that grows slower is so for both.
            peer::merge(&mut rows, &before, &peer.run(&cancel)?);
        }
    }
    if let Some(path) = &args.save {
        let text = row::format(&rows, Format::Json, None)?;
        std::fs::write(path, text + "\n")
            .map_err(|e| anyhow::anyhow!("writing {}: {e}", path.display()))?;
    }
    let text = row::format(&rows, args.output, before.as_deref())?;
    report::out(&format!("{text}\n"))?;
    Ok(Outcome::Done)
}

fn is_cancelled(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        matches!(
            cause.downcast_ref::<EvalError>(),
            Some(EvalError::Cancelled)
        )
    })
}

fn or_default(threads: &[u16]) -> Vec<Option<u16>> {
    match threads {
        [] => vec![None],
        list => list.iter().copied().map(Some).collect(),
    }
}

/// One combination of what may be given several times; no batch size for what needs none.
fn model_args(
    args: &BenchArgs,
    threads: Option<u16>,
    n_batch: usize,
    k: &str,
    v: &str,
) -> ModelArgs {
    ModelArgs {
        model: args.model.clone(),
        mtp: args.mtp.clone(),
        device: args.device.clone(),
        threads,
        repack: args.repack,
        ctx_size: 0,
        batch_size: n_batch.max(1),
        cache_type_k: k.to_owned(),
        cache_type_v: v.to_owned(),
        fit: args.fit,
        verbose: args.verbose,
    }
}

/// The memory of the largest test: its sessions hold no more tokens than these.
fn needs(args: &BenchArgs) -> model::Needs {
    let most = |list: &[usize]| list.iter().max().copied().unwrap_or(0);
    let pairs = args.pg.iter().map(|&(prompt, gen_)| prompt + gen_);
    let reach = pairs
        .max()
        .unwrap_or(0)
        .max(most(&args.n_prompt))
        .max(most(&args.n_gen));
    model::Needs {
        n_guesses: usize::from(args.draft_max),
        n_ctx: Some(most(&args.n_depth) + reach + 256),
        n_sessions: 2,
        ..model::Needs::default()
    }
}

/// A loaded model and what is asked of it.
struct Bench<'a> {
    args: &'a BenchArgs,
    engine: Arc<Engine>,
    tokenizer: Tokenizer,
    cancel: &'a CancelToken,
}

/// A test with its samples so far.
struct Test {
    work: Work,
    /// Which of the places it runs in.
    place: usize,
    speculator: Option<Speculator>,
    seconds: Vec<f64>,
    stats: Vec<(u64, u64, u64, u64)>,
    joules: f64,
}

impl Bench<'_> {
    /// The tests of each depth, in the order of the table.
    fn list(&self) -> Result<Vec<Work>> {
        let args = self.args;
        let head = self.engine.mtp_status();
        let guesses = self.guesses()?;
        let mut list = Vec::new();
        for &n in args.n_prompt.iter().filter(|&&n| n > 0) {
            list.push(Work::Prompt(n));
            if !guesses.is_empty() && head.on {
                list.push(Work::PromptWithHead(n));
            }
            if args.ttft {
                list.push(Work::FirstToken(n));
            }
        }
        for &n in args.n_gen.iter().filter(|&&n| n > 0) {
            list.push(Work::Decode(n));
            list.extend(guesses.iter().map(|&g| Work::Generate(n, g)));
        }
        list.extend(args.pg.iter().map(|&(p, n)| Work::Both(p, n)));
        ensure!(
            !list.is_empty(),
            UsageError("no test is left: give -p, -n or -pg a number above 0".to_owned())
        );
        Ok(list)
    }

    fn guesses(&self) -> Result<Vec<Guesses>> {
        let guesses = &self.args.spec;
        let head = self.engine.mtp_status();
        if !head.on && guesses.iter().any(|&g| g != Guesses::Fixed(0)) {
            return Err(UsageError(format!("--spec: {}", head.reason)).into());
        }
        Ok(guesses.clone())
    }

    /// Runs all tests at all depths and adds their rows.
    fn tests(
        &self,
        params: SessionParams,
        bandwidth: Option<f64>,
        rows: &mut Vec<Row>,
    ) -> Result<()> {
        let list = self.list()?;
        let deepest = self.args.n_depth.iter().max().copied().unwrap_or(0);
        let reach = list.iter().map(Work::reach).max().unwrap_or(0);
        let params = SessionParams {
            n_ctx: (deepest + reach).next_multiple_of(256),
            ..params
        };
        let text = self.text()?;
        let draft_max = self.draft_max();
        let vocab = self.draft_vocab();
        // Plain decoding keeps no state of the head.
        let mut places = vec![Place::new(Session::new(self.engine.clone(), params)?)];
        if list.iter().any(|w| place_of(w) == 1) {
            places.push(Place::new(Session::new(
                self.engine.clone(),
                SessionParams {
                    mtp: true,
                    n_rollback: draft_max,
                    draft_vocab: vocab,
                    ..params
                },
            )?));
        }
        for &depth in &self.args.n_depth {
            let begun = qrun::template::utc_now("%Y-%m-%dT%H:%M:%SZ");
            let mut tests: Vec<Test> = list.iter().map(|&work| self.test(work)).collect();
            let bar = bar(tests.len() * (self.args.repetitions + 1), depth);
            for place in &mut places {
                place.fill(depth, self.cancel)?;
            }
            // The first round warms caches and kernels and is not counted.
            for repetition in 0..=self.args.repetitions {
                for test in &mut tests {
                    bar.set_message(test.work.name());
                    let energy = Energy::start();
                    let sample = places[test.place].run(
                        test.work,
                        &text,
                        &self.tokenizer,
                        test.speculator.as_mut(),
                        self.cancel,
                    )?;
                    bar.inc(1);
                    if repetition == 0 {
                        continue;
                    }
                    test.seconds.push(sample.seconds);
                    test.joules += energy.and_then(|e| e.joules()).unwrap_or(0.0);
                    if let Some(s) = sample.stats {
                        test.stats.push((s.drafted, s.accepted, s.tokens, s.passes));
                    }
                }
            }
            bar.finish_and_clear();
            for test in &tests {
                let session = places[test.place].session();
                let a_token = session.token_bytes();
                let mut row = self.row(test, params, depth, &begun, a_token, bandwidth);
                row.splits = session.n_splits();
                rows.push(row);
            }
        }
        Ok(())
    }

    /// The text that generated tokens go on from.
    fn text(&self) -> Result<Vec<u32>> {
        self.tokenizer.encode(&tune::chat(tune::PROMPTS[0]), true)
    }

    fn draft_max(&self) -> usize {
        let fixed = self.args.spec.iter().map(|g| match g {
            Guesses::Auto => usize::from(self.args.draft_max),
            Guesses::Fixed(n) => *n,
        });
        fixed.max().unwrap_or(0).max(1)
    }

    fn draft_vocab(&self) -> Option<DraftVocab> {
        let n = self.args.spec_draft_vocab?;
        model::draft_vocab(n as usize, &self.tokenizer)
    }

    fn imposed(&self) -> bool {
        let path = self.args.model.as_deref().unwrap_or("".as_ref());
        !self.args.spec_synth_rates.is_empty() || matches!(Synthetic::parse(path), Ok(Some(_)))
    }

    fn test(&self, work: Work) -> Test {
        let depth = match work {
            Work::Generate(_, Guesses::Auto) => {
                Some((Depth::Auto, usize::from(self.args.draft_max)))
            }
            Work::Generate(_, Guesses::Fixed(n)) if n > 0 => Some((Depth::Fixed(n), n)),
            _ => None,
        };
        let speculator = depth.map(|(depth, draft_max)| {
            let params = SpecParams {
                depth,
                draft_max,
                ..SpecParams::default()
            };
            let mut speculator = Speculator::new(params, None);
            if self.imposed() {
                let given = &self.args.spec_synth_rates[..];
                speculator.impose(if given.is_empty() {
                    &COMMON_RATES
                } else {
                    given
                });
            }
            speculator
        });
        Test {
            work,
            place: place_of(&work),
            speculator,
            seconds: Vec::new(),
            stats: Vec::new(),
            joules: 0.0,
        }
    }

    fn row(
        &self,
        test: &Test,
        params: SessionParams,
        n_depth: usize,
        begun: &str,
        a_token: usize,
        bandwidth: Option<f64>,
    ) -> Row {
        let files = self.engine.files();
        let backend = &self.engine.backends()[0];
        let (n_prompt, n_gen) = test.work.counts();
        let path = files.main().path().display().to_string();
        let mut row = Row {
            model_filename: path,
            model_type: self.model_type(),
            model_size: files.tensor_bytes() as u64,
            model_n_params: files
                .all()
                .flat_map(|f| f.tensors())
                .map(|t| t.n_elements())
                .sum(),
            n_batch: params.n_batch,
            n_threads: backend.n_threads(),
            type_k: params.kv.k.name().to_owned(),
            type_v: params.kv.v.name().to_owned(),
            n_prompt,
            n_gen,
            n_depth,
            test_time: begun.to_owned(),
            avg_ns: 0,
            stddev_ns: 0,
            avg_ts: 0.0,
            stddev_ts: 0.0,
            samples_ns: Vec::new(),
            samples_ts: Vec::new(),
            version: format!(
                "{} ggml {}",
                env!("CARGO_PKG_VERSION"),
                ggml_metal::ggml_version()
            ),
            device: backend.device().name().to_owned(),
            layout: self.engine.weight_bytes().layout().to_owned(),
            splits: 1,
            test: test.work.name(),
            spec: match test.work {
                Work::Generate(_, guesses) => Some(guesses.to_string()),
                _ => None,
            },
            acceptance: None,
            acceptance_imposed: false,
            tokens_per_pass: None,
            bytes_per_token: None,
            bandwidth: None,
            roofline: None,
            energy_j: None,
            peer_samples_ts: Vec::new(),
            peer_ratio: None,
        };
        row.set_samples(&test.seconds);
        if let Work::Decode(n) = test.work {
            // The states are read and written, and half of the test's own tokens lie in the context on average.
            let states = 2 * self.engine.config().state_bytes();
            let cells = (n_depth + n / 2) * a_token;
            let bytes = Reads::of_files(files).active_bytes() + (states + cells) as u64;
            row.bytes_per_token = Some(bytes);
            row.bandwidth = bandwidth;
            row.roofline = bandwidth.map(|b| bytes as f64 * row.avg_ts / b);
        }
        let all =
            |f: fn(&(u64, u64, u64, u64)) -> u64| test.stats.iter().map(f).sum::<u64>() as f64;
        if test.speculator.is_some() {
            let (drafted, accepted) = (all(|s| s.0), all(|s| s.1));
            row.acceptance = (drafted > 0.0).then(|| accepted / drafted);
            row.acceptance_imposed = drafted > 0.0 && self.imposed();
            row.tokens_per_pass = (all(|s| s.3) > 0.0).then(|| all(|s| s.2) / all(|s| s.3));
        }
        let tokens = (n_prompt + n_gen) * self.args.repetitions;
        row.energy_j = (test.joules > 0.0).then(|| test.joules / tokens as f64);
        row
    }

    fn model_type(&self) -> String {
        let file = self.engine.files().main();
        let name = &self.engine.config().name;
        let types = match file.value("general.file_type") {
            Some(ggml_metal::Value::Int(n)) => convert::recipe::FileType::ALL
                .into_iter()
                .find(|t| i128::from(t.number()) == n)
                .map(convert::recipe::FileType::name),
            _ => None,
        };
        match types {
            Some(types) => format!("{name} {types}"),
            None => name.clone(),
        }
    }

    fn sustained(&self, minutes: f64) -> Result<Outcome> {
        let params = SessionParams {
            n_ctx: sustained::CONTEXT,
            ..SessionParams::default()
        };
        let place = Place::new(Session::new(self.engine.clone(), params)?);
        sustained::run(
            place,
            minutes,
            self.args.output,
            &self.model_type(),
            self.cancel,
        )
    }
}

/// Which session a test runs in: 1 keeps the head's state.
fn place_of(work: &Work) -> usize {
    match work {
        Work::PromptWithHead(_) => 1,
        Work::Generate(_, guesses) => usize::from(*guesses != Guesses::Fixed(0)),
        _ => 0,
    }
}

fn bar(n: usize, depth: usize) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(n as u64), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{prefix}{msg:14} {wide_bar} {pos}/{len} {eta}")
    {
        bar.set_style(style);
    }
    if depth > 0 {
        bar.set_prefix(format!("depth {depth} "));
    }
    bar
}
