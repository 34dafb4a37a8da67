//! The tables Sidetrack uses, built from what a person configures.

mod run;

pub use run::run_namespace;
