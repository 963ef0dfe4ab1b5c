//! Where packs lie: in Postgres beside their rows, or in an object store.
//!
//! Postgres is the truth: an object counts only once a row of `packs` names it. It is written before the transaction that names it
//! ends, and its name tells which one that is. So an object that no row names is nobody's as soon as that transaction has ended,
//! whether it failed, or the row has been deleted since; whoever collects blobs lists the objects and deletes those. Each database has a
//! folder of its own, so that two installations may share a bucket.
//!
//! An object that a row names and that is gone is a loss from outside: the pack is noted as lost, its blobs count as absent, so that
//! whoever still has them sends them again, and reading them says what to restore.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use deadpool_postgres::Transaction;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, ObjectStoreScheme};
use replayfork_snapshot::Frame;
use url::Url;
use uuid::Uuid;

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};

/// What the settings of object stores begin with in the environment; nothing else there is for them.
pub const SETTINGS: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];
/// Objects that are read at once.
const AT_ONCE: usize = 8;
/// Objects that one statement looks for.
const LISTED: usize = 1000;
/// The object by which a store is known to be the one that this database's packs lie in.
const MARK: &str = "database";
/// How long a store may take to answer when it is opened.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where new packs go, and where those in objects are.
#[derive(Clone, Debug, Default)]
pub struct Packs(Option<Arc<Objects>>);

#[derive(Debug)]
struct Objects {
    store: Box<dyn ObjectStore>,
    folder: Path,
    /// The folder on this machine's disk, if that is where it is.
    local: Option<PathBuf>,
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
    /// A store that can't be written to is opened all the same if packs of this database lie there: they can be read, and deleted.
    ///
    /// # Errors
    /// An address that is none, settings that don't fit, a store that does not answer, a new one that can't be written to, or one
    /// that is not where the packs of this database lie.
    pub async fn open(client: &impl Connection, at: &str, settings: impl IntoIterator<Item = (String, String)>) -> anyhow::Result<Self> {
        let row = client.fetch_one("SELECT id, EXISTS (SELECT 1 FROM packs WHERE object IS NOT NULL) FROM database_identity", &[]).await?;
        let (database, in_objects): (Uuid, bool) = (row.get(0), row.get(1));
        if at == "postgres" {
            anyhow::ensure!(
                !in_objects,
                "packs of this database lie in an object store; give its address as --blob-store, REPLAYFORK_BLOB_STORE, or blobs.store.url of the chart"
            );
            return Ok(Self::default());
        }
        let Address { url, scheme } = Address::parse(at)?;
        let (store, root, local): (Box<dyn ObjectStore>, _, _) = match scheme {
            // What was acknowledged is on the disk.
            ObjectStoreScheme::Local => {
                let path = url.to_file_path().map_err(|()| anyhow::anyhow!("{NO_ADDRESS}"))?;
                let folder = path.join(database.simple().to_string());
                (Box::new(LocalFileSystem::new().with_fsync(true)), Path::from_absolute_path(&path)?, Some(folder))
            }
            _ => {
                let settings = settings.into_iter().filter(|(name, _)| SETTINGS.iter().any(|prefix| name.starts_with(prefix)));
                let (store, root) = object_store::parse_url_opts(&url, settings).with_context(|| wrong(&url))?;
                (store, root, None)
            }
        };
        let folder = root.join(database.simple().to_string());
        let mark = folder.clone().join(MARK);
        let looked = tokio::time::timeout(PATIENCE, store.head(&mark)).await;
        match looked.with_context(|| format!("the blob store {url} does not answer within {} s{}", PATIENCE.as_secs(), hint(&url)))? {
            Ok(_) => {}
            Err(object_store::Error::NotFound { .. }) if in_objects => anyhow::bail!(
                "packs of this database lie in another blob store than {url}: there is no object {mark}. Give the address where they are; if they were moved, all below {folder} must be there"
            ),
            Err(object_store::Error::NotFound { .. }) => {
                store.put(&mark, Bytes::from_static(b"the folder of a ReplayFork database\n").into()).await.with_context(|| wrong(&url))?;
            }
            Err(error) => return Err(error).with_context(|| wrong(&url)),
        }
        tracing::info!(store = %url, "packs of blobs go to an object store");
        Ok(Self(Some(Arc::new(Objects { store, folder, local }))))
    }

    /// Stores a pack's frames; gives its number.
    ///
    /// # Errors
    /// What the database or the object store says.
    pub async fn put(&self, tx: &Transaction<'_>, ns: i32, frames: &[u8]) -> ApiResult<i64> {
        let size = frames.len() as i32;
        let Some(objects) = &self.0 else {
            let sql = "INSERT INTO packs (ns, size, data) VALUES ($1, $2, $3) RETURNING pack";
            return Ok(tx.fetch_one(sql, &[&ns, &size, &frames]).await?.get(0));
        };
        let transaction: String = tx.fetch_one("SELECT pg_current_xact_id()::text", &[]).await?.get(0);
        let object = format!("{transaction}-{}", Uuid::new_v4().simple());
        let at = objects.at(&object);
        objects.store.put(&at, Bytes::copy_from_slice(frames).into()).await.map_err(|e| failed(&at, &e))?;
        let sql = "INSERT INTO packs (ns, size, object) VALUES ($1, $2, $3) RETURNING pack";
        Ok(tx.fetch_one(sql, &[&ns, &size, &object]).await?.get(0))
    }

