//! Building graphs: one method per operation, shapes checked here before ggml's C code would abort on them.
//!
//! A mistake is remembered and building goes on, so that a forward pass reads without a `?` on every line;
//! [`Graph::new`] returns the first mistake. Shapes in the docs are in ggml order, fastest dimension first.

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::tensor::{ContextInner, lay};
use crate::{Backend, DType, Element, Error, Tensor, exclusive, log};

/// A place to describe tensors and the operations between them.
pub struct Context {
    pub(crate) inner: Arc<ContextInner>,
    capacity: usize,
    graph: Cell<*mut ggml::ggml_cgraph>,
    mistake: RefCell<Option<Error>>,
    /// What a mistaken `new_tensor` returns.
    placeholder: RefCell<Option<Tensor>>,
}

/// Room that is never given out: operations may make an intermediate view besides their result.
const SPARE_TENSORS: usize = 4;

/// Rows that the layouts of ggml's CPU backend interleave at most.
const INTERLEAVED_ROWS: i64 = 16;

// SAFETY: all state is owned; only sharing between threads (Sync) is ruled out, by the cells.
unsafe impl Send for Context {}

/// `GGML_ROPE_TYPE_NEOX` and `GGML_ROPE_TYPE_IMROPE` of ggml.h, macros that the bindings leave out.
const ROPE_TYPE_NEOX: i32 = 2;
const ROPE_TYPE_IMROPE: i32 = 40;

/// Numbers of a rotary position embedding over four position rows (ggml's interleaved M-RoPE).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Leading dimensions of a head that turn.
    pub n_dims: i32,
    /// Pairs per position row: time, height, width, extra.
    pub sections: [i32; 4],
    /// Base of the geometric series of wavelengths.
    pub freq_base: f32,
    /// Context length the model was trained with.
    pub n_ctx_orig: i32,
}

impl Rope {
    /// How many position rows text needs: along time, height and width it moves alike, so that one serves for all of
    /// them, unless some pair turns with the fourth. Which row a pair turns with is ggml's rule for interleaved
    /// sections.
    pub fn n_rows(&self) -> usize {
        let all: i32 = self.sections.iter().sum();
        let alike = |pair: i32| {
            let place = pair % all.max(1);
            place < 3 * self.sections[(place % 3) as usize]
        };
        if (0..self.n_dims / 2).all(alike) {
            1
        } else {
            4
        }
    }
}

