//! Figures as lines: bars, sparklines, plots, and the sections that the live panel and the watch screen share.

use ratatui::style::Style;
use ratatui::text::{Line, Span};

use crate::text;
use crate::theme::Theme;
use crate::view::{Context, Live, Memory, Prompt, Reuse, Round, Speculation, Thermal, Zone};

/// Glyphs of the parts of a stacked bar: they differ without colours.
pub const PARTS: [&str; 6] = ["█", "▓", "▒", "░", "▚", "∙"];

const EIGHTHS: [&str; 9] = [" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];

/// Label at the left margin, value at the right one.
pub fn row(label: &str, value: &str, width: usize, theme: Theme) -> Line<'static> {
    row_styled(
        label,
        Span::styled(value.to_string(), theme.text()),
        width,
        theme,
    )
}

/// As [`row`], with a style for the value.
pub fn row_styled(label: &str, value: Span<'static>, width: usize, theme: Theme) -> Line<'static> {
    text::between(
        vec![Span::styled(label.to_string(), theme.dim())],
        vec![value],
        width,
    )
}

/// The head of a section: its name, and its main figure.
pub fn head(label: &str, value: Span<'static>, width: usize, theme: Theme) -> Line<'static> {
    text::between(
        vec![Span::styled(label.to_string(), theme.strong())],
        vec![value],
        width,
    )
}

/// A bar that is filled to `share` (0 to 1) of `width` cells.
pub fn bar(share: f32, width: usize, style: Style, theme: Theme) -> Vec<Span<'static>> {
    let filled = (share_of(share) * width as f32).round() as usize;
    let filled = filled.min(width);
    vec![
        Span::styled("━".repeat(filled), style),
        Span::styled("─".repeat(width - filled), theme.faint()),
    ]
}

fn share_of(share: f32) -> f32 {
    if share.is_finite() {
        share.clamp(0.0, 1.0)
    } else {
        0.0
    }
}

/// One row of bars, the newest values at the right, scaled to the greatest of them.
pub fn sparkline(values: &[f32], width: usize, greatest: f32, style: Style) -> Span<'static> {
    let shown = &values[values.len().saturating_sub(width)..];
    let mut out = " ".repeat(width - shown.len());
    for value in shown {
        out.push_str(eighths(*value, greatest, 8));
    }
    Span::styled(out, style)
}

/// The glyph for a value, at least the lowest one when there is a value at all.
fn eighths(value: f32, greatest: f32, steps: usize) -> &'static str {
    if !value.is_finite() || value <= 0.0 || greatest <= 0.0 {
        return EIGHTHS[0];
    }
    let level = (value / greatest * steps as f32).ceil().clamp(1.0, 8.0);
    EIGHTHS[level as usize]
}

/// The greatest finite value.
pub fn greatest(values: &[f32]) -> f32 {
    values
        .iter()
        .copied()
        .filter(|v| v.is_finite())
        .fold(0.0, f32::max)
}

/// `values` put into `width` slots of equal length, each the mean of what falls into it; fewer values stay as they are.
pub fn squeezed(values: &[f32], width: usize) -> Vec<f32> {
    if values.len() <= width || width == 0 {
        return values.to_vec();
    }
    (0..width)
        .map(|slot| {
            let (from, to) = (
                slot * values.len() / width,
                (slot + 1) * values.len() / width,
            );
            let known: Vec<f32> = values[from..to]
                .iter()
                .copied()
                .filter(|v| v.is_finite())
                .collect();
            if known.is_empty() {
                f32::NAN
            } else {
                known.iter().sum::<f32>() / known.len() as f32
            }
        })
        .collect()
}

/// A history to be drawn as columns.
pub struct Plot<'a> {
    /// Values, the newest last.
    pub values: &'a [f32],
    /// What the upper edge stands for.
    pub scale: f32,
    /// Rows.
    pub height: usize,
    /// Whether the figures at the left margin are shares.
    pub percent: bool,
}

