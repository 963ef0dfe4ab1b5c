//! Collection of blobs beside four writers, on a real Postgres, wherever packs lie: nothing that anybody names is ever lost, and all
//! else goes.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use deadpool_postgres::{GenericClient, Pool};
use replayfork_api_server::problem::ApiError;
use replayfork_api_server::store::{Namespace, Packs, blobs, collect, namespace, payload, runs, snapshots, uploads};
use replayfork_client::BLOBS_MISSING;
use replayfork_client::ingest::{CreateRun, SnapshotUpload};
use replayfork_core::Digest;
use replayfork_core::model::SnapshotRef;
use replayfork_snapshot::{BlobKind, DirectoryBuilder, Kind, PackBuilder};
use replayfork_tests::{postgres, s3};
use serde_json::json;
use uuid::Uuid;

const WRITERS: usize = 4;
/// Distinct file contents, few enough that trees share most of theirs.
const CONTENTS: u32 = 60;
const PATIENCE: Duration = Duration::from_secs(60);

fn said(error: ApiError) -> anyhow::Error {
    anyhow::anyhow!("{} {}: {}", error.status, error.reason, error.detail)
}

/// Choices of one writer, the same in every run of the test: SplitMix64.
struct Choices(u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }
}

/// A tree as a client has it: all blobs by digest.
#[derive(Clone)]
struct Tree {
    blobs: BTreeMap<Digest, (BlobKind, Vec<u8>)>,
    root: SnapshotRef,
}

fn content(n: u32) -> Vec<u8> {
    format!("content {n}\n").repeat(20 + n as usize).into_bytes()
}

impl Tree {
    fn random(choices: &mut Choices) -> Self {
        let mut blobs = BTreeMap::new();
        let mut keep = |node, bytes: &[u8]| {
            blobs.insert(node, (BlobKind::Directory, bytes.to_vec()));
            Ok::<_, Infallible>(())
        };
        let mut files = Vec::new();
        let mut top = DirectoryBuilder::default();
        for folder in 0..1 + choices.below(3) {
            let mut inside = DirectoryBuilder::default();
            // Enough files for several nodes, now and then.
            for file in 0..1 + choices.below(3) * choices.below(10) {
                let bytes = content(choices.below(CONTENTS));
                let digest = Digest::of(&bytes);
                let kind = Kind::File { size: bytes.len() as u64, executable: false, digest, chunks: Vec::new() };
                let Ok(()) = inside.add(format!("f{file:02}").as_bytes(), 0, &kind, &mut keep);
                files.push((digest, bytes));
            }
            let Ok(inside) = inside.finish(&mut keep);
            let Ok(()) = top.add_directory(format!("d{folder}").as_bytes(), 0, inside, &mut keep);
        }
        let Ok(root) = top.finish(&mut keep);
        blobs.extend(files.into_iter().map(|(digest, bytes)| (digest, (BlobKind::Data, bytes))));
        Self { blobs, root }
    }

    /// Those of these blobs, files first.
    fn pack(&self, of: &[Digest]) -> Vec<u8> {
        let mut pack = PackBuilder::default();
        for wanted in [BlobKind::Data, BlobKind::Directory] {
            for digest in of {
                let (kind, bytes) = &self.blobs[digest];
                if *kind == wanted {
                    pack.add(*digest, *kind, bytes);
                }
            }
        }
        pack.finish()
    }
}

/// What a writer has been promised: of a run its workspace, or a payload.
enum Promise {
    Workspace(Tree),
    Payload(payload::Place, serde_json::Value),
}

struct Writer {
    pool: Pool,
    ns: Namespace,
    choices: Choices,
    promised: HashMap<Uuid, (String, Promise)>,
    uploaded: Vec<(Digest, Vec<u8>)>,
}

/// Time in which others may act between two statements.
async fn dawdle(client: &impl GenericClient, choices: &mut Choices) -> Result<()> {
    let seconds = f64::from(choices.below(4)) / 500.0;
    client.execute("SELECT pg_sleep($1)", &[&seconds]).await?;
    Ok(())
}

/// A run: its id, number and name.
async fn create(client: &impl GenericClient, ns: i32) -> Result<(Uuid, i64, String)> {
    let (id, name) = (Uuid::new_v4(), format!("run-{}", Uuid::new_v4().simple()));
    let request: CreateRun = serde_json::from_value(json!({"id": id, "name": name, "agent": "a", "environment": {}}))?;
    runs::create(client, ns, &request, 1).await.map_err(said)?;
    let rid = client.query_one("SELECT rid FROM runs WHERE id = $1", &[&id]).await?.get(0);
    Ok((id, rid, name))
}

