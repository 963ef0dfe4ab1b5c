//! Configuration, from arguments or the environment.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AuthMode {
    /// Tokens of the cluster, checked by TokenReview and SubjectAccessReview.
    #[value(name = "Kubernetes")]
    Kubernetes,
    /// Everybody may do everything: for a laptop.
    #[value(name = "None")]
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// The api-server of ReplayFork: owner of the recorded runs, planner of forks, host of the viewer.
#[derive(Clone, Parser)]
#[command(version)]
pub struct Config {
    /// PostgreSQL 15 or later, as a URL or key-value string.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    pub database_url: String,
    /// Authorities (PEM) that alone may vouch for the database where its URL says `sslmode=require`. Default: the system's.
    #[arg(long, env = "REPLAYFORK_DATABASE_CA", hide_env_values = true)]
    pub database_ca: Option<String>,
    #[arg(long, env = "REPLAYFORK_LISTEN", default_value = "0.0.0.0:3210")]
    pub listen: SocketAddr,
    /// Answers 204. No sandbox's network policy opens this port: a courier that reaches it knows that the policy does not hold.
    #[arg(long, env = "REPLAYFORK_PROBE_LISTEN", default_value = "0.0.0.0:3212")]
    pub probe_listen: SocketAddr,
    #[arg(long, env = "REPLAYFORK_AUTH_MODE", value_enum, default_value = "Kubernetes")]
    pub auth_mode: AuthMode,
    /// Certificate chain and key (PEM) to serve TLS with; both or none.
    #[arg(long, env = "REPLAYFORK_TLS_CERT", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    #[arg(long, env = "REPLAYFORK_TLS_KEY", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Folder with the built viewer.
    #[arg(long, env = "REPLAYFORK_VIEWER_DIR")]
    pub viewer_dir: Option<PathBuf>,
    /// Image for forks of runs that recorded none.
    #[arg(long, env = "REPLAYFORK_SANDBOX_DEFAULT_IMAGE")]
    pub sandbox_default_image: Option<String>,
    /// uid for forks of runs that recorded none, or 0.
    #[arg(long, env = "REPLAYFORK_SANDBOX_DEFAULT_UID", default_value_t = 65532, value_parser = clap::value_parser!(i64).range(1..=4_294_967_294))]
    pub sandbox_default_uid: i64,
    /// JSON file with the model endpoints that forks may use.
    #[arg(long, env = "REPLAYFORK_ENDPOINTS_FILE")]
    pub endpoints_file: Option<PathBuf>,
    /// Bytes that one uploaded content of a patch may have.
    #[arg(long, env = "REPLAYFORK_MAX_CONTENT_BYTES", default_value_t = 32 << 20)]
    pub max_content_bytes: usize,
    /// Seconds between two collections of blobs that nothing names any more.
    #[arg(long, env = "REPLAYFORK_COLLECT_INTERVAL_SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    pub collect_interval_seconds: u64,
    /// Where new packs of blobs go: `postgres`, or the URL of a bucket or folder (`s3://bucket/folder`,
    /// `gs://…`, `az://…`, `file:///folder`), below which each database has a folder of its own. Credentials and endpoints are taken from the variables that their
    /// vendors name: `AWS_…`, `GOOGLE_…`, `AZURE_…`.
    #[arg(long, env = "REPLAYFORK_BLOB_STORE", default_value = "postgres")]
    pub blob_store: String,
    /// Bytes that one request may have.
    #[arg(long, env = "REPLAYFORK_MAX_REQUEST_BYTES", default_value_t = 64 << 20)]
    pub max_request_bytes: usize,
    /// Connections to the database.
    #[arg(long, env = "REPLAYFORK_DATABASE_CONNECTIONS", default_value_t = 16)]
    pub database_connections: usize,
    #[arg(long, env = "REPLAYFORK_LOG", default_value = "info")]
    pub log: String,
    #[arg(long, env = "REPLAYFORK_LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// Print the OpenAPI document and exit.
    #[arg(long)]
    pub openapi: bool,
}
