//! `run --secret`: the server gets the secret, and the command, the records and every other output have a placeholder.

use crate::h2::h2_origin;
use crate::origin::{Act, Request, ok};
use crate::tap::{Authority, NAME};
use crate::tls_origin::{Asks, TlsOrigin, World};
use data_encoding::{BASE64, HEXLOWER};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Output};

/// It has characters that JSON, forms and Base64 write in another way.
pub(crate) const SECRET: &str = "sk-\"Zq7\\+9 4&é-live";

/// Begins each placeholder.
pub(crate) const PREFIX: &str = "sidetrack-secret-";

/// Answers with all that it was asked, but for a login, whose form is not searched for.
fn echo(request: &Request) -> Act {
    let is_login = |line: &&String| line.to_lowercase().starts_with("authorization: basic");
    let fields: Vec<_> = request.fields.iter().filter(|line| !is_login(line)).cloned().collect();
    let content = String::from_utf8_lossy(&request.content);
    let token = request.field("x-token").unwrap_or("none");
    ok(&format!("X-Echo: {token}"), &format!("{}\n{}\n\n{content}\n", request.line, fields.join("\n")))
}

/// A world with one server, an authority for it, and a folder.
pub(crate) struct Scene {
    authority: Authority,
    pub(crate) origin: TlsOrigin,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let world = World::new();
        let authority = Authority::new(&world);
        std::fs::write(authority.path("key"), format!("{SECRET}\n")).unwrap();
        let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, echo);
        Self { authority, origin }
    }

    pub(crate) fn at(&self, name: &str) -> String {
        self.authority.path(name).to_str().unwrap().to_owned()
    }

    /// `--secret` of the file, for this server.
    pub(crate) fn for_host(&self, host: &str) -> String {
        format!("API_KEY=file:{}@{host}", self.at("key"))
    }

    /// Rules that lead names below `site.test` to this address, without an authority.
    pub(crate) fn rules(&self, to: SocketAddr) -> PathBuf {
        let config = self.authority.path("rules.toml");
        let text = format!(
            "version = 1\ndefault = 'direct'\n[[rule]]\nname = 'site'\nmatch = {{ host = '*.site.test' }}\nto = '{to}'\n\
             carrier = 'direct'\n"
        );
        std::fs::write(&config, text).unwrap();
        config
    }

    /// `run` with these arguments, of a script.
    pub(crate) fn run(&self, arguments: &[&str], script: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        command.arg("run").args(arguments).args(["--", "sh", "-c", script]);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("NO_COLOR", "1");
        command.env("SIDETRACK_LOG", if arguments.contains(&"--verbose") { "trace" } else { "warn" });
        command.output().unwrap()
    }

    pub(crate) fn asked(&self) -> Vec<Request> {
        std::mem::take(&mut *self.origin.asked.lock().unwrap())
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Every form of the secret that an output could show.
fn forms() -> Vec<Vec<u8>> {
    let json = "sk-\\\"Zq7\\\\+9 4&é-live";
    let form = "sk-%22Zq7%5C%2B9+4%26%C3%A9-live";
    let hex = HEXLOWER.encode(SECRET.as_bytes());
    let login = BASE64.encode(format!("ann:{SECRET}").as_bytes());
    // The middle of it is the same in each form.
    [SECRET, json, form, &hex, &login, "Zq7"].map(|form| form.as_bytes().to_vec()).to_vec()
}

#[track_caller]
pub(crate) fn shows_nothing(what: &str, bytes: &[u8]) {
    for form in forms() {
        let is_here = bytes.windows(form.len()).any(|window| window == form);
        assert!(!is_here, "{what} shows {}: {}", text(&form), text(bytes));
    }
}

/// The command would get an authority that it cannot know.
#[test]
fn a_system_without_a_list_of_authorities_is_told_what_to_install() {
    if !sidetrack_testkit::is_root() {
        return;
    }
    let scene = Scene::new();
    let secret = scene.for_host("web.site.test");
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs tmpfs /etc/ssl && exec \"$0\" run --secret \"$1\" -- true";
    command.args(["--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_sidetrack"), &secret]);
    let output = command.output().unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("install the package ca-certificates"), "{said}");
}

