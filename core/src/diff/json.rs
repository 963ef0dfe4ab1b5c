//! Outputs that are JSON, compared by what they say and not by how they are written.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Number, Value};
use similar::{Algorithm, DiffOp, capture_diff_slices};
use utoipa::ToSchema;

/// Changes of one output that are listed.
pub const MAX_CHANGES: usize = 100;
/// Bytes, written as JSON, of a value that is shown whole.
pub const MAX_VALUE: usize = 1000;

/// A member or element that differs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JsonChange {
    /// JSON pointer (RFC 6901) into the second value; into the first where the second has no such place.
    pub path: String,
    /// The place in the first value, where elements before it were added or removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_before: Option<String>,
    /// Absent: there was no such member. A value that is too large is cut to a text that says so.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    pub before: Option<Value>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    pub after: Option<Value>,
    /// `before` or `after` is the beginning of the value's JSON text.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut: bool,
}

/// How two JSON texts differ; no changes where they are only written in another way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JsonDiff {
    pub changes: Vec<JsonChange>,
    /// Further changes that are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: i64,
}

fn is_zero(n: &i64) -> bool {
    *n == 0
}

/// `null` is a value; only a missing member is none.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Compares two texts that both are JSON objects or arrays; `None` where one is not.
pub fn json_diff(a: &str, b: &str) -> Option<JsonDiff> {
    let structured = |text: &str| {
        // Most outputs are none: a look at the first character spares the parser.
        let looks = matches!(text.trim_start().as_bytes().first(), Some(b'{' | b'['));
        looks.then(|| serde_json::from_str::<Value>(text).ok()).flatten()
    };
    let (a, b) = (structured(a)?, structured(b)?);
    let mut walk = Walk { diff: JsonDiff::default(), before: String::new(), after: String::new() };
    walk.values(&a, &b);
    Some(walk.diff)
}

/// Equal as JSON: numbers as numbers, members in any order.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => same_number(x, y),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        (Value::Object(x), Value::Object(y)) => x.len() == y.len() && x.iter().all(|(key, x)| y.get(key).is_some_and(|y| same(x, y))),
        _ => a == b,
    }
}

/// An integer as it is, else the nearest double: `1`, `1.0` and `1e0` are one number, 2⁵³ + 1 is not 2⁵³.
#[derive(PartialEq, Eq, Hash)]
enum Exact {
    Integer(i128),
    Double(u64),
}

fn number(n: &Number) -> Exact {
    if let Some(i) = n.as_i128() {
        return Exact::Integer(i);
    }
    let double = n.as_f64().unwrap_or(f64::NAN);
    // Every double of this size that is whole is an i128 exactly.
    if double.fract() == 0.0 && double.abs() < 1e38 { Exact::Integer(double as i128) } else { Exact::Double(double.to_bits()) }
}

fn same_number(a: &Number, b: &Number) -> bool {
    a == b || number(a) == number(b)
}

/// The value with each number in one form, so that values which are the [`same`] have one digest.
pub(super) fn normal(value: &Value) -> Value {
    match value {
        Value::Number(n) => match number(n) {
            Exact::Integer(i) => Number::from_i128(i).map_or_else(|| value.clone(), Value::Number),
            Exact::Double(_) => value.clone(),
        },
        Value::Array(items) => items.iter().map(normal).collect(),
        Value::Object(members) => members.iter().map(|(key, member)| (key.clone(), normal(member))).collect(),
        other => other.clone(),
    }
}

struct Walk {
    diff: JsonDiff,
    before: String,
    after: String,
}

impl Walk {
    fn values(&mut self, a: &Value, b: &Value) {
        match (a, b) {
            (Value::Object(x), Value::Object(y)) => {
                for (key, value) in x {
                    self.at(key, key, |walk| match y.get(key) {
                        Some(other) => walk.values(value, other),
                        None => walk.change(Some(value), None),
                    });
                }
                for (key, value) in y.iter().filter(|(key, _)| !x.contains_key(*key)) {
                    self.at(key, key, |walk| walk.change(None, Some(value)));
                }
            }
            (Value::Array(x), Value::Array(y)) => self.arrays(x, y),
            _ if same(a, b) => {}
            _ => self.change(Some(a), Some(b)),
        }
    }

