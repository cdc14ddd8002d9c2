"""The other side of `peers_worker.py`: kvpress pins another transformers, so it runs in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specache_fx import worker_process
from specache_fx.worker_process import WorkerProcess

VARIABLE = "SPECACHE_PEERS"
_WORKER = Path(__file__).with_name("peers_worker.py")


def find_python(given: str | None) -> str:
    """The Python of the peers' environment.

    Args:
        given: Its path; by default see `worker_process.find_python`.

    Raises:
        ConfigError: If there is none.
    """
    return worker_process.find_python(VARIABLE, ".venv-peers", "The methods press:...", given)


class Peers(WorkerProcess):
    """A worker process with one model.

    Args:
        python: Of the peers' environment.
        folder: The model's folder or name.
        dtype: Its dtype.
        device: "cpu" or "cuda".

    Raises:
        WorkerError: If it does not start.
    """

    def __init__(self, python: str, folder: str, dtype: str, device: str) -> None:
        super().__init__(python, _WORKER, [folder, dtype, device, str(torch.get_num_threads())], "peers")

    @property
    def versions(self) -> dict[str, Any]:
        """Of its packages, by name."""
        return self.started["versions"]
