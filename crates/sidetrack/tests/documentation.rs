//! Every configuration in the documentation is one that `check` accepts.
//!
//! A ```toml block is a whole configuration, or the HTML comment before it says what it is:
//! `<!-- fragment of BASE -->`: checked together with the base of that name ([`base`]);
//! `<!-- not a configuration: REASON -->`: of another kind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use clap::{Args, Command, FromArgMatches};
use sidetrack::cli::check;
use sidetrack::tls::self_signed;
use sidetrack_core::overlay::key::SecretKey;
use std::path::{Path, PathBuf};

/// One block.
struct Block {
    /// File and line.
    place: String,
    text: String,
    /// The comment before it.
    mark: Option<String>,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn documents() -> Vec<PathBuf> {
    let mut found = vec![root().join("README.md"), root().join("SECURITY.md")];
    let mut folders = vec![root().join("docs"), root().join("examples")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn blocks(path: &Path) -> Vec<Block> {
    let text = std::fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let starts = lines.iter().enumerate().filter(|(_, line)| line.trim() == "```toml");
    starts
        .map(|(start, _)| {
            let block = lines[start + 1..].iter().take_while(|line| line.trim() != "```");
            let before = lines[..start].iter().rev().find(|line| !line.trim().is_empty());
            let mark = before.and_then(|line| line.trim().strip_prefix("<!-- ")?.strip_suffix(" -->"));
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            Block {
                place: format!("{name}:{}", start + 1),
                text: block.map(|line| format!("{line}\n")).collect(),
                mark: mark.map(str::to_owned),
            }
        })
        .collect()
}

/// What a fragment is checked together with: it stands before the fragment.
fn base(name: &str, whole: &[Block]) -> String {
    const TOP: &str = "version = 1\ndefault = \"deny\"\n";
    const HTTP: &str = "[[listen]]\nname = \"base\"\nkind = \"http\"\naddress = \"127.0.0.1:3129\"\n";
    const PORTS: &str = "[[shunt.port]]\nnumber = 1\ninterface = \"lan0\"\n[[shunt.port]]\nnumber = 2\ninterface = \"wan0\"\n";
    match name {
        "any configuration" | "an http listener" => format!("{TOP}{HTTP}"),
        "a configuration with the shunt's ports" => {
            let port = |number: u8, name: &str| {
                format!(
                    "[[shunt.port]]\nnumber = {number}\ninterface = \"{name}0\"\nfast_port = {}\nslow_port = {number}\n",
                    number + 48
                )
            };
            format!("{TOP}{}{}", port(1, "lan"), port(2, "wan"))
        }
        "a configuration with a shunt" => format!("{TOP}[shunt]\nforwarding = \"bridged\"\n{PORTS}"),
        "a configuration with the tunnel lucas" => format!(
            "{TOP}[[tunnel]]\nname = \"lucas\"\naddress = \"lucas.example:4433\"\nidentity = \"near.example.pem\"\n\
             pins = [\"sha256//47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\"]\n{HTTP}"
        ),
        "a configuration with the functions gate and slow" => format!(
            "{TOP}[function.gate]\nkind = \"count\"\n[function.slow]\nkind = \"limit\"\nbytes_per_second = 1000\n{HTTP}"
        ),
        "a configuration with the overlay node baltimore" => format!(
            "{TOP}[overlay]\nname = \"chicago\"\nkey_file = \"/etc/sidetrack/node.key\"\n[overlay.node.chicago]\nkey = \"{}\"\n\
             [overlay.node.baltimore]\nkey = \"ed25519:KMsvCKWgDjlv1GyKmJznRdVAQzbTizDKH2P/qTScf2k=\"\naddress = \"192.0.2.9:8100\"\n",
            "ed25519:Mg6ynvWwoPDyqRMCO4yx8IZUnJVZtCDW2+7u8TBd4bw="
        ),
        "the configuration above" => whole.last().expect("a whole configuration above").text.clone(),
        other => panic!("no base '{other}'"),
    }
}

/// A folder with the files that the documents name, relative or below /etc/sidetrack.
fn placeholders() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["near.example", "far.example", "www.example"] {
        std::fs::write(at(&format!("{name}.pem")), self_signed(name, 1).unwrap().identity_pem()).unwrap();
    }
    for name in ["certs", "lists"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    let mut authority = std::process::Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    let made =
        authority.args(["ca", "init", "--name", "corp.example", "--dir"]).arg(at("ca")).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    for name in ["trackers", "own"] {
        std::fs::write(at("lists").join(format!("{name}.txt")), "tracker.example\n").unwrap();
    }
    std::fs::copy(root().join("examples/hospital/control/agreement.toml"), at("agreement.toml")).unwrap();
    std::fs::write(at("node.key"), SecretKey([7; 32]).to_text()).unwrap();
    std::fs::write(at("ann.password"), "a secret\n").unwrap();
    folder
}

/// What is wrong with a configuration; empty if `check` takes it.
fn refused(text: &str) -> String {
    let folder = placeholders();
    let file = folder.path().join("sidetrack.toml");
    std::fs::write(&file, text.replace("/etc/sidetrack/", "")).unwrap();
    let command = check::CheckArgs::augment_args(Command::new("check"));
    let matches = command.try_get_matches_from(["check".as_ref(), file.as_os_str()]).unwrap();
    let args = check::CheckArgs::from_arg_matches(&matches).unwrap();
    let printed = check::report(&args, false);
    if printed.code == 0 { String::new() } else { format!("{}{}", printed.out, printed.err) }
}

#[test]
fn every_configuration_in_the_documentation_is_right() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for document in documents() {
        let mut whole: Vec<Block> = Vec::new();
        for block in blocks(&document) {
            let said = match block.mark.as_deref() {
                Some(mark) if mark.starts_with("not a configuration: ") => continue,
                Some(mark) if mark.starts_with("fragment of ") => {
                    refused(&(base(&mark["fragment of ".len()..], &whole) + &block.text))
                }
                _ => refused(&block.text),
            };
            count += 1;
            if !said.is_empty() {
                wrong.push(format!("{}: {said}", block.place));
            } else if !block.mark.as_deref().is_some_and(|mark| mark.starts_with("fragment of ")) {
                whole.push(block);
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count >= 15, "only {count} blocks found");
}
