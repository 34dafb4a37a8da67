//! Stack options of SOCKS6 (draft-12, "Stack Options"): what a client asks of a socket, done, and told as it is.

use sidetrack_core::socks::v6::{Leg, StackOption};
use sidetrack_sys::sockopt;
use std::os::fd::AsFd;

/// The options that are about this leg, as if they were about it alone. Options without a choice of leg are about the
/// one towards the destination.
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

/// Sets what is about the packets of one connection, and says what is in force. What cannot be set is not answered,
/// which the draft reads as refused.
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
