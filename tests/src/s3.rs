//! A real S3 server of a test's own, on loopback, with one bucket.

use std::net::Ipv4Addr;

use anyhow::Result;
use axum::error_handling::HandleError;
use axum::http::StatusCode;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

const KEY: &str = "replayfork-tests";
const SECRET: &str = "not-a-secret";
const BUCKET: &str = "recorded";

/// The server; it ends, and its files go, with it.
pub struct Server {
    folder: tempfile::TempDir,
    address: String,
    task: JoinHandle<()>,
}

impl Server {
    pub async fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        std::fs::create_dir(folder.path().join(BUCKET))?;
        let files = s3s_fs::FileSystem::new(folder.path()).map_err(|e| anyhow::anyhow!("{e:?}"))?;
        let mut service = S3ServiceBuilder::new(files);
        service.set_auth(SimpleAuth::from_single(KEY, SECRET));
        let service =
            HandleError::new(
                service.build(),
                |error: s3s::HttpError| async move { (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:?}")) },
            );
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = format!("http://{}", listener.local_addr()?);
        let task = tokio::spawn(async move {
            let _ = axum::serve(listener, axum::Router::new().fallback_service(service)).await;
        });
        Ok(Self { folder, address, task })
    }

    pub fn url(&self) -> String {
        format!("s3://{BUCKET}/some/folder")
    }

    /// As the environment of an api-server has them.
    pub fn settings(&self) -> Vec<(String, String)> {
        let setting = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        vec![
            setting("AWS_ACCESS_KEY_ID", KEY),
            setting("AWS_SECRET_ACCESS_KEY", SECRET),
            setting("AWS_REGION", "eu-west-1"),
            setting("AWS_ENDPOINT_URL", &self.address),
            setting("AWS_ALLOW_HTTP", "true"),
        ]
    }

    /// Its objects, where this server keeps them.
    pub fn folder(&self) -> std::path::PathBuf {
        self.folder.path().join(BUCKET)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}
