"""Rewrites of a `Program`'s graph, one file a pass."""
