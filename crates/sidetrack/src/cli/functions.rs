//! `sidetrack fn test` and `sidetrack chain try`: functions at work on bytes at hand, without a socket.

use super::Printed;
use crate::config::Config;
use crate::function::Library;
use crate::live::Clock;
use sidetrack_core::chain::{Chain, OFFER_MAX, Offered};
use sidetrack_core::flow::{Flow, HostName, Intercept, Side};
use sidetrack_core::function::{ChainSpec, FunctionSpec, OnChange, Stop};
use sidetrack_core::policy::Action;
use sidetrack_core::time::Instant;
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
    /// Leads standard input through a function to standard output. Exit code 1: the function ended the flow
    Test(TestArgs),
}

/// What `fn test` is to do.
#[derive(Clone, Debug, clap::Args)]
pub struct TestArgs {
    /// The function's name in the configuration
    pub name: String,
    /// The configuration
    #[arg(short, long, value_name = "FILE", default_value = Config::PATH)]
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
    /// The configuration
    #[arg(short, long, value_name = "FILE", default_value = Config::PATH)]
    pub config: PathBuf,
    /// Bytes that the client sends, 1 to 1073741824
    #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub bytes: u64,
}

/// Runs `fn`.
///
/// # Errors
/// Standard input or output fails.
pub fn run(args: &FnArgs) -> anyhow::Result<ExitCode> {
    let FnCommand::Test(test) = &args.command;
    let mut out = std::io::stdout().lock();
    Ok(test_function(test, &mut std::io::stdin().lock(), &mut out, super::colours())?.print())
}

/// Runs `chain`.
///
/// # Errors
/// None that the report does not tell; as [`run`].
pub fn run_chain(args: &ChainArgs) -> anyhow::Result<ExitCode> {
    let ChainCommand::Try(args) = &args.command;
    Ok(try_chain(args, super::colours())?.print())
}

/// `fn test`: bytes from `input` through a function to `out`.
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
    let Some(spec) = config.functions.iter().find(|spec| *spec.name == *args.name) else {
        let names: Vec<_> = config.functions.iter().map(|spec| &*spec.name).collect();
        return Ok(failed(
            2,
            format!("there is no function '{}'; there are: {}\n", args.name, names.join(", ")),
        ));
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

/// `chain try`: what each function of a rule's chain costs.
///
/// # Errors
/// None in memory.
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
    let mut text =
        format!("{:<20} {:<8} {:>12} {:>10} {:>12}\n", "function", "kind", "bytes out", "us/MB", "waits ms");
    for spec in &chain.functions {
        let mut trial = Trial::new(None);
        let began = trial.now;
        let mut out = Vec::with_capacity(bytes.len());
        let clock = Clock::start();
        let mut stage = match trial.chain(std::slice::from_ref(spec)) {
            Ok(stage) => stage,
            Err(stop) => return Ok(failed(1, format!("{text}{}: {}\n", stop.reason, stop.detail))),
        };
        if let Err(stop) = trial.pass(&mut stage, Side::Client, &mut bytes.as_slice(), &mut out)? {
            return Ok(failed(1, format!("{text}{}: {}\n", stop.reason, stop.detail)));
        }
        let spent = (clock.now() - Instant::ZERO).as_micros() as f64;
        let waits = (trial.now - began).as_millis();
        let cost = spent * 1e6 / length as f64;
        let (name, kind) = (&spec.name, spec.kind.as_str());
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<20} {kind:<8} {:>12} {cost:>10.1} {waits:>12}", out.len());
        bytes = out;
    }
    Ok(Printed { out: text, err: String::new(), code: 0 })
}

fn failed(code: u8, err: String) -> Printed {
    Printed { out: String::new(), err, code }
}

/// Functions without a network: time is a number, and waiting for a deadline is to set it.
struct Trial {
    library: Library,
    flow: Flow,
    now: Instant,
}

impl Trial {
    fn new(host: Option<HostName>) -> Self {
        let clock = Clock::start();
        let flow = Flow {
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
        let spec = ChainSpec { functions: functions.to_vec(), on_change: OnChange::Keep };
        self.library.chain(&spec, &self.flow)
    }

    /// All bytes of `input`, and its end, through the chain.
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
                // A deadline that has passed brings something on by itself.
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
