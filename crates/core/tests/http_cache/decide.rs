//! What stored responses are good for, and the answers made out of them.

use crate::{T, fields, stored, stored_for};
use sidetrack_core::http::cache::{
    Body, Forward, Lookup, Rules, Stored, Trouble, conditions, lookup, may_serve_stale, reply,
    reply_first_hand,
};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::message::Method;

const HIT: Lookup = Lookup::Hit { index: 0, refresh: false };
const BEHIND: Lookup = Lookup::Hit { index: 0, refresh: true };

const fn validate(why: Forward) -> Lookup {
    Lookup::Validate { index: 0, why }
}

fn ask(request: &str, stored: &[&Stored], after_s: u64) -> Lookup {
    lookup(&Method::Get, &fields(request), false, stored, T + after_s)
}

#[test]
fn one_stored_response_is_judged_by_its_words_and_the_clients() {
    use Forward::{Request, Stale};
    let sixty = "Cache-Control: max-age=60|ETag: \"a\"";
    let with = |more: &str| format!("Cache-Control: max-age=60, {more}|ETag: \"a\"");
    for (text, request, after_s, expected) in [
        (sixty.to_owned(), "", 59, HIT),
        (sixty.to_owned(), "", 60, validate(Stale)),
        (sixty.to_owned(), "Cache-Control: max-age=30", 30, HIT),
        (sixty.to_owned(), "Cache-Control: max-age=30", 31, validate(Request)),
        (sixty.to_owned(), "Cache-Control: max-age=0", 1, validate(Request)),
        (sixty.to_owned(), "Cache-Control: max-age=0", 0, validate(Request)),
        (sixty.to_owned(), "Cache-Control: max-age=1", 1, HIT),
        (sixty.to_owned(), "Cache-Control: no-store", 1, Lookup::Pass { why: Request }),
        (sixty.to_owned(), "Cache-Control: no-store, only-if-cached", 1, HIT),
        (sixty.to_owned(), "Cache-Control: min-fresh=20", 40, HIT),
        (sixty.to_owned(), "Cache-Control: min-fresh=20", 41, validate(Request)),
        (sixty.to_owned(), "Cache-Control: no-cache", 1, validate(Request)),
        (sixty.to_owned(), "Pragma: no-cache", 1, validate(Request)),
        (sixty.to_owned(), "Pragma: no-cache|Cache-Control: max-age=30", 1, HIT),
        (sixty.to_owned(), "Cache-Control: max-stale", 1000, HIT),
        (sixty.to_owned(), "Cache-Control: max-stale=10", 70, HIT),
        (sixty.to_owned(), "Cache-Control: max-stale=10", 71, validate(Stale)),
        (sixty.to_owned(), "Cache-Control: max-stale=x", 71, validate(Stale)),
        (with("must-revalidate"), "Cache-Control: max-stale", 70, validate(Stale)),
        (with("proxy-revalidate"), "Cache-Control: max-stale", 70, validate(Stale)),
        (with("s-maxage=60"), "Cache-Control: max-stale", 70, validate(Stale)),
        (with("no-cache"), "", 1, validate(Stale)),
        (with("no-cache"), "Cache-Control: max-stale", 1, validate(Stale)),
        (with("no-cache=\"X\""), "", 1, HIT),
        (with("stale-while-revalidate=10"), "", 69, BEHIND),
        (with("stale-while-revalidate=10"), "Cache-Control: only-if-cached", 69, HIT),
        (with("stale-while-revalidate=10"), "", 70, validate(Stale)),
        (with("stale-while-revalidate=10, must-revalidate"), "", 65, validate(Stale)),
        (with("stale-while-revalidate=10"), "Cache-Control: min-fresh=1", 65, validate(Stale)),
        ("Cache-Control: max-age=60".to_owned(), "", 60, Lookup::Miss { why: Stale }),
        (sixty.to_owned(), "Cache-Control: only-if-cached", 59, HIT),
        (sixty.to_owned(), "Cache-Control: only-if-cached", 60, Lookup::OnlyIfCached),
        (sixty.to_owned(), "If-Match: \"a\"", 1, Lookup::Pass { why: Forward::Bypass }),
    ] {
        assert_eq!(
            ask(request, &[&stored(&text)], after_s),
            expected,
            "{text:?} asked {request:?} at {after_s}"
        );
    }
}

