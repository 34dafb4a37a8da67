//! The addresses and ports that connections to servers come from, and how workers share them.
//!
//! A server's packets must reach the worker that has the connection. So each worker owns a block of ports of every
//! address (`Port`) or its own addresses (`Ip`), as in ProxyEngine's `flow_steering`; see [`Steering::share`].

use super::packet::{Address, Tuple};
use super::slot::Slot;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::ops::RangeInclusive;

/// How a server's packets find the worker that has the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Steering {
    /// By destination port: each worker owns a block of ports.
    #[default]
    Port,
    /// By destination address: each worker owns addresses.
    Ip,
}

/// The source addresses and ports that one worker may use towards servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The worker's addresses.
    pub addresses: Vec<IpAddr>,
    /// The worker's ports on each of them.
    pub ports: RangeInclusive<u16>,
}

impl Steering {
    /// Returns the part of `addresses` and `ports` that worker `worker` of `workers` owns; none if nothing is left for
    /// it.
    ///
    /// Blocks of ports have equal size. The size is a power of two if `ports` and `workers` are, so a mask finds the
    /// worker. The shares of different workers never overlap.
    pub fn share(
        self,
        addresses: &[IpAddr],
        ports: RangeInclusive<u16>,
        worker: usize,
        workers: usize,
    ) -> Option<Share> {
        let workers = workers.max(1);
        if worker >= workers {
            return None;
        }
        let share = match self {
            Self::Ip => {
                Share { addresses: addresses.iter().skip(worker).step_by(workers).copied().collect(), ports }
            }
            Self::Port => {
                let (first, last) = (usize::from(*ports.start()), usize::from(*ports.end()));
                let block = (last + 1).checked_sub(first)? / workers;
                let start = first + block * worker;
                if block == 0 {
                    return None;
                }
                let ports = u16::try_from(start).ok()?..=u16::try_from(start + block - 1).ok()?;
                Share { addresses: addresses.to_vec(), ports }
            }
        };
        (!share.addresses.is_empty() && !share.ports.is_empty()).then_some(share)
    }
}

/// One address with its free ports. The port that has been free longest is taken first, because a server may still have
/// the last connection of a port in TIME-WAIT.
#[derive(Debug)]
struct Pool {
    address: Address,
    free: VecDeque<u16>,
    /// The slot of the connection that has each port of the range; `u32::MAX` for a free port.
    slots: Vec<u32>,
}

/// No connection has the port.
const NOBODY: u32 = u32::MAX;

/// The free sources of one worker.
#[derive(Debug)]
pub(super) struct Ports {
    pools: Vec<Pool>,
    range: RangeInclusive<u16>,
    turn: usize,
    /// Where [`Self::in_turn`] continues.
    probe: usize,
}

