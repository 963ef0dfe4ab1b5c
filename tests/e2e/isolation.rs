//! What a command in a sandbox can't do: read a credential, reach an address, speak to the courier, outlive its step.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use replayfork_test_cluster::command::output;
use replayfork_tests::fork::{Fork, OBJECTS, manifest, processes, script};
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::until;
use replayfork_tests::world::World;
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![
    e2e_sandbox_has_no_credential_and_reaches_the_api_server_alone,
    e2e_nothing_that_a_step_starts_can_speak_to_the_courier,
    e2e_background_processes_of_a_step_are_gone_in_the_next,
    e2e_fork_under_gvisor_gives_the_same_result,
];

/// The address at which clouds hand out credentials; here the tests themselves listen.
const METADATA: &str = "169.254.169.254";
static REACHED: AtomicUsize = AtomicUsize::new(0);

/// Listens where no sandbox may get.
pub fn prepare(world: &World) -> Result<()> {
    world.add_address(METADATA)?;
    let listener = world.listen(&format!("{METADATA}:80"))?;
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            REACHED.fetch_add(1, Ordering::SeqCst);
            let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n");
        }
    });
    Ok(())
}

/// A patch that lets a span run this Python program.
fn python(span: &str, program: &str, arguments: &[&str]) -> Value {
    let argv = [&["python3", "-c", program], arguments].concat();
    json!({"type": "CommandOverride", "span": span, "command": {"argv": argv}})
}

fn stdout(fork: &Fork, span: &str) -> Result<String> {
    let span = fork.place.span(&fork.run()?, span)?.span;
    let output = span.output().with_context(|| format!("no output: {:?}", span.closing))?;
    ensure!(output.exit_code == Some(0), "the step ended with {:?}: {}", output.exit_code, output.stderr);
    Ok(output.stdout.clone())
}

/// Tells which of the addresses it is given take a connection, what it finds in the container, and what it can write.
const LOOK_AROUND: &str = r#"
import json, os, socket, sys
def connects(address):
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        return True
    except OSError: return False
def writes(path):
    try:
        open(os.path.join(path, "x"), "w").close()
        return True
    except OSError: return False
tokens = [os.path.join(d, f) for top in ("/var/run", "/run", "/replayfork") for d, _, fs in os.walk(top) for f in fs]
def readable(path):
    try: return open(path, "rb").read(1 << 20)
    except OSError: return b""
def environ(pid):
    return readable("/proc/" + pid + "/environ").decode(errors="replace")
status = dict(l.split(":", 1) for l in open("/proc/self/status").read().splitlines())
print(json.dumps(dict(
    reached=[a for a in sys.argv[1:] if connects(a)],
    environment=sorted(os.environ),
    others=[environ(p) for p in os.listdir("/proc") if p.isdigit() and p not in (str(os.getpid()), "self")],
    files=tokens,
    jwt=[p for p in tokens if readable(p).startswith(b"eyJ")],
    written=[p for p in ("/", "/replayfork/control", "/replayfork/bin", "/etc") if writes(p)],
    uid=os.getuid(), capabilities=status["CapEff"].strip(), seccomp=status["Seccomp"].strip(), privileges=status["NoNewPrivs"].strip(),
)))
"#;

