//! Records, the history and the cache on file systems that become full, and of which two become read-only. Flows go on, the
//! loss is said once and counted, and when there is room again, writing goes on by itself.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};
use rustix::process::Signal;
use serde::Serialize;

use super::browser::Browser;
use super::flows::{Flows, Outcome};
use super::page::none;
use super::source::Source;
use super::stand::{GATEWAY, SERVER, Stand};
use super::{LIMIT, Options, POLL};
use crate::experiments::echo::Flow;
use crate::kit::{Bar, Page};
use crate::progress::Progress;
use crate::service::Service;

const ECHO: u16 = 9001;
const WEB: u16 = 9003;
const TO_ECHO: u16 = 10_001;
const PROXY: u16 = 3128;
/// Flows that are open all the time.
const STEADY: usize = 20;
/// Bytes of a resource. It is larger than what the cache has in memory, so that it comes from the disk.
const RESOURCE: usize = 600 << 10;
/// Resources that are fetched before a fault, and again after the last one.
const KNOWN: u64 = 6;

/// The size of each file system. It is not full without the fault, however fast flows come and go.
const SIZE: &std::ffi::CStr = c"size=96m,mode=0777";

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum Kind {
    Records,
    History,
    Cache,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Records, Self::History, Self::Cache];

    /// Its name in metrics, and of its folder.
    const fn name(self) -> &'static str {
        match self {
            Self::Records => "records",
            Self::History => "history",
            Self::Cache => "cache",
        }
    }
}

/// What becomes of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
enum Fault {
    Full,
    ReadOnly,
}

impl Fault {
    const ALL: [Self; 2] = [Self::Full, Self::ReadOnly];

    const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::ReadOnly => "read-only",
        }
    }

    /// Those that it can happen to. A file that is open keeps its file system writable, and the history opens its file at the
    /// start.
    /// The cache waits for 30 s until it tries again, which is too long for a quick run.
    const fn kinds(self, is_quick: bool) -> &'static [Kind] {
        match (self, is_quick) {
            (Self::Full, _) => &Kind::ALL,
            (Self::ReadOnly, false) => &[Kind::Records, Kind::Cache],
            (Self::ReadOnly, true) => &[Kind::Records],
        }
    }
}

/// What came of one fault for one kind.
#[derive(Debug, Serialize)]
struct Row {
    fault: Fault,
    kind: Kind,
    /// How long until the metric said so, and how long until it said that it is over; `None`: never.
    noticed: Option<Duration>,
    back: Option<Duration>,
    /// Lines of the log that say that it fails, and that it works again.
    said: [usize; 2],
    /// Whether `sidetrack doctor` says so.
    told: bool,
}

/// What came of it.
#[derive(Debug, Serialize)]
pub(super) struct Done {
    rows: Vec<Row>,
    steady: Outcome,
    /// Flows that were made beside the steady ones, and those that failed.
    flows: u64,
    failed: u64,
    /// Resources that were fetched, and those with a wrong byte.
    fetched: u64,
    wrong: u64,
    /// Lines that can be read, lines that cannot, and lines lost as the metric says, of records and of the history.
    records: [u64; 3],
    history: [u64; 3],
    /// Whether the program ended by itself, or said that it had panicked.
    ended: bool,
}

fn configuration() -> String {
    format!(
        "version = 1\nworkers = 2\ndefault = \"direct\"\n[admin]\nsocket = \"FOLDER/gateway.sock\"\n\
         [record]\nto = \"FOLDER/records/flows.jsonl\"\n[history]\npath = \"FOLDER/history/flows\"\ncounters = false\n\
         [[listen]]\nname = \"echo\"\nkind = \"reverse\"\naddress = \"{GATEWAY}:{TO_ECHO}\"\nto = \"{SERVER}:{ECHO}\"\n\
         [[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"{GATEWAY}:{PROXY}\"\n\
         cache = {{ memory_bytes = 1048576, disk = \"FOLDER/cache/stored\", disk_bytes = 33554432 }}\n\
         [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n"
    )
}

/// The file systems; they are unmounted when this is dropped.
struct Disks(Vec<PathBuf>);

impl Disks {
    fn new(folder: &Path) -> Result<Self> {
        let mut all = Self(Vec::new());
        for kind in Kind::ALL {
            let at = folder.join(kind.name());
            fs::create_dir(&at)?;
            mount("none", &at, "tmpfs", MountFlags::empty(), Some(SIZE))
                .with_context(|| format!("no file system at {}", at.display()))?;
            all.0.push(at);
        }
        Ok(all)
    }

    fn at(&self, kind: Kind) -> &Path {
        &self.0[kind as usize]
    }

    /// Makes the fault.
    fn break_down(&self, fault: Fault, kind: Kind) -> Result<()> {
        let at = self.at(kind);
        match fault {
            Fault::Full => {
                let mut filler = File::create(at.join("filler"))?;
                // Large pieces first; the last bytes of a page are left to files that are there.
                for size in [65_536, 4096, 1] {
                    let piece = vec![b'x'; size];
                    loop {
                        match filler.write_all(&piece) {
                            Ok(()) => {}
                            Err(error) if error.kind() == ErrorKind::StorageFull => break,
                            Err(error) => return Err(error.into()),
                        }
                    }
                }
            }
            Fault::ReadOnly => {
                mount_bind(at, at)?;
                mount_remount(at, MountFlags::BIND | MountFlags::RDONLY, c"")?;
            }
        }
        Ok(())
    }

