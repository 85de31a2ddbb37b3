//! The forms in which published files come: split, with the draft head apart or left out, fused, untied,
//! unaligned. Each is made from a whole file and must give that file's logits.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;
#[path = "support/variants.rs"]
mod variants;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ggml_metal::{DType, Value};
use qrun::engine::{Engine, EngineParams};
use qrun::model::ModelFiles;
use qrun::model::forward::{HeadPass, TrunkGraph, TrunkShape};
use qrun::model::weights::{MtpStatus, Plan};
use qrun::state::{KV_PAD, KvTypes, State};
use support::*;
use variants::{Variant, fuse_gate_up, fuse_qkv, synthetic};

const PROMPT: [u32; 12] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8];

fn load(path: &Path, mtp: Option<&Path>) -> anyhow::Result<Arc<Engine>> {
    let params = EngineParams {
        device: Some("CPU".to_owned()),
        n_threads: Some(1),
        mtp: mtp.map(Path::to_owned),
        ..EngineParams::default()
    };
    Engine::load(path, &params, &mut |_, _| {})
}

/// Logits of the trunk and, where it is on, of the draft head.
fn logits(engine: &Arc<Engine>) -> (Vec<f32>, Vec<f32>) {
    let mtp = engine.mtp_status().on;
    let mut session = session(engine, F32, mtp);
    if mtp {
        let (trunk, head) = session.eval_with_head(&PROMPT, &never()).unwrap();
        return (trunk.to_vec(), head.to_vec());
    }
    let all = session
        .eval(&PROMPT, qrun::session::Outputs::All, &never())
        .unwrap();
    (all.to_vec(), Vec::new())
}

fn of(path: &Path) -> (Vec<f32>, Vec<f32>) {
    logits(&load(path, None).unwrap())
}

fn assert_close(a: &[f32], b: &[f32], bound: f32) {
    assert!(!a.is_empty());
    let diff = max_diff(a, b);
    assert!(diff <= bound, "{diff}");
}

/// The whole file's logits, the file taken apart, and a folder for what is made of it.
struct Case {
    folder: tempfile::TempDir,
    whole: Variant,
    trunk: Vec<f32>,
    head: Vec<f32>,
}

impl Case {
    fn new(whole: Variant) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("whole.gguf");
        whole.write(&path);
        let (trunk, head) = of(&path);
        assert!(!head.is_empty(), "the whole file has a draft head");
        Self {
            folder,
            whole,
            trunk,
            head,
        }
    }

    /// The demo model, and made-up models of both architectures.
    fn all() -> Vec<Self> {
        [Variant::read(&demo()), synthetic(false), synthetic(true)]
            .map(Self::new)
            .into()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, variant: &Variant) -> PathBuf {
        let path = self.path("variant.gguf");
        variant.write(&path);
        path
    }

    /// The variant gives the same logits, those of the head too.
    fn same(&self, variant: &Variant, bound: f32) {
        let (trunk, head) = of(&self.write(variant));
        assert_close(&self.trunk, &trunk, bound);
        assert_close(&self.head, &head, bound);
    }

    fn same_trunk_without_head(&self, path: &Path, reason: &str) {
        let engine = load(path, None).unwrap();
        let status = engine.mtp_status();
        assert!(!status.on && status.reason.contains(reason), "{status:?}");
        assert_close(&self.trunk, &logits(&engine).0, 0.0);
    }
}

#[test]
fn written_again_the_file_is_the_same_model() {
    for case in Case::all() {
        case.same(&case.whole, 0.0);
    }
    let case = Case::new(Variant::read(&demo()));
    assert_eq!(
        of(&demo()),
        (case.trunk, case.head),
        "and the same as the original"
    );
}

/// Splits the tensors over three files; the first holds the `first` first.
fn split(case: &Case, first: usize) -> [PathBuf; 3] {
    let n = case.whole.tensors.len();
    let cuts = [0, first, (n + first) / 2, n];
    [0, 1, 2].map(|part| {
        let mut file = Variant {
            metadata: if part == 0 {
                case.whole.metadata.clone()
            } else {
                Vec::new()
            },
            tensors: case.whole.tensors[cuts[part]..cuts[part + 1]].to_vec(),
        };
        file.set("split.no", Value::Int(part as i128));
        file.set("split.count", Value::Int(3));
        file.set("split.tensors.count", Value::Int(n as i128));
        let path = case.path(&format!("model-{:05}-of-00003.gguf", part + 1));
        file.write(&path);
        path
    })
}

