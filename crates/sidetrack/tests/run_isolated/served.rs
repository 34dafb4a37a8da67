//! A started command and a server that is the whole world to it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sidetrack::dns;
use sidetrack::intercept::run::{Launched, Mode, RunOptions, launch};
use sidetrack::live::Clock;
use sidetrack_sys::{process, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};

/// The destinations of the connections served, as the program meant them, in order.
pub(crate) type Seen = Arc<Mutex<Vec<String>>>;

/// One command being served.
pub(crate) struct Served {
    pub launched: Arc<Launched>,
    pub runtime: Runtime,
    seen: Seen,
}

pub(crate) fn options(argv: &[&str]) -> RunOptions {
    let mut options = RunOptions::new(argv.iter().map(OsString::from).collect());
    // No variable of the machine that runs the tests may point a program at a proxy.
    let proxies =
        ["http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];
    options.env = proxies.iter().map(|name| (OsString::from(name), None)).collect();
    options
}

/// Starts the command and serves it in the background of [`Served::until`].
pub(crate) fn start(options: &RunOptions) -> Served {
    assert!(process::is_single_threaded(), "a thread stays");
    let launched = launch(options).unwrap_or_else(|error| panic!("{error}"));
    let runtime = Builder::new_current_thread().enable_all().build().expect("runtime");
    let served = Served { launched: Arc::new(launched), runtime, seen: Seen::default() };
    let clock = Clock::start();
    for listener in &served.launched.listeners {
        let listener = listener.try_clone().expect("clone");
        let (launched, seen) = (Arc::clone(&served.launched), Arc::clone(&served.seen));
        served.runtime.spawn(async move { accept_all(listener, launched, seen, clock).await });
    }
    let resolver = Arc::new(dns::Resolver::of_names(Arc::clone(&served.launched.names)));
    let answers = served.launched.serve_dns(resolver, move || clock.now());
    served.runtime.spawn(answers);
    served
}

impl Served {
    /// Serves until the command ends: its exit code.
    pub(crate) fn code(&self) -> u8 {
        self.until(self.launched.wait()).expect("wait").code()
    }

    /// Serves until `done`.
    pub(crate) fn until<T>(&self, done: impl Future<Output = T>) -> T {
        let limit = Duration::from_secs(240);
        self.runtime.block_on(async { tokio::time::timeout(limit, done).await }).expect("in time")
    }

    /// How often each destination was connected to.
    pub(crate) fn seen(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for target in self.seen.lock().expect("lock").iter() {
            *counts.entry(target.clone()).or_default() += 1;
        }
        counts
    }

    /// Takes what was put on the host away.
    pub(crate) fn finish(self) {
        drop(self.runtime);
        let launched = Arc::try_unwrap(self.launched).unwrap_or_else(|_| panic!("still shared"));
        launched.finish().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Runs the command to its end: its exit code and the destinations it reached.
pub(crate) fn run(argv: &[&str]) -> (u8, BTreeMap<String, usize>) {
    let served = start(&options(argv));
    (served.code(), served.seen())
}

pub(crate) fn in_cgroup(argv: &[&str]) -> RunOptions {
    RunOptions { mode: Mode::Cgroup, ..options(argv) }
}

async fn accept_all(listener: std::net::TcpListener, launched: Arc<Launched>, seen: Seen, clock: Clock) {
    let listener = TcpListener::from_std(listener).expect("listener");
    loop {
        let (stream, _peer) = listener.accept().await.expect("accept");
        let target = sockopt::original_dst(&stream).expect("original destination");
        if target == launched.resolver() {
            let resolver = dns::Resolver::of_names(Arc::clone(&launched.names));
            tokio::spawn(async move { dns::serve_tcp(stream, &resolver, move || clock.now()).await });
            continue;
        }
        let meant = meant(&launched, target);
        seen.lock().expect("lock").push(meant.clone());
        tokio::spawn(serve(stream, meant));
    }
}

/// The destination as the program named it.
fn meant(launched: &Launched, target: SocketAddr) -> String {
    let IpAddr::V4(ip) = target.ip() else { return target.to_string() };
    match launched.names.lock().expect("lock").name_of(ip) {
        Some(name) => format!("{name}:{}", target.port()),
        None => target.to_string(),
    }
}

/// HTTP/1.1, one request a connection: the answer says which destination it is.
async fn serve(mut stream: TcpStream, meant: String) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let body = format!("you reached {meant}\n");
    let answer =
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}
