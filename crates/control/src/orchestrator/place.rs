//! Places the containers of functions on the nodes that domains offer (EPI framework, Sec. II-A: hardware selection, horizontal
//! against vertical scaling). The decision is `core::placement`; here are its inputs and its words.

use super::Orchestrator;
use super::master::Master;
use crate::api::{Agreed, Application, ApplicationStatus, Offer, Placed, Placement, Planned};
use crate::link::LinkError;
use crate::store::StoreError;
use hyper::Method;
use sidetrack_core::placement::{Demand, Node, Running, Step, plan};
use std::collections::{BTreeMap, BTreeSet};

/// Functions with a demand at a party, in the order of their names.
pub(super) fn needed(master: &Master, movements: &[Agreed]) -> BTreeSet<(String, String)> {
    let mut needed = BTreeSet::new();
    for Agreed { wanted, functions_client, functions_server, .. } in movements {
        let Some((client, data)) = master.parties(wanted) else { continue };
        needed.extend(functions_client.iter().map(|function| (client.clone(), function.clone())));
        needed.extend(functions_server.iter().map(|function| (data.clone(), function.clone())));
    }
    needed
}

/// The containers that applications have on the nodes of a party, with their names.
fn running(party: &str, nodes: &[Node], placed: &[Placed]) -> (Vec<Running>, Vec<String>) {
    let mut found: BTreeMap<(&str, &str), Running> = BTreeMap::new();
    for one in placed.iter().filter(|one| one.party == party) {
        let Some(node) = nodes.iter().position(|node| *node.name == *one.node) else { continue };
        let fresh =
            || Running { function: one.function.as_str().into(), node, cpu_milli: 0, memory_bytes: 0 };
        let there = found.entry((one.node.as_str(), one.container.as_str())).or_insert_with(fresh);
        there.cpu_milli = there.cpu_milli.saturating_add(one.cpu_milli);
        there.memory_bytes = there.memory_bytes.saturating_add(one.memory_bytes);
    }
    let names = found.keys().map(|(_, container)| (*container).to_owned()).collect();
    (found.into_values().collect(), names)
}

/// Places one function at one party. `id` names its new containers apart from those of other applications.
fn place(offer: &Offer, demand: &Demand, placed: &[Placed], id: &str) -> Placement {
    let nodes: Vec<_> = offer
        .rooms
        .iter()
        .map(|room| Node {
            name: room.node.as_str().into(),
            cpu_milli: room.cpu_milli,
            memory_bytes: room.memory_bytes,
            cost_milli: room.cost_milli,
            labels: room.labels.iter().map(|label| label.as_str().into()).collect(),
        })
        .collect();
    let (mut state, mut names) = running(&offer.party, &nodes, placed);
    // What others use stays theirs: this application asks for its demand in addition.
    let theirs: u64 =
        state.iter().filter(|one| one.function == demand.function).map(|one| one.cpu_milli).sum();
    let demand = Demand { cpu_milli: demand.cpu_milli.saturating_add(theirs), ..demand.clone() };
    let made = plan(&nodes, &state, &demand);
    let (mut steps, mut taken) = (Vec::new(), Vec::new());
    for step in &made.steps {
        let (node, container, cpu_milli, memory_bytes) = match *step {
            Step::Raise { container, to_cpu_milli } => {
                let (Some(one), Some(name)) = (state.get_mut(container), names.get(container)) else {
                    continue;
                };
                let gain = to_cpu_milli.saturating_sub(one.cpu_milli);
                one.cpu_milli = to_cpu_milli;
                (one.node, name.clone(), gain, 0)
            }
            Step::Add { node, cpu_milli } => {
                let name = format!("{}-{id}-{}", demand.function, names.len());
                names.push(name.clone());
                let (function, memory_bytes) = (demand.function.clone(), demand.memory_bytes);
                state.push(Running { function, node, cpu_milli, memory_bytes });
                (node, name, cpu_milli, demand.memory_bytes)
            }
        };
        let node = nodes.get(node).map(|node| node.name.to_string()).unwrap_or_default();
        let verb = if memory_bytes == 0 { "vertical: raise" } else { "horizontal: start" };
        steps.push(format!("{verb} {container} on '{node}' by {cpu_milli} thousandths of a core"));
        let (party, function) = (offer.party.clone(), demand.function.to_string());
        taken.push(Placed { party, node, function, container, cpu_milli, memory_bytes });
    }
    let why = made.why.iter().map(|choice| {
        let sign = if choice.taken { "->" } else { "  " };
        match &choice.cost {
            Ok(cost) => format!("{sign} step {}: {}: cost {cost}", choice.round + 1, choice.words),
            Err(why) => format!("{sign} step {}: {}: no: {why}", choice.round + 1, choice.words),
        }
    });
    Placement {
        party: offer.party.clone(),
        function: demand.function.to_string(),
        steps,
        cost_milli: made.cost,
        missing_cpu_milli: made.missing_cpu_milli,
        why: why.collect(),
        placed: taken,
    }
}

