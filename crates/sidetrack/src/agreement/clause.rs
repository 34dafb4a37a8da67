//! What a file says that was agreed, checked, on its way to whoever reasons about it.

pub use super::raw::Effect;

use sidetrack_core::agreement::{Obligations, Surplus};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An agreement to be compiled; its names were checked.
#[derive(Clone, Debug)]
pub struct Clause {
    /// Its name.
    pub name: Arc<str>,
    /// Whether it permits, or forbids.
    pub effect: Effect,
    /// Parties of the clients; empty: any.
    pub parties: Vec<String>,
    /// The clients; empty: any.
    pub nodes: Vec<String>,
    /// The data; empty: any.
    pub data: Vec<String>,
    /// What for; empty: anything.
    pub purposes: Vec<String>,
    /// What is done; empty: anything.
    pub access: Vec<&'static str>,
    /// What it obliges to.
    pub obligations: Obligations,
    /// Whether data may move to a node that has less.
    pub surplus: Surplus,
    /// A condition in Cedar.
    pub when: Option<String>,
}

/// What entities are made of, besides `Facts`.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    /// By party.
    pub parties: BTreeMap<String, Vec<String>>,
    /// By data set.
    pub data: BTreeMap<String, Vec<String>>,
    /// Data sets whose consent is withdrawn.
    pub withdrawn: Vec<String>,
}
