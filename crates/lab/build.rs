//! Compiles the BPF program that plays the packet engine's peer.

include!("../../bpf/compile.rs");

fn main() {
    compile(&["peer"]);
}
