//! OpenFlow: golden bytes, every split, every cut, and random bytes. The golden bytes were given to Open vSwitch 3.1
//! (`ovs-ofctl ofp-print`); the comments beside them show its output.

use proptest::prelude::*;
use sidetrack_core::openflow::{
    Command, Decoder, FlowMod, FlowRemoved, Frame, Malformed, Message, Pattern, Protocol, Removal, Request,
    Version, read, write,
};

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| u8::try_from(c.to_digit(16).expect("hex")).expect("below 16"))
        .collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The match of a flow as OXM, and the bytes around it in an entry.
const OXM: &str = "80000004 00000031 80000a02 0800 80001401 06 80001604 c0000201 80001804 c6336402 80001a02 0fa0 \
                   80001c02 1388";
const OXM_V6: &str = "80000004 00000031 80000a02 86dd 80001401 11 80003410 20010db8000000000000000000000001 80003610 \
                      20010db8000000000000000000000002 80001e02 0fa0 80002002 1388";
const HEAD: &str =
    "00000000deadbeef 0000000000000000 00 00 000a 0000 80e8 ffffffff ffffffff ffffffff 0001 0000";
const OUTPUT: &str = "0004 0018 00000000 0000 0010 00000032 0000 000000000000";
/// priority=33000,tcp,in_port=49,nw_src=192.0.2.1,nw_dst=198.51.100.2,tp_src=4000,tp_dst=5000
const MATCH_1_0: &str =
    "0030000e 0031 000000000000 000000000000 0000 00 00 0800 00 06 0000 c0000201 c6336402 0fa0 1388";

fn pattern() -> Pattern {
    Pattern {
        in_port: Some(49),
        addresses: Some(([192, 0, 2, 1].into(), [198, 51, 100, 2].into())),
        protocol: Some(Protocol::Tcp),
        ports: Some((4000, 5000)),
        untagged: false,
        established: false,
    }
}

fn entry(pattern: Pattern) -> FlowMod {
    FlowMod {
        command: Command::Add,
        pattern,
        cookie: 0xdead_beef,
        cookie_mask: 0,
        priority: 33_000,
        idle_timeout_s: 10,
        output: Some(50),
        table: None,
    }
}

fn written(version: Version, xid: u32, request: &Request) -> String {
    hex(&write(version, xid, request).expect("can be said"))
}

fn same(written: &str, golden: &str) {
    assert_eq!(written, hex(&bytes(golden)));
}

#[test]
fn entries_of_1_0() {
    let shunt = Request::FlowMod(entry(pattern()));
    let golden = format!(
        "010e0050 00000007 {MATCH_1_0} 00000000deadbeef 0000 000a 0000 80e8 ffffffff ffff 0001 0000 0008 0032 0000"
    );
    same(&written(Version::V1_0, 7, &shunt), &golden);
    let block = Request::FlowMod(FlowMod { output: None, ..entry(pattern()) });
    assert_eq!(write(Version::V1_0, 7, &block).expect("said").len(), 72, "no action: dropped");
}

#[test]
fn entries_of_1_3() {
    let shunt = Request::FlowMod(entry(pattern()));
    same(
        &written(Version::V1_3, 8, &shunt),
        &format!("040e0080 00000008 {HEAD} 0001 0033 {OXM} 0000000000 {OUTPUT}"),
    );
    // ... nw_frag=no, tcp_flags=-fin-syn-rst
    let safe = Request::FlowMod(entry(Pattern { established: true, ..pattern() }));
    let golden = format!(
        "040e0090 00000009 {HEAD} 0001 0041 {OXM} 00014504 0000 0007 00013502 00 03 00000000000000 {OUTPUT}"
    );
    same(&written(Version::V1_3, 9, &safe), &golden);
    let v6 = Pattern {
        addresses: Some(("2001:db8::1".parse().expect("v6"), "2001:db8::2".parse().expect("v6"))),
        protocol: Some(Protocol::Udp),
        ..pattern()
    };
    let golden = format!("040e0098 0000000a {HEAD} 0001 004b {OXM_V6} 0000000000 {OUTPUT}");
    same(&written(Version::V1_3, 10, &Request::FlowMod(entry(v6))), &golden);
}

