//! The control plane (EPI framework, Sec. II): `sidetrack orchestrate` and `sidetrack domain`, and what they say to each other.
//!
//! An application is set up in the eight steps of Fig. 1 ([`api::Step`]): the orchestrator asks the agent of every domain it
//! touches for access and nodes, plans by the agreement which functions stand where, and tells the agents what their proxies
//! may let through. An agent composes the agreement of its proxies out of nothing but what it has granted itself.
//!
//! Nothing here is on the data path. Proxies keep the agreement they have been given last in a file; when an agent or the
//! orchestrator is gone they go on as they are. Every decision that cannot be made is a no.

pub mod api;
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
use domain::Domain;
use link::serve;
use orchestrator::Orchestrator;
use settings::{DomainSettings, OrchestratorSettings};
use sidetrack_sys::confine;
use std::path::Path;
use std::sync::Arc;
use store::FileStore;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Runs an orchestrator until SIGTERM or SIGINT.
///
/// # Errors
/// What is wrong with its file, its agreement or its state, or that its address is taken.
pub async fn orchestrate(file: &Path) -> anyhow::Result<()> {
    let settings = OrchestratorSettings::load(file).map_err(crate::config::BadConfiguration::from)?;
    confine();
    let store = Arc::new(FileStore::open(&settings.state)?);
    let (listen, mutual) = (settings.listen.clone(), settings.mutual.clone());
    let orchestrator = Arc::new(Orchestrator::new(settings, store)?);
    let work = tokio::spawn(orchestrator.clone().follow());
    until_told(&listen, mutual, orchestrator::router(orchestrator), "orchestrator").await?;
    work.abort();
    Ok(())
}

/// Runs a domain's agent until SIGTERM or SIGINT.
///
/// # Errors
/// What is wrong with its file or its state, or that its address is taken.
pub async fn domain(file: &Path) -> anyhow::Result<()> {
    let settings = DomainSettings::load(file).map_err(crate::config::BadConfiguration::from)?;
    confine();
    let store = Arc::new(FileStore::open(&settings.state)?);
    let (listen, mutual) = (settings.listen.clone(), settings.mutual.clone());
    let domain = Arc::new(Domain::new(settings, store));
    let work = tokio::spawn(domain.clone().follow());
    until_told(&listen, mutual, domain::router(domain), "domain").await?;
    work.abort();
    Ok(())
}

/// Before a peer's byte is read, and while there is one thread.
fn confine() {
    if let Err(error) = confine::confine_process(confine::Kind::Control) {
        tracing::warn!("system calls are not confined: {error}");
    }
}

async fn until_told(
    listen: &str,
    mutual: crate::tls::Mutual,
    router: axum::Router,
    kind: &str,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(listen).await.with_context(|| format!("listen = \"{listen}\""))?;
    let address = listener.local_addr()?;
    let (stop, stopped) = watch::channel(false);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let serving = tokio::spawn(serve(listener, mutual, router, stopped));
    tracing::info!(kind, %address, "listening");
    tracing::info!("ready");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    let _ = stop.send(true);
    Ok(serving.await??)
}
