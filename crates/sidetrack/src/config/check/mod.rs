//! From [`raw::File`] to [`Config`]: checks meaning, references and contradictions. Continues after an error so
//! that one run reports all errors.

mod admin;
mod branches;
mod containers;
pub(super) mod decision_tests;
mod dns;
mod engine;
mod export;
mod functions;
mod gate;
mod groups;
mod http;
mod listen;
mod lists;
mod otlp;
mod outgoing;
mod overlay;
mod overlay_link;
mod policy;
mod reached;
mod relations;
mod rules;
mod service;
mod shunt;
mod switches;
mod tap;
mod trust;
mod tunnel;
mod values;
mod wasm;
mod wire;

use super::surroundings::Surroundings;
use super::{
    Admin, AdminAt, At, CaptureAt, Config, History, Limits, LogFormat, OnCrash, Record, RecordTo, Tap, raw,
};
use super::{Problem, nearest};
use sidetrack_core::flow::HostName;
use sidetrack_core::function::FunctionSpec;
use sidetrack_core::net::IpSet;
use sidetrack_core::overlay::group::GroupName;
use sidetrack_core::overlay::service::Trust;
use sidetrack_core::policy::{Action, Policy};
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

/// State of the check: what it looks up and where it reports problems.
struct Check<'a> {
    surroundings: &'a dyn Surroundings,
    problems: &'a mut Vec<Problem>,
    /// Named sets, by name.
    sets: BTreeMap<String, IpSet>,
    /// Networks that are not dialled unless a rule names them.
    never: IpSet,
    /// Functions, by name. `None` for a wrong one.
    functions: BTreeMap<String, Option<Arc<FunctionSpec>>>,
    /// The names of the overlay's nodes. `None`: there is no overlay.
    overlay_names: Option<Vec<Arc<str>>>,
    /// The names of the overlay's groups.
    overlay_groups: Vec<GroupName>,
    /// Which nodes packets over the overlay rely on, where nothing else is said.
    overlay_trust: Trust,
    /// Whether the file has a table `[policy]`, right or wrong.
    has_agreement: bool,
    /// Names of tunnels, including tunnels with errors.
    tunnels: Vec<Arc<str>>,
    /// Whether the file has a table `[tap]`, right or wrong.
    has_tap: bool,
    /// The checked `[tap]`, if it is right.
    tap: Option<Arc<Tap>>,
}

impl<'a> Check<'a> {
    /// The state before anything is read.
    fn new(file: &raw::File, surroundings: &'a dyn Surroundings, problems: &'a mut Vec<Problem>) -> Self {
        Self {
            surroundings,
            problems,
            sets: BTreeMap::new(),
            never: IpSet::default(),
            functions: BTreeMap::new(),
            overlay_names: None,
            overlay_groups: Vec::new(),
            overlay_trust: Trust::Members,
            has_agreement: file.policy.is_some(),
            tunnels: Vec::new(),
            has_tap: false,
            tap: None,
        }
    }
}

impl Check<'_> {
    fn error(&mut self, span: Range<usize>, message: impl Into<String>, help: impl Into<String>) {
        self.problems.push(Problem::error(span, message, help));
    }

    fn warning(&mut self, span: Range<usize>, message: impl Into<String>, help: impl Into<String>) {
        self.problems.push(Problem::warning(span, message, help));
    }

    /// Returns the number at `at` if it is in `range`, otherwise reports an error. `unit` follows the numbers in
    /// the help.
    fn number<T>(&mut self, at: Option<&At<T>>, range: RangeInclusive<u64>, unit: &str) -> Option<u64>
    where
        T: Copy + Into<u64>,
    {
        let at = at?;
        let value = (**at).into();
        if range.contains(&value) {
            return Some(value);
        }
        let help = format!("use {} to {}{unit}", range.start(), range.end());
        self.error(at.span(), format!("{value} is out of range"), help);
        None
    }

    /// Returns a time in milliseconds, 1 ms to about 49 days.
    fn millis(&mut self, at: Option<&At<u64>>) -> Option<u64> {
        self.number(at, 1..=u64::from(u32::MAX), " milliseconds")
    }
}

