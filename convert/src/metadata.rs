//! What a checkpoint's settings, card and folder say about the model, as `general.*` and `{arch}.*` metadata in
//! the order in which llama.cpp's converter writes it.

use std::path::Path;

use anyhow::{Context as _, Result};
use ggml_metal::{GgufWriter, Kind, Value};
use serde_json::Value as Json;

use crate::hf_config::HfConfig;
use crate::map::Output;
use crate::vocab::read_json;

/// A metadata value with the kind that llama.cpp stores it as.
#[derive(Clone, Debug, PartialEq)]
pub enum Meta {
    /// A flag.
    Bool(bool),
    /// Unsigned, 16 bits.
    U16(u16),
    /// Unsigned, 32 bits.
    U32(u32),
    /// Signed, 32 bits.
    I32(i32),
    /// A single.
    F32(f64),
    /// Text.
    Str(String),
    /// Flags.
    Bools(Vec<bool>),
    /// Signed integers of 32 bits.
    Ints(Vec<i64>),
    /// Texts.
    Strs(Vec<String>),
}

impl Meta {
    /// From text that lives elsewhere.
    pub fn text(text: &str) -> Self {
        Self::Str(text.to_owned())
    }

    /// Puts the value into a file's header.
    ///
    /// # Errors
    /// When the file format cannot hold it.
    pub fn write(&self, key: &str, writer: &mut GgufWriter) -> Result<()> {
        let (kind, value) = match self {
            Self::Bool(v) => (Kind::Bool, Value::Bool(*v)),
            Self::U16(v) => (Kind::U16, Value::Int((*v).into())),
            Self::U32(v) => (Kind::U32, Value::Int((*v).into())),
            Self::I32(v) => (Kind::I32, Value::Int((*v).into())),
            Self::F32(v) => (Kind::F32, Value::Float(*v)),
            Self::Str(v) => (Kind::Str, Value::Str(v.clone())),
            Self::Bools(v) => (Kind::Bool, Value::Bools(v.clone())),
            Self::Ints(v) => (Kind::I32, Value::Ints(v.clone())),
            Self::Strs(v) => (Kind::Str, Value::Strs(v.clone())),
        };
        writer.set_as(key, kind, &value)?;
        Ok(())
    }
}

/// Keys with their values, in order.
pub type Metadata = Vec<(String, Meta)>;

/// What the model is called, what it recommends, where it comes from.
///
/// # Errors
/// When a file of the checkpoint is not of the form that it should have.
pub fn general(dir: &Path, config: &HfConfig, outputs: &[Output]) -> Result<Metadata> {
    let mut out = vec![
        ("general.architecture".to_owned(), Meta::text(config.arch())),
        ("general.type".to_owned(), Meta::text("model")),
    ];
    out.extend(sampling(dir)?);

    let card = Card::read(dir)?;
    let folder = dir
        .canonicalize()
        .with_context(|| format!("finding {}", dir.display()))?;
    let folder = folder.file_name().unwrap_or_default().to_string_lossy();
    let n_parameters = outputs.iter().map(Output::n_elements).sum();
    let name = Name::parse(&folder, n_parameters);
    let mut text = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            out.push((format!("general.{key}"), Meta::Str(value)));
        }
    };
    text("name", card.text("model_name").or(Some(title(&folder))));
    text("author", card.text("model_creator"));
    text("version", name.version);
    text("finetune", name.finetune);
    text("basename", name.basename);
    let size = name.size.unwrap_or_else(|| size_label(outputs));
    text("size_label", Some(size));
    text("license", card.text("license"));
    text("license.name", card.text("license_name"));
    text("license.link", card.text("license_link"));
    let bases = card.list("base_model");
    if !bases.is_empty() {
        let count = u32::try_from(bases.len()).unwrap_or(u32::MAX);
        out.push(("general.base_model.count".to_owned(), Meta::U32(count)));
        for (i, base) in bases.iter().enumerate() {
            let mut text = |key: &str, value: String| {
                out.push((format!("general.base_model.{i}.{key}"), Meta::Str(value)));
            };
            let Some((owner, base)) = base.split_once('/') else {
                text("name", title(base));
                continue;
            };
            text("name", title(base));
            text("organization", title(owner));
            text("repo_url", format!("https://huggingface.co/{owner}/{base}"));
        }
    }
    let mut tags = card.list("tags");
    tags.extend(card.list("pipeline_tag"));
    for (key, list) in [("tags", tags), ("languages", card.list("language"))] {
        if !list.is_empty() {
            out.push((format!("general.{key}"), Meta::Strs(list)));
        }
    }
    Ok(out)
}

