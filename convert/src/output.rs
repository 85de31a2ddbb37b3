//! Files that appear complete or not at all.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use tempfile::{NamedTempFile, TempPath};

/// The work was stopped from outside; nothing was left behind.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; nothing was written")]
pub struct Interrupted;

/// A file under way: it has a temporary name in its folder until [`OutputFile::finish`], and is removed if that is
/// never called.
pub struct OutputFile {
    file: NamedTempFile,
    path: PathBuf,
}

impl OutputFile {
    /// Starts a file of `bytes` bytes at `path`, which may be there already and stays as it is until the end.
    ///
    /// # Errors
    /// When the folder is missing or cannot be written, `path` is something else than a file, or the disk has not
    /// enough room.
    pub fn create(path: &Path, bytes: u64) -> Result<Self> {
        let shown = path.display();
        // Through a link to the file itself.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if let Ok(metadata) = path.metadata() {
            ensure!(!metadata.is_dir(), "{shown}: is a directory; name a file");
            ensure!(
                metadata.is_file(),
                "{shown}: is not a regular file, so it cannot be replaced"
            );
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        ensure!(
            folder.is_dir(),
            "{shown}: the folder {} does not exist; make it first",
            folder.display()
        );
        check_room(folder, bytes)?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(".qrun-").suffix(".partial");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            // As for any new file: the system takes the user's mask off.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let file = builder.tempfile_in(folder).map_err(|error| {
            anyhow::anyhow!("{shown}: cannot be written there: {}", plain(&error))
        })?;
        Ok(Self { file, path })
    }

    /// The file itself.
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// The name that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// When the system refuses; the temporary file is removed.
    pub fn finish(self) -> Result<()> {
        self.close().finish()
    }

    /// Closes the file while it still has its temporary name: for several files that appear together.
    pub fn close(self) -> ClosedFile {
        ClosedFile {
            file: self.file.into_temp_path(),
            path: self.path,
        }
    }
}

/// A complete file under its temporary name; removed unless it is given its own.
pub struct ClosedFile {
    file: TempPath,
    path: PathBuf,
}

impl ClosedFile {
    /// Gives the file its name.
    ///
    /// # Errors
    /// When the system refuses; the temporary file is removed.
    pub fn finish(self) -> Result<()> {
        let path = self.path;
        self.file
            .persist(&path)
            .map_err(|e| e.error)
            .with_context(|| format!("writing {}", path.display()))
    }
}

impl Write for OutputFile {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.file.as_file_mut().write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_file_mut().flush()
    }
}

/// The system's words without the temporary name, which nobody asked for.
fn plain(error: &io::Error) -> String {
    io::Error::from(error.kind()).to_string()
}

/// # Errors
/// When the disk under `folder` has less than `bytes` left.
pub fn check_room(folder: &Path, bytes: u64) -> Result<()> {
    #[cfg(unix)]
    {
        let disk = rustix::fs::statvfs(folder)
            .with_context(|| format!("looking at the disk of {}", folder.display()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        // Some network disks say nothing.
        if disk.f_blocks > 0 && free < bytes {
            bail!(
                "{}: {bytes} bytes are needed and {free} are free; make room or write to another disk",
                folder.display()
            );
        }
    }
    Ok(())
}

/// # Errors
/// When `path` is one of the files that are read.
pub fn check_apart<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    let same = |a: &Path, b: &Path| match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    };
    if inputs.into_iter().any(|input| same(path, input)) {
        bail!(
            "{}: is the file that is read; name another one to write",
            path.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_appears_complete_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        std::fs::write(&path, "old").unwrap();
        let mut given_up = OutputFile::create(&path, 3).unwrap();
        given_up.write_all(b"ne").unwrap();
        drop(given_up);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["a.gguf"]);

        let mut finished = OutputFile::create(&path, 3).unwrap();
        finished.write_all(b"new").unwrap();
        finished.finish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["a.gguf"]);
    }

    #[test]
    fn what_cannot_be_written_is_refused_first() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path, bytes| match OutputFile::create(path, bytes) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{} was accepted", path.display()),
        };
        assert!(refused(folder.path(), 1).contains("is a directory"));
        assert!(refused(&folder.path().join("no/a.gguf"), 1).contains("does not exist"));
        assert!(refused(&folder.path().join("a.gguf"), u64::MAX).contains("bytes are needed"));
        #[cfg(unix)]
        assert!(refused(Path::new("/dev/null"), 1).contains("not a regular file"));
        assert!(names(folder.path()).is_empty());
        let path = folder.path().join("b.gguf");
        std::fs::write(&path, "x").unwrap();
        let dotted = folder.path().join("./b.gguf");
        assert!(check_apart(&dotted, [path.as_path()]).is_err());
        assert!(check_apart(&folder.path().join("c.gguf"), [path.as_path()]).is_ok());
    }
}
