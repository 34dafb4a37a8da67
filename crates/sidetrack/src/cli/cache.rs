//! `sidetrack cache`: shows what the caches of a running sidetrack hold, and removes it.

use super::Printed;
use crate::admin::{CachedResources, Caches, Client, Purged, default_socket};
use clap::{Args, Subcommand};
use hyper::Method;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Lists and removes stored HTTP responses
#[derive(Clone, Debug, Args)]
pub struct CacheArgs {
    #[command(subcommand)]
    command: CacheCommand,
    /// Only the cache of this listener
    #[arg(long, value_name = "NAME", global = true)]
    listener: Option<String>,
    /// The admin socket of the running sidetrack
    #[arg(long, value_name = "PATH", global = true)]
    admin: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum CacheCommand {
    /// Shows the size of each cache, in memory and on disk
    Stat {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Lists stored responses
    Ls {
        /// Only URLs that begin with this text
        #[arg(value_name = "URL")]
        prefix: Option<String>,
        /// The maximum number from each cache, up to 10000
        #[arg(long, value_name = "N", default_value_t = 100)]
        limit: usize,
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
    },
    /// Removes the responses of one URL, of all URLs with a prefix, or all
    Purge(PurgeArgs),
}

#[derive(Clone, Debug, Args)]
#[group(id = "what", required = true, multiple = false)]
struct PurgeArgs {
    /// Remove this URL
    #[arg(value_name = "URL")]
    url: Option<String>,
    /// Remove all URLs that begin with this text, at least a host: http://web.example/images/
    #[arg(long, value_name = "URL")]
    prefix: Option<String>,
    /// Remove everything
    #[arg(long)]
    all: bool,
}

/// Runs the subcommand.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &CacheArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let out = runtime.block_on(report(args))?;
    Ok(Printed { out, ..Printed::default() }.print())
}

/// Returns the output of the subcommand.
///
/// # Errors
/// As [`run`].
pub async fn report(args: &CacheArgs) -> anyhow::Result<String> {
    let client = Client::new(args.admin.clone().unwrap_or_else(default_socket));
    let mut query: Vec<(&str, &str)> = Vec::new();
    query.extend(args.listener.as_deref().map(|name| ("listener", name)));
    match &args.command {
        CacheCommand::Stat { json } => {
            let mut found: Caches = client.ask(Method::GET, "/v1/cache", &[]).await?;
            found.caches.retain(|cache| args.listener.as_ref().is_none_or(|name| *name == cache.listener));
            if *json { Ok(serde_json::to_string(&found)? + "\n") } else { Ok(stat(&found)) }
        }
        CacheCommand::Ls { prefix, limit, json } => {
            let limit = limit.to_string();
            query.push(("limit", &limit));
            query.extend(prefix.as_deref().map(|prefix| ("prefix", prefix)));
            let found: CachedResources = client.ask(Method::GET, "/v1/cache/resources", &query).await?;
            if *json { lines(&found) } else { Ok(table(&found)) }
        }
        CacheCommand::Purge(what) => {
            query.extend(what.url.as_deref().map(|url| ("url", url)));
            query.extend(what.prefix.as_deref().map(|prefix| ("prefix", prefix)));
            query.extend(what.all.then_some(("all", "true")));
            let Purged { purged } = client.ask(Method::DELETE, "/v1/cache", &query).await?;
            Ok(format!("{purged} {} removed\n", if purged == 1 { "resource" } else { "resources" }))
        }
    }
}

fn stat(found: &Caches) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    for cache in &found.caches {
        let memory = &cache.memory;
        let _ = writeln!(
            text,
            "{}\n  memory {:>10} resources {:>14} of {} bytes",
            cache.listener, memory.resources, memory.bytes, memory.capacity_bytes
        );
        let Some(disk) = &cache.disk else { continue };
        let _ = writeln!(
            text,
            "  disk   {:>10} resources {:>14} of {} bytes, {} files in {}",
            disk.resources, disk.bytes, disk.capacity_bytes, disk.files, disk.folder
        );
        if disk.broken > 0 {
            let _ =
                writeln!(text, "         {} files were not what was written, and were removed", disk.broken);
        }
        match &disk.trouble {
            Some(trouble) => drop(writeln!(text, "         trouble: {trouble}")),
            None if !disk.scanned => {
                text.push_str("         files of an earlier run are still being found\n")
            }
            None => {}
        }
    }
    if text.is_empty() { "no listener has a cache\n".to_owned() } else { text }
}

fn lines(found: &CachedResources) -> anyhow::Result<String> {
    found.resources.iter().try_fold(String::new(), |mut text, resource| {
        text += &serde_json::to_string(resource)?;
        text.push('\n');
        Ok(text)
    })
}

fn table(found: &CachedResources) -> String {
    let mut text = format!("{:>12} {:>12}  {:<12} {}\n", "MEMORY", "DISK", "LISTENER", "KEY");
    for resource in &found.resources {
        let _ = writeln!(
            text,
            "{:>12} {:>12}  {:<12} {}",
            resource.memory_bytes, resource.disk_bytes, resource.listener, resource.key
        );
    }
    text
}
