//! What a model takes before it is loaded, and whether the machine has it.
//!
//! Nothing is guessed that can be asked: weights, states and graphs are made on a backend that only plans (see
//! [`Engine::plan`]), so sizes are those of the run itself. Only the program's own memory is an estimate.
//!
//! How mapped weights count: the system can drop their pages, so no run dies of them, but every token reads all of
//! them; a model that does not stay in memory is read from the disk again and again. They have to fit like the rest.

use std::sync::Arc;

use anyhow::Result;
use ggml_metal::{DeviceKind, WeightBytes};

use crate::engine::Engine;
use crate::imatrix;
use crate::memory::{Reading, Zone};
use crate::session::{PlannedBytes, Session, SessionParams};

/// The program without a model: threads, what the allocator keeps, the terminal's text. Measured: 6 to 9 MiB.
const PROGRAM: u64 = 10 << 20;
/// What a token of the vocabulary takes in the tokenizer and the metadata. Measured on the vocabulary of 248,320.
const PER_TOKEN_OF_VOCABULARY: u64 = 300;
/// What a GPU's driver and kernels take by themselves: libraries, workspaces, weights converted for wide products.
const GPU_RESERVE: u64 = 384 << 20;
/// Contexts are lowered to a multiple of this.
const CONTEXT_STEP: usize = 256;
/// A shorter context than this is not worth a run.
const SHORTEST_CONTEXT: usize = 512;

/// What will run.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// How sessions run; a context of 0 is the engine's.
    pub session: SessionParams,
    /// Rows of logits that are held at once.
    pub n_rows: usize,
    /// Sessions of that kind at the same time.
    pub n_sessions: usize,
    /// Instead of sessions, one pass of the whole context that observes the inputs of all weights.
    pub observes: bool,
}

/// What a run takes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Estimate {
    /// The context that it holds for, in tokens.
    pub n_ctx: u64,
    /// Weights read in place from the mapped files.
    pub weights_mapped: u64,
    /// Weights copied to the device's own memory.
    pub weights_copied: u64,
    /// Weights copied to a layout made for this CPU.
    pub weights_repacked: u64,
    /// Weights in the CPU's memory, because the device cannot use them: mapped.
    pub weights_host_mapped: u64,
    /// As before: copied.
    pub weights_host_copied: u64,
    /// Keys and values of the full context, the draft head's included.
    pub kv: u64,
    /// The recurrent state.
    pub state: u64,
    /// Older states, from which rejected drafts are undone.
    pub rollback: u64,
    /// Intermediate results.
    pub compute: u64,
    /// Intermediate results on the CPU, where that is not the device.
    pub host_compute: u64,
    /// What a growing cache needs for a moment, more than passes do.
    pub growth: u64,
    /// Inputs, logits, the tokenizer, the program.
    pub program: u64,
}

impl Estimate {
    /// Bytes on the device that computes.
    pub fn device(&self) -> u64 {
        self.weights() + self.kv + self.state + self.rollback + self.compute + self.growth
    }

    /// Bytes of weights on the device.
    pub fn weights(&self) -> u64 {
        self.weights_mapped + self.weights_copied + self.weights_repacked
    }

    /// Bytes in the CPU's memory, where that is not the device's.
    pub fn host(&self) -> u64 {
        self.weights_host_mapped + self.weights_host_copied + self.host_compute + self.program
    }

    /// Everything.
    pub fn total(&self) -> u64 {
        self.device() + self.host()
    }

    /// The parts that are not nothing, with names for people.
    pub fn parts(&self) -> Vec<(String, u64)> {
        let all = [
            ("weights, mapped".to_owned(), self.weights_mapped),
            ("weights, copied".to_owned(), self.weights_copied),
            ("weights, repacked".to_owned(), self.weights_repacked),
            (
                "weights on the CPU".to_owned(),
                self.weights_host_mapped + self.weights_host_copied,
            ),
            (
                format!("keys and values for {} tokens", self.n_ctx),
                self.kv,
            ),
            ("recurrent state".to_owned(), self.state),
            ("states to undo drafts".to_owned(), self.rollback),
            (
                "intermediate results".to_owned(),
                self.compute + self.host_compute,
            ),
            ("growth of keys and values".to_owned(), self.growth),
            (
                "inputs, logits, tokenizer, program".to_owned(),
                self.program,
            ),
        ];
        all.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
    }
}

