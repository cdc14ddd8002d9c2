"""How many graphs were made."""

from __future__ import annotations

from torch._dynamo.utils import counters


def num_graphs() -> int:
    """Dynamo's graphs, and those of decode steps that are traced without it, since the counters were cleared."""
    return counters["stats"]["unique_graphs"] + counters["specache"]["direct_steps"]
