//! Explains which rule decides about a flow, why, and what would happen to it. No packet is sent.

mod packets;

pub use packets::{CapturedPackets, Links};

use crate::config::{Config, DnsMode, ListenerKind, NameStanding, Question};
use serde::Serialize;
use sidetrack_core::flow::{Flow, Host, Protocol};
use sidetrack_core::policy::{
    Action, Carry, Denied, Dial, Dialled, Explanation, KernelAction, ProxyVersion, Resolve, Seen,
};
use sidetrack_core::shunt::{Tuple, Want};
use sidetrack_core::{carrier::Carrier, flow::Intercept};
use sidetrack_sys::sockopt;
use std::fmt;
use std::net::SocketAddr;

/// The answer. Its JSON form is stable: fields are added, never renamed or removed.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The flow in question.
    pub flow: AskedFlow,
    /// `deny` or `carry`.
    pub action: &'static str,
    /// Name of the rule that decides. `None` if the default does.
    pub rule: Option<String>,
    /// The reason in words.
    pub why: String,
    /// How the flow is carried. `None` if it is denied.
    pub carry: Option<Carried>,
    /// Why the client's connection is accepted before the far side has accepted. `None`: it is accepted after it, or the flow
    /// is denied, or not caught by run, redirect or tproxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_early: Option<String>,
    /// Whether policy is asked again with each address that the destination's name resolves to: rules that deny
    /// by network, then `never_dial`.
    pub addresses_are_asked_again: bool,
    /// The rule for which the flow would wait for its first bytes.
    pub waits_for_first_bytes: Option<Wait>,
    /// When the kernel takes its packets over from our sockets, if they can be translated. `None`: it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wire: Option<Wired>,
    /// Whether the kernel may forward it without us, because the rules do not need user space. `sidetrack plan`
    /// shows what is really left to the kernel.
    pub kernel_path: bool,
    /// What happens to the flow if it is forwarded between ports of the shunt and not captured by a listener.
    /// `None` without a shunt, or if the destination is not an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forwarded: Option<Forwarded>,
    /// Each rule's part in the decision, in order.
    pub trace: Vec<String>,
    /// The state of the containers on the way in a running sidetrack. `None` if there are none on the way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub containers: Option<Health>,
    /// What the resolver (`[dns]`) answers to queries for the name. `None`: there is none, or the destination is an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resolver: Option<&'static str>,
    /// How the overlay carries its packets, if it captures them whole. `None` if it does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packets: Option<CapturedPackets>,
}

/// What happens to a forwarded flow if the packet filter leaves it to the rules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Forwarded {
    /// `drop`, `shunt` or `pass`.
    pub action: &'static str,
    /// Name of the rule that decides. `None` if the default does.
    pub rule: Option<String>,
    /// It moves to the fast path after this number of bytes.
    pub after_bytes: Option<u64>,
    /// It moves to the fast path after this time, milliseconds.
    pub after_ms: Option<u64>,
    /// Whether the packet filter alone decides, because no action of the shunt refers to the rules.
    pub by_packet_filter: bool,
}

/// The state of the containers on the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// No running sidetrack could be asked. Says why.
    Unknown(String),
    /// One entry for each container function, in the order of the chain.
    Known(Vec<FunctionHealth>),
}

/// The state of one function's containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FunctionHealth {
    /// The function's name.
    pub function: String,
    /// The wanted number of containers.
    pub wanted: u16,
    /// The number of healthy ones.
    pub well: u16,
    /// How often a started container was given up.
    pub falls: u64,
    /// The problem, while fewer are healthy than wanted.
    pub trouble: Option<String>,
}

/// The flow in question.
#[derive(Clone, Debug, Serialize)]
pub struct AskedFlow {
    /// The client's address.
    pub client: SocketAddr,
    /// The original destination.
    pub orig_dst: String,
    /// Name of the listener.
    pub listener: String,
    /// How it was captured.
    pub intercept: Intercept,
    /// Its transport protocol.
    pub protocol: Protocol,
    /// The host name in its first bytes.
    pub host: Option<String>,
}

