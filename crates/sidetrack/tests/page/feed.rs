//! `/v1/live`: what a viewer is told, also a slow one, a vanished one and many.

use crate::support::{denied, ended, enter, flow, full, live};
use crate::{Rig, status, tokens};
use serde_json::{Value, json};
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::{LIMIT, eventually};
use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::Arc;

/// A viewer that reads events.
struct Viewer(BufReader<TcpStream>);

impl Viewer {
    /// Asks for the stream. HTTP/1.0 has it without chunks.
    fn new(rig: &Rig, cookie: &str, query: &str) -> Self {
        let mut stream = TcpStream::connect(rig.address).expect("a connection");
        stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
        let request =
            format!("GET /v1/live{query} HTTP/1.0\r\nhost: {}\r\ncookie: {cookie}\r\n\r\n", rig.address);
        stream.write_all(request.as_bytes()).expect("written");
        Self(BufReader::new(stream))
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.0.read_line(&mut line).expect("a line") > 0, "the stream ended");
        line.trim_end().to_owned()
    }

    fn head(&mut self) -> String {
        std::iter::from_fn(|| Some(self.line()).filter(|line| !line.is_empty()))
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// The next event: its name and its data.
    fn next(&mut self) -> (String, Value) {
        let (mut name, mut data) = (String::new(), Value::Null);
        loop {
            let line = self.line();
            if let Some(word) = line.strip_prefix("event: ") {
                name = word.to_owned();
            } else if let Some(text) = line.strip_prefix("data: ") {
                data = serde_json::from_str(text).expect("JSON");
            } else if line.is_empty() && !name.is_empty() {
                return (name, data);
            }
        }
    }

    /// The events of one pass: rows, moves, those that left, and the tick.
    fn pass(&mut self) -> (Vec<Value>, Vec<Value>, Vec<Value>, Value) {
        let (mut rows, mut moved, mut left) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let (name, data) = self.next();
            if name == "tick" {
                return (rows, moved, left, data);
            }
            if name == "flows" {
                let list = |name: &str| data[name].as_array().expect("a list").clone();
                rows.extend(list("rows"));
                moved.extend(list("moved"));
                left.extend(list("left"));
            }
        }
    }

    /// Reads passes until one fits.
    fn until(&mut self, fits: impl Fn(&(Vec<Value>, Vec<Value>, Vec<Value>, Value)) -> bool) {
        for _ in 0..120 {
            if fits(&self.pass()) {
                return;
            }
        }
        panic!("no such pass");
    }
}

fn ids(rows: &[Value]) -> Vec<u64> {
    rows.iter().filter_map(|row| row["flow"].as_u64()).collect()
}

#[test]
fn a_viewer_is_told_what_runs_and_what_changes() {
    let (folder, _, read) = tokens();
    let rig = Rig::new(folder.path());
    let cookie = rig.log_in(&read);
    let flows: Vec<_> = (1..=2).map(full).collect();
    let slots: Vec<_> = flows.iter().map(|flow| enter(&rig.ledger, flow)).collect();
    let mut viewer = Viewer::new(&rig, &cookie, "");
    assert!(viewer.head().contains("text/event-stream"));
    let (name, hello) = viewer.next();
    assert_eq!((name.as_str(), &hello["moved_columns"][1]), ("hello", &json!("bytes_up")));
    let (rows, moved, _, tick) = viewer.pass();
    assert_eq!((ids(&rows), moved.len()), (vec![1, 2], 0));
    assert_eq!(rows[0]["host"], "www.example");
    assert_eq!(rows[0]["carrier"], "socks6://gw:1080 -> http://b:3128", "no credentials");
    assert_eq!((&tick["flows_active"], &tick["gone"]), (&json!(2), &json!([])));
    flows[0].count(5, 7);
    let before = flows[0].bytes();
    viewer.until(|(rows, moved, ..)| {
        assert!(rows.is_empty(), "nothing but bytes has changed");
        moved.iter().any(|line| line[0] == 1 && line[1] == before.0 && line[2] == before.1)
    });
    rig.ledger.leave(slots[1], ended(&flows[1], EndReason::Refused));
    rig.recorder.lock().unwrap().visit();
    let (mut is_gone, mut is_told) = (false, false);
    while !(is_gone && is_told) {
        let (_, _, _, tick) = viewer.pass();
        is_gone |= tick["gone"] == json!([2]);
        is_told |= tick["ended"]
            .as_array()
            .unwrap()
            .iter()
            .any(|row| row["flow"] == 2 && row["reason"] == "refused");
    }
    enter(&rig.ledger, &full(3));
    viewer.until(|(rows, ..)| ids(rows) == [3]);
}

