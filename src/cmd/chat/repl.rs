//! The conversation line by line, where there is no terminal to draw on.

use std::io::{BufRead as _, IsTerminal as _};

use anyhow::{Context as _, Result, bail};
use qrun::conversation;
use qrun::session::CancelToken;

use super::Started;
use super::worker::{News, Order, Question};
use crate::cli::ChatArgs;
use crate::cmd::{Outcome, model};
use crate::report;

/// Reads a question a line and prints the answers; `/quit` or the end of the input ends it.
///
/// # Errors
/// When the model cannot be loaded or computed, or the output cannot be written.
pub fn run(args: &ChatArgs) -> Result<Outcome> {
    let mut args = args.clone();
    args.model.model = Some(model::path(args.model.model.as_deref())?);
    let Started {
        folder,
        conversation: mut chat,
        worker,
    } = Started::new(&args)?;
    let cancel = CancelToken::default();
    crate::cmd::run::install_interrupt(&cancel)?;
    loop {
        match worker.news.recv().context("the model's thread has ended")? {
            News::Loaded(_) => break,
            News::NotLoaded(error) => bail!("{error}"),
            News::Notice(text) => report::note(&text),
            _ => {}
        }
    }
    let asks = std::io::stdin().is_terminal();
    for line in prompt_lines(asks) {
        let line = line.context("reading stdin")?;
        let line = line.trim();
        match line {
            "" => continue,
            "/quit" => break,
            _ => {}
        }
        let stored = conversation::Message {
            role: "user".to_owned(),
            content: line.to_owned(),
            reasoning: String::new(),
            partial: false,
        };
        chat.messages.push(stored.clone());
        match &folder {
            Some(folder) if chat.name().is_empty() => chat.keep(folder)?,
            _ => chat.append(&stored)?,
        }
        let question = Question {
            messages: chat.as_messages(),
            think: match (args.think, args.no_think) {
                (true, _) => Some(true),
                (_, true) => Some(false),
                _ => None,
            },
            sampling: args.sampling.clone(),
            cancel: cancel.clone(),
            end_thinking: CancelToken::default(),
        };
        worker.order(Order::Answer(Box::new(question)))?;
        loop {
            match worker.news.recv().context("the model's thread has ended")? {
                News::Notice(text) => report::note(&text),
                News::Text(text) => report::out(&text)?,
                News::Done(ending) => {
                    report::out("\n")?;
                    chat.messages.push(conversation::Message {
                        role: "assistant".to_owned(),
                        content: ending.text,
                        reasoning: ending.reasoning,
                        partial: cancel.is_cancelled(),
                    });
                    chat.write()?;
                    break;
                }
                News::Failed(error) => bail!("{error}"),
                _ => {}
            }
        }
        if cancel.is_cancelled() {
            worker.finish();
            return Ok(Outcome::Interrupted);
        }
    }
    worker.finish();
    Ok(Outcome::Done)
}

/// The lines of stdin, each asked for where a person types them.
fn prompt_lines(asks: bool) -> impl Iterator<Item = std::io::Result<String>> {
    let mut lines = std::io::stdin().lock().lines();
    std::iter::from_fn(move || {
        if asks {
            report::note_part("> ");
        }
        lines.next()
    })
}
