//! `user`: the system user that the process switches to.

use std::sync::Arc;

/// The user that `up` switches to when root starts it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RunAs {
    /// The first of [`RunAs::DEFAULTS`] that this machine has.
    #[default]
    Default,
    /// The user of this name, which may be root.
    Named(Arc<str>),
}

impl RunAs {
    /// The users that are tried in this order if the configuration names none.
    pub const DEFAULTS: [&str; 2] = ["sidetrack", "nobody"];
}
