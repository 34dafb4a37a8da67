//! `sidetrack profile`: measures how long a running sidetrack works at each stage of the data path.

use super::Printed;
use crate::admin::{Client, Profile, default_socket};
use clap::Args;
use hyper::Method;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// How often the command looks whether the measurement has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Measures how long a running sidetrack works at each stage of the data path
#[derive(Clone, Debug, Args)]
pub struct ProfileArgs {
    /// How long to measure, 1 to 600 seconds
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// The admin socket of the running sidetrack
    #[arg(long, value_name = "PATH")]
    pub admin: Option<PathBuf>,
}

/// Runs the subcommand.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &ProfileArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let out = runtime.block_on(report(args))?;
    Ok(Printed { out, ..Printed::default() }.print())
}

/// Returns the output of the subcommand, when the measurement is over.
///
/// # Errors
/// As [`run`].
pub async fn report(args: &ProfileArgs) -> anyhow::Result<String> {
    let client = Client::new(args.admin.clone().unwrap_or_else(default_socket));
    let seconds = args.seconds.to_string();
    let _: Profile = client.ask(Method::POST, "/v1/profile", &[("seconds", &seconds)]).await?;
    // It ends there by itself, also if this command is interrupted.
    let profile = loop {
        tokio::time::sleep(LOOK_AGAIN).await;
        let profile: Profile = client.ask(Method::GET, "/v1/profile", &[]).await?;
        if !profile.is_running {
            break profile;
        }
    };
    if args.json { Ok(serde_json::to_string(&profile)? + "\n") } else { Ok(table(&profile)) }
}

fn table(profile: &Profile) -> String {
    if profile.stages.is_empty() {
        return "no thread of the data path did anything\n".to_owned();
    }
    let busy_ns: u64 = profile.stages.iter().map(|stage| stage.busy_ns).sum();
    let mut text =
        format!("{:<20} {:>12} {:>12} {:>8} {:>12}\n", "STAGE", "EVENTS", "BUSY ms", "SHARE", "ns/EVENT");
    // Writing to a String cannot fail.
    for stage in &profile.stages {
        let _ = writeln!(
            text,
            "{:<20} {:>12} {:>12.3} {:>7.1}% {:>12}",
            stage.stage,
            stage.events,
            stage.busy_ns as f64 / 1e6,
            100.0 * stage.busy_ns as f64 / busy_ns.max(1) as f64,
            stage.busy_ns / stage.events.max(1)
        );
    }
    let lasted_ms = profile.lasted_ms.max(1);
    let _ = writeln!(
        text,
        "busy for {:.3} ms of {lasted_ms} ms: {:.2} processors",
        busy_ns as f64 / 1e6,
        busy_ns as f64 / 1e6 / lasted_ms as f64
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::StageTime;

    #[test]
    fn a_table_has_shares_of_the_busy_time() {
        let stage = |stage: &str, events, busy_ns| StageTime { stage: stage.to_owned(), events, busy_ns };
        let profile = Profile {
            is_running: false,
            lasted_ms: 1000,
            stages: vec![stage("session loop", 10, 300_000_000), stage("session move", 50, 100_000_000)],
        };
        let text = table(&profile);
        assert!(
            text.contains("session move                   50      100.000    25.0%      2000000\n"),
            "{text}"
        );
        assert!(text.ends_with("busy for 400.000 ms of 1000 ms: 0.40 processors\n"), "{text}");
        assert_eq!(table(&Profile::default()), "no thread of the data path did anything\n");
    }
}