#[test]
fn a_split_model_loads_whichever_part_is_named() {
    for case in Case::all() {
        for first in [case.whole.tensors.len() / 3, 0] {
            for path in split(&case, first) {
                let (trunk, head) = of(&path);
                assert_close(&case.trunk, &trunk, 0.0);
                assert_close(&case.head, &head, 0.0);
            }
        }
        // The head is recognised by its tensors, in whichever part they are.
        let mut unannounced = case.whole.clone();
        unannounced.remove(&unannounced.key("nextn_predict_layers"));
        let case = Case {
            whole: unannounced,
            ..case
        };
        let (_, head) = of(&split(&case, 0)[1]);
        assert_close(&case.head, &head, 0.0);
    }
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let case = Case::new(synthetic(false));
    let parts = split(&case, 9);
    let refused = |what: &str| {
        let error = format!("{:#}", load(&parts[0], None).err().unwrap());
        assert!(error.contains(what) && !error.contains('\n'), "{error}");
    };
    let third = std::fs::read(&parts[2]).unwrap();
    std::fs::copy(&parts[1], &parts[2]).unwrap();
    refused("is not part 3 of 3");
    std::fs::remove_file(&parts[2]).unwrap();
    refused("model-00003-of-00003.gguf");
    std::fs::write(&parts[2], &third).unwrap();
    let mut short = Variant::read(&parts[2]);
    short.tensors.pop();
    short.write(&parts[2]);
    refused("expected");
    let elsewhere = case.path("renamed.gguf");
    std::fs::write(&parts[2], &third).unwrap();
    std::fs::copy(&parts[1], &elsewhere).unwrap();
    let error = load(&elsewhere, None).err().unwrap().to_string();
    assert!(error.contains("does not end in"), "{error}");
}

#[test]
fn the_draft_head_may_come_in_a_file_of_its_own() {
    for case in Case::all() {
        let block = case.whole.mtp_block();
        let mut main = case.whole.clone();
        let tensors = main.take_block(block);
        main.set_arch("block_count", Value::Int(block));
        main.remove(&main.key("nextn_predict_layers"));
        let main_path = case.write(&main);
        case.same_trunk_without_head(&main_path, "no MTP block");

        // The block may be numbered on from the trunk's layers or from 0, which names it as a trunk layer is.
        for number in [block, 0] {
            let mut head = Variant {
                metadata: case.whole.metadata.clone(),
                tensors: tensors.clone(),
            };
            for tensor in &mut head.tensors {
                let rest = tensor
                    .name
                    .split_once('.')
                    .unwrap()
                    .1
                    .split_once('.')
                    .unwrap()
                    .1;
                tensor.name = format!("blk.{number}.{rest}");
            }
            let head_path = case.path("head.gguf");
            head.write(&head_path);
            let engine = load(&main_path, Some(&head_path)).unwrap();
            assert!(engine.mtp_status().on);
            assert!(engine.mtp_status().reason.contains("head.gguf"));
            let (trunk, head) = logits(&engine);
            assert_close(&case.trunk, &trunk, 0.0);
            assert_close(&case.head, &head, 0.0);
        }
        // A file of its own replaces the block in the main file.
        let whole = case.write(&case.whole);
        let engine = load(&whole, Some(&case.path("head.gguf"))).unwrap();
        assert_close(&case.head, &logits(&engine).1, 0.0);
    }
}

#[test]
fn a_draft_head_of_another_model_is_refused() {
    let (dense, moe) = (Case::new(synthetic(false)), Case::new(synthetic(true)));
    let (dense_path, moe_path) = (dense.path("whole.gguf"), moe.path("whole.gguf"));
    let error = load(&dense_path, Some(&moe_path))
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("whole.gguf") && error.contains("architecture"),
        "{error}"
    );
    let mut narrow = dense.whole.clone();
    narrow.set_arch("embedding_length", Value::Int(32));
    let path = dense.write(&narrow);
    let error = load(&dense_path, Some(&path)).err().unwrap().to_string();
    assert!(
        error.contains("variant.gguf") && error.contains("embedding_length"),
        "{error}"
    );
}