fn e2e_sandbox_has_no_credential_and_reaches_the_api_server_alone(place: &Place) -> Result<()> {
    place.record()?;
    let labels = output(&mut place.world.kube.kubectl(["get", "namespace", &place.namespace, "-o", "jsonpath={.metadata.labels}"]))?;
    ensure!(labels.contains("\"pod-security.kubernetes.io/enforce\":\"restricted\""), "the namespace has the labels {labels}");
    let service = output(&mut place.world.kube.kubectl(["get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIP}"]))?;
    let (api, node) = (place.world.api_address()?, place.world.addresses().node_ip());
    let allowed = format!("{api}:3210");
    let metadata = format!("{METADATA}:80");
    let addresses = [
        allowed.clone(),
        format!("{api}:3212"),
        format!("{service}:443"),
        format!("{node}:6443"),
        format!("{node}:10250"),
        format!("{node}:5432"),
        format!("{node}:53"),
        metadata.clone(),
    ];
    let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
    // Without a policy a pod does reach them, so that it is the policy that is seen at work.
    let free = from_a_free_pod(place, &[&metadata, &format!("{service}:443")])?;
    ensure!(
        free == [metadata.as_str(), &format!("{service}:443")] && REACHED.load(Ordering::SeqCst) == 1,
        "a free pod reaches only {free:?}"
    );

    let fork = place.fork(&manifest("curious", AGENT, "lint", json!([python("lint", LOOK_AROUND, &addresses)]), json!({})))?;
    fork.succeeds()?;
    let seen: Value = serde_json::from_str(&stdout(&fork, "lint")?)?;
    ensure!(seen["reached"] == json!([allowed]) && REACHED.load(Ordering::SeqCst) == 1, "the sandbox reaches {}", seen["reached"]);
    let recorded = json!(["AUTH_POOL_TIMEOUT", "HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE"]);
    ensure!(seen["environment"] == recorded, "the step's environment is {}", seen["environment"]);
    ensure!(seen["jwt"] == json!([]), "there is a token in {}", seen["jwt"]);
    let others = seen["others"].to_string();
    ensure!(!others.contains("REPLAYFORK") && !others.contains("KUBERNETES_SERVICE_TOKEN"), "another process has {others}");
    ensure!(seen["written"] == json!([]), "the step wrote to {}", seen["written"]);
    ensure!(seen["uid"] == 1000 && seen["capabilities"] == "0000000000000000", "{seen}");
    ensure!(seen["seccomp"] == "2" && seen["privileges"] == "1", "{seen}");
    // By the pod's own shape too: the executor mounts no token.
    let pod = fork.pods()?.into_iter().next().and_then(|p| p.spec).context("no pod")?;
    let executor = pod.containers.iter().find(|c| c.name == "executor").context("no executor")?;
    ensure!(executor.volume_mounts.iter().flatten().all(|m| m.name != "token"), "the executor mounts the token");
    ensure!(executor.env.iter().flatten().count() == 0 && pod.automount_service_account_token == Some(false));
    Ok(())
}

/// Which of these a pod reaches that no policy selects.
fn from_a_free_pod(place: &Place, addresses: &[&str]) -> Result<Vec<String>> {
    let mut objects = place.agent()?;
    let pod = objects.iter_mut().find(|o| o["kind"] == "Pod").context("the example has no pod")?;
    pod["metadata"] = json!({"name": "free"});
    let mut container = pod["spec"]["containers"][0].clone();
    let argv = [&["python3", "-c", LOOK_AROUND], addresses].concat();
    container["command"] = json!(argv);
    pod["spec"]["containers"] = json!([container]);
    let workspace = pod["spec"]["initContainers"][0].clone();
    pod["spec"]["initContainers"] = json!([workspace]);
    place.apply(&pod.to_string())?;
    place.world.kube.wait_for_value(&["pod", "free", "-n", &place.namespace], "{.status.phase}", &["Succeeded"], OBJECTS)?;
    let seen: Value = serde_json::from_str(&output(&mut place.kubectl(["logs", "free"]))?)?;
    Ok(serde_json::from_value(seen["reached"].clone())?)
}

/// Leaves a process behind that knocks at every port of loopback, over and over, and writes down where somebody answers.
const KNOCK: &str = r#"
import os, socket, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    while True:
        for port in range(1, 65536):
            s = socket.socket()
            s.settimeout(0.2)
            try:
                s.connect(("127.0.0.1", port))
                # A connection of a socket to itself is nobody's.
                if s.getsockname() != s.getpeername(): open("/workspace/answered", "a").write(str(port) + "\n")
            except OSError: pass
            s.close()
        open("/workspace/rounds", "a").write("round\n")
while True:
    try:
        if open("/workspace/rounds").read().count("round") >= 2: break
    except FileNotFoundError: pass
    time.sleep(0.05)
print(os.path.exists("/workspace/answered"))
"#;

/// Ports on which somebody listens in a process's network.
fn listening(pid: u32) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for file in ["tcp", "tcp6"] {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{file}"))?;
        let sockets = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        found.extend(sockets.filter(|words| words.get(3) == Some(&"0A")).map(|words| words[1].to_owned()));
    }
    Ok(found)
}

