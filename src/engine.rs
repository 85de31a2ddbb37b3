//! A loaded model: immutable, shared by sessions and threads.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ggml_metal::{Backend, DeviceKind, Repack, WeightBytes, find_device};

use crate::model::shapes::Synthetic;
use crate::model::weights::MtpStatus;
use crate::model::{Config, ModelFiles, ModelWeights};

/// How to load a model.
#[derive(Clone, Debug, Default)]
pub struct EngineParams {
    /// A device's name; without it Metal, then another GPU, then the CPU.
    pub device: Option<String>,
    /// CPU threads; without it the performance cores.
    pub n_threads: Option<usize>,
    /// Which matrices to copy to a layout made for this CPU: faster decoding for memory of its own.
    pub repack: Repack,
    /// A file that holds the MTP block.
    pub mtp: Option<PathBuf>,
}

/// A model on a device.
pub struct Engine {
    files: Arc<ModelFiles>,
    weights: ModelWeights,
    backends: Vec<Backend>,
    params: EngineParams,
    n_ctx: usize,
    spare: Option<usize>,
    load_time: Duration,
}

impl Engine {
    /// Opens, checks and loads the model at `path`. `progress` is told bytes done and in all while weights are
    /// copied; mapped weights need no copy.
    ///
    /// # Errors
    /// When a file is unusable (the message names file, field and remedy), the device is missing, or memory runs
    /// out.
    pub fn load(
        path: &Path,
        params: &EngineParams,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Arc<Self>> {
        Self::plan(path, params)?.load_planned(progress)
    }

    /// Opens and checks the model at `path`, but only plans where its weights would lie: nothing is copied, and
    /// sessions of this engine have sizes and no memory. [`crate::fit`] asks it what a run takes.
    ///
    /// # Errors
    /// See [`Engine::load`].
    pub fn plan(path: &Path, params: &EngineParams) -> Result<Self> {
        let start = Instant::now();
        let files = Arc::new(ModelFiles::outline(path, params.mtp.as_deref())?);
        let device = find_device(params.device.as_deref())?;
        let first = Backend::new(device, params.n_threads)?;
        let size = files.config.ssm.head_dim;
        ensure!(
            first.has_delta_net(size)?,
            "{}: device {} has no kernel for its delta-net heads of {size}; choose another with --device, such as CPU",
            path.display(),
            device.name()
        );
        let mut backends = vec![first.for_plans()];
        if device.kind() != DeviceKind::Cpu {
            let cpu = Backend::new(find_device(Some("CPU"))?, params.n_threads)?;
            backends.push(cpu.for_plans());
        }
        Self::make(files, backends, params, start, &mut |_, _| {})
    }

    /// Loads what was planned.
    ///
    /// # Errors
    /// When a file changed, or memory runs out.
    pub fn load_planned(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<Arc<Self>> {
        let start = Instant::now();
        let backends = self.backends.iter().map(Backend::for_work).collect();
        let path = self.files.main().path();
        let files = match Synthetic::parse(path)? {
            // Planned without its weights.
            Some(_) => Arc::new(ModelFiles::open(path, self.params.mtp.as_deref())?),
            None => self.files.clone(),
        };
        let mut engine = Self::make(files, backends, &self.params, start, progress)?;
        for file in engine.files.all() {
            file.map().check_length()?;
            file.map().will_need();
        }
        engine.n_ctx = self.n_ctx;
        engine.spare = self.spare;
        engine.load_time = self.load_time + start.elapsed();
        Ok(Arc::new(engine))
    }

    fn make(
        files: Arc<ModelFiles>,
        backends: Vec<Backend>,
        params: &EngineParams,
        start: Instant,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let cpu = &backends[backends.len() - 1];
        let weights = ModelWeights::load(&files, &backends[0], cpu, params.repack, progress)?;
        Ok(Self {
            n_ctx: files.config.n_ctx_train,
            spare: None,
            files,
            weights,
            backends,
            params: params.clone(),
            load_time: start.elapsed(),
        })
    }

    /// The context of sessions that ask for none, in tokens: the model's own, unless it was lowered.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// Bytes of the host's memory that a full session leaves, as was found before loading; none where nobody looked.
    pub fn spare(&self) -> Option<usize> {
        self.spare
    }

    /// Notes what a full session leaves.
    pub fn set_spare(&mut self, bytes: usize) {
        self.spare = Some(bytes);
    }

    /// Lowers the context of sessions that ask for none.
    pub fn lower_n_ctx(&mut self, n_ctx: usize) {
        self.n_ctx = self.n_ctx.min(n_ctx);
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.files.config
    }

    /// The open files.
    pub fn files(&self) -> &ModelFiles {
        &self.files
    }

    /// The weights.
    pub fn weights(&self) -> &ModelWeights {
        &self.weights
    }

    /// Where the weights lie.
    pub fn weight_bytes(&self) -> WeightBytes {
        self.weights.bytes
    }

    /// Whether the draft head can be used, and why.
    pub fn mtp_status(&self) -> &MtpStatus {
        &self.weights.mtp_status
    }

    /// The device that computes, and the CPU last where that is another one.
    pub fn backends(&self) -> &[Backend] {
        &self.backends
    }

    /// What loading took.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }
}
