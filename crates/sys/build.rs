//! Compiles the BPF programs of `bpf/` with clang into objects that the library embeds, and writes the layout of what
//! they share with it.

include!("../../bpf/compile.rs");

/// The programs, by the stem of their file.
const PROGRAMS: [&str; 3] = ["shunt", "engine", "wire"];

fn main() {
    compile(&PROGRAMS);
    headers();
    PROGRAMS.iter().for_each(|stem| layout(stem));
}
