//! `[policy]`, checked.

use std::path::PathBuf;

/// Where the data-flow agreement is, and how it is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreementFile {
    /// The path of the file.
    pub path: PathBuf,
    /// What happens to flows that it does not allow.
    pub mode: PolicyMode,
    /// The file of its history.
    pub history: Option<PathBuf>,
}

/// What happens to flows that the agreement does not allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyMode {
    /// New flows are denied, and running flows end.
    #[default]
    Enforce,
    /// They are carried, and the record says that they would have been denied.
    Audit,
}
