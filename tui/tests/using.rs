//! What keys and commands ask for, and how fast the screen is.

#![allow(clippy::unwrap_used)]

use std::time::Instant;

use crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use tui::{Action, Message, ModelEntry, Phase, Role, Sampler, SessionEntry, Theme, Ui, View};

const NONE: KeyModifiers = KeyModifiers::NONE;
const CTRL: KeyModifiers = KeyModifiers::CONTROL;
const ALT: KeyModifiers = KeyModifiers::ALT;

fn ui() -> Ui {
    Ui::new(Theme::default(), vec!["older".into(), "old".into()])
}

fn key(ui: &mut Ui, view: &View, code: KeyCode, modifiers: KeyModifiers) -> Vec<Action> {
    ui.handle(&Event::Key(KeyEvent::new(code, modifiers)), view)
}

fn ctrl(ui: &mut Ui, view: &View, c: char) -> Vec<Action> {
    key(ui, view, KeyCode::Char(c), CTRL)
}

fn enter(ui: &mut Ui, view: &View) -> Vec<Action> {
    key(ui, view, KeyCode::Enter, NONE)
}

fn write(ui: &mut Ui, view: &View, text: &str) {
    for c in text.chars() {
        assert_eq!(key(ui, view, KeyCode::Char(c), NONE), []);
    }
}

fn run(ui: &mut Ui, view: &View, line: &str) -> Vec<Action> {
    ui.set_input("");
    write(ui, view, line);
    enter(ui, view)
}

fn conversation() -> View {
    let mut view = View::default();
    view.messages.push(Message::new(1, Role::User, "first"));
    view.messages.push(Message::new(
        2,
        Role::Assistant,
        "answer\n\n```sh\nls\n```\n",
    ));
    view.messages.push(Message::new(3, Role::User, "second"));
    view.messages
        .push(Message::new(4, Role::Assistant, "another"));
    view
}

fn screen(view: &View, ui: &mut Ui) -> String {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    terminal.draw(|frame| tui::draw(frame, view, ui)).unwrap();
    terminal.backend().to_string()
}

#[test]
fn enter_sends_and_the_other_enters_make_lines() {
    let (mut ui, view) = (ui(), View::default());
    write(&mut ui, &view, "a");
    assert_eq!(key(&mut ui, &view, KeyCode::Enter, ALT), []);
    write(&mut ui, &view, "b");
    assert_eq!(key(&mut ui, &view, KeyCode::Enter, KeyModifiers::SHIFT), []);
    assert_eq!(ctrl(&mut ui, &view, 'j'), []);
    write(&mut ui, &view, "c");
    assert_eq!(enter(&mut ui, &view), [Action::Send("a\nb\n\nc".into())]);
    assert_eq!(ui.input(), "");
    assert_eq!(enter(&mut ui, &view), []);
    write(&mut ui, &view, "   ");
    assert_eq!(enter(&mut ui, &view), []);
}

#[test]
fn a_paste_of_ten_thousand_characters_arrives_whole() {
    let (mut ui, view) = (ui(), View::default());
    let text = "0123456789 漢字 line\n".repeat(500);
    let pasted = text.trim_end().to_string();
    let start = Instant::now();
    assert_eq!(ui.handle(&Event::Paste(pasted.clone()), &view), []);
    screen(&view, &mut ui);
    assert!(start.elapsed().as_millis() < 500, "{:?}", start.elapsed());
    assert_eq!(ui.input(), pasted);
    assert_eq!(enter(&mut ui, &view), [Action::Send(pasted)]);
}

#[test]
fn escape_and_ctrl_c_stop_and_twice_leaves() {
    let mut view = conversation();
    view.phase = Phase::Answering;
    let mut ui = ui();
    assert_eq!(key(&mut ui, &view, KeyCode::Esc, NONE), [Action::Stop]);
    assert_eq!(ctrl(&mut ui, &view, 'c'), [Action::Stop]);
    view.phase = Phase::Idle;
    write(&mut ui, &view, "draft");
    assert_eq!(ctrl(&mut ui, &view, 'c'), []);
    assert_eq!(ui.input(), "");
    write(&mut ui, &view, "x");
    assert_eq!(ctrl(&mut ui, &view, 'c'), []);
    assert_eq!(ctrl(&mut ui, &view, 'c'), [Action::Quit]);
}

#[test]
fn what_ctrl_c_cleared_comes_back_with_undo() {
    let (mut ui, view) = (ui(), View::default());
    write(&mut ui, &view, "precious");
    ctrl(&mut ui, &view, 'c');
    ctrl(&mut ui, &view, '_');
    assert_eq!(ui.input(), "precious");
}

#[test]
fn ctrl_d_leaves_only_when_nothing_is_written() {
    let (mut ui, view) = (ui(), View::default());
    write(&mut ui, &view, "ab");
    key(&mut ui, &view, KeyCode::Home, NONE);
    assert_eq!(ctrl(&mut ui, &view, 'd'), []);
    assert_eq!(ui.input(), "b");
    ctrl(&mut ui, &view, 'd');
    assert_eq!(ctrl(&mut ui, &view, 'd'), [Action::Quit]);
}

