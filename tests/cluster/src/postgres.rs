//! A real Postgres beside the cluster: unprivileged, on the node's address, so that pods reach it as they would reach a
//! managed one. Inside the cluster's network, since the cluster's pods reach nothing else.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rand::distr::{Alphanumeric, SampleString};

use crate::command::{output, run};
use crate::spec::{Database, Spec};

/// Folder of the server's Unix socket, in the cluster's private /run; there `postgres` is superuser by its uid.
const SOCKETS: &str = "/run/postgresql";

/// Files in the server's data folder; the certificate is the node's own, by the cluster's authority.
const CERTIFICATE: &str = "crt";
const KEY: &str = "key";

/// The database, and the user who owns it.
const NAME: &str = "replayfork";

impl Database {
    /// Finds the newest Postgres of the machine and makes up a password.
    pub fn new() -> Result<Self> {
        let versions = fs::read_dir("/usr/lib/postgresql").context("Postgres is missing: apt-get install postgresql")?;
        let mut bins: Vec<(u32, PathBuf)> = versions
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let version = path.file_name()?.to_str()?.parse().ok()?;
                path.join("bin/postgres").exists().then(|| (version, path.join("bin")))
            })
            .collect();
        bins.sort();
        let (_, bin) = bins.pop().context("no Postgres server below /usr/lib/postgresql: apt-get install postgresql")?;
        Ok(Self { bin, password: Alphanumeric.sample_string(&mut rand::rng(), 24) })
    }
}

/// Where pods, and this machine, find the product's database.
pub(crate) fn url(spec: &Spec) -> Option<String> {
    let database = spec.postgres.as_ref()?;
    Some(format!("postgres://{NAME}:{}@{}:5432/{NAME}", database.password, spec.addresses().node_ip()))
}

/// Makes the server's data folder and its configuration.
pub(crate) fn prepare(spec: &Spec, database: &Database) -> Result<()> {
    let data = data(spec);
    fs::create_dir_all(SOCKETS)?;
    fs::create_dir_all(&data)?;
    run(Command::new("chown").args(["postgres:postgres", SOCKETS]).arg(&data))?;
    let mut initdb = as_postgres(&database.bin.join("initdb"));
    initdb.args(["--no-sync", "--encoding=UTF8", "--locale=C.UTF-8", "--auth=peer", "-D"]).arg(&data);
    run(&mut initdb)?;
    let addresses = spec.addresses();
    let access = format!(
        "local all postgres peer\nhost all all {} scram-sha-256\nhost all all {} scram-sha-256\n",
        addresses.pod_cidr(),
        addresses.node_cidr()
    );
    fs::write(data.join("pg_hba.conf"), access)?;
    // Beside plain connections it takes encrypted ones; Postgres wants a key that is its own.
    for file in [CERTIFICATE, KEY] {
        fs::copy(spec.pki().join(format!("apiserver.{file}")), data.join(file))?;
        run(Command::new("chown").arg("postgres:postgres").arg(data.join(file)))?;
    }
    fs::set_permissions(data.join(KEY), fs::Permissions::from_mode(0o600))?;
    Ok(())
}

/// The server in the foreground.
pub(crate) fn server(spec: &Spec) -> Result<Command> {
    let database = spec.postgres.as_ref().context("this cluster was started without Postgres")?;
    let mut server = as_postgres(&database.bin.join("postgres"));
    server.arg("-D").arg(data(spec));
    for setting in [
        format!("listen_addresses={}", spec.addresses().node_ip()),
        format!("unix_socket_directories={SOCKETS}"),
        "max_connections=200".to_owned(),
        "ssl=on".to_owned(),
        format!("ssl_cert_file={CERTIFICATE}"),
        format!("ssl_key_file={KEY}"),
        // A killed server still recovers (the kernel keeps what was written); only a power cut would lose data.
        "fsync=off".to_owned(),
    ] {
        server.args(["-c", &setting]);
    }
    Ok(server)
}

/// Whether the server takes connections.
pub(crate) fn answers(spec: &Spec) -> bool {
    query(spec, "postgres", "SELECT 1").is_ok()
}

/// Makes the product's user and database.
pub(crate) fn populate(spec: &Spec, database: &Database) -> Result<()> {
    query(spec, "postgres", &format!("CREATE ROLE {NAME} LOGIN PASSWORD '{}'", database.password))?;
    query(spec, "postgres", &format!("CREATE DATABASE {NAME} OWNER {NAME}"))?;
    Ok(())
}

fn query(spec: &Spec, database: &str, sql: &str) -> Result<String> {
    let bin = &spec.postgres.as_ref().context("this cluster was started without Postgres")?.bin;
    output(as_postgres(&bin.join("psql")).args(["-h", SOCKETS, "-v", "ON_ERROR_STOP=1", "-qAtd", database, "-c", sql]))
}

fn data(spec: &Spec) -> PathBuf {
    spec.run().join("postgres")
}

fn as_postgres(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--"]).arg(program).current_dir("/");
    command
}
