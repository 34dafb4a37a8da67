//! `sidetrack flows`: the table, and the command against a served admin interface.

mod support;

use clap::Parser;
use sidetrack::admin::{AdminSocket, AdminState, ConfigStatus, Control, ListenerStatus, serve};
use sidetrack::cli::flows::{FlowsArgs, Output, Table, run_to};
use sidetrack::live::Ledger;
use sidetrack::metrics::Metrics;
use sidetrack::record::{Feed, FlowRecord, Recorder};
use sidetrack_core::flow::{EndReason, Process};
use sidetrack_core::policy::{Action, Policy};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use support::{carried, denied, ended, enter, flow, full, live};
use tokio::sync::watch;

/// Flows of all kinds, as `--recent` shows them.
fn flows() -> Vec<FlowRecord<'static>> {
    let mut refused = ended(&full(7), EndReason::Refused);
    refused.detail = Some("hop 1 of 2, gw:1080: reply 5, connection refused".into());
    let mut wide = flow("[2001:db8:1234:5678::9]:8443");
    wide.client = ([0x2001, 0xdb8, 0, 0, 0, 0, 0xabcd, 0x17], 51_234).into();
    wide.process =
        Some(Process { pid: Some(9), name: Some("日本語\u{1b}[2J".into()), ..Process::default() });
    let wide = live(12_345, wide, carried(Some("everything else"), &[]));
    wide.count(1 << 33, 999_600);
    let denied = live(8, flow("db.example:5432"), denied(None));
    let mut records: Vec<FlowRecord<'static>> = Vec::new();
    for ended in [refused, ended(&denied, EndReason::PolicyDenied), ended(&wide, EndReason::Ok)] {
        let decided = ended.flow.decided();
        let mut line = Vec::new();
        FlowRecord::ended(&ended, decided.as_deref()).write_line(&mut line);
        records.push(serde_json::from_slice(&line).expect("what was written can be read"));
    }
    let mut running: FlowRecord<'static> = records[0].clone();
    (running.flow, running.reason, running.detail) = (13, None, None);
    running.duration_seconds = 0.3;
    records.push(running);
    records
}