/// How a flow is carried.
#[derive(Clone, Debug, Serialize)]
pub struct Carried {
    /// `direct`, or the hops, without credentials.
    pub carrier: String,
    /// The destination that replaces the client's.
    pub to: Option<String>,
    /// Which is dialled if both are known: `original` or `name`.
    pub dial: &'static str,
    /// Where names are resolved: `proxy` or `local`.
    pub resolve: &'static str,
    /// Whether the server sees the client's own address.
    pub keep_client_address: bool,
    /// Version of the PROXY protocol header sent to the server.
    pub proxy_protocol: Option<u8>,
    /// Ends the flow after this time without a byte, milliseconds.
    pub idle_timeout_ms: u64,
    /// Ends the flow after this time, milliseconds.
    pub lifetime_ms: Option<u64>,
    /// Time to connect, including all handshakes, milliseconds.
    pub connect_timeout_ms: u64,
    /// How long to wait for the client's first bytes, to send them with the request, milliseconds.
    pub initial_data_wait_ms: u64,
    /// TCP Fast Open (RFC 7413) towards the server or the first hop.
    pub tfo: bool,
    /// Multipath TCP (RFC 8684) towards the server or the first hop.
    pub mptcp: bool,
    /// When requests inside TLS ask their server by HTTP/3: `never`, `announced` or `first`.
    pub http3: &'static str,
    /// Why servers are asked by TCP all the same. `None`: nothing stands against it.
    pub http3_obstacle: Option<&'static str>,
    /// Number of warm connections to the server. `None` if the rule has none.
    pub warm: Option<u16>,
    /// Names of the functions on the way, in order.
    pub chain: Vec<String>,
}

/// When a flow goes to the wire: both limits are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Wired {
    /// Bytes, both directions together.
    pub after_bytes: u64,
    /// The time since it was captured, milliseconds.
    pub after_ms: u64,
}

/// A wait for first bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Wait {
    /// The rule that needs them.
    pub rule: String,
    /// Longest wait, milliseconds.
    pub wait_ms: u64,
}

/// Decides about the flow without carrying it. Returns `None` if the flow has no destination.
pub fn explain(config: &Config, question: &Question<'_>) -> Option<Answer> {
    let flow = question.flow()?;
    let Explanation { verdict, trace, waits } = config.policy.explain(&flow, question.host.as_ref());
    let mut why = verdict.why.to_string();
    let (mut carry, mut again, mut early, mut wire) = (None, false, None, None);
    let kernel_path = kernel_path(config, question, &flow);
    if let Action::Carry(action) = &verdict.action {
        match refusal(config, question, &flow, action) {
            Some(denied) => why = denied.to_string(),
            None => match action.udp_obstacle().filter(|_| flow.protocol == Protocol::Udp && !kernel_path) {
                Some(obstacle) => why = format!("{why}, but {obstacle}"),
                None => {
                    carry = Some(carried(config, action, flow.protocol));
                    early = accepted_early(question, &flow, action);
                    let after = config.wire_after(action).filter(|_| has_sockets(&flow));
                    wire = after.map(|after| Wired { after_bytes: after.bytes, after_ms: after.ms });
                }
            },
        }
        let is_name = matches!(action.destination(&flow).host, Host::Name(_));
        again = carry.is_some() && is_name && action.to.is_none() && !action.passes_names_on();
    }
    Some(Answer {
        action: if carry.is_some() { "carry" } else { "deny" },
        rule: verdict.rule.as_deref().map(str::to_owned),
        why,
        carry,
        accepted_early: early.or_else(|| waits.as_ref().and_then(|(rule, _)| early_for(&flow, rule))),
        addresses_are_asked_again: again,
        waits_for_first_bytes: waits.map(|(rule, wait_ms)| Wait { rule: rule.to_string(), wait_ms }),
        wire,
        kernel_path,
        forwarded: forwarded(config, question, &flow),
        trace: trace.iter().map(ToString::to_string).collect(),
        containers: None,
        resolver: resolver(config, &flow),
        packets: packets::of(config, &flow),
        flow: AskedFlow {
            client: flow.client,
            orig_dst: flow.orig_dst.to_string(),
            listener: flow.listener.to_string(),
            intercept: flow.intercept,
            protocol: flow.protocol,
            host: question.host.as_ref().map(ToString::to_string),
        },
    })
}

