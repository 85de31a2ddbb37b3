//! The command line: every flag and help sentence, and nothing else.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

const LONG_HELP: &str = "\
Examples:
  qrun -p 'What is the capital of France?'
  git diff | qrun -m qwen3.5-4b-q4_k_m.gguf -p 'Review this:'
  qrun -p 'List three animals.' --json-schema '{\"type\":\"array\",\"items\":{\"type\":\"string\"}}'
  qrun --prompts questions.txt -o answers.jsonl --resume

Output: the answer goes to stdout and nothing else does; notices, thinking, statistics and errors go to stderr.

Exit codes: 0 done; 1 failed; 2 wrong usage; 130 interrupted (what there was is on stdout). A closed pipe is no error.

Files: defaults for the flags above come from config.toml in $XDG_CONFIG_HOME/qrun (~/.config/qrun), a key for each \
long flag, such as `temp = 0.6` or `no-think = true`. QRUN_CONFIG names another file; empty means none. Flags on the \
command line win, then QRUN_MODEL, QRUN_DEVICE, QRUN_THREADS and QRUN_CTX_SIZE, then the file.";

/// Runs Qwen 3.5 models (and 3.6, 3.8) from GGUF files: exact, fast, and honest about memory.
#[derive(Parser, Debug)]
#[command(
    name = "qrun",
    version = qrun::VERSION.as_str(),
    args_conflicts_with_subcommands = true,
    args_override_self = true,
    max_term_width = 100,
    after_help = "Text goes to stdout, everything else to stderr. See --help for examples and files.",
    after_long_help = LONG_HELP
)]
pub struct Cli {
    /// What to do instead of answering a prompt.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Flags of the plain command.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Everything besides answering a prompt.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Turns a Hugging Face checkpoint into a GGUF file, draft head included.
    Convert(ConvertArgs),
    /// A conversation in the terminal.
    Chat(ChatArgs),
    /// Shows what is in a GGUF file: metadata, tensors, draft head, memory.
    Inspect(InspectArgs),
    /// Says which models of the family this machine runs, how fast, and with how much context.
    Fit(FitArgs),
    /// Says what is well and what is not with this build, this machine and a model file.
    Doctor(DoctorArgs),
    /// Turns text into token ids.
    Tokenize(TokenizeArgs),
    /// Turns token ids into text.
    Detokenize(DetokenizeArgs),
    /// Measures how well a model predicts a text.
    Perplexity(PerplexityArgs),
    /// Measures which depth of speculation pays here, and keeps it for later runs.
    Tune(TuneArgs),
    /// Measures how fast a model is here: llama-bench's tests and more.
    Bench(BenchArgs),
    /// Checks that speculation gives the same text as plain decoding.
    Verify(VerifyArgs),
    /// Gives a model's matrices types of fewer bits.
    Quantize(QuantizeArgs),
    /// Splits, merges and edits GGUF files.
    #[command(subcommand)]
    Gguf(GgufCommand),
    /// Measures which columns of a model's matrices matter, for `quantize --imatrix`.
    Imatrix(ImatrixArgs),
    /// Shows live what a running qrun does.
    Watch(WatchArgs),
    /// Prints a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Prints the manual page.
    Man,
}

/// Which model, where, how.
#[derive(Args, Debug, Clone)]
pub struct ModelArgs {
    /// GGUF file, any part of a split one; without it the demo model. `synthetic:SHAPE[:TYPE]`, such as
    /// synthetic:9b:q4_k_m, has the size and speed of that model, and random weights
    #[arg(short, long, value_name = "FILE", env = "QRUN_MODEL")]
    pub model: Option<PathBuf>,

    /// GGUF file that holds the MTP block, if the model's own does not
    #[arg(long, value_name = "FILE")]
    pub mtp: Option<PathBuf>,

    /// Device to compute on (see --list-devices) [default: Metal, else another GPU, else CPU]
    #[arg(long, value_name = "NAME", env = "QRUN_DEVICE")]
    pub device: Option<String>,

    /// CPU threads [default: performance cores]
    #[arg(short, long, value_name = "N", env = "QRUN_THREADS", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: Option<u16>,

    /// Copy weights to a layout made for this CPU, beside the file's map: may decode faster, needs memory
    #[arg(long)]
    pub repack: bool,

