//! Prometheus metrics. Labels come from enums and routes, never from what a client sends.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

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

pub struct Metrics {
    registry: Registry,
    pub requests: Family<RequestLabels, Counter>,
    pub seconds: Histogram,
    pub spans_ingested: Counter,
    pub rejected: Family<ReasonLabel, Counter>,
    pub blob_bytes: Counter,
    pub blobs_stored: Counter,
    pub blobs_deduplicated: Counter,
    pub forks_closed: Family<ReasonLabel, Counter>,
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
            forks_closed: Family::default(),
            registry: Registry::default(),
        };
        registry.register("http_requests", "Requests by route, method and status", metrics.requests.clone());
        registry.register("http_request_seconds", "Time to answer", metrics.seconds.clone());
        registry.register("spans_ingested", "Parts of spans written", metrics.spans_ingested.clone());
        registry.register("ingest_rejected", "Ingest requests refused, by reason", metrics.rejected.clone());
        registry.register("pack_bytes_received", "Bytes of packs received", metrics.blob_bytes.clone());
        registry.register("blobs_stored", "Blobs that were new", metrics.blobs_stored.clone());
        registry.register("blobs_deduplicated", "Blobs that were known", metrics.blobs_deduplicated.clone());
        registry.register("forks_closed", "Forks that ended, by reason", metrics.forks_closed.clone());
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
