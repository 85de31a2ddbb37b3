//! What a running qrun tells those who watch it, and where they find it.
//!
//! Every long-running command offers a Unix socket ([`folder`]) that streams JSON lines ([`line`]). The command itself
//! only leaves its newest figures in a slot, and only when somebody asked for them; a thread of its own writes them
//! ([`publish`]).

#[cfg(unix)]
pub mod folder;
pub mod line;
pub mod machine;
#[cfg(unix)]
pub mod publish;

/// Without Unix sockets nobody can watch.
#[cfg(not(unix))]
pub mod publish {
    use std::path::Path;

    use qrun::engine::Engine;
    use qrun::generate::{Answer, Seen};
    use qrun::session::Session;

    pub fn start(_model: Option<&Path>, _verbose: bool) {}
    pub fn loaded(_engine: &Engine, _session: &Session, _draft_head: &str) {}
    pub fn reading(_done: usize, _read: super::line::Reading, _total: usize) {}
    pub fn seen(_seen: &Seen<'_>, _snapshots: usize) {}
    pub fn answered(_answer: &Answer, _read: super::line::Reading, _session: &Session) {}
    pub fn end(_how: &str) {}
}
