//! Spans: written in two parts, read in order, a fork's over its base's.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::Transaction;
use replayfork_client::ingest::{Edge, SpanUpload};
use replayfork_client::read::{SpanPage, SpanQuery, SpanSummary};
use replayfork_core::Digest;
use replayfork_core::model::{Closing, Fidelity, Opening, Span, SpanKind, Status, Verdict};
use tokio_postgres::Row;

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::payload::{Place, Reader, Writer};
use crate::store::runs::Found;
use crate::store::{Namespace, snapshots};

/// Writes the parts that are new: of a part sent twice, the first one stands. Returns how many were.
///
/// # Errors
/// What the database says.
pub async fn upsert(client: &Transaction<'_>, ns: &Namespace, rid: i64, rev: i64, segments: i32, uploads: &[SpanUpload]) -> ApiResult<i64> {
    let mut merged: HashMap<&str, (Option<&Opening>, Option<&Closing>)> = HashMap::new();
    let mut order: Vec<&str> = Vec::new();
    for upload in uploads {
        let entry = merged.entry(&upload.id).or_insert_with(|| {
            order.push(&upload.id);
            (None, None)
        });
        entry.0 = entry.0.or(upload.opening.as_ref());
        entry.1 = entry.1.or(upload.closing.as_ref());
    }
    let known: HashMap<String, (bool, bool)> = client
        .fetch(
            "SELECT span_id, coalesce(in_segment IS NOT NULL OR in_blob IS NOT NULL, false), coalesce(out_segment IS NOT NULL OR out_blob IS NOT NULL, false)
             FROM spans WHERE rid = $1 AND span_id = ANY($2)",
            &[&rid, &order],
        )
        .await?
        .iter()
        .map(|r| (r.get(0), (r.get(1), r.get(2))))
        .collect();
    let mut payloads = Writer::new(segments);
    let (mut written, mut new_spans, mut tokens, mut cost) = (0, 0, 0i64, 0.0);
    for id in order {
        let (opening, closing) = merged[id];
        let had = known.get(id).copied();
        let opening = opening.filter(|_| !had.is_some_and(|(opening, _)| opening));
        let closing = closing.filter(|_| !had.is_some_and(|(_, closing)| closing));
        if had.is_none() {
            client
                .run(
                    "INSERT INTO spans (rid, span_id, rev, status, pay_rid) VALUES ($1, $2, $3, $4, $1)",
                    &[&rid, &id, &rev, &Status::Running.code()],
                )
                .await?;
            new_spans += 1;
        }
        if let Some(opening) = opening {
            let place = payloads.add(opening)?;
            write_opening(client, rid, id, rev, opening.started, opening, &place).await?;
            written += 1;
        }
        if let Some(closing) = closing {
            let place = payloads.add(closing)?;
            write_closing(client, rid, id, rev, closing, &place).await?;
            tokens = tokens.saturating_add(closing.input_tokens.unwrap_or(0)).saturating_add(closing.output_tokens.unwrap_or(0));
            cost += closing.cost_usd.unwrap_or(0.0);
            written += 1;
        }
    }
    let next = payloads.finish(client, ns, rid).await?;
    client
        .run(
            "UPDATE runs SET segments = $2, spans = spans + $3,
               tokens = CASE WHEN $4::bigint > 0 THEN coalesce(tokens, 0) + $4 ELSE tokens END,
               cost_usd = CASE WHEN $5::float8 > 0 THEN coalesce(cost_usd, 0) + $5 ELSE cost_usd END
             WHERE rid = $1",
            &[&rid, &next, &new_spans, &tokens, &cost],
        )
        .await?;
    Ok(written)
}

/// # Errors
/// What the database says.
pub async fn write_opening(
    client: &impl Connection,
    rid: i64,
    id: &str,
    rev: i64,
    ord: i64,
    opening: &Opening,
    place: &Place,
) -> ApiResult<()> {
    client
        .run(
            "UPDATE spans SET rev = $3, ord = $4, parent_id = $5, kind = $6, started = $7, name = $8, model = $9,
               in_segment = $10, in_at = $11, in_len = $12, in_blob = $13 WHERE rid = $1 AND span_id = $2",
            &[
                &rid,
                &id,
                &rev,
                &ord,
                &opening.parent,
                &opening.kind.code(),
                &opening.started,
                &opening.name,
                &opening.model,
                &place.segment,
                &place.at,
                &place.len,
                &place.blob,
            ],
        )
        .await?;
    Ok(())
}

