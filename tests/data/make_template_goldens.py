"""Renders conversations with Python's Jinja2 and stores them for tests/template.rs.

    pip install jinja2==3.1.6
    python tests/data/make_template_goldens.py DEMO_TEMPLATE PUBLISHED_TEMPLATE

The environment is the one that Hugging Face's apply_chat_template builds: sandboxed, blocks trimmed, loop
controls, {% generation %} tags, and a tojson that leaves HTML and non-ASCII characters as they are.
"""

import json
import pathlib
import sys
from datetime import datetime

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return env


def render(template, case):
    context = {
        "messages": case["messages"],
        "tools": case.get("tools"),
        "documents": None,
        "add_generation_prompt": case.get("add_generation_prompt", True),
        "bos_token": "",
        "eos_token": "<|im_end|>",
    }
    if "enable_thinking" in case:
        context["enable_thinking"] = case["enable_thinking"]
    try:
        return {"text": template.render(context)}
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error)}


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool(content, **more):
    return {"role": "tool", "content": content, **more}


def call(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place. Units: °C <or> °F & 'more'",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "City, e.g. \"Zürich\" or 東京"},
                "days": {"type": "integer", "default": 1, "minimum": 0},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["place"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "line one\nline two\ttab \\ slash / \u2028 \u007f \u0001 🔎",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "threshold": {"type": "number", "default": 0.5, "examples": [1.0, 1e-7, 1e20, 12345678.9, -0.0]},
                "nested": {"type": "object", "properties": {}, "additionalProperties": False},
                "nothing": None,
                "list": [],
            },
        },
    },
}
NO_PARAMETERS = {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}}

UNICODE = "Grüße, 世界! नमस्ते 👩‍👩‍👧 שלום\u200b e\u0301 \ufeff"
TOOL_TURN = [
    user("Weather in Zürich and Tokyo?"),
    assistant(
        "",
        tool_calls=[call("get_weather", {"place": "Zürich", "days": 2}), call("get_weather", {"place": "東京"})],
    ),
    tool('{"temperature": 12.5, "sky": "<cloudy>"}', tool_call_id="a"),
    tool("18 °C\nclear", tool_call_id="b"),
]

