//! The cluster is a real one, does what tests ask of it, and leaves nothing behind.

use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use replayfork_test_cluster::command::{output, run};
use replayfork_test_cluster::images::{self, Image};
use replayfork_test_cluster::product::{Product, Profile};
use replayfork_test_cluster::traces::Traces;
use replayfork_test_cluster::{Cluster, Options, interrupt, workspace};

/// How long a pod, or a policy, may take.
const LIMIT: Duration = Duration::from_secs(60);

const NAMESPACE: &str = "harness";

fn main() -> ExitCode {
    if let Some(code) = replayfork_test_cluster::take_role() {
        return code;
    }
    match interrupt::install().and_then(|()| all()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every check and returns how many failed.
fn all() -> Result<usize> {
    let before = Traces::take()?;
    let project = workspace::project();
    let product = Product::build(&project, Profile::Dev)?;
    let images = images::build(&project, &product)?;
    let options = Options { gvisor: true, postgres: true, images: images.into_iter().map(|built| built.archive).collect(), state: None };
    let cluster = Cluster::start(options)?;
    pods(&cluster)?;
    let checks: [(&str, fn(&Cluster) -> Result<()>); 9] = [
        ("a pod finds a Service by name, under runc and gVisor", service_by_name),
        ("a NetworkPolicy lets in whom it names and no other", policy),
        ("a restricted namespace refuses a root pod", restricted),
        ("a listener inside the network is reached by pods", listener),
        ("a killed container is seen as failed", killed_container),
        ("Postgres keeps its data over a restart and a kill", postgres),
        ("pods survive a restart of kubelet", kubelet),
        ("a second cluster runs beside the first", second),
        ("a program that is killed leaves nothing", killed_program),
    ];
    let mut failed = 0;
    for (name, check) in checks {
        let result = catch_unwind(AssertUnwindSafe(|| check(&cluster))).unwrap_or_else(|_| bail!("it panicked"));
        println!("test {name} ... {}", if result.is_ok() { "ok" } else { "FAILED" });
        if let Err(error) = result {
            failed += 1;
            println!("{error:#}");
        }
    }
    drop(cluster);
    let left = Traces::take()?.since(&before);
    println!("test nothing is left behind ... {}", if left.is_empty() { "ok" } else { "FAILED" });
    left.iter().for_each(|line| println!("  {line}"));
    failed += usize::from(!left.is_empty());
    println!("{} passed, {failed} failed", checks.len() + 1 - failed);
    Ok(failed)
}

/// A server, and two clients of it: one under runc, one under gVisor.
fn pods(cluster: &Cluster) -> Result<()> {
    let kube = cluster.kube()?;
    kube.restricted_namespace(NAMESPACE)?;
    let server = r#"python3 -m http.server --directory /tmp 8000"#;
    let mut manifests = format!(
        "{{apiVersion: v1, kind: Service, metadata: {{name: web, namespace: {NAMESPACE}}}, spec: {{selector: {{app: web}}, ports: [{{port: 80, targetPort: 8000}}]}}}}\n"
    );
    for (name, class, command) in [("web", "", server), ("plain", "", "sleep 100000"), ("sandboxed", "gvisor", "sleep 100000")] {
        manifests.push_str(&format!("---\n{}", pod(name, class, command)));
    }
    kube.apply(&manifests)?;
    let limit = format!("--timeout={}s", LIMIT.as_secs());
    run(&mut kube.kubectl(["wait", "-n", NAMESPACE, "--for=condition=Ready", "pod", "--all", &limit]))
}

fn pod(name: &str, class: &str, command: &str) -> String {
    let class = if class.is_empty() { String::new() } else { format!("  runtimeClassName: {class}\n") };
    let command: Vec<_> = command.split(' ').map(|word| format!("\"{word}\"")).collect();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {NAMESPACE}, labels: {{app: {name}}}}}\nspec:\n\
         {class}  restartPolicy: Never\n  terminationGracePeriodSeconds: 1\n\
         \x20 securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}\n\
         \x20 containers:\n  - name: main\n    image: {}\n    command: [{}]\n\
         \x20   securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}\n",
        Image::ScriptedAgent.reference(),
        command.join(", ")
    )
}

/// What a pod gets from an address, or why not.
fn fetch(cluster: &Cluster, pod: &str, url: &str) -> Result<String> {
    let script = format!("import urllib.request as u; print(u.urlopen('{url}', timeout=2).status)");
    output(&mut cluster.kubectl(["exec", "-n", NAMESPACE, pod, "--", "python3", "-c", &script]))
}

fn until(what: &str, holds: impl Fn() -> bool) -> Result<()> {
    let end = Instant::now() + LIMIT;
    while !holds() {
        interrupt::check()?;
        ensure!(Instant::now() < end, "{what}: not within {} s", LIMIT.as_secs());
        std::thread::sleep(interrupt::SLICE);
    }
    Ok(())
}

fn service_by_name(cluster: &Cluster) -> Result<()> {
    for pod in ["plain", "sandboxed"] {
        // A pod's very first look-up can be lost, as on any cluster; clients ask again.
        until("the Service answers", || fetch(cluster, pod, "http://web/").is_ok_and(|status| status.trim() == "200"))?;
    }
    let kernel = output(&mut cluster.kubectl(["exec", "-n", NAMESPACE, "sandboxed", "--", "cat", "/proc/version"]))?;
    ensure!(kernel.contains("gvisor"), "the sandboxed pod runs on {kernel}");
    Ok(())
}

