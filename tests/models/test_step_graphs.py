"""A plain decode step can be captured as a CUDA graph: by a simulated one, over groups that fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tape import TapeRecorder, launches_recorded
from support.triton_mode import DEVICE, needs_triton
from support.zoo import build

import specache_fx
from specache_fx.runtime.native import graph_ops
from specache_fx.runtime.session import session as sessions
from specache_fx.runtime.steps.triton_steps import TritonSteps
from specache_fx.runtime.transfer import KernelTransfer

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="there a GPU captures: tests/models/test_gpu.py"),
]
USUAL = {
    "kernel": "triton",
    "lowering": "eager",
    "group_size": 4,
    "residual_length": 3,
    "top_k": 3,
    "lookahead": "token",
    "reserve": 36,
}
VOCAB = 40


def decode(
    recorder: TapeRecorder | None,
    steps: int,
    monkeypatch: Any,
    padding: int = 0,
    batch: int = 1,
    windows: bool = False,
    layers: int = 1,
    at: Callable[[int, Any], None] = lambda step, model: None,
    hide: Callable[[int, torch.Tensor], torch.Tensor | None] = lambda step, mask: mask,
    **options: Any,
) -> tuple[list[torch.Tensor], Any]:
    """Logits of each step, greedy, and the stats. `at` is called before each step, `hide` changes its mask."""
    torch._dynamo.reset()
    monkeypatch.setattr(sessions, "recorder_of", lambda device: recorder)
    # As on a GPU: kernels copy, whichever attends, and nothing is C++.
    monkeypatch.setattr(sessions, "choose_transfer", lambda *given, **_: KernelTransfer(*given))
    monkeypatch.setattr(graph_ops, "load", lambda: None)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "head_dim": 8}
    plain = build("plain-window", sliding_window=8, **sizes) if windows else build("plain", layers, **sizes)
    compiled = specache_fx.compile(plain, **(USUAL | options))
    ids = torch.randint(1, VOCAB, (batch, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    given = {"attention_mask": mask} if padding else {}
    with torch.no_grad(), launches_recorded():
        out = compiled(ids, use_cache=True, **given)
        logits = [out.logits[:, -1]]
        for step in range(steps):
            at(step, plain)
            token = logits[-1].argmax(-1, keepdim=True)
            if padding:
                mask = torch.cat([mask, mask[:, -1:]], 1)
                shown = hide(step, mask)
                given = {} if shown is None else {"attention_mask": shown}
            out = compiled(token, past_key_values=out.past_key_values, use_cache=True, **given)
            logits.append(out.logits[:, -1])
    stats = specache_fx.stats(out.past_key_values)
    specache_fx.release(out.past_key_values)
    return logits, stats


FORMS: dict[str, dict[str, Any]] = {
    "two layers": {"layers": 2},
    "1 bit, padding": {"bits": 1, "padding": 3, "reserve": 25},
    "KIVI, query": {"quantizer": "kivi", "lookahead": "query"},
    "keep, no rates": {"on_miss": "keep", "track_hit_rates": False},
    "refetch": {"on_miss": "refetch"},
    "windows": {"windows": True},
    "codes alone": {"policy": "kivi"},
}
BY_ATEN: dict[str, dict[str, Any]] = {
    "same step, padding": {"lookahead": "none", "padding": 3},
    "same step, 1 bit": {"lookahead": "none", "bits": 1, "kernel": "reference"},
    "keys alone": {"policy": "kcache", "lookahead": "none", "kernel": "reference", "padding": 3},
    "exact": {"bits": 16, "kernel": "reference"},
    "sinks, windows": {"sink_tokens": 2, "windows": True},
    "NUQ, max, keep": {"quantizer": "nuq", "aggregation": "max", "on_miss": "keep", "kernel": "reference"},
    "corrected, padding": {"key_share": 0.03, "value_share": 0.0, "padding": 3},
    "codes alone, NUQ": {"policy": "kivi", "quantizer": "nuq", "kernel": "reference"},
}

# One form a day, all at night: the interpreter takes a second a step.
DAILY = ("1 bit, padding",)
EACH = [
    pytest.param(form, id=name, marks=() if name in DAILY else pytest.mark.nightly)
    for name, form in (FORMS | BY_ATEN).items()
]


@pytest.mark.parametrize("form", EACH)
def test_plain_steps_launch_the_same_and_replayed_ones_give_their_bits(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = TapeRecorder(again=True)
    ran, counted = decode(runs, 10, monkeypatch, **form)
    assert counted.replayed_steps >= 3
    assert not runs.found
    recorder = TapeRecorder()
    replayed, stats = decode(recorder, 10, monkeypatch, **form)
    assert stats.replayed_steps == counted.replayed_steps
    assert len(recorder.tapes) == 1 + ("reserve" in form)  # its arena moves on the way
    assert all(torch.equal(x, y) for x, y in zip(ran, replayed, strict=True))
    assert stats.exact_hit_rate == counted.exact_hit_rate
    assert stats.topk_hit_rate == counted.topk_hit_rate
    assert stats.prefetched_rows == counted.prefetched_rows
    if form not in BY_ATEN.values():
        return
    plain, usual = decode(None, 10, monkeypatch, **form)  # operator by operator
    assert usual.replayed_steps == 0
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(plain, replayed, strict=True))
    assert stats.topk_hit_rate == usual.topk_hit_rate
    assert stats.prefetched_rows == usual.prefetched_rows
    assert stats.read_keys == usual.read_keys == stats.read_values
    assert bool(stats.read_keys) == ("key_share" in form)


@pytest.mark.parametrize(
    ("shows", "options"),
    [
        (False, {"on_miss": "refetch"}),
        pytest.param(True, {"policy": "kivi", "bits": 4}, marks=pytest.mark.nightly),
        pytest.param(True, {"bits": 16}, marks=pytest.mark.nightly),
        pytest.param(False, {"lookahead": "none"}, marks=pytest.mark.nightly),
        pytest.param(False, {"kernel": "triton"}, marks=pytest.mark.nightly),
    ],
)
def test_a_mask_that_changes_between_two_groups_is_obeyed_at_once(
    shows: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hide(step: int, mask: torch.Tensor) -> torch.Tensor | None:
        """Another mask at steps 3 and 7, and from 11 on; of the token itself as well. None at step 8, where it shows.

        Groups fill at steps 1, 5, 9 and 13.
        """
        if step == 8 and shows:
            return None
        if step in (3, 7) or step >= 11:
            mask = mask.clone()
            mask[0, [1, 2, 8, 20, 23]] = int(shows)
            mask[1, -1] = int(step > 10)
        return mask

    form = {"padding": 3, "batch": 2, "hide": hide, "kernel": "reference", **options}
    replayed, stats = decode(TapeRecorder(), 15, monkeypatch, **form)
    assert stats.replayed_steps >= 4
    compared, usual = decode(None, 15, monkeypatch, **(form | {"kernel": "reference"}))
    assert usual.replayed_steps == 0
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(compared, replayed, strict=True))


def test_a_weight_that_moves_is_read_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(step: int, plain: Any) -> None:
        if step == 4:
            plain.norm.weight.data = plain.norm.weight.data * torch.linspace(0.5, 2, 32)

    form = {"lookahead": "query", "track_hit_rates": False}
    ran, _ = decode(None, 7, monkeypatch, at=at, **form)
    recorder = TapeRecorder()
    replayed, _ = decode(recorder, 7, monkeypatch, at=at, **form)
    assert len(recorder.tapes) == 2
    assert all(torch.equal(x, y) for x, y in zip(ran, replayed, strict=True))


def attends(change: Callable[[TritonSteps, torch.Tensor], torch.Tensor]) -> Any:
    """`TritonSteps._attend`, and then a mistake."""
    usual = TritonSteps._attend

    def attend(self: TritonSteps, *given: Any) -> torch.Tensor:
        return change(self, usual(self, *given))

    return attend


def scales_by_a_length(steps: TritonSteps, out: torch.Tensor) -> torch.Tensor:
    return out * (1 + steps._caches[0].kv_len * 1e-3)


def reads_a_tensor_that_moves(steps: TritonSteps, out: torch.Tensor) -> torch.Tensor:
    return out * (1 + steps.__dict__["anew"])


def keeps_a_sum(steps: TritonSteps, out: torch.Tensor) -> torch.Tensor:
    hidden = steps.__dict__.setdefault("hidden", [0.0])
    hidden[0] += 0.01
    out.numpy()[...] += hidden[0]
    return out


def tells_anew(usual: Any) -> Any:
    def write_facts(self: TritonSteps, *told: Any) -> None:
        usual(self, *told)
        self.__dict__["anew"] = torch.full((1,), 1e-3 * self._caches[0].kv_len)

    return write_facts


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", [scales_by_a_length, reads_a_tensor_that_moves, keeps_a_sum])
def test_a_mistake_is_found(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonSteps, "_attend", attends(mistake))
    monkeypatch.setattr(TritonSteps, "write_facts", tells_anew(TritonSteps.write_facts))
    form = {"lookahead": "query", "track_hit_rates": False}
    recorder = TapeRecorder(again=True)
    decode(recorder, 4, monkeypatch, **form)
    ran, _ = decode(None, 5, monkeypatch, **form)
    replayed, stats = decode(TapeRecorder(), 5, monkeypatch, **form)
    assert stats.replayed_steps
    assert not all(torch.equal(x, y) for x, y in zip(ran, replayed, strict=True))
    assert bool(recorder.found) == (mistake is not keeps_a_sum)  # no operator shows that one


def test_a_step_that_waits_for_the_device_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def waits(steps: TritonSteps, out: torch.Tensor) -> torch.Tensor:
        return out * float(out.isfinite().all())

    monkeypatch.setattr(TritonSteps, "_attend", attends(waits))
    ran, _ = decode(None, 4, monkeypatch)
    tried, stats = decode(TapeRecorder(), 4, monkeypatch)
    assert stats.replayed_steps == 0
    assert "can't be captured as a CUDA graph, and runs launch by launch: sync: aten::" in caplog.text
    assert all(torch.equal(x, y) for x, y in zip(ran, tried, strict=True))
