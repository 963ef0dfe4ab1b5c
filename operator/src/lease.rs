//! One replica works at a time. Safety never rests on this: the api-server's rows do that; it only keeps two from doing the same work.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};

const NAME: &str = "replayfork-operator";
const DURATION_SECONDS: i32 = 15;
const RENEW_EVERY: Duration = Duration::from_secs(4);
const LOOK_EVERY: Duration = Duration::from_secs(2);

pub struct Leadership {
    leases: Api<Lease>,
    me: String,
}

impl Leadership {
    pub fn new(client: kube::Client, namespace: &str, me: &str) -> Self {
        Self { leases: Api::namespaced(client, namespace), me: me.to_owned() }
    }

    /// Returns once this replica holds the lease.
    pub async fn acquire(&self) {
        loop {
            match self.try_hold().await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => tracing::warn!("the lease can't be read: {error}"),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Renews the lease; returns when it is lost.
    pub async fn hold(&self) {
        let mut renewed = tokio::time::Instant::now();
        loop {
            tokio::time::sleep(RENEW_EVERY).await;
            match self.try_hold().await {
                Ok(true) => renewed = tokio::time::Instant::now(),
                Ok(false) => return,
                Err(error) => {
                    tracing::warn!("the lease can't be renewed: {error}");
                    if renewed.elapsed() >= Duration::from_secs(DURATION_SECONDS as u64) {
                        return;
                    }
                }
            }
        }
    }

    /// Gives the lease up, so that another replica need not wait for it to run out.
    pub async fn release(&self) {
        if let Ok(Some(mut lease)) = self.leases.get_opt(NAME).await
            && let Some(spec) = lease.spec.as_mut().filter(|s| s.holder_identity.as_deref() == Some(&self.me))
        {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            let _ = self.leases.replace(NAME, &PostParams::default(), &lease).await;
        }
    }

    async fn try_hold(&self) -> kube::Result<bool> {
        let now = Timestamp::now();
        let Some(mut lease) = self.leases.get_opt(NAME).await? else {
            let lease =
                Lease { metadata: ObjectMeta { name: Some(NAME.into()), ..ObjectMeta::default() }, spec: Some(self.spec(now, None)) };
            return won(self.leases.create(&PostParams::default(), &lease).await);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let seconds = i64::from(spec.lease_duration_seconds.unwrap_or(DURATION_SECONDS));
        let expired = spec.renew_time.as_ref().is_none_or(|t| now.as_second() - t.0.as_second() >= seconds);
        if holder != self.me && !holder.is_empty() && !expired {
            return Ok(false);
        }
        lease.spec = Some(self.spec(now, Some(&spec)));
        // With the resourceVersion that was read: of two that try, one loses.
        won(self.leases.replace(NAME, &PostParams::default(), &lease).await)
    }

    fn spec(&self, now: Timestamp, old: Option<&LeaseSpec>) -> LeaseSpec {
        let mine = old.filter(|o| o.holder_identity.as_deref() == Some(&self.me));
        let transitions = old.map_or(0, |o| o.lease_transitions.unwrap_or(0) + i32::from(mine.is_none()));
        LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: Some(DURATION_SECONDS),
            acquire_time: mine.and_then(|o| o.acquire_time.clone()).or(Some(MicroTime(now))),
            renew_time: Some(MicroTime(now)),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

fn won<T>(result: kube::Result<T>) -> kube::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}
