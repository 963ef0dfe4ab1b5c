//! What is in the database. Every query names its namespace or its run; nothing here knows HTTP.

pub mod blobs;
pub mod collect;
pub mod forks;
pub mod graphs;
pub mod payload;
pub mod prints;
pub mod runs;
pub mod snapshots;
pub mod spans;
pub mod uploads;

use crate::problem::ApiResult;
use deadpool_postgres::GenericClient;

/// The number of a namespace, made at first sight.
pub async fn namespace(client: &impl GenericClient, name: &str) -> ApiResult<i32> {
    if let Some(row) = client.query_opt("SELECT ns FROM namespaces WHERE name = $1", &[&name]).await? {
        return Ok(row.get(0));
    }
    let row = client
        .query_one("INSERT INTO namespaces (name) VALUES ($1) ON CONFLICT (name) DO UPDATE SET name = excluded.name RETURNING ns", &[&name])
        .await?;
    Ok(row.get(0))
}
