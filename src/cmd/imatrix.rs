//! `qrun imatrix`: observes a model on a text and writes its importance matrix.

use anyhow::{Context as _, Result};
use convert::output::check_apart;
use qrun::imatrix::collect;
use qrun::session::CancelToken;

use super::{Outcome, UsageError, model};
use crate::cli::ImatrixArgs;
use crate::report;

/// Chunk length where none is given.
const DEFAULT_CHUNK: usize = 512;
/// Longest chunk: it is one pass.
const MAX_CHUNK: usize = 4096;

/// Observes and writes. Ctrl-C ends it early with what there is.
///
/// # Errors
/// When the text is too short, the model cannot be computed, or the file cannot be written.
pub fn run(args: &ImatrixArgs) -> Result<Outcome> {
    let chunk_size = match args.model.ctx_size {
        0 => DEFAULT_CHUNK,
        n @ 2..=MAX_CHUNK => n,
        n => {
            return Err(
                UsageError(format!("`-c {n}`: chunks have 2 to {MAX_CHUNK} tokens")).into(),
            );
        }
    };
    let text = std::fs::read_to_string(&args.file)
        .with_context(|| format!("reading {}", args.file.display()))?;
    let needs = model::Needs {
        n_ctx: Some(chunk_size),
        observes: true,
        ..model::Needs::default()
    };
    let (engine, tokenizer) = model::load(&args.model, &needs)?;
    let files = engine.files().all().map(|f| f.path());
    check_apart(&args.output, files.chain([args.file.as_path()]))?;
    let mut tokens = tokenizer.encode(&text, false)?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    if let Some(bos) = bos {
        tokens.insert(0, bos);
    }
    if let Some(most) = args.chunks {
        tokens.truncate(chunk_size.saturating_mul(most as usize));
    }
    if !engine.mtp_status().on {
        let reason = &engine.mtp_status().reason;
        report::note(&format!("the draft head is not observed: {reason}"));
    }

    let cancel = CancelToken::default();
    let handler = cancel.clone();
    ctrlc::set_handler(move || {
        if handler.is_cancelled() {
            std::process::exit(130);
        }
        handler.cancel();
    })?;
    let bar = indicatif::ProgressBar::new((tokens.len() / chunk_size) as u64);
    let collected = collect(&engine, &tokens, chunk_size, bos, &mut |done| {
        bar.set_position(done as u64);
        !cancel.is_cancelled()
    });
    bar.finish_and_clear();
    let mut imatrix = collected.with_context(|| args.file.display().to_string())?;
    imatrix.datasets = vec![args.file.display().to_string()];
    imatrix.write(&args.output)?;

    // Experts that saw nothing weigh all columns alike.
    let experts = imatrix.entries.values().flat_map(|e| &e.counts);
    let unseen = experts.filter(|&&count| count == 0.0).count();
    if unseen > 0 {
        report::note(&format!(
            "{unseen} matrices of experts saw no token; a longer text reaches more of them"
        ));
    }
    report::note(&format!(
        "{}: {} weights over {} chunks of {chunk_size} tokens",
        args.output.display(),
        imatrix.entries.len(),
        imatrix.n_chunks
    ));
    Ok(if cancel.is_cancelled() {
        Outcome::Interrupted
    } else {
        Outcome::Done
    })
}
