//! The data-flow agreement of a node: read with the configuration, put in force, and applied to running flows.

mod file;

pub(super) use file::{Writer, serve};

use super::node::Node;
use crate::admin::{AgreementStatus, Applied, Audit, Movements, NewAgreement, Past};
use crate::agreement::{Book, InForce};
use crate::config::Config;
use crate::live::{Decided, Ledger};
use crate::reload::{ReloadHandle, settle, watch};
use anyhow::Context;
use sidetrack_common::history::{Caller, Cause, History, HistoryError};
use sidetrack_core::agreement::End;
use sidetrack_core::flow::EndReason;
use sidetrack_core::policy::{Action, Verdict};
use sidetrack_sys::sync::lock;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;

/// How often the clock is compared with the agreement's dates, in case the clock was set.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// Reads the agreement that a configuration names; keeps the book of `current` if nothing has changed.
///
/// # Errors
/// All that is wrong with the file, each with its place; or a function that the configuration lacks.
pub(super) fn read(config: &Config, current: &InForce) -> anyhow::Result<Arc<InForce>> {
    let Some(file) = &config.agreement else { return Ok(Arc::default()) };
    let text = std::fs::read_to_string(&file.path)
        .with_context(|| format!("[policy] agreement: cannot read {}", file.path.display()))?;
    let now = SystemTime::now();
    let due = |book: &Arc<Book>| book.next_change().is_some_and(|turn| turn <= now);
    let same = current.book.iter().find(|book| **book.text() == *text && !due(book));
    let book = match same {
        Some(book) => book.clone(),
        None => Arc::new(book(&file.path, &text, now)?),
    };
    lacking(config, &book)?;
    Ok(Arc::new(InForce { book: Some(book), mode: file.mode }))
}

fn book(path: &Path, text: &str, now: SystemTime) -> anyhow::Result<Book> {
    let book = crate::agreement::read(&path.display().to_string(), text, now);
    book.map_err(|error| crate::config::BadConfiguration::from(error).into())
}

/// Rejects an agreement that needs functions which this node lacks at an end where its rules apply the agreement.
fn lacking(config: &Config, book: &Book) -> anyhow::Result<()> {
    let stands_at = |end: End| {
        config.policy.rules().iter().any(|rule| match &rule.action {
            Action::Carry(carry) => carry.agreement.as_ref().is_some_and(|clause| clause.at == end),
            Action::Deny => false,
        })
    };
    let facts = book.agreement().facts();
    for (name, steps) in facts.steps_of_all() {
        for (end, functions) in [(End::Client, &steps.client), (End::Server, &steps.server)] {
            let lacks = |function: &&Arc<str>| !config.functions.iter().any(|spec| spec.name == **function);
            if let Some(function) = functions.iter().find(lacks).filter(|_| stands_at(end)) {
                anyhow::bail!(
                    "the agreement's bridging function '{name}' asks for the function '{function}', which this node lacks: \
                     add [function.{function}] to its configuration"
                );
            }
        }
    }
    Ok(())
}

/// Returns the flows that are no longer allowed, each with the reason.
fn revoked(
    in_force: &InForce,
    config: &Config,
    ledgers: &[Arc<Ledger>],
) -> Vec<(Arc<crate::live::LiveFlow>, Decided)> {
    let mut found = Vec::new();
    for live in ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
        let Some(decided) = live.decided() else { continue };
        let Some(verdict) = &decided.verdict else { continue };
        if let Some(why) = in_force.revokes(config, &decided.flow, verdict) {
            let agreement = Some(format!("revoked: {why}").into());
            let verdict = Some(Verdict { agreement, ..verdict.clone() });
            found.push((live, Decided { verdict, ..(*decided).clone() }));
        }
    }
    found
}

