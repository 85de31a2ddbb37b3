//! Conversations, kept as files of JSON lines while they go on.
//!
//! The first line says what the file is and holds the system text; every further line is a message. While an answer
//! is written, its beginning is appended now and then as a line marked `partial`, which the next line of an answer
//! replaces: a killed program loses at most what came since. Other changes write the file anew and rename it.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The form of the files.
const FORM: u32 = 1;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
    /// The thinking before it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    /// Only the beginning: the answer was not finished.
    #[serde(default, skip_serializing_if = "is_false")]
    pub partial: bool,
}

/// Creates a file that only this user can read.
fn create_private(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Creates a folder, and those above it, that only this user can enter; one that is there stays as it is.
pub(crate) fn private_folder(path: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

fn is_false(value: &bool) -> bool {
    !value
}

#[derive(Serialize, Deserialize)]
struct Head {
    qrun_chat: u32,
    #[serde(default)]
    system: String,
}

/// A conversation, and the file that it is kept in.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// The system text; empty for none.
    pub system: String,
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    path: Option<PathBuf>,
}

/// A stored conversation, for a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The name that it is loaded by.
    pub name: String,
    /// Its first message.
    pub title: String,
    /// Number of messages.
    pub n_messages: usize,
    /// When it was last written.
    pub written: SystemTime,
}

/// The folder of all conversations.
///
/// # Errors
/// When the system names no place for data.
pub fn folder() -> Result<PathBuf> {
    use etcetera::BaseStrategy as _;
    let base = etcetera::choose_base_strategy().context("finding the data folder")?;
    Ok(base.data_dir().join("qrun/chats"))
}

/// The stored conversations, the newest first. Files that cannot be read are left out.
///
/// # Errors
/// When the folder cannot be read; that there is none is no error.
pub fn list(folder: &Path) -> Result<Vec<Stored>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("reading {}", folder.display())),
    };
    let mut list = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let Some(name) = name_of(&path) else { continue };
        let written = fs::metadata(&path).and_then(|m| m.modified());
        if let (Ok(written), Ok(conversation)) = (written, Conversation::open(&path)) {
            list.push(Stored {
                name,
                title: conversation.title(),
                n_messages: conversation.messages.len(),
                written,
            });
        }
    }
    list.sort_by(|a, b| b.written.cmp(&a.written).then_with(|| a.name.cmp(&b.name)));
    Ok(list)
}

fn name_of(path: &Path) -> Option<String> {
    let named = path.extension().is_some_and(|e| e == "jsonl");
    named.then(|| path.file_stem().map(|n| n.to_string_lossy().into_owned()))?
}

/// Where the conversation of that name is kept.
///
/// # Errors
/// When the name could lead out of the folder.
pub fn path_of(folder: &Path, name: &str) -> Result<PathBuf> {
    let plain = !name.is_empty()
        && name.len() <= 100
        && !name.starts_with('.')
        && !name.contains(['/', '\\', '\0']);
    ensure!(
        plain,
        "`{name}` cannot be a conversation's name; use letters, digits and dashes"
    );
    Ok(folder.join(format!("{name}.jsonl")))
}

impl Conversation {
    /// Reads a conversation. A last line that was cut off is passed over.
    ///
    /// # Errors
    /// When the file cannot be read or is of another kind.
    pub fn open(path: &Path) -> Result<Self> {
        let place = || format!("reading the conversation {}", path.display());
        let text = fs::read_to_string(path).with_context(place)?;
        let mut lines = text.lines();
        let head: Head = serde_json::from_str(lines.next().unwrap_or_default())
            .with_context(|| format!("{} is not a conversation", path.display()))?;
        ensure!(
            head.qrun_chat == FORM,
            "{}: was written by another version (form {})",
            path.display(),
            head.qrun_chat
        );
        let mut messages: Vec<Message> = Vec::new();
        for line in lines {
            let Ok(message) = serde_json::from_str::<Message>(line) else {
                continue;
            };
            if messages.last().is_some_and(|last| last.partial) && message.role == "assistant" {
                messages.pop();
            }
            messages.push(message);
        }
        Ok(Self {
            system: head.system,
            messages,
            path: Some(path.to_owned()),
        })
    }

