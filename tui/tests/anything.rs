//! Whatever is pressed, pasted or shown, at whatever size: nothing panics and nothing is drawn outside.

#![allow(clippy::unwrap_used)]

use crossterm::event::{
    Event, KeyCode, KeyEvent, KeyModifiers, MouseButton, MouseEvent, MouseEventKind,
};
use proptest::prelude::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use tui::watch::{History, RunEntry, Summary, WatchRun, WatchUi, WatchView};
use tui::{
    Attachment, Context, Level, Live, Memory, Message, Model, ModelEntry, Notice, Phase, Prompt,
    Reuse, Role, Round, SessionEntry, Speculation, Theme, ThemeKind, Thermal, ToolCall, Ui, View,
    Zone,
};

/// Text with everything that is hard: wide characters, marks, controls, Markdown.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("a word ".to_string()),
        Just("漢字，".to_string()),
        Just("👨‍👩‍👧🦊".to_string()),
        Just("e\u{301}\u{200d}\u{fe0f}".to_string()),
        Just("ｶﾞﾟ".to_string()),
        Just("\x1b[31m\u{202e}\x07\t\r".to_string()),
        Just("\n\n".to_string()),
        Just("\n- item\n  1. inner\n> quote\n".to_string()),
        Just("\n```rust\nfn main() {}\n".to_string()),
        Just("\n```\n".to_string()),
        Just("| a | b |\n|---|--:|\n| 一 | **x** |\n".to_string()),
        Just("**bold `code* [l](u) ![i](p) <b>&amp;".to_string()),
        Just("# head\n\n---\n".to_string()),
        Just("x".repeat(300)),
        any::<String>(),
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

/// Shares and figures, the impossible ones included.
fn figure() -> impl Strategy<Value = f32> {
    prop_oneof![
        0.0f32..1.0,
        0.0f32..5000.0,
        Just(f32::NAN),
        Just(f32::INFINITY),
        Just(-1.0),
        Just(0.0),
        Just(f32::MAX)
    ]
}

fn count() -> impl Strategy<Value = u64> {
    prop_oneof![0u64..100_000, Just(0), Just(u64::MAX)]
}

fn zone() -> impl Strategy<Value = Zone> {
    prop_oneof![Just(Zone::Green), Just(Zone::Yellow), Just(Zone::Red)]
}

prop_compose! {
    fn live()(
        tps in prop::option::of(figure()),
        history in prop::collection::vec(figure(), 0..80),
        prompt in prop::option::of((count(), count(), figure())),
        reuse in prop::option::of(prop_oneof![
            (count(), count()).prop_map(|(reused, total)| Reuse::Reused { reused, total }),
            text().prop_map(Reuse::None),
        ]),
        depth in prop::option::of(any::<u32>()),
        reason in text(),
        shares in prop::collection::vec(figure(), 0..7),
        context in prop::option::of((count(), count(), count())),
        parts in prop::option::of((count(), count(), count(), count(), zone(), prop::option::of(count()))),
        round in prop::option::of((figure(), figure(), figure())),
        thermal in prop::option::of((text(), prop::option::of(figure()))),
    ) -> Live {
        Live {
            decode_tps: tps,
            decode_history: history,
            prompt: prompt.map(|(done, total, tps)| Prompt { done, total, tps }),
            reuse,
            speculation: Speculation { depth, reason, acceptance: tps, by_position: shares, tokens_per_pass: tps },
            round: round.map(|(a, b, c)| Round { draft_ms: a, verify_ms: b, rollback_ms: c, sampling_ms: a, other_ms: b }),
            context: context.map(|(used, limit, kv_bytes)| Context { used, limit, kv_bytes }),
            memory: parts.map(|(total, a, b, c, zone, room_tokens)| Memory {
                zone, total, weights_mapped: a, weights_copied: b, kv: c, state: a, snapshots: b, other: c, room_tokens,
            }),
            thermal: thermal.map(|(state, change)| Thermal { state, change }),
        }
    }
}

