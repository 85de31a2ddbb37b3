//! What the interface asks of the engine side.

use std::path::PathBuf;

/// A wish of the user. The interface changes nothing but its own state; the engine side carries this out and changes the
/// view.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send this as the user's next message, with the attachments of the view.
    Send(String),
    /// Stop the answer, keep what is there.
    Stop,
    /// End the thinking part now and answer.
    EndThinking,
    /// Make the last answer again.
    Regenerate,
    /// Replace the text of user message `index` (in [`View::messages`](crate::View::messages)), drop all after it, answer.
    Edit {
        /// Index of a message of the user.
        index: usize,
        /// Its new text.
        text: String,
    },
    /// Put this text on the clipboard ([`crate::terminal::Clipboard`]).
    Copy(String),
    /// Use this model: a path or a name from [`View::models`](crate::View::models).
    SetModel(String),
    /// Set the system text; empty for none.
    System(String),
    /// Let the model think before it answers, or not.
    Think(bool),
    /// Set a sampler. The value is within [`Sampler::range`].
    SetSampler {
        /// Which.
        sampler: Sampler,
        /// Its value; a whole number where [`Sampler::is_whole`].
        value: f64,
    },
    /// Set the seed.
    Seed(u64),
    /// Set speculation: "auto", "off" or a depth.
    Spec(String),
    /// Set the context limit in tokens.
    Ctx(u64),
    /// Give the conversation this name, or write it now under the name it has.
    Save(Option<String>),
    /// Load the stored conversation of this name.
    Load(String),
    /// Write the conversation to a file; without a path, to one named after it.
    Export {
        /// Which form.
        format: ExportFormat,
        /// Where to.
        path: Option<PathBuf>,
    },
    /// Read a text file, to be sent with the next message.
    Attach(PathBuf),
    /// Forget the files that were attached.
    Detach,
    /// Start a new conversation; the old one stays stored.
    Clear,
    /// Fill [`View::stats`](crate::View::stats): the window for them has been opened.
    Stats,
    /// Fill [`View::sessions`](crate::View::sessions): the list of them has been opened.
    ListSessions,
    /// Fill [`View::models`](crate::View::models): the list of them has been opened.
    ListModels,
    /// Leave the terminal, open the user's editor on this text, come back, and hand the result to
    /// [`Ui::set_input`](crate::Ui::set_input).
    ExternalEditor(String),
    /// Clear the terminal and draw all of it again.
    Redraw,
    /// Suspend the program ([`crate::terminal::Screen::suspend`]).
    Suspend,
    /// Leave.
    Quit,
}

/// Forms of [`Action::Export`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// Markdown.
    Markdown,
    /// JSON.
    Json,
}

/// The samplers that a command sets, named as the flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampler {
    /// `--temp`
    Temp,
    /// `--top-k`
    TopK,
    /// `--top-p`
    TopP,
    /// `--min-p`
    MinP,
    /// `--typical-p`
    TypicalP,
    /// `--repeat-penalty`
    RepeatPenalty,
    /// `--repeat-last-n`
    RepeatLastN,
    /// `--presence-penalty`
    PresencePenalty,
    /// `--frequency-penalty`
    FrequencyPenalty,
}

impl Sampler {
    /// All of them, in the order of the help.
    pub const ALL: [Sampler; 9] = [
        Sampler::Temp,
        Sampler::TopK,
        Sampler::TopP,
        Sampler::MinP,
        Sampler::TypicalP,
        Sampler::RepeatPenalty,
        Sampler::RepeatLastN,
        Sampler::PresencePenalty,
        Sampler::FrequencyPenalty,
    ];

    /// The name, as in the flags and commands: `top-k`.
    pub fn name(self) -> &'static str {
        match self {
            Sampler::Temp => "temp",
            Sampler::TopK => "top-k",
            Sampler::TopP => "top-p",
            Sampler::MinP => "min-p",
            Sampler::TypicalP => "typical-p",
            Sampler::RepeatPenalty => "repeat-penalty",
            Sampler::RepeatLastN => "repeat-last-n",
            Sampler::PresencePenalty => "presence-penalty",
            Sampler::FrequencyPenalty => "frequency-penalty",
        }
    }

    /// The values that are taken, both ends included.
    pub fn range(self) -> (f64, f64) {
        match self {
            Sampler::Temp => (0.0, 10.0),
            Sampler::TopK => (0.0, 1_000_000.0),
            Sampler::TopP | Sampler::MinP | Sampler::TypicalP => (0.0, 1.0),
            Sampler::RepeatPenalty => (0.01, 10.0),
            Sampler::RepeatLastN => (0.0, 1_000_000.0),
            Sampler::PresencePenalty | Sampler::FrequencyPenalty => (-10.0, 10.0),
        }
    }

    /// Whether only whole numbers are taken.
    pub fn is_whole(self) -> bool {
        matches!(self, Sampler::TopK | Sampler::RepeatLastN)
    }
}
