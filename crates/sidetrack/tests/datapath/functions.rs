//! Flows through functions: byte-exact through every kind and through chains, ends and resets kept, refusals in the record.

use crate::node::{Node, reverse_config};
use crate::path::{Hop, Path};
use crate::peers::{Host, Server, connect, expect, expect_echo, expect_end, expect_reset, read_all, reset};
use crate::socks::{v6_ask, v6_config};
use crate::transfers::{server, transfers};
use sidetrack::config::Config;
use sidetrack::live::Ended;
use sidetrack_core::flow::EndReason;
use std::io::Write;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

const KEY: &str = "6b1c0f4d8e2a9b7c5d3e1f00112233445566778899aabbccddeeff0123456789";

/// A file with the key of an encrypting pair.
fn key_file(key: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), format!("{key}\n")).expect("a file");
    file
}

/// Keys of a rule that leads flows through these functions, and the functions themselves.
fn chain(functions: &[(&str, &str)]) -> String {
    let names: Vec<_> = functions.iter().map(|(name, _)| format!("'{name}'")).collect();
    let tables: Vec<_> =
        functions.iter().map(|(name, keys)| format!("[function.{name}]\n{keys}\n")).collect();
    format!("chain = [{}]\n{}", names.join(", "), tables.concat())
}

fn node(server: SocketAddr, functions: &[(&str, &str)]) -> Node {
    Node::reverse(server, &format!("carrier = 'direct'\n{}", chain(functions)))
}

fn refused(ended: &Ended, words: &str) {
    assert_eq!(ended.reason, EndReason::FunctionRefused, "{ended:?}");
    let detail = ended.detail.as_deref().unwrap_or_default();
    assert!(detail.contains(words), "{detail}");
}

const COUNT: (&str, &str) = ("count", "kind = 'count'");
const WORDS: (&str, &str) = ("words", "kind = 'filter'\ndeny_words = 'a word that nobody says'");
const HOSTS: (&str, &str) = ("hosts", "kind = 'filter'\ndeny_hosts = 'refused.example'");
const WIDE: (&str, &str) = ("wide", "kind = 'limit'\nbytes_per_second = 1000000000");
const REPLACE: (&str, &str) =
    ("replace", "kind = 'replace'\nreplace = [{ find = 'a word that nobody says', with = '' }]");

#[test]
fn transfers_are_byte_exact_through_each_function_and_through_all() {
    let origin = server(b"");
    for functions in
        [&[COUNT][..], &[WIDE], &[WORDS], &[HOSTS], &[REPLACE], &[COUNT, WORDS, WIDE, HOSTS, REPLACE]]
    {
        let nodes = [node(origin.address, functions)];
        let ended = transfers(&nodes, b"", || connect(nodes[0].entry()));
        let names: Vec<_> = functions.iter().map(|(name, _)| *name).collect();
        let decided = ended[0][0].flow.decided().expect("decided");
        let record = sidetrack::record::FlowRecord::live(&ended[0][0].flow, Some(&decided));
        assert_eq!(record.chain, names);
    }
}

#[test]
fn a_function_counts_what_passes_it() {
    let origin = server(b"");
    let nodes = [node(origin.address, &[COUNT])];
    let ended = transfers(&nodes, b"", || connect(nodes[0].entry()));
    let functions = nodes[0].shared.functions.functions();
    let [count] = functions.as_slice() else { panic!("one function") };
    assert_eq!(count.tally().flows(), 10);
    let sum = ended[0]
        .iter()
        .map(|ended| ended.flow.bytes())
        .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert_eq!(count.tally().bytes(), sum);
}

/// Two nodes with a pair between them, and further functions around it.
fn pair(origin: SocketAddr, hops: &[Hop], rule: &str) -> (Path, Node) {
    let key = key_file(KEY);
    let file = key.path().display();
    let open = ("open", format!("kind = 'decrypt'\nkey_file = '{file}'"));
    let far = node(origin, &[(open.0, &open.1), COUNT]);
    let seal = ("seal", format!("kind = 'encrypt'\nkey_file = '{file}'"));
    let near =
        Path::over(hops, far.entry(), &format!("{rule}\n{}", chain(&[REPLACE, WORDS, (seal.0, &seal.1)])));
    (near, far)
}

