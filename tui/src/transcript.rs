//! The conversation as lines. Rendered lines are kept from frame to frame; while an answer is written, only its last block
//! is rendered again, and messages that are not on the screen are not rendered at all.

use std::collections::{HashMap, HashSet};

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Modifier;
use ratatui::text::{Line, Span};
use ratatui::widgets::Widget;

use crate::highlight::Highlighter;
use crate::markdown;
use crate::text;
use crate::theme::Theme;
use crate::view::{Message, Role};

/// Lines of a text are at most this wide: longer ones are hard to read.
const READABLE: usize = 100;

/// The conversation's lines and which of them are on the screen.
#[derive(Default)]
pub struct Transcript {
    cache: HashMap<u64, Entry>,
    highlighter: Highlighter,
    /// Messages whose thinking is open.
    open: HashSet<u64>,
    /// First line on the screen, as message and line in it; `None` follows the end.
    top: Option<(usize, usize)>,
    /// Lines to move by at the next drawing, negative is up.
    pending: isize,
    /// Lines on the screen as last drawn: message index and, for the line that opens thinking, its id.
    shown: Vec<Option<u64>>,
    area: Rect,
    /// Whether lines follow below the screen.
    more_below: bool,
}

/// A rendered message.
struct Entry {
    message: Message,
    width: usize,
    theme: Theme,
    open: bool,
    lines: Vec<Line<'static>>,
    /// The line that opens the thinking part.
    thinking_line: Option<usize>,
    answer: Growing,
    thought: Growing,
}

/// A Markdown text that may grow.
#[derive(Default)]
struct Growing {
    source: String,
    /// Bytes and lines of blocks that do not change any more.
    stable: usize,
    stable_lines: Vec<Line<'static>>,
    lines: Vec<Line<'static>>,
}

impl Growing {
    fn update(
        &mut self,
        source: &str,
        streaming: bool,
        width: usize,
        theme: Theme,
        highlighter: &mut Highlighter,
    ) {
        let goes_on = source
            .as_bytes()
            .starts_with(&self.source.as_bytes()[..self.stable]);
        if !goes_on || !source.is_char_boundary(self.stable) {
            *self = Growing::default();
        }
        let tail = &source[self.stable..];
        let tail = if streaming {
            markdown::settled(tail)
        } else {
            tail.into()
        };
        let rendered = markdown::render(&tail, width, theme, highlighter);
        // The tail may end otherwise than the source, but its last block begins where the source's does.
        if rendered.last_block > 0 && rendered.last_block <= source.len() - self.stable {
            append(
                &mut self.stable_lines,
                &rendered.lines[..rendered.last_block_line],
            );
            self.stable += rendered.last_block;
            self.lines = self.stable_lines.clone();
            let rest = &rendered.lines[rendered.last_block_line..];
            append(
                &mut self.lines,
                rest.strip_prefix(&[Line::default()]).unwrap_or(rest),
            );
        } else {
            self.lines = self.stable_lines.clone();
            append(&mut self.lines, &rendered.lines);
        }
        self.source.clear();
        self.source.push_str(source);
    }
}

/// Adds the lines of blocks to those of the blocks before, with an empty line between.
fn append(lines: &mut Vec<Line<'static>>, more: &[Line<'static>]) {
    if more.is_empty() {
        return;
    }
    if !lines.is_empty() {
        lines.push(Line::default());
    }
    lines.extend_from_slice(more);
}

impl Transcript {
    /// Moves by lines at the next drawing; negative is up.
    pub fn scroll(&mut self, lines: isize) {
        self.pending = self.pending.saturating_add(lines);
    }

    /// Moves by most of the screen.
    pub fn scroll_page(&mut self, direction: isize) {
        let page = isize::from(i16::try_from(self.area.height).unwrap_or(i16::MAX)).max(3) - 2;
        self.scroll(direction * page);
    }

