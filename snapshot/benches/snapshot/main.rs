//! Snapshots against the tools that people would use instead, and against floors.
//!
//! `--rounds=N` (3), `--without-large` leaves the million files and the sparse one out. Needs root, and Debian's git, restic,
//! borgbackup, zstd and time.

mod corpus;
mod disk;
mod measure;
mod one;
mod peers;

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use disk::{Disk, bytes};
use measure::{Sample, Table, median, ratio};
use peers::Peers;
use replayfork_snapshot::{Capturer, LocalStore};

const OURS: &str = "replayfork";
/// Files that are edited between two snapshots.
const EDITS: usize = 10;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    if let Some((first, rest)) = args.split_first()
        && first == "one"
    {
        return one::run(rest.first().map_or("", |w| w), rest.get(1..).unwrap_or_default());
    }
    let rounds = args.iter().find_map(|a| a.strip_prefix("--rounds=")?.parse().ok()).unwrap_or(3);
    // This program lies in `target/release/deps`.
    let program = std::env::current_exe()?;
    let target = program.ancestors().nth(3).ok_or("the program lies in no target folder")?;
    let sources = corpus::fetch(&target.join("bench/snapshot"))?;
    let disk = Disk::mount(9)?;
    let work = disk.root.join("work");
    disk::run(Command::new("cp").arg("-a").arg(&sources).arg(&work))?;
    let files = one::files(&work)?;
    println!("corpus: {} files, {} bytes", files.len(), bytes(&work, "")?);

    let mut table = Table::default();
    let mut stores = Vec::new();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        stores.push(one_round(&disk, &work, &files, round, &mut table)?);
    }
    let grown = hundred(&disk, &work, &files)?;
    if !args.iter().any(|a| a == "--without-large") {
        large(&disk, &mut table)?;
    }
    table.print();
    let last = stores.last().ok_or("no rounds")?;
    println!("store bytes: replayfork {}, tar+zstd {}, git {}, restic {}, borg {}", last.ours, last.tar, last.git, last.restic, last.borg);
    ratios(&table, &stores, grown);
    Ok(())
}

/// What a round left on disk, in bytes.
struct Stored {
    ours: u64,
    tar: u64,
    git: u64,
    restic: u64,
    borg: u64,
    /// New bytes after ten edits, and what the ten files are when compressed.
    edits: (u64, u64),
}

fn ours(work: &str, args: &[&Path], node: Option<&str>) -> Result<Command, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["one", work]).args(args).args(node);
    Ok(command)
}

fn one_round(disk: &Disk, work: &Path, files: &[PathBuf], round: usize, table: &mut Table) -> Result<Stored, Box<dyn Error>> {
    let at = |name: &str| disk.root.join(name);
    let (store, out) = (at("store"), at("out"));
    let peers = Peers::prepare(&disk.root, work)?;
    std::fs::create_dir(&out)?;

    peers.full(disk, table)?;
    disk.settle()?;
    table.run("full", OURS, &disk.root, &mut ours("capture", &[work, &store], None)?)?;
    disk.settle()?;
    table.run("full", "floor: read", &disk.root, &mut ours("read-floor", &[work, &out], None)?)?;
    let mut stored = peers.stored()?;
    stored.ours = bytes(&store, ".pack")?;

    disk.settle()?;
    peers.unchanged(table)?;
    table.run("no change", OURS, &disk.root, &mut ours("capture", &[work, &store], None)?)?;
    table.run("no change", "floor: statx", &disk.root, &mut ours("stat-floor", &[work], None)?)?;
    let said = table.run("no change", OURS, &disk.root, &mut ours("capture", &[work, &store], None)?)?;
    table.run("no change", "floor: statx", &disk.root, &mut ours("stat-floor", &[work], None)?)?;
    let node = said.split_whitespace().nth(1).ok_or("no node")?.to_owned();

    peers.restore(disk, table)?;
    empty(&out)?;
    disk.settle()?;
    table.run("cold restore", OURS, &disk.root, &mut ours("restore", &[&out, &store], Some(&node))?)?;
    disk::run(Command::new("diff").args(["-r", "--no-dereference"]).args([work, &out]))?;
    empty(&out)?;
    disk.settle()?;
    table.run("cold restore", "floor: write", &disk.root, &mut ours("write-floor", &[work, &out], None)?)?;

    let compressed = edit(files, round)?;
    disk.settle()?;
    table.run("ten files changed", OURS, &disk.root, &mut ours("capture", &[work, &store], None)?)?;
    peers.changed(table)?;
    stored.edits = (bytes(&store, ".pack")? - stored.ours, compressed);
    edit(files, round + 1000)?;
    disk.settle()?;
    table.run("near restore", OURS, &disk.root, &mut ours("restore-near", &[work, &store], Some(&node))?)?;
    for name in ["store", "out"].map(at) {
        std::fs::remove_dir_all(name)?;
    }
    Ok(stored)
}

