//! The side of the run: a socket, two threads that sleep until somebody watches, and a slot for the newest figures.
//!
//! There is one per process, begun by [`start`] and ended by [`end`]. What a thread that decodes does here is to look
//! at a flag; only when it is set, a few times a second and while somebody watches, it leaves figures in the slot.

use std::fs;
use std::io::Write as _;
use std::mem::discriminant;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result};
use qrun::engine::Engine;
use qrun::generate::{self, FinishReason, Seen};
use qrun::session::Session;
use qrun::speculate::Speculator;

use super::folder;
use super::line::{
    Answer, Context, End, Hello, Line, Memory, Parts, Pass, Prompt, Reading, SCHEMA, Speculation,
};
use super::machine::Machine;
use crate::report;

/// Time between two looks into the slot.
const TICK: Duration = Duration::from_millis(200);
/// Looks into the slot between two measurements of the memory.
const MEMORY_EVERY: u32 = 5;
/// More watchers than this are turned away.
const MAX_WATCHERS: usize = 16;
/// Characters of the command line that are told.
const MAX_COMMAND: usize = 200;

static RUN: OnceLock<Arc<Run>> = OnceLock::new();

/// What is told of this process.
struct Run {
    path: PathBuf,
    start: Instant,
    /// Somebody watches.
    watched: AtomicBool,
    /// The slot is empty, and somebody watches.
    wanted: AtomicBool,
    /// The newest line of each kind.
    slot: Mutex<Vec<Line>>,
    audience: Mutex<Audience>,
    came: Condvar,
    hello: Mutex<Hello>,
    totals: Mutex<End>,
    /// Tokens of the answers that ended.
    tokens: AtomicU64,
    /// What this run holds in memory, and its context.
    held: Mutex<(Parts, Context)>,
    /// When the last line of the present answer was made, and how many tokens there were.
    last: Mutex<Option<(Instant, usize)>>,
}

/// Those who watch.
#[derive(Default)]
struct Audience {
    streams: Vec<UnixStream>,
    /// The newest line of each kind, for those who come later.
    known: Vec<Line>,
    ended: bool,
}

/// What a thread that panicked left behind is still good enough to be shown.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts a line in the place of the one of its kind.
fn put(lines: &mut Vec<Line>, line: Line) {
    lines.retain(|other| discriminant(other) != discriminant(&line));
    lines.push(line);
}

/// Offers the socket. Where it cannot be made the run goes on without; with `verbose` it is said why.
pub fn start(model: Option<&Path>, verbose: bool) {
    match Run::open(model) {
        Ok(run) => {
            let _ = RUN.set(run);
        }
        Err(error) if verbose => report::note(&format!(
            "`qrun watch` cannot see this run: {}",
            report::error_line(&error)
        )),
        Err(_) => {}
    }
}

/// Tells which model is loaded, and why its draft head is on or off.
pub fn loaded(engine: &Engine, session: &Session, draft_head: &str) {
    let Some(run) = RUN.get() else { return };
    let mut hello = lock(&run.hello);
    hello.model = name(engine.files().main().path());
    hello.loaded = true;
    hello.device = engine.backends()[0].device().name().to_owned();
    hello.context = session.params().n_ctx as u64;
    hello.draft_head = draft_head.to_owned();
    // Who comes later is told it anyway.
    if run.watched.load(Ordering::Relaxed) {
        put(&mut lock(&run.slot), Line::Hello(hello.clone()));
    }
    drop(hello);
    run.hold(session, 0);
}

/// Tells how far a prompt is: `done` of `total` tokens that had to be processed.
pub fn reading(done: usize, read: Reading, total: usize) {
    let Some(run) = RUN.get() else { return };
    let watched = run.watched.load(Ordering::Relaxed);
    if !watched || (done < total && !run.wanted.load(Ordering::Relaxed)) {
        return;
    }
    run.wanted.store(false, Ordering::Relaxed);
    *lock(&run.last) = None;
    run.leave(Line::Prompt(Prompt {
        t: run.now(),
        done: done as u64,
        total: total as u64,
        reused: read.reused,
        tps: rate(done as u64, read.seconds),
    }));
}

