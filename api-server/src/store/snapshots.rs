//! Workspace states beside spans.

use std::collections::HashMap;

use replayfork_client::ingest::{Edge, SnapshotUpload};
use replayfork_core::Digest;
use replayfork_core::model::SnapshotRef;
use tokio_postgres::Row;

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::blobs;

/// Records workspace states. A state is accepted only if its tree is complete; the row is written before that is
/// checked, in the same transaction, so that no collection can come between.
///
/// # Errors
/// 400 for an upload that is neither a state nor a reason; 409 listing the roots that must be sent first.
pub async fn put(client: &impl Connection, ns: i32, rid: i64, uploads: &[SnapshotUpload]) -> ApiResult<()> {
    let mut roots = Vec::new();
    for upload in uploads {
        let (node, content) = match (&upload.snapshot, &upload.missing) {
            (Some(snapshot), None) => {
                roots.push(snapshot.node);
                (Some(snapshot.node.as_bytes()), Some(snapshot.content.as_bytes()))
            }
            (None, Some(_)) => (None, None),
            _ => {
                return Err(ApiError::bad_request(
                    "SnapshotInvalid",
                    format!("snapshot of span {:?}: give `snapshot` or `missing`", upload.span),
                ));
            }
        };
        client
            .run(
                "INSERT INTO snapshots (rid, span_id, edge, node, content, missing) VALUES ($1, $2, $3::text::char, $4, $5, $6)
                 ON CONFLICT (rid, span_id, edge) DO UPDATE SET node = $4, content = $5, missing = $6, inherited = false WHERE snapshots.inherited",
                &[&rid, &upload.span, &upload.edge.code(), &node, &content, &upload.missing],
            )
            .await?;
    }
    roots.sort_unstable();
    roots.dedup();
    let absent = blobs::missing(client, ns, &roots).await?;
    if absent.is_empty() { Ok(()) } else { Err(ApiError::missing(absent)) }
}

/// States and reasons by span and edge.
pub type BySpan = HashMap<(String, Edge), Result<SnapshotRef, String>>;

fn state(row: &Row) -> Result<SnapshotRef, String> {
    let digest = |column: &str| row.get::<_, Option<&[u8]>>(column).and_then(Digest::from_slice);
    match (digest("node"), digest("content")) {
        (Some(node), Some(content)) => Ok(SnapshotRef { content, node }),
        _ => Err(row.get::<_, Option<String>>("missing").unwrap_or_default()),
    }
}

/// All states of a run's own rows, or only those of some spans.
///
/// # Errors
/// What the database says.
pub async fn of_run(client: &impl Connection, rid: i64, spans: Option<&[String]>) -> ApiResult<BySpan> {
    let rows = client
        .fetch(
            "SELECT span_id, edge::text, node, content, missing FROM snapshots WHERE rid = $1 AND ($2::text[] IS NULL OR span_id = ANY($2))",
            &[&rid, &spans],
        )
        .await?;
    let edge = |row: &Row| if row.get::<_, &str>("edge") == "b" { Edge::Before } else { Edge::After };
    Ok(rows.iter().map(|row| ((row.get("span_id"), edge(row)), state(row))).collect())
}

/// A workspace of the namespace by its content, with a run that has it.
///
/// # Errors
/// What the database says.
pub async fn by_content(client: &impl Connection, ns: i32, content: &Digest) -> ApiResult<Option<(SnapshotRef, i64)>> {
    let row = client
        .fetch_opt(
            "SELECT s.node, s.rid FROM snapshots s JOIN runs r USING (rid) WHERE s.content = $2 AND r.ns = $1 AND r.state <> 'deleted' ORDER BY s.rid LIMIT 1",
            &[&ns, &content.as_bytes()],
        )
        .await?;
    Ok(row.and_then(|r| Some((SnapshotRef { content: *content, node: Digest::from_slice(r.get(0))? }, r.get(1)))))
}
