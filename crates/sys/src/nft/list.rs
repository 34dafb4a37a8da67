//! What tables and base chains a network namespace has, ours and others'.

use super::Family;
use super::apply::{TableInfo, table_info};
use super::compile::{Kind, header};
use crate::netlink::{Error, Message, Requests, Socket, attributes, flag};

/// A table as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedTable {
    /// Its family, if it is one that we use.
    pub family: Option<Family>,
    /// Its name.
    pub name: String,
    /// How long it lives, and who owns it.
    pub info: TableInfo,
}

/// A base chain: where rules meet packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedChain {
    /// The table's family as a word: `ip`, `ip6`, `inet`, `bridge`, `arp`, `netdev`, or its number.
    pub family: String,
    /// The table.
    pub table: String,
    /// The chain.
    pub name: String,
    /// `filter`, `nat` or `route`.
    pub kind: String,
    /// `NF_INET_PRE_ROUTING` 0, `LOCAL_IN` 1, `FORWARD` 2, `LOCAL_OUT` 3, `POST_ROUTING` 4.
    pub hook: u32,
    /// Lower is asked earlier.
    pub priority: i32,
}

/// All tables of the namespace of this netfilter socket.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN; failures of the socket.
pub fn list_tables(socket: &mut Socket) -> Result<Vec<ListedTable>, Error> {
    dump(socket, "list the nftables tables", Kind::GetTable, |message| {
        const TABLE_NAME: u16 = 1;
        let number = *message.payload.first()?;
        let family = [Family::Inet, Family::Ip, Family::Ip6].into_iter().find(|f| f.number() == number);
        let name = attributes(message.after(4)).first(TABLE_NAME)?.text()?.to_owned();
        Some(ListedTable { family, name, info: table_info(message) })
    })
}

/// All base chains of the namespace of this netfilter socket.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN; failures of the socket.
pub fn list_base_chains(socket: &mut Socket) -> Result<Vec<ListedChain>, Error> {
    dump(socket, "list the nftables chains", Kind::GetChain, base_chain)
}

fn dump<T>(
    socket: &mut Socket,
    asked: &'static str,
    kind: Kind,
    read: impl FnMut(&Message<'_>) -> Option<T>,
) -> Result<Vec<T>, Error> {
    const ALL_FAMILIES: u8 = 0;
    let mut request = Requests::new();
    request.push(asked, kind.number(), flag::DUMP, &header(ALL_FAMILIES), |_| {});
    socket.dump(&request, read)
}

fn base_chain(message: &Message<'_>) -> Option<ListedChain> {
    const CHAIN_TABLE: u16 = 1;
    const CHAIN_NAME: u16 = 3;
    const CHAIN_HOOK: u16 = 4;
    const CHAIN_TYPE: u16 = 7;
    const HOOK_NUMBER: u16 = 1;
    const HOOK_PRIORITY: u16 = 2;
    let attribute = |kind| attributes(message.after(4)).first(kind);
    // A chain without a hook is only jumped to.
    let hook = attribute(CHAIN_HOOK)?;
    let word = |kind| hook.nested().first(kind).and_then(|a| a.u32_be());
    Some(ListedChain {
        family: family_word(*message.payload.first()?),
        table: attribute(CHAIN_TABLE)?.text()?.to_owned(),
        name: attribute(CHAIN_NAME)?.text()?.to_owned(),
        kind: attribute(CHAIN_TYPE)?.text()?.to_owned(),
        hook: word(HOOK_NUMBER)?,
        priority: word(HOOK_PRIORITY)?.cast_signed(),
    })
}

fn family_word(number: u8) -> String {
    match number {
        1 => "inet".to_owned(),
        2 => "ip".to_owned(),
        3 => "arp".to_owned(),
        5 => "netdev".to_owned(),
        7 => "bridge".to_owned(),
        10 => "ip6".to_owned(),
        other => other.to_string(),
    }
}
