//! Who answers a model call: nobody, the record, fixtures, a command.

use serde_json::{Value, json};

use crate::build::{Recorded, asks, config, output, prompt, run, says, sh};
use replayfork_core::model::SpanKind;

const ASK: &str = "topic: overridden (PatchedInput) -> overridden";

/// Two calls that ask the same, and a third that asks something else.
fn calls() -> Recorded {
    run(&[])
        .step("topic", says(SpanKind::ToolCall, "cats"))
        .step("first", asks("tell {{ topic }}").through(1))
        .step("second", asks("tell {{ topic }}"))
        .step("third", asks("tell dogs"))
        .step("use", sh("echo {{ first }}").sees_nothing())
        .recorded()
}

/// As recorded, the second call was answered otherwise than the first.
fn calls_answered_otherwise() -> Recorded {
    let mut run = calls();
    for span in run.spans.iter_mut().filter(|s| s.id == "second") {
        let output = span.closing.as_mut().and_then(|c| c.output.as_mut()).unwrap();
        (output.text, output.stdout) = ("again".into(), "again".into());
    }
    run
}

fn recorded(fixtures: Value) -> Value {
    if fixtures.is_null() {
        json!({"model": {"mode": "Recorded"}})
    } else {
        json!({"model": {"mode": "Recorded", "fixtures": {"inline": fixtures}}})
    }
}

