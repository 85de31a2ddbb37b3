//! What a measurement is written as: llama-bench's fields under their names, and ours after them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::cmd::bench::Format;
use crate::report;

/// One test with its samples. The fields up to `samples_ts` are llama-bench's; new ones may be added after them, none
/// is taken away or changes its meaning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The file, or `synthetic:SHAPE:TYPE`.
    pub model_filename: String,
    /// Name and type.
    pub model_type: String,
    /// Bytes of all tensors.
    pub model_size: u64,
    /// Numbers in all tensors.
    pub model_n_params: u64,
    /// Prompt tokens in one pass.
    pub n_batch: usize,
    /// CPU threads.
    pub n_threads: usize,
    /// Type of the K cache.
    pub type_k: String,
    /// Type of the V cache.
    pub type_v: String,
    /// Prompt tokens that were timed.
    pub n_prompt: usize,
    /// Generated tokens that were timed.
    pub n_gen: usize,
    /// Tokens in the context before.
    pub n_depth: usize,
    /// When the test began, in UTC.
    pub test_time: String,
    /// Mean of the samples, in nanoseconds.
    pub avg_ns: u64,
    /// Their standard deviation.
    pub stddev_ns: u64,
    /// Mean of the tokens per second.
    pub avg_ts: f64,
    /// Their standard deviation.
    pub stddev_ts: f64,
    /// Each repetition, in nanoseconds.
    pub samples_ns: Vec<u64>,
    /// Each repetition, in tokens per second.
    pub samples_ts: Vec<f64>,
    /// Version of qrun, and of ggml.
    pub version: String,
    /// The device that computed.
    pub device: String,
    /// `mapped`, `copied` or `repacked`.
    pub layout: String,
    /// Parts that the graph is split into: 1 where the device computes all of it.
    pub splits: usize,
    /// The test's name, such as `pp512`, `tg128 spec 2`, `pp512 head` or `ttft512`.
    pub test: String,
    /// Guesses before each pass, or `auto`; none for tests without speculation.
    pub spec: Option<String>,
    /// Share of the guesses that were right.
    pub acceptance: Option<f64>,
    /// True where the acceptance was imposed, because random weights guess nothing right.
    pub acceptance_imposed: bool,
    /// Tokens that a pass gave.
    pub tokens_per_pass: Option<f64>,
    /// Bytes that generating a token reads: weights, keys and values, states.
    pub bytes_per_token: Option<u64>,
    /// The copy bandwidth of this device that was measured, in bytes per second.
    pub bandwidth: Option<f64>,
    /// Share of that bandwidth that the test used.
    pub roofline: Option<f64>,
    /// Joules per token, where the system counts them.
    pub energy_j: Option<f64>,
    /// The same test by llama-bench: each repetition in tokens per second.
    pub peer_samples_ts: Vec<f64>,
    /// This test's mean over the peer's.
    pub peer_ratio: Option<f64>,
}

impl Row {
    /// Takes the samples over.
    pub fn set_samples(&mut self, seconds: &[f64]) {
        let n_tokens = (self.n_prompt + self.n_gen) as f64;
        self.samples_ns = seconds.iter().map(|s| (1e9 * s) as u64).collect();
        self.samples_ts = seconds.iter().map(|s| n_tokens / s.max(1e-9)).collect();
        let ns: Vec<f64> = self.samples_ns.iter().map(|&n| n as f64).collect();
        let (mean, deviation) = mean_and_deviation(&ns);
        (self.avg_ns, self.stddev_ns) = (mean as u64, deviation as u64);
        (self.avg_ts, self.stddev_ts) = mean_and_deviation(&self.samples_ts);
    }

    /// What has to be equal for two rows to be comparable, whatever machine and version they come from.
    pub fn key(&self) -> (String, usize, usize, usize, String, String) {
        (
            self.test.clone(),
            self.n_depth,
            self.n_batch,
            self.n_threads,
            format!("{} {}", self.type_k, self.type_v),
            format!("{} {}", self.model_type, self.model_size),
        )
    }

