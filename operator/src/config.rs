//! Configuration, from arguments or the environment.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// The operator of ReplayFork.
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub struct Config {
    /// The api-server, by the DNS name of its Service.
    #[arg(long, env = "REPLAYFORK_API_URL")]
    pub api_url: String,
    /// Authorities (PEM) for an api-server behind TLS.
    #[arg(long, env = "REPLAYFORK_API_CA_FILE")]
    pub api_ca_file: Option<PathBuf>,
    /// Namespace of the api-server: the only place that sandboxes may reach.
    #[arg(long, env = "REPLAYFORK_API_NAMESPACE")]
    pub api_namespace: String,
    #[arg(long, env = "REPLAYFORK_API_SERVICE", default_value = "replayfork-api")]
    pub api_service: String,
    /// Labels of the api-server's pods: `key=value,key=value`.
    #[arg(long, env = "REPLAYFORK_API_POD_SELECTOR", value_parser = labels)]
    pub api_pod_selector: BTreeMap<String, String>,
    /// Port that the api-server's containers listen on.
    #[arg(long, env = "REPLAYFORK_API_TARGET_PORT", default_value_t = 3210)]
    pub api_target_port: u16,
    #[arg(long, env = "REPLAYFORK_TOKEN_FILE")]
    pub token_file: PathBuf,
    #[arg(long, env = "REPLAYFORK_COURIER_IMAGE")]
    pub courier_image: String,
    /// `hostUsers` of sandbox pods; unset leaves it to the cluster.
    #[arg(long, env = "REPLAYFORK_HOST_USERS")]
    pub host_users: Option<bool>,
    /// Where people open the viewer, if it has an address of its own.
    #[arg(long, env = "REPLAYFORK_VIEWER_URL")]
    pub viewer_url: Option<String>,
    #[arg(long, env = "REPLAYFORK_METRICS_LISTEN", default_value = "0.0.0.0:8080")]
    pub metrics_listen: SocketAddr,
    #[arg(long, env = "POD_NAME")]
    pub pod_name: String,
    #[arg(long, env = "POD_NAMESPACE")]
    pub pod_namespace: String,
    #[arg(long, env = "REPLAYFORK_LOG", default_value = "info")]
    pub log: String,
    #[arg(long, env = "REPLAYFORK_LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogFormat,
}

fn labels(text: &str) -> Result<BTreeMap<String, String>, String> {
    text.split(',')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned())).ok_or_else(|| format!("{pair:?} is no key=value")))
        .collect()
}
