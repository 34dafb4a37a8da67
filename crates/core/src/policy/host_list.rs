//! Lists of host names, a million and more: what a rule's `host_file` names.
//!
//! All names lie in one text, one behind the other; a table of 32-bit hashes with their places finds them. A look-up asks
//! the table once for the name and once for each name above it, and allocates nothing.

use crate::flow::HostName;
use std::fmt;

/// A name is meant itself.
const ITSELF: u8 = 1;
/// All names below it are meant.
const BELOW: u8 = 2;
/// The name itself is never meant, whatever else the list says.
const NOT_ITSELF: u8 = 4;
/// No name below it is ever meant.
const NOT_BELOW: u8 = 8;

/// Most bytes of all names together.
const TEXT_MAX: usize = 1 << 30;

/// Host names, and how they are meant. Made from text with one entry a line, in any mixture of these forms:
///
/// * `name`: that name; `*.name`: all names below it; `.name`: both;
/// * hosts(5), `0.0.0.0 name name…`: those names (and none of this host's own, such as `localhost`);
/// * Adblock, `||name^`: the name and all below it; `@@||name^`: neither, whatever else the list says.
///
/// What follows `#` is a comment, and so are lines that begin with `!` or `[`. Lines of other forms (paths, cosmetic rules,
/// rules with options) say nothing about whole hosts: they are counted and left out.
#[derive(Clone, PartialEq, Eq)]
pub struct HostList {
    /// Meanings and length (two bytes), then the name, for each.
    text: Vec<u8>,
    /// Hash and place + 1 of a name; 0 is empty. The size is a power of two, at most half full.
    slots: Vec<(u32, u32)>,
    names: usize,
    skipped: usize,
}

/// A line that is no entry.
struct Foreign;

impl HostList {
    /// Reads a list.
    pub fn parse(text: &[u8]) -> Self {
        let mut list = Self { text: Vec::new(), slots: vec![(0, 0); 16], names: 0, skipped: 0 };
        for line in text.split(|byte| *byte == b'\n') {
            if list.line(line).is_err() {
                list.skipped += 1;
            }
        }
        list.text.shrink_to_fit();
        list
    }

    /// How many names it has.
    pub fn len(&self) -> usize {
        self.names
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.names == 0
    }

    /// How many lines said something else than which hosts are meant.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Bytes of memory that it takes.
    pub fn memory_bytes(&self) -> usize {
        self.text.capacity() + self.slots.capacity() * size_of::<(u32, u32)>()
    }

    /// Whether a host is one of those meant.
    pub fn contains(&self, host: &HostName) -> bool {
        let host = host.as_str().as_bytes();
        let mut found = 0;
        let mut hash = Hash::default();
        for at in (0..host.len()).rev() {
            if host[at] == b'.' {
                // All of its labels behind this dot are a name above it.
                found |= (self.meanings(hash, &host[at + 1..]) & (BELOW | NOT_BELOW)) >> 1;
            }
            hash.push(host[at]);
        }
        found |= self.meanings(hash, host) & (ITSELF | NOT_ITSELF);
        found & ITSELF != 0 && found & NOT_ITSELF == 0
    }

