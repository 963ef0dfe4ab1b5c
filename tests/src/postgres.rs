//! A real Postgres of a test's or a bench's own, with the product's schema.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use deadpool_postgres::Pool;
use replayfork_api_server::db;

/// The server; it ends, and its files go, with it.
pub struct Server {
    process: Child,
    folder: tempfile::TempDir,
}

impl Server {
    /// Starts the newest Postgres of this machine on a socket in a temporary folder.
    pub fn start() -> Result<Self> {
        let bin = newest()?;
        let folder = tempfile::tempdir()?;
        let as_postgres = |program: &str| {
            let mut command = Command::new(bin.join(program));
            // It refuses to run as root.
            if rustix::process::geteuid().is_root() {
                let (uid, gid) = ids("postgres").unwrap_or((65534, 65534));
                command.uid(uid).gid(gid);
            }
            command.current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
            command
        };
        if let Some((uid, gid)) = ids("postgres").filter(|_| rustix::process::geteuid().is_root()) {
            std::os::unix::fs::chown(folder.path(), Some(uid), Some(gid))?;
        }
        let data = folder.path().join("data");
        let mut initdb = as_postgres("initdb");
        initdb.args(["--no-sync", "--encoding=UTF8", "--locale=C.UTF-8", "--auth=trust", "-U", "postgres", "-D"]).arg(&data);
        ensure!(initdb.status().context("initdb")?.success(), "initdb failed");
        let mut server = as_postgres("postgres");
        server
            .arg("-D")
            .arg(&data)
            .args(["-c", "listen_addresses=", "-c"])
            .arg(format!("unix_socket_directories={}", folder.path().display()));
        for setting in ["fsync=off", "shared_buffers=1GB", "work_mem=64MB", "max_wal_size=8GB", "jit=off"] {
            server.args(["-c", setting]);
        }
        let process = server.spawn().context("postgres")?;
        Ok(Self { process, folder })
    }

    pub fn url(&self) -> String {
        format!("host={} user=postgres dbname=postgres", self.folder.path().display())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&self.process), rustix::process::Signal::INT);
        let _ = self.process.wait();
    }
}

fn newest() -> Result<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").context("Postgres is missing: apt-get install postgresql")?;
    let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let found = versions.filter_map(|entry| entry.ok().map(|e| e.path())).filter_map(|path| Some((version(&path)?, path)));
    Ok(found.max().context("no Postgres server below /usr/lib/postgresql: apt-get install postgresql")?.1.join("bin"))
}

fn ids(user: &str) -> Option<(u32, u32)> {
    let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
    let fields: Vec<&str> = passwd.lines().find(|line| line.split(':').next() == Some(user))?.split(':').collect();
    Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
}

/// Connections to a server that may be starting; the product's schema is there then.
pub async fn pool(url: &str) -> Result<Pool> {
    let pool = db::pool(url, None, 4)?;
    let begun = Instant::now();
    while let Err(error) = pool.get().await {
        ensure!(begun.elapsed() < Duration::from_secs(60), "Postgres does not answer: {error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    db::migrate(&pool).await?;
    Ok(pool)
}
