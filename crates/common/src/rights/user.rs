//! The unprivileged user that a process becomes after root has started it.

use super::RunAs;
use anyhow::Context;
use nix::unistd::{Gid, Uid, User, getgrouplist};
use rustix::fs::Access;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sidetrack_sys::caps::{self, CapabilitySet};
use std::ffi::CString;
use std::path::Path;

/// A user of this machine that a process becomes before it reads peers' data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataUser {
    /// Its name.
    pub name: String,
    /// Its user id.
    pub uid: u32,
    /// Its primary group.
    pub gid: u32,
    /// Its other groups.
    pub groups: Vec<u32>,
}

impl DataUser {
    /// Returns the user to become; `None` if the process keeps its user.
    ///
    /// # Errors
    /// The configuration names a user that this process cannot become.
    pub fn of(user: &RunAs) -> anyhow::Result<Option<Self>> {
        match user {
            RunAs::Default if !Uid::effective().is_root() => Ok(None),
            RunAs::Default => Ok(Self::default()),
            RunAs::Named(name) => Self::named(name),
        }
    }

    /// The first of [`RunAs::DEFAULTS`] that exists on this machine, if this process may become it.
    fn default() -> Option<Self> {
        let found = RunAs::DEFAULTS.iter().find_map(|name| Self::look_up(name).ok().flatten());
        let user = found.filter(Self::is_available);
        if user.is_none() {
            tracing::warn!(
                "this process stays root: it cannot become a user 'sidetrack' or 'nobody' (CAP_SETUID and CAP_SETGID are \
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

    /// Becomes this user and keeps only these of the current capabilities. Call it while the process has one thread.
    ///
    /// # Errors
    /// The system refuses the change.
    pub fn become_it(&self, kept: CapabilitySet) -> anyhow::Result<()> {
        let held = caps::capabilities().context("capabilities")?.permitted;
        caps::become_user(self.uid, self.gid, &self.groups, held & kept)
            .with_context(|| format!("cannot become user '{}'", self.name))
    }
}

/// Becomes this user, if there is one, and permanently keeps only these capabilities. Call it while there is one thread.
///
/// # Errors
/// The system refuses the change.
pub fn become_or_stay(user: Option<&DataUser>, kept: CapabilitySet) -> anyhow::Result<()> {
    match user {
        Some(user) => user.become_it(kept),
        None => {
            let held = caps::capabilities().context("capabilities")?.permitted;
            caps::keep_only(held & kept).context("cannot give up capabilities")
        }
    }
}

/// Capabilities that a process needs until it has become its user.
pub const TO_BECOME: CapabilitySet =
    CapabilitySet::SETUID.union(CapabilitySet::SETGID).union(CapabilitySet::SETPCAP);

/// Whether this process's user lacks this access: access(2) ignores capabilities.
pub fn is_refused(path: &Path, access: Access) -> bool {
    rustix::fs::access(path, access) == Err(Errno::ACCESS)
}