#[test]
fn a_clock_that_goes_back_makes_no_response_fresh_for_longer() {
    let sixty = stored("Cache-Control: max-age=60|ETag: \"a\"");
    let at = |now_s| lookup(&Method::Get, &Fields::new(), false, &[&sixty], now_s);
    // The clock is adjusted by a little.
    assert_eq!((at(T - 5), sixty.age_s(T - 5)), (HIT, sixty.age_s(T)));
    for back in [6, 3600, 86_400, T] {
        assert_eq!(at(T - back), validate(Forward::Stale), "back by {back} s");
        assert!(sixty.age_s(T - back) > 1 << 30);
        let trouble = Trouble::Unreachable;
        assert!(!may_serve_stale(&sixty, &Fields::new(), trouble, T - back, &Rules::default()));
    }
    assert_eq!(at(T + 3600), validate(Forward::Stale), "forward");
}

#[test]
fn requests_without_a_stored_response() {
    let miss = |why| Lookup::Miss { why };
    assert_eq!(ask("", &[], 0), miss(Forward::UriMiss));
    assert_eq!(ask("Cache-Control: no-store", &[], 0), Lookup::Pass { why: Forward::Request });
    assert_eq!(ask("Cache-Control: only-if-cached", &[], 0), Lookup::OnlyIfCached);
    let post = lookup(&Method::Post, &Fields::new(), true, &[], T);
    assert_eq!(post, Lookup::Pass { why: Forward::Method });
    let fat = lookup(&Method::Get, &Fields::new(), true, &[&stored("Cache-Control: max-age=9")], T);
    assert_eq!(fat, Lookup::Pass { why: Forward::Bypass }, "GET with a body");
    let head = lookup(&Method::Head, &Fields::new(), false, &[&stored("Cache-Control: max-age=9")], T);
    assert_eq!(head, HIT);
}

#[test]
fn variants_are_selected_by_the_request() {
    let make = |request: &str, vary: &str, date: &str| {
        stored_for(request, 200, &format!("Cache-Control: max-age=60|Vary: {vary}|Date: {{{date}}}")).unwrap()
    };
    let en = make("Accept-Language: en", "Accept-Language", "+0");
    let de = make("Accept-Language: de, en;q=0.5", "accept-language", "+0");
    let both = [&en, &de];
    let index = |request: &str, stored: &[&Stored]| match ask(request, stored, 1) {
        Lookup::Hit { index, .. } => Ok(index),
        other => Err(other),
    };
    assert_eq!(index("Accept-Language: en", &both), Ok(0));
    assert_eq!(index("accept-language: DE ,EN; q=0.5", &both), Ok(1));
    assert_eq!(index("Accept-Language: de|Accept-Language: en;q=0.5", &both), Ok(1));
    assert_eq!(index("", &both), Err(Lookup::Miss { why: Forward::VaryMiss }));
    assert_eq!(index("Accept-Language: fr", &both), Err(Lookup::Miss { why: Forward::VaryMiss }));
    let absent = make("", "X-A", "+0");
    assert_eq!(index("", &[&absent]), Ok(0));
    assert_eq!(
        index("X-A:", &[&absent]),
        Err(Lookup::Miss { why: Forward::VaryMiss }),
        "empty is not absent"
    );
    let coding = make("Accept-Encoding: gzip, br", "Accept-Encoding", "+0");
    assert_eq!(index("Accept-Encoding: br,gzip", &[&coding]), Ok(0), "their order means nothing");
    assert!(index("Accept-Language: en;q=0.5, de", &both).is_err(), "that of languages may");
    let agent = make("User-Agent: A (b, c)", "User-Agent", "+0");
    assert!(index("User-Agent: A (b,c)", &[&agent]).is_err(), "no list: every byte counts");
    let (old, new) = (make("X: 1", "X", "-9"), make("X: 1", "X", "-3"));
    assert_eq!(index("X: 1", &[&old, &new]), Ok(1), "the newest of several");
    let plain = stored("Cache-Control: max-age=60");
    assert_eq!(index("X: 1", &[&plain, &new]), Ok(1), "one that was selected before one that was not");
    assert_eq!(index("X: 2", &[&plain, &new]), Ok(0));
}

