//! Plans and replays of random runs and forks, against a naive reference that executes everything anew from the fork span.
//! What it ends with, workspace, outputs and blocked spans, is what the replay must end with.
//!
//! `REPLAYFORK_PROPERTY_CASES` sets the number of cases, and makes them other ones each time.

#[path = "../common/mod.rs"]
mod common;
mod part;
mod reference;
mod world;

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{Executor, Inputs, ReplayPolicy, RunEnvironment, SpanKind};
use replayfork_core::patch::{Contents, Patch};
use replayfork_core::plan::{self, Mark, Plan, Prepared};
use replayfork_core::reason::Blocked;
use replayfork_core::source::Source;
use serde_json::{Value, json};

use common::facts::{self, facts};
use common::files::States;
use common::product::{Became, Cache, End, Ran, World, replayed, seen, unknown_paths};
use reference::Reference;
use world::{PATHS, Salted, answer, draft, id, record};

/// One wish for a patch: where, which, and with what.
type Wish = (prop::sample::Index, u8, u8);

fn patch(source: &Source, states: &States, at: usize, choice: u8, salt: u8) -> Option<Value> {
    use SpanKind::*;
    let span = &source.spans[at];
    let executor = &span.opening.executor;
    let shell = matches!(executor, Some(Executor::Shell(_))) && span.opening.policy() != ReplayPolicy::RecordOnly;
    let model = matches!(executor, Some(Executor::Model { .. }));
    let kind = span.opening.kind;
    let recorded = span.output().map(|o| o.text.clone()).unwrap_or_default();
    let same = salt.is_multiple_of(3);
    let path = PATHS[salt as usize % PATHS.len()];
    Some(match choice {
        0 => json!({"type": "EnvVarOverride", "span": span.id, "env": [{"name": "V", "value": (salt % 3).to_string()}]}),
        1 if matches!(kind, ToolCall | ShellCommand | FileRead) && !source.is_container(at) => {
            json!({"type": "ToolOutputOverride", "span": span.id, "output": {"text": if same { recorded } else { format!("o{salt}") }}})
        }
        2 if shell => {
            json!({"type": "CommandOverride", "span": span.id, "command": {"script": format!("new {}", salt % 2), "reads": ["f0", "d/"], "writes": ["f1"]}})
        }
        3 if shell => json!({"type": "CommandOverride", "span": span.id, "command": {"script": format!("free {}", salt % 2)}}),
        4 if span.opening.sees_workspace() => {
            let files = span.snapshot_before.map(|s| states.0[&s.content].clone()).unwrap_or_default();
            let content =
                if same { files.get(path).map(|e| e.content().to_owned()).unwrap_or_default() } else { format!("patched {}", salt % 4) };
            let mut file = json!({"path": path, "content": content});
            if salt.is_multiple_of(5) {
                file["executable"] = json!(salt.is_multiple_of(2));
            }
            json!({"type": "FileContentOverride", "span": span.id, "files": [file]})
        }
        5 if model => {
            json!({"type": "PromptEdit", "span": span.id, "prompt": {"message": {"index": 0, "content": format!("edited {}", salt % 2)}}})
        }
        6 if model => {
            json!({"type": "ModelConfigEdit", "span": span.id, "modelConfig": {"parameters": {"temperature": if same { 0.5 } else { 0.25 }}}})
        }
        7 if kind == Retrieval => {
            json!({"type": "RetrievalContextOverride", "span": span.id, "retrieval": {"documents": [{"text": format!("d{}", salt % 2), "score": 0.5, "none": null}]}})
        }
        8 => {
            let digest = states.0.keys().nth(salt as usize % states.0.len().max(1))?;
            json!({"type": "SnapshotOverride", "span": span.id, "snapshot": {"digest": digest}})
        }
        _ => return None,
    })
}

