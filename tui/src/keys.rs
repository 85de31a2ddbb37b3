//! The keys: one table, from which both what a key does and the help are made.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// What a key does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Does {
    Send,
    NewLine,
    Escape,
    Interrupt,
    EndOfInput,
    Suspend,
    Help,
    Panel,
    Sessions,
    Models,
    Regenerate,
    EditMessage,
    Copy,
    AnswerNow,
    Thinking,
    ExternalEditor,
    Search,
    Redraw,
    LineUp,
    LineDown,
    PageUp,
    PageDown,
    Start,
    End,
    Undo,
    Redo,
    Left,
    Right,
    WordLeft,
    WordRight,
    Up,
    Down,
    LineStart,
    LineEnd,
    Backspace,
    Delete,
    DeleteWord,
    DeleteWordAfter,
    DeleteToStart,
    DeleteToEnd,
    Complete,
}

/// Keys that do the same.
pub(crate) struct Binding {
    pub does: Does,
    keys: &'static [(KeyModifiers, KeyCode)],
    /// The group in the help, empty for what every editor has.
    pub group: &'static str,
    /// The keys in words.
    pub shown: &'static str,
    /// What they do.
    pub help: &'static str,
}

const NONE: KeyModifiers = KeyModifiers::NONE;
const CTRL: KeyModifiers = KeyModifiers::CONTROL;
const ALT: KeyModifiers = KeyModifiers::ALT;
const SHIFT: KeyModifiers = KeyModifiers::SHIFT;

const fn key(c: char) -> KeyCode {
    KeyCode::Char(c)
}

const WRITE: &str = "Writing";
const ANSWER: &str = "The answer";
const READ: &str = "Reading";
const PROGRAM: &str = "The program";

const fn bind(
    does: Does,
    keys: &'static [(KeyModifiers, KeyCode)],
    group: &'static str,
    shown: &'static str,
    help: &'static str,
) -> Binding {
    Binding {
        does,
        keys,
        group,
        shown,
        help,
    }
}

/// All keys, in the order of the help.
pub(crate) const BINDINGS: &[Binding] = &[
    bind(
        Does::Send,
        &[(NONE, KeyCode::Enter)],
        WRITE,
        "Enter",
        "send",
    ),
    bind(
        Does::NewLine,
        &[
            (ALT, KeyCode::Enter),
            (SHIFT, KeyCode::Enter),
            (CTRL, KeyCode::Enter),
            (CTRL, key('j')),
        ],
        WRITE,
        "Alt-Enter  Ctrl-J",
        "new line (Shift-Enter where the terminal tells it)",
    ),
    bind(
        Does::Complete,
        &[(NONE, KeyCode::Tab)],
        WRITE,
        "Tab",
        "complete a command",
    ),
    bind(
        Does::Up,
        &[(NONE, KeyCode::Up)],
        WRITE,
        "Up  Down",
        "earlier messages, from the first or last row",
    ),
    bind(Does::Down, &[(NONE, KeyCode::Down)], "", "", ""),
    bind(
        Does::Search,
        &[(CTRL, key('r'))],
        WRITE,
        "Ctrl-R",
        "search what was written before",
    ),
    bind(
        Does::ExternalEditor,
        &[(CTRL, key('e'))],
        WRITE,
        "Ctrl-E",
        "write in your own editor ($EDITOR)",
    ),
    bind(
        Does::Undo,
        &[
            (CTRL, key('_')),
            (CTRL, key('-')),
            (CTRL, key('/')),
            (CTRL, key('7')),
            (ALT, key('z')),
        ],
        WRITE,
        "Ctrl-_  Alt-Z",
        "undo",
    ),
    bind(
        Does::Redo,
        &[(ALT, key('y')), (ALT, key('Z'))],
        WRITE,
        "Alt-Y",
        "redo",
    ),
    bind(
        Does::DeleteWord,
        &[
            (CTRL, key('w')),
            (ALT, KeyCode::Backspace),
            (CTRL, KeyCode::Backspace),
        ],
        WRITE,
        "Ctrl-W",
        "erase a word",
    ),
    bind(
        Does::DeleteToStart,
        &[(CTRL, key('u'))],
        WRITE,
        "Ctrl-U  Ctrl-K",
        "erase to the start or end of the line",
    ),
    bind(Does::DeleteToEnd, &[(CTRL, key('k'))], "", "", ""),
    bind(
        Does::Escape,
        &[(NONE, KeyCode::Esc)],
        ANSWER,
        "Esc",
        "stop the answer; close what is open",
    ),
    bind(
        Does::AnswerNow,
        &[(CTRL, key('n'))],
        ANSWER,
        "Ctrl-N",
        "end thinking and answer now",
    ),
    bind(
        Does::Regenerate,
        &[(CTRL, key('g'))],
        ANSWER,
        "Ctrl-G",
        "make the last answer again",
    ),
    bind(
        Does::EditMessage,
        &[(CTRL, key('p'))],
        ANSWER,
        "Ctrl-P",
        "edit an earlier message and go on from there",
    ),
    bind(
        Does::Copy,
        &[(CTRL, key('y'))],
        ANSWER,
        "Ctrl-Y",
        "copy an answer or a code block",
    ),
    bind(
        Does::Thinking,
        &[(CTRL, key('t'))],
        ANSWER,
        "Ctrl-T",
        "open or fold the last thinking",
    ),
    bind(
        Does::PageUp,
        &[(NONE, KeyCode::PageUp)],
        READ,
        "PgUp  PgDn  wheel",
        "scroll",
    ),
    bind(Does::PageDown, &[(NONE, KeyCode::PageDown)], "", "", ""),
    bind(
        Does::LineUp,
        &[(SHIFT, KeyCode::Up), (ALT, KeyCode::Up)],
        READ,
        "Shift-Up  Shift-Down",
        "scroll by a line",
    ),
    bind(
        Does::LineDown,
        &[(SHIFT, KeyCode::Down), (ALT, KeyCode::Down)],
        "",
        "",
        "",
    ),
    bind(
        Does::Start,
        &[(CTRL, KeyCode::Home)],
        READ,
        "Ctrl-Home  Ctrl-End",
        "to the start or end",
    ),
    bind(Does::End, &[(CTRL, KeyCode::End)], "", "", ""),
    bind(
        Does::Help,
        &[(NONE, KeyCode::F(1))],
        PROGRAM,
        "?  F1",
        "this help (? while nothing is written)",
    ),
    bind(
        Does::Panel,
        &[(NONE, KeyCode::F(2))],
        PROGRAM,
        "F2",
        "show or hide the live panel",
    ),
    bind(
        Does::Sessions,
        &[(NONE, KeyCode::F(3))],
        PROGRAM,
        "F3",
        "stored conversations",
    ),
    bind(
        Does::Models,
        &[(NONE, KeyCode::F(4))],
        PROGRAM,
        "F4",
        "models",
    ),
    bind(
        Does::Redraw,
        &[(CTRL, key('l'))],
        PROGRAM,
        "Ctrl-L",
        "draw the screen again",
    ),
    bind(
        Does::Suspend,
        &[(CTRL, key('z'))],
        PROGRAM,
        "Ctrl-Z",
        "suspend; `fg` comes back",
    ),
    bind(
        Does::Interrupt,
        &[(CTRL, key('c'))],
        PROGRAM,
        "Ctrl-C",
        "stop the answer; twice leaves",
    ),
    bind(
        Does::EndOfInput,
        &[(CTRL, key('d'))],
        PROGRAM,
        "Ctrl-D",
        "leave, while nothing is written",
    ),
    bind(
        Does::Left,
        &[(NONE, KeyCode::Left), (CTRL, key('b'))],
        "",
        "",
        "",
    ),
    bind(
        Does::Right,
        &[(NONE, KeyCode::Right), (CTRL, key('f'))],
        "",
        "",
        "",
    ),
    bind(
        Does::WordLeft,
        &[(CTRL, KeyCode::Left), (ALT, KeyCode::Left), (ALT, key('b'))],
        "",
        "",
        "",
    ),
    bind(
        Does::WordRight,
        &[
            (CTRL, KeyCode::Right),
            (ALT, KeyCode::Right),
            (ALT, key('f')),
        ],
        "",
        "",
        "",
    ),
    bind(
        Does::LineStart,
        &[(NONE, KeyCode::Home), (CTRL, key('a'))],
        "",
        "",
        "",
    ),
    bind(Does::LineEnd, &[(NONE, KeyCode::End)], "", "", ""),
    bind(
        Does::Backspace,
        &[
            (NONE, KeyCode::Backspace),
            (SHIFT, KeyCode::Backspace),
            (CTRL, key('h')),
        ],
        "",
        "",
        "",
    ),
    bind(Does::Delete, &[(NONE, KeyCode::Delete)], "", "", ""),
    bind(
        Does::DeleteWordAfter,
        &[(ALT, key('d')), (CTRL, KeyCode::Delete)],
        "",
        "",
        "",
    ),
];

