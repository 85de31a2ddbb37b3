//! `qrun watch` on runs of the demo model: what is told, who may look, and that nobody who looks can disturb.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::demo;

/// The program, with a runtime folder of the test's own.
fn qrun(runtime: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
    command
        .args(args)
        .env("QRUN_CONFIG", "")
        .env("QRUN_MODEL", demo())
        .env("QRUN_THREADS", "1")
        .env("XDG_CACHE_HOME", runtime.join("no-cache"))
        .env("XDG_RUNTIME_DIR", runtime)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn watch(runtime: &Path, args: &[&str]) -> Output {
    let args = [&["watch"], args].concat();
    qrun(runtime, &args).output().unwrap()
}

/// A run that goes on for so many tokens, once it can be watched.
fn writing(runtime: &Path, tokens: &str) -> (Child, PathBuf) {
    let story = "Tell me a story about a fox named Pip.";
    let args = ["-p", story, "--seed", "1", "--json", "--ignore-eos", "-n"];
    let child = qrun(runtime, &[&args[..], &[tokens]].concat())
        .spawn()
        .unwrap();
    let socket = runtime.join(format!("qrun/{}.sock", child.id()));
    let start = Instant::now();
    while !socket.exists() {
        assert!(start.elapsed() < Duration::from_secs(30), "no socket");
        std::thread::sleep(Duration::from_millis(5));
    }
    (child, socket)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    let text = text(&output.stdout);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn a_run_is_followed_to_its_end() {
    let runtime = tempfile::tempdir().unwrap();
    let (child, socket) = writing(runtime.path(), "700");
    let pid = child.id();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(socket.parent().unwrap()), 0o700);

    let output = watch(runtime.path(), &["--json"]);
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
    let answer = child.wait_with_output().unwrap();
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert!(!socket.exists(), "the socket goes with its run");

    let lines = lines(&output);
    let of = |kind: &'static str| lines.iter().filter(move |l| l["type"] == kind);
    let hello = of("hello").next_back().unwrap();
    assert_eq!(lines[0]["type"], "hello");
    assert_eq!(hello["pid"], pid);
    assert_eq!(hello["schema"], 1);
    assert_eq!(hello["model"], "demo-Q4_K_M");
    assert_eq!(
        (&hello["loaded"], &hello["device"]),
        (&true.into(), &"CPU".into())
    );
    assert_eq!(hello["context"], 4096);
    assert!(hello["command"].as_str().unwrap().contains("--ignore-eos"));

    let counts: Vec<u64> = of("pass").map(|l| l["tokens"].as_u64().unwrap()).collect();
    assert!(counts.len() > 1, "{counts:?}");
    assert!(counts.is_sorted(), "{counts:?}");
    assert_eq!(counts.last(), Some(&700));
    let pass = of("pass").next_back().unwrap();
    assert!(of("pass").any(|l| l["tps"].as_f64().is_some_and(|tps| tps > 0.0)));
    let spec = &pass["speculation"];
    assert_eq!(spec["drafted"], answer["speculation"]["drafted"]);
    assert_eq!(spec["accepted_at"], answer["speculation"]["accepted_at"]);
    assert_eq!(pass["context"]["limit"], 4096);
    assert!(pass["context"]["used"].as_u64().unwrap() > 700);
    let memory = of("memory").next_back().unwrap();
    assert!(memory["weights_mapped"].as_u64().unwrap() > 0);
    assert!(memory["used"].as_u64() <= memory["total"].as_u64());

    let end = lines.last().unwrap();
    assert_eq!(
        (&end["type"], &end["ended"]),
        (&"end".into(), &"finished".into())
    );
    assert_eq!(end["tokens"], 700);
    assert_eq!(end["prompt_tokens"], answer["counts"]["prompt"]);
    assert_eq!(end["drafted"], answer["speculation"]["drafted"]);
    // At most a few lines of each kind a second.
    let seconds = end["t"].as_f64().unwrap();
    let most = 10.0 * (seconds + 1.0);
    assert!(
        (lines.len() as f64) < most,
        "{} in {seconds} s",
        lines.len()
    );

    // The schema that docs/WATCH.md promises.
    let expected = [
        (
            "hello",
            "type schema version pid command started model loaded device context draft_head",
        ),
        ("pass", "type t tokens total_tokens tps speculation context"),
        (
            "memory",
            "type t zone total used weights_mapped weights_copied kv state snapshots other room_tokens thermal",
        ),
        (
            "answer",
            "type t answers prompt_tokens reused prompt_s tokens decode_s finish_reason",
        ),
        (
            "end",
            "type t ended answers prompt_tokens prompt_s tokens decode_s drafted accepted passes pass_tokens \
             peak_memory zone",
        ),
    ];
    let documented = fs::read_to_string(support::root().join("docs/WATCH.md")).unwrap();
    for (kind, fields) in expected {
        let line = of(kind).next().unwrap();
        assert_eq!(
            keys(line),
            fields.split_whitespace().collect::<Vec<_>>(),
            "{kind}"
        );
        for field in keys(line) {
            assert!(
                documented.contains(&format!("`{field}`")),
                "{kind}: {field}"
            );
        }
    }
    assert_eq!(
        keys(spec),
        [
            "depth",
            "reason",
            "passes",
            "rounds",
            "tokens",
            "drafted",
            "accepted",
            "drafted_at",
            "accepted_at",
            "seconds"
        ]
    );
    assert_eq!(
        keys(&spec["seconds"]),
        ["draft", "verify", "rollback", "sampling", "other"]
    );
}

#[test]
fn a_long_prompt_tells_how_far_it_is() {
    let runtime = tempfile::tempdir().unwrap();
    let prompt = runtime.path().join("prompt.txt");
    fs::write(&prompt, "The fox went over the hill. ".repeat(200)).unwrap();
    let prompt = prompt.display().to_string();
    let args = [
        "--raw", "-f", &prompt, "--greedy", "-n", "4", "--json", "-b", "64",
    ];
    let watched = qrun(runtime.path(), &args).spawn().unwrap();
    let socket = runtime.path().join(format!("qrun/{}.sock", watched.id()));
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = watch(runtime.path(), &["--last", "--json"]);
    let answer = watched.wait_with_output().unwrap();
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    let prompts: Vec<(u64, u64)> = lines(&output)
        .iter()
        .filter(|l| l["type"] == "prompt")
        .map(|l| (l["done"].as_u64().unwrap(), l["total"].as_u64().unwrap()))
        .collect();
    let total = answer["counts"]["prompt"].as_u64().unwrap();
    assert!(prompts.len() > 1, "{prompts:?}");
    assert_eq!(prompts.last(), Some(&(total, total)));
    assert!(prompts.iter().all(|p| p.1 == total) && prompts.is_sorted());

    // Chunk by chunk or as one, the text is the same.
    fs::set_permissions(
        runtime.path().join("qrun"),
        fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    let alone = qrun(runtime.path(), &args).output().unwrap();
    let alone: Value = serde_json::from_slice(&alone.stdout).unwrap();
    assert_eq!(alone["output_tokens"], answer["output_tokens"]);
}

#[test]
fn nothing_that_runs_is_one_line() {
    let runtime = tempfile::tempdir().unwrap();
    for args in [&[][..], &["--json"], &["--last"], &["12345"]] {
        let output = watch(runtime.path(), args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert_eq!(text(&output.stderr), "error: no qrun of yours is running\n");
        assert_eq!(text(&output.stdout), "");
    }
    // What a killed run left behind is taken away.
    let folder = runtime.path().join("qrun");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    let stale = folder.join("999999.sock");
    drop(UnixListener::bind(&stale).unwrap());
    fs::write(folder.join("notes.txt"), "not a socket").unwrap();
    let output = watch(runtime.path(), &["--json"]);
    assert_eq!(text(&output.stderr), "error: no qrun of yours is running\n");
    assert!(!stale.exists());
    assert!(folder.join("notes.txt").exists());
}

#[test]
fn a_folder_that_is_not_the_users_alone_is_refused() {
    let runtime = tempfile::tempdir().unwrap();
    let folder = runtime.path().join("qrun");
    fs::create_dir(&folder).unwrap();
    let capital = ["-p", "What is the capital of France?", "--greedy"];
    let refused = |why: &str| {
        let output = watch(runtime.path(), &["--json"]);
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(said.contains(why) && said.lines().count() == 1, "{said}");
        // A run goes on without, and says so only when asked.
        let quiet = qrun(runtime.path(), &capital).output().unwrap();
        assert_eq!(text(&quiet.stdout), "The capital of France is Paris.\n");
        assert_eq!(text(&quiet.stderr), "");
        let verbose = [&capital[..], &["--verbose"]].concat();
        let verbose = qrun(runtime.path(), &verbose).output().unwrap();
        assert_eq!(text(&verbose.stdout), "The capital of France is Paris.\n");
        let said = text(&verbose.stderr);
        assert!(
            said.contains("cannot see this run") && said.contains(why),
            "{said}"
        );
    };
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o750)).unwrap();
    refused("open to others");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
    if std::os::unix::fs::chown(&folder, Some(1), None).is_ok() {
        refused("not a folder of yours");
    } else {
        println!("SKIPPED: only root can give a folder away");
    }
    fs::remove_dir(&folder).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), &folder).unwrap();
    refused("not a folder of yours");
}

