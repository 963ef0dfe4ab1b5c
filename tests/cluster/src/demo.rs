//! The demo: what a user does, from nothing to a diff. Record a run, fork it, wait, look.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::command::{feed, output, run};
use crate::images;
use crate::interrupt;
use crate::packages::{self, Purpose};
use crate::parts::Part;
use crate::phase::{note, phase};
use crate::place::{Current, Place};
use crate::product::{Product, Profile};
use crate::workspace;

/// The namespace of the example agent.
const AGENTS: &str = "agents";

/// The name that the example agent asks for its run, and that of its pod.
const RUN: &str = "scripted-agent";

/// The example's fork.
const FORK: &str = "shorter-wait";

/// How long the agent, or the fork, may take; each takes a few seconds.
const STEP: Duration = Duration::from_secs(180);

/// Where the user wants it.
#[derive(Debug)]
pub enum Wish {
    /// On a cluster of its own.
    Own,
    /// On the one of the user's kubeconfig.
    Current { registry: Option<String>, database_url: Option<String> },
}

/// When the demo ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// When the user says so.
    OnInterrupt,
    /// After its last step.
    Once,
}

/// Runs the demo to its end.
pub fn run_demo(wish: Wish, end: End) -> Result<()> {
    let started = Instant::now();
    let project = workspace::project();
    packages::ensure(Purpose::Cluster)?;
    let current = match wish {
        Wish::Own => None,
        Wish::Current { registry, database_url } => Some(Current::confirm(registry, database_url, &[AGENTS])?),
    };
    if current.is_none() {
        Part::ALL.iter().try_for_each(|part| part.build().map(drop))?;
    }
    let product = Product::build(&project, Profile::Dev)?;
    let images = images::build(&project, &product)?;
    let place = match current {
        Some(current) => Place::current(current, &product, &images, &[AGENTS])?,
        None => Place::own(&product, &images, &[AGENTS])?,
    };
    phase("installing the chart", || place.install.run(&place.kube, &project))?;
    let viewer = Demo { place: &place, project: &project }.play()?;
    println!("\nup after {} s\n", started.elapsed().as_secs());
    println!("  the viewer   {}", viewer.address);
    match &place.own {
        Some(cluster) => println!("  a shell      source {}", cluster.write_env(&place.kube)?.display()),
        None => println!("  a shell      export PATH={}:$PATH", product.programs().display()),
    }
    println!("               kubectl replay runs -n {AGENTS}");
    if end == End::OnInterrupt {
        println!("\nCtrl-C ends it.");
        while !interrupt::asked() && !place.own.as_ref().is_some_and(|cluster| cluster.ended()) {
            std::thread::sleep(interrupt::SLICE);
        }
    }
    drop(viewer);
    phase("taking everything down", || {
        drop(place);
        Ok(())
    })
}

struct Demo<'a> {
    place: &'a Place,
    project: &'a Path,
}

