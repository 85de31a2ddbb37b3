//! What the machine's memory looks like: readings, and the zone that they mean.
//!
//! A [`Reading`] holds what the system tells, as it tells it; everything derived from it is a pure function, so that
//! numbers of any platform can be put in. Mapped weights are the reason for most of the care: the system calls their
//! pages available, because it can drop them, but a model that loses them reads them from the disk for every token.
//! They count as in use here.

use std::path::{Path, PathBuf};

/// How near the machine is to swapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Zone {
    /// Less than 70 % in use.
    #[default]
    Green,
    /// 70 to 85 %, or signs of pressure.
    Yellow,
    /// 85 % and more: the system compresses and then swaps. Or it does so already.
    Red,
}

impl Zone {
    /// Its name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Green => "green",
            Self::Yellow => "yellow",
            Self::Red => "red",
        }
    }

    /// The zone of a share of memory in use, without history and other signs.
    pub fn of_share(share: f64) -> Self {
        match share {
            share if share >= RED => Self::Red,
            share if share >= YELLOW => Self::Yellow,
            _ => Self::Green,
        }
    }
}

/// Share in use from which it is yellow.
pub const YELLOW: f64 = 0.70;
/// Share in use from which it is red.
pub const RED: f64 = 0.85;
/// A zone is left when the share is this much below its border.
const HYSTERESIS: f64 = 0.03;
/// Growth of the swap in use that shows pressure, in bytes; less is what systems do anyway.
pub const SWAP_STIRS: u64 = 64 << 20;
/// Part of the memory that the swap in use has to grow by to make the zone red.
const SWAP_FLOODS: u64 = 32;
/// Below this share in use, what was swapped out is history.
const SWAP_COUNTS_FROM: f64 = 0.60;
/// Percent of the last ten seconds in which some task waited for memory, from which there is pressure.
const STALLS: f32 = 10.0;

/// How hot the machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Thermal {
    /// No limits.
    Nominal,
    /// The system begins to slow down.
    Fair,
    /// It slows down.
    Serious,
    /// It is about to stop.
    Critical,
}

impl Thermal {
    /// Its name in lower case, as macOS calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nominal => "nominal",
            Self::Fair => "fair",
            Self::Serious => "serious",
            Self::Critical => "critical",
        }
    }
}

/// A limit on the memory of a group of processes (Linux), bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Cgroup {
    /// The most that the group may use.
    pub limit: u64,
    /// What it uses, cached files included.
    pub used: u64,
    /// How much of that are cached files, which make room when it is wanted.
    pub reclaimable: u64,
}

impl Cgroup {
    /// What the group can still use.
    pub fn available(&self) -> u64 {
        let held = self.used.saturating_sub(self.reclaimable);
        self.limit.saturating_sub(held)
    }
}

/// Linux's pressure stall information on memory: percent of the last ten seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Pressure {
    /// In which some task waited for memory.
    pub some: f32,
    /// In which all did.
    pub full: f32,
}

/// Memory of this process, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Footprint {
    /// Its own: cannot be dropped, only compressed or swapped.
    pub anonymous: u64,
    /// Pages of mapped files that are in memory now, where the system counts them as available.
    pub mapped: u64,
}

/// What the system tells about memory and heat, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Reading {
    /// The machine's memory.
    pub machine_total: u64,
    /// What the machine can give without swapping, cached files included.
    pub machine_available: u64,
    /// Swap that there is.
    pub swap_total: u64,
    /// Swap in use.
    pub swap_used: u64,
    /// This process's share.
    pub own: Footprint,
    /// The tightest limit that this process runs under.
    pub cgroup: Option<Cgroup>,
    /// Linux's measure of waiting for memory.
    pub pressure: Option<Pressure>,
    /// macOS: percent of the memory that the kernel calls available (`kern.memorystatus_level`).
    pub level: Option<u8>,
    /// How hot it is, where the system tells.
    pub thermal: Option<Thermal>,
}

impl Reading {
    /// The memory that counts: the machine's, or the limit that this process runs under.
    pub fn total(&self) -> u64 {
        let limit = self.cgroup.map_or(u64::MAX, |c| c.limit);
        self.machine_total.min(limit)
    }

