//! What every reconcile shares.

use std::sync::Arc;

use kube::Client;
use kube::runtime::events::{Recorder, Reporter};
use replayfork_client::{ApiClient, ClientError, Reach, Token};

use crate::config::Config;
use crate::metrics::Metrics;

pub struct Context {
    pub client: Client,
    pub api: ApiClient,
    /// Authorities of the api-server's certificate, for sandboxes too.
    pub authorities: Option<String>,
    pub config: Config,
    pub events: Recorder,
    pub metrics: Arc<Metrics>,
}

impl Context {
    pub fn new(client: Client, config: Config, metrics: Arc<Metrics>) -> Result<Self, ClientError> {
        let reach = Reach::with_ca_file(config.api_ca_file.as_deref())?;
        let api = ApiClient::new(&config.api_url, Token::File(config.token_file.clone()), &reach)?;
        let reporter = Reporter { controller: "replayfork-operator".into(), instance: Some(config.pod_name.clone()) };
        Ok(Self { events: Recorder::new(client.clone(), reporter), client, api, authorities: reach.authorities, config, metrics })
    }
}

/// A reconcile that failed. Metric labels come from the variant, never from the text.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the Kubernetes API: {0}")]
    Cluster(#[from] kube::Error),
    #[error("the api-server: {0}")]
    Api(#[from] ClientError),
    #[error("{0} can't be built: {1}")]
    Build(&'static str, serde_json::Error),
    #[error("the api-server's Service {0} has no address: {1}")]
    Address(String, std::io::Error),
    #[error("the object can't be read: {0}")]
    Invalid(String),
}

impl Error {
    /// All that [`Error::kind`] says.
    pub const KINDS: [&str; 5] = ["cluster", "api", "build", "address", "invalid"];

    pub fn kind(&self) -> &'static str {
        match self {
            Error::Cluster(_) => "cluster",
            Error::Api(_) => "api",
            Error::Build(..) => "build",
            Error::Address(..) => "address",
            Error::Invalid(_) => "invalid",
        }
    }
}
