//! Real programs whose connections are opened: curl, Python requests and Node, through CONNECT and under `run --tap`.

use crate::origin::ok;
use crate::tap::{Authority, NAME, node};
use crate::tls_origin::{Asks, TlsOrigin, World};
use std::process::{Command, Output};

/// Programs that fetch a URL and print what they get, each by its own list of authorities.
const PROGRAMS: [&[&str]; 3] = [
    &["curl", "-sS", "--max-time", "60"],
    &[
        "/usr/bin/python3",
        "-c",
        "import requests, sys; sys.stdout.write(requests.get(sys.argv[1], timeout=60).text)",
    ],
    &[
        "node",
        "-e",
        "require('https').get(process.argv[1], { timeout: 60000 }, r => r.pipe(process.stdout))\
         .on('error', e => { console.error(e); process.exit(1) })",
    ],
];

fn origin(world: &World) -> TlsOrigin {
    TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| ok("", request.path()))
}

fn said(output: &Output) -> (Option<i32>, String) {
    let err = String::from_utf8_lossy(&output.stderr);
    (output.status.code(), format!("{}{err}", String::from_utf8_lossy(&output.stdout)))
}

#[test]
fn curl_is_opened_inside_connect_and_refuses_without_the_root() {
    let world = World::new();
    let authority = Authority::new(&world);
    let node = node(&authority, origin(&world).address, "", "");
    let curl = |more: &[&str]| {
        let proxy = format!("http://{}", node.entry());
        let url = format!("https://{NAME}/page");
        let mut command = Command::new("curl");
        command.args(["-sS", "--max-time", "60", "-x", &proxy, "--noproxy", "", &url]).args(more);
        said(&command.env_clear().output().expect("curl: apt-get install curl"))
    };
    let root = authority.path("ca/root.pem");
    assert_eq!(curl(&["--cacert", root.to_str().unwrap()]), (Some(0), "/page".to_owned()));
    let old = curl(&["--cacert", root.to_str().unwrap(), "--tls-max", "1.2"]);
    assert_eq!(old, (Some(0), "/page".to_owned()));
    let (code, text) = curl(&[]);
    assert!(code == Some(60) && text.contains("certificate"), "{code:?} {text}");
}

#[test]
fn one_command_trusts_the_authority_and_nobody_else_does() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = origin(&world);
    let config = authority.run_config(origin.address);
    let (records, keys) = (authority.path("records"), authority.path("keys"));
    let bundle = sidetrack::tls::system_bundle();
    let before = bundle.as_ref().map(|path| std::fs::read(path).unwrap());
    for (number, program) in PROGRAMS.iter().enumerate() {
        let url = format!("https://{NAME}/{number}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        command.args([
            "run",
            "--tap",
            "-c",
            config.to_str().unwrap(),
            "--records",
            records.to_str().unwrap(),
        ]);
        command.args(["--keylog", keys.to_str().unwrap(), "--"]).args(*program).arg(&url);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        let output = command.output().unwrap();
        assert_eq!(said(&output), (Some(0), format!("/{number}")), "{} (is it installed?)", program[0]);
    }
    let written = std::fs::read_to_string(&records).unwrap();
    for number in 0..PROGRAMS.len() {
        let detail = format!("GET https://{NAME}/{number} 200");
        assert!(written.contains(&detail), "{written}");
    }
    assert_eq!(written.matches("opened for web.site.test").count(), PROGRAMS.len());
    assert!(std::fs::read_to_string(&keys).unwrap().contains("SERVER_TRAFFIC_SECRET_0 "));
    let after = bundle.as_ref().map(|path| std::fs::read(path).unwrap());
    assert!(before == after, "the system's list is as it was");
}

#[test]
fn tap_without_an_authority_says_what_to_do() {
    let output = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .args(["run", "--tap", "--ca", "/nonexistent", "--", "true"])
        .output()
        .unwrap();
    let (code, text) = said(&output);
    assert!(code != Some(0) && text.contains("sidetrack ca init"), "{code:?} {text}");
}
