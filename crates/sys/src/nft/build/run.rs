//! The table of `sidetrack run`: inside the command's own network namespace.

use crate::nft::{Chain, ChainKind, Family, Field, Hook, Rule, Statement, TCP, Table};

/// `NF_IP_PRI_NAT_DST`.
const DSTNAT: i32 = crate::nft::priority::DSTNAT;

/// Sends every TCP connection that starts in this namespace, IPv4 and IPv6, to `port` of the namespace itself.
///
/// It needs a route for every address ([`crate::route::add_local_default`]). UDP is left alone on purpose: REDIRECT in OUTPUT
/// rewrites the destination of a query to 127.0.0.1, and the answer's source then does not fit.
pub fn run_namespace(port: u16) -> Table {
    let everything = Rule::new([Statement::is(Field::L4Proto, TCP), Statement::Redirect { port }]);
    let output = Chain::base("output", ChainKind::Nat, Hook::Output, DSTNAT).with(everything);
    Table::new(Family::Inet, "sidetrack").with_chain(output)
}
