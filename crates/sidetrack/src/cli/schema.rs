//! `sidetrack schema`: prints the JSON Schema of the configuration, for editors.

use super::Printed;
use crate::config::raw::File;
use serde_json::{Map, Value};
use std::process::ExitCode;

/// Prints the JSON Schema (draft 2020-12) of the configuration. Editors read it through a line
/// `#:schema FILE` at the top of the TOML file.
#[derive(Clone, Debug, clap::Args)]
pub struct SchemaArgs {}

/// Runs the subcommand.
///
/// # Errors
/// None in practice: the schema is made from types.
pub fn run(_: &SchemaArgs) -> anyhow::Result<ExitCode> {
    Ok(report()?.print())
}

/// Returns the output of the subcommand.
///
/// # Errors
/// None in practice: the schema is made from types.
pub fn report() -> anyhow::Result<Printed> {
    let out = serde_json::to_string_pretty(&schema())? + "\n";
    Ok(Printed { out, err: String::new(), code: 0 })
}

/// The schema of the configuration.
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(File).to_value();
    tidy(&mut schema);
    schema
}

/// TOML has no null: what may be left out is simply not required. Line breaks of the source are none of the text.
fn tidy(value: &mut Value) {
    match value {
        Value::Object(object) => {
            if let Some(Value::Array(types)) = object.get_mut("type") {
                types.retain(|kind| kind != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    object.insert("type".into(), only);
                }
            }
            without_null_choice(object);
            if let Some(Value::String(text)) = object.get_mut("description") {
                *text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            }
            object.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// `anyOf: [X, null]` becomes X.
fn without_null_choice(object: &mut Map<String, Value>) {
    let Some(Value::Array(choices)) = object.get_mut("anyOf") else { return };
    choices.retain(|choice| choice.get("type").is_none_or(|kind| kind != "null"));
    if let [Value::Object(only)] = choices.as_mut_slice() {
        let only = std::mem::take(only);
        object.remove("anyOf");
        for (key, value) in only {
            object.entry(key).or_insert(value);
        }
    }
}
