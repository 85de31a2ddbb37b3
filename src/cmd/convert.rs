//! `qrun convert`: a Hugging Face checkpoint to a GGUF file, with the draft head kept and shown to work.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use convert::convert::{Options, Plan};
use convert::map::Mtp;
use convert::output::Interrupted;
use convert::recipe::FileType;
use qrun::engine::{Engine, EngineParams};
use qrun::fit::{Demand, Offer, estimate, shortage};
use qrun::memory::Machine;
use qrun::session::{CancelToken, EvalError, Session, SessionParams};

use super::{Outcome, UsageError, model};
use crate::cli::ConvertArgs;
use crate::report;

/// What `--verify` reads: plain enough for a model of any size.
const VERIFY_TEXT: &str = "\
Once upon a time there was a little girl who lived with her father in a small house near the sea. Every morning she \
went down to the shore and looked for shells. One day she found a shell that was larger than all the others. She put \
it to her ear and heard the sound of the waves. \"Father,\" she said, \"there is a whole sea in this shell.\" Her father \
smiled and said, \"Then we must take good care of it.\" That night the wind was strong and the rain came down. The \
little girl could not sleep. She took the shell and held it to her ear again. The sound was soft and slow, and soon \
she was asleep. In the morning the sun was shining and the sea was quiet. The capital of France is Paris. Two and two \
make four, and four and four make eight. The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, \
Saturday and Sunday.";

/// Converts what the arguments name.
///
/// # Errors
/// When arguments make no sense, the checkpoint cannot be used, the file cannot be written, or the result does not
/// pass `--verify`.
pub fn run(args: &ConvertArgs) -> Result<Outcome> {
    let plan = Plan::new(&args.input, options(args)?)?;
    for note in plan.notes() {
        report::note(note);
    }
    let Some(output) = &args.output else {
        print_plan(&plan)?;
        return Ok(Outcome::Done);
    };
    if args.dry_run {
        print_plan(&plan)?;
        for (path, tensors) in plan.files(output) {
            report::note(&format!(
                "would write {}: {} tensors",
                path.display(),
                tensors.len()
            ));
        }
        return Ok(Outcome::Done);
    }

    let cancel = CancelToken::default();
    let stop = cancel.clone();
    // However often it is pressed, the temporary file is removed first, which takes a moment.
    ctrlc::set_handler(move || stop.cancel()).context("catching Ctrl-C")?;
    let start = Instant::now();
    let bar = model::progress_bar("converting");
    let written = plan.write(output, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        !cancel.is_cancelled()
    });
    bar.finish_and_clear();
    match written {
        Err(error) if error.is::<Interrupted>() => {
            report::note(&error.to_string());
            return Ok(Outcome::Interrupted);
        }
        result => result?,
    }
    let files = plan.files(output);
    let first = &files[0].0;
    let more = match files.len() {
        1 => String::new(),
        n => format!(" and {} more", n - 1),
    };
    report::note(&format!(
        "wrote {}{more}: {} tensors, {}, {} in {:.1} s",
        first.display(),
        plan.tensors().count(),
        plan.file_type().name(),
        report::bytes(plan.bytes() as usize),
        start.elapsed().as_secs_f64()
    ));
    if args.verify {
        return verify(first, args, &cancel);
    }
    Ok(Outcome::Done)
}

fn options(args: &ConvertArgs) -> Result<Options> {
    let file_type = match args.file_type.as_deref() {
        None | Some("auto") => None,
        Some(name) => Some(FileType::from_name(name).ok_or_else(|| {
            let names: Vec<String> = FileType::ALL
                .iter()
                .map(|t| t.name().to_lowercase())
                .collect();
            UsageError(format!(
                "`--type {name}`: expected auto or one of {}",
                names.join(", ")
            ))
        })?),
    };
    Ok(Options {
        file_type,
        mtp: match (args.mtp_only, args.no_mtp) {
            (true, _) => Mtp::Only,
            (_, true) => Mtp::Drop,
            _ => Mtp::Keep,
        },
        split_max_size: args.split_max_size,
    })
}

fn print_plan(plan: &Plan) -> Result<()> {
    let mut lines = String::new();
    for (output, dtype) in plan.tensors() {
        let dims: Vec<String> = output.dims.iter().map(ToString::to_string).collect();
        lines.push_str(&format!(
            "{:<36} {:<5} {}\n",
            output.name,
            dtype.name(),
            dims.join(" x ")
        ));
    }
    lines.push_str(&format!(
        "{} tensors, {}, {}\n",
        plan.tensors().count(),
        plan.file_type().name(),
        report::bytes(plan.bytes() as usize)
    ));
    report::out(&lines)?;
    Ok(())
}

