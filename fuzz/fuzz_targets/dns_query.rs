//! Queries of DNS and answers of name servers: no bytes panic, a reply has the id of its query and no more bytes than the client takes, and one
//! that asks to come by TCP has no records. The first two bytes of the input are the length of the query; the rest is what a name server says.
#![no_main]
#![allow(dead_code, reason = "only what reads bytes is tried here")]

#[path = "../../crates/sidetrack/src/dns/answer.rs"]
mod answer;

use answer::{Known, Transport};
use hickory_proto::op::Message;
use libfuzzer_sys::fuzz_target;
use sidetrack_core::names::NameTable;
use sidetrack_core::time::Instant;

fuzz_target!(|data: &[u8]| {
    let Some((length, rest)) = data.split_first_chunk::<2>() else { return };
    let (query, server) = rest.split_at(usize::from(u16::from_be_bytes(*length)).min(rest.len()));
    let mut names = NameTable::new(4);
    let replies = [
        answer::answer(query, Transport::Udp, &mut names, Instant::ZERO, &Known::Nothing),
        answer::by_tcp(query),
        answer::failed(query),
        Message::from_vec(server)
            .ok()
            .and_then(|found| answer::relayed(query, Transport::Udp, &found, (1, false))),
    ];
    for reply in replies.into_iter().flatten() {
        assert_eq!(reply.get(..2), query.get(..2));
        assert!(reply.len() <= 1232);
        assert!(reply.get(2).is_some_and(|flags| flags & 0x80 != 0), "a reply");
    }
    if let Some(reply) = answer::by_tcp(query) {
        assert_eq!(reply.get(6..10), Some(&[0; 4][..]));
    }
    if let Ok(request) = Message::from_vec(query) {
        answer::is_reverse_of_others(&request, &names);
    }
    answer::asked(query);
});