#[test]
fn removals() {
    let port = Pattern { in_port: Some(49), ..Pattern::default() };
    let gone =
        FlowMod { command: Command::DeleteStrict, cookie: 0, idle_timeout_s: 0, output: None, ..entry(port) };
    // DEL_STRICT table:255 priority=33000,in_port=49
    let golden = "040e0040 0000000b 0000000000000000 0000000000000000 ff 04 0000 0000 80e8 ffffffff ffffffff ffffffff \
                  0000 0000 0001 000c 80000004 00000031 00000000";
    same(&written(Version::V1_3, 11, &Request::FlowMod(gone)), golden);
    let golden = golden.replacen("ff 04", "05 04", 1);
    same(&written(Version::V1_3, 11, &Request::FlowMod(FlowMod { table: Some(5), ..gone })), &golden);
}

#[test]
fn the_rest_of_what_we_say() {
    same(
        &written(Version::V1_3, 1, &Request::Hello { bitmap: 0x12 }),
        "04000010 00000001 0001 0008 00000012",
    );
    same(&written(Version::V1_0, 2, &Request::FeaturesRequest), "01050008 00000002");
    same(&written(Version::V1_0, 3, &Request::Barrier), "01120008 00000003");
    same(&written(Version::V1_3, 3, &Request::Barrier), "04140008 00000003");
    let master = Request::BecomeMaster { generation: 0x0102 };
    same(&written(Version::V1_3, 9, &master), "04180018 00000009 00000002 00000000 0000000000000102");
    let config = Request::SetConfig { flags: 0, miss_send_len: 0 };
    same(&written(Version::V1_3, 4, &config), "0409000c 00000004 0000 0000");
    same(&written(Version::V1_3, 5, &Request::EchoReply(vec![1, 2])), "0403000a 00000005 0102");
    same(&written(Version::V1_0, 6, &Request::Incompatible), "0101000c 00000006 0000 0000");
    let ours = Request::FlowStats { cookie: 0x5354 << 48, mask: 0xffff << 48 };
    let golden = "04120038 0000000c 0001 0000 00000000 ff 000000 ffffffff ffffffff 00000000 5354000000000000 \
                  ffff000000000000 0001 0004 00000000";
    same(&written(Version::V1_3, 12, &ours), golden);
    assert_eq!(write(Version::V1_0, 1, &ours).expect("said").len(), 56);
}

#[test]
fn what_1_0_cannot_say() {
    let refused = |pattern| write(Version::V1_0, 1, &Request::FlowMod(entry(pattern))).is_err();
    assert!(refused(Pattern { established: true, ..pattern() }));
    assert!(refused(Pattern { in_port: Some(70_000), ..pattern() }));
    let v6 = ("::1".parse().expect("v6"), "::2".parse().expect("v6"));
    assert!(refused(Pattern { addresses: Some(v6), ..pattern() }));
    assert!(!refused(pattern()));
    assert!(write(Version::V1_0, 1, &Request::BecomeMaster { generation: 1 }).is_err());
}

/// Decodes the only message in these bytes.
fn heard(hex: &str) -> Result<Message, Malformed> {
    let mut decoder = Decoder::new();
    decoder.push(&bytes(hex));
    let frame = decoder.frame()?.expect("a whole message");
    assert_eq!(decoder.pending(), 0);
    read(&frame)
}

/// reason=idle cookie:0xdeadbeef duration12s idle10 pkts7 bytes4096
fn removed() -> [String; 2] {
    let counts = "0000000000000007 0000000000001000";
    [
        format!(
            "010b0058 00000000 {MATCH_1_0} 00000000deadbeef 80e8 00 00 0000000c 00000000 000a 0000 {counts}"
        ),
        format!(
            "040b0068 00000000 00000000deadbeef 80e8 00 00 0000000c 00000000 000a 0000 {counts} 0001 0033 {OXM} 0000000000"
        ),
    ]
}

