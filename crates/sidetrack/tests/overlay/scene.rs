//! Four nodes on loopback: `a` dials the relays `b1` and `b2`, both dial `c`. And small applications.

use crate::node::{Dice, Up};
use serde_json::Value;
use sidetrack_core::overlay::key::PublicKey;
use sidetrack_testkit::LIMIT;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Names and public keys; the secrets are in files of these names.
pub(crate) struct Keys {
    folder: tempfile::TempDir,
    keys: Vec<(String, String)>,
}

impl Keys {
    pub(crate) fn new(names: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let key = |name: &&str| {
            let file = folder.path().join(name);
            let made =
                Command::new(env!("CARGO_BIN_EXE_sidetrack")).args(["overlay", "key"]).arg(file).output();
            let made = made.expect("the binary");
            assert!(made.status.success(), "{made:?}");
            ((*name).to_owned(), String::from_utf8(made.stdout).expect("text").trim().to_owned())
        };
        let keys = names.iter().map(key).collect();
        Self { folder, keys }
    }

    /// The same, but for the table: this name is not in it.
    pub(crate) fn without(&self, name: &str) -> Without<'_> {
        Without { keys: self, without: name.to_owned() }
    }

    /// The public key of this node.
    pub(crate) fn public(&self, name: &str) -> PublicKey {
        let (_, key) = self.keys.iter().find(|(known, _)| known == name).expect("a key");
        key.parse().expect("a public key")
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The `[overlay]` of a node; `dials` are those it dials.
    pub(crate) fn section(&self, name: &str, dials: &[(&str, SocketAddr)], listen: bool) -> String {
        let mut text =
            format!("[overlay]\nname = \"{name}\"\nkey_file = \"{}\"\n", self.file(name).display());
        if listen {
            text += "listen = \"127.0.0.1:0\"\n";
        }
        for (node, key) in &self.keys {
            text += &format!("[overlay.node.{node}]\nkey = \"{key}\"\n");
            if let Some((_, address)) = dials.iter().find(|(dialled, _)| dialled == node) {
                text += &format!("address = \"{address}\"\n");
            }
        }
        text
    }
}

/// Keys of which one is revoked.
pub(crate) struct Without<'k> {
    keys: &'k Keys,
    without: String,
}

impl Without<'_> {
    pub(crate) fn section(&self, name: &str, dials: &[(&str, SocketAddr)], listen: bool) -> String {
        let text = self.keys.section(name, dials, listen);
        let (before, rest) =
            text.split_once(&format!("[overlay.node.{}]\n", self.without)).expect("its table");
        // Its one line of a key goes, too.
        let (_, after) = rest.split_once('\n').expect("a key");
        format!("{before}{after}")
    }
}

/// Where a node listens for neighbours.
pub(crate) fn overlay_address(up: &Up) -> SocketAddr {
    let log = up.logged();
    let line = log.lines().find(|line| line.contains(": listening ") && line.contains("kind=\"overlay\""));
    line.and_then(|line| line.rsplit_once("address=")?.1.parse().ok())
        .unwrap_or_else(|| panic!("no address in\n{log}"))
}

/// The four nodes.
pub(crate) struct Scene {
    /// A process that replaces a node reads them again.
    #[allow(dead_code, reason = "only tests of upgrades take them out")]
    pub keys: Keys,
    pub a: Up,
    pub b1: Option<Up>,
    pub b2: Option<Up>,
    pub c: Up,
}

impl Scene {
    /// `server` is where `a`'s listener leads; `c` delivers what `deliver` says.
    pub(crate) fn new(server: SocketAddr, deliver: &str) -> Self {
        Self::through(server, deliver, |_, to| to)
    }

    /// The same; each relay dials `c` where `between` says, which is told the relay's name and where `c` listens.
    pub(crate) fn through(
        server: SocketAddr,
        deliver: &str,
        between: impl FnMut(&str, SocketAddr) -> SocketAddr,
    ) -> Self {
        Self::by_rule(server, deliver, "", between)
    }

    /// The same; `keys` are further keys of the rule.
    pub(crate) fn by_rule(
        server: SocketAddr,
        deliver: &str,
        keys_of_rule: &str,
        between: impl FnMut(&str, SocketAddr) -> SocketAddr,
    ) -> Self {
        let tables = format!(
            "[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
             [[rule]]\nname = \"over\"\ncarrier = \"overlay:c\"\n{keys_of_rule}"
        );
        Self::with(&tables, deliver, between)
    }

