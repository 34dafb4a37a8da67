//! What may be delivered and what is caught.

use super::super::service::LinkKind;
use super::*;

pub(super) const FAR: NodeId = NodeId(7);
const BEST_EFFORT: Service = Service::new(LinkKind::BestEffort);

/// A SYN from 10.1.0.2:40000 to 10.2.0.3:22, as Linux sends it (checksums left out).
pub(super) const SYN: [u8; 40] = [
    0x45, 0, 0, 40, 0x12, 0x34, 0x40, 0, 64, 6, 0, 0, 10, 1, 0, 2, 10, 2, 0, 3, // IPv4
    0x9c, 0x40, 0, 22, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0, // TCP
];

fn v6_udp(extension: bool) -> Vec<u8> {
    let (next, more) = if extension { (60, &[17, 0, 1, 4, 0, 0, 0, 0][..]) } else { (17, &[][..]) };
    let udp = [0x1f, 0x90, 0, 53, 0, 9, 0, 0, 0xaa];
    let length = u8::try_from(more.len() + udp.len()).unwrap();
    let mut packet = vec![0x60, 0, 0, 0, 0, length, next, 64];
    packet.extend("fd00::1".parse::<Ipv6Addr>().unwrap().octets());
    packet.extend("fd00::2".parse::<Ipv6Addr>().unwrap().octets());
    packet.extend(more);
    packet.extend(udp);
    packet
}

fn nets(text: &str) -> IpSet {
    text.split(' ').map(|net| net.parse().unwrap()).collect()
}

pub(super) fn catch(to: &str, port: Option<u16>) -> Catch {
    let ports = port.map(|port| [(port, port)].into_iter().collect());
    Catch { target: Target::Node(FAR), to: nets(to), ports, service: BEST_EFFORT }
}

#[test]
fn ends_of_both_versions() {
    let ends = Ends::of(&SYN).unwrap();
    assert_eq!(ends.transport, Transport::Tcp);
    assert_eq!(
        (ends.source, ends.destination),
        ("10.1.0.2:40000".parse().unwrap(), "10.2.0.3:22".parse().unwrap())
    );
    assert_eq!(ends.reversed().reversed(), ends);
    for extension in [false, true] {
        let ends = Ends::of(&v6_udp(extension)).unwrap();
        assert_eq!(ends.transport, Transport::Udp);
        assert_eq!(ends.destination, "[fd00::2]:53".parse().unwrap());
    }
}

#[test]
fn what_is_cut_changed_or_a_fragment_names_nobody() {
    for packet in [&SYN[..], &v6_udp(false), &v6_udp(true)] {
        for length in 0..packet.len() {
            assert_eq!(Ends::of(&packet[..length]), None, "{length} bytes of {packet:?}");
        }
        // Change any one byte: no panic.
        for at in 0..packet.len() {
            for value in 0..=255 {
                let mut changed = packet.to_vec();
                changed[at] = value;
                let _ = Ends::of(&changed);
            }
        }
    }
    let mut fragment = SYN;
    fragment[6] = 0x20;
    assert_eq!(Ends::of(&fragment), None);
    let mut icmp = SYN;
    icmp[9] = 1;
    assert_eq!(Ends::of(&icmp), None);
}

/// A node that may reach this destination only.
fn only(to: &str) -> impl Fn(&Ends) -> Result<(), Refused> {
    let to: SocketAddr = to.parse().unwrap();
    move |ends| if ends.destination == to { Ok(()) } else { Err(Refused::Destination) }
}

/// A node that may reach nothing.
fn nothing(_: &Ends) -> Result<(), Refused> {
    Err(Refused::Destination)
}

pub(super) fn never(_: &Ends) -> Result<(), Refused> {
    panic!("the rules were asked already")
}

/// The answer to a TCP packet over IPv4, as a segment with these flags.
pub(super) fn answer_to(packet: &[u8; 40], flags: u8) -> [u8; 40] {
    let mut answer = *packet;
    answer[12..16].copy_from_slice(&packet[16..20]);
    answer[16..20].copy_from_slice(&packet[12..16]);
    answer[20..22].copy_from_slice(&packet[22..24]);
    answer[22..24].copy_from_slice(&packet[20..22]);
    answer[33] = flags;
    answer
}

const SYN_ACK: u8 = 0x12;
const ACK: u8 = 0x10;

