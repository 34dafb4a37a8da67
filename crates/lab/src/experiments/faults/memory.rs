//! A control group allows less memory than the load would use: a large cache, and thousands of receivers that stop. The
//! program must refuse new flows, let its cache shrink, and never be killed. Flows that are open go on.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use super::browser::Browser;
use super::flows::{Flows, Outcome};
use super::group::Group;
use super::page::{mib, none, some};
use super::source::Source;
use super::stand::{GATEWAY, SERVER, Stand};
use super::{LIMIT, Options, wait};
use crate::experiments::echo::Flow;
use crate::kit::{Bar, Page};
use crate::launch;
use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::service::Service;

/// Port of the server that echoes, of the one that sends without end, and of the one with resources.
const ECHO: u16 = 9001;
const ENDLESS: u16 = 9002;
const WEB: u16 = 9003;
/// Ports of the gateway that lead to the first two, and its proxy.
const TO_ECHO: u16 = 10_001;
const TO_ENDLESS: u16 = 10_002;
const PROXY: u16 = 3128;
/// Flows that are open all the time.
const STEADY: usize = 40;
/// Bytes of a resource.
const RESOURCE: usize = 256 << 10;
/// Receivers that stop are added in groups of this number, at most this many.
const GROUP: usize = 100;
const STALLED_MAX: usize = 8000;
/// What the control group allows while the program starts.
const AT_START: u64 = 256 << 20;
/// How long the load lasts after the first flow was refused.
const AFTER: Duration = Duration::from_secs(2);

/// What came of it.
#[derive(Debug, Serialize)]
pub(super) struct Done {
    limit_bytes: u64,
    peak_bytes: u64,
    /// Bytes in use before the load, and after it.
    before_bytes: u64,
    after_bytes: u64,
    steady: Outcome,
    /// Receivers that stopped.
    stalled: usize,
    /// Flows that were refused for memory.
    refused: u64,
    /// Resources that were fetched, bytes of them, and those with a wrong byte.
    fetched: u64,
    wrong: u64,
    /// How often the kernel killed a process, and whether the program ended.
    kills: u64,
    ended: bool,
    /// Lines of the log that say that memory is short.
    said: u64,
    /// Whether a record says why flows were refused.
    recorded: bool,
    /// How long after the load flows were served again; `None`: never.
    back: Option<Duration>,
}

fn configuration() -> String {
    format!(
        "version = 1\nworkers = 2\ndefault = \"direct\"\n[admin]\nsocket = \"FOLDER/gateway.sock\"\n[record]\nto = \"FOLDER/records\"\n\
         [[listen]]\nname = \"echo\"\nkind = \"reverse\"\naddress = \"{GATEWAY}:{TO_ECHO}\"\nto = \"{SERVER}:{ECHO}\"\n\
         [[listen]]\nname = \"endless\"\nkind = \"reverse\"\naddress = \"{GATEWAY}:{TO_ENDLESS}\"\nto = \"{SERVER}:{ENDLESS}\"\n\
         [[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"{GATEWAY}:{PROXY}\"\ncache = {{ memory_bytes = 1073741824 }}\n\
         [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n"
    )
}

/// Makes the load.
///
/// # Errors
/// Not root, a program is missing, or no control group counts memory.
pub(super) fn run(options: &Options, progress: &Progress) -> Result<Done> {
    let more = options.memory_mib.unwrap_or(if options.quick { 24 } else { 64 }) << 20;
    launch::raise_file_limit();
    let group = Group::new(AT_START)?;
    // Not in memory: files there would count.
    let stand = Stand::with_files_in(Scratch::on_disk()?, &[ECHO])?;
    let _endless = Source::endless(&stand.server, (SERVER, ENDLESS).into())?;
    let _web = Source::resources(&stand.server, (SERVER, WEB).into(), RESOURCE)?;
    stand.write(&configuration())?;
    let mut up = stand.start(&group.words(), &[])?;
    let before_bytes = group.used();
    let limit_bytes = before_bytes + more;
    group.limit(limit_bytes)?;
    // A limit that changes is noticed within a second.
    wait("it knows its limit", || Ok(stand.metric("sidetrack_memory_limit_bytes")? as u64 <= limit_bytes))?;
    let steady = Flows::open(&stand.client, &[(GATEWAY, TO_ECHO).into()], STEADY)?;
    let mut browser = Browser::open(&stand, (GATEWAY, PROXY), (SERVER, WEB), RESOURCE)?;
    // The cache alone would take twice the limit.
    let resources = limit_bytes * 2 / RESOURCE as u64;
    (0..resources).try_for_each(|number| browser.fetch(number).map(drop))?;
    progress.say(&format!(
        "memory: {:.0} of {:.0} MiB with a full cache",
        mib(group.used()),
        mib(limit_bytes)
    ));
    let refused = || stand.metric("sidetrack_memory_refused_flows_total");
    let count = stop_receivers(&stand, &mut up, &mut browser, resources, progress)?;
    let relieved = Instant::now();
    let serves = || {
        let open = || Ok(Flow::open((GATEWAY, TO_ECHO).into(), LIMIT).and_then(Flow::finish).is_ok());
        Ok(stand.client.enter(open)? && stand.metric("sidetrack_memory_short")? < 1.0)
    };
    let back = wait("flows are served again", serves).ok().map(|()| relieved.elapsed());
    let refused = refused()? as u64;
    let ended = !up.is_running();
    let steady = steady.end();
    let (kills, peak_bytes, after_bytes) = (group.kills()?, group.peak(), group.used());
    let said = up.log().matches("memory is short:").count() as u64;
    up.signal(rustix::process::Signal::TERM)?;
    up.wait_ended()?;
    let records = std::fs::read_to_string(stand.folder().join("records"))?;
    let recorded = records.contains("memory is short:");
    drop(up);
    let (fetched, wrong) = (browser.fetched, browser.wrong);
    Ok(Done {
        limit_bytes,
        peak_bytes,
        before_bytes,
        after_bytes,
        steady,
        stalled: count,
        refused,
        fetched,
        wrong,
        kills,
        ended,
        said,
        recorded,
        back,
    })
}

