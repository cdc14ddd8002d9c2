"""KV caches in files: written, checked, loaded, and found by the tokens of a prompt."""