    /// Context limit in tokens; 0 is the model's own; memory grows as the context fills
    #[arg(
        short,
        long,
        value_name = "N",
        env = "QRUN_CTX_SIZE",
        default_value_t = 0
    )]
    pub ctx_size: usize,

    /// Prompt tokens in one pass
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = parse_batch)]
    pub batch_size: usize,

    /// Type of the K cache (-ctk): f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub cache_type_k: String,

    /// Type of the V cache (-ctv)
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub cache_type_v: String,

    /// Before loading, see that it fits into memory: lower a context that was not given, refuse what cannot be
    #[arg(long, value_name = "on|off", default_value = "on", action = clap::ArgAction::Set, value_parser = parse_on_off)]
    pub fit: bool,

    /// Show what ggml logs, what a run takes of the memory, and the whole chain of causes of an error
    #[arg(short, long)]
    pub verbose: bool,
}

fn parse_on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("expected `on` or `off`".to_owned()),
    }
}

fn parse_batch(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=4096) => Ok(n),
        _ => Err("expected a number from 1 to 4096".to_owned()),
    }
}

/// Answering prompts.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// Model and device.
    #[command(flatten)]
    pub model: ModelArgs,

    /// List the devices and leave
    #[arg(long)]
    pub list_devices: bool,

    /// The prompt: a user's message, or with --raw the text to go on from; what is piped in follows it
    /// (in a loop over a file, give </dev/null)
    #[arg(short, long, value_name = "TEXT", help_heading = "Prompt")]
    pub prompt: Option<String>,

    /// Read the prompt from a file
    #[arg(
        short,
        long,
        value_name = "FILE",
        help_heading = "Prompt",
        conflicts_with = "prompt"
    )]
    pub file: Option<PathBuf>,

    /// System message (-sys)
    #[arg(
        long,
        value_name = "TEXT",
        help_heading = "Prompt",
        conflicts_with = "raw"
    )]
    pub system_prompt: Option<String>,

    /// Go on from the text as it is, without the chat template
    #[arg(long, help_heading = "Prompt")]
    pub raw: bool,

    /// Take <|im_start|> and the like in the text literally
    #[arg(long, help_heading = "Prompt")]
    pub no_parse_special: bool,

    /// Chat template in Jinja, in place of the model's own
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    pub chat_template_file: Option<PathBuf>,

    /// Tools that the model may call: a JSON array in OpenAI's form, or a file that holds it
    #[arg(long, value_name = "JSON|FILE", help_heading = "Prompt")]
    pub tools: Option<String>,

    /// Think before answering
    #[arg(long, help_heading = "Prompt", conflicts_with = "no_think")]
    pub think: bool,

    /// Answer without thinking
    #[arg(long, help_heading = "Prompt")]
    pub no_think: bool,

    /// End the thinking after N tokens
    #[arg(long, value_name = "N", help_heading = "Prompt")]
    pub reasoning_budget: Option<usize>,

    /// Answer many prompts: one a line, or JSONL with `prompt`, `system` or `messages`; answers are JSONL in order
    #[arg(long, value_name = "FILE", help_heading = "Prompt", conflicts_with_all = ["prompt", "file"])]
    pub prompts: Option<PathBuf>,

    /// At most N tokens, thinking included [default: to the end of the context]
    #[arg(short = 'n', long, value_name = "N", help_heading = "Output")]
    pub n_predict: Option<usize>,

    /// End the answer before this text (may be given several times)
    #[arg(long, value_name = "TEXT", help_heading = "Output")]
    pub stop: Vec<String>,

    /// Go on past the end of the answer
    #[arg(long, help_heading = "Output")]
    pub ignore_eos: bool,

    /// Keep the answer to a JSON schema, given as text or as a file
    #[arg(
        long,
        value_name = "JSON|FILE",
        help_heading = "Output",
        conflicts_with = "grammar"
    )]
    pub json_schema: Option<String>,

    /// Keep the answer to a grammar in Lark form, given as text or as a file
    #[arg(long, value_name = "LARK|FILE", help_heading = "Output")]
    pub grammar: Option<String>,

    /// Print one JSON object with text, ids, counts and timings
    #[arg(long, help_heading = "Output", conflicts_with = "jsonl")]
    pub json: bool,

    /// Print events as JSON, one a line, as they come
    #[arg(long, help_heading = "Output")]
    pub jsonl: bool,

    /// Write the answers of --prompts to a file
    #[arg(
        short,
        long,
        value_name = "FILE",
        help_heading = "Output",
        requires = "prompts"
    )]
    pub output: Option<PathBuf>,

    /// Go on after the answers that --output already holds
    #[arg(long, help_heading = "Output", requires = "output")]
    pub resume: bool,

    /// Show the thinking on stderr
    #[arg(long, help_heading = "Output")]
    pub show_thinking: bool,

    /// Print speed and memory to stderr at the end
    #[arg(long, help_heading = "Output")]
    pub stats: bool,

    /// How to choose tokens.
    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// How to guess tokens ahead.
    #[command(flatten)]
    pub spec: SpecArgs,
}

