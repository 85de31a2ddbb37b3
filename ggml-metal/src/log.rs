//! ggml's log, captured: quiet by default, kept for error messages, forwarded when asked for.
//!
//! ggml has one log callback per process. Ours keeps the last warnings and errors, so that a null pointer
//! from C can be explained, and hands every line to a sink when one is set (`-v`).

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, Once, PoisonError};

/// How grave a log line is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[allow(missing_docs)]
pub enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

type Sink = Box<dyn Fn(Level, &str) + Send>;

struct State {
    sink: Option<Sink>,
    last_level: Level,
    recent: Vec<String>,
}

static STATE: Mutex<State> = Mutex::new(State {
    sink: None,
    last_level: Level::Info,
    recent: Vec::new(),
});
static INSTALL: Once = Once::new();

const KEPT_LINES: usize = 8;

/// Sends every line that ggml logs from now on to `sink`.
pub fn set_log_sink(sink: impl Fn(Level, &str) + Send + 'static) {
    install();
    lock().sink = Some(Box::new(sink));
}

/// Installs the callback; called before the first use of ggml.
pub(crate) fn install() {
    INSTALL.call_once(|| {
        // SAFETY: the callback has the signature that ggml asks for and uses no user data.
        unsafe { ggml::ggml_log_set(Some(on_log), std::ptr::null_mut()) };
    });
}

/// llama.cpp has a log callback of its own, and setting it sets ggml's, too: both become ours.
#[cfg(feature = "peer")]
pub(crate) fn install_for_peer() {
    static ONCE: Once = Once::new();
    install();
    ONCE.call_once(|| {
        // SAFETY: as for ggml's.
        unsafe { ggml::llama_log_set(Some(on_log), std::ptr::null_mut()) };
    });
}

/// Forgets what was logged so far, so that [`take`] returns the lines of one call.
pub(crate) fn clear() {
    lock().recent.clear();
}

/// The warnings and errors since [`clear`], joined to one line with a leading `: `, or an empty string.
pub(crate) fn take() -> String {
    let lines = std::mem::take(&mut lock().recent);
    if lines.is_empty() {
        return String::new();
    }
    format!(": {}", crate::error::one_line(&lines.join("; ")))
}

fn lock() -> std::sync::MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn on_log(level: ggml::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml passes a null-terminated string that lives through the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let mut state = lock();
    let level = match level {
        ggml::GGML_LOG_LEVEL_ERROR => Level::Error,
        ggml::GGML_LOG_LEVEL_WARN => Level::Warn,
        ggml::GGML_LOG_LEVEL_DEBUG => Level::Debug,
        ggml::GGML_LOG_LEVEL_CONT => state.last_level,
        _ => Level::Info,
    };
    state.last_level = level;
    let line = text.trim_end();
    if line.is_empty() {
        return;
    }
    if level >= Level::Warn {
        if state.recent.len() == KEPT_LINES {
            state.recent.remove(0);
        }
        // ggml prefixes lines with the C function's name, which says nothing to a user.
        let message = line
            .split_once(": ")
            .filter(|(function, _)| !function.contains(' '))
            .map_or(line, |(_, rest)| rest);
        state.recent.push(message.to_owned());
    }
    if let Some(sink) = &state.sink {
        sink(level, line);
    }
}
