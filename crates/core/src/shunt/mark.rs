//! The mark with which the packet filter's rules and the shunt communicate (layout of NFShunt, Sec. II-B).
//!
//! | bits | meaning |
//! |---|---|
//! | `0x40000000`, `0x0f000000` | the ingress port of the flow's first packet is known; its number |
//! | `0x20000000`, `0x00f00000` | the egress port is known; its number |
//! | `0x10000000`, `0x000f0000` | policy has decided; the number of the action |
//! | `0x80000000` | a flow table of the kernel may forward the flow; only the shunt sets it, if that is the fast path |
//! | `0x0000ffff` | reserved for the administrator, never changed |

use super::Meaning;
use crate::policy::FastPathKind;
use std::fmt;

/// The number of a port in a mark: 0 to 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortNumber(u8);

impl PortNumber {
    /// Most ports that marks can distinguish.
    pub const COUNT: u8 = 16;

    /// Makes a port number. `None` if it is not below [`PortNumber::COUNT`].
    pub const fn new(number: u8) -> Option<Self> {
        if number < Self::COUNT { Some(Self(number)) } else { None }
    }

    /// Returns the number.
    pub const fn number(self) -> u8 {
        self.0
    }
}

impl fmt::Display for PortNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The decision of policy about a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShuntAction {
    /// The flow stays on the slow path.
    Ignore,
    /// The flow takes the fast path.
    Shunt,
    /// The fast path drops the flow.
    Block,
}

impl ShuntAction {
    /// All actions, in the order of the numbers in NFShunt's configuration (`mark_actions`).
    pub const ALL: [Self; 3] = [Self::Ignore, Self::Shunt, Self::Block];

    /// Returns the word of configuration and listings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ignore => "ignore",
            Self::Shunt => "shunt",
            Self::Block => "block",
        }
    }

    /// Returns the action with this name.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.as_str() == word)
    }
}

/// The meanings of the numbers in a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkActions([Option<Meaning>; 16]);

impl Default for MarkActions {
    /// 0 ignore, 1 shunt, 2 block, 3 our own rules.
    fn default() -> Self {
        let mut actions = [None; 16];
        let meanings = ShuntAction::ALL.into_iter().map(Meaning::Action).chain([Meaning::Rules]);
        for (slot, meaning) in actions.iter_mut().zip(meanings) {
            *slot = Some(meaning);
        }
        Self(actions)
    }
}

impl MarkActions {
    /// Makes a table in which no number has a meaning.
    pub const fn none() -> Self {
        Self([None; 16])
    }

    /// Gives a number below 16 a meaning. Returns false if the number is larger.
    pub fn set(&mut self, number: u8, meaning: impl Into<Meaning>) -> bool {
        match self.0.get_mut(usize::from(number)) {
            Some(slot) => {
                *slot = Some(meaning.into());
                true
            }
            None => false,
        }
    }

    fn meaning(&self, number: u8) -> Option<Meaning> {
        self.0.get(usize::from(number)).copied().flatten()
    }

    /// Returns the action of a number.
    pub fn action(&self, number: u8) -> Option<ShuntAction> {
        match self.meaning(number) {
            Some(Meaning::Action(action)) => Some(action),
            Some(Meaning::Path(_)) => Some(ShuntAction::Shunt),
            Some(Meaning::Rules) | None => None,
        }
    }

    /// Returns the fast path that a number names, if it names one.
    pub fn path(&self, number: u8) -> Option<FastPathKind> {
        match self.meaning(number) {
            Some(Meaning::Path(path)) => Some(path),
            _ => None,
        }
    }

    /// Returns the numbers that name a fast path, and the fast paths.
    pub fn paths(&self) -> impl Iterator<Item = (u8, FastPathKind)> {
        (0..PortNumber::COUNT).filter_map(|number| Some((number, self.path(number)?)))
    }

    /// Whether a number leaves flows to our own rules.
    pub fn asks_rules(&self, number: u8) -> bool {
        self.meaning(number) == Some(Meaning::Rules)
    }

