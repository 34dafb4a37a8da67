//! `[capture]`: whether packets may be captured, and how many are kept.

/// Captures of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureAt {
    /// Whether packets may be captured.
    pub packets: bool,
    /// Bytes of the latest packets that are kept. 0: none.
    pub ring_bytes: u64,
    /// Bytes of each packet that are kept.
    pub ring_snap_bytes: u32,
}

impl CaptureAt {
    /// Bytes of the longest packet.
    pub const SNAP_MAX: u32 = 256 << 10;
}

impl Default for CaptureAt {
    fn default() -> Self {
        Self { packets: false, ring_bytes: 0, ring_snap_bytes: Self::SNAP_MAX }
    }
}
