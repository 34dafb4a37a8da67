//! `[[listen]]`.

use super::super::nearest;
use super::super::{
    At, DialectSetting, List, Listener, ListenerKind, Redirect, ReverseTarget, SocksDatagrams, SocksListener,
    Tproxy, raw,
};
use super::Check;
use super::rules::protocol;
use raw::ListenKind as Kind;
use sidetrack_core::association::Filtering;
use sidetrack_core::carrier::Credentials;
use sidetrack_core::flow::Protocol;
use sidetrack_core::net::IpSet;
use sidetrack_core::policy::HostPattern;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

/// The word of a kind in the file.
const fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Socks => "socks",
        Kind::Http => "http",
        Kind::Reverse => "reverse",
        Kind::Redirect => "redirect",
        Kind::Tproxy => "tproxy",
        Kind::Tunnel => "tunnel",
        Kind::Engine => "engine",
    }
}

/// A key that only some kinds have: the key, its place if it is given, and the kinds.
type SpecialKey = (&'static str, Option<Range<usize>>, &'static [Kind]);

fn special_keys(listen: &raw::Listen) -> [SpecialKey; 26] {
    const CAPTURE: &[Kind] = &[Kind::Redirect, Kind::Tproxy];
    const HTTP: &[Kind] = &[Kind::Http, Kind::Redirect, Kind::Tproxy];
    fn at<T>(at: &Option<At<T>>) -> Option<Range<usize>> {
        at.as_ref().map(At::span)
    }
    fn list<T>(list: &Option<List<T>>) -> Option<Range<usize>> {
        list.as_ref().map(List::span)
    }
    [
        ("versions", list(&listen.versions), &[Kind::Socks]),
        ("protocol", at(&listen.protocol), &[Kind::Reverse, Kind::Redirect, Kind::Tproxy]),
        ("users", list(&listen.users), &[Kind::Socks, Kind::Http, Kind::Redirect]),
        ("dialect", at(&listen.dialect), &[Kind::Socks]),
        ("bind", at(&listen.bind), &[Kind::Socks]),
        ("udp_ports", at(&listen.udp_ports), &[Kind::Socks]),
        ("udp_advertise", at(&listen.udp_advertise), &[Kind::Socks]),
        ("udp_filtering", at(&listen.udp_filtering), &[Kind::Socks]),
        ("to", at(&listen.to), &[Kind::Reverse, Kind::Http, Kind::Engine]),
        ("cache", at(&listen.cache), HTTP),
        ("tap", at(&listen.tap), HTTP),
        ("names", at(&listen.names), &[Kind::Reverse, Kind::Engine]),
        ("default", at(&listen.default), &[Kind::Reverse, Kind::Engine]),
        ("local", at(&listen.local), &[Kind::Redirect]),
        ("forwarded", at(&listen.forwarded), &[Kind::Redirect]),
        ("cgroup", at(&listen.cgroup), &[Kind::Redirect]),
        ("interfaces", list(&listen.interfaces), &[Kind::Redirect, Kind::Tproxy, Kind::Engine]),
        ("src", list(&listen.src), CAPTURE),
        ("dst", list(&listen.dst), CAPTURE),
        ("except", list(&listen.except), CAPTURE),
        ("ports", list(&listen.ports), CAPTURE),
        ("identity", at(&listen.identity), &[Kind::Tunnel, Kind::Http]),
        ("http3", at(&listen.http3), &[Kind::Http]),
        ("ca", at(&listen.ca), &[Kind::Tunnel]),
        ("pins", list(&listen.pins), &[Kind::Tunnel]),
        ("engine", at(&listen.engine), &[Kind::Engine]),
    ]
}

/// Default of `mptcp`.
const MPTCP_DEFAULT: bool = false;

