//! Prints of runs: made once of a sealed run, so that a diff reads the records of no spans but those that it lists.

use replayfork_client::ingest::Edge;
use replayfork_client::read::RunState;
use replayfork_core::diff::{Prints, workspace};

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::graphs::{PRINTS, Rows};
use crate::store::runs::{self, Found};
use crate::store::{snapshots, spans};

/// Prints of a run's spans, in order; those of a fork over its base's.
///
/// # Errors
/// What the database says.
pub async fn of(client: &impl Connection, found: &Found) -> ApiResult<Prints> {
    let Some(base) = found.base_rid else {
        let sealed = found.run.state == RunState::Sealed;
        return if sealed { stored(client, found).await } else { Ok(Prints::of(spans::all(client, found).await?.iter())) };
    };
    let mut prints = stored(client, &runs::by_rid(client, &found.ns.packs, base).await?).await?;
    let own = client.fetch("SELECT span_id FROM spans WHERE rid = $1 AND ord IS NOT NULL", &[&found.rid]).await?;
    let own: Vec<String> = own.iter().map(|row| row.get(0)).collect();
    let (records, states) = (spans::of_ids(client, found, &own).await?, snapshots::of_run(client, found.rid, None).await?);
    let places = prints.places();
    let place = |id: &str| places.get(id).copied().ok_or_else(|| ApiError::internal(&format!("span {id:?} is not in the run's base")));
    let records = records.iter().map(|span| Ok((place(&span.id)?, span))).collect::<ApiResult<Vec<_>>>()?;
    let after = states.iter().filter(|((_, edge), _)| *edge == Edge::After);
    let states = after.map(|((id, _), state)| Ok((place(id)?, state.as_ref().ok()))).collect::<ApiResult<Vec<_>>>()?;
    states.into_iter().for_each(|(place, state)| prints.spans[place].workspace = workspace(state));
    records.into_iter().for_each(|(place, span)| prints.replace(place, span));
    Ok(prints)
}

/// Those of a sealed run that stands on no other; made where there are none, or those of another version.
async fn stored(client: &impl Connection, found: &Found) -> ApiResult<Prints> {
    let sql = "SELECT n, data FROM run_graphs WHERE rid = $1 AND part = $2 ORDER BY n";
    let rows = client.fetch(sql, &[&found.rid, &PRINTS]).await?;
    let mut prints = Prints::default();
    let is_whole = rows.first().is_some_and(|first| first.get::<_, i32>(0) == 0);
    if is_whole && rows.iter().all(|row| prints.take(row.get(1)).is_ok()) {
        return Ok(prints);
    }
    let prints = Prints::of(spans::all(client, found).await?.iter());
    store(client, found.rid, &prints).await?;
    Ok(prints)
}

/// Stores those of a sealed run. The first part is written last: where it is, all are.
///
/// # Errors
/// What the database says.
pub async fn store(client: &impl Connection, rid: i64, prints: &Prints) -> ApiResult<()> {
    let parts: Vec<Vec<u8>> = prints.encode().collect();
    let mut rows = Rows::new(rid, PRINTS);
    for (n, part) in parts.into_iter().enumerate().rev() {
        rows.add(client, n, None, part).await?;
    }
    rows.flush(client).await
}
