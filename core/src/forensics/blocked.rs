//! Blocked spans, by the one that they come from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{MAX_LISTED, SpanRef};
use crate::model::Status;
use crate::reason::Blocked;
use crate::source::Source;

/// A blocked span that waits for no other blocked one, and all that wait for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BlockedGroup {
    pub root: SpanRef,
    pub reasons: Vec<Blocked>,
    /// The others, in order of sequence.
    pub spans: Vec<BlockedSpan>,
    /// Others that are not listed.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub left_out: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BlockedSpan {
    pub span: SpanRef,
    pub reasons: Vec<Blocked>,
}

/// Groups in order of their roots.
pub(super) fn groups(source: &Source) -> Vec<BlockedGroup> {
    let is_blocked = |i: usize| source.spans[i].status() == Status::Blocked;
    let reasons = |i: usize| source.spans[i].closing.as_ref().map_or(&[][..], |c| &c.blocked);
    let waits_for = |i: usize| {
        let upstream = reasons(i).iter().filter_map(|b| source.index(b.upstream.as_deref()?));
        upstream.filter(|&u| u != i && is_blocked(u)).min()
    };
    let mut roots: Vec<Option<usize>> = vec![None; source.spans.len()];
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for span in (0..source.spans.len()).filter(|&i| is_blocked(i)) {
        let mut chain = vec![span];
        let root = loop {
            let Some(&at) = chain.last() else { break span };
            if let Some(known) = roots[at] {
                break known;
            }
            match waits_for(at) {
                None => break at,
                Some(next) => {
                    // For now; a chain that comes back to itself ends where it began.
                    roots[at] = Some(span);
                    chain.push(next);
                }
            }
        };
        chain.iter().for_each(|&at| roots[at] = Some(root));
        groups.entry(root).or_default().push(span);
    }
    let describe = |(root, mut spans): (usize, Vec<usize>)| {
        spans.retain(|&s| s != root);
        let left_out = spans.len().saturating_sub(MAX_LISTED) as i64;
        let listed = spans.iter().take(MAX_LISTED);
        BlockedGroup {
            root: SpanRef::of(source, root),
            reasons: reasons(root).to_vec(),
            spans: listed.map(|&s| BlockedSpan { span: SpanRef::of(source, s), reasons: reasons(s).to_vec() }).collect(),
            left_out,
        }
    };
    groups.into_iter().map(describe).collect()
}
