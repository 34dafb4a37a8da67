//! HTTP/2 connections byte by byte: no input panics, any split gives the same judgement, and a decoded header block that
//! is written again is read as the same fields.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::http::follow::Follower;
use sidetrack_core::http::hpack::Decoder;
use sidetrack_core::http::message::Sender;

const STREAMS: std::ops::Range<u32> = 0..16;

/// Writes a length behind the bits of a prefix.
fn integer(out: &mut Vec<u8>, prefix: u32, value: usize) {
    let full = (1 << prefix) - 1;
    if value < full {
        return out.push(value as u8);
    }
    out.push(full as u8);
    let mut rest = value - full;
    while rest >= 128 {
        out.push((rest % 128) as u8 | 0x80);
        rest /= 128;
    }
    out.push(rest as u8);
}

/// Reads the bytes as one header block, and its fields again as literals.
fn decode(data: &[u8]) {
    let mut fields = Vec::new();
    let read =
        Decoder::new(4096, 1 << 16).decode(data, |name, value| fields.push((name.to_vec(), value.to_vec())));
    let Ok(size) = read else { return };
    let mut out = Vec::new();
    for (name, value) in &fields {
        out.push(0);
        for text in [name, value] {
            integer(&mut out, 7, text.len());
            out.extend_from_slice(text);
        }
    }
    let mut again = Vec::new();
    let read =
        Decoder::new(0, 1 << 16).decode(&out, |name, value| again.push((name.to_vec(), value.to_vec())));
    assert_eq!((read, again), (Ok(size), fields));
}

fuzz_target!(|data: &[u8]| {
    let Some((first, bytes)) = data.split_first() else { return };
    decode(bytes);
    let sender = if first & 1 == 0 { Sender::Client } else { Sender::Server };
    let step = usize::from(first >> 1) + 1;
    let mut whole = Follower::new(sender);
    let mut parts = Follower::new(sender);
    if sender == Sender::Server {
        STREAMS.for_each(|stream| {
            whole.open(stream);
            parts.open(stream);
        });
    }
    let read = whole.read(bytes);
    let last = bytes.chunks(step).map(|part| parts.read(part)).last();
    assert_eq!(last.unwrap_or(Ok(())), read);
    for stream in STREAMS {
        assert_eq!(whole.take(stream), parts.take(stream));
        assert_eq!(whole.check(stream), parts.check(stream));
    }
});
