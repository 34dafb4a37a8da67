//! What a 304, an answer to HEAD and a second part change.

use crate::{T, fields, response, stored, stored_for};
use sidetrack_core::http::cache::{
    Extent, Refreshed, Rules, Stored, combine, freshen_by_head, refresh, reply,
};
use sidetrack_core::http::message::Method;

fn after_304(text: &str, of: &[&str]) -> (Refreshed, Vec<Stored>) {
    let mut held: Vec<Stored> = of.iter().map(|text| stored(text)).collect();
    let mut places: Vec<&mut Stored> = held.iter_mut().collect();
    let found = refresh(&mut places, &response(304, text), (T + 100, T + 100), &Rules::default());
    (found, held)
}

#[test]
fn a_304_updates_what_it_is_about() {
    let (a, b, weak) = ("ETag: \"a\"", "ETag: \"b\"", "ETag: W/\"a\"");
    for (text, of, about) in [
        ("ETag: \"a\"", vec![a, b], vec![0]),
        ("ETag: \"b\"", vec![a, b], vec![1]),
        ("ETag: \"a\"", vec![a, b, a], vec![0, 2]),
        ("ETag: W/\"a\"", vec![weak, b], vec![0]),
        ("ETag: \"c\"", vec![a, b], vec![]),
        ("ETag: \"c\"", vec![a], vec![]),
        ("Last-Modified: {-9}", vec![a, "Last-Modified: {-9}"], vec![1]),
        ("Last-Modified: {-8}", vec!["Last-Modified: {-9}"], vec![]),
        ("X: y", vec![a], vec![0]),
        ("X: y", vec![a, b], vec![]),
    ] {
        let expected = if about.is_empty() { Refreshed::Unknown } else { Refreshed::Updated(about) };
        assert_eq!(after_304(text, &of).0, expected, "{text:?} about {of:?}");
    }
}

#[test]
fn an_update_replaces_all_but_what_the_bytes_depend_on() {
    let before =
        "Cache-Control: max-age=1|ETag: \"a\"|X: old|X: older|Y: kept|Content-Encoding: gzip|Age: 500";
    let update =
        "Cache-Control: max-age=60|ETag: \"a\"|x: new|Z: more|Content-Encoding: br|Content-Length: 0";
    let (_, held) = after_304(update, &[before]);
    let after = &held[0];
    assert_eq!((after.age_s(T + 110), after.lifetime_s()), (10, 60), "the age starts anew");
    let expected =
        fields("Y: kept|Content-Encoding: gzip|Cache-Control: max-age=60|ETag: \"a\"|x: new|Z: more");
    let mut found = after.fields.clone();
    found.remove("date");
    assert_eq!(found, expected);
}

#[test]
fn a_range_on_a_whole_response_is_updated_and_answers_have_their_own() {
    let (_, held) =
        after_304("ETag: \"a\"|Content-Range: bytes 5-9/10", &["ETag: \"a\"|Content-Range: bytes 0-4/10"]);
    let whole = &held[0];
    assert_eq!(whole.fields.first("content-range"), Some(&b"bytes 5-9/10"[..]));
    let said = |range: &str| {
        let request = fields(range);
        let answer = reply(whole, (&Method::Get, &request), Some(10), "b", T + 100);
        let ranges: Vec<_> = answer
            .head
            .fields
            .all("content-range")
            .map(|one| String::from_utf8_lossy(one).into_owned())
            .collect();
        (answer.head.status, ranges.join("; "))
    };
    assert_eq!(said(""), (200, "bytes 5-9/10".to_owned()));
    assert_eq!(said("Range: bytes=1-2"), (206, "bytes 1-2/10".to_owned()));
    assert_eq!(said("Range: bytes=1-2, 5-6"), (206, String::new()));
    assert_eq!(said("Range: bytes=10-"), (416, "bytes */10".to_owned()));
    assert_eq!(said("If-None-Match: \"a\""), (304, String::new()));
}

#[test]
fn head_freshens_or_invalidates() {
    for (text, good) in [
        ("ETag: \"a\"|Cache-Control: max-age=60", true),
        ("ETag: \"a\"|Content-Length: 5|Cache-Control: max-age=60", true),
        ("ETag: \"a\"|Content-Length: 6", false),
        ("ETag: \"b\"", false),
        ("Last-Modified: {-5}", false),
    ] {
        let mut one = stored("ETag: \"a\"|Cache-Control: max-age=1");
        freshen_by_head(&mut one, &response(200, text), 5, (T + 100, T + 100), &Rules::default());
        assert_eq!(one.is_invalid, !good, "{text:?}");
        assert_eq!(one.lifetime_s(), if good { 60 } else { 1 }, "{text:?}");
    }
}

#[test]
fn parts_are_combined_under_one_strong_tag_only() {
    let part = |range: &str, tag: &str| {
        stored_for("", 206, &format!("ETag: {tag}|Content-Range: bytes {range}")).unwrap()
    };
    let both = |a: (&str, &str), b: (&str, &str)| {
        let made = combine(&part(a.0, a.1), &part(b.0, b.1), &Rules::default())?;
        match made.extent {
            Extent::Part(range) => Some(range.to_string()),
            Extent::Whole => Some("whole".to_owned()),
        }
    };
    let (a, weak) = ("\"a\"", "W/\"a\"");
    assert_eq!(both(("0-4/10", a), ("5-9/10", a)).as_deref(), Some("whole"));
    assert_eq!(both(("0-4/*", a), ("3-9/10", a)).as_deref(), Some("whole"));
    assert_eq!(both(("5-9/10", a), ("0-4/10", a)).as_deref(), Some("whole"));
    assert_eq!(both(("0-3/10", a), ("5-9/10", a)), None, "a gap");
    assert_eq!(both(("0-4/10", a), ("5-9/10", "\"b\"")), None);
    assert_eq!(both(("0-4/10", weak), ("5-9/10", weak)), None);
    assert_eq!(both(("0-4/10", a), ("5-9/11", a)), None);
}