    /// To the first line.
    pub fn go_to_start(&mut self) {
        self.pending = 0;
        self.top = Some((0, 0));
    }

    /// To the last line, and follows it.
    pub fn go_to_end(&mut self) {
        self.pending = 0;
        self.top = None;
    }

    /// Whether lines follow below the screen.
    pub fn more_below(&self) -> bool {
        self.more_below
    }

    /// Opens or folds the thinking part of a message.
    pub fn toggle(&mut self, id: u64) {
        if !self.open.remove(&id) {
            self.open.insert(id);
        }
    }

    /// Opens or folds the thinking part of the last message that has one.
    pub fn toggle_last(&mut self, messages: &[Message]) {
        if let Some(message) = messages.iter().rev().find(|m| m.thinking.is_some()) {
            self.toggle(message.id);
        }
    }

    /// A click: opens or folds the thinking part whose line is there. Tells whether there was one.
    pub fn click(&mut self, column: u16, row: u16) -> bool {
        if !self.area.contains((column, row).into()) {
            return false;
        }
        match self.shown.get(usize::from(row - self.area.y)) {
            Some(Some(id)) => {
                let id = *id;
                self.toggle(id);
                true
            }
            _ => false,
        }
    }

    fn entry(&mut self, message: &Message, width: usize, theme: Theme) -> &Entry {
        let open = self.open.contains(&message.id);
        let highlighter = &mut self.highlighter;
        let entry = self.cache.entry(message.id).or_insert_with(|| Entry {
            message: Message::new(message.id, message.role, ""),
            width: 0,
            theme,
            open,
            lines: Vec::new(),
            thinking_line: None,
            answer: Growing::default(),
            thought: Growing::default(),
        });
        if entry.width != width || entry.theme != theme {
            (entry.answer, entry.thought) = (Growing::default(), Growing::default());
        } else if entry.open == open && entry.message == *message {
            return entry;
        }
        if entry.message != *message {
            entry.message.clone_from(message);
        }
        (entry.width, entry.theme, entry.open) = (width, theme, open);
        build(entry, highlighter);
        entry
    }

    fn height(&mut self, messages: &[Message], index: usize, width: usize, theme: Theme) -> usize {
        messages
            .get(index)
            .map_or(0, |m| self.entry(m, width, theme).lines.len())
    }

    /// Draws the lines that are to be on the screen.
    pub fn draw(&mut self, area: Rect, buffer: &mut Buffer, messages: &[Message], theme: Theme) {
        self.area = area;
        self.shown.clear();
        if self.cache.len() > 2 * messages.len() + 16 {
            let ids: HashSet<u64> = messages.iter().map(|m| m.id).collect();
            self.cache.retain(|id, _| ids.contains(id));
            self.open.retain(|id| ids.contains(id));
        }
        let (width, height) = (
            usize::from(area.width).min(READABLE),
            usize::from(area.height),
        );
        if width == 0 || height == 0 || messages.is_empty() {
            self.more_below = false;
            return;
        }
        let (first, mut line) = self.settle_top(messages, width, height, theme);
        let mut y = 0;
        let mut index = first;
        while y < height && index < messages.len() {
            let entry = self.entry(&messages[index], width, theme);
            let id = messages[index].id;
            let mut marks = Vec::new();
            for (i, text) in entry.lines.iter().enumerate().skip(line).take(height - y) {
                let row = area.y + u16::try_from(y).unwrap_or(u16::MAX);
                text.render(
                    Rect {
                        x: area.x,
                        y: row,
                        width: area.width,
                        height: 1,
                    },
                    buffer,
                );
                marks.push((entry.thinking_line == Some(i)).then_some(id));
                y += 1;
            }
            let drawn_to = line + marks.len();
            self.more_below = drawn_to < entry.lines.len() || index + 1 < messages.len();
            self.shown.extend(marks);
            line = 0;
            index += 1;
        }
    }

