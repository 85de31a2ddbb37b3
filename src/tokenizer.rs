//! Text to token ids and back, from the tokenizer facts stored in a GGUF file.
//!
//! Owns the byte-level BPE of the Qwen family: NFC, the pre-tokenizer named by the file, merges,
//! added tokens, and the bytes each token stands for. Knows nothing about files, prompts or chat
//! formats, and never adds a token on its own: a caller that wants `bos` in front puts it there.
//! Invariant: a built tokenizer can encode every string, because all 256 byte tokens were found.

use anyhow::{Context, Result, anyhow, bail, ensure};
use ggml_metal::one_line;
use tokenizers::models::bpe::{self, BPE};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, AddedVocabulary, Model, OffsetType, PreTokenizer, SplitDelimiterBehavior,
};

/// Pre-tokenizer patterns by the name in `tokenizer.ggml.pre`, as published with each family.
const PRE_TOKENIZERS: [(&str, &str); 2] = [
    (
        "qwen35",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// Tokens that end a generation whatever their stored type. The last four open another document in
/// a code completion prompt, so a model that writes one has finished its answer.
const END_OF_GENERATION: [&str; 10] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

/// Tokens that act as control tokens although published files store some of them as user defined.
const CONTROL_BY_NAME: [&str; 3] = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"];

/// The regex engine keeps one stack entry for each character of a white-space run, gives up at a
/// million and then returns the rest of the text unsplit, without an error.
const MAX_WHITESPACE_RUN: usize = 500_000;

/// The tokenizer facts of a GGUF file, as stored under `tokenizer.ggml.*`.
#[derive(Clone, Debug, Default)]
pub struct Vocab {
    /// `tokenizer.ggml.model`; only `gpt2` (byte-level BPE) is accepted.
    pub model: String,
    /// `tokenizer.ggml.pre`: which pre-tokenizer pattern splits the text.
    pub pre: String,
    /// `tokenizer.ggml.tokens`, in the byte-level alphabet except for added tokens.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`; empty means that every token is a normal one.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`, best rank first, the two halves separated by a space.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub padding: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: bool,
}

/// What `tokenizer.ggml.token_type` says about a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
}

impl TokenKind {
    fn from_gguf(value: i32) -> Option<TokenKind> {
        Some(match value {
            // Byte tokens (6) of a byte-level vocabulary are written in its alphabet like any other.
            1 | 6 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            0 | 5 => TokenKind::Unused,
            _ => return None,
        })
    }
}

/// A tokenizer built from GGUF metadata.
pub struct Tokenizer {
    bpe: BPE,
    split: Split,
    byte_level: ByteLevel,
    control_and_user: AddedVocabulary,
    user_only: AddedVocabulary,
    kinds: Vec<TokenKind>,
    bytes: Vec<u8>,
    offsets: Vec<usize>, // n_vocab + 1 positions in `bytes`
    end_of_generation: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    padding: Option<u32>,
    add_bos: bool,
}

impl Tokenizer {
    /// Builds the tokenizer; everything in `vocab` is checked, so a damaged file gives an error that
    /// names the key.
    pub fn new(vocab: Vocab) -> Result<Tokenizer> {
        ensure!(
            vocab.model == "gpt2",
            "`tokenizer.ggml.model` is `{}`, expected `gpt2` (byte-level BPE)",
            one_line(&vocab.model)
        );
        let split = pre_tokenizer(&vocab.pre)?;
        let n_vocab = vocab.tokens.len();
        ensure!(
            u32::try_from(n_vocab).is_ok(),
            "`tokenizer.ggml.tokens` has {n_vocab} entries, too many"
        );
        for (key, id) in [
            ("bos", vocab.bos),
            ("eos", vocab.eos),
            ("eot", vocab.eot),
            ("padding", vocab.padding),
        ] {
            if let Some(id) = id {
                ensure!(
                    (id as usize) < n_vocab,
                    "`tokenizer.ggml.{key}_token_id` is {id}, but the vocabulary has {n_vocab} tokens"
                );
            }
        }

        let kinds = token_kinds(&vocab.tokens, &vocab.token_types)?;
        let (bytes, offsets) = token_bytes(&vocab.tokens, &kinds);
        let mut end_of_generation = Vec::new();
        let (mut control, mut user) = (Vec::new(), Vec::new());
        for ((id, text), kind) in (0u32..).zip(&vocab.tokens).zip(&kinds) {
            let named = *kind == TokenKind::Control && END_OF_GENERATION.contains(&text.as_str());
            if named || Some(id) == vocab.eos || Some(id) == vocab.eot {
                end_of_generation.push(id);
            }
            match kind {
                TokenKind::Control | TokenKind::Unknown => control.push(added_token(text, true)),
                TokenKind::UserDefined => user.push(added_token(text, false)),
                TokenKind::Normal | TokenKind::Unused => {}
            }
        }

        let bpe = build_bpe(vocab.tokens, vocab.merges)?;
        let user_only = added_vocabulary(user.clone(), &bpe)?;
        user.append(&mut control);
        let control_and_user = added_vocabulary(user, &bpe)?;
        Ok(Tokenizer {
            bpe,
            split,
            byte_level: ByteLevel::new(false, false, false),
            control_and_user,
            user_only,
            kinds,
            bytes,
            offsets,
            end_of_generation,
            bos: vocab.bos,
            eos: vocab.eos,
            eot: vocab.eot,
            padding: vocab.padding,
            add_bos: vocab.add_bos,
        })
    }

    /// Encodes `text`. With `parse_special` the names of control tokens become their ids; without it
    /// they are plain text. User-defined tokens (such as `<think>`) are recognised in both cases.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        let run = longest_whitespace_run(text);
        ensure!(
            run <= MAX_WHITESPACE_RUN,
            "the text has {run} white-space characters in a row, the limit is {MAX_WHITESPACE_RUN}"
        );
        let added = if parse_special {
            &self.control_and_user
        } else {
            &self.user_only
        };
        let mut pieces = added.extract_and_normalize(Some(&NFC), text);
        let encoding = self
            .split
            .pre_tokenize(&mut pieces)
            .and_then(|()| self.byte_level.pre_tokenize(&mut pieces))
            .and_then(|()| pieces.tokenize(|piece| self.bpe.tokenize(piece.get())))
            .and_then(|()| pieces.into_encoding(None, 0, OffsetType::None))
            .map_err(|error| anyhow!(error))
            .context("cannot tokenize the text")?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary
    /// nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|&id| self.token_bytes(id))
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes a token stands for: for added tokens those of their name; empty for unused tokens
    /// and for ids outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match self.offsets.get(id..id.saturating_add(2)) {
            Some(&[start, end]) => &self.bytes[start..end],
            _ => &[],
        }
    }

    /// The first of the tokens at the end of the vocabulary that were added to it: control tokens and tags, with the
    /// unused ids among and behind them. The number of ids where there are none.
    pub fn first_added(&self) -> usize {
        let is_text = |kind: &TokenKind| matches!(kind, TokenKind::Normal | TokenKind::Unknown);
        let text_ends = self.kinds.iter().rposition(is_text).map_or(0, |at| at + 1);
        let added = |kind: &TokenKind| matches!(kind, TokenKind::Control | TokenKind::UserDefined);
        let first = self.kinds[text_ends..].iter().position(added);
        first.map_or(self.kinds.len(), |n| text_ends + n)
    }

    /// Whether `id` is a control token, which a reader of the answer should not see.
    pub fn is_special(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&TokenKind::Control)
    }

    /// Whether a generation ends with `id`.
    pub fn is_eog(&self, id: u32) -> bool {
        self.end_of_generation.contains(&id)
    }

    /// The id of the token stored as `text` (for normal tokens in the byte-level alphabet).
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.bpe.token_to_id(text)
    }

    /// Number of tokens, unused ones included.
    pub fn n_vocab(&self) -> usize {
        self.kinds.len()
    }

    /// The token that opens a text, if the file names one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, if the file names one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The token that ends a turn, if the file names one.
    pub fn eot(&self) -> Option<u32> {
        self.eot
    }

    /// The token that fills unused places of a batch, if the file names one.
    pub fn padding(&self) -> Option<u32> {
        self.padding
    }

    /// Whether the file asks for `bos` in front of a prompt.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }
}

