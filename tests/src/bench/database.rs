//! The product's rows, and tables of the peers.

use std::convert::Infallible;
use std::fmt::Write as _;

use anyhow::Result;
use deadpool_postgres::Object;
use futures::SinkExt;
use replayfork_api_server::store::{Namespace, Packs, blobs, namespace, runs};
use replayfork_client::ingest::{CreateRun, FinishRun};
use replayfork_core::Digest;
use replayfork_core::model::RunEnvironment;
use replayfork_snapshot::{BlobKind, DirectoryBuilder, PackBuilder};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::run::{Generator, Step};

const SEGMENT: usize = 256 << 10;
const NAMESPACE: &str = "bench";

/// Writes a generated run, sealed, and its edges for the peers. Gives its name.
pub async fn write(client: &mut Object, mut run: Generator, steps: usize, name: &str) -> Result<i64> {
    let ns = namespace(client, &Packs::default(), NAMESPACE).await.map_err(said)?;
    let environment = RunEnvironment { image: Some("agent:1".into()), workspace_root: Some("/work".into()), ..RunEnvironment::default() };
    let id = Uuid::new_v4();
    let request: CreateRun =
        serde_json::from_value(serde_json::json!({"id": id, "name": name, "agent": "agent", "environment": environment}))?;
    runs::create(client, ns.number, &request, 1).await.map_err(said)?;
    let rid: i64 = client.query_one("SELECT rid FROM runs WHERE id = $1", &[&id]).await?.get(0);
    let state = empty_workspace(client, &ns).await?;
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
    runs::finish(client, ns.number, id, &finish, 2).await.map_err(said)?;
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
async fn empty_workspace(client: &mut Object, ns: &Namespace) -> Result<(Digest, Digest)> {
    let mut pack = PackBuilder::default();
    let mut keep = |node, bytes: &[u8]| {
        pack.add(node, BlobKind::Directory, bytes);
        Ok::<_, Infallible>(())
    };
    let Ok(empty) = DirectoryBuilder::default().finish(&mut keep);
    let tx = client.transaction().await?;
    blobs::put_pack(&tx, ns, &blobs::Verified::of(pack.finish()).map_err(said)?).await.map_err(said)?;
    tx.commit().await?;
    Ok((empty.node, empty.content))
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
