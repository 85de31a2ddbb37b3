//! Markdown to lines of a given width: headings, lists, quotes, tables, code, emphasis, links.
//!
//! A text is read block by block. [`render`] tells where its last block begins, so that a text that grows needs only that
//! block read again. Nothing of the text is left out: what is no Markdown is shown as it is.

use std::borrow::Cow;

use pulldown_cmark::{Alignment, CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};

use crate::highlight::Highlighter;
use crate::text::{self, spans_width};
use crate::theme::{Class, Theme};

/// Columns of a table narrower than this are not worth a table.
const MIN_COLUMN: usize = 6;

fn options() -> Options {
    Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS
}

/// Rendered blocks.
pub struct Rendered {
    /// The lines, each at most as wide as asked.
    pub lines: Vec<Line<'static>>,
    /// Byte at which the last block begins: what is before it does not change when text is added at the end.
    pub last_block: usize,
    /// How many of the lines come before that block.
    pub last_block_line: usize,
}

/// Renders `source` in `width` cells.
pub fn render(source: &str, width: usize, theme: Theme, highlighter: &mut Highlighter) -> Rendered {
    let mut writer = Writer {
        theme,
        width: width.max(1),
        highlighter,
        lines: Vec::new(),
        containers: Vec::new(),
        styles: Vec::new(),
        inline: Vec::new(),
        inline_style: Style::new(),
        code: None,
        table: None,
        links: Vec::new(),
        gap: false,
    };
    let mut last_block = 0;
    let mut last_block_line = 0;
    let mut depth = 0usize;
    for (event, range) in Parser::new_ext(source, options()).into_offset_iter() {
        match &event {
            Event::Start(_) => {
                if depth == 0 {
                    last_block = line_start(source, range.start);
                    last_block_line = writer.lines.len();
                }
                depth += 1;
            }
            Event::End(_) => depth = depth.saturating_sub(1),
            Event::Rule if depth == 0 => {
                last_block = line_start(source, range.start);
                last_block_line = writer.lines.len();
            }
            _ => {}
        }
        writer.event(event);
    }
    writer.flush();
    Rendered {
        lines: writer.lines,
        last_block,
        last_block_line,
    }
}

fn line_start(source: &str, at: usize) -> usize {
    source[..at].rfind('\n').map_or(0, |newline| newline + 1)
}

/// The text of an answer that is still being written, so that it does not flicker: emphasis and code that were opened are
/// closed, and a last line that may become a list, a rule, a fence or a heading is held back until more of it is there.
pub fn settled(source: &str) -> Cow<'_, str> {
    let last = line_start(source, source.len());
    if in_fence(source) {
        let line = source[last..].trim();
        let closes = !line.is_empty()
            && (line.bytes().all(|b| b == b'`') || line.bytes().all(|b| b == b'~'));
        return Cow::Borrowed(if closes { &source[..last] } else { source });
    }
    let line = source[last..].trim();
    let marks = !line.is_empty() && line.chars().all(|c| "-=*+#`~_>|".contains(c));
    let number = line.len() <= 4
        && line
            .trim_end_matches(['.', ')'])
            .bytes()
            .all(|b| b.is_ascii_digit());
    let fence = line.starts_with("```") || line.starts_with("~~~");
    if marks || number || fence {
        return Cow::Borrowed(&source[..last]);
    }
    // Only the last paragraph can have something open.
    let paragraph = source.rfind("\n\n").map_or(0, |at| at + 2);
    match closers(&source[paragraph..]) {
        None => Cow::Borrowed(source),
        Some((drop, add)) => Cow::Owned(format!("{}{add}", &source[..source.len() - drop])),
    }
}

/// Whether the text ends within a fenced code block.
fn in_fence(source: &str) -> bool {
    let mut open: Option<(u8, usize)> = None;
    let complete = line_start(source, source.len());
    for line in source[..complete].lines() {
        let line = line.trim_start();
        let Some(mark) = line.bytes().next().filter(|b| matches!(b, b'`' | b'~')) else {
            continue;
        };
        let count = line.bytes().take_while(|b| *b == mark).count();
        match open {
            None if count >= 3 => open = Some((mark, count)),
            Some((m, n)) if m == mark && count >= n && line[count..].trim().is_empty() => {
                open = None
            }
            _ => {}
        }
    }
    open.is_some()
}

