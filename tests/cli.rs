//! Whole commands on the demo model, as a shell or a script sees them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::io::Write;
use std::process::{Command, Output, Stdio};

use ggml_metal::peer::{PeerContext, PeerModel, PeerOptions, PeerParams};
use ggml_metal::{Backend, find_device};
use serde_json::Value;
use support::demo;

/// The program without this machine's configuration, on the demo model.
fn qrun() -> Command {
    let mut command = plain();
    command.env("QRUN_MODEL", demo());
    command
}

fn plain() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
    command
        .env("QRUN_CONFIG", "")
        .env_remove("QRUN_MODEL")
        .env("QRUN_THREADS", "2")
        .env("XDG_CACHE_HOME", std::env::temp_dir().join("qrun-no-cache"))
        .stdin(Stdio::null());
    command
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// Runs with text on stdin.
fn piped(command: &mut Command, input: &[u8]) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap()
}

const CAPITAL: [&str; 4] = ["-p", "What is the capital of France?", "--greedy", "-n40"];

#[test]
fn stdout_is_the_answer_and_stderr_is_silent() {
    let output = run(qrun().args(CAPITAL));
    assert_eq!(stdout(&output), "The capital of France is Paris.\n");
    assert_eq!(stderr(&output), "");
    assert_eq!(code(&output), 0);
}

#[test]
fn without_a_model_the_demo_is_used_and_named() {
    let output = run(plain().args(CAPITAL));
    assert_eq!(stdout(&output), "The capital of France is Paris.\n");
    assert!(
        stderr(&output).starts_with("using the demo model ")
            && stderr(&output).lines().count() == 1
    );
}

#[test]
fn raw_goes_on_from_the_text() {
    let output = run(qrun().args(["--raw", "-p", "Once upon a time", "--greedy", "-n8"]));
    assert!(
        stdout(&output).starts_with(" there was "),
        "{}",
        stdout(&output)
    );
}

#[test]
fn stdin_follows_the_prompt() {
    let together = run(qrun().args([
        "-p",
        "Say this:\n\nhello there",
        "--greedy",
        "-n20",
        "--json",
    ]));
    let apart = piped(
        qrun().args(["-p", "Say this:", "--greedy", "-n20", "--json"]),
        b"hello there",
    );
    let ids =
        |o: &Output| serde_json::from_str::<Value>(&stdout(o)).unwrap()["prompt_tokens"].clone();
    assert_eq!(ids(&together), ids(&apart));
    let alone = piped(
        qrun().args(["--greedy", "-n20"]),
        b"What is the capital of France?",
    );
    assert_eq!(stdout(&alone), "The capital of France is Paris.\n");
}

#[test]
fn no_prompt_is_wrong_usage_never_a_chat() {
    let output = run(&mut qrun());
    assert_eq!((code(&output), stdout(&output).as_str()), (2, ""));
    assert!(stderr(&output).contains("no prompt"), "{}", stderr(&output));
}

#[test]
fn wrong_usage_is_exit_code_2() {
    for args in [
        &["--no-such-flag"][..],
        &["-p", "x", "--top-p", "1.5"],
        &["-p", "x", "--temp", "nan"],
        &["-p", "x", "--samplers", "nonsense"],
        &["-p", "x", "-ctk", "q9"],
        &["-p", "x", "--json", "--jsonl"],
        &["-p", "x", "--json-schema", "{"],
        &["detokenize", "9999999"],
    ] {
        let output = run(qrun().args(args));
        assert_eq!(code(&output), 2, "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{args:?}");
    }
}

