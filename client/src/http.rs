//! The HTTP client.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::{Method, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Problem;

/// Where a token comes from. A file is read anew for every request, since kubelet replaces projected tokens.
#[derive(Clone)]
pub enum Token {
    None,
    File(PathBuf),
    Value(String),
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Token::None => f.write_str("None"),
            Token::File(path) => write!(f, "File({})", path.display()),
            Token::Value(_) => f.write_str("Value(…)"),
        }
    }
}

/// How the server is reached and known, where that is not left to the system.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    /// Authorities (PEM) that alone are trusted for `https`; without them the system's.
    pub authorities: Option<String>,
    /// Address of the URL's host, where there is no DNS.
    pub address: Option<SocketAddr>,
}

impl Reach {
    /// With the authorities of a file, if one is given.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn with_ca_file(path: Option<&Path>) -> Result<Self, ClientError> {
        let read = |path: &Path| std::fs::read_to_string(path).map_err(|e| ClientError::Authorities(format!("{}: {e}", path.display())));
        Ok(Self { authorities: path.map(read).transpose()?, address: None })
    }
}

/// Host of a URL without its port.
fn host(url: &str) -> Option<&str> {
    let authority = url.split_once("://")?.1.split('/').next()?;
    Some(authority.rsplit_once(':').map_or(authority, |(host, _)| host))
}

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server answered with an error.
    #[error("{} ({} {})", .0.detail, .0.status, .0.reason)]
    Problem(Box<Problem>),
    /// It could not be reached, or broke off.
    #[error("the api-server at {url} can't be reached: {source}")]
    Transport { url: String, source: reqwest::Error },
    #[error("the token file {} can't be read: {source}", path.display())]
    Token { path: PathBuf, source: std::io::Error },
    #[error("the pack {} can't be read: {source}", path.display())]
    Pack { path: PathBuf, source: std::io::Error },
    #[error("the authorities for TLS can't be read: {0}")]
    Authorities(String),
    #[error("the api-server's answer to {url} can't be read: {detail}")]
    Answer { url: String, detail: String },
}

impl ClientError {
    pub fn status(&self) -> Option<u16> {
        match self {
            ClientError::Problem(problem) => Some(problem.status),
            _ => None,
        }
    }

    pub fn reason(&self) -> Option<&str> {
        match self {
            ClientError::Problem(problem) => Some(&problem.reason),
            _ => None,
        }
    }

    /// Whether asking again later can help: no answer, too early (425), too many (429), or a fault of the server's.
    pub fn is_transient(&self) -> bool {
        match self {
            ClientError::Problem(p) => p.status >= 500 || p.status == 425 || p.status == 429 || p.status == 408,
            ClientError::Transport { .. } | ClientError::Token { .. } => true,
            ClientError::Answer { .. } | ClientError::Authorities(_) | ClientError::Pack { .. } => false,
        }
    }
}

/// Word for programs of an answer that lists blobs which must be sent first.
pub const BLOBS_MISSING: &str = "BlobsMissing";

/// A client of one api-server. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ApiClient {
    base: String,
    token: Token,
    http: reqwest::Client,
}

impl ApiClient {
    /// `base` is the server's URL without a path, e.g. `http://replayfork-api.replayfork-system.svc:3210`.
    ///
    /// # Errors
    /// TLS can't be set up, or the authorities can't be read.
    pub fn new(base: &str, token: Token, reach: &Reach) -> Result<Self, ClientError> {
        let base = base.trim_end_matches('/').to_owned();
        let authorities = match &reach.authorities {
            Some(pem) => Some(reqwest::Certificate::from_pem_bundle(pem.as_bytes()).map_err(|e| ClientError::Authorities(e.to_string()))?),
            // Without TLS no authorities are needed, and a small image has none.
            None if !base.starts_with("https://") => Some(Vec::new()),
            None => None,
        };
        let builder = match authorities {
            Some(authorities) => reqwest::Client::builder().tls_certs_only(authorities),
            None => reqwest::Client::builder(),
        };
        let builder = match (reach.address, host(&base)) {
            (Some(address), Some(host)) => builder.resolve(host, address),
            _ => builder,
        };
        let http = builder
            .connect_timeout(Duration::from_secs(5))
            .timeout(Duration::from_secs(300))
            .tcp_nodelay(true)
            .user_agent(concat!("replayfork/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|source| ClientError::Transport { url: base.clone(), source })?;
        Ok(Self { base, token, http })
    }

    fn request(&self, method: Method, path: &str) -> Result<(String, reqwest::RequestBuilder), ClientError> {
        let url = format!("{}{path}", self.base);
        let request = self.http.request(method, &url);
        let request = match &self.token {
            Token::None => request,
            Token::Value(token) => request.bearer_auth(token),
            Token::File(path) => {
                let token = std::fs::read_to_string(path).map_err(|source| ClientError::Token { path: path.clone(), source })?;
                request.bearer_auth(token.trim())
            }
        };
        Ok((url, request))
    }

    async fn send(url: String, request: reqwest::RequestBuilder) -> Result<(String, reqwest::Response), ClientError> {
        let response = match request.send().await {
            Ok(response) => response,
            Err(source) => return Err(ClientError::Transport { url, source }),
        };
        if response.status().is_success() {
            return Ok((url, response));
        }
        let status = response.status();
        let body = response.bytes().await.unwrap_or_default();
        Err(ClientError::Problem(Box::new(problem(status, &body))))
    }

    async fn json<T: DeserializeOwned>(url: String, response: reqwest::Response) -> Result<T, ClientError> {
        let body = match response.bytes().await {
            Ok(body) => body,
            Err(source) => return Err(ClientError::Transport { url, source }),
        };
        serde_json::from_slice(&body).map_err(|e| ClientError::Answer { url, detail: e.to_string() })
    }

    /// # Errors
    /// As [`ClientError`] says; so for all that follow.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let (url, request) = self.request(Method::GET, path)?;
        let (url, response) = Self::send(url, request).await?;
        Self::json(url, response).await
    }

    /// The answer's body as it arrives.
    pub async fn get_bytes(&self, path: &str) -> Result<reqwest::Response, ClientError> {
        let (url, request) = self.request(Method::GET, path)?;
        Ok(Self::send(url, request).await?.1)
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let (url, request) = self.request(Method::POST, path)?;
        let (url, response) = Self::send(url, request.json(body)).await?;
        Self::json(url, response).await
    }

    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
        let (url, request) = self.request(Method::PUT, path)?;
        let (url, response) = Self::send(url, request.json(body)).await?;
        Self::json(url, response).await
    }

    pub async fn put_bytes<T: DeserializeOwned>(&self, path: &str, body: bytes::Bytes) -> Result<T, ClientError> {
        let (url, request) = self.request(Method::PUT, path)?;
        let (url, response) = Self::send(url, request.header("content-type", "application/octet-stream").body(body)).await?;
        Self::json(url, response).await
    }

    pub async fn delete(&self, path: &str) -> Result<(), ClientError> {
        let (url, request) = self.request(Method::DELETE, path)?;
        Self::send(url, request).await.map(drop)
    }
}

/// The problem that an error answer carries, or one made of what there is.
fn problem(status: StatusCode, body: &[u8]) -> Problem {
    serde_json::from_slice(body).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(body);
        let detail = if text.trim().is_empty() { status.to_string() } else { text.trim().chars().take(500).collect() };
        let title = status.canonical_reason().unwrap_or("error").to_owned();
        Problem { r#type: "about:blank".into(), title, status: status.as_u16(), detail, reason: "Unknown".into(), missing: vec![] }
    })
}