/// How to guess tokens ahead. The text is the same with and without.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Speculation")]
pub struct SpecArgs {
    /// Tokens to guess before each pass: `auto` (as many as pay here, none where that is fastest), `off`, or a number
    #[arg(long, value_name = "auto|off|N", default_value = "auto", value_parser = parse_spec)]
    pub spec: Spec,

    /// At most this many, also with `auto`
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub draft_max: u8,

    /// Do not use drafts shorter than this
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub draft_min: u8,

    /// End a draft before a token that the draft head takes to be less probable than this
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = parse_share)]
    pub draft_p_min: f32,

    /// Draft among the N most frequent tokens and the added ones only: a smaller draft head; `auto` is what `qrun tune`
    /// found to be fastest, else `off`
    #[arg(long, value_name = "auto|off|N", default_value = "auto", value_parser = parse_draft_vocab)]
    pub spec_draft_vocab: DraftVocabSize,

    /// Also guess what followed the last time that the same N tokens stood in the text; 0 is off
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=64))]
    pub spec_ngram: u8,

    /// With a temperature, draw drafts at random as the draft head would: higher acceptance, but the text of a seed
    /// then depends on these settings
    #[arg(long)]
    pub spec_sampled: bool,

    /// Ignore what `qrun tune` measured
    #[arg(long)]
    pub no_tune: bool,

    /// Take guesses to be right at these rates (one for each place, with all before it): for measurements with
    /// random weights
    #[arg(long, value_name = "RATES", value_delimiter = ',', hide = true)]
    pub spec_synth_rates: Vec<f64>,

    /// Refuse what could make greedy text differ from plain decoding's where two tokens are almost equally probable:
    /// other devices than the CPU, repacked weights, more than 6 guesses
    #[arg(long)]
    pub spec_exact: bool,
}

/// The value of `--spec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spec {
    /// As many as pay.
    Auto,
    /// None, or always as many.
    Fixed(u8),
}

/// The value of `--spec-draft-vocab`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftVocabSize {
    /// What was measured to be fastest.
    Auto,
    /// The most frequent tokens, or all.
    Given(Option<usize>),
}

/// Reads the value of `--spec`.
///
/// # Errors
/// When it is neither `auto`, `off` nor a number that can be.
pub fn parse_spec(text: &str) -> Result<Spec, String> {
    match (text, text.parse()) {
        ("auto", _) => Ok(Spec::Auto),
        ("off", _) => Ok(Spec::Fixed(0)),
        (_, Ok(n @ 0..=16)) => Ok(Spec::Fixed(n)),
        _ => Err("expected `auto`, `off` or a number up to 16".to_owned()),
    }
}

fn parse_draft_vocab(text: &str) -> Result<DraftVocabSize, String> {
    match (text, text.parse()) {
        ("auto", _) => Ok(DraftVocabSize::Auto),
        ("off", _) => Ok(DraftVocabSize::Given(None)),
        (_, Ok(n @ 1..)) => Ok(DraftVocabSize::Given(Some(n))),
        _ => Err("expected `auto`, `off` or a number above 0".to_owned()),
    }
}

fn parse_share(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("expected a number from 0 to 1".to_owned()),
    }
}

/// How to choose tokens. What is not given comes from the model file, else from Qwen's recommendation.
#[derive(Args, Debug, Default, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Always the most probable token
    #[arg(long, conflicts_with = "temp")]
    pub greedy: bool,

    /// Temperature; 0 is --greedy
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temp: Option<f32>,

    /// Choose among the K best; 0 is off
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<i32>,

    /// Choose among the best that make up this probability; 1 is off
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,

    /// Choose among those at least this fraction as probable as the best; 0 is off
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,

    /// Locally typical sampling; 1 is off
    #[arg(
        long,
        value_name = "P",
        visible_alias = "typical",
        allow_negative_numbers = true
    )]
    pub typical_p: Option<f32>,

    /// Tokens that the penalties look back on
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub repeat_last_n: Option<i32>,

    /// Divide the logits of recent tokens; 1 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repeat_penalty: Option<f32>,

    /// Lower the logits of recent tokens once; 0 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,

    /// Lower the logits of recent tokens for each time they came; 0 is off
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,

    /// Add to a token's logit: ID+AMOUNT or ID-AMOUNT; `ID-inf` forbids it
    #[arg(long, value_name = "ID±X", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,

    /// Same seed, same text [default: random, shown by --stats and --json]
    #[arg(short, long, value_name = "N")]
    pub seed: Option<u64>,

    /// The stages in order, separated by `;` [default: penalties;top_k;typ_p;top_p;min_p;temperature]
    #[arg(long, value_name = "LIST")]
    pub samplers: Option<String>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || "expected ID+AMOUNT or ID-AMOUNT, such as 198-1.5 or 198-inf".to_owned();
    let at = text.find(['+', '-']).ok_or_else(wrong)?;
    let id = text[..at].parse().map_err(|_| wrong())?;
    let amount: f32 = text[at..].parse().map_err(|_| wrong())?;
    Ok((id, amount))
}

