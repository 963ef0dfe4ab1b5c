//! What a path stands for, and who notices when it changes.

use serde_json::json;

use crate::build::{env, file, output, reads, run, says, script, script_that_sees, sh, writes};
use replayfork_core::model::SpanKind;

#[test]
fn a_command_that_writes_the_same_content_again_makes_no_reader_run() {
    let run = run(&[])
        .step("make", sh("echo a > conf; echo $V").env("V", "0").sees(&[], &["conf"]))
        .step("use", sh("cat conf").sees(&["conf"], &[]))
        .recorded();
    run.fork("make", json!([env("V", "1")]))
        .tells(&["make: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> reused"])
        .gives("make", "1")
        .has("conf", "a");
}

#[test]
fn a_written_file_is_known_so_its_readers_are_reached_only_by_another_content() {
    let run = run(&[("conf", "old")])
        .step("text", says(SpanKind::ToolCall, "new"))
        .step("write", writes("conf", "{{ text | trim }}"))
        .step("use", reads("conf"))
        .recorded();
    run.fork("text", json!([output(" new ")])).tells(&["text: overridden (PatchedInput) -> overridden"]).has("conf", "new");
    run.fork("text", json!([output("other")]))
        .tells(&[
            "text: overridden (PatchedInput) -> overridden",
            "write: will run (UpstreamOutputChanged) -> ran",
            "use: will run (WorkspaceChanged) -> ran",
        ])
        .gives("use", "other");
}

#[test]
fn deleting_what_is_not_there_changes_nothing() {
    let run = run(&[])
        .step("clean", sh("rm junk; echo $V").env("V", "0").sees(&[], &["junk"]))
        .step("look", sh("is junk").sees(&["junk"], &[]))
        .recorded();
    run.fork("clean", json!([env("V", "1")]))
        .tells(&["clean: will run (PatchedInput) -> ran", "look: may run (WorkspaceChanged) -> reused"])
        .has("junk", "nothing");
    // There it is now, and it is deleted before anybody looks.
    run.fork("clean", json!([file("junk", "x")]))
        .tells(&["clean: will run (WorkspaceChanged) -> ran", "look: may run (WorkspaceChanged) -> reused"])
        .has("junk", "nothing");
}

#[test]
fn a_deletion_that_no_longer_happens_is_noticed() {
    let run =
        run(&[("old", "1")]).step("clean", sh("rm old").sees(&[], &["old"])).step("look", sh("is old").sees(&["old"], &[])).recorded();
    run.fork("clean", json!([script_that_sees("echo kept", &[], &["old"])]))
        .tells(&["clean: will run (PatchedInput) -> ran", "look: may run (WorkspaceChanged) -> ran"])
        .gives("look", "a file")
        .has("old", "1");
}

#[test]
fn a_file_that_becomes_a_folder_is_noticed_by_who_tests_for_it_and_by_who_lists_it() {
    let run = run(&[])
        .step("make", sh("echo x > out").sees(&[], &["out", "out/"]))
        .step("test", sh("is out").sees(&["out"], &[]))
        .step("list", sh("ls out").sees(&["out/"], &[]))
        .recorded();
    run.fork("make", json!([script_that_sees("echo y > out/inner", &[], &["out", "out/"])]))
        .tells(&[
            "make: will run (PatchedInput) -> ran",
            "test: may run (WorkspaceChanged) -> ran",
            "list: may run (WorkspaceChanged) -> ran",
        ])
        .gives("test", "a folder")
        .gives("list", "inner")
        .has("out/inner", "y");
}

#[test]
fn a_folder_that_a_kept_step_makes_a_file_is_one_in_the_end() {
    let run = run(&[("out/inner", "y")])
        .step("first", sh("echo $V").env("V", "0").sees_nothing())
        .step("flatten", sh("rm out; echo x > out").sees(&[], &["out", "out/"]))
        .recorded();
    run.fork("first", json!([env("V", "1")])).tells(&["first: will run (PatchedInput) -> ran"]).has("out", "x").has("out/inner", "nothing");
}