impl Plot<'_> {
    /// The plot's lines, `width` cells each; `style` gives that of each column.
    pub fn lines(
        &self,
        width: usize,
        style: impl Fn(usize) -> Style,
        theme: Theme,
    ) -> Vec<Line<'static>> {
        let label = |value: f32| {
            if self.percent {
                text::percent(value, true)
            } else {
                text::count(value.round() as u64)
            }
        };
        let Some(room) = width.checked_sub(PLOT_MARGIN).filter(|r| *r > 0) else {
            return Vec::new();
        };
        let values = squeezed(self.values, room);
        let height = self.height;
        (0..height)
            .map(|y| {
                let from_below = height - 1 - y;
                let text = match y {
                    0 => label(self.scale),
                    _ if from_below == 0 => label(0.0),
                    _ => String::new(),
                };
                let text = text::fit(&text, PLOT_MARGIN - 1).into_owned();
                let mut spans = vec![Span::styled(
                    format!("{text:>margin$} ", margin = PLOT_MARGIN - 1),
                    theme.dim(),
                )];
                spans.push(Span::raw(" ".repeat(room - values.len())));
                for (i, value) in values.iter().enumerate() {
                    // In eighths of a row, counted from this row's lower edge.
                    let known = value.is_finite() && self.scale > 0.0;
                    let level = if known {
                        (value / self.scale * height as f32 * 8.0).round()
                    } else {
                        0.0
                    };
                    let level = (level - from_below as f32 * 8.0).clamp(0.0, 8.0) as usize;
                    let level = if from_below == 0 && *value > 0.0 {
                        level.max(1)
                    } else {
                        level
                    };
                    let style = style(i);
                    match spans.last_mut() {
                        Some(last) if i > 0 && last.style == style => {
                            last.content.to_mut().push_str(EIGHTHS[level])
                        }
                        _ => spans.push(Span::styled(EIGHTHS[level], style)),
                    }
                }
                Line::from(spans)
            })
            .collect()
    }
}

/// Cells of the figures at the left of a plot, and the space behind them.
pub const PLOT_MARGIN: usize = 8;

/// A bar of parts side by side, in `width` cells for `total`; what is left is drawn faint.
pub fn stacked(
    parts: &[(f64, Style, &'static str)],
    total: f64,
    width: usize,
    theme: Theme,
) -> Line<'static> {
    let mut spans = Vec::new();
    let mut used = 0;
    let mut sum = 0.0;
    for (value, style, glyph) in parts {
        if !value.is_finite() || *value <= 0.0 || total <= 0.0 {
            continue;
        }
        sum += value;
        let to = ((sum / total * width as f64).round() as usize).min(width);
        spans.push(Span::styled(glyph.repeat(to.saturating_sub(used)), *style));
        used = used.max(to);
    }
    spans.push(Span::styled("─".repeat(width - used), theme.faint()));
    Line::from(spans)
}

/// A group of lines that belong together.
pub struct Section {
    /// Sections of low rank give way first where there is little room.
    pub rank: u8,
    /// The lines.
    pub lines: Vec<Line<'static>>,
    /// What is left of them where there is little room.
    pub short: usize,
}

/// The sections that fit into `height` rows, with an empty line between them. Where there is little room the least
/// important ones go, and the most important ones keep their details.
pub fn fitted(mut sections: Vec<Section>, height: usize) -> Vec<Line<'static>> {
    sections.retain(|s| !s.lines.is_empty());
    let short = |s: &Section| s.short.clamp(1, s.lines.len());
    let mut ranks: Vec<u8> = sections.iter().map(|s| s.rank).collect();
    ranks.sort_unstable();
    let total = |sections: &[Section]| {
        sections
            .iter()
            .map(|s| short(s) + 1)
            .sum::<usize>()
            .saturating_sub(1)
    };
    for rank in ranks.iter().rev() {
        if total(&sections) <= height || sections.len() == 1 {
            break;
        }
        sections.retain(|s| s.rank != *rank);
    }
    let mut room = height.saturating_sub(total(&sections));
    for rank in &ranks {
        for section in sections.iter_mut().filter(|s| s.rank == *rank) {
            let more = section.lines.len() - short(section);
            if more <= room {
                room -= more;
                section.short = section.lines.len();
            }
        }
    }
    let mut lines = Vec::new();
    for mut section in sections {
        if !lines.is_empty() {
            lines.push(Line::default());
        }
        section.lines.truncate(section.short.max(1));
        lines.append(&mut section.lines);
    }
    lines.truncate(height);
    lines
}