fn listed() -> [String; 2] {
    let counts = "00000000deadbeef 0000000000000007 0000000000001000";
    [
        format!(
            "01110064 0000000c 0001 0001 0058 00 00 {MATCH_1_0} 0000000c 00000000 80e8 000a 0000 000000000000 {counts}"
        ),
        format!(
            "04130078 0000000c 0001 0001 00000000 0068 00 00 0000000c 00000000 80e8 000a 0000 0001 00000000 {counts} 0001 \
             0033 {OXM} 0000000000"
        ),
    ]
}

#[test]
fn ends_and_lists_of_entries() {
    for golden in removed() {
        let expected = FlowRemoved {
            cookie: 0xdead_beef,
            priority: 33_000,
            why: Removal::Idle,
            packets: 7,
            bytes: 4096,
            pattern: pattern(),
        };
        assert_eq!(heard(&golden), Ok(Message::FlowRemoved(expected)));
    }
    for golden in listed() {
        let Ok(Message::FlowStatsReply { more: true, entries }) = heard(&golden) else { panic!("{golden}") };
        let [entry] = entries.as_slice() else { panic!("one entry") };
        assert_eq!(
            (entry.cookie, entry.priority, entry.packets, entry.bytes),
            (0xdead_beef, 33_000, 7, 4096)
        );
        assert_eq!(entry.pattern, pattern());
    }
}

#[test]
fn hellos_errors_and_the_unknown() {
    let hello = |hex| heard(hex).expect("read");
    assert_eq!(hello("01000008 00000001"), Message::Hello { version: 1, bitmap: None });
    assert_eq!(
        hello("06000010 00000001 0001 0008 00000072"),
        Message::Hello { version: 6, bitmap: Some(0x72) }
    );
    // An unknown element comes first.
    assert_eq!(
        hello("04000018 00000001 0007 0006 ffff 0000 0001 0008 00000012"),
        Message::Hello { version: 4, bitmap: Some(0x12) }
    );
    assert_eq!(heard("04010010 00000009 0005 0001 040e0080"), Ok(Message::Error { kind: 5, code: 1 }));
    assert_eq!(heard("04150008 00000009"), Ok(Message::BarrierReply));
    assert_eq!(heard("01130008 00000009"), Ok(Message::BarrierReply));
    assert_eq!(heard("040a0010 00000009 0000000000000000"), Ok(Message::Other { kind: 10 }));
    assert_eq!(heard("04020009 00000009 aa"), Ok(Message::EchoRequest(vec![0xaa])));
    let Ok(Message::FeaturesReply(features)) =
        heard("04060020 00000002 0000000000000abc 00000100 fe 00 0000 0000004f 00000000")
    else {
        panic!("features")
    };
    assert_eq!((features.datapath, features.tables), (0xabc, 254));
}

#[test]
fn the_highest_common_version_is_spoken() {
    assert_eq!(Version::negotiate(6, Some(0x72)), Some(Version::V1_3), "1.0, 1.3, 1.4, 1.5");
    assert_eq!(Version::negotiate(4, Some(0x02)), Some(Version::V1_0), "the bitmap goes before the header");
    assert_eq!(Version::negotiate(1, None), Some(Version::V1_0));
    assert_eq!(Version::negotiate(6, None), Some(Version::V1_3));
    assert_eq!(Version::negotiate(2, None), None, "1.1 is not spoken here");
    assert_eq!(Version::negotiate(5, Some(0x20)), None);
}

fn all(decoder: &mut Decoder) -> Vec<Frame> {
    std::iter::from_fn(|| decoder.frame().expect("well formed")).collect()
}

