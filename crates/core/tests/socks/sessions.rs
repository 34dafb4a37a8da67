//! Sessions and tokens of version 6, with their bounds.

use crate::network::Network;
use crate::pairs::{v6, v6_config};
use crate::{account, to};
use sidetrack_core::carrier::Socks6Dialect::Draft;
use sidetrack_core::flow::EndReason;
use sidetrack_core::socks::server::{Output, ServerConfig};
use sidetrack_core::socks::v6::{
    ClientCommand, ClientConfig, HeldSession, SessionAction, SessionAnswer, SessionId, SessionLimits,
    SessionQuery, SessionReport, SessionTable, SessionUse, TokenWindow,
};
use sidetrack_core::time::Instant;
use std::net::IpAddr;
use std::time::Duration;

fn network() -> Network {
    Network::new(ServerConfig { accounts: vec![account("user:pass")], ..ServerConfig::default() })
}

fn with(session: SessionUse, credentials: Option<&str>) -> ClientConfig {
    ClientConfig { session, ..v6_config(Draft, credentials) }
}

fn begin(network: &mut Network, token_request: Option<u32>) -> HeldSession {
    let run = network.run(v6(with(SessionUse::Begin { token_request }, Some("user:pass"))));
    let report = &run.connected().session;
    assert!(!report.ok && !report.invalid);
    assert_eq!(run.request.as_ref().unwrap().session, report.id);
    HeldSession::from_report(report).expect("a session")
}

fn resume(id: &SessionId, token_spend: Option<u32>) -> ClientConfig {
    with(SessionUse::Resume { id: id.clone(), token_request: None, token_spend }, Some("user:wrong"))
}

#[test]
fn a_session_needs_no_credentials() {
    let mut network = network();
    let held = begin(&mut network, None);
    // The client does not even send them.
    let run = network.run(v6(resume(&held.id, None)));
    assert!(run.connected().session.ok);
    assert_eq!(run.client_round_trips, 1);
    let request = run.request.unwrap();
    assert_eq!((request.user.as_deref(), request.session), (Some("user"), Some(held.id.clone())));
    // A token without a window is not eligible.
    let run = network.run(v6(resume(&held.id, Some(1))));
    assert_eq!(run.client_failure().0, EndReason::AuthFailed);
    assert!(run.request.is_none());
}

#[test]
fn a_torn_down_session_is_gone_and_its_request_stands_alone() {
    let mut network = network();
    let held = begin(&mut network, None);
    let tear_down = |credentials| with(SessionUse::TearDown { id: held.id.clone() }, credentials);
    let run = network.run(v6(tear_down(Some("user:pass"))));
    assert_eq!(run.request.as_ref().unwrap().session, None);
    assert!(!run.connected().session.ok);
    assert!(network.sessions.is_empty());
    for config in [resume(&held.id, None), tear_down(Some("user:pass"))] {
        let run = network.run(v6(config));
        assert_eq!(run.client_failure(), (EndReason::AuthFailed, "the proxy does not know the session"));
        assert!(run.server_failure().1.contains("unknown or expired"));
    }
    // Without credentials the session ends all the same, and the request is refused.
    let held = begin(&mut network, None);
    let config = ClientConfig {
        command: ClientCommand::Noop,
        ..with(SessionUse::TearDown { id: held.id.clone() }, None)
    };
    assert_eq!(network.run(v6(config)).client_failure().0, EndReason::AuthFailed);
    assert!(network.sessions.is_empty());
}

#[test]
fn sessions_end_when_idle_and_live_while_used() {
    let mut network = network();
    let held = begin(&mut network, None);
    for _ in 0..3 {
        network.pass(Duration::from_secs(200));
        assert!(network.run(v6(resume(&held.id, None))).connected().session.ok);
    }
    // The end of a long flow counts as use.
    network.sessions.flow_began(&held.id);
    network.pass(Duration::from_secs(200));
    let now = network.now();
    network.sessions.flow_ended(now, &held.id);
    network.pass(Duration::from_secs(200));
    assert!(network.run(v6(resume(&held.id, None))).connected().session.ok);
    network.pass(Duration::from_secs(300));
    assert!(network.sessions.deadline().unwrap() <= network.now());
    let run = network.run(v6(resume(&held.id, None)));
    assert_eq!(run.client_failure().0, EndReason::AuthFailed);
    assert_eq!((network.sessions.len(), network.sessions.deadline()), (0, None));
}

