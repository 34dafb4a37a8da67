//! Makes keys and certificates (ECDSA P-256, in PEM), so that a first tunnel needs no other tool.

use super::certificates;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use std::time::{Duration, SystemTime};

/// The subject of every authority made here. Authorities differ by their keys.
const AUTHORITY_NAME: &str = "sidetrack tunnel authority";

/// Certificates are valid from this time before they are made, because clocks differ.
const BACKDATED: Duration = Duration::from_secs(48 * 3600);

/// A certificate and its private key.
pub struct Made {
    /// The certificate in PEM; it is public.
    pub certificate_pem: String,
    /// The private key in PEM (PKCS #8); it is secret.
    pub key_pem: String,
}

/// Why a certificate could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// The name is not a DNS name.
    #[error("'{0}' is no DNS name: the other end knows this one by a name such as gw.example")]
    Name(String),
    /// The system gave no random bytes.
    #[error(transparent)]
    Certificate(#[from] rcgen::Error),
    /// The text does not hold a certificate and key made by [`authority`].
    #[error("this is no authority of `sidetrack tunnel ca`: {0}")]
    NoAuthority(String),
}

impl Made {
    /// Both in one text, as the configuration's `identity` expects it.
    pub fn identity_pem(&self) -> String {
        format!("{}{}", self.certificate_pem, self.key_pem)
    }
}

/// Makes an authority that signs certificates of both ends, valid for `days` days.
///
/// # Errors
/// The system gave no random bytes.
pub fn authority(days: u32) -> Result<Made, MakeError> {
    let key = KeyPair::generate()?;
    let certificate = authority_params(days)?.self_signed(&key)?;
    Ok(Made { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
}

/// Makes a key with a self-signed certificate, for pinning. Rules and records call its owner by this name.
///
/// # Errors
/// The name is not a DNS name.
pub fn self_signed(name: &str, days: u32) -> Result<Made, MakeError> {
    let key = KeyPair::generate()?;
    let certificate = leaf_params(name, days)?.self_signed(&key)?;
    Ok(Made { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
}

/// Makes a key with a certificate signed by `authority_pem`, the certificate and key of [`authority`].
///
/// # Errors
/// The name is not a DNS name, or the authority was not made here.
pub fn signed(name: &str, days: u32, authority_pem: &str) -> Result<Made, MakeError> {
    let refused = |why: String| MakeError::NoAuthority(why);
    let authority_key = PrivatePkcs8KeyDer::from_pem_slice(authority_pem.as_bytes())
        .map_err(drop)
        .and_then(|key| KeyPair::try_from(&key).map_err(drop))
        .map_err(|_| refused("there is no private key in PEM beside the certificate".to_owned()))?;
    let theirs = certificates(authority_pem).map_err(refused)?;
    let params = authority_params(1)?;
    // A signature only needs the subject and the key of the authority. Both must match the given certificate.
    let ours = params.clone().self_signed(&authority_key)?;
    let same = |a: &rustls::pki_types::CertificateDer<'_>, b: &rustls::pki_types::CertificateDer<'_>| {
        let (a, b) = (webpki::anchor_from_trusted_cert(a).ok()?, webpki::anchor_from_trusted_cert(b).ok()?);
        Some(a.subject == b.subject && a.subject_public_key_info == b.subject_public_key_info)
    };
    if theirs.first().and_then(|theirs| same(theirs, ours.der())) != Some(true) {
        return Err(refused("subject or key differ".to_owned()));
    }
    let key = KeyPair::generate()?;
    let certificate = leaf_params(name, days)?.signed_by(&key, &Issuer::new(params, authority_key))?;
    Ok(Made { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() })
}

fn leaf_params(name: &str, days: u32) -> Result<CertificateParams, MakeError> {
    rustls::pki_types::DnsName::try_from(name).map_err(|_| MakeError::Name(name.to_owned()))?;
    let mut params = CertificateParams::new([name.to_owned()])?;
    params.distinguished_name = common_name(name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    set_dates(&mut params, days);
    Ok(params)
}

fn authority_params(days: u32) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new([])?;
    params.distinguished_name = common_name(AUTHORITY_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_dates(&mut params, days);
    Ok(params)
}

fn common_name(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

pub(super) fn set_dates(params: &mut CertificateParams, days: u32) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(BACKDATED);
    params.not_after = epoch + now + Duration::from_secs(u64::from(days) * 24 * 3600);
}
