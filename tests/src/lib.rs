//! What the end-to-end tests and the benches share: the product on a real cluster, a namespace of it, a fork in there.
//! Nothing here decides whether the product is right; that is what scenarios are for.

pub mod admission;
pub mod certificate;
pub mod fork;
pub mod place;
pub mod postgres;
pub mod s3;
pub mod world;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use replayfork_test_cluster::interrupt;

/// How often a condition is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Looks until there is something to see, or until `limit` is over.
///
/// # Errors
/// Nothing came within the limit; what a look itself says; an interrupt.
pub fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(seen) = look()? {
            return Ok(seen);
        }
        interrupt::check()?;
        if Instant::now() > end {
            bail!("{what}: not within {} s", limit.as_secs());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
