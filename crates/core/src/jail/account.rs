//! What a command has reached and what was refused, and the shortest profile that allows what it has reached.

use super::Entry;
use super::entry::Target;
use crate::flow::{Host, HostName, Protocol};
use crate::policy::HostPattern;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Most rows that are kept apart.
pub const ROWS_MAX: usize = 10_000;

/// From this number of names with one parent on, a profile has a wildcard for them.
const SIBLINGS_MIN: usize = 3;

/// Most programs that a comment names.
const PROGRAMS_MAX: usize = 3;

/// One destination of one program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seen {
    /// Whether it was refused.
    pub refused: bool,
    /// The host that the program asked for.
    pub host: Host,
    /// The port. 0: only the name was asked for.
    pub port: u16,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The program, if it is known.
    pub program: Option<String>,
}

/// How often, and how much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Connections, associations, or questions about a name.
    pub flows: u64,
    /// Bytes from the program.
    pub bytes_up: u64,
    /// Bytes to the program.
    pub bytes_down: u64,
}

/// All destinations of a command, bounded.
#[derive(Clone, Debug, Default)]
pub struct Account {
    rows: BTreeMap<Seen, Counted>,
    left_out: u64,
}

impl Account {
    /// Counts one flow.
    pub fn note(&mut self, seen: Seen, bytes_up: u64, bytes_down: u64) {
        if self.rows.len() >= ROWS_MAX && !self.rows.contains_key(&seen) {
            self.left_out += 1;
            return;
        }
        let row = self.rows.entry(seen).or_default();
        row.flows += 1;
        row.bytes_up = row.bytes_up.saturating_add(bytes_up);
        row.bytes_down = row.bytes_down.saturating_add(bytes_down);
    }

    /// Returns the rows: first what was reached, then what was refused.
    pub fn rows(&self) -> impl Iterator<Item = (&Seen, &Counted)> {
        self.rows.iter()
    }

    /// Returns the number of flows that have no row, because there were more than [`ROWS_MAX`].
    pub const fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Returns a profile with the fewest entries that allow what was reached. Three names with one parent and the same port
    /// become a wildcard, unless the parent is a suffix under which strangers register names.
    pub fn profile(&self) -> String {
        let mut wanted: BTreeMap<(Host, u16, Protocol), Lines> = BTreeMap::new();
        for (seen, counted) in self.rows.iter().filter(|(seen, _)| !seen.refused) {
            let place = (seen.host.clone(), seen.port, seen.protocol);
            wanted.entry(place).or_default().add(seen.program.as_deref(), counted.flows);
        }
        let wildcards = wildcards(wanted.keys());
        let mut lines: BTreeMap<String, Lines> = BTreeMap::new();
        for ((host, port, protocol), line) in wanted {
            let covering = |(pattern, at, of): &&(HostPattern, u16, Protocol)| {
                matches!(&host, Host::Name(name) if pattern.matches(name)) && (*at, *of) == (port, protocol)
            };
            let entry = match wildcards.iter().find(covering) {
                Some((pattern, ..)) => {
                    Entry { protocol, target: Target::Name(pattern.clone()), ports: Some((port, port)) }
                }
                None => Entry::of(protocol, &host, port),
            };
            lines.entry(entry.to_string()).or_default().join(line);
        }
        let mut text =
            String::from("# What the command has reached. One entry a line; `deny ENTRY` refuses.\n");
        for (entry, line) in lines {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{entry}  # {line}");
        }
        text
    }
}

/// Who wants an entry, and how often.
#[derive(Debug, Default)]
struct Lines {
    programs: BTreeSet<String>,
    flows: u64,
}

impl Lines {
    fn add(&mut self, program: Option<&str>, flows: u64) {
        // A program chooses its name: it must not begin a line.
        let plain = |name: &str| name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        self.programs.extend(program.map(plain));
        self.flows += flows;
    }