    /// Elements correspond where they are equal, in order; what lies between is compared one by one.
    fn arrays(&mut self, a: &[Value], b: &[Value]) {
        let mut names = Names::default();
        let (x, y): (Vec<_>, Vec<_>) = (a.iter().map(|v| names.of(v)).collect(), b.iter().map(|v| names.of(v)).collect());
        for op in capture_diff_slices(Algorithm::Myers, &x, &y) {
            if matches!(op, DiffOp::Equal { .. }) {
                continue;
            }
            let (old, new) = (op.old_range(), op.new_range());
            for k in 0..old.len().max(new.len()) {
                let (i, j) = (old.start + k, new.start + k);
                let (before, after) = (old.contains(&i).then(|| &a[i]), new.contains(&j).then(|| &b[j]));
                match (before, after) {
                    (Some(before), Some(after)) => self.at(&i.to_string(), &j.to_string(), |walk| walk.values(before, after)),
                    (Some(_), None) => self.at(&i.to_string(), &i.to_string(), |walk| walk.change(before, None)),
                    _ => self.at(&j.to_string(), &j.to_string(), |walk| walk.change(None, after)),
                }
            }
        }
    }

    fn at(&mut self, before: &str, after: &str, inside: impl FnOnce(&mut Self)) {
        let lengths = (self.before.len(), self.after.len());
        for (path, token) in [(&mut self.before, before), (&mut self.after, after)] {
            path.push('/');
            path.push_str(&token.replace('~', "~0").replace('/', "~1"));
        }
        inside(self);
        self.before.truncate(lengths.0);
        self.after.truncate(lengths.1);
    }

    fn change(&mut self, before: Option<&Value>, after: Option<&Value>) {
        if self.diff.changes.len() >= MAX_CHANGES {
            self.diff.left_out += 1;
            return;
        }
        let mut cut = false;
        let mut shown = |value: Option<&Value>| {
            let value = value?;
            let text = value.to_string();
            if text.len() <= MAX_VALUE {
                return Some(value.clone());
            }
            cut = true;
            let to = text.floor_char_boundary(MAX_VALUE);
            Some(Value::String(format!("{} … {} bytes …", &text[..to], text.len() - to)))
        };
        let (before, after) = (shown(before), shown(after));
        let path = if after.is_some() { &self.after } else { &self.before }.clone();
        let moved = before.is_some() && self.before != path;
        self.diff.changes.push(JsonChange { path_before: moved.then(|| self.before.clone()), path, before, after, cut });
    }
}

/// Small numbers for values, the same one for the same value.
#[derive(Default)]
struct Names<'a>(HashMap<Named<'a>, u32>);

impl<'a> Names<'a> {
    fn of(&mut self, value: &'a Value) -> u32 {
        let next = self.0.len() as u32;
        *self.0.entry(Named(value)).or_insert(next)
    }
}

struct Named<'a>(&'a Value);

impl PartialEq for Named<'_> {
    fn eq(&self, other: &Self) -> bool {
        same(self.0, other.0)
    }
}

impl Eq for Named<'_> {}

impl Hash for Named<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        hash(self.0, state);
    }
}

