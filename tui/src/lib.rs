//! qrun's terminal interface: a pure function of a view, and events turned into wishes.
//!
//! The engine side owns a [`View`] (plain data, no engine types), changes it as things happen, and carries out each
//! [`Action`]. The interface keeps only what belongs to the screen: what is being written, what is open, where it is
//! scrolled to. Nothing here reads a clock, a file or the environment, except [`terminal`], which is the terminal itself.
//!
//! What the engine side does, besides answering each action by changing the view:
//! - gives every [`Message`] an id of its own, sets `streaming` while it grows, and appends to `text` and `thinking`;
//! - sets [`View::phase`] and the figures of [`View::live`]; what is unknown stays `None`;
//! - says what went wrong with a [`Notice`] (program) or [`Message::error`] (answer);
//! - calls [`Pacer::changed`] after each change, [`warm_up`] on a thread after the first frame, and
//!   [`terminal::restore`] when a signal ends the program.
//!
//! ```no_run
//! use std::time::{Duration, Instant};
//! use tui::{Action, Pacer, Screen, Theme, Ui, View, terminal};
//!
//! fn chat(view: &mut View, mut advance: impl FnMut(&mut View, Option<Action>) -> bool) -> std::io::Result<()> {
//!     let mut screen = Screen::enter(true)?;
//!     let mut ui = Ui::new(Theme::detect(None, None, None), Vec::new());
//!     let mut clipboard = terminal::Clipboard::default();
//!     let mut pacer = Pacer::default();
//!     pacer.changed();
//!     loop {
//!         if pacer.due(Instant::now()) {
//!             screen.draw(|frame| tui::draw(frame, view, &mut ui))?;
//!         }
//!         let wait = pacer.wait(Instant::now()).unwrap_or(terminal::FRAME);
//!         if let Some(event) = terminal::next_event(wait)? {
//!             pacer.changed();
//!             for action in ui.handle(&event, view) {
//!                 match action {
//!                     Action::Quit => return Ok(()),
//!                     Action::Suspend => screen.suspend()?,
//!                     Action::Redraw => screen.clear()?,
//!                     Action::Copy(text) => clipboard.copy(&text)?,
//!                     other => { advance(view, Some(other)); }
//!                 }
//!             }
//!         }
//!         // What the engine has sent meanwhile; never waits.
//!         if advance(view, None) {
//!             pacer.changed();
//!         }
//!     }
//! }
//! ```

#![forbid(unsafe_code)]

mod action;
mod app;
mod command;
mod draw;
mod editor;
mod figures;
mod highlight;
mod keys;
mod markdown;
mod picker;
pub mod terminal;
mod text;
mod theme;
mod transcript;
mod view;
pub mod watch;

pub use action::{Action, ExportFormat, Sampler};
pub use app::Ui;
pub use crossterm::event::Event;
pub use draw::draw;
pub use highlight::warm_up;
pub use terminal::{Pacer, Screen};
pub use theme::{Theme, ThemeKind};
pub use view::{
    Attachment, Context, Level, Live, Memory, Message, Model, ModelEntry, Notice, Phase, Prompt,
    Reuse, Role, Round, SessionEntry, Settings, Speculation, Thermal, Thinking, ToolCall, View,
    Zone,
};
