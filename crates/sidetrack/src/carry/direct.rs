//! The direct carrier: dials the destination from this host, with both address families in a race (RFC 8305).

use super::gate::{self, Admitted};
use super::{Carried, Failure, FirstBytes, Order, OverlayEntry, resolve, stack};
use crate::live::{Step, Taken, Transport};
use crate::reactor::{Sleep, TcpStream, sleep};
use sidetrack_core::flow::EndReason;
use sidetrack_core::hold::Answer;
use sidetrack_core::net::embedded_v4;
use sidetrack_core::socks::v6::StackOption;
use sidetrack_sys::sockopt;
use socket2::SockRef;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Head start of each address before the next is tried in parallel (RFC 8305 Sec. 5, "Connection Attempt
/// Delay").
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Settings that all sockets for dialling share.
#[derive(Clone, Debug, Default)]
pub struct Dialing {
    /// The mark that keeps our own connections from being captured again (`SO_MARK`). `None` if no rules of ours
    /// capture connections.
    pub mark: Option<u32>,
    /// The addresses that we listen on. Dialling one would lead back to ourselves.
    pub own: Vec<SocketAddr>,
    /// The addresses on which we receive datagrams.
    pub own_datagrams: Vec<SocketAddr>,
    /// The entry into the overlay, if this node is part of one.
    pub overlay: Option<Arc<dyn OverlayEntry>>,
}

/// Options for the socket of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wishes<'a> {
    /// TCP Fast Open (RFC 7413), if the kernel has a cookie for the server.
    pub tfo: bool,
    /// The first bytes, sent in the SYN. If empty, a Fast Open connection is opened by the caller's first write,
    /// which must follow at once.
    pub syn_data: &'a [u8],
    /// Bytes to send are available, so the ACK that ends the handshake can travel with them.
    pub speaks_first: bool,
    /// Multipath TCP.
    pub mptcp: bool,
    /// The foreign source address to bind to, if any.
    pub from: Option<SocketAddr>,
    /// Options about the packets (TOS, TTL), in force from the SYN on.
    pub packets: &'a [StackOption],
    /// Each address is tried only after the one before it has failed, not in parallel.
    pub one_by_one: bool,
}

impl Dialing {
    /// Whether dialling this address would lead back to ourselves.
    pub fn is_own(&self, to: SocketAddr) -> bool {
        leads_to(&self.own, to)
    }

    /// Whether datagrams to this address would come back to ourselves.
    pub fn is_own_datagrams(&self, to: SocketAddr) -> bool {
        leads_to(&self.own_datagrams, to)
    }

    /// Connects to one address. Returns how many bytes of [`Wishes::syn_data`] were sent in the SYN.
    ///
    /// # Errors
    /// Fails as `connect(2)` does, with the fitting end reason.
    pub async fn connect(&self, to: Admitted, wishes: Wishes<'_>) -> Result<(TcpStream, usize), Failure> {
        let address = to.address();
        if self.is_own(address) {
            return Err(Failure::new(EndReason::Loop, format!("{address} is our own listener")));
        }
        self.try_connect(to, wishes).await.map_err(|error| failure(&error, address))
    }

    fn socket(&self, to: SocketAddr, wishes: Wishes<'_>) -> io::Result<socket2::Socket> {
        let socket = if wishes.mptcp { sockopt::mptcp_socket(&to)?.0 } else { sockopt::stream_socket(&to)? };
        // Set before the connect: our capture rules would redirect an unmarked SYN back to us.
        if let Some(mark) = self.mark {
            sockopt::set_mark(&socket, mark)?;
        }
        // A foreign address can only be bound on a transparent socket. The kernel picks the port at connect
        // time, so that several connections can share one.
        if let Some(from) = wishes.from {
            sockopt::set_transparent(&socket)?;
            sockopt::set_bind_address_no_port(&socket)?;
            socket.bind(&SocketAddr::new(from.ip(), 0).into())?;
        }
        sockopt::set_tcp_nodelay(&socket, true)?;
        stack::set(&socket, wishes.packets);
        if wishes.speaks_first {
            // Best effort: without the option, the ACK is a packet of its own.
            let _ = sockopt::set_tcp_ack_with_data(&socket);
        }
        if wishes.tfo {
            // Best effort: if the kernel does not support it (sysctl net.ipv4.tcp_fastopen), the connection
            // works without.
            let _ = sockopt::set_tcp_fastopen_connect(&socket);
        }
        Ok(socket)
    }

