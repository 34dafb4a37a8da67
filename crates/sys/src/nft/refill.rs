//! Replaces the content of a table in one step, without a moment in between.
//!
//! To delete a table and to make it anew in one transaction is not enough: the new chain stands before the old one in its
//! hook, and a packet that meets the new one before the transaction takes effect and the old one after it meets neither's
//! rules. A chain that stays has either its old rules or its new ones for each packet, with all chains it jumps to.
//!
//! Nor are sets of ranges filled at the moment at which rules take effect (seen on Linux 6.18: one reload in fourteen let a
//! connection past). So there are three transactions: the new sets, under names that are free; rules that use them; the
//! end of the old sets.

use super::compile::{self, Kind, header};
use super::{Base, Chain, ChainKind, Family, Hook, MapData, Policy, Set, Table};
use crate::netlink::{Attribute, Error, Message, Requests, Socket, attributes, flag};

/// What is in a table.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    chains: Vec<(String, Option<Base>)>,
    /// Names, and whether it is a map to verdicts.
    sets: Vec<(String, bool)>,
    /// Names and types.
    objects: Vec<(String, u32)>,
    flowtables: Vec<String>,
}

impl Inventory {
    /// Of the table of this name.
    pub(super) fn of(socket: &mut Socket, family: Family, table: &str) -> Result<Self, Error> {
        let named = |message: &Message<'_>, name: u16| {
            let text = |kind| Some(attributes(message.after(4)).first(kind)?.text()?.to_owned());
            text(1).filter(|found| found == table).and_then(|_| text(name))
        };
        Ok(Self {
            chains: dump(socket, family, Kind::GetChain, |message| {
                Some((named(message, 3)?, base(message)))
            })?,
            sets: dump(socket, family, Kind::GetSet, |message| {
                let data = attributes(message.after(4)).first(6).and_then(|a| a.u32_be());
                Some((named(message, 2)?, data == Some(compile::VERDICT)))
            })?,
            objects: dump(socket, family, Kind::GetObject, |message| {
                Some((named(message, 2)?, attributes(message.after(4)).first(3)?.u32_be()?))
            })?,
            flowtables: match dump(socket, family, Kind::GetFlowtable, |message| named(message, 2)) {
                // A kernel that does not know them has none.
                Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => Vec::new(),
                found => found?,
            },
        })
    }

    /// A chain that can stay, its rules apart.
    fn keeps(&self, chain: &Chain) -> bool {
        chain.base.is_some()
            && self.chains.iter().any(|(name, base)| *name == chain.name && *base == chain.base)
    }
}

