//! Lists each privileged action that `up` would take for a configuration, with the capability it needs and how
//! it is undone. Nothing is executed.

mod user;

pub use user::{Beside, DataPlane, data_capabilities};

use crate::config::{
    Config, Early, EngineIo, EngineListener, Listener, ListenerKind, OnCrash, Overlay, PinnedAt, Shunt,
    ShuntPath, SocksDatagrams, SocksListener,
};
use crate::steer::{self, Host, OWN_MARK, Steer, SteerError, TABLE};
use serde::Serialize;
use sidetrack_core::flow::Protocol;
use sidetrack_core::policy::Action;
use sidetrack_sys::nfqueue::HOLD_NUMBERS;
use sidetrack_sys::nft::Lifetime;
use sidetrack_sys::route::{IpVersion, MarkRule};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// The actions of `up` that need a capability, in order. The JSON form is stable: fields are added, never
/// renamed.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The actions.
    pub steps: Vec<Step>,
    /// Traffic that the kernel would forward without us.
    pub kernel_paths: Vec<Left>,
    /// Connections that are accepted before the far side has accepted, and why.
    pub accepted_early: Vec<Early>,
    /// The user of the data plane when root starts it.
    pub data_plane: DataPlane,
    /// Our nftables table in the syntax of `nft`. `None` if the kernel needs no rules.
    pub table: Option<String>,
}

/// One action.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The action.
    pub what: String,
    /// The capability it needs. `None`: every user may do it.
    pub needs: Option<&'static str>,
    /// How it is undone, after SIGKILL too.
    pub undone: &'static str,
}

/// Traffic that the kernel forwards without us.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Left {
    /// The listener that would have captured it.
    pub listener: String,
    /// The transport protocol of its flows.
    pub protocol: Protocol,
    /// The rule. `None`: the default.
    pub rule: Option<String>,
}

const WITH_THE_SOCKET: &str = "goes with the socket";
const BY_THE_GUARD: &str = "undone by the guard process, also after SIGKILL";

impl Plan {
    /// Makes the plan for a configuration.
    ///
    /// # Errors
    /// Fails if traffic cannot be steered to a listener on this host. Says which and why.
    pub fn new(config: &Config) -> Result<Self, SteerError> {
        let bound: Vec<(Arc<str>, SocketAddr)> = config
            .listeners
            .iter()
            .flat_map(|listener| listener.addresses.iter().map(|address| (listener.name.clone(), *address)))
            .collect();
        let steer = Steer::new(config, &bound, 0, &Host::here())?;
        // The numbers are those that are free when it starts; the first ones, if no other program uses queues.
        let held: Vec<_> =
            config.listeners.iter().filter(|one| steer::holds(config) && steer::may_hold(one)).collect();
        let place = |name: &Arc<str>| held.iter().position(|one| one.name == *name);
        let steer = steer.holding(&bound, |name| HOLD_NUMBERS.clone().nth(place(name)?));
        let mut steps = listening(config);
        steps.extend(held.iter().map(|listener| holding(listener)));
        if !steer.is_empty() {
            steps.extend(steering(&steer));
        }
        steps.extend(carrying(config, &steer));
        steps.extend(config.shunt.iter().flat_map(shunting));
        steps.extend(config.wire.as_ref().map(|wire| Step {
            what: "attach BPF programs to tcx ingress and egress of each Ethernet interface, for flows that go to the wire".into(),
            needs: Some("CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN"),
            undone: match wire.pins {
                PinnedAt::None => "goes with this process, also after SIGKILL",
                _ => "goes with this process; stays pinned after SIGKILL, for the next start or `sidetrack cleanup`",
            },
        }));
        steps.extend(config.overlay.iter().flat_map(|overlay| overlaying(overlay, config.on_crash)));
        let left = |path: &crate::steer::Path| Left {
            listener: path.listener.to_string(),
            protocol: path.protocol,
            rule: path.rule.as_deref().map(str::to_owned),
        };
        Ok(Self {
            steps,
            data_plane: DataPlane::of(config),
            kernel_paths: steer.paths.iter().map(left).collect(),
            accepted_early: config.accepted_early(),
            table: (!steer.is_empty()).then(|| steer.steering.table(TABLE).to_string()),
        })
    }
}

