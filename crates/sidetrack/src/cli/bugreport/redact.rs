//! Removes secrets from a configuration and from other texts. What it does not know is removed, too.

use crate::cli::schema;
use regex::Regex;
use serde_json::Value as Json;
use std::collections::BTreeSet;
use std::sync::LazyLock;
use toml::{Table, Value};

/// What replaces a secret.
pub(super) const REMOVED: &str = "(removed)";

/// Keys whose values are secrets, or may contain some: arguments and environments of containers, words that must not leave.
const SECRET_KEYS: [&str; 6] = ["password", "environment", "metadata", "command", "deny_words", "replace"];

/// Tables whose keys are names that the user has chosen.
const NAMED: [&str; 5] = ["set", "function", "node", "names", "actions"];

/// Shorter texts are not looked for elsewhere: they would be found in the middle of words.
const SECRET_LEAST: usize = 4;

/// The part of a URL before the "@".
static LOGIN: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"://([^/@\s\x22']*)@").ok());

/// A word that announces a secret, and the secret.
static ANNOUNCED: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"(?i)\b(\w*(?:passw(?:or)?d|secret|token|authorization|cookie|api[-_]?key)\w*[\x22']?\s*[:=]\s*)(?:(?:basic|bearer)\s+)?[\x22']?[^\s\x22',;]+")
        .ok()
});

/// The secrets that a configuration has shown.
#[derive(Debug, Default)]
pub(super) struct Secrets(BTreeSet<String>);

impl Secrets {
    fn add(&mut self, text: &str) {
        let parts = text.split(':').chain([text]);
        self.0.extend(parts.filter(|part| part.len() >= SECRET_LEAST).map(str::to_owned));
    }

    /// The text without these secrets, without logins in URLs, and without what a word announces as a secret.
    pub(super) fn remove_from(&self, text: &str) -> String {
        let text = self.without_known(text);
        // Without its patterns, nothing may pass.
        let (Some(login), Some(announced)) = (LOGIN.as_ref(), ANNOUNCED.as_ref()) else {
            return REMOVED.to_owned();
        };
        let text = login.replace_all(&text, format!("://{REMOVED}@"));
        announced.replace_all(&text, format!("${{1}}{REMOVED}")).into_owned()
    }

    /// The text without the secrets of the configuration.
    fn without_known(&self, text: &str) -> String {
        let mut text = text.to_owned();
        // Longest first: a secret may contain another one.
        let mut known: Vec<_> = self.0.iter().collect();
        known.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        for secret in known {
            text = text.replace(secret.as_str(), REMOVED);
        }
        text
    }
}

/// Returns the configuration without its secrets and comments, and the secrets that it had.
///
/// # Errors
/// It is not TOML. The error has no text of the file.
pub(super) fn configuration(text: &str) -> Result<(String, Secrets), String> {
    let mut table: Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(0, |span| text.get(..span.start).unwrap_or_default().lines().count());
        format!("it is not TOML near line {line}: `sidetrack check` says more\n")
    })?;
    let mut known = BTreeSet::new();
    names(&schema::schema(), &mut known);
    let mut secrets = Secrets::default();
    hide_in(&mut table, &known, &mut secrets);
    let text = toml::to_string(&table).unwrap_or_default();
    Ok((secrets.without_known(&text), secrets))
}

/// All names of keys in the schema.
fn names(schema: &Json, known: &mut BTreeSet<String>) {
    match schema {
        Json::Object(object) => {
            if let Some(Json::Object(properties)) = object.get("properties") {
                known.extend(properties.keys().cloned());
            }
            object.values().for_each(|value| names(value, known));
        }
        Json::Array(items) => items.iter().for_each(|item| names(item, known)),
        _ => {}
    }
}

