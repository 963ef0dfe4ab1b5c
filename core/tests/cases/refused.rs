//! What a fork refuses, and in which words.