fn dump<T>(
    socket: &mut Socket,
    family: Family,
    kind: Kind,
    read: impl FnMut(&Message<'_>) -> Option<T>,
) -> Result<Vec<T>, Error> {
    let mut request = Requests::new();
    let asked = "list what is in our nftables table";
    request.push(asked, kind.number(), flag::DUMP, &header(family.number()), |_| {});
    socket.dump(&request, read)
}

/// Where a chain is entered; `None` for one that is jumped to, and for one that is none of ours.
fn base(message: &Message<'_>) -> Option<Base> {
    const HOOK: u16 = 4;
    const POLICY: u16 = 5;
    const KIND: u16 = 7;
    let attribute = |kind| attributes(message.after(4)).first(kind);
    let hook = attribute(HOOK)?;
    let inside = |kind| hook.nested().first(kind).and_then(|a: Attribute<'_>| a.u32_be());
    let hook = [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting]
        .into_iter()
        .find(|hook| Some(compile::hook_number(*hook)) == inside(1))?;
    let kind = attribute(KIND)?;
    let kind = [ChainKind::Filter, ChainKind::Route, ChainKind::Nat]
        .into_iter()
        .find(|known| kind.text() == Some(compile::chain_kind(*known)))?;
    let policy = if attribute(POLICY)?.u32_be()? == 1 { Policy::Accept } else { Policy::Drop };
    Some(Base { kind, hook, priority: inside(2)?.cast_signed(), policy })
}

/// Replaces the content of the table of this name by `table`: completely or, on an error, not at all.
pub(super) fn refill(socket: &mut Socket, table: &Table) -> Result<(), Error> {
    let old = Inventory::of(socket, table.family, &table.name)?;
    let table = renamed(table, &old);
    // Elements of verdict maps name chains: they come with those.
    let (late, early): (Vec<_>, Vec<_>) =
        table.sets.iter().partition(|set| set.data == Some(MapData::Verdict));
    if !early.is_empty() {
        socket.transact(&compile::transaction(|requests| compile::fill_sets(requests, &table, &early)))?;
    }
    let swapped = socket.transact(&swap(&table, &old, &late));
    let unused: Vec<&str> = match swapped {
        Ok(()) => old.sets.iter().filter(|(_, verdicts)| !verdicts).map(|(name, _)| name.as_str()).collect(),
        Err(_) => early.iter().map(|set| set.name.as_str()).collect(),
    };
    if !unused.is_empty() {
        // Nothing refers to them. If it fails, the next time gets rid of them.
        let _ = socket.transact(&compile::transaction(|requests| {
            unused.iter().for_each(|set| delete_set(requests, &table, set));
        }));
    }
    swapped
}

/// With names of sets that are free.
fn renamed(table: &Table, old: &Inventory) -> Table {
    let free = |suffix: &str| {
        let taken = |set: &Set| old.sets.iter().any(|(other, _)| *other == format!("{}{suffix}", set.name));
        !table.sets.iter().any(taken)
    };
    let mut numbers = (1..).map(|number: u32| format!(".{number}"));
    let suffix = if free("") { None } else { numbers.find(|suffix| free(suffix)) };
    suffix.map_or_else(|| table.clone(), |suffix| table.clone().with_set_suffix(&suffix))
}

/// The transaction that swaps the rules.
fn swap(table: &Table, old: &Inventory, late: &[&Set]) -> Requests {
    compile::transaction(|requests| {
        empty(requests, table, old);
        let fresh = table.chains.iter().filter(|chain| !old.keeps(chain));
        fresh.for_each(|chain| compile::new_chain(requests, table, chain));
        // Time-outs that are there stay: connections refer to them.
        let fresh = table.timeouts.iter().filter(|policy| !is_kept(old, &policy.name));
        fresh.for_each(|policy| super::timeout::new_object(requests, table, policy));
        compile::fill_sets(requests, table, late);
        table.flowtables.iter().for_each(|flowtable| compile::new_flowtable(requests, table, flowtable));
        compile::fill_chains(requests, table);
    })
}

fn is_kept(old: &Inventory, timeouts: &str) -> bool {
    old.objects.iter().any(|(name, _)| name == timeouts)
}

/// Deletes rules, then maps to chains and flow tables, then chains and objects that do not stay. A flow table is always made
/// anew: what it forwarded takes the long way until a rule adds it again.
fn empty(requests: &mut Requests, table: &Table, old: &Inventory) {
    let (family, name) = (table.family, &table.name);
    let mut delete = |what: &str, kind: Kind, named: Option<(u16, &str)>, object: Option<u32>| {
        let asked = format!("delete {what} of the nftables table {family} {name}");
        requests.push(asked, kind.number(), 0, &header(family.number()), |w| {
            w.text(1, name);
            if let Some((attribute, name)) = named {
                w.text(attribute, name);
            }
            if let Some(object) = object {
                w.u32_be(3, object);
            }
        });
    };
    delete("the rules", Kind::DeleteRule, None, None);
    for (set, _) in old.sets.iter().filter(|(_, verdicts)| *verdicts) {
        delete("a map", Kind::DeleteSet, Some((2, set)), None);
    }
    for flowtable in &old.flowtables {
        delete("a flow table", Kind::DeleteFlowtable, Some((2, flowtable)), None);
    }
    let wanted = |name: &str| table.timeouts.iter().any(|policy| policy.name == name);
    for (object, kind) in old.objects.iter().filter(|(object, _)| !wanted(object)) {
        delete("an object", Kind::DeleteObject, Some((2, object)), Some(*kind));
    }
    let stays = |name: &str| table.chains.iter().any(|chain| chain.name == name && old.keeps(chain));
    for (chain, _) in old.chains.iter().filter(|(chain, _)| !stays(chain)) {
        delete("a chain", Kind::DeleteChain, Some((3, chain)), None);
    }
}

fn delete_set(requests: &mut Requests, table: &Table, set: &str) {
    let (family, name) = (table.family, &table.name);
    let asked = format!("delete set {set} of the nftables table {family} {name}");
    requests.push(asked, Kind::DeleteSet.number(), 0, &header(family.number()), |w| {
        w.text(1, name);
        w.text(2, set);
    });
}
