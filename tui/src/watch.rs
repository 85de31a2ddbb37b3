//! `qrun watch`: a running qrun on the whole screen, with histories; a list of runs when there are several; a summary when
//! one ends. Pure like the chat: a view, events in, wishes out.

use crossterm::event::{Event, KeyEventKind};
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::Widget;

use crate::figures::{self, PLOT_MARGIN, Plot, Section};
use crate::keys::{self, Does};
use crate::text;
use crate::theme::Theme;
use crate::view::{Live, Round, Speculation, Zone};

/// Everything that the watch screen shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WatchView {
    /// Runs that can be watched.
    pub runs: Vec<RunEntry>,
    /// The run being watched.
    pub run: Option<WatchRun>,
    /// One line about what does not work, such as a lost connection.
    pub notice: Option<String>,
}

/// A run in the list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunEntry {
    /// Its process.
    pub pid: u32,
    /// Its model.
    pub model: String,
    /// Its command line.
    pub command: String,
    /// Its decode speed now, tokens per second.
    pub tps: Option<f32>,
}

/// The run being watched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WatchRun {
    /// Its process.
    pub pid: u32,
    /// Its model.
    pub model: String,
    /// Its command line.
    pub command: String,
    /// Seconds since it started.
    pub elapsed_s: u64,
    /// Tokens written since then.
    pub tokens: u64,
    /// Figures now.
    pub live: Live,
    /// Figures before.
    pub history: History,
    /// What remains when it has ended.
    pub summary: Option<Summary>,
}

/// Figures over time: one value per slot of equal length, the newest last. A slot without a figure is NaN.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Seconds that one slot covers.
    pub slot_s: f32,
    /// Decode speed, tokens per second.
    pub tps: Vec<f32>,
    /// Acceptance, 0 to 1, of the first, second, ... draft: a history each.
    pub acceptance: Vec<Vec<f32>>,
    /// Where the time of a round went.
    pub rounds: Vec<Round>,
    /// Memory in use, 0 to 1, and the zone.
    pub memory: Vec<(f32, Zone)>,
    /// Tokens in the context.
    pub context: Vec<f32>,
}

/// What a run did, when it has ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// How it ended: "finished", "stopped", "exit code 1".
    pub ended: String,
    /// Seconds that it ran.
    pub elapsed_s: u64,
    /// Tokens of prompts processed.
    pub prompt_tokens: u64,
    /// Their speed, tokens per second.
    pub prompt_tps: Option<f32>,
    /// Tokens written.
    pub tokens: u64,
    /// Their mean speed, tokens per second.
    pub mean_tps: Option<f32>,
    /// The best speed of a slot.
    pub best_tps: Option<f32>,
    /// Drafts accepted, 0 to 1.
    pub acceptance: Option<f32>,
    /// Tokens per pass of the trunk.
    pub tokens_per_pass: Option<f32>,
    /// Most bytes in use.
    pub peak_memory: u64,
    /// The worst zone.
    pub zone: Zone,
}

/// A wish of who watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchAction {
    /// Watch this process.
    Select(u32),
    /// Leave.
    Quit,
    /// Suspend the program.
    Suspend,
    /// Draw all of the screen again.
    Redraw,
}

/// The watch screen's own state.
pub struct WatchUi {
    theme: Theme,
    /// Whether the list was asked for.
    list: bool,
    selected: usize,
}

impl WatchUi {
    /// A watch screen with these colours.
    pub fn new(theme: Theme) -> Self {
        WatchUi {
            theme,
            list: false,
            selected: 0,
        }
    }

    fn shows_list(&self, view: &WatchView) -> bool {
        view.run.is_none() || (self.list && !view.runs.is_empty())
    }

    /// What this event asks for.
    pub fn handle(&mut self, event: &Event, view: &WatchView) -> Vec<WatchAction> {
        let Event::Key(key) = event else {
            return Vec::new();
        };
        if key.kind == KeyEventKind::Release {
            return Vec::new();
        }
        let last = view.runs.len().saturating_sub(1);
        self.selected = self.selected.min(last);
        let list = self.shows_list(view);
        match keys::lookup(key) {
            Some(Does::Interrupt | Does::EndOfInput) => return vec![WatchAction::Quit],
            Some(Does::Suspend) => return vec![WatchAction::Suspend],
            Some(Does::Redraw) => return vec![WatchAction::Redraw],
            Some(Does::Escape) if list && view.run.is_some() => self.list = false,
            Some(Does::Escape) => return vec![WatchAction::Quit],
            Some(Does::Complete | Does::Sessions) => self.list = !self.list,
            Some(Does::Up) if list => self.selected = self.selected.checked_sub(1).unwrap_or(last),
            Some(Does::Down) if list => {
                self.selected = if self.selected == last {
                    0
                } else {
                    self.selected + 1
                }
            }
            Some(Does::Send) if list => {
                if let Some(run) = view.runs.get(self.selected) {
                    self.list = false;
                    return vec![WatchAction::Select(run.pid)];
                }
            }
            None if keys::typed(key) == Some('q') => return vec![WatchAction::Quit],
            _ => {}
        }
        Vec::new()
    }
}

