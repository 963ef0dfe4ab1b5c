//! The api-server: the only owner of Postgres. It takes what recorders send, plans forks, serves sandboxes, and hosts the viewer.
//!
//! It touches no Kubernetes object other than TokenReview and SubjectAccessReview.

pub mod auth;
pub mod config;
pub mod db;
pub mod diffing;
pub mod endpoints;
pub mod metrics;
pub mod planning;
pub mod problem;
pub mod routes;
pub mod state;
pub mod store;
pub mod tls;
