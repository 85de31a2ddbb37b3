//! Pictures of the screens for the documentation, drawn by the interface's own code: `make recording`.
//!
//! What they show was written by the demo model, and the figures are those that `qrun watch --json` told of two runs of it
//! on one CPU thread, three guesses a pass: a conversation, and an answer of 3,900 tokens (`recording.csv`: a row for
//! each 0.4 s, with tok/s, acceptance at three places, five parts of a round in ms, share of the memory in use, tokens in
//! the context).

use std::fmt::Write as _;
use std::path::Path;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, CellWidth};
use ratatui::style::{Color, Modifier};
use tui::watch::{History, WatchRun, WatchUi, WatchView};
use tui::{
    Context, Live, Memory, Message, Model, Prompt, Reuse, Role, Round, Speculation, Theme,
    ThemeKind, Ui, View, Zone,
};

const DARK: Theme = Theme {
    kind: ThemeKind::Dark,
};

fn main() -> std::io::Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "docs".into());
    let folder = Path::new(&folder);
    let view = conversation();
    let mut ui = Ui::new(DARK, Vec::new());
    let chat = picture(100, 30, |frame| tui::draw(frame, &view, &mut ui))?;
    std::fs::write(folder.join("chat.svg"), chat)?;
    let view = watched();
    let mut ui = WatchUi::new(DARK);
    let watch = picture(110, 32, |frame| tui::watch::draw(frame, &view, &mut ui))?;
    std::fs::write(folder.join("watch.svg"), watch)
}

/// Figures of the run, a row for each slot.
fn figures() -> Vec<Vec<f32>> {
    let rows = include_str!("recording.csv").lines();
    rows.map(|row| row.split(',').filter_map(|v| v.parse().ok()).collect())
        .collect()
}

/// Figures at the end of the long answer.
fn live_at_end(figures: &[Vec<f32>]) -> Live {
    Live {
        decode_tps: figures.last().map(|row| row[0]),
        speculation: speculation("", 0.749, [0.860, 0.738, 0.649], 3.25),
        round: figures.last().map(|row| round(row)),
        context: Some(context(3921)),
        memory: Some(Memory {
            kv: 12_582_912,
            state: 7_335_296,
            other: 2_553_377_408,
            room_tokens: Some(268),
            ..memory()
        }),
        ..Live::default()
    }
}

/// Figures 148 tokens into the conversation's second answer.
fn live_in_conversation() -> Live {
    Live {
        decode_tps: Some(246.7),
        decode_history: vec![211.1, 233.1, 246.7],
        prompt: Some(Prompt {
            done: 33,
            total: 33,
            tps: 414.5,
        }),
        reuse: Some(Reuse::Reused {
            reused: 12,
            total: 46,
        }),
        speculation: speculation("as set", 0.870, [0.951, 0.854, 0.805], 3.61),
        round: Some(round(&[
            0.0, 0.0, 0.0, 0.0, 3.06, 13.30, 0.0003, 0.153, 0.048,
        ])),
        context: Some(context(194)),
        memory: Some(Memory {
            kv: 3_145_728,
            state: 8_785_952,
            snapshots: 5_182_772,
            other: 2_509_351_596,
            room_tokens: Some(3902),
            ..memory()
        }),
        ..Live::default()
    }
}

fn speculation(
    reason: &str,
    acceptance: f32,
    by_position: [f32; 3],
    tokens_per_pass: f32,
) -> Speculation {
    Speculation {
        depth: Some(3),
        reason: reason.into(),
        acceptance: Some(acceptance),
        by_position: by_position.to_vec(),
        tokens_per_pass: Some(tokens_per_pass),
    }
}

fn context(used: u64) -> Context {
    Context {
        used,
        limit: 4096,
        kv_bytes: used * 3072,
    }
}

fn memory() -> Memory {
    Memory {
        zone: Zone::Green,
        total: 25_276_063_744,
        weights_mapped: 16_058_048,
        ..Memory::default()
    }
}

fn round(row: &[f32]) -> Round {
    Round {
        draft_ms: row[4],
        verify_ms: row[5],
        rollback_ms: row[6],
        sampling_ms: row[7],
        other_ms: row[8],
    }
}

fn conversation() -> View {
    let mut answer = Message::new(2, Role::Assistant, "The capital of France is Paris.");
    answer.note = Some("8 tokens, 54.5 tok/s".into());
    let mut story = Message::new(4, Role::Assistant, STORY);
    story.streaming = true;
    View {
        model: Model {
            name: "demo-Q4_K_M".into(),
            loading: None,
            detail: "CPU".into(),
        },
        session: "what-is-the-capital-of-france".into(),
        messages: vec![
            Message::new(1, Role::User, "What is the capital of France?"),
            answer,
            Message::new(3, Role::User, "Tell me a story about a fox named Pip."),
            story,
        ],
        phase: tui::Phase::Answering,
        live: live_in_conversation(),
        ..View::default()
    }
}

const STORY: &str = "Once upon a time there was a fox named Pip. Pip lived in a village on a hill, and everyone knew \
    him. He had a warm bed and a good heart.\n\n\
    One fine day Pip was walking along the path. The wind was cold and the leaves were red. Suddenly he heard a cry. \
    \"Help! Help!\"\n\n\
    It was Barley the deer, who was swept away by the river. Pip was a little afraid, for Barley had not always been \
    friendly. \"Please help me,\" said Barley. \"Nobody else has come this way all day.\"\n\n\
    Pip did not think about it any longer. He threw in a long rope and held on tight.";

