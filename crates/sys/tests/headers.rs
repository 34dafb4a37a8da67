//! Every header of `bpf/` compiles alone, so that a reader can open any one of them first.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Whether clang accepts a file that consists of this text only; what it says otherwise.
fn compiles(text: &str) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bpf");
    let clang = std::env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let mut child = Command::new(clang)
        .args([
            "-O2",
            "-target",
            "bpf",
            "-mcpu=v3",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            "-x",
            "c",
            "-",
        ])
        .arg(format!("-I/usr/include/{}-linux-gnu", std::env::consts::ARCH))
        .arg("-I")
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("clang built this crate, too");
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("clang reads");
    let output = child.wait_with_output().expect("clang ends");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn each_header_compiles_alone() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bpf");
    let mut headers: Vec<String> = std::fs::read_dir(folder)
        .expect("bpf/ is there")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".h"))
        .collect();
    headers.sort();
    assert!(headers.iter().any(|name| name == "packet.bpf.h"), "{headers:?}");
    for name in headers {
        if let Err(error) = compiles(&format!("#include \"{name}\"\n")) {
            panic!("{name} does not compile alone:\n{error}");
        }
    }
    assert!(compiles("struct flow_side side;\n").is_err(), "a type without its header is an error");
}
