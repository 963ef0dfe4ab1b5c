//! Prometheus metrics of the operator, and its health.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use kube::core::DeserializeGuard;
use kube::runtime::reflector::Store;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use replayfork_crds::{ReplayFork, condition};

use crate::context::Error;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ForkLabels {
    pub reason: String,
    pub outcome: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ErrorLabels {
    pub kind: &'static str,
}

/// Why a fork has not started: a reason of ours, never a text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WaitingLabels {
    pub reason: String,
}

/// Of a fork without a status.
const UNOBSERVED: &str = "Unobserved";

/// Why this fork waits; `None` for one that runs or has ended.
pub fn waiting_for(fork: &ReplayFork) -> Option<String> {
    let conditions = fork.status.as_ref().map_or(&[][..], |s| &s.conditions);
    let is = |kind: &str| condition(conditions, kind).is_some_and(|c| c.status == "True");
    if is("Finished") || is("SandboxReady") {
        return None;
    }
    Some(condition(conditions, "Finished").map_or_else(|| UNOBSERVED.to_owned(), |c| c.reason.clone()))
}

pub struct Metrics {
    registry: Registry,
    pub finished: Family<ForkLabels, Counter>,
    pub reconcile_seconds: Histogram,
    pub errors: Family<ErrorLabels, Counter>,
    pub leader: Gauge,
    pub seconds_to_start: Histogram,
    pub seconds_to_finish: Histogram,
    waiting: Family<WaitingLabels, Gauge>,
    /// What the watch has of the forks, once this replica works.
    pub forks: OnceLock<Store<DeserializeGuard<ReplayFork>>>,
    ready: AtomicBool,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("replayfork_operator");
        let finished = Family::default();
        let reconcile_seconds = Histogram::new(exponential_buckets(0.001, 2.0, 14));
        let errors = Family::<ErrorLabels, Counter>::default();
        // There from the start, so that the first error is an increase.
        Error::KINDS.iter().for_each(|kind| drop(errors.get_or_create(&ErrorLabels { kind })));
        let leader = Gauge::default();
        let waiting = Family::default();
        // From a second, below which no creation time tells, to four and a half hours.
        let [seconds_to_start, seconds_to_finish] = [(); 2].map(|()| Histogram::new(exponential_buckets(1.0, 2.0, 15)));
        registry.register("forks_finished", "Forks that ended, by reason and outcome", finished.clone());
        registry.register("reconcile_seconds", "Time of one reconcile", reconcile_seconds.clone());
        registry.register("reconcile_errors", "Failed reconciles, by what failed", errors.clone());
        registry.register("leader", "1 on the replica that works", leader.clone());
        registry.register("forks_waiting", "Forks that have not started, by what they wait for", waiting.clone());
        registry.register("fork_seconds_to_start", "From a fork's creation until its sandbox claimed it", seconds_to_start.clone());
        registry.register("fork_seconds_to_finish", "From a fork's creation to its end", seconds_to_finish.clone());
        Self {
            registry,
            finished,
            reconcile_seconds,
            errors,
            leader,
            seconds_to_start,
            seconds_to_finish,
            waiting,
            forks: OnceLock::new(),
            ready: AtomicBool::new(false),
        }
    }
}

impl Metrics {
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// Counted when it is asked for, so that forks that are gone are forgotten.
    fn count_waiting(&self) {
        self.waiting.clear();
        for fork in self.forks.get().map(Store::state).unwrap_or_default() {
            if let Some(reason) = fork.0.as_ref().ok().and_then(waiting_for) {
                self.waiting.get_or_create(&WaitingLabels { reason }).inc();
            }
        }
    }

    fn encode(&self) -> String {
        self.count_waiting();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).expect("a string takes what is written to it");
        text
    }
}

/// `/healthz`, `/readyz` and `/metrics`.
pub fn router(metrics: Arc<Metrics>) -> axum::Router {
    let ready = |State(m): State<Arc<Metrics>>| async move {
        if m.ready.load(Ordering::Relaxed) { StatusCode::NO_CONTENT } else { StatusCode::SERVICE_UNAVAILABLE }
    };
    let text = |State(m): State<Arc<Metrics>>| async move {
        ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], m.encode()).into_response()
    };
    axum::Router::new()
        .route("/healthz", get(|| async { StatusCode::NO_CONTENT }))
        .route("/readyz", get(ready))
        .route("/metrics", get(text))
        .with_state(metrics)
}