#[test]
fn a_session_of_a_user_who_is_no_longer_known_is_invalid() {
    let mut network = network();
    let held = begin(&mut network, None);
    network.config.accounts = vec![account("other:pass")];
    let run = network.run(v6(resume(&held.id, None)));
    assert!(run.server_failure().1.contains("no longer known"), "{:?}", run.server);
    // Nor does a session without a user give access once passwords are asked for.
    network.config.accounts.clear();
    let run = network.run(v6(with(SessionUse::Begin { token_request: None }, None)));
    let held = HeldSession::from_report(&run.connected().session).unwrap();
    assert!(network.run(v6(resume(&held.id, None))).connected().session.ok);
    network.config.accounts = vec![account("user:pass")];
    assert_eq!(network.run(v6(resume(&held.id, None))).client_failure().0, EndReason::AuthFailed);
}

#[test]
fn where_sessions_are_not_offered_the_request_goes_on_without() {
    let mut network = network();
    network.config.sessions = false;
    let run = network.run(v6(with(SessionUse::Begin { token_request: Some(4) }, Some("user:pass"))));
    assert_eq!(run.connected().session, SessionReport::default());
    let id = SessionId::from_bytes(b"none").unwrap();
    let run = network.run(v6(resume(&id, None)));
    assert_eq!(run.client_failure().0, EndReason::AuthFailed);
}

#[test]
fn a_token_is_good_for_one_request() {
    let mut network = network();
    let mut held = begin(&mut network, Some(8));
    let first = held.take_token().unwrap();
    let run = network.run(v6(resume(&held.id, Some(first))));
    assert_eq!(run.connected().session.token_accepted, Some(true));
    held.update(&run.connected().session);
    // The same bytes once more, as TCP Fast Open may replay them.
    let run = network.run(v6(resume(&held.id, Some(first))));
    assert_eq!(
        run.client_failure(),
        (EndReason::AuthFailed, "the proxy rejected the token: it was spent before, or left the window")
    );
    assert!(run.request.is_none(), "a replay dials nothing");
    assert!(run.server_failure().1.contains("replay"));
    // The session is none the worse, and the next 100 tokens are good as the window slides.
    for _ in 0..100 {
        let token = held.take_token().unwrap();
        let run = network.run(v6(resume(&held.id, Some(token))));
        assert_eq!(run.connected().session.token_accepted, Some(true));
        held.update(&run.connected().session);
    }
}

#[test]
fn a_noop_fetches_session_and_tokens() {
    let mut network = network();
    let config = ClientConfig {
        command: ClientCommand::Noop,
        ..with(SessionUse::Begin { token_request: Some(1 << 30) }, Some("user:pass"))
    };
    let run = network.run(v6(config));
    assert_eq!(run.server, Some(Output::Finished));
    let report = &run.connected().session;
    assert_eq!(report.window.unwrap().size, SessionLimits::default().max_window_size);
    // A second window is not issued.
    let id = report.id.clone().unwrap();
    let session = SessionUse::Resume { id, token_request: Some(4), token_spend: None };
    let run = network.run(v6(with(session, None)));
    assert_eq!(run.connected().session.window, report.window);
    assert_eq!(run.request.unwrap().destination, to("db.example.nl:5432"));
}

struct Table {
    table: SessionTable,
    random: u8,
}

impl Table {
    fn new(limits: SessionLimits) -> Self {
        Self { table: SessionTable::new(limits, [7; 16]), random: 0 }
    }

    fn ask(&mut self, now: Instant, client: &str, action: SessionAction, tokens: Tokens) -> SessionAnswer {
        self.random += 1;
        let mut random = [self.random; 20];
        random[16..].copy_from_slice(&0xffff_fffe_u32.to_be_bytes());
        let query = SessionQuery { action, token_request: tokens.0, token_spend: tokens.1 };
        self.table.answer(now, client.parse::<IpAddr>().unwrap(), &query, random)
    }
}

