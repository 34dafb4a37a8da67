//! The jail of `sidetrack run`: what the lists allow and refuse, and each known way out of it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod combined;
mod denied;
mod lists;
mod nested;
mod profiles;
mod publish;
mod unix;
mod ways;

use std::process::{Command, Output, Stdio};

/// `sidetrack run` with these arguments before the command, and a Python program.
fn run(arguments: &[&str], program: &str) -> Output {
    command(arguments, &["python3", "-c", program]).output().unwrap()
}

fn command(arguments: &[&str], program: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("run").args(arguments).arg("--").args(program);
    command.env_remove("SIDETRACK_VIA").env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
