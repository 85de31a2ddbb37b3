//! No node of any graph may fall from Metal to the CPU: checked on any machine against the facts of ggml's Metal
//! backend (which operations, types and layouts it takes), for every kind of pass that the engine runs.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;
#[path = "support/variants.rs"]
mod variants;

use std::path::Path;

use ggml_metal::{Backend, Context, DType, Graph, Tensor, find_device};
use qrun::engine::Engine;
use qrun::model::forward::{
    CatchUp, DraftGraph, DraftKeeps, DraftShape, DraftVocab, HeadPass, TrunkGraph, TrunkShape,
};
use qrun::state::{KV_PAD, KvTypes, MAX_OWED, State};
use support::*;

/// What Metal's backend takes, for a device with simdgroup reductions, simdgroup matrices and bfloat (every Apple
/// GPU since the M1). Facts of `ggml_metal_device_supports_op`, and of what the encoders assert beyond it.
fn refusal(node: &Tensor) -> Option<String> {
    refusal_of(&node.op(), node)
}

fn refusal_of(op: &str, node: &Tensor) -> Option<String> {
    let sources = node.sources();
    let src = |i: usize| sources.iter().find(|(at, _)| *at == i).map(|(_, t)| t);
    let to = node.dtype();
    let refuse = |why: &str| Some(format!("{op}: {why}: {node:?} of {sources:?}"));
    if ["NONE", "RESHAPE", "VIEW", "TRANSPOSE", "PERMUTE"].contains(&op) {
        return None;
    }
    let Some(a) = src(0) else {
        return refuse("no source");
    };
    let from = a.dtype();
    let b = src(1);
    let float = |t: &Tensor| t.dtype() == DType::F32 || t.dtype() == DType::F16;

    let taken = match op {
        // Element by element.
        "SCALE" | "CLAMP" | "SQR" | "SQRT" | "LOG" | "SIN" | "COS" | "SIGMOID" | "SILU"
        | "SOFTPLUS" | "TANH" | "RELU" | "GELU" | "NEG" | "ABS" | "EXP" | "STEP" => {
            a.rows_are_contiguous() && float(a)
        }
        "SWIGLU" | "GEGLU" | "REGLU" => {
            a.rows_are_evenly_spaced() && float(a) && b.is_none_or(|b| b.shape() == a.shape())
        }
        "ADD" | "SUB" | "MUL" | "DIV" => b.is_some_and(|b| {
            a.rows_are_contiguous() && b.rows_are_contiguous() && float(a) && from == b.dtype()
        }),
        // Over rows.
        "RMS_NORM" | "NORM" | "L2_NORM" | "SUM_ROWS" | "MEAN" | "CUMSUM" | "SOFT_MAX"
        | "ARGSORT" | "ARGMAX" => a.rows_are_contiguous(),
        "TOP_K" | "REPEAT" | "SSM_CONV" => true,
        "ROPE" => b.is_some_and(|b| b.ne(0) % a.ne(2) == 0 && b.ne(0) >= a.ne(2)),
        "CONCAT" => {
            let types = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::I64];
            b.is_some_and(|b| b.dtype() == from) && to == from && types.contains(&from)
        }
        // Products. Of the weights' types only these two are missing; F16 activations would need more care.
        "MUL_MAT" => {
            weight_type(from) && b.is_some_and(|b| b.dtype() == DType::F32) && !is_transposed(a)
        }
        "MUL_MAT_ID" => {
            weight_type(from)
                && b.is_some_and(|b| b.dtype() == DType::F32 && !is_transposed(b))
                && src(2).is_some_and(|ids| ids.dtype() == DType::I32)
                && !is_transposed(a)
        }
        "FLASH_ATTN_EXT" => return flash_attention(node).and_then(|why| refuse(&why)),
        "GATED_DELTA_NET" => src(2).is_some_and(|v| v.ne(0) % 32 == 0),
        // Moving data.
        "GET_ROWS" => weight_type(from),
        "SET_ROWS" => {
            let kept = [
                DType::F32,
                DType::F16,
                DType::BF16,
                DType::Q8_0,
                DType::IQ4_NL,
            ];
            let quantized = [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1];
            match from {
                DType::F16 => to == DType::F16,
                DType::F32 => kept.contains(&to) || quantized.contains(&to),
                _ => false,
            }
        }
        "CPY" | "CONT" | "DUP" | "SET" => copies(from, to),
        _ => return refuse("not among the operations that Metal has"),
    };
    if taken {
        None
    } else {
        refuse("not with these types or this layout")
    }
}

