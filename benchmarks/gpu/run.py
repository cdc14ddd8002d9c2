"""The clock and the record of a stage: no measurement can lose what another one found."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Run:
    """One stage: where, with what, until when; and what came of it.

    Attributes:
        device: The device that is measured.
        dtype: Of weights and cache.
        quick: Tiny shapes, to try the script itself.
        seconds: For the stage.
        path: Where the record goes, after each measurement.
        record: What is written.
    """

    device: torch.device
    dtype: torch.dtype
    quick: bool
    seconds: float
    path: Path
    record: dict[str, Any] = field(default_factory=dict)
    _start: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self._start)

    def attempt(self, found: dict[str, Any], work: Callable[[], None]) -> bool:
        """Do something that may fail: its error goes into `found`. Whether it went well."""
        try:
            if self.left() <= 0:
                found["skipped"] = "no time was left"
                return False
            work()
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
            found["traceback"] = traceback.format_exc().splitlines()[-6:]
            return False
        finally:
            with contextlib.suppress(RuntimeError):  # a device that an error has broken
                self.free()
            self.write()
        return True

    def free(self) -> None:
        """Give cached memory back, so that the next measurement has all of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def peak(self) -> int | None:
        """The most bytes that were allocated since `reset_peak`; None on the CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def reserved(self) -> int | None:
        """The most bytes that PyTorch held since `reset_peak`, in use or not; None on the CPU."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None

    def reset_peak(self) -> None:
        """Count anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def write(self) -> None:
        """Write the record."""
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(self.record))
        whole.replace(self.path)  # who is ended while it writes leaves the last record


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        try:
            versions[name] = __import__(name).__version__
        except ImportError:
            versions[name] = None
    found: dict[str, Any] = {"versions": versions, "device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "device_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    root = Path(__file__).resolve().parent
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    found["commit"] = git.stdout.strip() or None
    return found
