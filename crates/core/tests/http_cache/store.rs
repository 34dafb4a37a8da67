//! What is stored, and for how long it is fresh.

use crate::{T, fields, response, stored, stored_for};
use sidetrack_core::http::cache::{Extent, NotStored, Rules, invalidated, may_store};
use sidetrack_core::http::message::Method;
use sidetrack_core::http::uri::Resource;

#[test]
fn a_response_is_stored_by_every_condition_of_section_3() {
    use NotStored::{
        Authorization, BadRange, NoFreshness, NoStore, Private, RequestNoStore, SetCookie, Status, VaryStar,
    };
    for (request, status, text, expected) in [
        ("", 200, "Cache-Control: max-age=9", None),
        ("", 200, "", None),
        ("", 404, "", None),
        ("", 201, "", Some(NoFreshness)),
        ("", 201, "Cache-Control: max-age=9", None),
        ("", 302, "", Some(NoFreshness)),
        ("", 302, "Expires: {+9}", None),
        ("", 302, "Cache-Control: public", None),
        ("", 500, "Cache-Control: max-age=9", None),
        ("", 599, "Cache-Control: max-age=9", None),
        ("", 200, "Cache-Control: no-store, max-age=9", Some(NoStore)),
        ("", 200, "Cache-Control: NO-STORE", Some(NoStore)),
        ("", 200, "Cache-Control: max-age=9, x=\"no-store, private\"", None),
        ("", 200, "Cache-Control: no-store, must-understand, max-age=9", None),
        ("", 499, "Cache-Control: no-store, must-understand, max-age=9", Some(Status)),
        ("", 499, "Cache-Control: must-understand, max-age=9", Some(Status)),
        ("", 200, "Cache-Control: private", Some(Private)),
        ("", 200, "Cache-Control: private=\"X\", max-age=9", None),
        ("", 200, "Cache-Control: private=\"\", max-age=9", Some(Private)),
        ("", 200, "Cache-Control: no-cache", None),
        ("Cache-Control: no-store", 200, "Cache-Control: max-age=9", Some(RequestNoStore)),
        ("Authorization: x", 200, "Cache-Control: max-age=9", Some(Authorization)),
        ("Authorization: x", 200, "Cache-Control: max-age=9, public", None),
        ("Authorization: x", 200, "Cache-Control: s-maxage=9", None),
        ("Authorization: x", 200, "Cache-Control: max-age=9, must-revalidate", None),
        ("", 200, "Cache-Control: max-age=9|Set-Cookie: a=b", Some(SetCookie)),
        ("", 200, "Cache-Control: s-maxage=9|set-cookie: a=b", Some(SetCookie)),
        ("", 200, "Expires: {+9}|Set-Cookie: a=b", Some(SetCookie)),
        ("", 200, "Last-Modified: {-1000}|Set-Cookie: a=b", Some(SetCookie)),
        ("", 200, "Cache-Control: public, max-age=9|Set-Cookie: a=b", None),
        ("", 200, "Cache-Control: max-age=9, private=\"Set-Cookie\"|Set-Cookie: a=b", None),
        ("", 200, "Cache-Control: max-age=9, no-cache=\"set-cookie\"|Set-Cookie: a=b", None),
        ("", 200, "Cache-Control: max-age=9|Vary: *", Some(VaryStar)),
        ("", 200, "Cache-Control: max-age=9|Vary: A, *", Some(VaryStar)),
        ("", 304, "Cache-Control: max-age=9", Some(Status)),
        ("", 416, "Cache-Control: max-age=9", Some(Status)),
        ("", 206, "Cache-Control: max-age=9|Content-Range: bytes 0-4/10", None),
        ("", 206, "Cache-Control: max-age=9|Content-Type: multipart/byteranges", Some(BadRange)),
        ("", 206, "Cache-Control: max-age=9|Content-Range: bytes 4-0/10", Some(BadRange)),
        ("", 206, "Cache-Control: max-age=9|Content-Range: bytes 0-10/10", Some(BadRange)),
        ("", 200, "Cache-Control: no-store|CDN-Cache-Control: max-age=9", None),
        ("", 200, "Cache-Control: max-age=9|CDN-Cache-Control: no-store", Some(NoStore)),
        ("", 200, "Cache-Control: no-store|CDN-Cache-Control: max-age=&", Some(NoStore)),
        ("", 200, "Cache-Control: no-store|CDN-Cache-Control:", Some(NoStore)),
    ] {
        assert_eq!(stored_for(request, status, text).err(), expected, "{status} {text:?} to {request:?}");
    }
    let head = may_store(&Method::Head, &fields(""), &response(200, ""), &Rules::default());
    assert_eq!(head, Err(NotStored::Method), "HEAD brings no content");
}