/// Patches that don't conflict: conflicts are refused, and that has tests of its own.
fn patches(source: &Source, states: &States, fork_span: usize, wishes: &[Wish]) -> Vec<Value> {
    let mut targets = BTreeSet::new();
    let mut found = Vec::new();
    for (at, choice, salt) in wishes {
        let at = fork_span + at.index(source.spans.len() - fork_span);
        // Files and workspaces go together with another patch on the same span.
        let field = if matches!(choice, 4 | 8) { *choice } else { 0 };
        if source.unit_above(at).is_none() && targets.insert((at, field)) {
            found.extend(patch(source, states, at, *choice, *salt));
        }
    }
    // A container that began before the fork span.
    if let Some((_, 0, salt)) = wishes.first()
        && let Some(container) = (0..fork_span).find(|&i| source.is_container(i) && source.unit_above(i).is_none())
    {
        found.push(json!({"type": "EnvVarOverride", "span": id(container), "env": [{"name": "V", "value": format!("c{}", salt % 2)}]}));
    }
    found
}

fn spec(fork_span: usize, patches: &[Value], options: u16) -> ForkSpec {
    let mode = ["Blocked", "Recorded", "Command", "Recorded"][(options % 4) as usize];
    let mut spec = json!({
        "source": {"run": "r", "span": id(fork_span)},
        "patches": patches,
        "model": {"mode": mode},
        "reuse": {"earlyCutoff": options & 0x70 != 0x10, "resultCache": false},
    });
    if mode == "Command" {
        spec["model"]["command"] = json!({"argv": ["answer"]});
    }
    if mode == "Recorded" && options & 4 != 0 {
        let request = json!({"model": "m", "temperature": 0.25, "messages": [{"role": "user", "content": "do 1"}]});
        spec["model"]["fixtures"] = json!({"inline": [{"request": request, "response": answer("fixture", &request)}]});
    }
    if options & 8 != 0 {
        spec["sandbox"] = json!({"egress": [{"cidr": "192.0.2.0/24"}]});
    }
    serde_json::from_value(spec).unwrap()
}

/// Approves all of the plan's gated spans whose arguments are known.
fn approve(spec: &mut ForkSpec, plan: &Plan) {
    let digests = plan.spans.iter().filter_map(|s| Some((s.id.clone(), s.input_digest?)));
    spec.approvals = digests.map(|(span, digest)| serde_json::from_value(json!({"span": span, "inputDigest": digest})).unwrap()).collect();
}

/// What holds of every fork, however its commands turn out.
fn within_the_plan(source: &Source, plan: &Plan, got: &End, ran: &Ran, cache: bool) -> Result<(), TestCaseError> {
    prop_assert_eq!(&ran.early, &None, "it ended early");
    let mark = |n: usize| plan.spans.iter().find(|p| p.id == id(n)).and_then(|p| p.mark);
    for n in (0..source.spans.len()).filter(|&n| source.is_unit(n)) {
        let became = ran.became.get(&n);
        let did_run = matches!(became, Some(Became::Executed | Became::Served));
        let blocked = got.blocked.contains(&n);
        prop_assert!(!did_run || mark(n).is_some_and(Mark::may_run), "{} ran, and the plan says {:?}", id(n), mark(n));
        prop_assert!(!blocked || mark(n).is_some_and(Mark::may_block), "{} was {became:?}, and the plan says {:#?}", id(n), plan.spans);
        prop_assert!(did_run || cache || mark(n) != Some(Mark::WillRun), "{} should have run", id(n));
        prop_assert!(blocked || mark(n) != Some(Mark::WillBeBlocked), "{} should have been blocked", id(n));
        let reasons = if let Some(Became::Blocked(reasons)) = became { &reasons[..] } else { &[] };
        for Blocked { reason, .. } in reasons {
            let foreseen = plan.spans.iter().find(|p| p.id == id(n)).is_some_and(|p| p.blocked.iter().any(|b| b.reason == *reason));
            prop_assert!(foreseen, "{} was blocked by {reason}, which the plan does not name", id(n));
        }
    }
    Ok(())
}

