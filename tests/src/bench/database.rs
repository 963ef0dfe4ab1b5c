//! A real Postgres of its own, with the product's schema and its rows.

use std::fmt::Write as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use deadpool_postgres::{Object, Pool};
use futures::SinkExt;
use replayfork_api_server::db;
use replayfork_api_server::store::{blobs, namespace, runs};
use replayfork_client::ingest::{CreateRun, FinishRun};
use replayfork_core::Digest;
use replayfork_core::model::RunEnvironment;
use replayfork_snapshot::{BlobKind, Directory, PackBuilder};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::run::{Generator, Step};

const SEGMENT: usize = 256 << 10;
const NAMESPACE: &str = "bench";

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

/// Writes a generated run, sealed, and its edges for the peers. Gives its name.
pub async fn write(client: &Object, mut run: Generator, steps: usize, name: &str) -> Result<i64> {
    let ns = namespace(client, NAMESPACE).await.map_err(said)?;
    let environment = RunEnvironment { image: Some("agent:1".into()), workspace_root: Some("/work".into()), ..RunEnvironment::default() };
    let id = Uuid::new_v4();
    let request: CreateRun =
        serde_json::from_value(serde_json::json!({"id": id, "name": name, "agent": "agent", "environment": environment}))?;
    runs::create(client, ns, &request, 1).await.map_err(said)?;
    let rid: i64 = client.query_one("SELECT rid FROM runs WHERE id = $1", &[&id]).await?.get(0);
    let state = empty_workspace(client, ns).await?;
    let (mut payloads, mut segments) = (Vec::with_capacity(SEGMENT), 0);
    loop {
        let page: Vec<Step> = run.by_ref().take(20_000).collect();
        if page.is_empty() {
            break;
        }
        let (mut rows, mut states, mut edges, mut frames) = (String::new(), String::new(), String::new(), Vec::new());
        let mut digests = String::new();
        for step in &page {
            let mut place = |value: &serde_json::Value| -> Result<(i32, usize, usize)> {
                let bytes = serde_json::to_vec(value)?;
                if payloads.len() + bytes.len() > SEGMENT {
                    frames.push((segments, std::mem::take(&mut payloads)));
                    segments += 1;
                }
                let place = (segments, payloads.len(), bytes.len());
                payloads.extend_from_slice(&bytes);
                Ok(place)
            };
            let (i, o) = (place(&step.opening)?, place(&step.closing)?);
            let parent = step.parent.as_deref().unwrap_or("\\N");
            writeln!(
                rows,
                "{rid}\t{}\t{}\t{parent}\t1\t{}\t2\t1\t0\t{}\t{}\t{}\t{rid}\t{}\t{}\t{}\t{}\t{}\t{}",
                step.id, step.started, step.kind, step.started, step.ended, step.name, i.0, i.1, i.2, o.0, o.1, o.2
            )?;
            let digest = |value: &serde_json::Value| Uuid::from_slice(&Digest::of_json(value).as_bytes()[..16]);
            let (asked, gave) = (digest(&step.opening["executor"])?, digest(&step.closing["output"])?);
            writeln!(digests, "{rid}\t{}\t{}\t{}\t{}\t{asked}\t{gave}", step.id, step.started, step.kind, step.name)?;
            for edge in ["b", "a"].iter().filter(|_| step.sees_workspace) {
                writeln!(states, "{rid}\t{}\t{edge}\t\\\\x{}\t\\\\x{}", step.id, state.0, state.1)?;
            }
        }
        for step in &page {
            for &need in &step.needs {
                writeln!(edges, "{rid}\t{}\t{}\t{}\t{}", run.id(need as usize), step.id, need, run.place(step.started))?;
            }
        }
        copy(client, "spans (rid, span_id, ord, parent_id, rev, kind, status, verdict, fidelity, started, ended, name, pay_rid, in_segment, in_at, in_len, out_segment, out_at, out_len)", rows).await?;
        copy(client, "snapshots (rid, span_id, edge, node, content)", states).await?;
        copy(client, "bench_edges (rid, src, dst, src_n, dst_n)", edges).await?;
        copy(client, "bench_steps (rid, span_id, ord, kind, name, asked, gave)", digests).await?;
        write_segments(client, rid, frames).await?;
    }
    write_segments(client, rid, vec![(segments, payloads)]).await?;
    client.execute("UPDATE runs SET spans = $2, segments = $3 WHERE rid = $1", &[&rid, &(steps as i32), &(segments + 1)]).await?;
    let finish: FinishRun = serde_json::from_value(serde_json::json!({"outcome": "Completed", "ended": 2}))?;
    runs::finish(client, ns, id, &finish, 2).await.map_err(said)?;
    Ok(rid)
}

async fn write_segments(client: &Object, rid: i64, frames: Vec<(i32, Vec<u8>)>) -> Result<()> {
    for (segment, raw) in frames {
        let data = zstd::bulk::compress(&raw, 1)?;
        let values: [&(dyn ToSql + Sync); 4] = [&rid, &segment, &(raw.len() as i32), &data];
        client.execute("INSERT INTO segments (rid, segment, raw_len, data) VALUES ($1, $2, $3, $4)", &values).await?;
    }
    Ok(())
}

async fn copy(client: &Object, into: &str, rows: String) -> Result<()> {
    let sink = client.copy_in(&format!("COPY {into} FROM STDIN")).await?;
    let mut sink = std::pin::pin!(sink);
    sink.send(bytes::Bytes::from(rows)).await?;
    sink.finish().await?;
    Ok(())
}

/// Node and content digest of a workspace without files.
async fn empty_workspace(client: &Object, ns: i32) -> Result<(Digest, Digest)> {
    let directory = Directory::default();
    let bytes = directory.encode();
    let node = Digest::of(&bytes);
    let mut pack = PackBuilder::default();
    pack.add(node, BlobKind::Directory, &bytes);
    blobs::put_pack(client, ns, &pack.finish()).await.map_err(said)?;
    Ok((node, directory.content()))
}

/// Tables of the peers: edges by id as the schema has them, and by number; and steps with digests of what they were asked and gave.
pub async fn make_tables(client: &Object) -> Result<()> {
    let sql = "CREATE TABLE bench_edges (rid bigint NOT NULL, src text COLLATE \"C\" NOT NULL, dst text COLLATE \"C\" NOT NULL, src_n int NOT NULL, dst_n int NOT NULL);
        CREATE TABLE bench_steps (rid bigint NOT NULL, span_id text COLLATE \"C\" NOT NULL, ord bigint NOT NULL, kind smallint NOT NULL, name text COLLATE \"C\" NOT NULL, asked uuid NOT NULL, gave uuid NOT NULL)";
    Ok(client.batch_execute(sql).await?)
}

/// What a good plain SQL solution has: an index that holds all that a step of the recursion, or a side of the join, reads.
pub async fn index_tables(client: &Object) -> Result<()> {
    let sql = "CREATE INDEX ON bench_edges (rid, src, dst); CREATE INDEX ON bench_edges (rid, src_n, dst_n);
        CREATE INDEX ON bench_steps (rid, kind, name, asked, ord) INCLUDE (gave, span_id)";
    client.batch_execute(sql).await?;
    for table in ["bench_edges", "bench_steps", "spans", "snapshots", "segments", "run_graphs"] {
        client.batch_execute(&format!("VACUUM ANALYZE {table}")).await?;
    }
    Ok(())
}

pub fn said(error: replayfork_api_server::problem::ApiError) -> anyhow::Error {
    anyhow::anyhow!("{}: {}", error.reason, error.detail)
}
