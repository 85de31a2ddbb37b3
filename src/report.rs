//! The only writer: data to stdout, everything for people to stderr.

use std::io::{self, IsTerminal, Write};

/// Writes to stdout at once. A reader that went away is not an error here: the caller asks [`is_closed_pipe`].
///
/// # Errors
/// What the system says.
pub fn out(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    written
        .and_then(|()| stdout.flush())
        .map_err(|e| io::Error::new(e.kind(), format!("writing to standard output: {e}")))
}

/// A line for people. Nothing can be done where stderr is gone.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Text on stderr without a line's end.
pub fn note_part(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}

/// True where stderr is a terminal that shows colour.
pub fn has_colour() -> bool {
    let wanted = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    wanted && io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
}

/// True for an error that only says that the reader of stdout went away.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>();
        io.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    })
}

/// An error as one line, cause after cause; causes that the line already says are left out.
pub fn error_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string().lines().collect::<Vec<_>>().join(" ");
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line
}

/// Bytes for people: three digits and a binary unit.
pub fn bytes(n: usize) -> String {
    let mut value = n as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return match unit {
                "B" => format!("{n} B"),
                _ => format!("{value:.1} {unit}"),
            };
        }
        value /= 1024.0;
    }
    format!("{value:.2} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(16_336_704), "15.6 MiB");
        assert_eq!(bytes(3 << 40), "3.00 TiB");
    }

    #[test]
    fn causes_are_said_once() {
        let error = anyhow::anyhow!("disk full")
            .context("writing a.gguf: disk full")
            .context("converting");
        assert_eq!(error_line(&error), "converting: writing a.gguf: disk full");
    }
}
