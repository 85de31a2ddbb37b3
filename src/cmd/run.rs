//! The plain command: prompts in, answers out.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use qrun::chat;
use qrun::engine::Engine;
use qrun::generate::{Answer, FinishReason, GenerateError, Generator, Piece, Request};
use qrun::grammar::{Grammar, GrammarFactory};
use qrun::memory::{self, Machine};
use qrun::sampler::{Sampler, SamplerParams, Stage};
use qrun::session::{CancelToken, EvalError, Session};
use qrun::speculate::Speculator;
use qrun::template::{ChatTemplate, RenderOptions, normalize_messages};
use qrun::tokenizer::Tokenizer;
use qrun::vocab;
use serde_json::{Value, json};

use super::{Outcome, UsageError, model};
use crate::cli::{ChatArgs, RunArgs, SamplingArgs};
use crate::live::line::Reading;
use crate::live::publish;
use crate::report;

/// Answers what the arguments ask.
///
/// # Errors
/// When arguments make no sense, the model cannot be loaded or computed, or stdout cannot be written.
pub fn run(args: &RunArgs) -> Result<Outcome> {
    if args.list_devices {
        model::list_devices()?;
        return Ok(Outcome::Done);
    }
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let nothing_asked = args.prompt.is_none() && args.file.is_none() && args.prompts.is_none();
    if terminal && nothing_asked && !args.json && !args.jsonl && !args.raw {
        return super::chat::run(&ChatArgs {
            model: args.model.clone(),
            system_prompt: args.system_prompt.clone(),
            think: args.think,
            no_think: args.no_think,
            sampling: args.sampling.clone(),
            spec: args.spec.clone(),
            resume: None,
            no_save: false,
            no_mouse: false,
            cache_ram: crate::cli::CACHE_RAM,
            cache_disk: 0,
        });
    }
    let mut session_params = model::session_params(&args.model)?;
    let asked = Asked::read(args)?;
    let grammar = grammar(args)?;
    let tools = args
        .tools
        .as_deref()
        .map(|t| json_argument("--tools", t))
        .transpose()?;

    let cancel = CancelToken::default();
    install_interrupt(&cancel)?;
    publish::start(args.model.model.as_deref(), args.model.verbose);
    let mut machine = Machine::new();
    let needs = model::Needs::of(&args.spec);
    let (engine, tokenizer) = model::load(&args.model, &needs)?;
    let template = template(args, &engine)?;
    let grammar_factory = grammar
        .as_ref()
        .map(|_| GrammarFactory::new(&tokenizer))
        .transpose()?;
    if let (Some(factory), Some(grammar)) = (&grammar_factory, &grammar) {
        factory.constraint(grammar).context("reading the grammar")?;
    }
    let (speculation, tuned) =
        model::speculation(&args.spec, &engine, &tokenizer, &mut session_params)?;
    let mut runner = Runner {
        args,
        tokenizer: &tokenizer,
        template,
        tools,
        grammar: grammar_factory.as_ref().zip(grammar.as_ref()),
        session: Session::new(engine.clone(), session_params)?,
        speculator: speculation.map(|params| {
            let mut speculator = Speculator::new(params, tuned);
            speculator.impose(&args.spec.spec_synth_rates);
            speculator
        }),
        cancel,
        engine: &engine,
    };
    let reason = model::draft_head(&engine, runner.speculator.is_some());
    publish::loaded(&engine, &runner.session, reason);
    let outcome = match asked {
        Asked::One(text) => {
            let item = Item {
                messages: messages(args.system_prompt.as_deref(), &text),
                raw: text,
            };
            runner.one(&item)
        }
        Asked::Many(path) => runner.many(&path),
    };
    // Never silently.
    let swapped = machine.as_mut().map_or(0, |machine| {
        machine
            .read()
            .map_or(0, |reading| machine.swap_growth(&reading))
    });
    if swapped >= memory::SWAP_STIRS {
        report::note(&format!(
            "the swap in use grew by {} during this run: memory is short, and it was slower for that",
            report::bytes(swapped as usize)
        ));
    }
    outcome
}

/// Ctrl-C once ends the answer, twice the program. A kill does what Ctrl-C does.
///
/// # Errors
/// When the system refuses the handler.
pub fn install_interrupt(cancel: &CancelToken) -> Result<()> {
    let cancel = cancel.clone();
    ctrlc::set_handler(move || {
        if cancel.is_cancelled() {
            publish::end("interrupted");
            std::process::exit(130);
        }
        cancel.cancel();
    })
    .context("catching Ctrl-C")
}

