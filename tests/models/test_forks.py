"""Copies of a cache, caches of other calls, generations in threads: each equals the uncompiled model's."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.threads import at_once
from support.zoo import SMALL, build, left_padded
from torch import Tensor, nn

import specache_fx
from specache_fx import CacheHandleError, SpecacheConfig
from specache_fx.report import progress
from specache_fx.runtime.handles import handle
from specache_fx.runtime.handles.handle_tensor import plain
from specache_fx.runtime.layers.layer_cache import LayerCache
from specache_fx.runtime.layers.layout import LayerShape
from specache_fx.runtime.quant.identity import IdentityQuantizer
from specache_fx.runtime.quant.keys_only import KeysOnlyQuantizer
from specache_fx.runtime.quant.turboquant import TurboQuantizer
from specache_fx.runtime.session import registry
from specache_fx.runtime.session.give_back import give_back

# All are exact; by day the one that quantises, fetches, and keeps a layer and sinks.
EVERY: dict[str, dict[str, Any]] = {
    "bits=16": {"bits": 16},
    "top_k": {"bits": 1, "lookahead": "token", "top_k": 512, "resident_layers": 1, "sink_tokens": 3},
    "kcache": {"policy": "kcache", "top_k": 512, "resident_layers": 1},
}
ONE = {"input_ids": torch.tensor([[5, 9, 17, 5, 9, 33, 5, 9, 17, 40, 2, 5, 9]])}
PADDED = left_padded()


@pytest.fixture(scope="module", params=nightly_unless("top_k".__eq__, EVERY), ids=str)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model, and the same one compiled."""
    torch._dynamo.reset()
    compiled = build("plain")
    compiled.compile(backend="specache", options={**SMALL, "lowering": "eager", **EVERY[request.param]})
    return build("plain"), compiled


def greedy(model: Any, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    return model.generate(**inputs, do_sample=False, **{"max_new_tokens": 30, **kwargs})


def two_turns(model: Any) -> Tensor:
    first = greedy(model, PADDED, return_dict_in_generate=True)
    more = torch.cat([first.sequences, torch.tensor([[7, 8, 9]]).expand(3, -1)], 1)
    mask = torch.cat([PADDED["attention_mask"], torch.ones(3, more.shape[1] - 12, dtype=torch.long)], 1)
    return greedy(model, {"input_ids": more, "attention_mask": mask}, past_key_values=first.past_key_values)


# Copies of a cache ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def decode(model: Any, past: Any, tokens: list[int], batch: int = 3) -> list[Tensor]:
    return [
        model(torch.full((batch, 1), token), past_key_values=past, use_cache=True).logits for token in tokens
    ]


@torch.no_grad()
def prompt(model: Any, tokens: int = 21) -> Any:
    ids = torch.arange(3 * tokens).view(3, tokens) * 7 % 97
    return model(ids, use_cache=True).past_key_values


def close(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=2e-5) for a, b in zip(mine, theirs, strict=True))


def fork_and_go_on_with_both(model: Any) -> list[Tensor]:
    first = prompt(model)
    decode(model, first, [3, 4])
    second = copy.deepcopy(first)
    logits = decode(model, second, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    third = copy.deepcopy(second)
    logits += (
        decode(model, first, [15, 16, 17]) + decode(model, third, [18, 19]) + decode(model, second, [20])
    )
    return logits


def fork_twice_after_the_original_went_on(model: Any) -> list[Tensor]:
    first = prompt(model)
    copies = copy.deepcopy(first), copy.deepcopy(first)
    logits = decode(model, first, list(range(12)))
    for each in copies:
        logits += decode(model, each, [30, 31])
    return logits


def fork_whose_original_is_gone(model: Any) -> list[Tensor]:
    first = prompt(model)
    copies = copy.deepcopy(first), copy.deepcopy(first)
    del first
    return decode(model, copies[0], list(range(12))) + decode(model, copies[1], [30, 31])


def rows_selected(model: Any) -> list[Tensor]:
    past = prompt(model)
    decode(model, past, [3, 4, 5])
    past.batch_select_indices(torch.tensor([2, 0]))
    return decode(model, past, [6, 7, 8], batch=2)


def rows_repeated(model: Any) -> list[Tensor]:
    past = prompt(model)
    past.batch_repeat_interleave(2)
    logits = decode(model, past, [6, 7, 8], batch=6)
    past.reorder_cache(torch.tensor([5, 0, 0, 3, 1, 2]))
    return logits + decode(model, past, [9, 10], batch=6)


def turns_from_a_crop_and_from_its_copy(model: Any) -> list[Tensor]:
    first = prompt(model, tokens=40)
    decode(model, first, [3, 4, 5])
    second = copy.deepcopy(first)
    first.crop(-20)
    logits = decode(model, first, [6, 7, 8])
    logits += decode(model, second, [9, 10])
    second.crop(-3)
    return logits + decode(model, second, [11]) + decode(model, first, [12])


def crops_of_copies_whose_original_is_gone(model: Any) -> list[Tensor]:
    first = prompt(model, tokens=40)
    copies = copy.deepcopy(first), copy.deepcopy(first)
    del first
    copies[0].crop(-20)
    return decode(model, copies[0], [6, 7]) + decode(model, copies[1], [8, 9]) + decode(model, copies[0], [5])


FORKS = [
    fork_and_go_on_with_both,
    fork_twice_after_the_original_went_on,
    fork_whose_original_is_gone,
    turns_from_a_crop_and_from_its_copy,
    crops_of_copies_whose_original_is_gone,
    rows_selected,
    rows_repeated,
]


@pytest.mark.parametrize("use", FORKS, ids=lambda use: use.__name__)
def test_copies_of_a_cache_are_caches_of_their_own(
    models: tuple[nn.Module, nn.Module], use: Callable[[Any], list[Tensor]]
) -> None:
    plain, compiled = models
    assert close(use(compiled), use(plain))


def test_rows_of_an_earlier_length_are_refused(models: tuple[Any, Any]) -> None:
    """Rows that were moved could be tokens that were cut off: only the whole length tells them apart."""
    past = prompt(models[1], tokens=40)
    decode(models[1], past, [3])
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:2, :, 16:].clone(), layer.values[:2, :, 16:].clone()
    with pytest.raises(CacheHandleError, match=r"holds rows \[1, 2\]|come from several caches"):
        decode(models[1], past, [4], batch=2)


