//! What limits an attacker who has taken over one of our processes.

use super::{Check, Facts};

/// The first version of Landlock that restricts all kinds of access that we restrict.
const LANDLOCK_FULL: u32 = 5;

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    vec![landlock(facts), seccomp(facts), user(facts)]
}

fn landlock(facts: &Facts) -> Check {
    let needed_for = "the files that a running node may open are those of its configuration";
    let check = match facts.landlock {
        Some(version) if version >= LANDLOCK_FULL => Check::ok("landlock", format!("version {version}")),
        Some(version) => {
            Check::warn("landlock", format!("version {version}: some kinds of access are not restricted"))
                .fix("a newer kernel (Linux 6.10)")
        }
        None => Check::warn("landlock", "this kernel has none, or it is switched off")
            .fix("CONFIG_SECURITY_LANDLOCK (Linux 5.13), and landlock in the boot option lsm="),
    };
    check.needed_for(needed_for)
}

fn seccomp(facts: &Facts) -> Check {
    let needed_for = "system calls that no process of ours makes are refused";
    let check = if facts.seccomp {
        Check::ok("seccomp", "filters work")
    } else {
        Check::warn("seccomp", "this kernel has no filters").fix("a kernel with CONFIG_SECCOMP_FILTER")
    };
    check.needed_for(needed_for)
}

fn user(facts: &Facts) -> Check {
    let needed_for = "started as root, `up`, `orchestrate serve` and `domain serve` become this user before they read what peers send";
    let fix = "useradd --system --no-create-home --shell /usr/sbin/nologin sidetrack";
    let check = match facts.data_user.as_deref() {
        Some("nobody") => {
            Check::warn("user", "there is no user sidetrack: it is nobody, as other programs are").fix(fix)
        }
        Some(name) => Check::ok("user", format!("it is {name}")),
        None => Check::warn("user", "there is neither a user sidetrack nor nobody: it stays root").fix(fix),
    };
    check.needed_for(needed_for)
}