/// What is to be answered.
enum Asked {
    One(String),
    Many(std::path::PathBuf),
}

impl Asked {
    fn read(args: &RunArgs) -> Result<Self> {
        if let Some(path) = &args.prompts {
            return Ok(Self::Many(path.clone()));
        }
        let mut text = match (&args.prompt, &args.file) {
            (Some(prompt), _) => prompt.clone(),
            (None, Some(path)) => std::fs::read_to_string(path)
                .with_context(|| format!("reading the prompt {}", path.display()))?,
            (None, None) => String::new(),
        };
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            let mut piped = Vec::new();
            stdin
                .lock()
                .read_to_end(&mut piped)
                .context("reading stdin")?;
            let piped = String::from_utf8(piped).context("stdin is not UTF-8 text")?;
            if !piped.is_empty() && !text.is_empty() && !args.raw {
                text.push_str("\n\n");
            }
            text.push_str(&piped);
        }
        if text.is_empty() {
            return Err(UsageError(
                "no prompt: give one with -p TEXT or -f FILE, or pipe it in (see --help)"
                    .to_owned(),
            )
            .into());
        }
        Ok(Self::One(text))
    }
}

/// One thing to answer: its text, and the conversation it stands for.
struct Item {
    raw: String,
    messages: Value,
}

fn messages(system: Option<&str>, user: &str) -> Value {
    let mut list = Vec::new();
    if let Some(system) = system {
        list.push(json!({"role": "system", "content": system}));
    }
    list.push(json!({"role": "user", "content": user}));
    Value::Array(list)
}

/// A JSON argument given as text, or as the name of a file that holds it.
fn json_argument(flag: &str, text: &str) -> Result<Value> {
    let trimmed = text.trim_start();
    let source = if trimmed.starts_with(['{', '[']) || matches!(trimmed, "true" | "false") {
        text.to_owned()
    } else {
        std::fs::read_to_string(text).with_context(|| format!("{flag}: reading {text}"))?
    };
    serde_json::from_str(&source)
        .map_err(|e| UsageError(format!("{flag}: not valid JSON: {e}")).into())
}

fn grammar(args: &RunArgs) -> Result<Option<Grammar>> {
    if let Some(text) = &args.json_schema {
        return Ok(Some(Grammar::JsonSchema(json_argument(
            "--json-schema",
            text,
        )?)));
    }
    let Some(text) = &args.grammar else {
        return Ok(None);
    };
    // A Lark grammar has a rule; anything without a colon is a file's name.
    let source = if text.contains(':') && !Path::new(text).is_file() {
        text.clone()
    } else {
        std::fs::read_to_string(text).with_context(|| format!("--grammar: reading {text}"))?
    };
    Ok(Some(Grammar::Lark(source)))
}

fn template(args: &RunArgs, engine: &Engine) -> Result<Option<ChatTemplate>> {
    if args.raw {
        return Ok(None);
    }
    let (source, place) = match &args.chat_template_file {
        Some(path) => {
            let source = std::fs::read_to_string(path)
                .with_context(|| format!("reading the chat template {}", path.display()))?;
            (Some(source), path.display().to_string())
        }
        None => {
            let file = engine.files().main();
            (
                vocab::chat_template(file),
                file.path().display().to_string(),
            )
        }
    };
    if source.is_none() {
        report::note(&format!(
            "{place} has no chat template: going on from the text as with --raw"
        ));
    }
    source
        .map(|source| {
            ChatTemplate::new(&source).with_context(|| format!("{place}: its chat template"))
        })
        .transpose()
}

