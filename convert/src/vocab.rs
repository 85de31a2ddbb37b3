//! The vocabulary, special tokens and chat template of a checkpoint, as `tokenizer.*` metadata.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use ggml_metal::one_line;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::hf_config::HfConfig;
use crate::metadata::Meta;

/// GGUF's kinds of tokens.
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// What tells Qwen 3.5's pre-tokenizer from its forerunners': words may hold combining marks.
const QWEN35_WORDS: &str = r"[\p{L}\p{M}]+";

#[derive(Deserialize)]
struct TokenizerJson {
    model: Bpe,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    pre_tokenizer: Value,
}

#[derive(Deserialize)]
struct Bpe {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    vocab: HashMap<String, u32>,
    #[serde(default)]
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Line(String),
    Pair([String; 2]),
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct DecoderEntry {
    content: String,
    #[serde(default)]
    special: bool,
}

/// Reads the tokenizer of the checkpoint in `dir` and gives its metadata in llama.cpp's order.
///
/// # Errors
/// When there is no tokenizer, it is not the family's byte-level BPE, or it contradicts the settings.
pub fn metadata(
    dir: &Path,
    config: &HfConfig,
    notes: &mut Vec<String>,
) -> Result<Vec<(String, Meta)>> {
    let settings: Value = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
    let vocabulary = Vocabulary::read(dir, &settings)?;
    let (tokens, types) = vocabulary.list(config)?;

    let mut out: Vec<(String, Meta)> = Vec::new();
    let mut set = |key: &str, value: Meta| out.push((format!("tokenizer.{key}"), value));
    set("ggml.model", Meta::text("gpt2"));
    set("ggml.pre", Meta::text("qwen35"));
    set("ggml.tokens", Meta::Strs(tokens));
    set("ggml.token_type", Meta::Ints(types));
    set("ggml.merges", Meta::Strs(vocabulary.merges.clone()));
    for (key, id) in vocabulary.special_ids(&settings, config) {
        set(&format!("ggml.{key}_token_id"), Meta::U32(id));
    }
    for kind in ["bos", "eos"] {
        let key = format!("add_{kind}_token");
        let add = settings.get(&key).and_then(Value::as_bool).unwrap_or(false);
        set(&format!("ggml.{key}"), Meta::Bool(add));
    }
    match chat_template(dir, &settings, notes)? {
        Some(template) => set("chat_template", Meta::Str(template)),
        None => notes.push(
            "chat template: the checkpoint has none; prompts will go on from plain text".to_owned(),
        ),
    }
    Ok(out)
}

struct Vocabulary {
    path: std::path::PathBuf,
    tokens: HashMap<String, u32>,
    added: Vec<AddedToken>,
    merges: Vec<String>,
}

impl Vocabulary {
    fn read(dir: &Path, settings: &Value) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if let Some(file) = read_json::<TokenizerJson>(&path)? {
            let kind = file.model.kind.as_deref().unwrap_or("BPE");
            ensure!(
                kind == "BPE",
                "{}: its model is `{}`; this family uses BPE",
                path.display(),
                one_line(kind)
            );
            check_words(&path, &file.pre_tokenizer)?;
            return Ok(Self {
                path,
                tokens: file.model.vocab,
                added: file.added_tokens,
                merges: file.model.merges.into_iter().map(merge_line).collect(),
            });
        }
        let path = dir.join("vocab.json");
        let Some(tokens) = read_json::<HashMap<String, u32>>(&path)? else {
            bail!(
                "{}: has neither tokenizer.json nor vocab.json; fetch the tokenizer of the checkpoint",
                dir.display()
            );
        };
        let merges = dir.join("merges.txt");
        let text = std::fs::read_to_string(&merges)
            .with_context(|| format!("reading {}", merges.display()))?;
        let lines = text
            .lines()
            .filter(|l| !l.starts_with("#version") && !l.trim().is_empty());
        Ok(Self {
            added: added_tokens(dir, settings)?,
            path,
            tokens,
            merges: lines.map(|l| l.trim_end().to_owned()).collect(),
        })
    }

    /// All tokens by id, and their kinds; ids that the model has and the tokenizer does not are padding.
    fn list(&self, config: &HfConfig) -> Result<(Vec<String>, Vec<i64>)> {
        let n_vocab = config.n_vocab;
        let mut tokens: Vec<String> = (0..n_vocab).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![UNUSED; n_vocab];
        let mut put = |id: u32, text: &str, kind: i64| -> Result<()> {
            let at = id as usize;
            ensure!(
                at < n_vocab,
                "{}: token `{}` has the number {id}, {} has a vocabulary of {n_vocab}",
                self.path.display(),
                one_line(text),
                config.path().display()
            );
            ensure!(
                types[at] == UNUSED || tokens[at] == text,
                "{}: tokens `{}` and `{}` have the same number {id}",
                self.path.display(),
                one_line(&tokens[at]),
                one_line(text)
            );
            text.clone_into(&mut tokens[at]);
            types[at] = kind;
            Ok(())
        };
        for (text, id) in &self.tokens {
            put(*id, text, NORMAL)?;
        }
        for token in &self.added {
            // Some tools mark tokens as plain that no text may make.
            let control =
                token.special || (token.content.starts_with("<|") && token.content.ends_with("|>"));
            put(
                token.id,
                &token.content,
                if control { CONTROL } else { USER_DEFINED },
            )?;
        }
        Ok((tokens, types))
    }

