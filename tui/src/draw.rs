//! The chat screen: what is where, and how it looks.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Position, Rect};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Widget};

use crate::app::{Ui, Window};
use crate::command::COMMANDS;
use crate::editor;
use crate::figures::{self, Section};
use crate::keys::BINDINGS;
use crate::picker::{Kind, Picker};
use crate::text;
use crate::theme::Theme;
use crate::view::{Level, Phase, View};

/// Cells of the live panel, and of the space beside it.
const PANEL: u16 = 34;
const GAP: u16 = 3;
/// Narrower terminals do not show the panel unless asked to.
const PANEL_FROM: u16 = 100;
/// Narrower terminals show the panel in place of the conversation.
const BESIDE_FROM: u16 = 80;

/// Draws the whole screen.
pub fn draw(frame: &mut Frame, view: &View, ui: &mut Ui) {
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

    let wanted = ui.panel.unwrap_or(area.width >= PANEL_FROM);
    ui.panel_shown = wanted;
    let beside = wanted && area.width >= BESIDE_FROM;
    let (left, right) = if beside {
        let width = inner.width - PANEL - GAP;
        let right = Rect {
            x: inner.x + width + GAP,
            width: PANEL,
            ..inner
        };
        (Rect { width, ..inner }, Some(right))
    } else {
        (inner, None)
    };

    let mut top = left.y;
    let mut bottom = left.bottom();
    if area.height >= 8 {
        header(frame.buffer_mut(), Rect { height: 1, ..inner }, view, theme);
        top += if area.height >= 12 { 2 } else { 1 };
    }
    if area.height >= 2 {
        bottom -= 1;
        let line = status(view, ui, wanted, inner.width.into());
        put(frame.buffer_mut(), inner, bottom, line);
    }
    if let Some(right) = right.filter(|r| r.bottom() > top) {
        let area = Rect {
            y: top,
            height: bottom.saturating_sub(top),
            ..right
        };
        panel(frame.buffer_mut(), area, view, theme);
    }

    let most = (area.height / 3).clamp(1, 10);
    let rows = editor_rows(ui, left.width).min(most);
    let height = bottom.saturating_sub(top).min(rows);
    bottom -= height;
    let cursor = edit(
        frame.buffer_mut(),
        Rect {
            y: bottom,
            height,
            ..left
        },
        view,
        ui,
    );
    if matches!(ui.window, Window::None)
        && let Some(cursor) = cursor
    {
        frame.set_cursor_position(cursor);
    }
    let buffer = frame.buffer_mut();
    if bottom > top + 2
        && let Some(line) = above_editor(view, ui, left.width.into())
    {
        bottom -= 1;
        put(buffer, left, bottom, line);
    }
    let rule_row = (bottom > top + 1).then(|| {
        bottom -= 1;
        bottom
    });

    let body = Rect {
        y: top,
        height: bottom.saturating_sub(top),
        ..left
    };
    let mut more_below = false;
    match &mut ui.window {
        Window::None if wanted && !beside => panel(buffer, body, view, theme),
        Window::None if view.messages.is_empty() => welcome(buffer, body, view, theme),
        Window::None => {
            ui.transcript.draw(body, buffer, &view.messages, theme);
            more_below = ui.transcript.more_below();
        }
        Window::Help { top } => {
            let lines = help(body.width.into(), theme);
            scrolled(buffer, body, lines, top, theme);
        }
        Window::Stats { top } => {
            let lines = stats(view, body.width.into(), theme);
            scrolled(buffer, body, lines, top, theme);
        }
        Window::Picker(_) => {
            if let Some(cursor) = picker(buffer, body, view, ui) {
                frame.set_cursor_position(cursor);
            }
        }
    }
    if let Some(row) = rule_row {
        let line = rule(view, left.width.into(), more_below, theme);
        put(frame.buffer_mut(), left, row, line);
    }
    if matches!(ui.window, Window::None) {
        completions(frame.buffer_mut(), body, view, ui);
    }
}

/// Draws a line at row `y` of an area, if that row is in it.
fn put(buffer: &mut Buffer, area: Rect, y: u16, line: Line) {
    let row = Rect {
        y,
        height: 1,
        ..area
    }
    .intersection(area);
    if !row.is_empty() {
        Clear.render(row, buffer);
        line.render(row, buffer);
    }
}