#[test]
fn any_split_gives_the_same_messages() {
    let stream: Vec<u8> = removed()
        .iter()
        .chain(&listed())
        .flat_map(|hex| bytes(hex))
        .chain(bytes("04000008 00000001"))
        .collect();
    let mut decoder = Decoder::new();
    decoder.push(&stream);
    let whole = all(&mut decoder);
    assert_eq!(whole.len(), 5);
    for at in 0..=stream.len() {
        let mut decoder = Decoder::new();
        decoder.push(&stream[..at]);
        let mut frames = all(&mut decoder);
        decoder.push(&stream[at..]);
        frames.extend(all(&mut decoder));
        assert_eq!(frames, whole, "split at {at}");
    }
    let again: Vec<u8> = whole.iter().flat_map(Frame::to_bytes).collect();
    assert_eq!(again, stream);
}

#[test]
fn a_message_cut_short_is_an_error_and_no_panic() {
    for golden in removed().iter().chain(&listed()) {
        let mut whole = Decoder::new();
        whole.push(&bytes(golden));
        let frame = whole.frame().expect("read").expect("whole");
        for end in 0..frame.body.len() {
            let cut = Frame { body: frame.body[..end].to_vec(), ..frame.clone() };
            if let Ok(message) = read(&cut) {
                // The last padding may be missing, and a list may end before its first entry.
                assert!(
                    end + 8 > frame.body.len() || matches!(message, Message::FlowStatsReply { .. }),
                    "{end}"
                );
            }
        }
    }
    let mut decoder = Decoder::new();
    decoder.push(&[4, 0, 0, 7, 0, 0, 0, 0]);
    assert_eq!(decoder.frame(), Err(Malformed::Length(7)));
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(version in 0u8..8, kind in 0u8..32, body in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(&Frame { version, kind, xid: 0, body });
    }

    #[test]
    fn changed_bytes_are_read_without_panic(which in 0usize..4, changes in proptest::collection::vec((0usize..120, any::<u8>()), 1..6)) {
        let goldens: Vec<_> = removed().into_iter().chain(listed()).collect();
        let mut stream = bytes(&goldens[which]);
        for (at, value) in changes {
            if let Some(byte) = stream.get_mut(at) {
                *byte = value;
            }
        }
        let mut decoder = Decoder::new();
        decoder.push(&stream);
        while let Ok(Some(frame)) = decoder.frame() {
            let _ = read(&frame);
        }
    }

    #[test]
    fn patterns_read_back(
        port in proptest::option::of(0u32..65_536), v6: bool, ports in proptest::option::of((any::<u16>(), any::<u16>())),
        tcp: bool, untagged: bool, established: bool, source: u128, destination: u128,
    ) {
        let address = |bits: u128| if v6 {
            std::net::IpAddr::from(std::net::Ipv6Addr::from(bits))
        } else {
            std::net::IpAddr::from(std::net::Ipv4Addr::from(u32::try_from(bits >> 96).expect("32 bits")))
        };
        let protocol = if tcp { Protocol::Tcp } else { Protocol::Udp };
        let pattern = Pattern {
            in_port: port,
            addresses: Some((address(source), address(destination))),
            protocol: Some(protocol),
            ports,
            untagged,
            established,
        };
        for version in Version::ALL {
            let change = FlowMod { pattern, ..entry(pattern) };
            let Ok(bytes) = write(version, 1, &Request::FlowMod(change)) else {
                prop_assert!(version == Version::V1_0 && (v6 || established));
                continue;
            };
            // The report of the entry's end must contain the same match.
            let at = if version == Version::V1_0 { 8 } else { 48 };
            let length = if version == Version::V1_0 { 40 } else { bytes.len() - 48 - 24 };
            let seen = &bytes[at..at + length];
            let mut body = Vec::new();
            if version == Version::V1_0 { body.extend(seen) }
            body.extend([0; 40]);
            if version == Version::V1_3 { body.extend(seen) }
            let frame = Frame { version: version.number(), kind: 11, xid: 0, body };
            let Ok(Message::FlowRemoved(removed)) = read(&frame) else { panic!("{frame:?}") };
            prop_assert_eq!(removed.pattern, pattern);
        }
    }
}
