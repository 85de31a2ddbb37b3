//! Colours of code, kept from frame to frame: a block that grows is read on from where it ended.

use std::sync::LazyLock;

use syntect::parsing::{ParseState, Scope, ScopeStack, SyntaxReference, SyntaxSet};

use crate::theme::Class;

/// Read when the first code block is drawn, or by [`warm_up`]: it takes tens of milliseconds.
static SYNTAXES: LazyLock<SyntaxSet> = LazyLock::new(SyntaxSet::load_defaults_newlines);

/// Which class a scope gives, the first that fits; a scope further inside wins.
static CLASSES: LazyLock<Vec<(Scope, Class)>> = LazyLock::new(|| {
    [
        ("comment", Class::Comment),
        ("string", Class::String),
        ("constant.other.placeholder", Class::String),
        ("constant", Class::Constant),
        ("keyword.operator.word", Class::Keyword),
        ("keyword.operator", Class::Plain),
        ("keyword", Class::Keyword),
        ("storage.type.function", Class::Keyword),
        ("storage", Class::Keyword),
        ("variable.language", Class::Keyword),
        ("entity.name.function", Class::Function),
        ("support.function", Class::Function),
        ("support.macro", Class::Function),
        ("variable.function", Class::Function),
        ("entity.name", Class::Type),
        ("entity.other.attribute-name", Class::Type),
        ("support.type", Class::Type),
        ("support.class", Class::Type),
    ]
    .into_iter()
    .filter_map(|(name, class)| Some((Scope::new(name).ok()?, class)))
    .collect()
});

/// Lines longer than this, and blocks longer than [`MAX_BYTES`], are drawn plain: the expressions would take too long.
const MAX_LINE: usize = 1000;
const MAX_BYTES: usize = 100_000;
/// Blocks that are kept.
const KEPT: usize = 64;

/// Reads the syntaxes now: for a thread beside the first frame, so that the first code block does not wait for them.
pub fn warm_up() {
    LazyLock::force(&SYNTAXES);
    LazyLock::force(&CLASSES);
}

/// A line of code as classes and their lengths in bytes.
pub type Tokens = Vec<(Class, usize)>;

/// Coloured code blocks.
#[derive(Default)]
pub struct Highlighter {
    blocks: Vec<Block>,
    clock: u64,
}

struct Block {
    language: String,
    /// The code up to the last line end.
    source: String,
    lines: Vec<Tokens>,
    parser: ParseState,
    scopes: ScopeStack,
    used: u64,
}

impl Highlighter {
    /// The classes of each line of `code`; `None` when the language is not known or the code is too long.
    pub fn lines(&mut self, language: &str, code: &str) -> Option<Vec<Tokens>> {
        if language.is_empty() || code.len() > MAX_BYTES {
            return None;
        }
        let syntax = syntax(language)?;
        self.clock += 1;
        let known = self
            .blocks
            .iter()
            .enumerate()
            .filter(|(_, block)| block.language == language && code.starts_with(&block.source))
            .max_by_key(|(_, block)| block.source.len())
            .map(|(i, _)| i);
        let index = match known {
            Some(index) => index,
            None => {
                if self.blocks.len() >= KEPT
                    && let Some(oldest) =
                        (0..self.blocks.len()).min_by_key(|i| self.blocks[*i].used)
                {
                    self.blocks.swap_remove(oldest);
                }
                self.blocks.push(Block {
                    language: language.into(),
                    source: String::new(),
                    lines: Vec::new(),
                    parser: ParseState::new(syntax),
                    scopes: ScopeStack::new(),
                    used: 0,
                });
                self.blocks.len() - 1
            }
        };
        let block = &mut self.blocks[index];
        block.used = self.clock;
        let mut open = None;
        for line in code[block.source.len()..].split_inclusive('\n') {
            if line.ends_with('\n') {
                let tokens = tokens(line, &mut block.parser, &mut block.scopes);
                block.lines.push(tokens);
                block.source.push_str(line);
            } else {
                open = Some(tokens(
                    &format!("{line}\n"),
                    &mut block.parser.clone(),
                    &mut block.scopes.clone(),
                ));
            }
        }
        let mut lines = block.lines.clone();
        lines.extend(open);
        Some(lines)
    }
}