fn lines(buffer: &mut Buffer, area: Rect, lines: impl IntoIterator<Item = Line<'static>>) {
    for (y, line) in (area.y..area.bottom()).zip(lines) {
        line.render(
            Rect {
                y,
                height: 1,
                ..area
            },
            buffer,
        );
    }
}

fn header(buffer: &mut Buffer, area: Rect, view: &View, theme: Theme) {
    let width = usize::from(area.width);
    let mut left = vec![Span::styled("qrun", theme.accent())];
    if !view.model.name.is_empty() {
        left.push(Span::styled(
            format!("  {}", text::one_line(&view.model.name)),
            theme.text(),
        ));
    }
    if !view.model.detail.is_empty() && width >= 80 {
        left.push(Span::styled(
            format!("  {}", text::one_line(&view.model.detail)),
            theme.dim(),
        ));
    }
    let right = match view.model.loading {
        Some(share) => {
            let mut spans = vec![Span::styled("loading ", theme.dim())];
            spans.extend(figures::bar(
                share,
                (width / 4).min(20),
                theme.accent(),
                theme,
            ));
            spans.push(Span::styled(
                format!(" {:>5}", text::percent(share, true)),
                theme.dim(),
            ));
            spans
        }
        None => vec![Span::styled(
            text::fit(&text::one_line(&view.session), width / 2).into_owned(),
            theme.dim(),
        )],
    };
    put(buffer, area, area.y, text::between(left, right, width));
}

/// The line between conversation and editor. While a prompt is processed it is the progress bar.
fn rule(view: &View, width: usize, more_below: bool, theme: Theme) -> Line<'static> {
    let progress = view
        .live
        .prompt
        .filter(|p| view.phase == Phase::Prompt && p.total > 0);
    let share = progress.map_or(0.0, |p| p.done as f32 / p.total as f32);
    let label = " ↓ more below ";
    if more_below && width > 24 {
        let after = 2;
        let mut spans = figures::bar(
            share,
            width - text::width(label) - after,
            theme.accent(),
            theme,
        );
        spans.push(Span::styled(label, theme.dim()));
        spans.push(Span::styled("─".repeat(after), theme.faint()));
        return Line::from(spans);
    }
    Line::from(figures::bar(share, width, theme.accent(), theme))
}

/// The last line: what the program says, or which keys help; without the panel its main figures.
fn status(view: &View, ui: &Ui, panel: bool, width: usize) -> Line<'static> {
    let theme = ui.theme;
    let notice = ui
        .hint
        .as_ref()
        .or_else(|| view.notices.get(ui.dismissed..).and_then(<[_]>::last));
    let reading = matches!(ui.window, Window::None);
    let loud = notice.is_some_and(|n| n.level != Level::Info);
    let right = if panel || loud || !reading {
        Vec::new()
    } else {
        short_figures(view, width, theme)
    };
    if let Some(notice) = notice {
        let mark = match notice.level {
            Level::Info => "",
            Level::Warning => "! ",
            Level::Error => "✗ ",
        };
        let text = format!("{mark}{}", text::one_line(&notice.text));
        return text::between(
            vec![Span::styled(text, theme.level(notice.level))],
            right,
            width,
        );
    }
    let keys: &[&str] = match (&ui.window, view.phase) {
        (Window::Picker(_), _) => &["↑ ↓ choose", "Enter takes", "Esc closes", "type to filter"],
        (Window::Help { .. } | Window::Stats { .. }, _) => &["↑ ↓ scroll", "Esc closes"],
        (_, Phase::Thinking) => &["Esc stops", "Ctrl-N answers now", "Ctrl-T opens thinking"],
        (_, Phase::Prompt | Phase::Answering) => &["Esc stops"],
        (_, Phase::Loading) => &["a message waits for the model"],
        (_, Phase::Idle) => &["? help", "/ commands"],
    };
    // As many as there is room for, none of them cut.
    let room = width.saturating_sub(text::spans_width(&right) + 2);
    let mut shown = String::new();
    for key in keys {
        let more = if shown.is_empty() {
            key.to_string()
        } else {
            format!("{shown}   {key}")
        };
        if text::width(&more) > room {
            break;
        }
        shown = more;
    }
    text::between(vec![Span::styled(shown, theme.dim())], right, width)
}

