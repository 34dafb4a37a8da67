//! Hops of kind `https` that are not ours: Squid, HAProxy and nghttpx.

use super::node::Up;
use rustix::process::Signal;
use sidetrack::tls::{authority, signed};
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, eventually, in_namespace};
use socket2::SockRef;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The port of Squid, in a network of its own.
const PORT: u16 = 8443;

/// A server that returns what it gets at once.
fn mirror() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut buffer = [0; 16_384];
                while let Ok(count @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..count]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A folder with the certificate of `localhost`, its key, both in one file, and their authority.
fn identity() -> tempfile::TempDir {
    let ca = authority(3).unwrap();
    let made = signed("localhost", 3, &ca.identity_pem()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("ca.pem", &ca.certificate_pem);
    write("cert.pem", &made.certificate_pem);
    write("key.pem", &made.key_pem);
    write("both.pem", &made.identity_pem());
    folder
}

/// A listener of TCP or UDP that leads to a server through a hop.
fn listener((name, protocol): (&str, &str), to: SocketAddr, hop: &str) -> String {
    format!(
        "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\nprotocol = \"{protocol}\"\naddress = \"127.0.0.1:0\"\nto = \"{to}\"\n\
         [[rule]]\nname = \"{name}\"\nmatch = {{ protocol = \"{protocol}\", listener = \"{name}\" }}\ncarrier = \"{hop}\"\n"
    )
}

/// A program that is a proxy.
struct Program(Child);

impl Program {
    /// Starts it and waits until it listens on this port.
    fn start(command: &mut Command, package: &str, port: u16) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("apt-get install {package}: {error}"));
        eventually("it listens", || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("{package}: {status}");
            }
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Self(child)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// HAProxy in front of a proxy: by HTTP/2 at the first port, by HTTP/1.1 at the second.
fn haproxy(folder: &Path, [h2, h1]: [u16; 2], proxy: SocketAddr) -> Program {
    let pem = folder.join("both.pem").display().to_string();
    let config = format!(
        "defaults\n mode http\n timeout connect 60s\n timeout client 600s\n timeout server 600s\n\
         frontend h2\n bind 127.0.0.1:{h2} ssl crt {pem} alpn h2,http/1.1\n default_backend proxy\n\
         frontend h1\n bind 127.0.0.1:{h1} ssl crt {pem} alpn http/1.1\n default_backend proxy\n\
         backend proxy\n server one {proxy}\n"
    );
    let file = folder.join("haproxy.cfg");
    std::fs::write(&file, config).unwrap();
    Program::start(Command::new("haproxy").arg("-db").arg("-f").arg(&file), "haproxy", h1)
}

/// nghttpx in front of a proxy, by HTTP/2.
fn nghttpx(folder: &Path, port: u16, proxy: SocketAddr) -> Program {
    let mut command = Command::new("/usr/sbin/nghttpx");
    command
        .args(["--http2-proxy", "--workers=1", "--no-ocsp"])
        .arg(format!("--frontend=127.0.0.1,{port}"))
        .arg(format!("--backend=127.0.0.1,{}", proxy.port()))
        .arg(format!("--conf={}", folder.join("none").display()))
        .args([folder.join("key.pem"), folder.join("cert.pem")]);
    Program::start(&mut command, "nghttp2-proxy", port)
}

/// How many connections a port of this network has.
fn connections(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    let is_one = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        words.next().is_some_and(|own| own.ends_with(&local)) && words.nth(1) == Some("01")
    };
    table.lines().filter(|line| is_one(line)).count()
}

#[test]
fn haproxy_and_nghttpx_are_hops_of_http_2_and_http_1() {
    in_namespace(|| {
        let folder = identity();
        let (server, denied, datagrams) = (mirror(), mirror(), Echo::start("127.0.0.1"));
        let plain = Up::start(
            "default = \"direct\"\n",
            &format!(
                "[[listen]]\nname = \"http\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n\
                 [[rule]]\nname = \"no\"\nmatch = {{ port = {} }}\naction = \"deny\"\n",
                denied.port()
            ),
        );
        let proxy = plain.addresses("http")[0];
        let programs = (haproxy(folder.path(), [8444, 8445], proxy), nghttpx(folder.path(), 8446, proxy));
        for (port, flows_of_one, has_udp) in [(8444, 5, true), (8445, 1, true), (8446, 5, false)] {
            let hop = format!("https://localhost:{port}?ca={}/ca.pem", folder.path().display());
            let tables = [
                listener(("good", "tcp"), server, &hop),
                listener(("denied", "tcp"), denied, &hop),
                listener(("udp", "udp"), datagrams.address, &hop),
            ];
            let mut near = Up::start("default = \"deny\"\n", &tables.concat());
            let content: Vec<u8> = (0..200_000_u32).map(|at| (at % 251) as u8).collect();
            let open = || {
                let stream = TcpStream::connect(near.addresses("good")[0]).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                stream
            };
            let mut flows: Vec<TcpStream> = (0..5).map(|_| open()).collect();
            for flow in &mut flows {
                let (mut up, sent) = (flow.try_clone().unwrap(), content.clone());
                let sending = std::thread::spawn(move || up.write_all(&sent).unwrap());
                let mut came = vec![0; content.len()];
                flow.read_exact(&mut came).unwrap();
                sending.join().unwrap();
                assert!(came == content, "{port}");
            }
            assert_eq!(connections(port), 5 / flows_of_one, "{port}");
            for flow in flows {
                // nghttpx does not forward the end of one direction.
                SockRef::from(&flow).set_linger(Some(Duration::ZERO)).unwrap();
            }
            for _ in 0..5 {
                let record = near.record();
                assert_eq!(record.number("bytes_down"), 200_000, "{port}: {record:?}");
            }
            let mut refused = TcpStream::connect(near.addresses("denied")[0]).unwrap();
            refused.set_read_timeout(Some(LIMIT)).unwrap();
            // A flow that ends at once may reset us here.
            let _ = refused.read(&mut [0; 1]);
            let record = near.record();
            assert!(record.text("detail").contains("403"), "{port}: {record:?}");
            let client = UdpSocket::bind("127.0.0.1:0").unwrap();
            client.connect(near.addresses("udp")[0]).unwrap();
            client.set_read_timeout(Some(LIMIT)).unwrap();
            client.send(b"a datagram").unwrap();
            if has_udp {
                let mut came = [0; 16];
                let length = client.recv(&mut came).unwrap();
                assert_eq!(&came[..length], b"a datagram", "{port}");
            } else {
                let record = near.record();
                assert_eq!(record.text("protocol"), "udp", "{record:?}");
                assert!(record.text("detail").contains("hop 1 of 1 (https://localhost"), "{record:?}");
            }
            near.signal(Signal::TERM);
        }
        drop(programs);
    });
}

