use super::*;
use proptest::prelude::*;
use sidetrack_core::flow::{EndReason, Intercept, Protocol};
use std::borrow::Cow;

fn text<'a>(text: impl Into<String>) -> Option<Cow<'a, str>> {
    Some(Cow::Owned(text.into()))
}

/// The record of a flow that ended, with all fields.
fn record(number: u64) -> FlowRecord<'static> {
    let from = UNIX_EPOCH + Duration::from_millis(1_795_302_439_000 + number * 10);
    let is_udp = number.is_multiple_of(5);
    FlowRecord {
        ts: from.into(),
        flow: number,
        rule: text(format!("rule-{}", number % 3)),
        chain: if number.is_multiple_of(2) { vec!["count".into(), "limit".into()] } else { Vec::new() },
        carrier: text("socks6://gw:1080 -> http://b:3128"),
        listener: text("proxy"),
        intercept: Some(Intercept::ALL[number as usize % Intercept::ALL.len()]),
        client: format!("10.0.{}.{}:{}", number / 250 % 250, number % 250, 1024 + number % 60_000)
            .parse()
            .ok(),
        orig_dst: format!("h{}.example:443", number % 7).parse().ok().map(Cow::Owned),
        host: text(format!("h{}.example", number % 7)),
        process: (!number.is_multiple_of(11)).then(|| Cow::Owned(format!("p{}", number % 4))),
        user: text("uid:1000"),
        bytes_up: number,
        bytes_down: u64::MAX - number,
        connect_seconds: Some(0.001_234),
        first_byte_seconds: None,
        duration_seconds: number as f64 / 1e3,
        shunted: number.is_multiple_of(13),
        reason: Some(EndReason::ALL[number as usize % EndReason::ALL.len()]),
        detail: text("hop 1 of 2: \"refused\", ü\\\n"),
        path: text("quic 203.0.113.5:4433"),
        agreement: text("allow: a"),
        tls_name: text("other.example"),
        states: Some(vec![super::super::Reached("client".into(), "ESTABLISHED".into(), 0.000_412)]),
        mptcp: vec!["client".into()],
        protocol: Some(if is_udp { Protocol::Udp } else { Protocol::Tcp }),
        packets_up: is_udp.then_some(7),
        packets_down: is_udp.then_some(8),
        held_seconds: Some(0.25),
    }
}

/// A record in which nothing is known that can be unknown.
fn bare(number: u64) -> FlowRecord<'static> {
    let text = format!(
        r#"{{"ts":"2026-11-21T23:07:19.123Z","flow":{number},"rule":null,"chain":[],"carrier":null,"listener":null,
        "intercept":null,"client":null,"orig_dst":null,"host":null,"process":null,"user":null,"bytes_up":0,"bytes_down":0,
        "connect_seconds":null,"first_byte_seconds":null,"duration_seconds":0.0,"shunted":false,"reason":null,"detail":null}}"#
    );
    serde_json::from_str(&text).expect("a record")
}