/// The panel's main figures in a few words.
fn short_figures(view: &View, width: usize, theme: Theme) -> Vec<Span<'static>> {
    let mut spans: Vec<Span<'static>> = Vec::new();
    let mut add = |text: String, style| {
        if !spans.is_empty() {
            spans.push(Span::styled("  ", theme.dim()));
        }
        spans.push(Span::styled(text, style));
    };
    if view.phase == Phase::Prompt
        && let Some(prompt) = view.live.prompt.filter(|p| p.total > 0)
    {
        add(
            format!(
                "prompt {}",
                text::percent(prompt.done as f32 / prompt.total as f32, true)
            ),
            theme.accent(),
        );
    } else if let Some(tps) = view.live.decode_tps {
        add(format!("{} tok/s", text::speed(tps)), theme.text());
    }
    if let Some(context) = view.live.context.filter(|c| c.limit > 0 && width >= 50) {
        add(
            format!(
                "context {}",
                text::percent(context.used as f32 / context.limit as f32, true)
            ),
            theme.dim(),
        );
    }
    if let Some(memory) = view.live.memory {
        let name = figures::zone_name(memory.zone);
        add(
            if width >= 70 {
                format!("memory ● {name}")
            } else {
                format!("● {name}")
            },
            theme.zone(memory.zone),
        );
    }
    spans
}

fn panel(buffer: &mut Buffer, area: Rect, view: &View, theme: Theme) {
    let width = usize::from(area.width.min(2 * PANEL));
    let sections = figures::sections(&view.live, width, theme);
    lines(buffer, area, figures::fitted(sections, area.height.into()));
}

/// What is shown before the first message.
fn welcome(buffer: &mut Buffer, area: Rect, view: &View, theme: Theme) {
    let model = match (&view.model.loading, view.model.name.as_str()) {
        (_, "") => "No model is chosen: /model lists those that are here.".to_string(),
        (Some(_), name) => format!(
            "{} is being loaded. Write already: the message waits.",
            text::one_line(name)
        ),
        (None, name) => format!("{} is ready.", text::one_line(name)),
    };
    let keys = [
        ("?", "keys and commands"),
        ("/load", "go on with an earlier conversation"),
        ("/model", "choose a model"),
        ("/attach", "send a text file along"),
        ("Ctrl-C", "twice leaves"),
    ];
    let mut out = vec![
        Line::from(Span::styled(model, theme.text())),
        Line::default(),
    ];
    for (key, help) in keys {
        out.push(Line::from(vec![
            Span::styled(format!("{key:<9}"), theme.accent()),
            Span::styled(help, theme.dim()),
        ]));
    }
    let room = usize::from(area.height);
    out.truncate(room);
    // A little above the middle, and as far from the left edge as text is.
    let top = area.y + u16::try_from((room - out.len()) * 2 / 5).unwrap_or(0);
    let indent = 2.min(area.width);
    let area = Rect {
        x: area.x + indent,
        y: top,
        width: area.width - indent,
        height: area.bottom() - top,
    };
    lines(buffer, area, out);
}

/// Rows that the editor takes.
fn editor_rows(ui: &mut Ui, width: u16) -> u16 {
    ui.editor
        .set_width(usize::from(width.saturating_sub(2).max(2)));
    u16::try_from(ui.editor.rows().len()).unwrap_or(u16::MAX)
}

/// Draws the editor and tells where its cursor is.
fn edit(buffer: &mut Buffer, area: Rect, view: &View, ui: &mut Ui) -> Option<Position> {
    if area.is_empty() {
        return None;
    }
    let theme = ui.theme;
    let (row, column) = ui.editor.position();
    let height = usize::from(area.height);
    let rows = ui.editor.rows().to_vec();
    ui.editor_top = ui
        .editor_top
        .min(row)
        .max((row + 1).saturating_sub(height))
        .min(rows.len().saturating_sub(height));
    let top = ui.editor_top;
    let indent = 2.min(area.width - 1);
    let body = Rect {
        x: area.x + indent,
        width: area.width - indent,
        ..area
    };
    for (y, range) in (area.y..area.bottom()).zip(&rows[top..]) {
        let line = Line::from(editor::shown(&ui.editor.text()[range.clone()]));
        line.render(
            Rect {
                y,
                height: 1,
                ..body
            },
            buffer,
        );
    }
    let mark = if top == 0 { "›" } else { "…" };
    let style = if view.is_busy() {
        theme.dim()
    } else {
        theme.accent()
    };
    buffer.set_stringn(area.x, area.y, mark, indent.into(), style);
    if ui.editor.is_empty() {
        let placeholder = match view.phase {
            Phase::Idle | Phase::Loading => "Message, or / for commands",
            _ => "",
        };
        let placeholder = text::fit(placeholder, body.width.into());
        buffer.set_stringn(
            body.x,
            body.y,
            placeholder,
            body.width.into(),
            theme.faint(),
        );
    }
    let x = body.x
        + u16::try_from(column)
            .unwrap_or(u16::MAX)
            .min(body.width.saturating_sub(1));
    let y = area.y + u16::try_from(row - top).unwrap_or(0);
    Some(Position {
        x,
        y: y.min(area.bottom() - 1),
    })
}