impl Orchestrator {
    /// Places all functions of these movements that have a demand, at parties that offer room.
    ///
    /// # Errors
    /// The store fails.
    pub(super) fn placements(
        &self,
        movements: &[Agreed],
        offers: &BTreeMap<String, Offer>,
        id: &str,
    ) -> Result<Vec<Placement>, StoreError> {
        let all = self.applications()?;
        let mut placed: Vec<Placed> =
            all.into_iter().flat_map(|(_, status): (_, ApplicationStatus)| status.placed).collect();
        let mut placements = Vec::new();
        for (party, function) in needed(&self.master(), movements) {
            let (Some(demand), Some(offer)) = (self.settings.demands.get(&function), offers.get(&party))
            else {
                continue;
            };
            if offer.rooms.is_empty() {
                continue;
            }
            let placement = place(offer, demand, &placed, id);
            placed.extend(placement.placed.iter().cloned());
            placements.push(placement);
        }
        Ok(placements)
    }

    /// Says what would be done for an application. Nothing is stored, and no domain is asked for access.
    ///
    /// # Errors
    /// The agreement does not allow it, or a domain cannot be asked; in words.
    pub async fn plan_only(&self, application: &Application) -> Result<Planned, String> {
        application.check()?;
        let master = self.master();
        let (mut movements, mut parties) = (Vec::new(), BTreeSet::new());
        for wanted in &application.flows {
            movements.push(master.agreed(application, wanted)?);
            parties.extend(master.parties(wanted).into_iter().flat_map(|(client, data)| [client, data]));
        }
        let mut offers = BTreeMap::new();
        for party in parties {
            let asked: Result<Offer, LinkError> = match self.link(&party) {
                Ok(link) => link.ask(Method::GET, "/v1/nodes", &(), super::PATIENCE).await,
                Err(error) => Err(error),
            };
            offers.insert(party, asked.map_err(|error| error.to_string())?);
        }
        let placements = self.placements(&movements, &offers, "new").map_err(|error| error.to_string())?;
        Ok(Planned { movements, placements })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Room;

    fn offer() -> Offer {
        let room = |node: &str, cpu_milli, cost_milli| Room {
            node: node.to_owned(),
            cpu_milli,
            memory_bytes: 1 << 30,
            cost_milli,
            labels: Vec::new(),
        };
        let rooms = vec![room("one", 1500, 100), room("two", 4000, 4000)];
        Offer { party: "lucas".to_owned(), rooms, ..Offer::default() }
    }

    fn demand() -> Demand {
        Demand {
            function: "count".into(),
            cpu_milli: 500,
            replica_cpu_milli: 500,
            replica_cpu_max_milli: 1000,
            memory_bytes: 1 << 20,
            replicas_max: 8,
            labels: Vec::new(),
        }
    }

    #[test]
    fn applications_share_containers_and_no_room_is_given_twice() {
        let mut placed = Vec::new();
        let mut nodes = Vec::new();
        for id in ["a", "b", "c", "d"] {
            let placement = place(&offer(), &demand(), &placed, id);
            assert_eq!((placement.missing_cpu_milli, placement.placed.len()), (0, 1), "{placement:?}");
            let one = &placement.placed[0];
            nodes.push((one.node.clone(), one.memory_bytes > 0));
            assert!(placement.why.iter().any(|line| line.starts_with("->")), "{:?}", placement.why);
            placed.extend(placement.placed);
        }
        let expected = [("one", true), ("one", false), ("one", true), ("two", true)];
        assert_eq!(
            nodes,
            expected.map(|(node, new)| (node.to_owned(), new)),
            "raised once, then another, then another node"
        );
        // What an application had is free when it has ended.
        placed.remove(2);
        assert_eq!(place(&offer(), &demand(), &placed, "e").placed[0].node, "one");
    }
}
