//! The files that the running data plane may open (Landlock): those of its configuration, and those of the system that
//! name resolution needs.

use super::handover;
use super::rights::named;
use crate::config::{AdminAt, Config};
use crate::rights::{self, allow};
use sidetrack_sys::landlock::{Allowed, May};
use std::path::{Path, PathBuf};

/// Restricts this thread and those it starts to the files of the configuration. `socket`: the admin socket, if this process
/// removes it. `pins`: the folder of what outlives this process.
pub(super) fn restrict(config: &Config, file: &Path, socket: Option<&Path>, pins: Option<PathBuf>) {
    let mut allowed = allowed(config, file, socket);
    allowed.extend(pins.map(|path| Allowed { path, may: May::Change }));
    rights::restrict(&allowed);
}

fn allowed(config: &Config, file: &Path, socket: Option<&Path>) -> Vec<Allowed> {
    let mut allowed = rights::system();
    for path in [file.to_owned()].into_iter().chain(named(config)) {
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
