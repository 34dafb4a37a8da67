//! Development servers whose certificate no authority signed: `trust` and `unverified_hosts` of [tap], and `run --trust`.

use crate::node::Node;
use crate::origin::ok;
use crate::tap::{Authority, NAME, node, opened};
use crate::tls_origin::{Asks, TlsOrigin, World};
use rcgen::{CertificateParams, IsCa, Issuer, KeyPair};
use sidetrack::config::Config;
use sidetrack::tls::Made;
use std::process::{Command, Output};

/// A name that the authority may sign for, and no certificate here is for.
const OTHER: &str = "other.site.test";

fn params(name: &str, last_year: i32) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    // As most tools make certificates for development.
    params.is_ca = IsCa::ExplicitNoCa;
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(last_year, 1, 1);
    params
}

fn made(certificate: &rcgen::Certificate, key: &KeyPair) -> Made {
    Made { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() }
}

fn self_signed(name: &str, last_year: i32) -> Made {
    let key = KeyPair::generate().unwrap();
    made(&params(name, last_year).self_signed(&key).unwrap(), &key)
}

/// A certificate for [`NAME`], signed by one that may not sign; and that one.
fn signed_by_a_leaf() -> (Made, Made) {
    let (leaf_key, key) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let leaf = made(&params("dev.site.test", 2100).self_signed(&leaf_key).unwrap(), &leaf_key);
    let issuer = Issuer::new(params("dev.site.test", 2100), leaf_key);
    (made(&params(NAME, 2100).signed_by(&key, &issuer).unwrap(), &key), leaf)
}

fn origin(identity: &Made) -> TlsOrigin {
    TlsOrigin::start(identity, Asks::Nothing, |_| ok("", "the page"))
}

/// Status and page of a request to [`NAME`].
fn fetched(node: &Node, authority: &Authority) -> (u16, String) {
    let mut shaken = opened(node, &authority.root(), &[]);
    shaken.client.send(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
    let page = shaken.client.response(false);
    (page.status, page.text())
}

#[test]
fn a_certificate_in_trust_counts_for_itself_alone() {
    let own = self_signed(NAME, 2100);
    let (signed, leaf) = signed_by_a_leaf();
    let (late, elsewhere) = (self_signed(NAME, 2021), self_signed(OTHER, 2100));
    let unsigned = "no trusted authority signed it";
    for (what, listed, shown, refused) in [
        ("listed", &own, &own, None),
        ("not listed", &leaf, &own, Some(unsigned)),
        ("signed by a listed leaf", &leaf, &signed, Some(unsigned)),
        ("expired", &late, &late, Some("its certificate has expired")),
        ("for another name", &elsewhere, &elsewhere, Some("its certificate is for others")),
    ] {
        let authority = Authority::new(&World::new());
        std::fs::write(authority.path("world.pem"), &listed.certificate_pem).unwrap();
        let origin = origin(shown);
        let node = node(&authority, origin.address, "", "");
        let (status, page) = fetched(&node, &authority);
        let asked = origin.asked.lock().unwrap().len();
        match refused {
            None => assert_eq!((status, page.as_str(), asked), (200, "the page", 1), "{what}"),
            Some(why) => {
                assert!((status, asked) == (502, 0) && page.contains(why), "{what}: {status} {page}")
            }
        }
    }
}

#[test]
fn any_certificate_is_accepted_from_an_unverified_host_and_from_no_other() {
    for shown in [self_signed(NAME, 2100), self_signed(NAME, 2021), self_signed(OTHER, 2100)] {
        for (host, status) in [(NAME, 200), (OTHER, 502)] {
            let authority = Authority::new(&World::new());
            let origin = origin(&shown);
            let node = node(&authority, origin.address, "", &format!("unverified_hosts = ['{host}']"));
            assert_eq!(fetched(&node, &authority).0, status, "{host}");
        }
    }
}

#[test]
fn the_configuration_warns_of_unverified_hosts_and_refuses_what_is_no_host() {
    let authority = Authority::new(&World::new());
    let read = |hosts: &str| {
        let table = authority.table(&format!("unverified_hosts = {hosts}"));
        Config::from_text("t.toml", &format!("version = 1\n{table}"))
    };
    let said = format!("{:?}", read("['dev.example', '127.0.0.1', '::1']").unwrap().warnings);
    assert!(said.contains("are not verified"), "{said}");
    for wrong in ["['*.example']", "['dev.example:443']", "['']", "['127.1']"] {
        let error = read(wrong).unwrap_err().render(false);
        assert!(error.contains("a name such as \"dev.example\" or an address"), "{error}");
    }
}

/// `run --tap` with these arguments, of a curl that asks for this URL.
fn run(config: &std::path::Path, trust: &[&str], url: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.args(["run", "--tap", "-c", config.to_str().unwrap()]).args(trust);
    command.args(["--", "curl", "-sS", "--fail", "--max-time", "60", url]);
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
    command.output().unwrap()
}

#[test]
fn run_trusts_a_file_or_a_host_that_is_named() {
    let own = self_signed(NAME, 2100);
    let authority = Authority::new(&World::new());
    let origin = origin(&own);
    let config = authority.run_config(origin.address);
    let (pem, nothing) = (authority.path("own.pem"), authority.path("nothing.pem"));
    std::fs::write(&pem, &own.certificate_pem).unwrap();
    std::fs::write(&nothing, "no certificate").unwrap();
    let (pem, nothing) = (pem.to_str().unwrap(), nothing.to_str().unwrap());
    let (plain, other_port) = (format!("https://{NAME}/"), format!("https://{NAME}:8443/"));
    let with_port = format!("{NAME}:8443");
    // The last word: how often the warning is printed.
    for (trust, url, code, warned) in [
        (&[][..], &plain, 22, 0),
        (&["--trust", pem], &plain, 0, 0),
        (&["--trust", NAME], &plain, 0, 1),
        (&["--trust", OTHER], &plain, 22, 1),
        (&["--trust", OTHER, "--trust", NAME], &plain, 0, 1),
        // A port that is not intercepted: curl verifies the certificate itself.
        (&[], &other_port, 60, 0),
        (&["--trust", pem], &other_port, 0, 0),
        (&["--trust", NAME], &other_port, 60, 1),
        (&["--trust", &with_port], &other_port, 0, 1),
        (&["--trust", "/nonexistent"], &plain, 125, 0),
        (&["--trust", nothing], &plain, 125, 0),
        (&["--trust", "127.1"], &plain, 125, 0),
        (&["--trust", "*.site.test"], &plain, 125, 0),
        // The authority of this test may not sign for it.
        (&["--trust", "dev.example"], &plain, 125, 1),
    ] {
        let output = run(&config, trust, url);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{trust:?} {url}: {errors}");
        assert_eq!(errors.matches("are not verified").count(), warned, "{trust:?}: {errors}");
        assert_eq!(output.stdout == b"the page", code == 0, "{trust:?}");
    }
}
