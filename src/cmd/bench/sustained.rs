//! Decoding for minutes: what stays of the speed when the machine is warm.

use std::time::{Duration, Instant};

use anyhow::Result;
use qrun::session::CancelToken;
use serde_json::json;

use super::measure::Place;
use super::row::{Column, mean_and_deviation, render};
use super::{Format, is_cancelled};
use crate::cmd::Outcome;
use crate::report;

/// Context of the session: decoding begins anew when it is full.
pub const CONTEXT: usize = 1024;
/// Tokens that are timed as one.
const PIECE: usize = 16;
/// Slots of one line each.
const SLOT: Duration = Duration::from_secs(10);

/// Decodes for `minutes` and prints tokens per second over time, and the first minute (or quarter, if that is less)
/// against the last quarter.
///
/// # Errors
/// When the model cannot be computed, or stdout not written.
pub fn run(
    mut place: Place,
    minutes: f64,
    format: Format,
    model: &str,
    cancel: &CancelToken,
) -> Result<Outcome> {
    let all = Duration::from_secs_f64(60.0 * minutes);
    let slot = SLOT.min(all / 12);
    let start = Instant::now();
    // The end of each slot in seconds, and its tokens per second.
    let mut slots: Vec<(f64, f64)> = Vec::new();
    let (mut since, mut tokens) = (Instant::now(), 0);
    let mut outcome = Outcome::Done;
    while start.elapsed() < all {
        match place.decode_on(PIECE, cancel) {
            Ok(()) => tokens += PIECE,
            Err(error) if is_cancelled(&error) => {
                outcome = Outcome::Interrupted;
                break;
            }
            Err(error) => return Err(error),
        }
        let time = since.elapsed();
        if time >= slot {
            let (end, rate) = (
                start.elapsed().as_secs_f64(),
                tokens as f64 / time.as_secs_f64(),
            );
            report::note(&format!("{end:>7.0} s  {rate:>8.2} t/s"));
            slots.push((end, rate));
            (since, tokens) = (Instant::now(), 0);
        }
    }
    print(&slots, format, model)?;
    Ok(outcome)
}

fn print(slots: &[(f64, f64)], format: Format, model: &str) -> Result<()> {
    let quarter = slots.len().div_ceil(4);
    let first_minute = slots.iter().take_while(|s| s.0 <= 60.0).count();
    let rates: Vec<f64> = slots.iter().map(|s| s.1).collect();
    let (first, first_deviation) = mean_and_deviation(&rates[..quarter.min(first_minute)]);
    let (steady, deviation) = mean_and_deviation(&rates[rates.len() - quarter..]);
    let object = json!({
        "test": "sustained",
        "model_type": model,
        "slots_s": slots.iter().map(|s| s.0).collect::<Vec<_>>(),
        "slots_ts": rates,
        "first_ts": first,
        "first_stddev_ts": first_deviation,
        "steady_ts": steady,
        "steady_stddev_ts": deviation,
        "change": if first > 0.0 { steady / first - 1.0 } else { 0.0 },
    });
    let text = match format {
        Format::Json => serde_json::to_string_pretty(&object)?,
        Format::Jsonl => serde_json::to_string(&object)?,
        Format::Csv => {
            let lines = slots
                .iter()
                .map(|(end, rate)| format!("{end:.1},{rate:.3}"));
            std::iter::once("end_s,ts".to_owned())
                .chain(lines)
                .collect::<Vec<_>>()
                .join("\n")
        }
        Format::Md => {
            let cells = [
                model.to_owned(),
                format!("{first:.2} ± {first_deviation:.2}"),
                format!("{steady:.2} ± {deviation:.2}"),
                format!("{:+.1} %", 100.0 * (steady / first - 1.0)),
            ];
            let titles = ["model", "first t/s", "steady t/s", "change"];
            let columns: Vec<Column> = titles
                .into_iter()
                .zip(cells)
                .enumerate()
                .map(|(i, (title, cell))| (title, i > 0, vec![cell]))
                .collect();
            render(&columns)
        }
    };
    Ok(report::out(&format!("{text}\n"))?)
}
