//! ReplayForks as they stand in a file, and whether the cluster would take them.

use std::io::Read;

use anyhow::{Context, bail};
use http::{Method, Request};
use kube::Client;
use serde::Deserialize;
use serde_json::Value;

/// A ReplayFork as it stands in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    pub name: String,
    pub namespace: Option<String>,
    object: Value,
    text: Text,
}

/// As the cluster gets it, which reads YAML in another way than this program: `yes` is true there, and `010` eight.
#[derive(Clone, Debug, PartialEq)]
enum Text {
    Json(String),
    Yaml(String),
}

impl Text {
    fn content_type(&self) -> &'static str {
        match self {
            Text::Json(_) => "application/json",
            Text::Yaml(_) => "application/yaml",
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let (Text::Json(text) | Text::Yaml(text)) = self;
        text.clone().into_bytes()
    }
}

impl Manifest {
    pub fn spec(&self) -> &Value {
        &self.object["spec"]
    }
}

/// The ReplayForks of a file, or of standard input for `-`; other objects may stand beside them.
///
/// # Errors
/// The file can't be read, or holds no ReplayFork.
pub fn read(filename: &str) -> anyhow::Result<Vec<Manifest>> {
    let text = if filename == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        text
    } else {
        std::fs::read_to_string(filename).with_context(|| format!("can't read {filename}"))?
    };
    let (mut forks, mut others) = (Vec::new(), Vec::new());
    for document in documents(&text) {
        for (object, text) in objects(&document).with_context(|| format!("{filename} can't be read"))? {
            if object["kind"] == "ReplayFork" {
                let member = |name: &str| object["metadata"][name].as_str().map(str::to_owned);
                forks.push(Manifest { name: member("name").unwrap_or_default(), namespace: member("namespace"), object, text });
            } else {
                others.push(object["kind"].to_string());
            }
        }
    }
    match (forks.is_empty(), others.as_slice()) {
        (false, _) => Ok(forks),
        (true, []) => bail!("{filename} is empty"),
        (true, kinds) => bail!("{filename}: kind is {}, not ReplayFork", kinds.join(", ")),
    }
}

/// The documents of a file, which lines of `---` part.
fn documents(text: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for line in text.lines() {
        let rest = line.strip_prefix("---").filter(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '#']));
        match (rest, documents.last_mut()) {
            (Some(rest), _) => documents.push(format!("{rest}\n")),
            (None, Some(last)) => {
                last.push_str(line);
                last.push('\n');
            }
            (None, None) => {}
        }
    }
    documents
}

/// The objects of a document: none, one, or those of a List, each with its text. JSON is read as such, since YAML knows no surrogate
/// pairs.
fn objects(document: &str) -> anyhow::Result<Vec<(Value, Text)>> {
    let is_object = document.trim_start().starts_with('{');
    let json = || serde_json::Deserializer::from_str(document).into_iter::<Value>().collect::<Result<Vec<_>, _>>();
    let (found, is_json) = match json() {
        Ok(found) if is_object => (found, true),
        Err(error) if is_object => (vec![serde_yaml_ng::from_str(document).map_err(|_| error)?], false),
        _ => (serde_yaml_ng::Deserializer::from_str(document).map(Value::deserialize).collect::<Result<Vec<_>, _>>()?, false),
    };
    let alone = found.len() == 1 && !is_json;
    let of_one = |object: Value| match &object["items"] {
        Value::Array(items) if object["kind"] == "List" => items.iter().map(|item| (item.clone(), Text::Json(item.to_string()))).collect(),
        _ if alone => vec![(object, Text::Yaml(document.to_owned()))],
        _ => vec![(object.clone(), Text::Json(object.to_string()))],
    };
    Ok(found.into_iter().filter(|object| !object.is_null()).flat_map(of_one).collect())
}

