//! Takes a running flow apart, so that another process can go on with it.

use super::Pump;
use crate::reactor::TcpStream;
use sidetrack_core::splice::Config;
use std::time::Duration;

/// What is left of a pump.
pub struct Parted {
    /// The sockets to the client and to the server.
    pub sockets: [std::net::TcpStream; 2],
    /// Bytes that were read from the client and from the server, and not written yet.
    pub held: [Vec<u8>; 2],
    /// Its limits. The lifetime is what is left of it.
    pub config: Config,
}

impl Pump<TcpStream> {
    /// Takes it apart. `None`: it has functions, the kernel passes its packets on, or it ends; then it goes on here.
    pub fn take_apart(&mut self) -> Option<Parted> {
        let is_bound = self.through.is_some() || self.law.is_some();
        let is_wired = self.wiring.as_ref().is_some_and(|wiring| wiring.is_joined());
        let ends = self.farewell.is_some() || self.error.is_some() || self.live.ending().is_some();
        if is_bound || is_wired || ends || self.core.is_closed() {
            return None;
        }
        if self.wiring.is_some() {
            // It may have waited for a quiet instant.
            self.offer_windows(u32::MAX);
        }
        // A full pipe is emptied into memory, once for each flow.
        let held = [self.up.take_out(), self.down.take_out()];
        let [Ok(up), Ok(down)] = held else {
            // What was read of it cannot be put back.
            self.live.end(sidetrack_core::flow::EndReason::Shutdown);
            return None;
        };
        let (client, server) = (self.client.take()?.into_std(), self.server.take()?.into_std());
        let (Ok(client), Ok(server)) = (client, server) else { return None };
        let mut config = self.core.config();
        config.lifetime =
            config.lifetime.map(|life| life.saturating_sub(self.live.age()).max(Duration::from_millis(1)));
        Some(Parted { sockets: [client, server], held: [up, down], config })
    }
}
