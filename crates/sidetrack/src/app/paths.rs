//! The files that the data plane may open once it runs (Landlock): those of its configuration, and those of the system that
//! resolving names takes.

use super::{handover, rights};
use crate::config::{AdminAt, Config};
use sidetrack_sys::landlock::{self, Allowed, Enforced, May, around};
use std::path::Path;

/// What name resolution, time zones, certificates of the system and our own counters are read from. Missing ones are left out.
const SYSTEM: &[&str] = &[
    "/etc/ca-certificates",
    "/etc/gai.conf",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl",
    "/lib",
    "/lib64",
    "/proc",
    "/run/NetworkManager",
    "/run/resolvconf",
    "/run/systemd/resolve",
    "/sys",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/share/ca-certificates",
    "/usr/share",
    "/dev/random",
    "/dev/urandom",
];

/// Restricts this thread, and those that it starts, to the files of the configuration. `socket`: the admin socket, if this process
/// removes it.
pub fn restrict(config: &Config, file: &Path, socket: Option<&Path>) {
    match landlock::restrict(&allowed(config, file, socket)) {
        Ok(Enforced::Fully) => {}
        Ok(Enforced::Partly) => {
            tracing::info!(
                "files are confined in part: this kernel has an older Landlock (all of it: Linux 6.10)"
            );
        }
        Ok(Enforced::No) => tracing::warn!(
            "files are not confined: this kernel has no Landlock, or it is switched off (CONFIG_SECURITY_LANDLOCK, and \
             landlock in the boot option lsm=)"
        ),
        Err(error) => tracing::warn!("files are not confined: {error}"),
    }
}

fn allowed(config: &Config, file: &Path, socket: Option<&Path>) -> Vec<Allowed> {
    let system = SYSTEM.iter().map(|path| Allowed { path: path.into(), may: May::Read });
    let mut allowed: Vec<_> = system.collect();
    allowed.push(Allowed { path: "/dev/null".into(), may: May::Append });
    for path in [file.to_owned()].into_iter().chain(rights::named(config)) {
        if path.is_dir() {
            allowed.push(Allowed { path, may: May::Read });
        } else {
            allow(&mut allowed, &path, May::Read);
        }
    }
    for (path, _) in handover::files(config) {
        allow(&mut allowed, &path, May::Append);
    }
    for path in handover::folders(config) {
        allowed.push(Allowed { path, may: May::Change });
    }
    if let Some(agreement) = &config.agreement {
        allow(&mut allowed, &agreement.path, May::Change);
    }
    if let Some(folder) = socket.and_then(Path::parent) {
        allowed.push(Allowed { path: folder.to_owned(), may: May::RemoveFiles });
        let above = folder.parent().filter(|_| config.admin.socket == AdminAt::Default);
        allowed.extend(above.map(|path| Allowed { path: path.to_owned(), may: May::RemoveFolders }));
    }
    allowed
}

/// A file by its name, and by the name that it leads to, with the folders that they may come back in.
fn allow(allowed: &mut Vec<Allowed>, path: &Path, may: May) {
    for path in [Some(path.to_owned()), path.canonicalize().ok()].into_iter().flatten() {
        allowed.push(Allowed { path: around(&path), may });
    }
}
