"""Tensors that stand for a session's layer in the model's cache."""
