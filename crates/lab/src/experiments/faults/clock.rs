//! Jumps of the wall clock, by hours and days, forwards and back. A small library moves the clock of the program alone
//! (`clock.c`): the machine's clock stays. Flows, tunnels and the overlay go on, times in records are right, and no stored
//! response is served for longer than it may be.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde::Serialize;

use super::browser::Browser;
use super::flows::{Flows, Outcome};
use super::page::none;
use super::source::Source;
use super::stand::{GATEWAY, READY, SERVER, Stand};
use super::{LIMIT, Options, wait};
use crate::experiments::echo::Flow;
use crate::kit::{Bar, Page};
use crate::peers::Unavailable;
use crate::progress::Progress;
use crate::service::Service;

/// Ports of the server: reached directly, through a tunnel, and over the overlay.
const PORTS: [u16; 3] = [9001, 9002, 9003];
const WEB: u16 = 9004;
/// Added to the server's port, it is the gateway's port that leads there.
const OF_GATEWAY: u16 = 1000;
const PROXY: u16 = 3128;
/// Flows that are open all the time.
const STEADY: usize = 30;
/// Bytes of a resource.
const RESOURCE: usize = 10_000;
const HOUR: i64 = 3600;
/// Where the clock jumps to, from the true time, in seconds.
const JUMPS: [i64; 6] = [3 * HOUR, -3 * HOUR, 60 * HOUR, -72 * HOUR, 24 * HOUR, 0];
const SOURCE: &str = include_str!("clock.c");

/// What was seen after one jump.
#[derive(Debug, Serialize)]
struct Jump {
    /// From the true time, in seconds.
    to: i64,
    /// New flows that failed.
    failed: u64,
    /// A response of before the jump, which was valid for an hour, came from the server again.
    is_fetched_again: bool,
    /// The program's own answer had the time that was set.
    is_seen: bool,
    /// A flow of the last seconds is found by `since=1m` in the history.
    is_found: bool,
}

/// What came of it.
#[derive(Debug, Serialize)]
pub(super) struct Done {
    jumps: Vec<Jump>,
    steady: Outcome,
    /// Records, those with a duration that is negative or longer than the experiment, and those without a number of their own.
    records: u64,
    wrong_durations: u64,
    unnumbered: u64,
    /// Answers with an Age that is not a number of seconds, and resources with wrong bytes.
    wrong_ages: u64,
    wrong: u64,
    ended: bool,
}

fn configuration(pins: &[String; 2], nodes: &[String; 2]) -> [String; 2] {
    let carriers = ["direct", "tunnel:far", "overlay:far"];
    let routes: String = PORTS
        .iter()
        .zip(carriers)
        .map(|(port, carrier)| {
            format!(
                "[[listen]]\nname = \"port{port}\"\nkind = \"reverse\"\naddress = \"{GATEWAY}:{}\"\nto = \"{SERVER}:{port}\"\n\
                 [[rule]]\nname = \"route{port}\"\nmatch = {{ port = {port} }}\ncarrier = \"{carrier}\"\nkernel = \"never\"\n",
                port + OF_GATEWAY
            )
        })
        .collect();
    let nodes = |first: &str| {
        format!(
            "[overlay]\nname = \"{first}\"\nkey_file = \"FOLDER/{first}.key\"\n{}\
             [overlay.node.gateway]\nkey = \"{}\"\n[overlay.node.far]\nkey = \"{}\"\naddress = \"{SERVER}:8100\"\n",
            if first == "far" { format!("listen = \"{SERVER}:8100\"\n") } else { String::new() },
            nodes[0],
            nodes[1]
        )
    };
    let gateway = format!(
        "version = 1\nworkers = 2\ndefault = \"direct\"\n[admin]\nsocket = \"FOLDER/gateway.sock\"\n\
         [record]\nto = \"FOLDER/records\"\n[history]\npath = \"FOLDER/history\"\n{routes}\
         [[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"{GATEWAY}:{PROXY}\"\ncache = {{ }}\n\
         [[tunnel]]\nname = \"far\"\naddress = \"{SERVER}:4433\"\nidentity = \"FOLDER/gateway.pem\"\npins = [\"{}\"]\n{}",
        pins[1],
        nodes("gateway"),
    );
    let far = format!(
        "version = 1\nworkers = 1\ndefault = \"direct\"\n[admin]\nsocket = \"FOLDER/far.sock\"\n[record]\nto = \"none\"\n\
         [[listen]]\nname = \"tunnel\"\nkind = \"tunnel\"\naddress = \"{SERVER}:4433\"\nidentity = \"FOLDER/far.pem\"\npins = [\"{}\"]\n\
         [[overlay.deliver]]\nfrom = [\"gateway\"]\nto = \"{SERVER}/32\"\n{}",
        pins[0],
        nodes("far"),
    );
    [gateway, far]
}