#[test]
fn who_does_not_read_does_not_stop_the_answer() {
    let runtime = tempfile::tempdir().unwrap();
    let (child, socket) = writing(runtime.path(), "300");
    // More than are let in, and none of them ever reads.
    let silent: Vec<_> = (0..24)
        .filter_map(|_| UnixStream::connect(&socket).ok())
        .collect();
    assert_eq!(silent.len(), 24);
    let watched = child.wait_with_output().unwrap();
    assert_eq!(watched.status.code(), Some(0));
    let watched: Value = serde_json::from_slice(&watched.stdout).unwrap();
    let (child, _) = writing(runtime.path(), "300");
    let alone: Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(watched["output_tokens"], alone["output_tokens"]);
}

#[test]
fn several_runs_have_to_be_told_apart() {
    let runtime = tempfile::tempdir().unwrap();
    let (mut first, _) = writing(runtime.path(), "3800");
    let (mut second, _) = writing(runtime.path(), "3800");
    let pids = [first.id(), second.id()];
    let output = watch(runtime.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 3, "{said}");
    for (line, pid) in said.lines().zip([pids[1], pids[0]]) {
        assert!(
            line.starts_with(&format!("{pid}\tdemo-Q4_K_M\tqrun -p ")),
            "{line}"
        );
    }
    let output = watch(runtime.path(), &["1"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        pids.iter().all(|pid| said.contains(&pid.to_string())),
        "{said}"
    );
    // Without a terminal there is no screen.
    let output = watch(runtime.path(), &["--last"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--json"));

    // One is killed, the other interrupted: both end what is watched, each in its way.
    let follow = |args: &[&str]| {
        let watching = qrun(runtime.path(), &[&["watch", "--json"], args].concat()).spawn();
        std::thread::sleep(Duration::from_millis(700));
        watching.unwrap()
    };
    let watching = follow(&[&pids[0].to_string()]);
    first.kill().unwrap();
    first.wait().unwrap();
    let output = watching.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("went away without a last line"));

    let watching = follow(&["--last"]);
    let pid = pids[1].to_string();
    Command::new("kill").args(["-INT", &pid]).status().unwrap();
    second.wait().unwrap();
    let output = watching.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(lines(&output).last().unwrap()["ended"], "interrupted");
    // The one that was killed could not tidy up; looking did.
    watch(runtime.path(), &[]);
    assert_eq!(
        fs::read_dir(runtime.path().join("qrun")).unwrap().count(),
        0
    );
}

#[test]
fn a_conversation_line_by_line_can_be_watched() {
    use std::io::Write as _;
    let runtime = tempfile::tempdir().unwrap();
    let mut chat = qrun(runtime.path(), &["chat", "--no-save", "--temp", "0"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let socket = runtime.path().join(format!("qrun/{}.sock", chat.id()));
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let watching = qrun(runtime.path(), &["watch", "--json"]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let mut stdin = chat.stdin.take().unwrap();
    stdin
        .write_all(b"What is the capital of France?\nAnd of Italy?\n")
        .unwrap();
    drop(stdin);
    let said = chat.wait_with_output().unwrap();
    assert!(text(&said.stdout).contains("Paris"), "{said:?}");
    let lines = lines(&watching.wait_with_output().unwrap());
    let end = lines.last().unwrap();
    assert_eq!(
        (&end["answers"], &end["ended"]),
        (&2.into(), &"finished".into())
    );
    let answer = lines.iter().rfind(|l| l["type"] == "answer").unwrap();
    assert_eq!(answer["answers"], 2);
    assert!(answer["reused"].as_u64().unwrap() > 0, "{answer}");
}
