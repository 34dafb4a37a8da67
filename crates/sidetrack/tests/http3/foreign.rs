//! Hops of kind `https` that are not ours: Squid.

use super::node::Up;
use rustix::process::Signal;
use sidetrack::tls::{authority, signed};
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, eventually, in_namespace};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

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
        let ca = authority(3).unwrap();
        let made = signed("localhost", 3, &ca.identity_pem()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("ca.pem", &ca.certificate_pem);
        write("cert.pem", &made.certificate_pem);
        write("key.pem", &made.key_pem);
        let (server, closed, datagrams) = (mirror(), mirror(), Echo::start("127.0.0.1"));
        let squid = Squid::start(folder.path(), closed.port());
        let hop = format!("https://localhost:{PORT}?ca={}/ca.pem", folder.path().display());
        let listener = |name: &str, protocol: &str, to: SocketAddr| {
            format!(
                "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\nprotocol = \"{protocol}\"\naddress = \"127.0.0.1:0\"\nto = \"{to}\"\n\
                 [[rule]]\nname = \"{name}\"\nmatch = {{ protocol = \"{protocol}\", listener = \"{name}\" }}\ncarrier = \"{hop}\"\n"
            )
        };
        let tables = [
            listener("good", "tcp", server),
            listener("denied", "tcp", closed),
            listener("udp", "udp", datagrams.address),
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
