//! Whether the network policy holds: engines apply it about a second after a pod's start, and what must not leak waits for that.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;

/// How long the policy is waited for.
const PATIENCE: Duration = Duration::from_secs(30);
/// A connect that takes longer is one that the policy swallows.
const SWALLOWED: Duration = Duration::from_millis(250);
const EVERY: Duration = Duration::from_millis(100);
/// The api-server listens here always, and no sandbox policy opens it.
const PROBE_PORT: u16 = 3212;

/// Returns once, in one round, the api-server can be reached while the Kubernetes API and the probe port, tried twice each, can't.
///
/// # Errors
/// What could still be reached, or could not, when patience ran out.
pub async fn holds(api: SocketAddr, kubernetes_host: String, kubernetes_port: u16) -> Result<(), String> {
    let allowed = api.to_string();
    let forbidden = [format!("{}:{kubernetes_port}", bracketed(&kubernetes_host)), SocketAddr::new(api.ip(), PROBE_PORT).to_string()];
    let start = Instant::now();
    loop {
        let why = round(&allowed, &forbidden).await;
        match why {
            None => return Ok(()),
            Some(why) if start.elapsed() > PATIENCE => return Err(why),
            Some(_) => tokio::time::sleep(EVERY).await,
        }
    }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() }
}

async fn connects(address: &str, within: Duration) -> bool {
    matches!(tokio::time::timeout(within, TcpStream::connect(address)).await, Ok(Ok(_)))
}

async fn round(allowed: &str, forbidden: &[String; 2]) -> Option<String> {
    if !connects(allowed, Duration::from_secs(2)).await {
        return Some(format!("the api-server at {allowed} can't be reached"));
    }
    let [a, b] = forbidden;
    let (a1, a2, b1, b2) = tokio::join!(connects(a, SWALLOWED), connects(a, SWALLOWED), connects(b, SWALLOWED), connects(b, SWALLOWED));
    match (a1 || a2, b1 || b2) {
        (false, false) => None,
        (true, _) => Some(format!("no network policy holds: the Kubernetes API at {a} can be reached from the sandbox")),
        (_, true) => Some(format!("no network policy holds: {b} can be reached from the sandbox")),
    }
}
