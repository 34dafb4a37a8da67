//! A proxy's answer to CONNECT and to CONNECT-UDP: no input panics, and every split of it gives the same result. The first byte is
//! the size of the pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::http::connect::{Client, Config, Input, Kind, Output};
use sidetrack_core::time::Instant;
use std::time::Duration;

/// The result, and how many bytes were taken until then.
fn result<'a>(kind: Kind, pieces: impl Iterator<Item = &'a [u8]>) -> (Option<Output>, usize) {
    let destination = "db.example.nl:5432".parse().expect("a destination");
    let timeout = Duration::from_secs(1);
    let proxy = "gw.example:3128".parse().expect("a proxy");
    let config = Config { kind, proxy, destination, credentials: None, initial_data: Vec::new(), timeout };
    let mut client = Client::new(config, Instant::ZERO);
    assert!(matches!(client.poll(), Some(Output::Send(_))));
    let mut taken = 0;
    for piece in pieces {
        client.handle(Instant::ZERO, Input::Bytes(piece));
        taken += piece.len();
        if let Some(output) = client.poll() {
            assert_eq!((client.poll(), client.deadline()), (None, None));
            return (Some(output), taken);
        }
    }
    assert!(client.deadline().is_some());
    (None, taken)
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&size, answer)) = bytes.split_first() else { return };
    for kind in [Kind::Bytes, Kind::Datagrams] {
        let (whole, _) = result(kind, std::iter::once(answer));
        let (pieces, taken) = result(kind, answer.chunks(usize::from(size).max(1)));
        match (whole, pieces) {
            (Some(Output::Connected { leftover }), Some(Output::Connected { leftover: mut begun })) => {
                begun.extend_from_slice(&answer[taken..]);
                assert_eq!(leftover, begun);
            }
            (whole, pieces) => assert_eq!(whole, pieces),
        }
    }
});
