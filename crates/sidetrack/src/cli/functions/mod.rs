//! `sidetrack fn` and `sidetrack chain`: run functions on given bytes. Functions inside this program need no socket;
//! containers are started for the command and removed at its end.

mod containers;
mod template;

use super::Printed;
use crate::config::Config;
use crate::function::Library;
use crate::live::Clock;
use containers::Yard;
use sidetrack_core::chain::{Chain, OFFER_MAX, Offered};
use sidetrack_core::flow::{Flow, HostName, Intercept, Protocol, Side};
use sidetrack_core::function::{ContainerSpec, FunctionKind, FunctionSpec, Stop};
use sidetrack_core::policy::Action;
use sidetrack_core::time::Instant;
use sidetrack_sys::scheduling::thread_cpu_time;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// One function of a configuration.
#[derive(Clone, Debug, clap::Args)]
pub struct FnArgs {
    #[command(subcommand)]
    command: FnCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum FnCommand {
    /// Writes a function in a container to begin with: program, Containerfile and configuration, in a new folder
    New(NewArgs),
    /// Starts the container of a function and says whether flows get through it, and how fast. Exit code 1: they do not
    Probe(ProbeArgs),
    /// Leads standard input through a function to standard output. Exit code 1: the function ended the flow
    Test(TestArgs),
}

/// What `fn new` is to do.
#[derive(Clone, Debug, clap::Args)]
pub struct NewArgs {
    /// The function's name, which is that of the folder and of the image
    pub name: String,
    /// Where the folder is made
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub below: PathBuf,
}

/// What `fn probe` is to do.
#[derive(Clone, Debug, clap::Args)]
pub struct ProbeArgs {
    /// The function's name in the configuration
    pub name: String,
    /// The configuration [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// How often it is probed, 1 to 100000
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub count: u32,
}

/// What `fn test` is to do.
#[derive(Clone, Debug, clap::Args)]
pub struct TestArgs {
    /// The function's name in the configuration
    pub name: String,
    /// The configuration [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// The bytes are the server's, not the client's
    #[arg(long)]
    pub from_server: bool,
    /// The host that the flow is known to want
    #[arg(long, value_name = "NAME")]
    pub host: Option<HostName>,
}

/// The chain of a rule.
#[derive(Clone, Debug, clap::Args)]
pub struct ChainArgs {
    #[command(subcommand)]
    command: ChainCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum ChainCommand {
    /// Leads a stream of text through each function of a rule's chain and says what each costs
    Try(TryArgs),
}

/// What `chain try` is to do.
#[derive(Clone, Debug, clap::Args)]
pub struct TryArgs {
    /// The rule's name in the configuration
    pub rule: String,
    /// The configuration [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// Bytes that the client sends, 1 to 1073741824
    #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub bytes: u64,
}

/// Runs `sidetrack fn`.
///
/// # Errors
/// Standard input or output fails.
pub fn run(args: &FnArgs) -> anyhow::Result<ExitCode> {
    let printed = match &args.command {
        FnCommand::New(new) => new_function(new)?,
        FnCommand::Probe(probe) => probe_function(probe, super::colours())?,
        FnCommand::Test(test) => {
            let mut out = std::io::stdout().lock();
            test_function(test, &mut std::io::stdin().lock(), &mut out, super::colours())?
        }
    };
    Ok(printed.print())
}

/// `fn new`: writes a first version of a function.
///
/// # Errors
/// The files cannot be written; says why.
pub fn new_function(args: &NewArgs) -> anyhow::Result<Printed> {
    let files = template::write(&args.name, &args.below)?;
    let mut out: String = files.iter().map(|file| format!("wrote {}\n", file.display())).collect();
    let name = args.name.to_lowercase();
    out.push_str(&format!(
        "next: podman build --tag localhost/{name}:1 {folder}\n      sidetrack fn probe {name} -c {folder}/sidetrack.toml\n",
        folder = args.below.join(&args.name).display()
    ));
    Ok(Printed { out, ..Printed::default() })
}

/// `fn probe`: starts and probes the container of a function.
///
/// # Errors
/// No container engine was found, or this user may not use it.
pub fn probe_function(args: &ProbeArgs, colours: bool) -> anyhow::Result<Printed> {
    let config = match Config::load(&args.config) {
        Ok(config) => config,
        Err(error) => return Ok(failed(2, error.render(colours))),
    };
    let spec = match named(&config, &args.name) {
        Ok(spec) => spec,
        Err(printed) => return Ok(printed),
    };
    let FunctionKind::Container(container) = &spec.kind else {
        let kind = spec.kind.as_str();
        return Ok(failed(
            2,
            format!("'{}' is of kind \"{kind}\" and needs no container: `fn test`\n", args.name),
        ));
    };
    let yard = Yard::open(&config)?;
    Ok(match containers::report(&yard, spec, container, args.count) {
        Ok((out, true)) => Printed { out, ..Printed::default() },
        Ok((out, false)) => Printed { out, code: 1, ..Printed::default() },
        Err(why) => failed(1, format!("{why}\n")),
    })
}

/// Finds a function of a configuration by its name.
fn named<'c>(config: &'c Config, name: &str) -> Result<&'c Arc<FunctionSpec>, Printed> {
    let found = config.functions.iter().find(|spec| *spec.name == *name);
    found.ok_or_else(|| {
        let names: Vec<_> = config.functions.iter().map(|spec| &*spec.name).collect();
        failed(2, format!("there is no function '{name}'; there are: {}\n", names.join(", ")))
    })
}

