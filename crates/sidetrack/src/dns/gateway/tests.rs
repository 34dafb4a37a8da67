//! A resolver of a node between clients and name servers of the tests, on loopback.

use super::super::cache::lifetime_s;
use super::*;
use crate::dns::{serve_streams, serve_udp};
use hickory_proto::rr::rdata::{A, CNAME, MX, SOA, TXT};
use hickory_proto::rr::{Name, RData, Record};
use sidetrack_core::names::NameTable;
use sidetrack_core::net::{IpNet, IpSet};
use std::sync::atomic::AtomicU64;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};

const LIMIT: Duration = Duration::from_secs(60);

/// What a test sets.
struct TestRules {
    mode: Mutex<Mode>,
    servers: Arc<[SocketAddr]>,
    denied: Mutex<Vec<String>>,
    now_s: AtomicU64,
    from: IpSet,
}

impl Rules for TestRules {
    fn mode(&self) -> Mode {
        *lock(&self.mode)
    }
    fn may_ask(&self, client: IpAddr) -> bool {
        self.from.contains(client)
    }
    fn servers(&self) -> Arc<[SocketAddr]> {
        self.servers.clone()
    }
    fn queries_per_s(&self) -> u32 {
        40
    }
    fn standing(&self, name: &HostName) -> Standing {
        match name.as_str() {
            name if name.ends_with("denied.example") => Standing::Denied,
            name if name.ends_with("far.example") => Standing::ResolvedElsewhere,
            _ => Standing::ResolvedHere,
        }
    }
    fn is_ours(&self, (client, _): Asker) -> bool {
        client.port() == 1
    }
    fn denied(&self, name: &HostName, _client: Option<IpAddr>) {
        lock(&self.denied).push(name.to_string());
    }
    fn now(&self) -> Instant {
        Instant::from_millis(self.now_s.load(Relaxed) * 1000)
    }
}

/// A name server that counts what it is asked.
struct Server {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
}

impl Server {
    /// Answers as `answer` says; `is_tcp` says how it was asked. `None`: it is silent.
    async fn start(answer: impl Fn(&Message, bool) -> Option<Message> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let socket = UdpSocket::bind(address).await.unwrap();
        let (answer, asked) = (Arc::new(answer), Arc::<AtomicUsize>::default());
        let (count, by_udp) = (asked.clone(), answer.clone());
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            loop {
                let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
                let query = Message::from_vec(&buffer[..length]).unwrap();
                count.fetch_add(1, Relaxed);
                if let Some(reply) = by_udp(&query, false) {
                    let mut forged = reply.clone();
                    forged.metadata.id ^= 1;
                    forged.metadata.response_code = ResponseCode::Refused;
                    for message in [forged, reply] {
                        socket.send_to(&message.to_vec().unwrap(), from).await.unwrap();
                    }
                }
            }
        });
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut query = vec![0; usize::from(stream.read_u16().await.unwrap())];
                stream.read_exact(&mut query).await.unwrap();
                if let Some(reply) = answer(&Message::from_vec(&query).unwrap(), true) {
                    let reply = reply.to_vec().unwrap();
                    stream.write_u16(u16::try_from(reply.len()).unwrap()).await.unwrap();
                    stream.write_all(&reply).await.unwrap();
                }
            }
        });
        Self { address, asked }
    }

    /// Knows `there.example` and names below it.
    async fn usual() -> Self {
        Self::start(|query, is_tcp| Some(usual(query, is_tcp))).await
    }

    async fn silent() -> Self {
        Self::start(|_, _| None).await
    }

    fn asked(&self) -> usize {
        self.asked.load(Relaxed)
    }
}

fn name(text: &str) -> Name {
    Name::from_labels(text.split('.').map(str::as_bytes)).unwrap()
}

fn soa(ttl: u32, minimum: u32) -> Record {
    let data = SOA::new(name("ns.example"), name("admin.example"), 1, 2, 3, 4, minimum);
    Record::from_rdata(name("example"), ttl, RData::SOA(data))
}

