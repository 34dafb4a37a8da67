//! What this kernel, this user and this machine allow, found out by looking and by harmless tries. For `doctor`.

/// The effective user id.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}
