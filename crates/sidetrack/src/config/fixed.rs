//! Settings that a reload cannot change: the program reads them only at the start.

use super::{
    Admin, AdminAt, AgreementFile, CaptureAt, Config, Export, History, Limits, OrchestratorAt, PinnedAt,
    Record, RecordTo, Wire,
};
use std::fmt::Display;

/// Returns the settings that differ between the first configuration and a new one and that need a restart. Each
/// line has the key, the value in force and the value in the file. `user`, `[overlay]`, `[outgoing]`, `[shunt]`, addresses of `[dns]`
/// and engine listeners are not included: a reload that changes them is rejected as a whole.
pub fn waiting_for_restart(start: &Config, new: &Config) -> Vec<String> {
    // All fields are named, so that a new setting does not compile until it is listed here.
    let Config {
        workers,
        admin: Admin { socket, metrics, metrics_hosts, page, page_tokens, page_hosts, orchestrator },
        record: Record { to, recent },
        history: kept,
        export: Export { ipfix, otlp },
        capture,
        limits,
        wire,
        container_engine,
        // A reload changes these, or is rejected; see `of_agreement`.
        version: _,
        user: _,
        on_crash: _,
        capture_ssh: _,
        log_format: _,
        run_dns: _,
        shunt: _,
        tap: _,
        listeners: _,
        functions: _,
        overlay: _,
        tunnels: _,
        outgoing: _,
        dns: _,
        agreement,
        policy: _,
        // Information about the file itself.
        tests: _,
        warnings: _,
        named: _,
    } = start;
    let pairs = [
        ("workers", number(*workers), number(new.workers)),
        ("[admin] socket", socket_path(socket), socket_path(&new.admin.socket)),
        ("[admin] metrics", or_none(metrics.as_ref()), or_none(new.admin.metrics.as_ref())),
        ("[admin] metrics_hosts", metrics_hosts.join(", "), new.admin.metrics_hosts.join(", ")),
        ("[admin] page", or_none(page.as_ref()), or_none(new.admin.page.as_ref())),
        ("[admin] page_tokens", path(page_tokens.as_deref()), path(new.admin.page_tokens.as_deref())),
        ("[admin] page_hosts", page_hosts.join(", "), new.admin.page_hosts.join(", ")),
        ("[admin.orchestrator]", asked(orchestrator.as_ref()), asked(new.admin.orchestrator.as_ref())),
        ("[record] to", target(to), target(&new.record.to)),
        ("[record] recent", recent.to_string(), new.record.recent.to_string()),
        ("[history]", kept_in(kept.as_ref()), kept_in(new.history.as_ref())),
        ("[export.otlp]", or_none(otlp.as_ref()), or_none(new.export.otlp.as_ref())),
        ("[export.ipfix]", or_none(ipfix.as_ref()), or_none(new.export.ipfix.as_ref())),
        ("[capture]", captured(*capture), captured(new.capture)),
        ("[wire] flows_max", flows(wire.as_ref()), flows(new.wire.as_ref())),
        ("[wire] pins", pins(wire.as_ref()), pins(new.wire.as_ref())),
        ("[policy] history", history(agreement.as_ref()), history(new.agreement.as_ref())),
        ("[containers] engine", path(container_engine.as_deref()), path(new.container_engine.as_deref())),
    ];
    let pairs = pairs.into_iter().chain(of_limits(limits, &new.limits));
    let changed = pairs.filter(|(_, old, new)| old != new);
    let shown = |text: String| if text.is_empty() { "none".to_owned() } else { text };
    changed
        .map(|(key, old, new)| {
            format!("{key}: {} stays in force, not {}; restart sidetrack to apply it", shown(old), shown(new))
        })
        .chain(of_agreement(agreement.as_ref(), new.agreement.as_ref()))
        .collect()
}