    /// The same; `tables` are the listeners and rules of `a`.
    pub(crate) fn with(
        tables: &str,
        deliver: &str,
        mut between: impl FnMut(&str, SocketAddr) -> SocketAddr,
    ) -> Self {
        let keys = Keys::new(&["a", "b1", "b2", "c"]);
        let default = if deliver.contains("[[rule]]") { "default = \"direct\"\n" } else { "" };
        let c = Up::start(default, &(keys.section("c", &[], true) + deliver));
        let [b1, b2] = ["b1", "b2"].map(|name| {
            let to_c = [("c", between(name, overlay_address(&c)))];
            Up::start("", &keys.section(name, &to_c, true))
        });
        let dials = [("b1", overlay_address(&b1)), ("b2", overlay_address(&b2))];
        let a = Up::start("default = \"deny\"\n", &(tables.to_owned() + &keys.section("a", &dials, false)));
        let scene = Self { keys, a, b1: Some(b1), b2: Some(b2), c };
        scene.wait("a path from a to c over both relays", |status| {
            let up = status["links"]
                .as_array()
                .is_some_and(|links| links.iter().filter(|link| link["up"] == true).count() == 2);
            up && !path_to(status, "c").is_empty()
        });
        scene
    }

    /// Where applications connect.
    pub(crate) fn entry(&self) -> SocketAddr {
        self.a.addresses("reverse")[0]
    }

    /// What `a` says of the overlay.
    pub(crate) fn status(&self) -> Value {
        status(&self.a)
    }

    /// Waits until `a` says something that fits.
    pub(crate) fn wait(&self, what: &str, fits: impl Fn(&Value) -> bool) {
        wait_for(&self.a, what, fits);
    }

    /// The relay that flows from `a` to `c` pass now; while a busy machine has kept hellos back there is none.
    pub(crate) fn relay(&self) -> String {
        let mut path = Vec::new();
        sidetrack_testkit::eventually("there is a path", || {
            path = path_to(&self.status(), "c");
            path.len() > 1
        });
        path.swap_remove(1)
    }

    /// The relay that has passed a flow's bytes on. A flow stays where it began, also when the other relay has since become
    /// the nearer one, so that [`Scene::relay`] says nothing of it.
    pub(crate) fn relay_at_work(&self) -> String {
        let mut passed = Vec::new();
        sidetrack_testkit::eventually("a relay passes bytes", || {
            passed = [("b1", &self.b1), ("b2", &self.b2)]
                .iter()
                .filter_map(|(name, up)| up.as_ref().map(|up| (*name, status(up))))
                .filter(|(_, status)| status["relayed_bytes"].as_u64() > Some(0))
                .map(|(name, _)| name.to_owned())
                .collect();
            !passed.is_empty()
        });
        assert_eq!(passed.len(), 1, "one flow, one way: {passed:?}");
        passed.swap_remove(0)
    }

    /// Kills a relay as a power cut would.
    pub(crate) fn kill(&mut self, relay: &str) {
        let up = if relay == "b1" { self.b1.take() } else { self.b2.take() };
        let mut up = up.expect("it runs");
        up.signal(rustix::process::Signal::KILL);
        up.gone();
    }
}

pub(crate) fn status(up: &Up) -> Value {
    serde_json::from_str(&crate::node::admin::show(up, "/v1/overlay")).expect("JSON")
}

pub(crate) fn wait_for(up: &Up, what: &str, fits: impl Fn(&Value) -> bool) {
    let until = Instant::now() + LIMIT;
    loop {
        let status = status(up);
        if fits(&status) {
            return;
        }
        assert!(Instant::now() < until, "no {what} in time: {status:#}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// The names of the nodes on the path.
pub(crate) fn path_to(status: &Value, node: &str) -> Vec<String> {
    let paths = status["paths"].as_array().expect("paths");
    let path = paths.iter().find(|path| path["to"] == node).expect("a member");
    path["path"]
        .as_array()
        .expect("nodes")
        .iter()
        .map(|name| name.as_str().expect("a name").to_owned())
        .collect()
}

/// A server that takes one connection: reads to the end, then answers with bytes of its own, then ends.
pub(crate) struct Server {
    pub address: SocketAddr,
    /// Bytes it has read so far.
    pub taken: Arc<AtomicU64>,
    thread: JoinHandle<std::io::Result<Vec<u8>>>,
}

impl Server {
    pub(crate) fn start(answer: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let taken = Arc::new(AtomicU64::new(0));
        let count = taken.clone();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept()?;
            stream.set_read_timeout(Some(LIMIT))?;
            let mut got = Vec::new();
            let mut buffer = vec![0; 65_536];
            loop {
                match stream.read(&mut buffer)? {
                    0 => break,
                    n => got.extend_from_slice(&buffer[..n]),
                }
                count.store(got.len() as u64, Relaxed);
            }
            stream.write_all(&answer)?;
            Ok(got)
        });
        Self { address, taken, thread }
    }

    /// What it read.
    pub(crate) fn finish(self) -> std::io::Result<Vec<u8>> {
        self.thread.join().expect("no panic")
    }
}

/// Sends all, ends its side, reads to the end.
pub(crate) fn exchange(to: SocketAddr, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(bytes)?;
    stream.shutdown(Shutdown::Write)?;
    let mut got = Vec::new();
    stream.read_to_end(&mut got)?;
    Ok(got)
}

pub(crate) fn random_bytes(seed: u64, length: usize) -> Vec<u8> {
    Dice(seed).bytes(length)
}

/// Memory of its own that a process holds, KiB: neither the text of programs nor what is shared.
pub(crate) fn held_kib(up: &Up) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", up.pid())).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number")
}
