//! What is planned is what a run takes, and a run that cannot be is refused before it is loaded.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use ggml_metal::DType;
use qrun::engine::{Engine, EngineParams};
use qrun::fit::{Demand, estimate};
use qrun::imatrix;
use qrun::memory::Machine;
use qrun::session::{Outputs, Session, SessionBytes, SessionParams};
use qrun::state::KvTypes;

use support::{demo, never, root, synth};

/// The CPU, or the device that `QRUN_TEST_DEVICE` names.
fn params() -> EngineParams {
    let device = std::env::var("QRUN_TEST_DEVICE");
    EngineParams {
        device: Some(device.unwrap_or_else(|_| "CPU".to_owned())),
        n_threads: Some(1),
        ..EngineParams::default()
    }
}

/// Fills a session as a run does: a prompt, then, in the last 256 cells, every pass and draft that speculation makes.
fn fill(engine: &Arc<Engine>, params: SessionParams) -> SessionBytes {
    let mut session = Session::new(engine.clone(), params).unwrap();
    let n_slots = params.n_rollback + 1;
    let tokens = |n: usize| vec![1u32; n];
    let n_batch = params.n_batch.min(params.n_ctx);
    let last = params.n_ctx.next_multiple_of(256) - 230;
    let first = last.saturating_sub(n_batch);
    session
        .eval(&tokens(first), Outputs::None, &never())
        .unwrap();
    session
        .eval(&tokens(last - first), Outputs::Last, &never())
        .unwrap();
    for back in 0..n_slots {
        for width in 1..=n_slots {
            session
                .eval(&tokens(n_slots), Outputs::All, &never())
                .unwrap();
            session.reject(back).unwrap();
            session
                .eval(&tokens(width), Outputs::All, &never())
                .unwrap();
        }
        if params.mtp {
            for depth in 1..n_slots {
                session
                    .eval(&tokens(n_slots), Outputs::All, &never())
                    .unwrap();
                session.reject(back).unwrap();
                session.draft_tokens(1, depth).unwrap();
            }
        }
    }
    assert!(session.n_past() <= params.n_ctx, "the test fills too much");
    session.bytes()
}

#[test]
fn a_planned_session_has_the_bytes_of_a_full_one() {
    let folder = tempfile::tempdir().unwrap();
    let moe = synth::moe(folder.path());
    let kv = |k, v| KvTypes { k, v };
    for path in [demo(), moe] {
        let engine = Engine::load(&path, &params(), &mut |_, _| {}).unwrap();
        let planned = Arc::new(Engine::plan(&path, &params()).unwrap());
        assert_eq!(planned.weight_bytes(), engine.weight_bytes());
        let f16 = kv(DType::F16, DType::F16);
        for (n_ctx, n_batch, kv, n_rollback) in [
            (256, 16, f16, 0),
            (700, 512, f16, 0),
            (1280, 512, kv(DType::F32, DType::F16), 0),
            (512, 32, kv(DType::Q8_0, DType::Q8_0), 0),
            (768, 256, f16, 3),
            (1280, 64, kv(DType::Q8_0, DType::F16), 1),
        ] {
            let session = SessionParams {
                n_ctx,
                n_batch,
                kv,
                mtp: n_rollback > 0 && engine.mtp_status().on,
                n_rollback,
                draft_vocab: None,
            };
            let plan = Session::new(planned.clone(), session)
                .unwrap()
                .plan_full(1)
                .unwrap();
            let real = fill(&engine, session);
            let what = format!("{} {session:?}", path.display());
            let compute = plan.session.compute + plan.host_compute;
            let planned_bytes = SessionBytes {
                compute,
                ..plan.session
            };
            assert_eq!(planned_bytes, real, "{what}");
            let demand = Demand {
                session,
                n_rows: 1,
                n_sessions: 1,
                observes: false,
            };
            let sum = estimate(&planned, &demand, n_ctx).unwrap();
            assert_eq!(sum.kv, real.kv as u64, "{what}");
            assert_eq!(sum.compute + sum.host_compute, compute as u64, "{what}");
            // A loaded engine gives the numbers too, but only a planned session can be filled without tokens.
            let error = Session::new(engine.clone(), session)
                .unwrap()
                .plan_full(1)
                .unwrap_err();
            assert!(error.to_string().contains("planned"), "{error}");
        }
    }
}

