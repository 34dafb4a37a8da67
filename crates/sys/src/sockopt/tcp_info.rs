//! What the kernel's TCP knows about a connection (`TCP_INFO`).
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// A few fields of `struct tcp_info` (linux/tcp.h). Fields that an older kernel does not have are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// Data in our SYN was acknowledged: TCP Fast Open worked (`TCPI_OPT_SYN_DATA`).
    pub syn_data_acked: bool,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Least round-trip time seen.
    pub min_rtt: Duration,
    /// Congestion window, in segments.
    pub congestion_window_segments: u32,
    /// Largest segment we send, in bytes.
    pub send_mss_bytes: u32,
    /// Segments sent again since the connection began.
    pub retransmitted_segments: u32,
    /// Bytes the peer has acknowledged.
    pub acked_bytes: u64,
    /// Bytes received in order.
    pub received_bytes: u64,
    /// Segments that were sent and not acknowledged yet, the FIN counted.
    pub unacked_segments: u32,
    /// Bytes in the send buffer that were never sent.
    pub unsent_bytes: u32,
    /// Segments that count as lost at this moment.
    pub lost_segments: u32,
    /// Latest rate at which the peer took our bytes, bytes per second.
    pub delivery_rate_bytes: u64,
    /// Time since the peer last acknowledged anything, also what it had acknowledged before; milliseconds resolve it.
    pub last_ack: Duration,
}

/// Bytes we ask for; ends after `tcpi_delivery_rate`.
const LEN: usize = 168;
/// `TCPI_OPT_SYN_DATA`.
const SYN_DATA: u8 = 32;

/// Asks the kernel about a TCP socket.
///
/// # Errors
/// What getsockopt says.
pub fn tcp_info(fd: impl AsFd) -> io::Result<TcpInfo> {
    let mut raw = [0_u8; LEN];
    let mut len = libc::socklen_t::try_from(LEN).unwrap_or_default();
    // SAFETY: `raw` has room for `len` bytes and both live across the call; the kernel writes at most `len`.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            libc::TCP_INFO,
            raw.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(TcpInfo::from_raw(&raw)) } else { Err(io::Error::last_os_error()) }
}

impl TcpInfo {
    /// Decodes `struct tcp_info` of any kernel: what it does not have is zero.
    pub(crate) fn of_bytes(bytes: &[u8]) -> Self {
        let mut raw = [0; LEN];
        raw.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        Self::from_raw(&raw)
    }

    fn from_raw(raw: &[u8; LEN]) -> Self {
        let micros = |at| Duration::from_micros(u64::from(word(raw, at)));
        Self {
            syn_data_acked: raw[5] & SYN_DATA != 0,
            send_mss_bytes: word(raw, 16),
            unacked_segments: word(raw, 24),
            lost_segments: word(raw, 32),
            delivery_rate_bytes: long(raw, 160),
            last_ack: Duration::from_millis(word(raw, 56).into()),
            rtt: micros(68),
            congestion_window_segments: word(raw, 80),
            retransmitted_segments: word(raw, 100),
            acked_bytes: long(raw, 120),
            received_bytes: long(raw, 128),
            unsent_bytes: word(raw, 144),
            min_rtt: micros(148),
        }
    }
}

fn word(raw: &[u8; LEN], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&raw[at..at + 4]);
    u32::from_ne_bytes(bytes)
}

fn long(raw: &[u8; LEN], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&raw[at..at + 8]);
    u64::from_ne_bytes(bytes)
}
