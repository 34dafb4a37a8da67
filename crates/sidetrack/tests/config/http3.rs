//! HTTP/3 to hops and to servers in a configuration.

use crate::load;
use sidetrack_core::policy::{Action, Http3};

fn with(rule: &str) -> Result<sidetrack::config::Config, String> {
    let listen = "[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n";
    load(&format!("version = 1\ndefault = 'deny'\n{listen}[[rule]]\nname = 'r'\n{rule}"))
}

#[test]
fn a_rule_says_when_servers_are_asked_by_http_3() {
    // Hops that carry UDP carry QUIC, too; otherwise a warning says that it is TCP.
    for (hop, carries) in [("socks5://gw", true), ("https://gw", true), ("socks6+socksx://gw", false)] {
        let config = with(&format!("carrier = '{hop}'\nhttp3 = 'first'")).unwrap();
        let Action::Carry(carry) = &config.policy.rules()[0].action else { panic!() };
        assert_eq!(carry.http3_obstacle().is_none(), carries, "{hop}");
        assert_eq!(
            config.warnings.iter().any(|warning| warning.to_string().contains("asked by TCP")),
            !carries
        );
    }
    for (text, when) in [
        ("", Http3::Never),
        ("http3 = 'never'", Http3::Never),
        ("http3 = 'announced'", Http3::Announced),
        ("http3 = 'first'", Http3::First),
    ] {
        let config = with(&format!("carrier = 'direct'\n{text}")).unwrap();
        let Action::Carry(carry) = &config.policy.rules()[0].action else { panic!() };
        assert_eq!(carry.http3, when, "{text}");
    }
    for (rule, told) in [
        (
            "carrier = 'direct'\nhttp3 = 'first'\nproxy_protocol = 2",
            "goes with neither `keep_client_address`",
        ),
        ("action = 'deny'\nhttp3 = 'first'", "`http3` means nothing in a rule that denies"),
        ("carrier = 'direct'\nhttp3 = 'always'", "announced"),
    ] {
        let error = with(rule).unwrap_err();
        assert!(error.contains(told), "{rule}: {error}");
    }
}

#[test]
fn encrypted_hops_stand_where_the_hops_before_them_reach_them() {
    for good in ["'socks5://a', 'https://b'", "'socks6://a', 'h3://b'", "'https://a', 'h3://b', 'https://c'"]
    {
        with(&format!("carrier = [{good}]")).unwrap();
    }
    let error = with("carrier = ['socks6+socksx://a', 'h3://b']").unwrap_err();
    assert!(
        error.contains("the hops before this one cannot carry its datagrams: the layouts of socksx"),
        "{error}"
    );
}

#[test]
fn the_server_of_a_reverse_proxy_may_speak_tls() {
    let to = |to: &str| {
        load(&format!("version = 1\ndefault = 'direct'\n[[listen]]\nkind = 'http'\naddress = '127.0.0.1:0'\nto = '{to}'\n"))
            .map(|config| config.listeners[0].kind.http().cloned().unwrap())
    };
    let plain = to("web.example:80").unwrap();
    assert!(plain.to.unwrap().to_string() == "web.example:80" && plain.to_secure.is_none());
    for text in ["https://web.example", "https://web.example:443/"] {
        let server = to(text).unwrap();
        assert_eq!(server.to.unwrap().to_string(), "web.example:443");
        assert_eq!(server.to_secure.unwrap().address.to_string(), "web.example:443");
    }
    for (text, told) in [
        ("http://web.example", "this is not a server of https"),
        ("https://a:b@web.example", "this is not a server of https"),
        ("https://web.example?tfo=true", "this is not a server of https"),
        ("https://web.example/path", ""),
        ("https://web.example?ca=none.pem", "cannot read 'none.pem'"),
    ] {
        let error = to(text).unwrap_err();
        assert!(error.contains(told), "{text}: {error}");
    }
}
