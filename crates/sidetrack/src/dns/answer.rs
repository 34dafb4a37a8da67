//! Answers one query (RFC 1035, RFC 6891; terms as in RFC 8499).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hickory_proto::op::{Edns, Header, Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::rdata::{A, AAAA, PTR};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};
use sidetrack_core::flow::{Host, HostName};
use sidetrack_core::names::NameTable;
use sidetrack_core::time::Instant;

/// How long an answer may be cached, seconds: much less than the time for which the table keeps an unused
/// address.
const TTL_SECONDS: u32 = 10;
/// UDP payload size that we announce and never exceed, bytes (DNS flag day 2020).
const UDP_PAYLOAD_BYTES: u16 = 1232;
/// Most bytes of a datagram to a client that does not use EDNS (RFC 1035 Sec. 4.2.1).
const PLAIN_BYTES: u16 = 512;
/// The EDNS option with an extended error (RFC 8914 Sec. 2).
const EXTENDED_ERROR: u16 = 15;
/// Bytes of a message header. A shorter message is not valid.
const HEADER_BYTES: usize = 12;
/// Firefox queries this name. If it does not exist, Firefox uses the system's resolver, which is ours. With its
/// own DNS over HTTPS we would see only addresses.
const DOH_CANARY: &str = "use-application-dns.net";

/// The transport of the query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Datagrams.
    Udp,
    /// A stream, with a length before each message.
    Tcp,
}

/// The question of a query that may be for the host's resolver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    /// The name.
    pub host: HostName,
    /// The kind of question.
    pub kind: Kind,
}

/// What a query asks about a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Its addresses.
    Address,
    /// HTTPS and SVCB records. They contain addresses, and keys that would hide names from us.
    Service,
    /// MX, SRV, TXT and all others.
    Other,
}

/// What the host's resolver answered about a name's addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known {
    /// It was not asked, or could not answer.
    Nothing,
    /// The name does not exist.
    NoName,
    /// The name has these addresses, possibly none.
    Addresses(Vec<IpAddr>),
    /// It was asked and failed.
    Failed,
}

/// Returns the question of a query. `None` if only [`answer`] can answer it.
pub(super) fn asked(question: &[u8]) -> Option<Asked> {
    let request = Message::from_vec(question).ok()?;
    let plain = request.metadata.message_type == MessageType::Query
        && request.metadata.op_code == OpCode::Query
        && request.edns.as_ref().is_none_or(|edns| edns.version() == 0);
    let [query] = request.queries.as_slice() else { return None };
    if !plain || !matches!(query.query_class(), DNSClass::IN | DNSClass::ANY) || query.name().is_root() {
        return None;
    }
    let Host::Name(host) = host(query.name())? else { return None };
    let ours = is_below(host.as_str(), "arpa") || host.as_str() == DOH_CANARY || host.is_localhost();
    let kind = match query.query_type() {
        RecordType::A | RecordType::AAAA | RecordType::ANY => Kind::Address,
        RecordType::HTTPS | RecordType::SVCB => Kind::Service,
        _ => Kind::Other,
    };
    (!ours).then_some(Asked { host, kind })
}

/// Returns the answer to one message. `None` if it gets none: it is too short, or is itself an answer.
///
/// | query | answer |
/// |---|---|
/// | A, ANY | an address of 198.18.0.0/15 for the name; SERVFAIL if the table is full |
/// | A, AAAA, ANY of a name with `known` data | that data |
/// | AAAA, HTTPS, SVCB, any other type | no data: the name exists |
/// | A, AAAA of `localhost` and below | the loopback address (RFC 6761 section 6.3) |
/// | A, AAAA of an address written as a name | that address |
/// | PTR of an address that we made for a name | the name |
/// | PTR of any other address | NXDOMAIN: asking other servers would bypass the proxy |
/// | names with bytes that are not allowed in host names | NXDOMAIN |
pub fn answer(
    question: &[u8],
    transport: Transport,
    names: &mut NameTable,
    now: Instant,
    known: &Known,
) -> Option<Vec<u8>> {
    let mut reply = reply_to(question)?;
    let request = Message::from_vec(question);
    reply.metadata.response_code = match &request {
        Err(_) => ResponseCode::FormErr,
        Ok(request) => respond(request, &mut reply, |query| resolve(query, names, now, known)),
    };
    sized(&reply, transport, request.ok().as_ref())
}

