//! `qrun bench` as a user calls it. No test here looks at a speed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::demo;

fn bench(args: &[&str]) -> Output {
    Command::new(assert_cmd::cargo::cargo_bin!("qrun"))
        .arg("bench")
        .args(args)
        .env("QRUN_CONFIG", "")
        .env("QRUN_MODEL", demo())
        .env("QRUN_DEVICE", "CPU")
        // The tests of this file run beside each other.
        .env("QRUN_THREADS", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn json(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn tests_of(rows: &[Value]) -> Vec<String> {
    let title = |row: &Value| match row["n_depth"].as_u64().unwrap() {
        0 => row["test"].as_str().unwrap().to_owned(),
        depth => format!("{} @ d{depth}", row["test"].as_str().unwrap()),
    };
    rows.iter().map(title).collect()
}

#[test]
fn every_combination_is_a_row_with_consistent_numbers() {
    let output = bench(&[
        "-p", "16,24", "-n", "4", "-pg", "8,4", "-d", "0,32", "-b", "8,512", "-ctk", "f16,q8_0",
        "-r", "2", "-t", "1,2", "-o", "json", "--fit", "off",
    ]);
    let rows = json(&output);
    assert_eq!(stderr(&output), "");
    // Four tests, two depths, two batches, two types, two numbers of threads.
    assert_eq!(rows.len(), 4 * 2 * 2 * 2 * 2);
    let expected = ["pp16", "pp24", "tg4", "pp8+tg4"];
    let deep = expected.map(|t| format!("{t} @ d32"));
    assert_eq!(tests_of(&rows[..4]), expected);
    assert_eq!(tests_of(&rows[4..8]), deep);
    for row in &rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        let list = |key: &str| -> Vec<f64> {
            row[key]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| v.as_f64().unwrap())
                .collect()
        };
        let (ns, ts) = (list("samples_ns"), list("samples_ts"));
        assert_eq!((ns.len(), ts.len()), (2, 2));
        let n_tokens = number("n_prompt") + number("n_gen");
        for (ns, ts) in ns.iter().zip(&ts) {
            assert!((ts * ns / 1e9 / n_tokens - 1.0).abs() < 1e-3);
        }
        assert!((number("avg_ts") - (ts[0] + ts[1]) / 2.0).abs() < 1e-6);
        assert_eq!(row["device"], "CPU");
        assert_eq!(row["spec"], Value::Null);
        // Only decoding has a bound by what it reads.
        let bound = row["test"] == "tg4";
        assert_eq!(
            row["bytes_per_token"]
                .as_u64()
                .is_some_and(|n| n > 10_000_000),
            bound
        );
        assert_eq!(row["roofline"].as_f64().is_some_and(|r| r > 0.0), bound);
        assert_eq!(row["splits"], 1);
    }
    let both = |key: &str| {
        let values: std::collections::BTreeSet<String> =
            rows.iter().map(|r| r[key].to_string()).collect();
        values.len()
    };
    for key in ["n_threads", "n_batch", "type_k", "n_depth"] {
        assert_eq!(both(key), 2, "{key}");
    }
}

#[test]
fn speculation_and_the_first_token_have_rows_of_their_own() {
    let rows = json(&bench(&[
        "-p", "16", "-n", "24", "--spec", "0,2", "--ttft", "-r", "1", "-o", "json",
    ]));
    let names = [
        "pp16",
        "pp16 head",
        "ttft16",
        "tg24",
        "tg24 spec 0",
        "tg24 spec 2",
    ];
    assert_eq!(tests_of(&rows), names);
    assert_eq!(rows[4]["acceptance"], Value::Null);
    let acceptance = rows[5]["acceptance"].as_f64().unwrap();
    assert!((0.3..=1.0).contains(&acceptance), "{acceptance}");
    assert_eq!(rows[5]["acceptance_imposed"], false);
    assert!(rows[5]["tokens_per_pass"].as_f64().unwrap() > 1.2);
    // Imposed rates are what comes out, and are said to be imposed.
    let rows = json(&bench(&[
        "-p",
        "0",
        "-n",
        "64",
        "--spec",
        "2",
        "--spec-synth-rates",
        "0,0",
        "-r",
        "1",
        "-o",
        "json",
    ]));
    assert_eq!(rows[1]["acceptance"], 0.0);
    assert_eq!(rows[1]["acceptance_imposed"], true);
    assert_eq!(rows[1]["tokens_per_pass"], 1.0);
}

#[test]
fn results_are_kept_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old.json");
    let old = old.to_str().unwrap();
    let short = ["-p", "8", "-n", "4", "-r", "2"];
    let output = bench(&[&short[..], &["--save", old]].concat());
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(!table.contains("before"));
    let kept: Vec<Value> = serde_json::from_slice(&std::fs::read(old).unwrap()).unwrap();
    assert_eq!(tests_of(&kept), ["pp8", "tg4"]);

    // A machine that was ten thousand times slower.
    let mut slow = kept.clone();
    for row in &mut slow {
        for key in ["avg_ts", "stddev_ts"] {
            row[key] = (row[key].as_f64().unwrap() / 1e4).into();
        }
    }
    std::fs::write(old, serde_json::to_string(&slow).unwrap()).unwrap();
    let output = bench(&[&short[..], &["--against", old]].concat());
    let table = String::from_utf8(output.stdout).unwrap();
    // A ratio for each test; whether it is marked depends on how even the samples are.
    let compared =
        |line: &str| line.contains("before") || line.contains("---") || line.contains("x ");
    assert!(
        table.lines().all(compared) && table.contains("before"),
        "{table}"
    );
    let against = ["-p", "8", "-n", "5", "-r", "2", "--against", old];
    let output = bench(&against);
    let table = String::from_utf8(output.stdout).unwrap();
    // Another test than any before.
    assert_eq!(
        table.lines().filter(|l| l.contains("x ")).count(),
        1,
        "{table}"
    );

    std::fs::write(old, "nonsense").unwrap();
    let output = bench(&against);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("is not what `qrun bench -o json` writes"));
    assert_eq!(stderr(&output).lines().count(), 1);
}

