//! `qrun tokenize` and `qrun detokenize`.

use std::io::Read;

use anyhow::{Context as _, Result};

use super::{Outcome, UsageError, model};
use crate::cli::{DetokenizeArgs, TokenizeArgs};
use crate::report;

/// Prints the ids of a text: one a line with the token's text, or a JSON array.
///
/// # Errors
/// When the file has no usable tokenizer, or stdin is not text.
pub fn tokenize(args: &TokenizeArgs) -> Result<Outcome> {
    let tokenizer = model::tokenizer(&model::path(args.model.as_deref())?)?;
    let text = match args.text.as_deref() {
        None | Some("-") => stdin()?,
        Some(text) => text.to_owned(),
    };
    let ids = tokenizer.encode(&text, !args.no_parse_special)?;
    if args.json {
        report::out(&format!("{}\n", serde_json::to_string(&ids)?))?;
    } else {
        for id in ids {
            let token = String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
            report::out(&format!("{id}\t{}\n", token.escape_debug()))?;
        }
    }
    Ok(Outcome::Done)
}

/// Prints the text of ids.
///
/// # Errors
/// When an id is not a number of the vocabulary.
pub fn detokenize(args: &DetokenizeArgs) -> Result<Outcome> {
    let tokenizer = model::tokenizer(&model::path(args.model.as_deref())?)?;
    let text = if args.ids.is_empty() {
        stdin()?
    } else {
        args.ids.join(" ")
    };
    let words = text.split(|c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']'));
    let mut ids = Vec::new();
    for word in words.filter(|w| !w.is_empty()) {
        let id = word
            .parse::<u32>()
            .ok()
            .filter(|&id| (id as usize) < tokenizer.n_vocab());
        ids.push(id.ok_or_else(|| {
            UsageError(format!(
                "`{word}` is not a token id: expected a number below {}",
                tokenizer.n_vocab()
            ))
        })?);
    }
    report::out(&format!("{}\n", tokenizer.decode(&ids)))?;
    Ok(Outcome::Done)
}

fn stdin() -> Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .read_to_string(&mut text)
        .context("reading stdin")?;
    Ok(text)
}