impl Context {
    /// A context with room for `max_tensors` tensors and a graph over them.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(max_tensors: usize) -> Result<Self, Error> {
        log::install();
        let capacity = max_tensors + 2 * SPARE_TENSORS;
        // SAFETY: the sizes come from ggml itself; with no_alloc the context only holds descriptions.
        let raw = unsafe {
            ggml::ggml_init(ggml::ggml_init_params {
                mem_size: ggml::ggml_tensor_overhead() * capacity
                    + ggml::ggml_graph_overhead_custom(capacity, false),
                mem_buffer: std::ptr::null_mut(),
                no_alloc: true,
            })
        };
        if raw.is_null() {
            return Err(Error::Device(
                "no memory for a graph's description".to_owned(),
            ));
        }
        Ok(Self {
            inner: Arc::new(ContextInner::new(raw)),
            capacity,
            graph: Cell::new(std::ptr::null_mut()),
            mistake: RefCell::new(None),
            placeholder: RefCell::new(None),
        })
    }

    /// The first mistake so far, as an error.
    ///
    /// # Errors
    /// When an operation was given tensors that it does not take.
    pub fn check(&self) -> Result<(), Error> {
        self.mistake.borrow_mut().take().map_or(Ok(()), Err)
    }

    fn fail(&self, op: &str, a: &Tensor, reason: String) -> Tensor {
        self.mistake.borrow_mut().get_or_insert(Error::Graph {
            node: format!("{op}({})", a.name()),
            reason,
        });
        a.clone()
    }

    /// Runs one ggml builder over `inputs` if `fits` holds and there is room; else records the mistake.
    fn op(
        &self,
        op: &str,
        inputs: &[&Tensor],
        fits: bool,
        build: impl FnOnce(*mut ggml::ggml_context) -> *mut ggml::ggml_tensor,
    ) -> Tensor {
        if self.mistake.borrow().is_some() {
            return inputs[0].clone();
        }
        if !fits {
            let shapes: Vec<_> = inputs
                .iter()
                .map(|t| format!("{} {:?} {}", t.name(), t.shape(), t.dtype()))
                .collect();
            return self.fail(
                op,
                inputs[0],
                format!("does not take {}", shapes.join(" and ")),
            );
        }
        if self.room() <= SPARE_TENSORS {
            return self.fail(
                op,
                inputs[0],
                format!("more than {} tensors", self.capacity),
            );
        }
        for input in inputs {
            self.inner.keep_context(&input.context);
        }
        match NonNull::new(build(self.inner.raw)) {
            // SAFETY: the builder made it in this context.
            Some(raw) => unsafe { Tensor::new(raw, &self.inner) },
            None => self.fail(op, inputs[0], "ggml made nothing".to_owned()),
        }
    }

    /// Tensors that still fit into the context's memory.
    fn room(&self) -> usize {
        // SAFETY: the context is alive.
        unsafe {
            let size = ggml::ggml_get_mem_size(self.inner.raw);
            let used = ggml::ggml_used_mem(self.inner.raw);
            let graph = if self.graph.get().is_null() {
                ggml::ggml_graph_overhead_custom(self.capacity, false)
            } else {
                0
            };
            (size - used).saturating_sub(graph) / ggml::ggml_tensor_overhead()
        }
    }

    /// A tensor without a source: an input, a state or a weight, depending on where it is allocated.
    pub fn new_tensor(&self, name: &str, dtype: DType, shape: &[i64]) -> Tensor {
        let block = dtype.block_size() as i64;
        let valid = (1..=4).contains(&shape.len())
            && shape.iter().all(|&n| n > 0)
            && block > 0
            && shape[0] % block == 0
            && has_countable_bytes(shape, dtype)
            && self.room() > SPARE_TENSORS;
        if !valid {
            self.mistake.borrow_mut().get_or_insert(Error::Graph {
                node: name.to_owned(),
                reason: format!("no tensor of {dtype} can have the shape {shape:?} here"),
            });
            if let Some(tensor) = self.placeholder.borrow().as_ref() {
                return tensor.clone();
            }
        }
        let (shape, dtype) = if valid {
            (shape, dtype)
        } else {
            (&[1i64][..], DType::F32)
        };
        // SAFETY: shape has 1 to 4 positive dimensions that fit the type, and there is room: a mistake uses up
        // one spare tensor, once.
        let raw = unsafe {
            ggml::ggml_new_tensor(self.inner.raw, dtype.0, shape.len() as i32, shape.as_ptr())
        };
        let Some(raw) = NonNull::new(raw) else {
            // ggml aborts rather than return null here; this keeps the type honest.
            unreachable!("ggml_new_tensor returned null");
        };
        // SAFETY: just made in this context.
        let tensor = unsafe { Tensor::new(raw, &self.inner) }.named(name);
        if !valid {
            self.placeholder.replace(Some(tensor.clone()));
        }
        tensor
    }

    /// As [`Context::new_tensor`], and kept apart from other memory, so that it can be set before computing.
    pub fn input(&self, name: &str, dtype: DType, shape: &[i64]) -> Tensor {
        let tensor = self.new_tensor(name, dtype, shape);
        // SAFETY: the description is alive.
        unsafe { ggml::ggml_set_input(tensor.as_ptr()) };
        tensor
    }

    /// Marks a tensor as one that is read after computing, and adds it to the graph.
    pub fn output(&self, a: &Tensor) {
        // SAFETY: the description is alive.
        unsafe { ggml::ggml_set_output(a.as_ptr()) };
        self.expand(a);
    }

    /// Adds a tensor and everything it is made from to the graph, after what was added before.
    pub fn expand(&self, a: &Tensor) {
        if self.mistake.borrow().is_some() {
            return;
        }
        if !Arc::ptr_eq(&a.context, &self.inner) {
            self.fail("expand", a, "belongs to another context".to_owned());
            return;
        }
        // SAFETY: the context keeps room for one graph of its capacity; the tensor belongs to it.
        unsafe {
            if self.graph.get().is_null() {
                self.graph.set(ggml::ggml_new_graph_custom(
                    self.inner.raw,
                    self.capacity,
                    false,
                ));
            }
            ggml::ggml_build_forward_expand(self.graph.get(), a.as_ptr());
        }
    }

    /// Allocates every tensor of this context on the backend's device, zeroed.
    ///
    /// # Errors
    /// When an earlier step was mistaken, or memory runs out.
    pub fn allocate(&self, backend: &Backend, what: &str) -> Result<(), Error> {
        self.check()?;
        self.inner.allocate(backend, backend.buffer_type(), what)
    }

    /// Makes the operation `a` leave its result in `memory`, `offset` bytes from its start, instead of in memory
    /// that the graph shares between its nodes: what is there stays until something else is put there.
    pub fn place(&self, a: &Tensor, memory: &Tensor, offset: usize) {
        if self.mistake.borrow().is_some() {
            return;
        }
        // SAFETY: both descriptions are alive; a view's source is kept alive by its context.
        unsafe {
            let (result, target) = (a.as_ptr(), memory.as_ptr());
            let buffer = (*target).buffer;
            let fits = Arc::ptr_eq(&a.context, &self.inner)
                && (*result).view_src.is_null()
                && (*result).data.is_null()
                && a.is_contiguous()
                && (*target).view_src.is_null()
                && memory.is_contiguous()
                && !buffer.is_null()
                && ggml::ggml_backend_buffer_get_usage(buffer)
                    != ggml::GGML_BACKEND_BUFFER_USAGE_WEIGHTS
                && offset.is_multiple_of(ggml::ggml_backend_buffer_get_alignment(buffer))
                && ggml::ggml_backend_buffer_get_alloc_size(buffer, result)
                    .checked_add(offset)
                    .is_some_and(|end| end <= memory.bytes());
            if !fits {
                let reason = format!("cannot lie in {} at byte {offset}", memory.name());
                self.fail("place", a, reason);
                return;
            }
            self.inner.keep_context(&memory.context);
            // SAFETY: the range lies inside the target's data, which its context, kept by this one, keeps alive.
            let address = (*target).data.cast::<u8>().wrapping_add(offset).cast();
            if !lay(buffer, result, address) {
                self.fail("place", a, "the device refuses".to_owned());
            }
        }
    }

    /// The rows of `a` and then those of `b` as one matrix, where they lie so in memory; else none. Nothing is copied.
    /// Layouts made for a CPU interleave groups of rows: of quantized matrices only whole groups are joined.
    pub fn joined_rows(&self, a: &Tensor, b: &Tensor) -> Option<Tensor> {
        let whole_groups = a.dtype().block_size() == 1
            || a.ne(1) == b.ne(1)
            || [a, b].iter().all(|t| t.ne(1) % INTERLEAVED_ROWS == 0);
        let fits = a.dtype() == b.dtype()
            && a.ne(0) == b.ne(0)
            && whole_groups
            && [a, b]
                .iter()
                .all(|t| t.ne(2) == 1 && t.ne(3) == 1 && t.is_contiguous());
        if !fits || self.mistake.borrow().is_some() || self.room() <= SPARE_TENSORS {
            return None;
        }
        // SAFETY: descriptions are alive; addresses are compared only.
        let (buffer, start) = unsafe {
            let (first, second) = (&*a.as_ptr(), &*b.as_ptr());
            let follows = !first.data.is_null()
                && first.view_src.is_null()
                && second.view_src.is_null()
                && first.data.cast::<u8>().wrapping_add(a.bytes()) == second.data.cast::<u8>()
                && !first.buffer.is_null()
                && first.buffer == second.buffer;
            if !follows {
                return None;
            }
            (first.buffer, first.data)
        };
        let shape = [a.ne(0), a.ne(1) + b.ne(1)];
        let both = self.new_tensor(&format!("{}+", a.name()), a.dtype(), &shape);
        // SAFETY: both parts lie in the buffer, one behind the other, so the whole does. A device that pads this
        // matrix would write behind it: such a one is not made.
        unsafe {
            if ggml::ggml_backend_buffer_get_alloc_size(buffer, both.as_ptr()) != both.bytes()
                || !lay(buffer, both.as_ptr(), start)
            {
                return None;
            }
        }
        self.inner.keep_context(&a.context);
        self.inner.keep_context(&b.context);
        Some(both)
    }

    /// Bytes of the buffers that hold this context's tensors.
    pub fn buffer_bytes(&self) -> usize {
        self.inner.buffer_bytes()
    }

    /// Rows of `a` picked by `ids`: `[n, m]` and `[k]` give `[n, k]` (per slice in higher dimensions).
    pub fn get_rows(&self, a: &Tensor, ids: &Tensor) -> Tensor {
        let fits = ids.dtype() == DType::I32
            && a.ne(2) == ids.ne(1)
            && a.ne(3) == ids.ne(2)
            && ids.ne(3) == 1;
        // SAFETY: sources are alive and their shapes fit, as for every builder below.
        self.op("get_rows", &[a, ids], fits, |c| unsafe {
            ggml::ggml_get_rows(c, a.as_ptr(), ids.as_ptr())
        })
    }

    /// Writes the rows of `rows` into `a` at `ids`; the result is a view of `a`.
    pub fn set_rows(&self, a: &Tensor, rows: &Tensor, ids: &Tensor) -> Tensor {
        let fits = a.ne(0) == rows.ne(0)
            && a.ne(2) == rows.ne(2)
            && a.ne(3) == rows.ne(3)
            && rows.ne(1) == ids.ne(0)
            && ids.ne(1) == 1
            && ids.ne(2) == 1
            && ids.ne(3) == 1
            && matches!(rows.dtype(), DType::F32 | DType::F16)
            && matches!(ids.dtype(), DType::I64 | DType::I32)
            && a.rows_are_contiguous()
            && rows.rows_are_contiguous();
        // SAFETY: see get_rows.
        self.op("set_rows", &[a, rows, ids], fits, |c| unsafe {
            ggml::ggml_set_rows(c, a.as_ptr(), rows.as_ptr(), ids.as_ptr())
        })
    }

    /// `a + b`, `b` repeated where it is smaller.
    pub fn add(&self, a: &Tensor, b: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("add", &[a, b], repeats(b, a), |c| unsafe {
            ggml::ggml_add(c, a.as_ptr(), b.as_ptr())
        })
    }

    /// `a * b` element by element, `b` repeated where it is smaller.
    pub fn mul(&self, a: &Tensor, b: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("mul", &[a, b], repeats(b, a), |c| unsafe {
            ggml::ggml_mul(c, a.as_ptr(), b.as_ptr())
        })
    }

    /// `a / b` element by element, `b` repeated where it is smaller.
    pub fn div(&self, a: &Tensor, b: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("div", &[a, b], repeats(b, a), |c| unsafe {
            ggml::ggml_div(c, a.as_ptr(), b.as_ptr())
        })
    }

    /// `a * factor`.
    pub fn scale(&self, a: &Tensor, factor: f32) -> Tensor {
        // SAFETY: see get_rows.
        self.op("scale", &[a], padded(a), |c| unsafe {
            ggml::ggml_scale(c, a.as_ptr(), factor)
        })
    }

    /// Values limited to `min..=max`.
    pub fn clamp(&self, a: &Tensor, min: f32, max: f32) -> Tensor {
        // SAFETY: see get_rows.
        self.op("clamp", &[a], a.rows_are_contiguous(), |c| unsafe {
            ggml::ggml_clamp(c, a.as_ptr(), min, max)
        })
    }

    /// `x / sqrt(mean(x^2) + eps)` over each row.
    pub fn rms_norm(&self, a: &Tensor, eps: f32) -> Tensor {
        // SAFETY: see get_rows.
        self.op("rms_norm", &[a], a.rows_are_contiguous(), |c| unsafe {
            ggml::ggml_rms_norm(c, a.as_ptr(), eps)
        })
    }

    /// `1 / (1 + exp(-x))`.
    pub fn sigmoid(&self, a: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("sigmoid", &[a], a.rows_are_contiguous(), |c| unsafe {
            ggml::ggml_sigmoid(c, a.as_ptr())
        })
    }

    /// `x * sigmoid(x)`.
    pub fn silu(&self, a: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("silu", &[a], a.rows_are_contiguous(), |c| unsafe {
            ggml::ggml_silu(c, a.as_ptr())
        })
    }

    /// `log(1 + exp(x))`.
    pub fn softplus(&self, a: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("softplus", &[a], a.rows_are_contiguous(), |c| unsafe {
            ggml::ggml_softplus(c, a.as_ptr())
        })
    }

    /// `silu(gate) * up`.
    pub fn swiglu(&self, gate: &Tensor, up: &Tensor) -> Tensor {
        let fits = gate.shape() == up.shape()
            && gate.dtype() == up.dtype()
            && gate.rows_are_evenly_spaced()
            && up.rows_are_evenly_spaced();
        // SAFETY: see get_rows.
        self.op("swiglu", &[gate, up], fits, |c| unsafe {
            ggml::ggml_swiglu_split(c, gate.as_ptr(), up.as_ptr())
        })
    }

    /// Softmax over each row.
    pub fn soft_max(&self, a: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("soft_max", &[a], a.is_contiguous(), |c| unsafe {
            ggml::ggml_soft_max(c, a.as_ptr())
        })
    }

    /// The sum of each row: `[n, m]` gives `[1, m]`.
    pub fn sum_rows(&self, a: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("sum_rows", &[a], a.rows_are_contiguous(), |c| unsafe {
            ggml::ggml_sum_rows(c, a.as_ptr())
        })
    }

    /// The places of the `k` largest values of each row, largest first: `[n, m]` gives `[k, m]` of I32.
    pub fn argsort_top_k(&self, a: &Tensor, k: i64) -> Tensor {
        let fits = k >= 1 && k <= a.ne(0) && a.dtype() == DType::F32;
        // SAFETY: see get_rows.
        self.op("argsort_top_k", &[a], fits, |c| unsafe {
            ggml::ggml_argsort_top_k(c, a.as_ptr(), k as i32)
        })
    }

    /// The places of the `k` largest values of each row, in no order: `[n, m]` gives `[k, m]` of I32.
    pub fn top_k(&self, a: &Tensor, k: i64) -> Tensor {
        let fits = k >= 1 && k <= a.ne(0) && a.dtype() == DType::F32 && a.is_contiguous();
        // SAFETY: see get_rows.
        self.op("top_k", &[a], fits, |c| unsafe {
            ggml::ggml_top_k(c, a.as_ptr(), k as i32)
        })
    }

    /// The place of the largest value of each row: `[n, m]` gives `[m]` of I32.
    pub fn argmax(&self, a: &Tensor) -> Tensor {
        let fits = a.dtype() == DType::F32 && a.ne(2) == 1 && a.ne(3) == 1 && a.is_contiguous();
        // SAFETY: see get_rows.
        self.op("argmax", &[a], fits, |c| unsafe {
            ggml::ggml_argmax(c, a.as_ptr())
        })
    }

    /// `w` times the columns of `x`: `[n, m]` and `[n, k]` give `[m, k]`. Higher dimensions of `w` are repeated.
    pub fn mul_mat(&self, w: &Tensor, x: &Tensor) -> Tensor {
        let fits = w.ne(0) == x.ne(0)
            && x.ne(2) % w.ne(2) == 0
            && x.ne(3) % w.ne(3) == 0
            && w.nb(0) <= w.nb(1);
        // SAFETY: see get_rows.
        self.op("mul_mat", &[w, x], fits, |c| unsafe {
            ggml::ggml_mul_mat(c, w.as_ptr(), x.as_ptr())
        })
    }

    /// The Walsh-Hadamard transform of each column of `x`: as `mul_mat(h, x)` with the orthonormal matrix of that
    /// name. `h` must hold it; devices that have a fast transform do not read it.
    pub fn hadamard(&self, h: &Tensor, x: &Tensor) -> Tensor {
        let n = h.ne(0);
        let fits = h.shape() == [n, n, 1, 1]
            && (n as u64).is_power_of_two()
            && x.ne(0) == n
            && h.dtype() == DType::F32
            && x.dtype() == DType::F32
            && x.is_contiguous();
        // SAFETY: see get_rows; the hint is set on the new node.
        self.op("hadamard", &[h, x], fits, |c| unsafe {
            let result = ggml::ggml_mul_mat(c, h.as_ptr(), x.as_ptr());
            ggml::ggml_mul_mat_set_hint(result, ggml::GGML_HINT_SRC0_IS_HADAMARD);
            result
        })
    }

    /// For each column of `x` the products with the experts that `ids` picks.
    ///
    /// `w` is `[n, m, n_expert]`, `x` `[n, 1 or k, n_tokens]`, `ids` `[k, n_tokens]` of I32; the result is
    /// `[m, k, n_tokens]`.
    pub fn mul_mat_id(&self, w: &Tensor, x: &Tensor, ids: &Tensor) -> Tensor {
        let fits = ids.dtype() == DType::I32
            && w.ne(0) == x.ne(0)
            && w.ne(3) == 1
            && x.ne(3) == 1
            && ids.ne(2) == 1
            && ids.ne(3) == 1
            && ids.ne(1) == x.ne(2)
            && ids.ne(0) % x.ne(1) == 0
            && w.nb(0) <= w.nb(1);
        // SAFETY: see get_rows.
        self.op("mul_mat_id", &[w, x, ids], fits, |c| unsafe {
            ggml::ggml_mul_mat_id(c, w.as_ptr(), x.as_ptr(), ids.as_ptr())
        })
    }

    /// A window on the data of `a` without a copy: `strides` are bytes for dimensions 1 and up.
    pub fn view(&self, a: &Tensor, shape: &[i64], strides: &[usize], offset: usize) -> Tensor {
        let row = shape
            .first()
            .map_or(0, |&n| a.dtype().row_bytes(n.max(0) as usize));
        let further = shape.iter().skip(1).zip(strides);
        let end = further
            .map(|(&n, &stride)| (n.max(1) as usize - 1).checked_mul(stride))
            .try_fold(row, |sum, bytes| sum.checked_add(bytes?))
            .and_then(|extent| extent.checked_add(offset));
        let fits = (1..=4).contains(&shape.len())
            && strides.len() + 1 == shape.len()
            && shape.iter().all(|&n| n > 0)
            && shape[0] % a.dtype().block_size() as i64 == 0
            && end.is_some_and(|end| end <= a.bytes());
        // SAFETY: see get_rows; the window lies inside the data of `a`.
        self.op("view", &[a], fits, |c| unsafe {
            let (p, n) = (a.as_ptr(), shape);
            match *strides {
                [] => ggml::ggml_view_1d(c, p, n[0], offset),
                [s1] => ggml::ggml_view_2d(c, p, n[0], n[1], s1, offset),
                [s1, s2] => ggml::ggml_view_3d(c, p, n[0], n[1], n[2], s1, s2, offset),
                [s1, s2, s3, ..] => {
                    ggml::ggml_view_4d(c, p, n[0], n[1], n[2], n[3], s1, s2, s3, offset)
                }
            }
        })
    }

    /// The same data in another shape.
    pub fn reshape(&self, a: &Tensor, shape: &[i64]) -> Tensor {
        let fits = (1..=4).contains(&shape.len())
            && a.is_contiguous()
            && shape.iter().all(|&n| n > 0)
            && shape.iter().try_fold(1i64, |all, &n| all.checked_mul(n))
                == Some(a.n_elements() as i64);
        // SAFETY: see get_rows.
        self.op("reshape", &[a], fits, |c| unsafe {
            let (p, n) = (a.as_ptr(), shape);
            match n.len() {
                1 => ggml::ggml_reshape_1d(c, p, n[0]),
                2 => ggml::ggml_reshape_2d(c, p, n[0], n[1]),
                3 => ggml::ggml_reshape_3d(c, p, n[0], n[1], n[2]),
                _ => ggml::ggml_reshape_4d(c, p, n[0], n[1], n[2], n[3]),
            }
        })
    }

    /// Dimensions in another order: dimension `i` of `a` becomes dimension `axes[i]`.
    pub fn permute(&self, a: &Tensor, axes: [i32; 4]) -> Tensor {
        let mut sorted = axes;
        sorted.sort_unstable();
        // SAFETY: see get_rows.
        self.op("permute", &[a], sorted == [0, 1, 2, 3], |c| unsafe {
            ggml::ggml_permute(c, a.as_ptr(), axes[0], axes[1], axes[2], axes[3])
        })
    }

    /// The first two dimensions exchanged.
    pub fn transpose(&self, a: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("transpose", &[a], true, |c| unsafe {
            ggml::ggml_transpose(c, a.as_ptr())
        })
    }

    /// A copy without gaps.
    pub fn cont(&self, a: &Tensor) -> Tensor {
        // SAFETY: see get_rows.
        self.op("cont", &[a], true, |c| unsafe {
            ggml::ggml_cont(c, a.as_ptr())
        })
    }

    /// `b` after `a` along dimension `dim`.
    pub fn concat(&self, a: &Tensor, b: &Tensor, dim: usize) -> Tensor {
        let fits =
            dim < 4 && a.dtype() == b.dtype() && (0..4).all(|i| i == dim || a.ne(i) == b.ne(i));
        // SAFETY: see get_rows.
        self.op("concat", &[a, b], fits, |c| unsafe {
            ggml::ggml_concat(c, a.as_ptr(), b.as_ptr(), dim as i32)
        })
    }

    /// Copies `a` into `to`, converting the type; the result is a view of `to`.
    pub fn cpy(&self, a: &Tensor, to: &Tensor) -> Tensor {
        let fits = a.n_elements() == to.n_elements();
        // SAFETY: see get_rows.
        self.op("cpy", &[a, to], fits, |c| unsafe {
            ggml::ggml_cpy(c, a.as_ptr(), to.as_ptr())
        })
    }

    /// Rotary embedding of `a` `[head_dim, n_head, n_tokens]` at `positions`, I32: one row of `n_tokens` where
    /// [`Rope::n_rows`] says so, which devices can fuse with a norm before it, else four.
    pub fn rope(&self, a: &Tensor, positions: &Tensor, rope: &Rope) -> Tensor {
        let n_rows = rope.n_rows();
        let fits = positions.dtype() == DType::I32
            && positions.n_elements() as i64 == n_rows as i64 * a.ne(2)
            && rope.n_dims > 0
            && rope.n_dims % 2 == 0
            && i64::from(rope.n_dims) <= a.ne(0)
            && (1..=a.ne(0)).contains(&rope.sections.iter().map(|&n| i64::from(n)).sum())
            && rope.sections.iter().all(|&n| n >= 0)
            && a.ne(3) == 1;
        let mut sections = rope.sections;
        let mode = if n_rows == 1 {
            ROPE_TYPE_NEOX
        } else {
            ROPE_TYPE_IMROPE
        };
        // SAFETY: see get_rows; sections holds the four numbers that ggml reads in the mode that has any.
        self.op("rope", &[a, positions], fits, |c| unsafe {
            ggml::ggml_rope_multi(
                c,
                a.as_ptr(),
                positions.as_ptr(),
                std::ptr::null_mut(),
                rope.n_dims,
                sections.as_mut_ptr(),
                mode,
                rope.n_ctx_orig,
                rope.freq_base,
                1.0,
                0.0,
                1.0,
                32.0,
                1.0,
            )
        })
    }

    /// Softmax attention in one operation.
    ///
    /// `q` is `[head_dim, n_tokens, n_head, n_seqs]`, `k` and `v` `[head_dim, n_kv, n_head_kv, n_seqs]`, `mask`
    /// `[n_kv, n_tokens]` of F16 (0 or -inf, added to the scaled products); the result is
    /// `[head_dim, n_head, n_tokens, n_seqs]`.
    pub fn flash_attn(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &Tensor,
        scale: f32,
    ) -> Tensor {
        let fits = q.dtype() == DType::F32
            && q.ne(0) == k.ne(0)
            && k.ne(1) == v.ne(1)
            && k.ne(2) == v.ne(2)
            && q.ne(2) % k.ne(2) == 0
            && q.ne(3) == k.ne(3)
            && q.ne(3) == v.ne(3)
            && mask.dtype() == DType::F16
            && mask.is_contiguous()
            && mask.ne(0) == k.ne(1)
            && mask.ne(1) >= q.ne(1)
            && mask.ne(2) == 1
            && mask.ne(3) == 1
            && k.nb(0) == k.dtype().block_bytes()
            && v.nb(0) == v.dtype().block_bytes();
        // SAFETY: see get_rows.
        self.op("flash_attn", &[q, k, v, mask], fits, |c| unsafe {
            let result = ggml::ggml_flash_attn_ext(
                c,
                q.as_ptr(),
                k.as_ptr(),
                v.as_ptr(),
                mask.as_ptr(),
                scale,
                0.0,
                0.0,
            );
            ggml::ggml_prec_set_acc(result, ggml::GGML_PREC_F32);
            result
        })
    }

    /// Causal convolution of each channel with its own short kernel.
    ///
    /// `x` is `[kernel - 1 + n_tokens, channels, n_seqs]`, `kernel` `[kernel, channels]`; the result is
    /// `[channels, n_tokens, n_seqs]`.
    pub fn ssm_conv(&self, x: &Tensor, kernel: &Tensor) -> Tensor {
        let fits = x.ne(3) == 1
            && kernel.ne(2) == 1
            && kernel.ne(3) == 1
            && x.ne(1) == kernel.ne(1)
            && x.ne(0) >= kernel.ne(0)
            && x.is_contiguous()
            && kernel.is_contiguous()
            && x.dtype() == DType::F32
            && kernel.dtype() == DType::F32;
        // SAFETY: see get_rows.
        self.op("ssm_conv", &[x, kernel], fits, |c| unsafe {
            ggml::ggml_ssm_conv(c, x.as_ptr(), kernel.as_ptr())
        })
    }

    /// The gated delta rule over a run of tokens, with the last `n_states` states.
    ///
    /// Shapes (S = head size, H_v a multiple of H_k): `q`, `k` `[S, H_k, n_tokens, n_seqs]`, `v` `[S, H_v, n_tokens,
    /// n_seqs]`, `g` and `beta` `[1, H_v, n_tokens, n_seqs]`, `state` `[S, S, H_v, n_seqs]`. The result packs the
    /// outputs `[S, H_v, n_tokens, n_seqs]` and then `n_states` states, newest first.
    #[expect(clippy::too_many_arguments, reason = "the operation's own operands")]
    pub fn gated_delta_net(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        g: &Tensor,
        beta: &Tensor,
        state: &Tensor,
        n_states: i64,
    ) -> Tensor {
        let (size, heads, tokens, seqs) = (v.ne(0), v.ne(1), v.ne(2), v.ne(3));
        let all = [q, k, v, g, beta, state];
        let fits = all.iter().all(|t| t.dtype() == DType::F32)
            && [q, k, v].iter().all(|t| t.rows_are_contiguous())
            && [g, beta, state].iter().all(|t| t.is_contiguous())
            && q.shape() == k.shape()
            && q.ne(0) == size
            && heads % q.ne(1) == 0
            && q.ne(2) == tokens
            && q.ne(3) == seqs
            && g.shape() == [1, heads, tokens, seqs]
            && beta.shape() == g.shape()
            && state.shape() == [size, size, heads, seqs]
            && n_states >= 1;
        // SAFETY: see get_rows.
        self.op("gated_delta_net", &all, fits, |c| unsafe {
            ggml::ggml_gated_delta_net(
                c,
                q.as_ptr(),
                k.as_ptr(),
                v.as_ptr(),
                g.as_ptr(),
                beta.as_ptr(),
                state.as_ptr(),
                n_states,
            )
        })
    }
}

