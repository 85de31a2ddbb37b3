//! One sequence of tokens and everything the model remembers of it.
//!
//! A session is driven by [`Session::eval`]; it can be saved, put back and forked at any token. The draft head's
//! keys and values are kept up when the session was made with `mtp`: in every pass of several tokens, and, for passes
//! of one, before the head is asked the next time. Otherwise the head is off for this session and its state does not
//! exist, so it can never be stale.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ggml_metal::{Backend, DType, DeviceKind};

use crate::engine::Engine;
use crate::model::forward::{
    CatchUp, DraftGraph, DraftKeeps, DraftShape, DraftVocab, HeadPass, TrunkGraph, TrunkShape,
};
use crate::state::{KV_PAD, KvTypes, MAX_OWED, SavedState, State};

/// Graphs kept for reuse, besides one for each way to go on after a draft: some widths of prompt chunks.
const MAX_GRAPHS: usize = 6;
/// Positions are 32-bit numbers on the device.
const MAX_CTX: usize = 1 << 30;
/// Passes up to this width, and those that check drafts, are kept beside each other.
const NARROW: usize = 8;
/// Cells allocated at first; doubled as the context fills.
const FIRST_CELLS: usize = 1024;
/// Narrow passes of a GPU look at a multiple of this many cells, or of an eighth of them all: looking at hidden cells costs
/// it little, while each new graph is described, allocated and recorded anew.
const GPU_KV_PAD: usize = 1024;

/// How a session runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SessionParams {
    /// Context limit in tokens; 0 means the engine's, which is the model's training length unless it was lowered.
    pub n_ctx: usize,
    /// Prompt tokens in one pass.
    pub n_batch: usize,
    /// Types of keys and values.
    pub kv: KvTypes,
    /// Keep the draft head's state up.
    pub mtp: bool,
    /// Tokens of one pass that [`Session::reject`] can take back; costs as many copies of the recurrent state.
    pub n_rollback: usize,
    /// The tokens that the draft head chooses from; all where there is none.
    pub draft_vocab: Option<DraftVocab>,
}

impl Default for SessionParams {
    fn default() -> Self {
        Self {
            n_ctx: 0,
            n_batch: 512,
            kv: KvTypes {
                k: DType::F16,
                v: DType::F16,
            },
            mtp: false,
            n_rollback: 0,
            draft_vocab: None,
        }
    }
}

/// Set from another thread or a signal to stop a session between chunks and tokens.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks for a stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// True once a stop was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Which tokens' logits [`Session::eval`] returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outputs {
    /// None: only the state is wanted.
    None,
    /// The last token's.
    Last,
    /// Those of the tokens from this one on, counted in the tokens of the call.
    From(usize),
    /// Every token's.
    All,
}

/// Why [`Session::eval`] stopped.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The token was cancelled; what was processed until then stays in the session.
    #[error("cancelled")]
    Cancelled,
    /// The tokens do not fit. Nothing was processed.
    #[error("{n_past} + {n_new} tokens do not fit into a context of {n_ctx}; raise it with `-c`")]
    ContextFull {
        /// Tokens in the session.
        n_past: usize,
        /// Tokens asked for.
        n_new: usize,
        /// The limit.
        n_ctx: usize,
    },
    /// The model computed a value that is not a number: the file is damaged, or a kernel failed.
    #[error("the logits at position {position} are not finite; the model file may be damaged")]
    NonFinite {
        /// The position.
        position: usize,
    },
    /// A token that the vocabulary does not have.
    #[error("token {token} is outside the vocabulary of {n_vocab}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Tokens in the vocabulary.
        n_vocab: i64,
    },
    /// The device failed. The session's state is undefined; make a new one.
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}

/// A saved session: tokens and what they left behind, in host memory.
#[derive(Clone)]
pub struct Snapshot {
    tokens: Vec<u32>,
    state: SavedState,
}

