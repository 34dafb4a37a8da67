//! Building netlink requests.

use std::borrow::Cow;
use std::net::IpAddr;

use super::{HEADER, align, flag};

/// `NLA_F_NESTED`: the attribute holds attributes.
const NESTED: u16 = 0x8000;

/// One or more netlink messages that leave in one system call.
///
/// Sequence numbers count from 0 here; [`super::Socket`] shifts them to its own when it sends.
#[derive(Debug, Default)]
pub struct Requests {
    bytes: Vec<u8>,
    heads: Vec<usize>,
    asked: Vec<Cow<'static, str>>,
    too_large: bool,
}

impl Requests {
    /// No message yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a message: `asked` says in words what it asks for (behind "to"), `header` is the fixed part behind `nlmsghdr`,
    /// `write` adds the attributes. The flag REQUEST is added. Returns the index of the message.
    pub fn push(
        &mut self,
        asked: impl Into<Cow<'static, str>>,
        kind: u16,
        flags: u16,
        header: &[u8],
        write: impl FnOnce(&mut AttributeWriter<'_>),
    ) -> usize {
        let start = self.bytes.len();
        let sequence = u32::try_from(self.heads.len()).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(&0u32.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&(flags | flag::REQUEST).to_ne_bytes());
        self.bytes.extend_from_slice(&sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&0u32.to_ne_bytes());
        self.bytes.extend_from_slice(header);
        pad(&mut self.bytes);
        let mut writer = AttributeWriter { bytes: &mut self.bytes, too_large: false };
        write(&mut writer);
        self.too_large |= writer.too_large;
        let length = u32::try_from(self.bytes.len() - start).unwrap_or_else(|_| {
            self.too_large = true;
            0
        });
        put(&mut self.bytes, start, &length.to_ne_bytes());
        self.heads.push(start);
        self.asked.push(asked.into());
        self.heads.len() - 1
    }

    /// Asks for an acknowledgement of the message with this index.
    pub fn acknowledge(&mut self, index: usize) {
        let Some(at) = self.heads.get(index).map(|head| head + 6) else { return };
        let flags = self.flags_at(at) | flag::ACK;
        put(&mut self.bytes, at, &flags.to_ne_bytes());
    }

    /// How many messages there are.
    pub fn len(&self) -> usize {
        self.heads.len()
    }

    /// Whether there is no message.
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// What the message with this index asks for.
    pub fn asked(&self, index: usize) -> Cow<'static, str> {
        self.asked.get(index).cloned().unwrap_or(Cow::Borrowed("do something else"))
    }

    /// How many messages ask for an acknowledgement.
    pub fn acknowledged(&self) -> usize {
        self.heads.iter().filter(|head| self.flags_at(**head + 6) & flag::ACK != 0).count()
    }

    /// The bytes with `first` as sequence number of the first message; `None` if a length did not fit its field.
    pub fn to_bytes(&self, first: u32) -> Option<Vec<u8>> {
        if self.too_large {
            return None;
        }
        let mut bytes = self.bytes.clone();
        for (index, head) in self.heads.iter().enumerate() {
            let sequence = first.wrapping_add(u32::try_from(index).unwrap_or(u32::MAX));
            put(&mut bytes, head + 8, &sequence.to_ne_bytes());
        }
        Some(bytes)
    }

    fn flags_at(&self, at: usize) -> u16 {
        match self.bytes.get(at..at + 2) {
            Some([low, high]) => u16::from_ne_bytes([*low, *high]),
            _ => 0,
        }
    }
}

/// Writes the attributes of one message.
#[derive(Debug)]
pub struct AttributeWriter<'a> {
    bytes: &'a mut Vec<u8>,
    too_large: bool,
}

