"""The host tier: exact pairs in memory or in files."""
