//! `sidetrack schema`: prints the JSON Schema of the configuration, for editors; that of records, and the OpenAPI document of the
//! admin interface, for programs that read them.

use super::Printed;
use crate::admin::OPENAPI;
use crate::config::raw::File;
use crate::record;
use clap::ValueEnum;
use serde_json::{Map, Value};
use std::process::ExitCode;

/// Prints the JSON Schema (draft 2020-12) of the configuration or of records, or the OpenAPI document of the admin
/// interface. Editors read that of the configuration through a line `#:schema FILE` at the top of the TOML file.
#[derive(Clone, Debug, clap::Args)]
pub struct SchemaArgs {
    /// What to describe
    #[arg(value_name = "WHAT", value_enum, default_value = "configuration")]
    pub what: What,
}

/// What has a description for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// The configuration file: JSON Schema
    Configuration,
    /// The records of flows: JSON Schema
    Records,
    /// The admin interface: OpenAPI 3.1
    Admin,
}

/// Runs the subcommand.
///
/// # Errors
/// None in practice: the schema is made from types.
pub fn run(args: &SchemaArgs) -> anyhow::Result<ExitCode> {
    Ok(report(args.what)?.print())
}

/// Returns the output of the subcommand.
///
/// # Errors
/// None in practice: the schema is made from types.
pub fn report(what: What) -> anyhow::Result<Printed> {
    let out = match what {
        What::Configuration => serde_json::to_string_pretty(&schema())? + "\n",
        What::Records => record::SCHEMA.to_owned(),
        What::Admin => OPENAPI.to_owned(),
    };
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
