//! The tokenizer against published vectors, and its behaviour on arbitrary text and damaged metadata.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs::File;
use std::io::{Cursor, Read};
use std::path::PathBuf;
use std::time::Instant;

use gguf::metadata::{Metadata, MetadataValue};
use gguf::reader::GGUFFileReader;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use qrun::tokenizer::{DecodeStream, Tokenizer, Vocab};
use unicode_normalization_alignments::UnicodeNormalization;

/// The folder with vocabularies and vectors, beside the repository; tests that need it pass without it.
fn shared() -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared");
    if folder.is_dir() {
        return Some(folder);
    }
    println!("skipped: no folder {}", folder.display());
    None
}

fn vocab_from_gguf(bytes: Vec<u8>) -> Vocab {
    let reader = GGUFFileReader::new(Cursor::new(bytes)).expect("a valid GGUF file");
    vocab_from_metadata(reader.metadata())
}

fn vocab_from_metadata(metadata: &Metadata) -> Vocab {
    let text = |key: &str| metadata.get_string(key).unwrap_or_default().to_owned();
    let array = |key: &str| match metadata.get(key) {
        Some(MetadataValue::Array(array)) => array.values.as_slice(),
        _ => &[],
    };
    let texts = |key: &str| {
        array(key)
            .iter()
            .map(|value| value.as_str().expect("a string").to_owned())
            .collect::<Vec<_>>()
    };
    let id = |key: &str| {
        metadata
            .get_u64(key)
            .map(|id| u32::try_from(id).expect("a token id"))
    };
    Vocab {
        model: text("tokenizer.ggml.model"),
        pre: text("tokenizer.ggml.pre"),
        tokens: texts("tokenizer.ggml.tokens"),
        token_types: array("tokenizer.ggml.token_type")
            .iter()
            .map(|value| value.as_i64().expect("an integer") as i32)
            .collect(),
        merges: texts("tokenizer.ggml.merges"),
        bos: id("tokenizer.ggml.bos_token_id"),
        eos: id("tokenizer.ggml.eos_token_id"),
        eot: id("tokenizer.ggml.eot_token_id"),
        padding: id("tokenizer.ggml.padding_token_id"),
        add_bos: metadata
            .get_bool("tokenizer.ggml.add_bos_token")
            .unwrap_or(false),
    }
}

fn large_vocab() -> Option<Vocab> {
    let file =
        File::open(shared()?.join("tokenizer/qwen35-vocab.gguf.gz")).expect("the vocabulary");
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file)
        .read_to_end(&mut bytes)
        .expect("a gzip file");
    Some(vocab_from_gguf(bytes))
}

fn demo_tokenizer() -> Option<Tokenizer> {
    let bytes = std::fs::read(shared()?.join("gguf/demo-Q4_K_M.gguf")).expect("the demo model");
    Some(Tokenizer::new(vocab_from_gguf(bytes)).expect("a valid vocabulary"))
}

#[derive(serde::Deserialize)]
struct Vector {
    text: String,
    ids: Vec<u32>,
}

fn check_vectors(tokenizer: &Tokenizer, path: PathBuf, count: usize) {
    let vectors: Vec<Vector> =
        serde_json::from_reader(File::open(path).expect("the vectors")).expect("valid vectors");
    assert_eq!(vectors.len(), count);
    for Vector { text, ids } in &vectors {
        assert_eq!(&tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids), nfc(text));
    }
}

fn nfc(text: &str) -> String {
    text.nfc().map(|(c, _)| c).collect()
}

#[test]
fn large_vocabulary_equals_the_published_vectors() {
    let Some(vocab) = large_vocab() else { return };
    let tokenizer = Tokenizer::new(vocab).unwrap();
    assert_eq!(tokenizer.n_vocab(), 248_320);
    check_vectors(
        &tokenizer,
        shared().unwrap().join("tokenizer/public.json"),
        260,
    );
    let id = |name| tokenizer.token_id(name).unwrap();
    assert!(tokenizer.is_eog(id("<|im_end|>")) && tokenizer.is_eog(id("<|endoftext|>")));
    assert!(tokenizer.is_special(id("<|im_start|>")) && !tokenizer.is_special(id("<think>")));
    assert!(!tokenizer.is_eog(id("<think>")) && !tokenizer.is_eog(id("<|im_start|>")));
}

