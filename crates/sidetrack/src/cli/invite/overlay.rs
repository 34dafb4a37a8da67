//! `overlay invite`, `overlay join`, `overlay table` and `overlay update`.

use super::file::{self, Places, beside, value, values, with_block};
use super::host::{self, Guest, Inviting};
use super::{Waiting, guest, restart, runtime, shown};
use crate::cli::prepared::{Prepared, read};
use crate::config::{self, BadConfiguration, Config};
use crate::overlay::identity;
use crate::tls::{Pin, RawKey};
use anyhow::Context as _;
use ring::signature::{ED25519, UnparsedPublicKey};
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::invitation::host::End;
use sidetrack_core::invitation::table::{self, Table};
use sidetrack_core::invitation::{Edge, Invitation, Kind, Message, Node, OverlayOffer};
use sidetrack_core::overlay::key::{PublicKey, SecretKey};
use sidetrack_core::overlay::{Keys as _, NODES_MAX};
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The SubjectPublicKeyInfo of an Ed25519 key without its last 32 bytes (RFC 8410 Sec. 4).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// Lets one node join the overlay with one line of text, instead of keys and tables by hand
///
/// Prints the invitation and waits until the node has joined by `sidetrack overlay join`. Then the new node is in this node's
/// configuration. Prints a second line for `sidetrack overlay update` on each other node. Ctrl-C withdraws the invitation.
#[derive(Clone, Debug, clap::Args)]
pub struct InviteArgs {
    /// The name of the new node
    pub name: String,
    /// The configuration of this node
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// Where the new node dials this one, an IP address, with a port if it is not that of `listen`; several times
    /// [default: the address of this node in [overlay.node], else those of `listen`]
    #[arg(long, value_name = "IP[:PORT]")]
    pub address: Vec<String>,
    /// Where and how long it waits.
    #[command(flatten)]
    pub waiting: Waiting,
}

/// Joins an overlay by an invitation: makes a key, and writes the configuration of this node
#[derive(Clone, Debug, clap::Args)]
pub struct JoinArgs {
    /// The line that `sidetrack overlay invite` has printed; "-" reads it from standard input
    #[arg(value_name = "INVITATION")]
    pub invitation: String,
    /// The configuration that gets the overlay; a new one is written if there is none
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
    /// Where this node listens for other nodes [default: nowhere, it only dials]
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<String>,
    /// Where the inviting node dials this one; several times [default: it does not dial this one]
    #[arg(long, value_name = "IP:PORT")]
    pub address: Vec<Destination>,
}

/// Prints the table of nodes, signed by this node, for `sidetrack overlay update` on other nodes
#[derive(Clone, Debug, clap::Args)]
pub struct TableArgs {
    /// The configuration of this node
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
}

/// Adds the nodes of another node's table to the configuration of this node; changes and removes none
#[derive(Clone, Debug, clap::Args)]
pub struct UpdateArgs {
    /// The line of `sidetrack overlay table` or `overlay invite` on a node that this one knows; "-" reads it from standard input
    #[arg(value_name = "TABLE")]
    pub table: String,
    /// The configuration of this node
    #[arg(short, long, value_name = "FILE", default_value_os_t = Config::default_path(), hide_default_value = true)]
    pub config: PathBuf,
}

/// The overlay of a configuration.
fn overlay_of(file: &Path, text: &str) -> anyhow::Result<config::Overlay> {
    let config = Config::from_text(&file.display().to_string(), text).map_err(BadConfiguration::from)?;
    config.overlay.with_context(|| {
        format!("{} has no [overlay]: 'sidetrack init overlay' writes the first node's", file.display())
    })
}

fn read_overlay(file: &Path) -> anyhow::Result<(String, config::Overlay)> {
    let text = read(file)?.with_context(|| {
        format!(
            "there is no {}: 'sidetrack init overlay' writes the first node's configuration",
            file.display()
        )
    })?;
    let overlay = overlay_of(file, &text)?;
    Ok((text, overlay))
}

