//! The process that is replaced. It keeps everything that it needs to go on until the change is final.
//!
//! ```text
//! SERVING --a new process was started--> ASKED
//! ASKED --Checked--> OFFERING --Ready--> RESTING (accepts and writes nothing; connections wait) --Go--> GIVEN
//! GIVEN --Serving--> UNCONFIRMED --confirmed, or none was asked for; Stay--> SETTLING (what one process can have is let go)
//! SETTLING --Settled--> GONE: flows move, the others drain
//! ASKED, OFFERING --failure, time-out--> SERVING (nothing has moved)
//! GIVEN, UNCONFIRMED, SETTLING --failure, death, time-out, a stop signal--> TAKING BACK (Back and Returned, else Kill) --> SERVING
//! ```

use super::channel::{Came, Channel, DESCRIPTORS_MAX};
use super::heritage::{State, described};
use super::new::END_SEEN_WITHIN;
use super::obstacles::{draining, obstacle};
use super::parts::{Checked, DRAINS, GoPart, KeeperPart, Order, Said, ServingPart, Wanted};
use super::records::Returning;
use super::resting::Rested;
use super::shunted::{self, take_shunted};
use super::starter::{Starter, may_be_replaced};
use super::steps::{Act, Phase, Side, Step, reached};
use crate::app::node::Node;
use crate::app::shunt::ShuntFlows;
use crate::app::windows::Open;
use crate::keeper::PROTOCOL;
use crate::metrics::{Carried, Metrics};
use crate::record::{RecordWriter, Switch, Target};
use crate::wire;
use anyhow::{Context, bail, ensure};
use sidetrack_common::systemd::Systemd;
use sidetrack_core::upgrade::Kind;
use sidetrack_sys::scm;
use sidetrack_sys::sync::lock;
use sidetrack_sys::undo::Guard;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How long the new process may take to read the configuration, and to prepare itself.
const PREPARED_WITHIN: Duration = Duration::from_secs(60);

/// How long it may take from the moment when nothing is accepted until it accepts.
const SERVES_WITHIN: Duration = Duration::from_secs(20);

/// How long it may take to take over what only one process can have.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

/// How long the old process may take to accept again.
const TAKEN_WITHIN: Duration = Duration::from_secs(20);

/// How long it may take to give everything back.
const RETURNED_WITHIN: Duration = Duration::from_secs(5);

/// Pause between two looks for a confirmation.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Numbers that are left out, for flows that this process still begins.
const NUMBERS_BETWEEN: u64 = 1024;

/// Numbers that a process which gives everything back may have used.
const NUMBERS_GIVEN: u64 = 1 << 24;

/// Some work of this process is done.
fn did(phase: Phase) {
    reached(Step(Side::Old, Act::Did(phase)));
}

/// An upgrade that a command asks for.
struct Asked {
    command: Command,
    channel: Channel,
    confirm: Option<Duration>,
    pid: u32,
}

/// The connection to the command.
struct Command(OwnedFd);

impl Command {
    fn say(&self, said: &Said) {
        // A command that was interrupted changes nothing.
        let _ = wire::send(&self.0, said, &[]);
    }

    fn line(&self, text: impl Into<String>) {
        let text = text.into();
        tracing::info!("upgrade: {text}");
        self.say(&Said::Line(text));
    }

    /// Whether Enter was pressed there.
    fn confirms(&self) -> bool {
        let comes = scm::wait(&self.0, Some(Duration::ZERO)).unwrap_or(false);
        comes && matches!(wire::receive::<super::Wish>(&self.0), Ok(Some((super::Wish::Confirm, _))))
    }
}

/// The result of an upgrade.
enum Outcome {
    /// This process goes on as before.
    Stays,
    /// Another process goes on.
    Gone(Parting),
}

/// What a process that was replaced still has to do.
pub(crate) struct Parting {
    command: Command,
    /// For its last records.
    pub pipe: OwnedFd,
}

impl Parting {
    /// Tells the command that flows drain here.
    pub(crate) fn drains(&self, flows: usize, drain_ms: u64) {
        self.command.line(match flows {
            0 => format!("no flow is left {DRAINS}"),
            flows => format!("{flows} flows drain {DRAINS}, for at most {drain_ms} ms"),
        });
    }

