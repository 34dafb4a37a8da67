//! `[[listen]]` of kind engine.

use super::super::{At, Choice, EngineIo, EngineListener, List, Pattern, ReverseTarget, raw};
use super::Check;
use sidetrack_core::engine::Steering;
use sidetrack_core::flow::Host;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

impl Check<'_> {
    /// Checks the settings of an engine listener. Returns `None` if something essential is wrong.
    pub(super) fn engine(&mut self, listen: &At<raw::Listen>) -> Option<EngineListener> {
        let keys = listen.engine.as_deref().cloned().unwrap_or_default();
        let interfaces = self.words(listen.interfaces.as_ref());
        if listen.interfaces.is_none() {
            let help = "write `interfaces = [\"eth0\"]`: those by which clients and servers are reached";
            self.error(listen.span(), "this engine lacks interfaces", help);
        }
        if let Some(proxy) = &listen.accept_proxy_protocol {
            let help = "take it out: the engine sees the packets of its clients themselves";
            self.error(proxy.span(), "the engine reads no PROXY protocol header", help);
        }
        let target = self.reverse(listen)?;
        self.addresses_only(listen, &target);
        let answer_by_xdp = self.answers_by_xdp(&keys, &target);
        let sources = match &keys.sources {
            Some(list) => self.source_addresses(list),
            None => self.own_addresses(listen),
        };
        Some(EngineListener {
            interfaces,
            target,
            choices: keys.choose.iter().filter_map(|choice| self.choice(choice)).collect(),
            io: match keys.io.as_deref() {
                None | Some(raw::EngineIo::Packet) => EngineIo::Packet,
                Some(raw::EngineIo::Xdp) => EngineIo::Xdp,
            },
            sources,
            source_ports: self.port_range(keys.source_ports.as_ref(), EngineListener::SOURCE_PORTS),
            steering: match keys.steering.as_deref() {
                None | Some(raw::Steering::Port) => Steering::Port,
                Some(raw::Steering::Ip) => Steering::Ip,
            },
            connections_max: self
                .number(keys.connections_max.as_ref(), 16..=1 << 24, " connections")
                .and_then(|number| u32::try_from(number).ok())
                .unwrap_or(EngineListener::CONNECTIONS_MAX),
            offload_max: self
                .number(keys.offload_max.as_ref(), 0..=1 << 22, " connections")
                .and_then(|number| u32::try_from(number).ok())
                .unwrap_or(EngineListener::OFFLOAD_MAX),
            kernel_connections_max: self
                .number(keys.kernel_connections_max.as_ref(), 0..=65_535, " connections")
                .and_then(|number| u16::try_from(number).ok())
                .unwrap_or(0),
            coalesce: Duration::from_micros(
                self.number(keys.coalesce_us.as_ref(), 0..=10_000, " microseconds").unwrap_or(0),
            ),
            answer_by_xdp,
        })
    }

    /// Checks that the client speaks first. With SYN cookies no SYN-ACK is sent again: if the handshake's ACK
    /// gets lost, only the client's data can replace it.
    fn answers_by_xdp(&mut self, keys: &raw::Engine, target: &ReverseTarget) -> bool {
        let Some(cookies) = keys.syn_cookies.as_ref().filter(|is| ***is == raw::SynCookies::Xdp) else {
            return false;
        };
        if keys.io.as_deref() != Some(&raw::EngineIo::Xdp) {
            self.error(cookies.span(), "there is no XDP program to answer SYNs", "write `io = \"xdp\"`, too");
        }
        if keys.choose.is_empty() && !target.needs_first_bytes() {
            let help = "take it out, or choose the server by what a client sends first (`choose`, `names`): if the last part \
                        of a handshake gets lost, only the client can bring it again, and one that waits for a greeting \
                        never would";
            self.error(cookies.span(), "the clients of this listener need not speak first", help);
        }
        true
    }

    fn choice(&mut self, choice: &At<raw::Choice>) -> Option<(Choice, SocketAddr)> {
        let like = match (&choice.prefix, &choice.regex, &choice.ldap_dn) {
            (Some(prefix), None, None) if !prefix.is_empty() => Choice::Prefix(prefix.as_bytes().into()),
            (None, Some(regex), None) => Choice::Regex(self.pattern(regex)?),
            (None, None, Some(dn)) => Choice::LdapDn(dn.as_str().into()),
            _ => {
                let help = "write { prefix = \"SSH-\", to = \"192.0.2.1:22\" } or { ldap_dn = \"dc=a\", to = \"192.0.2.1:389\" }";
                self.error(
                    choice.span(),
                    "a choice has one of a `prefix`, which is not empty, a `regex` and an `ldap_dn`",
                    help,
                );
                return None;
            }
        };
        let Some(to) = &choice.to else {
            self.error(choice.span(), "this choice leads nowhere", "write `to = \"192.0.2.1:389\"`");
            return None;
        };
        let Some(to) = to.parse().ok().filter(|_| !to.contains('%')) else {
            let help =
                "such as \"192.0.2.1:389\": the engine has no time to resolve names, and knows no zones";
            self.error(to.span(), format!("'{}' is not an address with a port", to.as_str()), help);
            return None;
        };
        Some((like, to))
    }

    fn pattern(&mut self, text: &At<String>) -> Option<Pattern> {
        match Pattern::new(text) {
            Ok(pattern) => Some(pattern),
            Err(error) => {
                let help = "write one such as \"^GET /api/\", in the syntax of Rust's regex crate";
                self.error(text.span(), format!("this expression cannot be used: {error}"), help);
                None
            }
        }
    }

    /// Servers must be addresses: a packet cannot wait until a name is resolved.
    fn addresses_only(&mut self, listen: &At<raw::Listen>, target: &ReverseTarget) {
        let (servers, default) = match target {
            ReverseTarget::Fixed(server) => (Vec::new(), Some(server)),
            ReverseTarget::ByName { names, default } => {
                (names.iter().map(|(_, server)| server).collect(), default.as_ref())
            }
        };
        for server in servers.into_iter().chain(default) {
            if let Host::Name(name) = &server.host {
                let help = "write its address: the engine has no time to resolve names";
                self.error(listen.span(), format!("'{name}' is not an address"), help);
            }
            if server.zone != 0 {
                let help = "write an address that this host has a route to";
                self.error(listen.span(), format!("'{server}' has a zone, and the engine knows none"), help);
            }
        }
    }

    fn source_addresses(&mut self, list: &List<String>) -> Vec<IpAddr> {
        self.not_empty(list);
        let mut addresses = Vec::new();
        for item in list.items() {
            match item.parse::<IpAddr>() {
                Ok(address) if !address.is_unspecified() && !address.is_multicast() => {
                    addresses.push(address)
                }
                _ => {
                    let help = "write addresses of this host, such as \"192.0.2.10\"";
                    self.error(item.span(), format!("'{}' is not an address of a host", item.as_str()), help);
                }
            }
        }
        addresses
    }

    /// The addresses that clients connect to are also the source addresses towards servers.
    fn own_addresses(&mut self, listen: &At<raw::Listen>) -> Vec<IpAddr> {
        let items = listen.address.iter().flat_map(|list| list.items());
        let mut own: Vec<_> =
            items.filter_map(|item| item.parse::<SocketAddr>().ok().map(|at| at.ip())).collect();
        own.retain(|ip| !ip.is_unspecified());
        own.dedup();
        if own.is_empty() && listen.address.is_some() {
            let help = "write `engine = { sources = [\"192.0.2.10\"] }`, an address of this host";
            self.error(listen.span(), "nothing says where connections to servers come from", help);
        }
        own
    }

    /// Parses a range `first-last` of ports. Returns `default` if the key is not given.
    pub(super) fn port_range(
        &mut self,
        at: Option<&At<String>>,
        default: RangeInclusive<u16>,
    ) -> RangeInclusive<u16> {
        let Some(at) = at else { return default };
        let parts = at.split_once('-').and_then(|(first, last)| {
            Some((first.trim().parse::<u16>().ok()?, last.trim().parse::<u16>().ok()?))
        });
        match parts {
            Some((first, last)) if 0 < first && first <= last => first..=last,
            _ => {
                let help = "write \"first-last\", such as \"61000-65535\"";
                self.error(at.span(), format!("'{}' is not a range of ports", at.as_str()), help);
                default
            }
        }
    }
}
