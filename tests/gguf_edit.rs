//! Splitting, merging and editing GGUF files.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use convert::edit::{Change, Edited, edit, parse};
use convert::output::Interrupted;
use convert::parts;
use convert::split::{Limit, merge, split};
use ggml_metal::peer::{PeerModel, PeerOptions};
use ggml_metal::{Gguf, Kind, Value};
use support::{argmax, demo, engine, never, session};

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

fn go_on(_: u64, _: u64) -> bool {
    true
}

#[test]
fn parts_are_one_model_and_become_the_same_file_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = Gguf::open(&demo()).unwrap();
    let base = folder.path().join("m.gguf");
    let paths = split(&file, &base, Limit::Bytes(4_000_000), &mut go_on).unwrap();
    let n = paths.len();
    assert!(n > 3);
    assert_eq!(
        paths[0],
        folder.path().join(format!("m-00001-of-{n:05}.gguf"))
    );
    for (i, path) in paths.iter().enumerate() {
        let part = Gguf::open(path).unwrap();
        let key = |key: &str| (part.kind(key).unwrap(), part.value(key).unwrap());
        let int = |n: usize| Value::Int(n as i128);
        assert_eq!(key("split.no"), (Kind::U16, int(i)));
        assert_eq!(key("split.count"), (Kind::U16, int(n)));
        assert_eq!(
            key("split.tensors.count"),
            (Kind::I32, int(file.tensors().len()))
        );
        assert!(part.tensors().iter().map(|t| t.bytes).sum::<usize>() <= 4_000_000);
    }

    // Both programs read the parts as the model.
    let tokens: Vec<u32> = (100..120).collect();
    let logits = |path: &Path| {
        let mut session = session(&engine(path), support::F32, false);
        let outputs = qrun::session::Outputs::Last;
        session.eval(&tokens, outputs, &never()).unwrap().to_vec()
    };
    let (whole, split_up) = (logits(&demo()), logits(&paths[2]));
    assert_eq!(whole, split_up);
    assert!(argmax(&whole) > 0);
    PeerModel::load(&paths[0], &PeerOptions::default()).unwrap();

    let merged = folder.path().join("again.gguf");
    merge(&parts::open(&paths[1]).unwrap(), &merged, &mut go_on).unwrap();
    assert!(std::fs::read(&merged).unwrap() == std::fs::read(demo()).unwrap());

    let by_count = split(&file, &base, Limit::Tensors(50), &mut go_on).unwrap();
    assert_eq!(by_count.len(), file.tensors().len().div_ceil(50));
}

#[test]
fn nothing_is_left_of_a_split_or_a_merge_that_was_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let file = Gguf::open(&demo()).unwrap();
    let base = folder.path().join("m.gguf");
    let mut calls = 0;
    let stopped = split(&file, &base, Limit::Tensors(30), &mut |_, _| {
        calls += 1;
        calls < 80
    });
    assert!(stopped.unwrap_err().downcast_ref::<Interrupted>().is_some());
    assert!(names(folder.path()).is_empty());
    assert!(split(&file, &base, Limit::Tensors(1000), &mut go_on).is_err());

    let paths = split(&file, &base, Limit::Tensors(30), &mut go_on).unwrap();
    let before = names(folder.path());
    let files = parts::open(&paths[0]).unwrap();
    let target = folder.path().join("merged.gguf");
    let stopped = merge(&files, &target, &mut |_, _| false);
    assert!(stopped.unwrap_err().downcast_ref::<Interrupted>().is_some());
    let onto_itself = merge(&files, &paths[1], &mut go_on).unwrap_err();
    assert!(onto_itself.to_string().contains("is the file that is read"));
    assert_eq!(names(folder.path()), before);
    // A part alone is not the model.
    std::fs::remove_file(&paths[1]).unwrap();
    assert!(parts::open(&paths[0]).is_err());
}

