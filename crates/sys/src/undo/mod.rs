//! Taking back what we did to the system, whatever becomes of us.
//!
//! nftables tables go with their owner ([`crate::nft::OwnedTable`]); everything else that outlives a process (policy rules,
//! routes, cgroups, kernel settings, socket files) has an inverse [`Action`]. A [`Guard`], a tiny process of its own session,
//! knows these actions and performs them the moment we are gone, be it by SIGKILL. A [`Journal`] on a file system that does not
//! survive a reboot keeps them for `sidetrack cleanup`, in case the guard was killed as well.

mod action;
mod guard;
mod journal;

pub use action::{Action, ActionError};
pub use guard::Guard;
pub use journal::Journal;
