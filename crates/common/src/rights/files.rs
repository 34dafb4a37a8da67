//! The files that a process may still open (Landlock): those of its configuration, and those of the system that name
//! resolution needs.

use sidetrack_sys::landlock::{self, Allowed, Enforced, May, around};
use std::path::Path;

/// Paths that name resolution, time zones, system certificates and our own counters need. Missing ones are skipped.
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

/// The system's files that every process with peers may read.
pub fn system() -> Vec<Allowed> {
    let read = SYSTEM.iter().map(|path| Allowed { path: path.into(), may: May::Read });
    read.chain([Allowed { path: "/dev/null".into(), may: May::Append }]).collect()
}

/// Restricts this thread and those it starts to these files. Logs if the kernel cannot do that.
pub fn restrict(allowed: &[Allowed]) {
    match landlock::restrict(allowed) {
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

/// Allows a file by its name and by the target of a link, with the folders where it may be created again.
pub fn allow(allowed: &mut Vec<Allowed>, path: &Path, may: May) {
    for path in [Some(path.to_owned()), path.canonicalize().ok()].into_iter().flatten() {
        allowed.push(Allowed { path: around(&path), may });
    }
}