fn watched() -> WatchView {
    let figures = figures();
    let column = |i: usize| figures.iter().map(|row| row[i]).collect::<Vec<f32>>();
    let history = History {
        slot_s: 0.4,
        tps: column(0),
        acceptance: (1..4).map(column).collect(),
        rounds: figures.iter().map(|row| round(row)).collect(),
        memory: figures.iter().map(|row| (row[9], Zone::Green)).collect(),
        context: column(10),
    };
    WatchView {
        run: Some(WatchRun {
            pid: 20943,
            model: "demo-Q4_K_M CPU".into(),
            command: "qrun -p Tell me a story about a fox named Pip. --ignore-eos -n 3900 --spec 3"
                .into(),
            elapsed_s: 33,
            tokens: 3900,
            live: live_at_end(&figures),
            history,
            summary: None,
        }),
        ..WatchView::default()
    }
}

/// What a screen of that size shows, as SVG.
fn picture(
    width: u16,
    height: u16,
    draw: impl FnOnce(&mut ratatui::Frame),
) -> std::io::Result<String> {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(_) = terminal.draw(draw);
    Ok(svg(terminal.backend().buffer()))
}

/// Size of a cell.
const CELL: (f32, f32) = (8.4, 16.4);
/// Around the screen.
const MARGIN: f32 = 12.0;
const BACKGROUND: &str = "#14161b";
const TEXT: &str = "#d6d9e0";

/// A screen as SVG: a text for each run of cells with the same look, as wide as its cells whatever the font.
fn svg(buffer: &Buffer) -> String {
    let (columns, rows) = (f32::from(buffer.area.width), f32::from(buffer.area.height));
    let (width, height) = (
        columns * CELL.0 + 2.0 * MARGIN,
        rows * CELL.1 + 2.0 * MARGIN,
    );
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" font-size=\"14\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{BACKGROUND}\"/>\n"
    );
    for y in 0..buffer.area.height {
        let mut x = 0;
        while x < buffer.area.width {
            let look = look(buffer, x, y);
            let (from, mut text) = (x, String::new());
            while x < buffer.area.width && self::look(buffer, x, y) == look {
                let symbol = buffer[(x, y)].symbol();
                text.push_str(symbol);
                x += symbol.cell_width().max(1);
            }
            run(&mut out, &text, from, x - from, y, &look);
        }
    }
    out.push_str("</svg>\n");
    out
}

/// Colours and style of a cell.
#[derive(PartialEq)]
struct Look {
    text: Option<String>,
    behind: Option<String>,
    style: Modifier,
}

fn look(buffer: &Buffer, x: u16, y: u16) -> Look {
    let cell = &buffer[(x, y)];
    let (mut text, mut behind) = (colour(cell.fg), colour(cell.bg));
    if cell.modifier.contains(Modifier::REVERSED) {
        (text, behind) = (
            Some(behind.unwrap_or_else(|| BACKGROUND.into())),
            Some(text.unwrap_or_else(|| TEXT.into())),
        );
    }
    Look {
        text,
        behind,
        style: cell.modifier,
    }
}

fn run(out: &mut String, text: &str, x: u16, cells: u16, y: u16, look: &Look) {
    let width = f32::from(cells) * CELL.0;
    let (left, top) = (
        MARGIN + f32::from(x) * CELL.0,
        MARGIN + f32::from(y) * CELL.1,
    );
    if let Some(colour) = &look.behind {
        let _ = writeln!(
            out,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{}\" fill=\"{colour}\"/>",
            CELL.1
        );
    }
    if text.trim().is_empty() {
        return;
    }
    let mut style = String::new();
    for (modifier, attribute) in [
        (Modifier::BOLD, " font-weight=\"bold\""),
        (Modifier::ITALIC, " font-style=\"italic\""),
        (Modifier::UNDERLINED, " text-decoration=\"underline\""),
        (Modifier::DIM, " opacity=\"0.6\""),
    ] {
        if look.style.contains(modifier) {
            style.push_str(attribute);
        }
    }
    let text = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let _ = writeln!(
        out,
        "<text x=\"{left:.1}\" y=\"{:.1}\" textLength=\"{width:.1}\" lengthAdjust=\"spacingAndGlyphs\" \
         xml:space=\"preserve\" fill=\"{}\"{style}>{text}</text>",
        top + 13.0,
        look.text.as_deref().unwrap_or(TEXT)
    );
}

/// A colour of the terminal; none for its own.
fn colour(colour: Color) -> Option<String> {
    const BASIC: [&str; 16] = [
        "#1c1f26", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#abb2bf",
        "#5c6370", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#ffffff",
    ];
    let index = match colour {
        Color::Reset => return None,
        Color::Rgb(r, g, b) => return Some(format!("#{r:02x}{g:02x}{b:02x}")),
        Color::Indexed(i) => i,
        Color::Black => 0,
        Color::Red => 1,
        Color::Green => 2,
        Color::Yellow => 3,
        Color::Blue => 4,
        Color::Magenta => 5,
        Color::Cyan => 6,
        Color::Gray => 7,
        Color::DarkGray => 8,
        Color::LightRed => 9,
        Color::LightGreen => 10,
        Color::LightYellow => 11,
        Color::LightBlue => 12,
        Color::LightMagenta => 13,
        Color::LightCyan => 14,
        Color::White => 15,
    };
    Some(match index {
        0..16 => BASIC[usize::from(index)].to_owned(),
        // A cube of six steps a colour, then greys.
        16..232 => {
            let step = |n: u8| if n == 0 { 0 } else { 55 + 40 * n };
            let i = index - 16;
            format!(
                "#{:02x}{:02x}{:02x}",
                step(i / 36),
                step(i / 6 % 6),
                step(i % 6)
            )
        }
        232.. => format!("#{0:02x}{0:02x}{0:02x}", 8 + 10 * (index - 232)),
    })
}
