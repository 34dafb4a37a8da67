//! Invitations, tables of nodes, and the messages of a join: no input panics, a decision stands, and what was read can be written
//! and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::invitation::table::Table;
use sidetrack_core::invitation::{Invitation, Message};
use sidetrack_core::tunnel::{BODY_MAX, Parsed};

fn message(bytes: &[u8]) {
    let whole = Message::parse(bytes);
    assert!(whole != Parsed::Incomplete || bytes.len() < BODY_MAX + 3);
    for end in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
        let part = Message::parse(&bytes[..end]);
        assert!(part == Parsed::Incomplete || part == whole, "{part:?} became {whole:?}");
    }
    let Parsed::Message(message, consumed) = whole else { return };
    assert!(consumed <= bytes.len());
    let written = message.encode().expect("it fitted when it came");
    assert_eq!(Message::parse(&written), Parsed::Message(message, written.len()));
}

fuzz_target!(|bytes: &[u8]| {
    message(bytes);
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(invitation) = text.parse::<Invitation>() {
        let again = invitation.to_text().expect("it fitted when it came");
        assert_eq!(again.parse(), Ok(invitation));
    }
    let _ = text.parse::<Table>();
});