/// Draws the watch screen.
pub fn draw(frame: &mut Frame, view: &WatchView, ui: &mut WatchUi) {
    let area = frame.area();
    if area.is_empty() {
        return;
    }
    let theme = ui.theme;
    let margin = u16::from(area.width >= 20);
    let inner = Rect {
        x: area.x + margin,
        width: area.width - 2 * margin,
        ..area
    };
    let width = usize::from(inner.width);
    let buffer = frame.buffer_mut();
    let list = ui.shows_list(view);

    let mut left = vec![Span::styled("qrun watch", theme.accent())];
    let mut right = Vec::new();
    if let Some(run) = view.run.as_ref().filter(|_| !list) {
        left.push(Span::styled(
            format!("  {}", text::one_line(&run.model)),
            theme.text(),
        ));
        left.push(Span::styled(
            format!("  {} {}", run.pid, text::one_line(&run.command)),
            theme.dim(),
        ));
        let tokens = text::count(run.tokens);
        right.push(Span::styled(
            format!("{tokens} tokens in {}", text::elapsed(run.elapsed_s)),
            theme.dim(),
        ));
    }
    row(buffer, inner, 0, text::between(left, right, width));
    if area.height < 3 {
        return;
    }
    let keys = match (&view.notice, list) {
        (Some(notice), _) => Span::styled(
            format!("! {}", text::one_line(notice)),
            theme.zone(Zone::Yellow),
        ),
        (None, true) if view.run.is_some() => Span::styled(
            "↑ ↓ choose   Enter watches   Esc back   q leaves",
            theme.dim(),
        ),
        (None, true) if !view.runs.is_empty() => {
            Span::styled("↑ ↓ choose   Enter watches   q leaves", theme.dim())
        }
        (None, false) if view.runs.len() > 1 => {
            Span::styled("Tab other runs   q leaves", theme.dim())
        }
        _ => Span::styled("q leaves", theme.dim()),
    };
    row(
        buffer,
        inner,
        area.height - 1,
        Line::from(text::clip(vec![keys], width)),
    );
    let top = if area.height >= 12 { 2 } else { 1 };
    let body = Rect {
        y: inner.y + top,
        height: area.height - 1 - top,
        ..inner
    };
    match (&view.run, list) {
        (Some(run), false) => match &run.summary {
            Some(summary) => {
                let mut sections = vec![Section {
                    rank: 0,
                    lines: summarised(summary, width.min(60), theme),
                    short: 8,
                }];
                sections.push(speed(run, width, 6, theme));
                block(buffer, body, figures::fitted(sections, body.height.into()));
            }
            None => watched(buffer, body, run, theme),
        },
        _ => listed(buffer, body, view, ui.selected, theme),
    }
}

fn row(buffer: &mut Buffer, area: Rect, y: u16, line: Line) {
    line.render(
        Rect {
            y: area.y + y,
            height: 1,
            ..area
        }
        .intersection(area),
        buffer,
    );
}

fn block(buffer: &mut Buffer, area: Rect, lines: Vec<Line<'static>>) {
    for (y, line) in (0..area.height).zip(lines) {
        row(buffer, area, y, line);
    }
}

