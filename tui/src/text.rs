//! Widths, wrapping and figures: everything here counts cells of the terminal as ratatui draws them.

use std::borrow::Cow;

use ratatui::buffer::CellWidth;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use unicode_segmentation::UnicodeSegmentation;

/// Cells of one grapheme; control characters take none.
pub fn grapheme_width(grapheme: &str) -> usize {
    if grapheme.chars().any(char::is_control) {
        0
    } else {
        grapheme.cell_width().into()
    }
}

/// Cells of a text on one line.
pub fn width(text: &str) -> usize {
    if text.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        return text.len();
    }
    text.graphemes(true).map(grapheme_width).sum()
}

/// Cells of several spans.
pub fn spans_width(spans: &[Span]) -> usize {
    spans.iter().map(|span| width(&span.content)).sum()
}

/// The text without what could move the cursor or turn the reading direction of a terminal: control characters and
/// bidirectional overrides. Line ends become `\n`, a tab becomes four spaces.
pub fn clean(text: &str) -> Cow<'_, str> {
    let plain = |c: char| c == '\n' || !(c.is_control() || is_direction(c));
    if text.chars().all(plain) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\t' => out.push_str("    "),
            '\r' if chars.peek() != Some(&'\n') => out.push('\n'),
            c if plain(c) => out.push(c),
            _ => {}
        }
    }
    Cow::Owned(out)
}

/// Marks that turn the reading direction of what follows.
pub fn is_direction(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// As [`clean`], on one line.
pub fn one_line(text: &str) -> String {
    clean(text).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The beginning of a text that fits into `room` cells, with `…` where something is missing.
pub fn fit(text: &str, room: usize) -> Cow<'_, str> {
    if width(text) <= room {
        return Cow::Borrowed(text);
    }
    if room == 0 {
        return Cow::Borrowed("");
    }
    let mut out = String::new();
    let mut used = 1;
    for grapheme in text.graphemes(true) {
        used += grapheme_width(grapheme);
        if used > room {
            break;
        }
        out.push_str(grapheme);
    }
    out.push('…');
    Cow::Owned(out)
}

/// The end of a text that fits into `room` cells, with `…` where something is missing.
pub fn fit_end(text: &str, room: usize) -> Cow<'_, str> {
    if width(text) <= room {
        return Cow::Borrowed(text);
    }
    if room == 0 {
        return Cow::Borrowed("");
    }
    let mut start = text.len();
    let mut used = 1;
    for (at, grapheme) in text.grapheme_indices(true).rev() {
        used += grapheme_width(grapheme);
        if used > room {
            break;
        }
        start = at;
    }
    Cow::Owned(format!("…{}", &text[start..]))
}

/// A text between two margins: left-aligned and right-aligned spans on one line of `room` cells. The left one gives way.
pub fn between<'a>(left: Vec<Span<'a>>, right: Vec<Span<'a>>, room: usize) -> Line<'a> {
    let right_width = spans_width(&right);
    if right_width + 1 >= room {
        return Line::from(clip(right, room));
    }
    let left = clip(left, room - right_width - 1);
    let gap = room - right_width - spans_width(&left);
    let mut spans = left;
    spans.push(Span::raw(" ".repeat(gap)));
    spans.extend(right);
    Line::from(spans)
}

/// The spans that fit into `room` cells.
pub fn clip<'a>(spans: Vec<Span<'a>>, room: usize) -> Vec<Span<'a>> {
    if spans_width(&spans) <= room {
        return spans;
    }
    let mut out = Vec::new();
    let mut left = room;
    for span in spans {
        let wide = width(&span.content);
        if wide < left {
            left -= wide;
            out.push(span);
            continue;
        }
        out.push(Span::styled(fit_with_mark(&span.content, left), span.style));
        break;
    }
    out
}

/// As [`fit`], but always with the mark.
fn fit_with_mark(text: &str, room: usize) -> String {
    let cut = fit(text, room.saturating_sub(1)).into_owned();
    if room == 0 || cut.ends_with('…') {
        cut
    } else {
        cut + "…"
    }
}

/// One grapheme with its style and cells.
#[derive(Clone)]
struct Cell {
    text: String,
    style: Style,
    width: usize,
}

