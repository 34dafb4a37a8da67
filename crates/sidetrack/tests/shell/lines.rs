//! Our own lines beside the command's: they do not come into the middle of a program that draws.

use crate::environment;
use sidetrack_testkit::screen::Screen;

/// Connects to an address that no rule allows, and says so.
const REFUSED: &str = "curl -s http://192.0.2.77/ || echo refu''sed";

fn on_screen(script: &str, arrange: &str) -> Screen {
    let script = format!("$sidetrack run --jail {arrange} -- sh -c \"{script}\"");
    Screen::start(&["sh", "-c", &script], |command| environment(command, ""))
}

#[test]
fn lines_wait_while_a_program_draws() {
    let script = format!(
        "stty raw -echo; {REFUSED}; sleep 1; echo drawn; read key; stty cooked; echo over; read word"
    );
    let mut screen = on_screen(&script, "");
    let drawn = screen.wait_for("drawn");
    assert!(drawn.contains("refused") && !drawn.contains("sidetrack:"), "{drawn}");
    screen.press("\n");
    assert!(!screen.wait_for("over").contains("sidetrack:"));
    screen.wait_for("sidetrack: curl: 192.0.2.77:80: denied by policy");
    screen.press("\n");
    screen.end();
    // Without an end of drawing, they come with the end of the command.
    let mut screen = on_screen(&format!("stty raw -echo; {REFUSED}; echo drawn"), "");
    screen.wait_for("drawn");
    screen.wait_for("sidetrack: curl: 192.0.2.77:80: denied by policy");
    screen.end();
}

#[test]
fn lines_go_to_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.log");
    let mut screen = on_screen(REFUSED, &format!("--log {}", file.display()));
    screen.wait_for("refused");
    screen.end();
    let lines = std::fs::read_to_string(&file).unwrap();
    assert!(lines.starts_with("sidetrack: curl: 192.0.2.77:80: denied by policy"), "{lines}");
}

#[test]
fn lines_come_to_the_prompt_of_a_shell() {
    // The shell reads keys at its prompt, as an editor does. It has taken the terminal for itself.
    let script = "PS1='inside> ' exec $sidetrack run --jail -- bash --norc --noprofile -i";
    let mut screen = Screen::start(&["sh", "-c", script], |command| environment(command, ""));
    screen.wait_for("inside> ");
    screen.press("(curl -s http://192.0.2.77/ &)\n");
    screen.wait_for("sidetrack: curl: 192.0.2.77:80: denied by policy");
    screen.press("exit\n");
    assert!(screen.end().success());
}
