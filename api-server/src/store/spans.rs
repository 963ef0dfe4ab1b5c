//! Spans: written in two parts, read in order, a fork's over its base's.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::GenericClient;
use replayfork_client::ingest::{Edge, SpanUpload};
use replayfork_client::read::{SpanPage, SpanQuery, SpanSummary};
use replayfork_core::Digest;
use replayfork_core::footprint::relative;
use replayfork_core::model::{Closing, Executor, Fidelity, Opening, Span, SpanKind, Status, Verdict};
use tokio_postgres::Row;

use crate::problem::{ApiError, ApiResult};
use crate::store::payload::{Place, Reader, Writer};
use crate::store::runs::Found;
use crate::store::snapshots;

/// Characters that a span id may have.
const MAX_ID: usize = 256;
/// Characters that a span's name may have.
const MAX_NAME: usize = 512;

/// Tokens that one span may have.
const MAX_TOKENS: i64 = 1_000_000_000_000;
/// US dollars that one span may cost.
const MAX_COST: f64 = 1e9;
/// The year 2200, in nanoseconds.
const MAX_TIME: i64 = 7_258_118_400_000_000_000;

/// Checks what no later reader could live with: of each span, and that no loop of parents or dependencies is sent at once. What
/// these refer to may come later, or never: a parent that never comes is none, and a step that needs a span that the run does not
/// have is not run again.
///
/// # Errors
/// 400 naming the span and the field.
pub fn check(uploads: &[SpanUpload]) -> ApiResult<()> {
    uploads.iter().try_for_each(check_one)?;
    check_loops(uploads, "parent", |opening| opening.parent.as_slice())?;
    check_loops(uploads, "depends_on", |opening| &opening.depends_on)
}

fn bad(span: &str, message: impl std::fmt::Display) -> ApiError {
    ApiError::bad_request("SpanInvalid", format!("span {:?}: {message}", span.chars().take(64).collect::<String>()))
}

fn check_loops(uploads: &[SpanUpload], field: &str, refers_to: impl Fn(&Opening) -> &[String]) -> ApiResult<()> {
    let references: HashMap<&str, &[String]> =
        uploads.iter().filter_map(|u| Some((u.id.as_str(), refers_to(u.opening.as_ref()?)))).filter(|(_, to)| !to.is_empty()).collect();
    let (mut done, mut on_the_way) = (HashSet::new(), HashSet::new());
    for start in uploads.iter().map(|u| u.id.as_str()).filter(|id| references.contains_key(id)) {
        if done.contains(start) {
            continue;
        }
        // The way down to where the walk is, each with what it refers to beyond.
        let mut way = vec![(start, references[start].iter())];
        on_the_way.insert(start);
        while let Some((at, rest)) = way.last_mut() {
            let at = *at;
            let Some(next) = rest.next() else {
                done.insert(at);
                on_the_way.remove(at);
                way.pop();
                continue;
            };
            if on_the_way.contains(next.as_str()) {
                let message = format!("{field}: {next:?} comes back to {at:?}, so that neither could be first; leave one of the two out");
                return Err(bad(at, message));
            }
            if let Some(further) = references.get(next.as_str())
                && !done.contains(next.as_str())
            {
                on_the_way.insert(next);
                way.push((next, further.iter()));
            }
        }
    }
    Ok(())
}

/// Checks that no file is written outside of the workspace. Without a recorded root nothing can be said.
///
/// # Errors
/// 400 naming span, path and root.
pub fn check_paths(uploads: &[SpanUpload], root: Option<&str>) -> ApiResult<()> {
    let Some(root) = root else { return Ok(()) };
    for upload in uploads {
        if let Some(Executor::FileWrite { path, .. }) = upload.opening.as_ref().and_then(|o| o.executor.as_ref()) {
            relative(path, Some(root)).map_err(|e| bad(&upload.id, format!("executor.path: {e} ({root:?})")))?;
        }
    }
    Ok(())
}

