//! `sidetrack policy`: shows what a data-flow agreement allows, with which functions, and replaces it.

mod diff;
mod history;

use super::Printed;
use crate::admin::{AgreementStatus, Applied, Client, Movement, Movements, Way, default_socket};
use crate::agreement;
use anyhow::Context;
use clap::{Args, Subcommand};
use hyper::Method;
use sidetrack_core::agreement::{Access, Surplus};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

/// Shows what a data-flow agreement allows, and replaces it
#[derive(Clone, Debug, Args)]
pub struct PolicyArgs {
    #[command(subcommand)]
    command: PolicyCommand,
    /// Admin socket of the running sidetrack
    #[arg(long, value_name = "PATH", global = true)]
    admin: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum PolicyCommand {
    /// Lists each pair of a node and another node's data: missing attributes, inserted functions, feasible or not.
    /// Reads only the file
    Plan(PlanArgs),
    /// Puts an agreement in force. Flows that it does not allow end with policy_revoked
    Apply(ApplyArgs),
    /// Lists the versions of the agreement and the decisions about it: who and when
    History {
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// Shows how one version of the agreement differs from another
    Diff {
        /// The number of the older version
        #[arg(value_name = "A")]
        from: u64,
        /// The number of the newer version
        #[arg(value_name = "B")]
        to: u64,
    },
    /// Puts the text of an earlier version in force again, as a new version
    Rollback(RollbackArgs),
    /// Checks the chain of hashes over versions and decisions
    Audit {
        #[command(subcommand)]
        command: history::AuditCommand,
    },
    /// Shows the agreement in force
    Show {
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
}

/// Arguments of `policy plan`.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// The agreement
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Lists only this purpose
    #[arg(long)]
    pub purpose: Option<String>,
    /// Lists only this access: read or write
    #[arg(long, value_parser = access)]
    pub access: Option<Access>,
    /// Lists only allowed movements
    #[arg(long)]
    pub allowed: bool,
    /// Prints JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `policy apply`.
#[derive(Clone, Debug, Args)]
struct ApplyArgs {
    /// The agreement
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Shows the effect, and changes nothing
    #[arg(long)]
    dry_run: bool,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `policy rollback`.
#[derive(Clone, Debug, Args)]
struct RollbackArgs {
    /// The number of the version
    #[arg(value_name = "N")]
    version: u64,
    /// Shows the effect, and changes nothing
    #[arg(long)]
    dry_run: bool,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

fn access(text: &str) -> Result<Access, String> {
    let known = Access::ALL.into_iter().find(|access| access.as_str() == text);
    known.ok_or_else(|| "write read or write".to_owned())
}

/// Runs the subcommand.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &PolicyArgs) -> anyhow::Result<ExitCode> {
    let client = || Client::new(args.admin.clone().unwrap_or_else(default_socket));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let printed = match &args.command {
        PolicyCommand::Plan(args) => plan(args, super::colours())?,
        PolicyCommand::Apply(args) => runtime.block_on(apply(&client(), args))?,
        PolicyCommand::History { json } => runtime.block_on(history::list(&client(), *json))?,
        PolicyCommand::Diff { from, to } => runtime.block_on(history::diff(&client(), *from, *to))?,
        PolicyCommand::Rollback(args) => runtime.block_on(rollback(&client(), args))?,
        PolicyCommand::Audit { command } => runtime.block_on(history::audit(&client(), command))?,
        PolicyCommand::Show { json } => {
            let status: AgreementStatus = runtime.block_on(client().ask(Method::GET, "/v1/policy", &[]))?;
            let out = if *json { line(&status)? } else { standing(&status) };
            Printed { out, ..Printed::default() }
        }
    };
    Ok(printed.print())
}

/// `policy plan`. Exit code 2: the file is wrong.
///
/// # Errors
/// None in practice: the output is a text in memory.
pub fn plan(args: &PlanArgs, colours: bool) -> anyhow::Result<Printed> {
    let book = match agreement::load(&args.file, SystemTime::now()) {
        Ok(book) => book,
        Err(error) => return Ok(Printed { err: error.render(colours), code: 2, ..Printed::default() }),
    };
    if let Some(purpose) =
        args.purpose.as_ref().filter(|purpose| !book.purposes().iter().any(|one| **one == ***purpose))
    {
        let known: Vec<_> = book.purposes().iter().map(|one| &**one).collect();
        let err = format!("there is no purpose '{purpose}'; there are: {}\n", known.join(", "));
        return Ok(Printed { err, code: 2, ..Printed::default() });
    }
    let mut movements = Movements::of(&book).movements;
    movements.retain(|movement| {
        args.purpose.as_ref().is_none_or(|purpose| *purpose == movement.purpose)
            && args.access.is_none_or(|access| access == movement.access)
            && (!args.allowed || matches!(movement.way, Way::Allow { .. }))
    });
    // Made again, so that the ratio counts only the listed movements.
    let movements = Movements::new(movements);
    let out = if args.json { line(&movements)? } else { table(&movements) };
    Ok(Printed { out, ..Printed::default() })
}

async fn apply(client: &Client, args: &ApplyArgs) -> anyhow::Result<Printed> {
    let text = read(&args.file)?;
    let dry_run = if args.dry_run { "true" } else { "false" };
    let applied: Applied = client.send(Method::PUT, "/v1/policy", &[("dry_run", dry_run)], text).await?;
    effect(&applied, args.json)
}

async fn rollback(client: &Client, args: &RollbackArgs) -> anyhow::Result<Printed> {
    let dry_run = if args.dry_run { "true" } else { "false" };
    let version = args.version.to_string();
    let query = [("dry_run", dry_run), ("version", &version)];
    let applied: Applied = client.ask(Method::PUT, "/v1/policy", &query).await?;
    effect(&applied, args.json)
}

/// Prints what a new agreement did, or would do.
fn effect(applied: &Applied, json: bool) -> anyhow::Result<Printed> {
    if json {
        return Ok(Printed { out: line(&applied)?, ..Printed::default() });
    }
    let (what, verb) =
        if applied.dry_run { ("nothing was changed", "would end") } else { ("in force", "ended") };
    let flows: Vec<_> = applied.revoked.iter().map(ToString::to_string).collect();
    let flows = if flows.is_empty() { String::new() } else { format!(": {}", flows.join(" ")) };
    let mut out = format!("{what}; {} flows {verb} with policy_revoked{flows}\n\n", applied.revoked.len());
    out.push_str(&standing(&applied.status));
    Ok(Printed { out, ..Printed::default() })
}

fn read(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

fn line(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string(value)? + "\n")
}

fn standing(status: &AgreementStatus) -> String {
    let Some(mode) = status.mode else {
        return "no agreement is in force: rules that ask one deny\n".to_owned();
    };
    let mode = match mode {
        crate::config::PolicyMode::Enforce => "enforced",
        crate::config::PolicyMode::Audit => "audited only: what would be denied is carried",
    };
    let next = status.next_change.map(|next| format!(", changes at {next}")).unwrap_or_default();
    let agreements = match status.agreements.is_empty() {
        true => "none".to_owned(),
        false => status.agreements.join(", "),
    };
    format!("agreements: {agreements} ({mode}{next})\n\n{}", table(&status.movements))
}

/// Prints a block for each movement that is allowed or could be, and a line for each that is refused.
fn table(movements: &Movements) -> String {
    let mut out = String::new();
    for movement in &movements.movements {
        let Movement { purpose, access, client, data, from, to, .. } = movement;
        let between = between(movement);
        // Writing to a text cannot fail.
        let _ = writeln!(out, "{client}: {access} {data} for {purpose}\n  {from} -> {to}: {between}");
        let _ = match &movement.way {
            Way::Deny { why } => writeln!(out, "  deny: {why}"),
            Way::Allow { by, functions_client, functions_server, agreed_surplus } => {
                let all: Vec<_> =
                    functions_client.iter().chain(functions_server).map(String::as_str).collect();
                let through = if all.is_empty() {
                    "as it is".to_owned()
                } else {
                    format!("through {}", all.join(" -> "))
                };
                let surplus = match agreed_surplus {
                    Surplus::Allow => ", surplus = \"allow\"",
                    Surplus::Deny => "",
                };
                writeln!(out, "  allow: by {}, {through}{surplus}", by.join(", "))
            }
        };
    }
    let listed = movements.movements.len();
    if listed == Movements::MAX {
        let _ = writeln!(out, "only the first {listed} movements are listed");
    }
    let (ratio, unfeasible) = (movements.unfeasibility_ratio, movements.unfeasible());
    let _ =
        writeln!(out, "unfeasibility ratio {ratio:.2}: {unfeasible} of {listed} movements are unfeasible");
    out
}

/// Returns the area logic's answer about a movement.
fn between(movement: &Movement) -> String {
    let Movement { channel, missing, surplus, unfeasible, .. } = movement;
    let mut said = vec![if *channel { "channel" } else { "no channel" }.to_owned()];
    said.push(match missing.is_empty() {
        true => "nothing missing".to_owned(),
        false => format!("missing {}", missing.join(", ")),
    });
    if !surplus.is_empty() {
        said.push(format!("surplus {}", surplus.join(", ")));
    }
    if *unfeasible {
        said.push("unfeasible".to_owned());
    }
    said.join(", ")
}
