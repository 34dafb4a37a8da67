//! The authority for interception: its certificates let us speak as a server to clients that trust it.
//!
//! There is a root, whose key is destroyed after it has signed, and an authority below it. The latter may sign only for
//! the names it was made for: some programs (Java) ignore the constraints of a root, but obey those of an authority below.

use super::make::{MakeError, set_dates};
use super::{TlsError, certificates, provider};
use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose, NameConstraints, PublicKeyData, SanType,
    SerialNumber,
};
use ring::digest::{SHA256, digest};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, TrustAnchor, UnixTime};
use rustls::sign::CertifiedKey;
use sidetrack_core::flow::{Host, HostName};
use sidetrack_core::net::IpNet;
use sidetrack_sys::sync::lock;
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long certificates of hosts are valid, in days. They are not revoked but made again.
const LEAF_DAYS: u32 = 14;
/// The age at which a kept certificate is made again.
const LEAF_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Most certificates of hosts that are kept.
const LEAVES_MAX: usize = 8192;

/// The names or addresses that an authority may sign for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// This name and all names below it.
    Below(HostName),
    /// Addresses of this network.
    Net(IpNet),
    /// All names, but not addresses.
    AnyName,
}

/// A new authority: three PEM texts.
pub struct MadeAuthority {
    /// The root's certificate, which clients trust.
    pub root_pem: String,
    /// The certificate of the signing authority; it is sent along with each host's certificate.
    pub signing_pem: String,
    /// Its private key; it is secret.
    pub signing_key_pem: String,
}

/// Makes a root and the authority below it, valid for `days` days.
///
/// # Errors
/// The system gave no random bytes.
pub fn tap_authority(scopes: &[Scope], days: u32) -> Result<MadeAuthority, MakeError> {
    let (root_key, key) = (KeyPair::generate()?, KeyPair::generate()?);
    let mut root = authority_params("Sidetrack tap root", &root_key, days)?;
    root.is_ca = IsCa::Ca(BasicConstraints::Constrained(1));
    root.name_constraints = Some(constraints(scopes));
    let mut signing = authority_params(SIGNING_NAME, &key, days)?;
    signing.name_constraints = Some(constraints(scopes));
    let root_certificate = root.self_signed(&root_key)?;
    let certificate = signing.signed_by(&key, &Issuer::from_params(&root, &root_key))?;
    Ok(MadeAuthority {
        root_pem: root_certificate.pem(),
        signing_pem: certificate.pem(),
        signing_key_pem: key.serialize_pem(),
    })
}

/// The beginning of the signing authority's subject.
const SIGNING_NAME: &str = "Sidetrack tap authority";

/// Parameters of an authority. Its subject ends with a part of its key's hash: clients report bad signatures if two
/// authorities have the same subject and different keys.
fn authority_params(name: &str, key: &KeyPair, days: u32) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new([])?;
    let hash = digest(&SHA256, key.der_bytes());
    let mark = data_encoding::HEXLOWER.encode(hash.as_ref().get(..4).unwrap_or_default());
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, format!("{name} {mark}"));
    params.distinguished_name = subject;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.serial_number = Some(serial());
    params.use_authority_key_identifier_extension = true;
    set_dates(&mut params, days);
    Ok(params)
}

/// A serial number of 127 random bits: positive, at most 20 bytes, unique (RFC 5280 Sec. 4.1.2.2).
fn serial() -> SerialNumber {
    let mut bytes: [u8; 16] = sidetrack_sys::random::bytes();
    bytes[0] = bytes[0] & 0x7f | 0x40;
    SerialNumber::from_slice(&bytes)
}

/// A name without a leading dot includes all names below it (RFC 5280 Sec. 4.2.1.10). A kind of name that is not mentioned
/// is allowed. So all addresses, or all names, are excluded if none is permitted.
fn constraints(scopes: &[Scope]) -> NameConstraints {
    let mut permitted = Vec::new();
    let (mut names, mut v4, mut v6) = (false, false, false);
    for scope in scopes {
        match scope {
            Scope::AnyName => names = true,
            Scope::Below(name) => {
                names = true;
                permitted.push(GeneralSubtree::DnsName(name.as_str().to_owned()));
            }
            Scope::Net(net) => {
                permitted.push(GeneralSubtree::IpAddress(subnet(net)));
                if net.address().is_ipv6() { v6 = true } else { v4 = true }
            }
        }
    }
    if scopes.contains(&Scope::AnyName) {
        permitted.retain(|subtree| !matches!(subtree, GeneralSubtree::DnsName(_)));
    }
    let mut excluded = Vec::new();
    if !v4 {
        excluded
            .push(GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(Ipv4Addr::UNSPECIFIED.into(), 0)));
    }
    if !v6 {
        excluded
            .push(GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(Ipv6Addr::UNSPECIFIED.into(), 0)));
    }
    if !names {
        excluded.push(GeneralSubtree::DnsName(String::new()));
    }
    NameConstraints { permitted_subtrees: permitted, excluded_subtrees: excluded }
}

