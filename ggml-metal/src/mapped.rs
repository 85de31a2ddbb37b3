//! A file mapped read-only into memory: where weights are read from, shared between processes.
//!
//! Invariant: what is mapped is a regular file, and on Unix a read of data that has gone from it ends the process
//! with one line that names it (see `fault.rs`).

use std::fs::{File, Metadata, OpenOptions};
use std::path::{Path, PathBuf};

use crate::Error;

/// A read-only map of a whole regular file, or memory that stands for one.
pub struct FileMap {
    path: PathBuf,
    /// None where there is only memory.
    file: Option<File>,
    /// Before the map, so that it is dropped first.
    #[cfg(unix)]
    _watch: Option<crate::fault::Watch>,
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
        let refuse = |reason: &str| Error::Format {
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let check = |metadata: &Metadata| {
            if metadata.is_dir() {
                Err(refuse("is a directory; name the file inside it"))
            } else if !metadata.is_file() {
                Err(refuse(
                    "is not a regular file, so it cannot be mapped; copy it to a disk first",
                ))
            } else if metadata.len() == 0 {
                Err(refuse("is empty"))
            } else {
                Ok(())
            }
        };
        // Opening a device may do things, so it is looked at first; it may be another one once it is open.
        check(&std::fs::metadata(path).map_err(io)?)?;
        let mut options = OpenOptions::new();
        options.read(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
        let file = options.open(path).map_err(io)?;
        check(&file.metadata().map_err(io)?)?;
        // SAFETY: the map is read-only and private to this value. Another program that writes to the file changes
        // what is read here, as for any mapped weights; one that shortens it makes reads fault, see `fault.rs`.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Ok(Self {
            path: path.to_owned(),
            file: Some(file),
            #[cfg(unix)]
            _watch: Some(crate::fault::Watch::new(path, &map)),
            map,
        })
    }

    /// Memory of `bytes` zeros that `fill` may write to, in place of a file called `path`. Pages that are not written
    /// take no memory.
    ///
    /// # Errors
    /// When the system has not that much memory to give.
    pub fn in_memory(
        path: &Path,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Self, Error> {
        let io = |source| Error::Io {
            path: path.to_owned(),
            source,
        };
        let mut map = memmap2::MmapOptions::new()
            .len(bytes)
            .no_reserve_swap()
            .map_anon()
            .map_err(io)?;
        fill(&mut map);
        Ok(Self {
            path: path.to_owned(),
            file: None,
            #[cfg(unix)]
            _watch: None,
            map: map.make_read_only().map_err(io)?,
        })
    }

    /// Checks that the file is still as long as its map.
    ///
    /// # Errors
    /// When it is not; the message has both lengths.
    pub fn check_length(&self) -> Result<(), Error> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        let metadata = file.metadata().map_err(|source| Error::Io {
            path: self.path.clone(),
            source,
        })?;
        if metadata.len() == self.map.len() as u64 {
            return Ok(());
        }
        Err(Error::Format {
            path: self.path.clone(),
            reason: format!(
                "had {} bytes when it was opened and has {} now; wait until it is complete, or fetch it again",
                self.map.len(),
                metadata.len()
            ),
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

    /// Takes a part that was read out of this process's memory; reading it again fetches it again. So a file larger
    /// than memory can be read through once without pressing anything else out.
    pub fn release(&self, range: std::ops::Range<usize>) {
        let range = range.start.min(self.map.len())..range.end.min(self.map.len());
        #[cfg(unix)]
        if !range.is_empty() && self.file.is_some() {
            // SAFETY: the map is a read-only view of a file and has no changes that could be lost; the system reads
            // its pages again where they are needed.
            let _ = unsafe {
                self.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    range.start,
                    range.len(),
                )
            };
        }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_of_another_length_than_its_map_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.gguf");
        std::fs::write(&path, [7; 100]).unwrap();
        let map = FileMap::open(&path).unwrap();
        map.check_length().unwrap();
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        for n in [99, 101] {
            writer.set_len(n).unwrap();
            let error = map.check_length().unwrap_err().to_string();
            assert!(error.contains("weights.gguf: had 100 bytes"), "{error}");
            assert!(error.contains(&format!("has {n} now")), "{error}");
        }
        // Another file under the same name leaves the mapped one as it is.
        writer.set_len(100).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, [8; 5]).unwrap();
        map.check_length().unwrap();
        assert_eq!(map.bytes()[99], 0);
    }
}
