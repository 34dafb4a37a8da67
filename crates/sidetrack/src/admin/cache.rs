//! Routes for caches: their contents, and removing resources.

use super::AdminState;
use super::error::ApiError;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::{Deserialize, Serialize};

/// Most resources in one list.
const LIST_MAX: usize = 10_000;
/// Default number of resources in a list.
const LIST: usize = 100;

/// The caches of all listeners.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caches {
    /// One entry for each listener that has a cache.
    pub caches: Vec<CacheStatus>,
}

/// A cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// Its listener's name.
    pub listener: String,
    /// The store in memory.
    pub memory: MemoryStatus,
    /// The store on disk, if one is configured.
    pub disk: Option<DiskStatus>,
    /// Counts of requests since the start.
    #[serde(default)]
    pub requests: CacheRequests,
}

/// Counts of requests, by their result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheRequests {
    /// Answered from the cache alone.
    pub hits: u64,
    /// Asked of the server or of a sibling, because nothing fresh was stored.
    pub misses: u64,
    /// Not for the cache: another method, or a request that forbids it.
    pub passed: u64,
}

/// The store in memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryStatus {
    /// Number of resources.
    pub resources: usize,
    /// Bytes in use.
    pub bytes: u64,
    /// Most bytes.
    pub capacity_bytes: u64,
}

/// The store on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Its folder.
    pub folder: String,
    /// Number of resources.
    pub resources: usize,
    /// Number of files: one for each variant of a resource.
    pub files: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// Most bytes.
    pub capacity_bytes: u64,
    /// Whether all files of an earlier run were found.
    pub scanned: bool,
    /// Number of files that were damaged and removed.
    pub broken: u64,
    /// Why no files can be written at the moment.
    pub trouble: Option<String>,
    /// Responses that were not written since the start, because writing failed or was paused.
    #[serde(default)]
    pub unwritten: u64,
}

/// Stored resources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedResources {
    /// The resources, ordered by listener and key.
    pub resources: Vec<CachedResource>,
}

/// A stored resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedResource {
    /// The name of the cache's listener.
    pub listener: String,
    /// The key: the normalised URL.
    pub key: String,
    /// Bytes of content in memory.
    pub memory_bytes: u64,
    /// Bytes in files.
    pub disk_bytes: u64,
}

/// The resources that a request is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheScope {
    /// One URL, with all its variants.
    Url(String),
    /// All URLs that begin with this one.
    Prefix(String),
    /// All.
    All,
}

/// The number of removed resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Purged {
    /// The number.
    pub purged: usize,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListWish {
    listener: Option<String>,
    prefix: Option<String>,
    limit: Option<usize>,
    order: Option<Order>,
}

/// The order of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// By listener and key.
    #[default]
    Key,
    /// The largest first, among the first [`LIST_MAX`] of each cache.
    Bytes,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PurgeWish {
    listener: Option<String>,
    url: Option<String>,
    prefix: Option<String>,
    all: Option<bool>,
}

impl PurgeWish {
    fn scope(&self) -> Result<CacheScope, ApiError> {
        match (&self.url, &self.prefix, self.all) {
            (Some(url), None, None) => Ok(CacheScope::Url(url.clone())),
            (None, Some(prefix), None) => Ok(CacheScope::Prefix(prefix.clone())),
            (None, None, Some(true)) => Ok(CacheScope::All),
            _ => Err(ApiError::bad_request(
                "nothing says what is to be removed",
                "the path takes one of url=http://host/path, prefix=http://host/path and all=true",
            )),
        }
    }
}

fn refused(error: String) -> ApiError {
    ApiError::bad_request(
        error,
        "write a whole URL, http://host/path or https://host/path; `sidetrack cache ls` lists what there is",
    )
}

impl AdminState {
    /// Calls `ask` on a thread that may block, because it reads files.
    async fn of_caches<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&dyn super::Control) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let control = self.control.clone();
        let told = tokio::task::spawn_blocking(move || ask(&*control)).await;
        told.map_err(|error| ApiError::internal(format!("asking the caches ended early: {error}")))
    }
}

pub(super) async fn stat(State(state): State<AdminState>) -> Result<Json<Caches>, ApiError> {
    Ok(Json(Caches { caches: state.of_caches(|control| control.caches()).await? }))
}

pub(super) async fn list(
    State(state): State<AdminState>,
    wish: Result<Query<ListWish>, QueryRejection>,
) -> Result<Json<CachedResources>, ApiError> {
    let help = "the path takes listener=, prefix=http://host/path, limit=100 and order=key or bytes";
    let Query(wish) = wish.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let scope = wish.prefix.map_or(CacheScope::All, CacheScope::Prefix);
    let (listener, most) = (wish.listener, wish.limit.unwrap_or(LIST).min(LIST_MAX));
    let by_bytes = wish.order == Some(Order::Bytes);
    let found = move |control: &dyn super::Control| {
        let listed = if by_bytes { LIST_MAX } else { most };
        let mut resources = control.cached(listener.as_deref(), &scope, listed)?;
        if by_bytes {
            resources.sort_by_key(|one| std::cmp::Reverse(one.memory_bytes.max(one.disk_bytes)));
            resources.truncate(most);
        }
        Ok::<_, String>(resources)
    };
    let resources = state.of_caches(found).await?.map_err(refused)?;
    Ok(Json(CachedResources { resources }))
}

pub(super) async fn purge(
    State(state): State<AdminState>,
    wish: Result<Query<PurgeWish>, QueryRejection>,
) -> Result<Json<Purged>, ApiError> {
    let help = "the path takes listener= and one of url=, prefix= and all=true";
    let Query(wish) = wish.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let scope = wish.scope()?;
    let purge = move |control: &dyn super::Control| control.purge(wish.listener.as_deref(), &scope);
    let purged = state.of_caches(purge).await?.map_err(refused)?;
    Ok(Json(Purged { purged }))
}
