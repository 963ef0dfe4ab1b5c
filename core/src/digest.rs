//! BLAKE3 digests, and the one way in which structured values are hashed.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// A BLAKE3 digest (32 bytes), written as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The digest of a JSON value, independent of the order of its members.
    pub fn of_json(value: &Value) -> Self {
        Hasher::new("json").json("value", value).finish()
    }

    /// From raw bytes; `None` unless there are exactly 32.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The text is no digest.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no digest: expected 64 hex digits (BLAKE3)")]
pub struct ParseDigestError(String);

impl FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| ParseDigestError(text.chars().take(80).collect()))?;
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'_, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl utoipa::PartialSchema for Digest {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        utoipa::openapi::ObjectBuilder::new()
            .schema_type(utoipa::openapi::schema::Type::String)
            .pattern(Some("^[0-9a-f]{64}$"))
            .description(Some("BLAKE3 digest, 64 hex digits"))
            .into()
    }
}

impl utoipa::ToSchema for Digest {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("Digest")
    }
}

/// Hashes labelled, length-prefixed parts, so that no two different sequences of parts have the same bytes.
pub struct Hasher(blake3::Hasher);

impl Hasher {
    /// `domain` keeps digests of different things apart.
    pub fn new(domain: &str) -> Self {
        let mut hasher = Self(blake3::Hasher::new());
        hasher.raw(domain.as_bytes());
        hasher
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    #[must_use]
    pub fn part(mut self, label: &str, bytes: &[u8]) -> Self {
        self.add(label, bytes);
        self
    }

    pub fn add(&mut self, label: &str, bytes: &[u8]) {
        self.raw(label.as_bytes());
        self.raw(bytes);
    }

    /// Adds a JSON value with its members in sorted order. Numbers count as they are written by serde_json.
    #[must_use]
    pub fn json(mut self, label: &str, value: &Value) -> Self {
        let mut text = String::new();
        canonical(value, &mut text);
        self.add(label, text.as_bytes());
        self
    }

    /// Adds any serialisable value by its JSON form.
    ///
    /// # Panics
    /// When `value` has map keys that are no strings; no type of this crate has.
    #[must_use]
    pub fn value(self, label: &str, value: &impl Serialize) -> Self {
        self.json(label, &serde_json::to_value(value).expect("the domain's types are JSON"))
    }

    pub fn finish(self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

fn canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(members) => {
            let mut sorted: Vec<_> = members.iter().collect();
            sorted.sort_by(|a, b| a.0.cmp(b.0));
            out.push('{');
            for (key, member) in sorted {
                out.push_str(&Value::String(key.clone()).to_string());
                out.push(':');
                canonical(member, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for item in items {
                canonical(item, out);
                out.push(',');
            }
            out.push(']');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_order_of_members_does_not_matter_and_everything_else_does() {
        assert_eq!(Digest::of_json(&json!({"a": 1, "b": [null, 2.5]})), Digest::of_json(&json!({"b": [null, 2.5], "a": 1})));
        assert_ne!(Digest::of_json(&json!([1, 2])), Digest::of_json(&json!([2, 1])));
        assert_ne!(Digest::of_json(&json!({"a": "1"})), Digest::of_json(&json!({"a": 1})));
    }

    #[test]
    fn parts_cannot_be_shifted_into_each_other() {
        let one = Hasher::new("d").part("a", b"bc").finish();
        let two = Hasher::new("d").part("ab", b"c").finish();
        assert_ne!(one, two);
    }

    #[test]
    fn text_form_round_trips_and_rubbish_is_named() {
        let digest = Digest::of(b"x");
        assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
        assert!("abc".parse::<Digest>().unwrap_err().to_string().contains("abc"));
    }
}
