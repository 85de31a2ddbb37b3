//! Saved states on disk, so that a conversation goes on at once after a restart.
//!
//! A file for each state, in the user's cache folder, readable by this user alone: it holds the conversation's tokens
//! and what they left behind. A file says which model and which kind of session it belongs to, and ends with a hash of
//! all before; whatever does not fit is removed and said, never used.
//!
//! `qrunst01`, the length of the head (u32), the head (JSON: key, number of tokens, sizes of the parts), the tokens
//! (u32 each), the parts, the XXH3-128 of all of it; numbers little-endian. The name is made of hashes of the key and
//! of the tokens, so that only files of the same kind are opened.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::conversation::private_folder;
use crate::engine::Engine;
use crate::session::{Session, Snapshot};
use crate::tune;

/// The beginning of every file; another form has another one.
const MAGIC: &[u8; 8] = b"qrunst01";
/// Heads are small; a larger one is damaged.
const MAX_HEAD: usize = 1 << 16;
/// Bytes of the hash at the end.
const HASH: usize = 16;
/// Places of a model's file that are looked at, and bytes of each: weights of another training have other bytes there.
const SAMPLES: usize = 64;
const SAMPLE: usize = 4096;
/// A file under its temporary name that is older belongs to a program that died.
const LEFT_BEHIND: Duration = Duration::from_secs(3600);

/// What a state belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateKey {
    /// Length, hash of the head and hash of samples of each of the model's files.
    pub model: String,
    /// Type of the keys.
    pub k: String,
    /// Type of the values.
    pub v: String,
    /// Whether the draft head's state is part of it.
    pub draft_head: bool,
    /// Version of qrun and ggml.
    pub version: String,
}

impl StateKey {
    /// The key of a session's states.
    pub fn of(session: &Session) -> Self {
        let params = session.params();
        Self {
            model: model(session.engine()),
            k: params.kv.k.name().to_owned(),
            v: params.kv.v.name().to_owned(),
            draft_head: params.mtp,
            version: tune::version(),
        }
    }

    fn hash(&self) -> u64 {
        // These types can always be written.
        xxh3_64(&serde_json::to_vec(self).unwrap_or_default())
    }
}

fn model(engine: &Engine) -> String {
    let files: Vec<String> = engine
        .files()
        .all()
        .map(|file| {
            let bytes = file.map().bytes();
            let mut hash = Xxh3::new();
            for i in 0..SAMPLES {
                let at = (bytes.len() / SAMPLES) * i;
                hash.update(&bytes[at..(at + SAMPLE).min(bytes.len())]);
            }
            format!("{}-{:016x}", tune::identity(file), hash.digest())
        })
        .collect();
    files.join(",")
}

#[derive(Serialize, Deserialize)]
struct Head {
    key: StateKey,
    tokens: usize,
    parts: Vec<usize>,
}

/// A state in a file.
struct Entry {
    path: PathBuf,
    tokens: Vec<u32>,
}

/// The states on disk that belong to one kind of session.
pub struct StateStore {
    folder: PathBuf,
    budget: u64,
    key: StateKey,
    entries: Vec<Entry>,
    notices: Vec<String>,
    /// Writing failed once: it is not tried again.
    broken: bool,
}

/// The folder of all states.
///
/// # Errors
/// When the system names no place for caches.
pub fn folder() -> Result<PathBuf> {
    use etcetera::BaseStrategy as _;
    let base = etcetera::choose_base_strategy().context("finding the cache folder")?;
    Ok(base.cache_dir().join("qrun/states"))
}

