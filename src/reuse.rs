//! What a conversation's next turn need not process again.
//!
//! The model's recurrent state can only go on from where it was saved. So states are saved at turn boundaries, within
//! a budget of bytes, and a new prompt begins from the longest saved one that it starts with: the next turn from the
//! last, a turn after its thinking was taken out, a regeneration or an edit from the boundary before. States can be kept
//! on disk, too ([`crate::stored`]): a restarted program then goes on from them.

use crate::session::{CancelToken, EvalError, Outputs, Session, Snapshot};
use crate::stored::StateStore;

/// Saved states of one model's session, the least recently used first.
pub struct StateCache {
    snapshots: Vec<Snapshot>,
    budget: usize,
    disk: Option<StateStore>,
}

/// How a prompt was begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Begun {
    /// Tokens that were there already.
    pub reused: usize,
    /// Tokens of the prompt.
    pub total: usize,
    /// Why nothing was reused, where nothing was.
    pub reason: &'static str,
}

impl StateCache {
    /// An empty cache that holds at most `budget` bytes.
    pub fn new(budget: usize) -> Self {
        Self {
            snapshots: Vec::new(),
            budget,
            disk: None,
        }
    }

    /// The same, with states on disk behind it.
    pub fn with_disk(budget: usize, disk: StateStore) -> Self {
        Self {
            disk: Some(disk),
            ..Self::new(budget)
        }
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        self.snapshots.iter().map(Snapshot::bytes).sum()
    }

    /// Brings `session` to the longest known beginning of `prompt`, leaving at least one token of it to process.
    ///
    /// # Errors
    /// When the device cannot be written.
    pub fn begin(&mut self, session: &mut Session, prompt: &[u32]) -> Result<Begun, EvalError> {
        let begins = |tokens: &[u32]| tokens.len() < prompt.len() && prompt.starts_with(tokens);
        let saved = (0..self.snapshots.len())
            .filter(|&i| begins(self.snapshots[i].tokens()))
            .max_by_key(|&i| self.snapshots[i].tokens().len());
        let saved_len = saved.map_or(0, |i| self.snapshots[i].tokens().len());
        let total = prompt.len();
        let in_session = if begins(session.tokens()) {
            session.n_past()
        } else {
            0
        };
        // A damaged one is taken out, so another may be the longest then.
        while let Some(disk) = &mut self.disk
            && disk.longest(prompt) > saved_len.max(in_session)
        {
            if let Some(snapshot) = disk.read(prompt, session) {
                session.restore(&snapshot)?;
                let reused = session.n_past();
                self.remember(snapshot);
                return Ok(Begun {
                    reused,
                    total,
                    reason: "",
                });
            }
        }
        if session.n_past() > 0 && begins(session.tokens()) && session.n_past() >= saved_len {
            return Ok(Begun {
                reused: session.n_past(),
                total,
                reason: "",
            });
        }
        if let Some(at) = saved.filter(|_| saved_len > 0) {
            let snapshot = self.snapshots.remove(at);
            let restored = session.restore(&snapshot);
            self.snapshots.push(snapshot);
            restored?;
            return Ok(Begun {
                reused: saved_len,
                total,
                reason: "",
            });
        }
        let reason = if session.n_past() == 0 && self.snapshots.is_empty() {
            "the first turn"
        } else {
            "no saved state begins like this"
        };
        session.clear()?;
        Ok(Begun {
            reused: 0,
            total,
            reason,
        })
    }

    /// Saves the session's state, making room by forgetting the least recently used ones. A state larger than the
    /// whole budget is not saved.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn save(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let mut saved = self.snapshots.iter();
        let known = saved.position(|s| s.tokens() == session.tokens());
        if let Some(at) = known {
            let snapshot = self.snapshots.remove(at);
            self.snapshots.push(snapshot);
            return Ok(());
        }
        if session.n_past() > 0 && session.snapshot_bytes() <= self.budget {
            self.remember(session.snapshot()?);
        }
        Ok(())
    }

    /// Puts a state in, making room for it; one larger than the whole budget stays out.
    fn remember(&mut self, snapshot: Snapshot) {
        if snapshot.bytes() > self.budget {
            return;
        }
        while self.bytes() + snapshot.bytes() > self.budget && !self.snapshots.is_empty() {
            self.snapshots.remove(0);
        }
        self.snapshots.push(snapshot);
    }

    /// True where states are kept on disk, too.
    pub fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Writes the state after the first `n` of the session's tokens to the disk: that of the session itself, or one that
    /// was saved. What went wrong is a line each.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn store(&mut self, session: &mut Session, n: usize) -> anyhow::Result<Vec<String>> {
        let Some(disk) = &mut self.disk else {
            return Ok(Vec::new());
        };
        let tokens = &session.tokens()[..n.min(session.n_past())];
        let saved = self.snapshots.iter().find(|s| s.tokens() == tokens);
        match saved {
            Some(snapshot) => disk.write(snapshot),
            None if n == session.n_past() => disk.write(&session.snapshot()?),
            None => {}
        }
        Ok(disk.take_notices())
    }

    /// Where memory has no room for the session's state, writes it to the disk at once: later it would be gone.
    fn store_unsaved(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let tokens = session.tokens();
        let saved = self.snapshots.iter().any(|s| s.tokens() == tokens);
        match &mut self.disk {
            Some(disk) if !saved => disk.write(&session.snapshot()?),
            _ => {}
        }
        Ok(())
    }

    /// Processes `prompt` up to its last token, in the session brought there by [`StateCache::begin`], and saves the
    /// state at `boundary`, up to which a later turn's prompt will be the same. `progress` is told tokens processed
    /// and to process. Returns how it began, and the token that is left.
    ///
    /// # Errors
    /// See [`EvalError`].
    pub fn process(
        &mut self,
        session: &mut Session,
        prompt: &[u32],
        boundary: usize,
        cancel: &CancelToken,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(Begun, u32), EvalError> {
        let Some((&last, before)) = prompt.split_last() else {
            return Err(EvalError::Failed(anyhow::anyhow!("the prompt is empty")));
        };
        let begun = self.begin(session, prompt)?;
        let to_do = before.len() - begun.reused;
        let mut done = 0;
        for end in [boundary.min(before.len()), before.len()] {
            while session.n_past() < end {
                let chunk = session.params().n_batch.min(end - session.n_past());
                let from = session.n_past();
                session.eval(&before[from..from + chunk], Outputs::None, cancel)?;
                done += chunk;
                progress(done, to_do);
            }
            if session.n_past() == boundary {
                self.save(session)?;
                self.store_unsaved(session)?;
            }
        }
        Ok((begun, last))
    }
}