/// Says what the resolver answers to queries for the destination's name.
fn resolver(config: &Config, flow: &Flow) -> Option<&'static str> {
    let (dns, Host::Name(name)) = (config.dns.as_ref()?, &flow.orig_dst.host) else { return None };
    Some(match (config.standing(name), dns.mode) {
        (NameStanding::Denied, _) => "NXDOMAIN: the rules let no flow to this name pass",
        (_, DnsMode::Name) => "an address of 198.18.0.0/15, which represents the name",
        (_, DnsMode::Resolve) => "what name servers say",
    })
}

/// Says why a destination's address would not be dialled, although the rules carry the flow.
fn refusal(config: &Config, question: &Question<'_>, flow: &Flow, carry: &Carry) -> Option<Denied> {
    let Host::Ip(ip) = carry.destination(flow).host else { return None };
    if carry.to.is_some() {
        return None;
    }
    let is_configured = question.listener.is_some_and(|listener| match &listener.kind {
        ListenerKind::Http(http) => http.to.is_some(),
        kind => kind.servers().is_some(),
    });
    let seen = Seen::FirstBytes(question.host.as_ref());
    let dialled = Dialled { flow, seen, carry, ip, name: None, is_configured };
    let client = flow.client.ip();
    config.policy.admits(&dialled, || client.is_loopback() || sockopt::is_of_this_host(client)).err()
}

fn carried(config: &Config, carry: &Carry, protocol: Protocol) -> Carried {
    let limits = &config.limits;
    let idle_timeout_ms = match protocol {
        Protocol::Tcp => limits.idle_timeout_ms,
        Protocol::Udp => limits.udp_idle_timeout_ms,
    };
    Carried {
        carrier: carry.carrier.to_string(),
        to: carry.to.as_ref().map(ToString::to_string),
        dial: match carry.dial {
            Dial::Original => "original",
            Dial::Name => "name",
        },
        resolve: match carry.resolve {
            Resolve::Proxy if carry.carrier != Carrier::Direct => "proxy",
            Resolve::Proxy | Resolve::Local => "local",
        },
        keep_client_address: carry.keep_client_address,
        proxy_protocol: carry.proxy_protocol.map(|version| match version {
            ProxyVersion::V1 => 1,
            ProxyVersion::V2 => 2,
        }),
        idle_timeout_ms: carry.idle_timeout_ms.unwrap_or(idle_timeout_ms),
        lifetime_ms: carry.lifetime_ms.or(limits.lifetime_ms),
        connect_timeout_ms: carry.connect_timeout_ms.unwrap_or(limits.connect_timeout_ms),
        initial_data_wait_ms: carry.initial_data_wait_ms,
        tfo: carry.tfo,
        mptcp: carry.mptcp,
        http3: carry.http3.as_str(),
        http3_obstacle: carry.http3_obstacle(),
        warm: carry.warm.map(|warm| warm.ready),
        chain: carry.chain.iter().flat_map(|chain| chain.names()).map(ToString::to_string).collect(),
    }
}

/// Says why the connection is accepted before the far side has accepted.
fn accepted_early(question: &Question<'_>, flow: &Flow, carry: &Carry) -> Option<String> {
    let by_listener = question.listener.and_then(|listener| listener.early_reason());
    can_be_held(flow).then(|| by_listener.or_else(|| carry.early_reason(flow.intercept)))?.map(str::to_owned)
}

