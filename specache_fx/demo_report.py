"""What the demo found: its rows, a table for people, and JSON with where the numbers came from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from specache_fx.api import stats
from specache_fx.sizes import format_size

_PACKAGES = ("specache-fx", "torch", "transformers", "torchao")


@dataclass(frozen=True)
class DemoSettings:
    """What the demo runs on; see `specache-fx demo --help`."""

    model: str
    prompts: int = 50
    context: int = 2000
    records: int = 48
    seed: int = 0
    batch_size: int = 10
    dtype: str = "bfloat16"
    lowering: str = "inductor"


@dataclass
class DemoRow:
    """One line of the table. Bytes are of one sequence; None where the method has no such thing.

    Attributes:
        method: A name in `METHODS`.
        exact_match: Share of prompts of which every answer token is right.
        device_bytes: Of the KV cache at the end, counted on its tensors.
        full_bytes: Of the full cache at the same length.
        host_bytes: Reserved on the host.
        exact_hit_rate: Share of speculative tokens that were the next token.
        topk_hit_rate: Share of the pairs wanted that had been prefetched.
        prefetched_bytes_per_step: Brought to the device for each decoded token.
        seconds: For all prompts, compiling included.
    """

    method: str
    exact_match: float = 0.0
    device_bytes: float = 0.0
    full_bytes: float = 0.0
    host_bytes: float = 0.0
    exact_hit_rate: float | None = None
    topk_hit_rate: float | None = None
    prefetched_bytes_per_step: float | None = None
    seconds: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """`device_bytes / full_bytes`: the paper's "KV Cache Size"."""
        return self.device_bytes / self.full_bytes

    def add(self, past_key_values: Any, correct: int, batch: int, total: int) -> None:
        """Take in one batch of `total` prompts' `batch`; every prompt weighs the same."""
        share = batch / total
        self.exact_match += correct / total
        if not self.options:
            full = sum(x.nbytes for layer in past_key_values.layers for x in (layer.keys, layer.values))
            self.device_bytes += full / total
            self.full_bytes += full / total
            return
        found = stats(past_key_values)
        self.device_bytes += found.device_bytes / total
        self.full_bytes += found.full_bytes / total
        self.host_bytes += found.host_bytes / total
        if self.options["policy"] == "specache":
            per_step = (self.prefetched_bytes_per_step or 0.0) + found.prefetched_bytes / found.steps / total
            self.prefetched_bytes_per_step = per_step
        if found.exact_hit_rate is not None:
            self.exact_hit_rate = (self.exact_hit_rate or 0.0) + found.exact_hit_rate * share
        if found.topk_hit_rate is not None:
            self.topk_hit_rate = (self.topk_hit_rate or 0.0) + found.topk_hit_rate * share


def demo_table(settings: DemoSettings, rows: list[DemoRow]) -> Table:
    """One line a method, bytes for one sequence."""
    table = Table(
        title=f"{settings.prompts} prompts of {settings.context:,} tokens with {settings.records} records each;"
        " bytes for one sequence",
        caption="ratio: KV bytes on the device to the full cache's. token hits: the speculative token was the next"
        " one. top-k hits: the KV pairs wanted had been prefetched.",
    )
    table.add_column("method", no_wrap=True)
    for header in (
        "exact match",
        "device KV",
        "ratio",
        "host KV",
        "token hits",
        "top-k hits",
        "prefetched a step",
    ):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.method,
            f"{row.exact_match:.2f}",
            format_size(row.device_bytes),
            f"{row.ratio:.2f}x",
            format_size(row.host_bytes) if row.host_bytes else "-",
            _share(row.exact_hit_rate),
            _share(row.topk_hit_rate),
            "-" if row.prefetched_bytes_per_step is None else format_size(row.prefetched_bytes_per_step),
        )
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2f}"


def demo_json(settings: DemoSettings, rows: list[DemoRow], threads: int | None = None) -> dict[str, Any]:
    """Everything needed to tell what was measured, on what, with what.

    Args:
        settings: What it ran on.
        rows: What it found.
        threads: CPU threads it ran with; torch's choice by default.
    """
    return {
        "command": " ".join(["specache-fx", *sys.argv[1:]]),
        "device": {
            "type": "cpu",
            "name": platform.processor() or platform.machine(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": threads or torch.get_num_threads(),
        },
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "commit": git_commit(),
        "settings": asdict(settings),
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
    }


def git_commit() -> str | None:
    """The commit that this package is run from, "-dirty" if it was changed since; None outside of its repository."""
    here = Path(__file__)

    def git(*args: str) -> str:
        command = ["git", "-C", str(here.parent), *args]
        # Without optional locks: reading the state must not get in the way of a commit that is being made.
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout.strip()

    try:
        # An installed copy may lie in somebody else's repository.
        git("ls-files", "--error-unmatch", here.name)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
