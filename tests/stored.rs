//! Saved states on disk: what a restarted program goes on from, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use ggml_metal::DType;
use proptest::prelude::*;
use qrun::engine::{Engine, EngineParams};
use qrun::reuse::StateCache;
use qrun::session::{Outputs, Session, SessionParams};
use qrun::state::KvTypes;
use qrun::stored::{StateKey, StateStore};
use serde_json::Value;
use support::*;

/// On one thread: passes of a few tokens wait for each other where other tests run, too.
static ENGINE: LazyLock<Arc<Engine>> = LazyLock::new(|| {
    let params = EngineParams {
        device: Some("CPU".to_owned()),
        n_threads: Some(1),
        ..EngineParams::default()
    };
    Engine::load(&demo(), &params, &mut |_, _| {}).unwrap()
});

const MIB: u64 = 1 << 20;

fn new_session(kv: DType, mtp: bool) -> Session {
    let params = SessionParams {
        kv: KvTypes { k: kv, v: kv },
        mtp,
        n_rollback: if mtp { 2 } else { 0 },
        ..SessionParams::default()
    };
    Session::new(ENGINE.clone(), params).unwrap()
}

fn store(folder: &Path, budget: u64, session: &Session) -> StateStore {
    StateStore::open(folder, budget, StateKey::of(session))
}

fn cache(folder: &Path, session: &Session) -> StateCache {
    StateCache::with_disk(64 << 20, store(folder, 64 * MIB, session))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .map(|entries| entries.map(|e| e.unwrap().path()).collect())
        .unwrap_or_default();
    files.sort();
    files
}

/// Processes a prompt; returns how many tokens were reused, how many processed, and the last logits.
fn ask(cache: &mut StateCache, session: &mut Session, prompt: &[u32]) -> (usize, usize, Vec<f32>) {
    let mut processed = 0;
    let (begun, last) = cache
        .process(session, prompt, prompt.len() - 2, &never(), &mut |n, _| {
            processed = n;
        })
        .unwrap();
    let logits = session.eval(&[last], Outputs::Last, &never()).unwrap();
    (begun.reused, processed + 1, logits.to_vec())
}

#[test]
fn a_restarted_program_processes_only_what_is_new() {
    for (kv, mtp) in [(DType::F32, true), (DType::F16, false), (DType::Q8_0, true)] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("states");
        let mut session = new_session(kv, mtp);
        let mut states = cache(&folder, &session);
        let mut text: Vec<u32> = (100..140).collect();
        let (reused, processed, _) = ask(&mut states, &mut session, &text);
        assert_eq!((reused, processed), (0, 40));
        // The answer, all but its last token processed.
        session.eval(&[7, 8, 9], Outputs::None, &never()).unwrap();
        text.extend([7, 8, 9, 10]);
        let n = session.n_past();
        assert_eq!(states.store(&mut session, n).unwrap(), [""; 0]);
        text.extend(200..210);
        let expected = ask(&mut states, &mut session, &text);
        assert_eq!((expected.0, expected.1), (43, 11));

        // Another session with nothing but the folder: the same counts, and the same logits to the bit.
        let mut again = new_session(kv, mtp);
        let mut states = cache(&folder, &again);
        assert_eq!(ask(&mut states, &mut again, &text), expected, "{kv} {mtp}");
        // Nothing is written twice; a session of another kind sees none of it and leaves it alone.
        again = new_session(kv, mtp);
        let mut states = cache(&folder, &again);
        ask(&mut states, &mut again, &text[..44]);
        let before = files(&folder);
        assert_eq!(before.len(), 1);
        let other = new_session(DType::BF16, mtp);
        let mut others = store(&folder, 64 * MIB, &other);
        assert_eq!(others.longest(&text), 0);
        assert_eq!(others.take_notices(), [""; 0]);
        let headless = new_session(kv, !mtp);
        assert_eq!(store(&folder, 64 * MIB, &headless).longest(&text), 0);
        assert_eq!(files(&folder), before);
    }
}

#[test]
fn the_boundary_before_an_answer_is_kept_where_it_is_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let mut session = new_session(DType::F16, true);
    let mut states = cache(folder.path(), &session);
    let text: Vec<u32> = (100..140).collect();
    ask(&mut states, &mut session, &text);
    states.store(&mut session, 38).unwrap();
    assert_eq!(files(folder.path()).len(), 1);
    // A template that changes the answer's beginning goes on from the boundary.
    let mut changed = text[..38].to_vec();
    changed.extend([1, 2, 3]);
    let mut again = new_session(DType::F16, true);
    let mut states = cache(folder.path(), &again);
    assert_eq!(ask(&mut states, &mut again, &changed).0, 38);
    // Without memory for states the disk is enough.
    let mut again = new_session(DType::F16, true);
    let disk = store(folder.path(), 64 * MIB, &again);
    let mut states = StateCache::with_disk(0, disk);
    assert_eq!(ask(&mut states, &mut again, &changed).0, 38);
    // What memory has no room for is on disk as soon as the boundary is reached.
    assert_eq!(files(folder.path()).len(), 2);
    let n = again.n_past();
    states.store(&mut again, n).unwrap();
    assert_eq!(files(folder.path()).len(), 3);
    #[cfg(unix)]
    for file in files(folder.path()) {
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(
            fs::metadata(file).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }
}

