//! Answers kept to a JSON schema or a grammar, through llguidance.
//!
//! A [`Constraint`] forbids, before each token, every token that the grammar does not allow next. The trie of token
//! bytes is built once a model from the tokenizer.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::tokenizer::Tokenizer;

/// What an answer must be.
#[derive(Clone, Debug)]
pub enum Grammar {
    /// JSON that fits a schema; `{}` is any JSON.
    JsonSchema(serde_json::Value),
    /// A grammar in llguidance's Lark form.
    Lark(String),
}

/// Makes constraints for one vocabulary.
pub struct GrammarFactory(ParserFactory);

impl GrammarFactory {
    /// Builds the trie of the vocabulary's tokens.
    ///
    /// # Errors
    /// When the vocabulary has no token that ends a text.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let Some(eos) = tokenizer.eos().or(tokenizer.eot()) else {
            bail!("the model's vocabulary names no end token, which grammars need");
        };
        let n_vocab = tokenizer.n_vocab() as u32;
        let words: Vec<Vec<u8>> = (0..n_vocab)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                // The marker keeps control tokens apart from text that reads the same.
                if tokenizer.is_special(id) {
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
                } else {
                    bytes.to_vec()
                }
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(n_vocab, eos), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).context("preparing grammars")?;
        factory.quiet();
        Ok(Self(factory))
    }

    /// A constraint at the start of an answer.
    ///
    /// # Errors
    /// When the schema or grammar cannot be understood; the message says where.
    pub fn constraint(&self, grammar: &Grammar) -> Result<Constraint> {
        let top = match grammar {
            Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        };
        let matcher = Matcher::new(self.0.create_parser(top));
        if let Some(error) = matcher.get_error() {
            bail!("{}", error.lines().collect::<Vec<_>>().join(" "));
        }
        Ok(Constraint(matcher))
    }
}

/// Where an answer stands in its grammar.
pub struct Constraint(Matcher);

impl Constraint {
    /// Sets the logits of all tokens that may not come next to minus infinity.
    ///
    /// # Errors
    /// When the grammar grew too complex to follow.
    pub fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        let allowed = self.0.compute_mask_or_eos()?;
        for (id, logit) in logits.iter_mut().enumerate() {
            if id >= allowed.len() || !allowed.is_allowed(id as u32) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Moves on past a token.
    ///
    /// # Errors
    /// When the grammar does not allow it.
    pub fn accept(&mut self, token: u32) -> Result<()> {
        if self.0.is_stopped() {
            return Ok(());
        }
        self.0.consume_token(token)
    }

    /// True where the answer may end as it stands.
    ///
    /// # Errors
    /// When the grammar cannot be followed any more.
    pub fn is_complete(&mut self) -> Result<bool> {
        Ok(self.0.is_stopped() || self.0.is_accepting()?)
    }
}
