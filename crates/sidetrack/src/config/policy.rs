//! `[policy]`, checked.

use std::path::PathBuf;

/// Where the data-flow agreement is, and what its word is worth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreementFile {
    /// The file.
    pub path: PathBuf,
    /// What becomes of flows that it does not allow.
    pub mode: PolicyMode,
}

/// What becomes of flows that the agreement does not allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyMode {
    /// They are denied, and end if they run.
    #[default]
    Enforce,
    /// They are carried; the record says that they would have been denied.
    Audit,
}
