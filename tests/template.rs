//! Chat templates against renderings of Python's Jinja2 (`data/make_template_goldens.py`), and on damaged
//! and hostile templates.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;

use ggml_metal::Gguf;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use qrun::template::{ChatTemplate, RenderOptions, normalize_messages};
use serde_json::{Value, json};

/// The repository.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folder with published templates, beside the repository; tests that need it pass without it.
fn shared(path: &str) -> Option<String> {
    let path = root().join("../shared").join(path);
    let text = std::fs::read_to_string(&path).ok();
    if text.is_none() {
        println!("skipped: no file {}", path.display());
    }
    text
}

fn goldens() -> Value {
    serde_json::from_str(include_str!("data/template_goldens.json")).expect("valid goldens")
}

fn options(messages: &Value) -> RenderOptions<'_> {
    RenderOptions {
        messages,
        tools: None,
        add_generation_prompt: true,
        enable_thinking: None,
        bos_token: "",
        eos_token: "<|im_end|>",
    }
}

fn render(source: &str, messages: &Value) -> anyhow::Result<String> {
    ChatTemplate::new(source)?.render(&options(messages))
}

/// Compares a rendering with `{"text": ..}` or `{"error": ..}` of a golden.
fn check(name: &str, result: anyhow::Result<String>, expected: &Value) {
    match (
        result,
        expected["text"].as_str(),
        expected["error"].as_str(),
    ) {
        (Ok(text), Some(expected), _) => assert_eq!(text, expected, "{name}"),
        (Err(error), _, Some(expected)) => {
            let error = format!("{error:#}");
            assert!(
                error.starts_with(&format!("chat template: {expected}")),
                "{name}: {error}"
            );
        }
        (result, ..) => panic!("{name}: {result:?}, expected {expected}"),
    }
}

fn check_conversations(template: &str, key: &str, at_least: usize) {
    let template = ChatTemplate::new(template).unwrap();
    let goldens = goldens();
    let mut n_checked = 0;
    for case in goldens["conversations"].as_array().unwrap() {
        let (name, expected) = (case["name"].as_str().unwrap(), &case[key]);
        if expected.is_null() {
            continue;
        }
        let mut messages = case["messages"].clone();
        if let Some(normalized) = case.get("normalized") {
            messages = normalize_messages(&messages);
            assert_eq!(&messages, normalized, "{name}");
        }
        let result = template.render(&RenderOptions {
            tools: case.get("tools"),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(true),
            enable_thinking: case["enable_thinking"].as_bool(),
            ..options(&messages)
        });
        check(name, result, expected);
        n_checked += 1;
    }
    assert!(n_checked >= at_least, "{n_checked}");
}

#[test]
fn demo_template_equals_jinja2() {
    let Some(template) = shared("models/demo/chat_template.jinja") else {
        return;
    };
    check_conversations(&template, "demo", 40);
}

#[test]
fn published_template_equals_jinja2() {
    let Some(template) = shared("tokenizer/qwen3.5-chat-template.jinja") else {
        return;
    };
    check_conversations(&template, "published", 45);
}

#[test]
fn snippets_equal_jinja2() {
    let goldens = goldens();
    for snippet in goldens["snippets"].as_array().unwrap() {
        let source = snippet["source"].as_str().unwrap();
        check(
            source,
            render(source, &goldens["snippet_messages"]),
            snippet,
        );
    }
}

#[test]
fn normalized_conversations_always_render() {
    let Some(published) = shared("tokenizer/qwen3.5-chat-template.jinja") else {
        return;
    };
    let template = ChatTemplate::new(&published).unwrap();
    let roles = ["system", "developer", "user", "assistant", "tool"];
    // Every conversation of one to four messages that has a question in it.
    for n in 1..=4u32 {
        for code in 0..5usize.pow(n) {
            let roles: Vec<&str> = (0..n).map(|at| roles[code / 5usize.pow(at) % 5]).collect();
            if !roles.contains(&"user") {
                continue;
            }
            let messages: Value = roles
                .iter()
                .map(|role| json!({"role": role, "content": "x"}))
                .collect();
            let text = template
                .render(&options(&normalize_messages(&messages)))
                .unwrap();
            assert!(text.matches("<|im_start|>system").count() <= 1, "{roles:?}");
        }
    }
}