#[test]
fn repacked_weights_are_planned_too() {
    let params = EngineParams {
        repack: ggml_metal::Repack::Beside,
        ..params()
    };
    let planned = Engine::plan(&demo(), &params).unwrap();
    let engine = planned.load_planned(&mut |_, _| {}).unwrap();
    assert_eq!(planned.weight_bytes(), engine.weight_bytes());
}

/// What an importance matrix takes is known before anything is loaded.
#[test]
fn observing_is_planned_too() {
    let folder = tempfile::tempdir().unwrap();
    for path in [demo(), synth::moe(folder.path())] {
        let planned = Engine::plan(&path, &params()).unwrap();
        let engine = planned.load_planned(&mut |_, _| {}).unwrap();
        let plan = imatrix::planned_bytes(&planned, 512).unwrap();
        // Of a loaded engine these are the bytes of the graph that observes.
        let real = imatrix::planned_bytes(&engine, 512).unwrap();
        assert_eq!(plan, real, "{}", path.display());
        assert!(plan.session.compute > 0 && plan.host_compute > 0);
    }
}

#[test]
fn a_limited_address_space_is_an_error_and_no_crash() {
    if !cfg!(target_os = "linux") {
        println!("SKIPPED: only Linux limits the address space");
        return;
    }
    for limit in ["60000", "150000", "300000"] {
        let out = Command::new("sh")
            .args(["-c", "ulimit -v \"$0\" && exec \"$@\"", limit])
            .args([env!("CARGO_BIN_EXE_qrun"), "-p", "Hi.", "-n", "1"])
            .output()
            .unwrap();
        let stderr = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{limit}: {stderr}");
        assert!(out.stdout.is_empty(), "{limit}: {stderr}");
        assert!(stderr.contains("error: "), "{limit}: {stderr}");
    }
}

/// Resident memory of this process must not exceed the sum, nor be far below: what is asked for is what is used.
#[test]
fn the_sum_holds_what_a_process_takes() {
    if !cfg!(target_os = "linux") || std::env::var_os("QRUN_TEST_DEVICE").is_some() {
        println!(
            "SKIPPED: only Linux tells what is resident of this process alone, and only of the CPU's memory"
        );
        return;
    }
    // Memory that other tests freed stays with the process and would be used again: it runs alone, in one of its own.
    if std::env::var_os("QRUN_TEST_ALONE").is_none() {
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_sum_holds_what_a_process_takes"])
            .env("QRUN_TEST_ALONE", "1")
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", text(&out.stdout));
        return;
    }
    let mut machine = Machine::new().unwrap();
    let mut anonymous = || machine.read().unwrap().own.anonymous;
    let before = anonymous();
    let planned = Engine::plan(&demo(), &params()).unwrap();
    let planning = anonymous() - before;
    assert!(planning < 8 << 20, "planning took {planning}");
    let engine = planned.load_planned(&mut |_, _| {}).unwrap();
    let session = SessionParams {
        n_ctx: 4096,
        ..SessionParams::default()
    };
    let demand = Demand {
        session,
        n_rows: 1,
        n_sessions: 1,
        observes: false,
    };
    let sum = estimate(&Arc::new(planned), &demand, 4096).unwrap();
    let mut real = Session::new(engine, session).unwrap();
    real.eval(&[1; 4090], Outputs::Last, &never()).unwrap();
    let taken = anonymous() - before;
    let own = sum.total() - sum.weights_mapped;
    println!(
        "planned {own}, of that the program {}; taken {taken}",
        sum.program
    );
    assert!(taken <= own, "{taken} > {own}");
    assert!(taken + sum.program >= own, "{taken} is far below {own}");
}

fn qrun() -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
    for name in ["QRUN_MODEL", "QRUN_DEVICE", "QRUN_THREADS", "QRUN_CTX_SIZE"] {
        command.env_remove(name);
    }
    command.env("QRUN_CONFIG", "").env("QRUN_DEVICE", "CPU");
    command.env("QRUN_THREADS", "1");
    command.current_dir(root());
    command.arg("-m").arg(demo());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_context_that_cannot_be_is_refused_before_loading() {
    let args = ["-p", "Hi.", "-n", "2", "-c", "1000000000"];
    let out = qrun().args(args).output().unwrap();
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    assert!(out.stdout.is_empty());
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in [
        "does not fit: it takes",
        "keys and values for 1000000000 tokens",
        "what helps: a context of ",
        "`-ctk q8_0 -ctv q8_0`",
        "--fit off",
    ] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    // The one that it names fits; a little less, because others take and give back memory meanwhile.
    let named = stderr.split("(`-c ").nth(1).unwrap();
    let named: usize = named.split('`').next().unwrap().parse().unwrap();
    let named = (named / 4 * 3).to_string();
    let out = qrun()
        .args(["-p", "Hi.", "-n", "2", "-c", &named])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    // Cells are only made when tokens fill them, so without the check it runs.
    let out = qrun().args(args).args(["--fit", "off"]).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(out.stderr.is_empty(), "{}", text(&out.stderr));
}

