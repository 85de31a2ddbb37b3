//! `qrun watch`: the figures of a qrun that runs, on the screen or as JSON lines.

#[cfg(unix)]
mod follow;
#[cfg(unix)]
mod screen;

use anyhow::Result;

use super::Outcome;
use crate::cli::WatchArgs;

/// There is nothing to watch through.
///
/// # Errors
/// Always.
#[cfg(not(unix))]
pub fn run(_args: &WatchArgs) -> Result<Outcome> {
    anyhow::bail!("`qrun watch` needs Unix sockets, which this system does not have")
}

/// Watches the run that the arguments name.
///
/// # Errors
/// When there is no such run, it cannot be told which is meant, or the terminal refuses.
#[cfg(unix)]
pub fn run(args: &WatchArgs) -> Result<Outcome> {
    use std::io::IsTerminal as _;

    use anyhow::bail;

    use super::UsageError;
    use crate::live::folder;
    use crate::report;

    let dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !dumb;
    let mut runs = folder::runs()?;
    if runs.is_empty() {
        bail!("no qrun of yours is running");
    }
    let chosen = match args.pid {
        Some(pid) => match runs.iter().position(|run| run.pid == pid) {
            Some(at) => Some(at),
            None => {
                let pids: Vec<_> = runs.iter().map(|run| run.pid.to_string()).collect();
                bail!(
                    "no qrun of yours has the process number {pid}; there is {}",
                    pids.join(", ")
                );
            }
        },
        None if args.last || runs.len() == 1 => Some(0),
        None => None,
    };
    match chosen {
        Some(at) if args.json => print(runs.swap_remove(at)),
        Some(at) if terminal => screen::run(runs, Some(at)),
        None if terminal && !args.json => screen::run(runs, None),
        Some(_) => Err(UsageError(
            "the screen needs a terminal; --json prints the figures as lines".to_owned(),
        )
        .into()),
        None => {
            for run in &runs {
                let hello = run.hello.clone().unwrap_or_default();
                report::note(&format!("{}\t{}\t{}", run.pid, hello.model, hello.command));
            }
            Err(UsageError(
                "several qruns are running; name one by its process number, or the newest by --last"
                    .to_owned(),
            )
            .into())
        }
    }
}

/// Prints the lines as they come.
#[cfg(unix)]
fn print(run: crate::live::folder::Found) -> Result<Outcome> {
    use std::io::BufRead as _;

    use anyhow::{Context as _, bail};

    use crate::live::line::Line;
    use crate::report;

    if let Some(hello) = run.hello {
        report::out(&format!(
            "{}\n",
            serde_json::to_string(&Line::Hello(hello))?
        ))?;
    }
    let mut ended = false;
    for line in run.lines.lines() {
        let line = line.with_context(|| format!("reading from the run {}", run.pid))?;
        report::out(&format!("{line}\n"))?;
        ended = matches!(serde_json::from_str(&line), Ok(Line::End(_)));
    }
    if !ended {
        bail!("the run {} went away without a last line", run.pid);
    }
    Ok(Outcome::Done)
}
