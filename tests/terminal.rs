//! The chat on a real terminal, through tmux; where there is no tmux the tests say so and pass.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use support::demo;

/// A tmux server of its own, ended when the test does.
struct Tmux {
    socket: String,
    _folder: tempfile::TempDir,
}

impl Tmux {
    /// Starts `qrun chat` in a terminal of that size; none where tmux is missing.
    fn chat(name: &str, data: &Path, size: (u16, u16), args: &str) -> Option<Self> {
        let args = format!("chat {args} -m {}", demo().display());
        Self::qrun(name, data, size, &args)
    }

    /// Starts the program, with all its folders in `data`.
    fn qrun(name: &str, data: &Path, size: (u16, u16), args: &str) -> Option<Self> {
        if Command::new("tmux").arg("-V").output().is_err() {
            println!("SKIPPED: tmux is not here");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join(name).display().to_string();
        let tmux = Self {
            socket,
            _folder: folder,
        };
        let program = assert_cmd::cargo::cargo_bin!("qrun");
        let command = format!(
            "QRUN_CONFIG= QRUN_THREADS=1 XDG_DATA_HOME={0} XDG_RUNTIME_DIR={0} XDG_CACHE_HOME={1} {2} {args}; \
             echo left with $?; sleep 60",
            data.display(),
            data.join("cache").display(),
            program.display(),
        );
        let (x, y) = (size.0.to_string(), size.1.to_string());
        tmux.run(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            &x,
            "-y",
            &y,
            &command,
        ]);
        tmux.run(&["set-option", "-g", "escape-time", "0"]);
        Some(tmux)
    }

