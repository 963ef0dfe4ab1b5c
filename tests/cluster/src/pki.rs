//! A throw-away certificate authority, the components' certificates and their kubeconfigs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData,
};

use crate::addresses::Addresses;

/// The name of the only node.
pub const NODE: &str = "node1";

/// What a certificate is for.
enum Usage {
    Server(Vec<String>),
    Client,
}

/// Writes the authority, all certificates and all kubeconfigs into `folder`.
pub(crate) fn write(folder: &Path, addresses: Addresses) -> Result<()> {
    fs::create_dir_all(folder)?;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700))?;

    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, "replayfork-test-cluster");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::CrlSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    let key = KeyPair::generate()?;
    let ca = pem("CERTIFICATE", params.self_signed(&key)?.der());
    fs::write(folder.join("ca.crt"), &ca)?;
    let issuer = Issuer::new(params, key);

    let names = [
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "127.0.0.1",
    ];
    let mut names: Vec<String> = names.map(String::from).into();
    names.extend([addresses.node_ip(), addresses.api_service_ip()]);
    sign(
        folder,
        &issuer,
        "apiserver",
        None,
        "kube-apiserver",
        Usage::Server(names),
    )?;
    sign(
        folder,
        &issuer,
        "apikubelet",
        Some("system:masters"),
        "apiserver-kubelet-client",
        Usage::Client,
    )?;
    sign(
        folder,
        &issuer,
        "front",
        None,
        "front-proxy-client",
        Usage::Client,
    )?;

    let node = format!("system:node:{NODE}");
    let users = [
        ("admin", Some("system:masters"), "admin"),
        ("kcm", None, "system:kube-controller-manager"),
        ("sched", None, "system:kube-scheduler"),
        ("proxy", None, "system:kube-proxy"),
        ("kubelet", Some("system:nodes"), node.as_str()),
    ];
    for (file, group, user) in users {
        let (certificate, key) = sign(folder, &issuer, file, group, user, Usage::Client)?;
        let config = kubeconfig(&addresses.api_server(), &ca, &certificate, &key);
        fs::write(folder.join(format!("{file}.kubeconfig")), config)?;
    }

    let accounts = KeyPair::generate()?;
    fs::write(
        folder.join("sa.key"),
        pem("PRIVATE KEY", &accounts.serialize_der()),
    )?;
    fs::write(
        folder.join("sa.pub"),
        pem("PUBLIC KEY", &accounts.subject_public_key_info()),
    )?;
    Ok(())
}

/// Makes a key and a certificate signed by the authority, writes both and returns them as PEM.
fn sign(
    folder: &Path,
    issuer: &Issuer<'_, KeyPair>,
    file: &str,
    group: Option<&str>,
    user: &str,
    usage: Usage,
) -> Result<(String, String)> {
    let (names, purpose) = match usage {
        Usage::Server(names) => (names, ExtendedKeyUsagePurpose::ServerAuth),
        Usage::Client => (Vec::new(), ExtendedKeyUsagePurpose::ClientAuth),
    };
    let mut params = CertificateParams::new(names)?;
    if let Some(group) = group {
        params
            .distinguished_name
            .push(DnType::OrganizationName, group);
    }
    params.distinguished_name.push(DnType::CommonName, user);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![purpose];
    let key = KeyPair::generate()?;
    let certificate = pem("CERTIFICATE", params.signed_by(&key, issuer)?.der());
    let key = pem("PRIVATE KEY", &key.serialize_der());
    fs::write(folder.join(format!("{file}.crt")), &certificate)?;
    fs::write(folder.join(format!("{file}.key")), &key)?;
    Ok((certificate, key))
}

/// A kubeconfig that needs no other file.
fn kubeconfig(server: &str, ca: &str, certificate: &str, key: &str) -> String {
    let [ca, certificate, key] = [ca, certificate, key].map(|text| STANDARD.encode(text));
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters: [{{name: replayfork-test, cluster: {{server: \"{server}\", certificate-authority-data: {ca}}}}}]\n\
         users: [{{name: user, user: {{client-certificate-data: {certificate}, client-key-data: {key}}}}}]\n\
         contexts: [{{name: replayfork-test, context: {{cluster: replayfork-test, user: user}}}}]\n\
         current-context: replayfork-test\n"
    )
}

fn pem(label: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<_> = text
        .as_bytes()
        .chunks(64)
        .map(String::from_utf8_lossy)
        .collect();
    format!(
        "-----BEGIN {label}-----\n{}\n-----END {label}-----\n",
        lines.join("\n")
    )
}
