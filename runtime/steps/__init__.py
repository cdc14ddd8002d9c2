"""Decode steps as one operator a layer, recorded and replayed."""
