//! A ReplayFork: applied, waited for, and what it left.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use replayfork_client::read::PlanAnswer;
use replayfork_core::model::{Fidelity, Status};
use replayfork_core::plan::{Mark, Plan};
use replayfork_core::reason::{Blocked, BlockedReason};
use replayfork_crds::{ReplayFork, condition};
use replayfork_test_cluster::command::run;
use serde_json::{Value, json};

use crate::place::Place;
use crate::until;

/// How long a fork may take; most take a few seconds.
pub const FINISHING: Duration = Duration::from_secs(180);

/// How long what a fork needs may take to come or go.
pub const OBJECTS: Duration = Duration::from_secs(60);

/// A manifest: these patches at that span, with further members of the spec.
pub fn manifest(name: &str, run: &str, span: &str, patches: Value, more: Value) -> String {
    let mut spec = json!({"source": {"run": run, "span": span}, "patches": patches});
    for (member, value) in more.as_object().into_iter().flatten() {
        spec[member] = value.clone();
    }
    json!({"apiVersion": "replayfork.dev/v1alpha1", "kind": "ReplayFork", "metadata": {"name": name}, "spec": spec}).to_string()
}

/// A patch that lets a span run this script, which may read and write everything.
pub fn script(span: &str, script: &str) -> Value {
    json!({"type": "CommandOverride", "span": span, "command": {"script": script}})
}

/// A row of a fork in the database.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub span: String,
    pub name: String,
    pub status: Status,
    pub fidelity: Fidelity,
    pub blocked: Vec<BlockedReason>,
}

/// An applied ReplayFork.
pub struct Fork<'a> {
    pub place: &'a Place<'a>,
    pub name: String,
    pub uid: String,
}

impl<'a> Place<'a> {
    /// `kubectl apply` of a ReplayFork.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn fork(&'a self, manifest: &str) -> Result<Fork<'a>> {
        self.apply(manifest)?;
        let manifest: Value = serde_yaml_ng::from_str(manifest)?;
        let name = manifest["metadata"]["name"].as_str().context("the manifest has no name")?.to_owned();
        let uid = self.world.wait(self.api::<ReplayFork>().get(&name))?.uid().context("the fork has no uid")?;
        Ok(Fork { place: self, name, uid })
    }

    /// A manifest of `examples/forks`.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn example(&self, name: &str) -> Result<String> {
        let file = self.world.project.join(format!("examples/forks/{name}.yaml"));
        std::fs::read_to_string(&file).with_context(|| format!("can't read {}", file.display()))
    }

    /// What `kubectl replay plan` says of a manifest.
    ///
    /// # Errors
    /// Why there is no plan.
    pub fn plan(&self, manifest: &str) -> Result<Plan> {
        Ok(self.replay_with::<PlanAnswer>(&["plan", "-f", "-"], manifest)?.plan)
    }
}

