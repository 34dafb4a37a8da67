//! What addresses of the resolver represent, in a hand-over. Clients keep these addresses, so they move with the listeners, and
//! come back with them.

use super::channel::{Came, Channel};
use super::flows::millis;
use super::old::Ours;
use super::parts::NamesPart;
use crate::app::dns;
use crate::dns::SharedNames;
use sidetrack_core::time::Instant;
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::sync::lock;
use std::time::Duration;

/// Rows of one part: a name has at most 255 bytes.
const ROWS: usize = 10_000;

impl Ours {
    /// Sends all names. They stay here as well, until it is certain who goes on.
    pub(super) fn send_names(&self, to: &mut Channel) -> anyhow::Result<()> {
        let Some(names) = &self.node.names else { return Ok(()) };
        let now = self.node.now();
        let rows: Vec<_> =
            lock(names).rows(now).map(|(at, name, kept)| (at, name.to_string(), millis(kept))).collect();
        for rows in rows.chunks(ROWS) {
            to.send_optional(Kind::Names, &NamesPart { rows: rows.to_vec() }, &[])?;
        }
        Ok(())
    }

    /// Goes on with these names instead of those that are here.
    pub(super) fn take_names(&self, came: &[Came]) {
        self.node.names.iter().for_each(|names| take_names(names, came, self.node.now()));
    }
}

/// Replaces the names by those of another process.
pub(in super::super) fn take_names(names: &SharedNames, came: &[Came], now: Instant) {
    let mut table = dns::table();
    let rows = came.iter().filter_map(|came| came.body::<NamesPart>().ok()).flat_map(|part| part.rows);
    for (address, name, kept_ms) in rows {
        let kept = Duration::from_millis(kept_ms);
        let is_put = name.parse().is_ok_and(|name| table.put((address, name, kept), now));
        if !is_put {
            // A row that is left out would give its address another meaning later.
            tracing::error!(%address, "the names of the other process are not complete; clients ask again");
            break;
        }
    }
    *lock(names) = table;
}
