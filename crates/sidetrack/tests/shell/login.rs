//! `sidetrack-shell` as the login shell of a user: su(1) and sshd(8) execute it. `/etc` is a copy that only the test sees.

use sidetrack_testkit::screen::Screen;
use sidetrack_testkit::{eventually, in_namespace};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// The user and its id.
const USER: (&str, u32) = ("stjail", 54_321);

/// Makes the copy of `/etc` with the user in it, and executes what stands behind the first two words.
const ARRANGE: &str = r#"set -e
folder=$1 program=$2; shift 2
mount --make-rprivate /
mount -t tmpfs changes "$folder/changes"
mkdir "$folder/changes/up" "$folder/changes/work"
mount -t overlay copy -o "lowerdir=/etc,upperdir=$folder/changes/up,workdir=$folder/changes/work" /etc
mount -t tmpfs run /run
mkdir -m 755 /run/sshd /etc/sidetrack-shell.d
mount --bind "$program" "$folder/sidetrack-shell"
[ ! -e "$folder/account.toml" ] || install -m 644 "$folder/account.toml" /etc/sidetrack-shell.d/stjail.toml
[ ! -e "$folder/writable" ] || chmod 666 /etc/sidetrack-shell.d/stjail.toml
echo "stjail:x:54321:54321::$folder/home:$folder/sidetrack-shell" >>/etc/passwd
echo "stjail:x:54321:" >>/etc/group
echo "stjail:*:19000:0:99999:7:::" >>/etc/shadow
exec "$@"
"#;

/// A folder with the home of the user, and a server at this port of the host's loopback.
struct Host {
    folder: TempDir,
    port: u16,
}

impl Host {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["changes", "home"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        fs::write(folder.path().join("sidetrack-shell"), "").unwrap();
        let home = folder.path().join("home");
        fs::write(home.join(".bash_profile"), "PS1='inside> '\n").unwrap();
        chown(&home, Some(USER.1), Some(USER.1)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || listener.incoming().flatten().for_each(answer));
        let host = Self { folder, port };
        host.account(&format!("options = ['--allow', 'localhost:{port}']\n"));
        host
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn account(&self, text: &str) {
        fs::write(self.folder.path().join("account.toml"), text).unwrap();
    }

    /// The words that execute this program where the user exists.
    fn words<'a>(&'a self, folder: &'a str, program: &[&'a str]) -> Vec<&'a str> {
        let sidetrack = env!("CARGO_BIN_EXE_sidetrack");
        [&["unshare", "--mount", "sh", "-c", ARRANGE, "sh", folder, sidetrack], program].concat()
    }

    fn command(&self, program: &[&str]) -> Command {
        let folder = self.folder.path().display().to_string();
        let words = self.words(&folder, program);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).env("SIDETRACK_VIA", "socks5://127.0.0.1:1").env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn su(&self, arguments: &[&str]) -> Output {
        self.command(&[&["su"], arguments].concat()).output().unwrap()
    }
}

