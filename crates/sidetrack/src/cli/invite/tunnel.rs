//! `tunnel invite` and `tunnel join`.

use super::file::{self, Places, beside, value, values, with_block, with_item};
use super::host::{self, Guest, Inviting};
use super::{Waiting, guest, put_in_force, runtime, shown};
use crate::cli::prepared::{Prepared, read};
use crate::config::{BadConfiguration, Config, List, ListenerKind};
use crate::tls::{self, Peer, Pin, RawKey};
use anyhow::Context as _;
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::invitation::host::End;
use sidetrack_core::invitation::{Invitation, Kind, Message, TunnelOffer};
use std::io::Write as _;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;

/// The port of the tunnel in a new file.
const PORT: u16 = 4433;

/// Days until a certificate that is made here expires; a pinned key is trusted after that, too.
const DAYS: u32 = 3650;

/// Lets one near side join with one line of text, instead of keys and pins by hand
///
/// Prints the invitation and waits until the near side has joined by `sidetrack tunnel join`. Then the near side's key is in the
/// configuration, and the node that runs has it in force. Ctrl-C withdraws the invitation.
#[derive(Clone, Debug, clap::Args)]
pub struct InviteArgs {
    /// The name of the near side, a DNS name: rules here know it as `socks_user`
    pub name: String,
    /// The configuration of this far side; a new one is written if there is none
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// Where the near side reaches this host: a name or address, with a port if it is not that of the listener; several
    /// times for several paths [default: the addresses of the listener]
    #[arg(long, value_name = "HOST[:PORT]")]
    pub address: Vec<String>,
    /// The tunnel listener that it joins, if there are several
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,
    /// A network that the near side may reach through this host; adds a rule; several times
    #[arg(long, value_name = "NETWORK")]
    pub to: Vec<String>,
    /// Where and how long it waits.
    #[command(flatten)]
    pub waiting: Waiting,
}

/// Joins a far side by its invitation: makes a key, and adds the tunnel to the configuration
#[derive(Clone, Debug, clap::Args)]
pub struct JoinArgs {
    /// The line that `sidetrack tunnel invite` has printed; "-" reads it from standard input
    #[arg(value_name = "INVITATION")]
    pub invitation: String,
    /// The configuration that gets the tunnel; a new one is written if there is none
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// The name of the tunnel in rules here: `carrier = "tunnel:NAME"` [default: the first part of the far side's name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// A network that connections of this host reach over the tunnel; adds a listener and a rule; several times
    #[arg(long, value_name = "NETWORK")]
    pub to: Vec<String>,
}

/// The far side, ready to wait for the near side.
pub struct Open {
    listener: TcpListener,
    key: RawKey,
    invitation: Invitation,
    far: Far,
}

struct Far {
    config: PathBuf,
    listener: Option<String>,
    /// The file with this host's key, as the configuration names it.
    identity: String,
    name: String,
    to: Vec<String>,
    offer: TunnelOffer,
}

/// Runs `tunnel invite`.
///
/// # Errors
/// The configuration, the key or the port cannot be used, or the guest has not joined.
pub fn invite(args: &InviteArgs) -> anyhow::Result<ExitCode> {
    let open = Open::new(args)?;
    let text = open.text()?;
    writeln!(std::io::stdout(), "{text}")?;
    eprintln!(
        "On {}, within {}: sudo sidetrack tunnel join INVITATION\n\
         The line above is a secret until then. Waiting for {} on port {} (TCP); Ctrl-C withdraws the invitation.",
        args.name,
        humantime::format_duration(args.waiting.expires),
        args.name,
        open.listener.local_addr()?.port(),
    );
    open.wait(args.waiting.expires)?;
    Ok(ExitCode::SUCCESS)
}

