//! `qrun fit`: which models of the family this machine runs, how fast, with how much context.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use ggml_metal::{Backend, DType, DeviceKind, find_device};
use qrun::engine::{Engine, EngineParams};
use qrun::fit::{Demand, Estimate, Offer, estimate, shortage, zone_with};
use qrun::memory::{Machine, Reading, Zone};
use qrun::model::shapes::{SCHEME, SHAPES, Synthetic};
use qrun::roofline::{Rates, Reads};
use qrun::session::{CancelToken, Outputs, Session, SessionParams};
use qrun::state::KvTypes;
use serde::Serialize;
use serde_json::json;

use super::{Outcome, UsageError};
use crate::cli::FitArgs;
use crate::report;

/// Contexts that are looked at, where none is given; the last is the models' own.
const CONTEXTS: [usize; 4] = [8192, 32_768, 131_072, 262_144];
/// Types of files that are looked at, the smallest first.
const TYPES: [&str; 4] = ["q4_k_m", "q6_k", "q8_0", "bf16"];
/// Types of keys and values.
const KV: [(&str, DType); 2] = [("f16", DType::F16), ("q8_0", DType::Q8_0)];
/// Guesses that sessions are planned for, as `--draft-max` has it.
const GUESSES: usize = 4;
/// Slower than a slow reader, in tokens a second.
const SLOW: f64 = 5.0;
/// A context that the best pick has to hold, unless none is given that is as long.
const USEFUL_CONTEXT: usize = 32_768;

/// A run's memory.
#[derive(Serialize)]
struct Memory {
    n_ctx: usize,
    kv: &'static str,
    bytes: u64,
    fits: bool,
    zone: Zone,
}

/// One model in one type.
#[derive(Serialize)]
struct Row {
    model: &'static str,
    #[serde(rename = "type")]
    file_type: String,
    bytes: u64,
    active_bytes: u64,
    memory: Vec<Memory>,
    plain_tok_s: f64,
    mtp_tok_s: f64,
    mtp_depth: usize,
    verdict: String,
}

impl Row {
    fn at(&self, n_ctx: usize, kv: &str) -> Option<&Memory> {
        self.memory.iter().find(|m| m.n_ctx == n_ctx && m.kv == kv)
    }

    /// The longest context that fits with these keys and values.
    fn longest(&self, kv: &str) -> Option<usize> {
        let fits = self.memory.iter().filter(|m| m.fits && m.kv == kv);
        fits.map(|m| m.n_ctx).max()
    }
}

/// Prints the table.
///
/// # Errors
/// When the device cannot be used, or stdout cannot be written.
pub fn run(args: &FitArgs) -> Result<Outcome> {
    let model = args.measure.as_deref().map(synthetic).transpose()?;
    let device = find_device(args.device.as_deref())?;
    let backend = Backend::new(device, None)?;
    let reading = Machine::new().and_then(|mut machine| machine.read());
    let mut offer = Offer {
        device: device.name().to_owned(),
        gpu: None,
        unified: true,
        reading: reading
            .context("the system does not tell about its memory; give it with `--for`")?,
    };
    if device.kind() == DeviceKind::Gpu {
        let (free, total) = device.memory();
        offer.gpu = Some((free as u64, total as u64));
        offer.unified = device.is_metal();
    }
    if let Some(bytes) = args.memory {
        offer = imagined(bytes);
    }
    let rates = match args.bandwidth {
        Some(gb) => Rates::of_bandwidth(gb * 1e9),
        None => Rates::measure(&backend)
            .context("measuring the device; `--bandwidth` takes the place of it")?,
    };
    let trial = match &model {
        Some(model) => Some(measure(model, args.device.as_deref(), &offer, &rates)?),
        None => None,
    };
    let corrected = match &trial {
        Some(trial) => rates.clone().scaled(trial.tok_s / trial.expected_tok_s),
        None => rates.clone(),
    };
    let mut contexts = args.ctx_size.clone();
    contexts.sort_unstable();
    contexts.dedup();
    if contexts.is_empty() {
        contexts = CONTEXTS.to_vec();
    }
    let mut rows = Vec::new();
    for shape in SHAPES {
        rows.extend(rows_of(
            shape.name,
            &contexts,
            args.device.as_deref(),
            &offer,
            &corrected,
        )?);
    }
    let best = best(&rows, &contexts);
    if args.json {
        let weights: serde_json::Map<_, _> = rates
            .weights
            .iter()
            .map(|(dtype, by_width)| (dtype.name().to_owned(), json!(by_width.map(|r| r / 1e9))))
            .collect();
        let object = json!({
            "schema": 1,
            "machine": {
                "device": offer.device,
                "imagined": args.memory.is_some(),
                "memory": offer.gpu.map_or(offer.reading.total(), |(_, total)| total),
                "can_be_had": offer.budget(),
                "zone": Zone::of_share(offer.reading.share()),
            },
            "speed": {
                "measured": args.bandwidth.is_none(),
                "copy_gb_s": rates.copy / 1e9,
                "weights_gb_s": weights,
                "layer_us": rates.layer * 1e6,
                "trial": trial,
            },
            "contexts": contexts,
            "models": rows,
            "best": best.map(|row| json!({"model": row.model, "type": row.file_type})),
        });
        report::out(&format!("{}\n", serde_json::to_string_pretty(&object)?))?;
    } else {
        report::out(&table(
            &rows,
            &contexts,
            best,
            &offer,
            &rates,
            args,
            trial.as_ref(),
        ))?;
    }
    Ok(Outcome::Done)
}

