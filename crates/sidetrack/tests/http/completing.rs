//! Responses whose transfer was cut, and ranges: only what is missing is fetched (RFC 9111 Sec. 3.3, 3.4).

use crate::client::Client;
use crate::disk::content;
use crate::node::Node;
use crate::origin::{Act, Origin, Request, ok, status};
use crate::proxy::node;
use sidetrack_testkit::awaited;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LENGTH: usize = 10_000;
const PATH: &str = "/file/10000";
const FRESH: &str = "Cache-Control: max-age=3600";
const TAGGED: &str = "Cache-Control: max-age=3600|ETag: \"a\"|Content-Type: text/plain";

fn cached() -> Node {
    node("cache = {}", "")
}

/// The bounds of the range that a request asks for.
fn asked_range(request: &Request, length: usize) -> Option<(usize, usize)> {
    let (first, last) = request.field("range")?.strip_prefix("bytes=")?.split_once('-')?;
    Some((first.parse().ok()?, last.parse().unwrap_or(length - 1)))
}

/// A head with these field lines.
fn head(line: &str, fields: &str) -> String {
    format!("HTTP/1.1 {line}\r\n{}\r\n\r\n", fields.replace('|', "\r\n"))
}

/// The range of this content that a request asks for.
fn part(request: &Request, fields: &str, content: &str) -> Act {
    let (first, last) = asked_range(request, content.len()).expect("a range");
    let fields = format!("{fields}|Content-Range: bytes {first}-{last}/{}", content.len());
    status("206 Partial Content", &fields, &content[first..=last])
}

/// All of the content is promised, and so much is sent.
fn cut(fields: &str, content: &str, at: usize) -> Vec<u8> {
    let head = head("200 OK", &format!("{fields}|Content-Length: {}", content.len()));
    (head + &content[..at]).into_bytes()
}

