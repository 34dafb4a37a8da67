//! `[[tunnel]]`, `kind = "tunnel"` and `sidetrack tunnel`: what is accepted, what is refused and in which words.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use sidetrack::cli::tunnel::{ca, key, pin};
use sidetrack::config::{Config, ListenerKind, Transport, Tunnel};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::policy::Action;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tempfile::TempDir;

/// A folder with a key of each kind.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    key("near.example", None, 1, &folder.path().join("near.pem")).unwrap();
    ca(1, &folder.path().join("ca")).unwrap();
    folder
}

fn load(folder: &Path, text: &str) -> Result<Config, String> {
    let name = folder.join("test.toml").display().to_string();
    Config::from_text(&name, &format!("version = 1\n{text}")).map_err(|error| error.render(false))
}

#[test]
fn a_tunnel_and_its_far_side_are_read() {
    let folder = folder();
    let pin = pin(&folder.path().join("near.pem")).unwrap();
    let text = format!(
        "default = 'deny'\n[[tunnel]]\nname = 'a'\naddress = ['far.example:4433', '[2001:db8::1]:4433']\n\
         identity = 'near.pem'\npins = '{pin}'\ntransport = 'tls'\nkeepalive_ms = 500\n\
         [[tunnel]]\nname = 'b'\naddress = '192.0.2.1:4433'\nidentity = 'near.pem'\nca = 'ca.pem'\n\
         server_name = 'far.example'\n\
         [[listen]]\nkind = 'tunnel'\naddress = '*:4434'\nidentity = 'near.pem'\npins = ['{pin}']\n\
         [[rule]]\nname = 'r'\nmatch = {{ intercept = 'tunnel', socks_user = 'near.example' }}\ncarrier = 'tunnel:b'\n\
         metadata = {{ 1000 = 'x' }}\n\
         [[test]]\nflow = {{ dst = '192.0.2.9:1', intercept = 'tunnel', socks_user = 'near.example' }}\n\
         expect = {{ rule = 'r', carrier = 'tunnel:b' }}\n"
    );
    let config = load(folder.path(), &text).unwrap();
    let [a, b] = &config.tunnels[..] else { panic!("{:?}", config.tunnels) };
    assert_eq!((a.paths.len(), a.transport, a.keepalive_ms, a.lost_after_ms), (2, Transport::Tls, 500, 6000));
    assert_eq!(a.server_name(&a.paths[1]), "2001:db8::1");
    assert_eq!((b.server_name(&b.paths[0]).as_str(), b.transport), ("far.example", Transport::Auto));
    assert_eq!(b.keepalive_ms, Tunnel::KEEPALIVE_MS);
    assert!(matches!(config.listeners[0].kind, ListenerKind::Tunnel(_)));
    let Action::Carry(carry) = &config.policy.rules()[0].action else { panic!() };
    assert_eq!(carry.carrier, Carrier::Tunnel("b".into()));
    assert!(!format!("{config:?}").contains("PRIVATE KEY"));
    assert_eq!(load(folder.path(), &text).unwrap().tunnels, config.tunnels, "a reload finds it unchanged");
}

