//! Stack options of SOCKS6 (draft-12, "Stack Options"): sets what a client asks for on a socket, and reports
//! what is in force.

use sidetrack_core::socks::v6::{Leg, StackOption};
use sidetrack_sys::sockopt;
use std::os::fd::AsFd;

/// Returns the options for this leg, with only this leg in them. Options that name no leg are for the leg
/// towards the destination.
pub fn about(options: &[StackOption], leg: Leg) -> Vec<StackOption> {
    let is_about = |of: Leg| of == leg || of == Leg::Both;
    let part = |option: &StackOption| match *option {
        StackOption::Tos(of, class) => is_about(of).then_some(StackOption::Tos(leg, class)),
        StackOption::Ttl(of, limit) => is_about(of).then_some(StackOption::Ttl(leg, limit)),
        StackOption::NoFragmentation(of, yes) => {
            is_about(of).then_some(StackOption::NoFragmentation(leg, yes))
        }
        other => (leg == Leg::Remote).then_some(other),
    };
    options.iter().filter_map(part).collect()
}

/// Sets the options about the packets of one connection, and returns what is in force. Options that cannot be
/// set are left out, which the draft defines as refused.
pub fn set(socket: impl AsFd, options: &[StackOption]) -> Vec<StackOption> {
    let done = |option: &StackOption| match *option {
        StackOption::Tos(leg, class) => {
            sockopt::set_traffic_class(&socket, class).ok().map(|class| StackOption::Tos(leg, class))
        }
        StackOption::Ttl(leg, limit) => {
            sockopt::set_hop_limit(&socket, limit).ok().map(|limit| StackOption::Ttl(leg, limit))
        }
        StackOption::NoFragmentation(leg, avoid) => {
            let done = sockopt::set_dont_fragment(&socket, avoid);
            done.ok().map(|avoided| StackOption::NoFragmentation(leg, avoided))
        }
        _ => None,
    };
    options.iter().filter_map(done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legs_are_told_apart() {
        let asked = [
            StackOption::Tos(Leg::Both, 8),
            StackOption::Ttl(Leg::Client, 9),
            StackOption::NoFragmentation(Leg::Remote, true),
            StackOption::Tfo(0),
        ];
        assert_eq!(about(&asked, Leg::Client), [StackOption::Tos(Leg::Client, 8), asked[1]]);
        assert_eq!(about(&asked, Leg::Remote), [StackOption::Tos(Leg::Remote, 8), asked[2], asked[3]]);
    }
}
