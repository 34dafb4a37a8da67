//! Runs the shunt in its own process. The process keeps the rights to change conntrack and the fast path, and reads no
//! byte of any peer. `sidetrack up` starts it and sends it requests over a socket pair. When the socket closes, the
//! process ends.

use super::{Capacity, Engine, FlowView, Settings, ShuntRecord};
use crate::config::{self, Config};
use crate::rights::{DataUser, TO_BECOME, become_or_stay};
use crate::started::Started;
use crate::wire;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use sidetrack_core::shunt::{FastPathKind, ShuntAction, Transport, Tuple};
use sidetrack_sys::bpf::Forwarding;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::confine;
use sidetrack_sys::sync::lock;
use sidetrack_sys::undo::{Action, Guard};
use sidetrack_sys::{process, scm};
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// The command line argument that starts this process.
pub const ARGUMENT: &str = "shunt-process";

/// The rights to change conntrack, and to load and attach BPF programs and maps.
const NEEDED: CapabilitySet = CapabilitySet::NET_ADMIN.union(CapabilitySet::BPF);

/// Held until the BPF programs are loaded, and given up then: without CAP_PERFMON, the verifier of kernels before 6.8 refuses
/// programs that overwrite a part of a saved register. CAP_SETPCAP takes it out of the bounding set.
const TO_LOAD: CapabilitySet = CapabilitySet::PERFMON.union(CapabilitySet::SETPCAP);

/// The rights to find the owner of a socket, for rules that ask: other users' descriptors and namespaces in /proc.
const FOR_PROCESSES: CapabilitySet = CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_READ_SEARCH);

/// The name of this process in `ps` and `top`.
const NAME: &std::ffi::CStr = c"sidetrack-shunt";

/// Longest turn when nothing happens.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why nothing can be asked.
const GONE: &str = "the shunt's process is gone: every flow takes the slow path until sidetrack is restarted";

/// Names a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Which {
    /// The sender of the first packet.
    pub client: SocketAddr,
    /// The receiver of the first packet.
    pub server: SocketAddr,
    /// The transport protocol.
    pub transport: Transport,
}

impl From<Which> for Tuple {
    fn from(which: Which) -> Self {
        Self::new(which.client, which.server, which.transport, 0)
    }
}

/// A request to the shunt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Start with this configuration.
    Start {
        /// The file's name.
        name: String,
        /// Its text.
        text: String,
    },
    /// Return the flows.
    Flows,
    /// Set an action for a flow, regardless of policy.
    Pin(Which, ShuntAction),
    /// Withdraw an entry or a pinned action.
    Withdraw(Which),
    /// Return the records of flows that ended since the last request.
    Records,
}

/// An answer of the shunt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Told {
    /// The shunt is running.
    Started,
    /// The flows.
    Flows(Vec<FlowView>),
    /// True if there is such a flow.
    Found(bool),
    /// The records, and how full the fast path is.
    Records(Vec<ShuntRecord>, Capacity),
    /// The request failed.
    Failed(String),
}

impl Settings {
    /// Returns the settings of a configuration.
    pub fn of(config: &config::Shunt) -> Self {
        let path = |path: &config::ShuntPath| match path {
            config::ShuntPath::Tc => super::PathKind::Tc.into(),
            config::ShuntPath::Xdp => super::PathKind::Xdp.into(),
            config::ShuntPath::XdpGeneric => super::PathKind::XdpGeneric.into(),
            config::ShuntPath::OpenFlow(switch) => super::Path::OpenFlow(switch.clone()),
            config::ShuntPath::Flowtable => super::Path::Flowtable,
            config::ShuntPath::None => super::Path::None,
        };
        Self {
            paths: config.fast_paths.iter().map(path).collect(),
            forwarding: if config.bridged { Forwarding::Bridged } else { Forwarding::Routed },
            ports: config.ports.clone(),
            keep_when_stalled: config.keep_when_stalled,
            redirect_peer: config.redirect_peer,
            core: sidetrack_core::shunt::Config {
                ports: BTreeSet::new(),
                actions: config.actions,
                fast_path: FastPathKind::None,
                rules: config.rules.clone(),
                entries_max: config.entries_max,
                entries_max_per_client: config.entries_max_per_client,
                when_full: config.when_full,
                shunt_idle: Duration::from_millis(config.idle_timeout_ms),
                block_idle: Duration::from_millis(config.block_idle_timeout_ms),
                keep_every: super::KEEP_EVERY,
            },
        }
    }
}