/// The figures and their histories, in two columns where there is room.
fn watched(buffer: &mut Buffer, area: Rect, run: &WatchRun, theme: Theme) {
    let two = area.width >= 76;
    let gap = 4;
    let width = if two {
        usize::from(area.width - gap) / 2
    } else {
        usize::from(area.width)
    };
    // As high as the room allows, so that a large screen is used.
    let rows = usize::from(area.height);
    let tall = if two {
        (rows / 5).clamp(3, 10)
    } else {
        (rows / 8).clamp(2, 8)
    };
    let live = &run.live;
    let history = &run.history;
    let mut left = vec![
        speed(run, width, tall + 1, theme),
        acceptance(live, history, width, theme),
        Section {
            rank: 4,
            lines: round(live.round.as_ref(), &history.rounds, width, theme),
            short: usize::MAX, // the parts have no meaning without their names
        },
    ];
    let mut right = vec![
        memory(run, width, tall, theme),
        Section {
            rank: 3,
            lines: context(run, width, tall.min(5), theme),
            short: 2,
        },
        Section {
            rank: 5,
            lines: figures::prompt(live.prompt.as_ref(), live.reuse.as_ref(), width, theme),
            short: 2,
        },
        Section {
            rank: 6,
            lines: figures::thermal(live.thermal.as_ref(), width, theme),
            short: 1,
        },
    ];
    if !two && rows < 30 {
        right[0].short = 2;
        right.truncate(2); // memory and context: the others would take the room of histories
    }
    if two {
        let column = Rect {
            width: (area.width - gap) / 2,
            ..area
        };
        block(buffer, column, figures::fitted(left, rows));
        let column = Rect {
            x: area.right() - column.width,
            ..column
        };
        block(buffer, column, figures::fitted(right, rows));
    } else {
        left.append(&mut right);
        block(buffer, area, figures::fitted(left, rows));
    }
}

fn speed(run: &WatchRun, width: usize, height: usize, theme: Theme) -> Section {
    let value = match run.live.decode_tps {
        Some(tps) => Span::styled(format!("{} tok/s", text::speed(tps)), theme.accent()),
        None => Span::styled("– tok/s", theme.dim()),
    };
    let mut lines = vec![figures::head("decode", value, width, theme)];
    let values = &run.history.tps;
    if !values.is_empty() {
        let scale = rounded_up(figures::greatest(values));
        lines.extend(
            Plot {
                values,
                scale,
                height,
                percent: false,
            }
            .lines(width, |_| theme.accent(), theme),
        );
        lines.push(span_of_time(values.len(), run.history.slot_s, width, theme));
    }
    Section {
        rank: 0,
        lines,
        short: height + 1,
    }
}

/// A round number that is not less: 1, 2 or 5 and zeros.
fn rounded_up(value: f32) -> f32 {
    if !(value.is_finite() && value > 0.0) {
        return 1.0;
    }
    let unit = 10f32.powf(value.log10().floor());
    [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]
        .map(|step| step * unit)
        .into_iter()
        .find(|step| *step >= value)
        .unwrap_or(10.0 * unit)
}

/// The time that a plot covers, below it.
fn span_of_time(slots: usize, slot_s: f32, width: usize, theme: Theme) -> Line<'static> {
    let seconds = (slots as f32 * slot_s).round().max(0.0) as u64;
    let shown = slots.min(width.saturating_sub(PLOT_MARGIN));
    let from = format!("−{}", text::elapsed(seconds));
    let at = width
        .saturating_sub(shown)
        .min(width.saturating_sub(text::width(&from) + 4));
    let left = vec![Span::raw(" ".repeat(at)), Span::styled(from, theme.faint())];
    text::between(left, vec![Span::styled("now", theme.faint())], width)
}

/// One row of history per draft position, then what comes of it.
fn acceptance(live: &Live, history: &History, width: usize, theme: Theme) -> Section {
    let spec = &live.speculation;
    let mut lines = figures::speculation(
        &Speculation {
            by_position: Vec::new(),
            ..spec.clone()
        },
        width,
        theme,
    );
    let details = lines.split_off(lines.len().min(1));
    if history.acceptance.is_empty() {
        lines.extend(figures::by_position(&spec.by_position, width, theme));
    }
    for (i, values) in history.acceptance.iter().enumerate() {
        let now = spec
            .by_position
            .get(i)
            .or(values.last())
            .copied()
            .unwrap_or(f32::NAN);
        let label = format!("draft {}", i + 1);
        let figure = format!("{:>5}", text::percent(now, true));
        lines.push(history_row(
            &label,
            values,
            1.0,
            &figure,
            width,
            theme.accent(),
            theme,
        ));
    }
    let short = lines.len();
    lines.extend(details);
    Section {
        rank: 2,
        lines,
        short,
    }
}

fn history_row(
    label: &str,
    values: &[f32],
    scale: f32,
    figure: &str,
    width: usize,
    style: ratatui::style::Style,
    theme: Theme,
) -> Line<'static> {
    let left = Span::styled(format!("{label:<margin$}", margin = 11), theme.dim());
    let right = Span::styled(format!(" {figure}"), theme.text());
    let room = width.saturating_sub(text::width(&left.content) + text::width(&right.content));
    let line = figures::sparkline(&figures::squeezed(values, room), room, scale, style);
    Line::from(text::clip(vec![left, line, right], width))
}

