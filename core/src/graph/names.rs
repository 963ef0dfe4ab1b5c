//! Ids, names and kinds of spans by their place, in blocks that are read one by one.

use crate::bytes::{Broken, Reader, Writer};
use crate::model::SpanKind;
use crate::source::Source;

/// Spans in one block.
pub const NAMES: usize = 512;

/// The spans from `first` on, at most [`NAMES`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamesBlock {
    pub first: u32,
    pub spans: Vec<Named>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    pub id: String,
    pub name: String,
    pub kind: SpanKind,
    pub ord: i64,
    /// The span before whose start, or (`true`) after whose end, the workspace was recorded as it is before this one.
    pub state: Option<(u32, bool)>,
}

impl NamesBlock {
    /// All blocks of a run.
    pub fn all(source: &Source) -> Vec<Self> {
        let states = super::build::states(source);
        let named = |i: usize| {
            let span = &source.spans[i];
            Named { id: span.id.clone(), name: span.opening.name.clone(), kind: span.opening.kind, ord: span.ord, state: states[i] }
        };
        let starts = (0..source.spans.len()).step_by(NAMES);
        starts
            .map(|first| Self { first: first as u32, spans: (first..source.spans.len().min(first + NAMES)).map(named).collect() })
            .collect()
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.number(self.first);
        out.number(self.spans.len() as u32);
        for Named { id, name, kind, ord, state } in &self.spans {
            out.text(id);
            out.text(name);
            out.number(kind.code() as u32);
            out.number(*ord as u32);
            out.number((*ord >> 32) as u32);
            out.number(state.map_or(super::NONE, |(span, after)| span << 1 | u32::from(after)));
        }
        out.finish()
    }

    /// # Errors
    /// Bytes that [`NamesBlock::encode`] did not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, Broken> {
        let mut input = Reader::new(bytes)?;
        let first = input.number()?;
        let spans = input.number()?;
        let mut block = Self { first, spans: Vec::new() };
        for _ in 0..spans {
            let (id, name) = (input.text()?.to_owned(), input.text()?.to_owned());
            let kind = i16::try_from(input.number()?).ok().and_then(SpanKind::from_code).ok_or(Broken)?;
            let (low, high) = (input.number()?, input.number()?);
            let state = Some(input.number()?).filter(|s| *s != super::NONE).map(|s| (s >> 1, s & 1 == 1));
            block.spans.push(Named { id, name, kind, ord: (i64::from(high) << 32) | i64::from(low), state });
        }
        Ok(block)
    }
}
