//! The local process behind a connection, for rules that ask.

use sidetrack_core::flow::{Flow, Intercept, Process};
use tokio::net::TcpStream;

/// Who opened this connection; all unknown if it did not come from this host or cannot be seen.
pub fn behind(flow: &Flow, _client: &TcpStream) -> Process {
    match flow.intercept {
        Intercept::Run | Intercept::Redirect | Intercept::Socks | Intercept::Reverse => Process::default(),
        Intercept::Tproxy | Intercept::Kernel => Process::default(),
    }
}
