//! Certificates that live as long as a test, each its own authority.

use std::process::Command;

use anyhow::Result;
use replayfork_test_cluster::command::run;

/// Both as PEM.
pub struct Certificate {
    pub certificate: String,
    pub key: String,
}

impl Certificate {
    /// For a server with this `subjectAltName`, like `DNS:example.org` or `IP:127.0.0.1`.
    ///
    /// # Errors
    /// What openssl says.
    pub fn for_server(name: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = |name: &str| folder.path().join(name);
        // Its own configuration: openssl's would make an authority of it, which no client of ours takes for a server.
        let server = format!("basicConstraints = critical, CA:FALSE\nextendedKeyUsage = serverAuth\nsubjectAltName = {name}");
        std::fs::write(file("openssl.cnf"), format!("[req]\ndistinguished_name = name\n[name]\n[server]\n{server}\n"))?;
        let mut openssl = Command::new("openssl");
        openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=test"]);
        openssl.arg("-config").arg(file("openssl.cnf")).args(["-extensions", "server"]);
        openssl.arg("-keyout").arg(file("key")).arg("-out").arg(file("certificate"));
        run(&mut openssl)?;
        Ok(Self { certificate: std::fs::read_to_string(file("certificate"))?, key: std::fs::read_to_string(file("key"))? })
    }
}
