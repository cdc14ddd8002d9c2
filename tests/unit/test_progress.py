"""A compile that takes long says so: a line that vanishes on a terminal, one line in the log elsewhere."""

from __future__ import annotations

import os
import pty
import random
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.zoo import build
from torch import nn

import specache_fx
from specache_fx.report import progress

COMPILE = """
import logging, sys, time
from specache_fx.report import progress
from specache_fx.report.progress import announced, muted, say_step
progress.QUIET_SECONDS = 0.3
{setup}
print("before")
with announced("the decode step", {lowering!r}, 30):
    say_step("Inductor")
    time.sleep({seconds})
print("after")
"""
LINE = "specache: compiling the decode step (30 layers)"


def script(seconds: float = 0.8, lowering: str = "inductor", setup: str = "") -> list[str]:
    return [sys.executable, "-c", COMPILE.format(seconds=seconds, lowering=lowering, setup=setup)]


def on_a_terminal(command: list[str], **environment: str) -> tuple[str, str]:
    """What a program writes to stdout, a pipe, and to stderr, a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environ) as program:
        os.close(theirs)
        seen = b""
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # the other end was closed
                break
            if not chunk:
                break
            seen += chunk
        os.close(ours)
        assert program.stdout is not None
        out = program.stdout.read().decode()
    assert program.returncode == 0, seen.decode()
    return out, seen.decode()


def left_on_screen(written: str) -> list[str]:
    """The lines that a terminal shows in the end; knows of no control but those that tqdm and rich use."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif re.fullmatch(r"\x1b\[\d*A", part):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part == "\r":
            column = 0
        elif not part.startswith("\x1b"):
            before = lines[row].ljust(column)
            lines[row], column = (
                before[:column] + part + before[column + len(part) :],
                column + len(part),
            )
    return [line.rstrip() for line in lines if line.strip()]


def in_a_pipe(command: list[str]) -> tuple[str, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_line_with_step_and_seconds_vanishes_from_a_terminal_and_the_time_stays() -> None:
    out, err = on_a_terminal(script(seconds=1.2))
    assert out == "before\nafter\n"
    assert f"{LINE}: Inductor, 1 s" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err)
    (line,) = left_on_screen(err)
    assert re.fullmatch(r"specache: compiled the decode step \(30 layers\) in \d+ s", line)
    assert err.endswith("\n") and err.count("\x1b[?25l") == err.count(
        "\x1b[?25h"
    )  # the cursor is shown again


def test_a_pipe_gets_one_line_of_the_log() -> None:
    out, err = in_a_pipe(script())
    assert out == "before\nafter\n"
    assert err == (
        f"{LINE} with Inductor, which can take a minute; later processes find most of it in Inductor's cache."
        ' lowering="eager" compiles nothing\n'
    )


def test_the_log_says_the_time_at_info() -> None:
    _, err = in_a_pipe(script(setup="logging.basicConfig(level=logging.INFO)"))
    (line,) = err.splitlines()[1:]
    assert re.fullmatch(
        r"INFO:specache_fx.report.progress:specache: compiled the decode step \(30 layers\) in \d+ s", line
    )


@pytest.mark.parametrize(
    "quiet",
    [
        {"seconds": 0.0},
        {"lowering": "eager"},
        {"setup": "logging.getLogger('specache_fx').setLevel(logging.ERROR)"},
        {
            "setup": "import atexit; hush = muted(); hush.__enter__(); atexit.register(hush.__exit__, None, None, None)"
        },
    ],
    ids=["short", "eager", "level", "another_display"],
)
def test_nothing_is_said(quiet: dict[str, Any]) -> None:
    assert on_a_terminal(script(**quiet)) == ("before\nafter\n", "")
    assert in_a_pipe(script(**quiet)) == ("before\nafter\n", "")


@pytest.mark.parametrize(
    "stderr",
    [
        "closed = io.StringIO(); closed.close(); sys.stderr = closed",
        "sys.stderr = types.SimpleNamespace(write=lambda text: None, flush=lambda: None)",
        "class Gone(io.StringIO):\n    isatty = lambda self: True\n    def write(self, text): raise OSError\n"
        "sys.stderr = Gone()",
    ],
    ids=["closed", "no_file", "gone"],
)
def test_a_stderr_that_takes_no_line_is_no_error(stderr: str) -> None:
    raised = "threading.excepthook = lambda seen: print(repr(seen.exc_value))"
    out, err = in_a_pipe(script(setup=f"import io, threading, types\n{raised}\n{stderr}"))
    assert (out, err) == ("before\nafter\n", "")


def test_a_display_of_the_programs_own_is_left_in_place() -> None:
    setup = """
from rich.console import Console
from rich.live import Live
own = Live("the program's own display", console=Console(stderr=True), redirect_stdout=False)
own.start()
"""
    out, err = on_a_terminal(script(setup=setup))
    assert out == "before\nafter\n"
    shown = left_on_screen(err)
    assert shown[0].startswith(LINE) and "compiled" not in err and "the program's own display" in shown[-1]


def test_a_line_draws_no_random_number_of_the_programs() -> None:
    drawn = "import atexit, random; random.seed(5); atexit.register(lambda: print(random.random()))"
    out, err = on_a_terminal(script(setup=drawn))
    assert LINE in err
    assert float(out.split()[-1]) == random.Random(5).random()


def test_a_terminal_that_takes_no_line_back_gets_one_line() -> None:
    _, err = on_a_terminal(script(), TERM="dumb")
    assert err.count("\n") == 1 and err.startswith(LINE) and "\x1b" not in err


@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_the_trace_of_a_decode_step_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    model: Any = specache_fx.compile(build("llama", 1), bits=2, lowering="eager")
    with caplog.at_level("INFO", logger="specache_fx.report.progress"):
        past = model(torch.arange(3, 40)[None], use_cache=True).past_key_values
        assert not caplog.messages
        for _ in range(3):
            model(torch.tensor([[5]]), past_key_values=past, use_cache=True)
    told, done = caplog.messages
    assert told.startswith("specache: tracing the decode step, once for each kind of it in a process.")
    assert re.fullmatch(r"specache: traced the decode step in \d+ s", done)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("gradients", [True, False])
def test_nothing_is_said_of_a_graph_that_is_left_alone(
    gradients: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model without a KV cache is compiled as Inductor compiles it, which says nothing."""
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="specache")
    with caplog.at_level("INFO", logger="specache_fx.report.progress"), torch.set_grad_enabled(gradients):
        assert compiled(torch.ones(2, 4)).requires_grad is gradients
    assert caplog.messages == []
