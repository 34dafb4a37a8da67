//! Values by key, where most owners have one key: most clients talk to one server, and the table of a SOCKS client has one client.
//! A tree has room for eleven keys from the first one on.

use std::collections::BTreeMap;

/// Values by key.
#[derive(Clone, Debug, Default)]
pub(super) enum Few<K, V = u32> {
    #[default]
    None,
    One(K, V),
    Many(BTreeMap<K, V>),
}

impl<K: Ord, V> Few<K, V> {
    /// Returns the value of a key.
    pub(super) fn get(&self, key: &K) -> Option<&V> {
        match self {
            Self::One(one, value) if one == key => Some(value),
            Self::Many(many) => many.get(key),
            Self::None | Self::One(..) => None,
        }
    }

    /// Returns the value of a key.
    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        match self {
            Self::One(one, value) if one == key => Some(value),
            Self::Many(many) => many.get_mut(key),
            Self::None | Self::One(..) => None,
        }
    }

    /// Returns any value.
    pub(super) fn any(&self) -> Option<&V> {
        match self {
            Self::None => None,
            Self::One(_, value) => Some(value),
            Self::Many(many) => many.values().next(),
        }
    }

    /// Returns the first key that is not before this one.
    pub(super) fn from(&self, key: &K) -> Option<&K> {
        match self {
            Self::One(one, _) => Some(one).filter(|one| *one >= key),
            Self::Many(many) => many.range(key..).next().map(|(one, _)| one),
            Self::None => None,
        }
    }

    /// Adds a key, unless it is there.
    pub(super) fn add(&mut self, key: K, value: V) {
        match std::mem::replace(self, Self::None) {
            Self::None => *self = Self::One(key, value),
            Self::One(one, its) if one == key => *self = Self::One(one, its),
            Self::One(one, its) => *self = Self::Many(BTreeMap::from([(one, its), (key, value)])),
            Self::Many(mut many) => {
                many.entry(key).or_insert(value);
                *self = Self::Many(many);
            }
        }
    }

    /// Removes a key.
    pub(super) fn remove(&mut self, key: &K) {
        match self {
            Self::One(one, _) if one == key => *self = Self::None,
            Self::Many(many) => {
                many.remove(key);
                if many.is_empty() {
                    *self = Self::None;
                }
            }
            Self::None | Self::One(..) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_tree() {
        // Every sequence of five steps with three keys, each to be added or removed.
        for steps in 0..6_u32.pow(5) {
            let (mut few, mut tree) = (Few::default(), BTreeMap::new());
            let mut rest = steps;
            for slot in 0..5 {
                let (key, adds) = (rest % 3, rest % 6 < 3);
                rest /= 6;
                if adds {
                    few.add(key, slot);
                    tree.entry(key).or_insert(slot);
                } else {
                    few.remove(&key);
                    tree.remove(&key);
                }
                for key in 0..4 {
                    assert_eq!(few.get(&key), tree.get(&key));
                    assert_eq!(few.get_mut(&key).copied(), tree.get(&key).copied());
                    assert_eq!(few.from(&key), tree.range(key..).next().map(|(one, _)| one));
                }
                assert_eq!(few.any(), tree.values().next());
            }
        }
    }
}