    fn run(&self, args: &[&str]) -> String {
        let output = Command::new("tmux")
            .args(["-S", &self.socket])
            .args(args)
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn keys(&self, keys: &[&str]) {
        self.run(&[&["send-keys"], keys].concat());
    }

    fn screen(&self) -> String {
        self.run(&["capture-pane", "-p"])
    }

    /// Waits until the screen shows a text.
    fn wait_for(&self, text: &str) -> String {
        let start = Instant::now();
        loop {
            let screen = self.screen();
            if screen.contains(text) {
                return screen;
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "no `{text}` on the screen:\n{screen}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Writes a line and sends it.
    fn write(&self, text: &str) {
        self.keys(&["-l", text]);
        self.keys(&["Enter"]);
    }

    /// The process of the chat.
    fn pid(&self) -> String {
        let shell = self.run(&["list-panes", "-F", "#{pane_pid}"]);
        let output = Command::new("pgrep")
            .args(["-P", shell.trim()])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned()
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.run(&["kill-server"]);
    }
}

#[test]
fn a_conversation_can_be_sent_edited_resized_and_left() {
    let data = tempfile::tempdir().unwrap();
    let Some(tmux) = Tmux::chat("talk", data.path(), (110, 34), "--temp 0") else {
        return;
    };
    tmux.wait_for("is ready");
    tmux.write("What is the capital of France?");
    let screen = tmux.wait_for("Paris");
    assert!(screen.contains("memory"), "the live panel: {screen}");
    tmux.wait_for(" tokens, ");

    // Another size, and back.
    tmux.run(&["resize-window", "-x", "60", "-y", "15"]);
    tmux.wait_for("Paris");
    tmux.run(&["resize-window", "-x", "110", "-y", "34"]);
    tmux.wait_for("memory");

    // A regeneration gives the same greedy answer, from the saved state.
    tmux.keys(&["C-g"]);
    tmux.wait_for("reused");

    // Ten thousand characters pasted at once stay one message, whose line ends do not send it.
    let text = format!("{}\n{}end.", "word ".repeat(1000), "word ".repeat(999));
    tmux.run(&["set-buffer", &text]);
    tmux.run(&["paste-buffer", "-p"]);
    let screen = tmux.wait_for("end.");
    assert!(screen.contains("word word"), "{screen}");
    // Ctrl-C twice leaves; what is being written may take one more.
    for _ in 0..3 {
        tmux.keys(&["C-c"]);
        std::thread::sleep(Duration::from_millis(400));
        if tmux.screen().contains("left with") {
            break;
        }
    }
    tmux.wait_for("left with 0");
    let stored = data
        .path()
        .join("qrun/chats/what-is-the-capital-of-france.jsonl");
    let stored = std::fs::read_to_string(stored).unwrap();
    assert_eq!(
        stored.lines().count(),
        3,
        "head, question, answer: {stored}"
    );
}

#[test]
fn an_answer_can_be_stopped() {
    let data = tempfile::tempdir().unwrap();
    let Some(tmux) = Tmux::chat(
        "stop",
        data.path(),
        (100, 30),
        "--seed 1 --logit-bias 8159-inf --logit-bias 8161-inf",
    ) else {
        return;
    };
    tmux.wait_for("is ready");
    // Without its end tokens the answer goes on to the end of the context.
    tmux.write("Tell me a story about a fox named Pip.");
    tmux.wait_for("Once");
    tmux.keys(&["Escape"]);
    tmux.wait_for("stopped");
    tmux.write("/quit");
    tmux.wait_for("left with 0");
}

#[test]
fn a_killed_conversation_is_resumed() {
    let data = tempfile::tempdir().unwrap();
    let Some(tmux) = Tmux::chat("kill", data.path(), (100, 30), "--temp 0") else {
        return;
    };
    tmux.wait_for("is ready");
    tmux.write("What is the capital of France?");
    tmux.wait_for("Paris");
    tmux.wait_for(" tokens, ");
    let pid = tmux.pid();
    assert!(!pid.is_empty());
    Command::new("kill").args(["-9", &pid]).status().unwrap();
    tmux.wait_for("left with");
    let again = Tmux::chat("again", data.path(), (100, 30), "--resume --temp 0").unwrap();
    let screen = again.wait_for("Paris");
    assert!(
        screen.contains("What is the capital of France?"),
        "{screen}"
    );
}

#[test]
fn a_kill_gives_the_terminal_back() {
    let data = tempfile::tempdir().unwrap();
    let Some(tmux) = Tmux::chat("term", data.path(), (100, 30), "") else {
        return;
    };
    tmux.wait_for("is ready");
    let pid = tmux.pid();
    Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    let screen = tmux.wait_for("left with 143");
    // The alternate screen is gone.
    assert!(!screen.contains("is ready"), "{screen}");
}

#[test]
fn an_earlier_message_is_edited_and_a_stored_conversation_chosen() {
    let data = tempfile::tempdir().unwrap();
    let Some(tmux) = Tmux::chat("edit", data.path(), (100, 30), "--temp 0") else {
        return;
    };
    tmux.wait_for("is ready");
    tmux.write("What is the capital of France?");
    tmux.wait_for("Paris");
    tmux.wait_for(" tokens, ");
    tmux.write("Thank you.");
    tmux.wait_for("reused");
    let start = Instant::now();
    while tmux.screen().matches("tokens, ").count() < 2 {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "{}",
            tmux.screen()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    // The first question, with another country; what came after it is gone.
    tmux.keys(&["C-p"]);
    tmux.wait_for("Thank you.");
    tmux.keys(&["-l", "capital"]);
    tmux.keys(&["Enter"]);
    tmux.keys(&["C-u"]);
    tmux.write("What is the capital of Italy?");
    tmux.wait_for("Rome");
    let screen = tmux.wait_for(" tokens, ");
    assert!(!screen.contains("Thank you."), "{screen}");
    assert!(!screen.contains("Paris"), "{screen}");

    // A second conversation, and back to the first through the list.
    tmux.write("/clear");
    tmux.write("What is the capital of Spain?");
    tmux.wait_for("Madrid");
    tmux.wait_for(" tokens, ");
    tmux.keys(&["F3"]);
    tmux.wait_for("just now");
    tmux.keys(&["-l", "Italy"]);
    tmux.keys(&["Enter"]);
    let screen = tmux.wait_for("Rome");
    assert!(!screen.contains("Madrid"), "{screen}");
    tmux.write("/quit");
    tmux.wait_for("left with 0");
    // Both are there for later.
    let again = Tmux::chat("list", data.path(), (100, 30), "--temp 0").unwrap();
    again.wait_for("is ready");
    again.write("/load");
    let screen = again.wait_for("just now");
    assert!(
        screen.contains("Italy") && screen.contains("Spain"),
        "{screen}"
    );
}

#[test]
fn a_conversation_is_watched_until_it_ends() {
    let data = tempfile::tempdir().unwrap();
    let size = (100, 34);
    let Some(chat) = Tmux::chat(
        "watched",
        data.path(),
        size,
        "--seed 1 --logit-bias 8159-inf --logit-bias 8161-inf",
    ) else {
        return;
    };
    chat.wait_for("is ready");
    let watch = Tmux::qrun("watch", data.path(), size, "watch").unwrap();
    let screen = watch.wait_for("demo-Q4_K_M CPU");
    assert!(screen.contains("qrun watch"), "{screen}");
    // Without its end tokens the answer goes on to the end of the context.
    chat.write("Tell me a story about a fox named Pip.");
    let screen = watch.wait_for("now");
    for text in [
        "decode",
        "memory",
        "context",
        "speculation",
        "prompt",
        "q leaves",
    ] {
        assert!(screen.contains(text), "no `{text}`:\n{screen}");
    }
    // A second conversation is found, listed and chosen.
    let other = Tmux::chat("other", data.path(), size, "--no-save").unwrap();
    other.wait_for("is ready");
    watch.wait_for("Tab other runs");
    watch.keys(&["Tab"]);
    let screen = watch.wait_for("Enter watches");
    assert!(screen.contains("--no-save"), "{screen}");
    watch.keys(&["Down", "Enter"]);
    watch.wait_for("--no-save");
    watch.keys(&["Tab"]);
    watch.wait_for("Enter watches");
    watch.keys(&["Up", "Enter"]);
    watch.wait_for("speculation");

    chat.keys(&["Escape"]);
    chat.wait_for("stopped");
    chat.write("/quit");
    chat.wait_for("left with 0");
    // The last state stays until it is left, and is printed then.
    let screen = watch.wait_for("finished");
    assert!(screen.contains("tokens written"), "{screen}");
    watch.keys(&["q"]);
    let screen = watch.wait_for("left with 0");
    assert!(screen.contains("worst zone"), "{screen}");
}