/// A session to read states into.
static READER: LazyLock<Mutex<(Session, StateKey)>> = LazyLock::new(|| {
    let session = new_session(DType::F16, true);
    let key = StateKey::of(&session);
    Mutex::new((session, key))
});

/// A state of few tokens, its file's bytes, and the prompt that goes on from it.
static STATE: LazyLock<(Vec<u8>, String, Vec<u32>)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let mut session = new_session(DType::F16, true);
    let mut states = cache(folder.path(), &session);
    let text: Vec<u32> = (100..120).collect();
    ask(&mut states, &mut session, &text);
    let n = session.n_past();
    states.store(&mut session, n).unwrap();
    let path = files(folder.path()).pop().unwrap();
    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
    (fs::read(path).unwrap(), name, [&text[..], &[5, 6]].concat())
});

/// What becomes of a folder with these bytes in place of the state: tokens reused, and what is said.
fn with_bytes(bytes: &[u8]) -> (usize, Vec<String>, usize) {
    let (_, name, prompt) = &*STATE;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(name), bytes).unwrap();
    let reader = READER.lock().unwrap_or_else(PoisonError::into_inner);
    let (session, key) = &*reader;
    let mut disk = StateStore::open(folder.path(), 64 * MIB, key.clone());
    let read = disk.read(prompt, session);
    let tokens = read.map_or(0, |snapshot| snapshot.tokens().len());
    (tokens, disk.take_notices(), files(folder.path()).len())
}

#[test]
fn a_whole_state_is_read_and_a_cut_one_refused() {
    let (bytes, ..) = &*STATE;
    assert_eq!(with_bytes(bytes), (20, Vec::new(), 1));
    let longer = [&bytes[..], &[0]].concat();
    let ends = [0, 1, 8, 12, 200, bytes.len() / 2, bytes.len() - 1];
    for damaged in ends
        .map(|n| bytes[..n].to_vec())
        .into_iter()
        .chain([longer])
    {
        let (tokens, notices, left) = with_bytes(&damaged);
        assert_eq!(
            (tokens, notices.len(), left),
            (0, 1, 0),
            "{} bytes",
            damaged.len()
        );
        assert!(
            notices[0].contains("a saved state was removed"),
            "{notices:?}"
        );
    }
    // A length that no memory could hold is refused before it is believed.
    let mut huge = bytes.clone();
    huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(with_bytes(&huge).0, 0);
    // Another version's is removed, too, and said to be that.
    let mut newer = bytes.clone();
    newer[7] = b'2';
    assert!(with_bytes(&newer).1[0].contains("another version"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_flipped_byte_anywhere_is_refused(place in 0.0..1.0f64, head in any::<bool>(), bits in 1..=255u8) {
        let (bytes, ..) = &*STATE;
        // The head and the tokens are small beside the rest.
        let room = if head { 600 } else { bytes.len() };
        let mut damaged = bytes.clone();
        damaged[(place * room as f64) as usize] ^= bits;
        let (tokens, notices, left) = with_bytes(&damaged);
        prop_assert_eq!((tokens, notices.len(), left), (0, 1, 0));
    }
}

#[test]
fn another_models_state_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut session = new_session(DType::F16, true);
    let text: Vec<u32> = (100..120).collect();
    let key = StateKey::of(&session);
    let other = StateKey {
        model: key.model.replace('-', "0-"),
        ..key.clone()
    };
    session.eval(&text, Outputs::None, &never()).unwrap();
    let snapshot = session.snapshot().unwrap();
    StateStore::open(folder.path(), 64 * MIB, key.clone()).write(&snapshot);
    let own = files(folder.path());
    StateStore::open(folder.path(), 64 * MIB, other.clone()).write(&snapshot);
    let both = files(folder.path());
    assert_eq!(both.len(), 2);
    let foreign = both.iter().find(|f| !own.contains(f)).unwrap();
    // Under the name of an own one, it is still another's.
    fs::rename(foreign, &own[0]).unwrap();
    let mut disk = StateStore::open(folder.path(), 64 * MIB, key);
    assert_eq!(disk.longest(&[&text[..], &[1]].concat()), 0);
    let notices = disk.take_notices();
    assert!(
        notices.len() == 1 && notices[0].contains("another model"),
        "{notices:?}"
    );
    assert!(files(folder.path()).is_empty());
}

#[test]
fn the_newest_states_are_kept_within_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let mut session = new_session(DType::F16, true);
    let budget = 8 * MIB;
    let total = || -> u64 {
        let files = files(folder.path());
        files.iter().map(|f| fs::metadata(f).unwrap().len()).sum()
    };
    // Another model's states count, and go first when they are older.
    session.eval(&[1, 2], Outputs::None, &never()).unwrap();
    let key = StateKey::of(&session);
    let other = StateKey {
        model: "other".to_owned(),
        ..key.clone()
    };
    StateStore::open(folder.path(), budget, other).write(&session.snapshot().unwrap());
    let foreign = files(folder.path()).pop().unwrap();
    let mut disk = StateStore::open(folder.path(), budget, key.clone());
    for turn in 0..12u32 {
        session.clear().unwrap();
        session
            .eval(&[turn, 3, 4], Outputs::None, &never())
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
        disk.write(&session.snapshot().unwrap());
        assert!(total() <= budget, "turn {turn}: {}", total());
        assert_eq!(disk.longest(&[turn, 3, 4, 5]), 3, "the newest is there");
    }
    assert_eq!(disk.take_notices(), [""; 0]);
    assert!(total() > budget / 2 && !foreign.exists());
    assert_eq!(disk.longest(&[0, 3, 4, 5]), 0, "the oldest is gone");
    // A smaller budget is kept as soon as the folder is opened; none at all keeps nothing.
    let small = StateStore::open(folder.path(), 3 * MIB, key.clone());
    assert!(total() <= 3 * MIB && small.longest(&[11, 3, 4, 5]) == 3);
    let mut none = StateStore::open(folder.path(), 1000, key);
    none.write(&session.snapshot().unwrap());
    assert_eq!(total(), 0);
}

