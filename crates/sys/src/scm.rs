//! Descriptors handed from one process to another: `SCM_RIGHTS` over a `SOCK_SEQPACKET` pair.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
    socketpair, sockopt,
};

/// Most bytes of one message.
pub const MAX_BYTES: usize = 128 * 1024;
/// Most descriptors of one message.
pub const MAX_FDS: usize = 64;

/// One message: at least one byte, and the descriptors that came with it (closed on exec).
#[derive(Debug)]
pub struct Message {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The descriptors, in the order they were sent.
    pub fds: Vec<OwnedFd>,
}

/// Two connected ends that keep the bounds of messages; both are closed on exec.
///
/// # Errors
/// What socketpair(2) says.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Who is at the other end of a connection, as the kernel knew it when it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process id.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// Listens on a unix socket whose connections keep the bounds of messages. Only its owner and root may connect (mode 0600).
///
/// # Errors
/// As bind(2): `AddrInUse` if a file has this name.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Before listen(2): until then each connect(2) is refused.
    rustix::fs::chmod(path, rustix::fs::Mode::from_raw_mode(0o600))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Accepts the next connection, and says who has made it.
///
/// # Errors
/// As accept(2).
pub fn accept(listener: impl AsFd) -> io::Result<(OwnedFd, Peer)> {
    let end = rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?;
    let known = sockopt::socket_peercred(&end)?;
    Ok((end, Peer { pid: known.pid.as_raw_nonzero().get(), uid: known.uid.as_raw() }))
}

/// Connects to a socket of [`listen`].
///
/// # Errors
/// As connect(2): `NotFound` or `ConnectionRefused` if no process listens there.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Lets [`send`] fail with `WouldBlock` if the other end takes nothing for this time.
///
/// # Errors
/// As setsockopt(2).
pub fn send_within(end: impl AsFd, limit: Duration) -> io::Result<()> {
    Ok(sockopt::set_socket_timeout(end, sockopt::Timeout::Send, Some(limit))?)
}

/// Sends one message.
///
/// # Errors
/// `InvalidInput` for no bytes, more than [`MAX_BYTES`] or more than [`MAX_FDS`]; `BrokenPipe` if the other
/// end is closed; `WouldBlock` on a non-blocking end.
pub fn send(end: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if bytes.is_empty() || bytes.len() > MAX_BYTES || fds.len() > MAX_FDS {
        // No bytes would read as the end of the stream at the other side.
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a message has 1 to 131072 bytes, up to 64 fds",
        ));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    loop {
        match sendmsg(&end, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Says that nothing follows in either direction: the other end reads the end of the stream.
///
/// # Errors
/// What shutdown(2) says.
pub fn close(end: impl AsFd) -> io::Result<()> {
    Ok(rustix::net::shutdown(end, rustix::net::Shutdown::Both)?)
}

/// Bytes as a descriptor to send along (memfd_create(2), sealed), for what is larger than a message.
///
/// # Errors
/// No memory, or no descriptor left.
pub fn attach(bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("sidetrack", flags)?;
    let mut file = std::fs::File::from(fd);
    std::io::Write::write_all(&mut file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file.into())
}

/// What makes the content of an attachment final. Files of a disk cannot have it: so no peer can make us read one, nor wait for
/// a file system that does not answer.
const SEALS: rustix::fs::SealFlags =
    rustix::fs::SealFlags::SHRINK.union(rustix::fs::SealFlags::GROW).union(rustix::fs::SealFlags::WRITE);

/// The bytes of such a descriptor; it never waits for more.
///
/// # Errors
/// `InvalidData` if it is not sealed memory, or has more than `most` bytes.
pub fn attached(fd: OwnedFd, most: usize) -> io::Result<Vec<u8>> {
    let wrong = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
    if !rustix::fs::fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SEALS)) {
        return Err(wrong("the attachment is not sealed memory"));
    }
    let file = std::fs::File::from(fd);
    let length = usize::try_from(file.metadata()?.len()).ok().filter(|length| *length <= most);
    let length = length.ok_or_else(|| wrong("the attachment is too large"))?;
    let mut bytes = vec![0; length];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0)?;
    Ok(bytes)
}

