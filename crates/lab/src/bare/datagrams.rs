//! The smallest possible relay for datagrams: a socket for each client, batches, no policy, record, limit or time-out.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, UdpSocket};

use anyhow::{Context as _, Result};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use sidetrack_sys::udp::batch::{Batch, Target};

use super::{EVENTS_MAX, FLOWS_MAX, LISTENER};

/// A client, and the socket that is connected to the server for it.
struct Client {
    address: SocketAddr,
    socket: UdpSocket,
}

/// Relays until the process ends.
pub(super) fn run(listen: SocketAddr, to: SocketAddr) -> Result<()> {
    let front = UdpSocket::bind(listen).with_context(|| format!("cannot bind {listen}"))?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &front, EventData::new_u64(LISTENER), EventFlags::IN)?;
    eprintln!("relay at {listen}");
    let (mut clients, mut known) = (Vec::<Client>::new(), HashMap::<SocketAddr, usize>::new());
    let (mut batch, mut events) = (Batch::new(), [MaybeUninit::<epoll::Event>::uninit(); EVENTS_MAX]);
    loop {
        let (ready, _) = match epoll::wait(&epoll, &mut events, None) {
            Ok(ready) => ready,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error).context("epoll_wait failed"),
        };
        for event in ready.iter() {
            match event.data.u64() {
                LISTENER => {
                    let count = batch.receive(&front).unwrap_or(0);
                    let mut at = 0;
                    while at < count {
                        let from = batch.addresses(at).0;
                        let end = (at..count).find(|at| batch.addresses(*at).0 != from).unwrap_or(count);
                        let range = std::mem::replace(&mut at, end)..end;
                        let Some(from) = from else { continue };
                        let index = match known.get(&from) {
                            Some(index) => *index,
                            None if clients.len() < FLOWS_MAX => {
                                let socket = UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
                                socket.connect(to)?;
                                let key = EventData::new_u64(clients.len() as u64);
                                epoll::add(&epoll, &socket, key, EventFlags::IN)?;
                                known.insert(from, clients.len());
                                clients.push(Client { address: from, socket });
                                clients.len() - 1
                            }
                            None => continue,
                        };
                        batch.send(&clients[index].socket, range, None);
                    }
                }
                key => {
                    let Some(Client { address, socket }) = clients.get(key as usize) else { continue };
                    let count = batch.receive(socket).unwrap_or(0);
                    batch.send(&front, 0..count, Some(&Target { to: *address, from: None }));
                }
            }
        }
    }
}
