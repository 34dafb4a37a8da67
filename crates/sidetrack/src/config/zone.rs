//! Zones of link-local addresses (RFC 4007 Sec. 11): the interface whose link an address belongs to.

use std::borrow::Cow;
use std::net::Ipv6Addr;

/// Why a zone cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ZoneError {
    /// The address is the same host on every link.
    #[error("'{0}' has a zone that means nothing")]
    Meaningless(String),
    /// It is neither the name of an interface nor its number.
    #[error("there is no interface '{0}' on this machine")]
    NoInterface(String),
}

impl ZoneError {
    /// What to do.
    pub(crate) const fn help(&self) -> &'static str {
        match self {
            Self::Meaningless(_) => {
                "only link-local addresses (fe80::/10) have one: leave out the % and what follows it"
            }
            Self::NoInterface(_) => "`ip link` lists the interfaces of this machine",
        }
    }
}

/// Returns a text with the zone of the last `[ADDRESS%ZONE]` in it as a number: `[fe80::1%eth0]:1080` becomes
/// `[fe80::1%2]:1080`. A zone is the name of an interface, or its number. In a URL the % may be written as %25
/// (RFC 6874). Any other text is returned as it is.
///
/// # Errors
/// Fails if the address has no zones, or if there is no such interface.
pub(crate) fn numbered(
    text: &str,
    index_of: impl Fn(&str) -> Option<u32>,
) -> Result<Cow<'_, str>, ZoneError> {
    let Some((before, ip, zone, after)) = zoned(text) else { return Ok(Cow::Borrowed(text)) };
    if !ip.is_unicast_link_local() {
        return Err(ZoneError::Meaningless(format!("[{ip}%{zone}]")));
    }
    let in_url = || zone.strip_prefix("25").and_then(&index_of);
    let number = || zone.parse().ok().filter(|number| *number != 0);
    let found = index_of(zone).or_else(in_url).or_else(number);
    let index = found.ok_or_else(|| ZoneError::NoInterface(zone.to_owned()))?;
    Ok(Cow::Owned(format!("{before}[{ip}%{index}]{after}")))
}

/// Splits a text around the last `[ADDRESS%ZONE]` in it.
fn zoned(text: &str) -> Option<(&str, Ipv6Addr, &str, &str)> {
    let (before, rest) = text.rsplit_once('[')?;
    let (inner, after) = rest.split_once(']')?;
    let (ip, zone) = inner.split_once('%')?;
    Some((before, ip.parse().ok()?, zone, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index_of(name: &str) -> Option<u32> {
        (name == "eth0").then_some(7)
    }

    #[test]
    fn a_zone_becomes_the_number_of_its_interface() {
        for (text, expected) in [
            ("[fe80::1%eth0]:80", "[fe80::1%7]:80"),
            ("[fe80::1%3]:80", "[fe80::1%3]:80"),
            ("[fe80::1%25]:80", "[fe80::1%25]:80"),
            ("socks5://u:p%40@[fe80::1%25eth0]:80?tfo=true", "socks5://u:p%40@[fe80::1%7]:80?tfo=true"),
            ("http://[fe80::1%eth0]", "http://[fe80::1%7]"),
            ("[2001:db8::1]:80", "[2001:db8::1]:80"),
            ("www.example:80", "www.example:80"),
            ("[x%eth0]:80", "[x%eth0]:80"),
        ] {
            assert_eq!(numbered(text, index_of).as_deref(), Ok(expected));
        }
        let none = |zone: &str| Err(ZoneError::NoInterface(zone.to_owned()));
        for zone in ["wlan7", "", "0", "25wlan7", "-1", "4294967296"] {
            assert_eq!(numbered(&format!("[fe80::1%{zone}]:80"), index_of), none(zone));
        }
        let global = Err(ZoneError::Meaningless("[2001:db8::1%eth0]".to_owned()));
        assert_eq!(numbered("[2001:db8::1%eth0]:80", index_of), global);
    }
}
