//! The cache's disk: what survives a restart, damage, and disks that do not do as they should.

use crate::client::{Client, Response};
use crate::node::Node;
use crate::origin::{Act, Origin, Request, ok, status};
use crate::proxy::node;
use sidetrack_testkit::awaited;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Content that belongs to a path which ends in its length.
pub(crate) fn content(path: &str) -> String {
    let length: usize = path.rsplit('/').next().and_then(|text| text.parse().ok()).unwrap_or(100);
    let mut state = path
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let mut text = String::with_capacity(length + 16);
    while text.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(&format!("{:016x}", state ^ (state >> 29)));
    }
    text.truncate(length);
    text
}

/// Serves [`content`], in chunks where the path begins with `/chunked`.
pub(crate) fn origin() -> Origin {
    Origin::start(|request: &Request| {
        let path = request.path();
        let text = content(path);
        if !path.starts_with("/chunked") {
            return ok("Cache-Control: max-age=3600|ETag: \"e\"", &text);
        }
        let mut out =
            "HTTP/1.1 200 OK\r\nCache-Control: max-age=3600\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
        for piece in text.as_bytes().chunks(50_000) {
            out.push_str(&format!("{:x}\r\n{}\r\n", piece.len(), String::from_utf8_lossy(piece)));
        }
        Act::Send(format!("{out}0\r\n\r\n").into_bytes())
    })
}

fn on(folder: &Path) -> Node {
    on_with(folder, "")
}

fn on_with(folder: &Path, more: &str) -> Node {
    let memory = "memory_bytes = 8388608, object_bytes = 20000000";
    node(&format!("cache = {{ {memory}, disk = '{}'{more} }}", folder.display()), "")
}

/// The files that are in their places.
fn files(folder: &Path) -> Vec<PathBuf> {
    let folders = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = folders.filter(|entry| entry.file_name().len() == 2);
    let entries = folders.flat_map(|entry| std::fs::read_dir(entry.path()).into_iter().flatten().flatten());
    entries.map(|entry| entry.path()).collect()
}

fn await_files(folder: &Path, count: usize) {
    awaited(&format!("{count} files"), || (files(folder).len() == count).then_some(()));
}

/// From the cache, and as the origin sent it.
fn is_hit(response: &Response, path: &str) -> bool {
    assert!(response.status == 200 && response.text() == content(path), "{path}: {}", response.head);
    response.is_hit()
}

#[test]
fn what_is_stored_survives_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let origin = Origin::start(|request: &Request| match request.path() {
        "/language" => {
            let language = request.field("accept-language").unwrap_or("none");
            ok("Cache-Control: max-age=3600|Vary: Accept-Language|X-Kept: yes", language)
        }
        "/part" => status(
            "206 Partial",
            "Cache-Control: max-age=3600|ETag: \"p\"|Content-Range: bytes 2-5/10",
            "cdef",
        ),
        "/none" => ok("Cache-Control: no-store", "never"),
        path => ok("Cache-Control: max-age=3600|ETag: \"e\"", &content(path)),
    });
    let chunked = self::origin();
    let sizes = ["/0", "/1", "/131072", "/300000", "/3000000"];
    let first = on(folder.path());
    let mut client = Client::new(first.entry());
    for path in sizes {
        assert!(!is_hit(&client.fetch(&origin.url(path)), path));
    }
    for path in ["/chunked/5000", "/chunked/2500000"] {
        assert!(!is_hit(&client.fetch(&chunked.url(path)), path));
    }
    for language in ["nl", "de"] {
        client.ask("GET", &origin.url("/language"), &format!("Accept-Language: {language}"));
    }
    client.ask("GET", &origin.url("/part"), "Range: bytes=2-5");
    client.fetch(&origin.url("/none"));
    await_files(folder.path(), 10);
    drop((client, first));
    let asked = (origin.asked().len(), chunked.asked().len());
    let second = on(folder.path());
    let mut client = Client::new(second.entry());
    for path in sizes {
        let response = client.fetch(&origin.url(path));
        assert!(is_hit(&response, path) && response.field("age").is_some(), "{}", response.head);
    }
    for path in ["/chunked/5000", "/chunked/2500000"] {
        assert!(is_hit(&client.fetch(&chunked.url(path)), path), "{path}");
    }
    for language in ["nl", "de"] {
        let response = client.ask("GET", &origin.url("/language"), &format!("Accept-Language: {language}"));
        assert!(response.is_hit() && response.text() == language && response.field("x-kept") == Some("yes"));
    }
    let part = client.ask("GET", &origin.url("/part"), "Range: bytes=3-4");
    assert_eq!((part.status, part.text().as_str()), (206, "de"));
    // Ranges of a file that is not in memory, over the edges of its blocks.
    let whole = content("/3000000");
    for (from, to) in [(0, 0), (131_071, 131_072), (262_144, 999_999), (2_999_999, 2_999_999)] {
        let response = client.ask("GET", &origin.url("/3000000"), &format!("Range: bytes={from}-{to}"));
        assert_eq!(response.status, 206);
        assert!(response.text() == whole[from..=to], "{from}-{to}");
    }
    assert_eq!(client.ask("GET", &origin.url("/300000"), "If-None-Match: \"e\"").status, 304);
    assert_eq!((origin.asked().len(), chunked.asked().len()), asked, "all of it from the disk");
    assert!(!client.fetch(&origin.url("/none")).is_hit());
}

