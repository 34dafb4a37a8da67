//! SIGKILL at any point: nothing is left, or traffic stays blocked until a successor takes over.

use crate::node::peers::{Client, Server, visit};
use crate::node::traces::Traces;
use crate::node::{Dice, Up, send};
use rustix::process::Signal;
use sidetrack_testkit::{eventually, in_namespace};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Rounds of killing; each takes some hundredths of a second.
const ROUNDS: u32 = 36;

/// Everything that `up` can do to a host at once, with flows of its own and of the kernel's.
fn tables(server: SocketAddr, marker: u32) -> String {
    format!(
        "[[listen]]\nname = \"out\"\nkind = \"redirect\"\ndst = \"127.0.0.1\"\nports = {port}\n\
         [[listen]]\nname = \"router\"\nkind = \"tproxy\"\nports = [{port}, {other}]\n\
         [[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[rule]]\nname = \"ours\"\nmatch = {{ listener = \"out\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n\
         [[rule]]\nname = \"others\"\ncarrier = \"direct\"\n",
        port = server.port(),
        other = 10_000 + marker,
    )
}

/// Which processes are killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Main,
    Keeper,
    Guard,
    MainAndKeeper,
    MainAndGuard,
}

const VICTIMS: [Victim; 5] =
    [Victim::Main, Victim::Keeper, Victim::Guard, Victim::MainAndKeeper, Victim::MainAndGuard];

fn kill(up: &Up, victim: Victim) {
    let main = up.pid();
    // At the start they may not be there yet.
    let child = |pid: u32| sidetrack_sys::process::children(pid).first().copied();
    let keeper = child(main);
    let guard = keeper.and_then(child);
    let (keeper, guard) = (keeper.unwrap_or(main), guard.or(keeper).unwrap_or(main));
    let pids = match victim {
        Victim::Main => vec![main],
        Victim::Keeper => vec![keeper],
        Victim::Guard => vec![guard],
        Victim::MainAndKeeper => vec![main, keeper],
        Victim::MainAndGuard => vec![guard, main],
    };
    pids.into_iter().for_each(|pid| send(pid, Signal::KILL));
}

/// When in its life.
#[derive(Clone, Copy, Debug)]
enum Moment {
    Start,
    Steady,
    Reload,
    Stop,
}

const MOMENTS: [Moment; 4] = [Moment::Start, Moment::Steady, Moment::Reload, Moment::Stop];

/// Lets up to `delay` pass in which the processes get on with what they do.
fn spin(delay: Duration) {
    let end = Instant::now() + delay;
    while Instant::now() < end {
        std::thread::yield_now();
    }
}

fn round(server: SocketAddr, moment: Moment, victim: Victim, delay: Duration, marker: u32) {
    let top = "default = \"deny\"\n";
    let mut up = match moment {
        Moment::Start => Up::spawn(top, &tables(server, marker)),
        _ => Up::start(top, &tables(server, marker)),
    };
    match moment {
        Moment::Start => {}
        Moment::Steady => drop(visit(server, b"word")),
        Moment::Reload => {
            up.rewrite(top, &tables(server, marker + 1));
            up.signal(Signal::HUP);
        }
        Moment::Stop => up.signal(Signal::TERM),
    }
    spin(delay);
    kill(&up, victim);
    if matches!(victim, Victim::Guard) {
        // No process notices a guard that is gone; the end is an orderly one.
        up.signal(Signal::TERM);
    }
    up.gone();
}

#[test]
fn nothing_is_left_wherever_they_are_killed() {
    in_namespace(|| {
        let before = Traces::now();
        let server = Server::start("127.0.0.1");
        let mut dice = Dice(1);
        for number in 0..ROUNDS {
            let moment = MOMENTS[number as usize % MOMENTS.len()];
            let victim = VICTIMS[dice.below(VICTIMS.len())];
            let delay = Duration::from_micros(dice.roll() % 60_000);
            round(server.address, moment, victim, delay, number * 2);
            before.expect_back(&format!("round {number}: {victim:?} killed {delay:?} into {moment:?}"));
        }
        let (client, seen, _) = visit(server.address, b"word");
        assert_eq!(client, seen, "nothing stands in the way");
    });
}

#[test]
fn a_successor_that_starts_at_once_steers() {
    in_namespace(|| {
        let before = Traces::now();
        let server = Server::start("127.0.0.1");
        let top = "default = \"deny\"\n";
        let mut first = Up::start(top, &tables(server.address, 0));
        for number in 1..6 {
            first.signal(Signal::KILL);
            // Its keeper and guard are still taking things back.
            let mut second = Up::start(top, &tables(server.address, number));
            first.gone();
            let (client, seen, _) = visit(server.address, b"word");
            assert_ne!(client, seen);
            assert_eq!(second.record().fate(), ("ours", "direct", "ok"));
            let ours = sidetrack_sys::route::ours().expect("routes");
            assert_eq!((ours.rules.len(), ours.local_defaults.len()), (2, 2), "what it needs is there");
            first = second;
        }
        assert!(first.stop().0.success());
        before.expect_back("after the end");
    });
}

