//! What a diff of two unrelated runs costs, against the SQL join of the two.

use std::time::Instant;

use anyhow::{Result, ensure};
use deadpool_postgres::Object;
use replayfork_api_server::diffing;
use replayfork_api_server::store::{Packs, runs};

use crate::database::said;
use crate::{median, peers};

const GOAL: f64 = 0.1;

/// Both know of digests of what each step was asked and gave, and find which steps differ; the whole diff, with texts, comes after.
pub async fn compare(client: &Object, a: &str, b: &str, ratios: &mut Vec<String>) -> Result<()> {
    let (left, right) = (
        runs::find(client, &Packs::default(), "bench", a).await.map_err(said)?,
        runs::find(client, &Packs::default(), "bench", b).await.map_err(said)?,
    );
    let begun = Instant::now();
    diffing::compare(client, &left, &right).await.map_err(said)?;
    println!("diff: prints made once in {:.1} s", begun.elapsed().as_secs_f64());
    let (mut compared, mut joined, mut whole) = (vec![], vec![], vec![]);
    let mut found = (0, 0, 0);
    for _ in 0..15 {
        let begun = Instant::now();
        let (_, _, ours) = diffing::compare(client, &left, &right).await.map_err(said)?;
        compared.push(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        let by_join = peers::join(client, left.rid, right.rid).await?;
        joined.push(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        let diff = diffing::run_diff(client, &left, &right).await.map_err(said)?;
        whole.push(begun.elapsed().as_secs_f64());
        let counts = ours.counts();
        found = ((counts.changed + counts.only_a + counts.only_b) as usize, by_join, diff.diff.spans.len());
    }
    ensure!(found.0 > 0 && found.2 > 0, "two runs that differ have no difference");
    let [compared, joined, whole] = [compared, joined, whole].map(median);
    println!("diff of {a} and {b}: {} steps differ, {} by the join, {} listed with their texts", found.0, found.1, found.2);
    println!("diff: compared out of Postgres {:.1} ms, SQL join {:.1} ms, whole diff {:.1} ms", compared * 1e3, joined * 1e3, whole * 1e3);
    ratios.push(format!("ratio diff-to-join {:.3} <= {GOAL}", compared / joined));
    Ok(())
}
