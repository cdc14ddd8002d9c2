"""Attention over codes on a GPU."""