type Tokens = (Option<u32>, Option<u32>);
const NONE: Tokens = (None, None);

fn id_of(answer: &SessionAnswer) -> SessionId {
    match answer {
        SessionAnswer::Active { id, .. } => id.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn sessions_are_limited_per_owner_and_at_all() {
    let limits = SessionLimits { max_sessions: 5, max_per_owner: 2, ..SessionLimits::default() };
    let mut table = Table::new(limits);
    let begin = |user: Option<&str>| SessionAction::Begin(user.map(str::to_owned));
    let now = Instant::ZERO;
    let a = id_of(&table.ask(now, "192.0.2.1", begin(Some("a")), NONE));
    id_of(&table.ask(now, "192.0.2.2", begin(Some("a")), NONE));
    assert_eq!(table.ask(now, "192.0.2.3", begin(Some("a")), NONE), SessionAnswer::Declined);
    // Without credentials the address counts.
    id_of(&table.ask(now, "192.0.2.1", begin(None), NONE));
    id_of(&table.ask(now, "192.0.2.1", begin(None), NONE));
    assert_eq!(table.ask(now, "192.0.2.1", begin(None), NONE), SessionAnswer::Declined);
    id_of(&table.ask(now, "192.0.2.4", begin(None), NONE));
    assert_eq!(table.ask(now, "192.0.2.5", begin(None), NONE), SessionAnswer::Declined, "five at most");
    assert_eq!(table.table.len(), 5);
    let gone = SessionAction::TearDown(a);
    assert_eq!(table.ask(now, "192.0.2.1", gone.clone(), NONE), SessionAnswer::TornDown);
    assert_eq!(table.ask(now, "192.0.2.1", gone, NONE), SessionAnswer::Invalid);
    id_of(&table.ask(now, "192.0.2.1", begin(Some("a")), NONE));
    // All of them idle out together.
    table.table.expire(now + limits.idle_timeout);
    assert!(table.table.is_empty());
    id_of(&table.ask(now + limits.idle_timeout, "192.0.2.1", begin(None), NONE));
    assert_eq!(table.table.len(), 1);
}

#[test]
fn a_session_outlives_its_longest_flow() {
    let limits = SessionLimits::default();
    let mut table = Table::new(limits);
    let begin = SessionAction::Begin(None);
    let id = id_of(&table.ask(Instant::ZERO, "192.0.2.1", begin, NONE));
    let later = |times: u32| Instant::ZERO + limits.idle_timeout * times;
    table.table.flow_began(&id);
    table.table.flow_began(&id);
    assert_eq!(table.table.deadline(), None, "it cannot fall idle");
    table.table.expire(later(10));
    table.table.flow_ended(later(10), &id);
    // A request in between, which is a use, too.
    let resumed = table.ask(later(11), "192.0.2.1", SessionAction::Resume(id.clone()), NONE);
    assert_eq!(id_of(&resumed), id);
    table.table.expire(later(20));
    assert_eq!(table.table.len(), 1, "one flow goes on");
    table.table.flow_ended(later(20), &id);
    assert_eq!(table.table.deadline(), Some(later(21)));
    table.table.expire(later(21));
    assert!(table.table.is_empty());
    // A flow that outlives the teardown of its session changes nothing.
    table.table.flow_ended(later(22), &id);
    assert_eq!((table.table.len(), table.table.deadline()), (0, None));
}

#[test]
fn windows_slide_over_the_end_of_the_number_space() {
    let mut table = Table::new(SessionLimits::default());
    let answer = table.ask(Instant::ZERO, "192.0.2.1", SessionAction::Begin(None), (Some(8), None));
    let id = id_of(&answer);
    let mut spend = |token: u32| {
        let action = SessionAction::Resume(id.clone());
        match table.ask(Instant::ZERO, "192.0.2.1", action, (None, Some(token))) {
            SessionAnswer::Active { window, token_accepted, .. } => {
                let TokenWindow { base, size } = window.unwrap();
                assert_eq!(size, 8);
                (token_accepted, base)
            }
            other => panic!("{other:?}"),
        }
    };
    let start = 0xffff_fffe_u32;
    let token = |offset: u32| start.wrapping_add(offset);
    assert_eq!(spend(token(8)), (Some(false), start), "beyond the window");
    assert_eq!(spend(start - 1), (Some(false), start), "before the window");
    assert_eq!(spend(token(1)), (Some(true), start), "out of order");
    assert_eq!(spend(token(1)), (Some(false), start), "twice");
    assert_eq!(spend(token(0)), (Some(true), token(2)), "slides past both");
    assert_eq!(spend(token(0)), (Some(false), token(2)), "spent and gone");
    // A token from the upper quarter shows that the low ones are lost.
    assert_eq!(spend(token(9)), (Some(true), token(5)));
    assert_eq!(spend(token(2)), (Some(false), token(5)));
    for offset in 5..9 {
        assert_eq!(spend(token(offset)).0, Some(true));
    }
    assert_eq!(spend(token(10)), (Some(true), token(11)));
}

#[test]
fn every_order_of_spending_spends_each_token_once() {
    // All orders of five tokens, each tried twice.
    fn permute(rest: &mut Vec<u32>, order: &mut Vec<u32>, check: &mut impl FnMut(&[u32])) {
        if rest.is_empty() {
            check(order);
        }
        for at in 0..rest.len() {
            let token = rest.remove(at);
            order.push(token);
            permute(rest, order, check);
            order.pop();
            rest.insert(at, token);
        }
    }
    permute(&mut (0..5).collect(), &mut Vec::new(), &mut |order| {
        let mut table = Table::new(SessionLimits::default());
        let answer = table.ask(Instant::ZERO, "192.0.2.1", SessionAction::Begin(None), (Some(5), None));
        let id = id_of(&answer);
        let mut accepted = Vec::new();
        let mut last_base = 0xffff_fffe_u32;
        for &offset in order.iter().chain(order) {
            let spend = Some(0xffff_fffe_u32.wrapping_add(offset));
            let action = SessionAction::Resume(id.clone());
            let answer = table.ask(Instant::ZERO, "192.0.2.1", action, (None, spend));
            let SessionAnswer::Active { window, token_accepted, .. } = answer else { panic!("{answer:?}") };
            if token_accepted == Some(true) {
                accepted.push(offset);
            }
            let base = window.unwrap().base;
            assert!(base.wrapping_sub(last_base) < 1 << 31, "a base never goes back");
            last_base = base;
        }
        let mut once = accepted.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), accepted.len(), "{order:?}: one token accepted twice");
        assert!(accepted.contains(&order[0]), "{order:?}");
    });
}

