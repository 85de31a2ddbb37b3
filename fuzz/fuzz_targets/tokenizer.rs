//! Builds a tokenizer and encodes a text with it. Input: the lists of the metadata, an empty line, the text. A line
//! that begins with a digit adds a token of that type, one that begins with `m` a merge.

#![no_main]

use libfuzzer_sys::fuzz_target;
use qrun::tokenizer::{DecodeStream, Tokenizer, Vocab};
use unicode_normalization_alignments::UnicodeNormalization as _;

fuzz_target!(|input: &str| {
    let (lists, text) = input
        .split_once("\n\n")
        .unwrap_or((input, "the <|im_end|>"));
    let mut vocab = Vocab {
        model: "gpt2".to_owned(),
        pre: "qwen35".to_owned(),
        tokens: byte_tokens(),
        token_types: vec![1; 256],
        eos: Some(lists.len() as u32 % 260),
        ..Vocab::default()
    };
    for line in lists.lines() {
        let mut rest = line.chars();
        match rest.next() {
            Some('m') => vocab.merges.push(rest.as_str().to_owned()),
            Some(kind) => {
                vocab.tokens.push(rest.as_str().to_owned());
                vocab.token_types.push(kind as i32 - '0' as i32);
            }
            None => {}
        }
    }
    let n_vocab = vocab.tokens.len();
    // A name of another type may be spelled in the alphabet of the bytes, and then stands for itself.
    let only_normal = vocab.token_types.iter().all(|&kind| kind == 1);
    let tokenizer = match Tokenizer::new(vocab) {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            let message = format!("{error:#}");
            assert!(!message.chars().any(char::is_control), "{message:?}");
            return;
        }
    };
    for parse_special in [false, true] {
        let ids = tokenizer
            .encode(text, parse_special)
            .expect("texts are short");
        assert!(ids.iter().all(|&id| (id as usize) < n_vocab), "{ids:?}");
        let decoded = tokenizer.decode(&ids);
        let mut stream = DecodeStream::new();
        let mut pieces: String = ids
            .iter()
            .map(|&id| stream.push(tokenizer.token_bytes(id)))
            .collect();
        pieces.push_str(&stream.finish());
        assert_eq!(pieces, decoded);
        if only_normal {
            let composed: String = text.nfc().map(|(c, _)| c).collect();
            assert_eq!(decoded, composed);
        }
    }
});

/// The token of each byte in the byte-level alphabet.
fn byte_tokens() -> Vec<String> {
    let mut next = '\u{100}'..;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte).to_string(),
            _ => next.next().map(String::from).unwrap_or_default(),
        })
        .collect()
}
