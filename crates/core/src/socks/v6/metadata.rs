//! The metadata of a chain: keys and values in options of kind 65000 (experimental range). `socksx` uses some keys to
//! lead a flow through a list of functions.

use crate::flow::{Destination, DestinationError};

/// One piece of a chain's metadata. On the wire: key(2) value length(2) value (UTF-8).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Metadata {
    /// Keys 998, 999 and from 1000 on belong to `socksx` chains.
    pub key: u16,
    /// Copied unchanged from hop to hop.
    pub value: String,
}

/// Key of the receiver's own index in the list.
const KEY_INDEX: u16 = 998;
/// Key of the number of links.
const KEY_COUNT: u16 = 999;
/// Key of link 0.
const KEY_FIRST_LINK: u16 = 1000;
/// The link that represents the sender in a list that a client begins.
const ROOT: &str = "socks6://root:1080";

/// A chain as `socksx` carries it in metadata: a list of links, and the receiver's position in it.
///
/// Links are `socks6://host:port`. Whatever the scheme says, the node uses SOCKS6. Credentials in links are dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocksxChain {
    index: usize,
    links: Vec<String>,
}

/// Why metadata is not a valid chain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// One of the keys is missing.
    #[error("chain metadata lacks key {0}")]
    Missing(u16),
    /// The value of 998 or 999 is not a number, or is not within the list.
    #[error("chain metadata: the value '{1}' of key {0} is not the number of a link (at most {max})", max = SocksxChain::MAX_LINKS)]
    Number(u16, String),
    /// A link is not the URL of a hop.
    #[error("chain link '{0}' is not scheme://host:port: {1}")]
    Link(String, DestinationError),
    /// The list would be longer than [`SocksxChain::MAX_LINKS`].
    #[error("a chain has at most {max} links", max = SocksxChain::MAX_LINKS)]
    TooLong,
}

fn link_address(link: &str) -> Result<Destination, ChainError> {
    let rest = link.split_once("://").map_or(link, |(_, rest)| rest);
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let address = rest.rsplit_once('@').map_or(rest, |(_, address)| address);
    address.parse().map_err(|error| ChainError::Link(link.to_owned(), error))
}

const MAX_LINKS: u16 = 256;

impl SocksxChain {
    /// Most links of a chain.
    pub const MAX_LINKS: usize = MAX_LINKS as usize;

    /// Makes a chain that begins with this node: link 0 represents the sender, and the hops follow.
    ///
    /// # Errors
    /// Fails if there are too many hops.
    pub fn rooted(hops: &[Destination]) -> Result<Self, ChainError> {
        let mut chain = Self { index: 0, links: vec![ROOT.to_owned()] };
        chain.insert(hops)?;
        Ok(chain)
    }

    /// Reads a chain from metadata. `None` if there is none. Other keys are ignored.
    ///
    /// # Errors
    /// Fails with the key that is missing or wrong.
    pub fn from_metadata(metadata: &[Metadata]) -> Result<Option<Self>, ChainError> {
        let value = |key| metadata.iter().find(|entry| entry.key == key).map(|entry| entry.value.as_str());
        let number = |key| {
            let text = value(key).ok_or(ChainError::Missing(key))?;
            let number = text.parse::<usize>().ok().filter(|number| *number <= Self::MAX_LINKS);
            number.ok_or_else(|| ChainError::Number(key, text.to_owned()))
        };
        if value(KEY_INDEX).is_none() && value(KEY_COUNT).is_none() {
            return Ok(None);
        }
        let (index, count) = (number(KEY_INDEX)?, number(KEY_COUNT)?);
        let mut links = Vec::with_capacity(count);
        for key in (KEY_FIRST_LINK..).take(count) {
            let link = value(key).ok_or(ChainError::Missing(key))?;
            link_address(link)?;
            links.push(link.to_owned());
        }
        if index >= links.len() {
            return Err(ChainError::Number(KEY_INDEX, index.to_string()));
        }
        Ok(Some(Self { index, links }))
    }

    /// Whether this is one of the keys of a chain.
    pub const fn is_chain_key(key: u16) -> bool {
        key >= KEY_INDEX && key < KEY_FIRST_LINK + MAX_LINKS
    }

    /// Returns the metadata: links, index, count.
    pub fn to_metadata(&self) -> Vec<Metadata> {
        let links =
            (KEY_FIRST_LINK..).zip(&self.links).map(|(key, link)| Metadata { key, value: link.clone() });
        let index = Metadata { key: KEY_INDEX, value: self.index.to_string() };
        let count = Metadata { key: KEY_COUNT, value: self.links.len().to_string() };
        links.chain([index, count]).collect()
    }

    /// Returns the receiver's position, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns all links.
    pub fn links(&self) -> &[String] {
        &self.links
    }

    /// Inserts hops directly behind the receiver.
    ///
    /// # Errors
    /// Fails if there are too many links.
    pub fn insert(&mut self, hops: &[Destination]) -> Result<(), ChainError> {
        if self.links.len() + hops.len() > Self::MAX_LINKS {
            return Err(ChainError::TooLong);
        }
        let at = self.index + 1;
        self.links.splice(at..at, hops.iter().map(|hop| format!("socks6://{hop}")));
        Ok(())
    }

    /// Returns the next link's address and the chain to send to it. `None` if the receiver is the last one, which
    /// dials the destination.
    ///
    /// # Errors
    /// Fails if the link is not a URL.
    pub fn next(&self) -> Result<Option<(Destination, Self)>, ChainError> {
        let index = self.index + 1;
        let Some(link) = self.links.get(index) else { return Ok(None) };
        Ok(Some((link_address(link)?, Self { index, links: self.links.clone() })))
    }
}