    /// All frames of a pack.
    ///
    /// # Errors
    /// What the database or the object store says; no such pack.
    pub async fn whole(&self, client: &impl Connection, ns: i32, pack: i64) -> ApiResult<Vec<u8>> {
        let row = client.fetch_one("SELECT data, object FROM packs WHERE ns = $1 AND pack = $2", &[&ns, &pack]).await?;
        if let Some(data) = row.get(0) {
            return Ok(data);
        }
        let objects = self.objects()?;
        let at = objects.at(row.get(1));
        let object = objects.store.get(&at).await.map_err(|e| failed(&at, &e))?;
        Ok(object.bytes().await.map_err(|e| failed(&at, &e))?.to_vec())
    }

    /// Frames as they are stored. Those of packs that are gone, have moved, or have lost their object are left out.
    ///
    /// # Errors
    /// What the database or the object store says.
    pub async fn frames(&self, client: &impl Connection, ns: i32, wanted: &[Wanted]) -> ApiResult<Vec<(Wanted, Bytes)>> {
        let packs: Vec<i64> = wanted.iter().map(|(pack, _)| *pack).collect();
        let (at, len): (Vec<i32>, Vec<i32>) = wanted.iter().map(|(_, frame)| (frame.at as i32, frame.len as i32)).unzip();
        let rows = client
            .fetch(
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
                match of_one {
                    Ok(frames) => found.extend(frames),
                    // It may just have been collected, with its row.
                    Err((pack, object)) => note(client, ns, pack, &object, true).await?,
                }
            }
        }
        Ok(found)
    }

    fn objects(&self) -> ApiResult<&Objects> {
        let lacking = || {
            ApiError::unavailable(
                "this lies in an object store that this api-server has not been told of; another one, which has, is taking its place",
            )
        };
        self.0.as_deref().ok_or_else(lacking)
    }

    /// Deletes the objects that are nobody's; gives how many. Notes which packs have lost their object, or have it again.
    ///
    /// # Errors
    /// What the database or the object store says.
    pub async fn sweep(&self, client: &impl Connection) -> ApiResult<u64> {
        let Some(objects) = self.0.as_deref() else { return Ok(0) };
        // What has been committed by now has its object in the list.
        let before: String = client.fetch_one("SELECT pg_snapshot_xmin(pg_current_snapshot())::text", &[]).await?.get(0);
        let mut listed = objects.store.list(Some(&objects.folder)).try_chunks(LISTED);
        let (mut deleted, mut there) = (0, HashSet::new());
        while let Some(some) = listed.next().await {
            let some = some.map_err(|e| failed(&objects.folder, &e.1))?;
            let names: Vec<&str> = some.iter().filter_map(|o| o.location.filename()).filter(|name| is_a_pack(name)).collect();
            let ended = ended(client, &names).await?;
            for (name, _) in ended.into_iter().filter(|(_, named)| !named) {
                let at = objects.at(&name);
                objects.store.delete(&at).await.map_err(|e| failed(&at, &e))?;
                deleted += 1;
            }
            there.extend(names.into_iter().map(str::to_owned));
        }
        deleted += objects.sweep_unfinished(client).await?;
        let sql = "SELECT ns, pack, object, lost FROM packs WHERE object IS NOT NULL AND (lost OR split_part(object, '-', 1)::xid8 < $1::text::xid8)";
        for row in client.fetch(sql, &[&before]).await? {
            let (ns, pack, object, lost): (i32, i64, String, bool) = (row.get(0), row.get(1), row.get(2), row.get(3));
            if lost == there.contains(&object) {
                note(client, ns, pack, &objects.at(&object), !lost).await?;
            }
        }
        Ok(deleted)
    }
}

impl Objects {
    fn at(&self, object: &str) -> Path {
        self.folder.clone().join(object)
    }

    /// `None`: there is no such object.
    async fn read(&self, object: String, wanted: Vec<Wanted>) -> ApiResult<Result<Vec<(Wanted, Bytes)>, (i64, Path)>> {
        let ranges: Vec<_> = wanted.iter().map(|(_, frame)| u64::from(frame.at)..u64::from(frame.at) + u64::from(frame.len)).collect();
        let at = self.at(&object);
        match self.store.get_ranges(&at, &ranges).await {
            Ok(frames) => Ok(Ok(wanted.into_iter().zip(frames).collect())),
            Err(object_store::Error::NotFound { .. }) => Ok(Err((wanted[0].0, at))),
            Err(error) => Err(failed(&at, &error)),
        }
    }

