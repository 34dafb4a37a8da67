//! Records: their shape, that their document tells the truth, and that the recorder loses none in silence.

mod support;

use serde_json::Value;
use sidetrack::live::{Batch, Decided, Ended, Ledger, LiveFlow, Taken, Tally, Transport};
use sidetrack::record::{
    FOLLOWERS_MAX, Feed, FlowRecord, Observer, RecordWriter, Recorder, Target, write_lines,
};
use sidetrack_core::filter::Filter;
use sidetrack_core::flow::{EndReason, FlowId, Intercept, Process, Protocol};
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
    by_kernel.process = Some(Process { pid: Some(9), uid: Some(0), ..Process::default() });
    let by_kernel = ended(&live(9, by_kernel, carried(Some("fast"), &[])), EndReason::KernelClosed);
    let mut datagrams = flow("9.9.9.9:53");
    datagrams.protocol = Protocol::Udp;
    let datagrams = live(10, datagrams, carried(Some("dns"), &[]));
    datagrams.set_packets(3, 2);
    let datagrams = ended(&datagrams, EndReason::Idle);
    let lines: String = [refused, unknown, by_kernel, datagrams].iter().map(line).collect();
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

/// Flows with everything that a record can have, and without.
fn all_sorts() -> Vec<Ended> {
    let mut sorts = vec![ended(&Arc::new(LiveFlow::new(FlowId(1))), EndReason::HandshakeTimeout)];
    let texts = ["", "plain", "\"quoted\" \\ and \u{1}\ttab", "ünïcode \u{2028}"];
    for (at, reason) in EndReason::ALL.into_iter().enumerate() {
        let id = at as u64 + 2;
        let text = texts[at % texts.len()];
        let name = at % 3 == 0;
        let mut known =
            flow(if name { "db.example:5432" } else { ["10.9.8.7:1", "[2001:db8::7]:443"][at % 2] });
        known.host = (at % 4 != 1).then(|| ["db.example", "bücher.example"][at % 2].parse().expect("a name"));
        known.client = ["192.0.2.200:9", "[fe80::1%7]:65535", "[::1]:1"][at % 3].parse().expect("an address");
        known.intercept = Intercept::ALL[at % Intercept::ALL.len()];
        known.protocol = Protocol::ALL[at % 2];
        known.user = (at % 5 == 0).then(|| text.to_owned());
        let program = (at % 3 != 2).then(|| text.to_owned());
        let process = Process {
            pid: (at % 2 == 0).then_some(7),
            name: program,
            uid: (at % 7 > 2).then_some(0),
            is_hidden: false,
        };
        known.process = (at % 2 == 0).then_some(process);
        let hops: &[&str] =
            [&[][..], &["socks5://gw:1080"], &["socks6://a:b@gw:1080", "http://b:3128"]][at % 3];
        let rule = (at % 4 != 0).then_some(text);
        let verdict = if at % 6 == 0 { denied(rule) } else { carried(rule, hops) };
        let agreement = (at % 3 == 1).then(|| text.into());
        let flow = live(id, known, sidetrack_core::policy::Verdict { agreement, ..verdict });
        flow.count(id * 1000, u64::MAX / id);
        flow.set_packets(id, u64::MAX - id);
        let us = Duration::from_micros([0, 1, 1_000_000, 3_600_000_123][at % 4]);
        if at % 2 == 0 {
            flow.connected(us);
            flow.first_byte(us * 2);
            let transport = [Transport::Quic, Transport::Tls, Transport::Warm][at % 3];
            flow.carried_by(Some(Taken { transport, address: ([10, 9, 8, 7], 4433).into() }));
        }
        if at % 5 == 1 {
            flow.shunted();
            flow.greeted("other.example".parse().expect("a name"));
            flow.reached(&sidetrack_core::engine::Stamps::default());
        }
        let detail = (at % 3 != 0).then(|| text.into());
        sorts.push(Ended { flow, reason, detail, duration: us });
    }
    sorts
}

