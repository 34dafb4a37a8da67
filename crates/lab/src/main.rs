//! `sidetrack-lab`: one command per group of tables or figures of the five documents (docs/seeds.md).

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use sidetrack_lab::experiments::{
    chain, crash, engine, epi, faults, flights, http, idle, links, overlay, relay, shunt, soak, udp, wire,
};
use sidetrack_lab::launch::NodeExec;
use sidetrack_lab::machine::Awake;
use sidetrack_lab::{bare, bed};
use sidetrack_lab::{datagrams, load, packets};

/// Makes networks of namespaces, and measures Sidetrack beside its peers in them.
#[derive(Parser)]
#[command(name = "sidetrack-lab", version)]
struct Arguments {
    #[command(subcommand)]
    command: Job,
}

#[derive(Subcommand)]
enum Job {
    /// Measures what a hop through each relay costs, ours beside its peers; fails if a bar is missed.
    Relay(relay::Options),
    /// Counts round trips from connect to the first answer byte, from a capture; fails if a bar is missed.
    Flights(flights::Options),
    /// Measures the memory of idle flows, ours beside its peers; fails if the bar is missed.
    Idle(idle::Options),
    /// Repeats the measurements of the EPI paper, its proxies beside ours; fails if a bar is missed.
    Epi(epi::Options),
    /// Measures what functions cost, inside Sidetrack and in containers, and a change of chains; fails if a bar is
    /// missed.
    Chain(chain::Options),
    /// Checks that emulated links behave as configured; fails if one does not.
    Links(links::Options),
    /// Repeats the evaluation of Seamless Overlays beside plain TCP over the same links; fails if a bar is missed.
    Overlay(overlay::Options),
    /// Measures the packet engine: its core, over AF_XDP, and beside other proxies; fails if a bar is missed.
    Engine(engine::Options),
    /// Repeats the measurements of the NFShunt paper with each fast path; fails if a bar is missed.
    Shunt(shunt::Options),
    /// Measures the HTTP side beside other proxies and caches, and the pages of "Heigh performance proxy"; fails if a
    /// bar is missed.
    Http(http::Options),
    /// Measures UDP: a port that leads to a server, and SOCKS5, beside other proxies; fails if a bar is missed.
    Udp(udp::Options),
    /// Kills Sidetrack at random points of start, reload and stop; fails if something is left or a restart fails.
    Crash(crash::Options),
    /// Makes mixed traffic with reloads and faults; fails if a byte is wrong, a flow is cut without a fault, or memory grows.
    Soak(soak::Options),
    /// Reloads often under load, and takes memory, disks and the clock away; fails if a flow is cut or a byte is wrong.
    Faults(faults::Options),
    /// Measures how flows go to the wire; fails if a bar is missed.
    Wire(wire::Options),
    /// Runs a program inside a node (used by the lab itself).
    #[command(hide = true)]
    NodeExec(NodeExec),
    /// Runs the smallest possible relay, as a limit (used by the lab itself).
    #[command(hide = true)]
    Bare(bare::Options),
    /// Does a job on a host of a test bed (used by the lab itself).
    #[command(hide = true)]
    Bed {
        #[command(subcommand)]
        job: bed::Job,
    },
    /// Generates packets of both ends of connections (used by the lab itself).
    #[command(hide = true)]
    Packets {
        /// The job, as JSON.
        spec: String,
    },
    /// Runs the smallest program on the path of packets, as a limit (used by the lab itself).
    #[command(hide = true)]
    Least {
        /// The job, as JSON.
        spec: String,
    },
    /// Generates a load of datagrams (used by the lab itself).
    #[command(hide = true)]
    Datagrams {
        /// The job, as JSON.
        spec: String,
    },
    /// Sends datagrams back (used by the lab itself).
    #[command(hide = true)]
    Echo(datagrams::EchoOptions),
    /// Sends bytes over QUIC (used by the lab itself).
    #[command(hide = true)]
    Quic(datagrams::QuicOptions),
    /// Generates load (used by the lab itself).
    #[command(hide = true)]
    Load {
        /// The job, as JSON.
        spec: String,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("sidetrack-lab: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let is_experiment = !matches!(
        arguments.command,
        Job::NodeExec(_)
            | Job::Bare(_)
            | Job::Bed { .. }
            | Job::Packets { .. }
            | Job::Least { .. }
            | Job::Load { .. }
            | Job::Datagrams { .. }
            | Job::Echo(_)
            | Job::Quic(_)
    );
    let _awake = is_experiment.then(Awake::hold).flatten();
    match arguments.command {
        Job::Relay(options) => relay::run(&options),
        Job::Flights(options) => flights::run(&options),
        Job::Idle(options) => idle::run(&options),
        Job::Epi(options) => epi::run(&options),
        Job::Chain(options) => chain::run(&options),
        Job::Links(options) => links::run(&options),
        Job::Overlay(options) => overlay::run(&options),
        Job::Engine(options) => engine::run(&options),
        Job::Shunt(options) => shunt::run(&options),
        Job::Http(options) => http::run(&options),
        Job::Crash(options) => crash::run(&options),
        Job::Soak(options) => soak::run(&options),
        Job::Faults(options) => faults::run(&options),
        Job::Wire(options) => wire::run(&options),
        Job::NodeExec(job) => job.run().map(|()| ExitCode::SUCCESS),
        Job::Bare(options) => bare::run(&options).map(|()| ExitCode::SUCCESS),
        Job::Bed { job } => bed::main(&job).map(|()| ExitCode::SUCCESS),
        Job::Packets { spec } => packets::main(&spec).map(|()| ExitCode::SUCCESS),
        Job::Least { spec } => packets::Least::main(&spec).map(|()| ExitCode::SUCCESS),
        Job::Udp(options) => udp::run(&options),
        Job::Datagrams { spec } => datagrams::main(&spec).map(|()| ExitCode::SUCCESS),
        Job::Echo(options) => datagrams::echo(&options).map(|()| ExitCode::SUCCESS),
        Job::Quic(options) => datagrams::serve_quic(&options).map(|()| ExitCode::SUCCESS),
        Job::Load { spec } => load::main(&spec).map(|()| ExitCode::SUCCESS),
    }
}
