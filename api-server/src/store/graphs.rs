//! Graphs of sealed runs: made once, stored in parts, and read no further than a plan needs.

use std::collections::{BTreeMap, BTreeSet};

use replayfork_core::diff::Prints;
use replayfork_core::footprint::Pattern;
use replayfork_core::graph::{CHUNK, Graph, NAMES, Named, NamesBlock, path_parts};
use replayfork_core::model::SpanKind;
use replayfork_core::plan::Names;

use crate::db::Connection;
use crate::planning;
use crate::problem::{ApiError, ApiResult};
use crate::store::prints;
use crate::store::runs::Found;

const HEAD: i16 = 0;
const STREAM: i16 = 1;
const PATHS: i16 = 2;
const REQUESTS: i16 = 3;
const NAME: i16 = 4;
pub(super) const PRINTS: i16 = 5;

/// Bytes that one statement stores.
const BATCH: usize = 8 << 20;

/// The graph of a sealed run without its streams; made from all of the run's spans where there is none.
///
/// # Errors
/// What the database says.
pub async fn head(client: &impl Connection, found: &Found) -> ApiResult<Graph> {
    let row = client.fetch_opt("SELECT data FROM run_graphs WHERE rid = $1 AND part = $2", &[&found.rid, &HEAD]).await?;
    match row.as_ref().map(|row| Graph::decode_head(row.get(0))) {
        Some(Ok(graph)) => Ok(graph),
        _ => make(client, found).await,
    }
}

/// Makes and stores the graph of a sealed run.
///
/// # Errors
/// What the database says.
pub async fn make(client: &impl Connection, found: &Found) -> ApiResult<Graph> {
    let source = planning::source(client, found).await?;
    let (graph, names) = (Graph::of(&source), NamesBlock::all(&source));
    if found.base_rid.is_none() {
        prints::store(client, found.rid, &Prints::of(source.spans.iter())).await?;
    }
    drop(source);
    let head = graph.encode_head();
    client.run("DELETE FROM run_graphs WHERE rid = $1 AND part = $2 AND data <> $3", &[&found.rid, &HEAD, &head]).await?;
    let mut rows = Rows::new(found.rid, STREAM);
    for (n, stream) in graph.encode_streams().enumerate() {
        rows.add(client, n, None, stream).await?;
    }
    rows.flush(client).await?;
    rows.part = PATHS;
    for (n, part) in graph.encode_paths().into_iter().enumerate() {
        rows.add(client, n, None, part).await?;
    }
    rows.flush(client).await?;
    rows.part = REQUESTS;
    rows.add(client, 0, None, graph.encode_requests()).await?;
    rows.flush(client).await?;
    rows.part = NAME;
    for (n, block) in names.iter().enumerate() {
        rows.add(client, n, block.spans.first().map(|s| (s.ord, s.id.clone())), block.encode()).await?;
    }
    rows.flush(client).await?;
    rows.part = HEAD;
    rows.add(client, 0, None, head.clone()).await?;
    rows.flush(client).await?;
    Graph::decode_head(&head).map_err(|e| ApiError::internal(&e))
}

/// Rows of one part that are stored together.
#[derive(Default)]
pub(super) struct Rows {
    rid: i64,
    part: i16,
    n: Vec<i32>,
    ords: Vec<Option<i64>>,
    ids: Vec<Option<String>>,
    data: Vec<Vec<u8>>,
    bytes: usize,
}

impl Rows {
    pub fn new(rid: i64, part: i16) -> Self {
        Self { rid, part, ..Self::default() }
    }

    pub async fn add(&mut self, client: &impl Connection, n: usize, first: Option<(i64, String)>, data: Vec<u8>) -> ApiResult<()> {
        self.n.push(n as i32);
        self.ords.push(first.as_ref().map(|(ord, _)| *ord));
        self.ids.push(first.map(|(_, id)| id));
        self.bytes += data.len();
        self.data.push(data);
        if self.bytes >= BATCH { self.flush(client).await } else { Ok(()) }
    }

    pub async fn flush(&mut self, client: &impl Connection) -> ApiResult<()> {
        let Self { rid, part, n, ords, ids, data, .. } = std::mem::take(self);
        client
            .run(
                "INSERT INTO run_graphs (rid, part, n, first_ord, first_id, data)
                 SELECT $1, $2, * FROM unnest($3::int[], $4::bigint[], $5::text[], $6::bytea[])
                 ON CONFLICT (rid, part, n) DO UPDATE SET first_ord = excluded.first_ord, first_id = excluded.first_id, data = excluded.data",
                &[&rid, &part, &n, &ords, &ids, &data],
            )
            .await?;
        (self.rid, self.part) = (rid, part);
        Ok(())
    }
}

