"""Logging users in, over a pool of connections."""
