//! Conversations on disk, and what a next turn reuses.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;
#[path = "support/variants.rs"]
mod variants;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ggml_metal::DType;
use qrun::conversation::{Conversation, Message, list, path_of};
use qrun::engine::{Engine, EngineParams};
use qrun::reuse::StateCache;
use qrun::session::{Outputs, Session, SessionParams};
use support::*;
use variants::{Random, Variant};

fn message(role: &str, content: &str) -> Message {
    Message {
        role: role.to_owned(),
        content: content.to_owned(),
        reasoning: String::new(),
        partial: false,
    }
}

#[test]
fn a_conversation_survives_being_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut conversation = Conversation::default();
    conversation.system = "Be brief.".to_owned();
    conversation
        .messages
        .push(message("user", "Tell me: what is a \"fox\"?\nAnd why?"));
    conversation.keep(folder.path()).unwrap();
    assert_eq!(conversation.name(), "tell-me-what-is-a-fox");
    let path = path_of(folder.path(), &conversation.name()).unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "for this user alone");
    }

    // Beginnings of an answer; the program dies in the middle of a line.
    for text in ["A fox", "A fox is an animal."] {
        let part = Message {
            partial: true,
            ..message("assistant", text)
        };
        conversation.append(&part).unwrap();
    }
    let mut bytes = fs::read(&path).unwrap();
    bytes.extend_from_slice(b"{\"role\":\"assistant\",\"content\":\"A fox is an animal. It");
    fs::write(&path, bytes).unwrap();
    let found = Conversation::open(&path).unwrap();
    assert_eq!(found.system, "Be brief.");
    assert_eq!(found.messages.len(), 2);
    assert_eq!(found.messages[1].content, "A fox is an animal.");
    assert!(found.messages[1].partial);

    // The finished answer takes the place of its beginnings.
    let mut found = found;
    found.messages[1] = message("assistant", "A fox is an animal. It hunts.");
    found.write().unwrap();
    assert_eq!(Conversation::open(&path).unwrap().messages, found.messages);
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        1,
        "no partial file is left"
    );

    // A second conversation that begins alike has a name of its own.
    let mut second = Conversation::default();
    second
        .messages
        .push(message("user", "tell me what is a fox"));
    second.keep(folder.path()).unwrap();
    assert_eq!(second.name(), "tell-me-what-is-a-fox-2");
    fs::write(folder.path().join("broken.jsonl"), "what?\n").unwrap();
    let names: Vec<_> = list(folder.path())
        .unwrap()
        .into_iter()
        .map(|s| s.name)
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(list(&folder.path().join("none")).unwrap().is_empty());
    for name in ["", "../x", "a/b", ".hidden"] {
        assert!(path_of(folder.path(), name).is_err(), "{name}");
    }
}

/// On one thread: passes of a few tokens wait for each other where other tests run, too.
fn engine(path: &Path) -> Arc<Engine> {
    let params = EngineParams {
        device: Some("CPU".to_owned()),
        n_threads: Some(1),
        ..EngineParams::default()
    };
    Engine::load(path, &params, &mut |_, _| {}).unwrap()
}

fn params() -> SessionParams {
    SessionParams {
        kv: F32,
        mtp: true,
        n_rollback: 2,
        n_batch: 16,
        ..SessionParams::default()
    }
}

