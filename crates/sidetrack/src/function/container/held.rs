//! One container, in a thread of the containers' process: started, held as long as the other end wants it, removed.

use super::ask::{Order, SOCKETS_MAX, Told, Want};
use super::engine::{Engine, own_label};
use crate::keeper::wire;
use anyhow::Context;
use sidetrack_sys::netns::NetNs;
use sidetrack_sys::sockopt::{self, ListenOptions};
use sidetrack_sys::{process, scm, sysctl};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Sockets that come along with a container that was just started.
const FIRST_SOCKETS: u16 = 32;

/// How often an engine that lags behind what has happened is asked again, and how long after the time before.
const LOOKS: u32 = 50;
const LOOK_AGAIN: Duration = Duration::from_millis(40);

/// A container; removed when dropped.
struct Held<'a> {
    engine: &'a Engine,
    id: String,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // An engine that is just finding out that the container has ended may refuse for a moment.
        let removed = (0..LOOKS).find_map(|look| match self.engine.remove(&self.id) {
            Err(error) if look + 1 < LOOKS => {
                tracing::debug!("{error}; once more");
                std::thread::park_timeout(LOOK_AGAIN);
                None
            }
            result => Some(result),
        });
        if let Some(Err(error)) = removed {
            tracing::error!("a container could not be removed: {error}; `sidetrack cleanup` tries again");
        }
    }
}

/// Starts the container and holds it until the other end of `end` is closed.
pub fn hold(engine: &Engine, order: &Order, end: &OwnedFd) {
    match start(engine, order) {
        Ok((held, name, alive)) => {
            if let Err(error) = serve(engine, &held, &name, &alive, end) {
                // The other end is gone, or sees that something is wrong by not being answered.
                tracing::debug!("container {name}: {error:#}");
            }
        }
        Err(error) => {
            // Nobody may be there any more.
            let _ = wire::send(end, &Told::Failed(format!("{error:#}")), &[]);
            let _ = scm::wait(end, None);
        }
    }
}

/// A container that runs, its name, and a descriptor that tells its end. This thread is in its network then.
fn start<'a>(engine: &'a Engine, order: &Order) -> anyhow::Result<(Held<'a>, String, OwnedFd)> {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let number = COUNT.fetch_add(1, Relaxed);
    let name = format!("sidetrack-{}-{}-{number}", order.function, std::process::id());
    let id = engine.create(order, &name, &own_label())?;
    let held = Held { engine, id };
    engine.start(&held.id)?;
    let state = engine.state(&held.id)?;
    if state.pid == 0 {
        anyhow::bail!("{}", why(engine, &held.id));
    }
    let alive = process::watch(state.pid).map_err(|_| anyhow::anyhow!("{}", why(engine, &held.id)))?;
    let network = match NetNs::of_process(state.pid) {
        Err(error) if error.kind() == ErrorKind::NotFound => anyhow::bail!("{}", why(engine, &held.id)),
        network => network.context("cannot look into its network")?,
    };
    network.enter().context(
        "cannot enter its network: functions in containers need root (CAP_SYS_ADMIN), and an engine that is not rootless",
    )?;
    spare_pacing();
    Ok((held, name, alive))
}

/// Its network is one loopback device: nothing is lost there and nobody else has a share in it. A congestion control that
/// paces (bbr, if that is the host's) would set a timer for every piece. A wish: without it flows pass as well.
fn spare_pacing() {
    if let Err(error) = sysctl::write("net/ipv4/tcp_congestion_control", "reno") {
        tracing::debug!("{error}");
    }
}

fn serve(engine: &Engine, held: &Held<'_>, name: &str, alive: &OwnedFd, end: &OwnedFd) -> anyhow::Result<()> {
    let mut first = sockets(FIRST_SOCKETS)?;
    first.insert(0, alive.try_clone()?);
    send(end, &Told::Started { name: name.to_owned() }, first)?;
    while let Some((want, _)) = wire::receive::<Want>(end)? {
        match want {
            Want::Sockets(count) => send(end, &Told::Sockets, sockets(count)?)?,
            Want::Listener => {
                let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
                let listener = sockopt::listen(any, &ListenOptions::default())?;
                // What is accepted has it from the listener: as on every other side of a flow.
                sockopt::set_tcp_nodelay(&listener, true)?;
                send(end, &Told::Listener, vec![listener.into()])?;
            }
            Want::Why => send(end, &Told::Ended(why(engine, &held.id)), Vec::new())?,
        }
    }
    Ok(())
}

fn sockets(count: u16) -> anyhow::Result<Vec<OwnedFd>> {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let one = |_| Ok(sockopt::stream_socket(&any)?.into());
    (0..count.min(SOCKETS_MAX)).map(one).collect()
}

fn send(end: &OwnedFd, told: &Told, fds: Vec<OwnedFd>) -> anyhow::Result<()> {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    Ok(wire::send(end, told, &borrowed)?)
}

/// How a container has ended, in words.
fn why(engine: &Engine, id: &str) -> String {
    let mut looks = 0;
    let state = loop {
        match engine.state(id) {
            // The kernel has told us that it has ended; the engine is yet to hear of it.
            Ok(state) if state.pid != 0 && looks < LOOKS => {
                looks += 1;
                std::thread::park_timeout(LOOK_AGAIN);
            }
            Ok(state) => break state,
            Err(error) => return format!("it is gone ({error})"),
        }
    };
    if state.pid != 0 {
        return "its program has ended, which the container engine does not notice".to_owned();
    }
    let memory = if state.out_of_memory { ", out of memory (memory_bytes)" } else { "" };
    let words = engine.last_words(id).unwrap_or_default();
    let said = if words.is_empty() { "it wrote nothing".to_owned() } else { format!("it wrote: {words}") };
    format!("its program ended with code {}{memory}; {said}", state.exit_code)
}
