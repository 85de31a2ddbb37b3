//! Colours: one accent, one dim, three for the zones, and a few for code.
//!
//! Text keeps the terminal's own colours. Nothing is told by colour alone, so that the theme without colours loses nothing.

use ratatui::style::{Color, Modifier, Style};

use crate::view::{Level, Zone};

/// The background that colours are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThemeKind {
    /// Light text on a dark background.
    #[default]
    Dark,
    /// Dark text on a light background.
    Light,
    /// No colours, only bold, dim, underlined and reversed.
    None,
}

/// The styles of the interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Theme {
    /// The background that it is for.
    pub kind: ThemeKind,
}

/// What a piece of code is, for its colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// No colour of its own.
    #[default]
    Plain,
    /// A comment.
    Comment,
    /// A string or character.
    String,
    /// A number or another constant.
    Constant,
    /// A keyword or operator word.
    Keyword,
    /// The name of a function.
    Function,
    /// The name of a type, tag or attribute.
    Type,
}

impl Theme {
    /// The theme of this name: `dark`, `light` or `none`.
    pub fn named(name: &str) -> Option<Theme> {
        let kind = match name {
            "dark" => ThemeKind::Dark,
            "light" => ThemeKind::Light,
            "none" => ThemeKind::None,
            _ => return None,
        };
        Some(Theme { kind })
    }

    /// The theme for these values of the environment: `NO_COLOR` (set and not empty: no colours), `TERM` (`dumb`: none)
    /// and `COLORFGBG` (`15;0`: a dark background; many terminals do not tell).
    pub fn detect(no_color: Option<&str>, term: Option<&str>, colorfgbg: Option<&str>) -> Theme {
        if no_color.is_some_and(|v| !v.is_empty()) || term == Some("dumb") {
            return Theme {
                kind: ThemeKind::None,
            };
        }
        let background = colorfgbg
            .and_then(|v| v.rsplit(';').next())
            .and_then(|v| v.parse::<u8>().ok());
        // Of the sixteen colours 7 and 9 to 15 are light.
        let kind = match background {
            Some(7 | 9..=15) => ThemeKind::Light,
            _ => ThemeKind::Dark,
        };
        Theme { kind }
    }

    fn pick(self, dark: u8, light: u8, none: Modifier) -> Style {
        match self.kind {
            ThemeKind::Dark => Style::new().fg(Color::Indexed(dark)),
            ThemeKind::Light => Style::new().fg(Color::Indexed(light)),
            ThemeKind::None => Style::new().add_modifier(none),
        }
    }

    /// Text.
    pub fn text(self) -> Style {
        Style::new()
    }

    /// The one accent: the user's mark, headings, what is chosen.
    pub fn accent(self) -> Style {
        self.pick(110, 25, Modifier::BOLD)
    }

    /// What is of second rank.
    pub fn dim(self) -> Style {
        self.pick(244, 243, Modifier::DIM)
    }

    /// Lines and unfilled parts of bars.
    pub fn faint(self) -> Style {
        self.pick(239, 250, Modifier::DIM)
    }

    /// Emphasis of a figure or label.
    pub fn strong(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// The line that is chosen in a list.
    pub fn chosen(self) -> Style {
        match self.kind {
            ThemeKind::None => Style::new().add_modifier(Modifier::REVERSED),
            _ => self.accent().add_modifier(Modifier::BOLD),
        }
    }

    /// The colour of a memory zone.
    pub fn zone(self, zone: Zone) -> Style {
        match zone {
            Zone::Green => self.pick(108, 28, Modifier::empty()),
            Zone::Yellow => self.pick(179, 130, Modifier::BOLD),
            Zone::Red => self.pick(167, 124, Modifier::BOLD),
        }
    }

    /// A notice.
    pub fn level(self, level: Level) -> Style {
        match level {
            Level::Info => self.dim(),
            Level::Warning => self.zone(Zone::Yellow),
            Level::Error => self.error(),
        }
    }

    /// An error.
    pub fn error(self) -> Style {
        self.pick(167, 124, Modifier::BOLD)
    }

    /// Code within a text.
    pub fn inline_code(self) -> Style {
        self.pick(180, 94, Modifier::BOLD)
    }

    /// A heading of this level, 1 to 6.
    pub fn heading(self, level: u8) -> Style {
        let style = if level <= 2 {
            self.accent()
        } else {
            Style::new()
        };
        let style = style.add_modifier(Modifier::BOLD);
        if level == 1 && self.kind == ThemeKind::None {
            style.add_modifier(Modifier::UNDERLINED)
        } else {
            style
        }
    }

    /// A link's text.
    pub fn link(self) -> Style {
        self.pick(110, 25, Modifier::UNDERLINED)
            .add_modifier(Modifier::UNDERLINED)
    }

    /// A piece of code in a block.
    pub fn code(self, class: Class) -> Style {
        match class {
            Class::Plain => Style::new(),
            Class::Comment => self.pick(245, 243, Modifier::DIM),
            Class::String => self.pick(150, 64, Modifier::empty()),
            Class::Constant => self.pick(179, 130, Modifier::empty()),
            Class::Keyword => self.pick(176, 90, Modifier::BOLD),
            Class::Function => self.pick(110, 25, Modifier::empty()),
            Class::Type => self.pick(116, 30, Modifier::empty()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_chooses_the_theme() {
        let kind = |a, b, c| Theme::detect(a, b, c).kind;
        assert_eq!(kind(Some("1"), Some("xterm"), None), ThemeKind::None);
        assert_eq!(kind(Some(""), Some("xterm"), None), ThemeKind::Dark);
        assert_eq!(kind(None, Some("dumb"), None), ThemeKind::None);
        assert_eq!(kind(None, None, Some("0;15")), ThemeKind::Light);
        assert_eq!(kind(None, None, Some("15;default;0")), ThemeKind::Dark);
        assert_eq!(kind(None, None, Some("nonsense")), ThemeKind::Dark);
    }

    #[test]
    fn no_colour_is_used_without_colours() {
        let theme = Theme {
            kind: ThemeKind::None,
        };
        let mut styles = vec![
            theme.accent(),
            theme.dim(),
            theme.faint(),
            theme.chosen(),
            theme.error(),
            theme.link(),
        ];
        styles.extend([Zone::Green, Zone::Yellow, Zone::Red].map(|z| theme.zone(z)));
        styles.extend((1..=6).map(|l| theme.heading(l)));
        styles.extend(
            [
                Class::Comment,
                Class::String,
                Class::Constant,
                Class::Keyword,
                Class::Function,
                Class::Type,
            ]
            .map(|c| theme.code(c)),
        );
        assert!(styles.iter().all(|s| s.fg.is_none() && s.bg.is_none()));
    }
}
