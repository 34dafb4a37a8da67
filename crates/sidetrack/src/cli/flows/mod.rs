//! `sidetrack flows`: shows running and recently ended flows, ends flows, and brings them back from the wire.

pub(super) mod human;
mod past;
mod rates;
pub(super) mod show;
mod suggest;
mod table;
pub(super) mod which;
mod why;

pub use table::Table;
pub(super) use table::cut;

use crate::admin::{Back, Client, ClientError, Killed};
use crate::record::{FlowRecord, Traced};
use clap::{Args, Subcommand};
use hyper::Method;
use rates::Rates;
use serde::Deserialize;
use sidetrack_core::filter::Filter;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Exit code for a mistake on the command line.
const USAGE: u8 = 2;

/// Shows flows in flight and recently ended flows, and ends flows
///
/// FILTER selects flows: proc == curl and dst in 10.0.0.0/8 and port == 443 and bytes > 1MiB and age > 10s
#[derive(Debug, Args)]
pub struct FlowsArgs {
    #[command(subcommand)]
    command: Option<FlowsCommand>,
    /// Filter for the flows; several words form one filter
    filter: Vec<String>,
    /// Runs until interrupted: shows flows as they end; without --json also, every second, the flows that moved
    /// bytes, with their rates
    #[arg(short, long, conflicts_with_all = ["since", "until", "top", "limit"])]
    follow: bool,
    /// Prints one JSON object per line, as in records
    #[arg(long)]
    json: bool,
    /// Shows also the latest N ended flows
    #[arg(long, value_name = "N", default_value_t = 0)]
    recent: usize,
    /// Prints a profile for `run --profile` that allows what the flows have reached; with --since, those of the history
    #[arg(long, conflicts_with_all = ["follow", "json", "recent", "top"])]
    suggest: bool,
    #[command(flatten)]
    past: past::PastArgs,
    /// Admin socket of the running sidetrack
    #[arg(long, value_name = "PATH", global = true)]
    admin: Option<PathBuf>,
    /// Process id of a `sidetrack run` to ask
    #[arg(long, value_name = "PID", global = true, conflicts_with = "admin")]
    pid: Option<u32>,
}

#[derive(Debug, Subcommand)]
enum FlowsCommand {
    /// Shows all fields of one flow, its steps with their times, and what TCP measures
    Show {
        /// The flow's number
        #[arg(value_name = "ID")]
        id: u64,
    },
    /// Says why one flow was treated as it was: each rule's part in the decision, names and addresses, and where
    /// the time went
    Why {
        /// The flow's number
        #[arg(value_name = "ID")]
        id: u64,
    },
    /// Brings one flow back from the wire: its bytes pass two sockets of Sidetrack again
    Back {
        /// The flow's number
        #[arg(value_name = "ID")]
        id: u64,
    },
    /// Ends one flow by its number, or all flows that match a filter
    Kill {
        /// A flow's number, or a filter
        #[arg(required = true, value_name = "ID|FILTER")]
        which: Vec<String>,
        /// Shows the flows that would be ended, and ends none
        #[arg(long)]
        dry_run: bool,
    },
}

/// Interval between two displays of rates.
const RATES_EVERY: Duration = Duration::from_secs(1);

/// The output of a command, and its width.
pub struct Output<'a> {
    /// The data.
    pub out: &'a mut dyn Write,
    /// Everything else: hints, and how much was missed.
    pub notes: &'a mut dyn Write,
    /// Columns of the terminal; `None` without a terminal: nothing is shortened.
    pub width: Option<usize>,
}