fn usual(query: &Message, is_tcp: bool) -> Message {
    let asked = query.queries[0].clone();
    let mut reply = Message::response(query.metadata.id, OpCode::Query);
    reply.add_query(asked.clone());
    let owner = asked.name().clone();
    let text = owner.to_lowercase().to_string();
    let address = |owner: Name| Record::from_rdata(owner, 100, RData::A(A::new(192, 0, 2, 1)));
    match (text.trim_end_matches('.'), asked.query_type()) {
        ("there.example" | "x.far.example", RecordType::A) => {
            reply.add_answer(address(owner));
        }
        ("alias.there.example", RecordType::A) => {
            let target = name("there.example");
            reply.add_answer(Record::from_rdata(owner, 30, RData::CNAME(CNAME(target.clone()))));
            reply.add_answer(address(target));
        }
        ("there.example", RecordType::MX) => {
            let target = name("mail.there.example");
            reply.add_answer(Record::from_rdata(owner, 100, RData::MX(MX::new(1, target.clone()))));
            reply.additionals.push(address(target));
        }
        ("there.example", RecordType::TXT) if is_tcp => {
            for number in 0..20 {
                let text = format!("{number:0200}");
                reply.add_answer(Record::from_rdata(owner.clone(), 100, RData::TXT(TXT::new(vec![text]))));
            }
        }
        ("there.example", RecordType::TXT) => reply.metadata.truncation = true,
        ("there.example", _) => reply.authorities.push(soa(60, 20)),
        ("bare.example", _) => reply.metadata.response_code = ResponseCode::NXDomain,
        _ => {
            reply.metadata.response_code = ResponseCode::NXDomain;
            reply.authorities.push(soa(50, 900));
        }
    }
    reply
}

fn gateway(mode: Mode, servers: &[&Server]) -> (Arc<Gateway>, Arc<TestRules>) {
    let rules = Arc::new(TestRules {
        mode: Mutex::new(mode),
        servers: servers.iter().map(|server| server.address).collect(),
        denied: Mutex::default(),
        now_s: AtomicU64::new(1),
        from: ["127.0.0.0/24"].iter().map(|net| net.parse::<IpNet>().unwrap()).collect(),
    });
    let names = Arc::new(Mutex::new(NameTable::new(16)));
    (Arc::new(Gateway::new(names, rules.clone(), None)), rules)
}

fn query(text: &str, kind: RecordType) -> Message {
    let mut message = Message::new(0x1234, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name(text), kind));
    message
}

fn with_edns(mut query: Message, payload: u16) -> Message {
    let mut edns = Edns::new();
    edns.set_max_payload(payload);
    query.set_edns(edns);
    query
}

async fn ask(gateway: &Gateway, query: &Message, transport: Transport) -> Message {
    let bytes = query.to_vec().unwrap();
    let reply = gateway.answer_to(&bytes, transport, Instant::ZERO, None).await.unwrap();
    let most = query.edns.as_ref().map_or(512, |edns| usize::from(edns.max_payload().max(512)));
    assert!(transport == Transport::Tcp || reply.len() <= most, "{} bytes", reply.len());
    let reply = Message::from_vec(&reply).unwrap();
    assert_eq!((reply.metadata.id, &reply.queries), (0x1234, &query.queries));
    reply
}

async fn told(gateway: &Gateway, text: &str, kind: RecordType) -> (ResponseCode, Vec<String>) {
    let reply = ask(gateway, &query(text, kind), Transport::Udp).await;
    let shown = |record: &Record| format!("{} {}", record.ttl, record.data);
    (reply.metadata.response_code, reply.answers.iter().map(shown).collect())
}

