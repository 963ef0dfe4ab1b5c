//! The processes of a pod's containers, for tests that end them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::attached::Attached;
use crate::command::{output, run};

impl Attached {
    /// Sends SIGKILL to the main process of a pod's container, as a crash would.
    pub fn kill_container(&self, namespace: &str, pod: &str, container: &str) -> Result<()> {
        run(self.ctr().args(["tasks", "kill", "--signal", "SIGKILL", &self.container(namespace, pod, container)?]))
    }

    /// The main process of a pod's container, as this machine numbers it: for `/proc`, or a signal.
    pub fn container_pid(&self, namespace: &str, pod: &str, container: &str) -> Result<u32> {
        let id = self.container(namespace, pod, container)?;
        let tasks = output(self.ctr().args(["tasks", "list"]))?;
        let inner = tasks.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some(&id)).then(|| words.next()?.parse::<u32>().ok()).flatten()
        });
        let inner = inner.with_context(|| format!("the container {container} of {namespace}/{pod} has no process"))?;
        self.outer_pid(inner)
    }

    /// The id of a pod's newest container of this name.
    pub fn container(&self, namespace: &str, pod: &str, container: &str) -> Result<String> {
        let labels = [("pod.namespace", namespace), ("pod.name", pod), ("container.name", container)];
        let filter = labels.map(|(key, value)| format!("labels.\"io.kubernetes.{key}\"=={value}")).join(",");
        let ids = output(self.ctr().args(["tasks", "list", "--quiet"]))?;
        let known = output(self.ctr().args(["containers", "list", "--quiet", &filter]))?;
        // A container that was restarted stays listed; the one with a process is meant.
        let mut known = known.lines();
        let id = known.find(|id| ids.lines().any(|running| running == *id));
        Ok(id.with_context(|| format!("no container {container} runs in the pod {namespace}/{pod}"))?.to_owned())
    }

    /// The number on this machine of a process that has the number `inner` inside the cluster.
    fn outer_pid(&self, inner: u32) -> Result<u32> {
        let namespace = fs::read_link(format!("/proc/{}/ns/pid_for_children", self.unshare))?;
        let (mut found, inner) = (None, inner.to_string());
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            // A process may end while it is looked at.
            let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else {
                continue;
            };
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
            // One number for each nested namespace, from this machine's inwards; the cluster's is the second.
            if numbers.split_whitespace().nth(1) == Some(&inner) && self.belongs(pid, &namespace) {
                found = Some(pid);
            }
        }
        found.with_context(|| format!("the process {inner} of the cluster has ended"))
    }

    /// Whether a process lives in the cluster's PID namespace or in one below it.
    fn belongs(&self, pid: u32, namespace: &Path) -> bool {
        let mut current = pid;
        while current > 1 {
            if current == self.init || fs::read_link(format!("/proc/{current}/ns/pid")).is_ok_and(|link| link == namespace) {
                return true;
            }
            let Ok(stat) = fs::read_to_string(format!("/proc/{current}/status")) else {
                return false;
            };
            let parent = stat.lines().find_map(|line| line.strip_prefix("PPid:")).and_then(|text| text.trim().parse().ok());
            let Some(parent) = parent else { return false };
            current = parent;
        }
        false
    }
}
