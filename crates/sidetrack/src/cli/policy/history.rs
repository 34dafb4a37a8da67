//! `sidetrack policy history`, `diff` and `audit`.

use super::super::Printed;
use super::{diff, line};
use crate::admin::{Audit, Client, Past, Version};
use anyhow::Context;
use clap::Subcommand;
use hyper::Method;
use sidetrack_common::history::{self, Caller};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Subcommand)]
pub(super) enum AuditCommand {
    /// Checks every version and decision. Exit code 1: names the first broken link
    Verify {
        /// A file to check, instead of the history of a running sidetrack
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// The hash of a line that must be in it, which `policy audit head` printed earlier
        #[arg(long, value_name = "HASH")]
        head: Option<String>,
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// Prints the number and the hash of the last entry. Keep it elsewhere: it shows later whether entries at the end
    /// were removed
    Head,
}

async fn fetch(client: &Client) -> anyhow::Result<Audit> {
    Ok(client.ask(Method::GET, "/v1/policy/history", &[]).await?)
}

/// `policy history`.
pub(super) async fn list(client: &Client, json: bool) -> anyhow::Result<Printed> {
    let audit = fetch(client).await?;
    if json {
        return Ok(Printed { out: line(&audit)?, ..Printed::default() });
    }
    let mut out = String::new();
    for Past { at, clock_back_ms, by, version, what, .. } in &audit.entries {
        let version = version.map_or_else(|| "-".to_owned(), |version| version.to_string());
        let late = if *clock_back_ms == 0 {
            String::new()
        } else {
            format!(" (the clock had gone back by {clock_back_ms} ms)")
        };
        // Writing to a text cannot fail.
        let _ = writeln!(out, "{version:>4}  {at}  {}: {what}{late}", caller(by));
    }
    let (err, code) = match audit.broken {
        None => (String::new(), 0),
        Some(broken) => (format!("{broken}\n"), 1),
    };
    Ok(Printed { out, err, code })
}

/// A caller in words.
fn caller(by: &Caller) -> String {
    let Some(uid) = by.uid else { return "sidetrack".to_owned() };
    let user = nix::unistd::User::from_uid(uid.into()).ok().flatten();
    let mut words = user.map_or_else(|| format!("uid {uid}"), |user| user.name);
    let program = by.program.iter().cloned();
    let process: Vec<_> = program.chain(by.pid.map(|pid| format!("pid {pid}"))).collect();
    // Writing to a text cannot fail.
    if !process.is_empty() {
        let _ = write!(words, " ({})", process.join(", "));
    }
    if let Some(peer) = &by.peer {
        let _ = write!(words, " for {peer}");
    }
    // A program and a peer choose their names.
    words.escape_debug().to_string()
}

/// `policy diff`.
pub(super) async fn diff(client: &Client, from: u64, to: u64) -> anyhow::Result<Printed> {
    let mut texts = Vec::new();
    for version in [from, to] {
        let path = format!("/v1/policy/history/{version}");
        texts.push(client.ask::<Version>(Method::GET, &path, &[]).await?.text);
    }
    let out = match &*texts {
        [old, new] if old == new => "the texts are the same\n".to_owned(),
        [old, new] => diff::diff(old, new),
        _ => String::new(),
    };
    Ok(Printed { out, ..Printed::default() })
}

/// `policy audit`.
pub(super) async fn audit(client: &Client, command: &AuditCommand) -> anyhow::Result<Printed> {
    match command {
        AuditCommand::Head => {
            let audit = fetch(client).await?;
            anyhow::ensure!(audit.broken.is_none(), audit.broken.unwrap_or_default());
            Ok(Printed { out: format!("{} {}\n", audit.entries.len(), audit.head), ..Printed::default() })
        }
        AuditCommand::Verify { file, head, json } => {
            let audit = match file {
                Some(file) => offline(file)?,
                None => fetch(client).await?,
            };
            verify(audit, head.as_deref(), *json)
        }
    }
}

/// Checks a file without asking a running program.
fn offline(file: &Path) -> anyhow::Result<Audit> {
    let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut entries = Vec::new();
    let checked = history::read(&text, |entry, head| entries.push(Past::new(entry, head)));
    let head = entries.last().map(|past| past.hash.clone()).unwrap_or_default();
    Ok(Audit { file: file.to_owned(), entries, head, broken: checked.err().map(|broken| broken.to_string()) })
}

fn verify(mut audit: Audit, head: Option<&str>, json: bool) -> anyhow::Result<Printed> {
    let lacks = |head: &&str| !audit.entries.iter().any(|past| past.hash == **head);
    if let Some(head) = head.filter(lacks).filter(|_| audit.broken.is_none()) {
        audit.broken = Some(format!(
            "no entry has the hash {head}: entries at the end were removed, or all were replaced"
        ));
    }
    let code = u8::from(audit.broken.is_some());
    if json {
        return Ok(Printed { out: line(&audit)?, code, ..Printed::default() });
    }
    let versions = audit.entries.iter().filter_map(|past| past.version).max().unwrap_or(0);
    let (count, file) = (audit.entries.len(), audit.file.display());
    Ok(match &audit.broken {
        None => Printed {
            out: format!("{file}: {count} entries, {versions} versions, every link holds\n"),
            ..Printed::default()
        },
        Some(broken) => Printed {
            err: format!("{file}: {broken}; the {count} entries before it hold\n"),
            code,
            ..Printed::default()
        },
    })
}
