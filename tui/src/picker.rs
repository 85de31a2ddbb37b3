//! Lists to choose from: stored conversations, models, messages to edit, texts to copy, what was written before.

use crate::action::Action;
use crate::markdown;
use crate::text;
use crate::view::{Role, View};

/// What a list is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Sessions,
    Models,
    Edit,
    Copy,
    History,
}

impl Kind {
    /// The list's title.
    pub fn title(self) -> &'static str {
        match self {
            Kind::Sessions => "Conversations",
            Kind::Models => "Models",
            Kind::Edit => "Edit a message",
            Kind::Copy => "Copy",
            Kind::History => "Written before",
        }
    }

    /// What is said when there is nothing to choose.
    pub fn empty(self) -> &'static str {
        match self {
            Kind::Sessions => "no stored conversation",
            Kind::Models => "no model found; /model FILE takes a path",
            Kind::Edit => "no message to edit",
            Kind::Copy => "no answer to copy",
            Kind::History => "nothing was written before",
        }
    }
}

/// What choosing an item does.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Choice {
    Act(Action),
    /// Edit the message with this id.
    Edit(u64),
    /// Put this into the editor.
    Insert(String),
}

/// A line of a list.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Item {
    pub label: String,
    pub detail: String,
    pub choice: Choice,
}

/// An open list.
#[derive(Clone, Debug)]
pub(crate) struct Picker {
    pub kind: Kind,
    pub filter: String,
    pub selected: usize,
}

impl Picker {
    pub fn new(kind: Kind) -> Self {
        Picker {
            kind,
            filter: String::new(),
            selected: 0,
        }
    }

    /// The items that the filter leaves: every word of it occurs.
    pub fn items(&self, view: &View, history: &[String]) -> Vec<Item> {
        let words: Vec<String> = self
            .filter
            .split_whitespace()
            .map(str::to_lowercase)
            .collect();
        let fits = |item: &Item| {
            let whole = format!("{} {}", item.label, item.detail).to_lowercase();
            words.iter().all(|word| whole.contains(word))
        };
        items(self.kind, view, history)
            .into_iter()
            .filter(fits)
            .collect()
    }
}

fn items(kind: Kind, view: &View, history: &[String]) -> Vec<Item> {
    match kind {
        Kind::Sessions => view
            .sessions
            .iter()
            .map(|s| Item {
                label: text::one_line(if s.title.is_empty() {
                    &s.name
                } else {
                    &s.title
                }),
                detail: format!(
                    "{} · {} {}",
                    text::one_line(&s.when),
                    s.messages,
                    if s.messages == 1 {
                        "message"
                    } else {
                        "messages"
                    }
                ),
                choice: Choice::Act(Action::Load(s.name.clone())),
            })
            .collect(),
        Kind::Models => view
            .models
            .iter()
            .map(|m| Item {
                label: text::one_line(&m.name),
                detail: text::bytes(m.bytes),
                choice: Choice::Act(Action::SetModel(m.path.clone())),
            })
            .collect(),
        Kind::Edit => {
            let mut items: Vec<Item> = view
                .messages
                .iter()
                .filter(|m| m.role == Role::User)
                .enumerate()
                .map(|(i, m)| Item {
                    label: text::one_line(&m.text),
                    detail: format!("message {}", i + 1),
                    choice: Choice::Edit(m.id),
                })
                .collect();
            items.reverse();
            items
        }
        Kind::Copy => view
            .messages
            .iter()
            .rev()
            .filter(|m| m.role == Role::Assistant && !m.text.trim().is_empty())
            .flat_map(|m| {
                let answer = Item {
                    label: text::one_line(&m.text),
                    detail: "answer".into(),
                    choice: Choice::Act(Action::Copy(m.text.clone())),
                };
                let blocks = markdown::code_blocks(&m.text)
                    .into_iter()
                    .map(|(language, code)| Item {
                        label: format!("  {}", text::one_line(&code)),
                        detail: if language.is_empty() {
                            "code".into()
                        } else {
                            text::one_line(&language)
                        },
                        choice: Choice::Act(Action::Copy(code)),
                    });
                std::iter::once(answer).chain(blocks).collect::<Vec<_>>()
            })
            .collect(),
        Kind::History => {
            let mut items: Vec<Item> = Vec::new();
            for entry in history.iter().rev() {
                let item = Item {
                    label: text::one_line(entry),
                    detail: String::new(),
                    choice: Choice::Insert(entry.clone()),
                };
                if !items.contains(&item) {
                    items.push(item);
                }
            }
            items
        }
    }
}
