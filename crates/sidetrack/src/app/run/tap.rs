//! How a command's TLS connections are intercepted: all of them, or those to servers that get secrets.

use crate::config::tap::{ROOT_FILE, authority};
use crate::config::{Config, Tap};
use crate::intercept::run::Trusted;
use crate::tls::{BUNDLES, Roots, Scope, Signer, certificates_in, tap_authority};
use sidetrack_core::flow::Host;
use sidetrack_core::http::tap::TapRules;
use sidetrack_core::placeholder::Secrets;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How long the authority of one command is valid, in days.
const OWN_DAYS: u32 = 365;

/// How a command's TLS connections are intercepted.
#[derive(Clone, Debug)]
pub struct TapCommand {
    /// The folder of the authority; `None`: the configuration names it, or one is made that ends with the command.
    pub ca: Option<PathBuf>,
    /// The file for TLS secrets (the key log).
    pub keylog: Option<PathBuf>,
    /// The file for requests (the HAR archive).
    pub har: Option<PathBuf>,
    /// Most bytes of content of each request and response in it. `None`: as the configuration says.
    pub har_bodies_max: Option<usize>,
    /// More trusted certificates, in PEM.
    pub trust_pem: String,
    /// Servers whose certificates are not verified.
    pub unverified_hosts: Vec<Host>,
    /// More ports whose connections are intercepted.
    pub ports: Vec<u16>,
    /// The secrets of the command.
    pub secrets: Option<Arc<Secrets>>,
    /// Whether all connections are intercepted, and not only those to servers that get secrets.
    pub opens_all: bool,
}

impl TapCommand {
    /// Prepares interception, and the certificates that the command must trust.
    pub(super) fn prepare(&self, config: &Config) -> anyhow::Result<(Tap, Trusted)> {
        let mut tap = self.begin(config)?;
        if self.keylog.is_some() {
            tap.keylog.clone_from(&self.keylog);
        }
        if self.har.is_some() {
            tap.har.clone_from(&self.har);
        }
        tap.har_bodies_max = self.har_bodies_max.unwrap_or(tap.har_bodies_max);
        let mut trusted = Trusted {
            pem: tap.signer.root_pem().to_owned(),
            certificates: vec![tap.signer.root().clone()],
            root_file: self.ca.as_ref().map(|folder| folder.join(ROOT_FILE)),
        };
        if !self.trust_pem.is_empty() {
            // The command itself verifies connections that are not intercepted.
            trusted.pem = format!("{}\n{}", trusted.pem, self.trust_pem);
            trusted.certificates.extend(certificates_in(&self.trust_pem));
            tap.trust_pem = Some(format!("{}\n{}", tap.trust_pem.unwrap_or_default(), self.trust_pem).into());
        }
        tap.unverified_hosts.extend(self.unverified_hosts.iter().cloned());
        let ports = self.ports.iter().map(|port| (*port, *port));
        tap.rules.ports = tap.rules.ports.ranges().chain(ports).collect();
        for host in &self.unverified_hosts {
            anyhow::ensure!(
                tap.signer.leaf(host).is_some(),
                "--trust {host}: connections to it are not intercepted, because the authority may not sign for it; `sidetrack \
                 ca init` makes one that may"
            );
        }
        self.guard(&mut tap)?;
        let hosts = tap.unverified_hosts.iter().cloned();
        tap.roots = Roots::of_system_and(tap.trust_pem.as_deref())?.without_verifying(hosts);
        Ok((tap, trusted))
    }

    /// The authority and what is written about interception.
    fn begin(&self, config: &Config) -> anyhow::Result<Tap> {
        if let Some(tap) = config.tap.as_deref().filter(|_| self.ca.is_none()) {
            return Ok(tap.clone());
        }
        let signer = match (&self.ca, &self.secrets) {
            (Some(folder), _) => of_folder(folder)?,
            (None, Some(secrets)) if !self.opens_all => {
                anyhow::ensure!(
                    BUNDLES.iter().any(|path| Path::new(path).is_file()),
                    "--secret: the command could not verify its connections: this system has no list of authorities, to which that of \
                     the command could be added; install the package ca-certificates"
                );
                of_command(secrets)?
            }
            (None, _) => anyhow::bail!("the configuration has no [tap]: name the authority's folder (--ca)"),
        };
        Ok(Tap {
            signer: Arc::new(signer),
            rules: TapRules::default(),
            trust_pem: None,
            unverified_hosts: Vec::new(),
            roots: Roots::of_system_and(None)?,
            keylog: None,
            har: None,
            har_bodies_max: 0,
            secrets: None,
        })
    }

    /// Adds the secrets, and checks that connections to their servers are intercepted and verified.
    fn guard(&self, tap: &mut Tap) -> anyhow::Result<()> {
        let Some(secrets) = &self.secrets else { return Ok(()) };
        let of_secrets = secrets.servers().map(|server| (server.port, server.port));
        if self.opens_all {
            tap.rules.ports = tap.rules.ports.ranges().chain(of_secrets).collect();
        } else {
            tap.rules.ports = of_secrets.collect();
            tap.rules.only = Some(secrets.servers().map(|server| server.host.clone()).collect());
        }
        for server in secrets.servers() {
            let host = &server.host;
            anyhow::ensure!(
                !tap.unverified_hosts.contains(host),
                "--secret for {host}: its certificates are not verified, so anyone on the path could get the secret; name the \
                 file of its certificate instead: --trust FILE"
            );
            if let Err(why) = tap.rules.consider(Some(host), server.port) {
                anyhow::bail!("--secret for {host}: its connections are not intercepted: {why}");
            }
            anyhow::ensure!(
                tap.signer.leaf(host).is_some(),
                "--secret for {host}: the authority may not sign for it; leave --tap and --ca out, or make one that may: \
                 `sidetrack ca init`"
            );
        }
        tap.secrets = Some(secrets.clone());
        Ok(())
    }
}

fn of_folder(folder: &Path) -> anyhow::Result<Signer> {
    authority(folder).map_err(|error| anyhow::anyhow!("{error}\nhelp: {}", error.help()))
}

/// Makes an authority for the servers that get secrets. It stands in no file.
fn of_command(secrets: &Secrets) -> anyhow::Result<Signer> {
    let scope = |host: &Host| match host {
        Host::Name(name) => Scope::Below(name.clone()),
        Host::Ip(ip) => Scope::Net((*ip).into()),
    };
    let scopes: Vec<_> = secrets.servers().map(|server| scope(&server.host)).collect();
    let made = tap_authority(&scopes, OWN_DAYS)?;
    Ok(Signer::new(&made.root_pem, &made.signing_pem, &made.signing_key_pem)?)
}
