//! The user that `up` switches to, and the capabilities that it keeps.

use crate::config::{Config, Listener, RunAs};
use serde::Serialize;
use sidetrack_sys::caps::CapabilitySet;
use std::fmt;

/// The user of the data plane when root starts it. The JSON form is stable: fields are added, never renamed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DataPlane {
    /// The first of these users that the machine has.
    pub users: Vec<String>,
    /// The capabilities that it keeps, with the reasons.
    pub capabilities: Vec<&'static str>,
    /// The processes beside it, which become the same user, and the capabilities that each keeps.
    pub processes: Vec<Beside>,
}

/// A process beside the data plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Beside {
    /// What it does.
    pub name: &'static str,
    /// Its capabilities.
    pub capabilities: Vec<&'static str>,
}

impl DataPlane {
    /// Returns the user and capabilities for a configuration.
    pub fn of(config: &Config) -> Self {
        let users = match &config.user {
            RunAs::Default => RunAs::DEFAULTS.map(str::to_owned).to_vec(),
            RunAs::Named(name) => vec![name.to_string()],
        };
        let mut capabilities: Vec<_> = data_capabilities(config).into_iter().map(|(_, why)| why).collect();
        if config.overlay.as_ref().is_some_and(|overlay| !overlay.packets.is_empty()) {
            capabilities
                .push("CAP_NET_ADMIN, in one thread: to answer the kernel about packets of the overlay");
        }
        if config.user != RunAs::Named("root".into()) {
            capabilities.push(
                "CAP_DAC_READ_SEARCH, only if the user cannot read the configuration and what it names: for reloads",
            );
        }
        Self { users, capabilities, processes: beside(config) }
    }
}

/// The capabilities that the data plane needs for its listeners and its connections to servers, with the reason.
pub fn data_capabilities(config: &Config) -> Vec<(CapabilitySet, &'static str)> {
    let mut needed = vec![(
        CapabilitySet::NET_RAW,
        "CAP_NET_RAW: to mark its own connections, and to use addresses of clients (tproxy)",
    )];
    if config.wire.is_some() {
        let why = "CAP_NET_ADMIN: to read connections out of the kernel's TCP (TCP_REPAIR), for flows that go to the wire";
        needed.push((CapabilitySet::NET_ADMIN, why));
    }
    let paths = config.outgoing.as_ref().map(|outgoing| *outgoing.ports.start());
    if config.listeners.iter().flat_map(ports).chain(paths).any(|port| (1..1024).contains(&port)) {
        needed.push((CapabilitySet::NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE: to listen on ports below 1024"));
    }
    needed
}

/// The processes that keep rights, once they have become the user.
fn beside(config: &Config) -> Vec<Beside> {
    const FOR_OWNERS: [&str; 2] = ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"];
    let with = |needed: &[&'static str], owners: bool| {
        needed.iter().copied().chain(FOR_OWNERS.into_iter().filter(|_| owners)).collect()
    };
    let asks = config.policy.asks_process();
    let mut all = vec![Beside { name: "the keeper", capabilities: with(&["CAP_NET_ADMIN"], asks) }];
    if let Some(shunt) = &config.shunt {
        let asks = shunt.rules.as_ref().is_some_and(|rules| rules.asks_process());
        let mut capabilities: Vec<_> = with(&["CAP_NET_ADMIN", "CAP_BPF"], asks);
        capabilities.extend(shunt.has_low_port().then_some("CAP_NET_BIND_SERVICE"));
        all.push(Beside { name: "the shunt's process", capabilities });
    }
    if config.agreement.is_some() {
        all.push(Beside { name: "the agreement's process", capabilities: vec!["CAP_DAC_OVERRIDE"] });
    }
    if config.wants_containers() {
        let needed = ["CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_NET_ADMIN", "CAP_DAC_OVERRIDE"];
        all.push(Beside { name: "the containers' process", capabilities: with(&needed, false) });
    }
    all
}

/// The ports of a listener. They are bound after privileges are given up.
fn ports(listener: &Listener) -> impl Iterator<Item = u16> {
    let addresses = listener.addresses.iter().copied();
    addresses.chain(listener.kind.htcp_address()).map(|address| address.port())
}

impl fmt::Display for DataPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.users.as_slice() {
            [name] if name == "root" => write!(f, "started as root, the data plane stays root, and keeps:")?,
            [name] => write!(f, "started as root, the data plane becomes user '{name}', and keeps:")?,
            names => write!(
                f,
                "started as root, the data plane becomes the first of these users that there is: {}; it keeps:",
                names.join(", ")
            )?,
        }
        for capability in &self.capabilities {
            write!(f, "\n    {capability}")?;
        }
        let who = if self.users == ["root"] { "stay root, too" } else { "become the same user" };
        write!(f, "\nthe processes beside it {who}, and keep:")?;
        for Beside { name, capabilities } in &self.processes {
            write!(f, "\n    {name}: {}", capabilities.join(", "))?;
        }
        writeln!(f)
    }
}
