//! The forward pass, top to bottom: embedding, layers, norm, head; and the draft head from the same functions.
//!
//! Graphs are described once per shape and computed again with new inputs. Shapes in comments are in ggml order,
//! fastest dimension first; every node has a name, so that any of them can be dumped and compared. Only
//! operations that Metal supports are used (a test walks every node).

use std::cell::{Cell, RefCell};

use anyhow::{Context as _, Result};
use ggml_metal::{Backend, Context, DType, DeviceKind, Graph, Tensor};

use super::config::{Config, LayerConfig};
use super::weights::{Attention, DeltaNet, Ffn, GateUp, Layer, Mixer, Model, Moe, Mtp, Qkv};
use crate::state::{DeltaNetState, HeadState, KV_PAD, KvCache, LayerState, N_SEQS, State};

/// The shape of one trunk pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TrunkShape {
    /// Tokens that go in.
    pub n_tokens: usize,
    /// Cells that attention looks at.
    pub n_kv: usize,
    /// Positions whose logits come out; none for the inner chunks of a prompt.
    pub n_outputs: usize,
    /// Only so many of the best tokens of each row come out, with their logits, where it is not 0: a device with memory
    /// of its own then need not send whole rows.
    pub best: usize,
    /// What the draft head does alongside.
    pub head: HeadPass,
    /// Newest tokens of the pass before that do not count: rejected drafts, whose states are passed over.
    pub back: usize,
    /// Attention never splits the keys of a token between threads, which would sum them in another order: the pass
    /// then gives the same bits as a wider one.
    pub unsplit: bool,
}

/// What the draft head does during a trunk pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadPass {
    /// Nothing: its state goes stale.
    Off,
    /// The hidden state of the pass' only token is kept, and a [`CatchUp`] of many tokens writes their keys and values
    /// once they are needed.
    Owe,
    /// Its keys and values are written for every token of the pass.
    Keys,
    /// The whole head runs, and its logits come out for every token of the pass.
    Logits,
}

/// A trunk pass ready to compute.
pub struct TrunkGraph {
    graph: Graph,
    shape: TrunkShape,
    inputs: Inputs,
    out_rows: Option<Tensor>,
    logits: Option<Tensor>,
    /// The best tokens of each row, `n_outputs` times as many as the shape says, I32, and their logits.
    best: Option<(Tensor, Tensor)>,
    head_logits: Option<Tensor>,
    observed: Vec<Observed>,
}

/// What a pass saw of the inputs of one weight, for importance matrices.
pub struct Observed {
    /// The weight's name.
    pub weight: String,
    /// Its inputs.
    pub inputs: ObservedInputs,
}

/// See [`Observed`].
#[derive(Clone)]
pub enum ObservedInputs {
    /// Squares summed over all inputs, `[1, n_in]`.
    Sum {
        /// The sums.
        squares: Tensor,
        /// How many inputs there were.
        count: usize,
    },
    /// The inputs of experts, to be told apart by those who know the choice.
    Experts {
        /// `[n_in, 1 or n_used, n_tokens]`
        x: Tensor,
        /// The experts chosen, `[n_used, n_tokens]` I32.
        chosen: Tensor,
        /// Experts in all.
        n_expert: usize,
    },
}

/// Inputs of a pass, set before computing.
struct Inputs {
    /// Token ids, `[n_tokens]` I32.
    tokens: Tensor,
    /// Where every token stands, `[n_tokens]` I32; where rotation needs four rows, `[4 * n_tokens]`: time, height,
    /// width and zeros.
    positions: Tensor,
    /// The cell that each token's key and value go to, `[n_tokens]` I64.
    cells: Tensor,
    /// 0 where a token may look, -inf where not, `[n_kv, n_tokens]` F16.
    mask: Tensor,
    /// As `mask`, without cell 0, which the draft head leaves unused.
    head_mask: Option<Tensor>,
    /// The row that the hidden state goes to which the head will need later, `[1]` I64.
    owed_at: Option<Tensor>,
    scratch: Scratch,
}

/// Memory in which inputs are put together, kept so that nothing is allocated per token.
#[derive(Default)]
struct Scratch {
    ids: Vec<i32>,
    cells: Vec<i64>,
}

/// The widest pass whose products ggml's CUDA backend computes as matrix times vectors.
const NARROW: i64 = 8;

/// Binary16 of 0 and of minus infinity.
const VISIBLE: u16 = 0;
const HIDDEN: u16 = 0xfc00;

