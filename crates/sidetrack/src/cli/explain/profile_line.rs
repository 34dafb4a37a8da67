//! `explain --profile`: whether a profile of `run` allows a destination, and by which line.

use super::super::Printed;
use anyhow::{Context, bail};
use sidetrack_core::flow::{Destination, Flow, Host, Intercept, Protocol};
use sidetrack_core::jail::{CLOSED_RULE, Entry, Jail, Lists};
use sidetrack_core::policy::{Action, Decision, Seen};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

/// The port of a destination without one.
const HTTPS: u16 = 443;

/// Returns the answer. Its exit code is 0 if the profile allows the destination, 1 if it does not.
///
/// # Errors
/// The profile cannot be read, or an argument is wrong.
pub(super) fn report(
    profile: &Path,
    asked: &[String],
    protocol: Option<Protocol>,
) -> anyhow::Result<Printed> {
    let shown = profile.display();
    let text = std::fs::read_to_string(profile).with_context(|| format!("cannot read --profile {shown}"))?;
    let mut lists = Lists::default();
    lists.profile(&text).with_context(|| format!("--profile {shown}"))?;
    let [asked] = asked else { bail!("with --profile, write one destination: HOST or HOST:PORT") };
    let (protocol, to) = destination(asked, protocol)?;
    let entry = Entry::of(protocol, &to.host, to.port);
    let policy = Jail { lists, closed: true, ..Jail::default() }.policy();
    let Decision::Verdict(verdict) = policy.decide(&flow(protocol, &to), Seen::FirstBytes(None)) else {
        bail!("this profile does not decide about {entry}");
    };
    let allows = matches!(verdict.action, Action::Carry(_));
    let place = match verdict.rule.as_deref() {
        Some(CLOSED_RULE) => format!("{CLOSED_RULE} are refused unless a line names them"),
        Some(rule) => line_of(&text, rule)
            .map_or_else(|| rule.to_owned(), |(number, line)| format!("line {number} of {shown}: {line}")),
        None => format!("no line of {shown} allows it"),
    };
    let out = if allows {
        format!("{entry} is allowed: {place}\n")
    } else {
        format!("{entry} is refused: {place}\nto allow it, add this line: {entry}\n")
    };
    // A line that refuses comes first: another line does not help.
    let is_denied = verdict.rule.as_deref().is_some_and(|rule| rule.starts_with("deny "));
    let out = if is_denied { out.lines().take(1).map(|line| format!("{line}\n")).collect() } else { out };
    Ok(Printed { out, err: String::new(), code: u8::from(!allows) })
}

/// Reads `HOST`, `HOST:PORT`, and both with `udp:` or `tcp:` before.
fn destination(text: &str, given: Option<Protocol>) -> anyhow::Result<(Protocol, Destination)> {
    let prefixed = Protocol::ALL.into_iter().find_map(|protocol| {
        let rest = text.strip_prefix(protocol.as_str())?.strip_prefix(':')?;
        Some((protocol, rest))
    });
    let (protocol, rest) = prefixed.unwrap_or((given.unwrap_or_default(), text));
    let mut to = match Host::from_bytes(rest.as_bytes()) {
        Ok(host) => Destination { host, port: HTTPS, zone: 0 },
        Err(_) => {
            rest.parse().with_context(|| format!("'{text}' is not a destination: write HOST or HOST:PORT"))?
        }
    };
    if matches!(&to.host, Host::Name(name) if name.is_localhost()) {
        to.host = Host::Ip(Ipv4Addr::LOCALHOST.into());
    }
    Ok((protocol, to))
}

fn flow(protocol: Protocol, to: &Destination) -> Flow {
    let host = match &to.host {
        Host::Name(name) => Some(name.clone()),
        Host::Ip(_) => None,
    };
    Flow {
        protocol,
        intercept: Intercept::Run,
        listener: "run".into(),
        client: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        orig_dst: to.clone(),
        host,
        process: None,
        user: None,
    }
}

/// The number and the text of the first line that is this rule.
fn line_of<'a>(text: &'a str, rule: &str) -> Option<(usize, &'a str)> {
    let (verb, wanted) = rule.split_once(' ')?;
    (1..).zip(text.lines()).find(|(_, line)| {
        let line = line.split('#').next().unwrap_or_default().trim();
        let (written, entry) = line.split_once(char::is_whitespace).unwrap_or(("allow", line));
        written == verb && entry.trim().parse::<Entry>().is_ok_and(|entry| entry.to_string() == wanted)
    })
}