/// The parts of a round now, and each over time.
fn round(now: Option<&Round>, rounds: &[Round], width: usize, theme: Theme) -> Vec<Line<'static>> {
    if rounds.is_empty() {
        return figures::round(now, width, theme);
    }
    let mut lines = figures::round(now, width, theme);
    lines.truncate(2);
    let scale = rounds
        .iter()
        .flat_map(|r| r.parts().map(|p| p.1))
        .filter(|v| v.is_finite())
        .fold(0.0, f32::max);
    for i in 0..Round::default().parts().len() {
        let values: Vec<f32> = rounds.iter().map(|r| r.parts()[i].1).collect();
        let ms = now.map_or(f32::NAN, |r| r.parts()[i].1);
        let total: f32 = now.map_or(0.0, |r| r.parts().iter().map(|p| p.1.max(0.0)).sum());
        let share = if total > 0.0 { ms / total } else { f32::NAN };
        let label = format!("{} {}", figures::PARTS[i], Round::default().parts()[i].0);
        let figure = format!(
            "{:>8} {:>5}",
            text::duration(ms),
            text::percent(share, true)
        );
        lines.push(history_row(
            &label,
            &values,
            scale,
            &figure,
            width,
            theme.accent(),
            theme,
        ));
    }
    lines
}

/// The gauge of now, share and zone over time, and the parts.
fn memory(run: &WatchRun, width: usize, height: usize, theme: Theme) -> Section {
    let mut lines = figures::memory(run.live.memory.as_ref(), width, theme);
    let history = &run.history.memory;
    let Some(room) = width.checked_sub(PLOT_MARGIN).filter(|r| *r > 0) else {
        return Section {
            rank: 1,
            lines,
            short: 2,
        };
    };
    if history.is_empty() || lines.len() < 2 {
        return Section {
            rank: 1,
            lines,
            short: 2,
        };
    }
    let parts = lines.split_off(2);
    let values: Vec<f32> = history.iter().map(|m| m.0).collect();
    let columns = values.len().min(room);
    // The worst zone of each column's slots.
    let zones: Vec<Zone> = (0..columns)
        .map(|i| {
            let slots = &history[i * history.len() / columns..(i + 1) * history.len() / columns];
            let has = |zone| slots.iter().any(|m| m.1 == zone);
            match (has(Zone::Red), has(Zone::Yellow)) {
                (true, _) => Zone::Red,
                (_, true) => Zone::Yellow,
                _ => Zone::Green,
            }
        })
        .collect();
    let plot = Plot {
        values: &values,
        scale: 1.0,
        height,
        percent: true,
    };
    lines.extend(plot.lines(
        width,
        |column| theme.zone(zones.get(column).copied().unwrap_or_default()),
        theme,
    ));
    // Without colours, and for those who do not see them: a mark below each column that is not green.
    if zones.iter().any(|zone| *zone != Zone::Green) {
        let marks = zones.iter().map(|zone| match zone {
            Zone::Green => ' ',
            Zone::Yellow => '▴',
            Zone::Red => '■',
        });
        let label = format!("{:>margin$} ", "zone", margin = PLOT_MARGIN - 1);
        let marks = format!(
            "{}{}",
            " ".repeat(room - columns),
            marks.collect::<String>()
        );
        let spans = vec![
            Span::styled(label, theme.dim()),
            Span::styled(marks, theme.zone(Zone::Yellow)),
        ];
        lines.push(Line::from(spans));
    }
    let short = lines.len();
    lines.extend(parts);
    Section {
        rank: 1,
        lines,
        short,
    }
}

fn context(run: &WatchRun, width: usize, height: usize, theme: Theme) -> Vec<Line<'static>> {
    let mut lines = figures::context(run.live.context.as_ref(), width, theme);
    let values = &run.history.context;
    if !values.is_empty() {
        let scale = rounded_up(figures::greatest(values));
        lines.extend(
            Plot {
                values,
                scale,
                height,
                percent: false,
            }
            .lines(width, |_| theme.dim(), theme),
        );
    }
    lines
}