#[test]
fn normalizing_keeps_what_needs_no_change() {
    for messages in [
        json!([]),
        json!(null),
        json!({"role": "user"}),
        json!([1, "x", null, {"role": 3}, {"content": "x"}]),
        json!([{"role": "system", "content": " a ", "name": "n"}, {"role": "user", "content": [{"type": "image"}]}]),
        json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": "not json"}}, {"x": 1}, 5]}]),
    ] {
        assert_eq!(normalize_messages(&messages), messages);
    }
}

#[test]
fn normalizing_twice_changes_nothing_more() {
    for case in goldens()["conversations"].as_array().unwrap() {
        let once = normalize_messages(&case["messages"]);
        assert_eq!(normalize_messages(&once), once);
    }
}

#[test]
fn key_order_of_tools_is_kept() {
    let tools = json!([{"z": 1, "a": {"y": 2, "b": 3}}]);
    let text = ChatTemplate::new("{{ tools | tojson }}")
        .unwrap()
        .render(&RenderOptions {
            tools: Some(&tools),
            ..options(&json!([]))
        })
        .unwrap();
    assert_eq!(text, r#"[{"z": 1, "a": {"y": 2, "b": 3}}]"#);
}

#[test]
fn tokens_and_thinking_reach_the_template() {
    let template = ChatTemplate::new(
        "{{ bos_token }}|{{ eos_token }}|{{ enable_thinking is defined }}|{{ enable_thinking }}|{{ tools is none }}",
    )
    .unwrap();
    let messages = json!([]);
    let options = RenderOptions {
        bos_token: "<s>",
        ..options(&messages)
    };
    assert_eq!(
        template.render(&options).unwrap(),
        "<s>|<|im_end|>|False||True"
    );
    let options = RenderOptions {
        enable_thinking: Some(false),
        ..options
    };
    assert_eq!(
        template.render(&options).unwrap(),
        "<s>|<|im_end|>|True|False|True"
    );
}

#[test]
fn the_date_is_available() {
    let year = render("{{ strftime_now('%Y') }}", &json!([])).unwrap();
    assert!(year.parse::<u32>().unwrap() >= 2025);
}

#[test]
fn errors_are_one_line_with_the_place() {
    for (source, expected) in [
        ("{{ 1 }}\n{% for %}", "(line 2)"),
        ("\n\n{{ missing() }}", "(line 3)"),
        ("{{ raise_exception('a\nb') }}", "chat template: a b"),
        ("{{ raise_exception('a' * 9999) }}", "chat template: aaa"),
        ("{{ 1 | no_such_filter }}", "no_such_filter"),
        ("{{ missing | tojson }}", "cannot be written as JSON"),
        (
            "{{ 1 | tojson(indent=99) }}",
            "`indent` of `tojson` is more than 16",
        ),
        (
            "{{ 1 | tojson(separators=[1]) }}",
            "`separators` of `tojson`",
        ),
        ("{{ 1 | tojson(nonsense=1) }}", "nonsense"),
    ] {
        let error = format!("{:#}", render(source, &json!([])).unwrap_err());
        assert!(
            error.starts_with("chat template: ") && error.contains(expected),
            "{error}"
        );
        assert!(!error.contains('\n') && error.len() <= 300, "{error}");
    }
    assert!(ChatTemplate::new(&" ".repeat(2_000_000)).is_err());
}

#[test]
fn a_conversation_of_a_million_tokens_fits() {
    let Some(published) = shared("tokenizer/qwen3.5-chat-template.jinja") else {
        return;
    };
    let template = ChatTemplate::new(&published).unwrap();
    let text = "four score and seven ".repeat(100);
    let messages: Value = (0..2_000)
        .map(|at| match at % 4 {
            0 => json!({"role": "user", "content": text}),
            2 => json!({"role": "tool", "content": text}),
            _ => json!({
                "role": "assistant",
                "content": text,
                "reasoning_content": text,
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": text, "b": [1, 2, text]}}}],
            }),
        })
        .collect();
    let prompt = template.render(&options(&messages)).unwrap();
    assert!(prompt.len() > 4_000_000, "{}", prompt.len());
}

#[test]
fn hostile_templates_are_errors() {
    let set = "{% set ns = namespace(x=['aaaaaaaa']) %}{% for i in range(99999) %}";
    for source in [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
            .to_owned(),
        "{{ 'x' * 9999999999 }}".to_owned(),
        "{{ range(99999) | join('y' * 99999) }}".to_owned(),
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}".to_owned(),
        format!("{set}{{% set ns.x = ns.x ~ ns.x %}}{{% endfor %}}"),
        format!("{set}{{% set ns.x = [ns.x, ns.x] %}}{{% endfor %}}{{{{ ns.x | tojson }}}}"),
        format!("{set}{{% set ns.x = [ns.x] %}}{{% endfor %}}{{{{ ns.x | tojson }}}}"),
        format!("{{{{ {}1 }}}}", "(".repeat(99_999)),
        "{% if 1 %}".repeat(9_999),
    ] {
        let error = render(&source, &json!([])).unwrap_err().to_string();
        assert!(
            error.starts_with("chat template: ") && error.len() < 200,
            "{error}"
        );
    }
}