/// The clock of the program.
struct Clock {
    file: fs::File,
    environment: [(&'static str, String); 2],
}

impl Clock {
    /// Compiles the library.
    fn new(folder: &Path) -> Result<Self> {
        let (source, library) = (folder.join("clock.c"), folder.join("clock.so"));
        fs::write(&source, SOURCE)?;
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]).arg(&library).arg(&source);
        let output = compiler.arg("-ldl").output().map_err(|error| {
            Unavailable::Absent(format!("cc, which compiles the library that moves the clock: {error}"))
                .into_error()
        })?;
        ensure!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
        let path = folder.join("offset");
        fs::write(&path, 0_i64.to_ne_bytes())?;
        let file = fs::OpenOptions::new().write(true).open(&path)?;
        let environment = [
            ("LD_PRELOAD", library.display().to_string()),
            ("SIDETRACK_LAB_CLOCK", path.display().to_string()),
        ];
        Ok(Self { file, environment })
    }

    fn jump(&self, to: i64) -> Result<()> {
        Ok(self.file.write_all_at(&to.to_ne_bytes(), 0)?)
    }
}

/// Makes keys for both ends.
fn keys(stand: &Stand) -> Result<([String; 2], [String; 2])> {
    let ask = |words: &[&str]| -> Result<String> {
        let output = stand.command(words).current_dir(stand.folder()).output()?;
        ensure!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let pin = |name: &str| {
        let file = format!("{name}.pem");
        ask(&["tunnel", "key", "--name", &format!("{name}.example"), "--out", &file])?;
        ask(&["tunnel", "pin", &file])
    };
    let node = |name: &str| ask(&["overlay", "key", &format!("{name}.key")]);
    Ok(([pin("gateway")?, pin("far")?], [node("gateway")?, node("far")?]))
}

/// Lets the clock jump.
///
/// # Errors
/// Not root, or a program is missing.
pub(super) fn run(options: &Options, progress: &Progress) -> Result<Done> {
    let stand = Stand::new(&PORTS)?;
    let clock = Clock::new(stand.folder())?;
    let web = Source::resources(&stand.server, (SERVER, WEB).into(), RESOURCE)?;
    let (pins, nodes) = keys(&stand)?;
    let [gateway, far] = configuration(&pins, &nodes);
    let far_file = stand.folder().join("far.toml");
    fs::write(&far_file, far.replace("FOLDER", &stand.folder().display().to_string()))?;
    // Only one end has another time, as when a host starts with a wrong clock.
    let far_words = ["up", "-c", &far_file.display().to_string()].map(str::to_owned);
    let mut command = stand.command_on(&stand.server, &far_words.each_ref().map(String::as_str));
    command.env("SIDETRACK_LOG", "sidetrack=info");
    let mut far_up = Service::start("far", command, stand.folder())?;
    far_up.wait_said(READY)?;
    stand.write(&gateway)?;
    let mut up = stand.start(&[], &clock.environment)?;
    let begun = Instant::now();
    let to: Vec<_> = PORTS.iter().map(|port| (GATEWAY, port + OF_GATEWAY).into()).collect();
    let passes = || {
        let open = || Ok(to.iter().all(|to| Flow::open(*to, LIMIT).and_then(Flow::finish).is_ok()));
        stand.client.enter(open)
    };
    wait("every route works", passes)?;
    let steady = Flows::open(&stand.client, &to, STEADY)?;
    let mut browser = Browser::open(&stand, (GATEWAY, PROXY), (SERVER, WEB), RESOURCE)?;
    let mut ages = 0;
    let mut jumps = Vec::new();
    for to_time in if options.quick { &JUMPS[3..] } else { &JUMPS[..] } {
        ages += age(&browser.fetch(0)?);
        clock.jump(*to_time)?;
        let moved = steady.bytes();
        wait("flows go on", || Ok(steady.bytes() > moved + STEADY as u64 * 1000))?;
        let asked = web.asked();
        ages += age(&browser.fetch(0)?);
        let is_fetched_again = web.asked() > asked;
        // Fresh again: it is from the cache.
        ages += age(&browser.fetch(0)?);
        let failed = new_flows(&stand, &to)?;
        let (is_seen, is_found) = (is_time(&stand, *to_time)?, is_found(&stand)?);
        jumps.push(Jump { to: *to_time, failed, is_fetched_again, is_seen, is_found });
        progress.say(&format!("clock: {} h: done", to_time / HOUR));
    }
    let ended = !up.is_running() || up.log().contains("panic");
    let steady = steady.end();
    up.signal(Signal::TERM)?;
    up.wait_ended()?;
    let records = fs::read_to_string(stand.folder().join("records"))?;
    let (records, wrong_durations, unnumbered) = judge(&records, begun.elapsed())?;
    Ok(Done {
        jumps,
        steady,
        records,
        wrong_durations,
        unnumbered,
        wrong_ages: ages,
        wrong: browser.wrong,
        ended,
    })
}

/// 1 if the answer has an Age that is not a number of seconds, or one that cannot be.
fn age(head: &str) -> u64 {
    let age = head.lines().find_map(|line| line.strip_prefix("age:"));
    let is_well = age.is_none_or(|age| age.trim().parse::<u64>().is_ok_and(|age| age <= HOUR.unsigned_abs()));
    u64::from(!is_well)
}

/// Makes new flows on each route; returns how many failed.
fn new_flows(stand: &Stand, to: &[std::net::SocketAddr]) -> Result<u64> {
    stand.client.enter(|| {
        let fails = |to: &std::net::SocketAddr| {
            let echo = |mut flow: Flow| flow.echo(5000).and_then(|()| flow.finish());
            Flow::open(*to, LIMIT).and_then(echo).is_err()
        };
        Ok(to.iter().filter(|to| fails(to)).count() as u64)
    })
}

/// Whether the program's clock shows this time: its log has the day and the hour.
fn is_time(stand: &Stand, to: i64) -> Result<bool> {
    let (status, _) = stand.ask("POST", "/v1/reload")?;
    let now = std::time::SystemTime::now();
    let moved = Duration::from_secs(to.unsigned_abs());
    let shown = if to < 0 { now.checked_sub(moved) } else { now.checked_add(moved) };
    let shown = shown.context("a time")?;
    // A minute may have passed since.
    let minutes = [shown, shown - Duration::from_secs(60)]
        .map(|time| humantime::format_rfc3339_seconds(time).to_string()[..16].to_owned());
    let log = fs::read_to_string(stand.folder().join("gateway.log"))?;
    let line = log.lines().rfind(|line| line.contains(" reloaded (")).unwrap_or_default();
    Ok(status == 200 && minutes.iter().any(|minute| line.contains(minute)))
}

/// Whether the history has flows of the last minute.
fn is_found(stand: &Stand) -> Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < LIMIT {
        let (status, text) = stand.ask("GET", "/v1/history?since=1m&limit=5")?;
        ensure!(status == 200, "the history: {text}");
        if text.contains("\"reason\":\"ok\"") {
            return Ok(true);
        }
        std::thread::sleep(super::POLL);
    }
    Ok(false)
}

