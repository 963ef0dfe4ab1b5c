//! Prometheus metrics. Labels come from enums and routes, and never from what a client sends but for the names of agents and
//! models, of which so many are told apart and no more.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::store::runs::Spent;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    pub route: String,
    pub method: String,
    pub status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    pub reason: String,
}

/// Pairs of agent and model that have series of their own; those seen later count together.
const MOST_AGENTS: usize = 200;
const OTHERS: &str = "(others)";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AgentLabels {
    pub agent: String,
    pub model: String,
}

/// What recorded runs used up, by agent and model, counted when a run is sealed.
#[derive(Default)]
pub struct Agents {
    known: Mutex<HashSet<AgentLabels>>,
    runs: Family<AgentLabels, Counter>,
    tokens: Family<AgentLabels, Counter>,
    cost: Family<AgentLabels, Counter<f64, AtomicU64>>,
    errors: Family<AgentLabels, Counter>,
}

impl Agents {
    fn register(&self, registry: &mut Registry) {
        registry.register("agent_runs", "Recorded runs that were sealed", self.runs.clone());
        registry.register("agent_tokens", "Tokens of these runs", self.tokens.clone());
        registry.register("agent_cost_usd", "US dollars that these runs cost", self.cost.clone());
        registry.register("agent_errors", "Steps of these runs that failed", self.errors.clone());
    }

    pub fn sealed(&self, spent: &Spent) {
        let labels = self.labels(&spent.agent, spent.model.as_deref().unwrap_or_default());
        self.runs.get_or_create(&labels).inc();
        self.tokens.get_or_create(&labels).inc_by(spent.tokens.max(0) as u64);
        self.cost.get_or_create(&labels).inc_by(spent.cost_usd.max(0.0));
        self.errors.get_or_create(&labels).inc_by(spent.errors.max(0) as u64);
    }

    fn labels(&self, agent: &str, model: &str) -> AgentLabels {
        let labels = AgentLabels { agent: agent.to_owned(), model: model.to_owned() };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.contains(&labels) || known.len() < MOST_AGENTS {
            known.insert(labels.clone());
            return labels;
        }
        AgentLabels { agent: OTHERS.to_owned(), model: OTHERS.to_owned() }
    }
}

pub struct Metrics {
    registry: Registry,
    pub requests: Family<RequestLabels, Counter>,
    pub seconds: Histogram,
    pub spans_ingested: Counter,
    pub rejected: Family<ReasonLabel, Counter>,
    pub blob_bytes: Counter,
    pub blobs_stored: Counter,
    pub blobs_deduplicated: Counter,
    pub blobs_collected: Counter,
    pub bytes_collected: Counter,
    pub forks_closed: Family<ReasonLabel, Counter>,
    pub agents: Agents,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("replayfork");
        let metrics = Self {
            requests: Family::default(),
            seconds: Histogram::new(exponential_buckets(0.001, 2.0, 14)),
            spans_ingested: Counter::default(),
            rejected: Family::default(),
            blob_bytes: Counter::default(),
            blobs_stored: Counter::default(),
            blobs_deduplicated: Counter::default(),
            blobs_collected: Counter::default(),
            bytes_collected: Counter::default(),
            forks_closed: Family::default(),
            agents: Agents::default(),
            registry: Registry::default(),
        };
        registry.register("http_requests", "Requests by route, method and status", metrics.requests.clone());
        registry.register("http_request_seconds", "Time to answer", metrics.seconds.clone());
        registry.register("spans_ingested", "Parts of spans written", metrics.spans_ingested.clone());
        registry.register("ingest_rejected", "Ingest requests refused, by reason", metrics.rejected.clone());
        registry.register("pack_bytes_received", "Bytes of packs received", metrics.blob_bytes.clone());
        registry.register("blobs_stored", "Blobs that were new", metrics.blobs_stored.clone());
        registry.register("blobs_deduplicated", "Blobs that were known", metrics.blobs_deduplicated.clone());
        registry.register("blobs_collected", "Blobs deleted since nothing named them", metrics.blobs_collected.clone());
        registry.register("pack_bytes_collected", "Stored bytes that were freed by that", metrics.bytes_collected.clone());
        registry.register("forks_closed", "Forks that ended, by reason", metrics.forks_closed.clone());
        metrics.agents.register(&mut registry);
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// The text format that Prometheus scrapes.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).expect("a string takes what is written to it");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_and_models_have_series_of_their_own_up_to_a_bound() {
        let metrics = Metrics::default();
        let spent = |agent: String| Spent { agent, model: Some("m".into()), tokens: 7, cost_usd: 0.5, errors: 1 };
        for i in 0..MOST_AGENTS + 3 {
            metrics.agents.sealed(&spent(format!("agent-{i}")));
        }
        metrics.agents.sealed(&spent("agent-0".into()));
        let text = metrics.encode();
        for line in [
            "replayfork_agent_runs_total{agent=\"agent-0\",model=\"m\"} 2",
            "replayfork_agent_tokens_total{agent=\"agent-0\",model=\"m\"} 14",
            "replayfork_agent_cost_usd_total{agent=\"agent-0\",model=\"m\"} 1.0",
            "replayfork_agent_errors_total{agent=\"(others)\",model=\"(others)\"} 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert_eq!(text.lines().filter(|l| l.starts_with("replayfork_agent_runs_total")).count(), MOST_AGENTS + 1);
    }
}
