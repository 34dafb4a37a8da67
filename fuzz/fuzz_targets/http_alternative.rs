//! Alt-Svc: no input panics, what is read makes sense, and the table stays bounded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::http::alternative::{Alternatives, Announced};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::policy::Http3;
use sidetrack_core::time::Instant;

fuzz_target!(|data: &[u8]| {
    let Ok(name) = "web.example".parse() else { return };
    let server = Destination { host: Host::Name(name), port: 443, zone: 0 };
    let mut table = Alternatives::default();
    // Lines of values, as of several responses.
    for (at, line) in data.split(|byte| *byte == b'\n').enumerate().take(64) {
        let now = Instant::from_millis(at as u64 * 1000);
        let mut fields = Fields::new();
        fields.push("Alt-Svc", line);
        let Some(said) = Announced::read(&fields, &server.host) else { continue };
        table.learn(now, &server, said);
        match said {
            Announced::Port { port, lifetime } => {
                assert!(port != 0 && !lifetime.is_zero());
                assert_eq!(table.port(now, &server, Http3::Announced), Some(port));
                assert_eq!(table.port(now + lifetime, &server, Http3::Announced), None);
            }
            Announced::Nothing => assert_eq!(table.port(now, &server, Http3::Announced), None),
        }
        assert!(table.len() <= 1);
    }
});
