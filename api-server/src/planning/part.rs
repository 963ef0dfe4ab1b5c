//! A plan from a run's graph and the few records that it needs.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use replayfork_client::fork::{BlockedSpan, PlanOverview};
use replayfork_client::ingest::Edge;
use replayfork_core::binding::Hole;
use replayfork_core::fork::{ForkSpec, ModelMode};
use replayfork_core::graph::Graph;
use replayfork_core::model::{SnapshotRef, Span};
use replayfork_core::patch::{Contents, Patch};
use replayfork_core::plan::{FactsNeeded, Outline, Plan, Prepared, View, outline};
use replayfork_core::source::{Changed, Source};

use super::{Refusal, SHOWN, contents, facts, inherited, load, resolve};
use crate::config::Config;
use crate::db::Connection;
use crate::endpoints::Endpoints;
use crate::problem::{ApiError, ApiResult};
use crate::store::graphs::{self, Known};
use crate::store::runs::Found;
use crate::store::spans;

/// How often records are read that a walk turns out to need: those of a patch's target, then of who reads what it gives, then those
/// whose words are shown.
const ROUNDS: usize = 64;

/// A planned fork. [`Ready::fork`] and [`Ready::view`] open it.
pub struct Ready {
    graph: Graph,
    source: Source,
    contents: Contents,
    /// Places in the run of the records in `source`.
    places: Vec<u32>,
    asked: BTreeSet<u32>,
    names: Known,
    starts_recorded: bool,
    pub outline: Outline,
    /// Planned spans whose words can be told.
    listed: usize,
}

/// Plans a fork of a sealed run; of the first `listed` planned spans the words are there too.
///
/// # Errors
/// What the database says; inside, why the spec can't be planned.
pub async fn ready(client: &impl Connection, found: &Found, spec: &ForkSpec, listed: usize) -> ApiResult<Result<Ready, Refusal>> {
    if let Some(ready) = try_ready(client, found, spec, listed).await? {
        return Ok(Ok(ready));
    }
    // All records together say best why it can't be planned.
    let input = match load(client, found, spec).await? {
        Ok(input) => input,
        Err(refusal) => return Ok(Err(refusal)),
    };
    match Prepared::new(&input.source, &input.contents, spec) {
        Err(refused) => Ok(Err(refused.into())),
        Ok(_) => Err(ApiError::internal(&"a fork can be planned by all records, and not by some")),
    }
}

/// `None`: the spec is refused.
async fn try_ready(client: &impl Connection, found: &Found, spec: &ForkSpec, listed: usize) -> ApiResult<Option<Ready>> {
    let inherits = inherited(client, found).await?;
    let Some(targets) = targets(client, found, spec, &inherits).await? else { return Ok(None) };
    let mut graph = graphs::head(client, found).await?;
    let mut names = Known::default();
    let at = names.places(client, found, &targets).await?;
    // The first one is the fork span.
    let first = View::first_of(&graph, at[0] as usize, spec.patches.is_empty());
    let singles = at.iter().copied().collect();
    let from = graph.reads_from(first);
    graphs::streams(client, found, &mut graph, from, &singles).await?;
    if spec.model.mode == ModelMode::Recorded {
        graphs::requests(client, found, &mut graph).await?;
    }
    names.load(client, found, [first as u32]).await?;
    let starts_recorded = names.get(first as u32).is_some_and(|n| n.state.is_some());
    let contents = contents(client, found, spec, &inherits).await?;
    let mut asked: BTreeSet<u32> = at.iter().copied().collect();
    let (mut records, mut by_patches) = (BTreeMap::new(), BTreeSet::new());
    for _ in 0..ROUNDS {
        let wanted: BTreeSet<u32> = asked.iter().flat_map(|&span| graph.around(span)).chain(by_patches.iter().copied()).collect();
        read(client, found, &mut names, &mut records, &wanted).await?;
        let places: Vec<u32> = wanted.iter().copied().collect();
        let source = part(found, &graph, &names, &records, &places, first).with_inherited(inherits.clone());
        let Ok(bare) = Prepared::without_facts(&source, &contents, spec) else { return Ok(None) };
        let used = used(client, found, &mut names, &source, &bare).await?;
        if !used.is_subset(&wanted) {
            by_patches.extend(used);
            continue;
        }
        let mut needed = bare.needed();
        drop(bare);
        states_before(client, found, &graph, &mut names, &places, &mut needed).await?;
        let facts = facts(client, found, &source, needed).await?;
        let source = source.with_facts(facts);
        let Ok(fork) = Prepared::new(&source, &contents, spec) else { return Ok(None) };
        graphs::paths(client, found, &mut graph, &fork.paths()).await?;
        let view = View::part(&fork, &graph, &places, &asked, starts_recorded);
        let outline = match outline(&view) {
            Ok(outline) => outline,
            Err(missing) => {
                asked.extend(missing);
                continue;
            }
        };
        let shown: BTreeSet<usize> = (0..outline.planned.len().min(listed)).chain(outline.blocked(SHOWN)).collect();
        let shown: Vec<usize> = shown.into_iter().collect();
        let lacking = outline.records(&view, &shown);
        if !lacking.is_empty() {
            asked.extend(lacking);
            continue;
        }
        names.load(client, found, outline.mentions(&view, &shown)).await?;
        drop(fork);
        return Ok(Some(Ready { graph, source, contents, places, asked, names, starts_recorded, outline, listed }));
    }
    Err(ApiError::internal(&"a plan needs records without end"))
}

