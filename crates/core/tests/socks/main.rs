//! SOCKS 5 and 6: wire formats, both ends of every handshake, and what peers may send that they should not.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod drive;
mod golden;
mod network;
mod pairs;
mod peers;
mod random;
mod replies;
mod sessions;
mod splits;

/// Bytes from hexadecimal digits; anything else is left out.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// A destination; unlike its `FromStr` also with port 0.
fn to(text: &str) -> sidetrack_core::flow::Destination {
    match text.strip_suffix(":0") {
        Some(host) => sidetrack_core::flow::Destination { port: 0, ..format!("{host}:1").parse().unwrap() },
        None => text.parse().unwrap(),
    }
}

/// `user:password`.
fn account(text: &str) -> sidetrack_core::carrier::Credentials {
    let (user, password) = text.split_once(':').unwrap();
    sidetrack_core::carrier::Credentials { user: user.into(), password: password.into() }
}