/// True where `backend` computes every node of the graph, and reaches all memory that is already there.
///
/// # Safety
/// The graph must be alive.
unsafe fn suits_one(graph: *mut ggml::ggml_cgraph, backend: &Backend) -> bool {
    // SAFETY: the caller's promise; nodes and their sources live as long as the graph's context.
    unsafe {
        let device = backend.device().0;
        let reaches = |tensor: *mut ggml::ggml_tensor| {
            let owner = if (*tensor).view_src.is_null() {
                tensor
            } else {
                (*tensor).view_src
            };
            let buffer = (*owner).buffer;
            buffer.is_null()
                || ggml::ggml_backend_dev_supports_buft(
                    device,
                    ggml::ggml_backend_buffer_get_type(buffer),
                )
        };
        (0..ggml::ggml_graph_n_nodes(graph)).all(|i| {
            let node = ggml::ggml_graph_node(graph, i);
            let mut sources = (*node).src.iter().filter(|src| !src.is_null());
            ggml::ggml_backend_dev_supports_op(device, node)
                && reaches(node)
                && sources.all(|&src| reaches(src))
        })
    }
}

/// Has a scheduler keep the graph's inputs where they are used: it puts what is marked as an input into the CPU's memory
/// and copies it for each computation. The mark is not needed otherwise, since all tensors that no operation computes
/// get memory before those that one does.
///
/// # Safety
/// The graph must be alive, and nothing else may use its tensors meanwhile.
unsafe fn keep_inputs(graph: *mut ggml::ggml_cgraph) {
    // SAFETY: the caller's promise; nodes and their sources live as long as the graph's context.
    unsafe {
        for i in 0..ggml::ggml_graph_n_nodes(graph) {
            let node = ggml::ggml_graph_node(graph, i);
            for &src in (*node).src.iter().filter(|src| !src.is_null()) {
                (*src).flags &= !(ggml::GGML_TENSOR_FLAG_INPUT as i32);
            }
        }
    }
}

