//! What comes out of a chat model, taken apart: thinking, answer, tool calls, and stop strings.
//!
//! Pure functions and small state machines over text: no model, no terminal.

use serde_json::{Map, Value, json};

/// Holds text back as long as it may turn into a stop string.
#[derive(Debug, Default)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

impl StopFilter {
    /// A filter for these strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            held: String::new(),
        }
    }

    /// Takes more text; returns what can be shown now, and whether a stop string was completed (the text ends
    /// before it).
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()))
            .min();
        if let Some(at) = found {
            let shown = self.held[..at].to_owned();
            self.held.clear();
            return (shown, true);
        }
        // The longest end of the text that begins a stop string stays.
        let keep = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(|&at| {
                self.stops
                    .iter()
                    .any(|stop| stop.starts_with(&self.held[at..]))
            })
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back, when no more text comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// True where a rendered prompt ends inside a thinking block, so that the answer begins with thinking.
pub fn ends_in_thinking(prompt: &str) -> bool {
    match (prompt.rfind("<think>"), prompt.rfind("</think>")) {
        (Some(open), Some(close)) => open > close,
        (Some(_), None) => true,
        _ => false,
    }
}

/// An answer without its tool calls, and the calls in OpenAI's form: `name` and `arguments`, a JSON object.
///
/// The form is Qwen 3.5's: `<tool_call>`, `<function=NAME>`, `<parameter=KEY>` with the value on lines of its own.
/// A JSON object in place of parameters is taken too. A block that cannot be read stays in the text. `tools`
/// (OpenAI's form) say which parameters are not strings.
pub fn take_tool_calls(text: &str, tools: Option<&Value>) -> (String, Vec<Value>) {
    const OPEN: &str = "<tool_call>";
    const CLOSE: &str = "</tool_call>";
    let (mut prose, mut calls, mut rest) = (String::new(), Vec::new(), text);
    while let Some(start) = rest.find(OPEN) {
        let Some(length) = rest[start..].find(CLOSE) else {
            break;
        };
        let block = &rest[start + OPEN.len()..start + length];
        let end = start + length + CLOSE.len();
        match parse_call(block.trim(), tools) {
            Some(call) => {
                prose.push_str(&rest[..start]);
                calls.push(call);
            }
            None => prose.push_str(&rest[..end]),
        }
        rest = &rest[end..];
    }
    prose.push_str(rest);
    if calls.is_empty() {
        return (text.to_owned(), calls);
    }
    (prose.trim().to_owned(), calls)
}

fn parse_call(block: &str, tools: Option<&Value>) -> Option<Value> {
    if let Ok(Value::Object(call)) = serde_json::from_str::<Value>(block) {
        let name = call.get("name")?.as_str()?.to_owned();
        let arguments = call.get("arguments").cloned().unwrap_or_else(|| json!({}));
        return Some(json!({"name": name, "arguments": arguments}));
    }
    let (name, body) = block.strip_prefix("<function=")?.split_once('>')?;
    let body = body.trim().strip_suffix("</function>")?.trim();
    if let Ok(arguments @ Value::Object(_)) = serde_json::from_str::<Value>(body) {
        return Some(json!({"name": name, "arguments": arguments}));
    }
    let mut arguments = Map::new();
    let mut rest = body;
    while let Some(parameter) = rest.strip_prefix("<parameter=") {
        let (key, value) = parameter.split_once('>')?;
        // The value ends at the closing tag before the next parameter, so that it may hold one itself.
        let end = value
            .match_indices("</parameter>")
            .map(|(at, tag)| (at, value[at + tag.len()..].trim_start()))
            .find(|(_, after)| after.is_empty() || after.starts_with("<parameter="));
        let (end, after) = end?;
        let value = value[..end].strip_prefix('\n').unwrap_or(&value[..end]);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let kind = parameter_kind(tools, name, key);
        arguments.insert(key.to_owned(), typed(value, kind.as_deref()));
        rest = after;
    }
    rest.is_empty()
        .then(|| json!({"name": name, "arguments": arguments}))
}

/// The JSON type that a tool's schema gives a parameter.
fn parameter_kind(tools: Option<&Value>, name: &str, key: &str) -> Option<String> {
    let tool = tools?.as_array()?.iter().find_map(|tool| {
        let function = tool.get("function").unwrap_or(tool);
        (function.get("name")?.as_str()? == name).then_some(function)
    })?;
    let kind = tool
        .get("parameters")?
        .get("properties")?
        .get(key)?
        .get("type")?;
    kind.as_str().map(str::to_owned)
}

