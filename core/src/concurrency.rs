//! Steps that ran at the same time, and whose change of the workspace is whose.
//!
//! Snapshots are taken around each step. Where two steps overlap in time, each one's snapshots show the other's changes too.
//! Declared footprints that exclude each other's writes tell them apart; otherwise they are one, an entangled group.

use std::collections::BTreeMap;

use crate::footprint::{Footprint, Pattern};
use crate::model::SnapshotRef;
use crate::source::{Changed, Source};

/// Units that touch the workspace and overlap in time, chained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// At least two, in order of sequence.
    pub members: Vec<usize>,
    /// Whether the footprints of every overlapping pair exclude each other's writes: the members are then as good as sequential.
    pub separable: bool,
    /// The member that ended last; `None` where an end was not recorded.
    pub last_ended: Option<usize>,
}

/// The units that ran and touch the workspace, or were recorded with it, with their footprints, in order of their start.
fn touching(source: &Source) -> Vec<(usize, Footprint)> {
    units(source, |i| !source.was_left_out(i))
}

fn units(source: &Source, which: impl Fn(usize) -> bool) -> Vec<(usize, Footprint)> {
    let mut units: Vec<_> = (0..source.spans.len())
        .filter(|&i| source.is_unit(i) && !source.spans[i].did_not_run() && which(i))
        .map(|i| (i, source.footprint(i)))
        .filter(|(i, footprint)| !footprint.is_none() || source.spans[*i].snapshot_before.is_some())
        .collect();
    units.sort_by_key(|(i, _)| (source.interval(*i).0, *i));
    units
}

/// What a fork ran, it ran one step after the other.
fn overlap(source: &Source, a: usize, b: usize) -> bool {
    let recorded = |i: usize| source.spans[i].fidelity == crate::model::Fidelity::Recorded;
    let (x, y) = (source.interval(a), source.interval(b));
    recorded(a) && recorded(b) && x.0 < y.1 && y.0 < x.1
}

/// Calls `f` with every pair of positions in `units` that overlap in time.
fn pairs(source: &Source, units: &[(usize, Footprint)], mut f: impl FnMut(usize, usize)) {
    let mut active: Vec<usize> = Vec::new();
    for (at, (unit, _)) in units.iter().enumerate() {
        let started = source.interval(*unit).0;
        active.retain(|&a| source.interval(units[a].0).1 > started);
        for &a in &active {
            if overlap(source, units[a].0, *unit) {
                f(a, at);
            }
        }
        active.push(at);
    }
}

/// The groups of a run whose changes are known.
pub fn groups(source: &Source) -> Vec<Group> {
    let units = touching(source);
    let mut leader: Vec<usize> = (0..units.len()).collect();
    fn find(leader: &mut [usize], mut at: usize) -> usize {
        while leader[at] != at {
            leader[at] = leader[leader[at]];
            at = leader[at];
        }
        at
    }
    let mut tangles = Vec::new();
    pairs(source, &units, |a, b| {
        let (x, y) = (find(&mut leader, a), find(&mut leader, b));
        leader[x.max(y)] = x.min(y);
        if !units[a].1.excludes(&units[b].1) {
            tangles.push(a);
        }
    });
    let mut found: BTreeMap<usize, Group> = BTreeMap::new();
    for (at, (unit, _)) in units.iter().enumerate() {
        let root = find(&mut leader, at);
        let group = found.entry(root).or_insert(Group { members: Vec::new(), separable: true, last_ended: None });
        group.members.push(*unit);
    }
    for at in tangles {
        if let Some(group) = found.get_mut(&find(&mut leader, at)) {
            group.separable = false;
        }
    }
    let mut groups: Vec<_> = found.into_values().filter(|g| g.members.len() > 1).collect();
    for group in &mut groups {
        group.members.sort_unstable();
        let ended = |m: usize| if source.is_walked(m) { i64::MAX } else { source.interval(m).1 };
        let last = group.members.iter().copied().max_by_key(|&m| (ended(m), m));
        group.last_ended = last.filter(|&m| source.spans[m].closing.is_some());
    }
    groups
}