#[test]
fn transfers_are_byte_exact_through_an_encrypting_pair() {
    let origin = server(b"");
    let over: [(&[Hop], _); 3] = [
        (&[], ""),
        (&[Hop::new("socks6")], "initial_data_wait_ms = 50"),
        (&[Hop::new("socks5"), Hop::new("http")], ""),
    ];
    for (hops, rule) in over {
        let (near, far) = pair(origin.address, hops, rule);
        transfers(&[], b"", || near.open());
        let ended = far.ended(10);
        assert!(ended.iter().all(|ended| ended.reason == EndReason::Ok), "{ended:?}");
        for node in &near.nodes {
            assert!(node.ended(10).iter().all(|ended| ended.reason == EndReason::Ok));
        }
    }
}

#[test]
fn servers_that_speak_first_and_resets_get_through_a_pair() {
    let origin = Host::new();
    let (near, far) = pair(origin.address, &[], "");
    let mut client = near.open();
    let mut served = origin.accept();
    served.write_all(b"220 ready\r\n").expect("an open stream");
    expect(&mut client, b"220 ready\r\n");
    client.write_all(b"QUIT\r\n").expect("an open stream");
    expect(&mut served, b"QUIT\r\n");
    // Half-closed in one direction, the other goes on.
    client.shutdown(Shutdown::Write).expect("an open stream");
    expect_end(&mut served, b"");
    served.write_all(b"221 bye\r\n").expect("half open");
    expect(&mut client, b"221 bye\r\n");
    drop(served);
    expect_end(&mut client, b"");
    near.ends_with(EndReason::Ok);
    far.ends_with(EndReason::Ok);
    let stands = || {
        near.await_made();
        far.await_live("the path stands", |flow| flow.connect_time().is_some());
    };
    let client = near.open();
    let mut served = origin.accept();
    stands();
    reset(client);
    expect_reset(&mut served);
    near.ends_with(EndReason::ClientReset);
    far.ends_with(EndReason::ClientReset);
    let mut client = near.open();
    let served = origin.accept();
    stands();
    reset(served);
    expect_reset(&mut client);
    far.ends_with(EndReason::ServerReset);
}

#[test]
fn what_is_not_of_the_pair_is_refused_by_name() {
    let origin = Server::echo();
    let (_, far) = pair(origin.address, &[], "");
    let mut stranger = connect(far.entry());
    stranger.write_all(&[b'x'; 100]).expect("an open stream");
    expect_reset(&mut stranger);
    let ended = far.ends_with(EndReason::FunctionFailed);
    let detail = ended.detail.as_deref().unwrap_or_default();
    assert!(detail.starts_with("function 'open': the other end does not encrypt"), "{detail}");
    // The same key file with another key.
    let other = key_file(&KEY.replace('6', "7"));
    let seal = format!("kind = 'encrypt'\nkey_file = '{}'", other.path().display());
    let near = node(far.entry(), &[("seal", &seal)]);
    let mut client = connect(near.entry());
    client.write_all(b"hello").expect("an open stream");
    expect_reset(&mut client);
    assert!(
        far.ends_with(EndReason::FunctionFailed).detail.is_some_and(|words| words.contains("another key"))
    );
}

#[test]
fn a_recorded_flow_cannot_be_played_again() {
    let origin = Server::echo();
    // A listener of the test's between the two ends records what goes by.
    let between = Host::new();
    let key = key_file(KEY);
    let keys = |kind| format!("kind = '{kind}'\nkey_file = '{}'", key.path().display());
    let far = node(origin.address, &[("open", &keys("decrypt"))]);
    let near = node(between.address, &[("seal", &keys("encrypt"))]);
    let mut client = connect(near.entry());
    client.write_all(b"pay 100").expect("an open stream");
    client.shutdown(Shutdown::Write).expect("an open stream");
    let (wire, end) = read_all(&mut between.accept());
    end.expect("an orderly end");
    assert!(!wire.windows(3).any(|part| part == b"pay"), "it is encrypted");
    let mut first = connect(far.entry());
    first.write_all(&wire).expect("an open stream");
    first.shutdown(Shutdown::Write).expect("an open stream");
    assert!(!read_all(&mut first).0.is_empty(), "an answer");
    far.ends_with(EndReason::Ok);
    let mut again = connect(far.entry());
    again.write_all(&wire).expect("an open stream");
    expect_reset(&mut again);
    assert!(
        far.ends_with(EndReason::FunctionFailed).detail.is_some_and(|words| words.contains("seen before"))
    );
}

