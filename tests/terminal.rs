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
            "QRUN_CONFIG= QRUN_THREADS=1 XDG_DATA_HOME={} XDG_CACHE_HOME={} {} chat -m {} {args}; echo left with $?; sleep 60",
            data.display(),
            data.join("cache").display(),
            program.display(),
            demo().display(),
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
    tmux.keys(&["-l", "What is the capital of France?"]);
    tmux.keys(&["Enter"]);
    let screen = tmux.wait_for("Paris");
    assert!(screen.contains("memory"), "the live panel: {screen}");
    tmux.wait_for("tok/s\n");

    // Another size, and back.
    tmux.run(&["resize-window", "-x", "60", "-y", "15"]);
    tmux.wait_for("Paris");
    tmux.run(&["resize-window", "-x", "110", "-y", "34"]);
    tmux.wait_for("memory");

    // A regeneration gives the same greedy answer, from the saved state.
    tmux.keys(&["C-g"]);
    tmux.wait_for("reused");

    // Ten thousand characters pasted at once stay one message, which is not sent.
    let text = "word ".repeat(2000);
    tmux.run(&["set-buffer", &text]);
    tmux.run(&["paste-buffer", "-p"]);
    tmux.wait_for("word word");
    // Ctrl-C twice leaves; what is being written may take one more.
    for _ in 0..3 {
        tmux.keys(&["C-c"]);
        std::thread::sleep(Duration::from_millis(400));
        if tmux.screen().contains("left with") {
            break;
        }
    }
    tmux.wait_for("left with 0");
}

#[test]
fn an_answer_can_be_stopped() {
    let data = tempfile::tempdir().unwrap();
    let Some(tmux) = Tmux::chat(
        "stop",
        data.path(),
        (100, 30),
        "--seed 1 --logit-bias 8161-inf",
    ) else {
        return;
    };
    tmux.wait_for("is ready");
    // Without its end token the answer goes on to the end of the context.
    tmux.keys(&["-l", "Tell me a story about a fox named Pip."]);
    tmux.keys(&["Enter"]);
    tmux.wait_for("Once");
    tmux.keys(&["Escape"]);
    tmux.wait_for("stopped");
    tmux.keys(&["-l", "/quit"]);
    tmux.keys(&["Enter"]);
    tmux.wait_for("left with 0");
}

#[test]
fn a_killed_conversation_is_resumed() {
    let data = tempfile::tempdir().unwrap();
    let Some(tmux) = Tmux::chat("kill", data.path(), (100, 30), "--temp 0") else {
        return;
    };
    tmux.wait_for("is ready");
    tmux.keys(&["-l", "What is the capital of France?"]);
    tmux.keys(&["Enter"]);
    tmux.wait_for("Paris");
    tmux.wait_for("tok/s\n");
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