fn state(tree: &Tree) -> Result<SnapshotUpload> {
    Ok(serde_json::from_value(json!({"span": "s", "edge": "after", "snapshot": tree.root}))?)
}

impl Writer {
    async fn act(&mut self) -> Result<()> {
        match self.choices.below(10) {
            0..5 => self.record(false).await,
            5 => self.record(true).await,
            6 | 7 => self.forget().await,
            8 => self.upload().await,
            _ => self.look().await,
        }
    }

    /// As recorders do: asks what is there, sends the rest, then says that a run has this workspace; whatever is said to be missing is
    /// sent again. Or a payload that is a blob of its own.
    async fn record(&mut self, large_payload: bool) -> Result<()> {
        let (id, rid, name) = create(&self.pool.get().await?, self.ns.number).await?;
        if large_payload {
            let value = json!({"output": "x".repeat(70_000), "n": self.choices.below(CONTENTS)});
            let mut client = self.pool.get().await?;
            let tx = client.transaction().await?;
            let mut writer = payload::Writer::new(0);
            let place = writer.add(&value).map_err(said)?;
            let sql = "INSERT INTO spans (rid, span_id, rev, status, pay_rid, in_len, in_blob) VALUES ($1, 's', 1, 1, $1, $2, $3)";
            tx.execute(sql, &[&rid, &place.len, &place.blob]).await?;
            dawdle(&tx, &mut self.choices).await?;
            writer.finish(&tx, &self.ns, rid).await.map_err(said)?;
            tx.commit().await?;
            self.promised.insert(id, (name, Promise::Payload(place, value)));
            return Ok(());
        }
        let tree = Tree::random(&mut self.choices);
        let all: Vec<Digest> = tree.blobs.keys().copied().collect();
        let mut wanted = blobs::missing(&self.pool.get().await?, self.ns.number, &all).await.map_err(said)?;
        for _ in 0..20 {
            dawdle(&self.pool.get().await?, &mut self.choices).await?;
            match self.send(rid, &tree, &wanted).await {
                Ok(()) => {
                    self.promised.insert(id, (name, Promise::Workspace(tree)));
                    return Ok(());
                }
                Err(error) if error.reason == BLOBS_MISSING => wanted.extend(error.missing),
                Err(error) => return Err(said(error)),
            }
        }
        anyhow::bail!("a tree was refused twenty times")
    }

    /// The pack in one transaction, the state in the next.
    async fn send(&mut self, rid: i64, tree: &Tree, wanted: &[Digest]) -> Result<(), ApiError> {
        let mut client = self.pool.get().await.map_err(|e| ApiError::internal(&e))?;
        if !wanted.is_empty() {
            let tx = client.transaction().await?;
            blobs::put_pack(&tx, &self.ns, &blobs::Verified::of(tree.pack(wanted))?).await?;
            dawdle(&tx, &mut self.choices).await.map_err(|e| ApiError::internal(&e))?;
            tx.commit().await?;
        }
        let tx = client.transaction().await?;
        let upload = state(tree).map_err(|e| ApiError::internal(&e))?;
        snapshots::put(&tx, self.ns.number, rid, &[upload]).await?;
        dawdle(&tx, &mut self.choices).await.map_err(|e| ApiError::internal(&e))?;
        tx.commit().await?;
        Ok(())
    }

    async fn forget(&mut self) -> Result<()> {
        let Some(id) = self.promised.keys().min().copied() else { return Ok(()) };
        let (name, _) = self.promised.remove(&id).context("it was there")?;
        let mut client = self.pool.get().await?;
        let tx = client.transaction().await?;
        let found = runs::find(&tx, &self.ns.packs, "collect", &name).await.map_err(said)?;
        runs::delete(&tx, &found).await.map_err(said)?;
        Ok(tx.commit().await?)
    }

    async fn upload(&mut self) -> Result<()> {
        let bytes = content(self.choices.below(CONTENTS));
        let mut client = self.pool.get().await?;
        let tx = client.transaction().await?;
        let digest = uploads::put(&tx, &self.ns, &bytes).await.map_err(said)?;
        dawdle(&tx, &mut self.choices).await?;
        tx.commit().await?;
        self.uploaded.push((digest, bytes));
        Ok(())
    }

