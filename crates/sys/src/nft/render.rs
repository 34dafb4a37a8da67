//! A table as text, the way `nft list table` prints it.

use std::fmt::{self, Write as _};

use super::compile::chain_kind;
use super::field::DataKind;
use super::model::{Base, Chain, Flowtable, Hook, Policy, Rule, Statement, Table, Test, Verdict};
use super::set::{Element, ElementData, MapData, Set, Span};
use super::{Family, Field, Value, ct_event, priority};

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "table {} {} {{", self.family, self.name)?;
        let mut first = true;
        for policy in &self.timeouts {
            separate(f, &mut first)?;
            super::timeout::write(f, self.family, policy)?;
        }
        for set in &self.sets {
            separate(f, &mut first)?;
            write_set(f, set)?;
        }
        for flowtable in &self.flowtables {
            separate(f, &mut first)?;
            write_flowtable(f, flowtable)?;
        }
        for chain in &self.chains {
            separate(f, &mut first)?;
            write_chain(f, self.family, chain)?;
        }
        writeln!(f, "}}")
    }
}

/// An empty line, but not before the first.
fn separate(f: &mut fmt::Formatter<'_>, first: &mut bool) -> fmt::Result {
    if std::mem::take(first) { Ok(()) } else { writeln!(f) }
}

fn write_set(f: &mut fmt::Formatter<'_>, set: &Set) -> fmt::Result {
    let word = if set.data.is_some() { "map" } else { "set" };
    writeln!(f, "\t{word} {} {{", set.name)?;
    write!(f, "\t\ttype {}", kinds(&set.key))?;
    match &set.data {
        None => writeln!(f)?,
        Some(MapData::Verdict) => writeln!(f, " : verdict")?,
        Some(MapData::Values(data)) => writeln!(f, " : {}", kinds(data))?,
    }
    if set.interval {
        writeln!(f, "\t\tflags interval")?;
    }
    if !set.elements.is_empty() {
        let elements: Vec<_> = set.elements.iter().map(element).collect();
        writeln!(f, "\t\telements = {{ {} }}", elements.join(",\n\t\t\t     "))?;
    }
    writeln!(f, "\t}}")
}

fn write_flowtable(f: &mut fmt::Formatter<'_>, flowtable: &Flowtable) -> fmt::Result {
    writeln!(f, "\tflowtable {} {{", flowtable.name)?;
    let priority = match flowtable.priority {
        priority::FILTER => "filter".to_owned(),
        other => other.to_string(),
    };
    writeln!(f, "\t\thook ingress priority {priority}")?;
    writeln!(f, "\t\tdevices = {{ {} }}", joined(&flowtable.devices, ", "))?;
    if flowtable.counter {
        writeln!(f, "\t\tcounter")?;
    }
    writeln!(f, "\t}}")
}

fn kinds(kinds: &[DataKind]) -> String {
    joined(kinds, " . ")
}

fn joined<T: ToString>(items: &[T], between: &str) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(between)
}

fn element(element: &Element) -> String {
    let key = element.key.iter().map(span).collect::<Vec<_>>().join(" . ");
    match &element.data {
        None => key,
        Some(ElementData::Verdict(to)) => format!("{key} : {}", verdict(to)),
        Some(ElementData::Values(values)) => format!("{key} : {}", joined(values, " . ")),
    }
}

/// A single value, a prefix where the range is one, or `first-last`.
fn span(span: &Span) -> String {
    if span.first == span.last {
        return span.first.to_string();
    }
    let bits = match (span.first, span.last) {
        (Value::Ipv4(a), Value::Ipv4(b)) => prefix_length(u32::from(a).into(), u32::from(b).into(), 32),
        (Value::Ipv6(a), Value::Ipv6(b)) => prefix_length(a.into(), b.into(), 128),
        _ => None,
    };
    match bits {
        Some(bits) => format!("{}/{bits}", span.first),
        None => format!("{}-{}", span.first, span.last),
    }
}