/// What a run with the context `n_ctx` takes; 0 is the engine's. `engine` may be a planned or a loaded one: both give
/// the same numbers.
///
/// # Errors
/// When a session of that kind cannot be made.
pub fn estimate(engine: &Arc<Engine>, demand: &Demand, n_ctx: usize) -> Result<Estimate> {
    let params = SessionParams {
        n_ctx,
        ..demand.session
    };
    if demand.observes {
        let planned = imatrix::planned_bytes(engine, n_ctx)?;
        return Ok(sum(engine, demand, n_ctx, engine.weight_bytes(), planned));
    }
    let mut session = Session::new(engine.clone(), params)?;
    let n_ctx = session.params().n_ctx;
    let planned = session.plan_full(demand.n_rows)?;
    Ok(sum(engine, demand, n_ctx, engine.weight_bytes(), planned))
}

fn sum(
    engine: &Engine,
    demand: &Demand,
    n_ctx: usize,
    weights: WeightBytes,
    planned: PlannedBytes,
) -> Estimate {
    let config = engine.config();
    let n = demand.n_sessions as u64;
    let each = |bytes: usize| n * bytes as u64;
    let n_vocab = config.n_vocab as u64;
    let logits = (demand.n_rows.max(1) as u64 + 1) * n_vocab * 4;
    // The CPU converts the inputs of a product to the type that the weights want: two bytes a value at most.
    let widest = config.layers.iter().map(|l| l.n_ff).max().unwrap_or(0);
    let widest = widest.max(config.n_embd).max(config.ssm.value_dim()) as u64;
    let experts = config.moe.map_or(1, |m| m.n_expert_used + 1) as u64;
    let n_batch = demand.session.n_batch.min(n_ctx) as u64;
    // What each token may see is put together on the host, two bytes a cell, for the widest pass and for those of
    // speculation.
    let n_slots = demand.session.n_rollback as u64 + 1;
    let rows =
        n_batch + n_slots * n_slots * (n_slots + 1) / 2 * (1 + u64::from(demand.session.mtp));
    let masks = 2 * n_ctx.next_multiple_of(CONTEXT_STEP) as u64 * rows;
    let inputs = if engine.backends()[0].device().kind() == DeviceKind::Cpu {
        2 * widest * n_batch * experts
    } else {
        0
    };
    Estimate {
        n_ctx: n_ctx as u64,
        weights_mapped: (weights.mapped - weights.host_mapped) as u64,
        weights_copied: (weights.copied - weights.host_copied) as u64,
        weights_repacked: weights.repacked as u64,
        weights_host_mapped: weights.host_mapped as u64,
        weights_host_copied: weights.host_copied as u64,
        kv: each(planned.session.kv),
        state: each(planned.session.state),
        rollback: each(planned.session.rollback),
        compute: each(planned.session.compute),
        host_compute: each(planned.host_compute),
        // Once on the device and once on the way through the host; passes have no memory meanwhile.
        growth: (2 * planned.growth as u64).saturating_sub(planned.session.compute as u64),
        program: PROGRAM + n_vocab * PER_TOKEN_OF_VOCABULARY + n * (logits + masks) + inputs,
    }
}

/// What there is to run on.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    /// The device's name.
    pub device: String,
    /// Free and total bytes of a device with a budget of its own: a GPU's memory, or Metal's recommended working set.
    pub gpu: Option<(u64, u64)>,
    /// The device's memory is the machine's.
    pub unified: bool,
    /// The machine's memory.
    pub reading: Reading,
}

impl Offer {
    /// What the engine's device offers now.
    pub fn of(engine: &Engine, reading: Reading) -> Self {
        let device = engine.backends()[0].device();
        let is_gpu = device.kind() == DeviceKind::Gpu;
        let (free, total) = device.memory();
        Self {
            device: device.name().to_owned(),
            gpu: is_gpu.then_some((free as u64, total as u64)),
            unified: !is_gpu || device.is_metal(),
            reading,
        }
    }

    /// What a run on the device can have. A 32nd of all is left to others, and for what is not foreseen; on a GPU at
    /// least 384 MiB.
    pub fn budget(&self) -> u64 {
        match self.gpu {
            Some((free, total)) => free.saturating_sub((total / 32).max(GPU_RESERVE)),
            None => self.budget_of_machine(),
        }
    }

