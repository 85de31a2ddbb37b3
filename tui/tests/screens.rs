//! Every state of the screen as a picture, in `snapshots/`. Without colours, so that each shows what is told without them
//! too; one picture lists the styles.

#![allow(clippy::unwrap_used)]

use crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::CellWidth;
use ratatui::style::Color;
use tui::watch::{History, RunEntry, Summary, WatchRun, WatchUi, WatchView};
use tui::{
    Attachment, Context, Level, Live, Memory, Message, Model, ModelEntry, Notice, Phase, Prompt,
    Reuse, Role, Round, SessionEntry, Settings, Speculation, Theme, ThemeKind, Thermal, Thinking,
    ToolCall, Ui, View, Zone,
};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn ui() -> Ui {
    Ui::new(
        Theme {
            kind: ThemeKind::None,
        },
        vec!["What is a delta net?".into(), "Tell me a story.".into()],
    )
}

fn picture(view: &View, ui: &mut Ui, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| tui::draw(frame, view, ui)).unwrap();
    rows(terminal.backend())
}

fn rows(backend: &TestBackend) -> String {
    let buffer = backend.buffer();
    let mut out = String::new();
    for y in 0..buffer.area.height {
        let mut row = String::from("|");
        let mut x = 0;
        while x < buffer.area.width {
            let symbol = buffer[(x, y)].symbol();
            row.push_str(symbol);
            x += symbol.cell_width().max(1); // the cell behind a wide character is covered
        }
        out.push_str(row.trim_end());
        out.push('\n');
    }
    out
}

fn press(ui: &mut Ui, view: &View, code: KeyCode, modifiers: KeyModifiers) -> Vec<tui::Action> {
    ui.handle(&Event::Key(KeyEvent::new(code, modifiers)), view)
}

fn write(ui: &mut Ui, view: &View, text: &str) {
    for c in text.chars() {
        press(ui, view, KeyCode::Char(c), KeyModifiers::NONE);
    }
}

fn live() -> Live {
    Live {
        decode_tps: Some(42.13),
        decode_history: (0..60)
            .map(|i| 38.0 + 6.0 * (i as f32 / 7.0).sin())
            .collect(),
        prompt: Some(Prompt {
            done: 180,
            total: 180,
            tps: 812.4,
        }),
        reuse: Some(Reuse::Reused {
            reused: 5120,
            total: 5300,
        }),
        speculation: Speculation {
            depth: Some(3),
            reason: "measured: 1.41 times plain decoding".into(),
            acceptance: Some(0.782),
            by_position: vec![0.91, 0.78, 0.64],
            tokens_per_pass: Some(3.33),
        },
        round: Some(Round {
            draft_ms: 4.2,
            verify_ms: 18.9,
            rollback_ms: 0.31,
            sampling_ms: 0.42,
            other_ms: 0.15,
        }),
        context: Some(Context {
            used: 5318,
            limit: 32768,
            kv_bytes: 166 * MIB,
        }),
        memory: Some(Memory {
            zone: Zone::Green,
            total: 16 * GIB,
            weights_mapped: 5 * GIB + 400 * MIB,
            weights_copied: 0,
            kv: 512 * MIB,
            state: 50 * MIB,
            snapshots: 300 * MIB,
            other: 3 * GIB,
            room_tokens: Some(96_000),
        }),
        thermal: Some(Thermal {
            state: "nominal".into(),
            change: Some(-0.03),
        }),
    }
}

fn view() -> View {
    View {
        model: Model {
            name: "Qwen3.5-9B Q4_K_M".into(),
            loading: None,
            detail: "Metal, 5.4 GiB".into(),
        },
        session: "foxes and rivers".into(),
        live: live(),
        settings: Settings {
            think: true,
            system: String::new(),
            samplers: vec![
                ("temp".into(), "0.6".into()),
                ("top-k".into(), "20".into()),
                ("top-p".into(), "0.95".into()),
            ],
            spec: "auto".into(),
        },
        ..View::default()
    }
}

fn talk(view: &mut View, question: &str, answer: &str) {
    let id = view.messages.len() as u64;
    view.messages.push(Message::new(id, Role::User, question));
    view.messages
        .push(Message::new(id + 1, Role::Assistant, answer));
}