impl Snapshot {
    /// The tokens it covers.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// What the tokens left behind: of each linear layer the window of its convolution and its state, of the draft
    /// head its hidden state, all F32; then keys and values of each full-attention layer and of the draft head, in
    /// the session's types, a row for each token.
    pub fn parts(&self) -> &[Vec<u8>] {
        self.state.parts()
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.state.bytes() + self.tokens.len() * size_of::<u32>()
    }
}

/// A draft whose tokens were drawn at random.
#[derive(Clone, Debug, Default)]
pub struct DrawnDraft {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// What each was drawn from: its step's best tokens with their logits, as many for each step.
    pub best: Vec<(u32, f32)>,
}

/// Bytes that a session takes on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionBytes {
    /// Keys and values as allocated now, the draft head's included.
    pub kv: usize,
    /// The recurrent state, and the draft head's hidden state.
    pub state: usize,
    /// Older states, from which a rejected draft is undone.
    pub rollback: usize,
    /// Intermediate results of all graphs that are kept.
    pub compute: usize,
}

/// See [`Session::plan_full`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlannedBytes {
    /// On the device.
    pub session: SessionBytes,
    /// Intermediate results in the CPU's memory, where that is not the device's.
    pub host_compute: usize,
    /// What growing needs for a moment on the device, and as much on the host.
    pub growth: usize,
}

/// Bytes of graphs by where they lie.
#[derive(Default)]
struct Compute {
    device: usize,
    host: usize,
}

impl Compute {
    fn add(&mut self, n: usize, bytes: &[usize]) {
        if let [device, host @ ..] = bytes {
            self.device += n * device;
            self.host += n * host.iter().sum::<usize>();
        }
    }
}

/// One sequence.
pub struct Session {
    engine: Arc<Engine>,
    params: SessionParams,
    state: State,
    tokens: Vec<u32>,
    /// Most recently used last.
    graphs: Vec<TrunkGraph>,
    drafts: Vec<DraftGraph>,
    /// Newest tokens of the last pass that were taken back: the next one begins from an older state.
    back: usize,
    /// How many more can be taken back.
    can_reject: usize,
    /// Newest tokens whose entries the draft head does not have yet, and `back` when the first of them was processed.
    owed: usize,
    owed_back: usize,
    logits: Vec<f32>,
    best: Vec<(u32, f32)>,
    /// Use [`Session::eval_best`] on any device.
    always_best: bool,
    head_logits: Vec<f32>,
    compute_time: Duration,
}

impl Session {
    /// An empty session.
    ///
    /// # Errors
    /// When memory runs out, the key and value types do not suit the model or device, or `mtp` is asked of a
    /// model without a draft head.
    pub fn new(engine: Arc<Engine>, mut params: SessionParams) -> anyhow::Result<Self> {
        let config = engine.config();
        if params.n_ctx == 0 {
            params.n_ctx = engine.n_ctx();
        }
        anyhow::ensure!(
            params.n_ctx <= MAX_CTX,
            "a context of {} tokens is more than the {MAX_CTX} that can be counted; lower `-c`",
            params.n_ctx
        );
        params.n_batch = params.n_batch.max(1);
        anyhow::ensure!(
            !params.mtp || engine.mtp_status().on,
            "the draft head cannot be kept up: {}",
            engine.mtp_status().reason
        );
        let backend = &engine.backends()[0];
        anyhow::ensure!(
            !backend.device().is_metal() || ![params.kv.k, params.kv.v].contains(&DType::IQ4_NL),
            "Metal's attention does not read {} keys and values; choose another type with `-ctk` and `-ctv`",
            DType::IQ4_NL
        );
        anyhow::ensure!(
            params.kv.k == params.kv.v || !backend.device().is_metal(),
            "keys are {} and values {}: Metal's attention wants one type for both; set `-ctk` and `-ctv` alike",
            params.kv.k,
            params.kv.v
        );
        let n_cells = params.n_ctx.min(FIRST_CELLS);
        if let Some(vocab) = params.draft_vocab {
            anyhow::ensure!(
                0 < vocab.n_first
                    && vocab.n_first <= vocab.last_from
                    && vocab.last_from <= config.n_vocab,
                "a draft vocabulary of ids below {} and from {} on does not fit a vocabulary of {}",
                vocab.n_first,
                vocab.last_from,
                config.n_vocab
            );
        }
        let n_slots = params.n_rollback + 1;
        let state = State::new(config, backend, params.kv, n_cells, n_slots, params.mtp)?;
        Ok(Self {
            params,
            state,
            tokens: Vec::new(),
            graphs: Vec::new(),
            drafts: Vec::new(),
            back: 0,
            can_reject: 0,
            owed: 0,
            owed_back: 0,
            logits: Vec::new(),
            best: Vec::new(),
            always_best: false,
            head_logits: Vec::new(),
            compute_time: Duration::ZERO,
            engine,
        })
    }

