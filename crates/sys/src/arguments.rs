//! The process's own arguments, as `ps` and `/proc/PID/cmdline` show them to every user of the host.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::ops::Range;

/// What stands in `ps` where a password stood.
const MASK: u8 = b'*';

/// The beginning of an invitation.
const INVITATION: &[u8] = b"sidetrack1:";

/// Overwrites the passwords of all arguments that look like `scheme://user:password@host`. Returns how many there were.
///
/// To be called first thing in `main`, after the arguments have been copied: [`std::env::args_os`] reads the same memory.
///
/// # Errors
/// If the kernel does not say where the arguments are. Then nothing has changed.
///
/// # Panics
/// If the process has more than one thread: another one could be reading the arguments.
pub fn mask_passwords() -> io::Result<usize> {
    assert!(crate::process::is_single_threaded(), "arguments are masked before any thread starts");
    let (start, end) =
        place(&std::fs::read_to_string("/proc/self/stat")?).ok_or(io::ErrorKind::InvalidData)?;
    let len = end.checked_sub(start).filter(|_| start != 0).ok_or(io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel has put the arguments there, on this process's own stack, which is mapped readable and
    // writable as long as the process lives. The only thread is this one, and it holds no reference to them: the
    // standard library copies what it hands out.
    let memory =
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(start), len) };
    let passwords = passwords(memory);
    for password in &passwords {
        if let Some(bytes) = memory.get_mut(password.clone()) {
            bytes.fill(MASK);
        }
    }
    Ok(passwords.len())
}

/// `arg_start` and `arg_end` of proc_pid_stat(5): fields 48 and 49. The second field, in parentheses, may hold anything.
fn place(stat: &str) -> Option<(usize, usize)> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(45);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Where passwords stand in arguments that end with a NUL each.
fn passwords(arguments: &[u8]) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut start = 0;
    for argument in arguments.split(|byte| *byte == 0) {
        found.extend(password(argument).map(|range| start + range.start..start + range.end));
        start += argument.len() + 1;
    }
    found
}

/// Where the password stands in one argument, such as `--via=socks5://user:password@host`. An invitation to a tunnel or an overlay
/// is a password from its colon on.
fn password(argument: &[u8]) -> Option<Range<usize>> {
    if argument.starts_with(INVITATION) {
        return Some(INVITATION.len()..argument.len());
    }
    let authority = argument.windows(3).position(|bytes| bytes == b"://")? + 3;
    let rest = argument.get(authority..)?;
    // Up to the last '@': a password that should have been percent-encoded and was not is hidden, too.
    let user_end = rest.iter().rposition(|byte| *byte == b'@')?;
    let colon = rest.get(..user_end)?.iter().position(|byte| *byte == b':')?;
    (colon + 1 < user_end).then_some(authority + colon + 1..authority + user_end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_of_urls_are_found_and_nothing_else() {
        let shown =
            |argument: &str| password(argument.as_bytes()).map(|at| argument.get(at).unwrap().to_owned());
        assert_eq!(shown("socks5://ann:secret@gw:1080").as_deref(), Some("secret"));
        assert_eq!(shown("--via=http://ann:s%40c@[::1]:3128?tfo=true").as_deref(), Some("s%40c"));
        assert_eq!(shown("socks6://ann:a:b/c@d@gw").as_deref(), Some("a:b/c@d"));
        assert_eq!(shown("sidetrack1:abc_-").as_deref(), Some("abc_-"));
        for none in
            ["", "://", "://@", "socks5://gw:1080", "socks5://ann@gw", "socks5://ann:@gw", "ann:secret@gw"]
        {
            assert_eq!(shown(none), None, "{none}");
        }
        let all = b"sidetrack\0run\0--via\0socks5://a:bc@d\0--via\0http://e:f@g\0";
        let found = passwords(all);
        assert_eq!(
            found.iter().map(|at| all.get(at.clone()).unwrap()).collect::<Vec<_>>(),
            [&b"bc"[..], b"f"]
        );
    }

    #[test]
    fn the_kernel_says_where_arguments_are() {
        let fields: Vec<String> = (3..=52).map(|number| number.to_string()).collect();
        assert_eq!(place(&format!("1 (a) b) c) {}", fields.join(" "))), Some((48, 49)));
        assert_eq!(place("1 (x) S 1"), None);
        assert_eq!(place(""), None);
        assert!(
            place(&std::fs::read_to_string("/proc/self/stat").unwrap())
                .is_some_and(|(start, end)| start < end)
        );
    }
}
