//! Who asks: tokens by TokenReview, rights by SubjectAccessReview, both cached for at most ten seconds.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, StatusCode, header};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use replayfork_client::{ACCESS_GROUP, API_AUDIENCE, TOKEN_HEADER, fork_audience};
use replayfork_core::Digest;
use uuid::Uuid;

use crate::problem::{ApiError, ApiResult};

const CACHE_FOR: Duration = Duration::from_secs(10);
const CACHE_MOST: usize = 10_000;
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// An authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    pub user: String,
    groups: Vec<String>,
    extra: BTreeMap<String, Vec<String>>,
    uid: Option<String>,
}

impl Caller {
    /// The namespace of the ServiceAccount that asks, if it is one.
    pub fn namespace(&self) -> Option<&str> {
        self.user.strip_prefix("system:serviceaccount:")?.split_once(':').map(|(ns, _)| ns)
    }

    /// The pod that the token is bound to.
    pub fn pod_uid(&self) -> Option<&str> {
        self.extra.get(POD_UID)?.first().map(String::as_str)
    }
}

/// What is done to a virtual resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    CreateRuns,
    GetRuns,
    ListRuns,
    DeleteRuns,
    OperateForks,
}

impl Right {
    fn verb(self) -> &'static str {
        match self {
            Right::CreateRuns => "create",
            Right::GetRuns => "get",
            Right::ListRuns => "list",
            Right::DeleteRuns => "delete",
            Right::OperateForks => "operate",
        }
    }

    fn resource(self) -> &'static str {
        match self {
            Right::OperateForks => "forks",
            _ => "runs",
        }
    }

    /// The shipped role that grants it.
    fn role(self) -> &'static str {
        match self {
            Right::CreateRuns => "replayfork-record",
            Right::GetRuns | Right::ListRuns => "replayfork-view",
            Right::DeleteRuns => "admin of the namespace",
            Right::OperateForks => "the operator's own",
        }
    }
}

type Cached<T> = Mutex<HashMap<Digest, (Instant, T)>>;

/// Checks tokens and rights.
pub struct Authenticator {
    /// `None`: everybody may do everything.
    cluster: Option<kube::Client>,
    tokens: Cached<Option<Caller>>,
    rights: Cached<bool>,
}

fn cached<T: Clone>(cache: &Cached<T>, key: &Digest) -> Option<T> {
    let cache = cache.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    cache.get(key).filter(|(at, _)| at.elapsed() < CACHE_FOR).map(|(_, value)| value.clone())
}

fn remember<T>(cache: &Cached<T>, key: Digest, value: T) {
    let mut cache = cache.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if cache.len() >= CACHE_MOST {
        cache.retain(|_, (at, _)| at.elapsed() < CACHE_FOR);
        if cache.len() >= CACHE_MOST {
            cache.clear();
        }
    }
    cache.insert(key, (Instant::now(), value));
}

impl Authenticator {
    pub fn new(cluster: Option<kube::Client>) -> Self {
        Self { cluster, tokens: Cached::default(), rights: Cached::default() }
    }

    /// The caller of a request to the public API: a token for our own audience, or one for the API server's.
    ///
    /// # Errors
    /// 401 with how to get in; 503 where the cluster can't be asked.
    pub async fn caller(&self, headers: &HeaderMap) -> ApiResult<Caller> {
        if self.cluster.is_none() {
            return Ok(Caller { user: "anyone".into(), groups: vec![], extra: BTreeMap::new(), uid: None });
        }
        let token = token(headers)?;
        match self.review(token, Some(API_AUDIENCE)).await? {
            Some(caller) => Ok(caller),
            None => self.review(token, None).await?.ok_or_else(|| unauthorized("the token is not valid here, or has expired")),
        }
    }

    /// The pod behind a request about one fork: a token of exactly that fork's audience.
    ///
    /// # Errors
    /// As [`Authenticator::caller`].
    pub async fn courier(&self, headers: &HeaderMap, fork: &Uuid) -> ApiResult<Caller> {
        let token = token(headers)?;
        self.review(token, Some(&fork_audience(fork)))
            .await?
            .ok_or_else(|| ApiError::new(StatusCode::UNAUTHORIZED, "Unauthorized", format!("the token is not one of fork {fork}'s pod")))
    }

