//! Chat templates: a conversation as JSON in, the text of a prompt out.
//!
//! Owns the Jinja environment, made to write what Python's Jinja2 writes with the globals of
//! Hugging Face's `apply_chat_template`, and the clean-up of conversations that published templates
//! refuse. Knows nothing about tokens or about what a particular template does.
//! A template is untrusted: fuel bounds its loops and the text it makes, and it runs on a stack for
//! any nesting it can write. Not bounded: comparing or joining lists that it put into themselves.

mod python;

use std::collections::HashMap;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, ensure};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, escape_formatter};
use serde_json::Value as Json;

/// Steps a rendering may take, and 64-byte units of text it may create. A conversation of a million
/// tokens needs a quarter of it.
const FUEL: u64 = 4_000_000;

/// Longest accepted template; the published ones are below 32 KiB.
const MAX_SOURCE_BYTES: usize = 128 << 10;

/// The engine walks expressions and drops values recursively: up to 130,000 levels of 500 bytes in
/// a template of that length, or half a million of 100 bytes with that fuel. Pages that are never
/// used cost nothing.
const STACK_BYTES: usize = 256 << 20;

/// Longest error message.
const MAX_ERROR_CHARS: usize = 300;

/// The name of the only template in an environment.
const NAME: &str = "chat template";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
}

/// What a template is rendered with.
#[derive(Clone, Copy, Debug)]
pub struct RenderOptions<'a> {
    /// The conversation: a JSON array of OpenAI-style messages. See [`normalize_messages`].
    pub messages: &'a Json,
    /// A JSON array of OpenAI-style tools.
    pub tools: Option<&'a Json>,
    /// Whether the text ends with the opening of an answer.
    pub add_generation_prompt: bool,
    /// Thinking on or off; `None` leaves the choice to the template.
    pub enable_thinking: Option<bool>,
    /// The text of the token that opens a text, empty if there is none.
    pub bos_token: &'a str,
    /// The text of the token that ends a text, empty if there is none.
    pub eos_token: &'a str,
}

impl ChatTemplate {
    /// Compiles a template, as found under `tokenizer.chat_template` or in a `.jinja` file.
    pub fn new(source: &str) -> Result<ChatTemplate> {
        let n_bytes = source.len();
        ensure!(
            n_bytes <= MAX_SOURCE_BYTES,
            "{NAME}: {n_bytes} bytes long, the limit is {MAX_SOURCE_BYTES}"
        );
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(format_value);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("string", string);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", utc_now);
        on_large_stack(|| {
            environment.set_syntax(
                SyntaxConfig::builder()
                    .trim_blocks(true)
                    .lstrip_blocks(true)
                    .build()?,
            );
            environment.add_template_owned(NAME, replace_generation_tags(source))
        })?;
        Ok(ChatTemplate { environment })
    }

    /// Renders a conversation. What the template raises comes back as the error.
    pub fn render(&self, options: &RenderOptions) -> Result<String> {
        let mut context = HashMap::from([
            ("messages", Value::from(Serde(options.messages))),
            ("tools", Value::from(Serde(options.tools))),
            ("documents", Value::from(())),
            (
                "add_generation_prompt",
                Value::from(options.add_generation_prompt),
            ),
            ("bos_token", Value::from(options.bos_token)),
            ("eos_token", Value::from(options.eos_token)),
        ]);
        // Templates test `is defined`, so unset is not the same as none.
        if let Some(enable_thinking) = options.enable_thinking {
            context.insert("enable_thinking", Value::from(enable_thinking));
        }
        on_large_stack(|| {
            self.environment
                .get_template(NAME)?
                .render(Value::from_pairs(context))
        })
    }
}

/// Runs `work` on a thread of its own with [`STACK_BYTES`]; a panic in it becomes an error too.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T> {
    thread::scope(|scope| {
        thread::Builder::new()
            .name("template".to_owned())
            .stack_size(STACK_BYTES)
            // The error holds values of the template, so it is dropped here as well.
            .spawn_scoped(scope, || work().map_err(|error| describe(&error)))
            .context("cannot start a thread for the chat template")?
            .join()
            .unwrap_or_else(|_| Err(anyhow!("{NAME}: the template engine failed on it")))
    })
}