#[test]
fn demo_vocabulary_equals_its_vectors() {
    let Some(tokenizer) = demo_tokenizer() else {
        return;
    };
    check_vectors(
        &tokenizer,
        shared().unwrap().join("models/demo/tokenizer_goldens.json"),
        200,
    );
}

#[test]
fn llama_cpp_vectors_are_equal() {
    let Some(shared) = shared() else { return };
    let path = |suffix: &str| shared.join(format!("tokenizer/ggml-vocab-qwen35.gguf{suffix}"));
    let tokenizer = Tokenizer::new(vocab_from_gguf(std::fs::read(path("")).unwrap())).unwrap();
    let inputs = std::fs::read_to_string(path(".inp")).unwrap();
    let outputs = std::fs::read_to_string(path(".out")).unwrap();
    let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
    let outputs: Vec<&str> = outputs.lines().collect();
    assert!(outputs.len() > 40 && inputs.len() >= outputs.len());
    let mut n_equal = 0;
    for (text, ids) in inputs.iter().zip(&outputs) {
        let ids: Vec<u32> = ids
            .split_whitespace()
            .map(|id| id.parse().unwrap())
            .collect();
        assert_eq!(tokenizer.decode(&ids), **text);
        // llama.cpp does not compose accents, the models' own tokenizer does: these differ by design.
        if nfc(text) != **text {
            assert_eq!(
                tokenizer.encode(text, false).unwrap(),
                tokenizer.encode(&nfc(text), false).unwrap()
            );
            continue;
        }
        for parse_special in [false, true] {
            assert_eq!(
                tokenizer.encode(text, parse_special).unwrap(),
                ids,
                "{text:?}"
            );
        }
        n_equal += 1;
    }
    assert_eq!(n_equal, 47);
    assert!(
        inputs[outputs.len()..]
            .iter()
            .all(|text| text.trim().is_empty())
    );
}

#[test]
fn large_vocabulary_builds_fast() {
    let Some(vocab) = large_vocab() else { return };
    // Other tests and builds share the machine, so one good time out of ten counts.
    let best = (0..10)
        .map(|_| {
            let vocab = vocab.clone();
            let start = Instant::now();
            Tokenizer::new(vocab).unwrap();
            start.elapsed().as_millis()
        })
        .find(|&elapsed_ms| elapsed_ms < 500 || cfg!(debug_assertions));
    println!("248,320 tokens in {best:?} ms");
    assert!(best.is_some());
}

#[test]
fn shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Tokenizer>();
}

/// The byte-level alphabet, written down here a second time.
fn alphabet() -> Vec<char> {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut shifted = 256..;
    (0..256)
        .map(|byte| {
            if printable(byte) {
                byte
            } else {
                shifted.next().unwrap()
            }
        })
        .map(|code| char::from_u32(code).unwrap())
        .collect()
}

/// All bytes, a few merges, and added tokens of each type.
fn small_vocab() -> Vocab {
    let mut tokens: Vec<String> = alphabet().into_iter().map(String::from).collect();
    let merges = [
        "h e", "l l", "he ll", "hell o", "Ġ hello", "Ã ©", "ð Ł", "! Ġ",
    ]
    .map(String::from)
    .to_vec();
    tokens.extend(["he", "ll", "hell", "hello", "Ġhello", "Ã©", "ðŁ", "!Ġ"].map(String::from));
    let mut token_types = vec![1; tokens.len()];
    for (text, kind) in [
        ("<|im_start|>", 3),
        ("<|im_end|>", 3),
        ("<|endoftext|>", 3),
        ("<|fim_pad|>", 4),
        ("<think>", 4),
        ("</think>", 4),
        ("<tool call>", 4),
        ("[PAD264]", 5),
    ] {
        tokens.push(text.to_owned());
        token_types.push(kind);
    }
    let id = |text: &str| {
        tokens
            .iter()
            .position(|token| token == text)
            .map(|id| id as u32)
    };
    let (eos, padding) = (id("<|im_end|>"), id("[PAD264]"));
    Vocab {
        model: "gpt2".to_owned(),
        pre: "qwen35".to_owned(),
        tokens,
        token_types,
        merges,
        eos,
        padding,
        ..Vocab::default()
    }
}

