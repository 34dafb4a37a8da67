//! Reading connections out of netlink messages. Bytes may be anything.

use std::net::SocketAddr;

use super::{Counters, DELETE, Entry, Event, NEW, Tuple, attribute};
use crate::netlink::{Attribute, Message, attributes, flag, messages};

/// Most bytes of attributes looked at in one message; real ones have a few hundred.
const ATTRIBUTES_MAX: usize = 64;

/// The connection in a message of kind NEW (also used for changes and lists) or DELETE; `None` if the message is of another
/// kind, or of a protocol without ports, or cannot be read.
pub fn parse(message: &Message<'_>) -> Option<Entry> {
    if message.kind != NEW && message.kind != DELETE {
        return None;
    }
    let mut draft = Draft::default();
    attributes(message.after(4)).take(ATTRIBUTES_MAX).for_each(|attribute| draft.take(&attribute));
    draft.finish()
}

/// The events in one datagram, in order. Messages that are not events of connections with ports are left out, and what follows
/// a broken message.
pub fn parse_datagram(bytes: &[u8]) -> impl Iterator<Item = Event> + '_ {
    messages(bytes).map_while(Result::ok).filter_map(|message| {
        let entry = parse(&message)?;
        Some(match message.kind {
            DELETE => Event::Destroy(entry),
            _ if message.flags & (flag::CREATE | flag::EXCLUSIVE) != 0 => Event::New(entry),
            _ => Event::Update(entry),
        })
    })
}

/// An entry of which some attributes have been read.
#[derive(Default)]
struct Draft {
    id: Option<u32>,
    original: Option<Tuple>,
    reply: Option<Tuple>,
    status: u32,
    mark: u32,
    timeout_s: Option<u32>,
    tcp_state: Option<u8>,
    client_to_server: Option<Counters>,
    server_to_client: Option<Counters>,
    start_ns: Option<u64>,
    stop_ns: Option<u64>,
    zone: u16,
    helped: bool,
}

impl Draft {
    fn take(&mut self, field: &Attribute<'_>) {
        match field.kind {
            attribute::TUPLE_ORIGINAL => self.original = tuple(field),
            attribute::TUPLE_REPLY => self.reply = tuple(field),
            attribute::STATUS => self.status = field.u32_be().unwrap_or(0),
            attribute::MARK => self.mark = field.u32_be().unwrap_or(0),
            attribute::TIMEOUT => self.timeout_s = field.u32_be(),
            attribute::ID => self.id = field.u32_be(),
            attribute::ZONE => self.zone = field.u16_be().unwrap_or(0),
            attribute::PROTOCOL_INFO => self.tcp_state = tcp_state(field),
            attribute::COUNTERS_ORIGINAL => self.client_to_server = counters(field),
            attribute::COUNTERS_REPLY => self.server_to_client = counters(field),
            attribute::HELP => self.helped = true,
            attribute::TIMESTAMP => {
                self.start_ns = field.nested().first(1).and_then(|a| a.u64_be());
                self.stop_ns = field.nested().first(2).and_then(|a| a.u64_be());
            }
            _ => {}
        }
    }

    fn finish(self) -> Option<Entry> {
        Some(Entry {
            id: self.id,
            original: self.original?,
            reply: self.reply?,
            status: self.status,
            mark: self.mark,
            timeout_s: self.timeout_s,
            tcp_state: self.tcp_state,
            client_to_server: self.client_to_server,
            server_to_client: self.server_to_client,
            start_ns: self.start_ns,
            stop_ns: self.stop_ns,
            zone: self.zone,
            helped: self.helped,
        })
    }
}

fn tuple(field: &Attribute<'_>) -> Option<Tuple> {
    let ip = field.nested().first(1)?;
    let proto = field.nested().first(2)?;
    let address = |v4, v6| ip.nested().find(|a| a.kind == v4 || a.kind == v6)?.address();
    let port = |kind| proto.nested().first(kind)?.u16_be();
    Some(Tuple {
        source: SocketAddr::new(address(1, 3)?, port(2)?),
        destination: SocketAddr::new(address(2, 4)?, port(3)?),
        protocol: proto.nested().first(1)?.u8()?,
    })
}

fn tcp_state(field: &Attribute<'_>) -> Option<u8> {
    field.nested().first(1)?.nested().first(1)?.u8()
}