/// Rewrites a conversation into a form that published templates accept; never an error.
///
/// Templates want at most one system message, as the first. The leading system and developer
/// messages are merged in order into one; a later one becomes a user message at its place that
/// tells it apart from the user's own words, so the text before it stays the same. Tool-call
/// arguments given as JSON text, as the OpenAI API has them, become objects. Everything else is
/// left as it is.
pub fn normalize_messages(messages: &Json) -> Json {
    let Some(messages) = messages.as_array() else {
        return messages.clone();
    };
    let n_leading = messages
        .iter()
        .take_while(|message| is_system(message))
        .count();
    let (leading, later) = messages.split_at(n_leading);
    let mut normalized = Vec::with_capacity(messages.len());
    match leading {
        [] => {}
        [message] => {
            let mut message = message.clone();
            message["role"] = "system".into();
            normalized.push(message);
        }
        several => {
            let texts: Vec<String> = several
                .iter()
                .map(text_of)
                .filter(|text| !text.is_empty())
                .collect();
            normalized.push(serde_json::json!({"role": "system", "content": texts.join("\n\n")}));
        }
    }
    for message in later {
        if !is_system(message) {
            normalized.push(with_parsed_arguments(message));
            continue;
        }
        let text = text_of(message);
        if !text.is_empty() {
            let note = format!("[System note]\n{text}");
            normalized.push(serde_json::json!({"role": "user", "content": note}));
        }
    }
    Json::Array(normalized)
}

fn is_system(message: &Json) -> bool {
    matches!(message["role"].as_str(), Some("system" | "developer"))
}

/// The text of a message whose content is a string or a list of parts.
fn text_of(message: &Json) -> String {
    let text = match &message["content"] {
        Json::String(text) => text.clone(),
        Json::Array(parts) => parts
            .iter()
            .filter_map(|part| part.as_str().or_else(|| part["text"].as_str()))
            .collect(),
        _ => String::new(),
    };
    text.trim().to_owned()
}

fn with_parsed_arguments(message: &Json) -> Json {
    let mut message = message.clone();
    let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut);
    for call in calls.into_iter().flatten() {
        let call = if call.get("function").is_some() {
            &mut call["function"]
        } else {
            call
        };
        let Some(arguments) = call.get_mut("arguments") else {
            continue;
        };
        let Some(text) = arguments.as_str() else {
            continue;
        };
        if text.trim().is_empty() {
            *arguments = Json::Object(serde_json::Map::new());
        } else if let Ok(object) = serde_json::from_str(text) {
            *arguments = Json::Object(object);
        }
    }
    message
}

/// One line for a person: what went wrong and where.
fn describe(error: &Error) -> anyhow::Error {
    let mut text = format!("{NAME}: ");
    match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => text.push_str("does too much work, as if it would never end"),
        (ErrorKind::InvalidOperation, Some(detail)) => text.push_str(detail),
        (kind, Some(detail)) => text.push_str(&format!("{kind}: {detail}")),
        (kind, None) => text.push_str(&kind.to_string()),
    }
    if let Some(line) = error.line() {
        text.push_str(&format!(" (line {line})"));
    }
    // The template may raise any text.
    let line = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_ERROR_CHARS);
    anyhow!(String::from_iter(line))
}

/// Training marks the answer with `{% generation %}`. For a prompt the pair only opens a scope, as
/// `with` does; exchanging the words keeps the white-space rules of the tags.
fn replace_generation_tags(source: &str) -> String {
    let mut replaced = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (text, tag) = rest.split_at(at + 2);
        replaced.push_str(text);
        rest = tag;
        let name = tag.strip_prefix(['-', '+']).unwrap_or(tag).trim_start();
        for (word, replacement) in [("generation", "with"), ("endgeneration", "endwith")] {
            let Some(after) = name.strip_prefix(word) else {
                continue;
            };
            let end = after.trim_start();
            if end
                .strip_prefix(['-', '+'])
                .unwrap_or(end)
                .starts_with("%}")
            {
                replaced.push_str(&tag[..tag.len() - name.len()]);
                replaced.push_str(replacement);
                rest = after;
            }
        }
    }
    replaced.push_str(rest);
    replaced
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(python::invalid(message.to_string()))
}

/// The current time in UTC in a `strftime` format: the local zone cannot be read without the environment.
pub fn utc_now(format: &str) -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    python::strftime(format, now.as_secs())
}

fn format_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match python::as_float(value) {
        Some(float) => out
            .write_str(&python::float_text(float))
            .map_err(Error::from),
        None => escape_formatter(out, state, value),
    }
}

fn string(state: &State, value: &Value) -> Result<Value, Error> {
    match python::as_float(value) {
        Some(float) => Ok(python::float_text(float).into()),
        None => minijinja::filters::string(state, value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_scopes() {
        for (source, expected) in [
            (
                "a{% generation %}b{% endgeneration %}c",
                "a{% with %}b{% endwith %}c",
            ),
            (
                "{%- generation -%}b{%-endgeneration+%}",
                "{%- with -%}b{%-endwith+%}",
            ),
            (
                "{% generation_x %}{% set generation = 1 %}",
                "{% generation_x %}{% set generation = 1 %}",
            ),
            ("{%", "{%"),
            ("{%- generation", "{%- generation"),
        ] {
            assert_eq!(replace_generation_tags(source), expected);
        }
    }
}
