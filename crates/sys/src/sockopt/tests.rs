//! Over loopback sockets; what needs root says so when it is skipped.

use super::*;
use std::io::{Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::time::Instant;

fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let mut address = listener.local_addr().unwrap();
    if address.ip().is_unspecified() {
        address.set_ip("127.0.0.1".parse().unwrap());
    }
    let client = TcpStream::connect(address).unwrap();
    listener.set_nonblocking(false).unwrap();
    (client, listener.accept().unwrap().0)
}

fn loopback() -> TcpListener {
    listen("127.0.0.1:0".parse().unwrap(), &ListenOptions::default()).unwrap()
}

#[test]
fn mapped_addresses_become_ipv4() {
    let mapped: SocketAddr = "[::ffff:192.0.2.1]:80".parse().unwrap();
    assert_eq!(canonical(mapped).to_string(), "192.0.2.1:80");
    let plain: SocketAddr = "[2001:db8::1]:80".parse().unwrap();
    assert_eq!(canonical(plain), plain);
}

#[test]
fn dual_stack_listener_takes_ipv4_and_tells_canonical_addresses() {
    let options = ListenOptions { dual_stack: true, ..ListenOptions::default() };
    let listener = listen((Ipv6Addr::UNSPECIFIED, 0).into(), &options).unwrap();
    let (client, server) = pair(&listener);
    assert_eq!(local_address(&server).unwrap(), client.peer_addr().unwrap());
    assert_eq!(peer_address(&server).unwrap(), client.local_addr().unwrap());
}

#[test]
fn v6_only_listener_leaves_the_ipv4_port_free() {
    let first = listen("[::1]:0".parse().unwrap(), &ListenOptions::default()).unwrap();
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
    let six = listen(any, &ListenOptions::default()).unwrap();
    let port = six.local_addr().unwrap().port();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    assert!(TcpStream::connect(("::1", port)).is_ok());
    drop(first);
}

#[test]
fn accepted_sockets_inherit_nodelay() {
    let (_client, server) = pair(&loopback());
    assert!(server.nodelay().unwrap());
    let options = ListenOptions { nodelay: false, ..ListenOptions::default() };
    let (_client, server) = pair(&listen("127.0.0.1:0".parse().unwrap(), &options).unwrap());
    assert!(!server.nodelay().unwrap());
}

#[test]
fn reuse_port_shares_one_port() {
    let options = ListenOptions { reuse_port: true, ..ListenOptions::default() };
    let first = listen("127.0.0.1:0".parse().unwrap(), &options).unwrap();
    let address = first.local_addr().unwrap();
    assert!(listen(address, &ListenOptions::default()).is_err());
    assert_eq!(listen(address, &options).unwrap().local_addr().unwrap(), address);
}

#[test]
fn a_first_listener_wants_the_port_alone_and_shares_it_then() {
    for mptcp in [false, true] {
        let options = ListenOptions { reuse_port: true, mptcp, ..ListenOptions::default() };
        shares_later(&options);
    }
}