fn counters(field: &Attribute<'_>) -> Option<Counters> {
    let count = |kind| field.nested().first(kind)?.u64_be();
    Some(Counters { packets: count(1)?, bytes: count(2)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conntrack::status;
    use proptest::prelude::*;

    /// DESTROY events as Linux 6.18 sent them, of a TCP connection on loopback that carried 10 bytes each way.
    const DESTROY_V4: &str = "0c01000002010000000000001de4699e020000003400018014000180080001007f000001080002007f000001\
        1c000280050001000600000006000200b676000006000300a8bb00003400028014000180080001007f000001080002007f0000011c000280\
        050001000600000006000200a8bb000006000300b676000008000c006dfe96be080003000000038e08000700000000771c0009800c000100\
        00000000000000060c000200000000000000014a1c000a800c00010000000000000000040c00020000000000000000e21c0014800c000100\
        18ea33ce481bd2920c00020018ea33ce4902772e100004800c0001800500010007000000080008000000002a0c001b0018ea33ce49027860";
    const DESTROY_V6: &str = "3c01000002010000000000007ae494dd0a0000004c0001802c00018014000300000000000000000000000000\
        0000000114000400000000000000000000000000000000011c000280050001000600000006000200a064000006000300869300004c000280\
        2c000180140003000000000000000000000000000000000114000400000000000000000000000000000000011c0002800500010006000000\
        060002008693000006000300a064000008000c003b5fa07c080003000000038e08000700000000771c0009800c0001000000000000000006\
        0c00020000000000000001c21c000a800c00010000000000000000040c00020000000000000001321c0014800c00010018ea33ce490b0270\
        0c00020018ea33ce49f61d32100004800c0001800500010007000000080008000000002a0c001b0018ea33ce49f61e41";

    fn bytes(hex: &str) -> Vec<u8> {
        let digit = |c: char| u8::try_from(c.to_digit(16).expect("hex")).expect("below 16");
        let digits: Vec<u8> = hex.chars().map(digit).collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    fn only(bytes: &[u8]) -> Event {
        let mut events = parse_datagram(bytes);
        let event = events.next().expect("one event");
        assert_eq!(events.next(), None);
        event
    }

    #[test]
    fn captured_events_are_read() {
        /// `IPS_SRC_NAT_DONE` and `IPS_DST_NAT_DONE`: nat chains had their say.
        const NAT_DECIDED: u32 = 0x180;
        let Event::Destroy(v4) = only(&bytes(DESTROY_V4)) else { panic!("an end") };
        let tuple = |source: &str, destination: &str| Tuple {
            source: source.parse().expect(source),
            destination: destination.parse().expect(destination),
            protocol: 6,
        };
        let expected = Entry {
            id: Some(0x6dfe_96be),
            original: tuple("127.0.0.1:46710", "127.0.0.1:43195"),
            reply: tuple("127.0.0.1:43195", "127.0.0.1:46710"),
            status: NAT_DECIDED | status::CONFIRMED | status::SEEN_REPLY | status::ASSURED | status::DYING,
            mark: 42,
            timeout_s: Some(119),
            tcp_state: Some(7),
            client_to_server: Some(Counters { packets: 6, bytes: 330 }),
            server_to_client: Some(Counters { packets: 4, bytes: 226 }),
            start_ns: Some(0x18ea_33ce_481b_d292),
            stop_ns: Some(0x18ea_33ce_4902_772e),
            zone: 0,
            helped: false,
        };
        assert_eq!(v4, expected);
        let Event::Destroy(v6) = only(&bytes(DESTROY_V6)) else { panic!("an end") };
        assert_eq!(v6.original, tuple("[::1]:41060", "[::1]:34451"));
        assert_eq!(v6.client_to_server, Some(Counters { packets: 6, bytes: 450 }));
    }

    #[test]
    fn two_events_in_one_datagram_and_a_broken_third() {
        let mut all = bytes(DESTROY_V4);
        all.extend(bytes(DESTROY_V6));
        let whole = all.clone();
        assert_eq!(parse_datagram(&whole).count(), 2);
        all.extend_from_slice(&bytes(DESTROY_V4)[..100]);
        assert_eq!(parse_datagram(&all).count(), 2);
    }

    #[test]
    fn the_kind_and_flags_tell_what_happened() {
        let mut event = bytes(DESTROY_V4);
        event[4] = 0;
        assert!(matches!(only(&event), Event::Update(_)));
        event[6..8].copy_from_slice(&(flag::CREATE | flag::EXCLUSIVE).to_ne_bytes());
        assert!(matches!(only(&event), Event::New(_)));
        event[4] = 9;
        assert_eq!(parse_datagram(&event).count(), 0);
    }

    #[test]
    fn every_cut_is_read_without_panic() {
        for whole in [bytes(DESTROY_V4), bytes(DESTROY_V6)] {
            for end in 0..whole.len() {
                let mut cut = whole[..end].to_vec();
                assert_eq!(parse_datagram(&cut).count(), 0, "the header says more than {end} bytes");
                if let Some(length) = cut.get_mut(..4) {
                    length.copy_from_slice(&u32::try_from(end).expect("small").to_ne_bytes());
                }
                let _ = parse_datagram(&cut).count();
            }
        }
    }

    proptest! {
        #[test]
        fn changed_bytes_are_read_without_panic(changes in proptest::collection::vec((0usize..300, any::<u8>()), 1..8), v6: bool) {
            let mut event = bytes(if v6 { DESTROY_V6 } else { DESTROY_V4 });
            for (at, value) in changes {
                if let Some(byte) = event.get_mut(at) {
                    *byte = value;
                }
            }
            let _ = parse_datagram(&event).count();
        }

        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse_datagram(&bytes).count();
        }
    }
}
