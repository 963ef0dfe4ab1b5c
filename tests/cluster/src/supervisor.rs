//! Runs inside the cluster's namespaces: starts the components in order, watches them, and stops or starts one when
//! a test asks for it. Its end is the cluster's end.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::command::{append, output, run, run_logged, succeeds, tail};
use crate::components::{CONTAINERD_SOCKET, Component};
use crate::pki::NODE;
use crate::spec::{Event, Spec};
use crate::{config, mounts, postgres};

/// How long a component may take until it answers; two busy cores need a tenth of it.
const ANSWERING: Duration = Duration::from_secs(120);

/// How long a component may take to end after it was told to.
const ENDING: Duration = Duration::from_secs(30);

pub(crate) fn main(state: &Path) -> ExitCode {
    // The keeper's end, or its wish: either ends this process, and with it the namespaces.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    match supervise(state) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            Event::Failed { message: format!("{error:#}") }.tell();
            ExitCode::FAILURE
        }
    }
}

fn supervise(state: &Path) -> Result<()> {
    let supervisor = Supervisor { spec: Spec::read(state)?, running: Arc::default() };
    fs::create_dir_all(supervisor.spec.log())?;
    fs::create_dir_all(supervisor.spec.run())?;
    Event::Entered.tell();
    supervisor.enter()?;
    let control = UnixListener::bind(supervisor.spec.control()).context("can't make the control socket")?;
    supervisor.start_all()?;
    Event::Ready.tell();
    for request in control.incoming() {
        supervisor.serve(request?)?;
    }
    Ok(())
}

/// The components that run, by name.
#[derive(Default)]
struct Running {
    pids: Mutex<HashMap<Component, Pid>>,
    /// Told whenever a component ends.
    ended: Condvar,
}

impl Running {
    fn pids(&self) -> MutexGuard<'_, HashMap<Component, Pid>> {
        self.pids.lock().expect("no thread panics while it holds the table")
    }
}

struct Supervisor {
    spec: Spec,
    running: Arc<Running>,
}

impl Supervisor {
    /// Makes the namespaces a machine of their own: mounts, files, network.
    fn enter(&self) -> Result<()> {
        mounts::make(&self.spec)?;
        config::write(&self.spec)?;
        let ip = |arguments: &[&str]| run(Command::new("ip").args(arguments));
        ip(&["link", "set", "lo", "up"])?;
        // The keeper gives this end of the link to the namespace.
        self.until("the link to this machine", || succeeds(Command::new("ip").args(["link", "show", "eth0"])))?;
        ip(&["address", "add", &format!("{}/24", self.spec.addresses().node_ip()), "dev", "eth0"])?;
        ip(&["link", "set", "eth0", "up"])?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
        Ok(())
    }