const FOX: &str = "Foxes live on **every continent** but Antarctica. Three facts:\n\n\
    1. The red fox is the most widespread wild carnivore.\n\
    2. They cache food and find it again by *memory*, not by smell alone.\n\
    3. A group of foxes is called a `skulk`.\n\n\
    > The fox knows many things; the hedgehog one big thing.\n\n\
    Ask for [more](https://example.org/fox) if you like.";

#[test]
fn empty() {
    let mut view = view();
    view.live = Live::default();
    insta::assert_snapshot!(picture(&view, &mut ui(), 80, 24));
}

#[test]
fn loading() {
    let mut view = view();
    view.live = Live::default();
    view.phase = Phase::Loading;
    view.model.loading = Some(0.61);
    insta::assert_snapshot!(picture(&view, &mut ui(), 80, 24));
}

#[test]
fn no_model() {
    insta::assert_snapshot!(picture(&View::default(), &mut ui(), 80, 20));
}

#[test]
fn conversation_with_panel() {
    let mut view = view();
    talk(&mut view, "Tell me about foxes.\nBriefly.", FOX);
    view.messages[1].thinking = Some(Thinking {
        text: "Foxes, then.".into(),
        tokens: 312,
        done: true,
    });
    view.messages[1].note = Some("118 tokens · 42.1 tok/s".into());
    insta::assert_snapshot!(picture(&view, &mut ui(), 120, 40));
}

#[test]
fn streaming() {
    let mut view = view();
    view.phase = Phase::Answering;
    talk(
        &mut view,
        "Tell me about foxes.",
        "Foxes live on **every cont",
    );
    view.messages[1].streaming = true;
    insta::assert_snapshot!(picture(&view, &mut ui(), 80, 20));
}

#[test]
fn prompt_being_processed() {
    let mut view = view();
    view.phase = Phase::Prompt;
    view.live.prompt = Some(Prompt {
        done: 3120,
        total: 5120,
        tps: 812.4,
    });
    view.live.reuse = Some(Reuse::None("the system text changed".into()));
    talk(&mut view, "Sum this up.", "");
    view.messages[0].attachments = vec!["report.txt".into()];
    view.messages[1].streaming = true;
    insta::assert_snapshot!("prompt_wide", picture(&view, &mut ui(), 120, 36));
    insta::assert_snapshot!("prompt_narrow", picture(&view, &mut ui(), 60, 15));
}

#[test]
fn thinking() {
    let mut view = view();
    view.phase = Phase::Thinking;
    talk(&mut view, "How many legs have three foxes?", "");
    let text = "The user asks for legs.\n\nThree foxes, four legs each, that is".to_string();
    view.messages[1].thinking = Some(Thinking {
        text,
        tokens: 17,
        done: false,
    });
    view.messages[1].streaming = true;
    let mut ui = ui();
    insta::assert_snapshot!("thinking_folded", picture(&view, &mut ui, 80, 16));
    press(&mut ui, &view, KeyCode::Char('t'), KeyModifiers::CONTROL);
    insta::assert_snapshot!("thinking_open", picture(&view, &mut ui, 80, 16));
}

#[test]
fn long_code() {
    let mut view = view();
    let code: String = (0..40)
        .map(|i| format!("    let value_{i} = compute({i}); // step {i}\n"))
        .collect();
    let answer =
        format!("Here it is:\n\n```rust\nfn main() {{\n{code}}}\n```\n\nRun it with `cargo run`.");
    talk(&mut view, "Write a long program.", &answer);
    let mut ui = ui();
    insta::assert_snapshot!("code_end", picture(&view, &mut ui, 80, 24));
    press(&mut ui, &view, KeyCode::PageUp, KeyModifiers::NONE);
    insta::assert_snapshot!("code_scrolled", picture(&view, &mut ui, 80, 24));
}

#[test]
fn tables() {
    let mut view = view();
    talk(
        &mut view,
        "Compare them.",
        "| model | size | tok/s | remark |\n|:--|--:|--:|:--|\n\
         | 0.8B | 0.5 GiB | 181.2 | fits everywhere |\n\
         | 9B | 5.4 GiB | 42.1 | wants 16 GiB of memory, and gets along with less context on machines with 8 |\n\
         | 35B-A3B | 20.2 GiB | 38.0 | three billion *active* |\n\nThat is all.",
    );
    insta::assert_snapshot!("tables_wide", picture(&view, &mut ui(), 80, 24));
    insta::assert_snapshot!("tables_narrow", picture(&view, &mut ui(), 44, 30));
}

