//! The interface's own state, and what an event does to it. Nothing here draws; see `draw.rs`.

use crossterm::event::{Event, KeyEvent, KeyEventKind, MouseButton, MouseEventKind};

use crate::action::Action;
use crate::command::{self, Completion, Outcome};
use crate::editor::Editor;
use crate::keys::{self, Does};
use crate::picker::{Choice, Kind, Picker};
use crate::theme::Theme;
use crate::transcript::Transcript;
use crate::view::{Level, Notice, Phase, Role, View};

/// Lines that a turn of the wheel moves.
const WHEEL: isize = 3;

/// The state of the interface: what is written, what is open, where the screen is scrolled to.
pub struct Ui {
    pub(crate) theme: Theme,
    pub(crate) editor: Editor,
    pub(crate) transcript: Transcript,
    pub(crate) window: Window,
    /// Shown or hidden by hand; otherwise by the width.
    pub(crate) panel: Option<bool>,
    /// Whether the last drawing showed it.
    pub(crate) panel_shown: bool,
    /// One line of the interface itself, until the next key.
    pub(crate) hint: Option<Notice>,
    /// Notices of the view that were dismissed.
    pub(crate) dismissed: usize,
    /// The message being edited.
    pub(crate) editing: Option<u64>,
    pub(crate) completion: Option<usize>,
    /// First row of the editor on the screen.
    pub(crate) editor_top: usize,
    history: Vec<String>,
    /// Entry of the history in the editor, and what was written before.
    recalled: Option<(usize, String)>,
    leaving: bool,
}

/// What is open in place of the conversation.
#[derive(Clone, Debug)]
pub(crate) enum Window {
    None,
    Help { top: usize },
    Stats { top: usize },
    Picker(Picker),
}

impl Ui {
    /// An interface with these colours. `history` is what was written in earlier runs, oldest first.
    pub fn new(theme: Theme, history: Vec<String>) -> Self {
        Ui {
            theme,
            editor: Editor::default(),
            transcript: Transcript::default(),
            window: Window::None,
            panel: None,
            panel_shown: false,
            hint: None,
            dismissed: 0,
            editing: None,
            completion: None,
            editor_top: 0,
            history,
            recalled: None,
            leaving: false,
        }
    }

    /// What is being written: to keep it when the program ends.
    pub fn input(&self) -> &str {
        self.editor.text()
    }

    /// Replaces what is being written, as after [`Action::ExternalEditor`] or for a message that could not be sent.
    pub fn set_input(&mut self, text: &str) {
        self.editor.set(text.trim_end_matches('\n'));
    }

    /// What was written, oldest first, this run included.
    pub fn history(&self) -> &[String] {
        &self.history
    }

    /// Shows one line until the next key.
    pub fn say(&mut self, level: Level, text: impl Into<String>) {
        self.hint = Some(Notice {
            level,
            text: text.into(),
        });
    }

