//! The history of an agreement: who changed it and when, going back, and what a check of the chain finds.

use crate::node::Up;
use crate::node::agreement::trial;
use serde_json::Value;
use sidetrack_common::exchange;
use sidetrack_testkit::eventually;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const TOP: &str = "default = \"deny\"\n";
const TABLES: &str = "[policy]\nagreement = \"@/agreement.toml\"\nhistory = \"@/history\"\n[function.count]\nkind = \"count\"\n\
                      [[listen]]\nname = \"in\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"127.0.0.2:80\"\n";

fn up() -> Up {
    Up::start_with(TOP, TABLES, |folder| {
        std::fs::write(folder.join("agreement.toml"), trial(80, "given", "")).expect("written");
    })
}

fn policy(folder: &Path, args: &[&str]) -> Output {
    let admin = folder.join("admin.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("policy").args(args).arg("--admin").arg(admin).output().expect("it runs")
}

/// What a command prints that succeeds.
fn said(folder: &Path, args: &[&str]) -> String {
    let output = policy(folder, args);
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// The error of a command that fails with this exit code.
fn refused(folder: &Path, args: &[&str], code: i32) -> String {
    let output = policy(folder, args);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {output:?}");
    String::from_utf8(output.stderr).expect("text")
}

fn apply(folder: &Path, consent: &str) {
    let file = folder.join("fresh");
    std::fs::write(&file, trial(80, consent, "")).expect("written");
    said(folder, &["apply", file.to_str().expect("a path")]);
}

fn entries(folder: &Path) -> Vec<Value> {
    let audit: Value = serde_json::from_str(&said(folder, &["history", "--json"])).expect("JSON");
    audit["entries"].as_array().expect("a list").clone()
}

fn agreement(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("agreement.toml")).expect("the file")
}

#[test]
fn each_version_names_its_caller_and_an_earlier_one_comes_back() {
    let up = up();
    let folder = up.folder();
    apply(&folder, "withdrawn");
    let wrong = folder.join("wrong");
    std::fs::write(&wrong, "version = 1\nnonsense = 2\n").expect("written");
    refused(&folder, &["apply", wrong.to_str().expect("a path")], 1);
    let text = exchange::ask(
        &folder.join("admin.sock"),
        "PUT",
        "/v1/policy?peer=orchestrator.example",
        &trial(80, "given", "# more"),
    );
    assert_eq!(text.expect("asked").0, 200);
    std::fs::write(folder.join("agreement.toml"), trial(80, "withdrawn", "# by hand")).expect("written");
    eventually("the file is read", || entries(&folder).len() == 5);
    said(&folder, &["rollback", "1", "--dry-run"]);
    assert_eq!(entries(&folder).len(), 5, "a dry run changes nothing");
    said(&folder, &["rollback", "1"]);
    assert_eq!(agreement(&folder), trial(80, "given", ""));
    let entries = entries(&folder);
    let what: Vec<_> = entries
        .iter()
        .map(|entry| (entry["version"].as_u64(), entry["what"].as_str().expect("words")))
        .collect();
    assert_eq!((what[0], what[1]), ((Some(1), "read from its file"), (Some(2), "applied")));
    assert!(what[2].0.is_none() && what[2].1.starts_with("refused: "), "{what:?}");
    assert_eq!(
        what[3..],
        [(Some(3), "applied"), (Some(4), "read from its file"), (Some(5), "rolled back to 1")]
    );
    let me = rustix::process::geteuid().as_raw();
    let by = |at: usize| &entries[at]["by"];
    assert_eq!((by(0)["uid"].as_u64(), by(1)["uid"].as_u64()), (None, Some(me.into())));
    assert_eq!(by(1)["program"].as_str(), Some("sidetrack"));
    assert_eq!(
        (by(3)["peer"].as_str(), by(3)["pid"].as_u64()),
        (Some("orchestrator.example"), Some(std::process::id().into()))
    );
    let shown = said(&folder, &["history"]);
    assert!(
        shown.contains("for orchestrator.example: applied")
            && shown.contains("sidetrack: read from its file"),
        "{shown}"
    );
    let diff = said(&folder, &["diff", "1", "2"]);
    assert!(diff.contains("- consent = \"given\"\n+ consent = \"withdrawn\"\n"), "{diff}");
    assert_eq!(said(&folder, &["diff", "1", "5"]), "the texts are the same\n");
    for unknown in ["0", "9"] {
        let error = refused(&folder, &["rollback", unknown], 1);
        assert!(
            error.contains(&format!("there is no version {unknown} in the history: it has 1 to 5")),
            "{error}"
        );
    }
}

#[test]
fn a_check_names_the_first_broken_link() {
    let up = up();
    let folder = up.folder();
    apply(&folder, "withdrawn");
    apply(&folder, "given");
    let head = said(&folder, &["audit", "head"]);
    let (count, head) = head.trim().split_once(' ').expect("a number and a hash");
    assert_eq!((count, head.len()), ("3", 64));
    let verified = said(&folder, &["audit", "verify", "--head", head]);
    assert!(verified.ends_with("3 entries, 3 versions, every link holds\n"), "{verified}");
    let file = folder.join("history");
    let whole = std::fs::read_to_string(&file).expect("the history");
    let copy: PathBuf = folder.join("copy");
    let check = |text: &str, more: &[&str]| {
        std::fs::write(&copy, text).expect("written");
        let args = [&["audit", "verify", copy.to_str().expect("a path")], more].concat();
        refused(&folder, &args, 1)
    };
    let error = check(&whole.replacen("withdrawn", "withdrawm", 1), &[]);
    assert!(
        error.contains("line 2: its hash does not follow") && error.contains("the 1 entries before it hold"),
        "{error}"
    );
    assert!(check(&whole[..whole.len() - 1], &[]).contains("line 3: the line is cut off"));
    // Without its last line the chain is whole, but the hash that was kept elsewhere is not in it.
    let cut = whole.trim_end().rfind('\n').expect("lines") + 1;
    assert!(check(&whole[..cut], &["--head", head]).contains("no entry has the hash"));
    // A running node knows how far it has written, and takes no further change.
    std::fs::write(&file, &whole[..cut]).expect("cut");
    let error = refused(&folder, &["audit", "verify"], 1);
    assert!(error.contains("ends with entry 2, and this node has written entry 3"), "{error}");
    assert!(refused(&folder, &["rollback", "1"], 1).contains("it was cut or replaced"));
}

#[test]
fn without_a_history_that_is_said() {
    let up = Up::start_with(TOP, &TABLES.replace("history = \"@/history\"\n", ""), |folder| {
        std::fs::write(folder.join("agreement.toml"), trial(80, "given", "")).expect("written");
    });
    for command in [&["history"][..], &["diff", "1", "2"], &["rollback", "1"], &["audit", "verify"]] {
        let error = refused(&up.folder(), command, 1);
        assert!(error.contains("name a file with `history` in [policy]"), "{error}");
    }
}
