//! Files that the command sees instead of the host's resolver configuration.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use sidetrack_sys::exec::PrivateFiles;

/// Sockets of name services: nscd, systemd-resolved, Avahi. They are reached by path, so a network namespace
/// does not cut them off.
const NAME_SERVICES: [&str; 4] = [
    "/run/nscd/socket",
    "/var/run/nscd/socket",
    "/run/systemd/resolve/io.systemd.Resolve",
    "/run/avahi-daemon/socket",
];

/// Options of resolv.conf(5) that change how a name is queried, but not which name.
const KEPT_OPTIONS: [&str; 8] =
    ["timeout:", "attempts:", "rotate", "edns0", "use-vc", "single-request", "no-reload", "no-aaaa"];

/// Returns files that send all DNS queries of the command to `resolver`.
pub(super) fn for_resolver(resolver: IpAddr) -> PrivateFiles {
    let read = |path: &str| fs::read_to_string(Path::new(path)).unwrap_or_default();
    PrivateFiles {
        contents: vec![
            ("/etc/resolv.conf".into(), resolv_conf(&read("/etc/resolv.conf"), resolver).into()),
            ("/etc/nsswitch.conf".into(), nsswitch_conf(&read("/etc/nsswitch.conf")).into()),
        ],
        masked_sockets: NAME_SERVICES.map(PathBuf::from).to_vec(),
    }
}

/// Returns the command's resolv.conf(5).
///
/// It has no `search`, and `ndots:0`. Our resolver answers every name, so the first name tried succeeds, and
/// this must be the name that the program used. The proxy or host that resolves it applies its own search list.
fn resolv_conf(host: &str, resolver: IpAddr) -> String {
    let kept = host
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("options"))
        .flat_map(str::split_whitespace)
        .filter(|option| KEPT_OPTIONS.iter().any(|kept| option.starts_with(kept)));
    let options = ["ndots:0"].into_iter().chain(kept).collect::<Vec<_>>().join(" ");
    format!("# Written by sidetrack run, for this command only.\nnameserver {resolver}\noptions {options}\n")
}

/// Returns the host's nsswitch.conf(5) with files and DNS as the only sources of host names.
fn nsswitch_conf(host: &str) -> String {
    const HOSTS: &str = "hosts: files dns\n";
    let mut text: String = host
        .lines()
        .filter(|line| !line.trim_start().starts_with("hosts:"))
        .flat_map(|line| [line, "\n"])
        .collect();
    text.push_str(HOSTS);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_asked_for_as_the_program_says_them() {
        let host = "nameserver 10.0.0.10\nsearch ns.svc.cluster.local svc.cluster.local\n\
                    options ndots:5 timeout:2 trust-ad edns0\n";
        let ours = resolv_conf(host, "198.18.0.1".parse().unwrap());
        let lines: Vec<&str> = ours.lines().skip(1).collect();
        assert_eq!(lines, ["nameserver 198.18.0.1", "options ndots:0 timeout:2 edns0"]);
        assert!(resolv_conf("", "127.0.0.1".parse().unwrap()).ends_with("options ndots:0\n"));
    }

    #[test]
    fn other_databases_stay_as_they_are() {
        let host =
            "passwd: files ldap\nhosts: mymachines resolve [!UNAVAIL=return] files myhostname dns\n# end\n";
        assert_eq!(nsswitch_conf(host), "passwd: files ldap\n# end\nhosts: files dns\n");
        assert_eq!(nsswitch_conf(""), "hosts: files dns\n");
    }
}
