//! Memory kills, as the container's own cgroup counts them.

use std::fs;

/// cgroup v2, then v1.
const COUNTERS: [&str; 2] = ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"];

/// How many processes of this container were killed for memory so far; 0 where that is not told.
pub fn oom_kills() -> u64 {
    let text = COUNTERS.iter().find_map(|path| fs::read_to_string(path).ok()).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
}