    /// Applies what was scrolled and finds the first line of the screen.
    fn settle_top(
        &mut self,
        messages: &[Message],
        width: usize,
        height: usize,
        theme: Theme,
    ) -> (usize, usize) {
        let end = self.end_top(messages, width, height, theme);
        let pending = std::mem::take(&mut self.pending);
        let (mut index, mut line) = self.top.unwrap_or(end);
        // The conversation may have become shorter, and a message narrower.
        index = index.min(messages.len() - 1);
        line = line.min(self.height(messages, index, width, theme).saturating_sub(1));
        let mut left = pending.unsigned_abs();
        if pending < 0 {
            while left > 0 && (index, line) > (0, 0) {
                let step = left.min(line);
                line -= step;
                left -= step;
                if left > 0 && index > 0 {
                    index -= 1;
                    line = self.height(messages, index, width, theme);
                } else if line == 0 && index == 0 {
                    break;
                }
            }
            line = line.min(self.height(messages, index, width, theme).saturating_sub(1));
        } else {
            while left > 0 && (index, line) < end {
                let height = self.height(messages, index, width, theme);
                let step = left.min(height.saturating_sub(line));
                line += step;
                left -= step;
                if line >= height {
                    index += 1;
                    line = 0;
                }
            }
        }
        if (index, line) >= end {
            self.top = None;
            end
        } else {
            self.top = Some((index, line));
            (index, line)
        }
    }

    /// The first line of the screen when its last line is the conversation's.
    fn end_top(
        &mut self,
        messages: &[Message],
        width: usize,
        height: usize,
        theme: Theme,
    ) -> (usize, usize) {
        let mut left = height;
        for index in (0..messages.len()).rev() {
            let lines = self.height(messages, index, width, theme);
            if lines >= left {
                return (index, lines - left);
            }
            left -= lines;
        }
        (0, 0)
    }
}

