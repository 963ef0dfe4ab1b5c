//! After a restore, tools that go by modification times find nothing to do.

mod place;

use std::fs;
use std::process::Command;

use place::Place;

/// Runs a command in the workspace; what it says on both outputs.
fn run(place: &Place, command: &str) -> (bool, String) {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(&place.work).env("CARGO_TERM_COLOR", "never").env_remove("CARGO_TARGET_DIR");
    shell.env_remove("PYTHONDONTWRITEBYTECODE");
    let done = shell.output().unwrap();
    (done.status.success(), String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned())
}

/// Builds, wipes the workspace and restores it; what the tool then says.
fn again(place: &mut Place, build: &str, probe: &str) -> String {
    let (built, said) = run(place, build);
    assert!(built, "{build}: {said}");
    let built = place.capture();
    fs::remove_dir_all(&place.work).unwrap();
    fs::create_dir(&place.work).unwrap();
    place.restore(None, &built);
    let (fine, said) = run(place, probe);
    assert!(fine, "{probe}: {said}");
    said
}

#[test]
fn make_finds_everything_up_to_date() {
    let mut place = Place::new();
    fs::write(place.work.join("Makefile"), "all: out/b\nout/b: out/a\n\tcp out/a out/b\nout/a: src\n\tmkdir -p out && cp src out/a\n")
        .unwrap();
    fs::write(place.work.join("src"), "x").unwrap();
    again(&mut place, "make", "make --question");
    // It would have noticed.
    fs::write(place.work.join("src"), "y").unwrap();
    assert!(!run(&place, "make --question").0);
}

#[test]
fn cargo_finds_everything_fresh() {
    let mut place = Place::new();
    fs::create_dir(place.work.join("src")).unwrap();
    fs::write(place.work.join("Cargo.toml"), "[package]\nname = \"tiny\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n").unwrap();
    fs::write(place.work.join("src/main.rs"), "fn main() {}\n").unwrap();
    let said = again(&mut place, "cargo build --offline", "cargo build --offline --verbose");
    assert!(said.contains("Fresh tiny") && !said.contains("Compiling"), "{said}");
}

#[test]
fn python_takes_its_compiled_modules() {
    let mut place = Place::new();
    fs::write(place.work.join("tiny.py"), "X = 1\n").unwrap();
    let said = again(&mut place, "python3 -c 'import tiny'", "python3 -v -c 'import tiny'");
    assert!(said.lines().any(|l| l.contains("tiny") && l.contains("matches")), "{said}");
    assert!(!said.lines().any(|l| l.contains("tiny") && l.contains("wrote")), "{said}");
}
