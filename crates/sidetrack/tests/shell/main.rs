//! `sidetrack run` on a terminal: interactive shells, job control, and programs that draw.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod jobs;
mod lines;
mod login;

use sidetrack_testkit::screen::Screen;
use std::process::Command;

/// A shell without the settings of the user, whose prompt is `outer>`.
const SHELL: [&str; 5] = ["bash", "--norc", "--noprofile", "--noediting", "-i"];

/// The same shell under `run`, with the prompt `inner>`. `$run` has the options.
const INNER: &str = "PS1='inner> ' $sidetrack run $run -- bash --norc --noprofile --noediting -i";

/// Starts the outer shell on a terminal, and waits for its prompt.
fn outer(run: &str) -> Screen {
    let run = run.to_owned();
    let mut screen = Screen::start(&SHELL, |command| environment(command, &run));
    screen.wait_for("outer> ");
    screen
}

fn environment(command: &mut Command, run: &str) {
    command.env("PS1", "outer> ").env("sidetrack", env!("CARGO_BIN_EXE_sidetrack")).env("run", run);
    command.env_remove("SIDETRACK_VIA").env_remove("PROMPT_COMMAND").env("NO_COLOR", "1").env("LC_ALL", "C");
}