/// True where `small` can be repeated to the shape of `large`.
fn repeats(small: &Tensor, large: &Tensor) -> bool {
    small.dtype() == large.dtype() && (0..4).all(|i| large.ne(i) % small.ne(i) == 0)
}

/// True where rows lie side by side without gaps between them, whatever follows each row's last element.
fn padded(a: &Tensor) -> bool {
    let slice = a.nb(1) * a.ne(1) as usize;
    a.nb(0) == a.dtype().block_bytes() && a.nb(2) == slice && a.nb(3) == slice * a.ne(2) as usize
}

/// True where a tensor's bytes can be counted; C would multiply until it wraps round.
fn has_countable_bytes(shape: &[i64], dtype: DType) -> bool {
    let bytes = shape
        .iter()
        .try_fold(dtype.block_bytes() as i64, |all, &n| all.checked_mul(n));
    bytes.is_some_and(|n| n < i64::MAX / 2)
}

/// A graph with its memory: inputs can be set, it can be computed again and again, outputs can be read.
pub struct Graph {
    allocator: Allocator,
    backends: Vec<Backend>,
    raw: *mut ggml::ggml_cgraph,
    context: Context,
    /// Inputs to be set when it is computed: tensors, and where their bytes end in `bytes`.
    staged: Vec<(Tensor, usize)>,
    bytes: Vec<u8>,
}

