//! The truth table of docs/half-close.md: what one side does, and what the other sees. Every row with the client and
//! with the server as the one who acts, directly and through hops.

use crate::path::{Hop, Path};
use crate::peers::{Host, expect, expect_end, expect_reset, read_all, reset};
use crate::random::Random;
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_testkit::awaited;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

/// Plays one row on every path: `row` gets the side that acts and the other one.
fn each(row: impl Fn(TcpStream, TcpStream), reason: impl Fn(Side) -> EndReason) {
    on(&[&[], &[Hop::new("socks5")], &[Hop::new("socks6"), Hop::new("socks5")]], row, reason);
}

fn on(paths: &[&[Hop]], row: impl Fn(TcpStream, TcpStream), reason: impl Fn(Side) -> EndReason) {
    for hops in paths {
        for acting in [Side::Client, Side::Server] {
            let host = Host::new();
            let path = Path::over(hops, host.address, "");
            let client = path.open();
            let server = host.accept();
            path.await_made();
            match acting {
                Side::Client => row(client, server),
                Side::Server => row(server, client),
            }
            path.ends_with(reason(acting));
        }
    }
}

fn ok(_: Side) -> EndReason {
    EndReason::Ok
}

fn reset_by(side: Side) -> EndReason {
    match side {
        Side::Client => EndReason::ClientReset,
        Side::Server => EndReason::ServerReset,
    }
}

/// Writes until nothing more fits anywhere on the path; says how many bytes that were.
fn fill(mut stream: &TcpStream) -> usize {
    stream.set_nonblocking(true).unwrap();
    let bytes = vec![7; 65_536];
    let (mut blocked, mut written) = (0, 0);
    // What is on its way makes room for some more: blocked twenty times in a row, a pause each, is full.
    while blocked < 20 {
        match stream.write(&bytes) {
            Ok(n) => (blocked, written) = (0, written + n),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                blocked += 1;
                std::thread::park_timeout(std::time::Duration::from_millis(2));
            }
        }
    }
    stream.set_nonblocking(false).unwrap();
    written
}

#[test]
fn fin_is_passed_on_and_the_other_direction_goes_on() {
    let row = |mut a: TcpStream, mut b: TcpStream| {
        a.write_all(b"last words").unwrap();
        a.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut b, b"last words");
        b.write_all(b"answer").unwrap();
        expect(&mut a, b"answer");
        b.write_all(b"and more").unwrap();
        b.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut a, b"and more");
    };
    each(row, ok);
}

#[test]
fn fin_at_once_without_a_byte() {
    let row = |mut a: TcpStream, mut b: TcpStream| {
        a.shutdown(Shutdown::Write).unwrap();
        b.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut a, b"");
        expect_end(&mut b, b"");
    };
    each(row, ok);
}

#[test]
fn fin_comes_after_the_last_byte_that_is_under_way() {
    let row = |mut a: TcpStream, mut b: TcpStream| {
        let bytes = Random::new(1).bytes(3 << 20);
        let filled = std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                a.write_all(&bytes).unwrap();
                a.shutdown(Shutdown::Write).unwrap();
            });
            // Nothing is read before the path is as full as it gets.
            let filled = fill(&b);
            let (got, end) = read_all(&mut b);
            end.unwrap();
            assert!(got == bytes, "{} of {} bytes, or others", got.len(), bytes.len());
            sending.join().unwrap();
            filled
        });
        b.shutdown(Shutdown::Write).unwrap();
        let (got, end) = read_all(&mut a);
        end.unwrap();
        assert_eq!(got.len(), filled);
    };
    each(row, ok);
}

#[test]
fn a_reset_is_a_reset() {
    let row = |a: TcpStream, mut b: TcpStream| {
        reset(a);
        expect_reset(&mut b);
    };
    each(row, reset_by);
}

#[test]
fn what_came_before_a_reset_goes_first() {
    let row = |mut a: TcpStream, mut b: TcpStream| {
        a.write_all(b"before").unwrap();
        reset(a);
        expect(&mut b, b"before");
        expect_reset(&mut b);
    };
    each(row, reset_by);
}