    /// What can be had without swapping or hitting the limit; the cache of mapped weights counts as such.
    pub fn available(&self) -> u64 {
        let within = self.cgroup.map_or(u64::MAX, |c| c.available());
        self.machine_available.min(within).min(self.total())
    }

    /// In use: what is not available, and this process's mapped files.
    pub fn used(&self) -> u64 {
        let taken = self.total() - self.available();
        taken.saturating_add(self.own.mapped).min(self.total())
    }

    /// In use by others than this process.
    pub fn others(&self) -> u64 {
        let own = self.own.anonymous.saturating_add(self.own.mapped);
        self.used().saturating_sub(own)
    }

    /// Share in use, 0 to 1.
    pub fn share(&self) -> f64 {
        self.used() as f64 / self.total().max(1) as f64
    }
}

/// The zone of a reading, where the one before was `before` and the swap in use grew by `swap_growth` bytes since
/// the start.
///
/// The share in use decides, or the kernel's own level where that is worse; a zone is left only 3 percent below its
/// border. Swap that grew and tasks that wait for memory make it yellow at least, much of it red.
pub fn zone(before: Zone, swap_growth: u64, reading: &Reading) -> Zone {
    let level = reading.level.map_or(0.0, |l| 1.0 - f64::from(l) / 100.0);
    let share = reading.share().max(level);
    let kept = |zone: Zone| if before >= zone { HYSTERESIS } else { 0.0 };
    let by_share = if share >= RED - kept(Zone::Red) {
        Zone::Red
    } else if share >= YELLOW - kept(Zone::Yellow) {
        Zone::Yellow
    } else {
        Zone::Green
    };

    let pressure = reading.pressure.unwrap_or_default();
    // Averages fall slowly enough; half of the border is the way back.
    let stalls =
        |value: f32, zone: Zone| value >= if before >= zone { STALLS / 2.0 } else { STALLS };
    let swaps = |bytes: u64| share >= SWAP_COUNTS_FROM && swap_growth >= bytes;
    let by_signs = if stalls(pressure.full, Zone::Red)
        || swaps((reading.total() / SWAP_FLOODS).max(SWAP_STIRS))
    {
        Zone::Red
    } else if stalls(pressure.some, Zone::Yellow) || swaps(SWAP_STIRS) {
        Zone::Yellow
    } else {
        Zone::Green
    };
    by_share.max(by_signs)
}

/// The machine, read again and again.
pub struct Machine {
    system: sysinfo::System,
    swap_at_start: u64,
    zone: Zone,
}

impl Machine {
    /// Begins to watch: growth of the swap counts from here. None where the system tells nothing.
    pub fn new() -> Option<Self> {
        let mut machine = Self {
            system: sysinfo::System::new().ok()?,
            swap_at_start: 0,
            zone: Zone::Green,
        };
        machine.swap_at_start = machine.read()?.swap_used;
        Some(machine)
    }

    /// Looks; none where the system tells nothing.
    pub fn read(&mut self) -> Option<Reading> {
        let system = &mut self.system;
        system.refresh_memory();
        let total = system.total_memory();
        if total == 0 {
            return None;
        }
        // macOS's own "available" counts active pages of all programs; what is used there is the figure that the
        // Activity Monitor shows.
        let available = if cfg!(target_os = "macos") {
            total.saturating_sub(system.used_memory())
        } else {
            system.available_memory()
        };
        let mut reading = Reading {
            machine_total: total,
            machine_available: available.min(total),
            swap_total: system.total_swap(),
            swap_used: system.used_swap(),
            level: ggml_metal::memory_level(),
            ..Reading::default()
        };
        if cfg!(target_os = "linux") {
            let root = Path::new("/");
            let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
            reading.own = read("proc/self/status")
                .map(|text| footprint(&text))
                .unwrap_or_default();
            reading.pressure = read("proc/pressure/memory").and_then(|text| pressure(&text));
            reading.cgroup = cgroup(root);
            reading.thermal = zones_of_heat(root);
        } else {
            reading.own.anonymous = ggml_metal::memory_footprint().unwrap_or(0) as u64;
            reading.thermal = ggml_metal::thermal_level().map(|level| match level {
                0 => Thermal::Nominal,
                1 => Thermal::Fair,
                2 => Thermal::Serious,
                _ => Thermal::Critical,
            });
        }
        Some(reading)
    }