    /// A write to a disk goes to a file beside its place first, `NAME#N`, which no list shows and which stays when the writer is killed.
    async fn sweep_unfinished(&self, client: &impl Connection) -> ApiResult<u64> {
        let Some(folder) = &self.local else { return Ok(0) };
        let unfinished = |file: std::fs::DirEntry| {
            let name = file.file_name().into_string().ok()?;
            let (object, _) = name.split_once('#').filter(|(object, _)| is_a_pack(object))?;
            Some((object.to_owned(), file.path()))
        };
        let files = std::fs::read_dir(folder).map_err(|e| ApiError::internal(&format!("{}: {e}", folder.display())))?;
        let files: Vec<(String, PathBuf)> = files.filter_map(|file| unfinished(file.ok()?)).collect();
        let mut deleted = 0;
        for some in files.chunks(LISTED) {
            let names: Vec<&str> = some.iter().map(|(object, _)| object.as_str()).collect();
            let ended = ended(client, &names).await?;
            for (_, file) in some.iter().filter(|(object, _)| ended.contains_key(object)) {
                match std::fs::remove_file(file) {
                    Ok(()) => deleted += 1,
                    // Its writer has finished it since it was listed.
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    Err(error) => return Err(ApiError::internal(&format!("{}: {error}", file.display()))),
                }
            }
        }
        Ok(deleted)
    }
}

/// Those of these objects whose transaction has ended, each with whether a row names it. In one statement, so that the row of a
/// transaction that has ended by now is seen.
async fn ended(client: &impl Connection, names: &[&str]) -> ApiResult<BTreeMap<String, bool>> {
    let sql = "SELECT o, EXISTS (SELECT 1 FROM packs p WHERE p.object = o) FROM unnest($1::text[]) o
         WHERE split_part(o, '-', 1)::xid8 < pg_snapshot_xmin(pg_current_snapshot())";
    Ok(client.fetch(sql, &[&names]).await?.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// A pack whose object is gone: its blobs count as absent, so that whoever has them sends them again.
async fn note(client: &impl Connection, ns: i32, pack: i64, object: &Path, lost: bool) -> ApiResult<()> {
    let changed = client.run("UPDATE packs SET lost = $3 WHERE ns = $1 AND pack = $2 AND lost <> $3", &[&ns, &pack, &lost]).await?;
    match lost {
        _ if changed == 0 => {}
        true => {
            tracing::error!(ns, pack, %object, "an object that a pack lies in is gone from the blob store; restore it from the store's backup")
        }
        false => tracing::info!(ns, pack, %object, "an object that was gone is there again"),
    }
    Ok(())
}

/// A transaction's number and a UUID, as [`Packs::put`] writes them.
fn is_a_pack(name: &str) -> bool {
    name.split_once('-').is_some_and(|(xid, id)| xid.parse::<u64>().is_ok() && Uuid::try_parse(id).is_ok())
}

const NO_ADDRESS: &str = "the blob store's address is neither `postgres` nor a URL such as s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder (credentials are no part of it: they are given as AWS_…, GOOGLE_… or AZURE_… variables)";

/// The address of a store. What is wrong with one is said without showing it: it may hold what it should not.
struct Address {
    url: Url,
    scheme: ObjectStoreScheme,
}

impl Address {
    fn parse(at: &str) -> anyhow::Result<Self> {
        let url: Url = at.parse().ok().context(NO_ADDRESS)?;
        let plain = url.username().is_empty() && url.password().is_none() && url.query().is_none() && url.fragment().is_none();
        let known = match url.scheme() {
            "s3" | "gs" | "az" => url.host_str().is_some_and(|host| !host.is_empty()),
            "file" => url.host_str().is_none() && url.path() != "/",
            _ => false,
        };
        let scheme = ObjectStoreScheme::parse(&url).ok().filter(|_| plain && known).context(NO_ADDRESS)?.0;
        Ok(Self { url, scheme })
    }
}

fn wrong(url: &Url) -> String {
    format!("the blob store {url} can't be used{}", hint(url))
}

fn hint(url: &Url) -> &'static str {
    match url.scheme() {
        "s3" => {
            " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION say who asks; AWS_ENDPOINT_URL where, with AWS_ALLOW_HTTP=true if that is plain HTTP)"
        }
        _ => "",
    }
}

/// What an operating system says to a write, if that is where it failed.
fn disk_error(error: &(dyn std::error::Error + 'static)) -> Option<std::io::ErrorKind> {
    let causes = std::iter::successors(Some(error), |e| e.source());
    causes.filter_map(|e| e.downcast_ref::<std::io::Error>()).map(std::io::Error::kind).last()
}

fn failed(object: &Path, error: &object_store::Error) -> ApiError {
    use std::io::ErrorKind;
    tracing::warn!(%object, cause = %error, "the blob store failed");
    let why = match (error, disk_error(error)) {
        (_, Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded)) => "is full; whoever runs it must free space in it, or enlarge it",
        (_, Some(ErrorKind::ReadOnlyFilesystem)) => "can only be read",
        (object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. }, _)
        | (_, Some(ErrorKind::PermissionDenied)) => "refuses the api-server; its credentials or rights are to be looked at",
        (object_store::Error::NotFound { .. }, _) => "lacks an object that it should have; the api-server's log names it",
        _ => "does not answer as it should; the api-server's log has the cause",
    };
    ApiError::unavailable(format!("the blob store {why}"))
}
