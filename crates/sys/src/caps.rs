//! What this process may do: capabilities, user, limits (capabilities(7), prctl(2), getrlimit(2)).
//!
//! Capabilities belong to threads. What takes them away here is to be called while the process has one
//! thread, so that every later thread inherits the result.

use std::io;

pub use rustix::thread::CapabilitySet;

use rustix::process::{Pid, Resource, Rlimit, Signal};
use rustix::thread::{
    CapabilitySets, capability_is_in_ambient_set, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
};

/// The five capability sets of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// What the kernel checks.
    pub effective: CapabilitySet,
    /// What `effective` may be raised to.
    pub permitted: CapabilitySet,
    /// What survives the exec of a file that has it inheritable too.
    pub inheritable: CapabilitySet,
    /// The most any exec can give.
    pub bounding: CapabilitySet,
    /// What survives the exec of an ordinary file.
    pub ambient: CapabilitySet,
}

/// The capability sets of the calling thread.
///
/// # Errors
/// What capget(2) or prctl(2) says.
pub fn capabilities() -> io::Result<Capabilities> {
    let sets = rustix::thread::capabilities(None)?;
    let mut bounding = CapabilitySet::empty();
    let mut ambient = CapabilitySet::empty();
    for capability in known() {
        bounding.set(capability, capability_is_in_bounding_set(capability)?);
        // Kernels before 4.3 have no ambient set.
        ambient.set(capability, capability_is_in_ambient_set(capability).unwrap_or(false));
    }
    Ok(Capabilities {
        effective: sets.effective,
        permitted: sets.permitted,
        inheritable: sets.inheritable,
        bounding,
        ambient,
    })
}

/// True if the kernel would let the calling thread use all of `wanted` in its own user namespace.
pub fn holds(wanted: CapabilitySet) -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(wanted))
}

/// True if it can write firewall rules and make namespaces as root does: CAP_NET_ADMIN and CAP_SYS_ADMIN.
pub fn is_network_root() -> bool {
    holds(CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN)
}

/// Gives up every capability but `kept`, for good: neither this thread nor what it executes gets more back.
///
/// # Errors
/// `PermissionDenied` if `kept` holds what is not permitted; what prctl(2) says.
pub fn keep_only(kept: CapabilitySet) -> io::Result<()> {
    // Taking from the bounding set needs CAP_SETPCAP itself. Without it there is nothing to take that a
    // program could give back, save by a set-user-id file: no_new_privs closes that.
    if holds(CapabilitySet::SETPCAP) {
        for capability in known().filter(|capability| !kept.contains(*capability)) {
            if capability_is_in_bounding_set(capability)? {
                remove_capability_from_bounding_set(capability)?;
            }
        }
    }
    clear_ambient_capability_set()?;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Becomes an ordinary user and group, with these supplementary groups, and keeps only `kept` of the capabilities held now.
///
/// A parent-death signal stays (prctl(2) PR_SET_PDEATHSIG): the process that started this one counts on it, and the kernel
/// clears it with every change of user.
///
/// # Errors
/// `PermissionDenied` without CAP_SETUID and CAP_SETGID, or as [`keep_only`].
///
/// # Panics
/// If the process has more than one thread: the others would stay what they are.
pub fn become_user(uid: u32, gid: u32, groups: &[u32], kept: CapabilitySet) -> io::Result<()> {
    assert!(crate::process::is_single_threaded(), "become_user is for a process with one thread");
    let (parent, at_its_death) =
        (rustix::process::getppid(), rustix::process::parent_process_death_signal()?);
    rustix::thread::set_keep_capabilities(true)?;
    let groups: Vec<_> = groups.iter().map(|gid| rustix::process::Gid::from_raw(*gid)).collect();
    rustix::thread::set_thread_groups(&groups)?;
    let (uid, gid) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    // A change of user empties the effective set and, thanks to the flag above, keeps the permitted one;
    // CAP_SETPCAP is raised once more to shrink the bounding set.
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    let permitted = rustix::thread::capabilities(None)?.permitted;
    let sets = CapabilitySets {
        effective: permitted & (kept | CapabilitySet::SETPCAP),
        permitted,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    keep_only(kept)?;
    rustix::thread::set_keep_capabilities(false)?;
    if let Some(signal) = at_its_death {
        rustix::process::set_parent_process_death_signal(Some(signal))?;
        if rustix::process::getppid() != parent {
            // The parent has ended meanwhile, and its signal was lost.
            rustix::process::kill_process(rustix::process::getpid(), signal)?;
        }
    }
    Ok(())
}

/// True if this process may become this user and group: it has CAP_SETUID and CAP_SETGID, and its user namespace knows both ids.
pub fn can_become(uid: u32, gid: u32) -> bool {
    let is_mapped = |map: &str, id: u32| {
        let map = std::fs::read_to_string(map).unwrap_or_default();
        map.lines().any(|line| {
            let mut numbers = line.split_whitespace().map(str::parse::<u64>);
            let (Some(Ok(first)), _, Some(Ok(count))) = (numbers.next(), numbers.next(), numbers.next())
            else {
                return false;
            };
            (first..first + count).contains(&u64::from(id))
        })
    };
    let denied = std::fs::read_to_string("/proc/self/setgroups").is_ok_and(|word| word.trim() == "deny");
    holds(CapabilitySet::SETUID | CapabilitySet::SETGID)
        && !denied
        && is_mapped("/proc/self/uid_map", uid)
        && is_mapped("/proc/self/gid_map", gid)
}

/// Asks the kernel to send `signal` when the thread that started this process ends. False if it has ended
/// already: then the signal will not come, and the caller should leave.
///
/// Cleared by changes of user, group or capabilities, so it is to be the last such step before exec.
///
/// # Errors
/// What prctl(2) says.
pub fn signal_on_parent_death(signal: Signal, parent: Pid) -> io::Result<bool> {
    rustix::process::set_parent_process_death_signal(Some(signal))?;
    Ok(rustix::process::getppid() == Some(parent))
}

/// Soft and hard limit of open descriptors (`RLIMIT_NOFILE`); `u64::MAX`: no limit.
pub fn open_files_limit() -> (u64, u64) {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX))
}

