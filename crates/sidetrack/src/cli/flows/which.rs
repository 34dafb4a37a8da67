//! Chooses which running sidetrack is asked.

use crate::admin;
use anyhow::bail;
use sidetrack_sys::{probe, process};
use std::path::{Path, PathBuf};

/// Returns the socket that the arguments name, by path or by the process id of a `run`; otherwise `$SIDETRACK_ADMIN`;
/// otherwise that of a running process: this user's `up`, root's `up`, or the only `run` of this user.
///
/// # Errors
/// There are several runs, and the arguments name none.
pub(in crate::cli) fn socket(named: Option<&Path>, pid: Option<u32>) -> anyhow::Result<PathBuf> {
    if let Some(path) = named {
        return Ok(path.to_owned());
    }
    if let Some(pid) = pid {
        return Ok(admin::run_socket(pid));
    }
    if let Some(path) = process::environment("SIDETRACK_ADMIN").filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    let own = admin::default_socket();
    let nodes = [own.clone(), admin::SYSTEM_SOCKET.into()];
    if let Some(node) = nodes.into_iter().find(|path| path.exists() && !probe::socket_is_stale(path)) {
        return Ok(node);
    }
    choose(admin::runs(), own)
}

/// Returns the socket of the only run; without a run, the default socket of `up`.
fn choose(mut runs: Vec<(u32, PathBuf)>, up: PathBuf) -> anyhow::Result<PathBuf> {
    match (runs.pop(), runs.len()) {
        (None, _) => Ok(up),
        (Some((_, path)), 0) => Ok(path),
        (Some((last, _)), _) => {
            let pids: Vec<_> =
                runs.iter().map(|(pid, _)| *pid).chain([last]).map(|pid| pid.to_string()).collect();
            bail!("{} runs of sidetrack are there: name one with --pid, of {}", pids.len(), pids.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_run_is_meant_and_of_several_one_is_to_be_named() {
        let run = |pid: u32| (pid, PathBuf::from(format!("/r/run-{pid}.sock")));
        let chosen = |runs| choose(runs, "/r/admin.sock".into());
        assert_eq!(chosen(vec![]).unwrap(), Path::new("/r/admin.sock"));
        assert_eq!(chosen(vec![run(7)]).unwrap(), Path::new("/r/run-7.sock"));
        let error = chosen(vec![run(7), run(12)]).unwrap_err().to_string();
        assert_eq!(error, "2 runs of sidetrack are there: name one with --pid, of 7, 12");
    }
}