/// Whether a flow of this listener has two sockets of TCP on this host.
const fn has_sockets(flow: &Flow) -> bool {
    let is_elsewhere = matches!(flow.intercept, Intercept::Run | Intercept::Tunnel | Intercept::Engine);
    matches!(flow.protocol, Protocol::Tcp) && !is_elsewhere
}

fn can_be_held(flow: &Flow) -> bool {
    let is_caught = matches!(flow.intercept, Intercept::Run | Intercept::Redirect | Intercept::Tproxy);
    is_caught && flow.protocol == Protocol::Tcp
}

fn early_for(flow: &Flow, rule: &str) -> Option<String> {
    can_be_held(flow).then(|| format!("rule '{rule}' needs the host name, which stands in the first bytes"))
}

/// Returns the decision of the shunt's rules. They see addresses, ports and the process.
fn forwarded(config: &Config, question: &Question<'_>, flow: &Flow) -> Option<Forwarded> {
    let (shunt, server) = (config.shunt.as_ref()?, flow.orig_dst.socket_addr()?);
    let tuple = Tuple::new(flow.client, server, flow.protocol, 0);
    let wish = shunt.forwarded(&tuple, &question.process);
    let name =
        wish.and_then(|wish| config.policy.rules().get(wish.rule()?)).map(|rule| rule.name.to_string());
    let plain = Forwarded {
        action: "pass",
        rule: name,
        after_bytes: None,
        after_ms: None,
        by_packet_filter: wish.is_none(),
    };
    Some(match wish.map(|wish| wish.want) {
        None | Some(Want::Leave) => plain,
        Some(Want::Block) => Forwarded { action: "drop", ..plain },
        Some(Want::Shunt { bytes, ms, .. }) => {
            let after_ms = Some(ms);
            Forwarded { action: "shunt", after_bytes: Some(bytes), after_ms, ..plain }
        }
    })
}

/// Whether the packet filter would take this flow, on every address of the listener.
fn kernel_path(config: &Config, question: &Question<'_>, flow: &Flow) -> bool {
    let (Some(listener), Some(to)) = (question.listener, flow.orig_dst.socket_addr()) else { return false };
    let paths = config.kernel_paths(listener);
    let taken = paths.iter().filter(|(_, lines)| {
        let line = lines.iter().find(|line| line.matches.contains(flow.client.ip(), to));
        line.is_some_and(|line| line.action != KernelAction::UserSpace)
    });
    !paths.is_empty() && taken.count() == listener.captures().len()
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AskedFlow { client, orig_dst, listener, intercept, protocol, host } = &self.flow;
        write!(f, "flow     {} -> {orig_dst}, ", client.ip())?;
        match listener.as_str() {
            "none" => write!(f, "caught by {}", intercept.as_str())?,
            name => write!(f, "caught by '{name}' ({})", intercept.as_str())?,
        }
        if *protocol == Protocol::Udp {
            write!(f, ", udp")?;
        }
        match host {
            Some(host) => writeln!(f, ", host {host}")?,
            None => writeln!(f)?,
        }
        let verdict = if self.carry.is_some() { "carry" } else { "deny" };
        writeln!(f, "verdict  {verdict}: {}", self.why)?;
        if let Some(carry) = &self.carry {
            writeln!(f, "carry    {carry}")?;
        }
        match &self.containers {
            None => {}
            Some(Health::Unknown(why)) => writeln!(f, "well     not known: {why}")?,
            Some(Health::Known(all)) => {
                for (index, health) in all.iter().enumerate() {
                    writeln!(f, "{}{health}", if index == 0 { "well     " } else { "         " })?;
                }
            }
        }
        if self.addresses_are_asked_again {
            writeln!(
                f,
                "address  asked about again when the name is resolved: rules that deny by network, then never_dial"
            )?;
        }
        if let Some(Wait { rule, wait_ms }) = &self.waits_for_first_bytes {
            writeln!(f, "waits    up to {wait_ms} ms for first bytes: rule '{rule}' asks for the host name")?;
        }
        if let Some(why) = &self.accepted_early {
            writeln!(f, "accept   before the far side: {why}")?;
        }
        let path = if self.kernel_path {
            "may be left to the kernel (`sidetrack plan` tells)"
        } else {
            "user space"
        };
        writeln!(f, "path     {path}")?;
        if let Some(Wired { after_bytes, after_ms }) = &self.wire {
            writeln!(
                f,
                "wire     the kernel takes it over after {after_bytes} bytes and {after_ms} ms, if it can"
            )?;
        }
        if let Some(answer) = self.resolver {
            writeln!(f, "dns      {answer}")?;
        }
        if let Some(forwarded) = &self.forwarded {
            writeln!(f, "shunt    {forwarded}")?;
        }
        if let Some(packets) = &self.packets {
            write!(f, "{packets}")?;
        }
        for (index, line) in self.trace.iter().enumerate() {
            writeln!(f, "{}{line}", if index == 0 { "rules    " } else { "         " })?;
        }
        Ok(())
    }
}