    /// The model.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// How it runs, with the context limit filled in.
    pub fn params(&self) -> &SessionParams {
        &self.params
    }

    /// The tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many tokens there are.
    pub fn n_past(&self) -> usize {
        self.tokens.len()
    }

    /// What it takes on the device now.
    pub fn bytes(&self) -> SessionBytes {
        let (kv, recurrent, rollback) = self.state.bytes();
        let trunk = self.graphs.iter().map(|g| g.graph().compute_bytes());
        let draft = self.drafts.iter().map(|g| g.graph().compute_bytes());
        SessionBytes {
            kv,
            state: recurrent - rollback,
            rollback,
            compute: trunk.chain(draft).sum(),
        }
    }

    /// Parts that the graph which has most of them is split into: more than one where the device cannot compute all of
    /// it, and intermediate results travel to the CPU and back.
    pub fn n_splits(&self) -> usize {
        let trunk = self.graphs.iter().map(|g| g.graph().n_splits());
        let draft = self.drafts.iter().map(|g| g.graph().n_splits());
        trunk.chain(draft).max().unwrap_or(1)
    }

    /// What a full session takes, by filling one that is only planned (see [`crate::engine::Engine::plan`]): room for
    /// the whole context, the widest pass, which gives `n_outputs` rows of logits, and every pass and draft of
    /// speculation. Also the bytes that growing took at its last step, which are free again when passes need theirs.
    ///
    /// # Errors
    /// When the graphs cannot be described, or the session is no planned one.
    pub fn plan_full(&mut self, n_outputs: usize) -> anyhow::Result<PlannedBytes> {
        anyhow::ensure!(
            self.backend().plans(),
            "only a planned session can be filled without tokens"
        );
        let n_ctx = self.params.n_ctx;
        let n_kv = n_ctx.next_multiple_of(KV_PAD);
        let before = self.state.n_cells();
        if n_kv > before {
            self.state.grow(&self.backend().clone(), n_kv, 0)?;
        }
        let trunk = |n_tokens: usize, n_outputs: usize, session: &mut Self| {
            let shape = TrunkShape {
                n_tokens,
                n_kv,
                n_outputs: n_outputs.min(n_tokens),
                best: 0,
                head: session.head_pass(n_tokens),
                back: 0,
                unsplit: session.backend().device().kind() == DeviceKind::Cpu,
            };
            let bytes = session.graph(shape)?.graph().compute_bytes_each();
            anyhow::Ok(bytes)
        };
        let mut compute = Compute::default();
        let widest = self.params.n_batch.min(n_ctx);
        compute.add(1, &trunk(widest, n_outputs, self)?);
        let n_slots = self.state.n_slots();
        // A pass may begin from any of the slots, each with a graph of its own.
        for n_tokens in 1..=n_slots.min(n_ctx) {
            compute.add(n_slots, &trunk(n_tokens, n_tokens, self)?);
        }
        if self.params.mtp {
            for depth in 1..n_slots.min(n_ctx) {
                let shape = DraftShape {
                    depth,
                    n_kv,
                    back: 0,
                    vocab: self.params.draft_vocab,
                    keeps: DraftKeeps::Tokens,
                };
                compute.add(
                    n_slots,
                    &self.draft_graph(shape)?.graph().compute_bytes_each(),
                );
            }
        }
        let (kv, recurrent, rollback) = self.state.bytes();
        // Half of the largest tensor is there twice when it last grows.
        let growth = if n_kv > before {
            self.state.largest_rows() / 2
        } else {
            0
        };
        Ok(PlannedBytes {
            session: SessionBytes {
                kv,
                state: recurrent - rollback,
                rollback,
                compute: compute.device,
            },
            host_compute: compute.host,
            growth,
        })
    }