fn hide_in(table: &mut Table, known: &BTreeSet<String>, secrets: &mut Secrets) {
    for (key, value) in table.iter_mut() {
        // A misspelt key may be a password.
        if SECRET_KEYS.contains(&key.as_str()) || !known.contains(key) {
            remove(value, secrets);
        } else if let (true, Value::Table(named)) = (NAMED.contains(&key.as_str()), &mut *value) {
            named.iter_mut().for_each(|(_, value)| hide(value, known, secrets));
        } else {
            hide(value, known, secrets);
        }
    }
}

fn hide(value: &mut Value, known: &BTreeSet<String>, secrets: &mut Secrets) {
    match value {
        Value::Table(table) => hide_in(table, known, secrets),
        Value::Array(items) => items.iter_mut().for_each(|item| hide(item, known, secrets)),
        Value::String(text) => {
            if let Some(login) = LOGIN.as_ref() {
                login
                    .captures_iter(text)
                    .filter_map(|found| found.get(1))
                    .for_each(|found| secrets.add(found.as_str()));
                *text = login.replace_all(text, format!("://{REMOVED}@")).into_owned();
            }
        }
        _ => {}
    }
}

/// Replaces a value, and remembers its texts.
fn remove(value: &mut Value, secrets: &mut Secrets) {
    fn texts(value: &Value, secrets: &mut Secrets) {
        match value {
            Value::String(text) => secrets.add(text),
            Value::Array(items) => items.iter().for_each(|item| texts(item, secrets)),
            Value::Table(table) => table.values().for_each(|value| texts(value, secrets)),
            _ => {}
        }
    }
    texts(value, secrets);
    *value = Value::String(REMOVED.to_owned());
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "version = 1 # s3cret-comment\npasswort = 's3cret-misspelt'\n[[listen]]\nkind = 'socks'\naddress = '10.0.0.1:1080'\n\
        users = [{ user = 'alice', password = 's3cret-password' }]\n[function.f]\nkind = 'container'\nimage = 'localhost/a:1'\n\
        command = ['run', '--key', 's3cret-argument']\nenvironment = { KEY = 's3cret-environment' }\n[[rule]]\nname = 'r'\n\
        carrier = ['socks5://bob:s3cret-login@gw:1080', 'http://gw:3128']\n[set]\nsecret-set = '10.0.0.0/8'\n";

    #[test]
    fn a_configuration_loses_its_secrets_and_keeps_the_rest() {
        let (text, secrets) = configuration(FILE).expect("TOML");
        assert!(!text.contains("s3cret"), "{text}");
        for kept in [
            "10.0.0.1:1080",
            "alice",
            "localhost/a:1",
            "gw:1080",
            "http://gw:3128",
            "secret-set",
            "10.0.0.0/8",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        let log = "dialled s3cret-login, got 's3cret-environment' and s3cret-misspelt; port 1080";
        let said = secrets.remove_from(log);
        assert!(!said.contains("s3cret") && said.contains("port 1080"), "{said}");
    }

    #[test]
    fn other_texts_lose_what_looks_like_a_secret() {
        let secrets = Secrets::default();
        for text in [
            "GET socks5://u:hidden1234@host:1",
            "password=hidden1234",
            "\"api_key\": \"hidden1234\"",
            "Authorization: Bearer hidden1234",
            "Set-Cookie: hidden1234",
            "db_passwd = 'hidden1234', next",
        ] {
            let said = secrets.remove_from(text);
            assert!(!said.contains("hidden1234") && said.contains(REMOVED), "{text}: {said}");
        }
        assert_eq!(secrets.remove_from("flow 7 ended: ok"), "flow 7 ended: ok");
    }

    #[test]
    fn what_is_not_toml_is_not_shown() {
        let error = configuration("version = 1\npassword = 's3cret\n").expect_err("not TOML");
        assert!(!error.contains("s3cret") && error.contains("line"), "{error}");
    }

    #[test]
    fn keys_that_hold_secrets_exist() {
        let mut known = BTreeSet::new();
        names(&schema::schema(), &mut known);
        for key in SECRET_KEYS.iter().chain(&NAMED) {
            assert!(known.contains(*key), "{key}");
        }
    }
}