/// What the sampling is, and where it comes from.
///
/// # Errors
/// When a value makes no sense.
pub fn sampling(
    args: &SamplingArgs,
    engine: &Engine,
    thinking: bool,
) -> Result<(SamplerParams, &'static str)> {
    let file = vocab::recommended_sampling(engine.files().main());
    let (mut params, mut source) = match file {
        Some(params) => (params, "model file"),
        None => (vocab::qwen_sampling(thinking), "Qwen's recommendation"),
    };
    let before = params.clone();
    fn set<T: Copy>(target: &mut T, given: Option<T>) {
        if let Some(value) = given {
            *target = value;
        }
    }
    set(&mut params.temp, args.temp);
    set(&mut params.top_k, args.top_k);
    set(&mut params.top_p, args.top_p);
    set(&mut params.min_p, args.min_p);
    set(&mut params.typical_p, args.typical_p);
    set(&mut params.repeat_last_n, args.repeat_last_n);
    set(&mut params.repeat_penalty, args.repeat_penalty);
    set(&mut params.presence_penalty, args.presence_penalty);
    set(&mut params.frequency_penalty, args.frequency_penalty);
    params.logit_bias.clone_from(&args.logit_bias);
    if let Some(list) = &args.samplers {
        let stages = list.split(';').map(str::trim).filter(|s| !s.is_empty());
        params.samplers = stages
            .map(str::parse::<Stage>)
            .collect::<Result<_>>()
            .map_err(|e| UsageError(format!("--samplers: {e}")))?;
    }
    if args.greedy || args.temp.is_some_and(|t| t <= 0.0) {
        // Greedy means the best token of the plain distribution: penalties only where they were asked for.
        params.temp = 0.0;
        if args.presence_penalty.is_none() {
            params.presence_penalty = 0.0;
        }
        if !params.samplers.contains(&Stage::Temperature) {
            params.samplers.push(Stage::Temperature);
        }
    }
    if params != before {
        source = "flags";
    }
    params.seed = args.seed.unwrap_or_else(random_seed);
    params.validate().map_err(|e| UsageError(e.to_string()))?;
    Ok((params, source))
}

fn random_seed() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _};
    let state = std::collections::hash_map::RandomState::new();
    // 53 bits, so that readers of JSON get it back unchanged.
    state.build_hasher().finish() >> 11
}

struct Runner<'a> {
    args: &'a RunArgs,
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
    tools: Option<Value>,
    grammar: Option<(&'a GrammarFactory, &'a Grammar)>,
    session: Session,
    speculator: Option<Speculator>,
    cancel: CancelToken,
    engine: &'a Engine,
}

/// An answer with what made it.
struct Done {
    answer: Answer,
    prompt: Vec<u32>,
    sampler: SamplerParams,
    source: &'static str,
    complete: Option<bool>,
}