    /// Its name; empty where it is not kept.
    pub fn name(&self) -> String {
        self.path.as_deref().and_then(name_of).unwrap_or_default()
    }

    /// Its first message, in one line.
    pub fn title(&self) -> String {
        let first = self.messages.iter().find(|m| m.role == "user");
        let text = first.map_or("", |m| m.content.as_str());
        let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        line.chars().take(80).collect()
    }

    /// Keeps it in `folder` from now on, under a name made of its first words.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn keep(&mut self, folder: &Path) -> Result<()> {
        let words: String = self
            .title()
            .chars()
            .map(|c| if c.is_alphanumeric() { c } else { ' ' })
            .collect();
        let words: Vec<&str> = words.split_whitespace().take(6).collect();
        let base: String = words.join("-").to_lowercase().chars().take(40).collect();
        let base = if base.is_empty() {
            "chat".to_owned()
        } else {
            base
        };
        let free = (1..)
            .map(|n| match n {
                1 => base.clone(),
                n => format!("{base}-{n}"),
            })
            .find(|name| !folder.join(format!("{name}.jsonl")).exists());
        self.keep_as(folder, &free.unwrap_or(base))
    }

    /// Keeps it in `folder` from now on, under that name.
    ///
    /// # Errors
    /// When the name cannot be one, or the file cannot be written.
    pub fn keep_as(&mut self, folder: &Path, name: &str) -> Result<()> {
        let path = path_of(folder, name)?;
        private_folder(folder).with_context(|| format!("creating {}", folder.display()))?;
        let before = self.path.replace(path);
        let written = self.write();
        if written.is_err() {
            self.path = before;
        }
        written
    }

    /// Writes all of it, if it is kept.
    ///
    /// # Errors
    /// When the file cannot be written; the one that was there then stays.
    pub fn write(&self) -> Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let head = json!(Head {
            qrun_chat: FORM,
            system: self.system.clone()
        });
        let mut text = format!("{head}\n");
        for message in &self.messages {
            text.push_str(&format!("{}\n", json!(message)));
        }
        let partial = path.with_extension(format!("{}.partial", std::process::id()));
        let written = create_private(&partial)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&partial, path));
        if written.is_err() {
            let _ = fs::remove_file(&partial);
        }
        written.with_context(|| format!("writing {}", path.display()))
    }

    /// Appends a message to the file, if it is kept: a finished one, or the beginning of one that is being written.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn append(&self, message: &Message) -> Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let place = || format!("writing {}", path.display());
        let mut file: File = OpenOptions::new()
            .append(true)
            .open(path)
            .with_context(place)?;
        file.write_all(format!("{}\n", json!(message)).as_bytes())
            .with_context(place)
    }

    /// The messages as chat templates take them.
    pub fn as_messages(&self) -> Value {
        let mut list = Vec::new();
        if !self.system.is_empty() {
            list.push(json!({"role": "system", "content": self.system}));
        }
        for message in &self.messages {
            let mut entry = json!({"role": message.role, "content": message.content});
            if !message.reasoning.is_empty() {
                entry["reasoning_content"] = json!(message.reasoning);
            }
            list.push(entry);
        }
        Value::Array(list)
    }

    /// All of it as a Markdown text.
    pub fn as_markdown(&self) -> String {
        let mut text = String::new();
        if !self.system.is_empty() {
            text.push_str(&format!("> {}\n\n", self.system.replace('\n', "\n> ")));
        }
        for message in &self.messages {
            let who = if message.role == "user" {
                "You"
            } else {
                "Model"
            };
            text.push_str(&format!("## {who}\n\n{}\n\n", message.content));
        }
        text
    }
}