/// Files whose content is unknown can't be compared.
fn known(mut end: End, unknown: &BTreeSet<String>) -> End {
    end.files.retain(|path, _| !unknown.contains(path));
    end
}

fn equal(source: &Source, got: &End, want: &End) -> Result<(), TestCaseError> {
    prop_assert_eq!(&got.blocked, &want.blocked, "blocked");
    prop_assert_eq!(&got.unknown, &want.unknown, "unknown paths");
    let (got, want) = (known(got.clone(), &want.unknown), known(want.clone(), &want.unknown));
    prop_assert_eq!(&got.files, &want.files, "files");
    for n in (0..source.spans.len()).filter(|n| want.outputs.contains_key(n)) {
        let of = |end: &End| end.outputs.get(&n).map(|o| o.as_ref().map(seen));
        prop_assert_eq!(of(&got), of(&want), "output of {}", id(n));
    }
    Ok(())
}

/// Nothing is executed whose inputs are as recorded, but where that can't be known or is not wanted.
fn nothing_needless(fork: &Prepared<'_>, plan: &Plan, ran: &Ran) -> Result<(), TestCaseError> {
    let source = fork.source;
    for n in ran.those(|b| matches!(b, Became::Executed | Became::Served)) {
        let excused = !fork.spec.reuse.early_cutoff
            || source.entangled(n).is_some()
            || source.spans[n].opening.inputs == Inputs::Unknown
            || !source.has_result(n);
        prop_assert!(excused || !ran.needless.contains(&n), "{} was executed with its recorded inputs; {:?}", id(n), plan.spans);
    }
    Ok(())
}

/// One fork of a run, whatever run it is: the plan, the replay, the reference. Gives the fork as a run.
fn fork_once(
    source: Source,
    states: &States,
    fork_span: usize,
    wishes: &[Wish],
    options: u16,
    cache: Option<&mut Cache>,
) -> Result<(Source, States, Vec<Patch>), TestCaseError> {
    let patches = patches(&source, states, fork_span, wishes);
    if patches.is_empty() {
        return Ok((source, states.clone(), vec![]));
    }
    let mut spec = spec(fork_span, &patches, options);
    spec.reuse.result_cache = cache.is_some();
    let contents = Contents::default();
    let needed = Prepared::facts_needed(&source, &contents, &spec).unwrap();
    let facts = facts(&source, states, needed);
    let source = source.with_facts(facts);
    if options & 0x100 != 0 {
        let first = plan::plan(&source, &contents, &spec).unwrap();
        approve(&mut spec, &first);
    }
    let fork = Prepared::new(&source, &contents, &spec).unwrap();
    let plan = plan::of(&fork);
    part::plans_the_same(&fork, &contents)?;
    let uses_cache = cache.is_some();
    let (paths, mut own_cache) = (paths(), Cache::new());
    let world = World { states, paths: &paths, cache: cache.unwrap_or(&mut own_cache), physics: &mut Salted("") };
    let (got, ran, after) = replayed(&fork, world);
    within_the_plan(&source, &plan, &got, &ran, uses_cache)?;
    nothing_needless(&fork, &plan, &ran)?;
    let cached = ran.those(|b| *b == Became::Cached);
    let mut reference = Reference::new(&source, states, &spec, fork_span, &cached);
    reference.planned = plan.spans.iter().filter_map(|p| source.index(&p.id)).collect();
    if !spec.reuse.early_cutoff {
        reference.forced = plan.spans.iter().filter(|p| p.mark.is_some()).filter_map(|p| source.index(&p.id)).collect();
    }
    let want = reference.run(unknown_paths(&fork, &paths));
    equal(&source, &got, &want)?;
    let inherited = fork.to_inherit();
    let forked = facts::source(&RunEnvironment::default(), ran.spans, &after).with_inherited(inherited.clone());
    Ok((forked, after, inherited))
}