    /// The test with its depth, as llama-bench names it.
    pub fn title(&self) -> String {
        match self.n_depth {
            0 => self.test.clone(),
            depth => format!("{} @ d{depth}", self.test),
        }
    }
}

/// Mean and standard deviation of a sample; no deviation of less than two values.
pub fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    if values.is_empty() {
        return (0.0, 0.0);
    }
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    let deviation = if n > 1.0 {
        (squares / (n - 1.0)).sqrt()
    } else {
        0.0
    };
    (mean, deviation)
}

/// Reads rows that `-o json` or `-o jsonl` wrote.
///
/// # Errors
/// When the file cannot be read, or holds something else.
pub fn read(path: &std::path::Path) -> Result<Vec<Row>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let rows: Vec<Row> = if text.trim_start().starts_with('[') {
        serde_json::from_str(&text)
    } else {
        text.lines().map(serde_json::from_str).collect()
    }
    .with_context(|| {
        format!(
            "{}: is not what `qrun bench -o json` writes",
            path.display()
        )
    })?;
    ensure!(!rows.is_empty(), "{}: holds no tests", path.display());
    Ok(rows)
}

/// The rows in a format, without the line's end.
///
/// # Errors
/// When a number cannot be written as JSON.
pub fn format(rows: &[Row], format: Format, before: Option<&[Row]>) -> Result<String> {
    Ok(match format {
        Format::Json => serde_json::to_string_pretty(rows)?,
        Format::Jsonl => {
            let lines: Result<Vec<String>, _> = rows.iter().map(serde_json::to_string).collect();
            lines?.join("\n")
        }
        Format::Csv => csv(rows)?,
        Format::Md => markdown(rows, before),
    })
}

/// One line a row; lists become text with spaces between.
fn csv(rows: &[Row]) -> Result<String> {
    let mut lines = Vec::new();
    for row in rows {
        let value = serde_json::to_value(row)?;
        let Some(fields) = value.as_object() else {
            continue;
        };
        if lines.is_empty() {
            lines.push(fields.keys().cloned().collect::<Vec<_>>().join(","));
        }
        let cell = |value: &serde_json::Value| {
            let text = match value {
                serde_json::Value::String(text) => text.clone(),
                serde_json::Value::Null => String::new(),
                serde_json::Value::Array(list) => {
                    let list: Vec<String> = list.iter().map(ToString::to_string).collect();
                    list.join(" ")
                }
                other => other.to_string(),
            };
            format!("\"{}\"", text.replace('"', "\"\""))
        };
        lines.push(fields.values().map(cell).collect::<Vec<_>>().join(","));
    }
    Ok(lines.join("\n"))
}

