use super::*;
use crate::reactor::{block_on, spawn, yield_now};
use std::io::{Read as _, Write as _};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Returns a stream of this thread's loop, and the other end as a blocking stream.
fn pair() -> (TcpStream, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (ours, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    (TcpStream::new(ours.into()).unwrap(), theirs)
}

#[test]
fn bytes_then_the_end_are_read_though_one_edge_told_of_both() {
    block_on(async {
        let (mut ours, mut theirs) = pair();
        theirs.write_all(b"last words").unwrap();
        drop(theirs);
        // The bytes and the FIN have arrived before the first read.
        yield_now().await;
        let mut all = Vec::new();
        ours.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"last words");
    })
    .unwrap();
}

#[test]
fn a_reader_sleeps_until_bytes_come_and_a_writer_until_there_is_room() {
    block_on(async {
        let (mut ours, mut theirs) = pair();
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            theirs.write_all(b"go").unwrap();
            let mut total = 0;
            while total < 8 << 20 {
                total += theirs.read(&mut buffer).unwrap();
            }
            total
        });
        let mut word = [0; 2];
        ours.read_exact(&mut word).await.unwrap();
        assert_eq!(&word, b"go");
        ours.write_all(&vec![7; 8 << 20]).await.unwrap();
        assert_eq!(thread.join().unwrap(), 8 << 20);
    })
    .unwrap();
}

#[test]
fn a_reset_wakes_who_waits_for_it() {
    block_on(async {
        let (ours, theirs) = pair();
        socket2::SockRef::from(&theirs).set_linger(Some(std::time::Duration::ZERO)).unwrap();
        drop(theirs);
        ours.failed().await;
        assert_eq!(ours.try_read(&mut [0; 1]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    })
    .unwrap();
}

#[test]
fn events_of_a_socket_that_is_gone_reach_no_successor() {
    block_on(async {
        let (ours, _theirs) = pair();
        let key = u64::from(ours.place.index);
        drop(ours);
        let (next, _also_theirs) = pair();
        assert_eq!(u64::from(next.place.index), key, "the place is used again");
        let home = next.place.home.clone();
        home.sources.borrow_mut().notice(key, EventFlags::HUP);
        assert!(!next.place.with(|source| source.ended));
    })
    .unwrap();
}

#[test]
fn a_socket_says_itself_whether_it_has_connected() {
    fn connecting(to: SocketAddr) -> TcpStream {
        let socket = sidetrack_sys::sockopt::stream_socket(&to).unwrap();
        sidetrack_sys::sockopt::start_connect(&socket, to).unwrap();
        TcpStream::new(socket.into()).unwrap()
    }
    block_on(async {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = connecting(listener.local_addr().unwrap());
        // If connecting takes another turn of the loop, wait for it.
        if !ours.has_connected().unwrap() {
            ours.writable().await;
        }
        assert!(ours.has_connected().unwrap());
        let (mut theirs, _) = listener.accept().unwrap();
        assert_eq!(ours.try_write(b"now").unwrap(), 3);
        let mut word = [0; 3];
        theirs.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"now");
        // A port without a listener. It is bound, so that no other process can listen on it.
        let bound = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        bound.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let nobody = connecting(bound.local_addr().unwrap().as_socket().unwrap());
        let refused = match nobody.has_connected() {
            Ok(_) => {
                nobody.writable().await;
                nobody.take_error().unwrap().unwrap()
            }
            Err(error) => error,
        };
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    })
    .unwrap();
}

#[test]
fn accepts_what_waits() {
    block_on(async {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        socket.set_nonblocking(true).unwrap();
        let listener = TcpListener::new(socket).unwrap();
        let clients: Vec<_> = (0..5).map(|_| std::net::TcpStream::connect(to).unwrap()).collect();
        for _ in 0..5 {
            let (mut stream, peer) = listener.accept().await.unwrap();
            assert!(clients.iter().any(|client| client.local_addr().unwrap() == peer));
            spawn(async move { stream.write_all(b"hello").await.unwrap() });
        }
        for _ in 0..4 {
            yield_now().await;
        }
        for mut client in clients {
            let mut all = String::new();
            client.read_to_string(&mut all).unwrap();
            assert_eq!(all, "hello");
        }
    })
    .unwrap();
}
