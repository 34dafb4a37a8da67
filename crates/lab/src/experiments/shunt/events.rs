//! The events that end a flow's time on the fast path, and how soon: FIN, RST, a pause, a change of rules; and how
//! soon the flow is back when it resumes.

use super::network::{Network, SERVER};
use super::setup::Setup;
use super::small;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The idle time of this part, in milliseconds: Open vSwitch only knows whole seconds.
pub(super) const IDLE_MS: u64 = 1000;
/// Time limit for every awaited event.
const LIMIT: Duration = Duration::from_secs(20);
/// Interval of datagrams while rules change.
const EVERY: Duration = Duration::from_micros(200);

/// The events, and after how many milliseconds each came, once per run.
pub(super) type Events = BTreeMap<&'static str, Vec<f64>>;

/// A FIN leaves the client: the entry is gone.
pub(super) const FIN: &str = "FIN: entry gone";
/// A RST leaves the client: the entry is gone.
pub(super) const RST: &str = "RST: entry gone";
/// The flow pauses: the entry is gone.
pub(super) const IDLE: &str = "stands still for 1 s: entry gone";
/// A packet after the pause: the entry is confirmed again.
pub(super) const RESUME: &str = "resumes: entry confirmed";
/// `iptables` has added a rule that denies the flow: its last packet arrives.
pub(super) const REVOKE: &str = "denied: last packet arrives";

/// Measures each event this number of times.
///
/// # Errors An event does not happen.
pub(super) fn measure(setup: Setup, runs: usize) -> Result<Events> {
    let mut events = Events::new();
    let mut note = |what, since: u64, at: Option<u64>| {
        let milliseconds = at.map_or(f64::NAN, |at| (at as f64 - since as f64) / 1e6);
        events.entry(what).or_default().push(milliseconds.max(0.0));
    };
    let network = Network::new(setup, IDLE_MS, Duration::ZERO)?;
    for _ in 0..runs {
        let pair = Pair::open(&network)?;
        let (since, gone) = pair.stand_still(&network)?;
        note(IDLE, since, gone);
        let since = now_ns();
        pair.talk()?;
        let flow = network.wait_for(pair.port, |flow| flow.installs == 2 && flow.state == "installed")?;
        note(RESUME, since, flow.installed_ns);
        for (what, reset) in [(FIN, false), (RST, true)] {
            let pair = Pair::open(&network)?;
            let (port, since) = (pair.port, now_ns());
            pair.end(reset)?;
            note(what, since, network.wait_for(port, |flow| flow.state == "slow")?.gone_ns);
        }
        let (since, last) = revoke(&network)?;
        note(REVOKE, since, Some(last));
    }
    Ok(events)
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Opens a connection and waits until it is on the fast path.
struct Pair {
    client: TcpStream,
    server: TcpStream,
    port: u16,
}

impl Pair {
    fn open(network: &Network) -> Result<Self> {
        let listener = network.server.enter(|| Ok(TcpListener::bind(SERVER)?))?;
        let client = network.client.enter(|| Ok(TcpStream::connect(SERVER)?))?;
        let (server, from) = listener.accept()?;
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(LIMIT))?;
        }
        let pair = Self { client, server, port: from.port() };
        pair.talk()?;
        network.wait_for(pair.port, |flow| flow.state == "installed")?;
        Ok(pair)
    }

    fn talk(&self) -> Result<()> {
        let mut byte = [0];
        for (mut from, mut to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            from.write_all(&byte)?;
            to.read_exact(&mut byte)?;
        }
        Ok(())
    }

    /// Returns when it last sent, and when its entry was gone.
    fn stand_still(&self, network: &Network) -> Result<(u64, Option<u64>)> {
        self.talk()?;
        let since = now_ns();
        let flow = network.wait_for(self.port, |flow| flow.state == "slow")?;
        Ok((since, flow.gone_ns))
    }

    fn end(self, reset: bool) -> Result<()> {
        if reset {
            sidetrack_sys::sockopt::reset_on_close(&self.client)?;
        } else {
            self.client.shutdown(Shutdown::Write)?;
        }
        drop(self.client);
        Ok(())
    }
}

/// Denies a flow of datagrams while they arrive. Returns when `iptables` was done, and when the last datagram
/// arrived.
fn revoke(network: &Network) -> Result<(u64, u64)> {
    let from = small::open(network)?;
    let receiver = network.server.enter(|| Ok(UdpSocket::bind(SERVER)?))?;
    let sender = network.client.enter(|| Ok(UdpSocket::bind(from)?))?;
    let stop = Arc::new(AtomicBool::new(false));
    let halt = stop.clone();
    let sending = std::thread::spawn(move || {
        while !halt.load(Ordering::Relaxed) {
            // An ICMP refusal of an earlier datagram is not a reason to stop.
            let _ = sender.send_to(b"word", SERVER);
            std::thread::sleep(EVERY);
        }
    });
    receiver.set_read_timeout(Some(LIMIT))?;
    let mut buffer = [0; 64];
    let result = (|| {
        // Wait until datagrams arrive.
        for _ in 0..20 {
            receiver.recv_from(&mut buffer).context("a datagram of the flow that is to be denied")?;
        }
        let rule = ["FORWARD", "-p", "udp", "--dport", "5000", "-j", "DROP"];
        network.firewall.run("iptables", &[&["-I"], &rule[..]].concat())?;
        let since = now_ns();
        receiver.set_read_timeout(Some(Duration::from_millis(500)))?;
        let mut last = since;
        while receiver.recv_from(&mut buffer).is_ok() {
            // Datagrams that waited in the socket arrived before.
            last = now_ns();
        }
        network.firewall.run("iptables", &[&["-D"], &rule[..]].concat())?;
        Ok((since, last))
    })();
    stop.store(true, Ordering::Relaxed);
    let _ = sending.join();
    result
}
