//! The thread that owns the model: takes orders, answers, and tells what happens.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use qrun::chat;
use qrun::engine::Engine;
use qrun::generate::{FinishReason, GenerateError, Generator, Piece, Request, Seen};
use qrun::reuse::{Begun, StateCache};
use qrun::sampler::Sampler;
use qrun::session::{CancelToken, Session, SessionBytes};
use qrun::speculate::{SpecStats, Speculator};
use qrun::stored::{self, StateKey, StateStore};
use qrun::template::{ChatTemplate, RenderOptions, normalize_messages};
use qrun::tokenizer::Tokenizer;
use qrun::vocab;
use serde_json::{Value, json};

use crate::cli::{ChatArgs, ModelArgs, SamplingArgs, Spec, SpecArgs};
use crate::cmd::{model, run};
use crate::live::line::Reading;
use crate::live::publish;

/// What the worker is asked to do.
pub enum Order {
    /// Use this model from now on.
    Load(ModelArgs),
    /// Answer a conversation.
    Answer(Box<Question>),
    /// Speculate so from now on.
    Spec(Spec),
}

/// A conversation to be answered.
pub struct Question {
    /// Messages as templates take them.
    pub messages: Value,
    /// Whether to think; the template's own default where not said.
    pub think: Option<bool>,
    /// Flags and changes of the sampling.
    pub sampling: SamplingArgs,
    /// Ends the answer.
    pub cancel: CancelToken,
    /// Ends the thinking.
    pub end_thinking: CancelToken,
}

/// What the worker tells.
pub enum News {
    /// A share of the model is loaded.
    Loading(f32),
    /// A model is ready.
    Loaded(Box<Facts>),
    /// No model could be loaded.
    NotLoaded(String),
    /// The prompt of an answer was begun.
    Begun(Begun),
    /// Tokens of the prompt processed and to process, and the time it took so far.
    Prompt(usize, usize, Duration),
    /// A piece of the thinking.
    Thinking(String),
    /// A piece of the answer.
    Text(String),
    /// Figures after a pass.
    Pass(Box<Figures>),
    /// The answer ended.
    Done(Box<Ending>),
    /// The answer failed.
    Failed(String),
    /// Something works less well than asked.
    Notice(String),
}

/// What there is to know of a model.
pub struct Facts {
    /// Name and weight type.
    pub name: String,
    /// Device and the like.
    pub detail: String,
    /// Context limit.
    pub n_ctx: usize,
    /// Why the draft head is on or off.
    pub draft_head: String,
    /// Bytes of weights: mapped, and copied.
    pub weights: (usize, usize),
}

/// Figures while an answer is made.
pub struct Figures {
    /// Tokens of the answer so far.
    pub n_tokens: usize,
    /// Time since the first token.
    pub decode_time: Duration,
    /// Guesses before the next pass; none without speculation.
    pub depth: Option<usize>,
    /// What speculation did so far.
    pub stats: Option<SpecStats>,
    /// Tokens in the session.
    pub n_past: usize,
    /// Keys and values of these tokens.
    pub kv_bytes: usize,
    /// What the session takes.
    pub bytes: SessionBytes,
    /// What saved states take.
    pub snapshots: usize,
}

/// How an answer ended.
pub struct Ending {
    /// The answer.
    pub text: String,
    /// The thinking before it.
    pub reasoning: String,
    /// Why.
    pub reason: FinishReason,
    /// Tokens of answer and thinking, and tokens a second.
    pub n_tokens: usize,
    /// Tokens of thinking.
    pub n_reasoning: usize,
    /// Tokens a second.
    pub tps: f64,
}

impl Ending {
    /// The answer as chat templates take it.
    fn message(&self) -> Value {
        json!({"role": "assistant", "content": self.text, "reasoning_content": self.reasoning})
    }
}

/// A model that is ready.
struct Loaded {
    engine: Arc<Engine>,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    session: Session,
    speculator: Option<Speculator>,
    states: StateCache,
    caches: Caches,
}

/// Works until nobody gives orders any more.
pub fn work(orders: &Receiver<Order>, news: &Sender<News>, args: &ChatArgs) {
    let (mut model_args, mut spec) = (args.model.clone(), args.spec.clone());
    let caches = Caches {
        ram: args.cache_ram.saturating_mul(1 << 20),
        disk: (args.cache_disk as u64).saturating_mul(1 << 20),
    };
    let mut loaded = load(&model_args, &spec, caches, news);
    while let Ok(order) = orders.recv() {
        match order {
            Order::Load(args) => {
                // The old model goes first: both may not fit.
                loaded = None;
                model_args = args;
                loaded = load(&model_args, &spec, caches, news).or(loaded);
            }
            Order::Spec(depth) => {
                spec.spec = depth;
                if let Some(model) = &mut loaded
                    && let Err(error) = model.speculate(&model_args, &spec)
                {
                    let _ = news.send(News::Failed(crate::report::error_line(&error)));
                }
            }
            Order::Answer(question) => {
                let Some(model) = &mut loaded else {
                    let _ = news.send(News::Failed("no model is loaded".to_owned()));
                    continue;
                };
                match model.answer(&question, news) {
                    Ok((ending, boundary)) => {
                        let message = ending.message();
                        let _ = news.send(News::Done(Box::new(ending)));
                        // The answer is not kept waiting for it.
                        model.store(&question, message, boundary, news);
                    }
                    Err(error) => {
                        let _ = news.send(News::Failed(crate::report::error_line(&error)));
                    }
                }
            }
        }
    }
}