#[test]
fn only_what_the_rules_allow_is_delivered() {
    let ssh = only("10.2.0.3:22");
    // The far side: packets for our ssh come from 10.1/16, whose packets the rules send to the same node.
    let server = || Interceptor::new(vec![catch("10.1.0.0/16", Some(22))]);
    assert!(server().incoming(FAR, &SYN, &ssh).is_ok());
    assert_eq!(server().incoming(FAR, &SYN, nothing), Err(Refused::Destination));
    assert_eq!(server().incoming(NodeId(8), &SYN, &ssh), Err(Refused::Source), "another node");
    assert_eq!(server().incoming(FAR, &SYN[..30], &ssh), Err(Refused::Unreadable));
    let mut elsewhere = Interceptor::new(vec![catch("10.9.0.0/16", None)]);
    assert_eq!(elsewhere.incoming(FAR, &SYN, &ssh), Err(Refused::Source), "a forged source");
    let mut loopback = SYN;
    loopback[16..20].copy_from_slice(&[127, 0, 0, 1]);
    assert_eq!(server().incoming(FAR, &loopback, |_| Ok(())), Err(Refused::Destination));
}

#[test]
fn an_answer_is_let_in_and_nothing_beside_it() {
    let mut client = Interceptor::new(vec![catch("10.2.0.0/16", Some(22))]);
    assert_eq!(client.outgoing(&v6_udp(false)), None);
    let mut answer = answer_to(&SYN, SYN_ACK);
    assert_eq!(client.incoming(FAR, &answer, nothing), Err(Refused::Destination), "unasked");
    assert_eq!(client.outgoing(&SYN), Some((Receiver::Node(FAR), BEST_EFFORT)));
    assert!(client.incoming(FAR, &answer, never).is_ok());
    // From the right port of the right host to another port of ours: this would bypass a firewall.
    answer[22..24].copy_from_slice(&[0, 25]);
    assert_eq!(client.incoming(FAR, &answer, nothing), Err(Refused::Destination));
}

#[test]
fn the_rules_are_asked_once_for_each_conversation_and_again_after_they_changed() {
    let mut server = Interceptor::new(vec![catch("10.1.0.0/16", None)]);
    let mut denied = SYN;
    denied[23] = 23;
    let denies = |_: &Ends| Err(Refused::Denied);
    assert!(server.incoming(FAR, &SYN, |_| Ok(())).is_ok());
    assert_eq!(server.incoming(FAR, &denied, denies), Err(Refused::Denied));
    for _ in 0..3 {
        assert!(server.incoming(FAR, &SYN, never).is_ok());
        assert_eq!(server.incoming(FAR, &denied, never), Err(Refused::Denied));
    }
    server.rules_changed();
    assert_eq!(server.incoming(FAR, &SYN, denies), Err(Refused::Denied));
    assert!(server.incoming(FAR, &denied, |_| Ok(())).is_ok());
    assert_eq!(server.incoming(FAR, &SYN, never), Err(Refused::Denied));
    assert!(server.incoming(FAR, &denied, never).is_ok());
}

#[test]
fn a_denied_conversation_does_not_go_on_as_the_answer_to_its_own_answers() {
    let denies = |_: &Ends| Err(Refused::Denied);
    let mut segment = SYN;
    segment[33] = ACK;
    // Delivered and answered, and then denied by a reload.
    let mut server = Interceptor::new(vec![catch("10.1.0.0/16", None)]);
    assert!(server.incoming(FAR, &SYN, |_| Ok(())).is_ok());
    assert!(server.outgoing(&answer_to(&SYN, SYN_ACK)).is_some());
    server.rules_changed();
    assert_eq!(server.incoming(FAR, &segment, denies), Err(Refused::Denied));
    assert!(server.outgoing(&answer_to(&SYN, ACK)).is_some(), "a retransmission of the server's");
    assert_eq!(server.incoming(FAR, &segment, never), Err(Refused::Denied));
    // The same after a restart, which forgets what was delivered.
    let mut server = Interceptor::new(vec![catch("10.1.0.0/16", None)]);
    assert_eq!(server.incoming(FAR, &segment, denies), Err(Refused::Denied));
    assert!(server.outgoing(&answer_to(&SYN, ACK)).is_some());
    assert_eq!(server.incoming(FAR, &segment, never), Err(Refused::Denied));
    // The same two ends, begun here: their answers are let in.
    assert!(server.outgoing(&answer_to(&SYN, 0x02)).is_some());
    assert!(server.incoming(FAR, &segment, never).is_ok());
}

#[test]
fn a_datagram_that_is_denied_does_not_keep_ours_to_the_same_port_from_being_answered() {
    let mut node = Interceptor::new(vec![catch("fd00::1/128", None)]);
    let theirs = v6_udp(false);
    let mut ours = theirs.clone();
    ours[8..24].copy_from_slice(&theirs[24..40]);
    ours[24..40].copy_from_slice(&theirs[8..24]);
    ours[40..42].copy_from_slice(&theirs[42..44]);
    ours[42..44].copy_from_slice(&theirs[40..42]);
    assert_eq!(node.incoming(FAR, &theirs, |_| Err(Refused::Denied)), Err(Refused::Denied));
    assert!(node.outgoing(&ours).is_some());
    assert!(node.incoming(FAR, &theirs, never).is_ok());
}