/// Which of two stored responses, each with a Vary and what it says of itself, answers a request that selects both. The
/// first is newer, and is chosen where the weights do not decide.
fn choose(request: &str, one: (&str, &str), other: (&str, &str)) -> usize {
    let make = |(vary, says): (&str, &str), date: &str| {
        let text = format!("Cache-Control: max-age=60|Vary: {vary}|{says}|Date: {date}");
        stored_for(request, 200, &text).expect("it may be stored")
    };
    match ask(request, &[&make(one, "{+0}"), &make(other, "{-9}")], 1) {
        Lookup::Hit { index, .. } => index,
        wrong => panic!("{request}: {wrong:?}"),
    }
}

#[test]
fn of_several_that_a_request_selects_the_one_it_prefers_is_chosen() {
    let language = |tag: &str| format!("Content-Language: {tag}");
    for (asked, newer, older, expected) in [
        ("en;q=0.5, de", "en", "de", 1),
        ("en, de;q=0.5", "en", "de", 0),
        ("en;q=0.7, de;q=0.700", "en", "de", 0),
        ("en;q=0.5, de;q=0.501", "en", "de", 1),
        ("en", "en-US", "fr", 0),
        ("en-US, en;q=0.5", "en-GB", "en-US", 1),
        ("en;q=0.1, *;q=0.5", "en", "fr", 1),
        ("en;q=0, fr;q=0.001", "en", "fr", 1),
        ("de, en;q=0.5", "en", "fr, DE", 1),
        ("d, en;q=0.5", "de", "en", 1),
        ("en;q=x, de;q=0.1", "en", "de", 1),
        ("en;q=2, de;q=0.1", "en", "de", 1),
        ("en;q=0.1234, de;q=0.1", "en", "de", 1),
    ] {
        let request = format!("Accept-Language: {asked}|X: 1");
        let found = choose(&request, ("X", &language(newer)), ("Accept-Language", &language(older)));
        assert_eq!(found, expected, "{asked}: {newer} or {older}");
        // Not by a field that none of them was selected by.
        assert_eq!(choose(&request, ("X", &language(newer)), ("X, Y", &language(older))), 0);
    }
}

#[test]
fn codings_and_types_are_weighed_and_the_weights_of_all_fields_count() {
    let encoding = |coding: &str| format!("Content-Encoding: {coding}");
    for (asked, newer, older, expected) in [
        ("gzip, br;q=0.5", "br", "gzip", 1),
        ("gzip, br;q=0.5", "br", "X-GZIP", 1),
        ("gzip;q=0, *;q=0.1", "gzip", "zstd", 1),
        ("gzip, br;q=0.5", "gzip, br", "gzip", 1),
    ] {
        let request = format!("Accept-Encoding: {asked}|X: 1");
        let found = choose(&request, ("X", &encoding(newer)), ("Accept-Encoding", &encoding(older)));
        assert_eq!(found, expected, "{asked}: {newer} or {older}");
    }
    let request = "Accept-Encoding: gzip;q=0.1|X: 1";
    assert_eq!(
        choose(request, ("X", "A: b"), ("Accept-Encoding", "Content-Encoding: gzip")),
        1,
        "named before not"
    );
    let kind = |kind: &str| format!("Content-Type: {kind}");
    for (asked, newer, older, expected) in [
        ("text/html;q=0.5, text/plain", "text/html; charset=utf-8", "text/plain", 1),
        ("text/*, text/plain;q=0.3, */*;q=0.1", "text/plain", "text/html", 1),
        ("*/*;q=0.1, text/*;q=0.2", "image/png", "TEXT/html", 1),
        ("text/html;level=1, text/html;q=0.4", "text/html", "text/html; level=1", 1),
        ("text/html;q=0.9, application/json", "text/html", "application/json", 1),
    ] {
        let request = format!("Accept: {asked}|X: 1");
        let found = choose(&request, ("X", &kind(newer)), ("Accept", &kind(older)));
        assert_eq!(found, expected, "{asked}: {newer} or {older}");
    }
    let request = "Accept-Language: en;q=0.5, de|Accept: text/html, text/plain;q=0.1|X: 1";
    let (html, plain) =
        ("Content-Language: en|Content-Type: text/html", "Content-Language: de|Content-Type: text/plain");
    assert_eq!(choose(request, ("X", html), ("Accept-Language, Accept", plain)), 0, "0.5 * 1 and 1 * 0.1");
    assert_eq!(choose(request, ("X", html), ("Accept-Language", plain)), 1, "0.5 and 1");
    let request = "Accept-Language: en;q=0.5, de|X: 1";
    assert_eq!(
        choose(request, ("X", "A: b"), ("Accept-Language", "Content-Language: de")),
        0,
        "it does not say"
    );
}

