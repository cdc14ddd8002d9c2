"""The papers' experiments as data: `specache-bench experiment NAME`. A new one is an `Experiment` and a line here."""

from __future__ import annotations

from typing import Any

from specache_bench.experiments import tables
from specache_bench.experiments.needles import Needles

EXPERIMENTS: dict[str, Any] = {
    made.name: made
    for made in (
        tables.TABLE1,
        tables.TABLE2,
        tables.TABLE4,
        tables.TABLE5,
        Needles(),
        tables.FIGURE5,
        tables.KCACHE,
        tables.QUANTIZERS_TABLE,
        tables.PARETO,
        tables.REFETCH,
    )
}
