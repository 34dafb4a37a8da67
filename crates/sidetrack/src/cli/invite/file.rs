//! Changes to the text of a configuration file that a person wrote: comments and order stay.

use crate::config::{At, List};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Returns the path of a file that a configuration names.
pub(super) fn beside(config: &Path, file: &str) -> PathBuf {
    config.parent().unwrap_or(Path::new("")).join(file)
}

/// The parts of a configuration that invitations change, with their places. All else is skipped.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Places {
    #[serde(default)]
    pub listen: Vec<Listen>,
    #[serde(default)]
    pub tunnel: Vec<Tunnel>,
    pub overlay: Option<Overlay>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Listen {
    pub name: Option<String>,
    pub kind: Option<String>,
    pub identity: Option<String>,
    pub pins: Option<List<String>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Tunnel {
    pub name: Option<String>,
    pub identity: Option<String>,
    pub pins: Option<List<String>>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Overlay {
    pub name: Option<String>,
    pub key_file: Option<String>,
    #[serde(default)]
    pub node: BTreeMap<String, Node>,
    #[serde(default)]
    pub topology: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Node {
    pub key: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Edge {
    pub ends: Option<[String; 2]>,
}

impl Places {
    /// Finds them in a text that `check` has accepted.
    ///
    /// # Errors
    /// The text is not TOML.
    pub(super) fn of(text: &str) -> anyhow::Result<Self> {
        Ok(toml::from_str(text)?)
    }
}

/// Returns the text with one more item at the beginning of a list, so that a comment behind an item stays with it.
pub(super) fn with_item(text: &str, list: &List<String>, item: &str) -> String {
    let item = toml::Value::String(item.to_owned()).to_string();
    let insert = |at: usize, what: &str| {
        let (before, after) = text.split_at_checked(at).unwrap_or((text, ""));
        format!("{before}{what}{after}")
    };
    let Range { start, end } = list.span();
    match list.items().first().map(At::span) {
        // One value without brackets.
        Some(first) if first == list.span() => {
            let value = text.get(first).unwrap_or_default();
            let (before, after) =
                (text.get(..start).unwrap_or_default(), text.get(end..).unwrap_or_default());
            format!("{before}[{item}, {value}]{after}")
        }
        Some(first) => {
            let line =
                text.get(..first.start).and_then(|before| before.rsplit('\n').next()).unwrap_or_default();
            let is_alone = line.trim().is_empty() && start + 1 < first.start;
            insert(first.start, &if is_alone { format!("{item},\n{line}") } else { format!("{item}, ") })
        }
        None => insert(start + 1, &item),
    }
}

/// Returns the text with a block behind it.
pub(super) fn with_block(text: &str, block: &str) -> String {
    let text = text.trim_end_matches('\n');
    if text.is_empty() { block.to_owned() } else { format!("{text}\n\n{block}") }
}

/// Returns a key of TOML.
pub(super) fn key(name: &str) -> String {
    let is_bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if is_bare { name.to_owned() } else { value(name) }
}

/// Returns a text as TOML writes it.
pub(super) fn value(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// Returns texts as TOML writes a list, or one text without brackets.
pub(super) fn values<T: ToString>(texts: &[T]) -> String {
    match texts {
        [one] => value(&one.to_string()),
        texts => {
            let all: Vec<_> = texts.iter().map(|text| value(&text.to_string())).collect();
            format!("[{}]", all.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(pins: &str) -> String {
        let text = format!("a = 1 # one\n[[listen]]\npins = {pins} # last\n[b]\n");
        let places = Places::of(&text).expect("TOML");
        let new = with_item(&text, places.listen[0].pins.as_ref().expect("a list"), "new");
        let items: Vec<_> = Places::of(&new).expect("TOML").listen[0]
            .pins
            .iter()
            .flat_map(|list| list.items().iter().map(|item| item.to_string()).collect::<Vec<_>>())
            .collect();
        assert!(items.contains(&"new".to_owned()), "{new}");
        new.trim_start_matches("a = 1 # one\n[[listen]]\npins = ")
            .trim_end_matches(" # last\n[b]\n")
            .to_owned()
    }

    #[test]
    fn an_item_comes_first_and_comments_stay() {
        assert_eq!(added("[\"x\"]"), "[\"new\", \"x\"]");
        assert_eq!(added("'x'"), "[\"new\", 'x']");
        assert_eq!(added("[]"), "[\"new\"]");
        assert_eq!(added("[ # all\n]"), "[\"new\" # all\n]");
        assert_eq!(
            added("[\n    \"x\", # of x\n    \"y\", # of y\n]"),
            "[\n    \"new\",\n    \"x\", # of x\n    \"y\", # of y\n]"
        );
    }

    #[test]
    fn names_become_keys_and_values() {
        assert_eq!((key("a-1_b"), key("a.b"), key("")), ("a-1_b".into(), "\"a.b\"".into(), "\"\"".into()));
        assert_eq!(values(&["a"]), "\"a\"");
        assert_eq!(values(&["a", "b"]), "[\"a\", \"b\"]");
    }
}
