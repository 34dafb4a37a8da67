//! Conntrack events and lists of real connections.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;

use sidetrack_sys::caps;
use sidetrack_sys::conntrack::{self, Conntrack, Entry, Event, Events, Group, Only, status};
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nft::{KernelPath, KernelRoute, MarkBits, Selector, Steering};
use sidetrack_testkit::{accept, in_namespace, listen};

const MARK: MarkBits = MarkBits { value: 0x2a, mask: 0xff };

/// Connections on loopback carry [`MARK`] and send only DESTROY events, as on the kernel path.
fn mark_everything() {
    mark(Selector { to_this_host: true, ..Selector::default() });
}

fn mark(selector: Selector) {
    let route =
        KernelRoute::Direct { local: vec![selector.clone()], forwarded: vec![selector], masquerade: false };
    let path = KernelPath { protocol: sidetrack_core::flow::Protocol::Tcp, mark: MARK, route };
    let table = Steering { kernel_paths: vec![path], ..Steering::default() }.table("sidetrack");
    table.apply(&mut Socket::open(Protocol::Netfilter).expect("socket")).expect("applied");
}

/// One connection that carries `request` and `answer` bytes and ends in order; its client's address.
fn exchange(listener: &TcpListener, request: usize, answer: usize) -> SocketAddr {
    let mut client = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    let (mut server, peer) = accept(listener);
    let mut received = Vec::new();
    client.write_all(&vec![1; request]).expect("send");
    client.shutdown(Shutdown::Write).expect("end");
    server.read_to_end(&mut received).expect("receive");
    assert_eq!(received.len(), request);
    server.write_all(&vec![2; answer]).expect("send");
    drop(server);
    received.clear();
    client.read_to_end(&mut received).expect("receive");
    assert_eq!(received.len(), answer);
    peer
}

/// Reads events until one fits.
fn wait_for(events: &mut Events, fits: impl Fn(&Event) -> bool) -> Event {
    let mut read = Vec::new();
    for _ in 0..1000 {
        events.read(&mut read).expect("read");
        if let Some(event) = read.iter().find(|event| fits(event)) {
            return *event;
        }
        assert!(
            sidetrack_testkit::readable(&*events, sidetrack_testkit::LIMIT),
            "no such event among {read:?}"
        );
    }
    panic!("1000 reads brought no such event");
}

fn entry_of(entries: &[Entry], client: SocketAddr) -> Option<Entry> {
    entries.iter().copied().find(|entry| entry.original.source == client)
}

#[test]
fn the_end_of_a_connection_tells_its_bytes_and_mark() {
    in_namespace(|| {
        mark_everything();
        conntrack::enable_accounting().expect("accounting");
        assert_eq!(conntrack::enable_accounting().expect("again"), [], "nothing left to change");
        let mut events =
            Events::open(&[Group::New, Group::Destroy], Only::Everything, 1 << 20).expect("events");
        assert!(events.receive_buffer_bytes() >= 1 << 20);
        let mut table = Conntrack::open().expect("socket");
        for address in ["127.0.0.1", "::1"] {
            let listener = listen(address);
            let client = exchange(&listener, 100_000, 5_000);
            let entry = entry_of(&table.list(Some(MARK)).expect("list"), client).expect("listed by its mark");
            let other = MarkBits { value: 1, mask: 0xff };
            assert_eq!(table.list(Some(other)).expect("list"), [], "the filter filters");
            assert_eq!(entry.original.destination, listener.local_addr().expect("address"));
            assert_eq!((entry.mark, entry.original.protocol), (MARK.value, 6));
            assert!(
                entry.status & status::ASSURED != 0 && entry.timeout_s.is_some() && entry.tcp_state.is_some()
            );
            assert!(table.delete(&entry).expect("deleted"), "it was there");
            assert!(!table.delete(&entry).expect("asked"), "it is gone");
            let is_end =
                |event: &Event| matches!(event, Event::Destroy(entry) if entry.original.source == client);
            let Event::Destroy(ended) = wait_for(&mut events, is_end) else { panic!("a DESTROY event") };
            check_end(&ended, &entry);
        }
    });
}

fn check_end(ended: &Entry, listed: &Entry) {
    assert_eq!((ended.id, ended.mark, ended.original), (listed.id, MARK.value, listed.original));
    let (up, down) = (ended.client_to_server.expect("counted"), ended.server_to_client.expect("counted"));
    assert!((100_000..200_000).contains(&up.bytes), "{up:?}");
    assert!((5_000..20_000).contains(&down.bytes), "{down:?}");
    assert!(up.packets > 3 && down.packets > 3);
    let (start, stop) = (ended.start_ns.expect("stamped"), ended.stop_ns.expect("stamped"));
    assert!(start > 1_600_000_000_000_000_000 && stop >= start);
}