impl Open {
    /// Checks the configuration, makes this host's key if it has none, and binds the port.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn new(args: &InviteArgs) -> anyhow::Result<Self> {
        let name = dns_name(&args.name)?;
        let text = read(&args.config)?;
        let (places, config) = match &text {
            None => (Places::default(), None),
            Some(text) => {
                let config = Config::from_text(&args.config.display().to_string(), text);
                let config = config.map_err(BadConfiguration::from)?;
                (Places::of(text)?, Some(config))
            }
        };
        let found = listener(&places, args.listener.as_deref())?;
        if let Some(found) = found {
            accepts(found, &name)?;
        }
        let ports = config.iter().flat_map(|config| &config.listeners);
        let served = ports.filter(|listener| matches!(listener.kind, ListenerKind::Tunnel(_)));
        let served = served.filter(|served| {
            found.is_some_and(|found| found.name.as_deref().is_none_or(|name| *served.name == *name))
        });
        let served: Vec<_> = served.flat_map(|served| served.addresses.clone()).collect();
        let addresses = addresses(&args.address, &served)?;
        let identity = found.and_then(|found| found.identity.clone());
        let (identity, key, own) = identity_of(args, identity, &addresses)?;
        let hosts: Vec<_> = addresses.iter().map(|address| address.host.clone()).collect();
        let (listener, at) = args.waiting.bind(&hosts)?;
        let invitation = args.waiting.invitation(Kind::Tunnel, &key, &name, at)?;
        let far = Far {
            config: args.config.clone(),
            listener: args.listener.clone(),
            identity,
            name,
            to: args.to.clone(),
            offer: TunnelOffer { host: own, addresses },
        };
        // Mistakes of this host must not come out when the near side is there. The pin is any.
        far.prepare(key.pin())?;
        Ok(Self { listener, key, invitation, far })
    }

    /// Returns the text of the invitation.
    ///
    /// # Errors
    /// There are too many addresses.
    pub fn text(&self) -> anyhow::Result<String> {
        Ok(self.invitation.to_text()?)
    }

    /// Waits for the near side.
    ///
    /// # Errors
    /// It has not joined.
    pub fn wait(self, expires: std::time::Duration) -> anyhow::Result<()> {
        let Self { listener, key, invitation, far } = self;
        let (name, at) = (far.name.clone(), invitation.expires);
        let file = far.config.display().to_string();
        match runtime()?.block_on(host::serve(listener, &key, invitation, expires, far))? {
            End::Joined => {
                eprintln!("{name} has joined");
                Ok(())
            }
            End::Expired => {
                anyhow::bail!("the invitation has expired at {}, and {name} has not joined", shown(at))
            }
            End::Guessed => {
                anyhow::bail!("the invitation is void: too many wrong secrets came for it. Make a new one")
            }
            End::Unconfirmed => anyhow::bail!(
                "{name} is in {file}, but has not confirmed that it joined. If its tunnel does not come up, remove its pin from \
                 {file} and make a new invitation"
            ),
        }
    }
}

/// Checks the name of a near side; returns it in lower case.
fn dns_name(name: &str) -> anyhow::Result<String> {
    rustls::pki_types::DnsName::try_from(name).map_err(|_| {
        anyhow::anyhow!("'{name}' is not a DNS name: a near side has a name such as near.example")
    })?;
    Ok(name.to_ascii_lowercase())
}

/// Checks that a listener can have one more near side of this name.
fn accepts(listener: &file::Listen, name: &str) -> anyhow::Result<()> {
    let pins = listener.pins.as_ref().with_context(|| {
        format!(
            "the listener trusts an authority (`ca`), so it needs no invitation: 'sidetrack tunnel key --name {name} --ca FILE' \
             makes a key for the near side"
        )
    })?;
    let is_taken = peers(pins).any(|peer| peer.name.as_deref() == Some(name));
    anyhow::ensure!(
        !is_taken,
        "the listener trusts a near side '{name}' already: remove its pin, or choose another name"
    );
    Ok(())
}

/// Returns the pins of a listener that can be read.
fn peers(pins: &List<String>) -> impl Iterator<Item = Peer> + '_ {
    pins.items().iter().filter_map(|pin| pin.parse().ok())
}

fn listener<'p>(places: &'p Places, name: Option<&str>) -> anyhow::Result<Option<&'p file::Listen>> {
    let tunnels = places.listen.iter().filter(|listen| listen.kind.as_deref() == Some("tunnel"));
    let mut named =
        tunnels.filter(|listen| name.is_none() || listen.name.as_deref().or(Some("tunnel")) == name);
    match (named.next(), named.next(), name) {
        (Some(_), Some(_), _) => {
            anyhow::bail!("there are several tunnel listeners: name one with --listener")
        }
        (None, _, Some(name)) => anyhow::bail!("there is no tunnel listener '{name}'"),
        (found, ..) => Ok(found),
    }
}

