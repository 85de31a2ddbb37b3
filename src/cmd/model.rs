//! Finding and loading the model that the arguments name.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use anyhow::{Context as _, Result};
use ggml_metal::{DType, DeviceKind, Gguf, Repack, devices};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use qrun::engine::{Engine, EngineParams};
use qrun::memory;
use qrun::model::ModelFiles;
use qrun::model::forward::DraftVocab;
use qrun::model::shapes::Synthetic;
use qrun::session::SessionParams;
use qrun::speculate::{Costs, Depth, SpecParams};
use qrun::state::{KV_TYPES, KvTypes};
use qrun::tokenizer::Tokenizer;
use qrun::tune::{TuneKey, TuneRecord};
use qrun::vocab;

use super::UsageError;
use crate::cli::{DraftVocabSize, ModelArgs, Spec, SpecArgs};
use crate::report;

const DEMO: &str = "models/demo-Q4_K_M.gguf";

/// The file that is meant: the one given (by flag or `QRUN_MODEL`), else the demo model beside the program or in
/// the repository that it was built in.
///
/// # Errors
/// When there is neither.
pub fn path(given: Option<&Path>) -> Result<PathBuf> {
    let path = path_quietly(given)?;
    if given.is_none() {
        report::note(&format!(
            "using the demo model {} (choose another with -m)",
            path.display()
        ));
    }
    Ok(path)
}

/// As [`path`], without a word about it.
///
/// # Errors
/// See [`path`].
pub fn path_quietly(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let exe = std::env::current_exe().context("finding the program's own folder")?;
    let exe = exe.canonicalize().unwrap_or(exe);
    let found = exe
        .ancestors()
        .skip(1)
        .take(4)
        .map(|dir| dir.join(DEMO))
        .find(|p| p.is_file());
    let Some(path) = found else {
        return Err(UsageError(
            "no model: name a GGUF file with `-m FILE` or in QRUN_MODEL (the demo model comes with the \
             repository, not with an installed program)"
                .to_owned(),
        )
        .into());
    };
    Ok(path)
}

/// What a command will do with a model, so that it can be seen before loading whether the machine has the memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Needs {
    /// The most tokens that it guesses before a pass.
    pub n_guesses: usize,
    /// It guesses without a draft head too.
    pub guesses_headless: bool,
    /// The context of its sessions, where that is not the one of the arguments.
    pub n_ctx: Option<usize>,
    /// Rows of logits that it holds at once, if more than one.
    pub n_rows: usize,
    /// Sessions that it runs, if more than one.
    pub n_sessions: usize,
    /// It observes the inputs of all weights in passes of the whole context.
    pub observes: bool,
}

impl Needs {
    /// One session that guesses like that.
    pub fn of(spec: &SpecArgs) -> Self {
        Self {
            n_guesses: usize::from(match spec.spec {
                Spec::Auto => spec.draft_max,
                Spec::Fixed(n) => n,
            }),
            guesses_headless: spec.spec_ngram > 0,
            ..Self::default()
        }
    }
}