#[test]
fn a_model_that_cannot_be_used_is_one_line_and_exit_code_1() {
    let folder = tempfile::tempdir().unwrap();
    let cut = folder.path().join("cut.gguf");
    let bytes = std::fs::read(demo()).unwrap();
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    let text = folder.path().join("text.gguf");
    std::fs::write(&text, "hello").unwrap();
    for path in [
        cut.as_path(),
        text.as_path(),
        folder.path(),
        &folder.path().join("missing.gguf"),
    ] {
        for args in [
            &["-p", "x", "-m"][..],
            &["inspect"],
            &["tokenize", "x", "-m"],
        ] {
            let output = run(plain().args(args).arg(path));
            assert_eq!(code(&output), 1, "{args:?} {}", stderr(&output));
            let message = stderr(&output);
            assert_eq!(message.lines().count(), 1, "{message}");
            assert!(
                message.starts_with("error: ") && message.contains(path.to_str().unwrap()),
                "{message}"
            );
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let ask = |seed: &str| {
        let args = [
            "-p",
            "Tell me a story.",
            "--temp",
            "1",
            "--top-k",
            "0",
            "-n40",
            "--seed",
            seed,
        ];
        stdout(&run(qrun().args(args)))
    };
    assert_eq!(ask("7"), ask("7"));
    assert_ne!(ask("7"), ask("8"));
}

#[test]
fn json_holds_ids_counts_and_timings() {
    let output = run(qrun().args(CAPITAL).arg("--json"));
    let object: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(object["text"], "The capital of France is Paris.");
    assert_eq!(object["finish_reason"], "stop");
    assert_eq!(
        object["counts"]["prompt"],
        object["prompt_tokens"].as_array().unwrap().len()
    );
    assert_eq!(
        object["counts"]["output"],
        object["output_tokens"].as_array().unwrap().len()
    );
    assert!(object["timings"]["decode_tps"].as_f64().unwrap() > 0.0);
    assert_eq!(object["sampler"]["temp"], 0.0);
}

#[test]
fn the_token_limit_is_kept_and_said() {
    let output = run(qrun().args(["-p", "Tell me a story.", "--greedy", "-n5", "--json"]));
    let object: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(
        (&object["finish_reason"], &object["counts"]["output"]),
        (&"length".into(), &5.into())
    );
    let output = run(qrun().args(["-p", "x", "-n0"]));
    assert_eq!((code(&output), stdout(&output).as_str()), (0, ""));
}

#[test]
fn the_context_limit_ends_the_answer_or_refuses_the_prompt() {
    let args = [
        "-p",
        "Tell me a story.",
        "--greedy",
        "--ignore-eos",
        "-c64",
        "--json",
    ];
    let object: Value = serde_json::from_str(&stdout(&run(qrun().args(args)))).unwrap();
    assert_eq!(object["finish_reason"], "length");
    let n = |key: &str| object["counts"][key].as_u64().unwrap();
    assert_eq!(
        n("prompt") + n("output"),
        64 + 1,
        "the last token needs no room"
    );
    let output = run(qrun().args(["-p", "Tell me a story.", "-c8"]));
    assert_eq!(code(&output), 1);
    assert!(
        stderr(&output).contains("context of 8"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn jsonl_events_add_up_to_the_answer() {
    let output = run(qrun().args(CAPITAL).arg("--jsonl"));
    let events: Vec<Value> = stdout(&output)
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let text: String = events
        .iter()
        .filter(|e| e["type"] == "text")
        .map(|e| e["text"].as_str().unwrap().to_owned())
        .collect();
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["text"]),
        (&"done".into(), &text.as_str().into())
    );
}

#[test]
fn thinking_is_kept_apart() {
    let args = ["-p", "What is 17 + 25?", "--think", "--greedy", "-n200"];
    let output = run(qrun().args(args).arg("--json"));
    let object: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert!(
        object["reasoning"].as_str().unwrap().contains("17"),
        "{object}"
    );
    assert!(object["text"].as_str().unwrap().contains("42"), "{object}");
    assert!(
        !object["text"].as_str().unwrap().contains("think>"),
        "{object}"
    );
    let shown = run(qrun().args(args).arg("--show-thinking"));
    assert_eq!(stdout(&shown).trim_end(), object["text"].as_str().unwrap());
    assert!(stderr(&shown).contains(object["reasoning"].as_str().unwrap()));
    let silent = run(qrun().args(args));
    assert_eq!(stderr(&silent), "");
}

#[test]
fn the_thinking_budget_closes_the_block() {
    let args = [
        "-p",
        "What is 17 + 25?",
        "--think",
        "--greedy",
        "-n80",
        "--reasoning-budget",
        "5",
        "--json",
    ];
    let object: Value = serde_json::from_str(&stdout(&run(qrun().args(args)))).unwrap();
    assert!(
        object["counts"]["reasoning"].as_u64().unwrap() <= 7,
        "{object}"
    );
    let text = object["text"].as_str().unwrap();
    assert!(!text.is_empty() && !text.contains("think>"), "{object}");
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    let output = run(qrun().args(CAPITAL).args(["--stop", " is"]));
    assert_eq!(stdout(&output), "The capital of France\n");
}

#[test]
fn a_schema_gives_valid_json() {
    let schema = r#"{"type":"object","properties":{"animal":{"type":"string","maxLength":12},"legs":{"type":"integer"}},
        "required":["animal","legs"],"additionalProperties":false}"#;
    for (seed, thinking) in [("1", "--no-think"), ("2", "--think"), ("3", "--no-think")] {
        let args = [
            "-p",
            "Describe an animal.",
            "--json-schema",
            schema,
            "--seed",
            seed,
            thinking,
            "--json",
            "-n300",
        ];
        let object: Value = serde_json::from_str(&stdout(&run(qrun().args(args)))).unwrap();
        if object["grammar_complete"] == true {
            let value: Value = serde_json::from_str(object["text"].as_str().unwrap()).unwrap();
            assert!(
                value["animal"].is_string() && value["legs"].is_i64(),
                "{value}"
            );
        } else {
            assert_eq!(object["finish_reason"], "length", "{object}");
        }
    }
    let cut = run(qrun().args([
        "-p",
        "x",
        "--json-schema",
        "{\"type\":\"object\",\"required\":[\"a\"]}",
        "-n1",
    ]));
    assert!(
        stderr(&cut).contains("cut before its grammar was complete"),
        "{}",
        stderr(&cut)
    );
}

#[test]
fn a_grammar_is_kept() {
    let args = [
        "-p",
        "Yes or no?",
        "--grammar",
        "start: \"yes\" | \"no\"",
        "--no-think",
        "-n20",
    ];
    let answer = stdout(&run(qrun().args(args)));
    assert!(["yes", "no"].contains(&answer.trim_end()), "{answer}");
}

#[test]
fn many_prompts_are_answered_in_order_and_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.txt");
    let answers = folder.path().join("answers.jsonl");
    let lines = "What is the capital of France?\n{\"prompt\": \"What is 2 + 3?\"}\n\nWhat is the capital of Italy?\n";
    std::fs::write(&prompts, lines).unwrap();
    let ask = |extra: &[&str]| {
        let mut command = qrun();
        command
            .args(["--greedy", "-n30", "--prompts"])
            .arg(&prompts)
            .args(extra);
        run(&mut command)
    };
    let all = stdout(&ask(&[]));
    let texts: Vec<Value> = all
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(texts.len(), 3);
    assert_eq!(texts[0]["text"], "The capital of France is Paris.");
    assert!(texts[2]["text"].as_str().unwrap().contains("Rome"));

    // One answer and half of the second are there already.
    let first = all.lines().next().unwrap();
    std::fs::write(&answers, format!("{first}\n{{\"index\": 1, \"te")).unwrap();
    let output = ask(&["--output", answers.to_str().unwrap(), "--resume"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let resumed = std::fs::read_to_string(&answers).unwrap();
    assert_eq!(resumed.lines().next().unwrap(), first);
    let index = |line: &str| {
        serde_json::from_str::<Value>(line).unwrap()["index"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(resumed.lines().map(index).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = qrun()
        .args([
            "-p",
            "Tell me a story.",
            "--greedy",
            "--ignore-eos",
            "-n400",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((code(&output), stderr(&output).as_str()), (0, ""));
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_cleanly_with_what_there_is() {
    use std::io::Read;
    let mut child = qrun()
        .args([
            "-p",
            "Tell me a story.",
            "--greedy",
            "--ignore-eos",
            "-n4000",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0u8; 1];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 130);
    assert!(stdout(&output).ends_with('\n'));
    assert_eq!(stderr(&output), "");
}

#[test]
fn tokens_and_back() {
    let output = run(qrun().args(["tokenize", "--json", "Hello, wörld!"]));
    let ids: Vec<u32> = serde_json::from_str(&stdout(&output)).unwrap();
    let back = run(qrun()
        .arg("detokenize")
        .args(ids.iter().map(u32::to_string)));
    assert_eq!(stdout(&back), "Hello, wörld!\n");
    let from_pipe = piped(
        qrun().args(["tokenize", "--json"]),
        "Hello, wörld!".as_bytes(),
    );
    assert_eq!(stdout(&from_pipe), stdout(&output));
    let back = piped(qrun().arg("detokenize"), stdout(&output).as_bytes());
    assert_eq!(stdout(&back), "Hello, wörld!\n");
    let special = run(qrun().args(["tokenize", "--json", "<|im_end|>"]));
    assert_eq!(stdout(&special), "[8161]\n");
    let literal = run(qrun().args(["tokenize", "--json", "--no-parse-special", "<|im_end|>"]));
    assert_ne!(stdout(&literal), "[8161]\n");
}

#[test]
fn inspect_tells_what_is_in_the_file() {
    let text = stdout(&run(qrun().arg("inspect").arg(demo())));
    assert!(
        text.contains("MTP           on, because the file has an MTP block of 15 tensors"),
        "{text}"
    );
    let output = run(qrun().args(["inspect", "--json"]).arg(demo()));
    let object: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(object["architecture"], "qwen35");
    assert_eq!(object["mtp"]["on"], true);
    assert_eq!(object["metadata"]["qwen35.block_count"], 9);
    assert_eq!(object["tensors"].as_array().unwrap().len(), 123);
}

#[test]
fn perplexity_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.txt");
    let story = run(qrun().args([
        "-p",
        "Tell me a story about a fox named Pip.",
        "--greedy",
        "-n400",
    ]));
    std::fs::write(&text, stdout(&story)).unwrap();
    let output = run(qrun()
        .args(["perplexity", "-c64", "--json", "--token-logprobs", "-f"])
        .arg(&text));
    let object: Value =
        serde_json::from_str(&stdout(&output)).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    let perplexity = object["perplexity"].as_f64().unwrap();
    assert!(
        (1.0..20.0).contains(&perplexity),
        "the model's own text: {perplexity}"
    );
    let logprobs = object["token_logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len() as u64, object["tokens"].as_u64().unwrap());
    let mean = logprobs
        .iter()
        .map(|t| -t["logprob"].as_f64().unwrap())
        .sum::<f64>()
        / logprobs.len() as f64;
    assert!((mean.exp() - perplexity).abs() < 1e-6 * perplexity);

    // llama.cpp's definition, computed from llama.cpp's logits of the same windows.
    let window = 64;
    let tokens = run(qrun().args([
        "tokenize",
        "--json",
        "--no-parse-special",
        &std::fs::read_to_string(&text).unwrap(),
    ]));
    let tokens: Vec<u32> = serde_json::from_str(&stdout(&tokens)).unwrap();
    let options = PeerOptions {
        repack: false,
        ..PeerOptions::default()
    };
    let model = PeerModel::load(&demo(), &options).unwrap();
    let cpu = Backend::new(find_device(Some("CPU")).unwrap(), Some(2)).unwrap();
    let params = PeerParams {
        n_ctx: window,
        n_batch: window,
        ..PeerParams::default()
    };
    let mut peer = PeerContext::new(&model, &cpu, &params).unwrap();
    let (mut nll, mut count) = (0.0, 0);
    for chunk in tokens.chunks_exact(window) {
        peer.clear();
        let logits = peer.decode(chunk, true).unwrap();
        let rows = logits
            .chunks_exact(model.n_vocab())
            .zip(&chunk[1..])
            .skip(window / 2);
        for (row, &next) in rows {
            let max = row.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = row.iter().map(|v| f64::from(v - max).exp()).sum();
            nll += sum.ln() - f64::from(row[next as usize] - max);
            count += 1;
        }
    }
    let expected = f64::exp(nll / f64::from(count));
    println!("perplexity {perplexity}, from llama.cpp's logits {expected}");
    assert_eq!(object["tokens"], count);
    assert!(
        (perplexity / expected - 1.0).abs() < 1e-3,
        "{perplexity} against {expected}"
    );

    let short = run(qrun().args(["perplexity", "-f"]).arg(&text));
    assert_eq!(code(&short), if stdout(&short).is_empty() { 1 } else { 0 });
}

#[test]
fn the_configuration_file_gives_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    std::fs::write(
        &config,
        "greedy = true\nn-predict = 3\nstop = [\"x\", \"y\"]\n",
    )
    .unwrap();
    let mut with_file = qrun();
    with_file
        .env("QRUN_CONFIG", &config)
        .args(["-p", "Tell me a story.", "--json"]);
    let object: Value = serde_json::from_str(&stdout(&run(&mut with_file))).unwrap();
    assert_eq!(
        (&object["counts"]["output"], &object["sampler"]["temp"]),
        (&3.into(), &0.0.into())
    );
    let object: Value = serde_json::from_str(&stdout(&run(with_file.arg("-n2")))).unwrap();
    assert_eq!(object["counts"]["output"], 2, "flags win");
    std::fs::write(&config, "nonsense").unwrap();
    let output = run(&mut with_file);
    assert_eq!(code(&output), 1);
    assert!(
        stderr(&output).contains("config.toml: not valid TOML"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn help_version_completions_and_man_page() {
    let long = stdout(&run(plain().arg("--help")));
    for word in [
        "--reasoning-budget",
        "--json-schema",
        "Examples:",
        "Exit codes:",
        "-ctk",
    ] {
        assert!(long.contains(word), "{word} is not in the help");
    }
    let short = stdout(&run(plain().arg("-h")));
    assert!(short.len() < long.len() && !short.contains("Examples:"));
    assert!(stdout(&run(plain().arg("--version"))).contains("ggml"));
    assert!(stdout(&run(plain().args(["completions", "bash"]))).contains("--reasoning-budget"));
    assert!(stdout(&run(plain().arg("man"))).contains(".TH qrun"));
}

#[test]
fn devices_are_listed_and_unknown_ones_refused() {
    let output = run(plain().arg("--list-devices"));
    assert!(
        stdout(&output).lines().any(|l| l.starts_with("CPU\t")),
        "{}",
        stdout(&output)
    );
    let output = run(qrun().args(["-p", "x", "--device", "nonsense"]));
    assert_eq!(code(&output), 1);
    assert!(
        stderr(&output).contains("no device `nonsense`; there are:"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn speculation_is_described_and_leaves_the_text_alone() {
    let story = [
        "-p",
        "Tell me a story about a boat.",
        "-n",
        "60",
        "--seed",
        "5",
        "--json",
    ];
    let object = |args: &[&str]| -> Value {
        let output = run(qrun().args(story).args(args));
        assert_eq!(code(&output), 0, "{}", stderr(&output));
        serde_json::from_str(&stdout(&output)).unwrap()
    };
    let exact = object(&["--spec", "off", "--spec-exact"]);
    assert_eq!(exact["speculation"]["enabled"], false);
    assert!(exact["speculation"]["reason"].is_string());
    for args in [
        &["--spec", "3"][..],
        &["--spec", "auto"],
        &["--spec", "2", "--spec-draft-vocab", "4000"],
        &["--spec", "4", "--draft-p-min", "0.5", "--draft-min", "2"],
        &["--spec", "4", "--spec-ngram", "3"],
    ] {
        let guessed = object(&[args, &["--spec-exact"]].concat());
        assert_eq!(guessed["output_tokens"], exact["output_tokens"], "{args:?}");
        let spec = &guessed["speculation"];
        assert_eq!(spec["enabled"], true);
        for key in [
            "rounds",
            "passes",
            "drafted",
            "accepted",
            "acceptance",
            "acceptance_at",
            "tokens_per_pass",
            "draft_s",
            "verify_s",
            "rollback_s",
            "sampling_s",
            "other_s",
            "plain_tps",
        ] {
            assert!(!spec[key].is_null(), "{key}");
        }
        if args[1] != "auto" {
            assert!(spec["drafted"].as_u64().unwrap() > 0, "{args:?}");
            assert!(spec["accepted"].as_u64() <= spec["drafted"].as_u64());
        }
    }
    let drawn = object(&["--spec", "3", "--spec-sampled"]);
    assert!(drawn["speculation"]["accepted"].as_u64().unwrap() > 0);

    // What makes no sense.
    for (args, word) in [
        (&["--spec", "many"][..], "auto"),
        (&["--spec", "17"], "16"),
        (&["--draft-p-min", "2"], "0 to 1"),
        (&["--spec", "8", "--spec-exact"], "6 guesses"),
        (&["--spec-exact", "--repack"], "--repack"),
    ] {
        let output = run(qrun().args(story).args(args));
        assert_eq!(code(&output), 2, "{args:?}: {}", stderr(&output));
        assert!(
            stderr(&output).contains(word),
            "{args:?}: {}",
            stderr(&output)
        );
    }

    let output = run(qrun().args(["-p", "Hello", "-n", "30", "--stats", "--spec", "2"]));
    let line = stderr(&output);
    for word in [
        "guesses right",
        "tokens a pass",
        "draft",
        "verify",
        "sampling",
    ] {
        assert!(line.contains(word), "{line}");
    }
}

#[test]
fn tune_keeps_what_it_measured_and_verify_compares() {
    let cache = tempfile::tempdir().unwrap();
    let in_cache = || {
        let mut command = qrun();
        command.env("XDG_CACHE_HOME", cache.path());
        command
    };
    let output = run(in_cache().args(["tune", "-n", "24", "--draft-max", "2", "--json"]));
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let object: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let tried = object["record"]["tried"].as_array().unwrap();
    assert_eq!(tried.len(), 3, "plain decoding and two depths");
    assert!(tried.iter().all(|t| t["tps"].as_f64().unwrap() > 0.0));
    assert!(object["record"]["costs"]["pass"][1].as_f64().unwrap() > 0.0);
    assert!(stderr(&output).contains("kept in"), "{}", stderr(&output));
    let file = object["file"].as_str().unwrap();
    assert!(std::path::Path::new(file).starts_with(cache.path()));

    // Later runs draft from the vocabulary that won, unless they are told otherwise.
    let output = run(in_cache().args([
        "tune",
        "-n",
        "12",
        "--draft-max",
        "1",
        "--spec-draft-vocab",
        "2048",
        "--json",
    ]));
    let mut object: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let vocabs: Vec<&Value> = object["record"]["tried"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| &t["draft_vocab"])
        .collect();
    assert_eq!(vocabs, [&Value::Null, &Value::Null, &Value::from(2048)]);
    object["record"]["draft_vocab"] = 2048.into();
    std::fs::write(file, object["record"].to_string()).unwrap();
    let draft_vocab = |args: &[&str]| {
        let text = [
            "-p", "Hello", "-n", "4", "--seed", "1", "--spec", "1", "--json",
        ];
        let output = run(in_cache().args(text).args(args));
        assert_eq!((code(&output), stderr(&output).as_str()), (0, ""));
        let object: Value = serde_json::from_str(&stdout(&output)).unwrap();
        object["speculation"]["draft_vocab"].clone()
    };
    assert_eq!(draft_vocab(&[]), 2048);
    assert_eq!(draft_vocab(&["--spec-draft-vocab", "1024"]), 1024);
    assert_eq!(draft_vocab(&["--spec-draft-vocab", "off"]), Value::Null);
    assert_eq!(draft_vocab(&["--no-tune"]), Value::Null);

    // A damaged record is passed over with a line.
    let quick = ["-p", "Hello", "-n", "4", "--seed", "1"];
    let output = run(in_cache().args(quick));
    assert_eq!((code(&output), stderr(&output).as_str()), (0, ""));
    std::fs::write(file, "{").unwrap();
    let output = run(in_cache().args(quick));
    assert_eq!(code(&output), 0);
    assert!(
        stderr(&output).contains("not a tuning record"),
        "{}",
        stderr(&output)
    );
    let output = run(in_cache().args(quick).arg("--no-tune"));
    assert_eq!((code(&output), stderr(&output).as_str()), (0, ""));

    let output = run(in_cache().args([
        "verify",
        "-n",
        "40",
        "--spec",
        "3",
        "--spec-exact",
        "--no-tune",
        "--json",
    ]));
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(
        stderr(&output).starts_with("OK: 6 of 6"),
        "{}",
        stderr(&output)
    );
    let object: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(object["same"], 6);
}

#[test]
fn a_chat_without_a_terminal_goes_line_by_line() {
    let data = tempfile::tempdir().unwrap();
    let chat = |args: &[&str], input: &str| {
        let mut command = qrun();
        command
            .env("XDG_DATA_HOME", data.path())
            .arg("chat")
            .args(args);
        piped(&mut command, input.as_bytes())
    };
    let output = chat(
        &["--temp", "0"],
        "What is the capital of France?\n\nMy name is Anna.\n/quit\nnot read\n",
    );
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let answers = stdout(&output);
    assert_eq!(
        answers.lines().next(),
        Some("The capital of France is Paris.")
    );
    assert!(
        answers.lines().count() >= 2 && !answers.contains('>'),
        "{answers}"
    );

    // It was kept, and goes on.
    let kept = data
        .path()
        .join("qrun/chats/what-is-the-capital-of-france.jsonl");
    let text = std::fs::read_to_string(&kept).unwrap();
    assert_eq!(text.lines().count(), 5, "{text}");
    let output = chat(&["--temp", "0", "--resume"], "What is my name?\n");
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(std::fs::read_to_string(&kept).unwrap().lines().count() == 7);
    let output = chat(&["--resume", "nothing"], "Hello\n");
    assert_eq!(code(&output), 1);
    assert!(stderr(&output).contains("nothing"), "{}", stderr(&output));
    let output = chat(&["--no-save", "--temp", "0"], "Name a colour.\n");
    assert_eq!(code(&output), 0);
    let folder = data.path().join("qrun/chats");
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1);
}
