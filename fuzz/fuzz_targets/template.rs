//! Compiles a chat template and renders a conversation with it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use qrun::template::{ChatTemplate, RenderOptions, normalize_messages};
use serde_json::json;

fuzz_target!(|source: &str| {
    let messages = normalize_messages(&json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "<think>\nb\n</think>\n\nc", "tool_calls": [
            {"function": {"name": "f", "arguments": "{\"x\": [1, 2.5, null]}"}},
        ]},
        {"role": "tool", "content": "d"},
    ]));
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let result = ChatTemplate::new(source).and_then(|template| {
        template.render(&RenderOptions {
            messages: &messages,
            tools: Some(&tools),
            add_generation_prompt: true,
            enable_thinking: Some(false),
            bos_token: "",
            eos_token: "<|im_end|>",
        })
    });
    if let Err(error) = result {
        let message = error.to_string();
        assert!(
            !message.contains('\n') && !message.contains("engine failed"),
            "{message:?}"
        );
    }
});