#[test]
fn an_empty_folder_is_something() {
    let run = run(&[])
        .step("make", sh("echo none").sees(&[], &["cache/"]))
        .step("test", sh("is cache").sees(&["cache"], &[]))
        .step("list", sh("ls cache").sees(&["cache/"], &[]))
        .recorded();
    run.fork("make", json!([script_that_sees("mkdir cache; echo none", &[], &["cache/"])]))
        .tells(&[
            "make: will run (PatchedInput) -> ran",
            "test: may run (WorkspaceChanged) -> ran",
            "list: may run (WorkspaceChanged) -> ran",
        ])
        .gives("test", "a folder")
        .gives("list", "")
        .has("cache", "a folder");
}

#[test]
fn the_x_bit_alone_is_a_change() {
    let run = run(&[("tool", "code")])
        .step("begin", sh("echo $V").env("V", "0").sees(&[], &[]))
        .step("test", sh("is tool").sees(&["tool"], &[]))
        .recorded();
    let with_bit = |executable: bool| json!([{"type": "FileContentOverride", "files": [{"path": "tool", "content": "code", "executable": executable}]}]);
    run.fork("begin", with_bit(true)).tells(&["test: will run (WorkspaceChanged) -> ran"]).gives("test", "a program").has("tool", "x code");
    run.fork("begin", with_bit(false)).tells(&[]).has("tool", "code");
}

#[test]
fn a_patched_file_keeps_its_x_bit_unless_told_otherwise() {
    let run = run(&[("tool", "code")])
        .step("mark", sh("chmod +x tool").sees(&[], &["tool"]))
        .step("test", sh("is tool; cat tool").sees(&["tool"], &[]))
        .recorded();
    run.fork("test", json!([file("tool", "other")]))
        .tells(&["test: will run (WorkspaceChanged) -> ran"])
        .gives("test", "a program\nother")
        .has("tool", "x other");
    run.fork("test", json!([file("tool", "code")])).tells(&[]);
}

#[test]
fn the_x_bit_that_a_write_sets_is_one_of_its_inputs() {
    let run = run(&[])
        .step("text", says(SpanKind::ToolCall, "a"))
        .step("write", writes("tool", "{{ text }}").executable())
        .step("test", sh("is tool").sees(&["tool"], &[]))
        .recorded();
    run.fork("text", json!([output("b")]))
        .tells(&[
            "text: overridden (PatchedInput) -> overridden",
            "write: will run (UpstreamOutputChanged) -> ran",
            "test: will run (WorkspaceChanged) -> ran",
        ])
        .gives("test", "a program")
        .has("tool", "x b");
}

#[test]
fn who_lists_a_folder_notices_a_new_file_in_it_and_none_beside_it() {
    let run = run(&[("src/a", "1"), ("doc", "1")])
        .step("begin", sh("echo x").sees(&[], &[]))
        .step("list", sh("ls src").sees(&["src/"], &[]))
        .recorded();
    run.fork("begin", json!([file("src/b", "2")])).tells(&["list: will run (WorkspaceChanged) -> ran"]).gives("list", "a b");
    run.fork("begin", json!([file("doc", "2")])).tells(&[]);
    run.fork("begin", json!([file("src2", "2")])).tells(&[]);
}

#[test]
fn who_tests_for_a_folder_does_not_see_what_is_in_it() {
    let run = run(&[])
        .step("make", sh("mkdir src; echo 1 > src/a").sees(&[], &["src/"]))
        .step("test", sh("is src").sees(&["src"], &[]))
        .recorded();
    run.fork("test", json!([file("src/b", "2")])).tells(&["test: may run (WorkspaceChanged) -> reused"]).has("src/b", "2");
}

#[test]
fn a_step_that_no_longer_writes_its_file_leaves_what_was_there() {
    let run = run(&[("conf", "old")])
        .step("make", sh("echo new > conf").sees(&[], &["conf"]))
        .step("use", sh("cat conf").sees(&["conf"], &[]))
        .recorded();
    run.fork("make", json!([script_that_sees("echo nothing", &[], &["conf"])])).gives("use", "old").has("conf", "old");
    // Even one that says it writes nothing: what it wrote when recorded may be missing now.
    run.fork("make", json!([script_that_sees("echo nothing", &[], &[])]))
        .tells(&["make: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> ran"])
        .gives("use", "old");
}

