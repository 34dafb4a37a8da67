//! Secrets and their placeholders: no argument panics, content gives the same result in one piece and in two, and after both ways
//! no placeholder is left.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::placeholder::{Guard, Named, Search, Secret, Secrets, Swapping, Wanted, placeholder};
use std::sync::Arc;

/// Runs the pieces through.
fn swapped(mut swapping: Swapping, pieces: &[&[u8]]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    for piece in pieces {
        swapping.push(piece, &mut out).ok()?;
    }
    swapping.finish(&mut out).ok()?;
    Some(out)
}

fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = text.parse::<Wanted>();
    }
    let _ = Secret::new(data.to_vec());
    let Ok(Host::Name(host)) = Host::from_bytes(b"api.example") else { return };
    let to = Destination { host: Host::Name(host), port: 443, zone: 0 };
    let Ok(secret) = Secret::new(b"the-secret".to_vec()) else { return };
    let named = Named { name: "A".to_owned(), placeholder: placeholder([0; 16]), secret, hosts: vec![to.clone()] };
    let secrets = Arc::new(Secrets::new(&[named]));
    let (guard, fields) = (Guard::new(&secrets, Some(&to)), Fields::new());
    let middle = data.len() / 2;
    let pieces = [&data[..middle], &data[middle..]];
    let once = swapped(guard.up(&fields, false), &[data]);
    assert_eq!(once, swapped(guard.up(&fields, false), &pieces));
    let whole = secrets.find(data).is_err();
    for length in [1, 7, data.len().max(1)] {
        let mut search = Search::new(&secrets);
        assert_eq!(data.chunks(length).any(|piece| search.push(piece).is_err()), whole);
    }
    let Some(down) = guard.down(&fields) else { return };
    let back = swapped(down, &[data]);
    let Some(down) = guard.down(&fields) else { return };
    assert_eq!(back, swapped(down, &pieces));
    let mut fields = Fields::new();
    fields.push("A", data);
    guard.cover(&mut fields);
});
