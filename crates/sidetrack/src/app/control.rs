//! What the admin interface may ask of the program.

use super::node::Node;
use crate::admin::{ConfigStatus, Control, ListenerStatus};
use crate::reload::ReloadHandle;
use sidetrack_core::policy::Policy;
use std::sync::Arc;
use tokio::runtime::Handle;

/// The node and its configuration, as the admin interface sees them.
pub struct ControlOf {
    node: Arc<Node>,
    reload: ReloadHandle,
    runtime: Handle,
}

impl ControlOf {
    /// To be made on the control event loop.
    pub fn new(node: Arc<Node>, reload: ReloadHandle) -> Self {
        Self { node, reload, runtime: Handle::current() }
    }
}

impl Control for ControlOf {
    fn policy(&self) -> Arc<Policy> {
        self.reload.current().load().policy.clone()
    }

    fn config(&self) -> ConfigStatus {
        let standing = self.reload.standing();
        ConfigStatus {
            generation: standing.generation,
            path: Some(self.reload.path().to_owned()),
            last_error: standing.last_error,
        }
    }

    fn listeners(&self) -> Vec<ListenerStatus> {
        let rows = self.node.listeners().into_iter();
        rows.map(|(name, kind, addresses)| ListenerStatus {
            name: name.to_string(),
            kind: kind.to_owned(),
            addresses,
        })
        .collect()
    }

    fn look_at_kernel_flows(&self) {
        self.node.look_at_kernel_flows();
    }

    fn reload(&self) -> Result<(), String> {
        self.runtime.block_on(self.reload.reload()).map(|_| ())
    }
}
