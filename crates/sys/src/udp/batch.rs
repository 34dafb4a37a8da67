//! Datagrams in batches: one `recvmmsg(2)` or `sendmmsg(2)` for many messages. A message may be a train: datagrams of
//! equal length from one sender in one piece (`UDP_GRO`, `UDP_SEGMENT`, udp(7)). Nothing is allocated after the start.

use super::pages::Pages;
use super::{CONTROL_WORDS as OF_ONE, destination, empty_message, original_destination, put};
use crate::sockopt::set_int;
use socket2::{SockAddr, SockAddrStorage};
use std::io;
use std::mem::size_of;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

/// Most messages of one batch.
pub const BATCH: usize = 32;

/// Room for one message: more than the longest payload of UDP over IPv4, 65,507 bytes.
const ROOM: usize = 65_536;

/// Room for the control messages of one message: its addresses, and the length of the datagrams of a train.
const CONTROL_WORDS: usize = OF_ONE + 4;

/// Asks the kernel to receive trains. Without it (Linux before 5.0) each datagram is a message.
pub fn receive_trains(socket: impl AsFd) {
    let _ = set_int(socket, libc::SOL_UDP, libc::UDP_GRO, 1);
}

/// The memory for the messages of one batch.
#[derive(Debug)]
pub struct Batch {
    memory: Pages,
    messages: [Message; BATCH],
    count: usize,
}

/// What is known of one message.
#[derive(Clone, Copy, Debug, Default)]
struct Message {
    len: usize,
    /// The length of each datagram of a train but the last. 0: the message is one datagram.
    segment: usize,
    from: Option<SocketAddr>,
    to: Option<IpAddr>,
    original: Option<SocketAddr>,
}

/// Where messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The receiver.
    pub to: SocketAddr,
    /// The source address, as the receiver expects it. `None`: the socket's own.
    pub from: Option<IpAddr>,
}

/// How sending went.
#[derive(Debug, Default)]
pub struct Sent {
    /// Messages that the kernel has not taken.
    pub lost: usize,
    /// The first error: an ICMP error about an earlier datagram, or why a message was not taken.
    pub error: Option<io::Error>,
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

impl Batch {
    /// Reserves the memory. The kernel provides pages when they are first used.
    pub fn new() -> Self {
        Self { memory: Pages::new(BATCH * ROOM), messages: [Message::default(); BATCH], count: 0 }
    }

