//! Links, sessions and records live by the monotonic clock: a change of the wall clock costs none of them anything.

use crate::source::{sources, words};

/// What tells the time on the wall.
const WALL: [&str; 4] = ["SystemTime", "UNIX_EPOCH", "CLOCK_REALTIME", "UnixTime"];

/// The one function of the overlay that asks for it, and the lines that may call it: where our records begin to count after a
/// restart (a node whose clock was set back outbids what others remember of it), and a stamp for people.
const ASKS: &str = "fn unix_ms() -> u64 {";
const MAY_CALL: [&str; 2] = ["disseminate::Config::new(", "self.links_changed_unix_ms = "];

#[test]
fn the_overlay_asks_the_wall_clock_for_stamps_only() {
    let (mut asked, mut called) = (0, 0);
    for source in sources("crates/sidetrack/src/overlay") {
        let own = source.code.find(ASKS).map(|at| at..at + source.code[at..].find("\n}").expect("its end"));
        for (at, word) in words(&source.code) {
            let line = source.code[..at].rfind('\n').map_or(0, |start| start + 1);
            let line = source.code[line..].lines().next().unwrap_or_default();
            let is_import = line.trim_start().starts_with("use ");
            if WALL.contains(&word) && !is_import {
                let inside = own.as_ref().is_some_and(|own| own.contains(&at));
                assert!(
                    inside,
                    "{}: {word}: what passes is measured by the monotonic clock",
                    source.place(at)
                );
                asked += 1;
            }
            if word == "unix_ms" && !line.contains(ASKS) {
                let may = MAY_CALL.iter().any(|call| line.contains(call));
                assert!(may, "{}: for a stamp only: {}", source.place(at), line.trim());
                called += 1;
            }
        }
    }
    assert!(asked > 0 && called == MAY_CALL.len(), "the wall stands beside the road: {asked}, {called}");
}
