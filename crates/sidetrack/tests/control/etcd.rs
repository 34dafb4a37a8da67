//! etcd with three members on loopback, each a process that can be killed and started again; and our store on it.

use crate::plane::addresses;
use rustix::process::Signal;
use sidetrack::control::settings::{Endpoint, EtcdAt};
use sidetrack::control::store::{EtcdStore, Event, If, Store, StoreError};
use sidetrack::tls::{Mutual, Trust, authority, signed};
use sidetrack_testkit::{LIMIT, eventually};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Three members, in a folder that has `ca.pem` and `etcd.pem`.
pub(crate) struct Etcd {
    members: [Member; 3],
}

struct Member {
    arguments: Vec<String>,
    log: PathBuf,
    child: Child,
}

impl Member {
    fn start(arguments: Vec<String>, log: PathBuf) -> Self {
        let file = std::fs::File::options().create(true).append(true).open(&log).expect("a log");
        let child = Command::new("etcd")
            .args(&arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            // Debian's etcd asks for this on processors that its authors do not test.
            .env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH.replace("aarch64", "arm64"))
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a log"))
            .stderr(file)
            .spawn()
            .expect("etcd (Debian: etcd-server)");
        Self { arguments, log, child }
    }

    fn kill(&mut self) {
        crate::node::send(self.child.id(), Signal::KILL);
        self.child.wait().expect("a child");
    }
}

impl Etcd {
    pub(crate) fn start(folder: &Path) -> (Self, [SocketAddr; 3]) {
        let [a, b, c, x, y, z] = addresses::<6>();
        let (clients, peers) = ([a, b, c], [x, y, z]);
        let cluster: Vec<_> = (0..3).map(|at| format!("m{at}=http://{}", peers[at])).collect();
        let pem = |name: &str| folder.join(name).display().to_string();
        let members = [0, 1, 2].map(|at| {
            let (client, peer) = (format!("https://{}", clients[at]), format!("http://{}", peers[at]));
            let pairs = [
                ("name", format!("m{at}")),
                ("data-dir", pem(&format!("etcd{at}"))),
                ("listen-client-urls", client.clone()),
                ("advertise-client-urls", client),
                ("listen-peer-urls", peer.clone()),
                ("initial-advertise-peer-urls", peer),
                ("initial-cluster", cluster.join(",")),
                ("initial-cluster-token", format!("{a}")),
                ("cert-file", pem("etcd.pem")),
                ("key-file", pem("etcd.pem")),
                ("trusted-ca-file", pem("ca.pem")),
                ("client-cert-auth", "true".to_owned()),
                ("logger", "zap".to_owned()),
                ("log-level", "warn".to_owned()),
            ];
            let arguments = pairs.into_iter().map(|(key, value)| format!("--{key}={value}")).collect();
            Member::start(arguments, folder.join(format!("etcd{at}.log")))
        });
        (Self { members }, clients)
    }

    pub(crate) fn kill(&mut self, at: usize) {
        self.members[at].kill();
    }

    pub(crate) fn restart(&mut self, at: usize) {
        let member = &mut self.members[at];
        *member = Member::start(member.arguments.clone(), member.log.clone());
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for member in &mut self.members {
            if matches!(member.child.try_wait(), Ok(None)) {
                member.kill();
            }
            if std::thread::panicking() {
                eprintln!("{}", std::fs::read_to_string(&member.log).unwrap_or_default());
            }
        }
    }
}

/// The table of an orchestrator's file.
pub(crate) fn table(clients: [SocketAddr; 3]) -> String {
    let urls = clients.map(|client| format!("\"https://{client}\"")).join(", ");
    format!(
        "[etcd]\nendpoints = [{urls}]\nname = \"etcd.example\"\nidentity = \"orchestrator.pem\"\nca = \"ca.pem\"\nlease_s = 3\n"
    )
}

/// A store on a cluster of its own.
struct Site {
    etcd: Etcd,
    clients: [SocketAddr; 3],
    runtime: Runtime,
    folder: tempfile::TempDir,
}

impl Site {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let ca = authority(1).expect("an authority");
        std::fs::write(folder.path().join("ca.pem"), &ca.certificate_pem).expect("written");
        for name in ["etcd", "us"] {
            let made = signed(&format!("{name}.example"), 1, &ca.identity_pem()).expect("a key");
            std::fs::write(folder.path().join(format!("{name}.pem")), made.identity_pem()).expect("written");
        }
        let (etcd, clients) = Etcd::start(folder.path());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        Self { etcd, clients, runtime: runtime.expect("a runtime"), folder }
    }

    /// A store that shows this identity and expects members of this name.
    fn store(&self, ca: &str, identity: &str, name: &str) -> EtcdStore {
        let mutual = Mutual::new(identity, Trust::Authority(ca.into()), b"http/1.1").expect("a key");
        let endpoint = |address: SocketAddr| Endpoint { address: address.to_string(), name: name.to_owned() };
        let at = EtcdAt {
            endpoints: self.clients.map(endpoint).to_vec(),
            mutual: Some(mutual),
            prefix: "here/".to_owned(),
            lease: Duration::from_secs(2),
        };
        EtcdStore::new(at, self.runtime.handle().clone())
    }

    fn ours(&self) -> EtcdStore {
        let read = |name: &str| std::fs::read_to_string(self.folder.path().join(name)).expect("a key");
        let store = self.store(&read("ca.pem"), &read("us.pem"), "etcd.example");
        eventually("etcd has a leader", || store.get("x").is_ok());
        store
    }
}