/// Asks the cluster, as `kubectl apply` would, whether it takes the object; nothing is created. A caller who may plan but not
/// create forks is told that this was not asked.
///
/// # Errors
/// The cluster's own words.
pub async fn admitted(client: &Client, manifest: &Manifest, namespace: &str) -> anyhow::Result<Value> {
    if let Some(own) = manifest.namespace.as_deref().filter(|own| *own != namespace) {
        bail!(
            "the namespace from the provided object {own:?} does not match the namespace {namespace:?}. You must pass '--namespace={own}' to perform this operation."
        );
    }
    let forks = format!("/apis/replayfork.dev/v1alpha1/namespaces/{namespace}/replayforks");
    let how = "?dryRun=All&fieldValidation=Strict&fieldManager=kubectl-replay";
    let ask = |method: Method, path: String, content_type: &str| {
        Request::builder().method(method).uri(path).header("content-type", content_type).body(manifest.text.bytes())
    };
    let created = client.request::<Value>(ask(Method::POST, format!("{forks}{how}"), manifest.text.content_type())?).await;
    let answer = match created {
        // It exists: apply would change it.
        Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => {
            let path = format!("{forks}/{}{how}&force=true", crate::connection::encode(&manifest.name));
            client.request::<Value>(ask(Method::PATCH, path, "application/apply-patch+yaml")?).await
        }
        other => other,
    };
    match answer {
        Ok(object) => Ok(object["spec"].clone()),
        Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => {
            eprintln!("note: whether the cluster would take the object was not checked: {}", status.message);
            Ok(manifest.spec().clone())
        }
        Err(kube::Error::Api(status)) => bail!("{}", status.message),
        Err(error) => Err(error).context("the cluster can't be reached"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(text: &str) -> anyhow::Result<Vec<Manifest>> {
        let file = std::env::temp_dir().join(format!("replayfork-manifest-{}-{:?}", std::process::id(), std::thread::current().id()));
        std::fs::write(&file, text)?;
        let read = read(&file.to_string_lossy());
        std::fs::remove_file(file)?;
        read
    }

    #[test]
    fn a_manifest_gives_spec_and_namespace_and_anything_else_is_refused_by_name() {
        let good = reads("kind: ReplayFork\nmetadata: {name: x, namespace: agents}\nspec: {source: {run: r, span: s}}\n").unwrap();
        assert_eq!((good.len(), good[0].name.as_str(), good[0].namespace.as_deref()), (1, "x", Some("agents")));
        assert_eq!(good[0].spec()["source"]["run"], "r");
        for (text, says) in [("kind: Pod\n", "not ReplayFork"), ("---\n", "is empty"), ("{\"kind\": ", "can't be read")] {
            let error = format!("{:#}", reads(text).unwrap_err());
            assert!(error.contains(says), "{error}");
        }
        assert!(read("/nowhere.yaml").unwrap_err().to_string().contains("can't read /nowhere.yaml"));
    }

    #[test]
    fn a_file_may_hold_several_forks_beside_other_objects() {
        let text = "# two\n---\nkind: ReplayFork\nmetadata: {name: a}\n--- # a comment\nkind: ConfigMap\ndata: {x: |-\n  --- y}\n---\n\
                    {\"kind\": \"ReplayFork\", \"metadata\": {\"name\": \"b\"}}\n";
        let text = text.replace("data: {x: |-\n  --- y}", "data:\n  x: |\n    --- y");
        let names = |text: &str| reads(text).unwrap().into_iter().map(|m| m.name).collect::<Vec<_>>();
        assert_eq!(names(&text), ["a", "b"]);
        let list = "kind: List\nitems:\n- {kind: ReplayFork, metadata: {name: c}}\n- {kind: ReplayFork, metadata: {name: d}}\n";
        assert_eq!(names(list), ["c", "d"]);
        assert_eq!(names("{kind: ReplayFork, metadata: {name: flow}}"), ["flow"]);
    }

    #[test]
    fn json_means_what_json_means() {
        let text = r#"{"kind": "ReplayFork", "metadata": {"name": "x"}, "spec": {"text": "\ud83d\ude00 \/"}}"#;
        assert_eq!(reads(text).unwrap()[0].spec()["text"], "😀 /");
    }
}