#[test]
fn without_its_block_a_model_runs_without_a_draft_head() {
    for case in Case::all() {
        let block = case.whole.mtp_block();
        let mut without = case.whole.clone();
        without.take_block(block);
        let announced = case.write(&without);
        case.same_trunk_without_head(&announced, "is announced, but");
        let engine = load(&announced, None).unwrap();

        without.set_arch("block_count", Value::Int(block));
        without.set_arch("nextn_predict_layers", Value::Int(0));
        case.same_trunk_without_head(&case.write(&without), "no MTP block");
        // A session that wants the head is told why there is none.
        let params = qrun::session::SessionParams {
            mtp: true,
            ..Default::default()
        };
        let error = qrun::session::Session::new(engine, params)
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("announced"), "{error}");
    }
}

#[test]
fn a_draft_head_that_is_not_announced_is_found_by_its_tensors() {
    for case in Case::all() {
        let mut variant = case.whole.clone();
        variant.remove(&variant.key("nextn_predict_layers"));
        case.same(&variant, 0.0);
    }
}

#[test]
fn the_draft_head_takes_what_it_lacks_from_the_trunk() {
    for case in Case::all() {
        let block = case.whole.mtp_block();
        let name = |part: &str| format!("blk.{block}.nextn.{part}.weight");
        let norm = case.whole.tensor("output_norm.weight").data.clone();
        // With the trunk's values spelled out, and with none, the head must do the same.
        let mut spelled = case.whole.clone();
        let own = spelled
            .tensors
            .iter_mut()
            .find(|t| t.name == name("shared_head_norm"));
        if let Some(own) = own {
            own.data = norm;
        }
        let mut lacking = spelled.clone();
        lacking
            .tensors
            .retain(|t| t.name != name("shared_head_norm"));
        for (from, to) in [
            ("token_embd.weight", name("embed_tokens")),
            ("token_embd.weight", name("shared_head_head")),
        ] {
            let mut copy = spelled.tensor(from).clone();
            copy.name = to;
            if !spelled.tensors.iter().any(|t| t.name == copy.name) {
                spelled.tensors.push(copy);
            }
        }
        let spelled = of(&case.write(&spelled));
        let lacking = of(&case.write(&lacking));
        assert_eq!(spelled, lacking);
        assert_close(&case.trunk, &lacking.0, 0.0);
    }
}

#[test]
fn fused_attention_projections_are_the_same_model() {
    for case in Case::all() {
        let mut fused = case.whole.clone();
        // One matrix has one type, so parts of another are brought to it first, on both sides.
        for block in 0..fused.int("block_count") {
            let name = |part: &str| format!("blk.{block}.attn_{part}.weight");
            for part in ["q", "k", "v"] {
                if let Some(tensor) = fused.tensors.iter_mut().find(|t| t.name == name(part)) {
                    let values = tensor.dtype.dequantize(&tensor.data).unwrap();
                    tensor.dtype = DType::F32;
                    tensor.data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                }
            }
        }
        let case = Case::new(fused.clone());
        let before = fused.tensors.len();
        fuse_qkv(&mut fused);
        assert!(
            fused.tensors.len() <= before - 4,
            "two layers at least have the matrices"
        );
        case.same(&fused, 1e-5);
    }
}

#[test]
fn fused_expert_projections_are_the_same_model() {
    let case = Case::new(synthetic(true));
    let mut fused = case.whole.clone();
    fuse_gate_up(&mut fused);
    case.same(&fused, 1e-5);
    if let Some(path) = shared("gguf/tiny-moe-f32.gguf") {
        let case = Case::new(Variant::read(&path));
        let mut fused = case.whole.clone();
        fuse_gate_up(&mut fused);
        fuse_qkv(&mut fused);
        case.same(&fused, 1e-5);
    }
}

#[test]
fn a_head_of_its_own_may_equal_the_embedding() {
    for case in Case::all() {
        let mut untied = case.whole.clone();
        let mut output = untied.tensor("token_embd.weight").clone();
        output.name = "output.weight".to_owned();
        untied.tensors.push(output);
        case.same(&untied, 0.0);
    }
}

