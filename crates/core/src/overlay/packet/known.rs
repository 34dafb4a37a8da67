//! The conversations of an interceptor as bytes: another process of the same node goes on with them.
//!
//! ```text
//! known   = version:u8 ours theirs denied              all numbers are big-endian
//! table   = count:u32 entry*                           the one that was silent for longest is the first
//! entry   = flags:u8 source destination node:u64
//! address = ip port:u16                                4 bytes of IP, or 16 with the flag V6
//! ```
//!
//! Verdicts do not move: the rules of the other process are asked again.

use super::{CONVERSATIONS_MAX, Decided, Ends, Interceptor, Transport};
use crate::overlay::NodeId;
use crate::overlay::recent::Recent;
use std::net::{IpAddr, SocketAddr};

/// The version that this program writes and reads.
const VERSION: u8 = 1;

/// Most bytes of the conversations: of three full tables.
pub const KNOWN_MAX: usize = 1 + 3 * (4 + CONVERSATIONS_MAX * (1 + 2 * 18 + 8));

/// Bits of the flags.
const UDP: u8 = 1;
const V6: u8 = 2;

/// Why bytes are not the conversations of an interceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KnownError {
    /// A later program has written them.
    #[error("the conversations have format {0}, and this program reads format {VERSION}")]
    Version(u8),
    /// They end too early, or too late.
    #[error("the conversations do not have their length")]
    Length,
    /// A flag that this format does not have, or the same conversation twice.
    #[error("the conversations contradict themselves")]
    Contradiction,
}

fn write<V>(bytes: &mut Vec<u8>, table: &Recent<V>, node: impl Fn(&V) -> NodeId) {
    let count = bytes.len();
    bytes.extend([0; 4]);
    let mut entries = 0_u32;
    for (Ends { transport, source, destination }, value) in table.oldest_first() {
        let udp = if *transport == Transport::Udp { UDP } else { 0 };
        bytes.push(udp | if source.is_ipv6() { V6 } else { 0 });
        for end in [source, destination] {
            match end.ip() {
                IpAddr::V4(ip) => bytes.extend(ip.octets()),
                IpAddr::V6(ip) => bytes.extend(ip.octets()),
            }
            bytes.extend(end.port().to_be_bytes());
        }
        bytes.extend(node(value).0.to_be_bytes());
        entries += 1;
    }
    bytes[count..count + 4].copy_from_slice(&entries.to_be_bytes());
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], KnownError> {
    let (taken, rest) = bytes.split_first_chunk().ok_or(KnownError::Length)?;
    *bytes = rest;
    Ok(*taken)
}

fn address(bytes: &mut &[u8], is_v6: bool) -> Result<SocketAddr, KnownError> {
    let ip = if is_v6 { IpAddr::from(take::<16>(bytes)?) } else { IpAddr::from(take::<4>(bytes)?) };
    Ok(SocketAddr::new(ip, u16::from_be_bytes(take(bytes)?)))
}

fn read<V>(bytes: &mut &[u8], value: impl Fn(NodeId) -> V) -> Result<Recent<V>, KnownError> {
    let count = u32::from_be_bytes(take(bytes)?) as usize;
    let mut table = Recent::new(CONVERSATIONS_MAX);
    if count > CONVERSATIONS_MAX {
        return Err(KnownError::Length);
    }
    for _ in 0..count {
        let [flags] = take(bytes)?;
        let transport = if flags & UDP == 0 { Transport::Tcp } else { Transport::Udp };
        let (source, destination) = (address(bytes, flags & V6 != 0)?, address(bytes, flags & V6 != 0)?);
        let node = NodeId(u64::from_be_bytes(take(bytes)?));
        let ends = Ends { transport, source, destination };
        if flags & !(UDP | V6) != 0 || table.get(&ends).is_some() {
            return Err(KnownError::Contradiction);
        }
        table.put(ends, value(node));
    }
    Ok(table)
}

impl Interceptor {
    /// Returns the conversations that it has seen, for [`Interceptor::know`].
    pub fn known(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        write(&mut bytes, &self.ours, |node| *node);
        write(&mut bytes, &self.theirs, |known| known.node);
        write(&mut bytes, &self.denied, |known| known.node);
        bytes
    }

