//! Two servers: one that sends without end to clients that may not read, and one of large resources for a cache.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;

use crate::topology::Node;

/// Bytes of a write.
const CHUNK: usize = 64 * 1024;
/// A server looks again after this time whether there is work.
const REST: Duration = Duration::from_millis(10);

/// A server; it ends when this is dropped.
pub(super) struct Source {
    stopping: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Source {
    /// Starts one that sends to every client as much as it takes, and never ends.
    ///
    /// # Errors
    /// The address is not the node's.
    pub(super) fn endless(node: &Node, address: SocketAddr) -> Result<Self> {
        let listener = node.enter(|| Ok(TcpListener::bind(address)?))?;
        listener.set_nonblocking(true)?;
        Ok(Self::run(Arc::default(), move |stopping| {
            let (mut clients, bytes) = (Vec::<TcpStream>::new(), vec![b'x'; CHUNK]);
            while !stopping.load(Relaxed) {
                while let Ok((client, _)) = listener.accept() {
                    if client.set_nonblocking(true).is_ok() {
                        clients.push(client);
                    }
                }
                // A client that is gone fails otherwise than one that is full.
                clients.retain_mut(|client| {
                    loop {
                        match client.write(&bytes).map(|taken| taken > 0) {
                            Ok(takes) if takes => {}
                            Ok(_) => return false,
                            Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
                        }
                    }
                });
                std::thread::sleep(REST);
            }
        }))
    }

    /// Starts one that answers `GET /NUMBER` with this many bytes, which may be stored. They all are the number's last digit.
    ///
    /// # Errors
    /// The address is not the node's.
    pub(super) fn resources(node: &Node, address: SocketAddr, length: usize) -> Result<Self> {
        let listener = node.enter(|| Ok(TcpListener::bind(address)?))?;
        listener.set_nonblocking(true)?;
        let asked = Arc::<AtomicU64>::default();
        let counting = asked.clone();
        Ok(Self::run(asked, move |stopping| {
            while !stopping.load(Relaxed) {
                match listener.accept() {
                    Ok((client, _)) => {
                        // It ends with its client.
                        let counting = counting.clone();
                        std::thread::spawn(move || answer(client, length, &counting));
                    }
                    Err(_) => std::thread::sleep(REST),
                }
            }
        }))
    }

    /// Returns how many resources were asked for.
    pub(super) fn asked(&self) -> u64 {
        self.asked.load(Relaxed)
    }

    fn run(asked: Arc<AtomicU64>, serve: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let stopping = Arc::<AtomicBool>::default();
        let stop = stopping.clone();
        Self { stopping, asked, thread: Some(std::thread::spawn(move || serve(&stop))) }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.stopping.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The byte of a resource.
pub(super) fn byte_of(number: u64) -> u8 {
    b'0' + (number % 10) as u8
}

fn answer(client: TcpStream, length: usize, asked: &AtomicU64) -> std::io::Result<()> {
    client.set_nonblocking(false)?;
    let mut writer = client.try_clone()?;
    let mut lines = BufReader::new(client).lines();
    let mut number = None;
    while let Some(line) = lines.next().transpose()? {
        if let Some(path) = line.strip_prefix("GET ").and_then(|rest| rest.split(' ').next()) {
            number = path.rsplit('/').next().and_then(|word| word.parse().ok());
        }
        if line.is_empty() {
            asked.fetch_add(1, Relaxed);
            let byte = byte_of(number.unwrap_or(0));
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nCache-Control: max-age=3600\r\n\r\n");
            writer.write_all(head.as_bytes())?;
            writer.write_all(&vec![byte; length])?;
        }
    }
    Ok(())
}