#[test]
fn the_server_gets_the_secret_and_no_output_shows_it() {
    let scene = Scene::new();
    let config = scene.rules(scene.origin.address);
    let python = "import os, requests, sys\n\
        key, url = os.environ['API_KEY'], 'https://web.site.test/'\n\
        r = requests.post(url + 'json', json={'key': key}, headers={'X-Token': key}); print(r.text, r.headers['x-echo'])\n\
        r = requests.post(url + 'form', data={'key': key, 'b': '1'}); print(r.text)\n\
        def pieces():\n\
        \x20 for at in range(0, len(key), 5): yield key[at:at + 5].encode()\n\
        \x20 yield b'x' * 100000 + key.encode()\n\
        r = requests.post(url + 'pieces', data=pieces()); print(r.text)\n";
    std::fs::write(scene.at("client.py"), python).unwrap();
    let script = format!(
        "echo key=$API_KEY; cat {key}; env; cat /proc/$PPID/environ /proc/$PPID/cmdline; \
         curl -sS --http1.1 -i -H \"X-Token: $API_KEY\" https://{NAME}/h1?q=1; \
         curl -sS --http2 -i -H \"X-Token: $API_KEY\" https://{NAME}/h2; \
         curl -sS --http2 -u \"ann:$API_KEY\" https://{NAME}/login; \
         curl -sS --http2 -H 'Content-Type: application/json' -H 'Expect: 100-continue' -d \"{{\\\"key\\\": \\\"$API_KEY\\\"}}\" https://{NAME}/json2; \
         curl -sS -I -H \"X-Token: $API_KEY\" https://{NAME}/head; \
         /usr/bin/python3 {client}",
        key = scene.at("key"),
        client = scene.at("client.py"),
    );
    let arguments = [
        "-c",
        config.to_str().unwrap(),
        "--secret",
        &scene.for_host(NAME),
        "--trust",
        &scene.at("world.pem"),
        "--records",
        &scene.at("records"),
        "--verbose",
    ];
    let output = scene.run(&arguments, &script);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    shows_nothing("the command's output", &output.stdout);
    shows_nothing("our output", &output.stderr);
    shows_nothing("the records", &std::fs::read(scene.at("records")).unwrap());
    let asked = scene.asked();
    let of = |path: &str| {
        asked.iter().find(|one| one.path() == path).unwrap_or_else(|| panic!("{path}: {out}{err}"))
    };
    for path in ["/h1?q=1", "/h2", "/head", "/json"] {
        assert_eq!(of(path).field("x-token"), Some(SECRET), "{path}: {out}{err}");
    }
    let login = format!("Basic {}", BASE64.encode(format!("ann:{SECRET}").as_bytes()));
    assert_eq!(of("/login").field("authorization"), Some(&*login));
    for path in ["/json", "/json2"] {
        let request = of(path);
        let json: serde_json::Value = serde_json::from_slice(&request.content).unwrap();
        assert_eq!((&json["key"], json.as_object().unwrap().len()), (&SECRET.into(), 1), "{path}");
        assert_eq!(request.field("content-length"), Some(&*request.content.len().to_string()));
    }
    assert_eq!(text(&of("/form").content), "key=sk-%22Zq7%5C%2B9+4%26%C3%A9-live&b=1");
    assert_eq!(text(&of("/pieces").content), format!("{SECRET}{}{SECRET}", "x".repeat(100_000)));
    // The command reads its placeholder in the variable, in the file, and in all that the server says.
    let placeholder = out.lines().next().unwrap().strip_prefix("key=").unwrap().to_owned();
    assert!(placeholder.starts_with(PREFIX) && placeholder.len() == PREFIX.len() + 32, "{placeholder}");
    assert_eq!(out.lines().nth(1), Some(&*placeholder));
    assert!(!asked.iter().any(|one| one.fields.iter().any(|line| line.contains(PREFIX))), "{asked:?}");
    let said = |line: &str| out.matches(&format!("{line}{placeholder}")).count();
    assert!(said("x-echo: ") >= 2 && said("X-Echo: ") >= 1, "{out}");
    assert_eq!(out.matches(&format!("{{\"key\": \"{placeholder}\"}}")).count(), 2, "{out}");
    assert_eq!(out.matches(&format!("key={placeholder}&b=1")).count(), 1, "{out}");
}

