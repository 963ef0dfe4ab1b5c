//! What ReplayFork promises, on a real cluster with real processes: one scenario a promise, each in a namespace of its own, four at
//! a time. Those that restart a part of the product, or stop what the operator does, come last and alone.
//!
//! `cargo test --workspace --test e2e -- PART_OF_A_NAME` runs those with that in their name.

mod at_most_once;
mod diffs;
mod encrypted;
mod endpoints;
mod forks;
mod isolation;
mod lifecycle;
mod models;
mod operator_killed;
mod patches;
mod recording;
mod refusals;
mod sandbox;
mod viewer;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Result, bail};
use replayfork_test_cluster::interrupt;
use replayfork_test_cluster::product::Profile;
use replayfork_tests::place::Place;
use replayfork_tests::world::World;

/// Scenarios that run at the same time.
const ABREAST: usize = 4;

/// What a user notices, and how that is seen.
pub struct Scenario {
    name: &'static str,
    run: fn(&Place) -> Result<()>,
}

/// Scenarios by the names of their functions.
macro_rules! scenarios {
    ($($name:ident),+ $(,)?) => { &[$($crate::Scenario { name: stringify!($name), run: $name }),+] };
}
pub(crate) use scenarios;

fn main() -> ExitCode {
    if let Some(code) = replayfork_test_cluster::take_role() {
        return code;
    }
    match interrupt::install().and_then(|()| all()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what was asked for, and says whether all of it holds.
fn all() -> Result<bool> {
    let started = Instant::now();
    let filters: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let asked_for = |scenario: &&Scenario| filters.is_empty() || filters.iter().any(|part| scenario.name.contains(part.as_str()));
    let abreast = [
        recording::ABREAST,
        at_most_once::ABREAST,
        diffs::SCENARIOS,
        forks::SCENARIOS,
        isolation::SCENARIOS,
        lifecycle::SCENARIOS,
        models::SCENARIOS,
        patches::SCENARIOS,
        refusals::SCENARIOS,
        sandbox::SCENARIOS,
        viewer::SCENARIOS,
    ];
    let alone = [recording::ALONE, at_most_once::ALONE, operator_killed::SCENARIOS, encrypted::ALONE, endpoints::ALONE];
    let all = abreast.iter().chain(&alone).map(|list| list.len()).sum::<usize>();
    let abreast: Vec<&Scenario> = abreast.into_iter().flatten().filter(asked_for).collect();
    let alone: Vec<&Scenario> = alone.into_iter().flatten().filter(asked_for).collect();
    let chosen = abreast.len() + alone.len();
    if chosen == 0 {
        bail!("no scenario has {filters:?} in its name");
    }
    let namespaces: Vec<String> = (1..=chosen).map(|n| format!("e2e-{n:02}")).collect();
    let world = World::start(&namespaces.iter().map(String::as_str).collect::<Vec<_>>(), Profile::Dev)?;
    isolation::prepare(&world)?;
    println!("\nrunning {chosen} tests");
    let free = Mutex::new(namespaces.into_iter());
    let failed = AtomicUsize::new(0);
    let run = |scenario: &Scenario| {
        let namespace = free.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next().unwrap_or_default();
        if !one(&world, namespace, scenario) {
            failed.fetch_add(1, Ordering::SeqCst);
        }
    };
    let waiting = Mutex::new(abreast.into_iter());
    std::thread::scope(|scope| {
        for _ in 0..ABREAST {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
                    match next.filter(|_| !interrupt::asked()) {
                        Some(scenario) => run(scenario),
                        None => return,
                    }
                }
            });
        }
    });
    alone.into_iter().take_while(|_| !interrupt::asked()).for_each(run);
    interrupt::check()?;
    drop(world);
    let failed = failed.into_inner();
    println!(
        "\ntest result: {}. {} passed; {failed} failed; 0 ignored; 0 measured; {} filtered out; finished in {:.2}s",
        if failed == 0 { "ok" } else { "FAILED" },
        chosen - failed,
        all - chosen,
        started.elapsed().as_secs_f64()
    );
    Ok(failed == 0)
}

/// Runs one scenario, and prints what became of it.
fn one(world: &World, namespace: String, scenario: &Scenario) -> bool {
    let started = Instant::now();
    let place = Place { world, namespace };
    let result = catch_unwind(AssertUnwindSafe(|| (scenario.run)(&place))).unwrap_or_else(|_| bail!("it panicked"));
    let seconds = started.elapsed().as_secs_f64();
    match &result {
        Ok(()) => println!("test {} ... ok ({seconds:.1} s)", scenario.name),
        // In one piece, since others print too.
        Err(error) => {
            println!("test {} ... FAILED ({seconds:.1} s)\n{error:#}\n{}{}", scenario.name, place.story(), world.story(&place.namespace))
        }
    }
    // Its objects need the node no longer; a fork's run stays in the database.
    let gone = ["delete", "namespace", &place.namespace, "--wait=false"];
    if let Err(error) = replayfork_test_cluster::command::run(&mut world.kube.kubectl(gone)) {
        eprintln!("{error:#}");
    }
    result.is_ok()
}