/// What each unit saw through symlinks. `follow` lists what is seen so in a recorded state of the workspace; `source` is the run
/// with nothing known of its changes.
///
/// # Errors
/// What `follow` says.
pub fn seen_through_links<E>(
    source: &Source,
    mut follow: impl FnMut(&SnapshotRef, &[Pattern]) -> Result<Vec<Pattern>, E>,
) -> Result<BTreeMap<String, Changed>, E> {
    let mut changed = BTreeMap::new();
    // A step without snapshots saw what the last one with some left.
    let mut state = source.spans.iter().find_map(|s| s.snapshot_before);
    for (unit, footprint) in touching(source) {
        let record = &source.spans[unit];
        state = record.snapshot_before.or(state);
        if let Some(before) = state.filter(|_| !footprint.sees.is_empty() && footprint.sees != [Pattern::all()]) {
            let through: Vec<_> = follow(&before, &footprint.sees)?.iter().map(Pattern::declared).collect();
            if !through.is_empty() {
                changed.insert(record.id.clone(), Changed { through, ..Changed::default() });
            }
        }
        state = record.snapshot_after.or(state);
    }
    Ok(changed)
}

/// Which paths each unit changed, and which changed outside of any. `diff` lists the paths that differ between two recorded
/// states of the workspace; `source` is the run with what its units saw through symlinks, and without its changes.
///
/// # Errors
/// What `diff` says.
pub fn recorded_changes<E>(
    source: &Source,
    mut diff: impl FnMut(&SnapshotRef, &SnapshotRef) -> Result<Vec<String>, E>,
) -> Result<BTreeMap<String, Changed>, E> {
    let through = |(id, changed): (&String, &Changed)| Some((source.index(id)?, changed.clone()));
    let mut changed: BTreeMap<usize, Changed> = source.changed.iter().filter_map(through).collect();
    let mut differing = |a: Option<SnapshotRef>, b: Option<SnapshotRef>| match (a, b) {
        (Some(a), Some(b)) if a.content != b.content => diff(&a, &b),
        _ => Ok(Vec::new()),
    };
    let units = touching(source);
    for (unit, _) in &units {
        let record = &source.spans[*unit];
        let during = differing(record.snapshot_before, record.snapshot_after)?;
        if !during.is_empty() {
            changed.entry(*unit).or_default().during = during;
        }
    }
    let mut overlapping: Vec<Vec<usize>> = vec![Vec::new(); units.len()];
    pairs(source, &units, |a, b| {
        overlapping[a].push(b);
        overlapping[b].push(a);
    });
    for (at, (unit, footprint)) in units.iter().enumerate() {
        let Some(of_unit) = changed.get_mut(unit) else { continue };
        let declared = |path: &String| {
            Footprint::declares(&footprint.writes, path)
                || overlapping[at].iter().any(|&other| Footprint::declares(&units[other].1.writes, path))
        };
        of_unit.outside = of_unit.during.iter().filter(|path| !declared(path)).cloned().collect();
    }
    let by_id = |changed: &BTreeMap<usize, Changed>| changed.iter().map(|(i, c)| (source.spans[*i].id.clone(), c.clone())).collect();
    let known = Source::new(source.environment.clone(), source.spans.clone(), by_id(&changed));
    for (unit, footprint) in &units {
        if let Some(group) = known.entangled(*unit) {
            let (first, last) = (group.members[0], group.last_ended);
            let all = differing(source.spans[first].snapshot_before, last.and_then(|l| source.spans[l].snapshot_after))?;
            changed.entry(*unit).or_default().during = all;
        } else if let Some(of_unit) = changed.get_mut(unit)
            && of_unit.outside.is_empty()
        {
            of_unit.during.retain(|path| Footprint::declares(&footprint.writes, path));
        }
    }
    // Between the last of all earlier units to end, and a unit that none of them overlaps.
    let mut last: Option<usize> = None;
    let mut state = source.spans.iter().find_map(|s| s.snapshot_before);
    // What came before a unit that a fork blocked is told by the workspace that it would have seen.
    for (unit, footprint) in &self::units(source, |i| !source.was_left_out(i) || source.spans[i].snapshot_before.is_some()) {
        // What a fork has walked is in sequence, but for groups that it kept as one.
        let together = |l: usize| if source.is_walked(*unit) { known.tangled(l, *unit) } else { overlap(source, l, *unit) };
        let alone = last.is_none_or(|l| !together(l));
        let record = &source.spans[*unit];
        if alone {
            let gap = differing(state, record.snapshot_before)?;
            if !gap.is_empty() {
                changed.entry(*unit).or_default().before = gap;
            }
        }
        if alone || source.is_walked(*unit) || last.is_none_or(|l| source.interval(l).1 <= source.interval(*unit).1) {
            last = Some(*unit);
            // A step that writes nothing leaves what was there.
            let left = source.left(*unit).map(|(state, _)| state);
            if left.is_some() || !footprint.writes.is_empty() {
                state = left;
            } else {
                state = record.snapshot_before.or(state);
            }
        }
    }
    Ok(changed.into_iter().map(|(i, c)| (source.spans[i].id.clone(), c)).collect())
}