/// Sends a request, reads this number of bytes of content, reports it, and checks that no more arrive. Returns the content.
fn ask_cut(node: &Node, url: &str, count: usize, heard: Option<Sender<()>>) -> String {
    let mut stream = TcpStream::connect(node.entry()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {url} HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
    let (mut bytes, mut piece) = (Vec::new(), vec![0; 65_536]);
    let body = |bytes: &[u8]| bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
    let mut is_said = false;
    loop {
        let came = body(&bytes).map_or(0, |at| bytes.len() - at);
        if came >= count && !is_said {
            is_said = true;
            if let Some(heard) = &heard {
                heard.send(()).unwrap();
            }
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => break,
            Ok(n) => bytes.extend_from_slice(&piece[..n]),
        }
    }
    // A reset may overtake what was sent before it.
    let at = body(&bytes).unwrap_or(bytes.len());
    String::from_utf8(bytes.split_off(at)).unwrap()
}

/// A server that cuts its first answer at half, in order or with a reset, and then serves ranges.
fn half(fields: &'static str, reset: bool) -> (Origin, Option<Sender<()>>) {
    let (sender, receiver) = channel();
    let receiver = Mutex::new(Some(receiver));
    let origin = Origin::start(move |request| {
        let content = content(PATH);
        if request.field("range").is_some() {
            return part(request, fields, &content);
        }
        let bytes = cut(fields, &content, LENGTH / 2);
        match receiver.lock().unwrap().take() {
            Some(heard) if reset => Act::SendAndReset(bytes, Mutex::new(heard)),
            Some(_) => Act::SendAndClose(bytes),
            None => ok(fields, &content),
        }
    });
    (origin, reset.then_some(sender))
}

const DATED: &str = "Cache-Control: max-age=2147483647|Date: Sun, 06 Nov 1994 08:50:37 GMT|\
                     Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT";

#[test]
fn of_a_transfer_that_was_cut_only_the_rest_is_fetched() {
    for (fields, validator) in [(TAGGED, "\"a\""), (DATED, "Sun, 06 Nov 1994 08:49:37 GMT")] {
        for reset in [false, true] {
            let (origin, heard) = half(fields, reset);
            let node = cached();
            let url = origin.url(PATH);
            let came = ask_cut(&node, &url, LENGTH / 2, heard);
            assert!(content(PATH)[..LENGTH / 2].starts_with(&came), "{reset}: {came}");
            let mut client = Client::new(node.entry());
            let whole = client.fetch(&url);
            assert!(whole.status == 200 && whole.text() == content(PATH), "{reset}: {}", whole.head);
            assert_eq!(whole.field("content-range"), None);
            let status = whole.field("cache-status").unwrap();
            assert!(status.contains("fwd=partial; fwd-status=206; stored"), "{status}");
            let asked = &origin.asked()[1];
            assert_eq!(
                (asked.field("range"), asked.field("if-range")),
                (Some("bytes=5000-"), Some(validator))
            );
            let hit = client.fetch(&url);
            assert!(hit.is_hit() && hit.text() == content(PATH), "{}", hit.head);
            assert_eq!(hit.field("content-type"), whole.field("content-type"));
            assert_eq!(origin.asked().len(), 2);
        }
    }
}

#[test]
fn a_range_that_is_half_stored_is_completed() {
    for (range, asked, (first, last)) in [
        ("bytes=4000-6000", "bytes=5000-6000", (4000, 6000)),
        ("bytes=4999-", "bytes=5000-", (4999, 9999)),
        ("bytes=-5001", "bytes=5000-", (4999, 9999)),
        // Nothing of it is stored.
        ("bytes=6000-7000", "bytes=6000-7000", (6000, 7000)),
    ] {
        let (origin, _) = half(TAGGED, false);
        let node = cached();
        let url = origin.url(PATH);
        ask_cut(&node, &url, LENGTH / 2, None);
        let mut client = Client::new(node.entry());
        let part = client.ask("GET", &url, &format!("Range: {range}"));
        assert_eq!((part.status, part.text()), (206, content(PATH)[first..=last].to_owned()), "{range}");
        let said = format!("bytes {first}-{last}/10000");
        assert_eq!(part.field("content-range"), Some(said.as_str()));
        assert_eq!(origin.asked()[1].field("range"), Some(asked));
        let again = client.ask("GET", &url, &format!("Range: {range}"));
        assert!(again.is_hit() && again.text() == part.text(), "{range}: {}", again.head);
        let whole = client.fetch(&url);
        assert!(whole.status == 200 && whole.text() == content(PATH), "{range}: {}", whole.head);
    }
}

#[test]
fn parts_become_the_whole_by_what_lies_between_before_or_behind_them() {
    for (ranges, asked) in [
        (&["0-99", "9000-9999"][..], "bytes=100-8999"),
        (&["8000-9999"], "bytes=0-7999"),
        (&["0-0"], "bytes=1-"),
        (&["0-99", "400-499"], "bytes=100-"),
    ] {
        let (origin, _) = half(TAGGED, false);
        let node = cached();
        let url = origin.url(PATH);
        let mut client = Client::new(node.entry());
        for range in ranges {
            assert_eq!(client.ask("GET", &url, &format!("Range: bytes={range}")).status, 206);
        }
        let whole = client.fetch(&url);
        assert!(whole.status == 200 && whole.text() == content(PATH), "{ranges:?}: {}", whole.head);
        assert_eq!(origin.asked().last().unwrap().field("range"), Some(asked));
        assert!(client.fetch(&url).is_hit());
    }
}

#[test]
fn a_completion_that_is_cut_goes_on_where_it_was_cut() {
    let origin = Origin::start(|request| {
        let content = content(PATH);
        let Some((first, last)) = asked_range(request, LENGTH) else {
            return Act::SendAndClose(cut(TAGGED, &content, 2000));
        };
        let length = last + 1 - first;
        let fields = format!("{TAGGED}|Content-Range: bytes {first}-{last}/10000|Content-Length: {length}");
        let bytes = head("206 Partial Content", &fields) + &content[first..=last.min(first + 2999)];
        match length {
            0..=3000 => Act::Send(bytes.into_bytes()),
            _ => Act::SendAndClose(bytes.into_bytes()),
        }
    });
    let node = cached();
    let url = origin.url(PATH);
    for count in [2000, 5000, 8000] {
        let came = ask_cut(&node, &url, count, None);
        assert!(content(PATH)[..count].starts_with(&came), "{count}: {came}");
    }
    let whole = Client::new(node.entry()).fetch(&url);
    assert!(whole.status == 200 && whole.text() == content(PATH), "{}", whole.head);
    let ranges: Vec<_> = origin.asked().iter().map(|one| one.field("range").map(str::to_owned)).collect();
    let ranges: Vec<_> = ranges.iter().map(Option::as_deref).collect();
    assert_eq!(ranges, [None, Some("bytes=2000-"), Some("bytes=5000-"), Some("bytes=8000-")]);
}

/// What the second representation of [`PATH`] is.
fn other() -> String {
    content(PATH).chars().rev().collect()
}

#[test]
fn what_is_not_the_rest_of_the_same_representation_is_never_combined() {
    const NEW: &str = "Cache-Control: max-age=3600|ETag: \"b\"";
    type Answer = fn(&Request) -> Act;
    let wrong = |range: &'static str, text: &str| {
        status("206 Partial Content", &format!("{TAGGED}|Content-Range: {range}"), text)
    };
    let cases: [(&str, Answer); 12] = [
        ("it changed, and the server minds If-Range", |_| ok(NEW, &other())),
        ("it ignores Range", |_| ok(TAGGED, &other())),
        ("it changed, and the server does not mind If-Range", |request| part(request, NEW, &other())),
        ("no tag at all", |request| part(request, FRESH, &other())),
        ("a weak tag", |request| part(request, &TAGGED.replace("\"a\"", "W/\"a\""), &other())),
        ("another coding", |request| part(request, &format!("{TAGGED}|Content-Encoding: br"), &other())),
        ("it may not be stored any more", |request| {
            part(request, "Cache-Control: no-store|ETag: \"a\"", &other())
        }),
        ("it is shorter", |_| {
            let fields = format!("{NEW}|Content-Range: bytes */100");
            status("416 Range Not Satisfiable", &fields, "")
        }),
        ("a condition that the request did not have", |_| status("304 Not Modified", TAGGED, "")),
        ("several Content-Range", |request| {
            part(request, &format!("{TAGGED}|Content-Range: bytes 0-4999/10000"), &other())
        }),
        ("several parts", |_| {
            let text = format!(
                "--x\r\nContent-Range: bytes 5000-9999/10000\r\n\r\n{}\r\n--x--\r\n",
                &other()[5000..]
            );
            let fields =
                "Cache-Control: max-age=3600|ETag: \"a\"|Content-Type: multipart/byteranges; boundary=x";
            status("206 Partial Content", fields, &text)
        }),
        ("an unknown length", |request| {
            let Act::Send(bytes) = part(request, TAGGED, &other()) else { panic!("it sends") };
            let text = String::from_utf8(bytes).unwrap().replace("Content-Length: 5000\r\n", "");
            Act::SendAndClose(text.into_bytes())
        }),
    ];
    for (what, answer) in cases {
        changed(what, answer);
    }
    for (range, length) in [
        ("bytes 4999-9999/10000", 5001),
        ("bytes 5001-9999/10000", 4999),
        ("bytes 5000-9998/10000", 4999),
        ("bytes 5000-9999/10001", 5000),
        ("bytes 5000-10000/10001", 5001),
        ("bytes 5000-9999/9999", 5000),
        ("bytes 0-9999/10000", 10_000),
        ("bytes 5000-9999/10000", 4000),
        ("bits 5000-9999/10000", 5000),
        ("bytes 5000-9999", 5000),
        ("bytes */10000", 5000),
        ("", 5000),
    ] {
        let text: String = other().chars().cycle().take(length).collect();
        changed(range, move |_| wrong(range, &text));
    }
}

