//! The generator against a tiny server on loopback.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use super::run;
use crate::load::{Spec, Via, Work};

const BODY: &str = "0123456789";

/// Serves every connection with `serve` on a thread of its own until the process ends.
fn server(serve: fn(TcpStream)) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    });
    address
}

fn spec(dial: SocketAddr, work: Work, via: Via, max_requests: u64) -> Spec {
    Spec {
        work,
        connections: 4,
        dial,
        via,
        destination: "192.0.2.1:80".parse().expect("a literal"),
        authority: None,
        tls: false,
        path: "/small".into(),
        fast_open: false,
        warmup_ms: 0,
        window_ms: 60_000,
        max_requests,
        per_second: None,
    }
}

/// Reads one request head; `None` at the end of the stream.
fn request(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    String::from_utf8(head).ok()
}

fn http(mut stream: TcpStream) {
    while let Some(head) = request(&mut stream) {
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{BODY}", BODY.len());
        if stream.write_all(answer.as_bytes()).is_err() || head.contains("Connection: close") {
            return;
        }
    }
}

/// A SOCKS6 server of the draft that sends each byte of its replies alone, then serves HTTP itself.
fn socks6(mut stream: TcpStream) {
    let mut connect = [0; 20];
    if stream.read_exact(&mut connect).is_err() {
        return;
    }
    assert_eq!(connect[..12], [6, 1, 0, 8, 0, 80, 0, 1, 192, 0, 2, 1]);
    for byte in [6, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0] {
        if stream.write_all(&[byte]).is_err() {
            return;
        }
    }
    http(stream);
}

fn refusing_socks5(mut stream: TcpStream) {
    let mut greeting = [0; 3];
    let _ = stream.read_exact(&mut greeting).and_then(|()| stream.write_all(&[5, 0xff]));
}

#[test]
fn each_kind_of_work_counts_its_answers() {
    for work in [Work::NewConnection, Work::KeepAlive, Work::Bulk] {
        let report = run(&spec(server(http), work, Via::Plain, 50), || ()).expect("epoll works");
        assert!(report.requests >= 50, "{work:?}: {report:?}");
        assert!(report.errors.is_empty(), "{work:?}: {report:?}");
        assert_eq!(report.bytes, report.requests * 49, "{work:?}: head of 39 and body of 10 bytes");
        assert!(report.p50_ns > 0 && report.p99_ns >= report.p50_ns);
    }
}

#[test]
fn idle_connections_stay_open_and_end_the_warm_up() {
    let mut spec = spec(server(http), Work::Idle, Via::Plain, u64::MAX);
    (spec.warmup_ms, spec.window_ms) = (60_000, 1);
    let report = run(&spec, || ()).expect("epoll works");
    assert_eq!((report.requests, report.open), (4, 4));
}

#[test]
fn replies_that_come_byte_by_byte_are_understood() {
    let via = Via::Socks6Draft { initial_data: true };
    let report = run(&spec(server(socks6), Work::NewConnection, via, 20), || ()).expect("epoll works");
    assert!(report.requests >= 20, "{report:?}");
    assert!(report.errors.is_empty(), "{report:?}");
}

#[test]
fn a_refusal_is_counted_by_kind() {
    let report =
        run(&spec(server(refusing_socks5), Work::NewConnection, Via::Socks5, 8), || ()).expect("epoll works");
    assert_eq!(report.requests, 0);
    assert!(report.errors.get("SOCKS5 method refused").is_some_and(|count| *count >= 8), "{report:?}");
}

#[test]
fn a_rate_is_spread_over_time() {
    let seconds = Duration::from_secs_f64;
    assert_eq!(super::due(10_000, seconds(0.0)), 1);
    assert_eq!(super::due(10_000, seconds(0.0005)), 6);
    assert_eq!(super::due(10_000, seconds(2.0)), 20_001);
}