#[test]
fn wide_characters() {
    let mut view = view();
    talk(
        &mut view,
        "用中文介绍狐狸 🦊",
        "# 狐狸\n\n狐狸是犬科动物，生活在**除南极洲以外**的各大洲。它们以聪明著称，善于适应各种环境，包括城市。\n\n\
         - 赤狐：分布最广\n- 北極ギツネは冬に白くなる。\n- 가족 👨‍👩‍👧 emoji ✅ e\u{301}\n\n\
         | 名称 | 体重 |\n|---|--:|\n| 赤狐 | 6 kg |\n| 耳廓狐 | 1.5 kg |",
    );
    insta::assert_snapshot!(picture(&view, &mut ui(), 60, 28));
}

#[test]
fn an_error() {
    let mut view = view();
    talk(&mut view, "Go on.", "The river was");
    view.messages[1].error =
        Some("the device ran out of memory; try `/ctx 8192` or a smaller model".into());
    view.messages[1].note = Some("4 tokens".into());
    view.notices.push(Notice {
        level: Level::Error,
        text: "notes.txt: not valid UTF-8 at byte 1,204".into(),
    });
    insta::assert_snapshot!(picture(&view, &mut ui(), 80, 16));
}

#[test]
fn tool_calls() {
    let mut view = view();
    talk(&mut view, "What is the weather in Paris?", "");
    view.messages[1].tool_calls = vec![ToolCall {
        name: "get_weather".into(),
        arguments: "{\"city\": \"Paris\"}".into(),
    }];
    view.messages.push(Message::new(
        9,
        Role::Tool,
        "{\"temperature\": 18,\n \"sky\": \"clear\"}",
    ));
    view.messages.push(Message::new(
        10,
        Role::Assistant,
        "18 degrees and a clear sky.",
    ));
    insta::assert_snapshot!(picture(&view, &mut ui(), 80, 18));
}

fn red() -> View {
    let mut view = view();
    if let Some(memory) = &mut view.live.memory {
        memory.zone = Zone::Red;
        memory.other = 8 * GIB + 600 * MIB;
        memory.weights_copied = GIB / 2;
        memory.room_tokens = Some(0);
    }
    view.live.context = Some(Context {
        used: 31000,
        limit: 32768,
        kv_bytes: 968 * MIB,
    });
    view.live.speculation = Speculation {
        reason: "drafts cost more than they bring here".into(),
        ..Speculation::default()
    };
    view.live.thermal = Some(Thermal {
        state: "serious".into(),
        change: Some(-0.22),
    });
    view.notices.push(Notice {
        level: Level::Warning,
        text: "memory is in the red zone: the machine may swap".into(),
    });
    talk(&mut view, "Hello", "Hello!");
    view
}

#[test]
fn red_zone() {
    insta::assert_snapshot!("red_wide", picture(&red(), &mut ui(), 110, 34));
    insta::assert_snapshot!("red_narrow", picture(&red(), &mut ui(), 60, 15));
}

#[test]
fn small_terminals() {
    let mut view = view();
    talk(&mut view, "Tell me about foxes.", FOX);
    insta::assert_snapshot!("small_60x15", picture(&view, &mut ui(), 60, 15));
    insta::assert_snapshot!("small_30x8", picture(&view, &mut ui(), 30, 8));
    insta::assert_snapshot!("small_12x3", picture(&view, &mut ui(), 12, 3));
    let mut ui = ui();
    picture(&view, &mut ui, 60, 15);
    press(&mut ui, &view, KeyCode::F(2), KeyModifiers::NONE);
    insta::assert_snapshot!("small_panel", picture(&view, &mut ui, 60, 15));
}

#[test]
fn help() {
    let view = view();
    let mut ui = ui();
    press(&mut ui, &view, KeyCode::Char('?'), KeyModifiers::NONE);
    insta::assert_snapshot!("help_tall", picture(&view, &mut ui, 90, 80));
    insta::assert_snapshot!("help_narrow", picture(&view, &mut ui, 60, 15));
}

#[test]
fn stats() {
    let mut view = view();
    view.stats.push(("turns".into(), "7".into()));
    let mut ui = ui();
    write(&mut ui, &view, "/stats");
    press(&mut ui, &view, KeyCode::Enter, KeyModifiers::NONE);
    insta::assert_snapshot!(picture(&view, &mut ui, 80, 60));
}

