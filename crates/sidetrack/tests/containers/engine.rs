//! A container engine of our own: podman's service over storage in a folder that goes with this process, and the images
//! that the tests use.

use sidetrack_testkit::eventually;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

/// Where things lie that podman needs to work in a container or virtual machine as well as on a host.
const SETTINGS: &str = "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n\
                        [engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\n";

/// Serves until its input ends, which is when this process does, however that comes; then takes everything away.
const SERVICE: &str = "podman --root \"$1/st\" --runroot \"$1/run\" system service --time=0 \"unix://$1/engine.sock\" &\n\
                       service=$!\ncat >/dev/null\n\
                       podman --root \"$1/st\" --runroot \"$1/run\" rm --all --force --time 0 >/dev/null\n\
                       kill $service\nwait $service\numount -l \"$1/st/overlay\"\nrm -rf \"$1\"\n";

/// A container engine with a folder of its own.
pub(crate) struct Engine {
    folder: PathBuf,
    _service: Child,
}

/// The engine of this process, with its images.
pub(crate) fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::start(true))
}

impl Engine {
    /// One for a test that leaves containers behind, which a start of any node of the same engine would remove.
    pub(crate) fn alone() -> Self {
        Self::start(false)
    }

    fn start(all: bool) -> Self {
        // Debian has some of them where an ordinary PATH does not look.
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        for tool in ["podman", "runc", "strip", "ldd", "microsocks", "haproxy"] {
            let found = Command::new("sh")
                .args(["-c", "command -v \"$0\"", tool])
                .env("PATH", &path)
                .output()
                .expect("sh");
            assert!(found.status.success(), "{tool} is missing: make deps-test installs it");
        }
        let folder = tempfile::Builder::new().prefix("sidetrack-engine").tempdir().expect("a folder").keep();
        fs::write(folder.join("containers.conf"), SETTINGS).expect("a file");
        let mut service = Command::new("sh");
        service.args(["-c", SERVICE, "sh"]).arg(&folder).stdin(Stdio::piped());
        service.stdout(Stdio::null()).stderr(Stdio::null());
        service.env("CONTAINERS_CONF", folder.join("containers.conf"));
        // Its input is held open by this process alone, until its end.
        let service = service.spawn().expect("sh");
        let engine = Self { folder, _service: service };
        engine.add_images(all);
        eventually("the engine answers", || UnixStream::connect(engine.socket()).is_ok());
        engine
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("engine.sock")
    }

    fn settings(&self) -> PathBuf {
        self.folder.join("containers.conf")
    }

    /// podman over the same storage.
    pub(crate) fn podman(&self, arguments: &[&str]) -> Output {
        let mut podman = Command::new("podman");
        podman.env("CONTAINERS_CONF", self.settings());
        podman.arg("--root").arg(self.folder.join("st")).arg("--runroot").arg(self.folder.join("run"));
        podman.args(arguments).stdin(Stdio::null()).output().expect("podman")
    }

    /// Names of the containers that are there, running or not, whose name holds `part`.
    pub(crate) fn containers(&self, part: &str) -> Vec<String> {
        let list = self.podman(&["ps", "--all", "--format", "{{.Names}}"]);
        let names = String::from_utf8_lossy(&list.stdout).into_owned();
        names.lines().filter(|name| name.contains(part)).map(str::to_owned).collect()
    }

    fn add_images(&self, all: bool) {
        let own = std::env::current_exe().expect("this program");
        self.add_image("function", &own, &[]);
        if !all {
            return;
        }
        self.add_image("microsocks", Path::new("/usr/bin/microsocks"), &[]);
        self.add_image("haproxy", Path::new("/usr/sbin/haproxy"), &[("haproxy.cfg", HAPROXY)]);
    }

    /// An image of one program as `/program`, the libraries that it needs, and files beside it.
    fn add_image(&self, name: &str, program: &Path, files: &[(&str, &str)]) {
        let root = self.folder.join(name);
        for folder in ["tmp", "proc", "dev", "sys", "etc"] {
            fs::create_dir_all(root.join(folder)).expect("a folder");
        }
        let strip = Command::new("strip").arg("-o").arg(root.join("program")).arg(program).status();
        assert!(strip.expect("strip").success());
        let libraries = Command::new("ldd").arg(program).output().expect("ldd");
        for word in
            String::from_utf8_lossy(&libraries.stdout).split_whitespace().filter(|word| word.starts_with('/'))
        {
            let copy = root.join(word.trim_start_matches('/'));
            fs::create_dir_all(copy.parent().expect("below the root")).expect("a folder");
            fs::copy(word, copy).expect("a library");
        }
        for (file, text) in files {
            fs::write(root.join(file), text).expect("a file");
        }
        let archive = self.folder.join(format!("{name}.tar"));
        let packed = Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg(".").status();
        assert!(packed.expect("tar").success());
        let imported = self.podman(&[
            "import",
            "--quiet",
            &archive.display().to_string(),
            &format!("localhost/{name}:1"),
        ]);
        assert!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
        let _ = fs::remove_dir_all(root);
        let _ = fs::remove_file(archive);
    }
}

/// A relay that trusts the header before each connection and dials the address in it.
const HAPROXY: &str = "defaults\n    mode tcp\n    timeout connect 5s\n    timeout client 60s\n    timeout server 60s\n\
                       listen relay\n    bind 127.0.0.1:1080 accept-proxy\n    server there 0.0.0.0:0\n";

/// An unused path for a second engine's socket, at which no process listens.
pub(crate) fn nowhere() -> PathBuf {
    engine().folder.join("nobody.sock")
}