/// A stand-in for llama-bench that writes down its arguments and prints rows with known speeds.
#[cfg(unix)]
fn peer(folder: &Path, script: &str) -> String {
    use std::os::unix::fs::PermissionsExt as _;
    let path = folder.join("llama-bench");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    format!("--compare={}", path.display())
}

#[cfg(unix)]
#[test]
fn the_peer_gets_the_same_tests_and_its_numbers_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let seen = folder.path().join("seen");
    let row = r#"{"n_batch":512,"n_threads":2,"type_k":"f16","type_v":"f16","n_prompt":8,"n_gen":0,"n_depth":0,"samples_ts":[4.0,6.0]}"#;
    let compare = peer(
        folder.path(),
        &format!("echo \"$@\" >> {}\necho '[{row}]'", seen.display()),
    );
    let rows = json(&bench(&[
        "-p", "8", "-n", "4", "-r", "3", "-t", "2", "-o", "json", &compare,
    ]));
    // Before and after, with half of the repetitions each.
    let calls = std::fs::read_to_string(seen).unwrap();
    assert_eq!(calls.lines().count(), 2, "{calls}");
    assert!(calls.contains("-p 8 -n 4 -d 0 -b 512 -ctk f16 -ctv f16 -r 2 -fa 1 -o json -t 2"));
    assert_eq!(rows[0]["peer_samples_ts"].as_array().unwrap().len(), 4);
    let ratio = rows[0]["avg_ts"].as_f64().unwrap() / 5.0;
    assert!((rows[0]["peer_ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-9);
    // It has no row for this one.
    assert_eq!(rows[1]["peer_ratio"], Value::Null);

    let compare = peer(folder.path(), "echo oh no >&2; exit 3");
    let output = bench(&["-p", "8", "-n", "0", "-r", "1", &compare]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("failed (exit status: 3): oh no"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn what_makes_no_sense_is_refused() {
    let cases: [(&[&str], i32, &str); 9] = [
        (&["-p", "0", "-n", "0"], 2, "no test is left"),
        (&["-r", "0"], 2, "from 1 to 1000"),
        (&["-pg", "512"], 2, "such as 512,128"),
        (&["--spec", "many"], 2, "expected `auto`, `off` or a number"),
        (&["-ctk", "f64"], 2, "expected one of"),
        (&["--fit", "perhaps"], 2, "--fit"),
        (&["--compare=/no/such/program"], 1, "no `/no/such/program`"),
        (
            &["-m", "synthetic:0.8b", "--compare"],
            2,
            "llama-bench needs a file",
        ),
        (
            &["-m", "synthetic:3b"],
            1,
            "no such shape; there are 0.8b, 2b",
        ),
    ];
    for (args, code, text) in cases {
        let output = bench(args);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(text),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn decoding_for_a_while_shows_the_speed_over_time() {
    let output = bench(&["--sustained", "0.01", "-o", "json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let object: Value = serde_json::from_slice(&output.stdout).unwrap();
    let slots = object["slots_ts"].as_array().unwrap();
    assert!(!slots.is_empty());
    assert_eq!(slots.len(), object["slots_s"].as_array().unwrap().len());
    assert_eq!(stderr(&output).lines().count(), slots.len());
    assert!(object["steady_ts"].as_f64().unwrap() > 0.0);
}

/// The whole of a released model's vocabulary and layers, with random weights: 0.5 GB of memory.
#[test]
fn a_synthetic_model_is_measured_like_any_other() {
    let rows = json(&bench(&[
        "-m",
        "synthetic:0.8b",
        "-p",
        "4",
        "-n",
        "2",
        "--spec",
        "2",
        "-r",
        "1",
        "-o",
        "json",
    ]));
    assert_eq!(rows[0]["model_filename"], "synthetic:0.8b:q4_k_m");
    let params = rows[0]["model_n_params"].as_f64().unwrap();
    assert!((0.75e9..0.85e9).contains(&params), "{params}");
    let spec = rows.last().unwrap();
    assert_eq!(spec["acceptance_imposed"], true);
}
