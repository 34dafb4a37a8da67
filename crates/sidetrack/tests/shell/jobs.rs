//! Job control: the shell inside has the terminal, its jobs get the keys, and the shell outside has its terminal back.

use crate::{INNER, environment, outer};
use sidetrack_testkit::screen::Screen;
use sidetrack_testkit::{awaited, enter_new_namespace, eventually, is_root};
use std::os::unix::process::ExitStatusExt;

/// A job that says that it runs, and then reads a line. What is typed has quotes, so that its echo is another text.
const READER: &str = "sh -c 'echo rea''dy; read word; echo got-$word'";

/// A job that runs until a signal comes.
fn waiter(trap: &str) -> String {
    format!("sh -c 'trap \"{trap}\" INT WINCH; echo rea''dy; while :; do sleep 0.05; done'")
}

#[test]
fn a_shell_has_job_control() {
    shell_with_jobs("");
}

#[test]
fn a_shell_in_a_jail_has_job_control() {
    shell_with_jobs("--jail");
}

#[test]
fn a_shell_in_a_control_group_has_job_control() {
    if !is_root() {
        return;
    }
    let thread = std::thread::spawn(|| {
        enter_new_namespace();
        shell_with_jobs("--mode cgroup");
    });
    thread.join().unwrap();
}

fn shell_with_jobs(run: &str) {
    let mut screen = outer(run);
    let before = screen.settings();
    screen.type_and_wait(INNER, "inner> ");
    keys_reach_the_foreground_job(&mut screen);
    jobs_stop_and_go_on(&mut screen);
    // The whole inner shell: the outer one has its terminal again, and continues both.
    screen.type_and_wait("suspend", "Stopped");
    screen.wait_for("outer> ");
    screen.type_and_wait("echo out''side", "outside");
    screen.wait_for("outer> ");
    screen.press("fg\n");
    screen.type_and_wait("echo in''side", "inside");
    screen.wait_for("inner> ");
    // A job that outlives the shell.
    screen.type_and_wait("sleep 1000 & echo pi''d=$!.", "pid=");
    let sleeper: u32 = screen.wait_for(".").parse().unwrap();
    screen.wait_for("inner> ");
    screen.type_and_wait("disown; exit 5", "outer> ");
    screen.type_and_wait("echo code=$?.", "code=5.");
    screen.wait_for("outer> ");
    assert_eq!(screen.settings(), before);
    if run.contains("cgroup") {
        eventually("it has ended with the group", || !is_there(sleeper));
    } else {
        assert!(is_there(sleeper), "it goes on, without a network");
        screen.type_and_wait(&format!("kill {sleeper}"), "outer> ");
        eventually("it ends", || !is_there(sleeper));
    }
    screen.press("exit\n");
    assert!(screen.end().success());
}

fn keys_reach_the_foreground_job(screen: &mut Screen) {
    screen.type_and_wait(&waiter("echo caught; exit 7"), "ready");
    screen.press("\x03");
    screen.wait_for("caught");
    screen.wait_for("inner> ");
    screen.type_and_wait("echo code=$?.", "code=7.");
    screen.wait_for("inner> ");
    screen.type_and_wait(&waiter("stty size; exit"), "ready");
    screen.resize(33, 101);
    screen.wait_for("33 101");
    screen.wait_for("inner> ");
}

fn jobs_stop_and_go_on(screen: &mut Screen) {
    screen.type_and_wait(READER, "ready");
    screen.press("\x1a");
    screen.wait_for("Stopped");
    screen.wait_for("inner> ");
    // In the background it may not read, and stops by itself again.
    screen.type_and_wait("bg", "inner> ");
    awaited("it stops", || {
        screen.press("jobs\n");
        let listed = screen.wait_for("inner> ");
        listed.contains("Stopped").then_some(())
    });
    screen.press("fg\n");
    screen.type_and_wait("word", "got-word");
    screen.wait_for("inner> ");
}

fn is_there(pid: u32) -> bool {
    let state = state(pid);
    !state.is_empty() && state != "Z"
}

/// The state of a process, as the kernel writes it. Empty: there is none.
fn state(pid: u32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").map(|(_, rest)| rest[..1].to_owned()).unwrap_or_default()
}

