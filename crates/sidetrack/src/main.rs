//! The program `sidetrack`: all of its work is in subcommands.

use clap::{CommandFactory as _, Parser, Subcommand};
use sidetrack::app::{self, UpOptions};
use sidetrack::cli::{
    attach, bugreport, ca, cache, check, cleanup, doctor, explain, flows, functions, graph, jobs, login,
    overlay, pages, plan, profile, reload, run, schema, shunt, tap, top, tunnel, upgrade,
};
#[cfg(feature = "control")]
use sidetrack::cli::{domain, orchestrate, policy};
use sidetrack::config::{BadConfiguration, Config};
use sidetrack::steer;
use sidetrack_sys::probe;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// The futures of flows during setup are larger than the blocks that the system's allocator caches per thread.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The exit code of all commands except `run` if the configuration is rejected. It equals that for wrong arguments.
const BAD_CONFIGURATION: u8 = 2;

/// Catches the traffic of unmodified programs, decides by policy, carries it.
#[derive(Parser)]
#[command(version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs one command and carries its connections; needs no root and leaves nothing behind
    Run(run::RunArgs),
    /// Runs a node with the listeners of a configuration file
    Up {
        /// The configuration file [default: ./sidetrack.toml, else /etc/sidetrack/sidetrack.toml]
        #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
        config: PathBuf,
        /// End by itself unless it is confirmed within this time, by `sidetrack reload --confirmed`
        #[arg(long, value_name = "TIME", value_parser = upgrade::time)]
        confirm: Option<std::time::Duration>,
        /// Goes on with a running node, connected by standard input; for its starter, not for people
        #[arg(long, hide = true)]
        takes_over: bool,
    },
    /// Loads the configuration of a running node again, or tries another one that must be confirmed
    Reload(reload::ReloadArgs),
    /// Lets another version of the program go on with a running node, without a refused connection
    Upgrade(upgrade::UpgradeArgs),
    /// Catches connections of a process, container or network that runs already (root)
    Attach(attach::AttachArgs),
    /// Collects what a maintainer needs to know about a fault, without secrets
    Bugreport(bugreport::BugreportArgs),
    /// Creates the certificate authority for TLS interception
    Ca(ca::CaArgs),
    /// Lists and removes stored HTTP responses
    Cache(cache::CacheArgs),
    /// Tries the chain of a rule and shows the cost of each function
    Chain(functions::ChainArgs),
    /// Checks a configuration file and shows every error with its place
    Check(check::CheckArgs),
    /// Says how a job is done, or explains a command
    Help(jobs::help::HelpArgs),
    /// Writes a commented configuration for a job
    Init(jobs::init::InitArgs),
    /// Prints completions for a shell
    Completions(pages::CompletionsArgs),
    /// Removes what a crash may have left: rules, routes, control groups, sockets, containers
    Cleanup(cleanup::CleanupArgs),
    /// Checks this machine, kernel and user, and says how to fix what is missing
    Doctor(doctor::DoctorArgs),
    /// Runs the agent of a party: grants access, offers nodes, configures proxies
    #[cfg(feature = "control")]
    Domain(domain::DomainArgs),
    /// Says which rule decides about a flow, and why; sends no packet
    Explain(explain::ExplainArgs),
    /// Tries one function of a configuration on given bytes
    Fn(functions::FnArgs),
    /// Draws the functions that flows of each rule pass, with branches and where they merge
    Graph(graph::GraphArgs),
    /// Shows, follows or ends the flows of a running sidetrack
    Flows(flows::FlowsArgs),
    /// Runs the orchestrator and sets up applications across domains
    #[cfg(feature = "control")]
    Orchestrate(orchestrate::OrchestrateArgs),
    /// Writes manual pages of all commands into a folder; packages do so
    #[command(hide = true)]
    Man(pages::ManArgs),
    /// Manages keys, links and paths of the overlay
    Overlay(overlay::OverlayArgs),
    /// Prints every privileged action of a configuration without doing it
    Plan(plan::PlanArgs),
    /// Measures how long a running sidetrack works at each stage of the data path
    Profile(profile::ProfileArgs),
    /// Shows, checks and replaces a data-flow agreement
    #[cfg(feature = "control")]
    Policy(policy::PolicyArgs),
    /// Prints the schema of the configuration, of records, or of the admin interface
    Schema(schema::SchemaArgs),
    /// Shows and changes which flows take the fast path
    Shunt(shunt::ShuntArgs),
    /// Replaces the file of the agreement; started by `up`, not by people
    #[command(hide = true)]
    AgreementWriter,
    /// Uses the sockets of this host for `domain serve`, which starts it; not for people
    #[command(hide = true)]
    #[cfg(feature = "control")]
    DomainSockets,
    /// Moves flows to the fast path; started by `up`, not by people
    #[command(hide = true)]
    ShuntProcess,
    /// Starts functions in containers; started by `up`, not by people
    #[command(hide = true)]
    ContainersProcess,
    /// Writes the packets of flows to a file for Wireshark, with comments and TLS secrets
    Tap(tap::TapArgs),
    /// Shows the flows of a running sidetrack as they change, in this terminal
    Top(top::TopArgs),
    /// Creates keys and certificates for both ends of a tunnel
    Tunnel(tunnel::TunnelArgs),
    /// Keeps the rights that the data path gives up; started by `up`, not by people
    #[command(hide = true)]
    Keeper,
    /// Starts the process that replaces a node; started by `up`, not by people
    #[command(hide = true)]
    Starter,
}