    async fn review(&self, token: &str, audience: Option<&str>) -> ApiResult<Option<Caller>> {
        let Some(client) = &self.cluster else {
            return Err(ApiError::unavailable("auth.mode is None, so tokens of pods can't be checked: forks need auth.mode: Kubernetes"));
        };
        let key = Digest::of(format!("{}\0{token}", audience.unwrap_or_default()).as_bytes());
        if let Some(known) = cached(&self.tokens, &key) {
            return Ok(known);
        }
        let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences: audience.map(|a| vec![a.to_owned()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let api: kube::Api<TokenReview> = kube::Api::all(client.clone());
        let review = api.create(&PostParams::default(), &review).await.map_err(|e| cluster_away("TokenReview", &e))?;
        let status = review.status.unwrap_or_default();
        let fits = audience.is_none_or(|a| status.audiences.iter().flatten().any(|b| b == a));
        let caller = if status.authenticated == Some(true) && fits {
            status.user.map(|user| Caller {
                user: user.username.unwrap_or_default(),
                groups: user.groups.unwrap_or_default(),
                extra: user.extra.unwrap_or_default(),
                uid: user.uid,
            })
        } else {
            None
        };
        remember(&self.tokens, key, caller.clone());
        Ok(caller)
    }

    /// Checks a right in a namespace; `None`: in all of them.
    ///
    /// # Errors
    /// 403 naming caller, verb, resource, namespace and the role that grants it; 503 where the cluster can't be asked.
    pub async fn check(&self, caller: &Caller, right: Right, namespace: Option<&str>) -> ApiResult<()> {
        let Some(client) = &self.cluster else { return Ok(()) };
        let key = Digest::of(format!("{caller:?}\0{right:?}\0{namespace:?}").as_bytes());
        let allowed = match cached(&self.rights, &key) {
            Some(allowed) => allowed,
            None => {
                let attributes = ResourceAttributes {
                    group: Some(ACCESS_GROUP.into()),
                    version: Some("v1".into()),
                    resource: Some(right.resource().into()),
                    verb: Some(right.verb().into()),
                    namespace: namespace.map(str::to_owned),
                    ..ResourceAttributes::default()
                };
                let spec = SubjectAccessReviewSpec {
                    user: Some(caller.user.clone()),
                    groups: Some(caller.groups.clone()),
                    extra: Some(caller.extra.clone()),
                    uid: caller.uid.clone(),
                    resource_attributes: Some(attributes),
                    ..SubjectAccessReviewSpec::default()
                };
                let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
                let api: kube::Api<SubjectAccessReview> = kube::Api::all(client.clone());
                let review = api.create(&PostParams::default(), &review).await.map_err(|e| cluster_away("SubjectAccessReview", &e))?;
                let allowed = review.status.is_some_and(|s| s.allowed && s.denied != Some(true));
                remember(&self.rights, key, allowed);
                allowed
            }
        };
        if allowed {
            return Ok(());
        }
        let place = namespace.map_or_else(|| "all namespaces".to_owned(), |n| format!("namespace {n:?}"));
        Err(ApiError::forbidden(
            "Forbidden",
            format!(
                "{:?} may not {} {}.{ACCESS_GROUP} in {place}; bind the ClusterRole {} to it there",
                caller.user,
                right.verb(),
                right.resource(),
                right.role()
            ),
        ))
    }
}

fn cluster_away(what: &str, error: &kube::Error) -> ApiError {
    tracing::warn!(cause = %error, "{what} failed");
    ApiError::unavailable(format!("the cluster could not be asked ({what}); try again"))
}

fn unauthorized(why: &str) -> ApiError {
    ApiError::new(
        StatusCode::UNAUTHORIZED,
        "Unauthorized",
        format!(
            "{why}; use `kubectl replay`, which takes the credentials of your kubeconfig, or send a Kubernetes token of the audience {API_AUDIENCE} \
             (`kubectl create token replayfork-user --audience {API_AUDIENCE}`) as `Authorization: Bearer` or `{TOKEN_HEADER}`"
        ),
    )
}

fn token(headers: &HeaderMap) -> ApiResult<&str> {
    let ours = headers.get(TOKEN_HEADER).and_then(|v| v.to_str().ok());
    let bearer = || headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).and_then(|v| v.strip_prefix("Bearer "));
    ours.or_else(bearer).map(str::trim).filter(|t| !t.is_empty()).ok_or_else(|| unauthorized("the request has no token"))
}
