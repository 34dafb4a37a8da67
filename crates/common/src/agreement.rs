//! A data-flow agreement that was read, with a cache of its rulings. Its meaning is defined in `sidetrack_core::agreement`;
//! the reader is a part of the crate `sidetrack-control`.

use sidetrack_core::agreement::{Agreement, Clause, Movement, Ruling};
use sidetrack_core::flow::Flow;
use sidetrack_sys::sync::{read, write};
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::SystemTime;

/// Largest file of an agreement, bytes.
pub const FILE_MAX: u64 = 16 << 20;

/// Most rulings in the cache. Then the cache is emptied and rulings are computed again.
const REMEMBERED_MAX: usize = 65_536;

/// An agreement with a cache of its rulings. The answer to a question never changes.
#[derive(Debug)]
pub struct Book {
    text: Arc<str>,
    agreement: Agreement,
    agreements: Vec<Arc<str>>,
    purposes: Vec<Arc<str>>,
    next_change: Option<SystemTime>,
    rulings: RwLock<BTreeMap<(Arc<Clause>, Movement), Ruling>>,
}

impl Book {
    /// What a reader found in a text. `agreements` and `purposes` stand in the order of the file.
    pub fn new(
        text: &str,
        agreement: Agreement,
        agreements: Vec<Arc<str>>,
        purposes: Vec<Arc<str>>,
        next_change: Option<SystemTime>,
    ) -> Self {
        Self { text: text.into(), agreement, agreements, purposes, next_change, rulings: RwLock::default() }
    }

    /// The text of the file.
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }

    /// The agreement.
    pub const fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// The names of the agreements in force, in the order of the file.
    pub fn agreements(&self) -> &[Arc<str>] {
        &self.agreements
    }

    /// The purposes that it declares.
    pub fn purposes(&self) -> &[Arc<str>] {
        &self.purposes
    }

    /// When an agreement begins or ends next. The file must be read again at that time.
    pub const fn next_change(&self) -> Option<SystemTime> {
        self.next_change
    }

    /// Returns the ruling about a flow, for a rule with this clause.
    pub fn ask(&self, flow: &Flow, clause: &Arc<Clause>) -> Ruling {
        let movement = match self.agreement.movement(flow) {
            Ok(movement) => movement,
            Err(why) => return Ruling::Deny(why.into()),
        };
        let key = (clause.clone(), movement);
        if let Some(known) = read(&self.rulings).get(&key) {
            return known.clone();
        }
        let ruling = self.agreement.rule(&key.1, &clause.purpose, clause.access);
        let mut rulings = write(&self.rulings);
        if rulings.len() >= REMEMBERED_MAX {
            rulings.clear();
        }
        rulings.insert(key, ruling.clone());
        ruling
    }
}