/// The model's numbers; `file_type` is that of the tensors.
pub fn hyperparameters(config: &HfConfig, n_mtp: usize, file_type: u32) -> Metadata {
    let mut out = Metadata::new();
    let mut set = |key: &str, value: Meta| out.push((format!("{}.{key}", config.arch()), value));
    // Every number was checked to be small when it was read.
    let int = |n: usize| Meta::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let linear = &config.linear;
    set("block_count", int(config.n_layer + n_mtp));
    set("context_length", int(config.n_ctx as usize));
    set("embedding_length", int(config.n_embd));
    if let Some(n_ff) = config.n_ff {
        set("feed_forward_length", int(n_ff));
    }
    set("attention.head_count", int(config.n_head));
    set("attention.head_count_kv", int(config.n_head_kv));
    set(
        "rope.dimension_sections",
        Meta::Ints(config.rope_sections.to_vec()),
    );
    set("rope.freq_base", Meta::F32(config.rope_theta));
    set(
        "attention.layer_norm_rms_epsilon",
        Meta::F32(config.rms_eps),
    );
    if let Some(moe) = &config.moe {
        set("expert_count", int(moe.n_expert));
        set("expert_used_count", int(moe.n_used));
    }
    set("attention.key_length", int(config.head_dim));
    set("attention.value_length", int(config.head_dim));
    out.push(("general.file_type".to_owned(), Meta::U32(file_type)));
    let mut set = |key: &str, value: Meta| out.push((format!("{}.{key}", config.arch()), value));
    if let Some(moe) = &config.moe {
        set("expert_feed_forward_length", int(moe.n_ff));
        set("expert_shared_feed_forward_length", int(moe.n_ff_shared));
    }
    if n_mtp > 0 {
        set("nextn_predict_layers", int(n_mtp));
    }
    set("ssm.conv_kernel", int(linear.conv_kernel));
    set("ssm.state_size", int(linear.head_dim));
    set("ssm.group_count", int(linear.n_k_heads));
    set("ssm.time_step_rank", int(linear.n_v_heads));
    set("ssm.inner_size", int(linear.v_dim()));
    let mut recurrent = config.recurrent.clone();
    recurrent.resize(config.n_layer + n_mtp, false);
    set("attention.recurrent_layers", Meta::Bools(recurrent));
    set(
        "full_attention_interval",
        int(config.full_attention_interval as usize),
    );
    set("rope.dimension_count", int(config.n_rot as usize));
    out.push(("general.quantization_version".to_owned(), Meta::U32(2)));
    out
}

/// Recommended sampling, from `generation_config.json`.
fn sampling(dir: &Path) -> Result<Metadata> {
    let settings: Json = read_json(&dir.join("generation_config.json"))?.unwrap_or_default();
    let mut out = Metadata::new();
    let mut set = |key: &str, value: Option<Meta>| {
        out.extend(value.map(|v| (format!("general.sampling.{key}"), v)));
    };
    let float = |key: &str| settings.get(key).and_then(Json::as_f64).map(Meta::F32);
    let top_k = settings.get("top_k").and_then(Json::as_i64);
    set(
        "top_k",
        top_k.and_then(|k| i32::try_from(k).ok()).map(Meta::I32),
    );
    set("top_p", float("top_p"));
    set("min_p", float("min_p"));
    set("temp", float("temperature"));
    // 1 is off.
    set(
        "penalty_repeat",
        float("repetition_penalty").filter(|p| *p != Meta::F32(1.0)),
    );
    Ok(out)
}