/// A column: its title, whether it is aligned to the right, and its cells.
pub type Column = (&'static str, bool, Vec<String>);

fn markdown(rows: &[Row], before: Option<&[Row]>) -> String {
    let cells = |f: &dyn Fn(&Row) -> String| rows.iter().map(f).collect::<Vec<_>>();
    let share = |part: Option<f64>| part.map_or(String::new(), |p| format!("{:.0} %", 100.0 * p));
    let mut columns: Vec<Column> = vec![
        ("model", false, cells(&|r| r.model_type.clone())),
        (
            "size",
            true,
            cells(&|r| report::bytes(r.model_size as usize)),
        ),
        (
            "params",
            true,
            cells(&|r| format!("{:.2} B", r.model_n_params as f64 / 1e9)),
        ),
        ("device", false, cells(&|r| r.device.clone())),
        ("threads", true, cells(&|r| r.n_threads.to_string())),
    ];
    let differ = |f: &dyn Fn(&Row) -> String| rows.iter().any(|r| f(r) != f(&rows[0]));
    if differ(&|r| r.n_batch.to_string()) {
        columns.push(("n_batch", true, cells(&|r| r.n_batch.to_string())));
    }
    if rows.iter().any(|r| r.type_k != "f16" || r.type_v != "f16") {
        columns.push((
            "K/V",
            false,
            cells(&|r| format!("{}/{}", r.type_k, r.type_v)),
        ));
    }
    columns.push(("test", true, cells(&Row::title)));
    columns.push((
        "t/s",
        true,
        cells(&|r| format!("{:.2} ± {:.2}", r.avg_ts, r.stddev_ts)),
    ));
    if rows.iter().any(|r| r.test.starts_with("ttft")) {
        let ms = |r: &Row| match r.test.starts_with("ttft") {
            true => format!("{:.1}", r.avg_ns as f64 / 1e6),
            false => String::new(),
        };
        columns.push(("ms", true, cells(&ms)));
    }
    if rows.iter().any(|r| r.roofline.is_some()) {
        columns.push(("roofline", true, cells(&|r| share(r.roofline))));
    }
    if rows.iter().any(|r| r.acceptance.is_some()) {
        let accepted = |r: &Row| match r.acceptance_imposed {
            true => format!("{} imposed", share(r.acceptance)),
            false => share(r.acceptance),
        };
        columns.push(("accepted", true, cells(&accepted)));
    }
    if rows.iter().any(|r| r.energy_j.is_some()) {
        let joules = |r: &Row| r.energy_j.map_or(String::new(), |j| format!("{j:.3}"));
        columns.push(("J/token", true, cells(&joules)));
    }
    if rows.iter().any(|r| r.peer_ratio.is_some()) {
        let peer = |r: &Row| {
            r.peer_ratio.map_or(String::new(), |ratio| {
                let (mean, deviation) = mean_and_deviation(&r.peer_samples_ts);
                format!("{mean:.2} ± {deviation:.2} ({ratio:.2}x)")
            })
        };
        columns.push(("llama-bench", true, cells(&peer)));
    }
    if let Some(before) = before {
        columns.push(("before", true, changes(rows, before)));
    }
    render(&columns)
}

/// Each row against the row of the same test before: the ratio, marked where it is outside of the noise.
fn changes(rows: &[Row], before: &[Row]) -> Vec<String> {
    let old: BTreeMap<_, &Row> = before.iter().map(|row| (row.key(), row)).collect();
    rows.iter()
        .map(|row| match old.get(&row.key()) {
            Some(old) => {
                let mark = match is_noise(old, row) {
                    true => "=",
                    false if row.avg_ts > old.avg_ts => "faster",
                    false => "slower",
                };
                format!("{:.2} ({:.3}x {mark})", old.avg_ts, row.avg_ts / old.avg_ts)
            }
            None => String::new(),
        })
        .collect()
}

/// True where the means differ by less than twice the error of their difference, or by less than half a percent: so
/// much comes from where things lie in memory.
fn is_noise(a: &Row, b: &Row) -> bool {
    let error = |row: &Row| row.stddev_ts.powi(2) / row.samples_ts.len().max(1) as f64;
    let difference = (a.avg_ts - b.avg_ts).abs();
    difference <= 2.0 * (error(a) + error(b)).sqrt() || difference < 0.005 * a.avg_ts
}

/// A Markdown table, aligned for people too.
pub fn render(columns: &[Column]) -> String {
    let width = |(title, _, cells): &Column| {
        let widest = cells.iter().map(|c| c.chars().count()).max();
        widest.unwrap_or(0).max(title.chars().count())
    };
    let widths: Vec<usize> = columns.iter().map(width).collect();
    let mut text = String::new();
    let line = |text: &mut String, cell: &dyn Fn(&Column) -> String| {
        for (column, &width) in columns.iter().zip(&widths) {
            let cell = cell(column);
            let _ = match column.1 {
                true => write!(text, "| {cell:>width$} "),
                false => write!(text, "| {cell:width$} "),
            };
        }
        text.push('|');
    };
    line(&mut text, &|c| c.0.to_owned());
    text.push('\n');
    for ((_, right, _), width) in columns.iter().zip(&widths) {
        let dashes = "-".repeat(*width);
        let _ = match right {
            true => write!(text, "| {}: ", &dashes[1..]),
            false => write!(text, "| {dashes} "),
        };
    }
    text.push('|');
    for i in 0..columns.first().map_or(0, |c| c.2.len()) {
        text.push('\n');
        line(&mut text, &|c| c.2[i].clone());
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn row(test: &str, seconds: &[f64]) -> Row {
        let mut row = Row {
            model_filename: "m.gguf".to_owned(),
            model_type: "m Q4_K_M".to_owned(),
            model_size: 1 << 30,
            model_n_params: 2_000_000_000,
            n_batch: 512,
            n_threads: 2,
            type_k: "f16".to_owned(),
            type_v: "f16".to_owned(),
            n_prompt: 0,
            n_gen: 100,
            n_depth: 0,
            test_time: "2026-01-01T00:00:00Z".to_owned(),
            avg_ns: 0,
            stddev_ns: 0,
            avg_ts: 0.0,
            stddev_ts: 0.0,
            samples_ns: Vec::new(),
            samples_ts: Vec::new(),
            version: String::new(),
            device: "CPU".to_owned(),
            layout: "mapped".to_owned(),
            splits: 1,
            test: test.to_owned(),
            spec: None,
            acceptance: None,
            acceptance_imposed: false,
            tokens_per_pass: None,
            bytes_per_token: None,
            bandwidth: None,
            roofline: None,
            energy_j: None,
            peer_samples_ts: Vec::new(),
            peer_ratio: None,
        };
        row.set_samples(seconds);
        row
    }

    #[test]
    fn samples_become_means() {
        let row = row("tg100", &[1.0, 2.0]);
        assert_eq!(row.samples_ts, [100.0, 50.0]);
        assert_eq!((row.avg_ts, row.avg_ns), (75.0, 1_500_000_000));
        assert!((row.stddev_ts - 35.355).abs() < 1e-3);
        assert_eq!(mean_and_deviation(&[3.0]), (3.0, 0.0));
    }

    #[test]
    fn what_was_written_is_read() {
        // Speeds that JSON holds exactly: readers may lose the last digit of others.
        let rows = vec![row("pp100", &[0.5, 0.5]), row("tg100", &[1.0])];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("old");
        for kind in [Format::Json, Format::Jsonl] {
            std::fs::write(&path, format(&rows, kind, None).unwrap()).unwrap();
            assert_eq!(read(&path).unwrap(), rows);
        }
        std::fs::write(&path, "{}").unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("qrun bench -o json"), "{error}");
        let csv = format(&rows, Format::Csv, None).unwrap();
        let fields: Vec<usize> = csv.lines().map(|l| l.matches("\",\"").count()).collect();
        assert_eq!(csv.lines().count(), 3);
        assert_eq!(fields[1], fields[2]);
    }

    #[test]
    fn only_differences_beyond_the_noise_are_marked() {
        let old = [row("tg100", &[1.0, 1.01, 0.99])];
        let change = |seconds: &[f64]| changes(&[row("tg100", seconds)], &old).remove(0);
        assert!(change(&[1.0, 1.02, 0.99]).contains('='));
        assert!(change(&[0.8, 0.81, 0.79]).contains("1.250x faster"));
        assert!(change(&[1.3, 1.31, 1.29]).contains("slower"));
        // One sample each says nothing about the noise, but half a percent is never news.
        let single = [row("tg100", &[1.0])];
        assert!(changes(&[row("tg100", &[1.003])], &single)[0].contains('='));
        assert_eq!(changes(&[row("pp100", &[1.0])], &old), [""]);
    }

    #[test]
    fn the_table_is_markdown() {
        let table = format(&[row("tg100", &[1.0, 1.0])], Format::Md, None).unwrap();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 3, "{table}");
        assert!(lines[2].contains("100.00 ± 0.00"), "{table}");
        let widths: Vec<usize> = lines.iter().map(|l| l.chars().count()).collect();
        assert!(widths.iter().all(|w| *w == widths[0]), "{table}");
    }
}