/// Reads the streams that hold the spans from one on, and those that hold single ones before it.
///
/// # Errors
/// What the database says.
pub async fn streams(client: &impl Connection, found: &Found, graph: &mut Graph, from: usize, and: &BTreeSet<u32>) -> ApiResult<()> {
    let single: BTreeSet<i32> = and.iter().map(|span| (*span as usize / CHUNK) as i32).collect();
    let single: Vec<i32> = single.into_iter().collect();
    let from = (from / CHUNK) as i32;
    let rows = client
        .fetch(
            "SELECT n, data FROM run_graphs WHERE rid = $1 AND part = $2 AND (n >= $3 OR n = ANY($4)) ORDER BY n",
            &[&found.rid, &STREAM, &from, &single],
        )
        .await?;
    for row in rows {
        graph.take_stream(row.get::<_, i32>(0) as usize, row.get(1)).map_err(|e| ApiError::internal(&e))?;
    }
    Ok(())
}

/// Reads where in the tree paths are.
///
/// # Errors
/// What the database says.
pub async fn paths(client: &impl Connection, found: &Found, graph: &mut Graph, paths: &[Pattern]) -> ApiResult<()> {
    let parts: Vec<i32> = path_parts(paths).into_iter().map(|n| n as i32).collect();
    if parts.is_empty() {
        return Ok(());
    }
    let sql = "SELECT data FROM run_graphs WHERE rid = $1 AND part = $2 AND n = ANY($3)";
    for row in client.fetch(sql, &[&found.rid, &PATHS, &parts]).await? {
        graph.take_paths(row.get(0)).map_err(|e| ApiError::internal(&e))?;
    }
    Ok(())
}

/// Reads the requests of model calls.
///
/// # Errors
/// What the database says.
pub async fn requests(client: &impl Connection, found: &Found, graph: &mut Graph) -> ApiResult<()> {
    let row = client.fetch_one("SELECT data FROM run_graphs WHERE rid = $1 AND part = $2", &[&found.rid, &REQUESTS]).await?;
    graph.take_requests(row.get(0)).map_err(|e| ApiError::internal(&e))
}

/// Ids and names of the spans that were asked for, and of their neighbours.
#[derive(Default)]
pub struct Known(BTreeMap<u32, NamesBlock>);

impl Known {
    pub fn get(&self, span: u32) -> Option<&Named> {
        self.0.get(&(span / NAMES as u32))?.spans.get(span as usize % NAMES)
    }

    /// Reads what is not yet there.
    ///
    /// # Errors
    /// What the database says.
    pub async fn load(&mut self, client: &impl Connection, found: &Found, spans: impl IntoIterator<Item = u32>) -> ApiResult<()> {
        let wanted: BTreeSet<u32> = spans.into_iter().map(|span| span / NAMES as u32).filter(|n| !self.0.contains_key(n)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let wanted: Vec<i32> = wanted.into_iter().map(|n| n as i32).collect();
        let rows = client
            .fetch("SELECT n, data FROM run_graphs WHERE rid = $1 AND part = $2 AND n = ANY($3)", &[&found.rid, &NAME, &wanted])
            .await?;
        for row in rows {
            self.take(row.get(0), row.get(1))?;
        }
        Ok(())
    }

    fn take(&mut self, n: i32, data: &[u8]) -> ApiResult<()> {
        let block = NamesBlock::decode(data).map_err(|e| ApiError::internal(&e))?;
        self.0.insert(n as u32, block);
        Ok(())
    }

    /// Places in the run of spans that it has, in the order in which they were given.
    ///
    /// # Errors
    /// What the database says; a span that the run does not have is a fault of ours.
    pub async fn places(&mut self, client: &impl Connection, found: &Found, spans: &[(i64, String)]) -> ApiResult<Vec<u32>> {
        let (ords, ids): (Vec<i64>, Vec<&str>) = spans.iter().map(|(ord, id)| (*ord, id.as_str())).unzip();
        let rows = client
            .fetch(
                "SELECT b.n, CASE WHEN b.n = ANY($5) THEN NULL ELSE b.data END FROM unnest($3::bigint[], $4::text[]) WITH ORDINALITY w(ord, id, place)
                 CROSS JOIN LATERAL (SELECT n, data FROM run_graphs g WHERE g.rid = $1 AND g.part = $2 AND (g.first_ord, g.first_id) <= (w.ord, w.id)
                   ORDER BY n DESC LIMIT 1) b ORDER BY w.place",
                &[&found.rid, &NAME, &ords, &ids, &self.0.keys().map(|n| *n as i32).collect::<Vec<i32>>()],
            )
            .await?;
        let mut places = Vec::with_capacity(spans.len());
        for (row, (_, id)) in rows.iter().zip(spans) {
            let n: i32 = row.get(0);
            if let (Some(data), false) = (row.get::<_, Option<&[u8]>>(1), self.0.contains_key(&(n as u32))) {
                self.take(n, data)?;
            }
            let block = self.0.get(&(n as u32));
            let at = block.and_then(|b| Some(b.first + b.spans.iter().position(|s| s.id == *id)? as u32));
            places.push(at.ok_or_else(|| ApiError::internal(&format!("span {id:?} is not in the graph of run {}", found.run.name)))?);
        }
        if places.len() == spans.len() { Ok(places) } else { Err(ApiError::internal(&"a span is not in its run's graph")) }
    }
}

impl Names for Known {
    fn of(&self, span: u32) -> (&str, &str, SpanKind) {
        self.get(span).map_or(("", "", SpanKind::AdapterInternal), |n| (&n.id, &n.name, n.kind))
    }
}
