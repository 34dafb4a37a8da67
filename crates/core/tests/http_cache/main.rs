//! RFC 9111 as tables: what is stored, how long it is fresh, what it is good for.

mod decide;
mod file;
mod part;
mod store;
mod update;

use sidetrack_core::http::cache::{Extent, NotStored, Rules, Stored, format_date, may_store};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::message::{Method, Response};

/// The time at which responses come in these tests.
pub const T: u64 = 1_800_000_000;

/// Field lines out of `Name: value` texts separated by `|`; `{+n}` and `{-n}` stand for the date this number of seconds
/// from [`T`].
pub fn fields(text: &str) -> Fields {
    let mut found = Fields::new();
    for line in text.split('|').filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').expect("a field line");
        found.push(name.trim(), dates(value.trim()));
    }
    found
}

fn dates(text: &str) -> String {
    let Some((before, rest)) = text.split_once('{') else { return text.to_owned() };
    let (offset, after) = rest.split_once('}').expect("a closing brace");
    let offset: i64 = offset.parse().expect("a number of seconds");
    format!("{before}{}{after}", format_date(T.checked_add_signed(offset).expect("a date")))
}

/// A response with these field lines.
pub fn response(status: u16, text: &str) -> Response {
    Response::new(status, fields(text))
}

/// The stored form of a response to GET that came at [`T`], or why there is none.
pub fn stored_for(request: &str, status: u16, text: &str) -> Result<Stored, NotStored> {
    let rules = Rules::default();
    let (request, response) = (fields(request), response(status, text));
    let extent = may_store(&Method::Get, &request, &response, &rules)?;
    Ok(Stored::new(&request, &response, extent, (T, T), &rules))
}

/// The stored form of a 200 to a plain GET.
pub fn stored(text: &str) -> Stored {
    let stored = stored_for("", 200, text).expect("storable");
    assert_eq!(stored.extent, Extent::Whole);
    stored
}