    async fn try_connect(&self, to: Admitted, wishes: Wishes<'_>) -> io::Result<(TcpStream, usize)> {
        let socket = self.socket(to.address(), wishes)?;
        let done = gate::start(&socket, to)?;
        let stream = TcpStream::new(socket.into())?;
        let mut sent = 0;
        if done && !wishes.syn_data.is_empty() {
            // The kernel has a cookie and has sent nothing so far: this sends the SYN.
            sent = SockRef::from(&stream).send(wishes.syn_data)?;
            // The socket becomes writable again when the SYN is answered.
            stream.forget_writable();
        }
        if !done || sent > 0 {
            stream.writable().await;
            // A failed attempt is reported as an error of the socket.
            if stream.has_failed()
                && let Some(error) = stream.take_error()?
            {
                return Err(error);
            }
        }
        Ok((stream, sent))
    }

    /// Connects to the first address that answers; each has a head start over the next. Returns the same as
    /// [`Dialing::connect`].
    ///
    /// # Errors
    /// Returns the first failure if all attempts fail.
    pub async fn race(
        &self,
        addresses: &[Admitted],
        wishes: Wishes<'_>,
    ) -> Result<(TcpStream, usize), Failure> {
        match addresses {
            [one] => self.connect(*one, wishes).await,
            many => {
                let attempts: Vec<_> = many.iter().map(|to| Box::pin(self.connect(*to, wishes))).collect();
                let head_start = (!wishes.one_by_one).then_some(ATTEMPT_DELAY);
                let waiting = attempts.into_iter();
                Race { waiting, running: Vec::new(), head_start, delay: None, first: None }.await
            }
        }
    }
}

/// Whether one of our own addresses is reached at `to`.
fn leads_to(own: &[SocketAddr], to: SocketAddr) -> bool {
    // The kernel treats an unspecified destination as loopback, and a translator maps some IPv6 addresses to
    // IPv4.
    let form = |ip: IpAddr| match ip {
        ip if ip.is_unspecified() && ip.is_ipv4() => Ipv4Addr::LOCALHOST.into(),
        ip if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => embedded_v4(ip).map_or(ip, IpAddr::V4),
    };
    own.iter().any(|own| {
        own.port() == to.port() && {
            let ip = form(to.ip());
            own.ip() == ip || own.ip().is_unspecified() && sockopt::is_of_this_host(ip)
        }
    })
}

/// Attempts that start one after the other and run in parallel.
struct Race<F> {
    waiting: std::vec::IntoIter<Pin<Box<F>>>,
    running: Vec<Pin<Box<F>>>,
    /// `None`: the next attempt starts only after all before it have failed.
    head_start: Option<Duration>,
    delay: Option<Pin<Box<Sleep>>>,
    first: Option<Failure>,
}

impl<F: Future<Output = Result<(TcpStream, usize), Failure>>> Future for Race<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            let mut failed = false;
            let mut index = 0;
            while let Some(attempt) = this.running.get_mut(index) {
                match attempt.as_mut().poll(cx) {
                    Poll::Ready(Ok(connected)) => return Poll::Ready(Ok(connected)),
                    Poll::Ready(Err(failure)) => {
                        drop(this.running.swap_remove(index));
                        this.first.get_or_insert(failure);
                        failed = true;
                    }
                    Poll::Pending => index += 1,
                }
            }
            let elapsed = this.delay.as_mut().is_some_and(|delay| delay.as_mut().poll(cx).is_ready());
            if !(elapsed || failed || this.running.is_empty()) {
                return Poll::Pending;
            }
            // Start the next address: the head start of the latest is over, an attempt failed, or none is
            // running.
            match this.waiting.next() {
                Some(attempt) => {
                    this.running.push(attempt);
                    this.delay = this.head_start.map(|delay| Box::pin(sleep(delay)));
                }
                None if this.running.is_empty() => {
                    let none = || Failure::new(EndReason::Unreachable, "no address to try");
                    return Poll::Ready(Err(this.first.take().unwrap_or_else(none)));
                }
                None => return Poll::Pending,
            }
        }
    }
}

/// Maps an error of `connect(2)` to an end reason.
pub(super) fn failure(error: &io::Error, to: SocketAddr) -> Failure {
    use io::ErrorKind::{
        AddrNotAvailable, ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut,
    };
    let reason = match error.kind() {
        ConnectionRefused => EndReason::Refused,
        // The server had answered, and reset the connection before we looked.
        ConnectionReset => EndReason::ServerReset,
        HostUnreachable | NetworkUnreachable => EndReason::Unreachable,
        TimedOut => EndReason::ConnectTimeout,
        AddrNotAvailable => EndReason::Limit,
        _ => match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => EndReason::Limit,
            Some(libc::EPERM | libc::EACCES) => EndReason::Unreachable,
            _ => EndReason::Internal,
        },
    };
    Failure::new(reason, format!("connect to {to}: {error}")).telling(told(error))
}

/// What the client would have been told by the same error of its own `connect(2)`.
fn told(error: &io::Error) -> Option<Answer> {
    use io::ErrorKind::{
        ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, PermissionDenied, TimedOut,
    };
    Some(match error.kind() {
        ConnectionRefused | ConnectionReset => Answer::Reset,
        HostUnreachable => Answer::Host,
        NetworkUnreachable => Answer::Net,
        PermissionDenied => Answer::Admin,
        TimedOut => Answer::Silent,
        _ => return None,
    })
}

