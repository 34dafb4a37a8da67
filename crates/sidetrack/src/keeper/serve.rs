//! The keeper's side of the connection.

use super::derive::Proved;
use super::kernel::Kernel;
use super::{Ask, Begin, LISTENERS_MAX, Order, SAID_BEFORE, Told};
use crate::process;
use crate::rights::TO_BECOME;
use crate::wire;
use anyhow::Context;
use sidetrack_core::flow::Process;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::confine;
use sidetrack_sys::conntrack::Events;
use sidetrack_sys::process as system;
use sidetrack_sys::undo::Guard;
use sidetrack_sys::{scm, sockopt};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Needed by the keeper and its guard: the packet filter, routing and conntrack.
const NEEDED: CapabilitySet = CapabilitySet::NET_ADMIN;

/// Needed to find owners of sockets: it reads the descriptors of other users' processes.
const FOR_OWNERS: CapabilitySet = CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_READ_SEARCH);

/// Most bytes of a request, also of an attached one: enough for an order with about 200,000 networks.
pub const REQUEST_MAX: usize = 4 << 20;

/// The name of this process in `ps` and `top`.
const NAME: &std::ffi::CStr = c"sidetrack-keep";

/// Serves until the other end closes, then undoes everything.
///
/// # Errors
/// The connection fails in another way, or something could not be undone.
pub fn keep(end: OwnedFd) -> anyhow::Result<()> {
    // Only the end of the connection ends the keeper: an interrupt from a terminal must not end it earlier.
    system::ignore_stop_signals();
    // The program was started by way of /proc/self/exe. An error only affects the name in `ps`.
    let _ = system::set_name(NAME);
    // CAP_SETPCAP is needed only until the bounding set is reduced.
    keep_only(NEEDED | FOR_OWNERS | TO_BECOME)?;
    let Some(begin) = first(&end)? else { return Ok(()) };
    keep_only(if begin.owners { NEEDED | FOR_OWNERS } else { NEEDED })?;
    let guard = Guard::spawn(&[]).context("cannot start the guard that undoes what we do")?;
    if let Err(error) = confine::confine_process(confine::Kind::Keeper) {
        tracing::warn!("the keeper's system calls are not confined: {error}");
    }
    wire::send(&end, &Told::Begun, &[])?;
    let mut serving = Serving { begin, kernel: Kernel::new(guard), proved: Vec::new() };
    let served = serving.serve(&end);
    serving.kernel.take_back(matches!(served, Ok(true)))?;
    served.map(drop)
}

/// Gives up all other rights.
fn keep_only(needed: CapabilitySet) -> anyhow::Result<()> {
    let held = caps::capabilities().context("capabilities")?.permitted;
    caps::keep_only(held & needed).context("cannot give up capabilities")
}

/// A request with its descriptors; an error if it was invalid and has been answered.
type Request = Result<(Ask, Vec<OwnedFd>), ()>;

/// Receives the next request; `None` if the other end is closed.
fn request(end: &OwnedFd) -> anyhow::Result<Option<Request>> {
    match wire::receive_at_most(end, REQUEST_MAX) {
        Ok(request) => Ok(request.map(Ok)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            refuse(end, format!("not a request: {error}"))?;
            Ok(Some(Err(())))
        }
        Err(error) => Err(error.into()),
    }
}

fn refuse(end: &OwnedFd, why: impl Into<String>) -> io::Result<()> {
    wire::send(end, &Told::Failed(why.into()), &[])
}

/// Receives the first request; `None` if the other end is closed.
fn first(end: &OwnedFd) -> anyhow::Result<Option<Begin>> {
    loop {
        match request(end)? {
            // No answer is sent: a failure ends the keeper, and the next request shows that.
            Some(Ok((Ask::Become(user), _))) => {
                user.become_it(NEEDED | FOR_OWNERS | CapabilitySet::SETPCAP)?
            }
            Some(Ok((Ask::Begin(begin), _))) => return Ok(Some(begin)),
            Some(Ok(_)) => refuse(end, "the first request says what later ones may ask for")?,
            Some(Err(())) => {}
            None => return Ok(None),
        }
    }
}

/// The state of a running keeper.
struct Serving {
    begin: Begin,
    kernel: Kernel,
    /// Listeners for the next order.
    proved: Vec<Proved>,
}

impl Serving {
    /// Serves requests; returns whether the end was announced.
    fn serve(&mut self, end: &OwnedFd) -> anyhow::Result<bool> {
        let mut orderly = false;
        loop {
            let patience = self.kernel.tend();
            if !scm::wait(end, patience)? {
                continue;
            }
            match request(end)? {
                Some(Ok((Ask::Release, _))) => {
                    orderly = true;
                    wire::send(end, &Told::Released, &[])?;
                }
                Some(Ok((ask, fds))) => self.answer(end, ask, fds)?,
                Some(Err(())) => {}
                None => return Ok(orderly),
            }
        }
    }

    fn answer(&mut self, end: &OwnedFd, ask: Ask, fds: Vec<OwnedFd>) -> io::Result<()> {
        match ask {
            Ask::Listeners => match self.prove(&fds) {
                Ok(()) => wire::send(end, &Told::Listening, &[]),
                Err(why) => {
                    self.proved.clear();
                    refuse(end, why)
                }
            },
            Ask::Steer(order) => match self.steer(&order) {
                Ok((warnings, events)) => {
                    let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
                    wire::send(end, &Told::Steered { warnings }, &fds)
                }
                Err(error) => refuse(end, format!("{error:#}")),
            },
            Ask::Flows => match self.kernel.flows() {
                Ok(flows) => wire::send(end, &Told::Flows(flows), &[]),
                Err(error) => refuse(end, error.to_string()),
            },
            Ask::Owner(socket) if self.begin.owners => {
                let Process { pid, name, uid, is_hidden } = process::on_this_host(socket);
                let told = Told::Owner { pid, name, uid, is_hidden };
                wire::send(end, &told, &[])
            }
            Ask::Owner(_) => refuse(end, "no rule asked for processes when sidetrack started"),
            Ask::Become(_) | Ask::Begin(_) => refuse(end, SAID_BEFORE),
            Ask::Release => Ok(()),
        }
    }

    /// Checks that these are listeners.
    fn prove(&mut self, fds: &[OwnedFd]) -> Result<(), String> {
        for fd in fds {
            if self.proved.len() == LISTENERS_MAX {
                return Err(format!("more than {LISTENERS_MAX} listeners"));
            }
            let seen = sockopt::inspect_listener(fd).map_err(|error| format!("not a listener: {error}"))?;
            self.proved.push(Proved {
                address: seen.address,
                protocol: seen.protocol,
                transparent: seen.transparent,
            });
        }
        Ok(())
    }

    fn steer(&mut self, order: &Order) -> anyhow::Result<(Vec<String>, Option<Events>)> {
        let proved = std::mem::take(&mut self.proved);
        anyhow::ensure!(
            self.begin.closed || !order.closed,
            "on_crash = \"closed\" was not in the configuration that sidetrack started with: restart it"
        );
        let work = order.work(&proved).map_err(anyhow::Error::msg)?;
        self.kernel.steer(work)
    }
}
