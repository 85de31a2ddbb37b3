//! `qrun chat`: a conversation in the terminal. The model works on a thread of its own ([`worker`]) and tells what
//! happens; this side keeps the conversation and the view, and carries out what the interface asks.

mod repl;
mod worker;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail};
use qrun::conversation::{self, Conversation};
use qrun::generate::FinishReason;
use qrun::session::CancelToken;
use tui::{
    Action, Attachment, ExportFormat, Level, Message, ModelEntry, Notice, Pacer, Phase, Prompt,
    Reuse, Role, Screen, SessionEntry, Speculation, Theme, Thinking, Ui, View, terminal,
};

use super::{Outcome, model};
use crate::cli::{ChatArgs, Spec};
use crate::live::machine::Machine;
use crate::live::{line, publish};
use worker::{Figures, News, Order, Question};

/// A conversation on a terminal, or line by line where there is none.
///
/// # Errors
/// When no conversation of that name is stored, the terminal refuses, or the model cannot be loaded.
pub fn run(args: &ChatArgs) -> Result<Outcome> {
    use std::io::IsTerminal as _;
    let dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
    if dumb || !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return repl::run(args);
    }
    let mut args = args.clone();
    args.model.model = Some(model::path_quietly(args.model.model.as_deref())?);
    let mut chat = Chat::new(args)?;
    // In raw mode Ctrl-C is a key; a kill still has to give the terminal back.
    ctrlc::set_handler(|| {
        terminal::restore();
        publish::end("interrupted");
        std::process::exit(143);
    })
    .context("catching a kill")?;
    let mut screen = Screen::enter(!chat.args.no_mouse).context("taking the terminal")?;
    let mut ui = Ui::new(theme(), chat.questions());
    let mut clipboard = terminal::Clipboard::default();
    let mut pacer = Pacer::default();
    pacer.changed();
    let mut warm = false;
    loop {
        if pacer.due(Instant::now()) {
            screen.draw(|frame| tui::draw(frame, &chat.view, &mut ui))?;
            if !std::mem::replace(&mut warm, true) {
                thread::spawn(tui::warm_up);
            }
        }
        let wait = pacer.wait(Instant::now()).unwrap_or(terminal::FRAME);
        if let Some(event) = terminal::next_event(wait)? {
            pacer.changed();
            for action in ui.handle(&event, &chat.view) {
                match action {
                    Action::Quit => {
                        chat.cancel.cancel();
                        drop(screen);
                        chat.leave();
                        return Ok(Outcome::Done);
                    }
                    Action::Suspend => screen.suspend()?,
                    Action::Redraw => screen.clear()?,
                    Action::Copy(text) => clipboard.copy(&text)?,
                    Action::ExternalEditor(text) => match screen.outside(|| edit(&text))? {
                        Ok(text) => ui.set_input(&text),
                        Err(error) => chat.say(Level::Error, &crate::report::error_line(&error)),
                    },
                    other => {
                        if let Err(error) = chat.act(other) {
                            chat.say(Level::Error, &crate::report::error_line(&error));
                        }
                    }
                }
            }
        }
        if chat.hear() {
            pacer.changed();
        }
    }
}

/// The colours that suit this terminal.
pub fn theme() -> Theme {
    let variable = |name: &str| std::env::var(name).ok();
    Theme::detect(
        variable("NO_COLOR").as_deref(),
        variable("TERM").as_deref(),
        variable("COLORFGBG").as_deref(),
    )
}

