//! Logins that failed: each one delays the next attempt from the same address. Time is an argument.
//!
//! ```text
//! unknown --fails--> waits 1 s --fails--> waits 2 s --fails--> … waits 60 s      (an attempt meanwhile is refused)
//!    ^                   |                    |                     |
//!    +---- logs in, or 15 min without a failure, or 1024 later addresses failed ----+
//! ```

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Most addresses that are known. For one more, the one that failed the longest time ago is forgotten.
const ADDRESSES_MAX: usize = 1024;
/// The delay after the first failure. It doubles with each further one.
const FIRST: Duration = Duration::from_secs(1);
/// The longest delay.
const LONGEST: Duration = Duration::from_secs(60);
/// Time without a failure after which an address starts anew.
const FORGET: Duration = Duration::from_mins(15);

#[derive(Debug)]
struct Failures {
    count: u32,
    last: Instant,
}

impl Failures {
    fn delay(&self) -> Duration {
        FIRST.saturating_mul(1 << (self.count - 1).min(16)).min(LONGEST)
    }
}

/// The addresses whose logins failed.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    known: HashMap<IpAddr, Failures>,
}

/// The addresses of one IPv6 /64 count as one.
fn key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) => Ipv6Addr::from_bits(six.to_bits() >> 64 << 64).into(),
        four @ IpAddr::V4(_) => four,
    }
}

impl Attempts {
    /// How long the next attempt from this address must wait. Zero: it may come now.
    pub(super) fn wait(&self, address: IpAddr, now: Instant) -> Duration {
        let known = self.known.get(&key(address));
        known.map_or(Duration::ZERO, |failures| {
            (failures.last + failures.delay()).saturating_duration_since(now)
        })
    }

    /// Notes a failure. Returns how many there were in a row.
    pub(super) fn failed(&mut self, address: IpAddr, now: Instant) -> u32 {
        let address = key(address);
        if !self.known.contains_key(&address) && self.known.len() >= ADDRESSES_MAX {
            let oldest =
                self.known.iter().min_by_key(|(_, failures)| failures.last).map(|(address, _)| *address);
            oldest.and_then(|oldest| self.known.remove(&oldest));
        }
        let failures = self.known.entry(address).or_insert(Failures { count: 0, last: now });
        if now.saturating_duration_since(failures.last) >= FORGET {
            failures.count = 0;
        }
        failures.count += 1;
        failures.last = now;
        failures.count
    }

    /// Notes a login.
    pub(super) fn succeeded(&mut self, address: IpAddr) {
        self.known.remove(&key(address));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_a_minute_and_is_forgotten() {
        let (address, mut now) = (IpAddr::from([192, 0, 2, 1]), Instant::now());
        let mut attempts = Attempts::default();
        let mut delays = Vec::new();
        for count in 1..=8 {
            assert_eq!(attempts.wait(address, now), Duration::ZERO);
            assert_eq!(attempts.failed(address, now), count);
            delays.push(attempts.wait(address, now).as_secs());
            now += attempts.wait(address, now);
        }
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(attempts.wait([192, 0, 2, 2].into(), now), Duration::ZERO, "another address");
        assert_eq!(attempts.failed(address, now + FORGET), 1);
        attempts.succeeded(address);
        assert_eq!(attempts.wait(address, now), Duration::ZERO);
    }

    #[test]
    fn a_network_of_one_host_is_one_and_the_table_is_bounded() {
        let now = Instant::now();
        let mut attempts = Attempts::default();
        attempts.failed("2001:db8::1".parse().unwrap(), now);
        assert_eq!(attempts.failed("2001:db8::2".parse().unwrap(), now), 2);
        assert_eq!(attempts.failed("::ffff:192.0.2.1".parse().unwrap(), now), 1);
        assert_eq!(attempts.failed("192.0.2.1".parse().unwrap(), now), 2);
        for n in 0..3000_u32 {
            attempts.failed(std::net::Ipv4Addr::from_bits(n).into(), now + Duration::from_millis(n.into()));
        }
        assert_eq!(attempts.known.len(), ADDRESSES_MAX);
        assert!(attempts.known.contains_key(&IpAddr::from([0, 0, 11, 183])));
    }
}