#[test]
fn numbers_may_be_given_for_each_layer() {
    for case in Case::all() {
        let mut variant = case.whole.clone();
        let n = variant.int("block_count") as usize;
        for key in [
            "attention.head_count",
            "attention.head_count_kv",
            "feed_forward_length",
            "expert_feed_forward_length",
        ] {
            let full = variant.key(key);
            if let Some(Value::Int(v)) = variant.value(&full).cloned() {
                variant.set(&full, Value::Ints(vec![v as i64; n]));
            }
        }
        let n_layer = variant.mtp_block() as usize;
        let interval = variant.int("full_attention_interval") as usize;
        let recurrent = (0..n_layer).map(|il| (il + 1) % interval != 0).collect();
        variant.set_arch("attention.recurrent_layers", Value::Bools(recurrent));
        variant.remove(&variant.key("full_attention_interval"));
        case.same(&variant, 0.0);
    }
}

#[test]
fn layers_may_differ_in_width() {
    // A wider feed-forward in one layer, its further rows zero, computes the same.
    let case = Case::new(synthetic(false));
    let mut variant = case.whole.clone();
    let n = variant.int("block_count") as usize;
    let mut widths = vec![64; n];
    widths[2] = 96;
    variant.set_arch("feed_forward_length", Value::Ints(widths));
    for part in ["gate", "up"] {
        let tensor = variant.tensor_mut(&format!("blk.2.ffn_{part}.weight"));
        tensor.shape[1] = 96;
        tensor.data.resize(96 * 64 * 4, 0);
    }
    let down = variant.tensor_mut("blk.2.ffn_down.weight");
    down.shape[0] = 96;
    let rows = down.data.chunks(64 * 4);
    down.data = rows.flat_map(|row| [row, &[0; 32 * 4]].concat()).collect();
    case.same(&variant, 1e-5);
}

#[test]
fn unaligned_tensors_are_copied_instead_of_mapped() {
    for case in Case::all() {
        let mut variant = case.whole.clone();
        // A small tensor first, so that the data of the others is moved off the usual alignment.
        variant.set("general.alignment", Value::Int(4));
        let odd = variants::Part {
            name: "odd".to_owned(),
            shape: vec![1],
            dtype: DType::F32,
            data: vec![0; 4],
        };
        variant.tensors.insert(0, odd);
        let path = case.path("unaligned.gguf");
        std::fs::write(&path, variant.to_bytes(4).0).unwrap();
        let files = ModelFiles::open(&path, None).unwrap();
        let plan = Plan::make(&files).unwrap();
        assert!(
            plan.wanted
                .iter()
                .any(|w| !w.info.offset.is_multiple_of(32)),
            "the test moves some"
        );
        let engine = load(&path, None).unwrap();
        assert!(
            engine.weight_bytes().copied > 0,
            "{:?}",
            engine.weight_bytes()
        );
        let (trunk, head) = logits(&engine);
        assert_close(&case.trunk, &trunk, 0.0);
        assert_close(&case.head, &head, 0.0);
        // Copied, they lie in the order of their use, and those of one input are multiplied as one.
        let mapped = load(&case.write(&case.whole), None).unwrap();
        let (joined, apart) = (products(&engine), products(&mapped));
        assert!(joined < apart, "{joined}, {apart}");
        let config = engine.config();
        if case.whole.tensors.iter().all(|t| t.dtype == DType::F32) {
            // Mixer: input and output. Feed-forward: input and output, and a router with the shared expert's share.
            let each = if config.moe.is_some() { 5 } else { 4 };
            assert_eq!(joined, each * config.n_layer() + 1);
        }

        // Written again by the product's writer, the data is aligned and the key is gone.
        let source = ggml_metal::Gguf::open(&path).unwrap();
        let mut writer = ggml_metal::GgufWriter::new(source.tensors().len()).unwrap();
        writer.copy_metadata(&source);
        for tensor in source.tensors() {
            writer
                .add_tensor(&tensor.name, tensor.dims(), tensor.dtype)
                .unwrap();
        }
        let again = case.path("again.gguf");
        let data = |i: usize| Ok(source.data(&source.tensors()[i]).into());
        writer.write(&again, data).unwrap();
        let engine = load(&again, None).unwrap();
        assert_eq!(engine.weight_bytes().copied, 0);
        assert_close(&case.trunk, &logits(&engine).0, 0.0);
    }
}

#[test]
fn the_mtp_reason_names_what_is_there() {
    let files = ModelFiles::open(&demo(), None).unwrap();
    let status = MtpStatus::of(&files);
    assert!(
        status.on && status.reason.contains("MTP block of"),
        "{status:?}"
    );
}