/// A server that cuts its first answer, answers the request for the rest like this, and has other content from then on.
fn changed(what: &str, answer: impl Fn(&Request) -> Act + Send + Sync + 'static) {
    let count = Mutex::new(0);
    let origin = Origin::start(move |request| {
        *count.lock().unwrap() += 1;
        match (*count.lock().unwrap(), request.field("range")) {
            (1, _) => Act::SendAndClose(cut(TAGGED, &content(PATH), LENGTH / 2)),
            (2, _) => answer(request),
            (_, None) => ok("Cache-Control: max-age=3600|ETag: \"b\"", &other()),
            (_, Some(_)) => part(request, "Cache-Control: max-age=3600|ETag: \"b\"", &other()),
        }
    });
    let node = cached();
    let url = origin.url(PATH);
    ask_cut(&node, &url, LENGTH / 2, None);
    let mut client = Client::new(node.entry());
    for _ in 0..2 {
        let whole = client.fetch(&url);
        assert!(whole.status == 200 && whole.text() == other(), "{what}: {}", whole.head);
    }
    let asked = origin.asked();
    assert_eq!(asked[1].field("range"), Some("bytes=5000-"), "{what}");
    assert!(asked.len() <= 3 && asked.get(2).is_none_or(|third| third.field("range").is_none()), "{what}");
}

#[test]
fn without_a_strong_validator_all_of_it_is_fetched() {
    for fields in [
        FRESH,
        "Cache-Control: max-age=3600|ETag: W/\"a\"",
        // The date does not help if the tag beside it is wrong.
        "Cache-Control: max-age=2147483647|ETag: W/\"a\"|Date: Sun, 06 Nov 1994 08:50:37 GMT|\
         Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT",
        // It may have changed twice in that second, by another clock.
        "Cache-Control: max-age=2147483647|Date: Sun, 06 Nov 1994 08:50:36 GMT|\
         Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT",
        "Cache-Control: no-store|ETag: \"a\"",
        "Cache-Control: private, max-age=3600|ETag: \"a\"",
    ] {
        let (origin, _) = half(fields, false);
        let node = cached();
        let url = origin.url(PATH);
        ask_cut(&node, &url, LENGTH / 2, None);
        let whole = Client::new(node.entry()).fetch(&url);
        assert!(whole.status == 200 && whole.text() == content(PATH), "{fields}: {}", whole.head);
        assert_eq!(origin.asked()[1].field("range"), None, "{fields}");
    }
}

