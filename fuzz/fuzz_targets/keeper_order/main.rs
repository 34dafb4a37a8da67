//! Orders to the keeper, as a main process that was taken over could write them: each is refused, or is within its bounds and
//! means the same when it is written again.
#![no_main]
#![allow(dead_code, unused_imports, reason = "a module of the program, of which this uses a part")]

#[path = "../../../crates/sidetrack/src/keeper/order.rs"]
mod order;

use libfuzzer_sys::fuzz_target;
use order::Order;

fuzz_target!(|bytes: &[u8]| {
    let Ok(order) = serde_json::from_slice::<Order>(bytes) else { return };
    assert!(order.redirects.len() <= order::PARTS_MAX && order.paths.len() <= order::PARTS_MAX);
    assert!(order.ranges() <= bytes.len(), "nothing is multiplied");
    let again = serde_json::to_vec(&order).expect("JSON");
    assert_eq!(serde_json::from_slice::<Order>(&again).expect("what we write"), order);
});
