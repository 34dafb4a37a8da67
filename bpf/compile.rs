// How the programs of this folder are compiled: part of the build scripts of the crates that embed them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| fail(&format!("{name} is not set: build with cargo")))
}

fn out(name: &str) -> PathBuf {
    Path::new(&variable("OUT_DIR")).join(name)
}

/// Compiles programs, named by the stem of their file, into objects of the same stem.
fn compile(stems: &[&str]) {
    let folder = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../../bpf");
    println!("cargo::rerun-if-changed={}", folder.display());
    println!("cargo::rerun-if-env-changed=CLANG");
    for stem in stems {
        let source = folder.join(format!("{stem}.bpf.c"));
        clang(&source, &["-c"], Some(&out(&format!("{stem}.bpf.o"))));
    }
}

/// Verifies that each header of the folder includes what it needs: clang reads it alone.
#[allow(dead_code, reason = "one build script is enough to do it")]
fn headers() {
    let folder = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../../bpf");
    let entries = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| fail(&format!("cannot read {}: {error}", folder.display())));
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "h") {
            // What it defines is for the programs that include it.
            let alone = ["-fsyntax-only", "-Wno-unused-function", "-Wno-unused-variable", "-xc"];
            clang(&path, &alone, None);
        }
    }
}

/// Writes `STEM_layout.rs` of `STEM.layout.c`: sizes, offsets and constants of the C structures, so that Rust does not
/// repeat them by hand.
#[allow(dead_code, reason = "the laboratory's build script has no layouts")]
fn layout(stem: &str) {
    let folder = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../../bpf");
    let assembler = out(&format!("{stem}.layout.s"));
    clang(&folder.join(format!("{stem}.layout.c")), &["-S"], Some(&assembler));
    let text = std::fs::read_to_string(&assembler)
        .unwrap_or_else(|error| fail(&format!("cannot read {}: {error}", assembler.display())));
    let written = std::fs::write(out(&format!("{stem}_layout.rs")), constants(&text));
    written.unwrap_or_else(|error| fail(&format!("cannot write the layout of {stem}: {error}")));
}

/// Makes Rust of the lines that `layout.h` puts into assembler text: `->type SIZE 24`, `->type member 8`, `->- NAME 3`.
#[allow(dead_code, reason = "the laboratory's build script has no layouts")]
fn constants(assembler: &str) -> String {
    let mut types: BTreeMap<&str, String> = BTreeMap::new();
    let mut plain = String::new();
    for line in assembler.lines() {
        let Some(entry) = line.trim().strip_prefix(".ascii \"->").and_then(|rest| rest.strip_suffix('"')) else {
            continue;
        };
        let mut words = entry.split(' ');
        let (Some(kind), Some(name), Some(value)) = (words.next(), words.next(), words.next()) else {
            fail(&format!("not a line of layout.h: {line}"))
        };
        let Ok(value) = value.parse::<i64>() else { fail(&format!("not a number: {line}")) };
        if kind == "-" {
            // All constants are 32 bits wide in the maps; 0xffffffff is written as -1.
            plain += &format!("pub(crate) const {name}: u32 = {};\n", value & 0xffff_ffff);
        } else {
            let upper = name.to_uppercase();
            *types.entry(kind).or_default() += &format!("    pub(crate) const {upper}: usize = {value};\n");
        }
    }
    if types.is_empty() {
        fail("clang wrote no layout: see bpf/layout.h");
    }
    types.iter().fold(plain, |text, (name, members)| text + &format!("pub(crate) mod {name} {{\n{members}}}\n"))
}

fn clang(source: &Path, what: &[&str], target_file: Option<&Path>) {
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let machine = variable("CARGO_CFG_TARGET_ARCH");
    // A big-endian host has big-endian BPF.
    let target = if variable("CARGO_CFG_TARGET_ENDIAN") == "big" { "bpfeb" } else { "bpfel" };
    let mut command = Command::new(&clang);
    command
        // Version 3 of the instructions (Linux 5.12) has atomic exchange.
        .args(["-O2", "-g0", "-target", target, "-mcpu=v3", "-Wall", "-Wextra", "-Werror"])
        // Debian and Ubuntu keep the architecture's part of the kernel's headers here (package linux-libc-dev).
        .arg(format!("-I/usr/include/{machine}-linux-gnu"))
        // For another architecture, they come with its cross compiler (package linux-libc-dev-arm64-cross).
        .arg(format!("-I/usr/{machine}-linux-gnu/include"))
        .args(what)
        .arg(source);
    if let Some(target_file) = target_file {
        command.arg("-o").arg(target_file);
    }
    match command.status() {
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
