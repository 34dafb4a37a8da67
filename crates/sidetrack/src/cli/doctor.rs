//! `sidetrack doctor`.

use super::Printed;
use crate::doctor::{Check, Facts, Level, examine};
use clap::Args;
use serde::Serialize;
use std::process::ExitCode;

/// Says what this kernel, user and machine lack, and how to mend it
///
/// Exits with 1 if something is missing without which nothing much works.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Looks and reports. To be called before any thread is started: it runs a command.
///
/// # Errors
/// None at present; what is wrong is in the report and in the exit code.
pub fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    Ok(report(&Facts::gather(), args.json).print())
}

#[derive(Serialize)]
struct Report<'a> {
    kernel: &'a str,
    uid: u32,
    checks: &'a [Check],
}

/// The report on some facts.
pub fn report(facts: &Facts, json: bool) -> Printed {
    let checks = examine(facts);
    let code = u8::from(checks.iter().any(|check| check.level == Level::Fail));
    let out = if json {
        let report = Report { kernel: &facts.kernel, uid: facts.uid, checks: &checks };
        serde_json::to_string(&report).unwrap_or_default() + "\n"
    } else {
        text(facts, &checks)
    };
    Printed { out, err: String::new(), code }
}

fn text(facts: &Facts, checks: &[Check]) -> String {
    let who = if facts.uid == 0 { "root".to_owned() } else { format!("user {}", facts.uid) };
    let mut text = format!("Linux {}, {who}\n\n", facts.kernel);
    let widest = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    for check in checks {
        let Check { name, level, found, needed_for, fix } = check;
        let indent = " ".repeat(widest + 8);
        text.push_str(&format!("{:4}  {name:widest$}  {found}\n", level.as_str()));
        if *level != Level::Ok {
            text.push_str(&format!("{indent}needed for: {needed_for}\n"));
            if let Some(fix) = fix {
                text.push_str(&format!("{indent}fix: {fix}\n"));
            }
        }
    }
    let count = |level| checks.iter().filter(|check| check.level == level).count();
    let (fails, warns) = (count(Level::Fail), count(Level::Warn));
    text.push_str(&format!("\n{} checks: {fails} failed, {warns} to look at\n", checks.len()));
    text
}
