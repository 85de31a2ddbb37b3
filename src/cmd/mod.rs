//! The commands: arguments in, engine calls, exit code out.

pub mod bench;
pub mod chat;
pub mod convert;
pub mod doctor;
pub mod family;
pub mod fit;
pub mod gguf;
pub mod imatrix;
pub mod inspect;
pub mod model;
pub mod perplexity;
pub mod quantize;
pub mod run;
pub mod tokens;
pub mod tune;
pub mod verify;
pub mod watch;

/// What a command ends with, besides an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All done.
    Done,
    /// The user interrupted it; what there was is out.
    Interrupted,
}

/// The user asked for something that makes no sense: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Prints the completion script for a shell.
///
/// # Errors
/// When stdout cannot be written.
pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<Outcome> {
    let mut command = <crate::cli::Cli as clap::CommandFactory>::command();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "qrun", &mut script);
    crate::report::out(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Done)
}

/// Prints the manual page.
///
/// # Errors
/// When stdout cannot be written.
pub fn man() -> anyhow::Result<Outcome> {
    let command = <crate::cli::Cli as clap::CommandFactory>::command();
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    crate::report::out(&String::from_utf8_lossy(&page))?;
    Ok(Outcome::Done)
}
