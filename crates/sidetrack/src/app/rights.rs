//! Who the data plane is once its sockets are prepared: user, groups and capabilities.

use super::handover;
use crate::config::{AdminAt, Config, RunAs};
use crate::plan::data_capabilities;
use anyhow::Context;
use nix::unistd::{Gid, Uid, User, getgrouplist};
use rustix::fs::Access;
use rustix::io::Errno;
use sidetrack_sys::caps::{self, CapabilitySet};
use std::ffi::CString;
use std::path::{Path, PathBuf};

/// A user of this machine that the data plane becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataUser {
    /// Its name.
    pub name: String,
    /// Its user id.
    pub uid: u32,
    /// Its main group.
    pub gid: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
}

impl DataUser {
    /// The user to become; none if the process stays what it is.
    ///
    /// # Errors
    /// The configuration names a user that this process cannot become.
    pub fn of(config: &Config) -> anyhow::Result<Option<Self>> {
        match &config.user {
            RunAs::Default if !Uid::effective().is_root() => Ok(None),
            RunAs::Default => Ok(Self::default()),
            RunAs::Named(name) => Self::named(name),
        }
    }

    /// The first user of [`RunAs::DEFAULTS`] that this machine has, and that this process may become.
    fn default() -> Option<Self> {
        let found = RunAs::DEFAULTS.iter().find_map(|name| Self::look_up(name).ok().flatten());
        let user = found.filter(Self::is_available);
        if user.is_none() {
            tracing::warn!(
                "the data plane stays root: it cannot become a user 'sidetrack' or 'nobody' (CAP_SETUID and CAP_SETGID are \
                 needed). `user = \"root\"` says that this is meant"
            );
        }
        user
    }

    fn named(name: &str) -> anyhow::Result<Option<Self>> {
        let user = Self::look_up(name)?.with_context(|| format!("user = \"{name}\": no such user"))?;
        let own = Uid::effective();
        if own.as_raw() == user.uid {
            return Ok(None);
        }
        anyhow::ensure!(
            own.is_root() && user.is_available(),
            "user = \"{name}\": this process (user id {own}) cannot become it: start sidetrack as root, or leave `user` out"
        );
        Ok(Some(user))
    }

    fn look_up(name: &str) -> anyhow::Result<Option<Self>> {
        let found = User::from_name(name).with_context(|| format!("user = \"{name}\""))?;
        let Some(User { name, uid, gid, .. }) = found else { return Ok(None) };
        let groups = getgrouplist(&CString::new(name.as_str())?, gid)?;
        let groups = groups.into_iter().map(Gid::as_raw).collect();
        Ok(Some(Self { name, uid: uid.as_raw(), gid: gid.as_raw(), groups }))
    }

    fn is_available(&self) -> bool {
        caps::can_become(self.uid, self.gid)
    }
}

/// Gives up every right that the data plane does not need, for good. `beside` is needed for a moment longer.
///
/// # Errors
/// This process cannot become the user, or the user may not write what the configuration says.
pub fn give_up(
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
    handover::hand_over(config, user)?;
    // CAP_SETPCAP only as long as the bounding set is still to shrink.
    let first = kept | CapabilitySet::DAC_READ_SEARCH | CapabilitySet::SETPCAP;
    caps::become_user(user.uid, user.gid, &user.groups, held & first)
        .with_context(|| format!("cannot become user '{}'", user.name))?;
    // access(2) asks without capabilities.
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
        && is_refused(&agreement.path, Access::WRITE_OK)
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

/// Whether the user may not do this by itself.
fn is_refused(path: &Path, access: Access) -> bool {
    rustix::fs::access(path, access) == Err(Errno::ACCESS)
}

/// What a reload reads: the configuration file, its folder, which is watched, and what it names.
fn read(config: &Config, file: &Path) -> Vec<PathBuf> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    [file, folder].map(Path::to_owned).into_iter().chain(named(config)).collect()
}

/// The files that the configuration names and that are read.
pub fn named(config: &Config) -> impl Iterator<Item = PathBuf> {
    let mut others = written(config);
    // Root has bound it.
    others.extend(match &config.admin.socket {
        AdminAt::Path(path) => Some(path.clone()),
        AdminAt::Default | AdminAt::None => None,
    });
    config.named.iter().filter(move |path| !others.contains(path)).cloned()
}

/// What is written while the node runs.
fn written(config: &Config) -> Vec<PathBuf> {
    let files = handover::files(config).into_iter().map(|(path, _)| path);
    files.chain(handover::folders(config)).collect()
}
