//! `sidetrack domain`: runs a party's agent, and gives its operators' commands to it.

use super::orchestrate::To;
use crate::control::api::{Configured, Consent, ConsentChange};
use crate::control::domain::Held;
use crate::control::{self, name, openapi};
use clap::{Args, Subcommand};
use hyper::Method;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs and controls a party's agent, which grants access, offers nodes and configures the party's proxies
#[derive(Clone, Debug, Args)]
pub struct DomainArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Runs the agent
    Serve {
        /// The agent's configuration file
        #[arg(short, long, value_name = "FILE", default_value = "domain.toml")]
        config: PathBuf,
    },
    /// Sets whether the persons that the data describes consent; flows without consent end at once
    Consent {
        /// The data set
        data: String,
        /// given or withdrawn
        #[arg(value_parser = consent)]
        consent: Consent,
        #[command(flatten)]
        to: To,
    },
    /// Lists grants and configurations
    Ls {
        #[command(flatten)]
        to: To,
    },
    /// Prints the OpenAPI document of the agent
    Openapi,
}

fn consent(text: &str) -> Result<Consent, String> {
    match text {
        "given" => Ok(Consent::Given),
        "withdrawn" => Ok(Consent::Withdrawn),
        _ => Err("write given or withdrawn".to_owned()),
    }
}

/// Runs the subcommand.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &DomainArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match &args.command {
            Command::Serve { config } => control::domain(config).await?,
            Command::Consent { data, consent, to } => {
                let link = to.link("the domain's agent")?;
                let segment = name::segment(data).map_err(anyhow::Error::msg)?;
                let (path, change) = (format!("/v1/consent/{segment}"), ConsentChange { consent: *consent });
                let Configured { revoked } = link.ask(Method::PUT, &path, &change, PATIENCE).await?;
                println!("{data}: {revoked} running flows ended");
            }
            Command::Ls { to } => {
                let link = to.link("the domain's agent")?;
                let all: Vec<Held> = link.ask(Method::GET, "/v1/applications", &(), PATIENCE).await?;
                for held in all {
                    let phase = match (held.lease, &held.configuration) {
                        (None, _) => "ready",
                        (Some(_), Some(_)) => "configured",
                        (Some(_), None) => "granted",
                    };
                    println!("{} ({}): {phase}", held.application.name, held.application.purpose);
                }
            }
            Command::Openapi => println!("{:#}", openapi::domain()),
        }
        Ok(ExitCode::SUCCESS)
    })
}
