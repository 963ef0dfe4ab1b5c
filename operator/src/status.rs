//! From what was observed to the status: conditions, plan, result. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use replayfork_client::fork::{BlockedSpan, CloseReason, Fork, ForkState};
use replayfork_client::read::RunDiff;
use replayfork_crds::{BlockedSpanStatus, PlanStatus, ReplayForkStatus, ResultStatus, condition};

use crate::decide::{Observed, Row};
use crate::sandbox::object_name;

/// Bytes of a message in a condition.
const MAX_MESSAGE: usize = 4096;

/// Reason of SandboxReady once a fork that was claimed has ended.
pub const SANDBOX_ENDED: &str = "Finished";

struct Builder<'a> {
    old: &'a [Condition],
    now: Timestamp,
    generation: i64,
    conditions: Vec<Condition>,
}

impl Builder<'_> {
    fn set(&mut self, kind: &str, status: &str, reason: &str, message: &str) {
        let mut message: String = message.to_owned();
        if message.len() > MAX_MESSAGE {
            let cut = (0..=MAX_MESSAGE).rev().find(|&i| message.is_char_boundary(i)).unwrap_or(0);
            message.truncate(cut);
            message.push('…');
        }
        let before = condition(self.old, kind).filter(|c| c.status == status);
        self.conditions.push(Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            observed_generation: Some(self.generation),
            last_transition_time: before.map_or(Time(self.now), |c| c.last_transition_time.clone()),
        });
    }
}

fn time(text: Option<&String>) -> Option<Time> {
    let at: Timestamp = text?.parse().ok()?;
    // The API stores whole seconds.
    Timestamp::from_second(at.as_second()).ok().map(Time)
}

/// The status that should stand. `diff` comes later than the result, and may never come.
pub fn status(observed: &Observed, diff: Option<&RunDiff>, viewer_url: Option<&str>, now: Timestamp) -> ReplayForkStatus {
    let fork = &observed.fork;
    let old = fork.status.clone().unwrap_or_default();
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let generation = fork.metadata.generation.unwrap_or(0);
    let mut builder = Builder { old: &old.conditions, now, generation, conditions: Vec::new() };
    let mut status = ReplayForkStatus { observed_generation: generation, ..ReplayForkStatus::default() };
    match &observed.row {
        Row::NotSealed(message) => {
            builder.set("Planned", "False", "RunNotSealed", message);
            pending(&mut builder, "RunNotSealed", message);
        }
        Row::Registered(row) => {
            conditions(&mut builder, observed, row);
            fill(&mut status, row);
            status.job_name = if row.plan.as_ref().is_some_and(|p| p.sandbox) { Some(object_name(fork)) } else { None };
            status.result = result(row, diff, old.result.as_ref());
            status.viewer_url = viewer_url
                .zip(row.fork_run_name.as_ref())
                .map(|(base, run)| format!("{}/replay/{run}?namespace={}", base.trim_end_matches('/'), row.namespace));
        }
    }
    status.conditions = builder.conditions;
    status
}

fn pending(builder: &mut Builder<'_>, reason: &str, message: &str) {
    builder.set("SandboxReady", "False", reason, message);
    builder.set("Finished", "False", reason, message);
    builder.set("Succeeded", "Unknown", reason, message);
    builder.set("Ready", "Unknown", reason, message);
}

fn conditions(builder: &mut Builder<'_>, observed: &Observed, row: &Fork) {
    match &row.plan {
        Some(plan) => {
            let c = plan.counts;
            let message = format!(
                "{} will run, {} may run, {} will be blocked, {} may be blocked, {} may run or be blocked, {} reusable",
                c.will_run, c.may_run, c.will_block, c.may_block, c.may_run_or_block, c.reusable
            );
            builder.set("Planned", "True", "Planned", &message);
        }
        None => {
            let (reason, message) =
                row.result.as_ref().map_or_else(|| ("Pending".into(), "not planned yet"), |r| (r.reason.to_string(), r.message.as_str()));
            builder.set("Planned", "False", &reason, message);
        }
    }
    let Some(result) = &row.result else {
        let (reason, message) = progress(observed, row);
        let ready = if row.state == ForkState::Claimed { "True" } else { "False" };
        builder.set("SandboxReady", ready, reason, &message);
        builder.set("Finished", "False", reason, &message);
        builder.set("Succeeded", "Unknown", reason, &message);
        builder.set("Ready", "Unknown", reason, &message);
        return;
    };
    let reason = result.reason.to_string();
    let succeeded = result.reason == CloseReason::Succeeded;
    let story = if succeeded { summary(row) } else { result.message.clone() };
    match row.claimed_at {
        Some(_) => builder.set("SandboxReady", "False", SANDBOX_ENDED, "the fork has ended"),
        None if row.plan.as_ref().is_some_and(|p| p.sandbox) => builder.set("SandboxReady", "False", &reason, &result.message),
        None => builder.set("SandboxReady", "False", "NotNeeded", "nothing had to be executed"),
    }
    let ok = if succeeded { "True" } else { "False" };
    builder.set("Finished", "True", &reason, &story);
    builder.set("Succeeded", ok, &reason, &story);
    builder.set("Ready", ok, &reason, &story);
    if !succeeded {
        builder.set("Stalled", "True", &reason, &story);
    }
}

