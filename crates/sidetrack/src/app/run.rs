//! `sidetrack run -- CMD`: intercepts one command and its children, without a rule on the host.

mod connects;
mod failures;
mod jail;
mod notices;
mod packets;
mod publish;
mod report;
mod tap;

use super::budget::warm_room;
use super::control::ControlOfRun;
use super::sockets::Bound;
use super::threads::{Fleet, Serving};
use super::up::control_runtime;
use crate::admin::{self, AdminSocket, AdminState, ListenerStatus};
use crate::agreement::InForce;
use crate::capture::Captures;
use crate::carry::Dialing;
use crate::carry::tunnel::quic;
use crate::config::{
    Admin, CaptureAt, Config, Export, HttpListener, Limits, OnCrash, Record, RecordTo, RunAs, RunDns, Tap,
};
use crate::dns;
use crate::http::Proxy;
use crate::intercept::hold::Hold;
use crate::intercept::run::{Launched, RunOptions, launch};
use crate::intercept::{Catches, Listening, RunCatch};
use crate::live::{Clock, Ended, Ledger, LiveFlow};
use crate::metrics::Metrics;
use crate::process::Owners;
use crate::record::{Feed, FlowRecord, RecordWriter, Recorder, Target};
use crate::worker::Shared;
use anyhow::Context;
use arc_swap::ArcSwap;
use connects::Answers;
use failures::Telling;
use jail::{JailedNames, NamesWithoutSecrets};
pub use publish::Publish;
use publish::Published;
pub use report::Report;
use sidetrack_core::carrier::{Carrier, Hop};
use sidetrack_core::flow::{HostName, Intercept, Protocol};
use sidetrack_core::hold::Overflow;
use sidetrack_core::jail::Jail;
use sidetrack_core::limit::Budget;
use sidetrack_core::net::{IpSet, PortSet};
use sidetrack_core::policy::{Action, Carry, Connect, Policy};
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::confine;
use sidetrack_sys::connects::Questions;
use sidetrack_sys::exec::Ended as CommandEnded;
use sidetrack_sys::udp;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
pub use tap::TapCommand;
use tokio::sync::watch;

/// The name of the one listener, for rules and records.
const LISTENER: &str = "run";

/// Descriptors reserved for other uses than flows.
const DESCRIPTOR_RESERVE: u64 = 64;

/// How long a flow may be idle after the command's end before it is cut. Flows that still move bytes go on.
const LAST_BYTES: Duration = Duration::from_secs(2);

/// The same for flows of datagrams.
const LAST_DATAGRAMS: Duration = Duration::from_millis(50);

/// How often flows that outlive the command are checked.
const LAST_BYTES_LOOK: Duration = Duration::from_millis(10);

/// Most flows that `run` can report at its end.
const TOLD_MAX: usize = 1000;

/// Said if a filter around a jail takes the questions about connects.
const ASKED_AROUND: &str = "sidetrack: a filter around this command asks about connects already: over IPv4, a denied one fails with EHOSTUNREACH \
                            instead of EACCES\n";

/// The exit code if something was refused and the user wants to know.
const REFUSED: u8 = 120;

/// The command line of `run`.
#[derive(Clone, Debug)]
pub struct RunCommand {
    /// The command, and how it is intercepted.
    pub options: RunOptions,
    /// The hops in their order; empty: the configuration's rules apply, or connections are direct.
    pub via: Vec<Hop>,
    /// A file with rules.
    pub config: Option<PathBuf>,
    /// When connections are accepted. `Auto`: as the rules say.
    pub connect: Connect,
    /// What the command may reach; `None`: what the hops or the file with rules say.
    pub jail: Option<Jail>,
    /// What is written at the end about all destinations.
    pub report: Option<Report>,
    /// The file for a profile of what was reached.
    pub learn: Option<PathBuf>,
    /// End with exit code 120 if something was refused.
    pub fail_on_deny: bool,
    /// How DNS questions are answered; `None`: as the configuration says.
    pub dns: Option<RunDns>,
    /// How TLS connections are intercepted; `None`: they are forwarded unchanged.
    pub tap: Option<TapCommand>,
    /// Ports of this host that lead to servers of the command.
    pub publish: Vec<Publish>,
    /// The file for the command's packets.
    pub pcapng: Option<PathBuf>,
    /// The file for records.
    pub records: Option<PathBuf>,
    /// The file for our own lines; `None`: standard error.
    pub log: Option<PathBuf>,
    /// Report every flow at the end.
    pub verbose: bool,
    /// Do not report failures.
    pub quiet: bool,
}

