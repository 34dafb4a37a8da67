//! `sidetrack tap`: writes the packets of a running sidetrack's flows to a pcapng file.

use super::flows::which;
use crate::admin::Client;
use crate::capture::{PacketFile, Stop};
use clap::Args;
use hyper::Method;
use sidetrack_core::filter::Filter;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Exit code for a mistake on the command line.
const USAGE: u8 = 2;

/// How long the last packets may take after the end.
const LAST_PACKETS: Duration = Duration::from_secs(30);

/// Writes the packets of flows to a file that Wireshark opens decrypted
///
/// FILTER selects flows, as for `sidetrack flows`: proc == curl and host == *.example. The command runs until
/// Ctrl-C. Packets have comments with flow, process, rule and host. The file has the secrets of TLS connections
/// that are intercepted: keep it as safe as what was said in them.
///
/// To see packets as they come: sidetrack tap --pcapng - | wireshark -k -i -
#[derive(Clone, Debug, Args)]
pub struct TapArgs {
    /// File for the packets (pcapng); `-`: standard output
    #[arg(long, value_name = "FILE", required = true)]
    pub pcapng: PathBuf,
    /// Filter for the flows; several words form one filter
    pub filter: Vec<String>,
    /// Saves the packets of this time before now, such as 30s, and ends. Needs `ring_bytes` in [capture]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub last: Option<Duration>,
    /// Ends after this time, such as 10s
    #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration, conflicts_with = "last")]
    pub lasts: Option<Duration>,
    /// Ends before the file has more bytes than this, such as 100MiB
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub bytes_max: Option<u64>,
    /// Admin socket of the running sidetrack
    #[arg(long, value_name = "PATH")]
    pub admin: Option<PathBuf>,
    /// Process id of a `sidetrack run` to ask
    #[arg(long, value_name = "PID", conflicts_with = "admin")]
    pub pid: Option<u32>,
}

/// Parses a number of bytes, with a unit or without one.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let unit = match unit {
        "" | "B" => 1,
        "KiB" | "K" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        _ => return Err(format!("'{unit}' is not a unit: write KiB, MiB or GiB")),
    };
    let number: u64 = number.parse().map_err(|_| "write a number, such as 100MiB".to_owned())?;
    number.checked_mul(unit).ok_or_else(|| "this is too large".to_owned())
}

/// Runs the subcommand.
///
/// # Errors
/// An error that a person can act on, in words.
pub fn run(args: &TapArgs) -> anyhow::Result<ExitCode> {
    let text = args.filter.join(" ");
    if let Err(error) = Filter::parse(&text) {
        eprintln!("the filter cannot be read:\n{}", error.caret(&text));
        return Ok(ExitCode::from(USAGE));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(capture(args, &text))
}

/// Ends the capture in order at a signal, or after its time.
async fn end(client: &Client, name: &str, lasts: Option<Duration>) -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let over = async {
        match lasts {
            Some(lasts) => tokio::time::sleep(lasts).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        () = over => {}
    }
    let _: serde_json::Value = client.ask(Method::DELETE, "/v1/capture", &[("name", name)]).await?;
    tokio::select! {
        _ = interrupt.recv() => {}
        () = tokio::time::sleep(LAST_PACKETS) => {}
    }
    Ok(())
}

async fn capture(args: &TapArgs, filter: &str) -> anyhow::Result<ExitCode> {
    let client = Client::new(which::socket(args.admin.as_deref(), args.pid)?);
    let random: [u8; 8] = sidetrack_sys::random::bytes();
    let name = format!("tap-{:016x}", u64::from_be_bytes(random));
    let last_ms = args.last.map(|last| last.as_millis().to_string());
    let mut query = vec![("filter", filter), ("name", name.as_str())];
    query.extend(last_ms.as_deref().map(|last| ("last_ms", last)));
    let mut pieces = client.pieces(Method::POST, "/v1/capture", &query).await?;
    // Not before the capture runs: if it is refused, an older file stays as it is.
    let mut file = PacketFile::create(&args.pcapng, args.bytes_max)?;
    let writing = async {
        while let Some(piece) = pieces.next().await? {
            if let Some(stop) = file.write(&piece)? {
                return Ok(Some(stop));
            }
        }
        Ok::<_, anyhow::Error>(None)
    };
    let stop = tokio::select! {
        written = writing => written?,
        ended = end(&client, &name, args.lasts) => ended.map(|()| None)?,
    };
    if stop != Some(Stop::Gone) {
        eprintln!("{}", file.told());
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(bytes("100"), Ok(100));
        assert_eq!(bytes("3MiB"), Ok(3 << 20));
        assert!(bytes("3MB").is_err() && bytes("MiB").is_err() && bytes("99999999999999GiB").is_err());
    }
}
