//! A small reader of IPFIX (RFC 7011), written independently of the encoder: it knows only what templates say.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Enterprise number of the reverse direction (RFC 5103).
const REVERSE: u32 = 29_305;

/// One field of a template: element, enterprise number or 0, length.
type Field = (u16, u32, usize);

/// One record: values by element and enterprise number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record(BTreeMap<(u16, u32), Vec<u8>>);

impl Record {
    fn value(&self, element: u16, enterprise: u32) -> &[u8] {
        self.0.get(&(element, enterprise)).unwrap_or_else(|| panic!("no element {element} in {self:?}"))
    }

    fn number(&self, element: u16, enterprise: u32) -> u64 {
        self.value(element, enterprise).iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// A number of the forward direction.
    pub(crate) fn of(&self, element: u16) -> u64 {
        self.number(element, 0)
    }

    /// octetDeltaCount of both directions.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.number(1, 0), self.number(1, REVERSE))
    }

    /// packetDeltaCount of both directions, if it has them.
    pub(crate) fn packets(&self) -> Option<(u64, u64)> {
        self.0.contains_key(&(2, 0)).then(|| (self.number(2, 0), self.number(2, REVERSE)))
    }

    pub(crate) fn text(&self, element: u16, enterprise: u32) -> String {
        String::from_utf8(self.value(element, enterprise).to_vec()).expect("UTF-8")
    }

    /// An address: of one of two elements, for IPv4 and IPv6.
    pub(crate) fn address(&self, [v4, v6]: [u16; 2]) -> Option<IpAddr> {
        let v4 = self.0.get(&(v4, 0)).map(|ip| Ipv4Addr::from(<[u8; 4]>::try_from(&ip[..]).unwrap()).into());
        let v6 = self.0.get(&(v6, 0)).map(|ip| Ipv6Addr::from(<[u8; 16]>::try_from(&ip[..]).unwrap()).into());
        v4.or(v6)
    }
}

/// What a collector knows of one transport session.
#[derive(Debug, Default)]
pub(crate) struct Session {
    templates: BTreeMap<u16, Vec<Field>>,
    /// Data records so far.
    pub(crate) records: u32,
    /// Observation domain.
    pub(crate) domain: u32,
    /// Messages may be missing.
    is_lossy: bool,
}

struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        taken
    }

    fn number(&mut self, length: usize) -> u32 {
        self.take(length).iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
    }
}

impl Session {
    /// A session of which messages may be missing.
    pub(crate) fn lossy() -> Self {
        Self { is_lossy: true, ..Self::default() }
    }

    /// Reads a message, and checks its length and its sequence number.
    pub(crate) fn read(&mut self, message: &[u8]) -> Vec<Record> {
        let mut bytes = Bytes(message);
        assert_eq!((bytes.number(2), bytes.number(2) as usize), (10, message.len()));
        let _ = bytes.number(4);
        let sequence = bytes.number(4);
        assert!(
            self.is_lossy || sequence == self.records,
            "sequence number {sequence}, not {}",
            self.records
        );
        self.records = sequence;
        self.domain = bytes.number(4);
        let mut records = Vec::new();
        while !bytes.0.is_empty() {
            let (set, length) = (bytes.number(2) as u16, bytes.number(2) as usize);
            let mut content = Bytes(bytes.take(length - 4));
            while !content.0.is_empty() {
                match set {
                    2 => self.template(&mut content),
                    _ => records.push(self.record(set, &mut content)),
                }
            }
        }
        self.records += records.len() as u32;
        records
    }

    fn template(&mut self, bytes: &mut Bytes<'_>) {
        let (number, count) = (bytes.number(2) as u16, bytes.number(2));
        let fields = (0..count).map(|_| {
            let (element, length) = (bytes.number(2) as u16, bytes.number(2) as usize);
            let enterprise = if element & 0x8000 == 0 { 0 } else { bytes.number(4) };
            (element & 0x7fff, enterprise, length)
        });
        self.templates.insert(number, fields.collect());
    }

    fn record(&self, template: u16, bytes: &mut Bytes<'_>) -> Record {
        let fields =
            self.templates.get(&template).unwrap_or_else(|| panic!("template {template} is not known"));
        let values = fields.iter().map(|(element, enterprise, length)| {
            let length = match length {
                65_535 => match bytes.number(1) {
                    255 => bytes.number(2) as usize,
                    short => short as usize,
                },
                fixed => *fixed,
            };
            ((*element, *enterprise), bytes.take(length).to_vec())
        });
        Record(values.collect())
    }
}
