"""`WorkerProcess`: a script in an environment of its own, which answers a line of JSON with another; kvpress is one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specache_fx.errors import ConfigError


class WorkerError(ConfigError):
    """The worker can't do a request; the message is its own."""


def find_python(variable: str, folder: str, purpose: str, given: str | None = None) -> str:
    """The Python of an environment that a target of the Makefile makes.

    Args:
        variable: Of the system's environment, that may name it.
        folder: Of the environment, in this folder or in the checkout; `.venv-peers` is made by `make peers`.
        purpose: Its purpose, to begin a message with.
        given: Its path, before all else.

    Raises:
        ConfigError: If there is none.
    """
    checkout = Path(__file__).resolve().parents[2]
    made = [place / folder / "bin" / "python" for place in (Path.cwd(), checkout)]
    named = given or os.environ.get(variable)
    for path in [Path(named)] if named else made:
        if path.is_file():
            return str(path)
    where = f"{named} is no file" if named else f"there is no {folder}"
    raise ConfigError(
        f"{purpose} run in an environment of their own, and {where}. Make it with `make"
        f" {folder.removeprefix('.venv-')}`, or set {variable} to the Python of such an environment."
    )


class WorkerProcess:
    """A worker that has started.

    Args:
        python: Of its environment.
        script: Its program.
        arguments: The script's.
        target: Of the Makefile that makes the environment, for messages.

    Attributes:
        started: Its first message.

    Raises:
        WorkerError: If it does not start.
    """

    def __init__(self, python: str, script: Path, arguments: Sequence[str], target: str) -> None:
        self._target = target
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        # Its own packages alone: paths of this environment would bring this environment's transformers.
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        self._process = subprocess.Popen(
            [python, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        try:
            self.started = self._answer()
        except WorkerError:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            WorkerError: If it fails.
        """
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


class Presses(WorkerProcess):
    """The worker of kvpress, which pins another transformers.

    Args:
        python: Of its environment; `$SPECACHE_PEERS` or `.venv-peers` by default.
        arguments: Of `kvpress_worker.py`.

    Raises:
        ConfigError: If there is no such environment.
        WorkerError: If it does not start.
    """

    def __init__(self, python: str | None, arguments: Sequence[str]) -> None:
        script = Path(__file__).with_name("kvpress_worker.py")
        super().__init__(find_presses(python), script, arguments, "peers")


def find_presses(given: str | None = None) -> str:
    """The Python of the environment with kvpress; see `find_python`."""
    return find_python("SPECACHE_PEERS", ".venv-peers", "The methods press:...", given)


def press_versions(given: str | None = None) -> dict[str, str] | None:
    """Versions of kvpress and its needs in the environment apart; None where there is none."""
    names = ("kvpress", "torch", "transformers")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
    try:
        python = find_presses(given)
    except ConfigError:
        return None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, env=environment)
    return json.loads(done.stdout) if done.returncode == 0 else None