fn small() -> Tokenizer {
    Tokenizer::new(small_vocab()).unwrap()
}

#[test]
fn control_tokens_are_text_unless_asked_for() {
    let tokenizer = small();
    let id = |name: &str| tokenizer.token_id(name).unwrap();
    let text = "<|im_start|>hello<think>";
    let with = tokenizer.encode(text, true).unwrap();
    assert_eq!(with, [id("<|im_start|>"), id("hello"), id("<think>")]);
    let without = tokenizer.encode(text, false).unwrap();
    assert!(without.len() > 10 && without.ends_with(&[id("hello"), id("<think>")]));
    assert_eq!(tokenizer.decode(&with), text);
    assert_eq!(tokenizer.decode(&without), text);
}

#[test]
fn a_user_defined_token_inside_a_control_token_is_found() {
    let mut vocab = small_vocab();
    vocab.tokens.push("<|a<think>b|>".to_owned());
    vocab.token_types.push(3);
    let tokenizer = Tokenizer::new(vocab).unwrap();
    let think = tokenizer.token_id("<think>").unwrap();
    assert_eq!(tokenizer.encode("<|a<think>b|>", true).unwrap().len(), 1);
    assert!(
        tokenizer
            .encode("<|a<think>b|>", false)
            .unwrap()
            .contains(&think)
    );
}

#[test]
fn unused_tokens_are_never_matched_and_have_no_text() {
    let tokenizer = small();
    let pad = tokenizer.padding().unwrap();
    for parse_special in [false, true] {
        assert!(
            !tokenizer
                .encode("[PAD264]", parse_special)
                .unwrap()
                .contains(&pad)
        );
    }
    assert_eq!(tokenizer.token_bytes(pad), b"");
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
}

#[test]
fn code_completion_tokens_are_control_tokens_that_end_a_generation() {
    let tokenizer = small();
    let id = tokenizer.token_id("<|fim_pad|>").unwrap();
    assert!(tokenizer.is_special(id) && tokenizer.is_eog(id));
    assert!(
        !tokenizer
            .encode("<|fim_pad|>", false)
            .unwrap()
            .contains(&id)
    );
}

#[test]
fn token_bytes_undo_the_byte_level_alphabet() {
    let tokenizer = small();
    for byte in 0..=255u8 {
        assert_eq!(tokenizer.token_bytes(u32::from(byte)), [byte]);
    }
    let bytes = |name: &str| tokenizer.token_bytes(tokenizer.token_id(name).unwrap());
    assert_eq!(bytes("Ġhello"), b" hello");
    assert_eq!(bytes("Ã©"), "é".as_bytes());
    assert_eq!(bytes("<tool call>"), b"<tool call>");
    assert_eq!(tokenizer.decode(&[0xf0, 0x9f, 65]), "\u{fffd}A");
}

#[test]
fn pre_tokenizers_differ_on_combining_marks() {
    let Some(vocab) = large_vocab() else { return };
    let hindi = "नमस्ते दुनिया, हिन्दी में";
    let count = |pre: &str| {
        let tokenizer = Tokenizer::new(Vocab {
            pre: pre.to_owned(),
            ..vocab.clone()
        })
        .unwrap();
        tokenizer.encode(hindi, false).unwrap().len()
    };
    assert!(count("qwen35") < count("qwen2"));
}

#[test]
fn decomposed_accents_are_composed() {
    let tokenizer = small();
    assert_eq!(
        tokenizer.encode("e\u{301}", false).unwrap(),
        [tokenizer.token_id("Ã©").unwrap()]
    );
}

#[test]
fn long_whitespace_is_split_or_refused() {
    let tokenizer = small();
    let text = format!("{}hello! hello", " ".repeat(500_000));
    let ids = tokenizer.encode(&text, false).unwrap();
    let id = |name: &str| tokenizer.token_id(name).unwrap();
    // The merge `!Ġ` reaches over a split, so it shows whether the text was split at all.
    assert_eq!(ids[ids.len() - 3..], [id("Ġhello"), id("!"), id("Ġhello")]);
    let error = tokenizer.encode(&" ".repeat(500_001), false).unwrap_err();
    assert!(
        error.to_string().contains("500001 white-space characters"),
        "{error}"
    );
}

