//! The executor: runs one command at a time as the courier tells it, in the user's image, as PID 1 of its container.
//!
//! It holds no token and knows no address but the courier's on loopback. As PID 1 it can kill all that a command left behind;
//! its own children can neither outlive nor kill it. It exits 0 only when the courier said `Done`.

mod cgroup;
mod command;
mod place;

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use replayfork_protocol::{ENDPOINT_FILE, FromExecutor, ToExecutor, receive, send};
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;

use crate::command::{Event, kill_all, run};

/// How often the endpoint file is looked for: the courier writes it once the workspace is there and the network policy holds.
const LOOK_EVERY: Duration = Duration::from_millis(5);

fn main() -> ExitCode {
    let Some(control) = std::env::args().nth(1) else {
        eprintln!("usage: replayfork-executor CONTROL_FOLDER");
        return ExitCode::from(2);
    };
    // So that no command can read this process's memory, where the nonce is.
    if let Err(error) = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable) {
        eprintln!("replayfork-executor: can't be made undumpable: {error}");
        return ExitCode::FAILURE;
    }
    let (events, inbox) = mpsc::channel();
    if let Err(error) = watch_sigterm(events.clone()) {
        eprintln!("replayfork-executor: can't watch signals: {error}");
        return ExitCode::FAILURE;
    }
    let done = serve(Path::new(&control), &events, &inbox);
    kill_all();
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("replayfork-executor: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Reports SIGTERM that comes from outside of the container: those have no sender in its PID namespace.
fn watch_sigterm(events: mpsc::Sender<Event>) -> io::Result<()> {
    let mut signals = SignalsInfo::<WithOrigin>::new([SIGTERM])?;
    thread::spawn(move || {
        for origin in signals.forever() {
            if origin.process.is_none_or(|p| p.pid == 0) {
                let _ = events.send(Event::Terminate);
            }
        }
    });
    Ok(())
}

fn serve(control: &Path, events: &mpsc::Sender<Event>, inbox: &Receiver<Event>) -> io::Result<bool> {
    let Some((port, nonce)) = endpoint(control, inbox)? else { return Ok(false) };
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    send(&mut stream, &FromExecutor::Hello(nonce))?;
    let mut reading = stream.try_clone()?;
    let events_of_courier = events.clone();
    thread::spawn(move || {
        while let Ok(message) = receive::<ToExecutor>(&mut reading) {
            if events_of_courier.send(Event::Courier(message)).is_err() {
                return;
            }
        }
        let _ = events_of_courier.send(Event::Disconnected);
    });
    loop {
        match inbox.recv().unwrap_or(Event::Disconnected) {
            Event::Courier(ToExecutor::Run(command)) => {
                let Some(ended) = run(&command, events, inbox) else { return Ok(false) };
                send(&mut stream, &FromExecutor::Ended(ended))?;
            }
            Event::Courier(ToExecutor::Done) => return Ok(true),
            Event::Terminate | Event::Disconnected => return Ok(false),
            // Nothing runs that could be stopped, or the end of a command that was dealt with.
            Event::Courier(ToExecutor::Stop) | Event::Exited(_) => {}
        }
    }
}

/// Waits for the courier's port and nonce; `None`: told to go before.
fn endpoint(control: &Path, inbox: &Receiver<Event>) -> io::Result<Option<(u16, String)>> {
    loop {
        match fs::read_to_string(control.join(ENDPOINT_FILE)) {
            Ok(text) => {
                let mut lines = text.lines();
                let port = lines.next().and_then(|p| p.parse().ok());
                let nonce = lines.next().map(str::to_owned);
                return match (port, nonce) {
                    (Some(port), Some(nonce)) => Ok(Some((port, nonce))),
                    _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the endpoint file has no port and nonce")),
                };
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        if let Ok(Event::Terminate) = inbox.recv_timeout(LOOK_EVERY) {
            return Ok(None);
        }
    }
}
