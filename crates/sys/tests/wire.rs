//! Flows on the wire: a relay in user space hands its connection to the kernel while bytes go both ways.

use sidetrack_core::time::Instant;
use sidetrack_core::wire::{self, End, Joining, Look, NOTE_BYTES, Side, Step};
use sidetrack_sys::bpf::{Adopted, Pins, WireEnd, WireId, WireMemory, WireOn, monotonic_ns};
use sidetrack_sys::repair::Gone;
use sidetrack_sys::{repair, route};
use sidetrack_testkit::streams::both_ways;
use sidetrack_testkit::{LIMIT, Line, eventually, is_root};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

struct Relay {
    /// Client, server.
    sockets: [TcpStream; 2],
    copied: [u64; 2],
    held: [Vec<u8>; 2],
}

impl Relay {
    fn new(client: TcpStream, server: TcpStream) -> Self {
        let sockets = [client, server];
        for socket in &sockets {
            socket.set_nonblocking(true).expect("set");
        }
        Self { sockets, copied: [0; 2], held: [Vec::new(), Vec::new()] }
    }

    /// Copies what is there, in both directions; true if anything moved.
    fn step(&mut self) -> bool {
        let mut moved = false;
        for from in [0, 1] {
            if self.held[from].is_empty() {
                let mut buffer = [0; 65_536];
                match (&self.sockets[from]).read(&mut buffer) {
                    Ok(length) => self.held[from].extend_from_slice(&buffer[..length]),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                }
            }
            if !self.held[from].is_empty() {
                match (&self.sockets[from ^ 1]).write(&self.held[from]) {
                    Ok(length) => {
                        moved = true;
                        self.copied[from] += length as u64;
                        self.held[from].drain(..length);
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                }
            }
        }
        moved
    }

    fn end(&self, at: usize) -> End {
        let socket = &self.sockets[at];
        let (remote, local) = (socket.peer_addr().expect("a peer"), socket.local_addr().expect("an address"));
        let mut numbers = repair::numbers(socket).expect("numbers");
        // What was read and is not written yet comes before what is read next.
        numbers.unread += u32::try_from(self.held[at].len()).expect("little");
        End {
            remote,
            local,
            egress: route::way(local.ip(), remote.ip()).expect("a route"),
            agreed: repair::agreed(socket).expect("TCP_INFO"),
            numbers,
        }
    }

    fn look(&self, acknowledged: [u32; 2]) -> Look {
        let of = |count: fn(&TcpStream) -> std::io::Result<u32>| {
            [0, 1].map(|at| count(&self.sockets[at]).expect("a count"))
        };
        Look {
            unread: of(|socket| repair::unread(socket)),
            held: [0, 1].map(|at| self.held[at].len()),
            unsent: of(|socket| repair::unsent(socket)),
            acknowledged,
            is_over: false,
        }
    }

    /// Hands the connection to the kernel; returns its number, its sides, and what was copied
    /// before.
    fn hand_over(mut self, memory: &WireMemory) -> (WireId, [Side; 2], [u64; 2]) {
        for socket in &self.sockets {
            repair::clamp_window(socket, 1).expect("clamped");
        }
        let now = || Instant::from_nanos(monotonic_ns());
        let mut joining = Joining::new(now(), LIMIT);
        let mut joined: Option<(WireId, [Side; 2])> = None;
        let (mut written, mut copied) = ([0_u32; 2], [0; 2]);
        loop {
            let seen = joined.map(|(id, _)| memory.look(id).map(|side| side.standing.acknowledged));
            let look = self.look(seen.unwrap_or_default());
            match joining.next(now(), &look) {
                Step::Copy => {
                    let before = self.copied;
                    self.step();
                    if joined.is_some() {
                        for side in [0, 1] {
                            written[side ^ 1] =
                                written[side ^ 1].wrapping_add((self.copied[side] - before[side]) as u32);
                            repair::acknowledge(&self.sockets[side]).expect("acknowledged");
                        }
                    }
                }
                Step::Join => {
                    copied = self.copied;
                    let sides = wire::sides(&[self.end(0), self.end(1)]).expect("fit");
                    written = sides.map(|side| side.written);
                    joined = Some((memory.join(&sides).expect("joined").expect("room"), sides));
                    joining.joined(now());
                }
                Step::Read => {
                    let (id, _) = joined.expect("joined");
                    for side in [0, 1] {
                        let expects = repair::expects(&self.sockets[side]).expect("a number");
                        memory.expects(id, side, expects);
                    }
                    joining.owing(written);
                }
                Step::Again => {
                    let _ = memory.unsettled(joined.expect("joined").0);
                }
                Step::Settled(side) => memory.settled(joined.expect("joined").0, side),
                Step::Wire => drop(memory.wired(joined.expect("joined").0)),
                Step::Wait(until) => std::thread::sleep(until - now()),
                Step::Forget => break,
                Step::GiveUp => panic!("never quiet"),
            }
        }
        for socket in self.sockets {
            repair::forget(socket).expect("closed");
        }
        let (id, sides) = joined.expect("joined");
        (id, sides, copied)
    }
}

struct Scene {
    line: Line,
    client: Option<TcpStream>,
    server: Option<TcpStream>,
    relay: Option<Relay>,
}

fn scene(v6: bool) -> Scene {
    let line = Line::new();
    let (server_at, relay_at) =
        if v6 { ("[fd00:2::1]:0", "[fd00:1::fe]:0") } else { ("10.0.2.1:0", "10.0.1.254:0") };
    let listener = line.server.run(move || TcpListener::bind(server_at).expect("bound"));
    let entry = line.router.run(move || TcpListener::bind(relay_at).expect("bound"));
    let (to_server, to_relay): (SocketAddr, SocketAddr) =
        (listener.local_addr().expect("bound"), entry.local_addr().expect("bound"));
    let client = line.client.run(move || TcpStream::connect(to_relay).expect("connected"));
    let relay = line.router.run(move || {
        let server = TcpStream::connect(to_server).expect("connected");
        Relay::new(entry.accept().expect("accepted").0, server)
    });
    let server = line.server.run(move || listener.accept().expect("accepted").0);
    Scene { line, client: Some(client), server: Some(server), relay: Some(relay) }
}

fn attached(memory: &WireMemory) -> [WireOn; 2] {
    ["to-client", "to-server"]
        .map(|name| memory.attach(route::interface_index(name).expect("there")).expect("attached"))
}

/// Both ends talk; the relay hands over after `after` bytes of the client, and the kernel carries `more` bytes.
fn talk(v6: bool, after: u64, more: u64, pause: Option<Duration>) {
    let mut scene = scene(v6);
    let (client, server) = (scene.client.take().expect("there"), scene.server.take().expect("there"));
    let mut relay = scene.relay.take().expect("there");
    let enough = Arc::new(AtomicBool::new(false));
    let (of_client, of_server, told) = (enough.clone(), enough.clone(), enough);
    let client = std::thread::spawn(move || both_ways(client, [1, 2], &of_client, pause));
    let server = std::thread::spawn(move || both_ways(server, [2, 1], &of_server, pause));
    let counts = scene.line.router.run(move || {
        let memory = WireMemory::new(8).expect("maps");
        let _on = attached(&memory);
        while relay.copied[0] < after {
            if !relay.step() {
                std::thread::yield_now();
            }
        }
        let (id, sides, copied) = relay.hand_over(&memory);
        let carried = |memory: &WireMemory| {
            let seen = memory.look(id);
            [0, 1].map(|side| u64::from(seen[side].standing.sent.wrapping_sub(sides[side].next)))
        };
        eventually("the kernel carries more", || carried(&memory).iter().all(|bytes| *bytes > more));
        told.store(true, Relaxed);
        eventually("the flow ends", || memory.ended(id).is_some());
        let seen = memory.look(id);
        assert_eq!(memory.ended(id), Some(WireEnd::Finished));
        assert!(seen.iter().all(|side| side.dropped == 0), "{seen:?}");
        let carried = carried(&memory);
        memory.remove(id).expect("removed");
        [0, 1].map(|side| copied[side] + carried[side] - 1)
    });
    let [sent, received] = client.join().expect("the client");
    assert_eq!(server.join().expect("the server"), [received, sent]);
    assert_eq!(counts, [sent, received], "every byte is counted once");
}

#[test]
fn a_busy_flow_is_handed_over_without_a_wrong_byte() {
    if is_root() {
        talk(false, 2_000_000, 20_000_000, None);
    }
}

#[test]
fn a_slow_flow_too_by_ipv6() {
    if is_root() {
        talk(true, 100_000, 400_000, Some(Duration::from_millis(2)));
    }
}

/// A flow that is on the wire and idle. Both ends have read what the other sent.
struct Wired {
    line: Line,
    client: TcpStream,
    server: TcpStream,
    memory: WireMemory,
    on: [WireOn; 2],
    id: WireId,
    sides: [Side; 2],
}

fn wired(v6: bool) -> Wired {
    let mut scene = scene(v6);
    let (mut client, mut server) = (scene.client.take().expect("there"), scene.server.take().expect("there"));
    let mut relay = scene.relay.take().expect("there");
    client.write_all(b"by the relay").expect("sent");
    let (memory, on, id, sides) = scene.line.router.run(move || {
        let memory = WireMemory::new(8).expect("maps");
        let on = attached(&memory);
        while relay.copied[0] < 12 {
            relay.step();
        }
        let (id, sides, copied) = relay.hand_over(&memory);
        assert_eq!(copied, [12, 0]);
        (memory, on, id, sides)
    });
    let mut bytes = [0; 24];
    client.write_all(b"by the wire.").expect("sent");
    server.read_exact(&mut bytes).expect("received");
    assert_eq!(&bytes, b"by the relayby the wire.");
    server.write_all(b"and back").expect("sent");
    client.read_exact(&mut bytes[..8]).expect("received");
    assert_eq!(memory.ended(id), None);
    Wired { line: scene.line, client, server, memory, on, id, sides }
}

#[test]
fn a_reset_reaches_the_other_side_and_ends_the_flow() {
    if !is_root() {
        return;
    }
    let Wired { client, mut server, memory, id, on: _on, line: _line, .. } = wired(false);
    sidetrack_sys::sockopt::reset_on_close(&client).expect("set");
    drop(client);
    let error = server.read(&mut [0]).expect_err("reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    eventually("the program has seen it", || memory.ended(id) == Some(WireEnd::ClientReset));
}

#[test]
fn a_killed_flow_is_reset_at_both_ends() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        let Wired { line, mut client, mut server, memory, on: _on, id, sides } = wired(v6);
        // The last acknowledgement may be under way.
        let all_is_acknowledged = |memory: &WireMemory| {
            let seen = memory.look(id);
            (0..2).all(|side| {
                let sent = seen[side].standing.sent.wrapping_add(sides[side].add);
                sent == seen[side ^ 1].standing.acknowledged
            })
        };
        eventually("all is acknowledged", || all_is_acknowledged(&memory));
        let seen = memory.look(id);
        line.router.run(move || {
            memory.remove(id).expect("removed");
            for (side, seen) in sides.iter().zip(seen) {
                let gone = Gone {
                    remote: side.remote,
                    local: side.local,
                    sent: seen.standing.acknowledged,
                    acknowledged: seen.standing.sent,
                };
                repair::reset(&gone).expect("reset");
            }
        });
        for end in [&mut client, &mut server] {
            assert_eq!(end.read(&mut [0]).expect_err("reset").kind(), ErrorKind::ConnectionReset);
        }
    }
}

