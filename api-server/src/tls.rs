//! The listener: TCP, or TLS over it where a certificate is mounted.
//!
//! Handshakes are done beside each other, so that a client that never finishes one keeps nobody else waiting. The certificate is
//! read anew when its file changes, since whoever issues it replaces it.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use axum::serve::Listener;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

const HANDSHAKE: Duration = Duration::from_secs(10);
const PENDING: usize = 64;

/// A certificate chain and its key, in PEM files.
pub struct Certificate {
    cert: PathBuf,
    key: PathBuf,
    loaded: Mutex<(SystemTime, TlsAcceptor)>,
}

impl Certificate {
    /// # Errors
    /// A file that can't be read, or a key that does not fit the certificate.
    pub fn load(cert: &Path, key: &Path) -> anyhow::Result<Self> {
        let loaded = (changed(cert), acceptor(cert, key)?);
        Ok(Self { cert: cert.to_owned(), key: key.to_owned(), loaded: Mutex::new(loaded) })
    }

    fn acceptor(&self) -> TlsAcceptor {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let now = changed(&self.cert);
        if now != loaded.0 {
            match acceptor(&self.cert, &self.key) {
                Ok(fresh) => {
                    tracing::info!("the certificate was replaced");
                    *loaded = (now, fresh);
                }
                // Both files are not replaced at one moment: the next connection looks again.
                Err(error) => tracing::warn!("the new certificate can't be used yet, the old one stays: {error:#}"),
            }
        }
        loaded.1.clone()
    }
}

fn changed(path: &Path) -> SystemTime {
    std::fs::metadata(path).and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn acceptor(cert: &Path, key: &Path) -> anyhow::Result<TlsAcceptor> {
    let chain: Vec<_> = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .with_context(|| format!("the certificate {} can't be read", cert.display()))?;
    let secret = PrivateKeyDer::from_pem_file(key).with_context(|| format!("the key {} can't be read", key.display()))?;
    let mut config =
        ServerConfig::builder().with_no_client_auth().with_single_cert(chain, secret).context("certificate and key don't fit")?;
    // What axum is built with here speaks no HTTP/2.
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Connections whose handshake is done.
pub struct TlsListener {
    address: SocketAddr,
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
}

impl TlsListener {
    /// # Errors
    /// The listener has no address.
    pub fn new(listener: TcpListener, certificate: Certificate) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (sender, ready) = mpsc::channel(PENDING);
        tokio::spawn(async move {
            let mut listener = listener;
            loop {
                let (stream, peer) = Listener::accept(&mut listener).await;
                let (acceptor, sender) = (certificate.acceptor(), sender.clone());
                tokio::spawn(async move {
                    let _ = stream.set_nodelay(true);
                    if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                        let _ = sender.send((stream, peer)).await;
                    }
                });
            }
        });
        Ok(Self { address, ready })
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(connection) => connection,
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}
