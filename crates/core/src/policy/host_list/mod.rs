//! Lists of host names, with a million names and more, for the `host_file` of a rule.
//!
//! A million names take about 18 MB, and little more while they are read ([`build`]). During a reload, the old and
//! the new list exist together. A look-up searches the table for the name and for each name above it, and allocates
//! no memory ([`table`]).

mod build;
mod table;

pub use build::HostListBuilder;

use crate::flow::HostName;
use std::fmt;
use table::{Hash, Table};

/// The list contains the name itself.
const ITSELF: u8 = 1;
/// The list contains all names below it.
const BELOW: u8 = 2;
/// The list never contains the name itself, whatever other lines say.
const NOT_ITSELF: u8 = 4;
/// The list never contains a name below it.
const NOT_BELOW: u8 = 8;

/// Host names and their meanings. The text has one entry per line, in any mixture of these forms:
///
/// * `name`: that name; `*.name`: all names below it; `.name`: both;
/// * hosts(5), `0.0.0.0 name name…`: those names, except names of the local host such as `localhost`;
/// * Adblock, `||name^`: the name and all names below it; `@@||name^`: none of them, whatever other lines say.
///
/// Text behind `#` is a comment, and so is a line that begins with `!` or `[`. Lines of other forms (paths, cosmetic
/// rules, rules with options) do not describe whole hosts. They are counted and skipped.
#[derive(Clone, PartialEq, Eq)]
pub struct HostList {
    table: Table,
    skipped: usize,
}

impl HostList {
    /// Reads a list.
    pub fn parse(text: &[u8]) -> Self {
        let mut builder = HostListBuilder::default();
        builder.push(text);
        builder.finish()
    }

    /// Returns the number of names.
    pub const fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there are no names.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of skipped lines.
    pub const fn skipped(&self) -> usize {
        self.skipped
    }

    /// Returns the bytes of memory that it takes.
    pub fn memory_bytes(&self) -> usize {
        self.table.memory_bytes()
    }

    /// Whether the list contains a host.
    pub fn contains(&self, host: &HostName) -> bool {
        let host = host.as_str().as_bytes();
        let mut name = [0; HostName::MAX];
        let Some(name) = name.get_mut(..host.len()) else { return false };
        name.iter_mut().zip(host.iter().rev()).for_each(|(place, byte)| *place = *byte);
        let mut found = 0;
        let mut hash = Hash::default();
        for (at, byte) in name.iter().enumerate() {
            if *byte == b'.' {
                // The labels behind this dot form a name above the host.
                found |= (self.table.meanings(hash, &name[..at]) & (BELOW | NOT_BELOW)) >> 1;
            }
            hash.push(*byte);
        }
        found |= self.table.meanings(hash, name) & (ITSELF | NOT_ITSELF);
        found & ITSELF != 0 && found & NOT_ITSELF == 0
    }
}

impl fmt::Debug for HostList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostList({} names)", self.len())
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
        /// The table agrees with a linear search through all lines.
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

        /// No text causes a panic, and looking up what is in it causes no panic either.
        #[test]
        fn any_bytes_are_a_list(text in prop::collection::vec(any::<u8>(), 0..200), host in "[a-z.]{1,20}") {
            let list = HostList::parse(&text);
            if let Ok(host) = host.parse() {
                list.contains(&host);
            }
        }
    }

    #[test]
    fn a_list_may_come_in_pieces_of_any_size() {
        let text = b"||ads.example^\n.both.example\r\n@@||good.ads.example^\n# why\nbad line\n*.last.example";
        let whole = HostList::parse(text);
        assert_eq!((whole.len(), whole.skipped()), (4, 1));
        for size in 1..text.len() {
            let mut builder = HostListBuilder::default();
            text.chunks(size).for_each(|piece| builder.push(piece));
            assert_eq!(builder.finish(), whole, "pieces of {size}");
        }
        let mut endless = HostListBuilder::default();
        (0..40).for_each(|_| endless.push(&[b'x'; 60_000]));
        endless.push(b"\ngood.example\n");
        let list = endless.finish();
        assert_eq!((list.len(), list.skipped()), (1, 1), "a line longer than any is left out");
    }

    #[test]
    fn names_are_found_among_many_that_begin_alike_and_in_several_sorted_pieces() {
        // Every length of the shared and of the own part, on both sides of the borders of blocks and pieces.
        let name = |number: u32| {
            let length = 1 + (number % 40) as usize;
            format!("{}{number}.{}example", "a".repeat(length), "b.".repeat(number as usize % 3))
        };
        let mut text = String::new();
        for number in (0..150_000).rev() {
            text.push_str(&name(number));
            // Each name occurs twice, far apart, with two meanings.
            text.push_str(&format!("\n*.{}\n", name(number / 2)));
        }
        let list = HostList::parse(text.as_bytes());
        assert_eq!(list.len(), 150_000);
        for number in (0..150_000).step_by(7) {
            assert!(contains(&list, &name(number)), "{number}");
            assert_eq!(contains(&list, &format!("x.{}", name(number))), number < 75_000, "{number}");
            assert!(!contains(&list, &format!("x{}", name(number))) && !contains(&list, &name(number)[1..]));
        }
        let longest = format!("{}.{}", "c".repeat(200), "d".repeat(54));
        let list = HostList::parse(format!("{longest}\n{}\n", &longest[1..]).as_bytes());
        assert!(
            contains(&list, &longest) && contains(&list, &longest[1..]) && !contains(&list, &longest[2..])
        );
    }

    /// Names like those of usual lists: 20 to 30 bytes, random letters, below various domains.
    fn usual(numbers: std::ops::Range<u64>) -> String {
        let mut text = String::new();
        for number in numbers {
            let mut random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def0;
            text.push_str("||");
            for _ in 0..8 + number % 9 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                text.push(char::from(b'a' + (random >> 59) as u8 % 26));
            }
            let site = number / 7;
            text.push_str(&format!(
                ".site{site:x}.{}^\n",
                ["com", "net", "org", "de", "co.uk"][(site % 5) as usize]
            ));
        }
        text
    }

    #[test]
    fn a_million_names_take_less_than_twenty_mebibytes() {
        let text = usual(0..1_000_000);
        assert!(text.len() > 25 << 20, "{} bytes", text.len());
        let list = HostList::parse(text.as_bytes());
        assert_eq!((list.len(), list.skipped()), (1_000_000, 0));
        assert!(list.memory_bytes() < 20 << 20, "{} bytes", list.memory_bytes());
        for line in text.lines().step_by(97) {
            let name = &line[2..line.len() - 1];
            assert!(contains(&list, name) && contains(&list, &format!("www.{name}")), "{name}");
        }
        // The cost of a look-up is the number of searches in the table itself.
        let absent = (0..10_000).filter(|number| {
            let name: Vec<u8> = format!("host-{number}.example").bytes().rev().collect();
            list.table.may_have(Hash::of(&name))
        });
        let count = absent.count();
        assert!(count < 500, "the table is asked for {count} of 10,000 names that are not there");
    }
}
