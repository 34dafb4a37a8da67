//! The file of the agreement in a folder of root: `policy apply` replaces it as a whole, whatever is killed meanwhile.

use crate::node::agreement::trial;
use crate::node::{Dice, Up, send};
use rustix::process::Signal;
use sidetrack_common::exchange;
use sidetrack_sys::process;
use sidetrack_testkit::in_namespace;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const TOP: &str = "default = \"direct\"\nuser = \"nobody\"\n";
const NOBODY: u32 = 65_534;

/// Rounds of killing.
const ROUNDS: u32 = 12;

/// The tables of a configuration that names this file.
fn tables(agreement: &str) -> String {
    format!(
        "[policy]\nagreement = \"@/{agreement}\"\n[function.count]\nkind = \"count\"\n\
         [[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:1080\"\n"
    )
}

/// A node whose agreement has this text.
fn up(text: &str) -> Up {
    Up::start_with(TOP, &tables("agreement.toml"), |folder| {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("mode");
        std::fs::write(file(folder), text).expect("written");
        std::fs::set_permissions(file(folder), std::fs::Permissions::from_mode(0o640)).expect("mode");
    })
}

fn file(folder: &Path) -> PathBuf {
    folder.join("agreement.toml")
}

/// An agreement of some 300 kB, or of half of that.
fn text(consent: &str, lines: usize) -> String {
    let head = trial(80, consent, "requires = \"counted\"\n");
    format!("{head}{}", format!("# {consent} {}\n", "x".repeat(90)).repeat(lines))
}

/// `PUT /v1/policy`; the body of an answer without an error, or what went wrong.
fn put(folder: &Path, text: &str) -> Result<String, String> {
    let answer = exchange::ask(&folder.join("admin.sock"), "PUT", "/v1/policy", text);
    match answer.map_err(|error| error.to_string())? {
        (200, body) => Ok(body),
        (_, body) => Err(body),
    }
}

/// The process that writes the file.
fn writer(up: &Up) -> u32 {
    let children = process::children(up.pid());
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    children.into_iter().find(|pid| name(pid).trim() == "sidetrack-write").expect("the process")
}

#[test]
fn a_reader_sees_one_agreement_or_the_other_and_nothing_in_between() {
    in_namespace(|| {
        let texts = [text("given", 3000), text("withdrawn", 1500)];
        let up = up(&texts[0]);
        let file = file(&up.folder());
        // Held open: another file does not get its number.
        let first = std::fs::File::open(&file).expect("the file");
        let before = first.metadata().expect("the file");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !done.load(Relaxed) {
                    let seen = std::fs::read_to_string(&file).expect("the file is always there");
                    assert!(texts.contains(&seen), "{} bytes", seen.len());
                }
            });
            for turn in 0..20 {
                put(&up.folder(), &texts[(turn + 1) % 2]).expect("taken");
                assert_eq!(std::fs::read_to_string(&file).expect("the file"), texts[(turn + 1) % 2]);
            }
            done.store(true, Relaxed);
            reader.join().expect("one or the other");
        });
        let after = std::fs::metadata(&file).expect("the file");
        assert_ne!(before.ino(), after.ino(), "another file in its place");
        assert_eq!((after.uid(), after.mode() & 0o777), (NOBODY, 0o640));
        assert!(!up.folder().join("agreement.toml.new").exists());
        let writer = writer(&up);
        let status = std::fs::read_to_string(format!("/proc/{writer}/status")).expect("it runs");
        let line = |field: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a line");
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line("Uid:"), [NOBODY; 4].map(|id| id.to_string()).join(" "));
        // CAP_DAC_OVERRIDE.
        assert_eq!([line("CapPrm:"), line("CapBnd:")], ["0000000000000002", "0000000000000002"]);
        assert_eq!([line("NoNewPrivs:"), line("Seccomp:")], ["1", "2"]);
        assert!(up.stop().0.success());
    });
}

#[test]
fn a_reload_names_another_agreement_and_policy_apply_replaces_it() {
    in_namespace(|| {
        let mut up = up(&text("given", 1));
        let folder = up.folder();
        let place = |name: &str, owner| {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(&path, text("given", 1)).expect("written");
            std::os::unix::fs::chown(&path, Some(owner), None).expect("given");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).expect("mode");
            path
        };
        let [second, of_root, deeper] =
            [("second.toml", NOBODY), ("root.toml", 0), ("deeper/third.toml", NOBODY)]
                .map(|(name, owner)| place(name, owner));
        let withdrawn = text("withdrawn", 1);
        // In the same folder, which belongs to root: it is replaced without a restart.
        up.reload(TOP, &tables("second.toml"));
        put(&folder, &withdrawn).expect("taken");
        assert_eq!(std::fs::read_to_string(&second).expect("the file"), withdrawn);
        assert_eq!(
            std::fs::read_to_string(file(&folder)).expect("the file"),
            text("given", 1),
            "another file"
        );
        let log = up.log_so_far();
        assert!(!log.contains("policy apply"), "{log}");
        // A file that the user may not write stays as it is.
        up.reload(TOP, &tables("root.toml"));
        let error = put(&folder, &withdrawn).expect_err("it belongs to root");
        assert!(error.contains("Permission denied"), "{error}");
        assert_eq!(std::fs::read_to_string(&of_root).expect("the file"), text("given", 1));
        // In another folder: the reload says that it needs a restart.
        up.reload(TOP, &tables("deeper/third.toml"));
        up.log_line("the restart", |line| line.contains("`sidetrack policy apply` may not replace it"));
        let error = put(&folder, &withdrawn).expect_err("another folder");
        assert!(error.contains("cannot write"), "{error}");
        assert_eq!(std::fs::read_to_string(&deeper).expect("the file"), text("given", 1));
        assert!(up.stop().0.success());
    });
}

#[test]
fn a_kill_leaves_the_old_agreement_or_the_new_one() {
    in_namespace(|| {
        let texts = [text("given", 3000), text("withdrawn", 1500)];
        let mut dice = Dice(25);
        for round in 0..ROUNDS {
            let mut up = up(&texts[0]);
            let (folder, file) = (up.folder(), file(&up.folder()));
            let (main, writer) = (up.pid(), writer(&up));
            let after = Duration::from_micros(dice.below(4000) as u64);
            let victims = [vec![main], vec![writer], vec![writer, main]][round as usize % 3].clone();
            let applied = std::thread::scope(|scope| {
                let applied = scope.spawn(|| put(&folder, &texts[1]));
                let begun = Instant::now();
                while begun.elapsed() < after {
                    std::hint::spin_loop();
                }
                victims.iter().for_each(|pid| send(*pid, Signal::KILL));
                applied.join().expect("no panic")
            });
            if victims.contains(&main) {
                // Until its last process is gone.
                up.gone();
            }
            let seen = std::fs::read_to_string(&file).expect("the file is always there");
            assert!(texts.contains(&seen), "round {round}: {} bytes", seen.len());
            if applied.is_ok() {
                assert_eq!(seen, texts[1], "round {round}: it was said to be done");
            }
            if !victims.contains(&main) {
                let error = put(&folder, &texts[1]).expect_err("nothing writes it");
                assert!(error.contains("cannot write"), "{error}");
                assert!(up.stop().0.success());
            }
        }
    });
}
