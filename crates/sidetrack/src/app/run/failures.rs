//! Reports failures of the command's connections: the first of a kind and destination at once, its repetitions as a
//! count.

use super::notices::write;
use super::publish;
use crate::live::{Batch, Decided, Ended};
use crate::metrics::Metrics;
use crate::record::{FlowRecord, Observer, is_refusal, seen};
use sidetrack_core::flow::{EndReason, Host, HostName, Protocol};
use sidetrack_core::jail::{Account, Entry, Seen, WOULD_REFUSE};
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long repeated failures of one kind are counted before the count is reported.
pub(super) const TELL_EVERY: Duration = Duration::from_secs(10);

/// Most kinds of failures that are counted separately. All others are counted together.
const KINDS_MAX: usize = 256;

/// A program asks for both address types of a name, and soon again: within this time that is reported as one failure.
const ONE_LOOK_UP: Duration = Duration::from_secs(2);

/// Stands for all destinations without a count of their own.
const OTHERS: &str = "other destinations";

/// One failure.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    destination: String,
    reason: EndReason,
    program: Option<String>,
    detail: Option<String>,
    /// What to do about it, if the lists of the command line refused it.
    remedy: Option<String>,
    /// It was carried, and would be refused without `--audit`.
    audited: bool,
}

impl Failure {
    fn of(record: &FlowRecord<'_>) -> Option<Self> {
        if let Some(rule) = would_refuse(record) {
            let reason = EndReason::PolicyDenied;
            let audited = Self { audited: true, detail: Some(rule.to_owned()), ..Self::with(record, reason) };
            return Some(audited);
        }
        let reason = record.reason.filter(|reason| is_failure(*reason))?;
        if reason == EndReason::Idle && record.protocol == Some(Protocol::Udp) {
            // The ordinary end of a flow without connections.
            return None;
        }
        Some(Self::with(record, reason))
    }

    fn with(record: &FlowRecord<'_>, reason: EndReason) -> Self {
        let destination = match (record.orig_dst.as_deref(), record.host.as_deref()) {
            (Some(to), Some(host)) if matches!(to.host, Host::Ip(_)) => {
                format!("{host}:{} ({})", to.port, to.host)
            }
            (Some(to), _) => to.to_string(),
            (None, _) => "unknown destination".to_owned(),
        };
        let via = record.carrier.as_deref().filter(|carrier| *carrier != "direct");
        Self {
            destination: destination + &via.map(|via| format!(" via {via}")).unwrap_or_default(),
            reason,
            program: record.process.as_deref().map(str::to_owned),
            detail: record.detail.as_deref().map(str::to_owned),
            remedy: None,
            audited: false,
        }
    }

    /// The same, refused by the lists of the command line: it says which entry would allow it.
    fn of_lists(self, record: &FlowRecord<'_>) -> Self {
        if self.reason != EndReason::PolicyDenied {
            return self;
        }
        let rule = record.rule.as_deref().unwrap_or_default();
        let rule = rule.strip_prefix(WOULD_REFUSE).unwrap_or(rule);
        let remedy = match record.orig_dst.as_deref() {
            _ if rule.starts_with("deny ") => "; to allow it, take this entry from the deny list".to_owned(),
            // The name is allowed, and the address that it resolves to is not.
            _ if rule.starts_with("allow ") => "; to allow it, allow this address, too".to_owned(),
            Some(to) => {
                let entry = Entry::of(record.protocol.unwrap_or_default(), &to.host, to.port);
                format!("; to allow it: --allow {entry}")
            }
            None => String::new(),
        };
        Self { remedy: Some(remedy), ..self }
    }

    const fn what(&self) -> &'static str {
        if self.audited { "would be refused" } else { what(self.reason) }
    }

    fn remedy(&self) -> &str {
        self.remedy.as_deref().unwrap_or(advice(self.reason))
    }

    /// The line to print.
    fn line(&self) -> String {
        let program = self.program.as_deref().map(|name| format!("{name}: ")).unwrap_or_default();
        let detail = self.detail.as_deref().map(|detail| format!(" ({detail})")).unwrap_or_default();
        let text = format!("{program}{}: {}{detail}{}", self.destination, self.what(), self.remedy());
        // A name comes from the program: it must not control the terminal or look like a line of ours.
        let text: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        format!("sidetrack: {text}\n")
    }
}

/// Whether a user wants to know about a flow with this end.
fn is_failure(reason: EndReason) -> bool {
    !matches!(reason, EndReason::Ok | EndReason::ClientReset | EndReason::Shutdown | EndReason::KernelClosed)
}