fn main() -> ExitCode {
    sidetrack::log::start(sidetrack::cli::colours());
    // Read the arguments before passwords in them are overwritten. If overwriting fails, they stay as visible as before.
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let _ = sidetrack_sys::arguments::mask_passwords();
    if arguments.first().is_some_and(|name| login::is_meant(name)) {
        return login::run(&arguments);
    }
    let command = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli.command,
        Err(error) => return refused(&error, &arguments),
    };
    let result = match command {
        Command::Up { config, confirm, takes_over } => {
            steer::set_session(probe::ssh_session());
            let run = if takes_over { app::take_over } else { app::up };
            run(&UpOptions { config, confirm }).map(|()| ExitCode::SUCCESS)
        }
        Command::Reload(args) => reload::run(&args),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Run(args) if args.top => Ok(top::run_command(&args, &arguments)),
        Command::Run(args) => run::run(&args),
        Command::Attach(args) => attach::run(&args),
        Command::Bugreport(args) => bugreport::run(&args),
        Command::Ca(args) => ca::run(&args),
        Command::Cache(args) => cache::run(&args),
        Command::Chain(args) => functions::run_chain(&args),
        Command::Fn(args) => functions::run(&args),
        Command::Graph(args) => graph::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Cleanup(args) => cleanup::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(feature = "control")]
        Command::Domain(args) => domain::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Flows(args) => flows::run(&args),
        #[cfg(feature = "control")]
        Command::Orchestrate(args) => orchestrate::run(&args),
        Command::Help(args) => jobs::help::run(Cli::command(), &args),
        Command::Init(args) => jobs::init::run(&args),
        Command::Completions(args) => pages::completions(Cli::command(), &args),
        Command::Man(args) => pages::man(Cli::command(), &args),
        Command::Overlay(args) => overlay::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Profile(args) => profile::run(&args),
        #[cfg(feature = "control")]
        Command::Policy(args) => policy::run(&args),
        Command::Schema(args) => schema::run(&args),
        Command::Shunt(args) => shunt::run(&args),
        Command::Tap(args) => tap::run(&args),
        Command::Top(args) => top::run(&args),
        Command::AgreementWriter => app::agreement_writer().map(|()| ExitCode::SUCCESS),
        #[cfg(feature = "control")]
        Command::DomainSockets => app::domain_sockets().map(|()| ExitCode::SUCCESS),
        Command::ShuntProcess => app::shunt().map(|()| ExitCode::SUCCESS),
        Command::ContainersProcess => app::containers().map(|()| ExitCode::SUCCESS),
        Command::Tunnel(args) => tunnel::run(&args),
        Command::Keeper => app::keep().map(|()| ExitCode::SUCCESS),
        Command::Starter => app::starter().map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        // Standard error may be closed, which must not cause a panic.
        let _ = writeln!(std::io::stderr(), "sidetrack: {error:#}");
        if error.chain().any(|cause| cause.is::<BadConfiguration>()) {
            return ExitCode::from(BAD_CONFIGURATION);
        }
        ExitCode::FAILURE
    })
}

/// Prints the error in the arguments, or the requested help. For wrong arguments, `run` has an exit code that commands
/// rarely have. So a script can distinguish them from a failure of the command.
fn refused(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    let _ = error.print();
    let of_run = arguments.get(1).is_some_and(|word| word == "run" || word == "attach");
    match error.exit_code() {
        0 => ExitCode::SUCCESS,
        _ if of_run => ExitCode::from(run::OWN_FAILURE),
        code => ExitCode::from(u8::try_from(code).unwrap_or(2)),
    }
}