/// Returns the bytes of a reply. One that is longer than the client's datagrams may be is truncated (RFC 6891 Sec. 6.2.5).
fn sized(reply: &Message, transport: Transport, request: Option<&Message>) -> Option<Vec<u8>> {
    let bytes = reply.to_vec().ok()?;
    let edns = request.and_then(|request| request.edns.as_ref());
    let most = match transport {
        Transport::Udp => {
            edns.map_or(PLAIN_BYTES, |edns| edns.max_payload().clamp(PLAIN_BYTES, UDP_PAYLOAD_BYTES))
        }
        Transport::Tcp => u16::MAX,
    };
    if bytes.len() <= usize::from(most) { Some(bytes) } else { reply.truncate().to_vec().ok() }
}

/// Returns SERVFAIL for one message, if it is a query.
pub(super) fn failed(question: &[u8]) -> Option<Vec<u8>> {
    coded(question, ResponseCode::ServFail, None)
}

/// Returns a reply with this code and without records to one message, if it is a query. `why`: the code and text of an
/// extended error (RFC 8914), for clients that use EDNS.
pub(super) fn coded(question: &[u8], code: ResponseCode, why: Option<(u16, &str)>) -> Option<Vec<u8>> {
    let mut reply = reply_to(question)?;
    let request = Message::from_vec(question).ok()?;
    reply.metadata.response_code = respond(&request, &mut reply, |_| Err(code));
    if let (Some(edns), Some((info, text))) = (&mut reply.edns, why) {
        let data = [&info.to_be_bytes()[..], text.as_bytes()].concat();
        edns.options_mut().insert(EdnsOption::Unknown(EXTENDED_ERROR, data));
    }
    reply.to_vec().ok()
}

/// Returns an empty reply that asks the client to come again over TCP. `None` if the message is not a query.
pub(super) fn by_tcp(question: &[u8]) -> Option<Vec<u8>> {
    let mut reply = reply_to(question)?;
    let request = Message::from_vec(question).ok()?;
    reply.metadata.response_code = respond(&request, &mut reply, |_| Ok(Vec::new()));
    reply.truncate().to_vec().ok()
}

/// Returns what a name server has answered as a reply to one message. The records have this age, seconds. `is_bare`: without the
/// additional records, whose addresses would lead around the rules.
pub(super) fn relayed(
    question: &[u8],
    transport: Transport,
    found: &Message,
    (age_s, is_bare): (u32, bool),
) -> Option<Vec<u8>> {
    let mut reply = reply_to(question)?;
    let request = Message::from_vec(question).ok()?;
    reply.metadata.response_code = match respond(&request, &mut reply, |_| Ok(Vec::new())) {
        ResponseCode::NoError => found.metadata.response_code,
        error => return sized_error(reply, error),
    };
    let aged = |records: &[Record]| -> Vec<Record> {
        let older = |record: &Record| {
            let mut record = record.clone();
            record.ttl = record.ttl.saturating_sub(age_s);
            record
        };
        records.iter().map(older).collect()
    };
    reply.answers = aged(&found.answers);
    reply.authorities = aged(&found.authorities);
    if !is_bare {
        reply.additionals = aged(&found.additionals);
    }
    let wants_checked =
        request.metadata.authentic_data || request.edns.as_ref().is_some_and(|edns| edns.flags().dnssec_ok);
    reply.metadata.authentic_data = wants_checked && found.metadata.authentic_data;
    sized(&reply, transport, Some(&request))
}

fn sized_error(mut reply: Message, code: ResponseCode) -> Option<Vec<u8>> {
    reply.metadata.response_code = code;
    reply.to_vec().ok()
}

/// Whether a query asks for the name of an address that is not one of ours.
pub(super) fn is_reverse_of_others(request: &Message, names: &NameTable) -> bool {
    let [query] = request.queries.as_slice() else { return false };
    let is_reverse = host(query.name())
        .is_some_and(|host| matches!(&host, Host::Name(name) if is_below(name.as_str(), "arpa")));
    let is_plain = request.metadata.message_type == MessageType::Query
        && request.metadata.op_code == OpCode::Query
        && query.query_class() == DNSClass::IN;
    is_plain && is_reverse && reverse(query.name(), query.query_type(), names).is_err()
}

fn reply_to(question: &[u8]) -> Option<Message> {
    let header = question.get(..HEADER_BYTES)?;
    let metadata = Header::read(&mut BinDecoder::new(header)).ok()?.metadata;
    if metadata.message_type == MessageType::Response {
        return None;
    }
    let mut reply = Message::response(metadata.id, metadata.op_code);
    reply.metadata = Metadata::response_from_request(&metadata);
    reply.metadata.recursion_available = true;
    Some(reply)
}