#[test]
fn weights_are_the_same_in_every_spelling() {
    let one = |text: &str| {
        stored_for(&format!("Accept: {text}"), 200, "Cache-Control: max-age=60|Vary: Accept").unwrap()
    };
    for (stored, asked, is_hit) in [
        ("a/b;q=1", "a/b", true),
        ("a/b; Q=1.000", "a/b;q=1.", true),
        ("a/b;q=0.5", "a/b; q=0.500", true),
        ("a/b;q=0.5", "a/b;q=0.501", false),
        ("a/b;q=0", "a/b", false),
        ("a/b;q=x", "a/b", false),
        ("a/b;q=1;x=2", "a/b;x=2", false),
        ("a/b;x=2;q=1", "a/b;x=2", true),
    ] {
        let found = ask(&format!("Accept: {asked}"), &[&one(stored)], 1);
        assert_eq!(matches!(found, Lookup::Hit { .. }), is_hit, "{stored} and {asked}: {found:?}");
    }
}

#[test]
fn parts_answer_the_ranges_they_hold() {
    let part =
        stored_for("", 206, "Cache-Control: max-age=60|Content-Range: bytes 2-5/10|ETag: \"a\"").unwrap();
    let partial = Lookup::Miss { why: Forward::Partial };
    for (request, expected) in [
        ("Range: bytes=2-5", HIT),
        ("Range: bytes=3-4", HIT),
        ("Range: bytes=1-4", partial),
        ("Range: bytes=3-", partial),
        ("Range: bytes=-3", partial),
        ("Range: bytes=2-3, 5-5", HIT),
        ("Range: bytes=2-3|If-Range: \"a\"", HIT),
        ("Range: bytes=2-3|If-Range: \"b\"", partial),
        ("", partial),
    ] {
        assert_eq!(ask(request, &[&part], 1), expected, "{request:?}");
    }
}

#[test]
fn stale_is_served_when_the_server_is_in_trouble_and_nothing_forbids_it() {
    let rules = Rules { stale_if_unreachable_s: 86_400, ..Rules::default() };
    for (more, request, after_s, on_error, unreachable) in [
        ("", "", 61, false, true),
        ("", "", 60 + 86_401, false, false),
        (", stale-if-error=10", "", 70, true, true),
        (", stale-if-error=10", "", 71, false, false),
        ("", "Cache-Control: stale-if-error=10", 70, true, true),
        (", must-revalidate, stale-if-error=10", "", 61, false, false),
        (", s-maxage=60, stale-if-error=10", "", 61, false, false),
        (", no-cache, stale-if-error=10", "", 61, false, false),
        (", stale-if-error=10", "Cache-Control: no-cache", 61, false, false),
        (", stale-if-error=10", "Cache-Control: max-age=5", 61, false, false),
    ] {
        let stored = stored(&format!("Cache-Control: max-age=60{more}"));
        let may = |trouble| may_serve_stale(&stored, &fields(request), trouble, T + after_s, &rules);
        let found = (may(Trouble::Error), may(Trouble::Unreachable));
        assert_eq!(found, (on_error, unreachable), "{more:?} {request:?} {after_s}");
    }
    let stored = stored("Cache-Control: max-age=60");
    let may = may_serve_stale(&stored, &fields(""), Trouble::Unreachable, T + 61, &Rules::default());
    assert!(!may, "nothing is served stale unless the response, the client or the configuration says so");
}