#[test]
fn a_confirmed_response_keeps_its_new_words() {
    let folder = tempfile::tempdir().unwrap();
    let origin = Origin::start(|request: &Request| match request.field("if-none-match") {
        Some(_) => status("304 Not Modified", "ETag: \"a\"|Cache-Control: max-age=3600|X: new", ""),
        None => ok("Cache-Control: max-age=0|ETag: \"a\"|X: old", &content(request.path())),
    });
    let paths = ["/100", "/2000000"];
    let first = on(folder.path());
    let mut client = Client::new(first.entry());
    for path in paths {
        client.fetch(&origin.url(path));
    }
    await_files(folder.path(), 2);
    for path in paths {
        let response = client.fetch(&origin.url(path));
        assert!(response.head.contains("detail=validated") && response.text() == content(path));
    }
    // Written in their order: what comes after is there when they are.
    client.fetch(&origin.url("/1"));
    await_files(folder.path(), 3);
    drop((client, first));
    let second = on(folder.path());
    let mut client = Client::new(second.entry());
    for path in paths {
        let response = client.fetch(&origin.url(path));
        assert!(is_hit(&response, path) && !response.head.contains("validated"), "{}", response.head);
        assert_eq!(response.field("x"), Some("new"));
    }
}

#[test]
fn what_was_removed_or_invalidated_is_gone_from_the_disk_too() {
    let folder = tempfile::tempdir().unwrap();
    let origin = Origin::start(|request: &Request| match request.line.starts_with("GET") {
        true => ok("Cache-Control: max-age=3600", &content(request.path())),
        false => status("204 Done", "", ""),
    });
    let purging = ", purge_from = ['127.0.0.1']";
    let first = on_with(folder.path(), purging);
    let mut client = Client::new(first.entry());
    for path in ["/1", "/2", "/2000000", "/4"] {
        client.fetch(&origin.url(path));
    }
    await_files(folder.path(), 4);
    assert_eq!(client.ask("PURGE", &origin.url("/2000000"), "").status, 200);
    assert_eq!(files(folder.path()).len(), 3, "gone when the answer comes");
    assert_eq!(client.ask("PURGE", &origin.url("/2000000"), "").status, 404);
    assert_eq!(client.ask("POST", &origin.url("/1"), "Content-Length: 0").status, 204);
    await_files(folder.path(), 2);
    drop((client, first));
    let second = on(folder.path());
    let mut client = Client::new(second.entry());
    for (path, hit) in [("/1", false), ("/2000000", false), ("/2", true), ("/4", true)] {
        assert_eq!(is_hit(&client.fetch(&origin.url(path)), path), hit, "{path}");
    }
    // Without leave PURGE is a method as any other: the origin is asked, and what it did counts.
    assert_eq!(client.ask("PURGE", &origin.url("/2"), "").status, 204);
    assert!(origin.asked().last().unwrap().line.starts_with("PURGE "));
}

#[test]
fn damaged_files_are_never_served() {
    let folder = tempfile::tempdir().unwrap();
    let origin = origin();
    let paths: Vec<String> =
        (0..12).map(|n| format!("/{n}/{}", [90, 7000, 140_000, 2_000_000][n % 4])).collect();
    let first = on(folder.path());
    for path in &paths {
        Client::new(first.entry()).fetch(&origin.url(path));
    }
    await_files(folder.path(), paths.len());
    drop(first);
    for (number, path) in (1_usize..).zip(files(folder.path())) {
        let mut bytes = std::fs::read(&path).unwrap();
        match number % 4 {
            0 => bytes.truncate(bytes.len() - 1),
            1 => bytes[9000 % (number * 700)] ^= 1,
            2 => {
                let last = bytes.len() - 100;
                bytes[last] ^= 0x80;
            }
            _ => {
                let middle = bytes.len() / 2;
                bytes[middle..].fill(0);
            }
        }
        std::fs::write(&path, bytes).unwrap();
    }
    std::fs::write(folder.path().join("00/somebody-else's"), "text").unwrap();
    let second = on(folder.path());
    for round in 0..2 {
        for path in &paths {
            let mut client = Client::new(second.entry());
            client.send(format!("GET {} HTTP/1.1\r\nHost: {}\r\n\r\n", origin.url(path), origin.address));
            match client.try_response(false) {
                Some(response) => assert!(response.text() == content(path), "{path}"),
                // Large content is checked as it leaves: its client sees the cut, and the next one a miss.
                None => assert!(round == 0 && path.ends_with("/2000000"), "{path}"),
            }
        }
    }
    assert!(folder.path().join("00/somebody-else's").exists());
}