fn listening(config: &Config) -> Vec<Step> {
    let mut steps = Vec::new();
    for listener in &config.listeners {
        if let ListenerKind::Engine(engine) = &listener.kind {
            steps.extend(packets(&listener.name, engine));
            continue;
        }
        for address in &listener.addresses {
            let is_udp = listener.protocol == Protocol::Udp;
            let tproxy = match listener.kind {
                ListenerKind::Tproxy(_) => true,
                ListenerKind::Redirect(_) => is_udp,
                _ => false,
            };
            let whose = format!("'{}'{}", listener.name, if tproxy { " with IP_TRANSPARENT" } else { "" });
            let whose = if is_udp { format!("{whose}, UDP") } else { whose };
            if let ListenerKind::Socks(SocksListener {
                udp: Some(SocksDatagrams { shared: true, .. }), ..
            }) = &listener.kind
            {
                steps.push(listen(*address, &format!("'{}', UDP of all its clients", listener.name)));
            }
            let listen = listen(*address, &whose);
            steps.push(Step { needs: if tproxy { Some("CAP_NET_RAW") } else { listen.needs }, ..listen });
            if tproxy && is_udp {
                steps.push(Step {
                    what: format!(
                        "open raw sockets for answers and ICMP errors from the addresses that clients ask, for {whose}"
                    ),
                    needs: Some("CAP_NET_RAW"),
                    undone: WITH_THE_SOCKET,
                });
            }
        }
    }
    if config.capture.ring_bytes > 0 {
        steps.push(Step {
            what: "open a socket for copies of this network's packets, for [capture]".into(),
            needs: Some("CAP_NET_RAW"),
            undone: WITH_THE_SOCKET,
        });
    }
    steps.extend(config.admin.metrics.map(|address| listen(address, "[admin] metrics")));
    steps.extend(config.admin.page.map(|address| listen(address, "[admin] page")));
    if let Some(dns) = &config.dns {
        steps.extend(dns.addresses.iter().map(|address| listen(*address, "[dns], UDP and TCP")));
    }
    steps.extend(config.outgoing.iter().map(|outgoing| listen(outgoing.listen, "[outgoing]")));
    steps
}

fn holding(listener: &Listener) -> Step {
    Step {
        what: format!(
            "open a packet queue (NFQUEUE) that holds the SYNs for '{}' until the far side has answered",
            listener.name
        ),
        needs: Some("CAP_NET_ADMIN, CAP_NET_RAW"),
        undone: WITH_THE_SOCKET,
    }
}

fn listen(address: SocketAddr, whose: &str) -> Step {
    let port = match address.port() {
        0 => "a port that the kernel picks".to_owned(),
        port => format!("port {port}"),
    };
    Step {
        what: format!("listen on {}, {port}, for {whose}", address.ip()),
        needs: matches!(address.port(), 1..1024).then_some("CAP_NET_BIND_SERVICE"),
        undone: WITH_THE_SOCKET,
    }
}

/// The actions of an overlay node: its ports, and the rules that take whole packets from the kernel.
fn overlaying(overlay: &Overlay, on_crash: OnCrash) -> Vec<Step> {
    let mut steps: Vec<Step> =
        overlay.listen.iter().map(|address| listen(*address, "[overlay], TCP and UDP")).collect();
    let step = |what, needs, undone| Step { what, needs: Some(needs), undone };
    for group in overlay.groups.iter().filter(|group| !group.interfaces.is_empty()) {
        let names: Vec<_> = group.interfaces.iter().map(ToString::to_string).collect();
        steps.push(Step {
            what: format!(
                "listen to the IP multicast addresses of {} on {}, for group '{}'",
                group.to,
                names.join(", "),
                group.name
            ),
            needs: None,
            undone: WITH_THE_SOCKET,
        });
    }
    let raw = step(
        "open raw sockets that deliver packets of other nodes, for [[overlay.packets]] and [[overlay.group]]"
            .into(),
        "CAP_NET_RAW",
        WITH_THE_SOCKET,
    );
    if overlay.packets.is_empty() {
        steps.extend((!overlay.groups.is_empty()).then_some(raw));
        return steps;
    }
    let (life, undone) = match on_crash {
        OnCrash::Open => ("owned by our netlink socket", "goes with the socket, also after SIGKILL"),
        OnCrash::Closed => (
            "kept when we die (on_crash = \"closed\")",
            "deleted at an orderly end; after a crash it stays until `sidetrack cleanup`",
        ),
    };
    steps.push(step(
        "open a packet queue (NFQUEUE), for [[overlay.packets]]".into(),
        "CAP_NET_ADMIN",
        WITH_THE_SOCKET,
    ));
    steps.push(step(
        format!(
            "make the nftables table 'inet sidetrack-packets', which puts packets into that queue, {life}"
        ),
        "CAP_NET_ADMIN",
        undone,
    ));
    for packets in &overlay.packets {
        let whose = if packets.local { "of this host" } else { "that leave this host, forwarded ones too," };
        steps.push(step(
            format!(
                "take the packets {whose} to {} from the kernel, for {} ({})",
                packets.to,
                packets.target,
                packets.service.words()
            ),
            "CAP_NET_ADMIN",
            undone,
        ));
    }
    steps.push(raw);
    steps
}