/// What goes with the message: the one being edited, attached files.
fn above_editor(view: &View, ui: &Ui, width: usize) -> Option<Line<'static>> {
    let theme = ui.theme;
    if ui.editing.is_some() {
        let text = "editing an earlier message; what follows it will be dropped   Esc cancels";
        return Some(Line::from(Span::styled(
            text::fit(text, width),
            theme.level(Level::Warning),
        )));
    }
    if view.attachments.is_empty() {
        return None;
    }
    let names: Vec<String> = view
        .attachments
        .iter()
        .map(|a| format!("+ {} ({})", text::one_line(&a.name), text::bytes(a.bytes)))
        .collect();
    Some(Line::from(Span::styled(
        text::fit(&names.join("   "), width).into_owned(),
        theme.dim(),
    )))
}

/// The ways to go on with a command, just above the editor.
fn completions(buffer: &mut Buffer, body: Rect, view: &View, ui: &mut Ui) {
    let list = ui.completions(view);
    let height = list.len().min(8).min(body.height.into());
    if height == 0 {
        return;
    }
    let theme = ui.theme;
    let selected = ui.completion.map(|i| i.min(list.len() - 1));
    let first = selected.map_or(0, |i| (i + 1).saturating_sub(height));
    let shown = &list[first..first + height];
    let width = usize::from(body.width);
    let column = list
        .iter()
        .map(|c| text::width(&c.label))
        .max()
        .unwrap_or(0)
        .min(width / 2)
        + 2;
    let top = body.bottom() - u16::try_from(height).unwrap_or(0);
    for (i, completion) in shown.iter().enumerate() {
        let chosen = selected == Some(first + i);
        let label = text::fit(&completion.label, column - 2).into_owned();
        let pad = " ".repeat(column - text::width(&label));
        let style = if chosen { theme.chosen() } else { theme.text() };
        let spans = vec![
            Span::styled(if chosen { "› " } else { "  " }, theme.accent()),
            Span::styled(label, style),
            Span::raw(pad),
            Span::styled(text::one_line(&completion.help), theme.dim()),
        ];
        put(
            buffer,
            body,
            top + u16::try_from(i).unwrap_or(0),
            Line::from(text::clip(spans, width)),
        );
    }
    // A row of space sets the list apart from the conversation.
    if top > body.y {
        let more = list.len() - height;
        let line = if more > 0 {
            format!("  {more} more")
        } else {
            String::new()
        };
        put(
            buffer,
            body,
            top - 1,
            Line::from(Span::styled(line, theme.faint())),
        );
    }
}

/// Draws a list and tells where the cursor of its filter is.
fn picker(buffer: &mut Buffer, area: Rect, view: &View, ui: &mut Ui) -> Option<Position> {
    let theme = ui.theme;
    let history = ui.history().to_vec();
    let Window::Picker(picker) = &mut ui.window else {
        return None;
    };
    if area.is_empty() {
        return None;
    }
    let width = usize::from(area.width);
    let items = picker.items(view, &history);
    picker.selected = picker.selected.min(items.len().saturating_sub(1));
    let Picker {
        kind,
        filter,
        selected,
    } = picker;
    let title = format!("{}  ", kind.title());
    let shown = text::fit_end(filter, width.saturating_sub(text::width(&title) + 1)).into_owned();
    let at = text::width(&title) + text::width(&shown);
    put(
        buffer,
        area,
        area.y,
        Line::from(vec![Span::styled(title, theme.accent()), Span::raw(shown)]),
    );
    let room = usize::from(area.height).saturating_sub(2);
    if items.is_empty() {
        let text = if filter.is_empty() {
            kind.empty()
        } else {
            "nothing fits"
        };
        put(
            buffer,
            area,
            area.y + 2,
            Line::from(Span::styled(text, theme.dim())),
        );
    }
    let first = (*selected + 1).saturating_sub(room);
    let detail = if *kind == Kind::History {
        0
    } else {
        items
            .iter()
            .map(|i| text::width(&i.detail))
            .max()
            .unwrap_or(0)
    };
    for (i, item) in items.iter().enumerate().skip(first).take(room) {
        let chosen = i == *selected;
        let style = if chosen { theme.chosen() } else { theme.text() };
        let mark = Span::styled(if chosen { "› " } else { "  " }, theme.accent());
        let label = Span::styled(item.label.clone(), style);
        let right = if width > detail + 16 {
            format!("{:>detail$}", item.detail)
        } else {
            String::new()
        };
        let line = text::between(
            vec![mark, label],
            vec![Span::styled(right, theme.dim())],
            width,
        );
        put(
            buffer,
            area,
            area.y + 2 + u16::try_from(i - first).unwrap_or(0),
            line,
        );
    }
    let x = area.x + u16::try_from(at).unwrap_or(0).min(area.width - 1);
    Some(Position { x, y: area.y })
}

