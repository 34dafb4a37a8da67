//! The screen: what it shows and does for what comes to it.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};
use sidetrack::cli::top::{
    Act, Changes, Column, ENDED_MAX, Event, FlowRow, Input, LIVE_MAX, Reader, Rows, Screen, Tab, Tick,
};

const COLUMNS: [&str; 7] = [
    "flow",
    "bytes_up",
    "bytes_down",
    "up_bytes_per_second",
    "down_bytes_per_second",
    "client_rtt_us",
    "server_rtt_us",
];

/// A screen that has read events as a node writes them.
struct Rig {
    screen: Screen,
    reader: Reader,
}

impl Rig {
    fn new() -> Self {
        let mut rig = Self { screen: Screen::new("admin.sock", "", false), reader: Reader::default() };
        rig.tell("hello", &json!({"interval_ms": 1000, "moved_columns": COLUMNS}));
        rig
    }

    /// A screen with some flows.
    fn filled() -> Self {
        let mut rig = Self::new();
        rig.tell(
            "flows",
            &json!({"rows": [
            row(1, "curl", Some("www.example"), "10.9.8.7:443", "bulk"),
            row(2, "git", Some("code.example"), "192.0.2.9:22", "work"),
            row(3, "日本語\u{1b}[2J", None, "[2001:db8::9]:8443", "everything else"),
        ], "moved": [], "left": []}),
        );
        rig.tell("flows", &json!({"rows": [], "moved": [[1, 2048, 5_000_000, 300, 1_200_000, 90, 41_000], [2, 70_000, 900, 64_000, 20, 80, 180]]}));
        let mut refused = row(9, "wget", Some("gone.example"), "198.51.100.4:80", "bulk");
        refused["reason"] = json!("refused");
        refused["detail"] = json!("hop 1 of 2, gw:1080: reply 5, connection refused");
        rig.tick(&json!({"gone": [9], "ended": [refused]}));
        rig
    }

    fn tell(&mut self, name: &str, data: &Value) -> Vec<Act> {
        assert_eq!(self.reader.line(&format!("event: {name}")).unwrap(), None);
        assert_eq!(self.reader.line(&format!("data: {data}")).unwrap(), None);
        let event = self.reader.line("").unwrap().expect("an event");
        self.screen.handle(Input::Event(event))
    }

    fn tick(&mut self, more: &Value) -> Vec<Act> {
        let mut tick = json!({"now": "2026-11-28T12:01:05.000Z", "flows_active": 3, "flows_shown": 3, "flows_ended": 41,
            "ended_missed": 0, "up_bytes_per_second": 64_300, "down_bytes_per_second": 1_200_020, "gone": [], "ended": []});
        for (name, value) in more.as_object().unwrap() {
            tick[name] = value.clone();
        }
        self.tell("tick", &tick)
    }

    fn press(&mut self, keys: &str) -> Vec<Act> {
        keys.chars().flat_map(|c| self.key(KeyCode::Char(c))).collect()
    }

    fn key(&mut self, code: KeyCode) -> Vec<Act> {
        self.screen.handle(Input::Key(KeyEvent::new(code, KeyModifiers::NONE)))
    }

    fn picture(&mut self, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| self.screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = (0..height).map(|y| {
            // A wide character has a second, empty cell.
            let mut x = 0;
            let mut line = String::new();
            while x < width {
                let symbol = buffer[(x, y)].symbol();
                line.push_str(symbol);
                x += u16::try_from(unicode_width::UnicodeWidthStr::width(symbol)).unwrap().max(1);
            }
            line.trim_end().to_owned() + "\n"
        });
        lines.collect()
    }

    /// The numbers of the flows in the order of the table.
    fn order(&mut self) -> Vec<String> {
        let picture = self.picture(200, 24);
        let rows =
            picture.lines().skip(3).map(|line| line.trim_start().split(' ').next().unwrap_or("").to_owned());
        rows.take_while(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit())).collect()
    }
}

fn row(id: u64, process: &str, host: Option<&str>, to: &str, rule: &str) -> Value {
    json!({"flow": id, "ts": "2026-11-28T12:00:00.000Z", "rule": rule, "chain": ["log", "shape"], "carrier": "socks6://gw:1080",
        "listener": "out", "intercept": "redirect", "protocol": "tcp", "client": "10.1.0.5:40000", "orig_dst": to, "host": host,
        "process": process, "bytes_up": 100 * id, "bytes_down": 1000 * id, "duration_seconds": 1.5, "shunted": false,
        "up_bytes_per_second": 0, "down_bytes_per_second": 0, "client_rtt_us": 0, "server_rtt_us": 0})
}

#[test]
fn the_table_fits_80x24_and_120x40() {
    let mut rig = Rig::filled();
    insta::assert_snapshot!("flows_80x24", rig.picture(80, 24));
    insta::assert_snapshot!("flows_120x40", rig.picture(120, 40));
    rig.press("?");
    insta::assert_snapshot!("help_80x24", rig.picture(80, 24));
    for (width, height) in [(200, 50), (60, 12), (30, 8), (20, 6), (19, 5), (1, 1)] {
        rig.picture(width, height);
    }
}

