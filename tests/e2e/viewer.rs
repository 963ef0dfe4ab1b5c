//! The viewer, used in a real browser.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use replayfork_test_cluster::command::output;
use replayfork_test_cluster::{interrupt, workspace};
use replayfork_tests::place::Place;

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![e2e_viewer_shows_run_call_and_diff_in_a_browser];

/// `kubectl replay ui`, which ends with this value.
struct Viewer(Child);

impl Drop for Viewer {
    fn drop(&mut self) {
        if let Err(error) = interrupt::end_group(&mut self.0) {
            eprintln!("{error:#}");
        }
    }
}

fn e2e_viewer_shows_run_call_and_diff_in_a_browser(place: &Place) -> Result<()> {
    let run = place.record()?;
    let fork = place.fork(&place.example("shorter-wait")?)?;
    fork.succeeds()?;
    let mut kubectl = place.world.kube.kubectl(["replay", "ui", "-n", &place.namespace]);
    let child = kubectl.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn().context("can't start kubectl")?;
    let mut viewer = Viewer(child);
    let lines = BufReader::new(viewer.0.stdout.take().context("piped")?).lines();
    let (found, address) = mpsc::channel();
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if let Some(word) = line.split_whitespace().find(|word| word.starts_with("http://")) {
                let _ = found.send(word.to_owned());
            }
        }
    });
    let url = address.recv_timeout(Duration::from_secs(60)).context("`kubectl replay ui` printed no address")?;
    workspace::install_viewer_packages(&place.world.project)?;
    let folder = place.world.project.join("target/e2e/screenshots");
    let mut node = Command::new("node");
    node.current_dir(place.world.project.join("web")).args(["e2e/viewer.mjs", &url, &run, &fork.run()?]).arg(&folder);
    output(&mut node)?;
    let pictures = std::fs::read_dir(&folder)?.flatten().filter(|e| e.metadata().is_ok_and(|m| m.len() > 10_000)).count();
    ensure!(pictures >= 12, "there are {pictures} screenshots in {}", folder.display());
    Ok(())
}