impl Summary {
    /// Labels and what stands beside them; what is not known is left out.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let speed = |tps: Option<f32>| tps.map(|t| format!("{} tok/s", text::speed(t)));
        let rows = [
            ("ended", Some(text::one_line(&self.ended))),
            ("time", Some(text::elapsed(self.elapsed_s))),
            ("prompt tokens", Some(text::count(self.prompt_tokens))),
            ("prompt speed", speed(self.prompt_tps)),
            ("tokens written", Some(text::count(self.tokens))),
            ("mean speed", speed(self.mean_tps)),
            ("best speed", speed(self.best_tps)),
            (
                "drafts accepted",
                self.acceptance.map(|a| text::percent(a, false)),
            ),
            (
                "tokens per pass",
                self.tokens_per_pass.map(|t| format!("{t:.2}")),
            ),
            ("most memory", Some(text::bytes(self.peak_memory))),
            (
                "worst zone",
                Some(format!("● {}", figures::zone_name(self.zone))),
            ),
        ];
        rows.into_iter()
            .filter_map(|(label, value)| Some((label, value?)))
            .collect()
    }
}

fn summarised(summary: &Summary, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let line = |(i, (label, value)): (usize, (&'static str, String))| match i {
        0 => figures::head(label, Span::styled(value, theme.accent()), width, theme),
        _ => figures::row(label, &value, width, theme),
    };
    summary.rows().into_iter().enumerate().map(line).collect()
}

fn listed(buffer: &mut Buffer, area: Rect, view: &WatchView, selected: usize, theme: Theme) {
    if view.runs.is_empty() {
        row(
            buffer,
            area,
            0,
            Line::from(Span::styled(
                "No qrun is running. This list fills by itself.",
                theme.dim(),
            )),
        );
        return;
    }
    let width = usize::from(area.width);
    let selected = selected.min(view.runs.len() - 1);
    let room = usize::from(area.height);
    let first = (selected + 1).saturating_sub(room);
    for (i, run) in view.runs.iter().enumerate().skip(first).take(room) {
        let chosen = i == selected;
        let style = if chosen { theme.chosen() } else { theme.text() };
        let speed = run.tps.map_or("–".into(), text::speed);
        let left = vec![
            Span::styled(if chosen { "› " } else { "  " }, theme.accent()),
            Span::styled(
                format!("{:<8} {}", run.pid, text::one_line(&run.model)),
                style,
            ),
            Span::styled(format!("  {}", text::one_line(&run.command)), theme.dim()),
        ];
        let right = vec![Span::styled(format!("{speed:>7} tok/s"), theme.dim())];
        row(
            buffer,
            area,
            u16::try_from(i - first).unwrap_or(0),
            text::between(left, right, width),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

    fn press(ui: &mut WatchUi, code: KeyCode, view: &WatchView) -> Vec<WatchAction> {
        ui.handle(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)), view)
    }

    #[test]
    fn a_run_is_chosen_from_the_list() {
        let entry = |pid| RunEntry {
            pid,
            ..RunEntry::default()
        };
        let mut view = WatchView {
            runs: vec![entry(7), entry(8)],
            ..WatchView::default()
        };
        let mut ui = WatchUi::new(Theme::default());
        assert_eq!(press(&mut ui, KeyCode::Down, &view), []);
        assert_eq!(
            press(&mut ui, KeyCode::Enter, &view),
            [WatchAction::Select(8)]
        );
        view.run = Some(WatchRun {
            pid: 8,
            ..WatchRun::default()
        });
        assert_eq!(press(&mut ui, KeyCode::Enter, &view), []);
        assert_eq!(press(&mut ui, KeyCode::Tab, &view), []);
        assert_eq!(press(&mut ui, KeyCode::Up, &view), []);
        assert_eq!(
            press(&mut ui, KeyCode::Enter, &view),
            [WatchAction::Select(7)]
        );
        assert_eq!(press(&mut ui, KeyCode::Tab, &view), []);
        assert_eq!(press(&mut ui, KeyCode::Esc, &view), []);
        assert_eq!(press(&mut ui, KeyCode::Esc, &view), [WatchAction::Quit]);
        assert_eq!(
            press(&mut ui, KeyCode::Char('q'), &view),
            [WatchAction::Quit]
        );
    }

    #[test]
    fn scales_are_round_numbers() {
        assert_eq!(rounded_up(42.0), 50.0);
        assert_eq!(rounded_up(9.7), 10.0);
        assert_eq!(rounded_up(100.0), 100.0);
        assert_eq!(rounded_up(0.0), 1.0);
        assert_eq!(rounded_up(f32::NAN), 1.0);
    }
}