/// The front matter of a model card: `key: value`, and lists of values. What is more nested is passed over.
struct Card(Vec<(String, Vec<String>)>);

impl Card {
    fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("README.md");
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self(Vec::new())),
            Err(e) => Err(e).with_context(|| format!("reading {}", path.display())),
        }
    }

    fn parse(text: &str) -> Self {
        let mut card: Vec<(String, Vec<String>)> = Vec::new();
        let mut lines = text.lines();
        if lines.next().map(str::trim_end) != Some("---") {
            return Self(card);
        }
        for line in lines {
            let line = line.trim_end();
            if line == "---" {
                break;
            }
            let item = line.trim_start().strip_prefix("- ");
            if let (Some(item), Some((_, values))) = (item, card.last_mut()) {
                values.extend(scalar(item));
            } else if let Some((key, value)) = line.split_once(':')
                && !line.starts_with([' ', '\t', '#'])
            {
                let value = value.trim();
                let values = match value.strip_prefix('[').and_then(|v| v.strip_suffix(']')) {
                    Some(list) => list.split(',').filter_map(scalar).collect(),
                    None => scalar(value).into_iter().collect(),
                };
                card.push((key.trim().to_owned(), values));
            }
        }
        Self(card)
    }

    fn list(&self, key: &str) -> Vec<String> {
        let found = self.0.iter().find(|(k, _)| k == key);
        found.map(|(_, values)| values.clone()).unwrap_or_default()
    }

    fn text(&self, key: &str) -> Option<String> {
        self.list(key).into_iter().next()
    }
}

/// A plain or quoted value; none where it is empty or the head of something nested.
fn scalar(text: &str) -> Option<String> {
    let text = text.trim();
    let bare = ['"', '\'']
        .iter()
        .find_map(|&q| text.strip_prefix(q)?.strip_suffix(q))
        .unwrap_or(text);
    let nested = bare == text
        && (text.ends_with(':') || text.contains(": ") || text.starts_with(['|', '>']));
    (!bare.is_empty() && !nested).then(|| bare.to_owned())
}

/// What a folder's name says by the usual pattern: `Qwen3.5-4B-Instruct-v2`.
#[derive(Default, Debug, PartialEq)]
struct Name {
    basename: Option<String>,
    size: Option<String>,
    finetune: Option<String>,
    version: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Word,
    Version,
    Size,
    Finetune,
    /// A type of tensors, which is no part of the model's name.
    Type,
}

impl Name {
    fn parse(folder: &str, n_parameters: usize) -> Self {
        if folder.contains(' ') {
            return Self::default();
        }
        let words: Vec<&str> = folder.split('-').filter(|w| !w.is_empty()).collect();
        let mut parts: Vec<(String, Part)> = Vec::new();
        for (i, word) in words.iter().enumerate() {
            parts.push(part(word, i == 0, n_parameters));
        }
        // The name itself is what comes first, up to the first part of another kind; a version at the very end is
        // one of the fine-tune.
        let mut n_base = parts
            .iter()
            .take_while(|(word, kind)| match kind {
                Part::Word => word.starts_with(char::is_alphabetic),
                kind => *kind == Part::Version,
            })
            .count();
        while n_base == parts.len() && n_base > 0 && parts[n_base - 1].1 == Part::Version {
            n_base -= 1;
        }
        let join = |chosen: &dyn Fn(usize, Part) -> bool| {
            let mut words: Vec<&str> = Vec::new();
            for (i, (word, kind)) in parts.iter().enumerate() {
                if chosen(i, *kind) {
                    words.push(word);
                }
            }
            words.dedup();
            (!words.is_empty()).then(|| words.join("-"))
        };
        let name = Self {
            basename: join(&|i, _| i < n_base),
            size: join(&|_, kind| kind == Part::Size),
            finetune: join(&|i, kind| {
                kind == Part::Finetune || (i >= n_base && kind == Part::Word)
            }),
            version: join(&|i, kind| i >= n_base && kind == Part::Version),
        };
        // A single word is a name and says nothing more.
        if name.size.is_none() && name.finetune.is_none() && name.version.is_none() {
            return Self::default();
        }
        name
    }
}

