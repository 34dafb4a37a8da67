//! Making tables real, finding and deleting them.

use super::compile::{self, Kind, header};
use super::{Family, Table};
use crate::netlink::{Error, Message, Requests, Socket};

/// `NFT_TABLE_F_OWNER`.
const OWNER: u32 = 2;
/// `NFT_TABLE_F_PERSIST`.
const PERSIST: u32 = 4;
/// How often a replacement is tried when another process creates or deletes the table at the same moment.
const ATTEMPTS: usize = 3;

/// How long a table lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lifetime {
    /// Until it is deleted or its network namespace ends.
    #[default]
    Namespace,
    /// As long as the netlink socket that made it (Linux 5.12): gone even after SIGKILL, and no other socket can change it.
    Socket,
    /// No other socket can change it while the socket lives; afterwards it stays for a successor (Linux 6.9).
    SocketThenOrphan,
}

impl Lifetime {
    pub(super) const fn flags(self) -> u32 {
        match self {
            Self::Namespace => 0,
            Self::Socket => OWNER,
            Self::SocketThenOrphan => OWNER | PERSIST,
        }
    }
}

/// What the kernel says about a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableInfo {
    /// How long it lives.
    pub lifetime: Lifetime,
    /// The netlink port of the socket that owns it.
    pub owner: Option<u32>,
}

impl Table {
    /// Makes the table real and replaces one of the same name if there is one, in one transaction: no packet ever sees half of
    /// it. It lives as long as its network namespace.
    ///
    /// # Errors
    /// The kernel's refusal names the object it concerns. EPERM: no CAP_NET_ADMIN, or another process owns the table.
    pub fn apply(&self, socket: &mut Socket) -> Result<(), Error> {
        self.replace(socket, Lifetime::Namespace)
    }

    /// The same with a lifetime of choice. The socket must be a netfilter one of the namespace meant.
    ///
    /// # Errors
    /// As [`Table::apply`]; EOPNOTSUPP also if the kernel does not know the lifetime.
    pub fn replace(&self, socket: &mut Socket, lifetime: Lifetime) -> Result<(), Error> {
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let exists = find_table(socket, self.family, &self.name)?.is_some();
            match socket.transact(&self.replacement(lifetime, exists)) {
                // Another program created or deleted it between the two calls.
                Err(error) if matches!(error.errno(), Some(libc::EEXIST | libc::ENOENT)) => {
                    last = Some(error)
                }
                done => return done,
            }
        }
        last.map_or(Ok(()), Err)
    }

    fn replacement(&self, lifetime: Lifetime, exists: bool) -> Requests {
        compile::transaction(|requests| {
            if exists {
                compile::delete_table(requests, self.family, &self.name);
            }
            compile::create(requests, self, lifetime.flags());
        })
    }
}

/// What the kernel knows of a table; `None` if there is no such table.
///
/// # Errors
/// If netlink fails or refuses.
pub fn find_table(socket: &mut Socket, family: Family, name: &str) -> Result<Option<TableInfo>, Error> {
    let mut request = Requests::new();
    let asked = format!("look up the nftables table {family} {name}");
    request.push(asked, Kind::GetTable.number(), 0, &header(family.number()), |w| w.text(1, name));
    match socket.ask(&request, |message| Some(table_info(message))) {
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok(None),
        answer => answer,
    }
}

pub(super) fn table_info(message: &Message<'_>) -> TableInfo {
    const TABLE_FLAGS: u16 = 2;
    const TABLE_OWNER: u16 = 7;
    let attributes = crate::netlink::attributes(message.after(4));
    let flags = attributes.clone().first(TABLE_FLAGS).and_then(|a| a.u32_be()).unwrap_or(0);
    let owner = attributes.first(TABLE_OWNER).and_then(|a| a.u32_be()).filter(|_| flags & OWNER != 0);
    let lifetime = match (flags & OWNER != 0, flags & PERSIST != 0) {
        (_, true) => Lifetime::SocketThenOrphan,
        (true, false) => Lifetime::Socket,
        (false, false) => Lifetime::Namespace,
    };
    TableInfo { lifetime, owner }
}

/// Deletes a table and all in it; says whether there was one.
///
/// # Errors
/// EPERM: no CAP_NET_ADMIN, or a living process owns the table.
pub fn delete_table(socket: &mut Socket, family: Family, name: &str) -> Result<bool, Error> {
    let requests = compile::transaction(|requests| compile::delete_table(requests, family, name));
    match socket.transact(&requests) {
        Ok(()) => Ok(true),
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}