/// Opens connections that do not read until one is refused, goes on for a while, and closes them all. Returns how many there were.
fn stop_receivers(
    stand: &Stand,
    up: &mut Service,
    browser: &mut Browser,
    resources: u64,
    progress: &Progress,
) -> Result<usize> {
    let mut stalled = Vec::new();
    let refused = || stand.metric("sidetrack_memory_refused_flows_total");
    while stalled.len() < STALLED_MAX && refused()? < 1.0 && up.is_running() {
        stalled.extend(stall(stand, GROUP)?);
        browser.fetch_or_again(stand, stalled.len() as u64)?;
    }
    progress.say(&format!("memory: refused after {} receivers stopped", stalled.len()));
    let begun = Instant::now();
    let mut number = resources;
    while begun.elapsed() < AFTER && up.is_running() {
        // Those that are refused are gone at once.
        drop(stall(stand, 10)?);
        browser.fetch_or_again(stand, number)?;
        number += 1;
    }
    Ok(stalled.len())
}

/// Opens connections to the server that sends without end, and does not read from them.
fn stall(stand: &Stand, count: usize) -> Result<Vec<TcpStream>> {
    stand.client.enter(|| {
        let open = |_| TcpStream::connect_timeout(&SocketAddr::from((GATEWAY, TO_ENDLESS)), LIMIT);
        // One that is refused may be reset before it is told that it is connected.
        let is_refused = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
        let opened = (0..count).map(open).filter(|opened| !opened.as_ref().is_err_and(is_refused));
        Ok(opened.collect::<std::io::Result<Vec<_>>>()?)
    })
}

impl Done {
    /// Writes its table.
    pub(super) fn table(&self, page: &mut Page) {
        page.line(format_args!("### Memory\n"));
        page.columns([
            "limit, MiB:",
            "in use before, MiB:",
            "at most, MiB:",
            "after, MiB:",
            "receivers that stopped:",
            "flows refused:",
            "steady flows:",
            "MiB echoed:",
            "resources fetched:",
            "MiB of them:",
            "flows served again after, s:",
        ]);
        let back = self.back.map_or_else(|| "never".to_owned(), |back| format!("{:.1}", back.as_secs_f64()));
        page.row(format_args!(
            "{:.0} | {:.1} | {:.1} | {:.1} | {} | {} | {} | {:.1} | {} | {:.0} | {back}",
            mib(self.limit_bytes),
            mib(self.before_bytes),
            mib(self.peak_bytes),
            mib(self.after_bytes),
            self.stalled,
            self.refused,
            self.steady.flows,
            mib(self.steady.bytes),
            self.fetched,
            mib(self.fetched * RESOURCE as u64),
        ));
        page.blank();
        self.steady.cut.iter().take(20).for_each(|said| page.line(format_args!("- {said}")));
    }

    /// Returns its bars.
    pub(super) fn bars(&self) -> Vec<Bar> {
        vec![
            none("memory: processes killed by the kernel", self.kills + u64::from(self.ended)),
            none("memory: steady flows that were cut", self.steady.cut.len() as u64),
            none("memory: flows and resources with a wrong byte", self.steady.wrong + self.wrong),
            some("memory: flows refused, in the metric", self.refused),
            some("memory: lines of the log that say so", self.said),
            some("memory: records that say so", u64::from(self.recorded)),
            none("memory: flows never served again", u64::from(self.back.is_none())),
        ]
    }
}