/// Lets the user's editor change a text.
fn edit(text: &str) -> Result<String> {
    let editor = ["VISUAL", "EDITOR"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
        .unwrap_or_else(|| "vi".to_owned());
    let file = tempfile::Builder::new()
        .prefix("qrun-")
        .suffix(".md")
        .tempfile()
        .context("making a file for the editor")?;
    std::fs::write(file.path(), text).context("writing the editor's file")?;
    let mut words = editor.split_whitespace();
    let program = words.next().unwrap_or("vi");
    let status = std::process::Command::new(program)
        .args(words)
        .arg(file.path())
        .status()
        .with_context(|| format!("starting the editor `{editor}` (set EDITOR to another)"))?;
    if !status.success() {
        bail!("the editor `{editor}` ended with {status}; the text stays as it was");
    }
    let text = std::fs::read_to_string(file.path()).context("reading the editor's file")?;
    Ok(text.trim_end().to_owned())
}

/// What both kinds of chat begin with.
struct Started {
    /// Where conversations are kept; none with `--no-save`.
    folder: Option<PathBuf>,
    /// The one to go on with, or an empty one.
    conversation: Conversation,
    worker: Worker,
}

/// The model's thread.
struct Worker {
    orders: Sender<Order>,
    news: Receiver<News>,
}

/// How long leaving waits for a state that is being written.
const LEAVE: Duration = Duration::from_secs(10);

impl Worker {
    fn order(&self, order: Order) -> Result<()> {
        let sent = self.orders.send(order);
        sent.map_err(|_| anyhow::anyhow!("the model's thread has ended; start qrun again"))
    }

    /// Lets the thread finish what it has to do; what goes wrong is said.
    fn finish(self) {
        drop(self.orders);
        let end = Instant::now() + LEAVE;
        while let Ok(news) = self
            .news
            .recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            if let News::Notice(text) = news {
                crate::report::note(&text);
            }
        }
    }
}

impl Started {
    /// Finds the conversation that the arguments name, and starts the model's thread.
    fn new(args: &ChatArgs) -> Result<Self> {
        let folder = (!args.no_save).then(conversation::folder).transpose()?;
        let mut conversation = match (&args.resume, &folder) {
            (Some(name), Some(folder)) => {
                let name = match name.as_str() {
                    "" => match conversation::list(folder)?.first() {
                        Some(newest) => newest.name.clone(),
                        None => bail!("no conversation is stored yet"),
                    },
                    name => name.to_owned(),
                };
                Conversation::open(&conversation::path_of(folder, &name)?)?
            }
            _ => Conversation::default(),
        };
        if let Some(system) = &args.system_prompt {
            conversation.system.clone_from(system);
        }
        publish::start(args.model.model.as_deref(), args.model.verbose);
        let (orders, orders_in) = channel();
        let (news_out, news) = channel();
        let args = args.clone();
        thread::Builder::new()
            .name("model".to_owned())
            .spawn(move || worker::work(&orders_in, &news_out, &args))
            .context("starting the model's thread")?;
        Ok(Self {
            folder,
            conversation,
            worker: Worker { orders, news },
        })
    }
}

/// The conversation and everything around it.
struct Chat {
    args: ChatArgs,
    view: View,
    conversation: Conversation,
    /// Where conversations are kept; none with `--no-save`.
    folder: Option<PathBuf>,
    worker: Worker,
    cancel: CancelToken,
    end_thinking: CancelToken,
    think: Option<bool>,
    /// Texts of the attachments in the view.
    attached: Vec<(String, String)>,
    next_id: u64,
    /// A message waits for the model to be loaded.
    queued: bool,
    ready: bool,
    /// The beginning of the answer was last kept then, and had so many bytes.
    kept: (Instant, usize),
    first_minute: Vec<f32>,
    slot: (Instant, usize, Duration),
    machine: Machine,
    measured: Instant,
    /// What the conversation holds in memory.
    parts: line::Parts,
}

/// How often the beginning of an answer is kept, at most.
const KEEP_EVERY: Duration = Duration::from_millis(700);
/// Time that one point of the speed's history stands for.
const SLOT: Duration = Duration::from_millis(500);
/// Points of the speed's history.
const MAX_SLOTS: usize = 240;
/// Larger files are not for a conversation.
const MAX_ATTACHMENT: u64 = 1 << 20;