    /// What all passes so far took, without building graphs, copying results and choosing tokens.
    pub fn compute_time(&self) -> Duration {
        self.compute_time
    }

    /// Processes `tokens` in chunks and returns the logits asked for, rows of `n_vocab`.
    ///
    /// # Errors
    /// See [`EvalError`].
    pub fn eval(
        &mut self,
        tokens: &[u32],
        outputs: Outputs,
        cancel: &CancelToken,
    ) -> Result<&[f32], EvalError> {
        self.run(tokens, outputs, false, 0, cancel)?;
        Ok(&self.logits)
    }

    /// As [`Session::eval`] of the tokens from `first` on, but returns only the `n_best` best tokens of each row with
    /// their logits, as the device finds them, in no order; at most as many as the vocabulary has. Among equal logits
    /// the device chooses.
    ///
    /// # Errors
    /// See [`EvalError`].
    pub fn eval_best(
        &mut self,
        tokens: &[u32],
        first: usize,
        n_best: usize,
        cancel: &CancelToken,
    ) -> Result<&[(u32, f32)], EvalError> {
        self.run(tokens, Outputs::From(first), false, n_best.max(1), cancel)?;
        Ok(&self.best)
    }

    /// The whole rows of the last pass that gave several best tokens of each, as many rows as that pass had.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn read_rows(&mut self) -> anyhow::Result<&[f32]> {
        self.logits.clear();
        if let Some(graph) = self.graphs.last() {
            graph.read_logits(&mut self.logits)?;
        }
        Ok(&self.logits)
    }

    /// The tokens that the last [`Session::eval_best`] returned.
    pub fn best(&self) -> &[(u32, f32)] {
        &self.best
    }

    /// True where [`Session::eval_best`] of so many tokens is faster than looking through the logits: one on all GPUs,
    /// more where rows would have to be sent from a memory of its own.
    pub fn finds_best(&self, n_best: usize) -> bool {
        let device = self.backend().device();
        let own_memory = device.kind() == DeviceKind::Gpu && !device.maps_host_memory();
        self.always_best || own_memory || n_best == 1 && device.kind() == DeviceKind::Gpu
    }

    /// Makes [`Session::finds_best`] true, to try on any device what only some do by themselves.
    pub fn always_find_best(&mut self) {
        self.always_best = true;
    }

    /// The logits that the last [`Session::eval`] returned.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// As [`Session::eval`] for every token, with the draft head's logits too: its row `i` is the guess for the
    /// token after `tokens[i]`, made from the hidden state before it. Row 0 of an empty session means nothing.
    ///
    /// # Errors
    /// See [`EvalError`]; also when the session does not keep up the draft head.
    pub fn eval_with_head(
        &mut self,
        tokens: &[u32],
        cancel: &CancelToken,
    ) -> Result<(&[f32], &[f32]), EvalError> {
        if !self.params.mtp {
            return Err(EvalError::Failed(anyhow::anyhow!(
                "this session does not keep up the draft head"
            )));
        }
        self.run(tokens, Outputs::All, true, 0, cancel)?;
        Ok((&self.logits, &self.head_logits))
    }

    fn run(
        &mut self,
        tokens: &[u32],
        outputs: Outputs,
        head_logits: bool,
        n_best: usize,
        cancel: &CancelToken,
    ) -> Result<(), EvalError> {
        let n_best = n_best.min(self.engine.config().n_vocab as usize);
        self.logits.clear();
        self.best.clear();
        self.head_logits.clear();
        self.check_tokens(tokens)?;
        self.make_room(tokens.len())?;

        for (i, chunk) in tokens.chunks(self.params.n_batch).enumerate() {
            if cancel.is_cancelled() {
                return Err(EvalError::Cancelled);
            }
            let first_wanted = match outputs {
                Outputs::None => tokens.len(),
                Outputs::Last => tokens.len() - 1,
                Outputs::From(first) => first,
                Outputs::All => 0,
            };
            let end = i * self.params.n_batch + chunk.len();
            let n_outputs = end.saturating_sub(first_wanted).min(chunk.len());
            let n_past = self.n_past();
            let head = if head_logits {
                HeadPass::Logits
            } else {
                self.head_pass(chunk.len())
            };
            if head != HeadPass::Owe || self.owed == MAX_OWED {
                self.catch_up()?;
            }
            let n_owed = self.owed;
            let shape = TrunkShape {
                n_tokens: chunk.len(),
                n_kv: self.n_kv(n_past + chunk.len(), chunk.len() <= self.n_narrow()),
                n_outputs,
                best: if n_outputs > 0 { n_best } else { 0 },
                head,
                back: self.back,
                unsplit: self.backend().device().kind() == DeviceKind::Cpu,
            };
            let graph = self.graph(shape)?;
            let start = Instant::now();
            graph.compute(chunk, n_past, n_owed)?;
            self.compute_time += start.elapsed();
            if head == HeadPass::Owe {
                if self.owed == 0 {
                    self.owed_back = self.back;
                }
                self.owed += 1;
            }
            self.back = 0;
            self.can_reject = if chunk.len() <= self.state.n_slots() {
                chunk.len() - 1
            } else {
                0
            };
            let first = self.logits.len();
            // The graph just used is the last in the list.
            if let Some(graph) = self.graphs.last() {
                if n_best == 0 {
                    graph.read_logits(&mut self.logits)?;
                }
                graph.read_best(&mut self.best)?;
                graph.read_head_logits(&mut self.head_logits)?;
            }
            self.tokens.extend_from_slice(chunk);
            self.check_finite(first, n_outputs, n_best)?;
        }
        Ok(())
    }

    /// What the draft head does in a pass of so many tokens.
    fn head_pass(&self, n_tokens: usize) -> HeadPass {
        match n_tokens {
            _ if !self.params.mtp => HeadPass::Off,
            1 => HeadPass::Owe,
            _ => HeadPass::Keys,
        }
    }

    /// Gives the draft head the entries that it lags behind.
    fn catch_up(&mut self) -> anyhow::Result<()> {
        if self.owed == 0 {
            return Ok(());
        }
        let first = self.n_past() - self.owed;
        // Rarely needed, small, and of another width each time: not kept.
        let graph = CatchUp::new(
            self.engine.config(),
            self.engine.weights().for_width(self.owed),
            &self.state,
            self.engine.backends(),
            (self.owed, self.owed_back),
        )?;
        let start = Instant::now();
        if let Some(mut graph) = graph {
            graph.compute(&self.tokens[first..], first)?;
        }
        self.compute_time += start.elapsed();
        self.owed = 0;
        Ok(())
    }

    /// Takes back the newest `n` tokens of the last pass, as if they had never been processed.
    ///
    /// # Errors
    /// When the last pass was not wider than that, or its states were not kept (see
    /// [`SessionParams::n_rollback`]).
    pub fn reject(&mut self, n: usize) -> anyhow::Result<()> {
        anyhow::ensure!(
            n <= self.can_reject,
            "{n} tokens cannot be taken back, only {} of the last pass can",
            self.can_reject
        );
        self.can_reject -= n;
        self.back += n;
        self.tokens.truncate(self.tokens.len() - n);
        Ok(())
    }

    /// Drafts `depth` tokens after `token`, which is the next to be processed, with the head alone. Returns the
    /// tokens and the head's logits, a row a step. The session's tokens stay as they are.
    ///
    /// # Errors
    /// See [`EvalError`]; also when the session does not keep up the draft head.
    pub fn draft(&mut self, token: u32, depth: usize) -> Result<(Vec<u32>, &[f32]), EvalError> {
        let drafted = self.run_draft(token, depth, DraftKeeps::Logits, &[])?;
        Ok((drafted, &self.head_logits))
    }

    /// As [`Session::draft`], keeping nothing but the tokens.
    ///
    /// # Errors
    /// See [`Session::draft`].
    pub fn draft_tokens(&mut self, token: u32, depth: usize) -> Result<Vec<u32>, EvalError> {
        self.run_draft(token, depth, DraftKeeps::Tokens, &[])
    }

    /// As [`Session::draft`], with the probability that the head gives each token.
    ///
    /// # Errors
    /// See [`Session::draft`].
    pub fn draft_with_confidence(
        &mut self,
        token: u32,
        depth: usize,
    ) -> Result<(Vec<u32>, &[f32]), EvalError> {
        let drafted = self.run_draft(token, depth, DraftKeeps::Confidence, &[])?;
        Ok((drafted, &self.head_logits))
    }

    /// As [`Session::draft`], with each step choosing among its `k` best tokens the one whose logit is largest after
    /// a row of `noise` (`k` for each step) was added.
    ///
    /// # Errors
    /// See [`Session::draft`].
    pub fn draft_with_noise(
        &mut self,
        token: u32,
        k: usize,
        noise: &[f32],
    ) -> Result<DrawnDraft, EvalError> {
        let depth = noise.len() / k.max(1);
        let tokens = self.run_draft(token, depth, DraftKeeps::Best(k), noise)?;
        let best = match self.drafts.last() {
            Some(graph) if depth > 0 => graph.read_best()?,
            _ => Vec::new(),
        };
        Ok(DrawnDraft { tokens, best })
    }

    fn run_draft(
        &mut self,
        token: u32,
        depth: usize,
        keeps: DraftKeeps,
        noise: &[f32],
    ) -> Result<Vec<u32>, EvalError> {
        self.check_tokens(&[token])?;
        self.head_logits.clear();
        if depth == 0 {
            return Ok(Vec::new());
        }
        self.make_room(depth)?;
        self.catch_up()?;
        let n_past = self.n_past();
        let shape = DraftShape {
            depth,
            n_kv: self.n_kv(n_past + depth, true),
            back: self.back,
            vocab: self.params.draft_vocab,
            keeps,
        };
        let start = Instant::now();
        let drafted = self.draft_graph(shape)?.compute(token, n_past, noise)?;
        self.compute_time += start.elapsed();
        // The graph just used is the last in the list.
        if let Some(graph) = self.drafts.last() {
            graph.read_kept(&mut self.head_logits)?;
        }
        Ok(drafted)
    }

    /// The draft chain of that shape, made if there is none, moved to the end of the list.
    fn draft_graph(&mut self, shape: DraftShape) -> anyhow::Result<&mut DraftGraph> {
        let near = self.n_kv_near();
        self.drafts.retain(|g| near.contains(&g.shape().n_kv));
        if let Some(at) = self.drafts.iter().position(|g| g.shape() == shape) {
            let graph = self.drafts.remove(at);
            self.drafts.push(graph);
        } else {
            if self.drafts.len() >= self.max_graphs() {
                self.drafts.remove(0);
            }
            let graph = DraftGraph::new(
                self.engine.config(),
                self.engine.weights().for_width(1),
                &self.state,
                self.engine.backends(),
                shape,
            )?;
            self.drafts.push(
                graph.ok_or_else(|| anyhow::anyhow!("this session has no draft head to use"))?,
            );
        }
        let last = self.drafts.len() - 1;
        Ok(&mut self.drafts[last])
    }

    /// The widest pass of those that decode: single tokens, and drafts that are checked.
    fn n_narrow(&self) -> usize {
        NARROW.max(self.state.n_slots())
    }

    /// Cells that attention looks at when there will be `n` tokens: more than those, so that a graph serves many
    /// passes.
    fn n_kv(&self, n: usize, narrow: bool) -> usize {
        let coarse = narrow && self.backend().device().kind() == DeviceKind::Gpu;
        padded(n, coarse, self.state.n_cells())
    }

    /// What [`Session::n_kv`] is for the passes around here: near a border it changes to and fro as drafts are taken
    /// back.
    fn n_kv_near(&self) -> RangeInclusive<usize> {
        let fewest = self.n_past().saturating_sub(self.n_narrow()).max(1);
        self.n_kv(fewest, true)..=self.n_kv(self.n_past() + self.n_narrow(), true)
    }

    /// A chain of drafts can end in as many ways as it has steps, and one more; passes have as many widths.
    fn max_graphs(&self) -> usize {
        MAX_GRAPHS + self.state.n_slots() * self.state.n_slots().min(8)
    }

    /// Copies the session's state, to be put back later or into another session of the same shape.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn snapshot(&mut self) -> anyhow::Result<Snapshot> {
        self.catch_up()?;
        Ok(Snapshot {
            tokens: self.tokens.clone(),
            state: self.state.save(self.n_past(), self.back)?,
        })
    }

    /// A snapshot of this session's kind, from tokens and what [`Snapshot::parts`] gave for them.
    ///
    /// # Errors
    /// When these are not the parts that so many tokens leave behind in a session of this shape, or a token is
    /// outside the vocabulary.
    pub fn snapshot_of(&self, tokens: Vec<u32>, parts: Vec<Vec<u8>>) -> anyhow::Result<Snapshot> {
        self.check_tokens(&tokens)?;
        Ok(Snapshot {
            state: self.state.saved(tokens.len(), parts)?,
            tokens,
        })
    }

    /// Bytes of keys and values that each token takes.
    pub fn token_bytes(&self) -> usize {
        self.state.saved_bytes(1) - self.state.saved_bytes(0)
    }

    /// Bytes that a snapshot would take now.
    pub fn snapshot_bytes(&self) -> usize {
        self.state.saved_bytes(self.n_past()) + self.n_past() * size_of::<u32>()
    }

    /// Puts a snapshot back, whatever the session holds now.
    ///
    /// # Errors
    /// When it comes from a session of another shape, or is longer than this one's limit: the session then stays
    /// as it was. When memory runs out.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), EvalError> {
        self.state.check_shape(&snapshot.state)?;
        let (n_past, n_ctx) = (snapshot.tokens.len(), self.params.n_ctx);
        if n_past > n_ctx {
            return Err(EvalError::ContextFull {
                n_past: 0,
                n_new: n_past,
                n_ctx,
            });
        }
        self.tokens.clear();
        (self.back, self.can_reject, self.owed) = (0, 0, 0);
        self.make_room(n_past)?;
        self.state.load(&snapshot.state)?;
        self.tokens.clone_from(&snapshot.tokens);
        Ok(())
    }

    /// Forgets all tokens.
    ///
    /// # Errors
    /// When the device cannot be written.
    pub fn clear(&mut self) -> anyhow::Result<()> {
        self.tokens.clear();
        (self.back, self.can_reject, self.owed) = (0, 0, 0);
        self.state.clear()
    }

    fn backend(&self) -> &Backend {
        &self.engine.backends()[0]
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), EvalError> {
        let n_vocab = self.engine.config().n_vocab;
        match tokens.iter().find(|&&t| i64::from(t) >= n_vocab) {
            Some(&token) => Err(EvalError::UnknownToken { token, n_vocab }),
            None => Ok(()),
        }
    }

    /// Makes room for `n_new` more tokens at once, where they will come in several calls.
    ///
    /// # Errors
    /// When they do not fit into the context, or memory runs out.
    pub fn make_room(&mut self, n_new: usize) -> Result<(), EvalError> {
        let (n_past, n_ctx) = (self.n_past(), self.params.n_ctx);
        let needed = n_past + n_new;
        if needed > n_ctx {
            return Err(EvalError::ContextFull {
                n_past,
                n_new,
                n_ctx,
            });
        }
        let has = self.state.n_cells();
        if needed > has {
            // Graphs hold on to the tensors that they were made over.
            self.graphs.clear();
            self.drafts.clear();
            let backend = self.backend().clone();
            let room = needed.max(2 * has).min(n_ctx.next_multiple_of(KV_PAD));
            self.state.grow(&backend, room, n_past)?;
        }
        Ok(())
    }

    /// The graph of that shape, made if there is none, moved to the end of the list.
    fn graph(&mut self, shape: TrunkShape) -> anyhow::Result<&mut TrunkGraph> {
        // A graph over fewer cells will not be used again until the session is rewound, and of the wide ones, whose
        // memory counts, one is kept at most.
        let near = self.n_kv_near();
        let wide_kv = self.n_kv(self.n_past() + shape.n_tokens, false);
        let n_narrow = self.n_narrow();
        self.graphs.retain(|g| {
            let g = g.shape();
            g == shape
                || g.n_tokens <= n_narrow && near.contains(&g.n_kv)
                || g.n_tokens > n_narrow && shape.n_tokens <= n_narrow && g.n_kv == wide_kv
        });
        if let Some(at) = self.graphs.iter().position(|g| g.shape() == shape) {
            let graph = self.graphs.remove(at);
            self.graphs.push(graph);
        } else {
            if self.graphs.len() >= self.max_graphs() {
                self.graphs.remove(0);
            }
            self.graphs.push(TrunkGraph::new(
                self.engine.config(),
                self.engine.weights().for_width(shape.n_tokens),
                &self.state,
                self.engine.backends(),
                shape,
            )?);
        }
        let last = self.graphs.len() - 1;
        Ok(&mut self.graphs[last])
    }

    /// `first` is where the newest rows of logits begin.
    fn check_finite(&self, first: usize, n_rows: usize, n_best: usize) -> Result<(), EvalError> {
        let n_vocab = self.engine.config().n_vocab as usize;
        let rows = self.logits[first..].chunks_exact(n_vocab);
        for (row, logits) in rows.enumerate() {
            // Without an early exit the compiler checks many values at once.
            if logits.iter().fold(false, |bad, v| bad | !v.is_finite()) {
                return Err(EvalError::NonFinite {
                    position: self.n_past() - n_rows + row,
                });
            }
        }
        match self.best.iter().position(|(_, logit)| !logit.is_finite()) {
            Some(at) => Err(EvalError::NonFinite {
                position: self.n_past() - (self.best.len() - at).div_ceil(n_best.max(1)),
            }),
            None => Ok(()),
        }
    }
}