# Caches of other calls ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@torch.no_grad()
def test_a_cache_of_the_uncompiled_model_is_taken_over(models: tuple[Any, Any]) -> None:
    plain, compiled = models
    mask = PADDED["attention_mask"]
    theirs = plain(**PADDED, use_cache=True).past_key_values
    mine = copy.deepcopy(theirs)
    for length in (13, 14, 15, 20, 21):
        mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)
        ids = torch.full((3, length - theirs.get_seq_length()), length)
        expected = plain(ids, attention_mask=mask, past_key_values=theirs, use_cache=True).logits
        logits = compiled(ids, attention_mask=mask, past_key_values=mine, use_cache=True).logits
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    assert specache_fx.stats(mine).kv_len == 21


@torch.no_grad()
def test_a_cache_of_the_uncompiled_model_goes_on_with_several_tokens(models: tuple[Any, Any]) -> None:
    plain, compiled = models
    theirs = prompt(plain)
    mine = copy.deepcopy(theirs)
    ids = torch.arange(12).view(3, 4)
    expected = [plain(ids, past_key_values=theirs, use_cache=True).logits, *decode(plain, theirs, [1, 2, 3])]
    logits = [compiled(ids, past_key_values=mine, use_cache=True).logits, *decode(compiled, mine, [1, 2, 3])]
    assert close(logits, expected)


# Threads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_generations_in_threads_do_not_mix(count: int) -> None:
    """From the first call on: two of them compile the model while the others wait, or run what is there."""
    torch._dynamo.reset()
    plain, compiled = build("plain", 1), build("plain", 1)
    compiled.compile(backend="specache", options={**SMALL, "bits": 16})
    jobs: list[Callable[[Any], Tensor]] = [
        lambda model: greedy(model, PADDED),
        two_turns,
        lambda model: greedy(model, PADDED, num_beams=2),
        lambda model: greedy(model, ONE),
    ][:count]
    expected = [job(plain) for job in jobs]
    found = at_once([partial(job, compiled) for job in jobs])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# Steps that fail ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["quantize_more_keys", "quantize_value"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_step_that_failed_in_a_layer_can_be_repeated(
    models: tuple[Any, Any], method: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantiser runs out of memory once, in the first layer or the second, for keys or for values."""
    plain, compiled = models
    theirs, mine = prompt(plain), prompt(compiled)
    expected = decode(plain, theirs, list(range(20)))
    logits = decode(compiled, mine, [0])
    for quantizer in (TurboQuantizer, IdentityQuantizer, KeysOnlyQuantizer):
        if quantizer is not KeysOnlyQuantizer or method in vars(quantizer):  # else it has IdentityQuantizer's
            fail_once(monkeypatch, quantizer, method, nth)
    failures = 0
    for token in range(1, 20):
        try:
            logits += decode(compiled, mine, [token])
        except torch.OutOfMemoryError:
            failures += 1
            logits += decode(compiled, mine, [token])
    assert failures == 1 and close(logits, expected)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_reordering_that_failed_is_never_wrong(
    models: tuple[Any, Any], nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = prompt(models[1])
    past.reorder_cache(torch.tensor([2, 0, 0]))
    fail_once(monkeypatch, LayerCache, "reorder", nth)
    with pytest.raises(torch.OutOfMemoryError):
        decode(models[1], past, [3])
    with pytest.raises(CacheHandleError, match="session that has ended"):
        decode(models[1], past, [3])


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 4], ids=["step", "turn"])
@pytest.mark.parametrize("models", ["top_k"], indirect=True)  # the others have no codes
def test_codes_that_failed_to_be_made_anew_are_never_wrong(
    models: tuple[Any, Any], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call shows padding, and a layer's pairs have no codes when memory runs out."""
    model, ids = models[1], torch.arange(3 * 44).view(3, 44) * 7 % 97
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    past = model(ids[:, :40], attention_mask=mask[:, :40], use_cache=True).past_key_values
    call = {"past_key_values": past, "attention_mask": torch.ones_like(ids[:, : 40 + tokens])}
    with monkeypatch.context() as patch:
        fail_once(patch, LayerCache, "_quantize", 1)
        with pytest.raises(torch.OutOfMemoryError):
            model(ids[:, 40 : 40 + tokens], **call)
    with pytest.raises(CacheHandleError, match="a call that failed midway"):
        model(ids[:, 40 : 40 + tokens], **call)


