//! Programs of others over UDP: iperf3, clients of NTP and of STUN. They pass `run` through SOCKS5 and CONNECT-UDP, and a `tproxy` router.

use crate::node::{Record, Up};
use sidetrack_testkit::{Line, Node, eventually, is_root};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A server that ends with the test.
struct Server(Child);

impl Server {
    /// None if it is not installed.
    fn start(host: &Node, program: &str, arguments: &[&str]) -> Option<Self> {
        let mut server = Command::new(program);
        server.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = host.run(move || server.spawn());
        if started.is_err() {
            eprintln!("skipped: needs {program}");
        }
        started.ok().map(Self)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The servers of 10.0.2.1, each where it is installed: iperf3, chrony and coturn. STUN needs the second address.
fn servers(host: &Node, folder: &Path) -> Option<[Server; 3]> {
    host.ip("addr add 10.0.2.2/24 dev eth0");
    let (config, pid) = (folder.join("server.conf"), folder.join("server.pid"));
    let text = format!(
        "local stratum 5\nallow\nbindaddress 10.0.2.1\ncmdport 0\nbindcmdaddress /\npidfile {}\n",
        pid.display()
    );
    std::fs::write(&config, text).expect("written");
    let turn = ["-n", "-S", "-L", "10.0.2.1", "-L", "10.0.2.2", "--no-tls", "--no-dtls", "--no-cli"];
    let own_pid = folder.join("turn.pid");
    let turn: Vec<_> =
        turn.into_iter().chain(["--log-file", "stdout", "--pidfile", own_pid.to_str()?]).collect();
    Some([
        Server::start(host, "iperf3", &["-s", "-B", "10.0.2.1"])?,
        Server::start(host, "/usr/sbin/chronyd", &["-d", "-x", "-u", "root", "-f", config.to_str()?])?,
        Server::start(host, "turnserver", &turn)?,
    ])
}

/// How programs of the client's host reach the servers.
struct Way<'a> {
    host: &'a Node,
    /// The hop of `sidetrack run`; none for a program that is started as it is.
    via: Option<&'a str>,
}

impl Way<'_> {
    fn command(&self, command: &[&str]) -> Command {
        let Some(via) = self.via else {
            let mut plain = Command::new(command[0]);
            plain.args(&command[1..]);
            return plain;
        };
        let mut run = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        run.env_remove("SIDETRACK_VIA").args(["run", "--quiet", "--via", via, "--"]).args(command);
        run
    }

    /// Runs it, until what it prints has this text, and returns that: its server may be up later.
    fn until(&self, text: &str, command: &[&str]) -> String {
        let timed: Vec<_> = ["timeout", "30"].iter().chain(command).copied().collect();
        let mut said = String::new();
        eventually(&format!("{command:?} says {text:?}"), || {
            let mut command = self.command(&timed);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            // Awaited elsewhere, so that several programs run at a time.
            let started = self.host.run(move || command.spawn()).expect("it starts");
            let done = started.wait_with_output().expect("it ends");
            said =
                String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
            said.contains(text)
        });
        said
    }

    /// Asks for the time by two programs, and sends 200 datagrams of 1,200 bytes in both directions.
    fn time_and_bulk(&self, chrony: &str) {
        self.until("10.0.2.1", &["ntpdate", "-q", "10.0.2.1"]);
        let said =
            self.until("System clock wrong by", &["/usr/sbin/chronyd", "-Q", "-u", "root", "-f", chrony]);
        assert!(said.contains("(ignored)"), "{said}");
        let load = ["iperf3", "-u", "-c", "10.0.2.1", "-l", "1200", "-n", "240000", "-b", "20M", "--bidir"];
        let said = self.until("iperf Done.", &load);
        assert!(said.contains("receiver"), "{said}");
    }

    /// What coturn's client says of the mapping and, of a client behind one, of the filtering.
    fn behaviour(&self, own: &[&str]) -> String {
        let command = ["turnutils_natdiscovery", "-m", "-f"].iter().chain(own).chain(&["10.0.2.1"]);
        self.until("Filtering!", &command.copied().collect::<Vec<_>>())
    }
}

/// A router whose listeners take hosts and hops.
fn gateway(line: &Line) -> Up {
    let tables = "[limits]\ndrain_ms = 0\n\
        [[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"10.0.1.254:1080\"\n\
        [[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"10.0.1.254:3128\"\n\
        [[listen]]\nname = \"lan\"\nkind = \"tproxy\"\nprotocol = \"udp\"\ninterfaces = [\"to-client\"]\n\
        [[rule]]\nname = \"all\"\nmatch = { to = \"10.0.2.0/24\" }\ncarrier = \"direct\"\nkernel = \"never\"\n";
    line.router.run(move || Up::start("default = \"deny\"\n", tables))
}

