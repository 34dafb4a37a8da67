//! `sidetrack orchestrate`: the infrastructure orchestrator, and a small application orchestrator that speaks to one.

use crate::control::api::{Agreed, Application, ApplicationStatus, Phase, Placement, Planned, Progress};
use crate::control::link::{ALPN, Link, LinkError};
use crate::control::{self, name, openapi};
use crate::tls::{Mutual, Pin, Trust};
use anyhow::Context;
use axum::body::Body;
use clap::{Args, Subcommand};
use hyper::Method;
use hyper::body::Body as _;
use std::path::{Path, PathBuf};
use std::pin::Pin as Pinned;
use std::process::ExitCode;
use std::time::Duration;

/// Time limit for answers other than a set-up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum length of a progress line, in bytes.
const LINE_MAX: usize = 1 << 20;

/// Sets applications up across domains
#[derive(Clone, Debug, Args)]
pub struct OrchestrateArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Runs the orchestrator
    Serve {
        /// The orchestrator's configuration file
        #[arg(short, long, value_name = "FILE", default_value = "orchestrator.toml")]
        config: PathBuf,
    },
    /// Submits an application and shows the eight steps. Exit code 1: it did not become ready, and everything was
    /// undone
    Submit {
        /// The application: a TOML file with name, purpose, access and [[flows]] of client and data
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        to: To,
        /// Prints the lines as the orchestrator sends them
        #[arg(long)]
        json: bool,
    },
    /// Shows what would be done for an application, and does nothing
    Plan {
        /// The application: as for submit
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Shows each possibility with its cost, or why it is not possible
        #[arg(long)]
        why: bool,
        #[command(flatten)]
        to: To,
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// Lists your applications; operators see all
    Ls {
        #[command(flatten)]
        to: To,
        /// Prints JSON
        #[arg(long)]
        json: bool,
    },
    /// Ends an application and undoes everything done for it
    End {
        /// The application's name
        name: String,
        #[command(flatten)]
        to: To,
    },
    /// Prints the OpenAPI document of the orchestrator
    Openapi,
}

/// The orchestrator to contact, and the own identity.
#[derive(Clone, Debug, Args)]
pub struct To {
    /// The orchestrator's address. Several, separated by commas: the first that answers is taken
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', required = true)]
    pub at: Vec<String>,
    /// The name in the orchestrator's certificate [default: the host of --at]
    #[arg(long, value_name = "NAME")]
    pub server_name: Option<String>,
    /// File with your certificate and key
    #[arg(long, value_name = "FILE")]
    pub identity: PathBuf,
    /// File with the authority that signed the orchestrator's certificate
    #[arg(long, value_name = "FILE", required_unless_present = "pin")]
    pub ca: Option<PathBuf>,
    /// The orchestrator's key, instead of an authority
    #[arg(long, value_name = "PIN", conflicts_with = "ca")]
    pub pin: Option<Pin>,
}

