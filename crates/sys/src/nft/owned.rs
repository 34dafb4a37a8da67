//! A table that lives as long as we do.

use super::apply::{Lifetime, find_table};
use super::compile::{self, transaction};
use super::ct_state::INVALID;
use super::refill::refill;
use super::{Chain, Family, Field, Rule, Statement, Table, Test, Value, delete_table};
use crate::netlink::{Error, Protocol, Socket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Why a table could not be had for ourselves.
#[derive(Debug, thiserror::Error)]
pub enum OwnError {
    /// Linux before 5.12.
    #[error(
        "this kernel cannot tie an nftables table to a process (it needs Linux 5.12): rules would stay after a crash; run `sidetrack cleanup` then"
    )]
    OwnerUnsupported,
    /// Linux before 6.9.
    #[error(
        "this kernel cannot keep an nftables table for a successor (it needs Linux 6.9), so on_crash = \"closed\" cannot be had; use on_crash = \"open\""
    )]
    PersistUnsupported,
    /// A living process has it.
    #[error(
        "the nftables table {family} {name} belongs to another running process (netlink port {port}): is sidetrack running already?"
    )]
    OwnedByAnother {
        /// Family of the table.
        family: Family,
        /// Its name.
        name: String,
        /// The netlink port of the owner, mostly its process id.
        port: u32,
    },
    /// There is nothing to adopt.
    #[error("there is no nftables table {family} {name} without an owner to take over")]
    NoOrphan {
        /// Family of the table.
        family: Family,
        /// Its name.
        name: String,
    },
    /// Everything else.
    #[error(transparent)]
    Netlink(#[from] Error),
}

/// A table owned by the netlink socket in here: no other socket can change it, `nft flush ruleset` of others leaves it, and it goes
/// when the socket goes, even by SIGKILL (unless it was made to stay for a successor). Dropped, it is gone at once.
///
/// The descriptor is close-on-exec. A child that is forked and does not exec must close it, or the table outlives us with it.
#[derive(Debug)]
pub struct OwnedTable {
    socket: Socket,
    family: Family,
    name: String,
    lifetime: Lifetime,
    /// Its rules have made the kernel track connections, some of which may still be there.
    tracks: bool,
}

/// A chain that nothing enters, with a rule for which the kernel goes on tracking connections.
const TRACKED: &str = "tracked";

impl OwnedTable {
    /// Makes the table, instead of an orphan or an unowned one of the same name.
    ///
    /// # Errors
    /// See [`OwnError`]; nothing has changed then.
    pub fn create(table: &Table, lifetime: Lifetime) -> Result<Self, OwnError> {
        let mut socket = Socket::open(Protocol::Netfilter)?;
        refuse_if_owned(&mut socket, table.family, &table.name)?;
        match table.replace(&mut socket, lifetime) {
            Ok(()) => {
                let (family, name) = (table.family, table.name.clone());
                Ok(Self { socket, family, name, lifetime, tracks: table.tracks() })
            }
            Err(error) => Err(unsupported(&mut socket, lifetime).unwrap_or(OwnError::Netlink(error))),
        }
    }

    /// Takes over the table that a predecessor left ([`Lifetime::SocketThenOrphan`]) as it is; its rules never pause.
    ///
    /// # Errors
    /// See [`OwnError`].
    pub fn adopt(family: Family, name: &str) -> Result<Self, OwnError> {
        let mut socket = Socket::open(Protocol::Netfilter)?;
        refuse_if_owned(&mut socket, family, name)?;
        let lifetime = Lifetime::SocketThenOrphan;
        let found = find_table(&mut socket, family, name)?;
        if found.map(|info| info.lifetime) != Some(lifetime) {
            return Err(OwnError::NoOrphan { family, name: name.into() });
        }
        let take = transaction(|requests| compile::new_table(requests, family, name, lifetime.flags(), 0));
        socket.transact(&take)?;
        // What the predecessor's rules were is not known here.
        Ok(Self { socket, family, name: name.into(), lifetime, tracks: true })
    }

    /// The table that another process made and still has: `socket` is a copy of its owner. `table` names it, and is the content that
    /// follows by [`OwnedTable::replace_as`].
    ///
    /// # Errors
    /// [`OwnError::NoOrphan`] if the table does not exist any more, or netlink fails.
    pub fn given(socket: OwnedFd, table: &Table) -> Result<Self, OwnError> {
        let (mut socket, family, name) = (Socket::from(socket), table.family, table.name.clone());
        match find_table(&mut socket, family, &name)? {
            Some(found) => {
                Ok(Self { socket, family, name, lifetime: found.lifetime, tracks: table.tracks() })
            }
            None => Err(OwnError::NoOrphan { family, name }),
        }
    }

    /// Closes the socket and leaves the table to another process, which has a copy of the socket.
    pub fn release(mut self) {
        self.lifetime = Lifetime::Namespace;
    }