impl fmt::Display for Forwarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = self.rule.as_ref().map_or_else(|| "the default".to_owned(), |rule| format!("rule '{rule}'"));
        match self.action {
            "drop" if self.rule.is_none() => {
                write!(f, "if forwarded, dropped by the default, unless the packet filter marks it otherwise")
            }
            "drop" => write!(f, "if forwarded, dropped by {by}"),
            "shunt" => {
                let (bytes, ms) = (self.after_bytes.unwrap_or(0), self.after_ms.unwrap_or(0));
                write!(f, "if forwarded, takes the fast path after {bytes} bytes and {ms} ms: {by}")
            }
            _ if self.by_packet_filter => f.write_str("if forwarded, the packet filter alone decides"),
            _ => write!(f, "if forwarded, passes on the slow path: {by}"),
        }
    }
}

impl fmt::Display for FunctionHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { function, wanted, well, falls, trouble } = self;
        write!(f, "{function}: {well} of {wanted} containers")?;
        match falls {
            0 => {}
            1 => f.write_str(", one fell since it was started")?,
            more => write!(f, ", {more} fell since it was started")?,
        }
        trouble.as_ref().map_or(Ok(()), |trouble| write!(f, "; {trouble}"))
    }
}

impl fmt::Display for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.carrier)?;
        if let Some(to) = &self.to {
            write!(f, ", to {to}")?;
        }
        if self.dial == "name" {
            f.write_str(", by name")?;
        }
        if self.carrier != "direct" {
            write!(f, ", names resolved by {}", if self.resolve == "proxy" { "the last hop" } else { "us" })?;
        }
        if self.keep_client_address {
            f.write_str(", from the client's address")?;
        }
        if let Some(version) = self.proxy_protocol {
            write!(f, ", with PROXY protocol v{version}")?;
        }
        if !self.chain.is_empty() {
            write!(f, ", through {}", self.chain.join(" -> "))?;
        }
        for (_, word) in
            [(self.tfo, "TCP Fast Open"), (self.mptcp, "Multipath TCP")].iter().filter(|(on, _)| *on)
        {
            write!(f, ", with {word}")?;
        }
        if let Some(why) = self.http3_obstacle {
            write!(f, ", by TCP, not HTTP/3 ({why})")?;
        }
        match self.http3 {
            _ if self.http3_obstacle.is_some() => {}
            "first" => f.write_str(", by HTTP/3 first")?,
            "announced" => f.write_str(", by HTTP/3 where it is announced")?,
            _ => {}
        }
        if let Some(warm) = self.warm {
            write!(f, ", {warm} connections held ready")?;
        }
        write!(
            f,
            "; connect within {} ms, idle at most {} ms",
            self.connect_timeout_ms, self.idle_timeout_ms
        )?;
        match self.lifetime_ms {
            Some(lifetime) => write!(f, ", at most {lifetime} ms in all"),
            None => Ok(()),
        }
    }
}