/// The version of [`Ask`] and [`Told`]: a shunt that another version of the program has started is taken over only if it is the same.
pub const PROTOCOL: u32 = 1;

/// The answer to a second [`Ask::Start`].
const AT_WORK: &str = "the shunt is at work already";

/// Our end of the connection to the shunt's process. Only one process may use it at a time.
///
/// ```text
/// ASKS --rest--> RESTS (another process asks) --resume--> ASKS
/// ASKS --finish--> the process has undone everything
/// ```
#[derive(Debug)]
pub struct Shunter {
    end: Mutex<OwnedFd>,
    /// Changes while `end` is locked.
    rests: AtomicBool,
    process: Started,
}

impl Shunter {
    /// Starts the process, and in it the shunt of the configuration with this name and text.
    ///
    /// # Errors
    /// Returns what is missing.
    pub fn start(name: &str, text: &str) -> anyhow::Result<Self> {
        let (ours, theirs) = scm::pair()?;
        let child = process::respawn(ARGUMENT, theirs)?;
        let shunter = Self::of(ours, Started::here(child));
        shunter.ask(&Ask::Start { name: name.to_owned(), text: text.to_owned() })?;
        Ok(shunter)
    }

    /// The shunt of an earlier process of this node: what [`Shunter::copies`] returned there.
    pub fn taken([end, process]: [OwnedFd; 2]) -> Self {
        Self::of(end, Started::Before(process))
    }

    const fn of(end: OwnedFd, process: Started) -> Self {
        Self { end: Mutex::new(end), rests: AtomicBool::new(false), process }
    }

    /// Copies of what [`Shunter::taken`] needs. The shunt ends when all copies of the connection are closed.
    ///
    /// # Errors
    /// All descriptors are in use.
    pub fn copies(&self) -> io::Result<[OwnedFd; 2]> {
        Ok([lock(&self.end).try_clone()?, self.process.watch()?])
    }

    /// Asks nothing until [`Shunter::resume`], because another process does. Waits for the answer that is under way.
    pub fn rest(&self) {
        let _end = lock(&self.end);
        self.rests.store(true, Relaxed);
    }

    /// Whether another process asks.
    pub fn rests(&self) -> bool {
        self.rests.load(Relaxed)
    }

    /// Asks again. Answers to requests of the other process, which may have been killed, are left out.
    ///
    /// # Errors
    /// The process of the shunt has ended.
    pub fn resume(&self) -> anyhow::Result<()> {
        let end = lock(&self.end);
        // It refuses this in words that no other answer has.
        wire::send(&*end, &Ask::Start { name: String::new(), text: String::new() }, &[]).context(GONE)?;
        loop {
            match wire::receive(&*end).context(GONE)? {
                Some((Told::Failed(why), _)) if why == AT_WORK => break,
                Some(_) => {}
                None => anyhow::bail!("{GONE}"),
            }
        }
        self.rests.store(false, Relaxed);
        Ok(())
    }

    /// Sends a request, and returns the answer.
    ///
    /// # Errors
    /// Returns the error of the shunt. Also fails if the process has ended.
    pub fn ask(&self, ask: &Ask) -> anyhow::Result<Told> {
        let end = lock(&self.end);
        anyhow::ensure!(!self.rests(), "an upgrade is under way: try again when it is over");
        wire::send(&*end, ask, &[]).context(GONE)?;
        match wire::receive(&*end).context(GONE)? {
            Some((Told::Failed(why), _)) => anyhow::bail!("{why}"),
            Some((told, _)) => Ok(told),
            None => anyhow::bail!("{GONE}"),
        }
    }

    /// Ends the process, and waits until everything is undone. Not for one that another process goes on with.
    ///
    /// # Errors
    /// Returns the error of waitpid(2).
    pub fn finish(&self) -> io::Result<()> {
        scm::close(&*lock(&self.end))?;
        self.process.wait()
    }
}

