//! Sends many datagrams to one neighbour with few system calls: datagrams of equal length leave as a train (`UDP_SEGMENT`,
//! udp(7)).

use super::Datagrams;
use super::link::{Link, Route};
use sidetrack_core::overlay::datagram::mtu;
use sidetrack_core::overlay::frame::Frame;
use sidetrack_sys::udp::batch::{Target, send_train};
use std::sync::atomic::Ordering::Relaxed;

/// Most datagrams of a train (UDP_MAX_SEGMENTS of Linux), and most bytes: the longest payload of UDP over IPv4.
const DATAGRAMS_MAX: usize = 64;
const BYTES_MAX: usize = 65_507;

/// Datagrams that wait to leave together. All have the same length, but the last one may be shorter.
#[derive(Debug, Default)]
pub(crate) struct Train {
    bytes: Vec<u8>,
    /// The length of the first datagram.
    segment: usize,
    count: usize,
}

impl Train {
    /// Whether a datagram of this length may follow.
    fn takes(&self, length: usize) -> bool {
        let is_full = self.count >= DATAGRAMS_MAX || self.bytes.len() + length > BYTES_MAX;
        // A shorter datagram ends the train.
        let is_even = self.bytes.len() == self.segment * self.count;
        self.count == 0 || !is_full && is_even && length <= self.segment
    }

    fn clear(&mut self) {
        self.bytes.clear();
        (self.segment, self.count) = (0, 0);
    }
}

impl Datagrams {
    /// Sends frames to a neighbour, in their order. What the system does not accept is lost, as on any path of UDP.
    pub(crate) fn send_batch(
        &self,
        link: &Link,
        route: Route,
        frames: impl Iterator<Item = Frame>,
        train: &mut Train,
    ) {
        let mut datagram = Vec::new();
        for frame in frames {
            datagram.clear();
            if !link.seal_onto(&frame, &mut datagram) {
                continue;
            }
            if !train.takes(datagram.len()) {
                self.leave_station(link, route, train);
            }
            if train.count == 0 {
                train.segment = datagram.len();
            }
            train.bytes.extend_from_slice(&datagram);
            train.count += 1;
        }
        self.leave_station(link, route, train);
    }

    fn leave_station(&self, link: &Link, route: Route, train: &mut Train) {
        if train.count == 0 {
            return;
        }
        let target = Target { to: route.to, from: Some(route.from).filter(|ip| !ip.is_unspecified()) };
        let sent = match self.sockets.get(route.socket) {
            Some(socket) => send_train(socket, &train.bytes, train.segment, &target),
            None => Err(std::io::ErrorKind::NotFound.into()),
        };
        let counter = if sent.is_ok() { &self.counters.sent } else { &self.counters.unsent };
        counter.fetch_add(train.count as u64, Relaxed);
        if sent.is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE)) {
            for probe in link.search(self.clock.now(), mtu::Input::TooLarge(train.segment)) {
                self.send_on(link, &probe);
            }
        }
        train.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_train_has_equal_datagrams_and_one_shorter_one_at_its_end() {
        let mut train = Train { bytes: vec![0; 2_800], segment: 1_400, count: 2 };
        assert!(train.takes(1_400) && train.takes(100) && !train.takes(1_401));
        train.bytes.extend([0; 100]);
        train.count += 1;
        assert!(!train.takes(100), "the shorter one is the last");
        train.clear();
        assert!(train.takes(60_000));
        let full = Train { bytes: vec![0; 64 * 10], segment: 10, count: 64 };
        assert!(!full.takes(10));
        let long = Train { bytes: vec![0; 60_000], segment: 30_000, count: 2 };
        assert!(!long.takes(6_000) && long.takes(5_000));
    }
}