/// What a node tells others about all nodes.
fn content(overlay: &config::Overlay) -> OverlayOffer {
    let nodes = overlay.nodes.iter().map(|node| Node { name: node.name.to_string(), key: node.key });
    let edges = overlay.edges.iter().map(|edge| Edge {
        ends: [edge.ends[0].to_string(), edge.ends[1].to_string()],
        least_us: edge.least_us,
    });
    OverlayOffer {
        host: overlay.name.to_string(),
        addresses: Vec::new(),
        nodes: nodes.collect(),
        edges: edges.collect(),
    }
}

/// This node, ready to wait for the new one.
struct Here {
    config: PathBuf,
    name: String,
    addresses: Vec<Destination>,
}

/// Runs `overlay invite`.
///
/// # Errors
/// The configuration, the key or the port cannot be used, or the guest has not joined.
pub fn invite(args: &InviteArgs) -> anyhow::Result<ExitCode> {
    let (listener, key, invitation, here) = open(args)?;
    writeln!(std::io::stdout(), "{}", invitation.to_text()?)?;
    let (name, file) = (here.name.clone(), here.config.clone());
    eprintln!(
        "On {name}, within {}: sudo sidetrack overlay join INVITATION\n\
         The line above is a secret until then. Waiting for {name} on port {} (TCP); Ctrl-C withdraws the invitation.",
        humantime::format_duration(args.waiting.expires),
        listener.local_addr()?.port(),
    );
    let expires = invitation.expires;
    match runtime()?.block_on(host::serve(listener, &key, invitation, args.waiting.expires, here))? {
        End::Joined => eprintln!("{name} has joined"),
        End::Expired => {
            anyhow::bail!("the invitation has expired at {}, and {name} has not joined", shown(expires))
        }
        End::Guessed => {
            anyhow::bail!("the invitation is void: too many wrong secrets came for it. Make a new one")
        }
        End::Unconfirmed => anyhow::bail!(
            "{name} is in {0}, but has not confirmed that it joined. If its link does not come up, remove it from {0} and make a \
             new invitation",
            file.display()
        ),
    }
    let (_, overlay) = read_overlay(&file)?;
    if overlay.nodes.len() > 2 {
        eprintln!(
            "On each other node: sudo sidetrack overlay update TABLE, with this line (it is no secret):"
        );
        writeln!(std::io::stdout(), "{}", signed(&overlay)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn open(args: &InviteArgs) -> anyhow::Result<(TcpListener, RawKey, Invitation, Here)> {
    let is_name = !args.name.is_empty() && args.name.len() <= 64 && !args.name.contains(char::is_control);
    anyhow::ensure!(is_name, "a node has a name of 1 to 64 bytes without control characters");
    let (_, overlay) = read_overlay(&args.config)?;
    anyhow::ensure!(
        overlay.nodes.iter().all(|node| *node.name != *args.name),
        "the overlay has a node '{}' already: choose another name, or remove its table",
        args.name
    );
    anyhow::ensure!(overlay.nodes.len() < NODES_MAX, "the overlay has {NODES_MAX} nodes: it takes no more");
    let addresses = addresses(&args.address, &overlay)?;
    let hosts: Vec<_> = addresses.iter().map(|address| address.host.clone()).collect();
    anyhow::ensure!(
        !hosts.is_empty() || !args.waiting.join_at.is_empty(),
        "say where the new node reaches this one: --address 192.0.2.1, or --join-at HOST:PORT if this node dials the new one"
    );
    let key = RawKey::of_ed25519(&overlay.key.0)?;
    let (listener, at) = args.waiting.bind(&hosts)?;
    let invitation = args.waiting.invitation(Kind::Overlay, &key, &args.name, at)?;
    Ok((listener, key, invitation, Here { config: args.config.clone(), name: args.name.clone(), addresses }))
}

/// Returns where the new node dials this one.
fn addresses(given: &[String], overlay: &config::Overlay) -> anyhow::Result<Vec<Destination>> {
    let port = overlay.listen.first().map(std::net::SocketAddr::port);
    let parse = |text: &String| {
        let address = match (text.parse::<Destination>(), Host::from_bytes(text.as_bytes()), port) {
            (Ok(destination), _, _) if destination.port != 0 => destination,
            (_, Ok(host), Some(port)) => Destination { host, port, zone: 0 },
            _ => anyhow::bail!("--address '{text}' is not an IP address, or an IP address and a port"),
        };
        anyhow::ensure!(
            address.socket_addr().is_some(),
            "--address '{text}': nodes are dialled by IP address"
        );
        Ok(address)
    };
    if !given.is_empty() {
        return given.iter().map(parse).collect();
    }
    // The table may have the address of this node for the others, as `init` writes it.
    let own = overlay.nodes.iter().find(|node| node.name == overlay.name);
    let named = own.map(|node| node.addresses.as_slice()).filter(|named| !named.is_empty());
    let served = named.unwrap_or(&overlay.listen).iter().filter(|address| !address.ip().is_unspecified());
    Ok(served.map(|address| Destination::from(*address)).collect())
}

impl Here {
    /// Prepares the configuration with the new node.
    fn prepare(&self, guest: &Guest) -> anyhow::Result<(Prepared, OverlayOffer)> {
        let key = public_key(&guest.key)?;
        let (text, overlay) = read_overlay(&self.config)?;
        let mut offer = OverlayOffer { addresses: self.addresses.clone(), ..content(&overlay) };
        // After a join that broke off, the new node is here already.
        offer.nodes.retain(|node| node.name != self.name || node.key != key);
        let [own, name] = [offer.host.clone(), self.name.clone()];
        if !offer.edges.is_empty() {
            offer.edges.push(Edge { ends: [own, name.clone()], least_us: 1 });
        }
        anyhow::ensure!(
            !offer.addresses.is_empty() || !guest.addresses.is_empty(),
            "neither end says where it is dialled: join with --listen and --address"
        );
        let places = Places::of(&text)?.overlay.unwrap_or_default();
        let new = OverlayOffer { nodes: vec![Node { name, key }], ..offer.clone() };
        let added = Added::new(&places, &new, &[(self.name.as_str(), guest.addresses.as_slice())])?;
        Ok((Prepared::new(&self.config, Some(text.clone()), &with_block(&text, &added.block))?, offer))
    }
}

impl Inviting for Here {
    fn offer(&self, guest: &Guest) -> anyhow::Result<Message> {
        Ok(Message::Overlay(self.prepare(guest)?.1))
    }

    async fn write(&self, guest: &Guest) -> anyhow::Result<String> {
        self.prepare(guest)?.0.commit()?;
        let left = restart(&self.config).await;
        eprintln!("{} is in {}\nnext: {}", self.name, self.config.display(), left.replace(" there", ""));
        Ok(left)
    }
}

fn public_key(spki: &[u8]) -> anyhow::Result<PublicKey> {
    let key: Option<[u8; 32]> = spki.strip_prefix(&SPKI_PREFIX).and_then(|key| key.try_into().ok());
    Ok(PublicKey(key.context("the guest shows another kind of key than a node of the overlay has")?))
}

/// Nodes and links that a configuration lacks.
struct Added {
    block: String,
    names: Vec<String>,
}

impl Added {
    /// Returns what `places` lacks of `offer`. `dialled`: addresses of nodes.
    ///
    /// # Errors
    /// A node has another key or name here.
    fn new(
        places: &file::Overlay,
        offer: &OverlayOffer,
        dialled: &[(&str, &[Destination])],
    ) -> anyhow::Result<Self> {
        let mut added = Self { block: String::new(), names: Vec::new() };
        for Node { name, key } in &offer.nodes {
            let text = key.to_string();
            let here = places.node.get(name).map(|node| node.key.as_deref() == Some(text.as_str()));
            anyhow::ensure!(
                here != Some(false),
                "the node '{name}' has another key here: one of the two tables is wrong"
            );
            let other = places
                .node
                .iter()
                .find(|(other, node)| *other != name && node.key.as_deref() == Some(text.as_str()));
            if let Some((other, _)) = other {
                anyhow::bail!(
                    "the node '{name}' is here by the name '{other}': one of the two tables is wrong"
                );
            }
            if here.is_some() {
                continue;
            }
            added.names.push(name.clone());
            let _ = write!(added.block, "[overlay.node.{}]\nkey = {}\n", file::key(name), value(&text));
            let address =
                dialled.iter().find(|(other, _)| *other == name.as_str()).map(|(_, addresses)| *addresses);
            if let Some(addresses) = address.filter(|addresses| !addresses.is_empty()) {
                let _ = writeln!(added.block, "address = {}", values(addresses));
            }
        }
        // A first entry would forbid all links that it does not name, so only a list that is there grows.
        let grows = !places.topology.is_empty() || places.node.is_empty();
        for Edge { ends, least_us } in offer.edges.iter().filter(|_| grows) {
            let mut known = places.topology.iter().filter_map(|edge| edge.ends.as_ref());
            if !known.any(|known| known.iter().all(|end| ends.contains(end))) {
                let _ = write!(added.block, "[[overlay.topology]]\nends = {}\n", values(ends));
                if *least_us > 1 {
                    let _ = writeln!(added.block, "least_us = {least_us}");
                }
            }
        }
        Ok(added)
    }
}

/// Runs `overlay join`.
///
/// # Errors
/// The invitation cannot be used, or the configuration cannot be written.
pub fn join(args: &JoinArgs) -> anyhow::Result<ExitCode> {
    let invitation = super::read(&args.invitation, Kind::Overlay)?;
    runtime()?.block_on(joined(args, &invitation)).map(|told| {
        println!("{told}");
        ExitCode::SUCCESS
    })
}

async fn joined(args: &JoinArgs, invitation: &Invitation) -> anyhow::Result<String> {
    let before = read(&args.config)?;
    let places = Places::of(before.as_deref().unwrap_or_default())?.overlay;
    let key_file = match &places {
        Some(overlay) => {
            anyhow::ensure!(
                overlay.name.as_deref() == Some(invitation.name.as_str()),
                "{} is the node '{}' of an overlay, and the invitation is for '{}'",
                args.config.display(),
                overlay.name.as_deref().unwrap_or("?"),
                invitation.name
            );
            overlay.key_file.clone().context("[overlay] has no `key_file`")?
        }
        None => "overlay.key".to_owned(),
    };
    // The key is kept if the join fails, so that the next attempt is the same node for the host.
    let path = beside(&args.config, &key_file);
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    super::super::overlay::key(&path)?;
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let secret: SecretKey = text.parse().with_context(|| path.display().to_string())?;
    let key = RawKey::of_ed25519(&secret.0)?;
    let (mut joining, offer) = guest::ask(invitation, &key, args.address.clone()).await?;
    let Message::Overlay(mut offer) = offer else {
        anyhow::bail!("the host sent another message than it should");
    };
    anyhow::ensure!(
        offer
            .nodes
            .iter()
            .any(|node| node.name == offer.host && Pin::of_key(&spki(&node.key)) == invitation.pin.into()),
        "the host's table has another key for the host than the invitation"
    );
    let public = identity::public_of(&secret)?;
    offer.nodes.push(Node { name: invitation.name.clone(), key: public });
    let prepared = prepare(args, invitation, before, places, &key_file, &offer)?;
    let left = joining.take().await?;
    prepared.map_or(Ok(()), Prepared::commit)?;
    let told = joining.finish().await;
    let (file, host) = (args.config.display(), &offer.host);
    let mut next = format!("{file} has the overlay of {host}, with {} nodes.", offer.nodes.len());
    next.push_str(
        "\nNext, here: say in the file which connections take the overlay, and what is delivered here.",
    );
    let _ = write!(next, "\nThen, here: {}", restart(&args.config).await.replace(" there", ""));
    if !left.is_empty() {
        let _ = write!(next, "\nNext, at {host}: {left}");
    }
    if told.is_err() {
        let _ = write!(next, "\n{host} was not told that this end is done; the link works all the same.");
    }
    Ok(next)
}

fn spki(key: &PublicKey) -> Vec<u8> {
    [&SPKI_PREFIX[..], &key.0].concat()
}

/// Prepares the new node's configuration. `None`: all of it is there.
fn prepare(
    args: &JoinArgs,
    invitation: &Invitation,
    before: Option<String>,
    places: Option<file::Overlay>,
    key_file: &str,
    offer: &OverlayOffer,
) -> anyhow::Result<Option<Prepared>> {
    let is_there = places.is_some();
    let places = places.unwrap_or_default();
    let own = (invitation.name.as_str(), args.address.as_slice());
    let added = Added::new(&places, offer, &[(offer.host.as_str(), offer.addresses.as_slice()), own])?;
    let mut block = String::new();
    if !is_there {
        let _ = write!(
            block,
            "# This node of the overlay, by the invitation of {}. It dials the nodes that have an address.\n\
             [overlay]\nname = {}\nkey_file = {}\n",
            offer.host.escape_debug(),
            value(&invitation.name),
            value(key_file)
        );
        if let Some(listen) = &args.listen {
            let _ = writeln!(block, "listen = {}", value(listen));
        }
        block.push('\n');
    }
    block.push_str(&added.block);
    if !is_there {
        block.push_str(NEXT);
    }
    if block.is_empty() {
        return Ok(None);
    }
    let old = before.clone().unwrap_or_else(|| NEW.to_owned());
    Prepared::new(&args.config, before, &with_block(&old, &block)).map(Some)
}

const NEW: &str = "# A node of an overlay, written by `sidetrack overlay join`.\n\
                   version = 1\n\
                   # What happens to a connection that no rule matches: \"direct\" or \"deny\".\n\
                   default = \"direct\"\n";

const NEXT: &str = "\n# Connections for another site take the overlay:\n\
                    #\n\
                    # [[listen]]\n\
                    # name = \"local\"\n\
                    # kind = \"redirect\"\n\
                    # dst = [\"10.20.0.0/16\"]\n\
                    #\n\
                    # [[rule]]\n\
                    # name = \"other-site\"\n\
                    # match = { to = \"10.20.0.0/16\" }\n\
                    # carrier = \"overlay:other\"\n\
                    #\n\
                    # What this node delivers for others, and for whom:\n\
                    #\n\
                    # [[overlay.deliver]]\n\
                    # from = [\"other\"]\n\
                    # to = \"10.10.0.0/16\"\n";

/// Runs `overlay table`.
///
/// # Errors
/// The configuration cannot be used.
pub fn table(args: &TableArgs) -> anyhow::Result<ExitCode> {
    let (_, overlay) = read_overlay(&args.config)?;
    writeln!(std::io::stdout(), "{}", signed(&overlay)?)?;
    Ok(ExitCode::SUCCESS)
}

fn signed(overlay: &config::Overlay) -> anyhow::Result<String> {
    let own = identity::Identity::new(overlay)?;
    Ok(table::signed(&content(overlay), |bytes| own.sign(bytes).0)?)
}

/// Runs `overlay update`.
///
/// # Errors
/// The table is not signed by a node that this one knows, contradicts this node's table, or cannot be written.
pub fn update(args: &UpdateArgs) -> anyhow::Result<ExitCode> {
    let given = super::given(&args.table, 64 * 1024)?;
    let names = updated(&args.config, &given.parse()?)?;
    if names.is_empty() {
        println!("{} has all of these nodes already", args.config.display());
        return Ok(ExitCode::SUCCESS);
    }
    let left = runtime()?.block_on(restart(&args.config));
    println!(
        "{} has new nodes: {}\nNext: {}",
        args.config.display(),
        names.join(", "),
        left.replace(" there", "")
    );
    Ok(ExitCode::SUCCESS)
}

/// Adds the nodes of a table to a configuration; returns the names of the new ones.
///
/// # Errors
/// As [`update`].
fn updated(file: &Path, table: &Table) -> anyhow::Result<Vec<String>> {
    let (text, overlay) = read_overlay(file)?;
    let signer = &table.content.host;
    let known = overlay.nodes.iter().find(|node| *node.name == **signer);
    let known = known.with_context(|| {
        format!(
            "the table is signed by '{signer}', which is not a node of {}: take one of a node that is",
            file.display()
        )
    })?;
    UnparsedPublicKey::new(&ED25519, &known.key.0)
        .verify(&table.signed, &table.signature)
        .map_err(|_| anyhow::anyhow!("the table is damaged, or not signed by '{signer}'"))?;
    let places = Places::of(&text)?.overlay.unwrap_or_default();
    let added = Added::new(&places, &table.content, &[])?;
    if !added.block.is_empty() {
        Prepared::new(file, Some(text.clone()), &with_block(&text, &added.block))?.commit()?;
    }
    Ok(added.names)
}
