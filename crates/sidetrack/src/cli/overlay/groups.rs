//! `sidetrack overlay group`.

use crate::admin::Client;
use crate::overlay::GroupView;
use clap::Subcommand;
use hyper::Method;
use std::fmt::Write as _;

/// What to do with groups.
#[derive(Debug, Subcommand)]
pub(super) enum GroupCommand {
    /// Lists the groups that this node knows, and their members
    Ls {
        /// Prints one JSON array
        #[arg(long)]
        json: bool,
    },
    /// Makes this node a member until it restarts
    Join {
        /// The group's name
        group: String,
    },
    /// Ends this node's membership until it restarts
    Leave {
        /// The group's name
        group: String,
    },
}

/// Runs the command. Returns what to print.
///
/// # Errors
/// The answer of the running sidetrack, in words.
pub(super) async fn run(client: &Client, command: &GroupCommand) -> anyhow::Result<String> {
    let (group, member) = match command {
        GroupCommand::Ls { json } => {
            let views: Vec<GroupView> = client.ask(Method::GET, "/v1/overlay/group", &[]).await?;
            return Ok(if *json { serde_json::to_string(&views)? + "\n" } else { table(&views) });
        }
        GroupCommand::Join { group } => (group, "true"),
        GroupCommand::Leave { group } => (group, "false"),
    };
    let path = format!("/v1/overlay/group/{group}");
    let view: GroupView = client.ask(Method::POST, &path, &[("member", member)]).await?;
    Ok(format!("this node is {} of {}\n", state(&view), view.name))
}

/// Returns the line about a group in the status.
pub(super) fn line(view: &GroupView) -> String {
    format!("group {}: this node is {}; members: {}\n", view.name, state(view), members(view))
}

const fn state(view: &GroupView) -> &'static str {
    if view.joined { "a member" } else { "no member" }
}

fn members(view: &GroupView) -> String {
    if view.members.is_empty() { "none".to_owned() } else { view.members.join(", ") }
}

fn table(views: &[GroupView]) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{:<20} {:<6} {:<20} MEMBERS", "GROUP", "JOINED", "NEAREST");
    for view in views {
        let GroupView { name, joined, nearest, packets, .. } = view;
        let joined = if *joined { "yes" } else { "no" };
        let nearest = if nearest.is_empty() { "none" } else { nearest };
        let _ = writeln!(out, "{name:<20} {joined:<6} {nearest:<20} {}", members(view));
        let counts: Vec<_> = packets
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(|(word, count)| format!("{count} {}", word.replace('_', " ")))
            .collect();
        if !counts.is_empty() {
            let _ = writeln!(out, "{:<20} packets: {}", "", counts.join(", "));
        }
    }
    out
}