#[test]
fn what_came_before_a_reset_goes_first_through_a_pipe() {
    let row = |mut a: TcpStream, mut b: TcpStream| {
        let bytes = Random::new(2).bytes(700_000);
        std::thread::scope(|scope| {
            scope.spawn(|| a.write_all(&bytes).unwrap());
            expect(&mut b, &bytes);
        });
        a.write_all(b"before").unwrap();
        reset(a);
        expect(&mut b, b"before");
        expect_reset(&mut b);
    };
    each(row, reset_by);
}

#[test]
fn a_reset_after_fin_ends_the_flow_though_the_other_side_is_silent() {
    let row = |a: TcpStream, mut b: TcpStream| {
        a.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut b, b"");
        reset(a);
        // A socket that has read FIN tells of a reset only when it is asked.
        let error = awaited("the reset arrives", || b.take_error().unwrap());
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    };
    each(row, reset_by);
}

#[test]
fn closing_with_bytes_unread_is_a_reset() {
    let row = |a: TcpStream, mut b: TcpStream| {
        b.write_all(b"unread").unwrap();
        assert_eq!(a.peek(&mut [0; 1]).unwrap(), 1);
        drop(a);
        expect_reset(&mut b);
    };
    each(row, reset_by);
}

#[test]
fn writing_to_a_side_that_is_gone_is_a_reset() {
    let row = |a: TcpStream, mut b: TcpStream| {
        drop(a);
        // Looks like a half-close until the first byte comes back with a reset.
        expect_end(&mut b, b"");
        let error = awaited("the reset arrives", || b.write_all(b"anybody there?").err());
        assert!(matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset), "{error}");
    };
    each(row, reset_by);
}

#[test]
fn a_reset_does_not_wait_for_a_side_that_does_not_read() {
    let row = |a: TcpStream, mut b: TcpStream| {
        assert!(fill(&a) > 0);
        reset(a);
        let error = awaited("the reset arrives", || b.take_error().unwrap());
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        // What had arrived before is still there.
        assert!(!read_all(&mut b).0.is_empty());
    };
    // What is held gets two seconds to leave, at every node of a path: one is enough to see it.
    on(&[&[]], row, reset_by);
}

#[test]
fn what_was_said_before_a_reset_reaches_a_side_that_is_writing() {
    let row = |mut a: TcpStream, mut b: TcpStream| {
        // An upload that is refused in the middle: there is always something to write to A.
        assert!(fill(&b) > 0);
        a.write_all(b"413 too large").unwrap();
        acknowledged(&a, 13);
        drop(a);
        expect(&mut b, b"413 too large");
        expect_reset(&mut b);
    };
    each(row, reset_by);
}

/// Waits until this number of bytes has left this side: what it had not sent when it resets is lost with or without us.
fn acknowledged(stream: &TcpStream, bytes: u64) {
    awaited("all is acknowledged", || {
        (sidetrack_sys::sockopt::tcp_info(stream).unwrap().acked_bytes >= bytes).then_some(())
    });
}

#[test]
fn what_came_before_a_reset_reaches_a_side_that_reads_slowly() {
    let row = |mut a: TcpStream, mut b: TcpStream| {
        let bytes = Random::new(5).bytes(600_000);
        // The other side does not read; so much fits into the sockets and pipes of the path.
        std::thread::scope(|scope| scope.spawn(|| a.write_all(&bytes).unwrap()).join().unwrap());
        acknowledged(&a, bytes.len() as u64);
        reset(a);
        let mut got = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        let end = loop {
            match b.read(&mut buffer) {
                Ok(0) => panic!("an orderly end after {} bytes", got.len()),
                Ok(n) => got.extend_from_slice(&buffer[..n]),
                Err(error) => break error,
            }
            // What is held gets two seconds to leave.
            std::thread::park_timeout(std::time::Duration::from_millis(2));
        };
        assert_eq!(end.kind(), ErrorKind::ConnectionReset);
        assert!(got == bytes, "{} of {} bytes", got.len(), bytes.len());
    };
    on(&[&[]], row, reset_by);
}
