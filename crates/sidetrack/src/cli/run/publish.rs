//! `run --publish`: a port of this host that leads to a server of the command.

use crate::app::Publish;
use std::net::{IpAddr, Ipv4Addr};

/// Why the text is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}': write [ADDRESS:]PORT[:PORT], such as 8080, 8080:80, 0.0.0.0:8080:80 or [::1]:8080:80")]
pub(super) struct PublishError(String);

/// Reads the argument of `--publish`.
///
/// # Errors
/// It is not two ports with an address; says what to write.
pub(super) fn read(text: &str) -> Result<Publish, PublishError> {
    let wrong = || PublishError(text.to_owned());
    let (ip, ports) = divided(text).ok_or_else(wrong)?;
    let (outer, inner) = ports.split_once(':').unwrap_or((ports, ports));
    let port =
        |text: &str| text.parse::<u16>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    let (outer, inner) =
        (port(outer).ok_or_else(wrong)?, port(inner).filter(|port| *port != 0).ok_or_else(wrong)?);
    Ok(Publish { at: (ip, outer).into(), port: inner })
}

/// The address, 127.0.0.1 if none is written, and the ports.
fn divided(text: &str) -> Option<(IpAddr, &str)> {
    if let Some(rest) = text.strip_prefix('[') {
        let (ip, ports) = rest.split_once("]:")?;
        return Some((IpAddr::V6(ip.parse().ok()?), ports));
    }
    match text.split_once(':') {
        Some((ip, ports)) if ip.contains('.') => Some((IpAddr::V4(ip.parse().ok()?), ports)),
        _ => Some((Ipv4Addr::LOCALHOST.into(), text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_with_and_without_an_address() {
        for (text, at, port) in [
            ("8080", "127.0.0.1:8080", 8080),
            ("8080:80", "127.0.0.1:8080", 80),
            ("0:80", "127.0.0.1:0", 80),
            ("0.0.0.0:8080", "0.0.0.0:8080", 8080),
            ("192.0.2.1:8080:80", "192.0.2.1:8080", 80),
            ("[::1]:8080:80", "[::1]:8080", 80),
            ("[::]:8080", "[::]:8080", 8080),
        ] {
            assert_eq!(read(text), Ok(Publish { at: at.parse().unwrap(), port }), "{text}");
        }
        for text in [
            "",
            "0",
            "8080:0",
            "8080:80:80",
            "65536",
            "http",
            "host:80",
            "::1:80",
            "[::1]8080",
            "+80",
            "127.0.0.1:",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
