//! Records: their shape, that their document tells the truth, and that the recorder loses none in silence.

mod support;

use serde_json::Value;
use sidetrack::live::{Decided, Ended, Ledger, LiveFlow, Tally};
use sidetrack::record::{FOLLOWERS_MAX, Feed, FlowRecord, Observer, RecordWriter, Recorder, Target};
use sidetrack_core::filter::Filter;
use sidetrack_core::flow::{EndReason, FlowId, Intercept, Process};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use support::{carried, denied, ended, enter, flow, full, live};
use tokio::sync::watch;

#[derive(Default)]
struct Counts {
    lost: AtomicU64,
    reasons: Mutex<Vec<EndReason>>,
}

impl Observer for Counts {
    fn ended(&self, ended: &Ended, _decided: Option<&Decided>) {
        self.reasons.lock().expect("not poisoned").push(ended.reason);
    }

    fn tallied(&self, tally: &Tally) {
        let reasons = std::iter::repeat_n(tally.reason, tally.times_us.len());
        self.reasons.lock().expect("not poisoned").extend(reasons);
    }

    fn lost(&self, records: u64) {
        self.lost.fetch_add(records, Relaxed);
    }
}

fn line(ended: &Ended) -> String {
    let decided = ended.flow.decided();
    let mut out = Vec::new();
    FlowRecord::ended(ended, decided.as_deref()).write_line(&mut out);
    String::from_utf8(out).expect("JSON is UTF-8")
}

#[test]
fn lines_look_like_this() {
    let mut refused = ended(&full(7), EndReason::Refused);
    refused.detail = Some("hop 1 of 2, gw:1080: reply 5".into());
    let unknown = ended(&live(8, flow("db.example:5432"), denied(None)), EndReason::PolicyDenied);
    let mut by_kernel = flow("[2001:db8::1]:22");
    by_kernel.intercept = Intercept::Kernel;
    by_kernel.process = Some(Process { pid: Some(9), name: None, uid: Some(0) });
    let by_kernel = ended(&live(9, by_kernel, carried(Some("fast"), &[])), EndReason::KernelClosed);
    let lines: String = [refused, unknown, by_kernel].iter().map(line).collect();
    assert!(!lines.contains("secret"));
    insta::assert_snapshot!(lines);
}

#[test]
fn a_flow_that_ended_before_policy_was_asked_has_a_record_too() {
    let early = ended(&Arc::new(LiveFlow::new(FlowId(3))), EndReason::HandshakeTimeout);
    let record: Value = serde_json::from_str(&line(&early)).unwrap();
    assert_eq!(record["reason"], "handshake_timeout");
    assert_eq!(record["client"], Value::Null);
}

#[test]
fn what_is_written_can_be_read_again() {
    for reason in EndReason::ALL {
        let ended = ended(&full(7), reason);
        let text = line(&ended);
        let read: FlowRecord<'static> = serde_json::from_str(&text).unwrap();
        assert_eq!(read, FlowRecord::ended(&ended, ended.flow.decided().as_deref()));
        let mut again = Vec::new();
        read.write_line(&mut again);
        assert_eq!(String::from_utf8(again).unwrap(), text);
    }
}

/// The first cells of the table below `heading`.
fn first_cells(document: &str, heading: &str) -> Vec<String> {
    let table = document.split(heading).nth(1).expect("the heading is there");
    let rows =
        table.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cell = |row: &str| row.split('`').nth(1).expect("a name in backticks").to_owned();
    rows.skip(2).map(cell).collect()
}

#[test]
fn the_document_names_every_field_and_reason_in_order() {
    let document = include_str!("../../../docs/records.md");
    let text = line(&ended(&full(1), EndReason::Ok));
    let names = first_cells(document, "# Records");
    let in_line: Vec<&str> = text
        .split('"')
        .skip(1)
        .step_by(2)
        .zip(text.split('"').skip(2).step_by(2))
        .filter(|(_, after)| after.starts_with(':'))
        .map(|(name, _)| name)
        .collect();
    assert_eq!(names, in_line);
    let reasons: Vec<_> = EndReason::ALL.iter().map(ToString::to_string).collect();
    assert_eq!(first_cells(document, "## Reasons"), reasons);
}

