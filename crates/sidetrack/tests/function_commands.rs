//! `fn test`, `chain try` and `graph`.

use clap::Parser;
use sidetrack::cli::functions::{TestArgs, TryArgs, test_function, try_chain};
use sidetrack::cli::graph::{GraphArgs, draw};
use std::path::Path;

#[derive(Parser)]
struct Arguments<T: clap::Args> {
    #[command(flatten)]
    args: T,
}

const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n";

/// A folder with a configuration of some functions and a rule `all`.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("key"), KEY).expect("a file");
    let text = "version = 1\ndefault = 'deny'\n[[listen]]\nkind = 'socks'\naddress = '127.0.0.1:1080'\n\
                [function.gate]\nkind = 'filter'\ndeny_words = 'secret'\ndeny_hosts = 'refused.example'\n\
                [function.scrub]\nkind = 'replace'\nreplace = [{ find = 'dull', with = 'fine' }]\n\
                [function.slow]\nkind = 'limit'\nbytes_per_second = 100000\nburst_bytes = 1000\n\
                [function.seal]\nkind = 'encrypt'\nkey_file = 'key'\n[function.open]\nkind = 'decrypt'\nkey_file = 'key'\n\
                [[rule]]\nname = 'all'\ncarrier = 'direct'\nchain = ['scrub', 'slow', 'seal', 'open']\n";
    std::fs::write(folder.path().join("sidetrack.toml"), text).expect("a file");
    folder
}

fn args<T: clap::Args>(folder: &Path, words: &[&str]) -> T {
    let config = folder.join("sidetrack.toml").display().to_string();
    let words = ["x"].iter().chain(words).map(ToString::to_string).chain(["--config".into(), config]);
    Arguments::<T>::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).args
}

/// Output, messages and exit code of `fn test`.
fn test(folder: &Path, words: &[&str], input: &[u8]) -> (Vec<u8>, String, u8) {
    let mut out = Vec::new();
    let args = args::<TestArgs>(folder, words);
    let printed = test_function(&args, &mut &*input, &mut out, false).expect("memory does not fail");
    (out, printed.err, printed.code)
}

#[test]
fn a_function_is_tried_on_bytes_at_hand() {
    let folder = folder();
    let folder = folder.path();
    assert_eq!(test(folder, &["scrub"], b"a dull day"), (b"a fine day".to_vec(), String::new(), 0));
    assert_eq!(test(folder, &["slow"], &[7; 50_000]), (vec![7; 50_000], String::new(), 0));
    let (out, err, code) = test(folder, &["gate"], b"the secret");
    assert_eq!((out.len(), code), (0, 1));
    assert_eq!(err, "function_refused: function 'gate': the client said \"secret\"\n");
    let (_, err, code) = test(folder, &["gate", "--host", "refused.example"], b"");
    assert!(code == 1 && err.contains("the host refused.example is refused"), "{err}");
    let (sealed, _, code) = test(folder, &["seal"], b"hello");
    assert_eq!((sealed.len(), code), (32 + 3 + 5 + 16 + 3 + 16, 0));
    assert_eq!(test(folder, &["open"], &sealed), (b"hello".to_vec(), String::new(), 0));
    assert_eq!(test(folder, &["open"], &sealed[..40]).2, 1);
    let (_, err, code) = test(folder, &["open", "--from-server"], b"220 ready");
    assert!(code == 1 && err.contains("waits for bytes of the other side"), "{err}");
    let (_, err, code) = test(folder, &["nothing"], b"");
    assert!(code == 2 && err.contains("there are: gate, open, scrub, seal, slow"), "{err}");
}

#[test]
fn a_chain_is_tried_function_by_function() {
    let folder = folder();
    let args = args::<TryArgs>(folder.path(), &["all", "--bytes", "100000"]);
    let printed = try_chain(&args, false).expect("memory does not fail");
    assert_eq!((printed.code, printed.err.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = printed.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1][..3], ["scrub", "replace", "100000"]);
    assert_eq!(lines[2][..3], ["slow", "limit", "100000"]);
    let waits: u64 = lines[2][4].parse().expect("a number");
    assert!((980..=1000).contains(&waits), "99,000 bytes at 100,000 a second: {waits}");
    assert_eq!(lines[3][..2], ["seal", "encrypt"]);
    assert_eq!(lines[4][..3], ["open", "decrypt", "100000"]);
    let args = self::args::<TryArgs>(folder.path(), &["nothing"]);
    assert_eq!(try_chain(&args, false).expect("memory does not fail").code, 2);
}

#[test]
fn the_graph_of_a_configuration_is_drawn() {
    let folder = folder();
    let folder = folder.path();
    let file = folder.join("sidetrack.toml");
    let more = "[function.by-kind]\nkind = 'branch'\narms = [{ name = 'web', match = { host = '*.example' }, chain = ['scrub', \
                'slow'] }, { name = 'mail', prefix = ['EHLO', 'HELO'], chain = ['gate'] }]\n\
                [[rule]]\nname = 'kinds'\nmatch = { port = 443 }\ncarrier = 'socks5://gw:1080'\nchain = ['by-kind', 'slow']\n\
                [[rule]]\nname = 'plain'\nmatch = { port = 22 }\ncarrier = 'direct'\n";
    let text = std::fs::read_to_string(&file).expect("a file");
    // The rules of `more` come first: the rule `all` takes every flow.
    let text = text.replace("[[rule]]", &format!("{more}[[rule]]"));
    std::fs::write(&file, text).expect("a file");
    let drawn = |words: &[&str]| draw(&args::<GraphArgs>(folder, words), false);
    let kinds = "rule kinds: port 443\n  by-kind (branch)\n  | web: host *.example\n      scrub (replace)\n      slow (limit)\n\
                 \u{20} | mail: begins with \"EHLO\" or \"HELO\"\n      gate (filter)\n  | otherwise: straight on\n  slow (limit)\n\
                 \u{20} => socks5://gw:1080\n";
    assert_eq!(drawn(&["--rule", "kinds"]).out, kinds);
    let all = drawn(&[]);
    assert!(all.code == 0 && all.out.contains(kinds) && all.out.contains("rule all: all flows\n"), "{all:?}");
    assert!(!all.out.contains("rule plain"), "it has no chain");
    let dot = drawn(&["--format", "dot"]).out;
    assert!(dot.starts_with("digraph sidetrack {") && dot.matches("shape=diamond").count() == 1, "{dot}");
    assert!(drawn(&["--format", "mermaid"]).out.contains("-->|\"web: host *.example\"|"));
    let svg = drawn(&["--format", "svg"]).out;
    assert!(svg.starts_with("<svg ") && svg.contains(">web: host *.example</text>"), "{svg}");
    let unknown = drawn(&["--rule", "nothing"]);
    assert!(unknown.code == 2 && unknown.err.contains("there is no rule 'nothing'"), "{unknown:?}");
    // The branch alone, on bytes.
    assert_eq!(test(folder, &["by-kind", "--host", "a.example"], b"a dull day").0, b"a fine day");
    assert_eq!(test(folder, &["by-kind"], b"a dull day").0, b"a dull day");
    let (_, err, _) = test(folder, &["by-kind"], b"EHLO secret");
    assert_eq!(err, "function_refused: function 'gate': the client said \"secret\"\n");
}
