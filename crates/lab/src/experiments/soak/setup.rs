//! The files of both programs.

use std::fs;
use std::path::Path;

use anyhow::Result;

use super::routes::{self, DATAGRAMS, OF_GATEWAY, Route};
use crate::peers::chains::CONTAINER;

/// What both ends know of each other.
#[derive(Clone)]
pub(super) struct Keys {
    /// Pins of the tunnel's ends: the gateway's and the far one.
    pub pins: [String; 2],
    /// Public keys of the overlay's nodes, likewise.
    pub nodes: [String; 2],
}

/// A module that reads what clients send and changes nothing.
const MODULE: &str = "(module (import \"env\" \"proxy_get_buffer_bytes\" (func $get (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export \"memory\") 2)
  (func (export \"malloc\") (param i32) (result i32) (i32.const 1024))
  (func (export \"proxy_on_downstream_data\") (param $flow i32) (param $size i32) (param $last i32) (result i32)
    (drop (call $get (i32.const 2) (i32.const 0) (local.get $size) (i32.const 0) (i32.const 4)))
    (i32.const 0)))
";

/// Functions that let everything pass unchanged.
const FUNCTIONS: &str = "[function.count]\nkind = \"count\"\n\
    [function.limit]\nkind = \"limit\"\nbytes_per_second = 200000000\n\
    [function.filter]\nkind = \"filter\"\ndeny_words = [\"a word that no client of this experiment sends\"]\n\
    [function.branch]\nkind = \"branch\"\narms = [{ name = \"words\", chain = [\"filter\"] }]\n\
    [function.replace]\nkind = \"replace\"\nreplace = [{ find = \"another word that no client sends\", with = \"nothing\" }]\n\
    [function.encrypt]\nkind = \"encrypt\"\nkey_file = \"FOLDER/bridge.key\"\n\
    [function.decrypt]\nkind = \"decrypt\"\nkey_file = \"FOLDER/bridge.key\"\n\
    [function.wasm]\nkind = \"wasm\"\nmodule = \"FOLDER/module.wat\"\n";

/// Writes what the configurations name.
///
/// # Errors
/// A file cannot be written.
pub(super) fn write_parts(folder: &Path) -> Result<()> {
    fs::write(folder.join("module.wat"), MODULE)?;
    Ok(fs::write(folder.join("bridge.key"), format!("{}\n", "5a".repeat(32)))?)
}

/// Returns the gateway's file. Each reload takes the next version: listeners come and go, and rules change their places.
pub(super) fn gateway(
    folder: &Path,
    keys: &Keys,
    routes: &[&Route],
    engine: Option<&Path>,
    version: u64,
) -> String {
    let ports: Vec<_> = routes.iter().map(|route| route.port.to_string()).collect();
    let ports = ports.join(", ");
    let more = match version % 3 {
        0 => "",
        1 => "[[listen]]\nname = \"more\"\nkind = \"socks\"\naddress = \"127.0.0.1:1081\"\n",
        _ => "[[listen]]\nname = \"more\"\nkind = \"http\"\naddress = \"127.0.0.1:1082\"\n",
    };
    let containers = engine.map_or_else(String::new, |socket| {
        format!("[containers]\nengine = \"{}\"\n[function.relay]\n{CONTAINER}", socket.display())
    });
    let text = format!(
        "version = 1\nworkers = 2\ndefault = \"deny\"\n\
         [admin]\nsocket = \"FOLDER/gateway.sock\"\n[record]\nto = \"FOLDER/records\"\n[limits]\ndrain_ms = 20000\n\
         [[listen]]\nname = \"router\"\nkind = \"tproxy\"\ninterfaces = [\"link1\"]\nports = [{ports}]\n\
         [[listen]]\nname = \"out\"\nkind = \"redirect\"\ndst = \"10.77.2.2/32\"\nports = [{ports}]\n\
         [[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"10.77.1.2:1080\"\n\
         [[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"10.77.1.2:3128\"\n\
         [[listen]]\nname = \"router-udp\"\nkind = \"tproxy\"\nprotocol = \"udp\"\ninterfaces = [\"link1\"]\nports = [{DATAGRAMS}]\n\
         [[listen]]\nname = \"port-udp\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"10.77.1.2:{}\"\nto = \"10.77.2.2:{DATAGRAMS}\"\n\
         {more}{}{}\
         [[rule]]\nname = \"datagrams\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n\
         {FUNCTIONS}{containers}\
         [[tunnel]]\nname = \"far\"\naddress = \"10.77.3.2:4433\"\nidentity = \"FOLDER/gateway.pem\"\npins = [\"{}\"]\n\
         [overlay]\nname = \"gateway\"\nkey_file = \"FOLDER/gateway.key\"\n\
         [overlay.node.gateway]\nkey = \"{}\"\n[overlay.node.far]\nkey = \"{}\"\naddress = \"10.77.3.2:8100\"\n",
        DATAGRAMS + OF_GATEWAY,
        routes::reverse(routes),
        routes::rules(routes, version),
        keys.pins[1],
        keys.nodes[0],
        keys.nodes[1],
    );
    text.replace("FOLDER", &folder.display().to_string())
}

/// Returns the far program's file.
pub(super) fn far(folder: &Path, keys: &Keys) -> String {
    let text = format!(
        "version = 1\nworkers = 1\ndefault = \"direct\"\n[admin]\nsocket = \"FOLDER/far.sock\"\n[record]\nto = \"none\"\n\
         [[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"10.77.3.2:1080\"\n\
         [[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"10.77.3.2:3128\"\n\
         [[listen]]\nname = \"tunnel\"\nkind = \"tunnel\"\naddress = \"10.77.3.2:4433\"\nidentity = \"FOLDER/far.pem\"\npins = [\"{}\"]\n\
         [[overlay.deliver]]\nfrom = [\"gateway\"]\nto = \"10.77.2.2/32\"\n\
         [overlay]\nname = \"far\"\nkey_file = \"FOLDER/far.key\"\nlisten = \"10.77.3.2:8100\"\n\
         [overlay.node.gateway]\nkey = \"{}\"\n[overlay.node.far]\nkey = \"{}\"\n",
        keys.pins[0], keys.nodes[0], keys.nodes[1],
    );
    text.replace("FOLDER", &folder.display().to_string())
}
