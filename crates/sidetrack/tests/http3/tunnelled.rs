//! HTTP/3 towards servers behind the far side of a tunnel.

use super::node::Up;
use super::servers::{curl, version};
use super::{BIG, Site, origin};
use rustix::process::Signal;
use sidetrack::tls::{Made, Pin, self_signed};
use sidetrack_testkit::{eventually, in_namespace};
use std::path::Path;

/// The lines of one end: its own key, and the certificate of the other end.
fn keys(folder: &Path, (name, own): (&str, &Made), other: &Made) -> String {
    let file = folder.join(name);
    std::fs::write(&file, own.identity_pem()).unwrap();
    let pin = Pin::of_pem(&other.certificate_pem).unwrap();
    format!("identity = \"{}\"\npins = [\"{pin}\"]\n", file.display())
}

#[test]
fn a_server_behind_a_tunnel_is_asked_by_http_3_and_by_tcp_where_the_far_side_refuses_datagrams() {
    // In a network of its own: the far side resolves the server's name, and may choose ::1.
    in_namespace(|| {
        let server = origin();
        let site = Site::at("*:0", "localhost", &format!("to = \"{server}\""), true);
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["near.test", "far.test"].map(|name| self_signed(name, 1).unwrap());
        for (protocol, spoken) in [("", "3.0"), (", protocol = \"tcp\"", "2.0")] {
            let far_keys = keys(folder.path(), ("far", &other), &one);
            let mut far = Up::start(
                "default = \"deny\"\n",
                &format!(
                    "[limits]\ndrain_ms = 0\n[[listen]]\nname = \"far\"\nkind = \"tunnel\"\naddress = \"127.0.0.1:0\"\n{far_keys}\
                     [[rule]]\nname = \"from-near\"\nmatch = {{ intercept = \"tunnel\"{protocol} }}\ncarrier = \"direct\"\n"
                ),
            );
            let near_keys = keys(folder.path(), ("near", &one), &other);
            let near = Up::start(
                "default = \"deny\"\n",
                &format!(
                    "[[tunnel]]\nname = \"t\"\naddress = \"{}\"\n{near_keys}\
                     [[listen]]\nname = \"in\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\nto = \"https://localhost:{}?ca={}\"\n\
                     [[rule]]\nname = \"web\"\nmatch = {{ listener = \"in\" }}\ncarrier = \"tunnel:t\"\nhttp3 = \"first\"\n",
                    far.addresses("far")[0],
                    site.address().port(),
                    site.ca_file().display()
                ),
            );
            let url = |path: &str| format!("http://{}{path}", near.addresses("in")[0]);
            eventually("the server is asked", || version(&curl(&["--include", &url("/a")])) == spoken);
            assert_eq!(curl(&[&url("/big")]).len(), BIG);
            let told = curl(&["--include", "--data", "some content", &url("/c")]);
            assert_eq!((&*version(&told), told.ends_with("body=some content")), (spoken, true));
            near.signal(Signal::TERM);
            far.signal(Signal::TERM);
            let (_, records) = far.gone();
            let has_udp = records.iter().any(|record| {
                record.text("protocol") == "udp"
                    && record.text("rule") == "from-near"
                    && record.number("packets_down") > 0
            });
            assert_eq!(has_udp, spoken == "3.0", "{records:?}");
        }
    });
}