fn syntax(language: &str) -> Option<&'static SyntaxReference> {
    let language = language.to_ascii_lowercase();
    // Names that models use and the syntaxes do not list.
    let name = match language.as_str() {
        "shell" | "console" | "zsh" => "bash",
        "typescript" | "ts" | "tsx" | "jsx" | "javascript" => "js",
        "python3" => "python",
        "jsonl" | "json5" => "json",
        "c++" => "cpp",
        "golang" => "go",
        other => other,
    };
    SYNTAXES.find_syntax_by_token(name)
}

fn tokens(line: &str, parser: &mut ParseState, scopes: &mut ScopeStack) -> Tokens {
    let plain = vec![(Class::Plain, line.len())];
    if line.len() > MAX_LINE {
        return plain;
    }
    let Ok(parsed) = parser.parse_line(line, &SYNTAXES) else {
        return plain;
    };
    let mut out: Tokens = Vec::new();
    let mut push = |class: Class, len: usize| match out.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.0 == class => last.1 += len,
        _ => out.push((class, len)),
    };
    let mut from = 0;
    for (at, change) in parsed {
        let at = at.min(line.len()).max(from);
        push(class(scopes), at - from);
        from = at;
        // A stack that does not fit leaves the colours as they are.
        let _ = scopes.apply(&change);
    }
    push(class(scopes), line.len() - from);
    out
}

fn class(scopes: &ScopeStack) -> Class {
    for scope in scopes.as_slice().iter().rev() {
        if let Some((_, class)) = CLASSES
            .iter()
            .find(|(prefix, _)| prefix.is_prefix_of(*scope))
        {
            return *class;
        }
    }
    Class::Plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(language: &str, code: &str) -> Vec<Vec<(Class, String)>> {
        let lines = Highlighter::default().lines(language, code).unwrap();
        code.split_inclusive('\n')
            .zip(lines)
            .map(|(line, tokens)| {
                let mut from = 0;
                let pieces = tokens.into_iter().map(|(class, len)| {
                    let end = (from + len).min(line.len());
                    let piece = (class, line[from..end].to_string());
                    from = end;
                    piece
                });
                pieces.collect()
            })
            .collect()
    }

    #[test]
    fn keywords_strings_and_comments_have_classes() {
        let lines = classes("rust", "fn main() { // go\n    let s = \"hi\";\n");
        let has = |line: usize, class: Class, text: &str| {
            lines[line]
                .iter()
                .any(|(c, t)| *c == class && t.contains(text))
        };
        assert!(has(0, Class::Keyword, "fn"), "{lines:?}");
        assert!(has(0, Class::Function, "main"));
        assert!(has(0, Class::Comment, "go"));
        assert!(has(1, Class::String, "hi"));
    }

    #[test]
    fn a_block_that_grows_gets_the_same_colours_as_a_whole_one() {
        let code = "/* a\n b */ int x = 1;\nchar *s = \"/*\";\n";
        let mut growing = Highlighter::default();
        let mut last = None;
        for end in 1..=code.len() {
            last = growing.lines("c", &code[..end]);
        }
        assert_eq!(last, Highlighter::default().lines("c", code));
        assert_eq!(growing.blocks.len(), 1);
    }

    #[test]
    fn unknown_languages_and_long_code_are_plain() {
        let mut highlighter = Highlighter::default();
        assert_eq!(highlighter.lines("nonesuch", "x"), None);
        assert_eq!(highlighter.lines("", "x"), None);
        assert_eq!(highlighter.lines("rust", &"x".repeat(MAX_BYTES + 1)), None);
        let long = "x".repeat(MAX_LINE + 1);
        assert_eq!(
            highlighter.lines("rust", &long),
            Some(vec![vec![(Class::Plain, MAX_LINE + 2)]])
        );
    }

    #[test]
    fn the_number_of_kept_blocks_is_bounded() {
        let mut highlighter = Highlighter::default();
        for i in 0..3 * KEPT {
            highlighter.lines("json", &format!("{{\"a\": {i}}}\n"));
        }
        assert!(highlighter.blocks.len() <= KEPT);
    }
}
