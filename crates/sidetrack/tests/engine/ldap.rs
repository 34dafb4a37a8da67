//! LDAP for real: OpenLDAP's servers and its own tools, the server chosen by the entry that the first request is about, also after
//! an anonymous bind, one attribute value rewritten in flight.

use crate::site::{Site, engine};
use crate::tools::{Running, tool};
use sidetrack_testkit::{Node, is_root};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where the engine answers, as the tools want it.
const ENGINE: &str = "ldap://10.0.1.254:80";

/// A directory with 300 people below `dc=NAME` on this port.
fn slapd(host: &Node, folder: &Path, name: &'static str, port: u16) -> Running {
    let path = folder.join(name);
    std::fs::create_dir(&path).expect("a folder");
    let text = format!(
        "include /etc/ldap/schema/core.schema\ninclude /etc/ldap/schema/cosine.schema\ninclude \
         /etc/ldap/schema/inetorgperson.schema\npidfile {0}/pid\nmodulepath /usr/lib/ldap\nmoduleload back_mdb\ndatabase mdb\n\
         suffix \"dc={name}\"\nrootdn \"cn=admin,dc={name}\"\nrootpw secret\ndirectory {0}\nmaxsize 16777216\n",
        path.display()
    );
    let config = path.join("slapd.conf");
    std::fs::write(&config, text).expect("written");
    let mut entries = format!("dn: dc={name}\nobjectClass: domain\ndc: {name}\n\n");
    for number in 0..300 {
        entries += &format!(
            "dn: cn=person {number},dc={name}\nobjectClass: inetOrgPerson\ncn: person {number}\nsn: {number}\nmail: \
             p{number}@old.{name}\n\n"
        );
    }
    let ldif = path.join("entries.ldif");
    std::fs::write(&ldif, entries).expect("written");
    tool("/usr/sbin/slapadd", &format!("-q -f {} -l {}", config.display(), ldif.display()));
    let child = host.run(move || {
        Command::new("/usr/sbin/slapd")
            .args(["-d", "0", "-h", &format!("ldap://10.0.2.1:{port}"), "-f"])
            .arg(config)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("slapd: {error} (Debian's package slapd)"))
    });
    host.run(move || {
        sidetrack_testkit::eventually("slapd listens", || {
            std::net::TcpStream::connect(("10.0.2.1", port)).is_ok()
        });
    });
    Running(child)
}

fn search(host: &Node, url: &str, name: &str, filter: &str) -> String {
    let arguments =
        format!("-LLL -x -H {url} -D cn=admin,dc={name} -w secret -b dc={name} -o nettimeout=50 {filter}");
    host.run(move || tool("ldapsearch", &arguments))
}

fn modify(host: &Node, folder: PathBuf, name: &'static str) {
    host.run(move || {
        let change = format!("dn: cn=person 7,dc={name}\nchangetype: modify\nreplace: sn\nsn: changed\n");
        std::fs::write(folder.join("change.ldif"), change).expect("written");
        let arguments = format!(
            "-x -H {ENGINE} -D cn=admin,dc={name} -w secret -f {}",
            folder.join("change.ldif").display()
        );
        tool("ldapmodify", &arguments);
    });
}

#[test]
fn the_directory_is_chosen_by_the_entry_and_a_value_is_rewritten() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut site = Site::new();
    let _first = slapd(&site.line.server, folder.path(), "first", 1389);
    let _second = slapd(&site.line.server, folder.path(), "second", 2389);
    let listen = engine("to = \"10.0.2.1:1389\"")
        .replace("engine = {", "engine = { choose = [{ ldap_dn = \"dc=second\", to = \"10.0.2.1:2389\" }],");
    let rules = "\n[function.news]\nkind = \"replace\"\nreplace = [{ find = \"old.second\", with = \"new.second\" }]\n\
                 [[rule]]\nname = \"rewritten\"\nmatch = { port = 2389 }\ncarrier = \"direct\"\nchain = [\"news\"]\n";
    site.start("default = \"direct\"\n", &format!("{listen}{rules}"));
    for (name, port) in [("first", 1389), ("second", 2389)] {
        let direct = search(&site.line.server, &format!("ldap://10.0.2.1:{port}"), name, "");
        assert_eq!(direct.matches("mail: ").count(), 300);
        let through = search(&site.line.client, ENGINE, name, "");
        let expected = direct.replace("old.second", "new.second");
        assert!(through == expected, "{name}: all entries, and nothing else is changed:\n{through}");
        let record = site.record();
        assert_eq!((record.text("reason"), record.address("orig_dst").port()), ("ok", port));
    }
    modify(&site.line.client, folder.path().to_owned(), "second");
    assert_eq!(site.record().text("reason"), "ok");
    let changed = search(&site.line.server, "ldap://10.0.2.1:2389", "second", "(sn=changed)");
    assert!(changed.contains("cn: person 7"), "{changed}");
}

/// A search by a client that says nothing of itself: it binds without a name, and waits for the answer before it searches.
fn search_anonymously(host: &Node, url: &str, name: &str) -> String {
    let arguments = format!("-LLL -x -H {url} -b dc={name} -o nettimeout=50");
    host.run(move || tool("ldapsearch", &arguments))
}

#[test]
fn the_directory_is_chosen_after_an_anonymous_bind() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut site = Site::new();
    let _first = slapd(&site.line.server, folder.path(), "first", 1389);
    let _second = slapd(&site.line.server, folder.path(), "second", 2389);
    let _third = slapd(&site.line.server, folder.path(), "third", 3389);
    let choices = "engine = { choose = [{ ldap_dn = \"dc=second\", to = \"10.0.2.1:2389\" }, { ldap_dn = \"dc=third\", to = \
                   \"10.0.2.1:3389\" }],";
    let listen = engine("to = \"10.0.2.1:1389\"").replace("engine = {", choices);
    let rules = "\n[function.news]\nkind = \"replace\"\nreplace = [{ find = \"old.third\", with = \"new.third\" }]\n\
                 [[rule]]\nname = \"rewritten\"\nmatch = { port = 3389 }\ncarrier = \"direct\"\nchain = [\"news\"]\n";
    site.start("default = \"direct\"\n", &format!("{listen}{rules}"));
    // By default, by the entry, and by the entry with a function behind the engine's own answer.
    for (name, port) in [("first", 1389), ("second", 2389), ("third", 3389)] {
        let direct = search_anonymously(&site.line.server, &format!("ldap://10.0.2.1:{port}"), name);
        assert_eq!(direct.matches("mail: ").count(), 300);
        let through = search_anonymously(&site.line.client, ENGINE, name);
        let expected = direct.replace("old.third", "new.third");
        assert!(through == expected, "{name}: all entries, and nothing else is changed:\n{through}");
        let record = site.record();
        assert_eq!((record.text("reason"), record.address("orig_dst").port()), ("ok", port));
    }
}
