//! What stored parts lack, how it is asked for, and which answers complete them.

use crate::{T, fields, response, stored, stored_for};
use sidetrack_core::http::cache::{Extent, Rules, Stored, missing};
use sidetrack_core::http::message::Method;

fn part(range: &str, more: &str) -> Stored {
    stored_for("", 206, &format!("Cache-Control: max-age=60|Content-Range: bytes {range}|{more}"))
        .expect("storable")
}

/// The Range and If-Range with which the rest is asked for.
fn asked(stored: &[&Stored], request: &str) -> Option<(String, String)> {
    let request = fields(request);
    let mut ask = request.clone();
    missing(&Method::Get, &request, stored)?.ask(&mut ask, stored);
    let text = |name: &str| String::from_utf8(ask.first(name).unwrap_or_default().to_vec()).expect("text");
    Some((text("range"), text("if-range")))
}

#[test]
fn one_range_that_brings_all_that_is_missing_is_asked_for() {
    const A: &str = "ETag: \"a\"";
    let (low, mid, high) = (part("0-99/1000", A), part("300-399/1000", A), part("900-999/1000", A));
    let (open, other, weak) =
        (part("0-99/*", A), part("0-499/1000", "ETag: \"b\""), part("0-99/1000", "ETag: W/\"a\""));
    let range = |stored: &[&Stored], request: &str| asked(stored, request).map(|(range, _)| range);
    for (stored, request, expected) in [
        (&[&low][..], "", Some("bytes=100-")),
        (&[&high], "", Some("bytes=0-899")),
        (&[&low, &high], "", Some("bytes=100-899")),
        (&[&low, &mid, &high], "", Some("bytes=100-899")),
        (&[&mid], "", None),
        (&[&open], "", Some("bytes=100-")),
        (&[&open, &high], "", Some("bytes=100-899")),
        (&[&weak], "", None),
        // The tag "b" is of another representation than the bytes behind.
        (&[&other, &high], "", Some("bytes=500-")),
        (&[&low], "Range: bytes=50-150", Some("bytes=100-150")),
        (&[&low, &mid], "Range: bytes=50-350", Some("bytes=100-299")),
        (&[&mid], "Range: bytes=200-350", Some("bytes=200-299")),
        (&[&high], "Range: bytes=-200", Some("bytes=800-899")),
        (&[&mid], "Range: bytes=350-", Some("bytes=400-")),
        (&[&low], "Range: bytes=50-150|If-Range: \"a\"", Some("bytes=100-150")),
        (&[&low], "Range: bytes=50-150|If-Range: \"b\"", None),
        (&[&open], "Range: bytes=50-150", None),
        (&[&low], "Range: bytes=200-300", None),
        (&[&low], "Range: bytes=0-50", None),
        (&[&low], "Range: bytes=0-5, 90-150", None),
        (&[&low], "Range: lines=50-150", None),
        (&[&low], "If-None-Match: \"x\"", None),
        (&[&low], "If-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT", None),
        (&[&low], "Authorization: Basic YTpi", None),
        (&[], "", None),
    ] {
        assert_eq!(range(stored, request).as_deref(), expected, "{request:?} {stored:#?}");
    }
    assert_eq!(asked(&[&low], "").unwrap().1, "\"a\"");
    assert_eq!(missing(&Method::Head, &fields(""), &[&low]), None);
    let dated = part("0-9/20", "Date: {+0}|Last-Modified: {-60}");
    assert_eq!(
        asked(&[&dated], "").unwrap().1,
        String::from_utf8_lossy(dated.fields.first("last-modified").unwrap())
    );
    assert_eq!(
        asked(&[&part("0-9/20", "Date: {+0}|Last-Modified: {-59}")], ""),
        None,
        "it may have changed since"
    );
    let english = stored_for(
        "Accept-Language: en",
        206,
        "Cache-Control: max-age=60|Vary: Accept-Language|Content-Range: bytes 0-9/20|ETag: \"a\"",
    )
    .unwrap();
    assert!(asked(&[&english], "Accept-Language: en").is_some());
    assert_eq!(asked(&[&english], "Accept-Language: de"), None);
}