impl Runner<'_> {
    fn answer(
        &mut self,
        item: &Item,
        sink: &mut dyn FnMut(Piece<'_>) -> std::io::Result<()>,
    ) -> Result<Done> {
        let (text, thinking) = match &self.template {
            None => (item.raw.clone(), None),
            Some(template) => {
                let enable_thinking = match (self.args.think, self.args.no_think) {
                    (true, _) => Some(true),
                    (_, true) => Some(false),
                    _ if self.args.reasoning_budget == Some(0) => Some(false),
                    _ => None,
                };
                let name = |id: Option<u32>| {
                    id.map(|id| {
                        String::from_utf8_lossy(self.tokenizer.token_bytes(id)).into_owned()
                    })
                    .unwrap_or_default()
                };
                let text = template
                    .render(&RenderOptions {
                        messages: &normalize_messages(&item.messages),
                        tools: self.tools.as_ref(),
                        add_generation_prompt: true,
                        enable_thinking,
                        bos_token: &name(self.tokenizer.bos()),
                        eos_token: &name(self.tokenizer.eos()),
                    })
                    .context("rendering the chat template")?;
                let thinking = chat::ends_in_thinking(&text);
                (text, Some(thinking))
            }
        };
        let parse_special = self.template.is_some() || !self.args.no_parse_special;
        let mut prompt = self.tokenizer.encode(&text, parse_special)?;
        if self.tokenizer.add_bos()
            && let Some(bos) = self.tokenizer.bos()
            && prompt.first() != Some(&bos)
        {
            prompt.insert(0, bos);
        }
        let (params, source) = sampling(&self.args.sampling, self.engine, thinking == Some(true))?;
        let mut sampler = Sampler::new(params.clone())?;
        let mut constraint = match self.grammar {
            Some((factory, grammar)) => Some(factory.constraint(grammar)?),
            None => None,
        };
        let request = Request {
            prompt,
            n_predict: self.args.n_predict,
            stop: self.args.stop.clone(),
            ignore_eos: self.args.ignore_eos,
            thinking,
            reasoning_budget: self.args.reasoning_budget,
            ..Request::default()
        };
        if self.session.n_past() > 0 {
            self.session.clear()?;
        }
        let answer = Generator {
            session: &mut self.session,
            tokenizer: self.tokenizer,
            sampler: &mut sampler,
            constraint: constraint.as_mut(),
            speculator: self.speculator.as_mut(),
            watch: Some(&mut |seen| publish::seen(&seen, 0)),
        }
        .answer(&request, &self.cancel, sink)?;
        publish::answered(&answer, Reading::of(&answer), &self.session);
        let complete = constraint.as_mut().map(|c| c.is_complete()).transpose()?;
        if complete == Some(false) {
            report::note("the answer was cut before its grammar was complete (raise -n)");
        }
        Ok(Done {
            answer,
            prompt: request.prompt,
            sampler: params,
            source,
            complete,
        })
    }

    /// Answers one prompt.
    fn one(&mut self, item: &Item) -> Result<Outcome> {
        let args = self.args;
        let mut shown = Shown::new(args);
        let done = match self.answer(item, &mut |piece| shown.piece(piece)) {
            Ok(done) => done,
            Err(error) if is_cancelled(&error) => return Ok(Outcome::Interrupted),
            Err(error) => {
                shown.end_line()?;
                return Err(error);
            }
        };
        if args.json {
            let object = self.object(&done);
            report::out(&format!("{}\n", serde_json::to_string_pretty(&object)?))?;
        } else if args.jsonl {
            let mut event = json!({"type": "done"});
            if let (Value::Object(event), Value::Object(object)) = (&mut event, self.object(&done))
            {
                event.extend(object);
            }
            report::out(&format!("{event}\n"))?;
        } else {
            shown.end_line()?;
        }
        if args.stats {
            report::note(&self.stats(&done));
        }
        Ok(match done.answer.finish_reason {
            FinishReason::Cancelled => Outcome::Interrupted,
            _ => Outcome::Done,
        })
    }

    /// Answers many prompts in order, a JSON line each.
    fn many(&mut self, path: &Path) -> Result<Outcome> {
        let args = self.args;
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("reading the prompts {}", path.display()))?;
        let mut items = Vec::new();
        for (i, line) in text
            .lines()
            .enumerate()
            .filter(|(_, l)| !l.trim().is_empty())
        {
            let item = parse_item(line, args.system_prompt.as_deref());
            items.push(item.with_context(|| format!("{}: line {}", path.display(), i + 1))?);
        }
        let (mut output, skip) = Output::open(args.output.as_deref(), args.resume)?;
        for (index, item) in items.iter().enumerate().skip(skip) {
            if self.cancel.is_cancelled() {
                return Ok(Outcome::Interrupted);
            }
            let line = match self.answer(item, &mut |_| Ok(())) {
                // An answer that was cut by Ctrl-C is not an answer: --resume does it again.
                Ok(done) if done.answer.finish_reason == FinishReason::Cancelled => {
                    return Ok(Outcome::Interrupted);
                }
                Ok(done) => {
                    if args.stats {
                        report::note(&self.stats(&done));
                    }
                    let mut line = json!({"index": index});
                    if let (Value::Object(line), Value::Object(object)) =
                        (&mut line, self.object(&done))
                    {
                        line.extend(object);
                    }
                    line
                }
                Err(error) if is_cancelled(&error) => return Ok(Outcome::Interrupted),
                Err(error) if is_of_this_prompt(&error) => {
                    json!({"index": index, "error": report::error_line(&error)})
                }
                Err(error) => return Err(error),
            };
            output.line(&line)?;
        }
        Ok(Outcome::Done)
    }

    fn object(&self, done: &Done) -> Value {
        let answer = &done.answer;
        let (text, calls) = match self.template {
            Some(_) => chat::take_tool_calls(&answer.text, self.tools.as_ref()),
            None => (answer.text.clone(), Vec::new()),
        };
        let finish_reason = match answer.finish_reason {
            FinishReason::Stop if !calls.is_empty() => json!("tool_calls"),
            reason => json!(reason),
        };
        let ms = |time: std::time::Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let round = |v: f64| (v * 100.0).round() / 100.0;
        let mut object = json!({
            "text": text,
            "reasoning": answer.reasoning,
            "tool_calls": calls,
            "finish_reason": finish_reason,
            "prompt_tokens": done.prompt,
            "output_tokens": answer.tokens,
            "counts": {
                "prompt": answer.n_prompt,
                "output": answer.tokens.len(),
                "reasoning": answer.n_reasoning,
            },
            "timings": {
                "load_ms": ms(self.engine.load_time()),
                "prompt_ms": ms(answer.prompt_time),
                "prompt_tps": round(answer.prompt_tps()),
                "decode_ms": ms(answer.decode_time),
                "decode_tps": round(answer.decode_tps()),
            },
            "sampler": done.sampler,
            "sampler_source": done.source,
            "speculation": self.speculation(answer),
            "model": self.engine.files().main().path().display().to_string(),
        });
        if let (Some(complete), Value::Object(object)) = (done.complete, &mut object) {
            object.insert("grammar_complete".to_owned(), json!(complete));
        }
        object
    }

    /// What speculation did, or why there was none.
    fn speculation(&self, answer: &Answer) -> Value {
        let Some(stats) = &answer.speculation else {
            let reason = model::draft_head(self.engine, false);
            return json!({"enabled": false, "reason": reason});
        };
        let mut object = json!({
            "enabled": true,
            "acceptance": stats.acceptance(),
            "acceptance_at": stats.acceptance_at(),
            "tokens_per_pass": stats.tokens_per_pass(),
            "speedup": stats.speedup(),
            "draft_vocab": self.session.params().draft_vocab.map(|vocab| vocab.n_first),
        });
        if let (Value::Object(object), Value::Object(counts)) = (&mut object, json!(stats)) {
            object.extend(counts);
        }
        object
    }

    fn stats(&self, done: &Done) -> String {
        let answer = &done.answer;
        let sampler = &done.sampler;
        let how = if sampler.temp <= 0.0 {
            "greedy".to_owned()
        } else {
            format!(
                "temp {} top-k {} top-p {} seed {}",
                sampler.temp, sampler.top_k, sampler.top_p, sampler.seed
            )
        };
        let used = self.session.bytes();
        let weights = self.engine.weight_bytes();
        format!(
            "prompt {} tokens at {:.1} tok/s | answer {} tokens at {:.1} tok/s | load {} ms | {} ({}) | \
             weights {} mapped + {} copied, KV {}, state {}, compute {}{}\n{}",
            answer.n_prompt,
            answer.prompt_tps(),
            answer.tokens.len(),
            answer.decode_tps(),
            self.engine.load_time().as_millis(),
            how,
            done.source,
            report::bytes(weights.mapped),
            report::bytes(weights.copied + weights.repacked),
            report::bytes(used.kv),
            report::bytes(used.state + used.rollback),
            report::bytes(used.compute),
            ggml_metal::peak_memory()
                .map_or(String::new(), |n| format!(", peak {}", report::bytes(n))),
            self.spec_line(answer),
        )
    }

    /// One line on speculation.
    fn spec_line(&self, answer: &Answer) -> String {
        let Some(stats) = answer.speculation.as_ref() else {
            let reason = model::draft_head(self.engine, false);
            return format!("speculation off: {reason}");
        };
        if self
            .speculator
            .as_ref()
            .is_some_and(Speculator::head_is_damaged)
        {
            return "speculation off: the MTP head ranked the first tokens at random, it must be damaged".to_owned();
        }
        if stats.rounds == 0 {
            return "speculation: nothing was guessed, plain decoding was faster".to_owned();
        }
        let at: Vec<String> = stats
            .acceptance_at()
            .iter()
            .map(|a| format!("{a:.2}"))
            .collect();
        let share = |s: f64| 100.0 * s / stats.seconds();
        format!(
            "speculation: {} of {} guesses right ({:.0} %), by place {}; {:.2} tokens a pass | draft {:.0} %, verify \
             {:.0} %, rollback {:.0} %, sampling {:.0} %, other {:.0} % of the time{}",
            stats.accepted,
            stats.drafted,
            100.0 * stats.acceptance(),
            at.join(" "),
            stats.tokens_per_pass(),
            share(stats.draft_s),
            share(stats.verify_s),
            share(stats.rollback_s),
            share(stats.sampling_s),
            share(stats.other_s),
            stats
                .speedup()
                .map_or(String::new(), |x| format!(" | {x:.2} times plain decoding")),
        )
    }
}