    /// Takes it back.
    fn mend(&self, fault: Fault, kind: Kind) -> Result<()> {
        match fault {
            Fault::Full => Ok(fs::remove_file(self.at(kind).join("filler"))?),
            Fault::ReadOnly => Ok(unmount(self.at(kind), UnmountFlags::DETACH)?),
        }
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        for at in &self.0 {
            let _ = unmount(at, UnmountFlags::DETACH);
        }
    }
}

/// Clients beside the steady flows.
struct Clients<'a> {
    stand: &'a Stand,
    browser: Browser,
    flows: u64,
    failed: u64,
    number: u64,
}

impl Clients<'_> {
    /// Some flows, and a resource that was not asked for before.
    fn work(&mut self) -> Result<()> {
        for _ in 0..10 {
            let open = || {
                let echo = |mut flow: Flow| flow.echo(100).and_then(|()| flow.finish());
                Ok(Flow::open((GATEWAY, TO_ECHO).into(), LIMIT).and_then(echo).is_ok())
            };
            self.failed += u64::from(!self.stand.client.enter(open)?);
            self.flows += 1;
        }
        self.number += 1;
        self.browser.fetch(self.number).map(drop)
    }

    /// Works until the metric has this value for all of these. Returns how long each took.
    fn work_until(&mut self, value: f64, kinds: &[Kind]) -> Result<Vec<Option<Duration>>> {
        let begun = Instant::now();
        let mut times = vec![None; kinds.len()];
        while times.iter().any(Option::is_none) && begun.elapsed() < LIMIT {
            self.work()?;
            for (kind, time) in kinds.iter().zip(&mut times) {
                let now = self.stand.metric(&unwritable(*kind))?;
                if time.is_none() && (now - value).abs() < 0.5 {
                    *time = Some(begun.elapsed());
                }
            }
            std::thread::sleep(POLL);
        }
        Ok(times)
    }
}

fn unwritable(kind: Kind) -> String {
    format!("sidetrack_unwritable{{what=\"{}\"}}", kind.name())
}

/// Makes the faults.
///
/// # Errors
/// Not root, or a program is missing.
pub(super) fn run(options: &Options, progress: &Progress) -> Result<Done> {
    crate::experiments::own_mounts()?;
    let stand = Stand::new(&[ECHO])?;
    let disks = Disks::new(stand.folder())?;
    let _web = Source::resources(&stand.server, (SERVER, WEB).into(), RESOURCE)?;
    stand.write(&configuration())?;
    let mut up = stand.start(&[], &[])?;
    let steady = Flows::open(&stand.client, &[(GATEWAY, TO_ECHO).into()], STEADY)?;
    let browser = Browser::open(&stand, (GATEWAY, PROXY), (SERVER, WEB), RESOURCE)?;
    let mut clients = Clients { stand: &stand, browser, flows: 0, failed: 0, number: 1000 };
    let mut rows = Vec::new();
    for _ in 0..if options.quick { 1 } else { 3 } {
        for fault in Fault::ALL {
            (0..KNOWN).try_for_each(|number| clients.browser.fetch(number).map(drop))?;
            let kinds = fault.kinds(options.quick);
            rows.extend(one((fault, kinds), &stand, &disks, &up, &mut clients)?);
            progress.say(&format!("disk: {}: over", fault.name()));
        }
    }
    (0..KNOWN).try_for_each(|number| clients.browser.fetch(number).map(drop))?;
    let ended = !up.is_running() || up.log().contains("panic");
    let steady = steady.end();
    let metric = |name: &str| Ok::<_, anyhow::Error>(stand.metric(name)? as u64);
    let lost = [metric("sidetrack_records_dropped_total")?, metric("sidetrack_history_missing_total")?];
    up.signal(Signal::TERM)?;
    up.wait_ended()?;
    let records = lines(&disks.at(Kind::Records).join("flows.jsonl"))?;
    let history = lines(&disks.at(Kind::History).join("flows/flows.ndjson"))?;
    drop(up);
    // What is on the disk is served by the next process, and is right.
    let up = stand.start(&[], &[])?;
    let mut again = Browser::open(&stand, (GATEWAY, PROXY), (SERVER, WEB), RESOURCE)?;
    (0..KNOWN).try_for_each(|number| again.fetch(number).map(drop))?;
    drop(up);
    Ok(Done {
        rows,
        steady,
        flows: clients.flows,
        failed: clients.failed,
        fetched: clients.browser.fetched + again.fetched,
        wrong: clients.browser.wrong + again.wrong,
        records: [records.0, records.1, lost[0]],
        history: [history.0, history.1, lost[1]],
        ended,
    })
}