/// Raises the soft limit of open descriptors to the hard one and returns the limit then in force. Children
/// inherit it: [`set_open_files_limit`] puts the old one back for programs that use select(2).
///
/// # Errors
/// What setrlimit(2) says.
pub fn raise_open_files_limit() -> io::Result<u64> {
    let (soft, hard) = open_files_limit();
    if soft < hard {
        set_open_files_limit(hard)?;
    }
    Ok(open_files_limit().0)
}

/// Sets the soft limit of open descriptors, at most the hard one.
///
/// # Errors
/// `InvalidInput` above the hard limit.
pub fn set_open_files_limit(soft: u64) -> io::Result<()> {
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(soft), maximum })?)
}

/// Every capability this kernel knows.
fn known() -> impl Iterator<Item = CapabilitySet> {
    (0..u64::BITS)
        .map(|bit| CapabilitySet::from_bits_retain(1 << bit))
        .take_while(|capability| capability_is_in_bounding_set(*capability).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Capabilities are a thread's own: what a test gives up is lost to its thread only.
    fn in_own_thread(test: impl FnOnce() + Send + 'static) {
        std::thread::spawn(test).join().unwrap();
    }

    #[test]
    fn the_sets_agree_with_the_kernel() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        };
        let sets = capabilities().unwrap();
        assert_eq!(sets.effective.bits(), line("CapEff:"));
        assert_eq!(sets.permitted.bits(), line("CapPrm:"));
        assert_eq!(sets.bounding.bits(), line("CapBnd:"));
        assert_eq!(sets.ambient.bits(), line("CapAmb:"));
    }

    #[test]
    fn what_is_given_up_stays_away() {
        if !is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        in_own_thread(|| {
            keep_only(CapabilitySet::NET_RAW).unwrap();
            let sets = capabilities().unwrap();
            assert_eq!(sets.effective, CapabilitySet::NET_RAW);
            assert_eq!(sets.permitted, CapabilitySet::NET_RAW);
            assert_eq!(sets.bounding, CapabilitySet::NET_RAW);
            assert!(sets.ambient.is_empty() && sets.inheritable.is_empty());
            assert!(rustix::thread::no_new_privs().unwrap());
            assert!(keep_only(CapabilitySet::NET_ADMIN).is_err());
            assert!(!is_network_root());
        });
        assert!(is_network_root(), "other threads keep theirs");
    }

    #[test]
    fn the_open_files_limit_rises_to_the_hard_one() {
        let (soft, hard) = open_files_limit();
        assert!(soft <= hard);
        assert_eq!(raise_open_files_limit().unwrap(), hard);
        set_open_files_limit(soft).unwrap();
        assert_eq!(open_files_limit(), (soft, hard));
        if hard < u64::MAX {
            assert!(set_open_files_limit(hard + 1).is_err());
        }
    }
}
