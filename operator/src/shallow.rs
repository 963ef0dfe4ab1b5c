//! What the Kubernetes API answers, with JSON that is nested too deep cut off.
//!
//! A cluster stores objects that are nested deeper than a reader can follow. One such object, of whatever namespace, would make
//! every list that it is in unreadable. What lies deeper than [`DEEPEST`] becomes `null` here; a spec that deep is refused when it
//! is planned.

use bytes::Bytes;
use http_body_util::BodyExt;
use kube::client::{Client, ClientBuilder, DynBody};
use kube::{Config, Error};
use tower::util::MapResponseLayer;

/// Levels of a document that are read. serde_json follows 128.
const DEEPEST: usize = 100;

/// A client for the cluster that the environment names, which reads what is nested too deep as `null`.
///
/// # Errors
/// As [`Client::try_default`].
pub async fn client() -> Result<Client, Error> {
    let config = Config::infer().await.map_err(Error::InferConfig)?;
    let layer = MapResponseLayer::new(|response: http::Response<_>| {
        response.map(|body| {
            let mut cut = Cut::default();
            body_of(body).map_frame(move |frame| frame.map_data(|data| cut.pass(&data)))
        })
    });
    Ok(ClientBuilder::try_from(config)?.with_layer(&layer).build())
}

/// Names the type of the answers' bodies.
fn body_of(body: Box<DynBody>) -> Box<DynBody> {
    body
}

/// Where in a stream of JSON documents we are.
#[derive(Default)]
struct Cut {
    depth: usize,
    string: bool,
    escaped: bool,
}

impl Cut {
    fn pass(&mut self, data: &[u8]) -> Bytes {
        let mut out = Vec::with_capacity(data.len());
        for &byte in data {
            let mut kept = self.depth <= DEEPEST;
            if self.string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.string = false,
                    _ => {}
                }
            } else {
                match byte {
                    b'"' => self.string = true,
                    b'{' | b'[' => {
                        self.depth += 1;
                        if self.depth == DEEPEST + 1 {
                            out.extend(b"null");
                        }
                        kept = self.depth <= DEEPEST;
                    }
                    b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                    _ => {}
                }
            }
            if kept {
                out.push(byte);
            }
        }
        out.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_deep_becomes_null_and_nothing_else_changes() {
        let nested = |levels: usize, inner: &str| format!("{}{inner}{}", "[".repeat(levels), "]".repeat(levels));
        let flat = r#"{"a":"[[[ \" \\","b":[1,{"c":null}]}"#;
        for (given, want) in [
            (flat.to_owned(), flat.to_owned()),
            (nested(DEEPEST, "1"), nested(DEEPEST, "1")),
            (nested(DEEPEST + 1, "1"), nested(DEEPEST, "null")),
            (nested(5000, r#""]""#), nested(DEEPEST, "null")),
            (format!("{}\n{flat}\n", nested(200, "{}")), format!("{}\n{flat}\n", nested(DEEPEST, "null"))),
        ] {
            // Wherever the network parts it.
            for size in [1, 7, given.len()] {
                let mut cut = Cut::default();
                let got: Vec<u8> = given.as_bytes().chunks(size).flat_map(|part| cut.pass(part)).collect();
                assert_eq!(String::from_utf8(got).unwrap(), want);
            }
        }
    }
}