/// Where a graph's intermediate results lie, and who computes it. A scheduler holds one allocated graph, so each graph
/// has its own.
enum Allocator {
    /// The only backend is the CPU's, which computes nodes in the order in which they were described.
    Single(ggml::ggml_gallocr_t),
    /// The first backend computes all of it. The scheduler let that backend reorder the nodes and keep apart what its
    /// fused kernels read and write, and owns the memory; it takes no part in computing.
    Whole(ggml::ggml_backend_sched_t),
    /// The scheduler splits it between the backends.
    Split(ggml::ggml_backend_sched_t),
    /// Nothing: bytes for each backend, and parts that the graph falls into.
    Planned(Vec<usize>, usize),
}

// SAFETY: everything is owned; computing and data access happen under the compute lock.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: freed once, before the backends that a scheduler refers to.
        unsafe {
            match self.allocator {
                Allocator::Single(allocator) => ggml::ggml_gallocr_free(allocator),
                Allocator::Whole(scheduler) | Allocator::Split(scheduler) => {
                    ggml::ggml_backend_sched_free(scheduler);
                }
                Allocator::Planned(..) => {}
            }
        }
    }
}

impl Graph {
    /// Allocates what was expanded in `context`. `backends` are in order of preference; where there are
    /// several, the last is the CPU's, which takes the nodes that the others cannot compute.
    ///
    /// # Errors
    /// The first mistake made while building; no memory; nothing was expanded.
    pub fn new(context: Context, backends: &[Backend]) -> Result<Self, Error> {
        context.check()?;
        let raw = context.graph.get();
        let (Some(first), false) = (backends.first(), raw.is_null()) else {
            return Err(Error::Graph {
                node: "graph".to_owned(),
                reason: "has no nodes or no backend".to_owned(),
            });
        };
        log::clear();
        // SAFETY: backends, context and graph are alive and stay so with the returned value; the scheduler
        // copies the list of backends.
        let (allocator, allocated) = unsafe {
            if backends.len() == 1 {
                let allocator = ggml::ggml_gallocr_new(first.buffer_type());
                if first.plans() {
                    let mut bytes = [0];
                    ggml::ggml_gallocr_reserve_n_size(
                        allocator,
                        raw,
                        std::ptr::null(),
                        std::ptr::null(),
                        bytes.as_mut_ptr(),
                    );
                    ggml::ggml_gallocr_free(allocator);
                    (Allocator::Planned(bytes.to_vec(), 1), true)
                } else {
                    let done = ggml::ggml_gallocr_alloc_graph(allocator, raw);
                    (Allocator::Single(allocator), done)
                }
            } else {
                let whole = suits_one(raw, first);
                if whole {
                    keep_inputs(raw);
                }
                let mut list: Vec<_> = backends.iter().map(Backend::raw).collect();
                let scheduler = ggml::ggml_backend_sched_new(
                    list.as_mut_ptr(),
                    std::ptr::null_mut(),
                    list.len() as i32,
                    context.capacity,
                    false,
                    false,
                );
                if first.plans() {
                    let mut bytes = vec![0; list.len()];
                    ggml::ggml_backend_sched_reserve_size(scheduler, raw, bytes.as_mut_ptr());
                    let n_splits = ggml::ggml_backend_sched_get_n_splits(scheduler) as usize;
                    ggml::ggml_backend_sched_free(scheduler);
                    (Allocator::Planned(bytes, n_splits), true)
                } else {
                    let done = ggml::ggml_backend_sched_alloc_graph(scheduler, raw);
                    if whole && ggml::ggml_backend_sched_get_n_splits(scheduler) == 1 {
                        (Allocator::Whole(scheduler), done)
                    } else {
                        (Allocator::Split(scheduler), done)
                    }
                }
            }
        };
        let graph = Self {
            allocator,
            backends: backends.to_vec(),
            raw,
            context,
            staged: Vec::new(),
            bytes: Vec::new(),
        };
        if !allocated {
            return Err(Error::Alloc {
                device: first.device().name().to_owned(),
                what: "a graph's intermediate results".to_owned(),
                bytes: graph.compute_bytes(),
                log: log::take(),
            });
        }
        Ok(graph)
    }

