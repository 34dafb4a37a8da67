//! `sidetrack run --top -- CMD`: the screen shows the connections of one command.
//!
//! ```text
//! start `run` without the terminal --> screen --command ends--> its output, its exit code
//!                                        | q: output, as it comes --command ends--> its exit code
//!                                        | SIGTERM and others go to `run` --------> as after q
//! ```
//!
//! `run` is a process of its own, in a session of its own: it cannot take the terminal from the screen. Its output goes to a file
//! without a name.

use super::{Left, PATIENCE, Signals, Told, Top};
use crate::admin::{Client, run_socket};
use crate::cli::run::{RunArgs, finish};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
use rustix::process::{Pid, Signal, getpid, kill_process};
use sidetrack_sys::exec::Ended;
use sidetrack_sys::process;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use tokio::io::unix::AsyncFd;

/// Time between two looks at the output after the screen was left.
const LOOK: Duration = Duration::from_millis(100);
/// Bytes of output that are copied at a time.
const COPIED_EACH: usize = 64 << 10;

/// Runs the command under the screen. `arguments` are those of this process. Returns the command's exit code; if a signal ended the
/// command, the same signal ends this process.
pub fn run_command(args: &RunArgs, arguments: &[OsString]) -> ExitCode {
    finish(watched(args, arguments))
}

/// The arguments of a `run` of the same command without the screen.
fn without_top(arguments: &[OsString], command_words: usize) -> Vec<OsString> {
    let options_end = arguments.len().saturating_sub(command_words);
    let is_kept = |(index, word): &(usize, &OsString)| *index >= options_end || *word != "--top";
    arguments.iter().enumerate().skip(1).filter(is_kept).map(|(_, word)| word.clone()).collect()
}

fn watched(args: &RunArgs, arguments: &[OsString]) -> anyhow::Result<Ended> {
    anyhow::ensure!(
        io::stdin().is_terminal() && io::stdout().is_terminal(),
        "--top needs a terminal for its screen and its keys\nhelp: leave it out, and look with `sidetrack flows --pid PID`"
    );
    let output = unnamed()?;
    let mut child = process::spawn_apart(&without_top(arguments, args.command.len()), &output)?;
    let name = args.command.first().map(|name| Path::new(name).file_name().unwrap_or(name).to_string_lossy());
    let name = crate::cli::flows::human::printable(&name.unwrap_or_default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut shown = 0;
    let watching = runtime.block_on(watch(child.id(), &name, &output, &mut shown));
    runtime.shutdown_background();
    if watching.is_err() {
        // Without a screen the command does not go on alone.
        send(child.id(), Signal::TERM.as_raw());
    }
    let status = child.wait()?;
    copy(&output, &mut shown);
    watching?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Exit(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, signal) => Ended::Signal(signal.unwrap_or_default()),
    })
}

/// A file without a name, which ends with its last descriptor.
fn unnamed() -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    match open(std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(file.into()),
        // Not every file system has them.
        Err(_) => Ok(memfd_create("output", MemfdFlags::CLOEXEC)?.into()),
    }
}

fn send(pid: u32, signal: i32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let (Some(pid), Some(signal)) = (pid, Signal::from_named_raw(signal)) {
        // It may have ended.
        let _ = kill_process(pid, signal);
    }
}

/// Shows the screen until the command ends. When the screen is left before, shows the output as it comes.
async fn watch(pid: u32, name: &str, output: &File, shown: &mut u64) -> anyhow::Result<()> {
    #[expect(deprecated, reason = "its successor is unsafe; this descriptor is owned and stays open")]
    let ended = AsyncFd::new(process::watch(pid)?)?;
    let mut signals = Signals::new()?;
    let mut top = Top::new(Client::new(run_socket(pid)), name, "")?;
    match top.show(async { ended.readable().await.map(|_| ()) }).await? {
        Left::Over(_) => return Ok(()),
        Left::Signal(signal) => send(pid, signal),
        Left::Quit => {}
    }
    drop(top);
    loop {
        copy(output, shown);
        tokio::select! {
            biased;
            over = ended.readable() => return Ok(over.map(|_| ())?),
            told = signals.next() => match told {
                Told::End(signal) => send(pid, signal),
                Told::Stop => {
                    let _ = kill_process(getpid(), Signal::STOP);
                }
                Told::Continued => {}
            },
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// Copies what is new in the output. The place in the file is that of the writers, so that it is read by its own.
fn copy(output: &File, shown: &mut u64) {
    let mut bytes = vec![0; COPIED_EACH];
    let mut to = io::stdout().lock();
    while let Ok(length @ 1..) = output.read_at(&mut bytes, *shown) {
        *shown += length as u64;
        if to.write_all(&bytes[..length]).is_err() {
            break;
        }
    }
    let _ = to.flush();
}

/// A command that is being started has no socket yet.
pub(super) const STARTS: Duration = PATIENCE;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_option_is_taken_out() {
        let of = |line: &str, command: usize| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let left = without_top(&words, command);
            left.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of("sidetrack run --top -v -- tool --top -x", 3), "run -v -- tool --top -x");
        assert_eq!(of("sidetrack run --jail --top tool", 1), "run --jail tool");
    }
}
