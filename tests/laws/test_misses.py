"""What is done where the speculative token was wrong (`on_miss`), and what is counted of the guesses."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.cases import nightly_unless
from support.models import Generated, TinyConfig, TinyDecoder, generate
from support.open_sessions import session_of
from support.oracle import OracleDecoder
from support.oracle_records import OracleRun
from torch import Tensor

import specache_fx
from specache_fx.config import SpecacheConfig
from specache_fx.errors import HostMemoryError
from specache_fx.runtime.session.session import Session
from specache_fx.runtime.steps.step_table import SessionC

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CLOSE = {"rtol": 2e-4, "atol": 2e-4}
TOKENS = 12
PROMPT = torch.randint(61, (3, 30), generator=torch.Generator().manual_seed(1))
PADDED = torch.arange(30)[None, :] >= torch.tensor([[0], [9], [3]])
FORCED = torch.randint(61, (3, TOKENS - 1), generator=torch.Generator().manual_seed(2))
# Row 0 is guessed in even steps, row 1 in all but two, row 2 in none.
GUESSED = torch.stack(
    [torch.arange(11) % 2 == 0, torch.arange(11) % 6 != 5, torch.zeros(11, dtype=torch.bool)]
)


def config(**changes: Any) -> SpecacheConfig:
    options = {
        "bits": 1,
        "group_size": 4,
        "residual_length": 4,
        "top_k": 3,
        "lowering": "eager",
        "lookahead": "token",
    }
    return SpecacheConfig(**{**options, "track_hit_rates": "steps", **changes})


def compiled(model: TinyDecoder, chosen: SpecacheConfig) -> Any:
    return torch.compile(model, backend="specache", options=asdict(chosen))


def truth_of(model: TinyDecoder, chosen: SpecacheConfig, guessed: Tensor = GUESSED) -> OracleRun:
    return OracleDecoder(model, chosen).generate(PROMPT, TOKENS, PADDED, FORCED, guessed)


def fed(truth: OracleRun) -> Tensor:
    return torch.stack([step.token for step in truth.steps], dim=1)


def test_rows_that_missed_choose_anew_and_depend_on_no_other_row() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    refetch = config(on_miss="refetch")
    truth = truth_of(model, refetch)
    tokens = fed(truth)
    forward = compiled(model, refetch)
    ours = generate(forward, PROMPT, TOKENS, PADDED, tokens)
    torch.testing.assert_close(ours.logits, truth.logits, **CLOSE)
    missed = [step.refetched for step in truth.steps]
    assert missed[0] is None and sum(rows is not None for rows in missed) == TOKENS - 2
    assert any(rows.any() and not rows.all() for rows in missed if rows is not None)
    for row in range(3):  # alone, a row is refetched in other steps than the batch is
        alone = generate(forward, PROMPT[row : row + 1], TOKENS, PADDED[row : row + 1], tokens[row : row + 1])
        torch.testing.assert_close(alone.logits, ours.logits[row : row + 1], **CLOSE)
        rows = [step.refetched is not None and bool(step.refetched[row]) for step in truth.steps]
        stats = specache_fx.stats(alone.past)
        assert [step.refetched for step in stats.hit_series] == rows
        assert stats.refetched_steps == sum(rows)


def test_right_guesses_are_never_refetched_and_wrong_ones_always() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    always, never = torch.ones_like(GUESSED), torch.zeros_like(GUESSED)
    runs: dict[tuple[str, bool], Generated] = {}
    tokens = {
        right: fed(truth_of(model, config(on_miss="keep"), always if right else never))
        for right in (True, False)
    }
    for on_miss in ("keep", "refetch"):
        torch._dynamo.reset()
        forward = compiled(model, config(on_miss=on_miss))
        for right, forced in tokens.items():
            runs[on_miss, right] = generate(forward, PROMPT, TOKENS, PADDED, forced)
    refetched = {key: specache_fx.stats(run.past).refetched_steps for key, run in runs.items()}
    # The step after the prompt pre-decodes: there was no guess.
    assert refetched == {
        ("keep", True): 0,
        ("keep", False): 0,
        ("refetch", True): 0,
        ("refetch", False): TOKENS - 2,
    }
    assert torch.equal(runs["keep", True].logits, runs["refetch", True].logits)
    assert not torch.allclose(runs["keep", False].logits, runs["refetch", False].logits, **CLOSE)
    # Chosen for the right token, the pairs are nearer to those that it wants itself.
    rates = {key: specache_fx.stats(run.past).attention_hit_rate for key, run in runs.items()}
    kept, anew = rates["keep", False], rates["refetch", False]
    assert kept is not None and anew is not None and kept < anew


def test_recovering_rows_depend_on_no_other_row_and_are_the_oracles() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1, vocab_size=5))  # n-grams come again
    prompt, forced = PROMPT % 5, FORCED % 5
    recover = config(top_k=2)
    oracle = OracleDecoder(model, recover)
    truth = oracle.generate(prompt, TOKENS, PADDED, forced, GUESSED)
    tokens = fed(truth)
    reseeded = [
        step.lane1_token != before.speculative
        for before, step in pairwise(truth.steps)
        if step.lane1_token is not None
    ]
    assert sum(int(rows.sum()) for rows in reseeded) > 3  # a guess was replaced by what followed before
    forward = compiled(model, recover)
    ours = generate(forward, prompt, TOKENS, PADDED, tokens)
    torch.testing.assert_close(ours.logits, truth.logits, **CLOSE)
    for row in range(3):
        alone = generate(forward, prompt[row : row + 1], TOKENS, PADDED[row : row + 1], tokens[row : row + 1])
        torch.testing.assert_close(alone.logits, ours.logits[row : row + 1], **CLOSE)
    torch._dynamo.reset()
    kept = generate(compiled(model, config(top_k=2, on_miss="keep")), prompt, TOKENS, PADDED, tokens)
    assert not torch.allclose(kept.logits, ours.logits, **CLOSE)


def test_runs_of_misses_end_where_the_sequence_has_the_ngram() -> None:
    model, period = TinyDecoder(TinyConfig(num_layers=1)), torch.arange(7).repeat(12)[None]
    prompt, forced = period[:, :40], period[:, 40:]
    longest = {}
    for on_miss in ("recover", "keep"):
        torch._dynamo.reset()
        ours = generate(compiled(model, config(on_miss=on_miss)), prompt, forced.shape[1] + 1, None, forced)
        longest[on_miss] = specache_fx.stats(ours.past).longest_miss_run
    # A random model guesses nothing: after a miss the n-gram does, one token later.
    assert longest["recover"] <= 3 and longest["keep"] > 10


@pytest.mark.parametrize("lookahead", nightly_unless("query".__eq__, ["query", "none"]))
def test_recovering_is_nothing_where_no_token_is_speculated(lookahead: str) -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    runs = []
    for options in ({"on_miss": "recover"}, {"on_miss": "keep"}):
        torch._dynamo.reset()
        forward = compiled(model, config(lookahead=lookahead, **options))
        runs.append(generate(forward, PROMPT, TOKENS, PADDED, FORCED))
    assert torch.equal(runs[0].logits, runs[1].logits)
    assert specache_fx.stats(runs[0].past).longest_miss_run == 0


@pytest.mark.parametrize(
    "dtype", nightly_unless(lambda dtype: dtype == torch.float64, [torch.bfloat16, torch.float64])
)
def test_recovering_does_not_depend_on_the_default_dtype(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[Tensor] = []
    recover = Session.recover
    monkeypatch.setattr(Session, "recover", lambda *args: shares.append(recover(*args)) or shares[-1])
    model = TinyDecoder(TinyConfig(num_layers=1))
    forward = compiled(model, config())
    ours = generate(forward, PROMPT, TOKENS, PADDED, FORCED)
    torch._dynamo.reset()
    expected = list(shares)
    shares.clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        again = generate(forward, PROMPT, TOKENS, PADDED, FORCED)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(again.logits, ours.logits)
    torch.testing.assert_close(shares, expected, rtol=0, atol=0)
    assert len({float(share) for row in shares for share in row}) == 2


def test_refetch_goes_on_after_beams_were_reordered() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    forward = compiled(model, config(on_miss="refetch"))
    oracle = OracleDecoder(model, config(on_miss="refetch"))
    ids, order = PROMPT[:2], torch.tensor([1, 1])
    with torch.no_grad():
        _, past = forward(ids)
        oracle.prefill(ids)
        for token in FORCED[:2].T[:3]:
            _, past = forward(token[:, None], past=past)
            oracle.decode(token)
        past = [(k.index_select(0, order), v.index_select(0, order)) for k, v in past]
        for cache in oracle.caches:
            cache.k, cache.v = cache.k[order], cache.v[order]
        assert oracle.expected is not None and oracle.speculative is not None
        oracle.expected, oracle.speculative = oracle.expected[order], oracle.speculative[order]
        oracle.next_staged = [[layer[row] for row in order] for layer in oracle.next_staged]
        for token in FORCED[:2].T[3:7]:
            logits, past = forward(token[:, None], past=past)
            torch.testing.assert_close(logits[:, -1], oracle.decode(token).logits, **CLOSE)


def test_series_adds_up_to_the_rates() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    truth = truth_of(model, config())
    past = generate(compiled(model, config()), PROMPT, TOKENS, PADDED, fed(truth)).past
    stats = specache_fx.stats(past)
    assert [step.kv_len for step in stats.hit_series] == list(range(31, 31 + TOKENS - 1))
    exact = [step.exact_hit_rate for step in stats.hit_series]
    assert exact == [step.exact_hits.rate for step in truth.steps]
    assert exact[0] is None and stats.exact_hit_rate == pytest.approx(sum(exact[1:]) / (TOKENS - 2))  # type: ignore[arg-type]
    assert [step.topk_hit_rate for step in stats.hit_series] == [step.topk_hits.rate for step in truth.steps]
    attention = [step.attention_hit_rate for step in stats.hit_series]
    assert attention == pytest.approx([step.mass.rate for step in truth.steps], rel=1e-3)
    assert stats.attention_hit_rate == pytest.approx(truth.mass.rate, rel=1e-3)
    assert stats.topk_hit_rate is not None and stats.attention_hit_rate is not None
    assert stats.topk_hit_rate < stats.attention_hit_rate < 1  # what is missed is what weighs little
    torch._dynamo.reset()
    past = generate(compiled(model, config(track_hit_rates=False)), PROMPT, TOKENS, PADDED, fed(truth)).past
    off = specache_fx.stats(past)
    assert off.topk_hit_rate is off.attention_hit_rate is None
    assert off.exact_hit_rate == stats.exact_hit_rate


def test_rates_are_split_by_whether_the_token_was_right() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    keep = config()
    tokens = fed(truth_of(model, keep))
    # A row alone: then a step is right or wrong as a whole, and each needs as many pairs.
    past = generate(compiled(model, keep), PROMPT[:1], TOKENS, PADDED[:1], tokens[:1]).past
    stats = specache_fx.stats(past)
    exact = [step.exact_hit_rate for step in stats.hit_series[1:]]
    assert set(exact) == {0.0, 1.0}
    for was, rate in ((1.0, stats.topk_hit_rate_if_right), (0.0, stats.topk_hit_rate_if_wrong)):
        rates = [step.topk_hit_rate for step in stats.hit_series[1:] if step.exact_hit_rate == was]
        assert rate == pytest.approx(sum(rates) / len(rates))  # type: ignore[arg-type]
    right, wrong = stats.attention_hit_rate_if_right, stats.attention_hit_rate_if_wrong
    assert right is not None and wrong is not None
    assert min(right, wrong) < stats.attention_hit_rate < max(right, wrong)  # type: ignore[operator]
    runs = "".join("-" if rate else "m" for rate in exact).split("-")
    assert stats.longest_miss_run == max(map(len, runs)) > 0


def test_rates_are_whole_where_all_that_is_quantised_is_fetched() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    past = generate(compiled(model, config(top_k=64)), PROMPT, TOKENS, PADDED, FORCED).past
    stats = specache_fx.stats(past)
    assert stats.topk_hit_rate == 1.0 and stats.attention_hit_rate == pytest.approx(1.0, abs=1e-12)
    row_bytes = stats.prefetched_bytes // stats.prefetched_rows
    assert stats.prefetched_bytes == stats.prefetched_rows * row_bytes
    # Staged once, a pair stays: all but the first fetch is of groups that left the window.
    assert stats.reused_bytes == stats.reused_rows * row_bytes > stats.prefetched_bytes


def test_rates_are_none_while_nothing_is_quantised() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    stats = specache_fx.stats(generate(compiled(model, config()), PROMPT[:, :3], 3).past)
    assert stats.topk_hit_rate is stats.attention_hit_rate is None
    assert [(step.topk_hit_rate, step.attention_hit_rate) for step in stats.hit_series] == [(None, None)] * 2


@torch.no_grad()
def test_a_copy_counts_anew_and_steps_that_were_cropped_off_stay_counted() -> None:
    model = TinyDecoder(TinyConfig(num_layers=1))
    forward = compiled(model, config(on_miss="refetch"))
    _, past = forward(PROMPT)
    for token in FORCED.T[:4]:
        _, past = forward(token[:, None], past=past)
    before = specache_fx.stats(past).hit_series
    assert [step.kv_len for step in before] == [31, 32, 33, 34]
    twin = copy.deepcopy(past)
    _, twin = forward(FORCED[:, 4:5], past=twin)
    assert [step.kv_len for step in specache_fx.stats(twin).hit_series] == [35]
    assert specache_fx.stats(past).hit_series == before
    past = [(k[:, :, :32], v[:, :, :32]) for k, v in past]
    _, past = forward(FORCED[:, 5:6], past=past)
    stats = specache_fx.stats(past)
    assert stats.hit_series[:4] == before
    last = stats.hit_series[4]
    # A run of steps begins anew: pre-decode is no refetch, and there was no guess.
    assert (last.kv_len, last.refetched, last.exact_hit_rate, stats.steps) == (33, False, None, 5)


@torch.no_grad()
def test_a_step_that_failed_midway_and_is_repeated_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = compiled(TinyDecoder(TinyConfig(num_layers=2)), config())
    _, past = forward(PROMPT)
    _, past = forward(FORCED[:, :1], past=past)
    session = session_of(past)
    assert session.table.serves
    table = SessionC.from_address(session.state.data_ptr())
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
    real, calls = function(table.attention), []

    def broken(inputs: int) -> int:
        calls.append(inputs)
        return 1 if len(calls) == 2 else real(inputs)

    called = function(broken)  # kept, for C++ has no more than its address
    monkeypatch.setattr(table, "attention", ctypes.cast(called, ctypes.c_void_p).value)
    with pytest.raises(HostMemoryError, match="no memory for a layer's decode step"):
        forward(FORCED[:, 1:2], past=past)
    assert len(calls) == 2
    monkeypatch.undo()
    _, past = forward(FORCED[:, 1:2], past=past)
    stats = specache_fx.stats(past)
    assert [step.kv_len for step in stats.hit_series] == [31, 32]
    assert stats.steps == 2
    # The run of steps begins anew: what the broken one had compared is not counted.
    assert stats.hit_series[1].exact_hit_rate is stats.exact_hit_rate is None