#[test]
fn words_end_a_flow_before_they_have_passed() {
    let origin = Host::new();
    let node = node(origin.address, &[("words", "kind = 'filter'\ndeny_words = ['secret', 'geheim']")]);
    let mut client = connect(node.entry());
    let mut served = origin.accept();
    client.write_all(b"the se").expect("an open stream");
    expect(&mut served, b"the se");
    client.write_all(b"cret is").expect("an open stream");
    expect_reset(&mut served);
    expect_reset(&mut client);
    refused(&node.only_end(), "function 'words': the client said \"secret\"");
    let mut client = connect(node.entry());
    origin.accept().write_all(b"das ist geheim").expect("an open stream");
    expect_reset(&mut client);
    refused(&node.only_end(), "the server said \"geheim\"");
}

#[test]
fn hosts_are_refused_before_anything_is_dialled() {
    let origin = Server::echo();
    let port = origin.address.port();
    let node = Node::start(&format!(
        "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n[[rule]]\nname = 'all'\n\
         carrier = 'direct'\n{}",
        chain(&[("hosts", "kind = 'filter'\nallow_hosts = ['localhost', '*.localhost']")])
    ));
    let mut stream = connect(node.entry());
    v6_ask(&mut stream, v6_config(&format!("localhost:{port}"))).expect("connected");
    expect_echo(&mut stream, b"hello");
    drop(stream);
    node.ends_with(EndReason::Ok);
    let mut stream = connect(node.entry());
    let refusal = v6_ask(&mut stream, v6_config(&format!("refused.example:{port}"))).expect_err("refused");
    assert!(refusal.contains("not allowed by its rules"), "{refusal}");
    refused(&node.only_end(), "the host refused.example is not among those allowed");
}

#[test]
fn words_are_replaced_where_they_are_cut() {
    let origin = Host::new();
    let keys = "kind = 'replace'\ndirection = 'up'\nreplace = [{ find = 'Jansen', with = '******' }, { find = 'BSN', with = '' }]";
    let node = node(origin.address, &[("scrub", keys)]);
    let mut client = connect(node.entry());
    let mut served = origin.accept();
    for part in ["mr Ja", "nsen BS", "N 1", "23 Jan"] {
        client.write_all(part.as_bytes()).expect("an open stream");
    }
    // The beginning of a word is let go when its rest does not come.
    expect(&mut served, b"mr ******  123 Jan");
    served.write_all(b"Jansen").expect("an open stream");
    expect(&mut client, b"Jansen");
    client.write_all(b" BS").expect("an open stream");
    drop(client);
    expect_end(&mut served, b" BS");
    drop(served);
    node.ends_with(EndReason::Ok);
}

/// The time for 1 MB through a limit of 4 MB/s with a burst of 200 kB, in this number of flows at a time.
fn limited(share: &str, flows: usize) -> Duration {
    let origin = Server::echo();
    let keys = format!(
        "kind = 'limit'\ndirection = 'up'\nbytes_per_second = 4000000\nburst_bytes = 200000\nshare = '{share}'"
    );
    let node = Arc::new(node(origin.address, &[("slow", &keys)]));
    let before = Instant::now();
    let one = || {
        let mut stream = connect(node.entry());
        let mut back = stream.try_clone().expect("a descriptor");
        let reading = std::thread::spawn(move || read_all(&mut back).0.len());
        stream.write_all(&vec![7; 1_000_000]).expect("an open stream");
        stream.shutdown(Shutdown::Write).expect("an open stream");
        assert_eq!(reading.join().expect("no panic"), 1_000_000);
    };
    std::thread::scope(|scope| (0..flows).for_each(|_| drop(scope.spawn(one))));
    before.elapsed()
}

#[test]
fn a_limit_is_kept_by_each_flow_or_by_all_together() {
    // 0.8 MB at 4 MB/s; a kernel that buffers cannot make it faster, since the limit is on what we read.
    assert!(limited("flow", 2) >= Duration::from_millis(190));
    assert!(limited("function", 2) >= Duration::from_millis(440));
}