fn subnet(net: &IpNet) -> CidrSubnet {
    CidrSubnet::from_addr_prefix(net.address(), net.prefix_len())
}

/// When it was made, and the certificate; `None`: the authority may not sign for this host.
type Leaf = (Instant, Option<Arc<CertifiedKey>>);

/// Signs certificates for hosts with an authority's key, and keeps the latest ones.
pub struct Signer {
    root_pem: Arc<str>,
    signing_pem: Arc<str>,
    root: CertificateDer<'static>,
    signing: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
    anchor: TrustAnchor<'static>,
    leaf_key: KeyPair,
    leaf_signing_key: Arc<dyn rustls::sign::SigningKey>,
    leaves: Mutex<HashMap<Host, Leaf>>,
}

impl Signer {
    /// Loads the three texts of [`MadeAuthority`].
    ///
    /// # Errors
    /// What is wrong with the texts.
    pub fn new(root_pem: &str, signing_pem: &str, signing_key_pem: &str) -> Result<Self, TlsError> {
        let wrong = |why: &str| TlsError::Authority(why.to_owned());
        let first = |pem: &str| {
            certificates(pem)
                .map_err(TlsError::Authority)?
                .into_iter()
                .next()
                .ok_or(wrong("there is no CERTIFICATE"))
        };
        let (root, signing) = (first(root_pem)?, first(signing_pem)?);
        let key = PrivatePkcs8KeyDer::from_pem_slice(signing_key_pem.as_bytes())
            .map_err(drop)
            .and_then(|key| KeyPair::try_from(&key).map_err(drop))
            .map_err(|()| wrong("the key of the authority is no private key in PEM"))?;
        let generated = |error: rcgen::Error| TlsError::Authority(error.to_string());
        let params = authority_params(SIGNING_NAME, &key, 1).map_err(generated)?;
        let ours = params.self_signed(&key).map_err(generated)?;
        if !is_same_authority(&signing, ours.der()) {
            return Err(wrong("the key is not that of the certificate: make the authority anew"));
        }
        let anchor = webpki::anchor_from_trusted_cert(&root)
            .map_err(|error| TlsError::Authority(error.to_string()))?
            .to_owned();
        let leaf_key = KeyPair::generate().map_err(generated)?;
        let der = PrivateKeyDer::Pkcs8(leaf_key.serialize_der().into());
        let leaf_signing_key = provider().key_provider.load_private_key(der)?;
        let signer = Self {
            root_pem: root_pem.into(),
            signing_pem: signing_pem.into(),
            root,
            signing,
            issuer: Issuer::new(params, key),
            anchor,
            leaf_key,
            leaf_signing_key,
            leaves: Mutex::default(),
        };
        Ok(signer)
    }

    /// The root's certificate in PEM, which clients must trust.
    pub fn root_pem(&self) -> &str {
        &self.root_pem
    }

    /// The root's certificate.
    pub fn root(&self) -> &CertificateDer<'static> {
        &self.root
    }

    /// Returns a certificate for a host, with its key; `None` if the authority may not sign for it.
    pub fn leaf(&self, host: &Host) -> Option<Arc<CertifiedKey>> {
        {
            let leaves = lock(&self.leaves);
            if let Some((_, leaf)) = leaves.get(host).filter(|(made, _)| made.elapsed() < LEAF_KEPT) {
                return leaf.clone();
            }
        }
        // Sign without the lock, so that handshakes for other hosts do not wait.
        let leaf = self.sign(host);
        let mut leaves = lock(&self.leaves);
        if leaves.len() >= LEAVES_MAX {
            leaves.clear();
        }
        leaves.insert(host.clone(), (Instant::now(), leaf.clone()));
        leaf
    }

    fn sign(&self, host: &Host) -> Option<Arc<CertifiedKey>> {
        let mut params = CertificateParams::new([]).ok()?;
        params.subject_alt_names = vec![match host {
            Host::Name(name) => SanType::DnsName(name.as_str().try_into().ok()?),
            Host::Ip(ip) => SanType::IpAddress(*ip),
        }];
        let mut subject = DistinguishedName::new();
        // A common name has at most 64 characters (RFC 5280 Appendix A.1). The whole name is in the alternative name.
        subject.push(DnType::CommonName, host.to_string().chars().take(64).collect::<String>());
        params.distinguished_name = subject;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.serial_number = Some(serial());
        params.use_authority_key_identifier_extension = true;
        set_dates(&mut params, LEAF_DAYS);
        let certificate = params.signed_by(&self.leaf_key, &self.issuer).ok()?.der().clone();
        self.is_allowed(&certificate, host).then(|| {
            let chain = vec![certificate, self.signing.clone()];
            Arc::new(CertifiedKey::new(chain, self.leaf_signing_key.clone()))
        })
    }

    /// Whether a client that trusts the root and obeys its constraints would accept the certificate.
    fn is_allowed(&self, certificate: &CertificateDer<'_>, host: &Host) -> bool {
        let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) else { return false };
        let algorithms = provider().signature_verification_algorithms;
        let verified = parsed.verify_for_usage(
            algorithms.all,
            std::slice::from_ref(&self.anchor),
            std::slice::from_ref(&self.signing),
            UnixTime::now(),
            webpki::KeyUsage::server_auth(),
            None,
            None,
        );
        verified.is_ok()
            && server_name(host).is_some_and(|name| parsed.verify_is_valid_for_subject_name(&name).is_ok())
    }
}