/// Breaks one logical line into lines of at most `room` cells: between words, between wide characters, and within a word
/// that is longer than a line. Spaces at a break are dropped, those at the start of the logical line are kept.
pub fn wrap(spans: &[Span], room: usize) -> Vec<Vec<Span<'static>>> {
    let room = room.max(1);
    if spans_width(spans) <= room && spans.iter().all(|s| !s.content.contains(char::is_control)) {
        return vec![
            spans
                .iter()
                .map(|s| Span::styled(s.content.to_string(), s.style))
                .collect(),
        ];
    }
    let mut cells = Vec::new();
    for span in spans {
        for grapheme in span.content.graphemes(true) {
            let mut width = grapheme_width(grapheme);
            let mut text = grapheme;
            if grapheme.chars().any(char::is_control) {
                continue;
            }
            if width > room {
                (text, width) = ("·", 1);
            }
            cells.push(Cell {
                text: text.into(),
                style: span.style,
                width,
            });
        }
    }
    let mut lines = Vec::new();
    let mut start = 0;
    while start < cells.len() {
        let mut used = 0;
        let mut end = start;
        let mut place = None; // where the line may end: index behind its last cell
        while end < cells.len() && used + cells[end].width <= room {
            used += cells[end].width;
            end += 1;
            if end < cells.len() && breaks_between(&cells[end - 1], &cells[end]) {
                place = Some(end);
            }
        }
        if end == cells.len() {
            lines.push(joined(&cells[start..end]));
            break;
        }
        // A line may end before spaces that do not fit any more; they are dropped below.
        let only_spaces_follow_a_word =
            cells[end].text == " " && cells[start..end].iter().any(|c| c.text != " ");
        let cut = if only_spaces_follow_a_word {
            end
        } else {
            place.filter(|p| *p > start).unwrap_or(end)
        };
        let mut last = cut;
        while last > start + 1 && cells[last - 1].text == " " {
            last -= 1;
        }
        lines.push(joined(&cells[start..last]));
        start = cut;
        while start < cells.len() && cells[start].text == " " {
            start += 1;
        }
    }
    if lines.is_empty() {
        lines.push(Vec::new());
    }
    lines
}

/// Breaks a line after exactly as many graphemes as fit: for code, where spaces matter.
pub fn wrap_hard(spans: &[Span], room: usize) -> Vec<Vec<Span<'static>>> {
    let room = room.max(1);
    let mut lines = Vec::new();
    let mut line = Vec::new();
    let mut used = 0;
    for span in spans {
        for grapheme in span.content.graphemes(true) {
            let mut width = grapheme_width(grapheme);
            let mut text = grapheme;
            if grapheme.chars().any(char::is_control) {
                continue;
            }
            if width > room {
                (text, width) = ("·", 1);
            }
            if used + width > room {
                lines.push(joined(&line));
                line.clear();
                used = 0;
            }
            used += width;
            line.push(Cell {
                text: text.into(),
                style: span.style,
                width,
            });
        }
    }
    lines.push(joined(&line));
    lines
}

fn joined(cells: &[Cell]) -> Vec<Span<'static>> {
    let mut spans: Vec<Span<'static>> = Vec::new();
    for cell in cells {
        match spans.last_mut() {
            Some(last) if last.style == cell.style => last.content.to_mut().push_str(&cell.text),
            _ => spans.push(Span::styled(cell.text.clone(), cell.style)),
        }
    }
    spans
}

fn breaks_between(before: &Cell, after: &Cell) -> bool {
    if after.text == " " {
        return false;
    }
    if before.text == " " {
        return true;
    }
    let closes =
        |c: &Cell| "、。，．：；！？）」』】〉》”’,.!?:;)]}%…ー々".contains(c.text.as_str());
    let opens = |c: &Cell| "（「『【〈《“‘([{".contains(c.text.as_str());
    if closes(after) || opens(before) {
        return false;
    }
    (before.width > 1 || after.width > 1) || matches!(before.text.as_str(), "—" | "–")
}

/// A count with separators: `5,120`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A size: `512 MiB`, `5.4 GiB`.
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" || value >= 99.95 {
        format!("{value:.0} {unit}")
    } else {
        format!("{value:.1} {unit}")
    }
}

