//! `sidetrack check`: checks a configuration file, and says where it is wrong and what to do.

use super::Printed;
use crate::config::{Config, ConfigError, Problem};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Checks a configuration: every error and warning with its place, and the file's own decision tests.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// The file [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
    #[arg(value_name = "FILE", conflicts_with = "config")]
    pub file: Option<PathBuf>,
    /// The same, as other commands take it
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Prints JSON: {"ok", "problems": [{"severity", "line", "column", "message", "help"}]}.
    #[arg(long)]
    pub json: bool,
}

/// Runs the subcommand. Exit code 0: the file is valid (it may have warnings); 2: it is not.
///
/// # Errors
/// None of its own.
pub fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    Ok(report(args, super::colours()).print())
}

/// Returns the output of the subcommand.
pub fn report(args: &CheckArgs, colours: bool) -> Printed {
    let given = args.file.as_ref().or(args.config.as_ref());
    let file = given.cloned().unwrap_or_else(Config::default_path);
    let (config, shown) = match Config::load(&file) {
        Ok(config) => {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let name = file.display().to_string();
            let warnings = ConfigError::of_warnings(&name, &text, &config.warnings);
            (Some(config), warnings)
        }
        Err(error) => (None, error),
    };
    let code = if config.is_some() { 0 } else { 2 };
    if args.json {
        let problem = |problem: &Problem| {
            let (line, column) = shown.line_column(problem).unzip();
            let severity = if problem.is_error() { "error" } else { "warning" };
            json!({ "severity": severity, "line": line, "column": column,
                    "message": problem.message(), "help": problem.help() })
        };
        let problems: Vec<_> = shown.problems().iter().map(problem).collect();
        let out = format!("{}\n", json!({ "ok": code == 0, "problems": problems }));
        return Printed { out, err: String::new(), code };
    }
    let out = config.map(|config| {
        let early = config.accepted_early_by_run();
        let notes = early.iter().map(|early| format!("note: accepted before the far side, {early}\n"));
        format!("{}: {}\n{}", file.display(), summary(&config), notes.collect::<String>())
    });
    let mut err = shown.render(colours);
    let errors = shown.problems().iter().filter(|problem| problem.is_error()).count();
    if errors > 0 {
        err.push_str(&format!("{}: {}\n", file.display(), count(errors, "error")));
    }
    Printed { out: out.unwrap_or_default(), err, code }
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn summary(config: &Config) -> String {
    use sidetrack_core::policy::Action;
    let default = match config.policy.default_action() {
        Action::Deny => "deny",
        Action::Carry(_) => "direct",
    };
    format!(
        "ok: {}, {}, default {default}, {} passed, {}",
        count(config.listeners.len(), "listener"),
        count(config.policy.rules().len(), "rule"),
        count(config.tests.len(), "test"),
        count(config.warnings.len(), "warning"),
    )
}