#[test]
fn names_do_not_drive_the_terminal() {
    let picture = Rig::filled().picture(200, 24);
    assert!(picture.contains("日本語\u{fffd}[2J") && !picture.contains('\u{1b}'), "{picture}");
}

#[test]
fn rows_are_sorted_and_the_selected_flow_stays_selected() {
    let mut rig = Rig::filled();
    assert_eq!(rig.order(), ["1", "2", "9", "3"], "by the rate from servers");
    rig.press("j");
    assert_eq!(rig.key(KeyCode::Enter), [Act::Trace(2)]);
    rig.key(KeyCode::Esc);
    rig.press("o");
    assert_eq!(rig.order(), ["3", "9", "2", "1"]);
    assert_eq!(rig.key(KeyCode::Enter), [Act::Trace(2)], "it is another line now");
    rig.key(KeyCode::Esc);
    rig.press(">");
    assert_eq!(rig.order(), ["2", "1", "9", "3"], "by the rate to servers");
    rig.press("e");
    assert_eq!(rig.order(), ["2", "1", "3"], "without ended flows");
    // The selected flow ends, and its neighbour is selected.
    rig.tick(&json!({"gone": [2]}));
    assert_eq!(rig.key(KeyCode::Enter), [Act::Trace(1)]);
}

#[test]
fn every_column_has_an_order_and_text() {
    let mut rig = Rig::filled();
    for _ in Column::ALL {
        rig.press(">");
        let mut order = rig.order();
        order.sort_unstable();
        assert_eq!(order, ["1", "2", "3", "9"]);
    }
}

#[test]
fn frozen_rows_stay() {
    let mut rig = Rig::filled();
    rig.press("f");
    let before = rig.picture(120, 20);
    assert!(before.contains("FROZEN"));
    rig.tell("flows", &json!({"rows": [row(4, "ssh", None, "192.0.2.1:22", "x")], "moved": [[2, 1, 2, 3, 4_000_000, 5, 6]]}));
    rig.tick(&json!({"gone": [1]}));
    let table = |picture: &str| picture.lines().skip(2).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(table(&rig.picture(120, 20)), table(&before));
    rig.press("f");
    assert_eq!(rig.order(), ["2", "9", "4", "3"]);
}

#[test]
fn a_mistake_in_the_filter_is_marked_in_place() {
    let mut rig = Rig::filled();
    rig.press("/prot == 443");
    assert_eq!(rig.key(KeyCode::Enter), []);
    let picture = rig.picture(80, 24);
    let lines: Vec<_> = picture.lines().collect();
    assert_eq!(lines[21], "filter: prot == 443");
    assert_eq!(lines[22], "        ^^^^");
    assert!(lines[23].contains("there is no field"), "{}", lines[23]);
    rig.key(KeyCode::Home);
    rig.key(KeyCode::Delete);
    rig.key(KeyCode::Delete);
    rig.key(KeyCode::Delete);
    rig.key(KeyCode::Delete);
    rig.press("port");
    assert_eq!(rig.key(KeyCode::Enter), [Act::Watch("port == 443".into())]);
    assert!(rig.picture(80, 24).contains("filter: port == 443"));
    // The same filter asks for nothing. Escape in the table removes it.
    rig.press("/");
    assert_eq!(rig.key(KeyCode::Enter), []);
    assert_eq!(rig.key(KeyCode::Esc), [Act::Watch(String::new())]);
    // A long filter shows where it is written.
    rig.press("/");
    rig.press(&"host == a or ".repeat(10));
    assert!(rig.picture(80, 24).contains("or host == a or"));
}

#[test]
fn a_flow_is_ended_after_a_question() {
    let mut rig = Rig::filled();
    assert_eq!(rig.press("x"), []);
    assert!(rig.picture(80, 24).contains("End flow 1, curl to www.example:443? y ends it"));
    assert_eq!(rig.press("n"), []);
    assert_eq!(rig.press("xy"), [Act::Kill(1)]);
    rig.screen.handle(Input::Told("ended flow 1".into()));
    assert!(rig.picture(80, 24).contains("ended flow 1"));
    // In its drawer too. One that has ended is not asked about.
    rig.key(KeyCode::Enter);
    assert_eq!(rig.press("xy"), [Act::Kill(1)]);
    rig.key(KeyCode::Esc);
    rig.press("jj");
    assert_eq!(rig.press("xy"), []);
}

#[test]
fn the_drawer_shows_a_trace_and_keeps_it() {
    let mut rig = Rig::filled();
    assert_eq!(rig.key(KeyCode::Enter), [Act::Trace(1)]);
    assert!(rig.picture(80, 24).contains("asking the node"));
    let lines: Vec<_> = (0..40).map(|line| format!("field{line}   value")).collect();
    rig.screen.handle(Input::Trace(2, Ok("of another flow".into())));
    rig.screen.handle(Input::Trace(1, Ok(lines.join("\n"))));
    insta::assert_snapshot!("drawer_80x24", rig.picture(80, 24));
    assert_eq!(rig.tick(&json!({})), [Act::Trace(1)], "its times go on");
    rig.screen.handle(Input::Trace(1, Err("there is no flow 1".into())));
    rig.press("G");
    let picture = rig.picture(80, 24);
    assert!(picture.contains("field39"), "{picture}");
    rig.press("k");
    assert!(!rig.picture(80, 24).contains("field39"));
    rig.press("q");
    assert!(!rig.picture(80, 24).contains("field"));
    assert_eq!(rig.press("q"), [Act::Quit]);
}