impl Chat {
    fn new(args: ChatArgs) -> Result<Self> {
        let Started {
            folder,
            conversation,
            worker,
        } = Started::new(&args)?;
        let now = Instant::now();
        let mut chat = Self {
            think: match (args.think, args.no_think) {
                (true, _) => Some(true),
                (_, true) => Some(false),
                _ => None,
            },
            args,
            view: View::default(),
            conversation,
            folder,
            worker,
            cancel: CancelToken::default(),
            end_thinking: CancelToken::default(),
            attached: Vec::new(),
            next_id: 1,
            queued: false,
            ready: false,
            kept: (now, 0),
            first_minute: Vec::new(),
            slot: (now, 0, Duration::ZERO),
            machine: Machine::new(),
            measured: now,
            parts: line::Parts::default(),
        };
        chat.view.phase = Phase::Loading;
        chat.view.model.loading = Some(0.0);
        chat.view.model.name = chat.file_name();
        chat.show_conversation();
        chat.show_settings();
        Ok(chat)
    }

    fn file_name(&self) -> String {
        let path = self.args.model.model.as_deref();
        path.and_then(|p| p.file_stem())
            .map_or_else(String::new, |n| n.to_string_lossy().into_owned())
    }

    /// What the user wrote so far, for the editor's history.
    fn questions(&self) -> Vec<String> {
        let of_user = self
            .conversation
            .messages
            .iter()
            .filter(|m| m.role == "user");
        of_user.map(|m| m.content.clone()).collect()
    }

