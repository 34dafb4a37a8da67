//! `sidetrack cleanup`: removes what a crash left behind.

use super::Printed;
use crate::admin;
use crate::cleanup::{Places, Survey, survey};
use crate::function::container::Engine;
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Takes back what a crash could have left: rules, routes, control groups, sockets, containers
///
/// Leaves everything alone that a running sidetrack may need.
#[derive(Debug, Args)]
pub struct CleanupArgs {
    /// Says what would be done and does nothing
    #[arg(long)]
    dry_run: bool,
    /// Another admin socket that may have been left
    #[arg(long, value_name = "PATH")]
    admin: Option<PathBuf>,
    /// Another folder of flows on the wire that may have been left ([wire] pins)
    #[arg(long, value_name = "FOLDER")]
    pins: Option<PathBuf>,
    /// The container engine's socket, if it is at none of the usual places
    #[arg(long, value_name = "PATH")]
    engine: Option<PathBuf>,
}

/// The output if there was nothing to do.
const NOTHING: &str = "nothing of Sidetrack's is left behind\n";

/// Looks for leftovers, removes them, and reports.
///
/// # Errors
/// None at present; failures of single steps are in the report and in the exit code.
pub fn run(args: &CleanupArgs) -> anyhow::Result<ExitCode> {
    let mut sockets: Vec<PathBuf> = vec![admin::SYSTEM_SOCKET.into(), admin::default_socket()];
    sockets.extend(admin::run_sockets(&admin::directory()).into_iter().map(|(_, path)| path));
    sockets.extend(args.admin.clone());
    sockets.dedup();
    let program =
        std::env::current_exe().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let pins = args.pins.clone();
    let places = Places { program: program.unwrap_or_else(|| "sidetrack".to_owned()), sockets, pins };
    if !args.dry_run {
        // No flow is in them, so they are not reported.
        sidetrack_sys::bpf::remove_orphans();
    }
    let mut printed = undo(&survey(&places), args.dry_run);
    let containers = remove_containers(args.engine.as_deref(), args.dry_run);
    if printed.out == NOTHING && !(containers.out.is_empty() && containers.err.is_empty()) {
        printed.out.clear();
    }
    printed.out.push_str(&containers.out);
    printed.err.push_str(&containers.err);
    printed.code = printed.code.max(containers.code);
    Ok(printed.print())
}

/// Removes containers of functions whose process is gone. Without an engine there are none. An engine that is named must
/// exist.
fn remove_containers(engine: Option<&Path>, dry_run: bool) -> Printed {
    let mut printed = Printed::default();
    let found = match Engine::find(engine) {
        Ok(found) => found,
        Err(_) if engine.is_none() => return printed,
        Err(error) => {
            return Printed { err: format!("not looked at: containers: {error}\n"), code: 1, ..printed };
        }
    };
    let leftovers = match found.leftovers() {
        Ok(leftovers) => leftovers,
        Err(error) => {
            return Printed { err: format!("not looked at: containers: {error}\n"), code: 1, ..printed };
        }
    };
    for leftover in leftovers {
        let what = format!("remove container {}", leftover.name);
        if dry_run {
            printed.out.push_str(&format!("would {what}\n"));
            continue;
        }
        match found.remove(&leftover.id) {
            Ok(()) => printed.out.push_str(&format!("done: {what}\n")),
            Err(error) => {
                printed.err.push_str(&format!("failed: {what}: {error}\n"));
                printed.code = 1;
            }
        }
    }
    printed
}

/// Undoes what the survey found, and reports it.
pub fn undo(survey: &Survey, dry_run: bool) -> Printed {
    let mut printed = Printed::default();
    for action in &survey.leftovers {
        if dry_run {
            printed.out.push_str(&format!("would {action}\n"));
            continue;
        }
        match action.perform() {
            Ok(()) => printed.out.push_str(&format!("done: {action}\n")),
            Err(error) => {
                printed.err.push_str(&format!("failed: {action}: {error}\n"));
                printed.code = 1;
            }
        }
    }
    for running in &survey.running {
        printed.err.push_str(&format!(
            "`sidetrack {}` runs here (pid {}): what may be its own was left alone; stop it first\n",
            running.command, running.pid
        ));
        printed.code = 1;
    }
    for unseen in &survey.unseen {
        printed.err.push_str(&format!("not looked at: {unseen}\n"));
        printed.code = 1;
    }
    if survey.leftovers.is_empty() && printed.code == 0 {
        printed.out.push_str(NOTHING);
    }
    printed
}
