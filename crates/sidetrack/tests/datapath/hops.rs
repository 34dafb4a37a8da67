//! Hops that answer in pieces of every size and at every time: nothing that came is forgotten, and nothing is waited for
//! that is there.

use crate::node::Node;
use crate::peers::{Host, connect, expect, expect_end};
use crate::random::{Random, seed};
use crate::socks::v5_request;
use sidetrack_core::flow::EndReason;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

const TO: &str = "192.0.2.1:80";
const QUESTION: &[u8] = b"GET / HTTP/1.0\r\n\r\n";
const ANSWER: &[u8] = b"HTTP/1.0 200 OK\r\n\r\nhello";

/// What a hop hears before it answers, and what it answers; the last answer may have the server's bytes behind it.
struct Script {
    scheme: &'static str,
    options: &'static str,
    steps: Vec<(Vec<u8>, Vec<u8>)>,
}

fn scripts() -> Vec<Script> {
    let request = v5_request(1, TO);
    let reply = vec![5, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let asked = [&[5, 1, 0][..], &request].concat();
    let v6 = vec![6, 1, 0, 0, 0, 80, 0, 1, 192, 0, 2, 1];
    let v6_replies = vec![6, 0, 0, 0, 6, 0, 0, 0, 156, 65, 0, 1, 198, 51, 100, 7];
    let head = b"CONNECT 192.0.2.1:80 HTTP/1.1\r\nHost: 192.0.2.1:80\r\n\r\n";
    let script = |scheme, options, steps| Script { scheme, options, steps };
    vec![
        script("socks5", "", vec![(vec![5, 1, 0], vec![5, 0]), (request.clone(), reply.clone())]),
        script("socks5", "?optimistic=true", vec![(asked, [&[5, 0][..], &reply].concat())]),
        script("socks6", "", vec![(v6, v6_replies)]),
        script("http", "", vec![(head.to_vec(), b"HTTP/1.1 200 OK\r\n\r\n".to_vec())]),
    ]
}

impl Script {
    fn node(&self, hop: &Host) -> Node {
        let carries_data = self.scheme == "socks6" || !self.options.is_empty();
        let wait = if carries_data { "initial_data_wait_ms = 100" } else { "" };
        Node::start(&format!(
            "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{TO}'\n\
             [[rule]]\nname = 'all'\ncarrier = ['{}://{}{}']\n{wait}\n",
            self.scheme, hop.address, self.options
        ))
    }
}

/// Writes `bytes` in pieces that end at `cuts`, with pauses in between as long as `pause` says.
fn write_in_pieces(
    stream: &mut TcpStream,
    bytes: &[u8],
    cuts: &[usize],
    mut pause: impl FnMut() -> Duration,
) {
    let mut start = 0;
    for end in cuts.iter().copied().chain([bytes.len()]) {
        stream.write_all(&bytes[start..end]).unwrap();
        start = end;
        std::thread::park_timeout(pause());
    }
}

/// One flow; the hop cuts all that it says, the server's bytes and its end included, as `cuts` says.
fn one_flow(
    (script, node, hop): (&Script, &Node, &Host),
    mut cuts: impl FnMut(usize) -> Vec<usize>,
    mut pause: impl FnMut() -> Duration,
) {
    let mut client = connect(node.entry());
    client.write_all(QUESTION).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut accepted = hop.accept();
    for (index, (heard, answer)) in script.steps.iter().enumerate() {
        let is_last = index + 1 == script.steps.len();
        expect(&mut accepted, heard);
        let said = if is_last { [answer, ANSWER].concat() } else { answer.clone() };
        write_in_pieces(&mut accepted, &said, &cuts(said.len()), &mut pause);
    }
    accepted.shutdown(Shutdown::Write).unwrap();
    let mut rest = Vec::new();
    accepted.read_to_end(&mut rest).unwrap();
    // It came with the request or behind the reply.
    assert_eq!(rest, QUESTION);
    expect_end(&mut client, ANSWER);
    node.ends_with(EndReason::Ok);
}

#[test]
fn an_answer_cut_at_every_byte_is_heard() {
    for script in &scripts() {
        let hop = Host::new();
        let node = script.node(&hop);
        let longest = script.steps.iter().map(|(_, answer)| answer.len()).max().unwrap() + ANSWER.len();
        for cut in 0..longest {
            let pause = || Duration::from_micros(300);
            one_flow((script, &node, &hop), |length| vec![cut.min(length)], pause);
        }
        // Each byte by itself, and all at once.
        one_flow((script, &node, &hop), |length| (1..length).collect(), || Duration::from_micros(300));
        one_flow((script, &node, &hop), |_| Vec::new(), || Duration::ZERO);
    }
}

#[test]
fn answers_in_pieces_of_random_sizes_and_times_are_heard() {
    const ROUNDS: usize = 150;
    let mut random = Random::new(seed());
    for script in &scripts() {
        let hop = Host::new();
        let node = script.node(&hop);
        for _ in 0..ROUNDS {
            let mut other = Random::new(random.next());
            let cuts = |length: usize| {
                let mut cuts: Vec<_> = (0..random.below(4)).map(|_| random.below(length)).collect();
                cuts.sort_unstable();
                cuts
            };
            // Mostly none: what is written at once or nearly so is what an event loop may miss.
            let pause = || Duration::from_micros([0, 0, 0, 20, 100, 1500][other.below(6)]);
            one_flow((script, &node, &hop), cuts, pause);
        }
    }
}