impl TrunkGraph {
    /// Describes and allocates a pass over `state`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(
        config: &Config,
        model: &Model<Tensor>,
        state: &State,
        backends: &[Backend],
        shape: TrunkShape,
    ) -> Result<Self> {
        Self::describe(config, model, state, backends, shape, None)
    }

    /// As [`TrunkGraph::new`] for a pass that observes the inputs of all weights inside layers, those of the draft
    /// head where the shape has [`HeadPass::Logits`]; it computes no logits for them.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn observing(
        config: &Config,
        model: &Model<Tensor>,
        state: &State,
        backends: &[Backend],
        shape: TrunkShape,
    ) -> Result<Self> {
        let observer = Observer::default();
        let mut graph = Self::describe(config, model, state, backends, shape, Some(&observer))?;
        graph.observed = observer.seen.into_inner();
        Ok(graph)
    }

    fn describe(
        config: &Config,
        model: &Model<Tensor>,
        state: &State,
        backends: &[Backend],
        shape: TrunkShape,
        observer: Option<&Observer>,
    ) -> Result<Self> {
        let capacity = match observer {
            Some(_) => 2 * node_capacity(config, 1),
            None => node_capacity(config, 1),
        };
        let context = Context::new(capacity)?;
        let ctx = &context;
        let inputs = Inputs::new(ctx, config, shape.n_tokens, shape.n_kv, shape.head);
        let pass = Pass {
            ctx,
            config,
            inputs: &inputs,
            n_tokens: shape.n_tokens as i64,
            n_kv: shape.n_kv as i64,
            // What is observed is named after the matrices of the file.
            joins: observer.is_none(),
            on_cpu: backends[0].device().kind() == DeviceKind::Cpu,
            unsplit: shape.unsplit,
            n_slots: state.n_slots(),
            back: shape.back,
            observer,
        };

        let selects = (1..shape.n_tokens).contains(&shape.n_outputs);
        let out_rows =
            selects.then(|| ctx.input("out_rows", DType::I32, &[shape.n_outputs as i64]));

        let embd = ctx
            .get_rows(&model.token_embd, &inputs.tokens)
            .named("embd");
        let mut x = embd.clone(); // [n_embd, n_tokens]
        for (il, layer) in model.layers.iter().enumerate() {
            let state = &state.layers[il];
            // The last layer's positions that nobody reads end at its attention.
            let last = il + 1 == model.layers.len() && shape.head == HeadPass::Off;
            let keep = out_rows.as_ref().filter(|_| last);
            let mixed = pass.mix(layer, &config.layers[il], state, &x, keep, il);
            if last && shape.n_outputs == 0 && observer.is_none() {
                // Only its state is wanted. A router at a graph's very end would also lead ggml's CUDA backend, which
                // looks for operations to fuse, beyond the graph's nodes.
                break;
            }
            x = pass.feed_forward(layer, &mixed, il);
        }
        let hidden = pass.rms_norm(&x, &model.output_norm).named("result_norm");

        let mut head_logits = None;
        if let (Some(mtp), Some(head)) = (&model.mtp, &state.head)
            && shape.head != HeadPass::Off
        {
            head_logits = pass.head_alongside(mtp, head, model, &embd, &hidden, shape.head);
        }

        let mut best = None;
        let logits = (shape.n_outputs > 0).then(|| {
            let rows = match &out_rows {
                Some(ids) if shape.head != HeadPass::Off => ctx.get_rows(&hidden, ids),
                _ => hidden,
            };
            let logits = pass.linear(&model.output, &rows).named("logits");
            if shape.best > 0 {
                best = Some(pass.best(&logits, shape.best as i64));
            }
            if shape.best != 1 {
                ctx.output(&logits); // [n_vocab, n_outputs]
            }
            logits
        });
        Ok(Self {
            graph: Graph::new(context, backends).context("building the forward pass")?,
            shape,
            inputs,
            out_rows,
            logits: logits.filter(|_| shape.best != 1),
            best,
            head_logits,
            observed: Vec::new(),
        })
    }

    /// What the pass sees of the weights' inputs, to be read after computing.
    pub fn observed(&self) -> &[Observed] {
        &self.observed
    }

    /// The shape it was made for.
    pub fn shape(&self) -> TrunkShape {
        self.shape
    }

    /// The graph, for its nodes and its memory.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Runs the pass over `tokens` at positions from `n_past` on. The logits are those of the last tokens, as many
    /// as the shape says. `n_owed` tokens before are those that the head lags behind, for [`HeadPass::Owe`].
    ///
    /// # Errors
    /// When the device fails.
    pub fn compute(&mut self, tokens: &[u32], n_past: usize, n_owed: usize) -> Result<()> {
        self.inputs.set(&mut self.graph, tokens, n_past)?;
        if let Some(owed_at) = &self.inputs.owed_at {
            self.graph.stage(owed_at, &[n_owed as i64])?;
        }
        if let Some(rows) = &self.out_rows {
            let end = tokens.len() as i32;
            let first = end - self.shape.n_outputs as i32;
            self.graph.stage(rows, &(first..end).collect::<Vec<_>>())?;
        }
        self.graph.compute()?;
        Ok(())
    }

    /// Appends the logits of the pass, `n_outputs` rows of `n_vocab`.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn read_logits(&self, out: &mut Vec<f32>) -> Result<()> {
        self.append(&self.logits, out)
    }

    fn append(&self, tensor: &Option<Tensor>, out: &mut Vec<f32>) -> Result<()> {
        Ok(self.graph.read(tensor.as_slice(), out)?)
    }

    /// Appends the best tokens of each row with their logits, in no order, where the pass was made for that.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn read_best(&self, out: &mut Vec<(u32, f32)>) -> Result<()> {
        let Some((ids, logits)) = &self.best else {
            return Ok(());
        };
        let (mut tokens, mut values) = (Vec::<i32>::new(), Vec::<f32>::new());
        self.graph.read(std::slice::from_ref(ids), &mut tokens)?;
        self.graph.read(std::slice::from_ref(logits), &mut values)?;
        out.extend(tokens.into_iter().map(|t| t as u32).zip(values));
        Ok(())
    }

    /// Appends the draft head's logits, a row of `n_vocab` for each token of the pass: the guess for the token
    /// after it.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn read_head_logits(&self, out: &mut Vec<f32>) -> Result<()> {
        self.append(&self.head_logits, out)
    }
}

/// The shape of a chain of draft steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DraftShape {
    /// Steps.
    pub depth: usize,
    /// Cells that attention looks at.
    pub n_kv: usize,
    /// As [`TrunkShape::back`].
    pub back: usize,
    /// The tokens that are drafted; all where there is none.
    pub vocab: Option<DraftVocab>,
    /// What is kept of each step besides its token.
    pub keeps: DraftKeeps,
}

/// Makes up for passes of [`HeadPass::Owe`]: writes the draft head's keys and values of tokens that it lags behind, and
/// the hidden state that it goes on from.
pub struct CatchUp {
    graph: Graph,
    inputs: Inputs,
}

impl CatchUp {
    /// Describes and allocates a catch-up of `n` tokens, the first of which began with the newest `back` tokens before
    /// it taken back; none where the model has no draft head or the state does not keep it up.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(
        config: &Config,
        model: &Model<Tensor>,
        state: &State,
        backends: &[Backend],
        (n, back): (usize, usize),
    ) -> Result<Option<Self>> {
        let (Some(mtp), Some(head)) = (&model.mtp, &state.head) else {
            return Ok(None);
        };
        let context = Context::new(node_capacity(config, 0))?;
        let ctx = &context;
        let inputs = Inputs::new(ctx, config, n, KV_PAD, HeadPass::Keys);
        let pass = Pass {
            ctx,
            config,
            inputs: &inputs,
            n_tokens: n as i64,
            n_kv: KV_PAD as i64,
            joins: true,
            on_cpu: backends[0].device().kind() == DeviceKind::Cpu,
            unsplit: false,
            n_slots: state.n_slots(),
            back,
            observer: None,
        };
        let embd = ctx.get_rows(&mtp.embed_tokens, &inputs.tokens);
        let rows = |of: &Tensor, first: usize, n: usize| {
            let (n_embd, stride) = (config.n_embd, of.nb(1));
            ctx.view(of, &[n_embd, n as i64], &[stride], first * stride)
        };
        let first = pass.last_hidden(head);
        let before = match n {
            1 => first,
            _ => ctx.concat(&first, &rows(&head.owed, 0, n - 1), 1),
        };
        pass.head_keys(mtp, head, &embd, &before);
        let newest = rows(&head.hidden, state.n_slots() - 1, 1);
        ctx.expand(&ctx.cpy(&rows(&head.owed, n - 1, 1), &newest));
        Ok(Some(Self {
            graph: Graph::new(context, backends).context("building the draft head's catch-up")?,
            inputs,
        }))
    }

    /// The graph, for its nodes and its memory.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Writes the entries of `tokens`, which stand at positions from `first` on.
    ///
    /// # Errors
    /// When the device fails.
    pub fn compute(&mut self, tokens: &[u32], first: usize) -> Result<()> {
        self.inputs.set(&mut self.graph, tokens, first)?;
        self.graph.compute()?;
        Ok(())
    }
}