#[test]
fn facts_are_those_of_the_record() {
    let ended = ended(&full(7), EndReason::Ok);
    let decided = ended.flow.decided();
    let record = FlowRecord::ended(&ended, decided.as_deref());
    let yes = "id == 7 and src == 10.1.0.5 and dst == 10.9.8.7 and port == 443 and host == www.example and \
               proc == curl and user == alice and rule == bulk and carrier ~ socks6:* and listener == out and \
               intercept == redirect and reason == ok and up == 1KiB and down == 1MiB and age == 1.5s and \
               connect == 41237us and first_byte == 52001us";
    assert!(Filter::parse(yes).unwrap().matches(&record.facts()));
}

struct Rig {
    ledgers: Vec<Arc<Ledger>>,
    feed: Arc<Feed>,
    counts: Arc<Counts>,
    recorder: Recorder,
}

fn rig(recent: usize, writer: Option<RecordWriter>) -> Rig {
    let ledgers = vec![Arc::new(Ledger::default()), Arc::new(Ledger::default())];
    let (feed, counts) = (Arc::new(Feed::new(recent)), Arc::new(Counts::default()));
    let recorder = Recorder::new(ledgers.clone(), feed.clone(), writer, counts.clone());
    Rig { ledgers, feed, counts, recorder }
}

