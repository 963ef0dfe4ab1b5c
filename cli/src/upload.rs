//! `upload`: content for patches that is too large for a custom resource.

use std::io::Read;

use anyhow::Context;
use replayfork_client::read::Uploaded;

use crate::Output;
use crate::connection::Connection;
use crate::text::structured;

/// Sends a file, or standard input for `-`, and says how a patch names it.
///
/// # Errors
/// The file can't be read; what the api-server says.
pub async fn upload(connection: &Connection, file: &str, output: Output) -> anyhow::Result<()> {
    let mut content = Vec::new();
    match file {
        "-" => std::io::stdin().lock().read_to_end(&mut content).context("standard input can't be read")?,
        file => std::fs::File::open(file).and_then(|mut f| f.read_to_end(&mut content)).with_context(|| format!("can't read {file}"))?,
    };
    let uploaded: Uploaded = connection.post_bytes(&format!("/api/v1/uploads{}", connection.query()), content).await?;
    if !structured(output, &uploaded)? {
        println!("{} bytes, kept for 24 hours unless a fork names them. In a patch:", uploaded.size);
        println!("contentFrom: {{digest: {}}}", uploaded.digest);
    }
    Ok(())
}
