//! The same tests by llama.cpp's own `llama-bench`.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use qrun::model::shapes::Synthetic;
use qrun::session::CancelToken;
use serde::Deserialize;

use super::row::{Row, mean_and_deviation};
use crate::cli::BenchArgs;
use crate::cmd::UsageError;
use crate::report;

/// A llama-bench with the arguments that stand for ours.
pub struct Peer {
    program: PathBuf,
    args: Vec<String>,
}

/// What we read of its results.
#[derive(Deserialize)]
pub struct PeerRow {
    n_batch: usize,
    n_threads: usize,
    type_k: String,
    type_v: String,
    n_prompt: usize,
    n_gen: usize,
    n_depth: usize,
    samples_ts: Vec<f64>,
}

impl Peer {
    /// Looks for the program, a path or a name on PATH.
    ///
    /// # Errors
    /// When it is not there, or the model is no file that it could read.
    pub fn find(program: &str, args: &BenchArgs) -> Result<Self> {
        let path = args.model.as_deref().unwrap_or("".as_ref());
        if Synthetic::parse(path)?.is_some() {
            return Err(UsageError(
                "--compare: llama-bench needs a file; synthetic models exist in memory only"
                    .to_owned(),
            )
            .into());
        }
        let named = PathBuf::from(program);
        let found = if program.contains(std::path::MAIN_SEPARATOR) {
            named.is_file().then_some(named)
        } else {
            std::env::var_os("PATH").and_then(|paths| {
                std::env::split_paths(&paths)
                    .map(|folder| folder.join(program))
                    .find(|file| file.is_file())
            })
        };
        let Some(found) = found else {
            bail!(
                "--compare: no `{program}` on PATH; build llama.cpp, or give the path with --compare=PATH"
            );
        };
        Ok(Self {
            program: found,
            args: arguments(args),
        })
    }

    /// Runs it once, with half of our repetitions.
    ///
    /// # Errors
    /// When it cannot be started, fails, or prints something else than its JSON.
    pub fn run(&self, cancel: &CancelToken) -> Result<Vec<PeerRow>> {
        report::note(&format!("running {}", self.program.display()));
        let name = self.program.display();
        let output = Command::new(&self.program)
            .args(&self.args)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .with_context(|| format!("starting {name}"))?;
        if cancel.is_cancelled() {
            bail!(qrun::session::EvalError::Cancelled);
        }
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            let last = errors.lines().rev().find(|l| !l.trim().is_empty());
            bail!(
                "{name} failed ({}): {}",
                output.status,
                ggml_metal::one_line(last.unwrap_or("it said nothing"))
            );
        }
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{name}: its output is not what `llama-bench -o json` prints"))
    }
}

fn arguments(args: &BenchArgs) -> Vec<String> {
    fn list<T: ToString>(list: &[T]) -> String {
        let texts: Vec<String> = list.iter().map(ToString::to_string).collect();
        texts.join(",")
    }
    let model = args.model.as_deref().unwrap_or("".as_ref());
    let mut all: Vec<(&str, String)> = vec![
        ("-m", model.display().to_string()),
        ("-p", list(&args.n_prompt)),
        ("-n", list(&args.n_gen)),
        ("-d", list(&args.n_depth)),
        ("-b", list(&args.batch_size)),
        ("-ctk", list(&args.cache_type_k)),
        ("-ctv", list(&args.cache_type_v)),
        ("-r", args.repetitions.div_ceil(2).to_string()),
        // Ours is always on.
        ("-fa", "1".to_owned()),
        ("-o", "json".to_owned()),
    ];
    if !args.threads.is_empty() {
        all.push(("-t", list(&args.threads)));
    }
    for (p, n) in &args.pg {
        all.push(("-pg", format!("{p},{n}")));
    }
    if args
        .device
        .as_deref()
        .is_some_and(|d| d.eq_ignore_ascii_case("cpu"))
    {
        all.push(("-ngl", "0".to_owned()));
    }
    all.into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect()
}

/// Adds the peer's samples to the rows of the same tests.
pub fn merge(rows: &mut [Row], before: &[PeerRow], after: &[PeerRow]) {
    for row in rows {
        // Its tests have neither speculation nor a head.
        if row.test.contains(' ') || row.test.starts_with("ttft") {
            continue;
        }
        let same = |peer: &&PeerRow| {
            (peer.n_prompt, peer.n_gen, peer.n_depth) == (row.n_prompt, row.n_gen, row.n_depth)
                && (peer.n_batch, peer.n_threads) == (row.n_batch, row.n_threads)
                && (&peer.type_k, &peer.type_v) == (&row.type_k, &row.type_v)
        };
        let samples: Vec<f64> = before
            .iter()
            .chain(after)
            .filter(same)
            .flat_map(|peer| peer.samples_ts.iter().copied())
            .collect();
        let (mean, _) = mean_and_deviation(&samples);
        if mean > 0.0 {
            row.peer_ratio = Some(row.avg_ts / mean);
            row.peer_samples_ts = samples;
        }
    }
}