    /// Looks, and judges by what was seen before. `mapped` bytes of weights count as in use, whether all of their
    /// pages are in memory now or not.
    pub fn judge(&mut self, mapped: u64) -> Option<(Reading, Zone)> {
        let mut reading = self.read()?;
        reading.own.mapped = reading.own.mapped.max(mapped);
        self.zone = zone(self.zone, self.swap_growth(&reading), &reading);
        Some((reading, self.zone))
    }

    /// By how much the swap in use grew since the start, bytes.
    pub fn swap_growth(&self, reading: &Reading) -> u64 {
        reading.swap_used.saturating_sub(self.swap_at_start)
    }
}

/// Address space that the program takes besides a model's file: libraries, the stacks and heaps of its threads, the
/// vocabulary.
const OWN_ADDRESSES: u64 = 448 << 20;

/// Refuses to load a file of so many bytes where the address space of this process is limited (`ulimit -v`) and what is
/// left does not hold it: a program that runs out of it cannot say so any more.
///
/// # Errors
/// In that case.
pub fn check_address_space(file_bytes: u64) -> anyhow::Result<()> {
    let read = |name: &str| std::fs::read_to_string(Path::new("/proc/self").join(name)).ok();
    let (Some(limits), Some(status)) = (read("limits"), read("status")) else {
        return Ok(());
    };
    let Some((limit, left)) = address_space(&limits, &status) else {
        return Ok(());
    };
    let needed = file_bytes.saturating_add(OWN_ADDRESSES);
    let mib = |bytes: u64| bytes >> 20;
    anyhow::ensure!(
        needed <= left,
        "the address space of this process is limited to {} MiB (`ulimit -v`), of which {} are left, and {} are needed; raise \
         the limit or lift it with `ulimit -v unlimited`",
        mib(limit),
        mib(left),
        mib(needed)
    );
    Ok(())
}

/// Of `/proc/self/limits` and `/proc/self/status`: the limit of the address space and what is left of it; none where there
/// is no limit.
fn address_space(limits: &str, status: &str) -> Option<(u64, u64)> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some((limit, limit.saturating_sub(field(status, "VmSize")?)))
}

/// The number after a key at the start of a line, in bytes: `Key: 12 kB` and `key 12` are understood.
fn field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?;
        rest.starts_with([':', ' ', '\t']).then_some(rest)
    })?;
    let mut words = line.trim_start_matches(':').split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    match words.next() {
        None => Some(number),
        Some("kB") => number.checked_mul(1024),
        Some(_) => None,
    }
}

/// Of `/proc/self/status`.
fn footprint(status: &str) -> Footprint {
    let get = |key| field(status, key).unwrap_or(0);
    Footprint {
        anonymous: get("RssAnon") + get("RssShmem") + get("VmSwap"),
        mapped: get("RssFile"),
    }
}

/// Of `/proc/pressure/memory`: lines such as `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`.
fn pressure(text: &str) -> Option<Pressure> {
    let average = |kind: &str| -> Option<f32> {
        let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
        let value = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("avg10="))?;
        let value: f32 = value.parse().ok()?;
        (0.0..=100.0).contains(&value).then_some(value)
    };
    Some(Pressure {
        some: average("some ")?,
        // Older kernels have no such line for every resource.
        full: average("full ").unwrap_or(0.0),
    })
}

/// A limit that means none: version 1 writes the largest number of pages.
const NO_LIMIT: u64 = 1 << 60;

/// The tightest memory limit over this process: its own control group's or that of a group above, version 2 or 1.
/// `root` is where `/proc` and `/sys` lie.
fn cgroup(root: &Path) -> Option<Cgroup> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = std::fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let found = cgroup_folders(&groups, &mounts).into_iter();
    found
        .flat_map(|(mount, folder)| {
            let (mount, folder) = (rooted(root, &mount), rooted(root, &folder));
            let above: Vec<PathBuf> = folder
                .ancestors()
                .take_while(|dir| dir.starts_with(&mount))
                .map(Path::to_owned)
                .collect();
            above.into_iter().filter_map(|dir| group_limit(&dir))
        })
        .min_by_key(Cgroup::available)
}