fn weight_type(dtype: DType) -> bool {
    dtype != DType::NVFP4 && dtype != DType::TQ1_0
}

fn is_transposed(t: &Tensor) -> bool {
    t.nb(0) > t.nb(1)
}

fn copies(from: DType, to: DType) -> bool {
    let to_float = [DType::F32, DType::F16].contains(&to);
    match from {
        DType::F32 => {
            let quantized = [
                DType::Q4_0,
                DType::Q4_1,
                DType::Q5_0,
                DType::Q5_1,
                DType::Q8_0,
            ];
            to_float
                || [DType::BF16, DType::I32, DType::IQ4_NL].contains(&to)
                || quantized.contains(&to)
        }
        DType::F16 => to_float,
        DType::BF16 => to == DType::F32 || to == DType::BF16,
        DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 => to_float,
        DType::I32 => to == DType::F32 || to == DType::I32,
        _ => false,
    }
}

fn flash_attention(node: &Tensor) -> Option<String> {
    let sources = node.sources();
    let [(0, q), (1, k), (2, v), (3, mask), ..] = &sources[..] else {
        return Some("wants queries, keys, values and a mask".to_owned());
    };
    let sizes = [
        32, 40, 48, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576,
    ];
    if !sizes.contains(&q.ne(0)) {
        return Some(format!("no kernel for heads of {}", q.ne(0)));
    }
    if k.ne(0) < v.ne(0) || (k.ne(0) == 72 && v.ne(0) != 72) {
        return Some("heads of the values are larger than those of the keys".to_owned());
    }
    if k.dtype() != v.dtype() {
        return Some("keys and values differ in type".to_owned());
    }
    let plain = [DType::F32, DType::F16, DType::BF16, DType::Q8_0];
    let quantized = [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1];
    if !plain.contains(&k.dtype()) && !quantized.contains(&k.dtype()) {
        return Some(format!("no kernel for {}", k.dtype()));
    }
    let shapes = q.dtype() == DType::F32
        && k.ne(1) == v.ne(1)
        && k.ne(2) == v.ne(2)
        && mask.dtype() == DType::F16
        && mask.ne(1) >= q.ne(1)
        && q.ne(1) < 65536;
    (!shapes).then(|| "shapes or types that the encoder asserts".to_owned())
}

fn refusals(graph: &Graph) -> Vec<String> {
    graph.nodes().iter().filter_map(refusal).collect()
}

fn assert_all_taken(graph: &Graph, what: &str) -> usize {
    let refused = refusals(graph);
    assert!(
        refused.is_empty(),
        "{what}: {} nodes, first {}",
        refused.len(),
        refused[0]
    );
    graph.nodes().len()
}

