//! `qrun inspect`: what is in a file, without loading it.

use std::collections::BTreeMap;

use anyhow::Result;
use ggml_metal::{DType, Gguf, Value};
use qrun::model::weights::Plan;
use qrun::model::{Config, ModelFiles};
use serde_json::json;

use super::Outcome;
use crate::cli::InspectArgs;
use crate::report;

/// Prints what is in the file.
///
/// # Errors
/// When the file cannot be used as a model; the message says why.
pub fn run(args: &InspectArgs) -> Result<Outcome> {
    let files = ModelFiles::outline(&args.file, args.mtp.as_deref())?;
    let plan = Plan::make(&files)?;
    let text = if args.json {
        format!(
            "{}\n",
            serde_json::to_string_pretty(&as_json(&files, &plan))?
        )
    } else {
        as_text(&files, &plan)
    };
    report::out(&text)?;
    Ok(Outcome::Done)
}

/// Bytes and tensors by type, most bytes first.
fn by_type(files: &ModelFiles) -> Vec<(DType, usize, usize)> {
    let mut types: BTreeMap<DType, (usize, usize)> = BTreeMap::new();
    for tensor in files.all().flat_map(Gguf::tensors) {
        let entry = types.entry(tensor.dtype).or_default();
        entry.0 += tensor.bytes;
        entry.1 += 1;
    }
    let mut list: Vec<_> = types
        .into_iter()
        .map(|(t, (bytes, n))| (t, bytes, n))
        .collect();
    list.sort_by_key(|&(_, bytes, _)| std::cmp::Reverse(bytes));
    list
}

fn parameters(files: &ModelFiles) -> u64 {
    files
        .all()
        .flat_map(Gguf::tensors)
        .map(|t| t.n_elements())
        .sum()
}

/// Bytes of F16 keys and values for a context, the draft head's included where there is one.
fn kv_bytes(config: &Config, n_ctx: usize, head: bool) -> usize {
    let attention = config.layers.iter().filter(|l| !l.recurrent);
    let heads: i64 = attention
        .chain(config.mtp.iter().filter(|_| head))
        .map(|l| l.n_head_kv)
        .sum();
    2 * DType::F16.row_bytes((heads * config.head_dim) as usize) * n_ctx
}

/// Contexts worth knowing the memory of, with their names.
fn contexts(config: &Config) -> Vec<(String, usize)> {
    let full = config.n_ctx_train;
    let mut list: Vec<_> = [4096, 32768]
        .into_iter()
        .filter(|&n| n < full)
        .map(|n| (format!("{}k", n / 1024), n))
        .collect();
    list.push((format!("full ({full})"), full));
    list
}

fn as_json(files: &ModelFiles, plan: &Plan<'_>) -> serde_json::Value {
    let main = files.main();
    let metadata: serde_json::Map<_, _> = main
        .keys()
        .into_iter()
        .map(|key| {
            let value = main
                .value(&key)
                .map_or(serde_json::Value::Null, |v| value_json(&v));
            (key, value)
        })
        .collect();
    let tensors: Vec<_> = files
        .all()
        .flat_map(|file| file.tensors().iter().map(move |t| (file, t)))
        .map(|(file, t)| {
            json!({
                "name": t.name, "shape": t.dims(), "type": t.dtype.name(), "bytes": t.bytes,
                "offset": t.offset, "file": file.path().display().to_string(),
            })
        })
        .collect();
    let types: Vec<_> = by_type(files)
        .into_iter()
        .map(|(t, bytes, n)| json!({"type": t.name(), "bytes": bytes, "tensors": n}))
        .collect();
    let state = files.config.state_bytes();
    let memory: Vec<_> = contexts(&files.config)
        .into_iter()
        .map(|(_, n)| {
            let kv = kv_bytes(&files.config, n, plan.status.on);
            json!({"n_ctx": n, "weights": files.tensor_bytes(), "kv": kv, "state": state,
                   "total": files.tensor_bytes() + kv + state})
        })
        .collect();
    json!({
        "files": files.all().map(|f| f.path().display().to_string()).collect::<Vec<_>>(),
        "version": main.version(),
        "architecture": files.config.arch,
        "name": files.config.name,
        "parameters": parameters(files),
        "bytes": files.tensor_bytes(),
        "mtp": {"on": plan.status.on, "reason": plan.status.reason, "bytes": plan.mtp_bytes()},
        "types": types,
        "memory": memory,
        "metadata": metadata,
        "tensors": tensors,
    })
}

