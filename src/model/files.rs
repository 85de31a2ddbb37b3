//! The files that make up a model: one, the parts of a split one, and an MTP file apart.

use std::path::Path;

use anyhow::Result;
use ggml_metal::{Gguf, TensorInfo};

use super::Config;
use super::shapes::{Fill, Synthetic};

/// Open files of one model, with their checked numbers.
pub struct ModelFiles {
    /// The file with the metadata, then the further parts.
    parts: Vec<Gguf>,
    /// A file that holds only the MTP block.
    mtp: Option<Gguf>,
    /// The model's numbers.
    pub config: Config,
}

impl ModelFiles {
    /// Opens a model. `path` may be any part of a split model, or name a synthetic one; `mtp` a file that holds only
    /// its MTP block.
    ///
    /// # Errors
    /// When a file is missing, damaged, or does not belong to the others.
    pub fn open(path: &Path, mtp: Option<&Path>) -> Result<Self> {
        Self::open_filled(path, mtp, Fill::All)
    }

    /// As [`ModelFiles::open`], but the weights of a synthetic model are not made, so that it costs nothing.
    ///
    /// # Errors
    /// See [`ModelFiles::open`].
    pub fn outline(path: &Path, mtp: Option<&Path>) -> Result<Self> {
        Self::open_filled(path, mtp, Fill::Outline)
    }

    fn open_filled(path: &Path, mtp: Option<&Path>, fill: Fill) -> Result<Self> {
        let parts = match Synthetic::parse(path)? {
            Some(model) => vec![model.make(fill)?],
            None => convert::parts::open(path)?,
        };
        let mtp = mtp.map(Gguf::open).transpose()?;
        let config = Config::read(&parts, mtp.as_ref())?;
        Ok(Self { parts, mtp, config })
    }

    /// The file with the metadata.
    pub fn main(&self) -> &Gguf {
        &self.parts[0]
    }

    /// All files, the MTP file last.
    pub fn all(&self) -> impl Iterator<Item = &Gguf> {
        self.parts.iter().chain(&self.mtp)
    }

    /// The trunk's tensor with that name.
    pub fn tensor(&self, name: &str) -> Option<(&Gguf, &TensorInfo)> {
        self.parts
            .iter()
            .find_map(|file| file.tensor(name).map(|info| (file, info)))
    }

    /// A tensor of the MTP block by its name after `blk.N.`: from the file apart, where N may be any number,
    /// else from the model's own files, where N counts on after the trunk's layers.
    pub fn mtp_tensor(&self, suffix: &str) -> Option<(&Gguf, &TensorInfo)> {
        let Some(file) = &self.mtp else {
            return self.tensor(&format!("blk.{}.{suffix}", self.config.n_layer()));
        };
        file.tensors()
            .iter()
            .find(|info| {
                let block = info
                    .name
                    .strip_prefix("blk.")
                    .and_then(|n| n.split_once('.'));
                block.is_some_and(|(number, rest)| {
                    rest == suffix && number.bytes().all(|b| b.is_ascii_digit())
                })
            })
            .map(|info| (file, info))
    }

    /// Bytes of tensor data in all files.
    pub fn tensor_bytes(&self) -> usize {
        self.all().flat_map(|f| f.tensors()).map(|t| t.bytes).sum()
    }
}