/// The failure in words.
const fn what(reason: EndReason) -> &'static str {
    match reason {
        EndReason::PolicyDenied => "denied by policy",
        EndReason::SecretRefused => "the placeholder of a secret was refused",
        EndReason::Refused => "connection refused",
        EndReason::Unreachable => "no route",
        EndReason::ConnectTimeout => "no answer in time",
        EndReason::Dns => "the name cannot be resolved",
        EndReason::Certificate => "the server's certificate is not trusted",
        EndReason::ServerReset => "the server reset the connection",
        EndReason::ClientGone => "the program gave up before the connection was made",
        EndReason::Idle => "closed after the idle time-out",
        EndReason::AuthFailed => "user or password not accepted",
        EndReason::HopFailed => "the proxy failed",
        EndReason::Limit => "a limit is reached",
        other => other.as_str(),
    }
}

/// What the user can do about it, with the separator from the text before it.
const fn advice(reason: EndReason) -> &'static str {
    match reason {
        EndReason::PolicyDenied => "; to allow it, add a rule: `sidetrack explain` says which rule decides",
        EndReason::Refused => "; check that the server runs and that the port is right",
        EndReason::Unreachable => "; check this host's network and routes",
        EndReason::ConnectTimeout | EndReason::ClientGone => "; check the address, and firewalls on the way",
        EndReason::Dns => "; check the spelling, and this host's resolver",
        EndReason::Certificate => "; to accept it, name its file: `run --trust FILE`",
        EndReason::AuthFailed => "; check the user and password of the hop",
        EndReason::HopFailed => "; check that the hop speaks this protocol",
        EndReason::Idle => "; `idle_timeout_ms` sets the time",
        EndReason::Limit => "; raise `ulimit -n`, or [limits] of the configuration",
        _ => "",
    }
}

/// The failures of one kind.
#[derive(Debug)]
struct Kind {
    /// The latest one.
    latest: Failure,
    /// The number that no line has reported yet.
    untold: u64,
    /// When the latest line was written, and when the latest failure occurred.
    told: Instant,
    came: Instant,
}

/// Counts failures and makes the lines.
#[derive(Debug, Default)]
struct Failures {
    kinds: BTreeMap<(String, &'static str), Kind>,
}

impl Failures {
    /// Counts a failure; returns the line to print at once, if there is one.
    fn note(&mut self, now: Instant, mut failure: Failure) -> Option<String> {
        let mut key = (failure.destination.clone(), failure.reason.as_str());
        if !self.kinds.contains_key(&key) && self.kinds.len() >= KINDS_MAX {
            // Forget kinds that have not occurred for a while.
            self.kinds
                .retain(|_, kind| kind.untold > 0 || now.saturating_duration_since(kind.came) < TELL_EVERY);
            if self.kinds.len() >= KINDS_MAX {
                OTHERS.clone_into(&mut failure.destination);
                (failure.program, failure.detail) = (None, None);
                key.0 = OTHERS.to_owned();
            }
        }
        if let Some(kind) = self.kinds.get_mut(&key) {
            kind.untold += 1;
            kind.came = now;
            kind.latest = failure;
            return None;
        }
        let line = failure.line();
        self.kinds.insert(key, Kind { latest: failure, untold: 0, told: now, came: now });
        Some(line)
    }

    /// Counts a question about a name that does not exist.
    fn note_name(&mut self, now: Instant, name: &str) -> Option<String> {
        self.note_question(
            now,
            Failure {
                destination: name.to_owned(),
                reason: EndReason::Dns,
                program: None,
                detail: Some("the name does not exist".to_owned()),
                remedy: None,
                audited: false,
            },
        )
    }

    /// Counts a failed question about a name.
    fn note_question(&mut self, now: Instant, failure: Failure) -> Option<String> {
        if let Some(kind) = self.kinds.get_mut(&(failure.destination.clone(), failure.reason.as_str()))
            && now.saturating_duration_since(kind.came) < ONE_LOOK_UP
        {
            return None;
        }
        self.note(now, failure)
    }

