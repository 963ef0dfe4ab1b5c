//! Prometheus metrics of the operator, and its health.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ForkLabels {
    pub reason: String,
    pub outcome: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ErrorLabels {
    pub kind: &'static str,
}

pub struct Metrics {
    registry: Registry,
    pub finished: Family<ForkLabels, Counter>,
    pub reconcile_seconds: Histogram,
    pub errors: Family<ErrorLabels, Counter>,
    pub leader: Gauge,
    ready: AtomicBool,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("replayfork_operator");
        let finished = Family::default();
        let reconcile_seconds = Histogram::new(exponential_buckets(0.001, 2.0, 14));
        let errors = Family::default();
        let leader = Gauge::default();
        registry.register("forks_finished", "Forks that ended, by reason and outcome", finished.clone());
        registry.register("reconcile_seconds", "Time of one reconcile", reconcile_seconds.clone());
        registry.register("reconcile_errors", "Failed reconciles, by what failed", errors.clone());
        registry.register("leader", "1 on the replica that works", leader.clone());
        Self { registry, finished, reconcile_seconds, errors, leader, ready: AtomicBool::new(false) }
    }
}

impl Metrics {
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    fn encode(&self) -> String {
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
