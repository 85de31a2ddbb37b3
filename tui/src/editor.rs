//! The multi-line editor: text, cursor, undo, and the rows that it takes at a width.
//!
//! The cursor stands between graphemes, never within one. Control characters are dropped on the way in; a tab stays a
//! tab in the text and is shown as four spaces.

use std::ops::Range;

use unicode_segmentation::{GraphemeCursor, UnicodeSegmentation};

use crate::text::{grapheme_width, is_direction};

/// Bytes of text that undo may keep.
const UNDO_BYTES: usize = 8 << 20;
/// Steps that undo may keep.
const UNDO_STEPS: usize = 500;

/// A text being written.
#[derive(Debug, Default)]
pub struct Editor {
    text: String,
    cursor: usize,
    undo: Vec<(String, usize)>,
    redo: Vec<(String, usize)>,
    /// What the last change was, so that a run of typed letters is one step of undo.
    last: Change,
    /// Column that Up and Down aim for.
    column: Option<usize>,
    /// Cells per row as last drawn.
    width: usize,
    /// Rows at that width; `None` after a change.
    rows: Option<Vec<Range<usize>>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Change {
    #[default]
    Other,
    Typed,
    Erased,
}

/// Cells that a grapheme takes in the editor.
fn cells(grapheme: &str) -> usize {
    if grapheme == "\t" {
        4
    } else {
        grapheme_width(grapheme)
    }
}

impl Editor {
    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether there is no text.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Whether the cursor is at the end.
    pub fn at_end(&self) -> bool {
        self.cursor == self.text.len()
    }

    /// Replaces the whole text, cursor at the end. Can be undone.
    pub fn set(&mut self, text: &str) {
        self.keep(Change::Other);
        self.text.clear();
        self.cursor = 0;
        self.put(text);
    }

    /// Takes the text out and forgets all steps.
    pub fn take(&mut self) -> String {
        let text = std::mem::take(&mut self.text);
        *self = Editor {
            width: self.width,
            ..Editor::default()
        };
        text
    }

    /// Inserts a text at the cursor, as typed or pasted.
    pub fn insert(&mut self, text: &str) {
        let typed = text.graphemes(true).nth(1).is_none() && !text.contains(char::is_whitespace);
        self.keep(if typed { Change::Typed } else { Change::Other });
        self.put(text);
    }

    fn put(&mut self, text: &str) {
        let text = text.replace("\r\n", "\n").replace('\r', "\n");
        let text: String = text
            .chars()
            .filter(|c| matches!(c, '\n' | '\t') || !(c.is_control() || is_direction(*c)))
            .collect();
        self.text.insert_str(self.cursor, &text);
        self.cursor += text.len();
        // What was inserted may have joined with what follows into one grapheme.
        self.cursor = self.boundary_at_or_after(self.cursor);
        self.changed();
    }

    /// Erases the grapheme before the cursor.
    pub fn backspace(&mut self) {
        let start = self.before(self.cursor);
        self.erase(start..self.cursor, Change::Erased);
    }

    /// Erases the grapheme after the cursor.
    pub fn delete(&mut self) {
        let end = self.after(self.cursor);
        self.erase(self.cursor..end, Change::Erased);
    }

    /// Erases the word before the cursor.
    pub fn delete_word(&mut self) {
        self.erase(self.word_start()..self.cursor, Change::Other);
    }

    /// Erases the word after the cursor.
    pub fn delete_word_after(&mut self) {
        self.erase(self.cursor..self.word_end(), Change::Other);
    }

    /// Erases to the start of the line, or the line end before it.
    pub fn delete_to_start(&mut self) {
        let start = self.line_start();
        let start = if start == self.cursor {
            self.before(self.cursor)
        } else {
            start
        };
        self.erase(start..self.cursor, Change::Other);
    }

    /// Erases to the end of the line, or the line end itself.
    pub fn delete_to_end(&mut self) {
        let end = self.line_end();
        let end = if end == self.cursor {
            self.after(self.cursor)
        } else {
            end
        };
        self.erase(self.cursor..end, Change::Other);
    }

    fn erase(&mut self, range: Range<usize>, change: Change) {
        if range.is_empty() {
            return;
        }
        self.keep(change);
        self.text.replace_range(range.clone(), "");
        self.cursor = self.boundary_at_or_after(range.start);
        self.changed();
    }

    /// Takes the last change back.
    pub fn undo(&mut self) {
        if let Some(before) = self.undo.pop() {
            self.redo
                .push((std::mem::take(&mut self.text), self.cursor));
            (self.text, self.cursor) = before;
            self.last = Change::Other;
            self.changed();
        }
    }