    /// Receives messages without waiting, replacing those of before. Returns their number.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; an ICMP error about an earlier datagram of a connected socket.
    pub fn receive(&mut self, socket: impl AsFd) -> io::Result<usize> {
        self.count = 0;
        let mut controls = [[0_u64; CONTROL_WORDS]; BATCH];
        let mut names: [SockAddrStorage; BATCH] = std::array::from_fn(|_| SockAddrStorage::zeroed());
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
        let mut headers = [libc::mmsghdr { msg_hdr: empty_message(), msg_len: 0 }; BATCH];
        for (at, room) in self.memory.chunks_exact_mut(ROOM).enumerate().take(BATCH) {
            parts[at] = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
            let header = &mut headers[at].msg_hdr;
            header.msg_namelen = names[at].size_of();
            header.msg_name = (&raw mut names[at]).cast();
            header.msg_iov = &raw mut parts[at];
            header.msg_iovlen = 1;
            header.msg_control = controls[at].as_mut_ptr().cast();
            header.msg_controllen = size_of::<[u64; CONTROL_WORDS]>() as _;
        }
        let (fd, most) = (socket.as_fd().as_raw_fd(), BATCH as libc::c_uint);
        let wait = std::ptr::null_mut();
        // SAFETY: every header points to its own name, part and control buffer, which are live locals or parts of
        // `self.memory`, each with its true size.
        let got = unsafe { libc::recvmmsg(fd, headers.as_mut_ptr(), most, libc::MSG_DONTWAIT as _, wait) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        for ((header, name), message) in headers.iter().zip(names).zip(&mut self.messages).take(got) {
            // SAFETY: the kernel wrote an address of `msg_namelen` bytes into `name`; 0 bytes leave it zeroed.
            let from = unsafe { SockAddr::new(name, header.msg_hdr.msg_namelen) };
            *message = Message {
                len: header.msg_len as usize,
                segment: segment(&header.msg_hdr).unwrap_or(0),
                from: from.as_socket(),
                to: destination(&header.msg_hdr),
                original: original_destination(&header.msg_hdr),
            };
        }
        self.count = got;
        Ok(got)
    }

    /// Returns the sender of a message, as the socket's family writes it, and the local address it was sent to.
    pub fn addresses(&self, at: usize) -> (Option<SocketAddr>, Option<IpAddr>) {
        self.messages[..self.count].get(at).map_or((None, None), |message| (message.from, message.to))
    }

    /// Returns the original destination of a message, if the socket tells it ([`super::bind_transparent`]).
    pub fn original(&self, at: usize) -> Option<SocketAddr> {
        self.messages[..self.count].get(at)?.original
    }

    /// Returns the datagrams of a message: one, or those of a train. A datagram may be empty.
    pub fn datagrams(&self, at: usize) -> impl Iterator<Item = &[u8]> {
        let message = self.messages[..self.count].get(at).copied().unwrap_or_default();
        let bytes = self.bytes(at);
        let is_there = at < self.count;
        let step = if message.segment == 0 { message.len.max(1) } else { message.segment };
        let one = (is_there && bytes.is_empty()).then_some(bytes);
        one.into_iter().chain(bytes.chunks(step))
    }

    /// Calls `each` with every datagram of a message, to be changed in its place.
    pub fn each(&mut self, at: usize, mut each: impl FnMut(&mut [u8])) {
        let message = self.messages[..self.count].get(at).copied().unwrap_or_default();
        let bytes = at * ROOM..at * ROOM + message.len.min(ROOM);
        let step = if message.segment == 0 { message.len.max(1) } else { message.segment };
        self.memory.get_mut(bytes).unwrap_or_default().chunks_mut(step).for_each(&mut each);
    }

    fn bytes(&self, at: usize) -> &[u8] {
        let len = self.messages[..self.count].get(at).map_or(0, |message| message.len.min(ROOM));
        self.memory.get(at * ROOM..at * ROOM + len).unwrap_or_default()
    }

    /// Sends these messages on, each train as a train where the path allows it. `target`: `None` for a connected
    /// socket. A message that finds no room is lost, as on any path of UDP.
    pub fn send(&self, socket: impl AsFd, range: Range<usize>, target: Option<&Target>) -> Sent {
        let mut sent = Sent::default();
        let (mut at, end) = (range.start, range.end.min(self.count));
        let mut repeated = false;
        while at < end {
            match self.send_some(&socket, at..end, target) {
                Ok(taken) => (at, repeated) = (at + taken.max(1), false),
                Err(error) => {
                    let is_train = self.messages[at].segment != 0;
                    if is_train && is_about_trains(&error) {
                        self.send_apart(&socket, at, target, &mut sent);
                        at += 1;
                        continue;
                    }
                    // The error may be about an earlier datagram. It is reported once, and nothing was sent.
                    let again = !repeated && error.kind() != io::ErrorKind::WouldBlock;
                    sent.error.get_or_insert(error);
                    if again {
                        repeated = true;
                    } else {
                        (at, repeated) = (at + 1, false);
                        sent.lost += 1;
                    }
                }
            }
        }
        sent
    }

    fn send_some(
        &self,
        socket: &impl AsFd,
        range: Range<usize>,
        target: Option<&Target>,
    ) -> io::Result<usize> {
        let name = target.map(|target| SockAddr::from(target.to));
        let mut controls = [[0_u64; CONTROL_WORDS]; BATCH];
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
        let mut headers = [libc::mmsghdr { msg_hdr: empty_message(), msg_len: 0 }; BATCH];
        let count = range.len();
        for (slot, at) in range.enumerate() {
            let bytes = self.bytes(at);
            parts[slot] = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            let header = &mut headers[slot].msg_hdr;
            if let Some(name) = &name {
                header.msg_name = name.as_ptr().cast_mut().cast();
                header.msg_namelen = name.len();
            }
            header.msg_iov = &raw mut parts[slot];
            header.msg_iovlen = 1;
            let segment = self.messages[at].segment;
            let segment =
                u16::try_from(segment).ok().filter(|step| *step > 0 && usize::from(*step) < bytes.len());
            header.msg_control = controls[slot].as_mut_ptr().cast();
            describe(header, target.and_then(|target| Some((target.to, target.from?))), segment);
        }
        let (fd, most) = (socket.as_fd().as_raw_fd(), count as libc::c_uint);
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: every header points to `name`, its part and its control buffer, which are live; sendmmsg only reads
        // through them, and writes `msg_len`.
        let taken = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), most, flags as _) };
        usize::try_from(taken).map_err(|_| io::Error::last_os_error())
    }

    /// Sends the datagrams of a train one by one, because the path does not take the train.
    fn send_apart(&self, socket: &impl AsFd, at: usize, target: Option<&Target>, sent: &mut Sent) {
        let mut lost = false;
        for datagram in self.datagrams(at) {
            if let Err(error) = send_one(socket, datagram, target) {
                sent.error.get_or_insert(error);
                lost = true;
            }
        }
        sent.lost += usize::from(lost);
    }
}