/// What to take from the end and what to add so that code and strong emphasis are closed.
fn closers(paragraph: &str) -> Option<(usize, String)> {
    let bytes = paragraph.as_bytes();
    let mut at = 0;
    let mut code: Option<(usize, usize)> = None; // where it opened, number of ticks
    let mut strong: Option<usize> = None;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'`' => {
                let count = bytes[at..].iter().take_while(|b| **b == b'`').count();
                match code {
                    None => code = Some((at, count)),
                    Some((_, n)) if n == count => code = None,
                    Some(_) => {}
                }
                at += count;
            }
            b'*' if code.is_none() && bytes.get(at + 1) == Some(&b'*') => {
                strong = if strong.is_some() { None } else { Some(at) };
                at += 2;
            }
            _ => at += 1,
        }
    }
    let end = bytes.len();
    if let Some((opened, count)) = code {
        // A mark with nothing behind it yet is held back.
        if opened + count == end {
            return Some((
                count,
                if strong.is_some() {
                    "**".into()
                } else {
                    String::new()
                },
            ));
        }
        return Some((
            0,
            "`".repeat(count) + if strong.is_some() { "**" } else { "" },
        ));
    }
    let opened = strong?;
    if opened + 2 == end {
        return Some((2, String::new()));
    }
    // "**bold" with half of its end, or a space at the end that would keep the end from closing.
    let tail = &paragraph[opened + 2..];
    let kept = tail.trim_end().trim_end_matches('*');
    if kept.is_empty() {
        return Some((tail.len() + 2, String::new()));
    }
    Some((tail.len() - kept.len(), "**".into()))
}

/// The code blocks of a text: language and code.
pub fn code_blocks(source: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, String)> = None;
    for event in Parser::new_ext(source, options()) {
        match event {
            Event::Start(Tag::CodeBlock(kind)) => open = Some((language(&kind), String::new())),
            Event::Text(text) => {
                if let Some((_, code)) = &mut open {
                    code.push_str(&text);
                }
            }
            Event::End(TagEnd::CodeBlock) => blocks.extend(open.take()),
            _ => {}
        }
    }
    blocks
}

fn language(kind: &CodeBlockKind) -> String {
    match kind {
        CodeBlockKind::Fenced(info) => info.split([' ', ',', '{']).next().unwrap_or("").to_string(),
        CodeBlockKind::Indented => String::new(),
    }
}

/// What surrounds a block: what its first line begins with, and the others.
struct Container {
    first: Option<Span<'static>>,
    rest: Span<'static>,
    /// Of a list: the next number, or bullets.
    list: Option<Option<u64>>,
}

struct Table {
    alignments: Vec<Alignment>,
    /// Rows of cells, the first is the head.
    rows: Vec<Vec<Vec<Span<'static>>>>,
    /// Cells of the row being read.
    cells: Vec<Vec<Span<'static>>>,
}

struct Writer<'h> {
    theme: Theme,
    width: usize,
    highlighter: &'h mut Highlighter,
    lines: Vec<Line<'static>>,
    containers: Vec<Container>,
    styles: Vec<Style>,
    /// Text of the block so far, with `\n` for breaks.
    inline: Vec<Span<'static>>,
    inline_style: Style,
    code: Option<(String, String)>,
    table: Option<Table>,
    /// Targets of open links, and where their text begins in `inline`.
    links: Vec<(String, usize)>,
    /// Whether an empty line comes before the next block.
    gap: bool,
}

