//! What the recorder remembers of the runs under way: order, names, and whether bindings refer to something.

use std::collections::{HashMap, HashSet};

use replayfork_core::binding::{self, Hole};
use replayfork_core::model::Opening;

#[derive(Default)]
pub struct RunMemory {
    /// Begun after a restart of the recorder: earlier spans are not known.
    partial: bool,
    names_of_ended: HashSet<String>,
    ended: HashSet<String>,
    /// Name and whether it sees the workspace, of spans under way.
    open: HashMap<String, (String, bool)>,
}

impl RunMemory {
    /// Of a run whose beginning another recorder took.
    pub fn partial() -> Self {
        Self { partial: true, ..Self::default() }
    }

    /// Checks that every hole of the span's bindings refers to a span that has ended.
    ///
    /// # Errors
    /// The first that does not, with field and template.
    pub fn check_bindings(&self, span: &str, opening: &Opening) -> Result<(), String> {
        if self.partial {
            return Ok(());
        }
        for (field, bound) in &opening.input_bindings {
            for template in binding::templates(bound) {
                let holes = binding::holes(template).map_err(|e| format!("span {span:?}: input_bindings.{field}: {e}"))?;
                for hole in holes {
                    let known = match &hole {
                        Hole::Name(name) => self.names_of_ended.contains(name),
                        Hole::Id(id) => self.ended.contains(id),
                    };
                    if !known {
                        return Err(format!(
                            "span {span:?}: input_bindings.{field}: {template:?} refers to {hole}, and no span of that name or id has ended before this one begins"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that there is a span of this id or name.
    ///
    /// # Errors
    /// There is none.
    pub fn check_decides(&self, span: &str) -> Result<(), String> {
        let open = self.open.contains_key(span) || self.open.values().any(|(name, _)| name == span);
        if self.partial || open || self.ended.contains(span) || self.names_of_ended.contains(span) {
            return Ok(());
        }
        Err(format!("decided_by: the run has no span with the id or name {span:?}"))
    }

    pub fn begun(&mut self, span: &str, opening: &Opening) {
        self.open.insert(span.to_owned(), (opening.name.clone(), opening.sees_workspace()));
    }

    /// Whether the span that ends sees the workspace.
    pub fn ended(&mut self, span: &str) -> bool {
        self.ended.insert(span.to_owned());
        match self.open.remove(span) {
            Some((name, sees_workspace)) => {
                self.names_of_ended.insert(name);
                sees_workspace
            }
            None => true,
        }
    }
}
