//! Whether a model fits: before every load, and `qrun fit`.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use qrun::engine::Engine;
use qrun::fit::{Demand, Estimate, Offer, Shortage, Verdict, estimate, govern, zone_with};
use qrun::memory::{Machine, Zone};

use super::model::{self, Needs};
use crate::cli::ModelArgs;
use crate::report;

/// Sees that what was planned fits into memory: returns it, with a lower context where that was not asked for. `say`
/// is told what was lowered, and with `--verbose` the sum.
///
/// # Errors
/// When it does not fit; the message has the sum, the reason and the remedies.
pub fn governed(
    path: &Path,
    planned: Engine,
    args: &ModelArgs,
    needs: &Needs,
    say: &mut dyn FnMut(&str),
) -> Result<Engine> {
    let reading = Machine::new().and_then(|mut machine| machine.read());
    let (Some(reading), true) = (reading, args.fit) else {
        return Ok(planned);
    };
    let mut session = model::session_params(args)?;
    let head = planned.mtp_status().on;
    if needs.n_guesses > 0 && (head || needs.guesses_headless) {
        session.mtp = head;
        session.n_rollback = needs.n_guesses;
    }
    let demand = Demand {
        session,
        n_rows: needs.n_rows.max(1),
        n_sessions: needs.n_sessions.max(1),
        observes: needs.observes,
    };
    let asked = match needs.n_ctx.unwrap_or(session.n_ctx) {
        0 => planned.n_ctx(),
        n => n,
    };
    let explicit = needs.n_ctx.is_some() || args.ctx_size != 0;
    let offer = Offer::of(&planned, reading);
    let engine = Arc::new(planned);
    let verdict = govern(
        &mut |n_ctx| estimate(&engine, &demand, n_ctx),
        asked,
        explicit,
        &offer,
    )?;
    let mut engine = Arc::into_inner(engine)
        .ok_or_else(|| anyhow::anyhow!("the plan of {} is still in use", path.display()))?;
    if let Verdict::Fits(estimate) | Verdict::Lowered { estimate, .. } = &verdict {
        engine.set_spare(offer.spare(estimate) as usize);
    }
    match verdict {
        Verdict::Fits(estimate) => {
            if args.verbose {
                say(&table(&estimate, &offer));
            }
            if offer.unified && offer.gpu.is_some() && zone_with(&estimate, &offer) == Zone::Red {
                say(
                    "with this model more than 85 % of the memory is in use: the system will compress and swap what \
                     other programs hold; close some, or use a smaller -c",
                );
            }
        }
        Verdict::Lowered { estimate, shortage } => {
            if args.verbose {
                say(&table(&estimate, &offer));
            }
            say(&format!(
                "the context is lowered from {asked} to {} tokens: {} of {} can be had, the whole takes {}",
                estimate.n_ctx,
                report::bytes(shortage.has as usize),
                shortage.of,
                report::bytes(shortage.takes as usize),
            ));
            engine.lower_n_ctx(estimate.n_ctx as usize);
        }
        Verdict::Refused {
            estimate,
            shortage,
            longest,
        } => {
            if args.verbose {
                say(&table(&estimate, &offer));
            }
            bail!(
                "{} does not fit: {}",
                path.display(),
                refusal(&estimate, &shortage, longest, args, &offer)
            );
        }
    }
    Ok(engine)
}

/// The sum, the reason and what helps, in one line.
fn refusal(
    estimate: &Estimate,
    shortage: &Shortage,
    longest: Option<u64>,
    args: &ModelArgs,
    offer: &Offer,
) -> String {
    let bytes = |n: u64| report::bytes(n as usize);
    let mut parts = estimate.parts();
    parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let parts: Vec<_> = parts
        .iter()
        .map(|(name, n)| format!("{name} {}", bytes(*n)))
        .collect();
    let mut remedies = Vec::new();
    if let Some(n) = longest {
        remedies.push(format!("a context of {n} (`-c {n}`)"));
    }
    let halves = args.cache_type_k == "f16" && args.cache_type_v == "f16";
    if halves && estimate.kv > estimate.weights() / 8 {
        remedies.push("`-ctk q8_0 -ctv q8_0`".to_owned());
    }
    if longest.is_none() {
        remedies.push("a smaller quantization or model".to_owned());
        remedies.push("closing other programs".to_owned());
    }
    if cfg!(target_os = "macos") && offer.gpu.is_some() {
        let wanted = (shortage.takes + shortage.takes / 16) >> 20;
        remedies.push(format!(
            "`sudo sysctl iogpu.wired_limit_mb={wanted}`, at the risk that the rest of the system runs out of memory \
             and stops"
        ));
    }
    format!(
        "it takes {} ({}), and {} of {} ({}) can be had; what helps: {}; `--fit off` tries nevertheless",
        bytes(shortage.takes),
        parts.join(", "),
        bytes(shortage.has),
        shortage.of,
        bytes(shortage.total),
        remedies.join(", "),
    )
}

/// The sum as a table.
fn table(estimate: &Estimate, offer: &Offer) -> String {
    let mut lines: Vec<String> = estimate
        .parts()
        .iter()
        .map(|(name, bytes)| format!("  {name:<36}{:>12}", report::bytes(*bytes as usize)))
        .collect();
    let line =
        |name: &str, bytes: u64| format!("  {name:<36}{:>12}", report::bytes(bytes as usize));
    lines.insert(0, format!("memory of this run on {}:", offer.device));
    lines.push(line("together", estimate.total()));
    lines.push(line("can be had", offer.budget()));
    lines.join("\n")
}
