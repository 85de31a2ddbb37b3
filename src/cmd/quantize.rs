//! `qrun quantize`: the arguments checked, the plan made and carried out, and what came of it.

use std::path::Path;

use anyhow::Result;
use convert::imatrix::Imatrix;
use convert::output::Interrupted;
use convert::parts;
use convert::quantize::{Options, Plan, by_type};
use convert::recipe::{self, FileType, Overrides};
use ggml_metal::{DType, one_line, performance_cores};
use qrun::session::CancelToken;

use super::{Outcome, UsageError, model};
use crate::cli::QuantizeArgs;
use crate::report;

/// Quantizes a file, or with `--dry-run` prints what would be done.
///
/// # Errors
/// When an argument or a file is unusable, or the result cannot be written.
pub fn run(args: &QuantizeArgs) -> Result<Outcome> {
    let options = options(args)?;
    let files = parts::open(&args.input)?;
    let plan = Plan::new(&files, &options)?;
    if args.dry_run {
        report::out(&table(&plan))?;
        return Ok(Outcome::Done);
    }
    match plan.n_misfits() {
        0 => {}
        n => report::note(&format!(
            "{n} matrices have rows that the blocks of {} do not divide, and get a related type (see --dry-run)",
            options.file_type.base()
        )),
    }
    let outcome = write("quantizing", |progress| plan.write(&args.output, progress))?;
    if outcome == Outcome::Done {
        report::note(&summary(&plan, &args.output));
    }
    Ok(outcome)
}

/// Runs work that writes a file, with a bar on terminals, until Ctrl-C stops it.
///
/// # Errors
/// What the work ends with.
pub fn write(
    what: &'static str,
    work: impl FnOnce(&mut dyn FnMut(u64, u64) -> bool) -> Result<()>,
) -> Result<Outcome> {
    let cancel = CancelToken::default();
    let handler = cancel.clone();
    // Only asks for the end, however often: an end in the middle would leave half a file behind.
    ctrlc::set_handler(move || handler.cancel())?;
    let bar = model::progress_bar(what);
    let result = work(&mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        !cancel.is_cancelled()
    });
    bar.finish_and_clear();
    match result {
        Ok(()) => Ok(Outcome::Done),
        Err(error) if error.downcast_ref::<Interrupted>().is_some() => {
            report::note(&error.to_string());
            Ok(Outcome::Interrupted)
        }
        Err(error) => Err(error),
    }
}

fn options(args: &QuantizeArgs) -> Result<Options> {
    let Some(file_type) = FileType::from_name(&args.file_type) else {
        let names: Vec<_> = FileType::ALL.iter().map(|t| t.name()).collect();
        return Err(UsageError(format!(
            "`{}`: expected one of {}",
            args.file_type,
            names.join(", ")
        ))
        .into());
    };
    let dtype = |flag: &str, name: &Option<String>| match name {
        Some(name) => tensor_type(flag, name).map(Some),
        None => Ok(None),
    };
    let mut tensors = Vec::new();
    for argument in &args.tensor_type {
        // The pattern may hold equals signs, a type holds none.
        let Some((pattern, name)) = argument.rsplit_once('=') else {
            return Err(UsageError(format!(
                "`--tensor-type {argument}`: expected REGEX=TYPE, such as attn_q=q8_0"
            ))
            .into());
        };
        let pattern = recipe::pattern(pattern)
            .map_err(|reason| UsageError(format!("`--tensor-type {argument}`: {reason}")))?;
        tensors.push((pattern, tensor_type("--tensor-type", name)?));
    }
    let imatrix = match &args.imatrix {
        Some(path) => Some((path.display().to_string(), Imatrix::read(path)?)),
        None => None,
    };
    Ok(Options {
        file_type,
        overrides: Overrides {
            tensors,
            output: dtype("--output-tensor-type", &args.output_tensor_type)?,
            token_embedding: dtype("--token-embedding-type", &args.token_embedding_type)?,
            mtp: dtype("--mtp-type", &args.mtp_type)?,
        },
        imatrix,
        allow_requantize: args.allow_requantize,
        n_threads: args.threads.map_or_else(performance_cores, usize::from),
    })
}

fn tensor_type(flag: &str, name: &str) -> Result<DType> {
    DType::from_name(name)
        .filter(|t| t.is_weight())
        .ok_or_else(|| {
            UsageError(format!(
                "`{flag} {name}`: expected a type of a tensor, such as f16, q8_0, q6_K, q4_K or iq4_nl"
            ))
            .into()
        })
}

/// The plan as a table: name, shape, type before and after, bytes after.
fn table(plan: &Plan) -> String {
    let mut out = String::new();
    for step in plan.steps() {
        let shape: Vec<_> = step.tensor.dims().iter().map(i64::to_string).collect();
        out += &format!(
            "{:<42} {:<18} {:>5} -> {:<7} {:>12}\n",
            one_line(&step.tensor.name),
            shape.join("x"),
            step.tensor.dtype,
            step.to,
            step.bytes()
        );
    }
    let (before, after) = plan.bytes();
    out += &format!(
        "{} -> {}, {:.2} bits per weight\n",
        report::bytes(before),
        report::bytes(after),
        bits_per_weight(plan)
    );
    out
}

fn summary(plan: &Plan, path: &Path) -> String {
    let (before, after) = plan.bytes();
    let types: Vec<_> = by_type(plan.steps())
        .into_iter()
        .map(|(name, (n, _))| format!("{n} {name}"))
        .collect();
    format!(
        "{}: {} from {}, {:.2} bits per weight ({})",
        path.display(),
        report::bytes(after),
        report::bytes(before),
        bits_per_weight(plan),
        types.join(", ")
    )
}

fn bits_per_weight(plan: &Plan) -> f64 {
    let n: u64 = plan.steps().iter().map(|s| s.tensor.n_elements()).sum();
    8.0 * plan.bytes().1 as f64 / n.max(1) as f64
}
