"""`on_threads` of crew.h, by the operators that use it: right for all callers, after a fork too, and never busy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.process import PATH as SUPPORT
from support.process import python
from support.threads import at_once, num_threads
from support.zoo import SMALL, build

import specache_fx
from specache_fx.runtime import ops  # noqa: F401  (ops defines the operators)
from specache_fx.runtime.native import cpp_build, graph_ops
from specache_fx.runtime.steps import cpu_recorder

PATH = f"{SUPPORT}:{Path(__file__).parent}"


def products(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Sums in one order, whoever computes them: enough weights for several threads."""
    assert graph_ops.load() is not None
    made = torch.Generator().manual_seed(seed)
    rows, weights = torch.randn(2, 256, generator=made), torch.randn(3, 512, 256, generator=made).unbind()
    results: tuple[torch.Tensor, ...] = torch.ops.specache.products(rows, *weights)
    return results


@pytest.mark.parametrize("threads", [2, 3, 9])
def test_callers_in_several_threads_get_their_own_results(threads: int) -> None:
    with num_threads(1):
        wanted = [products(seed) for seed in range(4)]

    def repeat(seed: int) -> None:
        torch.set_num_threads(threads)
        for _ in range(300):
            assert all(map(torch.equal, products(seed), wanted[seed]))

    with num_threads(threads):
        at_once([lambda seed=seed: repeat(seed) for seed in range(4)])


def test_a_forked_process_has_threads_of_its_own() -> None:
    code = """
import os, torch
from test_crew import products
torch.set_num_threads(3)
before = products()
child = os.fork()
if child == 0:
    same = all(map(torch.equal, products(), before))
    os._exit(0 if same and len(os.listdir("/proc/self/task")) == 3 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), all(map(torch.equal, products(), before)))
"""
    assert python("-c", code, PYTHONPATH=PATH).split() == ["0", "True"]


# Time of the processor behind products, and behind an operator of torch's that threads with short spins share.
_IDLE = """
import sys, time, torch
from test_crew import products
from specache_fx.runtime.native import graph_ops
torch.set_num_threads(2)
products()
if sys.argv[1] == "torch":
    graph_ops.load().specache_short_spins(True)
time.sleep(0.2)
work = {"products": products, "torch": lambda: torch.zeros(1 << 20).add_(1)}[sys.argv[1]]
spent = []
for _ in range(20):
    work()
    start = time.process_time()
    time.sleep(0.02)
    spent.append(time.process_time() - start)
print(sorted(spent)[10] * 1e3)
"""


@pytest.mark.parametrize("work", ["products", "torch"])
def test_threads_that_have_nothing_to_do_sleep(work: str) -> None:
    assert float(python("-c", _IDLE, work, PYTHONPATH=PATH, OMP_NUM_THREADS="2")) < 0.5  # ms of 20


def test_a_recorded_step_opens_no_region_of_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would wait for all of its threads. Nor do our libraries."""
    kernels = []
    real = cpu_recorder._address_of
    monkeypatch.setattr(
        cpu_recorder, "_address_of", lambda kernel: kernels.append(kernel.__self__.__file__) or real(kernel)
    )
    torch._dynamo.reset()
    with num_threads(2), torch.no_grad():
        model = specache_fx.compile(build("plain", 1), **(SMALL | {"lowering": "inductor", "bits": 2}))
        model.generate(torch.randint(1, 128, (32, 20)), max_new_tokens=4, do_sample=False)
    attention = cpp_build.load_best("attention")._name
    assert kernels
    assert [file for file in [*kernels, attention] if b"GOMP_parallel" in Path(file).read_bytes()] == []
    # A thread that yields beside a busy process waits for all of that one's time slice: 3 ms a layer.
    assert b"sched_yield" not in Path(attention).read_bytes()