    fn line(&mut self, line: &[u8]) -> Result<(), Foreign> {
        let line = line.split(|byte| *byte == b'#').next().unwrap_or_default().trim_ascii();
        if line.is_empty() || matches!(line, [b'!' | b'[', ..]) {
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix(b"@@||") {
            return self.whole_domain(rest, NOT_ITSELF | NOT_BELOW);
        }
        if let Some(rest) = line.strip_prefix(b"||") {
            return self.whole_domain(rest, ITSELF | BELOW);
        }
        let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let first = words.next().unwrap_or_default();
        let is_address =
            std::str::from_utf8(first).is_ok_and(|text| text.parse::<std::net::IpAddr>().is_ok());
        if is_address {
            return words.filter(|word| !is_own(word)).try_for_each(|name| self.add(name, ITSELF));
        }
        match (words.next(), first) {
            (Some(_), _) => Err(Foreign),
            (None, [b'*', b'.', name @ ..]) => self.add(name, BELOW),
            (None, [b'.', name @ ..]) => self.add(name, ITSELF | BELOW),
            (None, name) => self.add(name, ITSELF),
        }
    }

    /// `name^`, with nothing behind it.
    fn whole_domain(&mut self, rest: &[u8], meanings: u8) -> Result<(), Foreign> {
        self.add(rest.strip_suffix(b"^").ok_or(Foreign)?, meanings)
    }

    fn add(&mut self, name: &[u8], meanings: u8) -> Result<(), Foreign> {
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte) || !byte.is_ascii();
        if !name.iter().all(is_name) {
            return Err(Foreign);
        }
        let name = HostName::from_bytes(name).map_err(|_| Foreign)?;
        let name = name.as_str().as_bytes();
        let mut hash = Hash::default();
        name.iter().rev().for_each(|byte| hash.push(*byte));
        if let Some(place) = self.place(hash, name) {
            self.text[place] |= meanings;
            return Ok(());
        }
        let place = u32::try_from(self.text.len() + 1).ok().filter(|_| self.text.len() < TEXT_MAX);
        let place = place.ok_or(Foreign)?;
        if (self.names + 1) * 2 > self.slots.len() {
            self.grow();
        }
        // A host name has at most 253 bytes.
        self.text.extend([meanings, u8::try_from(name.len()).map_err(|_| Foreign)?]);
        self.text.extend_from_slice(name);
        put(&mut self.slots, (hash.value(), place));
        self.names += 1;
        Ok(())
    }

    fn grow(&mut self) {
        let mut slots = vec![(0, 0); self.slots.len() * 2];
        self.slots.iter().filter(|slot| slot.1 != 0).for_each(|slot| put(&mut slots, *slot));
        self.slots = slots;
    }

    fn meanings(&self, hash: Hash, name: &[u8]) -> u8 {
        self.place(hash, name).map_or(0, |place| self.text[place])
    }

    /// Where a name lies in the text.
    fn place(&self, hash: Hash, name: &[u8]) -> Option<usize> {
        let (mask, wanted) = (self.slots.len() - 1, hash.value());
        let mut at = wanted as usize & mask;
        loop {
            let (hash, place) = self.slots[at];
            let place = (place as usize).checked_sub(1)?;
            if hash == wanted && self.name_at(place) == name {
                return Some(place);
            }
            at = (at + 1) & mask;
        }
    }

    fn name_at(&self, place: usize) -> &[u8] {
        let start = place + 2;
        &self.text[start..start + usize::from(self.text[place + 1])]
    }
}

/// Puts a name's place into the first free slot from its own on.
fn put(slots: &mut [(u32, u32)], slot: (u32, u32)) {
    let mask = slots.len() - 1;
    let mut at = slot.0 as usize & mask;
    while slots[at].1 != 0 {
        at = (at + 1) & mask;
    }
    slots[at] = slot;
}

/// Names that stand for this host in hosts(5), and lists begin with.
fn is_own(name: &[u8]) -> bool {
    const OWN: [&[u8]; 5] = [b"localhost", b"localhost.localdomain", b"local", b"broadcasthost", b"0.0.0.0"];
    OWN.iter().any(|own| name.eq_ignore_ascii_case(own)) || name.starts_with(b"ip6-")
}