/// Waits until there is something to receive, the end included; `false` if nothing came in time.
///
/// # Errors
/// What poll(2) says.
pub fn wait(end: impl AsFd, limit: Option<std::time::Duration>) -> io::Result<bool> {
    let limit = limit.map(|limit| rustix::event::Timespec {
        tv_sec: limit.as_secs().cast_signed(),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let mut fds = [rustix::event::PollFd::new(&end, rustix::event::PollFlags::IN)];
    match rustix::event::poll(&mut fds, limit.as_ref()) {
        // A signal is not a message; the caller looks at the time again.
        Err(Errno::INTR) => Ok(false),
        ready => Ok(ready? > 0),
    }
}

/// As [`wait`], for two descriptors: which of them has something.
///
/// # Errors
/// What poll(2) says.
pub fn wait_for_one(ends: [&OwnedFd; 2], limit: Duration) -> io::Result<[bool; 2]> {
    let limit = rustix::event::Timespec {
        tv_sec: limit.as_secs().cast_signed(),
        tv_nsec: limit.subsec_nanos().into(),
    };
    let mut fds = ends.map(|end| rustix::event::PollFd::new(end, rustix::event::PollFlags::IN));
    match rustix::event::poll(&mut fds, Some(&limit)) {
        Err(Errno::INTR) => Ok([false; 2]),
        ready => {
            ready?;
            Ok(fds.map(|fd| !fd.revents().is_empty()))
        }
    }
}

/// Receives one message; `None` when the other end is closed.
///
/// # Errors
/// `InvalidData` if the message was larger than the limits (its descriptors are closed); `WouldBlock` on a
/// non-blocking end.
pub fn receive(end: impl AsFd) -> io::Result<Option<Message>> {
    let mut bytes = vec![0; MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&end, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            result => break result?,
        }
    };
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message was cut: too large, or no fds left",
        ));
    }
    bytes.truncate(received.bytes);
    Ok((received.bytes > 0).then_some(Message { bytes, fds }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    #[test]
    fn descriptors_arrive_in_order_with_their_bytes() {
        let (near, far) = pair().unwrap();
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        send(&near, b"first", &[reader.as_fd(), writer.as_fd()]).unwrap();
        send(&near, b"second", &[]).unwrap();
        drop(near);
        let first = receive(&far).unwrap().unwrap();
        assert_eq!((first.bytes.as_slice(), first.fds.len()), (&b"first"[..], 2));
        let [copy_of_reader, copy_of_writer] = <[OwnedFd; 2]>::try_from(first.fds).unwrap();
        File::from(copy_of_writer).write_all(b"a").unwrap();
        writer.write_all(b"b").unwrap();
        let mut one = [0; 1];
        reader.read_exact(&mut one).unwrap();
        assert_eq!(&one, b"a");
        File::from(copy_of_reader).read_exact(&mut one).unwrap();
        assert_eq!(&one, b"b");
        let second = receive(&far).unwrap().unwrap();
        assert_eq!((second.bytes.as_slice(), second.fds.len()), (&b"second"[..], 0));
        assert!(receive(&far).unwrap().is_none());
    }

    #[test]
    fn attachments_are_read_whole_and_never_waited_for() {
        let bytes = vec![7; MAX_BYTES * 3];
        assert_eq!(attached(attach(&bytes).unwrap(), bytes.len()).unwrap(), bytes);
        assert_eq!(attached(attach(&bytes).unwrap(), 9).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let (reader, _writer) = std::io::pipe().unwrap();
        assert_eq!(attached(reader.into(), 9).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let file = File::open("/etc/passwd").unwrap();
        assert_eq!(attached(file.into(), MAX_BYTES).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let open = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        assert_eq!(attached(open, 9).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn waiting_ends_with_a_message_the_end_or_the_limit() {
        let (near, far) = pair().unwrap();
        assert!(!wait(&far, Some(std::time::Duration::ZERO)).unwrap());
        send(&near, b"x", &[]).unwrap();
        assert!(wait(&far, None).unwrap());
        receive(&far).unwrap();
        drop(near);
        assert!(wait(&far, None).unwrap());
    }

    #[test]
    fn received_descriptors_close_on_exec() {
        let (near, far) = pair().unwrap();
        send(&near, b"x", &[near.as_fd()]).unwrap();
        let message = receive(&far).unwrap().unwrap();
        let flags = rustix::io::fcntl_getfd(&message.fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn limits_are_kept_on_both_ends() {
        let (near, far) = pair().unwrap();
        for (bytes, fds) in [(&b""[..], 0), (&[0; MAX_BYTES + 1][..], 0), (b"x", MAX_FDS + 1)] {
            let fds = vec![near.as_fd(); fds];
            assert_eq!(send(&near, bytes, &fds).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        send(&near, &[1; MAX_BYTES], &[near.as_fd(); MAX_FDS]).unwrap();
        let message = receive(&far).unwrap().unwrap();
        assert_eq!((message.bytes.len(), message.fds.len()), (MAX_BYTES, MAX_FDS));
        rustix::net::send(&near, &[1; MAX_BYTES + 1], SendFlags::empty()).unwrap();
        assert_eq!(receive(&far).unwrap_err().kind(), io::ErrorKind::InvalidData);
        // Not dropped: a child that another test is starting holds a copy until it execs.
        close(&far).unwrap();
        assert_eq!(send(&near, b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
