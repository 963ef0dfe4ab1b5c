//! Forks: registered, claimed, terminal. Each change is a compare-and-set under the row's lock.

mod close;
mod register;
mod steps;

pub use close::{close, resource_gone};
pub use register::{NUL, register, without_nul};
pub use steps::{answered, ask_once, begin, cached, end, reused};

use replayfork_client::fork::{Fork, ForkResult, ForkState, PlanOverview};
use replayfork_core::Digest;
use replayfork_core::fork::DeletionPolicy;
use serde_json::Value;
use uuid::Uuid;

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::{Namespace, Packs};

const COLUMNS: &str = "f.uid, n.name AS namespace, f.name, f.state, f.plan -> 'overview' AS overview, f.pod_uid, f.deletion_policy, f.result, \
    s.id AS source_run, s.name AS source_run_name, r.id AS fork_run, r.name AS fork_run_name, \
    to_char(f.registered_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS registered_at, \
    to_char(f.cancel_requested_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS cancel_requested_at, \
    to_char(f.claimed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS claimed_at, \
    to_char(f.terminal_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS terminal_at";
const FROM: &str = "forks f JOIN namespaces n USING (ns) LEFT JOIN runs s ON s.rid = f.source_rid LEFT JOIN runs r ON r.rid = f.fork_rid";

fn view(row: &tokio_postgres::Row) -> ApiResult<Fork> {
    let parse = |column: &str| row.get::<_, Option<Value>>(column);
    let result: Option<ForkResult> = parse("result").map(serde_json::from_value).transpose().map_err(|e| ApiError::internal(&e))?;
    let plan: Option<PlanOverview> = parse("overview").map(serde_json::from_value).transpose().map_err(|e| ApiError::internal(&e))?;
    Ok(Fork {
        uid: row.get("uid"),
        namespace: row.get("namespace"),
        name: row.get("name"),
        state: match row.get("state") {
            "registered" => ForkState::Registered,
            "claimed" => ForkState::Claimed,
            _ => ForkState::Terminal,
        },
        source_run: row.get("source_run"),
        source_run_name: row.get("source_run_name"),
        fork_run: row.get("fork_run"),
        fork_run_name: row.get("fork_run_name"),
        plan,
        pod_uid: row.get("pod_uid"),
        cancel_requested_at: row.get("cancel_requested_at"),
        deletion_policy: if row.get::<_, &str>("deletion_policy") == "DeleteRun" {
            DeletionPolicy::DeleteRun
        } else {
            DeletionPolicy::Retain
        },
        result,
        registered_at: row.get("registered_at"),
        claimed_at: row.get("claimed_at"),
        terminal_at: row.get("terminal_at"),
    })
}

/// # Errors
/// 404 for an unknown uid.
pub async fn get(client: &impl Connection, uid: Uuid) -> ApiResult<Fork> {
    let row = client.fetch_opt(&format!("SELECT {COLUMNS} FROM {FROM} WHERE f.uid = $1"), &[&uid]).await?;
    view(&row.ok_or_else(|| unknown(uid))?)
}

fn unknown(uid: Uuid) -> ApiError {
    ApiError::not_found("ForkNotFound", format!("no fork with the uid {uid} is registered"))
}

/// Forks that the operator must compare with the custom resources that exist: open ones, and those whose run goes with them.
///
/// # Errors
/// What the database says.
pub async fn open_or_owned(client: &impl Connection) -> ApiResult<Vec<Fork>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM {FROM} WHERE f.cr_gone_at IS NULL AND (f.state <> 'terminal' OR (f.deletion_policy = 'DeleteRun' AND f.fork_rid IS NOT NULL)) ORDER BY f.registered_at"
    );
    client.fetch(&sql, &[]).await?.iter().map(view).collect()
}

/// What a sandbox's request is checked against.
pub struct Claimed {
    pub fork_rid: i64,
    pub source_rid: i64,
    pub ns: Namespace,
}

/// The row lock of a claimed fork of this pod.
///
/// # Errors
/// 404; 409 where the fork is not claimed by this pod, or has ended.
pub async fn claimed(client: &impl Connection, packs: &Packs, uid: Uuid, pod_uid: &str) -> ApiResult<Claimed> {
    let row = client
        .fetch_opt("SELECT state, pod_uid, fork_rid, source_rid, ns FROM forks WHERE uid = $1 FOR UPDATE", &[&uid])
        .await?
        .ok_or_else(|| unknown(uid))?;
    match row.get::<_, &str>(0) {
        "claimed" if row.get::<_, Option<&str>>(1) == Some(pod_uid) => {}
        "terminal" => return Err(ApiError::conflict("ForkTerminal", "the fork has ended; its result stands")),
        _ => return Err(ApiError::conflict("ForkNotClaimed", "the fork is not claimed by this pod")),
    }
    let missing = || ApiError::conflict("ForkRunGone", "the fork's run was deleted");
    Ok(Claimed {
        fork_rid: row.get::<_, Option<i64>>(2).ok_or_else(missing)?,
        source_rid: row.get::<_, Option<i64>>(3).ok_or_else(missing)?,
        ns: Namespace { number: row.get(4), packs: packs.clone() },
    })
}

