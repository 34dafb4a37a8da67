//! `sidetrack doctor --fix`: changes what only raises a bound, and says each step.

use super::Printed;
use crate::doctor::{Facts, KEPT_IN, Setting, examine, kept, plan};
use sidetrack_sys::sysctl;
use std::io;
use std::path::Path;

/// Mends what can be mended safely; with `dry_run`, only says what it would do. Exit code 1 if a step failed.
pub(super) fn mend(facts: &Facts, dry_run: bool) -> Printed {
    let plan = plan(&examine(facts));
    let mut printed = Printed::default();
    let mut set: Vec<Setting> = Vec::new();
    for setting in plan.settings {
        let now = facts.setting(setting.name).unwrap_or("not known").to_owned();
        let what = format!("set {} to {} (it was {now})", setting.dotted(), setting.value);
        if dry_run {
            printed.out += &format!("would {what}\n");
            set.push(setting);
            continue;
        }
        match sysctl::write(setting.name, &setting.value) {
            Ok(_) => {
                printed.out += &format!("done: {what}\n");
                set.push(setting);
            }
            Err(error) => failed(&mut printed, &what, &error),
        }
    }
    if !set.is_empty() {
        let what = format!("keep that at each boot, in {KEPT_IN}");
        if dry_run {
            printed.out += &format!("would {what}\n");
        } else {
            match keep(Path::new(KEPT_IN), &set) {
                Ok(()) => printed.out += &format!("done: {what}\n"),
                Err(error) => failed(&mut printed, &what, &error),
            }
        }
    }
    for (name, fix) in plan.left {
        printed.out += &format!("left to you: {name}: {fix}\n");
    }
    if printed.out.is_empty() && printed.err.is_empty() {
        printed.out += "there is nothing to fix\n";
    }
    printed
}

fn failed(printed: &mut Printed, what: &str, error: &io::Error) {
    printed.err += &format!("failed: {what}: {error}\n");
    printed.code = 1;
}

/// Adds the settings to the file. A reader sees the old text or the new one.
fn keep(path: &Path, settings: &[Setting]) -> io::Result<()> {
    let before = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        other => other?,
    };
    // No file of this ending is read at boot.
    let new = path.with_extension("conf.new");
    std::fs::write(&new, kept(&before, settings))?;
    std::fs::rename(&new, path)
}
