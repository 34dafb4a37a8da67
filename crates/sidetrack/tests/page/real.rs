//! The page of a `sidetrack up` process with traffic: functions, an overlay of two nodes, and a restart under the open page. The
//! browser reaches the admin socket as `ssh -L` would bring it.

use crate::chromium::Browser;
use crate::node::Up;
use crate::node::peers::{Client, Server};
use crate::overlay_scene::{Keys, overlay_address};
use crate::screens::{go, shown};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// Carries connections to the admin socket of the node that runs now.
struct Bridge {
    address: SocketAddr,
    socket: Arc<Mutex<PathBuf>>,
    is_over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Bridge {
    fn to(socket: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (socket, is_over) = (Arc::new(Mutex::new(socket)), Arc::new(AtomicBool::new(false)));
        let (to, ends) = (socket.clone(), is_over.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if ends.load(Relaxed) {
                    return;
                }
                let path = to.lock().expect("whole").clone();
                // While no node runs, the browser's connection ends.
                if let Ok(socket) = UnixStream::connect(path) {
                    join(stream, socket);
                }
            }
        });
        Self { address, socket, is_over, thread: Some(thread) }
    }
}

/// Copies both ways until either end closes.
fn join(tcp: TcpStream, unix: UnixStream) {
    let (mut from, mut to) = (tcp.try_clone().expect("a copy"), unix.try_clone().expect("a copy"));
    std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
    let (mut from, mut to) = (unix, tcp);
    std::thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.is_over.store(true, Relaxed);
        // Wakes the thread that waits in accept(2).
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Two nodes of an overlay, and servers behind them.
struct Place {
    keys: Keys,
    far: Up,
    plain: Server,
    over: Server,
}

impl Place {
    fn new() -> Self {
        let keys = Keys::new(&["a", "c"]);
        let deliver = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";
        let far = Up::start("default = \"direct\"\n", &(keys.section("c", &[], true) + deliver));
        Self { keys, far, plain: Server::start("127.0.0.1"), over: Server::start("127.0.0.2") }
    }

    /// Starts the node whose page is looked at.
    fn node(&self) -> Up {
        let Self { keys, far, plain, over } = self;
        let listen = |name: &str, to: SocketAddr| {
            format!(
                "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{to}\"\n"
            )
        };
        let tables = listen("plain", plain.address) + &listen("far", over.address);
        let rest = "[function.audit]\nkind = \"count\"\n[function.gate]\nkind = \"filter\"\ndeny_words = [\"FORBIDDEN\"]\n\
            [[rule]]\nname = \"over\"\nmatch = { to = \"127.0.0.2/32\" }\ncarrier = \"overlay:c\"\n\
            [[rule]]\nname = \"records\"\nmatch = { to = \"127.0.0.1/32\" }\ncarrier = \"direct\"\nchain = [\"audit\", \"gate\"]\n";
        let section = keys.section("a", &[("c", overlay_address(far))], false);
        Up::start("default = \"deny\"\n", &(tables + rest + &section))
    }
}

/// Flows that stay: two through the functions, one over the overlay.
fn flows(node: &Up) -> Vec<Client> {
    crate::overlay_scene::wait_for(node, "a link to c", |status| status["links"][0]["up"] == true);
    let connect = |listener: &str| {
        let mut client = Client::connect(node.addresses(listener)[0]).expect("a path");
        client.echo(&[b'x'; 4000]).expect("an echo");
        client
    };
    ["plain", "plain", "far"].map(connect).into()
}

pub(crate) fn the_page_of_a_real_node(browser: &mut Browser) {
    let place = Place::new();
    let node = place.node();
    let bridge = Bridge::to(node.folder().join("admin.sock"));
    let clients = flows(&node);
    browser.open(&format!("http://{}/", bridge.address));
    browser.wait_for("document.querySelectorAll('.body .row:not([hidden])').length === 3");
    the_map_has_all_columns(browser);
    chains_have_their_flows(browser, &node);
    the_overlay_is_shown(browser);
    go(browser, "health");
    browser.wait_for(&shown(".list", "What this machine lacks"));
    browser.wait_for(&shown(".list td", "127.0.0.1:"));
    pictures(browser);
    go(browser, "chains");
    drop(clients);
    node.stop();
    browser.wait_for(&shown(".banner", "has not answered since"));
    let node = place.node();
    *bridge.socket.lock().expect("whole") = node.folder().join("admin.sock");
    let clients = flows(&node);
    browser.wait_for(&shown(".banner", "answers again"));
    // It counts from its start: nothing of the node before is left.
    browser.wait_for(
        "[...document.querySelectorAll('.list')].at(-1).innerText.match(/audit\\s+count\\s+2\\s+2\\s/)",
    );
    drop(clients);
}

fn the_map_has_all_columns(browser: &mut Browser) {
    go(browser, "map");
    for name in [
        "127.0.0.0/24: 3",
        "plain: 2",
        "far: 1",
        "audit → gate: 2",
        "direct: 2",
        "c: 1",
        "127.0.0.1: 2",
        "127.0.0.2: 1",
    ] {
        browser.wait_for(&crate::screens::entry(name));
    }
    let titles = browser
        .eval("[...document.querySelectorAll('.titles text')].map((title) => title.textContent).join()");
    assert_eq!(
        titles,
        "Sources (1),Listeners (2),Functions (1),Carriers (1),Overlay nodes (1),Destinations (2)"
    );
}

fn chains_have_their_flows(browser: &mut Browser, node: &Up) {
    go(browser, "chains");
    browser.wait_for("document.querySelector('.list td')?.innerText === 'audit → gate'");
    // A third flow is refused by the filter.
    let mut refused = Client::connect(node.addresses("plain")[0]).expect("a path");
    assert!(refused.echo(b"FORBIDDEN").is_err());
    let cells = "[...document.querySelectorAll('.list tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText).join('|'))";
    browser.wait_for(&format!("{cells}[0].match(/^audit → gate\\|records\\|2\\|.*\\|1\\|1\\|0$/)"));
    browser.wait_for(&format!("{cells}.some((row) => /^audit\\|count\\|2\\|3\\|8\\.0\\d kB\\|/.test(row))"));
    browser.eval(
        "[...document.querySelectorAll('.list .linklike')].find((link) => link.innerText === 'gate').click()",
    );
    browser.wait_for("document.querySelector('#filter')?.value === 'chain == \"gate\"'");
    browser.wait_for("[...document.querySelectorAll('.body .row:not([hidden])')].filter((row) => row.innerText.includes('live')).length === 2");
    browser.eval(
        "(() => { const field = document.querySelector('#filter'); field.focus(); field.value = ''; })()",
    );
    browser.press("Enter");
}

fn the_overlay_is_shown(browser: &mut Browser) {
    go(browser, "overlay");
    browser.wait_for("document.querySelectorAll('.circle .node').length === 2");
    browser.wait_for("document.querySelectorAll('.matrix .tie').length === 2");
    browser.wait_for(&shown(".list td", "a → c"));
    // Two samples make a line.
    browser.wait_for("/L/.test(document.querySelector('.spark path')?.getAttribute('d'))");
    browser.wait_for("document.querySelector('.spark svg').getAttribute('aria-label').startsWith('Round trip in the last ')");
}

/// Pictures of these screens: `SIDETRACK_PICTURES=FOLDER`.
fn pictures(browser: &mut Browser) {
    if std::env::var_os("SIDETRACK_PICTURES").is_none() {
        return;
    }
    for (width, height) in [(375, 700), (1280, 800), (3840, 2160)] {
        for scheme in ["light", "dark"] {
            browser.be(width, height, scheme);
            for screen in ["map", "chains", "overlay", "health"] {
                go(browser, screen);
                browser.wait_for("document.querySelector('.panel .list, .map .node')");
                browser.picture(&format!("real-{screen}-{width}-{scheme}"));
            }
        }
    }
    browser.be(1280, 800, "light");
}
