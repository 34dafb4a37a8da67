//! Questions, answers, and templates that answers fill.

use anyhow::Context;
use std::collections::BTreeMap;
use toml::Value;

/// What an answer is in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A text.
    Text,
    /// Texts, separated by commas.
    Texts,
    /// Whole numbers, separated by commas.
    Numbers,
    /// One whole number.
    Number,
}

/// A question whose answer fills `{{key}}` of a template.
#[derive(Debug)]
pub(super) struct Question {
    /// Its name on the command line and in templates.
    pub key: &'static str,
    /// The question.
    pub asks: &'static str,
    /// The answer if the person gives none.
    pub default: &'static str,
    /// What the answer is.
    pub kind: Kind,
}

/// Answers by key, as TOML values.
pub(super) type Answers = BTreeMap<String, Value>;

impl Question {
    /// Reads an answer.
    ///
    /// # Errors
    /// It has control characters, is empty, or is not a number where one is needed.
    pub(super) fn read(&self, answer: &str) -> anyhow::Result<Value> {
        let answer = answer.trim();
        anyhow::ensure!(!answer.is_empty(), "{}: the answer is empty", self.key);
        anyhow::ensure!(
            !answer.contains(char::is_control),
            "{}: the answer has control characters",
            self.key
        );
        let number = |text: &str| {
            let number = text.parse::<u32>();
            number
                .map(|number| Value::Integer(number.into()))
                .with_context(|| format!("{}: '{text}' is not a whole number", self.key))
        };
        let parts = || answer.split(',').map(str::trim).filter(|part| !part.is_empty());
        Ok(match self.kind {
            Kind::Text => Value::String(answer.to_owned()),
            Kind::Number => number(answer)?,
            Kind::Texts => Value::Array(parts().map(|part| Value::String(part.to_owned())).collect()),
            Kind::Numbers => Value::Array(parts().map(number).collect::<anyhow::Result<_>>()?),
        })
    }
}

/// Replaces every `{{key}}` of a template by its answer, written as TOML.
///
/// # Errors
/// The template names a key without an answer.
pub(super) fn fill(template: &str, answers: &Answers) -> anyhow::Result<String> {
    let mut filled = String::with_capacity(template.len() + 256);
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (key, after) = after.split_once("}}").context("a template has an open '{{'")?;
        let answer = answers.get(key).with_context(|| format!("there is no answer for '{key}'"))?;
        filled.push_str(before);
        filled.push_str(&answer.to_string());
        rest = after;
    }
    filled.push_str(rest);
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(kind: Kind) -> Question {
        Question { key: "key", asks: "", default: "", kind }
    }

    #[test]
    fn answers_become_values_of_their_kind() {
        let read = |kind, text| question(kind).read(text).map(|value| value.to_string());
        assert_eq!(read(Kind::Text, " a \"b\" \\ ").expect("read"), r#"'a "b" \'"#);
        assert_eq!(
            read(Kind::Texts, "10.0.0.0/8, fd00::/8,").expect("read"),
            r#"["10.0.0.0/8", "fd00::/8"]"#
        );
        assert_eq!(read(Kind::Numbers, "80,443").expect("read"), "[80, 443]");
        assert_eq!(read(Kind::Number, "7").expect("read"), "7");
        for (kind, text) in
            [(Kind::Text, " "), (Kind::Text, "a\nb"), (Kind::Numbers, "80,many"), (Kind::Number, "-1")]
        {
            assert!(read(kind, text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_answer_cannot_add_lines_or_tables() {
        let answers =
            Answers::from([("key".to_owned(), question(Kind::Text).read("x\"]\\n[admin]").expect("read"))]);
        let filled = fill("a = {{key}}\n", &answers).expect("filled");
        let parsed: toml::Table = filled.parse().expect("TOML");
        assert_eq!(parsed.keys().collect::<Vec<_>>(), ["a"]);
    }

    #[test]
    fn a_template_without_an_answer_is_an_error() {
        assert!(fill("{{key}}", &Answers::new()).is_err());
        assert!(fill("{{key", &Answers::new()).is_err());
    }
}