    /// Bytes of the machine's memory that the run leaves, the 32nd not counted.
    pub fn spare(&self, estimate: &Estimate) -> u64 {
        let takes = if self.unified {
            estimate.total()
        } else {
            estimate.host()
        };
        self.budget_of_machine().saturating_sub(takes)
    }

    fn budget_of_machine(&self) -> u64 {
        let all = self.reading.total();
        self.reading.available().saturating_sub(all / 32)
    }

    /// The share of the machine's memory that is in use with the run, 0 to 1 and more.
    pub fn share_with(&self, estimate: &Estimate) -> f64 {
        let own = if self.unified {
            estimate.total()
        } else {
            estimate.host()
        };
        let others = self.reading.total() - self.reading.available();
        (others + own) as f64 / self.reading.total().max(1) as f64
    }
}

/// Why a run does not fit: bytes that it takes, and that it can have, of one memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The memory's name.
    pub of: String,
    /// Bytes that the run takes there.
    pub takes: u64,
    /// Bytes that it can have there.
    pub has: u64,
    /// Bytes that all have there.
    pub total: u64,
}

/// The first memory that a run does not fit into; none where it fits.
pub fn shortage(estimate: &Estimate, offer: &Offer) -> Option<Shortage> {
    let short = |of: &str, takes: u64, has: u64, total: u64| {
        (takes > has).then(|| Shortage {
            of: of.to_owned(),
            takes,
            has,
            total,
        })
    };
    let machine = |takes| {
        let (has, total) = (offer.budget_of_machine(), offer.reading.total());
        let of = if offer.reading.cgroup.is_some_and(|c| c.limit == total) {
            "this control group"
        } else {
            "this machine"
        };
        short(of, takes, has, total)
    };
    match offer.gpu {
        None => machine(estimate.total()),
        Some((_, total)) => {
            let has = offer.budget();
            let of = if offer.unified {
                "Metal's working set"
            } else {
                offer.device.as_str()
            };
            short(of, estimate.device(), has, total)
                // What others use can be compressed; what this run holds of its own on the host cannot be spared.
                .or_else(|| machine(estimate.host()))
        }
    }
}

/// What the governor decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It fits as asked.
    Fits(Estimate),
    /// It fits with a shorter context.
    Lowered {
        /// What it takes then.
        estimate: Estimate,
        /// What is short at the context asked for.
        shortage: Shortage,
    },
    /// It does not fit.
    Refused {
        /// What it takes as asked.
        estimate: Estimate,
        /// What is short.
        shortage: Shortage,
        /// The longest context that fits, in tokens; none where none does.
        longest: Option<u64>,
    },
}

/// Decides whether a run fits that takes `at(n_ctx)`: at `asked` tokens, or where that was not asked for explicitly,
/// at fewer.
///
/// # Errors
/// When an estimate fails.
pub fn govern(
    at: &mut dyn FnMut(usize) -> Result<Estimate>,
    asked: usize,
    explicit: bool,
    offer: &Offer,
) -> Result<Verdict> {
    let estimate = at(asked)?;
    let Some(shortage_asked) = shortage(&estimate, offer) else {
        return Ok(Verdict::Fits(estimate));
    };
    // In steps: the last that fits, and the first that does not.
    let (mut fits, mut too_long) = (0, asked.div_ceil(CONTEXT_STEP));
    let mut best = None;
    while too_long - fits > 1 {
        let middle = fits.midpoint(too_long);
        let tried = at(middle * CONTEXT_STEP)?;
        if shortage(&tried, offer).is_none() {
            (fits, best) = (middle, Some(tried));
        } else {
            too_long = middle;
        }
    }
    let best = best.filter(|e| e.n_ctx >= SHORTEST_CONTEXT.min(asked) as u64);
    Ok(match best {
        Some(estimate) if !explicit => Verdict::Lowered {
            estimate,
            shortage: shortage_asked,
        },
        _ => Verdict::Refused {
            estimate,
            shortage: shortage_asked,
            longest: best.map(|e| e.n_ctx),
        },
    })
}