/// Tells of a pass; `snapshots` are bytes of saved states.
pub fn seen(seen: &Seen<'_>, snapshots: usize) {
    match *seen {
        Seen::Prompt { done, total, time } => {
            reading(done, Reading::new(done, 0, time), total);
        }
        Seen::Pass {
            speculator,
            session,
            n_tokens,
        } => {
            let Some(run) = RUN.get() else { return };
            if !run.wanted.load(Ordering::Relaxed) {
                return;
            }
            run.wanted.store(false, Ordering::Relaxed);
            let of = |s: &Speculator| Speculation::new(&s.stats(), s.depth());
            run.hold(session, snapshots);
            run.pass(n_tokens, speculator.map(of), session);
        }
    }
}

/// Tells that an answer ended, and what reading its prompt took.
pub fn answered(answer: &generate::Answer, read: Reading, session: &Session) {
    let Some(run) = RUN.get() else { return };
    let tokens = answer.tokens.len() as u64;
    if run.watched.load(Ordering::Relaxed) {
        let depth = answer.speculation.as_ref().map(|s| {
            let last = s.drafted.div_ceil(s.rounds.max(1));
            Speculation::new(s, last as usize)
        });
        run.pass(answer.tokens.len(), depth, session);
    }
    run.tokens.fetch_add(tokens, Ordering::Relaxed);
    *lock(&run.last) = None;
    let mut totals = lock(&run.totals);
    totals.answers += 1;
    totals.prompt_tokens += read.tokens;
    totals.prompt_s += read.seconds;
    totals.tokens += tokens;
    totals.decode_s += answer.decode_time.as_secs_f64();
    if let Some(stats) = &answer.speculation {
        totals.drafted += stats.drafted;
        totals.accepted += stats.accepted;
        totals.passes += stats.passes;
        totals.pass_tokens += stats.tokens;
    }
    if !run.watched.load(Ordering::Relaxed) {
        return;
    }
    run.leave(Line::Answer(Answer {
        t: run.now(),
        answers: totals.answers,
        prompt_tokens: read.tokens,
        reused: read.reused,
        prompt_s: read.seconds,
        tokens,
        decode_s: answer.decode_time.as_secs_f64(),
        finish_reason: match answer.finish_reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
        .to_owned(),
    }));
}

/// Tells that the run ends, and takes the socket away. Only the first call counts.
pub fn end(how: &str) {
    if let Some(run) = RUN.get() {
        run.end(how);
    }
}

fn rate(n: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        n as f64 / seconds
    } else {
        0.0
    }
}

fn name(path: &Path) -> String {
    let name = path.file_stem().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The command line, short and in one line, of whole paths only the last part.
fn command() -> String {
    let mut args = std::env::args_os();
    let program = args.next().map(PathBuf::from).unwrap_or_default();
    let mut text = name(&program);
    for arg in args {
        let path = Path::new(&arg);
        let shown = path
            .file_name()
            .filter(|_| path.is_absolute() && path.exists());
        text.push(' ');
        text.push_str(&shown.unwrap_or(&arg).to_string_lossy());
    }
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MAX_COMMAND).map(plain).collect()
}

impl Run {
    fn open(model: Option<&Path>) -> Result<Arc<Self>> {
        let pid = std::process::id();
        let folder = folder::made()?;
        let path = folder::socket(&folder, pid);
        // Under its name there is never a socket that nobody listens to yet, which would count as left behind.
        let new = path.with_extension("new");
        let _ = fs::remove_file(&new);
        let listener = UnixListener::bind(&new)
            .and_then(|listener| {
                fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
                fs::rename(&new, &path)?;
                Ok(listener)
            })
            .with_context(|| format!("making the socket {}", path.display()))?;
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let run = Arc::new(Self {
            path,
            start: Instant::now(),
            watched: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            slot: Mutex::default(),
            audience: Mutex::default(),
            came: Condvar::new(),
            hello: Mutex::new(Hello {
                schema: SCHEMA,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid,
                command: command(),
                started: since_1970.unwrap_or_default().as_secs_f64(),
                model: model.map(name).unwrap_or_default(),
                ..Hello::default()
            }),
            totals: Mutex::default(),
            tokens: AtomicU64::new(0),
            held: Mutex::default(),
            last: Mutex::default(),
        });
        let (at_door, at_slot) = (run.clone(), run.clone());
        let thread = |name: &str| thread::Builder::new().name(name.to_owned());
        let begun = thread("watch-door")
            .spawn(move || at_door.welcome_all(&listener))
            .and_then(|_| thread("watch").spawn(move || at_slot.tell_all()));
        if begun.is_err() {
            let _ = fs::remove_file(&run.path);
        }
        begun.context("starting the threads that tell watchers")?;
        Ok(run)
    }

