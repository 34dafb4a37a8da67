//! The lists of `run`: golden vectors of the parser, and what the rules decide that come from them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use sidetrack_core::flow::{Flow, HostName, Intercept, Protocol};
use sidetrack_core::jail::{CLOSED_RULE, Entry, Jail, ListError, Lists, WOULD_REFUSE};
use sidetrack_core::policy::{
    Action, Carry, Condition, Decision, Dialled, Match, NameMatch, Policy, Rule, Seen, Verdict,
};
use std::sync::Arc;

/// What is written, and how it is written again.
const ENTRIES: [(&str, &str); 17] = [
    ("github.com", "github.com"),
    ("GitHub.com.", "github.com"),
    ("tcp:github.com:443", "github.com:443"),
    ("*.pypi.example:443", "*.pypi.example:443"),
    ("a.example:8000-8010", "a.example:8000-8010"),
    ("a.example:*", "a.example"),
    ("10.0.0.0/8:5432", "10.0.0.0/8:5432"),
    ("192.0.2.1", "192.0.2.1"),
    ("192.0.2.1/32:1-65535", "192.0.2.1:1-65535"),
    ("udp:192.0.2.1:53", "udp:192.0.2.1:53"),
    ("2001:db8::/32", "2001:db8::/32"),
    ("::1", "::1"),
    ("[2001:db8::1]:443", "[2001:db8::1]:443"),
    ("[2001:db8::]/32:443", "[2001:db8::]/32:443"),
    ("[::1]", "::1"),
    ("*", "*"),
    ("udp:*:123", "udp:*:123"),
];

#[test]
fn entries_are_read_and_written() {
    for (text, written) in ENTRIES {
        let entry: Entry = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        assert_eq!(entry.to_string(), written);
        assert_eq!(written.parse(), Ok(entry), "{written}");
    }
}

#[test]
fn errors_say_what_to_write() {
    for (text, said) in [
        ("", "the list is empty"),
        ("tcp:", "the list is empty"),
        ("a.example:0", "'0' is not a port"),
        ("a.example:70000", "is not a port"),
        ("a.example:9-8", "is not a port"),
        ("a.example:+1", "is not a port"),
        ("a.example:", "'' is not a port"),
        ("a.*.example", "a star replaces only whole labels"),
        ("10.0.0.1/8", "has bits set beyond its prefix"),
        ("127.1", "is not a host"),
        ("2001:db8::1:x:443", "in brackets"),
        ("[2001:db8::1:443", "in brackets"),
        ("[a.example]:443", "in brackets"),
        ("[::1]x:443", "in brackets"),
        ("sctp:a.example:1", "in brackets"),
    ] {
        let error = text.parse::<Entry>().unwrap_err().to_string();
        assert!(error.contains(said), "{text}: {error}");
    }
}

#[test]
fn lists_come_from_arguments_and_profiles() {
    let mut lists = Lists::default();
    lists.allow("github.com, *.pypi.example:443\n10.0.0.0/8:5432,").unwrap();
    lists.deny("10.1.0.0/16").unwrap();
    let profile = "# a build\n\nallow a.example # curl, 3 times\n  deny b.example\nc.example:443\r\n";
    lists.profile(profile).unwrap();
    let written = |entries: &[Entry]| entries.iter().map(Entry::to_string).collect::<Vec<_>>().join(" ");
    assert_eq!(
        written(&lists.allow),
        "github.com *.pypi.example:443 10.0.0.0/8:5432 a.example c.example:443"
    );
    assert_eq!(written(&lists.deny), "10.1.0.0/16 b.example");
    let error = |text: &str| Lists::default().profile(text).unwrap_err().to_string();
    assert_eq!(
        error("a.example\nb.example:x\n"),
        "line 2: 'x' is not a port: write 1 to 65535, a range such as 8000-8010, or *"
    );
    assert!(error("permit a.example").starts_with("line 1: 'permit' is not 'allow' or 'deny'"));
    let many = "a.example\n".repeat(10_001);
    assert_eq!(Lists::default().profile(&many), Err(ListError::TooMany));
}

fn jail(allow: &str, deny: &str) -> Jail {
    let mut lists = Lists::default();
    if !allow.is_empty() {
        lists.allow(allow).unwrap();
    }
    if !deny.is_empty() {
        lists.deny(deny).unwrap();
    }
    Jail { lists, closed: true, ..Jail::default() }
}

/// A flow of the command, such as `tcp a.example:443`.
fn flow(text: &str) -> Flow {
    let (protocol, to) = text.split_once(' ').unwrap();
    Flow {
        protocol: if protocol == "udp" { Protocol::Udp } else { Protocol::Tcp },
        intercept: Intercept::Run,
        listener: "run".into(),
        client: "127.0.0.1:4000".parse().unwrap(),
        orig_dst: to.parse().unwrap(),
        host: None,
        user: None,
        process: None,
    }
}

