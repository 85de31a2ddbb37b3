//! Slash commands: one table, from which parsing, completion and help are made.

use std::path::PathBuf;

use crate::action::{Action, ExportFormat, Sampler};
use crate::view::View;

/// One slash command.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// The name, without the slash.
    pub name: &'static str,
    /// What follows it, for the help.
    pub arguments: &'static str,
    /// What it does, for the help.
    pub help: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Help,
    Model,
    System,
    Think,
    Answer,
    Sampler(Sampler),
    Seed,
    Spec,
    Ctx,
    Regenerate,
    Edit,
    Copy,
    Attach,
    Detach,
    Save,
    Load,
    Export,
    Clear,
    Stats,
    Panel,
    Theme,
    Quit,
}

const fn command(
    name: &'static str,
    arguments: &'static str,
    help: &'static str,
    kind: Kind,
) -> Command {
    Command {
        name,
        arguments,
        help,
        kind,
    }
}

/// All commands, in the order of the help.
pub const COMMANDS: [Command; 30] = [
    command("help", "", "keys and commands", Kind::Help),
    command(
        "model",
        "[FILE]",
        "choose a model, or use this one",
        Kind::Model,
    ),
    command(
        "system",
        "[TEXT]",
        "set the system text; none without TEXT",
        Kind::System,
    ),
    command(
        "think",
        "on|off",
        "think before the answer, or not",
        Kind::Think,
    ),
    command("answer", "", "end thinking and answer now", Kind::Answer),
    command(
        "temp",
        "T",
        "temperature; 0 takes the best token",
        Kind::Sampler(Sampler::Temp),
    ),
    command(
        "top-k",
        "K",
        "keep the K best tokens; 0 is off",
        Kind::Sampler(Sampler::TopK),
    ),
    command(
        "top-p",
        "P",
        "keep the best tokens up to probability P",
        Kind::Sampler(Sampler::TopP),
    ),
    command(
        "min-p",
        "P",
        "keep tokens P times as probable as the best",
        Kind::Sampler(Sampler::MinP),
    ),
    command(
        "typical-p",
        "P",
        "keep the least surprising tokens up to P",
        Kind::Sampler(Sampler::TypicalP),
    ),
    command(
        "repeat-penalty",
        "X",
        "weaken recent tokens; 1 is off",
        Kind::Sampler(Sampler::RepeatPenalty),
    ),
    command(
        "repeat-last-n",
        "N",
        "how many tokens are recent",
        Kind::Sampler(Sampler::RepeatLastN),
    ),
    command(
        "presence-penalty",
        "X",
        "weaken tokens that occurred",
        Kind::Sampler(Sampler::PresencePenalty),
    ),
    command(
        "frequency-penalty",
        "X",
        "weaken tokens by how often they occurred",
        Kind::Sampler(Sampler::FrequencyPenalty),
    ),
    command("seed", "N", "seed of the random numbers", Kind::Seed),
    command(
        "spec",
        "auto|off|N",
        "speculation: measured, none, or N drafts",
        Kind::Spec,
    ),
    command("ctx", "N", "context limit in tokens", Kind::Ctx),
    command(
        "regenerate",
        "",
        "make the last answer again",
        Kind::Regenerate,
    ),
    command(
        "edit",
        "",
        "edit an earlier message and go on from there",
        Kind::Edit,
    ),
    command("copy", "", "copy an answer or a code block", Kind::Copy),
    command(
        "attach",
        "FILE",
        "send a text file with the next message",
        Kind::Attach,
    ),
    command("detach", "", "forget the attached files", Kind::Detach),
    command("save", "[NAME]", "name this conversation", Kind::Save),
    command(
        "load",
        "[NAME]",
        "choose a conversation, or load this one",
        Kind::Load,
    ),
    command(
        "export",
        "md|json [FILE]",
        "write the conversation to a file",
        Kind::Export,
    ),
    command("clear", "", "start a new conversation", Kind::Clear),
    command("stats", "", "all figures", Kind::Stats),
    command("panel", "", "show or hide the live panel", Kind::Panel),
    command(
        "theme",
        "dark|light|none",
        "colours for this background",
        Kind::Theme,
    ),
    command("quit", "", "leave", Kind::Quit),
];