    /// Returns the counts that are due; at the `end` all of them.
    fn counts(&mut self, now: Instant, end: bool) -> String {
        let mut lines = String::new();
        for kind in self.kinds.values_mut() {
            let due = end || now.saturating_duration_since(kind.told) >= TELL_EVERY;
            if kind.untold > 0 && due {
                let times =
                    if kind.untold == 1 { "once".to_owned() } else { format!("{} times", kind.untold) };
                let line = Failure { detail: None, ..kind.latest.clone() }.line();
                let line = line.trim_end().split(';').next().unwrap_or_default().to_owned();
                lines.push_str(&format!("{line}, {times} more\n"));
                (kind.untold, kind.told) = (0, now);
            }
        }
        lines
    }
}

/// Reports failures on standard error, and passes all flows to the metrics.
pub(super) struct Telling {
    metrics: Arc<Metrics>,
    /// `None`: the user asked for no reports.
    failures: Option<Mutex<Failures>>,
    /// Whether the lists of the command line decide.
    lists: bool,
    /// Whether something was refused, or would be.
    refused: AtomicBool,
    /// All destinations, if a report or a profile is wanted.
    account: Option<Mutex<Account>>,
}

/// Returns the rule under which a flow was carried that would be refused without `--audit`.
fn would_refuse<'a>(record: &'a FlowRecord<'_>) -> Option<&'a str> {
    record.rule.as_deref().and_then(|rule| rule.strip_prefix(WOULD_REFUSE))
}

impl Telling {
    pub(super) fn new(metrics: Arc<Metrics>, quiet: bool) -> Self {
        Self {
            metrics,
            failures: (!quiet).then(Mutex::default),
            lists: false,
            refused: AtomicBool::new(false),
            account: None,
        }
    }

    /// The same, and what is refused is refused by the lists of the command line.
    pub(super) fn of_lists(self) -> Self {
        Self { lists: true, ..self }
    }

    /// The same, and all destinations are counted.
    pub(super) fn with_account(self) -> Self {
        Self { account: Some(Mutex::default()), ..self }
    }

    /// Returns all destinations, if they are counted.
    pub(super) fn account(&self) -> Option<MutexGuard<'_, Account>> {
        self.account.as_ref().map(|account| lock(account))
    }

    /// Whether something was refused, or would be.
    pub(super) fn has_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Whether a refused question about this name would be printed now.
    pub(super) fn is_new(&self, name: &HostName) -> bool {
        let key = (name.as_str().to_owned(), EndReason::PolicyDenied.as_str());
        self.failures()
            .is_some_and(|failures| failures.kinds.len() < KINDS_MAX && !failures.kinds.contains_key(&key))
    }

    /// Reports that a question about a name was refused.
    pub(super) fn refused_name(&self, name: &HostName, program: Option<String>, why: &str) {
        if let Some(mut account) = self.account() {
            let (host, protocol) = (Host::Name(name.clone()), Protocol::Tcp);
            account.note(Seen { refused: true, host, port: 0, protocol, program: program.clone() }, 0, 0);
        }
        let failure = Failure {
            destination: name.to_string(),
            reason: EndReason::PolicyDenied,
            program,
            detail: Some(why.to_owned()),
            remedy: Some(format!("; to allow it: --allow {}", Entry::of_name(name))),
            audited: false,
        };
        self.refused.store(true, Ordering::Relaxed);
        let line = self.failures().and_then(|mut failures| failures.note_question(Instant::now(), failure));
        write(&line.unwrap_or_default());
    }

    /// Reports that a question about a name with the placeholder of a secret was refused.
    pub(super) fn refused_secret(&self, name: &HostName, program: Option<String>, why: &str) {
        let failure = Failure {
            destination: name.to_string(),
            reason: EndReason::SecretRefused,
            program,
            detail: Some(why.to_owned()),
            remedy: None,
            audited: false,
        };
        self.refused.store(true, Ordering::Relaxed);
        let line = self.failures().and_then(|mut failures| failures.note_question(Instant::now(), failure));
        write(&line.unwrap_or_default());
    }

    fn failures(&self) -> Option<MutexGuard<'_, Failures>> {
        self.failures.as_ref().map(|failures| lock(failures))
    }

    /// Reports that the command asked for a name that does not exist.
    pub(super) fn no_such_name(&self, name: &HostName) {
        let line = self.failures().and_then(|mut failures| failures.note_name(Instant::now(), name.as_str()));
        write(&line.unwrap_or_default());
    }

    /// Prints the counts that are due; at the `end` all of them.
    pub(super) fn tell_counts(&self, end: bool) {
        let lines = self.failures().map(|mut failures| failures.counts(Instant::now(), end));
        write(&lines.unwrap_or_default());
    }
}

