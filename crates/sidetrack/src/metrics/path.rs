//! How a flow's bytes are carried, in words of labels.

use crate::live::Decided;
use sidetrack_core::carrier::{Carrier, HopProtocol};
use sidetrack_core::flow::Intercept;
use sidetrack_core::policy::Action;

/// How a flow's bytes are carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Path {
    Direct,
    Proxy,
    Overlay,
    Kernel,
}

impl Path {
    /// Returns its word.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Proxy => "proxy",
            Self::Overlay => "overlay",
            Self::Kernel => "kernel",
        }
    }
}

/// Returns how it is carried. `None` if it is denied.
pub(super) fn path(decided: &Decided) -> Option<Path> {
    match decided.action()? {
        Action::Deny => None,
        Action::Carry(_) if decided.flow.intercept == Intercept::Kernel => Some(Path::Kernel),
        Action::Carry(carry) => Some(match carry.carrier {
            Carrier::Direct => Path::Direct,
            Carrier::Hops(_) | Carrier::Tunnel(_) => Path::Proxy,
            Carrier::Overlay(_) => Path::Overlay,
        }),
    }
}

/// Returns the protocol of the first hop, or `tunnel`, `direct`, `kernel`, `overlay`, `none`.
pub(super) fn carrier(decided: Option<&Decided>) -> &'static str {
    let Some((decided, path)) = decided.and_then(|decided| Some((decided, path(decided)?))) else {
        return "none";
    };
    let Some(Action::Carry(carry)) = decided.action() else { return "none" };
    match &carry.carrier {
        Carrier::Hops(hops) if path == Path::Proxy => {
            hops.first().map_or("direct", |hop| match hop.protocol {
                HopProtocol::Socks5 => "socks5",
                HopProtocol::Socks6(_) => "socks6",
                HopProtocol::Http => "http",
                HopProtocol::Https => "https",
                HopProtocol::Http3 => "h3",
            })
        }
        Carrier::Tunnel(_) if path == Path::Proxy => "tunnel",
        _ => path.as_str(),
    }
}