fn refusal(vocab: Vocab) -> String {
    let error = Tokenizer::new(vocab).err().expect("a damaged vocabulary");
    let text = format!("{error:#}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert!(text.len() < 2000, "{} bytes: {text}", text.len());
    text
}

#[test]
fn damaged_metadata_is_refused_by_name() {
    let change = |change: fn(&mut Vocab)| {
        let mut vocab = small_vocab();
        change(&mut vocab);
        refusal(vocab)
    };
    for (text, expected) in [
        (
            change(|v| v.model = "llama".into()),
            "`tokenizer.ggml.model` is `llama`, expected `gpt2`",
        ),
        (
            change(|v| v.pre = "gpt-4o".into()),
            "is `gpt-4o`, expected one of `qwen35`, `qwen2`",
        ),
        (change(|v| v.tokens.clear()), "has 0"),
        (
            change(|v| v.tokens[65] = "AAA".into()),
            "no token for the byte 0x41 (`A`)",
        ),
        (
            change(|v| v.tokens[260] = "he".into()),
            "has `he` twice, as token 256 and token 260",
        ),
        (change(|v| v.token_types.truncate(9)), "has 9 entries"),
        (change(|v| v.token_types[7] = -4), "of token 7 is -4"),
        (
            change(|v| v.merges[1] = "ll".into()),
            "merge 1 of `tokenizer.ggml.merges` is `ll`",
        ),
        (change(|v| v.merges[1] = " ll".into()), "merge 1 of"),
        // Texts from the file come without control characters, and cut where they are long.
        (
            change(|v| v.merges[1] = "l".repeat(9999)),
            "expected two tokens",
        ),
        (
            change(|v| v.tokens[259..261].fill("long\n".repeat(9999))),
            "twice, as token 259 and token 260",
        ),
        (
            change(|v| v.model = "long\n".repeat(9999)),
            "expected `gpt2`",
        ),
        (
            change(|v| v.eos = Some(4000)),
            "`tokenizer.ggml.eos_token_id` is 4000",
        ),
        (
            change(|v| v.padding = Some(u32::MAX)),
            "`tokenizer.ggml.padding_token_id` is 4294967295",
        ),
    ] {
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn merges_that_give_no_token_are_passed_over() {
    let plain = Tokenizer::new(small_vocab()).unwrap();
    let mut vocab = small_vocab();
    vocab.merges.insert(1, "l h".into());
    vocab.merges.push(format!("{} a", "l".repeat(99)));
    let tokenizer = Tokenizer::new(vocab).unwrap();
    for text in ["hello", "hell lh", "lhe"] {
        assert_eq!(
            tokenizer.encode(text, true).unwrap(),
            plain.encode(text, true).unwrap()
        );
    }
}

#[test]
fn types_may_be_absent_and_empty_tokens_repeated() {
    let mut vocab = small_vocab();
    vocab.token_types.clear();
    vocab.tokens.extend([String::new(), String::new()]);
    let tokenizer = Tokenizer::new(vocab).unwrap();
    let id = tokenizer.token_id("<|im_end|>").unwrap();
    assert_eq!(
        tokenizer.encode("hello<|im_end|>", true).unwrap().last(),
        Some(&id)
    );
    assert!(tokenizer.encode("", true).unwrap().is_empty());
}

/// One way to damage a vocabulary; the numbers pick the entry.
#[derive(Clone, Debug)]
enum Damage {
    DropToken(usize),
    ReplaceToken(usize, String),
    CopyToken(usize, usize),
    DropType(usize),
    ReplaceType(usize, i32),
    ReplaceMerge(usize, String),
    SwapMerges(usize, usize),
    Ids(Option<u32>, Option<u32>),
    Names(String, String),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = || 0..300usize;
    let text = || {
        prop_oneof![
            any::<String>(),
            "[a-zĠĀ<|> ]{0,6}",
            "(<[|]?[a-z]{1,3}[|]?>){1,2}"
        ]
    };
    prop_oneof![
        at().prop_map(Damage::DropToken),
        (at(), text()).prop_map(|(at, text)| Damage::ReplaceToken(at, text)),
        (at(), at()).prop_map(|(from, to)| Damage::CopyToken(from, to)),
        at().prop_map(Damage::DropType),
        (at(), -1..8i32).prop_map(|(at, kind)| Damage::ReplaceType(at, kind)),
        (at(), text()).prop_map(|(at, text)| Damage::ReplaceMerge(at, text)),
        (at(), at()).prop_map(|(a, b)| Damage::SwapMerges(a, b)),
        (any::<Option<u32>>(), any::<Option<u32>>()).prop_map(|(a, b)| Damage::Ids(a, b)),
        (text(), text()).prop_map(|(a, b)| Damage::Names(a, b)),
    ]
}

fn apply(vocab: &mut Vocab, damage: Damage) {
    match damage {
        Damage::DropToken(at) if at < vocab.tokens.len() => drop(vocab.tokens.remove(at)),
        Damage::ReplaceToken(at, text) if at < vocab.tokens.len() => vocab.tokens[at] = text,
        Damage::CopyToken(from, to) if from.max(to) < vocab.tokens.len() => {
            vocab.tokens[to] = vocab.tokens[from].clone();
        }
        Damage::DropType(at) if at < vocab.token_types.len() => drop(vocab.token_types.remove(at)),
        Damage::ReplaceType(at, kind) if at < vocab.token_types.len() => {
            vocab.token_types[at] = kind
        }
        Damage::ReplaceMerge(at, text) => {
            let at = at % vocab.merges.len();
            vocab.merges[at] = text;
        }
        Damage::SwapMerges(a, b) => {
            let n = vocab.merges.len();
            vocab.merges.swap(a % n, b % n);
        }
        Damage::Ids(eos, bos) => (vocab.eos, vocab.bos) = (eos, bos),
        Damage::Names(model, pre) => (vocab.model, vocab.pre) = (model, pre),
        _ => {}
    }
}

fn text() -> impl Strategy<Value = String> {
    let pieces = prop_oneof![
        any::<String>(),
        "[a-zA-Z0-9 '\r\n\t.,é́ü̈नि्각ᄀ-ᇿ\u{300}-\u{36f}\u{3000}👩‍👧🇩]{0,40}",
        "(hello| hello|he|ll|\n\n|  ){0,8}",
    ];
    prop::collection::vec(pieces, 0..4).prop_map(|pieces| pieces.concat())
}

thread_local! {
    static SMALL: Tokenizer = small();
    static DEMO: Option<Tokenizer> = demo_tokenizer();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn round_trip_gives_the_composed_text(text in text()) {
        SMALL.with(|tokenizer| {
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids), nfc(&text));
            Ok(())
        })?;
        DEMO.with(|tokenizer| {
            let Some(tokenizer) = tokenizer else { return Ok(()) };
            let ids = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids), nfc(&text));
            Ok(())
        })?;
    }

    #[test]
    fn a_stream_equals_the_whole(
        bytes in prop_oneof![
            any::<String>().prop_map(String::into_bytes),
            prop::collection::vec(any::<u8>(), 0..60),
            prop::collection::vec(prop::sample::select(b"a\xc3\xa9\xf0\x9f\x98\x80\xe2\x82\xff\xed".to_vec()), 0..60),
        ],
        cuts in prop::collection::vec(0..60usize, 0..20),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let mut stream = DecodeStream::new();
        let mut text = String::new();
        for range in cuts.windows(2) {
            text += &stream.push(&bytes[range[0]..range[1]]);
        }
        text += &stream.finish();
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        prop_assert_eq!(stream.finish(), "");
    }
}

proptest! {
    // The same ten thousand on every run.
    #![proptest_config(ProptestConfig {
        cases: 10_000,
        rng_seed: RngSeed::Fixed(35),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_metadata_never_panics(
        damages in prop::collection::vec(damage(), 1..4),
        text in text(),
    ) {
        let mut vocab = small_vocab();
        for damage in damages {
            apply(&mut vocab, damage);
        }
        let n_vocab = vocab.tokens.len();
        match Tokenizer::new(vocab) {
            Ok(tokenizer) => {
                prop_assert_eq!(tokenizer.n_vocab(), n_vocab);
                let ids = tokenizer.encode(&text, true).unwrap();
                prop_assert!(ids.iter().all(|&id| (id as usize) < n_vocab));
                tokenizer.decode(&ids);
            }
            Err(error) => {
                let message = format!("{error:#}");
                prop_assert!(!message.chars().any(char::is_control));
            }
        }
    }
}