#[test]
fn one_users_request_and_a_server_in_trouble_leave_the_part_alone() {
    let count = Arc::new(Mutex::new(0));
    let seen = count.clone();
    let origin = Origin::start(move |request| {
        *seen.lock().unwrap() += 1;
        match (*seen.lock().unwrap(), request.field("range")) {
            (1, _) => Act::SendAndClose(cut(TAGGED, &content(PATH), LENGTH / 2)),
            (2, _) => status("503 Busy", "Retry-After: 1", "later"),
            (_, Some(_)) => part(request, TAGGED, &content(PATH)),
            (_, None) => ok("Cache-Control: private|ETag: \"a\"", "alice's"),
        }
    });
    let node = cached();
    let url = origin.url(PATH);
    ask_cut(&node, &url, LENGTH / 2, None);
    let mut client = Client::new(node.entry());
    assert_eq!(client.fetch(&url).status, 503);
    let own = client.ask("GET", &url, "Authorization: Basic YTpi");
    assert_eq!((own.status, own.text().as_str()), (200, "alice's"));
    let condition = client.ask("GET", &url, "If-None-Match: \"x\"");
    assert_eq!(condition.text(), "alice's");
    let asked = origin.asked();
    assert_eq!(asked[1].field("range"), Some("bytes=5000-"));
    assert!(asked[2..].iter().all(|one| one.field("range").is_none()));
    let whole = client.fetch(&url);
    assert!(whole.text() == content(PATH), "{}", whole.head);
    assert_eq!(origin.asked().last().unwrap().field("range"), Some("bytes=5000-"));
}

/// A server that cuts each first answer at two thirds.
fn two_thirds() -> Origin {
    Origin::start(|request| {
        let content = content(request.path());
        match request.field("range") {
            Some(_) => part(request, TAGGED, &content),
            None => Act::SendAndClose(cut(TAGGED, &content, content.len() / 3 * 2)),
        }
    })
}

#[test]
fn parts_on_disk_are_completed_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let on = || {
        let memory = "memory_bytes = 33554432, object_bytes = 30000000";
        node(&format!("cache = {{ {memory}, disk = '{}' }}", folder.path().display()), "")
    };
    let files = || {
        let folders = std::fs::read_dir(folder.path()).into_iter().flatten().flatten();
        let folders = folders.filter(|entry| entry.file_name().len() == 2);
        folders.flat_map(|entry| std::fs::read_dir(entry.path()).into_iter().flatten().flatten()).count()
    };
    let await_files = |count| awaited("the files", || (files() == count).then_some(()));
    let origin = two_thirds();
    // In memory; read from the file as it is sent; too large for memory.
    let paths = ["/file/9000", "/file/3000000", "/file/12000000"];
    let first = on();
    for path in paths {
        let all = content(path);
        let came = ask_cut(&first, &origin.url(path), all.len() / 3 * 2, None);
        assert!(all[..all.len() / 3 * 2].starts_with(&came), "{path}");
    }
    await_files(3);
    drop(first);
    let second = on();
    for path in paths {
        let all = content(path);
        let whole = Client::new(second.entry()).fetch(&origin.url(path));
        assert!(whole.status == 200 && whole.text() == all, "{path}: {}", whole.head);
        let asked = origin.asked();
        let range = format!("bytes={}-", all.len() / 3 * 2);
        assert_eq!(asked.last().unwrap().field("range"), Some(range.as_str()), "{path}");
    }
    // The parts are gone when the whole is there.
    await_files(3);
    for path in paths {
        awaited("a hit", || {
            let hit =
                Client::new(second.entry()).ask("GET", &origin.url(path), "Cache-Control: only-if-cached");
            (hit.is_hit() && hit.text() == content(path)).then_some(())
        });
    }
    drop(second);
    let asked = origin.asked().len();
    let third = on();
    for path in paths {
        let hit = Client::new(third.entry()).fetch(&origin.url(path));
        assert!(hit.is_hit() && hit.text() == content(path), "{path}: {}", hit.head);
    }
    assert_eq!(origin.asked().len(), asked);
}
