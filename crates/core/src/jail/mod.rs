//! The jail of `run`: lists of what a command may reach, as policy rules.
//!
//! [`Entry`] is one entry of a list, [`Lists`] both lists, read from arguments and profiles. [`Jail::policy`] compiles them to
//! rules. [`NameBudget`] bounds what questions about names can carry out. Nothing here does I/O.

mod account;
mod budget;
mod entry;
mod rules;

pub use account::{Account, Counted, ROWS_MAX, Seen};
pub use budget::{NameBudget, NameRefusal};
pub use entry::{Entry, EntryError, Target};
pub use rules::{CLOSED_RULE, Jail, RULES_MAX, TooManyRules, WOULD_REFUSE, closed_networks};

/// Most entries of both lists together.
pub const ENTRIES_MAX: usize = 10_000;

/// What a command may reach and what it may not. `deny` decides first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    /// What is allowed.
    pub allow: Vec<Entry>,
    /// What is denied even if it is allowed.
    pub deny: Vec<Entry>,
}

/// Why a list was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// An entry is wrong.
    #[error(transparent)]
    Entry(#[from] EntryError),
    /// A line of a profile is wrong.
    #[error("line {line}: {error}")]
    Line {
        /// The number of the line, from 1.
        line: usize,
        /// What is wrong.
        error: EntryError,
    },
    /// There are more than [`ENTRIES_MAX`] entries.
    #[error("more than {ENTRIES_MAX} entries: write networks or wildcards instead")]
    TooMany,
}

impl Lists {
    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.allow.is_empty() && self.deny.is_empty()
    }

    /// Adds what the argument of `--allow` lists, separated by commas or white space.
    ///
    /// # Errors
    /// An entry is wrong, or there are too many.
    pub fn allow(&mut self, text: &str) -> Result<(), ListError> {
        self.allow.extend(listed(text)?);
        self.bounded()
    }

    /// Adds what the argument of `--deny` lists.
    ///
    /// # Errors
    /// As [`Self::allow`].
    pub fn deny(&mut self, text: &str) -> Result<(), ListError> {
        self.deny.extend(listed(text)?);
        self.bounded()
    }

    /// Adds the entries of a profile: one a line, `allow ENTRY`, `deny ENTRY` or only `ENTRY`. `#` begins a comment.
    ///
    /// # Errors
    /// A line is wrong, or there are too many.
    pub fn profile(&mut self, text: &str) -> Result<(), ListError> {
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let (verb, entry) = line.split_once(char::is_whitespace).unwrap_or(("allow", line));
            let list = match verb {
                "allow" => &mut self.allow,
                "deny" => &mut self.deny,
                _ => {
                    let error = EntryError::Verb(verb.to_owned());
                    return Err(ListError::Line { line: index + 1, error });
                }
            };
            list.push(entry.parse().map_err(|error| ListError::Line { line: index + 1, error })?);
            self.bounded()?;
        }
        Ok(())
    }

    fn bounded(&self) -> Result<(), ListError> {
        if self.allow.len() + self.deny.len() > ENTRIES_MAX { Err(ListError::TooMany) } else { Ok(()) }
    }
}

/// Returns the entries of one argument.
fn listed(text: &str) -> Result<Vec<Entry>, EntryError> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let entries = words.map(str::parse).collect::<Result<Vec<_>, _>>()?;
    if entries.is_empty() { Err(EntryError::Empty) } else { Ok(entries) }
}