/// Counts records, wrong durations, and records without a number of their own.
fn judge(text: &str, longest: Duration) -> Result<(u64, u64, u64)> {
    let (mut wrong, mut unnumbered, mut numbers) = (0, 0, BTreeSet::new());
    for line in text.lines() {
        let record: serde_json::Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let duration = record["duration_seconds"].as_f64().unwrap_or(f64::NAN);
        wrong += u64::from(!(0.0..=longest.as_secs_f64()).contains(&duration));
        unnumbered += u64::from(!record["flow"].as_u64().is_some_and(|number| numbers.insert(number)));
    }
    Ok((numbers.len() as u64, wrong, unnumbered))
}

impl Done {
    /// Writes its table.
    pub(super) fn table(&self, page: &mut Page) {
        page.line(format_args!("### Clock\n"));
        page.columns([
            "hours from the true time:",
            "new flows that failed:",
            "response of before, valid for 1 h",
            "history of the last minute",
        ]);
        for jump in &self.jumps {
            page.row(format_args!(
                "{:+} | {} | {} | {}",
                jump.to / HOUR,
                jump.failed,
                if jump.is_fetched_again { "fetched again" } else { "from the cache" },
                if jump.is_found { "found" } else { "not found" },
            ));
        }
        page.blank();
        page.line(format_args!(
            "{} flows were open all the time (direct, tunnel, overlay), {:.1} MiB; {} records.\n",
            self.steady.flows,
            super::page::mib(self.steady.bytes),
            self.records
        ));
        self.steady.cut.iter().take(20).for_each(|said| page.line(format_args!("- {said}")));
    }

    /// Returns its bars.
    pub(super) fn bars(&self) -> Vec<Bar> {
        let jumps = |is: fn(&Jump) -> bool| self.jumps.iter().filter(|jump| is(jump)).count() as u64;
        let failed: u64 = self.jumps.iter().map(|jump| jump.failed).sum();
        vec![
            none("clock: jumps that the program did not see", jumps(|jump| !jump.is_seen)),
            none("clock: flows that failed or were cut", failed + self.steady.cut.len() as u64),
            none("clock: flows and resources with a wrong byte", self.steady.wrong + self.wrong),
            none("clock: ends and panics of the program", u64::from(self.ended)),
            none(
                "clock: responses served for longer than they are valid",
                jumps(|jump| !jump.is_fetched_again),
            ),
            none("clock: answers with an Age that cannot be", self.wrong_ages),
            none("clock: records with a duration that cannot be", self.wrong_durations),
            none("clock: records without a number of their own", self.unnumbered),
            none("clock: questions to the history that found nothing", jumps(|jump| !jump.is_found)),
        ]
    }
}
