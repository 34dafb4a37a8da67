//! The control plane (EPI framework, Sec. II): `sidetrack orchestrate` and `sidetrack domain`, and the protocol
//! between them.
//!
//! An application is set up in the eight steps of Fig. 1 ([`api::Step`]). The orchestrator asks the agent of
//! each domain it touches for access and nodes. It plans by the agreement which functions run where, and tells
//! the agents what their proxies may let through. An agent makes the agreement of its proxies only from what it
//! has granted itself.
//!
//! Nothing here is on the data path. Proxies store their last agreement in a file, and continue with it if an
//! agent or the orchestrator is down. If a decision cannot be made, the answer is no.

#![forbid(unsafe_code)]

pub mod agreement;
pub mod api;
mod confined;
pub mod domain;
mod facts;
pub mod image;
pub mod link;
pub mod name;
pub mod openapi;
pub mod orchestrator;
pub mod settings;
pub mod store;

use anyhow::Context;
use confined::confine;
use domain::Domain;
use domain::sockets::Sockets;
use link::serve;
use orchestrator::Orchestrator;
use settings::{DomainSettings, OrchestratorSettings, StateAt};
use sidetrack_common::rights::DataUser;
use sidetrack_common::systemd::Systemd;
use sidetrack_common::systemd::passed::Passed;
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use store::{EtcdStore, FileStore, Store};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Threads of an orchestrator.
const THREADS: usize = 4;

/// Runs an orchestrator until SIGTERM or SIGINT.
///
/// # Errors
/// Says what is wrong with its file, its agreement or its state, or that its address is taken.
pub fn orchestrate(file: &Path) -> anyhow::Result<()> {
    let passed = Passed::from_environment()?;
    let settings =
        OrchestratorSettings::load(file).map_err(sidetrack_common::file::BadConfiguration::from)?;
    // Root's files first: the state stays open.
    let file = match &settings.state {
        StateAt::File(path) => Some(Arc::new(FileStore::open(path)?)),
        StateAt::Etcd(_) => None,
    };
    let again: Vec<_> = settings.images.values().chain([&settings.agreement]).map(|path| &**path).collect();
    let user = DataUser::of(&settings.user)?;
    let systemd = Systemd::from_environment();
    let bound = confine((&settings.listen, &passed), user.as_ref(), &again)?;
    // Threads begin only now, with the rights that are left. Several: requests to etcd block the one they are made on.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
    let store: Arc<dyn Store> = match (file, &settings.state) {
        (None, StateAt::Etcd(at)) => Arc::new(EtcdStore::new(at.clone(), runtime.handle().clone())),
        (Some(file), _) => file,
        (None, StateAt::File(path)) => Arc::new(FileStore::open(path)?),
    };
    let mutual = settings.mutual.clone();
    let orchestrator = Arc::new(Orchestrator::new(settings, store)?);
    orchestrator.join()?;
    let served = runtime.block_on(async {
        let work = tokio::spawn(orchestrator.clone().follow());
        let member = tokio::spawn(orchestrator.clone().belong());
        let router = orchestrator::router(orchestrator.clone());
        let served = until_told(bound, mutual, router, ("orchestrator", systemd)).await;
        work.abort();
        member.abort();
        served
    });
    orchestrator.leave();
    // A request that no member of etcd answers does not hold the end up.
    runtime.shutdown_background();
    served
}

/// Runs a domain's agent until SIGTERM or SIGINT.
///
/// # Errors
/// Says what is wrong with its file or its state, that its address is taken, or that the process for its sockets has ended.
pub async fn domain(file: &Path) -> anyhow::Result<()> {
    let passed = Passed::from_environment()?;
    let settings = DomainSettings::load(file).map_err(sidetrack_common::file::BadConfiguration::from)?;
    let user = DataUser::of(&settings.user)?;
    let sockets = Arc::new(Sockets::start(&settings, user.as_ref())?);
    // Root's files first: the state stays open.
    let store = Arc::new(FileStore::open(&settings.state)?);
    let systemd = Systemd::from_environment();
    let bound = confine((&settings.listen, &passed), user.as_ref(), &[])?;
    let mutual = settings.mutual.clone();
    let domain = Arc::new(Domain::new(settings, store, sockets.clone()));
    let work = tokio::spawn(domain.clone().follow());
    let served = tokio::select! {
        served = until_told(bound, mutual, domain::router(domain), ("domain", systemd)) => served,
        gone = sockets.gone() => Err(gone),
    };
    work.abort();
    served
}

async fn until_told(
    bound: std::net::TcpListener,
    mutual: sidetrack_common::tls::Mutual,
    router: axum::Router,
    (kind, systemd): (&str, Option<Systemd>),
) -> anyhow::Result<()> {
    let listener = TcpListener::from_std(bound).context("the listener")?;
    let address = listener.local_addr()?;
    let (stop, stopped) = watch::channel(false);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let serving = tokio::spawn(serve(listener, mutual, router, stopped));
    tracing::info!(kind, %address, "listening");
    tracing::info!("ready");
    systemd.iter().for_each(Systemd::ready);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        never = answer_watchdog(systemd.as_ref()) => match never {},
    }
    systemd.iter().for_each(|systemd| systemd.stopping("ending"));
    let _ = stop.send(true);
    Ok(serving.await??)
}

/// Answers systemd's watchdog for as long as the event loop goes round. Never ends; without a watchdog nothing is sent.
async fn answer_watchdog(systemd: Option<&Systemd>) -> Infallible {
    let beat = systemd.and_then(|systemd| Some((systemd, systemd.beat()?)));
    let Some((systemd, beat)) = beat else { return std::future::pending().await };
    loop {
        tokio::time::sleep(beat).await;
        systemd.alive();
    }
}