impl Ports {
    /// Returns all ports of a share, in an order that `seed` decides, so that outsiders cannot guess it (RFC 6056).
    pub(super) fn new(share: &Share, seed: u64) -> Self {
        let mut state = seed | 1;
        let pools = share.addresses.iter().map(|ip| {
            let mut free: Vec<u16> = share.ports.clone().collect();
            for i in (1..free.len()).rev() {
                // xorshift64*: any uniform generator is good enough.
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                let at = (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % (i + 1);
                free.swap(i, at);
            }
            let slots = vec![NOBODY; share.ports.len()];
            Pool { address: (*ip).into(), free: free.into(), slots }
        });
        Self { pools: pools.collect(), range: share.ports.clone(), turn: 0, probe: 0 }
    }

    /// Takes a free source of the same family as `server`, from each address in turn.
    #[inline]
    pub(super) fn take(&mut self, server: Address) -> Option<(Address, u16)> {
        let count = self.pools.len();
        for step in 0..count {
            let at = self.turn + step;
            let at = if at >= count { at - count } else { at };
            if let Some(pool) = self.pools.get_mut(at)
                && pool.address.is_v4() == server.is_v4()
                && let Some(port) = pool.free.pop_front()
            {
                self.turn = if at + 1 == count { 0 } else { at + 1 };
                return Some((pool.address, port));
            }
        }
        None
    }

    /// Loads the entries of the next `count` sources of [`Self::take`] from memory.
    #[inline]
    pub(super) fn next(&self, count: usize) -> u32 {
        let each = count.div_ceil(self.pools.len().max(1));
        let first = *self.range.start();
        self.pools.iter().fold(0, |all, pool| {
            let places = pool.free.iter().take(each).map(|port| usize::from(port.wrapping_sub(first)));
            places.filter_map(|at| pool.slots.get(at)).fold(all, |all, slot| all ^ slot)
        })
    }

    /// Returns the next source of the same family as `server`, whether it is free or not.
    pub(super) fn in_turn(&mut self, server: Address) -> Option<(Address, u16)> {
        let fit = |pool: &&Pool| pool.address.is_v4() == server.is_v4();
        let count = self.pools.iter().filter(fit).count();
        let at = self.probe.checked_rem(count * self.range.len())?;
        self.probe = at + 1;
        let pool = self.pools.iter().filter(fit).nth(at % count)?;
        Some((pool.address, self.range.start() + u16::try_from(at / count).ok()?))
    }

    /// Assigns a taken source to a connection.
    #[inline]
    pub(super) fn assign(&mut self, (address, port): (Address, u16), slot: Slot) {
        let at = usize::from(port.wrapping_sub(*self.range.start()));
        let pool = self.pools.iter_mut().find(|pool| pool.address == address);
        if let Some(place) = pool.and_then(|pool| pool.slots.get_mut(at)) {
            *place = slot.number();
        }
    }

    /// Returns the connection that has the destination address and port of a packet, if there is one.
    #[inline]
    pub(super) fn slot(&self, to: &Tuple) -> Option<Slot> {
        self.at(self.place(to)?)
    }

    /// Returns the place where [`Self::slot`] will look, without reading it.
    #[inline]
    pub(super) fn place(&self, to: &Tuple) -> Option<u32> {
        // Packets of clients usually go to a lower port, so they are not compared with each address.
        let port = to.local_port().checked_sub(*self.range.start())?;
        let pool = self.pools.iter().position(|pool| pool.address == to.local)?;
        Some(u32::from(u16::try_from(pool).ok()?) << 16 | u32::from(port))
    }

    /// Returns the connection in a place, if there is one.
    #[inline]
    pub(super) fn at(&self, place: u32) -> Option<Slot> {
        let pool = self.pools.get((place >> 16) as usize)?;
        pool.slots.get((place & 0xffff) as usize).copied().filter(|slot| *slot != NOBODY).map(Slot::of_number)
    }

    /// Takes a source back.
    #[inline]
    pub(super) fn give(&mut self, (address, port): (Address, u16)) {
        let at = usize::from(port.wrapping_sub(*self.range.start()));
        if let Some(pool) = self.pools.iter_mut().find(|pool| pool.address == address) {
            if let Some(place) = pool.slots.get_mut(at) {
                *place = NOBODY;
            }
            pool.free.push_back(port);
        }
    }

    /// True if a segment to this address and port can only belong to a connection to a server.
    #[inline]
    pub(super) fn owns(&self, address: Address, port: u16) -> bool {
        self.range.contains(&port) && self.pools.iter().any(|pool| pool.address == address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::net::SocketAddr;

    #[test]
    fn shares_cover_and_do_not_overlap() {
        let addresses: Vec<IpAddr> = (1..=5).map(|n| IpAddr::from([10, 0, 0, n])).collect();
        for (steering, workers) in
            [(Steering::Port, 3), (Steering::Ip, 3), (Steering::Port, 1), (Steering::Ip, 5)]
        {
            let mut all = BTreeSet::new();
            let mut count = 0;
            for worker in 0..workers {
                let share = steering.share(&addresses, 1024..=2047, worker, workers).unwrap();
                for ip in &share.addresses {
                    for port in share.ports.clone() {
                        count += 1;
                        all.insert((*ip, port));
                    }
                }
            }
            assert_eq!(all.len(), count, "{steering:?} {workers}: two workers share a source");
            assert!(count >= 5 * 1023, "{steering:?} {workers}: {count} of {}", 5 * 1024);
        }
        assert_eq!(Steering::Ip.share(&addresses, 1..=2, 5, 6), None, "an address for each worker is needed");
        assert_eq!(Steering::Port.share(&addresses, 1..=2, 0, 3), None);
        assert_eq!(Steering::Port.share(&addresses, 0xfc00..=0xffff, 1, 1), None);
    }

    #[test]
    fn a_source_is_its_connections_until_it_is_given_back() {
        let share = Share { addresses: vec!["10.0.0.1".parse().unwrap()], ports: 100..=109 };
        let mut ports = Ports::new(&share, 7);
        let server: SocketAddr = "10.9.9.9:80".parse().unwrap();
        let source = ports.take(server.ip().into()).unwrap();
        let answer = Tuple::new(server, SocketAddr::new(source.0.into(), source.1));
        assert_eq!(ports.slot(&answer), None);
        ports.assign(source, Slot::of_number(5));
        assert_eq!(ports.slot(&answer), Some(Slot::of_number(5)));
        for other in ["10.0.0.1:99", "10.0.0.1:110", "10.0.0.2:100"] {
            assert_eq!(ports.slot(&Tuple::new(server, other.parse().unwrap())), None, "{other}");
        }
        ports.give(source);
        assert_eq!(ports.slot(&answer), None);
    }

    #[test]
    fn a_port_given_back_is_taken_last() {
        let share = Share { addresses: vec!["10.0.0.1".parse().unwrap()], ports: 100..=109 };
        let mut ports = Ports::new(&share, 7);
        let server = "10.9.9.9".parse::<IpAddr>().unwrap().into();
        let first = ports.take(server).unwrap();
        assert!(ports.owns(first.0, first.1) && !ports.owns(first.0, 99));
        ports.give(first);
        let rest: Vec<_> = std::iter::from_fn(|| ports.take(server)).collect();
        assert_eq!((rest.len(), rest.last()), (10, Some(&first)));
        assert_eq!(ports.take("::1".parse::<IpAddr>().unwrap().into()), None, "another family");
        let order: Vec<_> = rest.iter().map(|(_, port)| *port).collect();
        assert!(!order.is_sorted(), "{order:?}");
    }
}
