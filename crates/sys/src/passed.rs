//! Descriptors that a service manager passes to a process that it starts: sd_listen_fds(3).
#![allow(unsafe_code, reason = "takes descriptors that were open before this program began")]

use std::ffi::OsString;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The first of them (`SD_LISTEN_FDS_START`); the others follow without a gap.
const FIRST: RawFd = 3;

/// The name of a descriptor without one in `LISTEN_FDNAMES`.
const UNNAMED: &str = "unknown";

static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes the descriptors with their names. From now on they are closed on exec. Empty: nothing was passed to this process, or it
/// was taken before. Call it before the program opens anything. `variable`: the environment.
///
/// # Errors
/// The environment names more descriptors than are open.
pub fn take(variable: impl Fn(&str) -> Option<OsString>) -> io::Result<Vec<(String, OwnedFd)>> {
    let names = names(variable, std::process::id());
    if names.is_empty() || TAKEN.swap(true, Relaxed) {
        return Ok(Vec::new());
    }
    let count = names.len();
    let numbered = (FIRST..).zip(names);
    let owned = numbered.map(|(number, name)| {
        // SAFETY: fcntl(2) on any number touches no memory; one that is not open is an error.
        if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
            let what = format!("LISTEN_FDS={count}, and descriptor {number} is not open");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        // SAFETY: it is open, and the caller has opened nothing yet, so it came from the process that started this one. `TAKEN` keeps a
        // second call from owning it, too.
        Ok((name, unsafe { OwnedFd::from_raw_fd(number) }))
    });
    owned.collect()
}

/// A name for each descriptor that the environment promises to this process.
fn names(variable: impl Fn(&str) -> Option<OsString>, own: u32) -> Vec<String> {
    let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
    let number = |name: &str| text(name).and_then(|value| value.parse::<u16>().ok());
    let is_ours = text("LISTEN_PID").is_some_and(|pid| pid.parse() == Ok(own));
    let count = number("LISTEN_FDS").filter(|_| is_ours).unwrap_or_default();
    let given = text("LISTEN_FDNAMES").unwrap_or_default();
    let given = given.split(':').filter(|name| !name.is_empty()).map(str::to_owned);
    given.chain(std::iter::repeat_with(|| UNNAMED.to_owned())).take(count.into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(entries: &[(&str, &str)]) -> Vec<String> {
        let variable = |name: &str| {
            entries.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(*value))
        };
        names(variable, 7)
    }

    #[test]
    fn only_what_is_meant_for_this_process_is_taken() {
        assert_eq!(named(&[]), [""; 0]);
        for wrong in ["8", "", "seven", "-7"] {
            assert_eq!(named(&[("LISTEN_PID", wrong), ("LISTEN_FDS", "1")]), [""; 0], "{wrong}");
        }
        for wrong in ["0", "-1", "", "many", "70000"] {
            assert_eq!(named(&[("LISTEN_PID", "7"), ("LISTEN_FDS", wrong)]), [""; 0], "{wrong}");
        }
    }

    #[test]
    fn each_has_a_name() {
        let of = |names| named(&[("LISTEN_PID", "7"), ("LISTEN_FDS", "2"), ("LISTEN_FDNAMES", names)]);
        assert_eq!(of("web:dns"), ["web", "dns"]);
        assert_eq!(of("web"), ["web", UNNAMED]);
        assert_eq!(of("web:dns:more"), ["web", "dns"]);
        assert_eq!(named(&[("LISTEN_PID", "7"), ("LISTEN_FDS", "1")]), [UNNAMED]);
    }
}
