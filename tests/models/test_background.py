"""`warm="background"`: tokens come from the uncompiled model until the decode graph is made."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.open_sessions import session_of
from support.threads import at_once
from support.zoo import SMALL, build, left_padded
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import specache_fx
from specache_fx import background, decode_runner
from specache_fx.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
EXACT = {**SMALL, "bits": 16}
SECONDS = 120
MODELS = ("llama", "gemma3_text", "mistral-window", "bloom", "qwen3", "deepseek_v3", "lfm2", "gpt_oss")


def compiled(name: str = "llama", **options: Any) -> Any:
    counters.clear()
    return specache_fx.compile(build(name), warm="background", **{**EXACT, **options})


def are_made() -> None:
    """Wait for the graphs that are under way."""
    for thread in list(background._threads):
        thread.join(SECONDS)
    assert not background._threads


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
                made = counters["stats"]["unique_graphs"]
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
    assert counters["stats"]["unique_graphs"] - made <= (name == "deepseek_v3")


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
                made = counters["stats"]["unique_graphs"]
                assert made
    assert counters["stats"]["unique_graphs"] == made


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
            are_made()
    said = [record.message for record in caplog.records if "can't be compiled" in record.message]
    assert len(said) == 1 and "no compiler is here. Tokens" in said[0]


def test_strict_raises_what_a_graph_fails_with(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch)
    model, batch = compiled(strict=True), left_padded((23,))
    with torch.no_grad():
        past = model(batch["input_ids"], use_cache=True).past_key_values
        model(batch["input_ids"][:, :1], past_key_values=past)
        are_made()
        with pytest.raises(RuntimeError, match="no compiler is here"):
            model(batch["input_ids"][:, :1], past_key_values=past)


def test_warm_up_waits_for_its_graphs() -> None:
    model = compiled()
    specache_fx.warm_up(model)
    assert not background._threads
    made = counters["stats"]["unique_graphs"]
    generate(model, left_padded((23,)))
    are_made()
    assert counters["stats"]["unique_graphs"] == made


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
        with background._shared_interpreter():
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


_ENDS_EARLY = """
import torch, sys
sys.path.insert(0, {tests!r})
from support.zoo import SMALL, build, left_padded
import specache_fx
model = specache_fx.compile(build("llama", num_hidden_layers=8), warm="background", **SMALL)
model.generate(**left_padded((23,)), max_new_tokens=3, do_sample=False)
from specache_fx import background
print(len(background._threads))
"""


def test_a_process_ends_while_a_graph_is_made(request: pytest.FixtureRequest) -> None:
    script = _ENDS_EARLY.format(tests=str(request.config.rootpath / "tests"))
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begun < SECONDS / 2