fn shares_later(options: &ListenOptions) {
    let shared = listen("127.0.0.1:0".parse().unwrap(), options).unwrap();
    let error = listen_first(shared.local_addr().unwrap(), options).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    assert_eq!(try_address(shared.local_addr().unwrap()).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    let first = listen_first("127.0.0.1:0".parse().unwrap(), options).unwrap();
    let address = first.local_addr().unwrap();
    assert_eq!(listen_first(address, options).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    let second = listen(address, options).unwrap();
    // Both get connections: all of 64 on one side has a probability of 2^-63.
    let clients: Vec<_> = (0..64).map(|_| TcpStream::connect(address).unwrap()).collect();
    let taken = |listener: &TcpListener| std::iter::from_fn(|| listener.accept().ok()).count();
    let mut counts = [0, 0];
    let until = Instant::now() + Duration::from_secs(60);
    while counts.iter().sum::<usize>() < clients.len() {
        counts[0] += taken(&first);
        counts[1] += taken(&second);
        assert!(Instant::now() < until, "{counts:?}");
    }
    assert!(!counts.contains(&0), "{counts:?}");
}

#[test]
fn reset_on_close_resets() {
    let (mut client, server) = pair(&loopback());
    reset_on_close(&server).unwrap();
    drop(server);
    let error = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn tcp_info_counts_bytes() {
    let (mut client, mut server) = pair(&loopback());
    client.write_all(&[7; 1000]).unwrap();
    server.read_exact(&mut [0; 1000]).unwrap();
    server.write_all(b"x").unwrap();
    client.read_exact(&mut [0; 1]).unwrap();
    let info = tcp_info(&client).unwrap();
    assert_eq!((info.acked_bytes, info.received_bytes), (1001, 1), "the SYN counts as acknowledged");
    assert!(info.send_mss_bytes > 500 && info.congestion_window_segments > 0);
    assert!(!info.syn_data_acked);
    assert_eq!(tcp_info(&server).unwrap().received_bytes, 1000);
}

#[test]
fn a_connected_socket_acknowledges_with_its_next_bytes_when_told() {
    let (client, _server) = pair(&loopback());
    assert!(sockopt::tcp_quickack(&client).unwrap(), "at once, as the kernel begins");
    set_tcp_ack_with_data(&client).unwrap();
    assert!(!sockopt::tcp_quickack(&client).unwrap());
    set_tcp_ack_at_once(&client).unwrap();
    assert!(sockopt::tcp_quickack(&client).unwrap());
}

#[test]
fn congestion_control_is_read_back() {
    let socket = stream_socket(&"127.0.0.1:1".parse().unwrap()).unwrap();
    assert_eq!(set_congestion(&socket, "reno").unwrap(), "reno");
    assert_eq!(congestion(&socket).unwrap(), "reno");
    assert_eq!(set_congestion(&socket, "nosuch").unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn asynchronous_connect_reports_refusal() {
    // Bound, but no socket listens: a listener that is dropped may live on for a moment in a child of another test.
    let bound = stream_socket(&"127.0.0.1:0".parse().unwrap()).unwrap();
    bound.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    let closed = local_address(&bound).unwrap();
    let socket = stream_socket(&closed).unwrap();
    match start_connect(&socket, closed) {
        Ok(made) => {
            assert!(!made);
            let mut fds = [rustix::event::PollFd::new(&socket, rustix::event::PollFlags::OUT)];
            let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
            rustix::event::poll(&mut fds, Some(&limit)).unwrap();
            let error = take_error(&socket).unwrap().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        }
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused),
    }
}

#[test]
fn options_take_effect() {
    let address = "127.0.0.1:0".parse().unwrap();
    let (socket, _is_mptcp) = mptcp_socket(&address).unwrap();
    set_keepalive(&socket, Duration::from_millis(10), Duration::from_secs(5), 3).unwrap();
    assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(1));
    let socket = stream_socket(&address).unwrap();
    set_tcp_user_timeout(&socket, Some(Duration::from_millis(1500))).unwrap();
    assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_millis(1500)));
    set_bind_address_no_port(&socket).unwrap();
    socket.bind(&address.into()).unwrap();
    assert_eq!(local_address(&socket).unwrap().port(), 0, "no port before connect");
    assert!(set_receive_buffer(&socket, 65_536).unwrap() >= 65_536);
    assert!(set_send_buffer(&socket, 65_536).unwrap() >= 65_536);
    let six = stream_socket(&"[::1]:0".parse().unwrap()).unwrap();
    set_bind_address_no_port(&six).unwrap();
}

#[test]
fn marks_and_foreign_addresses_need_a_capability() {
    let six = stream_socket(&"[::1]:0".parse().unwrap()).unwrap();
    let four = stream_socket(&"127.0.0.1:0".parse().unwrap()).unwrap();
    if rustix::process::geteuid().is_root() {
        set_mark(&four, 7).unwrap();
        assert_eq!(four.mark().unwrap(), 7);
        set_transparent(&four).unwrap();
        set_transparent(&six).unwrap();
        four.bind(&"192.0.2.77:0".parse::<SocketAddr>().unwrap().into()).unwrap();
        six.bind(&"[2001:db8::77]:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    } else {
        assert_eq!(set_mark(&four, 7).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(set_transparent(&four).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
