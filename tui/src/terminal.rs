//! The terminal itself: raw mode, the alternate screen, events, and leaving all of it as it was found.

use std::io::{self, Write};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossterm::clipboard::CopyToClipboard;
use crossterm::cursor::Show;
use crossterm::event::{
    self, DisableBracketedPaste, DisableMouseCapture, EnableBracketedPaste, EnableMouseCapture,
    Event, KeyboardEnhancementFlags, PopKeyboardEnhancementFlags, PushKeyboardEnhancementFlags,
};
use crossterm::style::ResetColor;
use crossterm::terminal::{
    BeginSynchronizedUpdate, EndSynchronizedUpdate, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode,
};
use crossterm::{execute, queue};
use ratatui::backend::CrosstermBackend;
use ratatui::{Frame, Terminal};

/// Time between two frames: at most 30 a second.
pub const FRAME: Duration = Duration::from_millis(33);

/// Whether the terminal is ours now, for [`restore`] from a panic or a signal.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// The terminal while it is ours. Dropping it gives it back; so does a panic.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<io::Stdout>>,
    mouse: bool,
}

impl Screen {
    /// Takes the terminal. With `mouse` the wheel scrolls, and selecting text needs Shift in most terminals.
    ///
    /// # Errors
    /// When standard output is no terminal, or it refuses.
    pub fn enter(mouse: bool) -> io::Result<Screen> {
        hook_panics();
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        take(mouse)?;
        Ok(Screen { terminal, mouse })
    }

    /// Draws a frame; a terminal that knows how to shows it all at once.
    ///
    /// # Errors
    /// When writing to the terminal fails.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> io::Result<()> {
        queue!(io::stdout(), BeginSynchronizedUpdate)?;
        self.terminal.draw(draw)?;
        execute!(io::stdout(), EndSynchronizedUpdate)
    }

    /// Forgets what is on the screen, so that the next frame draws all of it.
    ///
    /// # Errors
    /// When writing to the terminal fails.
    pub fn clear(&mut self) -> io::Result<()> {
        self.terminal.clear()
    }

    /// Gives the terminal back while `work` runs (an external editor), and takes it again.
    ///
    /// # Errors
    /// When the terminal cannot be given back or taken again.
    pub fn outside<T>(&mut self, work: impl FnOnce() -> T) -> io::Result<T> {
        restore();
        let done = work();
        take(self.mouse)?;
        self.terminal.clear()?;
        Ok(done)
    }

    /// Suspends the program as Ctrl-Z does in a shell, and goes on when it is continued. Where there are no such signals,
    /// nothing happens.
    ///
    /// # Errors
    /// When the terminal cannot be given back or taken again.
    pub fn suspend(&mut self) -> io::Result<()> {
        #[cfg(unix)]
        self.outside(|| {
            // The whole group, as the terminal would: a pipeline stops together.
            rustix::process::kill_current_process_group(rustix::process::Signal::TSTP)
        })??;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn take(mouse: bool) -> io::Result<()> {
    enable_raw_mode()?;
    ENTERED.store(true, Ordering::SeqCst);
    let mut out = io::stdout();
    execute!(out, EnterAlternateScreen, EnableBracketedPaste)?;
    if mouse {
        execute!(out, EnableMouseCapture)?;
    }
    // Not asked for first: the question takes a round trip, and terminals that do not know it ignore it.
    let _ = execute!(
        out,
        PushKeyboardEnhancementFlags(KeyboardEnhancementFlags::DISAMBIGUATE_ESCAPE_CODES)
    );
    Ok(())
}

/// Gives the terminal back as it was found; does nothing when it is not ours. For signal handlers' threads and error paths;
/// [`Screen`] calls it when dropped.
pub fn restore() {
    if !ENTERED.swap(false, Ordering::SeqCst) {
        return;
    }
    let mut out = io::stdout();
    // Each by itself: one that fails must not keep the others from being done.
    let _ = execute!(out, PopKeyboardEnhancementFlags);
    let _ = execute!(out, DisableMouseCapture);
    let _ = execute!(
        out,
        DisableBracketedPaste,
        EndSynchronizedUpdate,
        ResetColor,
        Show
    );
    let _ = execute!(out, LeaveAlternateScreen);
    let _ = disable_raw_mode();
    let _ = out.flush();
}

/// Lets a panic be told on the user's own screen.
fn hook_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            before(info);
        }));
    });
}

