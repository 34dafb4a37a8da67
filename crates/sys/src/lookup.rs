//! Names to addresses by the system's own resolver, with the reason where there is none (getaddrinfo(3)).
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::ffi::CString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// `EAI_NODATA` of netdb.h: the name exists and has no address.
const EAI_NODATA: libc::c_int = -5;

/// Why a name has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAddress {
    /// There is no such name.
    NoName,
    /// The name is there, for something else.
    NoData,
    /// Unknown: no server answered, or the answer was an error.
    Unknown,
}

/// The addresses of a name, each once, in the order the system would try them. Blocks for as long as the system's
/// resolver does.
///
/// # Errors
/// Why there is none.
pub fn addresses(name: &str) -> Result<Vec<IpAddr>, NoAddress> {
    let name = CString::new(name).map_err(|_| NoAddress::NoName)?;
    // SAFETY: all zeroes is a valid addrinfo: integers, and null pointers.
    let mut hints: libc::addrinfo = unsafe { std::mem::zeroed() };
    hints.ai_socktype = libc::SOCK_STREAM;
    let mut list = ptr::null_mut();
    // SAFETY: name is NUL-terminated, hints is filled, and list is a place for the result; all live through the call.
    let code = unsafe { libc::getaddrinfo(name.as_ptr(), ptr::null(), &raw const hints, &raw mut list) };
    match code {
        0 => {}
        libc::EAI_NONAME => return Err(NoAddress::NoName),
        EAI_NODATA => return Err(NoAddress::NoData),
        _ => return Err(NoAddress::Unknown),
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: the list is getaddrinfo's, is not freed before the loop ends, and ends with a null pointer.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: as getaddrinfo says, the address is of the entry's family and as long as a sockaddr of it.
        let address = unsafe { address_of(entry) };
        found.extend(address.filter(|address| !found.contains(address)));
        next = entry.ai_next;
    }
    // SAFETY: the list is getaddrinfo's, and nothing refers to it any more.
    unsafe { libc::freeaddrinfo(list) };
    if found.is_empty() { Err(NoAddress::NoData) } else { Ok(found) }
}

/// # Safety
/// `ai_addr` must point to an address of the family `ai_family`, or be null.
unsafe fn address_of(entry: &libc::addrinfo) -> Option<IpAddr> {
    if entry.ai_addr.is_null() {
        return None;
    }
    match entry.ai_family {
        libc::AF_INET => {
            // SAFETY: the caller says that it is one; read unaligned, as nothing is said of that.
            let address = unsafe { entry.ai_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { entry.ai_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_names_become_addresses() {
        assert_eq!(addresses("192.0.2.1"), Ok(vec![Ipv4Addr::new(192, 0, 2, 1).into()]));
        assert_eq!(addresses("2001:db8::1"), Ok(vec!["2001:db8::1".parse().unwrap()]));
        assert!(addresses("localhost").unwrap().iter().all(IpAddr::is_loopback));
        assert_eq!(addresses("a\0b"), Err(NoAddress::NoName));
    }
}
