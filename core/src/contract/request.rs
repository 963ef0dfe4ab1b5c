//! A model call's request: JSON, with templates at some of its places.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::IncompleteContract;
use crate::binding::{BindingError, Renderer};
use crate::model::Binding;
use crate::patch::{Message, ModelConfigPatch, Patches, Prompt};

/// The request, and by JSON pointer (RFC 6901) the templates that render into it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    base: Value,
    places: BTreeMap<String, String>,
}

impl Request {
    /// The recorded request, or what patches make of it.
    ///
    /// # Errors
    /// A binding that renders to a place which the request does not have.
    pub fn build(
        recorded: &Value,
        bindings: &BTreeMap<String, Binding>,
        patches: Option<(&Patches, usize)>,
    ) -> Result<Self, IncompleteContract> {
        let mut request = Self { base: recorded.clone(), places: BTreeMap::new() };
        for (pointer, binding) in bindings.iter().filter(|(name, _)| name.starts_with('/')) {
            if let Binding::Template(template) = binding {
                request.set(pointer.clone(), template.clone())?;
            }
        }
        if let Some((patches, span)) = patches {
            if let Some(prompt) = patches.prompt.get(&span) {
                request.edit_prompt(prompt)?;
            }
            if let Some(config) = patches.model_config.get(&span) {
                request.edit_config(config);
            }
        }
        Ok(request)
    }

    /// A template's place is empty in the base, so that two requests with the same templates are equal whatever they rendered to.
    fn set(&mut self, pointer: String, template: String) -> Result<(), IncompleteContract> {
        match self.base.pointer_mut(&pointer) {
            Some(place) => *place = Value::String(String::new()),
            None => return Err(IncompleteContract::RequestPlace(pointer)),
        }
        self.places.insert(pointer, template);
        Ok(())
    }

    fn forget_below(&mut self, prefix: &str) {
        self.places.retain(|pointer, _| pointer != prefix && !pointer.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/')));
    }

    fn edit_prompt(&mut self, prompt: &Prompt) -> Result<(), IncompleteContract> {
        if let Some(all) = &prompt.all {
            self.forget_below("/messages");
            self.forget_below("/system");
            if let Some(members) = self.base.as_object_mut() {
                members.remove("system");
            }
            self.base["messages"] = all.iter().map(|m: &Message| json!({"role": m.role, "content": ""})).collect();
            for (i, message) in all.iter().enumerate() {
                self.set(format!("/messages/{i}/content"), message.content.clone())?;
            }
        }
        for (i, content) in &prompt.messages {
            self.forget_below(&format!("/messages/{i}/content"));
            if let Some(Value::Object(message)) = self.base.pointer_mut(&format!("/messages/{i}")) {
                message.insert("content".into(), json!(""));
            }
            self.set(format!("/messages/{i}/content"), content.clone())?;
        }
        if let Some(system) = &prompt.system {
            let role = self.base.pointer("/messages/0/role").and_then(Value::as_str);
            if self.base.get("system").is_some() {
                self.forget_below("/system");
                self.base["system"] = json!("");
                self.set("/system".into(), system.clone())?;
            } else if matches!(role, Some("system" | "developer")) {
                self.forget_below("/messages/0/content");
                if let Some(Value::Object(message)) = self.base.pointer_mut("/messages/0") {
                    message.insert("content".into(), json!(""));
                }
                self.set("/messages/0/content".into(), system.clone())?;
            } else {
                self.insert_system(system)?;
            }
        }
        Ok(())
    }

    /// A request without a system prompt gets one in front; what is bound to its messages moves with them.
    fn insert_system(&mut self, system: &str) -> Result<(), IncompleteContract> {
        let moved = |pointer: &str| {
            let rest = pointer.strip_prefix("/messages/")?;
            let (index, below) = rest.split_once('/').map_or((rest, ""), |(i, b)| (i, b));
            let index: usize = index.parse().ok()?;
            Some(if below.is_empty() { format!("/messages/{}", index + 1) } else { format!("/messages/{}/{below}", index + 1) })
        };
        self.places = std::mem::take(&mut self.places).into_iter().map(|(p, t)| (moved(&p).unwrap_or(p), t)).collect();
        if let Some(messages) = self.base.get_mut("messages").and_then(Value::as_array_mut) {
            messages.insert(0, json!({"role": "system", "content": ""}));
        }
        self.set("/messages/0/content".into(), system.to_owned())
    }

    fn edit_config(&mut self, config: &ModelConfigPatch) {
        let model = config.model.iter().map(|m| ("model", json!(m)));
        let parameters: Vec<_> = config.parameters.iter().map(|(k, v)| (k.as_str(), v.clone())).chain(model).collect();
        for (name, value) in parameters {
            self.forget_below(&format!("/{}", escape(name)));
            self.base[name] = value;
        }
        for name in &config.unset {
            self.forget_below(&format!("/{}", escape(name)));
            if let Some(members) = self.base.as_object_mut() {
                members.remove(name);
            }
        }
    }

    pub fn templates(&self) -> impl Iterator<Item = &str> {
        self.places.values().map(String::as_str)
    }

    /// # Errors
    /// The first template that can't be rendered.
    pub fn render(&self, renderer: &Renderer<'_>) -> Result<Value, BindingError> {
        let mut request = self.base.clone();
        for (pointer, template) in &self.places {
            if let Some(place) = request.pointer_mut(pointer) {
                *place = Value::String(renderer.render(template)?);
            }
        }
        Ok(request)
    }

    /// The templates as bindings of a span.
    pub fn bindings(&self) -> impl Iterator<Item = (String, Binding)> {
        self.places.iter().map(|(pointer, template)| (pointer.clone(), Binding::Template(template.clone())))
    }

    pub fn into_base(self) -> Value {
        self.base
    }
}

/// A member's name in a JSON pointer.
fn escape(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}
