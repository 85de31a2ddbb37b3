//! `qrun doctor`: what is well and what is not with this build, this machine and a model file.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use ggml_metal::{DeviceKind, Role, devices, one_line};
use qrun::engine::{Engine, EngineParams};
use qrun::fit::{Demand, Offer, Verdict, estimate, govern};
use qrun::memory::{Machine, Reading, Thermal, Zone};
use qrun::model::ModelFiles;
use qrun::model::health::{HeadHealth, head_health};
use qrun::model::weights::Plan;
use qrun::session::SessionParams;
use qrun::tune::{TuneKey, TuneRecord};
use serde::Serialize;
use serde_json::json;

use super::Outcome;
use crate::cli::DoctorArgs;
use crate::report;

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Mark {
    Ok,
    Note,
    Warning,
    Problem,
}

impl Mark {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One thing that was looked at.
#[derive(Serialize)]
struct Finding {
    mark: Mark,
    topic: &'static str,
    text: String,
    advice: Option<String>,
}

/// All that was found, in order.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn ok(&mut self, topic: &'static str, text: String) {
        self.add(Mark::Ok, topic, text, None);
    }

    fn add(&mut self, mark: Mark, topic: &'static str, text: String, advice: Option<&str>) {
        self.0.push(Finding {
            mark,
            topic,
            text,
            advice: advice.map(str::to_owned),
        });
    }
}

/// Looks at everything and prints it.
///
/// # Errors
/// When there is a problem, or stdout cannot be written.
pub fn run(args: &DoctorArgs) -> Result<Outcome> {
    let mut found = Findings::default();
    build(&mut found);
    hardware(&mut found);
    let reading = machine(&mut found);
    if let Some(path) = &args.model {
        model(&mut found, path, args, reading.as_ref());
    }
    let problems = found.0.iter().filter(|f| f.mark == Mark::Problem).count();
    if args.json {
        let object = json!({
            "version": qrun::VERSION.as_str(),
            "problems": problems,
            "memory": reading,
            "findings": found.0,
        });
        report::out(&format!("{}\n", serde_json::to_string_pretty(&object)?))?;
    } else {
        let mut text = String::new();
        for f in &found.0 {
            text += &format!("{:<8} {:<9} {}\n", f.mark.name(), f.topic, f.text);
            if let Some(advice) = &f.advice {
                text += &format!("{:<18} -> {advice}\n", "");
            }
        }
        report::out(&text)?;
    }
    match problems {
        0 => Ok(Outcome::Done),
        1 => bail!("one problem was found"),
        n => bail!("{n} problems were found"),
    }
}

/// Features of the CPU that ggml has kernels for: ggml's name, whether this CPU has it, whether much is lost without.
fn cpu_features() -> Vec<(&'static str, bool, bool)> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        vec![
            ("AVX2", has!("avx2"), true),
            ("FMA", has!("fma"), true),
            ("F16C", has!("f16c"), true),
            ("AVX512", has!("avx512f"), false),
            ("AVX512_VNNI", has!("avx512vnni"), false),
        ]
    }
    #[cfg(target_arch = "aarch64")]
    {
        use std::arch::is_aarch64_feature_detected as has;
        vec![
            ("NEON", has!("neon"), true),
            ("DOTPROD", has!("dotprod"), true),
            ("MATMUL_INT8", has!("i8mm"), false),
        ]
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    Vec::new()
}