    /// All that was promised to this writer is there.
    async fn look(&self) -> Result<()> {
        let client = self.pool.get().await?;
        for (name, promise) in self.promised.values() {
            match promise {
                Promise::Workspace(tree) => {
                    let all: Vec<Digest> = tree.blobs.keys().copied().collect();
                    let read = blobs::get_many(&client, &self.ns, &all).await.map_err(said).with_context(|| name.clone())?;
                    ensure!(tree.blobs.iter().all(|(digest, (_, bytes))| read.get(digest) == Some(bytes)), "{name}: a blob is another one");
                }
                Promise::Payload(place, value) => {
                    let reader = payload::Reader::default();
                    let read: Option<serde_json::Value> =
                        reader.get(&client, &self.ns, 0, place).await.map_err(said).with_context(|| name.clone())?;
                    ensure!(read.as_ref() == Some(value), "{name}: a payload is another one");
                }
            }
        }
        for (digest, bytes) in &self.uploaded {
            ensure!(blobs::get(&client, &self.ns, digest).await.map_err(said)? == *bytes, "an upload is another one");
        }
        Ok(())
    }
}

/// Where packs lie.
enum Store {
    Postgres,
    Folder(tempfile::TempDir),
    S3(s3::Server),
}

impl Store {
    fn folder() -> Result<Self> {
        Ok(Self::Folder(tempfile::tempdir()?))
    }

    async fn packs(&self, pool: &Pool) -> Result<Packs> {
        let (at, settings) = match self {
            Self::Postgres => ("postgres".to_owned(), Vec::new()),
            Self::Folder(folder) => (format!("file://{}", folder.path().display()), Vec::new()),
            Self::S3(server) => (server.url(), server.settings()),
        };
        Packs::open(&pool.get().await?, &at, settings).await
    }

