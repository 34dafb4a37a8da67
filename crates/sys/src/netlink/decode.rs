//! Reading netlink messages. Bytes may be anything: nothing here panics or reads past the end.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{HEADER, Malformed, Refusal, align, flag, kind};

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// `nlmsg_type`.
    pub kind: u16,
    /// `nlmsg_flags`, see [`flag`].
    pub flags: u16,
    /// `nlmsg_seq`: that of the request it answers, 0 for an event.
    pub sequence: u32,
    /// `nlmsg_pid`: the port of the socket whose request it answers or whose change it reports.
    pub port: u32,
    /// Everything behind the header.
    pub payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// The attributes part: what lies behind a fixed header of `header` bytes.
    pub fn after(&self, header: usize) -> &'a [u8] {
        self.payload.get(align(header)..).unwrap_or_default()
    }

    /// For kind ERROR and for a DONE with an error: `None` is an acknowledgement, else the refusal.
    /// `asked` is left empty.
    pub fn verdict(&self) -> Result<Option<Refusal>, Malformed> {
        let code = self.payload.first_chunk::<4>().map(|bytes| i32::from_ne_bytes(*bytes));
        match code {
            None if self.kind == kind::DONE => Ok(None),
            None => Err(Malformed::Short),
            Some(code) if code >= 0 => Ok(None),
            Some(code) => Ok(Some(Refusal {
                asked: "".into(),
                errno: code.checked_neg().unwrap_or(i32::MAX),
                explanation: self.explanation(),
            })),
        }
    }

    /// The text of an extended acknowledgement (`NLMSGERR_ATTR_MSG`).
    fn explanation(&self) -> Option<String> {
        const TEXT: u16 = 1;
        if self.flags & flag::ACK_ATTRIBUTES == 0 {
            return None;
        }
        let skip = match self.kind {
            kind::DONE => 4,
            _ if self.flags & flag::CAPPED != 0 => 4 + HEADER,
            _ => {
                let length = self.payload.get(4..8)?.first_chunk::<4>()?;
                4 + align(usize::try_from(u32::from_ne_bytes(*length)).ok()?)
            }
        };
        let text = attributes(self.payload.get(skip..)?).find(|a| a.kind == TEXT)?;
        Some(text.text()?.chars().filter(|c| !c.is_control()).take(200).collect())
    }
}

/// The messages in what one receive call brought.
pub fn messages(bytes: &[u8]) -> Messages<'_> {
    Messages { rest: bytes }
}

/// Iterator over messages; after an error it ends.
#[derive(Clone, Debug)]
pub struct Messages<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let rest = std::mem::take(&mut self.rest);
        let Some(header) = rest.first_chunk::<HEADER>() else { return Some(Err(Malformed::Short)) };
        let [l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, p0, p1, p2, p3] = *header;
        let length = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        if length < HEADER {
            return Some(Err(Malformed::Length));
        }
        let Some(payload) = rest.get(HEADER..length) else { return Some(Err(Malformed::Short)) };
        self.rest = rest.get(align(length)..).unwrap_or_default();
        Some(Ok(Message {
            kind: u16::from_ne_bytes([k0, k1]),
            flags: u16::from_ne_bytes([f0, f1]),
            sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
            port: u32::from_ne_bytes([p0, p1, p2, p3]),
            payload,
        }))
    }
}

/// One attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// `nla_type` without its two flag bits.
    pub kind: u16,
    /// The bytes behind its header.
    pub payload: &'a [u8],
}

impl<'a> Attribute<'a> {
    /// One byte.
    pub fn u8(&self) -> Option<u8> {
        self.payload.first().copied()
    }

    /// Two bytes in network order.
    pub fn u16_be(&self) -> Option<u16> {
        self.payload.first_chunk().map(|b| u16::from_be_bytes(*b))
    }

    /// Four bytes in network order.
    pub fn u32_be(&self) -> Option<u32> {
        self.payload.first_chunk().map(|b| u32::from_be_bytes(*b))
    }

    /// Four bytes in host order.
    pub fn u32_ne(&self) -> Option<u32> {
        self.payload.first_chunk().map(|b| u32::from_ne_bytes(*b))
    }

    /// Eight bytes in network order.
    pub fn u64_be(&self) -> Option<u64> {
        self.payload.first_chunk().map(|b| u64::from_be_bytes(*b))
    }