/// The actions of a packet engine on its interfaces.
fn packets(name: &str, engine: &EngineListener) -> Vec<Step> {
    let (socket, hook) = match engine.io {
        EngineIo::Packet => ("packet sockets", "tcx ingress"),
        EngineIo::Xdp => ("AF_XDP sockets", "XDP"),
    };
    let step = |what, needs| Step {
        what,
        needs: Some(needs),
        undone: "goes with our descriptors, also after SIGKILL",
    };
    let interfaces = engine.interfaces.iter().flat_map(|interface| {
        [
            step(format!("open {socket} on {interface}, for '{name}'"), "CAP_NET_RAW"),
            step(
                format!("attach a BPF program to {hook} of {interface}, which keeps the packets of '{name}' from the kernel's TCP"),
                "CAP_BPF and CAP_NET_ADMIN, and CAP_PERFMON to offload connections",
            ),
        ]
    });
    let routed = step(format!("open raw sockets for first packets to servers, for '{name}'"), "CAP_NET_RAW");
    interfaces.chain([routed]).collect()
}

/// Lets plans know the SSH session from which the program was started.
pub fn look_at_session() {
    steer::set_session(sidetrack_sys::probe::ssh_session());
}

fn steering(steer: &Steer) -> Vec<Step> {
    let mut steps: Vec<Step> = steer.mark_rules.iter().flat_map(routing).collect();
    let (life, undone) = match steer.lifetime {
        Lifetime::Socket => ("owned by our netlink socket", "goes with the socket, also after SIGKILL"),
        _ => (
            "kept when we die (on_crash = \"closed\")",
            "deleted at an orderly end; after a crash it stays, until `up` takes it over or `sidetrack cleanup`",
        ),
    };
    steps.push(Step {
        what: format!("make the nftables table 'inet {TABLE}', {life}"),
        needs: Some("CAP_NET_ADMIN"),
        undone,
    });
    if let [client, server] = steer.session[..] {
        steps.push(Step {
            what: format!(
                "leave your SSH session alone in this table: connections to {server} and to {client} (capture_ssh = false)"
            ),
            needs: None,
            undone: "goes with the table",
        });
    }
    if !steer.paths.is_empty() {
        steps.push(Step {
            what: "switch byte counts, events and time stamps of conntrack on (net.netfilter.nf_conntrack_acct, \
                   _events, _timestamp)"
                .into(),
            needs: Some("CAP_NET_ADMIN"),
            undone: BY_THE_GUARD,
        });
        steps.push(Step {
            what: "subscribe to conntrack's DESTROY events, for the records of what the kernel carries"
                .into(),
            needs: Some("CAP_NET_ADMIN"),
            undone: WITH_THE_SOCKET,
        });
    }
    steps
}

fn routing(rule: &MarkRule) -> [Step; 2] {
    let version = match rule.version {
        IpVersion::V4 => "ip",
        IpVersion::V6 => "ip -6",
    };
    let any = match rule.version {
        IpVersion::V4 => "0.0.0.0/0",
        IpVersion::V6 => "::/0",
    };
    let MarkRule { mark, mask, table, priority, .. } = rule;
    let step = |what: String| Step { what, needs: Some("CAP_NET_ADMIN"), undone: BY_THE_GUARD };
    [
        step(format!("{version} route add local {any} dev lo table {table}")),
        step(format!("{version} rule add fwmark {mark:#x}/{mask:#x} lookup {table} priority {priority}")),
    ]
}