fn summary(row: &Fork) -> String {
    row.result.as_ref().map_or_else(String::new, |r| {
        if let Some(check) = r.reproducibility {
            return format!("{} identical, {} different, {} not executable", check.identical, check.differs, check.not_executable);
        }
        format!(
            "{} executed, {} reused, {} overridden, {} blocked; outcome {}",
            r.reexecuted,
            r.reused,
            r.overridden,
            r.blocked,
            r.outcome.map_or("–", |o| o.as_str())
        )
    })
}

fn progress(observed: &Observed, row: &Fork) -> (&'static str, String) {
    if row.state == ForkState::Claimed {
        let message = if observed.fork.spec.suspend == Some(true) {
            "running; spec.suspend has no effect on a fork that is claimed"
        } else {
            "running"
        };
        return ("Running", message.to_owned());
    }
    if observed.fork.spec.suspend == Some(true) {
        return ("Suspended", "held by spec.suspend".to_owned());
    }
    let Some(job) = &observed.job else { return ("Pending", "the sandbox is being created".to_owned()) };
    if job.spec.as_ref().and_then(|s| s.suspend) == Some(true) {
        return ("Queued", "the Job is suspended by its queue".to_owned());
    }
    let trouble = observed.troubles.last().map_or_else(String::new, |t| format!(": {} {}", t.reason, t.message));
    ("Starting", format!("Job {} is starting{trouble}", job.name_any()))
}

fn fill(status: &mut ReplayForkStatus, row: &Fork) {
    if let Some(plan) = &row.plan {
        let c = plan.counts;
        status.plan = Some(PlanStatus {
            will_run: c.will_run,
            may_run: c.may_run,
            may_run_or_block: c.may_run_or_block,
            will_block: c.will_block,
            may_block: c.may_block,
            overridden: c.overridden,
            reusable: c.reusable,
        });
        let (shown, total) = match &row.result {
            Some(result) => (&result.blocked_spans, result.blocked),
            None => (&plan.blocked_spans, c.will_block + c.may_block + c.may_run_or_block),
        };
        status.blocked_spans = shown.iter().take(20).map(blocked).collect();
        status.blocked_truncated = (total > status.blocked_spans.len() as i64 && status.blocked_spans.len() == 20).then_some(true);
    }
    status.source_run_id = row.source_run.map(|id| id.to_string());
    status.fork_run_id = row.fork_run.map(|id| id.to_string());
    status.fork_run_name = row.fork_run_name.clone();
    status.start_time = time(row.claimed_at.as_ref().or_else(|| row.result.as_ref().map(|_| &row.registered_at)));
    status.completion_time = time(row.terminal_at.as_ref());
}

fn blocked(span: &BlockedSpan) -> BlockedSpanStatus {
    let message: String = span.blocked.message.chars().take(500).collect();
    BlockedSpanStatus { span: span.span.clone(), name: span.name.clone(), reason: span.blocked.reason.to_string(), message }
}

fn result(row: &Fork, diff: Option<&RunDiff>, old: Option<&ResultStatus>) -> Option<ResultStatus> {
    let result = row.result.as_ref()?;
    row.fork_run?;
    let name = |id: &String| diff.and_then(|d| d.diff.spans.iter().find(|s| s.span == *id)).map_or_else(|| id.clone(), |s| s.name.clone());
    let first = diff.and_then(|d| d.diff.first_divergent_span.as_ref()).map(name);
    Some(ResultStatus {
        outcome: result.outcome.map(|o| o.to_string()),
        source_outcome: result.source_outcome.map(|o| o.to_string()),
        reexecuted: result.reexecuted,
        reused: result.reused,
        overridden: result.overridden,
        blocked: result.blocked,
        first_divergent_span: first.or_else(|| old.and_then(|o| o.first_divergent_span.clone())),
        summary: diff.map(|d| d.summary.clone()).or_else(|| old.and_then(|o| o.summary.clone())),
        tokens_delta: diff.map(|d| d.diff.b.tokens - d.diff.a.tokens).or_else(|| old.and_then(|o| o.tokens_delta)),
    })
}