    /// Makes the change again that was taken back last.
    pub fn redo(&mut self) {
        if let Some(after) = self.redo.pop() {
            self.undo
                .push((std::mem::take(&mut self.text), self.cursor));
            (self.text, self.cursor) = after;
            self.last = Change::Other;
            self.changed();
        }
    }

    /// Keeps the text for undo, unless this change goes on with the one before.
    fn keep(&mut self, change: Change) {
        self.redo.clear();
        if change != Change::Other && change == self.last && self.column.is_none() {
            return;
        }
        self.last = change;
        self.undo.push((self.text.clone(), self.cursor));
        let mut bytes: usize = self.undo.iter().map(|(text, _)| text.len()).sum();
        while self.undo.len() > UNDO_STEPS || (bytes > UNDO_BYTES && self.undo.len() > 1) {
            bytes -= self.undo.remove(0).0.len();
        }
    }

    fn changed(&mut self) {
        self.rows = None;
        self.column = None;
    }

    fn moved(&mut self, to: usize) {
        self.cursor = to;
        self.column = None;
        self.last = Change::Other;
    }

    /// One grapheme to the left.
    pub fn left(&mut self) {
        self.moved(self.before(self.cursor));
    }

    /// One grapheme to the right.
    pub fn right(&mut self) {
        self.moved(self.after(self.cursor));
    }

    /// To the start of the word.
    pub fn word_left(&mut self) {
        self.moved(self.word_start());
    }

    /// To the end of the word.
    pub fn word_right(&mut self) {
        self.moved(self.word_end());
    }

    /// To the start of the line.
    pub fn home(&mut self) {
        self.moved(self.line_start());
    }

    /// To the end of the line.
    pub fn end(&mut self) {
        self.moved(self.line_end());
    }

    /// One row up; false when the cursor is in the first row.
    pub fn up(&mut self) -> bool {
        self.vertical(-1)
    }

    /// One row down; false when the cursor is in the last row.
    pub fn down(&mut self) -> bool {
        self.vertical(1)
    }

    fn vertical(&mut self, by: isize) -> bool {
        let rows = self.rows().to_vec();
        let (row, column) = self.position();
        let Some(target) = row.checked_add_signed(by).and_then(|r| rows.get(r)) else {
            return false;
        };
        let aim = self.column.unwrap_or(column);
        let mut at = target.start;
        let mut used = 0;
        for (offset, grapheme) in self.text[target.clone()].grapheme_indices(true) {
            at = target.start + offset;
            if used >= aim {
                break;
            }
            used += cells(grapheme);
            at += grapheme.len();
        }
        // The end of a wrapped row is the start of the next one: stay in the row.
        if at == target.end && rows.iter().any(|r| r.start == at) && at > target.start {
            at = self.before(at);
        }
        self.moved(at);
        self.column = Some(aim);
        true
    }

    fn before(&self, at: usize) -> usize {
        GraphemeCursor::new(at, self.text.len(), true)
            .prev_boundary(&self.text, 0)
            .ok()
            .flatten()
            .unwrap_or(0)
    }

    fn after(&self, at: usize) -> usize {
        let end = self.text.len();
        GraphemeCursor::new(at, end, true)
            .next_boundary(&self.text, 0)
            .ok()
            .flatten()
            .unwrap_or(end)
    }

    fn boundary_at_or_after(&self, at: usize) -> usize {
        match GraphemeCursor::new(at, self.text.len(), true).is_boundary(&self.text, 0) {
            Ok(false) => self.after(at),
            _ => at,
        }
    }

    fn word_start(&self) -> usize {
        let head = &self.text[..self.cursor];
        let mut words = head.unicode_word_indices();
        words.next_back().map_or(0, |(at, _)| at)
    }

    fn word_end(&self) -> usize {
        let tail = &self.text[self.cursor..];
        tail.unicode_word_indices()
            .next()
            .map_or(self.text.len(), |(at, word)| self.cursor + at + word.len())
    }

    fn line_start(&self) -> usize {
        self.text[..self.cursor].rfind('\n').map_or(0, |at| at + 1)
    }

    fn line_end(&self) -> usize {
        self.text[self.cursor..]
            .find('\n')
            .map_or(self.text.len(), |at| self.cursor + at)
    }

    /// Sets the cells per row.
    pub fn set_width(&mut self, width: usize) {
        let width = width.max(1);
        if width != self.width {
            self.width = width;
            self.rows = None;
        }
    }

    /// The rows as byte ranges, without line ends; at least one. A row leaves a cell free for the cursor.
    pub fn rows(&mut self) -> &[Range<usize>] {
        let (text, width) = (&self.text, self.width);
        self.rows.get_or_insert_with(|| rows(text, width))
    }