impl Check<'_> {
    /// Checks the listeners. A wrong one is `None`.
    pub(super) fn listeners(&mut self, listens: &[At<raw::Listen>]) -> Vec<Option<Listener>> {
        let listeners: Vec<_> = listens.iter().map(|listen| self.listener(listen)).collect();
        let named = listens.iter().zip(&listeners).filter_map(|(listen, listener)| {
            let span = listen.name.as_ref().map_or(listen.span(), At::span);
            listener.as_ref().map(|listener| (&*listener.name, span))
        });
        self.unique(named, "listener");
        self.disks_apart(listens, &listeners);
        listeners
    }

    fn listener(&mut self, listen: &At<raw::Listen>) -> Option<Listener> {
        let Some(kind) = listen.kind.as_deref().copied() else {
            let help = "write `kind = \"socks\"`, \"http\", \"reverse\", \"redirect\", \"tproxy\", \"tunnel\" or \"engine\"";
            self.error(listen.span(), "this listener lacks a kind", help);
            if let Some(addresses) = &listen.address {
                self.addresses(addresses);
            }
            return None;
        };
        self.keys_of_kind(listen, kind);
        let name = listen.name.as_ref().map_or_else(|| word(kind).to_owned(), |name| self.name(name));
        let checked = match kind {
            Kind::Socks => Some(ListenerKind::Socks(self.socks(listen))),
            Kind::Http => Some(ListenerKind::Http(self.http(listen))),
            Kind::Reverse => self.reverse(listen).map(ListenerKind::Reverse),
            Kind::Redirect => Some(ListenerKind::Redirect(self.redirect(listen))),
            Kind::Tproxy => Some(ListenerKind::Tproxy(self.tproxy(listen))),
            Kind::Tunnel => self.far_side(listen).map(ListenerKind::Tunnel),
            Kind::Engine => self.engine(listen).map(ListenerKind::Engine),
        };
        let addresses = match (&listen.address, &checked) {
            (Some(addresses), _) => self.addresses(addresses),
            (None, Some(ListenerKind::Redirect(redirect))) if !redirect.forwarded => any_port(false),
            (None, Some(ListenerKind::Redirect(_) | ListenerKind::Tproxy(_))) => any_port(true),
            (None, _) => {
                let help = "write `address = \"127.0.0.1:1080\"`, or \"*:1080\" for every address";
                self.error(listen.span(), "this listener lacks an address", help);
                Vec::new()
            }
        };
        if let (Some(ListenerKind::Tproxy(_)), Some(given)) = (&checked, &listen.address)
            && addresses.iter().any(|address| !address.ip().is_unspecified())
        {
            let help = "TPROXY looks for a listener on the address a connection came in by, and lets it pass where there \
                        is none: write `address = \"*:15001\"`";
            self.error(given.span(), "a tproxy listener has to listen on every address", help);
        }
        let accept = listen.accept_proxy_protocol.as_ref();
        let accept_proxy_protocol = accept.map(|nets| self.networks(nets)).unwrap_or_default();
        let mptcp = self.accepts_multipath(listen, checked.as_ref());
        let protocol = self.transport_protocol(listen);
        Some(Listener {
            name: name.into(),
            addresses,
            kind: checked?,
            accept_proxy_protocol,
            mptcp,
            protocol,
        })
    }

    /// Returns the transport protocol. Reports keys that a UDP listener does not have.
    fn transport_protocol(&mut self, listen: &raw::Listen) -> Protocol {
        let protocol = listen.protocol.as_deref().copied().map_or(Protocol::Tcp, protocol);
        if protocol == Protocol::Udp {
            let keys = [
                ("names", listen.names.as_ref().map(At::span)),
                ("mptcp", listen.mptcp.as_ref().map(At::span)),
                ("accept_proxy_protocol", listen.accept_proxy_protocol.as_ref().map(List::span)),
                ("cache", listen.cache.as_ref().map(At::span)),
                ("tap", listen.tap.as_ref().map(At::span)),
            ];
            for (key, span) in keys.into_iter().filter_map(|(key, span)| Some((key, span?))) {
                let help = match key {
                    "names" => "a UDP listener has one server: `to = \"host:port\"`",
                    _ => "take it out, or give it to a listener of TCP",
                };
                self.error(span, format!("`{key}` does not go with `protocol = \"udp\"`"), help);
            }
        }
        protocol
    }

    /// Whether the listener accepts Multipath TCP. Reports an error if its kind cannot.
    fn accepts_multipath(&mut self, listen: &raw::Listen, kind: Option<&ListenerKind>) -> bool {
        let takes_clients = matches!(
            kind,
            Some(ListenerKind::Socks(_) | ListenerKind::Http(_) | ListenerKind::Reverse(_)) | None
        );
        let wanted = listen.mptcp.as_deref().copied().unwrap_or(MPTCP_DEFAULT);
        if let Some(key) = listen.mptcp.as_ref().filter(|_| wanted && !takes_clients) {
            let help = "take it out: clients that offer Multipath TCP are served over plain TCP";
            self.error(key.span(), "`mptcp` goes only with the kinds socks, http and reverse", help);
        }
        wanted && takes_clients
    }

    fn keys_of_kind(&mut self, listen: &raw::Listen, kind: Kind) {
        for (key, span, kinds) in special_keys(listen) {
            let Some(span) = span.filter(|_| !kinds.contains(&kind)) else { continue };
            let owners =
                kinds.iter().map(|kind| format!("\"{}\"", word(*kind))).collect::<Vec<_>>().join(" and ");
            let message = format!("`{key}` is not a key of kind = \"{}\"", word(kind));
            self.error(span, message, format!("it belongs to kind = {owners}"));
        }
    }

    fn socks(&mut self, listen: &raw::Listen) -> SocksListener {
        let (mut v5, mut v6) = (listen.versions.is_none(), listen.versions.is_none());
        for version in listen.versions.iter().flat_map(List::items) {
            match **version {
                5 => v5 = true,
                6 => v6 = true,
                other => {
                    self.error(
                        version.span(),
                        format!("SOCKS version {other} is not served"),
                        "use 5, 6 or both",
                    );
                }
            }
        }
        if let Some(versions) = &listen.versions {
            self.not_empty(versions);
        }
        if let (Some(dialect), false) = (&listen.dialect, v6) {
            self.error(
                dialect.span(),
                "`dialect` is about version 6, which is not served",
                "add 6 to `versions`",
            );
        }
        let dialect = match listen.dialect.as_deref() {
            None | Some(raw::Dialect::Auto) => DialectSetting::Auto,
            Some(raw::Dialect::Draft) => DialectSetting::Draft,
            Some(raw::Dialect::Socksx) => DialectSetting::Socksx,
        };
        let users = listen.users.as_ref().map(|users| self.logins(users)).unwrap_or_default();
        let udp = self.relaying(listen);
        let bind = listen.bind.as_deref().copied().unwrap_or_default();
        SocksListener { v5, v6, users, dialect, bind, udp }
    }

    /// Checks how a SOCKS listener relays datagrams.
    fn relaying(&mut self, listen: &raw::Listen) -> Option<SocksDatagrams> {
        let advertise = listen.udp_advertise.as_ref().and_then(|at| match at.parse::<IpAddr>() {
            Ok(ip) if !ip.is_unspecified() => Some(ip),
            _ => {
                let help = "write the address that clients reach, such as \"203.0.113.1\"";
                self.error(at.span(), format!("'{}' is not an IP address of a host", at.as_str()), help);
                None
            }
        });
        if listen.udp_ports.as_deref() == Some(&raw::UdpPorts::Off) {
            let others = [
                ("udp_advertise", listen.udp_advertise.as_ref().map(At::span)),
                ("udp_filtering", listen.udp_filtering.as_ref().map(At::span)),
            ];
            for (key, span) in others.into_iter().filter_map(|(key, span)| Some((key, span?))) {
                let help = format!("take `{key}` out, or write `udp_ports = \"each\"`");
                self.error(span, format!("`{key}` does not go with `udp_ports = \"off\"`"), help);
            }
            return None;
        }
        let filtering = match listen.udp_filtering.as_deref().copied().unwrap_or_default() {
            raw::UdpFiltering::EndpointIndependent => Filtering::EndpointIndependent,
            raw::UdpFiltering::AddressDependent => Filtering::AddressDependent,
            raw::UdpFiltering::AddressAndPortDependent => Filtering::AddressAndPortDependent,
        };
        let shared = listen.udp_ports.as_deref() == Some(&raw::UdpPorts::Shared);
        Some(SocksDatagrams { advertise, filtering, shared })
    }

    pub(super) fn logins(&mut self, users: &List<raw::UserEntry>) -> Vec<Credentials> {
        if users.items().is_empty() {
            let help = "take the key out to let every client use the listener";
            self.error(users.span(), "this list is empty: no user could log in", help);
        }
        let logins: Vec<_> =
            users.items().iter().filter_map(|user| Some((self.login(user)?, user.span()))).collect();
        self.unique(logins.iter().map(|(login, span)| (login.user.as_str(), span.clone())), "user");
        logins.into_iter().map(|(login, _)| login).collect()
    }

    fn login(&mut self, entry: &At<raw::UserEntry>) -> Option<Credentials> {
        let span = entry.span();
        let raw::UserEntry::Login(login) = &**entry else {
            let help = "write { user = \"name\", password_file = \"path\" }";
            self.error(span, "a socks user needs a password", help);
            return None;
        };
        let user = login.user.clone().unwrap_or_default();
        let password = match (&login.password, &login.password_file) {
            (Some(password), None) => password.reveal().to_owned(),
            (None, Some(path)) => {
                self.secret_lines(path, span.clone())?.into_iter().next().unwrap_or_default()
            }
            _ => {
                let help = "give one of `password` and `password_file`";
                self.error(span, format!("user '{user}' needs exactly one password"), help);
                return None;
            }
        };
        let fits = |text: &str| (1..=255).contains(&text.len());
        if !fits(&user) || !fits(&password) {
            let help = "the protocol (RFC 1929) carries 1 to 255 bytes of each";
            self.error(span, "user name or password is empty or too long", help);
            return None;
        }
        Some(Credentials { user, password })
    }

    /// Reads the lines of a file of secrets. Reports an error if it cannot be read, and warns if every user can
    /// read it.
    pub(super) fn secret_lines(&mut self, path: &str, span: Range<usize>) -> Option<Vec<String>> {
        match self.surroundings.secret_file(path) {
            Ok(file) => {
                if file.world_readable {
                    let help = format!("chmod 600 {path}");
                    self.warning(span, format!("every user of this machine can read '{path}'"), help);
                }
                Some(file.text.lines().map(str::to_owned).collect())
            }
            Err(error) => {
                let help = "a relative path starts from the folder of this file";
                self.error(span, format!("cannot read '{path}': {error}"), help);
                None
            }
        }
    }

    pub(super) fn reverse(&mut self, listen: &At<raw::Listen>) -> Option<ReverseTarget> {
        match (&listen.to, &listen.names) {
            (Some(to), None) => {
                if let Some(default) = &listen.default {
                    self.error(
                        default.span(),
                        "`default` goes with `names`; here `to` says it all",
                        "take it out",
                    );
                }
                self.destination(to).map(ReverseTarget::Fixed)
            }
            (None, Some(names)) => {
                let mut servers = Vec::new();
                for (pattern, server) in names.iter() {
                    let pattern = self.host_pattern(pattern, server.span());
                    servers.extend(pattern.zip(self.destination(server)));
                }
                servers.sort_by_key(|(pattern, _)| match pattern {
                    HostPattern::Exact(_) => 0,
                    HostPattern::Below(suffix) => usize::MAX - suffix.len(),
                    HostPattern::Any => usize::MAX,
                });
                let default = listen.default.as_ref().map(|default| self.destination(default));
                match default {
                    Some(None) => None,
                    default => Some(ReverseTarget::ByName { names: servers, default: default.flatten() }),
                }
            }
            (Some(to), Some(_)) => {
                let help = "use `names`, with `default` for flows of no known name";
                self.error(to.span(), "`to` and `names` exclude each other", help);
                None
            }
            (None, None) => {
                let help = "write `to = \"host:port\"`, or `names = { \"a.example\" = \"host:port\" }`";
                self.error(listen.span(), "this listener does not say which server it stands for", help);
                None
            }
        }
    }

    fn redirect(&mut self, listen: &At<raw::Listen>) -> Redirect {
        let redirect = Redirect {
            local: listen.local.as_deref().copied().unwrap_or(true),
            forwarded: listen.forwarded.as_deref().copied().unwrap_or(false),
            interfaces: self.words(listen.interfaces.as_ref()),
            src: listen.src.as_ref().map(|nets| self.networks(nets)),
            dst: listen.dst.as_ref().map(|nets| self.networks(nets)),
            except: self.set_or_none(listen.except.as_ref()),
            ports: listen.ports.as_ref().map(|ports| self.ports(ports)),
            uids: listen.users.as_ref().map(|users| self.capture_users(users)).unwrap_or_default(),
            cgroup: listen.cgroup.as_deref().map(|path| path.trim_start_matches('/').to_owned()),
            http: self.http_inside(listen),
        };
        if !redirect.local && !redirect.forwarded {
            let help = "write `local = true` or `forwarded = true`";
            self.error(listen.span(), "this listener catches neither local nor forwarded connections", help);
        }
        if !redirect.local && (!redirect.uids.is_empty() || redirect.cgroup.is_some()) {
            let help = "write `local = true`, or take `users` and `cgroup` out";
            self.error(listen.span(), "`users` and `cgroup` are about programs of this host", help);
        }
        if let (Some(interfaces), false) = (&listen.interfaces, redirect.forwarded) {
            let help = "write `forwarded = true`, or take `interfaces` out";
            self.error(interfaces.span(), "`interfaces` is about forwarded connections", help);
        }
        let narrowed = redirect.dst.is_some()
            || redirect.ports.is_some()
            || redirect.src.is_some()
            || !redirect.interfaces.is_empty()
            || !redirect.uids.is_empty()
            || redirect.cgroup.is_some();
        self.catches_all(listen, narrowed);
        redirect
    }

    fn tproxy(&mut self, listen: &At<raw::Listen>) -> Tproxy {
        let tproxy = Tproxy {
            interfaces: self.words(listen.interfaces.as_ref()),
            src: listen.src.as_ref().map(|nets| self.networks(nets)),
            dst: listen.dst.as_ref().map(|nets| self.networks(nets)),
            except: self.set_or_none(listen.except.as_ref()),
            ports: listen.ports.as_ref().map(|ports| self.ports(ports)),
            http: self.http_inside(listen),
        };
        let narrowed = tproxy.dst.is_some()
            || tproxy.ports.is_some()
            || tproxy.src.is_some()
            || !tproxy.interfaces.is_empty();
        self.catches_all(listen, narrowed);
        tproxy
    }

    /// Requires a condition: a listener that catches everything often breaks other programs on the host.
    fn catches_all(&mut self, listen: &At<raw::Listen>, narrowed: bool) {
        if !narrowed {
            let help = "narrow it with `dst`, `src`, `ports`, `interfaces`, `users` or `cgroup`; if all is meant, \
                        write `dst = [\"0.0.0.0/0\", \"::/0\"]`";
            self.error(listen.span(), "this listener would catch every connection", help);
        }
    }

    fn set_or_none(&mut self, nets: Option<&List<String>>) -> IpSet {
        nets.map(|nets| self.networks(nets)).unwrap_or_default()
    }

    pub(super) fn words(&mut self, list: Option<&List<String>>) -> Vec<String> {
        let Some(list) = list else { return Vec::new() };
        self.not_empty(list);
        for word in
            list.items().iter().filter(|word| word.is_empty() || word.len() > 15 || word.contains('/'))
        {
            let help = "`ip link` lists the interfaces; a name has 1 to 15 bytes";
            self.error(word.span(), format!("'{}' is not an interface name", word.as_str()), help);
        }
        list.items().iter().map(|word| word.to_string()).collect()
    }

    fn capture_users(&mut self, users: &List<raw::UserEntry>) -> Vec<u32> {
        self.not_empty(users);
        let mut uids = Vec::new();
        for user in users.items() {
            let number = match &**user {
                raw::UserEntry::Id(id) => raw::Number::Number(*id),
                raw::UserEntry::Name(name) => raw::Number::Text(name.clone()),
                raw::UserEntry::Login(_) => {
                    let help = "here `users` lists names or ids of users of this host";
                    self.error(user.span(), "a redirect listener has no logins", help);
                    continue;
                }
            };
            uids.extend(self.uid(&number, user.span()));
        }
        uids
    }

    /// Returns a listener by name. Reports an error if there is none.
    pub(super) fn listener_named<'l>(
        &mut self,
        at: &At<String>,
        listeners: &'l [Option<Listener>],
    ) -> Option<&'l Listener> {
        let found = listeners.iter().flatten().find(|listener| *listener.name == **at);
        // If another listener is wrong, this name may be the name of that one.
        if found.is_none() && listeners.iter().all(Option::is_some) {
            let names: Vec<_> = listeners.iter().flatten().map(|listener| &*listener.name).collect();
            let help = match nearest(at, names.iter().copied()) {
                Some(near) => format!("did you mean \"{near}\"?"),
                None if names.is_empty() => "there is no [[listen]] in this file".to_owned(),
                None => format!("the listeners are: {}", names.join(", ")),
            };
            self.error(at.span(), format!("there is no listener '{}'", at.as_str()), help);
        }
        found
    }
}

/// Returns addresses of both families with port 0, so that the kernel picks a port.
fn any_port(everywhere: bool) -> Vec<SocketAddr> {
    if everywhere {
        vec![(Ipv4Addr::UNSPECIFIED, 0).into(), (Ipv6Addr::UNSPECIFIED, 0).into()]
    } else {
        vec![(Ipv4Addr::LOCALHOST, 0).into(), (Ipv6Addr::LOCALHOST, 0).into()]
    }
}