/// A parameter's text as the JSON value that its schema asks for; without a schema, or where it does not fit, text.
fn typed(text: &str, kind: Option<&str>) -> Value {
    let parsed = serde_json::from_str::<Value>(text.trim()).ok();
    let fitting = match (kind, parsed) {
        (Some("integer"), Some(Value::Number(n))) => match n.as_f64() {
            // Models write 230.0 where 230 was asked for.
            Some(f) if !n.is_i64() && !n.is_u64() && f.fract() == 0.0 && f.abs() < 9e15 => {
                Some(json!(f as i64))
            }
            _ => Some(Value::Number(n)),
        },
        (Some("number"), Some(v @ Value::Number(_)))
        | (Some("boolean"), Some(v @ Value::Bool(_)))
        | (Some("array"), Some(v @ Value::Array(_)))
        | (Some("object"), Some(v @ Value::Object(_)))
        | (Some("null"), Some(v @ Value::Null)) => Some(v),
        (Some("boolean"), None) => match text.trim() {
            "True" => Some(json!(true)),
            "False" => Some(json!(false)),
            _ => None,
        },
        _ => None,
    };
    fitting.unwrap_or_else(|| Value::String(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(stops: &[&str]) -> StopFilter {
        StopFilter::new(&stops.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_stop_string_is_found_across_pieces() {
        let mut f = filter(&["END", "\n\n"]);
        assert_eq!(f.push("abc E"), ("abc ".to_owned(), false));
        assert_eq!(f.push("N"), (String::new(), false));
        assert_eq!(f.push("Dx"), (String::new(), true));
    }

    #[test]
    fn text_that_only_looked_like_a_stop_string_is_shown() {
        let mut f = filter(&["END"]);
        assert_eq!(f.push("E"), (String::new(), false));
        assert_eq!(f.push("EN"), ("E".to_owned(), false));
        assert_eq!(f.finish(), "EN");
        assert_eq!(filter(&[]).push("any"), ("any".to_owned(), false));
    }

    #[test]
    fn an_open_thinking_block_is_seen() {
        assert!(ends_in_thinking("<|im_start|>assistant\n<think>\n"));
        assert!(!ends_in_thinking("<think>\n\n</think>\n\n"));
        assert!(!ends_in_thinking("hello"));
    }

    #[test]
    fn calls_are_taken_out_of_prose() {
        let text = "Let me look.\n<tool_call>\n<function=get>\n<parameter=city>\nParis\n</parameter>\n\
                    <parameter=days>\n3.0\n</parameter>\n</function>\n</tool_call>\nDone.";
        let tools = json!([{"type": "function", "function": {"name": "get", "parameters":
            {"properties": {"days": {"type": "integer"}}}}}]);
        let (prose, calls) = take_tool_calls(text, Some(&tools));
        assert_eq!(prose, "Let me look.\n\nDone.");
        assert_eq!(
            calls,
            [json!({"name": "get", "arguments": {"city": "Paris", "days": 3}})]
        );
    }

    #[test]
    fn values_may_hold_tags_and_lines() {
        let text = "<tool_call>\n<function=f>\n<parameter=a>\nx </parameter> $ <y>\nz\n</parameter>\n</function>\n</tool_call>";
        let (_, calls) = take_tool_calls(text, None);
        assert_eq!(calls[0]["arguments"]["a"], "x </parameter> $ <y>\nz");
    }

    #[test]
    fn json_bodies_are_taken_and_unreadable_ones_stay() {
        let text = "<tool_call><function=f>{\"a\": [1]}</function></tool_call>";
        assert_eq!(
            take_tool_calls(text, None).1[0]["arguments"]["a"],
            json!([1])
        );
        let text = "<tool_call>what</tool_call> and <tool_call>{\"name\": \"g\"}</tool_call>";
        let (prose, calls) = take_tool_calls(text, None);
        assert_eq!(prose, "<tool_call>what</tool_call> and");
        assert_eq!(calls, [json!({"name": "g", "arguments": {}})]);
        let cut = "text <tool_call>\n<function=f>";
        assert_eq!(take_tool_calls(cut, None), (cut.to_owned(), vec![]));
    }
}