/// What a command does: something for the engine side, or something within the interface.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// For the engine side.
    Act(Action),
    /// Open the help.
    Help,
    /// Open the list of models.
    Models,
    /// Open the list of stored conversations.
    Sessions,
    /// Open the list of messages to edit.
    Edit,
    /// Open the list of texts to copy.
    Copy,
    /// Open the figures.
    Stats,
    /// Show or hide the live panel.
    Panel,
    /// Use the colours of this name.
    Theme(String),
    /// Nothing to do but to say this (a value that was asked for).
    Say(String),
}

/// Whether a message is a command: a slash and a letter, on one line. A path such as `/etc/hosts` is none, nor is `//`.
pub fn is_command(text: &str) -> bool {
    let Some(rest) = text.strip_prefix('/') else {
        return false;
    };
    let name = rest.split_whitespace().next().unwrap_or("");
    rest.starts_with(|c: char| c.is_ascii_alphabetic() || c == '?')
        && !name.contains('/')
        && !text.trim_end().contains('\n')
}

/// Reads a line that begins with a slash.
///
/// # Errors
/// One line that says what is wrong and what is expected.
pub fn parse(line: &str, view: &View) -> Result<Outcome, String> {
    let line = line.trim();
    let body = line.strip_prefix('/').unwrap_or(line);
    let (name, argument) = body.split_once(char::is_whitespace).unwrap_or((body, ""));
    let argument = argument.trim();
    let command = find(name)?;
    let none = || -> Result<(), String> {
        if argument.is_empty() {
            Ok(())
        } else {
            Err(format!(
                "/{} takes nothing after it, got `{argument}`",
                command.name
            ))
        }
    };
    let usage = || format!("usage: /{} {}", command.name, command.arguments);
    let act = |action| Ok(Outcome::Act(action));
    match command.kind {
        Kind::Help => none().map(|()| Outcome::Help),
        Kind::Model if argument.is_empty() => Ok(Outcome::Models),
        Kind::Model => act(Action::SetModel(argument.into())),
        Kind::System => act(Action::System(argument.into())),
        Kind::Think => match argument {
            "on" => act(Action::Think(true)),
            "off" => act(Action::Think(false)),
            "" => Ok(Outcome::Say(format!(
                "thinking is {}",
                if view.settings.think { "on" } else { "off" }
            ))),
            other => Err(format!("/think is `on` or `off`, got `{other}`")),
        },
        Kind::Answer => none().and_then(|()| act(Action::EndThinking)),
        Kind::Sampler(sampler) if argument.is_empty() => {
            let value = view
                .settings
                .samplers
                .iter()
                .find(|(name, _)| name == sampler.name());
            match value {
                Some((name, value)) => Ok(Outcome::Say(format!("{name} is {value}"))),
                None => Err(usage()),
            }
        }
        Kind::Sampler(sampler) => sampler_value(sampler, argument)
            .and_then(|value| act(Action::SetSampler { sampler, value })),
        Kind::Seed => match argument.parse() {
            Ok(seed) => act(Action::Seed(seed)),
            Err(_) if argument.is_empty() => Err(usage()),
            Err(_) => Err(format!("/seed is a whole number from 0, got `{argument}`")),
        },
        Kind::Spec if argument.is_empty() && !view.settings.spec.is_empty() => Ok(Outcome::Say(
            format!("speculation is {}", view.settings.spec),
        )),
        Kind::Spec => match argument {
            "auto" | "off" => act(Action::Spec(argument.into())),
            depth if depth.parse().is_ok_and(|d: u32| (1..=16).contains(&d)) => {
                act(Action::Spec(argument.into()))
            }
            "" => Err(usage()),
            other => Err(format!(
                "/spec is `auto`, `off` or a depth from 1 to 16, got `{other}`"
            )),
        },
        Kind::Ctx => match argument.replace([',', '_'], "").parse() {
            Ok(n) if n > 0 => act(Action::Ctx(n)),
            _ if argument.is_empty() => match view.live.context {
                Some(context) => Ok(Outcome::Say(format!(
                    "context is {} tokens",
                    crate::text::count(context.limit)
                ))),
                None => Err(usage()),
            },
            _ => Err(format!("/ctx is a number of tokens, got `{argument}`")),
        },
        Kind::Regenerate => none().and_then(|()| act(Action::Regenerate)),
        Kind::Edit => none().map(|()| Outcome::Edit),
        Kind::Copy => none().map(|()| Outcome::Copy),
        Kind::Attach if argument.is_empty() => Err(usage()),
        Kind::Attach => act(Action::Attach(PathBuf::from(unquote(argument)))),
        Kind::Detach => none().and_then(|()| act(Action::Detach)),
        Kind::Save => act(Action::Save(
            (!argument.is_empty()).then(|| argument.into()),
        )),
        Kind::Load if argument.is_empty() => Ok(Outcome::Sessions),
        Kind::Load => act(Action::Load(argument.into())),
        Kind::Export => {
            let (format, path) = argument
                .split_once(char::is_whitespace)
                .unwrap_or((argument, ""));
            let format = match format {
                "md" => ExportFormat::Markdown,
                "json" => ExportFormat::Json,
                "" => return Err(usage()),
                other => return Err(format!("/export is `md` or `json`, got `{other}`")),
            };
            let path = unquote(path.trim());
            act(Action::Export {
                format,
                path: (!path.is_empty()).then(|| PathBuf::from(path)),
            })
        }
        Kind::Clear => none().and_then(|()| act(Action::Clear)),
        Kind::Stats => none().map(|()| Outcome::Stats),
        Kind::Panel => none().map(|()| Outcome::Panel),
        Kind::Theme => match argument {
            "dark" | "light" | "none" => Ok(Outcome::Theme(argument.into())),
            "" => Err(usage()),
            other => Err(format!(
                "/theme is `dark`, `light` or `none`, got `{other}`"
            )),
        },
        Kind::Quit => none().and_then(|()| act(Action::Quit)),
    }
}