#[test]
fn a_server_of_http2_gets_the_secret_from_a_variable_and_neither_archive_nor_key_log_shows_it() {
    let world = World::new();
    let (address, _) = h2_origin(&world.identity(NAME, 30));
    let scene = Scene {
        authority: Authority::new(&world),
        origin: TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, echo),
    };
    let config = scene.authority.run_config(address);
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.args(["run", "--tap", "-c", config.to_str().unwrap(), "--secret"]);
    command.args([&format!("TOKEN=env:REAL_TOKEN@{NAME},other.site.test"), "--har", &scene.at("har")]);
    command.args(["--keylog", &scene.at("keys"), "--", "sh", "-c"]);
    command.arg(format!(
        "env; curl -sS -i -H \"Authorization: Bearer $TOKEN\" --data-binary \"a $TOKEN\" https://{NAME}/x"
    ));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("REAL_TOKEN", SECRET);
    let output = command.output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    let got = HEXLOWER.encode(format!("Bearer {SECRET}").as_bytes());
    assert!(out.contains(&format!("x-got: {got}")), "{out}");
    assert!(out.contains(&format!("\na {PREFIX}")) && !out.contains("REAL_TOKEN"), "{out}");
    shows_nothing("the command's output", out.replace(&got, "").as_bytes());
    shows_nothing("our output", &output.stderr);
    let har = text(&std::fs::read(scene.at("har")).unwrap());
    assert!(har.contains(&format!("https://{NAME}/x")), "{har}");
    shows_nothing("the archive", har.replace(&got, "").as_bytes());
    // The command's side of the connection can be decrypted, and the server's cannot.
    let keys = text(&std::fs::read(scene.at("keys")).unwrap());
    assert_eq!(keys.matches("SERVER_TRAFFIC_SECRET_0 ").count(), 1, "{keys}");
}

#[test]
fn a_placeholder_elsewhere_is_refused_and_the_line_says_what_to_do() {
    let scene = Scene::new();
    let config = scene.authority.run_config(scene.origin.address);
    let (secret, far) = (scene.for_host(NAME), "other.site.test");
    let arguments =
        ["--tap", "-c", config.to_str().unwrap(), "--secret", &secret, "--fail-on-deny", "--trust", far];
    let long = "head -c 2000000 /dev/zero | tr '\\0' x; echo $API_KEY";
    for (script, why) in [
        (format!("-H \"X-Token: $API_KEY\" https://{far}/"), "whose secret is for web.site.test only"),
        (format!("-u \"ann:$API_KEY\" https://{far}/"), "--secret API_KEY=…@web.site.test,other.site.test"),
        (format!("-d \"key=$API_KEY\" https://{far}/"), "whose secret is for web.site.test only"),
        (format!("-H 'Transfer-Encoding: chunked' -d \"$API_KEY\" https://{far}/"), "for web.site.test only"),
        (format!("https://{far}/?key=$API_KEY"), "whose secret is for web.site.test only"),
        (format!("-H \"X-Token: $API_KEY\" http://{NAME}/"), "in clear text"),
        (format!("-d \"key=$API_KEY\" http://{NAME}/"), "ask by https"),
        (format!("https://{NAME}/?key=$API_KEY"), "in a URL, where it is not replaced"),
        (format!("-H 'Expect:' --data-binary @long https://{NAME}/"), "longer than 1 MiB"),
    ] {
        let folder = scene.at("");
        let script = format!(
            "cd {folder}; ({long}) >long; curl -sS -o answer -w '%{{http_code}}\\n' {script}; cat answer"
        );
        let output = scene.run(&arguments, &script);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(out.starts_with("403\n") && out.contains(&why.replace('<', "&lt;")), "{script}: {out}{err}");
        let line = err.lines().find(|line| line.contains("the placeholder of a secret was refused"));
        assert!(
            line.is_some_and(|line| line.starts_with("sidetrack: curl: ") && line.contains(why)),
            "{script}: {err}"
        );
        assert_eq!(output.status.code(), Some(120), "{script}: {err}");
        // At most the beginning of content has left, and never a head with a placeholder.
        assert!(scene.asked().iter().all(|one| !text(&one.content).contains(PREFIX)), "{script}");
    }
}