/// Runs the command to its end; returns how it ended.
///
/// # Errors
/// The setup failed and the command did not run, or the command could not be watched.
pub fn run(command: RunCommand) -> anyhow::Result<CommandEnded> {
    let log = command.log.as_deref().map(notices::open).transpose()?;
    let config = configuration(&command)?;
    let agreement = super::agreement::read(&config, &InForce::default())?;
    let writer_target = match &config.record.to {
        RecordTo::File(path) => Some(Target::File(path.clone())),
        _ => None,
    };
    let (soft, _) = caps::open_files_limit();
    let (tap, trusted) = command.tap.as_ref().map(|tap| tap.prepare(&config)).transpose()?.unzip();
    let http = tap.map(served).transpose()?;
    // Requests of intercepted connections are answered one by one, so those are accepted early.
    let is_closed = command.jail.as_ref().is_some_and(|jail| jail.closed && !jail.audit);
    let may_hold = http.is_none() && command.connect != Connect::Early;
    let holds = may_hold && (config.policy.asks_faithful(Intercept::Run) || is_closed);
    let is_asked = config.policy.demands_faithful() || is_closed;
    let audits = command.jail.as_ref().is_some_and(|jail| jail.audit);
    let options = RunOptions {
        open_files_limit: Some(soft),
        trusted,
        hold: holds,
        asks_connects: config.policy.may_deny() && !audits,
        ..command.options.clone()
    };
    let published = publish::bind(&command.publish)?;
    let is_inside = confine::is_confined();
    let mut launched = match launch(&options) {
        Ok(launched) => launched,
        Err(error) => {
            eprintln!("sidetrack: {error}");
            return Ok(CommandEnded::Exit(error.exit_code()));
        }
    };
    notices::begin(log, launched.pid());
    if holds && is_asked && launched.hold.is_none() {
        notices::write(
            "sidetrack: this kernel has no packet queue (NFQUEUE): connections are accepted early\n",
        );
    }
    if is_closed && is_inside && launched.questions.is_none() && !command.quiet {
        notices::write(ASKED_AROUND);
    }
    let captures = packets::open(&mut launched);
    // Before rights are given up: only its thread keeps one.
    let hold = launched.hold.take();
    let hold = hold.map(|sockets| Hold::start(sockets, Overflow::Early, Clock::start())).transpose();
    let hold = hold.context("cannot start the thread that holds connections")?;
    if command.tap.as_ref().is_some_and(|tap| tap.secrets.is_some()) {
        // After the command was started: it keeps its own limit.
        confine::leave_no_core().context("RLIMIT_CORE")?;
        confine::close_memory().context("PR_SET_DUMPABLE")?;
    }
    // CAP_KILL is kept to forward signals to the command and to end its children, whatever user they became.
    let mut wanted = CapabilitySet::KILL;
    if options.attach.is_some() {
        // To see which program of another user has opened a connection.
        wanted |= CapabilitySet::SYS_PTRACE;
    }
    let kept = caps::capabilities()?.permitted & wanted;
    caps::keep_only(kept).context("cannot give up capabilities")?;
    // The command is already running: these limits and system calls do not apply to it.
    if let Err(error) = confine::confine_process(confine::Kind::Run) {
        tracing::debug!("system calls are not confined: {error}");
    }
    let nofile = caps::raise_open_files_limit().context("RLIMIT_NOFILE")?;
    let writer = writer_target.map(RecordWriter::start).transpose().context("--records")?;
    let window = window();
    let watch = Watch { command, config, agreement, nofile, http, writer, window, hold, published, captures };
    control_runtime()?.block_on(watch_over(launched, watch))
}