#[test]
fn nothing_written_is_lost_while_an_answer_is_made() {
    let mut view = conversation();
    view.phase = Phase::Answering;
    let mut ui = ui();
    write(&mut ui, &view, "next question");
    assert_eq!(enter(&mut ui, &view), []);
    assert_eq!(ui.input(), "next question");
    assert!(screen(&view, &mut ui).contains("Esc stops it"));
    view.phase = Phase::Idle;
    assert_eq!(
        enter(&mut ui, &view),
        [Action::Send("next question".into())]
    );
}

#[test]
fn up_and_down_go_through_the_history_and_back_to_the_draft() {
    let (mut ui, view) = (ui(), View::default());
    write(&mut ui, &view, "draft");
    let mut inputs = Vec::new();
    for code in [
        KeyCode::Up,
        KeyCode::Up,
        KeyCode::Up,
        KeyCode::Down,
        KeyCode::Down,
        KeyCode::Down,
    ] {
        key(&mut ui, &view, code, NONE);
        inputs.push(ui.input().to_string());
    }
    assert_eq!(inputs, ["old", "older", "older", "old", "draft", "draft"]);
    key(&mut ui, &view, KeyCode::Up, NONE);
    key(&mut ui, &view, KeyCode::Backspace, NONE);
    key(&mut ui, &view, KeyCode::Up, NONE);
    key(&mut ui, &view, KeyCode::Down, NONE);
    assert_eq!(ui.input(), "ol", "a changed entry is not lost");
    ui.set_input("draft");
    enter(&mut ui, &view);
    key(&mut ui, &view, KeyCode::Up, NONE);
    assert_eq!(ui.input(), "draft");
    assert_eq!(ui.history().last().map(String::as_str), Some("draft"));
}

#[test]
fn ctrl_r_searches_the_history() {
    let (mut ui, view) = (ui(), View::default());
    ctrl(&mut ui, &view, 'r');
    for c in "older".chars() {
        key(&mut ui, &view, KeyCode::Char(c), NONE);
    }
    assert_eq!(enter(&mut ui, &view), []);
    assert_eq!(ui.input(), "older");
    ctrl(&mut ui, &view, 'r');
    ctrl(&mut ui, &view, 'r');
    enter(&mut ui, &view);
    assert_eq!(ui.input(), "older");
    ctrl(&mut ui, &view, 'r');
    key(&mut ui, &view, KeyCode::Esc, NONE);
    assert_eq!(ui.input(), "older");
}

#[test]
fn an_earlier_message_is_edited() {
    let view = conversation();
    let mut ui = ui();
    assert_eq!(ctrl(&mut ui, &view, 'p'), []);
    key(&mut ui, &view, KeyCode::Down, NONE);
    enter(&mut ui, &view);
    assert_eq!(ui.input(), "first");
    write(&mut ui, &view, "!");
    assert_eq!(
        enter(&mut ui, &view),
        [Action::Edit {
            index: 0,
            text: "first!".into()
        }]
    );
    ctrl(&mut ui, &view, 'p');
    enter(&mut ui, &view);
    assert_eq!(ui.input(), "second");
    key(&mut ui, &view, KeyCode::Esc, NONE);
    assert_eq!(ui.input(), "");
    write(&mut ui, &view, "new");
    assert_eq!(enter(&mut ui, &view), [Action::Send("new".into())]);
}

#[test]
fn answers_and_code_blocks_are_copied() {
    let view = conversation();
    let mut ui = ui();
    ctrl(&mut ui, &view, 'y');
    assert_eq!(enter(&mut ui, &view), [Action::Copy("another".into())]);
    assert_eq!(run(&mut ui, &view, "/copy"), []);
    key(&mut ui, &view, KeyCode::Up, NONE);
    assert_eq!(enter(&mut ui, &view), [Action::Copy("ls\n".into())]);
}

#[test]
fn commands_and_keys_ask_for_the_same() {
    let mut view = conversation();
    let mut ui = ui();
    assert_eq!(run(&mut ui, &view, "/regenerate"), [Action::Regenerate]);
    ui.set_input("");
    assert_eq!(ctrl(&mut ui, &view, 'g'), [Action::Regenerate]);
    assert_eq!(
        run(&mut ui, &view, "/temp 0.5"),
        [Action::SetSampler {
            sampler: Sampler::Temp,
            value: 0.5
        }]
    );
    assert_eq!(
        run(&mut ui, &view, "/attach notes.txt"),
        [Action::Attach("notes.txt".into())]
    );
    assert_eq!(run(&mut ui, &view, "/clear"), [Action::Clear]);
    assert_eq!(run(&mut ui, &view, "/quit"), [Action::Quit]);
    assert_eq!(ctrl(&mut ui, &view, 'z'), [Action::Suspend]);
    assert_eq!(ctrl(&mut ui, &view, 'l'), [Action::Redraw]);
    assert_eq!(ctrl(&mut ui, &view, 'n'), []);
    view.phase = Phase::Thinking;
    assert_eq!(ctrl(&mut ui, &view, 'n'), [Action::EndThinking]);
    assert_eq!(run(&mut ui, &view, "/answer"), [Action::EndThinking]);
    assert_eq!(run(&mut ui, &view, "/regenerate"), []);
}