fn asked(orchestrator: Option<&OrchestratorAt>) -> String {
    orchestrator.map_or_else(String::new, |OrchestratorAt { addresses, name, identity, ca }| {
        format!("{} ({name}, {}, {})", addresses.join(", "), identity.display(), ca.display())
    })
}

fn kept_in(history: Option<&History>) -> String {
    history.map_or_else(String::new, |history| {
        let History { path, max_bytes, keep, counters } = history;
        let (days, second) = (keep.as_secs() / 86_400, if *counters { ", each second" } else { "" });
        format!("{} ({max_bytes} bytes, {days} days{second})", path.display())
    })
}

fn captured(capture: CaptureAt) -> String {
    let CaptureAt { packets, ring_bytes, ring_snap_bytes } = capture;
    let allowed = if packets { "" } else { "not " };
    format!("{allowed}allowed, {ring_bytes} bytes kept, {ring_snap_bytes} of a packet")
}

fn flows(wire: Option<&Wire>) -> String {
    wire.map_or_else(String::new, |wire| wire.flows_max.to_string())
}

fn pins(wire: Option<&Wire>) -> String {
    match wire.map(|wire| &wire.pins) {
        None | Some(PinnedAt::None) => String::new(),
        Some(PinnedAt::Default) => "the default".to_owned(),
        Some(PinnedAt::Folder(folder)) => folder.display().to_string(),
    }
}

fn history(file: Option<&AgreementFile>) -> String {
    path(file.and_then(|file| file.history.as_deref()))
}

/// Says that `policy apply` may fail: after the start, only the folder of the first agreement may be changed.
fn of_agreement(start: Option<&AgreementFile>, new: Option<&AgreementFile>) -> Option<String> {
    let folder = |file: &AgreementFile| Some(std::path::absolute(&file.path).ok()?.parent()?.to_owned());
    let file = new.filter(|new| start.and_then(folder) != folder(new))?;
    let shown = file.path.display();
    Some(format!(
        "[policy] agreement: {shown} is in force, but `sidetrack policy apply` may not replace it, because its folder is not that \
         of the agreement at the start; restart sidetrack for that"
    ))
}

fn of_limits(start: &Limits, new: &Limits) -> [(&'static str, String, String); 3] {
    let Limits {
        max_flows,
        max_flows_per_client,
        max_handshakes,
        // Read for each flow, or at the end.
        idle_timeout_ms: _,
        udp_idle_timeout_ms: _,
        max_associations: _,
        lifetime_ms: _,
        connect_timeout_ms: _,
        handshake_timeout_ms: _,
        first_bytes_ms: _,
        buffer_bytes: _,
        memory_percent: _,
        drain_ms: _,
    } = start;
    let pair =
        |key, old: &Option<u32>, new: &Option<u32>| (key, or_none(old.as_ref()), or_none(new.as_ref()));
    [
        pair("[limits] max_flows", max_flows, &new.max_flows),
        pair("[limits] max_flows_per_client", max_flows_per_client, &new.max_flows_per_client),
        pair("[limits] max_handshakes", max_handshakes, &new.max_handshakes),
    ]
}

fn number(workers: usize) -> String {
    if workers == 0 { "one per core".to_owned() } else { workers.to_string() }
}

fn socket_path(socket: &AdminAt) -> String {
    match socket {
        AdminAt::Default => "the default".to_owned(),
        AdminAt::Path(path) => path.display().to_string(),
        AdminAt::None => String::new(),
    }
}

fn target(to: &RecordTo) -> String {
    match to {
        RecordTo::Stdout => "stdout".to_owned(),
        RecordTo::Stderr => "stderr".to_owned(),
        RecordTo::None => String::new(),
        RecordTo::File(path) => path.display().to_string(),
    }
}

fn path(path: Option<&std::path::Path>) -> String {
    path.map_or_else(String::new, |path| path.display().to_string())
}

fn or_none(value: Option<&impl Display>) -> String {
    value.map_or_else(String::new, ToString::to_string)
}