/// The proxy that serves the command's requests, if its connections are intercepted.
fn served(tap: Tap) -> anyhow::Result<Arc<Proxy>> {
    let settings = HttpListener {
        users: Vec::new(),
        to: None,
        to_secure: None,
        cache: None,
        tap: Some(Arc::new(tap)),
        own: None,
        http3: false,
    };
    super::sockets::proxy(&settings, LISTENER, crate::http::Before::default())
}

fn configuration(command: &RunCommand) -> anyhow::Result<Config> {
    let mut config = match &command.config {
        Some(path) => Config::load(path).map_err(crate::config::BadConfiguration::from)?,
        None => Config {
            version: 1,
            workers: 1,
            capture_ssh: false,
            on_crash: OnCrash::Open,
            user: RunAs::Default,
            admin: Admin::default(),
            record: Record { to: RecordTo::None, recent: TOLD_MAX },
            history: None,
            export: Export::default(),
            capture: CaptureAt::default(),
            log_format: None,
            limits: Limits::default(),
            run_dns: RunDns::Name,
            shunt: None,
            wire: None,
            tap: None,
            listeners: Vec::new(),
            functions: Vec::new(),
            container_engine: None,
            overlay: None,
            tunnels: Vec::new(),
            outgoing: None,
            dns: None,
            agreement: None,
            policy: Arc::new(Policy::new(Vec::new(), Action::default())),
            tests: Vec::new(),
            warnings: Vec::new(),
            named: Vec::new(),
        },
    };
    config.policy = match (&command.jail, &command.config) {
        (Some(jail), Some(_)) => Arc::new(jail.policy_before(&config.policy)?),
        _ => written_policy(command).map(Arc::new).unwrap_or(config.policy),
    };
    config.run_dns = command.dns.unwrap_or(config.run_dns);
    config.record.to = command.records.clone().map_or(RecordTo::None, RecordTo::File);
    Ok(config)
}

/// The rules of the command line, if there are some.
fn written_policy(command: &RunCommand) -> Option<Policy> {
    let is_changed = command.connect != Connect::Auto && command.config.is_none();
    if command.via.is_empty() && !is_changed && command.jail.is_none() {
        return None;
    }
    let direct = command.via.is_empty();
    let carrier = if direct { Carrier::Direct } else { Carrier::Hops(command.via.clone()) };
    let carry = Carry { carrier, connect: command.connect, ..Carry::default() };
    Some(match &command.jail {
        Some(jail) => Jail { carry, ..jail.clone() }.policy(),
        None => Policy::new(Vec::new(), Action::Carry(Arc::new(carry))),
    })
}

/// Binds the socket where `sidetrack flows` finds this run. If that fails, the command runs without it.
fn window() -> Option<AdminSocket> {
    admin::forget_dead_runs();
    match AdminSocket::bind_default(&admin::run_socket(std::process::id())) {
        Ok(socket) => Some(socket),
        Err(error) => {
            tracing::debug!(%error, "`sidetrack flows` will not find this run");
            None
        }
    }
}

/// What is needed while the command runs.
struct Watch {
    command: RunCommand,
    config: Config,
    agreement: Arc<InForce>,
    nofile: u64,
    http: Option<Arc<Proxy>>,
    writer: Option<RecordWriter>,
    window: Option<AdminSocket>,
    hold: Option<Arc<Hold>>,
    published: Vec<publish::Bound>,
    captures: Arc<Captures>,
}

