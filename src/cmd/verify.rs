//! `qrun verify`: whether speculation gives the same text as plain decoding, on this model and machine.

use anyhow::Result;
use qrun::generate::{Generator, Request};
use qrun::sampler::{Sampler, SamplerParams};
use qrun::session::{CancelToken, Outputs, Session};
use qrun::speculate::Speculator;
use serde_json::json;

use super::tune::{PROMPTS, chat};
use super::{Outcome, UsageError, model};
use crate::cli::VerifyArgs;
use crate::report;

/// Generates texts with and without speculation and compares them token by token.
///
/// # Errors
/// When the model has nothing to guess with, cannot be loaded or computed; when a text differs.
pub fn run(args: &VerifyArgs) -> Result<Outcome> {
    let plain_params = model::session_params(&args.model)?;
    let needs = model::Needs {
        n_sessions: 2,
        ..model::Needs::of(&args.spec)
    };
    let (engine, tokenizer) = model::load(&args.model, &needs)?;
    let mut params = plain_params;
    let (spec, tuned) = model::speculation(&args.spec, &engine, &tokenizer, &mut params)?;
    let Some(spec) = spec else {
        return Err(
            UsageError(format!("nothing to verify: {}", engine.mtp_status().reason)).into(),
        );
    };
    let mut plain = Session::new(engine.clone(), plain_params)?;
    let mut guessing = Session::new(engine.clone(), params)?;
    let mut speculator = Speculator::new(spec, tuned);
    let never = CancelToken::default();
    let prompts: Vec<Vec<u32>> = match &args.file {
        None => PROMPTS
            .iter()
            .map(|text| tokenizer.encode(&chat(text), true))
            .collect::<Result<_>>()?,
        Some(path) => std::fs::read_to_string(path)
            .map_err(|e| anyhow::anyhow!("reading {}: {e}", path.display()))?
            .lines()
            .filter(|line| !line.trim().is_empty())
            .map(|line| tokenizer.encode(&chat(line), true))
            .collect::<Result<_>>()?,
    };
    let (mut same, mut results) = (0, Vec::new());
    for (i, prompt) in prompts.iter().enumerate() {
        let request = Request {
            prompt: prompt.clone(),
            n_predict: Some(args.n_predict),
            ignore_eos: true,
            ..Request::default()
        };
        let generate = |session: &mut Session, speculator: Option<&mut Speculator>| {
            session.clear()?;
            let mut sampler = Sampler::new(SamplerParams::greedy())?;
            let answer = Generator {
                session,
                tokenizer: &tokenizer,
                sampler: &mut sampler,
                constraint: None,
                speculator,
                watch: None,
            }
            .answer(&request, &never, &mut |_| Ok(()))?;
            anyhow::Ok(answer.tokens)
        };
        let a = generate(&mut plain, None)?;
        let b = generate(&mut guessing, Some(&mut speculator))?;
        let Some(at) = (0..a.len().max(b.len())).find(|&at| a.get(at) != b.get(at)) else {
            same += 1;
            results.push(json!({"prompt": i, "same": true, "tokens": a.len()}));
            continue;
        };
        // How far apart the two tokens were for plain decoding.
        plain.clear()?;
        let text = [prompt.as_slice(), &a[..at]].concat();
        let logits = plain.eval(&text, Outputs::Last, &never)?;
        let logit = |tokens: &[u32]| {
            tokens
                .get(at)
                .and_then(|&t| logits.get(t as usize))
                .copied()
        };
        let margin = logit(&a).zip(logit(&b)).map(|(a, b)| a - b);
        report::note(&format!(
            "text {}: token {at} differs: {:?} without and {:?} with speculation, logits {} apart",
            i + 1,
            a.get(at).map(|&t| tokenizer.decode(&[t])),
            b.get(at).map(|&t| tokenizer.decode(&[t])),
            margin.map_or("?".to_owned(), |m| format!("{m:.4}")),
        ));
        results.push(json!({"prompt": i, "same": false, "at": at, "margin": margin}));
    }
    if args.json {
        let object = json!({"same": same, "texts": prompts.len(), "tokens_each": args.n_predict, "results": results});
        report::out(&format!("{}\n", serde_json::to_string_pretty(&object)?))?;
    }
    let summary = format!(
        "{same} of {} texts of {} tokens are the same with speculation",
        prompts.len(),
        args.n_predict
    );
    if same == prompts.len() {
        report::note(&format!("OK: {summary}"));
        return Ok(Outcome::Done);
    }
    anyhow::bail!(
        "{summary}; passes of several tokens round in another way, which decides where two tokens are almost \
         equally probable (see --spec-exact)"
    )
}