#[test]
fn session_list() {
    let mut view = view();
    let entry = |name: &str, title: &str, when: &str, messages| SessionEntry {
        name: name.into(),
        title: title.into(),
        when: when.into(),
        messages,
    };
    view.sessions = vec![
        entry("a", "Tell me about foxes", "2 minutes ago", 4),
        entry(
            "b",
            "Why is the sky blue, and why are sunsets red? Explain it to a child of five",
            "yesterday",
            18,
        ),
        entry("c", "用中文介绍狐狸", "3 days ago", 1),
    ];
    let mut ui = ui();
    press(&mut ui, &view, KeyCode::F(3), KeyModifiers::NONE);
    press(&mut ui, &view, KeyCode::Down, KeyModifiers::NONE);
    insta::assert_snapshot!("sessions", picture(&view, &mut ui, 80, 16));
    write(&mut ui, &view, "fox");
    insta::assert_snapshot!("sessions_filtered", picture(&view, &mut ui, 80, 16));
    write(&mut ui, &view, "zzz");
    insta::assert_snapshot!("sessions_none", picture(&view, &mut ui, 60, 15));
}

#[test]
fn model_list() {
    let mut view = view();
    let entry = |name: &str, bytes| ModelEntry {
        path: format!("/models/{name}.gguf"),
        name: name.into(),
        bytes,
    };
    view.models = vec![
        entry("Qwen3.5-0.8B-Q4_K_M", 508 * MIB),
        entry("Qwen3.5-9B-Q4_K_M", 5529 * MIB),
    ];
    let mut ui = ui();
    press(&mut ui, &view, KeyCode::F(4), KeyModifiers::NONE);
    insta::assert_snapshot!(picture(&view, &mut ui, 80, 12));
}

#[test]
fn copy_list() {
    let mut view = view();
    talk(
        &mut view,
        "Show me.",
        "This:\n\n```rust\nfn main() {}\n```\n\nor\n\n```sh\nls -l\n```\n",
    );
    let mut ui = ui();
    press(&mut ui, &view, KeyCode::Char('y'), KeyModifiers::CONTROL);
    insta::assert_snapshot!(picture(&view, &mut ui, 80, 12));
}

#[test]
fn command_completion() {
    let view = view();
    let mut ui = ui();
    write(&mut ui, &view, "/");
    insta::assert_snapshot!("completion_all", picture(&view, &mut ui, 80, 20));
    write(&mut ui, &view, "s");
    press(&mut ui, &view, KeyCode::Down, KeyModifiers::NONE);
    press(&mut ui, &view, KeyCode::Down, KeyModifiers::NONE);
    insta::assert_snapshot!("completion_chosen", picture(&view, &mut ui, 80, 20));
}

#[test]
fn editing() {
    let mut view = view();
    talk(&mut view, "Tell me about foxes.", "Foxes are canids.");
    view.attachments.push(Attachment {
        name: "notes.txt".into(),
        bytes: 12_345,
    });
    let mut ui = ui();
    write(
        &mut ui,
        &view,
        "First line, which is long enough to be wrapped when the terminal is narrow",
    );
    press(&mut ui, &view, KeyCode::Char('j'), KeyModifiers::CONTROL);
    write(&mut ui, &view, "second");
    insta::assert_snapshot!("editor", picture(&view, &mut ui, 60, 16));
    ui.set_input("");
    press(&mut ui, &view, KeyCode::Char('p'), KeyModifiers::CONTROL);
    press(&mut ui, &view, KeyCode::Enter, KeyModifiers::NONE);
    insta::assert_snapshot!("editing_message", picture(&view, &mut ui, 80, 16));
}

