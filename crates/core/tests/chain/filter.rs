//! Filtering by host and by words.

use super::drive::{Driven, cut, numbers};
use sidetrack_core::flow::{EndReason, HostName, Side};
use sidetrack_core::function::{Directions, Filter, FilterSpec, Interest, Stop, Words};
use std::sync::Arc;

fn filter(spec: FilterSpec, host: Option<&str>) -> Result<Driven, Stop> {
    let words = Words::new(&spec.deny_words, spec.ignore_case).unwrap();
    let host: Option<HostName> = host.map(|host| host.parse().unwrap());
    let filter = Filter::new(Arc::new(spec), Arc::new(words), host.as_ref())?;
    Ok(Driven::new(vec![Box::new(filter)]))
}

fn words(words: &[&str]) -> FilterSpec {
    FilterSpec {
        deny_words: words.iter().map(|word| word.as_bytes().to_vec()).collect(),
        ..FilterSpec::default()
    }
}

fn hosts(allow: &[&str], deny: &[&str]) -> FilterSpec {
    let list = |list: &[&str]| list.iter().map(|host| host.parse().unwrap()).collect();
    FilterSpec { allow_hosts: list(allow), deny_hosts: list(deny), ..FilterSpec::default() }
}

#[test]
fn no_cut_hides_a_word_and_its_last_byte_never_passes() {
    for seed in 0..600 {
        let mut next = numbers(seed);
        let before: Vec<u8> = (0..next(40)).map(|_| b"secr"[next(4) as usize]).collect();
        let bytes = [&before, &b"secret"[..], b" and more"].concat();
        let at = bytes.windows(6).position(|part| part == b"secret").unwrap();
        let mut driven = filter(words(&["nothing", "secret"]), None).unwrap();
        let most = 1 + next(12) as usize;
        let stop = cut(&bytes, most, &mut next)
            .into_iter()
            .find_map(|part| driven.offer(Side::Client, &part).err())
            .unwrap_or_else(|| panic!("seed {seed}: it passed"));
        assert_eq!(stop.reason, EndReason::FunctionRefused);
        assert_eq!(stop.detail, "function 'f0': the client said \"secret\"");
        assert!(driven.out[0].len() < at + 6, "seed {seed}");
        assert!(bytes.starts_with(&driven.out[0]));
    }
}

#[test]
fn what_holds_no_word_passes_as_it_is() {
    for seed in 0..100 {
        let mut next = numbers(seed);
        let bytes: Vec<u8> = (0..next(5000)).map(|_| b"secr t"[next(6) as usize]).collect();
        let bytes = String::from_utf8(bytes).unwrap().replace("secret", "secre t").into_bytes();
        let mut driven = filter(words(&["secret"]), None).unwrap();
        for part in cut(&bytes, 50, &mut next) {
            assert!(driven.offer(Side::Server, &part).unwrap());
        }
        assert!(driven.end(Side::Server).unwrap());
        assert_eq!(driven.out[1], bytes);
    }
    let quiet = FilterSpec { ignore_case: true, directions: Directions::Down, ..words(&["Secret"]) };
    let mut driven = filter(quiet, None).unwrap();
    assert!(driven.offer(Side::Client, b"SECRET").unwrap());
    assert!(driven.offer(Side::Server, b"SeC").unwrap() && driven.offer(Side::Server, b"ReT").is_err());
}

const REQUEST: &[u8] = b"GET /x HTTP/1.1\r\nHost: records.hospital.example\r\nAccept: */*\r\n\r\n";

#[test]
fn the_host_is_found_in_the_first_bytes_wherever_they_are_cut() {
    let spec = hosts(&["*.hospital.example"], &[]);
    for first in 1..REQUEST.len() {
        let mut driven = filter(spec.clone(), None).unwrap();
        assert_eq!(driven.chain.interest(Side::Client), Interest::Bytes);
        assert_eq!(driven.chain.interest(Side::Server), Interest::Nothing);
        assert!(driven.offer(Side::Client, &REQUEST[..first]).unwrap());
        assert!(driven.offer(Side::Client, &REQUEST[first..]).unwrap());
        assert_eq!(driven.out[0], REQUEST);
        assert_eq!(driven.chain.interest(Side::Client), Interest::Nothing, "it is out of the way then");
        let mut denied = filter(hosts(&[], &["records.hospital.example"]), None).unwrap();
        let result = denied
            .offer(Side::Client, &REQUEST[..first])
            .and_then(|_| denied.offer(Side::Client, &REQUEST[first..]));
        assert_eq!(result.map_err(|stop| stop.reason), Err(EndReason::FunctionRefused), "cut at {first}");
        assert!(denied.out[0].is_empty(), "nothing passes before the host is known");
    }
}

#[test]
fn who_names_no_host_passes_a_list_of_denials_only() {
    let ssh = b"SSH-2.0-OpenSSH_9.2\r\n";
    let mut driven = filter(hosts(&[], &["a.example"]), None).unwrap();
    assert!(driven.offer(Side::Client, ssh).unwrap());
    assert_eq!(driven.out[0], ssh);
    assert!(filter(hosts(&["a.example"], &[]), None).unwrap().offer(Side::Client, ssh).is_err());
    // A client that says nothing, or not enough, and ends.
    for said in [&b""[..], b"GET / HT"] {
        let mut open = filter(hosts(&[], &["a.example"]), None).unwrap();
        assert!(open.offer(Side::Client, said).unwrap() && open.end(Side::Client).unwrap());
        assert_eq!(open.out[0], said);
        let mut closed = filter(hosts(&["a.example"], &[]), None).unwrap();
        assert!(closed.offer(Side::Client, said).and_then(|_| closed.end(Side::Client)).is_err());
    }
}

#[test]
fn a_host_that_is_known_decides_at_once() {
    assert!(filter(hosts(&["b.example"], &[]), Some("a.example")).is_err());
    assert!(filter(hosts(&["*.example"], &["a.example"]), Some("a.example")).is_err());
    let known = filter(hosts(&["a.example"], &[]), Some("a.example")).unwrap();
    assert_eq!(known.chain.interest(Side::Client), Interest::Nothing);
}

#[test]
fn words_are_found_in_the_first_bytes_too() {
    let spec = FilterSpec { deny_words: vec![b"/x".to_vec()], ..hosts(&[], &["other.example"]) };
    assert!(filter(spec, None).unwrap().offer(Side::Client, REQUEST).is_err());
}
