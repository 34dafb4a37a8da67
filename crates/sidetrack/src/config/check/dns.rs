//! `[dns]`.

use super::super::{At, Dns, DnsMode, List, Listener, ListenerKind, raw};
use super::Check;
use sidetrack_core::names::NameTable;
use sidetrack_core::net::{IpNet, IpSet};
use std::net::{IpAddr, SocketAddr};

/// The networks whose clients may ask by default: loopback, private (RFC 1918, RFC 4193) and link-local.
const FROM: [&str; 8] = [
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
];
/// Port of name servers.
const PORT: u16 = 53;
/// Most name servers.
const SERVERS_MAX: usize = 8;
/// The default of `max_queries_per_s`.
const QUERIES_PER_S: u32 = 500;

impl Check<'_> {
    /// Checks the settings of the resolver.
    pub(super) fn dns(&mut self, raw: Option<&At<raw::Dns>>) -> Option<Dns> {
        let raw = raw?;
        let Some(address) = &raw.address else {
            let help = "write `address = \"127.0.0.1:53\"`, the address that clients ask";
            self.error(raw.span(), "nothing says where queries are answered", help);
            return None;
        };
        let addresses = self.addresses(address);
        let servers = raw.servers.as_ref().map(|list| self.servers(list, &addresses)).unwrap_or_default();
        let from = match &raw.from {
            Some(list) => self.networks(list),
            None => FROM.iter().filter_map(|net| net.parse::<IpNet>().ok()).collect(),
        };
        let rate = self.number(raw.max_queries_per_s.as_ref(), 1..=1_000_000, " queries per second");
        Some(Dns {
            addresses,
            mode: raw.mode.as_deref().copied().unwrap_or_default(),
            from,
            servers,
            max_queries_per_s: rate.and_then(|rate| u32::try_from(rate).ok()).unwrap_or(QUERIES_PER_S),
        })
    }

    fn servers(&mut self, list: &List<String>, own: &[SocketAddr]) -> Vec<SocketAddr> {
        if !(1..=SERVERS_MAX).contains(&list.items().len()) {
            let message = format!("{} name servers are out of range", list.items().len());
            self.error(list.span(), message, format!("name 1 to {SERVERS_MAX} servers"));
        }
        let mut servers = Vec::new();
        for item in list.items() {
            let parsed = match item.parse::<IpAddr>() {
                Ok(ip) => Ok(SocketAddr::new(ip, PORT)),
                Err(_) => item.parse::<SocketAddr>(),
            };
            match parsed {
                Err(_) => {
                    let help =
                        "write an address such as \"9.9.9.9\", or with a port, such as \"[2620:fe::fe]:53\"";
                    self.error(item.span(), format!("'{}' is not a name server", item.as_str()), help);
                }
                Ok(server) if own.contains(&server) => {
                    let help = "name the server that knows the names";
                    self.error(
                        item.span(),
                        format!("{server} is our own address: it would ask itself"),
                        help,
                    );
                }
                Ok(server) => servers.push(server),
            }
        }
        servers
    }

    /// Warns if connections to the addresses that represent names do not come here.
    pub(super) fn names_are_captured(
        &mut self,
        raw: Option<&At<raw::Dns>>,
        dns: Option<&Dns>,
        listeners: &[Option<Listener>],
    ) {
        let (Some(raw), Some(dns)) = (raw, dns) else { return };
        let range = IpSet::from_iter([NameTable::range()]);
        let all = |dst: &Option<IpSet>, except: &IpSet| {
            dst.as_ref().is_none_or(|dst| dst.covers(&range)) && !except.overlaps(&range)
        };
        let takes = |listener: &Listener| match &listener.kind {
            ListenerKind::Redirect(redirect) => all(&redirect.dst, &redirect.except),
            ListenerKind::Tproxy(tproxy) => all(&tproxy.dst, &tproxy.except),
            ListenerKind::Socks(_) | ListenerKind::Http(_) => true,
            _ => false,
        };
        if dns.mode == DnsMode::Resolve || listeners.iter().flatten().any(takes) {
            return;
        }
        let message =
            "clients get addresses of 198.18.0.0/15 for names, and no listener takes connections to them";
        let help = "add \"198.18.0.0/15\" to `dst` of a listener of kind redirect or tproxy, or write `mode = \"resolve\"`";
        self.warning(raw.span(), message, help);
    }
}