    /// What this event asks of the engine side. After it the screen is to be drawn again.
    pub fn handle(&mut self, event: &Event, view: &View) -> Vec<Action> {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => self.key(key, view),
            Event::Paste(text) => {
                self.leaving = false;
                self.hint = None;
                match &mut self.window {
                    Window::Picker(picker) => {
                        picker.filter.push_str(&crate::text::one_line(text));
                        picker.selected = 0;
                    }
                    _ => {
                        self.window = Window::None;
                        self.editor.insert(text);
                        self.written();
                    }
                }
                Vec::new()
            }
            Event::Mouse(mouse) => {
                match mouse.kind {
                    MouseEventKind::ScrollUp => self.scroll(-WHEEL),
                    MouseEventKind::ScrollDown => self.scroll(WHEEL),
                    MouseEventKind::Down(MouseButton::Left)
                        if matches!(self.window, Window::None) =>
                    {
                        self.transcript.click(mouse.column, mouse.row);
                    }
                    _ => {}
                }
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn scroll(&mut self, lines: isize) {
        match &mut self.window {
            Window::None => self.transcript.scroll(lines),
            Window::Help { top } | Window::Stats { top } => *top = top.saturating_add_signed(lines),
            // The length is checked where the list is drawn.
            Window::Picker(picker) => {
                picker.selected = picker.selected.saturating_add_signed(lines.signum())
            }
        }
    }

    fn key(&mut self, key: &KeyEvent, view: &View) -> Vec<Action> {
        self.hint = None;
        let does = keys::lookup(key);
        if does == Some(Does::Interrupt) {
            return self.interrupt(view);
        }
        self.leaving = false;
        match does {
            Some(Does::Suspend) => return vec![Action::Suspend],
            Some(Does::Redraw) => return vec![Action::Redraw],
            _ => {}
        }
        if !matches!(self.window, Window::None) {
            return self.window_key(key, does, view);
        }
        if let Some(done) = self.completion_key(does, view) {
            return done;
        }
        match does {
            Some(does) => self.perform(does, view),
            None => {
                match keys::typed(key) {
                    Some('?') if self.editor.is_empty() => self.window = Window::Help { top: 0 },
                    Some(c) => {
                        self.editor.insert(c.encode_utf8(&mut [0; 4]));
                        self.written();
                    }
                    None => {}
                }
                Vec::new()
            }
        }
    }

    /// After the text has changed by hand.
    fn written(&mut self) {
        self.completion = None;
        self.recalled = None;
    }

    /// Ctrl-C: stops the answer or clears what is written; the second in a row leaves.
    fn interrupt(&mut self, view: &View) -> Vec<Action> {
        if self.leaving {
            return vec![Action::Quit];
        }
        self.leaving = true;
        let mut actions = Vec::new();
        if !matches!(self.window, Window::None) {
            self.window = Window::None;
        } else if view.is_busy() {
            actions.push(Action::Stop);
        } else if !self.editor.is_empty() {
            // Undo brings it back.
            self.editor.set("");
            self.editing = None;
            self.written();
        }
        self.say(Level::Info, "Ctrl-C again leaves");
        actions
    }

    fn perform(&mut self, does: Does, view: &View) -> Vec<Action> {
        match does {
            Does::Send => return self.submit(view),
            Does::NewLine => self.editor.insert("\n"),
            Does::Escape => return self.escape(view),
            Does::EndOfInput if self.editor.is_empty() => return vec![Action::Quit],
            Does::EndOfInput | Does::Delete => self.editor.delete(),
            Does::Help => self.window = Window::Help { top: 0 },
            Does::Panel => self.panel = Some(!self.panel_shown),
            Does::Sessions => return self.open(Kind::Sessions),
            Does::Models => return self.open(Kind::Models),
            Does::EditMessage => return self.open(Kind::Edit),
            Does::Copy => return self.open(Kind::Copy),
            Does::Search => return self.open(Kind::History),
            Does::Regenerate => return self.regenerate(view),
            Does::AnswerNow => return self.answer_now(view),
            Does::Thinking => self.transcript.toggle_last(&view.messages),
            Does::ExternalEditor => {
                return vec![Action::ExternalEditor(self.editor.text().to_string())];
            }
            Does::LineUp => self.transcript.scroll(-1),
            Does::LineDown => self.transcript.scroll(1),
            Does::PageUp => self.transcript.scroll_page(-1),
            Does::PageDown => self.transcript.scroll_page(1),
            Does::Start => self.transcript.go_to_start(),
            Does::End => self.transcript.go_to_end(),
            Does::Undo => self.editor.undo(),
            Does::Redo => self.editor.redo(),
            Does::Left => self.editor.left(),
            Does::Right => self.editor.right(),
            Does::WordLeft => self.editor.word_left(),
            Does::WordRight => self.editor.word_right(),
            Does::LineStart => self.editor.home(),
            Does::LineEnd => self.editor.end(),
            Does::Up => {
                if !self.editor.up() {
                    self.recall(-1);
                }
                return Vec::new();
            }
            Does::Down => {
                if !self.editor.down() {
                    self.recall(1);
                }
                return Vec::new();
            }
            Does::Backspace => self.editor.backspace(),
            Does::DeleteWord => self.editor.delete_word(),
            Does::DeleteWordAfter => self.editor.delete_word_after(),
            Does::DeleteToStart => self.editor.delete_to_start(),
            Does::DeleteToEnd => self.editor.delete_to_end(),
            Does::Complete => {}
            Does::Interrupt | Does::Suspend | Does::Redraw => {}
        }
        self.completion = None;
        Vec::new()
    }

    fn open(&mut self, kind: Kind) -> Vec<Action> {
        self.window = Window::Picker(Picker::new(kind));
        match kind {
            Kind::Sessions => vec![Action::ListSessions],
            Kind::Models => vec![Action::ListModels],
            _ => Vec::new(),
        }
    }

    fn escape(&mut self, view: &View) -> Vec<Action> {
        if view.is_busy() {
            return vec![Action::Stop];
        }
        if self.editing.take().is_some() {
            self.editor.set("");
            self.written();
        } else {
            self.dismissed = view.notices.len();
            self.transcript.go_to_end();
        }
        Vec::new()
    }

    fn busy_hint(&mut self) -> Vec<Action> {
        self.say(Level::Info, "an answer is being written; Esc stops it");
        Vec::new()
    }

    fn regenerate(&mut self, view: &View) -> Vec<Action> {
        if view.is_busy() {
            return self.busy_hint();
        }
        if !view.messages.iter().any(|m| m.role == Role::User) {
            self.say(Level::Info, "there is no answer to make again");
            return Vec::new();
        }
        self.transcript.go_to_end();
        vec![Action::Regenerate]
    }

    fn answer_now(&mut self, view: &View) -> Vec<Action> {
        if view.phase == Phase::Thinking {
            return vec![Action::EndThinking];
        }
        self.say(Level::Info, "the model is not thinking");
        Vec::new()
    }

    /// Enter: a command is carried out, a message is sent.
    fn submit(&mut self, view: &View) -> Vec<Action> {
        let text = self.editor.text().trim().to_string();
        if text.is_empty() {
            return Vec::new();
        }
        if self.editing.is_none() && command::is_command(&text) {
            return match command::parse(&text, view) {
                Ok(outcome) => {
                    self.remember(text);
                    self.outcome(outcome, view)
                }
                Err(message) => {
                    self.say(Level::Warning, message);
                    Vec::new()
                }
            };
        }
        if view.is_busy() {
            return self.busy_hint();
        }
        self.remember(text.clone());
        self.dismissed = view.notices.len();
        self.transcript.go_to_end();
        let edited = self
            .editing
            .take()
            .and_then(|id| view.messages.iter().position(|m| m.id == id));
        match edited {
            Some(index) => vec![Action::Edit { index, text }],
            None => vec![Action::Send(text)],
        }
    }

    /// Empties the editor into the history.
    fn remember(&mut self, text: String) {
        self.editor.take();
        self.written();
        if self.history.last() != Some(&text) {
            self.history.push(text);
        }
    }

    fn outcome(&mut self, outcome: Outcome, view: &View) -> Vec<Action> {
        match outcome {
            Outcome::Act(Action::Regenerate) => return self.regenerate(view),
            Outcome::Act(Action::EndThinking) => return self.answer_now(view),
            Outcome::Act(action) => return vec![action],
            Outcome::Help => self.window = Window::Help { top: 0 },
            Outcome::Models => return self.open(Kind::Models),
            Outcome::Sessions => return self.open(Kind::Sessions),
            Outcome::Edit => return self.open(Kind::Edit),
            Outcome::Copy => return self.open(Kind::Copy),
            Outcome::Stats => {
                self.window = Window::Stats { top: 0 };
                return vec![Action::Stats];
            }
            Outcome::Panel => self.panel = Some(!self.panel_shown),
            Outcome::Theme(name) => self.theme = Theme::named(&name).unwrap_or(self.theme),
            Outcome::Say(text) => self.say(Level::Info, text),
        }
        Vec::new()
    }

    /// Another entry of the history, as Up and Down choose it; past the newest, what was written before.
    fn recall(&mut self, by: isize) {
        let (at, draft) = match self.recalled.take() {
            // An entry that was changed since is a draft of its own.
            Some((at, draft))
                if self
                    .history
                    .get(at)
                    .is_some_and(|e| e == self.editor.text()) =>
            {
                (at, draft)
            }
            _ => (self.history.len(), self.editor.text().to_string()),
        };
        let to = at.saturating_add_signed(by).min(self.history.len());
        match self.history.get(to) {
            Some(entry) => {
                if to != at {
                    self.editor.set(&entry.clone());
                }
                self.recalled = Some((to, draft));
            }
            None => {
                if to != at {
                    self.editor.set(&draft);
                }
            }
        }
        self.completion = None;
    }

    /// The ways to go on with a command that is being written.
    pub(crate) fn completions(&self, view: &View) -> Vec<Completion> {
        if self.editing.is_some() || !self.editor.at_end() || self.recalled.is_some() {
            return Vec::new();
        }
        command::completions(self.editor.text(), view)
    }

    /// Keys while ways to go on are shown.
    fn completion_key(&mut self, does: Option<Does>, view: &View) -> Option<Vec<Action>> {
        let does = does.filter(|d| {
            matches!(
                d,
                Does::Up | Does::Down | Does::Complete | Does::Send | Does::Escape
            )
        })?;
        let list = self.completions(view);
        if list.is_empty() {
            return None;
        }
        let last = list.len() - 1;
        match (does, self.completion) {
            (Does::Down, at) => {
                self.completion = Some(at.map_or(0, |i| if i >= last { 0 } else { i + 1 }))
            }
            (Does::Up, at) => {
                self.completion =
                    Some(at.map_or(last, |i| if i == 0 { last } else { i.min(last) - 1 }))
            }
            (Does::Complete, at) => {
                self.editor.set(&list[at.unwrap_or(0).min(last)].line);
                self.completion = None;
            }
            (Does::Send, Some(at)) => {
                let chosen = &list[at.min(last)];
                self.editor.set(&chosen.line);
                self.completion = None;
                if !chosen.line.ends_with(' ') {
                    return Some(self.submit(view));
                }
            }
            (Does::Escape, _) if !view.is_busy() => {
                self.editor.set("");
                self.written();
            }
            _ => return None,
        }
        Some(Vec::new())
    }

    /// Keys while something is open in place of the conversation.
    fn window_key(&mut self, key: &KeyEvent, does: Option<Does>, view: &View) -> Vec<Action> {
        match &mut self.window {
            Window::Help { top } | Window::Stats { top } => {
                match does {
                    Some(Does::Up | Does::LineUp) => *top = top.saturating_sub(1),
                    Some(Does::Down | Does::LineDown) => *top = top.saturating_add(1),
                    Some(Does::PageUp) => *top = top.saturating_sub(10),
                    Some(Does::PageDown) => *top = top.saturating_add(10),
                    Some(Does::Start | Does::LineStart) => *top = 0,
                    Some(Does::End | Does::LineEnd) => *top = usize::MAX,
                    Some(Does::Panel) => self.panel = Some(!self.panel_shown),
                    Some(Does::Escape | Does::Help | Does::Send | Does::EndOfInput) => {
                        self.window = Window::None
                    }
                    Some(_) => {}
                    None => match keys::typed(key) {
                        Some('q' | '?') => self.window = Window::None,
                        // Whoever goes on writing wants to see it.
                        Some(c) => {
                            self.window = Window::None;
                            self.editor.insert(c.encode_utf8(&mut [0; 4]));
                            self.written();
                        }
                        None => {}
                    },
                }
                Vec::new()
            }
            Window::Picker(_) => self.picker_key(key, does, view),
            Window::None => Vec::new(),
        }
    }

    fn picker_key(&mut self, key: &KeyEvent, does: Option<Does>, view: &View) -> Vec<Action> {
        let Window::Picker(picker) = &mut self.window else {
            return Vec::new();
        };
        let items = picker.items(view, &self.history);
        let last = items.len().saturating_sub(1);
        picker.selected = picker.selected.min(last);
        match does {
            Some(Does::Up | Does::LineUp) => {
                picker.selected = picker.selected.checked_sub(1).unwrap_or(last)
            }
            Some(Does::Down | Does::LineDown | Does::Search) => {
                picker.selected = if picker.selected == last {
                    0
                } else {
                    picker.selected + 1
                };
            }
            Some(Does::PageUp) => picker.selected = picker.selected.saturating_sub(10),
            Some(Does::PageDown) => picker.selected = (picker.selected + 10).min(last),
            Some(Does::Start | Does::LineStart) => picker.selected = 0,
            Some(Does::End | Does::LineEnd) => picker.selected = last,
            Some(Does::Backspace) => {
                picker.filter.pop();
                picker.selected = 0;
            }
            Some(Does::DeleteWord | Does::DeleteToStart) => {
                picker.filter.clear();
                picker.selected = 0;
            }
            Some(Does::Escape | Does::EndOfInput) => self.window = Window::None,
            Some(Does::Send | Does::Complete) => {
                let chosen = items.into_iter().nth(picker.selected);
                if let Some(item) = chosen {
                    self.window = Window::None;
                    return self.choose(item.choice, view);
                }
            }
            Some(_) => {}
            None => {
                if let Some(c) = keys::typed(key).filter(|c| !c.is_control()) {
                    picker.filter.push(c);
                    picker.selected = 0;
                }
            }
        }
        Vec::new()
    }

    fn choose(&mut self, choice: Choice, view: &View) -> Vec<Action> {
        match choice {
            Choice::Act(action) => {
                if matches!(action, Action::Copy(_)) {
                    self.say(Level::Info, "copied");
                }
                return vec![action];
            }
            Choice::Edit(_) if view.is_busy() => return self.busy_hint(),
            Choice::Edit(id) => {
                if let Some(message) = view.messages.iter().find(|m| m.id == id) {
                    self.editor.set(&message.text);
                    self.editing = Some(id);
                }
            }
            Choice::Insert(text) => self.editor.set(&text),
        }
        self.written();
        Vec::new()
    }
}