#[test]
fn the_sum_is_shown_when_asked_for() {
    let out = qrun()
        .args(["-p", "Hi.", "-n", "2", "-v"])
        .output()
        .unwrap();
    let stderr = text(&out.stderr);
    for part in [
        "memory of this run on CPU:",
        "weights, mapped",
        "keys and values for 4096 tokens",
        "together",
        "can be had",
    ] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    let out = qrun()
        .args(["-p", "Hi.", "--fit", "maybe"])
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(2));
}

/// A control group with a limit, taken away when dropped.
struct Group(std::path::PathBuf);

impl Group {
    /// None where none can be made here, after saying so.
    fn new(name: &str, limit: u64) -> Option<Self> {
        let name = format!("qrun-test-{name}-{}", std::process::id());
        for (parent, file) in [
            ("/sys/fs/cgroup", "memory.max"),
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ] {
            let dir = Path::new(parent).join(&name);
            if std::fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Self(dir);
            if group.0.join(file).exists()
                && std::fs::write(group.0.join(file), limit.to_string()).is_ok()
            {
                return Some(group);
            }
        }
        println!("SKIPPED: no control group with a memory limit can be made here");
        None
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = qrun();
        command.args(args);
        let mut inside = Command::new("sh");
        let script = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.0.display());
        inside.args(["-c", &script, "sh"]);
        inside.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.output().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_limit_on_the_processes_is_kept() {
    // As tight as it gets: the weights fit, the model's own context does not.
    let Some(group) = Group::new("lowered", 62 << 20) else {
        return;
    };
    let out = group.run(&["--raw", "-p", "Once upon a time", "-n", "1"]);
    let stderr = text(&out.stderr);
    assert!(out.status.success(), "{:?} {stderr}", out.status);
    let lowered = stderr
        .split("the context is lowered from 4096 to ")
        .nth(1)
        .unwrap_or_else(|| panic!("{stderr}"));
    let n_ctx: usize = lowered.split(' ').next().unwrap().parse().unwrap();
    assert!((512..4096).contains(&n_ctx), "{stderr}");
    assert!(
        stderr.contains("of this control group can be had"),
        "{stderr}"
    );
    // It is not killed when that context is filled to the last token.
    let words = " a".repeat(n_ctx - 20);
    let out = group.run(&[
        "--raw",
        "-p",
        &words,
        "--ignore-eos",
        "--json",
        "--spec",
        "2",
    ]);
    let stderr = text(&out.stderr);
    assert!(out.status.success(), "{:?} {stderr}", out.status);
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["finish_reason"], "length", "{json}");
    let count = |key: &str| json["counts"][key].as_u64().unwrap() as usize;
    assert!(count("prompt") > n_ctx - 30, "{json}");
    assert!(count("prompt") + count("output") >= n_ctx, "{json}");

    let out = group.run(&["-p", "Hi.", "-c", "4096"]);
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("does not fit"), "{stderr}");

    let Some(group) = Group::new("refused", 24 << 20) else {
        return;
    };
    let out = group.run(&["-p", "Hi."]);
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{:?} {stderr}", out.status);
    assert!(
        stderr.contains("a smaller quantization or model"),
        "{stderr}"
    );
}

fn doctor(args: &[&str]) -> Output {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
    command.env_remove("QRUN_MODEL").env("QRUN_DEVICE", "CPU");
    // No measurements of other runs.
    let cache = tempfile::tempdir().unwrap();
    command.env("XDG_CACHE_HOME", cache.path());
    command.arg("doctor").args(args).output().unwrap()
}

#[test]
fn the_doctor_finds_nothing_wrong_with_the_demo_model() {
    let demo = demo();
    let demo = demo.to_str().unwrap();
    let out = doctor(&["-m", demo]);
    let stdout = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{stdout} {}", text(&out.stderr));
    assert!(out.stderr.is_empty());
    for part in [
        "ok       build     qrun ",
        "ok       device    CPU is a CPU: ",
        "memory    ",
        "tensors in 15.3 MiB, all inside the file",
        "ok       model     all norms and other vectors are finite",
        "ok       MTP       on, because",
        "note     tuning    not measured yet\n                   -> run `qrun tune`",
        "ok       fit       its whole context of 4096 tokens fits: ",
    ] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    let out = doctor(&["--json", "-m", demo]);
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["problems"], 0);
    assert!(json["memory"]["machine_total"].as_u64().unwrap() > 0);
    let marks = json["findings"].as_array().unwrap().iter();
    assert!(marks.clone().count() > 8);
    assert!(
        marks
            .into_iter()
            .all(|f| f["text"].is_string() && f["topic"].is_string())
    );
}