#[test]
fn every_record_fits_the_schema() {
    let schema: Value = serde_json::from_str(sidetrack::record::SCHEMA).unwrap();
    let words = |field: &str| -> Vec<String> {
        let list = schema["properties"][field]["enum"].as_array().expect("a list");
        list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    assert_eq!(words("reason"), EndReason::ALL.map(|reason| reason.to_string()));
    assert_eq!(words("intercept"), Intercept::ALL.map(|by| by.as_str().to_owned()));
    for ended in all_sorts() {
        let decided = ended.flow.decided();
        let in_flight = FlowRecord::live(&ended.flow, decided.as_deref());
        for record in [in_flight, FlowRecord::ended(&ended, decided.as_deref())] {
            let value = serde_json::to_value(&record).unwrap();
            let wrong = support::schema::mismatches(&schema, &schema, &value);
            assert!(wrong.is_empty(), "{wrong:#?}\n{value:#}");
        }
    }
    // The check finds what does not fit.
    let mut value = serde_json::to_value(FlowRecord::live(&full(1), None)).unwrap();
    value["reason"] = "bored".into();
    value["bytes_up"] = (-1).into();
    value["more"] = true.into();
    value.as_object_mut().unwrap().remove("rule");
    assert_eq!(support::schema::mismatches(&schema, &schema, &value).len(), 4);
}

#[test]
fn lines_from_the_compact_form_say_what_the_records_say() {
    let sorts = all_sorts();
    let (mut batch, mut small) = (Batch::default(), Batch::default());
    for (at, ended) in sorts.iter().enumerate() {
        if at < 4 { batch.add(ended) } else { small.add(ended) }
    }
    assert!(batch.absorb(&small), "there is room");
    let mut lines = Vec::new();
    write_lines(&batch, &mut lines);
    let lines = String::from_utf8(lines).expect("JSON is UTF-8");
    assert_eq!(lines.lines().count(), sorts.len());
    for ((text, ended), past) in lines.lines().zip(&sorts).zip(batch.iter()) {
        let expected: Value = serde_json::from_str(&line(ended)).unwrap();
        assert_eq!(serde_json::from_str::<Value>(text).unwrap(), expected);
        let names = |text: &str| -> Vec<String> {
            text.split(",\"").filter_map(|field| Some(field.split_once("\":")?.0.to_owned())).collect()
        };
        assert_eq!(names(text), names(&line(ended)), "the order of the fields");
        let again = past.to_ended();
        let read: Value = serde_json::from_str(&line(&again)).unwrap();
        assert_eq!(read, expected, "what is read back");
        assert_eq!(
            again.flow.decided().map(|decided| decided.flow.clone()),
            ended.flow.decided().map(|decided| decided.flow.clone())
        );
    }
}

#[test]
fn a_worker_never_waits_for_who_takes_what_ended() {
    let ledger = Arc::new(Ledger::default());
    let flows = 100_000_u64;
    let (mut seen, flow) = (Vec::new(), full(1));
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut taken = Vec::new();
                    while !ledger.is_empty() || ledger.ended_waiting() > 0 {
                        for batch in std::iter::from_fn(|| ledger.take_batch()) {
                            taken.extend(batch.iter().map(|past| past.duration().as_micros() as u64));
                        }
                    }
                    taken
                })
            })
            .collect();
        // In flight until all have ended.
        let slot = enter(&ledger, &flow);
        for number in 1..flows {
            let duration = Duration::from_micros(number);
            ledger.note(Ended { duration, ..ended(&flow, EndReason::Ok) });
        }
        ledger.leave(slot, Ended { duration: Duration::from_micros(flows), ..ended(&flow, EndReason::Ok) });
        seen.extend(readers.into_iter().flat_map(|reader| reader.join().expect("no panic")));
    });
    seen.extend(ledger.take_ended().0.iter().map(|ended| ended.duration.as_micros() as u64));
    let counted: u64 = ledger.take_tallies().iter().map(|tally| tally.times_us.len() as u64).sum();
    seen.sort_unstable();
    let before = seen.len();
    seen.dedup();
    assert_eq!((seen.len() as u64 + counted, before), (flows, seen.len()), "each once");
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
    // The visits are those of a thread, whose time is not paused.
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while rig.feed.ended_total() == 0 && std::time::Instant::now() < until {
        tokio::time::sleep(sidetrack::record::VISIT_EVERY).await;
    }
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
