//! What a user of the chart gets from their values, as Helm renders them.

mod objects;
mod refusals;
mod render;
mod rights;