/// The host in the form that certificates use.
pub fn server_name(host: &Host) -> Option<rustls::pki_types::ServerName<'static>> {
    match host {
        Host::Name(name) => rustls::pki_types::ServerName::try_from(name.as_str().to_owned()).ok(),
        Host::Ip(ip) => Some(IpAddr::into(*ip)),
    }
}

fn is_same_authority(one: &CertificateDer<'_>, other: &CertificateDer<'_>) -> bool {
    match (webpki::anchor_from_trusted_cert(one), webpki::anchor_from_trusted_cert(other)) {
        (Ok(one), Ok(other)) => {
            one.subject == other.subject && one.subject_public_key_info == other.subject_public_key_info
        }
        _ => false,
    }
}

impl PartialEq for Signer {
    fn eq(&self, other: &Self) -> bool {
        // The key was checked to belong to the certificate.
        self.root_pem == other.root_pem && self.signing_pem == other.signing_pem
    }
}

impl Eq for Signer {}

impl fmt::Debug for Signer {
    /// Omits the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Signer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> Host {
        text.parse().map(Host::Ip).unwrap_or_else(|_| Host::Name(text.parse().unwrap()))
    }

    fn signer(scopes: &[Scope]) -> Signer {
        let made = tap_authority(scopes, 30).unwrap();
        Signer::new(&made.root_pem, &made.signing_pem, &made.signing_key_pem).unwrap()
    }

    #[test]
    fn it_signs_for_the_names_it_was_made_for_and_no_others() {
        let one = signer(&[Scope::Below("corp.example".parse().unwrap())]);
        for (name, allowed) in [
            ("corp.example", true),
            ("www.corp.example", true),
            ("a.b.corp.example", true),
            ("notcorp.example", false),
            ("example", false),
            ("192.0.2.1", false),
            ("2001:db8::1", false),
        ] {
            assert_eq!(one.leaf(&host(name)).is_some(), allowed, "{name}");
        }
        let any = signer(&[Scope::AnyName]);
        assert!(any.leaf(&host("web.example")).is_some() && any.leaf(&host("192.0.2.1")).is_none());
        let net = signer(&[Scope::Net("192.0.2.0/24".parse().unwrap())]);
        for (name, allowed) in
            [("192.0.2.9", true), ("198.51.100.1", false), ("2001:db8::1", false), ("web.example", false)]
        {
            assert_eq!(net.leaf(&host(name)).is_some(), allowed, "{name}");
        }
    }

    #[test]
    fn certificates_are_kept_and_no_serial_comes_twice() {
        let signer = signer(&[Scope::AnyName]);
        let (a, b) = (signer.leaf(&host("a.example")).unwrap(), signer.leaf(&host("b.example")).unwrap());
        assert!(Arc::ptr_eq(&a, &signer.leaf(&host("a.example")).unwrap()));
        let serial = |key: &CertifiedKey| {
            webpki::EndEntityCert::try_from(&key.cert[0]).unwrap();
            // version [0] (5 bytes) follows the two headers; the serial number's INTEGER has 16 bytes.
            let der = key.cert[0].to_vec();
            let at = der.windows(2).position(|pair| pair == [0x02, 0x10]).unwrap();
            der[at + 2..at + 18].to_vec()
        };
        assert_ne!(serial(&a), serial(&b));
        assert_eq!(a.cert.len(), 2, "the authority is sent along");
    }

    #[test]
    fn texts_that_do_not_belong_together_are_refused() {
        let (one, two) =
            (tap_authority(&[Scope::AnyName], 1).unwrap(), tap_authority(&[Scope::AnyName], 1).unwrap());
        let error = Signer::new(&one.root_pem, &one.signing_pem, &two.signing_key_pem).unwrap_err();
        assert!(error.to_string().contains("not that of the certificate"), "{error}");
        assert!(Signer::new("", &one.signing_pem, &one.signing_key_pem).is_err());
        assert!(Signer::new(&one.root_pem, &one.signing_pem, "no key").is_err());
        let strange = Signer::new(&two.root_pem, &one.signing_pem, &one.signing_key_pem).unwrap();
        assert!(strange.leaf(&host("a.example")).is_none(), "its root did not sign it");
    }
}
