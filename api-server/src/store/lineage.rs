//! Two runs of one lineage, read no further than they can differ.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::GenericClient;
use replayfork_client::ingest::Edge;
use replayfork_core::Digest;
use replayfork_core::diff::{Outline, Totals, totals};
use replayfork_core::model::{Fidelity, Span, SpanKind, Status};
use tokio_postgres::Row;

use crate::problem::{ApiError, ApiResult};
use crate::store::runs::Found;
use crate::store::spans::{self, Times};

/// What of one run the comparison needs.
pub struct Side {
    /// Whole, those that may differ and all that hold them.
    pub spans: Vec<Span>,
    /// Of all spans.
    pub totals: Totals,
    pub fates: Vec<(Fidelity, SpanKind)>,
}

pub struct Both {
    pub a: Side,
    pub b: Side,
    /// Spans that were not read whole: both runs have the same row.
    pub same: i64,
}

/// Reads narrow rows of both runs, and whole only the spans whose rows differ, or after which the workspaces differ anew.
///
/// # Errors
/// What the database says.
pub async fn differing(client: &impl GenericClient, a: &Found, b: &Found) -> ApiResult<Both> {
    let (left, right) = (spans::rows(client, a, None, i64::MAX).await?, spans::rows(client, b, None, i64::MAX).await?);
    let wanted = wanted(client, (a, &left), (b, &right)).await?;
    let same = left.iter().filter(|(row, _)| !wanted.contains(row.get::<_, &str>("span_id"))).count() as i64;
    Ok(Both { a: side(client, a, left, &wanted).await?, b: side(client, b, right, &wanted).await?, same })
}

type Rows = [(Row, Times)];

async fn wanted(client: &impl GenericClient, a: (&Found, &Rows), b: (&Found, &Rows)) -> ApiResult<HashSet<String>> {
    let ids = |rows: &Rows| rows.iter().map(|(row, _)| row.get("span_id")).collect::<Vec<String>>();
    let states_a = spans::workspace_states(client, a.0, &ids(a.1)).await?;
    let states_b = spans::workspace_states(client, b.0, &ids(b.1)).await?;
    let of_b: HashMap<&str, &Row> = b.1.iter().map(|(row, _)| (row.get("span_id"), row)).collect();
    let mut wanted = HashSet::new();
    let mut last: Option<(Digest, Digest)> = None;
    for (row, _) in a.1 {
        let id: &str = row.get("span_id");
        let content = |states: &crate::store::snapshots::BySpan| match states.get(&(id.to_owned(), Edge::After)) {
            Some(Ok(state)) => Some(state.content),
            _ => None,
        };
        let workspaces = content(&states_a).zip(content(&states_b)).map(|(x, y)| (x != y).then_some((x, y)));
        let anew = workspaces.is_some_and(|now| now != last);
        last = workspaces.unwrap_or(last);
        if anew || !of_b.get(id).is_some_and(|other| same_row(row, other)) {
            wanted.insert(id.to_owned());
        }
    }
    let of_a: HashSet<&str> = a.1.iter().map(|(row, _)| row.get("span_id")).collect();
    wanted.extend(of_b.keys().filter(|id| !of_a.contains(*id)).map(|id| (*id).to_owned()));
    let parents: HashMap<&str, &str> =
        a.1.iter().chain(b.1).filter_map(|(r, _)| Some((r.get("span_id"), r.get::<_, Option<&str>>("parent_id")?))).collect();
    for id in wanted.clone() {
        let mut at = id.as_str();
        while let Some(parent) = parents.get(at).filter(|p| wanted.insert((**p).to_owned())) {
            at = parent;
        }
    }
    Ok(wanted)
}

/// A row taken over from another run keeps its payloads.
fn same_row(x: &Row, y: &Row) -> bool {
    let payload = |row: &Row| (row.get::<_, i64>("pay_rid"), spans::place(row, "in"), spans::place(row, "out"));
    let said = |row: &Row| (row.get::<_, i16>("status"), row.get::<_, i16>("fidelity"));
    x.get::<_, i64>("rid") == y.get::<_, i64>("rid") || (payload(x) == payload(y) && said(x) == said(y))
}

async fn side(client: &impl GenericClient, found: &Found, rows: Vec<(Row, Times)>, wanted: &HashSet<String>) -> ApiResult<Side> {
    let broken = || ApiError::internal(&"a span has an unknown code");
    let mut fates = Vec::with_capacity(rows.len());
    let mut outlines = Vec::with_capacity(rows.len());
    for (row, _) in &rows {
        let fidelity = Fidelity::from_code(row.get("fidelity")).ok_or_else(broken)?;
        fates.push((fidelity, SpanKind::from_code(row.get("kind")).ok_or_else(broken)?));
        let tokens: (Option<i64>, Option<i64>) = (row.get("tokens_in"), row.get("tokens_out"));
        outlines.push(Outline {
            id: row.get("span_id"),
            parent: row.get("parent_id"),
            status: Status::from_code(row.get("status")).ok_or_else(broken)?,
            started: row.get("started"),
            ended: row.get("ended"),
            tokens: match tokens {
                (None, None) => None,
                (i, o) => Some(i.unwrap_or(0).saturating_add(o.unwrap_or(0))),
            },
            cost_usd: row.get("cost_usd"),
        });
    }
    let totals = totals(outlines.iter().copied());
    let read: Vec<_> = rows.into_iter().filter(|(row, _)| wanted.contains(row.get::<_, &str>("span_id"))).collect();
    Ok(Side { spans: spans::whole(client, found, &read).await?, totals, fates })
}
