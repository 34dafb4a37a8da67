//! However it ends, everything is as before.

use crate::node::traces::Traces;
use crate::{Attached, Program, echo, group};
use rustix::process::Signal;
use sidetrack_testkit::{Line, eventually, is_root};

#[test]
fn a_kill_a_time_and_the_end_of_the_process_leave_nothing() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let port = echo(&line.server, "10.0.2.1");
    let mut program = Program::start(&line.client);
    let home = group(program.pid());
    let before = line.client.run(Traces::now);
    let pid = program.pid().to_string();
    let attached = Attached::start(&line.client, &[&pid]);
    assert_eq!(program.ask(&format!("open 10.0.2.1 {port}")), "open");
    let ours = group(program.pid());
    attached.signal(Signal::KILL);
    attached.end();
    eventually("it is back in its group", || group(program.pid()) == home);
    line.client.run({
        let before = before.clone();
        move || before.expect_back("after the kill")
    });
    let directory = sidetrack_sys::cgroup::Hierarchy::find().expect("cgroup2").mount.join(ours);
    eventually("the group is gone", || !directory.exists());
    assert_eq!(program.ask(&format!("tcp 10.0.2.1 {port}")), "ping");
    // The time.
    let (code, told) = Attached::start(&line.client, &["--for", "1s", &pid]).end();
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(group(program.pid()), home);
    line.client.run({
        let before = before.clone();
        move || before.expect_back("after the time")
    });
    // The process.
    let attached = Attached::start(&line.client, &[&pid]);
    program.end();
    let (code, told) = attached.end();
    assert_eq!(code, Some(0), "{told}");
    line.client.run(|| assert!(Traces::now().tables().is_empty()));
}
