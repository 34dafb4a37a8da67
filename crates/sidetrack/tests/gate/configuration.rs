//! What a file says about addresses and names, and what `check` and `explain` say to it.

use sidetrack::config::{Config, Question};
use sidetrack::explain::{Answer, explain};
use sidetrack_core::net::IpSet;
use sidetrack_core::policy::never_dial;

fn config(text: &str) -> Config {
    let text = format!("version = 1\n{text}");
    Config::from_text("test.toml", &text).unwrap_or_else(|error| panic!("{text}\n{}", error.render(false)))
}

fn error(text: &str) -> String {
    Config::from_text("test.toml", &format!("version = 1\n{text}")).unwrap_err().render(false)
}

/// What would become of a flow of a client of another host.
fn asked(config: &Config, to: &str) -> Answer {
    let question = Question {
        listener: config.listeners.first(),
        intercept: None,
        protocol: None,
        client: "192.0.2.9:1".parse().unwrap(),
        orig_dst: Some(to.parse().unwrap()),
        host: None,
        process: Default::default(),
        socks_user: None,
    };
    explain(config, &question).unwrap()
}

#[test]
fn never_dial_is_the_default_more_than_it_or_nothing() {
    assert_eq!(config("").policy.never_dial(), &never_dial());
    assert_eq!(config("never_dial = \"none\"\n").policy.never_dial(), &IpSet::default());
    let more = config("never_dial = [\"default\", \"@own\"]\n[set]\nown = \"10.0.0.0/8\"\n");
    assert!(more.policy.never_dial().covers(&never_dial()));
    assert!(more.policy.never_dial().contains("10.1.2.3".parse().unwrap()));
    for (text, said) in [
        ("never_dial = []", "this list is empty"),
        ("never_dial = [\"none\", \"10.0.0.0/8\"]", "stands alone"),
        ("never_dial = \"10.0.0.1/8\"", "bits set beyond its prefix"),
        ("never_dial = \"@x\"", "there is no set 'x'"),
    ] {
        assert!(error(text).contains(said), "{text}: {}", error(text));
    }
}

#[test]
fn check_warns_of_names_that_pass_rules_by_network_on_their_way_to_a_hop() {
    let deny = "default = \"deny\"\n[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
                [[rule]]\nname = \"inside\"\nmatch = { to = \"10.0.0.0/8\" }\naction = \"deny\"\n";
    let warnings = |rule: &str| config(&format!("{deny}[[rule]]\nname = \"on\"\n{rule}\n")).warnings.len();
    assert_eq!(warnings("carrier = \"socks5://192.0.2.1:1080\""), 1);
    for fine in [
        "carrier = \"direct\"",
        "carrier = \"socks5://192.0.2.1:1080\"\nresolve = \"local\"",
        "carrier = \"socks5://192.0.2.1:1080\"\nmatch = { to = \"198.51.100.0/24\" }",
        "carrier = \"socks5://192.0.2.1:1080\"\nto = \"db.example:5432\"",
    ] {
        assert_eq!(warnings(fine), 0, "{fine}");
    }
    let apart = deny.replace("10.0.0.0/8\" }", "10.0.0.0/8\", port = 25 }");
    let rule = "[[rule]]\nname = \"on\"\nmatch = { port = 443 }\ncarrier = \"socks5://192.0.2.1:1080\"\n";
    assert_eq!(config(&format!("{apart}{rule}")).warnings.len(), 0, "no flow meets both");
}

#[test]
fn explain_says_when_addresses_are_asked_about_and_what_is_never_dialled() {
    let config = config(
        "default = \"direct\"\n[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n\
         [[rule]]\nname = \"on\"\nmatch = { host = \"on.example\" }\ncarrier = \"socks5://192.0.2.1:1080\"\n",
    );
    let direct = asked(&config, "www.example:443");
    assert!(direct.action == "carry" && direct.addresses_are_asked_again, "{direct}");
    assert!(direct.to_string().contains("asked about again when the name is resolved"), "{direct}");
    assert!(!asked(&config, "on.example:443").addresses_are_asked_again, "the hop resolves it");
    assert!(!asked(&config, "198.51.100.7:443").addresses_are_asked_again);
    for never in ["169.254.169.254:80", "127.0.0.1:80", "[::ffff:127.0.0.1]:80", "0.0.0.0:80"] {
        let answer = asked(&config, never);
        assert!(answer.action == "deny" && answer.why.contains("never_dial"), "{answer}");
    }
}

#[test]
fn international_names_of_a_file_match_those_of_dns() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("hosts.txt");
    std::fs::write(&list, "||größe.example^\n0.0.0.0 köln.example\n").unwrap();
    let config = config(&format!(
        "default = \"direct\"\n[[rule]]\nname = \"no\"\nmatch = {{ host = [\"bücher.example\", \"*.BÜCHER.test\"] }}\naction = \"deny\"\n\
         [[rule]]\nname = \"file\"\nmatch = {{ host_file = {list:?} }}\naction = \"deny\"\n\
         [[rule]]\nname = \"word\"\nmatch = {{ host_contains = \"CAFÉ\" }}\naction = \"deny\"\n"
    ));
    for (name, rule) in [
        ("xn--bcher-kva.example", "no"),
        ("BÜCHER.example", "no"),
        ("bu\u{308}cher.example.", "no"),
        ("a.xn--bcher-kva.test", "no"),
        ("www.xn--gre-6ka8i.example", "file"),
        ("xn--kln-sna.example", "file"),
        ("xn--mein-caf-i1a.example", "word"),
        ("mein-café.example", "word"),
    ] {
        let answer = asked(&config, &format!("{name}:443"));
        assert_eq!(answer.rule.as_deref(), Some(rule), "{name}: {answer}");
    }
    for free in ["xn--bcher-kva.test", "cafe.example", "koln.example"] {
        assert_eq!(asked(&config, &format!("{free}:443")).rule, None, "{free}");
    }
    for text in [
        "host = \"xn--ü.example\"",
        "host = \"*.\u{fffd}.example\"",
        "host = \"127.1\"",
        "host_contains = \"a\u{fffd}\"",
    ] {
        let said = error(&format!(
            "default = \"deny\"\n[[rule]]\nname = \"x\"\nmatch = {{ {text} }}\naction = \"deny\"\n"
        ));
        assert!(said.contains("IDNA") || said.contains("last part is a number"), "{text}: {said}");
    }
}
