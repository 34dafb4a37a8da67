//! Every example runs to its end, on real namespaces and real programs, with the binary under test: as root, and as
//! an ordinary user in user namespaces. The scripts check what they show and fail where it is not so.

use sidetrack::config::{Config, Problem, SecretFile, Surroundings, System};
use sidetrack_core::overlay::key::SecretKey;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// The examples that have a test below; [`every_example_has_its_test`] holds the list against the folder.
const TESTED: [&str; 32] = [
    "attach",
    "chain-of-containers",
    "chain-of-three",
    "cooperative-cache",
    "engine-function",
    "engine-ldap",
    "engine-tls",
    "filter-and-limit",
    "gateway-names",
    "hospital",
    "http-cache",
    "http3",
    "jail-agent",
    "jail-ci",
    "main-job",
    "metrics",
    "outgoing",
    "overlay",
    "overlay-multicast",
    "overlay-wan",
    "page",
    "reverse-proxy",
    "reverse-through-a-chain",
    "router-tproxy",
    "run-one-command",
    "science-dmz",
    "shunt",
    "socks-with-users",
    "tls-intercept",
    "tunnel",
    "udp",
    "wire",
];

/// The examples that load BPF programs, or start containers, Squid or sshd, which only root may.
const NEED_ROOT: [&str; 10] = [
    "attach",
    "chain-of-containers",
    "cooperative-cache",
    "engine-function",
    "engine-ldap",
    "engine-tls",
    "overlay-wan",
    "science-dmz",
    "shunt",
    "wire",
];

/// Longest time for one example, in seconds; they take two or three.
const LIMIT_S: &str = "300";

/// User id of `nobody`, for the runs as an ordinary user.
const NOBODY: &str = "65534";

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

/// The examples and the binary where any user can read and run them.
fn stage() -> TempDir {
    let folder = tempfile::Builder::new().prefix("examples").tempdir().expect("a temporary folder");
    open_to_all(folder.path());
    copy_tree(&examples(), &folder.path().join("examples"));
    let binary = folder.path().join("sidetrack");
    // By a process of its own: a child that another test is starting would hold a file of ours open for writing, and
    // it cannot be executed then.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_sidetrack")).arg(&binary).status();
    assert!(copied.expect("cp").success(), "the binary can be copied");
    open_to_all(&binary);
    folder
}

fn open_to_all(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("our own file");
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a new folder");
    open_to_all(to);
    for entry in fs::read_dir(from).expect("a folder can be listed") {
        let path = entry.expect("a folder can be listed").path();
        let target = to.join(path.file_name().expect("entries have names"));
        if path.is_dir() {
            copy_tree(&path, &target);
        } else {
            fs::copy(&path, &target).expect("a file can be copied");
            open_to_all(&target);
        }
    }
}

fn run_script(stage: &TempDir, example: &str, user: Option<&str>) -> Output {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", LIMIT_S]);
    if let Some(user) = user {
        command.args(["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"]);
    }
    command.arg("bash").arg(stage.path().join("examples").join(example).join("run.sh"));
    command.env("SIDETRACK", stage.path().join("sidetrack")).env("HOME", stage.path());
    command.env_remove("SIDETRACK_EXAMPLE_ISOLATED").current_dir(stage.path());
    command.output().expect("bash can be started")
}

/// Runs an example as the current user, and also as an unprivileged user if the current one is root.
fn passes(example: &str) {
    let stage = stage();
    let root = fs::metadata(stage.path()).expect("our own folder").uid() == 0;
    let users: &[Option<&str>] = if root { &[None, Some(NOBODY)] } else { &[None] };
    for user in users {
        let output = run_script(&stage, example, *user);
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if text.contains("does not let an ordinary user")
            && std::env::var_os("SIDETRACK_REQUIRE_ALL").is_none_or(|value| value != "1")
        {
            eprintln!(
                "skipped: {example} as user {}: no user namespaces here",
                user.unwrap_or("of the test")
            );
            continue;
        }
        if NEED_ROOT.contains(&example) && (user.is_some() || !root) {
            assert!(
                !output.status.success() && text.contains("needs root"),
                "{example} as user {user:?}:\n{text}"
            );
            continue;
        }
        assert!(output.status.success(), "{example} as user {user:?}: {}\n{text}", output.status);
    }
}

#[test]
fn main_job() {
    passes("main-job");
}

#[test]
fn run_one_command() {
    passes("run-one-command");
}

#[test]
fn reverse_proxy() {
    passes("reverse-proxy");
}

#[test]
fn gateway_names() {
    passes("gateway-names");
}

#[test]
fn router_tproxy() {
    passes("router-tproxy");
}

#[test]
fn chain_of_containers() {
    passes("chain-of-containers");
}

#[test]
fn chain_of_three() {
    passes("chain-of-three");
}

#[test]
fn tunnel() {
    passes("tunnel");
}

#[test]
fn hospital() {
    passes("hospital");
}

#[test]
fn http_cache() {
    passes("http-cache");
}

#[test]
fn overlay() {
    passes("overlay");
}

