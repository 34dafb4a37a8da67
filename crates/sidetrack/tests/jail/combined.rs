//! Lists of the command line together with a configuration, and with `--mode cgroup`.

use super::lists::{greeting, tried};
use sidetrack_testkit::in_namespace;

/// Whether an error means that the connection was refused by policy.
fn is_refused(printed: &str) -> bool {
    ["EHOSTUNREACH", "EACCES", "ECONNRESET"].contains(&printed)
}

#[test]
fn what_the_lists_and_the_configuration_refuse_is_refused() {
    let servers = [greeting(), greeting(), greeting(), greeting()];
    let [a, b, c, d] = servers.map(|at| at.port());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml").display().to_string();
    let rules = format!(
        "version = 1\ndefault = 'deny'\n\
         [[rule]]\nname = 'one'\nmatch = {{ to = '127.0.0.0/8', port = {a} }}\ncarrier = 'direct'\n\
         [[rule]]\nname = 'moved'\nmatch = {{ port = {b} }}\ncarrier = 'direct'\nto = '127.0.0.1:{d}'\n\
         [[rule]]\nname = 'other'\nmatch = {{ to = '127.0.0.0/8', port = {d} }}\ncarrier = 'direct'\n"
    );
    std::fs::write(&file, rules).unwrap();
    let at = |port| format!("127.0.0.1:{port}");
    let all = [at(a), at(b), at(c), at(d)];
    let all = [all[0].as_str(), &all[1], &all[2], &all[3]];
    let allow = [at(a), at(b), at(c)].join(",");
    let (printed, lines) = tried(&["--config", &file, "--allow", &allow], &all);
    assert_eq!(printed[..2], ["hello", "hello"], "both allow: {printed:?} {lines:?}");
    assert!(is_refused(&printed[2]), "the configuration refuses: {printed:?} {lines:?}");
    assert!(is_refused(&printed[3]), "the list refuses: {printed:?} {lines:?}");
    // With a list that only refuses, the configuration decides about the rest.
    let (printed, lines) = tried(&["--config", &file, "--deny", &at(a)], &all);
    assert!(is_refused(&printed[0]) && is_refused(&printed[2]), "{printed:?} {lines:?}");
    assert_eq!((printed[1].as_str(), printed[3].as_str()), ("hello", "hello"), "{printed:?} {lines:?}");
}

#[test]
fn in_a_control_group_lists_refuse_and_audits_tell() {
    in_namespace(|| {
        let (a, b) = (greeting().to_string(), greeting().to_string());
        let (printed, lines) = tried(&["--mode", "cgroup", "--deny", &a], &[&a, &b]);
        assert!(is_refused(&printed[0]) && printed[1] == "hello", "{printed:?} {lines:?}");
        let (printed, lines) = tried(&["--mode", "cgroup", "--audit", "--allow", &a], &[&a, &b]);
        assert_eq!(printed, ["hello", "hello"]);
        assert!(lines.iter().any(|line| line.contains("would be refused") && line.contains(&b)), "{lines:?}");
        let refused = super::run(&["--mode", "cgroup", "--jail"], "");
        assert_eq!(refused.status.code(), Some(125));
        assert!(super::text(&refused.stderr).contains("it is root in the network of this host"));
    });
}
