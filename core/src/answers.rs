//! Answers to model calls: what a response says, and which recorded one belongs to a request.

use std::collections::HashMap;

use serde_json::Value;

use crate::Digest;
use crate::contract::Contract;
use crate::digest::Hasher;
use crate::fork::{Fixture, ModelSpec};
use crate::model::{Closing, Executor, Fidelity, Output};
use crate::patch::{Contents, Refused};
use crate::plan::recorded_value;
use crate::source::Source;

/// What a model gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    pub input_tokens: Option<i64>,
    pub output_tokens: Option<i64>,
    pub cost_usd: Option<f64>,
}

impl Answer {
    /// Reads a response: a text; an object with `text`; or a chat completion, whose first choice counts. A choice without text (a
    /// call of tools, for instance) gives its message as JSON.
    ///
    /// # Errors
    /// What it is instead.
    pub fn parse(response: &Value) -> Result<Self, String> {
        if let Some(text) = response.as_str() {
            return Ok(Self { text: text.to_owned(), ..Self::default() });
        }
        if let Some(error) = response.get("error").filter(|e| !e.is_null()) {
            return Err(format!("the model answered with an error: {}", short(error)));
        }
        let tokens = |name: &str| response.pointer(&format!("/usage/{name}")).and_then(Value::as_i64).filter(|n| *n >= 0);
        let text = match (response.get("text"), response.pointer("/choices/0/message")) {
            (Some(Value::String(text)), _) => text.clone(),
            (_, Some(message)) => message.get("content").and_then(Value::as_str).map_or_else(|| message.to_string(), str::to_owned),
            _ => return Err(format!("the response is neither a text, an object with `text`, nor a chat completion: {}", short(response))),
        };
        let cost = response.pointer("/usage/cost").and_then(Value::as_f64).filter(|c| c.is_finite() && *c >= 0.0);
        Ok(Self { text, input_tokens: tokens("prompt_tokens"), output_tokens: tokens("completion_tokens"), cost_usd: cost })
    }

    /// As a step's output.
    pub fn output(&self) -> Output {
        Output { text: self.text.clone(), stdout: self.text.clone(), ..Output::default() }
    }

    fn recorded(closing: &Closing) -> Option<Self> {
        let output = closing.output.as_ref()?;
        Some(Self {
            text: output.text.clone(),
            input_tokens: closing.input_tokens,
            output_tokens: closing.output_tokens,
            cost_usd: closing.cost_usd,
        })
    }
}

fn short(value: &Value) -> String {
    value.to_string().chars().take(200).collect()
}

/// The digest by which an answer is found: of the request alone, whatever the order of its members.
pub fn request_digest(request: &Value) -> Digest {
    Hasher::new("request").json("request", request).finish()
}

/// Every answer that `mode: Recorded` can give.
#[derive(Debug, Default)]
pub struct Answers {
    /// Those of the run by request, in order of sequence.
    recorded: HashMap<Digest, Vec<(usize, Answer)>>,
    fixtures: HashMap<Digest, Answer>,
}

impl Answers {
    /// Collects the run's answers and the fixtures.
    ///
    /// # Errors
    /// Fixtures that can't be read, with their place.
    pub fn of(source: &Source, contents: &Contents, spec: &ModelSpec) -> Result<Self, Refused> {
        let mut answers = Self::default();
        for (i, span) in source.spans.iter().enumerate() {
            let asked = matches!(span.opening.executor, Some(Executor::Model { .. })) && span.fidelity != Fidelity::Overridden;
            let Some(answer) = span.closing.as_ref().filter(|_| asked).and_then(Answer::recorded) else { continue };
            let Some(request) = recorded_request(source, i) else { continue };
            answers.recorded.entry(request_digest(&request)).or_default().push((i, answer));
        }
        answers.add_fixtures(contents, spec)?;
        Ok(answers)
    }

