//! Models that forks may ask: OpenAI-compatible services which the installation names.
//!
//! The api-server makes the calls, so that no sandbox holds a key or reaches such a service.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};

/// Bytes that an answer may have.
const MAX_ANSWER: usize = 16 << 20;
const CONNECT: Duration = Duration::from_secs(10);

/// One service.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Endpoint {
    /// Up to the version, as in `https://models.example/v1`; `/chat/completions` is added.
    url: String,
    /// File with the key, read anew for each call.
    #[serde(default)]
    key_file: Option<PathBuf>,
    /// Models that may be asked; empty: any.
    #[serde(default)]
    models: Vec<String>,
    /// Namespaces whose forks may ask; empty: all.
    #[serde(default)]
    namespaces: Vec<String>,
    /// Seconds for one answer.
    #[serde(default = "default_timeout")]
    timeout_seconds: u64,
}

fn default_timeout() -> u64 {
    120
}

/// All services, by name.
pub struct Endpoints {
    by_name: BTreeMap<String, Endpoint>,
    client: reqwest::Client,
}

impl Endpoints {
    /// # Errors
    /// A file that can't be read.
    pub fn load(file: Option<&Path>) -> anyhow::Result<Self> {
        let by_name = match file {
            None => BTreeMap::new(),
            Some(file) => {
                let text = std::fs::read_to_string(file).with_context(|| format!("can't read {}", file.display()))?;
                serde_json::from_str(&text).with_context(|| format!("{} is no JSON object of endpoints by name", file.display()))?
            }
        };
        // A redirect could take the key elsewhere.
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).connect_timeout(CONNECT).build()?;
        Ok(Self { by_name, client })
    }

    /// Whether forks of this namespace may use the endpoint.
    ///
    /// # Errors
    /// Why not, in the user's words.
    pub fn check(&self, name: &str, namespace: &str) -> Result<(), String> {
        self.allowed(name, namespace).map(drop)
    }

    fn allowed(&self, name: &str, namespace: &str) -> Result<&Endpoint, String> {
        let open = |endpoint: &Endpoint| endpoint.namespaces.is_empty() || endpoint.namespaces.iter().any(|n| n == namespace);
        match self.by_name.get(name) {
            Some(endpoint) if open(endpoint) => Ok(endpoint),
            _ => {
                let known: Vec<_> = self.by_name.iter().filter(|(_, e)| open(e)).map(|(name, _)| name.as_str()).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Err(format!(
                    "spec.model.endpoint: this installation has no endpoint {name:?} for namespace {namespace:?}; it has: {known} (chart value models.endpoints)"
                ))
            }
        }
    }

    /// Asks a model. The answer is a chat completion, put together where it came as a stream.
    ///
    /// # Errors
    /// Why there is no answer, without the key.
    pub async fn ask(&self, name: &str, namespace: &str, request: &Value) -> Result<Value, String> {
        let endpoint = self.allowed(name, namespace)?;
        let model = request.get("model").and_then(Value::as_str).unwrap_or_default();
        if !endpoint.models.is_empty() && !endpoint.models.iter().any(|m| m == model) {
            return Err(format!("endpoint {name:?} does not allow the model {model:?}; it allows: {}", endpoint.models.join(", ")));
        }
        let call = self.call(endpoint, request);
        match tokio::time::timeout(Duration::from_secs(endpoint.timeout_seconds), call).await {
            Ok(answer) => answer.map_err(|why| format!("endpoint {name:?}: {why}")),
            Err(_) => Err(format!("endpoint {name:?} gave no answer in {} s", endpoint.timeout_seconds)),
        }
    }

    async fn call(&self, endpoint: &Endpoint, request: &Value) -> Result<Value, String> {
        let url = format!("{}/chat/completions", endpoint.url.trim_end_matches('/'));
        let mut call = self.client.post(url).json(request);
        if let Some(file) = &endpoint.key_file {
            let key = tokio::fs::read_to_string(file).await.map_err(|e| format!("its key can't be read: {e}"))?;
            let mut value = HeaderValue::try_from(format!("Bearer {}", key.trim())).map_err(|_| "its key is no header value".to_owned())?;
            value.set_sensitive(true);
            call = call.header(AUTHORIZATION, value);
        }
        let response = call.send().await.map_err(|e| format!("it can't be reached: {}", e.without_url()))?;
        let status = response.status();
        let streamed =
            response.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).is_some_and(|t| t.starts_with("text/event-stream"));
        let mut bytes = Vec::new();
        let mut body = response.bytes_stream();
        while let Some(chunk) = body.next().await {
            bytes.extend(chunk.map_err(|e| format!("its answer broke off: {}", e.without_url()))?);
            if bytes.len() > MAX_ANSWER {
                return Err(format!("its answer has more than {MAX_ANSWER} bytes"));
            }
        }
        if !status.is_success() {
            let said: String = String::from_utf8_lossy(&bytes).chars().take(500).collect();
            return Err(format!("it answered {status}: {said}"));
        }
        if streamed { put_together(&bytes) } else { serde_json::from_slice(&bytes).map_err(|e| format!("its answer is no JSON: {e}")) }
    }
}

