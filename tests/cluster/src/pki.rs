//! A throw-away certificate authority, the components' certificates and their kubeconfigs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::command::run;
use crate::config;
use crate::spec::Spec;

/// The name of the only node.
pub const NODE: &str = "node1";

/// Makes the authority, all certificates and all kubeconfigs.
pub(crate) fn write(spec: &Spec) -> Result<()> {
    let folder = spec.pki();
    fs::create_dir_all(&folder)?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
    let settings = config::fill(include_str!("../config/openssl.cnf"), &config::values(spec))?;
    fs::write(folder.join("openssl.cnf"), settings)?;

    certificate(&folder, "ca", "/CN=replayfork-test-cluster", "authority")?;
    certificate(&folder, "apiserver", "/CN=kube-apiserver", "server")?;
    let kubelet_client = "/O=system:masters/CN=apiserver-kubelet-client";
    certificate(&folder, "apikubelet", kubelet_client, "client")?;
    certificate(&folder, "front", "/CN=front-proxy-client", "client")?;
    for (file, subject) in [
        ("admin", "/O=system:masters/CN=admin".to_owned()),
        ("kcm", "/CN=system:kube-controller-manager".to_owned()),
        ("sched", "/CN=system:kube-scheduler".to_owned()),
        ("proxy", "/CN=system:kube-proxy".to_owned()),
        ("kubelet", format!("/O=system:nodes/CN=system:node:{NODE}")),
    ] {
        certificate(&folder, file, &subject, "client")?;
        let config = kubeconfig(&folder, file, &spec.addresses().api_server())?;
        fs::write(folder.join(format!("{file}.kubeconfig")), config)?;
    }

    // With this key the API server signs the tokens of ServiceAccounts.
    run(openssl(&folder).args(["genpkey", "-algorithm", "EC", "-pkeyopt", CURVE, "-out", "sa.key"]))?;
    run(openssl(&folder).args(["pkey", "-in", "sa.key", "-pubout", "-out", "sa.pub"]))
}

const CURVE: &str = "ec_paramgen_curve:P-256";

/// Makes `FILE.key` and `FILE.crt`, signed by the authority, or by itself if it is the authority.
fn certificate(folder: &Path, file: &str, subject: &str, usage: &str) -> Result<()> {
    let mut request = openssl(folder);
    request.args(["req", "-x509", "-config", "openssl.cnf", "-extensions", usage, "-subj", subject]);
    request.args(["-newkey", "ec", "-pkeyopt", CURVE, "-nodes", "-days", "365"]);
    request.arg("-keyout").arg(format!("{file}.key")).arg("-out").arg(format!("{file}.crt"));
    if file != "ca" {
        request.args(["-CA", "ca.crt", "-CAkey", "ca.key"]);
    }
    run(&mut request)
}

/// A kubeconfig that needs no other file.
fn kubeconfig(folder: &Path, user: &str, server: &str) -> Result<String> {
    let read = |file: &str| Ok::<_, std::io::Error>(STANDARD.encode(fs::read(folder.join(file))?));
    let ca = read("ca.crt")?;
    let certificate = read(&format!("{user}.crt"))?;
    let key = read(&format!("{user}.key"))?;
    Ok(format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters: [{{name: replayfork-test, cluster: {{server: \"{server}\", certificate-authority-data: {ca}}}}}]\n\
         users: [{{name: user, user: {{client-certificate-data: {certificate}, client-key-data: {key}}}}}]\n\
         contexts: [{{name: replayfork-test, context: {{cluster: replayfork-test, user: user}}}}]\n\
         current-context: replayfork-test\n"
    ))
}

fn openssl(folder: &Path) -> Command {
    let mut openssl = Command::new("openssl");
    openssl.current_dir(folder);
    openssl
}