/// Every pass over one model: returns how many graphs and nodes were looked at.
fn walk(path: &Path, types: &[DType], widths: &[usize]) -> (usize, usize) {
    let engine: std::sync::Arc<Engine> = engine(path);
    let (config, model) = (engine.config(), engine.weights().for_width(1));
    assert!(
        engine.mtp_status().on,
        "the model has a draft head, so that its passes are walked too"
    );
    let (mut n_graphs, mut n_nodes) = (0, 0);
    for &dtype in types {
        let kv = KvTypes { k: dtype, v: dtype };
        let state = State::new(config, &engine.backends()[0], kv, 2 * KV_PAD, 4, true).unwrap();
        for &n_tokens in widths {
            let mut heads = vec![HeadPass::Off, HeadPass::Keys, HeadPass::Logits];
            heads.extend((n_tokens == 1).then_some(HeadPass::Owe));
            for head in heads {
                let mut outputs = vec![0, 1, n_tokens];
                outputs.dedup();
                for n_outputs in outputs {
                    let shape = TrunkShape {
                        n_tokens,
                        n_kv: KV_PAD,
                        n_outputs,
                        best: [0, 1, 21][n_outputs.min(2)],
                        head,
                        back: n_tokens % 4,
                        unsplit: n_tokens % 2 == 1,
                    };
                    let trunk =
                        TrunkGraph::new(config, model, &state, engine.backends(), shape).unwrap();
                    n_nodes += assert_all_taken(trunk.graph(), &format!("{dtype} {shape:?}"));
                    n_graphs += 1;
                }
            }
        }
        for n in [1, 7, MAX_OWED] {
            let late = CatchUp::new(config, model, &state, engine.backends(), (n, n % 4)).unwrap();
            n_nodes += assert_all_taken(late.unwrap().graph(), &format!("{dtype}, {n} late"));
            n_graphs += 1;
        }
        for depth in 1..=6 {
            let keeps = [
                DraftKeeps::Tokens,
                DraftKeeps::Confidence,
                DraftKeeps::Logits,
                DraftKeeps::Best(8),
            ];
            let small = DraftVocab {
                n_first: config.n_vocab / 2,
                last_from: config.n_vocab / 4 * 3,
            };
            let shape = DraftShape {
                depth,
                n_kv: 2 * KV_PAD,
                back: depth % 4,
                vocab: (depth % 2 == 0).then_some(small),
                keeps: keeps[depth % 4],
            };
            let draft = DraftGraph::new(config, model, &state, engine.backends(), shape).unwrap();
            let what = format!("{dtype}, a draft of {depth}");
            n_nodes += assert_all_taken(draft.unwrap().graph(), &what);
            n_graphs += 1;
        }
        let shape = TrunkShape {
            n_tokens: 64,
            n_kv: KV_PAD,
            n_outputs: 0,
            best: 0,
            head: HeadPass::Logits,
            back: 0,
            unsplit: false,
        };
        let observing =
            TrunkGraph::observing(config, model, &state, engine.backends(), shape).unwrap();
        n_nodes += assert_all_taken(observing.graph(), &format!("{dtype}, observing"));
        n_graphs += 1;
    }
    println!("{}: {n_graphs} graphs, {n_nodes} nodes", path.display());
    (n_graphs, n_nodes)
}

const TYPES: [DType; 6] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q5_1,
];
const WIDTHS: [usize; 17] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 64];

fn walk_all(path: &Path) {
    let (n_graphs, n_nodes) = walk(path, &TYPES, &WIDTHS);
    assert!(
        n_graphs > 800 && n_nodes > 50 * n_graphs,
        "{n_graphs} graphs, {n_nodes} nodes"
    );
}

#[test]
fn every_node_of_the_demo_model_runs_on_metal() {
    walk_all(&demo());
}

#[test]
fn every_node_of_the_tiny_dense_model_runs_on_metal() {
    if let Some(path) = shared("gguf/tiny-dense-f32.gguf") {
        walk_all(&path);
    }
}

#[test]
fn every_node_of_the_tiny_moe_model_runs_on_metal() {
    if let Some(path) = shared("gguf/tiny-moe-f32.gguf") {
        walk_all(&path);
    }
}

#[test]
fn every_node_of_models_with_fused_tensors_runs_on_metal() {
    let folder = tempfile::tempdir().unwrap();
    for moe in [false, true] {
        let path = folder.path().join("synthetic.gguf");
        let mut variant = variants::synthetic(moe);
        variant.write(&path);
        let (separate, _) = walk(&path, &[DType::F16], &WIDTHS);
        variants::fuse_qkv(&mut variant);
        if moe {
            variants::fuse_gate_up(&mut variant);
        }
        variant.write(&path);
        let (fused, _) = walk(&path, &[DType::F16, DType::Q8_0], &WIDTHS);
        assert_eq!(fused, 2 * separate);
    }
}

/// Describes one node over inputs and returns what the check says of its graph.
fn check(build: impl FnOnce(&Context) -> Tensor) -> Vec<String> {
    let context = Context::new(32).unwrap();
    let node = build(&context);
    context.output(&node);
    let cpu = Backend::new(find_device(Some("CPU")).unwrap(), Some(1)).unwrap();
    refusals(&Graph::new(context, &[cpu]).unwrap())
}

fn attention(c: &Context, head_dim: i64, k: DType, v: DType) -> Tensor {
    let q = c.input("q", DType::F32, &[head_dim, 1, 2]);
    let k = c.input("k", k, &[head_dim, 256, 2]);
    let v = c.input("v", v, &[head_dim, 256, 2]);
    let mask = c.input("mask", DType::F16, &[256, 1]);
    c.flash_attn(&q, &k, &v, &mask, 1.0)
}

