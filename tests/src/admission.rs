//! A gate that holds what the operator asks of the Kubernetes API: a validating webhook on the cluster's loopback, served by the
//! test. So a moment is made from outside, and the product needs no failpoint.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use replayfork_test_cluster::command::{run, succeeds};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::certificate::Certificate;
use crate::place::Place;
use crate::until;

/// The API server waits no longer for a webhook.
const HOLD: Duration = Duration::from_secs(29);
const PROBE: &str = "gate-probe";

/// What is let through only when the test says so.
#[derive(Clone, Copy, Debug)]
pub enum Held {
    /// The operator creates a Job.
    JobCreation,
    /// The operator writes the status of a fork that has ended.
    FinalStatus,
}

/// A request that waits. Dropped, it is let through.
pub struct Request {
    answer: Sender<bool>,
}

impl Request {
    pub fn admit(self) {
        let _ = self.answer.send(true);
    }

    pub fn deny(self) {
        let _ = self.answer.send(false);
    }
}

/// The webhook; gone with the value, and whatever waits then is let through.
pub struct Gate<'a> {
    place: &'a Place<'a>,
    held: Mutex<Receiver<Request>>,
    open: Arc<AtomicBool>,
}

impl<'a> Gate<'a> {
    /// Returns when the webhook is asked.
    ///
    /// # Errors
    /// It can't be set up.
    pub fn before(place: &'a Place<'a>, what: Held) -> Result<Self> {
        let listener = place.world.listen("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let (config, authority) = certificate()?;
        let (hold, held) = mpsc::channel();
        let (open, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let gate = Self { place, held: Mutex::new(held), open: open.clone() };
        std::thread::spawn({
            let asked = asked.clone();
            move || {
                for stream in listener.incoming().flatten() {
                    let (config, hold, open, asked) = (config.clone(), hold.clone(), open.clone(), asked.clone());
                    // An API server that went away needs no answer.
                    std::thread::spawn(move || serve(stream, config, &hold, &open, &asked).err());
                }
            }
        });
        let (rule, condition) = match what {
            Held::JobCreation => (
                json!({"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["jobs"]}),
                "request.userInfo.username.endsWith(':replayfork-operator')",
            ),
            Held::FinalStatus => (
                json!({"apiGroups": ["replayfork.dev"], "apiVersions": ["v1alpha1"], "operations": ["UPDATE"], "resources": ["replayforks/status"]}),
                "has(object.status) && has(object.status.conditions) && object.status.conditions.exists(c, c.type == 'Finished' && c.status == 'True')",
            ),
        };
        let probe = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]});
        place.world.kube.apply(
            &json!({
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "ValidatingWebhookConfiguration",
                "metadata": {"name": gate.name()},
                "webhooks": [{
                    "name": "gate.e2e.replayfork.dev",
                    "clientConfig": {"url": format!("https://127.0.0.1:{port}/"), "caBundle": STANDARD.encode(authority)},
                    "rules": [rule, probe],
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}},
                    "matchConditions": [{"name": "ours", "expression": format!("request.resource.resource == 'configmaps' || ({condition})")}],
                    "failurePolicy": "Fail",
                    "sideEffects": "None",
                    "timeoutSeconds": 30,
                    "admissionReviewVersions": ["v1"],
                }],
            })
            .to_string(),
        )?;
        until("the webhook is asked", Duration::from_secs(30), || {
            let _ = succeeds(&mut place.kubectl(["create", "configmap", PROBE, "--dry-run=server"]));
            Ok(asked.load(Ordering::SeqCst).then_some(()))
        })?;
        Ok(gate)
    }

    fn name(&self) -> String {
        format!("e2e-gate-{}", self.place.namespace)
    }

    /// The next request that waits.
    ///
    /// # Errors
    /// None comes in time.
    pub fn next(&self, limit: Duration) -> Result<Request> {
        let held = self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        held.recv_timeout(limit).context("the operator asked for nothing that the gate holds")
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        self.open.store(true, Ordering::SeqCst);
        let mut delete = self.place.world.kube.kubectl(["delete", "validatingwebhookconfiguration", &self.name()]);
        if let Err(error) = run(&mut delete) {
            eprintln!("{error:#}");
        }
    }
}

/// One review over one connection.
fn serve(stream: TcpStream, config: Arc<ServerConfig>, hold: &Sender<Request>, open: &AtomicBool, asked: &AtomicBool) -> Result<()> {
    let mut stream = BufReader::new(StreamOwned::new(ServerConnection::new(config)?, stream));
    let mut length = 0;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    let review: Value = serde_json::from_slice(&body)?;
    let request = &review["request"];
    let allowed = if request["name"] == PROBE {
        asked.store(true, Ordering::SeqCst);
        true
    } else if open.load(Ordering::SeqCst) {
        true
    } else {
        let (answer, decided) = mpsc::channel();
        let _ = hold.send(Request { answer });
        decided.recv_timeout(HOLD).unwrap_or(true)
    };
    let answer = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {"uid": request["uid"], "allowed": allowed, "status": {"code": 500, "message": "denied by a test's gate"}},
    })
    .to_string();
    let stream = stream.get_mut();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{answer}",
        answer.len()
    )?;
    Ok(stream.flush()?)
}

/// What the API server is to trust, and what it meets.
fn certificate() -> Result<(Arc<ServerConfig>, String)> {
    let Certificate { certificate, key } = Certificate::for_server("IP:127.0.0.1")?;
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes())?];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())?;
    Ok((Arc::new(ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?), certificate))
}
