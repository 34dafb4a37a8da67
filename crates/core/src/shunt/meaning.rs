//! What a number in a mark can mean.

use super::ShuntAction;
use crate::policy::FastPathKind;
use serde::de::{self, Deserialize, Deserializer, Visitor};
use std::fmt;

/// The meaning of a number in a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// An action.
    Action(ShuntAction),
    /// [`ShuntAction::Shunt`] by this fast path.
    Path(FastPathKind),
    /// Our own rules decide.
    Rules,
}

impl Meaning {
    /// All meanings.
    pub const ALL: [Self; 11] = [
        Self::Action(ShuntAction::Ignore),
        Self::Action(ShuntAction::Shunt),
        Self::Action(ShuntAction::Block),
        Self::Rules,
        Self::Path(FastPathKind::Tc),
        Self::Path(FastPathKind::Xdp),
        Self::Path(FastPathKind::XdpGeneric),
        Self::Path(FastPathKind::OpenFlow),
        Self::Path(FastPathKind::Flowtable),
        Self::Path(FastPathKind::Wire),
        Self::Path(FastPathKind::None),
    ];

    /// The words of all meanings.
    const WORDS: [&'static str; Self::ALL.len()] = {
        let mut words = [""; Self::ALL.len()];
        let mut at = 0;
        while at < words.len() {
            words[at] = Self::ALL[at].as_str();
            at += 1;
        }
        words
    };

    /// Returns its word in a configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Action(action) => action.as_str(),
            Self::Path(path) => path.as_str(),
            Self::Rules => "rules",
        }
    }
}

impl From<ShuntAction> for Meaning {
    fn from(action: ShuntAction) -> Self {
        Self::Action(action)
    }
}

impl From<FastPathKind> for Meaning {
    fn from(path: FastPathKind) -> Self {
        Self::Path(path)
    }
}

// Written by hand: `untagged` would lose the place of an error, and the words that it names.
impl<'de> Deserialize<'de> for Meaning {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Word;
        impl Visitor<'_> for Word {
            type Value = Meaning;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the meaning of a number in a mark")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Meaning, E> {
                let meaning = Meaning::ALL.into_iter().find(|meaning| meaning.as_str() == word);
                meaning.ok_or_else(|| E::unknown_variant(word, &Meaning::WORDS))
            }
        }
        deserializer.deserialize_str(Word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, StrDeserializer};

    fn word<T: for<'de> Deserialize<'de>>(word: &str) -> Result<T, Error> {
        let from: StrDeserializer<'_, Error> = word.into_deserializer();
        T::deserialize(from)
    }

    #[test]
    fn every_meaning_is_read_from_its_word() {
        for meaning in Meaning::ALL {
            assert_eq!(word::<Meaning>(meaning.as_str()), Ok(meaning));
        }
        let all = FastPathKind::ALL.map(Meaning::from).into_iter();
        let all = all.chain(ShuntAction::ALL.map(Meaning::from)).chain([Meaning::Rules]);
        assert!(
            all.clone().all(|meaning| Meaning::ALL.contains(&meaning)) && all.count() == Meaning::ALL.len()
        );
        let error = word::<Meaning>("slow").expect_err("no such word").to_string();
        assert!(error.starts_with("unknown variant `slow`, expected one of `ignore`, "), "{error}");
    }

    #[test]
    fn a_fast_path_has_one_word() {
        for path in FastPathKind::ALL {
            assert_eq!(word::<FastPathKind>(path.as_str()), Ok(path));
        }
    }
}