    /// Replaces the content; on failure the old content stays. Every packet meets either the one or the
    /// other.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn replace(&mut self, table: &Table) -> Result<(), Error> {
        let table = self.next(table);
        refill(&mut self.socket, &table)
    }

    /// New content under our name. Once a rule of ours has needed conntrack, one always does: with the last such rule the
    /// kernel would end tracking, and with it the address translation of connections that stand.
    fn next(&mut self, table: &Table) -> Table {
        let mut table = Table { family: self.family, name: self.name.clone(), ..table.clone() };
        if self.tracks && !table.tracks() {
            let invalid = Statement::Match(vec![Field::CtState], Test::AnyOf(Value::CtState(INVALID)));
            table.chains.push(Chain::regular(TRACKED).with(Rule::new([invalid])));
        }
        self.tracks |= table.tracks();
        table
    }

    /// The same with another lifetime from then on. Where that is a change, a packet that comes at the same moment may pass
    /// both contents by.
    ///
    /// # Errors
    /// As [`OwnedTable::create`]; the old content and lifetime stay then.
    pub fn replace_as(&mut self, table: &Table, lifetime: Lifetime) -> Result<(), OwnError> {
        if lifetime == self.lifetime {
            return Ok(self.replace(table)?);
        }
        let table = self.next(table);
        match table.replace(&mut self.socket, lifetime) {
            Ok(()) => self.lifetime = lifetime,
            Err(error) => {
                return Err(unsupported(&mut self.socket, lifetime).unwrap_or(OwnError::Netlink(error)));
            }
        }
        Ok(())
    }

    /// The netlink port that owns it, by which reports of our own changes are told from those of others'; 0 if it has no owner.
    ///
    /// # Errors
    /// If netlink fails.
    pub fn port(&mut self) -> Result<u32, Error> {
        let found = find_table(&mut self.socket, self.family, &self.name)?;
        Ok(found.and_then(|info| info.owner).unwrap_or(0))
    }

    /// How long it lives.
    pub const fn lifetime(&self) -> Lifetime {
        self.lifetime
    }

    /// Deletes the table, whatever its lifetime.
    ///
    /// # Errors
    /// If netlink fails.
    pub fn delete(mut self) -> Result<(), Error> {
        let deleted = delete_table(&mut self.socket, self.family, &self.name);
        // Nothing is left for the drop: a table of this name is another's from now on.
        self.lifetime = Lifetime::Namespace;
        deleted.map(|_| ())
    }
}

impl AsFd for OwnedTable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for OwnedTable {
    /// A table that lives as long as the socket is deleted before the socket closes: a child that another thread has forked
    /// and that has not yet exec'd holds a copy of the socket, with which the rules would stay for a moment.
    fn drop(&mut self) {
        if self.lifetime == Lifetime::Socket {
            // Without the right to (dropped meanwhile), the kernel does it when the last copy closes.
            let _ = delete_table(&mut self.socket, self.family, &self.name);
        }
    }
}

fn refuse_if_owned(socket: &mut Socket, family: Family, name: &str) -> Result<(), OwnError> {
    match find_table(socket, family, name)?.and_then(|info| info.owner) {
        Some(port) => Err(OwnError::OwnedByAnother { family, name: name.into(), port }),
        None => Ok(()),
    }
}

/// Whether the kernel lacks the lifetime itself: asked only after a failure, to say the right thing.
fn unsupported(socket: &mut Socket, lifetime: Lifetime) -> Option<OwnError> {
    let mut knows = |lifetime| super::probe::knows_lifetime(socket, lifetime).unwrap_or(true);
    if lifetime == Lifetime::Namespace {
        None
    } else if !knows(Lifetime::Socket) {
        Some(OwnError::OwnerUnsupported)
    } else if lifetime == Lifetime::SocketThenOrphan && !knows(lifetime) {
        Some(OwnError::PersistUnsupported)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there(name: &str) -> bool {
        let mut asking = Socket::open(Protocol::Netfilter).unwrap();
        find_table(&mut asking, Family::Inet, name).unwrap().is_some()
    }

    /// A copy of the socket as a child has it between fork and exec.
    #[test]
    fn a_dropped_table_is_gone_though_a_copy_of_its_socket_lives() {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let test = std::thread::spawn(|| {
            crate::netns::unshare_net().unwrap();
            let table = Table::new(Family::Inet, "owned");
            for (lifetime, stays) in [(Lifetime::Socket, false), (Lifetime::SocketThenOrphan, true)] {
                let owned = match OwnedTable::create(&table, lifetime) {
                    Ok(owned) => owned,
                    Err(OwnError::PersistUnsupported) => continue,
                    Err(error) => panic!("{error}"),
                };
                let copy = owned.socket.as_fd().try_clone_to_owned().unwrap();
                drop(owned);
                assert_eq!(there("owned"), stays, "{lifetime:?}");
                drop(copy);
            }
        });
        test.join().unwrap();
    }
}
