//! What is run and measured in a process of its own: our work, and the floors below which nothing of its kind can go.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use replayfork_core::Digest;
use replayfork_snapshot::{Capturer, LocalStore, Nodes, restore};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};

/// Threads of the floors: as many as we use.
const THREADS: usize = 2;
/// Raw bytes that are compressed at once.
const FRAME: usize = 256 << 10;

/// Runs one piece of work, and prints how long it took without the start of the process, and what it found.
pub fn run(work: &str, args: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let path = |n: usize| args.get(n).map(PathBuf::from).ok_or("an argument is missing");
    let (took, said) = match work {
        "capture" => capture(&path(0)?, &path(1)?)?,
        "restore-near" => {
            let begun = Instant::now();
            let store = LocalStore::open(&path(1)?)?;
            let target: Digest = args.get(2).ok_or("a node is missing")?.parse()?;
            Capturer::new(&path(0)?).restore(&store, &target)?;
            (begun.elapsed(), String::new())
        }
        "restore" => {
            let begun = Instant::now();
            let store = LocalStore::open(&path(1)?)?;
            let target: Digest = args.get(2).ok_or("a node is missing")?.parse()?;
            restore(&path(0)?, &store, &mut Nodes::default(), None, &target)?;
            (begun.elapsed(), String::new())
        }
        "stat-floor" => stat_floor(&files(&path(0)?)?)?,
        "read-floor" => read_floor(&files(&path(0)?)?, &path(1)?)?,
        "write-floor" => write_floor(&path(0)?, &path(1)?)?,
        other => return Err(format!("no such work: {other}").into()),
    };
    println!("{:.6} {said}", took.as_secs_f64());
    Ok(())
}

fn capture(root: &Path, store: &Path) -> Result<(Duration, String), Box<dyn std::error::Error>> {
    let begun = Instant::now();
    let store = LocalStore::open(store)?;
    let captured = Capturer::new(root).capture(&store, &mut |_| Ok(()))?;
    let took = begun.elapsed();
    Ok((took, format!("{} {} {}", captured.snapshot.node, captured.files, captured.read)))
}

/// All regular files below a folder, in path order.
pub fn files(root: &Path) -> std::io::Result<Vec<PathBuf>> {
    fn walk(folder: &Path, out: &mut Vec<PathBuf>) -> std::io::Result<()> {
        let mut entries: Vec<_> = std::fs::read_dir(folder)?.collect::<Result<_, _>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let kind = entry.file_type()?;
            if kind.is_dir() {
                walk(&entry.path(), out)?;
            } else if kind.is_file() {
                out.push(entry.path());
            }
        }
        Ok(())
    }
    let mut out = Vec::new();
    walk(root, &mut out)?;
    Ok(out)
}

/// Calls `f` with pieces of a list from several threads.
fn parallel<T: Sync>(
    list: &[T],
    piece: usize,
    f: impl Fn(usize, &mut dyn Iterator<Item = &[T]>) -> std::io::Result<()> + Sync,
) -> std::io::Result<()> {
    let next = AtomicUsize::new(0);
    let work = |thread: usize| {
        let mut pieces = std::iter::from_fn(|| list.chunks(piece).nth(next.fetch_add(1, Ordering::Relaxed)));
        f(thread, &mut pieces)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|n| {
                let work = &work;
                scope.spawn(move || work(n))
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().expect("no panic"))
    })
}

/// Looks at every file by its path.
fn stat_floor(files: &[PathBuf]) -> std::io::Result<(Duration, String)> {
    let paths: Vec<_> = files.iter().map(|p| std::ffi::CString::new(p.as_os_str().as_bytes()).expect("no NUL in a path")).collect();
    let begun = Instant::now();
    parallel(&paths, 64, |_, pieces| {
        for path in pieces.flatten() {
            rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)?;
        }
        Ok(())
    })?;
    Ok((begun.elapsed(), String::new()))
}

/// Reads, hashes and compresses every file, and writes what comes out.
fn read_floor(files: &[PathBuf], out: &Path) -> std::io::Result<(Duration, String)> {
    let begun = Instant::now();
    parallel(files, 32, |thread, pieces| {
        let mut out = File::create(out.join(thread.to_string()))?;
        let mut compressor = zstd::bulk::Compressor::new(1)?;
        let (mut raw, mut frame) = (Vec::new(), Vec::with_capacity(8 << 20));
        let mut close = |raw: &mut Vec<u8>| {
            frame.clear();
            frame.reserve(zstd::zstd_safe::compress_bound(raw.len()));
            compressor.compress_to_buffer(raw.as_slice(), &mut frame)?;
            raw.clear();
            out.write_all(&frame)
        };
        for path in pieces.flatten() {
            let before = raw.len();
            File::open(path)?.read_to_end(&mut raw)?;
            std::hint::black_box(Digest::of(&raw[before..]));
            if raw.len() >= FRAME {
                close(&mut raw)?;
            }
        }
        close(&mut raw)
    })?;
    Ok((begun.elapsed(), String::new()))
}

/// A file in memory: its name and content.
type Held = (std::ffi::OsString, Vec<u8>);

/// Makes the folders and writes the files of a tree that is in memory.
fn write_floor(from: &Path, to: &Path) -> std::io::Result<(Duration, String)> {
    let mut folders: Vec<(PathBuf, Vec<Held>)> = Vec::new();
    for file in files(from)? {
        let below = file.strip_prefix(from).expect("below the root");
        let folder = to.join(below.parent().unwrap_or(Path::new("")));
        let name = below.file_name().expect("a file has a name").to_owned();
        let content = std::fs::read(&file)?;
        match folders.last_mut() {
            Some((last, files)) if *last == folder => files.push((name, content)),
            _ => folders.push((folder, vec![(name, content)])),
        }
    }
    let begun = Instant::now();
    for (folder, _) in &folders {
        std::fs::create_dir_all(folder)?;
    }
    parallel(&folders, 4, |_, pieces| {
        for (folder, files) in pieces.flatten() {
            let folder = rustix::fs::open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            for (name, content) in files {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file = rustix::fs::openat(&folder, name.as_os_str(), flags, Mode::from_raw_mode(0o644))?;
                File::from(file).write_all(content)?;
            }
        }
        Ok(())
    })?;
    Ok((begun.elapsed(), String::new()))
}
