//! Refreshes a stored response in the background, after a client was served the stale one (RFC 5861 Sec. 3).

use super::Cache;
use super::content::Content;
use super::copy::{Outgoing, Progress, Tee, copy_body};
use super::exchange::Turn;
use super::fetch::{Fetched, Interim, Way, add_date};
use super::filling::Filling;
use super::pool::Server;
use super::request::{Asked, name_of};
use super::store::{Claim, Object};
use crate::live::{Decided, profile::Stage};
use crate::session::{Entry, Watched};
use sidetrack_core::flow::EndReason;
use sidetrack_core::http::cache::{Extent, Refreshed, Stored, conditions, may_store, refresh};
use sidetrack_core::http::framing::{Decoder, Length};
use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;

/// Starts a refresh, if none is under way for this key. It is a flow with its own record.
pub(super) fn behind(turn: &Turn<'_>, cache: &Cache, key: &[u8], object: &Arc<Object>) {
    let Claim::Fetch(fetching) = cache.store.claim(key) else { return };
    let (worker, proxy) = (turn.worker.clone(), turn.proxy.clone());
    let asked = turn.asked.again();
    let (key, object) = (key.to_vec(), object.clone());
    crate::reactor::spawn(async move {
        let Some(cache) = &proxy.cache else { return };
        let mut entry = Entry::new(&worker);
        let live = entry.live().clone();
        live.decide(Decided::new(asked.flow.clone(), None));
        let progress = Progress::of(&worker, &live, &asked.route);
        let way = Way {
            worker: &worker,
            route: &asked.route,
            flow: &asked.flow,
            resource: &asked.resource,
            is_configured: asked.is_configured,
            progress,
            proxy: &proxy,
            bound: None,
            binds: asked.hop.binds,
            by_quic: Cell::default(),
            guard: asked.guard.as_ref(),
        };
        let refreshed =
            Watched::new(Stage::Http, pin!(run(&way, cache, &key, &asked, &object)), &live, worker.clock)
                .await;
        let (reason, what) = match refreshed {
            Ok(Ok(status)) => (EndReason::Ok, name_of(&asked, &[&status.to_string(), "refreshed"])),
            Ok(Err((reason, why))) => (reason, name_of(&asked, &["not refreshed:", &why])),
            Err(reason) => (reason, name_of(&asked, &["not refreshed in time"])),
        };
        entry.end(reason, Some(what));
        drop(fetching);
    });
}

/// Validates the stored response, or fetches a new one; returns the status received.
async fn run(
    way: &Way<'_>,
    cache: &Cache,
    key: &[u8],
    asked: &Asked,
    object: &Arc<Object>,
) -> Result<u16, (EndReason, String)> {
    let mut request = asked.request.clone();
    conditions(&mut request.fields, &object.stored, &[]);
    let requested_s = super::now_s();
    let fetched = way.fetch(&request, Interim { client: None }).await;
    let (server, mut fetched) = fetched.map_err(|failure| (failure.reason, failure.detail))?;
    let status = fetched.response.status;
    let times = (requested_s, super::now_s());
    if status == 304 {
        let mut stored = object.stored.clone();
        let updated = refresh(&mut [&mut stored], &fetched.response, times, &cache.rules);
        if updated != Refreshed::Unknown {
            let new = Object { stored, content: object.content.clone() };
            cache.store.replace(key, object, Some(Arc::new(new)));
        }
        if fetched.keeps_alive {
            asked.route.put(server);
        }
        return Ok(status);
    }
    if status >= 500 {
        return Ok(status);
    }
    add_date(&mut fetched.response.fields);
    let keeps = may_store(&request.method, &request.fields, &fetched.response, &cache.rules);
    match (keeps, fetched.length.length) {
        (Ok(Extent::Whole), Length::Exact(length)) if length <= cache.object_max => {
            let fields = &asked.request.fields;
            let stored = Stored::new(fields, &fetched.response, Extent::Whole, times, &cache.rules);
            let new = Arc::new(Object { stored, content: Arc::new(Content::coming(length)) });
            keep(way, server, fetched, Filling::begin(cache, key, &new)).await;
        }
        (Ok(Extent::Whole), Length::Chunked | Length::UntilClose) if fetched.length.is_certain => {
            let fields = &asked.request.fields;
            let stored = Stored::new(fields, &fetched.response, Extent::Whole, times, &cache.rules);
            let content = read_all(way, server, &fetched, cache.object_max).await?;
            cache.store.insert(key, Arc::new(Object { stored, content: Arc::new(Content::whole(content)) }));
        }
        _ => cache.store.replace(key, object, None),
    }
    Ok(status)
}

/// Reads content of unknown length, up to a limit.
async fn read_all(
    way: &Way<'_>,
    mut server: Server,
    fetched: &Fetched,
    max: u64,
) -> Result<Vec<u8>, (EndReason, String)> {
    let mut tee = Tee::new(max, None);
    let mut decoder = Decoder::new(fetched.length.length);
    let from = (&server.stream, &mut server.buffer);
    let read = copy_body(from, &mut decoder, &mut Outgoing::nowhere(), Some(&mut tee), way.progress).await;
    read.map_err(|stopped| (EndReason::ServerReset, format!("{stopped:?}")))?;
    if fetched.keeps_alive && fetched.length.length == Length::Chunked {
        way.route.put(server);
    }
    if tee.is_over { Err((EndReason::Limit, "it is too large to be kept".to_owned())) } else { Ok(tee.bytes) }
}

async fn keep(way: &Way<'_>, mut server: Server, fetched: Fetched, filling: Filling) {
    let filled = filling.run(&mut server, fetched.length.length, way.progress).await;
    if filled && fetched.keeps_alive {
        way.route.put(server);
    }
}