    /// Files of the store that hold packs, or what is left of them.
    fn objects(&self) -> Result<Vec<PathBuf>> {
        let mut open = match self {
            Self::Postgres => return Ok(Vec::new()),
            Self::Folder(folder) => vec![folder.path().to_owned()],
            Self::S3(server) => vec![server.folder()],
        };
        let mut files = Vec::new();
        while let Some(folder) = open.pop() {
            for entry in std::fs::read_dir(folder)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    open.push(entry.path());
                } else if entry.file_name() != "database" {
                    // But for what the store is known by.
                    files.push(entry.path());
                }
            }
        }
        Ok(files)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beside_four_writers_nothing_that_is_named_is_lost_and_all_else_goes() -> Result<()> {
    writers_and_a_collector(Store::Postgres, 150).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_is_it_where_packs_lie_in_a_folder() -> Result<()> {
    writers_and_a_collector(Store::folder()?, 75).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_is_it_where_packs_lie_in_s3() -> Result<()> {
    writers_and_a_collector(Store::S3(s3::Server::start().await?), 50).await
}

/// `acts`: what each of them does.
async fn writers_and_a_collector(store: Store, acts: u64) -> Result<()> {
    let server = postgres::Server::start()?;
    let pool = postgres::pool(&server.url()).await?;
    let packs = store.packs(&pool).await?;
    let ns = namespace(&pool.get().await?, &packs, "collect").await.map_err(said)?;
    let at_work = Arc::new(AtomicUsize::new(WRITERS));
    let mut writers = Vec::new();
    for n in 0..WRITERS {
        let choices = Choices(n as u64);
        let (pool, at_work, ns) = (pool.clone(), at_work.clone(), ns.clone());
        writers.push(tokio::spawn(async move {
            let mut writer = Writer { pool, ns, choices, promised: HashMap::new(), uploaded: Vec::new() };
            let mut done = Ok(());
            for act in 0..acts {
                done = writer.act().await.with_context(|| format!("writer {n}, act {act}"));
                if done.is_err() {
                    break;
                }
            }
            at_work.fetch_sub(1, Ordering::SeqCst);
            done.map(|()| writer)
        }));
    }
    let mut collector = pool.get().await?;
    let mut collected = collect::Collected::default();
    while at_work.load(Ordering::SeqCst) > 0 {
        let now = collect::cycle(&mut collector, &packs, PATIENCE).await.map_err(said)?.context("nobody else collects")?;
        ensure!(now.failed == 0, "a blob is missing");
        collected.blobs += now.blobs;
    }
    let mut all = Vec::new();
    for writer in writers {
        all.push(writer.await??);
    }
    ensure!(collected.blobs > acts / 2, "only {} blobs were collected beside the writers", collected.blobs);

    // What is left once nobody writes is what is named.
    collect::cycle(&mut collector, &packs, PATIENCE).await.map_err(said)?;
    let mut named: Vec<Digest> = Vec::new();
    for writer in &all {
        writer.look().await?;
        for (_, promise) in writer.promised.values() {
            match promise {
                Promise::Workspace(tree) => named.extend(tree.blobs.keys()),
                Promise::Payload(place, _) => named.extend(place.blob.as_deref().and_then(Digest::from_slice)),
            }
        }
        named.extend(writer.uploaded.iter().map(|(digest, _)| *digest));
    }
    named.sort_unstable();
    named.dedup();
    let left = pool.get().await?.query("SELECT digest FROM blobs WHERE ns = $1 ORDER BY digest", &[&ns.number]).await?;
    let left: Vec<Digest> = left.iter().filter_map(|row| Digest::from_slice(row.get(0))).collect();
    assert_eq!(left, named);

    // And when nothing is named, nothing is left, packs included.
    let client = pool.get().await?;
    client.execute("UPDATE uploads SET uploaded_at = now() - interval '25 hours'", &[]).await?;
    for writer in &mut all {
        while !writer.promised.is_empty() {
            writer.forget().await?;
        }
    }
    collect::cycle(&mut collector, &packs, PATIENCE).await.map_err(said)?;
    let rows: i64 = client.query_one("SELECT (SELECT count(*) FROM blobs) + (SELECT count(*) FROM packs)", &[]).await?.get(0);
    assert_eq!(rows, 0);
    assert_eq!(store.objects()?, Vec::<PathBuf>::new());
    Ok(())
}

/// A transaction that asked before anything was condemned, and goes on, keeps what it asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_began_before_keeps_what_it_builds_on() -> Result<()> {
    let server = postgres::Server::start()?;
    let pool = postgres::pool(&server.url()).await?;
    let packs = Packs::default();
    let ns = namespace(&pool.get().await?, &packs, "collect").await.map_err(said)?;
    let tree = Tree::random(&mut Choices(9));
    let files: Vec<Digest> = tree.blobs.iter().filter(|(_, (kind, _))| *kind == BlobKind::Data).map(|(digest, _)| *digest).collect();
    let folders: Vec<Digest> = tree.blobs.keys().copied().filter(|d| !files.contains(d)).collect();
    let mut client = pool.get().await?;
    let tx = client.transaction().await?;
    blobs::put_pack(&tx, &ns, &blobs::Verified::of(tree.pack(&files)).map_err(said)?).await.map_err(said)?;
    tx.commit().await?;
    let rid = create(&client, ns.number).await?.1;
    let tx = client.transaction().await?;
    blobs::put_pack(&tx, &ns, &blobs::Verified::of(tree.pack(&folders)).map_err(said)?).await.map_err(said)?;
    snapshots::put(&tx, ns.number, rid, &[state(&tree)?]).await.map_err(said)?;
    let mut collector = pool.get().await?;
    // It waits for the open transaction, and gives up.
    let short = Duration::from_millis(300);
    assert_eq!(collect::cycle(&mut collector, &packs, short).await.map_err(said)?, Some(collect::Collected::default()));
    // The files are condemned: who asks now is to send them again.
    let asked = pool.get().await?;
    assert_eq!(blobs::missing(&asked, ns.number, &files).await.map_err(said)?, files);
    tx.commit().await?;
    // What was committed names them, so that they are pardoned.
    assert_eq!(collect::cycle(&mut collector, &packs, PATIENCE).await.map_err(said)?, Some(collect::Collected::default()));
    assert_eq!(blobs::missing(&asked, ns.number, &files).await.map_err(said)?, []);
    // Only one collects at a time.
    asked.execute("SELECT pg_advisory_lock($1)", &[&collect::LOCK]).await?;
    assert_eq!(collect::cycle(&mut collector, &packs, short).await.map_err(said)?, None);
    Ok(())
}

/// Few blobs of many live: they move, and the pack goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lives_in_a_pack_that_is_mostly_dead_moves() -> Result<()> {
    mostly_dead(Store::Postgres, 0).await?;
    mostly_dead(Store::folder()?, 1).await?;
    mostly_dead(Store::S3(s3::Server::start().await?), 1).await
}

