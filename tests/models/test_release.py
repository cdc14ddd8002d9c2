"""A session ends with the last of its handles, their views and copies, or when it is released."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from support.open_sessions import session_of
from support.zoo import SMALL, build, left_padded
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import specache_fx
from specache_fx import CacheHandleError
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.session import Session

PROMPT = left_padded()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch._dynamo.reset()
    model = specache_fx.compile(build("plain", 1), **SMALL, bits=2)
    generate(model, num_beams=2)
    step(model, generate(model))
    gc.collect()  # a call that compiles leaves a cycle of Dynamo's around its cache
    return model


def generate(model: Any, **kwargs: Any) -> Any:
    out = model.generate(**PROMPT, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, **kwargs)
    return out.past_key_values


@torch.no_grad()
def step(model: Any, past: Any) -> Tensor:
    return model(torch.full((3, 1), 5), past_key_values=past, use_cache=True).logits


def is_free(session: Session) -> bool:
    return session.closed and not session.device_bytes and not session.host_bytes


@pytest.mark.parametrize("beams", [1, 2])
def test_dropping_a_cache_frees_its_session_at_once(model: nn.Module, beams: int) -> None:
    past = generate(model, num_beams=beams)
    session = session_of(past)
    del past
    assert is_free(session) and not registry.issues_of(session)


def test_a_view_and_a_copy_keep_the_session(model: nn.Module) -> None:
    past = generate(model)
    session, kept = session_of(past), copy.deepcopy(past)
    view = past.layers[0].values[:, :, 3:]
    del past
    assert not session.closed
    del view
    generate(model)
    assert not session.closed
    step(model, kept)
    assert session_of(kept) is session
    del kept
    assert is_free(session)


class Calls(TorchFunctionMode):
    """Notes the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(function)
        return function(*args, **(kwargs or {}))


def test_a_session_that_ends_within_a_trace_is_not_in_its_graph(model: nn.Module) -> None:
    caches = [generate(model)]
    session = session_of(caches[0])

    def drops(x: Tensor) -> Tensor:
        caches.clear()
        return x + 1

    graph = make_fx(drops)(torch.ones(2)).graph
    assert [node.name for node in graph.nodes] == ["x_1", "add", "output"]
    caches.append(generate(model))  # the next call frees it
    assert is_free(session)
    session = session_of(caches[0])
    with Calls() as calls:
        caches.clear()
    assert is_free(session) and not calls.made


def test_a_session_ends_while_the_registry_is_busy(model: nn.Module) -> None:
    """Garbage may be collected anywhere: in the registry itself, or in a thread while another holds its lock."""
    pasts = [generate(model) for _ in range(2)]
    sessions = [session_of(past) for past in pasts]

    def drop() -> None:
        pasts.pop()

    registry.locked(drop)()
    assert not sessions[1].closed

    def drop_in_a_thread() -> None:
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive() and not sessions[0].closed

    registry.locked(drop_in_a_thread)()
    generate(model)
    assert all(map(is_free, sessions))


# specache_fx.release --------------------------------------------------------------------------------------------------


def test_a_released_cache_is_free_and_refused(model: nn.Module) -> None:
    past = generate(model)
    session, kept = session_of(past), copy.deepcopy(past)
    specache_fx.release(past)
    assert is_free(session)
    specache_fx.release(past)
    for each in (past, kept):
        with pytest.raises(CacheHandleError, match="was released"):
            step(model, each)
        with pytest.raises(CacheHandleError, match="was released"):
            specache_fx.stats(each)
    step(model, generate(model))


def test_releasing_one_cache_leaves_others(model: nn.Module) -> None:
    past = generate(model)
    fork, twin, kept = (copy.deepcopy(past) for _ in range(3))
    step(model, twin)
    expected = step(model, twin)
    step(model, fork)
    specache_fx.release(kept)  # a copy: its original is held
    assert not session_of(past).closed
    specache_fx.release(past)
    assert specache_fx.stats(fork).kv_len == 32
    assert torch.equal(step(model, fork), expected)


def test_what_is_no_cache_of_ours_is_not_released() -> None:
    for thing in (None, [torch.zeros(1, 2, 3, 16)], generate(build("plain", 1))):
        with pytest.raises(CacheHandleError, match=r"argument of release\(\) has no KV cache of specache"):
            specache_fx.release(thing)


def exits(code: str) -> str:
    """Standard error of a process that runs code, and ends in time."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr


def test_a_step_of_a_daemon_thread_ends_before_its_operators_go() -> None:
    """And none begins: a thread that would begin one ends quietly."""
    code = """if True:
        import atexit, threading, time
        atexit.register(time.sleep, 1)  # behind all that torch does at exit
        import torch
        from specache_fx import SpecacheConfig
        from specache_fx.runtime import ops
        from specache_fx.runtime.session import registry
        from specache_fx.runtime.layers.layout import LayerShape

        session = registry.open_session(SpecacheConfig(), (LayerShape(1, 64, 64),), torch.float32, torch.device("cpu"))
        begun = threading.Event()

        def steps():
            while True:
                registry.sweep()  # as each call does first
                with session.lock:
                    begun.set()
                    time.sleep(0.3)
                    torch.ops.specache.products

        threading.Thread(target=steps, daemon=True).start()
        begun.wait()
    """
    assert "specache" not in exits(code)


def test_a_handler_at_exit_can_wait_for_a_thread_with_a_cache() -> None:
    """As of a server, which was made before the package was imported."""
    code = """if True:
        import atexit, threading
        stop = threading.Event()
        atexit.register(lambda: (stop.set(), worker.join()))
        from specache_fx.runtime.session import registry

        def works():
            while not stop.wait(0.01):
                registry.sweep()

        worker = threading.Thread(target=works, daemon=True)
        worker.start()
    """
    assert "Traceback" not in exits(code)
