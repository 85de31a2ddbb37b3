//! A file mapped read-only into memory: where weights are read from, shared between processes.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::Error;

/// A read-only map of a whole regular file.
pub struct FileMap {
    path: PathBuf,
    map: memmap2::Mmap,
}

impl FileMap {
    /// Maps `path`.
    ///
    /// # Errors
    /// When it is not a regular file (a directory or a pipe would block or fail later), is empty, or cannot
    /// be opened or mapped.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let io = |source| Error::Io {
            path: path.to_owned(),
            source,
        };
        let metadata = std::fs::metadata(path).map_err(io)?;
        let refuse = |reason: &str| Error::Format {
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        if metadata.is_dir() {
            return Err(refuse("is a directory; name the file inside it"));
        }
        if !metadata.is_file() {
            return Err(refuse(
                "is not a regular file, so it cannot be mapped; copy it to a disk first",
            ));
        }
        if metadata.len() == 0 {
            return Err(refuse("is empty"));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only and private to this value. A file that another program shortens while
        // it is mapped makes reads fault; that is the price of zero-copy weights and is documented for users.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Ok(Self {
            path: path.to_owned(),
            map,
        })
    }

    /// The file that is mapped.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Asks the system to read the file ahead, so that the first pass does not wait for the disk page by page.
    pub fn will_need(&self) {
        #[cfg(unix)]
        {
            // Advice only: a system that refuses it reads on demand.
            let _ = self.map.advise(memmap2::Advice::WillNeed);
        }
    }
}