async fn mostly_dead(store: Store, objects: u64) -> Result<()> {
    let server = postgres::Server::start()?;
    let pool = postgres::pool(&server.url()).await?;
    let mut client = pool.get().await?;
    let packs = store.packs(&pool).await?;
    let ns = namespace(&client, &packs, "collect").await.map_err(said)?;
    // Nothing that compression makes smaller.
    let mut choices = Choices(0);
    let contents: Vec<Vec<u8>> = (0..20).map(|_| (0..25_000).flat_map(|_| choices.next().to_le_bytes()).collect()).collect();
    let mut pack = PackBuilder::default();
    contents.iter().for_each(|bytes| pack.add(Digest::of(bytes), BlobKind::Data, bytes));
    let tx = client.transaction().await?;
    blobs::put_pack(&tx, &ns, &blobs::Verified::of(pack.finish()).map_err(said)?).await.map_err(said)?;
    let kept = uploads::put(&tx, &ns, &contents[7]).await.map_err(said)?;
    tx.commit().await?;
    let before: i64 = client.query_one("SELECT sum(size) FROM packs", &[]).await?.get(0);
    let collected = collect::cycle(&mut client, &packs, PATIENCE).await.map_err(said)?.context("nobody else collects")?;
    assert_eq!((collected.blobs, collected.packs, collected.rewritten, collected.objects), (19, 0, 1, objects));
    assert_eq!(store.objects()?.len() as u64, objects);
    let after: i64 = client.query_one("SELECT sum(size) FROM packs", &[]).await?.get(0);
    assert_eq!(collected.bytes, before - after);
    assert!(after < 210_000, "{after} bytes are left");
    assert_eq!(blobs::get(&client, &ns, &kept).await.map_err(said)?, contents[7]);
    Ok(())
}

/// What a transaction wrote that failed is nobody's; what one writes that goes on is left to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_of_a_transaction_that_failed_goes_and_of_one_that_goes_on_stays() -> Result<()> {
    let database = postgres::Server::start()?;
    let pool = postgres::pool(&database.url()).await?;
    let store = Store::S3(s3::Server::start().await?);
    let packs = store.packs(&pool).await?;
    let ns = namespace(&pool.get().await?, &packs, "collect").await.map_err(said)?;
    let mut collector = pool.get().await?;
    let (mut failing, mut slow) = (pool.get().await?, pool.get().await?);
    let tx = failing.transaction().await?;
    uploads::put(&tx, &ns, b"never").await.map_err(said)?;
    tx.rollback().await?;
    let tx = slow.transaction().await?;
    let digest = uploads::put(&tx, &ns, b"later").await.map_err(said)?;
    assert_eq!(store.objects()?.len(), 2);
    assert_eq!(packs.sweep(&collector).await.map_err(said)?, 1);
    assert_eq!(store.objects()?.len(), 1);
    tx.commit().await?;
    collect::cycle(&mut collector, &packs, PATIENCE).await.map_err(said)?;
    assert_eq!(blobs::get(&collector, &ns, &digest).await.map_err(said)?, b"later");
    // Who is told to keep packs in Postgres can't read these, and says so before anything is asked of it.
    let refused = Packs::open(&collector, "postgres", Vec::new()).await.map_err(|e| e.to_string()).err();
    assert!(refused.is_some_and(|why| why.contains("REPLAYFORK_BLOB_STORE")));
    Ok(())
}

/// Two installations that share a bucket leave each other's objects alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_database_has_a_folder_of_its_own() -> Result<()> {
    let (one, other) = (postgres::Server::start()?, postgres::Server::start()?);
    let (one, other) = (postgres::pool(&one.url()).await?, postgres::pool(&other.url()).await?);
    let store = Store::folder()?;
    let mut client = one.get().await?;
    let packs = store.packs(&one).await?;
    let ns = namespace(&client, &packs, "collect").await.map_err(said)?;
    let tx = client.transaction().await?;
    let digest = uploads::put(&tx, &ns, b"ours").await.map_err(said)?;
    tx.commit().await?;
    let theirs = store.packs(&other).await?;
    collect::cycle(&mut other.get().await?, &theirs, PATIENCE).await.map_err(said)?;
    assert_eq!(blobs::get(&client, &ns, &digest).await.map_err(said)?, b"ours");
    Ok(())
}

