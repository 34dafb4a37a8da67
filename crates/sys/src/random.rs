//! Random bytes from the operating system.

/// Fresh random bytes, fit for secrets (getrandom(2)).
///
/// # Panics
/// If the kernel has no getrandom(2), which every kernel since 3.17 has.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("getrandom(2): {error}"),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn two_draws_differ() {
        assert_ne!(super::bytes::<16>(), super::bytes::<16>());
    }
}