/// The zone that the machine would be in with the run, by its share alone.
pub fn zone_with(estimate: &Estimate, offer: &Offer) -> Zone {
    Zone::of_share(offer.share_with(estimate))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::memory::Cgroup;

    const MIB: u64 = 1 << 20;

    fn machine(total: u64, available: u64) -> Offer {
        Offer {
            device: "CPU".to_owned(),
            gpu: None,
            unified: true,
            reading: Reading {
                machine_total: total * MIB,
                machine_available: available * MIB,
                ..Reading::default()
            },
        }
    }

    /// 1,000 MiB of weights, 1 MiB of keys and values for 16 tokens, 100 MiB of the rest.
    fn model(n_ctx: usize) -> Result<Estimate> {
        Ok(Estimate {
            n_ctx: n_ctx as u64,
            weights_mapped: 1000 * MIB,
            kv: n_ctx as u64 * MIB / 16,
            compute: 60 * MIB,
            program: 40 * MIB,
            ..Estimate::default()
        })
    }

    #[test]
    fn what_fits_is_left_alone() {
        let verdict = govern(&mut model, 4096, false, &machine(4096, 2000)).unwrap();
        assert_eq!(verdict, Verdict::Fits(model(4096).unwrap()));
    }

    #[test]
    fn a_context_that_was_not_asked_for_is_lowered_to_the_longest_that_fits() {
        let offer = machine(4096, 2000);
        let verdict = govern(&mut model, 262_144, false, &offer).unwrap();
        let Verdict::Lowered { estimate, shortage } = verdict else {
            panic!("{verdict:?}");
        };
        assert_eq!(shortage.takes, model(262_144).unwrap().total());
        assert_eq!((shortage.has, shortage.total), (1872 * MIB, 4096 * MIB));
        assert_eq!(estimate.n_ctx % 256, 0);
        assert!(super::shortage(&estimate, &offer).is_none());
        let next = model(estimate.n_ctx as usize + 256).unwrap();
        assert!(super::shortage(&next, &offer).is_some());
    }

    #[test]
    fn a_context_that_was_asked_for_is_refused_with_the_longest_that_fits() {
        let verdict = govern(&mut model, 20_000, true, &machine(4096, 2000)).unwrap();
        let Verdict::Refused { longest, .. } = verdict else {
            panic!("{verdict:?}");
        };
        assert_eq!(longest, Some(12_288));
    }

    #[test]
    fn weights_that_do_not_fit_are_refused_whatever_the_context() {
        for explicit in [false, true] {
            let verdict = govern(&mut model, 8192, explicit, &machine(4096, 1150)).unwrap();
            let Verdict::Refused { longest, .. } = verdict else {
                panic!("{verdict:?}");
            };
            assert_eq!(longest, None);
        }
    }

    #[test]
    fn the_limit_of_a_control_group_counts_and_is_named() {
        let mut offer = machine(64 * 1024, 60 * 1024);
        offer.reading.cgroup = Some(Cgroup {
            limit: 1200 * MIB,
            used: 10 * MIB,
            reclaimable: 10 * MIB,
        });
        assert!(shortage(&model(1024).unwrap(), &machine(64 * 1024, 60 * 1024)).is_none());
        let short = shortage(&model(1024).unwrap(), &offer).unwrap();
        assert_eq!(short.of, "this control group");
        assert_eq!(short.total, 1200 * MIB);
    }

    #[test]
    fn a_gpu_has_a_budget_of_its_own_beside_the_machines() {
        let mut offer = machine(16 * 1024, 8 * 1024);
        offer.gpu = Some((1800 * MIB, 2048 * MIB));
        offer.unified = false;
        assert!(shortage(&model(1024).unwrap(), &offer).is_none());
        let short = shortage(&model(8192).unwrap(), &offer).unwrap();
        // 1,000 of weights, 512 of keys and values and 60 of results; the program is on the host.
        assert_eq!((short.takes, short.has), (1572 * MIB, 1416 * MIB));
        assert_eq!(short.of, "CPU");
        // A host without memory is short too.
        offer.reading.machine_available = 500 * MIB;
        assert_eq!(
            shortage(&model(1024).unwrap(), &offer).unwrap().of,
            "this machine"
        );
    }

    #[test]
    fn the_zone_with_the_run_counts_all_of_unified_memory() {
        let e = model(8192).unwrap(); // 1,612 MiB
        let offer = machine(4096, 3000);
        assert_eq!(zone_with(&e, &offer), Zone::Green);
        assert_eq!(zone_with(&e, &machine(4096, 2600)), Zone::Yellow);
        assert_eq!(zone_with(&e, &machine(4096, 2000)), Zone::Red);
        let gpu = Offer {
            gpu: Some((8 << 30, 8 << 30)),
            unified: false,
            ..machine(4096, 2000)
        };
        assert_eq!(zone_with(&e, &gpu), Zone::Green);
    }
}