/// Checks the whole file. Returns `None` if the version of the format is not known.
pub(super) fn check(
    file: &raw::File,
    surroundings: &dyn Surroundings,
    problems: &mut Vec<Problem>,
) -> Option<Config> {
    let mut check = Check::new(file, surroundings, problems);
    let version = check.version(file.version.as_ref())?;
    // Sets, functions and nodes come first: listeners, tunnels and rules refer to them by name.
    check.read_networks(file);
    check.read_functions(&file.function);
    let container_engine = check.container_engine(&file.containers);
    let admin = check.admin(&file.admin);
    let record = check.record(&file.record);
    let history = file.history.as_ref().and_then(|history| check.history(history));
    let limits = check.limits(&file.limits);
    let mut shunt = file.shunt.as_ref().and_then(|shunt| check.shunt(shunt));
    let workers = check.number(file.workers.as_ref(), 0..=1024, " threads").unwrap_or(0);
    let overlay = check.overlay(file.overlay.as_ref());
    check.read_overlay_names(file.overlay.as_ref());
    check.read_tap(file.tap.as_ref());
    let listeners = check.listeners(&file.listen);
    check.tap_is_used(file.tap.as_ref(), &listeners);
    let tunnels = check.tunnels(&file.tunnel, &listeners);
    let agreement = check.agreement_file(file.policy.as_ref());
    let outgoing = check.outgoing(file.outgoing.as_ref());
    let dns = check.dns(file.dns.as_ref());
    check.names_are_captured(file.dns.as_ref(), dns.as_ref(), &listeners);
    let rules = check.rules(&file.rule, &listeners);
    let default = check.default_action(file);
    // Only now are all listeners and rules known.
    check.relations(&file.listen, &listeners, &file.rule, &rules);
    let policy = Policy::new(rules.into_iter().flatten().collect(), default)
        .with_never_dial(check.never.clone())
        .with_first_bytes_ms(limits.first_bytes_ms)
        .with_names(dns.is_some());
    check.shunt_rules(&file.rule, &policy, shunt.as_mut());
    check.hardly_meant(file, &listeners, &policy);
    let is_right = !check.problems.iter().any(Problem::is_error);
    let tests = if is_right { check.tests(&file.test, &listeners, &policy) } else { Vec::new() };
    Some(Config {
        version,
        workers: usize::try_from(workers).unwrap_or(0),
        on_crash: on_crash(file),
        capture_ssh: file.capture_ssh.as_deref().copied().unwrap_or_default(),
        user: check.run_as(file.user.as_ref()),
        admin,
        record,
        history,
        export: check.export(&file.export),
        capture: check.capture(file.capture.as_ref()),
        log_format: log_format(&file.log),
        limits,
        run_dns: file.run.dns(),
        shunt,
        wire: check.wire(file.wire.as_ref(), &file.rule),
        tap: check.tap.clone(),
        listeners: listeners.into_iter().flatten().collect(),
        overlay,
        tunnels,
        outgoing,
        dns,
        agreement,
        policy: Arc::new(policy),
        functions: check.functions.into_values().flatten().collect(),
        container_engine,
        tests,
        warnings: Vec::new(),
        named: Vec::new(),
    })
}

impl Check<'_> {
    fn read_overlay_names(&mut self, overlay: Option<&At<raw::Overlay>>) {
        self.overlay_names =
            overlay.map(|overlay| overlay.node.keys().map(|name| name.as_str().into()).collect());
    }
}

fn log_format(log: &raw::Log) -> Option<LogFormat> {
    Some(match log.format.as_deref()? {
        raw::LogFormat::Text => LogFormat::Text,
        raw::LogFormat::Json => LogFormat::Json,
    })
}

fn on_crash(file: &raw::File) -> OnCrash {
    match file.on_crash.as_deref() {
        Some(raw::OnCrash::Closed) => OnCrash::Closed,
        Some(raw::OnCrash::Open) | None => OnCrash::Open,
    }
}

