//! A new process that stops at a step and says nothing: the old one takes everything back when the step's time is over.

use crate::killed::{FILE, VARIABLE};
use crate::load::Load;
use crate::node::Up;
use crate::node::peers::Server;
use crate::replaced::{TOP, tables};
use crate::{Upgrade, ends, runs};
use sidetrack::app::{Act, Phase, Side, Step};
use sidetrack_core::upgrade::Kind;

/// `said`: what the command says.
fn hangs(act: Act, said: &str) {
    if !cfg!(debug_assertions) {
        return println!("skipped: a release build does not stop at steps");
    }
    let step = Step(Side::New, act);
    let server = Server::start("127.0.0.1");
    let up = Up::start_with_path(VARIABLE, FILE, TOP, &tables(server.address));
    // Connections of a process that serves and is ended are cut; none is refused.
    let serves = matches!(act, Act::Sends(Kind::Settled));
    let load = Load::start(up.addresses("reverse")[0], 2, serves);
    load.goes_on();
    std::fs::write(up.folder().join(FILE), step.to_string()).expect("written");
    let mut upgrade = Upgrade::start(&up.folder(), &[]);
    let new = upgrade.started();
    let (success, all) = upgrade.ended();
    assert!(!success && all.contains("has not said") && all.contains(said), "{all}");
    ends(&new);
    load.goes_on();
    assert!(runs(up.pid()));
    load.finish();
    assert!(up.stop().0.success());
}

#[test]
fn before_it_has_read_the_configuration() {
    hangs(Act::Sends(Kind::Checked), "nothing has moved");
}

#[test]
fn before_it_serves() {
    hangs(Act::Did(Phase::Steered), "this process has taken everything back");
}

#[test]
fn before_it_has_everything() {
    hangs(Act::Sends(Kind::Settled), "this process has taken everything back");
}
