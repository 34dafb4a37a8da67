//! `sidetrack plan`: prints every privileged action that `up` would take, without taking any.

use super::Printed;
use crate::config::Config;
use crate::plan::Plan;
use std::path::PathBuf;
use std::process::ExitCode;

/// Prints every privileged action that `up` would take, the right it needs and how it is undone. Nothing is done.
#[derive(Clone, Debug, clap::Args)]
pub struct PlanArgs {
    /// The configuration [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// Prints JSON: {"steps", "kernel_paths", "table"}.
    #[arg(long)]
    pub json: bool,
}

/// Runs the subcommand. Exit code 0: there is a plan; 2: the file is wrong.
///
/// # Errors
/// This host cannot run the configuration; says what is missing.
pub fn run(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    crate::plan::look_at_session();
    Ok(report(args, super::colours())?.print())
}

/// Returns the output of the subcommand.
///
/// # Errors
/// This host cannot run the configuration; says what is missing.
pub fn report(args: &PlanArgs, colours: bool) -> anyhow::Result<Printed> {
    let config = match Config::load(&args.config) {
        Ok(config) => config,
        Err(error) => return Ok(Printed { out: String::new(), err: error.render(colours), code: 2 }),
    };
    let plan = Plan::new(&config)?;
    let out = if args.json { format!("{}\n", serde_json::to_string(&plan)?) } else { plan.to_string() };
    Ok(Printed { out, err: String::new(), code: 0 })
}