/// Turns token bytes into text piece by piece; never yields half a UTF-8 character.
#[derive(Clone, Debug, Default)]
pub struct DecodeStream {
    pending: Vec<u8>, // an incomplete character: at most three bytes between calls
}

impl DecodeStream {
    /// An empty stream.
    pub fn new() -> DecodeStream {
        DecodeStream::default()
    }

    /// Adds the bytes of a token and returns the text that is complete by now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, tail) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = tail;
                    let Some(bad) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[bad..];
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        text
    }

    /// Ends the stream: an incomplete character becomes U+FFFD. The stream is empty afterwards.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

fn pre_tokenizer(name: &str) -> Result<Split> {
    let Some((_, pattern)) = PRE_TOKENIZERS.iter().find(|(known, _)| *known == name) else {
        let known = PRE_TOKENIZERS
            .map(|(known, _)| format!("`{known}`"))
            .join(", ");
        bail!(
            "`tokenizer.ggml.pre` is `{}`, expected one of {known}",
            one_line(name)
        );
    };
    Split::new(
        SplitPattern::Regex((*pattern).to_string()),
        SplitDelimiterBehavior::Isolated,
        false,
    )
    .map_err(|error| anyhow!(error))
    .with_context(|| format!("cannot compile the pre-tokenizer `{name}`"))
}

fn token_kinds(tokens: &[String], types: &[i32]) -> Result<Vec<TokenKind>> {
    ensure!(
        types.is_empty() || types.len() == tokens.len(),
        "`tokenizer.ggml.token_type` has {} entries, but `tokenizer.ggml.tokens` has {}",
        types.len(),
        tokens.len()
    );
    let mut kinds = vec![TokenKind::Normal; tokens.len()];
    for (id, (kind, value)) in kinds.iter_mut().zip(types).enumerate() {
        *kind = TokenKind::from_gguf(*value).with_context(|| {
            format!("`tokenizer.ggml.token_type` of token {id} is {value}, expected 0 to 6")
        })?;
    }
    for (text, kind) in tokens.iter().zip(&mut kinds) {
        let name = text.as_str();
        // Most tokens are not in angle brackets, and this runs over the whole vocabulary.
        if name.starts_with('<')
            && (END_OF_GENERATION.contains(&name) || CONTROL_BY_NAME.contains(&name))
        {
            *kind = TokenKind::Control;
        }
    }
    Ok(kinds)
}