#[test]
fn every_flow_of_every_worker_gets_one_line_and_the_latest_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flows.jsonl");
    let mut rig = rig(3, Some(RecordWriter::start(Target::File(path.clone())).unwrap()));
    for id in 1..=10 {
        let flow = full(id);
        let ledger = &rig.ledgers[(id % 2) as usize];
        let slot = enter(ledger, &flow);
        ledger.leave(slot, ended(&flow, EndReason::Ok));
        rig.recorder.visit();
    }
    let (_stop, stopped) = watch::channel(true);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(rig.recorder.run(stopped));
    let ids: Vec<u64> = std::fs::read_to_string(&path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<FlowRecord<'_>>(line).unwrap().flow)
        .collect();
    assert_eq!(ids, (1..=10).collect::<Vec<_>>());
    let recent: Vec<_> = rig.feed.recent(9, |_| true).iter().map(|ended| ended.flow.id.0).collect();
    assert_eq!(recent, [10, 9, 8]);
    assert_eq!(rig.feed.ended_total(), 10);
    assert_eq!(rig.counts.reasons.lock().unwrap().len(), 10);
    assert_eq!(rig.counts.lost.load(Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn the_last_flows_are_recorded_when_we_stop() {
    let rig = rig(10, None);
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(rig.recorder.run(stopped));
    rig.ledgers[0].note(ended(&full(1), EndReason::Limit));
    tokio::time::sleep(2 * sidetrack::record::VISIT_EVERY).await;
    assert_eq!(rig.feed.ended_total(), 1, "found by a visit");
    rig.ledgers[0].note(ended(&full(2), EndReason::Shutdown));
    stop.send(true).unwrap();
    running.await.unwrap();
    assert_eq!(rig.feed.ended_total(), 2, "found by the last visit");
}

#[test]
fn flows_beyond_what_a_ledger_holds_have_no_record_but_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let writer = |name: &str| RecordWriter::start(Target::File(dir.path().join(name))).unwrap();
    for (writer, lost) in [(None, 0), (Some(writer("flows.jsonl")), 5)] {
        let mut rig = rig(1, writer);
        let flow = full(1);
        for _ in 0..sidetrack::live::ENDED_MAX + 5 {
            rig.ledgers[0].note(ended(&flow, EndReason::Ok));
        }
        rig.recorder.visit();
        assert_eq!(rig.counts.lost.load(Relaxed), lost, "records that somebody would have read");
        assert_eq!(rig.counts.reasons.lock().unwrap().len(), sidetrack::live::ENDED_MAX + 5);
    }
}

/// The lines that wait, as (event, flow or count).
async fn waiting(follow: &mut sidetrack::record::Follow) -> Vec<(String, u64)> {
    let mut seen = Vec::new();
    while let Ok(Some(line)) = tokio::time::timeout(Duration::ZERO, follow.next()).await {
        assert!(line.ends_with("}\n"));
        let value: Value = serde_json::from_str(&line).expect("JSON");
        let number = value.get("flow").or(value.get("count")).and_then(Value::as_u64);
        seen.push((value["event"].as_str().expect("an event").to_owned(), number.expect("a number")));
    }
    seen
}

#[tokio::test(start_paused = true)]
async fn followers_see_what_they_asked_for() {
    let mut rig = rig(1, None);
    let mut ends = rig.feed.follow(Filter::parse("id > 1").unwrap(), false).unwrap();
    let mut both = rig.feed.follow(Filter::everything(), true).unwrap();
    let flows = [full(1), full(2)];
    let slots = flows.each_ref().map(|flow| enter(&rig.ledgers[0], flow));
    enter(&rig.ledgers[0], &Arc::new(LiveFlow::new(FlowId(3))));
    rig.recorder.visit();
    rig.recorder.visit();
    for (flow, slot) in flows.iter().zip(slots) {
        rig.ledgers[0].leave(slot, ended(flow, EndReason::Ok));
    }
    rig.recorder.visit();
    let event = |event: &str, flow| (event.to_owned(), flow);
    assert_eq!(waiting(&mut ends).await, [event("ended", 2)]);
    let expected = [event("opened", 1), event("opened", 2), event("ended", 1), event("ended", 2)];
    assert_eq!(waiting(&mut both).await, expected, "and not the one policy has not seen");
}

#[tokio::test(start_paused = true)]
async fn a_slow_follower_is_told_how_much_it_missed() {
    let mut rig = rig(1, None);
    let mut follow = rig.feed.follow(Filter::everything(), false).unwrap();
    let flow = full(1);
    for _ in 0..1024 + 7 {
        rig.ledgers[0].note(ended(&flow, EndReason::Ok));
    }
    rig.recorder.visit();
    assert_eq!(waiting(&mut follow).await.len(), 1024);
    rig.ledgers[0].note(ended(&full(2), EndReason::Ok));
    rig.recorder.visit();
    assert_eq!(waiting(&mut follow).await, [("missed".to_owned(), 7), ("ended".to_owned(), 2)]);
}

#[test]
fn followers_are_limited_and_those_who_left_do_not_count() {
    let feed = Feed::new(1);
    let follow = || feed.follow(Filter::everything(), false);
    let all: Vec<_> = (0..FOLLOWERS_MAX).map(|_| follow().unwrap()).collect();
    assert!(follow().is_err());
    drop(all);
    assert!(follow().is_ok());
}

#[tokio::test(start_paused = true)]
async fn following_ends_with_the_recorder() {
    let rig = rig(1, None);
    let mut follow = rig.feed.follow(Filter::everything(), false).unwrap();
    let (stop, stopped) = watch::channel(false);
    drop(stop);
    rig.recorder.run(stopped).await;
    assert_eq!(follow.next().await, None);
    let mut late = rig.feed.follow(Filter::everything(), false).unwrap();
    assert_eq!(late.next().await, None);
}

#[tokio::test]
async fn sigusr1_opens_the_file_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (path, old) = (dir.path().join("flows.jsonl"), dir.path().join("old"));
    let writer = RecordWriter::start(Target::File(path.clone())).unwrap();
    tokio::spawn(writer.reopen_on_signal().unwrap());
    std::fs::rename(&path, &old).unwrap();
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::USR1).unwrap();
    let appears = async {
        while !path.exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), appears).await.expect("the file is made anew");
    writer.push(b"new\n");
    assert_eq!(writer.close(Duration::from_secs(60)), 0);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "new\n");
}
