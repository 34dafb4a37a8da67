//! Hand-overs: no bytes panic, and the parts do not depend on how the bytes are cut.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::upgrade::{BODY_MAX, Found, Reader};

fn all(reader: &mut Reader, found: &mut Vec<Found>) -> bool {
    loop {
        match reader.next_part() {
            Ok(Some(part)) => found.push(part),
            Ok(None) => return true,
            Err(error) => {
                assert_eq!(reader.next_part(), Err(error), "an error stays");
                return false;
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let (mut whole, mut found) = (Reader::default(), Vec::new());
    whole.push(bytes);
    let good = all(&mut whole, &mut found);
    let (mut cut, mut again) = (Reader::default(), Vec::new());
    let good_again = bytes.chunks(3).all(|some| {
        cut.push(some);
        all(&mut cut, &mut again)
    });
    // Cut bytes may end before the reader sees what is wrong; it is never the other way round.
    assert!(found == again && (good_again || !good));
    for part in &found {
        if let Found::Part(part) = part {
            assert!(part.body.len() <= BODY_MAX);
        }
    }
});
