//! From GGUF metadata to the tokenizer, the chat template and the recommended sampling.

use anyhow::{Context as _, Result};
use ggml_metal::{Gguf, Value};

use crate::sampler::SamplerParams;
use crate::tokenizer::{Tokenizer, Vocab};

/// Builds the tokenizer from `tokenizer.ggml.*`.
///
/// # Errors
/// When a key is missing or unusable; the message names file and key.
pub fn tokenizer(file: &Gguf) -> Result<Tokenizer> {
    let path = file.path().display();
    let text = |key: &str| match file.value(key) {
        Some(Value::Str(text)) => Ok(text),
        _ => anyhow::bail!("{path}: no text in key `{key}`; the file has no tokenizer"),
    };
    let texts = |key: &str| match file.value(key) {
        Some(Value::Strs(list)) => Ok(list),
        _ => anyhow::bail!("{path}: no list of texts in key `{key}`; the file has no tokenizer"),
    };
    let id = |key: &str| match file.value(key) {
        Some(Value::Int(id)) => u32::try_from(id).ok(),
        _ => None,
    };
    let vocab = Vocab {
        model: text("tokenizer.ggml.model")?,
        pre: text("tokenizer.ggml.pre")?,
        tokens: texts("tokenizer.ggml.tokens")?,
        token_types: match file.value("tokenizer.ggml.token_type") {
            Some(Value::Ints(types)) => types.into_iter().map(|t| t as i32).collect(),
            _ => Vec::new(),
        },
        merges: texts("tokenizer.ggml.merges")?,
        bos: id("tokenizer.ggml.bos_token_id"),
        eos: id("tokenizer.ggml.eos_token_id"),
        eot: id("tokenizer.ggml.eot_token_id"),
        padding: id("tokenizer.ggml.padding_token_id"),
        add_bos: matches!(
            file.value("tokenizer.ggml.add_bos_token"),
            Some(Value::Bool(true))
        ),
    };
    Tokenizer::new(vocab).with_context(|| format!("{path}: its tokenizer cannot be used"))
}

/// The chat template, where the file has one.
pub fn chat_template(file: &Gguf) -> Option<String> {
    match file.value("tokenizer.chat_template") {
        Some(Value::Str(template)) if !template.is_empty() => Some(template),
        _ => None,
    }
}

/// The sampling that the file recommends under `general.sampling.*`, over "everything off"; none where it
/// recommends nothing.
pub fn recommended_sampling(file: &Gguf) -> Option<SamplerParams> {
    let mut params = SamplerParams::default();
    let mut found = false;
    let mut float = |key: &str, target: &mut f32| {
        let value = match file.value(&format!("general.sampling.{key}")) {
            Some(Value::Float(v)) => v as f32,
            Some(Value::Int(v)) => v as f32,
            _ => return,
        };
        *target = value;
        found = true;
    };
    float("temp", &mut params.temp);
    float("top_p", &mut params.top_p);
    float("min_p", &mut params.min_p);
    float("penalty_repeat", &mut params.repeat_penalty);
    let mut top_k = params.top_k as f32;
    float("top_k", &mut top_k);
    let mut last_n = params.repeat_last_n as f32;
    float("penalty_last_n", &mut last_n);
    params.top_k = top_k as i32;
    if last_n >= 0.0 {
        params.repeat_last_n = last_n as i32;
    }
    // A value outside its range is the file's mistake, not the user's.
    (found && params.validate().is_ok()).then_some(params)
}

/// What Qwen recommends for its 3.5 models in general use (their model cards), thinking or not.
pub fn qwen_sampling(thinking: bool) -> SamplerParams {
    let (temp, top_p) = if thinking { (1.0, 0.95) } else { (0.7, 0.8) };
    SamplerParams {
        temp,
        top_p,
        top_k: 20,
        presence_penalty: 1.5,
        ..SamplerParams::default()
    }
}
