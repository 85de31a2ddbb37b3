//! What happens when the data of a mapped file is gone: one line that names the file, and exit code 1.
//!
//! A file that another program shortens, or whose disk fails, makes reads of its map raise SIGBUS, in whichever
//! thread reads, most often inside ggml. Nothing can go on from there, so this is the one place below `main` that
//! ends the process. Faults elsewhere keep the action that they had before.

use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, Once, PoisonError};

/// Maps that are watched at the same time; further ones fault as they would without the handler.
const MAX_MAPS: usize = 256;

/// A watched range of addresses and what is said when reading it fails. Free while `end` is 0.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    message: AtomicPtr<u8>,
    message_bytes: AtomicUsize,
}

static SLOTS: [Slot; MAX_MAPS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        message: AtomicPtr::new(std::ptr::null_mut()),
        message_bytes: AtomicUsize::new(0),
    }
}; MAX_MAPS];

/// Held while a slot is filled or freed; the handler takes no lock.
static CHANGES: Mutex<()> = Mutex::new(());

static INSTALL: Once = Once::new();

/// The action for SIGBUS that was there before ours: set before the handler can run, never changed or freed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// The thread that writes the message is the first one that faults; further ones wait for the end.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Keeps a range watched.
pub(crate) struct Watch {
    slot: Option<usize>,
    _message: Box<[u8]>,
}

impl Watch {
    /// Watches the map of a file. It must live at most as long as the map does.
    pub(crate) fn new(path: &Path, map: &[u8]) -> Self {
        INSTALL.call_once(install);
        // On a terminal the line begins afresh, and plainly: an answer may be half written.
        let begin = if stderr().is_terminal() {
            "\x1b[0m\n"
        } else {
            ""
        };
        let text = format!(
            "{begin}error: {}: was shortened or its disk failed while it was in use; fetch it again\n",
            path.display().to_string().replace('\n', " ")
        );
        let message = text.into_bytes().into_boxed_slice();
        let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = SLOTS.iter().position(|slot| slot.end.load(SeqCst) == 0);
        if let Some(slot) = slot.map(|at| &SLOTS[at]) {
            let start = map.as_ptr() as usize;
            slot.message.store(message.as_ptr().cast_mut(), SeqCst);
            slot.message_bytes.store(message.len(), SeqCst);
            slot.start.store(start, SeqCst);
            slot.end.store(start + map.len(), SeqCst);
        }
        Self {
            slot,
            _message: message,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            let _changes = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
            SLOTS[slot].end.store(0, SeqCst);
        }
    }
}

/// Puts our handler before the one that is there.
fn install() {
    // SAFETY: both structures are plain data for which zeroes are valid, and they live through the calls; the
    // handler has the signature that SA_SIGINFO asks for and does only what a signal handler may. The previous
    // action is stored before the handler is installed.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) != 0 {
            return;
        }
        PREVIOUS.store(Box::into_raw(Box::new(previous)), SeqCst);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_fault as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        // Where it is refused, a fault ends the process as it always did.
        let _ = libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
}

/// The handler: only atomics, `write`, `_exit`, `pause`, `sigaction`, `signal` and `raise`, which signal handlers may use.
extern "C" fn on_fault(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the system passes a valid description of the signal. Positive codes are faults, which have an address.
    let (address, is_fault) = unsafe { ((*info).si_addr() as usize, (*info).si_code > 0) };
    let slot = SLOTS.iter().find(|slot| {
        let end = slot.end.load(SeqCst);
        let start = slot.start.load(SeqCst);
        // A slot that changed meanwhile belongs to a map that no faulting thread reads.
        is_fault && (start..end).contains(&address) && slot.end.load(SeqCst) == end
    });
    if let Some(slot) = slot {
        if ENDING.swap(true, SeqCst) {
            loop {
                // SAFETY: only waits for the other thread to end the process.
                unsafe { libc::pause() };
            }
        }
        let mut at = slot.message.load(SeqCst).cast_const();
        let mut left = slot.message_bytes.load(SeqCst);
        while left > 0 {
            // SAFETY: the message is as long as the slot says. It is freed only after the slot and before the map,
            // and the map cannot be dropped while this thread is reading it.
            let n = unsafe { libc::write(libc::STDERR_FILENO, at.cast(), left) };
            let Some(n) = usize::try_from(n).ok().filter(|&n| n > 0) else {
                break;
            };
            // SAFETY: no more was written than was left.
            at = unsafe { at.add(n) };
            left -= n;
        }
        // SAFETY: ends the process without running anything else of it.
        unsafe { libc::_exit(1) };
    }
    // SAFETY: the previous action was stored before this handler was installed and lives for ever. A fault happens
    // again under it when this returns. A signal that was sent ends the process: the previous handler may be the
    // one of Rust's runtime, which would let it pass.
    unsafe {
        if is_fault {
            libc::sigaction(signal, PREVIOUS.load(SeqCst), std::ptr::null_mut());
        } else {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
}