fn shown(table: &Table, flows: &[FlowRecord<'_>]) -> String {
    flows.iter().fold(table.header(), |text, flow| text + &table.row(flow))
}

#[test]
fn the_table_fits_the_terminal() {
    let flows = flows();
    let mut all = String::new();
    for width in [None, Some(140), Some(100), Some(80), Some(50)] {
        let text = shown(&Table::new(&flows, width), &flows);
        for line in text.lines() {
            assert!(width.is_none_or(|width| unicode_width::UnicodeWidthStr::width(line) <= width), "{line}");
        }
        all.push_str(&format!("{width:?}\n{text}\n"));
    }
    for width in [None, Some(120), Some(80), Some(50)] {
        let text = shown(&Table::streaming(width), &flows);
        for line in text.lines() {
            assert!(width.is_none_or(|width| unicode_width::UnicodeWidthStr::width(line) <= width), "{line}");
        }
        all.push_str(&format!("streaming {width:?}\n{text}\n"));
    }
    insta::assert_snapshot!(all);
}

#[test]
fn columns_that_nobody_fills_are_left_out() {
    let all = flows();
    let denied = &all[1..2];
    let header = Table::new(denied, None).header();
    assert!(!header.contains("PROCESS") && !header.contains("CONNECT"), "{header}");
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: FlowsArgs,
}

struct Quiet;

impl Control for Quiet {
    fn policy(&self) -> Arc<Policy> {
        Arc::new(Policy::new(Vec::new(), Action::Deny))
    }

    fn config(&self) -> ConfigStatus {
        ConfigStatus::default()
    }

    fn listeners(&self) -> Vec<ListenerStatus> {
        Vec::new()
    }

    fn reload(&self) -> Result<(), String> {
        Ok(())
    }
}

struct Rig {
    ledger: Arc<Ledger>,
    recorder: Recorder,
    feed: Arc<Feed>,
    path: PathBuf,
    _stop: watch::Sender<bool>,
    _dir: tempfile::TempDir,
}

fn rig() -> Rig {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("admin.sock");
    let ledger = Arc::new(Ledger::default());
    let (feed, metrics) = (Arc::new(Feed::new(100)), Arc::new(Metrics::new()));
    let recorder = Recorder::new(vec![ledger.clone()], feed.clone(), None, metrics.clone());
    let state = AdminState::new(vec![ledger.clone()], feed.clone(), metrics, Arc::new(Quiet));
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(serve(state, AdminSocket::bind(&path).expect("a socket"), stopped));
    Rig { ledger, recorder, feed, path, _stop: stop, _dir: dir }
}

/// What a command line gives: exit code, output, notes (or the error).
struct Gave {
    code: ExitCode,
    out: String,
    notes: String,
}

impl Gave {
    fn is(&self, code: u8) -> bool {
        self.code == ExitCode::from(code)
    }
}

async fn flows_command(path: &std::path::Path, line: &[&str]) -> Gave {
    let words = ["flows", "--admin"].into_iter().chain(path.to_str()).chain(line.iter().copied());
    let args = Cli::try_parse_from(words).expect("arguments").args;
    let (mut out, mut notes) = (Vec::new(), Vec::new());
    let result = run_to(&args, &mut Output { out: &mut out, notes: &mut notes, width: None }).await;
    let (code, error) = match result {
        Ok(code) => (code, String::new()),
        Err(error) => (ExitCode::FAILURE, error.to_string()),
    };
    let text = |bytes| String::from_utf8(bytes).expect("text");
    Gave { code, out: text(out), notes: text(notes) + &error }
}

#[tokio::test]
async fn flows_are_listed_as_a_table_and_as_json() {
    let mut rig = rig();
    let nothing = flows_command(&rig.path, &[]).await;
    assert!(nothing.is(0) && nothing.out.is_empty());
    assert_eq!(nothing.notes, "no flow is in flight; --recent 20 shows the latest that ended, too\n");
    enter(&rig.ledger, &full(2));
    rig.ledger.note(ended(&full(1), EndReason::Refused));
    rig.recorder.visit();
    let table = flows_command(&rig.path, &["--recent", "5"]).await;
    let rows: Vec<Vec<&str>> = table.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((rows[0][0], rows[1][0], rows[2][0], rows.len()), ("ID", "1", "2", 3), "{}", table.out);
    assert!(rows[1].ends_with(&["refused"]) && rows[2].ends_with(&["live"]), "{}", table.out);
    let json = flows_command(&rig.path, &["--json", "--recent", "5", "reason", "==", "refused"]).await;
    let record: FlowRecord<'_> = serde_json::from_str(&json.out).expect("one line");
    assert_eq!((record.flow, record.reason), (1, Some(EndReason::Refused)));
}

#[tokio::test]
async fn flows_are_killed_and_a_dry_run_kills_none() {
    let rig = rig();
    let flows: Vec<_> = (1..=3).map(full).collect();
    flows.iter().for_each(|flow| {
        enter(&rig.ledger, flow);
    });
    let dry = flows_command(&rig.path, &["kill", "--dry-run", "id", "in", "2-3"]).await;
    assert_eq!(dry.out.lines().count(), 3, "{}", dry.out);
    assert!(flows.iter().all(|flow| flow.ending().is_none()));
    assert_eq!(flows_command(&rig.path, &["kill", "2"]).await.out, "ended flow 2\n");
    assert_eq!(flows_command(&rig.path, &["kill", "port == 443"]).await.out, "ended 2 flows: 1 3\n");
    let none = flows_command(&rig.path, &["kill", "77"]).await;
    assert!(none.is(1));
    assert_eq!(none.notes, "no flow in flight matches: nothing was ended\n");
    let both = flows_command(&rig.path, &["--recent", "3", "kill", "2"]).await;
    assert!(
        both.is(2) && both.notes.starts_with("kill takes its flow or filter after the word"),
        "{}",
        both.notes
    );
    let all = flows_command(&rig.path, &["kill", " "]).await;
    assert!(
        all.is(1) && all.notes.starts_with("no filter: this would end every flow\nhelp: "),
        "{}",
        all.notes
    );
}

#[tokio::test]
async fn a_mistake_in_the_filter_is_pointed_at_before_anybody_is_asked() {
    let gave = flows_command("/nonexistent".as_ref(), &["prot", "==", "443"]).await;
    assert!(gave.is(2));
    let expected =
        "the filter cannot be read:\n  prot == 443\n  ^^^^\nthere is no field 'prot': did you mean 'proc'?\n";
    assert_eq!(gave.notes, expected);
}

#[tokio::test]
async fn where_nobody_runs_that_is_said() {
    let gave = flows_command("/nonexistent/admin.sock".as_ref(), &[]).await;
    assert!(gave.is(1));
    assert!(
        gave.notes.starts_with("no sidetrack runs at /nonexistent/admin.sock\nhelp: start one"),
        "{}",
        gave.notes
    );
}

#[tokio::test]
async fn following_shows_what_was_and_what_comes_until_sidetrack_stops() {
    let mut rig = rig();
    rig.ledger.note(ended(&full(1), EndReason::Ok));
    rig.recorder.visit();
    let driving = async {
        // The command has to subscribe first. Bounded, as all loops.
        for _ in 0..1_000_000 {
            if rig.feed.followers() == 1 {
                break;
            }
            tokio::task::yield_now().await;
        }
        rig.ledger.note(ended(&full(2), EndReason::Idle));
        let (_stop, stopped) = watch::channel(true);
        rig.recorder.run(stopped).await;
    };
    let (gave, ()) =
        tokio::join!(flows_command(&rig.path, &["--follow", "--json", "--recent", "9"]), driving);
    let ids: Vec<u64> = gave
        .out
        .lines()
        .map(|line| serde_json::from_str::<FlowRecord<'_>>(line).expect("a record").flow)
        .collect();
    assert_eq!(ids, [1, 2]);
    assert_eq!(gave.notes, "sidetrack has stopped\n");
}