/// The tokens that the draft head chooses from: ids are roughly in order of frequency, and the added tokens stand at
/// their end, so that two views of the output matrix are a smaller head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DraftVocab {
    /// Ids below this one,
    pub n_first: i64,
    /// and from this one on.
    pub last_from: i64,
}

/// What a draft chain keeps of each step besides its token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DraftKeeps {
    /// Nothing.
    Tokens,
    /// How probable the head takes the token to be.
    Confidence,
    /// All logits.
    Logits,
    /// The logits of this many best tokens, one of which is chosen at random: the one whose logit is largest after
    /// noise was added.
    Best(usize),
}

/// A chain of draft steps in one graph: each step feeds its best token and its hidden state to the next.
pub struct DraftGraph {
    graph: Graph,
    shape: DraftShape,
    inputs: Vec<Inputs>,
    tokens: Vec<Tensor>,
    /// Logits or confidences, one a step.
    kept: Vec<Tensor>,
    /// Of each step with noise: the ids that were chosen from, their logits, and the noise.
    sampled: Vec<[Tensor; 3]>,
}

impl DraftGraph {
    /// Describes and allocates a chain; none where the model has no draft head or the state does not keep it up.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(
        config: &Config,
        model: &Model<Tensor>,
        state: &State,
        backends: &[Backend],
        shape: DraftShape,
    ) -> Result<Option<Self>> {
        let (Some(mtp), Some(head)) = (&model.mtp, &state.head) else {
            return Ok(None);
        };
        let context = Context::new(node_capacity(config, shape.depth))?;
        let ctx = &context;
        let ids = match shape.vocab {
            Some(vocab) => Some(vocab.ids(&backends[0], config.n_vocab)?),
            None => None,
        };
        let mut inputs = Vec::with_capacity(shape.depth);
        for _ in 0..shape.depth {
            inputs.push(Inputs::new(ctx, config, 1, shape.n_kv, HeadPass::Logits));
        }
        let (mut tokens, mut kept, mut sampled) = (Vec::new(), Vec::new(), Vec::new());
        let mut hidden = None; // [n_embd, 1]
        for (step, input) in inputs.iter().enumerate() {
            let pass = Pass {
                ctx,
                config,
                inputs: input,
                n_tokens: 1,
                n_kv: shape.n_kv as i64,
                joins: true,
                on_cpu: backends[0].device().kind() == DeviceKind::Cpu,
                unsplit: false,
                n_slots: state.n_slots(),
                back: shape.back,
                observer: None,
            };
            let token = tokens.last().unwrap_or(&input.tokens);
            let embd = ctx.get_rows(&mtp.embed_tokens, token);
            let before = hidden.unwrap_or_else(|| pass.last_hidden(head));
            let normed = pass.head(mtp, head, &embd, &before);
            let logits = pass
                .draft_logits(&mtp.head, &normed, shape.vocab)
                .named(format!("draft_logits-{step}"));
            hidden = Some(normed);
            let best = if let DraftKeeps::Best(k) = shape.keeps {
                let places = ctx.top_k(&logits, k as i64); // [k, 1]
                let all = ctx.reshape(&logits, &[1, logits.ne(0)]);
                let places = ctx.reshape(&places, &[k as i64]);
                let best = ctx.get_rows(&all, &places); // [1, k]
                let noise = ctx.input("noise", DType::F32, &[k as i64, 1]);
                let row = ctx.reshape(&best, &[k as i64, 1]);
                let choice = ctx.argmax(&ctx.add(&row, &noise));
                ctx.output(&places);
                ctx.output(&row);
                sampled.push([places.clone(), row, noise]);
                let column = ctx.reshape(&places, &[1, k as i64]);
                ctx.reshape(&ctx.get_rows(&column, &choice), &[1])
            } else {
                ctx.argmax(&logits)
            };
            match shape.keeps {
                DraftKeeps::Logits => {
                    ctx.output(&logits);
                    kept.push(logits);
                }
                DraftKeeps::Confidence => {
                    let probs = ctx.soft_max(&logits);
                    let column = ctx.reshape(&probs, &[1, probs.ne(0)]);
                    let confidence = ctx.get_rows(&column, &best);
                    ctx.output(&confidence);
                    kept.push(confidence);
                }
                DraftKeeps::Tokens | DraftKeeps::Best(_) => {}
            }
            // Places in a smaller vocabulary become ids.
            let best = match &ids {
                Some(ids) => ctx.reshape(&ctx.get_rows(ids, &best), &[1]),
                None => best,
            };
            let best = best.named(format!("draft_token-{step}"));
            ctx.output(&best);
            tokens.push(best);
        }
        Ok(Some(Self {
            graph: Graph::new(context, backends).context("building the draft chain")?,
            shape,
            inputs,
            tokens,
            kept,
            sampled,
        }))
    }

    /// The shape it was made for.
    pub fn shape(&self) -> DraftShape {
        self.shape
    }

    /// The graph, for its nodes and its memory.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Drafts the tokens after `token`, which stands at position `n_past`. `noise` has a row for each step of a
    /// chain that samples.
    ///
    /// # Errors
    /// When the device fails.
    pub fn compute(&mut self, token: u32, n_past: usize, noise: &[f32]) -> Result<Vec<u32>> {
        for (step, input) in self.inputs.iter_mut().enumerate() {
            // Later steps take their token from the graph and ignore this one.
            input.set(&mut self.graph, &[token], n_past + step)?;
        }
        for ([.., to], row) in self.sampled.iter().zip(noise.chunks(self.n_best())) {
            self.graph.stage(to, row)?;
        }
        self.graph.compute()?;
        let mut drafted: Vec<i32> = Vec::with_capacity(self.tokens.len());
        self.graph.read(&self.tokens, &mut drafted)?;
        Ok(drafted.into_iter().map(|id| id as u32).collect())
    }

    fn n_best(&self) -> usize {
        match self.shape.keeps {
            DraftKeeps::Best(k) => k.max(1),
            _ => 1,
        }
    }

    /// Appends what is kept of every step: rows of logits, or confidences.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn read_kept(&self, out: &mut Vec<f32>) -> Result<()> {
        Ok(self.graph.read(&self.kept, out)?)
    }

    /// The tokens that each step of a sampling chain chose from, with their logits, in one order for all steps:
    /// `k` for each step.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn read_best(&self) -> Result<Vec<(u32, f32)>> {
        let (mut places, mut logits) = (Vec::<i32>::new(), Vec::<f32>::new());
        let tensors = |i: usize| {
            self.sampled
                .iter()
                .map(|s| s[i].clone())
                .collect::<Vec<_>>()
        };
        self.graph.read(&tensors(0), &mut places)?;
        self.graph.read(&tensors(1), &mut logits)?;
        let ids = places.into_iter().map(|place| match self.shape.vocab {
            Some(vocab) => vocab.id(place),
            None => place,
        });
        Ok(ids.map(|id| id as u32).zip(logits).collect())
    }
}