#[test]
fn metadata_is_changed_where_it_lies_or_in_a_new_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::copy(demo(), &path).unwrap();
    let change = |text: &str| {
        let file = Gguf::open(&path).unwrap();
        edit(&file, &[parse(text, &file).unwrap()], None, &mut go_on).unwrap()
    };
    let value = |key: &str| Gguf::open(&path).unwrap().value(key);
    let same_but = |keys: &[&str]| {
        let (old, new) = (Gguf::open(&demo()).unwrap(), Gguf::open(&path).unwrap());
        for key in old.keys().iter().filter(|k| !keys.contains(&k.as_str())) {
            assert_eq!(old.value(key), new.value(key), "{key}");
            assert_eq!(old.kind(key), new.kind(key), "{key}");
        }
        assert_eq!(old.tensors().len(), new.tensors().len());
        for (a, b) in old.tensors().iter().zip(new.tensors()) {
            assert_eq!((&a.name, a.shape, a.dtype), (&b.name, b.shape, b.dtype));
            assert!(old.data(a) == new.data(b), "{}", a.name);
        }
    };
    // The same length: only the bytes of the value change.
    assert_eq!(change("general.name=Omed"), Edited::InPlace);
    assert_eq!(value("general.name"), Some(Value::Str("Omed".to_owned())));
    let differing = std::fs::read(&path).unwrap();
    let original = std::fs::read(demo()).unwrap();
    let n = differing
        .iter()
        .zip(&original)
        .filter(|(a, b)| a != b)
        .count();
    assert!(n <= 4 && differing.len() == original.len());
    same_but(&["general.name"]);
    assert_eq!(change("general.sampling.temp=0.25"), Edited::InPlace);
    assert_eq!(value("general.sampling.temp"), Some(Value::Float(0.25)));

    // Another length: keys keep their order, tensors their bytes.
    let long = "a name that is longer than any room that padding leaves in the header of a file";
    assert_eq!(change(&format!("general.name={long}")), Edited::Anew);
    assert_eq!(value("general.name"), Some(Value::Str(long.to_owned())));
    assert_eq!(
        Gguf::open(&path).unwrap().keys(),
        Gguf::open(&demo()).unwrap().keys()
    );
    assert_eq!(
        change("general.tags=str:[\"small\",\"demo\"]"),
        Edited::Anew
    );
    let tags = Value::Strs(vec!["small".to_owned(), "demo".to_owned()]);
    assert_eq!(value("general.tags"), Some(tags));
    same_but(&["general.name", "general.sampling.temp"]);
    // Taken out and put back, the file is what it was.
    let file = Gguf::open(&path).unwrap();
    let back = [
        Change::Remove("general.tags".to_owned()),
        parse("general.name=Demo", &file).unwrap(),
        parse("general.sampling.temp=0.7", &file).unwrap(),
    ];
    edit(&file, &back, None, &mut go_on).unwrap();
    assert!(std::fs::read(&path).unwrap() == original);
    assert_eq!(names(folder.path()), ["m.gguf"]);

    // Into another file, and stopped.
    let other = folder.path().join("other.gguf");
    let file = Gguf::open(&path).unwrap();
    let name = [parse("general.name=Omed", &file).unwrap()];
    let stopped = edit(&file, &name, Some(&other), &mut |_, _| false);
    assert!(stopped.unwrap_err().downcast_ref::<Interrupted>().is_some());
    assert_eq!(names(folder.path()), ["m.gguf"]);
    edit(&file, &name, Some(&other), &mut go_on).unwrap();
    assert!(std::fs::read(&path).unwrap() == original);
    assert_eq!(std::fs::read(&other).unwrap().len(), original.len());
}