impl Writer<'_> {
    fn event(&mut self, event: Event) {
        match event {
            Event::Start(tag) => self.start(tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text) => match &mut self.code {
                Some((_, code)) => code.push_str(&text),
                None => self.push(&text),
            },
            Event::Code(text) => {
                let style = self.inline_style.patch(self.theme.inline_code());
                let text = text::clean(&text).replace('\n', " ");
                self.inline.push(Span::styled(text, style));
            }
            Event::Html(text) | Event::InlineHtml(text) => self.push(&text),
            Event::InlineMath(text) | Event::DisplayMath(text) => self.push(&text),
            Event::FootnoteReference(name) => self.push(&format!("[{name}]")),
            // A line end is kept: models break lines where they mean it.
            Event::SoftBreak | Event::HardBreak => self.push("\n"),
            Event::Rule => {
                self.begin();
                let room = self.room();
                self.line(vec![Span::styled("─".repeat(room), self.theme.faint())]);
                self.gap = true;
            }
            Event::TaskListMarker(done) => {
                let style = if done {
                    self.theme.accent()
                } else {
                    self.theme.dim()
                };
                self.inline
                    .push(Span::styled(if done { "☑ " } else { "☐ " }, style));
            }
        }
    }

    fn start(&mut self, tag: Tag) {
        match tag {
            Tag::Paragraph | Tag::HtmlBlock => self.begin(),
            Tag::Heading { level, .. } => {
                self.begin();
                self.style(self.theme.heading(level_number(level)));
            }
            Tag::BlockQuote(_) => {
                self.begin();
                let bar = Span::styled("▎ ", self.theme.faint());
                self.containers.push(Container {
                    first: None,
                    rest: bar,
                    list: None,
                });
                self.style(self.theme.dim());
            }
            Tag::CodeBlock(kind) => {
                self.begin();
                self.code = Some((language(&kind), String::new()));
            }
            Tag::List(first) => {
                self.flush();
                // A list within a list follows its item without an empty line.
                self.gap &= !self.containers.iter().any(|c| c.list.is_some());
                self.begin();
                self.containers.push(Container {
                    first: None,
                    rest: Span::raw(""),
                    list: Some(first),
                });
            }
            Tag::Item => self.item(),
            Tag::Table(alignments) => {
                self.begin();
                self.table = Some(Table {
                    alignments,
                    rows: Vec::new(),
                    cells: Vec::new(),
                });
            }
            Tag::TableHead | Tag::TableRow | Tag::TableCell => self.inline.clear(),
            Tag::Emphasis => self.style(Style::new().add_modifier(Modifier::ITALIC)),
            Tag::Strong => self.style(self.theme.strong()),
            Tag::Strikethrough => self.style(Style::new().add_modifier(Modifier::CROSSED_OUT)),
            Tag::Link { dest_url, .. } => {
                self.links.push((dest_url.to_string(), self.inline.len()));
                self.style(self.theme.link());
            }
            Tag::Image { dest_url, .. } => {
                self.links.push((dest_url.to_string(), self.inline.len()));
                self.style(self.theme.dim());
            }
            _ => self.begin(),
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Paragraph | TagEnd::HtmlBlock => {
                self.flush();
                self.gap = true;
            }
            TagEnd::Heading(_) => {
                self.flush();
                self.unstyle();
                self.gap = true;
            }
            TagEnd::BlockQuote(_) => {
                self.flush();
                self.unstyle();
                self.containers.pop();
                self.gap = true;
            }
            TagEnd::CodeBlock => self.end_code(),
            TagEnd::List(_) => {
                self.flush();
                self.containers.pop();
                self.gap = !self.containers.iter().any(|c| c.list.is_some());
            }
            TagEnd::Item => {
                self.flush();
                if self.containers.last().is_some_and(|c| c.first.is_some()) {
                    self.line(Vec::new()); // an empty item: its mark alone
                }
                self.containers.pop();
            }
            TagEnd::TableCell => {
                let cell = std::mem::take(&mut self.inline);
                if let Some(table) = &mut self.table {
                    table.cells.push(cell);
                }
            }
            TagEnd::TableHead | TagEnd::TableRow => {
                if let Some(table) = &mut self.table {
                    let cells = std::mem::take(&mut table.cells);
                    table.rows.push(cells);
                }
            }
            TagEnd::Table => self.end_table(),
            TagEnd::Emphasis | TagEnd::Strong | TagEnd::Strikethrough => self.unstyle(),
            TagEnd::Link | TagEnd::Image => {
                self.unstyle();
                if let Some((url, from)) = self.links.pop() {
                    let shown: String = self.inline[from.min(self.inline.len())..]
                        .iter()
                        .map(|s| s.content.as_ref())
                        .collect();
                    if !url.is_empty() && shown != url && url != format!("mailto:{shown}") {
                        self.inline.push(Span::styled(
                            format!(" ({})", text::one_line(&url)),
                            self.theme.dim(),
                        ));
                    }
                }
            }
            _ => self.flush(),
        }
    }

    fn style(&mut self, style: Style) {
        self.styles.push(self.inline_style);
        self.inline_style = self.inline_style.patch(style);
    }

    fn unstyle(&mut self) {
        self.inline_style = self.styles.pop().unwrap_or_default();
    }

    fn push(&mut self, text: &str) {
        self.inline.push(Span::styled(
            text::clean(text).into_owned(),
            self.inline_style,
        ));
    }

    /// Ends the text before, and leaves an empty line if one is due.
    fn begin(&mut self) {
        self.flush();
        if self.gap && !self.lines.is_empty() {
            let spans: Vec<Span> = self
                .containers
                .iter()
                .filter(|c| c.first.is_none())
                .map(|c| c.rest.clone())
                .collect();
            self.lines.push(Line::from(trimmed(spans)));
        }
        self.gap = false;
    }

    fn item(&mut self) {
        self.flush();
        // An item after one with paragraphs has an empty line before it.
        self.begin();
        let depth = self.containers.iter().filter(|c| c.list.is_some()).count();
        let mark = match self.containers.last_mut().and_then(|c| c.list.as_mut()) {
            Some(Some(number)) => {
                let mark = format!("{number}. ");
                *number += 1;
                mark
            }
            _ => ["• ", "◦ ", "▪ "][depth.saturating_sub(1) % 3].to_string(),
        };
        let rest = Span::raw(" ".repeat(text::width(&mark)));
        self.containers.push(Container {
            first: Some(Span::styled(mark, self.theme.accent())),
            rest,
            list: None,
        });
    }

    /// Cells for text within the containers, and for the marks of these. Deep nesting in a narrow window gives up its
    /// indentation rather than the text.
    fn split(&self) -> (usize, usize) {
        let taken: usize = self
            .containers
            .iter()
            .map(|c| text::width(&c.rest.content))
            .sum();
        let least = (self.width / 2).clamp(1, 8);
        let room = self.width.saturating_sub(taken).max(least);
        (room, self.width - room)
    }

    /// Cells for text within the containers.
    fn room(&self) -> usize {
        self.split().0
    }

    /// Adds a line of at most [`Writer::room`] cells, with the marks of its containers.
    fn line(&mut self, spans: Vec<Span<'static>>) {
        let (_, margin) = self.split();
        let marks = self
            .containers
            .iter_mut()
            .map(|c| c.first.take().unwrap_or_else(|| c.rest.clone()));
        let marks: Vec<Span> = marks.collect();
        let mut out = match margin {
            0 => Vec::new(),
            _ => text::wrap_hard(&marks, margin).swap_remove(0),
        };
        out.extend(spans);
        self.lines.push(Line::from(trimmed(out)));
    }

    /// Wraps and adds the text so far.
    fn flush(&mut self) {
        if self.inline.is_empty() || self.table.is_some() {
            return;
        }
        let inline = std::mem::take(&mut self.inline);
        for logical in split_lines(inline) {
            for line in text::wrap(&logical, self.room()) {
                self.line(line);
            }
        }
    }

    fn end_code(&mut self) {
        let Some((language, code)) = self.code.take() else {
            return;
        };
        let code = text::clean(&code).into_owned();
        let room = self.room().saturating_sub(2).max(1);
        if !language.is_empty() {
            let label = text::fit(&text::one_line(&language), room).into_owned();
            self.line(vec![Span::styled(
                format!("  {label}"),
                self.theme.dim().add_modifier(Modifier::ITALIC),
            )]);
        }
        let tokens = self.highlighter.lines(&language, &code);
        for (i, line) in code.lines().enumerate() {
            let spans = match tokens.as_ref().and_then(|t| t.get(i)) {
                Some(tokens) => coloured(line, tokens, self.theme),
                None => vec![Span::styled(
                    line.to_string(),
                    self.theme.code(Class::Plain),
                )],
            };
            for part in text::wrap_hard(&spans, room) {
                let mut spans = vec![Span::raw("  ")];
                spans.extend(part);
                self.line(spans);
            }
        }
        self.gap = true;
    }

    fn end_table(&mut self) {
        let Some(table) = self.table.take() else {
            return;
        };
        let room = self.room();
        let columns = table
            .rows
            .iter()
            .map(Vec::len)
            .max()
            .unwrap_or(0)
            .max(table.alignments.len());
        let Some(widths) = column_widths(&table, columns, room) else {
            self.records(&table);
            return;
        };
        let wrapped: Vec<Vec<Vec<Vec<Span<'static>>>>> = table
            .rows
            .iter()
            .enumerate()
            .map(|(row, cells)| {
                (0..columns)
                    .map(|c| {
                        let mut cell = cells.get(c).cloned().unwrap_or_default();
                        if row == 0 {
                            cell.iter_mut()
                                .for_each(|s| s.style = s.style.patch(self.theme.strong()));
                        }
                        text::wrap(&cell, widths[c])
                    })
                    .collect()
            })
            .collect();
        let tall = wrapped
            .iter()
            .skip(1)
            .any(|row| row.iter().any(|cell| cell.len() > 1));
        let rule: Vec<String> = widths.iter().map(|w| "─".repeat(*w)).collect();
        for (i, row) in wrapped.iter().enumerate() {
            let height = row.iter().map(Vec::len).max().unwrap_or(1);
            for y in 0..height {
                let mut spans: Vec<Span<'static>> = Vec::new();
                for (c, cell) in row.iter().enumerate() {
                    if c > 0 {
                        spans.push(Span::raw("  "));
                    }
                    let content = cell.get(y).cloned().unwrap_or_default();
                    let free = widths[c].saturating_sub(spans_width(&content));
                    let before = match table.alignments.get(c) {
                        Some(Alignment::Right) => free,
                        Some(Alignment::Center) => free / 2,
                        _ => 0,
                    };
                    spans.push(Span::raw(" ".repeat(before)));
                    spans.extend(content);
                    spans.push(Span::raw(" ".repeat(free - before)));
                }
                self.line(spans);
            }
            if i == 0 {
                self.line(vec![Span::styled(rule.join("──"), self.theme.faint())]);
            } else if tall && i + 1 < wrapped.len() {
                self.line(Vec::new()); // rows of several lines stand apart
            }
        }
        self.gap = true;
    }

    /// A table with no room for columns: each row as lines of "head: value".
    fn records(&mut self, table: &Table) {
        let mut rows = table.rows.iter();
        let head = rows.next().cloned().unwrap_or_default();
        for (i, row) in rows.enumerate() {
            if i > 0 {
                self.line(Vec::new());
            }
            for (c, cell) in row.iter().enumerate() {
                let mut spans: Vec<Span<'static>> = head.get(c).cloned().unwrap_or_default();
                spans
                    .iter_mut()
                    .for_each(|s| s.style = s.style.patch(self.theme.strong()));
                spans.push(Span::raw(": "));
                spans.extend(cell.iter().cloned());
                for line in text::wrap(&spans, self.room()) {
                    self.line(line);
                }
            }
        }
        self.gap = true;
    }
}

