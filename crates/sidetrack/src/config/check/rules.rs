//! `[[rule]]`.

use super::super::{At, List, Listener, raw};
use super::Check;
use crate::tls::Roots;
use sidetrack_core::carrier::{Carrier, Credentials, Hop, HopError, HopProtocol, OverlayCarrier};
use sidetrack_core::flow::{Intercept, Protocol};
use sidetrack_core::policy::{
    Action, Carry, Condition, Connect, Dial, Http3, KernelPath, Match, ProxyVersion, Resolve, Rule, Warm,
};
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

/// Longest wait for the client's first bytes, milliseconds. The same as for the host name.
const INITIAL_DATA_WAIT_MAX_MS: u64 = 100;
/// Allowed times that a warm connection may wait for a flow, milliseconds.
const WARM_IDLE_MS: RangeInclusive<u64> = 100..=600_000;
/// Most hops of a carrier. Each hop adds a round trip through all hops before it.
const HOPS_MAX: usize = 16;

impl Check<'_> {
    /// Checks the rules. A wrong one is `None`.
    pub(super) fn rules(
        &mut self,
        rules: &[At<raw::Rule>],
        listeners: &[Option<Listener>],
    ) -> Vec<Option<Rule>> {
        let named =
            rules.iter().filter_map(|rule| rule.name.as_ref()).map(|name| (name.as_str(), name.span()));
        self.unique(named, "rule");
        rules.iter().map(|rule| self.rule(rule, listeners)).collect()
    }

    fn rule(&mut self, rule: &At<raw::Rule>, listeners: &[Option<Listener>]) -> Option<Rule> {
        let name = match &rule.name {
            Some(name) => {
                if name.as_str() == "default" {
                    let help = "choose another; in a test 'default' means that no rule matched";
                    self.error(name.span(), "a rule cannot be named 'default'", help);
                }
                self.name(name)
            }
            None => {
                let help = "write `name = \"…\"`: records, metrics and `explain` speak of rules by name";
                self.error(rule.span(), "this rule lacks a name", help);
                String::new()
            }
        };
        let matcher = self.matcher(&rule.matcher, listeners);
        let action = match (&rule.action, &rule.carrier) {
            (Some(_), None) => {
                self.deny_takes_no_options(rule);
                Action::Deny
            }
            (None, Some(_)) => Action::Carry(Arc::new(self.carry(rule)?)),
            (Some(action), Some(_)) => {
                self.error(
                    action.span(),
                    "a rule either denies or carries",
                    "take `action` or `carrier` out",
                );
                self.carry(rule);
                return None;
            }
            (None, None) => {
                let help = "write `action = \"deny\"`, or `carrier = \"direct\"` or a hop such as \"socks6://gw:1080\"";
                self.error(rule.span(), format!("the rule '{name}' does not say what to do"), help);
                self.carry(rule);
                return None;
            }
        };
        Some(Rule { name: name.into(), matcher, action })
    }

    pub(super) fn matcher(&mut self, raw: &raw::Match, listeners: &[Option<Listener>]) -> Match {
        let mut all = Vec::new();
        all.extend(raw.from.as_ref().map(|nets| Condition::From(self.networks(nets))));
        all.extend(raw.to.as_ref().map(|nets| Condition::To(self.networks(nets))));
        all.extend(raw.port.as_ref().map(|ports| Condition::Port(self.ports(ports))));
        all.extend(raw.host.as_ref().map(|hosts| Condition::Host(self.host_patterns(hosts))));
        all.extend(raw.host_file.as_ref().map(|files| Condition::HostFile(self.host_files(files))));
        all.extend(raw.host_contains.as_ref().map(|words| Condition::HostContains(self.host_words(words))));
        all.extend(raw.url.as_ref().map(|patterns| Condition::Url(self.url_patterns(patterns))));
        if let Some(names) = &raw.listener {
            self.not_empty(names);
            for name in names.items() {
                self.listener_named(name, listeners);
            }
            all.push(Condition::Listener(names.items().iter().map(|name| name.as_str().into()).collect()));
        }
        if let Some(kinds) = &raw.intercept {
            self.not_empty(kinds);
            all.push(Condition::Intercept(kinds.items().iter().map(|kind| intercept(**kind)).collect()));
        }
        all.extend(raw.protocol.as_deref().map(|word| Condition::Protocol(protocol(*word))));
        all.extend(raw.process.as_ref().map(|names| Condition::Process(self.process_names(names))));
        all.extend(raw.user.as_ref().map(|users| Condition::Uid(self.uids(users))));
        if let Some(users) = &raw.socks_user {
            self.not_empty(users);
            all.push(Condition::SocksUser(users.items().iter().map(|user| user.as_str().into()).collect()));
        }
        Match::new(all)
    }

    fn process_names(&mut self, names: &List<String>) -> Vec<Box<str>> {
        self.not_empty(names);
        for name in names.items().iter().filter(|name| name.contains('/')) {
            let base = name.rsplit('/').next().unwrap_or_default();
            let help = format!("processes are known by the base name of the executable: write \"{base}\"");
            self.error(name.span(), format!("'{}' is a path", name.as_str()), help);
        }
        names.items().iter().map(|name| name.as_str().into()).collect()
    }

    /// Reports keys about carrying a flow in a rule that denies.
    fn deny_takes_no_options(&mut self, rule: &raw::Rule) {
        // The pattern has no `..`: a new key of a rule does not compile until it stands in one of the two lists.
        macro_rules! keys {
            (allowed: $($allowed:ident),*; refused: $($key:ident),* $(,)?) => {{
                let raw::Rule { $($allowed: _,)* $($key),* } = rule;
                [$((stringify!($key), $key.as_ref().map(|at| at.span()))),*]
            }};
        }
        // `carrier` beside `action` is an error of its own.
        let refused = keys!(
            allowed: name, matcher, action, carrier;
            refused: dissemination, paths, link, hops, trust, priority, deadline_ms, credentials_file, to, dial, resolve, keep_client_address, proxy_protocol, idle_timeout_ms,
            lifetime_ms, connect_timeout_ms, initial_data_wait_ms, connect, tfo, mptcp, http3, warm, warm_idle_ms, kernel, metadata,
            on_chain_change, on_function_down, agreement, shunt, chain,
        );
        for (key, span) in refused {
            if let Some(span) = span {
                let help = "take it out, or write `carrier = …` instead of `action = \"deny\"`";
                self.error(span, format!("`{key}` means nothing in a rule that denies"), help);
            }
        }
    }

    /// Checks how a rule carries its flows. Returns `None` without a carrier, after all other keys were checked.
    fn carry(&mut self, rule: &raw::Rule) -> Option<Carry> {
        let carrier = rule.carrier.as_ref();
        let carrier = carrier.and_then(|carrier| self.carrier(carrier, rule.credentials_file.as_ref()));
        let carrier = carrier.map(|carrier| self.with_paths(carrier, rule));
        let flag = |at: &Option<At<bool>>| at.as_deref().copied().unwrap_or(false);
        let wait =
            self.number(rule.initial_data_wait_ms.as_ref(), 0..=INITIAL_DATA_WAIT_MAX_MS, " milliseconds");
        let to = rule.to.as_ref().and_then(|to| self.destination(to));
        if let (Some(at), Some(to), Some(carrier)) = (&rule.to, &to, &carrier)
            && to.zone != 0
            && *carrier != Carrier::Direct
        {
            self.zone_of_another(at.span());
        }
        let carry = Carry {
            to,
            dial: match rule.dial.as_deref() {
                None | Some(raw::Dial::Original) => Dial::Original,
                Some(raw::Dial::Name) => Dial::Name,
            },
            resolve: match rule.resolve.as_deref() {
                None | Some(raw::Resolve::Proxy) => Resolve::Proxy,
                Some(raw::Resolve::Local) => Resolve::Local,
            },
            keep_client_address: flag(&rule.keep_client_address),
            proxy_protocol: rule.proxy_protocol.as_ref().and_then(|version| self.proxy_version(version)),
            idle_timeout_ms: self.millis(rule.idle_timeout_ms.as_ref()),
            lifetime_ms: self.millis(rule.lifetime_ms.as_ref()),
            connect_timeout_ms: self.millis(rule.connect_timeout_ms.as_ref()),
            initial_data_wait_ms: wait.unwrap_or(0),
            connect: match rule.connect.as_deref() {
                None => Connect::Auto,
                Some(raw::RuleConnect::Early) => Connect::Early,
                Some(raw::RuleConnect::Faithful) => Connect::Faithful,
            },
            tfo: flag(&rule.tfo),
            mptcp: flag(&rule.mptcp),
            http3: match rule.http3.as_deref() {
                None | Some(raw::RuleHttp3::Never) => Http3::Never,
                Some(raw::RuleHttp3::Announced) => Http3::Announced,
                Some(raw::RuleHttp3::First) => Http3::First,
            },
            warm: self.warm(rule),
            kernel: match rule.kernel.as_deref() {
                None | Some(raw::Kernel::Auto) => KernelPath::Auto,
                Some(raw::Kernel::Never) => KernelPath::Never,
            },
            chain: self.chain(rule),
            shunt: self.shunt_after(rule),
            agreement: self.clause(rule),
            metadata: rule.metadata.as_ref().map(|metadata| self.metadata(metadata)).unwrap_or_default(),
            carrier: carrier?,
        };
        self.contradictions(rule, &carry);
        Some(carry)
    }

    fn warm(&mut self, rule: &raw::Rule) -> Option<Warm> {
        let ready = self.number(rule.warm.as_ref(), 0..=Warm::READY_MAX.into(), " connections").unwrap_or(0);
        let idle_ms = self.number(rule.warm_idle_ms.as_ref(), WARM_IDLE_MS, " milliseconds");
        if let Some(idle) = rule.warm_idle_ms.as_ref().filter(|_| rule.warm.is_none()) {
            let help = "add `warm`, the number of connections that stand ready, or take it out";
            self.error(idle.span(), "`warm_idle_ms` means nothing without `warm`", help);
        }
        let ready = u16::try_from(ready).ok().filter(|ready| *ready > 0)?;
        Some(Warm { ready, idle_ms: idle_ms.unwrap_or(Warm::IDLE_MS) })
    }

    fn proxy_version(&mut self, at: &At<u8>) -> Option<ProxyVersion> {
        match **at {
            1 => Some(ProxyVersion::V1),
            2 => Some(ProxyVersion::V2),
            other => {
                self.error(at.span(), format!("there is no PROXY protocol version {other}"), "use 1 or 2");
                None
            }
        }
    }

    fn metadata(&mut self, metadata: &std::collections::BTreeMap<String, At<String>>) -> Vec<(u16, String)> {
        let mut pairs = Vec::new();
        for (key, value) in metadata {
            match key.parse() {
                Ok(key) => pairs.push((key, value.to_string())),
                Err(_) => {
                    let message = format!("'{key}' is not a metadata key");
                    self.error(
                        value.span(),
                        message,
                        "a key is a number from 0 to 65535, as in { 1000 = \"text\" }",
                    );
                }
            }
            if value.len() > METADATA_VALUE_MAX {
                let message = format!("the value of metadata {key} has {} bytes", value.len());
                self.error(value.span(), message, format!("at most {METADATA_VALUE_MAX} bytes fit"));
            }
        }
        pairs.sort();
        pairs
    }

    fn carrier(&mut self, texts: &List<String>, credentials: Option<&At<String>>) -> Option<Carrier> {
        if let [only] = texts.items()
            && only.as_str() == "direct"
        {
            if let Some(file) = credentials {
                self.error(file.span(), "\"direct\" needs no credentials", "take `credentials_file` out");
            }
            return Some(Carrier::Direct);
        }
        if let [only] = texts.items()
            && let Some(name) = only.strip_prefix("overlay:")
        {
            if let Some(file) = credentials {
                self.error(file.span(), "an overlay needs no credentials", "take `credentials_file` out");
            }
            let node = self.overlay_carrier(only, name)?;
            return Some(Carrier::Overlay(OverlayCarrier::one_path(node)));
        }
        if let [only] = texts.items()
            && let Some(name) = only.strip_prefix("tunnel:")
        {
            if let Some(file) = credentials {
                let help = "take `credentials_file` out: the `identity` of the [[tunnel]] says who we are";
                self.error(file.span(), "a tunnel needs no credentials", help);
            }
            return self.tunnel_named(name, only.span()).map(Carrier::Tunnel);
        }
        if texts.items().is_empty() || texts.items().len() > HOPS_MAX {
            let help = format!("use \"direct\", or 1 to {HOPS_MAX} hops");
            self.error(texts.span(), format!("a carrier of {} hops", texts.items().len()), help);
            return None;
        }
        let hops: Vec<Option<Hop>> = texts.items().iter().map(|text| self.hop(text)).collect();
        let mut hops: Vec<Hop> = hops.into_iter().collect::<Option<_>>()?;
        if let Some(file) = credentials {
            self.hop_credentials(file, &mut hops);
        }
        for (hop, text) in hops.iter().zip(texts.items()).skip(1) {
            if hop.address.zone != 0 {
                self.zone_of_another(text.span());
            }
            if hop.tfo || hop.mptcp {
                let help = "only the first hop is dialled by us: set it there";
                self.error(text.span(), "`tfo` and `mptcp` of a later hop have no effect", help);
            }
        }
        let carrier = Carrier::Hops(hops);
        if let Some((index, why)) = carrier.http3_obstacle() {
            let span = texts.items().get(index).map_or(texts.span(), At::span);
            let help = "a hop of scheme h3 is reached by UDP: write it first, or change the hops before it";
            self.error(span, format!("the hops before this one cannot carry its datagrams: {why}"), help);
        }
        Some(carrier)
    }

    /// An address with a zone that another host would dial.
    fn zone_of_another(&mut self, span: Range<usize>) {
        let help = "leave the zone out, or dial the address from here";
        self.error(
            span,
            "the zone of this address is an interface of this host: another host dials it",
            help,
        );
    }

    fn hop(&mut self, text: &At<String>) -> Option<Hop> {
        let error = match self.numbered(text)?.parse::<Hop>() {
            Ok(hop) => return self.with_authorities(hop, text),
            Err(error) => error,
        };
        let help = "such as \"socks5://host:1080\", \"socks6://user:password@host:1080\", \
                    \"socks6+socksx://host\" or \"http://host:3128\"";
        // The text before an @ may be a password, so no message repeats it.
        let message = match error {
            _ if text.as_str() == "direct" => "\"direct\" cannot be one of several hops".to_owned(),
            _ if text.starts_with("tunnel:") => "a tunnel cannot be one of several hops".to_owned(),
            HopError::NoScheme(_) => "this is neither \"direct\" nor a hop".to_owned(),
            HopError::BadAddress(_) if text.contains('@') => "the address of this hop is wrong".to_owned(),
            other => other.to_string(),
        };
        self.error(text.span(), message, help);
        None
    }

    /// Reads the file of a hop's authorities.
    pub(super) fn with_authorities(&mut self, mut hop: Hop, text: &At<String>) -> Option<Hop> {
        let Some(file) = &hop.ca_file else { return Some(hop) };
        let read =
            self.surroundings.secret_file(file).map_err(|error| format!("cannot read '{file}': {error}"));
        let read = read.and_then(|read| match Roots::of(&read.text) {
            Ok(_) => Ok(read.text.into()),
            Err(error) => Err(format!("'{file}': {error}")),
        });
        match read {
            Ok(pem) => {
                hop.ca_pem = Some(pem);
                Some(hop)
            }
            Err(message) => {
                let help = "`ca` names a file with certificates in PEM; a relative path starts from the folder of this file";
                self.error(text.span(), message, help);
                None
            }
        }
    }

    /// Reads credentials from a file with one line for each hop: `user:password`, or `-`.
    fn hop_credentials(&mut self, file: &At<String>, hops: &mut [Hop]) {
        let Some(lines) = self.secret_lines(file, file.span()) else { return };
        if lines.len() != hops.len() {
            let message = format!("'{}' has {} lines for {} hops", file.as_str(), lines.len(), hops.len());
            self.error(file.span(), message, "write one line for each hop: user:password, or - for none");
            return;
        }
        for (index, (hop, line)) in hops.iter_mut().zip(&lines).enumerate() {
            if line == "-" {
                continue;
            }
            let fits = |part: &str| (1..=255).contains(&part.len());
            match line.split_once(':').filter(|(user, password)| fits(user) && fits(password)) {
                Some((user, password)) => {
                    hop.credentials =
                        Some(Credentials { user: user.to_owned(), password: password.to_owned() });
                }
                None => {
                    let message = format!("line {} of '{}' is not user:password", index + 1, file.as_str());
                    self.error(file.span(), message, "1 to 255 bytes each, or - for a hop without");
                }
            }
        }
    }

    /// Reports settings that contradict `warm`: a warm connection is opened before its flow is known.
    fn warm_contradictions(&mut self, rule: &raw::Rule, carry: &Carry) {
        let Some(at) = rule.warm.as_ref().filter(|_| carry.warm.is_some()) else { return };
        let contradictions = [
            (
                carry.carrier != Carrier::Direct,
                "`warm` goes only with carrier = \"direct\"",
                "a tunnel holds its connections open anyway; towards hops there is none to hold",
            ),
            (
                carry.keep_client_address,
                "`warm` and `keep_client_address` exclude each other",
                "take one out: a connection that stands before its flow cannot have the address of its client",
            ),
            (
                carry.proxy_protocol.is_some(),
                "`warm` and `proxy_protocol` exclude each other",
                "take one out: a server that expects the header does not wait for it as long as a connection is held",
            ),
        ];
        for (wrong, message, help) in contradictions {
            if wrong {
                self.error(at.span(), message, help);
            }
        }
    }

    /// Reports settings that contradict `http3`: its connections are shared, and each has one server.
    fn http3_contradictions(&mut self, rule: &raw::Rule, carry: &Carry) {
        let Some(at) = rule.http3.as_ref().filter(|_| carry.http3 != Http3::Never) else { return };
        let contradictions = [
            (
                matches!(&carry.carrier, Carrier::Overlay(overlay) if overlay.node.starts_with("group:")),
                "`http3` does not go with a carrier to all members of a group",
                "name one node, or \"overlay:nearest:GROUP\": a connection of HTTP/3 has one server",
            ),
            (
                carry.keep_client_address || carry.proxy_protocol.is_some(),
                "`http3` goes with neither `keep_client_address` nor `proxy_protocol`",
                "take one out: a connection of HTTP/3 is shared by clients, and cannot tell the server whose it is",
            ),
        ];
        for (_, message, help) in contradictions.into_iter().filter(|(wrong, ..)| *wrong) {
            self.error(at.span(), message, help);
        }
        if let Some(why) = carry.http3_obstacle() {
            let help = "take `http3` out, or use hops that carry UDP";
            self.warning(at.span(), format!("servers are asked by TCP: {why}"), help);
        }
    }

    /// Reports options that contradict each other.
    fn contradictions(&mut self, rule: &raw::Rule, carry: &Carry) {
        self.warm_contradictions(rule, carry);
        self.http3_contradictions(rule, carry);
        self.wire_contradictions(rule, carry);
        let direct = carry.carrier == Carrier::Direct;
        let only_direct = [
            ("keep_client_address", &rule.keep_client_address, "a hop opens the connection to the server"),
            ("tfo", &rule.tfo, "towards a hop write it as \"socks6://host:1080?tfo=true\""),
            ("mptcp", &rule.mptcp, "towards a hop write it as \"socks6://host:1080?mptcp=true\""),
        ];
        for (key, at, help) in only_direct {
            if let Some(at) = at.as_ref().filter(|at| !direct && ***at) {
                self.error(at.span(), format!("`{key}` goes only with carrier = \"direct\""), help);
            }
        }
        if let Some(resolve) = rule.resolve.as_ref().filter(|_| direct) {
            let help = "take it out: with carrier = \"direct\" names are resolved here";
            self.error(resolve.span(), "`resolve` is about carriers with hops", help);
        }
        let socks6 = matches!(&carry.carrier, Carrier::Hops(hops)
            if hops.iter().any(|hop| matches!(hop.protocol, HopProtocol::Socks6(_))));
        let tunnel = matches!(carry.carrier, Carrier::Tunnel(_));
        if let Some(metadata) = rule.metadata.as_ref().filter(|_| !socks6 && !tunnel) {
            self.error(
                metadata.span(),
                "metadata travels with SOCKS6 and in tunnels only",
                "use a socks6 hop or a tunnel, or take it out",
            );
        }
        if let (Some(at), Some(why)) = (&rule.connect, carry.faithful_obstacle())
            && carry.connect == Connect::Faithful
        {
            let help = "write connect = \"early\", or take the other key out";
            self.error(at.span(), format!("a connection of this rule cannot be held: {why}"), help);
        }
        let early = socks6
            || tunnel
            || carry.tfo
            || matches!(&carry.carrier, Carrier::Hops(hops) if hops.iter().any(|hop| hop.tfo || hop.optimistic));
        if let Some(wait) = rule.initial_data_wait_ms.as_ref().filter(|wait| ***wait > 0 && !early) {
            let help = "use a socks6 hop, ?optimistic=true or tfo, or take it out";
            self.error(wait.span(), "nothing here can send the client's first bytes early", help);
        }
    }
}

/// Longest value of one metadata option, bytes. All options of a request together have at most 16 KiB.
const METADATA_VALUE_MAX: usize = 4096;

/// The core's word for a kind.
pub(super) const fn intercept(kind: raw::InterceptKind) -> Intercept {
    match kind {
        raw::InterceptKind::Run => Intercept::Run,
        raw::InterceptKind::Redirect => Intercept::Redirect,
        raw::InterceptKind::Tproxy => Intercept::Tproxy,
        raw::InterceptKind::Socks => Intercept::Socks,
        raw::InterceptKind::Http => Intercept::Http,
        raw::InterceptKind::Reverse => Intercept::Reverse,
        raw::InterceptKind::Tunnel => Intercept::Tunnel,
        raw::InterceptKind::Engine => Intercept::Engine,
    }
}

/// The core's word for a transport protocol.
pub(super) const fn protocol(protocol: raw::Protocol) -> Protocol {
    match protocol {
        raw::Protocol::Tcp => Protocol::Tcp,
        raw::Protocol::Udp => Protocol::Udp,
    }
}