/// A hash of a name's bytes from its end on, so that those of all names above it come with its own (FNV-1a, 64 bits,
/// then mixed).
#[derive(Clone, Copy)]
struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    fn push(&mut self, byte: u8) {
        self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }

    const fn value(self) -> u32 {
        ((self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
    }
}

impl fmt::Debug for HostList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostList({} names)", self.names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn contains(list: &HostList, host: &str) -> bool {
        list.contains(&host.parse().unwrap())
    }

    #[test]
    fn every_form_means_what_its_users_mean() {
        let list = HostList::parse(
            b"# a comment\n! another\n[Adblock Plus 2.0]\n\nplain.example  # why\r\n*.below.example\n.both.example\n\
              0.0.0.0 one.example two.example\n127.0.0.1 localhost\n::1 ip6-localhost\nfe80::1%lo0 nowhere\n\
              ||ads.example^\n@@||good.ads.example^\n||path.example/banner\n||options.example^$third-party\n\
              site.example##.advert\nUPPER.Example.\n",
        );
        for (host, is_meant) in [
            ("plain.example", true),
            ("www.plain.example", false),
            ("below.example", false),
            ("a.b.below.example", true),
            ("both.example", true),
            ("www.both.example", true),
            ("notboth.example", false),
            ("one.example", true),
            ("two.example", true),
            ("localhost", false),
            ("ads.example", true),
            ("x.ads.example", true),
            ("good.ads.example", false),
            ("www.good.ads.example", false),
            ("path.example", false),
            ("options.example", false),
            ("upper.example", true),
            ("example", false),
        ] {
            assert_eq!(contains(&list, host), is_meant, "{host}");
        }
        assert_eq!((list.len(), list.skipped()), (9, 3), "the three lines that are not about whole hosts");
        assert!(HostList::parse(b"").is_empty() && !contains(&HostList::parse(b""), "a.example"));
    }

    proptest! {
        /// The table agrees with a look through all lines.
        #[test]
        fn it_is_what_its_lines_say(
            lines in prop::collection::vec(("(\\*\\.|\\.|\\|\\||@@\\|\\|)?", "[ab]{1,2}(\\.[ab]{1,2}){0,2}"), 0..40),
            host in "[ab]{1,2}(\\.[ab]{1,2}){0,3}",
        ) {
            let text: String = lines
                .iter()
                .map(|(form, name)| format!("{form}{name}{}\n", if form.ends_with('|') { "^" } else { "" }))
                .collect();
            let means = |form: &str, name: &str| {
                let (is_it, is_below) = (host == name, host.ends_with(&format!(".{name}")));
                match form {
                    "" => is_it,
                    "*." => is_below,
                    _ => is_it || is_below,
                }
            };
            let any = |excepts: bool| {
                lines.iter().any(|(form, name)| form.starts_with('@') == excepts && means(form, name))
            };
            prop_assert_eq!(contains(&HostList::parse(text.as_bytes()), &host), any(false) && !any(true));
        }

        /// No text panics, and whatever is found in it is asked for without a panic.
        #[test]
        fn any_bytes_are_a_list(text in prop::collection::vec(any::<u8>(), 0..200), host in "[a-z.]{1,20}") {
            let list = HostList::parse(&text);
            if let Ok(host) = host.parse() {
                list.contains(&host);
            }
        }
    }

    #[test]
    fn a_million_names_take_less_than_a_hundred_mebibytes() {
        let mut text = String::new();
        for number in 0..1_000_000_u32 {
            // As long as those of the usual lists: 20 to 30 bytes.
            text.push_str(&format!("||tracker-{number}.advertising.example^\n"));
        }
        let list = HostList::parse(text.as_bytes());
        assert_eq!(list.len(), 1_000_000);
        assert!(list.memory_bytes() < 100 << 20, "{} bytes", list.memory_bytes());
        assert!(contains(&list, "www.tracker-999999.advertising.example"));
        assert!(!contains(&list, "www.tracker-1000000.advertising.example"));
        let probes = |host: &str| {
            // What a look-up costs is how many slots it sees.
            let (mut seen, mut hash) = (0, Hash::default());
            for byte in host.bytes().rev() {
                hash.push(byte);
            }
            let mask = list.slots.len() - 1;
            let mut at = hash.value() as usize & mask;
            while list.slots[at].1 != 0 {
                (seen, at) = (seen + 1, (at + 1) & mask);
            }
            seen
        };
        let all: usize = (0..10_000).map(|number| probes(&format!("host-{number}.example"))).sum();
        assert!(all < 20_000, "{all} slots are looked at for 10,000 names that are not there");
    }
}
