//! A namespace of the cluster, and what a user does there.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use http_body_util::BodyExt;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::Resource;
use kube::api::Api;
use kube::client::Body;
use replayfork_client::read::SpanDetail;
use replayfork_test_cluster::command::{feed, output, run};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::until;
use crate::world::World;

/// The example agent's pod, and the name that it asks for its run.
pub const AGENT: &str = "scripted-agent";

/// How long the agent may take; it takes ten seconds.
const RECORDING: Duration = Duration::from_secs(150);

/// One namespace.
pub struct Place<'a> {
    pub world: &'a World,
    pub namespace: String,
}

/// An answer of the api-server.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Answer {
    /// # Errors
    /// It is no JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("{} {}", self.status, String::from_utf8_lossy(&self.body)))
    }
}

impl Place<'_> {
    pub fn kubectl<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> std::process::Command {
        // First, since what follows `--` is not kubectl's.
        let mut kubectl = self.world.kube.kubectl(["-n", &self.namespace]);
        kubectl.args(arguments);
        kubectl
    }

    /// # Errors
    /// What kubectl says.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        self.world.kube.apply_in(&self.namespace, manifests)
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.world.client.clone(), &self.namespace)
    }

    /// What `kubectl replay … -o json` says.
    ///
    /// # Errors
    /// What it complains about.
    pub fn replay<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        self.replay_with(arguments, "")
    }

    /// Does so with text on its standard input.
    ///
    /// # Errors
    /// As [`Place::replay`].
    pub fn replay_with<T: DeserializeOwned>(&self, arguments: &[&str], input: &str) -> Result<T> {
        let mut kubectl = self.world.kube.kubectl(["replay"]);
        kubectl.args(arguments).args(["-o", "json", "-n", &self.namespace]);
        serde_json::from_str(&feed(&mut kubectl, input)?).context("kubectl replay prints no such JSON")
    }

    /// What `kubectl replay …` says to a person.
    ///
    /// # Errors
    /// What it complains about.
    pub fn told(&self, arguments: &[&str]) -> Result<String> {
        // A plugin's flags come after its name.
        output(self.world.kube.kubectl(["replay"]).args(arguments).args(["-n", &self.namespace]))
    }

    /// A span of a run, whole.
    ///
    /// # Errors
    /// As [`Place::replay`].
    pub fn span(&self, run: &str, span: &str) -> Result<SpanDetail> {
        self.replay(&["show", run, span])
    }

    /// Asks the api-server the way that clients do, through the Kubernetes API.
    ///
    /// # Errors
    /// The cluster can't be reached; what the api-server says is in the answer.
    pub fn ask(&self, method: &str, path: &str, token: Option<&str>, body: Option<Value>) -> Result<Answer> {
        let proxy = "/api/v1/namespaces/replayfork-system/services/http:replayfork-api:3210/proxy";
        let mut request = http::Request::builder().method(method).uri(format!("{proxy}{path}"));
        if let Some(token) = token {
            request = request.header("x-replayfork-token", token);
        }
        let request = request.header("content-type", "application/json");
        let request = request.body(Body::from(body.map(|b| b.to_string().into_bytes()).unwrap_or_default()))?;
        self.world.wait(async {
            let response = self.world.client.send(request).await?;
            let status = response.status().as_u16();
            Ok(Answer { status, body: response.into_body().collect().await?.to_bytes().to_vec() })
        })
    }

    /// A token of a ServiceAccount of this namespace, for the api-server.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn token(&self, account: &str) -> Result<String> {
        Ok(output(&mut self.kubectl(["create", "token", account, "--audience", "replayfork-api"]))?.trim().to_owned())
    }

    /// A file of a workspace state.
    ///
    /// # Errors
    /// There is no such state or file.
    pub fn file(&self, run: &str, state: &str, path: &str) -> Result<Vec<u8>> {
        let url = format!("/api/v1/runs/{run}/snapshots/{state}/file?namespace={}&path={path}", self.namespace);
        let answer = self.ask("GET", &url, Some(&self.token("replayfork-user")?), None)?;
        ensure!(answer.status == 200, "{url}: {} {}", answer.status, String::from_utf8_lossy(&answer.body));
        Ok(answer.body)
    }

    /// The example agent's objects, for a scenario that changes them.
    ///
    /// # Errors
    /// The example can't be read.
    pub fn agent(&self) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.world.project.join("examples/scripted-agent/pod.yaml"))?;
        Ok(serde_yaml_ng::Deserializer::from_str(&text).map(Value::deserialize).collect::<Result<_, _>>()?)
    }

    /// Starts an agent.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn start_agent(&self, objects: &[Value]) -> Result<()> {
        let manifests: Vec<_> = objects.iter().map(Value::to_string).collect();
        self.apply(&manifests.join("\n---\n")).map(drop)
    }

    /// Runs the example agent, recorded, and returns the name of its run.
    ///
    /// # Errors
    /// It failed, or what it did is not there.
    pub fn record(&self) -> Result<String> {
        self.start_agent(&self.agent()?)?;
        self.agent_ends()?;
        self.sealed(AGENT)?;
        Ok(AGENT.to_owned())
    }

    /// Waits until the agent's pod has succeeded; gives the agent's log.
    ///
    /// # Errors
    /// It failed, or takes too long.
    pub fn agent_ends(&self) -> Result<String> {
        let pods: Api<Pod> = self.api();
        until("the agent's pod ends", RECORDING, || {
            let phase = self.world.wait(pods.get(AGENT))?.status.and_then(|s| s.phase).unwrap_or_default();
            match phase.as_str() {
                "Succeeded" => Ok(Some(())),
                "Failed" => bail!("the agent's pod failed"),
                _ => Ok(None),
            }
        })?;
        output(&mut self.kubectl(["logs", AGENT, "-c", "agent"]))
    }

    /// Waits until the agent's log has this line.
    ///
    /// # Errors
    /// It takes too long.
    pub fn agent_says(&self, line: &str) -> Result<()> {
        until(&format!("the agent says {line:?}"), RECORDING, || {
            let log = output(&mut self.kubectl(["logs", AGENT, "-c", "agent"])).unwrap_or_default();
            Ok(log.lines().any(|said| said.trim() == line).then_some(()))
        })
    }

    /// The status of a container of the agent's pod.
    ///
    /// # Errors
    /// What the Kubernetes API says.
    pub fn agent_container(&self, name: &str) -> Result<Option<ContainerStatus>> {
        let status = self.world.wait(self.api::<Pod>().get(AGENT))?.status.unwrap_or_default();
        let all = status.init_container_statuses.into_iter().flatten().chain(status.container_statuses.into_iter().flatten());
        Ok(all.into_iter().find(|s| s.name == name))
    }

    /// Waits until a run is whole in the database.
    ///
    /// # Errors
    /// It takes too long.
    pub fn sealed(&self, run: &str) -> Result<()> {
        let query =
            format!("SELECT state FROM runs JOIN namespaces n USING (ns) WHERE runs.name = '{run}' AND n.name = '{}'", self.namespace);
        until(&format!("the run {run} is sealed"), RECORDING, || Ok((self.world.sql(&query)? == "sealed").then_some(())))
    }

    /// All that stands in the database of a recorded run, as one short text.
    ///
    /// # Errors
    /// What Postgres says.
    pub fn fingerprint(&self, run: &str) -> Result<String> {
        self.world.sql(&format!(
            "WITH r AS (SELECT runs.* FROM runs JOIN namespaces n USING (ns) WHERE runs.name = '{run}' AND n.name = '{}')
             SELECT (SELECT md5(r::text) FROM r),
                    (SELECT count(*) || md5(string_agg(s::text, '' ORDER BY s.span_id)) FROM spans s, r WHERE s.rid = r.rid),
                    (SELECT count(*) || md5(string_agg(s::text, '' ORDER BY s.segment)) FROM segments s, r WHERE s.rid = r.rid),
                    (SELECT count(*) || md5(string_agg(s::text, '' ORDER BY s.span_id, s.edge)) FROM snapshots s, r WHERE s.rid = r.rid)",
            self.namespace
        ))
    }

    /// What a person would look at when something went wrong here.
    pub fn story(&self) -> String {
        let show = |what: &str, arguments: &[&str]| {
            let shown = output(&mut self.kubectl(arguments)).unwrap_or_else(|e| format!("{e:#}"));
            format!("— {what} in {}\n{}\n", self.namespace, shown.trim_end())
        };
        let status = "{range .items[*]}{.metadata.name}: {.status}{\"\\n\"}{end}";
        let mut story = show("forks", &["get", "replayforks", "-o", &format!("jsonpath={status}")]);
        story.push_str(&show("objects", &["get", "jobs,pods,networkpolicies", "-o", "wide"]));
        story.push_str(&show("events", &["get", "events", "--field-selector", "type=Warning"]));
        let pods = output(&mut self.kubectl(["get", "pods", "-o", "name"])).unwrap_or_default();
        for pod in pods.lines() {
            story.push_str(&show(pod, &["logs", pod, "--all-containers", "--tail=15"]));
        }
        story
    }

    /// Lets a ServiceAccount of this name record runs here, as `examples/` does for the agent's.
    ///
    /// # Errors
    /// What kubectl says.
    pub fn recording_account(&self, name: &str) -> Result<()> {
        run(&mut self.kubectl(["create", "serviceaccount", name]))?;
        let account = format!("--serviceaccount={}:{name}", self.namespace);
        run(&mut self.kubectl(["create", "rolebinding", name, "--clusterrole=replayfork-record", &account]))
    }

    /// Records a run of these spans through the api-server's own interface.
    ///
    /// # Errors
    /// What the api-server says.
    pub fn record_spans(&self, token: &str, run: &str, spans: &[Value]) -> Result<()> {
        self.record_ending(token, run, spans, json!({"outcome": "Completed"}))
    }

    /// The same of a run that ends so.
    ///
    /// # Errors
    /// What the api-server says.
    pub fn record_ending(&self, token: &str, run: &str, spans: &[Value], finish: Value) -> Result<()> {
        let send = |path: &str, body: Value| -> Result<Value> {
            let answer = self.ask("POST", path, Some(token), Some(body))?;
            ensure!(answer.status == 200, "{path}: {} {}", answer.status, String::from_utf8_lossy(&answer.body));
            answer.json()
        };
        let image = self.agent()?.iter().find(|o| o["kind"] == "Pod").map(|pod| pod["spec"]["initContainers"][0]["image"].clone());
        let created = send("/v1/runs", json!({"name": run, "agent": "by-hand", "environment": {"image": image}}))?;
        let id = created["id"].as_str().context("the run has no id")?.to_owned();
        send(&format!("/v1/runs/{id}/spans"), json!({"spans": spans}))?;
        send(&format!("/v1/runs/{id}/finish"), finish)?;
        send(&format!("/v1/runs/{id}/goodbye"), json!({}))?;
        self.sealed(run)
    }

    /// Records a run of these spans by hand, with nothing but what they say, and gives its name.
    ///
    /// # Errors
    /// What the api-server says.
    pub fn recorded_by(&self, spans: &[Value]) -> Result<String> {
        self.recording_account("by-hand")?;
        let mut at = 1_700_000_000_000_000_000i64;
        let timed: Vec<Value> = spans
            .iter()
            .map(|span| {
                let mut span = span.clone();
                span["opening"]["started"] = json!(at);
                span["closing"]["ended"] = json!(at + 1_000_000);
                at += 2_000_000;
                span
            })
            .collect();
        self.record_spans(&self.token("by-hand")?, "by-hand", &timed)?;
        Ok("by-hand".to_owned())
    }
}
