//! `coalesce_us`: frames gather in the interfaces while the engine is there, and as before once it is gone.

use crate::node::peers::visit;
use crate::site::{ENGINE, Site, WAYS, engine_by};
use crate::tools::tool;
use rustix::process::Signal;
use sidetrack_sys::link;
use sidetrack_sys::napi::{self, Napi};
use sidetrack_testkit::{eventually, is_root};

const INTERFACES: [&str; 2] = ["to-client", "to-server"];

/// How frames gather in the engine's interfaces: how often deferred, nanoseconds.
fn gather(site: &Site) -> Vec<(u32, u64)> {
    site.line.router.run(|| {
        let of = |name| napi::of(link::interface(name).expect("there").index).expect("listed");
        let found = INTERFACES.into_iter().flat_map(of);
        found.map(|napi| (napi.defer_hard_irqs, napi.gro_flush_timeout_ns)).collect()
    })
}

fn coalescing(io: &str, lines: &str) -> String {
    let io_is = format!("io = \"{io}\"");
    engine_by(io, lines).replace(&io_is, &format!("{io_is}, coalesce_us = 200"))
}

/// A site whose engine gathers, with a flow that has passed it, and what was before.
fn gathering(io: &str, before: (u32, u64)) -> Site {
    let mut site = Site::new();
    site.line.router.run(move || {
        for name in INTERFACES {
            tool("ethtool", &format!("-K {name} gro on"));
            for napi in napi::of(link::interface(name).expect("there").index).expect("listed") {
                napi::set(&Napi { defer_hard_irqs: before.0, gro_flush_timeout_ns: before.1, ..napi })
                    .expect("set");
            }
        }
    });
    assert_eq!(gather(&site), [before; 2]);
    let server = site.server("10.0.2.1");
    site.start("", &coalescing(io, &format!("to = \"{}\"", server.address)));
    site.line.client.run(|| visit(ENGINE.parse().expect("an address"), b"a word"));
    assert_eq!(site.record().fate().2, "ok");
    site
}

#[test]
fn frames_gather_while_the_engine_is_there_and_as_before_after_it() {
    if !is_root() {
        return;
    }
    for (io, end) in WAYS.into_iter().flat_map(|io| [Signal::TERM, Signal::KILL].map(|end| (io, end))) {
        let before = (0, 7_000);
        let mut site = gathering(io, before);
        assert_eq!(gather(&site), [(1, 200_000); 2], "{io}");
        let mut up = site.up.take().expect("started");
        up.signal(end);
        up.gone();
        eventually("as before", || gather(&site) == [before; 2]);
    }
}

#[test]
fn what_gathers_longer_already_stays_as_it_is() {
    if is_root() {
        let before = (3, 1_000_000);
        assert_eq!(gather(&gathering("xdp", before)), [before; 2]);
    }
}

#[test]
fn an_interface_that_cannot_gather_is_served_all_the_same() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &coalescing("packet", &format!("to = \"{}\"", server.address)));
    assert_eq!(gather(&site), [], "veth without XDP and GRO");
    site.line.client.run(|| visit(ENGINE.parse().expect("an address"), b"a word"));
    let log = site.up.as_mut().expect("started").log_so_far();
    assert!(log.contains("frames do not gather") && log.contains("to-client has no NAPI"), "{log}");
}