/// The live panel's sections.
pub fn sections(live: &Live, width: usize, theme: Theme) -> Vec<Section> {
    vec![
        Section {
            rank: 0,
            lines: decode(live, width, theme),
            short: 2,
        },
        Section {
            rank: 3,
            lines: prompt(live.prompt.as_ref(), live.reuse.as_ref(), width, theme),
            short: 2,
        },
        Section {
            rank: 4,
            lines: speculation(&live.speculation, width, theme),
            short: 3,
        },
        Section {
            rank: 1,
            lines: context(live.context.as_ref(), width, theme),
            short: 2,
        },
        Section {
            rank: 2,
            lines: memory(live.memory.as_ref(), width, theme),
            short: 2,
        },
        Section {
            rank: 5,
            lines: thermal(live.thermal.as_ref(), width, theme),
            short: 1,
        },
    ]
}

/// Decode speed now and before.
pub fn decode(live: &Live, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let value = match live.decode_tps {
        Some(tps) => Span::styled(format!("{} tok/s", text::speed(tps)), theme.accent()),
        None => Span::styled("– tok/s", theme.dim()),
    };
    let mut lines = vec![head("decode", value, width, theme)];
    if !live.decode_history.is_empty() {
        let scale = greatest(&live.decode_history);
        lines.push(Line::from(sparkline(
            &live.decode_history,
            width,
            scale,
            theme.accent(),
        )));
    }
    lines
}

/// The prompt's progress and what of it was reused.
pub fn prompt(
    prompt: Option<&Prompt>,
    reuse: Option<&Reuse>,
    width: usize,
    theme: Theme,
) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if let Some(prompt) = prompt {
        let speed = Span::styled(format!("{} tok/s", text::speed(prompt.tps)), theme.text());
        lines.push(head("prompt", speed, width, theme));
        let progress = format!(
            "{} of {} tokens",
            text::count(prompt.done),
            text::count(prompt.total)
        );
        if prompt.done < prompt.total {
            let share = prompt.done as f32 / prompt.total as f32;
            let figure = format!(" {:>5}", text::percent(share, true));
            let mut spans = bar(
                share,
                width.saturating_sub(text::width(&figure)),
                theme.accent(),
                theme,
            );
            spans.push(Span::styled(figure, theme.dim()));
            lines.push(Line::from(spans));
            lines.push(Line::from(Span::styled(progress, theme.dim())));
        } else {
            let unit = if prompt.total == 1 { "token" } else { "tokens" };
            lines.push(row(
                "processed",
                &format!("{} {unit}", text::count(prompt.total)),
                width,
                theme,
            ));
        }
    }
    match reuse {
        Some(Reuse::Reused { reused, total }) => {
            let text = format!(
                "reused {} of {} tokens",
                text::count(*reused),
                text::count(*total)
            );
            lines.push(Line::from(Span::styled(text, theme.dim())));
        }
        Some(Reuse::None(why)) => {
            lines.extend(dim_lines(&format!("nothing reused: {why}"), width, theme))
        }
        None => {}
    }
    lines
}

fn dim_lines(text: &str, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let text = text::one_line(text);
    text::wrap(&[Span::styled(text, theme.dim())], width)
        .into_iter()
        .take(3)
        .map(Line::from)
        .collect()
}

/// Depth, why, and what comes of it.
pub fn speculation(spec: &Speculation, width: usize, theme: Theme) -> Vec<Line<'static>> {
    if *spec == Speculation::default() {
        return Vec::new();
    }
    let value = match spec.depth {
        Some(depth) => Span::styled(format!("depth {depth}"), theme.text()),
        None => Span::styled("off", theme.dim()),
    };
    let mut lines = vec![head("speculation", value, width, theme)];
    if !spec.reason.is_empty() {
        lines.extend(dim_lines(&spec.reason, width, theme));
    }
    if let Some(tokens) = spec.tokens_per_pass {
        lines.push(row(
            "tokens per pass",
            &format!("{tokens:.2}"),
            width,
            theme,
        ));
    }
    if let Some(acceptance) = spec.acceptance {
        lines.push(row(
            "accepted",
            &text::percent(acceptance, false),
            width,
            theme,
        ));
    }
    lines.extend(by_position(&spec.by_position, width, theme));
    lines
}

/// Acceptance of the first, second, ... draft.
pub fn by_position(shares: &[f32], width: usize, theme: Theme) -> Vec<Line<'static>> {
    let line = |(i, share): (usize, &f32)| {
        let label = format!("{:>3} ", i + 1);
        let figure = format!(" {:>5}", text::percent(*share, true));
        let room = width.saturating_sub(text::width(&label) + text::width(&figure));
        let mut spans = vec![Span::styled(label, theme.dim())];
        spans.extend(bar(*share, room, theme.accent(), theme));
        spans.push(Span::styled(figure, theme.text()));
        Line::from(spans)
    };
    shares.iter().enumerate().map(line).collect()
}

