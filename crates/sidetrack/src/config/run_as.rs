//! `user`: the system user of the data plane.

use std::sync::Arc;

/// The user that `up` becomes when root starts it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RunAs {
    /// The first of [`RunAs::DEFAULTS`] that this machine has.
    #[default]
    Default,
    /// The user of this name, which may be root.
    Named(Arc<str>),
}

impl RunAs {
    /// The users that are tried where the configuration names none, in this order.
    pub const DEFAULTS: [&str; 2] = ["sidetrack", "nobody"];
}