/// Returns where the near side reaches the tunnel.
fn addresses(given: &[String], served: &[std::net::SocketAddr]) -> anyhow::Result<Vec<Destination>> {
    let port = served.first().map_or(PORT, std::net::SocketAddr::port);
    let parse = |text: &String| match (text.parse::<Destination>(), Host::from_bytes(text.as_bytes())) {
        (Ok(destination), _) if destination.port != 0 => Ok(destination),
        (_, Ok(host)) => Ok(Destination { host, port, zone: 0 }),
        _ => anyhow::bail!("--address '{text}' is not a host, or a host and a port"),
    };
    if !given.is_empty() {
        return given.iter().map(parse).collect();
    }
    let own = served.iter().filter(|address| !address.ip().is_unspecified() && !address.ip().is_loopback());
    let own: Vec<_> = own.map(|address| Destination::from(*address)).collect();
    anyhow::ensure!(!own.is_empty(), "say where the near side reaches this host: --address far.example");
    Ok(own)
}

/// Returns the file with this host's key, the key, and the name in its certificate. Makes the key if there is no listener yet.
fn identity_of(
    args: &InviteArgs,
    identity: Option<String>,
    addresses: &[Destination],
) -> anyhow::Result<(String, RawKey, String)> {
    let identity = match identity {
        Some(identity) => identity,
        None => {
            let name = addresses.iter().find_map(|address| match &address.host {
                Host::Name(name) => Some(name.to_string()),
                Host::Ip(_) => None,
            });
            let name = name.unwrap_or_else(|| "far".to_owned());
            let identity = format!("{name}.pem");
            let path = beside(&args.config, &identity);
            if !path.exists() {
                super::super::tunnel::key(&name, None, DAYS, &path)?;
            }
            identity
        }
    };
    let path = beside(&args.config, &identity);
    let pem = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let key = RawKey::of_pem(&pem).with_context(|| path.display().to_string())?;
    Ok((identity, key, name_of(&pem).with_context(|| path.display().to_string())?))
}

/// Returns the name in the certificate of an identity.
fn name_of(pem: &str) -> anyhow::Result<String> {
    use rustls::pki_types::pem::PemObject as _;
    let certificate = rustls::pki_types::CertificateDer::from_pem_slice(pem.as_bytes());
    Ok(tls::peer_name(&certificate.map_err(|error| anyhow::anyhow!("it has no certificate: {error}"))?))
}

impl Far {
    /// Prepares the configuration with this near side.
    fn prepare(&self, pin: Pin) -> anyhow::Result<Prepared> {
        let peer = Peer { pin, name: Some(self.name.clone()) }.to_string();
        let before = read(&self.config)?;
        let text = before.clone().unwrap_or_else(|| NEW_FAR.to_owned());
        let places = Places::of(&text)?;
        let found = listener(&places, self.listener.as_deref())?;
        found.map_or(Ok(()), |found| accepts(found, &self.name))?;
        let mut text = match found.and_then(|found| found.pins.as_ref()) {
            Some(pins) => with_item(&text, pins, &peer),
            None => with_block(&text, &far_listener(&self.identity, &peer)),
        };
        if !self.to.is_empty() {
            text = with_block(&text, &far_rule(&self.name, &self.to));
        }
        Prepared::new(&self.config, before, &text)
    }
}

impl Inviting for Far {
    fn offer(&self, guest: &Guest) -> anyhow::Result<Message> {
        // Says now what would go wrong later. After a join that broke off, the name is there already.
        let is_again = read(&self.config)?.is_some_and(|text| text.contains(&guest.pin.to_string()));
        if !is_again {
            drop(self.prepare(guest.pin)?);
        }
        Ok(Message::Tunnel(self.offer.clone()))
    }

    async fn write(&self, guest: &Guest) -> anyhow::Result<String> {
        self.prepare(guest.pin)?.commit()?;
        let left = put_in_force(&self.config, None).await;
        eprintln!("{} is in {}", self.name, self.config.display());
        if !left.is_empty() {
            eprintln!("next: {left}");
        }
        Ok(left)
    }
}

const NEW_FAR: &str = "# The far side of tunnels, written by `sidetrack tunnel invite`.\n\
                       version = 1\n\
                       # What happens to a connection that no rule matches: \"direct\" or \"deny\".\n\
                       default = \"deny\"\n";