/// The length of the prefix whose first and last address these are, if there is one.
fn prefix_length(first: u128, last: u128, width: u32) -> Option<u32> {
    let differing = first ^ last;
    let host = 128 - differing.leading_zeros();
    let whole = differing.checked_add(1).is_none_or(u128::is_power_of_two);
    (whole && first & differing == 0).then(|| width.saturating_sub(host))
}

fn write_chain(f: &mut fmt::Formatter<'_>, family: Family, chain: &Chain) -> fmt::Result {
    writeln!(f, "\tchain {} {{", chain.name)?;
    if let Some(base) = &chain.base {
        let policy = if base.policy == Policy::Accept { "accept" } else { "drop" };
        let kind = chain_kind(base.kind);
        writeln!(
            f,
            "\t\ttype {kind} hook {} priority {}; policy {policy};",
            hook(base.hook),
            priority_text(base)
        )?;
    }
    for rule in &chain.rules {
        writeln!(f, "\t\t{}", rule_text(family, rule))?;
    }
    writeln!(f, "\t}}")
}

const fn hook(hook: Hook) -> &'static str {
    match hook {
        Hook::Prerouting => "prerouting",
        Hook::Input => "input",
        Hook::Forward => "forward",
        Hook::Output => "output",
        Hook::Postrouting => "postrouting",
    }
}

/// The priority by name where nft has one, with a distance of up to 10.
fn priority_text(base: &Base) -> String {
    let named = [
        (priority::RAW, "raw", true),
        (priority::MANGLE, "mangle", true),
        (priority::DSTNAT, "dstnat", base.hook == Hook::Prerouting),
        (priority::FILTER, "filter", true),
        (priority::SRCNAT, "srcnat", base.hook == Hook::Postrouting),
    ];
    let near = named.iter().find(|(value, _, valid)| *valid && value.abs_diff(base.priority) <= 10);
    match near {
        Some((value, name, _)) => match base.priority - value {
            0 => (*name).to_owned(),
            above @ 1.. => format!("{name} + {above}"),
            below => format!("{name} - {}", below.abs()),
        },
        None => base.priority.to_string(),
    }
}

/// One rule in nft's syntax.
pub(super) fn rule_text(family: Family, rule: &Rule) -> String {
    let mut text = String::new();
    for (index, part) in rule.statements.iter().enumerate() {
        // nft leaves out a protocol match that a later statement implies.
        if implied_later(part, rule.statements.get(index + 1..).unwrap_or_default()) {
            continue;
        }
        if !text.is_empty() {
            text.push(' ');
        }
        // Writing to a String cannot fail.
        let _ = write_statement(&mut text, family, part);
    }
    text
}

fn implied_later(statement: &Statement, later: &[Statement]) -> bool {
    let Statement::Match(fields, Test::Is(value)) = statement else { return false };
    match (fields.as_slice(), value) {
        ([Field::L4Proto], Value::Protocol(6)) => {
            later.iter().flat_map(fields_of).any(|field| field.needs_tcp())
        }
        ([Field::L4Proto], Value::Protocol(17)) => {
            later.iter().flat_map(fields_of).any(|field| *field == Field::UdpDestination)
        }
        ([Field::NfProto], Value::NfProto(version)) => {
            later.iter().flat_map(fields_of).any(|field| field.needs_nfproto() == Some(*version))
        }
        _ => false,
    }
}

fn fields_of(statement: &Statement) -> &[Field] {
    match statement {
        Statement::Match(fields, _)
        | Statement::VerdictMap(fields, _)
        | Statement::DnatMap { fields, .. } => fields,
        _ => &[],
    }
}