fn check_one(upload: &SpanUpload) -> ApiResult<()> {
    let bad = |message: String| Err(bad(&upload.id, message));
    if upload.id.is_empty() || upload.id.len() > MAX_ID || upload.id.contains('\0') {
        return bad(format!("id: has 1 to {MAX_ID} characters and no NUL"));
    }
    if upload.opening.is_none() && upload.closing.is_none() {
        return bad("give `opening`, `closing` or both".into());
    }
    if let Some(closing) = &upload.closing {
        for (field, tokens) in [("input_tokens", closing.input_tokens), ("output_tokens", closing.output_tokens)] {
            if tokens.is_some_and(|n| !(0..=MAX_TOKENS).contains(&n)) {
                return bad(format!("{field}: {} is not between 0 and {MAX_TOKENS}", tokens.unwrap_or_default()));
            }
        }
        if closing.cost_usd.is_some_and(|c| !(0.0..=MAX_COST).contains(&c)) {
            return bad(format!("cost_usd: {} is not between 0 and {MAX_COST}", closing.cost_usd.unwrap_or_default()));
        }
        let begun = upload.opening.as_ref().map_or(1, |o| o.started);
        if closing.ended < begun || closing.ended > MAX_TIME {
            return bad(format!("ended: {} is before it started, or no time in nanoseconds since 1970", closing.ended));
        }
    }
    if let Some(opening) = &upload.opening {
        if opening.name.is_empty() || opening.name.len() > MAX_NAME || opening.name.contains('\0') {
            return bad(format!("name: has 1 to {MAX_NAME} characters and no NUL"));
        }
        if opening.parent.iter().chain(&opening.depends_on).any(|id| id.is_empty() || id.len() > MAX_ID || id.contains('\0')) {
            return bad(format!("parent, depends_on: ids have 1 to {MAX_ID} characters and no NUL"));
        }
        if opening.started <= 0 || opening.started > MAX_TIME {
            // Only a recorder knows when "now" was.
            return bad(format!("started: {} is no time in nanoseconds since 1970", opening.started));
        }
        if opening.reads.is_some() != opening.writes.is_some() {
            return bad("`reads` and `writes` are declared together or not at all".into());
        }
        for (field, binding) in &opening.input_bindings {
            for template in replayfork_core::binding::templates(binding) {
                if let Err(error) = replayfork_core::binding::holes(template) {
                    return bad(format!("input_bindings.{field}: {error}"));
                }
            }
        }
    }
    Ok(())
}