impl To {
    /// Makes the client for it; `name` is for messages.
    ///
    /// # Errors
    /// A file cannot be read, or has the wrong content.
    pub fn link(&self, name: &str) -> anyhow::Result<Link> {
        let read = |path: &Path| {
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let trust = match (&self.ca, self.pin) {
            (Some(ca), _) => Trust::Authority(read(ca)?.into()),
            (None, pin) => Trust::Pins(pin.into_iter().collect()),
        };
        let mutual = Mutual::new(&read(&self.identity)?, trust, ALPN)?;
        let first = self.at.first().map_or("", String::as_str);
        let host = first.rsplit_once(':').map_or(first, |(host, _)| host);
        let server_name = self.server_name.as_deref().unwrap_or(host);
        Ok(Link::new(name, &self.at, server_name, mutual))
    }
}

/// Runs the subcommand.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &OrchestrateArgs) -> anyhow::Result<ExitCode> {
    if let Command::Serve { config } = &args.command {
        // It makes its own runtime, after it has given up its rights.
        control::orchestrate(config)?;
        return Ok(ExitCode::SUCCESS);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match &args.command {
            Command::Serve { .. } => {}
            Command::Submit { file, to, json } => return submit(file, to, *json).await,
            Command::Plan { file, why, to, json } => plan(file, *why, to, *json).await?,
            Command::Ls { to, json } => ls(to, *json).await?,
            Command::End { name, to } => {
                name::check(name).map_err(anyhow::Error::msg)?;
                let path = format!("/v1/applications/{name}");
                orchestrator(to)?.ask::<()>(Method::DELETE, &path, &(), PATIENCE).await?;
                println!("{name}: ended");
            }
            Command::Openapi => println!("{:#}", openapi::orchestrator()),
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn orchestrator(to: &To) -> anyhow::Result<Link> {
    to.link("the orchestrator")
}

fn read(file: &Path) -> anyhow::Result<Application> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    Application::from_toml(&text).with_context(|| file.display().to_string())
}

async fn plan(file: &Path, why: bool, to: &To, json: bool) -> anyhow::Result<()> {
    let application = read(file)?;
    let planned: Planned = orchestrator(to)?.ask(Method::POST, "/v1/plan", &application, PATIENCE).await?;
    if json {
        println!("{}", serde_json::to_string(&planned)?);
        return Ok(());
    }
    for Agreed { wanted, functions_client, functions_server, .. } in &planned.movements {
        let all: Vec<_> = functions_client.iter().chain(functions_server).map(String::as_str).collect();
        println!("{} at {}: {}", wanted.data, wanted.client, all.join(" -> "));
    }
    for placement in &planned.placements {
        let Placement { party, function, cost_milli, missing_cpu_milli, .. } = placement;
        println!("{function} at {party}: cost {cost_milli} thousandths");
        placement.steps.iter().for_each(|step| println!("  {step}"));
        if *missing_cpu_milli > 0 {
            println!("  {missing_cpu_milli} thousandths of a core are missing: it would be refused");
        }
        placement.why.iter().filter(|_| why).for_each(|line| println!("  {line}"));
    }
    Ok(())
}

async fn submit(file: &Path, to: &To, json: bool) -> anyhow::Result<ExitCode> {
    let application = read(file)?;
    let body = serde_json::to_vec(&application)?;
    let answer = orchestrator(to)?.send(Method::POST, "/v1/applications", body).await?;
    let mut lines = Lines { body: answer.into_body(), held: Vec::new() };
    let mut last = None;
    while let Some(line) = lines.next().await? {
        let progress: Progress =
            serde_json::from_slice(&line).context("the orchestrator answers something else")?;
        if json {
            println!("{}", String::from_utf8_lossy(&line));
        } else {
            println!("{}", words(&progress));
        }
        last = Some(progress);
    }
    match last {
        Some(Progress::Done { number: 8, .. }) => Ok(ExitCode::SUCCESS),
        Some(Progress::Failed { .. }) => Ok(ExitCode::FAILURE),
        _ => anyhow::bail!(
            "the orchestrator went away: `sidetrack orchestrate ls` tells how the application stands"
        ),
    }
}

/// Formats one line of progress for people.
fn words(progress: &Progress) -> String {
    match progress {
        Progress::Done { step, number, seconds, detail } => {
            format!("{number}. {:<15} {:>7.1} ms  {detail}", step.to_string(), seconds * 1000.0)
        }
        Progress::Underway { step, domain, image, bytes, bytes_total } => {
            let of = bytes.saturating_mul(100) / (*bytes_total).max(1);
            format!(
                "{}. {step} ({domain}): {image}: {of} % of {:.1} MB",
                step.number(),
                *bytes_total as f64 / 1e6
            )
        }
        Progress::Failed { step, domain, error } => {
            let domain = domain.as_ref().map(|domain| format!(" ({domain})")).unwrap_or_default();
            format!("{}. {step}{domain}: refused: {error}", step.number())
        }
    }
}

async fn ls(to: &To, json: bool) -> anyhow::Result<()> {
    let link = orchestrator(to)?;
    let all: Vec<ApplicationStatus> = link.ask(Method::GET, "/v1/applications", &(), PATIENCE).await?;
    if json {
        println!("{}", serde_json::to_string(&all)?);
        return Ok(());
    }
    for status in &all {
        let phase = match status.phase {
            Phase::Preparing => "preparing",
            Phase::Ready => "ready",
            Phase::Ending => "ending",
        };
        let owner = status.owner.as_deref().map(|owner| format!(", of {owner}")).unwrap_or_default();
        println!(
            "{} ({}): {phase}, {}{owner}",
            status.application.name,
            status.application.purpose,
            status.domains.join(", ")
        );
        for Agreed { wanted, functions_client, functions_server, .. } in &status.movements {
            let all: Vec<_> = functions_client.iter().chain(functions_server).map(String::as_str).collect();
            println!("  {} at {}: {}", wanted.data, wanted.client, all.join(" -> "));
        }
    }
    Ok(())
}

/// Reads lines of an answer as they arrive.
struct Lines {
    body: Body,
    held: Vec<u8>,
}

impl Lines {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, LinkError> {
        let broken = |why: String| LinkError::Broken("the orchestrator".to_owned(), why);
        loop {
            if let Some(end) = self.held.iter().position(|byte| *byte == b'\n') {
                let rest = self.held.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.held, rest);
                line.pop();
                return Ok(Some(line));
            }
            if self.held.len() > LINE_MAX {
                return Err(broken("a line without an end".to_owned()));
            }
            match std::future::poll_fn(|cx| Pinned::new(&mut self.body).poll_frame(cx)).await {
                Some(Ok(frame)) => self.held.extend(frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return Err(broken(error.to_string())),
                None => return Ok(None),
            }
        }
    }
}