    fn lowest(&self, meaning: Meaning) -> Option<u8> {
        let at = self.0.iter().position(|slot| *slot == Some(meaning))?;
        u8::try_from(at).ok()
    }

    /// Returns the lowest number with this action.
    pub fn number(&self, action: ShuntAction) -> Option<u8> {
        self.lowest(Meaning::Action(action))
    }

    /// Returns the lowest number that leaves flows to our own rules.
    pub fn rules_number(&self) -> Option<u8> {
        self.lowest(Meaning::Rules)
    }
}

/// A connection mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark(pub u32);

impl Mark {
    /// The bit that is set if the ingress port is known.
    pub const INGRESS_KNOWN: u32 = 0x4000_0000;
    /// The bit that is set if the egress port is known.
    pub const EGRESS_KNOWN: u32 = 0x2000_0000;
    /// The bit that is set if policy has decided. If it is cleared, the rules decide again.
    pub const DECIDED: u32 = 0x1000_0000;
    /// All bits that must be set before the shunt can act.
    pub const COMPLETE: u32 = Self::INGRESS_KNOWN | Self::EGRESS_KNOWN | Self::DECIDED;

    /// Returns the ingress port of the client's packets.
    pub const fn ingress(self) -> Option<PortNumber> {
        if self.0 & Self::INGRESS_KNOWN == 0 { None } else { Some(PortNumber(((self.0 >> 24) & 0xf) as u8)) }
    }

    /// Returns the egress port of the client's packets.
    pub const fn egress(self) -> Option<PortNumber> {
        if self.0 & Self::EGRESS_KNOWN == 0 { None } else { Some(PortNumber(((self.0 >> 20) & 0xf) as u8)) }
    }

    /// Returns the number of the action, if policy has decided.
    pub const fn action(self) -> Option<u8> {
        if self.0 & Self::DECIDED == 0 { None } else { Some(((self.0 >> 16) & 0xf) as u8) }
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_the_original_rule_set_are_read() {
        let read = |mark| {
            let mark = Mark(mark);
            (mark.ingress().map(PortNumber::number), mark.egress().map(PortNumber::number), mark.action())
        };
        assert_eq!(read(0x6120_1234), (Some(1), Some(2), None), "after the SYN");
        assert_eq!(read(0x7121_1234), (Some(1), Some(2), Some(1)), "shunt");
        assert_eq!(read(0x7120_1234), (Some(1), Some(2), Some(0)), "ignore");
        assert_eq!(read(0x4f00_0000), (Some(15), None, None));
        assert_eq!(read(0x8000_ffff), (None, None, None), "the administrator's");
        assert_eq!(read(0x6000_0000), (Some(0), Some(0), None), "number 0 is a port");
    }

    #[test]
    fn actions_have_the_numbers_of_the_original_unless_said_otherwise() {
        let actions = MarkActions::default();
        assert_eq!(actions.action(1), Some(ShuntAction::Shunt));
        assert_eq!(actions.number(ShuntAction::Block), Some(2));
        assert_eq!((actions.action(3), actions.asks_rules(3), actions.asks_rules(4)), (None, true, false));
        assert_eq!((actions.rules_number(), MarkActions::none().rules_number()), (Some(3), None));
        let mut own = MarkActions::none();
        assert!(own.set(9, ShuntAction::Shunt) && !own.set(16, ShuntAction::Block));
        assert_eq!((own.action(9), own.number(ShuntAction::Ignore)), (Some(ShuntAction::Shunt), None));
        assert!(own.set(4, FastPathKind::OpenFlow) && !own.set(16, FastPathKind::Tc));
        assert_eq!((own.action(4), own.path(4)), (Some(ShuntAction::Shunt), Some(FastPathKind::OpenFlow)));
        assert_eq!((own.path(9), own.number(ShuntAction::Shunt)), (None, Some(9)), "9 names none");
        assert_eq!(own.paths().collect::<Vec<_>>(), [(4, FastPathKind::OpenFlow)]);
        assert!(ShuntAction::ALL.iter().all(|action| ShuntAction::of_word(action.as_str()) == Some(*action)));
    }
}
