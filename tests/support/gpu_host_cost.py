"""Host cost of a layer's GPU step, without a GPU: `python -m support.gpu_host_cost`, a process of its own.

A fake Triton driver compiles every kernel for sm_90 and binds every launch, and launches nothing. Tensors are on the
CPU; what the runtime asks about the device is answered as a GPU's would be. Prints one JSON object.

The layer is Llama-3.1-8B's at 5,000 tokens (two rounds of the selection), in a plain step: no group fills. Times are
thread time, the shortest of rounds over a second: a neighbour on the core or in its cache only ever adds to one, and
may do so for longer than all of the rounds take in a row. `calls` is the same time in calls of an empty Python method,
timed in the same rounds: clocks of machines differ by a factor of two. `aten` counts what the dispatcher sees.
"""

from __future__ import annotations

import collections
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from support.watch import Watch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CPU = torch.device("cpu")


class Given(NamedTuple):
    """What a launcher got.

    Attributes:
        kernel: Its name.
        kinds: What the compiler took each argument for.
        all: The grid, six that are Triton's, the arguments.
    """

    kernel: str
    kinds: tuple[str, ...]
    all: tuple[Any, ...]


BATCH, HEADS, KV_HEADS, DIM, CONTEXT = 1, 32, 8, 128, 5000
_BEFORE_ARGUMENTS = 9  # of a launcher: grid, stream, function, its metadata, the launch's, two hooks
launches: list[Given] = []


class _Utils:
    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, *_: Any) -> dict[str, int]:
        names = ("multiprocessor_count", "warpSize", "sm_clock_rate", "mem_clock_rate", "mem_bus_width")
        return dict.fromkeys(names, 32) | {"max_shared_mem": 232448, "max_num_regs": 65536}


class _Launcher:
    """What Triton builds in C for a kernel: here it counts."""

    launch_cooperative_grid = False

    def __init__(self, src: Any, metadata: Any) -> None:
        self._name, self._kinds = src.fn.__name__, tuple(src.signature.values())

    def __call__(self, *given: Any) -> None:
        launches.append(Given(self._name, self._kinds, given))


class FakeDriver:
    """Answers as one H100 that is idle."""

    launcher_cls = _Launcher
    utils = _Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return CPU

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        return "void*"

    def get_benchmarker(self) -> Any:
        return lambda call, quantiles=None: (call(), [1.0, 1.0, 1.0])[1]


class _Empty:
    def method(self, *given: Any) -> tuple[Any, ...]:
        return given


def timed(call: Callable[[], object]) -> float:
    """Thread time of a call, in microseconds."""
    start = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - start)


def thousand_calls() -> None:
    """The unit of `calls`, a thousand times."""
    empty = _Empty()
    for i in range(1000):
        empty.method(i, empty, None)


def named(given: Given) -> tuple[Any, ...]:
    """All that reaches the device: addresses, and numbers that are no constants. An output is new each time."""
    numbers = [
        (kind, value.dtype if place == 0 and given.kernel == "merge_parts" else value.data_ptr())
        if isinstance(value, torch.Tensor)
        else (kind, value)
        for place, (kind, value) in enumerate(zip(given.kinds, given.all[_BEFORE_ARGUMENTS:], strict=True))
        if kind != "constexpr"
    ]
    return given.kernel, given.all[:3], numbers