/// Long arrays (the vocabulary) are only counted.
fn value_json(value: &Value) -> serde_json::Value {
    const LONG: usize = 64;
    let list = |n: usize, all: serde_json::Value| {
        if n > LONG {
            json!({"array_of": n})
        } else {
            all
        }
    };
    match value {
        Value::Int(v) => i64::try_from(*v).map_or_else(|_| json!(v.to_string()), |v| json!(v)),
        Value::Float(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::Str(v) => json!(v),
        Value::Ints(v) => list(v.len(), json!(v)),
        Value::Floats(v) => list(v.len(), json!(v)),
        Value::Bools(v) => list(v.len(), json!(v)),
        Value::Strs(v) => list(v.len(), json!(v)),
    }
}

fn as_text(files: &ModelFiles, plan: &Plan<'_>) -> String {
    use std::fmt::Write as _;
    let config = &files.config;
    let main = files.main();
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<14}{value}");
    };
    let paths: Vec<_> = files
        .all()
        .map(|f| f.path().display().to_string())
        .collect();
    line("file", paths.join(", "));
    line(
        "format",
        format!(
            "GGUF {}, {} tensors",
            main.version(),
            files.all().map(|f| f.tensors().len()).sum::<usize>()
        ),
    );
    line(
        "architecture",
        format!("{} {}", config.arch, config.name)
            .trim_end()
            .to_owned(),
    );
    let parameters = parameters(files) as f64;
    let bits = files.tensor_bytes() as f64 * 8.0 / parameters;
    line(
        "parameters",
        format!(
            "{} in {}, {bits:.2} bits each",
            if parameters >= 1e9 {
                format!("{:.2}B", parameters / 1e9)
            } else {
                format!("{:.1}M", parameters / 1e6)
            },
            report::bytes(files.tensor_bytes())
        ),
    );
    let recurrent = config.layers.iter().filter(|l| l.recurrent).count();
    line(
        "layers",
        format!(
            "{}: {recurrent} gated delta net, {} full attention; width {}, vocabulary {}, context {}",
            config.n_layer(),
            config.n_layer() - recurrent,
            config.n_embd,
            config.n_vocab,
            config.n_ctx_train
        ),
    );
    if let Some(layer) = config.layers.iter().find(|l| !l.recurrent) {
        line(
            "attention",
            format!(
                "{} query heads over {} of {}",
                layer.n_head, layer.n_head_kv, config.head_dim
            ),
        );
    }
    let ssm = &config.ssm;
    line(
        "delta net",
        format!(
            "{} value heads over {} key heads of {}",
            ssm.n_v_heads, ssm.n_k_heads, ssm.head_dim
        ),
    );
    if let Some(moe) = &config.moe {
        line(
            "experts",
            format!(
                "{} of {} a token, and a shared one",
                moe.n_expert_used, moe.n_expert
            ),
        );
    }
    let on = if plan.status.on { "on" } else { "off" };
    let size = match plan.mtp_bytes() {
        0 => String::new(),
        n => format!(" ({})", report::bytes(n)),
    };
    line("MTP", format!("{on}, because {}{size}", plan.status.reason));
    for (dtype, bytes, n) in by_type(files) {
        line(
            "type",
            format!(
                "{:<8}{:>10}  {n} tensors",
                dtype.name(),
                report::bytes(bytes)
            ),
        );
    }
    let state = config.state_bytes();
    for (name, n) in contexts(config) {
        let kv = kv_bytes(config, n, plan.status.on);
        line(
            "memory",
            format!(
                "{name:<14} weights {} + KV {} (f16) + state {} = {}, and intermediate results",
                report::bytes(files.tensor_bytes()),
                report::bytes(kv),
                report::bytes(state),
                report::bytes(files.tensor_bytes() + kv + state)
            ),
        );
    }
    text
}