fn decided(policy: &Policy, text: &str) -> Verdict {
    match policy.decide(&flow(text), Seen::Nothing) {
        Decision::Verdict(verdict) => verdict,
        other => panic!("{text}: {other:?}: no rule waits for first bytes"),
    }
}

/// `+` and the rule, or `-` and the rule.
fn said(policy: &Policy, text: &str) -> String {
    let verdict = decided(policy, text);
    let sign = if verdict.action == Action::Deny { '-' } else { '+' };
    format!("{sign}{}", verdict.rule.as_deref().unwrap_or("default"))
}

#[test]
fn what_no_entry_names_is_refused() {
    let closed = format!("-{CLOSED_RULE}");
    let lists =
        ("github.com,*.pypi.example:443,10.0.0.0/8:5432,udp:192.0.2.1:53,127.0.0.1:8080", "10.9.0.0/16");
    let policy = jail(lists.0, lists.1).policy();
    for (flow, expected) in [
        ("tcp github.com:22", "+allow github.com"),
        ("udp github.com:443", "-default"),
        ("tcp api.github.com:443", "-default"),
        ("tcp a.b.pypi.example:443", "+allow *.pypi.example:443"),
        ("tcp pypi.example:443", "-default"),
        ("tcp a.pypi.example:80", "-default"),
        ("tcp 10.1.2.3:5432", "+allow 10.0.0.0/8:5432"),
        ("tcp 10.1.2.3:22", "-default"),
        ("tcp 10.9.2.3:5432", "-deny 10.9.0.0/16"),
        ("udp 192.0.2.1:53", "+allow udp:192.0.2.1:53"),
        ("tcp 192.0.2.1:53", "-default"),
        ("tcp 127.0.0.1:8080", "+allow 127.0.0.1:8080"),
        ("tcp 127.0.0.1:22", &closed),
        ("tcp [::1]:8080", &closed),
        ("tcp 169.254.169.254:80", &closed),
        ("tcp [fe80::1]:80", &closed),
        ("udp 127.0.0.1:53", &closed),
        ("tcp 203.0.113.1:443", "-default"),
    ] {
        assert_eq!(said(&policy, flow), expected, "{flow}");
    }
}

#[test]
fn a_star_and_wide_networks_do_not_open_the_closed_networks() {
    let closed = format!("-{CLOSED_RULE}");
    for allow in ["*:443", "0.0.0.0/0,::/0,*.example"] {
        let policy = jail(allow, "").policy();
        for to in ["127.0.0.1", "169.254.169.254", "100.100.100.200", "[::1]", "[fe80::1]"] {
            assert_eq!(said(&policy, &format!("tcp {to}:443")), closed, "{allow} {to}");
        }
        for to in ["203.0.113.1", "[2001:db8::1]", "a.example"] {
            assert!(said(&policy, &format!("tcp {to}:443")).starts_with('+'), "{allow} {to}");
        }
    }
    let policy = jail("localhost:5000,169.254.169.254:80", "").policy();
    for to in ["127.0.0.1:5000", "[::1]:5000", "169.254.169.254:80"] {
        assert!(said(&policy, &format!("tcp {to}")).starts_with('+'), "{to}");
    }
}

#[test]
fn a_claimed_name_opens_nothing() {
    let policy = jail("github.com:443", "").policy();
    let claimed: HostName = "github.com".parse().unwrap();
    let decision = policy.decide(&flow("tcp 203.0.113.1:443"), Seen::FirstBytes(Some(&claimed)));
    let Decision::Verdict(verdict) = decision else { panic!("{decision:?}") };
    assert_eq!(verdict.action, Action::Deny);
}

#[test]
fn an_allowed_name_does_not_lead_to_closed_networks() {
    let admits = |policy: &Policy, ip: &str| {
        let flow = flow("tcp evil.example:80");
        let Action::Carry(carry) = decided(policy, "tcp evil.example:80").action else { panic!("denied") };
        let name: HostName = "evil.example".parse().unwrap();
        let dialled = Dialled {
            flow: &flow,
            seen: Seen::Nothing,
            carry: &carry,
            ip: ip.parse().unwrap(),
            name: Some(&name),
            is_configured: false,
        };
        policy.admits(&dialled, || true).is_ok()
    };
    for allow in ["evil.example", "*.example:80", "*:80"] {
        let policy = jail(allow, "").policy();
        for ip in ["127.0.0.1", "::1", "169.254.169.254", "64:ff9b::7f00:1", "::ffff:127.0.0.1", "0.0.0.0"] {
            assert!(!admits(&policy, ip), "{allow} {ip}");
        }
        assert!(admits(&policy, "203.0.113.1") && admits(&policy, "10.0.0.1"), "{allow}");
    }
    assert!(admits(&jail("evil.example,127.0.0.1:80", "").policy(), "127.0.0.1"));
    assert!(!admits(&jail("evil.example", "10.0.0.0/8").policy(), "10.0.0.1"));
}