/// Whether one of the records is of a flow of this listener and port that had datagrams in both directions.
fn carried(records: &[Record], listener: &str, port: u16) -> bool {
    records.iter().any(|record| {
        (record.text("listener"), record.text("protocol")) == (listener, "udp")
            && record.text("orig_dst").ends_with(&format!(":{port}"))
            && record.number("packets_up") > 0
            && record.number("packets_down") > 0
    })
}

#[test]
fn iperf3_clients_of_ntp_and_clients_of_stun_pass_every_way() {
    if !is_root() {
        return;
    }
    let (line, folder) = (Line::new(), tempfile::tempdir().expect("a folder"));
    let Some(_servers) = servers(&line.server, folder.path()) else { return };
    let config = folder.path().join("client.conf");
    // It removes its file when it ends.
    let pid = folder.path().join("client.pid");
    let text = format!(
        "server 10.0.2.1 iburst maxsamples 1\ncmdport 0\nbindcmdaddress /\npidfile {}\n",
        pid.display()
    );
    std::fs::write(&config, text).expect("written");
    let up = gateway(&line);
    let way = |via| Way { host: &line.client, via };
    let (socks, web) = (Some("socks5://10.0.1.254:1080"), Some("http://10.0.1.254:3128"));
    std::thread::scope(|scope| {
        for (via, own) in [(socks, &[][..]), (None, &["-L", "10.0.1.1"])] {
            scope.spawn(move || {
                let said = way(via).behaviour(own);
                assert!(said.contains("NAT with Endpoint Independent Mapping!"), "{via:?}: {said}");
                assert!(said.contains("reflexive addr: 10.0.2.254:"), "{via:?}: {said}");
            });
        }
        for via in [socks, web, None] {
            way(via).time_and_bulk(config.to_str().expect("a path"));
        }
    });
    let (status, records) = up.stop();
    assert!(status.success());
    for (listener, port) in ["socks", "web", "lan"].iter().flat_map(|name| [(name, 123), (name, 5201)]) {
        assert!(carried(&records, listener, port), "{listener} {port}: {records:?}");
    }
}

#[test]
fn a_client_of_quic_is_carried_by_the_name_that_it_asks_for() {
    if !is_root() {
        return;
    }
    let (line, folder) = (Line::new(), tempfile::tempdir().expect("a folder"));
    let at = |name: &str| folder.path().join(name).to_str().expect("a path").to_owned();
    let made = sidetrack::tls::self_signed("quic.example", 1).expect("a certificate");
    std::fs::write(at("cert.pem"), &made.certificate_pem).expect("written");
    std::fs::write(at("key.pem"), &made.key_pem).expect("written");
    std::fs::create_dir(at("pages")).and_then(|()| std::fs::create_dir(at("got"))).expect("folders");
    std::fs::write(at("pages/page"), "Hello over QUIC").expect("written");
    std::fs::write(at("resolv.conf"), "nameserver 10.0.1.254\n").expect("written");
    let arguments = ["-q", "-d", &at("pages"), "10.0.2.1", "4433", &at("key.pem"), &at("cert.pem")];
    let Some(_server) = Server::start(&line.server, "/usr/sbin/gtlsserver", &arguments) else { return };
    // No name server answers, and none has to: the rule leads to an address.
    let tables = "[limits]\ndrain_ms = 0\n[dns]\naddress = \"10.0.1.254:53\"\nfrom = [\"10.0.1.0/24\"]\nservers = [\"127.0.0.1:9\"]\n\
        [[listen]]\nname = \"lan\"\nkind = \"redirect\"\nprotocol = \"udp\"\nlocal = false\nforwarded = true\n\
        interfaces = [\"to-client\"]\n\
        [[rule]]\nname = \"quic\"\nmatch = { host = \"quic.example\", protocol = \"udp\" }\nto = \"10.0.2.1:4433\"\n\
        carrier = \"direct\"\n";
    let up = line.router.run(move || Up::start("default = \"deny\"\n", tables));
    // The client asks the resolver that the system names.
    let ask = |name: &str| {
        let script = format!(
            "mount --bind {} /etc/resolv.conf && exec timeout 60 gtlsclient -q --exit-on-all-streams-close --download={} \
             {name} 4433 https://{name}/page",
            at("resolv.conf"),
            at("got")
        );
        let mut client = Command::new("unshare");
        client.args(["--mount", "sh", "-c", &script]).stdin(Stdio::null());
        line.client.run(move || client.output()).expect("it starts")
    };
    let got = || std::fs::read_to_string(at("got/page")).unwrap_or_default() == "Hello over QUIC";
    // The server may come up later.
    eventually("the page comes", || ask("quic.example").status.success() && got());
    let denied = ask("other.example");
    assert!(String::from_utf8_lossy(&denied.stderr).contains("getaddrinfo"), "{denied:?}");
    let (_, records) = up.stop();
    let name = |record: &Record| (record.text("rule").to_owned(), record.text("orig_dst").to_owned());
    assert!(records.iter().all(|record| name(record) == ("quic".to_owned(), "quic.example:4433".to_owned())));
    assert!(carried(&records, "lan", 4433), "{records:?}");
}