fn respond(
    request: &Message,
    reply: &mut Message,
    resolve: impl FnOnce(&Query) -> Result<Vec<RData>, ResponseCode>,
) -> ResponseCode {
    if let Some(edns) = &request.edns {
        let mut ours = Edns::new();
        ours.set_max_payload(UDP_PAYLOAD_BYTES).set_dnssec_ok(edns.flags().dnssec_ok);
        reply.set_edns(ours);
        if edns.version() > 0 {
            if let Some(ours) = &mut reply.edns {
                ours.set_rcode_high(ResponseCode::BADVERS.high());
            }
            return ResponseCode::BADVERS;
        }
    }
    if request.metadata.op_code != OpCode::Query {
        return ResponseCode::NotImp;
    }
    let [query] = request.queries.as_slice() else { return ResponseCode::FormErr };
    reply.add_query(query.clone());
    if !matches!(query.query_class(), DNSClass::IN | DNSClass::ANY) {
        return ResponseCode::Refused;
    }
    match resolve(query) {
        Ok(found) => {
            for data in found {
                reply.add_answer(Record::from_rdata(query.name().clone(), TTL_SECONDS, data));
            }
            ResponseCode::NoError
        }
        Err(code) => code,
    }
}

fn resolve(
    query: &Query,
    names: &mut NameTable,
    now: Instant,
    known: &Known,
) -> Result<Vec<RData>, ResponseCode> {
    let (name, kind) = (query.name(), query.query_type());
    if name.is_root() {
        return Ok(Vec::new());
    }
    let host = match host(name).ok_or(ResponseCode::NXDomain)? {
        Host::Name(host) => host,
        // The name is an address: answer with it directly.
        Host::Ip(address) => return Ok(address_record(address, kind).into_iter().collect()),
    };
    if is_below(host.as_str(), "arpa") {
        return Ok(reverse(name, kind, names)?.into_iter().collect());
    }
    if host.as_str() == DOH_CANARY {
        return Err(ResponseCode::NXDomain);
    }
    if host.is_localhost() {
        let addresses = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        return Ok(addresses
            .into_iter()
            .find_map(|address| address_record(address, kind))
            .into_iter()
            .collect());
    }
    match known {
        Known::Nothing => {}
        Known::NoName => return Err(ResponseCode::NXDomain),
        Known::Failed => return Err(ResponseCode::ServFail),
        Known::Addresses(found) => {
            return Ok(found.iter().filter_map(|address| address_record(*address, kind)).collect());
        }
    }
    if !matches!(kind, RecordType::A | RecordType::ANY) {
        return Ok(Vec::new());
    }
    let address = names.address_for(&host, now).ok_or(ResponseCode::ServFail)?;
    Ok(vec![RData::A(A(address))])
}

fn address_record(address: IpAddr, kind: RecordType) -> Option<RData> {
    match (address, kind) {
        (IpAddr::V4(ip), RecordType::A | RecordType::ANY) => Some(RData::A(A(ip))),
        (IpAddr::V6(ip), RecordType::AAAA | RecordType::ANY) => Some(RData::AAAA(AAAA(ip))),
        _ => None,
    }
}

/// Maps an address to its name. Only works for addresses that we made.
fn reverse(name: &Name, kind: RecordType, names: &NameTable) -> Result<Option<RData>, ResponseCode> {
    let network = name.parse_arpa_name().map_err(|_| ResponseCode::NXDomain)?;
    let IpAddr::V4(address) = network.addr() else { return Err(ResponseCode::NXDomain) };
    if network.prefix_len() != 32 {
        return Err(ResponseCode::NXDomain);
    }
    let host = names.name_of(address).ok_or(ResponseCode::NXDomain)?;
    if !matches!(kind, RecordType::PTR | RecordType::ANY) {
        return Ok(None);
    }
    let labels = host.as_str().split('.').map(str::as_bytes);
    let target = Name::from_labels(labels).map_err(|_| ResponseCode::ServFail)?;
    Ok(Some(RData::PTR(PTR(target))))
}

/// Converts the name to a host. Its labels must not contain dots.
fn host(name: &Name) -> Option<Host> {
    let labels: Vec<&[u8]> = name.iter().collect();
    if labels.iter().any(|label| label.contains(&b'.')) {
        return None;
    }
    Host::from_bytes(&labels.join(&b'.')).ok()
}

fn is_below(host: &str, zone: &str) -> bool {
    host.strip_suffix(zone).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}