/// What this key does, if it is bound.
pub(crate) fn lookup(event: &KeyEvent) -> Option<Does> {
    let mut modifiers = event.modifiers & (CTRL | ALT | SHIFT);
    let code = match event.code {
        // The character tells already that Shift was held; some terminals send capitals with Ctrl.
        KeyCode::Char(c) => {
            modifiers.remove(SHIFT);
            KeyCode::Char(if modifiers.contains(CTRL) {
                c.to_ascii_lowercase()
            } else {
                c
            })
        }
        code => code,
    };
    BINDINGS
        .iter()
        .find(|b| b.keys.contains(&(modifiers, code)))
        .map(|b| b.does)
}

/// The character that this key types, if it types one.
pub(crate) fn typed(event: &KeyEvent) -> Option<char> {
    let modifiers = event.modifiers & (CTRL | ALT);
    match event.code {
        // Some keyboards write characters with AltGr, which arrives as Ctrl and Alt.
        KeyCode::Char(c) if modifiers.is_empty() || modifiers == CTRL | ALT => Some(c),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_has_two_meanings() {
        let all: Vec<_> = BINDINGS.iter().flat_map(|b| b.keys).collect();
        for (i, key) in all.iter().enumerate() {
            assert!(!all[i + 1..].contains(key), "{key:?}");
        }
    }

    #[test]
    fn keys_are_found_with_any_case() {
        assert_eq!(
            lookup(&KeyEvent::new(KeyCode::Char('C'), CTRL | SHIFT)),
            Some(Does::Interrupt)
        );
        assert_eq!(
            lookup(&KeyEvent::new(KeyCode::Enter, SHIFT)),
            Some(Does::NewLine)
        );
        assert_eq!(lookup(&KeyEvent::new(KeyCode::Char('c'), NONE)), None);
        assert_eq!(typed(&KeyEvent::new(KeyCode::Char('C'), SHIFT)), Some('C'));
        assert_eq!(
            typed(&KeyEvent::new(KeyCode::Char('@'), CTRL | ALT)),
            Some('@')
        );
        assert_eq!(typed(&KeyEvent::new(KeyCode::Char('x'), ALT)), None);
    }
}