#[test]
fn the_check_refuses_what_metal_refuses() {
    assert!(check(|c| attention(c, 64, DType::F16, DType::F16)).is_empty());
    assert!(check(|c| attention(c, 64, DType::F16, DType::Q8_0))[0].contains("differ in type"));
    assert!(check(|c| attention(c, 88, DType::F16, DType::F16))[0].contains("heads of 88"));
    assert!(check(|c| attention(c, 64, DType::IQ4_NL, DType::IQ4_NL))[0].contains("no kernel"));

    let one = |found: Vec<String>, op: &str| {
        assert!(found.len() == 1 && found[0].starts_with(op), "{found:?}");
    };
    // The right ones pass, so that it is the property named that is refused.
    let rows = |c: &Context, to: DType, from: DType| {
        let ids = c.input("ids", DType::I64, &[2]);
        c.set_rows(
            &c.input("to", to, &[256, 4]),
            &c.input("from", from, &[256, 2]),
            &ids,
        )
    };
    assert!(check(|c| rows(c, DType::Q8_0, DType::F32)).is_empty());
    one(check(|c| rows(c, DType::I32, DType::F32)), "SET_ROWS");
    one(check(|c| rows(c, DType::F32, DType::F16)), "SET_ROWS");
    one(check(|c| rows(c, DType::TQ1_0, DType::F32)), "SET_ROWS");

    let copy = |c: &Context, from: DType, to: DType| {
        c.cpy(
            &c.input("from", from, &[256, 2]),
            &c.input("to", to, &[256, 2]),
        )
    };
    assert!(check(|c| copy(c, DType::F32, DType::Q8_0)).is_empty());
    one(check(|c| copy(c, DType::Q8_0, DType::Q8_0)), "CPY");
    one(check(|c| copy(c, DType::F16, DType::BF16)), "CPY");
    one(check(|c| copy(c, DType::F32, DType::Q6_K)), "CPY");

    let product = |c: &Context, w: DType| {
        c.mul_mat(
            &c.input("w", w, &[256, 2]),
            &c.input("x", DType::F32, &[256, 2]),
        )
    };
    assert!(check(|c| product(c, DType::Q4_K)).is_empty());
    one(check(|c| product(c, DType::TQ1_0)), "MUL_MAT");
    let rows_of = |c: &Context, w: DType| {
        c.get_rows(
            &c.input("w", w, &[256, 2]),
            &c.input("ids", DType::I32, &[2]),
        )
    };
    assert!(check(|c| rows_of(c, DType::I32)).is_empty());
    one(check(|c| rows_of(c, DType::NVFP4)), "GET_ROWS");
}

#[test]
fn the_check_refuses_gaps_where_metal_wants_none() {
    let transposed = |c: &Context| c.transpose(&c.input("a", DType::F32, &[8, 4]));
    let one = |found: Vec<String>, op: &str| {
        assert!(found.len() == 1 && found[0].starts_with(op), "{found:?}");
    };
    one(
        check(|c| c.add(&transposed(c), &c.input("b", DType::F32, &[4, 8]))),
        "ADD",
    );
    one(
        check(|c| c.mul(&c.input("b", DType::F32, &[4, 8]), &transposed(c))),
        "MUL",
    );
    one(
        check(|c| {
            c.add(
                &c.input("a", DType::I32, &[4]),
                &c.input("b", DType::I32, &[4]),
            )
        }),
        "ADD",
    );
    let delta_net = |c: &Context, size: i64| {
        let row = |name: &str| c.input(name, DType::F32, &[size, 2, 3, 1]);
        let gate = |name: &str| c.input(name, DType::F32, &[1, 2, 3, 1]);
        let state = c.input("state", DType::F32, &[size, size, 2, 1]);
        c.gated_delta_net(
            &row("q"),
            &row("k"),
            &row("v"),
            &gate("g"),
            &gate("beta"),
            &state,
            1,
        )
    };
    assert!(check(|c| delta_net(c, 64)).is_empty());
    one(check(|c| delta_net(c, 48)), "GATED_DELTA_NET");
}

#[test]
fn the_check_refuses_operations_that_it_does_not_know() {
    let context = Context::new(8).unwrap();
    let a = context.input("a", DType::F32, &[8, 4]);
    let node = context.silu(&a);
    let known = |op: &str| refusal_of(op, &node);
    assert_eq!(known("SILU"), None);
    assert!(
        known("OUT_PROD")
            .unwrap()
            .contains("not among the operations")
    );
}