async fn watch_over(mut launched: Launched, watch: Watch) -> anyhow::Result<CommandEnded> {
    let clock = Clock::start();
    let warm = warm_room(&watch.config, watch.nofile, 1);
    let budget = Budget::from_nofile(watch.nofile, DESCRIPTOR_RESERVE + warm);
    let config = Arc::new(ArcSwap::from_pointee(watch.config));
    let owners =
        Owners::Within(launched.pid(), launched.owners.take().map(|diag| Arc::new(Mutex::new(diag))));
    let shared = Shared::new(config.clone(), Dialing::default(), owners, budget, clock);
    let shared = shared.with_warm(usize::try_from(warm).unwrap_or(usize::MAX)).with_hold(watch.hold);
    let shared = Arc::new(shared);
    shared.functions.keep(&shared.config.load().functions);
    shared.agreement.store(watch.agreement);
    let fleet = Fleet::start(&shared, 1)?;
    let metrics = Arc::new(Metrics::new());
    let telling = Arc::new(told_of(Telling::new(metrics.clone(), watch.command.quiet), &watch.command));
    let fail_on_deny = watch.command.fail_on_deny;
    let resolver = resolver(&launched, &config, &telling, &watch.command);
    let questions = launched.questions.take().zip(network_of(&launched));
    let serving = catch(&mut launched, &fleet, watch.http, &resolver)?;
    let datagrams = catch_datagrams(&mut launched, &fleet, &serving)?;
    let writing = packets::begin(&watch.captures, fleet.ledgers(), &watch.command)?;
    fleet.begin();
    if let (Some(asking), Some(serving)) = (questions, serving.first()) {
        answer_connects(asking, &serving.listening, &config, (clock, &fleet))?;
    }
    tell_attached(&launched, &watch.command);
    let published =
        Published::start(watch.published, launched.inside.take(), &shared).context("--publish")?;
    let ledgers = [fleet.ledgers(), &[published.ledger()]].concat();
    let feed = Arc::new(Feed::new(TOLD_MAX));
    let recorder = Recorder::new(ledgers.clone(), feed.clone(), watch.writer, telling.clone());
    let (stop_records, records_stopped) = watch::channel(false);
    let records = tokio::spawn(recorder.run(records_stopped));
    let (stop_window, window_stopped) = watch::channel(false);
    let window = watch.window.map(|socket| {
        let path = watch.command.config.clone();
        let control = ControlOfRun { config, path, listeners: listeners(&serving) };
        let state = AdminState::new(ledgers, feed.clone(), metrics, Arc::new(control));
        let state = state.with_captures(watch.captures);
        tokio::spawn(admin::serve(state, socket, window_stopped))
    });
    let dns = tokio::spawn(launched.serve_dns(resolver, move || clock.now()));
    let counts = tokio::spawn(tell_counts(telling.clone()));
    let ended = launched.wait().await.context("cannot watch the command")?;
    notices::end();
    drop(serving);
    published.finish().await;
    last_bytes(fleet.ledgers(), &datagrams).await;
    drop(datagrams);
    all_datagrams_ended(fleet.ledgers()).await;
    tokio::task::spawn_blocking(move || fleet.stop()).await?;
    packets::end(writing, watch.command.quiet).await;
    dns.abort();
    counts.abort();
    // The recorder stops after all flows have ended, so that every flow has its record.
    let _ = stop_records.send(true);
    records.await?;
    telling.tell_counts(true);
    // By now every client that follows the flows has got the last record.
    let _ = stop_window.send(true);
    if let Some(window) = window {
        window.await??;
    }
    tell_all(&telling, &watch.command, &feed);
    if let Err(error) = launched.finish() {
        notices::write(&format!("sidetrack: {error}\n"));
    }
    Ok(if fail_on_deny && telling.has_refused() { CommandEnded::Exit(REFUSED) } else { ended })
}

/// Says what was attached to.
fn tell_attached(launched: &Launched, command: &RunCommand) {
    let told = launched.notices().iter().filter(|_| !command.quiet);
    told.for_each(|line| notices::write(&format!("sidetrack: {line}\n")));
}

/// What is counted and how it is told, as the command's options say.
fn told_of(telling: Telling, command: &RunCommand) -> Telling {
    let counts_all = command.report.is_some() || command.learn.is_some();
    let telling = if counts_all { telling.with_account() } else { telling };
    if command.jail.is_some() { telling.of_lists() } else { telling }
}

