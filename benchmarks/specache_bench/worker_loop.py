"""The loop of a worker script, in its own environment: it imports nothing of specache_fx."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[], tuple[Answer, dict[str, Any]]], packages: tuple[str, ...]) -> None:
    """Answer requests, one JSON object a line, until the input ends.

    The first line is {"ready": true, "versions": {...}, ...}. What fails is answered with {"error": "..."}.

    Args:
        start: Gives the function that answers, and more to say at the start.
        packages: Whose versions are told.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        answer, more = start()
        say({"ready": True, "versions": {name: version(name) for name in packages}, **more})
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    for line in sys.stdin:
        try:
            say(answer(json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