fn rooted(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Mount points of hierarchies that can limit memory, each with the folder of this process's group in it: of
/// `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn cgroup_folders(groups: &str, mounts: &str) -> Vec<(PathBuf, PathBuf)> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let version_2 = controllers.is_empty();
        if !version_2 && controllers.split(',').all(|c| c != "memory") {
            continue;
        }
        for mount in mounts.lines() {
            let Some((before, after)) = mount.split_once(" - ") else {
                continue;
            };
            let before: Vec<&str> = before.split(' ').collect();
            let after: Vec<&str> = after.split(' ').collect();
            let ([_, _, _, mount_root, point, ..], [kind, _, options, ..]) =
                (before.as_slice(), after.as_slice())
            else {
                continue;
            };
            let fits = if version_2 {
                *kind == "cgroup2"
            } else {
                *kind == "cgroup" && options.split(',').any(|o| o == "memory")
            };
            if fits {
                // A container sees only a part of the hierarchy, and may have another name for its group.
                let inside = Path::new(path)
                    .strip_prefix(mount_root)
                    .unwrap_or(Path::new(""));
                found.push((PathBuf::from(point), Path::new(point).join(inside)));
            }
        }
    }
    found
}

/// The limit of one group; none where it has none.
fn group_limit(dir: &Path) -> Option<Cgroup> {
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let stat = read("memory.stat").unwrap_or_default();
    let files = |active: &str, inactive: &str| {
        let get = |key| field(&stat, key).unwrap_or(0);
        get(active) + get(inactive)
    };
    // `max` is no number, and so no limit. Above `high` the group is slowed down.
    let version_2 = number("memory.max")
        .into_iter()
        .chain(number("memory.high"));
    let found = match (version_2.min(), number("memory.limit_in_bytes")) {
        (Some(limit), _) => Cgroup {
            limit,
            used: number("memory.current")?,
            reclaimable: files("active_file", "inactive_file"),
        },
        (None, Some(limit)) => Cgroup {
            limit,
            used: number("memory.usage_in_bytes")?,
            reclaimable: files("total_active_file", "total_inactive_file"),
        },
        (None, None) => return None,
    };
    (found.limit < NO_LIMIT).then_some(found)
}

/// How hot the hottest of Linux's thermal zones is, by its own trip points; none where there are none.
fn zones_of_heat(root: &Path) -> Option<Thermal> {
    let dir = std::fs::read_dir(root.join("sys/class/thermal")).ok()?;
    let zones = dir.flatten().filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("thermal_zone")
    });
    zones.filter_map(|zone| heat(&zone.path())).max()
}

