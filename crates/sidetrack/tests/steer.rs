//! From a configuration to what the kernel is to do: it takes what user space would have carried the same way, and
//! nothing of anybody else's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use sidetrack::config::Config;
use sidetrack::keeper::{Order, Proved};
use sidetrack::steer::{Forwards, Host, Steer, TABLE};
use sidetrack_core::flow::Protocol;
use sidetrack_sys::nft::{CgroupMatch, KernelRoute, Selector};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

fn steered(text: &str) -> Steer {
    steered_on(text, true)
}

fn steered_on(text: &str, forwards: bool) -> Steer {
    let text = format!("version = 1\n{text}");
    let config =
        Config::from_text("steer.toml", &text).unwrap_or_else(|error| panic!("{}", error.render(false)));
    let listeners = config.listeners.iter();
    let bound: Vec<_> = listeners
        .flat_map(|listener| listener.addresses.iter().map(|address| (listener.name.clone(), *address)))
        .collect();
    let no_cgroup = |_: &str| -> io::Result<CgroupMatch> { Err(io::ErrorKind::NotFound.into()) };
    let host =
        Host { find_cgroup: &no_cgroup, forwards: Forwards { v4: forwards, v6: forwards }, session: None };
    Steer::new(&config, &bound, 0, &host).unwrap()
}

/// A path that is left alone: rule, local and forwarded selectors, masquerade.
type Direct<'a> = (Option<&'a str>, &'a [Selector], &'a [Selector], bool);

fn direct(steer: &Steer) -> Vec<Direct<'_>> {
    let paths = steer.paths.iter().zip(&steer.steering.kernel_paths);
    paths
        .filter_map(|(path, kernel)| match &kernel.route {
            KernelRoute::Direct { local, forwarded, masquerade } => {
                Some((path.rule.as_deref(), local.as_slice(), forwarded.as_slice(), *masquerade))
            }
            KernelRoute::Dnat { .. } => None,
        })
        .collect()
}

const LOCAL: &str = "[[listen]]\nkind = \"redirect\"\naddress = \"127.0.0.1:15001\"\ndst = \"10.0.0.0/8\"\n";

#[test]
fn local_traffic_is_not_taken_from_those_who_are_forwarded() {
    let steer = steered(LOCAL);
    let paths = direct(&steer);
    let [(None, [local], [], false)] = paths.as_slice() else { panic!("{paths:?}") };
    assert_eq!(local.destinations.to_string(), "10.0.0.0/8");
}

#[test]
fn forwarded_traffic_is_not_taken_from_local_programs() {
    let text = "[[listen]]\nkind = \"tproxy\"\naddress = \"0.0.0.0:15002\"\ninterfaces = \"eth1\"\n";
    let steer = steered(&format!("{text}{LOCAL}"));
    let paths = direct(&steer);
    let [(None, [], [forwarded], true), (None, [_], [], false)] = paths.as_slice() else {
        panic!("{paths:?}")
    };
    assert_eq!(forwarded.interfaces.len(), 1);
}

#[test]
fn what_both_the_listener_and_a_rule_restrict_is_intersected() {
    let rules = "[[rule]]\nname = \"web\"\nmatch = { to = \"10.2.0.0/15\", port = 80 }\ncarrier = \"socks5://gw\"\n\
                 [[rule]]\nname = \"bulk\"\nmatch = { to = [\"10.3.0.0/16\", \"192.0.2.0/24\"] }\ncarrier = \"direct\"\n";
    let steer = steered(&format!("default = \"deny\"\n{LOCAL}{rules}"));
    let paths = direct(&steer);
    let [(Some("bulk"), [local], [], false)] = paths.as_slice() else { panic!("{paths:?}") };
    assert_eq!(local.destinations.to_string(), "10.3.0.0/16");
    assert_eq!(local.ports.to_string(), "1-79, 81-65535");
}

#[test]
fn pieces_of_one_rule_are_one_path() {
    let rules = "[[rule]]\nname = \"odd\"\nmatch = { to = \"10.5.0.0/16\", port = 80, from = \"10.6.0.0/16\" }\naction = \"deny\"\n";
    let steer = steered(&format!("default = \"direct\"\n{LOCAL}{rules}"));
    let paths = direct(&steer);
    let [(None, local, [], false)] = paths.as_slice() else { panic!("{paths:?}") };
    assert_eq!(local.len(), 3, "outside in source, in destination, in port");
}

