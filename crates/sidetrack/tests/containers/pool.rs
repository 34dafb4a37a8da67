//! Pools that grow and shrink: by the flows that pass them; new flows go to the container with the fewest, old ones stay.

use crate::engine::engine;
use crate::health::health;
use crate::passing::children;
use crate::scene::{Echo, ask, connect, own, up};
use sidetrack_testkit::{eventually, in_namespace};
use std::collections::BTreeSet;

const LED: &str = "chain = ['f']\non_function_down = 'deny'\n";

#[test]
fn a_pool_follows_its_flows_and_old_flows_stay_where_they_are() {
    in_namespace(|| {
        let server = Echo::start();
        let keys = "replicas_min = 1\nreplicas_max = 3\nflows_per_replica = 2\nshrink_after_ms = 500";
        let node = up(server.address, LED, &own("f", keys));
        let pool = || {
            let health = health(&node, "f");
            (health["wanted"].as_u64(), health["well"].as_u64())
        };
        let names = || -> BTreeSet<String> {
            engine().containers(&format!("-{}-", children(&node))).into_iter().collect()
        };
        assert_eq!(pool(), (Some(1), Some(1)));
        let first = names();
        let mut streams: Vec<_> = (0..2).map(|_| connect(&node)).collect();
        for stream in &mut streams {
            assert_eq!(ask(stream, "old\n").expect("an answer"), "old\n");
        }
        for (flows, containers) in [(3, 2), (5, 3), (7, 3)] {
            while streams.len() < flows {
                let mut stream = connect(&node);
                assert_eq!(ask(&mut stream, "new\n").expect("an answer"), "new\n");
                streams.push(stream);
            }
            eventually("the pool follows", || pool() == (Some(containers), Some(containers)));
        }
        assert!(names().is_superset(&first), "the first one stays");
        // The later ones had none: the next flows are theirs.
        for _ in 0..4 {
            let mut stream = connect(&node);
            assert_eq!(ask(&mut stream, "new\n").expect("an answer"), "new\n");
            streams.push(stream);
        }
        let mut last = streams.swap_remove(0);
        drop(streams);
        eventually("fewer are enough", || pool() == (Some(1), Some(1)));
        assert_eq!(ask(&mut last, "still\n").expect("an answer"), "still\n", "an old flow goes on");
        drop(last);
        eventually("those that left are removed", || names().len() == 1);
        let mut stream = connect(&node);
        assert_eq!(ask(&mut stream, "again\n").expect("an answer"), "again\n");
    });
}