/// What a synthetic model reached.
#[derive(Serialize)]
struct Trial {
    model: &'static str,
    #[serde(rename = "type")]
    file_type: String,
    tok_s: f64,
    expected_tok_s: f64,
}

fn synthetic(name: &str) -> Result<Synthetic> {
    let name = format!("{SCHEME}{}", name.trim_start_matches(SCHEME));
    match Synthetic::parse(Path::new(&name)) {
        Ok(Some(model)) => Ok(model),
        Ok(None) => bail!("{name}: no shape"),
        Err(error) => Err(UsageError(report::error_line(&error)).into()),
    }
}

/// Decodes with a model of random weights, for some seconds.
fn measure(model: &Synthetic, device: Option<&str>, offer: &Offer, rates: &Rates) -> Result<Trial> {
    const TOKENS: usize = 32;
    let name = model.name();
    let params = EngineParams {
        device: device.map(str::to_owned),
        ..EngineParams::default()
    };
    let session = SessionParams {
        n_ctx: 256,
        ..SessionParams::default()
    };
    let planned = Arc::new(Engine::plan(Path::new(&name), &params)?);
    let demand = Demand {
        session,
        n_rows: 1,
        n_sessions: 1,
        observes: false,
    };
    let sum = estimate(&planned, &demand, session.n_ctx)?;
    if let Some(short) = shortage(&sum, offer) {
        bail!(
            "{name} takes {} and {} of {} can be had; measure a smaller one",
            report::bytes(short.takes as usize),
            report::bytes(short.has as usize),
            short.of
        );
    }
    let engine = planned.load_planned(&mut |_, _| {})?;
    let mut session = Session::new(engine, session)?;
    let never = CancelToken::default();
    session.eval(&[1; 16], Outputs::Last, &never)?;
    let mut times = Vec::with_capacity(TOKENS);
    for _ in 0..TOKENS {
        let start = Instant::now();
        session.eval(&[1], Outputs::Last, &never)?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(Trial {
        model: model.shape.name,
        file_type: model.file_type.name(),
        tok_s: 1.0 / times[TOKENS / 2],
        expected_tok_s: Reads::of_shape(model)?.plain(rates),
    })
}

/// A machine of unified memory that is not here: a quarter is taken by others, 16 GiB at most.
fn imagined(bytes: u64) -> Offer {
    let others = (bytes / 4).min(16 << 30);
    Offer {
        device: "another machine".to_owned(),
        gpu: None,
        unified: true,
        reading: Reading {
            machine_total: bytes,
            machine_available: bytes - others,
            ..Reading::default()
        },
    }
}

fn rows_of(
    shape: &'static str,
    contexts: &[usize],
    device: Option<&str>,
    offer: &Offer,
    rates: &Rates,
) -> Result<Vec<Row>> {
    let params = EngineParams {
        device: device.map(str::to_owned),
        ..EngineParams::default()
    };
    // What a session takes does not depend on the weights' types.
    let name = format!("synthetic:{shape}:{}", TYPES[0]);
    let engine = Arc::new(Engine::plan(Path::new(&name), &params)?);
    let mut sessions = Vec::new();
    for &n_ctx in contexts {
        for (kv, dtype) in KV {
            let demand = Demand {
                session: SessionParams {
                    kv: KvTypes { k: dtype, v: dtype },
                    mtp: true,
                    n_rollback: GUESSES,
                    ..SessionParams::default()
                },
                n_rows: 1,
                n_sessions: 1,
                observes: false,
            };
            sessions.push((n_ctx, kv, estimate(&engine, &demand, n_ctx)?));
        }
    }
    let mut rows = Vec::new();
    for file_type in TYPES {
        let name = format!("synthetic:{shape}:{file_type}");
        let model = Synthetic::parse(Path::new(&name))?.context("a name of a shape")?;
        let reads = Reads::of_shape(&model)?;
        let bytes = reads.bytes();
        let memory = sessions
            .iter()
            .map(|&(n_ctx, kv, session)| {
                let sum = with_weights(session, bytes, offer.unified);
                Memory {
                    n_ctx,
                    kv,
                    bytes: sum.total(),
                    fits: shortage(&sum, offer).is_none(),
                    zone: zone_with(&sum, offer),
                }
            })
            .collect();
        let (mtp_tok_s, mtp_depth) = reads.guessing(rates);
        let mut row = Row {
            model: shape,
            file_type: model.file_type.name(),
            bytes,
            active_bytes: reads.active_bytes(),
            memory,
            plain_tok_s: reads.plain(rates),
            mtp_tok_s,
            mtp_depth,
            verdict: String::new(),
        };
        row.verdict = verdict(&row, contexts);
        rows.push(row);
    }
    Ok(rows)
}

/// The same session over weights of `bytes`.
fn with_weights(session: Estimate, bytes: u64, unified: bool) -> Estimate {
    Estimate {
        weights_mapped: if unified { bytes } else { 0 },
        weights_copied: if unified { 0 } else { bytes },
        weights_host_mapped: 0,
        weights_host_copied: 0,
        ..session
    }
}

fn verdict(row: &Row, contexts: &[usize]) -> String {
    let longest = contexts.last().copied();
    let [half, eighth] = KV.map(|(kv, _)| row.longest(kv));
    let mut text = match (half, eighth) {
        (_, None) => return "no".to_owned(),
        (half, _) if half == longest => "fits".to_owned(),
        (Some(n), eighth) if eighth == Some(n) => format!("to {}", short(n)),
        (None, Some(n)) => format!("to {}, q8_0", short(n)),
        (Some(n), Some(more)) => format!("to {}; {} q8_0", short(n), short(more)),
    };
    if row.mtp_tok_s < SLOW {
        text += ", slow";
    }
    text
}

/// The largest model that holds a useful context and is not slow, in the type of most bits.
fn best<'r>(rows: &'r [Row], contexts: &[usize]) -> Option<&'r Row> {
    let longest = contexts.last().copied().unwrap_or(0);
    let wanted = contexts
        .iter()
        .copied()
        .find(|&n| n >= USEFUL_CONTEXT)
        .unwrap_or(longest);
    let good = |row: &&Row| {
        let memory = row.at(wanted, KV[0].0);
        row.mtp_tok_s >= 2.0 * SLOW && memory.is_some_and(|m| m.fits && m.zone < Zone::Red)
    };
    rows.iter().rfind(good)
}