fn lines(records: &[FlowRecord<'_>]) -> Vec<u8> {
    let mut lines = Vec::new();
    records.iter().for_each(|record| record.write_line(&mut lines));
    lines
}

fn query(filter: &str) -> Query {
    Query { window: Window::ALL, filter: Filter::parse(filter).expect(filter), limit: usize::MAX, top: None }
}

/// A folder with these records: the first part in columns, the second in closed lines, the third in open ones.
fn stored(parts: [&[FlowRecord<'_>]; 3]) -> (tempfile::TempDir, Folder) {
    use std::io::Write;
    let place = tempfile::tempdir().expect("folder");
    let bounds = Bounds { bytes_max: u64::MAX, keep: Duration::from_secs(1 << 32), lines_max: usize::MAX };
    let folder = Folder::open(place.path(), bounds).expect("new");
    for (at, part) in parts.into_iter().enumerate() {
        folder.journal(Content::Flows).expect("journal").0.write_all(&lines(part)).expect("write");
        if at < 2 {
            drop(folder.turn(Content::Flows).expect("turn"));
        }
        if at == 0 {
            compact(&folder, folder.to_compact().expect("lines")).expect("columns");
        }
    }
    (place, folder)
}

fn found(folder: &Folder, query: &Query) -> Vec<FlowRecord<'static>> {
    let mut found = search::search(folder, query);
    found.cut(query);
    assert_eq!(found.damaged, Vec::<String>::new());
    found.flows
}

#[test]
fn records_read_as_they_were_written() {
    let all: Vec<_> = (1..=40).map(record).chain([bare(41)]).collect();
    let (_place, folder) = stored([&all, &[], &[]]);
    let mut back = found(&folder, &query(""));
    back.sort_by_key(|record| record.flow);
    assert_eq!(back, all);
}

const FILTERS: [&str; 21] = [
    "",
    "proc == p1",
    "proc != p1",
    "host == h3.example and port == 443",
    "host ~ \"h*.example\" and not proc in [p1, p2]",
    "dst == h2.example or src in 10.0.0.0/28",
    "src == 10.0.0.7",
    "dst == 10.0.0.7",
    "id in [3, 8-12]",
    "id == 1000000",
    "rule == rule-9",
    "reason == ok or protocol == udp",
    "packets > 3",
    "up >= 20 and down > 1",
    "age > 15ms and connect < 1s",
    "first_byte > 0ms",
    "user == \"uid:1000\" and listener == proxy and carrier ~ \"socks6*\"",
    "intercept == socks and state == ended",
    "chain == limit and not chain == filter",
    "chain == \"count,limit\" and id < 20",
    "chain ~ l*t or chain != count",
];

#[test]
fn a_search_finds_what_the_filter_says() {
    let all: Vec<_> = (1..=120).map(record).chain((121..=125).map(bare)).collect();
    let (_place, folder) = stored([&all[..60], &all[60..90], &all[90..]]);
    for text in FILTERS {
        let query = query(text);
        let wanted: Vec<_> =
            all.iter().filter(|record| query.filter.matches(&record.facts())).cloned().collect();
        let mut back = found(&folder, &query);
        back.sort_by_key(|record| record.flow);
        assert_eq!(back, wanted, "{text}");
        assert_eq!(search::search(&folder, &query).searched, 125, "{text}");
    }
}

#[test]
fn a_window_selects_flows_that_were_there() {
    let all: Vec<_> = (1..=90).map(record).collect();
    let (_place, folder) = stored([&all[..30], &all[30..60], &all[60..]]);
    let base = 1_795_302_439_000;
    for (since_ms, until_ms) in
        [(base, base + 150), (base + 215, base + 216), (base + 605, i64::MAX), (i64::MIN, base)]
    {
        let query = Query { window: Window { since_ms, until_ms }, ..query("proc == p1 or proc == p2") };
        let wanted: Vec<_> = all
            .iter()
            .filter(|record| query.filter.matches(&record.facts()) && query.window.touches(span(record)))
            .map(|record| record.flow)
            .collect();
        let mut back: Vec<_> = found(&folder, &query).iter().map(|record| record.flow).collect();
        back.sort_unstable();
        assert_eq!(back, wanted, "{since_ms} to {until_ms}");
    }
}

#[test]
fn a_list_has_the_latest_flows() {
    let all: Vec<_> = (1..=90).map(record).collect();
    let (_place, folder) = stored([&all[..30], &all[30..60], &all[60..]]);
    let asked = Query { limit: 5, ..query("") };
    let mut result = search::search(&folder, &asked);
    result.cut(&asked);
    assert!(result.has_more);
    assert_eq!(result.flows.iter().map(|record| record.flow).collect::<Vec<_>>(), [86, 87, 88, 89, 90]);
    let asked = Query { limit: 90, ..query("") };
    let mut result = search::search(&folder, &asked);
    result.cut(&asked);
    assert!(!result.has_more && result.flows.len() == 90);
}

#[test]
fn sums_by_group_count_every_flow_once() {
    let all: Vec<_> = (1..=99).map(record).collect();
    let (_place, folder) = stored([&all[..33], &all[33..66], &all[66..]]);
    let keys = ["process", "port", "protocol"].map(|name| Key::parse(name).expect(name)).to_vec();
    let asked = Query { top: Some(Top { keys, by: By::Flows }), ..query("host != h0.example") };
    let mut wanted: BTreeMap<Vec<Option<String>>, (u64, u64)> = BTreeMap::new();
    for record in all.iter().filter(|record| asked.filter.matches(&record.facts())) {
        let key = vec![
            record.process.as_deref().map(str::to_owned),
            Some("443".to_owned()),
            record.protocol.map(|protocol| protocol.as_str().to_owned()),
        ];
        let sum = wanted.entry(key).or_default();
        *sum = (sum.0 + 1, sum.1 + record.bytes_up);
    }
    let (groups, rest) = search::search(&folder, &asked).groups.largest(By::Flows, 1000);
    let got: BTreeMap<_, _> =
        groups.iter().map(|group| (group.values.clone(), (group.sum.flows, group.sum.bytes_up))).collect();
    assert_eq!((got, rest), (wanted, Sum::default()));
    assert!(groups.windows(2).all(|pair| pair[0].sum.flows >= pair[1].sum.flows));
    let (few, rest) = search::search(&folder, &asked).groups.largest(By::Flows, 2);
    let total: u64 = groups.iter().map(|group| group.sum.flows).sum();
    assert_eq!(few.iter().map(|group| group.sum.flows).sum::<u64>() + rest.flows, total);
    assert!(Key::parse("hots").expect_err("unknown").contains("host, process"));
}

#[test]
fn torn_lines_and_damaged_files_hide_no_others() {
    use std::io::Write;
    let all: Vec<_> = (1..=20).map(record).collect();
    let (place, folder) = stored([&all[..5], &all[5..10], &all[10..15]]);
    let (mut open, _) = folder.journal(Content::Flows).expect("journal");
    open.write_all(b"{\"ts\":\"2026-11-21T23:0\n\xff\xfe\n").expect("write");
    open.write_all(&lines(&all[15..])).expect("write");
    assert_eq!(found(&folder, &query("")).len(), 20);
    // The lines become columns without the torn ones.
    drop(folder.turn(Content::Flows).expect("turn"));
    while let Some(name) = folder.to_compact() {
        compact(&folder, name).expect("columns");
    }
    assert_eq!(found(&folder, &query("")).len(), 20);
    // Cut, garbled, emptied.
    let columns: Vec<_> = std::fs::read_dir(place.path())
        .expect("folder")
        .map(|entry| entry.expect("entry").path())
        .filter(|path| path.extension().is_some_and(|end| end == "parquet"))
        .collect();
    assert_eq!(columns.len(), 3);
    let path = columns.iter().min().expect("a file");
    let whole = std::fs::read(path).expect("read");
    for cut in (0..whole.len()).step_by(991) {
        std::fs::write(path, &whole[..cut]).expect("write");
        let result = search::search(&folder, &query(""));
        assert_eq!((result.flows.len(), result.damaged.len()), (15, 1), "cut after {cut}");
    }
    for at in (0..whole.len()).step_by(613) {
        let mut garbled = whole.clone();
        garbled[at] ^= 0x55;
        std::fs::write(path, garbled).expect("write");
        let result = search::search(&folder, &query("proc == p1 or up > 3"));
        assert!(result.flows.len() >= 10, "byte {at}: the other files answer");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_mixture_of_files_answers_alike(
        numbers in proptest::collection::vec(1_u64..500, 1..80),
        cuts in (0_usize..80, 0_usize..80),
        filter in proptest::sample::select(&FILTERS[..]),
    ) {
        let all: Vec<_> = numbers.into_iter().map(record).collect();
        let (a, b) = (cuts.0.min(all.len()), cuts.1.min(all.len()));
        let (a, b) = (a.min(b), a.max(b));
        let (_place, folder) = stored([&all[..a], &all[a..b], &all[b..]]);
        let query = query(filter);
        let mut wanted: Vec<_> = all.iter().filter(|record| query.filter.matches(&record.facts())).map(|record| record.flow).collect();
        let mut back: Vec<_> = found(&folder, &query).iter().map(|record| record.flow).collect();
        wanted.sort_unstable();
        back.sort_unstable();
        prop_assert_eq!(back, wanted);
    }
}

#[test]
fn counters_read_as_they_were_written() {
    use std::io::Write;
    let place = tempfile::tempdir().expect("folder");
    let bounds = Bounds { bytes_max: u64::MAX, keep: Duration::from_secs(1 << 32), lines_max: usize::MAX };
    let folder = Folder::open(place.path(), bounds).expect("new");
    let (mut file, _) = folder.journal(Content::Counters).expect("journal");
    file.write_all(b"[1000,7,1,2]\n[1000,8,10,20]\n[2000,7,3,18446744073709551615]\nno sample\n")
        .expect("write");
    drop(folder.turn(Content::Counters).expect("turn"));
    let ask = |flow, since_ms, until_ms| moved(&folder, flow, Window { since_ms, until_ms }).expect("read");
    let of = |at_ms, flow, up, down| Moved { at_ms, flow, up, down };
    for _ in 0..2 {
        assert_eq!(ask(Some(7), 0, 5000), [of(1000, 7, 1, 2), of(2000, 7, 3, u64::MAX)]);
        assert_eq!(ask(None, 0, 1500), [of(1000, 0, 11, 22)]);
        assert_eq!(ask(None, 2001, 5000), []);
        // The second time from columns.
        if let Some(name) = folder.to_compact() {
            compact(&folder, name).expect("columns");
        }
    }
    let (mut file, _) = folder.journal(Content::Counters).expect("journal");
    file.write_all(b"[3000,9,5,0]\n").expect("write");
    assert_eq!(ask(Some(9), 0, i64::MAX), [of(3000, 9, 5, 0)]);
}

#[test]
fn a_full_file_is_closed_and_becomes_columns_while_flows_go_on() {
    let place = tempfile::tempdir().expect("folder");
    let settings = Settings {
        path: place.path().to_owned(),
        bytes_max: 1 << 30,
        keep: Duration::from_secs(1 << 32),
        counters: true,
    };
    let history = History::with_files_of(500, &settings, Vec::new()).expect("opens");
    let many = 1250;
    for first in (1..=many).step_by(50) {
        let piece: Vec<_> = (first..first + 50).map(record).collect();
        history.push(&lines(&piece));
    }
    let until = Instant::now() + Duration::from_secs(120);
    let is_done = || {
        let (names, open) = history.folder.list(Content::Flows);
        names.iter().filter(|name| name.span.is_some()).count() == 2
            && open.is_some_and(|(_, bytes)| bytes > 0)
    };
    while !is_done() {
        assert!(Instant::now() < until, "no columns: {} bytes", history.bytes());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(history.close(), 0);
    let asked = Query { limit: 10, ..query("up == 400") };
    let mut result = history.search(&asked);
    result.cut(&asked);
    assert_eq!(result.searched, many);
    assert_eq!(result.flows, [record(400)]);
}