impl DraftVocab {
    /// The token at a place of the smaller vocabulary.
    fn id(self, place: i32) -> i32 {
        match i64::from(place) - self.n_first {
            after @ 0.. => (self.last_from + after) as i32,
            _ => place,
        }
    }

    /// The place of a token in the smaller vocabulary, if it has it.
    pub fn place(self, token: u32) -> Option<usize> {
        let id = i64::from(token);
        match id - self.last_from {
            after @ 0.. => usize::try_from(self.n_first + after).ok(),
            _ => (id < self.n_first).then_some(token as usize),
        }
    }

    /// All its tokens by place, `[1, n]` I32.
    fn ids(self, backend: &Backend, n_vocab: i64) -> Result<Tensor> {
        let n = self.n_first + n_vocab - self.last_from;
        let context = Context::new(1)?;
        let ids = context.new_tensor("draft_ids", DType::I32, &[1, n]);
        context.allocate(backend, "the draft vocabulary")?;
        if backend.plans() {
            return Ok(ids);
        }
        ids.write(&(0..n as i32).map(|i| self.id(i)).collect::<Vec<_>>())?;
        Ok(ids)
    }
}

/// Tensors of the largest graph: a layer takes at most 60, and each expert of a token three more.
fn node_capacity(config: &Config, depth: usize) -> usize {
    let per_layer = 80 + 3 * config.moe.map_or(0, |m| m.n_expert_used as usize);
    (config.n_layer() + 1 + depth) * per_layer + 64
}

impl Inputs {
    fn new(ctx: &Context, config: &Config, n_tokens: usize, n_kv: usize, head: HeadPass) -> Self {
        let (n, n_kv) = (n_tokens as i64, n_kv as i64);
        let n_rows = config.rope.n_rows() as i64;
        Self {
            tokens: ctx.input("tokens", DType::I32, &[n]),
            positions: ctx.input("positions", DType::I32, &[n_rows * n]),
            cells: ctx.input("cells", DType::I64, &[n]),
            mask: ctx.input("mask", DType::F16, &[n_kv, n]),
            head_mask: (head == HeadPass::Logits)
                .then(|| ctx.input("head_mask", DType::F16, &[n_kv, n])),
            owed_at: (head == HeadPass::Owe).then(|| ctx.input("owed_at", DType::I64, &[1])),
            scratch: Scratch::default(),
        }
    }

    /// Sets what is allocated: a graph that does not use an input gives it no memory.
    fn set(&mut self, graph: &mut Graph, tokens: &[u32], n_past: usize) -> Result<()> {
        let n = tokens.len();
        let scratch = &mut self.scratch;
        if self.tokens.is_allocated() {
            scratch.ids.clear();
            scratch.ids.extend(tokens.iter().map(|&t| t as i32));
            graph.stage(&self.tokens, &scratch.ids)?;
        }
        if self.positions.is_allocated() {
            // Text moves along time, height and width alike.
            let time = (n_past as i32)..(n_past + n) as i32;
            let n_rows = self.positions.n_elements() / n;
            scratch.ids.clear();
            for _ in 0..n_rows.min(3) {
                scratch.ids.extend(time.clone());
            }
            scratch.ids.resize(n_rows * n, 0);
            graph.stage(&self.positions, &scratch.ids)?;
        }
        if self.cells.is_allocated() {
            scratch.cells.clear();
            scratch.cells.extend(n_past as i64..(n_past + n) as i64);
            graph.stage(&self.cells, &scratch.cells)?;
        }
        if self.mask.is_allocated() {
            stage_mask(graph, &self.mask, n_past, 0)?;
        }
        if let Some(mask) = &self.head_mask {
            stage_mask(graph, mask, n_past, 1)?;
        }
        Ok(())
    }
}

/// Lets the token in row `i` see the cells `first..=n_past + i`. Row 0 of an empty context would see nothing when
/// `first` is 1: it keeps its own cell, so that no softmax is over nothing; its result is not used.
fn stage_mask(graph: &mut Graph, mask: &Tensor, n_past: usize, first: usize) -> Result<()> {
    let (n_kv, n) = (mask.ne(0) as usize, mask.ne(1) as usize);
    graph.stage_bytes(mask, |bytes| {
        for row in 0..n {
            let last = n_past + row;
            let first = first.min(last);
            let cell = |cell| {
                if (first..=last).contains(&cell) {
                    VISIBLE
                } else {
                    HIDDEN
                }
            };
            bytes.extend((0..n_kv).flat_map(|i| u16::to_le_bytes(cell(i))));
        }
    })?;
    Ok(())
}

/// One pass being described: everything the blocks share.
struct Pass<'a> {
    ctx: &'a Context,
    config: &'a Config,
    inputs: &'a Inputs,
    n_tokens: i64,
    n_kv: i64,
    /// Whether matrices that follow each other in memory may be multiplied as one.
    joins: bool,
    /// The first device is the CPU.
    on_cpu: bool,
    /// See [`TrunkShape::unsplit`].
    unsplit: bool,
    /// States that the recurrent layers keep.
    n_slots: usize,
    /// The slot that the pass begins from.
    back: usize,
    observer: Option<&'a Observer>,
}

/// Collects what a pass sees while it is described.
#[derive(Default)]
struct Observer {
    /// Rows at the start that are left out: the draft head's first has no hidden state before it.
    skip: Cell<i64>,
    seen: RefCell<Vec<Observed>>,
    /// Inputs seen before: several weights share one.
    known: RefCell<Vec<(Tensor, ObservedInputs)>>,
}

impl Observer {
    fn see(&self, w: &Tensor, x: &Tensor, make: impl FnOnce() -> ObservedInputs) {
        let weight = w.name();
        // The output matrix is used with high precision anyway.
        if !weight.starts_with("blk.") {
            return;
        }
        let mut known = self.known.borrow_mut();
        let before = known.iter().find(|(other, _)| other.is_same(x));
        let inputs = before.map_or_else(make, |(_, inputs)| inputs.clone());
        known.push((x.clone(), inputs.clone()));
        self.seen.borrow_mut().push(Observed { weight, inputs });
    }

    fn linear(&self, ctx: &Context, w: &Tensor, x: &Tensor) {
        self.see(w, x, || {
            let (skip, n) = (self.skip.get(), x.ne(1) - self.skip.get());
            let rows = ctx.view(x, &[x.ne(0), n], &[x.nb(1)], skip as usize * x.nb(1));
            let squares = ctx.mul(&rows, &rows);
            let squares = ctx.sum_rows(&ctx.cont(&ctx.transpose(&squares))); // [1, n_in]
            ctx.output(&squares);
            ObservedInputs::Sum {
                squares,
                count: n as usize,
            }
        });
    }