impl StateStore {
    /// The states in `folder` that belong to `key`. All states there, those of other models too, are kept within
    /// `budget` bytes; the oldest go first.
    pub fn open(folder: &Path, budget: u64, key: StateKey) -> Self {
        let mut store = Self {
            folder: folder.to_owned(),
            budget,
            key,
            entries: Vec::new(),
            notices: Vec::new(),
            broken: false,
        };
        store.tidy();
        let prefix = format!("{:016x}-", store.key.hash());
        for (_, path, _) in store.files() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !name.starts_with(&prefix) {
                continue;
            }
            match open(&path, &store.key) {
                Ok((tokens, ..)) => store.entries.push(Entry { path, tokens }),
                Err(error) => store.discard(&path, &error),
            }
        }
        store
    }

    /// What went wrong since the last call, a line each.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Tokens of the longest state that `prompt` goes on from with at least one token.
    pub fn longest(&self, prompt: &[u32]) -> usize {
        self.best(prompt)
            .map_or(0, |at| self.entries[at].tokens.len())
    }

    fn best(&self, prompt: &[u32]) -> Option<usize> {
        let begins = |e: &Entry| e.tokens.len() < prompt.len() && prompt.starts_with(&e.tokens);
        (0..self.entries.len())
            .filter(|&i| begins(&self.entries[i]))
            .max_by_key(|&i| self.entries[i].tokens.len())
    }

    /// Reads the longest state that `prompt` goes on from; none where there is none that can be used.
    pub fn read(&mut self, prompt: &[u32], session: &Session) -> Option<Snapshot> {
        let at = self.best(prompt)?;
        let path = &self.entries[at].path;
        match read(path, &self.key, session) {
            Ok(snapshot) => Some(snapshot),
            Err(error) => {
                let path = self.entries.swap_remove(at).path;
                self.discard(&path, &error);
                None
            }
        }
    }

    /// Writes a state, unless it is there already or larger than the whole budget. What cannot be written is a
    /// notice.
    pub fn write(&mut self, snapshot: &Snapshot) {
        let tokens = snapshot.tokens();
        if self.broken || tokens.is_empty() || snapshot.bytes() as u64 > self.budget {
            return;
        }
        let path = self.folder.join(format!(
            "{:016x}-{:016x}.state",
            self.key.hash(),
            hash_of(tokens)
        ));
        if self.entries.iter().any(|e| e.path == path) && path.exists() {
            // As good as new.
            let touched = File::options().append(true).open(&path);
            let _ = touched.and_then(|file| file.set_modified(SystemTime::now()));
            return;
        }
        // Room first, so that the budget holds at any moment.
        self.make_room(snapshot.bytes() as u64);
        match self.try_write(&path, snapshot) {
            Ok(()) => {
                self.entries.retain(|e| e.path != path);
                let tokens = tokens.to_vec();
                self.entries.push(Entry { path, tokens });
                self.make_room(0);
            }
            Err(error) => {
                self.broken = true;
                self.notices.push(format!(
                    "states are not kept on disk any more: {:#}",
                    error.context(format!("writing {}", path.display()))
                ));
            }
        }
    }

    fn try_write(&self, path: &Path, snapshot: &Snapshot) -> Result<()> {
        private_folder(&self.folder)?;
        let head = serde_json::to_vec(&Head {
            key: self.key.clone(),
            tokens: snapshot.tokens().len(),
            parts: snapshot.parts().iter().map(Vec::len).collect(),
        })?;
        // Its mode is 0600 from the start, and it goes away if it is not finished.
        let file = tempfile::Builder::new()
            .prefix("state-")
            .suffix(".partial")
            .tempfile_in(&self.folder)?;
        let mut out = Hashing {
            inner: BufWriter::with_capacity(1 << 20, file),
            hash: Xxh3::new(),
        };
        out.write_all(MAGIC)?;
        out.write_all(&(head.len() as u32).to_le_bytes())?;
        out.write_all(&head)?;
        out.write_all(&bytes_of(snapshot.tokens()))?;
        for part in snapshot.parts() {
            out.write_all(part)?;
        }
        let hash = out.hash.digest128();
        out.inner.write_all(&hash.to_le_bytes())?;
        let file = out
            .inner
            .into_inner()
            .map_err(io::IntoInnerError::into_error)?;
        file.persist(path)?;
        Ok(())
    }

    /// Removes a file that cannot be used, and says so; one that is gone already is no matter.
    fn discard(&mut self, path: &Path, error: &anyhow::Error) {
        let gone = error
            .downcast_ref::<io::Error>()
            .is_some_and(|e| e.kind() == io::ErrorKind::NotFound);
        if !gone {
            let _ = fs::remove_file(path);
            self.notices.push(format!(
                "a saved state was removed: {}: {error:#}",
                path.display()
            ));
        }
    }

    /// All state files: when written, where, how large; the oldest first.
    fn files(&self) -> Vec<(SystemTime, PathBuf, u64)> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let mut files: Vec<_> = entries
            .filter_map(|entry| {
                let path = entry.path();
                path.extension().filter(|e| *e == "state")?;
                let facts = entry.metadata().ok()?;
                Some((facts.modified().ok()?, path, facts.len()))
            })
            .collect();
        files.sort();
        files
    }

    /// Removes the oldest states until `new` more bytes are within the budget.
    fn make_room(&mut self, new: u64) {
        let files = self.files();
        let mut all: u64 = files.iter().map(|file| file.2).sum();
        for (_, path, bytes) in files {
            if all + new <= self.budget {
                return;
            }
            let _ = fs::remove_file(&path);
            self.entries.retain(|e| e.path != path);
            all -= bytes;
        }
    }

    /// Removes what programs that died were writing, and what is beyond the budget.
    fn tidy(&mut self) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let partial = path.extension().is_some_and(|e| e == "partial");
            let written = fs::metadata(&path).and_then(|facts| facts.modified());
            let age = written.map(|at| at.elapsed().unwrap_or_default());
            if partial && age.is_ok_and(|age| age > LEFT_BEHIND) {
                let _ = fs::remove_file(&path);
            }
        }
        self.make_room(0);
    }
}