CASES = [
    ("one question", dict(messages=[user("Hello")])),
    ("thinking on", dict(messages=[user("Hello")], enable_thinking=True)),
    ("thinking off", dict(messages=[user("Hello")], enable_thinking=False)),
    ("no generation prompt", dict(messages=[user("Hello"), assistant("Hi")], add_generation_prompt=False)),
    ("system message", dict(messages=[system("Be brief."), user("Hello")])),
    ("space around", dict(messages=[system("  \n Be brief.\n\n"), user("\t Hello \n"), assistant(" Hi "), user(" ")])),
    ("empty system message", dict(messages=[system(""), user("Hello")])),
    ("empty user message", dict(messages=[user("")])),
    ("empty answer", dict(messages=[user("a"), assistant(""), user("b")])),
    ("unicode", dict(messages=[system(UNICODE), user(UNICODE), assistant(UNICODE), user("🇨🇭")])),
    ("markup in text", dict(messages=[user("<b>&amp; 'x' \"y\" {{ 1 }} {% if %} <|im_end|></b>")])),
    ("three turns", dict(messages=[user("1"), assistant("one"), user("2"), assistant("two"), user("3")])),
    ("parts", dict(messages=[user([{"type": "text", "text": "Look: "}, {"type": "text", "text": "here"}])], demo=False)),
    ("system parts", dict(messages=[system([{"type": "text", "text": "A"}, {"text": "B"}]), user("C")], demo=False)),
    ("image part", dict(messages=[user([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "?"}])], demo=False)),
    ("unknown part", dict(messages=[user([{"type": "audio"}])], demo=False)),
    ("empty parts", dict(messages=[user("a"), assistant([]), user("b")])),
    ("null content", dict(messages=[user("a"), assistant(None), user("b")])),
    ("no content", dict(messages=[user("a"), {"role": "assistant"}, user("b")])),
    ("number as content", dict(messages=[user(5)], demo=False)),
    ("no user", dict(messages=[system("Only this.")])),
    ("no messages", dict(messages=[], demo=False)),
    ("unknown role", dict(messages=[user("a"), {"role": "critic", "content": "b"}])),
    ("reasoning kept in the last turn", dict(messages=[user("17+25?"), assistant("42", reasoning_content="\n10+20, 7+5\n")], add_generation_prompt=False)),
    ("reasoning dropped before it", dict(messages=[user("17+25?"), assistant("42", reasoning_content="sum"), user("Sure?")], enable_thinking=True)),
    ("think block in the answer", dict(messages=[user("17+25?"), assistant("<think>\nsum\n</think>\n\n42"), user("Sure?")])),
    ("think block in the last answer", dict(messages=[user("17+25?"), assistant("<think>\nsum\n</think>\n\n42")], add_generation_prompt=False)),
    ("empty reasoning", dict(messages=[user("a"), assistant("b", reasoning_content="")])),
    ("null reasoning", dict(messages=[user("a"), assistant("b", reasoning_content=None)])),
    ("tools", dict(messages=[user("Weather?")], tools=[WEATHER])),
    ("tools and system message", dict(messages=[system("Be brief."), user("Weather?")], tools=[WEATHER, SEARCH, NO_PARAMETERS], enable_thinking=True)),
    ("no tools", dict(messages=[user("Weather?")], tools=[])),
    ("two calls and results", dict(messages=TOOL_TURN, tools=[WEATHER])),
    ("answer after results", dict(messages=TOOL_TURN + [assistant("12.5 °C and 18 °C."), user("Thanks")], tools=[WEATHER])),
    (
        "agent with reasoning",
        dict(
            messages=[
                system("Use tools."),
                user("Find x"),
                assistant("I will search.", reasoning_content="Need data.", tool_calls=[call("search", {"query": "x"})]),
                tool("nothing"),
                assistant("Again.", reasoning_content="Try y.", tool_calls=[call("search", {"query": "y", "limit": 3})]),
                tool("found"),
                assistant("It is y.", reasoning_content="Done."),
                user("And z?"),
            ],
            tools=[SEARCH],
            enable_thinking=True,
        ),
    ),
    (
        "argument types",
        dict(
            messages=[
                user("go"),
                assistant(
                    None,
                    tool_calls=[
                        call(
                            "f",
                            {
                                "z": "text\nwith <b> & 'quotes' \"too\"",
                                "a": 3,
                                "float": 1.0,
                                "small": 1e-7,
                                "big": 1e22,
                                "whole": 12345678901234567890,
                                "negative": -5,
                                "yes": True,
                                "no": False,
                                "none": None,
                                "list": [1, 2.5, "é", None, True, [], {}],
                                "object": {"k": "v", "b": [{"c": "</parameter>"}], "a": -0.5},
                                "": "",
                            },
                        )
                    ],
                ),
                tool("ok"),
            ]
        ),
    ),
    ("call without arguments", dict(messages=[user("time?"), assistant("", tool_calls=[call("now", {})]), tool("noon")])),
    ("call without the function level", dict(messages=[user("time?"), assistant("x", tool_calls=[{"name": "now", "arguments": {"zone": "UTC"}}]), tool("noon"), tool("")])),
    ("arguments as text", dict(messages=[user("time?"), assistant("", tool_calls=[call("now", '{"zone": "UTC", "b": 1, "a": 2}')]), tool("noon")], normalize=True)),
    ("result that looks like a question", dict(messages=[user("a"), assistant("b"), user("<tool_response>\nx\n</tool_response>")])),
    ("result first", dict(messages=[tool("x"), user("a")])),
    ("several system messages", dict(messages=[system("One."), {"role": "developer", "content": "Two."}, system(""), system([{"type": "text", "text": "Three."}]), user("a")], normalize=True)),
    ("developer message", dict(messages=[{"role": "developer", "content": "One."}, user("a")], normalize=True)),
    ("late system message", dict(messages=[system("One."), user("a"), assistant("b"), system("Now in French."), user("c")], normalize=True)),
    ("system message at the end", dict(messages=[user("a"), assistant("b"), user("c"), {"role": "developer", "content": "Be quick."}], normalize=True)),
    ("system message among results", dict(messages=TOOL_TURN[:3] + [system("Hurry.")] + TOOL_TURN[3:], tools=[WEATHER], normalize=True)),
    ("system message not first", dict(messages=[user("a"), system("b"), user("c")])),
]