def layer_step(track_hit_rates: bool) -> dict[str, Any]:
    """What a layer of a plain step costs the host, launch by launch: `specache.device_step`."""
    from specache_fx.config import SpecacheConfig
    from specache_fx.runtime.kernels import KERNELS
    from specache_fx.runtime.layers.layout import LayerShape
    from specache_fx.runtime.session.decode_step import DecodeStep
    from specache_fx.runtime.session.session import Session
    from specache_fx.runtime.steps.triton_steps import TritonSteps

    config = SpecacheConfig(bits=2, lookahead="token", track_hit_rates=track_hit_rates)
    session = Session(config, (LayerShape(KV_HEADS, DIM, DIM),), torch.bfloat16, CPU)
    session.kernel = KERNELS["triton"]
    with torch.inference_mode():
        pair = torch.randn(BATCH, KV_HEADS, CONTEXT, DIM, dtype=torch.bfloat16)
        session.store(0, pair, pair, None)
        session.advance(CONTEXT, decoded=False)
        steps = session.steps
        assert isinstance(steps, TritonSteps)
        query = torch.randn(2, BATCH, HEADS, 1, DIM, dtype=torch.bfloat16)
        key, value = torch.randn(2, 2, BATCH, KV_HEADS, 1, DIM, dtype=torch.bfloat16).unbind()
        shares = torch.full((BATCH,), 0.8)

        def launch() -> None:
            steps.restart()
            steps.launch(0, query, key, value, 0.088)

        rounds, calls = [], []
        with DecodeStep(session, fused_layers=(0,), shares=shares).running():
            for _ in range(20):  # compiles, tunes
                launch()
            for _ in range(40):
                time.sleep(0.025)
                rounds.append(min(timed(launch) for _ in range(10)))
                calls.append(1000 * rounds[-1] / min(timed(thousand_calls) for _ in range(5)))
            launches.clear()
            operators = collections.Counter[str]()
            with Watch(
                lambda op, *_: operators.update([str(op).removeprefix("aten.").removesuffix(".default")])
            ):
                launch()
            again = list(launches)
            for layer in steps._layers.values():
                for one in (*layer.attention, *(layer.selection.launches if layer.selection else ())):
                    one._compiled.clear()
            launches.clear()
            launch()
        names = [one.kernel for one in again]
        ends = names.index("merge_parts") + 1  # with it the model's stream has what it waits for
        return {
            "us": round(min(rounds), 1),
            "calls": round(statistics.median(calls)),
            "launches": names[:ends],
            "beside": names[ends:],
            "as_triton_binds": [named(one) for one in again] == [named(one) for one in launches],
            "aten": operators.total(),
            "operators": dict(operators.most_common()),
        }


def tuned_again(lanes: int, groups: int) -> int:
    """How many times the attention kernel has been tuned once it ran for this many lanes and groups of codes."""
    from support.decode_case import CaseShape, DecodeCase

    from specache_fx.runtime.kernels.triton.decode import partial_attention
    from specache_fx.runtime.kernels.triton.kernel import TritonKernel

    # As many rows of a query tile: what tells the two apart is the lanes alone.
    shape = CaseShape(
        lanes=lanes, batch=1, num_kv_groups=8 // lanes, key_dim=16, value_dim=16, group_size=64, groups=groups
    )
    TritonKernel().attention(DecodeCase(shape).inputs(CPU))
    return len(partial_attention.cache)


def main() -> None:
    """Measure."""
    torch.set_num_threads(1)
    driver.set_active(FakeDriver())
    # All configs take the same time here: the first is chosen, and the others need no compiling.
    fitting = triton.runtime.Autotuner.prune_configs
    triton.runtime.Autotuner.prune_configs = lambda *given: fitting(*given)[:1]
    from specache_fx.runtime.kernels.triton import arguments as triton_arguments
    from specache_fx.runtime.native import triton_ops

    triton_ops.runs_by_itself = lambda device: True  # type: ignore[assignment]
    triton_arguments._programs = lambda device: 528  # type: ignore[assignment]
    found: dict[str, Any] = {
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": sys.version.split()[0],
        },
        "layer": layer_step(track_hit_rates=True),
        "layer_without_hit_rates": layer_step(track_hit_rates=False),
    }
    triton_arguments._programs = lambda device: 6  # type: ignore[assignment]
    found["tuned"] = [tuned_again(2, 3), tuned_again(1, 3), tuned_again(2, 4), tuned_again(2, 80)]
    print(json.dumps(found, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
