//! The paper's Sec. IV-A: the hosts' tuning (Table I) is applied, verified and undone, and what one flow then reaches
//! without a firewall.

use super::load;
use super::network::{NEVER_IDLE_MS, Network, RATE};
use super::setup::Setup;
use crate::topology::Node;
use anyhow::{Context, Result};
use sidetrack_sys::sysctl;
use std::time::Duration;

/// The rate to reach without a delay, in Gbit/s: what the paper's hosts reached.
const RATE_GBIT_S: f64 = 9.0;
/// With a delay, the link of the laboratory is slower: the part of its rate to reach.
const PART_OF_LINK: f64 = 0.9;

/// Where a setting is.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// A kernel parameter of the network namespace, below `/proc/sys`.
    Kernel(&'static str),
    /// A property of `eth0`: the word of `ip link set`, and the key of `ip -j link show`.
    Link(&'static str, &'static str),
}

/// A row of Table I.
#[derive(Clone, Copy, Debug)]
struct Setting {
    name: &'static str,
    place: Place,
    wanted: &'static str,
}

const TABLE_I: [Setting; 4] = [
    Setting {
        name: "NIC transmit queue (txqueuelen), packets",
        place: Place::Link("txqueuelen", "txqlen"),
        wanted: "10000",
    },
    Setting {
        name: "TCP send buffer, least, first and most (tcp_wmem), bytes",
        place: Place::Kernel("net/ipv4/tcp_wmem"),
        wanted: "4096 131072 500000000",
    },
    Setting {
        name: "TCP receive buffer, least, first and most (tcp_rmem), bytes",
        place: Place::Kernel("net/ipv4/tcp_rmem"),
        wanted: "4096 131072 500000000",
    },
    Setting { name: "Network interface MTU, bytes", place: Place::Link("mtu", "mtu"), wanted: "9000" },
];

impl Setting {
    fn read(&self, host: &Node) -> Result<String> {
        match self.place {
            Place::Kernel(key) => {
                let text = host.enter(|| Ok(sysctl::read(key)?))?;
                Ok(text.split_whitespace().collect::<Vec<_>>().join(" "))
            }
            Place::Link(_, key) => {
                let text = host.run("ip", &["-j", "link", "show", "eth0"])?;
                let value: serde_json::Value = serde_json::from_str(&text)?;
                let value = value[0][key].as_u64().with_context(|| format!("ip shows no {key}"))?;
                Ok(value.to_string())
            }
        }
    }

    fn write(&self, host: &Node, value: &str) -> Result<()> {
        match self.place {
            Place::Kernel(key) => host.sysctl(key, value),
            Place::Link(word, _) => host.run("ip", &["link", "set", "dev", "eth0", word, value]).map(drop),
        }
    }
}

/// A setting of one host, as it was read at three moments.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Tuned {
    /// The host.
    pub host: String,
    /// The setting.
    pub name: &'static str,
    /// Before.
    pub before: String,
    /// What Table I wants.
    pub wanted: &'static str,
    /// While the rate was measured.
    pub during: String,
    /// After it was undone.
    pub after: String,
}

impl Tuned {
    /// Whether it was in force, and is undone.
    pub(super) fn is_well(&self) -> bool {
        self.during == self.wanted && self.after == self.before
    }
}

/// What was found at one round trip.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Validated {
    /// The round trip, in milliseconds.
    pub round_trip_ms: u64,
    /// The settings of both hosts.
    pub tuned: Vec<Tuned>,
    /// What one flow reached, in Gbit/s, without its beginning.
    pub gbit_s: f64,
    /// What it has to reach.
    pub wanted_gbit_s: f64,
    /// Frames that were lost.
    pub lost: u64,
}

/// Tunes both hosts of a new network without a firewall, measures one flow, and undoes the tuning.
///
/// # Errors
/// A setting cannot be read or written, or iperf3 fails.
pub(super) fn measure(round_trip_ms: u64, seconds: u64) -> Result<Validated> {
    let round_trip = Duration::from_millis(round_trip_ms);
    let network = Network::new(Setup::Direct, NEVER_IDLE_MS, round_trip)?;
    let hosts = [&network.client, &network.server];
    let places: Vec<_> = hosts.iter().flat_map(|host| TABLE_I.iter().map(move |one| (*host, one))).collect();
    let mut tuned = Vec::new();
    for (host, setting) in &places {
        let before = setting.read(host)?;
        setting.write(host, setting.wanted)?;
        let during = setting.read(host)?;
        let (host, wanted) = (host.name().to_owned(), setting.wanted);
        tuned.push(Tuned { host, name: setting.name, before, wanted, during, after: String::new() });
    }
    // Slow start at the longest round trip takes some seconds, and it is not what is asked here.
    let skipped = if round_trip_ms == 0 { 0 } else { seconds };
    let slice = load::on(&network, load::Run { connections: 1, seconds, skipped, round_trip });
    // Undone in the opposite order, also if the measurement failed.
    for ((host, setting), tuned) in places.iter().zip(&mut tuned).rev() {
        setting.write(host, &tuned.before)?;
        tuned.after = setting.read(host)?;
    }
    let slice = slice?;
    let link = PART_OF_LINK * RATE as f64 / 1e9;
    let wanted_gbit_s = if round_trip_ms == 0 { RATE_GBIT_S } else { link };
    Ok(Validated { round_trip_ms, tuned, gbit_s: slice.gbit_s, wanted_gbit_s, lost: slice.lost.frames })
}
