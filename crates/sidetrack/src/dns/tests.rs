//! Queries as programs send them, malformed messages, and both transports on loopback.

use super::*;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, RecordType};
use proptest::prelude::*;
use sidetrack_sys::lookup::NoAddress;
use std::net::IpAddr;
use std::net::Ipv4Addr;
use tokio::net::UdpSocket as TokioUdpSocket;

fn question(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new(0x1234, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    let name = name.trim_end_matches('.');
    let labels = name.split('.').filter(|label| !label.is_empty()).map(str::as_bytes);
    let mut name = Name::from_labels(labels).unwrap();
    name.set_fqdn(true);
    message.add_query(Query::query(name, kind));
    message
}

fn ask_in(names: &mut NameTable, message: &Message) -> Message {
    let bytes =
        answer(&message.to_vec().unwrap(), Transport::Udp, names, Instant::ZERO, &Known::Nothing).unwrap();
    Message::from_vec(&bytes).unwrap()
}

fn ask(name: &str, kind: RecordType) -> Message {
    ask_in(&mut NameTable::new(16), &question(name, kind))
}

fn only_a(reply: &Message) -> Ipv4Addr {
    match reply.answers.as_slice() {
        [record] => match record.data {
            RData::A(address) => address.0,
            ref other => panic!("{other}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_name_gets_an_address_that_stands_for_it() {
    let mut names = NameTable::new(16);
    let reply = ask_in(&mut names, &question("WWW.Example.nl", RecordType::A));
    let address = only_a(&reply);
    assert!(NameTable::contains(address));
    assert_eq!(names.name_of(address).unwrap().as_str(), "www.example.nl");
    assert_eq!(reply.metadata.id, 0x1234);
    assert_eq!(reply.metadata.response_code, ResponseCode::NoError);
    assert!(reply.metadata.recursion_available && reply.metadata.recursion_desired);
    assert_eq!(reply.queries, question("WWW.Example.nl", RecordType::A).queries, "case is kept (0x20)");
    assert!(reply.answers[0].ttl > 0 && reply.answers[0].ttl < 30);
    assert_eq!(only_a(&ask_in(&mut names, &question("www.example.nl", RecordType::ANY))), address);
}

#[test]
fn other_types_exist_without_data() {
    for kind in [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB, RecordType::MX, RecordType::TXT] {
        let reply = ask("www.example.nl", kind);
        assert_eq!((reply.metadata.response_code, reply.answers.len()), (ResponseCode::NoError, 0), "{kind}");
    }
    assert_eq!(ask(".", RecordType::NS).metadata.response_code, ResponseCode::NoError);
}

#[test]
fn names_of_fixed_addresses_keep_them() {
    for name in ["localhost", "db.LocalHost"] {
        assert_eq!(only_a(&ask(name, RecordType::A)), Ipv4Addr::LOCALHOST);
        let reply = ask(name, RecordType::AAAA);
        assert_eq!(reply.answers[0].data.to_string(), "::1");
        assert!(ask(name, RecordType::HTTPS).answers.is_empty());
    }
    assert_eq!(only_a(&ask("192.0.2.1", RecordType::A)), Ipv4Addr::new(192, 0, 2, 1));
    assert!(ask("192.0.2.1", RecordType::AAAA).answers.is_empty());
    assert!(NameTable::contains(only_a(&ask("notlocalhost", RecordType::A))));
    assert_eq!(ask("use-application-dns.net", RecordType::A).metadata.response_code, ResponseCode::NXDomain);
}

#[test]
fn addresses_lead_back_to_names() {
    let mut names = NameTable::new(16);
    let address = only_a(&ask_in(&mut names, &question("db.example", RecordType::A)));
    let [a, b, c, d] = address.octets();
    let reply = ask_in(&mut names, &question(&format!("{d}.{c}.{b}.{a}.in-addr.arpa"), RecordType::PTR));
    assert_eq!(reply.answers[0].data.to_string().trim_end_matches('.'), "db.example");
    for other in
        ["1.2.0.192.in-addr.arpa", "8.b.d.0.1.0.0.2.ip6.arpa", "18.198.in-addr.arpa", "x.arpa", "arpa"]
    {
        let reply = ask_in(&mut names, &question(other, RecordType::PTR));
        assert_eq!(reply.metadata.response_code, ResponseCode::NXDomain, "{other}");
    }
    assert_eq!(names.len(), 1, "reverse names get no address");
}

#[test]
fn a_full_table_says_try_later() {
    let mut names = NameTable::new(1);
    assert_eq!(ask_in(&mut names, &question("a.example", RecordType::A)).answers.len(), 1);
    let reply = ask_in(&mut names, &question("b.example", RecordType::A));
    assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
}

#[test]
fn what_is_no_plain_question_is_refused_by_its_code() {
    let mut names = NameTable::new(16);
    let mut code = |message: &Message| ask_in(&mut names, message).metadata.response_code;
    let mut update = question("a.example", RecordType::A);
    update.metadata.op_code = OpCode::Status;
    assert_eq!(code(&update), ResponseCode::NotImp);
    let mut two = question("a.example", RecordType::A);
    two.add_query(two.queries[0].clone());
    assert_eq!(code(&two), ResponseCode::FormErr);
    let mut none = question("a.example", RecordType::A);
    none.queries.clear();
    assert_eq!(code(&none), ResponseCode::FormErr);
    let mut chaos = question("version.bind", RecordType::TXT);
    chaos.queries[0].set_query_class(DNSClass::CH);
    assert_eq!(code(&chaos), ResponseCode::Refused);
    let mut dotted = question("a.example", RecordType::A);
    dotted.queries[0].set_name(Name::from_labels([&b"a.b"[..], b"example"]).unwrap());
    assert_eq!(code(&dotted), ResponseCode::NXDomain);
    assert!(names.is_empty());
    let mut bytes = question("a.example", RecordType::A).to_vec().unwrap();
    bytes.truncate(16);
    let reply = Message::from_vec(
        &answer(&bytes, Transport::Udp, &mut names, Instant::ZERO, &Known::Nothing).unwrap(),
    )
    .unwrap();
    assert_eq!((reply.metadata.response_code, reply.metadata.id), (ResponseCode::FormErr, 0x1234));
}

#[test]
fn answers_are_not_answered() {
    let mut names = NameTable::new(16);
    let mut reply = question("a.example", RecordType::A);
    reply.metadata.message_type = MessageType::Response;
    assert_eq!(
        answer(&reply.to_vec().unwrap(), Transport::Udp, &mut names, Instant::ZERO, &Known::Nothing),
        None
    );
    assert_eq!(answer(&[0; 11], Transport::Udp, &mut names, Instant::ZERO, &Known::Nothing), None);
}

#[test]
fn edns_is_answered_with_edns() {
    let mut asked = question("a.example", RecordType::A);
    let mut edns = Edns::new();
    edns.set_max_payload(4096);
    asked.set_edns(edns);
    let reply = ask_in(&mut NameTable::new(16), &asked);
    assert_eq!(reply.edns.unwrap().max_payload(), 1232);
    assert!(ask("a.example", RecordType::A).edns.is_none());
    let mut edns = Edns::new();
    edns.set_version(1);
    asked.set_edns(edns);
    let reply = ask_in(&mut NameTable::new(16), &asked);
    assert_eq!((u16::from(reply.metadata.response_code), reply.answers.len()), (16, 0), "BADVERS");
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        answer(&bytes, Transport::Udp, &mut NameTable::new(4), Instant::ZERO, &Known::Nothing);
    }

    #[test]
    fn no_changed_question_panics(at in 0..64_usize, byte: u8, cut in 0..64_usize) {
        let mut bytes = question("a.very.long.name.example.nl", RecordType::A).to_vec().unwrap();
        if let Some(place) = bytes.get_mut(at) {
            *place = byte;
        }
        bytes.truncate(bytes.len().min(cut.max(12)));
        if let Some(reply) = answer(&bytes, Transport::Tcp, &mut NameTable::new(4), Instant::ZERO, &Known::Nothing) {
            prop_assert_eq!(reply.get(..2), bytes.get(..2), "the id is the question's");
        }
    }
}

fn shared() -> SharedNames {
    Arc::new(Mutex::new(NameTable::new(16)))
}

fn of_names() -> Arc<Resolver> {
    Arc::new(Resolver::of_names(shared()))
}

#[tokio::test]
async fn datagrams_are_answered_and_nonsense_is_survived() {
    let socket = udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let server = socket.local_addr().unwrap();
    let task = tokio::spawn(serve_udp(socket, of_names(), || Instant::ZERO));
    {
        // The client closes its socket before the answer: the ICMP error must not end the server.
        let gone = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        gone.send_to(&question("x.example", RecordType::A).to_vec().unwrap(), server).unwrap();
    }
    let client = TokioUdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.connect(server).await.unwrap();
    client.send(b"nonsense").await.unwrap();
    client.send(&question("a.example", RecordType::A).to_vec().unwrap()).await.unwrap();
    let mut buffer = [0; 512];
    let len = timeout(Duration::from_secs(60), client.recv(&mut buffer)).await.unwrap().unwrap();
    assert!(NameTable::contains(only_a(&Message::from_vec(&buffer[..len]).unwrap())));
    task.abort();
}

#[tokio::test]
async fn a_stream_carries_several_questions_split_anyhow() {
    let (mut client, server) = tokio::io::duplex(64);
    let names = shared();
    let resolver = Resolver::of_names(Arc::clone(&names));
    let task = tokio::spawn(async move { serve_tcp(server, &resolver, || Instant::ZERO).await });
    for name in ["a.example", "b.example"] {
        let bytes = question(name, RecordType::A).to_vec().unwrap();
        let framed = [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], &bytes].concat();
        for byte in framed {
            client.write_all(&[byte]).await.unwrap();
        }
        let len = usize::from(client.read_u16().await.unwrap());
        let mut reply = vec![0; len];
        client.read_exact(&mut reply).await.unwrap();
        let address = only_a(&Message::from_vec(&reply).unwrap());
        assert_eq!(names.lock().unwrap().name_of(address).unwrap().as_str(), name);
    }
    client.shutdown().await.unwrap();
    assert_eq!(client.read(&mut [0; 1]).await.unwrap(), 0);
    task.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_silent_stream_is_closed() {
    let (mut client, server) = tokio::io::duplex(64);
    let task = tokio::spawn(async move { serve_tcp(server, &*of_names(), || Instant::ZERO).await });
    client.write_all(&[0]).await.unwrap();
    assert_eq!(client.read(&mut [0; 1]).await.unwrap(), 0);
    task.await.unwrap().unwrap();
}

/// A resolver with fixed answers: `there.example` has addresses, `mail.example` exists without any,
/// `down.example` cannot be looked up, and all other names do not exist.
fn resolver(mode: Mode, servers: Vec<std::net::SocketAddr>) -> Resolver {
    let here: ResolvesHere = Arc::new(|name| !name.as_str().ends_with("proxied.example"));
    Resolver::new(shared(), mode, here, servers).looking_up(Arc::new(|name| match name {
        "there.example" => {
            Ok(["192.0.2.1", "2001:db8::1"].map(|text| text.parse::<IpAddr>().unwrap()).to_vec())
        }
        "mail.example" => Err(NoAddress::NoData),
        "down.example" => Err(NoAddress::Unknown),
        other => {
            assert!(!other.ends_with("proxied.example"), "{other} must not be asked for here");
            Err(NoAddress::NoName)
        }
    }))
}

async fn ask_of(resolver: &Resolver, name: &str, kind: RecordType) -> (ResponseCode, Vec<String>) {
    let bytes = question(name, kind).to_vec().unwrap();
    let reply = resolver.answer(&bytes, Transport::Udp, Instant::ZERO).await.unwrap();
    let reply = Message::from_vec(&reply).unwrap();
    assert_eq!(reply.metadata.id, 0x1234);
    (reply.metadata.response_code, reply.answers.iter().map(|record| record.data.to_string()).collect())
}

#[tokio::test]
async fn names_that_this_host_resolves_are_looked_up_and_keep_an_address_of_ours() {
    let resolver = resolver(Mode::Name, Vec::new());
    let (code, found) = ask_of(&resolver, "there.example", RecordType::A).await;
    assert_eq!(code, ResponseCode::NoError);
    assert!(found[0].starts_with("198.18."), "{found:?}");
    assert_eq!(ask_of(&resolver, "there.example", RecordType::AAAA).await, (ResponseCode::NoError, vec![]));
    for kind in [RecordType::A, RecordType::AAAA] {
        assert_eq!(ask_of(&resolver, "nowhere.example", kind).await, (ResponseCode::NXDomain, vec![]));
        assert_eq!(ask_of(&resolver, "mail.example", kind).await, (ResponseCode::NoError, vec![]));
    }
    for name in ["down.example", "proxied.example"] {
        assert!(ask_of(&resolver, name, RecordType::A).await.1[0].starts_with("198.18."), "{name}");
    }
    // A server is configured but not asked: the name belongs to the proxy.
    assert_eq!(ask_of(&resolver, "proxied.example", RecordType::MX).await, (ResponseCode::NoError, vec![]));
}

#[tokio::test]
async fn with_resolve_the_hosts_resolver_answers_for_every_name() {
    let resolver = resolver(Mode::Resolve, Vec::new());
    assert_eq!(
        ask_of(&resolver, "there.example", RecordType::A).await,
        (ResponseCode::NoError, vec!["192.0.2.1".to_owned()])
    );
    assert_eq!(
        ask_of(&resolver, "there.example", RecordType::AAAA).await,
        (ResponseCode::NoError, vec!["2001:db8::1".to_owned()])
    );
    assert_eq!(ask_of(&resolver, "nowhere.example", RecordType::A).await, (ResponseCode::NXDomain, vec![]));
    assert_eq!(ask_of(&resolver, "down.example", RecordType::A).await, (ResponseCode::ServFail, vec![]));
    assert_eq!(
        ask_of(&resolver, "db.localhost", RecordType::A).await,
        (ResponseCode::NoError, vec!["127.0.0.1".to_owned()])
    );
    assert_eq!(ask_of(&resolver, "there.example", RecordType::HTTPS).await.0, ResponseCode::NoError);
    assert_eq!(
        ask_of(&resolver, "there.example", RecordType::TXT).await.0,
        ResponseCode::ServFail,
        "no server"
    );
}

#[tokio::test]
async fn other_types_are_the_servers_and_forged_answers_are_not_taken() {
    let server = TokioUdpSocket::bind("127.0.0.1:0").await.unwrap();
    let resolver = resolver(Mode::Name, vec![server.local_addr().unwrap()]);
    let serving = tokio::spawn(async move {
        let mut buffer = [0; 512];
        let (len, from) = server.recv_from(&mut buffer).await.unwrap();
        let asked = Message::from_vec(&buffer[..len]).unwrap();
        let mut reply = Message::response(asked.metadata.id, OpCode::Query);
        reply.add_query(asked.queries[0].clone());
        reply.metadata.response_code = ResponseCode::NXDomain;
        let mut forged = reply.clone();
        forged.metadata.id ^= 1;
        forged.metadata.response_code = ResponseCode::Refused;
        let mut other = reply.clone();
        other.queries = question("other.example", RecordType::SRV).queries;
        for message in [forged, other, reply] {
            server.send_to(&message.to_vec().unwrap(), from).await.unwrap();
        }
    });
    assert_eq!(
        ask_of(&resolver, "_sip._tcp.there.example", RecordType::SRV).await,
        (ResponseCode::NXDomain, vec![])
    );
    serving.await.unwrap();
}

#[test]
fn servers_are_those_of_resolv_conf() {
    let text = "# a\nsearch x\nnameserver 192.0.2.1\nnameserver\tfe80::1%eth0\n nameserver 2001:db8::1\n";
    assert_eq!(servers(text), ["192.0.2.1:53".parse().unwrap(), "[2001:db8::1]:53".parse().unwrap()]);
    assert_eq!(servers(""), ["127.0.0.1:53".parse().unwrap()]);
}