    /// Beginning, end and padding: from the tokenizer's settings, else from the model's.
    fn special_ids(&self, settings: &Value, config: &HfConfig) -> Vec<(&'static str, u32)> {
        let named = |kind: &str| {
            let value = settings.get(format!("{kind}_token"))?;
            let text = value.as_str().or_else(|| value["content"].as_str())?;
            self.added.iter().find(|t| t.content == text).map(|t| t.id)
        };
        let numbered = |kind: &str| {
            let id = config.get(&format!("{kind}_token_id"))?.as_u64()?;
            u32::try_from(id)
                .ok()
                .filter(|&id| (id as usize) < config.n_vocab)
        };
        let kinds = [("bos", "bos"), ("eos", "eos"), ("pad", "padding")];
        let mut ids: Vec<(&str, u32)> = Vec::new();
        for (kind, key) in kinds {
            ids.extend(named(kind).map(|id| (key, id)));
        }
        for (kind, key) in kinds {
            if !ids.iter().any(|(k, _)| *k == key) {
                ids.extend(numbered(kind).map(|id| (key, id)));
            }
        }
        ids
    }
}

/// A merge as llama.cpp writes it: two parts with a space between; spaces within are moved out of the way.
fn merge_line(merge: Merge) -> String {
    match merge {
        Merge::Line(line) => line,
        Merge::Pair(parts) => parts.map(|p| p.replace(' ', "\u{120}")).join(" "),
    }
}

/// Refuses a tokenizer that splits text in another way than the GGUF file will say.
fn check_words(path: &Path, pre_tokenizer: &Value) -> Result<()> {
    fn patterns<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(pattern)) = map.get("Regex") {
                    found.push(pattern);
                }
                map.values().for_each(|v| patterns(v, found));
            }
            Value::Array(list) => list.iter().for_each(|v| patterns(v, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    patterns(pre_tokenizer, &mut found);
    ensure!(
        found.is_empty() || found.iter().any(|p| p.contains(QWEN35_WORDS)),
        "{}: splits words by another rule (`{}`) than Qwen 3.5; its tokens would come out wrong",
        path.display(),
        one_line(found.first().copied().unwrap_or_default())
    );
    Ok(())
}

/// Added tokens of a checkpoint without tokenizer.json.
fn added_tokens(dir: &Path, settings: &Value) -> Result<Vec<AddedToken>> {
    if let Some(entries) = settings.get("added_tokens_decoder") {
        let path = dir.join("tokenizer_config.json");
        let entries: HashMap<u32, DecoderEntry> = serde_json::from_value(entries.clone())
            .with_context(|| format!("{}: key `added_tokens_decoder`", path.display()))?;
        let tokens = entries.into_iter().map(|(id, entry)| AddedToken {
            id,
            content: entry.content,
            special: entry.special,
        });
        return Ok(tokens.collect());
    }
    let listed = read_json::<HashMap<String, u32>>(&dir.join("added_tokens.json"))?;
    let tokens = listed.unwrap_or_default().into_iter();
    Ok(tokens
        .map(|(content, id)| AddedToken {
            id,
            content,
            special: false,
        })
        .collect())
}

/// The template: a file of its own wins, as in Transformers.
fn chat_template(dir: &Path, settings: &Value, notes: &mut Vec<String>) -> Result<Option<String>> {
    let within = match settings.get("chat_template") {
        Some(Value::String(text)) => Some(text.clone()),
        // Several under names: the one that is used when nobody asks for another.
        Some(Value::Array(list)) => list
            .iter()
            .find(|t| t["name"] == "default")
            .or(list.first())
            .and_then(|t| t["template"].as_str())
            .map(str::to_owned),
        _ => None,
    };
    let path = dir.join("chat_template.jinja");
    let apart = match std::fs::read_to_string(&path) {
        Ok(text) => Some(text),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
    };
    if let (Some(within), Some(apart)) = (&within, &apart)
        && within != apart
    {
        notes.push("chat template: chat_template.jinja and tokenizer_config.json differ; the former is taken".to_owned());
    }
    if apart.is_some() || within.is_some() {
        return Ok(apart.or(within));
    }
    let old: Option<Value> = read_json(&dir.join("chat_template.json"))?;
    Ok(old.and_then(|v| v["chat_template"].as_str().map(str::to_owned)))
}

/// A JSON file; none where it does not exist.
///
/// # Errors
/// When it cannot be read, or is not of that form.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(|| format!("reading {}", path.display())),
    };
    serde_json::from_slice(&text)
        .with_context(|| format!("{}: cannot be read", path.display()))
        .map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_of_both_forms_become_lines() {
        let merges: Vec<Merge> =
            serde_json::from_str(r#"["a b", ["c", "d"], ["e f", "g"]]"#).unwrap();
        let lines: Vec<String> = merges.into_iter().map(merge_line).collect();
        assert_eq!(lines, ["a b", "c d", "e\u{120}f g"]);
    }

    #[test]
    fn another_rule_for_words_is_refused() {
        let with =
            |pattern: &str| serde_json::json!({"pretokenizers": [{"pattern": {"Regex": pattern}}]});
        let path = Path::new("tokenizer.json");
        assert!(check_words(path, &with(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+")).is_ok());
        assert!(check_words(path, &with(r"[^\r\n\p{L}\p{N}]?\p{L}+")).is_err());
        assert!(check_words(path, &Value::Null).is_ok());
    }
}
