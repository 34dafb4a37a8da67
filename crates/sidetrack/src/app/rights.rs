//! The user, groups and capabilities of the data plane after its sockets are prepared.

use super::handover;
use crate::config::{AdminAt, Config};
use crate::plan::data_capabilities;
use crate::rights::{DataUser, is_refused};
use anyhow::Context;
use rustix::fs::Access;
use rustix::io::Errno;
use sidetrack_sys::caps::{self, CapabilitySet};
use std::path::{Path, PathBuf};

/// Gives up all rights that the data plane does not need, permanently. `beside` is needed for a moment longer.
///
/// # Errors
/// This process cannot become the user, or the user may not write a configured file.
pub(super) fn give_up(
    config: &Config,
    file: &Path,
    user: Option<&DataUser>,
    beside: CapabilitySet,
) -> anyhow::Result<()> {
    let held = caps::capabilities().context("capabilities")?.permitted;
    let mut kept: CapabilitySet =
        data_capabilities(config).into_iter().map(|(capability, _)| capability).collect();
    kept |= beside;
    let Some(user) = user else {
        handover::make(config);
        return caps::keep_only(held & kept).context("cannot give up capabilities");
    };
    // Give the files away while still root, become the user, and then check access as that user.
    handover::hand_over(config, user)?;
    // CAP_SETPCAP is needed only until the bounding set is reduced.
    let first = kept | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::SETPCAP;
    user.become_it(first)?;
    // access(2) ignores capabilities.
    let closed = read(config, file).into_iter().find(|path| is_refused(path, Access::READ_OK));
    let closed =
        closed.or_else(|| written(config).into_iter().find(|path| is_refused(path, Access::WRITE_OK)));
    if let Some(path) = &closed {
        kept |= CapabilitySet::DAC_READ_SEARCH;
        tracing::info!(
            "CAP_DAC_READ_SEARCH is kept for reloads: {} is closed to user '{}'",
            path.display(),
            user.name
        );
    }
    caps::keep_only(held & kept).context("cannot give up capabilities")?;
    for path in written(config) {
        let may =
            rustix::fs::accessat(rustix::fs::CWD, &path, Access::WRITE_OK, rustix::fs::AtFlags::EACCESS);
        anyhow::ensure!(
            may != Err(Errno::ACCESS),
            "user '{}' may not write {}: give it to this user, or name another one with `user`",
            user.name,
            path.display()
        );
    }
    if let Some(agreement) = &config.agreement
        && rustix::fs::accessat(
            rustix::fs::CWD,
            &agreement.path,
            Access::WRITE_OK,
            rustix::fs::AtFlags::EACCESS,
        ) == Err(Errno::ACCESS)
    {
        tracing::warn!(
            "user '{}' may not write {}: `sidetrack policy apply` will be refused. Give the file to this user, or edit it",
            user.name,
            agreement.path.display()
        );
    }
    tracing::info!(user = user.name, uid = user.uid, "the data plane has become an unprivileged user");
    Ok(())
}

/// The paths that a reload reads: the configuration file, its folder, which is watched, and the files that it names.
fn read(config: &Config, file: &Path) -> Vec<PathBuf> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    [file, folder].map(Path::to_owned).into_iter().chain(named(config)).collect()
}

/// The files that the configuration names and that are only read.
pub(super) fn named(config: &Config) -> impl Iterator<Item = PathBuf> {
    let mut others = written(config);
    // Root has bound the socket and read the tokens already.
    others.extend(match &config.admin.socket {
        AdminAt::Path(path) => Some(path.clone()),
        AdminAt::Default | AdminAt::None => None,
    });
    others.extend(config.admin.page_tokens.clone());
    config.named.iter().filter(move |path| !others.contains(path)).cloned()
}

/// The paths that are written while the node runs.
fn written(config: &Config) -> Vec<PathBuf> {
    let files = handover::files(config).into_iter().map(|(path, _)| path);
    files.chain(handover::folders(config)).collect()
}
