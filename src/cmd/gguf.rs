//! `qrun gguf`: split, merge and edit GGUF files.

use anyhow::Result;
use convert::edit::{Change, Edited, edit, parse};
use convert::parts;
use convert::split::{Limit, merge, parse_size, plan, split};
use ggml_metal::Gguf;

use super::quantize::write;
use super::{Outcome, UsageError};
use crate::cli::{GgufCommand, MergeArgs, SetArgs, SplitArgs};
use crate::report;

/// llama.cpp's default.
const DEFAULT_TENSORS: u32 = 128;

/// Runs one of the commands.
///
/// # Errors
/// When an argument or a file is unusable, or the result cannot be written.
pub fn run(command: &GgufCommand) -> Result<Outcome> {
    match command {
        GgufCommand::Split(args) => run_split(args),
        GgufCommand::Merge(args) => run_merge(args),
        GgufCommand::Set(args) => run_set(args),
    }
}

fn run_split(args: &SplitArgs) -> Result<Outcome> {
    let limit = match &args.split_max_size {
        Some(text) => Limit::Bytes(parse_size(text).ok_or_else(|| {
            UsageError(format!(
                "`--split-max-size {text}`: expected a number with K, M or G, such as 4G"
            ))
        })?),
        None => Limit::Tensors(args.split_max_tensors.unwrap_or(DEFAULT_TENSORS) as usize),
    };
    let file = Gguf::open(&args.input)?;
    if args.dry_run {
        for (name, range) in plan(&file, &args.output, limit)? {
            let tensors = &file.tensors()[range];
            report::out(&format!(
                "{}\t{} tensors\t{}\n",
                name.display(),
                tensors.len(),
                report::bytes(tensors.iter().map(|t| t.bytes).sum())
            ))?;
        }
        return Ok(Outcome::Done);
    }
    let mut names = Vec::new();
    let outcome = write("splitting", |progress| {
        names = split(&file, &args.output, limit, progress)?;
        Ok(())
    })?;
    if let [first, .., last] = names.as_slice() {
        report::note(&format!(
            "{} parts, {} to {}",
            names.len(),
            first.display(),
            last.display()
        ));
    }
    Ok(outcome)
}

fn run_merge(args: &MergeArgs) -> Result<Outcome> {
    let files = parts::open(&args.input)?;
    let outcome = write("merging", |progress| merge(&files, &args.output, progress))?;
    if outcome == Outcome::Done {
        let n = files.len();
        report::note(&format!("{}: made of {n} parts", args.output.display()));
    }
    Ok(outcome)
}

fn run_set(args: &SetArgs) -> Result<Outcome> {
    let file = Gguf::open(&args.file)?;
    let mut changes: Vec<Change> = args.remove.iter().cloned().map(Change::Remove).collect();
    for text in &args.set {
        changes.push(parse(text, &file).map_err(|error| UsageError(error.to_string()))?);
    }
    let mut edited = None;
    let outcome = write("copying", |progress| {
        edited = Some(edit(&file, &changes, args.output.as_deref(), progress)?);
        Ok(())
    })?;
    let path = args.output.as_ref().unwrap_or(&args.file).display();
    match edited {
        Some(Edited::InPlace) => report::note(&format!("{path}: changed in place")),
        Some(Edited::Anew) => report::note(&format!("{path}: written anew")),
        None => {}
    }
    Ok(outcome)
}