fn bytes_of(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|t| t.to_le_bytes()).collect()
}

fn hash_of(tokens: &[u32]) -> u64 {
    xxh3_64(&bytes_of(tokens))
}

/// Passes bytes on, and hashes them.
struct Hashing<T> {
    inner: T,
    hash: Xxh3,
}

impl<T: Write> Write for Hashing<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hash.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Hashing<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(bytes)?;
        self.hash.update(&bytes[..n]);
        Ok(n)
    }
}

/// The tokens of a state, the sizes of its parts, and the rest of the file. Nothing larger than the file is allocated.
#[expect(clippy::type_complexity, reason = "used twice, next to this")]
fn open(path: &Path, key: &StateKey) -> Result<(Vec<u32>, Vec<usize>, Hashing<BufReader<File>>)> {
    let file = File::open(path)?;
    let length = usize::try_from(file.metadata()?.len())?;
    let mut input = Hashing {
        inner: BufReader::with_capacity(1 << 20, file),
        hash: Xxh3::new(),
    };
    let mut take = |n: usize| -> Result<Vec<u8>> {
        ensure!(n <= length, "it is cut short");
        let mut bytes = vec![0; n];
        input.read_exact(&mut bytes).context("it is cut short")?;
        Ok(bytes)
    };
    let magic = take(MAGIC.len())?;
    ensure!(magic[..6] == MAGIC[..6], "it is not a saved state");
    ensure!(magic == MAGIC, "it was written by another version");
    let size = take(4)?;
    let size = u32::from_le_bytes([size[0], size[1], size[2], size[3]]) as usize;
    ensure!(size <= MAX_HEAD, "its head is damaged");
    let head: Head = serde_json::from_slice(&take(size)?).context("its head is damaged")?;
    ensure!(head.key == *key, "it belongs to another model or session");
    let before = MAGIC.len() + 4 + size;
    let rest = head.parts.iter().try_fold(
        head.tokens.checked_mul(4).context("its head is damaged")?,
        |sum, n| sum.checked_add(*n),
    );
    ensure!(
        rest.and_then(|rest| rest.checked_add(before + HASH)) == Some(length),
        "its length is not what its head says"
    );
    let tokens: Vec<u32> = take(4 * head.tokens)?
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    ensure!(
        name.ends_with(&format!("-{:016x}", hash_of(&tokens))),
        "its tokens are damaged"
    );
    Ok((tokens, head.parts, input))
}

fn read(path: &Path, key: &StateKey, session: &Session) -> Result<Snapshot> {
    let (tokens, sizes, mut input) = open(path, key)?;
    let mut parts = Vec::with_capacity(sizes.len());
    for size in sizes {
        let mut part = vec![0; size];
        input.read_exact(&mut part).context("it is cut short")?;
        parts.push(part);
    }
    let mut hash = [0; HASH];
    input
        .inner
        .read_exact(&mut hash)
        .context("it is cut short")?;
    if u128::from_le_bytes(hash) != input.hash.digest128() {
        bail!("it is damaged");
    }
    session.snapshot_of(tokens, parts)
}
