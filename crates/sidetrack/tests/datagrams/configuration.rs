//! What the check of a configuration says about UDP.

use sidetrack::config::{Config, Limits};
use sidetrack_core::flow::Protocol;

const LISTENER: &str =
    "[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:5353\"\n";

fn load(text: &str) -> Result<Config, String> {
    let text = format!("version = 1\ndefault = \"deny\"\n{text}");
    Config::from_text("test.toml", &text).map_err(|error| error.render(false))
}

#[track_caller]
fn wrong(text: &str, says: &str) {
    let said = load(text).err().unwrap_or_default();
    assert!(said.contains(says), "{text}\n{said}");
}

#[test]
fn keys_that_datagrams_cannot_have_are_errors() {
    wrong(LISTENER, "does not say which server");
    let names = "names = { \"a.example\" = \"192.0.2.1:53\" }\n";
    wrong(&format!("{LISTENER}{names}"), "`names` does not go with `protocol = \"udp\"`");
    for (key, value) in [("mptcp", "true"), ("accept_proxy_protocol", "\"10.0.0.0/8\"")] {
        let text = format!("{LISTENER}to = \"192.0.2.1:53\"\n{key} = {value}\n");
        wrong(&text, &format!("`{key}` does not go with `protocol = \"udp\"`"));
    }
    let tproxy = "[[listen]]\nkind = \"tproxy\"\nprotocol = \"udp\"\ninterfaces = \"eth0\"\n";
    assert!(load(tproxy).is_ok());
    wrong(&format!("{tproxy}tap = true\n"), "`tap` does not go with `protocol = \"udp\"`");
    let socks = "[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\nprotocol = \"udp\"\n";
    wrong(socks, "`protocol` is not a key of kind = \"socks\"");
    wrong(&format!("{LISTENER}to = \"127.0.0.1:5353\"\n"), "would go in circles");
}

#[test]
fn a_rule_for_udp_that_cannot_carry_it_is_an_error_and_one_that_catches_it_a_warning() {
    let listener = format!("{LISTENER}to = \"192.0.2.1:53\"\n");
    let rule = |condition: &str, way: &str| {
        format!("{listener}[[rule]]\nname = \"r\"\nmatch = {{ {condition} }}\n{way}\n")
    };
    let udp = "protocol = \"udp\"";
    wrong(&rule(udp, "carrier = \"socks6+socksx://gw:1080\""), "the layouts of socksx carry no UDP");
    wrong(
        &rule(udp, "carrier = [\"http://gw:3128\", \"socks6+socksx010://gw:1080\"]"),
        "the layouts of socksx",
    );
    assert!(load(&rule(udp, "carrier = [\"socks6+socksx://gw:1080\", \"http://gw:3128\"]")).is_ok());
    assert!(load(&rule(udp, "carrier = [\"socks6://gw:1080\", \"socks5://gw:1080\"]")).is_ok());
    assert!(load(&rule(udp, "carrier = [\"socks5://gw:1080\", \"socks5://other:1080\"]")).is_ok());
    wrong(&rule(udp, "carrier = \"direct\"\nproxy_protocol = 2"), "`proxy_protocol` is for TCP only");
    // The kernel can keep a client's address, and we cannot.
    assert!(load(&rule(udp, "carrier = \"direct\"\nkeep_client_address = true")).is_ok());
    let ours = "carrier = \"direct\"\nkeep_client_address = true\nidle_timeout_ms = 5000";
    wrong(&rule(udp, ours), "and for datagrams that the kernel");
    let functions = "[function.n]\nkind = \"count\"\n[function.f]\nkind = \"filter\"\ndeny_words = [\"x\"]\n";
    let chain = |names: &str| format!("carrier = \"direct\"\nchain = [{names}]\n{functions}");
    assert!(load(&rule(udp, &chain("\"n\""))).is_ok());
    wrong(&rule(udp, &chain("\"n\", \"f\"")), "functions other than `count` and `limit` work on TCP only");
    let warnings = |text: &str| -> Vec<String> {
        load(text).expect(text).warnings.iter().map(ToString::to_string).collect()
    };
    let hop = "carrier = \"socks6+socksx://gw:1080\"";
    let said = warnings(&rule("port = 53", hop));
    assert!(said.iter().any(|warning| warning.contains("are refused: the layouts of socksx")), "{said:?}");
    for condition in ["protocol = \"tcp\"", "intercept = \"socks\""] {
        assert_eq!(warnings(&rule(condition, hop)), [""; 0], "{condition}");
    }
    assert_eq!(warnings(&rule(udp, "carrier = \"direct\"")), [""; 0]);
}

