//! `qrun perplexity`: how well a model predicts a text, by llama.cpp's definition.
//!
//! The text is cut into windows of the context length; in each, the tokens of the second half are predicted from
//! everything before them in the window, and the result is `exp` of their mean negative log-probability.

use anyhow::{Context as _, Result, ensure};
use qrun::session::{CancelToken, Outputs, Session};
use serde_json::json;

use super::{Outcome, model};
use crate::cli::PerplexityArgs;
use crate::report;

/// Window length where none is given.
const DEFAULT_WINDOW: usize = 512;

/// Measures and prints the perplexity.
///
/// # Errors
/// When the text is shorter than two windows, or the model cannot be computed.
pub fn run(args: &PerplexityArgs) -> Result<Outcome> {
    let text = std::fs::read_to_string(&args.file)
        .with_context(|| format!("reading {}", args.file.display()))?;
    let mut params = model::session_params(&args.model)?;
    let window = match params.n_ctx {
        0 => DEFAULT_WINDOW,
        n => n,
    };
    params.n_ctx = window;
    let needs = model::Needs {
        n_ctx: Some(window),
        n_rows: window - window / 2,
        ..model::Needs::default()
    };
    let (engine, tokenizer) = model::load(&args.model, &needs)?;
    let mut tokens = tokenizer.encode(&text, false)?;
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    if let Some(bos) = bos {
        tokens.insert(0, bos);
    }
    ensure!(
        window >= 4 && tokens.len() >= 2 * window,
        "{}: {} tokens are too few for windows of {window}; give a text of {} or more, or a smaller -c",
        args.file.display(),
        tokens.len(),
        2 * window
    );

    let n_vocab = engine.config().n_vocab as usize;
    let mut session = Session::new(engine, params)?;
    let (first, n_windows) = (window / 2, tokens.len() / window);
    let bar = indicatif::ProgressBar::new(n_windows as u64);
    let (mut sum, mut squares, mut count) = (0.0f64, 0.0f64, 0usize);
    let mut log_probabilities = Vec::new();
    for chunk in tokens.chunks_exact(window) {
        let mut chunk = chunk.to_vec();
        if let Some(bos) = bos {
            chunk[0] = bos;
        }
        session.clear()?;
        let cancel = CancelToken::default();
        // The last token predicts nothing inside the window, but a pass of the whole window has the width that
        // llama.cpp's has, and so the same kernels.
        let logits = session.eval(&chunk, Outputs::From(first), &cancel)?;
        for (row, &next) in logits.chunks_exact(n_vocab).zip(&chunk[first + 1..]) {
            let log_probability = log_softmax(row, next);
            sum -= log_probability;
            squares += log_probability * log_probability;
            count += 1;
            if args.token_logprobs {
                log_probabilities.push(json!({"token": next, "logprob": log_probability}));
            }
        }
        bar.inc(1);
        bar.set_message(format!("{:.4}", (sum / count as f64).exp()));
    }
    bar.finish_and_clear();

    let mean = sum / count as f64;
    let perplexity = mean.exp();
    let variance = (squares / count as f64 - mean * mean).max(0.0);
    let error = perplexity * (variance / (count - 1).max(1) as f64).sqrt();
    if args.json {
        let mut object = json!({
            "perplexity": perplexity,
            "error": error,
            "tokens": count,
            "windows": n_windows,
            "window": window,
        });
        if args.token_logprobs {
            object["token_logprobs"] = json!(log_probabilities);
        }
        report::out(&format!("{object}\n"))?;
    } else {
        report::out(&format!(
            "{perplexity:.4} +/- {error:.4} ({count} tokens)\n"
        ))?;
    }
    Ok(Outcome::Done)
}

/// Natural logarithm of a token's probability.
pub(super) fn log_softmax(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&v| f64::from(v - max).exp()).sum();
    f64::from(logits[token as usize] - max) - sum.ln()
}