#[test]
fn names_are_asked_for_only_if_a_connection_may_pass() {
    let policy = jail("github.com:443,*.pypi.example,10.0.0.0/8", "*.bad.pypi.example").policy();
    let wildcard = NameMatch::Wildcard { written_bytes: ".pypi.example".len() };
    for (name, expected) in [
        ("github.com", NameMatch::Exact),
        ("a.pypi.example", wildcard),
        ("a.bad.pypi.example", NameMatch::Wildcard { written_bytes: ".pypi.example".len() }),
        ("secret.evil.example", NameMatch::No),
    ] {
        assert_eq!(policy.lets_name_pass(&name.parse().unwrap(), Intercept::Run), expected, "{name}");
    }
}

#[test]
fn without_a_jail_only_what_is_denied_is_refused() {
    let policy = Jail { closed: false, ..jail("", "ads.example,10.0.0.0/8:22") }.policy();
    assert_eq!(said(&policy, "tcp ads.example:443"), "-deny ads.example");
    assert_eq!(said(&policy, "tcp 10.1.1.1:22"), "-deny 10.0.0.0/8:22");
    assert_eq!(said(&policy, "tcp a.example:443"), "+default");
}

#[test]
fn an_audit_carries_all_and_names_what_would_be_refused() {
    let policy = Jail { audit: true, ..jail("github.com", "10.0.0.0/8") }.policy();
    for (flow, expected) in [
        ("tcp github.com:443", "+allow github.com".to_owned()),
        ("tcp 10.1.1.1:22", format!("+{WOULD_REFUSE}deny 10.0.0.0/8")),
        ("tcp 169.254.169.254:80", format!("+{WOULD_REFUSE}{CLOSED_RULE}")),
        ("tcp a.example:443", format!("+{WOULD_REFUSE}not allowed")),
    ] {
        assert_eq!(said(&policy, flow), expected, "{flow}");
    }
}

#[test]
fn the_rules_of_a_configuration_come_behind_the_lists() {
    let carry = |idle| Action::Carry(Arc::new(Carry { idle_timeout_ms: Some(idle), ..Carry::default() }));
    let rule =
        |name: &str, action, conditions| Rule { name: name.into(), matcher: Match::new(conditions), action };
    let ports = |port: u16| Condition::Port([(port, port)].into_iter().collect());
    let named = Condition::Host(vec!["*.example".parse().unwrap()]);
    let rules = vec![
        rule("no-ssh", Action::Deny, vec![ports(22)]),
        rule("slow", carry(9), vec![ports(443), named]),
        rule("web", carry(7), vec![ports(80)]),
    ];
    let base = Policy::new(rules, Action::Deny).with_first_bytes_ms(77);
    let policy = jail("a.example,10.0.0.0/8,*:80", "b.example").policy_before(&base).unwrap();
    assert_eq!((policy.first_bytes_ms(), policy.rules().len()), (77, 2 + 3 * 4));
    let closed = format!("-{CLOSED_RULE}");
    for (flow, expected) in [
        ("tcp a.example:22", "-allow a.example; no-ssh"),
        ("tcp a.example:443", "+allow a.example; slow"),
        ("tcp a.example:80", "+allow a.example; web"),
        ("tcp a.example:25", "-allow a.example; default"),
        ("tcp 10.1.2.3:80", "+allow 10.0.0.0/8; web"),
        ("tcp other.test:80", "+allow *:80; web"),
        ("tcp other.test:443", "-default"),
        ("tcp b.example:80", "-deny b.example"),
        ("tcp 127.0.0.1:80", &closed),
    ] {
        assert_eq!(said(&policy, flow), expected, "{flow}");
    }
    assert_eq!(decided(&policy, "tcp a.example:80").action, carry(7));
    // Each has its own way to carry, by which the gate knows it.
    let of = |to| match decided(&policy, to).action {
        Action::Carry(carry) => Arc::as_ptr(&carry),
        Action::Deny => panic!("denied"),
    };
    assert_ne!(of("tcp a.example:80"), of("tcp other.test:80"));
    // With a list that only refuses, the rules stay as they are.
    let open = Jail { closed: false, ..jail("", "b.example") }.policy_before(&base).unwrap();
    assert_eq!(said(&open, "tcp b.example:80"), "-deny b.example");
    assert_eq!(
        (said(&open, "tcp c.test:80"), said(&open, "tcp c.test:25")),
        ("+web".to_owned(), "-default".to_owned())
    );
    // Audits tell what the lists would refuse, and what the configuration refuses is refused.
    let audit = Jail { audit: true, ..jail("a.example", "") }.policy_before(&base).unwrap();
    assert_eq!(said(&audit, "tcp c.test:80"), format!("+{WOULD_REFUSE}not allowed; web"));
    assert_eq!(said(&audit, "tcp c.test:22"), format!("-{WOULD_REFUSE}not allowed; no-ssh"));
    let many = (0..10_000).map(|index| format!("h{index}.example")).collect::<Vec<_>>().join(",");
    assert!(jail(&many, "").policy_before(&base).is_err());
}