#[test]
fn a_filter_is_asked_again_when_a_flow_changes() {
    let (folder, _, read) = tokens();
    let rig = Rig::new(folder.path());
    let cookie = rig.log_in(&read);
    let small = live(1, flow("10.0.0.1:22"), denied(None));
    enter(&rig.ledger, &small);
    enter(&rig.ledger, &full(2));
    let mut viewer = Viewer::new(&rig, &cookie, "?filter=up%20%3E%20100%20and%20up%20%3C%205000");
    let (rows, _, _, tick) = viewer.pass();
    assert_eq!((ids(&rows), &tick["flows_active"], &tick["flows_shown"]), (vec![2], &json!(2), &json!(1)));
    small.count(200, 0);
    viewer.until(|(rows, ..)| ids(rows) == [1]);
    small.count(9000, 0);
    viewer.until(|(_, _, left, _)| *left == [json!(1)]);
    let wrong = rig.ask("GET", "/v1/live?filter=nothing", &[("cookie", &cookie)], "");
    assert_eq!(status(&wrong), "400");
}

#[test]
fn completions_and_places_of_errors_are_given() {
    let (folder, _, read) = tokens();
    let rig = Rig::new(folder.path());
    let cookie = rig.log_in(&read);
    let ask = |filter: &str| {
        let answer = rig.ask("GET", &format!("/v1/filter?filter={filter}"), &[("cookie", &cookie)], "");
        let body = answer.split("\r\n\r\n").nth(1).expect("a body").to_owned();
        serde_json::from_str::<Value>(&body).expect("JSON")
    };
    let answer = ask("rule%20==%20b");
    assert_eq!((&answer["is_valid"], &answer["completion"]["words"]), (&json!(true), &json!(["bulk"])));
    let answer = ask("port%20==%20x");
    assert_eq!(
        (&answer["is_valid"], &answer["error"]["from"], &answer["error"]["to"]),
        (&json!(false), &json!(8), &json!(9))
    );
}

#[test]
fn a_slow_viewer_gets_the_latest_and_holds_up_nobody() {
    const FLOWS: u64 = 20_000;
    let (folder, _, read) = tokens();
    let rig = Rig::new(folder.path());
    let cookie = rig.log_in(&read);
    let flows: Vec<_> = (1..=FLOWS).map(full).collect();
    let slots: Vec<_> = flows.iter().map(|flow| enter(&rig.ledger, flow)).collect();
    let mut slow = Viewer::new(&rig, &cookie, "");
    let mut quick = Viewer::new(&rig, &cookie, "");
    assert_eq!(quick.pass().0.len() as u64, FLOWS);
    // All but ten end while the slow one reads nothing: what it has not taken is not stored for it.
    for (slot, flow) in slots.into_iter().zip(&flows).skip(10) {
        rig.ledger.leave(slot, ended(flow, EndReason::Ok));
    }
    let mut left = FLOWS;
    while left > 10 {
        left = quick.pass().3["flows_active"].as_u64().unwrap();
    }
    let mut known = BTreeSet::new();
    loop {
        let (rows, _, _, tick) = slow.pass();
        known.extend(ids(&rows));
        for id in tick["gone"].as_array().unwrap() {
            known.remove(&id.as_u64().unwrap());
        }
        if tick["flows_active"] == 10 {
            break;
        }
    }
    assert_eq!(known, (1..=10).collect());
}

#[test]
fn fifty_viewers_are_served_and_leave_nothing_behind() {
    let (folder, _, read) = tokens();
    let rig = Rig::new(folder.path());
    let cookie = rig.log_in(&read);
    let flow = full(1);
    enter(&rig.ledger, &flow);
    let alone = Arc::strong_count(&flow);
    let mut viewers: Vec<_> = (0..50).map(|_| Viewer::new(&rig, &cookie, "")).collect();
    for viewer in &mut viewers {
        assert_eq!(ids(&viewer.pass().0), [1]);
    }
    assert!(Arc::strong_count(&flow) > alone, "it stands in the table");
    assert_eq!(status(&rig.ask("GET", "/v1/flows", &[("cookie", &cookie)], "")), "200");
    drop(viewers);
    eventually("the table is empty again", || Arc::strong_count(&flow) == alone);
    assert_eq!(ids(&Viewer::new(&rig, &cookie, "").pass().0), [1], "and comes back");
}
