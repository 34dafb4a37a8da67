//! The same small relay on our event loop and on tokio's: the program `event_loop` of `crates/sidetrack/examples`.

use super::{Class, Peer, RELAY_PORT, Start, Unavailable, relay};
use crate::launch;
use crate::service::Service;
use crate::site::Site;

const fn on(name: &'static str, start: for<'s> fn(&'s Site) -> Start<'s>) -> Peer {
    Peer { name, class: Class::Limit, is_ours: false, start }
}

/// One row for each loop. `sidetrack-lab relay` measures them only if `--only` names them.
pub const LOOPS: &[Peer] =
    &[on("loop: ours", |site| start(site, "reactor")), on("loop: tokio", |site| start(site, "tokio"))];

fn start<'s>(site: &'s Site, which: &str) -> Start<'s> {
    let beside =
        std::env::current_exe().ok().and_then(|own| launch::sibling_program(&own, "examples/event_loop"));
    let program = beside.filter(|path| path.is_file()).ok_or_else(|| {
        Unavailable::Absent(
            "event_loop is not built; cargo build --profile PROFILE --package sidetrack --example event_loop"
                .to_owned(),
        )
    })?;
    let mut command = site.proxy.command_at(&program.to_string_lossy(), &site.proxy_placement());
    command.args([which, &site.proxy_address(RELAY_PORT).to_string(), &site.origin().to_string()]);
    let mut service = Service::start(&format!("loop-{which}"), command, site.directory.path())?;
    service.wait_listening(&site.proxy, RELAY_PORT)?;
    Ok(relay(site, service))
}