SNIPPETS = [
    "{{ [1.0, 1e16, 1e-5, 123456789.125, true, none, 'é<&>\\'\"'] | tojson }}",
    "{{ {'b': 1, 'a': [], 'c': {}} | tojson(indent=2) }}",
    "{{ {'b': [1, {'x': 2}], 'a': 'é'} | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}",
    "{{ {'b': [1, {'x': 2}], 'a': '😀\\u007f'} | tojson(indent=1, sort_keys=true, ensure_ascii=true) }}",
    "{{ {1: 2, true: 3} | tojson }}",
    "{{ 1e16 }} {{ 1e-7 }} {{ 0.1 + 0.2 }} {{ 3.0 }} {{ -0.0 }} {{ 1e16 | string }} {{ 7 // 2 }} {{ 7 / 2 }}",
    "{{ true }} {{ none }} {{ missing }} {{ [1, 'a', none, true, 1.5] }} {{ {'a': 'b'} }}",
    "a\n{% generation %}\n  {% set x = 1 %}\nb{{ x }}\n{% endgeneration %}\nc{{ x }}",
    "{% set x = 'out' %}{%- generation -%} {% set x = 'in' %}{{ x }} {%- endgeneration -%} {{ x }}",
    "  {% if true %}\n  x\n  {% endif %}\n  y\n\n",
    "{%- for i in range(9) %}\n{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}\n{% endfor %}",
    "{{ ' a b '.strip() }}|{{ 'a,b'.split(',') }}|{{ 'xxaxx'.lstrip('x') }}|{{ 'ab'.startswith('a') }}|{{ 'aB'.upper() }}|{{ 'a-b'.replace('-', '+') }}",
    "{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}={{ v }};{% endfor %}{{ {'a': 1}.get('b', 'no') }}",
    "{{ messages[-1].content }}{{ messages[:1] | length }}{{ messages[0]['role'] }}",
    "{{ raise_exception('stop <here>') }}",
    "{% macro m(a, b='x') %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}",
    "{{ '%s-%d' | format('a', 3) }} {{ ['a', 'b'] | join(', ') }} {{ 'abc'[::-1] }} {{ 'a' in 'abc' }} {{ 5 is divisibleby 5 }}",
    "{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content }} {{ messages | map(attribute='role') | join(',') }}",
]


def normalize(messages):
    """What qrun's normalize_messages does, in Python, so that the goldens are independent of it."""

    def text_of(message):
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        return (content or "").strip()

    def is_system(message):
        return message["role"] in ("system", "developer")

    start = 0
    while start < len(messages) and is_system(messages[start]):
        start += 1
    result = []
    if start == 1:
        result = [{**messages[0], "role": "system"}]
    elif start > 1:
        result = [system("\n\n".join(text for text in map(text_of, messages[:start]) if text))]
    for message in messages[start:]:
        if is_system(message):
            if text_of(message):
                result.append(user("[System note]\n" + text_of(message)))
            continue
        message = json.loads(json.dumps(message))
        for item in message.get("tool_calls") or []:
            function = item.get("function", item)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"])
        result.append(message)
    return result


def main():
    templates = {name: environment().from_string(pathlib.Path(path).read_text()) for name, path in zip(("demo", "published"), sys.argv[1:3], strict=True)}
    conversations = []
    for name, case in CASES:
        with_demo = case.pop("demo", True)
        # Through JSON, so that Python and Rust start from the same values.
        case = json.loads(json.dumps(case))
        stored = {"name": name, **case}
        if case.pop("normalize", False):
            case["messages"] = normalize(case["messages"])
            stored["normalized"] = case["messages"]
            del stored["normalize"]
        if with_demo:
            stored["demo"] = render(templates["demo"], case)
        stored["published"] = render(templates["published"], case)
        conversations.append(stored)
    messages = [user("first"), assistant("second")]
    snippets = []
    for source in SNIPPETS:
        template = environment().from_string(source)
        snippets.append({"source": source, **render(template, {"messages": messages})})
    goldens = {"conversations": conversations, "snippet_messages": messages, "snippets": snippets}
    path = pathlib.Path(__file__).parent / "template_goldens.json"
    path.write_text(json.dumps(goldens, ensure_ascii=False, indent=1) + "\n")
    print(len(conversations), "conversations,", len(snippets), "snippets")


main()