    fn now(&self) -> f64 {
        (self.start.elapsed().as_secs_f64() * 1e3).round() / 1e3
    }

    /// Leaves a line in the slot, unless it is being emptied at this moment.
    fn leave(&self, line: Line) {
        if let Ok(mut slot) = self.slot.try_lock() {
            put(&mut slot, line);
        }
    }

    fn hold(&self, session: &Session, snapshots: usize) {
        let weights = session.engine().weight_bytes();
        let bytes = session.bytes();
        let parts = Parts {
            weights_mapped: weights.mapped as u64,
            weights_copied: (weights.copied + weights.repacked) as u64,
            kv: bytes.kv as u64,
            state: (bytes.state + bytes.rollback + bytes.compute) as u64,
            snapshots: snapshots as u64,
        };
        *lock(&self.held) = (parts, context(session));
    }

    fn pass(&self, n_tokens: usize, speculation: Option<Speculation>, session: &Session) {
        let now = Instant::now();
        let mut last = lock(&self.last);
        let tps = last
            .filter(|(_, tokens)| *tokens < n_tokens)
            .map(|(at, tokens)| rate((n_tokens - tokens) as u64, (now - at).as_secs_f64()));
        *last = Some((now, n_tokens));
        self.leave(Line::Pass(Pass {
            t: self.now(),
            tokens: n_tokens as u64,
            total_tokens: self.tokens.load(Ordering::Relaxed) + n_tokens as u64,
            tps,
            speculation,
            context: context(session),
        }));
    }

