//! A chain changes while flows pass it: no flow is cut, and new flows soon take the new chain.

use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use sidetrack_common::exchange;

use crate::kit::{Bar, Bound, Page};
use crate::peers::ours;
use crate::service::Service;
use crate::site::Site;
use crate::statistics::Spread;

/// Number of live flows.
const FLOWS: usize = 500;
/// Time within which new flows must pass the new chain, in milliseconds.
const WITHIN_MS: f64 = 10.0;
/// The address on which the node listens.
const PORT: u16 = 9090;
const PATIENCE: Duration = Duration::from_secs(30);

/// The result.
#[derive(Debug, Clone, Default)]
pub(super) struct Swaps {
    /// Time from the request until a new flow passed the new chain, in milliseconds.
    pub after_ms: Vec<f64>,
    /// Number of live flows that were cut, over all changes.
    pub cut: usize,
}

/// Changes the chain of a rule this number of times under live flows.
///
/// # Errors
/// Our program does not start, or a change is refused.
pub(super) fn measure(site: &Site, times: usize) -> Result<Swaps> {
    // In the proxy's own network, like the node, so that the change is timed and not a link.
    let network = site.proxy.namespace()?;
    let listener = network.run(|| TcpListener::bind("127.0.0.1:0"))?;
    let server = listener.local_addr()?;
    std::thread::spawn(move || echo(&listener));
    let node = Node::start(site, server)?;
    let connect = || network.run(|| dial(SocketAddr::from(([127, 0, 0, 1], PORT))));
    let mut live = Vec::with_capacity(FLOWS);
    for _ in 0..FLOWS {
        live.push(connect()?);
    }
    let mut swaps = Swaps::default();
    for time in 1..=times {
        let word = format!("chain{time}");
        node.write(&word)?;
        let began = Instant::now();
        node.reload()?;
        while talk(&mut connect()?)? != word.as_bytes() {
            ensure!(began.elapsed() < PATIENCE, "new flows never pass the new chain");
        }
        swaps.after_ms.push(began.elapsed().as_secs_f64() * 1e3);
        swaps.cut += live.iter_mut().map(talk).filter(Result::is_err).count();
    }
    Ok(swaps)
}

/// Echoes the received bytes.
pub(super) fn echo(listener: &TcpListener) {
    for stream in listener.incoming().map_while(Result::ok) {
        let one = move || {
            let mut stream = stream;
            let mut bytes = [0; 64];
            while let Ok(n @ 1..) = stream.read(&mut bytes) {
                if stream.write_all(&bytes[..n]).is_err() {
                    return;
                }
            }
        };
        // A flow that cannot be served counts as cut.
        drop(std::thread::Builder::new().stack_size(64 << 10).spawn(one));
    }
}

fn dial(to: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Sends a word that the chain replaces; returns the answer.
fn talk(stream: &mut TcpStream) -> Result<Vec<u8>> {
    stream.write_all(b"PLACE\n")?;
    let mut answer = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        if byte == *b"\n" {
            return Ok(answer);
        }
        answer.push(byte[0]);
    }
    anyhow::bail!("cut")
}

/// Our program with an admin socket.
struct Node {
    _service: Service,
    config: std::path::PathBuf,
    admin: std::path::PathBuf,
    server: SocketAddr,
}

impl Node {
    fn start(site: &Site, server: SocketAddr) -> Result<Self> {
        let folder = site.directory.path();
        let (config, admin) = (folder.join("swap.toml"), folder.join("swap.sock"));
        let program = ours::program().map_err(|error| anyhow::anyhow!("{error}"))?;
        let mut command = site.proxy.command_at(&program.to_string_lossy(), &site.proxy_placement());
        command.args(["up", "-c"]).arg(&config);
        write(&config, &admin, server, "chain0")?;
        let mut service = Service::start("swap", command, folder)?;
        service.wait_listening(&site.proxy, PORT)?;
        Ok(Self { _service: service, config, admin, server })
    }

    fn write(&self, word: &str) -> Result<()> {
        write(&self.config, &self.admin, self.server, word)
    }

    /// Requests the change, and waits until it is done.
    fn reload(&self) -> Result<()> {
        let (status, answer) = exchange::ask(&self.admin, "POST", "/v1/reload", "")?;
        ensure!((200..300).contains(&status), "{answer}");
        Ok(())
    }
}

/// Returns the configuration with a chain that replaces the word with another.
fn write(config: &Path, admin: &Path, server: SocketAddr, word: &str) -> Result<()> {
    let text = format!(
        "version = 1\nworkers = 1\ndefault = \"deny\"\n[admin]\nsocket = \"{}\"\n[record]\nto = \"none\"\n[[listen]]\nkind = \"reverse\"\n\
         address = \"127.0.0.1:{PORT}\"\nto = \"{server}\"\n[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n\
         chain = [\"count\", \"{word}\"]\n[function.count]\nkind = \"count\"\n[function.{word}]\nkind = \"replace\"\ndirection = \"up\"\n\
         replace = [{{ find = \"PLACE\", with = \"{word}\" }}]\n",
        admin.display()
    );
    let fresh = config.with_extension("fresh");
    std::fs::write(&fresh, text)?;
    Ok(std::fs::rename(fresh, config)?)
}

/// Formats it in words, with the bars.
pub(super) fn render(page: &mut Page, swaps: &Swaps) -> Vec<Bar> {
    page.line(format_args!(
        "A chain changed {} times under {FLOWS} live flows: {} of them were cut.\n",
        swaps.after_ms.len(),
        swaps.cut
    ));
    let after = Spread::of(swaps.after_ms.clone()).ok_or_else(|| "no change".to_owned());
    let what = "from the request to a new flow on the new chain";
    vec![
        Bar::single("flows cut when a chain changes", Some(swaps.cut as f64), Bound::AtMost(0.0)),
        Bar::new(what, after, Bound::AtMost(WITHIN_MS)).unit(" ms"),
    ]
}
