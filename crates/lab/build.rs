//! Compiles the BPF program that plays the packet engine's peer.

use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let folder = PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("../../bpf");
    for file in ["peer.bpf.c", "peer.h", "engine.h"] {
        println!("cargo::rerun-if-changed={}", folder.join(file).display());
    }
    println!("cargo::rerun-if-env-changed=CLANG");
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let target = if variable("CARGO_CFG_TARGET_ENDIAN") == "big" { "bpfeb" } else { "bpfel" };
    let run = Command::new(&clang)
        .args(["-O2", "-g0", "-target", target, "-mcpu=v3", "-Wall", "-Wextra", "-Werror"])
        .arg(format!("-I/usr/include/{}-linux-gnu", variable("CARGO_CFG_TARGET_ARCH")))
        .arg("-c")
        .arg(folder.join("peer.bpf.c"))
        .arg("-o")
        .arg(PathBuf::from(variable("OUT_DIR")).join("peer.bpf.o"))
        .status();
    if !run.is_ok_and(|status| status.success()) {
        eprintln!("error: {clang} could not compile peer.bpf.c: apt-get install clang linux-libc-dev");
        exit(1);
    }
}