/// Arguments of `convert`.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// The checkpoint's folder, or a safetensors file in it
    #[arg(value_name = "DIR|FILE")]
    pub input: PathBuf,

    /// The GGUF file to write
    #[arg(
        short,
        long,
        value_name = "FILE",
        visible_alias = "outfile",
        required_unless_present = "dry_run"
    )]
    pub output: Option<PathBuf>,

    /// Type of the tensors: f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, ... [default: the checkpoint's own]
    #[arg(long = "type", value_name = "TYPE", visible_alias = "outtype")]
    pub file_type: Option<String>,

    /// Write only the draft head, for --mtp
    #[arg(long, conflicts_with_all = ["no_mtp", "verify"])]
    pub mtp_only: bool,

    /// Leave the draft head out
    #[arg(long)]
    pub no_mtp: bool,

    /// Write parts with at most these bytes of tensors: a number with K, M or G for thousands, millions or billions
    #[arg(long, value_name = "N[K|M|G]", value_parser = parse_size)]
    pub split_max_size: Option<u64>,

    /// Print what would be written, and write nothing
    #[arg(long)]
    pub dry_run: bool,

    /// Read a text with the result, and fail if its draft head gets nothing right
    #[arg(long, conflicts_with = "dry_run")]
    pub verify: bool,

    /// Device of --verify
    #[arg(long, value_name = "NAME", env = "QRUN_DEVICE")]
    pub device: Option<String>,

    /// CPU threads of --verify [default: performance cores]
    #[arg(short, long, value_name = "N", env = "QRUN_THREADS", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: Option<u16>,
}

fn parse_size(text: &str) -> Result<u64, String> {
    convert::split::parse_size(text)
        .ok_or_else(|| "expected a number of bytes, such as 4G or 500M".to_owned())
}