impl Ready {
    /// # Errors
    /// None, after [`ready`] has made it with the same spec.
    pub fn fork<'a>(&'a self, spec: &'a ForkSpec) -> Result<Prepared<'a>, Refusal> {
        Ok(Prepared::new(&self.source, &self.contents, spec)?)
    }

    pub fn view<'a>(&'a self, fork: &'a Prepared<'a>) -> View<'a> {
        View::part(fork, &self.graph, &self.places, &self.asked, self.starts_recorded)
    }

    /// Places of all planned spans, as they are stored.
    pub fn planned(&self) -> Vec<u8> {
        self.outline.planned.iter().flat_map(|p| p.span.to_le_bytes()).collect()
    }

    /// The plan with what the sandbox gets, and the words of the first planned spans.
    ///
    /// # Errors
    /// The refusal that ends the fork, in the user's words.
    pub fn plan(
        &self,
        config: &Config,
        endpoints: &Endpoints,
        found: &Found,
        fork: &Prepared<'_>,
    ) -> Result<(Plan, PlanOverview), Refusal> {
        super::check_endpoint(endpoints, found, fork.spec)?;
        let view = self.view(fork);
        let plan = self.outline.plan(&view, &self.names, self.listed);
        let environment = resolve(config, self.graph.has_workspace, &plan)?;
        let blocked = self.outline.blocked(SHOWN).into_iter().filter_map(|at| {
            let span = self.outline.span(&view, &self.names, at);
            let blocked = span.blocked.into_iter().next()?;
            Some(BlockedSpan { span: span.id, name: span.name, kind: span.kind, blocked })
        });
        let overview =
            PlanOverview { digest: plan.digest, counts: plan.counts, sandbox: plan.sandbox, blocked_spans: blocked.collect(), environment };
        Ok((plan, overview))
    }
}

/// The spans that the spec names, the fork span first, then those that inherited patches name. `None`: a name that no span has, or
/// several.
async fn targets(client: &impl Connection, found: &Found, spec: &ForkSpec, inherits: &[Patch]) -> ApiResult<Option<Vec<(i64, String)>>> {
    let named = spec.patches.iter().filter_map(|p| p.span.as_deref()).chain(spec.approvals.iter().map(|a| a.span.as_str()));
    let named: Vec<&str> = std::iter::once(spec.source.span.as_str()).chain(named).collect();
    let taken_over = inherits.iter().filter_map(|p| p.span.as_deref());
    let all: Vec<&str> = named.iter().copied().chain(taken_over).collect();
    let base = found.base_rid.unwrap_or(found.rid);
    let by_id = "SELECT span_id, ord FROM spans WHERE rid = $1 AND span_id = ANY($2) AND ord IS NOT NULL";
    let mut spans: BTreeMap<String, (i64, String)> =
        client.fetch(by_id, &[&base, &all]).await?.iter().map(|r| (r.get(0), (r.get(1), r.get(0)))).collect();
    let rest: Vec<&str> = named.iter().copied().filter(|name| !spans.contains_key(*name)).collect();
    if !rest.is_empty() {
        let by_name = "SELECT name, ord, span_id FROM spans WHERE rid = $1 AND name = ANY($2) AND ord IS NOT NULL LIMIT 1000";
        for row in client.fetch(by_name, &[&base, &rest]).await? {
            if spans.insert(row.get(0), (row.get(1), row.get(2))).is_some() {
                return Ok(None);
            }
        }
    }
    if named.iter().any(|name| !spans.contains_key(*name)) {
        return Ok(None);
    }
    Ok(Some(all.iter().filter_map(|name| spans.get(*name).cloned()).collect()))
}