#[test]
fn a_mistaken_command_stays_to_be_mended() {
    let (mut ui, view) = (ui(), View::default());
    assert_eq!(run(&mut ui, &view, "/tmep 1"), []);
    assert_eq!(ui.input(), "/tmep 1");
    assert!(screen(&view, &mut ui).contains("did you mean /temp?"));
}

#[test]
fn tab_completes_and_arrows_choose() {
    let (mut ui, view) = (ui(), View::default());
    write(&mut ui, &view, "/the");
    key(&mut ui, &view, KeyCode::Tab, NONE);
    assert_eq!(ui.input(), "/theme ");
    key(&mut ui, &view, KeyCode::Down, NONE);
    key(&mut ui, &view, KeyCode::Down, NONE);
    assert_eq!(enter(&mut ui, &view), []);
    assert_eq!(ui.input(), "");
    write(&mut ui, &view, "/qu");
    key(&mut ui, &view, KeyCode::Down, NONE);
    assert_eq!(enter(&mut ui, &view), [Action::Quit]);
}

#[test]
fn lists_are_asked_for_and_chosen_from() {
    let mut view = conversation();
    let mut ui = ui();
    assert_eq!(run(&mut ui, &view, "/load"), [Action::ListSessions]);
    view.sessions = ["one", "two"]
        .map(|n| SessionEntry {
            name: n.into(),
            ..SessionEntry::default()
        })
        .into();
    key(&mut ui, &view, KeyCode::Down, NONE);
    assert_eq!(enter(&mut ui, &view), [Action::Load("two".into())]);
    assert_eq!(
        key(&mut ui, &view, KeyCode::F(4), NONE),
        [Action::ListModels]
    );
    view.models = vec![ModelEntry {
        path: "/m.gguf".into(),
        name: "m".into(),
        bytes: 1,
    }];
    assert_eq!(enter(&mut ui, &view), [Action::SetModel("/m.gguf".into())]);
}

#[test]
fn the_external_editor_gets_and_gives_the_text() {
    let (mut ui, view) = (ui(), View::default());
    write(&mut ui, &view, "text");
    assert_eq!(
        ctrl(&mut ui, &view, 'e'),
        [Action::ExternalEditor("text".into())]
    );
    ui.set_input("longer text\n");
    assert_eq!(ui.input(), "longer text");
    ctrl(&mut ui, &view, '_');
    assert_eq!(ui.input(), "text");
}

#[test]
fn a_question_mark_helps_only_when_nothing_is_written() {
    let (mut ui, view) = (ui(), View::default());
    key(&mut ui, &view, KeyCode::Char('?'), NONE);
    assert!(screen(&view, &mut ui).contains("Alt-Enter"));
    key(&mut ui, &view, KeyCode::Esc, NONE);
    write(&mut ui, &view, "why?");
    assert_eq!(ui.input(), "why?");
}

#[test]
fn every_action_of_the_table_is_in_the_help() {
    let (mut ui, view) = (ui(), View::default());
    key(&mut ui, &view, KeyCode::F(1), NONE);
    let mut terminal = Terminal::new(TestBackend::new(100, 90)).unwrap();
    terminal
        .draw(|frame| tui::draw(frame, &view, &mut ui))
        .unwrap();
    let help = terminal.backend().to_string();
    for word in [
        "Ctrl-R", "Ctrl-E", "Ctrl-Y", "F2", "/attach", "/spec", "/export", "/theme", "/quit",
    ] {
        assert!(help.contains(word), "{word}");
    }
}

/// Measured, with a bound that only a mistake passes: drawing must stay far below a frame's 33 ms.
#[test]
fn a_long_conversation_is_drawn_quickly() {
    let start = Instant::now();
    let mut ui = ui();
    screen(&View::default(), &mut ui);
    let first = start.elapsed();
    assert!(first.as_millis() < 50, "first frame: {first:?}");

    let mut view = View::default();
    let block = "Some text with **bold** words.\n\n```rust\nfn main() { println!(\"hi\"); }\n```\n\n- a\n- b\n\n".repeat(20);
    for id in 0..200 {
        view.messages
            .push(Message::new(id, Role::Assistant, block.clone()));
    }
    screen(&view, &mut ui);
    view.phase = Phase::Answering;
    view.messages.push(Message::new(200, Role::Assistant, ""));
    let mut worst = 0;
    let mut total = 0;
    for i in 0..400 {
        if let Some(last) = view.messages.last_mut() {
            last.streaming = true;
            last.text
                .push_str(if i % 50 == 49 { "\n\n" } else { "word " });
        }
        let start = Instant::now();
        screen(&view, &mut ui);
        let us = start.elapsed().as_micros();
        worst = worst.max(us);
        total += us;
    }
    println!(
        "first frame {first:?}; while streaming {} us a frame, at most {worst} us",
        total / 400
    );
    assert!(total / 400 < 16_000, "{} us a frame", total / 400);
}
