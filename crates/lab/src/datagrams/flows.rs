//! The generator's flows: one thread with epoll and a socket for each flow.

use std::io::{Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use sidetrack_core::flow::Destination;
use sidetrack_core::socks::v5::udp::put_header;

use super::{Report, Spec, Via, Work};

/// Without an answer for this time, all that is under way is lost.
const SILENCE: Duration = Duration::from_millis(50);
/// Time for the answers that are missing at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// Time for the answer of a SOCKS server.
const PATIENCE: Duration = Duration::from_secs(5);
const EVENTS_MAX: usize = 256;

/// A flow: a socket that is connected to the relay.
struct Flow {
    socket: UdpSocket,
    /// A SOCKS association lives as long as this.
    _control: Option<TcpStream>,
    under_way: u32,
    has_answer: bool,
}

impl Flow {
    fn open(spec: &Spec) -> Result<Self> {
        let (to, control) = match spec.via {
            Via::Plain => (spec.dial, None),
            Via::Socks5 => {
                let (relay, control) = associate(spec.dial)?;
                (relay, Some(control))
            }
        };
        let own: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
        let socket = UdpSocket::bind(own).context("a socket")?;
        socket.connect(to)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, _control: control, under_way: 0, has_answer: false })
    }

    fn send(&mut self, payload: &[u8]) {
        // What finds no room is lost, as on any path of UDP.
        if self.socket.send(payload).is_ok() {
            self.under_way += 1;
        }
    }

    /// Takes what has come back. Returns how many datagrams.
    fn receive(&mut self, buffer: &mut [u8]) -> u32 {
        let mut count = 0;
        while self.socket.recv(buffer).is_ok() {
            count += 1;
        }
        self.has_answer |= count > 0;
        self.under_way = self.under_way.saturating_sub(count);
        count
    }
}

/// Asks a SOCKS server for UDP ASSOCIATE. Returns the address that takes datagrams.
fn associate(server: SocketAddr) -> Result<(SocketAddr, TcpStream)> {
    let mut control = TcpStream::connect(server).context("the SOCKS server")?;
    control.set_read_timeout(Some(PATIENCE))?;
    control.write_all(&[5, 1, 0])?;
    let mut reply = [0; 10];
    control.read_exact(&mut reply[..2]).context("its choice")?;
    ensure!(reply[..2] == [5, 0], "it wants authentication");
    control.write_all(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0])?;
    control.read_exact(&mut reply).context("its answer to UDP ASSOCIATE")?;
    let [5, 0, _, 1, a, b, c, d, high, low] = reply else {
        bail!("it refuses UDP ASSOCIATE: {reply:?}");
    };
    let port = u16::from_be_bytes([high, low]);
    let relay: SocketAddr = ([a, b, c, d], port).into();
    let relay = if relay.ip().is_unspecified() { (server.ip(), port).into() } else { relay };
    Ok((relay, control))
}

/// The sockets by index, and what they wait for.
struct Watched {
    epoll: std::os::fd::OwnedFd,
    flows: Vec<Option<Flow>>,
}

