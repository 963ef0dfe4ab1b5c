//! Content that is too large for a custom resource: uploaded beforehand, and named by its digest.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Refused;
use crate::Digest;

/// Uploaded content, as `kubectl replay upload FILE` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContentFrom {
    /// BLAKE3, 64 hex digits.
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"))]
    pub digest: String,
}

/// The uploaded contents that a fork names, by digest.
#[derive(Clone, Debug, Default)]
pub struct Contents(BTreeMap<Digest, Arc<[u8]>>);

impl Contents {
    /// Adds a content under its own digest.
    pub fn insert(&mut self, bytes: impl Into<Arc<[u8]>>) {
        let bytes = bytes.into();
        self.0.insert(Digest::of(&bytes), bytes);
    }

    /// The inline text, or the uploaded bytes.
    ///
    /// # Errors
    /// Both or neither given, a digest that is none, content that is not there.
    pub fn bytes(&self, field: &str, inline: Option<&String>, from: Option<&ContentFrom>) -> Result<Arc<[u8]>, Refused> {
        let refuse = |message: String| Refused::PatchRefused { field: field.to_owned(), message };
        match (inline, from) {
            (Some(text), None) => Ok(text.as_bytes().into()),
            (None, Some(from)) => {
                let digest: Digest = from.digest.parse().map_err(|e| refuse(format!("contentFrom.digest: {e}")))?;
                self.0.get(&digest).cloned().ok_or_else(|| {
                    refuse(format!(
                        "contentFrom.digest: {digest} is not among the contents of this namespace; `kubectl replay upload FILE` sends it (it is kept for 24 hours until a fork uses it)"
                    ))
                })
            }
            (Some(_), Some(_)) => Err(refuse("its content is given inline and by `contentFrom`; keep one of them".into())),
            (None, None) => Err(refuse("it has no content; give it inline or by `contentFrom`".into())),
        }
    }

    /// As [`Contents::bytes`], of text.
    ///
    /// # Errors
    /// Also content that is not UTF-8, or holds a NUL.
    pub fn text(&self, field: &str, inline: Option<&String>, from: Option<&ContentFrom>) -> Result<String, Refused> {
        let bytes = self.bytes(field, inline, from)?;
        let refuse = |message: &str| Refused::PatchRefused { field: field.to_owned(), message: message.to_owned() };
        let text = std::str::from_utf8(&bytes).map_err(|_| refuse("its content is not UTF-8 text"))?;
        if text.contains('\0') {
            return Err(refuse("its content holds a NUL character, which no output may have; remove it"));
        }
        Ok(text.to_owned())
    }
}