/// Values that are the [`same`] have the same hash.
pub(super) fn hash(value: &Value, state: &mut impl Hasher) {
    match value {
        Value::Number(n) => number(n).hash(state),
        Value::Array(items) => {
            state.write_usize(items.len());
            items.iter().for_each(|item| hash(item, state));
        }
        Value::Object(members) => {
            // A sum, since members come in any order.
            let each = members.iter().map(|(key, value)| {
                let mut hasher = DefaultHasher::new();
                key.hash(&mut hasher);
                hash(value, &mut hasher);
                hasher.finish()
            });
            state.write_u64(each.fold(1, u64::wrapping_add));
        }
        other => other.hash(state),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn changes(a: &Value, b: &Value) -> Vec<Value> {
        json_diff(&a.to_string(), &b.to_string()).unwrap().changes.iter().map(|c| json!(c)).collect()
    }

    #[test]
    fn each_difference_is_named_by_its_place() {
        let a = json!({"ok": true, "runs": [{"id": 1, "ms": 1.5}, {"id": 2, "ms": 3}], "gone": null, "a/b~c": 1});
        let b = json!({"runs": [{"id": 1, "ms": 1.5}, {"ms": 4.25, "id": 2}], "ok": null, "new": {}, "a/b~c": 2});
        assert_eq!(
            changes(&a, &b),
            [
                json!({"path": "/ok", "before": true, "after": null}),
                json!({"path": "/runs/1/ms", "before": 3, "after": 4.25}),
                json!({"path": "/gone", "before": null}),
                json!({"path": "/a~1b~0c", "before": 1, "after": 2}),
                json!({"path": "/new", "after": {}}),
            ]
        );
    }

    #[test]
    fn an_element_put_in_front_is_one_change() {
        assert_eq!(changes(&json!([1, 2, 3]), &json!([0, 1, 2, 3])), [json!({"path": "/0", "after": 0})]);
        assert_eq!(changes(&json!([1, 2, 3]), &json!([1, 3])), [json!({"path": "/1", "before": 2})]);
        assert_eq!(
            changes(&json!([{"n": 1}, {"n": 2}]), &json!([0, {"n": 1}, {"n": 3}])),
            [json!({"path": "/0", "after": 0}), json!({"path": "/2/n", "path_before": "/1/n", "before": 2, "after": 3})]
        );
    }

    #[test]
    fn another_notation_is_no_change() {
        let diff = |a: &str, b: &str| json_diff(a, b).map(|d| d.changes.len());
        assert_eq!(diff(r#"{"a": 1, "b": [1.0, 1e2]}"#, r#"{"b":[1,100],"a":1.0}"#), Some(0));
        assert_eq!(diff("[0.0]", "[-0.0]"), Some(0));
        assert_eq!(diff("[9007199254740993]", "[9007199254740992.0]"), Some(1));
        assert_eq!(diff("[0.1]", "[0.10000000000000001]"), Some(0));
        assert_eq!(diff("[null]", "[]"), Some(1));
    }

    #[test]
    fn what_is_no_object_or_array_is_left_to_the_text_diff() {
        assert_eq!(json_diff("1", "2"), None);
        assert_eq!(json_diff("{}", "ok"), None);
        assert_eq!(json_diff("[1e999]", "[]"), None);
        assert_eq!(json_diff(&"[".repeat(100_000), "[]"), None);
    }

    #[test]
    fn null_and_absent_survive_the_wire() {
        let diff = json_diff(r#"{"a": null, "b": 1}"#, r#"{"a": 1, "c": null}"#).unwrap();
        let back: JsonDiff = serde_json::from_value(json!(diff)).unwrap();
        assert_eq!(back, diff);
        assert_eq!(back.changes[0].before, Some(Value::Null));
        assert_eq!(back.changes[1].after, None);
    }

    #[test]
    fn many_and_large_changes_are_bounded_and_counted() {
        let list = |c: u32| Value::from((0..5000).map(|i| json!(format!("{c}-{i}"))).collect::<Vec<_>>());
        let diff = json_diff(&list(1).to_string(), &list(2).to_string()).unwrap();
        assert_eq!((diff.changes.len(), diff.left_out), (MAX_CHANGES, 4900));
        let diff = json_diff("{}", &json!({"long": "é".repeat(5000)}).to_string()).unwrap();
        let after = diff.changes[0].after.as_ref().and_then(Value::as_str).unwrap();
        assert!(diff.changes[0].cut && after.ends_with(" bytes …") && after.len() < 1100);
    }
}
