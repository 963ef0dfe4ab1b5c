//! What a fork's start costs: from apply to the first re-executed step in its pod, against a bare Job of the same shape in the
//! same run. Both ends are nanoseconds on this machine's clock, written by the applying client and by the process in the container.
//! Prints a line a figure; what was measured one by one lies in `target/bench/fork.log`.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, LogParams, Patch, PatchParams, PropagationPolicy};
use replayfork_crds::ReplayFork;
use replayfork_test_cluster::install::NAMESPACE;
use replayfork_test_cluster::interrupt;
use replayfork_test_cluster::product::Profile;
use replayfork_tests::fork::{Fork, manifest};
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::until;
use replayfork_tests::world::World;
use serde_json::{Value, json};

/// How often each is started, if `--rounds=N` says nothing else.
const ROUNDS: usize = 20;
const GOAL: f64 = 1.25;
const LIMIT: Duration = Duration::from_secs(120);
/// Prints the time as the process's first act.
const CLOCK: &str = "exec date +%s%N";

fn main() -> ExitCode {
    if let Some(code) = replayfork_test_cluster::take_role() {
        return code;
    }
    match interrupt::install().and_then(|()| bench()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Seconds from apply to the clock in the container.
#[derive(Default)]
struct Measured {
    fork: Vec<f64>,
    restore: Vec<f64>,
    policy: Vec<f64>,
    /// The longer of the two, which run beside each other.
    ready: Vec<f64>,
    bare: Vec<f64>,
    one: Vec<f64>,
}

fn bench() -> Result<()> {
    // For who works on the bench itself: quicker to build, and no figure to cite.
    let profile = if std::env::args().any(|argument| argument == "--dev") { Profile::Dev } else { Profile::Release };
    let world = World::start(&["bench"], profile)?;
    let place = Place { world: &world, namespace: "bench".to_owned() };
    place.record()?;
    let rest = [("operator", "operator"), ("api-server", "api-server")].map(|(part, container)| resident(&world, part, container));
    let (mut measured, mut log) = (Measured::default(), String::new());
    let rounds = rounds()?;
    for round in 0..rounds {
        interrupt::check()?;
        let phase = phase(round);
        std::thread::sleep(phase);
        let fork = a_fork(&place, round, &mut measured, &mut log)?;
        let shape = fork.jobs()?.into_iter().next().context("the fork has no Job")?;
        fork.delete()?;
        fork.objects_go()?;
        std::thread::sleep(phase);
        measured.bare.push(a_job(&place, &format!("bare-{round}"), &same_shape(&shape), &mut log)?);
        std::thread::sleep(phase);
        measured.one.push(a_job(&place, &format!("one-{round}"), &one_container(&shape)?, &mut log)?);
        println!("round {} of {rounds}", round + 1);
    }
    let folder = world.project.join("target/bench");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("fork.log"), log)?;
    for image in &world.images {
        let bytes = std::fs::metadata(&image.archive)?.len();
        println!("image {} {:.1} MB", image.image.repository(), bytes as f64 / 1e6);
    }
    for rss in rest {
        let (part, kilobytes) = rss?;
        println!("rss {part} at rest {:.1} MB", kilobytes as f64 / 1e3);
    }
    report(&mut measured, rounds);
    Ok(())
}

/// A part of a second to wait before each start. kubelet looks at its containers once a second, and sees then that an init
/// container has ended; who starts as soon as the one before is gone always meets the same moment between two looks. The golden
/// ratio spreads the starts over all of them.
fn phase(round: usize) -> Duration {
    Duration::from_secs_f64((round as f64 * 0.618_033_988_749_895).fract())
}

fn rounds() -> Result<usize> {
    let asked = std::env::args().find_map(|argument| argument.strip_prefix("--rounds=").map(str::to_owned));
    asked.map_or(Ok(ROUNDS), |n| n.parse().with_context(|| format!("--rounds={n}")))
}

fn report(measured: &mut Measured, rounds: usize) {
    let Measured { fork, restore, policy, ready, bare, one } = measured;
    let (fork, ready, bare, one) = (median(fork), median(ready), median(bare), median(one));
    println!("restore {:.3} s (median)", median(restore));
    println!("policy wait {:.3} s (median)", median(policy));
    println!("restore and policy wait together {ready:.3} s (median of the longer)");
    println!("fork {fork:.3} s (median of {rounds}, apply to first re-executed step)");
    println!("bare job of the same shape {bare:.3} s (median of {rounds}, apply to main container)");
    println!("bare job of one container {one:.3} s (median of {rounds})");
    println!("ratio fork-start-to-one-container {:.2}", (fork - ready) / one);
    println!("ratio fork-start {:.2} <= {GOAL}", (fork - ready) / bare);
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

/// Nanoseconds since the Unix epoch.
fn now() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i128)
}

fn seconds(from: i128, line: &str) -> Result<f64> {
    let to: i128 = line.trim().parse().with_context(|| format!("{line:?} is no time"))?;
    Ok((to - from) as f64 / 1e9)
}