fn watched() -> WatchView {
    let wave = |i: usize, mean: f32, by: f32| mean + by * (i as f32 / 9.0).sin();
    let history = History {
        slot_s: 2.0,
        tps: (0..150).map(|i| wave(i, 38.0, 6.0)).collect(),
        acceptance: [0.9, 0.75, 0.6]
            .iter()
            .map(|a| (0..150).map(|i| wave(i, *a, 0.08)).collect())
            .collect(),
        rounds: (0..150)
            .map(|i| Round {
                draft_ms: 4.0,
                verify_ms: wave(i, 19.0, 3.0),
                rollback_ms: 0.3,
                sampling_ms: 0.4,
                other_ms: 0.2,
            })
            .collect(),
        memory: (0..150)
            .map(|i| {
                let share = 0.5 + i as f32 / 380.0;
                let zone = if share < 0.7 {
                    Zone::Green
                } else if share < 0.85 {
                    Zone::Yellow
                } else {
                    Zone::Red
                };
                (share, zone)
            })
            .collect(),
        context: (0..150).map(|i| 200.0 + 34.0 * i as f32).collect(),
    };
    let run = WatchRun {
        pid: 4242,
        model: "Qwen3.5-9B Q4_K_M".into(),
        command: "qrun chat".into(),
        elapsed_s: 1325,
        tokens: 18_204,
        live: live(),
        history,
        summary: None,
    };
    WatchView {
        runs: Vec::new(),
        run: Some(run),
        notice: None,
    }
}

fn watch_picture(view: &WatchView, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let mut ui = WatchUi::new(Theme {
        kind: ThemeKind::None,
    });
    terminal
        .draw(|frame| tui::watch::draw(frame, view, &mut ui))
        .unwrap();
    rows(terminal.backend())
}

#[test]
fn watch() {
    let mut view = watched();
    insta::assert_snapshot!("watch_wide", watch_picture(&view, 130, 42));
    insta::assert_snapshot!("watch_80x24", watch_picture(&view, 80, 24));
    insta::assert_snapshot!("watch_60x15", watch_picture(&view, 60, 15));
    if let Some(run) = &mut view.run {
        run.summary = Some(Summary {
            ended: "finished".into(),
            elapsed_s: 1325,
            prompt_tokens: 5300,
            prompt_tps: Some(812.4),
            tokens: 18_204,
            mean_tps: Some(39.7),
            best_tps: Some(44.0),
            acceptance: Some(0.782),
            tokens_per_pass: Some(3.33),
            peak_memory: 14 * GIB,
            zone: Zone::Red,
        });
    }
    insta::assert_snapshot!("watch_ended", watch_picture(&view, 80, 30));
}

#[test]
fn watch_list() {
    let entry = |pid, model: &str, command: &str, tps| RunEntry {
        pid,
        model: model.into(),
        command: command.into(),
        tps,
    };
    let view = WatchView {
        runs: vec![
            entry(4242, "Qwen3.5-9B Q4_K_M", "qrun chat", Some(42.1)),
            entry(51, "Qwen3.5-0.8B Q8_0", "qrun serve --port 8080", None),
        ],
        ..WatchView::default()
    };
    insta::assert_snapshot!("watch_runs", watch_picture(&view, 80, 10));
    insta::assert_snapshot!("watch_no_runs", watch_picture(&WatchView::default(), 80, 8));
}

/// Which rows of a coloured screen have which colours: a change of style shows here.
#[test]
fn colours() {
    let mut view = red();
    talk(
        &mut view,
        "And code?",
        "```rust\nfn main() { println!(\"hi\"); } // done\n```",
    );
    for (name, kind) in [
        ("colours_dark", ThemeKind::Dark),
        ("colours_light", ThemeKind::Light),
    ] {
        let mut ui = Ui::new(Theme { kind }, Vec::new());
        let mut terminal = Terminal::new(TestBackend::new(110, 34)).unwrap();
        terminal
            .draw(|frame| tui::draw(frame, &view, &mut ui))
            .unwrap();
        let buffer = terminal.backend().buffer();
        let mut out = String::new();
        for y in 0..34 {
            let mut run: Option<(Color, String)> = None;
            let mut line = Vec::new();
            for x in 0..110 {
                let cell = &buffer[(x, y)];
                match &mut run {
                    Some((color, text)) if *color == cell.fg => text.push_str(cell.symbol()),
                    _ => line.extend(run.replace((cell.fg, cell.symbol().into()))),
                }
            }
            line.extend(run);
            let line: Vec<String> = line
                .into_iter()
                .filter(|(_, text)| !text.trim().is_empty())
                .map(|(color, text)| match color {
                    Color::Indexed(i) => format!("{i}:{}", text.trim()),
                    _ => text.trim().to_string(),
                })
                .collect();
            if !line.is_empty() {
                out.push_str(&format!("{:>2} {}\n", y, line.join(" | ")));
            }
        }
        insta::assert_snapshot!(name, out);
    }
}