#[test]
fn what_was_made_for_one_user_is_not_served_stale_without_explicit_freshness() {
    let rules = Rules { stale_if_unreachable_s: 86_400, ..Rules::default() };
    let (heuristic, public) =
        ("Last-Modified: {-1000}", "Last-Modified: {-1000}|Cache-Control: public|Set-Cookie: a=b");
    for (made_for, text, asked_by, may) in [
        ("", heuristic, "", true),
        ("Cookie: a=b", heuristic, "", false),
        ("", heuristic, "Cookie: a=b", false),
        ("", heuristic, "Authorization: Basic x", false),
        ("Authorization: Basic x", "Last-Modified: {-1000}|Cache-Control: public", "", false),
        ("", public, "", false),
        ("Cookie: a=b", "Cache-Control: max-age=60", "Cookie: a=b", true),
        ("Cookie: a=b", "Expires: {+60}", "", true),
        ("Authorization: Basic x", "Cache-Control: public, max-age=60", "", true),
        ("", "Cache-Control: public, max-age=60|Set-Cookie: a=b", "", true),
    ] {
        let stored = crate::stored_for(made_for, 200, text).unwrap();
        let stale_at = T + 2000;
        let found = may_serve_stale(&stored, &fields(asked_by), Trouble::Unreachable, stale_at, &rules);
        assert_eq!(found, may, "{text:?} made for {made_for:?}, asked by {asked_by:?}");
        let wish = fields(&format!("{asked_by}|Cache-Control: max-stale"));
        let found = lookup(&Method::Get, &wish, false, &[&stored], stale_at);
        assert_eq!(matches!(found, Lookup::Hit { .. }), may, "max-stale: {text:?} for {made_for:?}");
    }
}

#[test]
fn a_validation_asks_with_every_tag() {
    let (one, two) =
        (stored("ETag: \"a\"|Last-Modified: {-9}"), stored("ETag: W/\"b\"|Cache-Control: max-age=1"));
    let mut request = fields("If-None-Match: \"mine\"|Range: bytes=0-1|Accept: x");
    conditions(&mut request, &two, &[&one, &two]);
    assert_eq!(request, fields("Accept: x|If-None-Match: W/\"b\", \"a\""));
    let mut request = fields("If-Modified-Since: {-1}");
    conditions(&mut request, &one, &[&one]);
    assert_eq!(request, fields("If-None-Match: \"a\"|If-Modified-Since: {-9}"));
}

#[test]
fn clients_conditions_are_answered_from_the_cache() {
    let one = stored("Cache-Control: max-age=60|ETag: \"a\"|Last-Modified: {-100}|Content-Type: x/y|X: 1");
    for (request, status) in [
        ("", 200),
        ("If-None-Match: \"a\"", 304),
        ("If-None-Match: W/\"a\"", 304),
        ("If-None-Match: \"x\", \"a\"", 304),
        ("If-None-Match: \"x\"|If-None-Match: \"a\"", 304),
        ("If-None-Match: *", 304),
        ("If-None-Match: \"x\"", 200),
        ("If-None-Match: \"x\"|If-Modified-Since: {-1}", 200),
        ("If-Modified-Since: {-100}", 304),
        ("If-Modified-Since: {-1}", 304),
        ("If-Modified-Since: {-101}", 200),
        ("If-Modified-Since: yesterday", 200),
        ("If-Modified-Since: {-1}|If-Modified-Since: {-1}", 200),
        ("If-Modified-Since: {-1}|Range: bytes=0-1", 304),
        ("If-Modified-Since: {-101}|Range: bytes=0-1", 206),
    ] {
        let found = reply(&one, (&Method::Get, &fields(request)), Some(9), "b", T + 5);
        assert_eq!(found.head.status, status, "{request:?}");
        assert_eq!(found.head.fields.first("age"), Some(&b"5"[..]));
        if status == 304 {
            let names = ["etag", "cache-control", "date"].map(|name| found.head.fields.has(name));
            assert_eq!(names, [true; 3]);
            assert!(!found.head.fields.has("content-type") && !found.head.fields.has("content-length"));
        }
    }
}

#[test]
fn if_modified_since_is_answered_for_every_stored_success_and_for_nothing_else() {
    let since = fields("If-Modified-Since: {-50}");
    for (status, text, expected) in [
        (200, "Last-Modified: {-100}", 304),
        (200, "Last-Modified: {-10}", 200),
        (203, "Last-Modified: {-100}", 304),
        // Without a time of change the time it was made, or came, is the best there is (RFC 9111 Sec. 4.3.2).
        (200, "Date: {-60}", 304),
        (200, "Date: {-40}", 200),
        (200, "Last-Modified: long ago|Date: {-60}", 304),
        (200, "", 200),
        (404, "Last-Modified: {-100}", 404),
        (301, "Last-Modified: {-100}", 301),
    ] {
        let one = crate::stored_for("", status, &format!("Cache-Control: max-age=600|{text}")).unwrap();
        for method in [Method::Get, Method::Head] {
            let found = reply(&one, (&method, &since), Some(9), "b", T + 5).head.status;
            assert_eq!(found, expected, "{method:?} {status} {text:?}");
        }
    }
}