    /// An address, told by its length.
    pub fn address(&self) -> Option<IpAddr> {
        match self.payload.len() {
            4 => self.payload.first_chunk::<4>().map(|b| Ipv4Addr::from(*b).into()),
            16 => self.payload.first_chunk::<16>().map(|b| Ipv6Addr::from(*b).into()),
            _ => None,
        }
    }

    /// A text up to its first NUL; `None` if it is not UTF-8.
    pub fn text(&self) -> Option<&'a str> {
        let end = self.payload.iter().position(|b| *b == 0).unwrap_or(self.payload.len());
        std::str::from_utf8(self.payload.get(..end)?).ok()
    }

    /// The attributes inside.
    pub fn nested(&self) -> Attributes<'a> {
        attributes(self.payload)
    }
}

/// The attributes in these bytes.
pub fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes { rest: bytes }
}

/// Iterator over attributes; it ends at the first one whose length does not fit.
#[derive(Clone, Debug)]
pub struct Attributes<'a> {
    rest: &'a [u8],
}

impl<'a> Attributes<'a> {
    /// The first attribute of this kind.
    pub fn first(mut self, kind: u16) -> Option<Attribute<'a>> {
        self.find(|attribute| attribute.kind == kind)
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Attribute<'a>;

    fn next(&mut self) -> Option<Attribute<'a>> {
        let rest = std::mem::take(&mut self.rest);
        let [l0, l1, k0, k1] = *rest.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let payload = rest.get(4..length)?;
        self.rest = rest.get(align(length)..).unwrap_or_default();
        Some(Attribute { kind: u16::from_ne_bytes([k0, k1]) & 0x3fff, payload })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refusal(flags: u16, tail: &[u8]) -> Vec<u8> {
        let mut payload = (-libc::EPERM).to_ne_bytes().to_vec();
        payload.extend_from_slice(&20u32.to_ne_bytes());
        payload.extend_from_slice(&[0; 12]);
        payload.extend_from_slice(tail);
        let mut bytes = u32::try_from(16 + payload.len()).expect("small").to_ne_bytes().to_vec();
        bytes.extend_from_slice(&kind::ERROR.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&payload);
        bytes
    }

    #[test]
    fn a_refusal_keeps_the_kernels_words() {
        let text = b"\x08\x00\x01\x00no\n\x00";
        let capped = refusal(flag::CAPPED | flag::ACK_ATTRIBUTES, text);
        let full = refusal(flag::ACK_ATTRIBUTES, &[&[0u8; 4][..], text].concat());
        let bare = refusal(0, text);
        for (bytes, words) in [(capped, Some("no")), (full, Some("no")), (bare, None)] {
            let message = messages(&bytes).next().expect("one").expect("well formed");
            let refusal = message.verdict().expect("readable").expect("negative");
            assert_eq!((refusal.errno, refusal.explanation.as_deref()), (libc::EPERM, words));
        }
    }

    #[test]
    fn broken_lengths_end_the_reading() {
        assert_eq!(messages(&[1; 15]).next(), Some(Err(Malformed::Short)));
        let mut zero = vec![0; 32];
        assert_eq!(messages(&zero).next(), Some(Err(Malformed::Length)));
        zero[0] = 33;
        let mut iterator = messages(&zero);
        assert_eq!(iterator.next(), Some(Err(Malformed::Short)));
        assert_eq!(iterator.next(), None);
        assert_eq!(attributes(&[3, 0, 1, 0]).next(), None);
        assert_eq!(attributes(&[9, 0, 1, 0, 0, 0, 0, 0]).next(), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for message in messages(&bytes).flatten() {
                let _ = message.verdict();
                for attribute in attributes(message.after(4)) {
                    let _ = (attribute.u64_be(), attribute.text(), attribute.address(), attribute.nested().count());
                }
            }
            let _ = attributes(&bytes).count();
        }

        #[test]
        fn refusals_with_any_tail_are_read_without_panic(tail in proptest::collection::vec(any::<u8>(), 0..64), flags: u16) {
            let bytes = refusal(flags, &tail);
            for message in messages(&bytes) {
                let _ = message.expect("well formed").verdict();
            }
        }
    }
}