/// Loads the result, reads a text with it, and looks at what its head would have drafted.
fn verify(path: &Path, args: &ConvertArgs, cancel: &CancelToken) -> Result<Outcome> {
    let params = EngineParams {
        device: args.device.clone(),
        n_threads: args.threads.map(usize::from),
        ..EngineParams::default()
    };
    let planned = Arc::new(Engine::plan(path, &params).context("verifying")?);
    let tokens = model::tokenizer(path)?.encode(VERIFY_TEXT, false)?;
    ensure_fits(path, &planned, tokens.len())?;
    let engine = planned.load_planned(&mut |_, _| {}).context("verifying")?;
    match measure(&engine, &tokens, cancel) {
        Ok(measured) => {
            report::note(&format!(
                "verified: perplexity {:.2} on {} tokens",
                measured.perplexity,
                tokens.len()
            ));
            let Some((accepted, drafted)) = measured.accepted else {
                report::note(&format!(
                    "verified: no drafts, because {}",
                    engine.mtp_status().reason
                ));
                return Ok(Outcome::Done);
            };
            report::note(&format!(
                "verified: the model would accept {accepted} of {drafted} drafts of the head ({:.0} %)",
                100.0 * accepted as f64 / drafted.max(1) as f64
            ));
            if accepted == 0 {
                bail!(
                    "{}: its draft head gets nothing right, so it was damaged before or in the conversion; the file \
                     is kept, but drafting with it would only cost time",
                    path.display()
                );
            }
            Ok(Outcome::Done)
        }
        Err(EvalError::Cancelled) => Ok(Outcome::Interrupted),
        Err(error) => Err(error).with_context(|| format!("verifying {}", path.display())),
    }
}

/// Refuses to read `n_tokens` tokens with a model for which the machine has not the memory.
fn ensure_fits(path: &Path, planned: &Arc<Engine>, n_tokens: usize) -> Result<()> {
    let Some(reading) = Machine::new().and_then(|mut machine| machine.read()) else {
        return Ok(());
    };
    let demand = Demand {
        session: session_params(planned, n_tokens),
        // The head's rows, too.
        n_rows: 2 * n_tokens,
        n_sessions: 1,
        observes: false,
    };
    let estimate = estimate(planned, &demand, n_tokens)?;
    if let Some(short) = shortage(&estimate, &Offer::of(planned, reading)) {
        bail!(
            "{} is written, but not verified: that takes {}, and {} of {} can be had; `qrun perplexity` reads a \
             text with it where there is more",
            path.display(),
            report::bytes(short.takes as usize),
            report::bytes(short.has as usize),
            short.of
        );
    }
    Ok(())
}

fn session_params(engine: &Engine, n_tokens: usize) -> SessionParams {
    SessionParams {
        n_ctx: n_tokens,
        mtp: engine.mtp_status().on,
        ..SessionParams::default()
    }
}

struct Measured {
    perplexity: f64,
    /// Drafts that are the trunk's own best token, and all; none without a head.
    accepted: Option<(usize, usize)>,
}

fn measure(
    engine: &Arc<Engine>,
    tokens: &[u32],
    cancel: &CancelToken,
) -> Result<Measured, EvalError> {
    let n_vocab = engine.config().n_vocab as usize;
    let params = session_params(engine, tokens.len());
    let mtp = params.mtp;
    let mut session = Session::new(engine.clone(), params)?;
    let (logits, head) = if mtp {
        session.eval_with_head(tokens, cancel)?
    } else {
        (
            session.eval(tokens, qrun::session::Outputs::All, cancel)?,
            &[] as &[f32],
        )
    };
    let rows = || logits.chunks_exact(n_vocab);
    let sum: f64 = rows()
        .zip(tokens.iter().skip(1))
        .map(|(row, &next)| -super::perplexity::log_softmax(row, next))
        .sum();
    // Row i of the head guesses what row i of the trunk says, from one token less; row 0 means nothing.
    let guesses = head.chunks_exact(n_vocab).zip(rows()).skip(1);
    let accepted = guesses
        .filter(|(guess, truth)| best(guess) == best(truth))
        .count();
    Ok(Measured {
        perplexity: (sum / tokens.len().saturating_sub(1).max(1) as f64).exp(),
        accepted: mtp.then_some((accepted, tokens.len().saturating_sub(1))),
    })
}

fn best(row: &[f32]) -> usize {
    let better = |best: usize, i: usize| if row[i] > row[best] { i } else { best };
    (0..row.len()).fold(0, better)
}