fn far_listener(identity: &str, peer: &str) -> String {
    format!(
        "# Near sides connect here, by QUIC (UDP) and TLS (TCP). Only keys in `pins` are accepted, each with its name.\n\
         [[listen]]\nname = \"tunnel\"\nkind = \"tunnel\"\naddress = \"*:{PORT}\"\nidentity = {}\npins = [\n    {},\n]\n",
        value(identity),
        value(peer)
    )
}

fn far_rule(name: &str, to: &[String]) -> String {
    format!(
        "# What {name} may reach through this host.\n\
         [[rule]]\nname = {}\nmatch = {{ socks_user = {}, to = {} }}\ncarrier = \"direct\"\n",
        value(&format!("from-{name}")),
        value(name),
        values(to)
    )
}

/// Runs `tunnel join`.
///
/// # Errors
/// The invitation cannot be used, or the configuration cannot be written.
pub fn join(args: &JoinArgs) -> anyhow::Result<ExitCode> {
    let invitation = super::read(&args.invitation, Kind::Tunnel)?;
    runtime()?.block_on(joined(args, &invitation)).map(|told| {
        println!("{told}");
        ExitCode::SUCCESS
    })
}

/// Joins; returns what was done and what comes next.
///
/// # Errors
/// As [`join`].
pub async fn joined(args: &JoinArgs, invitation: &Invitation) -> anyhow::Result<String> {
    // The name becomes that of a file.
    dns_name(&invitation.name)?;
    let identity = format!("{}.pem", invitation.name);
    let path = beside(&args.config, &identity);
    // The key is kept if the join fails, so that the next attempt is the same guest for the host.
    if !path.exists() {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        super::super::tunnel::key(&invitation.name, None, DAYS, &path)?;
    }
    let pem = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let key = RawKey::of_pem(&pem).with_context(|| path.display().to_string())?;
    let name = name_of(&pem)?;
    anyhow::ensure!(
        name == invitation.name,
        "{} is for the name {name}, and the invitation for {}: move the file away",
        path.display(),
        invitation.name
    );
    let (mut joining, offer) = guest::ask(invitation, &key, Vec::new()).await?;
    let Message::Tunnel(offer) = offer else {
        anyhow::bail!("the host sent another message than it should");
    };
    let mut near = Near::new(args, invitation, &offer, &identity)?;
    let left = joining.take().await?;
    near.write()?;
    let told = joining.finish().await;
    let mut next = near.next(args, &left);
    if told.is_err() {
        next.push_str("\nThe far side was not told that this end is done; the tunnel works all the same.");
    }
    let here = put_in_force(&args.config, Some(&path)).await;
    if !here.is_empty() {
        next.push_str(&format!("\nNext, here: {}", here.replace("the node there", "the node")));
    }
    Ok(next)
}

/// The near side's configuration with the tunnel.
struct Near {
    tunnel: String,
    host: String,
    /// `None`: the tunnel is there already.
    prepared: Option<Prepared>,
}

impl Near {
    fn new(
        args: &JoinArgs,
        invitation: &Invitation,
        offer: &TunnelOffer,
        identity: &str,
    ) -> anyhow::Result<Self> {
        let first = offer.host.split('.').next().filter(|part| !part.is_empty()).unwrap_or("far");
        let tunnel = args.name.clone().unwrap_or_else(|| first.to_owned());
        let pin = Pin::from(invitation.pin);
        let before = read(&args.config)?;
        let places = Places::of(before.as_deref().unwrap_or_default())?;
        let host = offer.host.clone();
        if let Some(found) = places.tunnel.iter().find(|found| found.name.as_deref() == Some(tunnel.as_str()))
        {
            let is_same = found.identity.as_deref() == Some(identity)
                && found.pins.as_ref().is_some_and(|pins| peers(pins).any(|peer| peer.pin == pin));
            anyhow::ensure!(
                is_same,
                "{} has another tunnel '{tunnel}' already: choose a name with --name",
                args.config.display()
            );
            return Ok(Self { tunnel, host, prepared: None });
        }
        let old = before.clone().unwrap_or_else(|| NEW_NEAR.to_owned());
        let block = format!(
            "# The tunnel to {host}, by its invitation. Rules use it with `carrier = {}`.\n\
             [[tunnel]]\nname = {}\naddress = {}\nidentity = {}\npins = [{}]\n\n{}",
            value(&format!("tunnel:{tunnel}")),
            value(&tunnel),
            values(&offer.addresses),
            value(identity),
            value(&pin.to_string()),
            near_rule(&tunnel, &args.to)
        );
        let prepared = Some(Prepared::new(&args.config, before, &with_block(&old, &block))?);
        Ok(Self { tunnel, host, prepared })
    }