/// What was lost from outside is told, sent again by who has it, and found again once it is put back; it keeps nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_is_gone_counts_as_absent_and_holds_up_nobody_else() -> Result<()> {
    let database = postgres::Server::start()?;
    let pool = postgres::pool(&database.url()).await?;
    let store = Store::folder()?;
    let packs = store.packs(&pool).await?;
    let mut client = pool.get().await?;
    let (ns, other) =
        (namespace(&client, &packs, "collect").await.map_err(said)?, namespace(&client, &packs, "other").await.map_err(said)?);
    let upload = async |client: &mut deadpool_postgres::Object, ns: &Namespace, bytes: &[u8]| -> Result<Digest> {
        let tx = client.transaction().await?;
        let digest = uploads::put(&tx, ns, bytes).await.map_err(said)?;
        tx.commit().await?;
        Ok(digest)
    };
    let lost = upload(&mut client, &ns, b"lost").await?;
    let file = store.objects()?.pop().context("no object")?;
    let aside = tempfile::tempdir()?;
    let aside = aside.path().join("aside");
    std::fs::copy(&file, &aside)?;
    std::fs::remove_file(&file)?;
    let why = blobs::get(&client, &ns, &lost).await.err().context("it is read all the same")?;
    assert_eq!(why.reason, "BlobsLost");
    assert!(why.detail.contains(file.file_name().and_then(|n| n.to_str()).unwrap_or("?")), "{}", why.detail);
    assert_eq!(blobs::missing(&client, ns.number, &[lost]).await.map_err(said)?, [lost]);
    // Put back, it is there again.
    std::fs::copy(&aside, &file)?;
    collect::cycle(&mut client, &packs, PATIENCE).await.map_err(said)?;
    assert_eq!(blobs::missing(&client, ns.number, &[lost]).await.map_err(said)?, []);
    // Gone once more: a collection finds that out, and deletes what else is nobody's.
    std::fs::remove_file(&file)?;
    upload(&mut client, &other, b"forgotten").await?;
    client.execute("DELETE FROM uploads WHERE ns = $1", &[&other.number]).await?;
    let collected = collect::cycle(&mut client, &packs, PATIENCE).await.map_err(said)?.context("nobody else collects")?;
    assert_eq!((collected.blobs, collected.objects), (1, 1));
    assert_eq!(blobs::missing(&client, ns.number, &[lost]).await.map_err(said)?, [lost]);
    // Who has it sends it again.
    assert_eq!(upload(&mut client, &ns, b"lost").await?, lost);
    assert_eq!(blobs::get(&client, &ns, &lost).await.map_err(said)?, b"lost");
    Ok(())
}

/// What a killed writer left half-written goes; a folder that is another one than the packs lie in is not taken for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_is_known_again_and_kept_clean() -> Result<()> {
    let database = postgres::Server::start()?;
    let pool = postgres::pool(&database.url()).await?;
    let store = Store::folder()?;
    let packs = store.packs(&pool).await?;
    let mut client = pool.get().await?;
    let ns = namespace(&client, &packs, "collect").await.map_err(said)?;
    let tx = client.transaction().await?;
    uploads::put(&tx, &ns, b"here").await.map_err(said)?;
    tx.commit().await?;
    let file = store.objects()?.pop().context("no object")?;
    let name = file.file_name().and_then(|n| n.to_str()).context("no name")?;
    let half = file.with_file_name(format!("{name}#1"));
    std::fs::write(&half, "half")?;
    collect::cycle(&mut client, &packs, PATIENCE).await.map_err(said)?;
    assert!(!half.exists() && file.exists());
    let elsewhere = Store::folder()?.packs(&pool).await.map_err(|e| format!("{e:#}")).err().context("another folder is taken")?;
    assert!(elsewhere.contains("lie in another blob store"), "{elsewhere}");
    store.packs(&pool).await?;
    for address in
        ["s3://KEY:SECRET@bucket/x", "foo://SECRET", "s3://", "file://SECRET/x", "file:///", "SECRET", "s3://bucket/x?sig=SECRET"]
    {
        let why = Packs::open(&client, address, Vec::new()).await.map_err(|e| format!("{e:#}")).err().context(address)?;
        assert!(why.contains("s3://bucket/folder") && !why.contains("SECRET"), "{address}: {why}");
    }
    Ok(())
}
