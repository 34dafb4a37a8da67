//! Traffic that goes on while a node is replaced.

use crate::node::peers::Client;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

/// Bytes that a transfer has on the way at a time.
const PIECE: usize = 100_000;

/// Transfers over connections that stand, and new connections one after the other.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    moved: Arc<AtomicU64>,
    visits: Arc<AtomicU64>,
    transfers: Vec<JoinHandle<SocketAddr>>,
    visitors: Vec<JoinHandle<u64>>,
}

impl Load {
    /// `may_break`: new connections may be cut, because the process that has them is killed; they are never refused.
    pub(crate) fn start(to: SocketAddr, transfers: usize, may_break: bool) -> Self {
        let (stop, moved, visits) = (Arc::new(AtomicBool::new(false)), Arc::default(), Arc::default());
        let mut load = Self { stop, moved, visits, transfers: Vec::new(), visitors: Vec::new() };
        for number in 0..transfers {
            let (stop, moved) = (load.stop.clone(), load.moved.clone());
            // The connection stands before this returns.
            let client = Client::connect(to).expect("a connection");
            load.transfers.push(std::thread::spawn(move || transfer(client, number, &stop, &moved)));
        }
        for _ in 0..2 {
            let (stop, visits) = (load.stop.clone(), load.visits.clone());
            load.visitors.push(std::thread::spawn(move || {
                let mut done = 0;
                while !stop.load(Relaxed) {
                    match visit(to) {
                        Ok(()) => done += 1,
                        Err(error) => {
                            assert!(may_break && error.kind() != ErrorKind::ConnectionRefused, "{error}");
                        }
                    }
                    visits.fetch_add(1, Relaxed);
                }
                done
            }));
        }
        load
    }

    /// Waits until both kinds of traffic have gone on from now.
    pub(crate) fn goes_on(&self) {
        let (moved, visits) = (self.moved.load(Relaxed), self.visits.load(Relaxed));
        let least = self.transfers.len() as u64 * 3 * PIECE as u64;
        sidetrack_testkit::eventually("the traffic goes on", || {
            self.moved.load(Relaxed) >= moved + least && self.visits.load(Relaxed) >= visits + 10
        });
    }

    /// Ends all of it: the addresses of the transfers, and the number of the other connections.
    pub(crate) fn finish(self) -> (Vec<SocketAddr>, u64) {
        self.stop.store(true, Relaxed);
        let transfers = self.transfers.into_iter().map(|thread| thread.join().expect("every byte is right"));
        let transfers = transfers.collect();
        let visits = self.visitors.into_iter().map(|thread| thread.join().expect("no connection is refused"));
        (transfers, visits.sum())
    }
}

fn transfer(mut client: Client, number: usize, stop: &AtomicBool, moved: &AtomicU64) -> SocketAddr {
    let address = client.address;
    let mut turn = number;
    while !stop.load(Relaxed) {
        let bytes: Vec<u8> = (0..PIECE).map(|at| (at / 7 + turn) as u8).collect();
        client.echo(&bytes).expect("every byte comes back");
        moved.fetch_add(PIECE as u64, Relaxed);
        turn += 1;
    }
    client.close().expect("an orderly end");
    address
}

fn visit(to: SocketAddr) -> std::io::Result<()> {
    let mut client = Client::connect(to)?;
    client.echo(b"a word")?;
    client.close()
}
