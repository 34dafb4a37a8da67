//! The same small relay on two event loops: that of the workers (`sidetrack::reactor`) and tokio's with one thread.
//!
//! `sidetrack-lab relay --only "loop:"` measures both in one run (`docs/adr/0005-own-event-loop.md` has the table). The relay
//! accepts, dials a fixed server and copies both ways. It has no policy, record, limit or time-out, so that the
//! difference between the two rows is that of the loops.
#![allow(clippy::print_stderr, reason = "a program for measurements says on stderr what is wrong")]

use sidetrack::reactor;
use sidetrack_sys::sockopt::{self, ListenOptions};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::process::ExitCode;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

/// Size of the buffer of each direction, in bytes.
const BUFFER_BYTES: usize = 16 * 1024;

/// A connected socket of either loop.
trait Stream {
    /// Reads as soon as bytes are available; 0 is the end of the stream.
    fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>>;
    /// Writes as soon as there is room.
    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>>;
    /// Sends the FIN.
    fn finish(&self) -> io::Result<()>;
}

impl Stream for reactor::TcpStream {
    fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        self.poll_recv(cx, buffer)
    }

    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(cx, bytes)
    }

    fn finish(&self) -> io::Result<()> {
        self.shutdown_write()
    }
}

impl Stream for tokio::net::TcpStream {
    fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.poll_read_ready(cx))?;
            match self.try_read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn poll_write(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.poll_write_ready(cx))?;
            match self.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn finish(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(self.as_fd(), rustix::net::Shutdown::Write)?)
    }
}

/// Copies one direction until its end, and passes the end on.
async fn copy(from: &impl Stream, to: &impl Stream) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let count = poll_fn(|cx| from.poll_read(cx, &mut buffer)).await?;
        if count == 0 {
            return to.finish();
        }
        let mut sent = 0;
        while sent < count {
            sent += poll_fn(|cx| to.poll_write(cx, &buffer[sent..count])).await?;
        }
    }
}

/// Copies both directions in one task. A failure of one ends both.
async fn join(client: &impl Stream, server: &impl Stream) {
    let (mut up, mut down) = (pin!(copy(client, server)), pin!(copy(server, client)));
    let (mut up_over, mut down_over) = (false, false);
    let both = poll_fn(|cx| {
        if !up_over && let Poll::Ready(result) = up.as_mut().poll(cx) {
            result?;
            up_over = true;
        }
        if !down_over && let Poll::Ready(result) = down.as_mut().poll(cx) {
            result?;
            down_over = true;
        }
        if up_over && down_over { Poll::Ready(Ok::<(), io::Error>(())) } else { Poll::Pending }
    });
    // A flow that failed ends with its sockets.
    let _ = both.await;
}

/// Starts connecting, with the same options for both loops.
fn dial(to: SocketAddr) -> io::Result<OwnedFd> {
    let socket = sockopt::stream_socket(&to)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::start_connect(&socket, to)?;
    Ok(socket.into())
}

async fn dial_ours(to: SocketAddr) -> io::Result<reactor::TcpStream> {
    let server = reactor::TcpStream::new(dial(to)?)?;
    if !server.has_connected()? {
        server.forget_writable();
        server.writable().await;
        if let Some(error) = server.take_error()? {
            return Err(error);
        }
    }
    Ok(server)
}

async fn dial_tokio(to: SocketAddr) -> io::Result<tokio::net::TcpStream> {
    let server = tokio::net::TcpStream::from_std(std::net::TcpStream::from(dial(to)?))?;
    server.writable().await?;
    server.take_error()?.map_or(Ok(()), Err)?;
    Ok(server)
}

fn listen(at: SocketAddr) -> io::Result<std::net::TcpListener> {
    let listener = sockopt::listen(at, &ListenOptions { backlog: 8192, ..Default::default() })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Relays on the workers' loop until a call on the listener fails.
fn on_reactor(at: SocketAddr, to: SocketAddr) -> io::Result<()> {
    reactor::block_on(async move {
        let listener = reactor::TcpListener::new(listen(at)?)?;
        loop {
            let (client, _) = listener.accept().await?;
            reactor::spawn(async move {
                if let Ok(server) = dial_ours(to).await {
                    join(&client, &server).await;
                }
            });
        }
    })?
}

/// Relays on tokio's loop of one thread. Tasks are spawned without the requirement of `Send`, its cheaper way.
fn on_tokio(at: SocketAddr, to: SocketAddr) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tasks = Rc::new(tokio::task::LocalSet::new());
    tasks.block_on(&runtime, async move {
        let listener = tokio::net::TcpListener::from_std(listen(at)?)?;
        loop {
            let (client, _) = listener.accept().await?;
            tokio::task::spawn_local(async move {
                if let Ok(server) = dial_tokio(to).await {
                    join(&client, &server).await;
                }
            });
        }
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [which, at, to] = &arguments[..] else {
        eprintln!("usage: event_loop reactor|tokio LISTEN SERVER");
        return ExitCode::from(2);
    };
    let (Ok(at), Ok(to)) = (at.parse(), to.parse()) else {
        eprintln!("LISTEN and SERVER are an address and a port, for example 127.0.0.1:8080");
        return ExitCode::from(2);
    };
    let result = if which == "tokio" { on_tokio(at, to) } else { on_reactor(at, to) };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("event_loop: {error}");
            ExitCode::FAILURE
        }
    }
}
