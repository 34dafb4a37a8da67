//! Compiles the BPF programs that play the packet engine's peer, and the least that could stand in its place.

include!("../../bpf/compile.rs");

fn main() {
    compile(&["peer", "least"]);
}
