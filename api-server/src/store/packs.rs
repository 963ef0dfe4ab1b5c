//! Where packs lie: in Postgres beside their rows, or in an object store.
//!
//! Postgres is the truth: an object counts only once a row of `packs` names it. It is written before the transaction that names it
//! ends, and its name tells which one that is. So an object that no row names is nobody's as soon as that transaction has ended,
//! whether it failed, or the row has been deleted since; whoever collects blobs lists the objects and deletes those. Each database has a
//! folder of its own, so that two installations may share a bucket.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context;
use bytes::Bytes;
use deadpool_postgres::{GenericClient, Transaction};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, ObjectStoreScheme};
use replayfork_snapshot::Frame;
use url::Url;
use uuid::Uuid;

use crate::problem::{ApiError, ApiResult};

/// What the settings of object stores begin with in the environment; nothing else there is for them.
pub const SETTINGS: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];
/// Objects that are read at once.
const AT_ONCE: usize = 8;
/// Objects that one statement looks for.
const LISTED: usize = 1000;

/// Where new packs go, and where those in objects are.
#[derive(Clone, Debug, Default)]
pub struct Packs(Option<Arc<Objects>>);

#[derive(Debug)]
struct Objects {
    store: Box<dyn ObjectStore>,
    folder: Path,
}

/// A namespace: its number, and where its blobs lie.
#[derive(Clone, Debug)]
pub struct Namespace {
    pub number: i32,
    pub packs: Packs,
}

/// A part of a pack: its number and the frame.
pub type Wanted = (i64, Frame);

impl Packs {
    /// `at`: `postgres`, or the URL of a folder or bucket (`file:///folder`, `s3://bucket/folder`, `gs://…`, `az://…`), whose
    /// `settings` are named as their vendors do (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, …); names that don't begin with one of
    /// [`SETTINGS`] are none.
    ///
    /// # Errors
    /// An address that is none, settings that don't fit, a store that can't be written to, or a database whose packs lie in objects
    /// while `at` says `postgres`.
    pub async fn open(client: &impl GenericClient, at: &str, settings: impl IntoIterator<Item = (String, String)>) -> anyhow::Result<Self> {
        if at == "postgres" {
            let elsewhere = client.query_opt("SELECT 1 FROM packs WHERE object IS NOT NULL LIMIT 1", &[]).await?;
            anyhow::ensure!(
                elsewhere.is_none(),
                "packs of this database lie in an object store; set REPLAYFORK_BLOB_STORE (blobs.store.url) to its address"
            );
            return Ok(Self::default());
        }
        let (store, root) = connect(at, settings)?;
        let database: Uuid = client.query_one("SELECT id FROM database_identity", &[]).await?.get(0);
        let folder = root.join(database.simple().to_string());
        let probe = folder.clone().join("probe");
        store.put(&probe, Bytes::from_static(b"ReplayFork can write here").into()).await.with_context(|| format!("can't write to {at}"))?;
        store.get_range(&probe, 0..10).await.with_context(|| format!("can't read from {at}"))?;
        store.delete(&probe).await.with_context(|| format!("can't delete from {at}"))?;
        Ok(Self(Some(Arc::new(Objects { store, folder }))))
    }

    /// Stores a pack's frames; gives its number.
    ///
    /// # Errors
    /// What the database or the object store says.
    pub async fn put(&self, tx: &Transaction<'_>, ns: i32, frames: &[u8]) -> ApiResult<i64> {
        let size = frames.len() as i32;
        let Some(objects) = &self.0 else {
            let sql = "INSERT INTO packs (ns, size, data) VALUES ($1, $2, $3) RETURNING pack";
            return Ok(tx.query_one(sql, &[&ns, &size, &frames]).await?.get(0));
        };
        let transaction: String = tx.query_one("SELECT pg_current_xact_id()::text", &[]).await?.get(0);
        let object = format!("{transaction}-{}", Uuid::new_v4().simple());
        objects.store.put(&objects.folder.clone().join(object.as_str()), Bytes::copy_from_slice(frames).into()).await.map_err(failed)?;
        let sql = "INSERT INTO packs (ns, size, object) VALUES ($1, $2, $3) RETURNING pack";
        Ok(tx.query_one(sql, &[&ns, &size, &object]).await?.get(0))
    }

    /// All frames of a pack.
    ///
    /// # Errors
    /// What the database or the object store says; no such pack.
    pub async fn whole(&self, client: &impl GenericClient, ns: i32, pack: i64) -> ApiResult<Vec<u8>> {
        let row = client.query_one("SELECT data, object FROM packs WHERE ns = $1 AND pack = $2", &[&ns, &pack]).await?;
        if let Some(data) = row.get(0) {
            return Ok(data);
        }
        let objects = self.objects()?;
        let object = objects.store.get(&objects.folder.clone().join(row.get::<_, &str>(1))).await.map_err(failed)?;
        Ok(object.bytes().await.map_err(failed)?.to_vec())
    }