fn policy(cluster: &Cluster) -> Result<()> {
    cluster.kube()?.apply(&format!(
        "{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: web, namespace: {NAMESPACE}}}, spec: \
         {{podSelector: {{matchLabels: {{app: web}}}}, policyTypes: [Ingress], ingress: [{{from: [{{podSelector: \
         {{matchLabels: {{app: sandboxed}}}}}}]}}]}}}}"
    ))?;
    until("the policy holds", || fetch(cluster, "plain", "http://web/").is_err())?;
    ensure!(fetch(cluster, "sandboxed", "http://web/")?.trim() == "200", "the policy keeps out whom it names");
    Ok(())
}

fn restricted(cluster: &Cluster) -> Result<()> {
    let manifest = pod("root", "", "id").replace("runAsNonRoot: true", "runAsUser: 0");
    let error = cluster.kube()?.apply(&manifest).err().context("a root pod was let in")?;
    ensure!(format!("{error:#}").contains("violates PodSecurity"), "{error:#}");
    Ok(())
}

/// As tests do with a target that must be out of reach, here one that isn't.
fn listener(cluster: &Cluster) -> Result<()> {
    cluster.add_address("169.254.169.254")?;
    let listener = cluster.listen("169.254.169.254:80")?;
    let server = std::thread::spawn(move || -> Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.read(&mut [0; 1024])?;
        Ok(stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n")?)
    });
    ensure!(fetch(cluster, "plain", "http://169.254.169.254/")?.trim() == "200");
    server.join().expect("doesn't panic")
}

fn killed_container(cluster: &Cluster) -> Result<()> {
    let kube = cluster.kube()?;
    kube.apply(&pod("victim", "", "sleep 100000"))?;
    kube.wait_for_value(&["pod", "victim", "-n", NAMESPACE], "{.status.phase}", &["Running"], LIMIT)?;
    let pid = cluster.container_pid(NAMESPACE, "victim", "main")?;
    let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline"))?;
    ensure!(command.starts_with("sleep"), "{pid} is {command:?}");
    cluster.kill_container(NAMESPACE, "victim", "main")?;
    let code = "{.status.containerStatuses[0].state.terminated.exitCode}";
    kube.wait_for_value(&["pod", "victim", "-n", NAMESPACE], code, &["137"], LIMIT)?;
    Ok(())
}

fn postgres(cluster: &Cluster) -> Result<()> {
    let url = cluster.database_url()?;
    let ask = |sql: &str| output(Command::new("psql").args(["-qAt", "-v", "ON_ERROR_STOP=1", "-c", sql, &url]));
    ask("CREATE TABLE kept (n int); INSERT INTO kept VALUES (1)")?;
    cluster.restart_postgres()?;
    ask("INSERT INTO kept VALUES (2)")?;
    cluster.kill_component("postgres")?;
    ensure!(ask("SELECT 1").is_err(), "a killed Postgres answers");
    cluster.start_postgres()?;
    let kept = ask("SELECT sum(n) FROM kept")?;
    ensure!(kept.trim() == "3", "{kept}");
    Ok(())
}

fn kubelet(cluster: &Cluster) -> Result<()> {
    let started = || {
        let path = "{.status.containerStatuses[0].containerID}";
        cluster.kube()?.wait_for_value(&["pod", "plain", "-n", NAMESPACE], "{.status.phase}", &["Running"], LIMIT)?;
        output(&mut cluster.kubectl(["get", "pod", "plain", "-n", NAMESPACE, "-o", &format!("jsonpath={path}")]))
    };
    let before = started()?;
    cluster.kill_component("kubelet")?;
    cluster.start_component("kubelet")?;
    // Through kubelet, so it is up again.
    until("kubelet answers", || fetch(cluster, "sandboxed", "http://web/").is_ok())?;
    ensure!(started()? == before, "the container was started anew");
    Ok(())
}

fn second(cluster: &Cluster) -> Result<()> {
    let other = Cluster::start(Options::default())?;
    ensure!(other.addresses().node_ip() != cluster.addresses().node_ip());
    for cluster in [cluster, &other] {
        ensure!(output(&mut cluster.kubectl(["get", "--raw", "/readyz"]))? == "ok");
    }
    Ok(())
}

fn killed_program(_: &Cluster) -> Result<()> {
    let before = Traces::take()?;
    let mut program = Command::new(env!("CARGO_BIN_EXE_cluster"));
    let mut program = program.arg("up").stdout(Stdio::piped()).spawn()?;
    let mut said = String::new();
    let mut output = program.stdout.take().context("piped")?;
    while !said.contains("Ctrl-C ends it") {
        let mut piece = [0; 4096];
        let length = output.read(&mut piece)?;
        ensure!(length > 0, "it ended: {said}");
        said.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
    program.kill()?;
    program.wait()?;
    // Nobody waits for its keeper now, which needs a moment.
    let gone = || Traces::take().is_ok_and(|now| now.since(&before).is_empty());
    until("everything is gone", gone).with_context(|| Traces::take().map(|now| now.since(&before).join("\n")).unwrap_or_default())
}