/// The command of this name; a beginning that fits only one is enough.
fn find(name: &str) -> Result<Command, String> {
    let name = match name {
        "?" | "h" => "help",
        "exit" | "q" | "bye" => "quit",
        "new" => "clear",
        "retry" => "regenerate",
        other => other,
    };
    let fitting: Vec<Command> = COMMANDS
        .iter()
        .copied()
        .filter(|c| c.name.starts_with(name))
        .collect();
    if let Some(exact) = fitting.iter().find(|c| c.name == name) {
        return Ok(*exact);
    }
    match fitting.as_slice() {
        [one] => Ok(*one),
        [] => Err(match nearest(name) {
            Some(near) => format!("no command /{name}; did you mean /{near}? (/help lists them)"),
            None => format!("no command /{name}; /help lists them"),
        }),
        several => {
            let names: Vec<String> = several.iter().map(|c| format!("/{}", c.name)).collect();
            Err(format!("/{name} could be {}", names.join(", ")))
        }
    }
}

/// The command that is one or two typing mistakes away.
fn nearest(name: &str) -> Option<&'static str> {
    COMMANDS
        .iter()
        .map(|c| (distance(name, c.name), c.name))
        .min()
        .filter(|(d, n)| *d <= 2 && *d < n.len())
        .map(|(_, n)| n)
}

/// Insertions, deletions and replacements between two words (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

