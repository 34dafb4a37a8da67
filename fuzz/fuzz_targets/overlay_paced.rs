//! A paced link: no input panics, memory stays bounded, and the link sends no more than its rate. Each input is a list of steps:
//! the milliseconds that pass, the length of a frame, the frame.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::frame::Frame;
use sidetrack_core::overlay::paced::{CREDIT_FIRST, Config, Input, Link, Output, RECEIVE_MAX, Read, SEND_MAX, STREAMS_MAX};
use sidetrack_core::time::Instant;
use std::time::Duration;

const ROOM: usize = 1_400;

fuzz_target!(|bytes: &[u8]| {
    let config = Config { rate: 8_000_000, around_bytes: 57, is_even: true, first: (1 << 32) - 2 };
    let (mut link, mut now) = (Link::new(config, Instant::ZERO), Instant::ZERO);
    let (mut rest, mut sent) = (bytes, 0);
    while let [pass_ms, length, tail @ ..] = rest {
        let (frame, after) = tail.split_at(usize::from(*length).min(tail.len()));
        rest = after;
        now = now + Duration::from_millis((*pass_ms).into());
        match Frame::from_datagram(frame) {
            Ok(Some(frame)) => link.handle(now, Input::Came(frame, usize::from(*length))),
            _ => link.handle(now, Input::Tick),
        }
        while let Some(output) = link.poll() {
            match output {
                Output::Opened(name) if name % 3 == 0 => link.abandon(name),
                Output::Opened(name) => {
                    link.write(name, &[1; 3_000]);
                }
                Output::Readable(name) => {
                    if link.read(name, &mut [0; 100]) == Read::Ended {
                        link.close(name);
                    }
                }
                Output::Agreed(_) | Output::Writable(_) | Output::Down => {}
            }
        }
        if pass_ms % 7 == 0
            && let Some(name) = link.open()
        {
            link.write(name, &[2; 5_000]);
            link.close(name);
        }
        while let Some(frame) = link.transmit(now, ROOM) {
            let bytes = frame.to_datagram();
            assert!(bytes.len() <= ROOM);
            assert_eq!(Frame::from_datagram(&bytes), Ok(Some(frame)));
            sent += bytes.len() + 57;
        }
        let view = link.view();
        assert!(view.streams <= 3 * STREAMS_MAX);
        assert!(view.held_bytes <= (SEND_MAX + RECEIVE_MAX + 3 * STREAMS_MAX * CREDIT_FIRST as usize) as u64);
        // 1 byte in 1 us, and the burst of 4 ms.
        assert!(sent as u128 <= now.as_nanos() as u128 / 1_000 + 4_100, "{sent} bytes by {now:?}");
    }
});