#[test]
fn a_conversation_with_the_nearest_member_stays_with_it_and_only_it_may_answer() {
    let group: GroupName = "dns".parse().unwrap();
    let nearest = Catch { target: Target::Nearest(group.clone()), ..catch("10.2.0.0/16", None) };
    let mut client = Interceptor::new(vec![nearest]);
    let to = |kept| Some((Receiver::Nearest { group: group.clone(), kept }, BEST_EFFORT));
    assert_eq!(client.outgoing(&SYN), to(None));
    let answer = answer_to(&SYN, SYN_ACK);
    assert_eq!(client.incoming(FAR, &answer, nothing), Err(Refused::Source), "before the request");
    client.keep(&SYN, FAR);
    assert_eq!(client.outgoing(&SYN), to(Some(FAR)));
    assert!(client.incoming(FAR, &answer, never).is_ok());
    assert_eq!(client.incoming(NodeId(8), &answer, |_| Ok(())), Err(Refused::Source), "another member");
    // Another conversation of the same member.
    let mut other = answer;
    other[23] = 23;
    assert_eq!(client.incoming(FAR, &other, |_| Ok(())), Err(Refused::Source));
    client.keep(&SYN, NodeId(8));
    assert!(
        client.incoming(NodeId(8), &answer, never).is_ok() && client.incoming(FAR, &answer, never).is_err()
    );
}

#[test]
fn what_another_gateway_has_delivered_and_what_may_not_leave_stay_here() {
    let group: GroupName = "tv".parse().unwrap();
    let all = Catch { target: Target::Group(group.clone()), ..catch("239.1.2.3", None) };
    let rule = Rule { to: nets("239.1.2.3"), ..Rule::default() };
    let rules = || BTreeMap::from([(group.clone(), rule.clone())]);
    let mut packet = SYN;
    packet[9] = 17;
    packet[16..20].copy_from_slice(&[239, 1, 2, 3]);
    let sent = |catches: Vec<Catch>, packet: &[u8]| {
        Interceptor::new(catches).with_groups(rules()).outgoing(packet).map(|(to, _)| to)
    };
    assert_eq!(sent(vec![all.clone()], &packet), Some(Receiver::Group(group.clone())));
    // The hosts of 10.1 are behind another node.
    let elsewhere = catch("10.1.0.0/16", None);
    assert_eq!(sent(vec![elsewhere, all.clone()], &packet), Some(Receiver::Here));
    packet[8] = 1;
    assert_eq!(sent(vec![all], &packet), Some(Receiver::Here), "a time to live of one hop");
}

#[test]
fn conversations_are_bounded_and_the_silent_ones_go_first() {
    let mut client = Interceptor::new(vec![catch("10.2.0.0/16", None)]);
    let packet = |number: u32| {
        let mut packet = SYN;
        packet[14..16].copy_from_slice(&number.to_be_bytes()[..2]);
        packet[20..22].copy_from_slice(&number.to_be_bytes()[2..]);
        packet
    };
    let most = u32::try_from(CONVERSATIONS_MAX).unwrap();
    for number in 0..most {
        client.outgoing(&packet(number));
    }
    client.outgoing(&packet(0));
    client.outgoing(&packet(most));
    assert_eq!(client.ours.len(), CONVERSATIONS_MAX);
    let knows = |number: u32| client.ours.get(&Ends::of(&packet(number)).unwrap().reversed()).is_some();
    assert!(knows(0) && !knows(1) && knows(2) && knows(most));
}

#[test]
fn a_flood_of_denied_conversations_is_bounded_and_removes_no_others() {
    let mut server = Interceptor::new(vec![catch("10.0.0.0/8", None)]);
    let packet = |number: usize| {
        let mut packet = SYN;
        packet[13..16].copy_from_slice(&number.to_be_bytes()[5..]);
        packet
    };
    let mut answered = SYN;
    answered[13] = 255;
    assert!(server.incoming(FAR, &answered, |_| Ok(())).is_ok());
    server.outgoing(&packet(0));
    for number in 1..CONVERSATIONS_MAX + 10 {
        assert!(server.incoming(FAR, &packet(number), |_| Err(Refused::Denied)).is_err());
    }
    assert_eq!((server.denied.len(), server.theirs.len(), server.ours.len()), (CONVERSATIONS_MAX, 1, 1));
    assert!(server.incoming(FAR, &answered, never).is_ok());
}