fn sampler_value(sampler: Sampler, text: &str) -> Result<f64, String> {
    let (low, high) = sampler.range();
    let kind = if sampler.is_whole() {
        "a whole number"
    } else {
        "a number"
    };
    match text.parse::<f64>() {
        Ok(value)
            if (low..=high).contains(&value) && (!sampler.is_whole() || value.fract() == 0.0) =>
        {
            Ok(value)
        }
        _ => Err(format!(
            "/{} is {kind} from {low} to {high}, got `{text}`",
            sampler.name()
        )),
    }
}

/// Without the quotes that a dropped file's path may have around it.
fn unquote(text: &str) -> &str {
    for quote in ['\'', '"'] {
        if let Some(inner) = text.strip_prefix(quote).and_then(|t| t.strip_suffix(quote)) {
            return inner;
        }
    }
    text
}

/// A way to go on with a line that begins with a slash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The line as it would be.
    pub line: String,
    /// What is shown in the list.
    pub label: String,
    /// What it does.
    pub help: String,
}

/// The ways to go on with `line`, best first; empty when it is no beginning of a command.
pub fn completions(line: &str, view: &View) -> Vec<Completion> {
    let Some(body) = line.strip_prefix('/') else {
        return Vec::new();
    };
    if line.contains('\n') {
        return Vec::new();
    }
    let Some((name, typed)) = body.split_once(' ') else {
        return COMMANDS
            .iter()
            .filter(|c| c.name.starts_with(body))
            .map(|c| Completion {
                line: if c.arguments.is_empty() {
                    format!("/{}", c.name)
                } else {
                    format!("/{} ", c.name)
                },
                label: format!("/{} {}", c.name, c.arguments).trim_end().into(),
                help: c.help.into(),
            })
            .collect();
    };
    let Ok(command) = find(name) else {
        return Vec::new();
    };
    let words = |words: &[&str]| {
        words
            .iter()
            .map(|w| (w.to_string(), String::new()))
            .collect::<Vec<_>>()
    };
    let values: Vec<(String, String)> = match command.kind {
        Kind::Think => words(&["on", "off"]),
        Kind::Spec => words(&["auto", "off"]),
        Kind::Export => words(&["md", "json"]),
        Kind::Theme => words(&["dark", "light", "none"]),
        Kind::Model => view
            .models
            .iter()
            .map(|m| (m.path.clone(), m.name.clone()))
            .collect(),
        Kind::Load => view
            .sessions
            .iter()
            .map(|s| (s.name.clone(), s.title.clone()))
            .collect(),
        _ => Vec::new(),
    };
    values
        .into_iter()
        .filter(|(value, _)| value.starts_with(typed) && value != typed)
        .map(|(value, help)| Completion {
            line: format!("/{} {value}", command.name),
            label: value,
            help,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Outcome, String> {
        parse(line, &View::default())
    }

    #[test]
    fn every_command_is_found_by_its_name_and_names_are_unique() {
        for (i, command) in COMMANDS.iter().enumerate() {
            assert_eq!(find(command.name).unwrap().name, command.name);
            assert!(
                COMMANDS[i + 1..].iter().all(|c| c.name != command.name),
                "{}",
                command.name
            );
            assert!(!command.help.is_empty());
        }
    }

    #[test]
    fn commands_become_actions() {
        let act = |line: &str| match parsed(line).unwrap() {
            Outcome::Act(action) => action,
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(act("/think on"), Action::Think(true));
        assert_eq!(
            act("/temp 0.7"),
            Action::SetSampler {
                sampler: Sampler::Temp,
                value: 0.7
            }
        );
        assert_eq!(
            act("/top-k 20"),
            Action::SetSampler {
                sampler: Sampler::TopK,
                value: 20.0
            }
        );
        assert_eq!(
            act("/presence-penalty -0.5"),
            Action::SetSampler {
                sampler: Sampler::PresencePenalty,
                value: -0.5
            }
        );
        assert_eq!(act("/ctx 32,768"), Action::Ctx(32768));
        assert_eq!(act("/spec 3"), Action::Spec("3".into()));
        assert_eq!(act("/system  be brief "), Action::System("be brief".into()));
        assert_eq!(act("/save"), Action::Save(None));
        assert_eq!(
            act("/attach '/tmp/a b.txt'"),
            Action::Attach("/tmp/a b.txt".into())
        );
        assert_eq!(
            act("/export json out.json"),
            Action::Export {
                format: ExportFormat::Json,
                path: Some("out.json".into())
            }
        );
        assert_eq!(
            act("/export md"),
            Action::Export {
                format: ExportFormat::Markdown,
                path: None
            }
        );
        assert_eq!(act("/model a.gguf"), Action::SetModel("a.gguf".into()));
        assert_eq!(act("/seed 7"), Action::Seed(7));
        assert_eq!(act("/exit"), Action::Quit);
        assert_eq!(act("/reg"), Action::Regenerate);
        assert_eq!(parsed("/model").unwrap(), Outcome::Models);
        assert_eq!(parsed("/?").unwrap(), Outcome::Help);
    }

    #[test]
    fn mistakes_are_answered_with_what_is_expected() {
        let error = |line: &str| parsed(line).unwrap_err();
        assert_eq!(
            error("/tmep 1"),
            "no command /tmep; did you mean /temp? (/help lists them)"
        );
        assert_eq!(error("/xyzzy"), "no command /xyzzy; /help lists them");
        assert_eq!(
            error("/temp hot"),
            "/temp is a number from 0 to 10, got `hot`"
        );
        assert_eq!(
            error("/temp NaN"),
            "/temp is a number from 0 to 10, got `NaN`"
        );
        assert_eq!(
            error("/top-k 1.5"),
            "/top-k is a whole number from 0 to 1000000, got `1.5`"
        );
        assert_eq!(
            error("/think maybe"),
            "/think is `on` or `off`, got `maybe`"
        );
        assert_eq!(
            error("/spec 99"),
            "/spec is `auto`, `off` or a depth from 1 to 16, got `99`"
        );
        assert_eq!(error("/ctx lots"), "/ctx is a number of tokens, got `lots`");
        assert_eq!(error("/export pdf"), "/export is `md` or `json`, got `pdf`");
        assert_eq!(error("/attach"), "usage: /attach FILE");
        assert_eq!(
            error("/clear all"),
            "/clear takes nothing after it, got `all`"
        );
        assert!(error("/s").starts_with("/s could be /system, "));
    }

    #[test]
    fn a_value_is_said_when_none_is_given() {
        let mut view = View::default();
        view.settings.samplers.push(("temp".into(), "0.6".into()));
        assert_eq!(
            parse("/temp", &view).unwrap(),
            Outcome::Say("temp is 0.6".into())
        );
        assert_eq!(
            parse("/think", &view).unwrap(),
            Outcome::Say("thinking is off".into())
        );
    }

    #[test]
    fn paths_and_several_lines_are_messages() {
        assert!(is_command("/help"));
        assert!(is_command("/tmep 1"));
        assert!(!is_command("/etc/hosts is what?"));
        assert!(!is_command("// a comment"));
        assert!(!is_command("/help\nme"));
        assert!(!is_command("/ "));
        assert!(!is_command("help"));
    }

    #[test]
    fn completions_come_from_the_table_and_the_view() {
        let mut view = View::default();
        let lines = |line: &str, view: &View| {
            completions(line, view)
                .into_iter()
                .map(|c| c.line)
                .collect::<Vec<_>>()
        };
        assert_eq!(lines("/", &view).len(), COMMANDS.len());
        assert_eq!(lines("/te", &view), ["/temp "]);
        assert_eq!(lines("/think ", &view), ["/think on", "/think off"]);
        assert_eq!(lines("/think o", &view), ["/think on", "/think off"]);
        assert!(lines("/think on", &view).is_empty());
        view.models.push(crate::view::ModelEntry {
            path: "a b.gguf".into(),
            ..Default::default()
        });
        assert_eq!(lines("/model a", &view), ["/model a b.gguf"]);
        assert!(lines("hello", &view).is_empty());
    }
}