#[test]
fn the_doctor_finds_what_is_wrong_with_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(demo()).unwrap();
    let check = |name: &str, bytes: &[u8], expected: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let out = doctor(&["--json", "-m", path.to_str().unwrap()]);
        assert_eq!(out.status.code(), Some(1), "{name}");
        let stderr = text(&out.stderr);
        assert!(stderr.contains("one problem was found"), "{name}: {stderr}");
        let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(json["problems"], 1, "{name}");
        let all = json["findings"].as_array().unwrap();
        let bad = all.iter().find(|f| f["mark"] == "problem").unwrap();
        let said = bad["text"].as_str().unwrap();
        assert!(said.contains(expected), "{name}: {said}");
        assert!(bad["advice"].is_string());
    };
    check("short.gguf", &bytes[..bytes.len() / 2], "short.gguf");
    check("other.gguf", b"not a model at all", "other.gguf");
    // A norm with a value that is not a number.
    let file = ggml_metal::Gguf::open(&demo()).unwrap();
    let norm = file.tensor("blk.0.attn_norm.weight").unwrap();
    let mut damaged = bytes.clone();
    damaged[norm.offset + 8..norm.offset + 12].copy_from_slice(&f32::NAN.to_le_bytes());
    check(
        "nan.gguf",
        &damaged,
        "`blk.0.attn_norm.weight` holds values",
    );
    let out = doctor(&["-m", "/nowhere/at/all.gguf"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stdout).contains("problem  model     "));
}

fn family(args: &[&str]) -> Output {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
    command.env("QRUN_DEVICE", "CPU").arg("fit").args(args);
    command.output().unwrap()
}

#[test]
fn the_table_of_the_family_grows_with_the_machine() {
    let verdicts = |memory: &str| {
        let args = [
            "--for",
            memory,
            "--bandwidth",
            "400",
            "-c",
            "8192,32768",
            "--json",
        ];
        let out = family(&args);
        assert!(out.status.success(), "{}", text(&out.stderr));
        let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(json["schema"], 1);
        assert_eq!(json["machine"]["imagined"], true);
        let models = json["models"].as_array().unwrap();
        assert_eq!(models.len(), 8 * 4);
        for row in models {
            let memory = row["memory"].as_array().unwrap();
            let bytes = |i: usize| memory[i]["bytes"].as_u64().unwrap();
            // Two contexts with F16 and Q8_0 each.
            assert_eq!(memory.len(), 4);
            assert!(row["bytes"].as_u64() < memory[0]["bytes"].as_u64());
            assert!(bytes(1) < bytes(0) && bytes(0) < bytes(2), "{row}");
            let speed = |key: &str| row[key].as_f64().unwrap();
            assert!(speed("mtp_tok_s") >= speed("plain_tok_s"), "{row}");
        }
        let fit = models.iter().filter(|row| row["verdict"] != "no").count();
        (fit, json["best"]["model"].as_str().map(str::to_owned))
    };
    let small = verdicts("4GB");
    let large = verdicts("24");
    assert!(0 < small.0 && small.0 < large.0, "{small:?} {large:?}");
    assert_eq!(small.1.as_deref(), Some("2b"));
    assert_eq!(large.1.as_deref(), Some("9b"));
}

#[test]
fn the_table_fits_a_terminal_of_100_columns() {
    let out = family(&["--for", "512GB", "--bandwidth", "800"]);
    let stdout = text(&out.stdout);
    assert!(
        out.status.success() && out.stderr.is_empty(),
        "{}",
        text(&out.stderr)
    );
    for line in stdout.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    assert!(stdout.contains("397b-a17b Q4_K_M"), "{stdout}");
    assert!(stdout.lines().last().unwrap().starts_with("best     "));
    for args in [
        ["--for", "much"],
        ["--bandwidth", "-1"],
        ["-c", "3"],
        ["--measure", "3b"],
    ] {
        assert_eq!(family(&args).status.code(), Some(2));
    }
}