#[test]
fn overlay_multicast() {
    passes("overlay-multicast");
}

#[test]
fn overlay_wan() {
    passes("overlay-wan");
}

#[test]
fn science_dmz() {
    passes("science-dmz");
}

#[test]
fn shunt() {
    passes("shunt");
}

#[test]
fn socks_with_users() {
    passes("socks-with-users");
}

#[test]
fn filter_and_limit() {
    passes("filter-and-limit");
}

#[test]
fn tls_intercept() {
    passes("tls-intercept");
}

#[test]
fn cooperative_cache() {
    passes("cooperative-cache");
}

#[test]
fn engine_function() {
    passes("engine-function");
}

#[test]
fn engine_ldap() {
    passes("engine-ldap");
}

#[test]
fn engine_tls() {
    passes("engine-tls");
}

#[test]
fn metrics() {
    passes("metrics");
}

#[test]
fn page() {
    passes("page");
}

#[test]
fn outgoing() {
    passes("outgoing");
}

#[test]
fn reverse_through_a_chain() {
    passes("reverse-through-a-chain");
}

/// The packages of Debian 12 that have the commands of `need` in the scripts. What every Debian has comes without a package.
const PACKAGES: [(&str, &str); 36] = [
    ("/usr/sbin/sshd", "openssh-server"),
    ("curl", "curl"),
    ("dig", "bind9-dnsutils"),
    ("ethtool", "ethtool"),
    ("gtlsclient", "ngtcp2-client"),
    ("haproxy", "haproxy"),
    ("ip", "iproute2"),
    ("iperf3", "iperf3"),
    ("jq", "jq"),
    ("ldapsearch", "ldap-utils"),
    ("ldd", ""),
    ("nc", "netcat-openbsd"),
    ("nfcapd", "nfdump"),
    ("nfdump", "nfdump"),
    ("nft", "nftables"),
    ("nginx", "nginx"),
    ("nsenter", ""),
    ("openssl", "openssl"),
    ("ovs-vsctl", "openvswitch-switch"),
    ("ovs-vswitchd", "openvswitch-switch"),
    ("ovsdb-server", "openvswitch-switch"),
    ("ovsdb-tool", "openvswitch-switch"),
    ("podman", "podman"),
    ("prometheus", "prometheus"),
    ("python3", "python3"),
    ("runc", "runc"),
    ("setpriv", ""),
    ("slapadd", "slapd"),
    ("slapd", "slapd"),
    ("socat", "socat"),
    ("squid", "squid"),
    ("ss", "iproute2"),
    ("ssh", "openssh-client"),
    ("ssh-keygen", "openssh-client"),
    ("strip", "binutils"),
    ("unshare", ""),
];

/// Examples that run without root, but show more with it: their page has the command with `sudo`.
const BETTER_AS_ROOT: [&str; 1] = ["hospital"];

#[test]
fn every_page_says_what_it_needs_and_how_to_make_it_yours() {
    let read =
        |file: &str| fs::read_to_string(examples().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let (overview, shared) = (read("README.md"), read("topology.sh"));
    for name in TESTED {
        let (page, script) = (read(&format!("{name}/README.md")), read(&format!("{name}/run.sh")));
        let sudo = if NEED_ROOT.contains(&name) || BETTER_AS_ROOT.contains(&name) { "sudo " } else { "" };
        let root = if sudo.is_empty() { "It needs no root" } else { "It needs root, because " };
        let says = page.lines().find(|line| line.starts_with(root));
        let says = says.unwrap_or_else(|| panic!("{name}: no line '{root}'"));
        let checkout = format!(" s (in a checkout: `{sudo}examples/{name}/run.sh`):");
        let seconds = says.strip_suffix(&*checkout).unwrap_or_else(|| panic!("{name}: {says}: '{checkout}'"));
        let seconds = seconds.rsplit_once("takes about ").unwrap_or_else(|| panic!("{name}: {says}")).1;
        let row = overview.lines().find(|line| line.starts_with(&format!("| [{name}]({name}/README.md) |")));
        let row = row.unwrap_or_else(|| panic!("examples/README.md does not have {name}"));
        assert!(row.ends_with(&format!("| {seconds} s |")), "{row}: its page says {seconds} s");

        let commands =
            page.split_once("```sh\nsudo apt install ").unwrap_or_else(|| panic!("{name}: no commands")).1;
        let (packages, rest) = commands.split_once('\n').expect("a line has an end");
        let run = format!("{sudo}/usr/share/doc/sidetrack/examples/{name}/run.sh\n```\n");
        assert!(rest.starts_with(&run), "{name}: after the packages comes {run}");
        let packages: Vec<&str> = packages.split(' ').collect();
        let needs = shared.lines().chain(script.lines()).filter_map(|line| line.trim().strip_prefix("need "));
        // Records are shown by jq where it is installed.
        let records = script.lines().any(|line| line.trim().starts_with("records ")).then_some("jq");
        for command in needs.flat_map(|line| line.split(' ')).chain(records) {
            let (_, package) = PACKAGES
                .iter()
                .find(|(known, _)| *known == command)
                .unwrap_or_else(|| panic!("{name}: the package of '{command}' is not in PACKAGES"));
            assert!(package.is_empty() || packages.contains(package), "{name}: {command} needs {package}");
        }

        let (before, yours) =
            page.split_once("\n## Make it yours\n").unwrap_or_else(|| panic!("{name}: no end"));
        assert!(before.contains("ou should see"), "{name} does not say what to see");
        assert!(before.contains("\n| file | content |\n"), "{name} has no table of files");
        assert!(yours.contains("](../"), "{name} names no page to read next");
        assert!((3..20).contains(&yours.lines().filter(|line| !line.is_empty()).count()), "{name}: {yours}");
    }
}

#[test]
fn every_example_has_its_test() {
    let mut found: Vec<_> = fs::read_dir(examples())
        .expect("the examples are there")
        .map(|entry| entry.expect("a folder can be listed").path())
        .filter(|path| path.is_dir())
        .map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned())
        .collect();
    found.sort();
    assert_eq!(found, TESTED);
}