#[test]
fn a_flow_outlives_the_process_that_put_it_there() {
    if !is_root() {
        return;
    }
    let Wired { line, mut client, mut server, memory, on, id, sides } = wired(false);
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path().to_owned();
    let (memory, _on) = line.router.run(move || {
        // A file system that is gone with this thread.
        sidetrack_testkit::enter_new_mounts();
        rustix::mount::mount("bpf", &place, "bpf", rustix::mount::MountFlags::empty(), None)
            .expect("mounted");
        let folder = place.join("sidetrack");
        let pins = Pins::open(&folder).expect("locked");
        memory.pin(&pins).expect("pinned");
        assert_eq!(memory.pin(&pins).expect_err("twice").kind(), ErrorKind::AlreadyExists);
        on.iter().for_each(|on| on.pin(&pins).expect("pinned"));
        memory.note(id, &[7; NOTE_BYTES]).expect("noted");
        assert_eq!(Pins::lock(&folder).expect_err("it is in use").kind(), ErrorKind::WouldBlock);
        // As its end would do.
        drop((memory, on));
        client.write_all(b"without anybody").expect("sent");
        let mut bytes = [0; 15];
        server.read_exact(&mut bytes).expect("received");
        assert_eq!(&bytes, b"without anybody");
        let (memory, on, found) = WireMemory::adopt(&pins).expect("adopted");
        assert_eq!(on.len(), 2);
        assert_eq!(memory.noted(id).expect("read"), Some(vec![7; NOTE_BYTES]));
        let ends = sides.map(|side| (side.remote, side.local));
        let next = sides.map(|side| side.next);
        assert_eq!(found, [Adopted { id, is_joining: false, ends, next }]);
        let carried = memory.look(id)[0].standing.sent.wrapping_sub(next[0]);
        assert_eq!(carried, 12 + 15, "it counts on");
        assert!(memory.join(&sides).is_err(), "its ends are known");
        pins.remove().expect("removed");
        assert!(!folder.exists());
        drop(client);
        drop(server);
        eventually("it ends", || memory.ended(id) == Some(WireEnd::Finished));
        memory.remove(id).expect("removed");
        assert!(memory.join(&sides).expect("no other").is_some());
        (memory, on)
    });
    drop(memory);
}

#[test]
fn programs_of_an_interface_are_listed_until_they_are_gone() {
    sidetrack_testkit::in_namespace(|| {
        use sidetrack_sys::bpf::{Hook, Program, ProgramKind, attached};
        // r0 = 0; exit
        let code = [0xb7, 0, 0, 0, 0, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];
        let program = Program::load("nothing", ProgramKind::Tc, &code, "GPL").expect("loaded");
        let index = route::interface_index("lo").expect("lo");
        let seen = || attached(index).expect("listed").iter().map(|(hook, _)| *hook).collect::<Vec<_>>();
        let first = program.attach(index, Hook::TcxIngress).expect("attached");
        let _second = program.attach(index, Hook::TcxEgress).expect("attached");
        assert_eq!(seen(), [Hook::TcxIngress, Hook::TcxEgress]);
        drop(first);
        // A child that another test is starting holds a copy of the descriptor until it execs.
        sidetrack_testkit::eventually("it is gone", || seen() == [Hook::TcxEgress]);
        assert!(attached(u32::MAX).is_err(), "there is no such interface");
    });
}