    /// Goes on with the conversations that another interceptor has seen, instead of its own.
    ///
    /// # Errors
    /// The bytes are not from [`Interceptor::known`]. Nothing has changed then.
    pub fn know(&mut self, mut bytes: &[u8]) -> Result<(), KnownError> {
        let bytes = &mut bytes;
        match take(bytes)? {
            [VERSION] => {}
            [other] => return Err(KnownError::Version(other)),
        }
        let decided = |node| Decided { node, generation: None, verdict: Ok(()) };
        let ours = read(bytes, |node| node)?;
        let (theirs, denied) = (read(bytes, decided)?, read(bytes, decided)?);
        if !bytes.is_empty() {
            return Err(KnownError::Length);
        }
        (self.ours, self.theirs, self.denied) = (ours, theirs, denied);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Refused;
    use super::super::tests::{FAR, SYN, answer_to, catch, never};
    use super::*;

    /// An interceptor that has seen three conversations: `SYN` begins one here, the other side begins one that is allowed (port 80) and
    /// one that is denied (port 23).
    fn seen() -> Interceptor {
        let mut seen = Interceptor::new(vec![catch("10.0.0.0/8", None)]);
        assert!(seen.outgoing(&SYN).is_some());
        let (mut allowed, mut denied) = (SYN, SYN);
        (allowed[23], denied[23]) = (80, 23);
        assert!(seen.incoming(FAR, &allowed, |_| Ok(())).is_ok());
        assert!(seen.incoming(FAR, &denied, |_| Err(Refused::Denied)).is_err());
        seen
    }

    #[test]
    fn the_bytes_are_fixed_and_every_cut_is_refused() {
        let bytes = seen().known();
        let far = [0, 0, 0, 0, 0, 0, 0, 7];
        let expected = [
            &[1, 0, 0, 0, 1, 0, 10, 2, 0, 3, 0, 22, 10, 1, 0, 2, 0x9c, 0x40][..],
            &far,
            &[0, 0, 0, 1, 0, 10, 1, 0, 2, 0x9c, 0x40, 10, 2, 0, 3, 0, 80],
            &far,
            &[0, 0, 0, 1, 0, 10, 1, 0, 2, 0x9c, 0x40, 10, 2, 0, 3, 0, 23],
            &far,
        ];
        assert_eq!(bytes, expected.concat());
        let fresh = || Interceptor::new(Vec::new());
        for length in 0..bytes.len() {
            assert_eq!(fresh().know(&bytes[..length]), Err(KnownError::Length), "{length} bytes");
        }
        assert_eq!(fresh().know(&[&bytes[..], &[0]].concat()), Err(KnownError::Length));
        let changed = |at: usize, to: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = to;
            fresh().know(&bytes)
        };
        assert_eq!(changed(0, 2), Err(KnownError::Version(2)));
        assert_eq!(changed(1, 1), Err(KnownError::Length), "more than a table holds");
        assert_eq!(changed(5, 4), Err(KnownError::Contradiction));
        let twice = [&[1, 0, 0, 0, 2][..], &bytes[5..26], &bytes[5..26]].concat();
        assert_eq!(fresh().know(&twice), Err(KnownError::Contradiction));
        let mut again = fresh();
        assert_eq!((again.know(&bytes), again.known()), (Ok(()), bytes));
    }

    #[test]
    fn conversations_go_on_and_rules_are_asked_again() {
        let mut next = Interceptor::new(vec![catch("10.0.0.0/8", None)]);
        next.know(&seen().known()).unwrap();
        let answer = answer_to(&SYN, 0x10);
        assert!(next.incoming(FAR, &answer, never).is_ok(), "the answer to what began here");
        let mut theirs = SYN;
        theirs[23] = 80;
        // What their server says later has not become a beginning of ours, so the new rules hold.
        assert!(next.outgoing(&answer_to(&theirs, 0x10)).is_some());
        theirs[33] = 0x10;
        assert_eq!(next.incoming(FAR, &theirs, |_| Err(Refused::Denied)), Err(Refused::Denied));
        assert_eq!(next.incoming(FAR, &theirs, never), Err(Refused::Denied));
    }
}
