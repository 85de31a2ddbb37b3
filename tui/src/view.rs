//! What there is to show: plain data that the engine side fills and the interface reads.
//!
//! Nothing here refers to the engine. Every figure that may be unknown is an `Option`, and what is unknown is not drawn.
//! Histories hold the newest value last.

/// Everything that the chat screen shows, apart from the interface's own state (scrolling, editor, open windows).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// The model, and how far its loading is.
    pub model: Model,
    /// Name of the conversation, empty before the first message.
    pub session: String,
    /// The conversation, oldest first. The system text is not among them.
    pub messages: Vec<Message>,
    /// What the engine does now.
    pub phase: Phase,
    /// Figures of the live panel.
    pub live: Live,
    /// What is set, as `/stats`, `/temp` and the others without a value show it.
    pub settings: Settings,
    /// Files read by `/attach`, sent with the next message.
    pub attachments: Vec<Attachment>,
    /// Stored conversations, for the list of `/load`. Filled on [`Action::ListSessions`](crate::Action::ListSessions).
    pub sessions: Vec<SessionEntry>,
    /// Models to choose from, for the list of `/model`. Filled on [`Action::ListModels`](crate::Action::ListModels).
    pub models: Vec<ModelEntry>,
    /// Messages of the program to the user, oldest first. The newest is shown in the last line until Esc or
    /// the next message.
    pub notices: Vec<Notice>,
    /// Further rows for `/stats`: label and value.
    pub stats: Vec<(String, String)>,
}

impl View {
    /// Whether an answer is being made, so that Esc and Ctrl-C stop it.
    pub fn is_busy(&self) -> bool {
        matches!(
            self.phase,
            Phase::Prompt | Phase::Thinking | Phase::Answering
        )
    }
}

/// The model of the conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Model {
    /// Short name, as in the file's metadata, with the weight type. Empty when none is chosen.
    pub name: String,
    /// Share loaded, 0 to 1, while it is being loaded; `None` when it is ready (or none is chosen).
    pub loading: Option<f32>,
    /// What is said beside the name, for instance the device.
    pub detail: String,
}

/// What the engine does now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Waiting for the user.
    #[default]
    Idle,
    /// Loading the model: a message can be written, and is sent when the model is ready.
    Loading,
    /// Processing the prompt.
    Prompt,
    /// Writing the thinking part.
    Thinking,
    /// Writing the answer.
    Answering,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The person at the keyboard.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// One message of the conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Unique in the conversation and never reused, so that rendered lines can be kept from frame to frame.
    pub id: u64,
    /// Who speaks.
    pub role: Role,
    /// The text; Markdown when it is the model's.
    pub text: String,
    /// The thinking part, folded to one line until it is opened.
    pub thinking: Option<Thinking>,
    /// Tools that the model called.
    pub tool_calls: Vec<ToolCall>,
    /// Names of the files that were sent along.
    pub attachments: Vec<String>,
    /// Still being written: a mark follows the text.
    pub streaming: bool,
    /// Why the message ended badly.
    pub error: Option<String>,
    /// One dim line below the text: tokens, speed, "stopped", "context full".
    pub note: Option<String>,
}

impl Message {
    /// A message with a text and nothing else.
    pub fn new(id: u64, role: Role, text: impl Into<String>) -> Self {
        Message {
            id,
            role,
            text: text.into(),
            thinking: None,
            tool_calls: Vec::new(),
            attachments: Vec::new(),
            streaming: false,
            error: None,
            note: None,
        }
    }
}

/// The thinking part of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    /// Its text so far.
    pub text: String,
    /// Its tokens so far.
    pub tokens: u64,
    /// Whether it has ended.
    pub done: bool,
}

/// A tool that the model called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// Its arguments, as JSON.
    pub arguments: String,
}

/// A text file to be sent with the next message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// File name without its folder.
    pub name: String,
    /// Size of the text.
    pub bytes: u64,
}

/// A stored conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionEntry {
    /// The name to load it by.
    pub name: String,
    /// Its first message or title.
    pub title: String,
    /// When it was last written, in words: "2 hours ago".
    pub when: String,
    /// Number of messages.
    pub messages: usize,
}

/// A model that can be chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelEntry {
    /// What [`Action::SetModel`](crate::Action::SetModel) carries.
    pub path: String,
    /// What is shown.
    pub name: String,
    /// Size of the file.
    pub bytes: u64,
}

/// One line from the program to the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// How serious.
    pub level: Level,
    /// One line.
    pub text: String,
}

/// How serious a notice is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// For information.
    Info,
    /// Something works less well than asked.
    Warning,
    /// Something did not work.
    Error,
}