/// A change of the view, as the engine side makes it.
#[derive(Clone, Debug)]
enum Change {
    Phase(u8),
    Push(u8, String),
    Grow(String),
    Think(String, bool),
    Fail(String),
    Call(String),
    Finish,
    Truncate(usize),
    Notice(String),
    Live(Box<Live>),
    Load(Option<f32>, String),
    Lists(String),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        any::<u8>().prop_map(Change::Phase),
        (any::<u8>(), text()).prop_map(|(r, t)| Change::Push(r, t)),
        text().prop_map(Change::Grow),
        (text(), any::<bool>()).prop_map(|(t, d)| Change::Think(t, d)),
        text().prop_map(Change::Fail),
        text().prop_map(Change::Call),
        Just(Change::Finish),
        (0usize..4).prop_map(Change::Truncate),
        text().prop_map(Change::Notice),
        live().prop_map(|l| Change::Live(Box::new(l))),
        (prop::option::of(figure()), text()).prop_map(|(l, n)| Change::Load(l, n)),
        text().prop_map(Change::Lists),
    ]
}

fn apply(view: &mut View, change: Change, next: &mut u64) {
    match change {
        Change::Phase(n) => {
            view.phase = [
                Phase::Idle,
                Phase::Loading,
                Phase::Prompt,
                Phase::Thinking,
                Phase::Answering,
            ][usize::from(n) % 5];
        }
        Change::Push(role, text) => {
            let role = [Role::User, Role::Assistant, Role::Tool][usize::from(role) % 3];
            let mut message = Message::new(*next, role, text);
            message.streaming = *next % 2 == 1;
            *next += 1;
            view.messages.push(message);
        }
        Change::Grow(text) => view
            .messages
            .iter_mut()
            .for_each(|m| m.text.push_str(&text)),
        Change::Think(text, done) => {
            if let Some(message) = view.messages.last_mut() {
                let thinking = message.thinking.get_or_insert_default();
                thinking.text.push_str(&text);
                thinking.tokens += 1;
                thinking.done = done;
            }
        }
        Change::Fail(text) => {
            if let Some(message) = view.messages.last_mut() {
                message.error = Some(text.clone());
                message.note = Some(text);
            }
        }
        Change::Call(text) => {
            if let Some(message) = view.messages.last_mut() {
                message.tool_calls.push(ToolCall {
                    name: text.clone(),
                    arguments: text.clone(),
                });
                message.attachments.push(text);
            }
        }
        Change::Finish => view.messages.iter_mut().for_each(|m| m.streaming = false),
        Change::Truncate(n) => view.messages.truncate(n),
        Change::Notice(text) => view.notices.push(Notice {
            level: Level::Warning,
            text,
        }),
        Change::Live(live) => view.live = *live,
        Change::Load(loading, name) => {
            view.model = Model {
                name: name.clone(),
                loading,
                detail: name,
            }
        }
        Change::Lists(text) => {
            view.session = text.clone();
            view.sessions.push(SessionEntry {
                name: text.clone(),
                title: text.clone(),
                when: text.clone(),
                messages: 1,
            });
            view.models.push(ModelEntry {
                path: text.clone(),
                name: text.clone(),
                bytes: 1,
            });
            view.attachments.push(Attachment {
                name: text.clone(),
                bytes: 1,
            });
            view.stats.push((text.clone(), text.clone()));
            view.settings.system = text;
        }
    }
}

fn key() -> impl Strategy<Value = Event> {
    let code = prop_oneof![
        4 => prop_oneof![Just(KeyCode::Enter), Just(KeyCode::Tab), Just(KeyCode::Esc), Just(KeyCode::Backspace)],
        4 => prop_oneof![Just(KeyCode::Up), Just(KeyCode::Down), Just(KeyCode::Left), Just(KeyCode::Right)],
        2 => prop_oneof![Just(KeyCode::PageUp), Just(KeyCode::PageDown), Just(KeyCode::Home), Just(KeyCode::End)],
        1 => prop_oneof![Just(KeyCode::Delete), (1u8..6).prop_map(KeyCode::F), Just(KeyCode::Null)],
        6 => prop::sample::select("abcdefghijklmnopqrstuvwxyz/?_ 漢é🦊".chars().collect::<Vec<_>>()).prop_map(KeyCode::Char),
        1 => any::<char>().prop_map(KeyCode::Char),
    ];
    let modifiers = prop_oneof![
        6 => Just(KeyModifiers::NONE),
        3 => Just(KeyModifiers::CONTROL),
        1 => Just(KeyModifiers::ALT),
        1 => Just(KeyModifiers::SHIFT),
        1 => any::<u8>().prop_map(KeyModifiers::from_bits_truncate),
    ];
    (code, modifiers).prop_map(|(code, modifiers)| Event::Key(KeyEvent::new(code, modifiers)))
}