#[test]
fn other_hosts_are_not_intercepted_without_tap() {
    let scene = Scene::new();
    let config = scene.rules(scene.origin.address);
    let arguments = ["-c", config.to_str().unwrap(), "--trust", &scene.at("world.pem"), "--secret"];
    let script = format!("curl -sS https://{NAME}/a");
    // curl sees the certificate of the server itself.
    let output = scene.run(&[&arguments[..], &[&scene.for_host("other.site.test")]].concat(), &script);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(scene.asked()[0].field("via"), None);
    let output = scene.run(&[&arguments[..], &[&scene.for_host(NAME)]].concat(), &script);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(scene.asked()[0].field("via").is_some());
    // A placeholder in TLS to another host passes unread, and is worth nothing there. In plain HTTP it is refused.
    let script = "curl -sS -H \"X-Token: $API_KEY\" https://other.site.test/ -k -o answer; \
                  curl -sS -H \"X-Token: $API_KEY\" -o answer -w '%{http_code}' http://other.site.test/";
    let script = format!("cd {}; {script}", scene.at(""));
    let output = scene.run(&[&arguments[..], &[&scene.for_host(NAME)]].concat(), &script);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(out, "403", "{err}");
    assert!(err.contains("other.site.test:80: the placeholder of a secret was refused"), "{err}");
    let asked = scene.asked();
    assert_eq!(asked.len(), 1, "by https");
    assert!(asked[0].field("x-token").is_some_and(|token| token.starts_with(PREFIX)));
}

#[test]
fn wrong_secrets_are_refused_before_the_command_starts() {
    let scene = Scene::new();
    for (name, content) in [("empty", ""), ("lines", "hunter2-hunter2\nhunter2"), ("short", "hunter2")] {
        std::fs::write(scene.at(name), content).unwrap();
    }
    let good = scene.for_host(NAME);
    let of = |name: &str| format!("A=file:{}@{NAME}", scene.at(name));
    for (secrets, more, why) in [
        (vec![of("missing")], &[][..], "missing: No such file"),
        (vec![of("empty")], &[], "it is empty"),
        (vec![of("lines")], &[], "it has several lines"),
        (vec![of("short")], &[], "it has 7 bytes"),
        (vec![format!("A=env:NOT_SET@{NAME}")], &[], "the variable NOT_SET is not set"),
        (vec!["A=hunter2-hunter2".to_owned()], &[], "NAME=file:PATH@HOST"),
        (vec![scene.for_host("*.site.test")], &[], "stands for several hosts"),
        (vec![good.clone(), good.clone()], &[], "API_KEY is given twice"),
        (vec![good.clone()], &["--mode", "cgroup"], "does not go with --mode cgroup"),
        (vec![good.clone()], &["--trust", NAME], "certificates are not verified"),
        (vec![good.clone()], &["--tap", "--ca", "/nonexistent"], "sidetrack ca init"),
        (vec![], &["--trust", NAME], "--secret"),
    ] {
        let secrets = secrets.iter().flat_map(|one| ["--secret", one]);
        let arguments: Vec<_> = secrets.chain(more.iter().copied()).collect();
        let output = scene.run(&arguments, "echo started");
        let err = text(&output.stderr);
        assert!(err.contains(why), "{arguments:?}: {err}");
        assert!(output.stdout.is_empty() && output.status.code() != Some(0), "{arguments:?}");
        assert!(!err.contains("hunter2"), "{err}");
    }
}