impl Watched {
    fn new() -> Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, flows: Vec::new() })
    }

    fn add(&mut self, flow: Flow) -> Result<usize> {
        let at = self.flows.len();
        epoll::add(&self.epoll, &flow.socket, EventData::new_u64(at as u64), EventFlags::IN)?;
        self.flows.push(Some(flow));
        Ok(at)
    }

    /// Waits for answers. Returns the flows that have some.
    fn wait(&self, time: Duration) -> Result<Vec<usize>> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS_MAX];
        let time = Timespec::try_from(time)?;
        match epoll::wait(&self.epoll, &mut events, Some(&time)) {
            Ok((ready, _)) => Ok(ready.iter().map(|event| event.data.u64() as usize).collect()),
            Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Does the job. `begin` is called when the window begins.
///
/// # Errors
/// No flow can be opened.
pub(super) fn run(spec: &Spec, begin: impl FnOnce() -> Result<()>) -> Result<Report> {
    let payload = payload(spec);
    match spec.work {
        Work::Echo { under_way } => echo(spec, &payload, under_way, begin),
        Work::New { per_second } => new(spec, &payload, per_second, begin),
        Work::Rate { per_second } => rate(spec, &payload, per_second, begin),
        Work::Idle => idle(spec, &payload, begin),
        Work::Quic => bail!("QUIC has its own client"),
    }
}

fn payload(spec: &Spec) -> Vec<u8> {
    let mut payload = Vec::new();
    if spec.via == Via::Socks5 {
        put_header(&mut payload, &Destination::from(spec.destination));
    }
    payload.resize(payload.len() + spec.bytes.max(8), 7);
    payload
}

/// Opens all flows, and waits until each has had an answer.
fn opened(spec: &Spec, payload: &[u8]) -> Result<Watched> {
    let mut all = Watched::new()?;
    let mut buffer = vec![0; 65_536];
    for _ in 0..spec.flows {
        let at = all.add(Flow::open(spec)?)?;
        let began = Instant::now();
        while all.flows[at].as_ref().is_some_and(|flow| !flow.has_answer) {
            if began.elapsed() > PATIENCE {
                bail!("flow {at} of {} has no answer", spec.flows);
            }
            if let Some(flow) = all.flows[at].as_mut() {
                flow.send(payload);
            }
            let (sent, mut quiet) = (Instant::now(), true);
            while quiet && sent.elapsed() < SILENCE {
                for ready in all.wait(SILENCE)? {
                    if let Some(flow) = all.flows[ready].as_mut() {
                        // An ICMP error is ready, too: the relay may not listen yet.
                        quiet &= flow.receive(&mut buffer) == 0;
                    }
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    Ok(all)
}

fn echo(spec: &Spec, payload: &[u8], under_way: u32, begin: impl FnOnce() -> Result<()>) -> Result<Report> {
    let mut all = opened(spec, payload)?;
    let mut buffer = vec![0; 65_536];
    let mut report = Report::default();
    let began = Instant::now();
    let warm = Duration::from_millis(spec.warmup_ms);
    let (mut begin, mut window) = (Some(begin), None::<Instant>);
    let fill = |all: &mut Watched| {
        let mut lost = 0;
        for flow in all.flows.iter_mut().flatten() {
            lost += u64::from(flow.under_way);
            flow.under_way = 0;
            (0..under_way).for_each(|_| flow.send(payload));
        }
        lost
    };
    fill(&mut all);
    loop {
        if let Some(since) = window {
            if since.elapsed() >= Duration::from_millis(spec.window_ms) {
                report.window_ns = u64::try_from(since.elapsed().as_nanos())?;
                break;
            }
        } else if began.elapsed() >= warm {
            report = Report::default();
            begin.take().map_or(Ok(()), |begin| begin())?;
            window = Some(Instant::now());
        }
        let ready = all.wait(SILENCE)?;
        if ready.is_empty() {
            report.lost += fill(&mut all);
        }
        for at in ready {
            let Some(flow) = all.flows[at].as_mut() else { continue };
            let came = flow.receive(&mut buffer);
            report.answers += u64::from(came);
            // One that was lost alone is made up for when its flow is quiet.
            (0..came).for_each(|_| flow.send(payload));
        }
    }
    report.open = spec.flows;
    Ok(report)
}

fn rate(spec: &Spec, payload: &[u8], per_second: u32, begin: impl FnOnce() -> Result<()>) -> Result<Report> {
    let mut all = opened(spec, payload)?;
    let mut buffer = vec![0; 65_536];
    let mut report = Report { open: spec.flows, ..Report::default() };
    begin()?;
    let began = Instant::now();
    let window = Duration::from_millis(spec.window_ms);
    let wanted = u64::from(per_second) * spec.window_ms / 1000;
    let (mut sent, mut next) = (0, 0);
    while report.answers < wanted && began.elapsed() < window + LAST_ANSWERS {
        let due = (began.elapsed().as_secs_f64() * f64::from(per_second)) as u64;
        while sent < due.min(wanted) {
            if let Some(flow) = all.flows.get_mut(next).and_then(Option::as_mut) {
                flow.send(payload);
            }
            (sent, next) = (sent + 1, (next + 1) % all.flows.len());
        }
        for at in all.wait(Duration::from_millis(u64::from(sent == wanted)))? {
            let Some(flow) = all.flows[at].as_mut() else { continue };
            report.answers += u64::from(flow.receive(&mut buffer));
        }
    }
    report.window_ns = u64::try_from(began.elapsed().as_nanos())?;
    report.lost = sent.saturating_sub(report.answers);
    Ok(report)
}

fn idle(spec: &Spec, payload: &[u8], begin: impl FnOnce() -> Result<()>) -> Result<Report> {
    let all = opened(spec, payload)?;
    begin()?;
    std::thread::sleep(Duration::from_millis(spec.window_ms));
    let open = u32::try_from(all.flows.len())?;
    Ok(Report { open, window_ns: spec.window_ms * 1_000_000, ..Report::default() })
}

fn new(spec: &Spec, payload: &[u8], per_second: u32, begin: impl FnOnce() -> Result<()>) -> Result<Report> {
    let mut all = Watched::new()?;
    let mut buffer = vec![0; 65_536];
    let mut report = Report::default();
    begin()?;
    let began = Instant::now();
    let window = Duration::from_millis(spec.window_ms);
    let wanted = u64::from(per_second) * spec.window_ms / 1000;
    let mut sent = 0;
    while report.answers < wanted && began.elapsed() < window + LAST_ANSWERS {
        let due = (began.elapsed().as_secs_f64() * f64::from(per_second)) as u64;
        while sent < due.min(wanted) {
            let mut flow = Flow::open(spec)?;
            flow.send(payload);
            all.add(flow)?;
            sent += 1;
        }
        for at in all.wait(Duration::from_millis(1))? {
            let Some(flow) = all.flows[at].as_mut() else { continue };
            if flow.receive(&mut buffer) > 0 {
                report.answers += 1;
                all.flows[at] = None;
            }
        }
    }
    report.window_ns = u64::try_from(began.elapsed().as_nanos())?;
    report.lost = sent.saturating_sub(report.answers);
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bare::{BUFFER_BYTES, Options, Role};
    use crate::datagrams::EchoOptions;

    /// A port that is free.
    fn free() -> SocketAddr {
        UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port")
    }

    /// A relay, and the echo behind it. They run until the tests end.
    fn relay() -> [SocketAddr; 2] {
        let [listen, server] = [free(), free()];
        std::thread::spawn(move || crate::datagrams::echo(&EchoOptions { listen: server }));
        let options = Options { role: Role::Datagrams, listen, to: Some(server), buffer_bytes: BUFFER_BYTES };
        std::thread::spawn(move || crate::bare::run(&options));
        [listen, server]
    }

    #[test]
    fn each_kind_of_work_counts_what_came_back() {
        let [dial, destination] = relay();
        let spec = Spec {
            work: Work::Echo { under_way: 2 },
            flows: 3,
            bytes: 64,
            dial,
            via: Via::Plain,
            destination,
            warmup_ms: 20,
            window_ms: 100,
        };
        let mut windows = 0;
        let mut done = |spec: &Spec| {
            let begin = || {
                windows += 1;
                Ok(())
            };
            run(spec, begin).expect("a report")
        };
        let report = done(&spec);
        assert!(report.answers > 0 && report.rate() > 0.0 && report.window_ns >= 100_000_000, "{report:?}");
        let report = done(&Spec { work: Work::New { per_second: 200 }, ..spec });
        assert_eq!((report.answers, report.lost), (20, 0));
        let report = done(&Spec { work: Work::Rate { per_second: 500 }, ..spec });
        assert_eq!((report.answers, report.lost), (50, 0));
        let report = done(&Spec { work: Work::Idle, flows: 5, ..spec });
        assert_eq!((report.open, report.answers), (5, 0));
        assert_eq!(windows, 4);
    }

    #[test]
    fn a_lost_share_is_of_all() {
        let report = Report { answers: 75, lost: 25, ..Report::default() };
        assert_eq!(report.lost_percent(), 25.0);
        assert_eq!(Report::default().lost_percent(), 0.0);
    }
}
