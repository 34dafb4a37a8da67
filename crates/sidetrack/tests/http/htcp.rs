//! HTCP: with datagrams of the test's own, and with Squid as a sibling in both directions.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Origin, ok};
use crate::proxy::node;
use sidetrack_core::http::cache::format_date;
use sidetrack_core::http::htcp::{Message, parse, write_answer, write_test};
use sidetrack_testkit::{LIMIT, awaited};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Free for both transports at this moment.
fn port() -> u16 {
    loop {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        if UdpSocket::bind(address).is_ok() {
            return address.port();
        }
    }
}

/// With a Date: Squid takes what has none for stale.
fn origin() -> Origin {
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let fields = format!("Cache-Control: max-age=3600|Date: {}", format_date(now_s));
    Origin::start(move |request| ok(&fields, request.path()))
}

fn cache(address: &str, siblings: &str) -> Node {
    let htcp = format!("htcp = {{ address = '{address}', from = ['127.0.0.1'], siblings = [{siblings}] }}");
    node(&format!("cache = {{ {htcp} }}"), "")
}

#[test]
fn questions_are_answered_and_nobody_else_is() {
    let origin = origin();
    let ours: SocketAddr = ([127, 0, 0, 1], port()).into();
    let node = cache(&ours.to_string(), "");
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let mut number = 0;
    let mut ask = |url: &str| {
        number += 1;
        socket.send_to(b"nonsense", ours).unwrap();
        socket.send_to(&write_test(number, url.as_bytes(), b"Accept: */*\r\n").unwrap(), ours).unwrap();
        let mut bytes = [0; 2000];
        let length = socket.recv(&mut bytes).unwrap();
        let Some(Message::Answer { id, has }) = parse(&bytes[..length]) else {
            panic!("{:?}", &bytes[..length])
        };
        assert_eq!(id, number);
        has
    };
    assert!(!ask(&origin.url("/x")));
    Client::new(node.entry()).fetch(&origin.url("/x"));
    assert!(ask(&origin.url("/x")));
    assert!(!ask(&origin.url("/y")) && !ask("https://h/x") && !ask("what"));
    assert_eq!(origin.asked().len(), 1, "who is asked asks nobody");
}

#[test]
fn a_sibling_that_is_silent_costs_its_part_of_a_wait() {
    let origin = origin();
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = silent.local_addr().unwrap();
    let sibling = format!("{{ http = '127.0.0.1:9', htcp = '{at}' }}");
    let node = cache(&format!("127.0.0.1:{}", port()), &sibling);
    let mut client = Client::new(node.entry());
    let began = Instant::now();
    for number in 0..10 {
        let path = format!("/{number}");
        assert_eq!(client.fetch(&origin.url(&path)).text(), path);
    }
    assert!(began.elapsed() < LIMIT);
    let mut bytes = [0; 2000];
    let length = silent.recv(&mut bytes).unwrap();
    let Some(Message::Test(test)) = parse(&bytes[..length]) else { panic!("no question") };
    assert_eq!(test.uri, origin.url("/0").as_bytes());
    assert_eq!(origin.asked().len(), 10);
}

#[test]
fn numbers_of_questions_are_random_and_only_the_siblings_own_port_counts() {
    let origin = origin();
    let (sibling, other) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    let ours: SocketAddr = ([127, 0, 0, 1], port()).into();
    let at = sibling.local_addr().unwrap();
    let node = node(
        &format!(
            "cache = {{ htcp = {{ address = '{ours}', siblings = [{{ http = '127.0.0.1:9', htcp = '{at}' }}] }} }}"
        ),
        "",
    );
    let mut client = Client::new(node.entry());
    let mut bytes = [0; 2000];
    sibling.set_read_timeout(Some(LIMIT)).unwrap();
    let answering = sibling.try_clone().unwrap();
    // A sibling that does not answer would not be asked again for a while.
    let asked = std::thread::spawn(move || {
        let mut bytes = [0; 2000];
        let answered = (0..8).map(|_| {
            let (length, from) = answering.recv_from(&mut bytes).unwrap();
            let Some(Message::Test(test)) = parse(&bytes[..length]) else { panic!("no question") };
            answering.send_to(&write_answer(test.id, None).unwrap(), from).unwrap();
            test.id
        });
        answered.collect::<Vec<u32>>()
    });
    for number in 0..8 {
        let path = format!("/{number}");
        assert_eq!(client.fetch(&origin.url(&path)).text(), path);
    }
    let mut ids = asked.join().expect("eight questions");
    let is_counted = ids.windows(2).any(|pair| pair[1].wrapping_sub(pair[0]) <= 16);
    assert!(!is_counted, "numbers can be guessed: {ids:?}");
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 8);
    // A question from the sibling's port is answered; one of another program on its host is not.
    let question = |id| write_test(id, origin.url("/0").as_bytes(), b"").unwrap();
    other.send_to(&question(1), ours).unwrap();
    sibling.send_to(&question(2), ours).unwrap();
    let length = sibling.recv(&mut bytes).unwrap();
    assert_eq!(parse(&bytes[..length]), Some(Message::Answer { id: 2, has: true }));
    // Questions are answered in turn: had the other one been, its answer would be here.
    other.set_nonblocking(true).unwrap();
    assert!(other.recv(&mut bytes).is_err());
}

