//! The terminal: taken for the screen and given back, also after a panic and while we are stopped.

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use rustix::process::{Signal, getpid, kill_current_process_group, kill_process};
use std::io::{self, IsTerminal, Stdout};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use tokio::sync::mpsc::{Receiver, channel};

/// Keys that wait for the screen.
const KEYS_MAX: usize = 256;

/// Whether the screen has the terminal.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal while the screen has it. Dropping it gives it back.
pub(super) struct Taken {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Taken {
    /// Takes it.
    ///
    /// # Errors
    /// Standard input or output is not a terminal, or it cannot be set.
    pub(super) fn take() -> anyhow::Result<Self> {
        anyhow::ensure!(
            io::stdin().is_terminal() && io::stdout().is_terminal(),
            "top needs a terminal for its screen and its keys\nhelp: `sidetrack flows --follow` prints flows to a file or pipe"
        );
        give_back_after_panic();
        enter()?;
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout()));
        terminal.map(|terminal| Self { terminal }).map_err(|error| {
            leave();
            error.into()
        })
    }

    /// Draws.
    ///
    /// # Errors
    /// The terminal is gone.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut ratatui::Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(draw).map(|_| ())
    }

    /// Stops the programs of our job, as the key of a terminal does. We stop when the signal arrives: [`Taken::stop`].
    pub(super) fn stop_job() {
        // Without a job there is nothing to stop.
        let _ = kill_current_process_group(Signal::TSTP);
    }

    /// Gives the terminal back, stops this process until it is continued, and takes the terminal again.
    ///
    /// # Errors
    /// The terminal is gone.
    pub(super) fn stop(&mut self) -> io::Result<()> {
        leave();
        // Of several threads, the kernel gives a signal for the process to the first one if it can: that is this one, and it
        // stops before the call returns.
        let _ = kill_process(getpid(), Signal::STOP);
        self.again()
    }

    /// Takes the terminal again: another program has had it.
    ///
    /// # Errors
    /// The terminal is gone.
    pub(super) fn again(&mut self) -> io::Result<()> {
        leave();
        enter()?;
        // A new one draws all. To clear the old one, it would ask the terminal where the cursor is, and wait.
        self.terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        leave();
    }
}

fn enter() -> io::Result<()> {
    IS_TAKEN.store(true, SeqCst);
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen).inspect_err(|_| leave())
}

fn leave() {
    if IS_TAKEN.swap(false, SeqCst) {
        // Nothing can be done about a terminal that is gone.
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}

/// Gives the terminal back before the message of a panic is printed.
fn give_back_after_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            leave();
            before(info);
        }));
    });
}

/// Reads keys and changes of the window's size, on a thread that ends with the process. The end of the channel is that of the
/// terminal.
pub(super) fn keys() -> io::Result<Receiver<Event>> {
    let (pressed, keys) = channel(KEYS_MAX);
    let read = move || {
        while let Ok(event) = event::read() {
            if pressed.blocking_send(event).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(keys)
}
