//! What an upgrade cannot hand over, and what would disturb the old process. Known from the configuration alone.

use crate::config::{Config, ListenerKind};

/// Why a node with this configuration cannot be upgraded while it runs. `None`: it can.
pub(super) fn obstacle(config: &Config) -> Option<String> {
    let engine = config.listeners.iter().find(|one| matches!(one.kind, ListenerKind::Engine(_)));
    let on_disk = config.listeners.iter().find(|one| {
        one.kind.http().is_some_and(|http| http.cache.as_ref().is_some_and(|cache| cache.disk.is_some()))
    });
    let siblings = config.listeners.iter().find(|one| one.kind.htcp_address().is_some());
    let what = if let Some(engine) = engine {
        format!("listener '{}' of kind engine has its interfaces", engine.name)
    } else if let Some(on_disk) = on_disk {
        format!("listener '{}' has a cache on disk", on_disk.name)
    } else if let Some(siblings) = siblings {
        format!("listener '{}' answers siblings over HTCP", siblings.name)
    } else if config.overlay.is_some() {
        "[overlay] has links to its neighbours".to_owned()
    } else if config.shunt.is_some() {
        "[shunt] has its entries".to_owned()
    } else if config.dns.is_some() {
        "[dns] has given out addresses".to_owned()
    } else if config.outgoing.is_some() {
        "[outgoing] has given out ports".to_owned()
    } else if config.wants_containers() {
        "functions run in containers".to_owned()
    } else {
        return None;
    };
    Some(format!("{what}, which only one process can have: restart instead of an upgrade"))
}
