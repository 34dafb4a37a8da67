//! Reads and writes the texts of agreements: facts, which orchestrators send, and agreements, which proxies
//! get.

use super::api::{Agreed, Application, Consent};
use anyhow::Context;
use std::collections::BTreeMap;
use toml::{Table, Value};

/// Returns the text with the later changes of consent applied.
///
/// # Errors
/// Fails if the text is not TOML.
pub(super) fn with_consent(text: &str, consent: &BTreeMap<String, Consent>) -> anyhow::Result<Table> {
    let mut document: Table = text.parse().context("the agreement is not TOML")?;
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

/// Returns a document with facts only: its agreements are removed.
pub(super) fn without_agreements(mut document: Table) -> Table {
    document.remove("agreement");
    document
}

/// Returns the text for a proxy: these facts, and one agreement for each movement of the applications.
pub(super) fn agreement(
    mut facts: Table,
    applications: &[(Application, Vec<Agreed>)],
) -> anyhow::Result<String> {
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
            table.insert("surplus".to_owned(), agreed.surplus.as_str().into());
            agreements.push(Value::Table(table));
        }
    }
    facts.remove("agreement");
    if !agreements.is_empty() {
        facts.insert("agreement".to_owned(), Value::Array(agreements));
    }
    Ok(toml::to_string(&facts)?)
}

/// The text for a proxy without applications: no data may move.
pub(super) const NOTHING: &str = "version = 1\n";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Wanted;
    use sidetrack_core::agreement::{Access, Ruling, Surplus};
    use std::time::SystemTime;

    /// The data's node has an attribute that the client's node lacks.
    const FACTS: &str = "version = 1\nattributes = [\"isolated\"]\npurposes = [\"research\"]\n[party.p]\n\
                         [node.ward]\nparty = \"p\"\naddress = \"10.0.0.1\"\nattributes = \"isolated\"\n\
                         [node.lab]\nparty = \"p\"\naddress = \"10.0.0.2\"\n\
                         [data.pulse]\nnode = \"ward\"\nport = 80\nconsent = \"given\"\n";

    #[test]
    fn a_proxy_is_told_of_a_surplus_that_was_agreed_on() {
        let wanted = Wanted { client: "lab".to_owned(), data: "pulse".to_owned() };
        let application = Application {
            name: "trial".to_owned(),
            purpose: "research".to_owned(),
            access: Access::Read,
            flows: vec![wanted.clone()],
        };
        for surplus in [Surplus::Deny, Surplus::Allow] {
            let agreed = Agreed {
                wanted: wanted.clone(),
                by: Vec::new(),
                requires: Vec::new(),
                surplus,
                functions_client: Vec::new(),
                functions_server: Vec::new(),
            };
            let facts: Table = FACTS.parse().unwrap();
            let text = agreement(facts, &[(application.clone(), vec![agreed])]).unwrap();
            let book = crate::agreement::read("agreement.toml", &text, SystemTime::now()).unwrap();
            let agreement = book.agreement();
            let lab = agreement.facts().nodes().iter().position(|node| *node.name == *"lab").unwrap();
            let plan = agreement.plan(lab, 0, "research", Access::Read).unwrap();
            assert_eq!(matches!(plan.ruling, Ruling::Allow(_)), surplus == Surplus::Allow, "{text}");
        }
    }
}