    /// Sets an input of this graph when it is computed next. Devices with a queue then take all inputs and the
    /// computation without waiting in between.
    ///
    /// # Errors
    /// When the data does not fill the tensor, or the tensor has no memory.
    pub fn stage<T: Element>(&mut self, tensor: &Tensor, data: &[T]) -> Result<(), Error> {
        let bytes = tensor.staged_bytes(data)?;
        self.bytes.extend_from_slice(bytes);
        self.staged.push((tensor.clone(), self.bytes.len()));
        Ok(())
    }

    /// As [`Graph::stage`], for types that have no Rust number: `fill` appends the bytes, which can be many.
    ///
    /// # Errors
    /// See [`Graph::stage`].
    pub fn stage_bytes(
        &mut self,
        tensor: &Tensor,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Error> {
        let start = self.bytes.len();
        self.bytes.reserve_exact(tensor.bytes());
        fill(&mut self.bytes);
        if let Err(error) = tensor.check_whole(self.bytes.len() - start) {
            self.bytes.truncate(start);
            return Err(error);
        }
        self.staged.push((tensor.clone(), self.bytes.len()));
        Ok(())
    }

    /// Sends the staged inputs.
    fn send_staged(&mut self) {
        let mut start = 0;
        for (tensor, end) in &self.staged {
            let bytes = &self.bytes[start..*end];
            start = *end;
            // SAFETY: the size is the tensor's, which has writable memory, as was checked when it was staged; the
            // bytes stay where they are until the computation that follows has ended. The caller holds the lock.
            unsafe {
                let (to, from) = (tensor.as_ptr(), bytes.as_ptr().cast());
                match self.allocator {
                    Allocator::Single(_) | Allocator::Whole(_) => {
                        ggml::ggml_backend_tensor_set_async(
                            self.backends[0].raw(),
                            to,
                            from,
                            0,
                            bytes.len(),
                        )
                    }
                    Allocator::Split(_) => {
                        ggml::ggml_backend_tensor_set(to, from, 0, bytes.len());
                    }
                    // Nothing of it has memory, so nothing can be staged.
                    Allocator::Planned(..) => {}
                }
            }
        }
    }

    /// Appends all elements of each tensor, which must be outputs of this graph or states that it wrote.
    ///
    /// # Errors
    /// When a tensor has another type, gaps, or no memory.
    pub fn read<T: Element>(&self, tensors: &[Tensor], out: &mut Vec<T>) -> Result<(), Error> {
        for tensor in tensors {
            tensor.check_readable::<T>()?;
        }
        let first = out.len();
        let n: usize = tensors.iter().map(Tensor::n_elements).sum();
        out.resize(first + n, T::ZERO);
        let _lock = exclusive();
        let mut at = first;
        for tensor in tensors {
            let part = &mut out[at..at + tensor.n_elements()];
            at += part.len();
            // SAFETY: type and size were checked; the memory is waited for below, while `out` is borrowed.
            unsafe {
                let (to, bytes) = (part.as_mut_ptr().cast(), size_of_val(part));
                match self.allocator {
                    Allocator::Single(_) | Allocator::Whole(_) => {
                        ggml::ggml_backend_tensor_get_async(
                            self.backends[0].raw(),
                            tensor.as_ptr(),
                            to,
                            0,
                            bytes,
                        )
                    }
                    Allocator::Split(_) => {
                        ggml::ggml_backend_tensor_get(tensor.as_ptr(), to, 0, bytes);
                    }
                    // Its tensors are not readable.
                    Allocator::Planned(..) => {}
                }
            }
        }
        // SAFETY: the backend is alive.
        unsafe { ggml::ggml_backend_synchronize(self.backends[0].raw()) };
        Ok(())
    }

    /// Computes the graph with the inputs as they are now set.
    ///
    /// # Errors
    /// When the device reports a failure.
    pub fn compute(&mut self) -> Result<(), Error> {
        let _lock = exclusive();
        log::clear();
        self.send_staged();
        // SAFETY: the graph is allocated, everything it reads is kept alive by its context, and the lock keeps
        // other computations and copies away.
        let status = unsafe {
            match self.allocator {
                Allocator::Planned(..) => ggml::GGML_STATUS_FAILED,
                Allocator::Single(_) | Allocator::Whole(_) => {
                    ggml::ggml_backend_graph_compute(self.backends[0].raw(), self.raw)
                }
                Allocator::Split(scheduler) => {
                    ggml::ggml_backend_sched_graph_compute(scheduler, self.raw)
                }
            }
        };
        self.staged.clear();
        self.bytes.clear();
        if status == ggml::GGML_STATUS_SUCCESS {
            return Ok(());
        }
        Err(Error::Compute {
            device: self.backends[0].device().name().to_owned(),
            status: match status {
                ggml::GGML_STATUS_ALLOC_FAILED => "out of memory".to_owned(),
                ggml::GGML_STATUS_ABORTED => "aborted".to_owned(),
                other => format!("status {other}"),
            },
            log: log::take(),
        })
    }

    /// Parts that the graph falls into; 1 where one device computes all of it.
    pub fn n_splits(&self) -> usize {
        match self.allocator {
            Allocator::Single(_) | Allocator::Whole(_) => 1,
            Allocator::Planned(_, n_splits) => n_splits,
            // SAFETY: the scheduler is alive.
            Allocator::Split(scheduler) => unsafe {
                ggml::ggml_backend_sched_get_n_splits(scheduler) as usize
            },
        }
    }

    /// Bytes for intermediate results on all devices.
    pub fn compute_bytes(&self) -> usize {
        self.compute_bytes_each().iter().sum()
    }

    /// Bytes for intermediate results on each of the backends, which may be fewer than the graph was given.
    pub fn compute_bytes_each(&self) -> Vec<usize> {
        // SAFETY: allocator and backends are alive.
        unsafe {
            match &self.allocator {
                Allocator::Single(allocator) => {
                    vec![ggml::ggml_gallocr_get_buffer_size(*allocator, 0)]
                }
                Allocator::Whole(scheduler) | Allocator::Split(scheduler) => self
                    .backends
                    .iter()
                    .map(|b| ggml::ggml_backend_sched_get_buffer_size(*scheduler, b.raw()))
                    .collect(),
                Allocator::Planned(bytes, _) => bytes.clone(),
            }
        }
    }

    /// The nodes in the order in which they are computed.
    pub fn nodes(&self) -> Vec<Tensor> {
        // SAFETY: the graph is alive, indices run below its count, and its nodes belong to its context.
        unsafe {
            (0..ggml::ggml_graph_n_nodes(self.raw))
                .filter_map(|i| NonNull::new(ggml::ggml_graph_node(self.raw, i)))
                .map(|node| Tensor::new(node, &self.context.inner))
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu() -> Backend {
        let device = crate::find_device(Some("CPU")).unwrap();
        Backend::new(device, Some(2)).unwrap()
    }

    #[test]
    fn a_graph_computes_again_with_new_inputs() {
        // Alone, and as the first of two that could compute everything.
        for backends in [vec![cpu()], vec![cpu(), cpu()]] {
            let context = Context::new(16).unwrap();
            let w = context.input("w", DType::F32, &[2, 2]);
            let x = context.input("x", DType::F32, &[2, 1]);
            let y = context.mul_mat(&w, &x);
            context.output(&context.silu(&context.silu(&y)));
            context.output(&y);
            let mut graph = Graph::new(context, &backends).unwrap();
            for (input, expected) in [([1.0f32, 1.0], [3.0f32, 7.0]), ([0.0, 2.0], [4.0, 8.0])] {
                graph.stage(&w, &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
                graph.stage(&x, &input).unwrap();
                graph.compute().unwrap();
                let mut out: Vec<f32> = Vec::new();
                graph.read(std::slice::from_ref(&y), &mut out).unwrap();
                assert_eq!(out, expected);
            }
            assert_eq!(graph.n_splits(), 1);
            let memory = graph.compute_bytes_each();
            assert!(
                memory[0] > 0 && memory[1..].iter().all(|&n| n == 0),
                "{memory:?}"
            );
        }
    }

    #[test]
    fn text_needs_one_position_row_unless_a_pair_turns_with_the_fourth() {
        let rope = |n_dims, sections| Rope {
            n_dims,
            sections,
            freq_base: 1e7,
            n_ctx_orig: 64,
        };
        assert_eq!(rope(64, [11, 11, 10, 0]).n_rows(), 1);
        assert_eq!(rope(32, [6, 5, 5, 0]).n_rows(), 1);
        assert_eq!(rope(64, [8, 8, 8, 8]).n_rows(), 4);
        // Pair 4 would be the second that turns with height.
        assert_eq!(rope(16, [3, 1, 1, 3]).n_rows(), 4);
    }

    #[test]
    fn mistaken_shapes_become_one_error() {
        let context = Context::new(16).unwrap();
        let a = context.input("a", DType::F32, &[4, 2]);
        let b = context.input("b", DType::F32, &[3, 2]);
        let c = context.mul_mat(&a, &b);
        let d = context.rms_norm(&c, 1e-6);
        context.output(&d);
        let error = Graph::new(context, &[cpu()]).err().unwrap().to_string();
        assert!(
            error.contains("mul_mat(a)") && error.contains("[3, 2, 1, 1]"),
            "{error}"
        );
    }

    #[test]
    fn layouts_that_c_would_abort_on_are_errors() {
        let refused = |build: &dyn Fn(&Context) -> Tensor| {
            let context = Context::new(32).unwrap();
            context.output(&build(&context));
            Graph::new(context, &[cpu()]).is_err()
        };
        let cut = |c: &Context| {
            let a = c.input("a", DType::F32, &[8, 3, 2]);
            c.view(&a, &[4, 2, 2], &[a.nb(1), a.nb(2)], 0)
        };
        assert!(refused(
            &|c| c.swiglu(&cut(c), &c.input("b", DType::F32, &[4, 2, 2]))
        ));
        assert!(refused(&|c| c.scale(&cut(c), 2.0)));
        assert!(!refused(&|c| c.silu(&cut(c))));
        assert!(refused(&|c| c.view(&cut(c), &[4, 2], &[usize::MAX], 0)));
        assert!(refused(&|c| c.view(&cut(c), &[4], &[], usize::MAX)));
        assert!(refused(&|c| c.input(
            "huge",
            DType::F32,
            &[1 << 40, 1 << 30]
        )));
        let rope = |sections| Rope {
            n_dims: 8,
            sections,
            freq_base: 1e4,
            n_ctx_orig: 64,
        };
        let turned = |c: &Context, sections, n_positions| {
            let a = c.input("a", DType::F32, &[8, 1, 1]);
            c.rope(
                &a,
                &c.input("p", DType::I32, &[n_positions]),
                &rope(sections),
            )
        };
        assert!(!refused(&|c| turned(c, [2, 1, 1, 0], 1)));
        assert!(refused(&|c| turned(c, [2, 1, 1, 0], 4)));
        assert!(!refused(&|c| turned(c, [1, 1, 1, 1], 4)));
        assert!(refused(&|c| turned(c, [1, 1, 1, 1], 1)));
        assert!(refused(&|c| turned(c, [4, 4, 4, 0], 1)));
        assert!(refused(&|c| turned(c, [0; 4], 4)));
    }

    #[test]
    fn too_many_tensors_are_an_error_not_an_abort() {
        let context = Context::new(8).unwrap();
        let mut a = context.input("a", DType::F32, &[4]);
        for _ in 0..100 {
            a = context.silu(&a);
        }
        context.output(&a);
        assert!(Graph::new(context, &[cpu()]).is_err());
    }

    #[test]
    fn reads_and_writes_stay_inside_the_tensor() {
        let context = Context::new(4).unwrap();
        let a = context.new_tensor("a", DType::F32, &[4]);
        assert!(a.write(&[0f32; 4]).is_err(), "not allocated yet");
        context.allocate(&cpu(), "a test").unwrap();
        a.write(&[1f32; 4]).unwrap();
        assert!(a.write(&[0f32; 5]).is_err());
        assert!(a.write(&[0i32; 4]).is_err());
        let mut out = [0f32; 3];
        assert!(a.read(2, &mut out).is_err());
        a.read(1, &mut out).unwrap();
        assert_eq!(out, [1.0; 3]);
    }

    #[test]
    fn a_tensor_outlives_its_context_value() {
        let tensor = {
            let context = Context::new(4).unwrap();
            let tensor = context.new_tensor("a", DType::F32, &[4]);
            context.allocate(&cpu(), "a test").unwrap();
            tensor
        };
        tensor.write(&[2f32; 4]).unwrap();
        let mut out = [0f32; 4];
        tensor.read(0, &mut out).unwrap();
        assert_eq!(out, [2.0; 4]);
    }
}
