//! What `qrun tune` measured for one model on one device, kept in a small file for later runs.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use ggml_metal::Gguf;
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::speculate::Costs;

/// The form of the file; another one is ignored.
const FORM: u32 = 2;
/// Bytes of a model file that identify it, with its length: its metadata lie there.
const IDENTIFYING_BYTES: usize = 1 << 20;

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TuneRecord {
    form: u32,
    key: TuneKey,
    /// What passes take, and drafts from that vocabulary.
    pub costs: Costs,
    /// Size of the draft vocabulary that was fastest; none where it is the whole one.
    pub draft_vocab: Option<usize>,
    /// Every combination that was tried; depth 0 is plain decoding.
    pub tried: Vec<Tried>,
}

/// One combination, over all texts that were generated with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// Tokens guessed before each pass.
    pub depth: usize,
    /// Size of the draft vocabulary, if not the whole one.
    pub draft_vocab: Option<usize>,
    /// Tokens a second: the median over the texts.
    pub tps: f64,
    /// Share of the guesses that were right.
    pub acceptance: f64,
    /// Tokens that a pass gave.
    pub tokens_per_pass: f64,
}

/// What a measurement holds for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TuneKey {
    /// Length and hash of the model file's head.
    pub model: String,
    /// The device.
    pub device: String,
    /// CPU threads.
    pub threads: usize,
    /// Where the weights lie: mapped, copied, or repacked.
    pub layout: String,
    /// Version of qrun and ggml.
    pub version: String,
}

impl TuneKey {
    /// The key of a loaded model.
    pub fn of(engine: &Engine) -> Self {
        let backend = &engine.backends()[0];
        Self {
            model: identity(engine.files().main()),
            device: format!(
                "{} {}",
                backend.device().name(),
                backend.device().description()
            ),
            threads: backend.n_threads(),
            layout: engine.weight_bytes().layout().to_owned(),
            version: version(),
        }
    }

    /// The file that a record with this key is kept in, in the user's cache folder.
    ///
    /// # Errors
    /// When the system names no such folder.
    pub fn path(&self) -> Result<PathBuf> {
        use etcetera::BaseStrategy as _;
        let base = etcetera::choose_base_strategy().context("finding the cache folder")?;
        let text = serde_json::to_string(self)?;
        let name = format!("{:016x}.json", fnv1a(text.bytes()));
        Ok(base.cache_dir().join("qrun/tune").join(name))
    }
}

/// What has to be the same for what was kept to hold.
pub(crate) fn version() -> String {
    format!(
        "{} ggml {}",
        env!("CARGO_PKG_VERSION"),
        ggml_metal::ggml_version()
    )
}

/// A model file by its length and its head: renaming and copying keep it.
pub(crate) fn identity(file: &Gguf) -> String {
    let bytes = file.map().bytes();
    let head = &bytes[..bytes.len().min(IDENTIFYING_BYTES)];
    format!("{}-{:016x}", bytes.len(), fnv1a(head.iter().copied()))
}

/// The 64-bit FNV-1a hash: short, and the same in every version of every compiler.
fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl TuneRecord {
    /// A record of what was measured.
    pub fn new(key: TuneKey, costs: Costs, draft_vocab: Option<usize>, tried: Vec<Tried>) -> Self {
        Self {
            form: FORM,
            key,
            costs,
            draft_vocab,
            tried,
        }
    }

    /// Reads the record of a loaded model; none where there is none.
    ///
    /// # Errors
    /// When there is a file that cannot be read or understood, or that holds for something else.
    pub fn load(key: &TuneKey) -> Result<Option<Self>> {
        let path = key.path()?;
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            // A cache that is someone else's is as good as none.
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied
                ) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
        };
        let record: Self = serde_json::from_str(&text)
            .with_context(|| format!("{}: not a tuning record", path.display()))?;
        ensure!(
            record.form == FORM && record.key == *key,
            "{}: holds for another model, device or version",
            path.display()
        );
        Ok(Some(record))
    }

    /// True where something was measured for the same model file, but on another device, with other threads or by
    /// another version.
    pub fn has_stale(key: &TuneKey) -> bool {
        let folder = key.path().ok();
        let entries = folder.and_then(|path| std::fs::read_dir(path.parent()?).ok());
        entries.into_iter().flatten().flatten().any(|entry| {
            let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
            let record = serde_json::from_str::<Self>(&text);
            record.is_ok_and(|r| r.key.model == key.model && r.key != *key)
        })
    }

    /// Writes the record to its place; returns where that is.
    ///
    /// # Errors
    /// When the folder or the file cannot be written.
    pub fn save(&self) -> Result<PathBuf> {
        let path = self.key.path()?;
        let writing = || format!("writing {}", path.display());
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).with_context(writing)?;
        // A reader never sees half a file.
        let partial = path.with_extension(format!("{}.partial", std::process::id()));
        let text = serde_json::to_string_pretty(self)?;
        let written =
            std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, &path));
        if written.is_err() {
            let _ = std::fs::remove_file(&partial);
        }
        written.with_context(writing)?;
        Ok(path)
    }
}
