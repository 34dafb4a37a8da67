//! A name server that gives the answers of a test, and a host that asks no other.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::sync::{Arc, Mutex};

/// The addresses of each name; the answers in turn, the last one for ever.
pub(crate) type Answers = BTreeMap<&'static str, Vec<Vec<Ipv4Addr>>>;

/// The name server. It serves in the network namespace of the thread that makes it.
pub(crate) struct NameServer {
    asked: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl NameServer {
    /// Serves on 127.0.0.1 until the test's process ends, and makes it the one name server of this thread and its children.
    pub(crate) fn start(answers: Answers) -> Self {
        use_only_our_resolver();
        Self::at("127.0.0.1:53", answers)
    }

    /// Serves on this address until the test's process ends.
    pub(crate) fn at(address: &str, answers: Answers) -> Self {
        let socket = UdpSocket::bind(address).expect("port 53 of a namespace of our own");
        let asked = Arc::<Mutex<BTreeMap<String, usize>>>::default();
        let count = asked.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 1024];
            while let Ok((n, peer)) = socket.recv_from(&mut buffer) {
                let Some(answer) = answer(&buffer[..n], &answers, &count) else { continue };
                let _ = socket.send_to(&answer, peer);
            }
        });
        Self { asked }
    }

    /// How often the IPv4 addresses of a name were asked for.
    pub(crate) fn asked(&self, name: &str) -> usize {
        self.asked.lock().expect("no test has panicked").get(name).copied().unwrap_or_default()
    }
}

/// One answer (RFC 1035 Sec. 4): the question again, and an A record for each address.
fn answer(query: &[u8], answers: &Answers, asked: &Mutex<BTreeMap<String, usize>>) -> Option<Vec<u8>> {
    let (mut labels, mut at) = (Vec::new(), 12);
    while *query.get(at)? != 0 {
        let end = at + 1 + usize::from(query[at]);
        labels.push(String::from_utf8_lossy(query.get(at + 1..end)?).into_owned());
        at = end;
    }
    let (name, end) = (labels.join("."), at + 5);
    let is_a = query.get(at + 1..at + 3)? == [0, 1];
    let addresses = match answers.get(&*name) {
        Some(all) if is_a => {
            let mut asked = asked.lock().expect("no test has panicked");
            let times = asked.entry(name).or_default();
            *times += 1;
            all.get(*times - 1).or(all.last()).cloned().unwrap_or_default()
        }
        _ => Vec::new(),
    };
    let mut out =
        [&query[..2], &[0x81, 0x80, 0, 1, 0, u8::try_from(addresses.len()).ok()?, 0, 0, 0, 0]].concat();
    out.extend_from_slice(query.get(12..end)?);
    for address in addresses {
        out.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        out.extend(address.octets());
    }
    Some(out)
}

/// Gives this thread, and what it starts, files of its own instead of the host's. Their name server is 127.0.0.1.
pub(crate) fn use_only_our_resolver() {
    #[expect(deprecated, reason = "the new form is unsafe because of CLONE_FILES, which is not used here")]
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS).expect("a mount namespace");
    mount(&["--make-rprivate", "/"]);
    let folder = tempfile::tempdir().expect("a folder");
    for (file, text) in [
        ("resolv.conf", "nameserver 127.0.0.1\noptions timeout:5 attempts:2\n"),
        ("nsswitch.conf", "hosts: files dns\n"),
    ] {
        let own = folder.path().join(file);
        std::fs::write(&own, text).expect("written");
        mount(&["--bind", own.to_str().expect("a path in text"), &format!("/etc/{file}")]);
    }
    // The mounts keep the files.
}

fn mount(arguments: &[&str]) {
    let output = Command::new("mount").args(arguments).output().expect("the mount tool");
    assert!(output.status.success(), "mount {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
