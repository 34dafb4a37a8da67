//! `sidetrack schema`: the JSON Schema of the configuration, for editors.

use super::Printed;
use crate::config::raw::File;
use std::process::ExitCode;

/// Prints the JSON Schema (draft 2020-12) of the configuration. Editors read it through a line
/// `#:schema FILE` at the top of the TOML file.
#[derive(Clone, Debug, clap::Args)]
pub struct SchemaArgs {}

/// Runs the sub-command.
///
/// # Errors
/// None in practice: the schema is made from types.
pub fn run(_: &SchemaArgs) -> anyhow::Result<ExitCode> {
    Ok(report()?.print())
}

/// What the sub-command prints.
///
/// # Errors
/// None in practice: the schema is made from types.
pub fn report() -> anyhow::Result<Printed> {
    let out = serde_json::to_string_pretty(&schemars::schema_for!(File))? + "\n";
    Ok(Printed { out, err: String::new(), code: 0 })
}
