//! `sidetrack top`: the flows of a running sidetrack as they change, in a terminal.
//!
//! The screen ([`Screen`]) is pure: it takes keys and what the node tells, and returns what to do and a picture. This file moves
//! both ways: keys and the node's events in, requests to the node and the picture out.

mod columns;
mod draw;
mod events;
mod feed;
mod field;
mod of_run;
mod panels;
mod rows;
mod screen;
mod terminal;

pub use columns::Column;
pub use events::{Changes, Event, FlowRow, Hello, Reader, Tick};
pub use of_run::run_command;
pub use panels::{FastPath, Health};
pub use rows::{ENDED_MAX, LIVE_MAX, Rows};
pub use screen::{Act, Drawer, Input, Link, Mode, Screen, Tab};

use super::flows::{show, which};
use crate::admin::{Client, ClientError, Killed, ShuntFlows, Status};
use crate::record::Traced;
use clap::Args;
use hyper::Method;
use ratatui::crossterm::event::{Event as Pressed, KeyEventKind};
use sidetrack_core::filter::Filter;
use sidetrack_sys::process::end_by;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use terminal::Taken;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Exit code for a mistake on the command line.
const USAGE: u8 = 2;
/// Events of the node that wait for the screen. A node sends a slow viewer fewer, larger updates.
const EVENTS_MAX: usize = 16;
/// Inputs that are taken before the screen is drawn again.
const TAKEN_EACH: usize = 64;
/// How long a node may take for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Shows the flows of a running sidetrack as they change, in this terminal
///
/// Keys: ? lists them. FILTER selects flows, as in `sidetrack flows`: proc == curl and port == 443. The screen works from 80x24, over
/// ssh, and without colours (NO_COLOR).
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Filter for the flows; several words form one filter
    filter: Vec<String>,
    /// Admin socket of the running sidetrack
    #[arg(long, value_name = "PATH")]
    admin: Option<PathBuf>,
    /// Process id of a `sidetrack run` to watch
    #[arg(long, value_name = "PID", conflicts_with = "admin")]
    pid: Option<u32>,
}