/// Runs the command on this process's own output.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &FlowsArgs) -> anyhow::Result<ExitCode> {
    let stdout = io::stdout();
    let width = stdout.is_terminal().then(|| {
        terminal_size::terminal_size_of(&stdout)
            .map_or(80, |(terminal_size::Width(width), _)| usize::from(width))
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut output = Output { out: &mut stdout.lock(), notes: &mut io::stderr(), width };
    runtime.block_on(run_to(args, &mut output))
}

/// Runs the command on an output.
///
/// # Errors
/// As [`run`].
pub async fn run_to(args: &FlowsArgs, output: &mut Output<'_>) -> anyhow::Result<ExitCode> {
    let client = Client::new(which::socket(args.admin.as_deref(), args.pid)?);
    let (words, killing) = match &args.command {
        Some(FlowsCommand::Kill { which, .. }) => (which, true),
        _ => (&args.filter, false),
    };
    let one = match args.command {
        Some(FlowsCommand::Show { id }) => Some(("show", id)),
        Some(FlowsCommand::Why { id }) => Some(("why", id)),
        Some(FlowsCommand::Back { id }) => Some(("back", id)),
        _ => None,
    };
    let is_only_for_lists =
        args.follow || args.suggest || args.recent > 0 || !args.filter.is_empty() || args.past.is_asked();
    if (killing && (is_only_for_lists || args.json)) || (one.is_some() && is_only_for_lists) {
        let word = one.map_or("kill", |(word, _)| word);
        writeln!(
            output.notes,
            "{word} takes its flow or filter after the word, and no other options of flows"
        )?;
        return Ok(ExitCode::from(USAGE));
    }
    if let Some(("back", id)) = one {
        return bring_back(&client, id, args.json, output).await;
    }
    if let Some((word, id)) = one {
        let form = if word == "show" { show::traced } else { why::text };
        return show_one(&client, id, args.json.then_some(word), form, output).await;
    }
    let text = filter_text(words, killing);
    if let Err(error) = Filter::parse(&text) {
        writeln!(output.notes, "the filter cannot be read:\n{}", error.caret(&text))?;
        return Ok(ExitCode::from(USAGE));
    }
    let result = match &args.command {
        Some(FlowsCommand::Kill { dry_run: false, .. }) => kill(&client, &text, output).await,
        Some(FlowsCommand::Kill { dry_run: true, .. }) => list(&client, &text, 0, false, output).await,
        _ if args.suggest => suggest::print(&client, &text, &args.past, output).await,
        _ if args.past.is_asked() => past::show(&client, &text, &args.past, args.json, output).await,
        _ if args.follow => follow(&client, &text, args, output).await,
        _ => list(&client, &text, args.recent, args.json, output).await,
    };
    match result {
        // The reader has closed our output: `sidetrack flows | head`.
        Err(error) if is_broken_pipe(&error) => Ok(ExitCode::SUCCESS),
        result => result,
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// Returns the filter that several words form; a single number names a flow to end.
fn filter_text(words: &[String], killing: bool) -> String {
    match words {
        [one] if killing && one.bytes().all(|byte| byte.is_ascii_digit()) => format!("id == {one}"),
        words => words.join(" "),
    }
}

#[derive(Deserialize)]
struct Flows {
    flows: Vec<FlowRecord<'static>>,
}

async fn ask(client: &Client, filter: &str, recent: usize) -> Result<Vec<FlowRecord<'static>>, ClientError> {
    let recent = recent.to_string();
    let query = [("filter", filter), ("recent", &recent)];
    client.ask::<Flows>(Method::GET, "/v1/flows", &query).await.map(|answer| answer.flows)
}

async fn list(
    client: &Client,
    filter: &str,
    recent: usize,
    json: bool,
    output: &mut Output<'_>,
) -> anyhow::Result<ExitCode> {
    let flows = ask(client, filter, recent).await?;
    if json {
        let mut lines = Vec::new();
        flows.iter().for_each(|flow| flow.write_line(&mut lines));
        output.out.write_all(&lines)?;
    } else if flows.is_empty() {
        output.notes.write_all(none_found(filter, recent).as_bytes())?;
    } else {
        let table = Table::new(&flows, output.width);
        output.out.write_all(table.header().as_bytes())?;
        for flow in &flows {
            output.out.write_all(table.row(flow).as_bytes())?;
        }
    }
    output.out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Shows one flow: `show` as JSON is its record, `why` as JSON its decision trace.
async fn show_one(
    client: &Client,
    id: u64,
    json: Option<&str>,
    form: fn(&Traced<'_>) -> String,
    output: &mut Output<'_>,
) -> anyhow::Result<ExitCode> {
    let traced: Traced<'static> = client.ask(Method::GET, &format!("/v1/flows/{id}/trace"), &[]).await?;
    match json {
        Some("show") => {
            let mut line = Vec::new();
            traced.flow.write_line(&mut line);
            output.out.write_all(&line)?;
        }
        Some(_) => {
            serde_json::to_writer(&mut *output.out, &traced)?;
            output.out.write_all(b"\n")?;
        }
        None => output.out.write_all(form(&traced).as_bytes())?,
    }
    output.out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn none_found(filter: &str, recent: usize) -> String {
    let which = if filter.trim().is_empty() { "" } else { " that matches" };
    match recent {
        0 => format!("no flow{which} is in flight; --recent 20 shows the latest that ended, too\n"),
        _ => format!("no flow{which} is in flight or among the latest that ended\n"),
    }
}

async fn kill(client: &Client, filter: &str, output: &mut Output<'_>) -> anyhow::Result<ExitCode> {
    let Killed { killed } = client.ask(Method::DELETE, "/v1/flows", &[("filter", filter)]).await?;
    let ids = killed.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
    match killed.len() {
        0 => {
            writeln!(output.notes, "no flow in flight matches: nothing was ended")?;
            return Ok(ExitCode::FAILURE);
        }
        1 => writeln!(output.out, "ended flow {ids}")?,
        count => writeln!(output.out, "ended {count} flows: {ids}")?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn bring_back(
    client: &Client,
    id: u64,
    json: bool,
    output: &mut Output<'_>,
) -> anyhow::Result<ExitCode> {
    let path = format!("/v1/flows/{id}/back");
    let answer: Back = client.ask(Method::POST, &path, &[]).await?;
    if json {
        serde_json::to_writer(&mut *output.out, &answer)?;
        output.out.write_all(b"\n")?;
    } else {
        writeln!(output.out, "flow {id} has two sockets again")?;
    }
    output.out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// The fields of an event that is not a record.
#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Event {
    Ended(Box<FlowRecord<'static>>),
    Missed {
        count: u64,
    },
    #[serde(other)]
    Other,
}

async fn follow(
    client: &Client,
    filter: &str,
    args: &FlowsArgs,
    output: &mut Output<'_>,
) -> anyhow::Result<ExitCode> {
    // Open the stream first, then fetch the earlier flows. So a flow that ends in between appears twice instead of never,
    // and the second one is skipped below.
    let mut events = client.lines("/v1/events", &[("filter", filter)]).await?;
    let before = if args.recent > 0 { ask(client, filter, args.recent).await? } else { Vec::new() };
    let before: Vec<_> = before.into_iter().filter(|flow| flow.reason.is_some()).collect();
    let newest = before.iter().map(|flow| flow.flow).collect::<std::collections::BTreeSet<_>>();
    let table = Table::streaming(output.width);
    if !args.json {
        output.out.write_all(table.header().as_bytes())?;
    }
    for flow in &before {
        print(flow, args.json, &table, output)?;
    }
    let mut rates = Rates::default();
    let mut ticks = tokio::time::interval(RATES_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let line = tokio::select! {
            biased;
            line = events.next() => line?,
            _ = ticks.tick(), if !args.json => {
                // A sidetrack that stops does not answer; the end of the events reports that.
                let flows = ask(client, filter, 0).await.unwrap_or_default();
                moving(&mut rates, &flows, &table, output)?;
                continue;
            }
        };
        let Some(line) = line else { break };
        match serde_json::from_str(&line)? {
            Event::Ended(flow) if !newest.contains(&flow.flow) => print(&flow, args.json, &table, output)?,
            Event::Missed { count } => {
                writeln!(output.notes, "{count} flows came faster than they could be shown")?;
            }
            Event::Ended(_) | Event::Other => {}
        }
    }
    writeln!(output.notes, "sidetrack has stopped")?;
    Ok(ExitCode::SUCCESS)
}

/// Shows the running flows that have moved bytes since the last call.
fn moving(
    rates: &mut Rates,
    flows: &[FlowRecord<'static>],
    table: &Table,
    output: &mut Output<'_>,
) -> io::Result<()> {
    for (flow, rate) in rates.moved(flows, Instant::now()) {
        output.out.write_all(table.row_at(flow, &rate).as_bytes())?;
    }
    output.out.flush()
}

fn print(flow: &FlowRecord<'_>, json: bool, table: &Table, output: &mut Output<'_>) -> io::Result<()> {
    if json {
        let mut line = Vec::new();
        flow.write_line(&mut line);
        output.out.write_all(&line)?;
    } else {
        output.out.write_all(table.row(flow).as_bytes())?;
    }
    output.out.flush()
}