fn is_cancelled(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<GenerateError>(),
        Some(GenerateError::Eval(EvalError::Cancelled))
    )
}

/// True where the next prompt may well work.
fn is_of_this_prompt(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<GenerateError>(),
        Some(GenerateError::Eval(EvalError::ContextFull { .. }) | GenerateError::EmptyPrompt)
    )
}

/// A line of the prompts' file: plain text, or an object with `prompt` or `messages`, and perhaps `system`.
fn parse_item(line: &str, system: Option<&str>) -> Result<Item> {
    if !line.trim_start().starts_with('{') {
        return Ok(Item {
            messages: messages(system, line),
            raw: line.to_owned(),
        });
    }
    let object: BTreeMap<String, Value> = serde_json::from_str(line).context("not valid JSON")?;
    let text = |key: &str| object.get(key).and_then(Value::as_str);
    let system = text("system").or(system);
    match (object.get("messages"), text("prompt")) {
        (Some(list @ Value::Array(_)), _) => Ok(Item {
            messages: list.clone(),
            raw: String::new(),
        }),
        (_, Some(prompt)) => Ok(Item {
            messages: messages(system, prompt),
            raw: prompt.to_owned(),
        }),
        _ => bail!("expected `prompt` (text) or `messages` (a list)"),
    }
}