fn part(word: &str, first: bool, n_parameters: usize) -> (String, Part) {
    let lower = word.to_ascii_lowercase();
    let number = |text: &str| {
        !text.is_empty()
            && text
                .split('.')
                .all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let after = lower
        .strip_prefix("iter")
        .or_else(|| lower.strip_prefix('v'))
        .unwrap_or(&lower);
    if number(after) {
        return (word.to_owned(), Part::Version);
    }
    if ["f16", "f32", "bf16", "fp16", "fp32"].contains(&lower.as_str()) || is_quantized_type(&lower)
    {
        return (word.to_ascii_uppercase(), Part::Type);
    }
    if first {
        return (word.to_owned(), Part::Word);
    }
    if let Some((digits, unit)) = size_of(&lower, &number) {
        // Far from the model's own size it is a context length or the like.
        let stated = digits * unit;
        let own = n_parameters as f64;
        if own > 0.0 && (stated - own).abs() > 7.0 * own / 8.0 && !lower.starts_with('a') {
            return (lower, Part::Finetune);
        }
        let (head, suffix) = word.split_at(word.len() - 1);
        let label = format!("{}{}", head.replace('_', "."), suffix.to_ascii_uppercase());
        return (label, Part::Size);
    }
    if ["chat", "instruct", "vision"].contains(&lower.as_str()) {
        return (word.to_owned(), Part::Finetune);
    }
    (word.to_owned(), Part::Word)
}

/// `q4_k_m`, `iq3_xs`, `q8`.
fn is_quantized_type(lower: &str) -> bool {
    let rest = lower.strip_prefix('i').unwrap_or(lower).strip_prefix('q');
    let mut parts = rest.unwrap_or_default().split('_');
    let digit = parts
        .next()
        .is_some_and(|d| d.len() == 1 && d.bytes().all(|b| b.is_ascii_digit()));
    digit && parts.all(|p| !p.is_empty() && p.len() <= 3)
}

/// `0.8b`, `a17b`, `128k` as a number and its unit.
fn size_of(lower: &str, number: &dyn Fn(&str) -> bool) -> Option<(f64, f64)> {
    let unit = match lower.chars().last()? {
        'k' => 1e3,
        'm' => 1e6,
        'b' => 1e9,
        't' => 1e12,
        _ => return None,
    };
    let head = lower.get(..lower.len() - 1)?;
    let head = head.strip_prefix('a').unwrap_or(head).replace('_', ".");
    number(&head).then_some(())?;
    Some((head.parse().ok()?, unit))
}

/// Words of a folder's name with capitals, unless they have their own or are versions.
fn title(folder: &str) -> String {
    let words = folder.split(['-', ' ']).filter(|w| !w.is_empty());
    let capitalised = words.map(|word| {
        let number = word
            .trim_start_matches('v')
            .starts_with(|c: char| c.is_ascii_digit());
        if number || word.chars().any(char::is_uppercase) {
            return word.to_owned();
        }
        let mut out = String::new();
        let mut start = true;
        for c in word.chars() {
            if start {
                out.extend(c.to_uppercase());
            } else {
                out.push(c);
            }
            start = !c.is_alphabetic();
        }
        out
    });
    capitalised.collect::<Vec<_>>().join(" ")
}

/// Parameters in two digits, as in `25M`; in MoE models the experts times one expert with all that is shared.
fn size_label(outputs: &[Output]) -> String {
    let (mut shared, mut expert, mut n_experts, mut n_tensors) = (0, 0, 0, 0);
    for output in outputs {
        if output.name.contains("_exps.") {
            let n = output.dims.get(2).copied().unwrap_or(1);
            expert += output.n_elements() / n;
            n_experts += n;
            n_tensors += 1;
        } else {
            shared += output.n_elements();
        }
    }
    let size = rounded(shared + expert);
    match n_experts.checked_div(n_tensors) {
        Some(n) => format!("{n}x{size}"),
        None => size,
    }
}

fn rounded(n: usize) -> String {
    let n = n as f64;
    let units = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")];
    let (unit, suffix) = units
        .into_iter()
        .find(|(u, _)| n >= *u)
        .unwrap_or((1e3, "K"));
    let value = n / unit;
    // Two digits: 25M, 1.4M, 0.75K.
    let digits = match value.round_ties_even() {
        v if v >= 10.0 => 0,
        v if v >= 1.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}{suffix}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(parts: [&str; 4]) -> Name {
        let [basename, size, finetune, version] =
            parts.map(|p| (!p.is_empty()).then(|| p.to_owned()));
        Name {
            basename,
            size,
            finetune,
            version,
        }
    }

    #[test]
    fn folder_names_are_taken_apart() {
        let of = |folder: &str, n: f64| Name::parse(folder, n as usize);
        assert_eq!(of("demo", 2.5e7), Name::default());
        assert_eq!(
            of("Qwen3.5-0.8B", 0.75e9),
            name(["Qwen3.5", "0.8B", "", ""])
        );
        assert_eq!(
            of("Qwen3.5-397B-A17B", 397e9),
            name(["Qwen3.5", "397B-A17B", "", ""])
        );
        assert_eq!(
            of("Qwen3.5-4B-Instruct-v2", 4e9),
            name(["Qwen3.5", "4B", "Instruct", "v2"])
        );
        // Far from the size: a context length.
        assert_eq!(of("fox-4b-128k", 4e9), name(["fox", "4B", "128k", ""]));
        assert_eq!(of("tiny-dense-untied", 1e6), Name::default());
    }

    #[test]
    fn titles_and_sizes_read_as_llama_cpp_writes_them() {
        assert_eq!(title("tiny-dense-untied"), "Tiny Dense Untied");
        assert_eq!(title("Qwen3.5-0.8B"), "Qwen3.5 0.8B");
        assert_eq!(title("fox-v2-8b"), "Fox v2 8b");
        assert_eq!(rounded(24_800_000), "25M");
        assert_eq!(rounded(1_400_000), "1.4M");
        assert_eq!(rounded(752_000_000), "752M");
        assert_eq!(rounded(397_000_000_000), "397B");
    }

    #[test]
    fn cards_give_what_they_say_plainly() {
        let card = Card::parse(
            "---\nlibrary_name: transformers\nlicense: apache-2.0\nlicense_link: \"https://x.y/LICENSE\"\n\
             tags:\n- a\n- 'b'\nlanguage: [en, zh]\nbase_model:\n  - Qwen/Qwen3.5-4B\nmodel-index:\n- name: x: y\n---\ntags: no\n",
        );
        assert_eq!(card.text("license").as_deref(), Some("apache-2.0"));
        assert_eq!(
            card.text("license_link").as_deref(),
            Some("https://x.y/LICENSE")
        );
        assert_eq!(card.list("tags"), ["a", "b"]);
        assert_eq!(card.list("language"), ["en", "zh"]);
        assert_eq!(card.list("base_model"), ["Qwen/Qwen3.5-4B"]);
        assert!(Card::parse("# no front matter\nlicense: x\n").0.is_empty());
    }
}
