"""Calls of a compiled model: those that run as the model is, and how they fill its KV cache."""
