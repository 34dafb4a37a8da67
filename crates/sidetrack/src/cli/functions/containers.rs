//! Containers of `fn probe` and `chain try`. They belong to the command and are removed at its end.

use crate::config::Config;
use crate::function::container::{Containers, Guest, Pool, lead_and_wait, probe_and_wait};
use crate::live::Clock;
use crate::rights::DataUser;
use sidetrack_core::function::{ContainerSpec, FunctionSpec, Probe};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The containers of one command; on drop all of them are removed.
pub(super) struct Yard(Arc<Containers>);

impl Drop for Yard {
    fn drop(&mut self) {
        if let Err(error) = self.0.finish() {
            tracing::error!("containers: {error}; `sidetrack cleanup` removes what is left");
        }
    }
}

impl Yard {
    /// Uses the engine that the configuration names.
    ///
    /// # Errors
    /// No container engine was found, or this user may not use it.
    pub(super) fn open(config: &Config) -> anyhow::Result<Self> {
        let yard = Self(Containers::start(
            config.container_engine.as_deref(),
            DataUser::of(&config.user)?.as_ref(),
        )?);
        yard.0.run(Clock::start())?;
        Ok(yard)
    }

    /// Starts one container of a function and waits until it is healthy; returns how long that took.
    ///
    /// # Errors
    /// It does not become healthy; says why.
    pub(super) fn start(
        &self,
        spec: &FunctionSpec,
        container: &ContainerSpec,
    ) -> Result<(Arc<Pool>, Guest, Duration), String> {
        let began = Instant::now();
        let pool =
            self.0.pool(&spec.name, &ContainerSpec { instances: 1, replicas_max: 1, ..container.clone() });
        pool.wait()?;
        let guest = pool.pick(&[]).map_err(|why| format!("function '{}': {why}", spec.name))?;
        Ok((pool, guest, began.elapsed()))
    }
}

/// Passes a client's bytes through a container; returns its output, and the times for connecting and for the transfer.
pub(super) fn led(guest: &Guest, bytes: &[u8]) -> Result<(Vec<u8>, Duration, Duration), String> {
    let led = lead_and_wait(guest, bytes)?;
    Ok((led.out, led.connect, led.moving))
}

/// `fn probe`: returns the report, and whether the function works as it must.
///
/// # Errors
/// The container does not become healthy; says why.
pub(super) fn report(
    yard: &Yard,
    spec: &FunctionSpec,
    container: &ContainerSpec,
    count: u32,
) -> Result<(String, bool), String> {
    let (_pool, guest, started) = yard.start(spec, container)?;
    let (mut connects, mut trips) = (Vec::new(), Vec::new());
    let mut echo = Ok(());
    for probed in probe_and_wait(&guest, count.max(1))? {
        connects.push(probed.connect);
        trips.push(probed.round_trip);
        echo = echo.and(probed.echo);
    }
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "function    {} ({}, speaks {})", spec.name, container.image, container.speaks);
    let _ = writeln!(text, "started     {:.0} ms until it was well", ms(started));
    for (what, times) in [("connect", &mut connects), ("round trip", &mut trips)] {
        times.sort_unstable();
        let (median, most) = (times[times.len() / 2], times[times.len() - 1]);
        let _ = writeln!(
            text,
            "{what:<11} {:.2} ms median, {:.2} ms at most, of {}",
            ms(median),
            ms(most),
            times.len()
        );
    }
    let is_well = match (&echo, container.probe) {
        (Ok(()), _) => {
            text.push_str("echo        bytes come out as they went in, both ways, and so do the ends\n");
            true
        }
        (Err(why), Probe::Connect) => {
            let _ = writeln!(text, "echo        {why} (probe = \"connect\" allows that)");
            true
        }
        (Err(why), Probe::Echo) => {
            let _ = writeln!(text, "echo        {why}");
            false
        }
    };
    Ok((text, is_well))
}