    fn join(&mut self, other: Self) {
        self.programs.extend(other.programs);
        self.flows += other.flows;
    }
}

impl std::fmt::Display for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for program in self.programs.iter().take(PROGRAMS_MAX) {
            write!(f, "{program}, ")?;
        }
        if self.programs.len() > PROGRAMS_MAX {
            write!(f, "{} more programs, ", self.programs.len() - PROGRAMS_MAX)?;
        }
        if self.flows == 1 { f.write_str("once") } else { write!(f, "{} times", self.flows) }
    }
}

/// The wildcards that replace three names or more. A wider one comes first.
fn wildcards<'a>(
    places: impl Iterator<Item = &'a (Host, u16, Protocol)>,
) -> Vec<(HostPattern, u16, Protocol)> {
    let mut siblings: BTreeMap<(String, u16, Protocol), usize> = BTreeMap::new();
    for (host, port, protocol) in places {
        if let Host::Name(name) = host
            && let Some(parent) = parent(name)
        {
            *siblings.entry((parent.to_owned(), *port, *protocol)).or_default() += 1;
        }
    }
    let mut found: Vec<_> = siblings.into_iter().filter(|(_, names)| *names >= SIBLINGS_MIN).collect();
    found.sort_by_key(|((parent, ..), _)| parent.len());
    let pattern = |((parent, port, protocol), _): ((String, u16, Protocol), usize)| {
        Some((format!("*.{parent}").parse().ok()?, port, protocol))
    };
    found.into_iter().filter_map(pattern).collect()
}

/// The name above a name, if its owner is one: not a single label, nor two short ones such as `co.uk`.
fn parent(name: &HostName) -> Option<&str> {
    let (_, parent) = name.as_str().split_once('.')?;
    let (first, rest) = parent.split_once('.')?;
    let is_registry = !rest.contains('.') && rest.len() == 2 && first.len() <= 3;
    (!is_registry).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(account: &mut Account, refused: bool, to: &str, program: &str) {
        let to: crate::flow::Destination = to.parse().unwrap();
        let program = Some(program.to_owned());
        account.note(
            Seen { refused, host: to.host, port: to.port, protocol: Protocol::Tcp, program },
            10,
            20,
        );
    }

    #[test]
    fn a_profile_allows_what_was_reached_and_no_more_than_three_siblings_show() {
        let mut account = Account::default();
        for name in ["a", "b", "c"] {
            note(&mut account, false, &format!("{name}.files.example:443"), "pip");
            note(&mut account, false, &format!("{name}.co.uk:443"), "pip");
        }
        for to in ["x.two.example:443", "y.two.example:443", "a.files.example:80", "10.0.0.1:5432"] {
            note(&mut account, false, to, "curl");
        }
        note(&mut account, false, "b.files.example:443", "curl\n*");
        note(&mut account, false, "[2001:db8::1]:443", "curl");
        note(&mut account, true, "evil.example:443", "sh");
        let profile = account.profile();
        let lines: Vec<_> = profile.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "*.files.example:443  # curl\u{fffd}*, pip, 4 times",
                "10.0.0.1:5432  # curl, once",
                "[2001:db8::1]:443  # curl, once",
                "a.co.uk:443  # pip, once",
                "a.files.example:80  # curl, once",
                "b.co.uk:443  # pip, once",
                "c.co.uk:443  # pip, once",
                "x.two.example:443  # curl, once",
                "y.two.example:443  # curl, once",
            ]
        );
        let mut lists = super::super::Lists::default();
        lists.profile(&profile).unwrap();
        assert_eq!(lists.allow.len(), lines.len());
    }

    #[test]
    fn rows_are_bounded() {
        let mut account = Account::default();
        for n in 0..20_000_u32 {
            note(&mut account, false, &format!("10.0.{}.{}:1", n / 250, n % 250), "scan");
        }
        assert_eq!((account.rows().count(), account.left_out()), (ROWS_MAX, 10_000));
    }
}