#[test]
fn a_chain_is_changed_under_a_running_flow() {
    let origin = Server::echo();
    let count = node(origin.address, &[COUNT]);
    let mut old = connect(count.entry());
    expect_echo(&mut old, b"before");
    let next = format!(
        "carrier = 'direct'\n{}",
        chain(&[COUNT, ("words", "kind = 'filter'\ndeny_words = 'after'")])
    );
    let text = format!("version = 1\nworkers = 2\n{}", reverse_config(origin.address, &next));
    let config = Config::from_text("test.toml", &text).expect("a right configuration");
    count.shared.functions.keep(&config.functions);
    count.shared.config.store(Arc::new(config));
    // The old flow keeps the chain it has, the new one takes the new.
    expect_echo(&mut old, b"after");
    let mut new = connect(count.entry());
    new.write_all(b"after").expect("an open stream");
    expect_reset(&mut new);
    drop(old);
    let reasons: Vec<_> = count.ended(2).iter().map(|ended| ended.reason).collect();
    assert!(reasons.contains(&EndReason::Ok) && reasons.contains(&EndReason::FunctionRefused), "{reasons:?}");
    let functions = count.shared.functions.functions();
    let counter = functions.iter().find(|function| &*function.spec().name == "count").expect("it is there");
    assert_eq!(counter.tally().flows(), 2, "a function that did not change goes on with its counts");
}

#[test]
fn a_flow_in_flight_through_functions_shows_its_bytes_and_a_killed_one_records_them() {
    let origin = Server::echo();
    let key = key_file(KEY);
    let keys = |kind: &str| format!("kind = '{kind}'\nkey_file = '{}'", key.path().display());
    let (seal, open) = (keys("encrypt"), keys("decrypt"));
    // What an encrypting pair adds is undone inside the one node: bytes are counted as they leave the last function.
    let pair = [("seal", &*seal), ("open", &*open)];
    for functions in
        [&[COUNT][..], &[WIDE], &[WORDS], &[REPLACE], &[COUNT, WORDS, WIDE, HOSTS, REPLACE], &pair]
    {
        let node = node(origin.address, functions);
        let mut client = connect(node.entry());
        let mut sent = 0_u64;
        // Enough for a direction to change to splice(2) where no function sees its bytes.
        for size in [5, 70_000, 300_000, 300_000, 9] {
            expect_echo(&mut client, &vec![b'x'; size]);
            sent += size as u64;
            sidetrack_testkit::awaited("the counters follow", || {
                let live = node.live();
                let [flow] = live.as_slice() else { panic!("one flow") };
                (flow.bytes() == (sent, sent)).then_some(())
            });
        }
        let metrics = sidetrack::metrics::Metrics::new();
        let text = metrics.text(&node.ledgers(), sidetrack::metrics::Surroundings::default());
        let line = format!("sidetrack_flow_bytes_total{{direction=\"up\",path=\"direct\"}} {sent}");
        assert!(text.contains(&line), "{text}");
        assert!(node.live()[0].end(EndReason::Killed));
        let ended = node.ends_with(EndReason::Killed);
        assert_eq!(ended.flow.bytes(), (sent, sent), "{functions:?}");
    }
}

#[test]
fn the_first_bytes_choose_the_arm_and_all_arms_merge() {
    let origin = Server::echo();
    let rule = "carrier = 'direct'\nchain = ['way', 'all']\n[function.all]\nkind = 'count'\n[function.some]\nkind = 'count'\n\
                [function.way]\nkind = 'branch'\narms = [{ name = 'words', prefix = 'WORDS', chain = ['scrub', 'some'] }, \
                { name = 'none', match = { from = '192.0.2.0/24' }, chain = ['some'] }]\n\
                [function.scrub]\nkind = 'replace'\nreplace = [{ find = 'dull', with = 'brilliant' }]\n";
    let node = Node::reverse(origin.address, rule);
    for (said, back) in [
        ("WORDS on a dull day", "WORDS on a brilliant day"),
        ("WORD on a dull day", "WORD on a dull day"),
        ("a dull day", "a dull day"),
    ] {
        let mut client = connect(node.entry());
        // Cut in the middle of the prefix.
        for part in [&said[..3], &said[3..]] {
            client.write_all(part.as_bytes()).expect("an open stream");
        }
        client.shutdown(Shutdown::Write).expect("an open stream");
        expect_end(&mut client, back.as_bytes());
        node.ends_with(EndReason::Ok);
    }
    let functions = node.shared.functions.functions();
    let flows = |name: &str| {
        functions
            .iter()
            .find(|function| *function.spec().name == *name)
            .map(|function| function.tally().flows())
    };
    let counted = ["way", "scrub", "some", "all"].map(flows);
    assert_eq!(counted, [Some(3), Some(1), Some(1), Some(3)]);
}