#[test]
fn a_command_without_jobs_stops_with_us_and_goes_on() {
    let mut screen = outer("");
    screen.type_and_wait(&format!("$sidetrack run -- {READER}"), "ready");
    screen.press("\x1a");
    screen.wait_for("Stopped");
    screen.wait_for("outer> ");
    screen.type_and_wait("echo pi''d=$(jobs -p).", "pid=");
    let ours: u32 = screen.wait_for(".").parse().unwrap();
    screen.wait_for("outer> ");
    let children = || sidetrack_sys::process::children(ours);
    assert_eq!(state(ours), "T");
    assert!(!children().is_empty() && children().into_iter().all(|pid| state(pid) == "T"));
    screen.press("fg\n");
    screen.type_and_wait("word", "got-word");
    screen.wait_for("outer> ");
    // A command that ignores the key goes on, and so do we.
    screen.type_and_wait(
        "$sidetrack run -- sh -c 'trap \"\" TSTP; echo rea''dy; read word; echo got-$word'",
        "ready",
    );
    screen.press("\x1a");
    screen.type_and_wait("more", "got-");
    screen.wait_for("outer> ");
    // Stopped by another process, with SIGSTOP.
    screen.type_and_wait("$sidetrack run -- sh -c 'kill -STOP $$; echo la''ter'", "Stopped");
    screen.wait_for("outer> ");
    screen.type_and_wait("fg", "later");
    screen.wait_for("outer> ");
    screen.press("exit\n");
    screen.end();
}

#[test]
fn a_signal_that_ends_the_command_ends_us_and_the_terminal_is_as_before() {
    // A shell without job control restores nothing.
    let script = "$sidetrack run -- sh -c 'stty raw -echo; kill -KILL $$'; echo code=$?.; stty -a; read word";
    let mut screen = Screen::start(&["sh", "-c", script], |command| environment(command, ""));
    let before = screen.settings();
    screen.wait_for("code=137.");
    let settings = screen.wait_for("-echoprt");
    assert!(settings.contains(" icanon") && !settings.contains("-icanon"), "{settings}");
    assert_eq!(screen.settings(), before);
    screen.press("\n");
    screen.end();
    // What a command changes on purpose stays.
    let script = "$sidetrack run -- stty -echo; stty -a; read word";
    let mut screen = Screen::start(&["sh", "-c", script], |command| environment(command, ""));
    let settings = screen.wait_for("-echoprt");
    assert!(settings.contains("-echo "), "{settings}");
    screen.press("\n");
    screen.end();
}

#[test]
fn the_terminal_of_a_killed_shell_comes_back() {
    // The inner shell takes the terminal for its own group and dies with it.
    let script = format!("{INNER}; echo code=$?.; read word && echo got-$word");
    let mut screen = Screen::start(&["sh", "-c", &script], |command| environment(command, ""));
    screen.wait_for("inner> ");
    screen.type_and_wait("kill -KILL $$", "code=137.");
    screen.type_and_wait("word", "got-word");
    assert!(screen.end().success());
}

#[test]
fn a_terminal_that_goes_ends_the_shell_of_a_session() {
    // We are the first process of the session, as with a login shell.
    let program =
        [env!("CARGO_BIN_EXE_sidetrack"), "run", "--", "bash", "--norc", "--noprofile", "--noediting", "-i"];
    let mut screen = Screen::start(&program, |command| environment(command, ""));
    screen.wait_for("outer> ");
    screen.type_and_wait("echo pi''d=$$.", "pid=");
    let shell: u32 = screen.wait_for(".").parse().unwrap();
    screen.wait_for("outer> ");
    let ours = screen.pid();
    screen.hang_up();
    eventually("the shell ends", || !is_there(shell));
    eventually("we end", || !is_there(ours));
}

#[test]
fn our_death_is_the_commands() {
    for (signal, number) in [("TERM", 15), ("KILL", 9), ("INT", 2)] {
        let ended = std::process::Command::new("env")
            .args([
                "--default-signal=INT,QUIT",
                env!("CARGO_BIN_EXE_sidetrack"),
                "run",
                "--",
                "sh",
                "-c",
                &format!("kill -{signal} $$"),
            ])
            .status()
            .unwrap();
        assert_eq!(ended.signal(), Some(number), "{ended}");
    }
}
