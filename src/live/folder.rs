//! Where running qruns are found: a folder that is this user's alone, with a socket for each, named by its process.

use std::fs::{self, DirBuilder};
use std::io::{self, BufRead as _, BufReader};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, ensure};

use super::line::{Hello, Line};

/// A run that says nothing for so long is listed without what it would say of itself.
const HELLO: Duration = Duration::from_secs(1);

/// A run that was found.
pub struct Found {
    /// Its process.
    pub pid: u32,
    /// What it says of itself; none where it says nothing.
    pub hello: Option<Hello>,
    /// The lines that follow.
    pub lines: BufReader<UnixStream>,
}

/// The folder, whether it is there or not: `$XDG_RUNTIME_DIR/qrun`, or where that is not this user's, one in the
/// folder for temporary files.
fn place() -> PathBuf {
    let own = |path: &PathBuf| {
        let facts = fs::metadata(path);
        path.is_absolute() && facts.is_ok_and(|facts| facts.uid() == user())
    };
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match runtime.filter(own) {
        Some(runtime) => runtime.join("qrun"),
        None => std::env::temp_dir().join(format!("qrun-{}", user())),
    }
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The folder, made if there is none.
///
/// # Errors
/// When it cannot be made, or is not this user's alone.
pub fn made() -> Result<PathBuf> {
    let place = place();
    match DirBuilder::new().mode(0o700).create(&place) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error).with_context(|| format!("making {}", place.display())),
    }
    check(&place)?;
    Ok(place)
}

/// Refuses a folder that others own or can enter: they could put sockets of their own there, or read along.
fn check(place: &Path) -> Result<()> {
    let facts = fs::symlink_metadata(place).with_context(|| format!("{}", place.display()))?;
    ensure!(
        facts.is_dir() && facts.uid() == user(),
        "{} is not a folder of yours; remove it, or set XDG_RUNTIME_DIR to a folder that is",
        place.display()
    );
    ensure!(
        facts.mode() & 0o077 == 0,
        "{} is open to others (mode {:o}); close it with `chmod 700`",
        place.display(),
        facts.mode() & 0o777
    );
    Ok(())
}

/// The socket of a process.
pub fn socket(folder: &Path, pid: u32) -> PathBuf {
    folder.join(format!("{pid}.sock"))
}

/// The sockets that are there, the newest first.
///
/// # Errors
/// When the folder is not this user's alone, or cannot be read; that there is none is no error.
pub fn sockets() -> Result<Vec<(u32, PathBuf)>> {
    let place = place();
    if fs::symlink_metadata(&place).is_err() {
        return Ok(Vec::new());
    }
    check(&place)?;
    let entries = fs::read_dir(&place).with_context(|| format!("reading {}", place.display()))?;
    let mut found: Vec<(SystemTime, u32, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let pid = path.file_name()?.to_str()?.strip_suffix(".sock")?;
            let made = fs::symlink_metadata(&path).and_then(|facts| facts.modified());
            Some((made.ok()?, pid.parse().ok()?, path))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    Ok(found
        .into_iter()
        .map(|(_, pid, path)| (pid, path))
        .collect())
}

/// Connects to a run. A socket that nobody listens to any more is removed.
///
/// # Errors
/// When it cannot be connected to.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let connected = UnixStream::connect(path);
    let stale = connected
        .as_ref()
        .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    if stale {
        let _ = fs::remove_file(path);
    }
    connected
}

/// The runs of this user, the newest first.
///
/// # Errors
/// See [`sockets`].
pub fn runs() -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for (pid, path) in sockets()? {
        // One that ended meanwhile is not there.
        let Ok(stream) = connect(&path) else { continue };
        let _ = stream.set_read_timeout(Some(HELLO));
        let mut lines = BufReader::new(stream);
        let mut text = String::new();
        let hello = match lines.read_line(&mut text) {
            Ok(0) => continue,
            Ok(_) => match serde_json::from_str(&text) {
                Ok(Line::Hello(hello)) => Some(hello),
                _ => None,
            },
            Err(_) => None,
        };
        let _ = lines.get_ref().set_read_timeout(None);
        found.push(Found { pid, hello, lines });
    }
    Ok(found)
}