#[test]
fn a_client_ignores_old_windows_and_spends_small_tokens_first() {
    let report = |base, size| SessionReport {
        id: SessionId::from_bytes(b"abcd"),
        window: TokenWindow::checked(base, size),
        ..SessionReport::default()
    };
    let mut held = HeldSession::from_report(&report(u32::MAX - 1, 4)).unwrap();
    assert_eq!((held.take_token(), held.take_token()), (Some(u32::MAX - 1), Some(u32::MAX)));
    held.update(&report(u32::MAX - 5, 4));
    assert_eq!(held.take_token(), Some(0), "a lower base is old news");
    held.update(&report(0, 4));
    assert_eq!((held.take_token(), held.take_token()), (Some(1), Some(2)));
    held.update(&report(100, 1));
    assert_eq!((held.take_token(), held.take_token()), (Some(100), None), "used up");
    held.update(&SessionReport::default());
    assert_eq!(held.take_token(), None);
    assert_eq!(HeldSession::from_report(&SessionReport::default()), None);
    assert_eq!((TokenWindow::checked(0, 0), TokenWindow::checked(0, 1 << 31)), (None, None));
}

#[test]
fn ids_are_not_printed() {
    let id = SessionId::from_bytes(b"secretid").unwrap();
    assert_eq!(format!("{id:?}"), "SessionId(8 bytes)");
    assert_eq!((SessionId::from_bytes(b""), SessionId::from_bytes(b"abc")), (None, None));
}