    fn experts(&self, ctx: &Context, w: &Tensor, x: &Tensor, chosen: &Tensor) {
        let n_expert = w.ne(2) as usize;
        self.see(w, x, || {
            let (skip, n) = (self.skip.get(), x.ne(2) - self.skip.get());
            let from = |t: &Tensor, shape: &[i64], strides: &[usize]| {
                let offset = skip as usize * strides[strides.len() - 1];
                let kept = ctx.cont(&ctx.view(t, shape, strides, offset));
                ctx.output(&kept);
                kept
            };
            ObservedInputs::Experts {
                x: from(x, &[x.ne(0), x.ne(1), n], &[x.nb(1), x.nb(2)]),
                chosen: from(chosen, &[chosen.ne(0), n], &[chosen.nb(1)]),
                n_expert,
            }
        });
    }
}

impl Pass<'_> {
    /// Every product with a weight matrix: `[n_in, n_out]` and `[n_in, n]` give `[n_out, n]`.
    fn linear(&self, w: &Tensor, x: &Tensor) -> Tensor {
        if let Some(observer) = self.observer {
            observer.linear(self.ctx, w, x);
        }
        self.ctx.mul_mat(w, x)
    }

    /// The places of the `k` largest values of each row, `k * m` of I32, and those values, `[1, k, m]`; both are
    /// outputs.
    fn best(&self, rows: &Tensor, k: i64) -> (Tensor, Tensor) {
        let ctx = self.ctx;
        let (n, m) = (rows.ne(0), rows.ne(1));
        let places = match k {
            1 => ctx.argmax(rows),
            _ => ctx.top_k(rows, k),
        };
        let places = places.named("best");
        let values = ctx.get_rows(
            &ctx.reshape(rows, &[1, n, m]),
            &ctx.reshape(&places, &[k, m]),
        );
        ctx.output(&places);
        ctx.output(&values);
        (places, values)
    }

    /// Every product with the experts' matrices: `[n_in, n_out, n_expert]`, `[n_in, 1 or n_used, n]` and
    /// `[n_used, n]` give `[n_out, n_used, n]`.
    fn expert_linear(&self, w: &Tensor, x: &Tensor, chosen: &Tensor) -> Tensor {
        if let Some(observer) = self.observer {
            observer.experts(self.ctx, w, x, chosen);
        }
        self.ctx.mul_mat_id(w, x, chosen)
    }

    /// RMS norm of each row times `weight`, which holds `1 + w` as stored in GGUF.
    fn rms_norm(&self, x: &Tensor, weight: &Tensor) -> Tensor {
        let normed = self.ctx.rms_norm(x, self.config.rms_eps);
        self.ctx.mul(&normed, weight)
    }

    /// The first half of a layer: norm, what mixes positions, residual. `keep` picks the rows that go on after it.
    fn mix(
        &self,
        w: &Layer<Tensor>,
        config: &LayerConfig,
        state: &LayerState,
        x: &Tensor,
        keep: Option<&Tensor>,
        il: usize,
    ) -> Tensor {
        let ctx = self.ctx;
        let normed = self
            .rms_norm(x, &w.attn_norm)
            .named(format!("attn_norm-{il}"));
        let mixed = match (&w.mixer, state) {
            (Mixer::Attention(attn), LayerState::Attention(kv)) => {
                self.attention(attn, config, kv, &self.inputs.mask, &normed, keep, il)
            }
            (Mixer::DeltaNet(net), LayerState::DeltaNet(state)) => {
                self.kept(&self.delta_net(net, state, &normed, il), keep)
            }
            _ => unreachable!("state and weights are made from the same configuration"),
        };
        ctx.add(&mixed, &self.kept(x, keep))
            .named(format!("attn_residual-{il}"))
    }

    /// The second half of a layer: norm, feed-forward, residual.
    fn feed_forward(&self, w: &Layer<Tensor>, x: &Tensor, il: usize) -> Tensor {
        let normed = self
            .rms_norm(x, &w.post_attention_norm)
            .named(format!("post_attention_norm-{il}"));
        let out = match &w.ffn {
            Ffn::Dense { gate, up, down } => {
                // For a single token GPUs have an operation of their own for two products and their SwiGLU.
                let join = self.joins && (self.on_cpu || self.n_tokens > 1);
                self.swiglu(gate, up, down, &normed, join)
            }
            Ffn::Moe(moe) => self.moe(moe, &normed, il),
        };
        self.ctx.add(&out, x).named(format!("l_out-{il}"))
    }

    fn kept(&self, x: &Tensor, keep: Option<&Tensor>) -> Tensor {
        keep.map_or_else(|| x.clone(), |rows| self.ctx.get_rows(x, rows))
    }

    /// Queries with gates, keys and values of `x`: `[2 * head_dim * n_head, n]`, `[head_dim * n_head_kv, n]` twice.
    fn qkv(
        &self,
        w: &Attention<Tensor>,
        config: &LayerConfig,
        x: &Tensor,
    ) -> (Tensor, Tensor, Tensor) {
        match &w.qkv {
            Qkv::Separate { q, k, v } => self.linears([q, k, v], x, self.joins).into(),
            Qkv::Fused(qkv) => {
                let all = self.linear(qkv, x);
                let n_q = 2 * self.config.head_dim * config.n_head;
                let n_kv = self.config.head_dim * config.n_head_kv;
                let part = |first: i64, n: i64| {
                    let offset = first as usize * all.nb(0);
                    self.ctx.view(&all, &[n, x.ne(1)], &[all.nb(1)], offset)
                };
                (part(0, n_q), part(n_q, n_kv), part(n_q + n_kv, n_kv))
            }
        }
    }

    /// Keys and values of `x` go to the cells of this pass.
    fn store(
        &self,
        w: &Attention<Tensor>,
        config: &LayerConfig,
        cache: &KvCache,
        k: &Tensor,
        v: &Tensor,
        il: usize,
    ) {
        let (ctx, head_dim, n) = (self.ctx, self.config.head_dim, k.ne(1));
        let strides = [head_dim as usize * k.nb(0), k.nb(1)];
        let k = ctx.view(k, &[head_dim, config.n_head_kv, n], &strides, 0);
        let k = self.rms_norm(&k, &w.k_norm);
        let k = ctx
            .rope(&k, &self.inputs.positions, &self.config.rope)
            .named(format!("k-{il}"));
        let k = self.rotated(&k, cache.rotations.k.as_ref());
        let v = self.rotated(v, cache.rotations.v.as_ref());
        // A view where a reshape would do: CUDA then fuses norm, rotation and this.
        let k = ctx.view(&k, &[head_dim * config.n_head_kv, n], &[k.nb(2)], 0);
        ctx.expand(&ctx.set_rows(&cache.k, &k, &self.inputs.cells));
        ctx.expand(&ctx.set_rows(&cache.v, &v, &self.inputs.cells));
    }

    /// Gated full attention: `[n_embd, n]` in and out.
    #[expect(
        clippy::too_many_arguments,
        reason = "weights, numbers, state and inputs of one block"
    )]
    fn attention(
        &self,
        w: &Attention<Tensor>,
        config: &LayerConfig,
        cache: &KvCache,
        mask: &Tensor,
        x: &Tensor,
        keep: Option<&Tensor>,
        il: usize,
    ) -> Tensor {
        let (ctx, head_dim, n_head, n) =
            (self.ctx, self.config.head_dim, config.n_head, self.n_tokens);
        let (q_gate, k, v) = self.qkv(w, config, x);
        self.store(w, config, cache, &k, &v, il);

        // Per head the query's values and then the gate's.
        let head_bytes = 2 * head_dim as usize * q_gate.nb(0);
        let half = |offset: usize| {
            ctx.view(
                &q_gate,
                &[head_dim, n_head, n],
                &[head_bytes, q_gate.nb(1)],
                offset,
            )
        };
        let q = self.rms_norm(&half(0), &w.q_norm); // [head_dim, n_head, n]
        let q = ctx
            .rope(&q, &self.inputs.positions, &self.config.rope)
            .named(format!("q-{il}"));
        let q = self.rotated(&q, cache.rotations.k.as_ref());
        // On NVIDIA's GPUs from Hopper on kernels may begin before those before them have ended, and ggml's attention for
        // one token then reads keys and values that are not written yet (ggml 0.26). This copy, which is no kernel there,
        // has to end first: it stands between what attention reads and attention.
        ctx.expand(&q);
        let gate = ctx
            .cont(&half(head_bytes / 2))
            .named(format!("attn_gate-{il}"));
        ctx.expand(&gate);
        // ggml's CPU splits the keys of a single row between threads, unless there are several sequences: half of
        // the heads then pass for a second one.
        let groups = if self.unsplit && n == 1 && N_SEQS == 1 && config.n_head_kv % 2 == 0 {
            2
        } else {
            1
        };
        let q = if groups > 1 {
            ctx.reshape(&q, &[head_dim, 1, n_head / groups, groups])
        } else {
            ctx.permute(&q, [0, 2, 1, 3]) // [head_dim, n, n_head]
        };

        // [head_dim, n_kv, n_head_kv, n_seqs], or with the heads in groups
        let k = self.cells(&cache.k, config.n_head_kv, groups);
        let v = self.cells(&cache.v, config.n_head_kv, groups);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let out = ctx
            .flash_attn(&q, &k, &v, mask, scale)
            .named(format!("attn_out-{il}"));
        let out = self.rotated(&out, cache.rotations.v.as_ref());
        let out = ctx.reshape(&out, &[head_dim * n_head, n]);

        let gate = ctx.sigmoid(&ctx.reshape(&gate, &[head_dim * n_head, n]));
        let out = ctx.mul(&out, &gate).named(format!("attn_gated-{il}"));
        self.linear(&w.output, &self.kept(&out, keep))
    }

    /// `x` turned, block after block of each head, where there is a rotation. Turning twice gives `x` again.
    fn rotated(&self, x: &Tensor, rotation: Option<&Tensor>) -> Tensor {
        let Some(rotation) = rotation else {
            return x.clone();
        };
        let n = rotation.ne(0);
        let x = if x.is_contiguous() {
            x.clone()
        } else {
            self.ctx.cont(x)
        };
        let blocks = self.ctx.reshape(&x, &[n, x.n_elements() as i64 / n]);
        self.ctx
            .reshape(&self.ctx.hadamard(rotation, &blocks), &x.shape())
    }

    /// The cells that attention looks at, heads apart, and in groups that pass for sequences.
    fn cells(&self, cache: &Tensor, n_head_kv: i64, groups: i64) -> Tensor {
        let head = cache.dtype().row_bytes(self.config.head_dim as usize);
        let (n, outer) = (n_head_kv / groups, N_SEQS * groups);
        let stride = if groups > 1 {
            head * n as usize
        } else {
            cache.nb(1) * (cache.ne(1) / N_SEQS) as usize
        };
        self.ctx.view(
            cache,
            &[self.config.head_dim, self.n_kv, n, outer],
            &[cache.nb(1), head, stride],
            0,
        )
    }

    /// How many of the newest tokens leave a state of their own behind: all of a narrow pass, one of a wide one.
    fn slots_written(&self) -> i64 {
        if self.n_tokens <= self.n_slots as i64 {
            self.n_tokens
        } else {
            1
        }
    }

    /// The gated delta net: `[n_embd, n]` in and out.
    fn delta_net(
        &self,
        w: &DeltaNet<Tensor>,
        state: &DeltaNetState,
        x: &Tensor,
        il: usize,
    ) -> Tensor {
        let (ctx, ssm) = (self.ctx, &self.config.ssm);
        let (size, n_k, n_v) = (ssm.head_dim, ssm.n_k_heads, ssm.n_v_heads);
        let n = self.n_tokens / N_SEQS;

        let weights = [&w.qkv, &w.gate, &w.alpha, &w.beta];
        let [qkv, z, alpha, beta] = self.linears(weights, x, self.joins);
        let strides = [qkv.nb(1), qkv.nb(1) * n as usize];
        let qkv = ctx
            .view(&qkv, &[ssm.conv_dim(), n, N_SEQS], &strides, 0)
            .named(format!("qkv-{il}"));
        let qkv = ctx.transpose(&qkv);
        // [conv_kernel - 1 + n, conv_dim, n_seqs]: the window of past inputs, then the new ones.
        let element = state.conv.nb(0);
        let past = ctx.view(
            &state.conv,
            &[ssm.conv_kernel - 1, ssm.conv_dim(), N_SEQS],
            &[state.conv.nb(1), state.conv.nb(2)],
            state.window_start(self.back) * element,
        );
        let window = ctx.concat(&past, &qkv, 0);
        // The windows after each of the tokens that have a slot overlap.
        let n_slots = self.slots_written();
        // In two halves: what has rows only, CUDA copies with the driver's strided copy, which takes 6 microseconds where
        // a kernel takes 2.
        let n_parts = if ssm.conv_dim() % 2 == 0 { 2 } else { 1 };
        let newest = |of: &Tensor| {
            let n_inputs = ssm.conv_kernel - 1 + n_slots - 1;
            ctx.view(
                of,
                &[n_inputs, ssm.conv_dim() / n_parts, n_parts * N_SEQS],
                &[of.nb(1), of.nb(2) / n_parts as usize],
                (of.ne(0) - n_inputs) as usize * element,
            )
        };
        ctx.expand(&ctx.cpy(&newest(&window), &newest(&state.conv)));
        let conv = ctx
            .silu(&ctx.ssm_conv(&window, &w.conv1d))
            .named(format!("conv-{il}")); // [conv_dim, n, n_seqs]

        let heads = |first: i64, n_heads: i64| {
            ctx.view(
                &conv,
                &[size, n_heads, n, N_SEQS],
                &[size as usize * conv.nb(0), conv.nb(1), conv.nb(2)],
                (first * size) as usize * conv.nb(0),
            )
        };
        // Queries and keys lie side by side, so one norm serves both. x / sqrt(sum(x^2) + eps) is an RMS norm
        // with eps / size, divided by sqrt(size); ggml's own L2 norm has another form of eps.
        let qk = ctx.rms_norm(&heads(0, 2 * n_k), self.config.rms_eps / size as f32);
        let qk = ctx
            .scale(&qk, 1.0 / (size as f32).sqrt())
            .named(format!("qk-{il}"));
        let half = |first: i64| {
            ctx.view(
                &qk,
                &[size, n_k, n, N_SEQS],
                &[qk.nb(1), qk.nb(2), qk.nb(3)],
                first as usize * qk.nb(1),
            )
        };
        let (q, k, v) = (half(0), half(n_k), heads(2 * n_k, n_v));

        // Of GPUs not all have a sigmoid of rows with gaps between them.
        let beta = if self.on_cpu || beta.is_contiguous() {
            beta
        } else {
            ctx.cont(&beta)
        };
        let beta = ctx.reshape(&ctx.sigmoid(&beta), &[1, n_v, n, N_SEQS]);
        let alpha = ctx.add(&alpha, &w.dt_bias);
        let g = ctx.mul(&ctx.softplus(&alpha), &w.a); // log of the decay
        let g = ctx.reshape(&g, &[1, n_v, n, N_SEQS]);

        let d = size * size * n_v;
        let slot = |back: usize, shape: &[i64], strides: &[usize]| {
            let start = state.state_start(back) * element;
            ctx.view(&state.memory, shape, strides, start)
        };
        let column = size as usize * element;
        let square = column * size as usize;
        let before = slot(
            self.back,
            &[size, size, n_v, N_SEQS],
            &[column, square, square * n_v as usize],
        );
        let out = ctx
            .gated_delta_net(&q, &k, &v, &g, &beta, &before, n_slots)
            .named(format!("delta_net-{il}"));
        if n <= self.n_slots as i64 {
            // Its outputs and states lie where the states are kept.
            let start = state.outputs_start(n as usize) * element;
            ctx.place(&out, &state.memory, start);
            // Also where nobody reads the outputs.
            ctx.expand(&out);
        } else {
            // The new state follows the outputs. The copy comes first after the operation: Metal and CUDA fuse it.
            let n_out = (size * n_v * n * N_SEQS) as usize;
            let strides = [d as usize * element; 2];
            let new_state = ctx.view(&out, &[d, N_SEQS, 1], &strides, n_out * element);
            ctx.expand(&ctx.cpy(&new_state, &slot(0, &[d, N_SEQS, 1], &strides)));
        }

        let row = size as usize * element;
        let out = ctx.view(
            &out,
            &[size, n_v, n, N_SEQS],
            &[row, row * n_v as usize, row * (n_v * n) as usize],
            0,
        );
        let out = self.rms_norm(&out, &w.norm);
        let out = ctx.reshape(&out, &[ssm.value_dim(), self.n_tokens]);
        self.linear(&w.output, &ctx.swiglu(&z, &out)) // silu(z) * out
            .named(format!("delta_net_out-{il}"))
    }

    /// `down(silu(gate(x)) * up(x))`
    fn swiglu(&self, gate: &Tensor, up: &Tensor, down: &Tensor, x: &Tensor, join: bool) -> Tensor {
        let [gate, up] = self.linears([gate, up], x, join);
        self.linear(down, &self.ctx.swiglu(&gate, &up))
    }

    /// Products of the same `x` with several matrices: one operation for those whose rows follow each other in memory,
    /// if `join` allows it. Their results are then columns of one, with gaps between the rows of several tokens.
    fn linears<const N: usize>(
        &self,
        weights: [&Tensor; N],
        x: &Tensor,
        join: bool,
    ) -> [Tensor; N] {
        let (ctx, mut parts) = (self.ctx, weights.map(Tensor::clone));
        let mut done = 0;
        while done < N {
            let (mut joined, mut end) = (weights[done].clone(), done + 1);
            while let Some(more) = weights.get(end).filter(|_| join) {
                let Some(longer) = ctx.joined_rows(&joined, more) else {
                    break;
                };
                (joined, end) = (longer, end + 1);
            }
            let y = self.linear(&joined, x);
            let mut first = 0;
            for (part, w) in parts[done..end].iter_mut().zip(&weights[done..end]) {
                let shape = [w.ne(1), x.ne(1)];
                *part = if end - done > 1 {
                    ctx.view(&y, &shape, &[y.nb(1)], first as usize * y.nb(0))
                } else {
                    y.clone()
                };
                first += w.ne(1);
            }
            done = end;
        }
        parts
    }

    /// The experts that the router picks, weighted, and the shared one: `[n_embd, n]` in and out.
    fn moe(&self, w: &Moe<Tensor>, x: &Tensor, il: usize) -> Tensor {
        let ctx = self.ctx;
        let (n_embd, n) = (x.ne(0), x.ne(1));
        let (n_expert, n_used) = self
            .config
            .moe
            .map_or((1, 1), |m| (m.n_expert, m.n_expert_used));

        // A softmax wants rows without gaps.
        let [routes, share] =
            self.linears([&w.gate_inp, &w.gate_inp_shexp], x, self.joins && n == 1);
        let probs = ctx.soft_max(&routes); // [n_expert, n]
        let chosen = ctx
            .argsort_top_k(&probs, n_used)
            .named(format!("experts-{il}")); // [n_used, n]
        let weights = ctx.get_rows(&ctx.reshape(&probs, &[1, n_expert, n]), &chosen);
        let weights = ctx.reshape(&weights, &[n_used, n]);
        // The smallest F16 keeps the division finite.
        let sum = ctx.clamp(&ctx.sum_rows(&weights), 6.103_515_6e-5, f32::INFINITY);
        let weights = ctx.reshape(&ctx.div(&weights, &sum), &[1, n_used, n]);
        // Early, so that devices can fuse the choice of experts.
        ctx.expand(&weights);

        let columns = ctx.reshape(x, &[n_embd, 1, n]);
        let hidden = match &w.gate_up {
            GateUp::Separate { gate, up } => ctx.swiglu(
                &self.expert_linear(gate, &columns, &chosen),
                &self.expert_linear(up, &columns, &chosen),
            ),
            GateUp::Fused(gate_up) => {
                let both = self.expert_linear(gate_up, &columns, &chosen); // [2 * n_ff, n_used, n]
                let n_ff = both.ne(0) / 2;
                let half = |offset: usize| {
                    ctx.view(&both, &[n_ff, n_used, n], &[both.nb(1), both.nb(2)], offset)
                };
                ctx.swiglu(&half(0), &half(n_ff as usize * both.nb(0)))
            }
        };
        let out = self.expert_linear(&w.down_exps, &hidden, &chosen); // [n_embd, n_used, n]
        let out = ctx.mul(&out, &weights);
        let expert = |i: i64| ctx.view(&out, &[n_embd, n], &[out.nb(2)], i as usize * out.nb(1));
        let routed = match n_used {
            1 => ctx.cont(&expert(0)),
            _ => (1..n_used).fold(expert(0), |sum, i| ctx.add(&sum, &expert(i))),
        };

        // CUDA computes the shared expert along with the chosen ones in narrow passes.
        let join = self.joins && (self.on_cpu || n > NARROW);
        let shared = self.swiglu(&w.gate_shexp, &w.up_shexp, &w.down_shexp, x, join);
        let share = ctx.sigmoid(&share); // [1, n]
        ctx.add(&routed, &ctx.mul(&shared, &share))
            .named(format!("moe_out-{il}"))
    }

    /// `eh_proj([enorm(e); hnorm(h)])`: what goes into the draft head's layer.
    fn head_input(&self, w: &Mtp<Tensor>, embd: &Tensor, hidden: &Tensor) -> Tensor {
        let e = self.rms_norm(embd, &w.enorm);
        let h = self.rms_norm(hidden, &w.hnorm);
        self.linear(&w.eh_proj, &self.ctx.concat(&e, &h, 0))
            .named("head_in")
    }

    /// The draft head over embeddings and hidden states `[n_embd, n]`: its normed output `[n_embd, n]`, which
    /// gives the logits and is the hidden state of the next draft step.
    fn head(&self, w: &Mtp<Tensor>, state: &HeadState, embd: &Tensor, hidden: &Tensor) -> Tensor {
        let il = self.config.n_layer();
        let x = self.head_input(w, embd, hidden);
        let normed = self.rms_norm(&x, &w.layer.attn_norm);
        let (Mixer::Attention(attn), Some(config), Some(mask)) =
            (&w.layer.mixer, &self.config.mtp, &self.inputs.head_mask)
        else {
            unreachable!("the draft head is a full-attention layer and its pass has a mask");
        };
        let mixed = self.attention(attn, config, &state.kv, mask, &normed, None, il);
        let x = self.feed_forward(&w.layer, &self.ctx.add(&mixed, &x), il);
        self.rms_norm(&x, &w.shared_head_norm).named("head_norm")
    }

    /// The draft head's logits over the tokens that are drafted, `[n, 1]`.
    fn draft_logits(&self, w: &Tensor, hidden: &Tensor, vocab: Option<DraftVocab>) -> Tensor {
        let Some(vocab) = vocab else {
            return self.linear(w, hidden);
        };
        let rows = |first: i64, n: i64| {
            let view = self
                .ctx
                .view(w, &[w.ne(0), n], &[w.nb(1)], first as usize * w.nb(1));
            self.linear(&view, hidden)
        };
        let n_last = w.ne(1) - vocab.last_from;
        let first = rows(0, vocab.n_first);
        if n_last == 0 {
            return first;
        }
        self.ctx.concat(&first, &rows(vocab.last_from, n_last), 0)
    }

    /// The draft head during a trunk pass: the entry of each token is made from its embedding and the hidden
    /// state of the token before it, which for the first token was kept from the pass before.
    fn head_alongside(
        &self,
        w: &Mtp<Tensor>,
        state: &HeadState,
        model: &Model<Tensor>,
        embd: &Tensor,
        hidden: &Tensor,
        what: HeadPass,
    ) -> Option<Tensor> {
        let (ctx, n) = (self.ctx, self.n_tokens);
        if let Some(owed_at) = &self.inputs.owed_at {
            ctx.expand(&ctx.set_rows(&state.owed, hidden, owed_at));
            return None;
        }
        let n_embd = self.config.n_embd;
        let embd = if w.embed_tokens.is_same(&model.token_embd) {
            embd.clone()
        } else {
            ctx.get_rows(&w.embed_tokens, &self.inputs.tokens)
        };
        let last = self.last_hidden(state);
        let before = if n == 1 {
            last
        } else {
            let earlier = ctx.view(hidden, &[n_embd, n - 1], &[hidden.nb(1)], 0);
            ctx.concat(&last, &earlier, 1)
        };
        if let Some(observer) = self.observer {
            observer.skip.set(1);
        }
        let logits = if what == HeadPass::Logits {
            let out = self.head(w, state, &embd, &before);
            if self.observer.is_some() {
                return None;
            }
            let logits = self.linear(&w.head, &out).named("head_logits");
            ctx.output(&logits); // [n_vocab, n]
            Some(logits)
        } else {
            self.head_keys(w, state, &embd, &before);
            None
        };
        let newest = |of: &Tensor| {
            let n_rows = self.slots_written();
            let first = (of.ne(1) - n_rows) as usize;
            ctx.view(of, &[n_embd, n_rows], &[of.nb(1)], first * of.nb(1))
        };
        ctx.expand(&ctx.cpy(&newest(hidden), &newest(&state.hidden)));
        logits
    }

    /// Writes the draft head's keys and values of tokens, from their embeddings and the hidden states before them.
    fn head_keys(&self, w: &Mtp<Tensor>, state: &HeadState, embd: &Tensor, before: &Tensor) {
        let x = self.rms_norm(&self.head_input(w, embd, before), &w.layer.attn_norm);
        if let (Mixer::Attention(attn), Some(config)) = (&w.layer.mixer, &self.config.mtp) {
            let (k, v) = self.keys_and_values(attn, config, &x);
            self.store(attn, config, &state.kv, &k, &v, self.config.n_layer());
        }
    }

    /// The trunk's hidden state at the last token that counts, `[n_embd, 1]`.
    fn last_hidden(&self, state: &HeadState) -> Tensor {
        let row = self.n_slots - 1 - self.back;
        let (n_embd, stride) = (self.config.n_embd, state.hidden.nb(1));
        self.ctx
            .view(&state.hidden, &[n_embd, 1], &[stride], row * stride)
    }

    /// As [`Pass::qkv`] without the queries, which a pass that only fills the cache does not need.
    fn keys_and_values(
        &self,
        w: &Attention<Tensor>,
        config: &LayerConfig,
        x: &Tensor,
    ) -> (Tensor, Tensor) {
        match &w.qkv {
            Qkv::Separate { k, v, .. } => self.linears([k, v], x, self.joins).into(),
            Qkv::Fused(_) => {
                let (_, k, v) = self.qkv(w, config, x);
                (k, v)
            }
        }
    }
}
