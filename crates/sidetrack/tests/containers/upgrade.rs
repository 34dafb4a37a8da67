//! An upgrade: the new process has its own containers before it serves, and flows in the old ones drain.

use crate::engine::engine;
use crate::node::upgrading::{Upgrade, ends, stop};
use crate::passing::children_of;
use crate::scene::{Echo, ask, connect, own as own_function, up};
use sidetrack_testkit::{eventually, in_namespace};
use std::net::Shutdown;

const LED: &str = "chain = ['f']\non_function_down = 'deny'\n";

/// Containers that this process has started.
fn of(process: u32) -> Vec<String> {
    engine().containers(&format!("-{process}-"))
}

#[test]
fn the_new_process_has_containers_of_its_own_and_old_flows_drain() {
    in_namespace(|| {
        let server = Echo::start();
        let up = up(server.address, LED, &(own_function("f", "") + "[limits]\ndrain_ms = 3600000\n"));
        let mut before = connect(&up);
        assert_eq!(ask(&mut before, "before\n").expect("an answer"), "before\n");
        let old = children_of(up.pid());
        assert_eq!(of(old).len(), 1);
        // It is taken back once: the containers of the other process go with it.
        let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", "1ms"]);
        let back = upgrade.started();
        assert!(!upgrade.ended().0);
        ends(&back);
        assert_eq!(ask(&mut before, "still\n").expect("an answer"), "still\n");
        let mut upgrade = Upgrade::start(&up.folder(), &[]);
        let new = upgrade.started();
        upgrade.until("at most 3600000 ms after the change: flows in containers");
        upgrade.until("1 flows drain in the old process");
        let own = children_of(new.0);
        assert_eq!((of(old).len(), of(own).len()), (1, 1), "each has one");
        let mut after = connect(&up);
        assert_eq!(ask(&mut after, "after\n").expect("an answer"), "after\n");
        assert_eq!(ask(&mut before, "last\n").expect("an answer"), "last\n", "it goes on where it is");
        before.shutdown(Shutdown::Write).expect("an end");
        assert!(upgrade.ended().0);
        eventually("the old containers are gone", || of(old).is_empty());
        assert_eq!(of(own).len(), 1);
        drop(after);
        let records = stop(up, &new);
        assert!(of(own).is_empty(), "nothing is left");
        assert!(records.iter().any(|record| record.text("reason") == "ok"), "{records:?}");
    });
}