/// How full the context is.
pub fn context(context: Option<&Context>, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let Some(context) = context else {
        return Vec::new();
    };
    let share = if context.limit == 0 {
        0.0
    } else {
        context.used as f32 / context.limit as f32
    };
    let style = match share {
        s if s < 0.7 => theme.accent(),
        s if s < 0.85 => theme.zone(Zone::Yellow),
        _ => theme.zone(Zone::Red),
    };
    let figure = format!(
        "{} / {}",
        text::count(context.used),
        text::count(context.limit)
    );
    vec![
        head("context", Span::styled(figure, theme.text()), width, theme),
        Line::from(bar(share, width, style, theme)),
        row(
            "keys and values",
            &text::bytes(context.kv_bytes),
            width,
            theme,
        ),
    ]
}

/// The word for a zone.
pub fn zone_name(zone: Zone) -> &'static str {
    match zone {
        Zone::Green => "green",
        Zone::Yellow => "yellow",
        Zone::Red => "red",
    }
}

/// Zone, gauge and parts.
pub fn memory(memory: Option<&Memory>, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let Some(memory) = memory else {
        return Vec::new();
    };
    let share = if memory.total == 0 {
        0.0
    } else {
        memory.used() as f32 / memory.total as f32
    };
    let figure = format!(
        "● {}  {}",
        zone_name(memory.zone),
        text::percent(share, true)
    );
    let mut lines = vec![head(
        "memory",
        Span::styled(figure, theme.zone(memory.zone)),
        width,
        theme,
    )];
    // The zone's colour for what is ours; other programs stay in the background.
    let part_style = |i: usize| {
        if i < 5 {
            theme.zone(memory.zone)
        } else {
            theme.faint()
        }
    };
    let parts: Vec<(f64, Style, &'static str)> = memory
        .parts()
        .iter()
        .enumerate()
        .map(|(i, (_, bytes))| (*bytes as f64, part_style(i), PARTS[i]))
        .collect();
    lines.push(stacked(&parts, memory.total as f64, width, theme));
    for (i, (name, bytes)) in memory
        .parts()
        .into_iter()
        .enumerate()
        .filter(|(_, (_, bytes))| *bytes > 0)
    {
        let label = vec![
            Span::styled(format!("{} ", PARTS[i]), part_style(i)),
            Span::styled(name, theme.dim()),
        ];
        lines.push(text::between(
            label,
            vec![Span::raw(text::bytes(bytes))],
            width,
        ));
    }
    let total = format!(
        "{} of {}",
        text::bytes(memory.used()),
        text::bytes(memory.total)
    );
    lines.push(row("in use", &total, width, theme));
    if let Some(room) = memory.room_tokens {
        let text = match room {
            0 => "no room for more tokens".to_string(),
            room => format!("room for {} more tokens", text::count(room)),
        };
        lines.push(Line::from(Span::styled(
            text,
            if room == 0 {
                theme.zone(Zone::Red)
            } else {
                theme.dim()
            },
        )));
    }
    lines
}

/// The system's word for the heat, and what it costs.
pub fn thermal(thermal: Option<&Thermal>, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let Some(thermal) = thermal else {
        return Vec::new();
    };
    let word = if thermal.state.is_empty() {
        "not told"
    } else {
        thermal.state.as_str()
    };
    let style = match word {
        "nominal" => theme.text(),
        "fair" => theme.zone(Zone::Yellow),
        "serious" | "critical" => theme.zone(Zone::Red),
        _ => theme.dim(),
    };
    let mut lines = vec![head(
        "thermal",
        Span::styled(text::one_line(word), style),
        width,
        theme,
    )];
    if let Some(change) = thermal.change.filter(|c| c.is_finite()) {
        lines.push(row(
            "against the first minute",
            &signed_percent(change),
            width,
            theme,
        ));
    }
    lines
}

/// `+3 %`, `−12 %`, `±0 %`.
pub fn signed_percent(share: f32) -> String {
    let percent = (share * 100.0).round();
    match percent {
        p if p > 0.0 => format!("+{p:.0} %"),
        p if p < 0.0 => format!("−{:.0} %", -p),
        _ => "±0 %".into(),
    }
}

/// Where the time of a round goes: a stacked bar and its parts.
pub fn round(round: Option<&Round>, width: usize, theme: Theme) -> Vec<Line<'static>> {
    let Some(round) = round else {
        return Vec::new();
    };
    let total: f32 = round.parts().iter().map(|p| p.1.max(0.0)).sum();
    let mut lines = vec![head(
        "time of a round",
        Span::raw(text::duration(total)),
        width,
        theme,
    )];
    let parts: Vec<(f64, Style, &'static str)> = round
        .parts()
        .iter()
        .enumerate()
        .map(|(i, (_, ms))| (f64::from(*ms), theme.accent(), PARTS[i]))
        .collect();
    lines.push(stacked(&parts, f64::from(total), width, theme));
    for (i, (name, ms)) in round.parts().into_iter().enumerate() {
        let label = vec![
            Span::styled(format!("{} ", PARTS[i]), theme.accent()),
            Span::styled(name, theme.dim()),
        ];
        let share = if total > 0.0 { ms / total } else { 0.0 };
        let figure = format!("{} {:>6}", text::duration(ms), text::percent(share, true));
        lines.push(text::between(label, vec![Span::raw(figure)], width));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::theme::ThemeKind;

    const THEME: Theme = Theme {
        kind: ThemeKind::None,
    };

    fn text_of(line: &Line) -> String {
        line.spans.iter().map(|s| s.content.as_ref()).collect()
    }

    #[test]
    fn bars_are_exactly_as_wide_as_asked() {
        for share in [-1.0, 0.0, 0.3, 0.999, 1.0, 7.0, f32::NAN, f32::INFINITY] {
            for width in [0, 1, 7, 30] {
                assert_eq!(
                    text::spans_width(&bar(share, width, Style::new(), THEME)),
                    width
                );
            }
        }
    }

    #[test]
    fn a_stacked_bar_fills_its_width() {
        let parts = [
            (1.0, Style::new(), "█"),
            (2.0, Style::new(), "▓"),
            (f64::NAN, Style::new(), "x"),
        ];
        assert_eq!(text_of(&stacked(&parts, 6.0, 12, THEME)), "██▓▓▓▓──────");
        assert_eq!(text_of(&stacked(&parts, 0.0, 4, THEME)), "────");
        assert_eq!(
            text_of(&stacked(&[(9.0, Style::new(), "█")], 3.0, 4, THEME)),
            "████"
        );
    }

    #[test]
    fn sparklines_show_the_newest_values() {
        let span = sparkline(&[9.0, 1.0, 4.0, 8.0], 3, 8.0, Style::new());
        assert_eq!(span.content, "▁▄█");
        assert_eq!(
            sparkline(&[f32::NAN, 0.0], 3, 8.0, Style::new()).content,
            "   "
        );
    }

    #[test]
    fn plots_have_a_scale_and_the_asked_size() {
        let plot = |values: &[f32], width| {
            let plot = Plot {
                values,
                scale: 10.0,
                height: 2,
                percent: false,
            };
            plot.lines(width, |_| Style::new(), THEME)
                .iter()
                .map(text_of)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            plot(&[0.0, 5.0, 10.0], 12),
            ["     10    █", "      0   ██"]
        );
        assert_eq!(plot(&[f32::NAN, 0.1], 10), ["     10   ", "      0  ▁"]);
        assert!(plot(&[1.0], 8).is_empty());
    }

    #[test]
    fn little_room_drops_the_least_and_shortens_the_less_important() {
        let section = |rank: u8, n| Section {
            rank,
            lines: vec![Line::from(rank.to_string()); n],
            short: 1,
        };
        let fit = |height| {
            let sections = vec![section(0, 2), section(2, 3), section(1, 2)];
            fitted(sections, height)
                .iter()
                .map(text_of)
                .collect::<Vec<_>>()
                .join(",")
        };
        assert_eq!(fit(20), "0,0,,2,2,2,,1,1");
        assert_eq!(fit(8), "0,0,,2,,1,1");
        assert_eq!(fit(5), "0,,2,,1");
        assert_eq!(fit(4), "0,0,,1");
        assert_eq!(fit(2), "0,0");
        assert_eq!(fit(0), "");
    }

    #[test]
    fn changes_have_a_sign() {
        assert_eq!(signed_percent(-0.031), "−3 %");
        assert_eq!(signed_percent(0.1), "+10 %");
        assert_eq!(signed_percent(-0.001), "±0 %");
    }
}