#[test]
fn what_only_user_space_can_do_stays_there() {
    let needs_us = [
        format!("[limits]\nmax_flows_per_client = 5\n{LOCAL}"),
        format!("{LOCAL}accept_proxy_protocol = \"192.0.2.0/24\"\n"),
        format!("default = \"deny\"\n{LOCAL}[[rule]]\nname = \"to\"\ncarrier = \"direct\"\nto = \"192.0.2.1:80\"\n"),
        format!("default = \"deny\"\n{LOCAL}[[rule]]\nname = \"who\"\nmatch = {{ process = \"curl\" }}\ncarrier = \"direct\"\n"),
        "[limits]\nmax_flows_per_client = 5\n[[listen]]\nkind = \"reverse\"\naddress = \"192.0.2.1:80\"\nto = \"10.0.0.1:80\"\n".into(),
        "[[listen]]\nkind = \"reverse\"\naddress = \"192.0.2.1:80\"\nnames = { \"*\" = \"10.0.0.1:80\" }\n".into(),
    ];
    for text in needs_us {
        assert_eq!(steered(&text).paths, [], "{text}");
    }
}

/// DNAT to another host on a host that does not forward: the connection would hang.
#[test]
fn a_host_that_does_not_forward_leads_nothing_to_other_hosts() {
    let to = |server: &str| {
        format!(
            "default = 'direct'\n[[listen]]\nkind = 'reverse'\naddress = '127.0.0.1:81'\nto = '{server}'\n"
        )
    };
    let far = to("10.0.0.2:80").replace("127.0.0.1:81", "10.0.0.1:81");
    assert_eq!(steered_on(&far, true).paths.len(), 1);
    assert!(steered_on(&far, false).is_empty());
    assert_eq!(steered_on(&to("127.0.0.1:80"), false).paths.len(), 1, "what stays here needs no forwarding");
}

/// What the keeper makes of an order is what the configuration asks for, table by table.
#[test]
fn an_order_leads_to_the_same_rules() {
    let everything = "[[listen]]\nname = \"out\"\nkind = \"redirect\"\naddress = \"0.0.0.0:15001\"\nforwarded = true\n\
                      dst = [\"10.0.0.0/8\", \"192.0.2.7\"]\nports = [80, \"8000-8100\"]\nusers = [1000, 1001]\n\
                      except = \"10.1.0.0/16\"\n\
                      [[listen]]\nname = \"six\"\nkind = \"redirect\"\naddress = \"[::1]:15001\"\nports = 99\n\
                      [[listen]]\nname = \"router\"\nkind = \"tproxy\"\naddress = [\"0.0.0.0:15002\", \"[::]:15002\"]\n\
                      interfaces = [\"eth0\", \"eth1\"]\nsrc = \"198.51.100.0/24\"\n\
                      [[listen]]\nname = \"datagrams\"\nkind = \"tproxy\"\nprotocol = \"udp\"\n\
                      address = [\"0.0.0.0:15002\", \"[::]:15002\"]\nports = [53, 443]\n\
                      [[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"192.0.2.1:81\"\nto = \"10.0.0.1:80\"\n\
                      [[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n\
                      [[rule]]\nname = \"web\"\nmatch = { port = 80 }\ncarrier = \"direct\"\n\
                      [[rule]]\nname = \"as-client\"\nmatch = { port = 8080, listener = \"router\" }\ncarrier = \"direct\"\n\
                      keep_client_address = true\n";
    let texts = [
        format!("default = \"deny\"\non_crash = \"closed\"\n{everything}"),
        format!("default = \"direct\"\non_crash = \"open\"\n{everything}"),
        LOCAL.to_owned(),
        "[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n".to_owned(),
    ];
    for text in texts {
        let steer = steered(&text);
        let tcp = steer.steering.except.listeners.iter().map(|address| (Protocol::Tcp, *address));
        let udp =
            steer.steering.tproxies.iter().filter(|tproxy| tproxy.protocol == Protocol::Udp).map(|tproxy| {
                let any: IpAddr =
                    if tproxy.v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
                (Protocol::Udp, SocketAddr::new(any, tproxy.port))
            });
        let bound: Vec<_> = tcp.chain(udp).collect();
        let order = Order::of(&steer, &bound).unwrap();
        let order: Order = serde_json::from_str(&serde_json::to_string(&order).unwrap()).unwrap();
        let proved: Vec<_> = bound
            .iter()
            .map(|&(protocol, address)| Proved { address, protocol, transparent: true })
            .collect();
        let work = order.work(&proved).unwrap();
        assert_eq!(work.steering.table(TABLE), steer.steering.table(TABLE), "{text}");
        assert_eq!((work.mark_rules, work.lifetime), (steer.mark_rules, steer.lifetime), "{text}");
    }
}