    /// Tells the command that all is done. `cut`: flows that took too long.
    pub(crate) fn done(&self, cut: usize) {
        let text = match cut {
            0 => "the upgrade is done".to_owned(),
            cut => format!("the upgrade is done; {cut} flows took too long and were ended"),
        };
        tracing::info!("upgrade: {text}");
        self.command.say(&Said::Done(text));
    }
}

/// The parts of the node that a hand-over changes.
#[derive(Clone)]
pub(crate) struct Ours {
    pub node: Arc<Node>,
    pub open: Arc<Open>,
    pub switch: Switch,
    pub metrics: Arc<Metrics>,
    pub systemd: Option<Arc<Systemd>>,
    pub shunt: Option<Arc<ShuntFlows>>,
    pub guard: Arc<Mutex<Option<Guard>>>,
}

impl Ours {
    /// Accepts and writes nothing any more. Connections wait in the listeners, ended flows in the ledgers.
    fn rest(&self) -> Vec<Rested> {
        self.open.rest();
        let rested = self.node.rest();
        self.shunt.iter().for_each(|shunt| shunt.rest());
        self.open.paths().into_iter().for_each(|paths| paths.rest());
        self.switch.hold();
        rested
    }

    /// Where another process goes on, with this number of flows left out.
    fn numbers(&self, left_out: u64) -> GoPart {
        GoPart {
            next_flow: self.node.shared.flows_numbered() + left_out,
            first_path: self.node.kernel.paths().next(),
            metrics: self.open.metrics_text(),
        }
    }

    /// Sends what moves with the listeners. It stays here as well, until it is certain who goes on.
    pub(super) fn send_state(&self, to: &mut Channel) -> anyhow::Result<()> {
        self.send_associations(to)?;
        self.send_names(to)?;
        self.send_shunted(to)?;
        let Some(paths) = self.open.paths() else { return Ok(()) };
        for (part, fds) in paths.resting()? {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            to.send_optional(Kind::Path, &part, &fds)?;
        }
        Ok(())
    }

    /// Takes what another process gives back, instead of what is here. Returns the paths.
    fn take_state(&self, state: Vec<Came>) -> Vec<Came> {
        let State { associations, names, paths, shunted } = State::of(state);
        // Those that are missing have ended there, with a record.
        self.take_associations(associations);
        self.take_names(&names);
        take_shunted(self.shunt.as_deref(), &shunted);
        paths
    }

    /// Leaves everything to the other process. Records of flows that end here go into the pipe.
    fn leave(&self, pipe: &OwnedFd) {
        self.open.leave();
        if let Some(guard) = lock(&self.guard).take() {
            // It may have been killed.
            let _ = guard.disarm();
        }
        let writer = pipe.try_clone().and_then(|pipe| RecordWriter::start(Target::Pipe(Arc::new(pipe))));
        let writer = writer.inspect_err(|error| tracing::error!(%error, "the last records are lost"));
        self.switch.go_on(writer.ok(), None);
    }

    /// Gives everything back to the process before this one, and waits until it has taken it. Returns false if that process was
    /// killed meanwhile: then this one goes on. `is_over` says so.
    pub(super) fn give_back(
        &self,
        pipe: &OwnedFd,
        channel: &mut Channel,
        is_over: impl Fn(Duration) -> bool,
    ) -> bool {
        tracing::warn!("upgrade: the process before this one takes everything back");
        let rested = self.rest();
        if let Err(error) = self.send_state(channel) {
            tracing::warn!("not all of the state is given back: {error:#}");
        }
        let returned = channel.send(Kind::Returned, &(), &[]);
        // Nothing follows: it accepts again. The release before this one closes the channel instead.
        let taken = returned.and_then(|()| channel.expect(Kind::FlowsDone, TAKEN_WITHIN));
        if taken.is_err() && is_over(END_SEEN_WITHIN) {
            self.go_on(rested, None);
            return false;
        }
        drop(rested);
        self.leave(pipe);
        self.leave_associations(true);
        true
    }