#[test]
fn a_node_that_goes_away_and_comes_back_is_told() {
    let mut rig = Rig::filled();
    rig.screen.handle(Input::Lost(7, "no sidetrack runs at /x\nhelp: start one".into()));
    let picture = rig.picture(80, 24);
    assert!(picture.starts_with("NO ANSWER for 7 s, trying again: no sidetrack runs at /x"), "{picture}");
    assert!(picture.contains("www.example"), "the rows stay");
    rig.tell("hello", &json!({"moved_columns": COLUMNS}));
    rig.tick(&json!({"flows_active": 0}));
    let picture = rig.picture(80, 24);
    assert!(picture.contains("the node answers again") && !picture.contains("www.example"), "{picture}");
}

#[test]
fn other_tables_are_asked_for_while_they_are_open() {
    let mut rig = Rig::filled();
    assert_eq!(rig.press("2"), [Act::Look(Tab::FastPath)]);
    assert_eq!(rig.tick(&json!({})), [Act::Look(Tab::FastPath)]);
    rig.screen.handle(Input::FastPath(Err("the configuration has no [shunt]\nhelp: docs/shunt.md".into())));
    assert!(rig.picture(80, 24).contains("the configuration has no [shunt]"));
    assert_eq!(rig.key(KeyCode::Tab), [Act::Look(Tab::Health)]);
    assert!(rig.picture(80, 24).contains("waiting for the node"));
    rig.key(KeyCode::Tab);
    assert_eq!(rig.tick(&json!({})), []);
}

#[test]
fn memory_is_bounded() {
    let mut rows = Rows::default();
    let flow = |id| FlowRow { flow: id, ..FlowRow::default() };
    for start in (0..LIVE_MAX as u64 + 1000).step_by(1000) {
        let rows_of = (start..start + 1000).map(flow).collect();
        rows.take(Event::Flows(Changes { rows: rows_of, ..Changes::default() }));
    }
    assert_eq!((rows.len().0, rows.left_out()), (LIVE_MAX, 1000));
    let ended = |id| FlowRow { reason: Some("ok".into()), ..flow(id) };
    rows.take(Event::Tick(Tick { ended: (0..2000).map(ended).collect(), ..Tick::default() }));
    assert_eq!(rows.len(), (LIVE_MAX - 2000, ENDED_MAX));
    assert_eq!(rows.left_out(), 0);
}

#[test]
fn any_keys_are_survived() {
    let keys = [
        KeyCode::Char('j'),
        KeyCode::Char('k'),
        KeyCode::Char('G'),
        KeyCode::Char('/'),
        KeyCode::Char('x'),
        KeyCode::Char('ä'),
        KeyCode::Char('y'),
        KeyCode::Char('f'),
        KeyCode::Char('e'),
        KeyCode::Char('<'),
        KeyCode::Char('2'),
        KeyCode::Char('1'),
        KeyCode::Enter,
        KeyCode::Esc,
        KeyCode::Tab,
        KeyCode::Backspace,
        KeyCode::Delete,
        KeyCode::Left,
        KeyCode::Right,
        KeyCode::Home,
        KeyCode::PageDown,
        KeyCode::PageUp,
        KeyCode::Char('?'),
        KeyCode::Char('3'),
    ];
    let mut rig = Rig::filled();
    let mut random = 1_u64;
    for step in 0..5000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        rig.key(keys[(random >> 33) as usize % keys.len()]);
        if step % 7 == 0 {
            rig.tick(&json!({"gone": [random >> 62]}));
            let (width, height) = (1 + (random >> 40) as u16 % 130, 1 + (random >> 50) as u16 % 45);
            rig.picture(width, height);
        }
        if step % 100 == 0 {
            rig.tell("flows", &json!({"rows": [row(random >> 62, "p", None, "192.0.2.1:1", "r")]}));
        }
    }
}

#[test]
fn events_of_other_versions_are_survived() {
    let mut reader = Reader::default();
    for line in [": a comment", "retry: 2000", "event: news", "data: {", "data: }"] {
        assert_eq!(reader.line(line).unwrap(), None);
    }
    assert_eq!(reader.line("").unwrap(), Some(Event::Other));
    assert_eq!(reader.line("").unwrap(), None, "without data there is no event");
    reader.line("event:tick\r").unwrap();
    reader.line("data:{\"flows_active\":3,\"new\":[1]}\r").unwrap();
    let Some(Event::Tick(tick)) = reader.line("\r").unwrap() else { panic!("a tick") };
    assert_eq!(tick.flows_active, 3);
    reader.line("event: flows").unwrap();
    reader.line("data: {\"rows\": 7}").unwrap();
    assert!(reader.line("").is_err());
}
