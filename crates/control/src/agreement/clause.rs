//! The checked form of an agreement, for the reasoner.

pub(super) use super::raw::Effect;

use sidetrack_core::agreement::{Obligations, Surplus};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An agreement to compile. Its names were checked.
#[derive(Clone, Debug)]
pub(super) struct Clause {
    /// Its name.
    pub name: Arc<str>,
    /// Whether it permits or forbids.
    pub effect: Effect,
    /// Parties of the clients. Empty: any.
    pub parties: Vec<String>,
    /// The clients. Empty: any.
    pub nodes: Vec<String>,
    /// The data sets. Empty: any.
    pub data: Vec<String>,
    /// The purposes. Empty: any.
    pub purposes: Vec<String>,
    /// The kinds of access. Empty: any.
    pub access: Vec<&'static str>,
    /// Its obligations.
    pub obligations: Obligations,
    /// Whether data may move to a node with fewer attributes.
    pub surplus: Surplus,
    /// A condition in Cedar.
    pub when: Option<String>,
}

/// Labels for entities, besides `Facts`.
#[derive(Clone, Debug, Default)]
pub(super) struct Labels {
    /// Labels of parties.
    pub parties: BTreeMap<String, Vec<String>>,
    /// Labels of data sets.
    pub data: BTreeMap<String, Vec<String>>,
    /// Data sets whose consent is withdrawn.
    pub withdrawn: Vec<String>,
}