    /// Accepts and writes again. `paths`: those that another process has given back.
    fn go_on(&self, rested: Vec<Rested>, paths: Option<&[Came]>) {
        self.node.resume(rested);
        self.shunt.iter().for_each(|shunt| shunt.resume());
        let (writer, history) = self.open.records_again();
        self.switch.go_on(writer, history);
        self.open.serve();
        self.open.paths().into_iter().for_each(|own| own.resume(paths));
    }
}

/// The side of a hand-over that may be replaced.
pub(crate) struct Old {
    ours: Ours,
    starter: Arc<Starter>,
    /// The process is told to stop.
    stopping: AtomicBool,
    /// Held while an upgrade is under way.
    giving: Mutex<()>,
    /// The new process serves the associations of UDP that it was offered.
    has_associations: AtomicBool,
}

impl Old {
    /// Nothing is asked for yet.
    pub(crate) const fn new(ours: Ours, starter: Arc<Starter>) -> Self {
        Self {
            ours,
            starter,
            stopping: AtomicBool::new(false),
            giving: Mutex::new(()),
            has_associations: AtomicBool::new(false),
        }
    }

    /// Does the upgrades that are asked for, on a thread of its own, until another process goes on.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn follow(self: Arc<Self>) -> anyhow::Result<oneshot::Receiver<Parting>> {
        let (tell, told) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        let follow = move || {
            let _entered = runtime.enter();
            while let Some(asked) = self.next() {
                let giving = lock(&self.giving);
                if let Outcome::Gone(parting) = self.give(asked) {
                    // The receiver is gone if the keeper has ended meanwhile.
                    let _ = tell.send(parting);
                    drop(giving);
                    return;
                }
            }
            // The node goes on without upgrades.
            std::mem::forget(tell);
        };
        std::thread::Builder::new().name("upgrade".to_owned()).spawn(follow).context("a thread")?;
        Ok(told)
    }

    /// Lets an upgrade that is under way fail, unless it is final, and waits for that.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Relaxed);
        drop(lock(&self.giving));
    }

    /// Waits for the next upgrade that is asked for. Blocks; `None`: the starter has ended.
    fn next(&self) -> Option<Asked> {
        loop {
            let (wanted, fds) = match self.starter.next() {
                Ok(next) => next?,
                Err(error) => {
                    tracing::warn!(%error, "cannot hear the starter: this node cannot be upgraded");
                    return None;
                }
            };
            let mut fds = fds.into_iter();
            match (wanted, fds.next(), fds.next()) {
                (Wanted::Upgrade { confirm_ms, pid }, Some(command), Some(channel)) => {
                    let (command, channel) = (Command(command), Channel::new(channel, Side::Old));
                    return Some(Asked {
                        command,
                        channel,
                        confirm: confirm_ms.map(Duration::from_millis),
                        pid,
                    });
                }
                (Wanted::Confirm, Some(command), _) => {
                    Command(command).say(&Said::Failed("there is no upgrade to confirm".to_owned()));
                }
                _ => {}
            }
        }
    }

    /// Hands over. Blocks.
    fn give(&self, asked: Asked) -> Outcome {
        let Asked { command, mut channel, confirm, pid } = asked;
        command.line(format!("process {pid} was started"));
        if let Err(error) = self.offer(&command, &mut channel) {
            // It may hang.
            let _ = self.starter.order(&Order::Kill, None);
            return self.stays(&command, &error, "nothing has moved");
        }
        let rested = self.ours.rest();
        did(Phase::Rested);
        match self.hand_over(&command, &mut channel, (confirm, pid)) {
            Ok(pipe) => {
                // First, because far nodes wait for them.
                self.ours.move_sessions(&mut channel);
                let _ = self.starter.order(&Order::Leave, None);
                self.ours.leave(&pipe);
                did(Phase::Left);
                self.ours.leave_associations(self.has_associations.load(Relaxed));
                let moved = self.ours.move_flows(&mut channel);
                command.line(format!("{moved} flows have moved"));
                drop(rested);
                Outcome::Gone(Parting { command, pipe })
            }
            Err((error, back)) => {
                self.take_back(channel, rested, back);
                let _ = self.starter.order(&Order::Done, None);
                self.stays(&command, &error, "this process has taken everything back")
            }
        }
    }

    fn stays(&self, command: &Command, error: &anyhow::Error, what: &str) -> Outcome {
        tracing::warn!("upgrade failed: {error:#}; {what}");
        command.say(&Said::Failed(format!("{error:#}; {what}")));
        Outcome::Stays
    }

    /// Lets the new process prepare itself. This one serves meanwhile.
    fn offer(&self, command: &Command, channel: &mut Channel) -> anyhow::Result<()> {
        ensure!(
            may_be_replaced(),
            "this is the first process of a container, which ends with it: replace the container"
        );
        ensure!(!self.stopping.load(Relaxed), "sidetrack is shutting down");
        if let Some(why) = obstacle(&self.ours.node.shared.config.load()) {
            bail!("{why}");
        }
        let Checked { version, .. } = channel.expect(Kind::Checked, PREPARED_WITHIN)?.body()?;
        command.line(format!("version {version} accepts the configuration"));
        let config = self.ours.node.shared.config.load();
        let stay = draining(&config);
        if !stay.is_empty() {
            let (stay, drain_ms) = (stay.join(", "), config.limits.drain_ms);
            command
                .line(format!("these do not move, and have at most {drain_ms} ms after the change: {stay}"));
        }
        for copies in self.ours.node.listening_copies()? {
            for some in copies.fds.chunks(DESCRIPTORS_MAX) {
                let part = described(&copies.listener, copies.address, copies.protocol);
                let fds: Vec<_> = some.iter().map(AsFd::as_fd).collect();
                channel.send(Kind::Listener, &part, &fds)?;
            }
        }
        let windows = self.ours.open.offered()?.into_iter().chain(self.ours.node.offered_windows()?);
        for (part, fd) in windows {
            channel.send(Kind::Window, &part, &[fd.as_fd()])?;
        }
        if let Some(keeper) = &self.ours.node.steered.keeper {
            let copies = keeper.copies().context("the connection to the keeper")?;
            let steered = &self.ours.node.steered;
            let part =
                KeeperPart { protocol: PROTOCOL, begin: steered.may, used: steered.used.load(Relaxed) };
            channel.send(Kind::Keeper, &part, &[copies[0].as_fd(), copies[1].as_fd()])?;
        }
        if let Some(shunt) = &self.ours.shunt {
            shunted::offer(shunt, channel)?;
        }
        if let Some(wires) = self.ours.node.shared.wires() {
            super::wires::offer(wires, channel)?;
        }
        self.ours.offer_overlay(channel)?;
        // For a new process that goes on without this one: numbers that this process may use until its end are left out.
        channel.send(Kind::Offered, &self.ours.numbers(NUMBERS_GIVEN), &[])?;
        channel.expect(Kind::Ready, PREPARED_WITHIN).map(drop)
    }

    /// Hands over and waits until the change is final. An error comes with the pipe of the new process's records, and the
    /// metrics that it has got, if it has got anything.
    fn hand_over(
        &self,
        command: &Command,
        channel: &mut Channel,
        (confirm, pid): (Option<Duration>, u32),
    ) -> Result<OwnedFd, (anyhow::Error, Option<(OwnedFd, Carried)>)> {
        let pipes = std::io::pipe().and_then(|to_new| Ok((to_new, std::io::pipe()?)));
        let ((new_reads, we_write), (we_read, new_writes)) =
            pipes.map_err(|error| (anyhow::Error::from(error), None))?;
        let part = self.ours.numbers(NUMBERS_BETWEEN);
        let metrics = part.metrics.clone();
        self.has_associations.store(false, Relaxed);
        let sent = self.ours.send_state(channel);
        let gone =
            sent.and_then(|()| channel.send(Kind::Go, &part, &[new_reads.as_fd(), new_writes.as_fd()]));
        drop((new_reads, new_writes));
        let confirmed = gone.and_then(|()| channel.expect(Kind::Serving, SERVES_WITHIN)).and_then(|came| {
            let ServingPart { steered, settles, associations } = came.body()?;
            self.has_associations.store(associations, Relaxed);
            if steered {
                self.ours.node.steered.used.store(true, Relaxed);
            }
            command.line("the new process serves new connections");
            confirm.map_or(Ok(()), |limit| self.confirmed(command, channel, limit))?;
            self.settle(command, channel, (pid, settles))
        });
        match confirmed {
            Ok(()) => Ok(we_write.into()),
            Err(error) => Err((error, Some((we_read.into(), Carried::of(&metrics))))),
        }
    }

    /// Waits for the confirmation.
    fn confirmed(&self, command: &Command, channel: &mut Channel, limit: Duration) -> anyhow::Result<()> {
        command.say(&Said::Waiting);
        let until = Instant::now() + limit;
        while Instant::now() < until {
            if command.confirms() {
                return Ok(());
            }
            if scm::wait(self.starter.end(), Some(LOOK_AGAIN))? {
                match self.starter.next()? {
                    Some((Wanted::Confirm, fds)) => {
                        let other = fds.into_iter().next().map(Command);
                        other
                            .iter()
                            .for_each(|other| other.say(&Said::Done("the upgrade is confirmed".to_owned())));
                        return Ok(());
                    }
                    Some((Wanted::Upgrade { .. }, _)) => {}
                    None => bail!("the starter has ended"),
                }
            }
            if channel.has_more() {
                channel.expect(Kind::Returned, Duration::ZERO)?;
                bail!("the new process has given everything back by itself");
            }
            ensure!(!self.stopping.load(Relaxed), "this node was told to stop");
        }
        bail!("not confirmed within {} s", limit.as_secs())
    }

    /// Makes the change final, unless the new process has ended. `settles`: it says when it has everything.
    fn settle(
        &self,
        command: &Command,
        channel: &mut Channel,
        (pid, settles): (u32, bool),
    ) -> anyhow::Result<()> {
        let systemd = self.ours.systemd.as_ref();
        systemd.iter().for_each(|systemd| systemd.replaced_by(pid));
        let (on_wire, stay) = self.ours.let_go_of_wires();
        let sessions = self.ours.let_go_of_overlay();
        did(Phase::LetGo);
        let stays = self.ours.say_stay(channel, &stay).and_then(|()| match settles {
            true => channel.expect(Kind::Settled, SETTLED_WITHIN).map(drop),
            false => Ok(()),
        });
        if stays.is_ok() && on_wire > 0 {
            command.line(format!("{on_wire} flows on the wire go on"));
        }
        if stays.is_ok() && sessions > 0 {
            command.line(format!("{sessions} sessions of the overlay go on"));
        }
        stays.inspect_err(|_| systemd.iter().for_each(|systemd| systemd.replaced_by(std::process::id())))
    }

    fn take_back(&self, mut channel: Channel, rested: Vec<Rested>, back: Option<(OwnedFd, Carried)>) {
        let mut state = Vec::new();
        let returned = channel.send(Kind::Back, &(), &[]).and_then(|()| {
            loop {
                // What it has said before is of no interest any more.
                match channel.next(RETURNED_WITHIN)? {
                    Some(came) if came.kind == Kind::Returned => break Ok(()),
                    Some(came) if State::KINDS.contains(&came.kind) => state.push(came),
                    Some(_) => {}
                    None => bail!("it has ended"),
                }
            }
        });
        if let Err(error) = &returned {
            tracing::warn!("the new process is ended: {error:#}");
            let _ = self.starter.order(&Order::Kill, None);
            // Its end closes the channel: only then are its sockets and the history free.
            while let Ok(Some(_)) = channel.next(RETURNED_WITHIN) {}
        }
        let is_given_back = returned.is_ok() && self.has_associations.load(Relaxed);
        let paths = is_given_back.then(|| self.ours.take_state(state));
        self.ours.node.take_over_wires(&[], false);
        self.ours.overlay_goes_on();
        self.ours.node.shared.number_from(self.ours.node.shared.flows_numbered() + NUMBERS_GIVEN);
        self.ours.go_on(rested, paths.as_deref());
        if let Some((pipe, given)) = back {
            Returning::Back(given).follow(pipe, self.ours.switch.clone(), self.ours.metrics.clone());
        }
        // It may have been killed.
        let _ = channel.send(Kind::FlowsDone, &(), &[]);
    }
}