#[test]
fn ranges_are_cut_out_of_the_whole() {
    let one = stored("Cache-Control: max-age=60|ETag: \"a\"|Last-Modified: {-100}|Content-Type: x/y");
    let answer = |request: &str, total| reply(&one, (&Method::Get, &fields(request)), total, "B", T);
    let range = |request: &str| {
        let reply = answer(request, Some(10));
        let text =
            reply.head.fields.first("content-range").map(|text| String::from_utf8_lossy(text).into_owned());
        (reply.head.status, text.unwrap_or_default(), reply.body)
    };
    let part = |first, last| (206, format!("bytes {first}-{last}/10"), Body::Range(first, last));
    let whole = (200, String::new(), Body::All);
    for (request, expected) in [
        ("Range: bytes=0-0", part(0, 0)),
        ("Range: bytes=3-", part(3, 9)),
        ("Range: bytes=3-99", part(3, 9)),
        ("Range: bytes=-3", part(7, 9)),
        ("Range: bytes=-99", part(0, 9)),
        ("Range: bytes=0-2, 2-4, 5-6", part(0, 6)),
        ("Range: bytes=10-", (416, "bytes */10".to_owned(), Body::None)),
        ("Range: bytes=-0", (416, "bytes */10".to_owned(), Body::None)),
        ("Range: bytes=4-3", whole.clone()),
        ("Range: bytes=a-b", whole.clone()),
        ("Range: lines=0-1", whole.clone()),
        ("Range: bytes=0-1|If-Range: \"a\"", part(0, 1)),
        ("Range: bytes=0-1|If-Range: W/\"a\"", whole.clone()),
        ("Range: bytes=0-1|If-Range: \"b\"", whole.clone()),
        ("Range: bytes=0-1|If-Range: {-100}", part(0, 1)),
        ("Range: bytes=0-1|If-Range: {-99}", whole.clone()),
    ] {
        assert_eq!(range(request), expected, "{request:?}");
    }
    assert_eq!(answer("Range: bytes=0-1", None).body, Body::All, "the length is not known yet");
    let many = answer("Range: bytes=0-1, 5-6", Some(10));
    let Body::Multipart(parts, end) = &many.body else { panic!("{many:?}") };
    let length: usize =
        parts.iter().map(|(text, first, last)| text.len() + (last - first) as usize + 1).sum();
    assert_eq!(many.head.fields.first("content-length"), Some((length + end.len()).to_string().as_bytes()));
    let head = reply(&one, (&Method::Head, &fields("Range: bytes=0-1")), Some(10), "B", T);
    assert_eq!((head.head.status, head.body), (200, Body::None), "ranges are for GET");
}

#[test]
fn the_response_to_this_very_request_keeps_all_its_fields() {
    let text = "Cache-Control: max-age=60, no-cache=\"Set-Cookie\", private=\"X-User\"|ETag: \"a\"|Set-Cookie: a=b|X-User: me";
    let received = fields(text);
    let stored = stored(text);
    let first =
        |request: &str| reply_first_hand(&stored, &received, (&Method::Get, &fields(request)), Some(10), "b");
    let own = first("");
    assert_eq!((own.head.status, &own.body), (200, &Body::All));
    assert!(own.head.fields.has("set-cookie") && own.head.fields.has("x-user"));
    assert!(!own.head.fields.has("age"), "it comes from the server");
    assert_eq!(first("If-None-Match: \"a\"").head.status, 304);
    assert_eq!(first("Range: bytes=0-1").head.status, 206);
    let other = reply(&stored, (&Method::Get, &Fields::new()), Some(10), "b", T);
    assert!(!other.head.fields.has("set-cookie") && !other.head.fields.has("x-user"));
}

#[test]
fn fields_that_need_validation_are_left_out() {
    let one = stored("Cache-Control: max-age=60, no-cache=\"Set-Cookie\"|Set-Cookie: a=b|X: y");
    let found = reply(&one, (&Method::Get, &Fields::new()), Some(1), "b", T);
    assert!(!found.head.fields.has("set-cookie") && found.head.fields.has("x"));
}