#[test]
fn nobody_answers_unless_the_fork_says_who() {
    let fork = calls().fork("topic", json!([output("dogs")]));
    fork.tells(&[
        ASK,
        "first: will be blocked (UpstreamOutputChanged ModelBlocked) -> blocked: ModelBlocked",
        "second: will be blocked (UpstreamOutputChanged ModelBlocked) -> blocked: ModelBlocked",
        "use: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
    assert!(fork.says_of("first").contains("Recorded, Command or Endpoint can answer it"));
}

#[test]
fn the_record_answers_a_request_that_it_knows_whoever_made_it() {
    calls()
        .fork_with("topic", json!([output("dogs")]), recorded(Value::Null))
        .tells(&[
            ASK,
            "first: will run (UpstreamOutputChanged) -> served",
            "second: will run (UpstreamOutputChanged) -> served",
            "use: may run (UpstreamOutputChanged) -> ran",
        ])
        .gives("first", "m at 0.5, user: tell dogs")
        .gives("use", "m at 0.5, user: tell dogs");
}

#[test]
fn of_several_answers_to_one_request_each_call_gets_its_own_and_others_the_earliest() {
    let run = calls_answered_otherwise();
    let patches = json!([crate::build::on("third", prompt("tell cats"))]);
    run.fork_with("topic", patches, recorded(Value::Null))
        .tells(&["third: will run (PatchedInput) -> served"])
        .gives("third", "m at 0.5, user: tell cats")
        .gives("second", "again");
    // Early cutoff off: the call itself is answered anew, with its own.
    let more = json!({"model": {"mode": "Recorded"}, "reuse": {"earlyCutoff": false}});
    let patches = json!([crate::build::on("second", prompt("tell cats"))]);
    run.fork_with("topic", patches, more).gives("second", "again");
}

#[test]
fn a_call_with_its_recorded_request_gets_its_own_answer_though_it_is_asked_anew() {
    let mut run = run(&[])
        .step("topic", says(SpanKind::ToolCall, "cats"))
        .step("first", asks("tell cats").through(1))
        .step("second", asks("tell cats").after("topic"))
        .recorded();
    let output_of_second = run.spans.iter_mut().find(|s| s.id == "second").and_then(|s| s.closing.as_mut()?.output.as_mut()).unwrap();
    (output_of_second.text, output_of_second.stdout) = ("again".into(), "again".into());
    // What it depends on differs, which no request shows.
    run.fork_with("topic", json!([output("dogs")]), recorded(Value::Null))
        .tells(&[ASK, "second: will run (UpstreamOutputChanged) -> served"])
        .gives("second", "again");
}

#[test]
fn a_request_that_nothing_answers_is_blocked_and_never_guessed() {
    let fork = calls().fork_with("topic", json!([output("birds")]), recorded(Value::Null));
    fork.tells(&[
        ASK,
        "first: will be blocked (UpstreamOutputChanged NoRecordedResponse) -> blocked: NoRecordedResponse",
        "second: will be blocked (UpstreamOutputChanged NoRecordedResponse) -> blocked: NoRecordedResponse",
        "use: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
    // The message has the digest under which a fixture answers it.
    let message = fork.says_of("first");
    let digest = message.rsplit(' ').next().unwrap();
    let fixtures = json!([{"requestDigest": digest, "response": "tweet"}]);
    calls().fork_with("topic", json!([output("birds")]), recorded(fixtures)).gives("first", "tweet").gives("use", "tweet");
}

#[test]
fn the_record_comes_before_fixtures() {
    let request = |text: &str| json!({"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": text}]});
    let fixtures = json!([
        {"request": request("tell dogs"), "response": "woof"},
        {"request": request("tell birds"), "response": {"choices": [{"message": {"role": "assistant", "content": "tweet"}}]}},
    ]);
    calls().fork_with("topic", json!([output("dogs")]), recorded(fixtures.clone())).gives("first", "m at 0.5, user: tell dogs");
    calls().fork_with("topic", json!([output("birds")]), recorded(fixtures)).gives("first", "tweet");
}

#[test]
fn the_settings_are_a_part_of_the_request() {
    let patches = json!([crate::build::on("third", config("temperature", json!(0.9)))]);
    calls()
        .fork_with("topic", patches.clone(), recorded(Value::Null))
        .tells(&["third: will be blocked (PatchedInput NoRecordedResponse) -> blocked: NoRecordedResponse"]);
    let command = json!({"model": {"mode": "Command", "command": {"argv": ["answer"]}}});
    calls().fork_with("topic", patches, command).gives("third", "m at 0.9, user: tell dogs");
}

#[test]
fn a_request_that_is_not_known_yet_may_be_answered() {
    let run = run(&[])
        .step("make", sh("echo $V").env("V", "a").sees_nothing())
        .step("ask", asks("tell {{ make }}"))
        .step("ask_b", asks("tell b"))
        .recorded();
    let told = |became: &str| format!("ask: may run or be blocked (UpstreamOutputChanged NoRecordedResponse) -> {became}");
    let make = "make: will run (PatchedInput) -> ran";
    for (value, became) in [("b", "served"), ("c", "blocked: NoRecordedResponse")] {
        run.fork_with("make", json!([crate::build::env("V", value)]), recorded(Value::Null)).tells(&[make, &told(became)]);
    }
}

#[test]
fn an_answer_that_a_patch_gave_is_none_of_a_model() {
    let run = run(&[])
        .step("tool", says(SpanKind::ToolCall, "x"))
        .step("first", asks("tell {{ tool }}").of_kind(SpanKind::ToolCall))
        .step("second", asks("tell y"))
        .recorded();
    let fork = run.fork("tool", json!([crate::build::on("first", output("mine"))])).as_run();
    fork.fork_with("second", json!([prompt("tell x")]), recorded(Value::Null))
        .tells(&["second: will be blocked (PatchedInput NoRecordedResponse) -> blocked: NoRecordedResponse"]);
}

#[test]
fn a_binding_that_is_in_no_place_of_the_request_cant_be_rendered_into_it() {
    let run =
        run(&[]).step("topic", says(SpanKind::ToolCall, "cats")).step("ask", asks("tell me").binds("subject", "{{ topic }}")).recorded();
    let command = json!({"model": {"mode": "Command", "command": {"argv": ["answer"]}}});
    let fork = run.fork_with("topic", json!([output("dogs")]), command.clone());
    fork.tells(&[ASK, "ask: will be blocked (UpstreamOutputChanged IncompleteContract) -> blocked: IncompleteContract"]);
    assert!(fork.says_of("ask").starts_with("IncompleteContract(request): the binding \"subject\" of \"ask\""));
    let all = json!({"type": "PromptEdit", "span": "ask", "prompt": {"messages": [{"role": "user", "content": "tell {{ topic }}"}]}});
    run.fork_with("topic", json!([output("dogs"), all]), command).gives("ask", "m at 0.5, user: tell dogs");
}
