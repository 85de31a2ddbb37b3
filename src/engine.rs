//! A loaded model: immutable, shared by sessions and threads.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ggml_metal::{Backend, DeviceKind, Repack, WeightBytes, find_device};

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
    files: ModelFiles,
    weights: ModelWeights,
    backends: Vec<Backend>,
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
        let start = Instant::now();
        let files = ModelFiles::open(path, params.mtp.as_deref())?;
        let device = find_device(params.device.as_deref())?;
        let first = Backend::new(device, params.n_threads)?;
        let size = files.config.ssm.head_dim;
        ensure!(
            first.has_delta_net(size)?,
            "{}: device {} has no kernel for its delta-net heads of {size}; choose another with --device, such as CPU",
            path.display(),
            device.name()
        );
        let mut backends = vec![first];
        if device.kind() != DeviceKind::Cpu {
            backends.push(Backend::new(find_device(Some("CPU"))?, params.n_threads)?);
        }
        let cpu = &backends[backends.len() - 1];
        let weights = ModelWeights::load(&files, &backends[0], cpu, params.repack, progress)?;
        for file in files.all() {
            file.map().check_length()?;
            file.map().will_need();
        }
        Ok(Arc::new(Self {
            files,
            weights,
            backends,
            load_time: start.elapsed(),
        }))
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
