//! The starter: a small process that has the rights of the start, and starts the process that replaces this one.
//!
//! The data plane gives its rights up, so it could not start a process that has them. The starter takes orders about programs from
//! root and from the user that started the node, over a socket of its own, and from no process that reads peers' bytes. It is a
//! child of the node: what it starts is in the same control group, and has the same sandbox.
//!
//! ```text
//! IDLE --Listen--> LISTENING --a command with a program--> STARTED --Kill, Done, or the process ends--> LISTENING
//! any --Leave, or the node ends--> over (without Leave it removes the file)
//! ```

use super::parts::{Order, Said, Wanted, Wish};
use crate::wire;
use anyhow::Context;
use sidetrack_sys::sync::lock;
use sidetrack_sys::{confine, probe, process, scm};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Mutex;
use std::time::Duration;

/// The argument that makes the program a starter.
const ARGUMENT: &str = "starter";

/// The name of this process in `ps` and `top`.
const NAME: &std::ffi::CStr = c"sidetrack-start";

/// How often it looks after the process that it has started.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long a command may take to say what it wants.
const ASKED_WITHIN: Duration = Duration::from_secs(5);

/// The socket for upgrades beside an admin socket: `admin.sock.upgrade`.
pub(in super::super) fn socket_beside(admin: &Path) -> PathBuf {
    let mut path = admin.as_os_str().to_owned();
    path.push(".upgrade");
    path.into()
}

/// The node's end of the connection to its starter.
pub(crate) struct Starter {
    end: OwnedFd,
    child: Mutex<Child>,
}

impl Starter {
    /// Starts the process, which does nothing yet.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(crate) fn start() -> io::Result<Self> {
        let (ours, theirs) = scm::pair()?;
        let child = process::respawn_with_output(ARGUMENT, theirs)?;
        Ok(Self { end: ours, child: Mutex::new(child) })
    }

    /// Lets it listen on this socket, which has this path, for upgrades of a node with this configuration.
    ///
    /// # Errors
    /// It has ended.
    pub(crate) fn listen(&self, socket: &OwnedFd, path: &Path, config: &Path) -> io::Result<()> {
        let config = std::path::absolute(config)?;
        self.order(&Order::Listen { config, path: path.to_owned() }, Some(socket))
    }

    pub(super) fn order(&self, order: &Order, socket: Option<&OwnedFd>) -> io::Result<()> {
        let fds: Vec<_> = socket.map(AsFd::as_fd).into_iter().collect();
        wire::send(&self.end, order, &fds)
    }

    /// What it wants next; `None`: it has ended. Blocks.
    pub(super) fn next(&self) -> io::Result<Option<(Wanted, Vec<OwnedFd>)>> {
        wire::receive(&self.end)
    }

    /// The connection, readable when [`Starter::next`] would not block.
    pub(super) const fn end(&self) -> &OwnedFd {
        &self.end
    }

    /// Ends it, and waits for its end.
    pub(crate) fn finish(&self) {
        // It may have ended before us.
        let _ = scm::close(&self.end);
        let _ = lock(&self.child).wait();
    }
}

/// What the starter listens on.
struct Listening {
    socket: OwnedFd,
    path: PathBuf,
    inode: u64,
    config: PathBuf,
}

/// Runs as the starter, connected by standard input.
///
/// # Errors
/// The connection to the node fails in another way than by its end.
pub(crate) fn serve(end: OwnedFd) -> anyhow::Result<()> {
    process::ignore_stop_signals();
    // Errors only affect the name in `ps`, and what a process of the same user may see of this one.
    let _ = process::set_name(NAME);
    let _ = confine::close_memory();
    let Some((Order::Listen { config, path }, fds)) = wire::receive::<Order>(&end)? else { return Ok(()) };
    let socket = fds.into_iter().next().context("no socket came along")?;
    let inode = std::fs::symlink_metadata(&path).map_or(0, |metadata| metadata.ino());
    let listening = Listening { socket, path, inode, config };
    let mut child = None;
    let served = listening.serve(&end, &mut child);
    // A process that was started and still runs goes on with the socket, if the node was killed.
    let goes_on = child.is_some_and(|mut child| child.try_wait().is_ok_and(|ended| ended.is_none()));
    if !matches!(served, Ok(true)) && !goes_on {
        let is_ours =
            std::fs::symlink_metadata(&listening.path).is_ok_and(|seen| seen.ino() == listening.inode);
        if is_ours {
            let _ = std::fs::remove_file(&listening.path);
            // Only an empty folder goes, and only where we may remove it: that of the default sockets.
            if let Some(folder) =
                listening.path.parent().filter(|folder| *folder == crate::admin::directory())
            {
                let _ = std::fs::remove_dir(folder);
            }
        }
    }
    served.map(drop)
}

