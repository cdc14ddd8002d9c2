"""Workers: scripts in environments of their own, which answer a line of JSON with another."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError

_HERE = Path(__file__).resolve().parent


class WorkerError(ConfigError):
    """The worker can't do a request; the message is its own."""


@dataclass(frozen=True)
class Environment:
    """An environment that a target of the Makefile makes: `make peers` makes `.venv-peers`.

    Attributes:
        folder: In this folder or in the checkout.
        variable: Of the system's environment, that may name its Python.
        purpose: To begin a message with.
    """

    folder: str
    variable: str
    purpose: str

    @property
    def target(self) -> str:
        """Of the Makefile."""
        return self.folder.removeprefix(".venv-")

    def python(self) -> str:
        """Its Python; a `ConfigError` if there is none."""
        named = os.environ.get(self.variable)
        made = [place / self.folder / "bin" / "python" for place in (Path.cwd(), _HERE.parents[1])]
        for path in [Path(named)] if named else made:
            if path.is_file():
                return str(path)
        where = f"{named} is no file" if named else f"there is no {self.folder}"
        raise ConfigError(
            f"{self.purpose} run in an environment of their own, and {where}. Make it with `make {self.target}`, or"
            f" set {self.variable} to the Python of such an environment."
        )

    def versions(self, *packages: str) -> dict[str, str] | None:
        """Of packages in it; None where there is no such environment."""
        code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {packages}}}))"
        try:
            command = [self.python(), "-c", code]
        except ConfigError:
            return None
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_alone())
        return json.loads(done.stdout) if done.returncode == 0 else None


KVPRESS = Environment(".venv-peers", "SPECACHE_PEERS", "The methods press:...")
CPU_PEERS = Environment(".venv-peers-cpu", "SPECACHE_PEERS_CPU", "OpenVINO and llama.cpp (--peers)")


def _alone() -> dict[str, str]:
    """Without the paths of this environment, which would bring this environment's transformers."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


class WorkerProcess:
    """A script of this folder that has started; a `ConfigError` if it can't. `started` is its first message."""

    def __init__(self, environment: Environment, script: str, arguments: Sequence[str]) -> None:
        self._target = environment.target
        command = [environment.python(), str(_HERE / script), *arguments]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=_alone()
        )
        try:
            self.started = self._answer()
        except WorkerError:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; a `WorkerError` if it fails."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: its last words are told below
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = self._log.read().strip().splitlines()[-1:] or ["without a word"]
            raise WorkerError(
                f"The peers' worker ended ({last[0]}). `make {self._target}` makes its environment anew."
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"The peers' worker: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process; twice is fine."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            pipe.close()