def test_a_step_that_failed_after_a_reordering_can_be_repeated(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiled = models
    theirs, mine = prompt(plain), prompt(compiled)
    for past in (theirs, mine):
        past.reorder_cache(torch.tensor([2, 0, 0]))
    fail_once(monkeypatch, LayerCache, "append", 2)
    with pytest.raises(torch.OutOfMemoryError):
        decode(compiled, mine, [3])
    assert close(decode(compiled, mine, [3, 4, 5]), decode(plain, theirs, [3, 4, 5]))


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, nth: int) -> None:
    right, calls = getattr(owner, method), itertools.count(1)

    def fails(self: Any, *args: Any) -> Any:
        if next(calls) == nth:
            raise torch.OutOfMemoryError("none left")
        return right(self, *args)

    monkeypatch.setattr(owner, method, fails)


# Other processes ------------------------------------------------------------------------------------------------------


def in_child(act: Callable[[], None]) -> int:
    """Run something in a forked process; returns its id. It exits with 0 if nothing is raised."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        torch.set_num_threads(1)  # OpenMP's threads don't survive a fork
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(2)
    return child


def end(child: int) -> None:
    assert os.waitpid(child, 0)[1] == 0


def test_a_cache_of_another_process_is_refused(models: tuple[Any, Any]) -> None:
    original = prompt(models[1])
    saved = copy.deepcopy(original)

    def uses() -> None:
        for past in (original, saved):
            with pytest.raises(CacheHandleError, match="inherited by a forked process"):
                decode(models[1], past, [3])
        for use in (specache_fx.stats, specache_fx.release):
            with pytest.raises(CacheHandleError, match="Another process"):
                use(original)

    end(in_child(uses))


@pytest.mark.parametrize("host", ["disk", "memory"])
def test_a_forked_process_leaves_its_parents_caches_alone(host: str, tmp_path: Path) -> None:
    """Of a mapped file both would see what one writes. The child has caches of its own, and those that were saved."""
    torch._dynamo.reset()
    model = build("plain")
    model.compile(backend="specache", options={**SMALL, "bits": 2, "host": host})
    expected = decode(model, prompt(model), list(range(40)))
    past = prompt(model)
    logits = decode(model, past, list(range(20)))
    specache_fx.save(past, tmp_path)

    def goes_on() -> None:
        nonlocal past
        with pytest.raises(CacheHandleError, match="inherited by a forked process"):
            decode(model, past, [7])
        assert close(decode(model, prompt(model), list(range(20))), expected[:20])
        assert close(decode(model, specache_fx.load(model, tmp_path), list(range(20, 40))), expected[20:])
        past = None  # frees nothing of the parent's
        gc.collect()

    end(in_child(goes_on))
    assert close(logits + decode(model, past, list(range(20, 40))), expected)


def test_a_forked_process_waits_for_no_thread_of_its_parent(models: tuple[Any, Any]) -> None:
    """Another thread had the registry, and a step under way, when the process was forked."""
    expected, past = decode(models[1], prompt(models[1]), [3, 4]), prompt(models[1])
    session, held, done = registry.find(past.layers[0].keys), threading.Event(), threading.Event()
    assert session is not None

    def holds() -> None:
        with session.lock, registry._lock, progress._lock:
            held.set()
            done.wait(60)

    def goes_on() -> None:
        nonlocal past
        past = None
        assert close(decode(models[1], prompt(models[1]), [3, 4]), expected)
        with progress.announced("nothing", "inductor"):
            pass

    thread = threading.Thread(target=holds)
    thread.start()
    held.wait()
    child = in_child(goes_on)
    done.set()
    thread.join()
    end(child)


def test_handles_of_another_process_are_refused_where_a_graph_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session of this process has the number that they carry, and fewer layers."""
    cpu = torch.device("cpu")
    mine = registry.open_session(SpecacheConfig(), (LayerShape(1, 64, 64),), torch.float32, cpu)
    pair = torch.randn(1, 1, 5, 64)
    mine.store(0, pair, pair, None)
    mine.advance(5, decoded=False)
    code = handle.first_code(plain(registry.issue(mine)[0]))
    assert code is not None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(handle._process, "number", handle._process.number ^ 1)
        theirs = handle.issue(code.session, [(1, 64)] * 4, 1, 5, torch.float32, cpu)
    with pytest.raises(CacheHandleError, match="made in another process"):
        give_back(theirs)
    mine.close()
