//! The way to the api-server: through the Kubernetes API's `services/proxy`, with the user's own kubeconfig.

use std::time::Duration;

use anyhow::{Context, bail};
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{Api, PostParams};
use kube::client::Body;
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use replayfork_client::{API_AUDIENCE, Problem, TOKEN_HEADER};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Target;

/// ServiceAccount that the chart makes for people whose kubeconfig has no token.
const USER_ACCOUNT: &str = "replayfork-user";
const TOKEN_SECONDS: i64 = 600;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub struct Connection {
    pub client: Client,
    pub namespace: String,
    service: String,
    /// Of the kubeconfig; without one, one is asked for.
    token: Option<String>,
}

impl Connection {
    /// # Errors
    /// The kubeconfig can't be used.
    pub async fn open(target: &Target) -> anyhow::Result<Self> {
        let options = KubeConfigOptions { context: target.context.clone(), ..KubeConfigOptions::default() };
        let config = Config::from_kubeconfig(&options).await.context("the kubeconfig can't be used")?;
        let Some((api_namespace, api_service)) = target.api.split_once('/') else {
            bail!("--api: {:?} is not NAMESPACE/SERVICE", target.api);
        };
        let api_service = if api_service.contains(':') { api_service.to_owned() } else { format!("http:{api_service}") };
        let namespace = target.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let token = bearer(&config)?;
        let service = format!("/api/v1/namespaces/{api_namespace}/services/{api_service}:3210/proxy");
        Ok(Self { client: Client::try_from(config)?, namespace, service, token })
    }

    /// The same for another namespace.
    #[must_use]
    pub fn within(&self, namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), ..self.clone() }
    }

    /// A token for the api-server: the kubeconfig's own, or one of the namespace's `replayfork-user`, for ten minutes.
    ///
    /// # Errors
    /// The kubeconfig has none, and none may be asked for.
    pub async fn token(&self) -> anyhow::Result<String> {
        if let Some(token) = &self.token {
            return Ok(token.clone());
        }
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.namespace);
        let spec =
            TokenRequestSpec { audiences: vec![API_AUDIENCE.into()], expiration_seconds: Some(TOKEN_SECONDS), bound_object_ref: None };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let namespace = &self.namespace;
        let none =
            format!("your kubeconfig has no token, and none could be had for the ServiceAccount {USER_ACCOUNT} of namespace {namespace:?}");
        let answer: TokenRequest = match accounts.create_subresource("token", USER_ACCOUNT, &PostParams::default(), &request).await {
            Ok(answer) => answer,
            // What the cluster says of these adds nothing.
            Err(kube::Error::Api(status)) if status.code == 404 => {
                bail!("{none}, which is not there; say another namespace with -n, or add {namespace:?} to the chart's value `namespaces`")
            }
            Err(kube::Error::Api(status)) if status.code == 403 => {
                bail!("{none}: you may not; ask for `create` on serviceaccounts/token there, or say another namespace with -n")
            }
            Err(error) => return Err(error).context(none),
        };
        Ok(answer.status.context("the cluster gave no token")?.token)
    }

    /// Sends a request on; `path` begins with `/`.
    ///
    /// # Errors
    /// The cluster can't be reached.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        content_type: Option<&str>,
        token: &str,
    ) -> anyhow::Result<Response<Body>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.service)).header(TOKEN_HEADER, token);
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        self.client.send(request.body(Body::from(body))?).await.context("the cluster can't be reached")
    }

    /// A path as the api-server knows it.
    pub fn without_prefix<'a>(&self, path: &'a str) -> &'a str {
        path.strip_prefix(&self.service).filter(|rest| rest.starts_with('/')).unwrap_or(path)
    }

    async fn ask<T: DeserializeOwned>(&self, method: Method, path: &str, body: Vec<u8>, content_type: &str) -> anyhow::Result<T> {
        let token = self.token().await?;
        let answer = async {
            let response = self.send(method, path, body, Some(content_type), &token).await?;
            let status = response.status();
            anyhow::Ok((status, response.into_body().collect().await.context("the answer broke off")?.to_bytes()))
        };
        let (status, bytes) = tokio::time::timeout(PATIENCE, answer).await.with_context(|| {
            format!("the api-server gave no answer within {} s; is it behind TLS? (--api NAMESPACE/https:SERVICE)", PATIENCE.as_secs())
        })??;
        if status.is_success() {
            // An answer without content says that it is done.
            let said = if bytes.is_empty() { b"null" } else { &bytes[..] };
            return serde_json::from_slice(said).context("the api-server's answer can't be read: is it of another version?");
        }
        if let Ok(problem) = serde_json::from_slice::<Problem>(&bytes) {
            bail!("{}", problem.detail);
        }
        let text = String::from_utf8_lossy(&bytes);
        let message = serde_json::from_slice::<serde_json::Value>(&bytes).ok().and_then(|v| v["message"].as_str().map(str::to_owned));
        bail!(
            "the api-server can't be reached through the cluster ({status}): {}; {}",
            message.unwrap_or_else(|| text.trim().to_owned()),
            match status.as_u16() {
                403 => "bind the ClusterRole replayfork-access to yourself in its namespace (chart value access.subjects)",
                _ => "say where it is with --api NAMESPACE/SERVICE",
            }
        )
    }

    /// # Errors
    /// What the api-server says.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.ask(Method::GET, path, Vec::new(), JSON).await
    }

    /// # Errors
    /// What the api-server says.
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        self.ask(Method::POST, path, serde_json::to_vec(body)?, JSON).await
    }

    /// # Errors
    /// What the api-server says.
    pub async fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.ask(Method::DELETE, path, Vec::new(), JSON).await
    }

    /// Sends a content as it is.
    ///
    /// # Errors
    /// What the api-server says.
    pub async fn post_bytes<T: DeserializeOwned>(&self, path: &str, body: Vec<u8>) -> anyhow::Result<T> {
        self.ask(Method::POST, path, body, "application/octet-stream").await
    }

    /// `?namespace=NAME`
    pub fn query(&self) -> String {
        format!("?namespace={}", encode(&self.namespace))
    }
}

const JSON: &str = "application/json";

/// The bearer token of a kubeconfig, if it has one.
fn bearer(config: &Config) -> anyhow::Result<Option<String>> {
    let auth = serde_json::to_value(&config.auth_info)?;
    if let Some(token) = auth["token"].as_str() {
        return Ok(Some(token.to_owned()));
    }
    match auth["tokenFile"].as_str() {
        Some(file) => Ok(Some(std::fs::read_to_string(file).with_context(|| format!("the token file {file}"))?.trim().to_owned())),
        None => Ok(None),
    }
}

/// Percent-encodes a part of a path or query.
pub fn encode(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() || b"-_.~".contains(&b) { (b as char).to_string() } else { format!("%{b:02X}") })
        .collect()
}
