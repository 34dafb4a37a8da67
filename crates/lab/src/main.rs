//! `sidetrack-lab`: one command per table or figure of the seeds.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use sidetrack_lab::bare;
use sidetrack_lab::experiments::{chain, engine, epi, flights, http, idle, links, overlay, relay, shunt};
use sidetrack_lab::launch::NodeExec;
use sidetrack_lab::machine::Awake;
use sidetrack_lab::{load, packets};

/// Networks out of namespaces, and the experiments with the peers beside us.
#[derive(Parser)]
#[command(name = "sidetrack-lab", version)]
struct Arguments {
    #[command(subcommand)]
    command: Job,
}

#[derive(Subcommand)]
enum Job {
    /// What a hop through each relay costs, ours beside its peers; fails when a bar is missed.
    Relay(relay::Options),
    /// Round trips from connect to the first answer byte, counted from a capture; fails when a bar is missed.
    Flights(flights::Options),
    /// Memory of idle flows, ours beside its peers; fails when the bar is missed.
    Idle(idle::Options),
    /// The measurements of the EPI paper, its proxies beside ours; fails when a bar is missed.
    Epi(epi::Options),
    /// What functions cost, inside us and in containers, and a change of chains; fails when a bar is missed.
    Chain(chain::Options),
    /// Whether emulated links do what they are asked for; fails when one does not.
    Links(links::Options),
    /// The overlay of Seamless Overlays beside plain TCP over the same links; fails when a bar is missed.
    Overlay(overlay::Options),
    /// What the packet engine costs: its core, over AF_XDP, and beside other proxies; fails when a bar is missed.
    Engine(engine::Options),
    /// The measurements of the NFShunt paper with each fast path; fails when a bar is missed.
    Shunt(shunt::Options),
    /// The HTTP side beside other proxies and caches, and the pages of "Heigh performance proxy"; fails when a bar is missed.
    Http(http::Options),
    /// Run a program inside a node (used by the lab itself).
    #[command(hide = true)]
    NodeExec(NodeExec),
    /// Be the least relay there can be, as a limit (used by the lab itself).
    #[command(hide = true)]
    Bare(bare::Options),
    /// Generate packets of both ends of connections (used by the lab itself).
    #[command(hide = true)]
    Packets {
        /// The job, as JSON.
        spec: String,
    },
    /// Be the least that can stand in the path of packets, as a limit (used by the lab itself).
    #[command(hide = true)]
    Least {
        /// What to be, as JSON.
        spec: String,
    },
    /// Generate load (used by the lab itself).
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
        Job::NodeExec(_) | Job::Bare(_) | Job::Packets { .. } | Job::Least { .. } | Job::Load { .. }
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
        Job::NodeExec(job) => job.run().map(|()| ExitCode::SUCCESS),
        Job::Bare(options) => bare::run(&options).map(|()| ExitCode::SUCCESS),
        Job::Packets { spec } => packets::main(&spec).map(|()| ExitCode::SUCCESS),
        Job::Least { spec } => packets::Least::main(&spec).map(|()| ExitCode::SUCCESS),
        Job::Load { spec } => load::main(&spec).map(|()| ExitCode::SUCCESS),
    }
}
