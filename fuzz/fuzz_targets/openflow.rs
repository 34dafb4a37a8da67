//! OpenFlow from a switch: no bytes panic, neither the codec nor the controller, and any split gives the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::openflow::{
    Controller, ControllerConfig, ControllerInput, ControllerOutput, Decoder, MESSAGE_MAX, Message, Version, read,
};
use sidetrack_core::time::Instant;

/// The messages of a stream, until it is malformed.
fn messages(parts: &[&[u8]]) -> Vec<Message> {
    let mut decoder = Decoder::new();
    let mut found = Vec::new();
    for part in parts {
        decoder.push(part);
        while let Ok(Some(frame)) = decoder.frame() {
            assert!(frame.body.len() <= MESSAGE_MAX);
            found.extend(read(&frame).ok());
        }
    }
    found
}

/// What a controller of both versions answers.
fn answers(parts: &[&[u8]]) -> Vec<ControllerOutput> {
    let config = ControllerConfig {
        versions: Version::ALL.into(),
        ports: std::collections::BTreeMap::new(),
        through: std::collections::BTreeMap::new(),
        run: 1,
        clear: false,
        master: None,
        shared: false,
        table: 0,
        pairs: true,
    };
    let mut controller = Controller::new(config, Instant::ZERO);
    controller.handle(Instant::ZERO, ControllerInput::Connected);
    for part in parts {
        controller.handle(Instant::ZERO, ControllerInput::Bytes(part));
    }
    std::iter::from_fn(|| controller.poll()).collect()
}

fuzz_target!(|bytes: &[u8]| {
    let said = answers(&[bytes]);
    let whole = messages(&[bytes]);
    for at in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
        let (first, second) = bytes.split_at(at);
        assert_eq!(messages(&[first, second]), whole);
        assert_eq!(answers(&[first, second]), said);
    }
});
