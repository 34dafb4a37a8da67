//! `kind = "engine"` in a configuration: what is read, what is refused and in which words.

use sidetrack::config::{Config, EngineIo, EngineListener, ListenerKind};
use sidetrack_core::engine::Steering;
use std::time::Duration;

fn load(text: &str) -> Result<EngineListener, String> {
    let config = Config::from_text("test.toml", &format!("version = 1\n[[listen]]\nkind = 'engine'\n{text}"))
        .map_err(|error| error.render(false))?;
    match &config.listeners[0].kind {
        ListenerKind::Engine(engine) => Ok(engine.clone()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn defaults_and_all_keys() {
    let engine =
        load("address = '192.0.2.1:80'\ninterfaces = ['eth0']\nto = '10.0.0.1:80'").expect("accepted");
    assert_eq!((engine.io, engine.steering), (EngineIo::Packet, Steering::Port));
    assert_eq!(engine.sources, ["192.0.2.1".parse::<std::net::IpAddr>().expect("an address")]);
    assert_eq!((engine.source_ports, engine.connections_max), (61_000..=65_535, 65_536));
    assert_eq!((engine.offload_max, engine.answer_by_xdp, engine.coalesce), (0, false, Duration::ZERO));
    let engine = load(
        "address = '*:80'\ninterfaces = ['a', 'b']\nnames = { 'a.example' = '10.0.0.1:80' }\n\
         engine = { io = 'xdp', sources = ['10.0.0.9', 'fd00::9'], source_ports = '1024-2047', steering = 'ip', \
         connections_max = 16, offload_max = 65536, coalesce_us = 200, syn_cookies = 'xdp' }",
    )
    .expect("accepted");
    assert_eq!((engine.io, engine.steering), (EngineIo::Xdp, Steering::Ip));
    assert_eq!((engine.sources.len(), engine.source_ports, engine.connections_max), (2, 1024..=2047, 16));
    assert_eq!((engine.offload_max, engine.answer_by_xdp), (65_536, true));
    assert_eq!(engine.coalesce, Duration::from_micros(200));
    assert_eq!(engine.interfaces, ["a", "b"]);
}

#[test]
fn what_cannot_work_is_refused_with_its_reason() {
    for (text, reason) in [
        ("address = '192.0.2.1:80'\nto = '10.0.0.1:80'", "lacks interfaces"),
        (
            "address = '*:80'\ninterfaces = ['a']\nto = '10.0.0.1:80'",
            "nothing says where connections to servers come from",
        ),
        (
            "address = '192.0.2.1:80'\ninterfaces = ['a']\nto = 'db.example:80'",
            "'db.example' is not an address",
        ),
        ("address = '192.0.2.1:80'\ninterfaces = ['a']\nto = '192.0.2.1:80'", "our own listener"),
        (
            "address = '192.0.2.1:80'\ninterfaces = ['a']\nto = '10.0.0.1:80'\nengine = { source_ports = '9-1' }",
            "'9-1' is not a range of ports",
        ),
        (
            "address = '192.0.2.1:80'\ninterfaces = ['a']\nto = '10.0.0.1:80'\nengine = { sources = ['here'] }",
            "'here' is not an address of a host",
        ),
        (
            "address = '192.0.2.1:80'\ninterfaces = ['a']\nto = '10.0.0.1:80'\naccept_proxy_protocol = '10.0.0.0/8'",
            "reads no PROXY protocol header",
        ),
        (
            "address = '192.0.2.1:80'\ninterfaces = ['a']\nto = '10.0.0.1:80'\nengine = { choose = [{ regex = '(', to = \
             '10.0.0.2:80' }] }",
            "this expression cannot be used",
        ),
        (
            "address = '192.0.2.1:80'\ninterfaces = ['a']\nto = '10.0.0.1:80'\nengine = { choose = [{ regex = 'a', prefix = \
             'b', to = '10.0.0.2:80' }] }",
            "one of a `prefix`",
        ),
        ("address = '192.0.2.1:80'\ninterfaces = ['a']", "does not say which server"),
        (
            "address = '192.0.2.1:80'\ninterfaces = ['a']\nnames = { a = '10.0.0.1:80' }\nengine = { syn_cookies = 'xdp' }",
            "no XDP program to answer SYNs",
        ),
        (
            "address = '192.0.2.1:80'\ninterfaces = ['a']\nto = '10.0.0.1:80'\nengine = { io = 'xdp', syn_cookies = 'xdp' }",
            "need not speak first",
        ),
    ] {
        let error = load(text).expect_err(reason);
        assert!(error.contains(reason), "{reason}:\n{error}");
    }
}
