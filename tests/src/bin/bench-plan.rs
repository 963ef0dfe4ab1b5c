//! What a plan costs: out of Postgres to the finished plan, as `POST /api/v1/plans` makes it, against the recursive query that a
//! plain SQL solution would use, and the planner alone against a bare BFS over the same edges; and what a diff of two runs costs,
//! against the SQL join of the two. All peers in the same run, one after the other in each round. Prints a line a figure; the ratios
//! come last.

#[path = "../bench/database.rs"]
mod database;
#[path = "../bench/diff.rs"]
mod diff;
#[path = "../bench/peers.rs"]
mod peers;
#[path = "../bench/run.rs"]
mod run;

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use deadpool_postgres::Object;
use replayfork_api_server::config::Config;
use replayfork_api_server::endpoints::Endpoints;
use replayfork_api_server::planning::{self, LISTED, Ready};
use replayfork_api_server::store::{Packs, graphs, runs};
use replayfork_core::fork::ForkSpec;
use replayfork_core::plan::{self, Plan, Prepared, outline};
use replayfork_tests::postgres;
use serde_json::json;

use database::said;
use peers::Adjacency;
use run::Generator;

const PLAN_GOAL: f64 = 0.025;
const BFS_GOAL: f64 = 3.0;
/// A run ten times as long may take this much longer for each of its steps.
const GROWTH_GOAL: f64 = 1.5;

/// Two forks of the run in the middle: one that reaches a few per cent of it, one that reaches half of all later steps.
#[derive(Clone, Copy)]
enum Case {
    Narrow,
    Wide,
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Case::Narrow => "narrow",
            Case::Wide => "wide",
        }
    }

    fn step(self, run: &Generator) -> usize {
        match self {
            Case::Narrow => run.narrow(),
            Case::Wide => run.wide(),
        }
    }

    fn spec(self, run: &Generator, name: &str) -> Result<ForkSpec> {
        let step = self.step(run);
        let command = json!({"script": "python3 generate.py --fast", "reads": ["generate.py"], "writes": [run.written(step)]});
        Ok(serde_json::from_value(json!({
            "source": {"run": name, "span": run.id(step)},
            "patches": [{"type": "CommandOverride", "command": command}],
            "model": {"mode": "Command", "command": {"argv": ["answer"]}},
        }))?)
    }
}

fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let arguments: Vec<String> = std::env::args().collect();
    let done = match arguments.iter().position(|a| a == "--once") {
        Some(at) => runtime.block_on(once(&arguments[at + 1..])),
        None => runtime.block_on(bench()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn config() -> Config {
    // Nothing but the database's address is looked at by what is measured.
    Config::parse_from(["bench-plan", "--database-url", "unused"])
}

fn size(steps: usize) -> String {
    format!("1e{}", steps.ilog10())
}

async fn bench() -> Result<()> {
    let most: usize = match std::env::args().find_map(|a| a.strip_prefix("--steps=").map(str::to_owned)) {
        Some(steps) => steps.parse().with_context(|| format!("--steps={steps}"))?,
        None => 1_000_000,
    };
    let server = postgres::Server::start()?;
    let pool = postgres::pool(&server.url()).await?;
    let mut client = pool.get().await?;
    database::make_tables(&client).await?;
    let sizes: Vec<usize> = [100_000, 1_000_000].into_iter().filter(|steps| *steps <= most.max(100_000)).collect();
    for (seed, &steps) in sizes.iter().enumerate() {
        let begun = Instant::now();
        database::write(&mut client, Generator::new(seed as u64, steps), steps, &size(steps)).await?;
        println!("rows of {} spans written in {:.1} s", size(steps), begun.elapsed().as_secs_f64());
        let found = runs::find(&client, &Packs::default(), "bench", &size(steps)).await.map_err(said)?;
        let begun = Instant::now();
        graphs::make(&client, &found).await.map_err(said)?;
        let bytes: i64 = client.query_one("SELECT sum(octet_length(data)) FROM run_graphs WHERE rid = $1", &[&found.rid]).await?.get(0);
        println!("graph of {} spans made once in {:.1} s, {:.1} MB", size(steps), begun.elapsed().as_secs_f64(), bytes as f64 / 1e6);
    }
    database::write(&mut client, Generator::again(0, 77, 100_000), 100_000, "again").await?;
    database::index_tables(&client).await?;
    let mut ratios = Vec::new();
    diff::compare(&client, &size(100_000), "again", &mut ratios).await?;
    let mut per_step: Vec<(Case, f64)> = Vec::new();
    same_by_all_records(&client, &Generator::new(0, 100_000), &size(100_000)).await?;
    for (seed, &steps) in sizes.iter().enumerate() {
        for case in [Case::Narrow, Case::Wide] {
            let rounds = if steps > 100_000 { 5 } else { 15 };
            let of = compare(&client, &Generator::new(seed as u64, steps), steps, case, rounds, &mut ratios).await?;
            per_step.push((case, of / steps as f64));
            let output = Command::new(std::env::current_exe()?)
                .args(["--once", &server.url(), &seed.to_string(), &steps.to_string(), case.name()])
                .output()?;
            print!("{}", String::from_utf8_lossy(&output.stdout));
        }
    }
    if let [narrow, wide, narrow_10, wide_10] = per_step[..] {
        for (less, more) in [(narrow, narrow_10), (wide, wide_10)] {
            ratios.push(format!("ratio plan-growth-per-step-{} {:.3} <= {GROWTH_GOAL}", less.0.name(), more.1 / less.1));
        }
    }
    ratios.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// A plan as the api-server makes it.
async fn planned(client: &Object, name: &str, spec: &ForkSpec, config: &Config, endpoints: &Endpoints) -> Result<(Ready, Plan)> {
    let found = runs::find(client, &Packs::default(), "bench", name).await.map_err(said)?;
    let refused = |refusal: planning::Refusal| anyhow::anyhow!(refusal.message);
    let ready = planning::ready(client, &found, spec, LISTED).await.map_err(said)?.map_err(refused)?;
    let plan = {
        let fork = ready.fork(spec).map_err(refused)?;
        ready.plan(config, endpoints, &found, &fork).map_err(refused)?.0
    };
    Ok((ready, plan))
}

/// A plan from the graph and few records is the one that all records give.
async fn same_by_all_records(client: &Object, run: &Generator, name: &str) -> Result<()> {
    let spec = Case::Narrow.spec(run, name)?;
    let found = runs::find(client, &Packs::default(), "bench", name).await.map_err(said)?;
    let refused = |refusal: planning::Refusal| anyhow::anyhow!(refusal.message);
    let begun = Instant::now();
    let input = planning::load(client, &found, &spec).await.map_err(said)?.map_err(refused)?;
    let whole = plan::of(&Prepared::new(&input.source, &input.contents, &spec)?);
    println!("{name} narrow: plan from all records, as a sandbox makes it, {:.1} s", begun.elapsed().as_secs_f64());
    let (_, part) = planned(client, name, &spec, &config(), &Endpoints::load(None)?).await?;
    anyhow::ensure!(
        whole.digest == part.digest && whole.spans[..part.spans.len()] == part.spans,
        "the plan from all records is another one"
    );
    Ok(())
}

/// Seconds that a plan takes, out of Postgres.
async fn compare(client: &Object, run: &Generator, steps: usize, case: Case, rounds: usize, ratios: &mut Vec<String>) -> Result<f64> {
    let (config, endpoints) = (config(), Endpoints::load(None)?);
    let (name, spec) = (size(steps), case.spec(run, &size(steps))?);
    let found = runs::find(client, &Packs::default(), "bench", &name).await.map_err(said)?;
    let adjacency = Adjacency::load(client, found.rid, steps).await?;
    let (mut plan, mut alone, mut cte, mut numbers, mut whole, mut bfs) = (vec![], vec![], vec![], vec![], vec![], vec![]);
    let (step, id) = (case.step(run), run.id(case.step(run)));
    let mut counts = (0, 0, 0);
    for _ in 0..rounds {
        let begun = Instant::now();
        let (ready, made) = planned(client, &name, &spec, &config, &endpoints).await?;
        plan.push(begun.elapsed().as_secs_f64());
        let fork = ready.fork(&spec).map_err(|r| anyhow::anyhow!(r.message))?;
        let view = ready.view(&fork);
        let begun = Instant::now();
        let again = outline(&view).map_err(|_| anyhow::anyhow!("records are missing"))?;
        alone.push(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        let reached = adjacency.bfs(step);
        bfs.push(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        let by_cte = peers::recursive(client, found.rid, &id).await?;
        cte.push(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        peers::recursive_numbers(client, found.rid, step).await?;
        numbers.push(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        peers::recursive_named(client, found.rid, &id).await?;
        whole.push(begun.elapsed().as_secs_f64());
        counts = (again.planned.len(), reached, by_cte);
        let listed = made.spans.len() as i64 + made.spans_left_out;
        anyhow::ensure!(listed == counts.0 as i64, "two plans of one fork differ");
    }
    let [plan, alone, cte, numbers, whole, bfs] = [plan, alone, cte, numbers, whole, bfs].map(median);
    let of = format!("{name} {}", case.name());
    println!(
        "{of}: {} spans planned, {} reached by BFS and {} by the recursive query, {} edges",
        counts.0,
        counts.1,
        counts.2,
        adjacency.edges()
    );
    println!("{of}: plan out of Postgres {:.2} ms, planner alone {:.2} ms, BFS {:.2} ms", plan * 1e3, alone * 1e3, bfs * 1e3);
    println!(
        "{of}: recursive query by id {:.1} ms, by number {:.1} ms, with names in order {:.1} ms",
        cte * 1e3,
        numbers * 1e3,
        whole * 1e3
    );
    let of = format!("{name}-{}", case.name());
    ratios.push(format!("ratio plan-to-cte-{of} {:.4} <= {PLAN_GOAL}", plan / cte));
    ratios.push(format!("ratio planner-to-bfs-{of} {:.2} <= {BFS_GOAL:.1}", alone / bfs));
    Ok(plan)
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One plan in a process of its own, for the memory that it takes.
async fn once(arguments: &[String]) -> Result<()> {
    let [url, seed, steps, case] = arguments else { anyhow::bail!("--once URL SEED STEPS CASE") };
    let case = if case == "wide" { Case::Wide } else { Case::Narrow };
    let steps: usize = steps.parse()?;
    let pool = replayfork_api_server::db::pool(url, None, 1)?;
    let client = pool.get().await?;
    let before = resident()?;
    let run = Generator::new(seed.parse()?, steps);
    let spec = case.spec(&run, &size(steps))?;
    let (_, plan) = planned(&client, &size(steps), &spec, &config(), &Endpoints::load(None)?).await?;
    let planned = plan.spans.len() as i64 + plan.spans_left_out;
    println!(
        "{} {}: peak RSS of a plan {:.1} MB, {before:.1} MB before it, {planned} spans planned",
        size(steps),
        case.name(),
        resident()?
    );
    Ok(())
}

/// The most memory that this process has had, in megabytes.
fn resident() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("the process has no VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<f64>()? / 1e3)
}