#[tokio::test]
async fn in_name_mode_rules_decide_and_names_get_addresses_that_represent_them() {
    let server = Server::usual().await;
    let (gateway, rules) = gateway(Mode::Name, &[&server]);
    let (code, found) = told(&gateway, "there.example", RecordType::A).await;
    assert_eq!((code, found), (ResponseCode::NoError, vec!["10 198.18.0.2".to_owned()]));
    assert_eq!(server.asked(), 1, "whether it exists");
    told(&gateway, "there.example", RecordType::A).await;
    assert_eq!(server.asked(), 1, "that is kept");
    for kind in [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB] {
        let (code, found) = told(&gateway, "there.example", kind).await;
        // An AAAA query asks whether the name exists, and nothing else leads around the address.
        assert_eq!((code, found.len()), (ResponseCode::NoError, 0), "{kind}");
    }
    assert_eq!(server.asked(), 1);
    let mail = ask(&gateway, &query("there.example", RecordType::MX), Transport::Udp).await;
    assert_eq!((mail.answers.len(), mail.additionals.len()), (1, 0), "no address of a server");
    assert_eq!(told(&gateway, "nowhere.example", RecordType::A).await, (ResponseCode::NXDomain, vec![]));

    let before = server.asked();
    assert!(told(&gateway, "x.far.example", RecordType::A).await.1[0].contains("198.18."));
    assert_eq!(told(&gateway, "x.far.example", RecordType::TXT).await, (ResponseCode::NoError, vec![]));
    let denied =
        ask(&gateway, &with_edns(query("a.denied.example", RecordType::A), 1232), Transport::Udp).await;
    assert_eq!((denied.metadata.response_code, denied.answers.len()), (ResponseCode::NXDomain, 0));
    let bytes = denied.to_vec().unwrap();
    let blocked = [&[0, 15][..], &[0, 42, 0, 15], b"the rules"].concat();
    assert!(bytes.windows(blocked.len()).any(|window| window == blocked), "{bytes:?}");
    assert_eq!(server.asked(), before, "neither is for the name servers of this host");
    assert_eq!(*lock(&rules.denied), ["a.denied.example"]);
    assert_eq!(gateway.held().0, 2);

    let reverse = ask(&gateway, &query("2.0.18.198.in-addr.arpa", RecordType::PTR), Transport::Udp).await;
    assert_eq!(reverse.answers[0].data.to_string().trim_end_matches('.'), "there.example");
    assert_eq!(told(&gateway, "1.2.0.192.in-addr.arpa", RecordType::PTR).await.0, ResponseCode::NXDomain);
    assert_eq!(told(&gateway, "localhost", RecordType::A).await.1, ["10 127.0.0.1"]);
    assert_eq!(server.asked(), before);

    // This process itself dials names, so it needs real addresses.
    let bytes = query("there.example", RecordType::A).to_vec().unwrap();
    let ours = "127.0.0.1:1".parse().unwrap();
    let reply = gateway.answer_to(&bytes, Transport::Udp, Instant::ZERO, Some((ours, ours))).await.unwrap();
    assert_eq!(Message::from_vec(&reply).unwrap().answers[0].data.to_string(), "192.0.2.1");
}

#[tokio::test]
async fn answers_are_kept_for_as_long_as_they_allow_and_their_age_is_told() {
    let server = Server::usual().await;
    let (gateway, rules) = gateway(Mode::Resolve, &[&server]);
    assert_eq!(told(&gateway, "there.example", RecordType::A).await.1, ["100 192.0.2.1"]);
    rules.now_s.fetch_add(40, Relaxed);
    assert_eq!(told(&gateway, "THERE.example", RecordType::A).await.1, ["60 192.0.2.1"]);
    let edns = ask(&gateway, &with_edns(query("there.example", RecordType::A), 4096), Transport::Tcp).await;
    assert_eq!((edns.answers[0].ttl, edns.edns.unwrap().max_payload()), (60, 1232));
    assert_eq!(server.asked(), 1);
    rules.now_s.fetch_add(60, Relaxed);
    assert_eq!(told(&gateway, "there.example", RecordType::A).await.1, ["100 192.0.2.1"]);
    assert_eq!(server.asked(), 2, "its time was over");

    let alias = ["30 there.example".to_owned(), "100 192.0.2.1".to_owned()];
    let shown = |found: Vec<String>| found.into_iter().map(|text| text.trim_end_matches('.').to_owned());
    let found = told(&gateway, "alias.there.example", RecordType::A).await.1;
    assert_eq!(shown(found).collect::<Vec<_>>(), alias);

    // No data: 20 s, the minimum of the zone. No name: 50 s, as long as the SOA record lives. Without one: not at all.
    for (asked, kind, kept_s) in [
        ("there.example", RecordType::AAAA, 20),
        ("no.example", RecordType::A, 50),
        ("bare.example", RecordType::A, 0),
    ] {
        let before = server.asked();
        let code = told(&gateway, asked, kind).await.0;
        if kept_s > 0 {
            rules.now_s.fetch_add(kept_s - 1, Relaxed);
            assert_eq!(told(&gateway, asked, kind).await, (code, vec![]));
            assert_eq!(server.asked(), before + 1, "{asked} is kept");
        }
        rules.now_s.fetch_add(1, Relaxed);
        told(&gateway, asked, kind).await;
        assert_eq!(server.asked(), before + 2, "{asked} is asked for again");
    }
}

