//! One container, in a thread of the containers' process: started, held until the other end closes, and removed.

use super::ask::{SOCKETS_MAX, Told, Want};
use crate::wire;
use anyhow::Context;
use sidetrack_common::containers::{Engine, Order, own_label};
use sidetrack_sys::netns::NetNs;
use sidetrack_sys::sockopt::{self, ListenOptions};
use sidetrack_sys::{process, scm, sysctl};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Sockets that are attached to the message that a container has started.
const FIRST_SOCKETS: u16 = 32;

/// How often an engine is asked again when its state lags behind, and the pause in between.
const LOOKS: u32 = 50;
const LOOK_AGAIN: Duration = Duration::from_millis(40);

/// A container; it is removed when this is dropped.
struct Held<'a> {
    engine: &'a Engine,
    id: String,
    /// Its first process. 0 before it is started.
    pid: u32,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // If the engine is just noticing that the container has ended, it may reject the request for a moment.
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

/// Starts the container, and holds it until the other end of `end` closes.
pub(super) fn hold(engine: &Engine, order: &Order, end: &OwnedFd) {
    match start(engine, order) {
        Ok((held, name, alive)) => {
            if let Err(error) = serve(engine, &held, &name, &alive, end) {
                // The other end has closed, or it notices the error because it gets no answer.
                tracing::debug!("container {name}: {error:#}");
            }
        }
        Err(error) => {
            // The other end may have closed already.
            let _ = wire::send(end, &Told::Failed(format!("{error:#}")), &[]);
            let _ = scm::wait(end, None);
        }
    }
}

/// Starts a container. Returns it, its name, and a descriptor that shows its end. Afterwards this thread is in its
/// network.
fn start<'a>(engine: &'a Engine, order: &Order) -> anyhow::Result<(Held<'a>, String, OwnedFd)> {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let number = COUNT.fetch_add(1, Relaxed);
    let name = format!("sidetrack-{}-{}-{number}", order.function, std::process::id());
    let id = engine.create(order, &name, &own_label())?;
    let mut held = Held { engine, id, pid: 0 };
    engine.start(&held.id)?;
    let state = engine.state(&held.id)?;
    if state.pid == 0 {
        anyhow::bail!("{}", why(engine, &held.id));
    }
    held.pid = state.pid;
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

/// Selects a congestion control without pacing. The container's network is one loopback device: no packets are lost
/// there, and no other traffic shares it. A congestion control that paces (bbr, if the host uses it) would set a timer
/// for every piece. If this fails, flows still pass.
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
                // Accepted sockets inherit this option from the listener, as on the other sides of a flow.
                sockopt::set_tcp_nodelay(&listener, true)?;
                send(end, &Told::Listener, vec![listener.into()])?;
            }
            Want::Cpu => send(end, &Told::Cpu(cpu_us(held.pid)), Vec::new())?,
            Want::Limit(limits) => {
                // It goes on with the limits that it has.
                if let Err(error) = engine.limit(&held.id, &limits) {
                    tracing::warn!("container {name} keeps its limits: {error}");
                }
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

/// The CPU time that a container has used, microseconds: that of its control group, or that of its first process if it has no
/// group of its own.
fn cpu_us(pid: u32) -> Option<u64> {
    let group = |of: &str| {
        let text = std::fs::read_to_string(format!("/proc/{of}/cgroup")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
    };
    let theirs = group(&pid.to_string())?;
    let is_own = theirs != "/" && Some(&theirs) != group("self").as_ref();
    let counted = std::fs::read_to_string(format!("/sys/fs/cgroup{theirs}/cpu.stat")).ok().filter(|_| is_own);
    let used =
        counted.and_then(|text| text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok()));
    used.or_else(|| process::cpu_us(pid))
}

/// Describes in words how a container has ended.
fn why(engine: &Engine, id: &str) -> String {
    let mut looks = 0;
    let state = loop {
        match engine.state(id) {
            // The kernel has reported the end; the engine has not noticed it yet.
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