/// Starts the thread that answers denied connects of the command.
fn answer_connects(
    (questions, network): (Questions, OwnedFd),
    listening: &Arc<Listening>,
    config: &Arc<ArcSwap<Config>>,
    (clock, fleet): (Clock, &Fleet),
) -> anyhow::Result<()> {
    let (listening, config) = (listening.clone(), config.clone());
    let record = Box::new(fleet.denials());
    let answers = Answers { questions, listening, network, config, clock, record };
    answers.start().context("cannot start the thread that answers denied connects")
}

/// Returns a socket in the network that the command has.
fn network_of(launched: &Launched) -> Option<OwnedFd> {
    launched.listeners.first()?.as_fd().try_clone_to_owned().ok()
}

fn listeners(serving: &[Serving]) -> Vec<ListenerStatus> {
    let rows = serving.iter().map(|serving| &serving.listening);
    let row = |listening: &Arc<Listening>| ListenerStatus {
        name: listening.name.to_string(),
        kind: listening.catches.intercept().as_str().to_owned(),
        addresses: vec![listening.address],
    };
    rows.map(row).collect()
}

/// Makes the resolver that answers the command. It asks the rules in force which names are resolved here.
fn resolver(
    launched: &Launched,
    config: &Arc<ArcSwap<Config>>,
    telling: &Arc<Telling>,
    command: &RunCommand,
) -> Arc<dns::Resolver> {
    let mode = match config.load().run_dns {
        RunDns::Name => dns::Mode::Name,
        RunDns::Resolve => dns::Mode::Resolve,
    };
    let rules = config.clone();
    let here = move |name: &HostName| rules.load().policy.resolves_here(name, Intercept::Run);
    let servers = dns::servers(&std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default());
    let resolver = dns::Resolver::new(launched.names.clone(), mode, Arc::new(here), servers);
    let told = telling.clone();
    let resolver = resolver.telling(Arc::new(move |name: &HostName| told.no_such_name(name)));
    let is_closed = |jail: &&Jail| jail.closed && !jail.audit;
    let next = command.jail.as_ref().filter(is_closed);
    let next = next.map(|_| JailedNames::new(config.clone(), telling.clone(), launched.pid()));
    let secrets = command.tap.as_ref().and_then(|tap| tap.secrets.clone());
    Arc::new(match (secrets, next) {
        (Some(secrets), next) => {
            let (telling, owners) = (telling.clone(), Owners::Within(launched.pid(), None));
            resolver.admitting(Arc::new(NamesWithoutSecrets { secrets, next, telling, owners }))
        }
        (None, Some(names)) => resolver.admitting(Arc::new(names)),
        (None, None) => resolver,
    })
}

/// Serves the command's connections.
fn catch(
    launched: &mut Launched,
    fleet: &Fleet,
    http: Option<Arc<Proxy>>,
    answers: &Arc<dns::Resolver>,
) -> anyhow::Result<Vec<Serving>> {
    let resolver = launched.resolver();
    let secrets = http.as_deref().and_then(|http| http.settings.tap.as_ref()?.secrets.clone());
    let names = launched.names.clone();
    std::mem::take(&mut launched.listeners)
        .into_iter()
        .map(|socket| {
            let listening = Listening {
                name: LISTENER.into(),
                catches: Catches::Run(RunCatch {
                    names: names.clone(),
                    resolver,
                    answers: answers.clone(),
                    alone: launched.is_isolated(),
                    refused: tapped_ports(http.as_deref()),
                    secrets: secrets.clone(),
                }),
                address: socket.local_addr()?,
                proxy_from: IpSet::default(),
                mptcp: false,
                protocol: Protocol::Tcp,
                has_datagrams: false,
                outgoing: None,
                answers: None,
                names: None,
            };
            Ok(fleet.serve(Bound {
                listening: Arc::new(listening),
                proxy: http.clone(),
                sockets: vec![socket],
                datagrams: Vec::new(),
            }))
        })
        .collect()
}

/// Returns the ports whose connections are intercepted.
fn tapped_ports(http: Option<&Proxy>) -> PortSet {
    http.and_then(|http| http.settings.tap.as_ref()).map(|tap| tap.rules.ports.clone()).unwrap_or_default()
}

/// What serves the datagrams of one IP version, with a copy of its socket.
type ServingDatagrams = (Serving, UdpSocket);