    /// Row and column of the cursor, in cells.
    pub fn position(&mut self) -> (usize, usize) {
        let cursor = self.cursor;
        let rows = self.rows();
        let row = rows
            .partition_point(|r| r.start <= cursor)
            .saturating_sub(1);
        let start = rows[row].start;
        let column = self.text[start..cursor].graphemes(true).map(cells).sum();
        (row, column)
    }
}

/// A row's text as it is drawn.
pub fn shown(text: &str) -> String {
    text.replace('\t', "    ")
}

fn rows(text: &str, width: usize) -> Vec<Range<usize>> {
    // Before the first drawing the width is not known: nothing is wrapped.
    let room = if width == 0 {
        usize::MAX
    } else {
        width.saturating_sub(1).max(1)
    };
    let mut rows = Vec::new();
    let mut line_start = 0;
    for line in text.split('\n') {
        let mut start = line_start;
        let mut used = 0;
        let mut place = None; // behind the last space of the row, and the cells up to there
        for (offset, grapheme) in line.grapheme_indices(true) {
            let at = line_start + offset;
            let wide = cells(grapheme);
            let hangs = grapheme == " " && used == room; // into the cell that is free for the cursor
            if used + wide > room && at > start && !hangs {
                let (cut, left) = match place {
                    Some((cut, cells)) if cut > start => (cut, used - cells),
                    _ => (at, 0),
                };
                rows.push(start..cut);
                (start, used, place) = (cut, left, None);
            }
            used += wide;
            if grapheme == " " || grapheme == "\t" {
                place = Some((at + grapheme.len(), used));
            }
        }
        rows.push(start..line_start + line.len());
        line_start += line.len() + 1;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn editor(text: &str) -> Editor {
        let mut editor = Editor::default();
        editor.set_width(20);
        editor.insert(text);
        editor
    }

    #[test]
    fn typing_erasing_and_moving() {
        let mut e = editor("hello world");
        e.delete_word();
        assert_eq!(e.text(), "hello ");
        e.insert("there");
        e.home();
        e.insert("oh ");
        assert_eq!(e.text(), "oh hello there");
        e.word_right();
        assert_eq!(e.cursor, 8);
        e.delete_to_end();
        assert_eq!(e.text(), "oh hello");
        e.delete_to_start();
        assert_eq!(e.text(), "");
        e.backspace();
        e.delete();
        assert_eq!(e.text(), "");
    }

    #[test]
    fn an_emoji_family_is_one_step() {
        let mut e = editor("a👨‍👩‍👧b");
        e.left();
        e.left();
        assert_eq!(e.cursor, 1);
        e.delete();
        assert_eq!(e.text(), "ab");
        let mut e = editor("e");
        e.insert("\u{301}");
        e.backspace();
        assert_eq!(e.text(), "");
    }

    #[test]
    fn a_run_of_letters_is_one_step_of_undo() {
        let mut e = Editor::default();
        for c in ["a", "b", "c"] {
            e.insert(c);
        }
        e.insert(" ");
        e.insert("d");
        e.undo();
        assert_eq!(e.text(), "abc ");
        e.undo();
        assert_eq!(e.text(), "abc");
        e.undo();
        assert_eq!(e.text(), "");
        e.undo();
        e.redo();
        e.redo();
        e.redo();
        e.redo();
        assert_eq!(e.text(), "abc d");
        e.undo();
        e.insert("x");
        e.redo();
        assert_eq!(e.text(), "abc x");
    }

    #[test]
    fn rows_wrap_at_words_and_keep_every_byte() {
        let mut e = editor("the quick brown fox jumps\n\nover");
        let rows: Vec<String> = e
            .rows()
            .to_vec()
            .into_iter()
            .map(|r| e.text()[r].to_string())
            .collect();
        assert_eq!(
            rows,
            ["the quick brown fox ", "jumps", "", "over"].map(String::from)
        );
    }

    #[test]
    fn up_and_down_keep_the_column() {
        let mut e = editor("one two\nx\nthree four");
        assert!(e.up());
        assert!(e.up());
        assert_eq!(e.position(), (0, 7));
        assert!(!e.up());
        assert!(e.down());
        assert_eq!(e.position(), (1, 1));
        assert!(e.down());
        assert_eq!(e.position(), (2, 10));
        assert!(!e.down());
    }

    #[test]
    fn a_long_paste_is_kept_whole_and_fast() {
        let text = "word ".repeat(2000);
        let mut e = editor("");
        e.insert(&text);
        assert_eq!(e.text(), text);
        assert!(e.rows().len() >= 500);
        e.undo();
        assert_eq!(e.text(), "");
    }

    #[test]
    fn pasted_controls_are_dropped_and_line_ends_unified() {
        let mut e = editor("");
        e.insert("a\r\nb\rc\x1b[2Jd\te");
        assert_eq!(e.text(), "a\nb\nc[2Jd\te");
    }
}
