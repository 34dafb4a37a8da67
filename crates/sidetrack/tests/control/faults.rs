//! Parts that are killed at each of the eight steps: the application is ready everywhere in the end, or nothing of it is
//! left; never a flow without its function.

use crate::node::admin::flows;
use crate::node::is_confined;
use crate::node::peers::Client;
use crate::plane::{Part, Plane};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::Signal;
use serde_json::json;
use sidetrack::control::api::{Progress, Step};
use sidetrack_testkit::{awaited, enter_new_mounts, is_root};
use std::fs::File;
use std::io::Write;

/// No flow that is carried lacks the function that was agreed on, and whether flows are carried is as it should be.
fn flows_are_as(plane: &mut Plane, ready: bool) {
    let client = Client::connect(plane.entry());
    assert_eq!(client.is_ok(), ready, "a flow is carried exactly if the application is ready");
    // One that was refused may still be on its way out.
    for flow in flows(&plane.lab).into_iter().filter(|flow| !flow.0["carrier"].is_null()) {
        assert_eq!(flow.0["chain"], json!(["count"]), "{flow:?}");
    }
}

/// Kills a part after each number of steps, starts it again, and looks at what is left.
fn killed_at_each_step(part: fn(&mut Plane) -> &mut Part) {
    let mut plane = Plane::start("[[grant]]\n");
    for step in 0..=Step::ALL.len() {
        let name = format!("trial-{step}");
        let lines = plane.submit(&name, step, |plane| part(plane).kill());
        part(&mut plane).restart();
        let ready = plane.settled();
        let told_ready = matches!(lines.last(), Some(Progress::Done { step: Step::Ready, .. }));
        assert!(ready || !told_ready, "it was told to be ready: {lines:?}");
        flows_are_as(&mut plane, ready);
        if ready {
            plane.end(&name);
            assert!(!plane.settled());
        }
        flows_are_as(&mut plane, false);
    }
}

#[test]
fn every_part_is_confined() {
    let plane = Plane::start("[[grant]]\n");
    for pid in [plane.orchestrator.pid(), plane.hospital.pid(), plane.centre.pid()] {
        assert!(
            is_confined(pid),
            "{}",
            std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs")
        );
    }
}

#[test]
fn the_orchestrator() {
    killed_at_each_step(|plane| &mut plane.orchestrator);
}

#[test]
fn the_agent_of_the_data() {
    killed_at_each_step(|plane| &mut plane.hospital);
}

#[test]
fn the_agent_of_the_client() {
    killed_at_each_step(|plane| &mut plane.centre);
}

#[test]
fn a_proxy_that_is_gone_is_said_and_nothing_is_left_elsewhere() {
    let mut plane = Plane::start("[[grant]]\n");
    plane.ward.signal(Signal::KILL);
    plane.ward.gone();
    let lines = plane.submit("trial-1", 0, |_| {});
    let Some(Progress::Failed { domain, error, .. }) = lines.last() else { panic!("{lines:?}") };
    assert_eq!(domain.as_deref(), Some("hospital"));
    assert!(error.contains("no sidetrack runs at"), "{error}");
    sidetrack_testkit::eventually("the other domain holds nothing", || {
        plane.held(1).is_some_and(|held| held.is_empty())
    });
    assert!(Client::connect(plane.entry()).is_err());
}

/// The orchestrator's state and those of both agents on a file system that is full: what was there goes on, changes are refused
/// with the reason, and everything works again as soon as there is room.
#[test]
fn a_full_disk() {
    if !is_root() {
        return;
    }
    enter_new_mounts();
    let disk = std::env::temp_dir();
    mount("none", &disk, "tmpfs", MountFlags::empty(), Some(c"size=64m,mode=1777")).expect("a file system");
    let mut plane = Plane::start("[[grant]]\n");
    plane.submit("before", 0, |_| {});
    assert!(plane.settled());
    let filler = disk.join("filler");
    let mut file = File::create(&filler).expect("a file");
    for size in [1 << 16, 1 << 12, 1] {
        let piece = vec![b'x'; size];
        while file.write_all(&piece).is_ok() {}
    }
    drop(file);
    // Pages of the file that are free take the first changes.
    let refused = awaited("a change is refused", || {
        let lines = plane.submit("meanwhile", 0, |_| {});
        println!("{lines:?}");
        match lines.last() {
            Some(Progress::Failed { error, .. }) => Some(error.clone()),
            _ => {
                plane.end("meanwhile");
                None
            }
        }
    });
    assert!(refused.contains("No space left on device"), "{refused}");
    flows_are_as(&mut plane, true);
    std::fs::remove_file(filler).expect("removed");
    plane.end("before");
    plane.submit("after", 0, |_| {});
    assert!(plane.settled());
    flows_are_as(&mut plane, true);
    for part in [&mut plane.orchestrator, &mut plane.hospital, &mut plane.centre] {
        part.kill();
        part.restart();
    }
    assert!(plane.settled());
    let names: Vec<_> =
        plane.applications().into_iter().flatten().map(|status| status.application.name).collect();
    assert_eq!(names, ["after"]);
    drop(plane);
    unmount(&disk, UnmountFlags::DETACH).expect("unmounted");
}
