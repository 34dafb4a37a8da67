//! Link-local addresses in a configuration.

use crate::load;
use sidetrack_core::policy::Action;

#[test]
fn link_local_addresses_have_a_zone() {
    let of = |addresses: &str| {
        load(&format!("version = 1\n[[listen]]\nname = 'in'\nkind = 'socks'\naddress = [{addresses}]\n"))
            .map(|config| config.listeners[0].addresses.clone())
    };
    for (text, scope) in [("fe80::1%eth0", 7), ("fe80::1%25eth1", 8), ("fe80::1%3", 3), ("fe80::1%25", 25)] {
        let addresses = of(&format!("'[{text}]:1080'")).unwrap();
        let expected = std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 1080, 0, scope);
        assert_eq!(addresses, [expected.into()], "{text}");
    }
    let both = of("'[fe80::1%eth0]:1080', '[fe80::1%eth1]:1080'").unwrap();
    assert_eq!(both.len(), 2, "the same address on two links");
    for (text, told) in [
        ("fe80::1%wlan7", "there is no interface 'wlan7' on this machine"),
        ("fe80::1%", "there is no interface '' on this machine"),
        ("fe80::1%0", "there is no interface '0' on this machine"),
        ("2001:db8::1%eth0", "has a zone that means nothing"),
        ("::1%lo", "has a zone that means nothing"),
    ] {
        let error = of(&format!("'[{text}]:1080'")).unwrap_err();
        assert!(error.contains(told), "{text}: {error}");
    }
}

#[test]
fn destinations_have_a_zone_where_this_host_dials_them() {
    let with = |rule: &str| {
        let listen = "[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n";
        load(&format!("version = 1\ndefault = 'deny'\n{listen}[[rule]]\nname = 'r'\n{rule}"))
    };
    for (rule, written) in [
        ("carrier = 'direct'\nto = '[fe80::1%eth0]:80'", "[fe80::1%7]:80"),
        ("carrier = 'socks5://[fe80::1%25eth1]'", "socks5://[fe80::1%8]:1080"),
        ("carrier = ['http://u:p@[fe80::1%3]:80', 'socks6://gw']", "http://[fe80::1%3]:80"),
    ] {
        let config = with(rule).unwrap();
        let Action::Carry(carry) = &config.policy.rules()[0].action else { panic!() };
        let found = match (&carry.to, &carry.carrier) {
            (Some(to), _) => to.to_string(),
            (None, carrier) => carrier.to_string().split(" -> ").next().unwrap().to_owned(),
        };
        assert_eq!(found, written, "{rule}");
    }
    let tested = "carrier = 'socks5://[fe80::1%eth0]'\nmatch = { to = 'fe80::/10' }\n[[test]]\n\
                  flow = { src = '[fe80::2%eth0]:1', dst = '[fe80::9%eth1]:80' }\n\
                  expect = { carrier = 'socks5://[fe80::1%eth0]:1080' }\n";
    with(tested).unwrap();
    let another = "the zone of this address is an interface of this host: another host dials it";
    for (rule, told) in [
        ("carrier = 'direct'\nto = '[fe80::1%wlan7]:80'", "there is no interface 'wlan7' on this machine"),
        ("carrier = 'direct'\nto = '[::1%eth0]:80'", "has a zone that means nothing"),
        ("carrier = 'socks5://[fe80::1%wlan7]'", "there is no interface 'wlan7' on this machine"),
        ("carrier = 'socks5://gw'\nto = '[fe80::1%eth0]:80'", another),
        ("carrier = ['socks5://gw', 'socks5://[fe80::1%eth0]']", another),
        ("carrier = 'direct'\nmatch = { to = 'fe80::1%eth0' }", "'fe80::1%eth0' is not a network"),
        ("carrier = 'direct'\nmatch = { to = 'fe80::1%eth0' }", "rules match an address on every link"),
    ] {
        let error = with(rule).unwrap_err();
        assert!(error.contains(told), "{rule}: {error}");
    }
}