/// The bytes of all tokens end to end, and the positions where each begins (and the last one ends).
fn token_bytes(tokens: &[String], kinds: &[TokenKind]) -> (Vec<u8>, Vec<usize>) {
    let byte_of = byte_of_char();
    let mut bytes = Vec::with_capacity(tokens.iter().map(String::len).sum());
    let mut offsets = Vec::with_capacity(tokens.len() + 1);
    offsets.push(0);
    for (text, kind) in tokens.iter().zip(kinds) {
        match kind {
            TokenKind::Unused => {}
            TokenKind::Normal => {
                let start = bytes.len();
                let mapped = text.chars().try_for_each(|c| {
                    let byte = byte_of.get(c as usize).copied().flatten()?;
                    bytes.push(byte);
                    Some(())
                });
                // Outside the alphabet: an added token stored as a normal one.
                if mapped.is_none() {
                    bytes.truncate(start);
                    bytes.extend_from_slice(text.as_bytes());
                }
            }
            TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined => {
                bytes.extend_from_slice(text.as_bytes());
            }
        }
        offsets.push(bytes.len());
    }
    (bytes, offsets)
}

/// The character that stands for each byte in the byte-level alphabet: printable Latin-1 characters
/// stand for themselves, the other bytes take the code points from 256 on, in order.
fn char_of_byte() -> [char; 256] {
    let mut next = '\u{100}'..;
    std::array::from_fn(|index| match index as u8 {
        byte @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(byte),
        _ => next.next().unwrap_or(char::REPLACEMENT_CHARACTER),
    })
}

/// The inverse of [`char_of_byte`], indexed by code point.
fn byte_of_char() -> [Option<u8>; 512] {
    let mut bytes = [None; 512];
    for (byte, c) in (0u8..=255).zip(char_of_byte()) {
        if let Some(slot) = bytes.get_mut(c as usize) {
            *slot = Some(byte);
        }
    }
    bytes
}

fn build_bpe(tokens: Vec<String>, merges: Vec<String>) -> Result<BPE> {
    let mut ids = bpe::Vocab::with_capacity(tokens.len());
    for (id, text) in (0u32..).zip(tokens) {
        // Nothing can match an empty token, and some files hold several.
        if text.is_empty() {
            continue;
        }
        match ids.entry(text) {
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(id),
            std::collections::hash_map::Entry::Occupied(entry) => bail!(
                "`tokenizer.ggml.tokens` has `{}` twice, as token {} and token {id}",
                one_line(entry.key()),
                entry.get()
            ),
        };
    }
    // Without one of these the BPE model would drop the byte from the text without a word.
    for (byte, c) in char_of_byte().into_iter().enumerate() {
        ensure!(
            ids.contains_key(c.encode_utf8(&mut [0; 4]) as &str),
            "`tokenizer.ggml.tokens` has no token for the byte 0x{byte:02x} (`{c}`)"
        );
    }
    let mut kept = Vec::with_capacity(merges.len());
    for (rank, mut left) in merges.into_iter().enumerate() {
        let halves = left.find(' ').filter(|&at| at > 0 && at + 1 < left.len());
        let at = halves.with_context(|| {
            format!(
                "merge {rank} of `tokenizer.ggml.merges` is `{}`, expected two tokens",
                one_line(&left)
            )
        })?;
        let right = left.split_off(at + 1);
        left.truncate(at);
        // A merge that gives no token can never be made, as in llama.cpp.
        let known = |text: &str| ids.contains_key(text);
        if known(&left) && known(&right) && known(&format!("{left}{right}")) {
            kept.push((left, right));
        }
    }
    BPE::builder()
        .vocab_and_merges(ids, kept)
        .build()
        .map_err(|error| {
            // It quotes the file as it is.
            let error = one_line(&error.to_string());
            anyhow!("`tokenizer.ggml.merges` does not fit the vocabulary: {error}")
        })
}

fn added_token(text: &str, special: bool) -> AddedToken {
    AddedToken::from(text, special).normalized(false)
}

fn added_vocabulary(tokens: Vec<AddedToken>, bpe: &BPE) -> Result<AddedVocabulary> {
    let mut added = AddedVocabulary::new();
    added
        .add_tokens(tokens, bpe, None::<&NFC>)
        .map_err(|error| {
            anyhow!("cannot index the added tokens of `tokenizer.ggml.tokens`: {error}")
        })?;
    Ok(added)
}

fn longest_whitespace_run(text: &str) -> usize {
    let mut longest = 0;
    let mut run = 0;
    for c in text.chars() {
        run = if c.is_whitespace() { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    longest
}