#[test]
fn a_store_on_etcd_behaves_as_one_in_a_file() {
    let site = Site::start();
    let store = site.ours();
    let mut watch = store.watch("a/", None).expect("a watch");
    let first = store.put("a/1", b"one", If::Absent, None).expect("put");
    assert!(matches!(store.put("a/1", b"two", If::Absent, None), Err(StoreError::Conflict(_))));
    let second = store.put("a/1", b"two", If::Revision(first), None).expect("put");
    assert!(second > first);
    assert!(matches!(store.put("a/1", b"three", If::Revision(first), None), Err(StoreError::Conflict(_))));
    store.put("b", &[0, 255], If::Always, None).expect("put");
    assert_eq!(store.get("b").expect("read").map(|entry| entry.value), Some(vec![0, 255]));
    let keys = store.list("a/").expect("a list").into_iter().map(|(key, _)| key).collect::<Vec<_>>();
    assert_eq!(keys, ["a/1"]);
    assert!(matches!(store.delete("a/1", If::Revision(first)), Err(StoreError::Conflict(_))));
    assert!(store.delete("a/1", If::Revision(second)).expect("deleted"));
    assert!(!store.delete("a/1", If::Always).expect("nothing"));
    let mut seen = || {
        let event = site.next(&mut watch);
        (event.revision, event.entry.map(|entry| entry.value))
    };
    assert_eq!(seen(), (first, Some(b"one".to_vec())));
    assert_eq!(seen(), (second, Some(b"two".to_vec())));
    assert_eq!(seen().1, None);
    let mut again = store.watch("a/", Some(second)).expect("a watch");
    let event = site.next(&mut again);
    assert_eq!(event.revision, second, "from this revision on");
}

#[test]
fn what_is_under_a_lease_of_etcd_goes_with_it() {
    let site = Site::start();
    let store = site.ours();
    let lease = store.grant(Duration::from_secs(2), SystemTime::now()).expect("a lease");
    store.put("a", b"x", If::Always, Some(lease)).expect("put");
    assert_eq!(store.get("a").expect("read").expect("there").lease, Some(lease));
    store.keep_alive(lease, SystemTime::now()).expect("renewed, or the test has paused");
    eventually("the lease is over", || store.get("a").expect("read").is_none());
    assert!(matches!(store.keep_alive(lease, SystemTime::now()), Err(StoreError::NoLease(_))));
    let late = store.put("a", b"x", If::Always, Some(lease));
    assert!(matches!(late, Err(StoreError::NoLease(_))), "{late:?}");
}

#[test]
fn a_member_may_be_lost_and_a_watch_goes_on() {
    let mut site = Site::start();
    let store = site.ours();
    let mut watch = store.watch("", None).expect("a watch");
    for lost in 0..3 {
        site.etcd.kill(lost);
        let key = format!("after/{lost}");
        store.put(&key, b"x", If::Absent, None).expect("two members are enough");
        let event = site.next(&mut watch);
        assert_eq!(event.key, key);
        site.etcd.restart(lost);
        let whole = || site.each_alone(|store| store.get(&key).is_ok_and(|found| found.is_some()));
        eventually("the member is back", whole);
    }
}

impl Site {
    /// The next change that a watch tells of.
    fn next(&self, watch: &mut mpsc::Receiver<Event>) -> Event {
        let next = async { timeout(LIMIT, watch.recv()).await };
        self.runtime.block_on(next).expect("in time").expect("a change")
    }

    /// Whether this holds at each member, asked alone.
    fn each_alone(&self, holds: impl Fn(&EtcdStore) -> bool) -> bool {
        let read = |name: &str| std::fs::read_to_string(self.folder.path().join(name)).expect("a key");
        self.clients.iter().all(|client| {
            let mutual = Mutual::new(&read("us.pem"), Trust::Authority(read("ca.pem").into()), b"http/1.1");
            let endpoint = Endpoint { address: client.to_string(), name: "etcd.example".to_owned() };
            let (endpoints, mutual) = (vec![endpoint], Some(mutual.expect("a key")));
            let at = EtcdAt { endpoints, mutual, prefix: "here/".to_owned(), lease: Duration::from_secs(2) };
            holds(&EtcdStore::new(at, self.runtime.handle().clone()))
        })
    }
}

#[test]
fn both_ends_of_a_connection_to_etcd_are_authenticated() {
    let site = Site::start();
    site.ours();
    let read = |name: &str| std::fs::read_to_string(site.folder.path().join(name)).expect("a key");
    let (ca, us) = (read("ca.pem"), read("us.pem"));
    let foreign = authority(1).expect("an authority");
    let stranger = signed("us.example", 1, &foreign.identity_pem()).expect("a key").identity_pem();
    let wrong = [
        ("our certificate is of another authority", site.store(&ca, &stranger, "etcd.example")),
        ("theirs is of another authority", site.store(&foreign.certificate_pem, &us, "etcd.example")),
        ("theirs has another name", site.store(&ca, &us, "other.example")),
    ];
    // Each is tried for a while: at the same time.
    std::thread::scope(|scope| {
        for (what, store) in &wrong {
            scope.spawn(move || assert!(store.get("x").is_err(), "{what}"));
        }
    });
}