/// The cells of each column, together with two between columns at most `room`; `None` when there is no room for a table.
/// What is missing is taken from the widest columns.
fn column_widths(table: &Table, columns: usize, room: usize) -> Option<Vec<usize>> {
    let mut widths: Vec<usize> = (0..columns)
        .map(|c| {
            table
                .rows
                .iter()
                .filter_map(|row| row.get(c))
                .map(|cell| spans_width(cell))
                .max()
                .unwrap_or(0)
                .max(1)
        })
        .collect();
    let free = room.checked_sub(2 * columns.saturating_sub(1))?;
    let least: usize = widths.iter().map(|w| (*w).min(MIN_COLUMN)).sum();
    if columns == 0 || least > free {
        return None;
    }
    let mut sum: usize = widths.iter().sum();
    while sum > free {
        // All columns at the greatest width go down together to the next one, or as far as needed.
        let greatest = *widths.iter().max()?;
        let next = widths
            .iter()
            .copied()
            .filter(|w| *w < greatest)
            .max()
            .unwrap_or(1)
            .max(MIN_COLUMN.min(greatest - 1));
        let many = widths.iter().filter(|w| **w == greatest).count();
        let to = next.max(greatest.saturating_sub((sum - free).div_ceil(many)));
        for width in widths.iter_mut().filter(|w| **w == greatest) {
            let cut = (greatest - to).min(sum - free);
            *width -= cut;
            sum -= cut;
            if sum <= free {
                break;
            }
        }
    }
    Some(widths)
}