/// What is set now, for display and for the completion of commands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Whether the model thinks before it answers.
    pub think: bool,
    /// The system text.
    pub system: String,
    /// Values of the samplers, by the names of [`Sampler`](crate::Sampler): name and value as text.
    pub samplers: Vec<(String, String)>,
    /// Speculation, as `/spec` takes it: "auto", "off", "3".
    pub spec: String,
}

/// Figures that change while the model works.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Live {
    /// Decode speed now, tokens per second.
    pub decode_tps: Option<f32>,
    /// Decode speed over the last minutes, one value per equal slot of time.
    pub decode_history: Vec<f32>,
    /// The prompt being processed, or the last one.
    pub prompt: Option<Prompt>,
    /// What the last turn did not have to process again, or why it had to.
    pub reuse: Option<Reuse>,
    /// Speculation.
    pub speculation: Speculation,
    /// Where the time of a round goes.
    pub round: Option<Round>,
    /// The context.
    pub context: Option<Context>,
    /// Memory.
    pub memory: Option<Memory>,
    /// Heat.
    pub thermal: Option<Thermal>,
}

/// Processing of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prompt {
    /// Tokens processed.
    pub done: u64,
    /// Tokens to process.
    pub total: u64,
    /// Tokens per second.
    pub tps: f32,
}

/// How much of a prompt was there already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// `reused` of `total` tokens were not processed again.
    Reused {
        /// Tokens found in the state or a snapshot.
        reused: u64,
        /// Tokens of the whole prompt.
        total: u64,
    },
    /// Nothing was reused, because of this.
    None(String),
}

/// Drafting and what comes of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speculation {
    /// Tokens drafted per round now; `None` when speculation is off.
    pub depth: Option<u32>,
    /// Why this depth, or why off.
    pub reason: String,
    /// Drafted tokens that were accepted, 0 to 1.
    pub acceptance: Option<f32>,
    /// The same for the first, second, ... draft of a round.
    pub by_position: Vec<f32>,
    /// Tokens that came out of a pass through the trunk, on average.
    pub tokens_per_pass: Option<f32>,
}

/// Where the time of a round goes, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Round {
    /// Making drafts.
    pub draft_ms: f32,
    /// The trunk's pass.
    pub verify_ms: f32,
    /// Going back after rejected drafts.
    pub rollback_ms: f32,
    /// Sampling.
    pub sampling_ms: f32,
    /// The rest.
    pub other_ms: f32,
}

impl Round {
    /// The parts in order, with their names.
    pub fn parts(&self) -> [(&'static str, f32); 5] {
        [
            ("draft", self.draft_ms),
            ("verify", self.verify_ms),
            ("rollback", self.rollback_ms),
            ("sampling", self.sampling_ms),
            ("other", self.other_ms),
        ]
    }
}

/// How full the context is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// Tokens in use.
    pub used: u64,
    /// Tokens possible.
    pub limit: u64,
    /// Bytes of keys and values for the tokens in use.
    pub kv_bytes: u64,
}

/// How near the machine is to swapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Zone {
    /// Under 70 %.
    #[default]
    Green,
    /// 70 to 85 %.
    Yellow,
    /// 85 % and more: the machine compresses and then swaps.
    Red,
}

/// Memory of the device that holds the model, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The zone, as the governor judges it.
    pub zone: Zone,
    /// All there is.
    pub total: u64,
    /// Weights mapped from the file.
    pub weights_mapped: u64,
    /// Weights in copies of their own (uploaded or repacked).
    pub weights_copied: u64,
    /// Keys and values.
    pub kv: u64,
    /// Recurrent state.
    pub state: u64,
    /// Snapshots for reuse.
    pub snapshots: u64,
    /// Everything else in use, other programs included.
    pub other: u64,
    /// Tokens that would still fit.
    pub room_tokens: Option<u64>,
}

impl Memory {
    /// The parts in order, with their names.
    pub fn parts(&self) -> [(&'static str, u64); 6] {
        [
            ("weights, mapped", self.weights_mapped),
            ("weights, copied", self.weights_copied),
            ("keys and values", self.kv),
            ("state", self.state),
            ("snapshots", self.snapshots),
            ("other", self.other),
        ]
    }

    /// Bytes in use, never more than [`Memory::total`].
    pub fn used(&self) -> u64 {
        self.parts()
            .iter()
            .fold(0u64, |sum, part| sum.saturating_add(part.1))
            .min(self.total)
    }
}

/// Heat, as far as the system tells it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Thermal {
    /// The system's own word: "nominal", "fair", "serious", "critical". Empty where it has none.
    pub state: String,
    /// Decode speed against the first minute, as a share: -0.12 is 12 % slower.
    pub change: Option<f32>,
}