impl Node {
    /// Puts an agreement in force and ends the flows that it does not allow. Returns their numbers.
    pub(super) fn put_agreement(&self, config: &Config, in_force: Arc<InForce>) -> Vec<u64> {
        self.agreement().store(in_force.clone());
        let revoked = revoked(&in_force, config, &self.ledgers());
        for (live, decided) in &revoked {
            let why = decided.agreement().unwrap_or_default();
            tracing::debug!(flow = live.id.0, client = %decided.flow.client, to = %decided.flow.orig_dst, why, "policy_revoked");
            live.decide(decided.clone());
            live.end(EndReason::PolicyRevoked);
        }
        revoked.iter().map(|(live, _)| live.id.0).collect()
    }

    /// Records the text of an agreement that is about to be in force.
    ///
    /// # Errors
    /// The history cannot be written: the agreement must not be put in force.
    pub(super) fn note_agreement(&self, in_force: &InForce) -> Result<(), HistoryError> {
        self.history.as_ref().map_or(Ok(()), |history| note(history, in_force))
    }

    /// Records that a text was refused. An error is only logged: nothing was put in force.
    fn note_refused(&self, by: &Caller, text: &str, error: &anyhow::Error) {
        let noted =
            self.history.as_ref().map_or(Ok(()), |history| history.refused(by, text, &format!("{error:#}")));
        if let Err(error) = noted {
            tracing::error!("a refused agreement is not in the history: {error}");
        }
    }

    /// Reads the agreement again, and puts it in force if the file or the time has changed it.
    fn look_at_agreement(&self, config: &Config) {
        let _agreeing = lock(&self.agreeing);
        let current = self.agreement().load_full();
        let read = read(config, &current).inspect_err(|error| {
            let text = config.agreement.as_ref().and_then(|file| std::fs::read_to_string(&file.path).ok());
            self.note_refused(&Caller::default(), &text.unwrap_or_default(), error);
        });
        let noted = read.and_then(|new| {
            if !same(&new, &current) {
                self.note_agreement(&new)?;
            }
            Ok(new)
        });
        match noted {
            Ok(new) if same(&new, &current) => {}
            Ok(new) => {
                let revoked = self.put_agreement(config, new).len();
                tracing::info!(revoked, "the agreement was read anew");
            }
            Err(error) => tracing::error!("the agreement is rejected; nothing changes\n{error:#}"),
        }
    }

    /// Checks a text and says what it would do to running flows. Unless `dry_run` is set, the text is written to the file
    /// and put in force.
    ///
    /// # Errors
    /// What is wrong with the text, or with writing the file or its history. Nothing has changed then.
    pub(super) fn apply_agreement(
        &self,
        config: &Config,
        new: &NewAgreement,
        dry_run: bool,
        by: &Caller,
    ) -> anyhow::Result<Applied> {
        let file =
            config.agreement.as_ref().context("the configuration has no [policy] that names an agreement")?;
        let (cause, same_as, text) = match new {
            NewAgreement::Text(text) => (Cause::Apply, None, text.clone()),
            NewAgreement::Version(version) => {
                (Cause::Rollback, Some(*version), self.kept_history()?.text(*version)?)
            }
        };
        let checked = book(&file.path, &text, SystemTime::now()).and_then(|book| {
            lacking(config, &book)?;
            Ok(Arc::new(book))
        });
        let book = checked.inspect_err(|error| {
            if !dry_run {
                self.note_refused(by, &text, error);
            }
        })?;
        let in_force = Arc::new(InForce { book: Some(book), mode: file.mode });
        if dry_run {
            let revoked = revoked(&in_force, config, &self.ledgers());
            let revoked = revoked.iter().map(|(live, _)| live.id.0).collect();
            return Ok(Applied { dry_run, revoked, status: status(&in_force) });
        }
        let _agreeing = lock(&self.agreeing);
        let noted =
            self.history.as_ref().map(|history| Ok((history, history.version(by, cause, same_as, &text)?)));
        let noted = noted.transpose().map_err(|error: HistoryError| error)?;
        let replaced = file::replace(&file.path, &text, self.agreement_writer())
            .with_context(|| format!("cannot write {}", file.path.display()));
        if let (Err(error), Some((history, version))) = (&replaced, noted) {
            history.failed(by, version, &format!("{error:#}"))?;
        }
        replaced?;
        let revoked = self.put_agreement(config, in_force.clone());
        Ok(Applied { dry_run, revoked, status: status(&in_force) })
    }