    fn add_fixtures(&mut self, contents: &Contents, spec: &ModelSpec) -> Result<(), Refused> {
        let field = "spec.model.fixtures";
        let refuse = |message: String| Refused::SpecInvalid { field: field.into(), message };
        let Some(fixtures) = &spec.fixtures else { return Ok(()) };
        let list: Vec<Fixture> = match (&fixtures.inline, &fixtures.content_from) {
            (Some(list), None) => list.clone(),
            (None, Some(from)) => {
                let text = contents.text(field, None, Some(from))?;
                serde_json::from_str(&text)
                    .map_err(|e| refuse(format!("the uploaded fixtures are no JSON list of request and response: {e}")))?
            }
            _ => return Err(refuse("give either `inline` or `contentFrom`".into())),
        };
        for (n, fixture) in list.iter().enumerate() {
            let digest = match (&fixture.request, &fixture.request_digest) {
                (Some(request), None) => request_digest(request),
                (None, Some(digest)) => digest.parse().map_err(|e| refuse(format!("fixture {n}: requestDigest: {e}")))?,
                _ => return Err(refuse(format!("fixture {n}: give either `request` or `requestDigest`"))),
            };
            let answer = Answer::parse(&fixture.response).map_err(|e| refuse(format!("fixture {n}: {e}")))?;
            if self.fixtures.insert(digest, answer).is_some() {
                return Err(refuse(format!("fixture {n}: another one answers the same request; keep one of them")));
            }
        }
        Ok(())
    }

    /// Digests of the requests that fixtures answer.
    pub fn fixtures(&self) -> impl Iterator<Item = &Digest> {
        self.fixtures.keys()
    }

    /// The answer to a request that `span` makes: of several recorded ones the span's own, else the earliest; else a fixture's.
    pub fn find(&self, span: usize, request: &Value) -> Option<&Answer> {
        let digest = request_digest(request);
        let recorded = self.recorded.get(&digest).and_then(|all| all.iter().find(|(i, _)| *i == span).or_else(|| all.first()));
        recorded.map(|(_, answer)| answer).or_else(|| self.fixtures.get(&digest))
    }
}

fn recorded_request(source: &Source, span: usize) -> Option<Value> {
    let contract = Contract::recorded(source, span).ok()?;
    contract.render(source, &|i| recorded_value(source, i)).ok()?.remove("request")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn responses_of_each_form_are_read_and_others_are_named() {
        let completion = json!({
            "choices": [{"message": {"role": "assistant", "content": "hé 🦀"}}],
            "usage": {"prompt_tokens": 12, "completion_tokens": 3, "cost": 0.25},
        });
        let answer = Answer { text: "hé 🦀".into(), input_tokens: Some(12), output_tokens: Some(3), cost_usd: Some(0.25) };
        assert_eq!(Answer::parse(&completion).unwrap(), answer);
        assert_eq!(Answer::parse(&json!("plain")).unwrap().text, "plain");
        assert_eq!(Answer::parse(&json!({"text": "t"})).unwrap().text, "t");
        let tools = json!({"choices": [{"message": {"content": null, "tool_calls": [{"id": "1"}]}}]});
        assert_eq!(Answer::parse(&tools).unwrap().text, r#"{"content":null,"tool_calls":[{"id":"1"}]}"#);
        assert!(Answer::parse(&json!({"error": {"message": "quota"}})).unwrap_err().contains("quota"));
        assert!(Answer::parse(&json!([1])).unwrap_err().contains("[1]"));
    }

    #[test]
    fn a_request_is_known_by_its_content_alone() {
        let (a, b) = (json!({"model": "m", "temperature": 0.5, "x": null}), json!({"x": null, "temperature": 0.5, "model": "m"}));
        assert_eq!(request_digest(&a), request_digest(&b));
        assert_ne!(request_digest(&a), request_digest(&json!({"model": "m", "temperature": 0.5})));
    }
}