#[test]
fn the_lifetime_is_the_first_that_applies() {
    for (status, text, lifetime_s) in [
        (200, "Cache-Control: max-age=60", 60),
        (200, "Cache-Control: max-age=60, s-maxage=30", 30),
        (200, "Cache-Control: max-age=\"60\"", 60),
        (200, "Cache-Control: MAX-AGE=60", 60),
        (200, "Cache-Control: max-age=60|Expires: {-60}", 60),
        (200, "Cache-Control: max-age=0|Expires: {+60}", 0),
        (200, "Cache-Control: max-age=60, max-age=5", 60),
        (200, "Cache-Control: max-age=1.5", 0),
        (200, "Cache-Control: max-age=-1", 0),
        (200, "Cache-Control: max-age='60'", 0),
        (200, "Cache-Control: max-age =60|Expires: {+60}", 0),
        (200, "Cache-Control: max-age=60a", 0),
        (200, "Cache-Control: max-age=99999999999999999999", 1 << 31),
        (200, "Cache-Control: x=\"max-age=60\"|Expires: {+7}", 7),
        (200, "Expires: {+60}|Date: {+0}", 60),
        (200, "Expires: {+60}|Date: {+20}", 40),
        (200, "Expires: {+60}", 60),
        (200, "Expires: 0", 0),
        (200, "Expires: Wed, 15 Jan 2031 08:00:00 gmt|Date: Wed, 15 Jan 2031 07:59:00 GMT", 60),
        (200, "Expires: Wed, 15 Jan 2031 08:00:00 UTC|Date: Wed, 15 Jan 2031 07:59:00 GMT", 0),
        (200, "Expires: Wed, 15 Jan 2031 08:00:00 AEST|Date: Wed, 15 Jan 2031 07:59:00 GMT", 0),
        (200, "Expires: Wed, 15  Jan 2031 08:00:00 GMT|Date: Wed, 15 Jan 2031 07:59:00 GMT", 0),
        (200, "Last-Modified: {-1000}|Expires: Wed, 15 Jan 2031 08:00:00 UTC", 0),
        (200, "Expires: {-60}", 0),
        (200, "Last-Modified: {-1000}", 100),
        (200, "Cache-Control: public|Last-Modified: {-1000}|Set-Cookie: a=b", 0),
        (200, "Last-Modified: {-1000}|Expires: 0", 0),
        (200, "Last-Modified: {-99999999}", 7 * 86_400),
        (201, "Last-Modified: {-1000}|Cache-Control: public", 100),
        (200, "", 0),
        (200, "Cache-Control: max-age=5|CDN-Cache-Control: max-age=60", 60),
        (200, "Cache-Control: max-age=5|CDN-Cache-Control: max-age=60;x=1", 60),
        (200, "Cache-Control: max-age=5|CDN-Cache-Control: max-age=\"60\", public", 0),
        (200, "Expires: {+60}|CDN-Cache-Control: public", 0),
    ] {
        let stored = stored_for("", status, text).unwrap();
        assert_eq!(stored.lifetime_s(), lifetime_s, "{text:?}");
    }
}

#[test]
fn the_age_grows_from_what_the_response_says() {
    for (text, age_s) in [
        ("", 10),
        ("Date: {+0}", 10),
        ("Date: {-5}", 15),
        ("Date: {+5}", 10),
        ("Age: 7", 17),
        ("Age: 7|Date: {-20}", 30),
        ("Age: 7, 99", 17),
        ("Age: -7", 10),
        ("Age: 7.5", 10),
        ("Age: seven", 10),
        ("Age: 99999999999999999999999", 1 << 31),
    ] {
        let stored = stored(&format!("Cache-Control: max-age=60|{text}"));
        assert_eq!(stored.age_s(T + 10), age_s, "{text:?}");
    }
}

#[test]
fn fields_of_one_user_and_of_the_framing_are_not_stored() {
    let stored =
        stored("Cache-Control: max-age=9, private=\"X-User\"|X-User: me|Content-Length: 5|Age: 1|X: y");
    assert!(!stored.fields.has("x-user") && !stored.fields.has("content-length"));
    assert!(stored.fields.has("x") && stored.fields.has("date"));
}

#[test]
fn a_range_on_a_response_that_is_no_part_is_a_field_like_any() {
    let whole = stored("Cache-Control: max-age=9|Content-Range: bytes 0-4/10");
    assert_eq!(whole.fields.first("content-range"), Some(&b"bytes 0-4/10"[..]));
    let part = stored_for("", 206, "Cache-Control: max-age=9|Content-Range: bytes 0-4/10").unwrap();
    assert!(!part.fields.has("content-range"), "the extent says it");
}

#[test]
fn cookies_are_stored_only_with_public() {
    for (text, has) in [
        ("Cache-Control: max-age=9, private=\"Set-Cookie\"|Set-Cookie: a=b", false),
        ("Cache-Control: max-age=9, no-cache=\"Set-Cookie\"|Set-Cookie: a=b", false),
        ("Cache-Control: max-age=9, public|Set-Cookie: a=b", true),
    ] {
        assert_eq!(stored(text).fields.has("set-cookie"), has, "{text:?}");
    }
}

#[test]
fn a_part_is_stored_as_one() {
    let stored = stored_for("Range: bytes=0-4", 206, "Content-Range: bytes 0-4/10|ETag: \"a\"").unwrap();
    assert_eq!(stored.status, 200);
    assert!(
        matches!(stored.extent, Extent::Part(part) if (part.first, part.last, part.total) == (0, 4, Some(10)))
    );
}

#[test]
fn unsafe_requests_invalidate_what_they_may_have_changed() {
    let resource = Resource::parse(b"http://a.example/x/y", &Method::Get).unwrap();
    let keys = |method: &Method, status, text: &str| -> Vec<String> {
        let found = invalidated(method, &resource, &response(status, text));
        found.iter().map(ToString::to_string).collect()
    };
    let own = "http://a.example/x/y";
    for method in
        [Method::Post, Method::Put, Method::Delete, Method::Patch, Method::Other(b"M-SEARCH"[..].into())]
    {
        assert_eq!(keys(&method, 204, ""), [own], "{method:?}");
        assert!(keys(&method, 404, "").is_empty() && keys(&method, 500, "").is_empty());
    }
    assert!(keys(&Method::Get, 200, "").is_empty() && keys(&Method::Options, 200, "").is_empty());
    assert_eq!(
        keys(&Method::Post, 201, "Location: z|Content-Location: http://a.example:80/w"),
        [own, "http://a.example/x/z", "http://a.example/w"]
    );
    assert_eq!(
        keys(&Method::Post, 303, "Location: http://b.example/x/y"),
        [own],
        "another origin's is its own"
    );
}