fn paths() -> Vec<String> {
    PATHS.iter().map(|p| (*p).to_owned()).collect()
}

/// How many cases were asked for.
fn asked() -> Option<u32> {
    std::env::var("REPLAYFORK_PROPERTY_CASES").ok().and_then(|n| n.parse().ok())
}

fn config(share: u32) -> ProptestConfig {
    ProptestConfig {
        cases: asked().unwrap_or(4000) / share,
        // Always the same ones where nobody asked for a number: who changes nothing sees nothing change.
        rng_seed: if asked().is_some() { RngSeed::Random } else { RngSeed::Fixed(2026) },
        max_global_rejects: 1_000_000,
        max_shrink_iters: std::env::var("PROPTEST_MAX_SHRINK_ITERS").ok().and_then(|n| n.parse().ok()).unwrap_or(4000),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn wish() -> impl Strategy<Value = Wish> {
    (any::<prop::sample::Index>(), 0u8..9, any::<u8>())
}

proptest! {
    #![proptest_config(config(1))]

    #[test]
    fn a_replay_ends_as_a_full_execution_would(
        drafts in prop::collection::vec(draft(), 3..12),
        fork_at in any::<prop::sample::Index>(),
        wishes in prop::collection::vec(wish(), 1..4),
        options in any::<u16>(),
    ) {
        let (source, states) = record(&drafts);
        let fork_span = fork_at.index(source.spans.len());
        fork_once(source, &states, fork_span, &wishes, options, None)?;
    }
}

proptest! {
    #![proptest_config(config(4))]

    #[test]
    fn so_does_a_fork_of_a_fork_of_a_fork(
        drafts in prop::collection::vec(draft(), 3..10),
        forks in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(wish(), 1..3), any::<u16>()), 2..4),
    ) {
        let (mut source, mut states) = record(&drafts);
        for (at, wishes, options) in &forks {
            let fork_span = at.index(source.spans.len());
            (source, states, _) = fork_once(source, &states, fork_span, wishes, *options, None)?;
        }
    }

    #[test]
    fn a_result_that_another_fork_left_is_the_one_that_an_execution_gives(
        drafts in prop::collection::vec(draft(), 3..10),
        forks in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(wish(), 1..3), any::<u16>()), 4..5),
    ) {
        let mut cache = Cache::new();
        for (at, wishes, options) in &forks {
            let (source, states) = record(&drafts);
            let fork_span = at.index(source.spans.len());
            fork_once(source, &states, fork_span, wishes, *options, Some(&mut cache))?;
        }
    }

    #[test]
    fn commands_that_give_something_else_each_time_stay_within_the_plan(
        drafts in prop::collection::vec(draft(), 3..12),
        fork_at in any::<prop::sample::Index>(),
        wishes in prop::collection::vec(wish(), 1..4),
        options in any::<u16>(),
        salt in "[a-z]{3}",
    ) {
        let (source, states) = record(&drafts);
        let fork_span = fork_at.index(source.spans.len());
        let patches = patches(&source, &states, fork_span, &wishes);
        prop_assume!(!patches.is_empty());
        let spec = spec(fork_span, &patches, options);
        let contents = Contents::default();
        let needed = Prepared::facts_needed(&source, &contents, &spec).unwrap();
        let facts = facts(&source, &states, needed);
        let source = source.with_facts(facts);
        let fork = Prepared::new(&source, &contents, &spec).unwrap();
        let plan = plan::of(&fork);
        part::plans_the_same(&fork, &Contents::default())?;
        let world = World { states: &states, paths: &paths(), cache: &mut Cache::new(), physics: &mut Salted(&salt) };
        let (got, ran, _) = replayed(&fork, world);
        within_the_plan(&source, &plan, &got, &ran, false)?;
    }
}