impl Observer for Telling {
    fn took(&self, batch: &Batch) {
        self.metrics.took(batch);
        let mut lines = String::new();
        // The rules of an audit name flows that end well.
        for past in
            batch.iter().filter(|past| self.lists || self.account.is_some() || is_failure(past.reason()))
        {
            let ended = past.to_ended();
            let decided = ended.flow.decided();
            let record = FlowRecord::ended(&ended, decided.as_deref());
            let is_own = record.listener.as_deref() != Some(publish::LISTENER);
            if let (Some(mut account), Some(seen)) = (self.account(), seen(&record).filter(|_| is_own)) {
                account.note(seen, record.bytes_up, record.bytes_down);
            }
            let Some(failure) = Failure::of(&record) else { continue };
            if is_refusal(failure.reason) {
                self.refused.store(true, Ordering::Relaxed);
            }
            let failure = if self.lists { failure.of_lists(&record) } else { failure };
            lines.extend(self.failures().and_then(|mut failures| failures.note(Instant::now(), failure)));
        }
        write(&lines);
    }

    fn ended(&self, ended: &Ended, decided: Option<&Decided>) {
        self.metrics.ended(ended, decided);
    }

    fn tallied(&self, tally: &crate::live::Tally) {
        self.metrics.tallied(tally);
    }

    fn lost(&self, records: u64) {
        self.metrics.lost(records);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(destination: &str, reason: EndReason) -> Failure {
        let (program, detail) = (Some("curl".to_owned()), Some("says the hop".to_owned()));
        Failure { destination: destination.to_owned(), reason, program, detail, remedy: None, audited: false }
    }

    #[test]
    fn the_first_is_told_at_once_and_the_rest_as_a_count() {
        let (mut failures, begin) = (Failures::default(), Instant::now());
        let refused = failure("a.example:443", EndReason::Refused);
        let line = failures.note(begin, refused.clone()).unwrap();
        assert_eq!(
            line,
            "sidetrack: curl: a.example:443: connection refused (says the hop); check that the server runs and that the \
             port is right\n"
        );
        for second in 1..=4 {
            assert_eq!(failures.note(begin + Duration::from_secs(second), refused.clone()), None);
        }
        // Another kind, and another destination, have lines of their own.
        assert!(failures.note(begin, failure("a.example:443", EndReason::ConnectTimeout)).is_some());
        assert!(failures.note(begin, failure("b.example:443", EndReason::Refused)).is_some());
        assert_eq!(failures.counts(begin + Duration::from_secs(9), false), "");
        let counts = failures.counts(begin + TELL_EVERY, false);
        assert_eq!(counts, "sidetrack: curl: a.example:443: connection refused, 4 times more\n");
        assert_eq!(failures.counts(begin + TELL_EVERY * 2, false), "", "nothing new");
        assert_eq!(failures.note(begin + TELL_EVERY, refused), None);
        assert_eq!(failures.counts(begin + TELL_EVERY, false), "", "not yet");
        let counts = failures.counts(begin + TELL_EVERY, true);
        assert_eq!(counts, "sidetrack: curl: a.example:443: connection refused, once more\n");
    }

    #[test]
    fn both_questions_about_a_name_are_one_failure() {
        let (mut failures, begin) = (Failures::default(), Instant::now());
        let line = failures.note_name(begin, "gone.example").unwrap();
        assert!(
            line.contains("gone.example: the name cannot be resolved (the name does not exist)"),
            "{line}"
        );
        assert_eq!(failures.note_name(begin + Duration::from_millis(5), "gone.example"), None);
        assert_eq!(failures.counts(begin, true), "");
        assert_eq!(failures.note_name(begin + ONE_LOOK_UP, "gone.example"), None);
        assert!(failures.counts(begin, true).contains("once more"));
    }

    #[test]
    fn a_scan_of_many_destinations_is_bounded() {
        let (mut failures, begin) = (Failures::default(), Instant::now());
        let told = (0..10_000).filter(|port| {
            failures.note(begin, failure(&format!("10.0.0.1:{port}"), EndReason::Refused)).is_some()
        });
        assert_eq!(told.count(), KINDS_MAX + 1, "one line for all others");
        assert!(failures.kinds.len() <= KINDS_MAX + 1);
        let counts = failures.counts(begin, true);
        let others = 10_000 - KINDS_MAX - 1;
        assert_eq!(
            counts,
            format!("sidetrack: other destinations: connection refused, {others} times more\n")
        );
        // Kinds that have not occurred for a while make room.
        let later = begin + TELL_EVERY;
        assert!(failures.note(later, failure("10.0.0.2:1", EndReason::Refused)).is_some());
        assert!(failures.kinds.len() < KINDS_MAX);
    }

    #[test]
    fn a_name_cannot_drive_the_terminal() {
        let mut bad = failure("a.example:443", EndReason::Refused);
        bad.program = Some("x\u{1b}[2J\nsidetrack: all is well".to_owned());
        let line = bad.line();
        assert!(line.matches('\n').count() == 1 && !line.contains('\u{1b}'), "{line:?}");
    }
}