/// A speed without its unit: `42.1`, `812`, `1,204`.
pub fn speed(tps: f32) -> String {
    if !tps.is_finite() || tps < 0.0 {
        return "–".into();
    }
    if tps < 99.95 {
        format!("{tps:.1}")
    } else {
        count(tps.round() as u64)
    }
}

/// A share of one: `78.2 %`. `whole` leaves the decimal out.
pub fn percent(share: f32, whole: bool) -> String {
    if !share.is_finite() {
        return "–".into();
    }
    if whole {
        format!("{:.0} %", share * 100.0)
    } else {
        format!("{:.1} %", share * 100.0)
    }
}

/// A time in milliseconds with a fitting unit: `0.42 ms`, `18.3 ms`, `1.2 s`.
pub fn duration(ms: f32) -> String {
    if !ms.is_finite() || ms < 0.0 {
        return "–".into();
    }
    match ms {
        ms if ms < 1.0 => format!("{ms:.2} ms"),
        ms if ms < 100.0 => format!("{ms:.1} ms"),
        ms if ms < 1000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1000.0),
    }
}

/// A time in seconds as people say it: `42 s`, `3 min 12 s`, `1 h 04 min`.
pub fn elapsed(seconds: u64) -> String {
    match seconds {
        s if s < 60 => format!("{s} s"),
        s if s < 3600 => format!("{} min {:02} s", s / 60, s % 60),
        s => format!("{} h {:02} min", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(text: &str, room: usize) -> Vec<String> {
        wrap(&[Span::raw(text.to_string())], room)
            .into_iter()
            .map(|line| line.iter().map(|s| s.content.as_ref()).collect())
            .collect()
    }

    #[test]
    fn words_wrap_at_spaces_and_long_words_are_cut() {
        assert_eq!(
            wrapped("the quick brown fox", 9),
            ["the quick", "brown fox"]
        );
        assert_eq!(wrapped("abcdefghij kl", 4), ["abcd", "efgh", "ij", "kl"]);
        assert_eq!(wrapped("a  b", 1), ["a", "b"]);
        assert_eq!(wrapped("  indented text", 10), ["  indented", "text"]);
        assert_eq!(wrapped("", 5), [""]);
        assert_eq!(wrapped("exact fit", 9), ["exact fit"]);
    }

    #[test]
    fn wide_characters_count_two_cells_and_break_anywhere() {
        assert_eq!(wrapped("你好世界", 5), ["你好", "世界"]);
        assert_eq!(wrapped("你好，世界", 4), ["你", "好，", "世界"]);
        assert_eq!(wrapped("family 👨‍👩‍👧 ok", 9), ["family 👨‍👩‍👧", "ok"]);
        assert_eq!(wrapped("漢", 1), ["·"]);
        for line in wrapped("日本語テキストとEnglishの混在", 7) {
            assert!(width(&line) <= 7, "{line}");
        }
    }

    #[test]
    fn control_characters_never_reach_the_terminal() {
        assert_eq!(clean("a\x1b[31mb\x07\r\nc\td\re"), "a[31mb\nc    d\ne");
        assert_eq!(clean("abc\u{202e}def"), "abcdef");
        assert!(matches!(clean("plain\ntext"), Cow::Borrowed(_)));
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(count(0), "0");
        assert_eq!(count(5120), "5,120");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(512 << 20), "512 MiB");
        assert_eq!(bytes(5_800_000_000), "5.4 GiB");
        assert_eq!(bytes(1023 << 20), "1.0 GiB");
        assert_eq!(speed(42.13), "42.1");
        assert_eq!(speed(1204.4), "1,204");
        assert_eq!(speed(f32::NAN), "–");
        assert_eq!(percent(0.782, false), "78.2 %");
        assert_eq!(duration(0.421), "0.42 ms");
        assert_eq!(elapsed(3_852), "1 h 04 min");
    }

    #[test]
    fn texts_are_cut_with_a_mark() {
        assert_eq!(fit("hello", 5), "hello");
        assert_eq!(fit("hello", 4), "hel…");
        assert_eq!(fit("你好世界", 4), "你…");
        assert_eq!(fit_end("hello", 4), "…llo");
        assert_eq!(fit("x", 0), "");
    }
}
