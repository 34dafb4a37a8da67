//! Real-time links: a hop that loses packets costs nearly none, without a copy of each packet.
//!
//! ```text
//! a -- 10.8.1.0/24 -- r1 -- 10.7.1.0/24 -- r2 -- 10.9.1.0/24 -- b      r1 and r2 lose some of each other's datagrams
//! ```

use crate::node::{Up, at};
use crate::scene::{Keys, status, wait_for};
use crate::streams::{arrives, end, link, sockets, stream, to_b};
use crate::tools::{refused, run};
use serde_json::Value;
use sidetrack_testkit::{Node, is_root};
use std::time::Duration;

/// Packets of one stream.
const COUNT: u32 = 1500;

/// Between two packets.
const PACE: Duration = Duration::from_millis(1);

/// Most runs of a stream: it is repeated if a busy machine declared a link dead.
const RUNS: usize = 5;

/// Two ends and two relays, as drawn at the head of the file.
struct Chain {
    a: Node,
    b: Node,
    /// a, r1, r2, b.
    ups: [Up; 4],
    _relays: [Node; 2],
}

impl Chain {
    /// Nodes whose packets travel by this service.
    fn new(service: &str) -> Self {
        let [a, b, r1, r2] = [(); 4].map(|()| Node::new());
        let keys = Keys::new(&["a", "b", "r1", "r2"]);
        link(&a, &r1, "10.8.1", ["to-r1", "to-a"]);
        link(&r1, &r2, "10.7.1", ["to-r2", "to-r1"]);
        link(&b, &r2, "10.9.1", ["to-r2", "to-b"]);
        let relay = |node: &Node, name: &str, dials: &[_], listen: &str| {
            let text = keys.section(name, dials, true).replace("\"127.0.0.1:0\"", listen);
            node.run(move || Up::start("", &text))
        };
        let up_r2 = relay(&r2, "r2", &[], "[\"10.7.1.2:8100\", \"10.9.1.2:8100\"]");
        let up_r1 = relay(&r1, "r1", &[("r2", at("10.7.1.2", 8100))], "\"10.8.1.2:8100\"");
        let up_a = end(&a, (&keys, "a", "b"), (1, 2), &[("r1", at("10.8.1.2", 8100))], service);
        let up_b = end(&b, (&keys, "b", "a"), (2, 1), &[("r2", at("10.9.1.2", 8100))], service);
        Self { a, b, ups: [up_a, up_r1, up_r2, up_b], _relays: [r1, r2] }
    }

    /// How often a link was declared dead.
    fn fallen(&mut self) -> usize {
        let logs = self.ups.iter_mut().map(Up::log_so_far);
        logs.map(|log| log.matches("overlay link down").count()).sum()
    }

    /// Sends a stream while the hop in the middle loses 2 % both ways. Returns how many packets did not arrive.
    fn lost(&mut self) -> usize {
        run(&self.ups[2], &["link", "set", "r1", "--loss", "2"]);
        run(&self.ups[1], &["link", "set", "r2", "--loss", "2"]);
        for _ in 0..RUNS {
            wait_for(&self.ups[0], "a way to b", |status| {
                arrives(status, 3) || to_b(status)["by_datagram"] == true
            });
            let before = self.fallen();
            let times = stream(sockets(&self.a, &self.b), (COUNT, PACE), || ());
            assert!(times.iter().all(|times| *times < 2), "delivered twice");
            if self.fallen() == before {
                return times.iter().filter(|times| **times == 0).count();
            }
        }
        panic!("the machine took links for dead in each of {RUNS} runs");
    }
}

fn count(status: &Value, what: &str) -> u64 {
    status["spread"]["real_time"][what].as_u64().expect("a count")
}

#[test]
fn a_lossy_hop_costs_a_real_time_service_nearly_no_packet() {
    if !is_root() {
        return;
    }
    let lost_by_best_effort = Chain::new("link = \"best-effort\"\n").lost();
    assert!(lost_by_best_effort >= 8, "2 % of {COUNT}: {lost_by_best_effort}");

    let mut chain = Chain::new("link = \"real-time\"\ndeadline_ms = 5000\n");
    wait_for(&chain.ups[0], "the service", |status| arrives(status, 3));
    let lost = chain.lost();
    assert!(lost < 2, "{lost} of {COUNT} by real time, {lost_by_best_effort} by best effort");
    let [at_a, at_r1, at_r2, at_b] = [0, 1, 2, 3].map(|at| status(&chain.ups[at]));
    assert_eq!(to_b(&at_a)["services"][0]["kind"], "real-time", "{at_a:#}");
    assert!(at_a["links"][0]["real_time"] == true && to_b(&at_a)["services"][0]["unrecovered"].is_null());
    // The hop recovers its losses alone: r2 has requested them, r1 has sent them again, and few more.
    assert!(count(&at_r2, "requested") >= 8 && count(&at_r2, "recovered") >= 8, "{at_r2:#}");
    assert!(count(&at_r1, "repeated") >= 8, "{at_r1:#}");
    assert!(count(&at_r1, "repeated") * 10 < count(&at_r1, "sent"), "{at_r1:#}");
    assert!(count(&at_r1, "sent") >= u64::from(COUNT), "{at_r1:#}");
    assert!(at_b["spread"]["delivered"]["shortest"].as_u64() >= Some(u64::from(COUNT) - 1), "{at_b:#}");
    let printed = run(&chain.ups[1], &["status"]);
    assert!(printed.contains("real-time links "), "{printed}");
    assert!(run(&chain.ups[0], &["path", "b"]).contains("real-time, shortest: a -> r1, "));
    let ping = run(&chain.ups[0], &["ping", "b", "-c", "1", "--kind", "real-time", "--deadline", "5000"]);
    assert!(ping.contains(" ms over a -> r1, "), "{ping}");
    assert!(
        run(&chain.ups[0], &["ping", "b", "-c", "1", "--kind", "reliable"]).contains("a -> r1 -> r2 -> b")
    );
    let refused = refused(&chain.ups[0], &["ping", "b", "-c", "1", "--kind", "fast"]);
    assert!(refused.contains("there is no such service for packets"), "{refused}");
    let metrics = crate::node::admin::show(&chain.ups[2], "/metrics");
    assert!(metrics.contains("sidetrack_overlay_packets_total{fate=\"recovered\"}"), "{metrics}");
}
