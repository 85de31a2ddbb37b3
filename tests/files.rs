//! Files and disks that do not behave: each gives one line on stderr that names the file, and exit code 1.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::fs::{File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use support::demo;

/// Longer than any of these runs takes, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);

/// The user that owns nothing.
const NOBODY: u32 = 65534;

/// The program without this machine's configuration, on the demo model.
fn qrun() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
    command
        .env("QRUN_CONFIG", "")
        .env("QRUN_MODEL", demo())
        .env("QRUN_THREADS", "2")
        .env("XDG_CACHE_HOME", std::env::temp_dir().join("qrun-no-cache"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Waits for the end, which has to come.
fn end(mut child: Child) -> Output {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("still running after {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// The only line on stderr of a command that fails.
fn only_line(output: &Output) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{}: {text}", output.status);
    assert_eq!(text.lines().count(), 1, "{text:?}");
    assert!(
        text.starts_with("error: ") && text.ends_with('\n'),
        "{text:?}"
    );
    text.trim_end().to_owned()
}

fn refusal(command: &mut Command) -> String {
    only_line(&end(command.spawn().unwrap()))
}

/// Every command that opens a model refuses `path` with the same words.
fn refused_as_model(path: &Path, why: &str) {
    for args in [
        &["-p", "hi", "-n1"][..],
        &["inspect"],
        &["tokenize", "hi", "-m"],
        &["perplexity", "-f", "Cargo.toml", "-m"],
    ] {
        let mut command = qrun();
        command.args(args).env("QRUN_MODEL", path);
        if args[0] != "-p" {
            command.arg(path);
        }
        let line = refusal(&mut command);
        assert!(
            line.contains(why) && line.contains(path.to_str().unwrap()),
            "{args:?}: {line}"
        );
    }
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    // For a test that becomes another user.
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    folder
}

fn pipe(folder: &Path) -> PathBuf {
    let path = folder.join("pipe");
    let made = Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    path
}

#[test]
fn a_model_that_shrinks_while_it_is_used_ends_the_program_with_one_line() {
    let folder = folder();
    for (keep, repack) in [(0, false), (1 << 20, false), (8 << 20, true)] {
        let path = folder.path().join("shrinks.gguf");
        std::fs::copy(demo(), &path).unwrap();
        let prompts = folder.path().join("prompts");
        std::fs::write(&prompts, "Tell me a long story.\n".repeat(1000)).unwrap();
        let mut command = qrun();
        command.args(["--ignore-eos", "-n100", "--seed=1", "-m"]);
        command.arg(&path).arg("--prompts").arg(&prompts);
        if repack {
            command.arg("--repack");
        }
        let mut child = command.spawn().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert!(line.contains("\"index\":0"), "{line:?}");
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(keep).unwrap();
        // What was answered meanwhile must not fill the pipe.
        let rest = std::thread::spawn(move || std::io::copy(&mut answers, &mut std::io::sink()));
        let output = end(child);
        rest.join().unwrap().unwrap();
        let expected = format!(
            "error: {}: was shortened or its disk failed while it was in use; fetch it again",
            path.display()
        );
        assert_eq!(only_line(&output), expected, "{keep} bytes kept");
    }
}

#[test]
fn a_signal_that_was_sent_ends_the_program_as_ever() {
    let folder = folder();
    let prompts = folder.path().join("prompts");
    std::fs::write(&prompts, "Tell me a long story.\n".repeat(1000)).unwrap();
    let mut child = qrun()
        .args(["--ignore-eos", "-n100", "--prompts"])
        .arg(&prompts)
        .spawn()
        .unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap());
    answers.read_line(&mut String::new()).unwrap();
    let sent = Command::new("kill")
        .args(["-BUS", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
    let rest = std::thread::spawn(move || std::io::copy(&mut answers, &mut std::io::sink()));
    let output = end(child);
    rest.join().unwrap().unwrap();
    assert!(output.status.signal().is_some(), "{}", output.status);
    assert_eq!(output.stderr, b"");
}

#[test]
fn what_is_no_regular_file_is_refused_and_never_waited_for() {
    let folder = folder();
    refused_as_model(folder.path(), "is a directory");
    refused_as_model(&pipe(folder.path()), "is not a regular file");
    refused_as_model(Path::new("/dev/null"), "is not a regular file");
    refused_as_model(&folder.path().join("absent.gguf"), "No such file");
    refused_as_model(&demo().join("below.gguf"), "Not a directory");
    let circle = folder.path().join("circle.gguf");
    symlink(&circle, &circle).unwrap();
    refused_as_model(&circle, "symbolic links");
    let nowhere = folder.path().join("nowhere.gguf");
    symlink(folder.path().join("gone.gguf"), &nowhere).unwrap();
    refused_as_model(&nowhere, "No such file");
    let empty = folder.path().join("empty.gguf");
    File::create(&empty).unwrap();
    refused_as_model(&empty, "is empty");
    let link = folder.path().join("link.gguf");
    symlink(demo(), &link).unwrap();
    let output = end(qrun().arg("inspect").arg(&link).spawn().unwrap());
    assert!(output.status.success());
}

#[test]
fn other_inputs_that_cannot_be_read_are_named() {
    let folder = folder();
    let path = folder.path();
    let circle = path.join("circle");
    symlink(&circle, &circle).unwrap();
    for (flag, more) in [
        ("-f", &[][..]),
        ("--prompts", &[]),
        ("--chat-template-file", &["-p", "hi"]),
        ("--tools", &["-p", "hi"]),
        ("--json-schema", &["-p", "hi"]),
        ("--mtp", &["-p", "hi"]),
    ] {
        for (given, why) in [
            (path, "directory"),
            (&circle, "symbolic links"),
            (&path.join("absent"), "No such file"),
        ] {
            let line = refusal(qrun().args(more).arg(flag).arg(given));
            assert!(
                line.contains(why) && line.contains(given.to_str().unwrap()),
                "{flag}: {line}"
            );
        }
    }
    let config = path.join("config.toml");
    std::fs::create_dir(&config).unwrap();
    let line = refusal(qrun().args(["-p", "hi"]).env("QRUN_CONFIG", &config));
    assert!(line.contains(config.to_str().unwrap()), "{line}");
}

#[test]
fn a_full_disk_is_named() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        println!("SKIPPED: no {}", full.display());
        return;
    }
    let folder = folder();
    let prompts = folder.path().join("prompts");
    std::fs::write(&prompts, "one\ntwo\n").unwrap();
    for resume in [&[][..], &["--resume"]] {
        let mut command = qrun();
        command.args(["-n1", "-o", "/dev/full", "--prompts"]);
        let line = refusal(command.arg(&prompts).args(resume));
        assert!(line.contains("/dev/full"), "{line}");
        assert!(
            line.contains("No space left") || !resume.is_empty(),
            "{line}"
        );
    }
    for args in [
        &["-p", "hi", "-n4"][..],
        &["-p", "hi", "-n4", "--json"],
        &["-p", "hi", "-n4", "--jsonl"],
        &["--list-devices"],
        &["inspect", demo().to_str().unwrap()],
        &["tokenize", "hi"],
        &["man"],
    ] {
        let full = OpenOptions::new().write(true).open(full).unwrap();
        let line = refusal(qrun().args(args).stdout(full));
        assert!(
            line.contains("standard output") && line.contains("No space left"),
            "{args:?}: {line}"
        );
    }
}

#[test]
fn an_output_that_cannot_be_made_is_named() {
    let folder = folder();
    let prompts = folder.path().join("prompts");
    std::fs::write(&prompts, "one\n").unwrap();
    let absent = folder.path().join("absent/answers.jsonl");
    for (output, why) in [
        (absent.as_path(), "No such file"),
        (folder.path(), "directory"),
        (&prompts.join("below"), "Not a directory"),
    ] {
        let mut command = qrun();
        command.args(["-n1", "--prompts"]).arg(&prompts);
        let line = refusal(command.arg("-o").arg(output));
        assert!(
            line.contains(why) && line.contains(output.to_str().unwrap()),
            "{line}"
        );
    }
}

/// A command of a user whom permissions bind; none where there is no way to become one.
fn bound() -> Option<Command> {
    let is_root = Command::new("id").arg("-u").output().unwrap().stdout == b"0\n";
    if !is_root {
        return Some(qrun());
    }
    let other = || {
        let mut command = qrun();
        command.uid(NOBODY).gid(NOBODY);
        command
    };
    match other().arg("--version").output() {
        Ok(output) if output.status.success() => Some(other()),
        _ => {
            println!("SKIPPED: root may do everything, and other users cannot reach the program");
            None
        }
    }
}

#[test]
fn permissions_that_are_missing_are_named() {
    let folder = folder();
    let secret = folder.path().join("secret.gguf");
    std::fs::copy(demo(), &secret).unwrap();
    std::fs::set_permissions(&secret, Permissions::from_mode(0o000)).unwrap();
    let Some(mut command) = bound() else { return };
    let line = refusal(command.args(["-p", "hi", "-m"]).arg(&secret));
    assert!(
        line.contains("secret.gguf") && line.contains("Permission denied"),
        "{line}"
    );
    let Some(mut command) = bound() else { return };
    let line = refusal(command.arg("-f").arg(&secret));
    assert!(
        line.contains("secret.gguf") && line.contains("Permission denied"),
        "{line}"
    );

    let locked = folder.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::set_permissions(&locked, Permissions::from_mode(0o555)).unwrap();
    let prompts = folder.path().join("prompts");
    std::fs::write(&prompts, "one\n").unwrap();
    let Some(mut command) = bound() else { return };
    command.args(["-n1", "--prompts"]).arg(&prompts);
    let line = refusal(command.arg("-o").arg(locked.join("answers.jsonl")));
    assert!(
        line.contains("locked/answers.jsonl") && line.contains("Permission denied"),
        "{line}"
    );
}
