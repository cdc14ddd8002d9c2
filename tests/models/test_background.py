"""`warm="background"`: tokens come from the uncompiled model until the decode graph is made."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.style  # noqa: F401 - it draws a number when it is imported
import torch
from support.cases import nightly_unless
from support.counts import num_graphs
from support.open_sessions import all_end, session_of
from support.threads import at_once
from support.zoo import SMALL, WINDOW, build, left_padded
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from transformers import DynamicCache

import specache_fx
from specache_fx.calls import background, rehearsal
from specache_fx.calls.this_thread import here
from specache_fx.errors import ConfigError
from specache_fx.runners import decode_runner

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
EXACT = {**SMALL, "bits": 16}
SECONDS = 120
MODELS = ("llama", "gemma3_text", "mistral-window", "bloom", "qwen3", "deepseek_v3", "lfm2", "gpt_oss")


def compiled(name: str = "llama", **options: Any) -> Any:
    counters.clear()
    return specache_fx.compile(build(name), warm="background", **{**EXACT, **options})


def are_made(*, fail: bool = False) -> None:
    """Wait for the graph that is under way."""
    background.threads.join()
    alive = (each for each in gc.get_objects() if isinstance(each, background.Background))
    assert any(filter(None, (error for each in alive for error in each._made.values()))) == fail


@pytest.fixture(autouse=True)
def this_thread_traces_nothing() -> Iterator[None]:
    gc.collect()  # models of earlier tests
    before = here.num_traces
    yield
    background.threads.join()
    assert here.num_traces == before


def generate(model: Any, batch: dict[str, Tensor], **given: Any) -> Any:
    given = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **given}
    return model.generate(**batch, max_new_tokens=16, min_new_tokens=16, **given)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    assert found.sequences.equal(expected.sequences)


@pytest.mark.parametrize("name", nightly_unless(lambda name: name in MODELS[:3], MODELS))
def test_a_cache_goes_on_with_the_graph_when_it_is_there(name: str) -> None:
    plain, model = build(name), compiled(name)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, found = (each(ids, use_cache=True) for each in (plain, model))
        for token in range(24):
            if token == 12:
                are_made()
                made = num_graphs()
                assert made
            step = torch.tensor([[token]])
            expected, found = (
                each(step, past_key_values=out.past_key_values)
                for each, out in ((plain, expected), (model, found))
            )
            torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    session = session_of(found.past_key_values)
    assert session.kv_len == 37 + 24
    assert session.metrics.steps >= 12  # those of the graph
    # A latent's cache is laid out anew by its first step in this thread.
    assert num_graphs() - made <= (name == "deepseek_v3")


BATCHES: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "one row": (left_padded((23,)), {}),
    "padded": (left_padded((23, 9)), {}),
    "beams": (left_padded((23,)), {"num_beams": 3, "output_logits": False, "output_scores": False}),
    "inference": (left_padded((23,)), {}),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_generation_is_the_uncompiled_models_and_a_later_one_compiles_nothing(kind: str) -> None:
    batch, given = BATCHES[kind]
    plain, model = build("llama"), compiled()
    with torch.inference_mode(kind == "inference"):
        expected = generate(plain, batch, **given)
        for turn in range(2):
            found = generate(model, batch, **given)
            if kind == "beams":
                assert found.sequences.equal(expected.sequences)
            else:
                assert_same(found, expected)
            are_made()
            if turn == 0:
                made = num_graphs()
                assert made
    assert num_graphs() == made
    assert session_of(found.past_key_values).metrics.steps == 15 or kind == "beams"


def test_numbers_that_are_drawn_beside_a_trace_come_once() -> None:
    model = compiled()

    def draw(count: int) -> list[tuple[int, float]]:
        return [(int(torch.randint(1 << 40, (1,))), random.random()) for _ in range(count)]

    with torch.no_grad():
        past = model(**left_padded((23,)), use_cache=True).past_key_values
        torch.manual_seed(7)
        random.seed(7)
        found = []
        while len(found) < 20 or background.threads.are_running:
            past = model(torch.tensor([[5]]), past_key_values=past).past_key_values
            found += draw(1)
    found += draw(5)
    are_made()
    torch.manual_seed(7)
    random.seed(7)
    assert found == draw(len(found))


@pytest.mark.parametrize("change", ["crop", "repeat", "select"])
def test_a_cache_that_was_changed_is_rehearsed_as_it_is(change: str) -> None:
    plain, model = build("llama"), compiled()
    batch = left_padded((23, 17))
    rows = 2
    with torch.no_grad():
        outs = [each(**batch, use_cache=True) for each in (plain, model)]
        for out in outs:
            if change == "crop":
                out.past_key_values.crop(-16)
            elif change == "repeat":
                out.past_key_values.batch_repeat_interleave(3)
            else:
                out.past_key_values.batch_select_indices(torch.tensor([1]))
        rows = {"crop": 2, "repeat": 6, "select": 1}[change]
        mask = batch["attention_mask"]
        mask = {"crop": mask[:, :-16], "repeat": mask.repeat_interleave(3, 0), "select": mask[1:]}[change]
        for token in range(24):
            if token == 12:
                are_made()
            mask = torch.cat([mask, mask.new_ones(rows, 1)], 1)
            ids = torch.full((rows, 1), 3 + token)
            logits = []
            for i, each in enumerate((plain, model)):
                outs[i] = each(ids, past_key_values=outs[i].past_key_values, attention_mask=mask)
                logits.append(outs[i].logits)
            torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert session_of(outs[1].past_key_values).metrics.steps >= 12


def test_a_window_that_fills_has_its_graph_made_in_the_background() -> None:
    plain, model = build("gemma3_text"), compiled("gemma3_text")
    with torch.no_grad():
        outs = [each(torch.arange(3, 8)[None], use_cache=True) for each in (plain, model)]
        for token in range(WINDOW + 8):
            are_made()
            ids = torch.tensor([[3 + token]])
            outs = [
                each(ids, past_key_values=out.past_key_values)
                for each, out in zip((plain, model), outs, strict=True)
            ]
            torch.testing.assert_close(outs[1].logits, outs[0].logits, atol=1e-4, rtol=1e-4)
    assert session_of(outs[1].past_key_values).metrics.steps > WINDOW // 2


def test_arguments_by_position_and_autocast_have_graphs_too() -> None:
    model = compiled(bits=2)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        past = model(ids, None, None, None, None, None, True).past_key_values
        for _ in range(6):
            past = model(ids[:, :1], None, None, past).past_key_values
            are_made()
    assert session_of(past).metrics.steps >= 4


def test_a_rehearsal_ends_its_session() -> None:
    with all_end():
        model = compiled()
        out = generate(model, left_padded((23,)))
        are_made()
        del out, model
        torch._dynamo.reset()
        gc.collect()


@pytest.mark.parametrize("reason", ["RoPE", "device", "copy", "hook", "watched"])
def test_a_step_that_cannot_be_rehearsed_waits(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    if reason == "RoPE":
        model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    elif reason == "hook":
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    elif reason == "copy":
        monkeypatch.setattr(rehearsal, "copied", lambda cache: 1 // 0)
    before, past = here.num_traces, DynamicCache(config=model.config)
    if reason == "watched":
        usual = past.update
        past.update = lambda key, *args: usual(key * 1.0, *args)  # type: ignore[method-assign]
    with torch.device("cpu") if reason == "device" else contextlib.nullcontext():
        assert_same(
            generate(model, left_padded((23,)), past_key_values=past),
            generate(build("llama"), left_padded((23,))),
        )
    assert here.num_traces > before
    here.num_traces = before


def test_graphs_that_dynamo_forgets_are_made_anew() -> None:
    model = compiled()
    for _ in range(2):
        out = generate(model, left_padded((23,)))
        are_made()
        out = generate(model, left_padded((23,)))
        assert session_of(out.past_key_values).metrics.steps == 15
        torch.compiler.reset()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_makes_graphs_of_its_own(tmp_path: Path) -> None:
    model, batch = compiled(), left_padded((23,))
    generate(model, batch)
    assert background.threads.are_running
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            generate(model, batch)
            background.threads.join()
            out = generate(model, batch)
            (tmp_path / "steps").write_text(str(session_of(out.past_key_values).metrics.steps))
        os._exit(0)
    are_made()
    ends = time.monotonic() + SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    assert (tmp_path / "steps").read_text() == "15"


def test_conversations_in_threads_are_the_uncompiled_models() -> None:
    plain, model = build("llama"), compiled()
    batches = [left_padded(lengths, seed=seed) for seed, lengths in enumerate([(12,), (9,), (20, 7)])]
    expected = [generate(plain, batch) for batch in batches]
    for _ in range(2):
        found = at_once([lambda batch=batch: generate(model, batch) for batch in batches])  # type: ignore[misc]
        for mine, other in zip(found, expected, strict=True):
            assert_same(mine, other)
        are_made()


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler is here.\nTry again")

    monkeypatch.setattr(decode_runner, "build_decode_graph", fail)


def test_a_graph_that_fails_is_said_once_and_tokens_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch)
    plain, model, batch = build("llama"), compiled(), left_padded((23,))
    expected = generate(plain, batch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(generate(model, batch), expected)
            are_made(fail=True)
    said = [record.message for record in caplog.records if "can't be compiled" in record.message]
    assert len(said) == 1 and "no compiler is here. Tokens" in said[0]


def test_strict_raises_what_a_graph_fails_with(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch)
    model, batch = compiled(strict=True), left_padded((23,))
    with torch.no_grad():
        past = model(batch["input_ids"], use_cache=True).past_key_values
        model(batch["input_ids"][:, :1], past_key_values=past)
        are_made(fail=True)
        with pytest.raises(RuntimeError, match="no compiler is here"):
            model(batch["input_ids"][:, :1], past_key_values=past)


def test_warm_up_waits_for_its_graphs() -> None:
    model = compiled()
    before = here.num_traces
    specache_fx.warm_up(model)
    assert here.num_traces > before
    here.num_traces = before
    made = num_graphs()
    generate(model, left_padded((23,)))
    are_made()
    assert num_graphs() == made


@pytest.mark.parametrize("ways", [{"prompts": "traced"}, {"policy": "kivi"}, {"compile_prefill": True}])
def test_graphs_of_prompts_contradict_it(ways: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f'warm="background" contradicts {next(iter(ways))}='):
        specache_fx.compile(build("llama"), warm="background", **ways)


def test_ways_to_warm_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"warm=True is not valid: choose one of 'block', 'background'"):
        specache_fx.compile(build("llama"), warm=True)  # type: ignore[arg-type]


def test_modules_run_in_one_thread_while_another_traces() -> None:
    traced, ended = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            traced.set()
            ended.wait(SECONDS)
            return x + 1

    def trace() -> None:
        graphs.append(fx.symbolic_trace(Waits()))

    graphs: list[fx.GraphModule] = []
    thread = threading.Thread(target=trace)
    thread.start()
    assert traced.wait(SECONDS)
    layer = nn.Linear(2, 2)
    found = nn.Sequential(layer)(torch.ones(1, 2))
    ended.set()
    thread.join()
    torch.testing.assert_close(found, layer(torch.ones(1, 2)))
    assert [node.op for node in graphs[0].graph.nodes] == ["placeholder", "call_function", "output"]


def test_traces_of_other_threads_are_right() -> None:
    net, usual = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Module.__call__
    model = compiled()
    generate(model, left_padded((23,)))
    count = 0
    while background.threads.are_running or not count:
        assert len(fx.symbolic_trace(net).graph.nodes) == 4
        count += 1
    are_made()
    assert nn.Module.__call__ is usual


_ENDS_EARLY = """
import torch, sys
sys.path.insert(0, {tests!r})
from support.zoo import SMALL, WINDOW, build, left_padded
import specache_fx
model = specache_fx.compile(build("llama", num_hidden_layers=8), warm="background", **SMALL)
model.generate(**left_padded((23,)), max_new_tokens=3, do_sample=False)
from specache_fx.calls import background
print(background.threads.are_running)
"""


def test_a_process_ends_while_a_graph_is_made(request: pytest.FixtureRequest) -> None:
    script = _ENDS_EARLY.format(tests=str(request.config.rootpath / "tests"))
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begun < SECONDS / 2
