//! What every request handler shares.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use deadpool_postgres::{Object, Pool, Transaction};

use crate::auth::{Authenticator, Caller, Right};
use crate::config::{AuthMode, Config};
use crate::endpoints::Endpoints;
use crate::metrics::Metrics;
use crate::problem::{ApiError, ApiResult};
use crate::store::Packs;

#[derive(Clone)]
pub struct App(Arc<Inner>);

pub struct Inner {
    pub config: Config,
    pub pool: Pool,
    pub packs: Packs,
    pub auth: Authenticator,
    pub endpoints: Endpoints,
    pub metrics: Metrics,
}

impl std::ops::Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl App {
    pub fn new(config: Config, pool: Pool, packs: Packs, auth: Authenticator, endpoints: Endpoints) -> Self {
        Self(Arc::new(Inner { config, pool, packs, auth, endpoints, metrics: Metrics::default() }))
    }

    /// # Errors
    /// 503 where the database can't be reached.
    pub async fn db(&self) -> ApiResult<Object> {
        Ok(self.pool.get().await?)
    }

    /// The namespace that a request is about: the one it names, else the caller's.
    ///
    /// # Errors
    /// 400 where neither says one.
    pub fn namespace(&self, caller: &Caller, named: Option<&str>) -> ApiResult<String> {
        match named.filter(|n| !n.is_empty()).or_else(|| caller.namespace()) {
            Some(namespace) => Ok(namespace.to_owned()),
            None if self.config.auth_mode == AuthMode::None => Ok("default".to_owned()),
            None => Err(ApiError::bad_request(
                "NamespaceMissing",
                "say which namespace with ?namespace=NAME: your credentials are of no ServiceAccount's",
            )),
        }
    }

    /// The namespace of a request, once the caller's right in it has been checked.
    ///
    /// # Errors
    /// 400, 403, 503.
    pub async fn allowed(&self, caller: &Caller, right: Right, named: Option<&str>) -> ApiResult<String> {
        let namespace = self.namespace(caller, named)?;
        self.auth.check(caller, right, Some(&namespace)).await?;
        Ok(namespace)
    }
}

/// Begins a READ COMMITTED transaction.
///
/// # Errors
/// What the database says.
pub async fn begin(client: &mut Object) -> ApiResult<Transaction<'_>> {
    Ok(client.transaction().await?)
}

/// Nanoseconds since the Unix epoch.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i64)
}

impl FromRequestParts<App> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        app.auth.caller(&parts.headers).await
    }
}