/// Loads the model, and builds its tokenizer meanwhile.
///
/// # Errors
/// When either fails, or the machine has not the memory.
pub fn load(args: &ModelArgs, needs: &Needs) -> Result<(Arc<Engine>, Tokenizer)> {
    let path = path(args.model.as_deref())?;
    // Mapped weights need no copy, and so no bar.
    let mut bar = None;
    let loaded = load_from(&path, args, needs, &mut report::note, &mut |done, total| {
        let bar = bar.get_or_insert_with(|| progress_bar("loading"));
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    loaded
}

/// As [`load`], but `progress` is told the share that is done, `say` what is to be known, and nothing is printed.
///
/// # Errors
/// See [`load`].
pub fn load_quietly(
    args: &ModelArgs,
    needs: &Needs,
    say: &mut dyn FnMut(&str),
    progress: &mut dyn FnMut(f32),
) -> Result<(Arc<Engine>, Tokenizer)> {
    let path = path_quietly(args.model.as_deref())?;
    load_from(&path, args, needs, say, &mut |done, total| {
        progress(done as f32 / total.max(1) as f32);
    })
}

/// How to load under these arguments.
pub fn engine_params(args: &ModelArgs) -> EngineParams {
    EngineParams {
        device: args.device.clone(),
        n_threads: args.threads.map(usize::from),
        repack: if args.repack {
            Repack::Beside
        } else {
            Repack::Never
        },
        mtp: args.mtp.clone(),
    }
}

fn load_from(
    path: &Path,
    args: &ModelArgs,
    needs: &Needs,
    say: &mut dyn FnMut(&str),
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(Arc<Engine>, Tokenizer)> {
    let params = engine_params(args);
    // What cannot be looked at is told of by those who open it.
    if let Ok(file) = path.metadata() {
        memory::check_address_space(file.len())
            .with_context(|| format!("{} is not loaded", path.display()))?;
    }
    thread::scope(|scope| {
        let tokenizer = scope.spawn(|| tokenizer(path));
        let engine = Engine::plan(path, &params).and_then(|planned| {
            let planned = super::fit::governed(path, planned, args, needs, say)?;
            planned.load_planned(progress)
        });
        // An engine that cannot be loaded is the better message: the tokenizer reads the same file.
        let engine = engine?;
        match tokenizer.join() {
            Ok(tokenizer) => Ok((engine, tokenizer?)),
            Err(_) => anyhow::bail!("{}: building the tokenizer failed", path.display()),
        }
    })
}

/// The tokenizer of a GGUF file.
///
/// # Errors
/// When the file or its tokenizer is unusable.
pub fn tokenizer(path: &Path) -> Result<Tokenizer> {
    if Synthetic::parse(path)?.is_some() {
        return vocab::tokenizer(ModelFiles::outline(path, None)?.main());
    }
    let file = Gguf::open(path)?;
    // Of a split model only the first part has the vocabulary.
    let files;
    let file =
        if file.value("tokenizer.ggml.model").is_none() && file.value("split.count").is_some() {
            files = ModelFiles::open(path, None)?;
            files.main()
        } else {
            &file
        };
    vocab::tokenizer(file)
}

/// How sessions run under these arguments.
///
/// # Errors
/// When a cache type is unknown.
pub fn session_params(args: &ModelArgs) -> Result<SessionParams> {
    Ok(SessionParams {
        n_ctx: args.ctx_size,
        n_batch: args.batch_size,
        kv: KvTypes {
            k: cache_type("--cache-type-k", &args.cache_type_k)?,
            v: cache_type("--cache-type-v", &args.cache_type_v)?,
        },
        ..SessionParams::default()
    })
}

/// How to speculate under these arguments, what `qrun tune` measured, and what the session has to keep for it; no
/// speculation where it is off or the model has nothing to guess with.
///
/// # Errors
/// When the arguments contradict each other, or ask for what the model or device does not have.
pub fn speculation(
    args: &SpecArgs,
    engine: &Engine,
    tokenizer: &Tokenizer,
    session: &mut SessionParams,
) -> Result<(Option<SpecParams>, Option<Costs>)> {
    let depth = match args.spec {
        Spec::Auto => Depth::Auto,
        Spec::Fixed(n) => Depth::Fixed(usize::from(n)),
    };
    let mut draft_max = usize::from(args.draft_max);
    if let Depth::Fixed(n) = depth {
        draft_max = n;
    }
    if args.spec_exact {
        if engine
            .config()
            .layers
            .iter()
            .any(|l| !l.recurrent && l.n_head_kv % 2 != 0)
        {
            return Err(UsageError(
                "--spec-exact: attention with an odd number of key heads rounds in another way for single tokens"
                    .to_owned(),
            )
            .into());
        }
        if engine.weight_bytes().repacked > 0 {
            return Err(UsageError(
                "--spec-exact: repacked weights round in another way; leave out --repack"
                    .to_owned(),
            )
            .into());
        }
        if engine.backends()[0].device().kind() != DeviceKind::Cpu {
            return Err(UsageError(
                "--spec-exact: only the CPU's kernels give the same bits at every width; without it the text can \
                 differ where two tokens are almost equally probable"
                    .to_owned(),
            )
            .into());
        }
        // Wider passes of quantized weights round elsewhere.
        if draft_max > EXACT_DEPTH && depth != Depth::Auto {
            return Err(UsageError(format!(
                "--spec-exact: passes give the same bits up to {EXACT_DEPTH} guesses, not {draft_max}"
            ))
            .into());
        }
        draft_max = draft_max.min(EXACT_DEPTH);
    }
    if draft_max == 0 {
        return Ok((None, None));
    }
    let head = engine.mtp_status();
    if !head.on && args.spec_ngram == 0 {
        if let (Depth::Fixed(_), reason) = (depth, &head.reason) {
            report::note(&format!("no speculation: {reason}"));
        }
        return Ok((None, None));
    }
    session.mtp = head.on;
    session.n_rollback = draft_max;
    let tuned = if args.no_tune {
        None
    } else {
        // A record that cannot be used is not worth an answer.
        TuneRecord::load(&TuneKey::of(engine)).unwrap_or_else(|error| {
            report::note(&report::error_line(&error));
            None
        })
    };
    let found = tuned.as_ref().and_then(|record| record.draft_vocab);
    let size = match args.spec_draft_vocab {
        DraftVocabSize::Auto => found,
        DraftVocabSize::Given(size) => size,
    };
    session.draft_vocab = size.and_then(|n| draft_vocab(n, tokenizer));
    let costs = tuned.map(|record| Costs {
        // Drafts from another vocabulary take another time.
        draft: match size == record.draft_vocab {
            true => record.costs.draft,
            false => Vec::new(),
        },
        ..record.costs
    });
    let params = SpecParams {
        depth,
        draft_max,
        draft_min: usize::from(args.draft_min),
        p_min: args.draft_p_min,
        mtp: head.on,
        ngram: usize::from(args.spec_ngram),
        sampled: args.spec_sampled,
    };
    Ok((Some(params), costs))
}

/// Why a model's draft head is on or off in a run that speculates or does not.
pub fn draft_head(engine: &Engine, speculates: bool) -> &str {
    let head = engine.mtp_status();
    match (head.on, speculates) {
        (true, false) => "switched off",
        _ => &head.reason,
    }
}

/// Guesses up to which passes of Q4_K and Q6_K weights give the same bits on the CPU: width 7.
const EXACT_DEPTH: usize = 6;

/// The first `n` ids and the added tokens at the end; none where these are all.
pub fn draft_vocab(n: usize, tokenizer: &Tokenizer) -> Option<DraftVocab> {
    let last_from = tokenizer.first_added();
    (n < last_from).then_some(DraftVocab {
        n_first: n as i64,
        last_from: last_from as i64,
    })
}

fn cache_type(flag: &str, name: &str) -> Result<DType> {
    KV_TYPES
        .into_iter()
        .find(|t| t.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| {
            let names: Vec<_> = KV_TYPES.iter().map(|t| t.name()).collect();
            UsageError(format!(
                "`{flag} {name}`: expected one of {}",
                names.join(", ")
            ))
            .into()
        })
}

/// Prints the devices, the preferred one first.
///
/// # Errors
/// When stdout cannot be written.
pub fn list_devices() -> Result<()> {
    for device in devices() {
        let (free, total) = device.memory();
        let kind = match device.kind() {
            DeviceKind::Gpu => "GPU",
            DeviceKind::Accelerator => "accelerator",
            DeviceKind::Cpu => "CPU",
        };
        // ggml's CPU device does not know what is free.
        let memory = match device.kind() {
            DeviceKind::Gpu => format!("{} of {} free", report::bytes(free), report::bytes(total)),
            _ => report::bytes(total),
        };
        report::out(&format!(
            "{}\t{kind}\t{memory}\t{}\n",
            device.name(),
            device.description()
        ))?;
    }
    Ok(())
}

/// A bar on stderr that shows bytes, their rate and the time left; hidden when stderr is not a terminal.
pub fn progress_bar(what: &'static str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}