#[test]
fn the_disk_is_bounded_and_the_longest_unused_goes_first() {
    let folder = tempfile::tempdir().unwrap();
    let origin = origin();
    let node = node(
        &format!(
            "cache = {{ memory_bytes = 1048576, disk = '{}', disk_bytes = 2097152 }}",
            folder.path().display()
        ),
        "",
    );
    let mut client = Client::new(node.entry());
    for number in 0..40 {
        let path = format!("/{number}/100000");
        assert!(!is_hit(&client.fetch(&origin.url(&path)), &path));
        let used: u64 =
            files(folder.path()).iter().filter_map(|path| path.metadata().ok()).map(|file| file.len()).sum();
        // One more may have come into its place when its predecessor is still to go.
        assert!(used <= 2_097_152 + 110_000, "{used}");
    }
    // Too large for memory, too: streamed to the disk.
    assert!(!is_hit(&client.fetch(&origin.url("/large/1500000")), "/large/1500000"));
    awaited("it is kept on disk", || {
        is_hit(&client.fetch(&origin.url("/large/1500000")), "/large/1500000").then_some(())
    });
    assert!(is_hit(&client.fetch(&origin.url("/39/100000")), "/39/100000"));
    assert!(!is_hit(&client.fetch(&origin.url("/0/100000")), "/0/100000"));
    // Larger than all there is: passes.
    for _ in 0..2 {
        assert!(!is_hit(&client.fetch(&origin.url("/3000000")), "/3000000"));
    }
}

#[test]
fn a_folder_that_cannot_be_used_costs_the_disk_and_no_request() {
    let origin = origin();
    let file = tempfile::NamedTempFile::new().unwrap();
    let node = on(&file.path().join("below/a/file"));
    let mut client = Client::new(node.entry());
    for hit in [false, true] {
        assert_eq!(is_hit(&client.fetch(&origin.url("/100")), "/100"), hit);
    }
    let text = |disk: &str| {
        format!("version = 1\n[[listen]]\nkind = 'http'\naddress = '127.0.0.1:0'\ncache = {{ {disk} }}\n")
    };
    let two = format!(
        "{}[[listen]]\nname = 'b'\nkind = 'http'\naddress = '127.0.0.1:0'\ncache = {{ disk = '/x' }}\n",
        text("disk = '/x'")
    );
    for (text, words) in [
        (two, "another listener's"),
        (text("disk_bytes = 2000000"), "there is no disk"),
        (text("disk = ''"), "this is not a folder"),
        (text("disk = '/x', disk_bytes = 1"), "this size cannot be"),
        (text("object_bytes = 1000000000000"), "this size cannot be"),
    ] {
        let error = sidetrack::config::Config::from_text("t.toml", &text).unwrap_err().render(false);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_large_response_that_breaks_off_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let asked = count.clone();
    let origin = Origin::start(move |request: &Request| {
        let head = "HTTP/1.1 200 OK\r\nCache-Control: max-age=3600\r\nContent-Length: 3000000\r\n\r\n";
        let text = content(request.path());
        match asked.fetch_add(1, SeqCst) {
            0 => Act::SendAndClose(format!("{head}{}", &text[..1_500_000]).into_bytes()),
            _ => Act::Send(format!("{head}{text}").into_bytes()),
        }
    });
    let node = on(folder.path());
    let mut client = Client::new(node.entry());
    client.send(format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url("/3000000")));
    assert!(client.try_response(false).is_none());
    awaited("what was written aside is removed", || {
        let aside = std::fs::read_dir(folder.path().join("new")).unwrap().count();
        (aside == 0).then_some(())
    });
    assert!(files(folder.path()).is_empty());
    let mut client = Client::new(node.entry());
    awaited("the whole one is kept", || {
        is_hit(&client.fetch(&origin.url("/3000000")), "/3000000").then_some(())
    });
}