#[test]
fn long_chains_do_not_exhaust_the_stack() {
    for (link, count) in [
        ("-", 99_999),
        ("not ", 29_999),
        (" + 1", 29_999),
        ("1 if 0 else ", 9_999),
    ] {
        let chain = link.repeat(count);
        let source = if link == " + 1" {
            format!("{{{{ 1{chain} }}}}")
        } else {
            format!("{{{{ {chain}1 }}}}")
        };
        let _ = render(&source, &json!([]));
    }
    let elifs = "{% elif 0 %}".repeat(9_999);
    let _ = render(&format!("{{% if 0 %}}{elifs}{{% endif %}}"), &json!([]));
    let nested = "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}";
    assert_eq!(render(nested, &json!([])).unwrap(), "");
}

/// A template with one of everything, for damaging.
const SAMPLE: &str = r#"
{%- macro text(content, trim=true) %}
    {%- if content is string %}{{ content | trim if trim else content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}{{ part.text }}{% endfor %}
    {%- else %}{{ raise_exception('no text') }}{% endif %}
{%- endmacro %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
    {%- if m.role == "user" and not ns.found %}{% set ns.last = loop.index0 %}{% set ns.found = true %}{% endif %}
{%- endfor %}
{%- if tools %}{% for tool in tools %}{{ '
' + (tool | tojson(indent=2)) }}{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if loop.first or loop.previtem.role != m.role %}{{ '<|im_start|>' ~ m['role'] ~ '
' }}{% endif %}
    {% generation %}{{ text(m.content) }}{% endgeneration %}
    {%- for k, v in (m.meta or {}).items() %}{{ k.upper() }}={{ v | string }}{% endfor %}
    {#- a comment -#}
    {{- '<|im_end|>\n'.split('<')[-1].rstrip('\n') }}
{%- endfor %}
{%- if add_generation_prompt %}{{ strftime_now('%Y') | int > 2000 }}{% endif %}
"#;

#[derive(Clone, Debug)]
enum Damage {
    Delete(usize, usize),
    Repeat(usize, usize, usize),
    Insert(usize, String),
}

fn damage() -> impl Strategy<Value = Damage> {
    let tokens = prop::sample::select(vec![
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        "-",
        "|",
        "(",
        ")",
        "[",
        "]",
        "'",
        "\"",
        ":",
        ".",
        "~",
        "**",
        " for ",
        " in ",
        " if ",
        " else ",
        " set ",
        "{% endfor %}",
        "{% raw %}",
        "messages",
        "ns",
        " loop(messages) ",
        " not ",
        "é",
        "range(99999)",
        "|tojson",
        "|list",
        "|join(',')",
        " recursive ",
        "{% continue %}",
        "{% generation %}",
    ]);
    let token = prop_oneof![tokens.prop_map(String::from), any::<String>()];
    prop_oneof![
        (any::<usize>(), 0..80usize).prop_map(|(at, length)| Damage::Delete(at, length)),
        (any::<usize>(), 0..80usize, 0..400usize)
            .prop_map(|(at, length, n)| Damage::Repeat(at, length, n)),
        (any::<usize>(), token).prop_map(|(at, text)| Damage::Insert(at, text)),
    ]
}

fn apply(source: &[char], damage: Damage) -> Vec<char> {
    let (at, length, middle) = match damage {
        Damage::Delete(at, length) => (at, length, Vec::new()),
        Damage::Insert(at, text) => (at, 0, text.chars().collect()),
        Damage::Repeat(at, length, n) => {
            let at = at % (source.len() + 1);
            (
                at,
                length,
                source[at..(at + length).min(source.len())].repeat(n),
            )
        }
    };
    let at = at % (source.len() + 1);
    [
        &source[..at],
        &middle,
        &source[(at + length).min(source.len())..],
    ]
    .concat()
}

/// A message whose fields may have any type.
fn message() -> impl Strategy<Value = Value> {
    let any_json = || {
        let leaf = prop_oneof![
            Just(json!(null)),
            any::<f64>().prop_map(|number| json!(number)),
            any::<String>().prop_map(Value::from),
            Just(json!("{\"a\": 1}")),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            let keys = prop::sample::select(vec!["text", "function", "arguments", "type"]);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((keys, inner), 0..4).prop_map(Value::from_iter),
            ]
        })
    };
    let roles = prop::sample::select(vec!["system", "developer", "user", "assistant", "tool"]);
    let message = (roles, any_json(), any_json()).prop_map(
        |(role, content, tool_calls)| json!({"role": role, "content": content, "tool_calls": tool_calls}),
    );
    prop_oneof![9 => message, 1 => any_json()]
}

#[test]
fn the_sample_renders() {
    let text = render(
        SAMPLE,
        &json!([{"role": "user", "content": " hi ", "meta": {"a": 1.5}}]),
    )
    .unwrap();
    assert_eq!(text, "<|im_start|>user\nhiA=1.5|im_end|>True");
}

thread_local! {
    /// The sample, and the template of the demo model.
    static TEMPLATES: [Vec<char>; 2] = {
        let demo = Gguf::open(&root().join("models/demo-Q4_K_M.gguf")).unwrap();
        let demo = qrun::vocab::chat_template(&demo).unwrap();
        [SAMPLE, &demo].map(|source| source.chars().collect())
    };
}

proptest! {
    // The same ten thousand on every run.
    #![proptest_config(ProptestConfig {
        cases: 10_000,
        rng_seed: RngSeed::Fixed(35),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_templates_never_panic_or_hang(
        of_demo in any::<bool>(),
        damages in prop::collection::vec(damage(), 1..5),
    ) {
        let mut source = TEMPLATES.with(|templates| templates[usize::from(of_demo)].clone());
        for damage in damages {
            source = apply(&source, damage);
        }
        let messages = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}], "meta": {"k": [1, {"x": 2.0}]}},
        ]);
        if let Err(error) = render(&String::from_iter(source), &messages) {
            let error = error.to_string();
            prop_assert!(!error.contains('\n') && !error.contains("engine failed"), "{}", error);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_conversation_can_be_normalized(messages in prop::collection::vec(message(), 0..6)) {
        let once = normalize_messages(&Value::Array(messages));
        prop_assert_eq!(&normalize_messages(&once), &once);
        let is_system = |message: &&Value| matches!(message["role"].as_str(), Some("system" | "developer"));
        prop_assert!(once.as_array().unwrap().iter().skip(1).find(is_system).is_none());
    }
}
