//! IP packets that the overlay carries whole: no input panics, what names its ends is complete, and an answer is let in only
//! after its question.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::packet::{Catch, Ends, Interceptor};

fuzz_target!(|bytes: &[u8]| {
    let Some(ends) = Ends::of(bytes) else { return };
    assert_eq!(ends.reversed().reversed(), ends);
    assert_eq!(Ends::of(&bytes[..bytes.len() - 1]), None, "a packet that is cut");
    let everything = ["0.0.0.0/0", "::/0"].into_iter().filter_map(|net| net.parse().ok()).collect();
    let node = NodeId(1);
    let mut rules = Interceptor::new(vec![Catch { node, to: everything, ports: None }]);
    assert!(rules.incoming(node, bytes, |_| false).is_err(), "nobody asked");
    assert_eq!(rules.outgoing(bytes), Some(node));
});