#[test]
fn mistakes_are_named() {
    let folder = folder();
    let good = "name = 'a'\naddress = 'far:1'\nidentity = 'near.pem'\nca = 'ca.pem'\n";
    for (text, words) in [
        ("[[tunnel]]\naddress = 'far:1'\nidentity = 'near.pem'\nca = 'ca.pem'\n", "lacks a name"),
        ("[[tunnel]]\nname = 'a'\nidentity = 'near.pem'\nca = 'ca.pem'\n", "lacks an address"),
        ("[[tunnel]]\nname = 'a'\naddress = 'far:1'\nca = 'ca.pem'\n", "needs an `identity`"),
        ("[[tunnel]]\nname = 'a'\naddress = 'far:1'\nidentity = 'near.pem'\n", "which peer to trust"),
        ("[[tunnel]]\nname = 'a'\naddress = []\nidentity = 'near.pem'\nca = 'ca.pem'\n", "0 paths"),
        (
            "[[tunnel]]\nname = 'a'\naddress = 'far:1'\nidentity = 'none.pem'\nca = 'ca.pem'\n",
            "cannot read 'none.pem'",
        ),
        (
            "[[tunnel]]\nname = 'a'\naddress = 'far:1'\nidentity = 'near.pem'\nca = 'none.pem'\n",
            "cannot read 'none.pem'",
        ),
        (
            "[[tunnel]]\nname = 'a'\naddress = 'far:1'\nidentity = 'ca.pem'\nca = 'ca.pem'\n",
            "certificate and its private key",
        ),
        (
            "[[tunnel]]\nname = 'a'\naddress = 'far:1'\nidentity = 'near.pem'\npins = ['sha256//x']\n",
            "is not a pin",
        ),
        (
            "[[tunnel]]\nname = 'a'\naddress = 'far:1'\nidentity = 'near.pem'\npins = []\n",
            "no peer would be trusted",
        ),
        (&format!("[[tunnel]]\n{good}pins = []\n"), "exclude each other"),
        (&format!("[[tunnel]]\n{good}lost_after_ms = 1000\n"), "would be lost in between"),
        (&format!("[[tunnel]]\n{good}keepalive_ms = 1\n"), "1 is out of range"),
        (&format!("[[tunnel]]\n{good}server_name = 'a b'\n"), "white space"),
        (&format!("[[tunnel]]\n{good}[[tunnel]]\n{good}"), "two tunnels named 'a'"),
        (
            &format!("[[rule]]\nname = 'r'\ncarrier = 'tunnel:b'\n[[tunnel]]\n{good}"),
            "did you mean \"tunnel:a\"?",
        ),
        ("[[rule]]\nname = 'r'\ncarrier = 'tunnel:b'\n", "there is no [[tunnel]] in this file"),
        (
            &format!("[[rule]]\nname = 'r'\ncarrier = ['tunnel:a', 'socks5://x']\n[[tunnel]]\n{good}"),
            "a tunnel cannot be one of several hops",
        ),
        (
            &format!(
                "[[rule]]\nname = 'r'\ncarrier = 'tunnel:a'\nkeep_client_address = true\n[[tunnel]]\n{good}"
            ),
            "goes only with carrier = \"direct\"",
        ),
        (
            &format!(
                "[[listen]]\nkind = 'tunnel'\naddress = '127.0.0.1:4433'\nidentity = 'near.pem'\nca = 'ca.pem'\n\
                 [[tunnel]]\n{}",
                good.replace("far:1", "127.0.0.1:4433")
            ),
            "in circles",
        ),
        ("[[listen]]\nkind = 'socks'\naddress = '*:1'\nidentity = 'x'\n", "it belongs to kind = \"tunnel\""),
    ] {
        let error = load(folder.path(), &format!("default = 'deny'\n{text}")).unwrap_err();
        let flat = error.split_whitespace().filter(|word| *word != "│").collect::<Vec<_>>().join(" ");
        assert!(flat.contains(words), "{text}\n{error}");
    }
}

#[test]
fn keys_are_private_never_overwritten_and_signed_by_their_authority() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("near.pem"), mode("ca-private.pem"), mode("ca.pem")), (0o600, 0o600, 0o644));
    assert!(!std::fs::read_to_string(at("ca.pem")).unwrap().contains("PRIVATE"));
    let before = std::fs::read(at("near.pem")).unwrap();
    assert!(key("near.example", None, 1, &at("near.pem")).is_err());
    assert_eq!(std::fs::read(at("near.pem")).unwrap(), before);
    let words = key("far.example", Some(&at("ca-private.pem")), 1, &at("far.pem")).unwrap();
    assert!(words.contains("identity = "), "{words}");
    assert!(key("x", Some(&at("ca.pem")), 1, &at("x.pem")).is_err(), "its key is not there");
    assert!(key("not a name", None, 1, &at("y.pem")).is_err());
    let words = key("other", None, 1, &at("other.pem")).unwrap();
    assert!(words.contains(&pin(&at("other.pem")).unwrap().to_string()), "{words}");
}