fn heat(zone: &Path) -> Option<Thermal> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(zone.join(name)).ok()?;
        Some(text.trim().to_owned())
    };
    let now: i64 = read("temp")?.parse().ok()?;
    let mut heat = None;
    for i in 0..16 {
        let Some(kind) = read(&format!("trip_point_{i}_type")) else {
            break;
        };
        let means = match kind.as_str() {
            "critical" => Thermal::Critical,
            "hot" => Thermal::Serious,
            "passive" => Thermal::Fair,
            _ => continue,
        };
        let Some(at) = read(&format!("trip_point_{i}_temp")).and_then(|t| t.parse::<i64>().ok())
        else {
            continue;
        };
        // Points at or below zero are switched off.
        if at > 0 {
            let reached = if now >= at { means } else { Thermal::Nominal };
            heat = heat.max(Some(reached));
        }
    }
    heat
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const GIB: u64 = 1 << 30;

    /// A machine of `total` GiB with `used` GiB in use.
    fn reading(total: f64, used: f64) -> Reading {
        Reading {
            machine_total: (total * GIB as f64) as u64,
            machine_available: ((total - used) * GIB as f64) as u64,
            ..Reading::default()
        }
    }

    #[test]
    fn a_limit_of_the_address_space_is_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max cpu time              unlimited            unlimited            seconds   \n\
             Max address space         614400000            unlimited            bytes     \n";
        let status = "Name:\tqrun\nVmPeak:\t  200000 kB\nVmSize:\t  100000 kB\n";
        let found = address_space(limits, status);
        assert_eq!(found, Some((614_400_000, 614_400_000 - 102_400_000)));
        let none = limits.replace("614400000", "unlimited");
        assert_eq!(address_space(&none, status), None);
        assert_eq!(address_space("", status), None);
    }

    #[test]
    fn the_share_in_use_decides() {
        for (used, expected) in [
            (0.0, Zone::Green),
            (6.99, Zone::Green),
            (7.0, Zone::Yellow),
            (8.49, Zone::Yellow),
            (8.5, Zone::Red),
            (10.0, Zone::Red),
        ] {
            let r = reading(10.0, used);
            assert_eq!(zone(Zone::Green, 0, &r), expected, "{used}");
            assert_eq!(Zone::of_share(r.share()), expected, "{used}");
        }
    }

    #[test]
    fn a_zone_is_left_below_its_border_only() {
        let mut now = Zone::Green;
        let mut path = Vec::new();
        for used in [6.9, 7.1, 6.9, 6.75, 6.6, 8.6, 8.4, 8.25, 8.1, 6.8, 6.0] {
            now = zone(now, 0, &reading(10.0, used));
            path.push(now.name());
        }
        assert_eq!(
            path,
            [
                "green", "yellow", "yellow", "yellow", "green", "red", "red", "red", "yellow",
                "yellow", "green"
            ]
        );
    }

    #[test]
    fn growing_swap_raises_the_zone_while_memory_is_tight() {
        let tight = reading(16.0, 10.0);
        assert_eq!(zone(Zone::Green, 63 << 20, &tight), Zone::Green);
        assert_eq!(zone(Zone::Green, 64 << 20, &tight), Zone::Yellow);
        assert_eq!(zone(Zone::Green, 512 << 20, &tight), Zone::Red);
        // Pages that were swapped out long ago stay there though there is room again.
        assert_eq!(zone(Zone::Red, 512 << 20, &reading(16.0, 8.0)), Zone::Green);
        // A small machine: a 32nd of it is less than what stirs.
        assert_eq!(
            zone(Zone::Green, 40 << 20, &reading(1.0, 0.65)),
            Zone::Green
        );
    }

    #[test]
    fn tasks_that_wait_for_memory_raise_it_too() {
        let with = |some, full| Reading {
            pressure: Some(Pressure { some, full }),
            ..reading(16.0, 4.0)
        };
        assert_eq!(zone(Zone::Green, 0, &with(9.9, 0.0)), Zone::Green);
        assert_eq!(zone(Zone::Green, 0, &with(10.0, 0.0)), Zone::Yellow);
        assert_eq!(zone(Zone::Yellow, 0, &with(6.0, 0.0)), Zone::Yellow);
        assert_eq!(zone(Zone::Yellow, 0, &with(4.0, 0.0)), Zone::Green);
        assert_eq!(zone(Zone::Green, 0, &with(30.0, 12.0)), Zone::Red);
        assert_eq!(zone(Zone::Red, 0, &with(30.0, 6.0)), Zone::Red);
        assert_eq!(zone(Zone::Red, 0, &with(30.0, 4.0)), Zone::Yellow);
    }

    #[test]
    fn the_level_of_macos_counts_where_it_is_worse() {
        let with = |level| Reading {
            level: Some(level),
            ..reading(32.0, 8.0)
        };
        assert_eq!(zone(Zone::Green, 0, &with(75)), Zone::Green);
        assert_eq!(zone(Zone::Green, 0, &with(30)), Zone::Yellow);
        assert_eq!(zone(Zone::Green, 0, &with(15)), Zone::Red);
        assert_eq!(zone(Zone::Red, 0, &with(17)), Zone::Red);
        // A level that looks better than the figures changes nothing.
        let full = Reading {
            level: Some(90),
            ..reading(32.0, 30.0)
        };
        assert_eq!(zone(Zone::Green, 0, &full), Zone::Red);
    }

    #[test]
    fn within_a_limit_the_limit_is_the_total() {
        let r = Reading {
            cgroup: Some(Cgroup {
                limit: 2 * GIB,
                used: 2 * GIB,
                reclaimable: GIB / 2,
            }),
            ..reading(64.0, 4.0)
        };
        assert_eq!(r.total(), 2 * GIB);
        assert_eq!(r.available(), GIB / 2);
        assert_eq!(zone(Zone::Green, 0, &r), Zone::Yellow);
        // A machine that has less than the limit leaves is what counts.
        let r = Reading {
            cgroup: Some(Cgroup {
                limit: 8 * GIB,
                used: 0,
                reclaimable: 0,
            }),
            ..reading(64.0, 63.0)
        };
        assert_eq!((r.total(), r.available()), (8 * GIB, GIB));
        assert_eq!(zone(Zone::Green, 0, &r), Zone::Red);
    }

    #[test]
    fn use_is_attributed_and_mapped_weights_count() {
        let r = Reading {
            own: Footprint {
                anonymous: GIB,
                mapped: 4 * GIB,
            },
            ..reading(16.0, 5.0)
        };
        assert_eq!(r.used(), 9 * GIB);
        assert_eq!(r.others(), 4 * GIB);
        // Figures that contradict each other end in no nonsense.
        let r = Reading {
            own: Footprint {
                anonymous: 0,
                mapped: u64::MAX,
            },
            machine_available: u64::MAX,
            ..reading(16.0, 0.0)
        };
        assert_eq!(
            (r.available(), r.used(), r.others()),
            (16 * GIB, 16 * GIB, 0)
        );
    }

    #[test]
    fn the_files_of_proc_are_understood() {
        let status = "Name:\tqrun\nVmSwap:\t       8 kB\nRssAnon:\t     112 kB\nRssFile:\t    1588 kB\nRssShmem:\t 4 kB\n";
        let own = footprint(status);
        assert_eq!(own.anonymous, 124 * 1024);
        assert_eq!(own.mapped, 1588 * 1024);
        for text in [
            "",
            "RssAnon:",
            "RssAnon: x kB",
            "RssAnon: 12 parsecs",
            "RssAnon: -3 kB",
        ] {
            assert_eq!(footprint(text), Footprint::default(), "{text:?}");
        }
        assert_eq!(field("RssAnon: 18446744073709551615 kB", "RssAnon"), None);
        // A key is a whole word.
        assert_eq!(
            field("inactive_file 5\nactive_file 7\n", "active_file"),
            Some(7)
        );
        assert_eq!(field("active_files 5\n", "active_file"), None);

        let text = "some avg10=1.53 avg60=0.87 avg300=0.24 total=1234\nfull avg10=0.50 avg60=0 avg300=0 total=1\n";
        let p = pressure(text).unwrap();
        assert_eq!((p.some, p.full), (1.53, 0.5));
        assert_eq!(pressure("some avg10=2.00 total=1\n").unwrap().full, 0.0);
        for text in [
            "",
            "some",
            "some avg60=1",
            "some avg10=x",
            "some avg10=nan",
            "some avg10=-1",
            "full avg10=1.0",
        ] {
            assert_eq!(pressure(text), None, "{text:?}");
        }
    }

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    const V2: &str =
        "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_tightest_limit_of_the_groups_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(
            root,
            &[
                ("proc/self/cgroup", "0::/user/job/step\n"),
                ("proc/self/mountinfo", V2),
                ("sys/fs/cgroup/user/job/step/memory.max", "max\n"),
                ("sys/fs/cgroup/user/job/step/memory.high", "max\n"),
                ("sys/fs/cgroup/user/job/memory.max", "4000000\n"),
                ("sys/fs/cgroup/user/job/memory.high", "3000000\n"),
                ("sys/fs/cgroup/user/job/memory.current", "2500000\n"),
                (
                    "sys/fs/cgroup/user/job/memory.stat",
                    "anon 1\ninactive_file 200000\nactive_file 300000\n",
                ),
                ("sys/fs/cgroup/user/memory.max", "9000000\n"),
                ("sys/fs/cgroup/user/memory.current", "1\n"),
            ],
        );
        let found = cgroup(root).unwrap();
        assert_eq!(
            found,
            Cgroup {
                limit: 3_000_000,
                used: 2_500_000,
                reclaimable: 500_000
            }
        );
        assert_eq!(found.available(), 1_000_000);
    }

    #[test]
    fn version_1_and_containers_are_understood() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let mounts = "36 25 0:32 /docker/abc /sys/fs/cgroup/memory ro shared:16 - cgroup cgroup rw,memory\n\
                      37 25 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      38 25 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        write(
            root,
            &[
                (
                    "proc/self/cgroup",
                    "4:memory:/docker/abc\n3:cpu:/docker/abc\n0::/\n",
                ),
                ("proc/self/mountinfo", mounts),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "600\n"),
                (
                    "sys/fs/cgroup/memory/memory.stat",
                    "active_file 1\ntotal_active_file 50\ntotal_inactive_file 50\n",
                ),
            ],
        );
        let found = cgroup(root).unwrap();
        assert_eq!((found.limit, found.available()), (1000, 500));
        // No limit is a very large one.
        write(
            root,
            &[(
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            )],
        );
        assert_eq!(cgroup(root), None);
    }

    #[test]
    fn damaged_control_files_limit_nothing() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert_eq!(cgroup(root), None);
        for (groups, mounts, max) in [
            ("", V2, "1000"),
            ("0::", "", "1000"),
            ("nonsense", "nonsense - ", "1000"),
            ("0::/", "1 2 3 - cgroup2", "1000"),
            ("0::/", V2, ""),
            ("0::/", V2, "-5"),
            ("0::/", V2, "many"),
        ] {
            write(
                root,
                &[
                    ("proc/self/cgroup", groups),
                    ("proc/self/mountinfo", mounts),
                    ("sys/fs/cgroup/memory.max", max),
                    ("sys/fs/cgroup/memory.current", "500"),
                ],
            );
            assert_eq!(cgroup(root), None, "{groups:?} {mounts:?} {max:?}");
        }
        write(root, &[("sys/fs/cgroup/memory.max", "1000")]);
        assert_eq!(cgroup(root).unwrap().available(), 500);
    }

    #[test]
    fn heat_is_judged_by_trip_points() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert_eq!(zones_of_heat(root), None);
        let zone = "sys/class/thermal/thermal_zone0";
        let file = |name: &str| format!("{zone}/{name}");
        write(
            root,
            &[
                (&file("trip_point_0_type"), "critical\n"),
                (&file("trip_point_0_temp"), "105000\n"),
                (&file("trip_point_1_type"), "passive\n"),
                (&file("trip_point_1_temp"), "95000\n"),
                (&file("trip_point_2_type"), "hot\n"),
                (&file("trip_point_2_temp"), "-274000\n"),
                ("sys/class/thermal/cooling_device0/temp", "999999\n"),
            ],
        );
        assert_eq!(zones_of_heat(root), None, "no temperature");
        for (temp, expected) in [
            ("50000\n", Some(Thermal::Nominal)),
            ("95000\n", Some(Thermal::Fair)),
            ("106000\n", Some(Thermal::Critical)),
            ("warm\n", None),
        ] {
            write(root, &[(&file("temp"), temp)]);
            assert_eq!(zones_of_heat(root), expected, "{temp:?}");
        }
    }

    #[test]
    fn this_machine_can_be_read() {
        let mut machine = Machine::new().unwrap();
        let (reading, _) = machine.judge(0).unwrap();
        assert!(reading.total() > 0 && reading.available() <= reading.total());
        if cfg!(target_os = "linux") {
            // What this process allocates and touches appears as its own.
            let before = reading.own.anonymous;
            let block = vec![1u8; 64 << 20];
            let after = machine.read().unwrap().own.anonymous;
            assert!(block.iter().all(|&b| b == 1));
            assert!(after >= before + (60 << 20), "{before} {after}");
        }
    }
}
