//! The database: pool, migrations, partitions.

use std::time::Duration;

use anyhow::{Context, bail};
use deadpool_postgres::{GenericClient, Manager, ManagerConfig, Pool, RecyclingMethod};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::config::SslMode;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Error, NoTls, Row};
use tokio_postgres_rustls::MakeRustlsConnect;

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// Key of the advisory lock under which one replica migrates while the others wait.
const MIGRATION_LOCK: i64 = 0x5246_4d49_4752;
const OLDEST_POSTGRES: u32 = 150_000;

/// A connection, or a transaction on it, whose statements are prepared once: a query is one round trip, and is not planned anew each
/// time. Their number is bounded by that of the texts in this crate, since values are always parameters.
pub trait Connection: GenericClient {
    /// All rows.
    ///
    /// # Errors
    /// What the database says; so of all here.
    fn fetch(&self, sql: &str, values: &[&(dyn ToSql + Sync)]) -> impl Future<Output = Result<Vec<Row>, Error>> + Send {
        async move { self.query(&self.prepare_cached(sql).await?, values).await }
    }

    /// The only row; none, or several, are an error.
    fn fetch_one(&self, sql: &str, values: &[&(dyn ToSql + Sync)]) -> impl Future<Output = Result<Row, Error>> + Send {
        async move { self.query_one(&self.prepare_cached(sql).await?, values).await }
    }

    /// The only row, if there is one; several are an error.
    fn fetch_opt(&self, sql: &str, values: &[&(dyn ToSql + Sync)]) -> impl Future<Output = Result<Option<Row>, Error>> + Send {
        async move { self.query_opt(&self.prepare_cached(sql).await?, values).await }
    }

    /// How many rows were affected.
    fn run(&self, sql: &str, values: &[&(dyn ToSql + Sync)]) -> impl Future<Output = Result<u64, Error>> + Send {
        async move { self.execute(&self.prepare_cached(sql).await?, values).await }
    }
}

impl<C: GenericClient> Connection for C {}

/// A pool of connections; nothing is connected yet. With `sslmode=require` the server's certificate is verified, by the
/// authorities in `ca` (PEM) alone where they are given, else by the system's. Any other mode is plain.
///
/// # Errors
/// The URL or the authorities can't be read.
pub fn pool(url: &str, ca: Option<&str>, connections: usize) -> anyhow::Result<Pool> {
    let mut config: tokio_postgres::Config =
        url.parse().context("DATABASE_URL can't be read; it looks like postgres://user:password@host:5432/database")?;
    if config.get_application_name().is_none() {
        config.application_name("replayfork-api-server");
    }
    config.connect_timeout(Duration::from_secs(5));
    config.keepalives_idle(Duration::from_secs(30));
    let recycle = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = match config.get_ssl_mode() {
        SslMode::Require => Manager::from_config(config, MakeRustlsConnect::new(verifying(ca)?), recycle),
        _ => Manager::from_config(config, NoTls, recycle),
    };
    let timeout = Some(Duration::from_secs(10));
    Ok(Pool::builder(manager)
        .max_size(connections)
        .wait_timeout(timeout)
        .create_timeout(timeout)
        .runtime(deadpool_postgres::Runtime::Tokio1)
        .build()?)
}

fn verifying(ca: Option<&str>) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                roots.add(certificate.context("the database's authorities can't be read")?)?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        bail!("sslmode=require needs authorities: put them into the Secret beside the URL as ca.crt");
    }
    Ok(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

/// Brings the schema up to what this binary needs, one replica at a time.
///
/// # Errors
/// No connection, an older Postgres than 15, a schema newer than this binary, or a failing migration.
pub async fn migrate(pool: &Pool) -> anyhow::Result<()> {
    let mut client = pool.get().await.context("the database can't be reached")?;
    let version: u32 = client.query_one("SHOW server_version_num", &[]).await?.get::<_, &str>(0).parse()?;
    if version < OLDEST_POSTGRES {
        bail!("PostgreSQL 15 or later is needed, this is {}", version / 10_000);
    }
    client.execute("SELECT pg_advisory_lock($1)", &[&MIGRATION_LOCK]).await?;
    let migrated = run_migrations(&mut client).await;
    client.execute("SELECT pg_advisory_unlock($1)", &[&MIGRATION_LOCK]).await?;
    migrated
}

async fn run_migrations(client: &mut deadpool_postgres::Object) -> anyhow::Result<()> {
    let runner = embedded::migrations::runner();
    let newest = runner.get_migrations().iter().map(|m| m.version()).max().unwrap_or(0);
    let inner: &mut tokio_postgres::Client = client;
    if let Some(applied) = runner.get_last_applied_migration_async(inner).await.ok().flatten()
        && applied.version() > newest
    {
        bail!(
            "the database has schema {}, this api-server knows only up to {newest}; run the newer version, or restore the backup from before the upgrade",
            applied.version()
        );
    }
    let report = runner.run_async(inner).await.context("a migration failed; the schema is as it was before it")?;
    for migration in report.applied_migrations() {
        tracing::info!(version = migration.version(), name = migration.name(), "migrated");
    }
    make_partitions(inner).await
}

/// This month's partitions and those of two more, as a fork of time passing: called at start and daily.
///
/// # Errors
/// What the database says.
pub async fn make_partitions(client: &tokio_postgres::Client) -> anyhow::Result<()> {
    client
        .batch_execute(
            "SET lock_timeout = '5s';
             SELECT make_partitions(now() + n * interval '1 month') FROM generate_series(0, 2) n;
             RESET lock_timeout",
        )
        .await?;
    Ok(())
}