/// Bytes for saved states.
#[derive(Clone, Copy)]
struct Caches {
    ram: usize,
    disk: u64,
}

impl Caches {
    /// Where the states of this session are saved.
    fn states(self, session: &Session) -> Result<StateCache> {
        if self.disk == 0 {
            return Ok(StateCache::new(self.ram));
        }
        let store = StateStore::open(&stored::folder()?, self.disk, StateKey::of(session));
        Ok(StateCache::with_disk(self.ram, store))
    }
}

fn load(args: &ModelArgs, spec: &SpecArgs, caches: Caches, news: &Sender<News>) -> Option<Loaded> {
    let mut say = |text: &str| {
        let _ = news.send(News::Notice(text.to_owned()));
    };
    let result = Loaded::new(args, spec, caches, &mut say, &mut |share| {
        let _ = news.send(News::Loading(share));
    });
    match result {
        Ok(loaded) => {
            publish::loaded(&loaded.engine, &loaded.session, loaded.draft_head());
            let _ = news.send(News::Loaded(Box::new(loaded.facts())));
            Some(loaded)
        }
        Err(error) => {
            let _ = news.send(News::NotLoaded(crate::report::error_line(&error)));
            None
        }
    }
}

impl Loaded {
    fn new(
        args: &ModelArgs,
        spec: &SpecArgs,
        caches: Caches,
        say: &mut dyn FnMut(&str),
        progress: &mut dyn FnMut(f32),
    ) -> Result<Self> {
        let mut params = model::session_params(args)?;
        let needs = model::Needs::of(spec);
        let (engine, tokenizer) = model::load_quietly(args, &needs, say, progress)?;
        let file = engine.files().main();
        let source = vocab::chat_template(file).with_context(|| {
            format!(
                "{}: has no chat template, so it cannot chat",
                file.path().display()
            )
        })?;
        let template = ChatTemplate::new(&source)
            .with_context(|| format!("{}: its chat template", file.path().display()))?;
        let (speculation, tuned) = model::speculation(spec, &engine, &tokenizer, &mut params)?;
        let session = Session::new(engine.clone(), params)?;
        // Saved states may take what a full context leaves.
        let caches = Caches {
            ram: engine.spare().map_or(caches.ram, |n| n.min(caches.ram)),
            ..caches
        };
        Ok(Self {
            states: caches.states(&session)?,
            caches,
            session,
            speculator: speculation.map(|params| Speculator::new(params, tuned)),
            engine,
            tokenizer,
            template,
        })
    }

    /// Goes on with another kind of speculation: the session begins anew, since it may have to keep more.
    fn speculate(&mut self, args: &ModelArgs, spec: &SpecArgs) -> Result<()> {
        let mut params = model::session_params(args)?;
        let (speculation, tuned) =
            model::speculation(spec, &self.engine, &self.tokenizer, &mut params)?;
        let session = Session::new(self.engine.clone(), params)?;
        // Without a draft head's state the saved ones have another shape.
        self.states = self.caches.states(&session)?;
        self.session = session;
        self.speculator = speculation.map(|params| Speculator::new(params, tuned));
        Ok(())
    }

    fn draft_head(&self) -> &str {
        model::draft_head(&self.engine, self.speculator.is_some())
    }

    fn facts(&self) -> Facts {
        let (engine, config) = (&self.engine, self.engine.config());
        let weights = engine.weight_bytes();
        let device = engine.backends()[0].device();
        let file = engine.files().main();
        let name = file
            .path()
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy();
        Facts {
            name: name.into_owned(),
            detail: device.name().to_owned(),
            n_ctx: self.session.params().n_ctx.min(config.n_ctx_train.max(1)),
            draft_head: self.draft_head().to_owned(),
            weights: (weights.mapped, weights.copied + weights.repacked),
        }
    }

    fn render(&self, messages: &Value, think: Option<bool>, generation: bool) -> Result<String> {
        let name = |id: Option<u32>| {
            id.map(|id| String::from_utf8_lossy(self.tokenizer.token_bytes(id)).into_owned())
                .unwrap_or_default()
        };
        self.template
            .render(&RenderOptions {
                messages: &normalize_messages(messages),
                tools: None,
                add_generation_prompt: generation,
                enable_thinking: think,
                bos_token: &name(self.tokenizer.bos()),
                eos_token: &name(self.tokenizer.eos()),
            })
            .context("rendering the chat template")
    }