#[test]
fn closed_blocks_after_a_crash_until_a_successor_ends_in_order() {
    in_namespace(|| {
        let before = Traces::now();
        let server = Server::start("127.0.0.1");
        let address = server.address;
        let top = "default = \"deny\"\non_crash = \"closed\"\n";
        for victim in [Victim::Main, Victim::MainAndKeeper] {
            let mut up = Up::start(top, &tables(address, 0));
            assert_ne!(visit(address, b"word").0, visit(address, b"word").1);
            kill(&up, victim);
            up.gone();
            Traces::await_orphans();
            assert_eq!(Traces::now().tables().len(), 1, "{victim:?}: the table stays");
            assert!(Client::connect(address).is_err(), "{victim:?}: nothing gets out");
        }
        let up = Up::start(top, &tables(address, 0));
        let (client, seen, _) = visit(address, b"word");
        assert_ne!(client, seen, "the successor steers");
        assert!(up.stop().0.success());
        before.expect_back("after the end");
        let (client, seen, _) = visit(address, b"word");
        assert_eq!(client, seen, "nothing stands in the way");
    });
}

#[test]
fn a_configuration_that_steers_nothing_removes_the_block() {
    in_namespace(|| {
        let before = Traces::now();
        let server = Server::start("127.0.0.1");
        let mut up = Up::start("default = \"deny\"\non_crash = \"closed\"\n", &tables(server.address, 0));
        kill(&up, Victim::MainAndKeeper);
        up.gone();
        Traces::await_orphans();
        assert!(Client::connect(server.address).is_err());
        let socks = "[[listen]]\nname = \"in\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n";
        let up = Up::start("default = \"direct\"\n", socks);
        let (client, seen, _) = visit(server.address, b"word");
        assert_eq!(client, seen);
        assert!(up.stop().0.success());
        before.expect_back("after the end");
    });
}

/// A port that stands for the server, led there by the kernel alone.
fn kernel_port(port: SocketAddr, server: SocketAddr) -> String {
    format!(
        "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"{port}\"\nto = \"{server}\"\n\
         [[listen]]\nname = \"out\"\nkind = \"redirect\"\ndst = \"{}\"\nports = {}\n\
         [[rule]]\nname = \"ours\"\nmatch = {{ listener = \"out\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n\
         [[rule]]\nname = \"kernel\"\ncarrier = \"direct\"\n",
        server.ip(),
        server.port()
    )
}

#[test]
fn closed_blocks_what_passes_through_us_and_leaves_the_kernel_its_paths() {
    in_namespace(|| {
        let before = Traces::now();
        let server = Server::start("127.0.0.1");
        let port: SocketAddr = "127.0.0.2:4000".parse().expect("an address");
        let mut up =
            Up::start("default = \"deny\"\non_crash = \"closed\"\n", &kernel_port(port, server.address));
        visit(port, b"word");
        assert_eq!(up.record().fate(), ("kernel", "kernel", "kernel_closed"));
        kill(&up, Victim::MainAndKeeper);
        up.gone();
        assert!(Client::connect(server.address).is_err(), "what passed through us");
        // Its rule let the kernel carry it without us, which it still can.
        visit(port, b"word");
        let up = Up::start("default = \"deny\"\n", &kernel_port(port, server.address));
        visit(port, b"word");
        assert!(up.stop().0.success());
        before.expect_back("after the end");
    });
}

#[test]
fn another_answer_to_a_crash_is_in_force_after_a_reload() {
    in_namespace(|| {
        let before = Traces::now();
        let server = Server::start("127.0.0.1");
        let address = server.address;
        let [open, closed] =
            ["open", "closed"].map(|word| format!("default = \"deny\"\non_crash = \"{word}\"\n"));
        for (first, then) in [(&closed, &closed), (&closed, &open)] {
            let mut up = Up::start(first, &tables(address, 0));
            up.reload(then, &tables(address, 1));
            let (client, seen, _) = visit(address, b"word");
            assert_ne!(client, seen, "it steers as before");
            kill(&up, Victim::MainAndKeeper);
            up.gone();
            let passes = || Client::connect(address).is_ok();
            if then == &closed {
                assert!(!passes(), "after {then}");
            } else {
                eventually("the rules are gone", passes);
            }
        }
        assert!(Up::start(&open, &tables(address, 0)).stop().0.success());
        before.expect_back("after the end");
    });
}
