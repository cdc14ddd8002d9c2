"""KV caches: found by moving ids through a graph, and put in one form, an append of new tokens."""