/// # Errors
/// What the database says.
pub async fn write_closing(client: &impl Connection, rid: i64, id: &str, rev: i64, closing: &Closing, place: &Place) -> ApiResult<()> {
    let blocked = closing.blocked.first().map(|b| serde_json::json!(b));
    client
        .run(
            "UPDATE spans SET rev = $3, ended = $4, status = $5, verdict = $6, tokens_in = $7, tokens_out = $8, cost_usd = $9, blocked = $10,
               out_segment = $11, out_at = $12, out_len = $13, out_blob = $14, reproduced = $15 WHERE rid = $1 AND span_id = $2",
            &[
                &rid, &id, &rev, &closing.ended, &closing.status.code(), &closing.verdict.code(), &closing.input_tokens, &closing.output_tokens,
                &closing.cost_usd, &blocked, &place.segment, &place.at, &place.len, &place.blob, &closing.reproduced,
            ],
        )
        .await?;
    Ok(())
}

const NARROW: &str = "s.rid, s.span_id, s.ord, s.parent_id, s.kind, s.status, s.verdict, s.fidelity, s.started, s.ended, s.name, s.model, s.tokens_in, \
    s.tokens_out, s.cost_usd, s.blocked, s.reproduced, s.input_digest, s.pay_rid, s.in_segment, s.in_at, s.in_len, s.in_blob, s.out_segment, s.out_at, s.out_len, s.out_blob";

pub(super) fn place(row: &Row, part: &str) -> Place {
    let column = |name: &str| format!("{part}_{name}");
    Place {
        segment: row.get(column("segment").as_str()),
        at: row.get(column("at").as_str()),
        len: row.get(column("len").as_str()),
        blob: row.get(column("blob").as_str()),
    }
}

fn summary(row: &Row) -> ApiResult<SpanSummary> {
    let broken = || ApiError::internal(&format!("span {:?} has an unknown code", row.get::<_, &str>("span_id")));
    let blocked: Option<serde_json::Value> = row.get("blocked");
    Ok(SpanSummary {
        id: row.get("span_id"),
        ord: row.get("ord"),
        parent: row.get("parent_id"),
        name: row.get("name"),
        kind: SpanKind::from_code(row.get("kind")).ok_or_else(broken)?,
        status: Status::from_code(row.get("status")).ok_or_else(broken)?,
        verdict: Verdict::from_code(row.get("verdict")).ok_or_else(broken)?,
        fidelity: Fidelity::from_code(row.get("fidelity")).ok_or_else(broken)?,
        started: row.get("started"),
        ended: row.get("ended"),
        model: row.get("model"),
        input_tokens: row.get("tokens_in"),
        output_tokens: row.get("tokens_out"),
        cost_usd: row.get("cost_usd"),
        snapshot_before: false,
        snapshot_after: false,
        blocked: blocked.and_then(|b| serde_json::from_value(b).ok()),
        reproduced: row.get("reproduced"),
    })
}

/// The run's own row over its base's, in the order of the base; for a run that is no fork just its rows. With a fork's own row
/// come start and end of the base's.
pub(super) async fn rows(client: &impl Connection, found: &Found, after: Option<(i64, &str)>, limit: i64) -> ApiResult<Vec<(Row, Times)>> {
    let (after_ord, after_id) = after.unwrap_or((i64::MIN, ""));
    let page = format!(
        "SELECT {NARROW} FROM spans s WHERE s.rid = $1 AND s.ord IS NOT NULL AND (s.ord, s.span_id) > ($2, $3) ORDER BY s.ord, s.span_id LIMIT $4"
    );
    let base = found.base_rid.unwrap_or(found.rid);
    let rows = client.fetch(&page, &[&base, &after_ord, &after_id, &limit]).await?;
    let mut rows: Vec<(Row, Times)> = rows.into_iter().map(|row| (row, None)).collect();
    if found.base_rid.is_some() && !rows.is_empty() {
        let last: i64 = rows.last().map_or(i64::MAX, |(r, _)| r.get("ord"));
        let sql = format!("SELECT {NARROW} FROM spans s WHERE s.rid = $1 AND s.ord >= $2 AND s.ord <= $3");
        let own = client.fetch(&sql, &[&found.rid, &after_ord, &last]).await?;
        rows = laid_over(rows, own);
    }
    Ok(rows)
}