/// Runs as the shunt's process, until the other end closes.
///
/// # Errors
/// Returns the error that ended the shunt.
pub fn serve(end: OwnedFd) -> anyhow::Result<()> {
    process::ignore_stop_signals();
    // Without the name, only the output of `ps` differs.
    let _ = process::set_name(NAME);
    keep_only(NEEDED | TO_LOAD | FOR_PROCESSES | CapabilitySet::NET_BIND_SERVICE | TO_BECOME)?;
    let Some((ask, _)) = wire::receive::<Ask>(&end)? else { return Ok(()) };
    let (mut engine, undo, guard) = match begin(ask) {
        Ok(begun) => begun,
        Err(error) => return Ok(wire::send(&end, &Told::Failed(format!("{error:#}")), &[])?),
    };
    wire::send(&end, &Told::Started, &[])?;
    let served = turns(&end, &mut engine);
    let stopped = engine.stop();
    // The guard is disarmed last: if this process ends before, the guard undoes the rest.
    for action in undo.iter().rev() {
        action.perform()?;
    }
    // The guard may have been killed; then there is nothing to disarm.
    let _ = guard.disarm();
    served.and(stopped.map_err(Into::into))
}

/// Gives up all rights except these.
fn keep_only(needed: CapabilitySet) -> anyhow::Result<()> {
    let held = caps::capabilities().context("capabilities")?.permitted;
    caps::keep_only(held & needed).context("cannot give up capabilities")
}

fn begin(ask: Ask) -> anyhow::Result<(Engine, Vec<Action>, Guard)> {
    let Ask::Start { name, text } = ask else { anyhow::bail!("the shunt has not been started") };
    let config = Config::from_text(&name, &text).map_err(|error| anyhow::anyhow!("{error}"))?;
    let shunt = config.shunt.context("the configuration has no [shunt]")?;
    // After the configuration's files were read, and before there is a second thread or process, which would keep its own
    // rights.
    let asks_process = shunt.rules.as_ref().is_some_and(|rules| rules.asks_process());
    let user = DataUser::of(&config.user)?;
    let mut needed = if asks_process { NEEDED | FOR_PROCESSES } else { NEEDED };
    needed.set(CapabilitySet::NET_BIND_SERVICE, shunt.has_low_port());
    become_or_stay(user.as_ref(), needed | TO_LOAD)?;
    let mut guard = Guard::spawn(&[]).context("cannot start the guard that undoes what we do")?;
    if let Err(error) = confine::confine_process(confine::Kind::Shunt) {
        tracing::warn!("the shunt's system calls are not confined: {error}");
    }
    let engine = Engine::start_then(&Settings::of(&shunt), || {
        let held = caps::capabilities()?.permitted;
        caps::keep_only(held & needed)
    })?;
    let mut undo = Vec::new();
    for (name, value) in engine.changed() {
        let action = Action::RestoreSetting { name: (*name).into(), value: value.clone() };
        guard.add(&action)?;
        undo.push(action);
    }
    Ok((engine, undo, guard))
}

fn turns(end: &OwnedFd, engine: &mut Engine) -> anyhow::Result<()> {
    let mut records = Vec::new();
    loop {
        let asked = engine.turn(PATIENCE, Some(end.as_fd()))?;
        records.append(&mut engine.records());
        records.truncate(RECORDS_MAX);
        if !asked {
            continue;
        }
        let Some((ask, _)) = wire::receive::<Ask>(end)? else { return Ok(()) };
        let told =
            answer(engine, ask, &mut records).unwrap_or_else(|error| Told::Failed(format!("{error:#}")));
        wire::send(end, &told, &[])?;
    }
}

/// Most records that wait to be fetched; they are fetched every second.
const RECORDS_MAX: usize = 100_000;

fn answer(engine: &mut Engine, ask: Ask, records: &mut Vec<ShuntRecord>) -> anyhow::Result<Told> {
    Ok(match ask {
        Ask::Start { .. } => Told::Failed(AT_WORK.into()),
        Ask::Flows => {
            engine.count()?;
            Told::Flows(engine.flows())
        }
        Ask::Pin(which, action) => Told::Found(engine.pin(&which.into(), action)?),
        Ask::Withdraw(which) => Told::Found(engine.withdraw(&which.into())?),
        Ask::Records => Told::Records(std::mem::take(records), engine.capacity()),
    })
}
