//! Contents that users send for patches, before there is a fork that names them.

use deadpool_postgres::Transaction;
use replayfork_core::Digest;
use replayfork_snapshot::{BlobKind, PackBuilder};

use crate::db::Connection;
use crate::problem::ApiResult;
use crate::store::{Namespace, blobs};

/// Stores a content; sent again, it is kept for another day.
///
/// # Errors
/// What the database says.
pub async fn put(tx: &Transaction<'_>, ns: &Namespace, content: &[u8]) -> ApiResult<Digest> {
    let digest = Digest::of(content);
    tx.run(
        "INSERT INTO uploads (ns, digest, size) VALUES ($1, $2, $3) ON CONFLICT (ns, digest) DO UPDATE SET uploaded_at = now()",
        &[&ns.number, &digest.as_bytes(), &(content.len() as i64)],
    )
    .await?;
    if !blobs::missing(tx, ns.number, &[digest]).await?.is_empty() {
        let mut pack = PackBuilder::default();
        pack.add(digest, BlobKind::Data, content);
        blobs::put_pack(tx, ns, &blobs::Verified::of(pack.finish())?).await?;
    }
    Ok(digest)
}
