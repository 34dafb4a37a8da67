//! The files that the data plane may open once it runs.

use crate::node::{Up, admin};
use sidetrack_sys::landlock;
use sidetrack_testkit::in_namespace;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const LISTENER: &str = "[[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n";

fn rule(file: &Path) -> String {
    format!(
        "{LISTENER}[[rule]]\nname = \"listed\"\nmatch = {{ host_file = \"{}\" }}\naction = \"deny\"\n",
        file.display()
    )
}

/// A file that every user can read, so that only Landlock refuses it.
fn list(file: &Path) {
    let folder = file.parent().expect("a folder");
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("mode");
    std::fs::write(file, "one.example\n").expect("written");
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o644)).expect("mode");
}

#[test]
fn a_running_node_opens_no_file_outside_the_folders_of_its_configuration() {
    if landlock::version().is_none() {
        return eprintln!("skipped: needs Landlock");
    }
    in_namespace(|| {
        for user in ["nobody", "root"] {
            let top = format!("default = \"direct\"\nuser = \"{user}\"\n");
            let up = Up::start(&top, LISTENER);
            assert!(!up.logged().contains("not confined"), "{}", up.logged());
            let elsewhere = tempfile::tempdir().expect("a folder");
            list(&elsewhere.path().join("hosts"));
            up.rewrite(&top, &rule(&elsewhere.path().join("hosts")));
            let (code, body) = admin::ask(&up, "POST", "/v1/reload");
            assert!(
                code != 200 && body.contains("Permission denied") && body.contains("restart it"),
                "{body}"
            );
            // New in a folder that is known.
            list(&up.folder().join("hosts"));
            up.reload(&top, &rule(&up.folder().join("hosts")));
            // Replaces another file with this one.
            std::fs::remove_file(up.folder().join("hosts")).expect("removed");
            list(&up.folder().join("hosts"));
            up.reload(&top, &rule(&up.folder().join("hosts")).replace("listed", "again"));
            assert!(up.stop().0.success());
        }
    });
}