    /// Starts everything; what doesn't depend on each other at the same time.
    fn start_all(&self) -> Result<()> {
        std::thread::scope(|scope| {
            let database = scope.spawn(|| self.start_postgres());
            let images = scope.spawn(|| self.start_containerd());
            self.start(Component::Etcd)?;
            self.start(Component::ApiServer)?;
            self.until_answers(Component::ApiServer, || succeeds(self.kubectl().args(["get", "--raw", "/readyz"])))?;
            for component in [Component::ControllerManager, Component::Scheduler, Component::KubeProxy, Component::Coredns] {
                self.start(component)?;
            }
            run(self.kubectl().args(["apply", "-f"]).arg(self.spec.run().join("cluster.yaml")))?;
            images.join().expect("doesn't panic")?;
            self.start(Component::Kubelet)?;
            self.until_answers(Component::Kubelet, || {
                let ready = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status}";
                output(self.kubectl().args(["get", "node", NODE, "-o", ready])).is_ok_and(|status| status == "True")
            })?;
            // It reads the node's pod network once, at its start.
            self.start(Component::KubeRouter)?;
            // A pod that is created before its ServiceAccount is refused.
            self.until_answers(Component::ControllerManager, || {
                succeeds(self.kubectl().args(["-n", "default", "get", "serviceaccount", "default"]))
            })?;
            self.until_answers(Component::Coredns, || TcpStream::connect((self.spec.addresses().node_ip(), 53)).is_ok())?;
            database.join().expect("doesn't panic")
        })
    }

    fn start_postgres(&self) -> Result<()> {
        let Some(database) = &self.spec.postgres else {
            return Ok(());
        };
        postgres::prepare(&self.spec, database)?;
        self.start(Component::Postgres)?;
        self.until_answers(Component::Postgres, || postgres::answers(&self.spec))?;
        postgres::populate(&self.spec, database)
    }

    fn start_containerd(&self) -> Result<()> {
        self.start(Component::Containerd)?;
        self.until_answers(Component::Containerd, || succeeds(self.ctr().arg("version")))?;
        for image in std::iter::once(&self.spec.pause).chain(&self.spec.images) {
            run_logged(self.ctr().args(["-n", "k8s.io", "images", "import"]).arg(image), &self.spec.log().join("import.log"))?;
        }
        Ok(())
    }

    fn kubectl(&self) -> Command {
        let mut kubectl = Command::new(self.spec.parts.kube.join("kubectl"));
        kubectl.arg("--kubeconfig").arg(self.spec.kubeconfig());
        kubectl
    }

    fn ctr(&self) -> Command {
        let mut ctr = Command::new(self.spec.parts.containerd.join("ctr"));
        ctr.args(["-a", CONTAINERD_SOCKET]);
        ctr
    }

    /// Starts a component and watches it in a thread of its own.
    fn start(&self, component: Component) -> Result<()> {
        let mut pids = self.running.pids();
        if pids.contains_key(&component) {
            bail!("{} is already running", component.name());
        }
        let log = append(&component.log(&self.spec))?;
        let mut command = component.command(&self.spec)?;
        let command = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut child = command.spawn().with_context(|| format!("can't start {}", component.name()))?;
        let pid = Pid::from_child(&child);
        pids.insert(component, pid);
        drop(pids);
        let (running, log) = (Arc::clone(&self.running), component.log(&self.spec));
        std::thread::spawn(move || {
            let status = child.wait();
            // One that was told to stop has left the table already.
            let unasked = running.pids().get(&component) == Some(&pid);
            if unasked {
                running.pids().remove(&component);
                let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                let message = format!("it ended ({status}); the end of {}:\n{}", log.display(), tail(&log));
                Event::Ended { component: component.name().to_owned(), message }.tell();
            }
            running.ended.notify_all();
        });
        Ok(())
    }

    /// Sends a signal to a component and waits for its end.
    fn stop(&self, component: Component, signal: Signal) -> Result<()> {
        let pid = self.running.pids().remove(&component);
        let pid = pid.with_context(|| format!("{} is not running", component.name()))?;
        kill_process(pid, signal).with_context(|| format!("can't signal {}", component.name()))?;
        let gone = || rustix::process::test_kill_process(pid).is_err();
        let waited = self.running.ended.wait_timeout_while(self.running.pids(), ENDING, |_| !gone());
        if waited.expect("no thread panics while it holds the table").1.timed_out() {
            bail!("{} did not end within {} s", component.name(), ENDING.as_secs());
        }
        Ok(())
    }

    /// Waits until a component answers; fails at once when it ended.
    fn until_answers(&self, component: Component, answers: impl Fn() -> bool) -> Result<()> {
        let log = component.log(&self.spec);
        let hint = || format!("the end of {}:\n{}", log.display(), tail(&log));
        wait_for(ANSWERING, || {
            if !self.running.pids().contains_key(&component) {
                bail!("{} ended; {}", component.name(), hint());
            }
            Ok(answers())
        })?
        .then_some(())
        .with_context(|| format!("{} did not answer within {} s; {}", component.name(), ANSWERING.as_secs(), hint()))
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) -> Result<()> {
        wait_for(ANSWERING, || Ok(holds()))?.then_some(()).with_context(|| format!("{what} did not come up"))
    }

    /// Answers one request; only a broken socket is an error of the supervisor's own.
    fn serve(&self, stream: UnixStream) -> Result<()> {
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        let answer = serde_json::from_str(&line).map_err(anyhow::Error::from).and_then(|request| self.carry_out(&request));
        let answer = Answer { error: answer.err().map(|error| format!("{error:#}")) };
        writeln!(&stream, "{}", serde_json::to_string(&answer)?)?;
        Ok(())
    }

    fn carry_out(&self, request: &Request) -> Result<()> {
        let component = |name: &str| Component::named(name).with_context(|| format!("there is no component {name}"));
        match request {
            Request::Start { component: name } => {
                let component = component(name)?;
                self.start(component)?;
                match component {
                    Component::Postgres => self.until_answers(component, || postgres::answers(&self.spec)),
                    Component::ApiServer => self.until_answers(component, || succeeds(self.kubectl().args(["get", "--raw", "/readyz"]))),
                    _ => Ok(()),
                }
            }
            Request::Stop { component: name } => {
                let component = component(name)?;
                // Postgres waits for its clients on SIGTERM; SIGINT is its fast shutdown.
                self.stop(component, if component == Component::Postgres { Signal::INT } else { Signal::TERM })
            }
            Request::Kill { component: name } => self.stop(component(name)?, Signal::KILL),
        }
    }
}

/// What a test asks of the supervisor, one JSON object on a connection.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(crate) enum Request {
    Start { component: String },
    Stop { component: String },
    Kill { component: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub error: Option<String>,
}

/// Asks until it holds (true) or the time is over (false).
fn wait_for(limit: Duration, holds: impl Fn() -> Result<bool>) -> Result<bool> {
    let until = Instant::now() + limit;
    loop {
        if holds()? {
            return Ok(true);
        }
        if Instant::now() > until {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
