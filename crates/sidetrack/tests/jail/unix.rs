//! `--unix`: which unix sockets each word opens.

use super::{run, text};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Tries each kind, and prints those that work.
const TRY: &str = "import os, socket, sys, tempfile\n\
    kind, path, abstract = socket.AF_UNIX, sys.argv[1], '\\0' + sys.argv[2]\n\
    def own(name):\n\
    \x20 server, client = socket.socket(kind), socket.socket(kind)\n\
    \x20 server.bind(name); server.listen(); client.connect(name)\n\
    def to(name): socket.socket(kind).connect(name)\n\
    os.chdir(tempfile.mkdtemp())\n\
    for what, how in (('own-path', lambda: own('x')), ('own-abstract', lambda: own('\\0x')), ('pair', socket.socketpair),\n\
    \x20\x20 ('host-path', lambda: to(path)), ('host-abstract', lambda: to(abstract))):\n\
    \x20 try: how(); print(what)\n\
    \x20 except OSError: pass\n\
    if os.path.exists('x'): os.remove('x')\n\
    os.rmdir(os.getcwd())\n";

#[test]
fn each_word_opens_what_the_table_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket").display().to_string();
    let _with_path = UnixListener::bind(&path).unwrap();
    let name = format!("sidetrack-unix-{}", std::process::id());
    let _abstract = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let program = format!("import sys; sys.argv = ['', '{path}', '{name}']\n{TRY}");
    let works = |options: &[&str]| {
        let ended = run(options, &program);
        assert_eq!(ended.status.code(), Some(0), "{options:?}: {}", text(&ended.stderr));
        text(&ended.stdout).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let all = ["own-path", "own-abstract", "pair", "host-path"];
    assert_eq!(works(&[]), all, "not confined: its network alone closes abstract ones of the host");
    assert_eq!(works(&["--jail", "--unix", "all"]), all);
    assert_eq!(works(&["--jail"]), all[..3]);
    assert_eq!(works(&["--jail", "--unix", "own"]), all[..3]);
    assert_eq!(works(&["--jail", "--unix", &path]), all);
    assert_eq!(works(&["--jail", "--unix", "abstract"]), ["own-abstract", "pair"]);
    assert_eq!(works(&["--jail", "--unix", "deny"]), ["pair"]);
    // Without a jail around, and where a command is root in the host's network, no word could hold.
    for options in [&["--unix", "deny"][..], &["--jail", "--unix", "own", "--mode", "cgroup"]] {
        let ended = run(options, "");
        assert_eq!(ended.status.code(), Some(125), "{options:?}");
        assert!(text(&ended.stderr).contains("jail") || text(&ended.stderr).contains("--mode cgroup"));
    }
}