fn answer(mut client: TcpStream) {
    // A client that goes away is none of ours.
    let _ = client.read(&mut [0; 1024]);
    let _ = client.write_all(b"HTTP/1.0 200 OK\r\n\r\nreached\n");
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn su_gives_a_command_to_the_real_shell_in_the_jail() {
    in_namespace(|| {
        let host = Host::new();
        let port = host.port;
        let script = format!(
            "echo $0 $HOME $SHELL; shopt -q login_shell && echo login; curl -s http://localhost:{port}/; \
             curl -s http://192.0.2.9/ || echo refused; exit 3"
        );
        for (arguments, name, is_login) in [
            (&["-", USER.0, "-c", script.as_str()][..], "-bash", true),
            (&[USER.0, "-c", script.as_str()], "/bin/bash", false),
        ] {
            let ended = host.su(arguments);
            let (out, told) = (text(&ended.stdout), text(&ended.stderr));
            assert_eq!(ended.status.code(), Some(3), "{out} {told}");
            let login = if is_login { "login\n" } else { "" };
            assert_eq!(out, format!("{name} {} /bin/bash\n{login}reached\nrefused\n", host.path("home")));
            assert!(told.contains("sidetrack: curl: 192.0.2.9:80: denied by policy"), "{told}");
        }
    });
}

#[test]
fn without_a_right_file_there_is_no_shell() {
    in_namespace(|| {
        let host = Host::new();
        let refused = |what: &str| {
            let ended = host.su(&["-", USER.0, "-c", "echo inside"]);
            let told = text(&ended.stderr);
            assert_eq!(
                (ended.status.code(), text(&ended.stdout).as_str()),
                (Some(125), ""),
                "{what}: {told}"
            );
            assert!(told.contains("sidetrack") && told.contains(what), "{what}: {told}");
        };
        host.account("options = ['--jali']");
        refused("unexpected argument '--jali'");
        host.account("shell = '/bin/bash'");
        refused("missing field `options`");
        host.account("options = ['--profile', '/nowhere/profile']");
        refused("/nowhere/profile");
        host.account("options = ['--jail']\nshell = '/nowhere/shell'");
        let ended = host.su(&["-", USER.0, "-c", "echo inside"]);
        assert_eq!((ended.status.code(), text(&ended.stdout).as_str()), (Some(127), ""));
        fs::write(host.path("writable"), "").unwrap();
        refused("only root may write it");
        fs::remove_file(host.path("account.toml")).unwrap();
        fs::remove_file(host.path("writable")).unwrap();
        refused("/etc/sidetrack-shell.d/stjail.toml");
    });
}

#[test]
fn su_gives_an_interactive_login_shell() {
    in_namespace(|| {
        let host = Host::new();
        let folder = host.folder.path().display().to_string();
        let mut screen = Screen::start(&host.words(&folder, &["su", "-", USER.0]), |_| {});
        screen.wait_for("inside> ");
        screen.type_and_wait("bind 'set enable-bracketed-paste off'", "inside> ");
        screen.type_and_wait("echo na''me=$0.", "name=-bash.");
        screen.wait_for("inside> ");
        screen.type_and_wait("sh -c 'echo rea''dy; read word; echo got-$word'", "ready");
        screen.press("\x1a");
        screen.wait_for("Stopped");
        screen.wait_for("inside> ");
        screen.press("fg\n");
        screen.type_and_wait("word", "got-word");
        screen.wait_for("inside> ");
        screen.type_and_wait("curl -s http://192.0.2.9/ || echo refu''sed", "refused");
        screen.press("exit 4\n");
        assert_eq!(screen.end().code(), Some(4));
    });
}

#[test]
fn sshd_runs_commands_and_copies_files_through_it() {
    in_namespace(|| {
        let host = Host::new();
        let (key, host_key) = (host.path("key"), host.path("host-key"));
        for file in [&key, &host_key] {
            let made =
                Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", file]).status();
            assert!(made.unwrap().success());
        }
        let keys = format!("AuthorizedKeysFile={key}.pub");
        let options =
            [keys.as_str(), "UsePAM=no", "StrictModes=no", "PidFile=none", "ListenAddress=127.0.0.1"];
        let mut words = vec!["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", "-h", &host_key];
        words.extend(options.iter().flat_map(|option| ["-o", *option]));
        words.extend(["-o", "Subsystem=sftp /usr/lib/openssh/sftp-server"]);
        let mut sshd = host.command(&words).stderr(Stdio::null()).spawn().unwrap();
        eventually("sshd listens", || TcpStream::connect("127.0.0.1:22").is_ok());
        let at = format!("{}@127.0.0.1", USER.0);
        let client = |program: &str, arguments: &[&str]| {
            let options = [
                "StrictHostKeyChecking=no",
                "UserKnownHostsFile=/dev/null",
                "LogLevel=ERROR",
                "BatchMode=yes",
            ];
            let options = options.iter().flat_map(|option| ["-o", *option]);
            let mut command = Command::new(program);
            command.args(["-F", "/dev/null", "-i", &key]).args(options).args(arguments).stdin(Stdio::null());
            command.output().unwrap()
        };
        let script = format!(
            "curl -s http://localhost:{}/; curl -s http://192.0.2.9/ || echo refused; exit 7",
            host.port
        );
        let ended = client("ssh", &[&at, &script]);
        let (out, told) = (text(&ended.stdout), text(&ended.stderr));
        assert_eq!((ended.status.code(), out.as_str()), (Some(7), "reached\nrefused\n"), "{told}");
        assert!(told.contains("denied by policy"), "{told}");
        let file = host.path("file");
        fs::write(&file, "content").unwrap();
        let ended = client("scp", &["-q", &file, &format!("{at}:copied")]);
        assert!(ended.status.success(), "{}", text(&ended.stderr));
        assert_eq!(fs::read_to_string(Path::new(&host.path("home")).join("copied")).unwrap(), "content");
        sshd.kill().unwrap();
        sshd.wait().unwrap();
    });
}