    fn write(&mut self) -> anyhow::Result<()> {
        self.prepared.take().map_or(Ok(()), Prepared::commit)
    }

    fn next(&self, args: &JoinArgs, left: &str) -> String {
        let Self { tunnel, host, .. } = self;
        let file = args.config.display();
        let mut out = format!("{file} has the tunnel '{tunnel}' to {host}.");
        if args.to.is_empty() {
            out.push_str(&format!(
                "\nNext, here: say in {file} which connections take it; the lines are there, as comments."
            ));
        }
        if !left.is_empty() {
            out.push_str(&format!("\nNext, at {host}: {left}"));
        }
        out
    }
}

const NEW_NEAR: &str = "# The near side of a tunnel, written by `sidetrack tunnel join`.\n\
                        version = 1\n\
                        # What happens to a connection that no rule matches: \"direct\" or \"deny\".\n\
                        default = \"direct\"\n";

/// Returns the listener and rule of the tunnel; as comments if no network is named.
fn near_rule(tunnel: &str, to: &[String]) -> String {
    let networks = if to.is_empty() { vec!["10.20.0.0/16".to_owned()] } else { to.to_vec() };
    let lines = format!(
        "[[listen]]\nname = {}\nkind = \"redirect\"\ndst = {}\n\n[[rule]]\nname = {}\nmatch = {{ to = {} }}\ncarrier = {}\n",
        value(&format!("to-{tunnel}")),
        values(&networks),
        value(&format!("over-{tunnel}")),
        values(&networks),
        value(&format!("tunnel:{tunnel}"))
    );
    if to.is_empty() {
        let comment = |line: &str| if line.is_empty() { "#\n".to_owned() } else { format!("# {line}\n") };
        let lines: String = lines.lines().map(comment).collect();
        format!(
            "# Connections to this network take the tunnel. Write the right network, and remove the \"# \".\n#\n{lines}"
        )
    } else {
        format!("# Connections to these networks take the tunnel.\n{lines}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_far_side_without_a_file_gets_one_that_is_right() {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("sidetrack.toml");
        let args = InviteArgs {
            name: "near.test".into(),
            config: config.clone(),
            address: vec!["far.test".into()],
            listener: None,
            to: vec!["10.1.0.0/16".into()],
            waiting: Waiting {
                listen: Some("127.0.0.1:0".into()),
                join_at: Vec::new(),
                expires: std::time::Duration::from_secs(60),
            },
        };
        let open = Open::new(&args).expect("opened");
        let invitation: Invitation = open.text().expect("a text").parse().expect("parsed");
        assert_eq!((invitation.name.as_str(), invitation.kind), ("near.test", Kind::Tunnel));
        assert!(!config.exists(), "nothing is written before the near side is there");
        open.far.prepare(open.key.pin()).expect("prepared").commit().expect("written");
        let pins = Config::load(&config).expect("right").listeners.len();
        assert_eq!(pins, 1);
        let again = Open::new(&args).err().expect("the name is taken").to_string();
        assert!(again.contains("near.test"), "{again}");
    }

    #[test]
    fn addresses_come_from_the_listener_or_the_arguments() {
        let served =
            ["192.0.2.1:443".parse().expect("an address"), "0.0.0.0:443".parse().expect("an address")];
        let text = |given: &[&str]| {
            let given: Vec<_> = given.iter().map(|text| (*text).to_owned()).collect();
            let found = addresses(&given, &served).map_err(|error| error.to_string())?;
            Ok::<_, String>(found.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(text(&[]), Ok(vec!["192.0.2.1:443".to_owned()]));
        assert_eq!(
            text(&["far.test", "far.test:1", "2001:db8::1"]),
            Ok(vec!["far.test:443".into(), "far.test:1".into(), "[2001:db8::1]:443".into()])
        );
        assert!(text(&["a b"]).is_err());
        assert!(addresses(&[], &served[1..]).expect_err("none").to_string().contains("--address"));
    }
}
