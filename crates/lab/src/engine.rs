//! The lab's own container engine: podman's service with storage that is removed with this process, and one image,
//! Sidetrack.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::launch;
use crate::peers::chains::RELAY_CONFIG;

/// Options that podman needs in a container or virtual machine, and that work on a host, too.
const SETTINGS: &str = "[containers]\ndefault_ulimits = [\"nofile=16384:16384\", \"nproc=16384:16384\"]\n\
                        [engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\n";

/// Serves until its input ends, which is when this process ends; then removes everything. Containers run on the CPU
/// of the service.
const SERVICE: &str = "trap '' HUP INT TERM\n\
                       taskset --cpu-list \"$2\" podman --root \"$1/st\" --runroot \"$1/run\" system service --time=0 \"unix://$1/engine.sock\" &\n\
                       service=$!\ncat >/dev/null\n\
                       podman --root \"$1/st\" --runroot \"$1/run\" rm --all --force --time 0 >/dev/null\n\
                       kill $service\nwait $service\numount -l \"$1/st/overlay\"\nrm -rf \"$1\"\n";

/// How long the engine may take for its first answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The lab's own container engine.
#[derive(Debug)]
pub struct Engine {
    folder: PathBuf,
    _service: Child,
}

impl Engine {
    /// Returns the engine of this process. Its containers run on this CPU; Sidetrack is its image
    /// `localhost/relay:1`.
    ///
    /// # Errors
    /// What is missing, in words.
    pub fn shared(program: &Path, cpu: usize) -> Result<&'static Self, String> {
        static ENGINE: OnceLock<Result<Engine, String>> = OnceLock::new();
        ENGINE
            .get_or_init(|| Self::start(program, cpu).map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Returns its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.join("engine.sock")
    }

    /// Kills the programs of all containers.
    ///
    /// # Errors
    /// podman refuses.
    pub fn kill_all(&self) -> anyhow::Result<()> {
        run(self.podman().args(["kill", "--all"])).map(drop)
    }

    /// Returns podman with the storage of this engine; add arguments.
    fn podman(&self) -> Command {
        let mut podman = Command::new("podman");
        podman.env("CONTAINERS_CONF", self.settings());
        podman.arg("--root").arg(self.folder.join("st")).arg("--runroot").arg(self.folder.join("run"));
        podman
    }

    fn start(program: &Path, cpu: usize) -> anyhow::Result<Self> {
        for tool in ["podman", "runc", "strip"] {
            anyhow::ensure!(
                launch::find_program(tool).is_some(),
                "{tool} is not installed; bench/peers.sh installs it"
            );
        }
        let folder = tempfile::Builder::new().prefix("sidetrack-lab-engine").tempdir()?.keep();
        fs::write(folder.join("containers.conf"), SETTINGS)?;
        let mut service = Command::new("sh");
        service.args(["-c", SERVICE, "sh"]).arg(&folder).arg(cpu.to_string()).stdin(Stdio::piped());
        service.stdout(Stdio::null()).stderr(Stdio::null());
        service.env("CONTAINERS_CONF", folder.join("containers.conf"));
        // Only this process holds its input open, until it ends.
        let engine = Self { _service: service.spawn()?, folder };
        engine.add_image(program)?;
        let until = Instant::now() + PATIENCE;
        while UnixStream::connect(engine.socket()).is_err() {
            anyhow::ensure!(Instant::now() < until, "podman's service does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(engine)
    }

    fn settings(&self) -> PathBuf {
        self.folder.join("containers.conf")
    }

    fn add_image(&self, program: &Path) -> anyhow::Result<()> {
        let root = self.folder.join("relay");
        for folder in ["tmp", "proc", "dev", "sys", "etc"] {
            fs::create_dir_all(root.join(folder))?;
        }
        run(Command::new("strip").arg("-o").arg(root.join("program")).arg(program))?;
        let libraries = run(Command::new("ldd").arg(program))?;
        for word in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
            let copy = root.join(word.trim_start_matches('/'));
            fs::create_dir_all(copy.parent().unwrap_or(&root))?;
            fs::copy(word, copy)?;
        }
        fs::write(root.join("relay.toml"), RELAY_CONFIG)?;
        let archive = self.folder.join("relay.tar");
        run(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."))?;
        run(self.podman().args(["import", "--quiet"]).arg(&archive).arg("localhost/relay:1"))?;
        fs::remove_dir_all(root)?;
        Ok(fs::remove_file(archive)?)
    }
}

fn run(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    anyhow::ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
