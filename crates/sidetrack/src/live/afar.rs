//! Running flows without a task: little is kept of them here, and the rest is put together when it is asked for.

use super::LiveFlow;
use sidetrack_core::flow::FlowId;
use std::fmt::Debug;
use std::sync::Arc;

/// A flow that something else than a task of a worker looks after.
pub trait Afar: Debug + Send + Sync {
    /// Its number.
    fn number(&self) -> FlowId;

    /// Puts together what is known of it now. A wish to end it goes to the one who looks after it. `None`: it has just ended.
    fn flow(self: Arc<Self>) -> Option<Arc<LiveFlow>>;
}
