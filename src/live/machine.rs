//! The machine's memory, how near it is to swapping, and how hot it is.

use ggml_metal::{DeviceKind, find_device};
use qrun::memory;

use super::line::{Context, Memory, Parts, Zone};

/// Looks at the machine again and again.
pub struct Machine(Option<memory::Machine>);

impl Machine {
    /// None of its figures are known where the system tells nothing.
    pub fn new() -> Self {
        Self(memory::Machine::new())
    }

    /// The memory now, with this run's own parts; none where the system does not tell. The model is on the device of
    /// that name.
    pub fn memory(
        &mut self,
        parts: Parts,
        context: Context,
        device: Option<&str>,
        t: f64,
    ) -> Option<Memory> {
        let device = find_device(device).ok();
        // Metal wires the map, so that the system counts it itself.
        let is_metal = device.as_ref().is_some_and(|device| device.is_metal());
        let counted = if is_metal { 0 } else { parts.weights_mapped };
        let (reading, zone) = self.0.as_mut()?.judge(counted)?;
        let (total, used) = match device {
            // A GPU's own memory holds the model, so it is the one to show.
            Some(device) if device.kind() == DeviceKind::Gpu && !is_metal => {
                let (free, total) = device.memory();
                (total as u64, total.saturating_sub(free) as u64)
            }
            _ => (reading.total(), reading.used()),
        };
        Some(Memory {
            thermal: reading.thermal.map(|heat| heat.name().to_owned()),
            ..told(total, used, zone.into(), parts, context, t)
        })
    }
}

fn told(total: u64, used: u64, zone: Zone, parts: Parts, context: Context, t: f64) -> Memory {
    let own =
        parts.weights_mapped + parts.weights_copied + parts.kv + parts.state + parts.snapshots;
    // What this run holds is in use, whether all of its pages are in memory now or not.
    let used = used.max(own).min(total);
    let room_tokens = (context.used > 0).then(|| {
        let a_token = (context.kv_bytes / context.used).max(1);
        let fits = ((total as f64 * memory::RED) as u64).saturating_sub(used) / a_token;
        fits.min(context.limit.saturating_sub(context.used))
    });
    Memory {
        t,
        zone,
        total,
        used,
        parts,
        other: used.saturating_sub(own),
        room_tokens,
        thermal: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_and_what_others_use_follow_from_what_is_in_use() {
        let parts = Parts {
            weights_mapped: 200,
            kv: 100,
            ..Parts::default()
        };
        let context = Context {
            used: 10,
            limit: 1000,
            kv_bytes: 100,
        };
        let memory = told(1000, 500, Zone::Green, parts, context, 0.0);
        assert_eq!((memory.other, memory.used), (200, 500));
        assert_eq!(memory.room_tokens, Some(35));
        let full = told(1000, 2000, Zone::Red, parts, context, 0.0);
        assert_eq!((full.used, full.other), (1000, 700));
        assert_eq!(full.room_tokens, Some(0));
        let little = told(1000, 10, Zone::Green, parts, Context::default(), 0.0);
        assert_eq!(
            (little.used, little.other, little.room_tokens),
            (300, 0, None)
        );
    }
}
