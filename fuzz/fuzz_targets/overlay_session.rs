//! States of sessions: no bytes panic, a state is written as it was read, and an end that was read handles frames, however wrong. The
//! first byte says what follows.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::frame::SessionFrame;
use sidetrack_core::overlay::session::{Config, Input, Output, PathSet, Session};
use sidetrack_core::time::Instant;

fuzz_target!(|bytes: &[u8]| {
    let Some((turn, bytes)) = bytes.split_first() else { return };
    let (config, now) = (Config::default(), Instant::from_millis(1));
    let Ok(mut session) = Session::from_bytes(bytes, config, now) else { return };
    let again = session.to_bytes(now).expect("it is not over");
    let read = Session::from_bytes(&again, config, now).expect("its own state");
    assert_eq!(read.to_bytes(now), Some(again), "the same state");
    let (next, limit) = session.expects();
    let (end, _) = session.sent();
    let path_up = Input::PathUp { path: 0, next: end.saturating_sub(u64::from(*turn & 3)), limit: limit.max(end) };
    session.handle(now, path_up);
    session.handle(now, Input::Read(vec![1; session.room().min(40_000)]));
    session.handle(now, Input::Frame(0, SessionFrame::Data { offset: next, bytes: vec![2; 100] }));
    if turn & 4 != 0 {
        session.handle(now, Input::Eof);
    }
    while let n @ 1.. = session.deliverable().len() {
        session.handle(now, Input::Written(n));
    }
    for _ in 0..1000 {
        let Some(output) = session.poll(PathSet::ALL) else { break };
        if let Output::SendData { offset, .. } = output {
            assert!(!session.data(offset).is_empty());
        }
    }
});