#[test]
fn the_cache_has_a_bound_and_keeps_nothing_that_may_not_be_kept() {
    let key = |number: u32| Key {
        name: name(&format!("n{number}.example")),
        kind: 1,
        dnssec: false,
        unchecked: false,
    };
    let message = |ttl: u32| {
        let mut message = Message::response(0, OpCode::Query);
        message.add_answer(Record::from_rdata(name("a.example"), ttl, RData::A(A::new(192, 0, 2, 1))));
        Arc::new(message)
    };
    let mut cache = Cache::new(10 * (100 + 128));
    for number in 0..1000 {
        cache.put(&key(number), &message(1000 - number % 100), 100, Instant::ZERO);
        assert!(cache.len() <= 10);
    }
    assert_eq!(cache.len(), 10);
    cache.put(&key(1), &message(5), usize::MAX, Instant::ZERO);
    assert_eq!(cache.len(), 0, "longer than the cache");
    cache.put(&key(1), &message(0), 100, Instant::ZERO);
    assert_eq!(cache.len(), 0, "for this query only");
    let of = |change: fn(&mut Message)| {
        let mut message = (*message(u32::MAX)).clone();
        change(&mut message);
        lifetime_s(&message)
    };
    assert_eq!(of(|_| {}), Some(86_400));
    assert_eq!(of(|message| message.metadata.truncation = true), None);
    assert_eq!(of(|message| message.metadata.response_code = ResponseCode::ServFail), Some(1));
    assert_eq!(of(|message| message.metadata.response_code = ResponseCode::Refused), None);
}

#[tokio::test]
async fn long_answers_come_whole_over_tcp_only() {
    let server = Server::usual().await;
    let (gateway, _) = gateway(Mode::Resolve, &[&server]);
    for query in [
        query("there.example", RecordType::TXT),
        with_edns(query("there.example", RecordType::TXT), 100),
        with_edns(query("there.example", RecordType::TXT), 65_000),
    ] {
        let reply = ask(&gateway, &query, Transport::Udp).await;
        assert!(reply.metadata.truncation && reply.answers.is_empty());
    }
    let reply = ask(&gateway, &query("there.example", RecordType::TXT), Transport::Tcp).await;
    assert_eq!((reply.metadata.truncation, reply.answers.len()), (false, 20));
    assert_eq!(server.asked(), 1, "the server's truncated answer was fetched by TCP, and is kept");
}

#[tokio::test]
async fn a_silent_server_costs_one_wait_and_without_any_the_answer_is_a_failure() {
    let (silent, server) = (Server::silent().await, Server::usual().await);
    let both = gateway(Mode::Resolve, &[&silent, &server]).0;
    let (none, rules) = gateway(Mode::Resolve, &[&silent]);
    let failing = async {
        assert_eq!(told(&none, "there.example", RecordType::A).await.0, ResponseCode::ServFail);
        let before = silent.asked();
        assert_eq!(told(&none, "there.example", RecordType::A).await.0, ResponseCode::ServFail);
        assert_eq!(silent.asked(), before, "a failure is kept for a second");
        rules.now_s.fetch_add(1, Relaxed);
    };
    let answering = async {
        let (asked, others) = (query("there.example", RecordType::A), query("no.example", RecordType::A));
        // If this process is paused for seconds, the time for all servers is over first.
        let mut tries = 0;
        while ask(&both, &asked, Transport::Udp).await.answers.is_empty() {
            tries += 1;
            assert!(tries < 10);
        }
        assert_eq!(ask(&both, &others, Transport::Udp).await.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(both.good.load(Relaxed), 1, "the good one is asked first from now on");
    };
    tokio::join!(failing, answering);
}

#[tokio::test]
async fn clients_that_ask_the_same_wait_together_and_one_client_cannot_take_all_room() {
    let server = Server::silent().await;
    let (gateway, _) = gateway(Mode::Resolve, &[&server]);
    let asked = query("there.example", RecordType::A).to_vec().unwrap();
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let (gateway, asked) = (gateway.clone(), asked.clone());
        waiting.spawn(async move { gateway.answer_to(&asked, Transport::Udp, Instant::ZERO, None).await });
    }
    while let Some(reply) = waiting.join_next().await {
        let reply = Message::from_vec(&reply.unwrap().unwrap()).unwrap();
        assert_eq!(reply.metadata.response_code, ResponseCode::ServFail);
    }
    // Once in each round, unless this process was paused for so long that a client began anew.
    assert!((2..10).contains(&server.asked()), "{}", server.asked());
    let client = "192.0.2.9".parse().unwrap();
    let held: Vec<_> = (0..100).filter_map(|_| Share::take(&gateway.per_client, client)).collect();
    assert_eq!(held.len(), 64);
    drop(held);
    assert_eq!(lock(&gateway.per_client).live(client), 0);
}