fn empty(folder: &Path) -> std::io::Result<()> {
    std::fs::remove_dir_all(folder)?;
    std::fs::create_dir(folder)
}

/// Appends a line to ten files; the bytes of the ten when compressed.
fn edit(files: &[PathBuf], round: usize) -> Result<u64, Box<dyn Error>> {
    let mut compressed = 0;
    for n in 0..EDITS {
        let file = &files[(round * 7919 + n * 2903) % files.len()];
        writeln!(std::fs::File::options().append(true).open(file)?, "edit {round} {n}")?;
        compressed += zstd::bulk::compress(&std::fs::read(file)?, 1)?.len() as u64;
    }
    Ok(compressed)
}

/// A hundred snapshots of ten edits each: bytes after all, and after the first.
fn hundred(disk: &Disk, work: &Path, files: &[PathBuf]) -> Result<(u64, u64), Box<dyn Error>> {
    let folder = disk.root.join("hundred");
    let store = LocalStore::open(&folder)?;
    let mut capturer = Capturer::new(work);
    capturer.capture(&store, &mut |_| Ok(()))?;
    let first = bytes(&folder, ".pack")?;
    for round in 0..100 {
        edit(files, 2000 + round)?;
        capturer.capture(&store, &mut |_| Ok(()))?;
    }
    let all = bytes(&folder, ".pack")?;
    std::fs::remove_dir_all(&folder)?;
    Ok((all, first))
}

/// A million files, and 10 GB of mostly holes.
fn large(disk: &Disk, table: &mut Table) -> Result<(), Box<dyn Error>> {
    let (many, sparse) = (disk.root.join("many"), disk.root.join("sparse"));
    for folder in 0..5000 {
        let at = many.join(format!("{}/{}", folder / 100, folder % 100));
        std::fs::create_dir_all(&at)?;
        for file in 0..200 {
            std::fs::write(at.join(format!("file-{file}")), format!("{folder} {file}"))?;
        }
    }
    std::fs::create_dir(&sparse)?;
    let mut file = std::fs::File::create(sparse.join("file"))?;
    file.set_len(10_000_000_000)?;
    file.write_all(b"not only zeros")?;
    drop(file);
    disk.settle()?;
    let store = disk.root.join("large");
    let said = table.run("1e6 files", OURS, &disk.root, &mut ours("capture", &[&many, &store], None)?)?;
    table.run("1e6, no change", OURS, &disk.root, &mut ours("capture", &[&many, &store], None)?)?;
    std::fs::remove_dir_all(&many)?;
    std::fs::create_dir(&many)?;
    table.run("1e6, restored", OURS, &disk.root, &mut ours("restore", &[&many, &store], said.split_whitespace().nth(1))?)?;
    std::fs::remove_dir_all(&many)?;
    table.run("10 GB sparse", OURS, &disk.root, &mut ours("capture", &[&sparse, &store], None)?)?;
    Ok(())
}

fn ratios(table: &Table, stores: &[Stored], grown: (u64, u64)) {
    let wall = |s: &Sample| s.wall;
    let inner = |s: &Sample| s.inner.unwrap_or(s.wall);
    let against = |work, tool, of: &dyn Fn(&Sample) -> f64| table.quotient(work, (OURS, (work, tool)), of);
    ratio("full/restic", against("full", "restic", &wall), 0.20);
    ratio("full/tar+zstd", against("full", "tar+zstd", &wall), 0.65);
    ratio("full/floor", against("full", "floor: read", &inner), 1.15);
    ratio("no-change/floor", against("no change", "floor: statx", &inner), 1.5);
    ratio("no-change/git-status", against("no change", "git status", &wall), 0.6);
    ratio("ten-changed/git", against("ten files changed", "git add", &wall), 0.55);
    let edits = stores.iter().map(|s| s.edits.0.saturating_sub(16 << 10) as f64 / s.edits.1 as f64).collect();
    ratio("ten-changed/bytes", median(edits), 1.2);
    ratio("cold-restore/cp", against("cold restore", "cp -a", &wall), 0.40);
    ratio("cold-restore/restic", against("cold restore", "restic", &wall), 0.20);
    ratio("cold-restore/floor", against("cold restore", "floor: write", &inner), 1.3);
    ratio("near-restore/cold", table.quotient("near restore", (OURS, ("cold restore", OURS)), inner), 0.1);
    ratio("store/tar+zstd", stores.last().map_or(f64::NAN, |s| s.ours as f64 / s.tar as f64), 1.05);
    ratio("hundred/first", grown.0 as f64 / grown.1 as f64, 1.15);
    let rss = table.0.iter().filter(|r| r.tool == OURS).flat_map(|r| &r.samples).map(|s| s.rss / 1024.0).fold(0.0, f64::max);
    ratio("memory-MB", rss, 64.0);
}