impl Demo<'_> {
    fn play(&self) -> Result<Viewer> {
        let run = phase("running the example agent, recorded", || self.record())?;
        let fork = self.fork_manifest(&run)?;
        self.show(&["replay", "show", "-n", AGENTS, &run])?;

        note(&format!("What if the connection pool waited less? examples/forks/{FORK}.yaml"));
        let name = if run == RUN { FORK.to_owned() } else { format!("{FORK}{}", run.trim_start_matches(RUN)) };
        let file = format!("examples/forks/{FORK}.yaml");
        self.show_with(&["replay", "plan", "-n", AGENTS, "-f", "-"], &file, &fork)?;
        phase(&format!("kubectl apply -f {file}; kubectl wait --for=condition=Finished"), || {
            self.place.kube.apply_in(AGENTS, &fork)?;
            self.finished(&name)
        })?;
        self.show(&["replay", "diff", "-n", AGENTS, &name])?;
        phase("opening the viewer", || Viewer::open(self.place))
    }

    /// Runs the agent's pod to its end and returns the name that its run got.
    fn record(&self) -> Result<String> {
        let kube = &self.place.kube;
        // On a cluster of the user's, an earlier demo may have left one.
        run(&mut kube.kubectl(["delete", "pod", RUN, "-n", AGENTS, "--ignore-not-found", "--wait"]))?;
        kube.apply_in(AGENTS, &self.place.localized(&self.project.join("examples/scripted-agent/pod.yaml"))?)?;
        let ended = kube.wait_for_value(&["pod", RUN, "-n", AGENTS], "{.status.phase}", &["Succeeded", "Failed"], STEP);
        let log = || output(&mut kube.kubectl(["logs", RUN, "-n", AGENTS, "--all-containers", "--tail=40"])).unwrap_or_default();
        let phase = ended.with_context(|| format!("the agent's pod did not end; its log:\n{}", log()))?;
        ensure!(phase == "Succeeded", "the agent's pod failed; its log:\n{}", log());
        let log = log();
        let name = log.lines().find_map(|line| line.strip_prefix("run "));
        let name = name.with_context(|| format!("the agent's log names no run:\n{log}"))?.trim().to_owned();
        if name != RUN {
            note(&format!("a run named {RUN} was there already, so this one is {name}; the manifests are applied with that name"));
        }
        Ok(name)
    }

    /// The fork's manifest, for the run's real name.
    fn fork_manifest(&self, run: &str) -> Result<String> {
        let text = self.place.localized(&self.project.join(format!("examples/forks/{FORK}.yaml")))?;
        let suffix = run.strip_prefix(RUN).with_context(|| format!("the run is named {run}, which doesn't begin with {RUN}"))?;
        Ok(text.replace(&format!("run: {RUN}"), &format!("run: {run}")).replace(&format!("name: {FORK}"), &format!("name: {FORK}{suffix}")))
    }

    /// Waits for the fork's end; anything but success is an error that shows what the fork says.
    fn finished(&self, name: &str) -> Result<()> {
        let kube = &self.place.kube;
        let object = format!("replayfork/{name}");
        let limit = format!("--timeout={}s", STEP.as_secs());
        let waited = run(&mut kube.kubectl(["wait", "--for=condition=Finished", &object, "-n", AGENTS, &limit]));
        let status = "{range .status.conditions[*]}{.type}={.status} {.reason}: {.message}{\"\\n\"}{end}";
        let conditions = output(&mut kube.kubectl(["get", &object, "-n", AGENTS, "-o", &format!("jsonpath={status}")]))?;
        waited.with_context(|| format!("the fork did not finish; it says\n{conditions}"))?;
        ensure!(conditions.contains("Succeeded=True"), "the fork did not succeed; it says\n{conditions}");
        Ok(())
    }

    /// Runs a `kubectl` command that the user should see, with its output.
    fn show(&self, arguments: &[&str]) -> Result<()> {
        self.show_with(arguments, "", "")
    }

    /// Does so with the content of a file, or what became of it here, on its standard input.
    fn show_with(&self, arguments: &[&str], file: &str, content: &str) -> Result<()> {
        interrupt::check()?;
        let from = if file.is_empty() { String::new() } else { format!(" < {file}") };
        println!("\n$ kubectl {}{from}", arguments.join(" "));
        let text = feed(&mut self.place.kube.kubectl(arguments), content)?;
        println!("{}\n", text.trim_end());
        Ok(())
    }
}

/// `kubectl replay ui`, which ends with this value.
struct Viewer {
    child: Child,
    address: String,
}

impl Viewer {
    /// Starts it and waits until the address that it prints answers.
    fn open(place: &Place) -> Result<Self> {
        let mut child = place
            .kube
            .kubectl(["replay", "ui", "-n", AGENTS])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("can't start kubectl")?;
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut viewer = Self { child, address: String::new() };
        let (found, address) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some(word) = line.split_whitespace().find(|word| word.starts_with("http://")) {
                    let _ = found.send(word.to_owned());
                }
            }
        });
        viewer.address = address.recv_timeout(STEP).context("`kubectl replay ui` printed no address")?;
        viewer.answers()?;
        Ok(viewer)
    }

    fn answers(&self) -> Result<()> {
        let rest = self.address.trim_start_matches("http://");
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let mut stream = TcpStream::connect(host).with_context(|| format!("nothing listens on {host}"))?;
        stream.set_read_timeout(Some(STEP))?;
        write!(stream, "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.take(64).read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        match answer.split_whitespace().nth(1).and_then(|code| code.parse::<u16>().ok()) {
            Some(200..=399) => Ok(()),
            _ => bail!("the viewer's address answers {:?}", answer.lines().next().unwrap_or_default()),
        }
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        if let Err(error) = interrupt::end_group(&mut self.child) {
            eprintln!("`kubectl replay ui` can't be ended: {error}");
        }
    }
}
