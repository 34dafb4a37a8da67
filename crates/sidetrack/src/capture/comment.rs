//! What a comment says about the flow of a packet: words that a filter of Wireshark can search for.

use crate::record::FlowRecord;
use sidetrack_core::flow::Side;
use std::fmt::Write as _;

/// `flow=7 side=client direction=up process=curl rule=web host=web.example ...`. Text with other characters than those of names
/// stands in quotes, with control characters escaped: peers choose some of it.
pub(super) fn of(record: &FlowRecord<'_>, side: Side, is_up: bool) -> String {
    let side = if side == Side::Client { "client" } else { "server" };
    let direction = if is_up { "up" } else { "down" };
    let mut text = format!("flow={} side={side} direction={direction}", record.flow);
    let to = record.orig_dst.as_ref().map(|to| to.to_string());
    let chain = (!record.chain.is_empty()).then(|| record.chain.join(","));
    let fields = [
        ("process", record.process.as_deref()),
        ("rule", record.rule.as_deref()),
        ("listener", record.listener.as_deref()),
        ("host", record.host.as_deref()),
        ("dst", to.as_deref()),
        ("chain", chain.as_deref()),
        ("carrier", record.carrier.as_deref()),
        ("user", record.user.as_deref()),
    ];
    for (name, value) in fields {
        let Some(value) = value else { continue };
        let is_plain = !value.is_empty()
            && value.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\');
        // Writing to a String cannot fail.
        let _ = if is_plain { write!(text, " {name}={value}") } else { write!(text, " {name}={value:?}") };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::{Decided, LiveFlow};
    use sidetrack_core::flow::{Flow, FlowId, Intercept, Process, Protocol};

    #[test]
    fn what_peers_choose_cannot_pose_as_a_field() {
        let flow = Flow {
            protocol: Protocol::Tcp,
            intercept: Intercept::Socks,
            listener: "front".into(),
            client: "10.0.0.1:999".parse().unwrap(),
            orig_dst: "web.example:443".parse().unwrap(),
            host: Some("web.example".parse().unwrap()),
            process: Some(Process { name: Some("a b\n rule=evil\u{202e}\"".into()), ..Process::default() }),
            user: None,
        };
        let (live, decided) = (LiveFlow::new(FlowId(7)), Decided::new(flow, None));
        let text = of(&FlowRecord::live(&live, Some(&decided)), Side::Client, true);
        assert_eq!(
            text,
            "flow=7 side=client direction=up process=\"a b\\n rule=evil\\u{202e}\\\"\" listener=front host=web.example \
             dst=web.example:443"
        );
    }
}