/// A Squid whose only sibling is a node. Ended when it goes.
struct Squid {
    child: Child,
    http: SocketAddr,
    htcp: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Squid {
    fn start(sibling: (u16, u16)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (http, htcp) = (port(), port());
        let path = folder.path().display();
        let config = format!(
            "http_port 127.0.0.1:{http}\nhtcp_port {htcp}\nudp_incoming_address 127.0.0.1\nvisible_hostname squid.test\n\
             pid_filename none\naccess_log none\ncache_log {path}/log\ncache_store_log none\ncoredump_dir {path}\n\
             cache_mem 16 MB\nhttp_access allow all\nhtcp_access allow all\nicp_access allow all\n\
             cache_peer 127.0.0.1 sibling {} {} htcp no-digest no-netdb-exchange\nprefer_direct off\nnetdb_filename none\n\
             pinger_enable off\nicon_directory {path}\nerror_directory /usr/share/squid/errors/en\n\
             max_filedescriptors 1024\nicp_query_timeout 2000\n",
            sibling.0, sibling.1
        );
        let file = folder.path().join("squid.conf");
        std::fs::write(&file, config).unwrap();
        if rustix::process::geteuid().is_root() {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        let mut command = Command::new("squid");
        command
            .arg("-N")
            .arg("-f")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = command.spawn().expect("squid: apt-get install squid");
        let address = SocketAddr::from(([127, 0, 0, 1], http));
        let log = folder.path().join("log");
        awaited("squid listens", || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("{status}: {}", std::fs::read_to_string(&log).unwrap_or_default());
            }
            TcpStream::connect(address).ok()
        });
        Self { child, http: address, htcp: ([127, 0, 0, 1], htcp).into(), _folder: folder }
    }
}

impl Drop for Squid {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn squid_and_we_ask_each_other() {
    let origin = origin();
    let asked = |url: &str| origin.asked().iter().filter(|request| url.ends_with(request.path())).count();
    let ours = port();
    // Squid has to know where we are, and we where it is: its ports are known first.
    let other = cache(&format!("127.0.0.1:{ours}"), "");
    let squid = Squid::start((other.entry().port(), ours));
    let mut number = 0;
    awaited("squid finds it here", || {
        number += 1;
        let (path, url) = (format!("/here/{number}"), origin.url(&format!("/here/{number}")));
        assert_eq!(Client::new(other.entry()).fetch(&url).text(), path);
        let response = Client::new(squid.http).fetch(&url);
        assert_eq!((response.status, response.text()), (200, path), "{}", response.head);
        (asked(&url) == 1).then_some(())
    });
    let sibling = format!("{{ http = '{}', htcp = '{}' }}", squid.http, squid.htcp);
    let near = cache(&format!("127.0.0.1:{}", port()), &sibling);
    awaited("we find it at squid", || {
        number += 1;
        let (path, url) = (format!("/there/{number}"), origin.url(&format!("/there/{number}")));
        assert_eq!(Client::new(squid.http).fetch(&url).text(), path);
        let response = Client::new(near.entry()).fetch(&url);
        assert_eq!((response.status, response.text()), (200, path));
        (response.head.contains("detail=sibling") && asked(&url) == 1).then_some(())
    });
    // A miss of both.
    assert_eq!(Client::new(near.entry()).fetch(&origin.url("/nowhere")).text(), "/nowhere");
    assert_eq!(asked("/nowhere"), 1);
}