fn e2e_nothing_that_a_step_starts_can_speak_to_the_courier(place: &Place) -> Result<()> {
    place.record()?;
    let patches = json!([python("test_validate", KNOCK, &[]), script("lint", "cat rounds; test ! -e answered; exec sleep 63.1")]);
    let fork = place.fork(&manifest("knocking", AGENT, "test_validate", patches, json!({})))?;
    // In the second step, with the courier in the middle of its work: nobody listens in the pod, so nobody can be spoken to.
    fork.runs(&["sleep", "63.1"])?;
    ensure!(stdout(&fork, "test_validate")?.trim() == "False", "somebody answered a step");
    let pod = fork.pod()?;
    let executor = place.world.container_pid(&place.namespace, &pod, "executor")?;
    ensure!(listening(executor)?.is_empty(), "somebody listens in the pod: {:?}", listening(executor)?);
    fork.patch(json!({"cancel": true}))?;
    fork.ends_as("Canceled")?;

    // The knocking goes on while the courier is killed: it is over before anybody could answer.
    let patches = json!([python("lint", &KNOCK.replace(">= 2", ">= 2000000"), &[])]);
    let fork = place.fork(&manifest("orphaned", AGENT, "lint", patches, json!({})))?;
    let pod = until("the step knocks", Duration::from_secs(60), || Ok(knocking(&fork)?.then(|| fork.pod()).transpose()?))?;
    let executor = place.world.container_pid(&place.namespace, &pod, "executor")?;
    place.world.kill_container(&place.namespace, &pod, "courier")?;
    until("all that the step started is gone", OBJECTS, || {
        // As long as anything of it runs, nobody listens.
        let open = listening(executor).unwrap_or_default();
        ensure!(open.is_empty(), "somebody listens after the courier's death: {open:?}");
        Ok((!std::path::Path::new(&format!("/proc/{executor}")).exists()).then_some(()))
    })?;
    fork.ends_as("Interrupted").map(drop)
}

/// Whether the step that knocks has gone all ports once, as the node sees its workspace.
fn knocking(fork: &Fork) -> Result<bool> {
    let pods = fork.pods()?;
    let Some(uid) = pods.first().and_then(|p| p.metadata.uid.clone()) else { return Ok(false) };
    let file = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/workspace/workspace/rounds");
    Ok(output(fork.place.world.inside("cat").arg(file)).is_ok_and(|text| text.contains("round")))
}

fn e2e_background_processes_of_a_step_are_gone_in_the_next(place: &Place) -> Result<()> {
    place.record()?;
    let leave = r#"python3 -c "import os; os.fork() or (os.setsid(), os.execvp('sleep', ['sleep', '64.1']))" </dev/null >/dev/null 2>&1
sleep 64.2 & echo left"#;
    let look = "import os; print([l for p in os.listdir('/proc') if p.isdigit() for l in [open('/proc/' + p + '/cmdline').read()] if 'sleep' in l and p != str(os.getpid())])";
    let patches = json!([script("test_validate", leave), python("lint", look, &[])]);
    let fork = place.fork(&manifest("left-behind", AGENT, "test_validate", patches, json!({})))?;
    fork.succeeds()?;
    ensure!(stdout(&fork, "lint")?.trim() == "[]", "the next step finds {}", stdout(&fork, "lint")?);
    let left = place.span(&fork.run()?, "test_validate")?.span.closing.and_then(|c| c.error).unwrap_or_default();
    ensure!(left.contains("2 background processes were killed"), "the step says {left:?}");
    ensure!(processes(&["sleep", "64.1"]).is_empty() && processes(&["sleep", "64.2"]).is_empty(), "they still run");
    Ok(())
}

fn e2e_fork_under_gvisor_gives_the_same_result(place: &Place) -> Result<()> {
    place.record()?;
    let patches = || json!([{"type": "EnvVarOverride", "env": [{"name": "AUTH_POOL_TIMEOUT", "value": "0.05"}]}, script("lint", "cat /proc/version >&2; python3 lint.py auth; echo done >> marker")]);
    let plain = place.fork(&manifest("under-runc", AGENT, "test_validate", patches(), json!({})))?;
    // Executed there, too.
    let more = json!({"sandbox": {"runtimeClassName": "gvisor"}, "reuse": {"resultCache": false}});
    let gvisor = place.fork(&manifest("under-gvisor", AGENT, "test_validate", patches(), more))?;
    plain.succeeds()?;
    gvisor.succeeds()?;
    ensure!(plain.rows()? == gvisor.rows()?, "runc: {:?}\ngVisor: {:?}", plain.rows()?, gvisor.rows()?);
    for span in ["test_validate", "lint"] {
        let of = |fork: &Fork| -> Result<_> {
            let span = place.span(&fork.run()?, span)?.span;
            let output = span.output().cloned().context("no output")?;
            Ok((output.stdout, output.exit_code, span.snapshot_after.map(|s| s.content)))
        };
        ensure!(of(&plain)? == of(&gvisor)?, "{span}: {:?}\n{:?}", of(&plain)?, of(&gvisor)?);
    }
    let kernel =
        |fork: &Fork| -> Result<_> { Ok(place.span(&fork.run()?, "lint")?.span.output().map(|o| o.stderr.clone()).unwrap_or_default()) };
    ensure!(kernel(&gvisor)?.contains("gVisor") || kernel(&gvisor)?.contains("gvisor"), "the kernel is {}", kernel(&gvisor)?);
    ensure!(!kernel(&plain)?.to_lowercase().contains("gvisor"));
    Ok(())
}
