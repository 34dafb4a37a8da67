//! `[export]`: what it says, mistakes in it, and that a reload does not change it.

use crate::load;
use sidetrack::config::{Config, waiting_for_restart};
use sidetrack_core::flow::Protocol;
use std::time::Duration;

fn read(keys: &str) -> Result<Config, String> {
    load(&format!("version = 1\n{keys}"))
}

#[test]
fn a_collector_has_defaults() {
    let config = read("[export.ipfix]\ncollector = \"flows.example:4739\"\n").unwrap();
    let ipfix = config.export.ipfix.clone().expect("a collector");
    let minute = Duration::from_secs(60);
    assert_eq!((ipfix.collector.to_string(), ipfix.transport), ("flows.example:4739".into(), Protocol::Udp));
    assert_eq!(
        (ipfix.refresh, ipfix.active, ipfix.domain, ipfix.enterprise),
        (minute, Some(minute), 1, None)
    );
    let other =
        read("[export.ipfix]\ncollector = \"[2001:db8::1]:1\"\ntransport = \"tcp\"\nactive_timeout_ms = 0\n")
            .unwrap();
    assert_eq!(other.export.ipfix.as_ref().map(|ipfix| ipfix.active), Some(None));
    let waiting = waiting_for_restart(&config, &other).join("\n");
    assert!(waiting.contains("[export.ipfix]: flows.example:4739 (udp, domain 1"), "{waiting}");
    assert_eq!(waiting_for_restart(&config, &config), Vec::<String>::new());
}

#[test]
fn mistakes_are_told() {
    let at = "collector = \"192.0.2.1:4739\"\n";
    for (keys, said) in [
        ("domain = 1\n".to_owned(), "unknown"),
        (String::new(), "[export.ipfix] has no `collector`"),
        ("collector = \"flows.example\"\n".into(), "lacks a port"),
        (format!("{at}transport = \"sctp\"\n"), "is none of the words allowed here"),
        (format!("{at}template_refresh_ms = 999\n"), "999 is out of range"),
        (format!("{at}transport = \"tcp\"\ntemplate_refresh_ms = 1000\n"), "has no meaning with transport"),
        (format!("{at}active_timeout_ms = 5\n"), "use 1000 to 86400000 milliseconds, or 0"),
        (format!("{at}enterprise = 0\n"), "0 is out of range"),
    ] {
        let error = read(&format!("[export.ipfix]\n{keys}")).expect_err(said);
        assert!(error.contains(said), "{said}:\n{error}");
    }
}

#[test]
fn an_endpoint_has_a_port_and_a_path() {
    let read = |keys: &str| {
        read(&format!("[export.otlp]\n{keys}")).map(|config| config.export.otlp.expect("a collector"))
    };
    let otlp = read("endpoint = \"https://[2001:db8::1]/tenant/a/\"\nheaders_file = \"headers\"\n").unwrap();
    assert_eq!(
        (otlp.authority(), &otlp.prefix[..], otlp.secure),
        ("[2001:db8::1]:4318".into(), "/tenant/a", true)
    );
    assert_eq!(
        (otlp.interval, otlp.traces, otlp.metrics, otlp.headers.len()),
        (Duration::from_secs(60), true, true, 2)
    );
    assert!(!format!("{otlp:?} {otlp}").contains("hunter2"), "{otlp:?}");
    assert_eq!(read("endpoint = \"http://collector:80\"\n").unwrap().prefix, "");
    let at = "endpoint = \"http://collector\"\n";
    for (keys, said) in [
        (String::new(), "[export.otlp] has no `endpoint`"),
        ("endpoint = \"collector:4318\"\n".into(), "this is not the address of a collector"),
        ("endpoint = \"ftp://collector\"\n".into(), "this is not the address of a collector"),
        ("endpoint = \"http://user:word@collector\"\n".into(), "this is not the address of a collector"),
        ("endpoint = \"http://collector/?a=b\"\n".into(), "this is not the address of a collector"),
        ("endpoint = \"http://127.1\"\n".into(), "this is not the address of a collector"),
        (format!("{at}interval_ms = 999\n"), "999 is out of range"),
        (format!("{at}traces = false\nmetrics = false\n"), "neither traces nor metrics"),
        (format!("{at}ca = \"ca.pem\"\n"), "`ca` without TLS"),
        (format!("{at}headers_file = \"none\"\n"), "cannot read 'none'"),
        (format!("{at}headers_file = \"open.pass\"\n"), "line 1 of 'open.pass' is not a field"),
        ("endpoint = \"https://collector\"\nca = \"gw.pass\"\n".into(), "has no certificate"),
    ] {
        let error = read(&keys).expect_err(said);
        assert!(error.contains(said) && !error.contains("hunter2"), "{said}:\n{error}");
    }
}
