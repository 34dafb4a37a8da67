//! Texts of agreements, taken apart and put together: what orchestrators send, and what proxies get.

use super::api::{Agreed, Application, Consent};
use anyhow::Context;
use std::collections::BTreeMap;
use toml::{Table, Value};

/// The text with consent as it was changed since.
///
/// # Errors
/// It is no TOML.
pub fn with_consent(text: &str, consent: &BTreeMap<String, Consent>) -> anyhow::Result<Table> {
    let mut document: Table = text.parse().context("the agreement is no TOML")?;
    for (data, consent) in consent {
        let data = document.get_mut("data").and_then(|all| all.get_mut(data)).and_then(Value::as_table_mut);
        let word = match consent {
            Consent::Given => "given",
            Consent::Withdrawn => "withdrawn",
        };
        if let Some(data) = data {
            data.insert("consent".to_owned(), word.into());
        }
    }
    Ok(document)
}

/// The facts alone.
pub fn without_agreements(mut document: Table) -> Table {
    document.remove("agreement");
    document
}

/// What a proxy gets: the facts, and an agreement for each movement of the applications.
pub fn agreement(mut facts: Table, applications: &[(Application, Vec<Agreed>)]) -> anyhow::Result<String> {
    let mut agreements = Vec::new();
    for (application, movements) in applications {
        for (number, agreed) in movements.iter().enumerate() {
            let one = |text: &str| Value::Array(vec![text.into()]);
            let mut table = Table::new();
            table.insert("name".to_owned(), format!("{}/{number}", application.name).into());
            table.insert("nodes".to_owned(), one(&agreed.wanted.client));
            table.insert("data".to_owned(), one(&agreed.wanted.data));
            table.insert("purpose".to_owned(), one(&application.purpose));
            table.insert("access".to_owned(), one(application.access.as_str()));
            let requires = agreed.requires.iter().map(|attribute| Value::from(attribute.as_str())).collect();
            table.insert("requires".to_owned(), Value::Array(requires));
            agreements.push(Value::Table(table));
        }
    }
    facts.remove("agreement");
    if !agreements.is_empty() {
        facts.insert("agreement".to_owned(), Value::Array(agreements));
    }
    Ok(toml::to_string(&facts)?)
}

/// What a proxy gets that knows of no application: nothing may move.
pub const NOTHING: &str = "version = 1\n";