    /// Frames as they are stored. Those of packs that are gone, or have moved, are left out.
    ///
    /// # Errors
    /// What the database or the object store says.
    pub async fn frames(&self, client: &impl GenericClient, ns: i32, wanted: &[Wanted]) -> ApiResult<Vec<(Wanted, Bytes)>> {
        let packs: Vec<i64> = wanted.iter().map(|(pack, _)| *pack).collect();
        let (at, len): (Vec<i32>, Vec<i32>) = wanted.iter().map(|(_, frame)| (frame.at as i32, frame.len as i32)).unzip();
        let rows = client
            .query(
                "SELECT w.place, p.object, substring(p.data FROM w.at + 1 FOR w.len)
                 FROM unnest($2::bigint[], $3::int[], $4::int[]) WITH ORDINALITY w(pack, at, len, place) JOIN packs p ON p.ns = $1 AND p.pack = w.pack",
                &[&ns, &packs, &at, &len],
            )
            .await?;
        let mut found = Vec::with_capacity(rows.len());
        let mut in_objects: BTreeMap<String, Vec<Wanted>> = BTreeMap::new();
        for row in rows {
            let wanted = wanted[row.get::<_, i64>(0) as usize - 1];
            match row.get::<_, Option<Vec<u8>>>(2) {
                Some(data) => found.push((wanted, data.into())),
                None => in_objects.entry(row.get(1)).or_default().push(wanted),
            }
        }
        if !in_objects.is_empty() {
            let objects = self.objects()?;
            let mut read = stream::iter(in_objects).map(|(object, wanted)| objects.read(object, wanted)).buffer_unordered(AT_ONCE);
            while let Some(of_one) = read.try_next().await? {
                found.extend(of_one);
            }
        }
        Ok(found)
    }

    fn objects(&self) -> ApiResult<&Objects> {
        let lacking = || ApiError::internal(&"a pack lies in an object store, and this api-server has none");
        self.0.as_deref().ok_or_else(lacking)
    }

    /// Deletes the objects that are nobody's; gives how many.
    ///
    /// # Errors
    /// What the database or the object store says.
    pub async fn sweep(&self, client: &impl GenericClient) -> ApiResult<u64> {
        let Some(objects) = self.0.as_deref() else { return Ok(0) };
        let mut listed = objects.store.list(Some(&objects.folder)).try_chunks(LISTED);
        let mut deleted = 0;
        while let Some(some) = listed.next().await {
            let some = some.map_err(|e| failed(e.1))?;
            let names: Vec<&str> = some.iter().filter_map(|o| o.location.filename()).filter(|name| is_a_pack(name)).collect();
            // In one statement, so that of a transaction that has ended by now its row is seen.
            let nobodys = client
                .query(
                    "SELECT o FROM unnest($1::text[]) o WHERE split_part(o, '-', 1)::xid8 < pg_snapshot_xmin(pg_current_snapshot())
                     AND NOT EXISTS (SELECT 1 FROM packs p WHERE p.object = o)",
                    &[&names],
                )
                .await?;
            for row in nobodys {
                objects.store.delete(&objects.folder.clone().join(row.get::<_, &str>(0))).await.map_err(failed)?;
                deleted += 1;
            }
        }
        Ok(deleted)
    }
}

impl Objects {
    async fn read(&self, object: String, wanted: Vec<Wanted>) -> ApiResult<Vec<(Wanted, Bytes)>> {
        let ranges: Vec<_> = wanted.iter().map(|(_, frame)| u64::from(frame.at)..u64::from(frame.at) + u64::from(frame.len)).collect();
        match self.store.get_ranges(&self.folder.clone().join(object), &ranges).await {
            Ok(frames) => Ok(wanted.into_iter().zip(frames).collect()),
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(failed(error)),
        }
    }
}

/// A transaction's number and a UUID, as [`Packs::put`] writes them.
fn is_a_pack(name: &str) -> bool {
    name.split_once('-').is_some_and(|(xid, id)| xid.parse::<u64>().is_ok() && Uuid::try_parse(id).is_ok())
}

fn connect(at: &str, settings: impl IntoIterator<Item = (String, String)>) -> anyhow::Result<(Box<dyn ObjectStore>, Path)> {
    let url: Url =
        at.parse().with_context(|| format!("{at:?} is neither `postgres` nor a URL such as s3://bucket/folder or file:///folder"))?;
    if let Ok((ObjectStoreScheme::Local, path)) = ObjectStoreScheme::parse(&url) {
        // What was acknowledged is on the disk.
        return Ok((Box::new(LocalFileSystem::new().with_fsync(true)), path));
    }
    let settings = settings.into_iter().filter(|(name, _)| SETTINGS.iter().any(|prefix| name.starts_with(prefix)));
    object_store::parse_url_opts(&url, settings).with_context(|| format!("the blob store {at} can't be used"))
}

fn failed(error: object_store::Error) -> ApiError {
    tracing::warn!(cause = %error, "the object store failed");
    ApiError::unavailable("the store of blobs does not answer; try again")
}