/// Carries a flow directly.
pub(super) async fn carry(order: &Order<'_>, first: &mut impl FirstBytes) -> Result<Carried, Failure> {
    if let Some((stream, address)) = order.warm.take(order) {
        let taken = Some(Taken { transport: Transport::Warm, address });
        order.done(Step::Reused);
        return Ok(by_socket(stream, 0, Vec::new(), taken));
    }
    let addresses = resolve(&order.destination).await?;
    if order.name().is_some() {
        order.resolved_to(&addresses);
    }
    let addresses = order.admit(addresses)?;
    let asked = |wanted: fn(&StackOption) -> bool| order.stack.iter().any(wanted);
    let tfo = order.carry.tfo || asked(|option| matches!(option, StackOption::Tfo(_)));
    // Without bytes there is nothing to put into the SYN. With a Fast Open socket a server that sends first
    // would wait for our first write.
    let held = first.held();
    let syn_data = if tfo { held.get(..syn_data_max(order.stack)).unwrap_or(held) } else { &[] };
    let wishes = Wishes {
        speaks_first: !held.is_empty(),
        tfo: !syn_data.is_empty(),
        syn_data,
        mptcp: order.carry.mptcp || asked(|option| matches!(option, StackOption::Multipath(true))),
        from: order.carry.keep_client_address.then_some(order.client),
        packets: order.stack,
        one_by_one: asked(|option| matches!(option, StackOption::HappyEyeballs(false))),
    };
    let (stream, sent) = order.dialing.race(&addresses, wishes).await?;
    order.connected(&stream, &addresses);
    order.warm.learn(order);
    let stack = done(order.stack, &stream, sent, addresses.len());
    Ok(by_socket(stream, sent, stack, None))
}

/// A connection to the server itself: its socket has the peer's address.
fn by_socket(stream: TcpStream, sent: usize, stack: Vec<StackOption>, taken: Option<Taken>) -> Carried {
    let (stream, early) = (stream.into(), Vec::new());
    Carried { stream, early, bound: None, sent, stack, taken, leads_to: None, spread: None }
}

/// Most bytes that a SOCKS6 client allows in the SYN. 0 in the option means no limit.
fn syn_data_max(asked: &[StackOption]) -> usize {
    let size = asked.iter().find_map(|option| match option {
        StackOption::Tfo(size) if *size > 0 => Some(usize::from(*size)),
        _ => None,
    });
    size.unwrap_or(usize::MAX)
}

/// The requested options with the values in force.
fn done(asked: &[StackOption], stream: &TcpStream, sent: usize, addresses: usize) -> Vec<StackOption> {
    let mut done = stack::set(stream, asked);
    for option in asked {
        done.push(match option {
            StackOption::Tfo(_) => {
                let used = sent > 0 && sockopt::tcp_info(stream).is_ok_and(|info| info.syn_data_acked);
                StackOption::Tfo(if used { u16::try_from(sent).unwrap_or(u16::MAX) } else { 0 })
            }
            StackOption::Multipath(_) => StackOption::Multipath(sockopt::speaks_mptcp(stream)),
            StackOption::HappyEyeballs(wanted) => StackOption::HappyEyeballs(*wanted && addresses > 1),
            _ => continue,
        });
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_loopback<T>(future: impl Future<Output = T>) -> T {
        crate::reactor::block_on(future).unwrap()
    }

    /// Returns an address without a listener, as long as the socket lives.
    fn closed() -> (socket2::Socket, SocketAddr) {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        (socket, address)
    }

    #[test]
    fn the_second_address_is_taken_when_the_first_refuses() {
        let (_bound, closed) = closed();
        let open = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = open.local_addr().unwrap();
        let stream = on_loopback(async {
            let both = [closed, to].map(Admitted::configured);
            let stream = Dialing::default().race(&both, Wishes::default()).await;
            stream.map(|(stream, _)| std::net::TcpStream::peer_addr(&stream.into_std().unwrap()).unwrap())
        });
        assert_eq!(stream, Ok(to));
    }

    #[test]
    fn a_refusal_is_called_refused_and_our_own_listener_a_loop() {
        let (_bound, closed) = closed();
        let result = on_loopback(Dialing::default().connect(Admitted::configured(closed), Wishes::default()));
        assert_eq!(result.unwrap_err().reason, EndReason::Refused);
        let dialing = Dialing { own: vec!["0.0.0.0:1080".parse().unwrap()], ..Dialing::default() };
        let result = on_loopback(
            dialing.connect(Admitted::configured(([127, 0, 0, 1], 1080).into()), Wishes::default()),
        );
        assert_eq!(result.unwrap_err().reason, EndReason::Loop);
    }
}