#[test]
fn every_weight_type_that_is_accepted_can_be_computed_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("typed.gguf");
    let mut accepted = Vec::new();
    let mut wide = synthetic(true);
    // Blocks of the largest types hold 256 values.
    for key in ["embedding_length", "feed_forward_length"] {
        wide.set_arch(key, Value::Int(256));
    }
    for key in [
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
    ] {
        wide.set_arch(key, Value::Int(256));
    }
    for key in ["attention.head_count", "ssm.time_step_rank"] {
        wide.set_arch(key, Value::Int(8));
    }
    wide.set_arch("ssm.inner_size", Value::Int(256));
    let widened = |name: &str, shape: &[i64]| -> Vec<i64> {
        let part = name.rsplit_once('.').map_or(name, |(head, _)| head);
        let part = part.rsplit_once('.').map_or(part, |(_, part)| part);
        match part {
            "eh_proj" => vec![512, 256],
            "attn_q" => vec![256, 512],
            "attn_qkv" => vec![256, 384],
            "attn_k" | "attn_v" => vec![256, 64],
            "ssm_conv1d" => vec![4, 384],
            "ssm_dt" | "ssm_a" => vec![8],
            "ssm_alpha" | "ssm_beta" => vec![256, 8],
            "ffn_gate_inp" => vec![256, 6],
            "attn_q_norm" | "attn_k_norm" | "ssm_norm" => vec![32],
            "token_embd" => vec![256, 24],
            _ => shape.iter().map(|&n| if n > 8 { 256 } else { n }).collect(),
        }
    };
    for tensor in &mut wide.tensors {
        let name = if tensor.name.ends_with("ssm_a") {
            "x.ssm_a.x"
        } else {
            &tensor.name
        };
        tensor.shape = widened(name, &tensor.shape);
        let n = tensor.shape.iter().product::<i64>() as usize;
        tensor.data = tensor.data.iter().copied().cycle().take(4 * n).collect();
    }
    for name in [
        "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "q2_k", "q3_k",
        "q4_k", "q5_k", "q6_k", "q8_k", "iq4_nl", "iq4_xs", "iq2_xxs", "iq2_xs", "iq2_s",
        "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "mxfp4", "nvfp4", "i8", "i16",
        "i32", "i64", "f64",
    ] {
        let Some(dtype) = DType::from_name(name) else {
            continue;
        };
        let mut variant = wide.clone();
        for tensor in &mut variant.tensors {
            let is_matrix = tensor.shape.len() > 1 && !tensor.name.contains("conv1d");
            if is_matrix {
                let n = tensor.shape.iter().product::<i64>() as usize;
                tensor.data = vec![0; dtype.row_bytes(n)];
                tensor.dtype = dtype;
            }
        }
        std::fs::write(&path, variant.to_bytes(32).0).unwrap();
        match load(&path, None) {
            Ok(engine) => {
                assert!(logits(&engine).0.iter().all(|v| *v == 0.0), "{name}");
                accepted.push(name);
            }
            Err(error) => {
                let error = error.to_string();
                assert!(
                    error.contains(name.trim_end_matches("_k")) && !error.contains('\n'),
                    "{error}"
                );
            }
        }
    }
    println!("accepted: {accepted:?}");
    for refused in ["q8_1", "q8_k", "nvfp4", "i8", "i16", "i32", "i64", "f64"] {
        assert!(!accepted.contains(&refused));
    }
    assert!(accepted.len() > 20);
}

/// Products with matrices that every token needs, in a pass of one token.
fn products(engine: &Engine) -> usize {
    let kv = KvTypes {
        k: DType::F16,
        v: DType::F16,
    };
    let (config, backends) = (engine.config(), engine.backends());
    let state = State::new(config, &backends[0], kv, KV_PAD, 1, false).unwrap();
    let shape = TrunkShape {
        n_tokens: 1,
        n_kv: KV_PAD,
        n_outputs: 1,
        best: 0,
        head: HeadPass::Off,
        back: 0,
        unsplit: false,
    };
    let model = engine.weights().for_width(1);
    let pass = TrunkGraph::new(config, model, &state, backends, shape).unwrap();
    let nodes = pass.graph().nodes();
    nodes.iter().filter(|node| node.op() == "MUL_MAT").count()
}
