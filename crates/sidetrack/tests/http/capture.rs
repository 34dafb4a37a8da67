//! `sidetrack tap` and `run --pcapng`: packets of flows on real traffic, read by tshark.

use crate::origin::ok;
use crate::running::{Up, send};
use crate::secrets::{PREFIX, Scene, text};
use crate::tap::{Authority, NAME};
use crate::tls_origin::{Asks, TlsOrigin, World};
use rustix::process::Signal;
use sidetrack_testkit::{eventually, in_namespace};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// Bytes of the answer of `/big`: more than a capture queues for a viewer that does not read.
const BIG_BYTES: usize = 24 << 20;

/// Lets packets be captured.
const ALLOWED: &str = "[capture]\npackets = true\n";

/// What tshark reads in a file, by a display filter: one line for each packet, with these fields.
fn tshark(file: &Path, filter: &str, fields: &[&str]) -> Vec<String> {
    let mut command = Command::new("tshark");
    command.arg("-n").arg("-r").arg(file).args(["-Y", filter, "-T", "fields"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark: apt-get install tshark");
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}

fn tap(node: &Up, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("tap").args(arguments).arg("--admin").arg(node.folder().join("admin.sock"));
    command.stderr(Stdio::piped());
    command
}

/// Starts `tap` into a file of the node's folder, and waits until it captures.
fn captures(node: &Up, name: &str, arguments: &[&str]) -> Child {
    let file = node.folder().join(name);
    let started = tap(node, arguments).arg("--pcapng").arg(&file).spawn().unwrap();
    // It makes the file when the capture runs.
    eventually("a capture", || std::fs::metadata(&file).is_ok_and(|file| file.len() > 0));
    started
}

fn ends(child: Child) -> Output {
    send(child.id(), Signal::INT);
    child.wait_with_output().unwrap()
}

/// A server with TLS, and a node whose proxy opens connections to it. `more` are tables of the node.
struct Tapped {
    _authority: Authority,
    origin: TlsOrigin,
    node: Up,
    root: String,
}

fn scene(more: &str) -> Tapped {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| match request.path() {
        "/big" => ok("", &"x".repeat(BIG_BYTES)),
        path => ok("", path),
    });
    let tables = format!(
        "{}{more}[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\ntap = true\n\
         [[rule]]\nname = 'site'\nmatch = {{ host = '*.site.test' }}\nto = '{}'\ncarrier = 'direct'\n",
        authority.table(""),
        origin.address
    );
    let node = Up::start("user = \"root\"\ndefault = \"deny\"\n", &tables);
    let root = authority.path("ca/root.pem").to_str().unwrap().to_owned();
    Tapped { _authority: authority, origin, node, root }
}

impl Tapped {
    fn get(&self, url: &str) -> String {
        let proxy = format!("http://{}", self.node.addresses("in")[0]);
        let mut command = Command::new("curl");
        command.args(["-sS", "--http1.1", "--max-time", "60", "-x", &proxy, "--noproxy", "", "--cacert"]);
        let output = command.args([&self.root, url]).env_clear().output().expect("curl");
        text(&output.stdout)
    }
}

#[test]
fn one_file_has_the_packets_of_matching_flows_with_comments_and_opens_decrypted() {
    in_namespace(|| {
        let scene = scene(ALLOWED);
        let tapping = captures(&scene.node, "a.pcapng", &["rule == site"]);
        assert_eq!(scene.get(&format!("https://{NAME}/first?q=1")), "/first?q=1");
        // A rule denies this one: it does not match.
        assert!(scene.get("http://other.test/second").contains("403"));
        let ended = ends(tapping);
        assert!(ended.status.success(), "{}", text(&ended.stderr));
        assert!(text(&ended.stderr).contains(" packets, "), "{}", text(&ended.stderr));

        let file = scene.node.folder().join("a.pcapng");
        let ports = (scene.node.addresses("in")[0].port(), scene.origin.address.port());
        // Both connections of the flow are decrypted without a key file, and nothing else is there.
        let requests =
            tshark(&file, "http.request", &["tcp.dstport", "http.request.method", "http.request.uri"]);
        let request = |port: u16| format!("{port}\tGET\t/first?q=1");
        assert!(requests.contains(&request(ports.0)) && requests.contains(&request(ports.1)), "{requests:?}");
        assert!(!requests.iter().any(|line| line.contains("second")), "{requests:?}");
        let all = tshark(&file, "frame", &["tcp.srcport", "tcp.dstport"]);
        let ours = [ports.0, ports.1].map(|port| port.to_string());
        assert!(
            all.iter().all(|line| line.split('\t').any(|port| ours.contains(&port.to_owned()))),
            "{all:?}"
        );
        let is_whole = |port: &str| {
            tshark(&file, &format!("tcp.flags.syn == 1 && tcp.port == {port}"), &["frame.number"])
        };
        assert!(ours.iter().all(|port| is_whole(port).len() == 2), "the handshake of each connection");
        // The second connection to the proxy has one client's address that is not in the file.
        assert_eq!(tshark(&file, "tcp.flags.syn == 1 && tcp.flags.ack == 0", &["tcp.dstport"]).len(), 2);

        let comments = tshark(&file, "frame.comment", &["frame.comment"]);
        for (side, direction) in [("client", "up"), ("client", "down"), ("server", "up"), ("server", "down")]
        {
            let wanted = format!("side={side} direction={direction}");
            let said = |line: &&String| {
                line.contains(&wanted) && line.contains("rule=site") && line.contains("listener=in")
            };
            assert!(comments.iter().any(|line| said(&line)), "{wanted}: {comments:?}");
        }
        let names = Command::new("tshark")
            .args(["-N", "n", "-r"])
            .arg(&file)
            .args(["-q", "-z", "hosts"])
            .output()
            .unwrap();
        assert!(text(&names.stdout).contains(NAME), "{}", text(&names.stdout));
    });
}

#[test]
fn the_last_seconds_are_saved_after_the_fact() {
    in_namespace(|| {
        let scene = scene("[capture]\nring_bytes = 4194304\n");
        assert_eq!(scene.get(&format!("https://{NAME}/before")), "/before");
        let file = scene.node.folder().join("last.pcapng");
        let mut saving = tap(&scene.node, &["--last", "10m", "host == web.site.test"]);
        let saved = saving.arg("--pcapng").arg(&file).output().unwrap();
        assert!(saved.status.success(), "{}", text(&saved.stderr));
        let requests = tshark(&file, "http.request", &["http.request.uri"]);
        assert_eq!(requests.iter().filter(|uri| *uri == "/before").count(), 2, "{requests:?}");
    });
}

#[test]
fn a_viewer_that_does_not_read_loses_packets_and_no_flow_waits_for_it() {
    in_namespace(|| {
        let scene = scene(ALLOWED);
        let mut viewed = tap(&scene.node, &["--pcapng", "-"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut out = viewed.stdout.take().unwrap();
        let mut file = vec![0; 4];
        out.read_exact(&mut file).unwrap();
        // Its pipe is full soon, and then the queues before it.
        assert_eq!(scene.get(&format!("https://{NAME}/big")).len(), BIG_BYTES);
        send(viewed.id(), Signal::INT);
        out.read_to_end(&mut file).unwrap();
        let ended = viewed.wait_with_output().unwrap();
        let told = text(&ended.stderr);
        assert!(ended.status.success() && told.contains(" more were dropped"), "{told}");
        // The file is whole all the same.
        let path = scene.node.folder().join("slow.pcapng");
        std::fs::write(&path, &file).unwrap();
        let packets = tshark(&path, "frame", &["frame.number"]).len();
        assert!(told.starts_with(&format!("{packets} packets, {} bytes", file.len())), "{told}");
    });
}

#[test]
fn what_cannot_be_had_is_said() {
    in_namespace(|| {
        let scene = scene(ALLOWED);
        let said = |arguments: &[&str]| {
            let output = tap(&scene.node, arguments).output().unwrap();
            (output.status.code(), text(&output.stderr))
        };
        let nowhere = ["--pcapng", "/nonexistent/a.pcapng"];
        let (code, error) = said(&[&nowhere[..], &["hots == a"]].concat());
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains("  hots == a\n  ^^^^\n") && error.contains("host"), "{error}");
        let (code, error) = said(&[&nowhere[..], &["--last", "30s"]].concat());
        assert!(code == Some(1) && error.contains("ring_bytes"), "{error}");
        let (code, error) = said(&nowhere);
        assert!(code == Some(1) && error.contains("/nonexistent/a.pcapng"), "{error}");
        // A disk that is full.
        let (code, error) = said(&["--pcapng", "/dev/full"]);
        assert!(code == Some(1) && error.contains("No space left on device"), "{error}");
        // A viewer that vanishes: its pipe has no reader when the next packets come.
        let mut viewed = tap(&scene.node, &["--pcapng", "-"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut head = [0; 4];
        viewed.stdout.as_mut().unwrap().read_exact(&mut head).unwrap();
        assert_eq!(head, [0x0a, 0x0d, 0x0d, 0x0a]);
        drop(viewed.stdout.take());
        eventually("the end of a capture without a reader", || {
            assert_eq!(scene.get(&format!("https://{NAME}/")), "/");
            viewed.try_wait().unwrap().is_some()
        });
        assert!(viewed.wait().unwrap().success());
        // For a time, and for a number of bytes.
        let (code, error) = said(&["--pcapng", "-", "--for", "1ms", "rule == other"]);
        assert!(code == Some(0) && error.contains("0 packets"), "{error}");
        let (code, error) = said(&["--pcapng", "-", "--bytes-max", "10"]);
        assert!(code == Some(0) && error.contains("0 packets, 0 bytes"), "{error}");
    });
}

#[test]
fn a_command_is_captured_and_its_secret_stays_out_of_the_file() {
    let scene = Scene::new();
    let config = scene.rules(scene.origin.address);
    let file = scene.at("run.pcapng");
    let secret = scene.for_host(NAME);
    let arguments = ["-c", config.to_str().unwrap(), "--secret", &secret, "--trust", &scene.at("world.pem")];
    let arguments = [&arguments[..], &["--pcapng", &file]].concat();
    let output =
        scene.run(&arguments, &format!("curl -sS --http1.1 -H \"X-Token: $API_KEY\" https://{NAME}/page"));
    let told = text(&output.stderr);
    assert!(output.status.success() && told.contains(" packets, "), "{told}");
    let file = Path::new(&file);
    let lines = tshark(file, "http.request", &["http.request.uri", "http.request.line"]);
    // The command's own connection is decrypted, with the placeholder; the one with the secret is not.
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("/page") && lines[0].contains(PREFIX), "{lines:?}");
    assert_eq!(scene.asked()[0].field("x-token"), Some(crate::secrets::SECRET));
    let whole = Command::new("tshark").arg("-r").arg(file).args(["-V", "-x"]).output().unwrap();
    crate::secrets::shows_nothing("the capture", &whole.stdout);
    crate::secrets::shows_nothing("the file", &std::fs::read(file).unwrap());
    let comments = tshark(file, "frame.comment", &["frame.comment"]);
    let said = |line: &&String| line.contains("process=curl") && line.contains(&format!("host={NAME}"));
    assert!(comments.iter().any(|line| said(&line)), "{comments:?}");
}
