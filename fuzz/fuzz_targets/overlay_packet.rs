//! IP packets that the overlay carries whole: no input panics, what names its ends is complete, and an answer is let in only
//! after its question; a clamped SYN stays what it is. Conversations of another process are read or refused as a whole.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::packet::{Catch, Ends, Interceptor, Receiver, Refused, Target};
use sidetrack_core::overlay::service::{LinkKind, Service};
use sidetrack_core::overlay::{NodeId, mss};

fuzz_target!(|bytes: &[u8]| {
    let mut known = Interceptor::new(Vec::new());
    if known.know(bytes).is_ok() {
        assert_eq!(known.known(), bytes, "conversations are written as they were read");
    }
    let Some(ends) = Ends::of(bytes) else { return };
    assert_eq!(ends.reversed().reversed(), ends);
    assert_eq!(Ends::of(&bytes[..bytes.len() - 1]), None, "a packet that is cut");
    let everything = ["0.0.0.0/0", "::/0"].into_iter().filter_map(|net| net.parse().ok()).collect();
    let node = NodeId(1);
    let service = Service::new(LinkKind::Reliable);
    let mut rules = Interceptor::new(vec![Catch {
        target: Target::Node(node),
        to: everything,
        ports: None,
        service,
    }]);
    assert!(rules.incoming(node, bytes, |_| Err(Refused::Denied)).is_err(), "no rule lets it begin");
    assert_eq!(rules.outgoing(bytes), Some((Receiver::Node(node), service)));
    let mut clamped = bytes.to_vec();
    mss::clamp(&mut clamped, 1400);
    assert_eq!(Ends::of(&clamped), Some(ends), "the same ends");
    assert!(!mss::clamp(&mut clamped, 1400), "once is enough");
});
