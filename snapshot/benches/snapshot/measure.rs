//! Running one command and seeing what it costs.

use std::error::Error;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// What a command took: seconds, seconds of processor, KiB of the largest process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub wall: f64,
    pub cpu: f64,
    pub rss: f64,
    /// Seconds without the start of the process, where it tells.
    pub inner: Option<f64>,
}

/// All samples of one piece of work by one tool.
pub struct Row {
    pub work: &'static str,
    pub tool: &'static str,
    pub samples: Vec<Sample>,
}

/// What is measured, in the order in which it was first seen.
#[derive(Default)]
pub struct Table(pub Vec<Row>);

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Table {
    /// Runs a command under GNU time; what it printed.
    ///
    /// # Errors
    /// It fails.
    pub fn run(&mut self, work: &'static str, tool: &'static str, folder: &Path, command: &mut Command) -> Result<String, Box<dyn Error>> {
        let report = tempfile::NamedTempFile::new()?;
        let mut timed = Command::new("/usr/bin/time");
        timed.args(["-f", "%U %S %M", "-o"]).arg(report.path()).arg("--").arg(command.get_program()).args(command.get_args());
        timed.envs(command.get_envs().filter_map(|(k, v)| Some((k, v?)))).current_dir(folder).stdin(Stdio::null());
        let begun = Instant::now();
        let done = timed.output()?;
        let wall = begun.elapsed().as_secs_f64();
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        if !done.status.success() {
            return Err(format!("{tool}, {work}: {said}{}", String::from_utf8_lossy(&done.stderr)).into());
        }
        let report = std::fs::read_to_string(report.path())?;
        let numbers: Vec<f64> = report.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        let &[user, system, rss] = numbers.as_slice() else { return Err(format!("time said {report:?}").into()) };
        let inner = said.split_whitespace().next().and_then(|n| n.parse().ok());
        let sample = Sample { wall, cpu: user + system, rss, inner };
        eprintln!("{work}, {tool}: {wall:.3} s, CPU {:.2} s, {:.1} MB", sample.cpu, rss / 1024.0);
        match self.0.iter_mut().find(|r| (r.work, r.tool) == (work, tool)) {
            Some(row) => row.samples.push(sample),
            None => self.0.push(Row { work, tool, samples: vec![sample] }),
        }
        Ok(said)
    }

    fn samples(&self, work: &str, tool: &str) -> &[Sample] {
        self.0.iter().find(|r| (r.work, r.tool) == (work, tool)).map_or(&[], |r| &r.samples)
    }

    /// The median of each round's quotient of two tools: what the machine did in a round, it did to both.
    pub fn quotient(&self, work: &str, (one, other): (&str, (&str, &str)), of: impl Fn(&Sample) -> f64) -> f64 {
        let (ours, theirs) = (self.samples(work, one), self.samples(other.0, other.1));
        median(ours.iter().zip(theirs).map(|(a, b)| of(a) / of(b)).collect())
    }

    /// Prints the medians.
    pub fn print(&self) {
        println!("{:<16} {:<20} {:>9} {:>9} {:>9}", "work", "tool", "wall s", "CPU s", "RSS MB");
        for Row { work, tool, samples } in &self.0 {
            let of = |f: &dyn Fn(&Sample) -> f64| median(samples.iter().map(f).collect());
            let wall = of(&|s| if tool.starts_with("floor") { s.inner.unwrap_or(s.wall) } else { s.wall });
            println!("{work:<16} {tool:<20} {wall:>9.3} {:>9.2} {:>9.1}", of(&|s| s.cpu), of(&|s| s.rss) / 1024.0);
        }
    }
}

pub fn ratio(name: &str, value: f64, goal: f64) {
    println!("ratio {name} {value:.3} <= {goal:.2}");
}