fn write_statement(text: &mut String, family: Family, statement: &Statement) -> fmt::Result {
    match statement {
        Statement::Match(fields, test) => write_match(text, fields, test),
        Statement::Counter => text.write_str("counter packets 0 bytes 0"),
        Statement::SetMark { value, mask } => write_set_mark(text, "meta mark", *value, *mask),
        Statement::SetCtMark { value, mask } => write_set_mark(text, "ct mark", *value, *mask),
        Statement::SetCtEvents(bits) => write!(text, "ct event set {}", events(*bits)),
        Statement::SetCtTimeout(name) => write!(text, "ct timeout set \"{name}\""),
        Statement::Redirect { port } => write!(text, "redirect to :{port}"),
        Statement::DnatMap { fields, map, v6 } => {
            write!(text, "dnat {}to {} map @{map}", version(family, *v6), joined(fields, " . "))
        }
        Statement::TProxy { v6, port } => write!(text, "tproxy {}to :{port}", version(family, *v6)),
        Statement::Masquerade => text.write_str("masquerade"),
        Statement::RejectWithReset => text.write_str("reject with tcp reset"),
        Statement::NoTrack => text.write_str("notrack"),
        Statement::Queue { number, bypass } => {
            write!(text, "queue {}to {number}", if *bypass { "flags bypass " } else { "" })
        }
        Statement::FlowAdd(flowtable) => write!(text, "flow add @{flowtable}"),
        Statement::VerdictMap(fields, map) => write!(text, "{} vmap @{map}", joined(fields, " . ")),
        Statement::Verdict(to) => text.write_str(&verdict(to)),
    }
}

/// In a table for both IP versions nft says which one an address is of.
const fn version(family: Family, v6: bool) -> &'static str {
    match (family, v6) {
        (Family::Inet, true) => "ip6 ",
        (Family::Inet, false) => "ip ",
        _ => "",
    }
}

fn write_match(text: &mut String, fields: &[Field], test: &Test) -> fmt::Result {
    write!(text, "{} ", joined(fields, " . "))?;
    match test {
        Test::Is(value) => write!(text, "{value}"),
        Test::IsNot(value) => write!(text, "!= {value}"),
        Test::In(set) => write!(text, "@{set}"),
        Test::NotIn(set) => write!(text, "!= @{set}"),
        Test::AnyOf(bits) => write!(text, "{bits}"),
        Test::Masked { mask: mask @ Value::TcpFlags(_), value } => write!(text, "{value} / {mask}"),
        // nft writes the highest bits of a mark as a prefix.
        Test::Masked { mask: Value::Mark(mask), value } if mask.leading_ones() == mask.count_ones() => {
            write!(text, "{value}/{}", mask.count_ones())
        }
        Test::Masked { mask: Value::Ipv4(mask), value }
            if mask.to_bits().leading_ones() == mask.to_bits().count_ones() =>
        {
            write!(text, "{value}/{}", mask.to_bits().count_ones())
        }
        Test::Masked { mask, value } => write!(text, "& {mask} == {value}"),
    }
}

fn write_set_mark(text: &mut String, what: &str, value: u32, mask: u32) -> fmt::Result {
    if mask == u32::MAX {
        return write!(text, "{what} set {}", Value::Mark(value));
    }
    // As nft writes it: bits that the "or" sets anyway stay in the mask.
    write!(text, "{what} set {what} & {}", Value::Mark(!mask | (value & mask)))?;
    match value & mask {
        0 => Ok(()),
        bits => write!(text, " | {}", Value::Mark(bits)),
    }
}

fn events(bits: u32) -> String {
    let names = [(ct_event::NEW, "new"), (ct_event::DESTROY, "destroy"), (ct_event::MARK, "mark")];
    names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect::<Vec<_>>().join(",")
}

fn verdict(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Accept => "accept".into(),
        Verdict::Drop => "drop".into(),
        Verdict::Return => "return".into(),
        Verdict::Jump(chain) => format!("jump {chain}"),
        Verdict::Goto(chain) => format!("goto {chain}"),
    }
}
