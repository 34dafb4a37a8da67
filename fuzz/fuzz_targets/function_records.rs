//! Bytes between the two ends of an encrypting pair: no panic, nothing but what was sealed comes out, and every cut gives the
//! same end. The first byte says where a sealed stream is cut off, the rest is put there.
#![no_main]

#[allow(dead_code, reason = "this target uses a part of the shared file")]
#[path = "../../crates/core/tests/chain/drive.rs"]
mod drive;
#[allow(dead_code, reason = "this target uses a part of the shared file")]
#[path = "../../crates/core/tests/chain/toy.rs"]
mod toy;

use drive::Driven;
use libfuzzer_sys::fuzz_target;
use sidetrack_core::flow::Side;
use sidetrack_core::function::{End, Records};

const MESSAGE: &[u8] = b"the patient's record";

fn opened(wire: &[u8], cut: usize) -> (Vec<u8>, bool) {
    let mut far = Driven::new(vec![Box::new(Records::new(toy::Toy::shared(5, 2), End::Decrypt))]);
    let mut parts = wire.chunks(cut.max(1));
    let taken = parts.all(|part| far.offer(Side::Client, part).is_ok());
    let ended = taken && far.end(Side::Client).is_ok_and(|done| done);
    (far.out[0].clone(), ended)
}

fuzz_target!(|bytes: &[u8]| {
    let Some((at, rest)) = bytes.split_first() else { return };
    let mut near = Driven::new(vec![Box::new(Records::new(toy::Toy::shared(5, 1), End::Encrypt))]);
    let sealed = near.offer(Side::Client, MESSAGE).is_ok() && near.end(Side::Client).is_ok();
    assert!(sealed);
    let whole = near.out[0].clone();
    let at = usize::from(*at).min(whole.len());
    let wire = [&whole[..at], rest].concat();
    let (plain, ended) = opened(&wire, wire.len());
    assert!(MESSAGE.starts_with(&plain));
    assert!(!ended || wire == whole || wire.starts_with(&whole));
    // What came before a broken record is given out only where it was cut off from it.
    let (bytewise, ended_too) = opened(&wire, 1);
    assert!(MESSAGE.starts_with(&bytewise) && bytewise.starts_with(&plain));
    assert_eq!(ended, ended_too);
    assert!(!ended || plain == bytewise);
});