/// Runs `sidetrack chain`.
///
/// # Errors
/// As [`run`]; all other failures are in the report.
pub fn run_chain(args: &ChainArgs) -> anyhow::Result<ExitCode> {
    let ChainCommand::Try(args) = &args.command;
    Ok(try_chain(args, super::colours())?.print())
}

/// `fn test`: passes bytes from `input` through a function to `out`.
///
/// # Errors
/// Reading or writing fails.
pub fn test_function(
    args: &TestArgs,
    input: &mut impl Read,
    out: &mut impl Write,
    colours: bool,
) -> anyhow::Result<Printed> {
    let config = match Config::load(&args.config) {
        Ok(config) => config,
        Err(error) => return Ok(failed(2, error.render(colours))),
    };
    let spec = match named(&config, &args.name) {
        Ok(spec) => spec,
        Err(printed) => return Ok(printed),
    };
    let from = if args.from_server { Side::Server } else { Side::Client };
    let mut trial = Trial::new(args.host.clone());
    let passed = match trial.chain(std::slice::from_ref(spec)) {
        Ok(mut chain) => trial.pass(&mut chain, from, input, out)?,
        Err(stop) => Err(stop),
    };
    out.flush()?;
    Ok(match passed {
        Ok(()) => Printed::default(),
        Err(stop) => failed(1, format!("{}: {}\n", stop.reason, stop.detail)),
    })
}

/// `chain try`: measures the cost of each function in a rule's chain.
///
/// # Errors
/// None in practice: the output is a text in memory.
pub fn try_chain(args: &TryArgs, colours: bool) -> anyhow::Result<Printed> {
    let config = match Config::load(&args.config) {
        Ok(config) => config,
        Err(error) => return Ok(failed(2, error.render(colours))),
    };
    let rule = config.policy.rules().iter().find(|rule| *rule.name == *args.rule);
    let chain = rule.and_then(|rule| match &rule.action {
        Action::Carry(carry) => carry.chain.clone(),
        Action::Deny => None,
    });
    let Some(chain) = chain else {
        return Ok(failed(2, format!("there is no rule '{}' with a chain\n", args.rule)));
    };
    let length = usize::try_from(args.bytes)?;
    let mut bytes: Vec<u8> =
        b"all work and no play makes a dull stream. ".iter().copied().cycle().take(length).collect();
    let mut text = format!(
        "{:<20} {:<9} {:>12} {:>10} {:>12} {:>11}\n",
        "function", "kind", "bytes out", "us/MB", "waits ms", "connect ms"
    );
    let is_container = |spec: &Arc<FunctionSpec>| matches!(spec.kind, FunctionKind::Container(_));
    let yard = chain.functions.iter().any(is_container).then(|| Yard::open(&config)).transpose()?;
    for spec in &chain.functions {
        let tried = match (&spec.kind, &yard) {
            (FunctionKind::Container(container), Some(yard)) => try_container(yard, spec, container, &bytes),
            _ => try_stage(spec, &bytes)?,
        };
        let tried = match tried {
            Ok(tried) => tried,
            Err(why) => return Ok(failed(1, format!("{text}{why}\n"))),
        };
        let cost = tried.moving.as_micros() as f64 * 1e6 / bytes.len().max(1) as f64;
        let (name, kind) = (&spec.name, spec.kind.as_str());
        let connect =
            tried.connect.map_or_else(|| "-".to_owned(), |time| format!("{:.2}", time.as_secs_f64() * 1e3));
        let (out, waits) = (tried.out.len(), tried.waits_ms);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<20} {kind:<9} {out:>12} {cost:>10.1} {waits:>12} {connect:>11}");
        bytes = tried.out;
    }
    Ok(Printed { out: text, err: String::new(), code: 0 })
}