/// A stream of chunks (server-sent events) as the completion that they make up.
fn put_together(stream: &[u8]) -> Result<Value, String> {
    let text = std::str::from_utf8(stream).map_err(|_| "its stream is no UTF-8".to_owned())?;
    let (mut content, mut usage, mut model, mut finished) = (String::new(), Value::Null, Value::Null, Value::Null);
    let mut calls: Vec<Value> = Vec::new();
    let mut done = false;
    for data in text.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim) {
        if data == "[DONE]" {
            done = true;
            break;
        }
        let chunk: Value = serde_json::from_str(data).map_err(|e| format!("a chunk of its stream is no JSON: {e}"))?;
        if let Some(error) = chunk.get("error").filter(|e| !e.is_null()) {
            return Err(format!("its stream ended with an error: {error}"));
        }
        if let Some(usage_now) = chunk.get("usage").filter(|u| u.is_object()) {
            usage = usage_now.clone();
        }
        if let Some(model_now) = chunk.get("model") {
            model = model_now.clone();
        }
        let Some(choice) = chunk.pointer("/choices/0") else { continue };
        content.push_str(choice.pointer("/delta/content").and_then(Value::as_str).unwrap_or_default());
        for call in choice.pointer("/delta/tool_calls").and_then(Value::as_array).into_iter().flatten() {
            merge_call(&mut calls, call);
        }
        if let Some(reason) = choice.get("finish_reason").filter(|r| !r.is_null()) {
            finished = reason.clone();
        }
    }
    if !done && finished.is_null() {
        return Err("its stream broke off".into());
    }
    let mut message = json!({"role": "assistant", "content": content});
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
        if content.is_empty() {
            message["content"] = Value::Null;
        }
    }
    Ok(
        json!({"object": "chat.completion", "model": model, "choices": [{"index": 0, "message": message, "finish_reason": finished}], "usage": usage}),
    )
}

/// A call of a tool comes in pieces, by its index.
fn merge_call(calls: &mut Vec<Value>, piece: &Value) {
    let index = piece.get("index").and_then(Value::as_u64).unwrap_or(0).min(127) as usize;
    while calls.len() <= index {
        calls.push(json!({"type": "function", "function": {"name": "", "arguments": ""}}));
    }
    let call = &mut calls[index];
    if let Some(id) = piece.get("id") {
        call["id"] = id.clone();
    }
    for field in ["name", "arguments"] {
        if let Some(more) = piece.pointer(&format!("/function/{field}")).and_then(Value::as_str) {
            let so_far = call["function"][field].as_str().unwrap_or_default().to_owned();
            call["function"][field] = json!(so_far + more);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_put_together_and_one_that_breaks_off_is_no_answer() {
        let chunk = |delta: Value, finish: Value| {
            format!("data: {}\n\n", json!({"model": "m", "choices": [{"delta": delta, "finish_reason": finish}]}))
        };
        let whole = chunk(json!({"role": "assistant", "content": "hé"}), Value::Null)
            + &chunk(json!({"content": "llo"}), json!("stop"))
            + "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 3, \"completion_tokens\": 2}}\n\ndata: [DONE]\n\n";
        let answer = replayfork_core::answers::Answer::parse(&put_together(whole.as_bytes()).unwrap()).unwrap();
        assert_eq!((answer.text.as_str(), answer.input_tokens, answer.output_tokens), ("héllo", Some(3), Some(2)));
        let broken = chunk(json!({"content": "hel"}), Value::Null);
        assert_eq!(put_together(broken.as_bytes()).unwrap_err(), "its stream broke off");
        let tools = chunk(json!({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{\"a\""}}]}), Value::Null)
            + &chunk(json!({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}), json!("tool_calls"));
        let answer = put_together(tools.as_bytes()).unwrap();
        assert_eq!(answer.pointer("/choices/0/message/tool_calls/0/function/arguments"), Some(&json!("{\"a\":1}")));
    }
}