/// Arguments of `inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// GGUF file, any part of a split one
    pub file: PathBuf,

    /// GGUF file that holds the MTP block
    #[arg(long, value_name = "FILE")]
    pub mtp: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fit`.
#[derive(Args, Debug)]
#[command(
    after_help = "Memory is planned with the graphs of a real run, draft head included; speed is what the weights take \
    at the rate measured here, with three of four guesses right. On an imagined machine a quarter of the memory is taken \
    by others, 16 GiB at most."
)]
pub struct FitArgs {
    /// Look at a machine with this much unified memory instead: a number with G (or GB, GiB)
    #[arg(long = "for", value_name = "MEMORY", value_parser = parse_memory)]
    pub memory: Option<u64>,

    /// Take this bandwidth instead of measuring
    #[arg(long, value_name = "GB/s", value_parser = parse_bandwidth)]
    pub bandwidth: Option<f64>,

    /// Decode with a synthetic model too, such as 2b or 9b:q6_k, and correct all speeds by what it reaches
    #[arg(long, value_name = "SHAPE[:TYPE]", conflicts_with_all = ["memory", "bandwidth"])]
    pub measure: Option<String>,

    /// Contexts to look at (several times, or separated by commas) [default: 8192,32768,131072,262144]
    #[arg(short, long, value_name = "N", value_delimiter = ',', value_parser = parse_context)]
    pub ctx_size: Vec<usize>,

    /// Device [default: Metal, else another GPU, else CPU]
    #[arg(long, value_name = "NAME", env = "QRUN_DEVICE")]
    pub device: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Memory is counted in powers of two, whatever the unit is called.
fn parse_memory(text: &str) -> Result<u64, String> {
    let wrong = || "expected a number of GB, such as 24GB".to_owned();
    let lower = text.to_ascii_lowercase();
    let number = lower
        .trim_end_matches('b')
        .trim_end_matches('i')
        .trim_end_matches('g');
    let gib: f64 = number.trim().parse().map_err(|_| wrong())?;
    if !(0.5..=65_536.0).contains(&gib) {
        return Err(wrong());
    }
    Ok((gib * (1u64 << 30) as f64) as u64)
}

fn parse_bandwidth(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(n) if (0.1..=1e6).contains(&n) => Ok(n),
        _ => Err("expected a number of GB a second".to_owned()),
    }
}

fn parse_context(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 256..=1_073_741_824) => Ok(n),
        _ => Err("expected a number of tokens, 256 or more".to_owned()),
    }
}

/// Arguments of `doctor`.
#[derive(Args, Debug)]
#[command(
    after_help = "One line for each finding: ok, note, warning or problem, with what to do below it. The exit code is \
    1 where there is a problem, else 0."
)]
pub struct DoctorArgs {
    /// GGUF file to look at too, any part of a split one
    #[arg(short, long, value_name = "FILE", env = "QRUN_MODEL")]
    pub model: Option<PathBuf>,

    /// GGUF file that holds the MTP block
    #[arg(long, value_name = "FILE", requires = "model")]
    pub mtp: Option<PathBuf>,

    /// Device that the model would run on [default: Metal, else another GPU, else CPU]
    #[arg(long, value_name = "NAME", env = "QRUN_DEVICE")]
    pub device: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `tokenize`.
#[derive(Args, Debug)]
pub struct TokenizeArgs {
    /// GGUF file; without it the demo model
    #[arg(short, long, value_name = "FILE", env = "QRUN_MODEL")]
    pub model: Option<PathBuf>,

    /// The text; `-` or nothing reads stdin
    pub text: Option<String>,

    /// Print a plain array of ids
    #[arg(long)]
    pub json: bool,

    /// Take <|im_start|> and the like literally
    #[arg(long)]
    pub no_parse_special: bool,
}

/// Arguments of `detokenize`.
#[derive(Args, Debug)]
pub struct DetokenizeArgs {
    /// GGUF file; without it the demo model
    #[arg(short, long, value_name = "FILE", env = "QRUN_MODEL")]
    pub model: Option<PathBuf>,

    /// Token ids, separated by spaces, commas or as a JSON array; nothing reads stdin
    pub ids: Vec<String>,
}

/// Arguments of `perplexity`.
#[derive(Args, Debug)]
pub struct PerplexityArgs {
    /// Model and device.
    #[command(flatten)]
    pub model: ModelArgs,

    /// The text
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// Print each token's log-probability too
    #[arg(long, requires = "json")]
    pub token_logprobs: bool,
}

/// MiB for a conversation's saved states, where no number is given.
pub const CACHE_RAM: usize = 1024;

/// Arguments of `chat`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Keys and commands: press ? or F1, or write /help.")]
pub struct ChatArgs {
    /// Model and device.
    #[command(flatten)]
    pub model: ModelArgs,

    /// System message (-sys)
    #[arg(long, value_name = "TEXT")]
    pub system_prompt: Option<String>,

    /// Think before answering
    #[arg(long, conflicts_with = "no_think")]
    pub think: bool,

    /// Answer without thinking
    #[arg(long)]
    pub no_think: bool,

    /// Go on with a stored conversation; without a name, the newest
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "", conflicts_with = "no_save")]
    pub resume: Option<String>,

    /// Do not keep the conversation on disk
    #[arg(long)]
    pub no_save: bool,

    /// Leave the mouse to the terminal: text can be selected, the wheel does not scroll
    #[arg(long)]
    pub no_mouse: bool,

    /// MiB for saved states, from which a next turn, an edit or a regeneration goes on
    #[arg(long, value_name = "MIB", default_value_t = CACHE_RAM)]
    pub cache_ram: usize,

    /// MiB for saved states on disk, from which `--resume` goes on at once; they hold the conversation. 0 keeps none:
    /// the states of a large model are hundreds of megabytes, written after every answer
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 0,
        conflicts_with = "no_save"
    )]
    pub cache_disk: usize,

    /// How to choose tokens.
    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// How to guess tokens ahead.
    #[command(flatten)]
    pub spec: SpecArgs,
}

/// Arguments of `watch`.
#[derive(Args, Debug)]
#[command(
    after_help = "Runs are found in $XDG_RUNTIME_DIR/qrun, or in a folder for temporary files that is yours alone; \
    without PID a list is shown where there are several. The lines of --json are described in docs/WATCH.md."
)]
pub struct WatchArgs {
    /// The process to watch
    #[arg(value_name = "PID", conflicts_with = "last")]
    pub pid: Option<u32>,

    /// Watch the one that was started last
    #[arg(long)]
    pub last: bool,

    /// Print the figures as JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `tune`.
#[derive(Args, Debug)]
pub struct TuneArgs {
    /// Model and device.
    #[command(flatten)]
    pub model: ModelArgs,

    /// Deepest draft to try
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub draft_max: u8,

    /// Draft vocabularies to try besides the whole one [default: 32768 where the model has more than 65536 tokens]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    pub spec_draft_vocab: Vec<u32>,

    /// Tokens of each text
    #[arg(short = 'n', long, value_name = "N", default_value_t = 96)]
    pub n_predict: usize,

    /// How often to go through all texts
    #[arg(short, long, value_name = "N", default_value_t = 1)]
    pub repetitions: usize,

    /// Print the record as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `verify`.
#[derive(Args, Debug)]
pub struct VerifyArgs {
    /// Model and device.
    #[command(flatten)]
    pub model: ModelArgs,

    /// Prompts, one a line [default: six of different kinds]
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Tokens of each text
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    pub n_predict: usize,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// How to guess tokens ahead.
    #[command(flatten)]
    pub spec: SpecArgs,
}

/// Arguments of `quantize`.
#[derive(Args, Debug)]
#[command(
    after_help = "Types, from most bits to fewest: F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, \
    Q4_K_S, Q4_1, Q4_0, IQ4_NL, IQ4_XS, Q3_K_L, Q3_K_M, Q3_K_S, IQ3_M, IQ3_S, IQ3_XS, IQ3_XXS, Q2_K, Q2_K_S, IQ2_M, \
    IQ2_S, IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S. Those from IQ3_XS down, but for Q2_K, need an importance matrix. Types of \
    single tensors are ggml's: f16, q8_0, q6_K, iq4_nl ..."
)]
pub struct QuantizeArgs {
    /// GGUF file, any part of a split one
    #[arg(value_name = "IN.gguf")]
    pub input: PathBuf,

    /// File to write
    #[arg(value_name = "OUT.gguf")]
    pub output: PathBuf,

    /// What to make of it, such as Q4_K_M (all of them below)
    #[arg(value_name = "TYPE")]
    pub file_type: String,

    /// Importance matrix, as `qrun imatrix` or llama-imatrix make it
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,

    /// Type of the tensors whose names match a regular expression (several times: the first match counts)
    #[arg(long, value_name = "REGEX=TYPE")]
    pub tensor_type: Vec<String>,

    /// Type of the output matrix
    #[arg(long, value_name = "TYPE")]
    pub output_tensor_type: Option<String>,

    /// Type of the token embedding
    #[arg(long, value_name = "TYPE")]
    pub token_embedding_type: Option<String>,

    /// Type of the draft head's matrices
    #[arg(long, value_name = "TYPE")]
    pub mtp_type: Option<String>,

    /// Convert matrices that are quantized already, which loses twice
    #[arg(long)]
    pub allow_requantize: bool,

    /// Threads [default: performance cores]
    #[arg(short, long, value_name = "N", env = "QRUN_THREADS", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: Option<u16>,

    /// Print what would be done, and do nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// What `gguf` does.
#[derive(Subcommand, Debug)]
pub enum GgufCommand {
    /// Cuts a file into parts, named OUT-00001-of-0000N.gguf.
    Split(SplitArgs),
    /// Puts the parts of a split file together again.
    Merge(MergeArgs),
    /// Changes metadata.
    Set(SetArgs),
}

/// Arguments of `bench`.
#[derive(Args, Debug, Clone)]
#[command(
    after_help = "Several values, separated by commas, make a test of each combination. Speeds are means with their \
    standard deviation.\n\nA test's name says what is timed: pp512, a prompt of 512 tokens; tg128, 128 tokens, one a \
    pass; pp512+tg128, both; @ d4096, with 4096 tokens in the context before. `pp512 head` is the prompt with the draft \
    head's keys and values, `tg128 spec 2` greedy text with two guesses before each pass, `ttft512` the time from the \
    prompt's tokens to the first token of the answer."
)]
pub struct BenchArgs {
    /// GGUF file; without it the demo model. `synthetic:SHAPE[:TYPE]`, such as synthetic:9b:q4_k_m, has the size and
    /// speed of that model, and random weights
    #[arg(short, long, value_name = "FILE", env = "QRUN_MODEL")]
    pub model: Option<PathBuf>,

    /// GGUF file that holds the MTP block, if the model's own does not
    #[arg(long, value_name = "FILE")]
    pub mtp: Option<PathBuf>,

    /// Device to compute on [default: Metal, else another GPU, else CPU]
    #[arg(long, value_name = "NAME", env = "QRUN_DEVICE")]
    pub device: Option<String>,

    /// Before loading, see that the largest test fits into memory, and refuse what cannot be
    #[arg(long, value_name = "on|off", default_value = "on", action = clap::ArgAction::Set, value_parser = parse_on_off)]
    pub fit: bool,

    /// Prompt tokens; 0 for no such test
    #[arg(
        short = 'p',
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "512"
    )]
    pub n_prompt: Vec<usize>,

    /// Generated tokens; 0 for no such test
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "128"
    )]
    pub n_gen: Vec<usize>,

    /// Prompt and generated tokens in one (-pg; may be given several times)
    #[arg(long, value_name = "P,N", value_parser = parse_pg)]
    pub pg: Vec<(usize, usize)>,

    /// Tokens in the context before the test
    #[arg(
        short = 'd',
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "0"
    )]
    pub n_depth: Vec<usize>,

    /// Prompt tokens in one pass
    #[arg(short, long, value_name = "N", value_delimiter = ',', default_value = "512", value_parser = parse_batch)]
    pub batch_size: Vec<usize>,

    /// CPU threads [default: performance cores]
    #[arg(short, long, value_name = "N", value_delimiter = ',', env = "QRUN_THREADS", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: Vec<u16>,

    /// Type of the K cache (-ctk)
    #[arg(
        long,
        value_name = "TYPE",
        value_delimiter = ',',
        default_value = "f16"
    )]
    pub cache_type_k: Vec<String>,

    /// Type of the V cache (-ctv)
    #[arg(
        long,
        value_name = "TYPE",
        value_delimiter = ',',
        default_value = "f16"
    )]
    pub cache_type_v: Vec<String>,

    /// Copy weights to a layout made for this CPU, beside the file's map
    #[arg(long)]
    pub repack: bool,

    /// Repetitions of each test
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = parse_repetitions)]
    pub repetitions: usize,

    /// Also measure greedy text with so many guesses before each pass: numbers, or `auto`; and what the draft head
    /// adds to a prompt
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = parse_guesses)]
    pub spec: Vec<crate::cmd::bench::Guesses>,

    /// At most this many guesses with `--spec auto`
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub draft_max: u8,

    /// Draft among the N most frequent tokens and the added ones only [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub spec_draft_vocab: Option<u32>,

    /// Take guesses to be right at these rates (one for each place, with all before it); synthetic models have rates
    /// that are common in text
    #[arg(long, value_name = "RATES", value_delimiter = ',')]
    pub spec_synth_rates: Vec<f64>,

    /// Also measure the time to the first token
    #[arg(long)]
    pub ttft: bool,

    /// Only decode, for so many minutes, and show the speed over time
    #[arg(long, value_name = "MIN", value_parser = parse_minutes)]
    pub sustained: Option<f64>,

    /// How the results are printed
    #[arg(short, long, value_name = "FORMAT", value_enum, default_value = "md")]
    pub output: crate::cmd::bench::Format,

    /// Keep the results in a file, as JSON
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,

    /// Compare with results that were kept, and mark what is outside of the noise
    #[arg(long, value_name = "FILE")]
    pub against: Option<PathBuf>,

    /// Also run llama.cpp's llama-bench, from PATH or the place given, before and after
    #[arg(
        long,
        value_name = "PROGRAM",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "llama-bench"
    )]
    pub compare: Option<String>,

    /// Show what ggml logs, and the whole chain of causes of an error
    #[arg(short, long)]
    pub verbose: bool,
}

fn parse_pg(text: &str) -> Result<(usize, usize), String> {
    let wrong = || "expected two numbers above 0, such as 512,128".to_owned();
    let (p, n) = text.split_once(',').ok_or_else(wrong)?;
    match (p.parse(), n.parse()) {
        (Ok(p @ 1..), Ok(n @ 1..)) => Ok((p, n)),
        _ => Err(wrong()),
    }
}

fn parse_repetitions(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=1000) => Ok(n),
        _ => Err("expected a number from 1 to 1000".to_owned()),
    }
}

fn parse_minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if (0.01..=10_000.0).contains(&minutes) => Ok(minutes),
        _ => Err("expected minutes, from 0.01 on".to_owned()),
    }
}

fn parse_guesses(text: &str) -> Result<crate::cmd::bench::Guesses, String> {
    use crate::cmd::bench::Guesses;
    match parse_spec(text)? {
        Spec::Auto => Ok(Guesses::Auto),
        Spec::Fixed(n) => Ok(Guesses::Fixed(n.into())),
    }
}

/// Arguments of `gguf split`.
#[derive(Args, Debug)]
pub struct SplitArgs {
    /// GGUF file
    #[arg(value_name = "IN.gguf")]
    pub input: PathBuf,

    /// Name of the parts, without their numbers
    #[arg(value_name = "OUT")]
    pub output: PathBuf,

    /// Bytes of tensors in a part: a number with K, M or G for thousands, millions or billions
    #[arg(long, value_name = "N[K|M|G]", conflicts_with = "split_max_tensors")]
    pub split_max_size: Option<String>,

    /// Tensors in a part [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub split_max_tensors: Option<u32>,

    /// Print the parts, and write nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Arguments of `gguf merge`.
#[derive(Args, Debug)]
pub struct MergeArgs {
    /// Any part
    #[arg(value_name = "PART.gguf")]
    pub input: PathBuf,

    /// File to write
    #[arg(value_name = "OUT.gguf")]
    pub output: PathBuf,
}

/// Arguments of `gguf set`.
#[derive(Args, Debug)]
#[command(
    after_help = "A value keeps the type that its key has in the file. For a new key it is text, unless it reads as \
    true or false (bool), a whole number (u32, or i64 where that does not hold it), another number (f32), or a JSON list \
    of these. `KEY=TYPE:VALUE` chooses the type: u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, bool or str, also for \
    the elements of a list: general.tags='str:[\"a\",\"b\"]'.\n\nThe file is changed in place where the new metadata \
    takes the place of the old exactly; tensors are not touched. Otherwise it is written anew beside it, tensors copied \
    as they are, and replaced when complete."
)]
pub struct SetArgs {
    /// GGUF file
    pub file: PathBuf,

    /// Keys and their new values
    #[arg(value_name = "KEY=VALUE", required_unless_present = "remove")]
    pub set: Vec<String>,

    /// Remove a key (may be given several times)
    #[arg(long, value_name = "KEY")]
    pub remove: Vec<String>,

    /// Write to another file and leave this one as it is
    #[arg(short, long, value_name = "OUT.gguf")]
    pub output: Option<PathBuf>,
}

/// Arguments of `imatrix`.
#[derive(Args, Debug)]
pub struct ImatrixArgs {
    /// Model and device.
    #[command(flatten)]
    pub model: ModelArgs,

    /// The text
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,

    /// File to write
    #[arg(short, long, value_name = "FILE", default_value = "imatrix.gguf")]
    pub output: PathBuf,

    /// At most N chunks of the text
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunks: Option<u32>,
}

/// llama.cpp's flags of several letters after one dash, and what they are called here.
const SHORT_WORDS: [(&str, &str); 4] = [
    ("-pg", "--pg"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-sys", "--system-prompt"),
];

/// Flags that an environment variable sets too, which wins over the configuration file.
const VARIABLES: [(&str, &str); 4] = [
    ("model", "QRUN_MODEL"),
    ("device", "QRUN_DEVICE"),
    ("threads", "QRUN_THREADS"),
    ("ctx-size", "QRUN_CTX_SIZE"),
];

/// The arguments that the configuration file stands for, in its order; none where there is no file.
///
/// # Errors
/// When it is not TOML, or a value is neither text, number, flag nor a list of them.
pub fn config_args() -> anyhow::Result<Vec<std::ffi::OsString>> {
    use anyhow::Context as _;
    use etcetera::BaseStrategy as _;
    let path = match std::env::var_os("QRUN_CONFIG") {
        Some(path) if path.is_empty() => return Ok(Vec::new()),
        Some(path) => PathBuf::from(path),
        None => match etcetera::choose_base_strategy() {
            Ok(base) => base.config_dir().join("qrun/config.toml"),
            Err(_) => return Ok(Vec::new()),
        },
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    let table: toml::Table = text
        .parse()
        .with_context(|| format!("{}: not valid TOML", path.display()))?;
    let mut args = Vec::new();
    for (key, value) in &table {
        let variable = VARIABLES.iter().find(|(flag, _)| flag == key);
        if variable.is_some_and(|(_, name)| std::env::var_os(name).is_some()) {
            continue;
        }
        let values = match value {
            toml::Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        for value in values {
            match value {
                toml::Value::Boolean(true) => args.push(format!("--{key}").into()),
                toml::Value::Boolean(false) => {}
                toml::Value::String(text) => args.push(format!("--{key}={text}").into()),
                toml::Value::Integer(_) | toml::Value::Float(_) => {
                    args.push(format!("--{key}={value}").into());
                }
                _ => anyhow::bail!(
                    "{}: key `{key}` is neither text, number, true or false, nor a list of them",
                    path.display()
                ),
            }
        }
    }
    Ok(args)
}

/// Gives llama.cpp's short words their long names, which clap understands.
pub fn expand(args: impl Iterator<Item = std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    let long = |arg: std::ffi::OsString| {
        let word = SHORT_WORDS.iter().find(|(short, _)| arg == *short);
        word.map_or(arg, |(_, long)| long.into())
    };
    args.map(long).collect()
}
