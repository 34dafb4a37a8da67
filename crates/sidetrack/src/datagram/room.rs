//! Room for associations: each counts among all flows. One that shares the path of another one takes no descriptors.

use super::association::{Associations, Server};
use super::clients::Clients;
use super::path::{PathId, State};
use crate::carry::Failure;
use crate::carry::datagrams::Remote;
use crate::worker::Admission;
use sidetrack_core::association::{Id, MappingId};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{EndReason, Flow, Host};
use sidetrack_core::limit::Lack;
use sidetrack_core::policy::Carry;

impl Associations {
    /// Finds room for an association. If there is none, the one that is idle for longest leaves.
    pub(super) fn admit(
        &mut self,
        (id, mapping): (Id, MappingId),
        flow: &Flow,
        carry: &Carry,
    ) -> Result<Admission, Failure> {
        let client = flow.client.ip();
        // A hop has a connection beside the socket.
        let has_hops = matches!(carry.carrier, Carrier::Hops(_));
        let limit = |detail| Failure::new(EndReason::Limit, detail);
        let mut left = false;
        loop {
            // The association that leaves may be the last one on a path.
            let admission = if self.will_share(mapping, flow, carry) {
                Admission::of_datagrams_beside(&self.worker, client)
            } else {
                Admission::of_datagrams(&self.worker, client, has_hops)
            };
            let (is_own, detail) = match admission {
                Ok(admission) => return Ok(admission),
                Err(Lack::Room(detail)) => (false, detail),
                Err(Lack::Share(detail)) => (true, detail),
                Err(Lack::Memory(detail)) => return Err(limit(detail)),
            };
            // Two associations with one descriptor may have to leave for one with two.
            let leaves = if left && !has_hops { None } else { self.table.leave_for(id, is_own) };
            let Some((leaves, counts)) = leaves else { return Err(limit(detail)) };
            left = true;
            let detail = format!("it left for a newer one: {detail}");
            self.end(leaves, EndReason::Limit, Some(detail), counts);
        }
    }

    /// Finds room on hops that take no further flow: the association on them that is idle for longest leaves. Returns false if
    /// there is none, or if the one that waits for this path has ended.
    pub(super) fn leave_hops(&mut self, path: PathId, detail: &str) -> bool {
        let waits = match self.paths.get(path).map(|path| &path.state) {
            Some(State::Opening(waiting)) => waiting.first().map(|one| (one.id, one.carry.clone())),
            _ => None,
        };
        let Some((id, carry)) = waits.filter(|(id, _)| self.find(*id).is_some()) else { return false };
        // Elsewhere an association that leaves frees nothing: others share its path.
        if !matches!(carry.carrier, Carrier::Hops(_)) || !carry.carrier.leads_to_one() {
            return false;
        }
        let Self { table, slots, paths, .. } = self;
        let is_on_them = |other: Id| {
            let association = slots.get(other.slot as usize).and_then(|place| place.as_deref());
            let association = association.filter(|association| association.id == other);
            association.is_some_and(|association| {
                matches!(&association.server, Server::Path(its, _)
                    if paths.carrier_if_open(*its) == Some(&carry.carrier))
            })
        };
        let Some((leaves, counts)) = table.leave_among(id, is_on_them) else { return false };
        self.end(leaves, EndReason::Limit, Some(format!("it left for a newer one: {detail}")), counts);
        true
    }

    /// Asks hops for a path again, after an association has left.
    pub(super) fn ask_again(&mut self, path: PathId) {
        let Some(State::Opening(waiting)) = self.paths.get(path).map(|path| &path.state) else { return };
        let Some(one) = waiting.first() else { return };
        let (id, carry, destination) = (one.id, one.carry.clone(), one.remote.destination());
        self.ask_for_path((id, path), carry, destination, true);
    }

    /// Whether an association needs a path of its own to this destination.
    pub(super) fn is_own(&self, carrier: &Carrier, remote: &Remote) -> bool {
        matches!(self.clients, Clients::Asking { .. })
            || carrier.leads_to_one()
            // A hop's answers do not tell which address belongs to which name.
            || *carrier != Carrier::Direct && matches!(remote, Remote::Name(_))
    }

    /// Returns whose associations may share a path with one of this mapping. A SOCKS client has one mapping. Captured clients do
    /// not share what tells their answers apart.
    pub(super) const fn mapping_of_path(&self, mapping: MappingId) -> Option<MappingId> {
        match &self.clients {
            Clients::Captured(_) => Some(mapping),
            Clients::Asking { .. } | Clients::Associated(_) => None,
        }
    }

    /// Whether an association will use a path that is there.
    fn will_share(&self, mapping: MappingId, flow: &Flow, carry: &Carry) -> bool {
        // It is not known yet which address a name has.
        let Host::Ip(ip) = carry.destination(flow).host else { return false };
        let is_own = matches!(self.clients, Clients::Asking { .. }) || carry.carrier.leads_to_one();
        let v6 = carry.carrier == Carrier::Direct && ip.to_canonical().is_ipv6();
        let path = self.paths.shared(&carry.carrier, self.mapping_of_path(mapping));
        !is_own && path.is_some_and(|path| self.paths.keeps(path, v6))
    }

    /// Takes the descriptors of an association for a path that others will use, too.
    pub(super) fn shares_descriptors(&mut self, id: Id) -> Option<Admission> {
        self.find_mut(id)?.admission.as_mut()?.share()
    }
}