    /// Lets in whoever comes.
    fn welcome_all(&self, listener: &UnixListener) {
        // Others that died without removing their sockets are cleaned away by being knocked at.
        for (pid, path) in folder::sockets().unwrap_or_default() {
            if pid != std::process::id() {
                let _ = folder::connect(&path);
            }
        }
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else {
                thread::sleep(TICK);
                continue;
            };
            let mut audience = lock(&self.audience);
            if audience.ended || audience.streams.len() >= MAX_WATCHERS {
                continue;
            }
            // Before the greeting is read: one that changes from now on is told through the slot.
            self.watched.store(true, Ordering::Relaxed);
            let hello = Line::Hello(lock(&self.hello).clone());
            let lines: String = std::iter::once(&hello)
                .chain(&audience.known)
                .map(text)
                .collect();
            let told = stream
                .set_nonblocking(true)
                .and_then(|()| stream.write_all(lines.as_bytes()));
            if told.is_ok() {
                audience.streams.push(stream);
                self.wanted.store(true, Ordering::Relaxed);
                self.came.notify_all();
            } else if audience.streams.is_empty() {
                self.watched.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Looks into the slot as long as somebody watches.
    fn tell_all(&self) {
        let mut machine = Machine::new();
        let mut ticks = 0;
        loop {
            let mut audience = lock(&self.audience);
            while audience.streams.is_empty() {
                self.watched.store(false, Ordering::Relaxed);
                self.wanted.store(false, Ordering::Relaxed);
                ticks = 0;
                audience = self
                    .came
                    .wait(audience)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            if audience.ended {
                return;
            }
            drop(audience);
            if ticks % MEMORY_EVERY == 0
                && let Some(memory) = self.measure(&mut machine)
            {
                put(&mut lock(&self.slot), Line::Memory(memory));
            }
            ticks += 1;
            let lines = std::mem::take(&mut *lock(&self.slot));
            self.wanted.store(true, Ordering::Relaxed);
            let mut audience = lock(&self.audience);
            if audience.ended {
                return;
            }
            audience.tell(lines);
            drop(audience);
            thread::sleep(TICK);
        }
    }

    fn measure(&self, machine: &mut Machine) -> Option<Memory> {
        let (parts, context) = *lock(&self.held);
        let device = lock(&self.hello).device.clone();
        let device = Some(device.as_str()).filter(|name| !name.is_empty());
        let memory = machine.memory(parts, context, device, self.now())?;
        let mut totals = lock(&self.totals);
        totals.peak_memory = totals.peak_memory.max(Some(memory.used));
        totals.zone = totals.zone.max(memory.zone);
        Some(memory)
    }

    fn end(&self, how: &str) {
        let mut audience = lock(&self.audience);
        if std::mem::replace(&mut audience.ended, true) {
            return;
        }
        let _ = fs::remove_file(&self.path);
        let mut lines = std::mem::take(&mut *lock(&self.slot));
        lines.push(Line::End(End {
            t: self.now(),
            ended: how.to_owned(),
            ..lock(&self.totals).clone()
        }));
        audience.tell(lines);
        audience.streams.clear();
    }
}

fn context(session: &Session) -> Context {
    Context {
        used: session.n_past() as u64,
        limit: session.params().n_ctx as u64,
        kv_bytes: (session.n_past() * session.token_bytes()) as u64,
    }
}

fn text(line: &Line) -> String {
    // These types can always be written.
    serde_json::to_string(line).map_or_else(|_| String::new(), |text| text + "\n")
}

impl Audience {
    /// Writes lines to all. Who does not read is dropped when its socket is full: half a line cannot be taken back.
    fn tell(&mut self, lines: Vec<Line>) {
        if lines.is_empty() {
            return;
        }
        let all: String = lines.iter().map(text).collect();
        self.streams
            .retain_mut(|stream| stream.write_all(all.as_bytes()).is_ok());
        for line in lines {
            if !matches!(line, Line::Hello(_)) {
                put(&mut self.known, line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_does_not_read_is_dropped_and_others_stay() {
        use std::io::Read as _;
        let (silent, _kept_open) = UnixStream::pair().unwrap();
        let (gone, other_end) = UnixStream::pair().unwrap();
        let (good, mut reader) = UnixStream::pair().unwrap();
        drop(other_end);
        let mut audience = Audience::default();
        for stream in [silent, gone, good] {
            stream.set_nonblocking(true).unwrap();
            audience.streams.push(stream);
        }
        let read = Arc::new(AtomicU64::new(0));
        let count = read.clone();
        let reading = thread::spawn(move || {
            let (mut all, mut buffer) = (Vec::new(), [0; 1 << 14]);
            loop {
                match reader.read(&mut buffer).unwrap() {
                    0 => return String::from_utf8(all).unwrap(),
                    n => all.extend_from_slice(&buffer[..n]),
                }
                count.store(all.len() as u64, Ordering::Release);
            }
        });
        let start = Instant::now();
        let (lines, mut told) = (4000, 0);
        for tokens in 0..lines {
            let both = vec![
                Line::Pass(Pass {
                    tokens,
                    ..Pass::default()
                }),
                Line::Memory(Memory::default()),
            ];
            told += both.iter().map(|line| text(line).len() as u64).sum::<u64>();
            audience.tell(both);
            if tokens == 0 {
                assert_eq!(audience.streams.len(), 2, "who went away is forgotten");
            }
            // The good one has time to read.
            while tokens % 50 == 0 && read.load(Ordering::Acquire) < told {
                thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(start.elapsed() < Duration::from_secs(10));
        assert_eq!(audience.streams.len(), 1);
        assert_eq!(audience.known.len(), 2, "one line of each kind is kept");
        drop(audience);
        let all = reading.join().unwrap();
        assert_eq!(all.lines().count() as u64, 2 * lines);
        let last: Line = serde_json::from_str(all.lines().rev().nth(1).unwrap()).unwrap();
        assert!(matches!(last, Line::Pass(pass) if pass.tokens == lines - 1));
    }

    #[test]
    fn only_the_newest_line_of_a_kind_is_left() {
        let pass = |tokens| {
            Line::Pass(Pass {
                tokens,
                ..Pass::default()
            })
        };
        let mut lines = vec![pass(1), Line::Memory(Memory::default())];
        put(&mut lines, pass(2));
        assert_eq!(lines, [Line::Memory(Memory::default()), pass(2)]);
    }
}
