//! What is in the database. Every query names its namespace or its run; nothing here knows HTTP.

pub mod blobs;
pub mod collect;
pub mod forks;
pub mod graphs;
pub mod packs;
pub mod payload;
pub mod prints;
pub mod runs;
pub mod snapshots;
pub mod spans;
pub mod uploads;

use crate::db::Connection;
use crate::problem::ApiResult;

pub use packs::{Namespace, Packs};

/// A namespace, which gets its number at first sight.
///
/// # Errors
/// What the database says.
pub async fn namespace(client: &impl Connection, packs: &Packs, name: &str) -> ApiResult<Namespace> {
    let namespace = |number| Namespace { number, packs: packs.clone() };
    if let Some(row) = client.fetch_opt("SELECT ns FROM namespaces WHERE name = $1", &[&name]).await? {
        return Ok(namespace(row.get(0)));
    }
    let row = client
        .fetch_one("INSERT INTO namespaces (name) VALUES ($1) ON CONFLICT (name) DO UPDATE SET name = excluded.name RETURNING ns", &[&name])
        .await?;
    Ok(namespace(row.get(0)))
}
