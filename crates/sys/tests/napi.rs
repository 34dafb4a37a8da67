//! How long frames gather in an interface: set, listed, put back, and gone with what wanted NAPI.

use sidetrack_sys::link;
use sidetrack_sys::napi::{self, Napi};
use sidetrack_sys::redirect::RedirectTargets;
use sidetrack_sys::undo::Action;
use sidetrack_testkit::{Node, is_root};
use std::process::Command;

fn gro(word: &str) {
    let done = Command::new("ethtool").args(["-K", "pair0", "gro", word]).status().expect("ethtool");
    assert!(done.success());
}

#[test]
fn frames_gather_as_long_as_it_says_and_as_before_afterwards() {
    if !is_root() {
        return;
    }
    let host = Node::new();
    host.ip("link add pair0 type veth peer name pair1");
    host.ip("link set pair0 up");
    host.run(|| {
        let index = link::interface("pair0").expect("there").index;
        assert_eq!(napi::of(index).expect("listed"), [], "neither XDP nor GRO");
        gro("on");
        let found = napi::of(index).expect("listed");
        let [before] = found.as_slice() else { panic!("one queue: {found:?}") };
        assert_eq!((before.defer_hard_irqs, before.gro_flush_timeout_ns), (0, 0));
        // The second is longer than 32 bits hold.
        for gro_flush_timeout_ns in [200_000, 5_000_000_000] {
            let wanted = Napi { defer_hard_irqs: 2, gro_flush_timeout_ns, ..*before };
            napi::set(&wanted).expect("set");
            assert_eq!(napi::of(index).expect("listed"), [wanted]);
        }
        let restore = Action::RestoreNapi(*before);
        restore.perform().expect("restored");
        assert_eq!(napi::of(index).expect("listed"), [*before]);
        gro("off");
        restore.perform().expect("gone is fine");
    });
}

#[test]
fn an_end_of_a_veth_sends_redirected_frames_while_the_other_end_has_gro() {
    if !is_root() {
        return;
    }
    let host = Node::new();
    host.ip("link add pair0 type veth peer name pair1");
    host.ip("link set pair0 up");
    host.ip("link set pair1 up");
    host.run(|| {
        let [own, other] = ["pair0", "pair1"].map(|name| link::interface(name).expect("there").index);
        let mut targets = RedirectTargets::open().expect("asked");
        let mut both = || [other, own].map(|index| targets.takes(index).expect("answered"));
        assert_eq!(both(), [false, false]);
        gro("on");
        assert_eq!(both(), [true, false], "pair0 has GRO, so pair1 sends");
        gro("off");
        assert_eq!(both(), [false, false]);
        assert!(targets.takes(u32::MAX >> 1).is_err(), "there is no such interface");
    });
}