/// A fork's own rows in the places of its base's.
fn laid_over(mut rows: Vec<(Row, Times)>, own: Vec<Row>) -> Vec<(Row, Times)> {
    let mut own: HashMap<String, Row> = own.into_iter().map(|r| (r.get("span_id"), r)).collect();
    for (row, times) in &mut rows {
        if own.is_empty() {
            break;
        }
        if let Some(over) = own.remove(row.get::<_, &str>("span_id")) {
            *times = Some((row.get("started"), row.get::<_, Option<i64>>("ended").unwrap_or(i64::MAX)));
            *row = over;
        }
    }
    rows
}

/// Start and end that a span had in the run it was first recorded in.
pub(super) type Times = Option<(i64, i64)>;

/// A span with a row of the fork's own has only the states that the fork gave it: one in doubt, or blocked, may have none.
pub async fn workspace_states(client: &impl Connection, found: &Found, ids: &[String]) -> ApiResult<snapshots::BySpan> {
    let own = snapshots::of_run(client, found.rid, Some(ids)).await?;
    let Some(base) = found.base_rid else { return Ok(own) };
    let rows = client.fetch("SELECT span_id FROM spans WHERE rid = $1 AND span_id = ANY($2)", &[&found.rid, &ids]).await?;
    let rows: HashSet<&str> = rows.iter().map(|row| row.get(0)).collect();
    let mut states = snapshots::of_run(client, base, Some(ids)).await?;
    states.retain(|(span, _), _| !rows.contains(span.as_str()));
    states.extend(own);
    Ok(states)
}

/// A page of summaries in order.
///
/// # Errors
/// 400 for a cursor or limit that is none.
pub async fn page(client: &impl Connection, found: &Found, query: &SpanQuery) -> ApiResult<SpanPage> {
    let limit = query.limit.unwrap_or(1000);
    if !(1..=5000).contains(&limit) {
        return Err(ApiError::bad_request("LimitInvalid", format!("limit: {limit} is not between 1 and 5000")));
    }
    let cursor = match &query.after {
        None => None,
        Some(cursor) => {
            let parsed = cursor.split_once(' ').and_then(|(ord, id)| Some((ord.parse::<i64>().ok()?, id)));
            Some(parsed.ok_or_else(|| ApiError::bad_request("CursorInvalid", format!("after: {cursor:?} is no cursor of a span list")))?)
        }
    };
    let mut rows = rows(client, found, cursor, limit + 1).await?;
    let more = rows.len() as i64 > limit;
    rows.truncate(limit as usize);
    let mut spans = rows.iter().map(|(row, _)| summary(row)).collect::<ApiResult<Vec<_>>>()?;
    let ids: Vec<String> = spans.iter().map(|s| s.id.clone()).collect();
    let states = workspace_states(client, found, &ids).await?;
    for span in &mut spans {
        let has = |edge| matches!(states.get(&(span.id.clone(), edge)), Some(Ok(_)));
        (span.snapshot_before, span.snapshot_after) = (has(Edge::Before), has(Edge::After));
    }
    let first_step = match cursor {
        None => 1,
        Some((ord, id)) => {
            let base = found.base_rid.unwrap_or(found.rid);
            let row = client
                .fetch_one(
                    "SELECT count(*) FROM spans WHERE rid = $1 AND ord IS NOT NULL AND (ord, span_id) <= ($2, $3)",
                    &[&base, &ord, &id],
                )
                .await?;
            row.get::<_, i64>(0) + 1
        }
    };
    let next = if more { spans.last().map(|s| format!("{} {}", s.ord, s.id)) } else { None };
    Ok(SpanPage { spans, first_step, next })
}

