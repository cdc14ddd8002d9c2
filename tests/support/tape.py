"""A CUDA graph, simulated on the CPU: `Tape` records a step's operators and Triton launches, and replays them.

What `torch.cuda.graph` does, restated: while recording, every operator that reaches the dispatcher and every launch of
Triton's interpreter is kept with its tensors and scalars. A replay runs no Python. So it finds what a captured graph
can't do:

    sync      `.item()`, `bool(tensor)`, `nonzero`, a copy to another device: `CaptureError` while recording
    memory    what later operators read lies in the tape's own pool, and each replay writes it in place
    baked     a length, a branch, an address of Python's stays as it was: `differences` of two steps' tapes names it
    hidden    what no operator shows (threads, NumPy, Python's own state) is not replayed: results differ
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_flatten

from specache_fx.runtime.steps.step_graph import NotCapturedError

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SYNCS = {
    *("aten::item", "aten::allclose", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"),
    *("aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::_pin_memory"),
    "aten::is_pinned",
}
_OURS = "/runtime/", "/passes/", "/specache_fx/"
# Of C++ on the CPU: the dispatcher sees nothing of what is inside.
_OPAQUE = {"specache::products"}


class CaptureError(NotCapturedError):
    """A captured graph could not do this."""


@dataclass(frozen=True)
class Call:
    """One operator, or one launch.

    Attributes:
        run: The operator, or the kernel.
        args: Its arguments; of a launch the grid first.
        kwargs: By name.
        results: What it gave.
        where: Who called it.
        is_launch: It is a launch.
        is_view: It gave views of what it got: nothing to replay.
    """

    run: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]
    where: str
    is_launch: bool = False
    is_view: bool = False


def _memory(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.device.type == "meta" else storage.data_ptr()


class Tape(TorchDispatchMode):
    """Records all operators in its block; those of Python's are looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.pool: set[int] = set()  # storages that were made while recording
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        to = kwargs.get("device")
        moves = (
            name == "aten::_to_copy" and to is not None and any(x.device != torch.device(to) for x in given)
        )
        if name in _SYNCS or moves:
            raise CaptureError(f"sync: {name} at {_caller()}")
        if not name.startswith(("aten::", "prims::")) and name not in _OPAQUE:
            with self:
                return func.redispatch(_CPU, *args, **kwargs)
        out = func(*args, **kwargs)
        results = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        known = {_memory(x) for x in given}
        self.pool |= {_memory(x) for x in results} - known
        writes = any(x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments)
        is_view = bool(results) and not writes and all(_memory(x) in known for x in results)
        self.calls.append(Call(func, args, kwargs, results, _caller(), is_view=is_view))
        self._kept += results
        return out

    def launched(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a launch."""
        self.calls.append(Call(kernel, (grid, *args), kwargs, [], _caller(), is_launch=True))
        self._kept += [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]

    def replay(self) -> None:
        """Run it all again on the same memory; results go where they went."""
        for call in self.calls:
            if call.is_launch:
                _launch(call.run, *call.args[1:], grid=call.args[0], warmup=False, **call.kwargs)
            elif not call.is_view:
                again = tree_flatten(call.run(*call.args, **call.kwargs))[0]
                new = [x for x in again if isinstance(x, torch.Tensor)]
                for old, value in zip(call.results, new, strict=True):
                    if _memory(old) != _memory(value):
                        old.copy_(value)

    def names(self) -> list[tuple[Any, ...]]:
        """Each call with its arguments: memory of the pool by when it was made, all else by its address."""
        order: dict[int, int] = {}

        def name(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return repr(x)
            at: Any = _memory(x)
            if at in self.pool:
                at = "pool", order.setdefault(at, len(order))
            return at, x.storage_offset(), tuple(x.shape), tuple(x.stride()), str(x.dtype)

        return [
            (str(call.run), *map(name, tree_flatten((call.args, call.kwargs))[0]), *map(name, call.results))
            for call in self.calls
        ]


def _caller() -> str:
    """The innermost lines of the package that lead here."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < 3:
        path = frame.f_code.co_filename
        if any(part in path for part in _OURS) and "site-packages" not in path:
            found.append(f"{path.rsplit('/', 1)[1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def differences(one: Tape, two: Tape, most: int = 5) -> list[str]:
    """What a graph that was captured as `one` would do otherwise than the step `two`; none where it stands for it."""
    found = []
    if len(one.calls) != len(two.calls):
        found.append(f"{len(one.calls)} calls, then {len(two.calls)}")
    for number, (first, second) in enumerate(zip(one.names(), two.names(), strict=False)):
        if first != second:
            changed = [(x, y) for x, y in zip(first, second, strict=False) if x != y][:2]
            found.append(f"#{number} {first[0]}: {changed} ({two.calls[number].where})")
    return found[:most]


_launch: Any = None  # the interpreter's own way to run a kernel


@contextlib.contextmanager
def launches_recorded() -> Iterator[None]:
    """Have launches of Triton's interpreter noted by the tape that records."""
    from triton.runtime.interpreter import InterpretedFunction

    global _launch  # noqa: PLW0603
    before = _launch = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        tapes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tape)]
        if not tapes:
            return before(self, *args, grid=grid, warmup=warmup, **kwargs)
        tapes[-1].launched(self, grid, args, kwargs)
        with _disable_current_modes():
            return before(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run
    try:
        yield
    finally:
        InterpretedFunction.run = before


class TapeRecorder:
    """`step_graph.Recorder` that records tapes.

    Args:
        again: Instead of replaying, run the step and record it again: what differs is kept in `found`.
    """

    def __init__(self, again: bool = False) -> None:
        self.again = again
        self.tapes: list[Tape] = []
        self.found: list[str] = []

    def record(
        self, run: Callable[[], Sequence[Any]], compiled: object
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        tape = Tape()
        with tape:
            results = run()
        self.tapes.append(tape)

        def once_more() -> None:
            other = Tape()
            with other:
                new = run()
            self.found += differences(tape, other)
            for old, value in zip(results, new, strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(value)

        return results, once_more if self.again else tape.replay