    /// Keeps what a restarted program can go on from: the state at the end of the answer, or where the template will
    /// show the answer in another form in the next turn (without its thinking), the one before it.
    fn store(&mut self, question: &Question, answer: Value, boundary: usize, news: &Sender<News>) {
        if !self.states.has_disk() {
            return;
        }
        let stored = self.same_in_next_turn(question, answer).and_then(|same| {
            let n = if same >= self.session.n_past() {
                self.session.n_past()
            } else {
                boundary
            };
            self.states.store(&mut self.session, n)
        });
        let notices = stored.unwrap_or_else(|error| vec![crate::report::error_line(&error)]);
        for notice in notices {
            let _ = news.send(News::Notice(notice));
        }
    }

    /// How many of the session's tokens the next turn's prompt begins with.
    fn same_in_next_turn(&self, question: &Question, answer: Value) -> Result<usize> {
        let mut messages = question.messages.clone();
        if let Value::Array(list) = &mut messages {
            list.extend([answer, json!({"role": "user", "content": "?"})]);
        }
        let text = self.render(&messages, question.think, true)?;
        let next = self.tokenizer.encode(&text, true)?;
        let tokens = self.session.tokens().iter().zip(&next);
        Ok(tokens.take_while(|(a, b)| a == b).count())
    }

    /// Answers; returns with the answer up to which token of its prompt a later turn is the same at least.
    fn answer(&mut self, question: &Question, news: &Sender<News>) -> Result<(Ending, usize)> {
        let tell = |what: News| {
            let _ = news.send(what);
        };
        let text = self.render(&question.messages, question.think, true)?;
        let thinking = chat::ends_in_thinking(&text);
        let prompt = self.tokenizer.encode(&text, true)?;
        // A later turn's prompt is the same up to where the answer's own beginning starts.
        let without = self.tokenizer.encode(
            &self.render(&question.messages, question.think, false)?,
            true,
        )?;
        let same = prompt.iter().zip(&without).take_while(|(a, b)| a == b);
        let boundary = same.count();

        let (params, _) = run::sampling(&question.sampling, &self.engine, thinking)?;
        let mut sampler = Sampler::new(params)?;
        let start = Instant::now();
        let (mut told, n) = (0, prompt.len());
        let (begun, last) = self
            .states
            .process(
                &mut self.session,
                &prompt,
                boundary,
                &question.cancel,
                &mut |done, all| {
                    told = done;
                    let time = start.elapsed();
                    tell(News::Prompt(done, all, time));
                    let reused = (n - 1).saturating_sub(all);
                    publish::reading(done, Reading::new(done, reused, time), all);
                },
            )
            .map_err(GenerateError::from)?;
        tell(News::Begun(begun));
        if told == 0 {
            tell(News::Prompt(
                n - begun.reused,
                n - begun.reused,
                start.elapsed(),
            ));
        }
        prompt[..n - 1]
            .iter()
            .for_each(|&token| sampler.accept(token));

        let request = Request {
            prompt: vec![last],
            thinking: Some(thinking),
            end_thinking: question.end_thinking.clone(),
            ..Request::default()
        };
        let first = Instant::now();
        let read = Reading::new(n - begun.reused, begun.reused, start.elapsed());
        let snapshots = self.states.bytes();
        let (bytes, a_token) = (self.session.bytes(), self.session.token_bytes());
        let mut watch = |seen: Seen<'_>| {
            let Seen::Pass {
                speculator,
                session,
                n_tokens,
            } = seen
            else {
                return;
            };
            publish::seen(&seen, snapshots);
            tell(News::Pass(Box::new(Figures {
                n_tokens,
                decode_time: first.elapsed(),
                depth: speculator.map(Speculator::depth),
                stats: speculator.map(Speculator::stats),
                n_past: session.n_past(),
                kv_bytes: session.n_past() * a_token,
                bytes,
                snapshots,
            })));
        };
        let answer = Generator {
            session: &mut self.session,
            tokenizer: &self.tokenizer,
            sampler: &mut sampler,
            constraint: None,
            speculator: self.speculator.as_mut(),
            watch: Some(&mut watch),
        }
        .answer(&request, &question.cancel, &mut |piece| {
            tell(match piece {
                Piece::Reasoning(text) => News::Thinking(text.to_owned()),
                Piece::Text(text) => News::Text(text.to_owned()),
            });
            Ok(())
        })?;
        publish::answered(&answer, read, &self.session);
        self.states.save(&mut self.session)?;
        let ending = Ending {
            tps: answer.decode_tps(),
            n_tokens: answer.tokens.len(),
            n_reasoning: answer.n_reasoning,
            reason: answer.finish_reason,
            text: answer.text,
            reasoning: answer.reasoning,
        };
        Ok((ending, boundary))
    }
}

/// Models near the one in use: GGUF files in its folder.
pub fn models_beside(current: Option<&std::path::Path>) -> Vec<(PathBuf, u64)> {
    let Some(folder) = current.and_then(std::path::Path::parent) else {
        return Vec::new();
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut list: Vec<(PathBuf, u64)> = entries
        .filter_map(|entry| {
            let path = entry.path();
            let named = path.extension().is_some_and(|e| e == "gguf");
            named.then_some(())?;
            Some((path, entry.metadata().ok()?.len()))
        })
        .collect();
    list.sort();
    list
}