fn event() -> impl Strategy<Value = Event> {
    let mouse = prop_oneof![
        Just(MouseEventKind::ScrollUp),
        Just(MouseEventKind::ScrollDown),
        Just(MouseEventKind::Down(MouseButton::Left)),
        Just(MouseEventKind::Moved),
    ];
    prop_oneof![
        8 => key(),
        1 => text().prop_map(Event::Paste),
        1 => prop_oneof![Just("/model "), Just("/th"), Just("/temp 3"), Just("/theme light"), Just("/xyz")]
            .prop_map(|s| Event::Paste(s.into())),
        1 => (mouse, any::<u16>(), 0u16..60).prop_map(|(kind, column, row)| {
            Event::Mouse(MouseEvent { kind, column, row, modifiers: KeyModifiers::NONE })
        }),
        1 => (any::<u16>(), any::<u16>()).prop_map(|(w, h)| Event::Resize(w, h)),
        1 => Just(Event::FocusLost),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Event(Event),
    Change(Change),
    Size(u16, u16),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => event().prop_map(Step::Event),
        3 => change().prop_map(Step::Change),
        1 => (1u16..140, 1u16..50).prop_map(|(w, h)| Step::Size(w, h)),
    ];
    prop::collection::vec(step, 1..60)
}

fn theme(n: u8) -> Theme {
    Theme {
        kind: [ThemeKind::Dark, ThemeKind::Light, ThemeKind::None][usize::from(n) % 3],
    }
}

/// Draws, and checks that no cell holds a control character. A cell outside of the buffer panics by itself.
fn check(terminal: &mut Terminal<TestBackend>, draw: impl FnOnce(&mut ratatui::Frame)) {
    terminal.draw(draw).unwrap();
    for cell in &terminal.backend().buffer().content {
        assert!(
            !cell.symbol().chars().any(char::is_control),
            "{:?}",
            cell.symbol()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_events_and_changes_leave_a_screen(steps in steps(), size in (1u16..140, 1u16..50), n in any::<u8>()) {
        let mut view = View::default();
        let mut ui = Ui::new(theme(n), vec!["before".into()]);
        let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
        let mut next = 0;
        for step in steps {
            match step {
                Step::Event(event) => {
                    for action in ui.handle(&event, &view) {
                        if let tui::Action::Edit { index, .. } = action {
                            prop_assert_eq!(view.messages[index].role, Role::User);
                        }
                    }
                }
                Step::Change(change) => apply(&mut view, change, &mut next),
                Step::Size(width, height) => terminal.backend_mut().resize(width, height),
            }
            check(&mut terminal, |frame| tui::draw(frame, &view, &mut ui));
        }
    }

    #[test]
    fn any_run_can_be_watched(
        live in live(),
        tps in prop::collection::vec(figure(), 0..200),
        memory in prop::collection::vec((figure(), zone()), 0..200),
        names in text(),
        size in (1u16..160, 1u16..60),
        ended in any::<bool>(),
        pids in prop::collection::vec(any::<u32>(), 0..4),
        keys in prop::collection::vec(key(), 0..10),
        n in any::<u8>(),
    ) {
        let rounds = tps.iter().map(|v| Round { draft_ms: *v, verify_ms: 1.0, ..Round::default() }).collect();
        let run = WatchRun {
            pid: 1,
            model: names.clone(),
            command: names.clone(),
            elapsed_s: u64::MAX,
            tokens: u64::MAX,
            live,
            history: History {
                slot_s: f32::MAX, tps: tps.clone(), acceptance: vec![tps.clone(), Vec::new()], rounds, memory, context: tps,
            },
            summary: ended.then(|| Summary { ended: names.clone(), ..Summary::default() }),
        };
        let runs = pids.into_iter().map(|pid| RunEntry { pid, model: names.clone(), command: names.clone(), tps: None }).collect();
        let view = WatchView { runs, run: Some(run), notice: ended.then(|| names.clone()) };
        let mut ui = WatchUi::new(theme(n));
        let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
        check(&mut terminal, |frame| tui::watch::draw(frame, &view, &mut ui));
        for key in keys {
            ui.handle(&key, &view);
            check(&mut terminal, |frame| tui::watch::draw(frame, &view, &mut ui));
        }
    }
}
