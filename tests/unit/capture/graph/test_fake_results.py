"""A result of alike arguments is a copy of an earlier one; of others it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from specache_fx.capture.graph.fake_results import FakeResults


class Watched:
    """Results of a function that counts how often it runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.runs, self.function, self.results = 0, function, FakeResults(copies=True)
        self.kept: list[Any] = []

    def size(self, value: int) -> Any:
        """A symbol."""
        source = ConstantSource(f"size_{value}")
        symbol = self.env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        return self.env.create_symintnode(symbol, hint=value, source=source)

    def __call__(self, *args: Any, mode: Any = None, **kwargs: Any) -> Any:
        """Run it, or not."""

        def counted(*given: Any, **named: Any) -> Any:
            self.runs += 1
            return self.function(*given, **named)

        self.counted = getattr(self, "counted", counted)
        with self.mode, enable_python_dispatcher(), torch.no_grad():
            out = self.results.call(self.counted, args, kwargs, mode)
        self.kept.append((args, kwargs, out))
        return out

    def tensor(self, *shape: Any, **form: Any) -> Tensor:
        """A fake tensor."""
        with self.mode:
            self.kept.append(torch.empty(*shape, **form))
        return self.kept[-1]


def form(x: Tensor) -> tuple[Any, ...]:
    """All that a tensor without numbers is."""
    return type(x), x.dtype, x.device, str(x.shape), str(x.stride()), str(x.storage_offset())


def test_alike_arguments_run_once() -> None:
    watched = Watched(lambda x, y: torch.cat([x, y], 1).transpose(0, 1))
    rows = watched.size(7)
    found = [watched(watched.tensor(rows, 8), watched.tensor(rows, 3)) for _ in range(3)]
    assert watched.runs == 1
    assert len({*map(form, found)}) == 1 and len({*map(id, found)}) == 3
    # A copy is an argument like the first.
    after = Watched(lambda x: x + 1)
    after.results, after.mode = watched.results, watched.mode
    for each in found:
        after(each)
    assert after.runs == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda w, n: (w.tensor(n, 4), 1),
        lambda w, n: (w.tensor(n + 1, 8), 1),
        lambda w, n: (w.tensor(5, 8), 1),
        lambda w, n: (w.tensor(n, 8, dtype=torch.bfloat16), 1),
        lambda w, n: (w.tensor(8, n).t(), 1),
        lambda w, n: (w.tensor(n, 8), 1.0),
        lambda w, n: (w.tensor(n, 8), True),
        lambda w, n: (w.tensor(n, 8), w.tensor(n, 8)),
        lambda w, n: (w.tensor(n, 8), n),
    ],
)
def test_other_arguments_run(other: Callable[..., Any]) -> None:
    watched = Watched(lambda x, y: x * y)
    rows = watched.size(7)
    watched(watched.tensor(rows, 8), 1)
    with watched.mode:
        args = other(watched, rows)
    found = watched(*args)
    assert watched.runs == 2
    with watched.mode:
        assert form(found) == form(args[0] * args[1])


def test_another_mode_runs() -> None:
    watched = Watched(torch.relu)
    for mode in (1, 2, 1):
        watched(watched.tensor(3), mode=mode)
    assert watched.runs == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.add_(1),
        lambda x: x,
        lambda x: x.nonzero(),
        lambda x: torch.tensor(5),
        lambda x: x.shape[0],
        lambda x: None,
    ],
    ids=("in place", "itself", "sizes of numbers", "a number", "a size", "nothing"),
)
def test_these_run_each_time(function: Callable[..., Any]) -> None:
    watched = Watched(function)
    watched.mode.allow_non_fake_inputs = True
    for _ in range(2):
        watched(watched.tensor(6))
    assert watched.runs == 2


def test_several_results_are_copied_as_they_come() -> None:
    watched = Watched(lambda x: (x.max(dim=-1), [x.split(2, -1)]))
    first, second = (watched(watched.tensor(3, 4)) for _ in range(2))
    assert watched.runs == 1 and type(second[0]) is torch.return_types.max
    assert [form(x) for x in (*first[0], *first[1][0])] == [form(x) for x in (*second[0], *second[1][0])]


def test_without_copies_equal_arguments_share_a_result() -> None:
    watched = Watched(lambda x: (x + 1, x.split(2, -1)))
    watched.results = FakeResults(copies=False)
    first, second = (watched(watched.tensor(3, 4)) for _ in range(2))
    assert watched.runs == 1 and first is second
