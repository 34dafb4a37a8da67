//! `run --secret`: a placeholder in flows that are not read as requests. The flow is reset before its last byte leaves.

use crate::secrets::{PREFIX, Scene, text};
use crate::tap::NAME;
use sidetrack_testkit::datagrams::Echo;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What servers got, connection by connection.
type Got = Arc<Mutex<Vec<Arc<Mutex<Vec<u8>>>>>>;

/// Sends back what it gets. A request gets an upgrade first.
fn echo(mut client: TcpStream, got: &Mutex<Vec<u8>>) -> std::io::Result<()> {
    let mut buffer = [0; 65536];
    loop {
        let length = client.read(&mut buffer)?;
        got.lock().unwrap().extend_from_slice(&buffer[..length]);
        match &buffer[..length] {
            [] => return Ok(()),
            request if request.starts_with(b"GET / ") => client.write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            )?,
            bytes => client.write_all(bytes)?,
        }
    }
}

/// A server that speaks first.
fn mail(mut client: TcpStream, got: &Mutex<Vec<u8>>) -> std::io::Result<()> {
    client.write_all(b"220 hello\r\n")?;
    let mut buffer = [0; 4096];
    loop {
        let length = client.read(&mut buffer)?;
        got.lock().unwrap().extend_from_slice(&buffer[..length]);
        if length == 0 {
            return Ok(());
        }
        client.write_all(b"250 yes\r\n")?;
    }
}

fn serve(got: &Got, talk: fn(TcpStream, &Mutex<Vec<u8>>) -> std::io::Result<()>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, got) = (listener.local_addr().unwrap(), got.clone());
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let of_client = Arc::<Mutex<Vec<u8>>>::default();
            got.lock().unwrap().push(of_client.clone());
            std::thread::spawn(move || talk(client, &of_client));
        }
    });
    address
}

#[test]
fn a_placeholder_in_other_flows_is_refused_before_its_last_byte_leaves() {
    let scene = Scene::new();
    let got = Got::default();
    let (plain, letters, datagrams) = (serve(&got, echo), serve(&got, mail), Echo::start("127.0.0.1"));
    let rules = format!(
        "version = 1\ndefault = 'direct'\n\
         [[rule]]\nname = 'mail'\nmatch = {{ host = '*.site.test', port = '{}' }}\nto = '{letters}'\ncarrier = 'direct'\n\
         [[rule]]\nname = 'site'\nmatch = {{ host = '*.site.test' }}\nto = '{plain}'\ncarrier = 'direct'\n",
        letters.port()
    );
    std::fs::write(scene.at("rules.toml"), rules).unwrap();
    let (rules, records) = (scene.at("rules.toml"), scene.at("records"));
    let secret = scene.for_host("api.site.test");
    let arguments = ["-c", &rules, "--secret", &secret, "--records", &records, "--fail-on-deny"];
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/http/unread.py");
    let script =
        format!("python3 {program} {plain} {letters} {} {NAME}; echo key=$API_KEY", datagrams.address);
    let output = scene.run(&arguments, &script);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    let placeholder = out.lines().last().and_then(|line| line.strip_prefix("key=")).unwrap().to_owned();
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(
        lines[..lines.len() - 1],
        [
            "divided 48 of 48",
            "at once True",
            "byte by byte True",
            "nearly True",
            "behind many bytes True",
            "mail b'220 hello\\r\\n250 yes\\r\\n' True",
            "upgraded b'101' True True",
            "datagrams echo echo",
            "name True",
            "name True",
        ],
        "{err}"
    );
    assert_eq!(output.status.code(), Some(120), "{err}");
    let has = |bytes: &[u8]| bytes.windows(placeholder.len()).any(|window| window == placeholder.as_bytes());
    let got = got.lock().unwrap();
    assert!(got.iter().all(|one| !has(&one.lock().unwrap())), "{err}");
    assert!(got.iter().any(|one| one.lock().unwrap().len() >= 8 << 20));
    // One line for each destination, and a record for each flow.
    let why = "the placeholder of a secret was refused (it has the placeholder of API_KEY, whose secret goes to api.site.test \
               only, in requests by https)";
    for to in [&plain.to_string(), &datagrams.address.to_string(), &format!("{NAME}:{}", letters.port())] {
        let lines: Vec<_> = err.lines().filter(|line| line.contains(to) && line.contains(why)).collect();
        assert!(lines.len() == 1 && lines[0].starts_with("sidetrack: python3"), "{to}: {err}");
    }
    assert!(
        err.contains(&format!(".{NAME}: the placeholder of a secret was refused (a name carries no secret)"))
    );
    let records = std::fs::read_to_string(records).unwrap();
    let refused = records.matches("\"reason\":\"secret_refused\"").count();
    assert_eq!(refused, 48 + 6, "{records}");
    assert!(!records.contains(PREFIX), "{records}");
}