#[test]
fn a_folder_that_cannot_be_written_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let mut session = new_session(DType::F16, true);
    let mut states = cache(&file.join("states"), &session);
    let mut said = Vec::new();
    for turn in 0..3u32 {
        ask(&mut states, &mut session, &[turn, 2, 3, 4]);
        let n = session.n_past();
        said.extend(states.store(&mut session, n).unwrap());
    }
    assert_eq!(said.len(), 1);
    assert!(said[0].contains("not kept on disk any more"), "{said:?}");
}

fn runtime(data: &Path) -> PathBuf {
    let folder = data.join("run");
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// A conversation line by line, in folders of the test's own.
fn chat(data: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("qrun"));
    command
        .arg("chat")
        .args(["--temp", "0", "--spec", "off", "--cache-disk", "64"])
        .args(args)
        .env("QRUN_CONFIG", "")
        .env("QRUN_MODEL", demo())
        .env("QRUN_THREADS", "1")
        .env("XDG_DATA_HOME", data)
        .env("XDG_CACHE_HOME", data.join("cache"))
        .env("XDG_RUNTIME_DIR", runtime(data))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Asks one question, and says what was reused of its prompt and how much was processed.
fn resumed(data: &Path, question: &str) -> (String, u64, u64) {
    let mut child = chat(data, &["--resume"]).spawn().unwrap();
    let socket = runtime(data).join(format!("qrun/{}.sock", child.id()));
    while !socket.exists() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(question.as_bytes()).unwrap();
    stdin.write_all(b"\n").unwrap();
    drop(stdin);
    let lines = BufReader::new(stream).lines();
    let answer = lines
        .map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap())
        .find(|line| line["type"] == "answer")
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let of = |field: &str| answer[field].as_u64().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    (text, of("reused"), of("prompt_tokens"))
}

#[cfg(unix)]
#[test]
fn a_killed_conversation_goes_on_from_the_disk() {
    let data = tempfile::tempdir().unwrap();
    let mut first = chat(data.path(), &[]).spawn().unwrap();
    let mut stdin = first.stdin.take().unwrap();
    stdin
        .write_all(b"Tell me a story about a fox named Pip.\n")
        .unwrap();
    let states = data.path().join("cache/qrun/states");
    let stored = || {
        files(&states)
            .iter()
            .any(|f| f.extension().is_some_and(|e| e == "state"))
    };
    while !stored() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    first.kill().unwrap();
    first.wait().unwrap();

    // The same conversation without states.
    let copy = tempfile::tempdir().unwrap();
    let (from, to) = (
        data.path().join("qrun/chats"),
        copy.path().join("qrun/chats"),
    );
    fs::create_dir_all(&to).unwrap();
    for file in files(&from) {
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
    let question = "What is the capital of France?";
    let (text, reused, processed) = resumed(data.path(), question);
    let (alone, nothing, all) = resumed(copy.path(), question);
    assert_eq!(text, alone);
    assert_eq!((nothing, reused + processed), (0, all));
    // The demo's template marks the answer that is to be written by an empty thinking block, which earlier answers do
    // not have: so the last answer is processed again, and nothing before it.
    assert!(reused > 10, "{reused} reused, {processed} processed");
    let (_, reused, processed) = resumed(data.path(), "Thank you.");
    assert!(
        reused + 20 > all && processed < 40,
        "{reused} reused, {processed} processed, {all} before"
    );
}