#[tokio::test]
async fn name_servers_are_not_asked_strange_things() {
    let server = Server::usual().await;
    let (gateway, _) = gateway(Mode::Resolve, &[&server]);
    for kind in [RecordType::AXFR, RecordType::IXFR] {
        assert_eq!(told(&gateway, "there.example", kind).await.0, ResponseCode::Refused);
    }
    let mut two = query("there.example", RecordType::A);
    two.add_query(two.queries[0].clone());
    let reply = gateway.answer_to(&two.to_vec().unwrap(), Transport::Udp, Instant::ZERO, None).await.unwrap();
    assert_eq!(Message::from_vec(&reply).unwrap().metadata.response_code, ResponseCode::FormErr);
    let mut answer = query("there.example", RecordType::A);
    answer.metadata.message_type = MessageType::Response;
    for bytes in [answer.to_vec().unwrap(), vec![0; 11]] {
        assert_eq!(gateway.answer_to(&bytes, Transport::Tcp, Instant::ZERO, None).await, None);
    }
    assert_eq!(server.asked(), 0);
    assert_eq!(gateway.counts.without_answer().find(|(word, _)| *word == "no_query"), Some(("no_query", 2)));
    // The names of addresses that are not ours are the servers' to tell.
    told(&gateway, "1.2.0.192.in-addr.arpa", RecordType::PTR).await;
    assert_eq!(server.asked(), 1);
}

#[tokio::test]
async fn a_client_that_asks_too_often_comes_by_tcp_and_strangers_hear_nothing() {
    let (gateway, rules) = gateway(Mode::Name, &[]);
    let socket = sidetrack_sys::udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(serve_udp(socket, gateway.clone(), || Instant::ZERO));
    let stranger = UdpSocket::bind("127.0.1.1:0").await.unwrap();
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let asked = query("localhost", RecordType::A).to_vec().unwrap();
    stranger.send_to(&asked, address).await.unwrap();
    let mut truncated = 0;
    for number in 0..80 {
        client.send_to(&asked, address).await.unwrap();
        let mut buffer = [0; 512];
        let length = timeout(LIMIT, client.recv(&mut buffer)).await.unwrap().unwrap();
        let reply = Message::from_vec(&buffer[..length]).unwrap();
        assert_eq!(reply.metadata.truncation, number >= 40);
        if reply.metadata.truncation {
            truncated += 1;
            assert!(length <= asked.len(), "no more bytes than were sent");
        }
    }
    assert_eq!(truncated, 40);
    client.send_to(&asked, address).await.unwrap();
    rules.now_s.fetch_add(1, Relaxed);
    let dropped = || gateway.counts.without_answer().collect::<Vec<_>>();
    for word in ["stranger", "slowed"] {
        assert!(dropped().iter().any(|(other, count)| *other == word && *count > 0), "{:?}", dropped());
    }
    assert_eq!(gateway.counts.queries()[0].1, gateway.counts.answers().map(|(_, count)| count).sum::<u64>());
}

async fn connect(from: &str, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(from.parse().unwrap()).unwrap();
    timeout(LIMIT, socket.connect(to)).await.unwrap().unwrap()
}

#[tokio::test]
async fn connections_are_bounded_for_each_client_and_questions_on_one_are_answered_in_order() {
    let (gateway, _) = gateway(Mode::Name, &[]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve_streams(listener, gateway.clone(), || Instant::ZERO));
    let mut streams = Vec::new();
    for _ in 0..40 {
        let mut stream = connect("127.0.0.1:0", address).await;
        // One that says something, and one byte of a length at that.
        let _ = stream.write_all(&[0]).await;
        streams.push(stream);
    }
    let crowded = || gateway.counts.without_answer().find(|(word, _)| *word == "connections").unwrap().1;
    timeout(LIMIT, async {
        while crowded() < 8 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .unwrap();
    let mut other = connect("127.0.0.2:0", address).await;
    let mut framed = Vec::new();
    for asked in ["a.localhost", "b.far.example", "c.far.example"] {
        let bytes = query(asked, RecordType::A).to_vec().unwrap();
        framed.extend(u16::try_from(bytes.len()).unwrap().to_be_bytes());
        framed.extend(bytes);
    }
    other.write_all(&framed).await.unwrap();
    for expected in ["127.0.0.1", "198.18.0.2", "198.18.0.3"] {
        let length = timeout(LIMIT, other.read_u16()).await.unwrap().unwrap();
        let mut reply = vec![0; usize::from(length)];
        other.read_exact(&mut reply).await.unwrap();
        assert_eq!(Message::from_vec(&reply).unwrap().answers[0].data.to_string(), expected);
    }
    let mut stranger = connect("127.0.1.1:0", address).await;
    let gone = timeout(LIMIT, stranger.read(&mut [0])).await.unwrap();
    assert!(!matches!(gone, Ok(1..)), "closed or reset");
}