/// Writes the parts that are new: of a part sent twice, the first one stands. Returns how many were.
///
/// # Errors
/// What the database says.
pub async fn upsert(client: &impl GenericClient, ns: i32, rid: i64, rev: i64, segments: i32, uploads: &[SpanUpload]) -> ApiResult<i64> {
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
        .query(
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
                .execute(
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
        .execute(
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
    client: &impl GenericClient,
    rid: i64,
    id: &str,
    rev: i64,
    ord: i64,
    opening: &Opening,
    place: &Place,
) -> ApiResult<()> {
    client
        .execute(
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
pub async fn write_closing(client: &impl GenericClient, rid: i64, id: &str, rev: i64, closing: &Closing, place: &Place) -> ApiResult<()> {
    let blocked = closing.blocked.first().map(|b| serde_json::json!(b));
    client
        .execute(
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
pub(super) async fn rows(
    client: &impl GenericClient,
    found: &Found,
    after: Option<(i64, &str)>,
    limit: i64,
) -> ApiResult<Vec<(Row, Times)>> {
    let (after_ord, after_id) = after.unwrap_or((i64::MIN, ""));
    let page = format!(
        "SELECT {NARROW} FROM spans s WHERE s.rid = $1 AND s.ord IS NOT NULL AND (s.ord, s.span_id) > ($2, $3) ORDER BY s.ord, s.span_id LIMIT $4"
    );
    let base = found.base_rid.unwrap_or(found.rid);
    let rows = client.query(&page, &[&base, &after_ord, &after_id, &limit]).await?;
    let mut rows: Vec<(Row, Times)> = rows.into_iter().map(|row| (row, None)).collect();
    if found.base_rid.is_some() && !rows.is_empty() {
        let last: i64 = rows.last().map_or(i64::MAX, |(r, _)| r.get("ord"));
        let sql = format!("SELECT {NARROW} FROM spans s WHERE s.rid = $1 AND s.ord >= $2 AND s.ord <= $3");
        let own = client.query(&sql, &[&found.rid, &after_ord, &last]).await?;
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
pub async fn workspace_states(client: &impl GenericClient, found: &Found, ids: &[String]) -> ApiResult<snapshots::BySpan> {
    let own = snapshots::of_run(client, found.rid, Some(ids)).await?;
    let Some(base) = found.base_rid else { return Ok(own) };
    let rows = client.query("SELECT span_id FROM spans WHERE rid = $1 AND span_id = ANY($2)", &[&found.rid, &ids]).await?;
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
pub async fn page(client: &impl GenericClient, found: &Found, query: &SpanQuery) -> ApiResult<SpanPage> {
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
                .query_one(
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

pub(super) async fn whole(client: &impl GenericClient, found: &Found, rows: &[(Row, Times)]) -> ApiResult<Vec<Span>> {
    let mut reader = Reader::default();
    let places: Vec<_> = rows.iter().map(|(r, _)| (r.get::<_, i64>("pay_rid"), place(r, "in"), place(r, "out"))).collect();
    reader.load(client, places.iter().flat_map(|(rid, i, o)| [(*rid, i), (*rid, o)])).await?;
    let ids: Vec<String> = rows.iter().map(|(r, _)| r.get("span_id")).collect();
    let states = workspace_states(client, found, &ids).await?;
    let mut spans = Vec::with_capacity(rows.len());
    for ((row, times), (rid, opening, closing)) in rows.iter().zip(&places) {
        let id: String = row.get("span_id");
        let state = |edge| states.get(&(id.clone(), edge)).and_then(|s| s.as_ref().ok()).copied();
        let opening = reader.get::<Opening>(client, found.ns, *rid, opening).await?;
        let opening = opening.ok_or_else(|| ApiError::internal(&format!("span {id:?} has no opening")))?;
        let mut closing = reader.get::<Closing>(client, found.ns, *rid, closing).await?;
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
pub async fn all(client: &impl GenericClient, found: &Found) -> ApiResult<Vec<Span>> {
    let rows = rows(client, found, None, i64::MAX).await?;
    whole(client, found, &rows).await
}

/// Some spans of a run with their payloads, in no order; ids that it does not have are left out.
///
/// # Errors
/// What the database says.
pub async fn of_ids(client: &impl GenericClient, found: &Found, ids: &[String]) -> ApiResult<Vec<Span>> {
    let sql = format!("SELECT {NARROW} FROM spans s WHERE s.rid = $1 AND s.span_id = ANY($2) AND s.ord IS NOT NULL");
    let base = client.query(&sql, &[&found.base_rid.unwrap_or(found.rid), &ids]).await?;
    let own = if found.base_rid.is_some() { client.query(&sql, &[&found.rid, &ids]).await? } else { Vec::new() };
    let rows = laid_over(base.into_iter().map(|row| (row, None)).collect(), own);
    whole(client, found, &rows).await
}

/// One span by its id, or by a name that is unique in the run; with the run id that recorded it.
///
/// # Errors
/// 404; 409 where several spans have the name.
pub async fn one(client: &impl GenericClient, found: &Found, span: &str) -> ApiResult<(Span, i64)> {
    let base = found.base_rid.unwrap_or(found.rid);
    let ids = client
        .query("SELECT span_id FROM spans WHERE rid = $1 AND ord IS NOT NULL AND (span_id = $2 OR name = $2) ORDER BY (span_id = $2) DESC, ord LIMIT 6", &[&base, &span])
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
    let row = client.query_one(&sql, &[&vec![found.rid, base], id, &found.rid]).await?;
    let rid: i64 = row.get("rid");
    let mut spans = whole(client, found, &[(row, None)]).await?;
    let span = spans.pop().ok_or_else(|| ApiError::internal(&"a span vanished"))?;
    Ok((span, rid))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn span(id: &str, opening: Value, closing: Value) -> SpanUpload {
        let mut whole = json!({"name": "step", "kind": "ShellCommand", "started": 1_000});
        for (member, value) in opening.as_object().unwrap() {
            whole[member] = value.clone();
        }
        serde_json::from_value(json!({"id": id, "opening": whole, "closing": closing})).unwrap()
    }

    fn refused(uploads: &[SpanUpload]) -> String {
        check(uploads).err().map(|e| format!("{} {}", e.status.as_u16(), e.detail)).unwrap_or_default()
    }

    #[test]
    fn numbers_times_and_names_have_limits_that_are_said() {
        let ended = |more: Value| {
            let mut closing = json!({"status": "Completed", "ended": 2_000});
            for (member, value) in more.as_object().unwrap() {
                closing[member] = value.clone();
            }
            closing
        };
        let fine =
            span("a", json!({"name": "n".repeat(512)}), ended(json!({"input_tokens": MAX_TOKENS, "output_tokens": 0, "cost_usd": 1e9})));
        assert_eq!(refused(&[fine]), "");
        for (upload, says) in [
            (span("a", json!({}), ended(json!({"input_tokens": MAX_TOKENS + 1}))), "input_tokens: 1000000000001 is not between"),
            (span("a", json!({}), ended(json!({"output_tokens": -1}))), "output_tokens: -1 is not between 0"),
            (span("a", json!({}), ended(json!({"cost_usd": -0.1}))), "cost_usd: -0.1"),
            (span("a", json!({}), ended(json!({"cost_usd": 1e10}))), "cost_usd"),
            (span("a", json!({}), ended(json!({"ended": 999}))), "ended: 999 is before"),
            (span("a", json!({"started": 0}), Value::Null), "started: 0 is no time"),
            (span("a", json!({"name": "n".repeat(513)}), Value::Null), "name: has 1 to 512"),
            (span("a", json!({"name": "nul\0"}), Value::Null), "name: has 1 to 512 characters and no NUL"),
            (span(&"i".repeat(257), json!({}), Value::Null), "id: has 1 to 256"),
            (span("nul\0", json!({}), Value::Null), "no NUL"),
            (span("a", json!({"parent": "nul\0"}), Value::Null), "parent"),
        ] {
            let said = refused(&[upload]);
            assert!(said.starts_with("400 span ") && said.contains(says), "{said:?} does not say {says:?}");
        }
    }

    #[test]
    fn a_loop_is_refused_with_both_spans_and_what_comes_later_is_waited_for() {
        let below = |id: &str, parent: &str| span(id, json!({"parent": parent}), Value::Null);
        let after = |id: &str, spans: &[&str]| span(id, json!({"depends_on": spans}), Value::Null);
        for (uploads, field) in [
            (vec![below("a", "a")], "parent"),
            (vec![below("a", "b"), below("b", "a")], "parent"),
            (vec![below("top", "a"), below("a", "b"), below("b", "c"), below("c", "a")], "parent"),
            (vec![after("a", &["x", "b"]), after("b", &["y", "a"])], "depends_on"),
        ] {
            let said = refused(&uploads);
            assert!(said.starts_with("400 span ") && said.contains(&format!("{field}: \"a\" comes back to")), "{said}");
        }
        let fine = [below("b", "a"), below("a", "later"), after("c", &["d", "e"]), after("d", &["e"]), after("e", &["never"])];
        assert_eq!(refused(&fine), "");
        // A long chain is walked once, and not once from each of its spans.
        let chain: Vec<_> = (0..2000).map(|i| below(&i.to_string(), &(i + 1).to_string())).collect();
        assert_eq!(refused(&chain), "");
    }

    #[test]
    fn files_are_written_in_the_workspace_or_not_at_all() {
        let write = |path: &str| [span("w", json!({"kind": "FileWrite", "executor": {"type": "file_write", "path": path}}), Value::Null)];
        let refused = |path: &str, root| check_paths(&write(path), root).err().map(|e| e.detail);
        for path in ["/etc/passwd", "../up", "a/../../b", "/workspaces/a"] {
            let said = refused(path, Some("/workspace")).unwrap_or_default();
            assert!(said.contains("span \"w\": executor.path") && said.contains(path) && said.contains("/workspace"), "{said}");
        }
        for (path, root) in [("/workspace/a", Some("/workspace")), ("a/b", Some("/workspace")), ("/anywhere", None)] {
            assert_eq!(refused(path, root), None);
        }
    }
}
