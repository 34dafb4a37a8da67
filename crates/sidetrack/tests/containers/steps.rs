//! A function in a container that is killed at each of the eight steps of an application: the application is ready in the end, or
//! says why not; never a flow past the function, and nothing is left.

use crate::engine::{Engine, engine};
use crate::node::admin::show;
use crate::node::send;
use crate::node::traces::Traces;
use crate::passing::children;
use crate::plane::Plane;
use crate::scene::{ask, own};
use rustix::process::Signal;
use sidetrack::control::api::{Progress, Step};
use sidetrack_testkit::{LIMIT, eventually, in_namespace};
use std::net::{SocketAddr, TcpStream};

/// What tells the function of one trial from all others, in its environment.
fn mark(trial: usize) -> String {
    format!("STEPS_TRIAL=of-{}-{trial}-", std::process::id())
}

/// The function that is agreed on as a container; another definition for each trial, so that each begins without falls.
pub(crate) fn function(engine: &Engine, trial: usize) -> String {
    let (name, value) = mark(trial).split_once('=').map(|(a, b)| (a.to_owned(), b.to_owned())).expect("both");
    let keys = format!("environment = {{ {name} = '{value}' }}\npids = 512");
    format!("[containers]\nengine = '{}'\n{}", engine.socket().display(), own("count", &keys))
}

/// Kills the program of a trial's container; whether there was one.
fn kill(trial: usize) -> bool {
    let mark = mark(trial);
    let is_its = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").expect("proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let its: Vec<u32> = pids.filter(is_its).collect();
    its.iter().for_each(|pid| send(*pid, Signal::KILL));
    !its.is_empty()
}

/// Whether a flow gets through; the answer shows that the function has seen it.
pub(crate) fn is_carried(entry: SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect(entry) else { return false };
    stream.set_read_timeout(Some(LIMIT)).expect("a socket");
    // The server greets, then says what it heard, which is not what the client said.
    let Ok(_greeting) = ask(&mut stream, "!upper word\n") else { return false };
    let Ok(answer) = ask(&mut stream, "") else { return false };
    assert_eq!(answer, "!UPPER WORD\n", "past the function");
    true
}

/// Containers of the client's proxy.
fn containers(plane: &Plane) -> Vec<String> {
    engine().containers(&format!("-{}-", children(&plane.lab)))
}

#[test]
fn a_function_killed_at_each_step_is_passed_by_no_flow() {
    in_namespace(|| {
        // It is started by the first test that needs it, and its processes are none of ours.
        engine();
        let before = Traces::now();
        let mut plane = Plane::with("[[grant]]\n", &function(engine(), 0));
        let entry = plane.entry();
        for trial in 0..=Step::ALL.len() {
            if trial > 0 {
                plane.replace_functions(&function(engine(), trial));
            }
            assert!(!is_carried(entry), "no application is there");
            let name = format!("trial-{trial}");
            let lines = plane.submit(&name, trial, |_| assert!(kill(trial), "its container ran"));
            // Before it is shipped it is well again; after that flows wait for it, and the application stands.
            assert!(matches!(lines.last(), Some(Progress::Done { step: Step::Ready, .. })), "{lines:?}");
            assert!(plane.settled());
            eventually("flows pass the next container", || is_carried(entry));
            plane.end(&name);
            assert!(!plane.settled() && !is_carried(entry));
        }
        eventually("the killed and the replaced ones are gone", || containers(&plane).len() == 1);
        let process = children(&plane.lab);
        for node in [&plane.lab, &plane.ward] {
            node.signal(Signal::TERM);
        }
        assert!(plane.lab.gone().0.success() && plane.ward.gone().0.success());
        assert!(engine().containers(&format!("-{process}-")).is_empty());
        drop(plane);
        before.expect_back("no table, no route, no process");
    });
}

#[test]
fn a_function_that_stays_down_fails_its_shipment_and_says_why() {
    in_namespace(|| {
        let alone = Engine::alone();
        let mut plane = Plane::with("[[grant]]\n", &function(&alone, Step::ALL.len() + 1));
        // Its container goes with its image, and no other one can be started.
        let removed = alone.podman(&["rmi", "--force", "localhost/function:1"]);
        assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
        eventually("it is seen to be down", || show(&plane.lab, "/v1/functions").contains("\"well\":0"));
        let lines = plane.submit("trial-1", 0, |_| {});
        let Some(Progress::Failed { step, domain, error }) = lines.last() else { panic!("{lines:?}") };
        assert_eq!((*step, domain.as_deref()), (Step::Ship, Some("centre")), "{error}");
        assert!(error.starts_with("the function 'count' of 'centre' is down: "), "{error}");
        assert!(!plane.settled() && !is_carried(plane.entry()));
        // It may be tried again when the function is well.
        plane.replace_functions("[function.count]\nkind = \"count\"\n");
        let lines = plane.submit("trial-1", 0, |_| {});
        assert!(matches!(lines.last(), Some(Progress::Done { step: Step::Ready, .. })), "{lines:?}");
    });
}
