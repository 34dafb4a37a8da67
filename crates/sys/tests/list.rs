//! Listing everybody's tables and base chains, in a fresh namespace.

use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nft::{self, Family, Lifetime, OwnedTable, Table};
use sidetrack_testkit::in_namespace;
use std::process::id;

#[test]
fn tables_and_base_chains_are_listed_with_their_owners() {
    in_namespace(|| {
        let mut socket = Socket::open(Protocol::Netfilter).unwrap();
        assert_eq!(nft::list_tables(&mut socket).unwrap(), []);
        let table = nft::run_namespace(9);
        let name = table.name.clone();
        let owned = OwnedTable::create(&table, Lifetime::Socket).unwrap();
        Table::new(Family::Ip6, format!("other-{}", id())).apply(&mut socket).unwrap();
        let tables = nft::list_tables(&mut socket).unwrap();
        let ours = tables.iter().find(|table| table.name == name).unwrap();
        assert_eq!((ours.family, ours.info.owner.is_some()), (Some(Family::Inet), true));
        let other = tables.iter().find(|table| table.name.starts_with("other-")).unwrap();
        assert_eq!((other.family, other.info.owner), (Some(Family::Ip6), None));
        let chains = nft::list_base_chains(&mut socket).unwrap();
        let [chain] = chains.as_slice() else { panic!("one base chain: {chains:?}") };
        assert_eq!(
            (chain.family.as_str(), chain.table.as_str(), chain.kind.as_str()),
            ("inet", &*name, "nat")
        );
        assert_eq!((chain.hook, chain.priority), (3, -100));
        owned.delete().unwrap();
        assert_eq!(nft::list_base_chains(&mut socket).unwrap(), []);
    });
}