impl Listening {
    /// Serves until the node ends. Returns whether another process listens from then on.
    fn serve(&self, end: &OwnedFd, child: &mut Option<Child>) -> anyhow::Result<bool> {
        // Processes that are over for us.
        let mut left: Vec<Child> = Vec::new();
        loop {
            left.retain_mut(|child| child.try_wait().is_ok_and(|ended| ended.is_none()));
            if child.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|ended| ended.is_some())) {
                *child = None;
            }
            let [from_node, from_command] = scm::wait_for_one([end, &self.socket], LOOK_EVERY)?;
            if from_node {
                match wire::receive::<Order>(end)? {
                    Some((Order::Kill, _)) => {
                        if let Some(mut child) = child.take() {
                            // It may have ended.
                            let _ = child.kill();
                            let _ = child.wait();
                        }
                    }
                    Some((Order::Done, _)) => left.extend(child.take()),
                    Some((Order::Leave, _)) => return Ok(true),
                    Some((Order::Listen { .. }, _)) => {}
                    None => return Ok(false),
                }
            } else if from_command {
                let (command, peer) = scm::accept(&self.socket)?;
                if let Err(error) = self.hear(end, &command, peer, child) {
                    // The command may be gone.
                    let _ = wire::send(&command, &Said::Failed(format!("{error:#}")), &[]);
                }
            }
        }
    }

    fn hear(
        &self,
        end: &OwnedFd,
        command: &OwnedFd,
        peer: scm::Peer,
        child: &mut Option<Child>,
    ) -> anyhow::Result<()> {
        let own = probe::uid();
        anyhow::ensure!(peer.uid == 0 || peer.uid == own, "only root and user {own} may upgrade this node");
        // It has the same user under systemd, and must not start programs with rights that it gave up.
        anyhow::ensure!(peer.pid != process::parent(), "a node does not upgrade itself");
        anyhow::ensure!(scm::wait(command, Some(ASKED_WITHIN))?, "nothing was asked for");
        let Some((wish, fds)) = wire::receive::<Wish>(command)? else { return Ok(()) };
        match wish {
            Wish::Confirm => wire::send(end, &Wanted::Confirm, &[command.as_fd()])?,
            Wish::Upgrade { confirm_ms } => {
                anyhow::ensure!(child.is_none(), "another upgrade is under way");
                let program = fds.into_iter().next().context("no program came along")?;
                let (ours, theirs) = scm::pair()?;
                let mut arguments: Vec<OsString> =
                    ["up", "--takes-over", "--config"].map(OsString::from).into();
                arguments.push(self.config.clone().into());
                // The watchdog's limit holds for the new process, too.
                let started = process::start_open(&program, &arguments, theirs, &["WATCHDOG_PID"]);
                let started = started.context("the program cannot be started")?;
                let pid = started.id();
                *child = Some(started);
                let wanted = Wanted::Upgrade { confirm_ms, pid };
                wire::send(end, &wanted, &[command.as_fd(), ours.as_fd()])?;
            }
        }
        Ok(())
    }
}

/// Whether this process may have a starter: the first process of a container cannot be replaced, because the container ends with it.
pub(super) fn may_be_replaced() -> bool {
    std::process::id() != 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a process with this id and user is told when it asks for an upgrade, and whether a process was started.
    fn ask(pid: i32, uid: u32) -> (String, bool) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let listening = Listening {
            socket: scm::listen(&path).expect("bound"),
            path: path.clone(),
            inode: 0,
            config: folder.path().join("none.toml"),
        };
        let (to_node, _node) = scm::pair().expect("a pair");
        let (ours, theirs) = scm::pair().expect("a pair");
        let program = OwnedFd::from(std::fs::File::open("/bin/true").expect("a program"));
        let wish = Wish::Upgrade { confirm_ms: None };
        wire::send(&ours, &wish, &[program.as_fd()]).expect("sent");
        let mut child = None;
        let heard = listening.hear(&to_node, &theirs, scm::Peer { pid, uid }, &mut child);
        let started = child.map(|mut child| child.wait()).is_some();
        (heard.err().map(|error| error.to_string()).unwrap_or_default(), started)
    }

    #[test]
    fn the_node_itself_and_other_users_start_nothing() {
        let (own, parent) = (probe::uid(), process::parent());
        assert_eq!(ask(parent, own), ("a node does not upgrade itself".to_owned(), false));
        assert!(!ask(parent, 0).1, "not as root either");
        let (why, started) = ask(1, own + 4711);
        assert!(why.contains("only root and user") && !started, "{why}");
        // A command is neither.
        assert_eq!(ask(std::process::id().cast_signed(), own), (String::new(), true));
    }
}