#[test]
fn values_are_read_as_the_type_that_is_meant() {
    let file = Gguf::open(&demo()).unwrap();
    let read = |text: &str| match parse(text, &file) {
        Ok(Change::Set(_, kind, value)) => Ok((kind, value)),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    };
    let text = |t: &str| Value::Str(t.to_owned());
    for (given, kind, value) in [
        // The file's own type.
        ("general.sampling.top_k=40", Kind::I32, Value::Int(40)),
        ("qwen35.block_count=9", Kind::U32, Value::Int(9)),
        ("general.name=12", Kind::Str, text("12")),
        ("general.name=a=b", Kind::Str, text("a=b")),
        (
            "qwen35.rope.dimension_sections=[1,2,3,0]",
            Kind::I32,
            Value::Ints(vec![1, 2, 3, 0]),
        ),
        // Told from the value.
        ("x=12", Kind::U32, Value::Int(12)),
        ("x=-12", Kind::I64, Value::Int(-12)),
        ("x=1.5", Kind::F32, Value::Float(1.5)),
        ("x=true", Kind::Bool, Value::Bool(true)),
        ("x=https://a.example", Kind::Str, text("https://a.example")),
        ("x=nan", Kind::Str, text("nan")),
        ("x=[1,-2]", Kind::I32, Value::Ints(vec![1, -2])),
        ("x=[0.5,2]", Kind::F32, Value::Floats(vec![0.5, 2.0])),
        // Chosen.
        ("x=u8:255", Kind::U8, Value::Int(255)),
        (
            "x=u64:18446744073709551615",
            Kind::U64,
            Value::Int(u64::MAX.into()),
        ),
        ("x=str:true", Kind::Str, text("true")),
        ("general.name=u16:7", Kind::U16, Value::Int(7)),
        (
            "x=bool:[true,false]",
            Kind::Bool,
            Value::Bools(vec![true, false]),
        ),
    ] {
        assert_eq!(read(given), Ok((kind, value)), "{given}");
    }
    for (given, words) in [
        ("no equals sign", "expected KEY=VALUE"),
        ("=1", "expected KEY=VALUE"),
        ("qwen35.block_count=-1", "expected u32"),
        ("qwen35.block_count=nine", "expected u32"),
        ("x=u8:256", "expected u8"),
        ("x=[1,\"a\"]", "expected a JSON list"),
        ("tokenizer.ggml.tokens=a", "expected a JSON list of str"),
    ] {
        let error = read(given).unwrap_err();
        assert!(error.contains(words), "{given}: {error}");
    }
}

fn qrun(args: &[&str]) -> Output {
    Command::new(assert_cmd::cargo::cargo_bin!("qrun"))
        .args(args)
        .env("QRUN_CONFIG", "")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

#[test]
fn the_commands() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::copy(demo(), &path).unwrap();
    let name = |file: &str| folder.path().join(file).display().to_string();
    let (m, part, again) = (
        name("m.gguf"),
        name("p-00002-of-00004.gguf"),
        name("again.gguf"),
    );
    let base = name("p");
    let run = |args: &[&str], code: i32, words: &str| {
        let output = qrun(args);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {line}");
        assert!(line.contains(words), "{args:?}: {line}");
        assert!(line.lines().count() <= 1, "{line}");
        String::from_utf8(output.stdout).unwrap()
    };
    let planned = run(
        &[
            "gguf",
            "split",
            &m,
            &base,
            "--split-max-size",
            "5M",
            "--dry-run",
        ],
        0,
        "",
    );
    assert_eq!(planned.lines().count(), 4);
    run(
        &["gguf", "split", &m, &base, "--split-max-size", "5M"],
        0,
        "4 parts",
    );
    run(&["gguf", "merge", &part, &again], 0, "made of 4 parts");
    assert!(std::fs::read(&again).unwrap() == std::fs::read(demo()).unwrap());
    run(
        &["gguf", "set", &again, "general.name=Omed"],
        0,
        "changed in place",
    );
    run(
        &[
            "gguf",
            "set",
            &again,
            "general.new=1",
            "--remove",
            "general.size_label",
        ],
        0,
        "",
    );
    let file = Gguf::open(Path::new(&again)).unwrap();
    assert_eq!(file.value("general.new"), Some(Value::Int(1)));
    assert_eq!(file.value("general.size_label"), None);

    run(
        &["gguf", "split", &m, &base, "--split-max-size", "5T"],
        2,
        "such as 4G",
    );
    run(&["gguf", "split", &part, &base], 1, "put it together first");
    run(&["gguf", "split", &m, &base], 1, "fits into one part");
    run(
        &["gguf", "merge", &m, &again],
        1,
        "is not a part of a split model",
    );
    run(
        &["gguf", "set", &m, "--remove", "general.nothing"],
        1,
        "has no key `general.nothing`",
    );
    run(
        &["gguf", "set", &m, "general.alignment=64"],
        1,
        "cannot be changed",
    );
    run(
        &["gguf", "set", &m, "qwen35.block_count=x"],
        2,
        "expected u32",
    );
    run(&["gguf", "set", "/nonexistent", "a=b"], 1, "/nonexistent");
    assert!(std::fs::read(&m).unwrap() == std::fs::read(demo()).unwrap());
}
