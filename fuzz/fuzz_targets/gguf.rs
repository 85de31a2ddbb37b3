//! Opens, checks, loads and runs a model file. The input is the file's head; its weights are zeroes that follow,
//! so that inputs stay small.

#![no_main]

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use qrun::engine::{Engine, EngineParams};
use qrun::model::ModelFiles;
use qrun::model::weights::Plan;
use qrun::session::{CancelToken, Outputs, Session, SessionParams};
use qrun::template::ChatTemplate;
use qrun::vocab;

/// More than the weights of the seeds.
const WEIGHT_BYTES: u64 = 4 << 20;

fuzz_target!(|head: &[u8]| {
    let path = std::env::temp_dir().join(format!("qrun-fuzz-{}.gguf", std::process::id()));
    write(&path, head).expect("the temporary folder takes files");
    if let Err(error) = attempt(&path) {
        let message = format!("{error:#}");
        assert!(!message.chars().any(char::is_control), "{message:?}");
        assert!(message.len() < 2000, "{message}");
    }
    let _ = std::fs::remove_file(&path);
});

fn write(path: &Path, head: &[u8]) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).open(path)?;
    file.write_all(head)?;
    file.set_len(head.len() as u64 + WEIGHT_BYTES)
}

fn attempt(path: &Path) -> anyhow::Result<()> {
    let files = ModelFiles::open(path, None)?;
    let tokenizer = vocab::tokenizer(files.main());
    if let Ok(tokenizer) = &tokenizer {
        tokenizer.encode("Hello <|im_start|> 1é", true)?;
    }
    if let Some(template) = vocab::chat_template(files.main()) {
        let _ = ChatTemplate::new(&template);
    }
    vocab::recommended_sampling(files.main());
    Plan::make(&files)?;
    let params = EngineParams {
        device: Some("CPU".to_owned()),
        n_threads: Some(1),
        ..EngineParams::default()
    };
    let engine = Engine::load(path, &params, &mut |_, _| {})?;
    let params = SessionParams {
        n_ctx: engine.config().n_ctx_train.min(64),
        mtp: engine.mtp_status().on,
        ..SessionParams::default()
    };
    let mut session = Session::new(engine, params)?;
    session.eval(&[0, 0], Outputs::Last, &CancelToken::default())?;
    if session.params().mtp {
        session.draft(0, 2)?;
    }
    tokenizer.map(|_| ())
}