pub(super) async fn whole(client: &impl Connection, found: &Found, rows: &[(Row, Times)]) -> ApiResult<Vec<Span>> {
    let mut reader = Reader::default();
    let places: Vec<_> = rows.iter().map(|(r, _)| (r.get::<_, i64>("pay_rid"), place(r, "in"), place(r, "out"))).collect();
    reader.load(client, places.iter().flat_map(|(rid, i, o)| [(*rid, i), (*rid, o)])).await?;
    let ids: Vec<String> = rows.iter().map(|(r, _)| r.get("span_id")).collect();
    let states = workspace_states(client, found, &ids).await?;
    let mut spans = Vec::with_capacity(rows.len());
    for ((row, times), (rid, opening, closing)) in rows.iter().zip(&places) {
        let id: String = row.get("span_id");
        let state = |edge| states.get(&(id.clone(), edge)).and_then(|s| s.as_ref().ok()).copied();
        let opening = reader.get::<Opening>(client, &found.ns, *rid, opening).await?;
        let opening = opening.ok_or_else(|| ApiError::internal(&format!("span {id:?} has no opening")))?;
        let mut closing = reader.get::<Closing>(client, &found.ns, *rid, closing).await?;
        if let Some(closing) = &mut closing {
            closing.output = closing.output.take().map(|o| o.normalised(opening.executor.as_ref()));
        }
        spans.push(Span {
            ord: row.get("ord"),
            opening,
            closing,
            fidelity: Fidelity::from_code(row.get("fidelity")).unwrap_or(Fidelity::Recorded),
            first_recorded: *times,
            snapshot_before: state(Edge::Before),
            snapshot_after: state(Edge::After),
            input_digest: row.get::<_, Option<&[u8]>>("input_digest").and_then(Digest::from_slice),
            id,
        });
    }
    Ok(spans)
}

/// All spans of a run with their payloads, in order.
///
/// # Errors
/// What the database says.
pub async fn all(client: &impl Connection, found: &Found) -> ApiResult<Vec<Span>> {
    let rows = rows(client, found, None, i64::MAX).await?;
    whole(client, found, &rows).await
}

/// Some spans of a run with their payloads, in no order; ids that it does not have are left out.
///
/// # Errors
/// What the database says.
pub async fn of_ids(client: &impl Connection, found: &Found, ids: &[String]) -> ApiResult<Vec<Span>> {
    let sql = format!("SELECT {NARROW} FROM spans s WHERE s.rid = $1 AND s.span_id = ANY($2) AND s.ord IS NOT NULL");
    let base = client.fetch(&sql, &[&found.base_rid.unwrap_or(found.rid), &ids]).await?;
    let own = if found.base_rid.is_some() { client.fetch(&sql, &[&found.rid, &ids]).await? } else { Vec::new() };
    let rows = laid_over(base.into_iter().map(|row| (row, None)).collect(), own);
    whole(client, found, &rows).await
}

/// One span by its id, or by a name that is unique in the run; with the run id that recorded it.
///
/// # Errors
/// 404; 409 where several spans have the name.
pub async fn one(client: &impl Connection, found: &Found, span: &str) -> ApiResult<(Span, i64)> {
    let base = found.base_rid.unwrap_or(found.rid);
    let ids = client
        .fetch("SELECT span_id FROM spans WHERE rid = $1 AND ord IS NOT NULL AND (span_id = $2 OR name = $2) ORDER BY (span_id = $2) DESC, ord LIMIT 6", &[&base, &span])
        .await?;
    let ids: Vec<String> = ids.iter().map(|r| r.get(0)).collect();
    let id = match ids.as_slice() {
        [] => {
            let run = &found.run.name;
            let detail = format!("no span of run {run:?} has the id or name {span:?}; `kubectl replay show {run}` lists its spans");
            return Err(ApiError::not_found("SpanNotFound", detail));
        }
        [first, ..] if first == span => first,
        [only] => only,
        many => {
            let detail = format!("several spans of run {:?} are called {span:?}; name one by its id: {}", found.run.name, many.join(", "));
            return Err(ApiError::conflict("SpanAmbiguous", detail));
        }
    };
    let sql = format!(
        "SELECT {NARROW} FROM spans s WHERE s.rid = ANY($1) AND s.span_id = $2 AND s.ord IS NOT NULL ORDER BY (s.rid = $3) DESC LIMIT 1"
    );
    let row = client.fetch_one(&sql, &[&vec![found.rid, base], id, &found.rid]).await?;
    let rid: i64 = row.get("rid");
    let mut spans = whole(client, found, &[(row, None)]).await?;
    let span = spans.pop().ok_or_else(|| ApiError::internal(&"a span vanished"))?;
    Ok((span, rid))
}