#[test]
fn a_step_that_writes_a_new_file_reaches_who_may_see_it() {
    let run = run(&[("conf", "old")])
        .step("make", sh("echo hi").sees(&[], &[]))
        .step("use", sh("is extra").sees(&["extra"], &[]))
        .step("other", sh("cat conf").sees(&["conf"], &[]))
        .recorded();
    run.fork("make", json!([script("echo 1 > extra")]))
        .tells(&[
            "make: will run (PatchedInput) -> ran",
            "use: may run (WorkspaceChanged) -> ran",
            "other: may run (WorkspaceChanged) -> reused",
        ])
        .gives("use", "a file");
    // A file that it does not declare ends the fork.
    let fork = run.fork("make", json!([script_that_sees("echo 1 > extra", &[], &["more"])]));
    assert_eq!(fork.ended(), "\"make\" changed \"extra\", which it does not declare");
}

#[test]
fn a_change_outside_of_what_was_declared_voids_the_declaration() {
    let run = run(&[("conf", "old")])
        .step("begin", sh("echo x").sees(&[], &[]))
        .step("make", sh("echo 1 > stray; echo made").sees(&[], &[]))
        .step("use", sh("is stray").sees(&["stray"], &[]))
        .recorded();
    let fork = run.fork("begin", json!([file("conf", "new")]));
    fork.tells(&["make: will run (WorkspaceChanged) -> ran", "use: may run (WorkspaceChanged) -> reused"]);
    assert!(fork.warnings().contains("\"make\" changed \"stray\" when recorded, outside of what it declares to write"));
}

#[test]
fn a_workspace_that_differs_and_is_equal_again_is_as_recorded() {
    let run = run(&[])
        .step("make", sh("echo $V > tmp").env("V", "0").sees(&[], &["tmp"]))
        .step("clean", sh("rm tmp").sees(&[], &["tmp"]))
        .step("all", sh("ls tmp; echo done"))
        .recorded();
    run.fork("make", json!([env("V", "1")]))
        .tells(&[
            "make: will run (PatchedInput) -> ran",
            "clean: may run (WorkspaceChanged) -> ran",
            "all: may run (WorkspaceChanged) -> reused",
        ])
        .has("tmp", "nothing");
}

#[test]
fn what_a_write_sets_is_as_recorded_whatever_was_there_before() {
    let run = run(&[])
        .step("make", sh("echo $V > conf").env("V", "0").sees(&[], &["conf"]))
        .step("write", writes("conf", "fixed"))
        .step("all", sh("cat conf"))
        .recorded();
    run.fork("make", json!([env("V", "1")])).tells(&["make: will run (PatchedInput) -> ran"]).has("conf", "fixed");
}

#[test]
fn what_changed_between_two_steps_happens_again_and_is_told_where_it_meets_the_forks_own() {
    let run = run(&[("conf", "0")])
        .step("make", sh("echo $V > conf").env("V", "1").sees(&[], &["conf"]))
        .meanwhile("echo between > conf; echo 1 > other")
        .step("use", sh("cat conf").sees(&["conf"], &[]))
        .recorded();
    let fork = run.fork("make", json!([env("V", "2")]));
    fork.tells(&["make: will run (PatchedInput) -> ran"]).has("conf", "between").has("other", "1");
    assert!(fork.warnings().contains("\"conf\" was changed outside of any span before \"use\""), "{}", fork.warnings());
}

#[test]
fn a_step_that_nothing_reaches_must_find_its_files_as_recorded() {
    let run = run(&[("seen", "0")])
        .step("make", sh("echo $V > made").env("V", "0").sees(&[], &["made"]))
        .step("look", sh("cat seen").sees(&["seen"], &[]))
        .recorded();
    let meddled = run.fork_meddled_with("make", json!([env("V", "1")]), "seen");
    assert_eq!(
        meddled.ended(),
        "span \"look\" should see seen as recorded, and it is not; a span before it wrote outside of what it declared"
    );
    assert_eq!(run.fork_meddled_with("make", json!([env("V", "1")]), "unseen").ended(), "it did not end early");
}