/// `n` cells and some more, of `n_cells` that there are.
fn padded(n: usize, coarse: bool, n_cells: usize) -> usize {
    let step = if coarse {
        GPU_KV_PAD.max(n.next_power_of_two() / 8)
    } else {
        KV_PAD
    };
    n.next_multiple_of(step).min(n_cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_look_at_all_cells_and_few_more() {
        for n_cells in [256, 1024, 1280, 40_960, 262_144] {
            for coarse in [false, true] {
                let mut before = 0;
                let mut n_changes = 0;
                for n in 1..=n_cells {
                    let n_kv = padded(n, coarse, n_cells);
                    assert!((n..=n_cells).contains(&n_kv), "{n} of {n_cells}");
                    assert_eq!(n_kv % KV_PAD, 0, "{n} of {n_cells}");
                    // At most a quarter is looked at in vain, or what is too little to matter.
                    let most = if coarse { n / 4 + GPU_KV_PAD } else { KV_PAD };
                    assert!(n_kv - n < most, "{n_kv} for {n}");
                    assert!(n_kv >= before);
                    n_changes += usize::from(n_kv != before);
                    before = n_kv;
                }
                let fewest = n_cells.div_ceil(GPU_KV_PAD);
                assert!(!coarse || n_changes <= fewest.min(40), "{n_changes}");
            }
        }
    }
}