/// The actions of the shunt's process.
fn shunting(shunt: &Shunt) -> Vec<Step> {
    const BY_ITS_PROCESS: &str = "goes with the shunt's process, also after SIGKILL";
    let step = |what: String, needs, undone| Step { what, needs: Some(needs), undone };
    let mut steps = vec![
        step(
            "switch byte counts, events and time stamps of conntrack on, for the shunt (net.netfilter.nf_conntrack_acct, \
             _events, _timestamp)"
                .into(),
            "CAP_NET_ADMIN",
            BY_THE_GUARD,
        ),
        step(
            "subscribe to conntrack's events and to changes of nftables, for the shunt".into(),
            "CAP_NET_ADMIN",
            WITH_THE_SOCKET,
        ),
        step(
            "change marks, timeouts and window tracking of the connections that the shunt moves".into(),
            "CAP_NET_ADMIN",
            "the mark's decision is cleared at an orderly end; else it goes with the connection",
        ),
    ];
    for path in &shunt.fast_paths {
        let attach = |hook: &str| {
            let each = |interface| format!("attach a BPF program to {hook} of {interface}, for the shunt");
            shunt.ports.values().map(each).collect::<Vec<_>>()
        };
        let bpf = "CAP_BPF and CAP_NET_ADMIN";
        match path {
            ShuntPath::Tc => {
                steps.extend(attach("tcx ingress").into_iter().map(|what| step(what, bpf, BY_ITS_PROCESS)));
            }
            ShuntPath::Xdp | ShuntPath::XdpGeneric => {
                steps.extend(attach("XDP").into_iter().map(|what| step(what, bpf, BY_ITS_PROCESS)));
            }
            ShuntPath::OpenFlow(switch) => steps.extend(switch.listen.iter().map(|at| Step {
                what: format!("listen on {at} for the switch, and install entries in it"),
                needs: matches!(at.port(), 1..1024).then_some("CAP_NET_BIND_SERVICE"),
                undone: "entries go at the end where [shunt.openflow] says so, else with their idle time",
            })),
            ShuntPath::Flowtable => steps.push(step(
                "make the nftables table 'inet sidetrack_shunt' with a flow table between the shunt's ports"
                    .into(),
                "CAP_NET_ADMIN",
                BY_ITS_PROCESS,
            )),
            ShuntPath::None => {}
        }
    }
    if shunt.rules.as_ref().is_some_and(|rules| rules.asks_process()) {
        steps.push(step(
            "look up the process behind a forwarded connection of this host (/proc, all network namespaces)"
                .into(),
            "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH",
            "changes nothing",
        ));
    }
    steps
}

/// Capabilities that carrying flows needs.
fn carrying(config: &Config, steer: &Steer) -> Vec<Step> {
    let mut steps = Vec::new();
    if !steer.is_empty() {
        steps.push(Step {
            what: format!(
                "mark our own connections with {:#x}/{:#x}, so that they are not caught again",
                OWN_MARK.value, OWN_MARK.mask
            ),
            needs: Some("CAP_NET_RAW"),
            undone: WITH_THE_SOCKET,
        });
    }
    let rules = || config.policy.rules().iter();
    let actions = rules().map(|rule| &rule.action).chain([config.policy.default_action()]);
    if actions.into_iter().any(|action| matches!(action, Action::Carry(carry) if carry.keep_client_address)) {
        steps.push(Step {
            what: "connect to servers from the clients' addresses (IP_TRANSPARENT)".into(),
            needs: Some("CAP_NET_RAW"),
            undone: WITH_THE_SOCKET,
        });
    }
    if config.policy.asks_process() {
        steps.push(Step {
            what: "look up the process behind a connection of this host (/proc)".into(),
            needs: Some("CAP_SYS_PTRACE"),
            undone: "changes nothing",
        });
    }
    steps
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.steps.iter().all(|step| step.needs.is_none()) {
            writeln!(f, "no privileged action: every user may run this")?;
        }
        for (number, step) in (1..).zip(&self.steps) {
            writeln!(f, "{number:>2}. {}", step.what)?;
            writeln!(f, "    needs {}; {}", step.needs.unwrap_or("no right"), step.undone)?;
        }
        if !self.kernel_paths.is_empty() {
            writeln!(f, "\nleft to the kernel, recorded from conntrack:")?;
        }
        for Left { listener, protocol, rule } in &self.kernel_paths {
            let udp = if *protocol == Protocol::Udp { ", UDP" } else { "" };
            match rule {
                Some(rule) => writeln!(f, "    '{listener}'{udp}: rule '{rule}'")?,
                None => writeln!(f, "    '{listener}'{udp}: the default")?,
            }
        }
        if !self.accepted_early.is_empty() {
            writeln!(f, "\naccepted before the far side has accepted:")?;
        }
        for early in &self.accepted_early {
            writeln!(f, "    {early}")?;
        }
        write!(f, "\n{}", self.data_plane)?;
        match &self.table {
            Some(table) => write!(f, "\n{table}"),
            None => Ok(()),
        }
    }
}