/// Serves the command's datagrams as its connections are served.
fn catch_datagrams(
    launched: &mut Launched,
    fleet: &Fleet,
    serving: &[Serving],
) -> anyhow::Result<Vec<ServingDatagrams>> {
    let Some(Catches::Run(catch)) = serving.first().map(|serving| &serving.listening.catches) else {
        return Ok(Vec::new());
    };
    let answers = launched.answers.take();
    let serve = |socket: UdpSocket| {
        udp::batch::receive_trains(&socket);
        quic::enlarge_buffers(&socket);
        let copy = socket.try_clone()?;
        let listening = Listening {
            name: LISTENER.into(),
            catches: Catches::Run(catch.clone()),
            address: socket.local_addr()?,
            proxy_from: IpSet::default(),
            mptcp: false,
            protocol: Protocol::Udp,
            has_datagrams: false,
            outgoing: None,
            answers: answers.clone(),
            names: None,
        };
        let (listening, datagrams) = (Arc::new(listening), vec![socket]);
        let bound = Bound { listening, proxy: None, sockets: Vec::new(), datagrams };
        Ok((fleet.serve(bound), copy))
    };
    std::mem::take(&mut launched.datagrams).into_iter().map(serve).collect()
}

/// Waits after the command's end, because its last bytes may still be on their way. Answers to datagrams have no
/// receiver any more: it is enough that the command's last ones have left.
async fn last_bytes(ledgers: &[Arc<Ledger>], datagrams: &[ServingDatagrams]) {
    let mut look = tokio::time::interval(LAST_BYTES_LOOK);
    let is_moving = |flow: &Arc<LiveFlow>| match is_datagrams(flow) {
        true => flow.connect_time().is_none() || flow.idle() < LAST_DATAGRAMS,
        false => flow.idle() < LAST_BYTES,
    };
    loop {
        look.tick().await;
        let unread = |socket: &UdpSocket| rustix::io::ioctl_fionread(socket).is_ok_and(|bytes| bytes > 0);
        let moving = datagrams.iter().any(|(_, socket)| unread(socket))
            || ledgers.iter().any(|ledger| ledger.snapshot().iter().any(is_moving));
        if !moving {
            return;
        }
    }
}

/// Waits until no flow of datagrams is left: their listeners have ended them.
async fn all_datagrams_ended(ledgers: &[Arc<Ledger>]) {
    let mut look = tokio::time::interval(LAST_BYTES_LOOK);
    let until = tokio::time::Instant::now() + LAST_BYTES;
    while ledgers.iter().any(|ledger| ledger.snapshot().iter().any(is_datagrams))
        && tokio::time::Instant::now() < until
    {
        look.tick().await;
    }
}

fn is_datagrams(flow: &Arc<LiveFlow>) -> bool {
    flow.decided().is_some_and(|decided| decided.flow.protocol == Protocol::Udp)
}

/// Reports the counts of repeated failures until the task is aborted.
async fn tell_counts(telling: Arc<Telling>) {
    let mut look = tokio::time::interval(Duration::from_secs(1));
    loop {
        look.tick().await;
        let telling = telling.clone();
        // In a blocking task: the reader of standard error may be slow.
        let _ = tokio::task::spawn_blocking(move || telling.tell_counts(false)).await;
    }
}

/// Reports what the command line asks for.
fn tell_all(telling: &Telling, command: &RunCommand, feed: &Feed) {
    if let Some(account) = telling.account() {
        report::write(&account, command.report.as_ref(), command.learn.as_deref());
    }
    if command.verbose {
        tell(&feed.recent(TOLD_MAX, |_| true));
    }
}

/// Reports every flow, the oldest first.
fn tell(ended: &[Ended]) {
    let mut lines = String::new();
    for ended in ended.iter().rev() {
        let decided = ended.flow.decided();
        lines.push_str(&format!("sidetrack: {}\n", FlowRecord::ended(ended, decided.as_deref()).sentence()));
    }
    lines.push_str(&format!("sidetrack: {} flows; no rule was left on this host\n", ended.len()));
    notices::write(&lines);
}
