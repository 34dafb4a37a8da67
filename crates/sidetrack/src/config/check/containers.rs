//! `[containers]`, and `[function.NAME]` of kind "container".

use super::super::raw::function::{Probe as RawProbe, Speaks, WayBack as RawWayBack};
use super::super::{At, raw};
use super::Check;
use sidetrack_core::carrier::Socks6Dialect;
use sidetrack_core::function::{
    ContainerSpec, ContainerUser, ContainerUserError, Probe, Resources, Spoken, WayBack,
};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The default port of SOCKS proxies (IANA).
const PORT: u64 = 1080;
/// Least memory of a container that container engines accept.
const MEMORY_MIN: u64 = 6 << 20;

impl Check<'_> {
    /// The path of the container engine's socket, if the file names one.
    pub(super) fn container_engine(&mut self, containers: &raw::Containers) -> Option<PathBuf> {
        containers.engine.as_ref().map(|path| self.path(path, &[]))
    }

    pub(super) fn container(&mut self, function: &At<raw::Function>) -> Option<ContainerSpec> {
        let Some(image) = function.image.as_ref().filter(|image| !image.trim().is_empty()) else {
            let help = "write `image = \"localhost/audit:1\"`; `podman images` lists those that are there";
            self.error(function.span(), "a container is made of an image, and none is named", help);
            return None;
        };
        let speaks = match function.speaks.as_deref() {
            Some(Speaks::Socks5) => Spoken::Socks5,
            None | Some(Speaks::Socks6) => Spoken::Socks6(Socks6Dialect::Draft),
            Some(Speaks::Socksx) => Spoken::Socks6(Socks6Dialect::Socksx),
            Some(Speaks::Socksx010) => Spoken::Socks6(Socks6Dialect::Socksx010),
            Some(Speaks::ProxyV2) => Spoken::ProxyV2,
        };
        let or = |value: Option<u64>, default: u64| value.unwrap_or(default);
        let millis = " milliseconds";
        let port = self.number(function.port.as_ref(), 1..=65_535, "");
        let (instances, replicas_max) = self.replicas(function);
        let flows_per_replica = self.number(function.flows_per_replica.as_ref(), 1..=1_000_000, " flows");
        let shrink_after = self.number(function.shrink_after_ms.as_ref(), 100..=86_400_000, millis);
        let interval = self.number(function.probe_interval_ms.as_ref(), 100..=3_600_000, millis);
        let timeout = self.number(function.probe_timeout_ms.as_ref(), 10..=60_000, millis);
        let start = self.number(function.start_timeout_ms.as_ref(), 100..=600_000, millis);
        let command = function.command.as_ref().map(|list| list.items()).unwrap_or_default();
        Some(ContainerSpec {
            image: image.as_str().into(),
            command: command.iter().map(|word| word.to_string()).collect(),
            environment: self.variables(function),
            speaks,
            port: u16::try_from(or(port, PORT)).unwrap_or(u16::MAX),
            way_back: self.way_back(function, speaks),
            instances,
            replicas_max,
            flows_per_replica: u32::try_from(or(flows_per_replica, 100)).unwrap_or(u32::MAX),
            user: self.container_user(function),
            resources: self.resources(function),
            probe: match function.probe.as_deref() {
                None | Some(RawProbe::Echo) => Probe::Echo,
                Some(RawProbe::Connect) => Probe::Connect,
            },
            shrink_after_ms: or(shrink_after, 30_000),
            probe_interval_ms: or(interval, 2_000),
            probe_timeout_ms: or(timeout, 1_000),
            start_timeout_ms: or(start, 10_000),
        })
    }

    /// The fewest and the most containers.
    fn replicas(&mut self, function: &raw::Function) -> (u16, u16) {
        let mut number = |at: Option<&At<u16>>| {
            self.number(at, 1..=64, " containers").and_then(|number| u16::try_from(number).ok())
        };
        let (fixed, min) = (number(function.instances.as_ref()), number(function.replicas_min.as_ref()));
        let max = number(function.replicas_max.as_ref());
        if let (Some(at), Some(_)) = (&function.replicas_min, fixed) {
            let help = "write `replicas_min` and `replicas_max` for a pool that grows, or `instances` for one that does not";
            self.error(at.span(), "`instances` says already how many containers run", help);
        }
        let fewest = min.or(fixed).unwrap_or(1);
        let most = max.unwrap_or(fewest);
        if let Some(at) = function.replicas_max.as_ref().filter(|_| most < fewest) {
            let help = "raise `replicas_max`, or lower the fewest";
            self.error(at.span(), format!("at most {most} containers, and at least {fewest}"), help);
        }
        (fewest, most.max(fewest))
    }

    fn way_back(&mut self, function: &raw::Function, speaks: Spoken) -> WayBack {
        match (&function.way_back, speaks) {
            (Some(way), Spoken::Socks5 | Spoken::ProxyV2) if matches!(**way, RawWayBack::Link) => {
                let help = "take it out, or let the function speak \"socks6\" or a layout of socksx";
                self.error(way.span(), format!("\"{speaks}\" has no metadata to name a link in"), help);
                WayBack::Destination
            }
            (Some(way), _) => match **way {
                RawWayBack::Destination => WayBack::Destination,
                RawWayBack::Link => WayBack::Link,
            },
            (None, Spoken::Socks6(Socks6Dialect::Socksx | Socks6Dialect::Socksx010)) => WayBack::Link,
            (None, _) => WayBack::Destination,
        }
    }

    fn container_user(&mut self, function: &raw::Function) -> ContainerUser {
        let Some(user) = &function.user else { return ContainerUser::default() };
        user.parse().unwrap_or_else(|error| {
            let help = match error {
                ContainerUserError::Form => {
                    "write `user = \"65534:65534\"`, or the numbers that own the image's files"
                }
                ContainerUserError::Root => "write other numbers, or `user = \"root\"` if it has to be root",
            };
            self.error(user.span(), error.to_string(), help);
            ContainerUser::default()
        })
    }

    fn resources(&mut self, function: &raw::Function) -> Resources {
        let default = Resources::default();
        let count = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let memory = self.number(function.memory_bytes.as_ref(), MEMORY_MIN..=1 << 40, " bytes");
        let cpu = self.number(function.cpu_percent.as_ref(), 1..=102_400, " per cent");
        let pids = self.number(function.pids.as_ref(), 1..=32_768, " processes");
        Resources {
            memory_bytes: memory.unwrap_or(default.memory_bytes),
            cpu_percent: cpu.map_or(default.cpu_percent, count),
            pids: pids.map_or(default.pids, count),
        }
    }

    fn variables(&mut self, function: &raw::Function) -> BTreeMap<String, String> {
        let Some(variables) = &function.environment else { return BTreeMap::new() };
        for (name, value) in &**variables {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                let help = "a name has no '=', and neither name nor value has a NUL";
                self.error(value.span(), format!("'{name}' cannot be a variable"), help);
            }
        }
        variables.iter().map(|(name, value)| (name.clone(), value.to_string())).collect()
    }
}