/// Where the lines of many answers go.
enum Output {
    Stdout,
    File(std::fs::File, std::path::PathBuf),
}

impl Output {
    /// Opens the output, and counts the answers that are already in it when the work is resumed. A last line that
    /// was cut off is taken away.
    fn open(path: Option<&Path>, resume: bool) -> Result<(Self, usize)> {
        let Some(path) = path else {
            return Ok((Self::Stdout, 0));
        };
        let opening = || format!("opening {}", path.display());
        let mut done = 0;
        if resume && path.exists() {
            // A device or a pipe may have no end.
            if !std::fs::metadata(path).with_context(opening)?.is_file() {
                bail!(
                    "{}: not a regular file, so --resume cannot read what it holds",
                    path.display()
                );
            }
            let text = std::fs::read(path).with_context(opening)?;
            let whole = text
                .iter()
                .rposition(|&b| b == b'\n')
                .map_or(0, |at| at + 1);
            done = text[..whole].iter().filter(|&&b| b == b'\n').count();
            let file = std::fs::OpenOptions::new()
                .write(true)
                .open(path)
                .with_context(opening)?;
            file.set_len(whole as u64).with_context(opening)?;
        }
        let mut options = std::fs::OpenOptions::new();
        options.create(true);
        if resume {
            options.append(true);
        } else {
            options.write(true).truncate(true);
        }
        let file = options.open(path).with_context(opening)?;
        Ok((Self::File(file, path.to_owned()), done))
    }

    fn line(&mut self, value: &Value) -> Result<()> {
        let line = format!("{value}\n");
        match self {
            Self::Stdout => report::out(&line)?,
            Self::File(file, path) => file
                .write_all(line.as_bytes())
                .with_context(|| format!("writing {}", path.display()))?,
        }
        Ok(())
    }
}

/// Shows an answer as it comes.
struct Shown<'a> {
    args: &'a RunArgs,
    colour: bool,
    in_reasoning: bool,
    ends_in_newline: bool,
    start: Instant,
}

impl<'a> Shown<'a> {
    fn new(args: &'a RunArgs) -> Self {
        Self {
            args,
            colour: report::has_colour(),
            in_reasoning: false,
            ends_in_newline: true,
            start: Instant::now(),
        }
    }

    fn piece(&mut self, piece: Piece<'_>) -> std::io::Result<()> {
        if self.args.json {
            return Ok(());
        }
        if self.args.jsonl {
            let (kind, text) = match piece {
                Piece::Reasoning(text) => ("reasoning", text),
                Piece::Text(text) => ("text", text),
            };
            let ms = self.start.elapsed().as_millis() as u64;
            return report::out(&format!(
                "{}\n",
                json!({"type": kind, "text": text, "ms": ms})
            ));
        }
        match piece {
            Piece::Reasoning(text) if self.args.show_thinking => {
                let (dim, plain) = if self.colour {
                    ("\x1b[2m", "\x1b[0m")
                } else {
                    ("", "")
                };
                report::note_part(&format!("{dim}{text}{plain}"));
                self.in_reasoning = true;
            }
            Piece::Reasoning(_) => {}
            Piece::Text(text) => {
                if std::mem::take(&mut self.in_reasoning) {
                    report::note("\n");
                }
                report::out(text)?;
                self.ends_in_newline = text.ends_with('\n');
            }
        }
        Ok(())
    }

    /// A terminal's prompt should not stand behind the answer.
    fn end_line(&mut self) -> std::io::Result<()> {
        if self.args.json || self.args.jsonl || self.ends_in_newline {
            return Ok(());
        }
        report::out("\n")
    }
}
