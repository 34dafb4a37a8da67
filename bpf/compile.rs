// How programs of this folder are compiled: a part of the build scripts of the crates that embed them.

use std::path::Path;
use std::process::{Command, exit};

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| fail(&format!("{name} is not set: build with cargo")))
}

/// Compiles these programs, by the stem of their file, into objects of the same stem.
fn compile(stems: &[&str]) {
    let folder = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../../bpf");
    println!("cargo::rerun-if-changed={}", folder.display());
    println!("cargo::rerun-if-env-changed=CLANG");
    for stem in stems {
        compile_one(&folder, stem, &Path::new(&variable("OUT_DIR")).join(format!("{stem}.bpf.o")));
    }
}

fn compile_one(folder: &Path, stem: &str, object: &Path) {
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let source = folder.join(format!("{stem}.bpf.c"));
    let machine = variable("CARGO_CFG_TARGET_ARCH");
    // A big-endian host has big-endian BPF.
    let target = if variable("CARGO_CFG_TARGET_ENDIAN") == "big" { "bpfeb" } else { "bpfel" };
    let run = Command::new(&clang)
        // Version 3 of the instructions (Linux 5.12) has atomic exchange.
        .args(["-O2", "-g0", "-target", target, "-mcpu=v3", "-Wall", "-Wextra", "-Werror"])
        // Where Debian and Ubuntu keep the architecture's part of the kernel's headers (package linux-libc-dev).
        .arg(format!("-I/usr/include/{machine}-linux-gnu"))
        .arg("-c")
        .arg(&source)
        .arg("-o")
        .arg(object)
        .status();
    match run {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!(
            "{clang} could not compile {} ({status}); it needs the kernel's headers: apt-get install linux-libc-dev",
            source.display()
        )),
        Err(error) => fail(&format!(
            "cannot run {clang}: {error}\nhelp: the programs of the packet path are compiled by clang: apt-get install clang, or \
             set CLANG to the one to use"
        )),
    }
}

fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    exit(1)
}