#[test]
fn a_cut_response_is_kept_only_where_the_rest_can_be_added() {
    let tagged = stored("Cache-Control: max-age=60|ETag: \"a\"");
    let extent = |stored: &Stored, held, length| match stored.cut(held, length)?.extent {
        Extent::Part(range) => Some(range.to_string()),
        Extent::Whole => Some("whole".to_owned()),
    };
    assert_eq!(extent(&tagged, 1, 10).as_deref(), Some("bytes 0-0/10"));
    assert_eq!(extent(&tagged, 9, 10).as_deref(), Some("bytes 0-8/10"));
    assert_eq!(
        (extent(&tagged, 0, 10), extent(&tagged, 10, 10), extent(&tagged, 11, 10)),
        (None, None, None)
    );
    assert_eq!(extent(&part("5-9/20", "ETag: \"a\""), 3, 5).as_deref(), Some("bytes 5-7/20"));
    assert_eq!(extent(&stored("Cache-Control: max-age=60|ETag: W/\"a\""), 5, 10), None);
    assert_eq!(extent(&stored("Cache-Control: max-age=60"), 5, 10), None);
    let missing = stored_for("", 404, "Cache-Control: max-age=60|ETag: \"a\"").unwrap();
    assert_eq!(extent(&missing, 5, 10), None);
}

#[test]
fn the_whole_has_the_fields_of_the_part_updated_by_those_of_the_rest() {
    let old = part("0-99/1000", "ETag: \"a\"|Content-Type: text/plain|X: old|Y: kept|Content-Encoding: br");
    let request = fields("");
    let stored = [&old];
    let lacks = missing(&Method::Get, &request, &stored).unwrap();
    let join = |text: &str| {
        lacks.joined((&request, &stored), &response(206, text), (T + 9, T + 9), &Rules::default())
    };
    let (whole, range) =
        join("Cache-Control: max-age=99|ETag: \"a\"|X: new|Content-Range: bytes 100-999/1000").unwrap();
    assert_eq!(
        (whole.extent, range.length(), whole.status, whole.lifetime_s()),
        (Extent::Whole, 1000, 200, 99)
    );
    for (name, value) in
        [("x", "new"), ("y", "kept"), ("content-type", "text/plain"), ("content-encoding", "br")]
    {
        assert_eq!(whole.fields.first(name), Some(value.as_bytes()), "{name}");
    }
    assert!(!whole.fields.has("content-range"));
    assert_eq!(whole.response_time_s, T + 9);
    let good = "ETag: \"a\"|Content-Range: bytes 100-999/*";
    assert!(join(good).is_some(), "it need not say what is known");
    for bad in [
        "ETag: \"a\"|Content-Range: bytes 100-999/1000|Content-Range: bytes 100-999/1000",
        "ETag: \"a\"|Content-Range: bytes 100-998/1000",
        "ETag: \"a\"|Content-Range: bytes 99-999/1000",
        "ETag: \"a\"|Content-Range: bytes 100-999/1001",
        "ETag: \"b\"|Content-Range: bytes 100-999/1000",
        "ETag: W/\"a\"|Content-Range: bytes 100-999/1000",
        "Content-Range: bytes 100-999/1000",
        "ETag: \"a\"",
        "ETag: \"a\"|Content-Range: bytes 100-999/1000|Content-Type: Multipart/Byteranges; boundary=x",
        "ETag: \"a\"|Content-Range: bytes 100-999/1000|Content-Encoding: gzip",
        "ETag: \"a\"|Content-Range: bytes 100-999/1000|Vary: Accept",
        "ETag: \"a\"|Content-Range: bytes 100-999/1000|Cache-Control: private",
    ] {
        assert_eq!(join(bad), None, "{bad}");
    }
    let whole = response(200, "ETag: \"a\"|Content-Range: bytes 100-999/1000");
    assert_eq!(lacks.joined((&request, &stored), &whole, (T, T), &Rules::default()), None);
}