/// This machine, with keys for the files that `run.sh` of an example makes, and the folder that has its authority.
struct WithKeys<'f>(System, &'f Path);

impl Surroundings for WithKeys<'_> {
    fn uid_of(&self, name: &str) -> Option<u32> {
        self.0.uid_of(name)
    }

    fn interface_index(&self, name: &str) -> Option<u32> {
        self.0.interface_index(name)
    }

    fn secret_file(&self, path: &str) -> std::io::Result<SecretFile> {
        if !path.starts_with("/run/example/") {
            return self.0.secret_file(path);
        }
        // The table of the example has the public halves of these.
        let nodes = ["left", "relay1", "relay2", "right", "center", "relay", "north", "east", "south"];
        if let Some(node) = (1..).zip(nodes).find(|(_, node)| path == format!("/run/example/{node}.key")) {
            let text = SecretKey([node.0; 32]).to_text();
            return Ok(SecretFile { text, world_readable: false });
        }
        if path.ends_with(".key") {
            return Ok(SecretFile { text: "0f".repeat(32), world_readable: false });
        }
        let text =
            sidetrack::tls::self_signed("end.example", 1).expect("a certificate can be made").identity_pem();
        Ok(SecretFile { text, world_readable: false })
    }

    fn resolve(&self, path: &str) -> PathBuf {
        match path.strip_prefix("/run/example/") {
            Some(rest) => self.1.join(rest),
            None => self.0.resolve(path),
        }
    }
}

#[test]
fn every_example_of_the_repository_is_right() {
    let entries = |folder: &Path| fs::read_dir(folder).expect("a folder can be listed");
    let made = tempfile::tempdir().expect("a temporary folder");
    let mut authority = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    let authority =
        authority.args(["ca", "init", "--name", "example", "--dir"]).arg(made.path().join("ca")).output();
    assert!(authority.expect("the binary").status.success());
    fs::copy(made.path().join("ca/root.pem"), made.path().join("server.pem")).expect("a certificate");
    let mut loaded = 0;
    for folder in entries(&examples()) {
        let folder = folder.expect("a folder can be listed").path();
        for file in folder.is_dir().then(|| entries(&folder)).into_iter().flatten() {
            let path = file.expect("a folder can be listed").path();
            if path.extension().is_some_and(|extension| extension == "toml") {
                let text = fs::read_to_string(&path).expect("a file can be read");
                let config =
                    Config::from_text_in("example", &text, &WithKeys(System::new(&folder), made.path()));
                let config = config.unwrap_or_else(|error| panic!("{}", error.render(false)));
                // `tunnel invite` and `tunnel join` add the listeners of this example.
                let begun = folder.ends_with("tunnel");
                let is_known =
                    |problem: &Problem| begun && problem.message().starts_with("this node has no listener");
                let unknown: Vec<_> = config.warnings.iter().filter(|problem| !is_known(problem)).collect();
                assert!(unknown.is_empty(), "{}: {unknown:?}", path.display());
                loaded += 1;
            }
        }
    }
    assert!(loaded >= 5, "only {loaded} examples found");
}

#[test]
fn the_readme_shows_a_configuration_that_is_right() {
    let readme = fs::read_to_string(examples().join("../README.md")).expect("there is a README");
    let block =
        readme.split_once("```toml\n").and_then(|(_, rest)| rest.split_once("```")).expect("a TOML block").0;
    let config =
        Config::from_text("README.md", block).unwrap_or_else(|error| panic!("{}", error.render(false)));
    assert_eq!(config.warnings, []);
    assert_eq!(config.listeners.len(), 2);
}

#[test]
fn http3() {
    passes("http3");
}

#[test]
fn attach() {
    passes("attach");
}

#[test]
fn jail_agent() {
    passes("jail-agent");
}

#[test]
fn jail_ci() {
    passes("jail-ci");
}

#[test]
fn udp() {
    passes("udp");
}

#[test]
fn wire() {
    passes("wire");
}
