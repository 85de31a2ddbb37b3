//! The screen: all runs are followed, one is shown.

use std::io::BufRead as _;
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result};
use tui::watch::{RunEntry, WatchAction, WatchUi, WatchView};
use tui::{Pacer, Screen, terminal};

use super::follow::{Followed, SLOT};
use crate::cmd::Outcome;
use crate::live::folder::{self, Found};
use crate::live::line::Line;
use crate::report;

/// Time between two looks for new runs.
const LOOK: Duration = Duration::from_secs(2);

/// What a run's reader tells: a line, or that there are no more.
type Told = (u32, Option<Line>);

struct Watch {
    followed: Vec<Followed>,
    shown: Option<u32>,
    tell: Sender<Told>,
    told: Receiver<Told>,
}

/// Shows the run at `at`, or a list to choose from.
///
/// # Errors
/// When the terminal refuses.
pub fn run(runs: Vec<Found>, at: Option<usize>) -> Result<Outcome> {
    let (tell, told) = channel();
    let mut watch = Watch {
        shown: at.and_then(|at| runs.get(at)).map(|run| run.pid),
        followed: Vec::new(),
        tell,
        told,
    };
    for run in runs {
        watch.follow(run.pid, run.hello.map(Line::Hello), run.lines)?;
    }
    ctrlc::set_handler(|| {
        terminal::restore();
        std::process::exit(143);
    })
    .context("catching a kill")?;
    let mut screen = Screen::enter(false).context("taking the terminal")?;
    let mut ui = WatchUi::new(crate::cmd::chat::theme());
    let mut pacer = Pacer::default();
    let mut view = WatchView::default();
    let (mut slot, mut looked) = (Instant::now(), Instant::now());
    let mut changed = true;
    loop {
        if changed {
            watch.fill(&mut view);
            pacer.changed();
        }
        if pacer.due(Instant::now()) {
            screen.draw(|frame| tui::watch::draw(frame, &view, &mut ui))?;
        }
        let wait = pacer.wait(Instant::now()).unwrap_or(terminal::FRAME);
        if let Some(event) = terminal::next_event(wait)? {
            pacer.changed();
            for action in ui.handle(&event, &view) {
                match action {
                    WatchAction::Quit => {
                        drop(screen);
                        watch.sum_up();
                        return Ok(Outcome::Done);
                    }
                    WatchAction::Select(pid) => watch.shown = Some(pid),
                    WatchAction::Suspend => screen.suspend()?,
                    WatchAction::Redraw => screen.clear()?,
                }
                watch.fill(&mut view);
            }
        }
        changed = watch.hear();
        if slot.elapsed().as_secs_f64() >= SLOT {
            slot = Instant::now();
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let now = now.unwrap_or_default().as_secs_f64();
            watch.followed.iter_mut().for_each(|f| f.close_slot(now));
            changed = true;
        }
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            changed |= watch.look(&mut view);
        }
    }
}

impl Watch {
    /// Follows a run, whose lines are read on a thread of their own.
    fn follow(
        &mut self,
        pid: u32,
        hello: Option<Line>,
        lines: BufReader<UnixStream>,
    ) -> Result<()> {
        let mut followed = Followed::new(pid);
        if let Some(hello) = hello {
            followed.take(hello);
        }
        let tell = self.tell.clone();
        thread::Builder::new()
            .name("reader".to_owned())
            .spawn(move || {
                // Lines of a newer qrun that are not understood are passed over.
                for line in lines.lines().map_while(Result::ok) {
                    if let Ok(line) = serde_json::from_str(&line)
                        && tell.send((pid, Some(line))).is_err()
                    {
                        return;
                    }
                }
                let _ = tell.send((pid, None));
            })
            .context("starting a thread that reads from a run")?;
        self.followed.push(followed);
        Ok(())
    }

    /// Takes in what the runs have told; true when anything changed.
    fn hear(&mut self) -> bool {
        let mut changed = false;
        while let Ok((pid, line)) = self.told.try_recv() {
            changed = true;
            if let Some(followed) = self.followed.iter_mut().find(|f| f.run.pid == pid) {
                match line {
                    Some(line) => followed.take(line),
                    None => followed.lost(),
                }
            }
        }
        changed
    }

    /// Looks for new runs, and forgets those that ended and are not shown; true when there are any.
    fn look(&mut self, view: &mut WatchView) -> bool {
        let before = self.followed.len();
        let shown = self.shown;
        self.followed
            .retain(|f| f.run.summary.is_none() || Some(f.run.pid) == shown);
        let mut changed = self.followed.len() != before;
        match folder::sockets() {
            Ok(found) => {
                for (pid, path) in found {
                    if self.followed.iter().any(|f| f.run.pid == pid) {
                        continue;
                    }
                    if let Ok(stream) = folder::connect(&path) {
                        changed |= self.follow(pid, None, BufReader::new(stream)).is_ok();
                    }
                }
                view.notice = None;
            }
            Err(error) => {
                view.notice = Some(report::error_line(&error));
                changed = true;
            }
        }
        changed
    }

    fn fill(&self, view: &mut WatchView) {
        let going = self.followed.iter().filter(|f| f.run.summary.is_none());
        view.runs = going
            .map(|f| RunEntry {
                pid: f.run.pid,
                model: f.run.model.clone(),
                command: f.run.command.clone(),
                tps: f.run.live.decode_tps,
            })
            .collect();
        let shown = self.followed.iter().find(|f| Some(f.run.pid) == self.shown);
        view.run = shown.map(|f| f.run.clone());
    }

    /// Prints what remains of the run that was shown, if it ended.
    fn sum_up(&self) {
        let shown = self.followed.iter().find(|f| Some(f.run.pid) == self.shown);
        if let Some(run) = shown.map(|f| &f.run)
            && let Some(summary) = &run.summary
        {
            report::note(&format!("{} {}", run.pid, run.model));
            for (label, value) in summary.rows() {
                report::note(&format!("  {label:<16} {value}"));
            }
        }
    }
}