#[test]
fn one_port_may_have_a_listener_of_each_protocol() {
    let text = format!(
        "{LISTENER}to = \"192.0.2.1:53\"\n[[listen]]\nname = \"tcp\"\nkind = \"reverse\"\naddress = \"127.0.0.1:5353\"\n\
         to = \"192.0.2.1:53\"\n[[rule]]\nname = \"r\"\ncarrier = \"direct\"\n"
    );
    let config = load(&text).unwrap();
    let protocols = config.listeners.iter().flat_map(|listener| listener.captures()).map(|it| it.protocol);
    assert_eq!(
        protocols.collect::<Vec<_>>(),
        [Protocol::Udp, Protocol::Tcp],
        "of each, what the kernel may have"
    );
    let (limits, default) = (config.limits, Limits::default());
    assert_eq!((limits.udp_idle_timeout_ms, limits.max_associations), (300_000, 16_384));
    assert_eq!(limits, default);
    wrong(&format!("[limits]\nmax_associations = 0\n{text}"), "max_associations");
}

/// A configuration of node `a` with an overlay, a group, and a rule with these lines.
fn over(condition: &str, lines: &str) -> String {
    format!(
        "[overlay]\nname = \"a\"\nkey_file = \"KEY\"\n[overlay.node.a]\nkey = \"ed25519:OWN\"\n[overlay.node.b]\n\
         key = \"ed25519:sz+aUKYYPXBfTtF/sl8boU8WbAZPTUUx8dKSNsEbQvk=\"\naddress = \"192.0.2.9:8100\"\n\
         [[overlay.group]]\nname = \"tv\"\nto = \"10.9.0.1\"\n[[rule]]\nname = \"r\"\nmatch = {{ {condition} }}\n{lines}\n"
    )
}

#[test]
fn a_rule_over_the_overlay_chooses_how_datagrams_travel() {
    let udp = "protocol = \"udp\"";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.key");
    let program = env!("CARGO_BIN_EXE_sidetrack");
    let made = std::process::Command::new(program).args(["overlay", "key"]).arg(&file).output().unwrap();
    let public = String::from_utf8(made.stdout).unwrap();
    let over = |condition: &str, lines: &str| {
        let text = over(condition, lines).replace("KEY", &file.display().to_string());
        text.replace("ed25519:OWN", public.trim())
    };
    for lines in [
        "carrier = \"overlay:b\"",
        "carrier = \"overlay:b\"\nlink = \"reliable\"",
        "carrier = \"overlay:b\"\nlink = \"real-time\"\ndeadline_ms = 65\ndissemination = \"graph\"",
        "carrier = \"overlay:nearest:tv\"\ndissemination = \"flood\"\nhops = 3",
        "carrier = \"overlay:group:tv\"\ndissemination = \"duplicate\"\npaths = 3",
    ] {
        let done = load(&over(udp, lines));
        assert!(done.is_ok(), "{lines}\n{}", done.err().unwrap_or_default());
    }
    for (condition, lines, says) in [
        ("", "carrier = \"overlay:group:tv\"", "cannot go to all members of a group"),
        (udp, "carrier = \"overlay:group:tw\"", "did you mean \"overlay:group:tv\"?"),
        (
            "",
            "carrier = \"overlay:b\"\nlink = \"real-time\"\ndeadline_ms = 65",
            "`link` is for datagrams only",
        ),
        ("", "carrier = \"overlay:b\"\ndissemination = \"graph\"", "is for datagrams only"),
        (udp, "carrier = \"overlay:b\"\ndissemination = \"stripe\"", "datagrams are not striped"),
        (udp, "carrier = \"overlay:b\"\nlink = \"real-time\"", "need a `deadline_ms`"),
        (udp, "carrier = \"overlay:b\"\nhops = 3", "`hops` has no meaning with this dissemination"),
        (
            udp,
            "carrier = \"overlay:b\"\nlink = \"reliable\"\ndissemination = \"flood\"",
            "reliable links take",
        ),
        (udp, "carrier = \"direct\"\nlink = \"reliable\"", "only flows over the overlay"),
    ] {
        wrong(&over(condition, lines), says);
    }
}