/// 8192 as 8k, other numbers as they are.
fn short(n: usize) -> String {
    if n.is_multiple_of(1024) {
        format!("{}k", n / 1024)
    } else {
        n.to_string()
    }
}

/// GiB in three digits.
fn gib(bytes: u64) -> String {
    let gib = bytes as f64 / (1u64 << 30) as f64;
    if gib < 99.95 {
        format!("{gib:.1}")
    } else {
        format!("{gib:.0}")
    }
}

fn table(
    rows: &[Row],
    contexts: &[usize],
    best: Option<&Row>,
    offer: &Offer,
    rates: &Rates,
    args: &FitArgs,
    trial: Option<&Trial>,
) -> String {
    let of = |dtype: DType| {
        let found = rates.weights.iter().find(|(t, _)| *t == dtype);
        found.map_or(0.0, |(_, r)| r[0] / 1e9)
    };
    let total = offer.gpu.map_or(offer.reading.total(), |(_, total)| total);
    let mut lines = vec![format!(
        "machine  {}: {} GiB of memory, {} GiB can be had",
        offer.device,
        gib(total),
        gib(offer.budget())
    )];
    lines.push(if args.bandwidth.is_some() {
        format!(
            "speed    from a bandwidth of {:.0} GB/s, as given",
            rates.copy / 1e9
        )
    } else {
        format!(
            "speed    measured: copies {:.1} GB/s (read and written), weights {:.1} (Q4_K) to {:.1} GB/s (BF16)",
            rates.copy / 1e9,
            of(DType::Q4_K),
            of(DType::BF16)
        )
    });
    if let Some(trial) = trial {
        lines.push(format!(
            "         {} in {} reaches {:.1} tokens a second where {:.1} were expected: all speeds are corrected by {:.2}",
            trial.model,
            trial.file_type,
            trial.tok_s,
            trial.expected_tok_s,
            trial.tok_s / trial.expected_tok_s
        ));
    }
    lines.push(
        "memory   GiB with f16/q8_0 keys and values; zone with f16: g green, y yellow, r red, - does not fit"
            .to_owned(),
    );
    let mut head = format!("{:<10}{:<7}{:>5} ", "model", "type", "GiB");
    for &n in contexts {
        head += &format!("{:>11}", short(n));
    }
    lines.push(format!("{head}{:>6}{:>6} verdict", "tok/s", "MTP"));
    for row in rows {
        let fits = row.verdict != "no";
        // Of a model that does not fit at all, the smallest file says enough.
        let is_first = row.file_type.eq_ignore_ascii_case(TYPES[0]);
        if !fits && !is_first {
            continue;
        }
        let mut line = format!(
            "{:<10}{:<7}{:>5} ",
            row.model,
            row.file_type,
            gib(row.bytes)
        );
        for &n in contexts {
            let cell = KV.map(|(kv, _)| row.at(n, kv));
            if let [Some(half), Some(eighth)] = cell {
                let zone = match half.zone {
                    _ if !half.fits => '-',
                    Zone::Green => 'g',
                    Zone::Yellow => 'y',
                    Zone::Red => 'r',
                };
                let both = format!("{}/{}{zone}", gib(half.bytes), gib(eighth.bytes));
                line += &format!("{both:>11}");
            }
        }
        let speed = |tps: f64| match tps {
            tps if tps < 9.95 => format!("{tps:.1}"),
            tps => format!("{tps:.0}"),
        };
        line += &format!(
            "{:>6}{:>6} {}",
            speed(row.plain_tok_s),
            speed(row.mtp_tok_s),
            row.verdict
        );
        lines.push(line);
    }
    lines.push(match best {
        Some(row) => format!(
            "best     {} in {}: about {:.0} tokens a second{}",
            row.model,
            row.file_type,
            row.plain_tok_s,
            match row.mtp_depth {
                0 => ", and guessing ahead gains nothing".to_owned(),
                1 => format!(", {:.0} with a guess of its draft head", row.mtp_tok_s),
                n => format!(", {:.0} with {n} guesses of its draft head", row.mtp_tok_s),
            }
        ),
        None => "best     none of them fits and is faster than reading".to_owned(),
    });
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(model: &'static str, speed: f64, fits: &[(usize, bool, bool)]) -> Row {
        let memory = fits
            .iter()
            .flat_map(|&(n_ctx, half, eighth)| {
                KV.map(|(kv, _)| Memory {
                    n_ctx,
                    kv,
                    bytes: 1,
                    fits: if kv == "f16" { half } else { eighth },
                    zone: Zone::Green,
                })
            })
            .collect();
        let mut row = Row {
            model,
            file_type: "Q4_K_M".to_owned(),
            bytes: 1,
            active_bytes: 1,
            memory,
            plain_tok_s: speed,
            mtp_tok_s: speed,
            mtp_depth: 0,
            verdict: String::new(),
        };
        let contexts: Vec<_> = fits.iter().map(|f| f.0).collect();
        row.verdict = verdict(&row, &contexts);
        row
    }

    #[test]
    fn verdicts_say_how_far_it_goes() {
        let at = |speed, a: (bool, bool), b: (bool, bool)| {
            row("9b", speed, &[(8192, a.0, a.1), (32_768, b.0, b.1)]).verdict
        };
        assert_eq!(at(50.0, (true, true), (true, true)), "fits");
        assert_eq!(at(50.0, (true, true), (false, false)), "to 8k");
        assert_eq!(at(50.0, (true, true), (false, true)), "to 8k; 32k q8_0");
        assert_eq!(at(50.0, (false, true), (false, false)), "to 8k, q8_0");
        assert_eq!(at(50.0, (false, false), (false, false)), "no");
        assert_eq!(at(3.0, (true, true), (true, true)), "fits, slow");
    }

    #[test]
    fn the_best_is_the_largest_that_is_useful() {
        let all = [(8192, true, true), (32_768, true, true)];
        let rows = [
            row("2b", 90.0, &all),
            row("4b", 40.0, &all),
            row("9b", 8.0, &all),
            row("27b", 40.0, &[(8192, true, true), (32_768, false, false)]),
        ];
        let pick = best(&rows, &[8192, 32_768]).map(|r| r.model);
        assert_eq!(pick, Some("4b"));
        // With short contexts only, the longest of them counts.
        assert_eq!(best(&rows, &[8192]).map(|r| r.model), Some("27b"));
        assert!(best(&rows[2..3], &[8192]).is_none());
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            (short(8192), short(1000)),
            ("8k".to_owned(), "1000".to_owned())
        );
        assert_eq!(gib(107_374_182_400), "100");
        assert_eq!(gib(5_900_000_000), "5.5");
    }
}
