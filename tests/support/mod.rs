//! What several test files need: the shared data, when it is there, and small helpers.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

pub mod checkpoint;
pub mod synth;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ggml_metal::DType;
use qrun::engine::{Engine, EngineParams};
use qrun::session::{CancelToken, Session, SessionParams};
use qrun::state::KvTypes;

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The embedded demo model.
pub fn demo() -> PathBuf {
    root().join("models/demo-Q4_K_M.gguf")
}

/// A file of the data folder that lies beside the repository on the project's own machines. Without it the test
/// says so and passes.
pub fn shared(name: &str) -> Option<PathBuf> {
    let path = root().join("../shared").join(name);
    if path.exists() {
        return Some(path);
    }
    println!("SKIPPED: ../shared/{name} is not here");
    None
}

pub fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub fn engine(path: &Path) -> Arc<Engine> {
    let params = EngineParams {
        device: Some("CPU".to_owned()),
        n_threads: Some(2),
        ..EngineParams::default()
    };
    Engine::load(path, &params, &mut |_, _| {}).unwrap()
}

pub const F32: KvTypes = KvTypes {
    k: DType::F32,
    v: DType::F32,
};

pub fn session(engine: &Arc<Engine>, kv: KvTypes, mtp: bool) -> Session {
    let params = SessionParams {
        kv,
        mtp,
        ..SessionParams::default()
    };
    Session::new(engine.clone(), params).unwrap()
}

pub fn never() -> CancelToken {
    CancelToken::default()
}

pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    let list = value.as_array().unwrap().iter();
    list.map(|v| v.as_u64().unwrap() as u32).collect()
}

pub fn floats(value: &serde_json::Value) -> Vec<f32> {
    let list = value.as_array().unwrap().iter();
    list.map(|v| v.as_f64().unwrap() as f32).collect()
}

/// The best token; the lowest id among equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &v) in logits.iter().enumerate() {
        if v > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// The largest absolute difference of finite values.
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // `f32::max` passes over NaN, so a comparison of broken values would find no difference.
    assert!(a.iter().chain(b).all(|v| v.is_finite()));
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}