struct Squid(Child);

impl Squid {
    /// A proxy of TLS with the certificate in this folder. It denies CONNECT to this port.
    fn start(folder: &Path, denied: u16) -> Self {
        let path = folder.display();
        let config = format!(
            "https_port 127.0.0.1:{PORT} tls-cert={path}/cert.pem tls-key={path}/key.pem\nvisible_hostname squid.test\n\
             pid_filename none\naccess_log none\ncache_log {path}/log\ncoredump_dir {path}\ncache_mem 16 MB\n\
             acl denied port {denied}\nhttp_access deny denied\nhttp_access allow all\nnetdb_filename none\n\
             pinger_enable off\nicon_directory {path}\nerror_directory /usr/share/squid/errors/en\n\
             max_filedescriptors 1024\n"
        );
        let file = folder.join("squid.conf");
        std::fs::write(&file, config).unwrap();
        // It gives up its rights first.
        for name in ["", "cert.pem", "key.pem"] {
            std::fs::set_permissions(folder.join(name), std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        let mut command = Command::new("/usr/sbin/squid");
        command
            .arg("-N")
            .arg("-f")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = command.spawn().expect("squid: apt-get install squid");
        eventually("squid listens", || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("{status}: {}", std::fs::read_to_string(folder.join("log")).unwrap_or_default());
            }
            TcpStream::connect(("127.0.0.1", PORT)).is_ok()
        });
        Self(child)
    }
}

impl Drop for Squid {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn squid_is_a_hop_of_tls() {
    in_namespace(|| {
        let folder = identity();
        let (server, closed, datagrams) = (mirror(), mirror(), Echo::start("127.0.0.1"));
        let squid = Squid::start(folder.path(), closed.port());
        let hop = format!("https://localhost:{PORT}?ca={}/ca.pem", folder.path().display());
        let tables = [
            listener(("good", "tcp"), server, &hop),
            listener(("denied", "tcp"), closed, &hop),
            listener(("udp", "udp"), datagrams.address, &hop),
        ];
        let mut near = Up::start("default = \"deny\"\n", &tables.concat());
        let content: Vec<u8> = (0..500_000_u32).map(|at| (at % 251) as u8).collect();
        let mut stream = TcpStream::connect(near.addresses("good")[0]).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let (mut up, sent) = (stream.try_clone().unwrap(), content.clone());
        let sending = std::thread::spawn(move || up.write_all(&sent).unwrap());
        let mut came = vec![0; content.len()];
        stream.read_exact(&mut came).unwrap();
        sending.join().unwrap();
        assert!(came == content);
        drop(stream);
        let record = near.record();
        assert_eq!(record.text("carrier"), format!("https://localhost:{PORT}"), "{record:?}");
        assert_eq!(record.number("bytes_down"), 500_000, "{record:?}");
        let mut refused = TcpStream::connect(near.addresses("denied")[0]).unwrap();
        refused.set_read_timeout(Some(LIMIT)).unwrap();
        // A flow that ends at once may reset us here.
        let _ = refused.read(&mut [0; 1]);
        let record = near.record();
        assert_eq!(record.text("reason"), "hop_failed", "{record:?}");
        assert!(record.text("detail").contains("403"), "{record:?}");
        // It knows no CONNECT-UDP.
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.send_to(b"x", near.addresses("udp")[0]).unwrap();
        let record = near.record();
        assert_eq!(record.text("protocol"), "udp", "{record:?}");
        assert!(record.text("detail").contains("hop 1 of 1 (https://localhost"), "{record:?}");
        assert_ne!(record.text("reason"), "ok", "{record:?}");
        near.signal(Signal::TERM);
        drop(squid);
    });
}