fn level_number(level: HeadingLevel) -> u8 {
    match level {
        HeadingLevel::H1 => 1,
        HeadingLevel::H2 => 2,
        HeadingLevel::H3 => 3,
        HeadingLevel::H4 => 4,
        HeadingLevel::H5 => 5,
        HeadingLevel::H6 => 6,
    }
}

fn coloured(line: &str, tokens: &[(Class, usize)], theme: Theme) -> Vec<Span<'static>> {
    let mut spans = Vec::new();
    let mut from = 0;
    for (class, len) in tokens {
        let end = (from + len).min(line.len());
        if let Some(piece) = line.get(from..end)
            && !piece.is_empty()
        {
            spans.push(Span::styled(piece.to_string(), theme.code(*class)));
        }
        from = end;
    }
    spans
}

/// Spans with line ends in them, as logical lines.
fn split_lines(spans: Vec<Span<'static>>) -> Vec<Vec<Span<'static>>> {
    let mut lines = vec![Vec::new()];
    for span in spans {
        for (i, piece) in span.content.split('\n').enumerate() {
            if i > 0 {
                lines.push(Vec::new());
            }
            if let Some(line) = lines.last_mut()
                && !piece.is_empty()
            {
                line.push(Span::styled(piece.to_string(), span.style));
            }
        }
    }
    if lines.len() > 1 && lines.last().is_some_and(Vec::is_empty) {
        lines.pop();
    }
    lines
}

/// Without spaces at the end of the line.
fn trimmed(mut spans: Vec<Span<'static>>) -> Vec<Span<'static>> {
    while let Some(last) = spans.last_mut() {
        let kept = last.content.trim_end_matches(' ').len();
        if kept > 0 {
            last.content.to_mut().truncate(kept);
            break;
        }
        spans.pop();
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::theme::ThemeKind;

    fn plain() -> Theme {
        Theme {
            kind: ThemeKind::None,
        }
    }

    fn lines(source: &str, width: usize) -> Vec<String> {
        let rendered = render(source, width, plain(), &mut Highlighter::default());
        rendered
            .lines
            .iter()
            .map(|l| l.spans.iter().map(|s| s.content.as_ref()).collect())
            .collect()
    }

    #[test]
    fn blocks_are_apart_and_items_together() {
        let source = "# Title\n\nText **bold**.\nNext.\n\n- one\n- two\n  - inner\n- three\n\n1. a\n2. b\n\n> quoted\n\n---\nend";
        let expected = [
            "Title",
            "",
            "Text",
            "bold.",
            "Next.",
            "",
            "• one",
            "• two",
            "  ◦ inner",
            "• three",
            "",
            "1. a",
            "2. b",
            "",
            "▎ quoted",
            "",
            "─────────",
            "",
            "end",
        ];
        assert_eq!(lines(source, 9), expected);
    }

    #[test]
    fn list_items_hang_and_have_their_numbers() {
        assert_eq!(
            lines("9. nine words here\n10. ten", 10),
            ["9. nine", "   words", "   here", "10. ten"]
        );
        assert_eq!(
            lines("- [x] done\n- [ ] open", 20),
            ["• ☑ done", "• ☐ open"]
        );
        assert_eq!(lines("- a\n\n- b", 20), ["• a", "", "• b"]);
        assert_eq!(lines("-\n- b", 20), ["•", "• b"]);
    }

    #[test]
    fn code_keeps_its_spaces_and_wraps_hard() {
        assert_eq!(
            lines("```py\nif x:\n\ty = 1\n```", 40),
            ["  py", "  if x:", "      y = 1"]
        );
        assert_eq!(lines("    a  b", 40), ["  a  b"]);
        assert_eq!(lines("```\nabcdef\n```", 6), ["  abcd", "  ef"]);
    }

    #[test]
    fn tables_align_wide_characters_and_shrink() {
        let source = "| name | n |\n|---|--:|\n| 你好 | 1 |\n| abc | 20 |";
        assert_eq!(
            lines(source, 40),
            ["name   n", "────────", "你好   1", "abc   20"]
        );
        let source = "| a | text |\n|---|---|\n| x | one two three four |\n| y | z |";
        for width in 1..30 {
            for line in lines(source, width) {
                assert!(text::width(&line) <= width, "{width}: {line}");
            }
        }
        assert!(lines(source, 8).contains(&"a: x".to_string()));
    }

    #[test]
    fn links_and_images_show_where_they_lead() {
        assert_eq!(
            lines("[a](http://b.c) <http://d.e> ![i](p.png)", 80),
            ["a (http://b.c) http://d.e i (p.png)"]
        );
        assert_eq!(
            lines("[![i](p.png)](http://b.c)", 80),
            ["i (p.png) (http://b.c)"]
        );
    }

    #[test]
    fn what_is_no_markdown_is_shown_as_it_is() {
        assert_eq!(
            lines("a < b && <tag> $x^2$ [1]", 80),
            ["a < b && <tag> $x^2$ [1]"]
        );
        assert_eq!(lines("<div>\nhi\n</div>", 80), ["<div>", "hi", "</div>"]);
    }

    #[test]
    fn an_unfinished_end_is_closed_or_held_back() {
        assert_eq!(settled("a **bo"), "a **bo**");
        assert_eq!(settled("a **"), "a ");
        assert_eq!(settled("a **bold*"), "a **bold**");
        assert_eq!(settled("a ** "), "a ");
        assert_eq!(settled("a `co"), "a `co`");
        assert_eq!(settled("a `"), "a ");
        assert_eq!(settled("**a `co"), "**a `co`**");
        assert_eq!(settled("Text\n-"), "Text\n");
        assert_eq!(settled("Text\n1."), "Text\n");
        assert_eq!(settled("Text\n```ru"), "Text\n");
        assert_eq!(settled("```rust\nlet a = \"**"), "```rust\nlet a = \"**");
        assert_eq!(settled("```rust\na\n``"), "```rust\na\n");
        assert_eq!(settled("done `x` **y**"), "done `x` **y**");
    }

    #[test]
    fn code_blocks_are_found() {
        let source = "a\n```rust ignore\nfn x() {}\n```\nb\n\n    indented\n";
        let expected = [
            ("rust".to_string(), "fn x() {}\n".to_string()),
            (String::new(), "indented\n".to_string()),
        ];
        assert_eq!(code_blocks(source), expected);
    }

    #[test]
    fn the_last_block_is_told() {
        let source = "# T\n\npara **b**\n\n- a\n- b\n\n```rust\nfn a() {}\n```\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n---\n\nend";
        let whole = lines(source, 30);
        let first = render(source, 30, plain(), &mut Highlighter::default());
        assert_eq!(&source[first.last_block..], "end");
        assert_eq!(whole[first.last_block_line..], ["", "end"]);
    }
}
