//! A module in WebAssembly sees and changes the payload of the packet engine's connections.

use crate::branching::say;
use crate::site::{Site, WAYS, engine_by};
use sidetrack_testkit::is_root;

#[test]
fn a_module_changes_the_payload_of_packets() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("mask.wat");
    std::fs::write(&file, include_str!("../../../../examples/engine-function/mask.wat")).expect("a file");
    let rules = format!(
        "\n[function.mask]\nkind = \"wasm\"\nmodule = \"{}\"\n[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nchain = [\"mask\"]\n",
        file.display()
    );
    for way in WAYS {
        let mut site = Site::taking_frames();
        let server = site.server("10.0.2.1");
        let listen = engine_by(way, &format!("to = \"{}\"", server.address));
        site.start("default = \"direct\"\n", &format!("{listen}{rules}"));
        assert_eq!(site.line.client.run(|| say("card 4000 1234")), "card **** ****", "{way}");
        assert_eq!(site.record().text("reason"), "ok", "{way}");
        // It resets the connection of a client that sends a zero byte.
        assert!(site.line.client.run(|| crate::branching::is_reset(b"zero \0")), "{way}");
        let record = site.record();
        assert_eq!(record.text("reason"), "function_refused", "{way}");
        assert!(record.text("detail").contains("function 'mask': the module closed"), "{way}");
    }
}
