//! Takes tool calls and stop strings out of an answer, and tidies a conversation. Input: a line of JSON that is used
//! as the tools and as the messages, then the answer, whose first line is also the stop string.

#![no_main]

use libfuzzer_sys::fuzz_target;
use qrun::chat::{StopFilter, ends_in_thinking, take_tool_calls};
use qrun::template::normalize_messages;
use serde_json::Value;

fuzz_target!(|input: &str| {
    let (json, answer) = input.split_once('\n').unwrap_or(("", input));
    let json: Option<Value> = serde_json::from_str(json).ok();

    let (prose, calls) = take_tool_calls(answer, json.as_ref());
    assert!(calls.len() <= answer.matches("<tool_call>").count());
    assert!(prose.len() <= answer.len());
    for call in &calls {
        assert!(call["name"].is_string(), "{call}");
    }
    ends_in_thinking(answer);

    if let Some(json) = &json {
        let once = normalize_messages(json);
        assert_eq!(normalize_messages(&once), once);
    }

    // What is shown does not depend on the pieces in which the text comes.
    let stop = answer.lines().next().unwrap_or_default().to_owned();
    let text = answer.split_once('\n').map_or("", |(_, text)| text);
    let expected = match text.find(&stop) {
        Some(at) if !stop.is_empty() => &text[..at],
        _ => text,
    };
    let mut filter = StopFilter::new(&[stop]);
    let (mut shown, mut stopped) = (String::new(), false);
    for c in text.chars() {
        let (more, found) = filter.push(c.encode_utf8(&mut [0; 4]));
        shown.push_str(&more);
        if found {
            stopped = true;
            break;
        }
    }
    if !stopped {
        shown.push_str(&filter.finish());
    }
    assert_eq!(shown, expected);
});