impl AttributeWriter<'_> {
    /// An attribute with these bytes.
    pub fn bytes(&mut self, kind: u16, payload: &[u8]) {
        self.attribute(kind, |writer| writer.bytes.extend_from_slice(payload));
    }

    /// An attribute without payload.
    pub fn flag(&mut self, kind: u16) {
        self.bytes(kind, &[]);
    }

    /// A text with its final NUL.
    pub fn text(&mut self, kind: u16, text: &str) {
        self.attribute(kind, |writer| {
            writer.bytes.extend_from_slice(text.as_bytes());
            writer.bytes.push(0);
        });
    }

    /// One byte.
    pub fn u8(&mut self, kind: u16, value: u8) {
        self.bytes(kind, &[value]);
    }

    /// Two bytes in network order.
    pub fn u16_be(&mut self, kind: u16, value: u16) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// Four bytes in network order.
    pub fn u32_be(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// Four bytes in host order.
    pub fn u32_ne(&mut self, kind: u16, value: u32) {
        self.bytes(kind, &value.to_ne_bytes());
    }

    /// Eight bytes in network order.
    pub fn u64_be(&mut self, kind: u16, value: u64) {
        self.bytes(kind, &value.to_be_bytes());
    }

    /// An address: 4 or 16 bytes in network order.
    pub fn address(&mut self, kind: u16, address: IpAddr) {
        match address {
            IpAddr::V4(v4) => self.bytes(kind, &v4.octets()),
            IpAddr::V6(v6) => self.bytes(kind, &v6.octets()),
        }
    }

    /// An attribute that holds attributes.
    pub fn nested(&mut self, kind: u16, write: impl FnOnce(&mut Self)) {
        self.attribute(kind | NESTED, write);
    }

    /// The bytes of the message so far: with it a caller can stay below the limit of 65,535 bytes per attribute.
    pub fn written(&self) -> usize {
        self.bytes.len()
    }

    fn attribute(&mut self, kind: u16, write: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&0u16.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        write(self);
        match u16::try_from(self.bytes.len() - start) {
            Ok(length) => put(self.bytes, start, &length.to_ne_bytes()),
            Err(_) => self.too_large = true,
        }
        pad(self.bytes);
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(align(bytes.len()), 0);
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

const _: () = assert!(HEADER == 16, "push() writes 16 header bytes");

#[cfg(test)]
mod tests {
    use super::super::{attributes, messages};
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        let mut requests = Requests::new();
        requests.push("do one", 7, flag::ACK, &[1, 2], |a| {
            a.text(1, "abc");
            a.nested(2, |n| {
                n.u8(3, 9);
                n.u16_be(4, 0x1234);
            });
        });
        requests.push("do two", 8, 0, &[], |a| a.u64_be(5, 6));
        let bytes = requests.to_bytes(100).expect("fits");
        let read: Vec<_> = messages(&bytes).collect::<Result<_, _>>().expect("well formed");
        assert_eq!(read.len(), 2);
        assert_eq!((read[0].kind, read[0].flags, read[0].sequence), (7, flag::ACK | flag::REQUEST, 100));
        assert_eq!((read[1].kind, read[1].sequence), (8, 101));
        let inner: Vec<_> = attributes(read[0].after(2)).collect();
        assert_eq!(inner[0].text(), Some("abc"));
        let nested: Vec<_> = attributes(inner[1].payload).collect();
        assert_eq!((inner[1].kind, nested[0].u8(), nested[1].u16_be()), (2, Some(9), Some(0x1234)));
        assert_eq!(attributes(read[1].after(0)).next().and_then(|a| a.u64_be()), Some(6));
    }

    #[test]
    fn an_attribute_over_64_kib_is_refused() {
        let mut requests = Requests::new();
        requests.push("do it", 1, 0, &[], |a| a.nested(1, |n| (0..9).for_each(|_| n.bytes(1, &[0; 8000]))));
        assert_eq!(requests.to_bytes(0), None);
    }

    #[test]
    fn acknowledgements_are_counted() {
        let mut requests = Requests::new();
        requests.push("do one", 1, 0, &[], |_| {});
        let last = requests.push("do two", 1, 0, &[], |_| {});
        assert_eq!(requests.acknowledged(), 0);
        requests.acknowledge(last);
        assert_eq!((requests.acknowledged(), requests.asked(last).as_ref()), (1, "do two"));
    }
}