/// The result of passing bytes through one function.
struct Tried {
    out: Vec<u8>,
    moving: Duration,
    /// How long a flow would have waited because of the function.
    waits_ms: u128,
    /// The time until the flow was connected through a container.
    connect: Option<Duration>,
}

/// Passes bytes through a function inside this program.
fn try_stage(spec: &Arc<FunctionSpec>, bytes: &[u8]) -> anyhow::Result<Result<Tried, String>> {
    let mut trial = Trial::new(None);
    let began = trial.now;
    // Write to the memory before: the kernel's time to provide it is not a cost of the function.
    let mut out = vec![u8::MAX; bytes.len() + bytes.len() / 64];
    out.clear();
    let before = thread_cpu_time();
    let words = |stop: Stop| format!("{}: {}", stop.reason, stop.detail);
    let mut stage = match trial.chain(std::slice::from_ref(spec)) {
        Ok(stage) => stage,
        Err(stop) => return Ok(Err(words(stop))),
    };
    if let Err(stop) = trial.pass(&mut stage, Side::Client, &mut &*bytes, &mut out)? {
        return Ok(Err(words(stop)));
    }
    let moving = thread_cpu_time().saturating_sub(before);
    let waits_ms = (trial.now - began).as_millis();
    Ok(Ok(Tried { out, moving, waits_ms, connect: None }))
}

/// Passes bytes through a function in a container.
fn try_container(
    yard: &Yard,
    spec: &FunctionSpec,
    container: &ContainerSpec,
    bytes: &[u8],
) -> Result<Tried, String> {
    let (_pool, guest, _) = yard.start(spec, container)?;
    let led = containers::led(&guest, bytes).map_err(|why| format!("function '{}': {why}", spec.name));
    led.map(|(out, connect, moving)| Tried { out, moving, waits_ms: 0, connect: Some(connect) })
}

fn failed(code: u8, err: String) -> Printed {
    Printed { out: String::new(), err, code }
}

/// Runs functions without a network. Time is a number, and waiting for a deadline sets it.
struct Trial {
    library: Library,
    flow: Flow,
    now: Instant,
}

impl Trial {
    fn new(host: Option<HostName>) -> Self {
        let clock = Clock::start();
        let flow = Flow {
            protocol: Protocol::Tcp,
            intercept: Intercept::Reverse,
            listener: "trial".into(),
            client: (Ipv4Addr::LOCALHOST, 0).into(),
            orig_dst: std::net::SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into(),
            host,
            process: None,
            user: None,
        };
        Self { library: Library::new(clock), flow, now: clock.now() }
    }

    fn chain(&mut self, functions: &[Arc<FunctionSpec>]) -> Result<Chain, Stop> {
        self.library.stages(functions, &self.flow)
    }

    /// Passes all bytes of `input`, and its end, through the chain.
    fn pass(
        &mut self,
        chain: &mut Chain,
        from: Side,
        input: &mut impl Read,
        out: &mut impl Write,
    ) -> anyhow::Result<Result<(), Stop>> {
        let mut buffer = vec![0; OFFER_MAX];
        loop {
            if let Err(stop) = chain.advance(self.now, from) {
                return Ok(Err(stop));
            }
            let part = chain.take(from, usize::MAX);
            if !part.is_empty() {
                out.write_all(part)?;
                continue;
            }
            if chain.is_over(from) {
                return Ok(Ok(()));
            }
            if !chain.is_open(from) {
                let Some(due) = chain.deadline() else {
                    return Ok(Err(Stop::failed(
                        "the function waits for bytes of the other side, and there are none",
                    )));
                };
                // Move the time past the deadline, so that the function acts.
                self.now = due.max(self.now + Duration::from_micros(1));
                continue;
            }
            let offered = match input.read(&mut buffer)? {
                0 => chain.end(self.now, from).map(|()| Offered::Inside),
                n => match chain.handle(self.now, from, &buffer[..n]) {
                    Ok(Offered::Unchanged) => {
                        out.write_all(&buffer[..n])?;
                        Ok(Offered::Unchanged)
                    }
                    other => other,
                },
            };
            if let Err(stop) = offered {
                return Ok(Err(stop));
            }
        }
    }
}
