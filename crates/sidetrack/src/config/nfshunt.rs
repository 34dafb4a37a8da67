//! Reads NFShunt's configuration file (JSON) without changes to it.

use super::Problem;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// The keys of the file. An unknown key is an error, as in Sidetrack's own file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NfShunt {
    #[serde(default)]
    delete_flows_on_startup: bool,
    /// NFShunt reads this key when it ends, although its own file does not have it.
    #[serde(default)]
    delete_flows_on_shutdown: bool,
    /// Seconds.
    #[serde(default = "ten")]
    default_shunt_timeout: u64,
    /// Seconds.
    #[serde(default = "ten")]
    default_block_timeout: u64,
    /// Whether to install the entries that connect the ports in pairs.
    #[serde(default = "yes")]
    default_no_shunting: bool,
    ports: Vec<Port>,
    mark_actions: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Port {
    fast: u32,
    slow: u32,
    physdevin: u32,
}

const fn ten() -> u64 {
    10
}

const fn yes() -> bool {
    true
}

/// Whether a text is NFShunt's: JSON begins with `{`, TOML never does.
pub(super) fn is_nfshunt(text: &str) -> bool {
    text.trim_start().starts_with('{')
}

/// Translates the file into Sidetrack's TOML.
pub(super) fn translated(text: &str) -> Result<String, Vec<Problem>> {
    let file: NfShunt = serde_json::from_str(text).map_err(|error| {
        let at = offset(text, error.line(), error.column());
        let help = "a file that begins with { is taken for NFShunt's (nfshunt.json); ours is TOML: docs/configuration.md";
        vec![Problem::error(at..at, format!("this is not a configuration of NFShunt: {error}"), help)]
    })?;
    let mut toml = format!(
        "version = 1\n[shunt]\nfast_path = \"openflow\"\nforwarding = \"bridged\"\nidle_timeout_ms = {}\n\
         block_idle_timeout_ms = {}\n",
        file.default_shunt_timeout.saturating_mul(1000),
        file.default_block_timeout.saturating_mul(1000)
    );
    if let Some(actions) = &file.mark_actions {
        toml += "[shunt.actions]\n";
        for (number, action) in actions {
            // Writing to a String cannot fail.
            let _ = writeln!(toml, "{number:?} = {action:?}");
        }
    }
    for port in &file.ports {
        let _ = writeln!(
            toml,
            "[[shunt.port]]\nnumber = {}\nfast_port = {}\nslow_port = {}",
            port.physdevin, port.fast, port.slow
        );
    }
    let _ = writeln!(
        toml,
        "[shunt.openflow]\nlisten = [\"0.0.0.0:6633\", \"0.0.0.0:6653\"]\ndelete_flows_on_startup = {}\n\
         delete_flows_on_shutdown = {}\ninstall_pairs = {}",
        file.delete_flows_on_startup, file.delete_flows_on_shutdown, file.default_no_shunting
    );
    Ok(toml)
}

/// Returns the byte offset of a line and a column, both from 1.
fn offset(text: &str, line: usize, column: usize) -> usize {
    let before: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (before + column.saturating_sub(1)).min(text.len())
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, ShuntPath};
    use sidetrack_core::openflow::SwitchPorts;
    use sidetrack_core::shunt::{PortNumber, ShuntAction};

    const SHIPPED: &str = r#"{
        "delete_flows_on_startup": true,
        "default_shunt_timeout": 10,
        "default_block_timeout": 20,
        "default_no_shunting": true,
        "ports": [
            {"fast": 49, "slow": 10, "physdevin": 1},
            {"fast": 50, "slow": 11, "physdevin": 2}
        ],
        "mark_actions": {"0": "ignore", "1": "shunt", "2": "block"}
    }"#;

    #[test]
    fn the_file_that_the_original_ships_is_read() {
        let shunt = Config::from_text("nfshunt.json", SHIPPED).unwrap().shunt.unwrap();
        let [ShuntPath::OpenFlow(switch)] = shunt.fast_paths.as_slice() else { panic!("{shunt:?}") };
        assert_eq!(
            (shunt.idle_timeout_ms, shunt.block_idle_timeout_ms, shunt.bridged),
            (10_000, 20_000, true)
        );
        assert_eq!((switch.clear_at_start, switch.clear_at_end, switch.pairs), (true, false, true));
        let port = |number| switch.ports.get(&PortNumber::new(number).unwrap()).copied();
        assert_eq!(port(1), Some(SwitchPorts { fast: 49, slow: 10 }));
        assert_eq!(port(2), Some(SwitchPorts { fast: 50, slow: 11 }));
        assert_eq!(shunt.actions.action(2), Some(ShuntAction::Block));
        assert!(switch.listen.iter().any(|address| address.port() == 6633));
    }

    #[test]
    fn what_is_wrong_with_it_is_said_with_its_place() {
        let error = Config::from_text("nfshunt.json", &SHIPPED.replace("ports", "prots")).unwrap_err();
        let text = error.render(false);
        assert!(text.contains("prots") && text.contains("NFShunt"), "{text}");
        let error =
            Config::from_text("nfshunt.json", &SHIPPED.replace("\"slow\": 11", "\"slow\": 10")).unwrap_err();
        assert!(error.render(false).contains("named twice"), "{}", error.render(false));
    }
}