/// Runs the subcommand.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &TopArgs) -> anyhow::Result<ExitCode> {
    let filter = args.filter.join(" ");
    if let Err(error) = Filter::parse(&filter) {
        let _ = writeln!(std::io::stderr(), "the filter cannot be read:\n{}", error.caret(&filter));
        return Ok(ExitCode::from(USAGE));
    }
    let client = Client::new(which::socket(args.admin.as_deref(), args.pid)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let left = runtime.block_on(async {
        // A node that is not there is an error. One that goes away later is waited for.
        let asked = timeout(PATIENCE, client.ask::<Status>(Method::GET, "/v1/status", &[])).await;
        asked.map_err(|_| anyhow::anyhow!("{} does not answer", client.path().display()))??;
        let name = client.path().display().to_string();
        Top::new(client, &name, filter.trim())?.show(std::future::pending::<()>()).await
    });
    // Tasks that wait for the node end with us.
    runtime.shutdown_background();
    match left? {
        Left::Signal(signal) => end_by(signal),
        Left::Quit | Left::Over(()) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Why the screen was left.
enum Left<T> {
    /// A key said so.
    Quit,
    /// This signal ends programs.
    Signal(i32),
    /// What was waited for.
    Over(T),
}

/// What runs the screen.
struct Top {
    client: Client,
    screen: Screen,
    events: Receiver<Input>,
    feed: JoinHandle<()>,
    answers: Receiver<Input>,
    answering: Sender<Input>,
    /// Requests that repeat are sent when the last one was answered.
    looking: Option<JoinHandle<()>>,
    tracing: Option<JoinHandle<()>>,
}

impl Top {
    fn new(client: Client, name: &str, filter: &str) -> anyhow::Result<Self> {
        let screen = Screen::new(&super::flows::human::printable(name), filter, has_colours());
        let (answering, answers) = channel(EVENTS_MAX);
        let (events, feed) = feed_of(&client, filter);
        Ok(Self { client, screen, events, feed, answers, answering, looking: None, tracing: None })
    }

    /// Shows the screen until it is left or `over` is ready. Then the terminal is as it was.
    async fn show<T>(&mut self, over: impl Future<Output = T>) -> anyhow::Result<Left<T>> {
        let mut signals = Signals::new()?;
        let mut taken = Taken::take()?;
        let mut keys = terminal::keys()?;
        let mut over = std::pin::pin!(over);
        loop {
            taken.draw(|frame| self.screen.draw(frame))?;
            let input = tokio::select! {
                biased;
                ended = &mut over => return Ok(Left::Over(ended)),
                told = signals.next() => match told {
                    Told::End(signal) => return Ok(Left::Signal(signal)),
                    Told::Stop => {
                        taken.stop()?;
                        continue;
                    }
                    Told::Continued => {
                        taken.again()?;
                        continue;
                    }
                },
                pressed = keys.recv() => match pressed {
                    None => anyhow::bail!("the terminal is gone"),
                    Some(Pressed::Key(key)) if key.kind != KeyEventKind::Release => Input::Key(key),
                    // A new size, at which the screen is drawn next.
                    Some(_) => continue,
                },
                Some(input) = self.answers.recv() => input,
                Some(input) = self.events.recv() => input,
            };
            let mut next = Some(input);
            for _ in 0..TAKEN_EACH {
                let Some(input) = next.take() else { break };
                for act in self.screen.handle(input) {
                    if act == Act::Quit {
                        return Ok(Left::Quit);
                    }
                    self.act(act);
                }
                next = self.answers.try_recv().or_else(|_| self.events.try_recv()).ok();
            }
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Quit => {}
            Act::Suspend => Taken::stop_job(),
            Act::Watch(filter) => {
                self.feed.abort();
                (self.events, self.feed) = feed_of(&self.client, &filter);
            }
            Act::Trace(id) => {
                if self.tracing.as_ref().is_none_or(JoinHandle::is_finished) {
                    let client = self.client.clone();
                    self.tracing = Some(self.ask(async move { Input::Trace(id, trace(&client, id).await) }));
                }
            }
            Act::Kill(id) => {
                let client = self.client.clone();
                self.ask(async move { Input::Told(kill(&client, id).await) });
            }
            Act::Look(tab) => {
                if self.looking.as_ref().is_none_or(JoinHandle::is_finished) {
                    let client = self.client.clone();
                    self.looking = Some(self.ask(async move {
                        match tab {
                            Tab::Health => Input::Health(health(&client).await),
                            _ => Input::FastPath(fast_path(&client).await),
                        }
                    }));
                }
            }
        }
    }

    /// Passes an answer to the screen when it is there.
    fn ask(&self, question: impl Future<Output = Input> + Send + 'static) -> JoinHandle<()> {
        let answering = self.answering.clone();
        tokio::spawn(async move {
            // The screen may have been left.
            let _ = answering.send(question.await).await;
        })
    }
}

/// Standard output may be coloured (no-color.org).
fn has_colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn feed_of(client: &Client, filter: &str) -> (Receiver<Input>, JoinHandle<()>) {
    let (told, events) = channel(EVENTS_MAX);
    (events, tokio::spawn(feed::follow(client.clone(), filter.to_owned(), told)))
}

/// Waits for an answer, and returns why there is none in words.
async fn answered<T>(answer: impl Future<Output = Result<T, ClientError>>) -> Result<T, String> {
    let answer = timeout(PATIENCE, answer).await.map_err(|_| "the node does not answer".to_owned())?;
    answer.map_err(|error| error.to_string())
}

async fn trace(client: &Client, id: u64) -> Result<String, String> {
    let path = format!("/v1/flows/{id}/trace");
    let traced: Traced<'static> = answered(client.ask(Method::GET, &path, &[])).await?;
    Ok(show::traced(&traced))
}

async fn kill(client: &Client, id: u64) -> String {
    let path = format!("/v1/flows/{id}");
    match answered(client.ask::<Killed>(Method::DELETE, &path, &[])).await {
        Ok(_) => format!("ended flow {id}"),
        Err(why) => why.lines().next().unwrap_or_default().to_owned(),
    }
}

async fn fast_path(client: &Client) -> Result<FastPath, String> {
    let told = answered(client.ask::<ShuntFlows>(Method::GET, "/v1/shunt", &[])).await;
    told.map(|told| FastPath { flows: told.flows })
}

async fn health(client: &Client) -> Result<Box<Health>, String> {
    let status = answered(client.ask::<Status>(Method::GET, "/v1/status", &[])).await?;
    let metrics = answered(async {
        let mut lines = client.lines("/metrics", &[]).await?;
        let mut metrics = Vec::new();
        while let Some(line) = lines.next().await? {
            if metrics.len() < panels::METRICS_MAX && !line.starts_with('#') {
                metrics.push(line);
            }
        }
        Ok(metrics)
    });
    Ok(Box::new(Health { status, metrics: metrics.await? }))
}

/// What signals say.
enum Told {
    /// End.
    End(i32),
    /// Stop.
    Stop,
    /// We were stopped and go on.
    Continued,
}

struct Signals {
    end: [(Signal, SignalKind); 4],
    stop: Signal,
    continued: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        let of = |kind: SignalKind| Ok::<_, std::io::Error>((signal(kind)?, kind));
        Ok(Self {
            end: [
                of(SignalKind::terminate())?,
                of(SignalKind::hangup())?,
                of(SignalKind::interrupt())?,
                of(SignalKind::quit())?,
            ],
            stop: signal(SignalKind::from_raw(rustix::process::Signal::TSTP.as_raw()))?,
            continued: signal(SignalKind::from_raw(rustix::process::Signal::CONT.as_raw()))?,
        })
    }

    async fn next(&mut self) -> Told {
        let [terminate, hangup, interrupt, quit] = &mut self.end;
        let kind = tokio::select! {
            _ = terminate.0.recv() => terminate.1,
            _ = hangup.0.recv() => hangup.1,
            _ = interrupt.0.recv() => interrupt.1,
            _ = quit.0.recv() => quit.1,
            _ = self.stop.recv() => return Told::Stop,
            _ = self.continued.recv() => return Told::Continued,
        };
        Told::End(kind.as_raw_value())
    }
}