#[test]
fn a_next_turn_processes_only_what_is_new() {
    // In F32, where a prompt gives the same logits however it is cut.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut variant = Variant::read(&demo());
    for tensor in &mut variant.tensors {
        let values = tensor.dtype.dequantize(&tensor.data).unwrap();
        tensor.data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensor.dtype = DType::F32;
    }
    variant.write(&path);
    let engine = engine(&path);
    let n_vocab = engine.config().n_vocab as usize;
    let mut session = Session::new(engine.clone(), params()).unwrap();
    let mut random = Random(5);
    let mut text: Vec<u32> = Vec::new();
    let mut cache = StateCache::new(64 << 20);
    let (mut processed, mut reused) = (0, 0);
    for turn in 0..20 {
        let before = text.len();
        let question: Vec<u32> = (0..20).map(|_| random.below(n_vocab) as u32).collect();
        text.extend(&question);
        let mut told = 0;
        let (begun, last) = cache
            .process(
                &mut session,
                &text,
                text.len() - 4,
                &never(),
                &mut |done, _| told = done,
            )
            .unwrap();
        assert_eq!(begun.total, text.len());
        if turn > 0 {
            // All but the last token of the answer is in the session.
            assert_eq!(begun.reused, before - 1, "turn {turn}");
        }
        processed += told + 1;
        reused += begun.reused;
        let logits = session
            .eval(&[last], Outputs::Last, &never())
            .unwrap()
            .to_vec();
        // As a fresh session that is given everything.
        let mut fresh = Session::new(engine.clone(), params()).unwrap();
        let expected = fresh.eval(&text, Outputs::Last, &never()).unwrap();
        assert!(max_diff(&logits, expected) < 1e-3, "turn {turn}");
        // The answer: all but its last token is processed.
        let answer: Vec<u32> = (0..6).map(|_| random.below(n_vocab) as u32).collect();
        session.eval(&answer[..5], Outputs::None, &never()).unwrap();
        text.extend(&answer);
    }
    assert_eq!(
        processed,
        20 * 20 + 19,
        "each token of a question, and the last of each answer"
    );
    assert!(reused > 10 * processed);

    // An edit of the last question restarts from the boundary before its end, another text from nothing.
    let cut = text.len() - 6 - 4;
    let mut edited = text[..cut].to_vec();
    edited.extend([7, 8, 9]);
    let (begun, _) = cache
        .process(&mut session, &edited, cut, &never(), &mut |_, _| {})
        .unwrap();
    assert_eq!(begun.reused, cut);
    let (begun, _) = cache
        .process(&mut session, &[1, 2, 3], 1, &never(), &mut |_, _| {})
        .unwrap();
    assert_eq!(
        (begun.reused, begun.reason),
        (0, "no saved state begins like this")
    );
}

#[test]
fn two_conversations_that_take_turns_do_not_mix() {
    // One session serves both, as after a change of conversation; each also has one to itself.
    let engine = engine(&demo());
    let mut shared = Session::new(engine.clone(), params()).unwrap();
    let mut cache = StateCache::new(64 << 20);
    let mut own: Vec<_> = (0..2)
        .map(|_| {
            let session = Session::new(engine.clone(), params()).unwrap();
            (session, StateCache::new(64 << 20), Vec::<u32>::new())
        })
        .collect();
    let mut random = Random(11);
    for turn in 0..12 {
        for (own, own_cache, text) in &mut own {
            let before = text.len();
            text.extend((0..9).map(|_| random.below(8000) as u32));
            let boundary = text.len() - 2;
            let ask = |session: &mut Session, cache: &mut StateCache| {
                let (begun, last) = cache
                    .process(session, text, boundary, &never(), &mut |_, _| {})
                    .unwrap();
                let logits = session.eval(&[last], Outputs::Last, &never()).unwrap();
                let logits = logits.to_vec();
                session.eval(&[3, 4], Outputs::None, &never()).unwrap();
                cache.save(session).unwrap();
                (begun.reused, logits)
            };
            let alone = ask(own, own_cache);
            let together = ask(&mut shared, &mut cache);
            assert_eq!(alone.0, before.saturating_sub(1), "turn {turn}");
            assert_eq!(alone, together, "turn {turn}");
            text.extend([3, 4, 5]);
        }
    }
}

#[test]
fn the_budget_of_saved_states_holds() {
    let engine = engine(&demo());
    let mut session = Session::new(engine, params()).unwrap();
    let budget = 8 << 20;
    let mut cache = StateCache::new(budget);
    for turn in 0..200u32 {
        let prompt = [turn, turn + 1, turn + 2, turn + 3];
        cache
            .process(&mut session, &prompt, 3, &never(), &mut |_, _| {})
            .unwrap();
        assert!(cache.bytes() <= budget);
    }
    assert!(cache.bytes() > budget / 2);
    // Conversations that take turns do not mix: each finds its own state.
    let (begun, _) = cache
        .process(
            &mut session,
            &[199, 200, 201, 9],
            3,
            &never(),
            &mut |_, _| {},
        )
        .unwrap();
    assert_eq!(begun.reused, 3);
    let (begun, _) = cache
        .process(
            &mut session,
            &[198, 199, 200, 9],
            3,
            &never(),
            &mut |_, _| {},
        )
        .unwrap();
    assert_eq!(begun.reused, 3);
    let mut none = StateCache::new(0);
    none.process(&mut session, &[1, 2, 3], 2, &never(), &mut |_, _| {})
        .unwrap();
    assert_eq!(none.bytes(), 0);
}