    fn kept_history(&self) -> anyhow::Result<&History> {
        self.history
            .as_ref()
            .context("no history is kept: name a file with `history` in [policy], and restart sidetrack")
    }

    /// Lists the entries of the history, and checks its chain.
    ///
    /// # Errors
    /// No history is kept, or it cannot be read.
    pub(super) fn audit(&self) -> anyhow::Result<Audit> {
        let history = self.kept_history()?;
        let mut entries = Vec::new();
        let checked = history.verify(|entry, head| entries.push(Past::new(entry, head)));
        let (head, broken) = match checked {
            Ok(head) => (head, None),
            Err(error @ (HistoryError::Broken(..) | HistoryError::Replaced(..))) => {
                (history.head(), Some(error.to_string()))
            }
            Err(error) => return Err(error.into()),
        };
        let file = history.path().to_owned();
        Ok(Audit { file, entries, head: sidetrack_common::history::hex(&head.hash), broken })
    }

    /// Returns the text of a version.
    ///
    /// # Errors
    /// No history is kept, it is broken, or it has no such version.
    pub(super) fn version_of_agreement(&self, version: u64) -> anyhow::Result<String> {
        Ok(self.kept_history()?.text(version)?)
    }

    /// The agreement in force.
    pub(super) fn agreement_status(&self) -> AgreementStatus {
        status(&self.agreement().load())
    }
}

/// Opens the history that a configuration names, and records the agreement of the start.
///
/// # Errors
/// The history is broken, or cannot be written.
pub(super) fn history(config: &Config, in_force: &InForce) -> anyhow::Result<Option<History>> {
    let Some(path) = config.agreement.as_ref().and_then(|file| file.history.as_ref()) else {
        return Ok(None);
    };
    let history = History::open(path)?;
    note(&history, in_force)?;
    Ok(Some(history))
}

fn note(history: &History, in_force: &InForce) -> Result<(), HistoryError> {
    let Some(book) = &in_force.book else { return Ok(()) };
    history.version(&Caller::default(), Cause::File, None, book.text()).map(drop)
}

fn same(a: &InForce, b: &InForce) -> bool {
    let book = |in_force: &InForce| in_force.book.as_ref().map(Arc::as_ptr);
    a.mode == b.mode && book(a) == book(b)
}

fn status(in_force: &InForce) -> AgreementStatus {
    let Some(book) = &in_force.book else { return AgreementStatus::default() };
    AgreementStatus {
        mode: Some(in_force.mode),
        agreements: book.agreements().iter().map(ToString::to_string).collect(),
        next_change: book.next_change().map(Into::into),
        movements: Movements::of(book),
    }
}

/// Keeps the agreement in force up to date with the file and the time. Does not return.
pub(super) async fn follow(node: Arc<Node>, handle: ReloadHandle) {
    let (told, mut changes) = mpsc::channel(1);
    let mut watched = None;
    let mut watcher = None;
    loop {
        let config = handle.current().load_full();
        let path = config.agreement.as_ref().map(|file| file.path.clone());
        if watched != path {
            watcher = path.as_ref().map(|path| watch(path, told.clone()));
            if let Some(Err(error)) = &watcher {
                tracing::warn!(%error, "cannot watch the agreement for changes: reload, or `sidetrack policy apply`");
            }
            watched = path;
        }
        let next = node.agreement().load().book.as_ref().and_then(|book| book.next_change());
        let next = next.map(|turn| turn.duration_since(SystemTime::now()).unwrap_or_default());
        tokio::select! {
            Some(()) = changes.recv(), if watcher.is_some() => settle(&mut changes).await,
            () = tokio::time::sleep(next.unwrap_or(LOOK_AGAIN).min(LOOK_AGAIN)) => {}
        }
        node.look_at_agreement(&handle.current().load());
    }
}
