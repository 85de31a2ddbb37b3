//! The command line: parses, dispatches, reports the error, and ends with a code that means something.

#![forbid(unsafe_code)]

mod cli;
mod cmd;
mod live;
mod report;

use std::process::ExitCode;

use clap::Parser as _;

use cli::{Cli, Command};
use cmd::{Outcome, UsageError};

fn main() -> ExitCode {
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) => {
            report::note(&format!("error: {}", report::error_line(&error)));
            return ExitCode::from(1);
        }
    };
    let verbose = match &cli.command {
        Some(Command::Perplexity(args)) => args.model.verbose,
        Some(Command::Tune(args)) => args.model.verbose,
        Some(Command::Bench(args)) => args.verbose,
        Some(Command::Verify(args)) => args.model.verbose,
        Some(Command::Imatrix(args)) => args.model.verbose,
        Some(_) => false,
        None => cli.run.model.verbose,
    };
    if verbose {
        ggml_metal::set_log_sink(|_, line| report::note(line));
    }
    let result = match &cli.command {
        None => cmd::run::run(&cli.run),
        Some(Command::Chat(args)) => cmd::chat::run(args),
        Some(Command::Convert(args)) => cmd::convert::run(args),
        Some(Command::Inspect(args)) => cmd::inspect::run(args),
        Some(Command::Fit(args)) => cmd::family::run(args),
        Some(Command::Doctor(args)) => cmd::doctor::run(args),
        Some(Command::Tokenize(args)) => cmd::tokens::tokenize(args),
        Some(Command::Detokenize(args)) => cmd::tokens::detokenize(args),
        Some(Command::Perplexity(args)) => cmd::perplexity::run(args),
        Some(Command::Tune(args)) => cmd::tune::run(args),
        Some(Command::Bench(args)) => cmd::bench::run(args),
        Some(Command::Verify(args)) => cmd::verify::run(args),
        Some(Command::Quantize(args)) => cmd::quantize::run(args),
        Some(Command::Gguf(command)) => cmd::gguf::run(command),
        Some(Command::Imatrix(args)) => cmd::imatrix::run(args),
        Some(Command::Watch(args)) => cmd::watch::run(args),
        Some(Command::Completions { shell }) => cmd::completions(*shell),
        Some(Command::Man) => cmd::man(),
    };
    live::publish::end(match &result {
        Ok(Outcome::Done) => "finished",
        Ok(Outcome::Interrupted) => "interrupted",
        Err(_) => "failed",
    });
    match result {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Interrupted) => ExitCode::from(130),
        Err(error) if report::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report::note(&format!("error: {}", report::error_line(&error)));
            if verbose {
                for cause in error.chain().skip(1) {
                    report::note(&format!("  caused by: {cause}"));
                }
            }
            let usage = error.downcast_ref::<UsageError>().is_some();
            ExitCode::from(if usage { 2 } else { 1 })
        }
    }
}

/// Arguments; for the plain command over the defaults of the configuration file.
fn parse() -> anyhow::Result<Cli> {
    let given = cli::expand(std::env::args_os());
    let cli = Cli::parse_from(&given);
    if cli.command.is_some() {
        return Ok(cli);
    }
    let mut args = cli::config_args()?;
    if args.is_empty() {
        return Ok(cli);
    }
    args.splice(0..0, given.first().cloned());
    args.extend(given.into_iter().skip(1));
    Ok(Cli::parse_from(args))
}