/// Builds the lines of a message; the last one is empty.
fn build(entry: &mut Entry, highlighter: &mut Highlighter) {
    let Entry {
        message,
        width,
        theme,
        open,
        lines,
        thinking_line,
        answer,
        thought,
    } = entry;
    let (width, theme, open) = (*width, *theme, *open);
    lines.clear();
    *thinking_line = None;
    let indent = 2.min(width.saturating_sub(1));
    let room = width - indent;
    let indented = |line: Line<'static>| {
        let mut spans = vec![Span::raw(" ".repeat(indent))];
        spans.extend(line.spans);
        Line::from(spans)
    };
    if let Some(thinking) = &message.thinking {
        *thinking_line = Some(0);
        let mark = if open { "▾" } else { "▸" };
        let what = if thinking.done {
            "thought for"
        } else {
            "thinking,"
        };
        let unit = if thinking.tokens == 1 {
            "token"
        } else {
            "tokens"
        };
        let head = format!("{mark} {what} {} {unit}", text::count(thinking.tokens));
        let mut spans = vec![Span::styled(
            text::fit(&head, width).into_owned(),
            theme.dim(),
        )];
        let used = text::width(&head) + 3;
        // While it is being written, the end of it follows on the same line.
        if !open && !thinking.done && used + 8 < width {
            let last = text::one_line(
                thinking
                    .text
                    .lines()
                    .rev()
                    .find(|l| !l.trim().is_empty())
                    .unwrap_or(""),
            );
            let tail = text::fit_end(&last, width - used).into_owned();
            spans.push(Span::styled(format!("   {tail}"), theme.faint()));
        }
        lines.push(Line::from(spans));
        if open {
            thought.update(&thinking.text, !thinking.done, room, theme, highlighter);
            for line in &thought.lines {
                let mut line = indented(line.clone());
                for span in &mut line.spans {
                    span.style = theme.dim().patch(span.style).patch(theme.dim());
                }
                lines.push(line);
            }
        }
        if !message.text.trim().is_empty() || !message.tool_calls.is_empty() {
            lines.push(Line::default());
        }
    }
    match message.role {
        Role::User => {
            let text = text::clean(&message.text);
            for (i, logical) in text.trim_end().split('\n').enumerate() {
                for (k, part) in text::wrap(&[Span::raw(logical.to_string())], room)
                    .into_iter()
                    .enumerate()
                {
                    let mark = if i == 0 && k == 0 { "› " } else { "  " };
                    let mut spans = vec![Span::styled(
                        text::fit(mark, indent).into_owned(),
                        theme.accent(),
                    )];
                    spans.extend(
                        part.into_iter()
                            .map(|s| Span::styled(s.content, theme.strong())),
                    );
                    lines.push(Line::from(spans));
                }
            }
            for name in &message.attachments {
                let name = format!("+ {}", text::one_line(name));
                lines.push(indented(Line::from(Span::styled(
                    text::fit(&name, room).into_owned(),
                    theme.dim(),
                ))));
            }
        }
        Role::Assistant => {
            answer.update(&message.text, message.streaming, room, theme, highlighter);
            lines.extend(answer.lines.iter().cloned().map(&indented));
        }
        Role::Tool => {
            let text = text::clean(&message.text);
            for logical in text.trim_end().split('\n') {
                for part in text::wrap_hard(&[Span::styled(logical.to_string(), theme.dim())], room)
                {
                    lines.push(indented(Line::from(part)));
                }
            }
        }
    }
    for call in &message.tool_calls {
        let text = format!(
            "→ {} {}",
            text::one_line(&call.name),
            text::one_line(&call.arguments)
        );
        for part in text::wrap(&[Span::styled(text, theme.dim())], room) {
            lines.push(indented(Line::from(part)));
        }
    }
    if message.streaming && message.thinking.as_ref().is_none_or(|t| t.done) {
        cursor(lines, width, indent, theme);
    }
    if let Some(error) = &message.error {
        for part in text::wrap(
            &[Span::styled(
                format!("✗ {}", text::one_line(error)),
                theme.error(),
            )],
            room,
        ) {
            lines.push(indented(Line::from(part)));
        }
    }
    if let Some(note) = &message.note {
        let note = text::one_line(note);
        let style = theme.faint();
        lines.push(indented(Line::from(Span::styled(
            text::fit(&note, room).into_owned(),
            style,
        ))));
    }
    lines.push(Line::default());
}

