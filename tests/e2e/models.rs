//! Who answers model calls: nobody, the record, a command in the sandbox, an endpoint that the installation names.

use anyhow::{Context, Result, ensure};
use replayfork_tests::fork::{Fork, manifest};
use replayfork_tests::place::{AGENT, Place};
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![
    e2e_models_command_answers_and_all_that_hangs_on_it_is_done_anew,
    e2e_models_record_answers_by_the_request_and_never_by_position,
    e2e_models_edited_prompt_and_settings_reach_the_model,
];

fn command(script: &str) -> Value {
    json!({"model": {"mode": "Command", "command": {"argv": ["/bin/sh", "-c", script]}}})
}

fn text(fork: &Fork, span: &str) -> Result<String> {
    let span = fork.place.span(&fork.run()?, span)?.span;
    Ok(span.output().with_context(|| format!("{} has no output", span.opening.name))?.text.clone())
}

fn e2e_models_command_answers_and_all_that_hangs_on_it_is_done_anew(place: &Place) -> Result<()> {
    place.record()?;
    let asked_again = place.example("asked-again")?;
    let plan = place.plan(&asked_again)?;
    let fork = place.fork(&asked_again)?;
    fork.succeeds()?;
    fork.agrees_with(&plan)?;
    ensure!(text(&fork, "summarize")?.contains("all selected tests pass"), "{}", text(&fork, "summarize")?);
    let spent = place.span(&fork.run()?, "summarize")?.span.closing.context("no closing")?;
    ensure!(spent.input_tokens.is_some_and(|n| n > 0) && spent.cost_usd.is_some_and(|c| c > 0.0), "{spent:?}");
    // One that gives no answer fails its step, and blocks who reads it.
    for (name, script, says) in [
        ("no-json", "echo hello", "printed no JSON"),
        ("exits", "echo no credit >&2; exit 3", "no credit"),
        ("error", r#"echo '{"error": {"message": "overloaded"}}'"#, "overloaded"),
    ] {
        let edit = json!([{"type": "PromptEdit", "prompt": {"system": "be brief"}}]);
        let fork = place.fork(&manifest(name, AGENT, "gen_fix", edit, command(script)))?;
        fork.succeeds()?;
        let closing = place.span(&fork.run()?, "gen_fix")?.span.closing.context("no closing")?;
        ensure!(closing.error.as_deref().unwrap_or_default().contains(says), "{name}: {closing:?}");
        let write = place.span(&fork.run()?, "apply_fix")?.span.closing.context("no closing")?;
        ensure!(write.blocked.iter().any(|b| b.reason.as_str() == "UpstreamEnded"), "{name}: {write:?}");
    }
    Ok(())
}

fn e2e_models_record_answers_by_the_request_and_never_by_position(place: &Place) -> Result<()> {
    // Two calls that ask the same, answered differently; a third that asks something else.
    let call = |id: &str, asks: &str, answer: &str| {
        let request = json!({"model": "m", "temperature": 0.5, "stop": null, "messages": [{"role": "user", "content": asks}]});
        json!({"id": id, "opening": {"name": id, "kind": "LlmCall", "executor": {"type": "model", "provider": "p", "request": request}},
            "closing": {"status": "Completed", "output": {"text": answer}}})
    };
    let run = place.recorded_by(&[call("one", "same?", "first"), call("two", "same?", "second"), call("three", "other?", "third")])?;
    let edits = json!([
        {"type": "PromptEdit", "span": "three", "prompt": {"message": {"index": 0, "content": "same?"}}},
        {"type": "PromptEdit", "span": "two", "prompt": {"message": {"index": 0, "content": "other?"}}},
    ]);
    let recorded = || json!({"model": {"mode": "Recorded"}});
    let served = place.fork(&manifest("served", &run, "one", edits, recorded()))?;
    served.succeeds()?;
    served.left(&["two Completed ServedFromRecording", "three Completed ServedFromRecording"])?;
    ensure!(text(&served, "three")? == "first" && text(&served, "two")? == "third");
    let unknown =
        || json!([{"type": "PromptEdit", "span": "three", "prompt": {"message": {"index": 0, "content": "unheard of: ü, null, 1.5"}}}]);
    let blocked = place.fork(&manifest("unheard-of", &run, "one", unknown(), recorded()))?;
    blocked.ends_as("Blocked")?;
    let said = blocked.object()?.status.context("no status")?.blocked_spans;
    let digest = said[0].message.rsplit(' ').next().context("no digest")?.to_owned();
    ensure!(said[0].reason == "NoRecordedResponse" && digest.len() == 64, "{said:?}");
    let fixtures =
        json!({"model": {"mode": "Recorded", "fixtures": {"inline": [{"requestDigest": digest, "response": "from a fixture"}]}}});
    let fixed = place.fork(&manifest("with-fixture", &run, "one", unknown(), fixtures))?;
    fixed.succeeds()?;
    ensure!(text(&fixed, "three")? == "from a fixture");
    Ok(())
}

fn e2e_models_edited_prompt_and_settings_reach_the_model(place: &Place) -> Result<()> {
    place.record()?;
    let edits = json!([
        {"type": "PromptEdit", "span": "summarize", "prompt": {"system": "Answer in one word; {{ '{{' }} stays."}},
        {"type": "ModelConfigEdit", "span": "summarize", "modelConfig": {"model": "other-1", "parameters": {"temperature": 0.75, "seed": 7, "stop": ["é"]}, "unset": ["top_p"]}},
    ]);
    // It says what it was asked.
    let echo = r#"printf '{"text": %s}' "$(python3 -c 'import json,sys; print(json.dumps(sys.stdin.read()))')""#;
    let fork = place.fork(&manifest("echoed", AGENT, "summarize", edits, command(echo)))?;
    fork.succeeds()?;
    fork.left(&["summarize Completed Reexecuted"])?;
    let asked: Value = serde_json::from_str(&text(&fork, "summarize")?)?;
    ensure!(asked["model"] == "other-1" && asked["temperature"] == 0.75 && asked["stop"] == json!(["é"]) && asked["seed"] == 7, "{asked}");
    ensure!(asked["messages"][0] == json!({"role": "system", "content": "Answer in one word; {{ stays."}), "{asked}");
    let user = asked["messages"][1]["content"].as_str().unwrap_or_default();
    ensure!(user.starts_with("Say in a sentence how this went:\n") && user.contains("FAILED"), "{user}");
    Ok(())
}
