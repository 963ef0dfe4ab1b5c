//! The courier's end of the one connection to the executor.

use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::mpsc as blocking;
use std::thread;

use anyhow::{Context, bail};
use replayfork_protocol::{ENDPOINT_FILE, Ended, FromExecutor, ToExecutor, receive, send};
use tokio::sync::mpsc;

/// The executor, connected. Dropping it ends the connection, and with it everything that it started.
pub struct Executor {
    orders: blocking::Sender<ToExecutor>,
    answers: mpsc::Receiver<io::Result<FromExecutor>>,
    writer: Option<thread::JoinHandle<()>>,
}

impl Executor {
    /// Tells the executor where to connect, takes one connection and closes the listener, so that nothing that a command
    /// starts can ever speak to the courier.
    ///
    /// # Errors
    /// The control volume can't be written; whoever came first did not know the nonce.
    pub async fn let_go(control: &Path) -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let nonce = hex::encode(rand::random::<[u8; 32]>());
        let temporary = control.join("endpoint.tmp");
        std::fs::write(&temporary, format!("{port}\n{nonce}\n")).with_context(|| format!("can't write {}", temporary.display()))?;
        std::fs::rename(&temporary, control.join(ENDPOINT_FILE))?;
        let (stream, _) = listener.accept().await?;
        drop(listener);
        stream.set_nodelay(true)?;
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        let mut reading = stream.try_clone()?;
        let (send_answer, mut answers) = mpsc::channel(4);
        thread::spawn(move || {
            loop {
                let answer = receive::<FromExecutor>(&mut reading);
                let over = answer.is_err();
                if send_answer.blocking_send(answer).is_err() || over {
                    return;
                }
            }
        });
        match answers.recv().await {
            Some(Ok(FromExecutor::Hello(said))) if said == nonce => {}
            _ => bail!("something else than the executor connected"),
        }
        let (orders, from_courier) = blocking::channel::<ToExecutor>();
        let mut writing = stream;
        let writer = thread::spawn(move || {
            while let Ok(order) = from_courier.recv() {
                if send(&mut writing, &order).is_err() {
                    break;
                }
            }
            // Both directions, so that the reading thread ends as well.
            let _ = writing.shutdown(std::net::Shutdown::Both);
        });
        Ok(Self { orders, answers, writer: Some(writer) })
    }

    /// The end of the command under way.
    ///
    /// # Errors
    /// The executor is gone: the command may have run.
    pub async fn ended(&mut self) -> io::Result<Ended> {
        match self.answers.recv().await {
            Some(Ok(FromExecutor::Ended(ended))) => Ok(ended),
            Some(Ok(FromExecutor::Hello(_))) => Err(io::Error::other("the executor said hello twice")),
            Some(Err(error)) => Err(error),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// # Errors
    /// The executor is gone.
    pub fn order(&self, order: ToExecutor) -> io::Result<()> {
        self.orders.send(order).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// The terminal result is acknowledged: the executor may exit with 0.
    pub fn done(&mut self) {
        let _ = self.order(ToExecutor::Done);
        let (unused, _) = blocking::channel();
        // Dropping the sender lets the writer send what it has and end.
        self.orders = unused;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}
