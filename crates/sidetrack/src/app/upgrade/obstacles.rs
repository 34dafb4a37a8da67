//! What an upgrade cannot hand over, and what would disturb the old process. Known from the configuration alone.

use crate::config::{Config, ListenerKind};

/// Why a node with this configuration cannot be upgraded while it runs. `None`: it can.
pub(super) fn obstacle(config: &Config) -> Option<String> {
    let engine = config.listeners.iter().find(|one| matches!(one.kind, ListenerKind::Engine(_)));
    engine.map(|engine| {
        format!(
            "listener '{}' of kind engine has its interfaces, which only one process can have: restart instead of an upgrade",
            engine.name
        )
    })
}

/// Which flows of a node with this configuration cannot move, and drain in the old process.
pub(super) fn draining(config: &Config) -> Vec<&'static str> {
    let has = |is: fn(&ListenerKind) -> bool| config.listeners.iter().any(|one| is(&one.kind));
    let kinds = [
        (config.wants_containers(), "flows in containers"),
        (has(|kind| kind.http().is_some()), "requests of HTTP and intercepted TLS"),
        (has(|kind| matches!(kind, ListenerKind::Tunnel(_))), "flows of tunnels"),
    ];
    kinds.into_iter().filter(|(is_there, _)| *is_there).map(|(_, what)| what).collect()
}