fn a_fork<'a>(place: &'a Place<'a>, round: usize, measured: &mut Measured, log: &mut String) -> Result<Fork<'a>> {
    let name = format!("fork-{round}");
    let command = json!({"script": CLOCK, "reads": [], "writes": []});
    let patches = json!([{"type": "CommandOverride", "command": command}]);
    let object: Value = serde_json::from_str(&manifest(&name, AGENT, "test_validate", patches, json!({})))?;
    let forks: Api<ReplayFork> = place.api();
    let applied = now();
    let made = place.world.wait(forks.patch(&name, &PatchParams::apply("bench"), &Patch::Apply(&object)))?;
    let fork = Fork { place, name: name.clone(), uid: made.uid().unwrap_or_default() };
    fork.succeeds()?;
    let step = place.span(&fork.run()?, "test_validate")?.span;
    let said = step.output().context("the step has no output")?.stdout.clone();
    measured.fork.push(seconds(applied, &said)?);
    let courier = logs(place, &fork.pod()?, "courier")?;
    let milliseconds = |name: &str| -> Result<f64> {
        let words = courier.split_whitespace().find_map(|word| word.strip_prefix(&format!("{name}=")));
        Ok(words.with_context(|| format!("the courier's log has no {name}:\n{courier}"))?.parse::<f64>()? / 1e3)
    };
    let (restore, policy) = (milliseconds("restore_ms")?, milliseconds("policy_ms")?);
    writeln!(log, "{name} applied {applied} step {} restore {restore} policy {policy}", said.trim())?;
    // Each hop with its time, for whoever asks where the time goes.
    let system: Api<Pod> = Api::namespaced(place.world.client.clone(), NAMESPACE);
    let mut hops = courier;
    for operator in place.world.parts("operator")? {
        let last = LogParams { tail_lines: Some(100), ..LogParams::default() };
        let acted = place.world.wait(system.logs(&operator.name_any(), &last))?;
        hops.extend(acted.lines().filter(|line| line.contains(&format!("\"{name}\""))).flat_map(|line| [line, "\n"]));
    }
    hops.lines().try_for_each(|line| writeln!(log, "  {line}"))?;
    measured.restore.push(restore);
    measured.policy.push(policy);
    measured.ready.push(restore.max(policy));
    Ok(fork)
}

/// The fork's own Job with nothing to do: its containers say the time, or end.
fn same_shape(job: &Job) -> Value {
    let mut pod = template(job);
    for container in pod["containers"].as_array_mut().into_iter().flatten() {
        container["command"] = if container["name"] == "executor" {
            json!(["/bin/sh", "-c", CLOCK])
        } else {
            json!(["/usr/bin/replayfork-courier", "--version"])
        };
    }
    pod
}

fn one_container(job: &Job) -> Result<Value> {
    let mut pod = same_shape(job);
    let containers = pod["containers"].as_array().into_iter().flatten();
    let mut main = containers.into_iter().find(|c| c["name"] == "executor").cloned().context("the Job has no executor")?;
    main["volumeMounts"] = json!([]);
    pod["containers"] = json!([main]);
    pod["initContainers"] = json!([]);
    pod["volumes"] = json!([]);
    Ok(pod)
}

fn template(job: &Job) -> Value {
    json!(job.spec.as_ref().and_then(|spec| spec.template.spec.clone()))
}

/// Starts a Job of this pod, gives the seconds until its main container ran, and removes it.
fn a_job(place: &Place, name: &str, pod: &Value, log: &mut String) -> Result<f64> {
    let jobs: Api<Job> = place.api();
    let spec = json!({"completions": 1, "parallelism": 1, "backoffLimit": 0, "template": {"spec": pod}});
    let object = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec});
    let applied = now();
    place.world.wait(jobs.patch(name, &PatchParams::apply("bench"), &Patch::Apply(&object)))?;
    until(&format!("the Job {name} is complete"), LIMIT, || {
        let status = place.world.wait(jobs.get(name))?.status.unwrap_or_default();
        Ok((status.succeeded == Some(1)).then_some(()))
    })?;
    let pods: Api<Pod> = place.api();
    let of_job = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={name}"));
    let pod = place.world.wait(pods.list(&of_job))?.items.into_iter().next().context("the Job has no pod")?.name_any();
    let said = logs(place, &pod, "executor")?;
    writeln!(log, "{name} applied {applied} running {}", said.trim())?;
    let background = DeleteParams { propagation_policy: Some(PropagationPolicy::Background), ..DeleteParams::default() };
    place.world.wait(jobs.delete(name, &background))?;
    until(&format!("the Job {name} is gone"), LIMIT, || Ok(place.world.wait(pods.list(&of_job))?.items.is_empty().then_some(())))?;
    seconds(applied, &said)
}

fn logs(place: &Place, pod: &str, container: &str) -> Result<String> {
    let parameters = LogParams { container: Some(container.to_owned()), ..LogParams::default() };
    Ok(place.world.wait(place.api::<Pod>().logs(pod, &parameters))?)
}

/// Kilobytes that the largest process of a part has in memory.
fn resident(world: &World, part: &'static str, container: &str) -> Result<(&'static str, u64)> {
    let mut most = 0;
    for pod in world.parts(part)? {
        let pid = world.container_pid(NAMESPACE, &pod.name_any(), container)?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the process has no VmRSS")?;
        most = most.max(line.trim().trim_end_matches("kB").trim().parse()?);
    }
    Ok((part, most))
}
