"""A small retrieval model that was trained for this project, and its task."""