/// A mark behind the text that is being written.
fn cursor(lines: &mut Vec<Line<'static>>, width: usize, indent: usize, theme: Theme) {
    let mark = Span::styled("▍", theme.accent().remove_modifier(Modifier::BOLD));
    match lines.last_mut() {
        Some(last) if last.width() > 0 && text::spans_width(&last.spans) < width => {
            last.spans.push(mark)
        }
        _ => lines.push(Line::from(vec![Span::raw(" ".repeat(indent)), mark])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::theme::ThemeKind;
    use crate::view::Thinking;

    const THEME: Theme = Theme {
        kind: ThemeKind::None,
    };

    fn screen(
        transcript: &mut Transcript,
        messages: &[Message],
        width: u16,
        height: u16,
    ) -> Vec<String> {
        let area = Rect::new(0, 0, width, height);
        let mut buffer = Buffer::empty(area);
        transcript.draw(area, &mut buffer, messages, THEME);
        let row = |y| {
            (0..width)
                .map(|x| buffer[(x, y)].symbol())
                .collect::<String>()
                .trim_end()
                .to_string()
        };
        (0..height).map(row).collect()
    }

    fn lines(entry: &Growing) -> Vec<String> {
        entry
            .lines
            .iter()
            .map(|l| l.spans.iter().map(|s| s.content.as_ref()).collect())
            .collect()
    }

    const SOURCE: &str = "# Title\n\nSome **bold** and `code` text that wraps around.\n\n1. one\n2. two\n   - in\n\n```rust\n\
        fn main() {\n    println!(\"hi\");\n}\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n> quote\n\n---\n\nThe *end*: 你好。\n";

    #[test]
    fn a_text_that_grows_ends_as_the_whole_text() {
        let mut whole = Growing::default();
        whole.update(SOURCE, false, 30, THEME, &mut Highlighter::default());
        for step in [1, 3, 7] {
            let mut growing = Growing::default();
            let mut highlighter = Highlighter::default();
            let ends: Vec<usize> = SOURCE
                .char_indices()
                .map(|(i, _)| i)
                .step_by(step)
                .collect();
            for end in ends {
                growing.update(&SOURCE[..end], true, 30, THEME, &mut highlighter);
            }
            assert!(growing.stable > SOURCE.len() / 2);
            growing.update(SOURCE, false, 30, THEME, &mut highlighter);
            assert_eq!(lines(&growing), lines(&whole), "step {step}");
        }
    }

    #[test]
    fn a_growing_text_never_loses_a_line_that_was_complete() {
        let mut growing = Growing::default();
        let mut before = Vec::new();
        for (end, _) in SOURCE.char_indices() {
            growing.update(&SOURCE[..end], true, 30, THEME, &mut Highlighter::default());
            let now = lines(&growing);
            assert!(now.len() + 1 >= before.len(), "{before:?} -> {now:?}");
            before = now;
        }
    }

    #[test]
    fn scrolling_moves_follows_and_stays() {
        let mut messages: Vec<Message> = (0..20)
            .map(|i| Message::new(i, Role::User, format!("message {i}")))
            .collect();
        let mut transcript = Transcript::default();
        assert_eq!(
            screen(&mut transcript, &messages, 20, 4),
            ["› message 18", "", "› message 19", ""]
        );
        assert!(!transcript.more_below());
        transcript.scroll(-2);
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[0], "› message 17");
        assert!(transcript.more_below());
        messages.push(Message::new(20, Role::User, "message 20"));
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[0], "› message 17");
        transcript.scroll(-1000);
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[0], "› message 0");
        transcript.scroll(3);
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[1], "› message 2");
        transcript.scroll(1000);
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[2], "› message 20");
        messages.push(Message::new(21, Role::User, "message 21"));
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[2], "› message 21");
        transcript.go_to_start();
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[0], "› message 0");
        messages.truncate(1);
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[0], "› message 0");
        messages.clear();
        assert_eq!(screen(&mut transcript, &messages, 20, 4)[0], "");
    }

    #[test]
    fn thinking_is_folded_until_it_is_opened() {
        let mut message = Message::new(1, Role::Assistant, "Answer.");
        message.thinking = Some(Thinking {
            text: "First this.\n\nThen that.".into(),
            tokens: 1234,
            done: true,
        });
        let mut transcript = Transcript::default();
        let folded = screen(&mut transcript, std::slice::from_ref(&message), 40, 5);
        assert_eq!(
            folded,
            ["▸ thought for 1,234 tokens", "", "  Answer.", "", ""]
        );
        assert!(transcript.click(3, 0));
        let opened = screen(&mut transcript, std::slice::from_ref(&message), 40, 7);
        assert_eq!(
            opened[..5],
            [
                "▾ thought for 1,234 tokens",
                "  First this.",
                "",
                "  Then that.",
                ""
            ]
        );
        assert!(!transcript.click(3, 2));
        transcript.toggle_last(&[message]);
        assert!(transcript.open.is_empty());
    }

    #[test]
    fn only_messages_on_the_screen_are_rendered() {
        let messages: Vec<Message> = (0..500)
            .map(|i| Message::new(i, Role::Assistant, SOURCE))
            .collect();
        let mut transcript = Transcript::default();
        screen(&mut transcript, &messages, 80, 40);
        assert!(transcript.cache.len() < 5);
    }
}
