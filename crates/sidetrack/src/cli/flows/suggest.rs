//! `flows --suggest`: a profile for `run --profile` that allows what the flows have reached.

use super::past::{self, PastArgs};
use super::{Output, ask};
use crate::admin::Client;
use crate::record::seen;
use sidetrack_core::jail::Account;
use std::process::ExitCode;

/// Ended flows that are asked for, unless the command says another number.
const RECENT: usize = 1000;

/// Prints a profile of the flows that match: those of the history if that is asked, otherwise running and recent ones.
pub(super) async fn print(
    client: &Client,
    filter: &str,
    args: &PastArgs,
    output: &mut Output<'_>,
) -> anyhow::Result<ExitCode> {
    let flows = if args.is_asked() {
        let answer = past::ask(client, filter, args).await?;
        past::tell_gaps(&answer, output)?;
        answer.flows
    } else {
        ask(client, filter, RECENT).await?
    };
    let mut account = Account::default();
    for flow in &flows {
        if let Some(seen) = seen(flow) {
            account.note(seen, flow.bytes_up, flow.bytes_down);
        }
    }
    if account.rows().next().is_none() {
        writeln!(output.notes, "no flow matches that reached its destination")?;
    } else {
        output.out.write_all(account.profile().as_bytes())?;
    }
    output.out.flush()?;
    Ok(ExitCode::SUCCESS)
}