/// Draws the lines from `top` on, which is moved back if it is too far.
fn scrolled(
    buffer: &mut Buffer,
    area: Rect,
    all: Vec<Line<'static>>,
    top: &mut usize,
    theme: Theme,
) {
    let room = usize::from(area.height);
    *top = (*top).min(all.len().saturating_sub(room));
    let below = all.len().saturating_sub(*top + room);
    lines(buffer, area, all.into_iter().skip(*top).take(room));
    if below > 0 && room > 2 {
        let line = Line::from(Span::styled(format!("↓ {} more", below + 1), theme.faint()));
        put(buffer, area, area.bottom() - 1, line);
    }
}

/// Keys and commands, made from their tables.
fn help(width: usize, theme: Theme) -> Vec<Line<'static>> {
    let mut out = Vec::new();
    let mut group = "";
    for binding in BINDINGS.iter().filter(|b| !b.group.is_empty()) {
        if binding.group != group {
            group = binding.group;
            help_head(&mut out, group, theme);
        }
        help_row(&mut out, binding.shown, binding.help, width, theme);
    }
    help_head(&mut out, "Commands", theme);
    for command in &COMMANDS {
        help_row(
            &mut out,
            format!("/{} {}", command.name, command.arguments).trim_end(),
            command.help,
            width,
            theme,
        );
    }
    out
}

fn help_head(out: &mut Vec<Line<'static>>, head: &'static str, theme: Theme) {
    if !out.is_empty() {
        out.push(Line::default());
    }
    out.push(Line::from(Span::styled(head, theme.accent())));
}

fn help_row(out: &mut Vec<Line<'static>>, key: &str, help: &str, width: usize, theme: Theme) {
    let column = 24.min(width / 2);
    let key = text::fit(key, column.saturating_sub(1)).into_owned();
    let pad = " ".repeat(column - text::width(&key));
    let room = (width - column).max(1);
    for (i, part) in text::wrap(&[Span::styled(help.to_string(), theme.dim())], room)
        .into_iter()
        .enumerate()
    {
        let mut spans = vec![if i == 0 {
            Span::raw(format!("{key}{pad}"))
        } else {
            Span::raw(" ".repeat(column))
        }];
        spans.extend(part);
        out.push(Line::from(spans));
    }
}

/// All figures.
fn stats(view: &View, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let width = width.min(64);
    let mut sections = figures::sections(&view.live, width, theme);
    sections.push(Section {
        rank: 0,
        lines: figures::round(view.live.round.as_ref(), width, theme),
        short: 2,
    });
    let mut rows: Vec<Line<'static>> = Vec::new();
    let mut add = |label: &str, value: &str| {
        let room = width.saturating_sub(text::width(label) + 2);
        rows.push(figures::row(
            label,
            &text::fit(&text::one_line(value), room),
            width,
            theme,
        ));
    };
    for (name, value) in &view.settings.samplers {
        add(name, value);
    }
    add("thinking", if view.settings.think { "on" } else { "off" });
    if !view.settings.spec.is_empty() {
        add("spec", &view.settings.spec);
    }
    add(
        "system",
        if view.settings.system.is_empty() {
            "none"
        } else {
            &view.settings.system
        },
    );
    for (label, value) in &view.stats {
        add(label, value);
    }
    rows.insert(0, figures::head("settings", Span::raw(""), width, theme));
    sections.push(Section {
        rank: 0,
        lines: rows,
        short: 1,
    });
    figures::fitted(sections, usize::MAX)
}