#[test]
fn only_the_chosen_events_are_sent() {
    in_namespace(|| {
        mark_everything();
        conntrack::enable_accounting().expect("accounting");
        let mut events =
            Events::open(&[Group::New, Group::Update, Group::Destroy], Only::Everything, 1 << 20)
                .expect("events");
        let listener = listen("127.0.0.1");
        let client = exchange(&listener, 10, 10);
        let mut table = Conntrack::open().expect("socket");
        let entry = entry_of(&table.list(None).expect("list"), client).expect("listed");
        table.delete(&entry).expect("deleted");
        let mut seen = Vec::new();
        events.read(&mut seen).expect("read");
        assert!(
            matches!(seen.as_slice(), [Event::Destroy(ended)] if ended.original.source == client),
            "ct event set destroy leaves one event of a connection: {seen:?}"
        );
    });
}

#[test]
fn new_connections_are_told_apart_from_changes() {
    in_namespace(|| {
        // A rule that looks at connections switches tracking on; this one fits none, so no event is cut.
        mark(Selector { ports: [(9, 9)].into_iter().collect(), ..Selector::default() });
        let mut events =
            Events::open(&[Group::New, Group::Update], Only::Everything, 1 << 20).expect("events");
        conntrack::enable_accounting().expect("accounting");
        let client = exchange(&listen("127.0.0.1"), 10, 10);
        let of_client = |entry: &Entry| entry.original.source == client;
        wait_for(&mut events, |event| matches!(event, Event::New(entry) if of_client(entry)));
        let client = exchange(&listen("127.0.0.1"), 10, 10);
        let of_client = |entry: &Entry| entry.original.source == client;
        wait_for(&mut events, |event| matches!(event, Event::Update(entry) if of_client(entry)));
    });
}

/// Ends of connections of other programs are dropped before they reach the socket: a small one loses none of ours.
#[test]
fn events_of_other_connections_do_not_reach_a_filtered_socket() {
    in_namespace(|| {
        conntrack::enable_accounting().expect("accounting");
        let ours = listen("127.0.0.1");
        let port = ours.local_addr().expect("address").port();
        let ports = [(port, port)].into_iter().collect();
        mark(Selector { to_this_host: true, ports, ..Selector::default() });
        let other = MarkBits { value: 0x1, mask: 0xff };
        let groups = [Group::Destroy];
        let mut all = Events::open(&groups, Only::Everything, 1 << 20).expect("events");
        let mut small = Events::open(&groups, Only::Marked(MARK), 1).expect("events");
        let mut any = Events::open(&groups, Only::AnyMark, 1).expect("events");
        let mut strange = Events::open(&groups, Only::Marked(other), 1 << 20).expect("events");
        let foreign = listen("127.0.0.1");
        let mut table = Conntrack::open().expect("socket");
        for _ in 0..100 {
            exchange(&foreign, 10, 10);
        }
        let client = exchange(&ours, 10, 10);
        for entry in table.list(None).expect("list") {
            table.delete(&entry).expect("deleted");
        }
        let is_end =
            |event: &Event| matches!(event, Event::Destroy(entry) if entry.original.source == client);
        wait_for(&mut all, is_end);
        for events in [&mut small, &mut any] {
            let mut read = Vec::new();
            events.read(&mut read).expect("read");
            assert!(read.iter().any(is_end), "{read:?}");
            let is_ours = |event: &Event| match event {
                Event::New(entry) | Event::Update(entry) | Event::Destroy(entry) => {
                    entry.original.source == client && entry.mark == MARK.value
                }
                Event::Overrun => false,
            };
            assert!(read.iter().all(is_ours), "{read:?}");
        }
        let mut read = Vec::new();
        strange.read(&mut read).expect("read");
        assert_eq!(read, []);
    });
}

#[test]
fn lost_events_are_told() {
    in_namespace(|| {
        mark_everything();
        conntrack::enable_accounting().expect("accounting");
        let mut events = Events::open(&[Group::Destroy], Only::Everything, 1).expect("events");
        let listener = listen("127.0.0.1");
        for _ in 0..64 {
            exchange(&listener, 1, 1);
        }
        let mut table = Conntrack::open().expect("socket");
        for entry in table.list(Some(MARK)).expect("list") {
            table.delete(&entry).expect("deleted");
        }
        assert_eq!(wait_for(&mut events, |event| *event == Event::Overrun), Event::Overrun);
    });
}

#[test]
fn events_keep_coming_without_the_right_to_subscribe() {
    in_namespace(|| {
        mark_everything();
        conntrack::enable_accounting().expect("accounting");
        let events = Events::open(&[Group::Destroy], Only::Everything, 1 << 20).expect("events");
        let mut table = Conntrack::open().expect("socket");
        let listener = listen("127.0.0.1");
        let client = exchange(&listener, 10, 10);
        let entry = entry_of(&table.list(None).expect("list"), client).expect("listed");
        assert!(table.delete(&entry).expect("deleted"));
        // As the unprivileged process gets it: by descriptor, and without any capability.
        let mut events = Events::from(events.as_fd().try_clone_to_owned().expect("a second descriptor"));
        caps::keep_only(rustix::thread::CapabilitySet::empty()).expect("dropped");
        let refused = table.list(None).expect_err("no right").to_string();
        assert!(refused.contains("list connections") && refused.contains("CAP_NET_ADMIN"), "{refused}");
        assert!(Events::open(&[Group::Destroy], Only::Everything, 1).is_err(), "no right to subscribe");
        wait_for(
            &mut events,
            |event| matches!(event, Event::Destroy(ended) if ended.original.source == client),
        );
    });
}