impl Check<'_> {
    fn version(&mut self, version: Option<&At<u32>>) -> Option<u32> {
        match version {
            Some(at) if **at == 1 => return Some(1),
            Some(at) => self.error(
                at.span(),
                format!("version {} is not known to this sidetrack", **at),
                "write `version = 1`, or use the sidetrack that the file was written for",
            ),
            None => {
                self.error(
                    0..0,
                    "the version of the format is missing",
                    "write `version = 1` at the top of the file",
                );
                // There is only one version, so the other problems are reported as for that one.
                return Some(1);
            }
        }
        None
    }

    /// Reads the named sets and `never_dial`.
    fn read_networks(&mut self, file: &raw::File) {
        self.read_sets(&file.set);
        self.never = self.never_dial(file.never_dial.as_ref());
    }

    fn read_sets(&mut self, sets: &BTreeMap<String, super::List<String>>) {
        for (name, networks) in sets {
            if networks.items().is_empty() {
                let help = "list networks, or take the set out: a rule that uses it would match nothing";
                self.error(networks.span(), format!("the set '{name}' is empty"), help);
            }
            let set = self.plain_networks(networks);
            self.sets.insert(name.clone(), set);
        }
    }

    fn admin(&mut self, admin: &raw::Admin) -> Admin {
        let socket = match &admin.socket {
            None => AdminAt::Default,
            Some(path) if path.as_str() == "none" => AdminAt::None,
            Some(path) => AdminAt::Path(self.path(path, &["none"])),
        };
        let [metrics, page] =
            [&admin.metrics, &admin.page].map(|at| at.as_ref().and_then(|at| self.address(at)));
        let metrics_hosts = self.hosts("metrics_hosts", admin.metrics_hosts.as_ref());
        let page_hosts = self.hosts("page_hosts", admin.page_hosts.as_ref());
        let page_tokens = admin.page_tokens.as_ref().map(|path| self.surroundings.resolve(path));
        if let (None, Some(tokens)) = (&admin.page, &admin.page_tokens) {
            let help = "add `page`, an address such as \"127.0.0.1:9466\"";
            self.error(tokens.span(), "`page_tokens` without `page`: there is no login", help);
        }
        let orchestrator = admin.orchestrator.as_ref().and_then(|at| self.orchestrator(at));
        Admin { socket, metrics, metrics_hosts, page, page_tokens, page_hosts, orchestrator }
    }

    /// Reads the names that a Host field may have.
    fn hosts(&mut self, key: &str, names: Option<&super::List<String>>) -> Vec<String> {
        let mut hosts = Vec::new();
        for name in names.iter().flat_map(|names| names.items()) {
            match name.parse::<HostName>() {
                Ok(host) => hosts.push(host.as_str().to_owned()),
                Err(error) => {
                    let help = "write a host name without port, such as \"node1.example\"";
                    self.error(name.span(), format!("`{key}`: {error}"), help);
                }
            }
        }
        hosts
    }

    fn record(&mut self, record: &raw::Record) -> Record {
        let to = match record.to.as_ref().map(|to| (to, to.as_str())) {
            None | Some((_, "stdout")) => RecordTo::Stdout,
            Some((_, "stderr")) => RecordTo::Stderr,
            Some((_, "none")) => RecordTo::None,
            Some((at, _)) => RecordTo::File(self.path(at, &["stdout", "stderr", "none"])),
        };
        let recent = self.number(record.recent.as_ref(), 0..=1_000_000, " flows").unwrap_or(4096);
        Record { to, recent: usize::try_from(recent).unwrap_or(4096) }
    }

    fn history(&mut self, history: &At<raw::History>) -> Option<History> {
        let max_bytes =
            self.number(history.max_bytes.as_ref(), 16 << 20..=1 << 40, " bytes").unwrap_or(1 << 30);
        let days = self.number(history.keep_days.as_ref(), 1..=3650, " days").unwrap_or(30);
        let Some(path) = &history.path else {
            let help = "write `path = \"/var/lib/sidetrack/history\"`: a folder for the files";
            self.error(history.span(), "[history] has no `path`", help);
            return None;
        };
        Some(History {
            path: self.surroundings.resolve(path),
            max_bytes,
            keep: Duration::from_secs(days * 24 * 3600),
            counters: history.counters.unwrap_or(true),
        })
    }

    fn capture(&mut self, capture: Option<&At<raw::Capture>>) -> CaptureAt {
        let written = CaptureAt::default();
        let Some(capture) = capture else { return written };
        let packets = capture.packets.unwrap_or(capture.ring_bytes.is_some());
        let ring =
            self.number(capture.ring_bytes.as_ref().filter(|ring| ***ring != 0), 1 << 20..=1 << 34, " bytes");
        let snap = capture.ring_snap_bytes.as_ref();
        let snap = self.number(snap, 64..=u64::from(CaptureAt::SNAP_MAX), " bytes");
        if let Some(at) = capture.ring_bytes.as_ref().filter(|ring| ***ring != 0 && !packets) {
            self.error(at.span(), "no packets are kept with `packets = false`", "leave one of them out");
        }
        let ring_snap_bytes = snap.and_then(|snap| u32::try_from(snap).ok());
        CaptureAt {
            packets,
            ring_bytes: ring.unwrap_or(0),
            ring_snap_bytes: ring_snap_bytes.unwrap_or(written.ring_snap_bytes),
        }
    }

    /// Requires a slash in a path. Otherwise a typing error in a word would become a file name.
    fn path(&mut self, at: &At<String>, words: &[&str]) -> std::path::PathBuf {
        if !at.contains('/') {
            let near = nearest(at, words.iter().copied());
            let hint = near.map(|near| format!("did you mean \"{near}\"? ")).unwrap_or_default();
            let words = words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
            let help = format!("{hint}use {words}, or a path with a slash such as \"./{}\"", at.as_str());
            self.error(at.span(), format!("'{}' is neither a known word nor a path", at.as_str()), help);
        }
        self.surroundings.resolve(at)
    }

    fn limits(&mut self, raw: &raw::Limits) -> Limits {
        let default = Limits::default();
        let count = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let flows = 1..=10_000_000;
        let first_bytes = 1..=Limits::FIRST_BYTES_MAX_MS;
        let buffer = self.number(raw.buffer_bytes.as_ref(), 4096..=16_777_216, " bytes");
        let associations = self.number(raw.max_associations.as_ref(), 1..=1_000_000, " associations");
        let percent = self.number(raw.memory_percent.as_ref(), 50..=100, " percent");
        Limits {
            max_flows: self.number(raw.max_flows.as_ref(), flows.clone(), " flows").map(count),
            max_flows_per_client: self
                .number(raw.max_flows_per_client.as_ref(), flows.clone(), " flows")
                .map(count),
            max_handshakes: self.number(raw.max_handshakes.as_ref(), flows, " connections").map(count),
            idle_timeout_ms: self.millis(raw.idle_timeout_ms.as_ref()).unwrap_or(default.idle_timeout_ms),
            udp_idle_timeout_ms: self
                .millis(raw.udp_idle_timeout_ms.as_ref())
                .unwrap_or(default.udp_idle_timeout_ms),
            max_associations: associations
                .and_then(|most| usize::try_from(most).ok())
                .unwrap_or(default.max_associations),
            lifetime_ms: self.millis(raw.lifetime_ms.as_ref()),
            connect_timeout_ms: self
                .millis(raw.connect_timeout_ms.as_ref())
                .unwrap_or(default.connect_timeout_ms),
            handshake_timeout_ms: self
                .millis(raw.handshake_timeout_ms.as_ref())
                .unwrap_or(default.handshake_timeout_ms),
            first_bytes_ms: self
                .number(raw.first_bytes_ms.as_ref(), first_bytes, " milliseconds")
                .unwrap_or(default.first_bytes_ms),
            buffer_bytes: buffer
                .and_then(|bytes| usize::try_from(bytes).ok())
                .unwrap_or(default.buffer_bytes),
            memory_percent: percent
                .and_then(|percent| u8::try_from(percent).ok())
                .unwrap_or(default.memory_percent),
            drain_ms: self
                .number(raw.drain_ms.as_ref(), 0..=Limits::DRAIN_MAX_MS, " milliseconds")
                .unwrap_or(default.drain_ms),
        }
    }

    /// With rules, the file must say what happens to other flows: there is no default.
    fn default_action(&mut self, file: &raw::File) -> Action {
        match (file.default.as_deref(), file.rule.first()) {
            (Some(raw::DefaultAction::Deny), _) => Action::Deny,
            (Some(raw::DefaultAction::Direct), _) | (None, None) => Action::default(),
            (None, Some(rule)) => {
                self.error(
                    rule.span(),
                    "there are rules, but nothing says what happens to a flow that none of them matches",
                    "write `default = \"deny\"` or `default = \"direct\"` above the first [table] of the file",
                );
                Action::Deny
            }
        }
    }
}