impl Fork<'_> {
    /// # Errors
    /// What the Kubernetes API says.
    pub fn object(&self) -> Result<ReplayFork> {
        Ok(self.place.world.wait(self.place.api::<ReplayFork>().get(&self.name))?)
    }

    /// # Errors
    /// What the Kubernetes API says; the fork has no such condition.
    pub fn condition(&self, kind: &str) -> Result<Condition> {
        let status = self.object()?.status.unwrap_or_default();
        condition(&status.conditions, kind).cloned().with_context(|| format!("the fork {} has no condition {kind}", self.name))
    }

    /// Waits for the end, and gives `Succeeded`.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn finished(&self) -> Result<Condition> {
        until(&format!("the fork {} is finished", self.name), FINISHING, || {
            let status = self.object()?.status.unwrap_or_default();
            Ok(condition(&status.conditions, "Finished").is_some_and(|c| c.status == "True").then_some(()))
        })?;
        self.condition("Succeeded")
    }

    /// Waits for the end, which must be a success.
    ///
    /// # Errors
    /// It is none.
    pub fn succeeds(&self) -> Result<()> {
        let succeeded = self.finished()?;
        ensure!(succeeded.status == "True", "the fork {} ended as {}: {}", self.name, succeeded.reason, succeeded.message);
        Ok(())
    }

    /// Waits for the end, which must have this reason and be no success.
    ///
    /// # Errors
    /// It has another one.
    pub fn ends_as(&self, reason: &str) -> Result<Condition> {
        let succeeded = self.finished()?;
        let said = format!("the fork {} ended as {} ({}): {}", self.name, succeeded.reason, succeeded.status, succeeded.message);
        ensure!(succeeded.reason == reason && succeeded.status == "False", "{said}, not {reason}");
        ensure!(self.condition("Stalled")?.status == "True" && self.condition("Ready")?.status == "False", "{said}, yet not Stalled");
        Ok(succeeded)
    }

    /// Name of the forked run.
    ///
    /// # Errors
    /// The status names none.
    pub fn run(&self) -> Result<String> {
        self.object()?.status.and_then(|s| s.fork_run_name).with_context(|| format!("the fork {} has no run", self.name))
    }

    /// The rows of `spans` that the fork has of its own, in order.
    ///
    /// # Errors
    /// What Postgres says.
    pub fn rows(&self) -> Result<Vec<Row>> {
        let found = self.place.world.sql_json(&format!(
            "SELECT coalesce(json_agg(json_build_object('span', s.span_id, 'name', s.name, 'status', s.status, 'fidelity', s.fidelity,
             'blocked', s.blocked) ORDER BY s.ord), '[]') FROM forks f JOIN spans s ON s.rid = f.fork_rid AND s.pay_rid = s.rid WHERE f.uid = '{}'",
            self.uid
        ))?;
        found.as_array().into_iter().flatten().map(|row| self.row(row)).collect()
    }

    fn row(&self, row: &Value) -> Result<Row> {
        let text = |member: &str| row[member].as_str().map(str::to_owned).with_context(|| format!("{row} lacks {member}"));
        let code = |member: &str| row[member].as_i64().and_then(|code| i16::try_from(code).ok());
        let (span, name) = (text("span")?, text("name")?);
        // The row itself holds the first reason; all are in the payload, as a reader gets them.
        let blocked = match &row["blocked"] {
            Value::Null => Vec::new(),
            _ => {
                let closing = self.place.span(&self.run_id()?, &span)?.span.closing;
                closing.map(|c| c.blocked).unwrap_or_default().iter().map(|b: &Blocked| b.reason).collect()
            }
        };
        Ok(Row {
            span,
            name,
            status: code("status").and_then(Status::from_code).with_context(|| format!("status of {row}"))?,
            fidelity: code("fidelity").and_then(Fidelity::from_code).with_context(|| format!("fidelity of {row}"))?,
            blocked,
        })
    }

    fn run_id(&self) -> Result<String> {
        self.place.world.sql(&format!("SELECT r.id FROM forks f JOIN runs r ON r.rid = f.fork_rid WHERE f.uid = '{}'", self.uid))
    }

    /// `name status fidelity` of each row, for comparisons.
    ///
    /// # Errors
    /// As [`Fork::rows`].
    pub fn lines(&self) -> Result<Vec<String>> {
        Ok(self.rows()?.iter().map(|row| format!("{} {} {}", row.name, row.status, row.fidelity)).collect())
    }

    /// The fork has exactly these rows, as [`Fork::lines`] writes them.
    ///
    /// # Errors
    /// It has others.
    pub fn left(&self, wanted: &[&str]) -> Result<()> {
        let lines = self.lines()?;
        ensure!(lines == wanted, "the fork {} has the rows {lines:#?}, not {wanted:#?}", self.name);
        Ok(())
    }

    /// How often a step of the fork was begun, by span id.
    ///
    /// # Errors
    /// What Postgres says.
    pub fn steps(&self) -> Result<String> {
        let query = "SELECT coalesce(string_agg(span_id || ' ' || state, ', ' ORDER BY span_id), '') FROM fork_steps WHERE uid";
        self.place.world.sql(&format!("{query} = '{}'", self.uid))
    }

    /// Waits until a process with exactly these arguments runs on the node: the step is in its middle.
    ///
    /// # Errors
    /// There is none in time.
    pub fn runs(&self, arguments: &[&str]) -> Result<()> {
        until(&format!("the fork {} runs {arguments:?}", self.name), FINISHING, || {
            let status = self.object()?.status.unwrap_or_default();
            if let Some(ended) = condition(&status.conditions, "Finished").filter(|c| c.status == "True") {
                bail!("the fork {} ended before: {} {}", self.name, ended.reason, ended.message);
            }
            Ok((!processes(arguments).is_empty()).then_some(()))
        })
    }

    fn of_fork(&self) -> ListParams {
        ListParams::default().labels(&format!("replayfork.dev/fork-uid={}", self.uid))
    }

    /// # Errors
    /// What the Kubernetes API says.
    pub fn pods(&self) -> Result<Vec<Pod>> {
        Ok(self.place.world.wait(self.place.api::<Pod>().list(&self.of_fork()))?.items)
    }

    /// # Errors
    /// There is not exactly one.
    pub fn pod(&self) -> Result<String> {
        let pods = self.pods()?;
        ensure!(pods.len() == 1, "the fork {} has {} pods", self.name, pods.len());
        Ok(pods[0].name_any())
    }

    /// # Errors
    /// What the Kubernetes API says.
    pub fn jobs(&self) -> Result<Vec<Job>> {
        Ok(self.place.world.wait(self.place.api::<Job>().list(&self.of_fork()))?.items)
    }

    /// # Errors
    /// What the Kubernetes API says.
    pub fn policies(&self) -> Result<Vec<NetworkPolicy>> {
        let api: Api<NetworkPolicy> = self.place.api();
        Ok(self.place.world.wait(api.list(&self.of_fork()))?.items)
    }

    /// Neither Job nor pod was made: events outlive both.
    ///
    /// # Errors
    /// One was.
    pub fn had_no_pod(&self) -> Result<()> {
        ensure!(self.jobs()?.is_empty() && self.pods()?.is_empty(), "the fork {} has a Job or a pod", self.name);
        let events: Api<k8s_openapi::api::core::v1::Event> = self.place.api();
        let made = self.place.world.wait(events.list(&ListParams::default().fields("reason=SuccessfulCreate")))?.items;
        let of_job =
            made.into_iter().find(|e| e.involved_object.name.as_deref().is_some_and(|n| n.starts_with(&format!("{}-", self.name))));
        ensure!(of_job.is_none(), "a pod was made for the fork {}", self.name);
        Ok(())
    }

    /// Waits until Job, pods and NetworkPolicy are gone.
    ///
    /// # Errors
    /// They stay.
    pub fn objects_go(&self) -> Result<()> {
        until(&format!("Job, pod and policy of {} are gone", self.name), OBJECTS, || {
            Ok((self.jobs()?.is_empty() && self.pods()?.is_empty() && self.policies()?.is_empty()).then_some(()))
        })
    }

    /// # Errors
    /// What kubectl says.
    pub fn patch(&self, spec: Value) -> Result<()> {
        let patch = json!({"spec": spec}).to_string();
        run(&mut self.place.kubectl(["patch", "replayfork", &self.name, "--type=merge", "-p", &patch]))
    }

    /// # Errors
    /// What kubectl says.
    pub fn delete(&self) -> Result<()> {
        run(&mut self.place.kubectl(["delete", "replayfork", &self.name]))
    }

    /// A file as it was after a span.
    ///
    /// # Errors
    /// The span has no such state.
    pub fn file_after(&self, span: &str, path: &str) -> Result<String> {
        let run = self.run_id()?;
        let after = self.place.span(&run, span)?.span.snapshot_after.with_context(|| format!("{span} has no state after it"))?;
        Ok(String::from_utf8_lossy(&self.place.file(&run, &after.node.to_string(), path)?).into_owned())
    }

    /// Plan and run agree as design 2 has it: what will run ran, nothing beyond what may did, and blocked spans have reasons of the plan.
    ///
    /// # Errors
    /// Where they don't.
    pub fn agrees_with(&self, plan: &Plan) -> Result<()> {
        let marked = |marks: &[Mark]| -> BTreeSet<String> {
            plan.spans.iter().filter(|s| s.mark.is_some_and(|m| marks.contains(&m))).map(|s| s.name.clone()).collect()
        };
        let rows = self.rows()?;
        let with =
            |fidelity: Fidelity| -> BTreeSet<String> { rows.iter().filter(|r| r.fidelity == fidelity).map(|r| r.name.clone()).collect() };
        // A check leaves what it can't run as recorded, with why.
        let blocked: BTreeSet<String> = rows.iter().filter(|r| !r.blocked.is_empty()).map(|r| r.name.clone()).collect();
        let ran = with(Fidelity::Reexecuted);
        let will_run = marked(&[Mark::WillRun]);
        let may_run = marked(&[Mark::WillRun, Mark::MayRun, Mark::MayRunOrBeBlocked]);
        ensure!(will_run.is_subset(&ran) && ran.is_subset(&may_run), "will run {will_run:?}, may run {may_run:?}, ran {ran:?}");
        let will_block = marked(&[Mark::WillBeBlocked]);
        let may_block = marked(&[Mark::WillBeBlocked, Mark::MayBeBlocked, Mark::MayRunOrBeBlocked]);
        ensure!(
            will_block.is_subset(&blocked) && blocked.is_subset(&may_block),
            "will be blocked {will_block:?}, may be blocked {may_block:?}, were blocked {blocked:?}"
        );
        for row in rows.iter().filter(|r| r.fidelity == Fidelity::Blocked || !r.blocked.is_empty()) {
            let planned = plan.spans.iter().find(|s| s.id == row.span).map(|s| s.blocked.as_slice()).unwrap_or_default();
            let foreign = row.blocked.iter().find(|reason| !planned.iter().any(|p| p.reason == **reason));
            ensure!(!row.blocked.is_empty() && foreign.is_none(), "{} is blocked by {:?}, planned {planned:?}", row.name, row.blocked);
        }
        let status = self.object()?.status.unwrap_or_default();
        let shown = status.plan.context("the status has no plan")?;
        let c = plan.counts;
        ensure!(
            (shown.will_run, shown.may_run, shown.may_run_or_block, shown.will_block, shown.may_block, shown.overridden, shown.reusable)
                == (c.will_run, c.may_run, c.may_run_or_block, c.will_block, c.may_block, c.overridden, c.reusable),
            "the status says {shown:?}, kubectl replay plan {c:?}"
        );
        let result = status.result.context("the status has no result")?;
        ensure!(
            (result.reexecuted, result.blocked) == (ran.len() as i64, if plan.check { 0 } else { blocked.len() as i64 }),
            "the status says {result:?}; {ran:?} ran, {blocked:?} were blocked"
        );
        Ok(())
    }
}

/// Processes of this machine with exactly these arguments.
pub fn processes(arguments: &[&str]) -> Vec<u32> {
    let wanted = arguments.iter().flat_map(|a| a.bytes().chain([0])).collect::<Vec<u8>>();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == wanted)).collect()
}