/// Sends one datagram without waiting. If the socket reports an ICMP error about an earlier datagram, it is sent after
/// that.
///
/// # Errors
/// `WouldBlock` if there is no room; the second error of two.
pub fn send_one(socket: impl AsFd, datagram: &[u8], target: Option<&Target>) -> io::Result<()> {
    send_message(&socket, datagram, target, None)
}

fn send_message(
    socket: &impl AsFd,
    datagram: &[u8],
    target: Option<&Target>,
    segment: Option<u16>,
) -> io::Result<()> {
    let name = target.map(|target| SockAddr::from(target.to));
    let mut control = [0_u64; CONTROL_WORDS];
    let mut part = libc::iovec { iov_base: datagram.as_ptr().cast_mut().cast(), iov_len: datagram.len() };
    let mut message = empty_message();
    if let Some(name) = &name {
        message.msg_name = name.as_ptr().cast_mut().cast();
        message.msg_namelen = name.len();
    }
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    describe(&mut message, target.and_then(|target| Some((target.to, target.from?))), segment);
    let (fd, flags) = (socket.as_fd().as_raw_fd(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
    // SAFETY: every pointer in `message` is to a live local or to `datagram`, with its true size; sendmsg only reads.
    let send = || match unsafe { libc::sendmsg(fd, &raw const message, flags) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    match send() {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => send(),
        result => result,
    }
}

/// Sends a train: datagrams of `segment` bytes each, the last one may be shorter. If the path does not take trains, the
/// datagrams are sent one by one.
///
/// # Errors
/// `WouldBlock` if there is no room; EMSGSIZE if one datagram is longer than the MTU of the device.
pub fn send_train(socket: impl AsFd, bytes: &[u8], segment: usize, target: &Target) -> io::Result<()> {
    let step = u16::try_from(segment).ok().filter(|step| *step > 0 && usize::from(*step) < bytes.len());
    if step.is_none() {
        return send_one(socket, bytes, Some(target));
    }
    match send_message(&socket, bytes, Some(target), step) {
        Err(error) if is_about_trains(&error) => {
            bytes.chunks(segment).try_for_each(|datagram| send_one(&socket, datagram, Some(target)))
        }
        result => result,
    }
}

/// Whether a path or a device does not take trains of this length: longer than its MTU, or without checksums.
fn is_about_trains(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EIO | libc::EMSGSIZE | libc::EOPNOTSUPP))
}

/// Writes the control messages of a message that is sent. Its control buffer has [`CONTROL_WORDS`] words.
fn describe(message: &mut libc::msghdr, addresses: Option<(SocketAddr, IpAddr)>, segment: Option<u16>) {
    message.msg_controllen = 0;
    match addresses {
        Some((SocketAddr::V4(_), IpAddr::V4(ip))) => {
            put(message, libc::SOL_IP, libc::IP_PKTINFO, super::info_v4(ip));
        }
        Some((SocketAddr::V6(_), IpAddr::V6(ip))) => {
            put(message, libc::SOL_IPV6, libc::IPV6_PKTINFO, super::info_v6(ip));
        }
        _ => {}
    }
    if let Some(segment) = segment {
        put(message, libc::SOL_UDP, libc::UDP_SEGMENT, segment);
    }
    if message.msg_controllen == 0 {
        message.msg_control = std::ptr::null_mut();
    }
}

/// The length of the datagrams of a train that was received.
fn segment(message: &libc::msghdr) -> Option<usize> {
    // SAFETY: `message` was filled in by recvmmsg and its control buffer lives; CMSG_FIRSTHDR and CMSG_NXTHDR stay
    // within `msg_controllen`, and the kernel wrote an int behind a header of this kind.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_UDP, libc::UDP_GRO) {
                let step = libc::CMSG_DATA(header).cast::<libc::c_int>().read_unaligned();
                return usize::try_from(step).ok().filter(|step| *step > 0);
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::udp::{bind_shared, tell_destinations};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::net::UdpSocket;

    fn bound() -> UdpSocket {
        let socket = bind_shared("127.0.0.1:0".parse().unwrap()).unwrap();
        tell_destinations(&socket, socket.local_addr().unwrap()).unwrap();
        socket
    }

    /// Receives messages until there are this number of datagrams.
    fn datagrams(socket: &UdpSocket, count: usize) -> Vec<Vec<u8>> {
        let (mut batch, mut all) = (Batch::new(), Vec::new());
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        while all.len() < count {
            assert_eq!(poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit)).unwrap(), 1);
            for at in 0..batch.receive(socket).unwrap() {
                all.extend(batch.datagrams(at).map(<[u8]>::to_vec));
            }
        }
        all
    }

    fn receive(socket: &UdpSocket, batch: &mut Batch) -> usize {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit)).unwrap(), 1);
        batch.receive(socket).unwrap()
    }

    #[test]
    fn messages_are_passed_on_with_their_addresses() {
        let (near, far, end) = (bound(), bound(), bound());
        let to = far.local_addr().unwrap();
        for payload in [&b"one"[..], b"", &[7; 65_507]] {
            near.send_to(payload, to).unwrap();
        }
        let (mut batch, mut passed) = (Batch::new(), 0);
        while passed < 3 {
            let count = receive(&far, &mut batch);
            for at in 0..count {
                assert_eq!(batch.addresses(at), (Some(near.local_addr().unwrap()), Some(to.ip())));
            }
            let target = Target { to: end.local_addr().unwrap(), from: Some("127.0.0.9".parse().unwrap()) };
            let sent = batch.send(&far, 0..count, Some(&target));
            assert!(sent.lost == 0 && sent.error.is_none(), "{sent:?}");
            passed += count;
        }
        let got = datagrams(&end, 3);
        assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [3, 0, 65_507]);
        near.send_to(b"x", to).unwrap();
        let count = receive(&far, &mut batch);
        assert_eq!((count, batch.datagrams(0).count(), batch.datagrams(1).count()), (1, 1, 0));
        assert!(batch.receive(&far).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
    }

    #[test]
    fn a_train_stays_one_and_its_datagrams_keep_their_lengths() {
        let (near, far, end) = (bound(), bound(), bound());
        receive_trains(&far);
        set_int(&near, libc::SOL_UDP, libc::UDP_SEGMENT, 100).unwrap();
        let payload: Vec<u8> = (0..950_u16).map(|at| (at % 251) as u8).collect();
        near.send_to(&payload, far.local_addr().unwrap()).unwrap();
        let mut batch = Batch::new();
        assert_eq!(receive(&far, &mut batch), 1, "the kernel gives the train in one piece");
        let lengths: Vec<_> = batch.datagrams(0).map(<[u8]>::len).collect();
        assert_eq!(lengths, [&[100; 9][..], &[50]].concat());
        let target = Target { to: end.local_addr().unwrap(), from: None };
        let sent = batch.send(&far, 0..1, Some(&target));
        assert!(sent.lost == 0 && sent.error.is_none(), "{sent:?}");
        let got = datagrams(&end, 10);
        assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), lengths);
        assert_eq!(got.concat(), payload);
    }

    #[test]
    fn a_train_is_sent_and_its_datagrams_can_be_changed_where_they_are() {
        let (near, far) = (bound(), bound());
        receive_trains(&far);
        let target = Target { to: far.local_addr().unwrap(), from: None };
        let payload: Vec<u8> = (0..950_u16).map(|at| (at % 251) as u8).collect();
        send_train(&near, &payload, 100, &target).unwrap();
        send_train(&near, b"one", 100, &target).unwrap();
        let (mut batch, mut got) = (Batch::new(), Vec::new());
        while got.len() < 11 {
            for at in 0..receive(&far, &mut batch) {
                batch.each(at, |datagram| datagram[0] ^= 0xff);
                got.extend(batch.datagrams(at).map(<[u8]>::to_vec));
            }
        }
        let mut expected: Vec<Vec<u8>> =
            payload.chunks(100).map(<[u8]>::to_vec).chain([b"one".to_vec()]).collect();
        expected.iter_mut().for_each(|datagram| datagram[0] ^= 0xff);
        assert_eq!(got, expected);
    }

    #[test]
    fn an_icmp_error_is_told_and_the_next_datagram_is_sent() {
        let (near, gone) = (bound(), bound());
        let to = gone.local_addr().unwrap();
        drop(gone);
        near.connect(to).unwrap();
        send_one(&near, b"into the void", None).unwrap();
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        poll(&mut [PollFd::new(&near, PollFlags::IN)], Some(&limit)).unwrap();
        let error = Batch::new().receive(&near).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
