"""OpenVINO and llama.cpp, which a CPU's user would pick instead, with the same weights; see `cpu_peers_worker.py`."""

from __future__ import annotations

from pathlib import Path

from specache_fx import worker_process
from specache_fx.worker_process import WorkerProcess

PEERS = {"OpenVINO, u8 KV": "openvino", "llama.cpp, f16 KV": "llama.cpp"}
"""By name the worker's kind."""

_WORKER = Path(__file__).with_name("cpu_peers_worker.py")
_VARIABLE, _FOLDER = "SPECACHE_PEERS_CPU", ".venv-peers-cpu"


def find_python() -> str:
    """The Python of the peers' environment.

    Raises:
        ConfigError: If there is none.
    """
    return worker_process.find_python(_VARIABLE, _FOLDER, "OpenVINO and llama.cpp (--peers)")


class CpuPeer(WorkerProcess):
    """A peer that has read a context.

    Args:
        name: In `PEERS`.
        folder: A Llama of transformers, in safetensors; its conversions are kept there.
        dtype: Of its weights, "float32" or "bfloat16".
        batch: Sequences.
        kv_len: Tokens of context.
        room: Most steps.
        threads: CPU threads.

    Attributes:
        device_bytes: Bytes of its cache, from its precision and sizes.

    Raises:
        ConfigError: If its environment is missing.
        WorkerError: If it does not start.
    """

    def __init__(
        self, name: str, folder: Path, dtype: str, batch: int, kv_len: int, room: int, threads: int
    ) -> None:
        numbers = map(str, (batch, kv_len, room, threads))
        arguments = [PEERS[name], str(folder), dtype, *numbers]
        super().__init__(find_python(), _WORKER, arguments, _FOLDER.removeprefix(".venv-"))
        self.device_bytes: int = self.started["device_bytes"]

    def steps(self, count: int) -> list[float]:
        """Decode greedily; seconds of each step, by the worker's own clock."""
        seconds: list[float] = self.ask({"steps": count})["seconds"]
        return seconds