/// Features that the CPU has and ggml was built without; true where much is lost.
fn unused_features(
    cpu: &[(&'static str, bool, bool)],
    built: &[String],
) -> (Vec<&'static str>, bool) {
    let unused = cpu
        .iter()
        .filter(|(name, has, _)| *has && built.iter().all(|b| b != name));
    let names = unused.clone().map(|(name, ..)| *name).collect();
    (names, unused.clone().any(|(.., needed)| *needed))
}

fn build(found: &mut Findings) {
    found.ok("build", format!("qrun {}", qrun::VERSION.as_str()));
    let cpu = devices().into_iter().find(|d| d.kind() == DeviceKind::Cpu);
    let Some(cpu) = cpu else {
        found.add(
            Mark::Problem,
            "kernels",
            "ggml has no CPU device".to_owned(),
            Some("lay the libggml-cpu files beside the program"),
        );
        return;
    };
    let built = cpu.features();
    let (unused, slow) = unused_features(&cpu_features(), &built);
    let text = format!("ggml's kernels for this CPU use {}", built.join(", "));
    if unused.is_empty() {
        found.ok("kernels", text);
    } else {
        found.add(
            if slow { Mark::Warning } else { Mark::Note },
            "kernels",
            format!("{text}; the CPU also has {}", unused.join(", ")),
            Some(
                "build from the repository, whose .cargo/config.toml sets target-cpu=native; without it ggml is several \
                 times slower",
            ),
        );
    }
}

fn hardware(found: &mut Findings) {
    let all = devices();
    for device in &all {
        let (free, total) = device.memory();
        let (kind, memory) = match device.kind() {
            DeviceKind::Gpu if device.is_metal() => (
                "GPU",
                format!(
                    ", {} of its working set of {} free",
                    report::bytes(free),
                    report::bytes(total)
                ),
            ),
            DeviceKind::Gpu => (
                "GPU",
                format!(", {} of {} free", report::bytes(free), report::bytes(total)),
            ),
            DeviceKind::Accelerator => ("accelerator", String::new()),
            DeviceKind::Cpu => (
                "CPU",
                format!(", {} threads by default", ggml_metal::performance_cores()),
            ),
        };
        found.ok(
            "device",
            format!(
                "{} is a {kind}: {}{memory}",
                device.name(),
                device.description()
            ),
        );
    }
    let has_gpu = all.iter().any(|d| d.kind() == DeviceKind::Gpu);
    if !has_gpu && cfg!(target_os = "macos") {
        found.add(
            Mark::Warning,
            "device",
            "Metal offers no device".to_owned(),
            Some("virtual machines have none; otherwise restart the machine"),
        );
    }
    if !has_gpu && Path::new("/proc/driver/nvidia/version").exists() {
        found.add(
            Mark::Warning,
            "device",
            "there is an NVIDIA driver, but this build has no CUDA device".to_owned(),
            Some("build with `--features cuda`, and see that `nvidia-smi` works"),
        );
    }
}

fn machine(found: &mut Findings) -> Option<Reading> {
    let Some((reading, zone)) = Machine::new().and_then(|mut machine| machine.judge(0)) else {
        found.add(
            Mark::Note,
            "memory",
            "the system does not tell about its memory".to_owned(),
            None,
        );
        return None;
    };
    judge_machine(found, &reading, zone);
    Some(reading)
}

/// What a reading says.
fn judge_machine(found: &mut Findings, reading: &Reading, zone: Zone) {
    let bytes = |n: u64| report::bytes(n as usize);
    let text = format!(
        "{}: {} of {} can be had",
        zone.name(),
        bytes(reading.available()),
        bytes(reading.total())
    );
    match zone {
        Zone::Green => found.ok("memory", text),
        Zone::Yellow => found.add(
            Mark::Note,
            "memory",
            text,
            Some("close programs before loading a large model"),
        ),
        Zone::Red => found.add(
            Mark::Warning,
            "memory",
            text,
            Some("the machine compresses or swaps already: close programs, a model would be slow"),
        ),
    }
    if let Some(group) = reading.cgroup
        && group.limit < reading.machine_total
    {
        found.add(
            Mark::Note,
            "memory",
            format!(
                "a control group limits this process to {} of the machine's {}",
                bytes(group.limit),
                bytes(reading.machine_total)
            ),
            Some("qrun keeps to it; raise the limit of the container or service for larger models"),
        );
    }
    let swap = format!(
        "{} of {} in use",
        bytes(reading.swap_used),
        bytes(reading.swap_total)
    );
    if reading.swap_total == 0 {
        found.ok("swap", "none".to_owned());
    } else if reading.swap_used > reading.machine_total / 8 {
        found.add(
            Mark::Note,
            "swap",
            swap,
            Some("memory was short before; what is swapped out makes programs stutter when they come back"),
        );
    } else {
        found.ok("swap", swap);
    }
    if let Some(p) = reading.pressure {
        let text = format!(
            "tasks waited for memory in {:.1} % of the last ten seconds, all of them in {:.1} %",
            p.some, p.full
        );
        if p.some < 10.0 {
            found.ok("pressure", text);
        } else {
            found.add(
                Mark::Warning,
                "pressure",
                text,
                Some("something else uses up the memory; see which program with `top`"),
            );
        }
    }
    if let Some(level) = reading.level {
        found.ok(
            "pressure",
            format!("the kernel calls {level} % of the memory available"),
        );
    }
    match reading.thermal {
        None => {}
        Some(heat @ (Thermal::Nominal | Thermal::Fair)) => {
            found.ok("heat", heat.name().to_owned());
        }
        Some(heat) => found.add(
            Mark::Warning,
            "heat",
            format!("{}: the system slows down", heat.name()),
            Some("let the machine cool down before measuring anything"),
        ),
    }
}

fn model(found: &mut Findings, path: &Path, args: &DoctorArgs, reading: Option<&Reading>) {
    let problem = |found: &mut Findings, error: &anyhow::Error, advice: &str| {
        found.add(
            Mark::Problem,
            "model",
            report::error_line(error),
            Some(advice),
        );
    };
    let files = match ModelFiles::outline(path, args.mtp.as_deref()) {
        Ok(files) => files,
        Err(error) => {
            return problem(found, &error, "fetch or convert the file again");
        }
    };
    let plan = match Plan::make(&files) {
        Ok(plan) => plan,
        Err(error) => return problem(found, &error, "fetch or convert the file again"),
    };
    found.ok(
        "model",
        format!(
            "{}: {} {}, {} tensors in {}, all inside the file and of the shapes that its numbers say",
            path.display(),
            files.config.arch,
            one_line(&files.config.name),
            files.all().map(|f| f.tensors().len()).sum::<usize>(),
            report::bytes(files.tensor_bytes())
        ),
    );
    match bad_vector(&plan) {
        None => found.ok("model", "all norms and other vectors are finite".to_owned()),
        Some(name) => found.add(
            Mark::Problem,
            "model",
            format!("tensor `{name}` holds values that are not finite numbers"),
            Some("the file is damaged, or was made wrongly: fetch or convert it again"),
        ),
    }
    head(found, &files, &plan);
    if let Some(kind) = network_file_system(path) {
        found.add(
            Mark::Note,
            "disk",
            format!("the file lies on a network file system ({kind})"),
            Some("copy it to a local disk: weights are read in place"),
        );
    }
    let params = EngineParams {
        device: args.device.clone(),
        mtp: args.mtp.clone(),
        ..EngineParams::default()
    };
    match Engine::plan(path, &params) {
        Ok(engine) => {
            tuned(found, &engine);
            if let Some(reading) = reading
                && let Err(error) = fits(found, engine, reading)
            {
                problem(found, &error, "choose another device with `--device`");
            }
        }
        Err(error) => problem(found, &error, "choose another device with `--device`"),
    }
}

/// The first vector with a value that is not a finite number.
fn bad_vector(plan: &Plan<'_>) -> Option<String> {
    let bad = plan.wanted.iter().find(|want| {
        let (values, _) = want.file.data(want.info).as_chunks::<4>();
        want.role == Role::Vector && values.iter().any(|&v| !f32::from_le_bytes(v).is_finite())
    });
    bad.map(|want| one_line(&want.info.name))
}

fn head(found: &mut Findings, files: &ModelFiles, plan: &Plan<'_>) {
    let text = |on: &str| format!("{on}, because {}", plan.status.reason);
    if !plan.status.on {
        found.add(
            Mark::Note,
            "MTP",
            text("off"),
            Some("speculation needs a draft head: take a file that has one, or give one with `--mtp`"),
        );
    } else if head_health(files) == HeadHealth::ZeroCentred {
        found.add(
            Mark::Note,
            "MTP",
            text("on"),
            Some("other programs do not mend it: `qrun convert` the checkpoint again for them"),
        );
    } else {
        found.ok("MTP", text("on"));
    }
}

fn tuned(found: &mut Findings, engine: &Engine) {
    let key = TuneKey::of(engine);
    let advice =
        "run `qrun tune` with this model; without it speculation measures anew in each run";
    match TuneRecord::load(&key) {
        Ok(Some(record)) => {
            let best = record.tried.iter().max_by(|a, b| a.tps.total_cmp(&b.tps));
            let text = match best {
                Some(best) if best.depth > 0 => format!("{} guesses were fastest", best.depth),
                _ => "plain decoding was fastest".to_owned(),
            };
            found.ok("tuning", format!("measured: {text}"));
        }
        Ok(None) if TuneRecord::has_stale(&key) => found.add(
            Mark::Note,
            "tuning",
            "measured before, but with another device, version or number of threads".to_owned(),
            Some(advice),
        ),
        Ok(None) => found.add(
            Mark::Note,
            "tuning",
            "not measured yet".to_owned(),
            Some(advice),
        ),
        Err(error) => found.add(
            Mark::Warning,
            "tuning",
            report::error_line(&error),
            Some("run `qrun tune` again, which replaces it"),
        ),
    }
}

fn fits(found: &mut Findings, engine: Engine, reading: &Reading) -> Result<()> {
    let on = engine.mtp_status().on;
    let demand = Demand {
        session: SessionParams {
            mtp: on,
            n_rollback: if on { 4 } else { 0 },
            ..SessionParams::default()
        },
        n_rows: 1,
        n_sessions: 1,
        observes: false,
    };
    let offer = Offer::of(&engine, *reading);
    let asked = engine.n_ctx();
    let engine = Arc::new(engine);
    let verdict = govern(
        &mut |n_ctx| estimate(&engine, &demand, n_ctx),
        asked,
        false,
        &offer,
    )?;
    let bytes = |n: u64| report::bytes(n as usize);
    match verdict {
        Verdict::Fits(sum) => found.ok(
            "fit",
            format!(
                "its whole context of {asked} tokens fits: {} of the {} that can be had",
                bytes(sum.total()),
                bytes(offer.budget())
            ),
        ),
        Verdict::Lowered { estimate, shortage } => found.add(
            Mark::Note,
            "fit",
            format!(
                "{} of its {asked} tokens of context fit into the {} that can be had",
                estimate.n_ctx,
                bytes(shortage.has)
            ),
            Some("`-ctk q8_0 -ctv q8_0` halves what the context takes"),
        ),
        Verdict::Refused { shortage, .. } => found.add(
            Mark::Problem,
            "fit",
            format!(
                "it takes {}, and {} of {} can be had",
                bytes(shortage.takes),
                bytes(shortage.has),
                shortage.of
            ),
            Some("see `qrun fit` for what this machine runs"),
        ),
    }
    Ok(())
}

/// The kind of the network file system that a file lies on (Linux); none where it is a local one.
fn network_file_system(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    network_mount(&mounts, &path)
}

/// Of lines such as `host:/data /mnt nfs4 rw 0 0`.
fn network_mount(mounts: &str, path: &Path) -> Option<String> {
    const NETWORK: [&str; 8] = [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "fuse.sshfs",
        "9p",
        "ceph",
    ];
    let lines = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (point, kind) = (words.nth(1)?, words.next()?);
        path.starts_with(point).then_some((point.len(), kind))
    });
    let (_, kind) = lines.max_by_key(|(n, _)| *n)?;
    NETWORK.contains(&kind).then(|| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use qrun::memory::{Cgroup, Pressure};

    fn marks(reading: &Reading, zone: Zone) -> Vec<(&'static str, Mark)> {
        let mut found = Findings::default();
        judge_machine(&mut found, reading, zone);
        found.0.iter().map(|f| (f.topic, f.mark)).collect()
    }

    #[test]
    fn a_machine_in_trouble_is_told_so() {
        let well = Reading {
            machine_total: 16 << 30,
            machine_available: 12 << 30,
            ..Reading::default()
        };
        assert_eq!(
            marks(&well, Zone::Green),
            [("memory", Mark::Ok), ("swap", Mark::Ok)]
        );
        let ill = Reading {
            swap_total: 8 << 30,
            swap_used: 4 << 30,
            pressure: Some(Pressure {
                some: 40.0,
                full: 20.0,
            }),
            thermal: Some(Thermal::Serious),
            cgroup: Some(Cgroup {
                limit: 1 << 30,
                ..Cgroup::default()
            }),
            ..well
        };
        assert_eq!(
            marks(&ill, Zone::Red),
            [
                ("memory", Mark::Warning),
                ("memory", Mark::Note),
                ("swap", Mark::Note),
                ("pressure", Mark::Warning),
                ("heat", Mark::Warning)
            ]
        );
    }

    #[test]
    fn a_build_without_the_cpus_features_is_called_out() {
        let cpu = [
            ("AVX2", true, true),
            ("FMA", false, true),
            ("AVX512", true, false),
        ];
        let built = |list: &[&str]| list.iter().map(|&s| s.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            unused_features(&cpu, &built(&["AVX2", "AVX512"])),
            (vec![], false)
        );
        assert_eq!(
            unused_features(&cpu, &built(&["AVX2"])),
            (vec!["AVX512"], false)
        );
        assert_eq!(
            unused_features(&cpu, &built(&["SSE3"])),
            (vec!["AVX2", "AVX512"], true)
        );
    }

    #[test]
    fn the_mount_nearest_to_the_file_counts() {
        let mounts = "/dev/sda1 / ext4 rw 0 0\nhost:/x /mnt/models nfs4 rw 0 0\n/dev/sdb /mnt/models/local xfs rw 0 0\nodd\n";
        let kind = |path: &str| network_mount(mounts, Path::new(path));
        assert_eq!(kind("/home/a.gguf"), None);
        assert_eq!(kind("/mnt/models/a.gguf").as_deref(), Some("nfs4"));
        assert_eq!(kind("/mnt/models/local/a.gguf"), None);
        assert_eq!(kind("/mnt/models2/a.gguf"), None);
    }
}
