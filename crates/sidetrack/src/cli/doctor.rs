//! `sidetrack doctor`: reports what this kernel, user and machine lack.

use super::Printed;
use super::mend::mend;
use super::wrap::{self, push_wrapped};
use crate::admin::{Findings, ONLY_RUNNING, default_socket};
use crate::config::{AdminAt, BadConfiguration, Config};
use crate::doctor::{Check, Facts, Level, OverlayUse, examine};
use crate::overlay::Status;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;
use unicode_width::UnicodeWidthStr;

/// Says what this kernel, user and machine lack, and how to mend it
///
/// Exits with 1 if something is missing without which nothing much works.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The configuration that is looked at: interfaces of engine listeners and [shunt], and the overlay [default: ./sidetrack.toml, else
    /// /etc/sidetrack/sidetrack.toml, if there is one]
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    json: bool,
    /// Mends what only raises a bound (kernel settings), and says each step; the rest is left to you
    #[arg(long, conflicts_with = "json")]
    fix: bool,
    /// With --fix: says what would be done and does nothing
    #[arg(long, requires = "fix")]
    dry_run: bool,
}

/// Gathers and reports. Call it before any thread is started, because it runs a command.
///
/// # Errors
/// The named configuration is wrong. All other findings are in the report and in the exit code.
pub fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let config = match &args.config {
        Some(path) => Some(Config::load(path).map_err(BadConfiguration::from)?),
        // If the default configuration is wrong, `check` reports that.
        None => Config::load(Config::default_path()).ok(),
    };
    let mut facts = Facts::gather(config.as_ref());
    if let (Some(config), Some(overlay)) = (&config, &mut facts.overlay) {
        ask(config, overlay);
    }
    if let Some(config) = &config {
        look_into_running(config, &mut facts);
    }
    if args.fix {
        return Ok(mend(&facts, args.dry_run).print());
    }
    Ok(report(&facts, args.json, wrap::width()).print())
}

/// Asks the running sidetrack what it knows of the overlay.
fn ask(config: &Config, overlay: &mut OverlayUse) {
    match status(config) {
        Ok(status) => {
            for (name, members) in &mut overlay.groups {
                let known = status.groups.iter().find(|group| group.name == *name);
                *members = Some(known.map(|group| group.members.clone()).unwrap_or_default());
            }
            if let Some(tolerant) = &mut overlay.tolerant {
                tolerant.beyond = Some(status.links_beyond_topology);
            }
            overlay.lacking = Ok(status.links.into_iter().map(|link| (link.neighbour, link.lacks)).collect());
        }
        Err(why) => overlay.lacking = Err(why),
    }
}

/// Adds what only a running sidetrack knows: what it cannot write, and the memory of its own control group.
fn look_into_running(config: &Config, facts: &mut Facts) {
    // If none runs, there is nothing to say.
    let Some(findings) =
        socket(config).and_then(|at| super::ask_once::<Findings>(&at, "/v1/doctor", &[])).ok()
    else {
        return;
    };
    facts.memory = None;
    let own = findings.checks.iter().filter(|check| ONLY_RUNNING.contains(&check.name.as_str()));
    let told = own.map(|check| {
        Check::told(&check.name, &check.level, &check.found, &check.needed_for, check.fix.as_deref())
    });
    facts.running = told.collect();
}

fn socket(config: &Config) -> Result<PathBuf, String> {
    match &config.admin.socket {
        AdminAt::Path(path) => Ok(path.clone()),
        AdminAt::Default => Ok(default_socket()),
        AdminAt::None => Err("the configuration has no admin socket ([admin])".to_owned()),
    }
}

fn status(config: &Config) -> Result<Status, String> {
    super::ask_once(&socket(config)?, "/v1/overlay", &[])
}

#[derive(Serialize)]
struct Report<'a> {
    kernel: &'a str,
    uid: u32,
    checks: &'a [Check],
}

/// Formats the report in lines of at most `width` columns.
pub fn report(facts: &Facts, json: bool, width: usize) -> Printed {
    let checks = examine(facts);
    let code = u8::from(checks.iter().any(|check| check.level == Level::Fail));
    let out = if json {
        let report = Report { kernel: &facts.kernel, uid: facts.uid, checks: &checks };
        serde_json::to_string(&report).unwrap_or_default() + "\n"
    } else {
        text(facts, &checks, width)
    };
    Printed { out, err: String::new(), code }
}

/// The least width of the text beside the names. If there is less room, the text is put below the names.
const TEXT_LEAST: usize = 30;

/// Columns before a name.
const BEFORE_NAME: usize = 6;

fn text(facts: &Facts, checks: &[Check], width: usize) -> String {
    let who = if facts.uid == 0 { "root".to_owned() } else { format!("user {}", facts.uid) };
    let mut text = format!("Linux {}, {who}\n\n", facts.kernel);
    let widest = checks.iter().map(|check| check.name.width()).max().unwrap_or(0);
    let beside = BEFORE_NAME + widest + 2;
    let is_beside = width >= beside + TEXT_LEAST;
    let indent = if is_beside { beside } else { BEFORE_NAME };
    let margin = " ".repeat(indent);
    for check in checks {
        let Check { name, level, found, needed_for, fix, .. } = check;
        let level = *level;
        let padding = " ".repeat(if is_beside { widest - name.width() + 2 } else { 0 });
        let head = format!("{:4}  {name}{padding}", level.as_str());
        if is_beside {
            push_wrapped(&mut text, &head, found, indent, width);
        } else {
            text.push_str(&format!("{head}\n"));
            push_wrapped(&mut text, &margin, found, indent, width);
        }
        if level != Level::Ok {
            push_wrapped(&mut text, &format!("{margin}needed for: "), needed_for, indent + 2, width);
            if let Some(fix) = fix {
                push_wrapped(&mut text, &format!("{margin}fix: "), fix, indent + 2, width);
            }
        }
    }
    let count = |level| checks.iter().filter(|check| check.level == level).count();
    let (fails, warns) = (count(Level::Fail), count(Level::Warn));
    text.push_str(&format!("\n{} checks: {fails} failed, {warns} to look at\n", checks.len()));
    text
}