/// Claims a fork for a pod: once. The same number gets the same answer.
///
/// # Errors
/// 425 until the operator has named the pod; 409 for any other pod or number, and after the end.
pub async fn claim(client: &impl Connection, uid: Uuid, pod_uid: &str, nonce: &[u8]) -> ApiResult<()> {
    let row = client
        .fetch_opt("SELECT state, pod_uid, claim FROM forks WHERE uid = $1 FOR UPDATE", &[&uid])
        .await?
        .ok_or_else(|| unknown(uid))?;
    let (state, named, claim): (&str, Option<&str>, Option<&[u8]>) = (row.get(0), row.get(1), row.get(2));
    match (state, named) {
        ("terminal", _) => Err(ApiError::conflict("ForkTerminal", "the fork has ended; its result stands")),
        (_, None) => {
            Err(ApiError::new(axum::http::StatusCode::TOO_EARLY, "PodNotNamed", "the operator has not named the fork's pod yet; try again"))
        }
        (_, Some(pod)) if pod != pod_uid => Err(ApiError::conflict("ForkClaimed", "another pod is this fork's")),
        ("claimed", _) if claim == Some(nonce) => Ok(()),
        ("claimed", _) => Err(ApiError::conflict("ForkClaimed", "the fork is already claimed; a fork runs at most once")),
        _ => {
            client.run("UPDATE forks SET state = 'claimed', claim = $2, claimed_at = now() WHERE uid = $1", &[&uid, &nonce]).await?;
            Ok(())
        }
    }
}

/// Names the pod of a fork's Job. Said again, it is the same pod or it is refused.
///
/// # Errors
/// 404; 409 once another pod is named or the fork has ended.
pub async fn name_pod(client: &impl Connection, uid: Uuid, pod_uid: &str) -> ApiResult<()> {
    let row = client.fetch_opt("SELECT state, pod_uid FROM forks WHERE uid = $1 FOR UPDATE", &[&uid]).await?.ok_or_else(|| unknown(uid))?;
    let (state, named): (&str, Option<&str>) = (row.get(0), row.get(1));
    match (state, named) {
        (_, Some(pod)) if pod == pod_uid => Ok(()),
        // The Job may have been made anew (suspended and resumed) as long as nothing has been claimed.
        ("registered", _) => {
            client.run("UPDATE forks SET pod_uid = $2 WHERE uid = $1", &[&uid, &pod_uid]).await?;
            Ok(())
        }
        _ => Err(ApiError::conflict("ForkClaimed", "the fork is claimed by another pod, or has ended")),
    }
}

/// Asks a running fork to stop.
///
/// # Errors
/// 404.
pub async fn request_cancel(client: &impl Connection, uid: Uuid) -> ApiResult<()> {
    client
        .run("UPDATE forks SET cancel_requested_at = now() WHERE uid = $1 AND state <> 'terminal' AND cancel_requested_at IS NULL", &[&uid])
        .await?;
    Ok(())
}

/// Whether a fork is asked to stop, and whether it has ended.
///
/// # Errors
/// 404.
pub async fn asked_to_stop(client: &impl Connection, uid: Uuid) -> ApiResult<(bool, bool)> {
    let row = client
        .fetch_opt("SELECT cancel_requested_at IS NOT NULL, state = 'terminal' FROM forks WHERE uid = $1", &[&uid])
        .await?
        .ok_or_else(|| unknown(uid))?;
    Ok((row.get(0), row.get(1)))
}

/// What the sandbox's bundle is made of: spec, source, fork.
///
/// # Errors
/// 404.
pub async fn spec_of(client: &impl Connection, uid: Uuid) -> ApiResult<(Value, Digest, i64)> {
    let row =
        client.fetch_opt("SELECT spec, plan_digest, source_rid FROM forks WHERE uid = $1 AND source_rid IS NOT NULL", &[&uid]).await?;
    let row = row.ok_or_else(|| unknown(uid))?;
    let digest = row.get::<_, Option<&[u8]>>(1).and_then(Digest::from_slice).ok_or_else(|| unknown(uid))?;
    Ok((row.get(0), digest, row.get(2)))
}

/// Whether a fork's sandbox may restore this tree: only the roots of itself and of the runs that it needs.
///
/// # Errors
/// 404 otherwise.
pub async fn check_root(client: &impl Connection, claimed: &Claimed, node: &Digest) -> ApiResult<()> {
    let row = client
        .fetch_opt(
            "SELECT 1 FROM snapshots WHERE node = $2 AND (rid = $1 OR rid IN (SELECT needs FROM run_deps WHERE rid = $1)) LIMIT 1",
            &[&claimed.fork_rid, &node.as_bytes()],
        )
        .await?;
    row.map(drop).ok_or_else(|| ApiError::not_found("SnapshotNotFound", format!("{node} is no workspace state of this fork or its source")))
}
