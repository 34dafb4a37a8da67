//! The steps of a hand-over, by name. Tests stop a process at each of them and kill it, or the other one.
//!
//! Each part that is sent or received is a step by itself ([`Act::Sends`], [`Act::Gets`]), so a kind of part that is added cannot
//! be forgotten. [`Phase`] names the work in between. The hook is compiled into debug builds only: a process stops when the file
//! that `SIDETRACK_TEST_STEP` names has the name of the step, and goes on when the file is removed.

use sidetrack_core::upgrade::Kind;
use std::fmt;

/// Which process is at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The process that is replaced.
    Old,
    /// The process that takes over.
    New,
}

/// Makes the list of all phases, so that none is left out.
macro_rules! phases {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Work between two parts.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Phase { $($(#[$doc])* $name,)* }

        impl Phase {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];
        }
    };
}

phases! {
    /// Old: nothing is accepted or written any more.
    Rested,
    /// New: sockets are there and the kernel's rules lead here; nothing is accepted yet.
    Steered,
    /// Old: what only one process can have is let go.
    LetGo,
    /// Old: the change is final, and files and rules are left to the new process.
    Left,
}

/// What happens at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// A part is about to be sent.
    Sends(Kind),
    /// A part has been received.
    Gets(Kind),
    /// Some work is done.
    Did(Phase),
}

/// A step of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step(pub Side, pub Act);

impl fmt::Display for Step {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(side, act) = self;
        let side = match side {
            Side::Old => "old",
            Side::New => "new",
        };
        match act {
            Act::Sends(kind) => write!(to, "{side} sends {kind:?}"),
            Act::Gets(kind) => write!(to, "{side} gets {kind:?}"),
            Act::Did(phase) => write!(to, "{side} did {phase:?}"),
        }
    }
}

/// A step is reached. A test may stop the process here.
#[cfg(debug_assertions)]
pub(in crate::app) fn reached(step: Step) {
    use std::path::PathBuf;
    use std::sync::LazyLock;
    static FILE: LazyLock<Option<PathBuf>> =
        LazyLock::new(|| std::env::var_os("SIDETRACK_TEST_STEP").map(PathBuf::from));
    let Some(file) = &*FILE else { return };
    let name = step.to_string();
    let stops = || std::fs::read_to_string(file).is_ok_and(|named| named == name);
    if stops() {
        tracing::info!("upgrade: stopped at the step '{name}'");
    }
    while stops() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// A step is reached.
#[cfg(not(debug_assertions))]
pub(in crate::app) const fn reached(_: Step) {}