/// Reads the records of spans that are not yet there.
async fn read(
    client: &impl Connection,
    found: &Found,
    names: &mut Known,
    records: &mut BTreeMap<u32, Span>,
    wanted: &BTreeSet<u32>,
) -> ApiResult<()> {
    let absent: Vec<u32> = wanted.iter().copied().filter(|span| !records.contains_key(span)).collect();
    if absent.is_empty() {
        return Ok(());
    }
    names.load(client, found, absent.iter().copied()).await?;
    let ids: Vec<String> = absent.iter().filter_map(|&span| names.get(span)).map(|n| n.id.clone()).collect();
    let mut read: BTreeMap<String, Span> = spans::of_ids(client, found, &ids).await?.into_iter().map(|s| (s.id.clone(), s)).collect();
    for span in absent {
        let record = names.get(span).and_then(|n| read.remove(&n.id));
        records.insert(span, record.ok_or_else(|| ApiError::internal(&format!("step {span} of run {} is gone", found.run.name)))?);
    }
    Ok(())
}

fn part(found: &Found, graph: &Graph, names: &Known, records: &BTreeMap<u32, Span>, places: &[u32], first: usize) -> Source {
    let here = |span: u32| places.binary_search(&span).ok().and_then(|_| names.get(span));
    let outside = graph.outside.iter().filter_map(|(span, path, _)| Some((here(*span)?, path)));
    let changed = outside.map(|(span, path)| (span.id.clone(), Changed { outside: vec![path.clone()], ..Changed::default() }));
    let containers: HashSet<String> = graph.containers.iter().filter_map(|c| here(c.span)).map(|n| n.id.clone()).collect();
    let spans = places.iter().filter_map(|span| records.get(span).cloned()).collect();
    let begin = places.partition_point(|&place| (place as usize) < first);
    Source::part(found.run.environment.clone(), spans, changed.collect(), &containers, begin)
}

/// What templates of patches refer to.
async fn used(
    client: &impl Connection,
    found: &Found,
    names: &mut Known,
    source: &Source,
    fork: &Prepared<'_>,
) -> ApiResult<BTreeSet<u32>> {
    let base = found.base_rid.unwrap_or(found.rid);
    let mut spans = Vec::new();
    for (target, hole) in fork.holes() {
        let target = &source.spans[target];
        let (column, of) = match &hole {
            Hole::Name(name) => ("name", name),
            Hole::Id(id) => ("span_id", id),
        };
        let started = target.first_recorded.map_or(target.opening.started, |(started, _)| started);
        let sql = format!(
            "SELECT ord, span_id FROM spans WHERE rid = $1 AND {column} = $2 AND ord IS NOT NULL AND (ord, span_id) < ($3, $4)
               AND greatest(ended, started) <= $5 AND ended IS NOT NULL ORDER BY ord DESC, span_id DESC LIMIT 1"
        );
        let row = client.fetch_opt(&sql, &[&base, of, &target.ord, &target.id, &started]).await?;
        spans.extend(row.map(|row| (row.get::<_, i64>(0), row.get::<_, String>(1))));
    }
    if spans.is_empty() { Ok(BTreeSet::new()) } else { Ok(names.places(client, found, &spans).await?.into_iter().collect()) }
}

/// The recorded workspaces that patches of files and workspaces are compared with.
async fn states_before(
    client: &impl Connection,
    found: &Found,
    graph: &Graph,
    names: &mut Known,
    places: &[u32],
    needed: &mut FactsNeeded,
) -> ApiResult<()> {
    let files = needed.files.iter_mut().map(|(target, state, _)| (*target, state));
    for (target, state) in files.chain(needed.snapshots.iter_mut().map(|(target, state, _)| (*target, state))) {
        *state = state_before(client, found, graph, names, places[target]).await?;
    }
    Ok(())
}

async fn state_before(
    client: &impl Connection,
    found: &Found,
    graph: &Graph,
    names: &mut Known,
    target: u32,
) -> ApiResult<Option<SnapshotRef>> {
    let unit = graph.scan(target as usize).find(|s| s.traits.has(replayfork_core::graph::Traits::UNIT));
    let Some(unit) = unit.map(|s| s.span) else { return Ok(None) };
    names.load(client, found, [unit as u32]).await?;
    let start = names.get(unit as u32).and_then(|n| n.state);
    let Some((span, after)) = graph.state_for_patches(unit, start) else { return Ok(None) };
    names.load(client, found, [span]).await?;
    let Some(id) = names.get(span).map(|n| n.id.clone()) else { return Ok(None) };
    let states = spans::workspace_states(client, found, std::slice::from_ref(&id)).await?;
    let edge = if after { Edge::After } else { Edge::Before };
    Ok(states.get(&(id, edge)).and_then(|state| state.as_ref().ok()).copied())
}