/// The next event, or `None` when there is none within `wait`.
///
/// # Errors
/// When the terminal cannot be read.
pub fn next_event(wait: Duration) -> io::Result<Option<Event>> {
    if event::poll(wait)? {
        event::read().map(Some)
    } else {
        Ok(None)
    }
}

/// The clipboards that can be reached: the terminal's, and the system's where the program runs on it. Kept while the program
/// runs, because on X11 the program itself hands the text out.
#[derive(Default)]
pub struct Clipboard {
    /// None before the first copy, and where there is none.
    system: Option<arboard::Clipboard>,
}

impl Clipboard {
    /// Puts a text on the clipboard. The terminal is always asked to (OSC 52), which works over SSH and on Wayland too;
    /// terminals that do not allow it ignore it.
    ///
    /// # Errors
    /// When writing to the terminal fails. That there is no system's clipboard is none.
    pub fn copy(&mut self, text: &str) -> io::Result<()> {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|v| !v.is_empty());
        let remote = is_set("SSH_CONNECTION") || is_set("SSH_TTY");
        let display = std::env::var("DISPLAY").ok();
        if self.system.is_none() && is_here(remote, display.as_deref()) {
            self.system = arboard::Clipboard::new().ok();
        }
        if let Some(system) = &mut self.system
            && system.set_text(text).is_err()
        {
            self.system = None;
        }
        execute!(io::stdout(), CopyToClipboard::to_clipboard_from(text))
    }
}

/// Whether the system's clipboard is the one of the person at the keyboard, and reaching it cannot take long.
fn is_here(remote: bool, display: Option<&str>) -> bool {
    let has_display = cfg!(any(target_os = "macos", windows));
    // A display of another machine is reached over the network.
    !remote && (has_display || display.is_some_and(|d| d.starts_with(':')))
}

/// When to draw: at once after a pause, at most every [`FRAME`] otherwise, and only when something changed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pacer {
    changed: bool,
    drawn: Option<Instant>,
}

impl Pacer {
    /// Notes that the screen is out of date.
    pub fn changed(&mut self) {
        self.changed = true;
    }

    /// How long to wait for events before the next frame is due; `None` when nothing changed.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        self.changed.then(|| {
            self.drawn.map_or(Duration::ZERO, |at| {
                (at + FRAME).saturating_duration_since(now)
            })
        })
    }

    /// Whether to draw now; if so, the screen counts as drawn.
    pub fn due(&mut self, now: Instant) -> bool {
        let due = self.wait(now) == Some(Duration::ZERO);
        if due {
            *self = Pacer {
                changed: false,
                drawn: Some(now),
            };
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_drawn_without_a_change() {
        let mut pacer = Pacer::default();
        let now = Instant::now();
        assert!(!pacer.due(now));
        assert_eq!(pacer.wait(now), None);
    }

    #[test]
    fn the_first_change_is_drawn_at_once_and_the_next_after_a_frame() {
        let mut pacer = Pacer::default();
        let start = Instant::now();
        pacer.changed();
        assert!(pacer.due(start));
        pacer.changed();
        let soon = start + Duration::from_millis(10);
        assert!(!pacer.due(soon));
        assert_eq!(pacer.wait(soon), Some(Duration::from_millis(23)));
        assert!(pacer.due(start + FRAME));
        assert!(!pacer.due(start + 2 * FRAME));
        pacer.changed();
        assert!(pacer.due(start + 10 * FRAME));
    }

    #[test]
    fn a_second_of_changes_is_thirty_frames() {
        let mut pacer = Pacer::default();
        let start = Instant::now();
        let frames = (0..1000)
            .filter(|ms| {
                pacer.changed();
                pacer.due(start + Duration::from_millis(*ms))
            })
            .count();
        assert!((29..=31).contains(&frames), "{frames}");
    }

    #[test]
    fn the_systems_clipboard_is_used_where_it_is_the_users() {
        assert!(is_here(false, Some(":0")));
        assert!(!is_here(true, Some(":0")));
        assert!(!is_here(true, None));
        if cfg!(target_os = "linux") {
            assert!(!is_here(false, None));
            assert!(!is_here(false, Some("far.example:10.0")));
        }
    }

    #[test]
    fn restoring_what_was_not_taken_does_nothing() {
        restore();
        assert!(!ENTERED.load(Ordering::SeqCst));
    }
}