    fn say(&mut self, level: Level, text: &str) {
        self.view.notices.push(Notice {
            level,
            text: text.to_owned(),
        });
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Fills the view from the conversation.
    fn show_conversation(&mut self) {
        self.view.session = self.conversation.name();
        self.view.messages.clear();
        for stored in self.conversation.messages.clone() {
            let role = if stored.role == "user" {
                Role::User
            } else {
                Role::Assistant
            };
            let mut message = Message::new(self.id(), role, stored.content);
            if !stored.reasoning.is_empty() {
                message.thinking = Some(Thinking {
                    text: stored.reasoning,
                    tokens: 0,
                    done: true,
                });
            }
            if stored.partial {
                message.note = Some("not finished".to_owned());
            }
            self.view.messages.push(message);
        }
    }

    fn show_settings(&mut self) {
        let s = &self.args.sampling;
        let number = |v: Option<f32>| v.map(|v| v.to_string());
        let whole = |v: Option<i32>| v.map(|v| v.to_string());
        let rows = [
            ("temp", number(s.temp)),
            ("top-k", whole(s.top_k)),
            ("top-p", number(s.top_p)),
            ("min-p", number(s.min_p)),
            ("typical-p", number(s.typical_p)),
            ("repeat-penalty", number(s.repeat_penalty)),
            ("repeat-last-n", whole(s.repeat_last_n)),
            ("presence-penalty", number(s.presence_penalty)),
            ("frequency-penalty", number(s.frequency_penalty)),
            ("seed", s.seed.map(|v| v.to_string())),
        ];
        let of_model = || "the model's".to_owned();
        self.view.settings.samplers = rows
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.unwrap_or_else(of_model)))
            .collect();
        self.view.settings.think = self.think == Some(true);
        self.view.settings.system = self.conversation.system.clone();
        self.view.settings.spec = match self.args.spec.spec {
            Spec::Auto => "auto".to_owned(),
            Spec::Fixed(0) => "off".to_owned(),
            Spec::Fixed(n) => n.to_string(),
        };
    }

    /// Carries out what the interface asks.
    fn act(&mut self, action: Action) -> Result<()> {
        match action {
            Action::Send(text) => self.send(&text)?,
            Action::Stop => self.cancel.cancel(),
            Action::EndThinking => self.end_thinking.cancel(),
            Action::Regenerate => {
                if self.view.is_busy() {
                    bail!("the answer is still being written; stop it first");
                }
                let is_answer = |m: &conversation::Message| m.role == "assistant";
                if self.conversation.messages.last().is_some_and(is_answer) {
                    self.conversation.messages.pop();
                }
                if self.conversation.messages.is_empty() {
                    bail!("there is no question to answer again");
                }
                self.conversation.write()?;
                self.show_conversation();
                self.ask()?;
            }
            Action::Edit { index, text } => {
                if self.view.is_busy() {
                    bail!("the answer is still being written; stop it first");
                }
                let of_user = |m: &conversation::Message| m.role == "user";
                if !self.conversation.messages.get(index).is_some_and(of_user) {
                    bail!("there is no message of yours to edit");
                }
                self.conversation.messages.truncate(index + 1);
                self.conversation.messages[index].content = text;
                self.conversation.write()?;
                self.show_conversation();
                self.ask()?;
            }
            Action::SetModel(path) => {
                self.args.model.model = Some(PathBuf::from(path));
                self.reload()?;
            }
            Action::Ctx(n) => {
                self.args.model.ctx_size = n as usize;
                self.reload()?;
            }
            Action::System(text) => {
                self.conversation.system = text;
                self.conversation.write()?;
            }
            Action::Think(think) => self.think = Some(think),
            Action::SetSampler { sampler, value } => self.set_sampler(sampler, value),
            Action::Seed(seed) => self.args.sampling.seed = Some(seed),
            Action::Spec(text) => {
                let spec = crate::cli::parse_spec(&text)
                    .map_err(|e| anyhow::anyhow!("/spec {text}: {e}"))?;
                self.args.spec.spec = spec;
                self.worker.order(Order::Spec(spec))?;
            }
            Action::Save(name) => {
                let folder = self
                    .folder
                    .clone()
                    .context("nothing is kept with --no-save")?;
                match name {
                    Some(name) => self.conversation.keep_as(&folder, &name)?,
                    None if self.conversation.name().is_empty() => {
                        self.conversation.keep(&folder)?;
                    }
                    None => self.conversation.write()?,
                }
                self.view.session = self.conversation.name();
                let text = format!("kept as {}", self.view.session);
                self.say(Level::Info, &text);
            }
            Action::Load(name) => {
                let folder = self
                    .folder
                    .clone()
                    .context("nothing is kept with --no-save")?;
                let path = conversation::path_of(&folder, &name)?;
                let loaded = Conversation::open(&path)?;
                self.cancel.cancel();
                self.conversation = loaded;
                self.show_conversation();
            }
            Action::Export { format, path } => self.export(format, path)?,
            Action::Attach(path) => self.attach(&path)?,
            Action::Detach => {
                self.attached.clear();
                self.view.attachments.clear();
            }
            Action::Clear => {
                self.cancel.cancel();
                let system = std::mem::take(&mut self.conversation.system);
                self.conversation = Conversation::default();
                self.conversation.system = system;
                self.show_conversation();
            }
            Action::Stats => self.show_stats(),
            Action::ListSessions => {
                let folder = self
                    .folder
                    .clone()
                    .context("nothing is kept with --no-save")?;
                self.view.sessions = conversation::list(&folder)?
                    .into_iter()
                    .map(|s| SessionEntry {
                        name: s.name,
                        title: s.title,
                        when: ago(s.written),
                        messages: s.n_messages,
                    })
                    .collect();
            }
            Action::ListModels => {
                let current = self.args.model.model.as_deref();
                self.view.models = worker::models_beside(current)
                    .into_iter()
                    .map(|(path, bytes)| ModelEntry {
                        name: path
                            .file_stem()
                            .map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
                        path: path.display().to_string(),
                        bytes,
                    })
                    .collect();
            }
            // The loop carries these out: they concern the terminal.
            Action::Copy(_)
            | Action::ExternalEditor(_)
            | Action::Redraw
            | Action::Suspend
            | Action::Quit => {}
        }
        self.show_settings();
        Ok(())
    }

    /// Waits for what is written to the disk; an answer or a load that goes on is not waited for.
    fn leave(self) {
        if self.args.cache_disk > 0 && !self.view.is_busy() && self.ready {
            self.worker.finish();
        }
    }

    fn reload(&mut self) -> Result<()> {
        self.cancel.cancel();
        self.ready = false;
        self.view.phase = Phase::Loading;
        self.view.model.loading = Some(0.0);
        self.view.model.name = self.file_name();
        self.worker.order(Order::Load(self.args.model.clone()))
    }

    fn set_sampler(&mut self, sampler: tui::Sampler, value: f64) {
        use tui::Sampler as S;
        let s = &mut self.args.sampling;
        let (number, whole) = (Some(value as f32), Some(value as i32));
        match sampler {
            S::Temp => {
                s.temp = number;
                s.greedy = false;
            }
            S::TopK => s.top_k = whole,
            S::TopP => s.top_p = number,
            S::MinP => s.min_p = number,
            S::TypicalP => s.typical_p = number,
            S::RepeatPenalty => s.repeat_penalty = number,
            S::RepeatLastN => s.repeat_last_n = whole,
            S::PresencePenalty => s.presence_penalty = number,
            S::FrequencyPenalty => s.frequency_penalty = number,
        }
    }

    fn send(&mut self, text: &str) -> Result<()> {
        let mut content = text.to_owned();
        for (name, text) in &self.attached {
            content.push_str(&format!("\n\n{name}:\n```\n{}\n```", text.trim_end()));
        }
        let names = self.attached.drain(..).map(|(name, _)| name).collect();
        self.view.attachments.clear();
        let stored = conversation::Message {
            role: "user".to_owned(),
            content,
            reasoning: String::new(),
            partial: false,
        };
        let mut message = Message::new(self.id(), Role::User, text);
        message.attachments = names;
        self.view.messages.push(message);
        self.conversation.messages.push(stored.clone());
        match &self.folder {
            Some(folder) if self.conversation.name().is_empty() => {
                self.conversation.keep(folder)?;
                self.view.session = self.conversation.name();
            }
            _ => self.conversation.append(&stored)?,
        }
        self.ask()
    }

    /// Has the conversation answered, or as soon as the model is there.
    fn ask(&mut self) -> Result<()> {
        if !self.ready {
            self.queued = true;
            return Ok(());
        }
        self.queued = false;
        self.cancel = CancelToken::default();
        self.end_thinking = CancelToken::default();
        let question = Question {
            messages: self.conversation.as_messages(),
            think: self.think,
            sampling: self.args.sampling.clone(),
            cancel: self.cancel.clone(),
            end_thinking: self.end_thinking.clone(),
        };
        let mut message = Message::new(self.id(), Role::Assistant, "");
        message.streaming = true;
        self.view.messages.push(message);
        self.view.phase = Phase::Prompt;
        self.kept = (Instant::now(), 0);
        self.slot = (Instant::now(), 0, Duration::ZERO);
        self.worker.order(Order::Answer(Box::new(question)))
    }

    fn export(&mut self, format: ExportFormat, path: Option<PathBuf>) -> Result<()> {
        let name = match self.conversation.name() {
            name if name.is_empty() => "chat".to_owned(),
            name => name,
        };
        let (text, ending) = match format {
            ExportFormat::Markdown => (self.conversation.as_markdown(), "md"),
            ExportFormat::Json => {
                let json = serde_json::to_string_pretty(&self.conversation.as_messages())?;
                (format!("{json}\n"), "json")
            }
        };
        let path = path.unwrap_or_else(|| PathBuf::from(format!("{name}.{ending}")));
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        self.say(Level::Info, &format!("written to {}", path.display()));
        Ok(())
    }

    fn attach(&mut self, path: &std::path::Path) -> Result<()> {
        let reading = || format!("attaching {}", path.display());
        let facts = std::fs::metadata(path).with_context(reading)?;
        if !facts.is_file() || facts.len() > MAX_ATTACHMENT {
            bail!(
                "{}: only text files up to 1 MiB can be attached",
                path.display()
            );
        }
        let text = std::fs::read_to_string(path).with_context(reading)?;
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        self.view.attachments.push(Attachment {
            name: name.clone(),
            bytes: text.len() as u64,
        });
        self.attached.push((name, text));
        Ok(())
    }

    /// Takes in what the model's thread has told; true when anything changed.
    fn hear(&mut self) -> bool {
        let mut changed = false;
        loop {
            match self.worker.news.try_recv() {
                Ok(news) => {
                    changed = true;
                    if let Err(error) = self.take_in(news) {
                        self.say(Level::Error, &crate::report::error_line(&error));
                    }
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    if self.view.phase != Phase::Idle {
                        self.view.phase = Phase::Idle;
                        self.say(
                            Level::Error,
                            "the model's thread has ended; start qrun again",
                        );
                        changed = true;
                    }
                    break;
                }
            }
        }
        if self.measured.elapsed() > Duration::from_secs(1) {
            self.measured = Instant::now();
            changed |= self.measure_machine();
        }
        changed
    }

    fn answer(&mut self) -> Option<&mut Message> {
        self.view
            .messages
            .last_mut()
            .filter(|m| m.role == Role::Assistant)
    }

    fn take_in(&mut self, news: News) -> Result<()> {
        match news {
            News::Loading(share) => self.view.model.loading = Some(share),
            News::Loaded(facts) => {
                self.view.model = tui::Model {
                    name: facts.name,
                    loading: None,
                    detail: facts.detail,
                };
                self.view.phase = Phase::Idle;
                self.parts = line::Parts {
                    weights_mapped: facts.weights.0 as u64,
                    weights_copied: facts.weights.1 as u64,
                    ..line::Parts::default()
                };
                self.view.live.context = Some(tui::Context {
                    used: 0,
                    limit: facts.n_ctx as u64,
                    kv_bytes: 0,
                });
                self.view.live.speculation = Speculation {
                    reason: facts.draft_head,
                    ..Speculation::default()
                };
                self.ready = true;
                self.measure_machine();
                if self.queued {
                    self.ask()?;
                }
            }
            News::NotLoaded(error) => {
                self.view.phase = Phase::Idle;
                self.view.model.loading = None;
                self.say(Level::Error, &error);
            }
            News::Begun(begun) => {
                self.view.live.reuse = Some(if begun.reused > 0 {
                    Reuse::Reused {
                        reused: begun.reused as u64,
                        total: begun.total as u64,
                    }
                } else {
                    Reuse::None(begun.reason.to_owned())
                });
            }
            News::Prompt(done, total, time) => {
                let seconds = time.as_secs_f32();
                self.view.live.prompt = Some(Prompt {
                    done: done as u64,
                    total: total as u64,
                    tps: if seconds > 0.0 {
                        done as f32 / seconds
                    } else {
                        0.0
                    },
                });
            }
            News::Thinking(text) => {
                self.view.phase = Phase::Thinking;
                if let Some(message) = self.answer() {
                    let thinking = message.thinking.get_or_insert_default();
                    thinking.text.push_str(&text);
                    thinking.tokens += 1;
                }
            }
            News::Text(text) => {
                self.view.phase = Phase::Answering;
                if let Some(message) = self.answer() {
                    if let Some(thinking) = &mut message.thinking {
                        thinking.done = true;
                    }
                    message.text.push_str(&text);
                }
                self.keep_beginning()?;
            }
            News::Pass(figures) => self.show_figures(&figures),
            News::Done(ending) => {
                self.view.phase = Phase::Idle;
                if ending.tps > 0.0 {
                    self.view.live.decode_tps = Some(ending.tps as f32);
                }
                let note = match ending.reason {
                    FinishReason::Stop => "",
                    FinishReason::Length => ", context full",
                    FinishReason::Cancelled => ", stopped",
                };
                let note = format!("{} tokens, {:.1} tok/s{note}", ending.n_tokens, ending.tps);
                let stored = conversation::Message {
                    role: "assistant".to_owned(),
                    content: ending.text.clone(),
                    reasoning: ending.reasoning,
                    partial: ending.reason == FinishReason::Cancelled,
                };
                if let Some(message) = self.answer() {
                    message.streaming = false;
                    message.text = ending.text;
                    message.note = Some(note);
                    if let Some(thinking) = &mut message.thinking {
                        thinking.done = true;
                        thinking.tokens = ending.n_reasoning as u64;
                    }
                }
                self.conversation.messages.push(stored);
                self.conversation.write()?;
            }
            News::Notice(text) => self.say(Level::Warning, &text),
            News::Failed(error) => {
                self.view.phase = Phase::Idle;
                match self.answer().filter(|m| m.streaming) {
                    Some(message) => {
                        message.streaming = false;
                        if error == "cancelled" {
                            message.note = Some("stopped".to_owned());
                        } else {
                            message.error = Some(error);
                        }
                    }
                    None => self.say(Level::Error, &error),
                }
            }
        }
        Ok(())
    }

    /// Keeps the beginning of an answer at the end of a sentence, now and then.
    fn keep_beginning(&mut self) -> Result<()> {
        let (last, bytes) = self.kept;
        let Some(message) = self.view.messages.last() else {
            return Ok(());
        };
        let ends = message
            .text
            .trim_end_matches(' ')
            .ends_with(['.', '!', '?', '\n', ':']);
        if last.elapsed() < KEEP_EVERY || !ends || message.text.len() == bytes {
            return Ok(());
        }
        let part = conversation::Message {
            role: "assistant".to_owned(),
            content: message.text.clone(),
            reasoning: message
                .thinking
                .as_ref()
                .map_or_else(String::new, |t| t.text.clone()),
            partial: true,
        };
        self.kept = (Instant::now(), message.text.len());
        self.conversation.append(&part)
    }

    fn show_figures(&mut self, figures: &Figures) {
        let live = &mut self.view.live;
        let (since, tokens, time) = self.slot;
        if since.elapsed() >= SLOT {
            let seconds = (figures.decode_time.saturating_sub(time)).as_secs_f32();
            if seconds > 0.0 && figures.n_tokens > tokens {
                let tps = (figures.n_tokens - tokens) as f32 / seconds;
                live.decode_tps = Some(tps);
                live.decode_history.push(tps);
                if live.decode_history.len() > MAX_SLOTS {
                    live.decode_history.remove(0);
                }
                if self.first_minute.len() < 120 {
                    self.first_minute.push(tps);
                } else {
                    let mean = self.first_minute.iter().sum::<f32>() / 120.0;
                    live.thermal.get_or_insert_default().change = Some(tps / mean - 1.0);
                }
            }
            self.slot = (Instant::now(), figures.n_tokens, figures.decode_time);
        }
        if let Some(context) = &mut live.context {
            context.used = figures.n_past as u64;
            context.kv_bytes = figures.kv_bytes as u64;
        }
        self.parts = line::Parts {
            kv: figures.bytes.kv as u64,
            state: (figures.bytes.state + figures.bytes.rollback + figures.bytes.compute) as u64,
            snapshots: figures.snapshots as u64,
            ..self.parts
        };
        match &figures.stats {
            Some(stats) => {
                line::Speculation::new(stats, figures.depth.unwrap_or(0)).show(live);
            }
            None => live.speculation.depth = None,
        }
    }

    /// Looks at the machine's memory; true when it can tell.
    fn measure_machine(&mut self) -> bool {
        if !self.ready {
            return false;
        }
        let device = self.args.model.device.as_deref();
        let live = &mut self.view.live;
        let context = live
            .context
            .map_or_else(line::Context::default, |c| line::Context {
                used: c.used,
                limit: c.limit,
                kv_bytes: c.kv_bytes,
            });
        let Some(memory) = self.machine.memory(self.parts, context, device, 0.0) else {
            return false;
        };
        let before = (live.memory, live.thermal.clone());
        memory.show(live);
        before != (live.memory, live.thermal.clone())
    }

    fn show_stats(&mut self) {
        let live = &self.view.live;
        let mut rows = vec![("model".to_owned(), self.view.model.name.clone())];
        let path = self.args.model.model.as_deref();
        rows.push((
            "file".to_owned(),
            path.map_or_else(String::new, |p| p.display().to_string()),
        ));
        rows.push(("draft head".to_owned(), live.speculation.reason.clone()));
        self.view.stats = rows;
    }
}

/// How long ago, in words.
fn ago(then: SystemTime) -> String {
    let seconds = then.elapsed().map_or(0, |d| d.as_secs());
    let (n, unit) = match seconds {
        0..60 => return "just now".to_owned(),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{n} {unit}{} ago", if n == 1 { "" } else { "s" })
}