/// One fault of all kinds at once.
fn one(
    (fault, kinds): (Fault, &[Kind]),
    stand: &Stand,
    disks: &Disks,
    up: &Service,
    clients: &mut Clients<'_>,
) -> Result<Vec<Row>> {
    let before = up.log().len();
    for kind in kinds {
        disks.break_down(fault, *kind)?;
    }
    if fault == Fault::ReadOnly {
        // As log rotation does: the file is opened anew.
        up.signal(Signal::USR1)?;
    }
    let noticed = clients.work_until(1.0, kinds)?;
    // Findings of the last ten seconds are shown again.
    let (begun, mut told) = (Instant::now(), doctor(stand)?);
    let is_told = |told: &str| kinds.iter().all(|kind| told.contains(&disks.at(*kind).display().to_string()));
    while !is_told(&told) && begun.elapsed() < LIMIT {
        clients.work()?;
        told = doctor(stand)?;
    }
    // The log says it once, however long it lasts.
    for _ in 0..10 {
        clients.work()?;
    }
    for kind in kinds {
        disks.mend(fault, *kind)?;
    }
    let back = clients.work_until(0.0, kinds)?;
    let log = up.log().split_off(before);
    let row = |((kind, noticed), back): ((&Kind, Option<Duration>), Option<Duration>)| {
        let place = disks.at(*kind).display().to_string();
        let count =
            |words: &str| log.lines().filter(|line| line.contains(words) && line.contains(&place)).count();
        let said = match kind {
            Kind::Records | Kind::History => {
                [count("records cannot be written"), count("records are written again")]
            }
            Kind::Cache => [count("disk is in trouble"), count("is written to again")],
        };
        Row { fault, kind: *kind, noticed, back, said, told: told.contains(&place) }
    };
    Ok(kinds.iter().zip(noticed).zip(back).map(row).collect())
}

/// What `sidetrack doctor` says, in one line.
fn doctor(stand: &Stand) -> Result<String> {
    let file = stand.folder().join("gateway.toml").display().to_string();
    let output = stand.command(&["doctor", "--json", "-c", &file]).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(text.contains("\"checks\""), "doctor: {text} {}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

/// Counts lines that are whole objects, and others.
fn lines(file: &Path) -> Result<(u64, u64)> {
    let text = fs::read(file).with_context(|| file.display().to_string())?;
    let mut counts = (0, 0);
    for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        match serde_json::from_slice::<serde_json::Value>(line) {
            Ok(serde_json::Value::Object(_)) => counts.0 += 1,
            _ => counts.1 += 1,
        }
    }
    Ok(counts)
}

impl Done {
    /// Writes its tables.
    pub(super) fn table(&self, page: &mut Page) {
        page.line(format_args!("### Disks\n"));
        page.columns([
            "what",
            "file system",
            "noticed after, s:",
            "log lines:",
            "written again after, s:",
            "log lines:",
            "doctor",
        ]);
        let seconds = |time: Option<Duration>| {
            time.map_or_else(|| "never".to_owned(), |time| format!("{:.1}", time.as_secs_f64()))
        };
        for row in &self.rows {
            page.row(format_args!(
                "{} | {} | {} | {} | {} | {} | {}",
                row.kind.name(),
                row.fault.name(),
                seconds(row.noticed),
                row.said[0],
                seconds(row.back),
                row.said[1],
                if row.told { "says so" } else { "silent" },
            ));
        }
        page.blank();
        page.line(format_args!(
            "{} flows, {} failed, beside {} steady ones; {} resources. Records: {} whole, {} torn, {} lost. History: {} whole, {} \
             torn, {} lost.\n",
            self.flows,
            self.failed,
            self.steady.flows,
            self.fetched,
            self.records[0],
            self.records[1],
            self.records[2],
            self.history[0],
            self.history[1],
            self.history[2],
        ));
        self.steady.cut.iter().take(20).for_each(|said| page.line(format_args!("- {said}")));
    }

    /// Returns its bars.
    pub(super) fn bars(&self) -> Vec<Bar> {
        let rows = |is: fn(&Row) -> bool| self.rows.iter().filter(|row| is(row)).count() as u64;
        // Each flow has its line, or is counted as lost: those of clients, steady ones and requests.
        let made = self.flows + self.steady.flows as u64;
        let missing = |counts: &[u64; 3]| made.saturating_sub(counts[0] + counts[2]);
        vec![
            none("disk: flows that failed or were cut", self.failed + self.steady.cut.len() as u64),
            none("disk: flows and resources with a wrong byte", self.steady.wrong + self.wrong),
            none("disk: ends and panics of the program", u64::from(self.ended)),
            none("disk: faults that no metric said", rows(|row| row.noticed.is_none())),
            none("disk: faults that `doctor` did not say", rows(|row| !row.told)),
            none("disk: faults that the log did not say once", rows(|row| row.said[0] != 1)),
            none("disk: what was never written again", rows(|row| row.back.is_none())),
            none("disk: torn lines", self.records[1] + self.history[1]),
            none(
                "disk: flows neither written nor counted as lost",
                missing(&self.records) + missing(&self.history),
            ),
        ]
    }
}
