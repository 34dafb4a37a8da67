//! Packets in the hands of user space: caught, let go, delivered as they are, and what happens without a reader.

use std::net::{SocketAddr, UdpSocket};

use sidetrack_core::overlay::packet::Ends;
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nfqueue::{HOLD_NUMBERS, HeldSegment, HoldQueues, Queue, Verdict};
use sidetrack_sys::nft::{self, HoldQueue, MarkBits, PacketCatch, Packets};
use sidetrack_sys::raw::RoutedSocket;
use sidetrack_sys::{route, sockopt};
use sidetrack_testkit::{LIMIT, accept, connect, eventually, in_namespace, listen};

const OWN: MarkBits = MarkBits { value: 0x5d00, mask: 0xff00 };
const DELIVERED: MarkBits = MarkBits { value: 0x5f00, mask: 0xff00 };

fn catch(queue: u16, bypass: bool, name: &str) {
    let to = ["10.5.0.0/24", "fd05::/64"].iter().map(|net| net.parse().expect("a network")).collect();
    let catches = vec![PacketCatch { local: true, to, ports: None, heard_on: None }];
    let packets = Packets { catches, queue, bypass, own: [OWN, DELIVERED] };
    let mut socket = Socket::open(Protocol::Netfilter).expect("a socket");
    packets.table(name).apply(&mut socket).expect("applied");
}

fn received(server: &UdpSocket) -> String {
    let mut buffer = [0; 2000];
    let (n, _) = server.recv_from(&mut buffer).expect("a datagram");
    String::from_utf8_lossy(&buffer[..n]).into_owned()
}

#[test]
fn what_is_caught_goes_where_its_reader_says() {
    in_namespace(|| {
        route::add_local_default("lo").expect("route");
        let queue = Queue::open(24_000..=24_003, 64, true, LIMIT).expect("a queue");
        let second = Queue::open(24_000..=24_003, 64, true, LIMIT).expect("another");
        assert_ne!(queue.number(), second.number());
        assert!(Queue::open(queue.number()..=queue.number(), 64, true, LIMIT).is_err(), "it is taken");
        drop(second);
        let mut queue = queue;
        catch(queue.number(), true, "caught");
        let raw = RoutedSocket::open(DELIVERED.value).expect("root");
        let servers = ["0.0.0.0:0", "[::]:0"].map(|any| UdpSocket::bind(any).expect("a socket"));
        for (server, ip) in servers.iter().zip(["10.5.0.1", "fd05::1"]) {
            server.set_read_timeout(Some(LIMIT)).expect("a time-out");
            let port = server.local_addr().expect("an address").port();
            let to = SocketAddr::new(ip.parse().expect("an address"), port);
            let client =
                UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).expect("a socket");
            client.send_to(b"stolen", to).expect("sent");
            let mut packet = Vec::new();
            let read = queue.read(|caught| {
                packet = caught.to_vec();
                Verdict::Drop
            });
            assert_eq!(read.expect("a packet").packets, 1);
            assert_eq!(Ends::of(&packet).expect("it names its ends").destination, to);
            client.send_to(b"let go", to).expect("sent");
            queue.read(|_| Verdict::Accept).expect("a packet");
            assert_eq!(received(server), "let go", "the first was dropped");
            raw.send(&packet, to.ip()).expect("delivered");
            assert_eq!(received(server), "stolen");
        }
        // Without a reader: packets pass.
        drop(queue);
        let to = SocketAddr::new(
            "10.5.0.1".parse().expect("an address"),
            servers[0].local_addr().expect("bound").port(),
        );
        let client = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        client.send_to(b"passed by", to).expect("sent");
        assert_eq!(received(&servers[0]), "passed by");
        // Or they do not, but for our own.
        catch(24_009, false, "closed");
        let _ = client.send_to(b"dropped", to);
        sockopt::set_mark(&client, OWN.value).expect("root");
        client.send_to(b"our own", to).expect("sent");
        assert_eq!(received(&servers[0]), "our own");
    });
}

#[test]
fn an_opening_segment_waits_for_its_verdict_and_passes_without_a_reader() {
    in_namespace(|| {
        route::add_local_default("lo").expect("route");
        let listener = listen("::");
        let port = listener.local_addr().expect("an address").port();
        let mut queues = HoldQueues::open(HOLD_NUMBERS, 2, 64, true).expect("queues");
        assert_eq!(queues.numbers().len(), 2);
        let hold = HoldQueue { number: queues.numbers()[1], bypass: true };
        let mut socket = Socket::open(Protocol::Netfilter).expect("a socket");
        nft::run_namespace_held(port, Some(hold)).apply(&mut socket).expect("applied");
        let client = std::thread::spawn(|| connect("192.0.2.7:80"));
        let mut held = None;
        eventually("a segment comes", || {
            let keep = |one: HeldSegment<'_>| held = Some((one.queue, one.id, one.is_local, one.head.len()));
            queues.read(keep).expect("read");
            held.is_some()
        });
        let (queue, id, is_local, length) = held.expect("a segment");
        assert!(is_local && queue == hold.number && length >= 40);
        assert!(!client.is_finished(), "it waits");
        queues.answer(&[(queue, id, Verdict::Accept)]).expect("answered");
        client.join().expect("a thread").expect("accepted");
        let (caught, _) = accept(&listener);
        assert_eq!(sockopt::original_dst(&caught).expect("kept").to_string(), "192.0.2.7:80");
        drop(queues);
        connect("192.0.2.8:81").expect("it passes without a reader");
    });
}
